"""The primitives of the normalisations: one that normalises, its tangent, and its backward op.

All normalisations are one formula over a set of axes (`xla.py` states it). Axes are counted from the end, so that vmap
only has to add leading ones. Scale and bias have the accumulator's dtype and the rank of x, with length 1 along the
axes where they are constant.

| primitive | operands | results | linear in |
|---|---|---|---|
| `norm` | x, [scale], [bias] | y, mean, rstd, variance | scale and bias together |
| `norm_tangent` | of dx, dscale, dbias those there are; x, mean, rstd, [scale] | the tangent of y | the former |
| `norm_dgrad` | dy, x, mean, rstd, [scale] | dx, dscale, dbias | dy; scale, but for dscale and dbias |

The latter two have the bias too, after the scale, if y is behind an activation, whose slope they find.

`norm_dgrad` is the transpose of `norm_tangent`, so that a first gradient runs the backward kernel. Higher derivatives
of the two come from XLA's formula. For them means and inverse deviations are independent operands; their dependence on
x comes from the derivatives of the results of `norm`.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core import primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Axes, Factors, Run, alike
from jaxdnn._src.core.primitives import bind as bind
from jaxdnn._src.core.primitives import call as call
from jaxdnn._src.core.rounding import product
from jaxdnn._src.norm.spec import NormSpec, reduced

LINEAR = ("x", "scale", "bias")


def _formula(op: str, spec: NormSpec, *operands: Array) -> Any:
    from jaxdnn._src.norm import xla  # which registers engines under this module's OPS

    return xla.FORMULAS[op](xla.XLA, spec, *operands)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _norm_results(spec: NormSpec, x: Any, *_: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    statistic = jax.ShapeDtypeStruct(reduced(x.shape, spec.axes), spec.accumulate)
    return jax.ShapeDtypeStruct(x.shape, spec.out_dtype), statistic, statistic, statistic


def _tangent_result(spec: NormSpec, *operands: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(operands[len(spec.tangents)].shape, spec.out_dtype)


def _dgrad_results(spec: NormSpec, dy: Any, x: Any, *_: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    parameter = jax.ShapeDtypeStruct(reduced(x.shape, spec.summed), spec.accumulate)
    return jax.ShapeDtypeStruct(x.shape, spec.out_dtype), parameter, parameter


# ---- derivatives -----------------------------------------------------------------------------------------------------


def _norm_jvp(spec: NormSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple, tuple]:
    found = bind("norm", *primals, spec=spec)
    _, mean, rstd, _ = found
    x, *parameters = primals
    names = [name for name, given in zip(LINEAR, (True, spec.scale, spec.bias), strict=True) if given]
    wanted = {n: t for n, t in zip(names, tangents, strict=True) if not isinstance(t, ad.Zero)}
    narrow = spec.converted or spec.out_dtype
    bias = spec.bias and spec.activation is not None
    linear = dataclasses.replace(spec, tangents=tuple(wanted), bias=bias, out_dtype=narrow, converted=None)
    residuals = (x, mean, rstd, *parameters[: spec.scale + bias])
    dy = primitives.zero_tangent(found[0])
    if wanted:
        dy = bind("norm_tangent", *wanted.values(), *residuals, spec=linear).astype(spec.out_dtype)
    if "x" not in wanted:
        return found, (dy, *map(primitives.zero_tangent, found[1:]))
    return found, (dy, *_statistics_tangents(spec, x, mean, rstd, wanted["x"]))


def _norm_transpose(spec: NormSpec, cts: Sequence[Any], x: Any, *parameters: Any) -> list[Array | None]:
    """That of `norm_tangent` along those of scale and bias that there are, at the statistics of x."""
    if spec.activation is not None or not all(map(primitives.is_linear_operand, parameters)) or not parameters:
        raise NotImplementedError("A normalisation without activation is linear in `scale` and `bias` together.")
    names = tuple(name for name, given in zip(LINEAR[1:], (spec.scale, spec.bias), strict=True) if given)
    plain = dataclasses.replace(spec, scale=False, bias=False, converted=None)
    _, mean, rstd, _ = bind("norm", x, spec=plain)
    along = dataclasses.replace(plain, tangents=names)
    if isinstance(cts[0], ad.Zero):
        return [None] * (1 + len(names))
    return [None, *_tangent_transpose(along, cts[0], *parameters, x, mean, rstd)[: len(names)]]


def _statistics_tangents(spec: NormSpec, x: Array, mean: Array, rstd: Array, dx: Array) -> tuple[Array, Array, Array]:
    """The tangents of μ, r and σ²: Σ dx / n, -r² Σ dx h / n, 2 Σ dx (x - μ) / n. XLA removes those without a use."""
    wide, v = x.astype(spec.accumulate), dx.astype(spec.accumulate)
    centred = wide - mean if spec.centred else wide
    d_mean = jnp.mean(v, spec.axes, keepdims=True)
    d_variance = 2 * jnp.mean(v * centred, spec.axes, keepdims=True)
    return d_mean if spec.centred else jnp.zeros_like(d_mean), -0.5 * rstd * rstd * rstd * d_variance, d_variance


def _tangent_jvp(spec: NormSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    """Linear in the tangents, with the op itself along those; along the other operands the formula's derivative."""
    y = bind("norm_tangent", *primals, spec=spec)
    count = len(spec.tangents)
    terms = []
    second = {n: t for n, t in zip(spec.tangents, tangents, strict=False) if not isinstance(t, ad.Zero)}
    if second:
        along = dataclasses.replace(spec, tangents=tuple(second))
        terms.append(bind("norm_tangent", *second.values(), *primals[count:], spec=along))
    terms += primitives.along_others(ft.partial(_formula, "norm_tangent", spec), primals, tangents, count)
    return y, primitives.added(y, terms)


