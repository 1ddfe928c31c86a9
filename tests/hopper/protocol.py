"""Whether a kernel's accesses to shared memory are ordered, whatever the timing: for kernels whose frame is Pallas.

A kernel is traced to its jaxpr, which is what is lowered, and the jaxpr is interpreted with numbers for the scalars and
nothing for the arrays, one cluster of blocks after the other, one generator for each warpgroup. Blocks that draw their
numbers draw them in this order, so that a wait for a block of a greater number has no end. What orders two
accesses is not the moment at which the interpreter comes to them but a clock of who knows of what. Every one of these
is an agent with a component in the clock, which counts its moments:

* a warpgroup's first thread, which issues copies, and the rest of its threads; a barrier of the warpgroup joins them;
* its tensor core, which reads operands until `wgmma_wait` tells of the group;
* its stores by the copy engine, which read shared memory until `wait_smem_to_gmem` tells of the group, and which write
  device memory until it tells of it without `wait_read_only`;
* every barrier, for the loads that count on it: a phase tells of them, and of what was known to who arrived;
* its stores to other blocks of the cluster.

Where blocks wait for each other by counters in device memory (`hopper.counters`), all blocks' agents are in one clock,
and accesses to device memory by the copy engine are looked at as well: what orders them has to be known before a fence
between the proxies. A counter tells of what was known to all who counted; so a wait has to ask for all of them.

An access must come after all accesses to the same bytes that it conflicts with, to its issuer's knowledge. A fault is
also: a read of what nothing wrote, an index beyond a buffer, a store by the copy engine of what no fence has shown to
it, a load by it to where a thread has loaded or stored without a fence since, an arrival that does not know the last
phase to be over, a barrier that may complete a phase before a wait for the last one has returned, shared memory given
back while it is in use, a wait without an end, and in the result's memory an element that is not written exactly once,
or a copy in one piece that no edge clips.
"""

import functools as ft
import itertools
import math
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import source_info_util
from jax.extend.core import Literal

from jaxdnn._src.core import primitives
from tests.hopper.shared_memory import Barrier, Block, Counter, Fault, Memory, Result, View

Run = Generator[None, None, list[Any]]


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


SCALARS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "div": _quotient, "rem": lambda a, b: a - b * _quotient(a, b), "max": max, "min": min,
    "sign": lambda a: (a > 0) - (a < 0), "and": operator.and_, "or": operator.or_, "not": operator.not_,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "convert_element_type": lambda a: a, "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, a, high: min(max(a, low), high),
}  # fmt: skip
AGENTS = 6  # of a warpgroup
COUNTERS = {"reached", "count", "copies_follow"}
ORDERING = {"barrier_wait", "barrier_arrive", "wait_smem_to_gmem", "wgmma_wait", "commit_smem"}
FINISH = "finish_accumulator"
STORES = ("swap", "store")


