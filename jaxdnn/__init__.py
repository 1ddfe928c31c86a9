"""jaxdnn: deep-neural-network primitives for JAX, defined exactly, fast, and reproducible to stated levels.

Arrays are positional, everything else is given by keyword. In every op that takes them these mean the same:

  layout           the letters of the axes: NHWC, NCHW, CHWN, NCHWc32, ...; one op serves one to three spatial axes
  alpha, beta, prior   result = alpha computed + beta prior, in the accumulator; with beta 0 the prior is not read
  out_dtype        the result's dtype; None is that of the input
  engine           None, or the name of the implementation that must serve the call
  determinism      the level that the implementation must guarantee; around many calls: `with determinism(level):`

An op whose name ends in dgrad, wgrad or bgrad is a backward pass, for programs that call it by itself; `jax.grad` finds
it without being told. `explain(op, *arguments)` says which engine would serve a call and what it guarantees.
`jax.export` may leave the batch open, as a symbolic dimension, of all but `linear_cross_entropy`; kernels that need
every size are then passed over. The package `jaxdnn_reference` has the definition of every op in NumPy, with the same
name and arguments. `recurrent` converts weights of recurrent layers from and to other libraries; `ring` is attention to
keys on several devices, `multi_head` attention with its projections. `lax_like` has functions with lax's signatures,
and `patch` is a context that puts them into programs that call lax's, such as a Flax model. `graph` has operation
graphs in cuDNN's manner, over these ops. The examples in docstrings take `import jax`, `import jax.numpy as jnp` and
`import jaxdnn as dnn` as given.
"""

import typing as _typing

