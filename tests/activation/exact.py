"""Activations and their derivatives in decimal arithmetic of many digits, one argument at a time, to settle ties."""

from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

DIGITS = 160  # the smallest bfloat16 number is 1e-40, and its activation's second term 1e-80


def exact(x: float, name: str, parameters: tuple[float, ...], *, slope: bool = False) -> Decimal:
    """act(x), or act'(x), of a finite x."""
    with localcontext() as context:
        context.prec = DIGITS
        context.Emin, context.Emax = -(10**9), 10**9
        return (_SLOPE if slope else _VALUE)[name](Decimal(x), *(Decimal(p) for p in parameters))


def _sigmoid(x: Decimal) -> Decimal:
    return 1 / (1 + (-x).exp())


def _tanh(x: Decimal) -> Decimal:
    return 1 - 2 / ((2 * x).exp() + 1)


def _pi() -> Decimal:
    """Machin: pi / 4 = 4 arctan(1/5) - arctan(1/239)."""

    def arctan_of_inverse(n: int) -> Decimal:
        total, power, k = Decimal(0), Decimal(1) / n, 0
        while abs(power) > Decimal(10) ** -(DIGITS + 5):
            total += power / (2 * k + 1)
            power, k = -power / (n * n), k + 1
        return total

    return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))


def _normal(x: Decimal) -> Decimal:
    """The normal distribution function: 1/2 + phi(x) (x + x^3/3 + x^5/(3 5) + ...), without cancellation for x >= 0."""
    if x < -12:
        return _normal_tail(-x)
    term = total = abs(x)
    k = 1
    while term > total * Decimal(10) ** -DIGITS:
        k += 2
        term = term * x * x / k
        total += term
    half = _density(x) * total
    return Decimal("0.5") + (half if x > 0 else -half)


def _normal_tail(t: Decimal) -> Decimal:
    """phi(t) / (t + 1/(t + 2/(t + 3/(t + ...)))), Laplace's continued fraction: 400 levels are ample from 12 on."""
    fraction = t
    for k in range(400, 0, -1):
        fraction = t + k / fraction
    return _density(t) / fraction


def _density(x: Decimal) -> Decimal:
    return (-x * x / 2).exp() / (2 * _PI).sqrt()


def _gelu_tanh_argument(x: Decimal) -> Decimal:
    return 2 * (2 / _PI).sqrt() * (x + Decimal("0.044715") * x**3)


def _gelu_tanh_slope(x: Decimal) -> Decimal:
    z = _gelu_tanh_argument(x)
    inner = 2 * (2 / _PI).sqrt() * (1 + 3 * Decimal("0.044715") * x * x)
    return _sigmoid(z) + x * _sigmoid(z) * _sigmoid(-z) * inner


def _mish(x: Decimal, slope: bool = False) -> Decimal:
    """With w = exp(x): tanh(log(1 + w)) = n / (n + 2), n = w (w + 2)."""
    w = x.exp()
    n = w * (w + 2)
    return n / (n + 2) + x * 4 * w * (1 + w) / (n + 2) ** 2 if slope else x * n / (n + 2)


def _swish_slope(x: Decimal, beta: Decimal) -> Decimal:
    return _sigmoid(beta * x) + beta * x * _sigmoid(beta * x) * _sigmoid(-beta * x)


with localcontext() as _context:
    _context.prec = DIGITS
    _PI = _pi()
_SELU_SCALE, _SELU_ALPHA = (Decimal.from_float(v) for v in (1.0507009873554805, 1.6732632423543772))

_VALUE: dict[str, Callable[..., Any]] = {
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "elu": lambda x, alpha: x if x > 0 else alpha * (x.exp() - 1),
    "gelu": lambda x: x * _normal(x),
    "gelu_tanh": lambda x: x * _sigmoid(_gelu_tanh_argument(x)),
    "swish": lambda x, beta: x * _sigmoid(beta * x),
    "selu": lambda x: _SELU_SCALE * (x if x > 0 else _SELU_ALPHA * (x.exp() - 1)),
    "celu": lambda x, alpha: x if x > 0 else alpha * ((x / alpha).exp() - 1),
    "mish": _mish,
    "softsign": lambda x: x / (1 + abs(x)),
    "hard_sigmoid": lambda x: min(max(x + 3, Decimal(0)), Decimal(6)) / 6,
    "hard_swish": lambda x: x * min(max(x + 3, Decimal(0)), Decimal(6)) / 6,
    "softplus": lambda x, beta: max(x, Decimal(0)) + (1 + (-abs(beta * x)).exp()).ln() / beta,
}
_SLOPE: dict[str, Callable[..., Any]] = {
    "sigmoid": lambda x: _sigmoid(x) * _sigmoid(-x),
    "tanh": lambda x: 4 * _sigmoid(2 * x) * _sigmoid(-2 * x),
    "elu": lambda x, alpha: Decimal(1) if x > 0 else alpha * x.exp(),
    "gelu": lambda x: _normal(x) + x * _density(x),
    "gelu_tanh": _gelu_tanh_slope,
    "swish": _swish_slope,
    "selu": lambda x: _SELU_SCALE * (1 if x > 0 else _SELU_ALPHA * x.exp()),
    "celu": lambda x, alpha: Decimal(1) if x > 0 else (x / alpha).exp(),
    "mish": lambda x: _mish(x, slope=True),
    "softsign": lambda x: 1 / (1 + abs(x)) ** 2,
    "hard_sigmoid": lambda x: Decimal(1) / 6 if abs(x) < 3 else Decimal(0),
    "hard_swish": lambda x: Decimal(0) if x <= -3 else Decimal(1) if x >= 3 else (2 * x + 3) / 6,
    "softplus": lambda x, beta: _sigmoid(beta * x),
}
CURVED = tuple(_VALUE)
