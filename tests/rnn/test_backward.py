"""The backward passes of recurrent layers as ops: definition, the bits of JAX's gradients, what is saved, errors."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference

N, T, D, H, P = 3, 5, 2, 4, 2
LENGTHS = np.array([5, 0, 3], np.int32)
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
WEIGHTS = ("w", "r", "bias", "recurrent_bias", "projection")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("lstm", {}),
    "lstm-projected": ("lstm", {"clip": (-0.3, 0.2)}),
    "gru-after": ("gru", {}),
    "gru-before": ("gru", {"reset_gate": "before"}),
    "rnn-tanh": ("rnn", {}),
    "rnn-relu": ("rnn", {"activation": "relu"}),
}
# One layer; two of heads in both directions with dropout between them; heads without a product of the inputs.
FORMS = ("one", "stack", "skip")
each_form = pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "one") for kind in KINDS), *((k, f) for k in ("lstm-projected", "gru-before") for f in FORMS[1:])],
)


def data(kind: str, form: str, dtype: Any = np.float64) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a forward pass by name, and its options."""
    rng, (op, own) = np.random.default_rng(0), KINDS[kind]
    heads, two = (None if form == "one" else 2), (2,) if form == "stack" else ()
    columns, wide = (P if "projected" in kind else H), GATES[op] * H
    made = lambda *shape: (rng.normal(size=(*two, *shape)) * 0.6).astype(dtype)
    matrix = lambda rows, width: made(rows, width) if heads is None else made(heads, rows // heads, width // heads)

    def layer(inputs: int) -> dict[str, Any]:
        found = {"w": None if form == "skip" else made(inputs, wide), "r": matrix(columns, wide)}
        found |= {"bias": made(wide), "recurrent_bias": made(wide), "h0": made(N, columns)}
        found |= {"projection": matrix(H, P)} if "projected" in kind else {}
        return found | ({"c0": made(N, H)} if op == "lstm" else {})

    x = rng.normal(size=(N, T, H if form == "skip" else D)).astype(dtype)
    v = layer(D)
    if form == "stack":
        each = [v, layer(2 * columns)]
        v = {name: [one[name] for one in each] for name in v}
    options = {**own, "lengths": LENGTHS, "resets": rng.random((N, T)) < 0.2}
    options["direction"] = {"one": "reverse", "stack": "bidirectional", "skip": "forward"}[form]
    options |= {"dropout": 0.3, "dropout_key": np.array([1, 2], np.uint32)} if form == "stack" else {}
    return {"x": x, **v}, options


def forward(of: Any, kind: str, v: dict[str, Any], **options: Any) -> Any:
    rest = {name: a for name, a in v.items() if name not in ("x", "w", "r")}
    return getattr(of, KINDS[kind][0])(v["x"], v["w"], v["r"], **rest, **options)


def backward(of: Any, kind: str, what: str, v: dict[str, Any], dy: Any, final: Any, **options: Any) -> Any:
    """A backward pass; `final` are the cotangents of the final states."""
    rest = {name: a for name, a in v.items() if name not in ("x", "w", "r")}
    op = KINDS[kind][0]
    ends = dict(zip(("dh", "dc"), final, strict=True)) if op == "lstm" else {"dh": final}
    return getattr(of, f"{op}_{what}")(dy, v["x"], v["w"], v["r"], **rest, **ends, **options)


def cotangents(kind: str, v: dict[str, Any], options: dict[str, Any]) -> Any:
    """Of y and of the final states, as the op returns them."""
    shapes = jax.eval_shape(lambda v: forward(dnn, kind, v, **options), v)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), shapes)


def equal(found: Any, wanted: Any, **tolerance: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, **tolerance)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@each_form
def test_the_definition(kind: str, form: str):
    """Of values, and of what is saved of the steps that there are; from either side's, and from none."""
    v, options = data(kind, form)
    dy, final = cotangents(kind, v, options)

    def both(of: Any, v: Any, dy: Any, final: Any) -> Any:
        kept = forward(of, kind, v, **options, return_saved=True)[-1]
        *of_data, more = backward(of, kind, "dgrad", v, dy, final, **options, saved=kept, return_saved=True)
        return kept, more, of_data, backward(of, kind, "wgrad", v, dy, final, **options, saved=more)

    found, wanted = jax.jit(ft.partial(both, dnn))(v, dy, final), both(reference, v, dy, final)
    equal(found[2:], wanted[2:], rtol=1e-12, atol=1e-14)
    live = np.arange(T)[:, None] < LENGTHS
    for a, b in zip(found[1], wanted[1], strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a)[live], b[live], rtol=1e-12, atol=1e-14)
    if form == "skip":
        return
    again = jax.jit(ft.partial(backward, dnn, kind, "wgrad", **options))(v, dy, final)
    equal(again, wanted[3], rtol=1e-12, atol=1e-14)
    saved = [np.asarray(a) for a in wanted[1]]
    handed = jax.jit(lambda v, s: backward(dnn, kind, "wgrad", v, dy, final, saved=s, **options))(v, saved)
    equal(handed, wanted[3], rtol=1e-12, atol=1e-14)


