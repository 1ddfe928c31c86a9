"""Weights of other libraries, computed with by those libraries' formulas, gate by gate; packed and ragged sequences."""

import functools as ft
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn import recurrent
from jaxdnn.recurrent import Weights

N, T, D, H, P = 2, 3, 4, 3, 2
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
X = np.ones((2, 2), np.float32)
each_op = pytest.mark.parametrize("op", GATES)
sigmoid: Callable[[Any], Any] = lambda z: 1 / (1 + np.exp(-z))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def run(op: str, weights: Weights, x: np.ndarray, **given: Any) -> np.ndarray:
    """y of this library."""
    return np.asarray(jax.jit(lambda x, w: getattr(dnn, op)(x, w.w, w.r, **w.rest, **given)[0])(x, weights))


def same(a: Any, b: Any) -> None:
    """Equal trees of arrays, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def cell(op: str, x: Any, w: Any, r: Any, b: Any, d: Any, h: Any, c: Any, p: Any = None, after: bool = True) -> Any:
    """A step, of matrices and biases by gate: (H, I), (H, H), (H,)."""
    a = {g: x @ w[g].T + b[g] for g in w}
    s = {g: h @ r[g].T + d[g] for g in w}
    if op == "lstm":
        i, f, o = (sigmoid(a[g] + s[g]) for g in "ifo")
        c = f * c + i * np.tanh(a["g"] + s["g"])
        h = o * np.tanh(c)
        return (h if p is None else h @ p.T), c
    if op == "gru":
        reset, z = (sigmoid(a[g] + s[g]) for g in "rz")
        n = np.tanh(a["n"] + (reset * s["n"] if after else (reset * h) @ r["n"].T + d["n"]))
        return (1 - z) * n + z * h, c
    return np.tanh(a["h"] + s["h"]), c


def layer(
    op: str, x: np.ndarray, order: str, w: Any, r: Any, b: Any, d: Any, p: Any = None, **given: Any
) -> np.ndarray:
    """y of one direction, of matrices (G H, I) whose gates stand in an order."""
    x = x.astype(np.float64)
    of = lambda v: dict(zip(order, np.split(v.astype(np.float64), len(order)), strict=True))
    h, c, y = np.zeros((N, r.shape[1])), np.zeros((N, r.shape[0] // len(order))), []
    for t in range(x.shape[1]):
        h, c = cell(op, x[:, t], of(w), of(r), of(b), of(d), h, c, p, **given)
        y.append(h)
    return np.stack(y, 1)


ORDERS = {
    "torch": {"lstm": "ifgo", "gru": "rzn", "rnn": "h"},
    "onnx": {"lstm": "iofg", "gru": "zrn", "rnn": "h"},
    "keras": {"lstm": "ifgo", "gru": "zrn", "rnn": "h"},
}


def both_ways(op: str, x: np.ndarray, order: str, *of_each: tuple[Any, ...]) -> np.ndarray:
    """y of both directions, side by side."""
    forward, reverse = of_each
    return np.concatenate([layer(op, x, order, *forward), layer(op, x[:, ::-1], order, *reverse)[:, ::-1]], -1)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*GATES, "lstm-projected"])
@pytest.mark.parametrize("bias", [True, False])
def test_pytorch(op: str, bias: bool):
    """Two layers of both directions, by the formulas of its documentation."""
    op, _, projected = op.partition("-")
    wide, state, x = GATES[op] * H, {}, numbers(N, T, D)
    columns = P if projected else H
    for i, suffix in itertools.product(range(2), ("", "_reverse")):
        sizes = {"weight_ih": (wide, D if i == 0 else 2 * columns), "weight_hh": (wide, columns)}
        sizes |= {"bias_ih": (wide,), "bias_hh": (wide,)} if bias else {}
        sizes |= {"weight_hr": (P, H)} if projected else {}
        state |= {f"net.{n}_l{i}{suffix}": numbers(*s, seed=len(state) + j) for j, (n, s) in enumerate(sizes.items())}
    weights = recurrent.of_torch(state, op, prefix="net.")
    back = recurrent.to_torch(weights, prefix="net.")
    assert {*back} == {*state}
    for name, v in state.items():
        np.testing.assert_array_equal(back[name], v)
    y, zero = x, np.zeros(wide)
    for i in range(2):
        each = []
        for suffix in ("", "_reverse"):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            own = [state.get(f"net.{n}_l{i}{suffix}", zero if "bias" in n else None) for n in names]
            each.append(tuple(own))
        y = both_ways(op, y, ORDERS["torch"][op], *each)
    np.testing.assert_allclose(run(op, weights, x, direction="bidirectional"), y, atol=5e-6)


@each_op
@pytest.mark.parametrize("both", [False, True])
def test_onnx(op: str, both: bool):
    """Its gates are i, o, f, c and z, r, h; its two biases lie in one array."""
    sides, wide, x = 1 + both, GATES[op] * H, numbers(N, T, D)
    w, r, b = numbers(sides, wide, D), numbers(sides, wide, H), numbers(sides, 2 * wide)
    weights = recurrent.of_onnx(w, r, b, op=op)
    same(recurrent.to_onnx(weights, op=op), (w, r, b))
    same(recurrent.to_onnx(recurrent.of_onnx(w, r, op=op), op=op), (w, r, None))
    each = [(w[i], r[i], b[i, :wide], b[i, wide:]) for i in range(sides)]
    order = ORDERS["onnx"][op]
    y = both_ways(op, x, order, *each) if both else layer(op, x, order, *each[0])
    np.testing.assert_allclose(run(op, weights, x, direction="bidirectional" if both else "forward"), y, atol=5e-6)


@pytest.mark.parametrize("op", ["lstm", "gru-after", "gru-before", "rnn"])
def test_keras(op: str):
    """Kernels with a column for each unit; a GRU has two rows of biases if it resets after the product."""
    op, _, reset = op.partition("-")
    wide, x = GATES[op] * H, numbers(N, T, D)
    bias = numbers(2, wide) if reset == "after" else numbers(wide)
    given = [numbers(D, wide), numbers(H, wide, seed=1), bias]
    weights = recurrent.of_keras(*given, op=op)
    same(recurrent.to_keras(weights, op=op), given)
    same(recurrent.to_keras(recurrent.of_keras(*given[:2], op=op), op=op), given[:2])
    b, d = bias if reset == "after" else (bias, np.zeros(wide))
    y = layer(op, x, ORDERS["keras"][op], given[0].T, given[1].T, b, d, after=reset == "after")
    np.testing.assert_allclose(run(op, weights, x, **({"reset_gate": reset} if reset else {})), y, atol=5e-6)


def flax_cells(op: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters as Flax's cells of linen and of nnx have them."""
    gates = {"lstm": "ifgo", "gru": "rzn", "rnn": ("",)}[op]
    biased = {"lstm": "h", "gru": "i", "rnn": "i"}[op]
    linen: dict[str, Any] = {}
    for j, (side, gate) in enumerate(itertools.product("ih", gates)):
        linen[side + gate] = {"kernel": numbers(D if side == "i" else H, H, seed=j)}
        if side == biased or (op, side + gate) == ("gru", "hn"):
            linen[side + gate]["bias"] = numbers(H, seed=j)
    wide = len(gates) * H
    nnx = {"dense_i": {"kernel": numbers(D, wide)}, "dense_h": {"kernel": numbers(H, wide, seed=1)}}
    nnx[f"dense_{biased}"]["bias"] = numbers(wide)
    return linen, nnx


