"""Recurrent layers over whole sequences, `lstm`, `gru` and `rnn`, and their cells, which are one step.

Letters: N sequences, T steps, I inputs, H units, P columns of a projection. Weights have a row for each of what they
multiply and a column for each unit of each gate, gate by gate.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxdnn._src.core import blending, checks, primitives, trees
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.rounding import at_edges, nearest
from jaxdnn._src.dropout.api import DropoutState, operand
from jaxdnn._src.dropout.api import dropout as drop
from jaxdnn._src.rnn.primitive import RnnSpec, multiply
from jaxdnn._src.rnn.steps import GATES

LAYOUTS = ("NTC", "TNC")
DIRECTIONS = ("forward", "reverse", "bidirectional")
RESET_GATES = ("after", "before")
ACTIVATIONS = ("tanh", "relu")
_FLOATS = blending.FLOATS[:4]
APART = 2**48  # elements of a dropout key's count from one layer to the next

Layers: TypeAlias = ArrayLike | Sequence[ArrayLike | None]  # of one layer, or one for each


def _key(key: Any) -> Any:
    """A dropout key that is no array as an operand of a call's program."""
    return None if key is None else operand(key)


@public
@data(dropout_key=_key)
def lstm(
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    projection: Layers | None = None,
    h0: Layers | None = None,
    c0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    clip: Sequence[float] | None = None,
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    fill: float = 0.0,
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, tuple[Any, Any]]:
    """Long short-term memory: one or more layers of it over sequences.

    z = x_t W + bias + h_{t-1} R + recurrent_bias, of which z_i, z_f, z_g, z_o are the quarters
    c_t = clip(sigmoid(z_f) c_{t-1} + sigmoid(z_i) tanh(z_g))
    h_t = sigmoid(z_o) tanh(c_t), times the projection if there is one
    y_t = h_t

    Args:
      x: (N, T, I) for layout "NTC"; float32, bfloat16, float16 or float64.
      w: (I, 4 H), of x's dtype as all weights; the columns in the order i, f, g, o. None is cuDNN's skip input: x, of
        H columns, is what W would give for each gate.
      r: (H, 4 H); with a projection (P, 4 H). With three axes, (K, H/K, 4 H/K), a block-diagonal matrix: the units are
        cut in K heads, of which each has H/K columns of every gate, and its own matrix for its own states. A sequence
        of arrays is a layer for each; the input of the next is y of the one before. Then w, biases, projection, h0 and
        c0 are None or sequences too, of arrays and None.
      bias, recurrent_bias: (4 H,), of x's dtype or the accumulator's; only their sum counts: other libraries have both.
      projection: (H, P), for heads (K, H/K, P/K); y, h0 and the final h then have P columns in place of H.
      h0: (N, H), of x's dtype; None is zeros.
      c0: (N, H), of x's dtype or the accumulator's; None is zeros.
      lengths: (N,), integers from 0 to T in any order: the steps of each sequence; None is T. Inputs of later steps are
        not read. A length above T counts as T, one below 0 as 0.
      resets: (N, T), for "TNC" (T, N), booleans: True where a sequence begins anew. No state passes between such a step
        and the one before it: in the forward direction the states are 0, not h0 and c0, before the step; in reverse
        they are 0 before the step that stands before it in x. So a row may hold several sequences, one behind another.
      direction: "forward"; "reverse", from each sequence's last step to its first; or "bidirectional", a layer of each.
        Then all weights, biases and initial states have an axis of 2 in front, forward and reverse, and so have final
        states: w is (2, I, 4 H), h0 (2, N, H). y, (N, T, 2 H), has the columns of the forward layer first.
      clip: (low, high), which c_t is cut to; None is no limit.
      dropout: the rate of `dropout` on what each layer but the first reads of the one before it. Of layer l it is
        dropout(y, dropout_key, rate=dropout, offset=(l - 1) 2^48) with y as (N, T, columns): an element's bits depend
        on layer, sequence, step and unit, not on how x is sharded, nor, with a `DropoutState` that counts the elements
        before, on how a batch is cut.
      dropout_key: as `key` in `dropout`; None where nothing is dropped.
      fill: what y has behind a sequence's end, in the last layer.
      layout: "NTC", or "TNC" for x (T, N, I) and y (T, N, H).
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (N, T, H) for "NTC", and the final states (h, c), (N, H) each: those after the step that comes last in the
      direction, and h0 and c0 for a sequence of length 0. Of x's dtype; c of c0's if that is given. So a long sequence
      may be cut in pieces, and with c0 in the accumulator's dtype nothing is rounded between them. Of several layers y
      is the last one's, and h and c are tuples with one array for each.

    Differentiation: any order, forward and reverse, in x, weights, biases, h0 and c0. Where c_t was cut it has the
      derivative 0 in what it is computed from; at the limits themselves 1.

    Numerics: x W, gates and c in float32 (float64 for float64); h_t is rounded to x's dtype, in which it is multiplied
      by R, and so is what multiplies weights in derivatives. Determinism level "run_to_run" as XLA multiplies (on GPUs
      "fast", unless its flags ask for more); engine `ordered`, slow, adds in the definition's order: results
      "portable", gradients "mesh_invariant"; engine `hopper`, for 16 bits, is "batch_invariant", and of gradients of
      weights "run_to_run". Second derivatives are run_to_run. For the gradient 5 H numbers a step and sequence are kept
      in the accumulator's dtype.

    Raises:
      ValueError: shapes that do not fit, an unknown option. TypeError: a dtype that is not served. NotImplementedError:
      no engine serves the call at the required level.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 16)), jnp.zeros((4, 16))
      >>> y, (h, c) = dnn.lstm(x, w, r, lengths=jnp.array([5, 2]))
      >>> y.shape, y[1, 2:].any().item(), (y[0, 4] == h[0]).all().item()
      ((2, 5, 4), False, True)

    Sources: Hochreiter and Schmidhuber (1997); Gers et al. (2000); Sak et al., arXiv:1402.1128, for the projection.
      cuDNN's cudnnRNNForward (CUDNN_LSTM) and PyTorch's LSTM have the same gates in the same order, their matrices
      transposed, and a bias of each kind; cuDNN's bias modes are no bias, `bias` alone, `recurrent_bias` alone, both.
      ONNX orders i, o, f, c and clips preactivations; Keras i, f, c, o with one bias. Of Flax's OptimizedLSTMCell the
      kernels of i, f, g, o, side by side, fit as they are; its carry is (c, h). `jaxdnn.recurrent` converts the weights
      of all of them.
    """
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias, "projection": projection}
    between = {"dropout": dropout, "key": dropout_key}
    own = {"direction": direction, "clip": clip, "engine": engine, "determinism": determinism}
    y, h, c = _layers("lstm", x, weights, {"h0": h0, "c0": c0}, lengths, resets, fill, layout, between, **own)
    return y, (h, c)


