"""Runs the PTX of warpgroups on the CPU: a block of attention's forward kernel, whose warpgroups have 128 lanes.

Shared memory is bytes, in which boxes lie as TMA lays them out. A register that a product in flight reads or writes may
not be used. A product may read a slot only after its own warpgroup has waited for the load into it.
"""

import re
from collections.abc import Callable, Generator
from typing import Any

import ml_dtypes
import numpy as np

from jaxdnn._src.attention.hopper.plan import Plan, Problem
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

    def load_of(self, address: int) -> Barrier | None:
        """The barrier of the load into the slot that has an address; None if it is in no slot."""
        plan = self.plan
        for name, size, slots in (("q", plan.q_bytes, plan.q_slots), ("k", plan.k_bytes, plan.stages),
                                  ("v", plan.v_bytes, plan.stages)):  # fmt: skip
            if 0 <= address - self.at[name] < slots * size:
                return self.barrier(f"{name}_full", (address - self.at[name]) // size)
        return None

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
        self.waited: dict[Barrier, int] = {}  # for which phase of each barrier

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
        self.waited[barrier] = barrier.over
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
        load = self.block.load_of(address)
        if load is not None and self.waited.get(load, 0) != load.over:
            raise RuntimeError("a product reads a slot before a wait for the load into it")
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
