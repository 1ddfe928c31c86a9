"""The `hopper` engine of grouped products, for compute capability 9.0.

The kernel is imported at the first call that needs it, so that importing jaxdnn does not import Pallas.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.matmul.grouped_primitive import PRODUCT, WGRAD, GroupedSpec, result_shape

DEPTH = 64  # products that a step adds
CELL = 8  # columns of 16 bits in the 16 bytes that the copy engine moves at least


def _whole(n: int) -> int:
    """So many columns, rounded up to whole cells."""
    return n + -n % CELL


def _problem(call: engines.Call) -> Any:
    from jaxdnn._src.matmul.hopper.plan import Problem

    spec: GroupedSpec = call.spec
    a, b, sizes = call.avals
    of_b = -2 if spec.transpose_b else -1
    return Problem(
        gradient=call.op == WGRAD,
        lists=math.prod(a.shape[:-2]),
        rows=a.shape[-2],
        groups=sizes.shape[-1],
        terms=_whole(a.shape[-1]),
        columns=_whole(b.shape[of_b]),
        dtype=np.dtype(a.dtype),
        out_dtype=np.dtype(spec.out_dtype),
        transposed=spec.transpose_b,
    )


def _multiprocessors(call: engines.Call) -> int:
    from jaxdnn._src.conv.hopper import tuning

    target = call.spec.limits.multiprocessors
    return min(target or tuning.multiprocessors(), tuning.multiprocessors())


def _run(call: engines.Call, a: Array, b: Array, sizes: Array) -> Array:
    from jaxdnn._src.matmul.hopper import kernel, plan

    problem, shape = _problem(call), result_shape(call.op, call.spec, a, b, sizes)
    sms = _multiprocessors(call)
    a = _padded(a.reshape(-1, a.shape[-1]), 1)
    b = _padded(b.reshape(-1, b.shape[-1]), 1) if problem.gradient else _padded(b.reshape(-1, *b.shape[-2:]), 2)
    y = kernel.run(a, b, sizes.reshape(problem.lists, -1), problem, plan.choose(problem, sms), sms)
    if problem.gradient:
        y = y[:, : shape[-2]]
    return y[..., : shape[-1]].reshape(shape)


def _padded(v: Array, axes: int) -> Array:
    """With zeros up to whole cells of its last axes."""
    pads = [(0, 0)] * (v.ndim - axes) + [(0, -n % CELL) for n in v.shape[-axes:]]
    return jnp.pad(v, pads) if any(map(any, pads)) else v


def _unsupported(call: engines.Call) -> str | None:
    """Why no kernel serves a call, on any device."""
    spec: GroupedSpec = call.spec
    a, b, sizes = call.avals
    if a.dtype != b.dtype or a.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its kernel takes bfloat16 and float16, not {a.dtype.name} and {b.dtype.name}"
    if spec.accumulate != jnp.float32:
        return f"it accumulates in float32, not {spec.accumulate.name}"
    if spec.out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"its kernel writes bfloat16, float16 and float32, not {spec.out_dtype.name}"
    if 0 in (*a.shape, *b.shape, *sizes.shape):
        return "it has no kernel for empty arrays"
    if math.prod(a.shape[:-1]) >= 2**30:
        return "its kernel numbers the rows in 32 bits"
    return None


def _schedule(call: engines.Call) -> engines.Schedule:
    """The order of additions: over the columns of a, or over the rows of a group.

    A group's rows are known on the device alone: this is the order of a group that has all rows, and of a smaller group
    as much from its beginning as the group has rows.
    """
    a = call.avals[0]
    terms = a.shape[-2 if call.op == WGRAD else -1]
    order = np.arange(-(-terms // DEPTH) * DEPTH)
    return engines.Schedule("tensor_core", np.where(order < terms, order, -1)[None])


def _workspace(call: engines.Call) -> int:
    """Bytes of the table of items, of padded copies of operands, and of a padded result."""
    from jaxdnn._src.matmul.hopper import items, plan

    problem = _problem(call)
    of_table = (items.most(problem, plan.choose(problem, _multiprocessors(call))) + 1) * 16
    a, b, sizes = call.avals
    shape = result_shape(call.op, call.spec, a, b, sizes)
    return (
        of_table
        + _copied(a.shape, 1, 2)
        + _copied(b.shape, 1 if problem.gradient else 2, 2)
        + _copied(shape, 2 if problem.gradient else 1, problem.out_dtype.itemsize)
    )


def _copied(shape: tuple[int, ...], axes: int, width: int) -> int:
    """Bytes of an array whose last axes are padded to whole cells, 0 if they are whole: then it is not copied."""
    wide = (*shape[:-axes], *map(_whole, shape[-axes:]))
    return 0 if wide == tuple(shape) else math.prod(wide) * width


hopper.declare(
    PRODUCT,
    WGRAD,
    run=_run,
    unsupported=_unsupported,
    level=lambda call: "batch_invariant",
    accumulation=lambda call: "tensor_core",
    schedule=_schedule,
    modelled=hopper.MEASURED_ON,
    workspace=_workspace,
    notes=("tensor cores",),
)
