"""Activations, and their derivatives, in the precision of the argument (float64 or wider); and the ops made of them.

identity         x
relu             max(x, 0)
sigmoid          1 / (1 + exp(-x))
tanh             tanh(x)
elu              x if x > 0 else alpha (exp(x) - 1)            alpha = 1, or ("elu", alpha)
gelu             x Phi(x), Phi the normal distribution         Hendrycks and Gimpel, arXiv:1606.08415
gelu_tanh        x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2        the same paper's approximation
swish            x sigmoid(beta x)                             Ramachandran et al., arXiv:1710.05941; beta = 1
softplus         log(1 + exp(beta x)) / beta                   beta = 1, or ("softplus", beta)
selu             scale (x if x > 0 else alpha (exp(x) - 1))    Klambauer et al., arXiv:1706.02515, their constants
celu             x if x > 0 else alpha (exp(x / alpha) - 1)    Barron, arXiv:1704.07483; alpha = 1, or ("celu", alpha)
mish             x tanh(log(1 + exp(x)))                       Misra, arXiv:1908.08681
softsign         x / (1 + |x|)
hard_sigmoid     min(max(x + 3, 0), 6) / 6                     Howard et al., arXiv:1905.02244
hard_swish       x min(max(x + 3, 0), 6) / 6                   the same
clipped_relu     min(max(x, 0), ceiling)                       ceiling = 6, or ("clipped_relu", ceiling)
leaky_relu       x if x > 0 else slope x                       slope = 0.01, or ("leaky_relu", slope)
("relu", lower, upper, slope)      lower + slope (x - lower) below lower, upper above upper, x between

They are evaluated in forms that neither overflow nor cancel; at infinity they have their limits. Where a derivative
jumps (relu, elu with alpha other than 1, selu, leaky_relu at 0; clipped_relu at 0 and at the ceiling; hard_sigmoid and
hard_swish at -3 and 3) it has its value on the left at 0 or a lower bound, and its value on the right at a ceiling, so
relu'(0) = 0, as in JAX and PyTorch; hard_swish'(-3) = 0 and hard_swish'(3) = 1.
cuDNN's names for these are the values of cudnnActivationMode_t and the pointwise modes.
"""

import math
from typing import Any

import numpy as np

from jaxdnn_reference.rounding import FLOAT32, FLOAT64, round_to, sum_to_odd

Array = np.ndarray[Any, Any]
Activation = str | tuple[str, float] | tuple[str, float, float, float] | None

_erfc = np.frompyfunc(math.erfc, 1, 1)  # float64: NumPy has none


def erfc(x: Array) -> Array:
    return np.asarray(_erfc(np.asarray(x, np.float64)), np.float64)