def _tangent_transpose(spec: NormSpec, ct: Array, *operands: Any) -> list[Array | None]:
    """The backward op; a cotangent of scale or bias is added over the axes along which they have length 1."""
    tangents, residuals = spec.split_tangents(operands)
    avals = {name: value.aval for name, value in tangents.items()}
    parameters = [aval.shape for name, aval in avals.items() if name != "x"]
    summed = _same_along(parameters) if parameters else spec.summed
    out_dtype = avals["x"].dtype if "x" in avals else spec.out_dtype
    back = dataclasses.replace(spec, tangents=(), summed=summed, out_dtype=np.dtype(out_dtype))
    found: dict[str, Array] = dict(zip(LINEAR, bind("norm_dgrad", ct, *residuals, spec=back), strict=True))
    return [*(_summed_to(found[name], aval) for name, aval in avals.items()), *(None for _ in residuals)]


def _same_along(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The axes along which all have length 1."""
    rank = len(shapes[0])
    return tuple(axis - rank for axis in range(rank) if all(shape[axis] == 1 for shape in shapes))


def _summed_to(x: Array, aval: Any) -> Array:
    """x added up along the axes that have length 1 in `aval`."""
    axes = tuple(a for a, (size, to) in enumerate(zip(x.shape, aval.shape, strict=True)) if size != to)
    return (jnp.sum(x, axes, keepdims=True) if axes else x).astype(aval.dtype)


def _dgrad_transpose(spec: NormSpec, cts: Sequence[Any], *operands: Any) -> list[Array | None]:
    """`norm_tangent` of the cotangents of dx, dscale and dbias."""
    dy, *residuals = operands
    if any(map(primitives.is_linear_operand, residuals)):
        return _dgrad_transpose_of_scale(spec, cts[0], *operands)
    wanted = {name: ct for name, ct in zip(LINEAR, cts, strict=True) if not isinstance(ct, ad.Zero)}
    forth = dataclasses.replace(spec, tangents=tuple(wanted), out_dtype=np.dtype(dy.aval.dtype))
    return [bind("norm_tangent", *wanted.values(), *residuals, spec=forth), *(None for _ in residuals)]


def _dgrad_transpose_of_scale(spec: NormSpec, ct: Any, *operands: Any) -> list[Array | None]:
    """dx is a linear function of scale dy that is its own transpose, `norm_tangent` along x of a call without scale."""
    dy, x, mean, rstd, *parameters = operands
    others = (dy, x, mean, rstd, *parameters[1:])
    if spec.activation is not None or any(map(primitives.is_linear_operand, others)):
        raise NotImplementedError(
            "The gradient of a normalisation is linear in `dy`, and in `scale` if there is no activation."
        )
    scale, found = parameters[0].aval, None
    if not isinstance(ct, ad.Zero):
        back = dataclasses.replace(spec, tangents=("x",), scale=False, bias=False, out_dtype=np.dtype(scale.dtype))
        along = bind("norm_tangent", ct, x, mean, rstd, spec=back)
        found = _summed_to(product(along, dy.astype(along.dtype)), scale)
    return [None, None, None, None, found, *(None for _ in parameters[1:])]


# ---- vmap ------------------------------------------------------------------------------------------------------------


def _roles(op: str, spec: NormSpec) -> tuple[str, ...]:
    """What each operand is: "p" a parameter or its tangent, which may be shared by all examples, "x" anything else."""
    parameters = ("p",) * (spec.scale + spec.bias)
    if op == "norm":
        return ("x", *parameters)
    if op == "norm_dgrad":
        return ("x", "x", "x", "x", *parameters)
    return (*("x" if name == "x" else "p" for name in spec.tangents), "x", "x", "x", *parameters)


def _batch(op: str, spec: NormSpec, operands: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Adds a leading axis, of length 1 for a scale or bias that all examples share."""
    shared = [i for i, role in enumerate(_roles(op, spec)) if role == "p"]
    return primitives.batch_leading(op, spec, operands, dims, shared)


# ---- sharding --------------------------------------------------------------------------------------------------------


def _factors(op: str, spec: NormSpec, *avals: Any) -> Factors:
    """Along the axes of the statistics and, backward, those that gradients are summed over, devices add up."""
    roles = _roles(op, spec)
    x = next(a for a, role in zip(avals, roles, strict=True) if role == "x")
    rank = len(x.shape)
    added = {*spec.axes, *(spec.summed if op == "norm_dgrad" else ())}
    names = tuple(f"d{axis}" for axis in range(rank))
    results = _RULES[op]["results"](spec, *avals)
    found = results if isinstance(results, tuple) else (results,)
    return Factors(
        operands=tuple(alike(names, x.shape, a.shape, f"o{i}") for i, a in enumerate(avals)),
        results=tuple(alike(names, x.shape, r.shape, f"r{i}") for i, r in enumerate(found)),
        free=tuple(name for axis, name in enumerate(names) if axis - rank not in added),
        summed=tuple(name for axis, name in enumerate(names) if axis - rank in added),
        local=ft.partial(_on_device, op, spec, rank),
    )


def _on_device(op: str, spec: NormSpec, rank: int, run: Run, axes: Axes, *operands: Array) -> Any:
    """A device's part. If only gradients of parameters are summed over the mesh, the engine computes them and they are
    added over the mesh; if statistics are, XLA's formula computes the call, with every sum over the mesh."""
    devices = lambda of: [axes[f"d{axis % rank}"] for axis in of if f"d{axis % rank}" in axes]
    along = lambda of: tuple(name for found in devices(of) for name in found.names)
    if not (statistics := devices(spec.axes)):
        dx, *gradients = run(spec, *operands)
        return dx, *(jax.lax.psum(v, along(spec.summed)) for v in gradients)
    from jaxdnn._src.norm import xla

    def total(v: Array, of: Sequence[int]) -> Array:
        added = xla.XLA.total(v, of)
        return jax.lax.psum(added, along(of)) if along(of) else added

    everywhere = xla.XLA._replace(total=total, copies=math.prod(found.count for found in statistics))
    return xla.FORMULAS[op](everywhere, spec, *operands)


_RULES: dict[str, dict[str, Any]] = {
    "norm": {
        "results": _norm_results,
        "jvp": _norm_jvp,
        "transpose": _norm_transpose,
        "many": True,
        "words": "A normalisation",
    },
    "norm_tangent": {
        "results": _tangent_result,
        "jvp": _tangent_jvp,
        "transpose": _tangent_transpose,
        "words": "The derivative of a normalisation along a tangent",
    },
    "norm_dgrad": {
        "results": _dgrad_results,
        "jvp": ft.partial(primitives.jvp_of_linear, "norm_dgrad", ft.partial(_formula, "norm_dgrad")),
        "transpose": _dgrad_transpose,
        "many": True,
        "words": "The gradient of a normalisation",
    },
}
for _op, _rules in _RULES.items():
    primitives.define(_op, **_rules, batch=ft.partial(_batch, _op), factors=ft.partial(_factors, _op))
