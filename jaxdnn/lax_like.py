"""Functions with the signatures of jax.lax and jax.nn that call this library's ops.

    from jaxdnn import lax_like as lax
    y = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

Every argument is served with the meaning that it has in JAX, or refused: NotImplementedError names it. What JAX itself
refuses is refused in its words. `jaxdnn.patch` puts these functions into programs that call JAX's.
"""

from jaxdnn._src.adapters.convolution import conv as conv
from jaxdnn._src.adapters.convolution import conv_general_dilated as conv_general_dilated
from jaxdnn._src.adapters.convolution import conv_transpose as conv_transpose
from jaxdnn._src.adapters.convolution import conv_with_general_padding as conv_with_general_padding
from jaxdnn._src.adapters.neural import dot_product_attention as dot_product_attention
from jaxdnn._src.adapters.neural import log_softmax as log_softmax
from jaxdnn._src.adapters.neural import softmax as softmax
from jaxdnn._src.adapters.pooling import reduce_window as reduce_window

__all__ = [
    "conv",
    "conv_general_dilated",
    "conv_transpose",
    "conv_with_general_padding",
    "dot_product_attention",
    "log_softmax",
    "reduce_window",
    "softmax",
]
