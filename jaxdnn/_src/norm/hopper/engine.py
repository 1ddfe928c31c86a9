"""The `hopper` engine of the normalisations: which kernels serve a call, and what it guarantees.

There are kernels for each kind of axes that the statistics are taken over (`kind`). The kind of a call is decided by
its axes; the kind's `unsupported` says whether its kernels serve the call.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.norm.hopper.batch_engine import BATCHES
from jaxdnn._src.norm.hopper.group_engine import IMAGES
from jaxdnn._src.norm.hopper.kind import Kind, x_of
from jaxdnn._src.norm.hopper.rows_engine import ROWS
from jaxdnn._src.norm.spec import OPS, RANGE

KINDS = (ROWS, IMAGES, BATCHES)
LARGEST = float(np.finfo(np.float32).max)


def _kind(call: engines.Call) -> Kind | None:
    return next((kind for kind in KINDS if kind.has(call)), None)


def _unsupported(call: engines.Call) -> str | None:
    """Why no kernel serves a call, on any device."""
    x, spec = x_of(call), call.spec
    if call.op == "norm_tangent":
        return "it has no kernel for the derivative along a tangent"
    for dtype in (x.dtype, spec.out_dtype):
        if dtype not in NAMES:
            return f"its kernels take and write {', '.join(map(str, NAMES))}, not {dtype}"
    if spec.eps > LARGEST:
        return f"its kernels take an eps that float32 holds, not {spec.eps}"
    if call.op == "norm_dgrad" and call.avals[0].dtype != x.dtype:
        return f"its kernels take a gradient of x's dtype {x.dtype}, not {call.avals[0].dtype}"
    kind = _kind(call)
    if kind is None:
        over = " or ".join(kind.axes for kind in KINDS)
        return f"its kernels take statistics over {over}, not axes {spec.axes}"
    if not math.prod(x.shape):
        return "its kernels take arrays with elements"
    return kind.unsupported(call)


def _run(call: engines.Call, *operands: Array) -> Any:
    return next(kind for kind in KINDS if kind.has(call)).run(call, *operands)


def _level(call: engines.Call) -> str:
    """A row or an image depends on itself alone; gradients of scale and bias are added over the batch in its order."""
    return "batch_invariant" if call.spec.per_example else "run_to_run"


def _serves(call: engines.Call) -> bool:
    return hopper.no_device(call) is None and _unsupported(call) is None


def _slower(kind: Kind) -> Iterator[engines.Slower]:
    """What a kind's kernels name, of the calls that they serve."""
    for found in kind.slower:
        has = lambda call, found=found: kind.has(call) and _serves(call) and found.has(call)
        yield dataclasses.replace(found, has=has)


def _workspace(call: engines.Call) -> int | None:
    kind = _kind(call)
    return kind.workspace(call) if kind is not None and _unsupported(call) is None else None


hopper.declare(
    *OPS,
    run=_run,
    unsupported=_unsupported,
    level=_level,
    slower=tuple(found for kind in KINDS for found in _slower(kind)),
    workspace=_workspace,
    notes=(
        "gradients in scale and bias add over the batch: run_to_run",
        "where statistics go over an axis that is sharded, XLA's formula serves, with its sums over the mesh",
        RANGE,
    ),
)