class Warpgroup:
    """One warpgroup's way through the kernel."""

    def __init__(self, kernel: "Kernel", cluster: list[Block], rank: int, number: int, names: dict[str, int]) -> None:
        self.kernel, self.cluster, self.block, self.rank = kernel, cluster, cluster[rank], rank
        self.number, self.names = number, names
        self.agents = [kernel.base + AGENTS * (rank * kernel.warpgroups + number) + i for i in range(AGENTS)]
        self.first, self.rest, self.tensor, self.stores, self.sends, self.writes = self.agents
        self.clocks = [np.zeros(kernel.agents, int) for _ in range(2)]  # of the first thread, and of the rest
        for clock, agent in zip(self.clocks, self.agents, strict=False):
            clock[agent] = 1
        self.shown = np.zeros(kernel.agents, int)  # of device memory: what copies are ordered after
        self.products = self.groups = self.rounds = 0

    # ---- what is known

    def told(self, clock: np.ndarray) -> None:
        for own in self.clocks:
            np.maximum(own, clock, out=own)

    def knows(self, agent: int, moment: int) -> None:
        for own in self.clocks:
            own[agent] = max(own[agent], moment)

    def leave(self) -> np.ndarray:
        """All that its threads know and did, and a new moment."""
        clock = np.maximum(*self.clocks)
        for own, agent in zip(self.clocks, self.agents, strict=False):
            own[agent] += 1
        return clock

    def fence(self) -> None:
        for memory in self.block.memories():
            memory.fence(self.rest)

    def meet(self) -> None:
        self.told(self.leave())

    def threads(self, view: View, kind: str) -> None:
        clock = self.clocks[1]
        if self.kernel.exchanges:
            view.buffer.meets(view.part, self.rest, clock[self.rest], kind)
        view.buffer.use(view.part, self.rest, clock[self.rest], clock, kind)

    # ---- the jaxpr

    def run(self, jaxpr: Any, arguments: Sequence[Any]) -> Run:
        constants, steps, results = self.kernel.program(jaxpr)
        values = [*arguments, *constants]
        for scalar, sources, equation in steps:
            given = [values[i] for i in sources]
            if scalar is not None:
                values.append(scalar(*given))
            else:
                values += yield from self.step(equation, given)
        return [values[i] for i in results]

    def step(self, equation: Any, given: list[Any]) -> Run:
        name, params = equation.primitive.name, equation.params
        if equation is self.kernel.missing:
            return [None] * len(equation.outvars)
        allowed = params.get("n", 0) + (equation is self.kernel.early)
        match name:
            case "cond":
                return (yield from self.run(_open(params["branches"][given[0]]), given[1:]))
            case "while":
                count = params["cond_nconsts"]
                body, carry = count + params["body_nconsts"], given[count + params["body_nconsts"] :]
                while (yield from self.run(_open(params["cond_jaxpr"]), [*given[:count], *carry]))[0]:
                    carry = yield from self.run(_open(params["body_jaxpr"]), [*given[count:body], *carry])
                return carry
            case "scan":
                inner = _open(params["jaxpr"])
                consts, carry, rest = params["ft_in"].update(given).unpack()
                assert not list(rest), "a loop over an array"
                consts, carry = list(consts), list(carry)
                for _ in range(params["length"]):
                    carry = yield from self.run(inner, [*consts, *carry])
                return carry
            case "jit" | "pjit" | "closed_call" | "core_call" | "custom_jvp_call":
                inner = next(params[key] for key in ("jaxpr", "call_jaxpr") if key in params)
                return (yield from self.run(_open(inner), given))
            case "run_scoped":
                inner = params["jaxpr"]
                made = [self.kernel.buffer(self.block, v) for v in inner.invars]
                return (yield from self.run(inner, [*given, *made]))
            case "get_global":
                return [self.kernel.counters]
            case "axis_index":
                return [self.names[params["axis_name"]]]
            case "barrier_wait":
                yield from self.wait(self.barriers(given, params["transforms_treedef"])[0])
            case "barrier_arrive":
                assert not params["has_user_predicate"]
                self.arrive(given, params["transforms_treedef"])
            case "copy_gmem_to_smem":
                self.fetch(given, params)
            case "copy_smem_to_gmem":
                self.send_out(given, params)
            case "wait_smem_to_gmem":
                self.knows(self.stores, self.groups - allowed)
                if not params["wait_read_only"] and equation is not self.kernel.reading:
                    self.knows(self.writes, self.groups - allowed)
                self.meet()
            case "wgmma_wait":
                self.knows(self.tensor, self.products - allowed)
            case "commit_smem":
                self.fence()
                self.meet()
            case "swap" | "store" | "get" | "load":  # the second since JAX 0.12
                if (found := self.access(name, given, params)) is not None:
                    return [found]
            case "inline_mgpu" | "inline_mgpu_p":  # the second up to JAX 0.11
                if found := (yield from self.inline(given, params)):
                    return found
            case "set_max_registers":
                pass
            case _ if any(isinstance(v, View | list | tuple) for v in given):
                raise NotImplementedError(f"{name} of a reference")
            case _ if any(v.aval.shape == () and v.aval.dtype in (np.int32, np.bool_) for v in equation.outvars):
                raise NotImplementedError(f"{name} of scalars")
        return [None] * len(equation.outvars)

    # ---- barriers

    def barriers(self, given: Sequence[Any], treedef: Any) -> list[Barrier]:
        """The barrier that is named, in every block that has a copy of it; this block's first."""
        (key, _), *flat = given[0], *given[1:]
        indexers = treedef.unflatten(flat)
        number = int(indexers[0].indices[0]) if indexers else 0
        kind = self.kernel.kinds[key]
        others = (
            [block for block in self.cluster if block is not self.block] if hasattr(kind, "collective_axes") else []
        )
        return [self.kernel.barriers(block, key)[number] for block in (self.block, *others)]

    def arrive(self, given: Sequence[Any], treedef: Any) -> None:
        clock = self.leave()
        own, *others = self.barriers(given, treedef)
        own.arrive(clock)
        for barrier, block in zip(others, (b for b in self.cluster if b is not self.block), strict=bool(others)):
            barrier.arrive(clock)
            block.visits += [(agent, clock[agent]) for agent in (self.first, self.rest)]

    def wait(self, barrier: Barrier) -> Run:
        moments = barrier.waits.setdefault(self.rest, [])
        while len(barrier.over) <= len(moments):
            yield
        self.told(barrier.over[len(moments)])
        moments.append(int(self.clocks[1][self.rest]))
        self.leave()
        return []

    # ---- copies

    def fetch(self, given: Sequence[Any], params: dict[str, Any]) -> None:
        assert not params["has_user_predicate"]
        assert params["collective_axes"] is None
        source, target, barrier, *flat = given
        trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier")]
        views, at = [], 0
        for tree in trees:
            views.append(flat[at : at + tree.num_leaves])
            at += tree.num_leaves
        source = source.transformed(trees[0].unflatten(views[0]))
        target = target.transformed(trees[1].unflatten(views[1]))
        (barrier,) = self.barriers([barrier, *views[2]], trees[2])
        clock = self.clocks[0]
        moment = len(barrier.over) + 1
        if clock[barrier.agent] < len(barrier.over):
            raise Fault("a load does not know that its barrier's last phase is over")
        target.buffer.use(target.part, barrier.agent, moment, clock, "write")
        if self.kernel.counts_blocks:
            source.buffer.copied(source, barrier.agent, moment, self.shown, "load")
        barrier.arrive(self.leave())

    def send_out(self, given: Sequence[Any], params: dict[str, Any]) -> None:
        source, target, *flat = given
        asked = flat.pop() if params["has_user_predicate"] else True
        trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst")]
        count = trees[0].num_leaves
        source = source.transformed(trees[0].unflatten(flat[:count]))
        target = target.transformed(trees[1].unflatten(flat[count:]))
        assert params["commit_group"]
        self.groups += 1
        if asked:
            source.buffer.use(source.part, self.stores, self.groups, self.clocks[0], "read")
            target.buffer.write(target.starts, target.sizes, not source.swizzled)
            if self.kernel.counts_blocks:
                target.buffer.copied(target, self.writes, self.groups, self.shown, "store")

    # ---- threads' own accesses, and blocks of PTX

    def access(self, name: str, given: Sequence[Any], params: dict[str, Any]) -> Any:
        """What is read, if it is known."""
        tree: Any = params.get("tree", params.get("args_tree"))
        view = given[0]
        if name == "load":
            transforms = tree.unflatten(given[1:])
        else:
            transforms = tree.unflatten(given[2:] if name in STORES else given[1:])
        view = view.transformed(transforms)
        if isinstance(view.buffer, Memory):
            self.threads(view, "store" if name in STORES else "load")
        elif name in STORES:
            view.buffer.write(view.starts, view.sizes, piece=False)
        elif view.buffer.data is not None:
            return view.buffer.data[tuple(view.starts)].item()
        return None

    def inline(self, given: Sequence[Any], params: dict[str, Any]) -> Run:
        """The functions that emit what Pallas has no name for, each with what it does to its references."""
        name, count = params["mgpu_fn"].__qualname__.split(".")[0], params["pytree_args"].num_leaves
        transforms = params["pytree_ref_transforms"].unflatten(given[count:])
        views = [
            v.transformed(t) for v, t in zip(given[:count], transforms, strict=True) if isinstance(v, View)
        ]  # an accumulator has no transforms
        match name:
            case "multiply" | "_multiply_window" | "multiply_halo":
                self.products += 1
                for view in views:
                    view.buffer.use(view.part, self.tensor, self.products, self.clocks[1], "read")
            case "finish_accumulator":
                if self.kernel.missing != FINISH:
                    self.knows(self.tensor, self.products)
            case "start_accumulator" | "scaled" | "_named":
                pass
            case "turns":
                return [given[0]]
            case "scores" | "accumulate" | "accumulate_weighted":
                self.issue(views)
            case "accumulate_repaired":  # the operands of products first, then those that are looked at
                rows = views.pop(-1) if len(views) % 2 == 0 and views[-1].shape[-1:] != views[0].shape[-1:] else None
                yield from self.mend(views[-2:])
                for view in views[:-2]:
                    self.issue([view])
                if rows is not None:
                    self.threads(rows, "load")
            case "waited":
                self.knows(self.tensor, self.products - int(params["mgpu_fn"].__defaults__[0]))
            case "repair":
                yield from self.mend(views)
            case "probabilities" | "score_gradients" | "received":
                self.threads(views[0], "load")
                self.fence() if name == "received" else None
            case "store_rounded" | "store_registers" | "clear_rows":
                self.threads(views[0], "store")
            case "store":
                self.threads(views[0], "store")
            case "prepare":
                self.threads(self.own_barrier(views[0]), "store")
                self.meet()
            case "send":
                self.send(*views)
            case "receive":
                yield from self.receive(*views)
            case "_inline_walk":
                for view, kind in zip(views, ("load", "load", "store", "load"), strict=False):  # the last is the biases
                    self.threads(view, kind)
            case "_inline_filter":
                for view in views:
                    self.threads(view, "load")
            case "loads_done":
                self.fence()
            case "draw":
                pass
            case "drawn":
                return [self.names[self.kernel.grid_name]]
            case "count":
                self.kernel.counter(given[1]).count(self.leave())
            case "reached":
                counter, (total,) = self.kernel.counter(given[1]), params["mgpu_fn"].__defaults__
                while counter.total < total:
                    yield
                counter.asked.add(total)
                self.told(counter.clock)
            case "copies_follow":
                self.shown = self.clocks[0].copy()
            case "_inline_filter_store":  # warpgroups store other columns, here one piece of as many bytes for each
                (low, high), clock = views[0].part, self.clocks[1]
                share = (high - low) // self.kernel.warpgroups
                part = low + self.number * share, low + (self.number + 1) * share
                views[0].buffer.use(part, self.rest, clock[self.rest], clock, "store")
            case _:
                raise NotImplementedError(f"{name} has no meaning here")
        return []

    def issue(self, views: Sequence[View]) -> None:
        """A product, which is a group."""
        self.products += 1
        for view in views:
            view.buffer.use(view.part, self.tensor, self.products, self.clocks[1], "read")

    def mend(self, views: Sequence[View]) -> Generator[None, None, None]:
        """Both consumers meet, replace what is not finite, which each half of its threads has, and meet again."""
        yield from self.together()
        for view in views:
            (low, high), clock = view.part, self.clocks[1]
            half = (high - low) // 2
            part = low + self.number * half, low + (self.number + 1) * half
            view.buffer.use(part, self.rest, clock[self.rest], clock, "store")
        self.fence()
        yield from self.together()

    def together(self) -> Generator[None, None, None]:
        """A barrier of the two consumers."""
        here = self.block.meetings
        number = len(here.setdefault(self.number, []))
        here[self.number].append(self.leave())
        while len(here.get(1 - self.number, ())) <= number:
            yield
        self.told(here[1 - self.number][number])

    # ---- sums over a cluster (`cluster.py`)

    def own_barrier(self, barriers: View, block: Block | None = None) -> View:
        view = View(self.kernel.in_block(barriers, block or self.block), barriers.shape, barriers.width)
        view.starts, view.sizes = [2 * self.number], [2]
        return view

    def slot(self, slots: View, block: Block, number: int) -> View:
        """Slot `number` of this warpgroup's."""
        blocks = len(self.cluster)
        consumers = self.kernel.warpgroups - 1
        size = slots.shape[0] // consumers // (blocks - 1)
        view = View(self.kernel.in_block(slots, block), slots.shape, slots.width)
        view.starts, view.sizes = [(self.number * (blocks - 1) + number) * size], [size]
        return view

    def send(self, slots: View, barriers: View) -> None:
        self.rounds += 1
        clock = self.clocks[1]
        for to, block in enumerate(self.cluster):
            if block is not self.block:
                target = self.slot(slots, block, (to - self.rank) % len(self.cluster) - 1)
                target.buffer.use(target.part, self.sends, self.rounds, clock, "send")
                barrier = self.own_barrier(barriers, block)
                barrier.buffer.use(barrier.part, self.sends, self.rounds, clock, "load")
                block.came.setdefault(self.number, []).append(clock.copy())

    def receive(self, slots: View, barriers: View) -> Run:
        others = [rank for rank in range(len(self.cluster)) if rank != self.rank]
        while len(self.block.came.get(self.number, ())) < len(others) * self.rounds:
            yield
        for clock in self.block.came[self.number]:
            self.told(clock)
        for rank in others:
            self.knows(AGENTS * (rank * self.kernel.warpgroups + self.number) + 4, self.rounds)
        for number in range(len(others)):
            self.threads(self.slot(slots, self.block, number), "load")
        self.fence()
        self.meet()
        self.threads(self.own_barrier(barriers), "store")
        self.meet()
        return []


