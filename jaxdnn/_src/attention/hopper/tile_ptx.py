"""The PTX of one tile of keys: its operands, its barriers, its products. `forward_ptx` puts the tiles in order.

A thread has two rows of its warpgroup's 64 queries, eight apart, and of each group of eight columns of an accumulator
two neighbouring ones: registers 4i and 4i + 1 are columns 8i + 2t and the next one of its first row, t being its place
among four lanes, 4i + 2 and 4i + 3 those of the second row.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxdnn._src.attention.hopper.plan import ROWS, Plan, Problem
from jaxdnn._src.hopper.ptx import Emitter, real

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LOWEST, ZERO, ONE = real(-math.inf), real(0.0), real(1.0)
TURN, VOTE, MEET = 8, 11, 14  # named barriers, up to three of the first two; Mosaic uses those below 8
THREADS = 128  # of a warpgroup
# What goes from registers to device memory: a logarithm, or a part's largest score, sum and weighted values.
RESULTS = {False: ("lse",), True: ("largest", "total", "values")}


def operands(problem: Problem, plan: Plan) -> dict[str, str]:
    """The names of the operands in order, each with the letter of its kind of register.

    Addresses in shared memory; numbers of this block of queries; what heads have; addresses in device memory.
    """
    words = ["q", "k", "v", "bars", "out", "number", "item", "first", "whole_from", "whole_to", "last", "row", "shift"]
    words += ["start", "row_end", "key_end", "result_first"]
    words += ["bias_first"] * (problem.bias is not None) + ["mask_first"] * (problem.mask is not None)
    words += ["image"] * plan.mask.segments
    floats = ["slope"] * problem.slopes + ["sink"] * problem.sinks
    wide = [*RESULTS[plan.partial], *["bias"] * (problem.bias is not None), *["mask"] * (problem.mask is not None)]
    wide += ["query_segments", "key_segments"] * plan.mask.segments
    return dict.fromkeys(words, "r") | dict.fromkeys(floats, "f") | dict.fromkeys(wide, "l")


@dataclasses.dataclass
class Rows:
    """A register for each of a thread's two rows."""

    a: str
    b: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.a, self.b))

    def __getitem__(self, row: int) -> str:
        return (self.a, self.b)[row]


