"""Shapes, dtypes and data that the tests of softmax share."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import Accumulation

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ENGINES = ("xla", "ordered")
ALGORITHMS = ("accurate", "fast", "log")
SHAPES = {(3, 5, 7): -1, (2, 3, 130): -1, (4, 6, 5): (0, 2), (5, 3): 0, (1, 1): -1, (2, 1000): -1, (2, 3, 4): None}
RULE = Accumulation(flush=True)

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
each_engine = pytest.mark.parametrize("engine", ENGINES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def data(shape: tuple[int, ...], dtype: Any = np.float32, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(dtype)


def rows(shape: tuple[int, ...], axis: Any) -> tuple[int, ...]:
    given = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(a % len(shape) for a in given)


def wide(a: Any) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def assert_right(out: Any, golden: np.ndarray, error: Any, dtype: Any) -> None:
    assert out.dtype == np.dtype(dtype)
    found = tolerance.compare(np.asarray(out), golden, error)
    assert found.passed, found.message
