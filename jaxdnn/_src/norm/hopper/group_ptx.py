"""The PTX of group and instance normalisation, forward and backward: a part of an image in a cluster's shared memory.

Forward, m is the mean of the first rounds, the sample; then Σ d and Σ d² of all d = x - m give μ = m + Σ d / n and
σ² = Σ d² / n - (Σ d / n)². Where all rounds are the sample m - μ is what rounding has cost, and no digit is lost; else
(m - μ)² is at most σ² times the rounds over those sampled, and next to nothing as a rule. Of float32 μ is
subtracted as these two numbers. Backward Σ (x - μ) of the rounded μ that was saved is found again for float32.

`group_walk` states which thread has what, `group_sums` the order of additions.
"""

import functools as ft

from jaxdnn._src.hopper.ptx import SIZES, real
from jaxdnn._src.norm.hopper.group_plan import ImagePlan
from jaxdnn._src.norm.hopper.group_sums import ZERO, Sums
from jaxdnn._src.norm.hopper.group_walk import Words

# ---- forward ---------------------------------------------------------------------------------------------------------


@ft.lru_cache
def forward(plan: ImagePlan, *, eps: float, scale: bool, bias: bool, images: int = 0, clusters: int = 0) -> str:
    """The PTX of the forward op; operands: x, [scale], [bias], y, mean, rstd, variance, shared memory.

    A cluster has one part of an image, or each `clusters`-th of those of the `images`.
    """
    parameters = ["scale"] * scale + ["bias"] * bias
    k = Sums(plan, ["x", *parameters, "y", "mean", "rstd", "variance"], ["x"], images=images, clusters=clusters)
    k.copy()
    with k.each_part():
        given = {name: k.parameter(name) for name in parameters}
        m, rest, variance = moments(k)
        normalise(k, m, rest, variance, eps, given, len(k.chunks))
    return k.e.text()


def moments(k: Sums) -> tuple[list[str], list[str], list[str]]:
    """m, Σ d / n and σ² for each cell."""
    e, plan, share = k.e, k.plan, real(1 / (k.plan.pixels * k.plan.group))
    mean = k.shares(k.totals([k.fold(_sampled_sums(k))])[0], real(1 / (plan.sample * plan.group)))
    about, sums, squares = k.spread(mean), k.zeros(), k.zeros()

    def centred(words: Words, _: str, __: int) -> None:
        for i, value in enumerate(k.unpack(words["x"])):
            d = e.f("sub.rn.f32", value, about[i])
            e.op("add.rn.f32", sums[i], sums[i], d)
            e.op("fma.rn.f32", squares[i], d, d, squares[i])

    k.walk(centred, arrived=1 if plan.sampled < k.kept else len(k.chunks))
    rest, square = (k.shares(v, share) for v in k.totals([k.fold(sums), k.fold(squares)]))
    less = [e.f("fma.rn.f32", e.f("neg.f32", r), r, s) for r, s in zip(rest, square, strict=True)]
    return mean, rest, [e.f("max.NaN.f32", v, ZERO) for v in less]


def normalise(
    k: Sums,
    m: list[str],
    rest: list[str],
    variance: list[str],
    eps: float,
    given: dict[str, list[str]],
    arrived: int,
    first: str = "",
) -> None:
    """The results of the thread's vectors, and the statistics, from those of its cells; `first` guards these."""
    e, plan = k.e, k.plan
    mean = [e.f("add.rn.f32", *pair) for pair in zip(m, rest, strict=True)]
    rstd = [e.f("rcp.rn.f32", e.f("sqrt.rn.f32", e.f("add.rn.f32", v, real(eps)))) for v in variance]
    factor, bias = k.spread(rstd), given.get("bias")
    if "scale" in given:
        factor = [e.f("mul.rn.f32", *pair) for pair in zip(factor, given["scale"], strict=True)]
    target = k.address("y", SIZES[plan.out_dtype])
    subtracted = [k.spread(m), k.spread(rest)] if plan.dtype == "f32" else [k.spread(mean)]

    def write(words: Words, index: str, number: int) -> None:
        y = []
        for i, value in enumerate(k.unpack(words["x"])):
            for part in subtracted:
                value = e.f("sub.rn.f32", value, part[i])
            y.append(k.times(value, factor[i], bias[i] if bias else ""))
        k.store(target, index, number, y)

    k.walk(write, arrived=arrived, refill=True)
    k.store_statistics({"mean": mean, "rstd": rstd, "variance": variance}, first)


