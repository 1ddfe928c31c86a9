"""The PTX of group and instance normalisation, forward and backward: a part of an image in a cluster's shared memory.

Forward, m is the mean of the first rounds, the sample. From the sums of d = x - m and of d² over all values follow
μ = m + Σ d / n and σ² = Σ d² / n - (Σ d / n)². Where the sample is all values, m - μ is a rounding error, and nothing
cancels. Otherwise (m - μ)² is at most σ² times the rounds over those sampled, and as a rule far smaller. In float32 μ
is subtracted as the two numbers m and Σ d / n. Backward in float32, Σ h corrects for the rounding of the saved μ, where
h = (x - μ) / σ. It is h that dy is multiplied by, for dy (x - μ) may leave float32's range where dy h does not.

`group_vectors` states which thread processes what, `group_sums` the order of additions.

It is PTX text, which an empty Pallas kernel embeds. Plain Pallas was measured for `group_slices_ptx` alone.
"""

import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

from jaxdnn._src.hopper.ptx import SIZES, Emitter, real
from jaxdnn._src.norm.hopper import activation_ptx
from jaxdnn._src.norm.hopper.group_cells import ZERO
from jaxdnn._src.norm.hopper.group_plan import ImagePlan
from jaxdnn._src.norm.hopper.group_sums import Kernel, Weigh
from jaxdnn._src.norm.hopper.group_vectors import Words

# ---- forward ---------------------------------------------------------------------------------------------------------


@ft.lru_cache
def forward(
    plan: ImagePlan,
    *,
    eps: float,
    scale: bool,
    bias: bool,
    activation: str | None = None,
    images: int = 0,
    clusters: int = 0,
) -> str:
    """The PTX of the forward op; operands: x, [scale], [bias], y, mean, rstd, variance, shared memory.

    A cluster processes one part of an image, or, with `clusters`, every `clusters`-th part of the `images`.
    """
    parameters = ["scale"] * scale + ["bias"] * bias
    k = Kernel(plan, ["x", *parameters, "y", "mean", "rstd", "variance"], ["x"], images=images, clusters=clusters)
    k.vectors.copy()
    with k.each_part():
        given = {name: k.vectors.parameter(name) for name in parameters}
        m, rest, variance = moments(k)
        normalise(k, m, rest, variance, eps, given, len(k.vectors.chunks), k.vectors.image, activation=activation)
    return k.e.text()


def moments(k: Kernel) -> tuple[list[str], list[str], list[str]]:
    """m, Σ d / n and σ² for each cell."""
    e, plan, cells, share = k.e, k.plan, k.cells, real(1 / (k.plan.pixels * k.plan.group))
    sampled = k.totals_from_cells([cells.from_channels(_sampled_sums(k))])[0]
    mean = times(e, sampled, real(1 / (plan.sample * plan.group)))
    centre, sums, squares = cells.to_channels(mean), k.zeros(), k.zeros()

    def add(words: Words, _: str, __: int) -> None:
        for i, value in enumerate(k.vectors.unpack(words["x"])):
            d = e.f("sub.rn.f32", value, centre[i])
            e.op("add.rn.f32", sums[i], sums[i], d)
            e.op("fma.rn.f32", squares[i], d, d, squares[i])

    k.vectors.for_each(add, arrived=1 if plan.sampled < k.vectors.kept else len(k.vectors.chunks))
    totals = k.totals_from_cells([cells.from_channels(sums), cells.from_channels(squares)])
    rest, square = (times(e, total, share) for total in totals)
    variance = [e.f("fma.rn.f32", e.f("neg.f32", r), r, s) for r, s in zip(rest, square, strict=True)]
    return mean, rest, [e.f("max.NaN.f32", v, ZERO) for v in variance]


def normalise(
    k: Kernel,
    m: list[str],
    rest: list[str],
    variance: list[str],
    eps: float,
    given: dict[str, list[str]],
    arrived: int,
    image: str,
    stores: str = "",
    activation: str | None = None,
) -> None:
    """Stores the results of the thread's vectors, and the statistics (of `image`, where the predicate `stores` holds).

    m + rest is the mean. `arrived` groups of copies have been waited for.
    """
    e, plan, cells, vectors = k.e, k.plan, k.cells, k.vectors
    mean = [e.f("add.rn.f32", *pair) for pair in zip(m, rest, strict=True)]
    rstd = [e.f("rcp.rn.f32", e.f("sqrt.rn.f32", e.f("add.rn.f32", v, real(eps)))) for v in variance]
    factor, bias = cells.to_channels(rstd), given.get("bias")
    if "scale" in given and activation is None:
        factor = [e.f("mul.rn.f32", *pair) for pair in zip(factor, given["scale"], strict=True)]
    target = vectors.address("y", SIZES[plan.out_dtype])
    subtracted = [cells.to_channels(v) for v in ([m, rest] if plan.dtype == "f32" else [mean])]

    def write(words: Words, index: str, number: int) -> None:
        y = []
        for i, value in enumerate(vectors.unpack(words["x"])):
            for part in subtracted:
                value = e.f("sub.rn.f32", value, part[i])
            if activation is not None:
                own = (given[name][i] if name in given else None for name in ("scale", "bias"))
                z = activation_ptx.affine(e, e.f("mul.rn.f32", value, factor[i]), *own)
                y.append(activation_ptx.value(e, activation, z))
            elif bias:
                y.append(e.f("fma.rn.f32", value, factor[i], bias[i]))
            else:
                y.append(e.f("mul.rn.f32", value, factor[i]))
        vectors.store(target, index, number, y)

    vectors.for_each(write, arrived=arrived, refill=True)
    cells.store({"mean": mean, "rstd": rstd, "variance": variance}, image, stores)


