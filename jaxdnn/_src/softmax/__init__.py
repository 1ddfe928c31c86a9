"""Softmax and logsumexp of rows, cross-entropy, and that of a linear layer."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "SoftmaxForward, SoftmaxBackward",
            "`mesh_invariant`; behind a linear layer `run_to_run`",
            "softmax softmax_dgrad logsumexp cross_entropy linear_cross_entropy",
        ),
    ),
    examples="""
softmax                   | NHWC -> NHWC                            | NHW -/- C +2/+3     | a row's maximum and sum
softmax_dgrad             | NHWC, NHWC -> NHWC                      | NHW -/- C +/+       | a row's sum
logsumexp                 | NHWC -> NHW                             | NHW -/- C +2/+2     | a row's maximum and sum
cross_entropy             | TV, index(T) ->                         | T +/- V +2/+2       | a row's sums; the mean
cross_entropy-rows        | NHWC, NHWC, reduction="none" -> NHW     | NHW -/- C +3/+3     | a row's maximum and sums
linear_cross_entropy      | TD, DV, index(T) ->                     | TD +/+ V +2/+3      | logits, rows' sums; the mean
linear_cross_entropy-rows | TD, DV, index(T), reduction="none" -> T | T -/+ D +/+ V +2/+3 | logits, sums; w's gradient
""",
    engines=("hopper.engine", "xla"),
    cases=("cases", "cases_losses"),
    timed="timed",
)
