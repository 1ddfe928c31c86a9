"""The activation whose slope is learned."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxdnn._src.core import blending, checks, trees
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.rounding import at_edges, nearest, product


@public
def prelu(x: ArrayLike, slope: ArrayLike, /, *, axis: int = -1, determinism: str | None = None) -> Array:
    """A rectifier with a learned slope below 0.

    y = max(x, 0) + slope min(x, 0)

    Args:
      x: of any shape; float32, bfloat16, float16 or float64.
      slope: (C,), one for each of the C elements along `axis`, or () for all; of x's dtype, or float32 (float64 for
        float64).
      axis: the axis of the slopes. Not read where there is one for all.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, of x's shape and dtype.

    Differentiation: any order, in x and slope. At 0 the derivative in x is the slope, that of the side below.

    Numerics: the product is rounded once to x's dtype (in 16 bits by way of float32, which holds the product of two
      numbers of 16 bits), which is "portable". NaN gives NaN. The gradient in slope is a sum in float32 over all that
      shares it: XLA's (run_to_run), or from level "batch_invariant" on a tree that the shape alone decides.

    Raises:
      ValueError: a slope of another shape; an axis that x has not.
      TypeError: a dtype that does not fit.

    Example:
      >>> dnn.prelu(jnp.array([[-2.0, -2.0], [3.0, 0.0]]), jnp.array([0.25, 0.5])).tolist()
      [[-0.5, -1.0], [3.0, 0.0]]

    Sources: He et al., arXiv:1502.01852. PyTorch's prelu and ONNX's PRelu, whose slopes lie along axis 1; Flax's
      nnx.PReLU has one for all. cuDNN has none. A slope that is a number: `activation`, ("leaky_relu", slope).
    """
    level = required(determinism)
    x, slope = checks.array("x", x), checks.array("slope", slope)
    dtype = checks.dtype("x", x, checks.FLOATS)
    wide = blending.accumulator(dtype)
    checks.dtype("slope", slope, tuple(dict.fromkeys((dtype, np.dtype(wide)))))
    x, slope = at_edges(level, (x, slope))
    others = tuple(range(x.ndim))
    if slope.shape:
        (at,) = checks.axes("x", checks.integer("axis", axis), x.ndim)
        checks.shape("slope", slope, (x.shape[at],), f"one for each element along `axis` {axis} of `x`")
        others = tuple(i for i in others if i != at)
    a = trees.broadcast(jnp.expand_dims(slope.astype(wide), others), x, level)
    z = x.astype(wide)
    # An infinity above 0 has no share in the slope's gradient. Not where(z > 0, 0, z): XLA for CPUs makes of that
    # and the choice below one that loses the sign of zero.
    finite = jnp.where(jnp.isposinf(z), jnp.zeros_like(z), z)
    return at_edges(level, nearest(jnp.where(z > 0, z, product(a, finite)), dtype))
