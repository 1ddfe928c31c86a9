"""Softmax and logsumexp of rows, and the cross-entropy of a linear layer."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "linear_cross_entropy": "cross_entropy",
        "logsumexp": "api",
        "softmax": "api",
        "softmax_dgrad": "api",
    },
    engines=("hopper.engine", "xla"),
    cases=("cases",),
    timed="timed",
)
