"""The three convolution primitives: their shapes, derivatives, vmap and sharding rules.

y = conv(x, w), dx = conv_dgrad(dy, w) and dw = conv_wgrad(x, dy) are the three contractions of one trilinear form
sum y * conv(x, w): each is linear in each of its arrays, and the transpose of one is another. Every array has one of
three roles, and an axis of a role is one of these letters:

| role | array | letters |
|---|---|---|
| x | input, or its gradient | N, G C (the channel axis, group-major) |
| w | filter, or its gradient | C (its input axis), G K (its output axis, group-major) |
| y | output, or its gradient | N, G K (the channel axis, group-major) |
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation import epilogues
from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.activation.formulas import DERIVATIVE_FROM_OUTPUT
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.core import blending, primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.cropping import Cut
from jaxdnn._src.core.limits import Limits, current_limits
from jaxdnn._src.core.partitioning import Axes, Factors, Run, Windows
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.core.windows import FilterLayout, Layout

ROLES = {"conv": ("x", "w", "y"), "conv_dgrad": ("y", "w", "x"), "conv_wgrad": ("x", "y", "w")}
_LETTERS = {"x": "NGC", "w": "GCK", "y": "NGK"}


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """Everything about a convolution that is known when it is traced, apart from batch and channel sizes."""

    geo: Geometry
    layout: Layout
    filter: FilterLayout
    accumulate: np.dtype
    precision: str | None
    out_dtype: np.dtype
    converted: np.dtype | None = None  # what the result is converted to outside of the call, if that is known
    epilogue: Epilogue = dataclasses.field(default_factory=Epilogue)
    engine: str | None = None
    level: str = "fast"
    limits: Limits = dataclasses.field(default_factory=current_limits)  # those that hold where the call is made
    cut: Cut | None = None  # what negative padding has cut off x

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """The spatial sizes of y."""
        return self.geo.out

    @property
    def wide(self) -> np.dtype:
        """What a float epilogue is computed in: the accumulator's dtype, or float32 where that is int32."""
        return self.accumulate if jnp.issubdtype(self.accumulate, jnp.inexact) else np.dtype(np.float32)

    def channel(self, role: str) -> int:
        """The axis that a bias of the array in this role lies along."""
        return self.filter.output if role == "w" else self.layout.channel


def channels(spec: ConvSpec, op: str, a: Any, b: Any) -> tuple[int, int, int]:
    """N, C and K of a call, from its two operands; N is 0 where no operand has it."""
    arrays, groups = dict(zip(ROLES[op], (a, b), strict=False)), spec.geo.groups
    n = next(v.shape[spec.layout.batch] for r, v in arrays.items() if r in "xy")
    c = arrays["x"].shape[spec.layout.channel] if "x" in arrays else arrays["w"].shape[spec.filter.input] * groups
    k = arrays["y"].shape[spec.layout.channel] if "y" in arrays else arrays["w"].shape[spec.filter.output]
    return n, c, k


