"""Activations and their gradients, and the epilogue of an op that ends in one."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "ActivationForward, -Backward, pointwise modes",
            "`portable` in bfloat16, float16, correctly rounded",
            "activation activation_dgrad",
        ),
    ),
    examples="""
activation       | NHWC, activation="gelu" -> NHWC       | NHWC -/- | element by element
activation_dgrad | NHWC, NHWC, activation="gelu" -> NHWC | NHWC -/- | element by element
""",
    engines=("xla",),
    cases=("cases",),
    timed="timed",
)
