"""The definition of jaxdnn's ops, in NumPy.

Every op of jaxdnn stands here under the same name and with the same argument names, minus those that choose an
implementation, plus `arithmetic` (golden, ordered, tensor_core), `schedule`, `at` and `details`. This package
imports NumPy, ml_dtypes and the standard library, and validates nothing: jaxdnn does.
"""

from jaxdnn_reference.activation import activate as activate
from jaxdnn_reference.activation import activation as activation
from jaxdnn_reference.activation import activation_dgrad as activation_dgrad
from jaxdnn_reference.activation import derivative as derivative
from jaxdnn_reference.arithmetic import Schedule as Schedule
from jaxdnn_reference.arithmetic import Sum as Sum
from jaxdnn_reference.arithmetic import dot as dot
from jaxdnn_reference.arithmetic import dot_with_bound as dot_with_bound
from jaxdnn_reference.arithmetic import magnitude as magnitude
from jaxdnn_reference.attention import attention as attention
from jaxdnn_reference.attention import attention_dgrad as attention_dgrad
from jaxdnn_reference.attention import merge_attention as merge_attention
from jaxdnn_reference.conv import conv as conv
from jaxdnn_reference.conv import conv_bgrad as conv_bgrad
from jaxdnn_reference.conv import conv_dgrad as conv_dgrad
from jaxdnn_reference.conv import conv_skip as conv_skip
from jaxdnn_reference.conv import conv_transpose as conv_transpose
from jaxdnn_reference.conv import conv_wgrad as conv_wgrad
from jaxdnn_reference.ctc import ctc_align as ctc_align
from jaxdnn_reference.ctc import ctc_lengths as ctc_lengths
from jaxdnn_reference.ctc import ctc_loss as ctc_loss
from jaxdnn_reference.ctc import ctc_posterior as ctc_posterior
from jaxdnn_reference.deform_conv import deform_conv as deform_conv
from jaxdnn_reference.descriptor import TensorDescriptor as TensorDescriptor
from jaxdnn_reference.dropout import dropout as dropout
from jaxdnn_reference.dropout import dropout_mask as dropout_mask
from jaxdnn_reference.grid_sample import affine_grid as affine_grid
from jaxdnn_reference.grid_sample import grid_sample as grid_sample
from jaxdnn_reference.grid_sample import spatial_transformer as spatial_transformer
from jaxdnn_reference.grid_sample import warp as warp
from jaxdnn_reference.im2col import col2im as col2im
from jaxdnn_reference.im2col import im2col as im2col
from jaxdnn_reference.map_coordinates import map_coordinates as map_coordinates
from jaxdnn_reference.norm import adaptive_layer_norm as adaptive_layer_norm
from jaxdnn_reference.norm import adaptive_layer_norm_dgrad as adaptive_layer_norm_dgrad
from jaxdnn_reference.norm import layer_norm as layer_norm
from jaxdnn_reference.norm import layer_norm_dgrad as layer_norm_dgrad
from jaxdnn_reference.norm import rms_norm as rms_norm
from jaxdnn_reference.norm import rms_norm_dgrad as rms_norm_dgrad
from jaxdnn_reference.norm_batch import batch_norm as batch_norm
from jaxdnn_reference.norm_batch import batch_norm_dgrad as batch_norm_dgrad
from jaxdnn_reference.norm_batch import batch_norm_inference as batch_norm_inference
from jaxdnn_reference.norm_group import group_norm as group_norm
from jaxdnn_reference.norm_group import group_norm_dgrad as group_norm_dgrad
from jaxdnn_reference.norm_group import instance_norm as instance_norm
from jaxdnn_reference.norm_group import instance_norm_dgrad as instance_norm_dgrad
from jaxdnn_reference.norm_local import divisive_norm as divisive_norm
from jaxdnn_reference.norm_local import divisive_norm_dgrad as divisive_norm_dgrad
from jaxdnn_reference.norm_local import lrn as lrn
from jaxdnn_reference.norm_local import lrn_dgrad as lrn_dgrad
from jaxdnn_reference.norm_lp import lp_normalize as lp_normalize
from jaxdnn_reference.norm_stats import bn_finalize as bn_finalize
from jaxdnn_reference.norm_stats import bn_finalize_inference as bn_finalize_inference
from jaxdnn_reference.norm_stats import dbn_weight as dbn_weight
from jaxdnn_reference.norm_stats import genstats as genstats
from jaxdnn_reference.pool import adaptive_pool as adaptive_pool
from jaxdnn_reference.pool import global_pool as global_pool
from jaxdnn_reference.pool import pool as pool
from jaxdnn_reference.pool import pool_dgrad as pool_dgrad
from jaxdnn_reference.pool import unpool as unpool
from jaxdnn_reference.product import Details as Details
from jaxdnn_reference.reduce import reduce as reduce
from jaxdnn_reference.resample import pixel_shuffle as pixel_shuffle
from jaxdnn_reference.resample import pixel_unshuffle as pixel_unshuffle
from jaxdnn_reference.resample import resample as resample
from jaxdnn_reference.resample import resample_dgrad as resample_dgrad
from jaxdnn_reference.rnn import gru as gru
from jaxdnn_reference.rnn import gru_cell as gru_cell
from jaxdnn_reference.rnn import lstm as lstm
from jaxdnn_reference.rnn import lstm_cell as lstm_cell
from jaxdnn_reference.rnn import rnn as rnn
from jaxdnn_reference.rnn import rnn_cell as rnn_cell
from jaxdnn_reference.roi_align import roi_align as roi_align
from jaxdnn_reference.rounding import fma as fma
from jaxdnn_reference.rounding import round_to as round_to
from jaxdnn_reference.softmax import logsumexp as logsumexp
from jaxdnn_reference.softmax import softmax as softmax
from jaxdnn_reference.softmax import softmax_dgrad as softmax_dgrad
from jaxdnn_reference.softmax_cross_entropy import linear_cross_entropy as linear_cross_entropy
from jaxdnn_reference.tensor import add as add
from jaxdnn_reference.tensor import fill as fill
from jaxdnn_reference.tensor import op_tensor as op_tensor
from jaxdnn_reference.tensor import scale as scale
from jaxdnn_reference.tensor import transform as transform

__all__ = [name for name, value in globals().items() if callable(value)]  # pyright: ignore[reportUnsupportedDunderAll]
