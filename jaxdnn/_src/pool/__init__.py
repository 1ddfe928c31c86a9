"""Pooling by windows, over the whole image and to given sizes."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "adaptive_pool": "sizes",
        "global_pool": "sizes",
        "pool": "api",
        "pool_dgrad": "api",
        "unpool": "api",
    },
    engines=("hopper.engine", "xla.engine"),
    cases=("cases",),
    timed="timed",
)
