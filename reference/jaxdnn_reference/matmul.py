"""The product of matrices, with leading axes that count matrices.

    y[..., m, n] = act(alpha sum_k a[..., m, k] b[..., k, n] + beta prior[..., m, n] + residual[..., m, n] + bias[n])

The leading axes of a and b broadcast against each other as numpy.matmul's do; transpose_a and transpose_b say that a
is stored as [..., k, m], b as [..., n, k]. alpha may be an array that broadcasts to the result: a scale of each row
[m, 1], of each column [n], or both.

`product.finish` states the epilogue, and what alpha's and beta's products are rounded to. "ordered" adds over k from 0
on: acc = fma(a[m, k], b[k, n], acc) in float32, from acc = 0.

Sources: numpy.matmul for the broadcast; BLAS's GEMM for transposes, alpha and beta (dgemm: Dongarra et al., ACM TOMS
16(1), 1990); cuDNN's graph operation Matmul, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, with the pointwise operations
that follow it in one graph.
"""

import math
import string
from typing import Any

import numpy as np

from jaxdnn_reference.arithmetic import wide
from jaxdnn_reference.conv import operand
from jaxdnn_reference.layout import Axes
from jaxdnn_reference.product import Product, finish

Array = np.ndarray[Any, Any]


def matmul(
    a: Array,
    b: Array,
    /,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: str | None = None,
    **options: Any,
) -> Any:
    """y[..., m, n] = sum_k a[..., m, k] b[..., k, n]; options: see `product.finish`."""
    left, right = operand(a, precision), operand(b, precision)
    left = left.swapaxes(-1, -2) if transpose_a else left
    right = right if transpose_b else right.swapaxes(-1, -2)  # [..., n, k]
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    (m, k), n, count = left.shape[-2:], right.shape[-2], math.prod(batch)
    lefts = np.broadcast_to(left, (*batch, m, k)).reshape(count, m, k)
    rights = np.broadcast_to(right, (*batch, n, k)).reshape(count, n, k)
    letters = string.ascii_lowercase[: len(batch)]
    product = Product(
        groups=count,
        rows=m,
        columns=n,
        left=lambda row, matrix: lefts[matrix, row],
        right=lambda column, matrix: rights[matrix, column],
        stored=lambda row: np.full(row.shape, k),
        axes=Axes(f"{letters}MC", f"M{letters}C"),
        shape=(m, *batch, n),
    )
    return finish(lambda: wide(lefts) @ wide(rights).swapaxes(-1, -2), product, a.dtype, **options)