def result_shape(op: str, spec: ConvSpec, a: Any, b: Any, *_: Any) -> tuple[int, ...]:
    """The shape of the result of a call."""
    n, c, k = channels(spec, op, a, b)
    role = ROLES[op][2]
    if role == "w":
        return spec.filter.shape(spec.geo.taps, c // spec.geo.groups, k)
    return spec.layout.shape(n, spec.geo.sizes, c) if role == "x" else spec.layout.shape(n, spec.output_sizes, k)


def _result(op: str, spec: ConvSpec, *operands: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(result_shape(op, spec, *operands), spec.out_dtype)


def wider(a: Any, b: Any) -> np.dtype:
    """The narrowest float type that holds both; `jnp.promote_types` raises where promotion is set to be strict."""
    a, b = np.dtype(a), np.dtype(b)
    if a != b and a.itemsize == b.itemsize:
        return np.dtype(np.float32)
    return a if a.itemsize >= b.itemsize else b


def sum_of_nothing(op: str, spec: ConvSpec, a: Array, b: Array) -> Array | None:
    """The accumulator of a call in which nothing is added up, zeros if anything; None of any other call."""
    shape = result_shape(op, spec, a, b)
    return jnp.zeros(shape, spec.accumulate) if 0 in (*a.shape, *b.shape, *shape) else None


def finish(op: str, spec: ConvSpec, acc: Array, *operands: Array) -> Array:
    """Runs a call's epilogue on its accumulator."""
    channel = spec.channel(ROLES[op][2])
    return epilogues.apply(spec.epilogue, acc, operands, channel=channel, out_dtype=spec.out_dtype, level=spec.level)


# ---- derivatives -----------------------------------------------------------------------------------------------------


def _jvp(op: str, spec: ConvSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    if spec.epilogue.activation is None:
        y = bind(op, *primals, spec=spec)
        return y, _linear_tangent(op, spec, y, primals, tangents)
    name, parameter = spec.epilogue.activation
    if name in DERIVATIVE_FROM_OUTPUT:
        z = y = bind(op, *primals, spec=spec)
    else:
        bare = spec.epilogue.without_activation()
        plain = dataclasses.replace(spec, epilogue=bare, out_dtype=spec.wide, converted=spec.out_dtype)
        z = bind(op, *primals, spec=plain)
        y = epilogues.activated(z, name, parameter, spec.level, spec.out_dtype)
    tangent = _linear_tangent(op, spec, y, primals, tangents)
    if isinstance(tangent, ad.Zero):
        return y, tangent
    return y, epilogues.along(tangent, z, y, name, parameter, spec.level)


def _linear_tangent(op: str, spec: ConvSpec, y: Array, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangent of alpha * op(a, b) + beta * prior + residual + bias, before a relu or not, in the output's dtype."""
    if not jnp.issubdtype(spec.out_dtype, jnp.inexact):
        return primitives.zero_tangent(y)
    (a, b), (da, db) = primals[:2], tangents[:2]
    linear = dataclasses.replace(spec, epilogue=spec.epilogue.only_alpha())
    wide, edge = spec.wide, ft.partial(at_edges, spec.level)
    terms = [bind(op, da, b, spec=linear)] if not isinstance(da, ad.Zero) else []
    terms += [bind(op, a, db, spec=linear)] if not isinstance(db, ad.Zero) else []
    for name, tangent in zip(spec.epilogue.operands, tangents[2:], strict=True):
        if isinstance(tangent, ad.Zero) or name == "relu":
            continue
        term = edge(tangent).astype(wide)
        if name == "prior":
            term = blending.scaled_prior(spec.epilogue.beta, term)
        elif name == "bias":
            channel = spec.channel(ROLES[op][2])
            term = jnp.broadcast_to(blending.along_channel(term, y.ndim, channel), y.shape)
        terms.append(term)
    if not terms:
        return primitives.zero_tangent(y)
    total = terms[0] if len(terms) == 1 else ft.reduce(jnp.add, [term.astype(wide) for term in terms])
    if spec.epilogue.relu:
        total = epilogues.before_relu(total, primals[-1])
    return edge(total.astype(spec.out_dtype))


def _transpose(op: str, spec: ConvSpec, ct: Array, a: Any, b: Any, *further: Any) -> list[Array | None]:
    if further or not spec.epilogue.linear:
        raise NotImplementedError(
            f"`{op}` can be transposed where it is linear, expected no activation, bias, residual or prior, got "
            f"{spec.epilogue}; jax.vjp linearises it first."
        )
    wanted, given = (0, b) if primitives.is_linear_operand(a) else (1, a)
    role, other, out = ROLES[op][wanted], ROLES[op][1 - wanted], ROLES[op][2]
    arrays = {other: given, out: ct}
    target = next(name for name, roles in ROLES.items() if roles[2] == role)
    aval = (a, b)[wanted].aval
    wide = wider(spec.accumulate, aval.dtype)
    back = dataclasses.replace(spec, out_dtype=np.dtype(aval.dtype), accumulate=wide)
    operands = [arrays[r] for r in ROLES[target][:2]]
    cotangents: list[Array | None] = [None, None]
    cotangents[wanted] = bind(target, *operands, spec=back)
    return cotangents


# ---- vmap ------------------------------------------------------------------------------------------------------------


def _batch(op: str, spec: ConvSpec, operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Array, int]:
    """Folds the new axis into an axis the op has: the batch, one side's channels, or (both batched) the groups."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    if size == 0:  # the axis cannot be told from a folded axis of no elements
        shapes = (
            x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :]) for x, d in zip(operands, dims, strict=True)
        )
        single = (jax.ShapeDtypeStruct(shape, spec.out_dtype) for shape in shapes)
        return jnp.zeros((0, *result_shape(op, spec, *single)), spec.out_dtype), 0
    roles = _operand_roles(op, spec)
    letter = _folding_letter(op, roles, dims)
    folded = [fold(spec, role, x, d, letter, size) for role, x, d in zip(roles, operands, dims, strict=True)]
    y = bind(op, *folded, spec=of_groups(spec, size) if letter == "G" else spec)
    return unfold(spec, ROLES[op][2], y, letter, size)


def of_groups(spec: ConvSpec, times: int) -> ConvSpec:
    """The spec of a call with so many times the groups."""
    return dataclasses.replace(spec, geo=dataclasses.replace(spec.geo, groups=spec.geo.groups * times))


def _operand_roles(op: str, spec: ConvSpec) -> list[str]:
    out = ROLES[op][2]
    return [*ROLES[op][:2], *("bias:" + out if name == "bias" else out for name in spec.epilogue.operands)]


def _letters(role: str) -> str:
    return _LETTERS[role[-1]].replace("N", "") if role.startswith("bias") else _LETTERS[role]


def _folding_letter(op: str, roles: Sequence[str], dims: Sequence[int | None]) -> str:
    """A letter that every batched operand has and that no other operand of the contraction lacks by necessity."""
    out = ROLES[op][2]
    for letter in _LETTERS[out].replace("G", ""):  # N or one side's channels: nothing is added to the contraction
        has = [letter in _letters(role) for role in roles]
        if all(h for h, d in zip(has, dims, strict=True) if d is not None):
            return letter
    return "G"


def _axis(spec: ConvSpec, role: str, letter: str) -> tuple[int, int]:
    """The axis that holds a letter, and the length of what lies before the letter inside that axis (the groups)."""
    groups = spec.geo.groups
    if role.startswith("bias"):
        return 0, groups if letter in "CK" else 1
    if letter == "N":
        return spec.layout.batch, 1
    if role == "w":
        return (spec.filter.input, 1) if letter == "C" else (spec.filter.output, groups if letter == "K" else 1)
    return spec.layout.channel, groups if letter in "CK" else 1


def fold(spec: ConvSpec, role: str, x: Array, dim: int | None, letter: str, size: int) -> Array:
    if letter not in _letters(role):
        return x
    x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
    axis, before = _axis(spec, role, letter)
    shape = x.shape[1:]
    split = x.reshape(size, *shape[:axis], before, shape[axis] // before, *shape[axis + 1 :])
    merged = jnp.moveaxis(split, 0, axis + 1)
    return merged.reshape(*shape[:axis], shape[axis] * size, *shape[axis + 1 :])


def unfold(spec: ConvSpec, role: str, y: Array, letter: str, size: int) -> tuple[Array, int]:
    axis, before = _axis(spec, role, letter)
    shape = y.shape
    split = y.reshape(*shape[:axis], before, size, shape[axis] // (before * size), *shape[axis + 1 :])
    moved = jnp.moveaxis(split, axis + 1, 0)
    return moved.reshape(size, *shape[:axis], shape[axis] // size, *shape[axis + 1 :]), 0


# ---- sharding --------------------------------------------------------------------------------------------------------


def factors(op: str, spec: ConvSpec, *avals: Any) -> Factors:
    """What is not contracted may be sharded, groups whole and windows with their neighbours; the rest is added up."""
    _, c, k = channels(spec, op, *avals[:2])
    windows = {f"s{i}": w.dims(f"s{i}") for i, w in enumerate(_windows(spec))}
    sizes = {name: size for *_, found in windows.values() for name, size in found.items()}
    if (groups := spec.geo.groups) != 1:  # may be symbolic
        sizes |= {"g": groups, "c": c // groups, "k": k // groups}
    operands = tuple(_dims(spec, role, windows) for role in _operand_roles(op, spec))
    result = _dims(spec, ROLES[op][2], windows)
    even = tuple(name for name, (x, y, _) in windows.items() if x.split()[0] == y)
    kept = tuple(dim.split()[0] for dim in result)
    within = ("c", "k") if groups == 1 else ()  # a group's channels stay together
    return Factors(
        operands=operands,
        results=(result,),
        free=tuple(f for f in ("n", *within) if f in kept),
        placed=tuple(f for f in ("g", *even) if f in kept or f in even),
        summed=tuple(f for f in ("n", *within, *even) if f not in kept),
        sizes=sizes,
        local=ft.partial(_on_device, op, spec),
        exact=jnp.issubdtype(spec.accumulate, jnp.integer),
    )


def _windows(spec: ConvSpec) -> list[Windows]:
    geo = spec.geo
    axes = zip(geo.sizes, geo.out, geo.stride, geo.extents, strict=True)
    return [Windows(*axis, low) for axis, (low, _) in zip(axes, geo.padding, strict=True)]


def _dims(spec: ConvSpec, role: str, windows: Any) -> tuple[str, ...]:
    """The factors of an array's dimensions; the taps, and sizes that do not fit together, have names of their own."""
    grouped = lambda name: f"g {name}" if spec.geo.groups != 1 else name
    if role.startswith("bias"):
        return (grouped({"x": "c", "y": "k"}[role[-1]]),)
    if role == "w":
        return tuple({"I": "c", "O": grouped("k")}.get(a, f"tap{a.lower()}") for a in spec.filter.axes)
    names = {"N": "n", "C": grouped("c" if role == "x" else "k")}
    names |= {spec.layout.axes[axis]: windows[f"s{i}"][role == "y"] for i, axis in enumerate(spec.layout.spatial)}
    return tuple(names[letter] for letter in spec.layout.axes)


def _on_device(op: str, spec: ConvSpec, run: Run, axes: Axes, a: Array, b: Array, *operands: Array) -> Array:
    """A device's part: its groups; its positions, with the rows that its windows share with other devices; its terms.

    Rows beyond the ends of x are its padding, so no part is padded but where the op gives dx.
    """
    out = ROLES[op][2]
    arrays = dict(zip(ROLES[op], (a, b), strict=False))
    sizes, padding = list(spec.geo.sizes), list(spec.geo.padding)
    for i, (axis, window) in enumerate(zip(spec.layout.spatial, _windows(spec), strict=True)):
        if (devices := axes.get(f"s{i}")) is None:
            continue
        if out == "x":
            arrays["y"], padding[i] = window.around_outputs(arrays["y"], axis, devices)
            sizes[i] //= devices.count
        else:
            arrays["x"] = window.around_inputs(arrays["x"], axis, devices)
            sizes[i], padding[i] = arrays["x"].shape[axis], (0, 0)
    groups = spec.geo.groups // axes["g"].count if "g" in axes else spec.geo.groups
    geo = dataclasses.replace(spec.geo, padding=tuple(padding), sizes=tuple(sizes), groups=groups)
    part = dataclasses.replace(spec, geo=geo)
    given = [arrays[role] for role in ROLES[op][:2]]
    kept = {"g", *(() if out == "w" else axes.keys() - {"n", "c", "k"})}
    if not (summed := tuple(n for factor, devices in axes.items() if factor not in kept for n in devices.names)):
        return run(part, *given, *operands)
    sums = Epilogue(integer=jnp.issubdtype(spec.accumulate, jnp.integer))
    bare = dataclasses.replace(part, epilogue=sums, out_dtype=spec.accumulate, converted=spec.out_dtype)
    return finish(op, spec, jax.lax.psum(run(bare, *given), summed), *operands)


for _op in ROLES:
    primitives.define(
        _op,
        results=ft.partial(_result, _op),
        jvp=ft.partial(_jvp, _op),
        transpose=ft.partial(_transpose, _op),
        batch=ft.partial(_batch, _op),
        factors=ft.partial(factors, _op),
    )
