"""Recurrent layers: LSTM, GRU, and the plain layer of tanh or relu; over whole sequences, or a step at a time."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "RNNForward, RNNBackwardData, RNNBackwardWeights",
            "`portable`; gradients `mesh_invariant`",
            "lstm gru rnn lstm_cell gru_cell rnn_cell",
        ),
    ),
    examples="""
lstm        | NTC, CG, DG                                            -> NTD ND ND | N -/+ | weights add over sequences
lstm-states | NTC, CG, DG, bias=G, h0=ND, c0=ND, direction="reverse" -> NTD ND ND | N -/+ | the same
gru         | NTC, CE, DE                                            -> NTD ND    | N -/+ | the same
gru-bias    | NTC, CE, DE, recurrent_bias=E, reset_gate="after"      -> NTD ND    | N -/+ | the same
rnn         | NTC, CD, DD, activation="tanh"                         -> NTD ND    | N -/+ | the same
lstm_cell   | NC, CG, DG, ND, ND                                     -> ND ND     | N -/+ | the same
gru_cell    | NC, CE, DE, ND                                         -> ND        | N -/+ | the same
rnn_cell    | NC, CD, DD, ND                                         -> ND        | N -/+ | the same
""",
    engines=("hopper.engine", "hopper.products", "xla"),
    cases=("cases",),
    timed="timed",
)
