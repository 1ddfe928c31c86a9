"""jaxdnn: deep-neural-network primitives for JAX, defined exactly, fast, and reproducible to stated levels.

Arrays are positional, everything else is given by keyword. In every op that takes them these mean the same:

  layout           the letters of the axes: NHWC, NCHW, CHWN, NCHWc32, ...; one op serves one to three spatial axes
  alpha, beta, prior   result = alpha computed + beta prior, in the accumulator; with beta 0 the prior is not read
  out_dtype        the result's dtype; None is that of the input
  engine           None, or the name of the implementation that must serve the call
  determinism      the level that the implementation must guarantee; around many calls: `with determinism(level):`

An op whose name ends in dgrad, wgrad or bgrad is a backward pass, for programs that call it by itself; `jax.grad` finds
it without being told. `explain(op, *arguments)` says which engine would serve a call and what it promises. `jax.export`
may leave the batch open, as a symbolic dimension, of all but `linear_cross_entropy`; kernels that need every size are
then passed over. The package `jaxdnn_reference` has the definition of every op in NumPy, with the same name and
arguments.
"""

from jaxdnn import engines as engines
from jaxdnn import tolerance as tolerance
from jaxdnn._src import families as _families
from jaxdnn._src.activation.api import activation, activation_dgrad
from jaxdnn._src.conv.api import conv, conv_bgrad, conv_dgrad, conv_transpose, conv_wgrad
from jaxdnn._src.core.determinism import determinism
from jaxdnn._src.core.explain import explain
from jaxdnn._src.core.limits import limits
from jaxdnn._src.dropout.api import DropoutState, dropout, dropout_mask
from jaxdnn._src.norm.batch import batch_norm, batch_norm_dgrad, batch_norm_inference
from jaxdnn._src.norm.group import group_norm, group_norm_dgrad, instance_norm, instance_norm_dgrad
from jaxdnn._src.norm.local import divisive_norm, divisive_norm_dgrad, lrn, lrn_dgrad
from jaxdnn._src.norm.lp import lp_normalize
from jaxdnn._src.norm.rows import (
    adaptive_layer_norm,
    adaptive_layer_norm_dgrad,
    layer_norm,
    layer_norm_dgrad,
    rms_norm,
    rms_norm_dgrad,
)
from jaxdnn._src.norm.stats import bn_finalize, bn_finalize_inference, dbn_weight, genstats
from jaxdnn._src.pool.api import pool, pool_dgrad, unpool
from jaxdnn._src.pool.sizes import adaptive_pool, global_pool
from jaxdnn._src.resample.api import pixel_shuffle, pixel_unshuffle, resample, resample_dgrad
from jaxdnn._src.softmax.api import logsumexp, softmax, softmax_dgrad
from jaxdnn._src.softmax.cross_entropy import linear_cross_entropy
from jaxdnn._src.tensor.api import add, fill, op_tensor, scale, transform
from jaxdnn._src.tensor.im2col import col2im, im2col
from jaxdnn._src.tensor.reduce import reduce
from jaxdnn._version import __version__ as __version__

_families.load_engines()

__all__ = [
    "DropoutState",
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
    "determinism",
    "divisive_norm",
    "divisive_norm_dgrad",
    "dropout",
    "dropout_mask",
    "explain",
    "fill",
    "genstats",
    "global_pool",
    "group_norm",
    "group_norm_dgrad",
    "im2col",
    "instance_norm",
    "instance_norm_dgrad",
    "layer_norm",
    "layer_norm_dgrad",
    "limits",
    "linear_cross_entropy",
    "logsumexp",
    "lp_normalize",
    "lrn",
    "lrn_dgrad",
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
    "scale",
    "softmax",
    "softmax_dgrad",
    "transform",
    "unpool",
]
