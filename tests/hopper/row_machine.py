"""A small machine that runs the row kernels' PTX on the CPU: all threads of a block in step, one block after another.

It knows the instructions that those kernels emit and no others: an unknown one raises. A cluster's threads run in step
like one block's. Branches must be taken by all of them or none (the kernels' are), so a barrier has nothing to wait
for, but it counts who arrives, and accesses to shared memory that the step alone puts in order are an error (`races`).
So is an access beyond what the launch gives a block, or outside of the arrays. A bulk copy to shared
memory is done at once, the worst for a kernel that asks for it while the place is still read, and one from shared
memory at the last moment, when the thread that asked for it waits; who waits for bytes that nothing has been asked to
bring fails. ex2, lg2 and rcp are exact here.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.hopper.races import Races

HALF = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
WIDTHS = {"b16": 2, "b32": 4, "f32": 4}
U32, U64 = np.uint32, np.uint64


class _Barrier:
    """A phase is over when all have arrived, and all bytes have come that were said to."""

    def __init__(self, count: int, moment: np.ndarray) -> None:
        self.count = self.due = count
        self.phases = self.bytes = 0
        self.coming = self.moment = moment

    def come(self, count: int, arrivals: int, moment: np.ndarray) -> None:
        self.bytes, self.due, self.coming = self.bytes + count, self.due - arrivals, np.maximum(self.coming, moment)
        if self.due < 0:
            raise RuntimeError("more arrive than a barrier waits for")
        if not self.bytes and not self.due:
            self.phases, self.due, self.moment = self.phases + 1, self.count, self.coming


class Rows:
    """Memory as bytes, and `run`, which runs a block of PTX for every block of threads."""

    replaces = False  # whether a kernel may store another value to an element that it has written

    def __init__(self, size: int, shared: int = 0) -> None:
        """`shared` are the bytes that a block of the launch has."""
        self.memory = np.full(size, 0xFF, np.uint8)  # NaN in every float format: what is read unwritten shows
        self.arrays = np.ones(size, bool)  # bytes that an operand or a result has
        self.written = np.zeros(size, np.uint8)  # how often
        self.limit, self.shared_bytes = shared, -(-shared // 128) * 128  # of a block, and to the next one of a cluster
        self.races: Races | None = None  # made for each cluster; a machine without one does not look for them
        self.shared = np.full(8 * self.shared_bytes, 0xFF, np.uint8)
        self.constants: dict[tuple[str, int], np.ndarray] = {}  # by how an operand writes them, and by the threads

    @np.errstate(all="ignore")
    def run(self, text: str, operands: list[int], block_size: int, clusters: int, cluster: int = 1) -> None:
        threads = block_size * cluster
        code, labels = [], {}
        for line in map(str.strip, text.splitlines()):
            if line.endswith(":"):
                labels[line[:-1]] = len(code)
            elif line not in "{}" and not line.startswith(".reg"):
                code.append(_decode(line))
        self.rank = np.arange(threads, dtype=U64) // U64(block_size)
        for index in range(clusters):
            self.registers: dict[str, Any] = {"%tid.x": np.arange(threads, dtype=U64) % U64(block_size)}
            self.registers |= {"%cluster_ctarank": self.rank, "%clusterid.x": np.full(threads, index, U64)}
            self.registers["%ctaid.x"] = U64(index * cluster) + self.rank
            self.registers |= {f"${i}": np.full(threads, value, U64) for i, value in enumerate(operands)}
            self.threads = threads
            self.shared[:] = 0xFF
            self.races = races = Races(threads, len(self.shared))
            self.barriers: dict[int, _Barrier] = {}
            self.leaving: dict[bool, list[tuple[int, int, int, int, np.ndarray]]] = {False: [], True: []}  # committed?
            at = 0
            while at < len(code):
                guard, name, arguments = code[at]
                at += 1
                active = np.ones(threads, bool)
                if guard:
                    holds = self.registers[guard.removeprefix("!")]
                    active = ~holds if guard[0] == "!" else holds
                if name[0] == "bra":
                    if active.any() != active.all():
                        raise RuntimeError("threads of one block part ways")
                    at = labels[arguments[0]] if active.all() else at
                elif name[:2] == ["bar", "warp"]:
                    pass
                elif name[0] == "bar":
                    self._barrier(active, *arguments)
                elif name[:3] == ["barrier", "cluster", "wait"]:
                    races.meet(np.arange(threads))
                elif name[0] != "barrier":
                    self._step(name, arguments, active)
            if any(self.leaving.values()):
                raise RuntimeError("shared memory is gone before all of it has been copied")

    def _bits(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        constant = self.constants.get((operand, self.threads))
        if constant is None:
            value = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
            constant = np.full(self.threads, value & 0xFFFFFFFFFFFFFFFF, U64)
            constant.flags.writeable = False
            self.constants[operand, self.threads] = constant
        return constant

    def _real(self, operand: str) -> np.ndarray:
        return self._bits(operand).astype(U32).view(np.float32)

    def _put(self, target: str, value: np.ndarray, active: np.ndarray) -> None:
        value = value.view(U32).astype(U64) if value.dtype == np.float32 else value
        value = value if value.dtype == bool else value.astype(U64, copy=False)
        if not active.all():
            value = np.where(
                active, value, self.registers[target] if target in self.registers else np.zeros_like(value)
            )
        self.registers[target] = value

    def _places(self, operand: str, size: int) -> np.ndarray:
        base, _, offset = operand[1:-1].partition("+")
        return self._bits(base).astype(np.int64)[:, None] + int(offset or 0) + np.arange(size)

    def _barrier(self, active: np.ndarray, name: str, count: str) -> None:
        """Of each block, as many threads arrive as the barrier waits for, or the device would hang."""
        barriers = self.rank * U64(16) + self._bits(name)
        for one, arrived in zip(*np.unique(barriers[active], return_counts=True), strict=True):
            if arrived != int(count) or arrived % 32:
                raise RuntimeError(f"{arrived} threads arrive at a barrier of {count}")
            if self.races:
                self.races.meet(np.flatnonzero(active & (barriers == one)))

    def _shared(self, operand: str, size: int, active: np.ndarray, space: str = "shared") -> np.ndarray:
        """Bytes among those of all blocks of a cluster; of a thread's own block, or as an address says."""
        places = self._places(operand, size)
        within = places if space == "shared" else places % max(1, self.shared_bytes)
        here = within[active, 0]
        if (here < 0).any() or (here + size > self.limit).any() or (places[active, 0] >= len(self.shared)).any():
            raise RuntimeError(f"bytes {here.min()} to {here.max() + size} of shared memory of {self.limit}")
        return places + (self.rank.astype(np.int64)[:, None] * self.shared_bytes if space == "shared" else 0)

    def _global(self, operand: str, size: int, active: np.ndarray) -> np.ndarray:
        places = self._places(operand, size)
        here = places[active, 0]
        inside = self.arrays.take(here, mode="clip") & self.arrays.take(here + size - 1, mode="clip")
        if (here < 0).any() or (here + size > len(self.arrays)).any() or not inside.all():
            raise RuntimeError("an access outside of the arrays")
        return places

    def _mbarrier(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        assert self.races is not None
        operand = arguments[1 if name[1] in ("arrive", "try_wait") else 0]
        where = self._shared(operand, 8, active, "shared::cluster" if "shared::cluster" in name else "shared")
        threads, barriers = np.flatnonzero(active).tolist(), where[active, 0].tolist()
        if name[1] == "init":
            for barrier, count in zip(barriers, self._bits(arguments[1])[active], strict=True):
                self.barriers[barrier] = _Barrier(int(count), self.races.nothing())
        elif name[1] == "arrive":
            counts = self._bits(arguments[2]) if name[2] == "expect_tx" else np.zeros(self.threads, U64)
            for thread, barrier in zip(threads, barriers, strict=True):
                self.barriers[barrier].come(int(counts[thread]), 1, self.races.left(thread))
        else:
            parity = self._bits(arguments[2]).astype(int)[active]
            over = [self.barriers[b].phases % 2 != p for b, p in zip(barriers, parity, strict=True)]
            if not all(over):
                raise RuntimeError("a wait for what does not come")
            self._put(arguments[0], active.copy(), active)
            for thread, barrier in zip(threads[::32], barriers[::32], strict=True):
                self.races.told(thread, self.barriers[barrier].moment)

    def _bulk_copy(self, arguments: list[Any], active: np.ndarray) -> None:
        assert self.races is not None
        to, source, barrier = (self._places(arguments[i], 1)[:, 0] for i in (0, 1, 3))
        for thread in np.flatnonzero(active):
            size, own = int(self._bits(arguments[2])[thread]), int(self.rank[thread]) * self.shared_bytes
            if size % 16 or to[thread] % 16 or source[thread] % 16 or to[thread] + size > self.limit:
                raise RuntimeError("a copy is not aligned, or too long")
            if not self.arrays[source[thread] : source[thread] + size].all():
                raise RuntimeError("an access outside of the arrays")
            start = own + int(to[thread])
            self.shared[start : start + size] = self.memory[source[thread] : source[thread] + size]
            self.barriers[own + int(barrier[thread])].come(-size, 0, self.races.copy(int(thread), start, size))

    def _bulk_store(self, arguments: list[Any], active: np.ndarray) -> None:
        assert self.races is not None
        to, source = (self._places(arguments[i], 1)[:, 0] for i in (0, 1))
        for thread in np.flatnonzero(active):
            size, own = int(self._bits(arguments[2])[thread]), int(self.rank[thread]) * self.shared_bytes
            if size <= 0 or size % 16 or to[thread] % 16 or source[thread] % 16:
                raise RuntimeError("a copy is not aligned, or empty")
            if source[thread] + size > self.limit:
                raise RuntimeError(f"bytes up to {source[thread] + size} of shared memory of {self.limit}")
            start = own + int(source[thread])
            moment = self.races.copy_from(int(thread), start, size)
            self.leaving[False].append((int(thread), int(to[thread]), start, size, moment))

    def _commit(self, active: np.ndarray) -> None:
        self.leaving[True] += [store for store in self.leaving[False] if active[store[0]]]
        self.leaving[False] = [store for store in self.leaving[False] if not active[store[0]]]

    def _wait_for_bulk_stores(self, active: np.ndarray) -> None:
        assert self.races is not None
        for thread, to, start, size, moment in [store for store in self.leaving[True] if active[store[0]]]:
            self.memory[to : to + size] = self.shared[start : start + size]
            self.written[to : to + size] += 1
            self.races.told(thread, moment)
        self.leaving[True] = [store for store in self.leaving[True] if not active[store[0]]]

    def _store_to_cluster(self, arguments: list[Any], active: np.ndarray) -> None:
        """An asynchronous store, which the barrier beside it is told of."""
        assert self.races is not None
        to = self._shared(arguments[0], 4 * len(arguments[1]), active, "shared::cluster")[active]
        self.races.store(np.flatnonzero(active), to)
        raw = np.stack([self._bits(v).astype("<u4") for v in arguments[1]], 1).view(np.uint8)
        self.shared[to] = raw[active]
        for thread, barrier in zip(np.flatnonzero(active), self._places(arguments[2], 1)[active, 0], strict=True):
            self.barriers[int(barrier)].come(-4 * len(arguments[1]), 0, self.races.left(int(thread)))

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        bits, real = self._bits, self._real
        put = lambda value: self._put(arguments[0], value, active)
        low = lambda x: bits(x) & U64(0xFFFFFFFF)
        match name:
            case ["mov", "b32"] if isinstance(arguments[0], tuple):
                for i, half in enumerate(arguments[0]):
                    self._put(half, bits(arguments[1]) >> U64(16 * i) & U64(0xFFFF), active)
            case ["mov", "b64"]:
                put(bits(arguments[1]))
            case ["mov", _]:
                put(low(arguments[1]))
            case ["add", "s64"]:
                put(bits(arguments[1]) + bits(arguments[2]))
            case ["add" | "sub" as way, "s32"]:
                put((np.add if way == "add" else np.subtract)(bits(arguments[1]), bits(arguments[2])) & U64(0xFFFFFFFF))
            case ["min", "s32"]:
                put(np.minimum(*(low(x).astype(U32).view(np.int32) for x in arguments[1:])).view(U32).astype(U64))
            case ["xor", "b32"]:
                put((bits(arguments[1]) ^ bits(arguments[2])) & U64(0xFFFFFFFF))
            case ["mul", "lo", "s32"]:
                put((bits(arguments[1]) * bits(arguments[2])) & U64(0xFFFFFFFF))
            case ["mul", "wide", "u32"]:
                put(low(arguments[1]) * low(arguments[2]))
            case ["mad", "lo", "s32"]:
                put((bits(arguments[1]) * bits(arguments[2]) + bits(arguments[3])) & U64(0xFFFFFFFF))
            case ["mad", "wide", "u32"]:
                put(low(arguments[1]) * low(arguments[2]) + bits(arguments[3]))
            case ["and", "b32"]:
                put(bits(arguments[1]) & bits(arguments[2]))
            case ["and", "pred"]:
                put(bits(arguments[1]) & bits(arguments[2]))
            case ["shl" | "shr" as way, _]:
                shift = np.left_shift if way == "shl" else np.right_shift
                put(shift(low(arguments[1]), bits(arguments[2])) & U64(0xFFFFFFFF))
            case ["setp", relation, "s32" | "u32" as kind]:
                a, b = (bits(x).astype(U32).view(np.int32 if kind == "s32" else U32) for x in arguments[1:])
                put({"lt": np.less, "ge": np.greater_equal, "eq": np.equal}[relation](a, b))
            case ["setp", "eq" | "gt" as relation, "f32"]:
                a, b = real(arguments[1]), real(arguments[2])
                put(a == b if relation == "eq" else a > b)
            case ["setp", "nan", "f32"]:
                put(np.isnan(real(arguments[1])) | np.isnan(real(arguments[2])))
            case ["selp", "f32"]:
                put(np.where(bits(arguments[3]), real(arguments[1]), real(arguments[2])))
            case ["abs", "f32"]:
                put(np.abs(real(arguments[1])))
            case ["max" | "min" as which, "f32"]:  # of a number and NaN, the number
                put((np.fmax if which == "max" else np.fmin)(real(arguments[1]), real(arguments[2])))
            case ["max", "bf16x2" | "f16x2" as kind]:  # likewise
                halves = (low(x).astype(U32).view(HALF[kind[:-2]]) for x in arguments[1:])
                a, b = (half.astype(np.float32) for half in halves)
                put(np.fmax(a, b).astype(HALF[kind[:-2]]).view(U32).astype(U64))
            case ["add" | "sub" | "mul" as which, "rn", "f32"]:
                way = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[which]
                put(way(real(arguments[1]), real(arguments[2])))
            case ["rcp", "rn", "f32"] | ["rcp", "approx", "ftz", "f32"]:
                put(np.float32(1) / real(arguments[1]))
            case ["ex2", "approx", "ftz", "f32"]:
                value = np.exp2(real(arguments[1]).astype(np.float64)).astype(np.float32)
                put(np.where(value < 2.0**-126, np.float32(0), value))
            case ["lg2", "approx", "f32"]:
                put(np.log2(real(arguments[1]).astype(np.float64)).astype(np.float32))
            case ["shfl", "sync", "bfly", "b32"]:
                distance = int(arguments[2])
                put(bits(arguments[1])[np.arange(self.threads) ^ distance])
            case ["cvt", "f32", "f16"]:
                put(bits(arguments[1]).astype(np.uint16).view(np.float16).astype(np.float32))
            case ["cvt", "rn", "bf16x2" | "f16x2" as kind, "f32"]:
                high, lower = (real(x).astype(HALF[kind[:-2]]).view(np.uint16).astype(U64) for x in arguments[1:])
                put(high << U64(16) | lower)
            case ["cvt", "rn", "bf16" | "f16" as kind, "f32"]:
                put(real(arguments[1]).astype(HALF[kind]).view(np.uint16).astype(U64))
            case ["mapa", "shared::cluster", "u32"]:
                put(low(arguments[1]) + bits(arguments[2]) * U64(self.shared_bytes))
            case ["fence", "proxy", "async", *_]:
                assert self.races is not None
                self.races.fence(np.flatnonzero(active))
            case ["fence", "acq_rel", *_] if self.races is not None:
                self.races.complete_loads(np.flatnonzero(active))
            case ["fence", *_]:
                pass
            case ["mbarrier", *_]:
                self._mbarrier(name, arguments, active)
            case ["cp", "async", "bulk", "global", *_]:
                self._bulk_store(arguments, active)
            case ["cp", "async", "bulk", "commit_group"]:
                self._commit(active)
            case ["cp", "async", "bulk", "wait_group", "read"] if arguments == ["0"]:
                self._wait_for_bulk_stores(active)
            case ["cp", "async", "bulk", *_]:
                self._bulk_copy(arguments, active)
            case ["st", "async", *_]:
                self._store_to_cluster(arguments, active)
            case ["ld", space, *_, width]:
                targets = arguments[0] if isinstance(arguments[0], tuple) else (arguments[0],)
                memory = self.shared if space == "shared" else self.memory
                found = self._shared if space == "shared" else self._global
                places = found(arguments[1], 4 * len(targets), active)[active]
                if not width[1:] == "32" or (places[:, 0] % (4 * len(targets))).any():
                    raise RuntimeError("an access is not aligned")
                if self.races and space == "shared":
                    self.races.load(np.flatnonzero(active), places)
                words = np.zeros((self.threads, len(targets)), U32)
                words[active] = memory[places].view(U32)
                for i, target in enumerate(targets):
                    self._put(target, words[:, i].astype(U64), active)
            case ["st", space, *_, width]:
                values = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
                size = WIDTHS[width]
                of_global = (arguments[0], size * len(values), active)
                places = (self._global(*of_global) if space == "global" else self._shared(*of_global, space))[active]
                if (places[:, 0] % (size * len(values))).any():
                    raise RuntimeError("an access is not aligned")
                if self.races and space != "global":
                    self.races.store(np.flatnonzero(active), places)
                raw = np.stack([bits(v).astype(f"<u{size}") for v in values], 1).view(np.uint8)[active]
                memory = self.memory if space == "global" else self.shared
                if space == "global":
                    if not self.replaces and ((self.written[places] > 0) & (memory[places] != raw)).any():
                        raise RuntimeError("an element is written again with another value")
                    np.add.at(self.written, places, 1)
                memory[places] = raw
            case _:
                raise NotImplementedError(".".join(name))


def _decode(line: str) -> tuple[str | None, list[str], list[Any]]:
    match = re.fullmatch(r"(?:@(!?p\d+) )?(\S+) ?(.*);", line)
    if match is None:
        raise NotImplementedError(line)
    guard, name, rest = match.groups()
    arguments = [
        tuple(part.strip() for part in item[1:-1].split(",")) if item[0] == "{" else item
        for item in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
    ]
    return guard, name.split("."), arguments


def on_arrays(
    make: Callable[[int, int], Rows],
    code: str,
    arrays: Sequence[np.ndarray],
    outs: Sequence[tuple[tuple[int, ...], Any]],
    block: int,
    blocks: int,
    cluster: int = 1,
    *,
    floats: int,
    again: bool = False,
    all_written: bool = True,
) -> list[np.ndarray]:
    """Runs a kernel on arrays that lie one after the other; it must write every result once, and nothing else.

    again: whether elements may be written more than once, each time with the same value.
    all_written: whether none may be left out.

    `make` makes a machine with so many bytes of memory, and of a block's shared memory; `outs` are the results' shapes
    and dtypes, `blocks` counts clusters where blocks form some, and `floats` are those of the launch.
    """
    results = [np.zeros(shape, dtype) for shape, dtype in outs]
    starts, size = [], 0
    for array in (*arrays, *results):
        starts.append(size)
        size += -(-array.nbytes // 256) * 256 + 256  # what lies between may be neither used nor written
    machine = make(size, 4 * floats)
    machine.arrays[:] = False
    for array, start in zip((*arrays, *results), starts, strict=True):
        machine.arrays[start : start + array.nbytes] = True
    for array, start in zip(arrays, starts, strict=False):
        machine.memory[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    machine.run(code, [*starts, 0], block, blocks, cluster)
    found = []
    for result, start in zip(results, starts[len(arrays) :], strict=True):
        end = start + result.nbytes
        times = machine.written[start:end]
        assert again or (times <= 1).all()
        assert not all_written or (times >= 1).all()
        times[:] = 0
        found.append(machine.memory[start:end].view(result.dtype).reshape(result.shape))
    assert not machine.written.any()
    return found
