"""Recurrent layers: the definition's bits, values of other libraries, ends of sequences, derivatives, errors."""

import functools as ft
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import eager
from jaxdnn._src.rnn import xla
from jaxdnn_reference.rnn import sigmoid, tanh
from tests.level_calls import roundings_omitted

N, T, D, H, P = 5, 8, 3, 4, 2
LENGTHS = np.array([8, 0, 3, 1, 6], np.int32)  # in no order; all, none and one of the steps among them
RESETS = np.zeros((N, T), bool)  # at a sequence's start, within it, at its end, behind it, and twice in turn
RESETS[[0, 0, 0, 1, 2, 2, 3, 4], [3, 4, 7, 2, 0, 3, 5, 5]] = True
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
# Every kind of step, by a name: the op, and what is given.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("lstm", {}),
    "lstm-projected-clipped": ("lstm", {"clip": (-0.3, 0.2)}),
    "gru-after": ("gru", {}),
    "gru-before": ("gru", {"reset_gate": "before"}),
    "rnn-tanh": ("rnn", {}),
    "rnn-relu": ("rnn", {"activation": "relu"}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
# Of each op one; the others share its code but for a step.
each_op = pytest.mark.parametrize("kind", ["lstm-projected-clipped", "gru-after", "gru-before", "rnn-tanh"])


def data(kind: str, seed: int = 0, dtype: Any = np.float32, sizes: tuple[int, ...] = (N, T, D, H, P)) -> dict[str, Any]:
    """Every array that a kind takes, by name."""
    (n, t, i, h, p), rng = sizes, np.random.default_rng(seed)
    columns, wide = (p if "projected" in kind else h), GATES[KINDS[kind][0]] * h
    shapes = {"x": (n, t, i), "w": (i, wide), "r": (columns, wide), "bias": (wide,), "recurrent_bias": (wide,)}
    shapes |= {"projection": (h, p)} if "projected" in kind else {}
    shapes |= {"h0": (n, columns)} | ({"c0": (n, h)} if kind.startswith("lstm") else {})
    return {name: (rng.normal(size=shape) * 0.6).astype(dtype) for name, shape in shapes.items()}


def called(of: Any, kind: str, v: dict[str, Any], **options: Any) -> list[Any]:
    """The results of an op, or of its definition."""
    x, w, r = (v[name] for name in ("x", "w", "r"))
    named = {name: array for name, array in v.items() if name not in ("x", "w", "r")}
    name, own = KINDS[kind]
    return jax.tree.leaves(getattr(of, name)(x, w, r, **named, **own, **options))


@ft.partial(jax.jit, static_argnames=("kind", "options"))
def _compiled(kind: str, v: dict[str, Any], options: tuple[Any, ...]) -> list[Any]:
    return called(dnn, kind, v, **dict(options))


def compiled(kind: str, v: dict[str, Any], **options: Any) -> list[np.ndarray]:
    """By one program for all calls of equal shapes and options."""
    return [np.asarray(y) for y in _compiled(kind, v, tuple(options.items()))]


def wave(*shape: int) -> np.ndarray:
    return np.sin(1.0 + np.arange(float(math.prod(shape)))).reshape(shape)


# ---- values ----------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_bits_are_the_definitions(kind: str, direction: str):
    """Of more terms than a pass adds; in 16 bits products are exact, and the states rounded."""
    for dtype in (np.float32, jnp.bfloat16, np.float16) if direction == "forward" else (np.float32,):
        v = data(kind, 1, dtype, (3, 4, 11, 9, 5)) | {"lengths": np.array([4, 0, 3], np.int32)}
        found = compiled(kind, v, direction=direction, engine="ordered", fill=0.75)
        wanted = called(reference, kind, v, direction=direction, fill=0.75, arithmetic="ordered")
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype == dtype
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=np.dtype(dtype).name)


@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_no_device_omits_a_rounding_of_what_is_multiplied(kind: str, steps: int):
    """Seen on an H200: the operands of a projection and of the product behind a reset gate were not rounded."""
    v = data(kind, 1, jnp.bfloat16, (3, steps, 5, 4, 2))
    function = lambda v: called(dnn, kind, v, engine="ordered")

    def pulled(v: dict[str, Any]) -> Any:
        found, back = jax.vjp(function, v)
        return back([jnp.ones_like(y) for y in found])

    for run in (function, pulled):
        assert not roundings_omitted(run, v)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["lstm-projected-clipped", "gru-after"])
def test_bits_in_float64(kind: str):
    v = data(kind, 1, np.float64) | {"lengths": LENGTHS}
    wanted, golden = (called(reference, kind, v, arithmetic=a) for a in ("ordered", "golden"))
    for engine in ("ordered", "xla"):
        for a, b, c in zip(compiled(kind, v, engine=engine), wanted, golden, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, c, rtol=0, atol=1e-14)
            if engine == "ordered":
                np.testing.assert_array_equal(a, b)


