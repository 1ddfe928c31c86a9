"""Equinox's layers, computed by this library's ops.

    from jaxdnn import equinox as nn  # in place of equinox.nn
    conv = nn.Conv2d(16, 24, 3, stride=2, key=jax.random.key(0))

Each class is a subclass of Equinox's class of the same name: it has Equinox's constructor, fields, shapes (one example,
channels first) and initialisers, so that weights move from one to the other by `eqx.tree_at`, and files of
`eqx.tree_serialise_leaves` load either way. What is computed has Equinox's meaning, with the numerics of this library's
ops. Besides Equinox's arguments each takes

  engine        None, or the name of the implementation that must serve the layer
  determinism   None, or the level that must be guaranteed, see `jaxdnn.determinism`

An argument that is not served raises NotImplementedError, which names it. Names that are not in `__all__` are those of
`equinox.nn`, unchanged. `pip install jaxdnn[equinox]`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.adapters import layers
from jaxdnn._src.adapters.calls import refused
from jaxdnn._src.adapters.neural import dot_product_attention
from jaxdnn._src.core import checks
from jaxdnn._src.core.windows import SPATIAL
from jaxdnn._src.pool.api import pool
from jaxdnn._src.rnn.api import gru_cell, lstm_cell

with layers.required("jaxdnn.equinox", "Equinox", "equinox"):
    import equinox as eqx

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AdaptivePool",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm",
    "Conv",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "GRUCell",
    "GroupNorm",
    "LSTMCell",
    "LayerNorm",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MultiheadAttention",
    "Pool",
    "RMSNorm",
]


class _Layer(layers.Layer, eqx.Module):
    """The fields that every layer has besides Equinox's.

    Each class names the constructor as its own, for type checkers take a class without one for a dataclass of its
    fields.
    """

    engine: str | None = eqx.field(static=True)
    determinism: str | None = eqx.field(static=True)

    __init__ = layers.Layer.__init__


class _Served(_Layer):
    """A layer that computes what Equinox's does, with functions of lax and jax.nn replaced by this library's."""

    __init__ = _Layer.__init__

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        with layers.served(**self._how):
            return super().__call__(x, *args, **kwargs)  # type: ignore[misc]


class Conv(_Served, eqx.nn.Conv):
    """`equinox.nn.Conv`, computed by `conv`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.Conv(2, 3, 4, kernel_size=3, stride=2, key=jax.random.key(0))(jnp.ones((3, 9, 9))).shape
      (4, 4, 4)
    """

    __init__ = _Layer.__init__


class Conv1d(_Served, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d`: `Conv` with one spatial axis, which its constructor does not take; all else as there."""

    __init__ = _Layer.__init__


