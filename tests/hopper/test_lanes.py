"""What is computed by `hopper.lanes` lowers, whatever is known of its numbers when it is compiled; nothing runs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdnn._src import hopper
from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.hopper import lanes
from jaxdnn._src.hopper.launch import kernel
from jaxdnn.verify import random_call

OPS = ("batch_norm", "pool", "pool_dgrad", "dropout", "fused_dropout", "fused_dropout_tangent", "fused_dropout_dgrad")
SHAPE = (lanes.WARPS, lanes.LANES)


@pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_that_are_the_same_for_all_threads(dtype: str):
    """Such as the column in rows of one vector, and whether it is inside: of these Mosaic keeps one number."""
    elements = 16 // jnp.dtype(dtype).itemsize
    unsigned = jnp.dtype(f"u{jnp.dtype(dtype).itemsize}")

    def body(x: Any, table: Any, pair: Any, y: Any, found: Any, *, memory: Any, sums: Any, flag: Any) -> None:
        _, number = lanes.divided(lanes.numbers(0), 1)
        holds, one = number < 1, jnp.ones((*SHAPE, elements), dtype)
        lanes.copy(memory, number, x, number, holds)
        lanes.copy(memory, number, x, number, plus=(0, 1))
        value = lanes.load(memory, number) + lanes.load(x, number, holds) + lanes.of_words(lanes.words(one), dtype)
        count = number.astype(jnp.uint32)
        looked_up = lanes.wide(lanes.entries(table, count), elements) + lanes.entries(table, one.astype(jnp.uint32))
        total = lanes.product(lanes.float32(one), looked_up)
        total = total + lanes.reciprocal(lanes.square_root(total), approximate=True) + lanes.exp2(total)
        lanes.put(sums, jnp.zeros((*SHAPE, elements), jnp.int32), total, 1)
        lanes.meet()
        total = lanes.where(holds, total, 0.0) + lanes.entries(sums, jnp.zeros((*SHAPE, elements), jnp.int32), 1)
        alone = lanes.load(pair, number, holds, 1) + lanes.load(pair, number)
        total = total + lanes.wide(lanes.reciprocal(lanes.narrow(alone)), elements)
        some = jnp.where(lanes.any_nan(one, flag), 1, 0)
        total = total + lanes.wide(jnp.where(holds, 2.0, 1.0), elements) + some.astype(jnp.float32)
        [larger] = lanes.larger((lanes.words(one),), (lanes.words(one),), dtype, nan=True)
        same = lanes.equal(jnp.ones((*SHAPE, elements), unsigned), jnp.ones((*SHAPE, elements), unsigned))
        lanes.store(y, number, value + total.astype(dtype) + lanes.of_words(larger, dtype), holds)
        lanes.store(y, number, one)
        lanes.store(found, number, lanes.to_bytes(lanes.words(same), 8 * unsigned.itemsize), holds)
        lanes.store(found, number, lanes.to_bytes(jnp.ones((*SHAPE, 4), jnp.uint32), 8 * unsigned.itemsize))

    like = lambda dtype: jax.ShapeDtypeStruct((1, elements), dtype)
    scratch = {"memory": plgpu.SMEM((1, elements), dtype), "flag": plgpu.SMEM((1,), jnp.int32)}
    scratch |= {"sums": plgpu.SMEM((2,), jnp.float32)}
    options: Any = {"grid": (1,), "grid_names": ("block",), "kernel_name": "equal", "scratch_types": scratch}
    run = jax.jit(kernel(body, out_type=(like(dtype), like(jnp.uint8)), **options))
    table, pair = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2,), (2, 1)))
    assert "mosaic_gpu" in run.trace(like(dtype), table, pair).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("seed", range(84))
def test_random_calls_lower(seed: int):
    for index in range(3):
        found = random_call.draw(seed, index, {(op, "hopper"): 1.0 for op in OPS})
        assert found.facts.refusal is None, found
        assert random_call.branches_of(found), found
