"""The primitives of attention: shapes, derivatives, vmap and sharding rules.

| op | operands | results |
|---|---|---|
| attention | q, k, v, [bias], [alibi_slopes], [sinks]; constants | y, lse |
| attention_tangent | tangents of some of these; the same, y, lse; constants | dy, dlse |
| attention_dgrad | dy, dlse; the same, y, lse; constants | gradients of some of these |

The last two are linear in the operands before the first semicolon, and each is the other's transpose; `along` of the
spec names the operands whose tangents are given, or gradients asked for. Constants have no derivative: mask, lengths,
segments, the key of dropout, and `start`, the places of the first sequence, head and query that a device has.

Arrays have any number of common axes in front of those in `AXES`. Those of bias, mask, slopes, sinks and start may
have length 1, as may the axes of bias and mask: they are broadcast, and their gradients are sums.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention import xla as formulas
from jaxdnn._src.attention.spec import SAVED, SHARED, AttentionSpec, operands_of, results_of
from jaxdnn._src.core import blending, primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Axes, Factors, Run
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.core.rounding import nearest


def _linear(op: str, spec: AttentionSpec) -> int:
    """The number of operands in which an op is linear."""
    return len(operands_of(op, spec)) - len(spec.floats) - len(SAVED) - len(spec.constants)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _results(op: str, spec: AttentionSpec, *avals: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    linear = 0 if op == "attention" else _linear(op, spec)
    v = dict(zip(operands_of(op, spec)[linear:], avals[linear:], strict=True))
    if op == "attention_dgrad":
        return tuple(jax.ShapeDtypeStruct(v[name].shape, v[name].dtype) for name in spec.along)
    q = v["q"]
    wide = blending.accumulator(q.dtype)
    y = jax.ShapeDtypeStruct((*q.shape[:-1], v["v"].shape[-1]), wide if spec.wide_y else q.dtype)
    of_rows = jax.ShapeDtypeStruct(q.shape[:-1], wide)
    return (y, *[of_rows] * (len(results_of(op, spec)) - 1))


# ---- derivatives -----------------------------------------------------------------------------------------------------


def _jvp(spec: AttentionSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = bind("attention", *primals, spec=spec)
    count = len(spec.floats)
    given = {n: t for n, t in zip(spec.floats, tangents, strict=False) if not isinstance(t, ad.Zero)}
    if not given:
        return found, tuple(map(primitives.zero_tangent, found))
    along = dataclasses.replace(spec, along=tuple(given))
    others = (*primals[:count], *found[: len(SAVED)], *primals[count:])
    tangents = bind("attention_tangent", *given.values(), *others, spec=along)
    return found, (*tangents, *map(primitives.zero_tangent, found[len(SAVED) :]))


def _transpose_in_v(spec: AttentionSpec, cts: Any, *operands: Any) -> list[Any]:
    """y is linear in v alone: the gradient in v, which neither v nor y has a part in."""
    names = operands_of("attention", spec)
    if [n for n, x in zip(names, operands, strict=True) if primitives.is_linear_operand(x)] != ["v"]:
        raise NotImplementedError("`attention` is linear in `v` alone.")
    of_y, of_lse = map(ad.instantiate_zeros, cts[: len(SAVED)])
    v = names.index("v")
    whole = [*operands[:v], jnp.zeros(operands[v].aval.shape, operands[v].aval.dtype), *operands[v + 1 :]]
    found, count = bind("attention", *whole, spec=spec)[: len(SAVED)], len(spec.floats)
    along = dataclasses.replace(spec, along=("v",))
    (dv,) = bind("attention_dgrad", of_y, jnp.zeros_like(of_lse), *whole[:count], *found, *whole[count:], spec=along)
    return [dv if i == v else None for i in range(len(operands))]


def _linear_jvp(op: str, spec: AttentionSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found, linear = bind(op, *primals, spec=spec), _linear(op, spec)
    own, terms = tangents[:linear], []
    if not all(isinstance(t, ad.Zero) for t in own):
        terms = [bind(op, *map(ad.instantiate_zeros, own), *primals[linear:], spec=spec)]
    formula = ft.partial(formulas.FORMULAS[op], spec)
    terms += primitives.along_others(formula, primals, tangents, linear, len(spec.constants))
    return found, primitives.added(found, terms)


def _transpose(op: str, spec: AttentionSpec, ct: Any, *operands: Any) -> list[Any]:
    linear = _linear(op, spec)
    others = operands[linear:]
    if any(map(primitives.is_linear_operand, others)):
        raise NotImplementedError("A derivative of `attention` is linear along its tangents alone.")
    ct = tuple(map(ad.instantiate_zeros, ct))
    if op == "attention_dgrad":
        found = bind("attention_tangent", *ct, *others, spec=spec)
        return [*found, *[None] * len(others)]
    asked = [primitives.is_linear_operand(x) for x in operands[:linear]]
    along = tuple(name for name, wanted in zip(spec.along, asked, strict=True) if wanted)
    found = iter(bind("attention_dgrad", *ct, *others, spec=dataclasses.replace(spec, along=along)))
    return [*(next(found) if wanted else None for wanted in asked), *[None] * len(others)]


# ---- vmap and sharding -----------------------------------------------------------------------------------------------


def _batch(op: str, spec: AttentionSpec, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    """One more axis in front; what is the same for all of it is not repeated, unless its gradient is asked for."""
    summed = spec.along if op == "attention_dgrad" else ()
    names = operands_of(op, spec)
    shared = [i for i, n in enumerate(names) if (n in SHARED or n.startswith("score")) and n not in summed]
    return primitives.batch_leading(op, spec, operands, dims, shared)


def _factors(op: str, spec: AttentionSpec, *avals: Any) -> Factors:
    """Sequences are independent, and so are heads, those of queries with their keys'; queries but for their places.

    Each query needs all keys.
    """
    names = operands_of(op, spec)
    v = dict(zip(names, avals, strict=True))  # of a name that stands twice the shape is the same
    size = dict(zip(spec.axes("q"), v["q"].shape[-3:], strict=True)) | dict(
        zip(spec.axes("k"), v["k"].shape[-3:], strict=True)
    )
    lead = len(v["q"].shape) - 3
    group = size["n"] // size["h"] if isinstance(size["n"], int) and size["h"] else 1
    heads = "h" if group == 1 else "h g" if size["h"] > 1 else "g"
    factor = {"n": heads, "h": "one" if heads == "g" else "h", "t": "t", "s": "s", "d": "d", "e": "e"}
    whole = {f"l{i}": n for i, n in enumerate(v["q"].shape[:lead])} | size

    def dims(name: str, shape: Sequence[Any], own: str) -> tuple[str, ...]:
        axes = [*(f"l{i}" for i in range(lead)), *spec.axes(name)]
        return tuple(
            factor.get(axis, axis) if n == whole.get(axis, n) else f"{own}{axis}"
            for axis, n in zip(axes, shape, strict=True)
        )

    of_results = [r.shape for r in _results(op, spec, *avals)]
    results = tuple(dims(n, s, f"r{i}") for i, (n, s) in enumerate(zip(results_of(op, spec), of_results, strict=True)))
    free = [*(f"l{i}" for i in range(lead)), "g" if heads == "g" else "h", "t"]
    missing = {f for f in free if any(f not in " ".join(r).split() for r in results)}
    placed = free[-3 if lead else -2 :] if spec.dropout or spec.score else ["t"] if spec.knows_places else []
    return Factors(
        tuple(dims(n, a.shape, f"o{i}") for i, (n, a) in enumerate(zip(names, avals, strict=True))),
        results,
        tuple(f for f in free if f not in missing and f not in placed),
        placed=tuple(placed),
        summed=tuple(f for f in free if f in missing),
        sizes={"h": size["h"], "g": group} if heads == "h g" else {},
        local=ft.partial(_on_device, op, spec, results),
    )


def _on_device(
    op: str, spec: AttentionSpec, results: Sequence[Sequence[str]], run: Run, axes: Axes, *operands: Array
) -> Any:
    """A device's part: it stands behind those of the devices before it; gradients are added over the mesh."""
    names = operands_of(op, spec)
    q = operands[len(names) - 1 - names[::-1].index("q")]
    lead = q.ndim - 3
    if spec.dropout or spec.score or (spec.knows_places and "t" in axes):
        size = dict(zip(spec.axes("q"), q.shape[-3:], strict=True))
        parts = {f"l{lead - 1}": q.shape[lead - 1], "h": size["n"], "g": size["n"], "t": size["t"]}
        first = {f: axes[f].index().astype(jnp.int32) * n for f, n in parts.items() if f in axes}
        none = jnp.zeros((), jnp.int32)
        places = [first.get(f"l{lead - 1}", none), first.get("h", first.get("g", none)), first.get("t", none)]
        spec = dataclasses.replace(spec, given=(*spec.given, "start"))
        operands = (*operands, jnp.stack(places).reshape(*(1 for _ in range(lead)), 3))
    of_others = lambda dims: [n for f, at in axes.items() if f not in " ".join(dims).split() for n in at.names]
    over = [tuple(of_others(dims)) for dims in results]
    if not any(over):
        return run(spec, *operands)
    dtypes = {name: x.dtype for name, x in zip(names, operands, strict=False)}
    found = run(dataclasses.replace(spec, wide=True), *operands)
    added = (lax.psum(x, axes) if axes else x for x, axes in zip(found, over, strict=True))
    return tuple(nearest(x, dtypes[name]) for x, name in zip(added, spec.along, strict=True))


_RULES: dict[str, dict[str, Any]] = {
    "attention": {"jvp": _jvp, "transpose": _transpose_in_v},
    "attention_tangent": {
        "jvp": ft.partial(_linear_jvp, "attention_tangent"),
        "transpose": ft.partial(_transpose, "attention_tangent"),
        "words": "The derivative of `attention` along a tangent",
    },
    "attention_dgrad": {
        "jvp": ft.partial(_linear_jvp, "attention_dgrad"),
        "transpose": ft.partial(_transpose, "attention_dgrad"),
    },
}
for _op, _rules in _RULES.items():
    primitives.define(
        _op,
        **_rules,
        results=ft.partial(_results, _op),
        batch=ft.partial(_batch, _op),
        factors=ft.partial(_factors, _op),
        many=True,
    )
