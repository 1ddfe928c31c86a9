"""Derivatives of recurrent layers: by differences of the definition, under vmap, at kinks, at every level."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import selection
from jaxdnn._src.core.explain import traced_calls
from tests.rnn.layer_calls import KINDS, LENGTHS, RESETS, D, H, N, P, called, data, each_op


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
    assert served() == {"rnn": "xla"}
    assert served(engine="ordered") == {"rnn_product": "ordered", "rnn": "ordered"}
    assert served(determinism="portable") == {"rnn_product": "ordered", "rnn": "ordered"}
    with pytest.raises(NotImplementedError, match="guarantees 'run_to_run' here, not 'batch_invariant'"):
        dnn.lstm(*arrays, engine="xla", determinism="batch_invariant")


def products(jaxpr: Any, within: bool = False) -> tuple[int, int]:
    """Matrix products of a program beside its loops, and in them."""
    counts = [0, 0]
    for eqn in jaxpr.eqns:
        counts[within] += eqn.primitive.name == "dot_general"
        for inner in jaxprs_in_params(eqn.params):
            for i, n in enumerate(products(inner, within or eqn.primitive.name in ("scan", "while"))):
                counts[i] += n
    return counts[0], counts[1]


@each_op
@pytest.mark.parametrize("batch", [1, N])
def test_where_inputs_are_multiplied(kind: str, batch: int):
    """On CPUs in each step, but for a single sequence; on GPUs all at once. What comes of it does not differ."""
    v = {name: a[:batch] if name in ("x", "h0", "c0") else a for name, a in data(kind).items()}
    calls = list(traced_calls(ft.partial(called, dnn, kind), v, platform="cpu"))
    assert [call.op for call in calls] == ["rnn"]
    operands = [np.sin(np.arange(float(math.prod(a.shape)))).reshape(a.shape).astype(a.dtype) for a in calls[0].avals]
    steps = 2 if "projected" in kind or kind == "gru-before" else 1
    found = []
    for platform in ("cpu", "cuda"):
        call = dataclasses.replace(calls[0], platform=platform)
        run = ft.partial(selection.select(call).run, call)
        apart = platform == "cuda" or batch == 1
        assert products(jax.make_jaxpr(run)(*operands).jaxpr) == (apart, steps + (not apart))
        found.append(jax.jit(run)(*operands))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


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