@each_op
@pytest.mark.parametrize("nnx", [False, True])
def test_flax(op: str, nnx: bool):
    """Kernels by gate (linen), or joined (nnx); a bias for states in an LSTM, for inputs else, and within the reset."""
    params, x = flax_cells(op)[nnx], numbers(N, T, D)
    weights = recurrent.of_flax(params, op)
    same(recurrent.to_flax(weights, op, nnx=nnx), params)
    gates = {"lstm": "ifgo", "gru": "rzn", "rnn": ("",)}[op]

    def of(side: str, name: str, rows: int) -> np.ndarray:
        if nnx:
            return params[f"dense_{side}"].get(name, np.zeros(len(gates) * H)).T
        none = np.zeros(H if name == "bias" else (rows, H))
        return np.concatenate([params[side + gate].get(name, none) for gate in gates], -1).T

    given = of("i", "kernel", D), of("h", "kernel", H), of("i", "bias", D), of("h", "bias", H)
    np.testing.assert_allclose(run(op, weights, x), layer(op, x, ORDERS["torch"][op], *given), atol=5e-6)


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="Flax is not installed.")
@each_op
def test_cells_of_flax_itself(op: str):
    from flax import linen  # pyright: ignore[reportMissingImports]

    made = {"lstm": linen.OptimizedLSTMCell, "gru": linen.GRUCell, "rnn": linen.SimpleCell}[op](H)
    x, key = numbers(N, T, D), jax.random.key(0)
    carry = made.initialize_carry(key, x[:, 0].shape)
    params = jax.tree.map(lambda v: v + 0.25, made.init(key, carry, x[:, 0]))
    y = []
    for t in range(T):
        carry, h = made.apply(params, carry, x[:, t])
        y.append(h)
    np.testing.assert_allclose(run(op, recurrent.of_flax(params["params"], op), x), np.stack(y, 1), atol=5e-6)


