"""Flax NNX's layers, computed by this library's ops.

    from jaxdnn import nnx  # in place of flax's
    conv = nnx.Conv(16, 24, (3, 3), strides=2, rngs=nnx.Rngs(0))

Each class is a subclass of Flax's class of the same name: it has Flax's constructor, parameters, Variables and
initialisers, so that state moves from one to the other by `nnx.split` and `nnx.merge` or `nnx.update`, and checkpoints
load either way. What is computed has Flax's meaning, with the numerics of this library's ops. Besides Flax's arguments
each takes

  engine        None, or the name of the implementation that must serve the layer
  determinism   None, or the level that must be guaranteed, see `jaxdnn.determinism`

An argument that is not served raises NotImplementedError, which names it. Names that are not in `__all__` are those of
`flax.nnx`, unchanged. `pip install jaxdnn[flax]`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import recurrent
from jaxdnn._src.adapters import cells, layers

with layers.required("jaxdnn.nnx", "Flax", "flax"):
    from flax import nnx
    from flax.nnx.nn import dtypes
    from flax.nnx.nn.recurrent import flip_sequences

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
    "OptimizedLSTMCell",
    "RMSNorm",
    "SimpleCell",
    "avg_pool",
    "dot_product_attention",
    "max_pool",
]


class _Served(layers.Layer):
    """A layer that computes what Flax's does, with functions of lax and jax.nn replaced by this library's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with layers.served(**self._how):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class Conv(_Served, nnx.Conv):
    """`flax.nnx.Conv`, computed by `conv`.

    All arguments of Flax's are served; `precision` and `conv_general_dilated` as `jaxdnn.lax_like` says: float32 is
    multiplied exactly unless TF32 is asked for.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> dnnx.Conv(3, 4, (3, 3), strides=2, rngs=nnx.Rngs(0))(jnp.ones((1, 8, 8, 3))).shape
      (1, 4, 4, 4)
    """


