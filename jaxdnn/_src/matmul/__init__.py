"""The product of matrices, by the engines of convolutions, and products whose rows belong to groups."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops("graph matmul, with its pointwise epilogue", "`portable` (integers, floats but float64)", "matmul"),
        Ops(
            "graph moe_grouped_matmul, moe_grouped_matmul_bwd",
            "`portable` (integers, floats but float64)",
            "grouped_matmul grouped_matmul_wgrad",
        ),
    ),
    examples="""
matmul*               | NTD, DV -> NTV           | NTV -/+ D +/-       | gradients add over what one operand lacks
matmul-batched*       | NTD, NDV -> NTV          | N -/- T -/+ D g2/g2 | matrices are groups of channels
grouped_matmul*       | TD, PDV, counts(P) -> TV | T -/+ D +/- V -/+   | terms are added over the mesh
grouped_matmul_wgrad* | TD, TV, counts(P) -> PDV | T +/- D -/+ V -/+   | and so are rows
""",
    engines=("hopper.engine", "grouped_xla"),
    cases=("cases", "cases_grouped"),
    timed="timed",
)
