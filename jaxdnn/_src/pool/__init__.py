"""Pooling by windows, over the whole image and to given sizes."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "PoolingForward, PoolingBackward",
            "`portable`; p-norms `mesh_invariant`",
            "pool pool_dgrad unpool global_pool adaptive_pool",
        ),
    ),
    examples="""
pool*              | NHWC -> NHWC                                                | NHWC -/-        | no overlap
pool-overlapping*  | NHWC, window=3, stride=1, padding=1 -> NHWC                 | NC -/- HW h2/h6 | they overlap
pool-average       | NHWC, mode="average", window=3, stride=2, padding=1 -> NHWC | NC -/- HW h/h   | they overlap
pool_dgrad*        | NhwC, NHWC -> NHWC                                          | NHWC -/-        | no overlap
pool_dgrad-average | NhwC, shape(NHWC), mode="average" -> NHWC                   | NHWC -/-        | no overlap
unpool*            | NhwC, index(NhwC), shape(NHWC) -> NHWC                      | NHWC -/-        | no overlap
global_pool        | NHWC -> N11C                                                | NC -/- HW g/-   | one stated order
adaptive_pool*     | NHWC, output_sizes=shape(hw), mode="max" -> NHWC            | NHWC -/-        | no overlap
""",
    engines=("hopper.engine", "xla.engine"),
    cases=("cases", "cases_unpool"),
    timed="timed",
)
