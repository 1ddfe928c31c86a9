"""What the kernels of sampling share, as PTX text: a call in numbers, where points lie, and loads and stores of rows.

Each product and each sum is one instruction that rounds to nearest, in the order in which `taps` states them, so that
places and weights have the bits of the formula.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence

from jaxdnn._src.hopper import ptx
from jaxdnn._src.hopper.ptx import SIZES, real
from jaxdnn._src.sampling.taps import Rule

THREADS = 128  # of a block
WHOLE = 4  # channels of a pixel that one thread has whatever their number is
ONE, ZERO = real(1.0), real(0.0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call: images of some sizes, so many points of each, and the dtypes of images x and of samples y."""

    rule: Rule
    images: int
    sizes: tuple[int, ...]
    points: int
    channels: int
    x: str
    y: str

    @property
    def axes(self) -> int:
        return len(self.sizes)

    @property
    def pixels(self) -> int:
        return math.prod(self.sizes)

    @property
    def each(self) -> int:
        """Taps along an axis."""
        return 1 if self.rule.mode == "nearest" else 2

    @property
    def taps(self) -> int:
        return self.each**self.axes

    @property
    def unit(self) -> int:
        """Neighbouring channels that a thread loads at once: 16 bytes of the wider array where their number allows."""
        if self.channels <= WHOLE:
            return self.channels
        most = ptx.VECTOR_BYTES // max(SIZES[self.x], SIZES[self.y])
        return next(n for n in (8, 4, 2, 1) if n <= most and self.channels % n == 0)

    @property
    def units(self) -> int:
        return self.channels // self.unit

    @property
    def cells(self) -> tuple[int, ...]:
        """Along each axis, between how many pairs of pixels, one of which may be outside, a point may lie."""
        return tuple(n + self.each - 1 for n in self.sizes)

    @property
    def keys(self) -> int:
        """The cells of all images."""
        return self.images * math.prod(self.cells)


@dataclasses.dataclass(frozen=True)
class Place:
    """A number that is made of a coordinate, and what the coordinate's cotangent is, given that of the number."""

    value: str
    back: Callable[[str], str] = lambda ct: ct

    def then(self, value: str, back: Callable[[str], str]) -> "Place":
        return Place(value, lambda ct: self.back(back(ct)))


