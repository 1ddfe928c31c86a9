"""Arrays moved, scaled, added and reduced."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "TransformTensor, AddTensor, OpTensor, ScaleTensor, SetTensor, ReduceTensor, Im2Col",
            "`portable`; square roots `mesh_invariant`",
            "transform add op_tensor scale fill reduce im2col col2im",
        ),
    ),
    examples="""
transform*   | NHWC, out_layout="NCHW" -> NCHW      | NHWC -/-                 | a transposition
add*         | _HWC, NHWC -> NHWC                   | N -/+ HWC -/-            | what is broadcast
op_tensor*   | NHWC, _HWC, op="max" -> NHWC         | N -/+ HWC -/-            | what is broadcast
scale*       | NHWC, alpha=2.0 -> NHWC              | NHWC -/-                 | element by element
fill*        | NHWC, value=2.0 -> ?                 | NHWC -/-                 | element by element
reduce*      | NHWC, axis=(1, 2) -> NC              | NC -/- HW +/-            | sums
reduce-max*  | NHWC, op="max", axis=(1, 2) -> NC    | NC -/- HW +2/+3          | maxima, and where they are first
reduce-norm2 | NHWC, op="norm2", axis=(1, 2) -> NC  | NC c+/c+ HW +3/+3        | sums; on CPUs whether to scale one
im2col*      | NHWC, padding=1 -> NHWF              | N -/- HW h2/h2 C t10/h47 | a pixel's features lie tap by tap
col2im*      | NHWF, shape(NHWC), padding=1 -> NHWC | N -/- HW h2/h2 C h47/t10 | a pixel's features lie tap by tap
""",
    cases=("cases",),
    timed="timed",
)
