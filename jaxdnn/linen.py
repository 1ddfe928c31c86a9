"""Flax Linen's layers, computed by this library's ops.

    from jaxdnn import linen as nn  # in place of flax's
    conv = nn.Conv(24, (3, 3), strides=2)

Each class is a subclass of Linen's class of the same name: it has Linen's attributes, parameters, collections and
initialisers, and its own name, so that variables of a model with one load into the model with the other. What is
computed has Linen's meaning, with the numerics of this library's ops. Besides Linen's attributes each has

  engine        None, or the name of the implementation that must serve the layer
  determinism   None, or the level that must be guaranteed, see `jaxdnn.determinism`

An argument that is not served raises NotImplementedError, which names it. Names that are not in `__all__` are those of
`flax.linen`, unchanged. `pip install jaxdnn[flax]`.
"""

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import recurrent as convert
from jaxdnn._src.adapters import cells, layers
from jaxdnn._src.adapters.calls import refused
from jaxdnn._src.adapters.neural import dot_product_attention as _fused_attention

with layers.required("jaxdnn.linen", "Flax", "flax"):
    from flax import linen as nn
    from flax.core import FrozenDict
    from flax.linen import dtypes
    from flax.linen.recurrent import DenseParams, flip_sequences

__all__ = [
    "RNN",
    "BatchNorm",
    "Conv",
    "ConvTranspose",
    "Dropout",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "OptimizedLSTMCell",
    "RMSNorm",
    "SelfAttention",
    "SimpleCell",
    "avg_pool",
    "dot_product_attention",
    "max_pool",
]


class _Layer(layers.Asked, nn.Module):
    """The attributes that every layer has besides Linen's."""

    engine: str | None = None
    determinism: str | None = None


class _Served(_Layer):
    """A layer that computes what Linen's does, with functions of lax and jax.nn replaced by this library's."""

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The function that Linen has wrapped: one call of the layer is one to interceptors, tables and intermediates.
        compute = super().__call__.__wrapped__  # type: ignore[misc]
        with layers.served(**self._how):
            return compute(self, *args, **kwargs)


class Conv(_Served, nn.Conv):
    """`flax.linen.Conv`, computed by `conv`.

    All arguments of Linen's are served; `precision` as `jaxdnn.lax_like` says: float32 is multiplied exactly unless
    TF32 is asked for.

    Example:
      >>> from jaxdnn import linen
      >>> y, _ = linen.Conv(4, (3, 3), strides=2).init_with_output(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
      >>> y.shape
      (1, 4, 4, 4)
    """


class ConvTranspose(_Served, nn.ConvTranspose):
    """`flax.linen.ConvTranspose`, computed by `conv_transpose`; arguments as `Conv`.

    Example:
      >>> from jaxdnn import linen
      >>> layer = linen.ConvTranspose(4, (2, 2), strides=(2, 2))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 4, 4, 3)))[0].shape
      (1, 8, 8, 4)
    """


# ---- normalisations --------------------------------------------------------------------------------------------------


class _Norm(_Layer):
    """A layer with a scale and a bias."""

    def _normalised(self, x: Any, mask: Any, features: Any, compute: Callable[..., Array]) -> Array:
        layers.require_unset(mask=mask, axis_name=self.axis_name, axis_index_groups=self.axis_index_groups)  # type: ignore[attr-defined]
        return _normalised(self, x, features, compute)


def _normalised(layer: Any, x: Any, features: Any, compute: Callable[..., Any]) -> Any:
    """What `compute` makes of x, not narrower than its result, and of scale and bias, which extend along `features`."""
    shape = [x.shape[axis] for axis in layers.axes_of(x.ndim, features)]
    scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype) if layer.use_scale else None
    bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype) if getattr(layer, "use_bias", False) else None
    out = dtypes.canonicalize_dtype(x, *(v for v in (scale, bias) if v is not None), dtype=layer.dtype)
    wide = jnp.promote_types(x.dtype, out if layer.dtype is None else layer.dtype)
    return compute(x.astype(wide), scale, bias, eps=layer.epsilon, out_dtype=out, **layer._how)


