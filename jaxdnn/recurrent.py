"""What surrounds `lstm`, `gru` and `rnn`: weights of other libraries, and sequences that are packed or ragged.

Weights convert both ways, and a round trip returns the bits that it was given. Each `of_` returns `Weights`, for

    weights = dnn.recurrent.of_torch(module.state_dict(), "lstm")
    y, (h, c) = dnn.lstm(x, weights.w, weights.r, **weights.rest)

and each `to_` takes them. A library that stores one cell at a time converts cell by cell; `both` then joins two
directions and `stacked` layers. Arrays of JAX stay such, so that conversions may be traced; all others become NumPy's.

| library | matrices | gates of an LSTM, of a GRU | biases |
|---|---|---|---|
| here | (I, G H), (H, G H), (H, P) | i f g o, r z n | one of inputs, one of states |
| cuDNN, PyTorch | (G H, I), (G H, H), (P, H) | i f g o, r z n | the same |
| ONNX | (D, G H, I), (D, G H, H) | i o f c, z r h | both in one, (D, 2 G H) |
| Keras | (I, G H), (H, G H) | i f c o, z r h | one; of a GRU with reset_after two, (2, G H) |
| Flax | (I, H), (H, H) for each gate, or joined as here | i f g o, r z n | of states; of a GRU of inputs, of n both |
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core import checks
from jaxdnn._src.core.compat import Tracer

__all__ = [
    "Packed",
    "Weights",
    "both",
    "directions",
    "of_cudnn",
    "of_flax",
    "of_keras",
    "of_onnx",
    "of_torch",
    "pack",
    "padded",
]
__all__ += ["ragged", "stacked", "to_cudnn", "to_flax", "to_keras", "to_onnx", "to_torch", "unpack"]

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
BIASES = ("none", "input", "recurrent", "both")
# Where each gate, in this library's order, stands in another's.
ONNX = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2), "rnn": (0,)}
KERAS = {"lstm": (0, 1, 2, 3), "gru": (1, 0, 2), "rnn": (0,)}
FLAX = {"lstm": "ifgo", "gru": "rzn", "rnn": ("",)}


class Weights(NamedTuple):
    """The weights of layers: of each kind a list with an array, or None, for each layer, or None for no layer.

    With two directions every array has an axis of 2 in front. G is the number of gates: 4 of an LSTM, 3 of a GRU, 1 of
    a plain layer.

    Attributes:
      w: (I, G H), which multiply a layer's input.
      r: (H, G H), which multiply its states; with a projection (P, G H).
      bias, recurrent_bias: (G H,), of inputs and of states.
      projection: (H, P), which makes states of P columns of those of H.
      rest: those that `lstm`, `gru` and `rnn` take by name, without those that are None.
    """

    w: list[Any]
    r: list[Any]
    bias: list[Any] | None = None
    recurrent_bias: list[Any] | None = None
    projection: list[Any] | None = None

    @property
    def rest(self) -> dict[str, list[Any]]:
        """Those that an op takes by name."""
        return {name: v for name, v in self._asdict().items() if name not in ("w", "r") and v is not None}


def stacked(*layers: Weights) -> Weights:
    """The layers of all, in this order."""
    if not layers:
        raise ValueError("`layers` must be one or more `Weights`, got none.")
    lists = [[v or [None] * len(one.r) for v in one] for one in layers]
    joined = [list(itertools.chain(*kind)) for kind in zip(*lists, strict=True)]
    return _weights(*joined)


def both(forward: Weights, reverse: Weights, /) -> Weights:
    """Layers of both directions, of layers of each."""
    if len(forward.r) != len(reverse.r):
        raise ValueError(f"`reverse` must have as many layers as `forward`, {len(forward.r)}, got {len(reverse.r)}.")
    found = []
    for name, v, u in zip(Weights._fields, forward, reverse, strict=True):
        v, u = (one or [None] * len(forward.r) for one in (v, u))
        if [a is None for a in v] != [a is None for a in u]:
            raise ValueError(f"`reverse` must have a `{name}` in the layers in which `forward` has one.")
        found.append([None if a is None else _stack([a, b]) for a, b in zip(v, u, strict=True)])
    return _weights(*found)


def directions(weights: Weights, /) -> list[Weights]:
    """Layers of one direction, of each that there is; the reverse of `both`."""
    if not _axes(weights):
        return [weights]
    of = lambda v, i: None if v is None else [None if a is None else a[i] for a in v]
    return [_weights(*(of(v, i) for v in weights)) for i in range(2)]


def _axes(weights: Weights) -> bool:
    """Whether there is an axis of directions."""
    given = next((v for v in weights.w if v is not None), None)
    return (weights.r[0].ndim if given is None else given.ndim) == 3


def _weights(w: Any, r: Any, *rest: Any) -> Weights:
    """Of kinds that no layer has, None."""
    return Weights(w, r, *(v if v is not None and any(a is not None for a in v) else None for v in rest))


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def of_torch(state: Mapping[str, Any], op: str, /, *, prefix: str = "") -> Weights:
    """The weights of a torch.nn.LSTM, GRU or RNN, from its state dict (tensors on the CPU, or arrays).

    Args:
      state: weight_ih_l0, weight_hh_l0, ..., with `_reverse` for the second direction, as PyTorch names them.
      op: "lstm", "gru" or "rnn".
      prefix: what stands before these names, such as "encoder.rnn.".
    """
    checks.choice("op", op, tuple(GATES))
    take = lambda name: _array(state[prefix + name]) if prefix + name in state else None
    found = []
    for suffix in ("", "_reverse"):
        layers = []
        while (w := take(f"weight_ih_l{len(layers)}{suffix}")) is not None:
            end = f"l{len(layers)}{suffix}"
            r, b, d, p = (take(f"{name}_{end}") for name in ("weight_hh", "bias_ih", "bias_hh", "weight_hr"))
            if r is None:
                raise ValueError(f"`state` must have `{prefix}weight_hh_{end}` beside `{prefix}weight_ih_{end}`.")
            layers.append(_weights([w.T], [r.T], [b], [d], [None if p is None else p.T]))
        found += [stacked(*layers)] if layers else []
    if not found:
        raise ValueError(f"`state` must have `{prefix}weight_ih_l0`, got the names {checks.shown(sorted(state))}.")
    return both(*found) if len(found) == 2 else found[0]


def to_torch(weights: Weights, /, *, prefix: str = "") -> dict[str, Any]:
    """A state dict of PyTorch's, with arrays. It has both biases or none: one that is missing is 0."""
    _require_w(weights, "PyTorch")
    found: dict[str, Any] = {}
    biased = weights.bias is not None or weights.recurrent_bias is not None
    for one, suffix in zip(directions(weights), ("", "_reverse"), strict=False):
        for i, (w, r, b, d, p) in enumerate(_rows(one)):
            own = {"weight_ih": w.T, "weight_hh": r.T}
            if biased:
                none = _zeros(w, w.shape[1])
                own |= {"bias_ih": none if b is None else b, "bias_hh": none if d is None else d}
            own |= {} if p is None else {"weight_hr": p.T}
            found |= {f"{prefix}{name}_l{i}{suffix}": v for name, v in own.items()}
    return found


