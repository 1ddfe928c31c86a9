"""Dropout by a counter-based generator, alone and joined with bias, activation and residual."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "dropout": "api",
        "dropout_mask": "api",
    },
    engines=("hopper.engine", "xla", "xla_fused"),
    cases=("cases", "cases_fused"),
    timed="timed",
)
