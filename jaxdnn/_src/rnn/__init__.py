"""Recurrent layers: LSTM, GRU, and the plain layer of tanh or relu; over whole sequences, or a step at a time."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "RNNForward, RNNBackwardData, RNNBackwardWeights",
            "`portable`; gradients `mesh_invariant`",
            "lstm gru rnn lstm_cell gru_cell rnn_cell lstm_dgrad gru_dgrad rnn_dgrad lstm_wgrad gru_wgrad rnn_wgrad",
        ),
    ),
    examples="""
lstm        | NTC, CG, DG                                            -> NTD ND ND | N -/+  | weights add over sequences
lstm-states | NTC, CG, DG, bias=G, h0=ND, c0=ND, direction="reverse" -> NTD ND ND | N -/+  | the same
gru         | NTC, CE, DE                                            -> NTD ND    | N -/+  | the same
gru-bias    | NTC, CE, DE, recurrent_bias=E, reset_gate="after"      -> NTD ND    | N -/+  | the same
rnn         | NTC, CD, DD, activation="tanh"                         -> NTD ND    | N -/+  | the same
lstm_cell   | NC, CG, DG, ND, ND                                     -> ND ND     | N -/+  | the same
gru_cell    | NC, CE, DE, ND                                         -> ND        | N -/+  | the same
rnn_cell    | NC, CD, DD, ND                                         -> ND        | N -/+  | the same
lstm_dgrad  | NTD, NTC, CG, DG                                       -> NTC ND ND | N -/+3 | the same
gru_dgrad   | NTD, NTC, CE, DE                                       -> NTC ND    | N -/+3 | the same
rnn_dgrad   | NTD, NTC, CD, DD                                       -> NTC ND    | N -/+3 | the same
lstm_wgrad  | NTD, NTC, CG, DG                                       -> CG DG     | N +/+3 | the same
gru_wgrad   | NTD, NTC, CE, DE                                       -> CE DE     | N +/+3 | the same
rnn_wgrad   | NTD, NTC, CD, DD                                       -> CD DD     | N +/+3 | the same
""",
    engines=("hopper.engine", "hopper.products", "xla"),
    cases=("cases_stacks", "cases_backward"),
    timed="timed",
)
