"""The PTX of samples and of the gradient in the grid, which gather pixels at its points.

A thread, or several neighbouring ones that share a point's channels, reads the point, finds its taps, and loads each
tap's pixel; no index and no weight lies in memory. A unit of channels is 16 bytes where their number allows. Of images
of few channels, two neighbouring pixels lie in 16 to 48 bytes: these are loaded whole, in vectors, and what belongs to
the two is shifted out of them: what limits such kernels is in how many lines of the cache the addresses of a warp's
loads lie. It is PTX text because Pallas (Mosaic GPU, JAX 0.11) loads slices of arrays and has no gather.

    samples   y[m] = 0 + w[m, 0] x[i[m, 0]] + w[m, 1] x[i[m, 1]] + ..., each product rounded
    slopes    grid[m] = Σ_t dw[m, t] / dgrid[m] Σ_c x[i[m, t], c] y[m, c], on the tree of `core.trees` over the channels

The lanes that share a point exchange half of their products at each level of that tree, so that each adds the rest.
"""

import functools as ft
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES
from jaxdnn._src.sampling.hopper.points_ptx import THREADS, ZERO, Emitter, Problem

LANES = 32
MOST_UNITS = 128  # of channels that lanes add up
MOST_WHOLE = 16  # channels that a thread adds up alone
MOST_VECTORS = 3  # that two neighbouring pixels may lie in


def together(k: Problem) -> bool:
    """Whether the pixels of the taps along the last axis are loaded as one."""
    row = k.channels * SIZES[k.x]
    whole = k.images * k.pixels * row % VECTOR_BYTES == 0  # so that no vector reaches beyond the array
    return k.units == 1 and row % VECTOR_BYTES != 0 and whole and _vectors(k) <= MOST_VECTORS


