"""Softmax and logsumexp of rows, and the cross-entropy of a linear layer."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "SoftmaxForward, SoftmaxBackward",
            "`mesh_invariant`; the loss `run_to_run`",
            "softmax softmax_dgrad logsumexp linear_cross_entropy",
        ),
    ),
    examples="""
softmax                   | NHWC -> NHWC                            | NHW -/- C +/+ | a row's maximum and sum
softmax_dgrad             | NHWC, NHWC -> NHWC                      | NHW -/- C +/+ | a row's sum
logsumexp                 | NHWC -> NHW                             | NHW -/- C +/+ | a row's maximum and sum
linear_cross_entropy      | TD, DV, index(T) ->                     | TDV +/+       | logits, rows' sums; the mean
linear_cross_entropy-rows | TD, DV, index(T), reduction="none" -> T | T -/+ DV +/+  | logits, rows' sums; w's gradient
""",
    engines=("hopper.engine", "xla"),
    cases=("cases",),
    timed="timed",
)
