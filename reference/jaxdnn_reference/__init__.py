"""The definition of jaxdnn's ops, in NumPy.

Every op of jaxdnn stands here under the same name and with the same argument names, minus those that choose an
implementation, plus `arithmetic` (golden, ordered, tensor_core), `schedule`, `at` and `details`. This package
imports NumPy, ml_dtypes and the standard library, and validates nothing: jaxdnn does.
"""

from jaxdnn_reference.activation import activate, derivative
from jaxdnn_reference.arithmetic import Schedule, Sum, dot, dot_with_bound, magnitude
from jaxdnn_reference.conv import conv, conv_bgrad, conv_dgrad, conv_transpose, conv_wgrad
from jaxdnn_reference.product import Details
from jaxdnn_reference.rounding import fma, round_to
from jaxdnn_reference.tensor import TensorDescriptor

__all__ = [
    "Details",
    "Schedule",
    "Sum",
    "TensorDescriptor",
    "activate",
    "conv",
    "conv_bgrad",
    "conv_dgrad",
    "conv_transpose",
    "conv_wgrad",
    "derivative",
    "dot",
    "dot_with_bound",
    "fma",
    "magnitude",
    "round_to",
]