@each_form
def test_bits_are_those_of_gradients(kind: str, form: str):
    for dtype in (jnp.bfloat16,) if form == "one" else (np.float32,):
        v, options = data(kind, form, dtype)
        options["engine"] = "ordered"
        dy, final = cotangents(kind, v, options)

        def derived(v: Any, dy: Any, final: Any, options: Any = options) -> Any:
            return jax.vjp(lambda v: forward(dnn, kind, v, **options), v)[1]((dy, final))[0]

        def called(v: Any, dy: Any, final: Any, options: Any = options) -> Any:
            *of_data, saved = backward(dnn, kind, "dgrad", v, dy, final, **options, return_saved=True)
            return of_data, backward(dnn, kind, "wgrad", v, dy, final, **options, saved=saved)

        (dx, states), weights = jax.jit(called)(v, dy, final)
        wanted = jax.jit(derived)(v, dy, final)
        states = states if KINDS[kind][0] == "lstm" else (states,)
        found = {"x": dx, **dict(zip(("h0", "c0"), states, strict=False))}
        found |= dict(zip([n for n in WEIGHTS if v.get(n) is not None], weights, strict=True))
        for name, value in found.items():
            for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(wanted[name]), strict=True):
                assert a.dtype == b.dtype == dtype
                np.testing.assert_array_equal(a, b, err_msg=f"{name} {np.dtype(dtype).name}")


@pytest.mark.parametrize("kind", ["lstm-projected", "gru-after", "gru-before", "rnn-tanh"])
def test_the_definition_is_a_derivative_of_the_forward_one(kind: str):
    """By central differences in float64, in every array."""
    v, options = data(kind, "stack")
    dy, final = jax.tree.map(lambda a: a.astype(np.float64), cotangents(kind, v, options))
    total = lambda v: sum(
        float((a * b).sum())
        for a, b in zip(
            jax.tree.leaves(forward(reference, kind, v, **options)), jax.tree.leaves((dy, final)), strict=True
        )
    )
    dx, states = backward(reference, kind, "dgrad", v, dy, final, **options)
    weights = backward(reference, kind, "wgrad", v, dy, final, **options)
    states = states if KINDS[kind][0] == "lstm" else (states,)
    gradients = {"x": dx, **dict(zip(("h0", "c0"), states, strict=False))}
    gradients |= dict(zip([n for n in WEIGHTS if v.get(n) is not None], weights, strict=True))
    assert gradients.keys() == v.keys()
    rng, step = np.random.default_rng(2), 1e-6
    along = jax.tree.map(lambda a: rng.normal(size=a.shape), v)
    for name, gradient in gradients.items():
        ends = [
            total(v | {name: jax.tree.map(lambda a, d, s=s: a + s * step * d, v[name], along[name])}) for s in (1, -1)
        ]
        pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(along[name]), strict=True)
        wanted = sum(float((g * d).sum()) for g, d in pairs)
        assert abs((ends[0] - ends[1]) / (2 * step) - wanted) <= 1e-8 * max(1, abs(wanted)), name


@pytest.mark.parametrize("kind", ["lstm", "gru-before"])
def test_nothing_is_read_behind_the_end(kind: str):
    """Neither x nor dy nor gates, and neither forward nor backward."""
    v, options = data(kind, "one", np.float32)
    dy, final = cotangents(kind, v, options)
    kept = jax.jit(lambda v: forward(dnn, kind, v, **options, return_saved=True)[-1])(v)
    live = (np.arange(T) < LENGTHS[:, None])[..., None]
    sick = lambda a: np.where(live, a, np.nan).astype(np.float32)
    gates = np.where(live.swapaxes(0, 1), kept[1], np.nan).astype(np.float32)

    @jax.jit
    def run(x: Any, dy: Any, gates: Any) -> Any:
        saved = kept[0], gates, *kept[2:]
        given = v | {"x": x}
        of_data = backward(dnn, kind, "dgrad", given, dy, final, **options, saved=saved)
        return of_data, backward(dnn, kind, "wgrad", given, dy, final, **options, saved=saved)

    found = run(sick(v["x"]), sick(dy), gates)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(run(v["x"], dy, kept[1])), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(found[0][0])[~live[..., 0]].any()