class BatchNorm(_Layer, nn.BatchNorm):
    """`flax.linen.BatchNorm`, computed by `batch_norm`, and with running averages by `batch_norm_inference`.

    The latter is one formula for every `engine`.
    As in Linen, `momentum` weighs the old statistic and the running variance is the biased one. The variance is always
    that of deviations from the mean, and computed in float32 at least, whatever `use_fast_variance` and
    `force_float32_reductions` say; the latter still chooses the dtype of the running averages. `axis_name` synchronises
    statistics. `mask`, `axis_index_groups` and several axes are refused.

    Example:
      >>> from jaxdnn import linen
      >>> norm, x = linen.BatchNorm(use_running_average=False, momentum=0.5), jnp.array([[1.0], [3.0]])
      >>> y, new = norm.apply(norm.init(jax.random.key(0), x), x, mutable="batch_stats")
      >>> new["batch_stats"]["mean"].tolist()
      [1.0]
    """

    @nn.compact
    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Array:
        layers.require_unset(mask=mask, axis_index_groups=self.axis_index_groups)
        average = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        axis = layers.one_axis("axis", x.ndim, self.axis)
        kept = jnp.float32 if self.force_float32_reductions else self.param_dtype
        shape = (x.shape[axis],)
        running = self.variable("batch_stats", "mean", jnp.zeros, shape, kept)
        variance = self.variable("batch_stats", "var", jnp.ones, shape, kept)
        if average:
            given = running.value, variance.value
            compute = lambda x, *rest, **how: layers.by_statistics(x, *_wide(x, *given), *rest, axis=axis, **how)
            return _normalised(self, x, axis, compute)
        own = ft.partial(layers.batch_statistics, axis=axis)
        name = None if self.is_initializing() else self.axis_name
        y, *found = _normalised(self, x, axis, ft.partial(own, axis_name=name))
        if not self.is_initializing():
            for old, new in zip((running, variance), found, strict=True):
                new = new if self.force_float32_reductions else new.astype(kept)
                old.value = self.momentum * old.value + (1 - self.momentum) * new
        return y


def _wide(x: Array, *statistics: Array) -> list[Array]:
    """Statistics in the dtype in which `batch_norm_inference` reads them."""
    return [v.astype(jnp.promote_types(x.dtype, jnp.float32)) for v in statistics]


class LayerNorm(_Norm, nn.LayerNorm):
    """`flax.linen.LayerNorm`, computed by `layer_norm`.

    Any axes are served. The variance is always that of deviations from the mean, in float32 at least, see `BatchNorm`.
    `mask`, `axis_name` and `axis_index_groups` are refused.

    Example:
      >>> from jaxdnn import linen
      >>> linen.LayerNorm(epsilon=0.0).init_with_output(jax.random.key(0), jnp.array([[7.0, 3.0]]))[0].tolist()
      [[1.0, -1.0]]
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        compute = layers.along(x.ndim, self.reduction_axes, self.feature_axes)
        return self._normalised(x, mask, self.feature_axes, compute)


class RMSNorm(_Norm, nn.RMSNorm):
    """`flax.linen.RMSNorm`, computed by `rms_norm`; arguments as `LayerNorm`.

    Example:
      >>> from jaxdnn import linen
      >>> linen.RMSNorm(epsilon=0.0).init_with_output(jax.random.key(0), jnp.array([[3.0, -3.0]]))[0].tolist()
      [[1.0, -1.0]]
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        compute = layers.along(x.ndim, self.reduction_axes, self.feature_axes, centred=False)
        return self._normalised(x, mask, self.feature_axes, compute)


class GroupNorm(_Norm, nn.GroupNorm):
    """`flax.linen.GroupNorm`, computed by `group_norm`.

    `reduction_axes` must be None or all axes but the first; else as `LayerNorm`.

    Example:
      >>> from jaxdnn import linen
      >>> layer, x = linen.GroupNorm(num_groups=2, epsilon=0.0), jnp.array([[1.0, 3.0, 2.0, 0.0]])
      >>> layer.init_with_output(jax.random.key(0), x)[0].tolist()
      [[-1.0, 1.0, 1.0, -1.0]]
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        if (self.num_groups is None) == (self.group_size is None):
            given = self.num_groups, self.group_size
            raise ValueError(f"One of `num_groups` and `group_size` must be None and the other a number, got {given}.")
        channels = x.shape[-1]
        if channels % (self.num_groups or self.group_size or 1):
            name = "num_groups" if self.num_groups else "group_size"
            raise ValueError(f"`{name}` must divide the {channels} channels, got {getattr(self, name)}.")
        groups = self.num_groups or channels // (self.group_size or 1)
        return self._normalised(x, mask, -1, layers.grouped(x.ndim, self.reduction_axes, groups))


class InstanceNorm(_Norm, nn.InstanceNorm):
    """`flax.linen.InstanceNorm`, computed by `layer_norm` over all axes but the first and the features'.

    Arguments as `LayerNorm`.

    Example:
      >>> from jaxdnn import linen
      >>> layer, x = linen.InstanceNorm(epsilon=0.0), jnp.array([[[1.0], [3.0]]])
      >>> layer.init_with_output(jax.random.key(0), x)[0].ravel().tolist()
      [-1.0, 1.0]
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        return self._normalised(x, mask, self.feature_axes, layers.instances(x.ndim, self.feature_axes))