def activation(
    x: Array,
    /,
    *,
    activation: Activation = "relu",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """alpha act(x) + beta prior. With beta = 0 prior is not read.

    "golden" does not round unless `out_dtype` is given. "ordered" states the bits for beta = 0: alpha act(x), rounded
    once to `out_dtype`, or else to the type of x; for a float32 x with the activation's parameter in float32.
    """
    if arithmetic == "ordered" and x.dtype == FLOAT32:
        kind, parameters = parse(activation)
        rounded = (kind, *(float(FLOAT32.type(p)) for p in parameters)) if parameters else kind
        activation = rounded  # type: ignore[assignment]
    with np.errstate(invalid="ignore", over="ignore"):
        wide = np.asarray(alpha * activate(x.astype(FLOAT64), activation))
    if arithmetic == "ordered":
        return round_to(beside_ties(x, wide, alpha, activation), x.dtype if out_dtype is None else out_dtype)
    return _blend(wide, beta, prior, out_dtype)


def activation_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    activation: Activation = "relu",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """alpha dy act'(x) + beta prior. With beta = 0 prior is not read.

    "golden" does not round unless `out_dtype` is given. "ordered" states the bits for beta = 0: the slope alpha act'(x)
    in float32, the product with dy in float32, then `out_dtype`, or else the type of x; for a float64 x all in float64.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        slope = np.asarray(alpha * derivative(x.astype(FLOAT64), activation))
    if arithmetic == "ordered":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if x.dtype == FLOAT64:
                product = dy.astype(FLOAT64) * slope
            else:
                product = dy.astype(FLOAT32) * slope_in_float32(slope, x.dtype)
        return round_to(product, x.dtype if out_dtype is None else out_dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return _blend(dy.astype(FLOAT64) * slope, beta, prior, out_dtype)


def slope_in_float32(slope: Array, narrow: Any) -> Array:
    """The nearest float32; where rounding that on to the type `narrow` would not round the slope itself, because it
    is a tie there, its neighbour on the slope's side."""
    near, rounded = round_to(slope, FLOAT32), round_to(slope, narrow)
    agree = np.isnan(slope) | (round_to(near, narrow) == rounded)
    return np.where(agree, near, np.nextafter(near, rounded.astype(FLOAT32)))


def beside_ties(x: Array, wide: Array, alpha: float, activation: Activation) -> Array:
    """alpha act(x) in float64 for one more rounding: to odd where x is tiny, so that what float64 cannot hold still
    tells on which side of a tie it lies. gelu(x) of a subnormal bfloat16 number x is x / 2, a tie, and a bit more."""
    name, parameters = parse(activation)
    if name not in _BEYOND_LINEAR:
        return wide
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        x = x.astype(FLOAT64)
        linear, beyond = _BEYOND_LINEAR[name](x, *parameters)
        return np.where((np.abs(x) < 2.0**-26) & (x != 0), sum_to_odd(alpha * linear, alpha * beyond), wide)


def _blend(computed: Array, beta: float, prior: Array | None, out_dtype: Any) -> Array:
    value = computed if beta == 0 or prior is None else computed + beta * prior.astype(FLOAT64)
    return value if out_dtype is None else round_to(value, out_dtype)


def activate(x: Array, activation: Activation) -> Array:
    """The activation of x, element by element."""
    name, parameters = parse(activation)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _VALUE[name](x, *parameters)


def derivative(x: Array, activation: Activation) -> Array:
    """The activation's derivative at x, element by element."""
    name, parameters = parse(activation)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(np.isnan(x), x, _DERIVATIVE[name](x, *parameters))


def parse(activation: Activation) -> tuple[str, tuple[float, ...]]:
    """("elu", 0.5) -> ("elu", (0.5,)); "elu" -> ("elu", (1.0,)); None -> ("identity", ())."""
    if isinstance(activation, tuple):
        return activation[0], tuple(float(v) for v in activation[1:])
    name = activation or "identity"
    return name, _DEFAULTS.get(name, ())


_DEFAULTS = {
    "elu": (1.0,),
    "celu": (1.0,),
    "swish": (1.0,),
    "softplus": (1.0,),
    "clipped_relu": (6.0,),
    "leaky_relu": (0.01,),
}
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def product(x: Array, factor: Array) -> Array:
    """x * factor, and where the factor has vanished a zero with the sign of x, for an infinite x too."""
    return np.where(factor == 0, np.copysign(factor, x), x * factor)


def total(s: Array, t: Array) -> Array:
    """s + t, and t where s has vanished: a slope that vanishes from below is -0."""
    return np.where(s == 0, t, s + t)


def relu(x: Array, lower: float = 0.0, upper: float = math.inf, slope: float = 0.0) -> Array:
    below = np.full_like(x, lower) if slope == 0 else slope * (x - lower) + lower if lower else slope * x
    return np.where(x <= lower, below, np.where(x > upper, upper, x))


def relu_derivative(x: Array, lower: float = 0.0, upper: float = math.inf, slope: float = 0.0) -> Array:
    inside = np.where(x < upper, 1.0, 0.0) if upper < math.inf else np.ones_like(x)
    return np.where(x <= lower, slope, inside)


def sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def softplus(x: Array, beta: float) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(beta * x))) / beta


def elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(np.where(x > 0, 0, x)))


def elu_derivative(x: Array, alpha: float) -> Array:
    return np.where(x > 0, 1.0, alpha * np.exp(np.where(x > 0, 0, x)))


def mish(x: Array) -> Array:
    # tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2), in powers of the smaller of e = exp(x) and 1 / e
    w = np.exp(-np.abs(x))
    over = np.where(x >= 0, 1 + 2 * w, w * (w + 2))
    return product(x, over) / (over + np.where(x >= 0, 2 * w * w, 2))


def mish_derivative(x: Array) -> Array:
    s = softplus(x, 1.0)
    return total(np.tanh(s), product(x, sigmoid(x) / np.cosh(s) ** 2))


