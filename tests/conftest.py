"""What every test runs under: eight simulated CPU devices, no silent promotion, 32 bits unless a test asks for more.

Nearly all of a test's time is compilation, and many tests are one function of many parameters. Of these `--sample N`
runs N, evenly spread over the list, the same ones every time; without it all are run.
"""

import collections
import os
from collections.abc import Iterator

# Read when JAX starts its CPU backend, so it has to stand before anything that computes.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import hypothesis
import jax
import pytest

from jaxdnn import engines
from jaxdnn._kernels.hopper import MEASURED_ON

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles. In CI the examples are the same on every run.
hypothesis.settings.register_profile("jaxdnn", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("jaxdnn")


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, default=0, metavar="N", help="of a function's parameters, run N (0: all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count = config.getoption("--sample")
    if not count:
        return
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = {
        id(group[i * len(group) // n])
        for group in functions.values()
        for n in [min(count, len(group))]
        for i in range(n)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lowered for CUDA is for an H200, the device on which the kernels were measured."""
    monkeypatch.setattr(engines, "device_kind", lambda platform: MEASURED_ON[0])


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for the tests that need them; all others run under JAX's default, as most users do."""
    with jax.enable_x64(True):
        yield
