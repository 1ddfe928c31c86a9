"""Windows, layouts and data that the tests of pooling share."""

import functools as ft
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn

MODES = ("max", "average", "average_exclude_padding", "lp")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Spatial sizes, and the window over them.
WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((6, 4), {}),
    "ragged": ((7, 9), {"window": 2}),
    "resnet": ((8, 11), {"window": 3, "stride": 2, "padding": 1}),
    "dense": ((6, 5), {"window": (3, 2), "stride": 1, "padding": ((1, 1), (0, 1))}),
    "dilated": ((11, 10), {"window": (2, 3), "stride": (1, 2), "dilation": (3, 2), "padding": (1, 2)}),
    "dilated by its stride": ((12, 9), {"window": 3, "stride": 2, "dilation": 2, "padding": 2}),
    "steps over elements": ((13, 10), {"window": (2, 1), "stride": (3, 4)}),
    "same": ((7, 8), {"window": (4, 3), "stride": (3, 2), "padding": "SAME"}),
    "ceil": ((7, 10), {"window": (3, 4), "stride": (2, 3), "padding": (1, 2), "ceil_mode": True}),
    "ceil, last window dropped": ((5, 8), {"window": 2, "stride": 3, "padding": ((1, 0), (1, 1)), "ceil_mode": True}),
    "line": ((13,), {"window": 5, "stride": 2, "padding": ((2, 1),)}),
    "volume": ((5, 4, 6), {"window": (3, 2, 1), "stride": (2, 1, 3), "padding": (1, 1, 0)}),
    "long": ((19, 4), {"window": (11, 2), "stride": (2, 1), "padding": (4, 0)}),
    "long and dilated": ((31,), {"window": 9, "stride": 1, "dilation": 3, "padding": 4}),
    "large": ((18, 17), {"window": (13, 12), "stride": (2, 3), "padding": (5, 4)}),
    "large, disjoint": ((29, 20), {"window": (14, 10), "stride": (15, 10)}),
    "whole": ((11, 13), {"window": (11, 13)}),
}
LAYOUTS = {1: ("NWC", "NCW", "CWN", "NCWc4"), 2: ("NHWC", "NCHW", "CHWN", "NCHWc4"), 3: ("NDHWC", "NCDHW", "CDHWN")}
FEW = ("resnet", "ceil", "long")
each_window = pytest.mark.parametrize("name", WINDOWS)
each_mode = pytest.mark.parametrize("mode", MODES)


def shape_of(layout: str, n: int, sizes: tuple[int, ...], c: int) -> tuple[int, ...]:
    axes, _, lanes = layout.partition("c")
    letters = {"N": n, "C": c // int(lanes or 1), **dict(zip("DHW"[3 - len(sizes) :], sizes, strict=True))}
    return (*(letters[a] for a in axes), *([int(lanes)] if lanes else []))


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
    x = data(shape_of(layout, 2, sizes, c), dtype, seed)
    y = jax.eval_shape(ft.partial(dnn.pool, **options), x)
    return x, data(y.shape, dtype, seed + 1), options


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def assert_bits(ours: Any, definition: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (definition.dtype, definition.shape)
    np.testing.assert_array_equal(bits(ours), bits(definition))
