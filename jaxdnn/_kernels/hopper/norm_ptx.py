"""The PTX of the row normalisations: a row in the registers of the threads that share it.

A vector is 16 bytes of a row. Vector j of a row belongs to thread j mod T of the T threads, a group, that share the
row; a block has several groups, each with a row of its own. Sums go by exchange between the lanes of a warp and, where
a row has several warps, through shared memory, behind a barrier of the group alone.

Order of additions, from the row's length and dtype alone: in a vector one element after the other, a thread's vectors
pairwise, then the threads of a warp by exchange over lane distances 16, 8, 4, 2, 1, then the warps of a row likewise.
The gradients in scale and bias are added over a group's rows one after the other, then over the groups of a block, and
over the blocks outside of the kernel.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence

from jaxdnn._kernels.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, real

_ALL_GROUPS = 15  # the barrier of a whole block; those of groups are 1, 2, ...


ZERO = real(0.0)


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How rows are dealt out.

    Attributes:
      length: elements of a row; its bytes are a multiple of 16.
      dtype, out_dtype: "bf16", "f16" or "f32".
      threads: T, that share a row: a power of two from 32 to 512.
      vectors: that a thread holds of a row.
      groups: of threads in a block.
      rows: that a group works on at the same time, forward: it loads scale and bias once for them.
    """

    length: int
    dtype: str
    out_dtype: str
    threads: int
    vectors: int
    groups: int
    rows: int = 1

    @property
    def elements(self) -> int:
        """Of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def row_vectors(self) -> int:
        return self.length // self.elements

    @property
    def warps(self) -> int:
        """Of a row."""
        return self.threads // 32

    @property
    def block(self) -> int:
        return self.threads * self.groups

    @property
    def rows_a_block(self) -> int:
        return self.groups * self.rows

    def slots(self, values: int) -> int:
        """Floats of shared memory that one exchange of so many values takes."""
        return values * self.groups * self.warps


class _Kernel:
    """What the kernels share. `operands` names the addresses $0, $1, ...; shared memory's is the last."""

    def __init__(self, plan: RowPlan, rows: int, operands: Sequence[str]) -> None:
        self.plan, self.rows, self.e = plan, rows, Emitter()
        e = self.e
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(operands)}
        self.shared = e.r("mov.b32", f"${len(operands)}")
        thread = e.r("mov.u32", "%tid.x")
        self.lane = e.r("and.b32", thread, 31)
        self.at = e.r("and.b32", thread, plan.threads - 1)  # the thread's place in its group
        self.group = e.r("shr.u32", thread, plan.threads.bit_length() - 1)
        self.barrier = e.r("add.s32", self.group, 1)
        self.warp = e.r("shr.u32", self.at, 5)
        block = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), plan.groups, self.group)
        self.first = block if plan.rows == 1 else e.r("mul.lo.s32", block, plan.rows)
        self.leads = e.p("setp.eq.u32", self.at, 0)
        self.inside = [self._inside(j) for j in range(plan.vectors)]

    def _inside(self, j: int) -> str:
        """The predicate that the thread's vector j lies within the row; "" if it does for all threads."""
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
        """Where the thread's first vector of a row lies, of an array with elements of `size` bytes."""
        e, plan = self.e, self.plan
        start = e.d("mad.wide.u32", row, plan.length * size, self.base[name])
        return e.d("add.s64", start, e.d("mul.wide.u32", self.at, plan.elements * size))

    def load(self, words: Sequence[Sequence[str]], address: str, exists: str) -> None:
        """A row's vectors into registers; zeros where there is nothing."""
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
        """The elements of scale or bias, float32, that stand at the thread's vector j; 0 beyond the row."""
        e, plan, found = self.e, self.plan, []
        for part in range(plan.elements // 4):
            names = [e.f("mov.f32", ZERO) if self.inside[j] else e.new("f") for _ in range(4)]
            place = f"[{address}+{4 * (j * plan.threads * plan.elements + 4 * part)}]"
            e.op("ld.global.nc.v4.f32", "{" + ", ".join(names) + "}", place, when=self.inside[j])
            found += names
        return found

    def store(self, address: str, j: int, values: Sequence[str], exists: str) -> None:
        """Rounds a vector of results and writes it."""
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
        """The sums of all threads of a group, the same in each; `slot` is the byte at which their shared floats lie."""
        e, plan = self.e, self.plan
        values = [self._over_lanes(v, 32) for v in values]
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
        return [self._over_lanes(v, plan.warps) for v in found]

    def _over_lanes(self, value: str, lanes: int) -> str:
        e, distance = self.e, lanes // 2
        while distance:
            word = e.r("shfl.sync.bfly.b32", e.r("mov.b32", value), distance, 31, "0xffffffff")
            value = e.f("add.rn.f32", value, e.f("mov.b32", word))
            distance //= 2
        return value

    def less(self, x: Sequence[Sequence[str]], mean: str) -> list[list[str]]:
        """x - mean, and 0 beyond the row."""
        e, found = self.e, []
        for j, v in enumerate(x):
            d = [e.f("sub.rn.f32", value, mean) for value in v]
            found.append([e.f("selp.f32", value, ZERO, self.inside[j]) for value in d] if self.inside[j] else d)
        return found


@ft.lru_cache
def forward(plan: RowPlan, rows: int, *, centred: bool, eps: float, scale: bool, bias: bool) -> str:
    """The PTX of the forward op; operands: x, [scale], [bias], y, mean, rstd, variance, shared memory."""
    parameters = ["scale"] * scale + ["bias"] * bias
    k = _Kernel(plan, rows, ["x", *parameters, "y", "mean", "rstd", "variance"])
    e, share, count = k.e, real(1 / plan.length), plan.rows
    row = [k.first, *(e.r("add.s32", k.first, i) for i in range(1, count))]
    exists = [k.exists(r, rows % plan.rows_a_block == 0) for r in row]
    words = [[[e.new() for _ in range(4)] for _ in range(plan.vectors)] for _ in row]
    for held, r, there in zip(words, row, exists, strict=True):
        k.load(held, k.row_address("x", r, SIZES[plan.dtype]), there)
    d = [[k.unpack(v) for v in held] for held in words]
    mean, exchange = [ZERO] * count, 4 * plan.slots(count)
    if centred:
        mean = _means(k, [k.dot(v, None) for v in d], 0, share)
        d = [k.less(v, m) for v, m in zip(d, mean, strict=True)]
        if plan.dtype == "f32":  # what rounding the mean has cost
            rest = _means(k, [k.dot(v, None) for v in d], exchange, share)
            d = [k.less(v, m) for v, m in zip(d, rest, strict=True)]
            mean = [e.f("add.rn.f32", *pair) for pair in zip(mean, rest, strict=True)]
    variance = _means(k, [k.dot(v, v) for v in d], 2 * exchange, share)
    root = [e.f("sqrt.rn.f32", e.f("add.rn.f32", v, real(eps))) for v in variance]
    rstd = [e.f("rcp.rn.f32", v) for v in root]
    of_thread = e.d("mul.wide.u32", k.at, 4 * plan.elements)
    place = {name: e.d("add.s64", k.base[name], of_thread) for name in parameters}
    targets = [k.row_address("y", r, SIZES[plan.out_dtype]) for r in row]
    for j in range(plan.vectors):
        given = {name: k.parameter(where, j) for name, where in place.items()}
        for i, target in enumerate(targets):
            y = [e.f("mul.rn.f32", value, rstd[i]) for value in d[i][j]]
            for name, instruction in (("scale", "mul.rn.f32"), ("bias", "add.rn.f32")):
                if name in given:
                    y = [e.f(instruction, *pair) for pair in zip(y, given[name], strict=True)]
            k.store(target, j, y, exists[i])
    for i, r in enumerate(row):
        for name, value in (("mean", mean[i]), ("rstd", rstd[i]), ("variance", variance[i])):
            where = e.d("mad.wide.u32", r, 4, k.base[name])
            e.op("st.global.f32", f"[{where}]", value, when=k.both(k.leads, exists[i]))
    return e.text()


def _means(k: _Kernel, parts: Sequence[str], slot: int, share: str) -> list[str]:
    """A group's sums over its rows, each times 1 / n."""
    return [k.e.f("mul.rn.f32", total, share) for total in k.over_row(parts, slot)]


@ft.lru_cache
def backward(plan: RowPlan, rows: int, blocks: int, *, centred: bool, scale: bool) -> str:
    """The PTX of the backward op; operands: dy, x, mean, rstd, [scale], dx, the blocks' sums, shared memory.

    A group works on row after row; while it computes one, the next is on its way into registers.
    """
    k = _Kernel(plan, rows, ["dy", "x", "mean", "rstd", *["scale"] * scale, "dx", "sums"])
    e, step = k.e, blocks * plan.groups
    sets = [_Row(k) for _ in range(2)]
    sums = [[[e.f("mov.f32", ZERO) for _ in range(plan.elements)] for _ in range(plan.vectors)] for _ in range(2)]
    scale_at = e.d("add.s64", k.base["scale"], e.d("mul.wide.u32", k.at, 4 * plan.elements)) if scale else ""
    sets[0].load(k, k.first, k.exists(k.first, blocks * plan.groups <= rows))
    row, parity = e.r("mov.b32", k.first), e.r("mov.b32", 0)
    with e.loop(0, -(-rows // step), 1):
        following = e.r("add.s32", row, step)
        sets[1].load(k, following, e.p("setp.lt.s32", following, rows))
        _backward_row(k, sets[0], row, parity, scale_at, sums, centred)
        sets[0].take(k, sets[1])
        e.op("mov.b32", row, following)
        e.op("xor.b32", parity, parity, 4 * plan.slots(3))
    _add_groups(k, sums)
    return e.text()


class _Row:
    """The registers that hold a row of dy and x, and its statistics."""

    def __init__(self, k: _Kernel) -> None:
        e, plan = k.e, k.plan
        self.words = {name: [[e.new() for _ in range(4)] for _ in range(plan.vectors)] for name in ("dy", "x")}
        self.statistics = {name: e.new("f") for name in ("mean", "rstd")}

    def load(self, k: _Kernel, row: str, exists: str) -> None:
        for name, words in self.words.items():
            k.load(words, k.row_address(name, row, SIZES[k.plan.dtype]), exists)
        for name, value in self.statistics.items():
            k.e.op("mov.f32", value, ZERO)
            where = k.e.d("mad.wide.u32", row, 4, k.base[name])
            k.e.op("ld.global.nc.f32", value, f"[{where}]", when=exists)

    def take(self, k: _Kernel, other: "_Row") -> None:
        for name, words in self.words.items():
            for mine, theirs in zip(words, other.words[name], strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    k.e.op("mov.b32", a, b)
        for name, value in self.statistics.items():
            k.e.op("mov.f32", value, other.statistics[name])


def _backward_row(
    k: _Kernel, held: _Row, row: str, parity: str, scale_at: str, sums: Sequence[Sequence[list[str]]], centred: bool
) -> None:
    e, plan, share = k.e, k.plan, real(1 / k.plan.length)
    mean, rstd = held.statistics["mean"], held.statistics["rstd"]

    def less_mean(j: int) -> list[str]:
        x = k.unpack(held.words["x"][j])
        return [e.f("sub.rn.f32", value, mean) for value in x] if centred else x

    def scaled(j: int) -> list[str]:
        dy = k.unpack(held.words["dy"][j])
        if not scale_at:
            return dy
        return [e.f("mul.rn.f32", a, b) for a, b in zip(dy, k.parameter(scale_at, j), strict=True)]

    # Beyond the row's end dy is 0, so g is; x - mean is not, and only counts in Σ (x - mean).
    parts: list[list[str]] = [[], [], []]
    for j in range(plan.vectors):
        g, d = scaled(j), less_mean(j)
        parts[0].append(k.dot([g], [d]))
        if centred:
            parts[1].append(k.dot([g], None))
        if centred and plan.dtype == "f32":
            inside = k.inside[j]
            masked = [e.f("selp.f32", value, ZERO, inside) for value in d] if inside else d
            parts[2].append(k.dot([masked], None))
    found = k.over_row([k.pairwise(p) for p in parts if p], parity)
    along, total, rest = [*found, ZERO, ZERO][:3]
    if len(found) > 2:  # what rounding the saved mean has cost
        rest = e.f("mul.rn.f32", rest, share)
        along = e.f("fma.rn.f32", e.f("neg.f32", rest), total, along)
    of_g = e.f("mul.rn.f32", total, share)
    of_gh = e.f("mul.rn.f32", e.f("mul.rn.f32", along, rstd), share)
    exists = e.p("setp.lt.s32", row, k.rows)
    target = k.row_address("dx", row, SIZES[plan.out_dtype])
    for j in range(plan.vectors):
        d = less_mean(j)
        d = [e.f("sub.rn.f32", value, rest) for value in d] if len(found) > 2 else d
        h = [e.f("mul.rn.f32", value, rstd) for value in d]
        for i, dy in enumerate(k.unpack(held.words["dy"][j])):
            e.op("fma.rn.f32", sums[0][j][i], dy, h[i], sums[0][j][i])
            e.op("add.rn.f32", sums[1][j][i], sums[1][j][i], dy)
        g = scaled(j)
        g = [e.f("sub.rn.f32", value, of_g) for value in g] if centred else g
        less = e.f("neg.f32", of_gh)
        inner = [e.f("fma.rn.f32", a, less, b) for a, b in zip(h, g, strict=True)]
        k.store(target, j, [e.f("mul.rn.f32", value, rstd) for value in inner], exists)


def _add_groups(k: _Kernel, sums: Sequence[Sequence[list[str]]]) -> None:
    """The groups' sums, one after the other through shared memory; the last group writes them, (blocks, 2, length)."""
    e, plan = k.e, k.plan
    local = e.scaled(k.at, 4 * plan.elements, e.r("add.s32", k.shared, 8 * plan.slots(3)))
    block = e.r("mov.u32", "%ctaid.x")
    far = e.d("mad.wide.u32", block, 8 * plan.length, k.base["sums"])
    far = e.d("add.s64", far, e.d("mul.wide.u32", k.at, 4 * plan.elements))
    for group in range(plan.groups):
        with e.only_if("setp.eq.s32", k.group, group):
            for which, vectors in enumerate(sums):
                for j, values in enumerate(vectors):
                    for part in range(0, plan.elements, 4):
                        start = 4 * (which * plan.length + j * plan.threads * plan.elements + part)
                        total, names = values[part : part + 4], "{" + ", ".join(values[part : part + 4]) + "}"
                        if group:
                            before = [e.new("f") for _ in range(4)]
                            e.op(
                                "ld.shared.v4.f32",
                                "{" + ", ".join(before) + "}",
                                f"[{local}+{start}]",
                                when=k.inside[j],
                            )
                            total = [e.f("add.rn.f32", a, b) for a, b in zip(before, total, strict=True)]
                            names = "{" + ", ".join(total) + "}"
                        last = group == plan.groups - 1
                        where = f"[{far}+{start}]" if last else f"[{local}+{start}]"
                        e.op(f"st.{'global' if last else 'shared'}.v4.f32", where, names, when=k.inside[j])
        if plan.groups > 1:
            e.op("bar.sync", _ALL_GROUPS, plan.block)
