"""Normalisation by statistics over the first axes, by the `hopper` engine: which calls `batch` serves, and how."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, export, lax

from jaxdnn._src.core import engines
from jaxdnn._src.core.rounding import nearest
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.norm.hopper.kind import Kind, size_of, unlike, x_of
from jaxdnn._src.norm.spec import NormSpec, reduced

FEW_BYTES, FEW_ROWS = 3 << 19, 1024  # bytes of x


def _sizes(call: engines.Call) -> tuple[int, int]:
    """Rows and columns: how many elements a statistic is taken over, and how many statistics there are."""
    shape, over = x_of(call).shape, len(call.spec.axes)
    return math.prod(shape[:over]), math.prod(shape[over:])


def _plan(call: engines.Call) -> Any:
    """How the kernels partition a call; None if they cannot serve it."""
    from jaxdnn._src.norm.hopper import batch

    sizes, dtype = _sizes(call), NAMES[x_of(call).dtype]
    if call.op == "norm":
        return batch.forward_plan(*sizes, dtype)
    return batch.backward_plan(*sizes, dtype, call.spec.activation)


def _unsupported(call: engines.Call) -> str | None:
    x, spec = x_of(call), call.spec
    if any(map(export.is_symbolic_dim, x.shape)):
        return "its kernels over the first axes take sizes that are known when they are traced"
    if not spec.centred or spec.per_example:
        return "its kernels over the first axes are those of batch normalisation"
    if reason := unlike(call, "the last axes", tuple(a for a in range(-len(x.shape), 0) if a not in spec.axes)):
        return reason
    if _plan(call) is None:
        rows, columns = _sizes(call)
        given = f"{rows} rows of {columns} {x.dtype}"
        return (
            f"its kernels take whole vectors of 16 bytes, of fewer than 2^28 columns and at most 2^30 rows, not {given}"
        )
    return None


def _run(call: engines.Call, *operands: Array) -> Any:
    """The kernels' sums, then a pass over memory: XLA's, or with an activation a kernel's."""
    return _forward(call, *operands) if call.op == "norm" else _backward(call, *operands)


def _kept(call: engines.Call) -> tuple[int, ...]:
    """The shape of the statistics, in which the reduced axes have length 1."""
    return reduced(x_of(call).shape, call.spec.axes)


def _forward(call: engines.Call, x: Array, *parameters: Array) -> Any:
    """y = (x - μ) (r s) + b; if x is as wide as μ, the rounding error of μ is subtracted too."""
    from jaxdnn._src.norm.hopper import batch

    spec: NormSpec = call.spec
    scale, bias = spec.split(parameters)
    rows, columns = _sizes(call)
    flat = None if scale is None else scale.reshape(columns)
    found = batch.statistics(x.reshape(rows, columns), flat, eps=spec.eps)
    spread = lambda v: v.reshape(_kept(call))
    if spec.activation is not None:
        options = found.mean, found.rstd, spec.activation, _affine(columns, scale, bias), spec.out_dtype
        y = batch.activated(x.reshape(rows, columns), *options).reshape(x.shape)
        return y, spread(found.mean), spread(found.rstd), spread(found.variance)
    centred = x.astype(spec.accumulate) - spread(found.mean)
    if x.dtype == spec.accumulate:
        centred = centred - spread(found.rest)
    y = centred * spread(found.factor)
    y = y if bias is None else y + bias
    return nearest(y, spec.out_dtype), spread(found.mean), spread(found.rstd), spread(found.variance)


def _backward(call: engines.Call, dy: Array, x: Array, mean: Array, rstd: Array, *parameters: Array) -> Any:
    """dx = (r s) dy - (r s) Σ dy / n - h (r s) Σ dy h / n, ds = Σ dy h and db = Σ dy, with h = (x - μ) r.

    If x is as wide as μ, Σ h / n, which the rounding error of the saved mean leaves, is subtracted from h.
    """
    from jaxdnn._src.norm.hopper import batch

    spec: NormSpec = call.spec
    rows, columns = _sizes(call)
    # The kernel reads dy from memory, and so shall the pass that follows, for which XLA would compute it again.
    dy = lax.optimization_barrier(dy)
    wide, of_columns = (lambda v: v.reshape(rows, columns)), (lambda v: v.reshape(columns))
    scale, bias = spec.split(parameters)
    affine = [] if spec.activation is None else _affine(columns, scale, bias)
    options: dict[str, Any] = {"activation": spec.activation, "affine": affine}
    found = batch.sums(wide(dy), wide(x), of_columns(mean), of_columns(rstd), **options)
    total, along, *rest = (v.reshape(mean.shape) for v in found)
    if spec.activation is not None:
        options |= {"totals": found, "out_dtype": spec.out_dtype}
        dx = batch.gradients(wide(dy), wide(x), of_columns(mean), of_columns(rstd), **options)
        return dx.reshape(x.shape), along, total
    share = jnp.asarray(1 / rows, spec.accumulate)
    less = rest[0] * share if rest else None
    ds = along if less is None else along - less * total
    factor = rstd if scale is None else rstd * scale
    # The barrier keeps XLA from computing these again for every element in the pass that follows.
    made = (factor, factor * (total * share), factor * (ds * share))
    factor, of_g, of_gh = lax.optimization_barrier(made)
    h = (x.astype(spec.accumulate) - mean) * rstd
    h = h if less is None else h - less
    dx = (dy.astype(spec.accumulate) * factor - of_g) - h * of_gh
    return nearest(dx, spec.out_dtype), ds, total


def _affine(columns: int, scale: Array | None, bias: Array | None) -> list[Array]:
    """Scale and bias of the columns; 1 and 0 where they are not given."""
    given = (jnp.ones, scale), (jnp.zeros, bias)
    return [make(columns, jnp.float32) if v is None else v.reshape(columns) for make, v in given]


def _workspace(call: engines.Call) -> int | None:
    """Bytes of the partial sums of the splits, and of the intermediate arrays that are made of them."""
    found = _plan(call)
    if found is None:
        return None
    if call.op == "norm":
        return 4 * found.columns * (2 * found.splits + 3)
    sums = 3 if x_of(call).dtype == call.spec.accumulate else 2
    # And what is made of the sums for the pass over x: their totals, ds, and three factors.
    return 4 * found.columns * (found.splits * sums + sums + 4)


SLOWER = (
    engines.Slower("XLA's program takes fewer kernels for so few bytes", lambda call: size_of(call) < FEW_BYTES),
    engines.Slower("few blocks share the rows of so few", lambda call: _sizes(call)[0] < FEW_ROWS),
)

BATCHES = Kind(
    axes="the first axes",
    pattern="r+k+",
    unsupported=_unsupported,
    run=_run,
    workspace=_workspace,
    slower=SLOWER,
)
