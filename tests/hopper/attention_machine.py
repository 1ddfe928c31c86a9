"""Runs attention's forward kernel on the CPU: its consumers' PTX on warpgroups of 128 lanes, and a producer.

Shared memory is bytes, in which boxes lie as TMA lays them out. The warpgroups and the producer take turns in an order
that is drawn, and change at every instruction that waits. A register that a product in flight reads or writes may not
be used, and a slot is overwritten as soon as its barrier says that it has been read.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Generator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxdnn._src.attention.hopper import work
from jaxdnn._src.attention.hopper.forward_ptx import code
from jaxdnn._src.attention.hopper.plan import ROWS, Plan, Problem, Spread
from jaxdnn._src.attention.hopper.tile_ptx import RESULTS, TURN, operands
from jaxdnn_reference.arithmetic import tensor_core
from jaxdnn_reference.rounding import fma
from jaxdnn_reference.special_function import ex2

LANES = 128
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip
Run = Generator[None, None, Any]
Add = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def nearest(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A step of a product, rounded once."""
    with np.errstate(all="ignore"):
        return (c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def modelled(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A step of a product as the matrix unit's model has it."""
    return tensor_core(np.ascontiguousarray(a.T), b, start=c.T).value.T


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    return address ^ (((address >> 7) & (swizzle // 16 - 1)) << 4)


class Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.due = count
        self.over = 0

    def arrive(self) -> None:
        self.due -= 1
        assert self.due >= 0
        if not self.due:
            self.due, self.over = self.count, self.over + 1

    def passed(self, parity: int) -> bool:
        """Whether the phase of a parity is over, as `try_wait` says."""
        return (self.over - 1) % 2 == parity


class Block:
    """One block of threads: its shared memory, its barriers, what it writes."""

    def __init__(self, problem: Problem, plan: Plan, rng: np.random.Generator, add: Add) -> None:
        self.problem, self.plan, self.rng, self.add = problem, plan, rng, add
        sizes = {"q": plan.q_slots * plan.q_bytes, "k": plan.stages * plan.k_bytes, "v": plan.stages * plan.v_bytes}
        sizes["out"] = 0 if plan.out_in_q else plan.consumers * plan.out_bytes
        self.at, place = {}, 1024
        for name, size in sizes.items():
            self.at[name] = place
            place += -(-size // 1024) * 1024
        if plan.out_in_q:
            self.at["out"] = self.at["q"]
        self.shared = np.full(place, 0xFF, np.uint8)
        self.bars = 1 << 20
        n, s = plan.q_slots, plan.stages
        counts = [1] * n + [4] * n + [1] * 2 * s + [4 * plan.consumers] * 2 * s
        self.barriers = [Barrier(c) for c in counts]
        self.arrays: list[np.ndarray] = []
        self.named: dict[int, list[Any]] = {}  # of a barrier its number of threads, who has come, predicates
        self.rounds: dict[int, int] = {}

    def barrier(self, name: str, index: int) -> Barrier:
        return self.barriers[self.plan.barrier(name) // 8 + index]

    def put(self, name: str, offset: int, rows: np.ndarray) -> None:
        """A matrix of rows as boxes of a chunk's features each; features beyond the last are zero."""
        plan, chunk = self.plan, self.plan.chunk
        chunks = -(-rows.shape[1] // chunk)
        padded = np.zeros((rows.shape[0], chunks * chunk), rows.dtype)
        padded[:, : rows.shape[1]] = rows
        for c in range(chunks):
            data = np.ascontiguousarray(padded[:, c * chunk : (c + 1) * chunk]).view(np.uint8).ravel()
            start = self.at[name] + offset + c * data.size
            self.shared[swizzled(start + np.arange(data.size), plan.swizzle)] = data

    def get(self, name: str, offset: int, rows: int, columns: int) -> np.ndarray:
        plan, found = self.plan, []
        for c in range(-(-columns // plan.chunk)):
            start = self.at[name] + offset + c * rows * plan.swizzle
            data = self.shared[swizzled(start + np.arange(rows * plan.swizzle), plan.swizzle)]
            found.append(data.view(DTYPES[plan.dtype]).reshape(rows, plan.chunk))
        return np.concatenate(found, 1)[:, :columns]

    def keep(self, array: np.ndarray) -> int:
        """The address in device memory of an array that the kernel may read."""
        self.arrays.append(np.ascontiguousarray(array).view(np.uint8).ravel())
        return len(self.arrays) << 40

    def read(self, places: np.ndarray, width: int) -> np.ndarray:
        data, at = self.arrays[(int(places[0]) >> 40) - 1], places - (places[0] >> 40 << 40)
        assert (at >= 0).all(), "a load before an array"
        assert (at + width <= len(data)).all(), "a load beyond an array"
        parts = [data[at + i].astype(np.uint32) << np.uint32(8 * i) for i in range(width)]
        return np.bitwise_or.reduce(parts)

    # ---- named barriers

    def come(self, number: int, threads: int, predicate: Any = False) -> int:
        """An arrival; the round that it belongs to."""
        count, predicates = self.named.setdefault(number, [0, []])
        self.named[number][0] = count + LANES
        predicates.append(bool(np.any(predicate)))
        now = self.rounds.get(number, 0)
        assert self.named[number][0] <= threads, "more threads than a barrier has"
        if self.named[number][0] == threads:
            self.rounds[number] = now + 1
            self.named[number] = [0, []]
            self.voted = getattr(self, "voted", {}) | {(number, now): any(predicates)}
        return now


class Warpgroup:
    """A consumer: registers of 128 lanes."""

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number = block, number
        self.threads = np.arange(LANES) + LANES * number
        self.flying: list[set[str]] = []
        self.group: set[str] = set()
        self.stored: dict[int, float] = {}

    def run(self, text: str, kinds: dict[str, str], given: dict[str, Any]) -> Run:
        code, labels = _decoded(text)
        self.r: dict[str, np.ndarray] = {"%tid.x": self.threads.astype(np.uint32)}
        for i, (name, kind) in enumerate(kinds.items()):
            value = given[name]
            if kind == "f":
                self.r[f"${i}"] = np.full(LANES, value, np.float32).view(np.uint32)
            elif kind == "l":
                self.r[f"${i}"] = np.full(LANES, value, np.uint64)
            else:
                self.r[f"${i}"] = np.full(LANES, value & 2**32 - 1, np.uint32)
        at = 0
        while at < len(code):
            guard, name, ops, used = code[at]
            at += 1
            if name[0] != "wgmma" and self.flying and any(used & group for group in (*self.flying, self.group)):
                raise RuntimeError(f"{'.'.join(name)} {ops} uses a register of a product in flight")
            active = np.ones(LANES, bool)
            if guard:
                active = ~self.r[guard[1:]] if guard[0] == "!" else self.r[guard]
            if name[0] == "bra":
                if active.any() != active.all():
                    raise RuntimeError("lanes part ways")
                at = labels[ops[0]] if active.all() else at
                continue
            waits = self.step(name, ops, active)
            if waits is not None:
                yield from waits

    # ---- values

    def value(self, x: str, kind: type = np.uint32) -> np.ndarray:
        if x in self.r:
            return self.r[x]
        if x.startswith("0f"):
            return np.full(LANES, int(x[2:], 16), np.uint32)
        return np.full(LANES, int(x, 0) & (2**64 - 1 if kind is np.uint64 else 2**32 - 1), kind)

    def real(self, x: str) -> np.ndarray:
        return self.value(x).view(np.float32)

    def signed(self, x: str) -> np.ndarray:
        return self.value(x).view(np.int32)

    def put(self, target: str, value: np.ndarray, active: np.ndarray) -> None:
        value = value.view(np.uint32) if value.dtype in (np.float32, np.int32) else value
        old = self.r.get(target)
        self.r[target] = value if active.all() or old is None else np.where(active, value, old)

    def place(self, x: str) -> np.ndarray:
        inner = x[1:-1]
        base, _, plus = inner.partition("+")
        return self.value(base).astype(np.int64) + int(plus or 0)

    # ---- instructions

    def step(self, name: list[str], o: list[Any], active: np.ndarray) -> Run | None:
        put = lambda value: self.put(o[0], value, active)
        with np.errstate(all="ignore"):
            match name:
                case ["mov", "b32"] if isinstance(o[0], tuple):
                    for i, half in enumerate(o[0]):
                        self.put(half, self.value(o[1]) >> np.uint32(16 * i) & np.uint32(0xFFFF), active)
                case ["mov", "b32" | "u32" | "f32"]:
                    put(self.value(o[1]).copy())
                case ["mov", "b64"]:
                    put(self.value(o[1], np.uint64))
                case ["mov", "f32"]:
                    put(self.value(o[1]).copy())
                case ["mov", "b16"]:
                    put(self.value(o[1]))
                case ["cvt", "u32", "u16"]:
                    put(self.value(o[1]) & np.uint32(0xFFFF))
                case ["cvt", "rn", "f32", "s32"]:
                    put(self.signed(o[1]).astype(np.float32))
                case ["cvt", "u64", "u32"]:
                    put(self.value(o[1]).astype(np.uint64))
                case ["cvt", "s64", "s32"]:
                    put(self.signed(o[1]).astype(np.int64).view(np.uint64))
                case ["mul", "wide", "s32"]:
                    put((self.signed(o[1]).astype(np.int64) * int(o[2])).view(np.uint64))
                case ["or", "b64"]:
                    put(self.value(o[1]) | self.value(o[2], np.uint64))
                case ["add", "s64"]:
                    put(self.value(o[1]) + self.value(o[2], np.uint64))
                case ["mul", "wide", "u32"]:
                    put(self.value(o[1]).astype(np.uint64) * self.value(o[2]).astype(np.uint64))
                case ["mad", "wide", "u32"]:
                    put(self.value(o[1]).astype(np.uint64) * self.value(o[2]).astype(np.uint64) + self.value(o[3]))
                case ["mad", "lo", "s32"]:
                    put(self.value(o[1]) * self.value(o[2]) + self.value(o[3]))
                case ["mul", "lo", "s32"]:
                    put(self.value(o[1]) * self.value(o[2]))
                case ["add" | "sub", "s32"]:
                    put((np.add if name[0] == "add" else np.subtract)(self.value(o[1]), self.value(o[2])))
                case ["min" | "max", "s32"]:
                    put((np.minimum if name[0] == "min" else np.maximum)(self.signed(o[1]), self.signed(o[2])))
                case ["rem" | "div", "u32"]:
                    put((np.remainder if name[0] == "rem" else np.floor_divide)(self.value(o[1]), self.value(o[2])))
                case ["shl", "b32"]:
                    put(self.value(o[1]) << self.value(o[2]))
                case ["shr", "u32"]:
                    put(self.value(o[1]) >> self.value(o[2]))
                case ["and" | "or" | "xor", "b32" | "pred"]:
                    op = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name[0]]
                    put(op(self.value(o[1]), self.value(o[2])))
                case ["setp", "nan", "f32"]:
                    put(np.isnan(self.real(o[1])) | np.isnan(self.real(o[2])))
                case ["setp", how, "f32"]:
                    put(COMPARE[how](self.real(o[1]), self.real(o[2])))
                case ["setp", how, "and", "u32"]:
                    put(COMPARE[how](self.value(o[1]), self.value(o[2])) & self.value(o[3]))
                case ["setp", how, "and", "s32"]:
                    put(COMPARE[how](self.signed(o[1]), self.signed(o[2])) & self.value(o[3]))
                case ["setp", how, "s32"]:
                    put(COMPARE[how](self.signed(o[1]), self.signed(o[2])))
                case ["setp", how, "u32"]:
                    put(COMPARE[how](self.value(o[1]), self.value(o[2])))
                case ["selp", "b32" | "f32"]:
                    put(np.where(self.value(o[3]), self.value(o[1]), self.value(o[2])))
                case ["fma", "rn", "f32"]:
                    put(fma(*(self.real(x) for x in o[1:])))
                case [("add" | "sub" | "mul") as kind, "rn", "f32"]:
                    op = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[kind]
                    put(op(self.real(o[1]), self.real(o[2])))
                case ["max", "f32"]:
                    put(np.fmax(self.real(o[1]), self.real(o[2])))
                case ["neg", "f32"]:
                    put(-self.real(o[1]))
                case ["ex2", "approx", "ftz", "f32"]:
                    put(ex2(self.real(o[1])))
                case ["lg2", "approx", "f32"]:
                    put(np.log2(self.real(o[1]).astype(np.float64)).astype(np.float32))
                case ["rcp", "rn", "f32"] | ["rcp", "approx", "ftz", "f32"]:
                    put((1 / self.real(o[1]).astype(np.float64)).astype(np.float32))
                case ["cvt", "rn", ("bf16x2" | "f16x2") as kind, "f32"]:
                    high, low = (
                        self.real(x).astype(DTYPES[kind[:-2]]).view(np.uint16).astype(np.uint32) for x in o[1:]
                    )
                    put(high << np.uint32(16) | low)
                case ["cvt", "f32", "f16"]:
                    put(self.value(o[1]).astype(np.uint16).view(np.float16).astype(np.float32))
                case ["fma", "rn", ("bf16x2" | "f16x2") as kind]:
                    parts = []
                    for shift in (0, 16):
                        a, b, c = (
                            (self.value(x) >> np.uint32(shift)).astype(np.uint16).view(DTYPES[kind[:-2]])
                            .astype(np.float64) for x in o[1:]
                        )  # fmt: skip
                        parts.append((a * b + c).astype(DTYPES[kind[:-2]]).view(np.uint16).astype(np.uint32))
                    put(parts[1] << np.uint32(16) | parts[0])
                case ["shfl", "sync", "idx", "b32"]:
                    put(self.value(o[1])[np.arange(LANES) // 32 * 32 + int(o[2])])
                case ["shfl", "sync", "bfly", "b32"]:
                    put(self.value(o[1])[np.arange(LANES) ^ int(o[2])])
                case _:
                    return self.memory(name, o, active)
        return None

    def memory(self, name: list[str], o: list[Any], active: np.ndarray) -> Run | None:
        block = self.block
        match name:
            case ["ld", "shared", "b32"]:
                self.put(o[0], self._words(self.place(o[1]), 1)[:, 0], active)
            case ["ld", "shared", "v4", "b32"]:
                words = self._words(self.place(o[1]), 4)
                for i, target in enumerate(o[0]):
                    self.put(target, words[:, i], active)
            case ["st", "shared", "b32"] | ["st", "shared", "v4", "b32"]:
                sources = o[1] if isinstance(o[1], tuple) else (o[1],)
                for i, source in enumerate(sources):
                    bytes_ = np.ascontiguousarray(self.value(source)).view(np.uint8).reshape(LANES, 4)
                    where = self.place(o[0])[:, None] + 4 * i + np.arange(4)
                    block.shared[where[active]] = bytes_[active]
            case ["ld", "global", "nc", kind]:
                self._load_global(o, kind, active)
            case ["st", "global", "f32"] | ["st", "global", "v2", "f32"]:
                for i, source in enumerate(o[1] if isinstance(o[1], tuple) else (o[1],)):
                    for p, v in zip(self.place(o[0])[active] + 4 * i, self.real(source)[active], strict=True):
                        assert int(p) not in self.stored
                        self.stored[int(p)] = float(v)
            case ["mbarrier", "arrive", *_]:
                barrier = block.barriers[(int(self.place(o[1])[0]) - block.bars) // 8]
                for _ in range(int(active.sum())):
                    barrier.arrive()
            case ["mbarrier", "try_wait", *_]:
                return self._wait(o)
            case ["bar", "sync"]:
                return self.meet(int(self.value(o[0])[0]), int(o[1]))
            case ["bar", "arrive"]:
                block.come(int(self.value(o[0])[0]), int(o[1]))
            case ["bar", "red", "or", "pred"]:
                return self._vote(o)
            case ["wgmma", "fence", *_] | ["fence", *_] | ["cp", "async", "bulk", "wait_group", "read"]:
                pass
            case ["wgmma", "commit_group", *_]:
                self.flying.append(self.group)
                self.group = set()
                return _pause()
            case ["wgmma", "wait_group", *_]:
                self.flying = self.flying[len(self.flying) - int(o[0]) :] if int(o[0]) else []
                return _pause()
            case ["wgmma", "mma_async", *_]:
                self._wgmma(name, o)
            case _:
                raise NotImplementedError(f"{'.'.join(name)} {o}")
        return None

    def _load_global(self, o: list[Any], kind: str, active: np.ndarray) -> None:
        """A number of each lane; outside of the arrays there is nothing to load."""
        width = {"b32": 4, "f32": 4, "b16": 2, "u8": 1}[kind]
        found = self.r.get(o[0], np.zeros(LANES, np.uint32)).copy()
        if active.any():
            found[active] = self.block.read(self.place(o[1])[active], width)
        self.put(o[0], found, active)

    def _words(self, places: np.ndarray, count: int) -> np.ndarray:
        where = places[:, None] + np.arange(4 * count)
        return np.ascontiguousarray(self.block.shared[where]).view(np.uint32)

    def _wait(self, o: list[Any]) -> Run:
        barrier = self.block.barriers[(int(self.place(o[1])[0]) - self.block.bars) // 8]
        parity = int(self.value(o[2])[0])
        while not barrier.passed(parity):
            yield
        self.r[o[0]] = np.ones(LANES, bool)
        yield

    def meet(self, number: int, threads: int) -> Run:
        now = self.block.come(number, threads)
        while self.block.rounds.get(number, 0) <= now:
            yield

    def _vote(self, o: list[Any]) -> Run:
        number = int(self.value(o[1])[0])
        now = self.block.come(number, int(o[2]), self.value(o[3]))
        while self.block.rounds.get(number, 0) <= now:
            yield
        self.r[o[0]] = np.full(LANES, self.block.voted[number, now])

    # ---- products

    def _matrix(self, descriptor: str, rows: int, transposed: bool) -> np.ndarray:
        """An operand: (rows, 16), for the transposed one (16, rows) in shared memory."""
        word = int(self.value(descriptor)[0])
        assert (self.value(descriptor) == np.uint64(word)).all()
        address, leading, stride = (word & 0x3FFF) << 4, (word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4
        swizzle = {1: 128, 2: 64, 3: 32}[word >> 62]
        assert swizzle == self.block.plan.swizzle
        n, k = np.arange(rows)[:, None], np.arange(16)[None]
        if transposed:  # features go on within a row, then in the next box; keys by rows
            chunk = swizzle // 2
            places = address + n // chunk * leading + n % chunk * 2 + k // 8 * stride + k % 8 * swizzle
        else:
            places = address + n // 8 * stride + n % 8 * swizzle + 2 * k
        places = swizzled(places, swizzle)
        data = self.block.shared[places[..., None] + np.arange(2)]
        return np.ascontiguousarray(data).view(DTYPES[self.block.plan.dtype])[..., 0]

    def _wgmma(self, name: list[str], o: list[Any]) -> None:
        n = int(re.search(r"n(\d+)k", name[4])[1])  # type: ignore[index]
        acc, a = o[0], o[1]
        used = set(acc)
        if isinstance(a, tuple):
            used |= set(a)
            left, transposed = self._fragment(a), bool(int(o[6]))
        else:
            left, transposed = self._matrix(a, 64, False), bool(int(o[7]))
            assert not int(o[6])
        if any(used & set(acc) and not (set(acc) <= g or not used & g) for g in self.flying):
            raise RuntimeError("an accumulator is in part in flight")
        right = self._matrix(o[2], n, transposed).T
        before = np.zeros((64, n), np.float32)
        if self.value(o[3]).all():
            before = self._accumulator(acc, n)
        self._spread(acc, self.block.add(before, left, right))
        self.group |= used

    def _fragment(self, registers: tuple[str, ...]) -> np.ndarray:
        lane, warp = np.arange(LANES) % 32, np.arange(LANES) // 32
        found = np.zeros((64, 16), DTYPES[self.block.plan.dtype])
        for i, register in enumerate(registers):
            word = self.value(register)
            for half in range(2):
                row, column = 16 * warp + lane // 4 + 8 * (i % 2), 2 * (lane % 4) + half + 8 * (i // 2)
                found[row, column] = (word >> np.uint32(16 * half)).astype(np.uint16).view(found.dtype)
        return found

    @staticmethod
    def _cells(i: int) -> tuple[np.ndarray, np.ndarray]:
        lane, warp = np.arange(LANES) % 32, np.arange(LANES) // 32
        return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2

    def _accumulator(self, registers: tuple[str, ...], n: int) -> np.ndarray:
        found = np.zeros((64, n), np.float32)
        for i, register in enumerate(registers):
            found[self._cells(i)] = self.real(register)
        return found

    def _spread(self, registers: tuple[str, ...], matrix: np.ndarray) -> None:
        for i, register in enumerate(registers):
            self.r[register] = np.ascontiguousarray(matrix[self._cells(i)]).view(np.uint32)


def _pause() -> Run:
    yield


def _decoded(text: str) -> tuple[list[Any], dict[str, int]]:
    code, labels = [], {}
    for line in map(str.strip, text.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line not in "{}" and not line.startswith(".reg"):
            match = re.fullmatch(r"(?:@(!?p\d+) )?(\S+?)(?: (.*))?;", line.replace(" ;", ";"))
            assert match, line
            guard, name, rest = match.groups()
            found = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest or "")
            ops = [tuple(p.strip() for p in x[1:-1].split(",")) if x[0] == "{" else x for x in found]
            code.append((guard, name.split("."), ops, set(re.findall(r"\b[rf]\d+\b", rest or ""))))
    return code, labels


# ---- the whole kernel


def attention(
    problem: Problem,
    plan: Plan,
    arrays: dict[str, np.ndarray],
    items: list[tuple[int, int, int, int]],
    *,
    seed: int = 0,
    add: Add = nearest,
) -> tuple[np.ndarray, ...]:
    """y (B, N, T, E) and lse (B, N, T) of these blocks of queries, (b, n, first row, part), NaN elsewhere.

    Of a plan for parts their largest scores, sums (B, N, parts, T) and values (B, N, parts, T, E).

    arrays: q, k and v, these with heads first, and what else the problem has, by name.
    """
    rng = np.random.default_rng(seed)
    block = Block(problem, plan, rng, add)
    given: dict[str, Any] = {name: jnp.asarray(x) for name, x in arrays.items() if name not in "qkv"}
    if plan.mask.listed:
        given["ranges"] = work.ranges(problem, plan, given)
    found = [
        vars(work.bounded(problem, plan, given, b, n, jnp.int32(row), jnp.int32(part))) for b, n, row, part in items
    ]
    found = [{name: int(value) for name, value in item.items()} for item in found]
    q, k, v = (arrays[name] for name in "qkv")
    y = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    groups = [Warpgroup(block, w) for w in range(plan.consumers)]
    text, kinds = code(problem, plan), operands(problem, plan)
    results = RESULTS[plan.partial]
    memory = {name: block.keep(arrays[name]) for name, kind in kinds.items() if kind == "l" and name not in results}
    written = {name: (100 + i) << 40 for i, name in enumerate(results)}

    def produce() -> Run:
        number = used = 0

        def load_queries(item: dict[str, int]) -> Run:
            for w in range(plan.consumers):
                slot, over = map(int, work.query_slot(plan, w, jnp.int32(used)))
                while over and not block.barrier("q_empty", slot).passed((over - 1) & 1):
                    yield
                rows = _rows(q[item["image"], item["head"]], item["row"] + ROWS * w, ROWS)
                block.put("q", slot * plan.q_bytes, rows)
                block.barrier("q_full", slot).arrive()

        for item in found:
            for j in range(item["first"], item["last"]):
                for name, source, size in (("k", k, plan.k_bytes), ("v", v, plan.v_bytes)):
                    slot, over = number % plan.stages, number // plan.stages
                    while over and not block.barrier(f"{name}_empty", slot).passed((over - 1) & 1):
                        yield
                    head = item["head"] // (problem.heads // problem.shared)
                    block.put(name, slot * size, _rows(source[item["image"], head], j * plan.keys, plan.keys))
                    block.barrier(f"{name}_full", slot).arrive()
                    yield
                    if name == "k" and j == item["first"]:
                        yield from load_queries(item)
                number += 1
            if plan.out_in_q and item["first"] >= item["last"]:
                yield from load_queries(item)
            used += plan.out_in_q or item["last"] > item["first"]

    def consume(group: Warpgroup) -> Run:
        number = used = 0
        if plan.consumers > 1 and group.number == plan.consumers - 1:
            block.come(TURN, 2 * LANES)
        for item in found:
            numbers = _numbers(problem, arrays, item)
            places = {**block.at, "bars": block.bars, **written, **memory, "number": number, "item": used}
            yield from group.run(text, kinds, places | numbers)
            row = item["row"] + ROWS * group.number
            if not plan.partial:
                stride = plan.q_bytes if plan.out_in_q else plan.out_bytes
                out = block.get("out", group.number * stride, ROWS, v.shape[3])
                kept = max(0, min(ROWS, problem.queries - row))
                y[item["image"], item["head"], row : row + kept] = out[:kept]
            if plan.out_in_q:
                for _ in range(4):
                    block.barrier("q_empty", group.number).arrive()
            number += item["last"] - item["first"]
            used += plan.out_in_q or item["last"] > item["first"]
        if plan.consumers > 1 and group.number == 0:
            yield from group.meet(TURN, 2 * LANES)

    _interleave(block, [produce(), *map(consume, groups)], rng)
    b, n, t = q.shape[:3]
    shapes: dict[str, tuple[int, ...]] = {"lse": (b, n, t) if problem.heads_first else (b, t, n)}
    parts = (b, n, problem.parts, t)
    shapes |= {"largest": parts, "total": parts, "values": (*parts, plan.values)}
    arrays_of = {name: np.full(shapes[name], np.nan, np.float32) for name in results}
    for place, value in (stored for group in groups for stored in group.stored.items()):
        arrays_of[results[(place >> 40) - 100]].reshape(-1)[(place & (1 << 40) - 1) // 4] = value
    if plan.partial:
        return tuple(arrays_of.values())
    lse = arrays_of["lse"]
    return y, lse if problem.heads_first else np.swapaxes(lse, 1, 2)


def _numbers(problem: Problem, arrays: dict[str, np.ndarray], item: dict[str, int]) -> dict[str, Any]:
    """The operands that are numbers, as the frame computes them."""
    image, head = item["image"], item["head"]
    found: dict[str, Any] = item | {"result_first": work.first_result(problem, image, head, item["part"])}
    for name, operand in (("alibi_slopes", "slope"), ("sinks", "sink")):
        if name in arrays:
            found[operand] = arrays[name][image if len(arrays[name]) > 1 else 0, head]
    for name in ("bias", "mask"):
        array: Spread | None = getattr(problem, name)
        if array is not None:
            shape = arrays[name].shape
            index = (image if array.axes[0] else 0, head if array.axes[1] else 0, 0, 0)
            found[f"{name}_first"] = int(np.ravel_multi_index(index, shape))
    return found


def _interleave(block: Block, agents: list[Run | None], rng: np.random.Generator) -> None:
    """Runs the agents in an order that is drawn, each for some waits at a time."""
    idle = 0
    state = lambda: (dict(block.rounds), [(b.over, b.due) for b in block.barriers], sum(a is not None for a in agents))
    while any(agents):
        before = state()
        for i in rng.permutation(len(agents))[: 1 + int(rng.integers(len(agents)))]:
            with contextlib.suppress(StopIteration):
                for _ in range(int(rng.integers(1, 6)) if agents[i] is not None else 0):
                    try:
                        next(agents[i])  # type: ignore[arg-type]
                    except StopIteration:
                        agents[i] = None
                        raise
        idle = idle + 1 if before == state() else 0
        if idle > 5000:
            raise RuntimeError("a wait without an end")


def _rows(matrix: np.ndarray, first: int, count: int) -> np.ndarray:
    """Rows of a matrix, zeros beyond its last."""
    found = np.zeros((count, matrix.shape[1]), matrix.dtype)
    part = matrix[first : first + count]
    found[: len(part)] = part
    return found


def every_item(problem: Problem, plan: Plan) -> list[tuple[int, int, int, int]]:
    tiles = range(math.ceil(problem.queries / plan.block_rows))
    numbers = itertools.product(range(problem.batch), range(problem.heads), tiles, range(problem.parts))
    return [(b, n, t * plan.block_rows, part) for b, n, t, part in numbers]
