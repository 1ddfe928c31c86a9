"""Connectionist temporal classification: the loss of sequences whose alignment with their labels is not known."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(Ops("CTCLoss", "`portable`", "ctc_loss ctc_posterior ctc_align ctc_lengths"),),
    examples="""
ctc_loss      | NTV, index(NP), blank=-1 -> N   | N -/- TV g/g | a sequence's lattice needs all of it
ctc_posterior | NTV, index(NP), blank=-1 -> NQP | N -/- TV g/g | a sequence's lattice needs all of it
ctc_align*    | NTV, index(NP), blank=-1 -> NQ  | N -/- TV g/- | a sequence's lattice needs all of it
ctc_lengths   | index(NT) -> ?                  |              | no operand has an axis
""",
    engines=("xla", "hopper.engine"),
    cases=("cases",),
    timed="timed",
)
