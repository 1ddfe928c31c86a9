"""Batches of the `hopper` engine: normalisation by statistics over the first axes, by the kernels of `norm_batch`."""

import math
from typing import Any

from jax import Array

from jaxdnn import engines
from jaxdnn._kernels.hopper.norm_kind import Kind, unlike, x_of
from jaxdnn._norm import NormSpec
from jaxdnn._rounded import nearest


def _sizes(call: engines.Call) -> tuple[int, int]:
    """Rows and columns: how many elements a statistic is taken over, and how many statistics there are."""
    x = x_of(call)
    rows = math.prod(x.shape[a] for a in call.spec.axes)
    return rows, math.prod(x.shape) // rows


def _unsupported(call: engines.Call) -> str | None:
    from jaxdnn._kernels.hopper import norm_batch

    x, spec = x_of(call), call.spec
    if call.op == "norm_dgrad":
        return "it has no kernel for gradients over the first axes"
    if not spec.centred or spec.per_example:
        return "its kernels over the first axes are those of batch normalisation"
    if reason := unlike(call, "the last axes", tuple(a for a in range(-len(x.shape), 0) if a not in spec.axes)):
        return reason
    rows, columns = _sizes(call)
    if norm_batch.plan(rows, columns, norm_batch.NAMES[x.dtype]) is None:
        return f"its kernels take batches of whole vectors of 16 bytes, not {rows} rows of {columns} {x.dtype}"
    return None


def _run(call: engines.Call, x: Array, *parameters: Array) -> Any:
    """y by XLA from the kernel's statistics: ((x - a) - b) r s + b', the mean being a + b."""
    from jaxdnn._kernels.hopper import norm_batch

    spec: NormSpec = call.spec
    kept = tuple(1 if a - x.ndim in spec.axes else size for a, size in enumerate(x.shape))
    found = norm_batch.statistics(x.reshape(_sizes(call)), eps=spec.eps)
    mean, rstd, variance, base, offset = (v.reshape(kept) for v in found)
    scale, bias = spec.split(parameters)
    y = ((x.astype(spec.accumulate) - base) - offset) * rstd
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return nearest(y, spec.out_dtype), mean, rstd, variance


def _workspace(call: engines.Call) -> int | None:
    from jaxdnn._kernels.hopper import norm_batch

    rows, columns = _sizes(call)
    found = norm_batch.plan(rows, columns, norm_batch.NAMES[x_of(call).dtype])
    return None if found is None else 4 * found.columns * (2 * found.splits + 2)


BATCHES = Kind(
    axes="the first axes",
    pattern="r+k+",
    unsupported=_unsupported,
    run=_run,
    measured=lambda call: False,
    workspace=_workspace,
    notes=("batch normalisation, an array that is sharded over the batch is gathered first",),
)
