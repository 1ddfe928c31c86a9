"""Dropout that is a function of a key and of every element's logical index."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.activation.formulas import read_activation
from jaxdnn._src.core import checks, primitives, rounding, selection, windows
from jaxdnn._src.core.annotations import Activation
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.dropout import primitive
from jaxdnn._src.dropout.primitive import BLOCK, DropoutSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DropoutState:
    """A key and how much of its count has been used: what cuDNN keeps in a dropout descriptor's states.

    A pytree of two arrays, so that it may be carried through jit and scan, or saved with the parameters.

    Attributes:
      key: (2,) uint32, the words of the seed, the low one first.
      used: (2,) uint32, how many counters have been used, each worth four elements, as a 64-bit number, low word first.

    `save` and `of_seed` count elements modulo 2^64, the number of elements that one key serves.

    Example:
      >>> state = dnn.DropoutState.of_seed(1234)
      >>> y = dnn.dropout(jnp.ones((3, 5)), state, rate=0.1)
      >>> state = state.advance(y.size)
      >>> state.save()
      {'seed': 1234, 'offset': 16}
    """

    key: Array
    used: Array

    @classmethod
    def of_seed(cls, seed: int, offset: int = 0) -> DropoutState:
        """The state of a seed, a number below 2^64, `offset` elements into its count, a multiple of four."""
        seed, offset = _below_2_64("seed", seed), _below_2_64("offset", offset)
        if offset % BLOCK:
            raise ValueError(f"`offset` must be a multiple of {BLOCK}, got {offset}.")
        return cls(primitive.pair(seed), primitive.pair(offset // BLOCK))

    def advance(self, count: int) -> DropoutState:
        """The state after `count` elements, rounded up to a multiple of four, modulo 2^64."""
        blocks = -(-_below_2_64("count", count) // BLOCK)
        low, high = primitive.plus(_state_words("used", self.used), primitive.pair(blocks))
        return DropoutState(_state_words("key", self.key), jnp.stack([low, high & jnp.uint32(2**32 // BLOCK - 1)]))

    def save(self) -> dict[str, int]:
        """The state as two numbers, from which `of_seed(**saved)` restores it."""
        words = _state_words("key", self.key), _state_words("used", self.used)
        seed, used = (int(v[0]) + (int(v[1]) << 32) for v in words)
        return {"seed": seed, "offset": BLOCK * used % 2**64}


def operand(key: Any) -> Any:
    """A key that is no array as an operand of a call's program."""
    return key if isinstance(key, DropoutState) else primitive.words(_below_2_64("key", key))


