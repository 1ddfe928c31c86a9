"""The PTX of bias, activation, dropout and residual: how groups of elements (`group_ptx`) are distributed over threads.

In `flat` a thread processes one group, in `stream` several, one after another. In `walk`, backward with a gradient of
the bias, it processes one group of columns, row after row, and accumulates the sums of its columns. In `planes` it
processes one group of each of four planes.

It is PTX text, which an empty Pallas kernel embeds: Pallas' compiler contracts products and sums, and the definition
rounds each. Plain Pallas was not measured.
"""

import dataclasses
import functools as ft
from collections.abc import Callable

from jaxdnn._src.dropout.hopper.group_ptx import ZERO, Kernel, Plan
from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES


@dataclasses.dataclass(frozen=True)
class ColumnsPlan:
    """How `walk` partitions rows and columns; with `tile` groups of columns, a block processes threads // tile rows
    at a time."""

    tile: int  # groups of columns of a block
    tiles: int
    splits: int  # blocks that share the rows of a tile
    rows: int


def columns_plan(plan: Plan, most: int) -> ColumnsPlan:
    """A plan of about `most` blocks, at least one for each tile; the shape alone decides the order of additions."""
    wide = plan.width // plan.elements
    tile = min(32, 1 << max(0, wide - 1).bit_length())
    tiles, rows = -(-wide // tile), plan.size // plan.width
    beside = plan.threads // tile
    return ColumnsPlan(tile, tiles, max(1, min(-(-rows // beside), most // tiles)), rows)


@ft.lru_cache
def flat(plan: Plan) -> str:
    """Operands: those of the plan, then the result."""
    k = Kernel(plan, ("result",))
    e = k.e
    block = e.r("mov.u32", "%ctaid.x")
    if plan.leads > 1:
        lead = e.r("div.u32", block, plan.blocks_a_lead)
        block = e.r("sub.s32", block, e.r("mul.lo.s32", lead, plan.blocks_a_lead))
        k.move_to(lead)
    k.load_key()
    first = e.r("mad.lo.s32", block, plan.threads, e.r("mov.u32", "%tid.x"))
    ragged = plan.groups % plan.threads != 0  # threads beyond the end read the last group and store nothing
    exists = e.p("setp.lt.u32", first, plan.groups) if ragged else ""
    group = e.r("min.u32", first, plan.groups - 1) if ragged else first
    words = {name: k.load(name, group) for name in plan.dtypes if name != "bias"}
    if "bias" in plan.dtypes:
        words["bias"] = k.load("bias", k.column(group))
    k.store(group, k.value(words, k.kept(group)), exists)
    return e.text()


@ft.lru_cache
def planes(plan: Plan) -> str:
    """Operands: those of the plan, then the result. Channels first: a thread processes a vector of each of four planes.

    Elements are counted with the channels fastest, so that the four elements of a counter are in four planes.
    """
    k = Kernel(plan, ("result",))
    e, inner, quads = k.e, plan.plane // plan.elements, plan.channels // 4
    k.load_key()
    first = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), plan.threads, e.r("mov.u32", "%tid.x"))
    exists = e.p("setp.lt.u32", first, plan.groups // 4)
    v = e.r("min.u32", first, plan.groups // 4 - 1)
    above = e.r("div.u32", v, inner)  # which four planes
    along = e.r("sub.s32", v, e.r("mul.lo.s32", above, inner))
    outer = e.r("div.u32", above, quads)
    quad = e.r("sub.s32", above, e.r("mul.lo.s32", outer, quads))
    groups = [e.r("mad.lo.s32", e.r("mad.lo.s32", above, 4, j), inner, along) for j in range(4)]
    names = [name for name in plan.dtypes if name != "bias"]
    held = [{name: k.load(name, group) for name in names} for group in groups]
    if "bias" in plan.dtypes:
        for words, bias in zip(held, k.channel_biases(quad), strict=True):
            words["bias"] = bias
    values = [k.before_dropout(words) for words in held]
    element = e.r("mad.lo.s32", outer, plan.plane, e.r("mul.lo.s32", along, plan.elements))
    for i in range(plan.elements if plan.limit else 0):
        index = e.r("mad.lo.s32", e.r("add.s32", element, i) if i else element, quads, quad)
        for own, word in zip(values, k.draw(index), strict=True):
            own[i] = e.f("selp.f32", own[i], ZERO, e.p("setp.ge.u32", word, plan.limit))
    for group, own, words in zip(groups, values, held, strict=True):
        k.store(group, k.after_dropout(own, words), exists)
    return e.text()


@ft.lru_cache
def stream(plan: Plan, blocks: int) -> str:
    """Operands: those of the plan, then the result."""
    k = Kernel(plan, ("result",), shared=True)
    e = k.e
    k.load_key()
    thread = e.r("mov.u32", "%tid.x")
    first = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), plan.threads, thread)

    def body(group: str, words: dict[str, list[str]]) -> None:
        if "bias" in plan.dtypes:
            words = words | {"bias": k.load("bias", k.column(group))}
        k.store(group, k.value(words, k.kept(group)), "")

    _in_turn(k, thread, first, plan.groups, blocks * plan.threads, lambda i: i, body)
    return e.text()


@ft.lru_cache
def walk(plan: Plan, columns: ColumnsPlan) -> str:
    """Operands: those of the plan, dx, the blocks' sums (splits, width), shared memory of a float for each element."""
    k = Kernel(plan, ("result", "sums"), shared=True)
    e, tile = k.e, columns.tile
    wide, beside = plan.width // plan.elements, plan.threads // tile
    k.load_key()
    block, thread = e.r("mov.u32", "%ctaid.x"), e.r("mov.u32", "%tid.x")
    split = e.r("div.u32", block, columns.tiles)
    left = e.r("mul.lo.s32", e.r("sub.s32", block, e.r("mul.lo.s32", split, columns.tiles)), tile)
    side = e.r("shr.u32", thread, tile.bit_length() - 1)
    column = e.r("add.s32", left, e.r("and.b32", thread, tile - 1))
    within = e.p("setp.lt.u32", column, wide)
    column = e.r("min.u32", column, wide - 1)
    bias = {"bias": k.load("bias", column)} if "bias" in plan.dtypes else {}
    sums = [e.f("mov.f32", ZERO) for _ in range(plan.elements)]

    def body(group: str, words: dict[str, list[str]]) -> None:
        values = k.value(words | bias, k.kept(group))
        k.store(group, values, within)
        for total, value in zip(sums, values, strict=True):
            e.op("add.rn.f32", total, total, value)

    first = e.r("mad.lo.s32", split, beside, side)
    group = lambda row: e.r("mad.lo.s32", row, wide, column)
    _in_turn(k, thread, first, columns.rows, columns.splits * beside, group, body)
    _add_sides(k, columns, thread, split, left, sums)
    return e.text()


def _in_turn(
    k: Kernel, thread: str, first: str, count: int, step: int, group: Callable[[str], str], body: Callable[..., None]
) -> None:
    """For i = first, first + step, ... below `count`: body(group(i), its words).

    The next groups are being copied into shared memory meanwhile, into slots that belong to the thread. (ptxas would
    move loads into registers down to their first use.) A thread fills a slot again after it has used its contents.
    """
    e, stages, names = k.e, k.plan.stages, [name for name in k.plan.dtypes if name != "bias"]
    sizes = {name: k.plan.elements * SIZES[k.plan.dtypes[name]] for name in names}
    stage = k.plan.threads * sum(sizes.values())
    # If a thread has two vectors of an array, all first ones are contiguous, then all second ones: no bank conflicts.
    own = e.scaled(thread, VECTOR_BYTES, k.shared)
    places, offset = [], 0
    for name in names:
        for part in range(0, sizes[name], VECTOR_BYTES):
            places.append((name, part, offset))
            offset += k.plan.threads * VECTOR_BYTES

    def fetch(index: str, to: str) -> None:
        at, exists = group(index), e.p("setp.lt.u32", index, count)
        far = {name: e.d("mad.wide.u32", at, sizes[name], k.base[name]) for name in names}
        for name, part, place in places:
            copied = f"[{to}+{place}]", f"[{far[name]}+{part}]", VECTOR_BYTES
            e.op("cp.async.cg.shared.global", *copied, when=exists)
        e.op("cp.async.commit_group")

    def following(to: str) -> str:
        after = e.r("add.s32", to, stage)
        return e.r("selp.b32", own, after, e.p("setp.ge.u32", after, last))

    last = e.r("add.s32", own, stages * stage)
    for i in range(stages - 1):
        fetch(e.r("add.s32", first, i * step) if i else first, e.r("add.s32", own, i * stage))
    here, next_place = e.r("mov.b32", own), e.r("add.s32", own, (stages - 1) * stage)
    with e.loop(first, count, step) as index:
        fetch(e.r("add.s32", index, (stages - 1) * step), next_place)
        e.op("cp.async.wait_group", stages - 1)
        words: dict[str, list[str]] = {name: [] for name in names}
        for name, _, place in places:
            words[name] += e.load_vector("shared", f"[{here}+{place}]")
        body(group(index), words)
        e.op("mov.b32", here, following(here))
        e.op("mov.b32", next_place, following(next_place))
    e.op("cp.async.wait_group", 0)


def _add_sides(k: Kernel, columns: ColumnsPlan, thread: str, split: str, left: str, sums: list[str]) -> None:
    """Adds a block's sums of the same columns, one thread's after another's, and stores them to (splits, width)."""
    e, plan = k.e, k.plan
    e.op("bar.sync", 0, plan.threads)
    across = columns.tile * plan.elements
    own = e.scaled(thread, 4 * plan.elements, k.shared)
    for i in range(0, plan.elements, 4):
        e.op("st.shared.v4.f32", f"[{own}+{4 * i}]", sums[i : i + 4])
    e.op("bar.sync", 0, plan.threads)
    place = e.r("mad.lo.s32", left, plan.elements, thread)
    mine = e.p("and.pred", e.p("setp.lt.u32", thread, across), e.p("setp.lt.u32", place, plan.width))
    end = e.label()
    e.op("bra", end, when="!" + mine)
    near = e.scaled(thread, 4, k.shared)
    total = e.f("mov.f32", ZERO)
    for side in range(plan.threads // columns.tile):
        total = e.f("add.rn.f32", total, e.f("ld.shared.f32", f"[{near}+{4 * across * side}]"))
    far = e.d("mad.wide.u32", split, 4 * plan.width, k.base["sums"])
    e.op("st.global.f32", f"[{e.d('add.s64', far, e.d('mul.wide.u32', place, 4))}+0]", total)
    e.place(end)
