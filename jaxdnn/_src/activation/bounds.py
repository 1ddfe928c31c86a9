"""How far an activation's value or slope, computed in float32 or float64, may lie from its float64 reference.

A slope is a product of few elementary functions, or the sum of two such; each function's error is a multiple of its
value (`EXP`, `LOGISTIC`, `ERFC`: twice what XLA was measured to do), to which that of its rounded argument is added.
"""

from typing import Any

import numpy as np

from jaxdnn._src.core.formats import FORMATS, Values
from jaxdnn._src.core.tolerance import Epilogue

EXP, LOGISTIC, ERFC = 4.0, 5.0, 6.0  # in units of u
_SQRT_8_OVER_PI = 1.5957691216057308
_DEFAULTS = {"elu": 1.0, "swish": 1.0, "softplus": 1.0, "leaky_relu": 0.01, "clipped_relu": 6.0}


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
    p = abs(float(parameters[0])) if parameters else _DEFAULTS.get(name, 1.0)
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
        return [(scale * _bell(t), 2 * LOGISTIC + 1)]
    if name == "elu":
        return [(np.where(x > 0, 0.0, p * np.exp(np.minimum(x, 0))), EXP + 2)]
    if name == "softplus":
        t = beta * x
        return [(_logistic(t), LOGISTIC + 2 * np.abs(t) * _logistic(-t))]
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
