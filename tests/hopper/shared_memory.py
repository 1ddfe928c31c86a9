"""What a block's shared memory has: bytes with their last uses, barriers, and what may be written of a result."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Fault(Exception):
    """What a protocol lacks."""


class Memory:
    """Bytes of shared memory, and who last used them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.uses: list[tuple[int, int, int, int, bool, bool]] = []  # from, to, agent, moment, stored, not yet fenced

    def use(self, part: tuple[int, int], agent: int, moment: int, clock: np.ndarray, kind: str) -> None:
        """`kind` is "load" or "store" by threads, "read" or "write" by the copy engine or the tensor core, "send" by
        threads of another block.
        """
        low, high = part
        stores, kept, written = kind in ("store", "write", "send"), [], []
        for use in self.uses:
            start, end, other, then, stored, unfenced = use
            if end <= low or high <= start:
                kept.append(use)
                continue
            if (stores or stored) and clock[other] < then:
                raise Fault(f"bytes {low} to {high}: a {kind} is not ordered after a {'store' if stored else 'load'}")
            if unfenced and stored and kind == "read":
                raise Fault(f"bytes {low} to {high}: no fence shows the copy engine what threads have stored")
            if unfenced and kind in ("write", "send"):
                raise Fault(f"bytes {low} to {high}: no fence completes a thread's load or store before a {kind}")
            written += [(start, end)] if stored else []
            same = (start, end, other, stored) == (low, high, agent, stores)
            if not same and not (stores and low <= start and end <= high):
                kept.append(use)
        if not stores:
            for start, end in sorted(written):
                low = max(low, end) if start <= low else low
            if low < high:
                raise Fault(f"byte {low}: a {kind} of what nothing wrote")
        self.uses = [*kept, (*part, agent, moment, stores, kind in ("load", "store"))]

    def meets(self, part: tuple[int, int], agent: int, moment: int, kind: str) -> None:
        """Of a warpgroup's threads: between their stores and their loads of the same bytes all of them have to meet."""
        for start, end, other, then, stored, _ in self.uses:
            if end > part[0] and part[1] > start and (other, then) == (agent, moment) and stored != (kind == "store"):
                raise Fault(f"bytes {start} to {end}: a {kind} without a barrier of the warpgroup before it")

    def fence(self, agent: int) -> None:
        self.uses = [(*use[:5], use[5] and use[2] != agent) for use in self.uses]


class Barrier:
    def __init__(self, agent: int, arrivals: int, agents: int) -> None:
        self.agent, self.arrivals, self.due = agent, arrivals, arrivals
        self.coming, self.over = np.zeros(agents, int), list[np.ndarray]()
        self.waits: dict[int, list[int]] = {}  # by warpgroup, its moments when they returned

    def arrive(self, clock: np.ndarray) -> None:
        if clock[self.agent] < len(self.over):
            raise Fault("an arrival does not know that the last phase is over")
        self.coming, self.due = np.maximum(self.coming, clock), self.due - 1
        if not self.due:
            self.due, phase = self.arrivals, self.coming.copy()
            phase[self.agent] = len(self.over) + 1
            self.over.append(phase)

    def check(self) -> None:
        """A wait takes a phase by its parity: the next one must not be over before the wait has returned."""
        for agent, moments in self.waits.items():
            if any(phase[agent] < moment for moment, phase in zip(moments, self.over[1:], strict=False)):
                raise Fault("a phase may be over before a wait for the last one returns")


class Counter:
    """A counter in device memory: how often it was counted, what was known to who did, and what was waited for."""

    def __init__(self, agents: int) -> None:
        self.total, self.clock, self.asked = 0, np.zeros(agents, int), set[int]()

    def count(self, clock: np.ndarray) -> None:
        self.total, self.clock = self.total + 1, np.maximum(self.clock, clock)

    def check(self) -> None:
        """A wait that asks for fewer than count at last does not know of all that it was told of here."""
        if any(total != self.total for total in self.asked):
            raise Fault(f"a counter comes to {self.total}, and a wait asks for {sorted(self.asked)}")


