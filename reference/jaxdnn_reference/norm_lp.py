"""Division by the norm of a vector: y = x / max((sum |x|^p)^(1/p), eps).

Sources: ONNX's LpNormalization, PyTorch's normalize.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference import norm

Array = np.ndarray[Any, Any]


def lp_normalize(
    x: Array, /, *, p: float = 2.0, axis: int | Sequence[int] = -1, eps: float = 1e-12, out_dtype: Any = None
) -> Array:
    """y = x / max((sum |x|^p)^(1/p), eps); p = inf is the largest |x|."""
    v = x.astype(norm.way_of(x).dtype)
    axes = tuple(np.atleast_1d(axis).tolist())
    size = np.abs(v)
    largest = size.max(axes, keepdims=True, initial=0)
    unit = np.where((largest == 0) | np.isinf(largest), 1, largest)  # float64's squares overflow too
    powers = largest if np.isinf(p) else ((size / unit) ** p).sum(axes, keepdims=True) ** (1 / p) * unit
    with np.errstate(invalid="ignore"):  # infinity over infinity
        return norm.result(v / np.maximum(powers, eps), out_dtype)
