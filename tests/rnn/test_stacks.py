"""Recurrent layers that begin anew, whose states have heads, and several of them with dropout between."""

import functools as ft
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import eager
from tests.rnn.layer_calls import GATES, KINDS, LENGTHS, RESETS, H, N, P, T, called, compiled, data, each_kind, each_op


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