def _rows(weights: Weights) -> list[tuple[Any, ...]]:
    """Of each layer its weights."""
    return list(zip(*(v or [None] * len(weights.r) for v in weights), strict=True))


def _require_w(weights: Weights, library: str) -> None:
    if any(w is None for w in weights.w):
        raise ValueError(f"`weights` must have a `w` in every layer, for {library} has no skip input.")


# ---- ONNX ------------------------------------------------------------------------------------------------------------


def of_onnx(w: Any, r: Any, b: Any = None, /, *, op: str) -> Weights:
    """The weights of ONNX's LSTM, GRU or RNN: one layer of one direction or both.

    Args:
      w, r, b: its inputs W (D, G H, I), R (D, G H, H) and B (D, 2 G H) or None, D the number of directions. Its
        peepholes have no counterpart here. A GRU with linear_before_reset is `gru` with reset_gate "after", one
        without it "before"; its clip is of preactivations, ours of the cell.
      op: "lstm", "gru" or "rnn".
    """
    order = ONNX[checks.choice("op", op, tuple(GATES))]
    w, r, b = _array(w), _array(r), None if b is None else _array(b)
    if w.ndim != 3 or w.shape[0] not in (1, 2):
        raise ValueError(f"`w` must have shape (directions, gates H, I), got {checks.shown(tuple(w.shape))}.")
    each = []
    for i in range(w.shape[0]):
        halves = [None, None] if b is None else [_gates(half, order) for half in _halves(b[i])]
        each.append(_weights([_gates(w[i].T, order)], [_gates(r[i].T, order)], [halves[0]], [halves[1]]))
    return both(*each) if len(each) == 2 else each[0]