@public
@data(dropout_key=_key)
def gru(
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    reset_gate: str = "after",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    fill: float = 0.0,
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Any]:
    """Gated recurrent units: one or more layers of them over sequences.

    a = x_t W + bias,  s = h_{t-1} R + recurrent_bias, of which a_r, a_z, a_n and s_r, s_z, s_n are the thirds
    ρ = sigmoid(a_r + s_r),  ζ = sigmoid(a_z + s_z),  n = tanh(a_n + ρ s_n)
    h_t = (1 - ζ) n + ζ h_{t-1}
    y_t = h_t

    With reset_gate "before" ρ multiplies the state: n = tanh(a_n + (ρ h_{t-1}) R_n + recurrent_bias_n).

    Args:
      x: as in `lstm`.
      w: (I, 3 H), of x's dtype as r; the columns in the order r, z, n; or None, as in `lstm`.
      r: (H, 3 H), (K, H/K, 3 H/K) for K heads, or a sequence with one for each layer, as in `lstm`.
      bias, recurrent_bias: (3 H,), of x's dtype or the accumulator's. With reset_gate "after" ρ multiplies the last
        third of recurrent_bias, so that the two are not one.
      h0: (N, H), of x's dtype; None is zeros.
      reset_gate: "after" or "before" the product with R_n.
      lengths, resets, direction, dropout, dropout_key, fill, layout, engine, determinism: as in `lstm`.

    Returns:
      y, (N, T, H) for "NTC", and the final state h, (N, H), or a tuple of them, as in `lstm`.

    Differentiation: any order, forward and reverse, in x, weights, biases and h0.

    Numerics: as `lstm`; "before" rounds ρ h_{t-1} to x's dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> y, h = dnn.gru(jnp.ones((1, 4, 3)), jnp.zeros((3, 6)), jnp.zeros((2, 6)), h0=jnp.ones((1, 2)))
      >>> y[0, :, 0].tolist()
      [0.5, 0.25, 0.125, 0.0625]

    Sources: Cho et al., arXiv:1406.1078 ("before"). cuDNN (CUDNN_GRU), PyTorch and Flax have "after" and this order of
      gates, as ONNX has it with linear_before_reset, and Keras with reset_after; these two order z, r, n. There, as
      here, ζ keeps the old state.
    """
    checks.choice("reset_gate", reset_gate, RESET_GATES)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    between = {"dropout": dropout, "key": dropout_key}
    own = {"direction": direction, "engine": engine, "determinism": determinism}
    y, h = _layers(f"gru_{reset_gate}", x, weights, {"h0": h0}, lengths, resets, fill, layout, between, **own)
    return y, h