@each_op
@pytest.mark.parametrize("bias", ["none", "input", "recurrent", "both"])
@pytest.mark.parametrize("skip", [False, True])
def test_cudnn(op: str, bias: str, skip: bool):
    """Layer by layer and direction by direction, W and R row by row; then all biases."""
    inputs = H if skip else D
    wide, x = GATES[op] * H, numbers(N, T, inputs)
    parts: list[list[Any]] = []
    for i, s in itertools.product(range(2), (0, 2)):
        w = None if skip and i == 0 else numbers(wide, inputs if i == 0 else 2 * H, seed=i + s)
        parts.append([w, numbers(wide, H, seed=9 + i + s)])
    count = {"none": 0, "both": 2}.get(bias, 1)
    biases = [[numbers(wide, seed=7 * i + j) for j in range(count)] for i in range(4)]
    buffer = np.concatenate([v.ravel() for own in (*parts, *biases) for v in own if v is not None])
    options: dict[str, Any] = {"inputs": inputs, "units": H, "layers": 2, "bidirectional": True}
    weights = recurrent.of_cudnn(buffer, op, **options, bias=bias, skip_input=skip)
    np.testing.assert_array_equal(recurrent.to_cudnn(weights), buffer)
    traced = jax.jit(lambda b: recurrent.to_cudnn(recurrent.of_cudnn(b, op, **options, bias=bias, skip_input=skip)))
    np.testing.assert_array_equal(traced(buffer), buffer)
    zero, y, eye = np.zeros(wide), x, np.tile(np.eye(H), (GATES[op], 1))
    for i in range(2):
        each = []
        for (w, r), own in zip(parts[2 * i : 2 * i + 2], biases[2 * i : 2 * i + 2], strict=True):
            b, d = (
                (zero, zero) if not own else own if len(own) == 2 else (*own, zero) if bias == "input" else (zero, *own)
            )
            each.append((eye if w is None else w, r, b, d))
        y = both_ways(op, y, ORDERS["torch"][op], *each)
    np.testing.assert_allclose(run(op, weights, x, direction="bidirectional"), y, atol=5e-6)


def test_layers_and_directions_are_joined_and_parted():
    one, other = (recurrent.of_keras(numbers(D, H, seed=i), numbers(H, H, seed=i), op="rnn") for i in range(2))
    two = recurrent.both(one, other)
    assert two.w[0].shape == (2, D, H)
    same(recurrent.directions(two), [one, other])
    assert len(recurrent.stacked(one, other).r) == 2
    assert recurrent.stacked(one, one).rest == {}


# ---- sequences -------------------------------------------------------------------------------------------------------

LENGTHS = np.array([2, 5, 0, 2, 4])
LIVE = np.arange(6)[None, :, None] < LENGTHS[:, None, None]


@pytest.mark.parametrize("layout", ["NTC", "TNC"])
def test_packed_sequences(layout: str):
    """The rows of a loop over steps, and of the sequences that have it, the longest first, ties in their order."""
    x = numbers(5, 6, 2)
    order = [1, 4, 0, 3, 2]
    rows = [x[n, t] for t in range(5) for n in order if LENGTHS[n] > t]
    given = x if layout == "NTC" else np.swapaxes(x, 0, 1)
    packed = recurrent.pack(given, LENGTHS, layout=layout)
    np.testing.assert_array_equal(packed.data, rows)
    assert packed.batch_sizes.tolist() == [4, 4, 2, 2, 1]
    assert packed.sorted_indices is not None
    assert packed.unsorted_indices is not None
    assert packed.sorted_indices.tolist() == order
    assert packed.unsorted_indices.tolist() == [2, 0, 4, 3, 1]
    back, lengths = recurrent.unpack(packed, steps=6, fill=-1.0, layout=layout)
    wanted = np.where(LIVE, x, -1)
    np.testing.assert_array_equal(back, wanted if layout == "NTC" else np.swapaxes(wanted, 0, 1))
    assert lengths.tolist() == LENGTHS.tolist()
    assert recurrent.unpack(packed)[0].shape == (5, 5, 2)
    without = recurrent.Packed(np.arange(5.0)[:, None], np.array([3, 2]))
    found, lengths = recurrent.unpack(without)
    assert found[..., 0].tolist() == [[0, 3], [1, 4], [2, 0]]
    assert lengths.tolist() == [2, 2, 1]


