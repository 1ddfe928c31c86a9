"""Softmax, its backward pass and logsumexp on Hopper: rows in registers, in plain Pallas. Longer rows are PTX (`long`).

Schedule. Rows are contiguous in memory. 32 to 512 threads load the 16-byte vectors of a row into registers, all before
the first use, so that the row is read once. There are many small blocks: while some wait for memory, others compute.
`hopper.rows` states the order of additions, which depends on the row's length and dtype. exp(d) is
ex2.approx(d log2 e), with d = x - m rounded first; log(s) is lg2.approx(s) / log2 e, rounded before it is added to m or
subtracted.

Limits. The row's bytes are a multiple of 16; bfloat16, float16 or float32; the reduced axes are the last ones.
Exponentials are 2^x by the special function unit, whose results below 2^-126 are zero.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.hopper import MULTIPROCESSORS
from jaxdnn._src.hopper.ptx import VECTOR_BYTES
from jaxdnn._src.hopper.row_kernel import Plan, Step, Work, over_rows

F32 = jnp.float32
LOG2_E = 1.4426950408889634


def plan(length: int, dtype: Any, which: str, rows: int = 1 << 30) -> Plan | None:
    """How rows of a length are partitioned over threads, for an algorithm or "dgrad"; None if they do not fit.

    This was fastest on an H200 (`benchmarks/notes-softmax.md`). Both operands of the backward pass, of 16 bits, do not
    leave registers for two blocks of 256 threads a multiprocessor; one persistent block of 512 loads the next row while
    it computes one. Threads, and so the order of additions, depend on length and dtype alone.
    """
    vectors, narrow = length * np.dtype(dtype).itemsize // VECTOR_BYTES, np.dtype(dtype).itemsize == 2
    most = {32: 4, 128: 8} | ({512: 4} if which == "dgrad" and narrow else {256: 8})
    threads = next((t for t, slots in most.items() if vectors <= slots * t), None)
    if threads is None:
        return None
    return Plan(threads, 2 if vectors <= 64 and rows >= 16 * MULTIPROCESSORS else 1, stays=threads == 512)


def softmax(x: Array, /, *, algorithm: str, out_dtype: Any, **how: Any) -> Array:
    """Softmax or its logarithm of x (rows, length), or with algorithm "logsumexp" that: (rows,)."""

    def work(step: Step) -> Any:
        rows, exchange, [x] = step.rows, step.exchange, step.sources
        m: Any = None
        if algorithm != "fast":
            [m] = exchange.join(rows.largest(x), over=jnp.max)
            m = jnp.where(jnp.abs(m) == jnp.inf, 0.0, m) if algorithm == "logsumexp" else m
        shifted = lambda v: v.astype(F32) if m is None else v.astype(F32) - rows.wide(m)
        terms = [_exp(shifted(v)) for v in x]
        [s] = exchange.join(rows.parts(terms))
        if algorithm == "logsumexp":
            return (), (m + _log(s),)
        if algorithm == "log":
            log = rows.wide(_log(s))
            return ((shifted(rows.again(v)) - log,) for v in x), ()
        share = rows.wide(1 / s)
        return ((term * share,) for term in terms), ()

    kept = {"statistics": (out_dtype,)} if algorithm == "logsumexp" else {"result": out_dtype}
    return _over_rows(work, algorithm, [x], exchanges=1 if algorithm == "fast" else 2, **kept, **how)


def softmax_dgrad(dy: Array, y: Array, /, *, algorithm: str, tangent: bool, out_dtype: Any, **how: Any) -> Array:
    """The backward pass for dy and y (rows, length), or with `tangent` the derivative along dy."""
    log = algorithm == "log"

    def work(step: Step) -> Any:
        dy, y = ([v.astype(F32) for v in values] for values in step.sources)
        factors = [_exp(v) for v in y] if log else y
        terms = dy if log and not tangent else [f * v for f, v in zip(factors, dy, strict=True)]
        total = step.rows.wide(step.exchange.join(step.rows.parts(terms))[0])
        result = lambda f, v: f * (v - total) if not log else v - total if tangent else v - f * total
        return ((result(f, v),) for f, v in zip(factors, dy, strict=True)), ()

    return _over_rows(work, "dgrad", [dy, y], exchanges=1, result=out_dtype, **how)


def _over_rows(work: Work, which: str, arrays: list[Array], *, config: Plan | None = None, **options: Any) -> Array:
    rows, length = arrays[0].shape
    chosen = config or plan(length, arrays[0].dtype, which, rows)
    return over_rows(work, chosen, arrays, name=f"softmax_{which}", approximate=True, **options)[0]


def _exp(d: Array) -> Array:
    return jnp.exp2(d * LOG2_E)


def _log(s: Array) -> Array:
    """The logarithm, rounded: the subtraction from or addition to it is not joined with its last product."""
    return lax.optimization_barrier(jnp.log(s))
