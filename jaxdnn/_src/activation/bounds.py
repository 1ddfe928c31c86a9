"""How far an activation's value or slope, computed in float32 or float64, may lie from its float64 reference; and an
epilogue's result, whose argument has an error of its own.

A slope is a product of few elementary functions, or the sum of two such; each function's error is a multiple of its
value (`EXP`, `LOGISTIC`, `ERFC`: twice what XLA was measured to do), to which that of its rounded argument is added.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxdnn._src.activation.formulas import ACTIVATIONS, SELU_ALPHA, SELU_SCALE
from jaxdnn._src.core.formats import FORMATS, Values

EXP, LOGISTIC, ERFC = 4.0, 5.0, 6.0  # in units of u
_SQRT_8_OVER_PI = 1.5957691216057308


def value_error(activation: Any, x: Values, /, *, alpha: float = 1.0, format: str = "float32") -> Values:
    """E of alpha act(x): the rule of the epilogues, on an exact argument; and alpha's and the product's roundings."""
    x = np.asarray(x, np.float64)
    own = Epilogue(activation=activation, format=format).error(x, np.zeros(x.shape))
    if alpha == 1:
        return own
    size = _largest(activation, x)
    return abs(alpha) * own + 2 * FORMATS[format].roundoff * abs(alpha) * (size + own) + FORMATS[format].smallest_normal


def _largest(activation: Any, x: Values) -> Values:
    """At least |act(x)|."""
    bounds = [abs(v) for v in activation[1:]] if isinstance(activation, tuple) else [6.0]
    finite = [v for v in bounds if np.isfinite(v)]
    return (1 + np.abs(x)) * max([1.0, *finite]) + max([1.0, *finite])


def slope_error(activation: Any, x: Values, /, *, format: str = "float32") -> Values:
    """E of act'(x): u times the sum over its terms of their size times their relative error, for an exact argument."""
    name, *parameters = activation if isinstance(activation, tuple) else (activation or "identity",)
    p = abs(float(parameters[0])) if parameters else (ACTIVATIONS[name] or 1.0)
    signed = float(parameters[0]) if parameters else p
    rule = FORMATS[format]
    with np.errstate(all="ignore"):
        x = np.clip(np.asarray(x, np.float64), -rule.largest, rule.largest)
        if name in ("identity", "relu", "clipped_relu"):
            bounds = [abs(v) for v in parameters[2:]]  # the slope of ("relu", lower, upper, slope) is rounded
            return np.full(x.shape, rule.roundoff * (bounds[0] if bounds else 0.0))
        if name == "leaky_relu":
            return np.full(x.shape, rule.roundoff * p)
        terms = _terms(name, p, signed, x)
        # What multiplies a factor that may be flushed to zero: x, or gelu_tanh's cubic, as far as that is not zero.
        reach = _SQRT_8_OVER_PI * (np.abs(x) + 3 * 0.044715 * np.abs(x) ** 3) if name == "gelu_tanh" else np.abs(x)
        flushed = 4 * (1 + np.minimum(reach, 1024.0) * (1 + p)) * rule.smallest_normal
        return 1.01 * rule.roundoff * sum(size * rate for size, rate in terms) + flushed


def _terms(name: str, p: float, beta: float, x: Values) -> list[tuple[Values, Values | float]]:
    """(size, relative error in units of u) of each term."""
    if name in ("sigmoid", "tanh"):
        t = x if name == "sigmoid" else 2 * x
        scale = 1.0 if name == "sigmoid" else 4.0
        return [(scale * _bell(t), EXP + 5)]
    if name == "elu":
        return [(np.where(x > 0, 0.0, p * np.exp(np.minimum(x, 0))), EXP + 2)]
    if name == "softplus":
        t = beta * x
        return [(_logistic(t), LOGISTIC + 2 * np.abs(t) * _logistic(-t))]
    if name == "selu":
        return [(np.where(x > 0, SELU_SCALE, SELU_SCALE * SELU_ALPHA * np.exp(np.minimum(x, 0))), EXP + 5)]
    if name == "celu":
        t = np.minimum(x, 0) / p
        return [(np.where(x > 0, 0.0, np.exp(t)), EXP + 2 - 3 * t)]
    if name == "softsign":
        return [(1 / (1 + np.abs(x)) ** 2, 5.0)]
    if name == "mish":
        t, slope = np.tanh(np.logaddexp(0, x)), _logistic(x) / np.cosh(np.minimum(np.logaddexp(0, x), 300)) ** 2
        return [(t, 20.0), (np.abs(x) * slope, 4 * LOGISTIC + 20)]
    if name == "hard_sigmoid":
        return [(np.where(np.abs(x) < 3, 1 / 6, 0.0), 1.0)]
    if name == "hard_swish":
        return [(np.where(np.abs(x) < 3, np.abs(2 * x + 3) / 6, 0.0), 4.0)]  # 6 and its reciprocal may be rounded
    if name == "gelu":
        tail = np.exp(-np.minimum(x * x, 1400) / 2)
        below = np.where(x > 0, 1.0, 0.5 * tail)  # at least the normal distribution function
        return [(below, ERFC + 2), (below * np.minimum(x * x, 200.0), 4.0), (0.4 * np.abs(x) * tail, EXP + 3 + x * x)]
    if name == "gelu_tanh":
        a = _SQRT_8_OVER_PI * (x + 0.044715 * x**3)
        outer = np.abs(_SQRT_8_OVER_PI * (x + 3 * 0.044715 * x**3)) * _bell(a)
        return [(_logistic(a), LOGISTIC), (np.abs(a) * _bell(a), 6.0), (outer, 2 * LOGISTIC + 8 + 12 * np.abs(a))]
    t = beta * x
    outer = np.abs(t) * _bell(t)
    return [(_logistic(t), LOGISTIC), (outer, 2.0), (outer, 2 * LOGISTIC + 4 + 4 * np.abs(t))]


