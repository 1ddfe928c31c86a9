"""Convolutions that the tests of the dense Hopper kernels have in common, and what these kernels are told of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdnn._src import hopper

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import dgrad, fprop, wgrad

BF16: Any = jnp.bfloat16
F32: Any = jnp.float32
LAYOUTS = {1: ("NWC", "WIO"), 2: ("NHWC", "HWIO"), 3: ("NDHWC", "DHWIO")}


class Case(NamedTuple):
    """A convolution y = conv(x, w), from whose sides every kernel takes its arrays."""

    n: int
    sizes: tuple[int, ...]
    c: int
    k: int
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    flip: bool = False

    def geometry(self, outer: bool = False) -> Geometry:
        return Geometry(self.sizes, self.taps, self.stride, self.padding, self.dilation, self.flip, self.groups, outer)

    @property
    def x(self) -> tuple[int, ...]:
        return (self.n, *self.sizes, self.c)

    @property
    def dy(self) -> tuple[int, ...]:
        return (self.n, *self.geometry().out, self.k)

    def w(self, outer: bool = False) -> tuple[int, ...]:
        inner = self.c // self.groups
        return (self.k, *self.taps, inner) if outer else (*self.taps, inner, self.k)

    def operands(self, op: str, outer: bool = False) -> tuple[Any, Any]:
        """The shapes of the two arrays that a kernel takes."""
        x, w, dy = self.x, self.w(outer), self.dy
        return {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}[op]

    def avals(self, op: str, dtype: Any = BF16, outer: bool = False) -> tuple[Any, Any]:
        a, b = self.operands(op, outer)
        return jax.ShapeDtypeStruct(a, dtype), jax.ShapeDtypeStruct(b, dtype)

    def whole_numbers(self, op: str, outer: bool = False, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Operands whose sums are exact in every order."""
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in self.operands(op, outer))
        return a, b

    def definition(self, op: str, a: Any, b: Any, outer: bool = False) -> np.ndarray:
        """By XLA on the CPU: on a GPU it may take an algorithm that rounds on its way, even with whole numbers."""
        with jax.default_device(jax.devices("cpu")[0]):
            return np.asarray(self._definition(op, np.asarray(a), np.asarray(b), outer))

    def _definition(self, op: str, a: np.ndarray, b: np.ndarray, outer: bool) -> Any:
        rank = len(self.sizes)
        layout, inner = LAYOUTS[rank]

        def conv(x: Any, w: Any) -> Any:
            w = jnp.flip(w, range(rank)) if self.flip else w
            return lax.conv_general_dilated(
                x, w, self.stride, self.padding, rhs_dilation=self.dilation, dimension_numbers=(layout, inner, layout),
                feature_group_count=self.groups, precision="highest",
            )  # fmt: skip

        if op == "wgrad":
            dw = jax.vjp(lambda w: conv(jnp.asarray(a), w), jnp.zeros(self.w()))[1](jnp.asarray(b))[0]
            return jnp.moveaxis(dw, -1, 0) if outer else dw
        w = np.moveaxis(b, 0, -1) if outer else b
        return conv(a, w) if op == "fprop" else jax.vjp(lambda x: conv(x, w), jnp.zeros(self.x))[1](jnp.asarray(a))[0]


CASES: dict[str, Case] = {
    "3x3": Case(5, (13, 17), 24, 40, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "strided, odd": Case(3, (14, 15), 72, 72, (3, 2), (2, 2), ((1, 2), (0, 3)), (1, 1)),
    "dilated, flipped": Case(2, (9, 11), 64, 48, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2), flip=True),
    "odd channels": Case(4, (12, 12), 30, 33, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    "one row": Case(3, (1, 19), 16, 32, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "pointwise": Case(7, (5, 6), 128, 200, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "stride of three": Case(2, (23, 22), 64, 64, (3, 3), (3, 3), ((1, 1), (1, 1)), (1, 1)),
    "stride and dilation": Case(2, (21, 20), 64, 64, (3, 3), (2, 2), ((2, 2), (2, 2)), (2, 2)),
    "stem": Case(2, (19, 20), 3, 16, (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1)),
    "one axis": Case(3, (40,), 48, 96, (7,), (1,), ((3, 3),), (2,)),
    "one axis, strided, flipped": Case(3, (41,), 64, 64, (4,), (2,), ((1, 2),), (1,), flip=True),
    "three axes": Case(2, (7, 9, 10), 32, 64, (3, 3, 3), (1, 1, 1), ((1, 1),) * 3, (1, 1, 1)),
    "three axes, strided": Case(
        3,
        (9, 8, 11),
        64,
        72,
        (3, 2, 3),
        (2, 2, 2),
        ((1, 1), (0, 1), (2, 1)),
        (1, 1, 1),
    ),
    "three axes, one strided": Case(
        2, (5, 12, 9), 32, 48, (2, 3, 1), (1, 3, 1), ((0, 1), (1, 1), (0, 0)), (2, 1, 1), flip=True
    ),
    "three axes, stem": Case(
        2,
        (6, 9, 140),
        3,
        32,
        (3, 3, 4),
        (2, 2, 2),
        ((1, 1), (1, 1), (1, 2)),
        (1, 1, 1),
    ),
    "groups": Case(2, (14, 13), 256, 128, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4, False),
    "narrow groups, strided": Case(2, (14, 14), 64, 64, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 4, False),
    "whole image": Case(1, (8, 8), 64, 64, (8, 8), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "stem, windows of whole cells": Case(2, (9, 140), 4, 24, (3, 4), (1, 1), ((1, 1), (2, 1)), (1, 1)),
    "stem, partial cells": Case(2, (30, 131), 3, 32, (3, 3), (2, 2), ((0, 1), (1, 1)), (1, 1)),
    "few channels, dilated": Case(2, (12, 20), 3, 16, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2)),
    "one image": Case(1, (18, 1), 1, 1, (9, 3), (5, 2), ((1, 0), (3, 3)), (1, 1)),
    "pointwise, strided": Case(2, (6, 6), 64, 64, (1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1)),
}


def kernel(op: str, case: Case, outer: bool, **more: Any) -> tuple[Any, Any, tuple[Any, Any], dict[str, Any]]:
    """(module, function of two arrays, shapes of the arrays, what the module's functions are told besides)."""
    keywords: dict[str, Any] = dict(geo=case.geometry(outer), **more)
    module: Any = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}[op]
    run = getattr(module, f"conv_{op}")
    return module, (lambda a, b: run(a, b, **keywords)), case.operands(op, outer), keywords


def lowered(function: Any, *avals: Any) -> str:
    """The text of a function that is lowered for CUDA, with a kernel of ours in it."""
    text = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text
