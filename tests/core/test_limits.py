"""`jaxdnn.limits`: who may serve under a limit of workspace, and that derivatives are under it too."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.explain import traced_calls
from jaxdnn._src.core.limits import Limits, current_limits, limits_of

X, W = jnp.ones((2, 5, 3)), jnp.ones((2, 3, 4))


def conv(x: jax.Array = X, w: jax.Array = W, **options: Any) -> jax.Array:
    return dnn.conv(x, w, layout="NWC", **options)


@pytest.fixture
def hungry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that comes first and takes 64 bytes for each image."""
    for op in ("conv", "conv_dgrad", "conv_wgrad"):
        (xla,) = (e for e in engines.registered(op) if e.name == "xla")
        greedy = engines.Engine(
            "hungry", op, run=xla.run, rank=lambda call: -1, workspace=lambda call: 64 * call.avals[0].shape[0]
        )
        monkeypatch.setitem(engines._registry, op, [*engines.registered(op), greedy])


def served(function: Any, *operands: jax.Array) -> dict[str, str | None]:
    return {call.op: call.engine for call in dnn.explain(function, *operands)}


@pytest.mark.usefixtures("hungry")
def test_workspace_decides_who_serves():
    assert served(conv, X, W) == {"conv": "hungry"}
    with dnn.limits(workspace=128):
        assert served(conv, X, W) == {"conv": "hungry"}
    with dnn.limits(workspace=127):
        assert served(conv, X, W) == {"conv": "xla"}
        (found,) = dnn.explain(conv, X, W)
        refusals = {c.engine: c.refusal for c in found.candidates}
        assert refusals["hungry"] == "it needs 128 bytes of workspace, and the limit is 127"


@pytest.mark.usefixtures("hungry")
def test_a_named_engine_that_needs_more_raises():
    with dnn.limits(workspace=100), pytest.raises(NotImplementedError, match=r"128 bytes .* limit is 100"):
        conv(engine="hungry")


@pytest.mark.usefixtures("hungry")
def test_derivatives_are_under_the_limits_of_their_call():
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        with dnn.limits(workspace=0):
            return conv(x, w).sum()

    assert set(served(jax.grad(loss, (0, 1)), X, W).values()) == {"xla"}
    assert set(served(jax.vmap(loss, (0, None)), X[None], W).values()) == {"xla"}
    with dnn.limits(workspace=0):
        y, back = jax.vjp(conv, X, W)
    calls = {call.op: selection.select(call).name for call in traced_calls(back, y, platform="cpu")}
    assert calls == {"conv_dgrad": "xla", "conv_wgrad": "xla"}


@pytest.mark.usefixtures("hungry")
def test_a_jitted_function_is_traced_anew():
    jitted, found = jax.jit(lambda x, w: (found.append(current_limits()), conv(x, w))[1]), []
    jitted(X, W)
    with dnn.limits(workspace=5):
        jitted(X, W)
        jitted(X, W)
    assert found == [Limits(), Limits(workspace=5)]


def test_contexts_nest():
    with dnn.limits(workspace=10, multiprocessors=100):
        with dnn.limits(multiprocessors=8):
            (call,) = traced_calls(conv, X, W, platform="cpu")
        assert current_limits() == Limits(10, 100)
    assert limits_of(call.spec) == Limits(10, 8)
    assert current_limits() == Limits()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(workspace=-1), r"`workspace` must be None or an integer of at least 0, got -1\."),
        (dict(workspace=1.5), r"`workspace` must be None or an integer of at least 0, got 1\.5\."),
        (dict(multiprocessors=0), r"`multiprocessors` must be None or an integer of at least 1, got 0\."),
        (dict(multiprocessors=True), r"`multiprocessors` must be None or an integer of at least 1, got True\."),
    ],
)
def test_errors(given: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text), dnn.limits(**given):
        pass


@pytest.mark.parametrize(
    ("shapes", "groups", "kernels"),
    [(((64, 28, 28, 128), (3, 3, 128, 128)), 1, 3), (((64, 28, 28, 96), (3, 3, 1, 96)), 96, 4)],
    ids=["dense", "depthwise"],
)
def test_multiprocessors_size_the_grid_of_the_kernels(
    shapes: tuple[tuple[int, ...], ...], groups: int, kernels: int, monkeypatch: pytest.MonkeyPatch
):
    """Lowered for CUDA, the forward convolution and both gradients have as many blocks as were allowed."""
    from jaxdnn._src import hopper

    if reason := hopper.unavailable():
        pytest.skip(reason)
    from jaxdnn._src.core.compat import plgpu

    grids, launch = [], plgpu.kernel
    monkeypatch.setattr(plgpu, "kernel", lambda *a, **k: grids.append(k) or launch(*a, **k))
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)

    def step(x: jax.Array, w: jax.Array) -> Any:
        y, back = jax.vjp(lambda x, w: dnn.conv(x, w, padding=1, groups=groups, engine="hopper"), x, w)
        return y, back(y)

    texts = []
    for n in (24, 8):
        grids.clear()
        with dnn.limits(multiprocessors=n):
            texts.append(jax.jit(step).trace(x, w).lower(lowering_platforms=("cuda",)).as_text())
        blocks = [math.prod((*k["grid"], *k.get("cluster", ()))) for k in grids]
        assert len(blocks) == kernels
        assert max(blocks) == n
    assert texts[0] != texts[1]
