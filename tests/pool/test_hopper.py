"""The pooling kernels on the CPU, against the definition's bits; and what they refuse.

The machine that runs the kernel of PTX text takes it lane by lane.
"""

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
from jaxdnn._src.pool.hopper import scatter_ptx
from jaxdnn._src.pool.hopper.scatter_ptx import Strip
from jaxdnn._src.pool.hopper.shape import Shape, Tile

pytestmark = pytest.mark.usefixtures("h200")
needs_pallas = pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
THREADS = 128

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
FLOAT = {"bf16x2": DTYPES["bf16"], "f16x2": DTYPES["f16"], "f32": DTYPES["f32"]}
SIGNED, UNSIGNED = np.int32, np.uint32
COMPARISONS = {
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "neu": np.not_equal,
    "lt": np.less,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
# Sizes of x and the window over it.
WINDOWS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "resnet": ((7, 6), {"window": 3, "stride": 2, "padding": 1}),
    "dense": ((5, 4), {"window": (2, 3), "stride": 1, "padding": 1}),
    "dilated": ((9, 8), {"window": (3, 2), "stride": (1, 2), "dilation": (2, 3), "padding": 2}),
    "disjoint": ((6, 7), {"window": 2}),
    "steps over elements": ((7, 9), {"window": (2, 1), "stride": (3, 4)}),
    "ceil": ((8, 5), {"window": 4, "stride": 3, "padding": ((2, 0), (1, 1)), "ceil_mode": True}),
}


