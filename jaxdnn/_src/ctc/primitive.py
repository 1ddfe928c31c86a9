"""The primitives of CTC: shapes, derivatives, vmap and sharding rules.

| op | operands | result | derivative in x |
|---|---|---|---|
| ctc_loss | x, labels, steps, count | loss | ctc_tangent at the posterior |
| ctc_posterior | x, labels, steps, count | loss, posterior | ctc_tangent, ctc_covariance |
| ctc_align | x, labels, steps, count | the label of each step, (..., T) | none |
| ctc_tangent | dx, x, posterior, loss, labels, steps | the loss's derivative along dx | a formula |
| ctc_dgrad | ct, x, posterior, loss, labels, steps | its transpose: the gradient | a formula |
| ctc_covariance | v, x, labels, steps, count | the posterior's derivative along v, symmetric | a formula |
| ctc_emitted | x, labels | the elements (..., T, L + 1) of x for the blank and the labels | linear |
| ctc_by_class | v, labels | its transpose: the sums (..., T, V) of v by class | linear |

x has shape (..., T, V), labels (..., L), the posterior (..., T, L + 1); the other arrays have the leading axes alone.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.nn import softmax  # JAX's own, whatever `jaxdnn.patch` puts under its name

from jaxdnn._src.core import blending, partitioning, primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.primitives import bind

LOWEST = -1e30  # a logarithm in place of that of 0, with which formulas have no NaN


@dataclasses.dataclass(frozen=True)
class CtcSpec:
    """What is known when a call is traced.

    Attributes:
      normalize: "softmax", or "none" for scores that are logarithms.
      classes: V, for `ctc_by_class`, whose operands do not tell.
    """

    blank: int
    normalize: str
    engine: str | None
    level: str
    classes: int = 0


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _losses(spec: CtcSpec, x: Any, labels: Any, steps: Any, count: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(steps.shape, blending.accumulator(x.dtype))


def _posteriors(spec: CtcSpec, x: Any, labels: Any, steps: Any, count: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = (*steps.shape, x.shape[-2], labels.shape[-1] + 1)
    loss = _losses(spec, x, labels, steps, count)
    return loss, jax.ShapeDtypeStruct(shape, loss.dtype)


def _alignments(spec: CtcSpec, x: Any, labels: Any, steps: Any, count: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*steps.shape, x.shape[-2]), np.int32)


def _like(which: int, spec: CtcSpec, *avals: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(avals[which].shape, avals[which].dtype)


# ---- derivatives -----------------------------------------------------------------------------------------------------


def _loss_jvp(spec: CtcSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    x, labels, steps, _ = primals
    if isinstance(tangents[0], ad.Zero):
        loss = bind("ctc_loss", *primals, spec=spec)
        return loss, primitives.zero_tangent(loss)
    loss, posterior = bind("ctc_posterior", *primals, spec=spec)
    return loss, bind("ctc_tangent", tangents[0], x, posterior, loss, labels, steps, spec=spec)


def _posterior_jvp(spec: CtcSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, labels, steps, _ = primals
    loss, posterior = found = bind("ctc_posterior", *primals, spec=spec)
    if isinstance(tangents[0], ad.Zero):
        return found, tuple(map(primitives.zero_tangent, found))
    along = bind("ctc_tangent", tangents[0], x, posterior, loss, labels, steps, spec=spec)
    # What is added to all scores of a step changes no share of a path.
    v = _emitted(spec, tangents[0].astype(posterior.dtype), labels)
    return found, (along, bind("ctc_covariance", v, *primals, spec=spec))


def _align_jvp(spec: CtcSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    found = bind("ctc_align", *primals, spec=spec)
    return found, primitives.zero_tangent(found)


def _emitted(spec: CtcSpec, x: Array, labels: Array) -> Array:
    return bind("ctc_emitted", x, labels, spec=dataclasses.replace(spec, classes=x.shape[-1]))


def _emitted_result(spec: CtcSpec, x: Any, labels: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-1], labels.shape[-1] + 1), x.dtype)


def _by_class_result(spec: CtcSpec, v: Any, labels: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*v.shape[:-1], spec.classes), v.dtype)


def _gradient(spec: CtcSpec, x: Array, posterior: Array, loss: Array, labels: Array, steps: Array) -> Array:
    """The gradient as a formula, whose derivatives are those of the ops in `ctc_tangent` and `ctc_dgrad`."""
    time = lax.broadcasted_iota(jnp.int32, (*steps.shape, x.shape[-2], 1), steps.ndim)
    live = (time < steps[..., None, None]) & jnp.isfinite(loss)[..., None, None]
    x = jnp.where(live, x, jnp.zeros_like(x)).astype(posterior.dtype)
    counted = bind("ctc_by_class", posterior, labels, spec=dataclasses.replace(spec, classes=x.shape[-1]))
    found = (softmax(x, axis=-1) if spec.normalize == "softmax" else jnp.zeros_like(x)) - counted
    return jnp.where(live, found, jnp.zeros_like(found))


def _dgrad_formula(spec: CtcSpec, ct: Array, x: Array, *others: Array) -> Array:
    return (ct[..., None, None] * _gradient(spec, x, *others)).astype(x.dtype)


def _tangent_formula(spec: CtcSpec, dx: Array, x: Array, posterior: Array, *others: Array) -> Array:
    terms = _gradient(spec, x, posterior, *others) * dx.astype(posterior.dtype)
    return jnp.sum(terms, (-2, -1))


def _transpose(other: str, spec: CtcSpec, ct: Array, first: Any, *others: Any) -> list[Array | None]:
    """Of an op that is linear in its first operand, whose transpose is another op."""
    if not primitives.is_linear_operand(first) or any(map(primitives.is_linear_operand, others)):
        raise NotImplementedError("A derivative of `ctc_loss` is linear along its tangent alone.")
    return [bind(other, ct, *others, spec=spec), *[None] * len(others)]


def _covariance_formula(spec: CtcSpec, v: Array, x: Array, labels: Array, steps: Array, count: Array) -> Array:
    """The covariance by differentiation of a logarithm, which JAX differentiates further."""
    emitted = _emitted(spec, x.astype(v.dtype), labels)
    log = lambda emitted: jnp.sum(_log_probability(emitted, labels, steps, count))
    return jax.jvp(jax.grad(log), (jnp.maximum(emitted, LOWEST),), (v,))[1]


def _log_probability(emitted: Array, labels: Array, steps: Array, count: Array) -> Array:
    """(...): that of the labels, from scores (..., T, L + 1) that are logarithms."""
    pad = lambda x, low, high: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(low, high)], constant_values=LOWEST)
    blanks = jnp.full(emitted[..., 0, :].shape, LOWEST, emitted.dtype).at[..., 0].set(0)
    skips = jnp.pad(labels[..., 1:] != labels[..., :-1], [(0, 0)] * (labels.ndim - 1) + [(1, 0)])[
        ..., : labels.shape[-1]
    ]

    def step(states: tuple[Array, Array], at: tuple[Array, Array]) -> tuple[Any, None]:
        (blanks, labelled), (own, t) = states, at
        before = pad(labelled, 1, 0)
        skipped = jnp.where(skips, before[..., :-1], jnp.full_like(labelled, LOWEST))
        new = (
            own[..., :1] + jnp.logaddexp(blanks, before),
            own[..., 1:] + jnp.logaddexp(jnp.logaddexp(labelled, blanks[..., :-1]), skipped),
        )
        live = (t < steps)[..., None]
        return tuple(jnp.where(live, a, b) for a, b in zip(new, (blanks, labelled), strict=True)), None

    start = blanks, jnp.full(labels.shape, LOWEST, emitted.dtype)
    times = jnp.arange(emitted.shape[-2], dtype=steps.dtype)
    (blanks, states), _ = lax.scan(step, start, (jnp.moveaxis(emitted, -2, 0), times))
    at = lambda x, place: jnp.take_along_axis(x, jnp.maximum(place, 0)[..., None], -1)[..., 0]
    last = at(pad(states, 1, 0), count)
    log = jnp.logaddexp(at(blanks, count), last)
    return jnp.where(log > LOWEST / 2, log, jnp.zeros_like(log))


# ---- sharding --------------------------------------------------------------------------------------------------------


def _factors(op: str, spec: CtcSpec, *avals: Any) -> Factors:
    """Sequences are independent; a device needs all steps and classes of its own."""
    found = _RULES[op]["results"](spec, *avals)
    results = found if isinstance(found, tuple) else (found,)
    # Of the operands of the two linear maps, the labels have the fewest axes: the leading ones and their own.
    own = 1 if op in ("ctc_emitted", "ctc_by_class") else 0
    return partitioning.leading(avals, results, min(len(aval.shape) for aval in avals) - own)


_RULES: dict[str, dict[str, Any]] = {
    "ctc_loss": {"results": _losses, "jvp": _loss_jvp},
    "ctc_posterior": {"results": _posteriors, "jvp": _posterior_jvp, "many": True},
    "ctc_align": {"results": _alignments, "jvp": _align_jvp},
    "ctc_tangent": {
        "results": ft.partial(_like, 3),
        "jvp": ft.partial(primitives.jvp_of_linear, "ctc_tangent", _tangent_formula, constant=3),
        "transpose": ft.partial(_transpose, "ctc_dgrad"),
        "words": "The derivative of `ctc_loss` along a tangent",
    },
    "ctc_dgrad": {
        "results": ft.partial(_like, 1),
        "jvp": ft.partial(primitives.jvp_of_linear, "ctc_dgrad", _dgrad_formula, constant=3),
        "transpose": ft.partial(_transpose, "ctc_tangent"),
        "words": "The gradient of `ctc_loss`",
    },
    "ctc_covariance": {
        "results": ft.partial(_like, 0),
        "jvp": ft.partial(primitives.jvp_of_linear, "ctc_covariance", _covariance_formula, constant=3),
        "transpose": ft.partial(_transpose, "ctc_covariance"),
        "words": "A derivative of CTC's posterior",
    },
    "ctc_emitted": {
        "results": _emitted_result,
        "jvp": ft.partial(primitives.jvp_of_linear, "ctc_emitted", None, constant=1),
        "transpose": ft.partial(_transpose, "ctc_by_class"),
        "words": "A derivative of CTC's posterior",
    },
    "ctc_by_class": {
        "results": _by_class_result,
        "jvp": ft.partial(primitives.jvp_of_linear, "ctc_by_class", None, constant=1),
        "transpose": ft.partial(_transpose, "ctc_emitted"),
        "words": "A derivative of CTC's posterior",
    },
}
for _op, _rules in _RULES.items():
    batch = ft.partial(primitives.batch_leading, _op)
    primitives.define(_op, **_rules, batch=batch, factors=ft.partial(_factors, _op))