@public
@data(dropout_key=_key)
def rnn(
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    activation: str = "tanh",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    fill: float = 0.0,
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Any]:
    """Plain recurrent layers, one or more, over sequences.

    h_t = act(x_t W + bias + h_{t-1} R + recurrent_bias)
    y_t = h_t

    Args:
      x: as in `lstm`.
      w: (I, H), of x's dtype as r; or None, as in `lstm`.
      r: (H, H), (K, H/K, H/K) for K heads, or a sequence with one for each layer, as in `lstm`.
      bias, recurrent_bias: (H,), of x's dtype or the accumulator's; it is their sum that counts.
      h0: (N, H), of x's dtype; None is zeros.
      activation: "tanh" or "relu".
      lengths, resets, direction, dropout, dropout_key, fill, layout, engine, determinism: as in `lstm`.

    Returns:
      y, (N, T, H) for "NTC", and the final state h, (N, H), or a tuple of them, as in `lstm`.

    Differentiation: any order, forward and reverse, in x, weights, biases and h0; the derivative of relu at 0 is 0.

    Numerics: as `lstm`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> eye = jnp.eye(1)
      >>> dnn.rnn(jnp.ones((1, 3, 1)), eye, eye, activation="relu")[0][0, :, 0].tolist()
      [1.0, 2.0, 3.0]

    Sources: Elman (1990); cuDNN's CUDNN_RNN_TANH and CUDNN_RNN_RELU; PyTorch's and ONNX's RNN; Keras' SimpleRNN.
    """
    checks.choice("activation", activation, ACTIVATIONS)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    between = {"dropout": dropout, "key": dropout_key}
    own = {"direction": direction, "engine": engine, "determinism": determinism}
    y, h = _layers(activation, x, weights, {"h0": h0}, lengths, resets, fill, layout, between, **own)
    return y, h


@public
def lstm_cell(
    x: ArrayLike,
    w: ArrayLike | None,
    r: ArrayLike,
    h: ArrayLike,
    c: ArrayLike,
    /,
    *,
    bias: ArrayLike | None = None,
    recurrent_bias: ArrayLike | None = None,
    projection: ArrayLike | None = None,
    clip: Sequence[float] | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array]:
    """One step of `lstm`, for loops of one's own.

    (h', c') = those of `lstm` after the step x from h and c

    Args:
      x: (N, I); the dtypes as in `lstm`.
      w, r, bias, recurrent_bias, projection, clip: as in `lstm`.
      h: (N, H), or (N, P) with a projection.
      c: (N, H).
      engine, determinism: as in `lstm`.

    Returns:
      (h', c'), of the dtypes of h and c.

    Differentiation: as `lstm`, in h and c too.

    Numerics: as `lstm`; at a level that fixes bits, steps by cells have those of a layer if c has the accumulator's
      dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r, h = jnp.ones((2, 3)), jnp.zeros((3, 16)), jnp.zeros((4, 16)), jnp.zeros((2, 4))
      >>> h, c = dnn.lstm_cell(x, w, r, h, jnp.ones((2, 4)))
      >>> c[0].tolist()
      [0.5, 0.5, 0.5, 0.5]

    Sources: PyTorch's LSTMCell; Flax's OptimizedLSTMCell, whose carry is (c, h).
    """
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias, "projection": projection}
    own = {"clip": clip, "engine": engine, "determinism": determinism}
    h, c = _cell("lstm", x, weights, {"h": h, "c": c}, **own)
    return h, c