class Machine:
    """Runs a block of PTX for all threads of a grid, over one device memory of bytes.

    It knows the instructions that the pooling kernels emit and no others, and raises where an access lies outside of
    the arrays, where two threads store to one place and where one loads what is stored: threads are in no order.

    Of threads that part ways those that are furthest behind go on.
    """

    def __init__(self, arrays: list[np.ndarray]):
        self.starts, at = [], 4096  # gaps of poison between the arrays
        for array in arrays:
            self.starts.append(at)
            at += -(-array.nbytes // 16) * 16 + 4096
        self.memory, self.owned = np.full(at, 0xFF, np.uint8), np.zeros(at, bool)
        self.loaded, self.writer = np.zeros(at, bool), np.full(at, -1)
        for start, array in zip(self.starts, arrays, strict=True):
            self.memory[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
            self.owned[start : start + array.nbytes] = True

    def array(self, number: int, like: np.ndarray) -> np.ndarray:
        start = self.starts[number]
        return self.memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)

    def run(self, text: str, threads: int, block: int = THREADS, floats: int = 0) -> None:
        blocks = -(-threads // block)
        self.count = blocks * block
        self.registers: dict[str, Any] = {
            "%ctaid.x": np.repeat(np.arange(blocks, dtype=UNSIGNED), block),
            "%tid.x": np.tile(np.arange(block, dtype=UNSIGNED), blocks),
        }
        for i, start in enumerate(self.starts):
            self.registers[f"${i}"] = np.full(self.count, start, np.int64)
        if floats:
            self.registers[f"${len(self.starts)}"] = np.full(self.count, 1024, UNSIGNED)
        self.block = self.registers["%ctaid.x"].astype(np.int64)
        self.shared = np.full((blocks, 256 + floats), 0xFFFFFFFF, UNSIGNED)
        # Of a word of shared memory since the last barrier: who stored it, who loaded it last.
        self.stored, self.read = (np.full(self.shared.shape, -1) for _ in range(2))
        code: list[str] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if line.endswith(":"):
                labels[line[:-1]] = len(code)
            elif line not in "{}" and not line.startswith((".reg", ".pragma")):
                code.append(line)
        at = np.zeros(self.count, np.int64)
        while (now := int(at.min())) < len(code):
            here = at == now
            at[here] += 1
            self._step(code[now], here, at, labels)

    def _step(self, line: str, here: np.ndarray, at: np.ndarray, labels: dict[str, int]) -> None:
        match = re.fullmatch(r"(?:@(!?)(p\d+) )?(\S+) (.*);", line)
        assert match, line
        negated, guard, name, rest = match.groups()
        given = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        active = here & (self.registers[guard] ^ bool(negated)) if guard else here
        parts = name.split(".")
        if parts[:2] in (["ld", "global"], ["st", "global"]):
            self._access(parts, given, active)
        elif parts[1:2] == ["shared"]:
            self._share(parts, given, active)
        elif parts[0] == "bar":
            assert here.all(), "threads pass a barrier without others"
            self.stored[:], self.read[:] = -1, -1
        elif parts[0] == "bra":
            at[active] = labels[given[0]]
        elif parts[0] == "mov" and given[0].startswith("{"):
            word = self._get(given[1])
            for i, half in enumerate(given[0][1:-1].split(",")):
                self._put(half.strip(), (word >> UNSIGNED(16 * i)) & UNSIGNED(0xFFFF), active)
        elif "|" in given[0]:
            for i, predicate in enumerate(given[0].split("|")):
                self._put(predicate, self._value(parts, given[1:])[i], active)
        else:
            self._put(given[0], self._value(parts, given[1:]), active)

    def _get(self, operand: str) -> Any:
        if operand in self.registers:
            return self.registers[operand]
        bits = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0) & 0xFFFFFFFF
        return np.full(self.count, bits, UNSIGNED)

    def _put(self, register: str, value: np.ndarray, active: np.ndarray) -> None:
        old = self.registers.get(register)
        self.registers[register] = value if old is None or active.all() else np.where(active, value, old)

    def _access(self, parts: list[str], given: list[str], active: np.ndarray) -> None:
        names, place = given if parts[0] == "ld" else given[::-1]
        base, _, offset = place[1:-1].partition("+")
        registers = [n.strip() for n in names.strip("{}").split(",")]
        size = int(parts[-1][1:]) // 8
        kind = np.dtype(f"u{size}")
        for i, register in enumerate(registers):
            at = (self.registers[base] + int(offset) + size * i)[active]
            assert np.all(at % (size * len(registers)) == size * i), "unaligned"
            where = at[:, None] + np.arange(size)
            assert self.owned[where].all(), "outside of the arrays"
            if parts[0] == "ld":
                assert (self.writer[where] < 0).all(), "loads what is stored"
                self.loaded[where] = True
                value = self.registers.get(register, np.zeros(self.count, UNSIGNED)).copy()
                value[active] = self.memory[where].view(kind)[:, 0]
                self.registers[register] = value
            else:
                threads = np.flatnonzero(active)[:, None]
                assert not self.loaded[where].any(), "stores what was loaded"
                assert ((self.writer[where] < 0) | (self.writer[where] == threads)).all(), "two threads store"
                assert np.unique(at).size == at.size, "two threads store"
                self.writer[where] = threads
                self.memory[where] = self._get(register)[active].astype(kind).view(np.uint8).reshape(-1, size)

    def _share(self, parts: list[str], given: list[str], active: np.ndarray) -> None:
        register, place = given if parts[0] == "ld" else given[::-1]
        base, _, offset = place[1:-1].partition("+")
        at = (self.registers[base].astype(np.int64) + int(offset or 0))[active]
        word, block, threads = at // 4, self.block[active], np.flatnonzero(active)
        assert np.all(at % 4 == 0), "unaligned"
        assert np.all((word >= 256) & (word < self.shared.shape[1])), "outside of shared memory"
        others = lambda owners: np.any((owners[block, word] >= 0) & (owners[block, word] != threads))
        assert not others(self.stored), "a race: another thread stored here"
        if parts[0] == "ld":
            value = self.registers.get(register, np.zeros(self.count, UNSIGNED)).copy()
            value[active] = self.shared[block, word]
            self.registers[register] = value
            self.read[block, word] = threads
        else:
            assert not others(self.read), "a race: another thread loaded this"
            assert np.unique(block * self.shared.shape[1] + word).size == word.size, "two threads store"
            self.shared[block, word] = self._get(register)[active]
            self.stored[block, word] = threads

    def _value(self, parts: list[str], given: list[str]) -> Any:
        get = [self._get(g) for g in given if not g.startswith("p")]
        signed = lambda a: a.view(SIGNED) if a.dtype == UNSIGNED else a
        match parts:
            case ["mov", *_]:
                return get[0]
            case ["cvta", *_]:
                return get[0]
            case ["add", "s32" | "u32"]:
                return get[0] + get[1]
            case ["min" | "max", "u32"]:
                return (np.minimum if parts[0] == "min" else np.maximum)(get[0], get[1])
            case ["add", "s64"]:
                return get[0].astype(np.int64) + signed(get[1]).astype(np.int64)
            case ["min" | "max", "s32" | "s16x2" | "u16x2" as kind]:
                dtype = {"s32": SIGNED, "s16x2": np.int16, "u16x2": np.uint16}[kind]
                a, b = (np.ascontiguousarray(v).view(dtype) for v in get)
                return (np.minimum if parts[0] == "min" else np.maximum)(a, b).view(UNSIGNED)
            case ["mad", "wide", "u32"]:
                return get[0].astype(np.int64) * get[1].astype(np.int64) + get[2]
            case ["cvt", "rn", "f32", "u32"]:
                return get[0].astype(np.float32).view(UNSIGNED)
            case ["div", "rn", "f32"]:
                return (get[0].view(np.float32) / get[1].view(np.float32)).view(UNSIGNED)
            case ["sub", "s32" | "u32"]:
                return get[0] - get[1]
            case ["mul", "lo", "u32"]:
                return get[0] * get[1]
            case ["mad", "lo", "s32" | "u32"]:
                return get[0] * get[1] + get[2]
            case ["mad", "wide", "s32"]:
                return signed(get[0]).astype(np.int64) * signed(get[1]).astype(np.int64) + get[2]
            case ["div", "u32"]:
                return get[0] // get[1]
            case ["and", "pred"]:
                return self.registers[given[0]] & self.registers[given[1]]
            case ["and", "b32"]:
                return get[0] & get[1]
            case ["or", "b32"]:
                return get[0] | get[1]
            case ["shl", "b32"]:
                return get[0] << get[1]
            case ["shr", "u32"]:
                return get[0] >> get[1]
            case ["setp", comparison, "u32"]:
                return COMPARISONS[comparison](get[0], get[1])
            case ["setp", comparison, "s32"]:
                return COMPARISONS[comparison](signed(get[0]), signed(get[1]))
            case ["setp", "eq", "f16x2"]:
                a, b = (np.ascontiguousarray(v).view(np.float16).reshape(self.count, 2) for v in get)
                return (a == b).T
            case ["selp", "b32" | "f32"]:
                return np.where(self.registers[given[2]], get[0], get[1])
            case ["lop3", "b32"]:
                table, out = int(given[3], 0), np.zeros(self.count, UNSIGNED)
                for i, (a, b, c) in enumerate(itertools.product((0, 1), repeat=3)):
                    if table >> i & 1:
                        terms = (v if bit else ~v for v, bit in zip(get, (a, b, c), strict=False))
                        out |= next(terms) & next(terms) & next(terms)
                return out
            case ["prmt", "b32"]:
                source, picks = np.stack([get[0], get[1]], 1).view(np.uint8), int(given[2], 0)
                return np.stack([source[:, picks >> 4 * i & 7] for i in range(4)], 1).copy().view(UNSIGNED)[:, 0]
            case ["set", comparison, "u32", "u32"]:
                return np.where(COMPARISONS[comparison](get[0], get[1]), UNSIGNED(0xFFFFFFFF), UNSIGNED(0))
            case ["set", comparison, "u32", kind]:
                a, b = (np.ascontiguousarray(v).view(FLOAT[kind]).reshape(self.count, -1) for v in get)
                with np.errstate(invalid="ignore"):
                    found = COMPARISONS[comparison](a, b)
                whole = np.dtype(f"u{FLOAT[kind].itemsize}").type
                return np.where(found, whole(np.iinfo(whole).max), whole(0)).view(UNSIGNED)[:, 0]
            case ["add" | "mul", "rn", "f32" | "bf16x2" | "f16x2" as kind]:
                a, b = (np.ascontiguousarray(v).view(FLOAT[kind]) for v in get)
                with np.errstate(all="ignore"):
                    return (a + b if parts[0] == "add" else a * b).view(UNSIGNED)
            case ["cvt", "rn", "bf16x2" | "f16x2" as kind, "f32"]:
                high, low = (v.view(np.float32).astype(FLOAT[kind]).view(np.uint16).astype(UNSIGNED) for v in get)
                return high << UNSIGNED(16) | low
            case ["cvt", "u32", "u16"]:
                return get[0] & UNSIGNED(0xFFFF)
            case ["cvt", "f32", "f16"]:
                return get[0].astype(np.uint16).view(np.float16).astype(np.float32).view(UNSIGNED)
        raise NotImplementedError(".".join(parts))


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


@tiled[0]
@tiled[1]
@pytest.mark.parametrize("strip", [(3, 4), (7, 9, 256)], ids=str)
@pytest.mark.parametrize("zeros", ZEROS)
def test_maximum_backward_by_scattering(name: str, dtype: str, strip: tuple[int, ...], zeros: str):
    k, dy, tap, dx = outputs_of(name, dtype, zeros, 3)
    agree(scattered(k, dy, tap, dx, Strip(*strip)), dx)


def scattered(k: Shape, dy: np.ndarray, tap: np.ndarray, dx: np.ndarray, strip: Strip, change: Any = str) -> np.ndarray:
    machine = Machine([dy, tap, np.full_like(dx, np.nan)])
    code = change(scatter_ptx.maximum_backward(k, strip))
    machine.run(code, strip.count(k), strip.threads, strip.floats(k))
    return machine.array(2, dx)


@needs_pallas
@tiled[0]
@tiled[1]
def test_taps_that_are_none(kernels: Any, name: str, dtype: str):
    """Any byte may stand for a tap: those that are none, or lie in the padding, add nothing and reach nothing else."""
    k, dy, tap, dx = outputs_of(name, dtype, "some -0", 3)
    tap = np.random.default_rng(9).integers(0, 256, tap.shape).astype(np.uint8) % np.uint8(2 * np.prod(k.taps))
    found = kernels.maximum_backward(jnp.asarray(dy), jnp.asarray(tap), k, Tile(1, 1, 3))
    agree(scattered(k, dy, tap, dx, Strip(2, 3)), np.asarray(found))


def test_the_machine_finds_races():
    k, dy, tap, dx = outputs_of("3 x 3", "bf16", "+0", 3)
    without = lambda code: code.replace("bar.sync 0;\n", "")
    with pytest.raises(AssertionError, match="a race"):
        scattered(k, dy, tap, dx, Strip(2, 3), without)
    # The sums of neighbouring threads overlap.
    shared = lambda code: re.sub(r"(mad.lo.u32 r\d+, r0), 4, \$3;", r"\1, 0, $3;", code, count=1)
    with pytest.raises(AssertionError, match="two threads store"):
        scattered(k, dy, tap, dx, Strip(2, 3), shared)


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


def test_the_machine_finds_accesses_outside():
    k, dy, tap, dx = outputs_of("3 x 3", "f32", "+0", 3)
    with pytest.raises(AssertionError, match="outside of the arrays"):
        scattered(k, dy[:1], tap, dx, Strip(2, 3))
    with pytest.raises(AssertionError, match="outside of the arrays"):
        scattered(k, dy, tap, dx[:1], Strip(2, 3))


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
            assert isinstance(part, Strip) or vectors % part.vectors == 0
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
