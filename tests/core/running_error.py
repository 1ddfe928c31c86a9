"""How far what a JAX program computes may be off: every operation's rounding, carried along by the rules of analysis.

`bounds(f, *arrays)` interprets the program of `f`: beside every value z, in float64, it keeps an e with which
|z - exact| <= e holds for z and for whatever else computes the same program, in any order of additions and with
products fused to sums or not. u is the unit roundoff of the value's dtype, X the largest |x| that x and its e allow:

    x + y    e + f               x y    X f + Y e              x / y    (e + |x / y| f) / (|y| - f)
    √x       e / (√x + √(x - e))        Σ x    Σ e + γ(n) Σ X         and behind each u (|z| + e)
    x^y      by `norm_local.power_error`, and a factor exp(f |log x|)

Comparisons choose by the values, so a program is bounded where its choices do not hang on a rounding. The norms' and
activations' own primitives are interpreted as the formulas that XLA gets.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn._src.activation import primitive as activation
from jaxdnn._src.norm import local, xla
from jaxdnn._src.norm.cases_local import power_error

XLA = xla.XLA._replace(on_cpu=jax.default_backend() == "cpu")
OWN: dict[str, Callable[..., Any]] = {f"jaxdnn_{op}": ft.partial(f, XLA) for op, f in xla.FORMULAS.items()}
OWN |= {"jaxdnn_activation": activation.value, "jaxdnn_activation_dgrad": activation.backward}
INNER = ("jit", "pjit", "call", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
Values = np.ndarray
Pair = tuple[Values, Values]


def bounds(f: Callable[..., Any], *arrays: Any) -> Any:
    """The values and the errors of f's results, each like the results; the arguments have no error."""
    program, shape = jax.make_jaxpr(f, return_shape=True)(*arrays)
    with np.errstate(all="ignore"):  # a branch that is not taken may divide by zero
        found = _closed(program, [_exact(a) for a in jax.tree.leaves(arrays)])
    tree = jax.tree.structure(shape)
    # The errors are themselves sums and products in float64, of one sign and far fewer than 2^20.
    return tree.unflatten([z for z, _ in found]), tree.unflatten([e * (1 + 2.0**-30) for _, e in found])


def _exact(a: Any) -> Pair:
    a = np.asarray(a)
    wide = a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return wide, np.zeros(a.shape)


def _closed(program: Any, given: list[Pair]) -> list[Pair]:
    """The results of a program, with or without constants of its own."""
    jaxpr = getattr(program, "jaxpr", program)
    known: dict[Any, Pair] = dict(zip(jaxpr.constvars, map(_exact, getattr(program, "consts", ())), strict=True))
    known |= dict(zip(jaxpr.invars, given, strict=True))
    read = lambda v: _exact(v.val) if hasattr(v, "val") else known[v]
    for eqn in jaxpr.eqns:
        found = _apply(eqn, [read(v) for v in eqn.invars])
        for variable, (z, e) in zip(eqn.outvars, found, strict=True):
            known[variable] = np.broadcast_to(z, variable.aval.shape), np.broadcast_to(e, variable.aval.shape)
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, given: list[Pair]) -> list[Pair]:
    name, params = eqn.primitive.name, eqn.params
    if name in OWN or name == "window_sum":
        formula = ft.partial(OWN[name], params["spec"]) if name in OWN else ft.partial(local.added, **params)
        return _closed(
            jax.make_jaxpr(formula)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)), given
        )
    if name in INNER:
        return _closed(params.get("jaxpr") or params.get("call_jaxpr"), given)
    if name == "cond":
        return _closed(params["branches"][int(given[0][0])], given[1:])
    values, errors = [z for z, _ in given], [e for _, e in given]
    if name == "optimization_barrier":
        return given
    # Counters, what is made of choices, bits and powers of two, which choices are made of.
    floats = any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars)
    if name in ("bitcast_convert_type", "reduce_precision") or not floats:
        read = [jnp.asarray(z, v.aval.dtype) for z, v in zip(values, eqn.invars, strict=True)]
        return [_exact(eqn.primitive.bind(*read, **params))]
    if name == "split":
        cuts = np.cumsum(params["sizes"])[:-1]
        return list(zip(*(np.split(v[0], cuts, params["axis"]) for v in (values, errors)), strict=True))
    if name == "unstack":
        return list(zip(*(np.moveaxis(v[0], params["axis"], 0) for v in (values, errors)), strict=True))
    if name in _SHAPES:
        return [(_SHAPES[name](params, *values), _SHAPES[name](params, *errors))]
    if name in _CHOICES:
        return [_exact(_CHOICES[name](*values))]
    if name == "select_n":
        which = values[0].astype(int)
        pick = lambda parts: np.choose(which, np.broadcast_arrays(*parts))
        return [(pick(values[1:]), pick(errors[1:]))]
    return [_RULES[name](eqn, values, errors)]


