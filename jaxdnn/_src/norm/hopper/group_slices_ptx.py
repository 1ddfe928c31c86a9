"""The PTX of group and instance normalisation in two kernels, which split an image into slices of its pixels.

They serve images that do not fit into a cluster's shared memory, and backward also those of which only a narrow part
fits. The first kernel stores the sums of each slice. The second one processes smaller slices; each block merges the
sums of its image, always in the same order, while its vectors are being copied. The blocks take the slices in reverse
order: what the first kernel has read last is still in the L2 cache.

Merging order: the slices of an image are split over several lanes (`lanes_of`). A lane adds every so many-th slice, one
after another, and the lanes are then added by exchanges.

It is PTX text, which an empty Pallas kernel embeds. Plain Pallas (batch norm's walk over rows, in splits of an image)
has 0.82 to 1.07 of its speed forward and 1.25 backward, with swish; a diffusion U-Net's kernels took no less time in
all (`benchmarks/notes-train.md`).
"""

import functools as ft
from collections.abc import Callable, Sequence

from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.norm.hopper.group_cells import ZERO
from jaxdnn._src.norm.hopper.group_exchange import BLOCK
from jaxdnn._src.norm.hopper.group_plan import ImagePlan
from jaxdnn._src.norm.hopper.group_ptx import (
    Before,
    added_gradients,
    gradients,
    load_saved,
    moments,
    normalise,
    store_sums,
)
from jaxdnn._src.norm.hopper.group_sums import Kernel, lanes_of, turns_of

Slices = Sequence[tuple[Sequence[str], str]]  # a lane's: the values of each slice, and a predicate, whether it exists
Merge = Callable[[Slices, int, str], list[str]]  # the slices, the lanes, the first slice's first value: what is merged


# ---- merging ---------------------------------------------------------------------------------------------------------


def merged_moments(k: Kernel, image: str, count: int, names: Sequence[str]) -> list[list[str]]:
    """m, the mean of δ, and σ² for each of the thread's cells, from m, rest and σ² of an image's `count` slices."""
    e, share = k.e, real(1 / count)

    def merge(slices: Slices, lanes: int, first: str) -> list[str]:
        apiece = [e.f("add.rn.f32", e.f("sub.rn.f32", m, first), rest) for (m, rest, _), _ in slices]
        guards = [guard for _, guard in slices]
        mean = e.f("mul.rn.f32", _sum(k, apiece, guards, lanes), share)
        squares = []
        for delta, ((*_, moment), _) in zip(apiece, slices, strict=True):
            d = e.f("sub.rn.f32", delta, mean)
            squares.append(e.f("fma.rn.f32", d, d, moment))
        return [first, mean, e.f("mul.rn.f32", _sum(k, squares, guards, lanes), share)]

    return _merged(k, image, count, names, merge)


def merged_sums(k: Kernel, image: str, count: int, names: Sequence[str]) -> list[list[str]]:
    """The sums over an image's `count` slices, for each of the thread's cells."""

    def merge(slices: Slices, lanes: int, _: str) -> list[str]:
        guards = [guard for _, guard in slices]
        return [_sum(k, terms, guards, lanes) for terms in zip(*(values for values, _ in slices), strict=True)]

    return _merged(k, image, count, names, merge)


def _sum(k: Kernel, terms: Sequence[str], guards: Sequence[str], lanes: int) -> str:
    """The sum of the terms whose guard holds, over the lanes."""
    e = k.e
    chosen = [e.f("selp.f32", term, ZERO, guard) if guard else term for term, guard in zip(terms, guards, strict=True)]
    return e.over_lanes(ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), chosen), lanes // 2)