class Conv2d(_Served, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d`: `Conv` with two spatial axes, which its constructor does not take; all else as there."""

    __init__ = _Layer.__init__


class Conv3d(_Served, eqx.nn.Conv3d):
    """`equinox.nn.Conv3d`: `Conv` with three spatial axes, which its constructor does not take; all else as there."""

    __init__ = _Layer.__init__


_NOT_GIVEN: Any = object()


class LayerNorm(_Layer, eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm`, computed by `layer_norm`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.LayerNorm(2, eps=0.0)(jnp.array([7.0, 3.0])).tolist()
      [1.0, -1.0]
    """

    __init__ = _Layer.__init__

    def __call__(self, x: Array, state: Any = _NOT_GIVEN, *, key: Any = None) -> Any:
        return _with_state(_over_all(self, x, centred=True), state)


def _over_all(layer: Any, x: Array, centred: bool) -> Array:
    """x normalised over all its axes."""
    if x.shape != layer.shape:
        raise ValueError(f"`x` must have shape {layer.shape}, got {x.shape}; `jax.vmap` maps a layer over other axes.")
    axes = tuple(range(x.ndim))
    how = {"eps": layer.eps, "centred": centred, "out_dtype": x.dtype, **layer._how}
    return layers.over_axes(x, layer.weight, layer.bias, reduced=axes, features=axes, **how)


def _with_state(y: Array, state: Any) -> Any:
    """The result, with the state if one was given."""
    return y if state is _NOT_GIVEN else (y, state)


class RMSNorm(_Layer, eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm`, computed by `rms_norm`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.RMSNorm(2, eps=0.0)(jnp.array([3.0, -3.0])).tolist()
      [1.0, -1.0]
    """

    __init__ = _Layer.__init__

    def __call__(self, x: Array, state: Any = _NOT_GIVEN, *, key: Any = None) -> Any:
        return _with_state(_over_all(self, x, centred=False), state)


class GroupNorm(_Layer, eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm`, computed by `group_norm`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.GroupNorm(2, 4, eps=0.0)(jnp.array([1.0, 3.0, 2.0, 0.0])).tolist()
      [-1.0, 1.0, 1.0, -1.0]
    """

    __init__ = _Layer.__init__

    def __call__(self, x: Array, state: Any = _NOT_GIVEN, *, key: Any = None) -> Any:
        how = {"groups": self.groups, "eps": self.eps, "axis": 1, "out_dtype": x.dtype, **self._how}
        return _with_state(layers.over_groups(x[None], self.weight, self.bias, **how)[0], state)


class BatchNorm(_Layer, eqx.nn.BatchNorm):
    """`equinox.nn.BatchNorm`, computed by `batch_norm`, and by `batch_norm_inference` with running statistics.

    The latter is one formula for every `engine`. As in Equinox the layer is mapped with `axis_name`, `momentum` weighs
    the old statistic, and the running variance is the biased one; both modes are served. All arguments of Equinox's are
    served.

    Example:
      >>> import equinox as eqx
      >>> from jaxdnn import equinox as dnneqx
      >>> norm, state = eqx.nn.make_with_state(dnneqx.BatchNorm)(1, "batch", eps=0.0, mode="batch")
      >>> mapped = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
      >>> mapped(jnp.array([[1.0], [3.0]]), state)[0].ravel().tolist()
      [-1.0, 1.0]
    """

    __init__ = _Layer.__init__

    def __call__(self, x: Array, state: Any, *, key: Any = None, inference: bool | None = None) -> Any:
        inference = self.inference if inference is None else inference
        index = self.ema_state_index if self.mode == "ema" else self.batch_state_index
        first, second = state.get(index)
        out = jnp.result_type(x.dtype, first.dtype)
        given = x.astype(out)[None]
        how = {"axis": 1, "eps": self.eps, "out_dtype": out, **self._how}
        if inference:
            statistics = (first, second)
            if self.mode == "batch":
                count = state.get(self.batch_counter)
                scale = jnp.where(count == 0, 1, 1 - self.momentum**count).astype(first.dtype)
                statistics = (first / scale, second / scale)
            return layers.by_statistics(given, *statistics, self.weight, self.bias, **how)[0], state
        names = (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)  # type: ignore[arg-type]
        y, *new = layers.batch_statistics(given, self.weight, self.bias, axis_name=names, **how)
        blend = [self.momentum * a + (1 - self.momentum) * b for a, b in zip((first, second), new, strict=True)]
        if self.mode == "batch":
            state = state.set(self.batch_counter, state.get(self.batch_counter) + 1)
            return y[0], state.set(index, tuple(v.astype(first.dtype) for v in blend))
        unset = state.get(self.ema_first_time_index)
        state = state.set(self.ema_first_time_index, jnp.array(False))
        mean, variance = (jnp.where(unset, b, a).astype(first.dtype) for a, b in zip(blend, new, strict=True))
        state = state.set(index, (mean, variance))
        return layers.by_statistics(given, mean, variance, self.weight, self.bias, **how)[0], state


class ConvTranspose(_Served, eqx.nn.ConvTranspose):
    """`equinox.nn.ConvTranspose`, computed by `conv_transpose`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.ConvTranspose(2, 3, 4, kernel_size=2, stride=2, key=jax.random.key(0))(jnp.ones((3, 4, 4))).shape
      (4, 8, 8)
    """

    __init__ = _Layer.__init__


class ConvTranspose1d(_Served, eqx.nn.ConvTranspose1d):
    """`equinox.nn.ConvTranspose1d`: `ConvTranspose` with one spatial axis, which its constructor does not take."""

    __init__ = _Layer.__init__


class ConvTranspose2d(_Served, eqx.nn.ConvTranspose2d):
    """`equinox.nn.ConvTranspose2d`: `ConvTranspose` with two spatial axes, which its constructor does not take."""

    __init__ = _Layer.__init__


class ConvTranspose3d(_Served, eqx.nn.ConvTranspose3d):
    """`equinox.nn.ConvTranspose3d`: `ConvTranspose` with three spatial axes, which its constructor does not take."""

    __init__ = _Layer.__init__


class Dropout(_Layer, eqx.nn.Dropout):
    """`equinox.nn.Dropout`, computed by `dropout`.

    The elements that are dropped are those of `jaxdnn.dropout_mask` for the key, other ones than Equinox drops: a mask
    is a function of key and index alone, is drawn again in the gradient, and costs no memory. `p` must be known when
    traced; all else is served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> sorted(set(dnneqx.Dropout(0.5)(jnp.ones(100), key=jax.random.key(0)).tolist()))
      [0.0, 2.0]
    """

    __init__ = _Layer.__init__

    def __call__(
        self, x: Array, *, key: Any = None, inference: bool | None = None, deterministic: bool | None = None
    ) -> Array:
        if not checks.is_number(self.p):
            raise refused("p", "a number known when traced", self.p)
        asked = inference if deterministic is None else deterministic
        fixed = self.inference if asked is None else asked
        if self.p == 0 or fixed or key is None:
            return super().__call__(x, key=key, inference=inference, deterministic=deterministic)
        if deterministic is not None:  # Equinox's warning of a deprecated argument
            super().__call__(x, inference=True, deterministic=True)
        return layers.dropped(x, key, self.p, **self._how)


class LSTMCell(_Layer, eqx.nn.LSTMCell):
    """`equinox.nn.LSTMCell`, computed by `lstm_cell`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> h, c = dnneqx.LSTMCell(3, 4, key=jax.random.key(0))(jnp.ones(3), (jnp.zeros(4), jnp.zeros(4)))
      >>> h.shape
      (4,)
    """

    __init__ = _Layer.__init__

    def __call__(self, input: Array, hidden: Any, *, key: Any = None) -> tuple[Array, Array]:
        h, c = hidden
        x, h, c, w, r, bias = _alike(input, h, c, self.weight_ih, self.weight_hh, self.bias)
        h, c = lstm_cell(x[None], w.T, r.T, h[None], c[None], bias=bias, **self._how)
        return h[0], c[0]


class GRUCell(_Layer, eqx.nn.GRUCell):
    """`equinox.nn.GRUCell`, computed by `gru_cell`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.GRUCell(3, 4, key=jax.random.key(0))(jnp.ones(3), jnp.zeros(4)).shape
      (4,)
    """

    __init__ = _Layer.__init__

    def __call__(self, input: Array, hidden: Array, *, key: Any = None) -> Array:
        x, h, w, r, bias, last = _alike(input, hidden, self.weight_ih, self.weight_hh, self.bias, self.bias_n)
        behind = None if last is None else jnp.concatenate([jnp.zeros(2 * last.size, last.dtype), last])
        return gru_cell(x[None], w.T, r.T, h[None], bias=bias, recurrent_bias=behind, **self._how)[0]


def _alike(*arrays: Any) -> list[Any]:
    """Arrays in the dtype that their sums and products have."""
    dtype = jnp.result_type(*(v for v in arrays if v is not None))
    return [None if v is None else v.astype(dtype) for v in arrays]


class MultiheadAttention(_Layer, eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention`, computed by `attention`.

    All arguments of Equinox's are served. Where weights are dropped, or `vo_size` is another than `qk_size`, the
    products with queries and values are Equinox's, and only the softmax is this library's. Projections are Equinox's.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> x = jnp.ones((5, 8))
      >>> dnneqx.MultiheadAttention(2, 8, key=jax.random.key(0))(x, x, x).shape
      (5, 8)
    """

    __init__ = _Layer.__init__

    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | None = None,
        *,
        key: Any = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Any = None,
    ) -> Array:
        fixed = self.dropout.inference if inference is None else inference
        with layers.served(**self._how):
            if deterministic is not None or not (fixed or self.dropout.p == 0) or self.qk_size != self.vo_size:
                how = {"inference": inference, "deterministic": deterministic, "process_heads": process_heads}
                return super().__call__(query, key_, value, mask, key=key, **how)
            given = ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
            q, k, v = (self._project(projection, x) for projection, x in given)
            if process_heads is not None:
                shapes = (q.shape, k.shape, v.shape)
                q, k, v = process_heads(q, k, v)
                if (q.shape, k.shape, v.shape) != shapes:
                    raise ValueError(
                        f"`process_heads` must not change shapes, {shapes}, got {(q.shape, k.shape, v.shape)}."
                    )
            heads = mask if mask is None or mask.ndim == 3 else mask[None]
            y = dot_product_attention(q, k, v, mask=heads)
            return jax.vmap(self.output_proj)(y.reshape(y.shape[0], -1))


class Pool(_Served, eqx.nn.Pool):
    """`equinox.nn.Pool`, computed by `pool`: `operation` is `jax.lax.max` or `jax.lax.add`, and `init` its identity.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.MaxPool2d(2, stride=2)(jnp.arange(16.0).reshape(1, 4, 4)).tolist()
      [[[5.0, 7.0], [13.0, 15.0]]]
    """

    __init__ = _Layer.__init__


class AvgPool1d(_Served, eqx.nn.AvgPool1d):
    """`equinox.nn.AvgPool1d`: sums of windows of one spatial axis by `pool`, which are divided.

    Windows at the end, with `use_ceil`, are divided by the whole window's size. All arguments are served.
    """

    __init__ = _Layer.__init__


class AvgPool2d(_Served, eqx.nn.AvgPool2d):
    """`equinox.nn.AvgPool2d`: sums of windows of two spatial axes by `pool`, which are divided.

    Windows at the end, with `use_ceil`, are divided by the whole window's size. All arguments are served.
    """

    __init__ = _Layer.__init__


class AvgPool3d(_Served, eqx.nn.AvgPool3d):
    """`equinox.nn.AvgPool3d`: sums of windows of three spatial axes by `pool`, which are divided.

    Windows at the end, with `use_ceil`, are divided by the whole window's size. All arguments are served.
    """

    __init__ = _Layer.__init__


class MaxPool1d(_Served, eqx.nn.MaxPool1d):
    """`equinox.nn.MaxPool1d`: `Pool` of maxima with one spatial axis. All arguments are served."""

    __init__ = _Layer.__init__


class MaxPool2d(_Served, eqx.nn.MaxPool2d):
    """`equinox.nn.MaxPool2d`: `Pool` of maxima with two spatial axes. All arguments are served."""

    __init__ = _Layer.__init__


class MaxPool3d(_Served, eqx.nn.MaxPool3d):
    """`equinox.nn.MaxPool3d`: `Pool` of maxima with three spatial axes. All arguments are served."""

    __init__ = _Layer.__init__


class AdaptivePool(_Layer, eqx.nn.AdaptivePool):
    """`equinox.nn.AdaptivePool`, computed by `pool`: `operation` is `jax.numpy.mean` or `jax.numpy.max`.

    Windows are Equinox's: of n elements along an axis that become m, the first n mod m windows have one more than the
    others. Of equal maxima the first has the whole derivative; Equinox's share it.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.AdaptiveAvgPool1d(2)(jnp.arange(5.0)[None]).tolist()
      [[1.0, 3.5]]
    """

    __init__ = _Layer.__init__

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        mode = {jnp.mean: "average", jnp.max: "max"}.get(self.operation)
        if mode is None:
            raise refused("operation", "jax.numpy.mean or jax.numpy.max", self.operation)
        sizes, targets = x.shape[1:], tuple(self.target_shape)
        if len(targets) not in SPATIAL or len(sizes) != len(targets):
            raise ValueError(f"`x` must have channels and {len(targets)} axes, at most three, got shape {x.shape}.")
        if any(not 1 <= wanted <= size for size, wanted in zip(sizes, targets, strict=True)):
            raise ValueError(f"`target_shape` must be made of sizes from 1 to those of x, {sizes}, got {targets}.")
        wide = x if mode == "max" or jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
        return self._blocks(wide[None], mode, ())[0]

    def _blocks(self, x: Array, mode: str, window: tuple[int, ...]) -> Array:
        """The pooling, with this window along the first axes: along each of the others two kinds, one after another."""
        axis = len(window)
        if axis == len(self.target_shape):
            return pool(x, window=window, mode=mode, layout=f"NC{SPATIAL[axis]}", **self._how)
        taps, more = divmod(x.shape[axis + 2], self.target_shape[axis])
        kinds = ((0, more, taps + 1), (more * (taps + 1), self.target_shape[axis] - more, taps))
        parts = [
            self._blocks(lax.slice_in_dim(x, start, start + count * r, axis=axis + 2), mode, (*window, r))
            for start, count, r in kinds
            if count
        ]
        return lax.concatenate(parts, axis + 2)


class AdaptiveAvgPool1d(AdaptivePool, eqx.nn.AdaptiveAvgPool1d):
    """`equinox.nn.AdaptiveAvgPool1d`: `AdaptivePool` of one spatial axis with `jax.numpy.mean`; all else as there."""

    __init__ = _Layer.__init__


class AdaptiveAvgPool2d(AdaptivePool, eqx.nn.AdaptiveAvgPool2d):
    """`equinox.nn.AdaptiveAvgPool2d`: `AdaptivePool` of two spatial axes with `jax.numpy.mean`; all else as there."""

    __init__ = _Layer.__init__


class AdaptiveAvgPool3d(AdaptivePool, eqx.nn.AdaptiveAvgPool3d):
    """`equinox.nn.AdaptiveAvgPool3d`: `AdaptivePool` of three spatial axes with `jax.numpy.mean`; all else as there."""

    __init__ = _Layer.__init__


class AdaptiveMaxPool1d(AdaptivePool, eqx.nn.AdaptiveMaxPool1d):
    """`equinox.nn.AdaptiveMaxPool1d`: `AdaptivePool` of one spatial axis with `jax.numpy.max`; all else as there."""

    __init__ = _Layer.__init__


class AdaptiveMaxPool2d(AdaptivePool, eqx.nn.AdaptiveMaxPool2d):
    """`equinox.nn.AdaptiveMaxPool2d`: `AdaptivePool` of two spatial axes with `jax.numpy.max`; all else as there."""

    __init__ = _Layer.__init__


class AdaptiveMaxPool3d(AdaptivePool, eqx.nn.AdaptiveMaxPool3d):
    """`equinox.nn.AdaptiveMaxPool3d`: `AdaptivePool` of three spatial axes with `jax.numpy.max`; all else as there."""

    __init__ = _Layer.__init__


__getattr__ = layers.others_of(__name__, eqx.nn)
