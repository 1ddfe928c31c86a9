"""Activations, and their derivatives, in the precision of the argument (float64 or wider).

identity         x
relu             max(x, 0)
sigmoid          1 / (1 + exp(-x))
tanh             tanh(x)
elu              x if x > 0 else alpha (exp(x) - 1)            alpha = 1, or ("elu", alpha)
gelu             x Phi(x), Phi the normal distribution         Hendrycks and Gimpel, arXiv:1606.08415
gelu_tanh        x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2        the same paper's approximation
swish            x sigmoid(beta x)                             Ramachandran et al., arXiv:1710.05941; beta = 1
softplus         log(1 + exp(beta x)) / beta                   beta = 1, or ("softplus", beta)
clipped_relu     min(max(x, 0), ceiling)                       ceiling = 6, or ("clipped_relu", ceiling)
leaky_relu       x if x > 0 else slope x                       slope = 0.01, or ("leaky_relu", slope)

They are evaluated in forms that neither overflow nor cancel. Where a derivative jumps (relu, elu with
alpha other than 1, leaky_relu at 0; clipped_relu at 0 and at the ceiling) it has its value on the left at 0
and its value on the right at the ceiling, so relu'(0) = 0, as in JAX and PyTorch.
cuDNN's names for these are the values of cudnnActivationMode_t and the pointwise modes.
"""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Activation = str | tuple[str, float] | None

_erfc = np.frompyfunc(math.erfc, 1, 1)  # float64: NumPy has none


def erfc(x: Array) -> Array:
    return np.asarray(_erfc(np.asarray(x, np.float64)), np.float64)


def activate(x: Array, activation: Activation) -> Array:
    """The activation of x, element by element."""
    name, parameter = parse(activation)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _VALUE[name](x, parameter)


def derivative(x: Array, activation: Activation) -> Array:
    """The activation's derivative at x, element by element."""
    name, parameter = parse(activation)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(np.isnan(x), x, _DERIVATIVE[name](x, parameter))


def parse(activation: Activation) -> tuple[str, float]:
    """("elu", 0.5) -> ("elu", 0.5); "elu" -> ("elu", 1.0); None -> ("identity", 1.0)."""
    if isinstance(activation, tuple):
        return activation[0], float(activation[1])
    name = activation or "identity"
    return name, {"clipped_relu": 6.0, "leaky_relu": 0.01}.get(name, 1.0)


def sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def gelu(x: Array) -> Array:
    return x * erfc(-x / math.sqrt(2)) / 2


def gelu_derivative(x: Array) -> Array:
    return erfc(-x / math.sqrt(2)) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh_argument(x: Array) -> Array:
    # (1 + tanh(z)) / 2 = sigmoid(2 z), which does not cancel where z is very negative
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def gelu_tanh(x: Array) -> Array:
    return x * sigmoid(_gelu_tanh_argument(x))


def gelu_tanh_derivative(x: Array) -> Array:
    z = _gelu_tanh_argument(x)
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return sigmoid(z) + x * sigmoid(z) * sigmoid(-z) * slope


def swish_derivative(x: Array, beta: float) -> Array:
    return sigmoid(beta * x) + beta * x * sigmoid(beta * x) * sigmoid(-beta * x)


_VALUE = {
    "identity": lambda x, _: x,
    "relu": lambda x, _: np.maximum(x, 0),
    "sigmoid": lambda x, _: sigmoid(x),
    "tanh": lambda x, _: np.tanh(x),
    "elu": elu,
    "gelu": lambda x, _: gelu(x),
    "gelu_tanh": lambda x, _: gelu_tanh(x),
    "swish": lambda x, beta: x * sigmoid(beta * x),
    "softplus": lambda x, beta: softplus(beta * x) / beta,
    "clipped_relu": lambda x, ceiling: np.minimum(np.maximum(x, 0), ceiling),
    "leaky_relu": lambda x, slope: np.where(x > 0, x, slope * x),
}

_DERIVATIVE = {
    "identity": lambda x, _: np.ones_like(x),
    "relu": lambda x, _: np.where(x > 0, 1.0, 0.0),
    "sigmoid": lambda x, _: sigmoid(x) * sigmoid(-x),
    "tanh": lambda x, _: 4 * sigmoid(2 * x) * sigmoid(-2 * x),
    "elu": lambda x, alpha: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0))),
    "gelu": lambda x, _: gelu_derivative(x),
    "gelu_tanh": lambda x, _: gelu_tanh_derivative(x),
    "swish": swish_derivative,
    "softplus": lambda x, beta: sigmoid(beta * x),
    "clipped_relu": lambda x, ceiling: np.where((x > 0) & (x < ceiling), 1.0, 0.0),
    "leaky_relu": lambda x, slope: np.where(x > 0, 1.0, slope),
}

ACTIVATIONS = tuple(_VALUE)