# Of PyTorch 2.15 on a CPU in float64: y, final states, and the gradients of the sum of y and the final h, in x and in
# the first three recurrent biases. The second sequence has two steps.
PYTORCH = {
    "lstm": """
        0.07730810623336841 0.10081222266956577 0.010509935143319243 0.0014778594227287181 0.09293199530182804
            0.003095152458721495 0.055341517441818755 0.07560042992145094 0.027957247340579028
            0.026499215554891223 0.0 0.0
        0.09293199530182804 0.003095152458721495 0.027957247340579028 0.026499215554891223
        0.5288093208169882 0.5215657436360808 0.23744956427102484 0.8286910514616105 0.8841611209833844
            0.43294234189135017
        -0.07249858986317691 -0.016246341737877083 -0.04393175798349934 -0.09575209467978928
            -0.04527663324596718 -0.17983536759361693 -0.0058751009253418425 -0.01698222057366934
            -0.0364627084126672 0.09481115702961403 0.0 0.0
        0.29266399100866575 -0.08645245735922176 -0.2877704438233678
    """,
    "gru": """
        0.7894617157227115 0.7890197898003662 0.09502429147120539 0.8899225940767145 0.9668965783487072
            0.5623067963376338 0.5988721486288208 0.8003893847203472 0.47513243188094 0.47868237182795464
            0.45769210538600164 -0.03361754453797598 0.8531944975252388 0.9370742202649034 0.49848063484746424
            0.0 0.0 0.0
        0.5988721486288208 0.8003893847203472 0.47513243188094 0.8531944975252388 0.9370742202649034
            0.49848063484746424
        0.9886764862428695 -1.236133575857502 0.7571148372682702 -0.9619711349557362 1.7720719719862403
            -1.7419942305141742 1.5116394782293145 -1.632060569824859 0.7523988227715965 -0.9286794283026318 0.0
            0.0
        0.2175211810495869 0.1287251810412595 0.21917375930888144
    """,
    "rnn": """
        0.8712960186382249 0.8547583246069707 0.03775603601537234 0.9683307317600282 0.9770469989354986
            0.3299229168017576 0.7437891200640624 0.7738825039629753 0.15283868063468403 0.7694390089081649
            0.757400831112879 0.05090092945267147 0.9720611265282305 0.9794589840439877 0.3272783203822211 0.0
            0.0 0.0
        0.7437891200640624 0.7738825039629753 0.15283868063468403 0.9720611265282305 0.9794589840439877
            0.3272783203822211
        0.6496570531176968 -0.9297003458138398 0.504343602890564 -0.8801741309142634 1.7569970736559164
            -1.9912822283989555 0.8845484031277904 -1.1032674197910355 0.41867855739279874 -0.660349251160664
            0.0 0.0
        2.116689099598112 1.0156361089554715 10.697114812443456
    """,
}


def pytorchs(name: str) -> list[list[float]]:
    """Its rows; a line that is indented further goes on with the one before."""
    rows = PYTORCH[name].strip().replace("\n            ", " ").splitlines()
    return [[float(number) for number in row.split()] for row in rows]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PYTORCH)
def test_values_and_gradients_are_pytorchs(name: str):
    i, h = 2, 3
    columns, wide = (2 if name == "lstm" else h), GATES[name] * h
    x, w, r, d, h0 = wave(2, 3, i), wave(i, wide), wave(columns, wide), wave(wide) / 2, wave(2, columns) / 2
    given: dict[str, Any] = {"bias": wave(wide), "lengths": np.array([3, 2])}
    given |= {"projection": wave(h, columns), "c0": wave(2, h)} if name == "lstm" else {}

    def total(x: Any, d: Any) -> Any:
        found = jax.tree.leaves(getattr(dnn, name)(x, w, r, recurrent_bias=d, h0=h0, **given))
        return jnp.sum(found[0]) + jnp.sum(found[1]), found

    gradients, found = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, d)
    for ours, wanted in zip([*found, gradients[0], gradients[1][:3]], pytorchs(name), strict=True):
        np.testing.assert_allclose(np.ravel(ours), wanted, rtol=1e-13, atol=1e-15)


def test_kernels_of_flax_fit():
    """Its OptimizedLSTMCell: kernels of i, f, g, o for inputs, without a bias, and for the state, with one."""
    v, sigmoid = data("lstm"), jax.nn.sigmoid
    of_x, of_h = (dict(zip("ifgo", np.split(v[name], 4, 1), strict=True)) for name in ("w", "r"))
    bias = dict(zip("ifgo", np.split(v["bias"], 4), strict=True))
    c, h = v["c0"], v["h0"]
    for t in range(T):
        i, f, g, o = (v["x"][:, t] @ of_x[k] + h @ of_h[k] + bias[k][None] for k in "ifgo")
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
    del v["recurrent_bias"]
    for ours, wanted in zip(compiled("lstm", v)[1:], (h, c), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-6)


@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_exact_layers(engine: str):
    """A shift register, a counter, and a state that is kept: whatever order sums have."""
    x = np.random.default_rng(0).integers(0, 9, (2, 6, 1)).astype(np.float32)
    w, r = np.eye(1, 3, dtype=np.float32), np.eye(3, k=1, dtype=np.float32)
    y, h = jax.jit(ft.partial(dnn.rnn, activation="relu", engine=engine))(x, w, r)
    np.testing.assert_array_equal(y[..., 0], x[..., 0])
    np.testing.assert_array_equal(y[:, 2:, 2], x[:, :-2, 0])
    np.testing.assert_array_equal(h, y[:, -1])
    gates = np.array([200, 200, 200, -200], np.float32)  # i = f = g = 1, o = 0
    nothing = np.zeros((1, 4), np.float32)
    run = jax.jit(ft.partial(dnn.lstm, engine=engine))
    y, (h, c) = run(x, nothing, nothing, bias=gates, c0=np.full((2, 1), 3, np.float32))
    np.testing.assert_array_equal(c, 9)
    np.testing.assert_array_equal(y, 0)
    v = data("gru-after")
    v["bias"][H : 2 * H] = 300  # keeps the old state
    y, h = compiled("gru-after", v, engine=engine)
    np.testing.assert_array_equal(h, v["h0"])
    np.testing.assert_array_equal(y, np.broadcast_to(v["h0"][:, None], y.shape))