def _sampled_sums(k: Kernel) -> list[str]:
    """The sums of the thread's channels over the sample."""
    sums = k.zeros()

    def add(words: Words, _: str, __: int) -> None:
        for i, value in enumerate(k.vectors.unpack(words["x"])):
            k.e.op("add.rn.f32", sums[i], sums[i], value)

    k.vectors.for_each(add, sample_only=True)
    return sums


def times(e: Emitter, values: Sequence[str], factor: str) -> list[str]:
    return [e.f("mul.rn.f32", value, factor) for value in values]


# ---- backward --------------------------------------------------------------------------------------------------------


@ft.lru_cache
def backward(
    plan: ImagePlan,
    *,
    scale: bool,
    bias: bool = False,
    activation: str | None = None,
    images: int = 0,
    clusters: int = 0,
) -> str:
    """The PTX of the backward op; operands: dy, x, mean, rstd, [scale], [bias], dx, the blocks' sums, shared memory.

    The blocks' sums are (images, blocks of a cluster, 2, channels): of dy h and of dy.
    `images` and `clusters` as for `forward`.
    """
    names = ["dy", "x", "mean", "rstd", *["scale"] * scale, *["bias"] * bias, "dx", "sums"]
    k = Kernel(plan, names, ["dy", "x"], images=images, clusters=clusters)
    k.vectors.copy()
    with k.each_part():
        of_channels = k.vectors.parameter("scale") if scale else []
        saved = load_saved(k, k.vectors.image)
        before = Before(k, activation, of_channels, bias)
        totals, sums = added_gradients(k, saved, scale, before)
        rest = gradients(k, saved, totals, plan.pixels, of_channels, len(k.vectors.chunks), before)
        store_sums(k, sums, k.cells.to_channels(rest) if rest else [])
    return k.e.text()


class Saved(NamedTuple):
    """The saved statistics at each of the thread's channels, and 1 / σ of its cells."""

    mean: list[str]
    rstd: list[str]
    of_cells: list[str]


def load_saved(k: Kernel, image: str) -> Saved:
    """The statistics of an image."""
    mean, rstd = (k.cells.load(name, image) for name in ("mean", "rstd"))
    return Saved(k.cells.to_channels(mean), k.cells.to_channels(rstd), rstd)


def _normalised(k: Kernel, words: Words, saved: Saved) -> list[str]:
    """h of a vector, with the saved statistics."""
    values = zip(k.vectors.unpack(words["x"]), saved.mean, saved.rstd, strict=True)
    return [k.e.f("mul.rn.f32", k.e.f("sub.rn.f32", x, mean), rstd) for x, mean, rstd in values]


class Before:
    """The gradient before the op's activation, from that behind it: dy times the slope at scale h + bias."""

    def __init__(self, k: Kernel, activation: str | None, of_channels: list[str], bias: bool) -> None:
        none, self.k, self.activation = [None] * k.plan.elements, k, activation
        self.scale = of_channels or none
        self.bias = k.vectors.parameter("bias") if bias else none

    def __call__(self, i: int, dy: str, h: str) -> str:
        """The gradient for the thread's i-th channel."""
        if self.activation is None:
            return dy
        z = activation_ptx.affine(self.k.e, h, self.scale[i], self.bias[i])
        return self.k.e.f("mul.rn.f32", dy, activation_ptx.slope(self.k.e, self.activation, z, self.k.plan.dtype))