def of_row(registers: Sequence[str], row: int) -> list[str]:
    """A row's registers of an accumulator, in ascending columns."""
    return [r for i, r in enumerate(registers) if i // 2 % 2 == row]


class Tile:
    """Emits what a consumer does with a tile."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan, self.e = problem, plan, Emitter()

    # ---- what does not change

    def start(self) -> None:
        """Reads the operands, and computes addresses and places."""
        e = self.e
        read = {
            "r": lambda source: self.same(e.r("mov.b32", source)),
            "f": lambda source: e.f("mov.f32", source),
            "l": lambda source: e.d("mov.b64", source),
        }
        kinds = operands(self.problem, self.plan)
        self.given = {name: read[kind](f"${i}") for i, (name, kind) in enumerate(kinds.items())}
        self._find_place()
        self._find_memory()
        self._find_turn()
        plan, number = self.plan, self.given["number"]
        self.slot = e.r("rem.u32", number, plan.stages)
        self.phase = e.r("and.b32", e.r("div.u32", number, plan.stages), 1)
        self.old_slot, self.old_phase = e.r("mov.b32", self.slot), e.r("mov.b32", self.phase)
        self.j = e.r("mov.b32", self.given["first"])
        self.o = [e.f("mov.f32", ZERO) for _ in range(plan.wide_values // 2)]
        self.s = [e.new("f") for _ in range(plan.keys // 2)]
        self.p = [e.new() for _ in range(plan.keys // 4)]

    def _find_place(self) -> None:
        """Of this thread: its warpgroup, its rows, its first column."""
        e = self.e
        thread = e.r("mov.u32", "%tid.x")
        self.wg = self.same(e.r("shr.u32", thread, 7))
        self.thread = e.r("and.b32", thread, THREADS - 1)
        lane = e.r("and.b32", thread, 31)
        self.elected = e.p("setp.eq.u32", lane, 0)
        self.column = e.r("shl.b32", e.r("and.b32", lane, 3), 1)
        self.quad_first = e.p("setp.eq.u32", self.column, 0)
        self.local = e.r("add.s32", e.r("shl.b32", e.r("shr.u32", self.thread, 5), 4), e.r("shr.u32", lane, 2))
        first = e.r("add.s32", self.given["row"], e.scaled(self.wg, ROWS, self.local))
        self.row = Rows(first, e.r("add.s32", first, 8))

    def _find_memory(self) -> None:
        """Barriers and descriptors that do not depend on the tile."""
        e, plan, g = self.e, self.plan, self.given
        zero = e.r("mov.b32", 0)
        self.yes, self.no = e.p("setp.eq.u32", zero, 0), e.p("setp.ne.u32", zero, 0)
        buffer, over = self.wg, g["item"]
        if plan.q_buffers > 1:
            over = e.r("div.u32", g["item"], plan.q_buffers)
            buffer = e.scaled(self.wg, plan.q_buffers, e.r("rem.u32", g["item"], plan.q_buffers))
        self.q_full, self.q_empty = self.barrier("q_full", buffer), self.barrier("q_empty", buffer)
        self.item_phase = e.r("and.b32", over, 1)
        self.desc_q = self.descriptor(e.scaled(buffer, plan.q_bytes, g["q"]), 0)
        self.desc_k = self.descriptor(g["k"], 0)
        self.desc_v = self.descriptor(g["v"], plan.keys * plan.swizzle)

    def _find_turn(self) -> None:
        e = self.e
        following = e.r("add.s32", self.wg, 1)
        following = e.r("selp.b32", 0, following, e.p("setp.eq.s32", following, self.plan.consumers))
        self.turn, self.next_turn = e.r("add.s32", self.wg, TURN), e.r("add.s32", following, TURN)
        self.vote = e.r("add.s32", self.wg, VOTE)

    # ---- pieces

    def same(self, value: str) -> str:
        """A number that all lanes have, so that the assembler knows it: it keeps such numbers in uniform registers,
        from which alone wgmma takes its descriptors."""
        return self.e.r("shfl.sync.idx.b32", value, 0, 31, "0xffffffff")

    def barrier(self, name: str, index: str) -> str:
        e = self.e
        return e.scaled(index, 8, e.r("add.s32", self.given["bars"], self.plan.barrier(name)))

    def wait(self, name: str, slot: str, phase: str) -> None:
        self.e.wait(self.barrier(name, slot), phase)

    def arrive(self, barrier: str) -> None:
        """Tells of this warp, whose lanes have all read what the barrier is for."""
        self.e.op("mbarrier.arrive.shared::cta.b64", "_", f"[{barrier}]", when=self.elected)

    def descriptor(self, address: str, leading: int) -> str:
        """wgmma's descriptor of an operand in boxes: groups of eight rows follow each other, boxes by `leading`."""
        e, swizzle = self.e, self.plan.swizzle
        mode = {128: 1, 64: 2}[swizzle]
        constant = (leading >> 4) << 16 | (8 * swizzle >> 4) << 32 | mode << 62
        return e.d("or.b64", e.d("cvt.u64.u32", e.r("shr.u32", address, 4)), f"0x{constant:016x}")

    def at_slot(self, descriptor: str, slot: str, size: int) -> str:
        e = self.e
        return e.d("add.s64", descriptor, e.d("mul.wide.u32", slot, size >> 4))

    def moved(self, descriptor: str, bytes_: int) -> str:
        return self.e.d("add.s64", descriptor, bytes_ >> 4) if bytes_ else descriptor

    def flip(self, offset: str) -> str:
        """The bits that the swizzle exchanges in the addresses of a row at an offset of a box."""
        e = self.e
        return e.r("shl.b32", e.r("and.b32", e.r("shr.u32", offset, 7), self.plan.swizzle // 16 - 1), 4)

    def advance(self) -> None:
        """To the next tile."""
        e = self.e
        e.op("mov.b32", self.old_slot, self.slot)
        e.op("mov.b32", self.old_phase, self.phase)
        e.op("add.s32", self.slot, self.slot, 1)
        wrapped = e.p("setp.eq.s32", self.slot, self.plan.stages)
        e.op("selp.b32", self.slot, 0, self.slot, wrapped)
        e.op("xor.b32", self.phase, self.phase, e.r("selp.b32", 1, 0, wrapped))
        e.op("add.s32", self.j, self.j, 1)

    # ---- products

    def take_turn(self) -> None:
        """Waits until the warpgroup before this one has issued its products."""
        if self.plan.consumers > 1:
            self.e.op("bar.sync", self.turn, 2 * THREADS)

    def give_turn(self) -> None:
        if self.plan.consumers > 1:
            self.e.op("bar.arrive", self.next_turn, 2 * THREADS)

    def issue_scores(self) -> None:
        """S = Q Kᵀ of the current tile, left in flight."""
        e, plan = self.e, self.plan
        k = self.at_slot(self.desc_k, self.slot, plan.k_bytes)
        name = f"wgmma.mma_async.sync.aligned.m64n{plan.keys}k16.f32.{plan.dtype}.{plan.dtype}"
        steps = plan.chunk // 16
        for i in range(plan.feature_chunks * steps):
            box, step = divmod(i, steps)
            a = self.moved(self.desc_q, box * ROWS * plan.swizzle + 32 * step)
            b = self.moved(k, box * plan.keys * plan.swizzle + 32 * step)
            e.op(name, self.s, a, b, self.yes if i else self.no, 1, 1, 0, 0)
        e.op("wgmma.commit_group.sync.aligned")

    def issue_values(self, slot: str) -> None:
        """O += P V of a tile, left in flight."""
        e, plan = self.e, self.plan
        v = self.at_slot(self.desc_v, slot, plan.v_bytes)
        name = f"wgmma.mma_async.sync.aligned.m64n{plan.wide_values}k16.f32.{plan.dtype}.{plan.dtype}"
        for i in range(plan.keys // 16):
            b = self.moved(v, 16 * i * plan.swizzle)
            e.op(name, self.o, self.p[4 * i : 4 * i + 4], b, self.yes, 1, 1, 1)
        e.op("wgmma.commit_group.sync.aligned")

    def wait_products(self, left: int) -> None:
        """Until at most so many groups of products are in flight."""
        self.e.op("wgmma.wait_group.sync.aligned", left)