@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_stated_functions(function: str, dtype: Any):
    """The definition's bits; from float64, or its logarithms, a few units away; limits, signs of zero and NaN."""
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 20, 40, 68.9, 69.1, -69.1, -690.5, 1e30]
    x = np.array([*np.linspace(-30, 30, 20001), *np.linspace(-0.5, 0.5, 5001), *edges], dtype)
    with jax.enable_x64(dtype == np.float64):
        found = np.asarray(jax.jit(getattr(xla, function))(x))
    np.testing.assert_array_equal(found, {"sigmoid": sigmoid, "tanh": tanh}[function](x))
    wide = np.nan_to_num(x.astype(np.longdouble))
    exact = np.tanh(wide) if function == "tanh" else np.exp(-np.logaddexp(np.longdouble(0), -wide))
    error = np.abs(found - exact) / (np.finfo(dtype).eps / 2)
    rate, least = (10, 0) if function == "tanh" else (5, {np.float32: 1e-30, np.float64: 1e-299}[dtype])
    known = ~np.isnan(x)
    assert (error <= rate * np.abs(exact) + 2 * least / np.finfo(dtype).eps)[known].all()
    assert np.isnan(found[~known]).all()
    if function == "tanh":
        np.testing.assert_array_equal(np.signbit(found), np.signbit(x))


# ---- sequences -------------------------------------------------------------------------------------------------------


@each_kind
def test_a_sequence_is_what_it_is_alone(kind: str):
    """Of its own steps, in either direction; behind its end is the fill, and of no steps the initial state is final."""
    v = data(kind)
    for direction in ("forward", "reverse"):
        y, *final = compiled(kind, {**v, "lengths": LENGTHS}, direction=direction, fill=-2.5)
        for n, count in enumerate(LENGTHS):
            batched = [name for name in v if name in ("x", "h0", "c0")]
            alone = {**v, **{name: v[name][n : n + 1] for name in batched}}
            alone["x"] = alone["x"][:, :count]
            own, *last = called(reference, kind, alone, direction=direction)
            np.testing.assert_allclose(y[n, :count], own[0], atol=2e-6)
            assert (y[n, count:] == -2.5).all()
            for a, b in zip(final, last, strict=True):
                np.testing.assert_allclose(a[n], b[0], atol=2e-6)
        np.testing.assert_array_equal(final[0][1], v["h0"][1])


@each_op
def test_what_is_behind_the_end_is_not_read(kind: str):
    """Neither are neighbours: NaN there is in no result and in no gradient."""
    v = data(kind)
    names = [name for name in v if name != "x"]

    @jax.jit
    def run(x: Any, arrays: Any) -> Any:
        v = {"x": x, **dict(zip(names, arrays, strict=True))}
        y, pull = jax.vjp(lambda v: called(dnn, kind, {**v, "lengths": LENGTHS}), v)
        return y, pull([jnp.ones_like(one) for one in y])[0]

    def run_with(x: Any) -> Any:
        return run(x, [v[name] for name in names])

    behind = np.arange(T) >= LENGTHS[:, None]
    poisoned = np.where(behind[..., None], np.nan, v["x"]).astype(np.float32)
    clean = run_with(v["x"])
    for a, b in zip(jax.tree.leaves(run_with(poisoned)), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(clean[1]["x"])[behind] == 0).all()
    sick = v["x"].copy()
    sick[0] = np.nan
    (y, *final), gradients = run_with(sick)
    for one in (y, *final, gradients["x"], gradients["h0"]):
        assert np.isfinite(one[1:]).all()
        assert not np.isfinite(one[0]).all()


@each_op
@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_the_state_of_a_sequence_without_steps_is_in_no_gradient_of_weights(kind: str, engine: str):
    v = data(kind)
    weights = {name: a for name, a in v.items() if name not in ("x", "h0", "c0")}
    gradients = jax.jit(
        jax.grad(lambda w, h0: jnp.sum(called(dnn, kind, {**v, **w, "h0": h0, "lengths": LENGTHS}, engine=engine)[0]))
    )
    wanted = gradients(weights, v["h0"])
    for name, found in gradients(weights, np.where(LENGTHS[:, None] > 0, v["h0"], np.nan).astype(np.float32)).items():
        np.testing.assert_array_equal(found, wanted[name], err_msg=name)


@each_kind
def test_the_state_of_a_sequence_without_steps_is_in_no_second_derivative(kind: str):
    v = data(kind)
    weights = {name: a for name, a in v.items() if name not in ("x", "h0", "c0")}
    total = lambda w, h0: jnp.sum(jnp.sin(called(dnn, kind, {**v, **w, "h0": h0, "lengths": LENGTHS})[0]))
    size = lambda w, h0: sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(total)(w, h0)))
    second = jax.jit(jax.grad(size))
    wanted = second(weights, v["h0"])
    for name, found in second(weights, np.where(LENGTHS[:, None] > 0, v["h0"], np.nan).astype(np.float32)).items():
        np.testing.assert_array_equal(found, wanted[name], err_msg=name)


