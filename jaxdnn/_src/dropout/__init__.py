"""Dropout by a counter-based generator, alone and joined with bias, activation and residual."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "DropoutForward, -Backward, RNG; with bias, activation, residual",
            "`portable`; the bias's gradient `run_to_run`",
            "dropout dropout_mask",
        ),
    ),
    examples="""
dropout*      | NHWC, 7 -> NHWC     | NHWC -/- | element by element
dropout_mask* | 7, shape(NHWC) -> ? |          | no operand has an axis
""",
    engines=("hopper.engine", "xla"),
    cases=("cases", "cases_fused"),
    timed="timed",
)
