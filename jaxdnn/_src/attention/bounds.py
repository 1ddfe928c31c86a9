"""What products of attention's weights are off by, where these are rounded as kernels do: by one rule for every test.

Letters: u the unit roundoff of the accumulator, w that of the weights of products of narrow operands on tensor cores, ω
half their smallest subnormal number (0 where weights are not rounded).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdnn._src.core.tolerance import FORMATS, Accumulation

Array = np.ndarray[Any, Any]


def narrow(accumulation: Accumulation, dtype: Any) -> tuple[float, float]:
    """w and ω: what rounding may change the weights of a product by, relative to them and at least."""
    if accumulation.kind != "tensor_core":
        return 0.0, 0.0
    rule = FORMATS[np.dtype(dtype).name]
    return rule.roundoff, rule.smallest_subnormal / 2


def result_error(
    y: Array,
    weights: Array,
    eta: Array,
    sigma: Array,
    values: Array,
    accumulation: Accumulation,
    dtype: Any,
    most: float,
) -> Array:
    """E of y = Σ_s P_s v_s, where the exponentials are off by eta and their sum by sigma, relative to them.

    dtype is that of the values, `most` the largest factor that dropout multiplies a weight by.
    """
    rule, (w, least) = FORMATS[accumulation.format], narrow(accumulation, dtype)
    u, size = rule.roundoff, np.abs(values)
    of_products = accumulation.error(y, weights @ size, np.asarray(weights.shape[-1]))
    error = (
        (weights * (eta + w + 2 * u)) @ size
        + of_products * (1 + w)
        + (rule.smallest_normal * most + least) * size.sum(2, keepdims=True)
    )
    return (error + np.abs(y) * (sigma + 3 * u)[..., None]) * (1 + 4 * sigma)[..., None]


def rounding(size: Array, accumulation: Accumulation, dtype: Any, scale: float = 1.0) -> Array:
    """What weights of this size are off by where they are rounded; a kernel multiplies by `scale` after the product."""
    w, least = narrow(accumulation, dtype)
    return w * size + 2 * least * max(1.0, scale)


def product_error(
    a: Array,
    e: Array,
    b: Array,
    count: int,
    accumulation: Accumulation,
    dtype: Any,
    *,
    scale: float = 1.0,
    own: Callable[[Array], Array] = lambda of_heads: of_heads,
) -> Array:
    """E of a product of weights a, which are off by e, and b; `own` adds what is of the heads that share a result."""
    size = np.abs(a) + e
    magnitude = own(size @ np.abs(b))
    off = own((e + rounding(size, accumulation, dtype, scale)) @ np.abs(b))
    return off + accumulation.error(magnitude, magnitude, np.asarray(count))