from jaxdnn import engines as engines
from jaxdnn import graph as graph
from jaxdnn import lax_like as lax_like
from jaxdnn import multi_head as multi_head
from jaxdnn import recurrent as recurrent
from jaxdnn import ring as ring
from jaxdnn import tolerance as tolerance
from jaxdnn._src import families as _families
from jaxdnn._src.activation.api import activation as activation
from jaxdnn._src.activation.api import activation_dgrad as activation_dgrad
from jaxdnn._src.activation.prelu import prelu as prelu
from jaxdnn._src.adapters.patch import patch as patch
from jaxdnn._src.attention.api import attention as attention
from jaxdnn._src.attention.api import attention_dgrad as attention_dgrad
from jaxdnn._src.attention.api import merge_attention as merge_attention
from jaxdnn._src.attention.decode import attention_decode as attention_decode
from jaxdnn._src.attention.rope import rope as rope
from jaxdnn._src.conv.api import conv as conv
from jaxdnn._src.conv.api import conv_bgrad as conv_bgrad
from jaxdnn._src.conv.api import conv_dgrad as conv_dgrad
from jaxdnn._src.conv.api import conv_skip as conv_skip
from jaxdnn._src.conv.api import conv_transpose as conv_transpose
from jaxdnn._src.conv.api import conv_wgrad as conv_wgrad
from jaxdnn._src.core import peers as _peers
from jaxdnn._src.core.determinism import determinism as determinism
from jaxdnn._src.core.explain import explain as explain
from jaxdnn._src.core.limits import limits as limits
from jaxdnn._src.core.logs import logged as logged
from jaxdnn._src.core.releases import VERSION as VERSION
from jaxdnn._src.core.releases import check_version as check_version
from jaxdnn._src.core.tune import tune as tune
from jaxdnn._src.ctc.api import ctc_align as ctc_align
from jaxdnn._src.ctc.api import ctc_lengths as ctc_lengths
from jaxdnn._src.ctc.api import ctc_loss as ctc_loss
from jaxdnn._src.ctc.api import ctc_posterior as ctc_posterior
from jaxdnn._src.dropout.api import DropoutState as DropoutState
from jaxdnn._src.dropout.api import dropout as dropout
from jaxdnn._src.dropout.api import dropout_mask as dropout_mask
from jaxdnn._src.matmul.api import matmul as matmul
from jaxdnn._src.matmul.grouped import grouped_matmul as grouped_matmul
from jaxdnn._src.matmul.grouped import grouped_matmul_wgrad as grouped_matmul_wgrad
from jaxdnn._src.norm.batch import batch_norm as batch_norm
from jaxdnn._src.norm.batch import batch_norm_dgrad as batch_norm_dgrad
from jaxdnn._src.norm.batch import batch_norm_inference as batch_norm_inference
from jaxdnn._src.norm.group import group_norm as group_norm
from jaxdnn._src.norm.group import group_norm_dgrad as group_norm_dgrad
from jaxdnn._src.norm.group import instance_norm as instance_norm
from jaxdnn._src.norm.group import instance_norm_dgrad as instance_norm_dgrad
from jaxdnn._src.norm.local import divisive_norm as divisive_norm
from jaxdnn._src.norm.local import divisive_norm_dgrad as divisive_norm_dgrad
from jaxdnn._src.norm.local import lrn as lrn
from jaxdnn._src.norm.local import lrn_dgrad as lrn_dgrad
from jaxdnn._src.norm.lp import lp_normalize as lp_normalize
from jaxdnn._src.norm.rows import adaptive_layer_norm as adaptive_layer_norm
from jaxdnn._src.norm.rows import adaptive_layer_norm_dgrad as adaptive_layer_norm_dgrad
from jaxdnn._src.norm.rows import layer_norm as layer_norm
from jaxdnn._src.norm.rows import layer_norm_dgrad as layer_norm_dgrad
from jaxdnn._src.norm.rows import rms_norm as rms_norm
from jaxdnn._src.norm.rows import rms_norm_dgrad as rms_norm_dgrad
from jaxdnn._src.norm.stats import bn_finalize as bn_finalize
from jaxdnn._src.norm.stats import bn_finalize_inference as bn_finalize_inference
from jaxdnn._src.norm.stats import dbn_weight as dbn_weight
from jaxdnn._src.norm.stats import genstats as genstats
from jaxdnn._src.pool.api import pool as pool
from jaxdnn._src.pool.api import pool_dgrad as pool_dgrad
from jaxdnn._src.pool.api import unpool as unpool
from jaxdnn._src.pool.sizes import adaptive_pool as adaptive_pool
from jaxdnn._src.pool.sizes import global_pool as global_pool
from jaxdnn._src.resample.api import pixel_shuffle as pixel_shuffle
from jaxdnn._src.resample.api import pixel_unshuffle as pixel_unshuffle
from jaxdnn._src.resample.api import resample as resample
from jaxdnn._src.resample.api import resample_dgrad as resample_dgrad
from jaxdnn._src.rnn.api import gru as gru
from jaxdnn._src.rnn.api import gru_cell as gru_cell
from jaxdnn._src.rnn.api import lstm as lstm
from jaxdnn._src.rnn.api import lstm_cell as lstm_cell
from jaxdnn._src.rnn.api import rnn as rnn
from jaxdnn._src.rnn.api import rnn_cell as rnn_cell
from jaxdnn._src.rnn.backward import gru_dgrad as gru_dgrad
from jaxdnn._src.rnn.backward import gru_wgrad as gru_wgrad
from jaxdnn._src.rnn.backward import lstm_dgrad as lstm_dgrad
from jaxdnn._src.rnn.backward import lstm_wgrad as lstm_wgrad
from jaxdnn._src.rnn.backward import rnn_dgrad as rnn_dgrad
from jaxdnn._src.rnn.backward import rnn_wgrad as rnn_wgrad
from jaxdnn._src.sampling.api import affine_grid as affine_grid
from jaxdnn._src.sampling.api import grid_sample as grid_sample
from jaxdnn._src.sampling.api import spatial_transformer as spatial_transformer
from jaxdnn._src.sampling.api import warp as warp
from jaxdnn._src.sampling.deform import deform_conv as deform_conv
from jaxdnn._src.sampling.regions import roi_align as roi_align
from jaxdnn._src.sampling.splines import map_coordinates as map_coordinates
from jaxdnn._src.softmax.api import logsumexp as logsumexp
from jaxdnn._src.softmax.api import softmax as softmax
from jaxdnn._src.softmax.api import softmax_dgrad as softmax_dgrad
from jaxdnn._src.softmax.cross_entropy import linear_cross_entropy as linear_cross_entropy
from jaxdnn._src.softmax.losses import cross_entropy as cross_entropy
from jaxdnn._src.tensor.api import add as add
from jaxdnn._src.tensor.api import fill as fill
from jaxdnn._src.tensor.api import op_tensor as op_tensor
from jaxdnn._src.tensor.api import scale as scale
from jaxdnn._src.tensor.api import transform as transform
from jaxdnn._src.tensor.im2col import col2im as col2im
from jaxdnn._src.tensor.im2col import im2col as im2col
from jaxdnn._src.tensor.reduce import reduce as reduce
from jaxdnn._version import __version__ as __version__

_families.load_engines()

# What is imported above as itself; type checkers and readers see it there.
_OTHERS = ["DropoutState", "VERSION", "check_version", "determinism", "explain", "limits", "logged", "patch", "tune"]
__all__ = sorted([*_families.ops(), *_OTHERS])  # pyright: ignore[reportUnsupportedDunderAll]

if not _typing.TYPE_CHECKING:  # which find what is missing themselves

    def __getattr__(name: str) -> object:
        raise AttributeError(_peers.no_attribute(name, __all__), name=name)
