"""The pooling kernels: their PTX, run lane by lane on the CPU, against the definition's bits; and what they refuse."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._kernels import hopper
from jaxdnn._kernels.hopper import pool_ptx
from jaxdnn._kernels.hopper.pool_ptx import THREADS, Shape

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
FLOAT = {"bf16x2": DTYPES["bf16"], "f16x2": DTYPES["f16"], "f32": DTYPES["f32"]}
SIGNED, UNSIGNED = np.int32, np.uint32
COMPARISONS = {
    "ge": np.greater_equal,
    "eq": np.equal,
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
    """Runs a block of PTX for all threads of a grid at once, over one device memory of bytes. It knows the instructions
    that the pooling kernels emit and no others, and raises where an access lies outside of the arrays."""

    def __init__(self, arrays: list[np.ndarray]):
        self.starts, at = [], 4096  # gaps of poison between the arrays
        for array in arrays:
            self.starts.append(at)
            at += -(-array.nbytes // 16) * 16 + 4096
        self.memory, self.owned = np.full(at, 0xFF, np.uint8), np.zeros(at, bool)
        for start, array in zip(self.starts, arrays, strict=True):
            self.memory[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
            self.owned[start : start + array.nbytes] = True

    def array(self, number: int, like: np.ndarray) -> np.ndarray:
        start = self.starts[number]
        return self.memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)

    def run(self, text: str, threads: int) -> None:
        blocks = -(-threads // THREADS)
        self.registers: dict[str, Any] = {
            "%ctaid.x": np.repeat(np.arange(blocks, dtype=UNSIGNED), THREADS),
            "%tid.x": np.tile(np.arange(THREADS, dtype=UNSIGNED), blocks),
        }
        self.count = blocks * THREADS
        for i, start in enumerate(self.starts):
            self.registers[f"${i}"] = np.full(self.count, start, np.int64)
        for line in text.splitlines():
            if line not in "{}" and not line.startswith(".reg"):
                self._step(line)

    def _step(self, line: str) -> None:
        match = re.fullmatch(r"(?:@(p\d+) )?(\S+) (.*);", line)
        assert match, line
        guard, name, rest = match.groups()
        given = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        active = self.registers[guard] if guard else np.ones(self.count, bool)
        parts = name.split(".")
        if parts[:2] in (["ld", "global"], ["st", "global"]):
            return self._access(parts, given, active)
        assert guard is None, line
        if parts[0] == "mov" and given[0].startswith("{"):
            word = self._get(given[1])
            for i, half in enumerate(given[0][1:-1].split(",")):
                self.registers[half.strip()] = (word >> UNSIGNED(16 * i)) & UNSIGNED(0xFFFF)
            return None
        self.registers[given[0]] = self._value(parts, given[1:])
        return None

    def _get(self, operand: str) -> Any:
        if operand in self.registers:
            return self.registers[operand]
        bits = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0) & 0xFFFFFFFF
        return np.full(self.count, bits, UNSIGNED)

    def _access(self, parts: list[str], given: list[str], active: np.ndarray) -> None:
        names, place = given if parts[0] == "ld" else given[::-1]
        base, _, offset = place[1:-1].partition("+")
        registers = [n.strip() for n in names.strip("{}").split(",")]
        for i, register in enumerate(registers):
            at = (self.registers[base] + int(offset) + 4 * i)[active]
            assert np.all(at % (4 * len(registers)) == 4 * i), "unaligned"
            where = at[:, None] + np.arange(4)
            assert self.owned[where].all(), "outside of the arrays"
            if parts[0] == "ld":
                value = self.registers.get(register, np.zeros(self.count, UNSIGNED)).copy()
                value[active] = self.memory[where].view(UNSIGNED)[:, 0]
                self.registers[register] = value
            else:
                self.memory[where] = np.ascontiguousarray(self._get(register)[active]).view(np.uint8).reshape(-1, 4)

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
            case ["max", "u32"]:
                return np.maximum(get[0], get[1])
            case ["cvt", "rn", "f32", "u32"]:
                return get[0].astype(np.float32).view(UNSIGNED)
            case ["div", "rn", "f32"]:
                return (get[0].view(np.float32) / get[1].view(np.float32)).view(UNSIGNED)
            case ["sub", "u32"]:
                return get[0] - get[1]
            case ["mul", "lo", "u32"]:
                return get[0] * get[1]
            case ["mad", "lo", "s32"]:
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
            case ["setp", "lt", "u32"]:
                return get[0] < get[1]
            case ["selp", "b32"]:
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
            case ["add" | "mul", "rn", "f32"]:
                a, b = (v.view(np.float32) for v in get)
                with np.errstate(all="ignore"):
                    return (a + b if parts[0] == "add" else a * b).view(UNSIGNED)
            case ["cvt", "rn", "bf16x2" | "f16x2" as kind, "f32"]:
                high, low = (v.view(np.float32).astype(FLOAT[kind]).view(np.uint16).astype(UNSIGNED) for v in get)
                return high << UNSIGNED(16) | low
            case ["cvt", "f32", "f16"]:
                return get[0].astype(np.uint16).view(np.float16).astype(np.float32).view(UNSIGNED)
        raise NotImplementedError(".".join(parts))


def shape_of(name: str, dtype: str, vectors: int) -> tuple[Shape, dict[str, Any]]:
    size, options = WINDOWS[name]
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


each = [pytest.mark.parametrize("name", WINDOWS), pytest.mark.parametrize("dtype", DTYPES)]


@each[0]
@each[1]
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_maximum(name: str, dtype: str, rows: int):
    k, options = shape_of(name, dtype, 3)
    x = data((2, *k.size, 3 * 16 // DTYPES[dtype].itemsize), DTYPES[dtype], 1, special=True)
    y, tap = reference.pool(x, **options, return_indices="tap", arithmetic="ordered")
    for indices in (False, True):
        machine = Machine([x, y, tap] if indices else [x, y])
        for number, like in ((1, y), (2, tap))[: 1 + indices]:
            machine.array(number, like).view(np.uint8)[:] = 0x5A
        machine.run(pool_ptx.maximum(k, indices=indices, rows=rows), k.forward_threads(rows))
        agree(machine.array(1, y), y)
        if indices:
            agree(machine.array(2, tap), tap)


@each[0]
@each[1]
def test_maximum_backward(name: str, dtype: str):
    k, options = shape_of(name, dtype, 2)
    x = data((2, *k.size, 2 * 16 // DTYPES[dtype].itemsize), DTYPES[dtype], 2)
    tap = reference.pool(x, **options, return_indices="tap")[1]
    dy = data(tap.shape, DTYPES[dtype], 3)
    dx = reference.pool_dgrad(dy, x, **options, arithmetic="ordered")
    machine = Machine([dy, tap, np.full_like(dx, np.nan)])
    machine.run(pool_ptx.maximum_backward(k), k.backward_threads())
    agree(machine.array(2, dx), dx)


@each[0]
@each[1]
@pytest.mark.parametrize("mode", ["average", "average_exclude_padding"])
def test_average_and_its_backward(name: str, dtype: str, mode: str):
    k, options = shape_of(name, dtype, 1)
    x = data((2, *k.size, 16 // DTYPES[dtype].itemsize), DTYPES[dtype], 4)
    options = {**options, "mode": mode}
    y = reference.pool(x, **options, arithmetic="ordered")
    several = options.get("padding", 0) != 0 and (mode != "average" or "ceil_mode" in options)
    factor = None if several else 1.0 / np.prod(k.taps)
    if several:
        pads = options["padding"]
        high = (pads, pads) if isinstance(pads, int) else tuple(p[1] for p in pads)
        sides = ((0, 0), (0, 0)) if mode != "average" else tuple(zip(k.low, high, strict=True))
        counted: Any = tuple((-low, n + high) for (low, high), n in zip(sides, k.size, strict=True))
        k = dataclasses.replace(k, counted=counted)
    for rows in (1, 2):
        machine = Machine([x, np.full_like(y, np.nan)])
        machine.run(pool_ptx.average(k, factor=factor, rows=rows), k.forward_threads(rows))
        agree(machine.array(1, y), y)
    dy = data(y.shape, DTYPES[dtype], 5)
    dx = reference.pool_dgrad(dy, x, **options, arithmetic="ordered")
    machine = Machine([dy, np.full_like(dx, np.nan)])
    machine.run(pool_ptx.average_backward(k, factor=factor), k.backward_threads())
    agree(machine.array(1, dx), dx)


def test_the_machine_finds_accesses_outside():
    k, _ = shape_of("resnet", "f32", 1)
    x = np.zeros((2, *k.size, 4), np.float32)
    code = pool_ptx.maximum(k, indices=False, rows=1)
    with pytest.raises(AssertionError, match="outside of the arrays"):
        Machine([x[:1], np.zeros((2, *k.out, 4), np.float32)]).run(code, k.forward_threads(1))
    with pytest.raises(AssertionError, match="outside of the arrays"):
        Machine([x, np.zeros((1, *k.out, 4), np.float32)]).run(code, k.forward_threads(1))


REFUSALS = [
    ({}, (2, 8, 8, 12), "bfloat16", "channels in vectors of 16 bytes, not 12 of bfloat16"),
    ({"layout": "NCHW"}, (2, 8, 8, 16), "bfloat16", "one or two spatial axes before the channels"),
    ({"layout": "NDHWC"}, (2, 4, 8, 8, 16), "bfloat16", "one or two spatial axes before the channels"),
    ({"nan": "ignore"}, (2, 8, 8, 16), "bfloat16", "its kernels propagate NaN"),
    ({"window": 9, "stride": 1, "padding": 4}, (2, 9, 9, 16), "float32", "windows of 2 to 64 taps, not 81"),
    ({}, (2, 8, 8, 16), "int8", "its kernels take bfloat16, float16, float32, not int8"),
    ({}, (0, 8, 8, 16), "float32", "arrays of 1 to 2\\^31 vectors"),
]


@pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_refusals(number: int):
    options, shape, dtype, reason = REFUSALS[number]
    (explained,) = dnn.explain(
        lambda x: dnn.pool(x, **options), jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), platform="cuda"
    )
    (found,) = (c for c in explained.candidates if c.engine == "hopper")
    assert re.search(reason, str(found.refusal)), found.refusal
    assert explained.engine == "xla"


@pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
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