def _merged(k: Kernel, image: str, count: int, names: Sequence[str], merge: Merge) -> list[list[str]]:
    """What `merge` computes from the slices' values of a group, for each of the thread's cells.

    The block's threads share the groups, and leave the results in shared memory for all of them.
    """
    e, plan, vectors = k.e, k.plan, k.vectors
    lanes = lanes_of(plan.groups, count, plan.threads, 1, len(names))
    turns, step = -(-plan.groups * lanes // plan.threads), 4 * plan.parts * plan.groups
    slices = e.r("mad.lo.s32", e.r("mul.lo.s32", image, count), plan.parts, vectors.place)
    left = e.r("add.s32", vectors.shared, vectors.area)
    with turns_of(vectors, turns) as index:
        group = e.r("shr.u32", index, lanes.bit_length() - 1)
        lane = e.r("and.b32", index, lanes - 1)
        exists = e.p("setp.lt.s32", group, plan.groups) if turns * plan.threads > plan.groups * lanes else ""
        number = e.r("mad.lo.s32", slices, plan.groups, group)
        first = [e.d("mad.wide.u32", number, 4, vectors.base[name]) for name in names]
        base, found = e.f("mov.f32", ZERO), []
        e.op("ld.global.nc.f32", base, f"[{first[0]}]", when=exists)
        here = [e.d("mad.wide.u32", lane, step, place) for place in first]
        for j in range(0, count, lanes):
            guard = e.both(exists, e.p("setp.lt.s32", lane, count - j) if j + lanes > count else "")
            values = [e.f("mov.f32", ZERO) for _ in names]
            for value, place in zip(values, here, strict=True):
                e.op("ld.global.nc.f32", value, f"[{place}+{j * step}]", when=guard)
            found.append((values, guard))
        results = merge(found, lanes, base)
        writes = e.both(e.p("setp.eq.s32", lane, 0), exists)
        for i, value in enumerate(results):
            e.op("st.shared.f32", f"[{e.scaled(group, 4, left)}+{4 * i * plan.groups}]", value, when=writes)
    e.op("bar.sync", BLOCK, plan.threads)
    totals: list[list[str]] = [[] for _ in results]
    for cells in k.cells.together:
        place = e.scaled(k.cells.groups[cells.start], 4, left)
        for i, values in enumerate(totals):
            values += e.load_floats("shared", f"[{place}+{4 * i * plan.groups}]", cells.stop - cells.start)
    return totals


# ---- forward ---------------------------------------------------------------------------------------------------------


@ft.lru_cache
def statistics(plan: ImagePlan) -> str:
    """The PTX of the slices' statistics; operands: x, m, rest, variance, shared memory.

    The plan is that of a slice. x is (slices, pixels, channels), and the results are (slices, groups). The mean is
    m + rest.
    """
    k = Kernel(plan, ["x", "mean", "rest", "variance"], ["x"])
    k.vectors.copy()
    m, rest, variance = moments(k)
    k.cells.store({"mean": m, "rest": rest, "variance": variance}, k.vectors.image)
    return k.e.text()


@ft.lru_cache
def apply(
    plan: ImagePlan,
    images: int,
    slices: int,
    merged: int,
    *,
    eps: float,
    scale: bool,
    bias: bool,
    activation: str | None = None,
) -> str:
    """The PTX of the result, from the statistics of `merged` slices of each image.

    The plan is that of one of the `slices` of an image that this kernel's blocks process. Operands: x, m, rest,
    variance, [scale], [bias], y, mean, rstd, variance, shared memory. All slices have equal weight. With δ = m + rest
    less the first slice's m, the mean is that m plus the mean of δ, and σ² the mean of the slices' σ² + (δ - mean δ)².
    """
    parameters = ["scale"] * scale + ["bias"] * bias
    names = ["x", "m", "rest", "moment", *parameters, "y", "mean", "rstd", "variance"]
    k = Kernel(plan, names, ["x"], reverse=images * slices * plan.parts)
    k.vectors.copy()
    given = {name: k.vectors.parameter(name) for name in parameters}
    image, number = k.vectors.divided(k.vectors.image, slices)
    m, rest, variance = merged_moments(k, image, merged, ["m", "rest", "moment"])
    normalise(k, m, rest, variance, eps, given, 0, image, k.e.p("setp.eq.u32", number, 0), activation)
    return k.e.text()


# ---- backward --------------------------------------------------------------------------------------------------------


def sums_of_groups(dtype: str) -> list[str]:
    """The names of the sums that the first kernel stores for the second."""
    return ["of_gh", "of_g", *["rest"] * (dtype == "f32")]


@ft.lru_cache
def gradient_sums(
    plan: ImagePlan, merged: int, *, scale: bool, bias: bool = False, activation: str | None = None
) -> str:
    """The PTX of the sums of slices, `merged` of them for each image; the plan is that of a slice.

    Operands: dy, x, mean, rstd, [scale], [bias], the blocks' sums as for `backward`, of h by the saved mean, then for
    each slice and group Σ g h, Σ g and, for float32, Σ h, shared memory.
    """
    names = sums_of_groups(plan.dtype)
    parameters = ["scale"] * scale + ["bias"] * bias
    k = Kernel(plan, ["dy", "x", "mean", "rstd", *parameters, "sums", *names], ["dy", "x"])
    k.vectors.copy()
    image = k.vectors.divided(k.vectors.image, merged)[0]
    before = Before(k, activation, k.vectors.parameter("scale") if scale and activation else [], bias)
    totals, sums = added_gradients(k, load_saved(k, image), scale, before)
    store_sums(k, sums, [])
    k.cells.store(dict(zip(names, totals, strict=True)), k.vectors.image)
    return k.e.text()


@ft.lru_cache
def apply_gradients(
    plan: ImagePlan,
    images: int,
    slices: int,
    merged: int,
    *,
    scale: bool,
    bias: bool = False,
    activation: str | None = None,
) -> str:
    """The PTX of dx from the sums of `merged` slices of each image; plan and slices as for `apply`.

    Operands: dy, x, mean, rstd, [scale], [bias], the sums of groups, dx, for float32 Σ h / n (images, groups), shared
    memory.
    """
    names, wide = sums_of_groups(plan.dtype), plan.dtype == "f32"
    operands = ["dy", "x", "mean", "rstd", *["scale"] * scale, *["bias"] * bias, *names, "dx", *["left"] * wide]
    k = Kernel(plan, operands, ["dy", "x"], reverse=images * slices * plan.parts)
    k.vectors.copy()
    of_channels = k.vectors.parameter("scale") if scale else []
    image, number = k.vectors.divided(k.vectors.image, slices)
    saved = load_saved(k, image)
    totals = merged_sums(k, image, merged, names)
    before = Before(k, activation, of_channels, bias)
    rest = gradients(k, saved, totals, plan.pixels * slices, of_channels, 0, before)
    if wide:
        k.cells.store({"left": rest}, image, k.e.p("setp.eq.u32", number, 0))
    return k.e.text()