def _plain(value: Any) -> Any:
    return np.asarray(value).item() if np.ndim(value) == 0 else None


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if hasattr(jaxpr, "consts") else jaxpr


class Kernel:
    """One launch of a traced function."""

    def __init__(self, equation: Any) -> None:
        (mesh,), (self.jaxpr,) = equation.params["meshes"], equation.params["jaxprs"]
        self.name = mesh.kernel_name
        (self.blocks,), (self.grid_name,) = mesh.grid, mesh.grid_names
        self.cluster, (self.cluster_name,) = math.prod(mesh.cluster), mesh.cluster_names or (None,)
        self.warpgroups, self.thread_name = mesh.num_threads or 1, mesh.thread_name
        self.warpgroup: Any = Warpgroup
        self.dtype: Any = None  # of the operands, where values are computed
        self.missing: Any = None  # an equation that is left out
        self.early: Any = None  # a wait for groups that lets one more be under way
        self.reading: Any = None  # a wait for groups of stores that waits for what they read alone
        self.exchanges = False  # whether threads read what other threads of their warpgroup have stored
        self._programs: dict[int, Any] = {}
        scoped = [e for e in equations(self.jaxpr) if e.primitive.name == "run_scoped"]
        self.kinds = {v: v.aval.inner_aval.dtype for e in scoped for v in e.params["jaxpr"].invars}
        self.counts = {v: math.prod(v.aval.shape) for v, kind in self.kinds.items() if hasattr(kind, "num_arrivals")}
        self.firsts = dict(zip(self.counts, itertools.accumulate(self.counts.values(), initial=0), strict=False))
        self.counts_blocks = any(e.primitive.name == "get_global" for e in equations(self.jaxpr))
        self.threads = AGENTS * self.cluster * self.warpgroups  # agents that are parts of warpgroups
        self.of_cluster = self.threads + self.cluster * sum(self.counts.values())
        self.agents = self.of_cluster * (self.blocks if self.counts_blocks else 1)
        self.base = 0  # the first agent of the cluster that runs

    def program(self, jaxpr: Any) -> tuple[list[Any], list[tuple[Any, list[int], Any]], list[int]]:
        """A jaxpr with its variables numbered: constants that follow the arguments, steps, and what it returns."""
        if id(jaxpr) not in self._programs:
            places = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
            constants: list[Any] = []
            literals = [v for e in jaxpr.eqns for v in e.invars if isinstance(v, Literal)]
            for v in (*literals, *(v for v in jaxpr.outvars if isinstance(v, Literal))):
                places[id(v)] = len(jaxpr.constvars) + len(jaxpr.invars) + len(constants)
                constants.append(_plain(v.val))
            place = lambda v: places[id(v) if isinstance(v, Literal) else v]
            steps, last = [], len(jaxpr.constvars) + len(jaxpr.invars) + len(constants)
            for equation in jaxpr.eqns:
                (*_, out) = equation.outvars or (None,)
                plain = out is not None and out.aval.shape == () and all(v.aval.shape == () for v in equation.invars)
                scalar = SCALARS.get(equation.primitive.name) if plain else None
                steps.append((scalar, [place(v) for v in equation.invars], equation))
                for v in equation.outvars:
                    places[v], last = last, last + 1
            self._programs[id(jaxpr)] = constants, steps, [place(v) for v in jaxpr.outvars]
        return self._programs[id(jaxpr)]

    def ordering(self) -> list[Any]:
        """The equations that order accesses, `FINISH` for the wait in `finish_accumulator` among them."""
        found = [e for e in equations(self.jaxpr) if e.primitive.name in ORDERING]
        found += [e for e in equations(self.jaxpr) if any(_emits(e, name) for name in ("loads_done", *COUNTERS))]
        waits = any(_emits(e, FINISH) for e in equations(self.jaxpr))
        return [*{id(e): e for e in found}.values(), *([FINISH] if waits else [])]

    def buffer(self, block: Block, var: Any) -> Any:
        if var in self.counts:
            self.barriers(block, var)
            return var, None
        shape, width = var.aval.shape, np.dtype(var.aval.inner_aval.dtype).itemsize
        if var not in block.buffers:
            block.buffers[var] = Memory(math.prod(shape) * width)
        return View(block.buffers[var], shape, width)

    def barriers(self, block: Block, var: Any) -> list[Barrier]:
        if var not in block.buffers:
            kind, ranks = self.kinds[var], self.cluster if hasattr(self.kinds[var], "collective_axes") else 1
            first = self.base + self.threads + block.rank * sum(self.counts.values()) + self.firsts[var]
            block.buffers[var] = [
                Barrier(first + i, kind.num_arrivals * ranks, self.agents) for i in range(self.counts[var])
            ]
        return block.buffers[var]

    def in_block(self, view: View, block: Block) -> Memory:
        """The buffer of another block of the cluster that is where the view's is in its own."""
        for own in self.running:
            for var, buffer in own.buffers.items():
                if buffer is view.buffer:
                    return self.buffer(block, var).buffer
        raise AssertionError("no such buffer")

    def run(self, known: dict[int, np.ndarray] | None = None, whole: tuple[int, ...] = (-1,)) -> None:
        """Interprets the launch; raises a `Fault`.

        known: operands that scalars depend on, by their number. whole: the arrays that are written, each element once.
        """
        self.counters: dict[int, Counter] = {}
        arrays = [Result(v.aval.shape, (known or {}).get(i)) for i, v in enumerate(self.jaxpr.invars)]
        views = [View(array, array.shape, 1) for array in arrays]
        for number in range(self.blocks):
            self.run_cluster(number, views)
        for counter in self.counters.values():
            counter.check()
        for result in (arrays[i] for i in whole):
            if (result.times != 1).any():
                where = tuple(int(i[0]) for i in np.nonzero(result.times != 1))
                raise Fault(f"element {where} of the result is written {result.times[where]} times")

    def counter(self, number: int) -> Counter:
        return self.counters.setdefault(int(number), Counter(self.agents))

    def run_cluster(self, number: int, views: Sequence[View]) -> None:
        self.base = number * self.of_cluster if self.counts_blocks else 0
        self.running = cluster = [Block(rank) for rank in range(self.cluster)]
        warpgroups = []
        for rank in range(self.cluster):
            for thread in range(self.warpgroups):
                names = {self.grid_name: number, self.cluster_name: rank, self.thread_name: thread}
                warpgroups.append(self.warpgroup(self, cluster, rank, thread, names))
        active = [(w, w.run(self.jaxpr, views)) for w in warpgroups]
        before = None
        while active:
            active = [(w, run) for w, run in active if _goes_on(run)]
            now = len(active), *_progress(cluster)
            if active and now == before:
                raise Fault(f"warpgroups {[(w.rank, w.number) for w, _ in active]} wait without an end")
            before = now
        for rank, block in enumerate(cluster):
            clock = np.maximum.reduce([w.leave() for w in warpgroups if w.rank == rank])
            for memory in block.memories():
                if any(clock[use[2]] < use[3] for use in memory.uses):
                    raise Fault("shared memory is given back while it is in use")
            if any(clock[agent] < moment for agent, moment in block.visits):
                raise Fault("a block ends before another one's arrival has come")
            for barrier in block.barriers():
                barrier.check()


