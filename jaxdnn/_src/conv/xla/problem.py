"""What a convolution written for XLA is, and its matrix products: in what type they are multiplied and added."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, export, lax

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.core import products
from jaxdnn._src.core.unpatched import unpatched

# Beyond this many taps the unrolled sum would take long to compile, and a loop over the taps serves.
UNROLLED_TAPS = 128
# Fewer for integers on CPUs: 27 products take 1.7 s to compile and a loop 0.3 s, and neither is always the faster.
UNROLLED_INTEGER_TAPS = 9
# So many products of two int8 values add up to 2^24 at most.
EXACT_TERMS = 1024


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of a convolution.

    `on_gpu`: whether it is for a GPU and not a CPU.
    """

    geo: Geometry
    precision: lax.Precision
    preferred: Any
    on_gpu: bool = False

    @property
    def is_integer(self) -> bool:
        return jnp.issubdtype(self.preferred, jnp.integer)

    @property
    def integer_taps(self) -> bool:
        """Whether integers are added by matrix products of float32, tap by tap.

        XLA has no integer convolution for GPUs, and its products of int8 matrices there were found wrong for small or
        odd sizes (JAX 0.11.2, H200).
        """
        return self.on_gpu and self.is_integer

    @property
    def unrolled_taps(self) -> int:
        return UNROLLED_INTEGER_TAPS if self.is_integer and not self.integer_taps else UNROLLED_TAPS

    @property
    def is_matrix(self) -> bool:
        return set(self.geo.taps) == {1} and self.geo.unpadded and self.geo.groups == 1

    @property
    def is_patches(self) -> bool:
        tiled = self.geo.stride == self.geo.taps and set(self.geo.dilation) == {1}
        return tiled and self.geo.unpadded and self.geo.groups == 1

    def dot(self, a: Array, b: Array, contract: tuple, batch: tuple = ((), ())) -> Array:
        """A matrix product in the problem's precision."""
        if self.integer_taps:
            return _exact_integer_dot(a, b, contract, batch)
        return products.dot(a, b, contract, batch, precision=self.precision, preferred=self.preferred)

    def convolve(
        self, x: Array, w: Array, numbers: Any, stride: Any, padding: Any, dilation: Any, **more: Any
    ) -> Array:
        """XLA's convolution in the problem's precision, which the keywords of `lax.conv_general_dilated` may change."""
        types = {"precision": self.precision, "preferred_element_type": self.preferred}
        more |= {"rhs_dilation": dilation, "dimension_numbers": numbers}
        with unpatched():
            return lax.conv_general_dilated(x, w, stride, padding, **more, **types)


def _exact_integer_dot(a: Array, b: Array, contract: tuple, batch: tuple) -> Array:
    """The int32 product of int8 arrays over one axis each: sums of float32 that stay below 2^24, then sums of int32.

    1024 products of int8 values add up to at most 2^24: exact in float32, in any order, on a tensor core too, for which
    TF32 holds int8 values exactly. As bfloat16 they would not be safe: XLA multiplies small matrices in the operands'
    own type, and a product needs 15 bits. Sums of int32 wrap.
    """
    ((left,), (right,)) = contract
    n, size = a.shape[left], EXACT_TERMS
    parts = 1 if is_less(n, size + 1) else -(-n // size)
    a, b = (_split_axis(v, axis, parts) for v, axis in ((a, left), (b, right)))
    lefts, rights = ([axis + (axis > at) for axis in axes] for axes, at in zip(batch, (left, right), strict=True))
    sums = lax.dot_general(
        a.astype(jnp.float32),
        b.astype(jnp.float32),
        (((left + 1,), (right + 1,)), ((left, *lefts), (right, *rights))),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(sums.astype(jnp.int32), 0, dtype=jnp.int32)


def is_less(size: Any, least: int) -> bool:
    """Whether a size is below a number; one with a batch that is not known when traced is taken for large."""
    return not export.is_symbolic_dim(size) and size < least


def _split_axis(v: Array, axis: int, parts: int) -> Array:
    """An axis as (parts, size), padded with zeros."""
    size = -(-v.shape[axis] // parts)
    padding = [(0, 0, 0)] * v.ndim
    padding[axis] = (0, parts * size - v.shape[axis], 0)
    return lax.pad(v, zero(v), padding).reshape(*v.shape[:axis], parts, size, *v.shape[axis + 1 :])


def zero(x: Array) -> Array:
    return jnp.zeros((), x.dtype)
