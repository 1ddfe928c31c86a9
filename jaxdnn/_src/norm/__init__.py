"""Normalisations: of rows, groups, instances and batches, local ones, and their statistics."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "BatchNormalization..., graph genstats, bn_finalize, dbn_weight",
            "`run_to_run`",
            "batch_norm batch_norm_dgrad batch_norm_inference genstats bn_finalize bn_finalize_inference dbn_weight",
        ),
        Ops(
            "graph norms LAYER, RMS, ADA_LAYER",
            "`batch_invariant`",
            "layer_norm rms_norm adaptive_layer_norm layer_norm_dgrad rms_norm_dgrad adaptive_layer_norm_dgrad",
        ),
        Ops(
            "graph norms INSTANCE, GROUP",
            "`batch_invariant`",
            "instance_norm group_norm instance_norm_dgrad group_norm_dgrad",
        ),
        Ops(
            "LRNCrossChannel, DivisiveNormalization",
            "`mesh_invariant`; p-norms `batch_invariant`",
            "lrn lrn_dgrad divisive_norm divisive_norm_dgrad lp_normalize",
        ),
    ),
    examples="""
batch_norm                | NHWC, scale=C, bias=C -> NHWC C C C C   | NHW +2/+4 C -/-      | statistics, both ways
batch_norm_dgrad          | NHWC, NHWC -> NHWC C C                  | NHW +4/+8 C -/-      | statistics, both ways
batch_norm_inference      | NHWC, C, C -> NHWC                      | NHW -/+ C -/-        | parameters
genstats*                 | NHWC -> C C                             | NHW +/- C -/-        | sums over all but channels
bn_finalize               | C, C, 2048 -> C C C C C C               | C -/-                | element by element
bn_finalize_inference     | C, C -> C C                             | C -/-                | element by element
dbn_weight                | NHWC, NHWC, C, C -> C C C C C           | NHW +/+ C -/-        | statistics, both ways
layer_norm                | NHWC, scale=C, bias=C -> NHWC           | NHW -/+ C +2/+4      | statistics, parameters
rms_norm                  | NHWC, scale=C -> NHWC                   | NHW -/+ C +/+2       | statistics, parameters
adaptive_layer_norm       | NHWC, NC, NC -> NHWC                    | N -/- HW -/+ C +2/+4 | statistics, parameters
instance_norm             | NHWC, scale=C -> NHWC                   | N -/+ HW +2/+4 C -/- | statistics, parameters
group_norm                | NHWC, groups=8, scale=C, bias=C -> NHWC | N -/+ HW +2/+4 C -/- | statistics, parameters
layer_norm_dgrad          | NHWC, NHWC -> NHWC C C                  | NHW +/- C +4/+8      | statistics, parameters
rms_norm_dgrad            | NHWC, NHWC -> NHWC C C                  | NHW +/- C +2/+4      | statistics, parameters
adaptive_layer_norm_dgrad | NHWC, NHWC, NC -> NHWC NC NC            | N -/- HW +/+ C +4/+8 | statistics, parameters
instance_norm_dgrad       | NHWC, NHWC -> NHWC C C                  | N +/- HW +4/+8 C -/- | statistics, parameters
group_norm_dgrad          | NHWC, NHWC, groups=8 -> NHWC C C        | N +/- HW +4/+8 C -/- | statistics, parameters
lrn                       | NHWC -> NHWC                            | NHW -/- C h2/h4      | windows of channels
lrn_dgrad                 | NHWC, NHWC -> NHWC                      | NHW -/- C h4/h8      | windows of channels
divisive_norm             | NHWC -> NHWC                            | NC -/- HW h2/h4      | windows reach over edges
divisive_norm_dgrad       | NHWC, NHWC -> NHWC NHWC                 | NC -/- HW h4/h8      | windows reach over edges
lp_normalize              | NHWC -> NHWC                            | NHW c+/c+ C +3/+6    | sums; on CPUs a choice
""",
    engines=("hopper.engine", "xla"),
    cases=("cases", "cases_activated", "cases_local", "cases_stats"),
    timed="timed",
)
