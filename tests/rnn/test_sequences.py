"""Ends of sequences, directions, layouts: what is behind an end is not read, and pieces are the whole."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.rnn.layer_calls import KINDS, LENGTHS, D, H, T, called, compiled, data, each_kind, each_op


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