def _progress(cluster: list[Block]) -> Iterator[Any]:
    for block in cluster:
        yield sum(map(len, block.came.values())) + sum(map(len, block.meetings.values()))
        yield from ((len(b.over), b.due, *map(len, b.waits.values())) for b in block.barriers())


def _goes_on(run: Run) -> bool:
    try:
        next(run)
    except StopIteration:
        return False
    return True


def _emits(equation: Any, name: str) -> bool:
    inline = equation.primitive.name.startswith("inline_mgpu")
    return inline and equation.params["mgpu_fn"].__qualname__.split(".")[0] == name


def place_of(equation: Any) -> str:
    """The function that an equation stands in."""
    if isinstance(equation, str):
        return equation
    frame = source_info_util.user_frame(equation.source_info.traceback)
    return frame.function_name if frame else ""


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = _open(inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def kernels(function: Callable[..., Any], *avals: Any) -> list[Kernel]:
    """The launches of a function that have a frame to check: those of which PTX is not all."""
    traced = jax.make_jaxpr(function)(*avals).jaxpr
    launches = [Kernel(e) for e in equations(traced) if e.primitive.name == "mpmd_map"]
    return [kernel for kernel in launches if kernel.counts or kernel.ordering()]


def lowered(function: Callable[..., Any], *operands: Any, **named: Any) -> list[Kernel]:
    """The launches of all calls that engine hopper serves when a function of public ops is lowered for a GPU."""
    run, calls = primitives._run, list[Any]()

    def seen(engine: Any, call: Any, given: Sequence[Any]) -> Any:
        calls.append((engine, call, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]))
        return run(engine, call, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "_run", seen)
        jax.jit(function).trace(*operands, **named).lower(lowering_platforms=("cuda",))
    found = []
    for engine, call, avals in calls:
        if engine.name == "hopper":
            found += kernels(ft.partial(lambda engine, call, *given: run(engine, call, given), engine, call), *avals)
    return found
