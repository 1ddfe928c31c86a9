"""Layer and RMS normalisation of rows on Hopper: rows in registers, in plain Pallas.

Forward. Rows are contiguous in memory. 32 to 1024 threads load the 16-byte vectors of a row into registers, all before
the first use, and compute mean and centred second moment from them: x is read once. There are many small blocks: while
some wait for memory, others compute. For long rows one persistent block on each multiprocessor processes many rows,
because scale and bias stay in its registers; it loads the next rows while it computes some.

Backward. One persistent block of 512 threads on each multiprocessor processes many rows, because the gradients of scale
and bias stay in its registers; it loads the next rows while it computes some. The blocks store their sums, which XLA
adds.

`hopper.rows` states the order of additions. What the compiler may contract to fused multiply-adds is what has no other
use: products that are added, and scale and bias. Means are not, so that a row has the same bits whatever rows are
computed beside it.

Limits. The statistics' axes are the last ones, and scale and bias vary along these only; a row's bytes are a multiple
of 16, and fit into a block's registers; bfloat16, float16 or float32.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.hopper import MULTIPROCESSORS
from jaxdnn._src.hopper.ptx import VECTOR_BYTES
from jaxdnn._src.hopper.row_kernel import Plan, Step, over_rows
from jaxdnn._src.hopper.rows import Exchange, Rows

F32 = jnp.float32


def plan(length: int, dtype: Any, rows: int = 1 << 30) -> Plan | None:
    """How rows of a length are partitioned over threads; None if they do not fit.

    A thread has sixteen elements of a row, and of several rows at a time if there are many and elements have 16 bits.
    256 and 512 threads have more, 24 or 32, where the alternative is twice as many threads. This was fastest on an H200
    (`benchmarks/notes-hopper-norm.md`), with one persistent block on each multiprocessor for more than 2048 elements.
    Threads, and so the order of additions, depend on length and dtype alone.
    """
    narrow = np.dtype(dtype).itemsize == 2
    vectors = length * np.dtype(dtype).itemsize // VECTOR_BYTES
    most = {32: 2, 64: 2, 128: 2, 256: 3, 512: 3, 1024: 2} if narrow else {32: 4, 64: 4, 128: 4, 256: 8, 512: 8}
    threads = next((t for t, slots in most.items() if vectors <= slots * t), None)
    if threads is None:
        return None
    stays = narrow and threads > 128
    slots = threads * -(-vectors // threads)  # of a row
    at_once = next(rows for rows in (4, 2, 1) if rows * slots <= 2048) if narrow else 1
    many = rows >= (2 * at_once if stays else 16) * MULTIPROCESSORS
    return Plan(threads, at_once if many else 1, stays)


def forward(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    centred: bool,
    eps: float,
    out_dtype: Any,
    config: Plan | None = None,
    interpret: Any = None,
) -> Any:
    """y, mean, rstd and variance of x (rows, length)."""
    count, length = x.shape
    chosen = config or plan(length, x.dtype, count)
    given = {name: v for name, v in (("scale", scale), ("bias", bias)) if v is not None}

    def work(step: Step) -> Any:
        rows = step.rows
        d, mean, variance = _statistics(rows, step.exchange, step.sources[0], centred=centred)
        rstd = lax.rsqrt(variance + eps)

        def y() -> Iterator[tuple[Array]]:
            for slot in range(rows.slots):
                of_slot = dict(zip(given, step.parameters(slot), strict=True))
                y = d[slot] * rows.wide(rstd)
                y = y * of_slot["scale"] if "scale" in given else y
                yield (y + of_slot["bias"] if "bias" in given else y,)

        return y(), (mean, rstd, variance)

    exchanges = 1 if not centred else 3 if x.dtype == F32 else 2
    options: dict[str, Any] = {"result": out_dtype, "statistics": (F32,) * 3, "exchanges": exchanges}
    return over_rows(work, chosen, [x], [*given.values()], name="norm", interpret=interpret, **options)


def _statistics(rows: Rows, exchange: Exchange, x: list[Array], *, centred: bool) -> tuple[list[Array], Array, Array]:
    """x - mean, mean and variance of the rows."""

    def mean_of(slots: list[Array]) -> Array:
        return lax.optimization_barrier(exchange.join(rows.parts(slots))[0] * (1 / rows.length))

    d, mean = [slot.astype(F32) for slot in x], rows.zeros()
    if centred:
        mean = mean_of(d)
        d = [v - rows.wide(mean) for v in d]
        if x[0].dtype == F32:  # corrects for the rounding of the mean
            rest = mean_of(d)
            d, mean = [v - rows.wide(rest) for v in d], mean + rest
    return d, mean, mean_of([v * v for v in d])


def backward_plan(length: int, dtype: Any) -> Plan | None:
    """How rows of a length are partitioned over threads for the gradients; None if they do not fit.

    A thread has at most 16 elements, because it keeps sums too; scale beside them where rows of 16 bits leave registers
    for it.
    """
    narrow = np.dtype(dtype).itemsize == 2
    vectors = length * np.dtype(dtype).itemsize // VECTOR_BYTES
    threads = next((t for t in (32, 64, 128, 256, 512) if vectors <= (2 if narrow else 4) * t), None)
    return None if threads is None else Plan(threads, stays=True, groups=512 // max(threads, 128), keeps=narrow)


def backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    scale: Array | None,
    *,
    centred: bool,
    out_dtype: Any,
    config: Plan | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale and dbias of dy and x (rows, length), mean and rstd (rows,)."""
    chosen = config or backward_plan(x.shape[1], x.dtype)
    corrects = centred and x.dtype == F32

    def work(step: Step) -> Any:
        rows, share = step.rows, 1 / x.shape[1]
        mean, rstd = step.numbers
        dy, h = ([v.astype(F32) for v in values] for values in step.sources)
        # Normalised before anything is summed: dy (x - mean) may leave float32's range where dy h does not.
        h = [(v - rows.wide(mean) if centred else v) * rows.wide(rstd) for v in h]
        scales = [step.parameters(slot) for slot in range(rows.slots)]
        g = [v * s[0] if s else v for v, s in zip(dy, scales, strict=True)]
        terms = [[a * b for a, b in zip(g, h, strict=True)], *([g] if centred else []), *([h] if corrects else [])]
        along, *others = step.exchange.join(*(rows.parts(values) for values in terms))
        total, *rests = (lax.optimization_barrier(v * share) for v in others) if centred else (None,)
        for rest in rests:  # corrects for the rounding of the saved mean
            along = along - rest * others[0]
            h = [v - rows.wide(rest) for v in h]
        along = lax.optimization_barrier(along * share)

        def slots() -> Iterator[tuple[Array, ...]]:
            for dy_slot, g_slot, h_slot in zip(dy, g, h, strict=True):
                inner = g_slot - rows.wide(total) if total is not None else g_slot
                counted = step.counted(dy_slot)
                yield (inner - h_slot * rows.wide(along)) * rows.wide(rstd), counted * h_slot, counted

        return slots(), ()

    parameters = [] if scale is None else [scale]
    options: dict[str, Any] = {"result": out_dtype, "sums": 2, "exchanges": 1, "values": 1 + centred + corrects}
    dx, sums = over_rows(
        work, chosen, [dy, x], parameters, [mean, rstd], name="norm_dgrad", interpret=interpret, **options
    )
    dscale, dbias = jnp.sum(sums, 0)
    return dx, dscale, dbias
