"""Convolutions of one to three spatial axes, their backward passes, transposed convolutions."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "conv": "api",
        "conv_bgrad": "api",
        "conv_dgrad": "api",
        "conv_transpose": "api",
        "conv_wgrad": "api",
    },
    engines=("hopper.engine", "xla.engine", "xla.ordered"),
    cases=("cases.family",),
    timed="timed",
)
