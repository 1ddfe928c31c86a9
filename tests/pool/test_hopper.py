"""The pooling kernels on the CPU, against the definition's bits; and what they refuse."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.cases.subject import gradient
from jaxdnn._src.core import engines
from jaxdnn._src.pool.cases import subjects
from jaxdnn._src.pool.hopper.shape import Shape, Tile

pytestmark = pytest.mark.usefixtures("h200")
needs_pallas = pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
# Sizes of x and the window over it.
WINDOWS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "resnet": ((7, 6), {"window": 3, "stride": 2, "padding": 1}),
    "dense": ((5, 4), {"window": (2, 3), "stride": 1, "padding": 1}),
    "dilated": ((9, 8), {"window": (3, 2), "stride": (1, 2), "dilation": (2, 3), "padding": 2}),
    "disjoint": ((6, 7), {"window": 2}),
    "steps over elements": ((7, 9), {"window": (2, 1), "stride": (3, 4)}),
    "ceil": ((8, 5), {"window": 4, "stride": 3, "padding": ((2, 0), (1, 1)), "ceil_mode": True}),
}


# Windows that move by one element, and tiles of rows and columns of a thread: in whole and cut at the edges.
STEPS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "3 x 3": ((5, 4), {"window": 3, "stride": 1, "padding": 1}),
    "2 x 3": ((5, 4), {"window": (2, 3), "stride": 1, "padding": ((0, 1), (2, 0))}),
    "5 x 5": ((7, 9), {"window": 5, "stride": 1, "padding": 2}),
    "one row": ((1, 9), {"window": (1, 4), "stride": 1}),
    "one column": ((6, 1), {"window": (3, 1), "stride": 1, "padding": ((2, 1), (0, 0))}),
}
TILES = [(2, 2, 2), (4, 2, 1), (3, 1, 4), (1, 4, 2)]  # rows, columns, vectors


def shape_of(name: str, dtype: str, vectors: int) -> tuple[Shape, dict[str, Any]]:
    size, options = (WINDOWS | STEPS)[name]
    per_axis = lambda v: tuple(np.broadcast_to(v, 2).tolist())
    taps = per_axis(options.get("window", 2))
    stride, pads = per_axis(options.get("stride", taps)), options.get("padding", 0)
    low = per_axis(pads) if isinstance(pads, int) else tuple(p[0] for p in pads)
    y = reference.pool(np.zeros((1, *size, 1), np.float32), **options)
    dilation = per_axis(options.get("dilation", 1))
    return Shape(dtype, 2, vectors, size, y.shape[1:3], taps, stride, low, dilation), options  # type: ignore[arg-type]


def data(shape: tuple[int, ...], dtype: np.dtype, seed: int, *, special: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(shape) < 0.4, rng.integers(-2, 3, shape), rng.normal(size=shape))
    for value, share in ((-np.inf, 0.3), (np.nan, 0.1), (-0.0, 0.1)) if special else ((-0.0, 0.1),):
        values = np.where(rng.random(shape) < share, value, values)
    return values.astype(dtype)


def agree(ours: np.ndarray, definition: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (definition.dtype, definition.shape)
    unsigned = np.dtype(f"u{ours.dtype.itemsize}")
    np.testing.assert_array_equal(ours.view(unsigned), np.ascontiguousarray(definition).view(unsigned))


@pytest.fixture
def kernels() -> Iterator[Any]:
    """The module of the kernels, which run on the CPU."""
    from jaxdnn._src.pool.hopper import kernels
    from tests.hopper.lane_machine import on_cpu

    with on_cpu(kernels):
        yield kernels


each = [pytest.mark.parametrize("name", WINDOWS | STEPS), pytest.mark.parametrize("dtype", DTYPES)]
each_tile = pytest.mark.parametrize("tile", TILES, ids=lambda t: "x".join(map(str, t)))


def tile_of(size: tuple[int, int], tile: tuple[int, int, int]) -> Tile:
    return Tile(min(tile[0], size[0]), min(tile[1], size[1]), tile[2])


@needs_pallas
@each[0]
@each[1]
@each_tile
@pytest.mark.parametrize("special", [False, True], ids=["numbers", "with NaN"])
def test_maximum(kernels: Any, name: str, dtype: str, tile: tuple[int, int, int], special: bool):
    k, options = shape_of(name, dtype, 4)
    x = data((2, *k.size, 4 * k.elements), DTYPES[dtype], 6, special=special)
    y, tap = reference.pool(x, **options, return_indices="tap", arithmetic="ordered")
    own = tile_of(k.out, tile)
    agree(np.asarray(kernels.maximum(jnp.asarray(x), k, own, indices=False)), y)
    for found, wanted in zip(kernels.maximum(jnp.asarray(x), k, own, indices=True), (y, tap), strict=True):
        agree(np.asarray(found), wanted)


@needs_pallas
@each[0]
@each[1]
@each_tile
def test_maximum_backward(kernels: Any, name: str, dtype: str, tile: tuple[int, int, int]):
    k, dy, tap, dx = outputs_of(name, dtype, "some -0", 4)
    agree(np.asarray(kernels.maximum_backward(jnp.asarray(dy), jnp.asarray(tap), k, tile_of(k.cells, tile))), dx)


def counted_of(k: Shape, options: dict[str, Any]) -> tuple[Shape, float | None]:
    """What the average's kernels are told of its counts: the positions that are counted, or one factor."""
    if "divisor" in options:
        return k, 1.0 / options["divisor"]
    pads, exclude = options.get("padding", 0), options["mode"] == "average_exclude_padding"
    if pads == 0 or not (exclude or "ceil_mode" in options):
        return k, 1.0 / np.prod(k.taps)
    high = (pads, pads) if isinstance(pads, int) else tuple(p[1] for p in pads)
    sides = ((0, 0), (0, 0)) if exclude else tuple(zip(k.low, high, strict=True))
    counted: Any = tuple((-low, n + high) for (low, high), n in zip(sides, k.size, strict=True))
    return dataclasses.replace(k, counted=counted), None