class Dropout(_Layer, nn.Dropout):
    """`flax.linen.Dropout`, computed by `dropout`, from the key that Linen would draw.

    The elements that are dropped are those of `jaxdnn.dropout_mask` for this key, other ones than Linen drops: a mask
    is a function of key and index alone, is drawn again in the gradient, and costs no memory. All arguments are served.

    Example:
      >>> from jaxdnn import linen
      >>> y = linen.Dropout(0.5, deterministic=False).apply({}, jnp.ones(100), rngs={"dropout": jax.random.key(0)})
      >>> sorted(set(y.tolist()))
      [0.0, 2.0]
    """

    @nn.compact
    def __call__(self, inputs: Any, deterministic: bool | None = None, rng: Any = None) -> Array:
        fixed = nn.merge_param("deterministic", self.deterministic, deterministic)
        if self.rate == 0.0 or fixed:
            return inputs
        if self.rate == 1.0:  # no key is drawn, as in Linen
            return jnp.zeros_like(inputs)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        return layers.dropped(inputs, key, self.rate, self.broadcast_dims, **self._how)


# ---- recurrent layers ------------------------------------------------------------------------------------------------

_CELLS = {"lstm": (nn.LSTMCell, nn.OptimizedLSTMCell), "gru": (nn.GRUCell,), "rnn": (nn.SimpleCell,)}


def _operands(op: str, cell: Any, parameters: Any, carry: Any, x: Any) -> cells.Operands:
    """What a cell multiplies."""
    promote = lambda *given: dtypes.promote_dtype(*given, dtype=cell.dtype)
    return cells.operands(op, convert.of_flax(parameters, op), promote, carry, x)


class _Cell(_Layer):
    """A step of a recurrent layer."""

    @nn.compact
    def __call__(self, carry: Any, inputs: Any) -> tuple[Any, Array]:
        op = cells.op_of(self, _CELLS)
        state = carry[1] if op == "lstm" else carry
        parameters = {}
        for gate in convert.FLAX[op]:  # in Linen's order, for keys are drawn in it
            for side, x in (("i", inputs), ("h", state)):
                biased = (side == "h") == (op == "lstm") or (op, side, gate) == ("gru", "h", "n")
                kernel_init = self.kernel_init if side == "i" else self.recurrent_kernel_init  # type: ignore[attr-defined]
                dense = DenseParams(
                    features=state.shape[-1],
                    use_bias=biased,
                    param_dtype=self.param_dtype,  # type: ignore[attr-defined]
                    kernel_init=kernel_init,
                    bias_init=self.bias_init,  # type: ignore[attr-defined]
                    name=f"{side}{gate}",  # type: ignore[call-arg]
                )
                parameters[f"{side}{gate}"] = dict(zip(("kernel", "bias"), dense(x), strict=True))
        given = _operands(op, self, parameters, carry, inputs)
        new = cells.step(op, given, **cells.options(op, self), **self._how)
        return new, new[1] if op == "lstm" else new


class LSTMCell(_Cell, nn.LSTMCell):
    """`flax.linen.LSTMCell`, computed by `lstm_cell`.

    `gate_fn` must be sigmoid and `activation_fn` tanh; all else is served. A state is rounded to the dtype of the
    computation at each step, also where the carry is wider.

    Example:
      >>> from jaxdnn import linen
      >>> cell, key = linen.LSTMCell(4), jax.random.key(0)
      >>> (_, y), _ = cell.init_with_output(key, cell.initialize_carry(key, (2, 3)), jnp.ones((2, 3)))
      >>> y.shape
      (2, 4)
    """


