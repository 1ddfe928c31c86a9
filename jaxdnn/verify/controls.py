"""Negative controls: functions with planted faults, which the determinism procedures must find."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdnn._src.cases.subject import Subject
from jaxdnn._src.core import compat
from jaxdnn._src.core.rounding import product
from jaxdnn.verify.levels import PROCEDURES, Trial, trial

BATCH, SIZES, CHANNELS, FILTERS = 8, (24, 20), 16, 32  # of x; large enough that XLA splits it among a CPU's threads


def run(levels: Any, seed: int) -> Iterator[Trial]:
    """Every procedure on a function with the kind of fault that the procedure must find.

    The fault is planted in a function that has none, which the procedure must pass: additions over the channels in a
    fixed order, of products that are rounded before they are added. No fault depends on how XLA compiles a program.
    """
    rng = np.random.default_rng(seed)
    shapes = ((BATCH, *SIZES, CHANNELS), (CHANNELS, FILTERS))
    x, w = (rng.standard_normal(s).astype(np.float16).astype(np.float32) for s in shapes)
    honest = Subject("honest", "control", "f32", "portable", lambda batch: _chain(0), (x, w), (0, None), 0)
    honest = dataclasses.replace(honest, definition=lambda: _chain_in_numpy(x, w))

    def faulty(fault: str, function: Callable[[int], Callable[..., jax.Array]], **changes: Any) -> Subject:
        return dataclasses.replace(honest, op=fault, function=function, **changes)

    faults = {
        "repeats": faulty("every third result is off by a last bit", lambda batch: _sometimes()),
        "under load": faulty("every third result is off by a last bit", lambda batch: _sometimes()),
        "recompilation": faulty("every second compilation is off by a last bit", _every_second()),
        "poisoned output": faulty("leaves an element unwritten", honest.function, into_poison=_unwritten),
        "alone": faulty("starts the sum at a channel that depends on the batch size", _chain),
        "batch sizes": faulty("starts the sum at a channel that depends on the batch size", _chain),
        "neighbours": faulty("adds 0 times the mean over the batch", lambda batch: _leaking),
        "vmap": faulty("another order of additions under vmap", lambda batch: _other_under_vmap()),
        "eager": faulty("another order of additions when it is traced", lambda batch: _other_where_traced),
        "company": faulty("another order of additions when it is traced", lambda batch: _other_where_traced),
        "mesh": faulty("is off by a last bit where it is sharded", lambda batch: _other_where_sharded()),
        "definition": faulty("one element is off by a last bit", lambda batch: _off_by_one),
    }
    for level in levels:
        for procedure in PROCEDURES.get(level, ()):
            sound = trial(honest, level, procedure, "quick")
            found = trial(faults[procedure], level, procedure, "quick", control=True)
            if sound.status == "failed":
                message = f"the honest function fails as well: {sound.message}"
                found = dataclasses.replace(found, status="failed", message=message)
            yield found


def _chain(first: int) -> Callable[..., jax.Array]:
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        total = jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32)
        for c in range(len(w)):
            i = (first + c) % len(w)
            total = total + product(x[..., i, None], lax.expand_dims(w[i], range(x.ndim - 1)))
        return total

    return chain


def _chain_in_numpy(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    total = np.zeros((*x.shape[:-1], w.shape[-1]), np.float32)
    for c in range(len(w)):
        total += x[..., c, None] * w[c]
    return total


def _flip_last_bit(y: jax.Array, flip: Any = 1) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int32) ^ flip, jnp.float32)


def _off_by_one(x: jax.Array, w: jax.Array) -> jax.Array:
    y = _chain(0)(x, w)
    return y.at[0, 1, 2, 3].set(_flip_last_bit(y[0, 1, 2, 3]))


def _sometimes() -> Callable[..., jax.Array]:
    calls = itertools.count()

    def faulty(x: jax.Array, w: jax.Array) -> jax.Array:
        y = _chain(0)(x, w)
        asks = jax.ShapeDtypeStruct((), jnp.int32)
        return _flip_last_bit(y, jax.pure_callback(lambda _: np.int32(next(calls) % 3 == 2), asks, y[0, 0, 0, 0]))

    return faulty


def _every_second() -> Callable[[int], Callable[..., jax.Array]]:
    made = itertools.count()
    return lambda batch: _chain(0) if next(made) % 2 == 0 else _off_by_one


def _unwritten(poison: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    return _chain(0)(x, w).at[0, 0, 0, 0].set(poison[0, 0, 0, 0])


def _leaking(x: jax.Array, w: jax.Array) -> jax.Array:
    return _chain(0)(x, w) + 0 * jnp.mean(x)


def _other_under_vmap() -> Callable[..., jax.Array]:
    faulty = jax.custom_batching.custom_vmap(_chain(0))

    @faulty.def_vmap
    def _(size: int, mapped: Any, *operands: jax.Array) -> tuple[jax.Array, bool]:
        return jax.vmap(_chain(5), [0 if m else None for m in mapped])(*operands), True

    return faulty


def _other_where_traced(x: jax.Array, w: jax.Array) -> jax.Array:
    return _chain(5 if isinstance(x, compat.Tracer) else 0)(x, w)


def _other_where_sharded() -> Callable[..., jax.Array]:
    faulty = compat.custom_partitioning(_chain(0))

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        placed = tuple(operand.sharding for operand in operands)
        return mesh, lambda x, w: _flip_last_bit(_chain(0)(x, w)), result.sharding, placed

    faulty.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, operands, result: NamedSharding(mesh, PartitionSpec("d")),
        sharding_rule="n h w c, c d -> n h w d",
        need_replication_factors=("c",),
    )
    return faulty