@pytest.mark.parametrize("layout", ["NTC", "TNC"])
def test_ragged_sequences(layout: str):
    x = numbers(5, 6, 2)
    given = x if layout == "NTC" else np.swapaxes(x, 0, 1)
    values, offsets = recurrent.ragged(given, LENGTHS, layout=layout)
    np.testing.assert_array_equal(values, np.concatenate([x[n, :count] for n, count in enumerate(LENGTHS)]))
    assert offsets.tolist() == [0, 2, 7, 7, 9, 13]
    back, lengths = recurrent.padded(values, offsets, steps=6, layout=layout)
    wanted = np.where(LIVE, x, 0)
    np.testing.assert_array_equal(back, wanted if layout == "NTC" else np.swapaxes(wanted, 0, 1))
    assert lengths.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize("count", [0, 2])
def test_sequences_without_steps(count: int):
    packed = recurrent.pack(np.zeros((count, 3, 2)), np.zeros(count, int))
    assert packed.data.shape == (0, 2)
    assert recurrent.unpack(packed, steps=3)[0].shape == (count, 3, 2)
    values, offsets = recurrent.ragged(np.zeros((count, 3, 2)), np.zeros(count, int))
    assert recurrent.padded(values, offsets, steps=3)[0].shape == (count, 3, 2)


def test_sequences_have_derivatives():
    """A gather's: each row is one of x, and the fill is none."""
    x = jnp.asarray(numbers(5, 6, 2))
    there = lambda x: recurrent.unpack(recurrent.pack(x, LENGTHS), steps=6, fill=7.0)[0]
    slope = jax.jit(jax.grad(lambda x: jnp.vdot(there(x), x)))(x)
    np.testing.assert_allclose(slope, np.where(LIVE, 2 * x, 7))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: recurrent.of_torch({}, "lstm"), ValueError, "`state` must have `weight_ih_l0`, got the names"),
        (lambda: recurrent.of_torch({"weight_ih_l0": X}, "lstm"), ValueError, "must have `weight_hh_l0` beside"),
        (lambda: recurrent.of_torch({}, "rnn_tanh"), ValueError, "`op` must be one of 'lstm', 'gru', 'rnn', got"),
        (lambda: recurrent.of_onnx(X, X[None], op="lstm"), ValueError, "`w` must have shape"),
        (lambda: recurrent.of_flax({"ii": {}}, "lstm"), ValueError, "`params` must be those of a Flax cell for 'lstm'"),
        (
            lambda: recurrent.of_cudnn(np.ones(7), "rnn", inputs=2, units=2),
            ValueError,
            r"`buffer` must have shape \(12,\), as these sizes need, got \(7,\)",
        ),
        (
            lambda: recurrent.of_cudnn(np.ones(7), "rnn", inputs=1, units=2, skip_input=True),
            ValueError,
            "`inputs` must be `units`, 2, with `skip_input`, got 1",
        ),
        (
            lambda: recurrent.to_cudnn(Weights([X], [X], projection=[X])),
            ValueError,
            "`weights` must have no projection: its place in cuDNN's buffer is not documented",
        ),
        (lambda: recurrent.to_keras(Weights([X, X], [X, X]), op="rnn"), ValueError, "one layer .* for Keras, got 2"),
        (lambda: recurrent.to_onnx(Weights([None], [X]), op="rnn"), ValueError, "`w` in every layer, for ONNX has no"),
        (
            lambda: recurrent.to_flax(Weights([X[None]], [X[None]]), "rnn"),
            ValueError,
            "must have one direction for Flax, got two",
        ),
        (
            lambda: recurrent.to_flax(recurrent.of_flax(flax_cells("gru")[0], "gru"), "gru", nnx=True),
            ValueError,
            "`weights` must have no recurrent bias for nnx's GRUCell",
        ),
        (
            lambda: recurrent.both(Weights([X], [X]), Weights([X] * 2, [X] * 2)),
            ValueError,
            "as many layers as `forward`",
        ),
        (
            lambda: recurrent.both(Weights([X], [X]), Weights([X], [X], [X])),
            ValueError,
            "`reverse` must have a `bias` in",
        ),
        (lambda: recurrent.stacked(), ValueError, "`layers` must be one or more"),
        (
            lambda: recurrent.pack(X, np.array([3, 1])),
            ValueError,
            "`lengths` must be from 0 to 2, the steps of `x`, got",
        ),
        (lambda: recurrent.pack(X, np.array([1.0, 1])), TypeError, "`lengths` must be integers along one axis, got"),
        (
            lambda: jax.jit(ft.partial(recurrent.pack, X))(np.array([1, 1])),
            TypeError,
            "`lengths` must be known when tr",
        ),
        (lambda: recurrent.padded(X, np.array([0, 3])), ValueError, "`offsets` must rise from 0 to the 2 rows of"),
        (lambda: recurrent.padded(X, np.array([0, 2]), steps=1), ValueError, "`steps` must be at least 2, the longest"),
        (
            lambda: recurrent.unpack(recurrent.Packed(X, np.array([1, 2]))),
            ValueError,
            "batch sizes that are positive and",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