def _vectors(k: Problem) -> int:
    """Vectors in which the pixels of the taps along the last axis may lie."""
    row = k.channels * SIZES[k.x]
    return -(-(VECTOR_BYTES - math.gcd(row, VECTOR_BYTES) + k.each * row) // VECTOR_BYTES)


def sharing(k: Problem) -> int:
    """The threads that share a point's channels in `samples`."""
    return k.units // 2 if k.units % 2 == 0 and k.units >= 4 else k.units


def lanes(k: Problem) -> int:
    """The lanes that share a point's channels in `slopes`."""
    return 1 if _alone(k) else min(LANES, max(1, k.units // 2))


def _alone(k: Problem) -> bool:
    return k.channels <= MOST_WHOLE and (k.channels & (k.channels - 1) != 0 or k.units == 1)


def adds_up(k: Problem) -> bool:
    """Whether `slopes` has the tree over so many channels."""
    return _alone(k) or (k.channels & (k.channels - 1) == 0 and k.units <= MOST_UNITS)


class _Taps:
    """A point's taps: for each, in order, the weight and the loaded pixel, zeros where it is not read."""

    def __init__(self, e: Emitter, grid: str, point: str, image: str) -> None:
        self.e, self.k, self.image = e, e.k, image
        self.places = e.places(grid, point)
        found = [e.fractions(p.value) for p in self.places]
        self.factors = [w for _, w in found]
        self.weights = e.products(self.factors)
        self.at = [e.first(low, p.value) for (low, _), p in zip(found, self.places, strict=True)]
        # Of each axis and tap along it: whether it is inside.
        sizes = zip(self.at, self.k.sizes, strict=True)
        self.inside = [[self._within(at, t, n) for t in range(self.k.each)] for at, n in sizes]

    def _within(self, at: str, tap: int, size: int) -> str:
        e = self.e
        return e.p("setp.lt.u32", e.r("add.s32", at, tap) if tap else at, size)

    def _row(self, outer: tuple[int, ...]) -> tuple[str, str]:
        """Of taps along all axes but the last: the first tap's number of a pixel, and whether they are inside."""
        e, line, holds = self.e, self.image, ""
        for axis, tap in enumerate(outer):
            at = e.r("add.s32", self.at[axis], tap) if tap else self.at[axis]
            line = e.r("mad.lo.s32", line, self.k.sizes[axis], at)
            holds = e.both(holds, self.inside[axis][tap])
        return e.r("mad.lo.s32", line, self.k.sizes[-1], self.at[-1]), holds

    def _rows(self) -> list[tuple[str, str]]:
        k = self.k
        count = k.taps // k.each
        outer = lambda i: tuple(i // k.each ** (k.axes - 2 - axis) % k.each for axis in range(k.axes - 1))
        return [self._row(outer(i)) for i in range(count)]

    def units(self, x: str, start: str, count: int, step: int, read: Callable[[int], str]) -> list[list[list[str]]]:
        """Of each tap, of `count` units from channel `start` on, `step` channels apart, the numbers.

        read: of a tap's number, a predicate that must hold besides for it to be read; "" is one that always holds.
        """
        e, k, found = self.e, self.k, []
        for i, (pixel, holds) in enumerate(self._rows()):
            for t in range(k.each):
                number = e.r("add.s32", pixel, t) if t else pixel
                when = e.both(e.both(holds, self.inside[-1][t]), read(i * k.each + t))
                at = e.d("mad.wide.s32", e.r("mad.lo.s32", number, k.channels, start), SIZES[k.x], x)
                offsets = [u * step * SIZES[k.x] for u in range(count)]
                found.append([e.load(k.x, at, k.unit, offset, when) for offset in offsets])
        return found

    def joined(self, x: str, read: Callable[[int], str]) -> list[list[str]]:
        """Of each tap the whole pixel; neighbours are loaded as one."""
        e, k, found = self.e, self.k, []
        size = k.channels * SIZES[k.x]
        for i, (pixel, holds) in enumerate(self._rows()):
            some = e.both(holds, self._either())
            element = e.r("mul.lo.s32", pixel, k.channels)
            offset = e.r("and.b32", e.r("mul.lo.s32", element, SIZES[k.x]), VECTOR_BYTES - 1)
            at = e.d("and.b64", e.d("mad.wide.s32", element, SIZES[k.x], x), -VECTOR_BYTES)
            # Behind what is read nothing is loaded: there may be no more of the array. Nor is it before its start.
            last = str(k.each * size)
            if k.each > 1:
                last = e.r("selp.b32", last, str(size), self.inside[-1][1])
            last = e.r("add.s32", offset, last)
            words: list[str] = []
            for v in range(_vectors(k)):
                needed = e.p("setp.gt.s32", last, v * VECTOR_BYTES) if v else e.p("setp.ge.s32", element, 0)
                part = [e.r("mov.b32", 0) for _ in range(4)]
                e.op("ld.global.nc.v4.b32", part, f"[{at}+{v * VECTOR_BYTES}]", when=e.both(some, needed))
                words += part
            values = self._shifted(words, offset)
            for t in range(k.each):
                when = e.both(e.both(holds, self.inside[-1][t]), read(i * k.each + t))
                own = values[t * k.channels : (t + 1) * k.channels]
                found.append([e.f("selp.f32", v, ZERO, when) for v in own])
        return found

    def _either(self) -> str:
        of_taps = self.inside[-1]
        return of_taps[0] if len(of_taps) == 1 else self.e.p("or.pred", *of_taps)

    def _shifted(self, words: list[str], offset: str) -> list[str]:
        """The numbers that begin `offset` bytes behind the first one."""
        e, k = self.e, self.k
        size = SIZES[k.x]
        needed = -(-k.each * k.channels * size // 4)
        steps = [n for n in (8, 4, 2) if n >= math.gcd(k.channels * size, VECTOR_BYTES)]
        for i, step in enumerate(steps):
            bit = e.p("setp.ne.s32", e.r("and.b32", offset, step), 0)
            rest = sum(max(1, s // 4) for s in steps[i + 1 :])
            count, by = min(len(words), needed + rest), step // 4
            further = [*words[max(by, 1) :], *["0"] * max(by, 1)]
            if by:
                words = [e.r("selp.b32", b, a, bit) for a, b in zip(words[:count], further[:count], strict=True)]
            else:
                bits = e.r("selp.b32", "16", "0", bit)
                words = [e.r("shf.r.wrap.b32", a, b, bits) for a, b in zip(words[:count], further[:count], strict=True)]
        return e.unpack(k.x, words[:needed])[: k.each * k.channels]


@ft.lru_cache
def samples(k: Problem) -> str:
    """Operands: x, grid, y."""
    e = Emitter(k)
    x, grid, y = map(e.operand, range(3))
    number = e.number(k.images * k.points * sharing(k))
    point, part = e.divided(number, sharing(k))
    image, _ = e.divided(point, k.points)
    taps = _Taps(e, grid, point, image)
    read = lambda t: e.p("setp.neu.f32", taps.weights[t], ZERO)
    start, step, count = e.r("mul.lo.s32", part, k.unit), sharing(k) * k.unit, k.units // sharing(k)
    pixels = [[v] for v in taps.joined(x, read)] if together(k) else taps.units(x, start, count, step, read)
    at = e.d("mad.wide.u32", e.r("mad.lo.s32", point, k.channels, start), SIZES[k.y], y)
    for u in range(count):
        totals = [ZERO] * k.unit
        for w, pixel in zip(taps.weights, pixels, strict=True):
            totals = [e.f("add.rn.f32", a, e.f("mul.rn.f32", w, v)) for a, v in zip(totals, pixel[u], strict=True)]
        e.store(k.y, e.d("add.s64", at, u * step * SIZES[k.y]), totals)
    return e.finished()


@ft.lru_cache
def slopes(k: Problem) -> str:
    """Operands: x, y, grid, the gradient in it."""
    e, own = Emitter(k), lanes(k)
    x, y, grid, result = map(e.operand, range(4))
    total = k.images * k.points * own
    number = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), THREADS, e.r("mov.u32", "%tid.x"))
    there = e.p("setp.lt.u32", number, total)
    number = e.r("min.u32", number, total - 1)  # all lanes take part in exchanges
    point, part = e.divided(number, own)
    image, _ = e.divided(point, k.points)
    taps = _Taps(e, grid, point, image)
    start, step, count = e.r("mul.lo.s32", part, k.unit), own * k.unit, k.units // own
    always = lambda t: ""
    pixels = [[v] for v in taps.joined(x, always)] if together(k) else taps.units(x, start, count, step, always)
    at = e.d("mad.wide.u32", e.r("mad.lo.s32", point, k.channels, start), SIZES[k.y], y)
    given = [e.load(k.y, at, k.unit, u * step * SIZES[k.y]) for u in range(count)]
    found = []
    for pixel in pixels:
        each = [[e.f("mul.rn.f32", a, b) for a, b in zip(*of, strict=True)] for of in zip(pixel, given, strict=True)]
        if own == 1:
            found.append(_tree(e, list(itertools.chain(*each))))
        else:
            found.append(_over_lanes(e, _halved(e, each), own, part))
    first = e.both(there, e.p("setp.eq.s32", part, 0))
    of_places = _back(e, found, taps.factors)
    of_grid = [place.back(ct) for place, ct in zip(taps.places, of_places, strict=True)]
    of_grid = of_grid[::-1] if k.rule.order == "xy" else of_grid
    e.store("f32", e.d("mad.wide.u32", point, 4 * k.axes, result), of_grid, first)
    return e.finished()


def _back(e: Emitter, of_weights: list[str], factors: list[list[str]]) -> list[str]:
    """The cotangents of the places along each axis, of those of the weights: of products, the last axis first."""

    def summed(of: Iterable[str], by: Sequence[str]) -> str:
        products = [e.f("mul.rn.f32", v, w) for v, w in zip(of, by, strict=True)]
        return ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), products)

    found: list[str] = []
    for axis in range(len(factors) - 1, -1, -1):
        own = factors[axis]
        rows = [of_weights[i : i + len(own)] for i in range(0, len(of_weights), len(own))]
        each = of_weights
        if axis:
            outer = e.products(factors[:axis])
            each = [summed(column, outer) for column in zip(*rows, strict=True)]
            of_weights = [summed(row, own) for row in rows]
        found.insert(0, e.f("sub.rn.f32", each[1], each[0]))  # of the weights 1 - f and f
    return found


def _tree(e: Emitter, values: list[str]) -> str:
    """The sum on the tree of `core.trees`."""
    while (n := len(values)) > 1:
        pairs = n // 2
        joined = [e.f("add.rn.f32", a, b) for a, b in zip(values[:pairs], values[n - pairs :], strict=True)]
        values = joined + values[pairs : n - pairs]
    return values[0]


def _halved(e: Emitter, units: list[list[str]]) -> list[str]:
    """A lane's units, of which there are a power of two, added as the tree does."""
    while (half := len(units) // 2) >= 1:
        pairs = zip(units[:half], units[half:], strict=True)
        units = [[e.f("add.rn.f32", a, b) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return units[0]


def _over_lanes(e: Emitter, values: list[str], own: int, part: str) -> str:
    """The sum over lanes and over each one's values, both powers of two, the lanes' halves first."""
    distance, split = own // 2, []
    while distance:
        if len(values) > 1:
            half = len(values) // 2
            high = e.p("setp.ne.s32", e.r("and.b32", part, distance), 0)
            keep = [e.f("selp.f32", b, a, high) for a, b in zip(values[:half], values[half:], strict=True)]
            send = [e.f("selp.f32", a, b, high) for a, b in zip(values[:half], values[half:], strict=True)]
            values = []
            for kept, sent in zip(keep, send, strict=True):
                word = e.r("shfl.sync.bfly.b32", e.r("mov.b32", sent), distance, 31, "0xffffffff")
                values.append(e.f("add.rn.f32", kept, e.f("mov.b32", word)))
            split.append(distance)
        else:
            values = [e.over_lanes(v, distance, distance) for v in values]
        distance //= 2
    for distance in split:
        values = [e.over_lanes(v, distance, distance) for v in values]
    return _tree(e, values)
