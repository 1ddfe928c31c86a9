"""The `hopper` engine of the normalisations: what its kernels serve, and what it promises.

It serves layer and RMS normalisation over the last axes. It is chosen unasked only for calls like those measured faster
than XLA's formula on this kind of device (`benchmarks/notes-hopper-norm.md`); `engine="hopper"` takes it for all.
"""

import math
from typing import Any

import jax
from jax import Array

from jaxdnn import engines
from jaxdnn._kernels import hopper
from jaxdnn._norm import NormSpec

_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
# op -> bytes of an element -> the row lengths between which it was measured faster, and of how many elements at least.
MEASURED = {"norm": {2: (512, 4096), 4: (4096, 4096)}, "norm_dgrad": {2: (1024, 8192), 4: (4096, 4096)}}
MEASURED_ON, MEASURED_ELEMENTS = "NVIDIA H200", 1 << 24


def _x(call: engines.Call) -> Any:
    return call.avals[1 if call.op == "norm_dgrad" else 0]


def _length(call: engines.Call) -> int:
    """Elements of a row."""
    return math.prod(_x(call).shape[a] for a in call.spec.axes)


def _supports(call: engines.Call) -> str | None:
    if call.platform != "cuda":
        return f"it runs on NVIDIA GPUs of compute capability {hopper.CAPABILITY}, and this is {call.platform}"
    if reason := hopper.unavailable():
        return reason
    if (found := hopper.capability()) not in (None, hopper.CAPABILITY):
        return f"it needs compute capability {hopper.CAPABILITY}, and this device has {found}"
    return _unsupported(call)


def _unsupported(call: engines.Call) -> str | None:
    """Why the kernels do not serve a call, whatever the device."""
    spec: NormSpec = call.spec
    x = _x(call)
    if call.op == "norm_tangent":
        return "it has no kernel for the derivative along a tangent"
    for dtype in (x.dtype, spec.out_dtype):
        if dtype.name not in _SIZES:
            return f"its kernels take and write {', '.join(_SIZES)}, not {dtype}"
    if call.op == "norm_dgrad" and call.avals[0].dtype != x.dtype:
        return f"its kernels take a gradient of x's dtype {x.dtype}, not {call.avals[0].dtype}"
    if sorted(spec.axes) != list(range(-len(spec.axes), 0)):
        return f"its kernels take statistics over the last axes, not axes {spec.axes}"
    if reason := _parameters(call):
        return reason
    if not math.prod(x.shape):
        return "its kernels take arrays with elements"
    if _length(call) * x.dtype.itemsize % 16:
        return f"its kernels take rows of whole vectors of 16 bytes, not {_length(call)} of {x.dtype}"
    return _too_long(call)


def _parameters(call: engines.Call) -> str | None:
    spec, x = call.spec, _x(call)
    rank, kept = len(x.shape), len(call.spec.axes)
    for value in call.avals[1 if call.op == "norm" else 4 :]:
        if value.shape != (1,) * (rank - kept) + x.shape[rank - kept :]:
            return f"its kernels take parameters that vary along the last axes alone, not of shape {value.shape}"
    if call.op == "norm_dgrad":
        whole = [a for a in range(-rank, 0) if (a in spec.axes) == (a in spec.summed) and x.shape[a] > 1]
        if whole:
            return f"its kernels add the gradients in scale and bias over all rows, not over axes {spec.summed}"
    return None


def _too_long(call: engines.Call) -> str | None:
    from jaxdnn._kernels.hopper import norm

    names = [norm.NAMES[dtype] for dtype in (_x(call).dtype, call.spec.out_dtype)]
    plan = (norm.forward_plan if call.op == "norm" else norm.backward_plan)(_length(call), names[0], names[1])
    return None if plan else f"its kernels take rows that fit into registers, not {_length(call)} elements"


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._kernels.hopper import norm

    spec: NormSpec = call.spec
    shape, length = _x(call).shape, _length(call)
    options: dict[str, Any] = {"centred": spec.centred, "out_dtype": spec.out_dtype}
    rank, kept = len(shape), len(spec.axes)
    reduced = shape[: rank - kept] + (1,) * kept
    if call.op == "norm":
        x, *parameters = operands
        scale, bias = spec.split([p.reshape(length) for p in parameters])
        y, *statistics = norm.forward(x.reshape(-1, length), scale, bias, eps=spec.eps, **options)
        return y.reshape(shape), *(s.reshape(reduced) for s in statistics)
    dy, x, mean, rstd, *parameters = operands
    scale = parameters[0].reshape(length) if parameters else None
    rows = [v.reshape(-1, length) for v in (dy, x)]
    dx, *gradients = norm.backward(rows[0], rows[1], mean.reshape(-1), rstd.reshape(-1), scale, **options)
    own = (1,) * (rank - kept) + shape[rank - kept :]
    return dx.reshape(shape), *(g.reshape(own) for g in gradients)


def _level(call: engines.Call) -> str:
    """Rows depend on nothing else. The gradients in scale and bias add over them, in an order of the batch's."""
    return "batch_invariant" if call.spec.per_example else "run_to_run"


def _rank(call: engines.Call) -> int:
    """First where it was measured faster than XLA; backward on one device only, for it gathers what is sharded."""
    low, high = MEASURED.get(call.op, {}).get(_x(call).dtype.itemsize, (1, 0))
    alike = low <= _length(call) <= high and math.prod(_x(call).shape) >= MEASURED_ELEMENTS
    alone = call.op == "norm" or jax.local_device_count() == 1
    return 0 if call.device_kind == MEASURED_ON and alike and alone else 2


for _op in ("norm", "norm_tangent", "norm_dgrad"):
    engines.register(
        engines.Engine(
            name="hopper",
            op=_op,
            run=_run,
            supports=_supports,
            level=_level,
            rank=_rank,
            workspace=lambda call: None if call.op != "norm_dgrad" else 132 * 8 * _length(call),
            partition=lambda call: True,
            notes=(
                "gradients in scale and bias add over the batch: run_to_run",
                "backward, an array that is sharded over rows is gathered first; not within shard_map",
            ),
        )
    )
