"""The activations of normalisations, in PTX: values and slopes, of z in float32; NaN of NaN.

With σ = 1 / (1 + exp(-z)), swish is z σ, and its slope σ + z σ (1 - σ); both have their limits where z is infinite.
"""

from jaxdnn._src.hopper.curves_ptx import ONE, ZERO, sigmoid
from jaxdnn._src.hopper.ptx import Emitter, real

HALF_OF_LEAST = {"bf16": 2.0**-134, "f16": 2.0**-25}  # of a dtype's numbers above 0: it is rounded to 0
FAR = 1000.0  # here σ or 1 - σ has vanished; an infinite z times 0 would be NaN


def affine(e: Emitter, h: str, scale: str | None, bias: str | None) -> str:
    """What an activation is of, each operation rounded: forward and backward have the same bits, so the same sign."""
    z = h if scale is None else e.f("mul.rn.f32", h, scale)
    return z if bias is None else e.f("add.rn.f32", z, bias)


def value(e: Emitter, name: str, z: str) -> str:
    """act(z)."""
    return {"relu": _relu, "swish": _swish}[name](e, z)


def slope(e: Emitter, name: str, z: str, dtype: str) -> str:
    """act'(z) of a y of this dtype; relu's is 0 where y is rounded to 0."""
    return {"relu": _relu_slope, "swish": _swish_slope}[name](e, z, dtype)


def _relu(e: Emitter, z: str) -> str:
    return e.f("max.NaN.f32", z, ZERO)


def _relu_slope(e: Emitter, z: str, dtype: str) -> str:
    found = e.f("selp.f32", ONE, ZERO, e.p("setp.gt.f32", z, real(HALF_OF_LEAST[dtype])))
    return e.f("selp.f32", z, found, e.p("setp.nan.f32", z, z))


def _swish(e: Emitter, z: str) -> str:
    return e.f("mul.rn.f32", e.f("max.NaN.f32", z, real(-FAR)), sigmoid(e, z))


def _swish_slope(e: Emitter, z: str, _: str) -> str:
    z = e.f("min.NaN.f32", e.f("max.NaN.f32", z, real(-FAR)), real(FAR))
    s = sigmoid(e, z)
    return e.f("fma.rn.f32", e.f("mul.rn.f32", z, s), e.f("sub.rn.f32", ONE, s), s)
