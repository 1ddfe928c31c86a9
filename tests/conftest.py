"""What every test runs under: eight simulated CPU devices, no silent promotion, 32 bits unless a test asks for more."""

import os
from collections.abc import Iterator

# Read when JAX starts its CPU backend, so it has to stand before anything that computes.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles. In CI the examples are the same on every run.
hypothesis.settings.register_profile("jaxdnn", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("jaxdnn")


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for the tests that need them; all others run under JAX's default, as most users do."""
    with jax.enable_x64(True):
        yield
