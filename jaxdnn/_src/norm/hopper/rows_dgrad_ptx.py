"""The PTX of the row normalisations, backward: rows as in `rows_ptx`, and gradients of scale and bias in registers.

The blocks are persistent. The gradients of scale and bias are added over a group's rows, one after another, then over
the groups of a block in the same way; XLA adds those of the blocks.

It is PTX text, which a Pallas kernel embeds: plain Pallas took 0.92 to 0.96 of its time in float32, and
0.99 to 1.07 in bfloat16 (`benchmarks/results/pallas_rows_nvidia_h200.json`).
"""

import functools as ft
from collections.abc import Sequence

from jaxdnn._src.hopper.ptx import SIZES, real
from jaxdnn._src.norm.hopper.rows_ptx import ZERO, Kernel, RowPlan

_ALL_GROUPS = 15  # the number of the barrier of a whole block; groups have 1, 2, ...


@ft.lru_cache
def backward(plan: RowPlan, rows: int, blocks: int, *, centred: bool, scale: bool) -> str:
    """The PTX of the backward op; operands: dy, x, mean, rstd, [scale], dx, the blocks' sums, shared memory.

    A group processes one row after another; while it computes one, the next is loaded into registers.
    """
    k = Kernel(plan, rows, ["dy", "x", "mean", "rstd", *["scale"] * scale, "dx", "sums"])
    e, step = k.e, blocks * plan.groups
    sets = [_Row(k) for _ in range(2)]
    sums = [[[e.f("mov.f32", ZERO) for _ in range(plan.elements)] for _ in range(plan.vectors)] for _ in range(2)]
    scale_at = e.d("add.s64", k.base["scale"], e.d("mul.wide.u32", k.at, 4 * plan.elements)) if scale else ""
    kept = [k.parameter(scale_at, j) for j in range(plan.vectors)] if scale and plan.keeps else []
    sets[0].load(k, k.first, k.exists(k.first, blocks * plan.groups <= rows))
    row, parity = e.r("mov.b32", k.first), e.r("mov.b32", 0)
    with e.loop(0, -(-rows // step), 1):
        following = e.r("add.s32", row, step)
        sets[1].load(k, following, e.p("setp.lt.s32", following, rows))
        _backward_row(k, sets[0], row, parity, scale_at, kept, sums, centred)
        sets[0].take(k, sets[1])
        e.op("mov.b32", row, following)
        e.op("xor.b32", parity, parity, 4 * plan.slots(3))
    _add_groups(k, sums)
    return e.text()


class _Row:
    """The registers of a row of dy and x, and of its statistics."""

    def __init__(self, k: Kernel) -> None:
        e, plan = k.e, k.plan
        self.words = {name: [[e.new() for _ in range(4)] for _ in range(plan.vectors)] for name in ("dy", "x")}
        self.statistics = {name: e.new("f") for name in ("mean", "rstd")}

    def load(self, k: Kernel, row: str, exists: str) -> None:
        for name, words in self.words.items():
            k.load(words, k.row_address(name, row, SIZES[k.plan.dtype]), exists)
        for name, value in self.statistics.items():
            k.e.op("mov.f32", value, ZERO)
            where = k.e.d("mad.wide.u32", row, 4, k.base[name])
            k.e.op("ld.global.nc.f32", value, f"[{where}]", when=exists)

    def take(self, k: Kernel, other: "_Row") -> None:
        for name, words in self.words.items():
            for mine, theirs in zip(words, other.words[name], strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    k.e.op("mov.b32", a, b)
        for name, value in self.statistics.items():
            k.e.op("mov.f32", value, other.statistics[name])


def _backward_row(
    k: Kernel,
    held: _Row,
    row: str,
    parity: str,
    scale_at: str,
    kept: Sequence[list[str]],
    sums: Sequence[Sequence[list[str]]],
    centred: bool,
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
        scale = kept[j] if kept else k.parameter(scale_at, j)
        return [e.f("mul.rn.f32", a, b) for a, b in zip(dy, scale, strict=True)]

    # Beyond the row's end dy is 0, and so is g. x - mean is not, and only matters in Σ (x - mean).
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
    if len(found) > 2:  # corrects for the rounding of the saved mean
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


def _add_groups(k: Kernel, sums: Sequence[Sequence[list[str]]]) -> None:
    """Adds the groups' sums, one group after another, through shared memory, and stores them to (blocks, 2, length)."""
    e, plan = k.e, k.plan
    of_block = 8 * plan.length  # bytes
    far = e.d("mad.wide.u32", e.r("mov.u32", "%ctaid.x"), of_block, k.base["sums"])
    if plan.groups == 1:
        _write_sums(k, sums, "global", e.d("add.s64", far, e.d("mul.wide.u32", k.at, 4 * plan.elements)))
        return
    start = e.r("add.s32", k.shared, 8 * plan.slots(3))
    own = e.scaled(k.group, of_block, start)
    _write_sums(k, sums, "shared", e.scaled(k.at, 4 * plan.elements, own))
    e.op("bar.sync", _ALL_GROUPS, plan.block)
    first = e.r("mul.lo.s32", e.r("mov.u32", "%tid.x"), 16)
    with e.loop(first, of_block, 16 * plan.block) as at:
        near, total = e.r("add.s32", start, at), [""] * 4
        for group in range(plan.groups):
            part = [e.new("f") for _ in range(4)]
            e.op("ld.shared.v4.f32", "{" + ", ".join(part) + "}", f"[{near}+{group * of_block}]")
            total = [e.f("add.rn.f32", a, b) for a, b in zip(total, part, strict=True)] if group else part
        e.op("st.global.v4.f32", f"[{e.d('add.s64', far, e.d('mul.wide.u32', at, 1))}]", "{" + ", ".join(total) + "}")


def _write_sums(k: Kernel, sums: Sequence[Sequence[list[str]]], space: str, address: str) -> None:
    plan = k.plan
    for which, vectors in enumerate(sums):
        for j, values in enumerate(vectors):
            for part in range(0, plan.elements, 4):
                start = 4 * (which * plan.length + j * plan.threads * plan.elements + part)
                names = "{" + ", ".join(values[part : part + 4]) + "}"
                k.e.op(f"st.{space}.v4.f32", f"[{address}+{start}]", names, when=k.inside[j])
