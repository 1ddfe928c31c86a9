"""Activations and their derivatives: one formula each, for epilogues, for the ops, and for the tables of the latter.

A formula is written over `Functions`: with those of JAX it works in the precision of its argument, with those of NumPy
in float64. Where float64 results are rounded once they are right to the last bit of a narrow type: `table` has one
entry for every bfloat16 or float16 number, 65,536 of them, and looking one up is faster than computing it
(`benchmarks/notes-activation.md`).

At ±inf every formula has its limit; NaN gives NaN.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation import stated
from jaxdnn._src.core import checks
from jaxdnn._src.core.determinism import is_fixed
from jaxdnn._src.core.formats import Format, format_of
from jaxdnn._src.core.rounding import product, rounded, together

Parameter = float | tuple[float, float, float] | None

# What ("relu", lower, upper, slope) is called once it has been read, unless it is one of the others.
BOUNDED_RELU = "bounded_relu"
# Of these, the output alone tells on which side of its kinks the input was, so the input need not be kept.
DERIVATIVE_FROM_OUTPUT = ("relu", "leaky_relu")
# Made of comparisons, minima, maxima and at most one product: nothing that devices do differently.
PIECEWISE = ("identity", "relu", "leaky_relu", "clipped_relu")
NARROW = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_SQRT_HALF = 0.7071067811865476
_SQRT_8_OVER_PI = 1.5957691216057308
_INV_SQRT_2PI = 0.3989422804014327
_TWO_OVER_SQRT_PI = 1.1283791670955126
_CUBIC = 0.044715
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


@dataclasses.dataclass(frozen=True)
class Functions:
    """The elementary functions that formulas are made of."""

    numpy: Any
    erfc: Callable[[Any], Any]
    logistic: Callable[[Any], Any]
    logistics: Callable[[Any], tuple[Any, Any, Any]]  # of z, of -z and their product, without cancellation
    positive: Callable[[Any], Any]  # max(z, 0), which is +0 for -0 too: NumPy's maximum leaves that open
    tanh: Callable[[Any], Any]


def _logistic(x: np.ndarray) -> np.ndarray:
    return _logistics_in_float64(x)[0]


def _logistics_in_float64(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    small = np.exp(-np.abs(x))
    near, far = 1 / (1 + small), small / (1 + small)
    return np.where(x >= 0, near, far), np.where(x >= 0, far, near), near * far


@jax.custom_jvp
def _logistics(z: Array) -> tuple[Array, Array, Array]:
    """By one exponential; each derivative is made of the three again, and has no kink where the choice changes."""
    small = jnp.exp(-jnp.abs(z))
    near = 1 / (1 + small)
    far = small * near
    return jnp.where(z >= 0, near, far), jnp.where(z >= 0, far, near), near * far


@_logistics.defjvp
def _logistics_jvp(primals: Any, tangents: Any) -> Any:
    s, q, bell = _logistics(*primals)
    along = bell * tangents[0]
    return (s, q, bell), (along, -along, (q - s) * along)


@jax.custom_jvp
def _erfc(z: Array) -> Array:
    """erfc(z), with a derivative of its own: that of JAX 0.12 raises inside shard_map."""
    return lax.erfc(z)


@_erfc.defjvp
def _erfc_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (z,), (tangent,) = primals, tangents
    return _erfc(z), -_TWO_OVER_SQRT_PI * jnp.exp(-z * z) * tangent


IN_JAX = Functions(jnp, _erfc, lax.logistic, _logistics, lambda z: jnp.maximum(z, 0), jnp.tanh)
IN_STATED_STEPS = dataclasses.replace(IN_JAX, tanh=stated.tanh)
IN_FLOAT64 = Functions(
    np,
    np.vectorize(math.erfc, otypes=[np.float64]),
    _logistic,
    _logistics_in_float64,
    lambda z: np.where(z <= 0, 0.0, z),
    np.tanh,
)


# ---- the formulas ----------------------------------------------------------------------------------------------------


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def activate(z: Array, name: str, parameter: Parameter, level: str = "fast") -> Array:
    """act(z) in z's own precision; where the level fixes bits, with those that no program around it changes."""
    return FORMULAS[name].value(z, parameter, IN_STATED_STEPS if is_fixed(level) else IN_JAX)


