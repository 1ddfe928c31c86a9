"""The definition of jaxdnn's ops, in NumPy.

Every op of jaxdnn stands here under the same name and with the same argument names, minus those that choose an
implementation, plus `arithmetic` (golden, ordered, tensor_core), `schedule`, `at` and `details`. This package
imports NumPy, ml_dtypes and the standard library, and validates nothing: jaxdnn does.
"""

from jaxdnn_reference.activation import activate, activation, activation_dgrad, derivative
from jaxdnn_reference.arithmetic import Schedule, Sum, dot, dot_with_bound, magnitude
from jaxdnn_reference.conv import conv, conv_bgrad, conv_dgrad, conv_transpose, conv_wgrad
from jaxdnn_reference.descriptor import TensorDescriptor
from jaxdnn_reference.dropout import dropout, dropout_mask
from jaxdnn_reference.im2col import col2im, im2col
from jaxdnn_reference.norm import (
    adaptive_layer_norm,
    adaptive_layer_norm_dgrad,
    layer_norm,
    layer_norm_dgrad,
    rms_norm,
    rms_norm_dgrad,
)
from jaxdnn_reference.norm_batch import batch_norm, batch_norm_dgrad, batch_norm_inference
from jaxdnn_reference.norm_group import group_norm, group_norm_dgrad, instance_norm, instance_norm_dgrad
from jaxdnn_reference.norm_local import divisive_norm, divisive_norm_dgrad, lrn, lrn_dgrad
from jaxdnn_reference.norm_lp import lp_normalize
from jaxdnn_reference.norm_stats import bn_finalize, bn_finalize_inference, dbn_weight, genstats
from jaxdnn_reference.pool import adaptive_pool, global_pool, pool, pool_dgrad, unpool
from jaxdnn_reference.product import Details
from jaxdnn_reference.reduce import reduce
from jaxdnn_reference.resample import pixel_shuffle, pixel_unshuffle, resample, resample_dgrad
from jaxdnn_reference.rounding import fma, round_to
from jaxdnn_reference.softmax import logsumexp, softmax, softmax_dgrad
from jaxdnn_reference.softmax_cross_entropy import linear_cross_entropy
from jaxdnn_reference.tensor import add, fill, op_tensor, scale, transform

__all__ = [
    "Details",
    "Schedule",
    "Sum",
    "TensorDescriptor",
    "activate",
    "activation",
    "activation_dgrad",
    "adaptive_layer_norm",
    "adaptive_layer_norm_dgrad",
    "adaptive_pool",
    "add",
    "batch_norm",
    "batch_norm_dgrad",
    "batch_norm_inference",
    "bn_finalize",
    "bn_finalize_inference",
    "col2im",
    "conv",
    "conv_bgrad",
    "conv_dgrad",
    "conv_transpose",
    "conv_wgrad",
    "dbn_weight",
    "derivative",
    "divisive_norm",
    "divisive_norm_dgrad",
    "dot",
    "dot_with_bound",
    "dropout",
    "dropout_mask",
    "fill",
    "fma",
    "genstats",
    "global_pool",
    "group_norm",
    "group_norm_dgrad",
    "im2col",
    "instance_norm",
    "instance_norm_dgrad",
    "layer_norm",
    "layer_norm_dgrad",
    "linear_cross_entropy",
    "logsumexp",
    "lp_normalize",
    "lrn",
    "lrn_dgrad",
    "magnitude",
    "op_tensor",
    "pixel_shuffle",
    "pixel_unshuffle",
    "pool",
    "pool_dgrad",
    "reduce",
    "resample",
    "resample_dgrad",
    "rms_norm",
    "rms_norm_dgrad",
    "round_to",
    "scale",
    "softmax",
    "softmax_dgrad",
    "transform",
    "unpool",
]
