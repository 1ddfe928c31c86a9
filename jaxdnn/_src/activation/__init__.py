"""Activations and their gradients, and the epilogue of an op that ends in one."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "ActivationForward, -Backward, pointwise modes",
            "`portable` in bfloat16, float16, correctly rounded",
            "activation activation_dgrad",
        ),
        Ops("none", "`portable`; the gradient in slopes `mesh_invariant`", "prelu"),
    ),
    examples="""
activation       | NHWC, activation="gelu" -> NHWC       | NHWC -/- | element by element
activation_dgrad | NHWC, NHWC, activation="gelu" -> NHWC | NHWC -/- | element by element
prelu*           | NHWC, C -> NHWC                       | NHW -/+ C -/- | the slopes' gradient
""",
    engines=("xla",),
    cases=("cases", "cases_prelu"),
    timed="timed",
)
