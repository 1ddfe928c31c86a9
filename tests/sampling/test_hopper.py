"""The Hopper kernels of sampling on the CPU: bits of engine `xla`, through a machine for their PTX; what is refused."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.core.explain import traced_calls
from jaxdnn._src.sampling import xla
from jaxdnn._src.sampling.primitive import AT, AT_PIXELS, AT_SLOPES, AT_TANGENT, SampleSpec
from jaxdnn._src.sampling.taps import Rule

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.sampling.hopper import gather_ptx, lists_ptx
from jaxdnn._src.sampling.hopper.engine import _unsupported
from jaxdnn._src.sampling.hopper.points_ptx import THREADS, Problem
from tests.hopper.point_machine import Points
from tests.hopper.row_machine import on_arrays

pytestmark = pytest.mark.usefixtures("h200")

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
RULES = {
    "zeros": Rule("linear", "zeros", False, "pixel", "ij", -0.75),
    "zeros, centres": Rule("linear", "zeros", False, "normalised", "xy", -0.75),
    "border": Rule("linear", "border", True, "normalised", "xy", -0.75),
    "reflection": Rule("linear", "reflection", False, "normalised", "ij", -0.75),
    "reflection, corners": Rule("linear", "reflection", True, "pixel", "xy", -0.75),
    "nearest": Rule("nearest", "zeros", False, "pixel", "xy", -0.75),
    "nearest, border": Rule("nearest", "border", False, "normalised", "ij", -0.75),
}
SHAPES = {1: ((16,), (19,)), 2: ((8, 6), (5, 7)), 3: ((4, 2, 6), (2, 3, 5))}


@dataclasses.dataclass
class Data:
    """A call's arrays, and what the kernels make of them."""

    k: Problem
    x: np.ndarray
    y: np.ndarray
    grid: np.ndarray

    @classmethod
    def drawn(cls, k: Problem, seed: int, spread: float = 1.0) -> "Data":
        """Points of which some are outside, some on pixels, one nowhere; values with zeros, infinity and NaN."""
        rng, shape = np.random.default_rng(seed), (k.images, k.points)
        x, y = (rng.normal(size=(k.images, n, k.channels)) for n in (k.pixels, k.points))
        x[rng.random(x.shape) < 0.05], y[rng.random(y.shape) < 0.05] = -0.0, 0.0
        x[-1, -1, 0], x[0, 0, 0], y[0, 0, 0] = np.inf, np.nan, -np.inf
        sizes = k.sizes if k.rule.order == "ij" else k.sizes[::-1]
        low, high = (-2, np.add(sizes, 2)) if k.rule.coordinates == "pixel" else (-1.6, 1.6)
        grid = rng.uniform(low, high, (*shape, k.axes)) * spread
        some = rng.random(grid.shape) < 0.2
        grid[some] = np.round(grid[some])
        grid[0, 1, 0], grid[-1, 2, -1], grid[-1, 3, 0] = np.nan, np.inf, -1e30
        return cls(k, x.astype(DTYPES[k.x]), y.astype(DTYPES[k.y]), grid.astype(np.float32))

    def kernel(self, code: str, threads: int, arrays: Any, *outs: tuple[tuple[int, ...], Any], **options: Any) -> Any:
        found = on_arrays(Points, code, arrays, outs, THREADS, -(-threads // THREADS), floats=0, **options)
        return found if len(outs) > 1 else found[0]

    def samples(self) -> np.ndarray:
        k = self.k
        threads = k.images * k.points * gather_ptx.sharing(k)
        return self.kernel(gather_ptx.samples(k), threads, [self.x, self.grid], (self.y.shape, self.y.dtype))

    def slopes(self) -> np.ndarray:
        k, given = self.k, [self.x, self.y, self.grid]
        threads = k.images * k.points * gather_ptx.lanes(k)
        return self.kernel(gather_ptx.slopes(k), threads, given, (self.grid.shape, np.float32))

    def pixels(self) -> np.ndarray:
        """By NumPy's sort in place of XLA's."""
        k, u32 = self.k, np.uint32
        entries, digits = k.images * k.points, np.uint16 if lists_ptx.narrow(k) else u32
        outs, made = [((entries,), digits), ((entries,), u32)], lists_ptx.made_first(k)
        outs, arrays = ([*outs, ((entries, 4), u32)], [self.y, self.grid]) if made else (outs, [self.grid])
        key, words, *records = self.kernel(lists_ptx.keys(k), entries, arrays, *outs)
        source = records[0] if made else self.grid
        bits = lists_ptx.left(k)
        cell = key if not bits else key.astype(int) << bits | words >> (entries - 1).bit_length()
        np.testing.assert_array_equal(words & u32(2 ** (entries - 1).bit_length() - 1), np.arange(entries))
        order = np.argsort(key, kind="stable")
        outs = ((k.keys + 1,), u32), ((entries, 4), u32)
        if bits:
            count = lists_ptx.groups(k) + 1
            given = self.kernel(lists_ptx.begins(k), entries + 1, [key[order]], ((count,), u32)), words[order]
            outside = {"all_written": not (key == lists_ptx.groups(k)).any()}
            code, arrays = lists_ptx.buckets(k), [*given, source]
            begins, records = self.kernel(code, 32 * count, arrays, *outs, **outside)
            cell = np.where(key == lists_ptx.groups(k), k.keys, cell)
        else:
            arrays = [key[order], words[order], source]
            begins, records = self.kernel(lists_ptx.cells(k), entries + 1, arrays, *outs)
        np.testing.assert_array_equal(begins, np.searchsorted(np.sort(cell), np.arange(k.keys + 1)))
        threads, given = k.images * k.pixels * k.units, [self.y, begins, records]
        return self.kernel(lists_ptx.pixels(k), threads, given, (self.x.shape, self.x.dtype))

    def by_xla(self, *ops: str) -> list[np.ndarray]:
        k, axes = self.k, (1,) * (self.k.axes - 1)
        spec = SampleSpec(k.sizes, None, "portable", k.rule, self.x.dtype, self.y.dtype)
        x = self.x.reshape(k.images, *k.sizes, k.channels)
        y, grid = (v.reshape(k.images, *axes, *v.shape[1:]) for v in (self.y, self.grid))
        given = {AT: (x, grid), AT_PIXELS: (y, grid), AT_SLOPES: (x, y, grid)}

        @jax.jit
        def run(given: Any) -> Any:
            call = lambda op, v: engines.Call(op, spec, tuple(map(jax.typeof, v)), "cpu")
            return {op: xla._run(call(op, v), *v) for op, v in given.items()}

        found = run({op: given[op] for op in ops})
        shapes = {AT: self.y.shape, AT_PIXELS: self.x.shape, AT_SLOPES: self.grid.shape}
        return [np.asarray(found[op]).reshape(shapes[op]) for op in ops]


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
    known = ~np.isnan(a.astype(np.float64))
    np.testing.assert_array_equal(np.signbit(a)[known], np.signbit(b)[known])


def problem(rule: str, rank: int, channels: int, x: str, y: str, images: int = 2) -> Problem:
    sizes, points = SHAPES[rank]
    return Problem(RULES[rule], images, sizes, math.prod(points), channels, x, y)


CALLS = [
    ("zeros", 1, 1, "bf16", "bf16"),
    ("zeros", 2, 3, "bf16", "bf16"),
    ("zeros", 3, 1, "f32", "f32"),
    ("zeros, centres", 2, 64, "bf16", "bf16"),
    ("zeros, centres", 3, 5, "f16", "f32"),
    ("border", 2, 4, "f16", "f16"),
    ("border", 1, 256, "f32", "bf16"),
    ("reflection", 2, 3, "f32", "f32"),
    ("reflection", 3, 8, "bf16", "f32"),
    ("reflection, corners", 2, 2, "f16", "bf16"),
    ("nearest", 2, 3, "f16", "f16"),
    ("nearest", 1, 5, "f16", "f16"),
    ("nearest", 1, 8, "f32", "bf16"),
    ("border", 1, 6, "bf16", "bf16"),
    ("nearest", 3, 16, "f32", "f32"),
    ("nearest, border", 1, 12, "bf16", "bf16"),
]


@pytest.mark.parametrize(("rule", "rank", "channels", "x", "y"), CALLS)
def test_kernels_have_the_bits_of_xla(rule: str, rank: int, channels: int, x: str, y: str):
    data = Data.drawn(problem(rule, rank, channels, x, y), channels)
    samples, pixels, slopes = data.by_xla(AT, AT_PIXELS, AT_SLOPES)
    same_bits(data.samples(), samples)
    same_bits(data.pixels(), pixels)
    if data.k.rule.mode == "linear":  # the slopes of others are 0, and nobody asks for them
        np.testing.assert_array_equal(data.slopes(), slopes)


@pytest.mark.parametrize("channels", [1, 8])
def test_long_lists_are_added_in_the_stated_order(channels: int):
    """Of hundreds of taps of one pixel, more than have sums in registers."""
    k = Problem(RULES["zeros"], 1, (2, 3), 300, channels, "f32", "f32")
    data = Data.drawn(k, 1, 0.3)
    assert lists_ptx.levels(k) > lists_ptx.LEVELS
    same_bits(data.pixels(), data.by_xla(AT_PIXELS)[0])


@pytest.mark.parametrize("most", [1, 3, 40, 200])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_cells_are_sorted_in_two_steps(rank: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """By the high bits of their numbers, and by those that are left: of many points in a bucket, of few and of none."""
    monkeypatch.setattr(lists_ptx, "MOST_GROUPS", most)
    for kept in (lists_ptx.keys, lists_ptx.begins, lists_ptx.buckets, lists_ptx.cells):
        monkeypatch.setattr(lists_ptx, kept.__name__, kept.__wrapped__)
    shape = {1: (90,), 2: (11, 9), 3: (4, 5, 3)}[rank]
    for rule, points, spread in (("zeros", 70, 1.0), ("border", 33, 1.5), ("nearest", 150, 0.2)):
        data = Data.drawn(Problem(RULES[rule], 1, shape, points, 2, "f32", "bf16"), 10 * most + rank, spread)
        assert (lists_ptx.left(data.k) > 0) == (data.k.keys > most)
        same_bits(data.pixels(), data.by_xla(AT_PIXELS)[0])


@pytest.mark.parametrize("channels", [512, 1024])
def test_sums_over_many_channels(channels: int):
    data = Data.drawn(Problem(RULES["zeros"], 1, (5,), 7, channels, "bf16", "bf16"), 2)
    assert gather_ptx.lanes(data.k) == 32
    np.testing.assert_array_equal(data.slopes(), data.by_xla(AT_SLOPES)[0])


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (1, 3)])
def test_images_of_a_pixel(sizes: tuple[int, ...]):
    """The only vector of an image, or none, reaches beyond it."""
    for rule, images in (("reflection, corners", 8), ("border", 3)):
        data = Data.drawn(Problem(RULES[rule], images, sizes, 9, 1, "bf16", "bf16"), 3)
        samples, pixels = data.by_xla(AT, AT_PIXELS)
        same_bits(data.samples(), samples)
        same_bits(data.pixels(), pixels)


# ---- which calls -----------------------------------------------------------------------------------------------------


def both(x: Any, grid: Any, dy: Any, **options: Any) -> Any:
    y, pull = jax.vjp(ft.partial(dnn.grid_sample, **options), x, grid)
    return y, pull(dy)


def shapes(x: tuple[int, ...], points: tuple[int, ...], dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    every = (x[0], *points)
    return (
        jax.ShapeDtypeStruct(x, dtype),
        jax.ShapeDtypeStruct((*every, len(points)), np.float32),
        jax.ShapeDtypeStruct((*every, x[-1]), dtype),
    )


@pytest.mark.parametrize("channels", [3, 64])
def test_lowers_for_cuda(channels: int):
    """Neither taps nor images in 32 bits are among what its kernels read and write."""
    given = shapes((2, 9, 16, channels), (5, 6))
    text = jax.jit(ft.partial(both, engine="hopper")).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    types = [line.rpartition(" : (")[2] for line in text.splitlines() if "mosaic_gpu" in line and " : (" in line]
    assert len(types) == 5
    assert not any(f"x{channels}xf32" in of_kernel for of_kernel in types)
    (sort,) = (line for line in text.splitlines() if "stablehlo.sort" in line)
    assert "is_stable = true" in sort
    assert "tensor<60xui16>, tensor<60xui32>" in text  # cells of few pixels are sorted by half the bytes


@pytest.mark.parametrize(("images", "narrow"), [(4, True), (507, True), (509, False)])
def test_which_cells_are_sorted_in_16_bits(images: int, narrow: bool):
    """Of 129 x 128 of each image at most 7 bits are left."""
    given = shapes((images, 128, 127, 3), (5, 6))
    text = jax.jit(ft.partial(both, engine="hopper")).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.sort" in text
    assert ("ui16" in text) == narrow


def test_the_derivative_along_a_tangent_has_no_kernel():
    x, grid, _ = shapes((2, 9, 8, 3), (5, 6))
    along = lambda x, grid: jax.jvp(lambda g: dnn.grid_sample(x, g), (grid,), (grid,))
    (call,) = (call for call in traced_calls(along, x, grid, platform="cuda") if call.op == AT_TANGENT)
    assert _unsupported(call) == "it has no kernel for the derivative along a tangent of the grid"
    nearest = lambda x, grid: jax.jvp(lambda g: dnn.grid_sample(x, g, mode="nearest"), (grid,), (grid,))
    assert [call.op for call in traced_calls(nearest, x, grid, platform="cuda")] == [AT]


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        (shapes((2, 9, 8, 3), (5, 6)), {"mode": "cubic"}, "its kernels have the modes nearest, linear, not cubic"),
        (shapes((2, 9, 8, 3), (0, 6)), {}, "it has nothing to do for an empty array"),
        (shapes((2, 9, 8, 0), (5, 6)), {}, "it has nothing to do for an empty array"),
        (shapes((2, 2**25, 1, 3), (5, 6)), {}, "its kernels take fewer than 2^24 pixels along an axis, not 33554432"),
        (shapes((1, 2**16, 2**13, 4), (5, 6)), {}, "its kernels take fewer than 2^31 - 64 elements"),
        (shapes((126, 51491, 331, 1), (5, 6)), {"mode": "nearest"}, "its kernels take fewer than 2^31 - 64 elements"),
        (shapes((64, 9, 8, 1), (2**12, 2**12)), {}, "its kernels take fewer than 2^31 - 64 elements"),
    ],
)  # fmt: skip
def test_refusals(given: tuple[Any, ...], options: dict[str, Any], reason: str):
    (call,) = traced_calls(ft.partial(dnn.grid_sample, **options), *given[:2], platform="cuda")
    assert (_unsupported(call) or "").startswith(reason)


def test_the_gradient_in_a_grid_of_channels_that_have_no_kernel():
    spec = SampleSpec((9, 8), None, "fast", RULES["zeros"], *map(np.dtype, [np.float32] * 2))
    for channels, served in ((5, True), (15, True), (96, False), (512, True), (1024, False)):
        x, grid, dy = shapes((2, 9, 8, channels), (5, 6), np.float32)
        reason = _unsupported(engines.Call(AT_SLOPES, spec, (x, dy, grid), "cuda"))
        assert (reason is None) == served
        assert served or "adds up to 16 channels, or a power of two of up to 128 vectors" in (reason or "")


def test_numbers_of_64_bits_are_refused():
    wide = SampleSpec((9, 8), None, "fast", RULES["zeros"], *map(np.dtype, [np.float64] * 2))
    x, grid, _ = shapes((2, 9, 8, 3), (5, 6), np.float64)
    reason = _unsupported(engines.Call(AT, wide, (x, grid), "cuda"))
    assert reason == (
        "its kernels take bfloat16, float16, float32 at points in float32, not float64, float64 at float32"
    )
