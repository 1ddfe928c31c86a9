"""Activations and their gradients, and the epilogue of an op that ends in one."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "activation": "api",
        "activation_dgrad": "api",
    },
    engines=("xla",),
    cases=("cases",),
    timed="timed",
)
