"""Layer norm of rows in plain Pallas, and RMS norm forward. Statistics are saved; backward, each block leaves its sums.

A row is read once: mean and centred second moment are taken from registers. In float32 a second sum makes up for the
rounding of the mean. Backward, the gradients in scale and bias are accumulated in registers over a block's rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .rows import BLOCK, Exchange, Plan, Ring, Rows, each_step, launch, put, sums_scratch, view, write_sums

F32 = jnp.float32


def forward(
    x: Array, scale: Array, bias: Array | None, *, centred: bool = True, eps: float, plan: Plan, interpret: Any = None
) -> Any:
    """y, mean, rstd and variance of x (rows, length); RMS norm, whose mean is 0, if not `centred`."""
    count, length = x.shape
    steps = plan.steps(count)
    exact = centred and x.dtype == F32
    parameters = [scale] if bias is None else [scale, bias]
    ringed = Ring.scratch(plan, [x.dtype])

    def body(step: Any, steps: Any, x_ref: Any, *references: Any) -> None:
        given, references = references[: len(parameters)], references[len(parameters) :]
        y_ref, mean_ref, rstd_ref, variance_ref, *scratch = references
        rows = Rows(plan, count, x.dtype.itemsize)
        ring, exchange = tuple(scratch[: len(ringed)]), Exchange(rows, tuple(scratch[len(ringed) :]))
        read = lambda: [rows.parameter(ref) for ref in given]
        kept = read() if plan.blocks else None

        def mean_of(values: list) -> list:
            return [v * (1 / length) for v in exchange.join([jnp.sum(v, 1) for v in values])]

        def work(i: Any, sources: Any, _: Any) -> Any:
            exchange.turn = lax.rem(jnp.int32(i), jnp.int32(2)) if exact or not centred else 0
            d = [v.astype(F32) for v in sources[0]]
            if centred:
                mean = mean_of(d)
                d = [v - rows.wide(m) for v, m in zip(d, mean, strict=True)]
            else:
                mean = [rows.zero()] * plan.rows
            if exact:
                lost = mean_of(d)
                d = [v - rows.wide(m) for v, m in zip(d, lost, strict=True)]
                mean = [m + more for m, more in zip(mean, lost, strict=True)]
            variance = mean_of([v * v for v in d])
            rstd = [lax.rsqrt(v + eps) for v in variance]
            gain, *offset = kept or read()
            for j in range(plan.rows):
                y = d[j] * rows.wide(rstd[j]) * gain
                y = y + offset[0] if offset else y

                @rows.within(step(i), j)
                def _(j: int = j, y: Any = y) -> None:
                    put(rows.at(y_ref, step(i), j), y.astype(y_ref.dtype))
                    for ref, value in ((mean_ref, mean), (rstd_ref, rstd), (variance_ref, variance)):
                        rows.put_statistic(ref, step(i), j, value[j])

            return ()

        each_step(plan, (rows, [x_ref], ring, step, steps), work)

    statistic = jax.ShapeDtypeStruct((count,), F32)
    out = (jax.eval_shape(lambda v: view(plan, v), x), statistic, statistic, statistic)
    scratch = [*ringed, *Exchange.scratch(plan, plan.rows)]
    kernel = launch(body, plan, out, scratch, steps, "norm", interpret)
    y, *statistics = kernel(*(view(plan, v) for v in (x, *parameters)))
    return y.reshape(x.shape), *statistics


def backward(
    dy: Array, x: Array, mean: Array, rstd: Array, scale: Array, *, plan: Plan, interpret: Any = None
) -> tuple[Array, Array, Array]:
    """dx, dscale and dbias of dy and x (rows, length), mean and rstd (rows,); the plan has persistent blocks."""
    count, length = x.shape
    steps, rest = divmod(count, plan.rows_a_step)
    assert not rest
    assert plan.blocks
    exact = x.dtype == F32
    ringed, summed = Ring.scratch(plan, [dy.dtype, x.dtype]), sums_scratch(plan)

    def body(step: Any, count: Any, dy_ref: Any, x_ref: Any, mean_ref: Any, rstd_ref: Any, *references: Any) -> None:
        scale_ref, dx_ref, sums_ref, *scratch = references
        rows = Rows(plan, len(mean), x.dtype.itemsize)
        ring, scratch = tuple(scratch[: len(ringed)]), scratch[len(ringed) :]
        last, exchange = tuple(scratch[: len(summed)]), Exchange(rows, tuple(scratch[len(summed) :]))
        kept = rows.parameter(scale_ref)

        def work(i: Any, sources: Any, sums: Any) -> Any:
            exchange.turn = lax.rem(jnp.int32(i), jnp.int32(2))
            dscale, dbias = sums
            dy, x = ([v.astype(F32) for v in values] for values in sources)
            mean = [rows.statistic(mean_ref, step(i), j) for j in range(plan.rows)]
            rstd = [rows.statistic(rstd_ref, step(i), j) for j in range(plan.rows)]
            d = [v - rows.wide(m) for v, m in zip(x, mean, strict=True)]
            parts = [jnp.sum(a * kept, 1) for a in dy]
            parts += [jnp.sum(a * kept * v, 1) for a, v in zip(dy, d, strict=True)]
            parts += [jnp.sum(v, 1) for v in d] if exact else []
            found = exchange.join(parts)
            for j in range(plan.rows):
                total, along = found[j], found[plan.rows + j]
                if exact:  # the saved mean is rounded
                    lost = found[2 * plan.rows + j] * (1 / length)
                    along -= lost * total
                    d[j] -= rows.wide(lost)
                h = d[j] * rows.wide(rstd[j])
                dscale, dbias = dscale + dy[j] * h, dbias + dy[j]
                of_g, of_gh = total * (1 / length), along * rstd[j] * (1 / length)
                dx = (dy[j] * kept - rows.wide(of_g) - h * rows.wide(of_gh)) * rows.wide(rstd[j])
                put(rows.at(dx_ref, step(i), j), dx.astype(dx_ref.dtype))
            return dscale, dbias

        zero = plgpu.layout_cast(jnp.zeros(rows.shape, F32), rows.full)
        sums = each_step(plan, (rows, [dy_ref, x_ref], ring, step, jnp.int32(count)), work, (zero, zero))
        for k, value in enumerate(sums):
            write_sums(rows, last, sums_ref.at[lax.axis_index(BLOCK), k], value)

    blocks = plan.grid(steps)
    sums = jax.ShapeDtypeStruct((blocks, 2, length), F32)
    out = tuple(jax.eval_shape(lambda v: view(plan, v), v) for v in (x, sums))
    scratch = [*ringed, *summed, *Exchange.scratch(plan, (3 if exact else 2) * plan.rows)]
    kernel = launch(body, plan, out, scratch, steps, "norm_dgrad", interpret)
    dx, sums = kernel(view(plan, dy), view(plan, x), mean, rstd, view(plan, scale))
    dscale, dbias = jnp.sum(sums.reshape(blocks, 2, length), 0)
    return dx.reshape(x.shape), dscale, dbias