# ---- what moves values, and what chooses by them ---------------------------------------------------------------------


def _broadcast(p: dict[str, Any], x: Values) -> Values:
    own = [1] * len(p["shape"])
    for axis, size in zip(p["broadcast_dimensions"], x.shape, strict=True):
        own[axis] = size
    return np.broadcast_to(x.reshape(own), p["shape"])


def _slice(p: dict[str, Any], x: Values) -> Values:
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _pad(p: dict[str, Any], x: Values, value: Values) -> Values:
    """Without holes; a negative width cuts off."""
    low, high, holes = zip(*p["padding_config"], strict=True)
    kept = tuple(slice(max(-a, 0), size - max(-b, 0)) for a, b, size in zip(low, high, x.shape, strict=True))
    if any(holes):
        raise NotImplementedError("no rule for holes")
    return np.pad(x[kept], [(max(a, 0), max(b, 0)) for a, b in zip(low, high, strict=True)], constant_values=value)


_SHAPES: dict[str, Callable[..., Values]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda p, x: x.reshape(p["new_sizes"]),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "expand_dims": lambda p, x: np.expand_dims(x, tuple(p["dimensions"])),
    "rev": lambda p, x: np.flip(x, tuple(p["dimensions"])),
    "concatenate": lambda p, *x: np.concatenate(x, p["dimension"]),
    "stack": lambda p, *x: np.stack(x, p["axis"]),
    "slice": _slice,
    "pad": _pad,
    "copy": lambda p, x: x,
    "copy_p": lambda p, x: x,
    "stop_gradient": lambda p, x: x,
    "rounded": lambda p, x: x,
}
_CHOICES: dict[str, Callable[..., Values]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "sign": np.sign,
}


# ---- what rounds -----------------------------------------------------------------------------------------------------


def _limits(eqn: Any) -> tuple[float, float]:
    """The unit roundoff of a result, and the smallest normal number."""
    found = jnp.finfo(eqn.outvars[0].aval.dtype)
    return float(found.eps) / 2, float(found.smallest_normal)


def _rounded(eqn: Any, z: Values, e: Values, roundings: float = 1.0) -> Pair:
    """z, rounded to its dtype; what is below the normal numbers may vanish."""
    u, tiny = _limits(eqn)
    return z, e + roundings * u * (np.abs(z) + e) + tiny


def _added(sign: float) -> Callable[..., Pair]:
    return lambda eqn, v, e: _rounded(eqn, v[0] + sign * v[1], e[0] + e[1])


def _mul(eqn: Any, v: Any, e: Any) -> Pair:
    return _rounded(eqn, v[0] * v[1], (np.abs(v[0]) + e[0]) * e[1] + np.abs(v[1]) * e[0])


def _div(eqn: Any, v: Any, e: Any, roundings: float = 3) -> Pair:
    """Three roundings, if none are stated: XLA may multiply by a reciprocal, or by that of a root."""
    z, left = v[0] / v[1], np.abs(v[1]) - e[1]
    return _rounded(eqn, z, np.where(left > 0, (e[0] + np.abs(z) * e[1]) / left, np.inf), roundings)


def _sqrt(eqn: Any, v: Any, e: Any) -> Pair:
    z, least = np.sqrt(v[0]), np.sqrt(np.maximum(v[0] - e[0], 0))
    return _rounded(eqn, z, np.where(z + least > 0, e[0] / (z + least), np.sqrt(e[0])))


def _integer_pow(eqn: Any, v: Any, e: Any) -> Pair:
    y = eqn.params["y"]
    size = np.abs(v[0])
    z, off = _rounded(eqn, v[0] ** abs(y), (size + e[0]) ** abs(y) - size ** abs(y), abs(y) - 1)
    return (z, off) if y >= 0 else _div(eqn, (np.ones_like(z), z), (np.zeros_like(z), off))


def _pow(eqn: Any, v: Any, e: Any) -> Pair:
    """Zero, if it is exact, to a positive power is zero."""
    u, tiny = _limits(eqn)
    t, q, zero = *v, (v[0] == 0) & (e[0] == 0) & (v[1] > e[1])
    t, off = np.where(zero, 1, t), np.where(zero, 0, e[0] / t)
    share = 1 + power_error(t, off, q, u)
    share = share * np.exp(e[1] * (np.abs(np.log(t)) - np.log1p(-off))) - 1
    z = np.where(zero, 0, t**q)
    return z, np.where((t > 0) & (off < 1), np.abs(z) * share + tiny, np.inf)


