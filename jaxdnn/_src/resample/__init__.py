"""Images resampled to other sizes; pixels shuffled into channels and back."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "pixel_shuffle": "api",
        "pixel_unshuffle": "api",
        "resample": "api",
        "resample_dgrad": "api",
    },
    engines=("xla",),
)
