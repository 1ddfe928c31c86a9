"""Arguments that both losses take: labels, weights of rows, and numbers within limits."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core import checks

REDUCTIONS = ("mean", "sum", "none")


def vector(name: str, value: Any, shape: tuple[int, ...], dtype: Any, wide: Any, why: str) -> Array:
    """An array of a shape, of the operands' dtype or of the loss's."""
    value = checks.array(name, value)
    checks.shape(name, value, tuple(shape), why)
    checks.dtype(name, value, tuple(dict.fromkeys((np.dtype(dtype), np.dtype(wide)))))
    return value


def between(name: str, value: Any, most: float) -> float:
    """A finite number from 0 to the most."""
    value = checks.as_float(name, value)
    if not 0 <= value <= most or math.isinf(value):
        limits = "at least 0 and finite" if math.isinf(most) else f"from 0 to {most:g}"
        raise ValueError(f"`{name}` must be {limits}, got {value!r}.")
    return value


def class_indices(labels: Array, classes: int) -> Array:
    """The labels as int32, -1 for those that name no class; their own dtype may not hold the number of classes."""
    known = labels >= 0
    known = known & (labels < classes) if holds(labels.dtype, classes) else known
    return jnp.where(known, labels.astype(jnp.int32), jnp.full(labels.shape, -1, jnp.int32))


def holds(dtype: Any, value: int) -> bool:
    """Whether an integer is one of a dtype."""
    limits = jnp.iinfo(dtype)
    return int(limits.min) <= value <= int(limits.max)
