"""Layer and RMS normalisation over the last axes by the `hopper` engine: which calls its kernels serve, and how."""

import math
from typing import Any

from jax import Array

from jaxdnn._src.core import engines
from jaxdnn._src.hopper import MULTIPROCESSORS
from jaxdnn._src.norm.hopper.kind import Kind, unlike, x_of
from jaxdnn._src.norm.spec import NormSpec, reduced

ROWS_MOST = 1 << 30


def _length(call: engines.Call) -> int:
    """Elements of a row."""
    return math.prod(x_of(call).shape[a] for a in call.spec.axes)


def _unsupported(call: engines.Call) -> str | None:
    x = x_of(call)
    if call.spec.activation is not None:
        return "its kernels for rows have no activation"
    if reason := unlike(call, "the last axes", call.spec.axes):
        return reason
    if _length(call) * x.dtype.itemsize % 16:
        return f"its kernels take rows of whole vectors of 16 bytes, not {_length(call)} of {x.dtype}"
    if (rows := math.prod(x.shape) // _length(call)) > ROWS_MOST:
        return f"its kernels take at most {ROWS_MOST} rows, which they number in 32 bits, not {rows}"
    return _too_long(call)


def _too_long(call: engines.Call) -> str | None:
    from jaxdnn._src.norm.hopper import rows

    plan = (rows.plan if call.op == "norm" else rows.backward_plan)(_length(call), x_of(call).dtype)
    return None if plan else f"its kernels take rows that fit into registers, not {_length(call)} elements"


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.norm.hopper import rows

    spec: NormSpec = call.spec
    shape, length = x_of(call).shape, _length(call)
    options: dict[str, Any] = {"centred": spec.centred, "out_dtype": spec.out_dtype}
    if call.op == "norm":
        x, *parameters = operands
        scale, bias = spec.split([p.reshape(length) for p in parameters])
        y, *statistics = rows.forward(x.reshape(-1, length), scale, bias, eps=spec.eps, **options)
        return y.reshape(shape), *(s.reshape(reduced(shape, spec.axes)) for s in statistics)
    dy, x, mean, rstd, *parameters = operands
    scale = parameters[0].reshape(length) if parameters else None
    dy, x = (v.reshape(-1, length) for v in (dy, x))
    dx, *gradients = rows.backward(dy, x, mean.reshape(-1), rstd.reshape(-1), scale, **options)
    return dx.reshape(shape), *(g.reshape(reduced(shape, spec.summed)) for g in gradients)


def _few_rows(call: engines.Call) -> bool:
    """Whether a gradient is of fewer rows than multiprocessors, or than a third with a mean, which costs XLA more."""
    few = MULTIPROCESSORS // 3 if call.spec.centred else MULTIPROCESSORS
    return call.op == "norm_dgrad" and math.prod(x_of(call).shape) // _length(call) < few


SLOWER = (
    engines.Slower(
        "so few rows leave multiprocessors idle, and the sums over them are stored for another pass",
        _few_rows,
        engines.Measured("corpus_norm", "Llama-2-7B", "rms 64 tokens", "backward", 0.75),
    ),
)

ROWS = Kind(
    axes="the last axes",
    pattern="k*r+",
    unsupported=_unsupported,
    run=_run,
    workspace=lambda call: 0 if call.op == "norm" else MULTIPROCESSORS * 8 * _length(call),
    slower=SLOWER,
)
