"""Windows and data that the tests of pooling share: those of the family's cases, and further ones."""

import functools as ft
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases.drawn import laid_out
from jaxdnn._src.pool import cases
from jaxdnn._src.pool.cases import MODES

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Spatial sizes, and the window over them.
WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = cases.WINDOWS | {
    "dense": ((6, 5), {"window": (3, 2), "stride": 1, "padding": ((1, 1), (0, 1))}),
    "dilated by its stride": ((12, 9), {"window": 3, "stride": 2, "dilation": 2, "padding": 2}),
    "ceil, last window dropped": ((5, 8), {"window": 2, "stride": 3, "padding": ((1, 0), (1, 1)), "ceil_mode": True}),
    "long and dilated": ((31,), {"window": 9, "stride": 1, "dilation": 3, "padding": 4}),
    "large": ((18, 17), {"window": (13, 12), "stride": (2, 3), "padding": (5, 4)}),
    "large, disjoint": ((29, 20), {"window": (14, 10), "stride": (15, 10)}),
}
LAYOUTS = cases.LAYOUTS | {1: (*cases.LAYOUTS[1], "NCWc4")}
FEW = ("3x3 step 2", "ceil", "long")
each_window = pytest.mark.parametrize("name", WINDOWS)
each_mode = pytest.mark.parametrize("mode", MODES)


def data(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Signed numbers with ties and zeros of both signs."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    values = np.where(rng.random(shape) < 0.4, rng.integers(-2, 3, shape), values)
    return np.where(rng.random(shape) < 0.1, -0.0, values).astype(dtype)


def drawn(name: str, dtype: Any = np.float32, layout: str | None = None, c: int = 3, seed: int = 0) -> Any:
    """x, dy and the options of a window."""
    sizes, options = WINDOWS[name]
    layout = layout or LAYOUTS[len(sizes)][0]
    options = {**options, "layout": layout}
    x = data(laid_out(layout, 2, c, sizes), dtype, seed)
    y = jax.eval_shape(ft.partial(dnn.pool, **options), x)
    return x, data(y.shape, dtype, seed + 1), options


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def assert_bits(ours: Any, definition: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (definition.dtype, definition.shape)
    np.testing.assert_array_equal(bits(ours), bits(definition))
