"""The `hopper` engine of dropout, alone or with bias, activation and residual: which calls the kernels serve.

XLA fuses dropout alone with the operations around it, but not with a kernel. So a kernel serves dropout alone only if
the engine is named, and dropout with bias, activation or residual also where it was measured to be faster.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.activation import formulas
from jaxdnn._src.core import engines
from jaxdnn._src.dropout.hopper.plan import Plan
from jaxdnn._src.dropout.primitive import BLOCK, OPS, DropoutSpec, operand_names
from jaxdnn._src.hopper.ptx import NAMES

FEW, FEW_IN_X, FEW_WITH_BIAS = 1 << 21, 1 << 25, 1 << 20  # elements, as `SLOWER` uses them
FEW_OF_EXAMPLE, FEW_COLUMNS, FEW_ROWS = 1 << 19, 768, 1024
LARGEST = 1 << 30  # groups of elements that one key counts


def _operands(call: engines.Call) -> dict[str, Any]:
    return dict(zip(operand_names(call.op, call.spec), call.avals, strict=True))


def _unsupported(call: engines.Call) -> str | None:
    """Why no kernel serves a call, on any device."""
    spec, operands = call.spec, _operands(call)
    if call.partitioned:
        return "it counts from the first element of an array, and each of several devices has a part of it"
    if "dbias" in operands:
        return "it has no kernel for the derivative along a tangent of the bias"
    arrays = {name: v for name, v in operands.items() if name not in ("key", "start")}
    dtypes = [*(v.dtype for v in arrays.values()), _out_dtype(call)]
    if odd := [dtype for dtype in dtypes if dtype not in NAMES]:
        return f"its kernels take and write {', '.join(map(str, NAMES))}, not {odd[0]}"
    if _activation(spec) == "table" and operands["x"].dtype not in formulas.NARROW:
        return f"its kernels look activations such as {spec.activation} up, which serves 16 bits, not {dtypes[0]}"
    if not math.prod(call.avals[0].shape):
        return "it has nothing to do for an empty array"
    if spec.shift != 0:
        return "its kernels start at a counter's first element: at an `offset` known when traced, a multiple of four"
    return _misplaced(call, operands)


def _misplaced(call: engines.Call, operands: dict[str, Any]) -> str | None:
    """Why the kernels cannot read the arrays' memory layout, or None."""
    spec: Any = call.spec
    leads, shape = _split(call)
    if not _is_sorted(call, spec.order):
        return _unlike_planes(call, operands)
    for name in ("bias", "key", "start"):
        lead = operands[name].shape[: spec.leading] if name in operands else ()
        if math.prod(lead) not in (1, leads):
            return f"under vmap its kernels take a {name} for each example or one for all"
    if "bias" in operands and _width(call, operands) is None:
        return f"its kernels take a bias along the last axes, not of shape {operands['bias'].shape[spec.leading :]}"
    if call.op == "dropout_dgrad":
        rows = tuple(range(len(shape) - len(_own_axes(call))))
        if [a for a in range(len(shape)) if a in spec.summed and shape[a] > 1] != [a for a in rows if shape[a] > 1]:
            return f"its kernels add the gradient in a bias along the last axes, not the sum over {spec.summed}"
        if leads > 1:
            return "under vmap it has no kernel for the gradient in the bias"
    plan = _plan(call)
    for what, size in (("elements", plan.size), ("elements of the bias", plan.width)):
        if size % plan.elements:
            return f"its kernels take whole groups of {plan.elements} elements, not {size} {what}"
    return _too_large(plan)


def _is_sorted(call: engines.Call, axes: Sequence[int]) -> bool:
    """Whether axes are in memory order; those of length 1 may be anywhere."""
    _, shape = _split(call)
    long = [axis for axis in axes if shape[axis] > 1]
    return long == sorted(long)


def _unlike_planes(call: engines.Call, operands: dict[str, Any]) -> str | None:
    """Why the kernel for channels first, with a plane for each channel, does not serve the call; or None."""
    spec: Any = call.spec
    leads, shape = _split(call)
    if not _is_sorted(call, spec.order[:-1]):
        return "its kernels take channels last, or channels first behind the batch, and no channel vectors"
    if leads > 1:
        return "under vmap it has no kernel for channels first"
    if call.op == "dropout_dgrad":
        return "it has no kernel for the gradient in the bias of channels first"
    channel = spec.order[-1]
    own = tuple(n if axis == channel else 1 for axis, n in enumerate(shape))
    if "bias" in operands and operands["bias"].shape[spec.leading :] != own:
        return f"its kernel of channels first takes a bias along the channels, not of shape {operands['bias'].shape}"
    plan = _plan(call)
    if plan.channels % BLOCK or plan.plane % plan.elements:
        return (
            f"its kernel of channels first takes fours of channels and whole groups of {plan.elements} elements of a "
            f"plane, not {plan.channels} planes of {plan.plane}"
        )
    return _too_large(plan)


