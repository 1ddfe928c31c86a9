"""What every test runs under: eight simulated CPU devices, no silent promotion, 32 bits unless a test asks for more.

With `--sample N` a run takes a part of the tests, which the header names (`sample`).
"""

import os
from collections.abc import Iterator

# Read when JAX starts its CPU backend, so it has to stand before anything that computes.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# What somebody tuned on this machine is not what is tested.
os.environ["JAXDNN_TUNED"] = os.path.join(os.path.dirname(__file__), "untuned.json")

import hypothesis
import jax
import pytest

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.hopper import MEASURED_ON
from tests import sample

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles. In CI the examples are the same on every run.
hypothesis.settings.register_profile("jaxdnn", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("jaxdnn")


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "of a function's parameters run N, or a part if that is more, and every facet (0: all)"
    parser.addoption("--sample", type=int, default=0, metavar="N", help=said)
    said = "which sample, a number from 0 on; without it that of the commit"
    parser.addoption("--slice", type=int, default=None, metavar="N", help=said)
    said = f"a run beside another one that has the facets: every {sample.BESIDE}. function, in turns, and no facets"
    parser.addoption("--beside", action="store_true", help=said)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slice is None:  # here, so that all workers of a run have the same
        config.option.slice = sample.current()


def pytest_report_header(config: pytest.Config) -> str:
    count, slice_ = config.option.sample, config.option.slice
    beside = " --beside" if config.option.beside else ""
    tests = f"; repeat this sample with --sample {count} --slice {slice_}{beside}" if count else ""
    return f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices{tests}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.sample:
        return
    tests = {item.nodeid: getattr(getattr(item, "callspec", None), "params", {}) for item in items}
    kept = sample.chosen(tests, config.option.sample, config.option.slice, config.option.beside)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module compiled is of no use to the next, and ten thousand tests' programs exhaust a process's memory."""
    if nextitem is not None and nextitem.path != item.path:
        jax.clear_caches()


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lowered for CUDA is for an H200, the device on which the kernels were measured."""
    monkeypatch.setattr(engines, "device_kind", lambda platform: MEASURED_ON[0])


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for the tests that need them; all others run under JAX's default, as most users do."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def as_on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are drawn and lowered as on an H200; nothing runs."""
    if reason := hopper.unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(engines, "device_kind", lambda platform: "NVIDIA H200" if platform == "cuda" else "cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
