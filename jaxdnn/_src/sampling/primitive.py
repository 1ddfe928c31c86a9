"""The three derivatives of one trilinear form, each a primitive, of pixels x, weights w and samples y:

    F = Σ_(m, t, c) w[m, t] x[i[m, t], c] y[m, c]

    grid_sample           y[m, c] = Σ_t w[m, t] x[i[m, t], c]                     the samples
    grid_sample_pixels    x[p, c] = Σ_((m, t): i[m, t] = p) w[m, t] y[m, c]       the gradient in the image
    grid_sample_weights   w[m, t] = Σ_c x[i[m, t], c] y[m, c]                     the gradient in the weights

i is an index into the flattened image, -1 for no pixel. Each primitive is linear in its two float operands, and its
transposes are the other two: derivatives of any order need no fourth.

Where i and w are those of a grid's points by a `Rule`, the last operand is the grid: i and w are twice as many numbers
as image, grid and result together, which then never lie in memory. More primitives have w from it as well:

    grid_sample_at           y(x, grid), as grid_sample; linear in x
    grid_sample_at_pixels    x(y, grid), as grid_sample_pixels; linear in y
    grid_sample_at_tangent   y(x, grid, along), along a tangent of the grid; linear in x and in it
    grid_sample_at_slopes    grid(x, y, grid), the gradient in the grid; linear in x and in y

What w is as a function of the grid, JAX differentiates (`taps`). In arrays p and m are the d axes of the image and of
the result; axes before them are alike in all operands.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxdnn._src.core import primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.sampling.taps import Rule

# Of each primitive of the form, by its result: its float operands, in their order.
OPERANDS = {"y": ("x", "w"), "x": ("w", "y"), "w": ("x", "y")}
NAMES = {"y": "grid_sample", "x": "grid_sample_pixels", "w": "grid_sample_weights"}
AT, AT_PIXELS, AT_TANGENT, AT_SLOPES = (f"grid_sample_at{of}" for of in ("", "_pixels", "_tangent", "_slopes"))
# Of every primitive its operands and its result.
ARRAYS: dict[str, tuple[tuple[str, ...], str]] = {
    **{name: ((*OPERANDS[result], "at"), result) for result, name in NAMES.items()},
    AT: (("x", "at"), "y"),
    AT_PIXELS: (("y", "at"), "x"),
    AT_TANGENT: (("x", "at", "at"), "y"),
    AT_SLOPES: (("x", "y", "at"), "at"),
}
FLOAT32 = np.dtype(np.float32)
TAPS = {"nearest": 1, "linear": 2, "cubic": 4}  # along an axis


@dataclasses.dataclass(frozen=True)
class SampleSpec:
    """What is known when a call is traced: the image's sizes, and who must serve it at which level.

    rule: what the coordinates of a grid mean; None where indices are given.
    x, y: with a grid, the dtypes of images and of samples; all is added up in that of the weights, `wide`.
    """

    sizes: tuple[int, ...]
    engine: str | None
    level: str
    rule: Rule | None = None
    x: np.dtype = FLOAT32
    y: np.dtype = FLOAT32

    @property
    def of_grid(self) -> Rule:
        """The rule, of a call whose operand "at" is a grid."""
        if self.rule is None:
            raise ValueError("a call that is given indices has no rule for the points of a grid")
        return self.rule

    @property
    def wide(self) -> np.dtype:
        return np.dtype(np.float64 if np.float64 in (self.x, self.y) else np.float32)

    @property
    def count(self) -> int:
        """The taps of a point of a grid."""
        return TAPS[self.of_grid.mode] ** len(self.sizes)

    def taps(self, grid: Array) -> tuple[Array, Array]:
        """The indices and the weights at the points of a grid."""
        index, weights = self.of_grid.taps(grid, self.sizes)
        return index, weights.astype(self.wide)

    def weights(self, grid: Array) -> Array:
        return self.taps(grid)[1]

    def along(self, grid: Array, tangent: Array) -> Array:
        """The tangent of the weights."""
        return jax.jvp(self.weights, (grid,), (tangent,))[1]

    def slopes(self, grid: Array, of_weights: Array) -> Array:
        """The gradient in the grid, of that in the weights."""
        return jax.vjp(self.weights, grid)[1](of_weights)[0]


def _dims(spec: SampleSpec, at: Any) -> dict[str, tuple[str, ...]]:
    """The factors of the axes of every array."""
    rank = len(spec.sizes)
    lead = tuple(f"l{i}" for i in range(len(at.shape) - rank - 1))
    pixels, points = (tuple(f"{name}{i}" for i in range(rank)) for name in "pm")
    w = (*lead, *points, "t")
    return {"x": (*lead, *pixels, "c"), "w": w, "y": (*lead, *points, "c"), "at": (*w[:-1], "g") if spec.rule else w}


def results(op: str, spec: SampleSpec, *operands: Any) -> jax.ShapeDtypeStruct:
    """The result's shape and dtype."""
    (names, result), at = ARRAYS[op], operands[-1]
    dims, sizes = _dims(spec, at), {f"p{i}": n for i, n in enumerate(spec.sizes)}
    for name, aval in zip(names, operands, strict=True):
        sizes |= dict(zip(dims[name], aval.shape, strict=True))
    if spec.rule is None:
        dtype = operands[0].dtype
    else:
        sizes["t"] = spec.count
        dtype = {"x": spec.x, "y": spec.y, "w": spec.wide, "at": at.dtype}[result]
    return jax.ShapeDtypeStruct(tuple(sizes[name] for name in dims[result]), dtype)


