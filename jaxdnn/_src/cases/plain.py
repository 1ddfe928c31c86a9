"""Every op in plain JAX, as a good programmer writes it who does not have this library: what `jaxdnn bench ops` times.

Each function takes the arrays of its op's example in a manifest, in their order, and computes what that call computes.
`lax` has most of it; a backward pass is the derivative that JAX finds of the forward pass. Statistics are taken in two
passes, as `jnp.var` takes them. Random bits are `jax.random`'s, which are others than ours.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Function = Callable[..., Any]
EPS = 1e-5
_NHWC = ("NHWC", "HWIO", "NHWC")


def _conv(x: Array, w: Array, stride: int = 1, groups: int = 1, pad: int = 1) -> Array:
    return lax.conv_general_dilated(
        x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=_NHWC, feature_group_count=groups
    )


def _conv_dgrad(dy: Array, w: Array) -> Array:
    x = jnp.zeros((*dy.shape[:3], w.shape[2]), dy.dtype)
    return jax.vjp(lambda x: _conv(x, w), x)[1](dy)[0]


def _conv_wgrad(x: Array, dy: Array) -> Array:
    w = jnp.zeros((3, 3, x.shape[3], dy.shape[3]), x.dtype)
    return jax.vjp(lambda w: _conv(x, w), w)[1](dy)[0]


def _conv_transpose(x: Array, w: Array) -> Array:
    return lax.conv_transpose(x, w, (2, 2), "VALID", dimension_numbers=_NHWC, transpose_kernel=True)


def _dropout(x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.5, x.shape), x / 0.5, jnp.zeros_like(x))


# ---- normalisation ---------------------------------------------------------------------------------------------------


def _normalized(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """The result, mean, variance and inverse deviation along these axes, which stay."""
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.var(x, axes, keepdims=True)
    rstd = lax.rsqrt(variance + EPS)
    return (x - mean) * rstd, mean, variance, rstd


def _by_channel(v: Array) -> Array:
    return v.reshape(1, 1, 1, -1)


def _batch_norm(x: Array, scale: Array, bias: Array) -> tuple[Array, ...]:
    y, mean, variance, rstd = _normalized(x, (0, 1, 2))
    m = x.size // x.shape[-1]
    y = y * _by_channel(scale) + _by_channel(bias)
    return y, mean.ravel(), rstd.ravel(), mean.ravel(), variance.ravel() * (m / (m - 1))


def _batch_norm_inference(x: Array, mean: Array, variance: Array) -> Array:
    return (x - _by_channel(mean)) * lax.rsqrt(_by_channel(variance) + EPS)


def _layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    return _normalized(x, (3,))[0] * _by_channel(scale) + _by_channel(bias)


def _rms_norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * _by_channel(scale)


def _adaptive_layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    per_image = lambda v: v[:, None, None, :]
    return _normalized(x, (3,))[0] * per_image(scale) + per_image(bias)


def _instance_norm(x: Array, scale: Array) -> Array:
    return _normalized(x, (1, 2))[0] * _by_channel(scale)


def _group_norm(x: Array, scale: Array, bias: Array, groups: int = 8) -> Array:
    y = _normalized(x.reshape(*x.shape[:3], groups, -1), (1, 2, 4))[0].reshape(x.shape)
    return y * _by_channel(scale) + _by_channel(bias)


def _norm_dgrad(forward: Function) -> Function:
    """The gradients in x and in scale and bias, which are 1 and 0."""

    def backward(dy: Array, x: Array) -> Any:
        return jax.vjp(forward, x, *(jnp.full(x.shape[-1:], value, x.dtype) for value in (1, 0)))[1](dy)

    return backward


def _adaptive_layer_norm_dgrad(dy: Array, x: Array, scale: Array) -> Any:
    return jax.vjp(_adaptive_layer_norm, x, scale, jnp.zeros_like(scale))[1](dy)


def _bn_finalize(total: Array, squares: Array, m: int = 2048) -> tuple[Array, ...]:
    mean = total / m
    variance = jnp.maximum(squares / m - mean * mean, 0)
    rstd = lax.rsqrt(variance + EPS)
    return rstd, -mean * rstd, mean, rstd, mean, variance * (m / (m - 1))


def _bn_finalize_inference(mean: Array, variance: Array) -> tuple[Array, Array]:
    factor = lax.rsqrt(variance + EPS)
    return factor, -mean * factor


def _dbn_weight(dy: Array, x: Array, mean: Array, rstd: Array) -> tuple[Array, ...]:
    m = x.size // x.shape[-1]
    dscale = jnp.sum(dy * (x - _by_channel(mean)), (0, 1, 2)) * rstd
    dbias = jnp.sum(dy, (0, 1, 2))
    factor_x = -rstd * rstd * dscale / m
    return dscale, dbias, rstd, factor_x, -rstd * dbias / m - mean * factor_x


def _lrn(x: Array) -> Array:
    sums = lax.reduce_window(x * x, np.float32(0), lax.add, (1, 1, 1, 5), (1,) * 4, ((0, 0),) * 3 + ((2, 2),))
    return x * (2 + 1e-4 / 5 * sums) ** -0.75


def _divisive_norm(x: Array) -> Array:
    around = ((0, 0), (2, 2), (2, 2), (0, 0))
    sums = lax.reduce_window(x * x, np.float32(0), lax.add, (1, 5, 5, 1), (1,) * 4, around)
    return x * (2 + 1e-4 / 25 * sums) ** -0.75


def _divisive_norm_dgrad(dy: Array, x: Array) -> tuple[Array, Array]:
    """In x and in means of 0, which are subtracted within the square alone."""

    def forward(x: Array, means: Array) -> Array:
        around = ((0, 0), (2, 2), (2, 2), (0, 0))
        d = x - means
        sums = lax.reduce_window(d * d, np.float32(0), lax.add, (1, 5, 5, 1), (1,) * 4, around)
        return x * (2 + 1e-4 / 25 * sums) ** -0.75

    return jax.vjp(forward, x, jnp.zeros_like(x))[1](dy)


# ---- windows, places, rows -------------------------------------------------------------------------------------------


def _pool(x: Array, n: int = 2, stride: int = 2, pad: int = 0) -> Array:
    pads = ((0, 0), (pad, pad), (pad, pad), (0, 0))
    return lax.reduce_window(x, np.float32(-np.inf), lax.max, (1, n, n, 1), (1, stride, stride, 1), pads)


def _average(x: Array, n: int = 2, stride: int = 2, pad: int = 0) -> Array:
    pads = ((0, 0), (pad, pad), (pad, pad), (0, 0))
    return lax.reduce_window(x, np.float32(0), lax.add, (1, n, n, 1), (1, stride, stride, 1), pads) / n**2


def _unpool(y: Array, indices: Array) -> Array:
    n, h, w, c = y.shape
    empty = jnp.zeros((n, 4 * h * w, c), y.dtype)
    batch, channel = jnp.arange(n)[:, None, None], jnp.arange(c)[None, None]
    return empty.at[batch, indices.reshape(n, -1, c), channel].set(y.reshape(n, -1, c)).reshape(n, 2 * h, 2 * w, c)


def _resample(x: Array, factor: float = 2) -> Array:
    n, h, w, c = x.shape
    return jax.image.resize(x, (n, int(h * factor), int(w * factor), c), "linear", antialias=False)


def _resample_dgrad(dy: Array) -> Array:
    n, h, w, c = dy.shape
    return jax.vjp(_resample, jnp.zeros((n, h // 2, w // 2, c), dy.dtype))[1](dy)[0]


def _pixel_shuffle(x: Array) -> Array:
    n, h, w, c = x.shape
    apart = jnp.transpose(x.reshape(n, h, w, c // 4, 2, 2), (0, 1, 4, 2, 5, 3))
    return apart.reshape(n, 2 * h, 2 * w, c // 4)


def _pixel_unshuffle(x: Array) -> Array:
    n, h, w, c = x.shape
    apart = jnp.transpose(x.reshape(n, h // 2, 2, w // 2, 2, c), (0, 1, 3, 5, 2, 4))
    return apart.reshape(n, h // 2, w // 2, 4 * c)


def _grid_sample(x: Array, grid: Array) -> Array:
    """Bilinear, with coordinates reflected at the edges."""
    batch = jnp.arange(len(x))[:, None, None]

    def place(g: Array, size: int) -> tuple[Array, Array]:
        p = ((g + 1) * size - 1) / 2
        p = (p + 0.5) % (2 * size)
        p = jnp.clip(jnp.where(p > size, 2 * size - p, p) - 0.5, 0, size - 1)
        low = jnp.clip(jnp.floor(p), 0, max(size - 2, 0))
        return low.astype(jnp.int32), (p - low)[..., None]

    (j, right), (i, below) = place(grid[..., 0], x.shape[2]), place(grid[..., 1], x.shape[1])
    row = lambda i: x[batch, i, j] * (1 - right) + x[batch, i, j + 1] * right
    return row(i) * (1 - below) + row(i + 1) * below


def _affine_grid(theta: Array, sizes: tuple[int, int]) -> Array:
    h, w = sizes
    ys, xs = ((2 * jnp.arange(n, dtype=theta.dtype) + 1) / n - 1 for n in (h, w))
    points = jnp.stack(jnp.broadcast_arrays(xs[None, :], ys[:, None], jnp.ones((h, w), theta.dtype)), -1)
    return jnp.einsum("hwk,ndk->nhwd", points, theta)


def _softmax_dgrad(dy: Array, y: Array) -> Array:
    return y * (dy - jnp.sum(y * dy, -1, keepdims=True))


def _linear_cross_entropy(x: Array, w: Array, labels: Array, rows: bool = False) -> Array:
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return losses if rows else jnp.mean(losses)


def _im2col(x: Array) -> Array:
    padded, (_, h, w, _) = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), x.shape
    return jnp.concatenate([padded[:, r : r + h, s : s + w] for r in range(3) for s in range(3)], -1)


def _col2im(y: Array) -> Array:
    return jax.vjp(_im2col, jnp.zeros((*y.shape[:3], y.shape[3] // 9), y.dtype))[1](y)[0]


def _ctc_log(emitted: Array, labels: Array) -> Array:
    """The logarithm of the probability of labels, from those of the blank and of each label in each step."""
    count = labels.shape[1]
    skips = jnp.pad(labels[:, 1:] != labels[:, :-1], ((0, 0), (1, 0)))[:, :count]
    skips = jnp.pad(jnp.stack([jnp.zeros_like(skips), skips], 2).reshape(len(labels), 2 * count), ((0, 0), (0, 1)))
    states = np.array([s // 2 + 1 if s % 2 else 0 for s in range(2 * count + 1)])
    low = jnp.float32(-1e5)
    start = jnp.full(skips.shape, low).at[:, 0].set(0)
    before = lambda v, n: jnp.pad(v, ((0, 0), (n, 0)), constant_values=low)[:, : 2 * count + 1]

    def step(alpha: Array, own: Array) -> tuple[Array, None]:
        skipped = jnp.where(skips, before(alpha, 2), low)
        return own[:, states] + jnp.logaddexp(jnp.logaddexp(alpha, before(alpha, 1)), skipped), None

    alpha, _ = lax.scan(step, start, jnp.moveaxis(emitted, 1, 0))
    return jnp.logaddexp(alpha[:, -1], alpha[:, -2])


def _ctc_emitted(x: Array, labels: Array, blank: int) -> Array:
    symbols = jnp.pad(labels, ((0, 0), (1, 0)), constant_values=blank % x.shape[2])
    log = jax.nn.log_softmax(x.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log, jnp.expand_dims(symbols, 1), 2)


def ctc_loss(x: Array, labels: Array, blank: int = -1) -> Array:
    return -_ctc_log(_ctc_emitted(x, labels, blank), labels)


def _ctc_posterior(x: Array, labels: Array) -> Array:
    return jax.grad(lambda emitted: jnp.sum(_ctc_log(emitted, labels)))(_ctc_emitted(x, labels, -1))


_gelu = ft.partial(jax.nn.gelu, approximate=False)
# By the name of an example. Of what is no array only a shape that does not follow from the arrays is an argument.
PLAIN: dict[str, Function] = {
    "activation": _gelu,
    "activation_dgrad": lambda dy, x: jax.vjp(_gelu, x)[1](dy)[0],
    "conv": _conv,
    "conv-strided": ft.partial(_conv, stride=2),
    "conv-depthwise": lambda x, w: _conv(x, w, groups=x.shape[3]),
    "conv_dgrad": _conv_dgrad,
    "conv_wgrad": _conv_wgrad,
    "conv_bgrad": lambda dy: jnp.sum(dy, (0, 1, 2)),
    "conv_transpose": _conv_transpose,
    "ctc_loss": ctc_loss,
    "ctc_posterior": _ctc_posterior,
    "ctc_lengths": lambda p: jnp.sum(jnp.cumprod((p == 0).astype(jnp.int32), 1), 1),
    "dropout": _dropout,
    "dropout_mask": lambda shape: jax.random.bernoulli(jax.random.key(7), 0.5, shape),
    "batch_norm": _batch_norm,
    "batch_norm_dgrad": _norm_dgrad(lambda x, *v: _batch_norm(x, *v)[0]),
    "batch_norm_inference": _batch_norm_inference,
    "genstats": lambda x: (jnp.sum(x, (0, 1, 2)), jnp.sum(x * x, (0, 1, 2))),
    "bn_finalize": _bn_finalize,
    "bn_finalize_inference": _bn_finalize_inference,
    "dbn_weight": _dbn_weight,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "adaptive_layer_norm": _adaptive_layer_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm_dgrad": _norm_dgrad(_layer_norm),
    "rms_norm_dgrad": _norm_dgrad(lambda x, scale, bias: _rms_norm(x, scale) + _by_channel(bias)),
    "adaptive_layer_norm_dgrad": _adaptive_layer_norm_dgrad,
    "instance_norm_dgrad": _norm_dgrad(lambda x, scale, bias: _instance_norm(x, scale) + _by_channel(bias)),
    "group_norm_dgrad": _norm_dgrad(_group_norm),
    "lrn": _lrn,
    "lrn_dgrad": lambda dy, x: jax.vjp(_lrn, x)[1](dy)[0],
    "divisive_norm": _divisive_norm,
    "divisive_norm_dgrad": _divisive_norm_dgrad,
    "lp_normalize": lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12),
    "pool": _pool,
    "pool-overlapping": ft.partial(_pool, n=3, stride=1, pad=1),
    "pool-average": ft.partial(_average, n=3, stride=2, pad=1),
    "pool_dgrad": lambda dy, x: jax.vjp(_pool, x)[1](dy)[0],
    "pool_dgrad-average": lambda dy: jax.vjp(
        _average, jnp.zeros((dy.shape[0], 2 * dy.shape[1], 2 * dy.shape[2], dy.shape[3]), dy.dtype)
    )[1](dy)[0],
    "unpool": _unpool,
    "global_pool": lambda x: jnp.mean(x, (1, 2), keepdims=True),
    "adaptive_pool": _pool,
    "resample": _resample,
    "resample_dgrad": _resample_dgrad,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "grid_sample": _grid_sample,
    "affine_grid": _affine_grid,
    "softmax": jax.nn.softmax,
    "softmax_dgrad": _softmax_dgrad,
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy-rows": ft.partial(_linear_cross_entropy, rows=True),
    "transform": lambda x: jnp.transpose(x, (0, 3, 1, 2)),
    "add": lambda a, c: a + c,
    "op_tensor": jnp.maximum,
    "scale": lambda x: 2 * x,
    "fill": lambda x: jnp.full_like(x, 2),
    "reduce": lambda x: jnp.sum(x, (1, 2)),
    "reduce-max": lambda x: jnp.max(x, (1, 2)),
    "reduce-norm2": lambda x: jnp.sqrt(jnp.sum(x * x, (1, 2))),
    "im2col": _im2col,
    "col2im": _col2im,
}
