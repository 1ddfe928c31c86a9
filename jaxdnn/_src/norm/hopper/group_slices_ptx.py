"""The PTX of group and instance normalisation in two kernels: for images that no cluster's shared memory holds,
and backward for those of which it holds narrow parts alone.

The first kernel leaves the sums of slices of an image, which its clusters' shared memory does hold. Each block of the
second merges those of its image, in the same order whatever the slice, while its vectors are on their way. It has
slices of its own, smaller ones, the last of the last image first: what the first kernel read last is still in the
second-level cache.
"""

import functools as ft
from collections.abc import Callable, Sequence

from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.norm.hopper.group_plan import ImagePlan
from jaxdnn._src.norm.hopper.group_ptx import added_gradients, gradients, moments, normalise
from jaxdnn._src.norm.hopper.group_sums import BARRIER, ZERO, Sums, lanes_of

Slices = Sequence[tuple[Sequence[str], str]]  # of a lane: the values of each, and a predicate, whether there is one


class Merged(Sums):
    """Sums that the slices of an image left in device memory.

    Order of additions: slices dealt out to a number of lanes (`lanes_of`), one after the other, and then by exchange.
    """

    def merged(self, count: int, names: Sequence[str]) -> list[list[str]]:
        """m, the mean of δ and σ² of the thread's cells, from m, rest and σ² of so many slices of the image."""
        e, share = self.e, real(1 / count)

        def merge(slices: Slices, lanes: int, first: str) -> list[str]:
            apiece = [e.f("add.rn.f32", e.f("sub.rn.f32", m, first), rest) for (m, rest, _), _ in slices]
            guards = [guard for _, guard in slices]
            mean = e.f("mul.rn.f32", self._sum(apiece, guards, lanes), share)
            squares = []
            for delta, ((*_, moment), _) in zip(apiece, slices, strict=True):
                d = e.f("sub.rn.f32", delta, mean)
                squares.append(e.f("fma.rn.f32", d, d, moment))
            return [first, mean, e.f("mul.rn.f32", self._sum(squares, guards, lanes), share)]

        return self._merged(count, names, merge)

    def merged_sums(self, count: int, names: Sequence[str]) -> list[list[str]]:
        """The sums over so many slices of the image, for each of the thread's cells."""

        def merge(slices: Slices, lanes: int, _: str) -> list[str]:
            guards = [guard for _, guard in slices]
            return [self._sum(terms, guards, lanes) for terms in zip(*(values for values, _ in slices), strict=True)]

        return self._merged(count, names, merge)

    def _sum(self, terms: Sequence[str], guards: Sequence[str], lanes: int) -> str:
        """Of the terms whose guard holds, one after the other, and then over lanes."""
        e = self.e
        chosen = [
            e.f("selp.f32", term, ZERO, guard) if guard else term for term, guard in zip(terms, guards, strict=True)
        ]
        return self.over_lanes(ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), chosen), lanes // 2, 1)

    def _merged(
        self, count: int, names: Sequence[str], merge: Callable[[Slices, int, str], list[str]]
    ) -> list[list[str]]:
        """What `merge` makes of the slices' values of a group, lanes apart, for each of the thread's cells."""
        e, plan = self.e, self.plan
        lanes = lanes_of(plan.groups, count, plan.threads, 1, len(names))
        turns, apart = -(-plan.groups * lanes // plan.threads), 4 * plan.parts * plan.groups
        slices = e.r("mad.lo.s32", e.r("mul.lo.s32", self.owner, count), plan.parts, self.place)
        left = e.r("add.s32", self.shared, self.area)
        with self.turns(turns) as index:
            group = e.r("shr.u32", index, lanes.bit_length() - 1)
            lane = e.r("and.b32", index, lanes - 1)
            exists = e.p("setp.lt.s32", group, plan.groups) if turns * plan.threads > plan.groups * lanes else ""
            number = e.r("mad.lo.s32", slices, plan.groups, group)
            first = [e.d("mad.wide.u32", number, 4, self.base[name]) for name in names]
            base, found = e.f("mov.f32", ZERO), []
            e.op("ld.global.nc.f32", base, f"[{first[0]}]", when=exists)
            here = [e.d("mad.wide.u32", lane, apart, place) for place in first]
            for j in range(0, count, lanes):
                guard = self.both(exists, e.p("setp.lt.s32", lane, count - j) if j + lanes > count else "")
                values = [e.f("mov.f32", ZERO) for _ in names]
                for value, place in zip(values, here, strict=True):
                    e.op("ld.global.nc.f32", value, f"[{place}+{j * apart}]", when=guard)
                found.append((values, guard))
            results = merge(found, lanes, base)
            writes = self.both(e.p("setp.eq.s32", lane, 0), exists)
            for i, value in enumerate(results):
                e.op("st.shared.f32", f"[{e.scaled(group, 4, left)}+{4 * i * plan.groups}]", value, when=writes)
        e.op("bar.sync", BARRIER, plan.threads)
        totals: list[list[str]] = [[] for _ in results]
        for cells in self.alike:
            place = e.scaled(self.groups[cells.start], 4, left)
            for i, values in enumerate(totals):
                values += self.load("shared", f"[{place}+{4 * i * plan.groups}]", cells.stop - cells.start)
        return totals


# ---- forward ---------------------------------------------------------------------------------------------------------


@ft.lru_cache
def statistics(plan: ImagePlan) -> str:
    """The PTX of the statistics of slices, of which the plan is; operands: x, m, rest, variance, shared memory.

    x is (slices, pixels, channels), and the others are (slices, groups): m + rest is the mean.
    """
    k = Sums(plan, ["x", "mean", "rest", "variance"], ["x"])
    k.copy()
    m, rest, variance = moments(k)
    k.store_statistics({"mean": m, "rest": rest, "variance": variance})
    return k.e.text()


@ft.lru_cache
def apply(plan: ImagePlan, images: int, slices: int, merged: int, *, eps: float, scale: bool, bias: bool) -> str:
    """The PTX of the result from the statistics of `merged` slices of each image.

    The plan is of one of the other `slices` of an image that the blocks have, the last one first: what the statistics'
    kernel read last is still in the second-level cache. Operands: x, m, rest, variance, [scale], [bias], y, mean, rstd,
    variance, shared memory. With δ = m + rest less the first slice's m, all of equal weight, the mean is that m plus
    the mean of δ, and σ² the mean of the slices' own and of (δ - mean δ)².
    """
    parameters = ["scale"] * scale + ["bias"] * bias
    names = ["x", "m", "rest", "moment", *parameters, "y", "mean", "rstd", "variance"]
    k = Merged(plan, names, ["x"], reverse=images * slices * plan.parts)
    k.copy()
    given = {name: k.parameter(name) for name in parameters}
    k.owner, place = k.divided(k.image, slices)
    m, rest, variance = k.merged(merged, ["m", "rest", "moment"])
    normalise(k, m, rest, variance, eps, given, 0, k.e.p("setp.eq.u32", place, 0))
    return k.e.text()


# ---- backward ----------------------------------------------------------------------------------------


def sums_of_groups(dtype: str) -> list[str]:
    """What the first kernel adds up for the second."""
    return ["of_gd", "of_g", *["rest"] * (dtype == "f32")]


@ft.lru_cache
def gradient_sums(plan: ImagePlan, merged: int, *, scale: bool) -> str:
    """The PTX of the sums of slices, of which the plan is, `merged` of them an image.

    Operands: dy, x, mean, [scale], the blocks' sums as `backward`'s but of dy (x - mean), and for each slice and group
    Σ g (x - mean), Σ g and, of float32, Σ (x - mean), shared memory.
    """
    names = sums_of_groups(plan.dtype)
    k = Sums(plan, ["dy", "x", "mean", *["scale"] * scale, "sums", *names], ["dy", "x"])
    k.copy()
    k.owner = k.divided(k.image, merged)[0]
    totals = added_gradients(k, k.spread(k.statistic("mean")), scale)
    k.store_sums([], [])
    k.owner = k.image
    k.store_statistics(dict(zip(names, totals, strict=True)))
    return k.e.text()


@ft.lru_cache
def apply_gradients(plan: ImagePlan, images: int, slices: int, merged: int, *, scale: bool) -> str:
    """The PTX of dx from the sums of `merged` slices of each image; slices as for `apply`.

    Operands: dy, x, mean, rstd, [scale], the sums of groups, dx, of float32 Σ (x - mean) / n (images, groups), shared
    memory.
    """
    names, wide = sums_of_groups(plan.dtype), plan.dtype == "f32"
    operands = ["dy", "x", "mean", "rstd", *["scale"] * scale, *names, "dx", *["left"] * wide]
    k = Merged(plan, operands, ["dy", "x"], reverse=images * slices * plan.parts)
    k.copy()
    of_channels = k.parameter("scale") if scale else []
    k.owner, place = k.divided(k.image, slices)
    mean, rstd = k.spread(k.statistic("mean")), k.statistic("rstd")
    totals = k.merged_sums(merged, names)
    rest = gradients(k, mean, rstd, totals, plan.pixels * slices, of_channels, 0)
    if wide:
        k.store_statistics({"left": rest}, k.e.p("setp.eq.u32", place, 0))
    return k.e.text()
