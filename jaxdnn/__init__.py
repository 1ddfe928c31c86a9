"""jaxdnn: deep-neural-network primitives for JAX, defined exactly, fast, and reproducible to stated levels."""

import jaxdnn._kernels.hopper.engine
import jaxdnn._kernels.xla.conv
import jaxdnn._kernels.xla.conv_ordered  # noqa: F401
from jaxdnn._version import __version__ as __version__
from jaxdnn.conv import conv, conv_bgrad, conv_dgrad, conv_transpose, conv_wgrad
from jaxdnn.determinism import determinism
from jaxdnn.explain import explain

__all__ = [
    "conv",
    "conv_bgrad",
    "conv_dgrad",
    "conv_transpose",
    "conv_wgrad",
    "determinism",
    "explain",
]