def _reduce_sum(eqn: Any, v: Any, e: Any) -> Pair:
    axes, (u, tiny) = tuple(eqn.params["axes"]), _limits(eqn)
    n = math.prod(v[0].shape[a] for a in axes)
    own = n * u / (1 - n * u) * (np.abs(v[0]) + e[0]).sum(axes)
    return v[0].sum(axes), e[0].sum(axes) + own + n * tiny


def _convert(eqn: Any, v: Any, e: Any) -> Pair:
    given, out = (jnp.finfo(x.aval.dtype) for x in (eqn.invars[0], eqn.outvars[0]))
    if given.nmant <= out.nmant and given.maxexp <= out.maxexp:
        return v[0], e[0]
    return _rounded(eqn, v[0], e[0])


def _steady(f: Callable[..., Values]) -> Callable[..., Pair]:
    """Of an exact operation that brings no two values further apart."""
    return lambda eqn, v, e: (f(*v), ft.reduce(np.maximum, e))


_RULES: dict[str, Callable[..., Pair]] = {
    "add": _added(1),
    "add_any": _added(1),
    "joined": _added(1),
    "sub": _added(-1),
    "mul": _mul,
    "rounded_product": _mul,
    "square": lambda eqn, v, e: _mul(eqn, (v[0], v[0]), (e[0], e[0])),
    "div": _div,
    "rounded_quotient": ft.partial(_div, roundings=1),
    "sqrt": _sqrt,
    "integer_pow": _integer_pow,
    "pow": _pow,
    "reduce_sum": _reduce_sum,
    "psum": _reduce_sum,  # over axes that vmap has given numbers
    "reduce_max": lambda eqn, v, e: (v[0].max(eqn.params["axes"]), e[0].max(eqn.params["axes"])),
    "convert_element_type": _convert,
    "neg": _steady(np.negative),
    "abs": _steady(np.abs),
    "max": _steady(np.maximum),
    "min": _steady(np.minimum),
}


# ---- comparisons -----------------------------------------------------------------------------------------------------


def agree(ours: Any, theirs: Any, *errors: Any, what: str = "") -> None:
    """Two results of one shape that lie within the sum of their bounds of each other, element by element."""
    a, b = (np.asarray(v, np.longdouble) for v in (ours, theirs))
    assert a.shape == b.shape, f"{what}: shape {a.shape} beside {b.shape}"
    allowed = sum(np.broadcast_to(np.asarray(e, np.float64), a.shape) for e in errors)
    assert np.isfinite(allowed).all(), f"{what}: no bound"
    apart = np.where(a == b, 0, np.abs(a - b))
    assert (apart <= allowed).all(), f"{what}: {np.max(apart)} apart, {apart.size} elements, allowed {np.max(allowed)}"


def coarse(*arrays: np.ndarray) -> list[np.ndarray]:
    """Arrays in steps of 2^-12, so that float64 holds what `slope` moves them to."""
    return [np.round(a * 2.0**12) / 2.0**12 for a in arrays]


def slope(f: Callable[[float], Any], error: float | np.ndarray, h: float = 2.0**-16) -> tuple[Any, Any]:
    """The derivative of f at 0 by central differences, and how far it may be off; f itself is off by at most `error`.

    The step's own error is c h^2 + c' h^4 + ..., so steps of h and h / 2 lie 3/4 c h^2 apart, of which the latter's own
    is a third. The difference is taken whole, and h so small that what is beyond vanishes beside f's errors.
    """
    wide = lambda v: np.asarray(v, np.longdouble)
    difference = lambda h: (wide(f(h)) - wide(f(-h))) / np.longdouble(2 * h)
    rough, fine = difference(h), difference(h / 2)
    return fine, np.abs(fine - rough) + np.asarray(error) * 4 / h


def dual(gradient: Any, off: Any, direction: Any, dy: Any, f: Callable[[float], Any], error: Any) -> None:
    """<gradient, direction> is <dy, f'(0)>, where the gradient may be off by `off` and f by `error`."""
    along, apart = slope(f, error)
    terms = [np.asarray(a, np.longdouble) * b for a, b in ((gradient, direction), (along, dy))]
    eps = float(np.finfo(np.longdouble).eps)
    sums = sum((t.size + 1) * eps * np.abs(t).sum() for t in terms)
    agree(terms[0].sum(), terms[1].sum(), (off * np.abs(direction)).sum(), (apart * np.abs(dy)).sum(), sums)
