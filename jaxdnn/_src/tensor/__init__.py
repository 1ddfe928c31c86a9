"""Arrays moved, scaled, added and reduced."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "add": "api",
        "col2im": "im2col",
        "fill": "api",
        "im2col": "im2col",
        "op_tensor": "api",
        "reduce": "reduce",
        "scale": "api",
        "transform": "api",
    },
    cases=("cases",),
    timed="timed",
)
