"""The mark of tests that run a kernel on the device itself."""

import jax
import pytest

on_hopper = pytest.mark.skipif(
    jax.default_backend() != "gpu" or getattr(jax.devices()[0], "compute_capability", "") != "9.0",
    reason="needs a GPU of compute capability 9.0",
)