class ConvTranspose(_Served, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose`, computed by `conv_transpose`; arguments as `Conv`.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> dnnx.ConvTranspose(3, 4, (2, 2), strides=2, rngs=nnx.Rngs(0))(jnp.ones((1, 4, 4, 3))).shape
      (1, 8, 8, 4)
    """


def _values(*variables: Any) -> list[Any]:
    return [None if v is None else v[...] for v in variables]


class BatchNorm(layers.Layer, nnx.BatchNorm):
    """`flax.nnx.BatchNorm`, computed by `batch_norm`, and with running averages by `batch_norm_inference`.

    The latter is one formula for every `engine`.
    As in Flax, `momentum` weighs the old statistic and the running variance is the biased one. The variance is always
    that of deviations from the mean, whatever `use_fast_variance` says: Flax's default subtracts squares, and loses
    digits where the mean is large. `axis_name` synchronises statistics. `mask` and `axis_index_groups` are refused.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> norm = dnnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
      >>> norm(jnp.array([[1.0], [3.0]])).shape, norm.mean[...].tolist()
      ((2, 1), [1.0])
    """

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Array:
        layers.require_unset(mask=mask, axis_index_groups=self.axis_index_groups)
        average = nnx.module.first_from(
            use_running_average,
            self.use_running_average,
            error_msg="`use_running_average` must be given to BatchNorm's constructor or call, got None in both.",
        )
        axis = layers.one_axis("axis", x.ndim, self.axis)
        x, mean, variance, scale, bias = self.promote_dtype(
            tuple(_values_of(x, self.mean, self.var, self.scale, self.bias)), dtype=self.dtype
        )
        out = _result_dtype(self.dtype, x, scale, bias)
        how = {"axis": axis, "eps": self.epsilon, "out_dtype": out}
        if average:
            return layers.by_statistics(x, mean, variance, scale, bias, **how, **self._how)
        y, mean, variance = layers.batch_statistics(x, scale, bias, axis_name=self.axis_name, **how, **self._how)
        for running, new in ((self.mean, mean), (self.var, variance)):
            # Flax keeps the derivative where the Variable is no reference that is written to.
            new = jax.lax.stop_gradient(new) if running._can_update else new
            running[...] = self.momentum * running[...] + (1 - self.momentum) * new
        return y


def _values_of(x: Any, *variables: Any) -> list[Any]:
    return [x, *_values(*variables)]


def _result_dtype(dtype: Any, *arrays: Any) -> Any:
    """The dtype that Flax gives a normalisation's result."""
    return dtypes.canonicalize_dtype(*(v for v in arrays if v is not None), dtype=dtype)


class _Norm(layers.Layer):
    """A layer of which Flax's attributes say over which axes it normalises."""

    def _normalised(self, x: Any, mask: Any, compute: Callable[..., Array]) -> Array:
        layers.require_unset(mask=mask, axis_name=self.axis_name, axis_index_groups=self.axis_index_groups)  # type: ignore[attr-defined]
        scale, bias = _values(getattr(self, "scale", None), getattr(self, "bias", None))
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)  # type: ignore[attr-defined]
        out = _result_dtype(self.dtype, x, scale, bias)  # type: ignore[attr-defined]
        return compute(x, scale, bias, eps=self.epsilon, out_dtype=out, **self._how)  # type: ignore[attr-defined]


class LayerNorm(_Norm, nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, computed by `layer_norm`.

    Any axes are served. The variance is always that of deviations from the mean, see `BatchNorm`. `mask`, `axis_name`
    and `axis_index_groups` are refused.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> dnnx.LayerNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[7.0, 3.0]])).tolist()
      [[1.0, -1.0]]
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        return self._normalised(x, mask, layers.along(x.ndim, self.reduction_axes, self.feature_axes))


class RMSNorm(_Norm, nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, computed by `rms_norm`; arguments as `LayerNorm`.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> dnnx.RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[3.0, -3.0]])).tolist()
      [[1.0, -1.0]]
    """

    def __call__(self, x: Any, mask: Any = None) -> Array:
        return self._normalised(x, mask, layers.along(x.ndim, self.reduction_axes, self.feature_axes, centred=False))


class GroupNorm(_Norm, nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, computed by `group_norm`.

    `reduction_axes` must be None or all axes but the first; else as `LayerNorm`.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> dnnx.GroupNorm(4, num_groups=2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0, 2.0, 0.0]])).tolist()
      [[-1.0, 1.0, 1.0, -1.0]]
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        return self._normalised(x, mask, layers.grouped(x.ndim, self.reduction_axes, self.num_groups))


class InstanceNorm(_Norm, nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm`, computed by `layer_norm` over all axes but the first and the features'.

    Arguments as `LayerNorm`.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> dnnx.InstanceNorm(1, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[[1.0], [3.0]]])).ravel().tolist()
      [-1.0, 1.0]
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        return self._normalised(x, mask, layers.instances(x.ndim, self.feature_axes))


class Dropout(layers.Layer, nnx.Dropout):
    """`flax.nnx.Dropout`, computed by `dropout`, from the key that Flax would draw.

    The elements that are dropped are those of `jaxdnn.dropout_mask` for this key, other ones than Flax drops: a mask is
    a function of key and index alone, is drawn again in the gradient, and costs no memory. All arguments are served.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> y = dnnx.Dropout(0.5, rngs=nnx.Rngs(0))(jnp.ones(100))
      >>> sorted(set(y.tolist()))
      [0.0, 2.0]
    """

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Array:
        fixed = nnx.module.first_from(
            deterministic,
            self.deterministic,
            error_msg="`deterministic` must be given to Dropout's constructor or call, got None in both.",
        )
        if self.rate == 0.0 or fixed:
            return inputs
        if self.rate == 1.0:  # no key is drawn, as in Flax
            return jnp.zeros_like(inputs)
        rngs = nnx.module.first_from(
            rngs, self.rngs, error_msg="`rngs` must be given to Dropout's constructor or call, got None in both."
        )
        rngs = rngs[self.rng_collection] if isinstance(rngs, nnx.Rngs) else rngs
        key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
        if not isinstance(key, Array):
            raise TypeError(f"`rngs` must be an Rngs, an RngStream or a key, got {type(key).__name__}.")
        return layers.dropped(inputs, key, self.rate, self.broadcast_dims, **self._how)


_CELLS = {"lstm": (nnx.LSTMCell, nnx.OptimizedLSTMCell), "gru": (nnx.GRUCell,), "rnn": (nnx.SimpleCell,)}


def _operands(op: str, cell: Any, carry: Any, x: Any) -> cells.Operands:
    """What a cell multiplies."""
    dense = {name: v for name, v in vars(cell).items() if isinstance(v, nnx.Linear)}
    named = {name: dict(zip(("kernel", "bias"), _values(v.kernel, v.bias), strict=True)) for name, v in dense.items()}
    promote = lambda *given: cell.promote_dtype(given, dtype=cell.dtype)
    return cells.operands(op, recurrent.of_flax(named, op), promote, carry, x)