class Block:
    """A block's shared memory, by the variable that holds the reference."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buffers: dict[Any, Any] = {}
        self.came: dict[int, list[np.ndarray]] = {}  # what other blocks knew when they stored, by warpgroup
        self.meetings: dict[int, list[np.ndarray]] = {}  # what warpgroups knew at named barriers of two of them
        self.visits: list[tuple[int, int]] = []  # other blocks' arrivals: agent and moment

    def memories(self) -> Iterator[Memory]:
        return (buffer for buffer in self.buffers.values() if isinstance(buffer, Memory))

    def barriers(self) -> Iterator[Barrier]:
        return itertools.chain(*(buffer for buffer in self.buffers.values() if isinstance(buffer, list)))


class Result:
    """The kernel's array in global memory: how often each element is written."""

    def __init__(self, shape: Sequence[int], data: np.ndarray | None = None) -> None:
        self.shape, self.times = tuple(shape), np.zeros(shape, np.int32)
        self.data = data  # of an operand whose numbers the kernel's scalars depend on
        self.copies: dict[tuple[int, ...], tuple[Any, list[tuple[int, int]]]] = {}  # the last store, loads since it

    def copied(self, view: "View", agent: int, moment: int, clock: np.ndarray, kind: str) -> None:
        """A load or a store by the copy engine, which knows of `clock`; boxes of an array do not overlap partially."""
        stored, loads = self.copies.setdefault(tuple(view.starts), (None, []))
        for other, then in [*([stored] if stored else []), *(loads if kind == "store" else [])]:
            if clock[other] < then:
                raise Fault(f"device memory at {view.starts}: a {kind} is not ordered after a copy of another block")
        if kind == "store":
            self.copies[tuple(view.starts)] = (agent, moment), []
        elif (agent, moment) not in loads[-1:]:
            loads.append((agent, moment))

    def write(self, starts: Sequence[int], sizes: Sequence[int], piece: bool) -> None:
        """`piece`: as one piece of memory where it is contiguous, which is clipped at the array's end alone."""
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        dense = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
        over = [start + size > n or start < 0 for start, size, n in zip(starts, sizes, self.shape, strict=True)]
        if piece and any(over) and all(n == 1 or s == d for n, s, d in zip(sizes, strides, dense, strict=True)):
            raise Fault(f"a copy in one piece, {tuple(sizes)} at {tuple(starts)} of {self.shape}, runs over an edge")
        if any(n == 1 == size and start for start, size, n in zip(starts, sizes, self.shape, strict=True)):
            raise Fault("the copy engine drops an axis of one position, and takes any index there for 0")
        self.times[tuple(slice(max(0, s), max(0, s + n)) for s, n in zip(starts, sizes, strict=True))] += 1


class View:
    """A part of a buffer: a buffer, where it starts, and (stride, size) of every axis, all in elements."""

    def __init__(self, buffer: Any, shape: Sequence[int], width: int, offset: int = 0) -> None:
        self.buffer, self.shape, self.width, self.offset = buffer, tuple(shape), width, offset  # offset in bytes
        self.axes = [(math.prod(shape[d + 1 :]), n) for d, n in enumerate(shape)]
        self.starts, self.sizes, self.swizzled = [0] * len(shape), list(shape), False
        self.left = list(range(len(shape)))  # the axes that no index has taken a position of

    def transformed(self, transforms: Sequence[Any]) -> "View":
        view, indexed, reshaped = self, False, False
        for transform in transforms:
            name = type(transform).__name__
            if name == "ExtractAliasedRef" and not indexed:
                shape, width = transform.shape, np.dtype(transform.dtype).itemsize
                view = View(view.buffer, shape, width, view.offset + transform.offset)
                if view.offset + math.prod(shape) * width > self.buffer.size:
                    raise Fault("a reference to more than its buffer")
            elif name == "UnswizzleRef":
                view.swizzled = True
            elif (
                name == "UntilingTransform" and not indexed
            ):  # of the innermost axes; what comes before them lies as it was
                tiled = len(transform.tiling)
                (*lead,) = view.shape[: len(view.shape) - 2 * tiled]
                inner = [a * b for a, b in zip(view.shape[-2 * tiled : -tiled], view.shape[-tiled:], strict=True)]
                view, swizzled = View(view.buffer, (*lead, *inner), view.width, view.offset), view.swizzled
                view.swizzled = swizzled
            elif name == "NDIndexer" and not reshaped:
                view, indexed = view._indexed(transform.indices), True
            elif name == "ReshapeTransform":  # the same elements; of them only all can be asked for
                reshaped = True
            elif name == "NDIndexer" and all(getattr(i, "start", None) == 0 for i in transform.indices):
                pass
            else:
                raise NotImplementedError(f"{name} of a reference")
        return view

    def _indexed(self, indices: Sequence[Any]) -> "View":
        view = View(self.buffer, self.shape, self.width, self.offset)
        view.swizzled, view.starts, view.sizes = self.swizzled, [*self.starts], [*self.sizes]
        for axis, i in zip(self.left, indices, strict=True):
            view.starts[axis] += int(i.start) if hasattr(i, "start") else int(i)
            view.sizes[axis] = int(i.size) if hasattr(i, "start") else 1
        view.left = [axis for axis, i in zip(self.left, indices, strict=True) if hasattr(i, "start")]
        return view

    @property
    def part(self) -> tuple[int, int]:
        """From its first byte to its last."""
        for start, size, n in zip(self.starts, self.sizes, self.shape, strict=True):
            if start < 0 or start + size > n:
                raise Fault(f"positions {start} to {start + size} of a buffer of {n}")
        first = sum(start * stride for start, (stride, _) in zip(self.starts, self.axes, strict=True))
        last = first + sum((size - 1) * stride for size, (stride, _) in zip(self.sizes, self.axes, strict=True))
        return self.offset + first * self.width, self.offset + (last + 1) * self.width