def _logistic(t: Values) -> Values:
    return np.exp(-np.logaddexp(0.0, -t))


def _bell(t: Values) -> Values:
    return _logistic(t) * _logistic(-t)


# ---- the epilogue ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Activation:
    """How far an activation's float evaluation may lie from the function, in units of u: |z|, |y| and |y| z² weighted.

    Twice what XLA on CPU was measured to do (JAX 0.10.2 and 0.12.0, 16 million float32 arguments of all exponents);
    tests/activation/test_bounds.py measures again. `slope` bounds the derivative.
    """

    slope: float = 1.0
    of_y: float = 0.0
    of_z: float = 0.0
    of_tail: float = 0.0


_ACTIVATIONS = {
    "identity": _Activation(),
    "relu": _Activation(),
    "clipped_relu": _Activation(of_y=1),  # the ceiling is rounded
    "leaky_relu": _Activation(of_y=3),  # the slope and the product are rounded
    "sigmoid": _Activation(slope=0.25, of_y=5),
    "tanh": _Activation(of_y=10),
    "elu": _Activation(of_y=14),
    "selu": _Activation(of_y=18),
    "celu": _Activation(of_y=20),
    "gelu": _Activation(slope=1.13, of_y=5, of_tail=4),
    "gelu_tanh": _Activation(slope=1.13, of_z=7),
    "swish": _Activation(slope=1.1, of_y=5),
    "softplus": _Activation(of_y=8),
    "mish": _Activation(slope=1.1, of_y=20),
    "softsign": _Activation(of_y=3),
    "hard_sigmoid": _Activation(slope=0.17, of_y=4),
    "hard_swish": _Activation(slope=1.5, of_y=5),
}


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """y = act(alpha * c + beta * prior + residual + bias) in the format of the accumulator, joined in any order.

    Attributes:
      activation: None, a name, or a name and its parameter, as the ops take it.
      format: the format of every step, or "exact" for integers.
    """

    alpha: float | Values = 1.0
    beta: float = 0.0
    activation: Any = None
    format: str = "float32"

    def error(self, computed: Values, error: Values, /, *terms: Values, prior: Values | None = None) -> Values:
        """The error of y, from the error of c and the roundings of the epilogue's steps, each fused or not.

        Args:
          computed: c in float64; error: its E.
          terms: residual and bias where given, as they broadcast to c; prior: likewise, not read if beta is 0.
        """
        if self.format == "exact":
            return np.asarray(error, np.float64)
        accumulator = FORMATS[self.format]
        u, tiny = accumulator.roundoff, accumulator.smallest_normal
        parts, e = [], np.zeros(np.shape(computed))
        with np.errstate(invalid="ignore", over="ignore"):
            for scale, value, off in ((self.alpha, computed, error), (self.beta, prior, 0.0)):
                if value is None or (value is prior and self.beta == 0):
                    continue
                value = np.asarray(value, np.float64)  # in float16 what follows would be zero
                parts.append(scale * value)
                e = e + abs(scale) * off
                if np.ndim(scale) or scale != 1:
                    # The scale as the format holds it, the product's rounding, a tiny product's flush.
                    stored = abs(scale - np.asarray(accumulator.round(scale), np.float64))
                    e = e + (stored * (1 + u) + abs(scale) * u) * (np.abs(value) + off) + tiny
            parts += [np.asarray(term, np.float64) for term in terms]
            if len(parts) > 1:
                # A partial sum of these terms lies, whichever of them it has, within the larger of these two.
                positive, negative = (sum(np.maximum(sign * part, 0) for part in parts) for sign in (1, -1))
                rate = (len(parts) - 1) * u
                e = (e + rate * np.maximum(positive, negative)) / (1 - rate) + len(parts) * tiny
            return self._activated(np.sum(np.broadcast_arrays(*parts), axis=0), e, u, tiny)

    def _activated(self, z: Values, e: Values, u: float, tiny: float) -> Values:
        if isinstance(self.activation, tuple) and len(self.activation) == 4:
            return _bounded_relu_error(self.activation[1:], z, e, u, tiny)
        name, parameter = self.activation if isinstance(self.activation, tuple) else (self.activation, None)
        name = name or "identity"
        if name == "identity":
            return e
        p = (ACTIVATIONS[name] or 1.0) if parameter is None else abs(float(parameter))
        if name == "relu":
            return np.where(z + e <= 0, 0.0, e)  # an exact zero, whatever the error
        facts, far = _ACTIVATIONS[name], np.abs(z) + e
        size = _largest_value(name, p, z, e)
        own = u * (facts.of_y * size + facts.of_z * far + facts.of_tail * size * np.minimum(far, 16.0) ** 2)
        if name in ("swish", "softplus") and p != 1:  # the argument p z is rounded, and the parameter itself
            own = own + 2 * u * (size * np.minimum(p * far, 120.0) + far)
        return _largest_slope(name, p, z, e) * e + own + 4 * (1 + far) * (1 + p + 1 / p) * tiny


