"""Attention forward on Hopper: the frame in which `forward_ptx` runs.

Blocks of threads are persistent. A producer warpgroup loads queries, and tiles of keys and values, into shared memory;
the consumers compute blocks of queries (`work`). A slot has a barrier "full", at which consumers wait for the loads,
and a barrier "empty", at which the producer waits until all warps of the consumers have read it. These mbarriers are
words of shared memory, not Pallas' barriers, whose addresses PTX cannot have and on which all threads arrive.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention.hopper import work
from jaxdnn._src.attention.hopper.forward_ptx import code
from jaxdnn._src.attention.hopper.plan import ROWS, Plan, Problem, Spread, decided
from jaxdnn._src.attention.hopper.tile_ptx import RESULTS, THREADS, TURN, operands
from jaxdnn._src.attention.hopper.work import Item
from jaxdnn._src.core.compat import arith, ir, llvm, mgpu, mgpu_utils, pl, plgpu
from jaxdnn._src.hopper import MULTIPROCESSORS, branches
from jaxdnn._src.hopper.cluster import address
from jaxdnn._src.hopper.launch import kernel, turns, when
from jaxdnn._src.hopper.wgmma import NUMBER, swizzle_transform

# Of a thread of the producer, and of a consumer, by the number of consumers.
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}
_inline: Any = plgpu.inline_mgpu
_inline_asm: Any = llvm.inline_asm
_raw: Any = plgpu.RefType(())
_barrier: Any = mgpu_utils.BarrierRef
_copy: Any = mgpu.LaunchContext.async_copy


def attention_forward(
    q: Array, k: Array, v: Array, given: Mapping[str, Array], problem: Problem, plan: Plan
) -> tuple[Array, ...]:
    """y and lse, or of each part its largest scores, sums (B, N, parts, T) and weighted values (B, N, parts, T, E).

    given: what else the problem has, by name, each with one leading axis where it has leading axes.
    """
    branches.record("attention forward", **decided(plan, problem))
    blocks = min(MULTIPROCESSORS, work.count(problem, plan))
    given = _prepared(given, problem, plan, blocks)
    outs = (
        jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
    )
    if plan.partial:
        rows = (problem.batch, problem.heads, problem.parts, problem.queries)
        outs = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (rows, rows, (*rows, plan.values)))

    def body(*refs: Any, **scratch: Any) -> None:
        block = _Block(problem, plan, refs, list(given), scratch)
        block.prepare()
        when(block.wg == plan.consumers)(block.produce)
        when(block.wg < plan.consumers)(block.consume)

    return kernel(
        body,
        out_type=outs,
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=plan.consumers + 1,
        thread_name="wg",
        scratch_types=_scratch(plan, q.dtype),
        kernel_name="jaxdnn_attention",
    )(q, k, v, *given.values())


def _prepared(given: Mapping[str, Array], problem: Problem, plan: Plan, blocks: int) -> dict[str, Array]:
    """The arrays that the kernel takes besides queries, keys and values."""
    found = dict(given)
    if plan.mask.listed:
        found["ranges"] = work.ranges(problem, plan, given)
    if "mask" in found:
        found["mask"] = found["mask"].astype(jnp.uint8)
    for name in ("alibi_slopes", "sinks"):
        if name in found:
            found[name] = found[name].astype(jnp.float32)
    table = work.work_table(problem, plan, blocks)
    return found if table is None else found | {"table": jnp.asarray(table)}


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """A block's buffers by name."""
    swizzle = (swizzle_transform(plan.swizzle),)
    box = lambda *shape: plgpu.SMEM((*shape, plan.chunk), dtype, transforms=swizzle)
    found = {
        "q": box(plan.q_slots, plan.feature_chunks, ROWS),
        "k": box(plan.stages, plan.feature_chunks, plan.keys),
        "v": box(plan.stages, plan.value_chunks, plan.keys),
        "bars": plgpu.SMEM((2 * plan.barriers,), jnp.int32),
    }
    return found if plan.out_in_q or plan.partial else found | {"out": box(plan.consumers, plan.value_chunks, ROWS)}


