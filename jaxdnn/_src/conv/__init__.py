"""Convolutions of one to three spatial axes, their backward passes, transposed convolutions."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "ConvolutionForward, ConvolutionBiasActivationForward",
            "`portable` (integers, floats but float64)",
            "conv conv_skip",
        ),
        Ops(
            "ConvolutionBackwardData, -Filter, -Bias",
            "`portable`; `conv_bgrad` `run_to_run`",
            "conv_dgrad conv_wgrad conv_bgrad conv_transpose",
        ),
    ),
    examples="""
conv*           | NHWC, RSCK, padding=1 -> NHWK                 | NK -/+ HW h2/+h4 C +/- | filters add over pixels
conv-strided*   | NHWC, RSCK, padding=1, stride=2 -> NHWK       | NK -/+ HW h/+h2 C +/-  | the same
conv-depthwise* | NHWC, RS_C, padding=1, groups=size(C) -> NHWC | N -/+ HW h2/+h4 C -/-  | a device has whole groups
conv_skip*      | NHWC, RSCK, padding=1 -> NHWK, NHWC           | NK -/+ HW h2/+h4 C +/- | as conv
conv_dgrad*     | NHWK, RSCK, shape(NHWC), padding=1 -> NHWC    | NC -/+ HW h2/+h4 K +/- | as conv
conv_wgrad*     | NHWC, NHWK, shape(RSCK), padding=1 -> RSCK    | N +/- HW +h2/h4 CK -/+ | as conv
conv_bgrad*     | NHWC -> C                                     | NHW +/- C -/-          | adds all but channels
conv_transpose* | NHWC, PQKC, stride=2 -> NHWK                  | NHWK -/+ C +/-         | as conv_dgrad, apart
""",
    engines=("hopper.engine", "xla.engine", "xla.ordered"),
    cases=("cases.family", "cases.skip"),
    timed="timed",
)
