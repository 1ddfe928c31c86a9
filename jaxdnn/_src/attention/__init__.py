"""Attention: the mean of values, weighted by the softmax of scores; and how parts of it are merged."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "SDPA forward and backward",
            "`mesh_invariant`; `merge_attention` `run_to_run`",
            "attention attention_dgrad attention_decode merge_attention",
        ),
        Ops("graph rope, rope_backward", "`mesh_invariant`", "rope"),
    ),
    examples="""
attention        | NTHD, NTHD, NTHD, causal=True            -> NTHD           | NH -/- T g2/+g2  | keys are gathered
attention-bias   | NTHD, NTHD, NTHD, bias=_HTT, softcap=2.0 -> NTHD           | N -/+ H -/-      | the bias is shared
attention_dgrad  | NTHD, NTHD, NTHD, NTHD, NTHD, NTH        -> NTHD NTHD NTHD | NH -/-           | as forward
attention_decode | NTHD, NTHD, NTHD, index(N)               -> NTHD           | NH -/-           | keys are gathered
merge_attention  | PNTHD, PNTH                              -> NTHD NTH       | NTH -/-          | independent rows
rope             | NTHD                                     -> NTHD           | NH -/- T ch4/ch4 | sines, on CPUs
""",
    engines=("hopper.engine", "hopper.backward_engine", "xla"),
    cases=("cases", "cases_decode"),
    timed="timed",
)
