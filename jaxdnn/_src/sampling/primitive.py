"""The three derivatives of one trilinear form, each a primitive, of pixels x, weights w and samples y:

    F = Σ_(m, t, c) w[m, t] x[i[m, t], c] y[m, c]

    grid_sample           y[m, c] = Σ_t w[m, t] x[i[m, t], c]                     the samples
    grid_sample_pixels    x[p, c] = Σ_((m, t): i[m, t] = p) w[m, t] y[m, c]       the gradient in the image
    grid_sample_weights   w[m, t] = Σ_c x[i[m, t], c] y[m, c]                     the gradient in the weights

i is an index into the flattened image, -1 for no pixel. Each primitive is linear in its two float operands, and its
transposes are the other two: derivatives of any order need no fourth. What w is as a function of the grid, JAX
differentiates (`taps`). In arrays p and m are the d axes of the image and of the result; axes before them are alike in
all operands.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
from jax import Array

from jaxdnn._src.core import primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.primitives import bind

# Of each primitive, by its result: its float operands, in their order.
OPERANDS = {"y": ("x", "w"), "x": ("w", "y"), "w": ("x", "y")}
NAMES = {"y": "grid_sample", "x": "grid_sample_pixels", "w": "grid_sample_weights"}


@dataclasses.dataclass(frozen=True)
class SampleSpec:
    """What is known when a call is traced: the image's sizes, and who must serve it at which level."""

    sizes: tuple[int, ...]
    engine: str | None
    level: str


def _dims(spec: SampleSpec, index: Any) -> dict[str, tuple[str, ...]]:
    """The factors of the axes of every array."""
    rank = len(spec.sizes)
    lead = tuple(f"l{i}" for i in range(len(index.shape) - rank - 1))
    pixels, points = (tuple(f"{name}{i}" for i in range(rank)) for name in "pm")
    return {"x": (*lead, *pixels, "c"), "w": (*lead, *points, "t"), "y": (*lead, *points, "c")}


def results(result: str, spec: SampleSpec, a: Any, b: Any, index: Any) -> jax.ShapeDtypeStruct:
    """The result's shape and dtype."""
    dims, sizes = _dims(spec, index), {f"p{i}": n for i, n in enumerate(spec.sizes)}
    for name, aval in (*zip(OPERANDS[result], (a, b), strict=True), ("w", index)):
        sizes |= dict(zip(dims[name], aval.shape, strict=True))
    return jax.ShapeDtypeStruct(tuple(sizes[name] for name in dims[result]), a.dtype)


def _jvp(result: str, spec: SampleSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    (a, b, index), (da, db, _) = primals, tangents
    run = lambda a, b: bind(NAMES[result], a, b, index, spec=spec)
    y = run(a, b)
    terms = [] if isinstance(da, ad.Zero) else [run(da, b)]
    terms += [] if isinstance(db, ad.Zero) else [run(a, db)]
    return y, primitives.added(y, terms)


def _transpose(result: str, spec: SampleSpec, ct: Array, a: Any, b: Any, index: Any) -> list[Array | None]:
    """The cotangent of the operand that is undefined: the form's derivative in it, of the other one and of `ct`."""
    unknown = 0 if primitives.is_linear_operand(a) else 1
    wanted, known = OPERANDS[result][unknown], OPERANDS[result][1 - unknown]
    given = {result: ct, known: (b, a)[unknown]}
    one, other = OPERANDS[wanted]
    found = bind(NAMES[wanted], given[one], given[other], index, spec=spec)
    return [found if i == unknown else None for i in range(3)]


def _factors(result: str, spec: SampleSpec, a: Any, b: Any, index: Any) -> Factors:
    """Images, and points or channels where nothing is added up over them, are independent."""
    dims = _dims(spec, index)
    free = [name for name in dims[result] if name[0] in "lmc"]
    return Factors((*(dims[name] for name in OPERANDS[result]), dims["w"]), (dims[result],), tuple(free))


_WORDS = {"x": "The gradient of `grid_sample` in its images", "w": "The gradient of `grid_sample` in its grid"}
for _result, _name in NAMES.items():
    primitives.define(
        _name,
        results=ft.partial(results, _result),
        jvp=ft.partial(_jvp, _result),
        transpose=ft.partial(_transpose, _result),
        batch=ft.partial(primitives.batch_leading, _name),
        factors=ft.partial(_factors, _result),
        words=_WORDS.get(_result),
    )