@activate.defjvp
def _activate_jvp(name: str, parameter: Parameter, level: str, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (z,), (tangent,) = primals, tangents
    return activate(z, name, parameter, level), derivative(z, name, parameter) * tangent


def derivative(z: Array, name: str, parameter: Parameter) -> Array:
    """act'(z) in z's own precision; at a kink, that of the side below; at an upper bound, of the side above."""
    slope = FORMULAS[name].slope(z, parameter, IN_JAX)
    return jnp.where(jnp.isnan(z), z, slope) if name in (*PIECEWISE, BOUNDED_RELU) else slope


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def slope(z: Array, name: str, parameter: Parameter) -> Array:
    """The same, for formulas whose own derivative has fixed bits: that one's products are rounded."""
    return derivative(z, name, parameter)


@slope.defjvp
def _slope_jvp(name: str, parameter: Parameter, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (z,), (tangent,) = primals, tangents
    return slope(z, name, parameter), product(tangent, _curvature(z, name, parameter))


@ft.partial(together, static_argnums=(1, 2))  # because XLA contracts products within it
def _curvature(z: Array, name: str, parameter: Parameter) -> Array:
    """act''(z), which nothing around it is joined with."""
    z = rounded(z)
    return rounded(jax.jvp(lambda z: derivative(z, name, parameter), (z,), (jnp.ones_like(z),))[1])


def _times(z: Any, factor: Any, f: Functions) -> Any:
    """z * factor, and a zero of z's sign where the factor has vanished, even if z is infinite."""
    return f.numpy.where(factor == 0, f.numpy.copysign(factor, z), z * factor)


def _finite(z: Any, f: Functions) -> Any:
    """z, and the least number in place of -inf, whose product with a factor that has vanished is a zero of z's sign."""
    return f.numpy.maximum(z, -jnp.finfo(z.dtype).max)


def _plus(s: Any, t: Any, f: Functions) -> Any:
    """s + t, and t where s has vanished: a slope that vanishes from below is -0."""
    return f.numpy.where(s == 0, t, s + t)


def _negative(z: Any, f: Functions) -> Any:
    return f.numpy.where(z > 0, f.numpy.zeros_like(z), z)


def _elu(z: Any, alpha: Any, f: Functions) -> Any:
    return f.numpy.where(z > 0, z, alpha * f.numpy.expm1(_negative(z, f)))


def _elu_derivative(z: Any, alpha: Any, f: Functions) -> Any:
    return f.numpy.where(z > 0, f.numpy.ones_like(z), alpha * f.numpy.exp(_negative(z, f)))


def _celu(z: Any, alpha: Any, f: Functions) -> Any:
    t = _negative(z, f) / alpha
    # By the series where alpha times the quotient would be z with two roundings, perhaps beyond z.
    below = f.numpy.where(t > -(2.0**-27), z * (1 + 0.5 * t), alpha * f.numpy.expm1(t))
    return f.numpy.where(z > 0, z, below)


def _celu_derivative(z: Any, alpha: Any, f: Functions) -> Any:
    return f.numpy.where(z > 0, f.numpy.ones_like(z), f.numpy.exp(_negative(z, f) / alpha))


def _mish(z: Any, _: Any, f: Functions) -> Any:
    # tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1), in powers of the smaller of e = exp(z) and 1 / e.
    w = f.numpy.exp(-f.numpy.abs(z))
    over = f.numpy.where(z >= 0, 1 + 2 * w, w * (w + 2))
    return _times(z, over, f) / (over + f.numpy.where(z >= 0, 2 * w * w, f.numpy.full_like(w, 2)))


def _mish_derivative(z: Any, _: Any, f: Functions) -> Any:
    # Without |z|, so that JAX can differentiate it at 0 as well. Beyond the limit it is 1 within the dtype's rounding,
    # and powers of `part`, of which derivatives consist, would leave the dtype's range.
    limit = 20 if z.dtype == np.float64 else 12
    e = f.numpy.exp(f.numpy.minimum(z, limit))
    part = 1 / (e * (e + 2) + 2)
    slope = 4 * e * (1 + e) * part * part
    return f.numpy.where(z > limit, f.numpy.ones_like(z), _plus(e * (e + 2) * part, _times(z, slope, f), f))


def _softsign(z: Any, _: Any, f: Functions) -> Any:
    far = f.numpy.isinf(z)
    return f.numpy.where(far, f.numpy.copysign(f.numpy.ones_like(z), z), z / (1 + f.numpy.abs(z)))


def _softsign_derivative(z: Any, _: Any, f: Functions) -> Any:
    root = 1 / (1 + f.numpy.abs(z))
    return root * root


def _gelu(z: Any, _: Any, f: Functions) -> Any:
    # erfc keeps the relative accuracy of the negative tail, where 1 + erf cancels.
    return 0.5 * _finite(z, f) * f.erfc(-z * _SQRT_HALF)


def _gelu_derivative(z: Any, _: Any, f: Functions) -> Any:
    z = f.numpy.clip(z, -100, 100)  # beyond, the exponential is 0
    return _plus(0.5 * f.erfc(-z * _SQRT_HALF), _INV_SQRT_2PI * z * f.numpy.exp(-0.5 * z * z), f)


def _gelu_tanh_argument(z: Any) -> Any:
    # (1 + tanh(a)) / 2 = logistic(2 a), which does not cancel where a is very negative.
    return _SQRT_8_OVER_PI * (z + _CUBIC * z * z * z)


def _gelu_tanh(z: Any, _: Any, f: Functions) -> Any:
    return _finite(z, f) * f.logistic(_gelu_tanh_argument(z))


def _gelu_tanh_derivative(z: Any, _: Any, f: Functions) -> Any:
    z = f.numpy.clip(z, -100, 100)  # beyond, the slope is 0 or 1; the cube would overflow, and its derivative be NaN
    a = _gelu_tanh_argument(z)
    s, q, _ = f.logistics(a)
    return s * (1 + _SQRT_8_OVER_PI * (z + 3 * _CUBIC * z * z * z) * q)


def _swish(z: Any, beta: Any, f: Functions) -> Any:
    if beta == 0:  # 0 times an infinite z is not 0
        return 0.5 * z
    return (_finite(z, f) if beta > 0 else -_finite(-z, f)) * f.logistic(z * beta)


def _swish_derivative(z: Any, beta: Any, f: Functions) -> Any:
    if beta == 0:
        return f.numpy.where(f.numpy.isnan(z), z, f.numpy.full_like(z, 0.5))
    t = f.numpy.clip(z * beta, -1000, 1000)  # beyond, one of the two has vanished
    s, q, _ = f.logistics(t)
    return s * (1 + t * q)


def _softplus(z: Any, beta: Any, f: Functions) -> Any:
    return f.numpy.maximum(z, 0) + f.numpy.log1p(f.numpy.exp(-f.numpy.abs(z * beta))) / beta


def _hard_sigmoid(z: Any, f: Functions) -> Any:
    return f.numpy.clip(z + 3, 0, 6) / 6


def _hard_sigmoid_derivative(z: Any, _: Any, f: Functions) -> Any:
    inside = f.numpy.where(f.numpy.abs(z) < 3, f.numpy.full_like(z, 1 / 6), f.numpy.zeros_like(z))
    return f.numpy.where(f.numpy.isnan(z), z, inside)


def _hard_swish_derivative(z: Any, _: Any, f: Functions) -> Any:
    return f.numpy.where(z <= -3, f.numpy.zeros_like(z), f.numpy.where(z >= 3, f.numpy.ones_like(z), (2 * z + 3) / 6))


def _leaky_relu_derivative(z: Any, slope: Any, f: Functions) -> Any:
    return f.numpy.where(z > 0, f.numpy.ones_like(z), f.numpy.full_like(z, slope))


def _bounded_relu(z: Any, bounds: Any, f: Functions) -> Any:
    lower, upper, slope = bounds
    # Without a slope the product is left out: 0 times an infinite distance is not 0.
    below = f.numpy.full_like(z, lower) if slope == 0 else slope * (z - lower) + lower if lower else slope * z
    return f.numpy.where(z <= lower, below, f.numpy.where(z > upper, f.numpy.full_like(z, upper), z))


def _bounded_relu_derivative(z: Any, bounds: Any, f: Functions) -> Any:
    lower, upper, slope = bounds
    inside = z > lower if upper == math.inf else (z > lower) & (z < upper)
    return f.numpy.where(z <= lower, f.numpy.full_like(z, slope), inside.astype(z.dtype))


Formula = Callable[[Any, Any, Functions], Any]


class Activation(NamedTuple):
    """The value of the parameter if the call gives none (None: there is no parameter), the function, its derivative."""

    default: float | None
    value: Formula
    slope: Formula


FORMULAS = {
    "identity": Activation(None, lambda z, _, f: z, lambda z, _, f: f.numpy.ones_like(z)),
    "relu": Activation(None, lambda z, _, f: f.positive(z), lambda z, _, f: (z > 0).astype(z.dtype)),
    "sigmoid": Activation(None, lambda z, _, f: f.logistic(z), lambda z, _, f: f.logistics(z)[2]),
    "tanh": Activation(None, lambda z, _, f: f.tanh(z), lambda z, _, f: 4 * f.logistics(2 * z)[2]),
    "gelu": Activation(None, _gelu, _gelu_derivative),
    "gelu_tanh": Activation(None, _gelu_tanh, _gelu_tanh_derivative),
    "elu": Activation(1.0, _elu, _elu_derivative),
    "swish": Activation(1.0, _swish, _swish_derivative),
    "softplus": Activation(1.0, _softplus, lambda z, beta, f: f.logistic(z * beta)),
    "selu": Activation(
        None,
        lambda z, _, f: SELU_SCALE * _elu(z, SELU_ALPHA, f),
        lambda z, _, f: SELU_SCALE * _elu_derivative(z, SELU_ALPHA, f),
    ),
    "celu": Activation(1.0, _celu, _celu_derivative),
    "mish": Activation(None, _mish, _mish_derivative),
    "softsign": Activation(None, _softsign, _softsign_derivative),
    "hard_sigmoid": Activation(None, lambda z, _, f: _hard_sigmoid(z, f), _hard_sigmoid_derivative),
    "hard_swish": Activation(None, lambda z, _, f: _times(z, _hard_sigmoid(z, f), f), _hard_swish_derivative),
    "leaky_relu": Activation(0.01, lambda z, slope, f: f.numpy.where(z > 0, z, slope * z), _leaky_relu_derivative),
    "clipped_relu": Activation(
        6.0,
        lambda z, ceiling, f: f.numpy.minimum(f.positive(z), ceiling),
        lambda z, ceiling, f: ((z > 0) & (z < ceiling)).astype(z.dtype),
    ),
    BOUNDED_RELU: Activation(None, _bounded_relu, _bounded_relu_derivative),
}
# The defaults of those that users name.
ACTIVATIONS = {name: found.default for name, found in FORMULAS.items() if name != BOUNDED_RELU}


# ---- tables for the narrow types -------------------------------------------------------------------------------------


@ft.lru_cache(maxsize=128)  # each holds 128 or 256 KB
def table(name: str, parameter: Parameter, alpha: float, dtype: np.dtype, out_dtype: np.dtype) -> np.ndarray:
    """alpha * act(x), rounded once to `out_dtype`, for every number x of a narrow type in the order of its bits."""
    x = _numbers(dtype)
    values = _off_ties(x, alpha * _in_float64(FORMULAS[name].value, x, parameter), name, parameter, alpha, out_dtype)
    return _round(values, out_dtype)


@ft.lru_cache(maxsize=128)
def slope_table(name: str, parameter: Parameter, alpha: float, dtype: np.dtype) -> np.ndarray:
    """alpha * act'(x) in float32 for every number of a narrow type: the nearest float32, except where rounding that to
    the narrow type would not round alpha * act'(x) itself (it is a tie there); then its neighbour on the right side."""
    slopes = alpha * _in_float64(FORMULAS[name].slope, _numbers(dtype), parameter)
    near, rounded = _round(slopes, np.dtype(np.float32)), _round(slopes, dtype)
    with np.errstate(all="ignore"):
        agree = (near.astype(dtype) == rounded) | np.isnan(slopes)
        return np.where(agree, near, np.nextafter(near, rounded.astype(np.float32)))


def _numbers(dtype: np.dtype) -> np.ndarray:
    """Every number of a narrow type, in the order of its bits, in float64."""
    with np.errstate(invalid="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float64)


def _in_float64(formula: Formula, x: np.ndarray, parameter: Parameter) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.where(np.isnan(x), np.nan, formula(x, parameter, IN_FLOAT64))


def _off_ties(
    x: np.ndarray, values: np.ndarray, name: str, parameter: Parameter, alpha: float, dtype: np.dtype
) -> np.ndarray:
    """Values of a function through 0, with those of tiny arguments moved to the side of a tie where the function lies.

    In float64 gelu(x) of a subnormal x is x / 2, a tie between two numbers of bfloat16; gelu(x) itself lies above it.
    On which side of its tangent at 0 a function lies is seen at an argument that is less tiny.
    """
    f = lambda z: alpha * _in_float64(FORMULAS[name].value, z, parameter)
    if f(np.zeros(1))[0] != 0 or name in PIECEWISE or not isinstance(format_of(dtype), Format):
        return values
    tinier, larger = np.copysign(2.0**-200, x), np.copysign(2.0**-10, x)
    side = f(larger) - f(tinier) / tinier * larger
    side = np.where(np.abs(side) < 2.0**-45, 0.0, side)  # rounding errors of a function that is straight there
    tiny = (np.abs(x) < 2.0**-26) & (x != 0)
    return np.where(tiny & (side != 0), np.nextafter(values, values + np.sign(side)), values)


def _round(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    to = format_of(dtype)
    with np.errstate(all="ignore"):
        # NumPy's conversion to bfloat16 goes by way of float32 and would round twice.
        return (to.round(values) if isinstance(to, Format) else values).astype(dtype)


def look_up(x: Array, entries: np.ndarray) -> Array:
    """The entry of a table for each element of x, of a narrow type."""
    return jnp.asarray(entries).at[bits(x).astype(jnp.int32)].get(mode="promise_in_bounds")


def bits(x: Array) -> Array:
    """The bits of numbers as unsigned integers of their width.

    XLA (JAX 0.10 to 0.12) folds the bitcast of a constant array that it keeps in another order of dimensions to wrong
    values, such as that of `x[:, rows]` for a constant x. So its operand is made to depend on iotas, which XLA does not
    fold; LLVM does, so that it costs nothing. On those of all axes, or XLA computes a row of them in a kernel of its
    own.
    """
    if x.ndim:
        iotas = (lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in range(x.ndim))
        always = (ft.reduce(jnp.bitwise_or, iotas) | jnp.uint32(1)) != 0
        x = jnp.where(always, x, jnp.zeros_like(x))
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


# ---- reading the argument --------------------------------------------------------------------------------------------


def read_activation(value: Any) -> tuple[str, Parameter] | None:
    """Reads an activation: None, a name, (name, parameter), or ("relu", lower, upper, slope)."""
    if value is None or (isinstance(value, str) and value == "identity"):
        return None
    if isinstance(value, tuple) and len(value) == 4 and value[0] == "relu":
        return _read_bounds(value)
    name, parameter = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        meant = checks.did_you_mean(name, tuple(ACTIVATIONS))
        raise ValueError(
            f"`activation` must be None, one of {', '.join(map(repr, ACTIVATIONS))}, a pair of a name and its "
            f"parameter, or ('relu', lower, upper, slope), got {checks.shown(value)}{meant}."
        )
    default = ACTIVATIONS[name]
    if parameter is None:
        return name, default
    if default is None or not checks.is_number(parameter):
        takes = "no parameter" if default is None else "one number"
        raise ValueError(f"`activation` {name!r} takes {takes}, got {checks.shown(parameter)}.")
    parameter = checks.as_float("activation", parameter) + 0.0  # -0 and 0 are equal, so they must not differ
    if name == "leaky_relu" and not 0 <= parameter <= 1:
        raise ValueError(f"`activation` 'leaky_relu' needs a slope from 0 to 1, got {parameter!r}.")
    if name == "leaky_relu" and parameter == 0:
        return "relu", None
    if name == "clipped_relu" and not parameter >= 0:
        raise ValueError(f"`activation` 'clipped_relu' needs a ceiling of at least 0, got {parameter!r}.")
    if name in ("celu", "softplus") and not parameter > 0:
        raise ValueError(f"`activation` {name!r} needs a positive parameter, got {parameter!r}.")
    if not math.isfinite(parameter):
        raise ValueError(f"`activation` {name!r} needs a finite parameter, got {parameter!r}.")
    return name, parameter


def _read_bounds(value: tuple[Any, ...]) -> tuple[str, Parameter]:
    if not all(checks.is_number(v) for v in value[1:]):
        raise ValueError(
            f"`activation` ('relu', lower, upper, slope) takes three numbers, got {checks.shown(value[1:])}."
        )
    lower, upper, slope = (checks.as_float("activation", v) + 0.0 for v in value[1:])
    if not (math.isfinite(lower) and math.isfinite(slope) and lower <= upper):
        raise ValueError(
            f"`activation` ('relu', lower, upper, slope) needs a finite lower bound of at most the upper one and a "
            f"finite slope, got {value[1:]!r}."
        )
    if lower == 0 and upper == math.inf:
        if slope == 0:
            return "relu", None
        if 0 < slope <= 1:
            return "leaky_relu", slope
    if lower == 0 and slope == 0:
        return "clipped_relu", upper
    return BOUNDED_RELU, (lower, upper, slope)
