"""Products of matrices whose rows belong to groups, each with a matrix of its own; and the gradient in these matrices.

    y[m, n] = sum_k a[m, k] b[g, k, n]        for the rows m of group g;  0 for rows that belong to no group
    w[g, k, n] = sum_m a[m, k] dy[m, n]       over the rows m of group g

Group g has group_sizes[g] rows, which follow those of group g - 1. A negative size is 0, and groups end with the last
row: rows that the sizes exceed do not exist, and rows that they leave belong to no group.

Each is a product of matrices, with the arithmetics and types of `matmul`: "ordered" adds over k, or over the rows of
the group, from the first on.

Sources: the experts of Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer" (2017); cuDNN's moe_grouped_matmul without its index, and its backward operation.
"""

from typing import Any

import numpy as np

from jaxdnn_reference.matmul import matmul

Array = np.ndarray[Any, Any]


def grouped_matmul(
    a: Array, b: Array, group_sizes: Array, /, *, transpose_b: bool = False, out_dtype: Any = None, **options: Any
) -> Array:
    """y [m, n] of a [m, k], b [g, k, n] (or [g, n, k], transposed); options: see `matmul`."""
    given = {"transpose_b": transpose_b, "out_dtype": out_dtype, **options}
    ends = _ends(group_sizes, len(a))
    parts = [matmul(a[start:end], of_group, **given) for of_group, (start, end) in zip(b, ends, strict=True)]
    none = matmul(a[:0], np.zeros(b.shape[1:], b.dtype), **given)
    rows = len(a) - (ends[-1][1] if ends else 0)
    return np.concatenate([*parts, np.zeros((rows, none.shape[1]), none.dtype)])


def grouped_matmul_wgrad(a: Array, dy: Array, group_sizes: Array, /, *, out_dtype: Any = None, **options: Any) -> Array:
    """w [g, k, n] of a [m, k] and dy [m, n]; options: see `matmul`."""
    given = {"transpose_a": True, "out_dtype": out_dtype, **options}
    ends = _ends(group_sizes, len(a))
    none = matmul(a[:0], dy[:0], **given)
    parts = [matmul(a[start:end], dy[start:end], **given) for start, end in ends]
    return np.stack(parts) if parts else np.zeros((0, *none.shape), none.dtype)


def _ends(group_sizes: Array, rows: int) -> list[tuple[int, int]]:
    """The first row of each group, and the one that follows its last."""
    ends = np.minimum(np.cumsum(np.maximum(group_sizes, 0), dtype=np.int64), rows).tolist()
    return list(zip([0, *ends], ends, strict=False))
