"""Padding by negative widths: what it computes, on a mesh too, and that no op leaves it to XLA's partitioner."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases.example import LARGE
from jaxdnn._src.core.padding import pad
from jaxdnn.verify import mesh


def test_it_is_what_lax_makes_of_the_widths():
    rng = np.random.default_rng(0)
    for _ in range(60):
        x = rng.normal(size=rng.integers(0, 6, 3)).astype(np.float32)
        widths = [
            (int(low), int(high), int(between)) for low, high, between in rng.integers((-4, -4, 0), (5, 5, 3), (3, 3))
        ]
        lengths = [n + max(n - 1, 0) * w[2] + w[0] + w[1] for n, w in zip(x.shape, widths, strict=True)]
        if min(lengths) >= 0:
            np.testing.assert_array_equal(pad(jnp.asarray(x), 3, widths), lax.pad(x, np.float32(3), widths))


def whole_and_parts() -> tuple[NamedSharding, NamedSharding]:
    """Of four devices: the whole of an array on each, and a part of its last axis."""
    devices = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    return NamedSharding(devices, P()), NamedSharding(devices, P(None, "d"))


@pytest.mark.parametrize("widths", [(-1, 1, 0), (1, -1, 0), (-3, 3, 0), (-1, 5, 0), (3, -7, 0), (-8, -7, 1)])
def test_of_an_array_that_every_device_has(widths: tuple[int, int, int]):
    whole, parts = whole_and_parts()
    x = np.arange(32, dtype=np.float32).reshape(2, 16)
    function = lambda x: pad(x, 0, [(0, 0, 0), widths])
    found = jax.jit(function, out_shardings=parts)(jax.device_put(x, whole))
    np.testing.assert_array_equal(found, function(jnp.asarray(x)))


def test_unpool_of_maxima_that_every_device_has():
    """It puts a value of each window that overlaps the next one where the definition does, whatever is sharded."""
    whole, parts = whole_and_parts()
    rng = np.random.default_rng(0)
    options = {"window": 3, "stride": 2, "padding": 1, "layout": "NWC"}
    x = rng.normal(size=(2, 16, 1)).astype(np.float32)
    _, indices = reference.pool(x, return_indices=True, **options)
    y = rng.normal(size=indices.shape).astype(np.float32)
    unpool = jax.jit(lambda y, indices: dnn.unpool(y, indices, x.shape, **options), out_shardings=parts)
    found = unpool(*(jax.device_put(v, whole) for v in (y, indices.astype(np.int32))))
    np.testing.assert_array_equal(found, reference.unpool(y, indices, x.shape, **options))


PAD = re.compile(r"stablehlo\.pad .*low = \[([^]]*)\], high = \[([^]]*)\], interior = \[([^]]*)\]")


def moved(text: str) -> list[str]:
    """The pads of a program that keep an axis' length and move what lies along it."""
    lines = (
        line for line in text.splitlines() if (found := PAD.search(line)) and _moves(*map(_numbers, found.groups()))
    )
    return list(lines)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _moves(low: list[int], high: list[int], interior: list[int]) -> bool:
    return any(a == -b != 0 and i == 0 for a, b, i in zip(low, high, interior, strict=True))


def test_a_pad_that_moves_is_found():
    text = jax.jit(lambda x: lax.pad(x, jnp.float32(0), [(0, 0, 0), (2, -2, 0)])).lower(jnp.ones((3, 4))).as_text()
    assert len(moved(text)) == 1
    assert not moved(
        jax.jit(lambda x: lax.pad(x, jnp.float32(0), [(0, 0, 0), (2, -1, 0)])).lower(jnp.ones((3, 4))).as_text()
    )


@pytest.mark.parametrize("name", mesh.rows())
def test_no_program_of_an_op_has_one(name: str):
    """Forward, and the gradients."""
    row = mesh.rows()[name]
    forward, backward = mesh._programs(row, "fast")
    operands = [v.astype("float32") for v in row.data(LARGE, whole=True)]
    results = jax.eval_shape(forward, *operands)
    cotangents = [jnp.zeros(y.shape, y.dtype) for y in results]
    for program, given in ((forward, operands), (backward, [*cotangents, *operands])):
        text = jax.jit(program).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert not moved(text)