class _Cell(layers.Layer):
    """A step of a recurrent layer."""

    def __call__(self, carry: Any, inputs: Any) -> tuple[Any, Array]:
        op = cells.op_of(self, _CELLS)
        new = cells.step(op, _operands(op, self, carry, inputs), **cells.options(op, self), **self._how)
        return new, new[1] if op == "lstm" else new


class LSTMCell(_Cell, nnx.LSTMCell):
    """`flax.nnx.LSTMCell`, computed by `lstm_cell`.

    `gate_fn` must be sigmoid and `activation_fn` tanh; all else is served. A state is rounded to the dtype of the
    computation at each step, also where the carry is wider.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> cell = dnnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry, y = cell(cell.initialize_carry((2, 3), nnx.Rngs(0)), jnp.ones((2, 3)))
      >>> y.shape
      (2, 4)
    """


class OptimizedLSTMCell(_Cell, nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell`: computed as `LSTMCell` is, where its arguments are described."""


class GRUCell(_Cell, nnx.GRUCell):
    """`flax.nnx.GRUCell`, computed by `gru_cell`, with the reset behind the product; arguments as `LSTMCell`."""


class SimpleCell(_Cell, nnx.SimpleCell):
    """`flax.nnx.SimpleCell`, computed by `rnn_cell`.

    `activation_fn` must be tanh or relu, and `residual` False; else as `LSTMCell`.
    """


class RNN(layers.Layer, nnx.RNN):
    """`flax.nnx.RNN`: a cell over whole sequences, computed by `lstm`, `gru` or `rnn`.

    The cell is one of this module's or of Flax's of the same names. `unroll` changes nothing, for no loop is written
    out, and `state_axes` and `broadcast_rngs` must be None. With `seq_lengths` outputs behind the end of a sequence are
    0, where Flax's are computed from the padding. `flax.nnx.Bidirectional` takes two of these as they are.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> dnnx.RNN(dnnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))(jnp.ones((2, 5, 3))).shape
      (2, 5, 4)
    """

    def __init__(self, cell: Any, *, state_axes: Any = None, broadcast_rngs: Any = None, **kwargs: Any) -> None:
        layers.require_unset(state_axes=state_axes, broadcast_rngs=broadcast_rngs)
        cells.op_of(cell, _CELLS)
        super().__init__(cell, **kwargs)

    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Any = None,
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Any = None,
    ) -> Any:
        given = {"return_carry": return_carry, "time_major": time_major, "reverse": reverse, "keep_order": keep_order}
        asked = {name: getattr(self, name) if v is None else v for name, v in given.items()}
        if initial_carry is None:
            rngs = self.rngs if rngs is None else rngs
            rngs = rngs.carry.fork() if isinstance(rngs, nnx.Rngs) else rngs
            initial_carry = self.cell.initialize_carry(cells.step_shape(inputs, asked["time_major"]), rngs)
        op = cells.op_of(self.cell, _CELLS)
        operands = _operands(op, self.cell, initial_carry, inputs)
        how = cells.options(op, self.cell) | self._how
        return cells.scanned(op, operands, seq_lengths, flip_sequences, **asked, **how)


class MultiHeadAttention(_Served, nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention`, whose attention is computed by `attention`.

    All arguments of Flax's are served. Where weights are dropped, or sown, they exist: then the products with queries
    and values are Flax's, and only the softmax is this library's. Projections and `normalize_qk` are Flax's.

    Example:
      >>> from flax import nnx
      >>> from jaxdnn import nnx as dnnx
      >>> layer = dnnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 8)), is_causal=True).shape
      (1, 5, 8)
    """


dot_product_attention = layers.served_function(
    nnx.dot_product_attention,
    "`flax.nnx.dot_product_attention`, computed by `attention`; see `MultiHeadAttention`.",
)
avg_pool = layers.served_function(nnx.avg_pool, "`flax.nnx.avg_pool`: sums of windows by `pool`, which are divided.")
max_pool = layers.served_function(nnx.max_pool, "`flax.nnx.max_pool`, computed by `pool`.")

__getattr__ = layers.others_of(__name__, nnx)
del Any  # which is another thing in flax.nnx
