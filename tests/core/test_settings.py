"""What environment variables set for a process."""

import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src.core import engines, settings
from jaxdnn._src.core.limits import current_limits

READ = (settings.kernels, settings.workspace, settings.threads)


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    """Each test reads the variables as a new process does."""
    for read in READ:
        read.cache_clear()
    yield
    for read in READ:
        read.cache_clear()


def reasons(platform: str) -> dict[str, str | None]:
    x, w = jax.ShapeDtypeStruct((8, 8, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    (call,) = dnn.explain(dnn.conv, x, w, platform=platform)
    return {c.engine: c.refusal for c in call.candidates}


def test_without_kernels_xla_serves_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXDNN_LIB_CONFIG", "XLA_ONLY")
    for op in ("conv", "softmax", "attention"):
        assert any(not engine.fused for engine in engines.registered(op))
    found = reasons("cuda")
    assert found["hopper"] == "it is a kernel, and `JAXDNN_LIB_CONFIG` is XLA_ONLY"
    assert found["xla"] is None
    with pytest.raises(NotImplementedError, match="hopper: it is a kernel, and `JAXDNN_LIB_CONFIG` is XLA_ONLY"):
        dnn.softmax(jnp.ones((4, 64)), engine="hopper")


@pytest.mark.parametrize("value", ["FULL", ""])
def test_all_engines_by_default(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXDNN_LIB_CONFIG", value)
    assert "JAXDNN_LIB_CONFIG" not in str(reasons("cuda"))


def test_a_limit_of_workspace_holds_where_no_context_gives_one(monkeypatch: pytest.MonkeyPatch):
    assert current_limits().workspace is None
    monkeypatch.setenv("JAXDNN_WORKSPACE_LIMIT", "4096")
    settings.workspace.cache_clear()
    assert current_limits().workspace == 4096
    with dnn.limits(multiprocessors=3):
        assert (current_limits().workspace, current_limits().multiprocessors) == (4096, 3)
    with dnn.limits(workspace=64):
        assert current_limits().workspace == 64


@pytest.mark.parametrize("given", ["x", "-1", "1.5"])
def test_a_number_of_threads_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXDNN_COMPILE_THREADS", given)
    with pytest.raises(ValueError, match=f"`JAXDNN_COMPILE_THREADS` must be a number of threads.*, got '{given}'"):
        jax.jit(dnn.softmax).lower(jnp.ones((4, 64)))


@pytest.mark.parametrize(("given", "count"), [("0", 0), (" 3 ", 3), ("", min(8, len(os.sched_getaffinity(0))))])
def test_numbers_of_threads(given: str, count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXDNN_COMPILE_THREADS", given)
    assert settings.threads() == count
