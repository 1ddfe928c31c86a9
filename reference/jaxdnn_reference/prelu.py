"""A rectifier with a learned slope below 0: max(x, 0) + slope min(x, 0).

Source: He et al., "Delving Deep into Rectifiers", arXiv:1502.01852.
"""

from typing import Any

import numpy as np

from jaxdnn_reference.rounding import round_to

Array = np.ndarray[Any, Any]


def prelu(x: Array, slope: Array, /, *, axis: int = -1) -> Array:
    """slope: one for each element along the axis, or a single one. The product is rounded once, to the dtype of x."""
    # float64 holds the products of narrower types; its own are rounded here, where a wider type would round twice.
    z, a = x.astype(np.float64), slope.astype(np.float64)
    z = np.moveaxis(z, axis, -1) if slope.ndim else z
    with np.errstate(invalid="ignore"):
        y = np.where(z > 0, z, a * np.where(z > 0, 0, z))
    return round_to(np.moveaxis(y, -1, axis) if slope.ndim else y, x.dtype)