@public
@data(key=operand)
def dropout(
    x: ArrayLike,
    key: ArrayLike | DropoutState,
    /,
    *,
    rate: float = 0.5,
    offset: int | ArrayLike = 0,
    layout: str | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Sets elements to zero at random and scales the others; with bias, activation and residual, if they are given.

    y[e] = residual[e] + (act(x[e] + bias[e]) / (1 - rate) if word[offset + e] >= rate 2^32 else 0)

    word[4 b], ..., word[4 b + 3] = Philox4x32-10 of the counter (b, key), two words each

    Args:
      x: of any shape; float32, bfloat16, float16 or float64.
      key: what the random bits are a function of: a `jax.random.key` of two words (threefry2x32, JAX's default), (2,)
        uint32, as of `jax.random.PRNGKey`, a Python or NumPy integer below 2^64 (a traced one is an array, and none of
        these), or a `DropoutState`, whose count is continued.
      rate: the probability with which an element is dropped, from 0 to 1, known when traced. It is rounded to a
        multiple of 2^-32.
      offset: where in the key's count x begins, in elements: the second half of a batch whose first half has n
        elements gets, with offset n, the bits it would have in the whole. A number, or a scalar array of int32, uint32,
        int64 or uint64 (which takes a GPU nearly three times as long, because the compiler cannot prove that four
        neighbours share a counter). Elements are counted modulo 2^64 however the offset is given: element 0 follows
        element 2^64 - 1. A negative offset in an array cannot be refused; it counts backwards from 2^64.
      layout: the axes of x, see `conv`. Elements are counted in the order N, spatial, C whatever the layout; None
        counts the axes of x in their own order, which is that of the channels-last layouts. In a vectorised layout the
        channels that pad the last vector are counted too.
      bias: (C,), C the channels of the layout (in a vectorised one with those that pad the last vector), or without a
        layout the size of x's last axis; or with as many dimensions as x, each of x's size or 1. Fewer dimensions are
        an error, because they are ambiguous.
      residual: of x's shape; added to the result of dropout, so that where that is 0 the residual remains (-0 as 0).
        bias and residual may have any of x's dtypes, but float64 only with a float64 x.
      activation: see `activation`; None for none.
      out_dtype: the result's dtype; None: that of x, even if the residual is wider.
      engine: which implementation; None chooses, see `jaxdnn.explain`.
      determinism: the level required, see `jaxdnn.determinism`.

    Returns:
      y, of x's shape. With rate 1 all zeros, or the residual; a dropped NaN or infinity is 0.

    Differentiation: in x, bias and residual, any order. The gradient draws the mask again: of dropout alone it is
      `dropout(dy, key, ...)` with the same arguments, which is cuDNN's backward pass, and nothing is kept for it; with
      an activation x and bias are kept. Kinks as `activation` says. The gradient in the bias is summed in float32
      before anything is rounded. vmap over x alone gives every element of the batch the same mask, as a loop would;
      vmap over keys or offsets gives each its own. The engine `hopper` has no kernel for forward derivatives in the
      bias (jvp, hessian): named, it refuses them.

    Numerics: all in float32 (float64 for float64), each operation rounded, then the one conversion. 1 / (1 - rate) is
      rounded to float32. For bfloat16 and float16, activations other than identity, relu, leaky_relu and clipped_relu
      are looked up: x + bias is rounded to the type of x, and act / (1 - rate) once, to float32.
      Portable: the mask depends on key and logical index only, not on layout, batch, sharding or device, and every bit
      equals the definition's; of a float32 or float64 x with one of the other activations mesh_invariant. Gradients as
      their op, but that in the bias, which adds over the batch: run_to_run, or mesh_invariant where more than
      run_to_run is required. Inside `shard_map` x is a shard: pass its place as `offset`.

    Raises:
      ValueError: a rate outside of 0 to 1, a key of another shape, an unknown layout or activation, a bias or residual
        of a shape that does not fit.
      TypeError: a dtype that does not fit; a rate or layout that is traced.
      NotImplementedError: a determinism level or an engine that the call cannot have.

    Example:
      >>> dnn.dropout(jnp.ones(6), 1234, rate=0.5).tolist()
      [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
      >>> x = jnp.array([[-1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
      >>> dnn.dropout(x, 1234, rate=0.5, bias=jnp.ones(3), residual=10 * x, activation="relu").tolist()
      [[-10.0, 20.0, 38.0], [40.0, 50.0, 60.0]]

    Sources: cuDNN's cudnnDropoutForward and cudnnDropoutBackward, whose `dropout` also is the probability to drop
      (the graph API's RNG node takes the probability to keep); Srivastava et al., JMLR 15 (2014); Salmon et al.,
      "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Philox4x32-10 is the generator of cuDNN's graph API and
      of PyTorch, which number the elements in other ways, by their kernels' threads: the masks are others.
    """
    x = checks.array("x", x)
    checks.dtype("x", x, checks.FLOATS)
    arrays = _arrays(x, bias, residual, layout)
    act, parameter = read_activation(activation) or ("identity", None)
    out = checks.out_dtype(out_dtype, x.dtype, checks.FLOATS, np.promote_types(x.dtype, np.float32))
    alone = not arrays and act == "identity" and out == x.dtype
    fused = {} if alone else {"activation": act, "parameter": parameter, "out_dtype": np.dtype(out)}
    return _call(x, key, rate, offset, layout, engine, determinism, arrays, **fused)


@public
@data(key=operand)
def dropout_mask(
    key: ArrayLike | DropoutState,
    shape: tuple[int, ...],
    /,
    *,
    rate: float = 0.5,
    offset: int | ArrayLike = 0,
    layout: str | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Which elements `dropout` keeps.

    mask[e] = word[offset + e] >= rate 2^32

    Args:
      key: see `dropout`.
      shape: the shape of the array that is dropped from.
      rate, offset, layout, engine, determinism: see `dropout`.

    Returns:
      A boolean array of this shape: True where an element is kept.

    Differentiation: nothing to differentiate.

    Numerics: portable, see `dropout`.

    Raises:
      ValueError, TypeError: as `dropout`.

    Example:
      >>> dnn.dropout_mask(1234, (2, 3), rate=0.5).tolist()
      [[False, False, True], [False, False, False]]

    Sources: cuDNN's reserve space of cudnnDropoutForward, and the graph API's RNG dump.
    """
    if not checks.is_sequence(shape):
        raise TypeError(f"`shape` must be a shape, got {checks.shown(shape)}.")
    sizes = tuple(checks.integer("shape", s) for s in shape)
    if min(sizes, default=0) < 0:
        raise ValueError(f"`shape` must have no negative size, got {sizes}.")
    checks.countable("`shape`", sizes)
    return _call(jnp.ones(sizes, jnp.float32), key, rate, offset, layout, engine, determinism) != 0


def _call(
    x: Array,
    key: Any,
    rate: Any,
    offset: Any,
    layout: Any,
    engine: Any,
    determinism: Any,
    arrays: dict[str, Array] | None = None,
    **fused: Any,
) -> Array:
    """Dropout alone, or by what `DropoutSpec` has of an epilogue with the bias and the residual among `arrays`."""
    rate, order, arrays = _rate(rate), _order(layout, x), arrays or {}
    words, used = read_key("key", key)
    start, shift, counter = _start(offset, used, words)
    limit = primitive.threshold(rate)
    dropped = limit >= 2**32
    common: dict[str, Any] = dict(
        threshold=min(limit, 2**32 - 1),
        scale=1.0 if dropped else 1 / (1 - rate),
        order=order,
        shift=shift,
        start=counter,
        engine=engine,
        level=required(determinism),
    )
    spec = DropoutSpec(**common, **{name: True for name in arrays}, **fused)
    operands = (x, *arrays.values(), words, start)
    if not dropped:
        return primitives.call("dropout", *operands, spec=spec)
    selection.checked("dropout", spec, *operands)
    zeros = jnp.zeros_like(x)
    return _all_dropped(zeros, arrays.get("residual"), fused["out_dtype"]) if fused else zeros


def _all_dropped(zeros: Array, residual: Array | None, out: np.dtype) -> Array:
    """residual + 0, which makes 0 of -0. The zeros are hidden from XLA, which would remove the sum."""
    if residual is None:
        return zeros.astype(out)
    zero, one = (jnp.asarray(v, residual.dtype) for v in (0, 1))
    return rounding.nearest(residual + jnp.where(residual == residual, zero, one), out)


def _arrays(x: Array, bias: Any, residual: Any, layout: Any) -> dict[str, Array]:
    """Bias and residual, if they are given, checked; the bias with the rank of x."""
    found: dict[str, Array] = {}
    for name, value in (("bias", bias), ("residual", residual)):
        if value is not None:
            value = checks.array(name, value)
            checks.dtype(name, value, checks.FLOATS)
            if value.dtype == np.float64 and x.dtype != np.float64:
                raise TypeError(f"`{name}` must not be float64 unless x is, got x of {x.dtype}.")
            found[name] = value
    if "bias" in found:
        found["bias"] = _bias(found["bias"], x, layout)
    if "residual" in found:
        checks.shape("residual", found["residual"], x.shape, "that of x")
    return found


def _bias(bias: Array, x: Array, layout: Any) -> Array:
    """The bias with the rank of x, with 1 where it is the same."""
    if bias.ndim == x.ndim and all(n in (1, m) for n, m in zip(bias.shape, x.shape, strict=True)):
        return bias
    axes = tuple(_order(layout, x))[-1:]
    if layout is not None:
        read = windows.layout(layout)
        axes = (read.channel, *((len(read.axes),) if read.vector else ()))
    sizes = tuple(x.shape[a] for a in axes)
    if bias.ndim != 1 or not axes or bias.size != math.prod(sizes):
        raise ValueError(
            f"`bias` must have shape {(math.prod(sizes),) if axes else ()}, one element for each channel, or {x.ndim} "
            f"dimensions that are 1 or those of x {x.shape}, got {bias.shape}."
        )
    if len(axes) > 1:
        bias = bias.reshape(sizes)
    return lax.expand_dims(bias, [axis for axis in range(x.ndim) if axis not in axes])


def _rate(value: Any) -> float:
    rate = checks.as_float("rate", value)
    if not 0 <= rate <= 1:
        raise ValueError(f"`rate` must be from 0 to 1, got {rate!r}.")
    return rate


def _order(layout: Any, x: Array) -> tuple[int, ...]:
    """The axes of x from the slowest to the fastest in the logical order."""
    if layout is None:
        return tuple(range(x.ndim))
    read = windows.layout(layout)
    order = (read.batch, *read.spatial, read.channel) + ((len(read.axes),) if read.vector else ())
    windows.require_shape("x", x.shape, read)
    return order


def _start(offset: Any, used: Array | None, words: Array) -> tuple[Array, int | None, int | None]:
    """Where x starts in the key's count: (start, shift, counter).

    For a number, start is a counter and shift the word of it, and `counter` the same counter if it is known when
    traced; start is then not read, and the key's words take its place, because XLA would fill a constant by a kernel.
    For an array, start is an element, and shift is None. `used` counters of the key precede the offset.
    """
    known = isinstance(offset, np.ndarray) and offset.ndim == 0 and offset.dtype.kind in "iu"
    if known or (isinstance(offset, int | np.integer) and not isinstance(offset, bool)):
        counter, shift = divmod(_below_2_64("offset", offset), BLOCK)
        if used is None:
            return words, shift, counter
        return primitive.plus(used, primitive.pair(counter)), shift, None
    offset = checks.array("offset", offset)
    checks.shape("offset", offset, (), "a number or a scalar array")
    checks.dtype("offset", offset, (np.int32, np.uint32, np.int64, np.uint64))
    start = primitive.pair_of(offset)
    return (start if used is None else primitive.plus(primitive.times_block(used), start)), None, None


def _below_2_64(name: str, value: Any) -> int:
    number = checks.integer(name, value)
    if not 0 <= number < 2**64:
        raise ValueError(f"`{name}` must be from 0 to 2^64 - 1, got {number}.")
    return number


def read_key(name: str, key: Any) -> tuple[Array, Array | None]:
    """The two words of a key, and how many of its counters are used, None if that is not counted."""
    if isinstance(key, DropoutState):
        return _words(name, _state_words("key", key.key)), _state_words("used", key.used)
    return _words(name, key), None


def _words(name: str, key: Any) -> Array:
    """The two words of a key."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return primitive.pair(_below_2_64(name, key))
    if isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    key = checks.array(name, key)
    if tuple(key.shape) != (2,) or np.dtype(key.dtype) != np.uint32:
        raise ValueError(
            f"`{name}` must be one jax.random.key of two words (threefry2x32), an array of two uint32 words, an "
            f"integer known when traced or a DropoutState, got {checks.shown(key)}."
        )
    return key


def _state_words(field: str, value: Any) -> Array:
    """A field of a state. Checked where it is read: JAX makes states of other things, such as vmap's `in_axes`."""
    value = checks.array(field, value)
    if tuple(value.shape) != (2,) or np.dtype(value.dtype) != np.uint32:
        raise ValueError(
            f"`{field}` of a DropoutState must be two uint32 words, as DropoutState.of_seed makes them, "
            f"got {checks.shown(value)}."
        )
    return value
