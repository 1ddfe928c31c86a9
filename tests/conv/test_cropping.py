"""Negative padding of convolutions: what it cuts off is not read, and its gradient is zero."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn as dnn
from jaxdnn._src.conv.cases import draw
from jaxdnn._src.conv.cases.geometries import NO_BLEND, Geometry
from tests.conv import cases, helpers

PADDINGS: dict[str, Any] = {
    "one number": (-1, {}),
    "beside padding": (((-2, 1), (3, -4)), {"stride": (1, 2)}),
    "one end": (((0, 0), (0, -3)), {"dilation": (2, 1), "groups": 2, "layout": "NCHW"}),
    "of vectors": (((-1, -2), (2, 0)), {"layout": "NCHWc2", "mode": "convolution"}),
    "of a line": (((-3, 2),), {"layout": "CWN", "stride": 2}),
}
CUT = {"padding": ((-2, 1), (3, -4)), "stride": (1, 2)}
X, W = (np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate([(2, 9, 11, 4), (3, 2, 4, 6)]))


def geometry(name: str) -> cases.Geometry:
    padding, options = PADDINGS[name]
    spatial = {"sizes": (11,), "taps": (3,)} if name == "of a line" else {"sizes": (9, 11), "taps": (3, 5)}
    rest: dict[str, Any] = {"name": name, "padding": padding, **spatial, **options}
    return cases.Geometry(batch=2, channels=4, filters=6, **rest)


@pytest.mark.parametrize("op", cases.RANDOM_OPS)
def test_values_with_and_without_an_epilogue(op: str):
    many = []
    for seed, name in enumerate(PADDINGS):
        case = cases.case(op, geometry(name), seed)
        many += [case, case.with_epilogue(seed, alpha=-0.75, beta=0.5, prior=True)]
        if op in ("conv", "conv_transpose"):
            many.append(case.with_epilogue(seed, bias=True, residual=True, activation="gelu"))
    helpers.check_all(many)


@pytest.mark.parametrize("traced", [False, True], ids=["numbers", "arrays"])
def test_the_gradient_of_what_is_cut_off_is_the_blend_alone(traced: bool):
    dy, prior = np.ones((2, 6, 5, 6), np.float32), np.full(X.shape, 3, np.float32)
    call = lambda alpha, beta: dnn.conv_dgrad(dy, W, X.shape, alpha=alpha, beta=beta, prior=prior, **CUT)
    found = np.asarray(jax.jit(call)(2.0, 0.5) if traced else call(2.0, 0.5))
    assert (found[:, :2] == 1.5).all()
    assert (found[:, :, -4:] == 1.5).all()
    assert (found[:, 2:, :-4] != 1.5).any()


def test_what_is_cut_off_is_not_read():
    """NaN there shows neither in the result nor in any gradient."""
    spoilt = X.copy()
    spoilt[:, :2] = spoilt[:, :, -4:] = np.nan
    f = jax.jit(lambda x, w: jax.value_and_grad(lambda x, w: (dnn.conv(x, w, **CUT) ** 2).sum(), (0, 1))(x, w))
    for ours, wanted in zip(jax.tree.leaves(f(spoilt, W)), jax.tree.leaves(f(X, W)), strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_second_derivatives_and_vmap():
    cut = lambda x: lax.slice(x, (0, 2, 0, 0), (2, 9, 7, 4))
    ours = lambda x, w: dnn.conv(x, w, **CUT)
    theirs = lambda x, w: dnn.conv(cut(x), w, padding=((0, 1), (3, 0)), stride=(1, 2))
    tangents = (X[::-1], W[::-1])

    def along(f: Any) -> Any:
        gradient = lambda x, w: jax.grad(lambda x, w: jnp.sin(f(x, w)).sum(), (0, 1))(x, w)
        mapped = jax.vmap(jax.grad(lambda x, w: (f(x, w) ** 2).sum()), (0, None))
        return jax.jvp(gradient, (X, W), tangents), mapped(jnp.stack([X, -X, 2 * X]), W)

    for a, b in zip(
        jax.tree.leaves(jax.jit(ft.partial(along, ours))()),
        jax.tree.leaves(jax.jit(ft.partial(along, theirs))()),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_explain_says_that_a_copy_is_made():
    forward, backward = dnn.explain(jax.grad(lambda x: (dnn.conv(x, W, **CUT) ** 2).sum()), X)
    unfolded = lambda call: " ".join(str(call).split())
    assert forward.cropped
    assert backward.cropped
    assert "served by xla; x is cropped before it, a copy, for padding is negative" in unfolded(forward)
    assert "its result is padded with zeros after it, a copy, for padding is negative" in unfolded(backward)
    assert not dnn.explain(dnn.conv, X, W)[0].cropped
    assert "copy" not in str(dnn.explain(dnn.conv, X, W))


def test_random_geometries_draw_it():
    drawn = [draw.draw("conv", "xla", np.random.default_rng([5, i]), "") for i in range(120)]
    geometries: list[Geometry] = [case.geometry for case in drawn]
    cut = [g for g in geometries if min(min(axis) for axis in g.window.padding) < 0]
    assert 2 <= len(cut) <= 20
    assert all(min(g.outputs) >= 1 for g in cut)
    assert {case.blend for case in drawn} > {NO_BLEND}