def _bounded_relu_error(bounds: tuple[float, float, float], z: Values, e: Values, u: float, tiny: float) -> Values:
    """The error of ("relu", lower, upper, slope): three roundings below `lower`, the bounds', the slope times e."""
    lower, upper, slope = (float(v) for v in bounds)
    below = abs(lower) + 2 * abs(slope) * (np.abs(z) + e + abs(lower))
    size = np.where(z - e <= lower, below, 0.0) + np.where(z + e >= upper, abs(upper), 0.0)
    return max(1.0, abs(slope)) * e + 3 * u * size + 4 * tiny


def _largest_slope(name: str, p: float, z: Values, e: Values) -> Values | float:
    """The largest |derivative| on [z - e, z + e]."""
    nearest = np.clip(np.abs(z) - e, 0.0, 300.0)  # the slopes of tanh and sigmoid fall with |z|
    if name == "tanh":
        return 1 / np.cosh(nearest) ** 2
    if name == "sigmoid":
        return 0.25 / np.cosh(0.5 * nearest) ** 2
    if name == "softplus":
        return 1 / (1 + np.exp(-np.clip(p * (z + e), -700, 700)))
    if name == "elu":
        return np.where(z + e > 0, max(1.0, p), p * np.exp(np.clip(z + e, -700, 0)))
    if name == "selu":
        return SELU_SCALE * _largest_slope("elu", SELU_ALPHA, z, e)
    if name == "celu":
        return np.exp(np.clip((z + e) / p, -700, 0))
    if name == "softsign":
        return 1 / (1 + nearest) ** 2
    return max(_ACTIVATIONS[name].slope, p) if name == "leaky_relu" else _ACTIVATIONS[name].slope


def _largest_value(name: str, p: float, z: Values, e: Values) -> Values:
    """The largest |activation| on [z - e, z + e], or a little more."""
    far, top = np.abs(z) + e, z + e
    if name == "sigmoid":
        return np.exp(np.clip(top, -700, 0))
    if name == "softplus":
        return np.logaddexp(p * top, 0.0) / p
    if name == "clipped_relu":
        return np.minimum(far, p)
    if name in ("tanh", "softsign"):
        return np.minimum(far, 1.0)
    if name == "elu":
        return np.where(top > 0, np.maximum(far, p), np.minimum(p * far, p))
    if name == "selu":
        return SELU_SCALE * _largest_value("elu", SELU_ALPHA, z, e)
    if name == "celu":
        return np.where(top > 0, np.maximum(far, p), np.minimum(far, p))
    if name in ("gelu", "swish", "mish"):  # |z| times a tail: the normal distribution's, or at most 1.5 exp(z)
        rate = p if name == "swish" else 1.0
        return far * np.where(top > 0, 1.0, 1.5 * np.exp(np.clip(rate * top, -700, 0)))
    if name == "hard_sigmoid":
        return np.clip(top + 3, 0, 6) / 6
    if name == "hard_swish":
        return far * np.clip(top + 3, 0, 6) / 6
    if name == "leaky_relu":
        return np.where(top > 0, np.maximum(far, p * far), p * far)
    return far
