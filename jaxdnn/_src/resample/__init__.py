"""Images resampled to other sizes; pixels shuffled into channels and back."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "Resample",
            "`portable`",
            "resample resample_dgrad pixel_shuffle pixel_unshuffle",
        ),
    ),
    examples="""
resample         | NHWC, scale=2 -> NHWC     | NC -/- HW h2/h2 | a result is made of neighbours
resample_dgrad   | NHWC, shape(NhwC) -> NHWC | NC -/- HW h2/h2 | a result is made of neighbours
pixel_shuffle*   | NHWC -> NHWC              | NHWC -/-        | channels become pixels
pixel_unshuffle* | NHWC -> NHWC              | NHWC -/-        | pixels become channels
""",
    engines=("xla",),
)
