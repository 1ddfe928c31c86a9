"""The engine `hopper` of CTC: which calls its kernels serve, and how."""

from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.core.engines import Slower
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.ctc.hopper import rows_ptx
from jaxdnn._src.ctc.hopper.lattice_ptx import MOST_LABELS
from jaxdnn._src.ctc.xla import flat, problem
from jaxdnn._src.hopper.ptx import NAMES

MOST_CLASSES = 1 << 18
LARGEST = 1 << 31  # rows, which are counted in 32 bits


def _sizes(call: engines.Call) -> tuple[int, int, int, int]:
    """Sequences, steps, classes, labels."""
    x, labels = (call.avals[1], call.avals[4]) if call.op == "ctc_dgrad" else call.avals[:2]
    *lead, steps, classes = x.shape
    return int(np.prod(lead)), steps, classes, labels.shape[-1]


def _dtype(call: engines.Call) -> np.dtype:
    return np.dtype(call.avals[1 if call.op == "ctc_dgrad" else 0].dtype)


def _unsupported(call: engines.Call) -> str | None:
    if _dtype(call) not in NAMES:
        return f"its kernels take {', '.join(map(str, NAMES))}, not {_dtype(call)}"
    batch, steps, classes, labels = _sizes(call)
    if not batch * steps:
        return "its kernels take at least one sequence and one step"
    if labels > MOST_LABELS:
        return f"its kernels take at most {MOST_LABELS} labels, not {labels}"
    if classes > MOST_CLASSES:
        return f"its kernels take at most {MOST_CLASSES} classes, not {classes}"
    if batch * steps * 2 >= LARGEST:
        return f"its kernels take fewer than {LARGEST // 2} steps of all sequences, not {batch * steps}"
    return None


def _run(call: engines.Call, *operands: Array) -> Any:
    return at_edges(call.spec.level, _found(call, *at_edges(call.spec.level, operands)))


def _found(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.ctc.hopper import calls

    if call.op == "ctc_dgrad":
        ct, x, shares, loss, labels, steps = operands
        p = problem(call.spec, x, labels, steps)
        return calls.dgrad(p, flat(x, 2), flat(ct, 0), flat(shares, 2), flat(loss, 0)).reshape(x.shape)
    x, _, steps, _ = operands
    p = problem(call.spec, *operands)
    if call.op == "ctc_loss":
        return calls.loss(p, flat(x, 2)).reshape(steps.shape)
    loss, shares = calls.posterior(p, flat(x, 2))
    return loss.reshape(steps.shape), shares.reshape(*steps.shape, *shares.shape[1:])


def _workspace(call: engines.Call) -> int:
    """Bytes of what is emitted, and of the states forward and backward."""
    batch, steps, _, labels = _sizes(call)
    return {"ctc_loss": 8, "ctc_posterior": 40}.get(call.op, 0) * batch * steps * (labels + 1)


def _in_passes(call: engines.Call) -> bool:
    return _unsupported(call) is None and not rows_ptx.plan(*_sizes(call), NAMES[_dtype(call)]).kept


hopper.declare(
    "ctc_loss",
    "ctc_posterior",
    "ctc_dgrad",
    unsupported=_unsupported,
    run=_run,
    level=lambda call: "portable",
    workspace=_workspace,
    slower=(Slower("classes that a block's registers do not hold were never timed", _in_passes),),
    notes=("all steps of a sequence in one kernel, forward and backward in two blocks at once",),
)
