"""The engine `hopper` of recurrences: which calls its kernels serve, and how."""

import functools as ft
import math
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.core.engines import Slower
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.rnn import primitive
from jaxdnn._src.rnn.hopper import backward_plan, plan
from jaxdnn._src.rnn.primitive import RnnSpec

LARGEST = 1 << 40  # bytes of an array, within which addresses are computed


def _value(call: engines.Call, name: str) -> Any:
    return call.avals[primitive.operands_of(call.op, call.spec).index(name)]


def _dtype(call: engines.Call) -> str:
    return NAMES[np.dtype(call.spec.narrow)]


def _sizes(call: engines.Call) -> tuple[int, int, int]:
    """Steps, sequences, units."""
    first, r = call.avals[0], _value(call, "r")
    return first.shape[0], first.shape[1], r.shape[0]


def _partition(call: engines.Call) -> Any:
    _, batch, units = _sizes(call)
    kind = backward_plan.Plan if call.op == "rnn_backward" else plan.Plan
    return kind.choose(call.spec.cell, units, _dtype(call), batch)


def _unsupported(call: engines.Call) -> str | None:
    spec: RnnSpec = call.spec
    if np.dtype(spec.narrow) not in NAMES or np.dtype(spec.narrow).itemsize != 2:
        return f"its kernels multiply bfloat16 and float16, not {np.dtype(spec.narrow).name}"
    if spec.projected:
        return "its kernels have no projection"
    if spec.cell not in plan.TILES:
        return "its kernels have no second product in a step, which the reset gate before the product needs"
    if len(call.avals[0].shape) != 3:
        return "its kernels have one recurrent matrix, not one for each head or mapped layer"
    if 0 in (sizes := _sizes(call)):
        return "its kernels take at least one step, sequence and unit"
    steps, batch, units = sizes
    if math.prod((steps, batch, units)) * 16 >= LARGEST:
        return f"its kernels take arrays of less than {LARGEST} bytes"
    chosen = _partition(call)
    if chosen is not None and chosen.cluster > plan.PORTABLE and call.device_kind not in (None, *hopper.MEASURED_ON):
        return f"clusters of {chosen.cluster} blocks were started on {', '.join(hopper.MEASURED_ON)} alone"
    if chosen is None:
        return (
            f"a cluster of at most {plan.CLUSTERS[-1]} blocks has the matrix of multiples of {plan.CHUNK} units that "
            f"divide among its warps, up to a size, not of {units}"
        )
    return None


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.rnn.hopper import calls
    from jaxdnn._src.rnn.hopper.plan import Given

    spec: RnnSpec = call.spec
    spec, operands = primitive.hoisted(call.op, spec, operands, ft.partial(primitive.multiply, spec))
    steps, batch, _ = _sizes(call)
    v = dict(zip(primitive.operands_of(call.op, spec), operands, strict=True))
    given = Given(steps, batch, spec.reverse, spec.ragged, spec.resets, spec.clip, call.op == "rnn_saved")
    if call.op == "rnn_backward":
        return tuple(calls.backward(_partition(call), given, v))
    return tuple(calls.forward(_partition(call), given, v, primitive.results_of(call.op, spec)))


def _workspace(call: engines.Call) -> int:
    """Bytes of the matrix with its rows for the gates' units; of a gradient none."""
    return 0 if call.op == "rnn_backward" else 2 * math.prod(_value(call, "r").shape)


def _rounds(call: engines.Call) -> int:
    """In how many rounds the clusters run all sequences; 0 of a call that is not served."""
    if _unsupported(call) is not None:
        return 0
    return _partition(call).rounds(_sizes(call)[1])


def _sixteen(call: engines.Call) -> Any:
    """The partition, if it is in clusters of sixteen blocks."""
    if _unsupported(call) is not None:
        return None
    found = _partition(call)
    return found if found.cluster > plan.PORTABLE else None


def _beyond(call: engines.Call, most: int, streams: bool) -> bool:
    found = _sixteen(call)
    return found is not None and _sizes(call)[1] > most and (found.streamed > 0) >= streams


SLOWER = (
    Slower(
        f"in clusters of sixteen blocks more than {plan.IN_SIXTEEN} sequences were never timed beside XLA's program",
        lambda call: _beyond(call, plan.IN_SIXTEEN, False),
    ),
    Slower(
        f"where a part of the matrix is read in each step more than {plan.STREAMED} sequences were never timed",
        lambda call: _beyond(call, plan.STREAMED, True),
    ),
    Slower(
        "with so many sequences that the clusters run in more than three rounds it was never timed",
        lambda call: _rounds(call) > plan.TIMED_ROUNDS,
    ),
)

hopper.declare(
    "rnn",
    "rnn_saved",
    "rnn_backward",
    unsupported=_unsupported,
    run=_run,
    level=lambda call: "batch_invariant",
    accumulation=lambda call: "tensor_core",
    workspace=_workspace,
    slower=SLOWER,
    notes=(
        "one kernel for all steps, in which a cluster of blocks holds the recurrent matrix",
        "exponentials and reciprocals by the special function unit",
    ),
)