def to_onnx(weights: Weights, /, *, op: str) -> tuple[Any, Any, Any]:
    """W, R and B of ONNX, of one layer without a projection. B is None without biases; one that is missing is 0."""
    order = _inverse(ONNX[checks.choice("op", op, tuple(GATES))])
    _require_w(weights, "ONNX")
    _require_one(weights, "ONNX")
    parts: list[list[Any]] = [[], [], []]
    for one in directions(weights):
        w, r, b, d, _ = _rows(one)[0]
        parts[0].append(_gates(w, order).T)
        parts[1].append(_gates(r, order).T)
        if b is not None or d is not None:
            none = _zeros(w, w.shape[1])
            parts[2].append(_join([_gates(none if v is None else v, order) for v in (b, d)]))
    w, r, b = (_stack(v) if v else None for v in parts)
    return w, r, b


def _require_one(weights: Weights, library: str) -> None:
    if len(weights.r) != 1 or weights.projection is not None:
        raise ValueError(f"`weights` must have one layer without a projection for {library}, got {len(weights.r)}.")


# ---- Keras -----------------------------------------------------------------------------------------------------------


def of_keras(kernel: Any, recurrent_kernel: Any, bias: Any = None, /, *, op: str) -> Weights:
    """The weights of Keras' LSTM, GRU or SimpleRNN, as get_weights lists them: one layer of one direction.

    Args:
      kernel, recurrent_kernel: (I, G H) and (H, G H).
      bias: None, (G H,), or (2, G H) for a GRU with reset_after, which is `gru` with reset_gate "after"; one without
        it is "before". A Bidirectional layer lists the forward direction's weights first.
      op: "lstm", "gru" or "rnn".
    """
    order = KERAS[checks.choice("op", op, tuple(GATES))]
    w, r, b = _array(kernel), _array(recurrent_kernel), None if bias is None else _array(bias)
    rows = [None, None] if b is None else [_gates(v, order) for v in b] if b.ndim == 2 else [_gates(b, order), None]
    return _weights([_gates(w, order)], [_gates(r, order)], [rows[0]], [rows[1]])


def to_keras(weights: Weights, /, *, op: str) -> list[Any]:
    """Kernel, recurrent kernel and bias, if there is one, for set_weights; one layer of one direction.

    A GRU with a recurrent bias is one with reset_after. Of the others biases are added to each other: Keras has one.
    """
    order = _inverse(KERAS[checks.choice("op", op, tuple(GATES))])
    _require_w(weights, "Keras")
    _require_one(weights, "Keras")
    _require_direction(weights, "Keras")
    w, r, b, d, _ = _rows(weights)[0]
    if op == "gru" and d is not None:
        bias = [_stack([_gates(_zeros(w, w.shape[1]) if b is None else b, order), _gates(d, order)])]
    else:
        total = d if b is None else b if d is None else b + d
        bias = [] if total is None else [_gates(total, order)]
    return [_gates(w, order), _gates(r, order), *bias]


def _require_direction(weights: Weights, library: str) -> None:
    if _axes(weights):
        raise ValueError(f"`weights` must have one direction for {library}, got two; `directions` parts them.")


# ---- Flax ------------------------------------------------------------------------------------------------------------


def of_flax(params: Mapping[str, Any], op: str, /) -> Weights:
    """The weights of a Flax cell: one layer of one direction.

    Args:
      params: the parameters of linen's or nnx's OptimizedLSTMCell, LSTMCell ("lstm"), GRUCell ("gru", with reset_gate
        "after") or SimpleCell ("rnn"), as nested dictionaries, of linen those under "params".
      op: "lstm", "gru" or "rnn".
    """
    checks.choice("op", op, tuple(GATES))
    params = {name.rstrip("_"): v for name, v in params.items()}  # nnx has `if_`
    if "dense_i" in params:
        of_x, of_h = [params["dense_i"]], [params.get("dense_h", {})]
    else:
        of_x, of_h = ([params.get(f"{side}{gate}", {}) for gate in FLAX[op]] for side in "ih")
    if any("kernel" not in v for v in (*of_x, *of_h)):
        names = sorted(params)
        raise ValueError(f"`params` must be those of a Flax cell for '{op}', got the names {checks.shown(names)}.")
    kernels = [_join([_array(v["kernel"]) for v in side]) for side in (of_x, of_h)]
    biases = []
    for side, kernel in zip((of_x, of_h), kernels, strict=True):
        width = kernel.shape[1] // len(side)
        each = [_array(v["bias"]) if v.get("bias") is not None else None for v in side]
        none = _zeros(kernel, width)
        biases.append(None if all(v is None for v in each) else _join([none if v is None else v for v in each]))
    return _weights([kernels[0]], [kernels[1]], [biases[0]], [biases[1]])