@public
def gru_cell(
    x: ArrayLike,
    w: ArrayLike | None,
    r: ArrayLike,
    h: ArrayLike,
    /,
    *,
    bias: ArrayLike | None = None,
    recurrent_bias: ArrayLike | None = None,
    reset_gate: str = "after",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """One step of `gru`, for loops of one's own.

    h' = that of `gru` after the step x from h

    Args:
      x: (N, I); the dtypes as in `lstm`.
      w, r, bias, recurrent_bias, reset_gate: as in `gru`.
      h: (N, H).
      engine, determinism: as in `lstm`.

    Returns:
      h', of the dtype of h.

    Differentiation: as `gru`, in h too.

    Numerics: as `gru`; at a level that fixes bits, steps by cells have those of a layer.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> dnn.gru_cell(jnp.ones((2, 3)), jnp.zeros((3, 6)), jnp.zeros((2, 6)), jnp.ones((2, 2))).tolist()
      [[0.5, 0.5], [0.5, 0.5]]

    Sources: PyTorch's GRUCell; Flax's GRUCell, which has no bias within the reset.
    """
    checks.choice("reset_gate", reset_gate, RESET_GATES)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    return _cell(f"gru_{reset_gate}", x, weights, {"h": h}, engine=engine, determinism=determinism)[0]


@public
def rnn_cell(
    x: ArrayLike,
    w: ArrayLike | None,
    r: ArrayLike,
    h: ArrayLike,
    /,
    *,
    bias: ArrayLike | None = None,
    recurrent_bias: ArrayLike | None = None,
    activation: str = "tanh",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """One step of `rnn`, for loops of one's own.

    h' = act(x W + bias + h R + recurrent_bias)

    Args:
      x: (N, I); the dtypes as in `lstm`.
      w, r, bias, recurrent_bias, activation: as in `rnn`.
      h: (N, H).
      engine, determinism: as in `lstm`.

    Returns:
      h', of the dtype of h.

    Differentiation: as `rnn`, in h too.

    Numerics: as `rnn`; at a level that fixes bits, steps by cells have those of a layer.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> eye = jnp.eye(2)
      >>> dnn.rnn_cell(jnp.ones((1, 2)), eye, eye, jnp.ones((1, 2)), activation="relu").tolist()
      [[2.0, 2.0]]

    Sources: PyTorch's RNNCell; Flax's SimpleCell.
    """
    checks.choice("activation", activation, ACTIVATIONS)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    return _cell(activation, x, weights, {"h": h}, engine=engine, determinism=determinism)[0]


# ---- reading arguments -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Arrays and sizes of a layer. x is (T, N, I), whatever the layout; heads is None where `r` is a matrix."""

    spec: RnnSpec
    heads: int | None
    x: Array
    weights: dict[str, Array]
    initial: dict[str, Array]
    final: tuple[np.dtype, ...]
    lengths: Array | None
    resets: Array | None


def _read(
    cell: str,
    x: Array,
    weights: Mapping[str, Any],
    initial: Mapping[str, Any],
    lengths: Any = None,
    resets: Any = None,
    *,
    reverse: bool = False,
    clip: Any = None,
    engine: Any = None,
    determinism: Any = None,
) -> _Layer:
    """Reads all but x, which is (T, N, I), and resets, which are (T, N) and read."""
    level, gates = required(determinism), GATES[cell]
    wide = blending.accumulator(x.dtype)
    given = {name: checks.array(name, v) for name, v in weights.items() if v is not None or name == "r"}
    for name, v in given.items():
        own = (x.dtype,) if name in ("w", "r", "projection") else dict.fromkeys((np.dtype(x.dtype), wide))
        checks.dtype(name, v, tuple(own))
    hidden, heads = _units(gates, x, given)
    columns = given["projection"].shape[-1] * (heads or 1) if "projection" in given else hidden
    own = (columns, gates * hidden) if heads is None else (heads, columns // heads, gates * hidden // heads)
    whose = "as `w` has" if "w" in given else "as `x` has columns"
    checks.shape("r", given["r"], own, f"for {hidden} units, {whose}, and states of {columns}")
    for name in ("bias", "recurrent_bias"):
        if name in given:
            checks.shape(name, given[name], (gates * hidden,), "one for every unit of each gate")
    states, kinds = {}, []
    for name, v in initial.items():
        shape = (x.shape[1], columns if name.startswith("h") else hidden)
        dtypes = (x.dtype,) if name.startswith("h") else tuple(dict.fromkeys((np.dtype(x.dtype), wide)))
        optional = name in ("h0", "c0")  # a cell's h and c are not
        v = jnp.zeros(shape, x.dtype) if v is None and optional else checks.array(name, v)
        checks.dtype(name, v, dtypes)
        checks.shape(name, v, shape, "one row for every sequence")
        kinds.append(np.dtype(v.dtype))
        states[name[0]] = v
    if lengths is not None:
        lengths = checks.array("lengths", lengths)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"`lengths` must be integers, got {lengths.dtype.name}.")
        checks.shape("lengths", lengths, (x.shape[1],), "one for every sequence")
        wide = lengths if lengths.dtype.itemsize >= 4 else lengths.astype(jnp.int32)  # which holds any T
        none, most = (jnp.asarray(v, wide.dtype) for v in (0, x.shape[0]))
        lengths = lax.clamp(none, wide, most).astype(jnp.int32)
    spec = RnnSpec(
        cell=cell,
        reverse=reverse,
        clip=_limits(clip),
        projected="projection" in given,
        ragged=lengths is not None,
        resets=resets is not None,
        narrow=np.dtype(x.dtype),
        engine=engine,
        level=level,
    )
    edges = at_edges(level, (x, given, states))
    return _Layer(spec, heads, *edges, tuple(kinds), lengths, resets)


def _units(gates: int, x: Array, weights: Mapping[str, Array]) -> tuple[int, int | None]:
    """H and the number of heads, if there are any, from the weights, whose ranks are checked."""
    heads = weights["r"].shape[0] if weights["r"].ndim == 3 else None
    ranks = {"w": (2,), "r": (2, 3), "projection": (2,) if heads is None else (3,)}
    for name, v in weights.items():
        if v.ndim not in ranks.get(name, (v.ndim,)):
            what = "a matrix" if name == "w" or heads is None else "a matrix for each of the heads that `r` has"
            raise ValueError(f"`{name}` must be {what}, got shape {checks.shown(tuple(v.shape))}.")
    hidden = _hidden(gates, x, weights)
    if heads is not None and (not heads or hidden % heads):
        raise ValueError(f"`r` must have a number of heads that divides the {hidden} units, got {heads}.")
    known = (hidden,) if heads is None else (heads, hidden // heads)
    if "projection" in weights and weights["projection"].shape[:-1] != known:
        given, each = tuple(weights["projection"].shape), "(H, P)" if heads is None else "(heads, H/heads, P/heads)"
        raise ValueError(f"`projection` must have shape {each} with H = {hidden} as in `w`, got {given}.")
    return hidden, heads


def _hidden(gates: int, x: Array, weights: Mapping[str, Array]) -> int:
    """H, which without `w` is the number of columns of x."""
    if "w" not in weights:
        return x.shape[-1]
    w = weights["w"]
    if w.shape[0] != x.shape[-1] or w.shape[1] % gates:
        each = "" if gates == 1 else f"{gates} "
        hint = "; it looks transposed" if w.shape[1] == x.shape[-1] and w.shape[0] % gates == 0 else ""
        raise ValueError(
            f"`w` must have shape (I, {each}H) with I = {x.shape[-1]} as in `x`, got {tuple(w.shape)}{hint}."
        )
    return w.shape[1] // gates


def _limits(clip: Any) -> tuple[float, float] | None:
    if clip is None:
        return None
    if not checks.is_sequence(clip) or len(clip) != 2:
        raise ValueError(f"`clip` must be None or a pair (low, high), got {checks.shown(clip)}.")
    low, high = (checks.as_float("clip", v) for v in clip)
    if not low <= high:
        raise ValueError(f"`clip` must have a low limit that is at most the high one, got {checks.shown(clip)}.")
    return low, high


def _sequences(x: Any, axes: str) -> Array:
    x = checks.array("x", x)
    checks.dtype("x", x, _FLOATS)
    if x.ndim != len(axes):
        names = ", ".join(axes.replace("C", "I"))
        raise ValueError(f"`x` must have shape ({names}), got {checks.shown(tuple(x.shape))}.")
    return x


# ---- computing -------------------------------------------------------------------------------------------------------


def _layers(
    cell: str, x: Any, weights: Mapping[str, Any], initial: Mapping[str, Any], lengths: Any, resets: Any, fill: Any,
    layout: Any, between: Mapping[str, Any], **own: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """y of the last layer, and the final states: tuples with one for each layer, if `r` is a sequence."""
    checks.choice("layout", layout, LAYOUTS)
    checks.choice("direction", own["direction"], DIRECTIONS)
    rate, fill = checks.as_float("dropout", between["dropout"]), checks.as_float("fill", fill)
    if not 0 <= rate <= 1:
        raise ValueError(f"`dropout` must be from 0 to 1, got {rate!r}.")
    if rate and between["key"] is None:
        raise ValueError(f"`dropout_key` must be given with a `dropout` of {rate!r}, got None.")
    x = _sequences(x, layout)
    x = x if layout == "TNC" else jnp.swapaxes(x, 0, 1)
    resets = None if resets is None else _resets(resets, x, layout)
    every = {**weights, **initial}
    if not isinstance(weights["r"], tuple | list):
        found = _layer(cell, x, weights, initial, lengths, resets, fill, **own)
    else:
        count = len(weights["r"])
        if not count:
            raise ValueError("`r` must have a matrix for every layer, of which there must be one, got none.")
        of_each = [{name: _of_layer(name, v, i, count) for name, v in every.items()} for i in range(count)]
        states, y = [], x
        for i, given in enumerate(of_each):
            if i and rate:
                y = jnp.swapaxes(y, 0, 1)
                y = drop(y, between["key"], rate=rate, offset=(i - 1) * APART, determinism=own["determinism"])
                y = jnp.swapaxes(y, 0, 1)
            w, s = ({name: given[name] for name in names} for names in (weights, initial))
            try:
                y, *final = _layer(cell, y, w, s, lengths, resets, fill if i == count - 1 else 0.0, **own)
            except (ValueError, TypeError) as error:
                raise type(error)(f"In layer {i}: {error}") from None
            states.append(final)
        found = (y, *zip(*states, strict=True))
    y, *states = found
    return (y if layout == "TNC" else jnp.swapaxes(y, 0, 1)), *states


def _of_layer(name: str, value: Any, i: int, count: int) -> Any:
    """A layer's part of what is given for all."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != count:
        got = f"one of {len(value)}" if isinstance(value, tuple | list) else checks.shown(value)
        raise ValueError(f"`{name}` must be None or a sequence of {count}, one for every layer, as `r` is, got {got}.")
    return value[i]


def _resets(resets: Any, x: Array, layout: str) -> Array:
    resets = checks.array("resets", resets)
    if resets.dtype != np.bool_:
        raise TypeError(f"`resets` must be booleans, got {resets.dtype.name}.")
    steps, batch = x.shape[:2]
    checks.shape("resets", resets, (batch, steps) if layout == "NTC" else (steps, batch), "one for every step of `x`")
    return resets if layout == "TNC" else jnp.swapaxes(resets, 0, 1)


def _layer(
    cell: str, x: Array, weights: Mapping[str, Any], initial: Mapping[str, Any], lengths: Any, resets: Array | None,
    fill: float, *, direction: str, **own: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """y, (T, N, H), and the final states of one layer."""
    if direction == "bidirectional":
        of_each = []
        for i, one in enumerate(DIRECTIONS[:2]):
            of_one = {name: _of_direction(name, v, i) for name, v in {**weights, **initial}.items()}
            w, states = ({name: of_one[name] for name in given} for given in (weights, initial))
            of_each.append(_layer(cell, x, w, states, lengths, resets, fill, direction=one, **own))
        (forward, *before), (reverse, *after) = of_each
        final = (jnp.stack(pair) for pair in zip(before, after, strict=True))
        return jnp.concatenate([forward, reverse], -1), *final
    call = _read(cell, x, weights, initial, lengths, resets, reverse=direction == "reverse", **own)
    y, *states = _run(call)
    if call.lengths is not None:
        y = jnp.where(jnp.expand_dims(_live(x, call.lengths), 2), y, jnp.asarray(fill, y.dtype))
    return y, *states


def _cell(cell: str, x: Any, weights: Mapping[str, Any], states: Mapping[str, Any], **own: Any) -> tuple[Array, ...]:
    """The states after one step."""
    return _run(_read(cell, jnp.expand_dims(_sequences(x, "NC"), 0), weights, states, **own))[1:]


def _of_direction(name: str, value: Any, i: int) -> Array | None:
    """The part of weights or states that belongs to one of two directions."""
    if value is None:
        return None
    value = checks.array(name, value)
    ranks = (2,) if "bias" in name else (3, 4) if name in ("r", "projection") else (3,)
    if value.ndim not in ranks or value.shape[0] != 2:
        raise ValueError(
            f"`{name}` must have {ranks[0]} axes for `direction` 'bidirectional', the first of 2, forward and reverse, "
            f"got shape {checks.shown(tuple(value.shape))}."
        )
    return primitives.gathered(value, 0)[i]


def _live(x: Array, lengths: Array) -> Array:
    """(T, N): whether a step is one of its sequence."""
    return lax.broadcasted_iota(jnp.int32, x.shape[:2], 0) < jnp.expand_dims(lengths, 0)


def _run(call: _Layer) -> tuple[Array, ...]:
    """(T, N, H) of a layer, and the final states."""
    spec, weights = call.spec, call.weights
    a = _inputs(call)
    entering, within = _biases(spec, weights, a.dtype)
    if entering is not None:
        a = a + trees.broadcast(jnp.expand_dims(entering, (0, 1)), a, spec.level)
    operands = {"a": a, "r": weights["r"], "h": call.initial["h"]}
    if spec.projected:
        operands["p"] = weights["projection"]
    if spec.cell == "gru_after":
        operands["q"] = jnp.zeros(a.shape[2:], a.dtype)[: a.shape[2] // 3] if within is None else within
    if "c" in call.initial:
        operands["c"] = call.initial["c"].astype(a.dtype)
    if call.lengths is not None:
        operands["lengths"] = call.lengths
    if call.resets is not None:
        operands["resets"] = _begun(call)
    run = ft.partial(primitives.call, "rnn", spec=spec)
    given = [operands[name] for name in spec.operands]
    y, *states = at_edges(spec.level, run(*given) if call.heads is None else _by_heads(run, call, given))
    return y, *(at_edges(spec.level, nearest(v, kind)) for v, kind in zip(states, call.final, strict=True))


def _inputs(call: _Layer) -> Array:
    """x W of all steps; without W, x for every gate."""
    x, spec = call.x, call.spec
    if call.lengths is not None:
        x = jnp.where(
            jnp.expand_dims(_live(x, call.lengths), 2), x, jnp.zeros_like(x)
        )  # not a product: 0 times NaN is NaN
    if "w" in call.weights:
        return multiply(spec, x, call.weights["w"], run=primitives.call)
    return jnp.concatenate([x.astype(blending.accumulator(x.dtype))] * GATES[spec.cell], -1)


def _begun(call: _Layer) -> Array:
    """(T, N): whether the states are 0 before a step; in reverse that is where the next step begins anew."""
    resets: Any = call.resets
    if not call.spec.reverse or not resets.shape[0]:
        return resets
    resets = resets if call.lengths is None else resets & _live(call.x, call.lengths)
    return jnp.concatenate([resets[1:], jnp.zeros_like(resets[:1])])


def _by_heads(run: Callable[..., Any], call: _Layer, operands: Sequence[Array]) -> tuple[Array, ...]:
    """Heads are layers that share nothing but the loop: each has its units of every gate."""
    heads: Any = call.heads
    parts = {"a": GATES[call.spec.cell], "h": 1, "c": 1, "q": 1}

    def parted(name: str, v: Array) -> Array:
        if name not in parts:
            return v
        v = primitives.gathered(v, v.ndim - 1)
        return v.reshape(*v.shape[:-1], parts[name], heads, v.shape[-1] // (heads * parts[name]))

    def one(*given: Array) -> Any:
        flat = [v.reshape(*v.shape[:-2], -1) if n in parts else v for n, v in zip(names, given, strict=True)]
        return run(*flat)

    names = call.spec.operands
    axes = [None if n in call.spec.marks else -2 if n in parts else 0 for n in names]
    found = jax.vmap(one, axes, -2)(*map(parted, names, operands))
    return tuple(v.reshape(*v.shape[:-2], v.shape[-2] * v.shape[-1]) for v in found)


def _biases(spec: RnnSpec, weights: Mapping[str, Array], wide: Any) -> tuple[Array | None, Array | None]:
    """What is added to x W, and what the reset gate of "after" multiplies."""
    b, d = (weights[name].astype(wide) if name in weights else None for name in ("bias", "recurrent_bias"))
    if d is None or b is None:
        b, both = (jnp.zeros_like(d) if b is None and d is not None else b), d if b is None else b
    else:
        both = b + d
    if spec.cell != "gru_after" or b is None or d is None or both is None:
        return both, None
    kept = b.shape[0] // 3 * 2
    return jnp.concatenate([both[:kept], b[kept:]]), d[kept:]