class OptimizedLSTMCell(_Cell, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell`: computed as `LSTMCell` is, where its arguments are described."""


class GRUCell(_Cell, nn.GRUCell):
    """`flax.linen.GRUCell`, computed by `gru_cell`, with the reset behind the product; arguments as `LSTMCell`."""


class SimpleCell(_Cell, nn.SimpleCell):
    """`flax.linen.SimpleCell`, computed by `rnn_cell`.

    `activation_fn` must be tanh or relu, and `residual` False; else as `LSTMCell`.
    """


class RNN(_Layer, nn.RNN):
    """`flax.linen.RNN`: a cell over whole sequences, computed by `lstm`, `gru` or `rnn`.

    The cell is one of this module's or of Linen's of the same names. `unroll` changes nothing, for no loop is written
    out, and `variable_axes`, `variable_broadcast`, `variable_carry` and `split_rngs` must be Linen's defaults. With
    `seq_lengths` outputs behind the end of a sequence are 0, where Linen's are computed from the padding.
    `flax.linen.Bidirectional` takes two of these as they are.

    Example:
      >>> from jaxdnn import linen
      >>> layer = linen.RNN(linen.GRUCell(4))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
      (2, 5, 4)
    """

    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Any = None,
        init_key: Any = None,
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        for name, default in _LOOP.items():
            if getattr(self, name) != default:
                raise refused(name, f"{default!r}, Linen's default,", getattr(self, name))
        op = cells.op_of(self.cell, _CELLS)
        given = {"return_carry": return_carry, "time_major": time_major, "reverse": reverse, "keep_order": keep_order}
        asked = {name: getattr(self, name) if v is None else v for name, v in given.items()}
        if initial_carry is None:
            key = jax.random.key(0) if init_key is None else init_key
            initial_carry = self.cell.initialize_carry(key, cells.step_shape(inputs, asked["time_major"]))
        if self.is_initializing():  # one step makes the parameters
            self.cell(initial_carry, inputs[0] if asked["time_major"] else inputs[..., 0, :])
        parameters = nn.unbox(self.cell.variables["params"])  # without metadata of partitioning
        operands = _operands(op, self.cell, parameters, initial_carry, inputs)
        how = cells.options(op, self.cell) | self._how
        return cells.scanned(op, operands, seq_lengths, flip_sequences, **asked, **how)


_LOOP = {
    "variable_axes": FrozenDict(),
    "variable_broadcast": "params",
    "variable_carry": False,
    "split_rngs": FrozenDict({"params": False}),
}


# ---- attention and pooling -------------------------------------------------------------------------------------------


@ft.partial(layers.served_function, doc="`flax.linen.dot_product_attention`; see `MultiHeadDotProductAttention`.")
@ft.wraps(nn.dot_product_attention)
def dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Array:
    bound = inspect.signature(nn.dot_product_attention).bind(query, key, value, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    dropping = given["dropout_rate"] > 0 and not given["deterministic"]
    if dropping or any(given[name] is not None for name in _BY_WEIGHTS):
        return nn.dot_product_attention(query, key, value, *args, **kwargs)
    query, key, value = dtypes.promote_dtype(query, key, value, dtype=given["dtype"])
    lead = query.shape[:-3]
    flat = lambda v: v if v.ndim < 5 else v.reshape(-1, *v.shape[-3:])
    spread = lambda v: v if v is None or v.ndim < 5 else jnp.broadcast_to(v, (*lead, *v.shape[-3:]))
    bias, mask = (spread(given[name]) for name in ("bias", "mask"))
    mask = None if mask is None else flat(mask).astype(bool)
    y = _fused_attention(flat(query), flat(key), flat(value), None if bias is None else flat(bias), mask)
    return y.reshape(*lead, *y.shape[-3:])


# What only attention with its weights in memory has.
_BY_WEIGHTS = ("module", "einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")


class MultiHeadDotProductAttention(_Served, nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention`, whose attention is computed by `attention`.

    All arguments of Linen's are served. Where weights are dropped, or sown, or products have functions of their own,
    weights exist: then the products with queries and values are Linen's, and only the softmax is this library's. Else
    the softmax is in float32 whatever `force_fp32_for_softmax` says. Projections and `normalize_qk` are Linen's.

    Example:
      >>> from jaxdnn import linen
      >>> layer = linen.MultiHeadDotProductAttention(2)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))[0].shape
      (1, 5, 8)
    """

    attention_fn: Callable[..., Array] = dot_product_attention


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadAttention`: `MultiHeadDotProductAttention` by another name, where all is described."""


class SelfAttention(_Served, nn.SelfAttention):
    """`flax.linen.SelfAttention`, which Flax says to replace: `MultiHeadDotProductAttention` of one array, see there.

    Example:
      >>> from jaxdnn import linen
      >>> linen.SelfAttention(2).init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))[0].shape
      (1, 5, 8)
    """

    attention_fn: Callable[..., Array] = dot_product_attention


avg_pool = layers.served_function(nn.avg_pool, "`flax.linen.avg_pool`: sums of windows by `pool`, which are divided.")
max_pool = layers.served_function(nn.max_pool, "`flax.linen.max_pool`, computed by `pool`.")

__getattr__ = layers.others_of(__name__, nn)