def test_a_saved_backward_pass_needs_neither_dy_nor_the_final_states():
    v, options = data("lstm", "stack", np.float32)
    dy, final = cotangents("lstm", v, options)
    saved = jax.jit(lambda v: backward(dnn, "lstm", "dgrad", v, dy, final, **options, return_saved=True)[-1])(v)
    run = jax.jit(lambda v, dy, final: backward(dnn, "lstm", "wgrad", v, dy, final, saved=saved, **options))
    poison = jax.tree.map(lambda a: np.full_like(a, np.nan), (dy, final))
    equal(run(v, *poison), run(v, dy, final), rtol=0)


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["lstm-projected", "gru-after"])
@pytest.mark.parametrize("what", ["dgrad", "wgrad"])
def test_derivatives_are_differences_of_the_definition(kind: str, what: str):
    """In dy, x, weights, states and what is saved, forward and reverse."""
    v, options = data(kind, "one")
    dy, final = cotangents(kind, v, options)
    arrays = {**v, "dy": dy, "final": final}

    def run(of: Any, arrays: Any) -> Any:
        given = {name: a for name, a in arrays.items() if name not in ("dy", "final")}
        return backward(of, kind, what, given, arrays["dy"], arrays["final"], **options)

    rng, step = np.random.default_rng(3), 1e-6
    along = jax.tree.map(lambda a: rng.normal(size=a.shape), arrays)
    ends = [run(reference, jax.tree.map(lambda a, d, s=s: a + s * step * d, arrays, along)) for s in (1, -1)]
    wanted = jax.tree.map(lambda a, b: (a - b) / (2 * step), *ends)
    found, tangents = jax.jit(lambda a, d: jax.jvp(ft.partial(run, dnn), (a,), (d,)))(arrays, along)
    equal(tangents, wanted, rtol=1e-6, atol=1e-7)
    weights = jax.tree.map(lambda a: rng.normal(size=a.shape), found)
    pulled = jax.jit(lambda a, c: jax.vjp(ft.partial(run, dnn), a)[1](c)[0])(arrays, weights)
    dot = lambda a, b: sum(float((x * y).sum()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    np.testing.assert_allclose(dot(pulled, along), dot(weights, tangents), rtol=1e-10)


@pytest.mark.parametrize("what", ["dgrad", "wgrad"])
def test_vmap_is_a_loop(what: str):
    v, options = data("gru-after", "one", np.float32)
    dy, final = cotangents("gru-after", v, options)
    run = lambda x, dy, r: backward(dnn, "gru-after", what, v | {"x": x, "r": r}, dy, final, **options)
    xs, dys, rs = (np.stack([a, 0.5 * a, -a]) for a in (v["x"], dy, v["r"]))
    for axes, given in (((0, 0, None), (xs, dys, v["r"])), ((None, 0, 0), (v["x"], dys, rs))):
        at = lambda i, given=given, axes=axes: [
            a if axis is None else a[i] for a, axis in zip(given, axes, strict=True)
        ]
        found = jax.jit(jax.vmap(run, axes))(*given)
        for i in range(3):
            equal(jax.tree.map(lambda a, i=i: a[i], found), run(*at(i)), rtol=2e-5, atol=2e-6)


# ---- errors ----------------------------------------------------------------------------------------------------------

NO_FLAG: Any = 1
X, W, R, DY = jnp.ones((2, 5, 3)), jnp.ones((3, 16)), jnp.ones((4, 16)), jnp.ones((2, 5, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dnn.lstm_dgrad(DY[:, :4], X, W, R), ValueError, r"`dy` must have shape \(2, 5, 4\), that of y"),
        (
            lambda: dnn.lstm_dgrad(DY.astype(jnp.bfloat16), X, W, R),
            TypeError,
            "`dy` must have the dtype float32",
        ),
        (lambda: dnn.lstm_dgrad(DY, X, W, R, dh=DY[:, 0, :3]), ValueError, r"`dh` must have shape \(2, 4\)"),
        (lambda: dnn.lstm_wgrad(DY, X, W, R, dc=[DY[:, 0]]), ValueError, "`dc`"),
        (lambda: dnn.lstm_dgrad(DY, X, [W], [R], dc=DY[:, 0]), ValueError, "`dc` must be None or a sequence of 1"),
        (lambda: dnn.lstm_dgrad(DY, X, W, R, saved=DY), ValueError, "`saved` must be what a pass with `return_saved`"),
        (lambda: dnn.lstm_wgrad(DY, X, W, R, saved=(DY,)), ValueError, "`saved` must have the 3 arrays .* or the 4 of"),
        (lambda: dnn.lstm_wgrad(DY, X, W, R, saved=(DY,) * 3), ValueError, r"`saved` must have shape \(5, 2, 4\)"),
        (lambda: dnn.gru_dgrad(DY, X, W, R), ValueError, "`w` must have shape"),
        (lambda: dnn.rnn_wgrad(DY, X, W[:, :4], R[:, :4], activation="gelu"), ValueError, "`activation` must be"),
        (lambda: dnn.gru_wgrad(DY, X, W[:, :12], R[:, :12], reset_gate="x"), ValueError, "`reset_gate` must be"),
        (lambda: dnn.lstm(X, W, R, return_saved=NO_FLAG), TypeError, "`return_saved` must be"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