class _Block:
    """One block of threads."""

    def __init__(
        self, problem: Problem, plan: Plan, refs: Sequence[Any], names: Sequence[str], scratch: dict[str, Any]
    ) -> None:
        self.problem, self.plan, self.scratch = problem, plan, scratch
        self.q, self.k, self.v, *rest = refs
        self.given = dict(zip(names, rest, strict=False))
        results = rest[len(names) :]
        self.y: Any = None if plan.partial else results.pop(0)
        self.results = dict(zip(RESULTS[plan.partial], results, strict=True))
        self.out = scratch.get("out", scratch["q"])
        self.wg, self.sm, self.sms = lax.axis_index("wg"), lax.axis_index("sm"), lax.axis_size("sm")
        self.box = plgpu.RefType((swizzle_transform(plan.swizzle),))

    # ---- the work

    def over_items(self, do: Callable[[Item, Any, Any], None]) -> None:
        """Calls `do` for each of this block's items in order, with how many tiles and queries there were before."""
        zero = jnp.int32(0)

        def one(number: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
            item = self.item(number)
            do(item, *counts)
            tiles = item.last - item.first
            used = jnp.int32(1) if self.plan.out_in_q else (tiles > 0).astype(jnp.int32)
            return counts[0] + tiles, counts[1] + used

        if "table" not in self.given:
            each, rest = divmod(work.count(self.problem, self.plan), self.sms)
            mine = jnp.int32(each) + (self.sm < rest).astype(jnp.int32)
            lax.fori_loop(zero, turns(mine), lambda turn, counts: one(turn * self.sms + self.sm, counts), (zero, zero))
            return
        table = self.given["table"]

        def step(turn: Any, carry: Any) -> Any:
            following = table[self.sm, turn + 2]  # read before it is needed
            return following, one(*carry)

        lax.fori_loop(zero, table[self.sm, 0], step, (table[self.sm, 1], (zero, zero)))

    def item(self, number: Any) -> Item:
        tile, part, head = work.placed(number, self.problem, self.plan)
        heads = jnp.int32(self.problem.heads)
        image, head = lax.div(head, heads), lax.rem(head, heads)
        return work.bounded(self.problem, self.plan, self.given, image, head, tile * self.plan.block_rows, part)

    def prepare(self) -> None:
        """Initialises the barriers."""
        plan = self.plan
        warps = THREADS // 32
        counts = [1] * plan.q_slots + [warps] * plan.q_slots
        counts += [1] * 2 * plan.stages + [warps * plan.consumers] * 2 * plan.stages

        @_inline(arg_types=(_raw,))
        def barriers(_: Any, bars: Any) -> None:
            lines = [".reg .pred first; .reg .b32 t;", "mov.u32 t, %tid.x; setp.eq.u32 first, t, 0;"]
            lines += [f"@first mbarrier.init.shared::cta.b64 [$0+{8 * i}], {n};" for i, n in enumerate(counts)]
            lines += ["fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;"]
            lines += [f"bar.sync 0, {THREADS * (plan.consumers + 1)};"]
            _void([address(bars)], _block(lines), "r,~{memory}")

        barriers(self.scratch["bars"])

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(REGISTERS[self.plan.consumers][0], action="decrease")

        def load(item: Item, number: Any, items: Any) -> None:
            @pl.loop(item.first, item.first + turns(item.last - item.first))
            def _(j: Any) -> None:
                here = number + (j - item.first)
                self.load("k", self.k, item, j, here)
                when(j == item.first)(lambda: self.load_queries(item, items))
                self.load("v", self.v, item, j, here)

            if self.plan.out_in_q:  # a block that sees nothing takes the queries' place all the same
                when(item.last <= item.first)(lambda: self.load_queries(item, items))

        self.over_items(load)

    def load(self, name: str, source: Any, item: Item, j: Any, number: Any) -> None:
        """Fills a slot of the ring of keys or values with tile j."""
        plan, stages = self.plan, jnp.int32(self.plan.stages)
        slot, over = lax.rem(number, stages), lax.div(number, stages)
        self.wait_empty(f"{name}_empty", slot, over)
        head = item.head
        if self.problem.heads != self.problem.shared:
            head = lax.div(head, jnp.int32(self.problem.heads // self.problem.shared))
        chunks = plan.feature_chunks if name == "k" else plan.value_chunks
        place = (item.image, head, j * plan.keys)
        self.fetch(source, self.scratch[name], f"{name}_full", slot, place, chunks, plan.keys, self.problem.heads_first)

    def load_queries(self, item: Item, items: Any) -> None:
        for wg in range(self.plan.consumers):
            slot, over = work.query_slot(self.plan, wg, items)
            self.wait_empty("q_empty", slot, over)
            place = (item.image, item.head, item.row + wg * ROWS)
            heads_first = self.problem.q_heads_first
            self.fetch(self.q, self.scratch["q"], "q_full", slot, place, self.plan.feature_chunks, ROWS, heads_first)

    def wait_empty(self, name: str, slot: Any, over: Any) -> None:
        """Waits until a slot that has been filled `over` times has been read as often."""
        first = self.plan.barrier(name)

        @_inline(arg_types=(_raw, NUMBER, NUMBER))
        def wait(_: Any, bars: Any, slot: Any, over: Any) -> None:
            lines = [
                ".reg .pred p; .reg .b32 a, f;",
                "setp.eq.s32 p, $2, 0;",
                "@p bra PAST;",
                f"mad.lo.s32 a, $1, 8, $0; add.s32 a, a, {first}; sub.s32 f, $2, 1; and.b32 f, f, 1;",
                "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [a], f;",
                "@!p bra AGAIN;",
                "PAST:",
            ]
            _void([address(bars), _scalar(slot), _scalar(over)], _block(lines), "r,r,r,~{memory}")

        wait(self.scratch["bars"], slot, over)

    def fetch(
        self,
        source: Any,
        target: Any,
        full: str,
        slot: Any,
        place: tuple[Any, Any, Any],
        chunks: int,
        rows: int,
        heads_first: bool,
    ) -> None:
        """Loads `rows` rows of a head into a slot, which its barrier tells of."""
        plan, first = self.plan, self.plan.barrier(full)

        @_inline(arg_types=(_raw, self.box, _raw, *[NUMBER] * 4))
        def load(ctx: Any, source: Any, target: Any, bars: Any, *numbers: Any) -> None:
            slot, image, head, row = map(_scalar, numbers)
            expect = [
                ".reg .pred first; .reg .b32 t, a;",
                f"mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1}; setp.eq.u32 first, t, 0;",
                f"mad.lo.s32 a, $1, 8, $0; add.s32 a, a, {first};",
                f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], {chunks * rows * plan.swizzle};",
            ]
            _void([address(bars), slot], _block(expect), "r,r,~{memory}")
            number = arith.addi(slot, mgpu_utils.c(first // 8, slot.type))
            barrier = _barrier(mgpu_utils.memref_ptr(bars), number, None, 1)
            for c in range(chunks):
                span = mgpu_utils.ds(_index(row), rows)
                where = (_index(head), span) if heads_first else (span, _index(head))
                _copy(
                    ctx,
                    src_ref=source,
                    dst_ref=mgpu_utils.memref_slice(target, (_index(slot), c)),
                    gmem_slice=(_index(image), *where, mgpu_utils.ds(c * plan.chunk, plan.chunk)),
                    barrier=barrier,
                    swizzle=plan.swizzle,
                    arrive=False,
                )

        load(source, target, self.scratch["bars"], slot, *place)

    # ---- the consumers

    def consume(self) -> None:
        plan = self.plan
        plgpu.set_max_registers(REGISTERS[plan.consumers][1], action="increase")
        # The last consumer gives the first one its first turn, which after the last item takes the last one.
        if plan.consumers > 1:
            self.pass_turn("arrive", plan.consumers - 1)

        def compute(item: Item, number: Any, items: Any) -> None:
            self.compute(item, number, items)
            if not plan.partial:
                self.store(item)

        self.over_items(compute)
        if plan.consumers > 1:
            self.pass_turn("sync", 0)
        plgpu.wait_smem_to_gmem(0)

    def pass_turn(self, what: str, warpgroup: int) -> None:
        @_inline(arg_types=())
        def turn(_: Any = None) -> None:
            _void([], f"bar.{what} {TURN}, {2 * THREADS};", "~{memory}")

        when(self.wg == warpgroup)(turn)

    def compute(self, item: Item, number: Any, items: Any) -> None:
        """The item's results into shared memory, and its logarithms into device memory; there go parts of rows too."""
        problem, plan = self.problem, self.plan
        text, kinds = code(problem, plan), operands(problem, plan)
        numbers = self._numbers(item) | {"number": number, "item": items}
        names = [name for name in kinds if name in numbers]
        refs = self.results | {name: self.given[name] for name, kind in kinds.items() if name in self.given}
        buffers = {"q": self.box, "k": self.box, "v": self.box, "bars": _raw, "out": self.box}
        types = (*buffers.values(), *[_raw] * len(refs), *[NUMBER] * len(names))

        @_inline(arg_types=types)
        def attend(_: Any, *given: Any) -> None:
            shared, rest = given[: len(buffers)], given[len(buffers) :]
            values = dict(zip(buffers, map(address, shared), strict=True))
            values |= dict(zip(refs, map(_pointer, rest[: len(refs)]), strict=True))
            values |= dict(zip(names, map(_scalar, rest[len(refs) :]), strict=True))
            _void([values[name] for name in kinds], text, ",".join([*kinds.values(), "~{memory}"]))

        memory = [self.out if name == "out" else self.scratch[name] for name in buffers]
        attend(*memory, *refs.values(), *(numbers[name] for name in names))

    def _numbers(self, item: Item) -> dict[str, Any]:
        """The operands of the text that are numbers, by name."""
        problem = self.problem
        first = work.first_result(problem, item.image, item.head, item.part)
        found = dict(vars(item)) | {"result_first": first}
        own = lambda name: self.given[name][item.image if self.given[name].shape[0] > 1 else 0, item.head]
        found |= {"slope": own("alibi_slopes")} if problem.slopes else {}
        found |= {"sink": own("sinks")} if problem.sinks else {}
        for name, array in (("bias", problem.bias), ("mask", problem.mask)):
            if array is not None:
                found[f"{name}_first"] = self._first(array, item)
        return found

    def _first(self, array: Spread, item: Item) -> Any:
        """The number of the first element of the item's head in an array that has a number for each pair."""
        problem = self.problem
        sizes = (problem.heads, problem.queries, problem.keys)
        inner = [n if there else 1 for n, there in zip(sizes, array.axes[1:], strict=True)]
        image = item.image if array.axes[0] else jnp.int32(0)
        return image * math.prod(inner) + (item.head * math.prod(inner[1:]) if array.axes[1] else 0)

    def store(self, item: Item) -> None:
        """Stores this warpgroup's results."""
        plan = self.plan
        plgpu.commit_smem()
        rows = pl.ds(item.row + self.wg * ROWS, ROWS)
        where = (item.head, rows) if self.problem.heads_first else (rows, item.head)
        for c in range(plan.value_chunks):
            # A start that is traced: the last box may have more features than there are.
            columns = pl.ds(self.wg - self.wg + c * plan.chunk, plan.chunk)
            target = self.y.at[(item.image, *where, columns)]
            plgpu.copy_smem_to_gmem(self.out.at[self.wg, c], target, commit_group=c == plan.value_chunks - 1)
        if plan.out_in_q:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.release_queries()

    def release_queries(self) -> None:
        first = self.plan.barrier("q_empty")

        @_inline(arg_types=(_raw,))
        def release(_: Any, bars: Any) -> None:
            lines = [
                ".reg .pred elected; .reg .b32 t, a;",
                "mov.u32 t, %tid.x; shr.u32 a, t, 7; mad.lo.s32 a, a, 8, $0;",
                "and.b32 t, t, 31; setp.eq.u32 elected, t, 0;",
                f"@elected mbarrier.arrive.shared::cta.b64 _, [a+{first}];",
            ]
            _void([address(bars)], _block(lines), "r,~{memory}")

        release(self.scratch["bars"])


# ---- operands of PTX


def _scalar(value: Any) -> Any:
    """A number that all threads have."""
    return value.registers.item()


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _pointer(ref: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def _block(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])


def _void(values: list[Any], text: str, constraints: str) -> None:
    _inline_asm(ir.Type.parse("!llvm.void"), values, text, constraints, has_side_effects=True)