class Emitter(ptx.Emitter):
    """The emitter with what sampling needs besides."""

    def __init__(self, k: Problem) -> None:
        super().__init__()
        self.k = k
        self.end = self.label()
        self.variables: list[str] = []  # declarations

    def number(self, count: int) -> str:
        """The thread's number; the threads beyond `count` end."""
        number = self.r("mad.lo.s32", self.r("mov.u32", "%ctaid.x"), THREADS, self.r("mov.u32", "%tid.x"))
        self.op("bra", self.end, when=self.p("setp.ge.u32", number, count))
        return number

    def finished(self) -> str:
        self.place(self.end)
        return self.text()

    def declare(self, variable: str) -> None:
        self.variables.append(variable)

    def text(self) -> str:
        return "\n".join(["{", *self.variables, super().text(), "}"])

    def divided(self, value: str, by: int) -> tuple[str, str]:
        """The quotient and the remainder of a number that is not negative."""
        if by == 1:
            return value, self.r("mov.b32", 0)
        quotient = self.r("div.u32", value, by)
        return quotient, self.r("sub.s32", value, self.r("mul.lo.s32", quotient, by))

    def operand(self, number: int) -> str:
        return self.d("mov.b64", f"${number}")

    # ---- points ------------------------------------------------------------------------------------------------------

    def places(self, grid: str, point: str) -> list["Place"]:
        """A point's places p within the image, along the image's axes in their order."""
        k, at = self.k, self.d("mad.wide.u32", point, 4 * self.k.axes, grid)
        if k.axes == 2:
            given = [self.new("f"), self.new("f")]
            self.op("ld.global.nc.v2.b32", given, f"[{at}+0]")
        else:
            given = [self.new("f") for _ in k.sizes]
            for i, name in enumerate(given):
                self.op("ld.global.nc.b32", name, f"[{at}+{4 * i}]")
        given = given[::-1] if k.rule.order == "xy" else given
        return [self.inside(self.pixel(Place(g), n), n) for g, n in zip(given, k.sizes, strict=True)]

    def pixel(self, g: "Place", size: int) -> "Place":
        """A coordinate in pixels; `Rule._place`."""
        rule = self.k.rule
        half = lambda v: self.f("mul.rn.f32", v, real(0.5))
        if rule.coordinates == "normalised":
            plus = g.then(self.f("add.rn.f32", g.value, ONE), lambda ct: ct)
            times = lambda v: self.f("mul.rn.f32", v, real(size - 1 if rule.align_corners else size))
            if rule.align_corners:
                g = plus.then(times(half(plus.value)), lambda ct: half(times(ct)))
            else:
                g = plus.then(half(self.f("sub.rn.f32", times(plus.value), ONE)), lambda ct: times(half(ct)))
        return g if rule.padding == "reflection" else self.clip(g, -3, size + 2)

    def clip(self, v: "Place", low: float, high: float) -> "Place":
        """v within the two, with derivative 0 at them; NaN stays."""
        below, above = (self.p(f"setp.{way}.f32", v.value, real(n)) for way, n in (("le", low), ("ge", high)))
        pick = lambda a, b, c: self.f("selp.f32", a, self.f("selp.f32", b, c, above), below)
        return v.then(pick(real(low), real(high), v.value), lambda ct: pick(ZERO, ZERO, ct))

    def inside(self, v: "Place", size: int) -> "Place":
        """A place brought into the image; `Rule._inside`."""
        rule = self.k.rule
        if rule.padding == "zeros":
            return v
        if rule.padding == "reflection":
            low, length = (0.0, size - 1) if rule.align_corners else (-0.5, size)
            if length == 0:
                return v.then(self.f("sub.rn.f32", v.value, v.value), lambda ct: ZERO)
            span = real(length)
            from_low = self.f("sub.rn.f32", v.value, real(low))
            distance = self.f("abs.f32", from_low)
            flips = self.f("cvt.rmi.f32.f32", self.f("div.rn.f32", distance, span))
            rest = self.f("sub.rn.f32", distance, self.f("mul.rn.f32", flips, span))
            half = self.f("mul.rn.f32", flips, real(0.5))
            even = self.p("setp.eq.f32", self.f("cvt.rmi.f32.f32", half), half)
            found = self.f("add.rn.f32", self.f("selp.f32", rest, self.f("sub.rn.f32", span, rest), even), real(low))

            def back(ct: str) -> str:
                of_rest = self.f("selp.f32", ct, self.f("sub.rn.f32", ZERO, ct), even)
                sign = self.f("selp.f32", ONE, from_low, self.p("setp.gt.f32", from_low, ZERO))
                sign = self.f("selp.f32", real(-1.0), sign, self.p("setp.lt.f32", from_low, ZERO))
                return self.f("mul.rn.f32", of_rest, sign)

            v = v.then(found, back)
        return self.clip(v, 0, size - 1)

    def fractions(self, p: str) -> tuple[str, list[str]]:
        """The first tap's pixel along an axis, as a float, and the weights of the taps."""
        if self.k.each == 1:
            return self.f("cvt.rni.f32.f32", p), [self.f("selp.f32", p, ONE, self.p("setp.nan.f32", p, p))]
        low = self.f("cvt.rmi.f32.f32", p)
        f = self.f("sub.rn.f32", p, low)
        return low, [self.f("sub.rn.f32", ONE, f), f]

    def first(self, low: str, p: str) -> str:
        """That pixel's number; far outside where the place is NaN."""
        nan = self.p("setp.nan.f32", p, p)
        return self.r("selp.b32", "-8", self.r("cvt.rzi.s32.f32", low), nan)

    def products(self, weights: Sequence[Sequence[str]]) -> list[str]:
        """The weights of all taps, row-major, of those along each axis."""
        return ft.reduce(lambda a, b: [self.f("mul.rn.f32", v, w) for v in a for w in b], map(list, weights))

    # ---- rows --------------------------------------------------------------------------------------------------------

    def load(self, dtype: str, at: str, count: int, offset: int = 0, when: str = "") -> list[str]:
        """`count` neighbouring numbers in float32, of which the first one's address is a multiple of their size as far
        as 16 bytes; zeros where `when` does not hold."""
        size = SIZES[dtype]
        width = math.gcd(count * size, ptx.VECTOR_BYTES)
        values: list[str] = []
        for start in range(offset, offset + count * size, width):
            place = f"[{at}+{start}]"
            if width == 2:
                half = self.new("h")
                if when:
                    self.op("mov.b16", half, 0)
                self.op("ld.global.nc.b16", half, place, when=when)
                values += self.widened(dtype, half)
                continue
            words = [self.r("mov.b32", 0) if when else self.new() for _ in range(width // 4)]
            vector = f"v{len(words)}." if len(words) > 1 else ""
            self.op(f"ld.global.nc.{vector}b32", words if len(words) > 1 else words[0], place, when=when)
            values += self.unpack(dtype, words)
        return values

    def widened(self, dtype: str, half: str) -> list[str]:
        if dtype == "f16":
            return [self.f("cvt.f32.f16", half)]
        return [self.f("mov.b32", self.r("shl.b32", self.r("cvt.u32.u16", half), 16))]

    def store(self, dtype: str, at: str, values: Sequence[str], when: str = "") -> None:
        """Stores float32 numbers, each rounded to the dtype, at an address likewise."""
        size = SIZES[dtype]
        width = math.gcd(len(values) * size, ptx.VECTOR_BYTES)
        for i in range(0, len(values), width // size):
            part, place = values[i : i + width // size], f"[{at}+{i * size}]"
            if width == 2:
                self.store_rounded(dtype, place, part[0], when)
                continue
            words = self.pack(dtype, part)
            vector = f"v{len(words)}." if len(words) > 1 else ""
            self.op(f"st.global.{vector}b32", place, words if len(words) > 1 else words[0], when=when)
