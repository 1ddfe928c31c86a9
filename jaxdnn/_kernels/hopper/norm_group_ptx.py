"""The PTX of group and instance normalisation, forward and backward: a part of an image in a cluster's shared memory.

Forward, m is the mean of the vectors that are kept; then Σ d and Σ d² of all d = x - m give μ = m + Σ d / n and
σ² = Σ d² / n - (Σ d / n)². Where all vectors are kept m - μ is what rounding has cost, and no digit is lost; else
(m - μ)² is at most σ² times the rounds over those that are kept, and next to nothing as a rule. Of float32 μ is
subtracted as these two numbers. Backward Σ (x - μ) of the rounded μ that was saved is found again for float32.

`norm_group_walk` states which thread has what, `norm_group_sums` the order of additions.
"""

import functools as ft

from jaxdnn._kernels.hopper.norm_group_plan import ImagePlan
from jaxdnn._kernels.hopper.norm_group_sums import ZERO, Sums
from jaxdnn._kernels.hopper.norm_group_walk import Words
from jaxdnn._kernels.hopper.ptx import SIZES, real

# ---- forward ---------------------------------------------------------------------------------------------------------


@ft.lru_cache
def forward(plan: ImagePlan, *, eps: float, scale: bool, bias: bool) -> str:
    """The PTX of the forward op; operands: x, [scale], [bias], y, mean, rstd, variance, shared memory."""
    parameters = ["scale"] * scale + ["bias"] * bias
    k = Sums(plan, ["x", *parameters, "y", "mean", "rstd", "variance"], ["x"])
    e, share = k.e, real(1 / (plan.pixels * plan.group))
    k.copy()
    mean = k.shares(k.totals([k.fold(_kept_sums(k))])[0], real(1 / (plan.sample * plan.group)))
    sums, squares = k.zeros(), k.zeros()

    def centred(words: Words, _: str, __: int) -> None:
        for i, value in enumerate(k.unpack(words["x"])):
            d = e.f("sub.rn.f32", value, k.of(mean, i))
            e.op("add.rn.f32", sums[i], sums[i], d)
            e.op("fma.rn.f32", squares[i], d, d, squares[i])

    k.walk(centred)
    given = {name: k.parameter(name) for name in parameters}
    rest, square = (k.shares(v, share) for v in k.totals([k.fold(sums), k.fold(squares)]))
    whole = [e.f("add.rn.f32", *pair) for pair in zip(mean, rest, strict=True)]
    less = [e.f("fma.rn.f32", e.f("neg.f32", r), r, s) for r, s in zip(rest, square, strict=True)]
    variance = [e.f("max.NaN.f32", v, ZERO) for v in less]
    rstd = [e.f("rcp.rn.f32", e.f("sqrt.rn.f32", e.f("add.rn.f32", v, real(eps)))) for v in variance]
    factor = [k.of(rstd, i) for i in range(plan.elements)]
    if scale:
        factor = [e.f("mul.rn.f32", *pair) for pair in zip(factor, given["scale"], strict=True)]
    target = k.address("y", SIZES[plan.out_dtype])
    subtracted = [mean, rest] if plan.dtype == "f32" else [whole]

    def write(words: Words, index: str, number: int) -> None:
        y = []
        for i, value in enumerate(k.unpack(words["x"])):
            for part in subtracted:
                value = e.f("sub.rn.f32", value, k.of(part, i))
            y.append(k.times(value, factor[i], given["bias"][i] if bias else ""))
        k.store(target, index, number, y)

    k.walk(write)
    k.store_statistics({"mean": whole, "rstd": rstd, "variance": variance})
    return e.text()


def _kept_sums(k: Sums) -> list[str]:
    """Those of the thread's channels over the vectors that are kept."""
    sums = k.zeros()

    def add(words: Words, _: str, __: int) -> None:
        for i, value in enumerate(k.unpack(words["x"])):
            k.e.op("add.rn.f32", sums[i], sums[i], value)

    k.walk(add, arriving=True, kept_only=True)
    return sums


# ---- backward --------------------------------------------------------------------------------------------------------


@ft.lru_cache
def backward(plan: ImagePlan, *, scale: bool) -> str:
    """The PTX of the backward op; operands: dy, x, mean, rstd, [scale], dx, the blocks' sums, shared memory.

    The blocks' sums are (images, blocks of a cluster, 2, channels): of dy h, and of dy.
    """
    k = Sums(plan, ["dy", "x", "mean", "rstd", *["scale"] * scale, "dx", "sums"], ["dy", "x"])
    e, share, wide = k.e, real(1 / (plan.pixels * plan.group)), plan.dtype == "f32"
    k.copy()
    mean, rstd = (k.statistic(name) for name in ("mean", "rstd"))
    along, plain, rests = k.zeros(), k.zeros(), k.zeros() if wide else []

    def add(words: Words, _: str, __: int) -> None:
        dy = k.unpack(words["dy"])
        for i, value in enumerate(k.unpack(words["x"])):
            d = e.f("sub.rn.f32", value, k.of(mean, i))
            e.op("fma.rn.f32", along[i], dy[i], d, along[i])
            e.op("add.rn.f32", plain[i], plain[i], dy[i])
            if wide:
                e.op("add.rn.f32", rests[i], rests[i], d)

    k.walk(add, arriving=True)
    of_channels = k.parameter("scale") if scale else []
    found = k.totals([along, plain, *([rests] if wide else [])], k.weigher("scale" if scale else ""))
    of_gd, of_g, rest = [*found, []][:3]
    if wide:  # what rounding the saved mean has cost
        rest = k.shares(rest, share)
        of_gd = [e.f("fma.rn.f32", e.f("neg.f32", r), g, a) for r, g, a in zip(rest, of_g, of_gd, strict=True)]
    # dx = r (g - Σ g / n - h Σ g h / n) = dy (r s) + (d b + a) with the terms of a group in a and b.
    square = [e.f("mul.rn.f32", r, r) for r in rstd]
    a = [e.f("neg.f32", e.f("mul.rn.f32", v, r)) for v, r in zip(k.shares(of_g, share), rstd, strict=True)]
    b = [e.f("mul.rn.f32", v, r) for v, r in zip(k.shares(of_gd, share), rstd, strict=True)]
    b = [e.f("neg.f32", e.f("mul.rn.f32", v, s)) for v, s in zip(b, square, strict=True)]
    factor = [k.of(rstd, i) for i in range(plan.elements)]
    if scale:
        factor = [e.f("mul.rn.f32", *pair) for pair in zip(factor, of_channels, strict=True)]
    target = k.address("dx", SIZES[plan.out_dtype])

    def write(words: Words, index: str, number: int) -> None:
        dx, dy = [], k.unpack(words["dy"])
        for i, value in enumerate(k.unpack(words["x"])):
            d = e.f("sub.rn.f32", value, k.of(mean, i))
            d = e.f("sub.rn.f32", d, k.of(rest, i)) if wide else d
            dx.append(e.f("fma.rn.f32", dy[i], factor[i], e.f("fma.rn.f32", d, k.of(b, i), k.of(a, i))))
        k.store(target, index, number, dx)

    k.walk(write)
    k.store_sums(rest, rstd)
    return e.text()