def to_flax(weights: Weights, op: str, /, *, nnx: bool = False) -> dict[str, Any]:
    """The parameters of Flax's OptimizedLSTMCell, GRUCell or SimpleCell, linen's or nnx's; one layer of one direction.

    Biases stand where Flax has them: of "lstm" with the state, of "rnn" with the input, of "gru" with the input, and
    linen's n also with the state, within the reset. Where the op has two and Flax one, it is their sum. nnx's GRUCell
    has none within the reset: ValueError, if there is one, for its sum would compute something else.
    """
    checks.choice("op", op, tuple(GATES))
    _require_w(weights, "Flax")
    _require_one(weights, "Flax")
    _require_direction(weights, "Flax")
    w, r, b, d, _ = _rows(weights)[0]
    total = d if b is None else b if d is None else b + d
    total = _zeros(w, w.shape[1]) if total is None else total
    if op != "gru":
        of_x, of_h = (None, total) if op == "lstm" else (total, None)
    else:
        kept = r.shape[0] * 2
        within = None if d is None else d[kept:]
        of_x, of_h = (
            total if d is None else _join([total[:kept], _zeros(d, r.shape[0]) if b is None else b[kept:]]),
            within,
        )
        if nnx and within is not None:
            raise ValueError(
                "`weights` must have no recurrent bias for nnx's GRUCell, which has none within the reset."
            )
    made = lambda kernel, bias: {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    if nnx:
        return {"dense_i": made(w, of_x), "dense_h": made(r, of_h)}
    size, found = r.shape[0], {}
    for j, gate in enumerate(FLAX[op]):
        part = slice(j * size, (j + 1) * size)
        found[f"i{gate}"] = made(w[:, part], None if of_x is None else of_x[part])
        if op == "gru":
            none = _zeros(w, size)
            found[f"h{gate}"] = made(r[:, part], None if gate != "n" else none if of_h is None else of_h)
        else:
            found[f"h{gate}"] = made(r[:, part], None if of_h is None else of_h[part])
    return found


# ---- cuDNN -----------------------------------------------------------------------------------------------------------


def of_cudnn(
    buffer: Any, op: str, /, *, inputs: int, units: int, layers: int = 1, bidirectional: bool = False,
    bias: str = "both", skip_input: bool = False,
) -> Weights:  # fmt: skip
    """The weights in cuDNN's flat buffer, without projections.

    Args:
      buffer: one axis. Of each layer and direction, the layers slowest, W (G H, I) and R (G H, H), row by row; then of
        each again its biases, of inputs and of states.
      op: "lstm", "gru" (reset_gate "after") or "rnn".
      inputs, units, layers: I, H and the number of layers; bidirectional: whether there are both directions.
      bias: cuDNN's bias mode: "none" (NO_BIAS), "input" (SINGLE_INP_BIAS), "recurrent" (SINGLE_REC_BIAS) or "both"
        (DOUBLE_BIAS, its default).
      skip_input: cuDNN's input mode CUDNN_SKIP_INPUT: the first layer has no W, and I = H.
    """
    buffer, count = _array(buffer), GATES[checks.choice("op", op, tuple(GATES))]
    checks.choice("bias", bias, BIASES)
    for name, size in (("inputs", inputs), ("units", units), ("layers", layers)):
        if checks.integer(name, size) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")
    if skip_input and inputs != units:
        raise ValueError(f"`inputs` must be `units`, {units}, with `skip_input`, got {inputs}.")
    sides, wide = 1 + bool(bidirectional), count * units
    widths = [inputs if i == 0 else sides * units for i in range(layers)]
    shapes = [[] if i == 0 and skip_input else [(wide, n)] for i, n in enumerate(widths)]
    shapes = [s for own in shapes for _ in range(sides) for s in (*own, (wide, units))]
    shapes += [(wide,)] * (layers * sides * {"none": 0, "both": 2}.get(bias, 1))
    sizes = [math.prod(s) for s in shapes]
    checks.shape("buffer", buffer, (sum(sizes),), "as these sizes need")
    starts = itertools.accumulate(sizes, initial=0)
    parts = iter([buffer[a : a + n].reshape(s) for a, n, s in zip(starts, sizes, shapes, strict=False)])
    matrices = [
        (None if i == 0 and skip_input else next(parts).T, next(parts).T) for i in range(layers) for _ in range(sides)
    ]
    each = []
    for w, r in matrices:
        b, d = (next(parts) if bias in (one, "both") else None for one in ("input", "recurrent"))
        each.append(_weights([w], [r], [b], [d]))
    return stacked(*(both(*each[i : i + 2]) if sides == 2 else each[i] for i in range(0, len(each), sides)))


def to_cudnn(weights: Weights, /) -> Any:
    """cuDNN's flat buffer, as `of_cudnn` reads it, in the bias mode of the biases that there are.

    A projection's place in it is not documented: ValueError.
    """
    if weights.projection is not None:
        raise ValueError("`weights` must have no projection: its place in cuDNN's buffer is not documented.")
    rows = [row for layer in zip(*map(_rows, directions(weights)), strict=True) for row in layer]
    kinds = {(b is not None, d is not None) for _, _, b, d, _ in rows}
    if len(kinds) > 1:
        raise ValueError("`weights` must have the same biases in every layer: cuDNN has one bias mode for all.")
    parts = [v.T.reshape(-1) for w, r, *_ in rows for v in (w, r) if v is not None]
    return _join(parts + [v for _, _, b, d, _ in rows for v in (b, d) if v is not None])


# ---- parts of arrays -------------------------------------------------------------------------------------------------


def _array(value: Any) -> Any:
    """An array of JAX as it is, anything else as NumPy reads it."""
    return value if isinstance(value, Array) else np.asarray(value)


def _module(parts: Sequence[Any]) -> Any:
    return jnp if any(isinstance(v, Array) for v in parts) else np


def _join(parts: Sequence[Any]) -> Any:
    """Side by side along the last axis."""
    return _module(parts).concatenate(parts, -1)


def _stack(parts: Sequence[Any]) -> Any:
    return _module(parts).stack(parts)


def _zeros(like: Any, size: int) -> Any:
    return _module([like]).zeros((size,), like.dtype)


def _halves(v: Any) -> list[Any]:
    half = v.shape[0] // 2
    return [v[:half], v[half:]]


def _gates(v: Any, order: Sequence[int]) -> Any:
    """The gates along the last axis: those at these places."""
    size = v.shape[-1] // len(order)
    return _join([v[..., i * size : (i + 1) * size] for i in order])


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


# ---- packed and ragged sequences -------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Sequences as PyTorch's PackedSequence has them.

    Attributes:
      data: (rows, ...), the steps of all sequences: the first steps of all that have one, then the second ones, ...
      batch_sizes: (steps,), how many sequences have each step.
      sorted_indices: (N,), the sequences, the longest first; None if they are so.
      unsorted_indices: (N,), of each sequence its place among them.
    """

    data: Any
    batch_sizes: np.ndarray
    sorted_indices: np.ndarray | None = None
    unsorted_indices: np.ndarray | None = None


def pack(x: Any, lengths: Any, /, *, layout: str = "NTC") -> Packed:
    """The steps of sequences without their padding, as PyTorch's pack_padded_sequence with enforce_sorted=False.

    Args:
      x: (N, T, ...), or (T, N, ...) for layout "TNC".
      lengths: (N,), integers from 0 to T, known when traced, for the result's shape depends on them. A sequence
        without steps has no rows and is known by sorted_indices alone, where PyTorch refuses it.
      layout: "NTC" or "TNC".

    Sequences of equal lengths keep their order. The data is a gather of x, so derivatives in x are those of it.
    """
    x, known = _steps(x, lengths, layout)
    order = np.argsort(-known, kind="stable")
    sizes = (known[:, None] > np.arange(int(known.max(initial=0)))).sum(0).astype(np.int64)
    times = np.repeat(np.arange(len(sizes)), sizes)
    among = np.concatenate([np.arange(n) for n in sizes] + [np.zeros(0, np.int64)]).astype(np.int64)
    data = x[order[among], times] if layout == "NTC" else x[times, order[among]]
    return Packed(data, sizes, order, np.argsort(order, kind="stable"))


def unpack(
    packed: Any, /, *, steps: int | None = None, fill: float = 0.0, layout: str = "NTC"
) -> tuple[Any, np.ndarray]:
    """Packed sequences with padding: x as `pack` takes it, and lengths.

    Args:
      packed: `Packed`, or anything with its attributes whose batch_sizes and indices NumPy reads, such as PyTorch's.
      steps: T, at least the longest length; None is that.
      fill: what x has behind a sequence's end.
      layout: "NTC" or "TNC".
    """
    sizes = np.asarray(packed.batch_sizes)
    if (np.diff(sizes) > 0).any() or (sizes < 1).any():
        raise ValueError(
            f"`packed` must have batch sizes that are positive and do not grow, got {checks.shown(sizes)}."
        )
    order = packed.sorted_indices
    order = np.arange(int(sizes.max(initial=0))) if order is None else np.asarray(order)
    lengths = np.zeros(len(order), np.int64)
    lengths[order] = (sizes[None, :] > np.arange(len(order))[:, None]).sum(1)
    place = np.argsort(order, kind="stable")
    starts = np.concatenate([[0], np.cumsum(sizes)])
    row = starts[np.minimum(np.arange(_count(steps, lengths)), len(sizes))][None, :] + place[:, None]
    return _padded(_array(packed.data), row, lengths, fill, layout)


def ragged(x: Any, lengths: Any, /, *, layout: str = "NTC") -> tuple[Any, np.ndarray]:
    """The steps of sequences, one sequence behind another, (rows, ...), and offsets, (N + 1,), between them.

    x, lengths and layout are as in `pack`.
    """
    x, known = _steps(x, lengths, layout)
    of = np.repeat(np.arange(len(known)), known)
    offsets = np.concatenate([[0], np.cumsum(known)])
    times = np.arange(len(of)) - offsets[of]
    return (x[of, times] if layout == "NTC" else x[times, of]), offsets


def padded(
    values: Any, offsets: Any, /, *, steps: int | None = None, fill: float = 0.0, layout: str = "NTC"
) -> tuple[Any, np.ndarray]:
    """Ragged sequences with padding: x as `pack` takes it, and lengths. steps, fill and layout are as in `unpack`.

    offsets are integers known when traced, that begin with 0, do not fall, and end with the number of rows.
    """
    values, offsets = _array(values), _known("offsets", offsets)
    lengths = np.diff(offsets)
    if len(offsets) < 1 or offsets[0] != 0 or (lengths < 0).any() or offsets[-1] != values.shape[0]:
        rows = values.shape[0]
        raise ValueError(f"`offsets` must rise from 0 to the {rows} rows of `values`, got {checks.shown(offsets)}.")
    row = offsets[:-1, None] + np.arange(_count(steps, lengths))
    return _padded(values, row, lengths, fill, layout)


def _steps(x: Any, lengths: Any, layout: str) -> tuple[Any, np.ndarray]:
    """x, and lengths, which are checked."""
    checks.choice("layout", layout, ("NTC", "TNC"))
    x, known = _array(x), _known("lengths", lengths)
    batch, most = x.shape[:2] if layout == "NTC" else x.shape[1::-1]
    checks.shape("lengths", known, (batch,), "one for every sequence")
    if known.min(initial=0) < 0 or known.max(initial=0) > most:
        raise ValueError(f"`lengths` must be from 0 to {most}, the steps of `x`, got {checks.shown(known)}.")
    return x, known


def _known(name: str, value: Any) -> np.ndarray:
    """Integers, on which a result's shape depends."""
    if isinstance(value, Tracer):
        raise TypeError(f"`{name}` must be known when traced, for the result's shape depends on it, got a tracer.")
    value = np.asarray(value)
    if value.dtype.kind not in "iu" or value.ndim != 1:
        raise TypeError(f"`{name}` must be integers along one axis, got {value.dtype} of shape {value.shape}.")
    return value.astype(np.int64)


def _count(steps: int | None, lengths: np.ndarray) -> int:
    """T."""
    longest = int(lengths.max(initial=0))
    if steps is None:
        return longest
    if checks.integer("steps", steps) < longest:
        raise ValueError(f"`steps` must be at least {longest}, the longest sequence, got {steps}.")
    return steps


def _padded(values: Any, row: np.ndarray, lengths: np.ndarray, fill: float, layout: str) -> tuple[Any, np.ndarray]:
    """The rows of each sequence and step, and the fill where it has none."""
    fill = checks.as_float("fill", fill)
    live = np.arange(row.shape[1]) < lengths[:, None]
    row, live = (row, live) if layout == "NTC" else (row.T, live.T)
    xp, rest = _module([values]), (1,) * (values.ndim - 1)
    if not values.shape[0]:
        return xp.full((*row.shape, *values.shape[1:]), fill, values.dtype), lengths
    found = values[np.where(live, row, 0)]
    return xp.where(live.reshape(*live.shape, *rest), found, xp.asarray(fill, values.dtype)), lengths