def _sampled_sums(k: Sums) -> list[str]:
    """Those of the thread's channels over the sample."""
    sums = k.zeros()

    def add(words: Words, _: str, __: int) -> None:
        for i, value in enumerate(k.unpack(words["x"])):
            k.e.op("add.rn.f32", sums[i], sums[i], value)

    k.walk(add, sample_only=True)
    return sums


# ---- backward --------------------------------------------------------------------------------------------------------


@ft.lru_cache
def backward(plan: ImagePlan, *, scale: bool, images: int = 0, clusters: int = 0) -> str:
    """The PTX of the backward op; operands: dy, x, mean, rstd, [scale], dx, the blocks' sums, shared memory.

    The blocks' sums are (images, blocks of a cluster, 2, channels): of dy h, and of dy. A cluster has one part of an
    image, or each `clusters`-th of those of the `images`.
    """
    names = ["dy", "x", "mean", "rstd", *["scale"] * scale, "dx", "sums"]
    k = Sums(plan, names, ["dy", "x"], images=images, clusters=clusters)
    k.copy()
    with k.each_part():
        of_channels = k.parameter("scale") if scale else []
        mean, rstd = k.spread(k.statistic("mean")), k.statistic("rstd")
        totals = added_gradients(k, mean, scale)
        rest = gradients(k, mean, rstd, totals, plan.pixels, of_channels, len(k.chunks))
        k.store_sums(k.spread(rest) if rest else [], k.spread(rstd))
    return k.e.text()


def added_gradients(k: Sums, mean: list[str], scale: bool) -> list[list[str]]:
    """Of the thread's cells Σ g (x - mean), Σ g and, of float32, Σ (x - mean)."""
    e, wide = k.e, k.plan.dtype == "f32"
    along, plain, rests = k.zeros(), k.zeros(), k.zeros() if wide else []

    def add(words: Words, _: str, __: int) -> None:
        dy = k.unpack(words["dy"])
        for i, value in enumerate(k.unpack(words["x"])):
            d = e.f("sub.rn.f32", value, mean[i])
            e.op("fma.rn.f32", along[i], dy[i], d, along[i])
            e.op("add.rn.f32", plain[i], plain[i], dy[i])
            if wide:
                e.op("add.rn.f32", rests[i], rests[i], d)

    k.walk(add)
    return k.totals_of_channels([along, plain, *([rests] if wide else [])], k.weigher("scale" if scale else ""))


def gradients(
    k: Sums,
    mean: list[str],
    rstd: list[str],
    totals: list[list[str]],
    pixels: int,
    of_channels: list[str],
    arrived: int,
) -> list[str]:
    """dx of the thread's vectors, from the sums of its cells over an image's pixels; of float32 Σ (x - mean) / n."""
    e, plan, wide = k.e, k.plan, k.plan.dtype == "f32"
    share = real(1 / (pixels * plan.group))
    of_gd, of_g, rest = [*totals, []][:3]
    if wide:  # what rounding the saved mean has cost
        rest = k.shares(rest, share)
        of_gd = [e.f("fma.rn.f32", e.f("neg.f32", r), g, a) for r, g, a in zip(rest, of_g, of_gd, strict=True)]
    # dx = r (g - Σ g / n - h Σ g h / n) = dy (r s) + (d b + a) with the terms of a group in a and b.
    square = [e.f("mul.rn.f32", r, r) for r in rstd]
    a = [e.f("neg.f32", e.f("mul.rn.f32", v, r)) for v, r in zip(k.shares(of_g, share), rstd, strict=True)]
    b = [e.f("mul.rn.f32", v, r) for v, r in zip(k.shares(of_gd, share), rstd, strict=True)]
    b = [e.f("neg.f32", e.f("mul.rn.f32", v, s)) for v, s in zip(b, square, strict=True)]
    factor = k.spread(rstd)
    if of_channels:
        factor = [e.f("mul.rn.f32", *pair) for pair in zip(factor, of_channels, strict=True)]
    a, b, less = k.spread(a), k.spread(b), k.spread(rest) if wide else []
    target = k.address("dx", SIZES[plan.out_dtype])

    def write(words: Words, index: str, number: int) -> None:
        dx, dy = [], k.unpack(words["dy"])
        for i, value in enumerate(k.unpack(words["x"])):
            d = e.f("sub.rn.f32", value, mean[i])
            d = e.f("sub.rn.f32", d, less[i]) if wide else d
            dx.append(e.f("fma.rn.f32", dy[i], factor[i], e.f("fma.rn.f32", d, b[i], a[i])))
        k.store(target, index, number, dx)

    k.walk(write, arrived=arrived, refill=True)
    return rest
