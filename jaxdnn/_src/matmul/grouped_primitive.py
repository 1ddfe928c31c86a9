"""The primitives of grouped products, by one trilinear form of rows a, matrices b and rows y:

    F = Σ_g Σ_(m in g) Σ_k,n a[m, k] b[g, k, n] y[m, n]

    grouped_matmul          y[m, n] = Σ_k a[m, k] b[g, k, n]       rows times the matrix of their group
    grouped_matmul_wgrad    b[g, k, n] = Σ_(m in g) a[m, k] y[m, n]    the gradient in the matrices

The gradient in a is the first of y and b, transposed. Each is linear in its two float operands, and its transposes are
these again. Axes before the last two, of group sizes before the last one, are alike in all operands.
"""

import dataclasses
import functools as ft
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.primitive import wider
from jaxdnn._src.core import primitives
from jaxdnn._src.core.blending import convert
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.limits import Limits, current_limits
from jaxdnn._src.core.partitioning import Axes, Dims, Factors, Run
from jaxdnn._src.core.primitives import bind

PRODUCT, WGRAD = "grouped_matmul", "grouped_matmul_wgrad"


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """What is known when a call is traced; `transpose_b`, of `grouped_matmul`: whether b is stored as (G, N, K)."""

    accumulate: np.dtype
    out_dtype: np.dtype
    precision: str | None
    engine: str | None
    level: str
    transpose_b: bool = False
    limits: Limits = dataclasses.field(default_factory=current_limits)  # those that hold where the call is made

    # As a convolution's spec has them: nothing is done to the accumulator, and a result is converted in the call.
    epilogue: ClassVar[Epilogue] = Epilogue()
    converted: ClassVar[None] = None


def _dims(op: str, spec: GroupedSpec, rank: int) -> tuple[Dims, Dims, Dims, Dims]:
    """The factors of the operands' axes and of the result's."""
    lead = tuple(f"l{i}" for i in range(rank - 2))
    rows, sizes = (*lead, "m", "k"), (*lead, "g")
    if op == WGRAD:
        return rows, (*lead, "m", "n"), sizes, (*lead, "g", "k", "n")
    return rows, (*lead, "g", *("nk" if spec.transpose_b else "kn")), sizes, (*lead, "m", "n")


def result_shape(op: str, spec: GroupedSpec, *operands: Any) -> tuple[int, ...]:
    """The shape of the result of a call."""
    *dims, of_result = _dims(op, spec, len(operands[0].shape))
    sizes = {name: n for of, v in zip(dims, operands, strict=True) for name, n in zip(of, v.shape, strict=True)}
    return tuple(sizes[name] for name in of_result)


def _results(op: str, spec: GroupedSpec, *operands: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(result_shape(op, spec, *operands), spec.out_dtype)


def _jvp(op: str, spec: GroupedSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    (a, b, sizes), (da, db, _) = primals, tangents
    y = bind(op, a, b, sizes, spec=spec)
    terms = [] if isinstance(da, ad.Zero) else [bind(op, da, b, sizes, spec=spec)]
    terms += [] if isinstance(db, ad.Zero) else [bind(op, a, db, sizes, spec=spec)]
    return y, primitives.added(y, terms, spec.level)


def _transpose(op: str, spec: GroupedSpec, ct: Array, a: Any, b: Any, sizes: Any) -> list[Array | None]:
    of_a = primitives.is_linear_operand(a)
    dtype = np.dtype((a if of_a else b).aval.dtype)
    back = dataclasses.replace(spec, out_dtype=dtype, accumulate=wider(spec.accumulate, dtype), transpose_b=False)
    transposed = dataclasses.replace(back, transpose_b=not spec.transpose_b)
    if op == WGRAD:
        found = bind(PRODUCT, b, ct, sizes, spec=transposed) if of_a else bind(PRODUCT, a, ct, sizes, spec=back)
    elif of_a:
        found = bind(PRODUCT, ct, b, sizes, spec=transposed)
    else:
        rows = (ct, a) if spec.transpose_b else (a, ct)
        found = bind(WGRAD, *rows, sizes, spec=back)
    return [found if of_a else None, None if of_a else found, None]


def _factors(op: str, spec: GroupedSpec, *operands: Any) -> Factors:
    """Columns are independent of each other. A device's rows have group sizes of their own; terms are added up."""
    *dims, result = _dims(op, spec, len(operands[0].shape))
    lead = result[: len(operands[0].shape) - 2]
    return Factors(
        operands=tuple(dims),
        results=(result,),
        free=(*lead, *(("k", "n") if op == WGRAD else ("n",))),
        placed=("m",),
        summed=("m",) if op == WGRAD else ("k",),
        local=ft.partial(_on_device, op, spec),
        exact=jnp.issubdtype(spec.accumulate, jnp.integer),
    )


def _on_device(op: str, spec: GroupedSpec, run: Run, axes: Axes, a: Array, b: Array, sizes: Array) -> Array:
    """A device's part: of its rows, the groups that they are in; of its terms, sums that are added over the mesh."""
    if "m" in axes:
        rows, total = a.shape[-2], a.shape[-2] * axes["m"].count
        before = axes["m"].index() * rows
        starts, ends = (jnp.clip(v - before, 0, rows) for v in group_ends(sizes, total))
        sizes = ends - starts
    summed = axes.get("m" if op == WGRAD else "k")
    if summed is None:
        return run(spec, a, b, sizes)
    partial = run(dataclasses.replace(spec, out_dtype=spec.accumulate), a, b, sizes)
    return convert(jax.lax.psum(partial, summed.names), spec.out_dtype)


def group_ends(sizes: Array, rows: int) -> tuple[Array, Array]:
    """The first row of each group, and the one that follows its last: of no group beyond so many rows."""
    sizes = jnp.clip(sizes, 0, rows)
    if rows * sizes.shape[-1] < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, -1, dtype=sizes.dtype), rows)
    else:  # sizes that exceed the rows may have a sum beyond 32 bits, so that none is made that exceeds them
        ends = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, rows - a), sizes, axis=sizes.ndim - 1)
    return jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], -1), ends


for _op in (PRODUCT, WGRAD):
    primitives.define(
        _op,
        results=ft.partial(_results, _op),
        jvp=ft.partial(_jvp, _op),
        transpose=ft.partial(_transpose, _op),
        batch=ft.partial(primitives.batch_leading, _op),
        factors=ft.partial(_factors, _op),
    )