def softsign(x: Array) -> Array:
    return np.where(np.isinf(x), np.sign(x), x / (1 + np.abs(x)))


def gelu(x: Array) -> Array:
    return product(x, erfc(-x / math.sqrt(2)) / 2)


def gelu_derivative(x: Array) -> Array:
    return total(erfc(-x / math.sqrt(2)) / 2, product(x, np.exp(-x * x / 2) / math.sqrt(2 * math.pi)))


def _gelu_tanh_argument(x: Array) -> Array:
    # (1 + tanh(z)) / 2 = sigmoid(2 z), which does not cancel where z is very negative
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def gelu_tanh(x: Array) -> Array:
    return product(x, sigmoid(_gelu_tanh_argument(x)))


def gelu_tanh_derivative(x: Array) -> Array:
    z = _gelu_tanh_argument(x)
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return total(sigmoid(z), product(x * slope, sigmoid(z) * sigmoid(-z)))


def swish_derivative(x: Array, beta: float) -> Array:
    if beta == 0:
        return np.full_like(x, 0.5)
    return total(sigmoid(beta * x), product(beta * x, sigmoid(beta * x) * sigmoid(-beta * x)))


def hard_sigmoid(x: Array) -> Array:
    return np.clip(x + 3, 0, 6) / 6


def hard_swish_derivative(x: Array) -> Array:
    return np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, (2 * x + 3) / 6))


def clipped_relu(x: Array, ceiling: float) -> Array:
    return relu(x, 0.0, ceiling)


_VALUE = {
    "identity": lambda x: x,
    "relu": relu,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "elu": elu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": lambda x, beta: product(x, sigmoid(beta * x)) if beta else 0.5 * x,
    "softplus": softplus,
    "selu": lambda x: _SELU_SCALE * elu(x, _SELU_ALPHA),
    "celu": lambda x, alpha: np.where(x > 0, x, alpha * elu(x / alpha, 1.0)),
    "mish": mish,
    "softsign": softsign,
    "hard_sigmoid": hard_sigmoid,
    "hard_swish": lambda x: product(x, hard_sigmoid(x)),
    "clipped_relu": clipped_relu,
    "leaky_relu": lambda x, slope: relu(x, slope=slope),
}

_DERIVATIVE = {
    "identity": np.ones_like,
    "relu": relu_derivative,
    "sigmoid": lambda x: sigmoid(x) * sigmoid(-x),
    "tanh": lambda x: 4 * sigmoid(2 * x) * sigmoid(-2 * x),
    "elu": elu_derivative,
    "gelu": gelu_derivative,
    "gelu_tanh": gelu_tanh_derivative,
    "swish": swish_derivative,
    "softplus": lambda x, beta: sigmoid(beta * x),
    "selu": lambda x: _SELU_SCALE * elu_derivative(x, _SELU_ALPHA),
    "celu": lambda x, alpha: elu_derivative(x / alpha, 1.0),
    "mish": mish_derivative,
    "softsign": lambda x: 1 / (1 + np.abs(x)) ** 2,
    "hard_sigmoid": lambda x: np.where(np.abs(x) < 3, 1 / 6, 0.0),
    "hard_swish": hard_swish_derivative,
    "clipped_relu": lambda x, ceiling: relu_derivative(x, 0.0, ceiling),
    "leaky_relu": lambda x, slope: np.where(x > 0, 1.0, slope),
}

# Of the curved functions through 0: the first two terms of their series.
_BEYOND_LINEAR = {
    "tanh": lambda x: (x, -(x**3) / 3),
    "elu": lambda x, alpha: (np.where(x > 0, x, alpha * x), np.where(x > 0, 0.0, alpha * x * x / 2)),
    "celu": lambda x, alpha: (x, np.where(x > 0, 0.0, x * x / (2 * alpha))),
    "gelu": lambda x: (0.5 * x, x * x / math.sqrt(2 * math.pi)),
    "gelu_tanh": lambda x: (0.5 * x, x * x / math.sqrt(2 * math.pi)),
    "swish": lambda x, beta: (0.5 * x, beta * x * x / 4),
    "mish": lambda x: (3 * x / 5, 0.32 * x * x),
    "softsign": lambda x: (x, -x * np.abs(x)),
    "hard_swish": lambda x: (0.5 * x, x * x / 6),
}

ACTIVATIONS = tuple(_VALUE)