@needs_pallas
@each[0]
@each[1]
@each_tile
@pytest.mark.parametrize("mode", ["average", "average_exclude_padding", "divisor"])
def test_average_and_its_backward(kernels: Any, name: str, dtype: str, tile: tuple[int, int, int], mode: str):
    k, options = shape_of(name, dtype, 4)
    options = {**options, **({"mode": "average", "divisor": 7} if mode == "divisor" else {"mode": mode})}
    x = data((2, *k.size, 4 * k.elements), DTYPES[dtype], 4)
    y = reference.pool(x, **options, arithmetic="ordered")
    k, factor = counted_of(k, options)
    agree(np.asarray(kernels.average(jnp.asarray(x), k, tile_of(k.out, tile), factor=factor)), y)
    dy = data(y.shape, DTYPES[dtype], 5)
    dx = reference.pool_dgrad(dy, x, **options, arithmetic="ordered")
    agree(np.asarray(kernels.average_backward(jnp.asarray(dy), k, tile_of(k.cells, tile), factor=factor)), dx)


tiled = [pytest.mark.parametrize("name", STEPS), pytest.mark.parametrize("dtype", DTYPES)]

ZEROS = ["+0", "some -0", "-0 throughout"]


def outputs_of(name: str, dtype: str, zeros: str, vectors: int) -> tuple[Shape, np.ndarray, np.ndarray, np.ndarray]:
    """A shape, dy, taps and the definition's dx, whose sums are from +0."""
    k, options = shape_of(name, dtype, vectors)
    x = data((2, *k.size, vectors * 16 // DTYPES[dtype].itemsize), DTYPES[dtype], 7)
    tap = reference.pool(x, **options, return_indices="tap")[1]
    dy = data(tap.shape, DTYPES[dtype], 8)
    dy = {"+0": dy + DTYPES[dtype].type(0.0), "some -0": dy, "-0 throughout": np.full_like(dy, -0.0)}[zeros]
    return k, dy, tap, reference.pool_dgrad(dy, x, **options, arithmetic="ordered")


@pytest.fixture
def scattered() -> Any:
    """The scattering kernel, which runs on the CPU, of a strip of rows and columns."""
    from jaxdnn._src.pool.hopper import scatter
    from tests.hopper.lane_machine import on_cpu

    def run(k: Shape, dy: np.ndarray, tap: np.ndarray, rows: int, columns: int, **machine: Any) -> np.ndarray:
        with on_cpu(scatter, **machine):
            strip = scatter.Strip(rows, columns)
            return np.asarray(scatter.maximum_backward(jnp.asarray(dy), jnp.asarray(tap), k, strip))

    return run


@needs_pallas
@tiled[0]
@tiled[1]
@pytest.mark.parametrize("strip", [(3, 4), (7, 9)], ids=str)
@pytest.mark.parametrize("zeros", ZEROS)
def test_maximum_backward_by_scattering(scattered: Any, name: str, dtype: str, strip: tuple[int, int], zeros: str):
    k, dy, tap, dx = outputs_of(name, dtype, zeros, 3)
    agree(scattered(k, dy, tap, *strip), dx)


@needs_pallas
@tiled[0]
@tiled[1]
def test_taps_that_are_none(kernels: Any, scattered: Any, name: str, dtype: str):
    """Any byte may stand for a tap: those that are none, or lie in the padding, add nothing and reach nothing else."""
    k, dy, tap, _ = outputs_of(name, dtype, "some -0", 3)
    tap = np.random.default_rng(9).integers(0, 256, tap.shape).astype(np.uint8) % np.uint8(2 * np.prod(k.taps))
    found = kernels.maximum_backward(jnp.asarray(dy), jnp.asarray(tap), k, Tile(1, 1, 3))
    agree(scattered(k, dy, tap, 2, 3), np.asarray(found))


@needs_pallas
def test_the_machine_finds_races(scattered: Any, monkeypatch: Any):
    """Without the barrier behind the tables, and where sums of neighbouring threads overlap."""
    from jaxdnn._src.pool.hopper import scatter

    k, dy, tap, _ = outputs_of("3 x 3", "bf16", "+0", 3)
    with pytest.raises(AssertionError, match="a race"):
        scattered(k, dy, tap, 2, 3, skips=0)
    monkeypatch.setattr(scatter, "THREADS", 64)
    with pytest.raises(AssertionError, match="a race"):
        scattered(k, dy, tap, 2, 3)


@needs_pallas
@pytest.mark.parametrize("taps", range(1, 9))
@pytest.mark.parametrize("count", range(1, 9))
def test_sliding_windows(count: int, taps: int):
    """Every window joins its items once each and in their order; neighbouring windows share what they have joined."""
    from jaxdnn._src.pool.hopper import kernels

    joins = []

    def join(a: str, b: str) -> str:
        joins.append((a, b))
        return a + b

    find: Any = kernels.sliding
    assert list(find(count, taps, "abcdefghijklmnop".__getitem__, join)) == [
        "abcdefghijklmnop"[i : i + taps] for i in range(count)
    ]
    separately = count * (taps - 1)
    assert len(joins) <= separately if count == 1 or taps < 3 else len(joins) < separately


@needs_pallas
@pytest.mark.parametrize("which", ["dy", "taps"])
def test_the_machine_finds_accesses_outside(scattered: Any, which: str):
    k, dy, tap, _ = outputs_of("3 x 3", "f32", "+0", 3)
    with pytest.raises(AssertionError, match="outside of the array"):
        scattered(k, dy[:1] if which == "dy" else dy, tap if which == "dy" else tap[:1], 2, 3)


REFUSALS = [
    ({}, (2, 8, 8, 12), "bfloat16", "channels in vectors of 16 bytes, not 12 of bfloat16"),
    ({"layout": "NCHW"}, (2, 8, 8, 16), "bfloat16", "one or two spatial axes before the channels"),
    ({"layout": "NDHWC"}, (2, 4, 8, 8, 16), "bfloat16", "one or two spatial axes before the channels"),
    ({"nan": "ignore"}, (2, 8, 8, 16), "bfloat16", "its kernels propagate NaN"),
    ({"window": 9, "stride": 1, "padding": 4}, (2, 9, 9, 16), "float32", "windows of 2 to 64 taps, not 81"),
    ({}, (2, 8, 8, 16), "int8", "its kernels take bfloat16, float16, float32, not int8"),
    ({}, (0, 8, 8, 16), "float32", "arrays of 1 to 2\\^31 vectors"),
]


@needs_pallas
@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_refusals(number: int):
    options, shape, dtype, reason = REFUSALS[number]
    (explained,) = dnn.explain(
        lambda x: dnn.pool(x, **options), jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), platform="cuda"
    )
    (found,) = (c for c in explained.candidates if c.engine == "hopper")
    assert re.search(reason, str(found.refusal)), found.refusal
    assert explained.engine == "xla"


@needs_pallas
@pytest.mark.parametrize("mode", ["max", "average"])
@pytest.mark.parametrize("shape", [(2, 9, 8, 16), (3, 11, 8), (2, 3, 9, 8, 24)])
def test_lowers_for_hopper(mode: str, shape: tuple[int, ...]):
    """Forward and backward, with and without a mapped axis, lowered for an NVIDIA GPU from here."""
    layout = "NWC" if len(shape) == 3 else "NHWC"

    def step(x: jax.Array) -> Any:
        y, back = jax.vjp(lambda x: dnn.pool(x, window=3, stride=2, padding=1, mode=mode, layout=layout), x)
        return y, back(y)[0]

    function = jax.vmap(step) if len(shape) == 5 else step
    x = jnp.zeros(shape, jnp.bfloat16)
    assert [e.engine for e in dnn.explain(function, x, platform="cuda")] == ["hopper", "hopper"]
    text = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


@needs_pallas
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("window", [2, 3, 5, 8])
def test_windows_that_move_by_one_lower_for_hopper(window: int, dtype: str):
    def step(x: jax.Array) -> Any:
        found = []
        for mode in ("max", "average", "average_exclude_padding"):
            y, back = jax.vjp(lambda x, m=mode: dnn.pool(x, window=window, stride=1, padding=window // 2, mode=m), x)
            found.append((y, back(y)[0]))
        return found, dnn.pool(x, window=window, stride=1, padding=window // 2)

    x = jnp.zeros((2, 10, 9, 24), dtype)
    assert {e.engine for e in dnn.explain(step, x, platform="cuda")} == {"hopper"}
    text = jax.jit(step).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 7


@needs_pallas
def test_strips_count_pairs_in_32_bits():
    """Of a larger array the gradient is another kernel's, which counts vectors."""
    from jaxdnn._src.pool.hopper import calls as kernels

    for images, served in ((128, True), (1024, False)):
        k = Shape("bf16", images, 32, (128, 130), (128, 130), (3, 3), (1, 1), (1, 1), (1, 1))
        assert (kernels.strip_of(k) is not None) == served


@needs_pallas
@pytest.mark.parametrize("taps", [(1, 1), (1, 3), (3, 3), (5, 5), (7, 7), (8, 8), (64, 1), (1, 64)])
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (20, 20), (28, 28), (112, 112), (1, 4096)])
@pytest.mark.parametrize("images", [1, 128])
def test_plans_fit(images: int, size: tuple[int, int], taps: tuple[int, int]):
    """Tiles and strips cover the array with vectors that are there, in the shared memory there is."""
    from jaxdnn._src.pool.hopper import calls as kernels

    for vectors, dtype in itertools.product((1, 3, 24), ("bf16", "f32")):
        k = Shape(dtype, images, vectors, size, size, taps, (1, 1), (taps[0] // 2, taps[1] // 2), (1, 1))
        strip = kernels.strip_of(k)
        assert (strip is None) == (min(taps) < 3 or (dtype == "f32" and taps == (3, 3)))
        assert strip is None or 4 * strip.floats(k) <= kernels.MOST_SHARED
        tiles = [
            f(k, average=average) for f in (kernels.forward_tile, kernels.backward_tile) for average in (False, True)
        ]
        for part in filter(None, (*tiles, strip)):
            assert part.rows <= size[0]
            assert part.columns <= size[1]
            assert vectors % getattr(part, "vectors", 1) == 0
        for change in ({"stride": (1, 2)}, {"dilation": (2, 1)}):
            other = dataclasses.replace(k, **change)
            assert kernels.strip_of(other) is None
            assert kernels.backward_tile(other) == Tile(1, 1, vectors)


@needs_pallas
def test_a_gradient_is_put_to_levels_where_kernels_serve_it(monkeypatch: Any):
    """That of `pool_dgrad` of maxima is a derivative along a tangent, which has no kernel: refused."""
    monkeypatch.setattr(engines, "platform", lambda: "cuda")
    has = {}
    for op in ("pool", "pool_dgrad"):
        made = next(s for s in subjects(op, "hopper", "standard", 0) if s and (s.dtype, s.variant) == ("f16", "max"))
        has[op] = gradient(made) is not None
    assert has == {"pool": True, "pool_dgrad": False}