def _too_large(plan: Plan) -> str | None:
    if plan.groups > LARGEST:
        return f"its kernels take at most {LARGEST * plan.elements} elements, not {plan.size}"
    if plan.leads * -(-plan.groups // 128) >= 2**31:
        return f"a grid has fewer than 2^31 blocks, too few for {plan.leads} examples of {plan.size} elements"
    return None


def _split(call: engines.Call) -> tuple[int, tuple[int, ...]]:
    """How many examples, and the shape of one."""
    shape, leading = call.avals[0].shape, call.spec.leading
    return math.prod(shape[:leading]), tuple(shape[leading:])


def _own_axes(call: engines.Call) -> tuple[int, ...]:
    """Of `dropout_dgrad`, the axes along which the bias varies."""
    _, shape = _split(call)
    return tuple(a for a in range(len(shape)) if a not in call.spec.summed)


def _own_width(call: engines.Call) -> int:
    """Of `dropout_dgrad`, elements of the bias."""
    _, shape = _split(call)
    return math.prod(shape[a] for a in _own_axes(call))


def _width(call: engines.Call, operands: dict[str, Any]) -> int | None:
    """Elements of the bias, if it varies along the last axes alone."""
    _, shape = _split(call)
    own = operands["bias"].shape[call.spec.leading :]
    width = math.prod(own)
    for axis in range(len(shape)):
        if math.prod(own[axis:]) == math.prod(shape[axis:]) == width:
            return width
    return None


def _activation(spec: DropoutSpec) -> str:
    """What a kernel calls it: an activation of one formula, or a table."""
    return "table" if spec.looked_up else spec.activation


def _out_dtype(call: engines.Call) -> np.dtype:
    return np.dtype(call.spec.out_dtype or call.avals[0].dtype)


def _plan(call: engines.Call) -> Plan:
    spec, operands = call.spec, _operands(call)
    leads, shape = _split(call)
    size = math.prod(shape)
    arrays = tuple((name, NAMES[np.dtype(v.dtype)]) for name, v in operands.items() if name not in ("key", "start"))
    width = math.prod(operands["bias"].shape[spec.leading :]) if "bias" in operands else 0
    if call.op == "dropout_dgrad":
        width = _own_width(call)
    channel = spec.order[-1] if shape else 0
    apart = not _is_sorted(call, spec.order)
    mapped = [n for n in ("bias", "key", "start") if n in operands and math.prod(operands[n].shape[: spec.leading]) > 1]
    return Plan(
        backward=call.op in ("dropout_tangent", "dropout_dgrad"),
        arrays=arrays,
        result=NAMES[_out_dtype(call)],
        activation=_activation(spec),
        parameter=float(np.float32(spec.parameter)) if isinstance(spec.parameter, float) else 0.0,
        limit=spec.threshold,
        scale=float(np.float32(spec.scale)),
        size=size,
        width=width,
        start=spec.start,
        plane=math.prod(shape[channel + 1 :]) if apart else 0,
        channels=shape[channel] if apart else 0,
        leads=leads,
        mapped=tuple(mapped),
    )


def _table(call: engines.Call) -> Array:
    """The activation or its slope, times the scale."""
    spec: DropoutSpec = call.spec
    dtype, scale = np.dtype(_operands(call)["x"].dtype), float(np.float32(spec.scale))
    if call.op == "dropout":
        return jnp.asarray(formulas.table(spec.activation, spec.parameter, scale, dtype, np.dtype(np.float32)))
    return jnp.asarray(formulas.slope_table(spec.activation, spec.parameter, scale, dtype))


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.dropout.hopper import calls

    plan, shape, dtype = _plan(call), call.avals[0].shape, _out_dtype(call)
    given = dict(zip(operand_names(call.op, call.spec), operands, strict=True))
    if plan.activation == "table":
        given["table"] = _table(call)
    ordered = [given[name] for name in plan.operands]
    if call.op != "dropout_dgrad":
        return calls.run(plan, ordered, shape, dtype)
    dx, total = calls.run_columns(plan, ordered, shape, dtype)
    return dx, total.reshape([1 if a in call.spec.summed else n for a, n in enumerate(shape)])


def _level(call: engines.Call) -> str:
    """Element by element; the gradient in a bias adds over the batch."""
    return "run_to_run" if call.op == "dropout_dgrad" else "portable"


def _widest(call: engines.Call) -> int:
    """Bytes of an element of the widest of its large arrays."""
    arrays = (v.dtype for name, v in _operands(call).items() if name not in ("bias", "dbias", "key", "start"))
    return max(np.dtype(dtype).itemsize for dtype in (*arrays, _out_dtype(call)))


def _has_few(call: engines.Call) -> bool:
    least = {"dropout": FEW, "dropout_tangent": FEW_IN_X, "dropout_dgrad": FEW_WITH_BIAS}.get(call.op, 0)
    return math.prod(call.avals[0].shape) < (FEW_IN_X if _widest(call) > 2 else least)


def _has_short_examples(call: engines.Call) -> bool:
    return math.prod(call.avals[0].shape) < FEW_OF_EXAMPLE * _split(call)[0]


def _has_narrow_columns(call: engines.Call) -> bool:
    if call.op != "dropout_dgrad":
        return False
    width = max(_own_width(call), 1)
    return width < FEW_COLUMNS or math.prod(call.avals[0].shape) // width < FEW_ROWS


SLOWER = (
    engines.Slower("XLA fuses dropout alone with the operations around it", lambda call: call.spec.is_alone),
    engines.Slower("where all is kept nothing is drawn", lambda call: not call.spec.threshold),
    engines.Slower(
        "XLA's program is as fast where 4 bytes an element bind it",
        lambda call: call.op != "dropout_dgrad" and _widest(call) > 2,
    ),
    engines.Slower("it has few elements to draw for", _has_few),
    engines.Slower("each example starts a block of its own", _has_short_examples),
    engines.Slower("its blocks share the sums of few columns or of few rows", _has_narrow_columns),
)


def _workspace(call: engines.Call) -> int:
    from jaxdnn._src.dropout.hopper.calls import columns

    if call.op != "dropout_dgrad":
        return 0
    plan = _plan(call)
    return 4 * plan.width * columns(plan).splits


hopper.declare(
    *OPS,
    run=_run,
    unsupported=_unsupported,
    level=_level,
    slower=SLOWER,
    workspace=_workspace,
    partition=lambda call: False,
    notes=("Philox4x32-10, drawn again for the backward pass",),
)
