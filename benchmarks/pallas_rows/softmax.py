"""Softmax of rows in plain Pallas, forward and backward, a row in registers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .rows import Exchange, Plan, Ring, Rows, each_step, launch, put, view

F32 = jnp.float32
LOG2_E = 1.4426950408889634


def forward(x: Array, *, plan: Plan, interpret: Any = None) -> Array:
    """Softmax of x (rows, length)."""

    def work(rows: Rows, exchange: Exchange, sources: Any) -> list:
        x = sources[0]
        largest = exchange.join([jnp.max(v, 1).astype(F32) for v in x], jnp.max)
        e = [jnp.exp2((v.astype(F32) - rows.wide(m)) * LOG2_E) for v, m in zip(x, largest, strict=True)]
        total = exchange.join([jnp.sum(v, 1) for v in e])
        return [v * rows.wide(1 / s) for v, s in zip(e, total, strict=True)]

    return _rows([x], work, 2, plan, "softmax", interpret)


def backward(dy: Array, y: Array, *, plan: Plan, interpret: Any = None) -> Array:
    """y (dy - sum of y dy)."""

    def work(rows: Rows, exchange: Exchange, sources: Any) -> list:
        dy, y = ([v.astype(F32) for v in values] for values in sources)
        total = exchange.join([jnp.sum(a * b, 1) for a, b in zip(dy, y, strict=True)])
        return [b * (a - rows.wide(s)) for a, b, s in zip(dy, y, total, strict=True)]

    return _rows([dy, y], work, 1, plan, "softmax_dgrad", interpret)


def _rows(arrays: list, work: Callable, exchanges: int, plan: Plan, name: str, interpret: Any) -> Array:
    like = arrays[0]
    ringed = Ring.scratch(plan, [v.dtype for v in arrays])

    def body(step: Any, count: Any, *references: Any) -> None:
        given, (out_ref, *scratch) = references[: len(arrays)], references[len(arrays) :]
        rows = Rows(plan, len(like), like.dtype.itemsize)
        ring, exchange = tuple(scratch[: len(ringed)]), Exchange(rows, tuple(scratch[len(ringed) :]))

        def one(i: Any, sources: Any, _: Any) -> Any:
            exchange.turn = lax.rem(jnp.int32(i), jnp.int32(2)) if exchanges % 2 else 0
            for j, value in enumerate(work(rows, exchange, sources)):

                @rows.within(step(i), j)
                def _(j: int = j, value: Any = value) -> None:
                    put(rows.at(out_ref, step(i), j), value.astype(out_ref.dtype))

            return ()

        each_step(plan, (rows, list(given), ring, step, count), one)

    out = jax.eval_shape(lambda v: view(plan, v), like)
    scratch = [*ringed, *Exchange.scratch(plan, plan.rows)]
    kernel = launch(body, plan, (out,), scratch, plan.steps(len(like)), name, interpret)
    return kernel(*(view(plan, v) for v in arrays))[0].reshape(like.shape)