def added_gradients(k: Kernel, saved: Saved, scale: bool, before: Before) -> tuple[list[list[str]], str]:
    """Σ g h and Σ g, where g = dy scale, and for float32 Σ h, for each of the thread's cells.

    Also the address in shared memory of the block's sums of its channels: dy h, dy, and h.
    """
    e, wide = k.e, k.plan.dtype == "f32"
    along, plain, rests = k.zeros(), k.zeros(), k.zeros() if wide else []

    def add(words: Words, _: str, __: int) -> None:
        dy = k.vectors.unpack(words["dy"])
        for i, h in enumerate(_normalised(k, words, saved)):
            g = before(i, dy[i], h)
            e.op("fma.rn.f32", along[i], g, h, along[i])
            e.op("add.rn.f32", plain[i], plain[i], g)
            if wide:
                e.op("add.rn.f32", rests[i], rests[i], h)

    k.vectors.for_each(add)
    return k.totals_from_channels([along, plain, *([rests] if wide else [])], _weigher(k, "scale" if scale else ""))


def _weigher(k: Kernel, name: str) -> Weigh:
    """Multiplies the first two sums of a channel by its scale, if there is one."""
    e, vectors = k.e, k.vectors

    def weigh(channel: str, sums: list[str], guard: str) -> list[str]:
        if not name:
            return sums
        number = e.r("mad.lo.s32", vectors.place, k.plan.part, channel)
        scale = e.f("mov.f32", ZERO) if guard else e.new("f")
        e.op("ld.global.nc.f32", scale, f"[{e.d('mad.wide.u32', number, 4, vectors.base[name])}]", when=guard)
        return times(e, sums[:2], scale) + sums[2:]

    return weigh


def gradients(
    k: Kernel,
    saved: Saved,
    totals: list[list[str]],
    pixels: int,
    of_channels: list[str],
    arrived: int,
    before: Before,
) -> list[str]:
    """Stores dx of the thread's vectors, from the totals of its cells; returns Σ h / n for float32."""
    e, plan, cells, wide = k.e, k.plan, k.cells, k.plan.dtype == "f32"
    share = real(1 / (pixels * plan.group))
    of_gh, of_g, rest = [*totals, []][:3]
    if wide:  # corrects for the rounding of the saved mean
        rest = times(e, rest, share)
        of_gh = [e.f("fma.rn.f32", e.f("neg.f32", r), g, a) for r, g, a in zip(rest, of_g, of_gh, strict=True)]
    # dx = r (g - Σ g / n - h Σ g h / n) = dy (r s) + (h b + a), where a and b hold what a group has in common.
    a, b = (
        [e.f("neg.f32", e.f("mul.rn.f32", v, r)) for v, r in zip(times(e, total, share), saved.of_cells, strict=True)]
        for total in (of_g, of_gh)
    )
    factor = saved.rstd
    if of_channels:
        factor = [e.f("mul.rn.f32", *pair) for pair in zip(factor, of_channels, strict=True)]
    a, b, correction = cells.to_channels(a), cells.to_channels(b), cells.to_channels(rest) if wide else []
    target = k.vectors.address("dx", SIZES[plan.out_dtype])

    def write(words: Words, index: str, number: int) -> None:
        dx, dy = [], k.vectors.unpack(words["dy"])
        for i, h in enumerate(_normalised(k, words, saved)):
            g = before(i, dy[i], h)
            h = e.f("sub.rn.f32", h, correction[i]) if wide else h
            dx.append(e.f("fma.rn.f32", g, factor[i], e.f("fma.rn.f32", h, b[i], a[i])))
        k.vectors.store(target, index, number, dx)

    k.vectors.for_each(write, arrived=arrived, refill=True)
    return rest


def store_sums(k: Kernel, sums: str, rest: Sequence[str]) -> None:
    """Stores the block's sums of dy h and dy of its channels to device memory, in the threads of its first row.

    sums: their address in shared memory. rest: Σ h / n of each channel's group, by which each h is too large, or
    nothing.
    """
    e, plan, vectors = k.e, k.plan, k.vectors
    first = e.p("setp.eq.u32", vectors.row, 0)
    block = e.r("mad.lo.s32", vectors.image, plan.cluster, vectors.rank)
    target = e.d("mad.wide.u32", block, 8 * plan.channels, vectors.base["sums"])
    target = e.d("mad.wide.u32", vectors.channel, 4, target)
    here = e.scaled(vectors.column, 4 * plan.elements, sums)
    for start in range(0, plan.elements, 4):
        along, plain = ([e.new("f") for _ in range(4)] for _ in range(2))
        for i, values in enumerate((along, plain)):
            place = 4 * (i * plan.part + start)
            e.op("ld.shared.v4.f32", values, f"[{here}+{place}]", when=first)
        if rest:
            less = [e.f("neg.f32", rest[start + i]) for i in range(4)]
            along = [e.f("fma.rn.f32", r, g, a) for r, g, a in zip(less, plain, along, strict=True)]
        for i, values in enumerate((along, plain)):
            e.store_floats("global", f"[{target}+{4 * (i * plan.channels + start)}]", values, when=first)