def test_directions_that_are_sharded_in_types():
    """A device has the weights of one direction; their gradients are sharded as they are."""
    rng = np.random.default_rng(0)
    x, w, r = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 5, 3), (2, 3, 8), (2, 2, 8)))
    run = lambda *arrays: jax.vjp(lambda *v: dnn.lstm(*v, direction="bidirectional")[0], *arrays)
    y, pull = jax.jit(run)(x, w, r)
    wanted = pull(jnp.cos(y))
    with jax.set_mesh(jax.make_mesh((2, 4), ("d", "n"))):
        placed = [jax.device_put(a, p) for a, p in zip((x, w, r), (jax.P("n"), jax.P("d"), jax.P("d")), strict=True)]
        for wrap in (lambda f: f, jax.jit):
            found, pull = wrap(run)(*placed)
            np.testing.assert_allclose(found, y, atol=2e-6)
            for a, b, like in zip(pull(jnp.cos(found)), wanted, placed, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
                assert jax.typeof(a).sharding == jax.typeof(like).sharding


def test_lengths_where_the_number_of_steps_is_a_symbol():
    v = data("gru-after") | {"lengths": LENGTHS}
    n, t = jax.export.symbolic_shape("n, t")
    shapes = {"x": (n, t, D), "h0": (n, H), "lengths": (n,)}
    avals = {name: jax.ShapeDtypeStruct(shapes.get(name, a.shape), a.dtype) for name, a in v.items()}
    program = jax.export.export(jax.jit(ft.partial(called, dnn, "gru-after")))(avals)
    for a, b in zip(program.call(v), compiled("gru-after", v), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_lengths_of_any_integers():
    v = data("gru-after")
    wanted = compiled("gru-after", {**v, "lengths": np.array([T, 0, 2, 0, T], np.int32)})
    for given in (
        np.array([T + 5, -3, 2, -1, 2**31 - 1], np.int32),
        np.array([200, 0, 2, 0, 255], np.uint8),
        np.array([2**32 - 1, 0, 2, 0, 2**31], np.uint32),
    ):
        for a, b in zip(compiled("gru-after", {**v, "lengths": given}), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@each_op
@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_layouts_and_directions(kind: str, engine: str):
    v = data(kind)
    y, *final = compiled(kind, v, engine=engine)
    in_time = {**v, "x": np.swapaxes(v["x"], 0, 1)}
    found = compiled(kind, in_time, engine=engine, layout="TNC")
    for a, b in zip(found, (np.swapaxes(y, 0, 1), *final), strict=True):
        np.testing.assert_allclose(a, b, atol=0 if engine == "ordered" else 2e-6)
    turned = compiled(kind, {**v, "x": v["x"][:, ::-1]}, engine=engine, direction="reverse")
    for a, b in zip(turned, (y[:, ::-1], *final), strict=True):
        np.testing.assert_allclose(a, b, atol=0 if engine == "ordered" else 2e-6)


@pytest.mark.parametrize("layout", ["NTC", "TNC"])
def test_both_directions_are_two_layers_side_by_side(layout: str):
    """The definition's bits, and those of a layer in each direction."""
    kind, pair = "lstm-projected-clipped", [data("lstm-projected-clipped", seed) for seed in (0, 1)]
    x = pair[0]["x"] if layout == "NTC" else np.swapaxes(pair[0]["x"], 0, 1)
    v = {name: np.stack([one[name] for one in pair]) for name in pair[0]} | {"x": x, "lengths": LENGTHS}
    given: dict[str, Any] = {"fill": 2.0, "layout": layout}
    found = compiled(kind, v, direction="bidirectional", engine="ordered", **given)
    wanted = called(reference, kind, v, direction="bidirectional", arithmetic="ordered", **given)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    of_each = [
        compiled(kind, {**one, "x": x, "lengths": LENGTHS}, direction=direction, engine="ordered", **given)
        for one, direction in zip(pair, ("forward", "reverse"), strict=True)
    ]
    np.testing.assert_array_equal(found[0], np.concatenate([y for y, *_ in of_each], -1))
    for i, states in enumerate(found[1:], 1):
        np.testing.assert_array_equal(states, np.stack([one[i] for one in of_each]))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("lstm-projected-clipped", jnp.bfloat16), ("gru-after", np.float32), ("gru-before", jnp.bfloat16)],
)
def test_steps_pieces_and_cells_have_the_bits_of_a_layer(kind: str, dtype: Any):
    """Where a level fixes bits, if the cell's state is not rounded between them."""
    v = data(kind, 2, dtype)
    if "c0" in v:
        v["c0"] = v["c0"].astype(np.float32)
    run = jax.jit(ft.partial(called, dnn, kind, determinism="portable"))
    y, *final = map(np.asarray, run(v))
    states = [name for name in ("h0", "c0") if name in v]
    first = run({**v, "x": v["x"][:, :4]})
    second = run({**v, "x": v["x"][:, 4:], **dict(zip(states, first[1:], strict=True))})
    np.testing.assert_array_equal(np.concatenate([first[0], second[0]], 1), y)
    for a, b in zip(second[1:], final, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    name, own = KINDS[kind]
    given = {k: a for k, a in v.items() if k in ("bias", "recurrent_bias", "projection")}
    cell = jax.jit(ft.partial(getattr(dnn, f"{name}_cell"), **given, **own, determinism="portable"))
    state: Any = [v[name] for name in states]
    for t in range(T):
        state = jax.tree.leaves(cell(v["x"][:, t], v["w"], v["r"], *state))
        np.testing.assert_array_equal(state[0], y[:, t])


# ---- resets, heads, layers -------------------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_what_begins_anew_is_a_sequence_of_its_own(kind: str, direction: str):
    """In either direction; and the bits are the definition's."""
    v = data(kind)
    given: dict[str, Any] = {"direction": direction, "engine": "ordered"}
    found = compiled(kind, {**v, "lengths": LENGTHS, "resets": RESETS}, **given)
    wanted = called(
        reference, kind, {**v, "lengths": LENGTHS, "resets": RESETS}, direction=direction, arithmetic="ordered"
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    turned = {**v, "x": np.swapaxes(v["x"], 0, 1), "lengths": LENGTHS, "resets": RESETS.T}
    np.testing.assert_array_equal(compiled(kind, turned, layout="TNC", **given)[0], np.swapaxes(found[0], 0, 1))
    states = [name for name in v if name in ("h0", "c0")]
    for n, count in enumerate(LENGTHS):
        edges = [0, *(t for t in range(1, count) if RESETS[n, t]), int(count)]
        for start, stop in itertools.pairwise(edges):
            piece = {**v, "x": v["x"][n : n + 1, start:stop]}
            first = start == 0 and not (RESETS[n, 0] and count) if direction == "forward" else stop == count
            piece |= {name: v[name][n : n + 1] * first for name in states}
            own, *last = called(reference, kind, piece, direction=direction, arithmetic="ordered")
            np.testing.assert_array_equal(found[0][n, start:stop], own[0])
            if stop == count if direction == "forward" else start == 0:
                for a, b in zip(found[1:], last, strict=True):
                    np.testing.assert_array_equal(a[n], b[0])


def test_no_gradient_passes_a_step_that_begins_anew():
    """Nor does NaN."""
    v = data("lstm")
    sick = v["x"].copy()
    sick[0, 2] = np.nan
    run = jax.jit(lambda x, h0: dnn.lstm(x, v["w"], v["r"], h0=h0, resets=RESETS)[0])
    assert np.isfinite(run(sick, v["h0"])[0, 3:]).all()
    dx, dh = jax.jit(jax.grad(lambda x, h0: jnp.sum(run(x, h0)[:, 7]), (0, 1)))(v["x"], v["h0"])
    assert (np.asarray(dx)[0, :7] == 0).all()
    assert (np.asarray(dx)[4, 5:] != 0).all()
    assert (np.asarray(dx)[4, :5] == 0).all()
    assert (np.asarray(dh) == 0).all()


def whole(r: np.ndarray, gates: int) -> np.ndarray:
    """The block-diagonal matrix of heads."""
    heads, rows, wide = r.shape
    found = np.zeros((heads, rows, gates, heads, wide // gates), r.dtype)
    for j in range(heads):
        found[j, :, :, j] = r[j].reshape(rows, gates, -1)
    return found.reshape(heads * rows, heads * wide)


@each_kind
def test_heads_are_a_block_diagonal_matrix(kind: str):
    """Values and gradients; the bits are the definition's."""
    v, gates, rng = data(kind, 2), GATES[KINDS[kind][0]], np.random.default_rng(9)
    columns = P if "projection" in v else H
    v["r"] = rng.normal(size=(2, columns // 2, gates * H // 2)).astype(np.float32)
    if "projection" in v:
        v["projection"] = rng.normal(size=(2, H // 2, P // 2)).astype(np.float32)
    marks = {"lengths": LENGTHS, "resets": RESETS}
    given: dict[str, Any] = {"direction": "reverse"}
    wanted = called(reference, kind, v | marks, **given, arithmetic="ordered")
    for a, b in zip(compiled(kind, v | marks, engine="ordered", **given), wanted, strict=True):
        np.testing.assert_array_equal(a, b)

    def full(v: dict[str, Any]) -> dict[str, Any]:
        found = {**v, "r": whole(np.asarray(v["r"]), gates)}
        return found | ({"projection": whole(np.asarray(v["projection"]), 1)} if "projection" in v else {})

    gradient = lambda v: jax.grad(lambda v: sum(jnp.vdot(y, y) for y in called(dnn, kind, v | marks, **given)))(v)
    ours, others = jax.jit(gradient)(v), jax.jit(gradient)(full(v))
    for name, found in full(ours).items():
        mask = whole(np.ones_like(v[name]), gates if name == "r" else 1) if name in ("r", "projection") else 1
        np.testing.assert_allclose(found, others[name] * mask, rtol=1e-4, atol=1e-4, err_msg=name)


@each_op
@pytest.mark.parametrize("heads", [None, 2])
def test_a_skipped_product_is_one_with_the_identity(kind: str, heads: int | None):
    sizes = (N, T, H, H, P)
    v, gates = data(kind, 3, sizes=sizes), GATES[KINDS[kind][0]]
    eye = np.tile(np.eye(H, dtype=np.float32), (1, gates))
    if heads:
        v["r"] = np.ones((2, len(v["r"]) // 2, gates * H // 2), np.float32) / 4
        v |= {"projection": np.ones((2, H // 2, P // 2), np.float32)} if "projection" in v else {}
    wanted = compiled(kind, {**v, "w": eye, "lengths": LENGTHS}, engine="ordered")
    found = compiled(kind, {**v, "w": None, "lengths": LENGTHS}, engine="ordered")
    own = called(reference, kind, {**v, "w": None, "lengths": LENGTHS}, arithmetic="ordered")
    for a, b, c in zip(found, wanted, own, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def stack(kind: str, seed: int, both: bool) -> dict[str, Any]:
    """Two layers, of one or both directions, of two widths, of which the second has no biases and no initial states."""
    wide = 2 * (P if "projected" in kind else H) if both else P if "projected" in kind else H
    layers = [data(kind, seed), data(kind, seed + 1, sizes=(N, T, wide, H + 2, P + 1))]
    if both:
        other = [data(kind, seed + 2), data(kind, seed + 3, sizes=(N, T, wide, H + 2, P + 1))]
        layers = [
            {name: np.stack([a[name], b[name]]) for name in a if name != "x"} | {"x": a["x"]}
            for a, b in zip(layers, other, strict=True)
        ]
    rest = ("bias", "recurrent_bias", "h0", "c0")
    found = {n: [layers[0][n], None if n in rest else layers[1][n]] for n in layers[0] if n != "x"}
    return {**found, "x": layers[0]["x"], "lengths": LENGTHS, "resets": RESETS}


@each_op
@pytest.mark.parametrize("both", [False, True])
def test_layers_are_those_one_by_one(kind: str, both: bool):
    """With dropout between them; the bits are the definition's, the final states of each layer its own."""
    v, direction = stack(kind, 0, both), "bidirectional" if both else "reverse"
    given: dict[str, Any] = {"direction": direction, "fill": 1.5}
    between: dict[str, Any] = {"dropout": 0.25, "dropout_key": 7}
    found = jax.jit(lambda v: called(dnn, kind, v, **given, **between, engine="ordered"))(v)
    wanted = called(reference, kind, v, **given, **between, arithmetic="ordered")
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    of = lambda i: {
        n: a[i] if isinstance(a, list) else a for n, a in v.items() if not isinstance(a, list) or a[i] is not None
    }
    y, *first = compiled(kind, of(0), direction=direction, engine="ordered")
    dropped = np.asarray(dnn.dropout(y, 7, rate=0.25))
    z, *second = compiled(kind, of(1) | {"x": dropped}, **given, engine="ordered")
    np.testing.assert_array_equal(found[0], z)
    alternating = [state for pair in zip(first, second, strict=True) for state in pair]
    for a, b in zip(found[1:], alternating, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_between_layers_is_a_function_of_the_logical_index():
    """Not of the layout, of how a batch is cut, or of sharding; each layer has its own, the gradient the same."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4, 3)).astype(np.float32)
    w, r = ([rng.normal(size=(n, 12)).astype(np.float32) for n in sizes] for sizes in ((3, 4, 4), (4, 4, 4)))
    run = lambda x, key, **given: dnn.gru(x, w, r, dropout=0.5, dropout_key=key, determinism="portable", **given)[0]
    one = jax.jit(run)
    y = np.asarray(one(x, dnn.DropoutState.of_seed(5)))
    np.testing.assert_array_equal(run(x, 5), y)  # outside of jit
    half = jax.jit(run)(x[4:], dnn.DropoutState.of_seed(5, 4 * 4 * 4))
    np.testing.assert_array_equal(half, y[4:])
    turned = jax.jit(ft.partial(run, layout="TNC"))(np.swapaxes(x, 0, 1), dnn.DropoutState.of_seed(5))
    np.testing.assert_array_equal(np.swapaxes(turned, 0, 1), y)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
    np.testing.assert_array_equal(one(placed, dnn.DropoutState.of_seed(5)), y)
    assert (y != np.asarray(one(x, dnn.DropoutState.of_seed(6)))).any()
    masks = [np.asarray(dnn.dropout_mask(5, (8, 4, 4), rate=0.5, offset=i * 2**48)) for i in (0, 1)]
    assert (masks[0] != masks[1]).any()
    eye = [np.eye(4, dtype=np.float32)] * 3
    zero = [np.zeros((4, 4), np.float32)] * 3
    total = lambda x: jnp.sum(dnn.rnn(x, eye, zero, activation="relu", dropout=0.5, dropout_key=5)[0])
    slope = jax.jit(jax.grad(total))(np.ones((8, 4, 4), np.float32))
    np.testing.assert_array_equal(slope, 4.0 * (masks[0] & masks[1]))


def test_layers_outside_of_jit_are_one_program():
    v = {n: a for n, a in stack("gru-after", 0, False).items()}
    arrays = {
        n: [None if b is None else jnp.asarray(b) for b in a] if isinstance(a, list) else jnp.asarray(a)
        for n, a in v.items()
    }
    called(dnn, "gru-after", arrays)
    before = dict(eager._programs)
    for a, b in zip(called(dnn, "gru-after", arrays), compiled("gru-after", v), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert dict(eager._programs) == before
    assert any(key[0].__name__ == "gru" for key in before)


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, "xla") for kind in KINDS), ("lstm-projected-clipped", "ordered"), ("gru-before", "ordered")],
)
def test_derivatives_are_differences_of_the_definition(kind: str, engine: str):
    """Along one direction in all arrays at once: of the results, and of a gradient's own gradient."""
    direction = "reverse" if engine == "ordered" else "forward"
    v, along = data(kind, 3, np.float64), data(kind, 4, np.float64)
    lengths = {"lengths": LENGTHS, "resets": RESETS}
    cotangents = [np.cos(np.arange(float(y.size))).reshape(y.shape) for y in called(reference, kind, v)]
    ours = lambda v: called(dnn, kind, {**v, **lengths}, direction=direction, engine=engine)

    def gradient(v: Any) -> Any:
        return jax.vjp(ours, v)[1](cotangents)[0]

    @jax.jit
    def run(v: Any, along: Any) -> Any:
        return jax.jvp(ours, (v,), (along,))[1], jax.jvp(gradient, (v,), (along,))

    tangents, (first, second) = run(v, along)

    def moved(step: float) -> dict[str, Any]:
        return {name: a + step * along[name] for name, a in v.items()}

    step = 2.0**-17
    high, low = (called(reference, kind, {**moved(s), **lengths}, direction=direction) for s in (step, -step))
    for ours_along, a, b in zip(tangents, high, low, strict=True):
        np.testing.assert_allclose(ours_along, (a - b) / (2 * step), atol=1e-8)
    inner = sum(float(np.vdot(a, b)) for a, b in zip(cotangents, tangents, strict=True))
    np.testing.assert_allclose(inner, sum(float(np.vdot(first[name], along[name])) for name in v), rtol=1e-11)
    high, low = (jax.jit(gradient)(moved(s)) for s in (step, -step))
    for name in v:
        np.testing.assert_allclose(second[name], (high[name] - low[name]) / (2 * step), atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", ["lstm-projected-clipped", "gru-after"])
def test_vmap_is_a_loop(kind: str):
    """Over sequences, which are more of them; over weights; and of gradients, one for each."""
    v, many = data(kind), [data(kind, seed) for seed in range(3)]
    stacked = {name: np.stack([one[name] for one in many]) for name in v}
    states = [name for name in v if name in ("x", "h0", "c0")]
    plain = lambda v: called(dnn, kind, {**v, "lengths": LENGTHS})
    gradient = jax.grad(lambda v: sum(jnp.vdot(y, y) for y in plain(v)))
    for function, names in ((plain, [*v]), (gradient, states), (gradient, ["r", "recurrent_bias"])):
        given = {name: stacked[name] if name in names else v[name] for name in v}
        found = jax.jit(jax.vmap(function, ({name: 0 if name in names else None for name in v},)))(given)
        for i in range(len(many)):
            wanted = jax.jit(function)({name: stacked[name][i] if name in names else v[name] for name in v})
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["lstm-projected-clipped", "gru-before"])
def test_gradients_in_16_bits(kind: str):
    """Of their dtype, and within what rounding states and cotangents to it does."""
    v = data(kind, 5, jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda v: sum(jnp.sum(y.astype(jnp.float32)) for y in called(dnn, kind, v))))
    narrow, exact = gradient(v), gradient({name: a.astype(np.float32) for name, a in v.items()})
    for name in v:
        assert narrow[name].dtype == v[name].dtype
        scale = float(np.abs(exact[name]).max())
        np.testing.assert_allclose(narrow[name].astype(np.float32), exact[name], atol=0.05 * scale, err_msg=name)


def test_the_derivative_at_a_limit_of_the_cell_is_one():
    """And beyond it 0 in what the cell is computed from, but not in the output gate."""
    w, r = np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
    bias = np.array([0, 300, 0, 0], np.float32)  # c = c0

    def total(c0: Any, bias: Any, clip: Any) -> Any:
        return jnp.sum(dnn.lstm(np.zeros((1, 1, 1), np.float32), w, r, bias=bias, c0=c0, clip=clip)[0])

    for limit, inside in ((0.5, True), (0.4375, False)):
        run = jax.jit(jax.grad(ft.partial(total, clip=(-9.0, limit)), (0, 1)))
        of_c, of_bias = run(np.full((1, 1), 0.5, np.float32), bias)
        assert (of_c[0, 0] != 0) == inside
        assert (of_bias[2] != 0) == inside
        assert of_bias[3] != 0


def test_the_slope_of_relu_at_zero():
    v = np.zeros((1, 1, 1), np.float32)
    slope = jax.grad(lambda x: jnp.sum(dnn.rnn(x, jnp.ones((1, 1)), jnp.ones((1, 1)), activation="relu")[0]))(v)
    assert slope.item() == 0


def test_levels():
    """XLA's products have no order of their own; `ordered` serves what fixes bits, unasked."""
    v = data("lstm")
    arrays = v["x"], v["w"], v["r"]
    served = lambda **given: {e.op: e.engine for e in dnn.explain(ft.partial(dnn.lstm, **given), *arrays)}
    assert served() == {"rnn_product": "xla", "rnn": "xla"}
    assert served(determinism="portable") == {"rnn_product": "ordered", "rnn": "ordered"}
    with pytest.raises(NotImplementedError, match="guarantees 'run_to_run' here, not 'batch_invariant'"):
        dnn.lstm(*arrays, engine="xla", determinism="batch_invariant")


@each_op
def test_gradients_of_weights_are_added_in_a_fixed_order(kind: str):
    """Where the level fixes bits: on a mesh they have those of one device."""
    v = data(kind, 7, sizes=(8, 5, D, H, P)) | {"lengths": np.array([5, 0, 3, 1, 4, 5, 2, 5], np.int32)}
    v["resets"] = np.random.default_rng(8).uniform(size=(8, 5)) < 0.3
    batched = [name for name in v if name in ("x", "h0", "c0", "lengths", "resets")]

    @jax.jit
    def gradients(v: dict[str, Any]) -> Any:
        rest = {name: a for name, a in v.items() if name not in ("lengths", "resets")}
        run = lambda rest: called(dnn, kind, {**v, **rest}, determinism="mesh_invariant")
        y, pull = jax.vjp(run, rest)
        return pull([jnp.cos(one) for one in y])[0]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    placed = {
        name: jax.device_put(a, jax.NamedSharding(mesh, jax.P("d") if name in batched else jax.P()))
        for name, a in v.items()
    }
    wanted = gradients(v)
    for name, found in gradients(placed).items():
        np.testing.assert_array_equal(found, wanted[name], err_msg=name)


# ---- errors ----------------------------------------------------------------------------------------------------------

ANY: Callable[[Any], Any] = lambda v: v
ZEROS: Callable[..., Any] = lambda *shape: np.zeros(shape, np.float32)
BOTH = "bidirectional"
X, W, R = ZEROS(N, T, D), ZEROS(D, 4 * H), ZEROS(H, 4 * H)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dnn.lstm(X[0], W, R), ValueError, r"`x` must have shape \(N, T, I\), got \(8, 3\)"),
        (lambda: dnn.lstm(X[0], W, R, layout="TNC"), ValueError, r"`x` must have shape \(T, N, I\), got"),
        (lambda: dnn.lstm_cell(X, W, R, ZEROS(N, H), ZEROS(N, H)), ValueError, r"`x` must have shape \(N, I\), got"),
        (lambda: dnn.lstm(X.astype(int), W, R), TypeError, "`x` must have one of the dtypes float32, bfloat16"),
        (
            lambda: dnn.lstm(X, W.astype(np.float16), R),
            TypeError,
            "`w` must have the dtype float32, got float16",
        ),
        (lambda: dnn.lstm(X, W.T, R), ValueError, r"`w` must have shape \(I, 4 H\) with I = 3 .* it looks transposed"),
        (lambda: dnn.gru(X, W, R), ValueError, r"`w` must have shape \(I, 3 H\) with I = 3 as in `x`, got \(3, 16\)\."),
        (lambda: dnn.rnn(X, W[0], R), ValueError, r"`w` must be a matrix, got shape \(16,\)"),
        (lambda: dnn.lstm(X, W, R[:3]), ValueError, r"`r` must have shape \(4, 16\), for 4 units, as `w` has"),
        (
            lambda: dnn.lstm(X, W, R, projection=ZEROS(4, 2)),
            ValueError,
            r"`r` must have shape \(2, 16\), .* states of 2",
        ),
        (
            lambda: dnn.lstm(X, W, R, projection=ZEROS(2, 4)),
            ValueError,
            r"`projection` must have shape \(H, P\) with H",
        ),
        (lambda: dnn.lstm(X, W, R, bias=ZEROS(2, 16)), ValueError, r"`bias` must have shape \(16,\), one for every"),
        (lambda: dnn.lstm(X, W, R, h0=ZEROS(1, N, H)), ValueError, r"`h0` must have shape \(5, 4\), one row for every"),
        (lambda: dnn.lstm(X, W, R, c0=ZEROS(N, 3)), ValueError, r"`c0` must have shape \(5, 4\)"),
        (lambda: dnn.lstm(X, W, R, h0=ZEROS(N, H).astype(np.float16)), TypeError, "`h0` must have the dtype"),
        (lambda: dnn.gru_cell(X[0], ZEROS(D, 12), ZEROS(H, 12), ZEROS(N, H)), ValueError, "`h` must have shape"),
        (lambda: dnn.lstm(X, W, R, lengths=ZEROS(N)), TypeError, "`lengths` must be integers, got float32"),
        (lambda: dnn.lstm(X, W, R, lengths=np.zeros((T, N), int)), ValueError, r"`lengths` must have shape \(5,\)"),
        (lambda: dnn.lstm(X, W, R, clip=ANY(3.0)), ValueError, r"`clip` must be None or a pair \(low, high\), got 3.0"),
        (lambda: dnn.lstm(X, W, R, clip=(1, -1)), ValueError, "`clip` must have a low limit that is at most the high"),
        (lambda: dnn.lstm(X, W, R, clip=(-1, math.nan)), ValueError, "`clip` must have a low limit that is at most"),
        (lambda: dnn.lstm(X, W, R, fill=ANY("nan")), TypeError, "`fill` must be a number known when traced, got 'nan'"),
        (lambda: dnn.lstm(X, W, R, layout="NCT"), ValueError, "`layout` must be one of 'NTC', 'TNC', got 'NCT'"),
        (
            lambda: dnn.lstm(X, W, R, direction="backward"),
            ValueError,
            "`direction` must be one of 'forward', 'reverse'",
        ),
        (
            lambda: dnn.gru(X, W, R, reset_gate=ANY(True)),
            ValueError,
            "`reset_gate` must be one of 'after', 'before', got True",
        ),
        (lambda: dnn.lstm(X, W, R, direction="bidirectional"), ValueError, r"`w` must have 3 axes for `direction` 'bi"),
        (
            lambda: dnn.rnn(X[:2], W[[0] * 6].reshape(2, D, -1), ZEROS(2, 16, 16), h0=ZEROS(2, 16), direction=BOTH),
            ValueError,
            r"`h0` must have 3 axes for `direction` 'bidirectional', the first of 2, .* got shape \(2, 16\)",
        ),
        (lambda: dnn.lstm(X, W, ANY(None)), TypeError, "`r` must be an array, got NoneType"),
        (lambda: dnn.rnn_cell(X[0], W, ZEROS(16, 16), ANY(None)), TypeError, "`h` must be an array, got NoneType"),
        (lambda: dnn.rnn(X, W, R, activation="gelu"), ValueError, "`activation` must be one of 'tanh', 'relu', got"),
        (lambda: dnn.lstm(X, W, R, resets=np.zeros((N, T))), TypeError, "`resets` must be booleans, got float32"),
        (
            lambda: dnn.lstm(X, W, R, resets=np.zeros((T, N), bool)),
            ValueError,
            r"`resets` must have shape \(5, 8\), one",
        ),
        (lambda: dnn.lstm(X, None, R), ValueError, r"`r` must have shape \(3, 12\), for 3 units, as `x` has columns"),
        (
            lambda: dnn.lstm(X, W, ZEROS(3, 2, 8)),
            ValueError,
            "`r` must have a number of heads that divides the 4 units, g",
        ),
        (lambda: dnn.lstm(X, W, ZEROS(2, 4, 16)), ValueError, r"`r` must have shape \(2, 2, 8\), for 4 units"),
        (
            lambda: dnn.lstm(X, W, ZEROS(2, 1, 8), projection=ZEROS(4, 2)),
            ValueError,
            "`projection` must be a matrix for each of the heads that `r` has, got shape",
        ),
        (
            lambda: dnn.lstm(X, W, [R, R]),
            ValueError,
            "`w` must be None or a sequence of 2, one for every layer, as `r` is",
        ),
        (lambda: dnn.lstm(X, [W], [R, R]), ValueError, "`w` must be .* as `r` is, got one of 1"),
        (lambda: dnn.lstm(X, [], []), ValueError, "`r` must have a matrix for every layer, of which there must be one"),
        (lambda: dnn.lstm(X, [W, W], [R, R]), ValueError, r"In layer 1: `w` must have shape \(I, 4 H\) with I = 4"),
        (
            lambda: dnn.lstm(X, W, R, dropout=0.5),
            ValueError,
            "`dropout_key` must be given with a `dropout` of 0.5, got",
        ),
        (lambda: dnn.lstm(X, W, R, dropout=1.5, dropout_key=1), ValueError, "`dropout` must be from 0 to 1, got 1.5"),
        (lambda: dnn.lstm(X, W, R, engine="cudnn"), ValueError, "`engine` must be one of"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