def _jvp(result: str, spec: SampleSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    (a, b, at), (da, db, _) = primals, tangents
    run = lambda a, b: bind(NAMES[result], a, b, at, spec=spec)
    y = run(a, b)
    terms = [] if isinstance(da, ad.Zero) else [run(da, b)]
    terms += [] if isinstance(db, ad.Zero) else [run(a, db)]
    return y, primitives.added(y, terms)


def _transpose(result: str, spec: SampleSpec, ct: Array, a: Any, b: Any, at: Any) -> list[Array | None]:
    """The cotangent of the operand that is undefined: the form's derivative in it, of the other one and of `ct`."""
    unknown = 0 if primitives.is_linear_operand(a) else 1
    wanted, known = OPERANDS[result][unknown], OPERANDS[result][1 - unknown]
    given = {result: ct, known: (b, a)[unknown]}
    one, other = OPERANDS[wanted]
    found = bind(NAMES[wanted], given[one], given[other], at, spec=spec)
    return [found if i == unknown else None for i in range(3)]


def _jvp_at(op: str, spec: SampleSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    """Linear in all operands but the grid, in which the derivative is that of the form with other weights."""
    at = ARRAYS[op][0].index("at")
    found, terms = bind(op, *primals, spec=spec), []
    for i, tangent in enumerate(tangents):
        if not isinstance(tangent, ad.Zero) and not (i == at and spec.of_grid.mode == "nearest"):
            given = (*primals[:i], tangent, *primals[i + 1 :])
            terms.append(_in_grid(op, spec, primals, tangent) if i == at else bind(op, *given, spec=spec))
    return found, primitives.added(found, terms)


def _in_grid(op: str, spec: SampleSpec, operands: Any, tangent: Array) -> Array:
    """The derivative along a tangent of the grid."""
    form = lambda result, *arrays: bind(NAMES[result], *arrays, spec=spec)
    if op == AT:
        x, grid = operands
        return bind(AT_TANGENT, x, grid, tangent, spec=spec)
    if op == AT_PIXELS:
        y, grid = operands
        return form("x", spec.along(grid, tangent), y, grid)
    if op == AT_TANGENT:
        x, grid, first = operands
        return form("y", x, jax.jvp(lambda g: spec.along(g, first), (grid,), (tangent,))[1], grid)
    x, y, grid = operands
    w = form("w", x, y, grid)
    return jax.jvp(lambda g: spec.slopes(g, w), (grid,), (tangent,))[1]


def _transpose_at(op: str, spec: SampleSpec, ct: Array, *operands: Any) -> list[Array | None]:
    unknown = next(i for i, operand in enumerate(operands) if primitives.is_linear_operand(operand))
    form = lambda result, *arrays: bind(NAMES[result], *arrays, spec=spec)
    if op in (AT, AT_PIXELS):
        found = bind(AT_PIXELS if op == AT else AT, ct, operands[1], spec=spec)
    elif op == AT_TANGENT:
        x, grid, along = operands
        found = bind(AT_SLOPES, x, ct, grid, spec=spec) if unknown else form("x", spec.along(grid, along), ct, grid)
    else:
        x, y, grid = operands
        found = bind(AT_TANGENT, x, grid, ct, spec=spec) if unknown else form("x", spec.along(grid, ct), y, grid)
    return [found if i == unknown else None for i in range(len(operands))]


def _factors(op: str, spec: SampleSpec, *operands: Any) -> Factors:
    """Images, and points or channels where nothing is added up over them, are independent."""
    (names, result), dims = ARRAYS[op], _dims(spec, operands[-1])
    free = [name for name in dims[result] if name[0] in "lmc"]
    return Factors(tuple(dims[name] for name in names), (dims[result],), tuple(free))


WORDS = {
    AT: "`grid_sample`",
    **dict.fromkeys((NAMES["x"], AT_PIXELS), "The gradient of `grid_sample` in its images"),
    **dict.fromkeys((NAMES["w"], AT_SLOPES), "The gradient of `grid_sample` in its grid"),
    AT_TANGENT: "The derivative of `grid_sample` along a tangent of its grid",
}
_OF_FORM = {name: (ft.partial(_jvp, result), ft.partial(_transpose, result)) for result, name in NAMES.items()}
for _op in ARRAYS:
    _derived = _OF_FORM.get(_op) or (ft.partial(_jvp_at, _op), ft.partial(_transpose_at, _op))
    primitives.define(
        _op,
        results=ft.partial(results, _op),
        jvp=_derived[0],
        transpose=_derived[1],
        batch=ft.partial(primitives.batch_leading, _op),
        factors=ft.partial(_factors, _op),
        words=WORDS.get(_op),
    )
