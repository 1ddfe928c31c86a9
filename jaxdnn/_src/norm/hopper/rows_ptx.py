"""The PTX of the row normalisations, forward: a row in the registers of the threads that share it.

A vector is 16 bytes of a row. T threads, a group, share a row, and vector j belongs to thread j mod T of them; a block
has several groups, each with a row of its own. Sums are added by exchanges between the lanes of a warp and, if a row
has several warps, through shared memory, after a barrier of the group.

The order of additions depends on the row's length and dtype alone: the elements of a vector one after another, a
thread's vectors pairwise, the threads of a warp by exchanges at lane distances 16, 8, 4, 2, 1, and then the warps of a
row in the same way.

It is PTX text, which a Pallas kernel embeds: plain Pallas took 0.96 to 1.01 of its time
(`benchmarks/results/pallas_rows_nvidia_h200.json`) and is to replace it.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, real

ZERO = real(0.0)


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How rows are partitioned over threads.

    Attributes:
      length: elements of a row; its bytes are a multiple of 16.
      dtype, out_dtype: "bf16", "f16" or "f32".
      threads: T, the threads that share a row: a power of two from 32 to 1024.
      vectors: the most vectors of a row that a thread has.
      groups: groups of threads in a block.
      rows: forward, the rows that a group processes at the same time; it loads scale and bias once for them.
      stays: forward, whether blocks are persistent: they process many rows, keep scale and bias, and load the next rows
        while they compute. Otherwise a group processes one set of rows.
      keeps: backward, where blocks are always persistent, whether the scale stays in registers.
      shared: whether persistent blocks keep scale and bias in shared memory, once for all groups, not in registers.
    """

    length: int
    dtype: str
    out_dtype: str
    threads: int
    vectors: int
    groups: int
    rows: int = 1
    stays: bool = False
    keeps: bool = False
    shared: bool = False

    @property
    def elements(self) -> int:
        """Elements of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def row_vectors(self) -> int:
        return self.length // self.elements

    @property
    def warps(self) -> int:
        """Warps of a row."""
        return self.threads // 32

    @property
    def block(self) -> int:
        return self.threads * self.groups

    @property
    def rows_a_block(self) -> int:
        return self.groups * self.rows

    def slots(self, values: int) -> int:
        """Floats of shared memory for one exchange of so many values."""
        return values * self.groups * self.warps


class Kernel:
    """What the row kernels share. `operands` names the addresses $0, $1, ...; that of shared memory follows."""

    def __init__(self, plan: RowPlan, rows: int, operands: Sequence[str]) -> None:
        self.plan, self.rows, self.e = plan, rows, Emitter()
        e = self.e
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(operands)}
        self.shared = e.r("mov.b32", f"${len(operands)}")
        thread = e.r("mov.u32", "%tid.x")
        self.lane = e.r("and.b32", thread, 31)
        self.at = e.r("and.b32", thread, plan.threads - 1)  # the thread's number in its group
        self.group = e.r("shr.u32", thread, plan.threads.bit_length() - 1)
        self.barrier = e.r("add.s32", self.group, 1)
        self.warp = e.r("shr.u32", self.at, 5)
        block = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), plan.groups, self.group)
        self.first = block if plan.rows == 1 or plan.stays else e.r("mul.lo.s32", block, plan.rows)
        self.leads = e.p("setp.eq.u32", self.at, 0)
        self.inside = [self._inside(j) for j in range(plan.vectors)]

    def _inside(self, j: int) -> str:
        """A predicate: whether the thread's vector j is within the row; "" if it is for all threads."""
        plan = self.plan
        if (j + 1) * plan.threads <= plan.row_vectors:
            return ""
        return self.e.p("setp.lt.s32", self.at, plan.row_vectors - j * plan.threads)

    def both(self, *predicates: str) -> str:
        found = [p for p in predicates if p]
        return found[0] if len(found) == 1 else self.e.p("and.pred", *found) if found else ""

    def exists(self, row: str, always: bool) -> str:
        return "" if always else self.e.p("setp.lt.s32", row, self.rows)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def row_address(self, name: str, row: str, size: int) -> str:
        """The address of the thread's first vector of a row, in an array with elements of `size` bytes."""
        e, plan = self.e, self.plan
        start = e.d("mad.wide.u32", row, plan.length * size, self.base[name])
        return e.d("add.s64", start, e.d("mul.wide.u32", self.at, plan.elements * size))

    def load(self, words: Sequence[Sequence[str]], address: str, exists: str) -> None:
        """Loads a row's vectors into registers; zeros for vectors or rows that do not exist."""
        for j, registers in enumerate(words):
            guard = self.both(self.inside[j], exists)
            if guard:
                for register in registers:
                    self.e.op("mov.b32", register, 0)
            place = f"[{address}+{j * self.plan.threads * VECTOR_BYTES}]"
            self.e.op("ld.global.nc.v4.b32", "{" + ", ".join(registers) + "}", place, when=guard)

    def unpack(self, words: Sequence[str]) -> list[str]:
        """The elements of a vector in float32."""
        return self.e.unpack(self.plan.dtype, words)

    def parameter(self, address: str, j: int) -> list[str]:
        """The elements of scale or bias, float32, for the thread's vector j; 0 beyond the row."""
        e, plan, found = self.e, self.plan, []
        for part in range(plan.elements // 4):
            names = [e.f("mov.f32", ZERO) if self.inside[j] else e.new("f") for _ in range(4)]
            place = f"[{address}+{4 * (j * plan.threads * plan.elements + 4 * part)}]"
            e.op("ld.global.nc.v4.f32", "{" + ", ".join(names) + "}", place, when=self.inside[j])
            found += names
        return found

    def store(self, address: str, j: int, values: Sequence[str], exists: str) -> None:
        """Rounds a vector of results and stores it."""
        e, plan = self.e, self.plan
        guard = self.both(self.inside[j], exists)
        words = e.pack(plan.out_dtype, values)
        start = j * plan.threads * plan.elements * SIZES[plan.out_dtype]
        while words:  # of 8, 16 or 32 bytes
            part, words = words[:4], words[4:]
            registers = "{" + ", ".join(part) + "}"
            e.op(f"st.global.v{len(part)}.b32", f"[{address}+{start}]", registers, when=guard)
            start += 4 * len(part)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def pairwise(self, values: Sequence[str]) -> str:
        values = list(values)
        while len(values) > 1:
            pairs = list(zip(values[::2], values[1::2], strict=False))
            values = [self.e.f("add.rn.f32", *pair) for pair in pairs] + values[2 * len(pairs) :]
        return values[0]

    def dot(self, a: Sequence[Sequence[str]], b: Sequence[Sequence[str]] | None) -> str:
        """The thread's part of Σ a b, or of Σ a."""
        parts = []
        for j, v in enumerate(a):
            if b is None:
                total = v[0]
                for value in v[1:]:
                    total = self.e.f("add.rn.f32", total, value)
            else:
                total = self.e.f("mul.rn.f32", v[0], b[j][0])
                for value, other in zip(v[1:], b[j][1:], strict=True):
                    total = self.e.f("fma.rn.f32", value, other, total)
            parts.append(total)
        return self.pairwise(parts)

    def over_row(self, values: Sequence[str], slot: object) -> list[str]:
        """The sums over all threads of a group, returned to each; `slot` is the byte offset of their shared memory."""
        e, plan = self.e, self.plan
        values = [e.add_lanes(v, 16, 1) for v in values]
        if plan.warps == 1:
            return values
        count = len(values)
        start = e.r("add.s32", self.shared, slot)
        start = e.scaled(self.group, 4 * count * plan.warps, start)
        mine = e.scaled(self.warp, 4 * count, start)
        first = e.p("setp.eq.u32", self.lane, 0)
        for i, value in enumerate(values):
            e.op("st.shared.f32", f"[{mine}+{4 * i}]", value, when=first)
        e.op("bar.sync", self.barrier, plan.threads)
        other = e.scaled(e.r("and.b32", self.lane, plan.warps - 1), 4 * count, start)
        found = [e.f("ld.shared.f32", f"[{other}+{4 * i}]") for i in range(count)]
        return [e.add_lanes(v, plan.warps // 2, 1) for v in found]

    def behind(self, slot: object, size: int) -> object:
        """slot + size, where slot is a constant or a register."""
        return slot + size if isinstance(slot, int) else self.e.r("add.s32", slot, size)

    def less(self, x: Sequence[Sequence[str]], mean: str) -> list[list[str]]:
        """x - mean, and 0 beyond the row."""
        e, found = self.e, []
        for j, v in enumerate(x):
            d = [e.f("sub.rn.f32", value, mean) for value in v]
            found.append([e.f("selp.f32", value, ZERO, self.inside[j]) for value in d] if self.inside[j] else d)
        return found


@ft.lru_cache
def forward(plan: RowPlan, rows: int, blocks: int, *, centred: bool, eps: float, scale: bool, bias: bool) -> str:
    """The PTX of the forward op; operands: x, [scale], [bias], y, mean, rstd, variance, shared memory."""
    names = ["scale"] * scale + ["bias"] * bias
    k = Kernel(plan, rows, ["x", *names, "y", "mean", "rstd", "variance"])
    f = _Forward(k, _Shared(k, names) if plan.shared else _Parameters(k, names), centred, eps)
    if plan.stays:
        _persistent(k, f, blocks)
        return k.e.text()
    held, always = f.registers(), rows % plan.rows_a_block == 0
    f.load(held, k.first, always)
    f.rows(f.unpacked(held), k.first, always, 0)
    return k.e.text()


def _persistent(k: Kernel, f: "_Forward", blocks: int) -> None:
    """Persistent blocks: while a group computes rows, the next ones are loaded into the registers that held them.

    The rows that a group computes at the same time are interleaved with those of all other groups, so that the last
    rows are distributed evenly.
    """
    e, plan = k.e, k.plan
    f.apart = blocks * plan.groups
    step = f.apart * plan.rows
    held = f.registers()
    f.load(held, k.first, step <= k.rows)
    f.parameters.keep()
    parity = e.r("mov.b32", 0)
    with e.loop(k.first, k.rows, step) as row:
        x = f.unpacked(held)
        f.load(held, e.r("add.s32", row, step), False)
        f.rows(x, row, plan.rows == 1 or k.rows % step == 0, parity)
        e.op("xor.b32", parity, parity, 4 * 3 * plan.slots(plan.rows))


class _Parameters:
    """Scale and bias, loaded whenever they are needed, or kept in registers."""

    def __init__(self, k: Kernel, names: Sequence[str]) -> None:
        self.k, self.names = k, names
        of_thread = k.e.d("mul.wide.u32", k.at, 4 * k.plan.elements)
        self._place = {name: k.e.d("add.s64", k.base[name], of_thread) for name in names}
        self._kept: list[dict[str, list[str]]] = []

    def keep(self) -> None:
        """Loads them for all rows to come."""
        self._kept = [self.of_vector(j) for j in range(self.k.plan.vectors)]

    def of_vector(self, j: int) -> dict[str, list[str]]:
        if self._kept:
            return self._kept[j]
        return {name: self.k.parameter(where, j) for name, where in self._place.items()}


class _Shared(_Parameters):
    """Scale and bias at the start of shared memory; for 16-bit x first the first halves of all vectors' parameters."""

    def __init__(self, k: Kernel, names: Sequence[str]) -> None:
        super().__init__(k, names)
        self._start = k.shared
        k.shared = k.e.r("add.s32", k.shared, 4 * k.plan.length * len(names))
        self._mine = k.e.scaled(k.at, 16, self._start)

    def keep(self) -> None:
        k, e, plan = self.k, self.k.e, self.k.plan
        thread, quads, parts = e.r("mov.u32", "%tid.x"), plan.length // 4, plan.elements // 4
        stores = []
        for i, name in enumerate(self.names):
            for first in range(0, quads, plan.block):
                quad = e.r("add.s32", thread, first)
                there = "" if first + plan.block <= quads else e.p("setp.lt.s32", quad, quads)
                values = "{" + ", ".join(e.new("f") for _ in range(4)) + "}"
                e.op("ld.global.nc.v4.f32", values, f"[{e.d('mad.wide.u32', quad, 16, k.base[name])}]", when=there)
                part = e.r("and.b32", quad, parts - 1)
                to = e.scaled(e.r("shr.u32", quad, parts - 1), 16, self._start)
                stores.append((f"[{e.scaled(part, 16 * plan.row_vectors, to)}+{4 * i * plan.length}]", values, there))
        for to, values, there in stores:
            e.op("st.shared.v4.f32", to, values, when=there)
        e.op("bar.sync", 0, plan.block)

    def of_vector(self, j: int) -> dict[str, list[str]]:
        e, plan, inside = self.k.e, self.k.plan, self.k.inside[j]
        found: dict[str, list[str]] = {name: [] for name in self.names}
        for i, name in enumerate(self.names):
            for part in range(plan.elements // 4):
                values = [e.f("mov.f32", ZERO) if inside else e.new("f") for _ in range(4)]
                place = 4 * i * plan.length + 16 * (part * plan.row_vectors + j * plan.threads)
                e.op("ld.shared.v4.f32", "{" + ", ".join(values) + "}", f"[{self._mine}+{place}]", when=inside)
                found[name] += values
        return found


Held = list[list[list[str]]]  # the registers of rows: for each row its vectors, as four words or as all elements


class _Forward:
    """The computation of a group on the rows that it processes at the same time."""

    def __init__(self, k: Kernel, parameters: _Parameters, centred: bool, eps: float) -> None:
        self.k, self.parameters, self.centred, self.eps = k, parameters, centred, eps
        self.apart = 1  # the distance from one of these rows to the next

    def registers(self) -> Held:
        plan = self.k.plan
        return [[[self.k.e.new() for _ in range(4)] for _ in range(plan.vectors)] for _ in range(plan.rows)]

    def _numbered(self, first: str, always: bool) -> list[tuple[str, str]]:
        """The rows from `first` on, and predicates, whether they exist."""
        k = self.k
        found = [first, *(k.e.r("add.s32", first, i * self.apart) for i in range(1, k.plan.rows))]
        return [(row, k.exists(row, always)) for row in found]

    def load(self, held: Held, first: str, always: bool) -> None:
        for words, (row, exists) in zip(held, self._numbered(first, always), strict=True):
            self.k.load(words, self.k.row_address("x", row, SIZES[self.k.plan.dtype]), exists)

    def unpacked(self, held: Held) -> Held:
        return [[self.k.unpack(words) for words in vectors] for vectors in held]

    def rows(self, x: Held, first: str, always: bool, slot: object) -> None:
        """Statistics and results of the rows; `slot` is the offset of shared memory for three exchanges."""
        k, plan = self.k, self.k.plan
        numbered = self._numbered(first, always)
        d, mean, rstd, variance = self._statistics(x, slot)
        targets = [k.row_address("y", row, SIZES[plan.out_dtype]) for row, _ in numbered]
        for j in range(plan.vectors):
            given = self.parameters.of_vector(j)
            for i, target in enumerate(targets):
                y = [k.e.f("mul.rn.f32", value, rstd[i]) for value in d[i][j]]
                k.store(target, j, self._scaled(y, given), numbered[i][1])
        for i, (row, exists) in enumerate(numbered):
            for name, value in (("mean", mean[i]), ("rstd", rstd[i]), ("variance", variance[i])):
                where = k.e.d("mad.wide.u32", row, 4, k.base[name])
                k.e.op("st.global.f32", f"[{where}]", value, when=k.both(k.leads, exists))

    def _scaled(self, h: Sequence[str], given: dict[str, list[str]]) -> Sequence[str]:
        """h scale + bias, of those that are given."""
        e = self.k.e
        match given:
            case {"scale": scale, "bias": bias}:
                return [e.f("fma.rn.f32", *v) for v in zip(h, scale, bias, strict=True)]
            case {"scale": scale}:
                return [e.f("mul.rn.f32", *v) for v in zip(h, scale, strict=True)]
            case {"bias": bias}:
                return [e.f("add.rn.f32", *v) for v in zip(h, bias, strict=True)]
        return h

    def _statistics(self, d: Held, slot: object) -> tuple[Held, list[str], list[str], list[str]]:
        """x - mean, mean, 1 / sqrt(variance + eps) and variance of each row."""
        k, plan = self.k, self.k.plan
        e, exchange = k.e, 4 * plan.slots(plan.rows)
        mean = [ZERO] * plan.rows
        if self.centred:
            mean = _means(k, [k.dot(v, None) for v in d], slot)
            d = [k.less(v, m) for v, m in zip(d, mean, strict=True)]
            if plan.dtype == "f32":  # corrects for the rounding of the mean
                rest = _means(k, [k.dot(v, None) for v in d], k.behind(slot, exchange))
                d = [k.less(v, m) for v, m in zip(d, rest, strict=True)]
                mean = [e.f("add.rn.f32", *pair) for pair in zip(mean, rest, strict=True)]
        variance = _means(k, [k.dot(v, v) for v in d], k.behind(slot, 2 * exchange))
        root = [e.f("sqrt.rn.f32", e.f("add.rn.f32", v, real(self.eps))) for v in variance]
        return d, mean, [e.f("rcp.rn.f32", v) for v in root], variance


def _means(k: Kernel, parts: Sequence[str], slot: object) -> list[str]:
    """The means of a group's rows from the threads' parts of their sums."""
    return [k.e.f("mul.rn.f32", total, real(1 / k.plan.length)) for total in k.over_row(parts, slot)]
