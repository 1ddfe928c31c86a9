"""The PTX of the pooling kernels: independent threads, from device memory through registers to device memory.

Pooling moves many bytes and computes little, so these kernels use neither shared memory nor barriers. A thread
processes 16 bytes of neighbouring channels (8 of 16 bits or 4 of float32) by one load and one store, so that the
accesses of a warp are whole cache lines. The inputs that overlapping windows share come from the caches.

Forward, a thread computes a few outputs of one column, one below the other, and loads each input row once for all of
them. It compares from the last tap to the first and takes the later comparison if values are equal, so that the result
is the first of equal maxima. Comparisons return masks of 16 or 32 bits, which select values and taps. Backward, a
thread computes one cell of dx, of stride by stride elements, which belong to the windows of the same few outputs: it
loads dy and taps once.

Order of additions: that of `jaxdnn._src.pool.xla.engine`, so that the bits are the same.

It is PTX text, which an empty Pallas kernel embeds: every thread has windows of its own, clipped at the edges, and
Pallas' arrays in registers have neither an address nor a guard for each lane. Plain Pallas was not measured.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._src.hopper import ptx
from jaxdnn._src.hopper.ptx import real

THREADS = 128  # of a block
KINDS = {"bf16": "bf16x2", "f16": "f16x2", "f32": "f32"}
LOWEST = {"bf16": "0xff80ff80", "f16": "0xfc00fc00", "f32": "0xff800000"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pooling of (n, h, w, c), channels last; pairs are for the rows ("down") and the columns ("across").

    Attributes:
      dtype: "bf16", "f16" or "f32".
      images: the product of the axes before the spatial ones.
      vectors: 16-byte vectors of channels.
      size, out: sizes of x and of y.
      counted: for averages whose counts differ, the positions [from, to) that are counted, down and across.
    """

    dtype: str
    images: int
    vectors: int
    size: tuple[int, int]
    out: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    low: tuple[int, int]
    dilation: tuple[int, int]
    counted: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def wide(self) -> bool:
        """Whether a register has one channel; otherwise it has two."""
        return self.dtype == "f32"

    def padded(self, axis: int) -> bool:
        """Whether some window reaches beyond x."""
        last = (self.out[axis] - 1) * self.stride[axis] + (self.taps[axis] - 1) * self.dilation[axis] - self.low[axis]
        return self.low[axis] > 0 or last >= self.size[axis]

    def phases(self, axis: int) -> list[list[tuple[int, int]]]:
        """For each a < stride: (tap, shift) of the outputs i + shift whose window has element a + i * stride of dx."""
        u, d, low = self.stride[axis], self.dilation[axis], self.low[axis]
        reach = ([(r, divmod(a + low - r * d, u)) for r in range(self.taps[axis])] for a in range(u))
        return [[(r, shift) for r, (shift, rest) in phase if rest == 0] for phase in reach]

    def forward_threads(self, rows: int) -> int:
        return self.images * -(-self.out[0] // rows) * self.out[1] * self.vectors

    def backward_threads(self) -> int:
        return self.images * math.prod(-(-h // u) for h, u in zip(self.size, self.stride, strict=True)) * self.vectors


class Emitter(ptx.Emitter):
    """The emitter with the instructions that pooling needs besides."""

    def quotient(self, value: str, divisor: int) -> tuple[str, str]:
        """value // divisor and value % divisor."""
        if divisor == 1:
            return value, self.r("mov.b32", 0)
        quotient = self.r("div.u32", value, divisor)
        return quotient, self.r("sub.u32", value, self.r("mul.lo.u32", quotient, divisor))

    @contextlib.contextmanager
    def rolled(self, count: int) -> Iterator[str]:
        """A loop from 0 to count - 1 that ptxas does not unroll, for code that rarely runs."""
        head, index = self.label(), self.r("mov.b32", 0)
        self.place(head)
        self.op('.pragma "nounroll"')
        yield index
        self.op("add.s32", index, index, 1)
        self.op("bra", head, when=self.p("setp.lt.s32", index, count))

    def lop3(self, a: str, b: object, c: str, table: int) -> str:
        return self.r("lop3.b32", a, b, c, hex(table))

    def chosen(self, mask: str, a: object, b: str) -> str:
        """a where the mask has ones, else b."""
        return self.lop3(mask, a, b, 0xCA)

    def load(self, words: int, place: str, when: str, fill: str) -> list[str]:
        """`words` registers from device memory; `fill` where the predicate is false."""
        names = [self.new() for _ in range(words)]
        if when:
            for name in names:
                self.op("mov.b32", name, fill)
        width = f".v{words}" if words > 1 else ""
        self.op(f"ld.global.nc{width}.b32", names if words > 1 else names[0], place, when=when)
        return names

    def store(self, names: Sequence[str], place: str, when: str) -> None:
        width = f".v{len(names)}" if len(names) > 1 else ""
        self.op(f"st.global{width}.b32", place, list(names) if len(names) > 1 else names[0], when=when)


def address(base: str, offset: int) -> str:
    return f"[{base}+{offset}]" if offset >= 0 else f"[{base}+-{-offset}]"


def pointer(e: Emitter, operand: int, index: str, size: int) -> str:
    """The global address of the element `index`, a signed number, of an operand whose elements take `size` bytes."""
    base = e.d("cvta.to.global.u64", f"${operand}")
    return e.d("mad.wide.s32", index, size, base)


def _thread(e: Emitter, count: int) -> tuple[str, str]:
    """The thread's number in the grid, and a predicate, whether it is below `count`."""
    block, thread = e.r("mov.u32", "%ctaid.x"), e.r("mov.u32", "%tid.x")
    number = e.r("mad.lo.s32", block, THREADS, thread)
    return number, e.p("setp.lt.u32", number, count)


def flat_index(e: Emitter, image: str, row: str, column: str, vector: str, size: tuple[int, int], vectors: int) -> str:
    line = e.r("mad.lo.s32", image, size[0], row)
    pixel = e.r("mad.lo.s32", line, size[1], column)
    return e.r("mad.lo.s32", pixel, vectors, vector)


def both(e: Emitter, *predicates: str) -> str:
    found = [p for p in predicates if p]
    while len(found) > 1:
        found = [e.p("and.pred", found[0], found[1]), *found[2:]]
    return found[0] if found else ""


def pairwise(e: Emitter, items: list[list[str]]) -> list[str]:
    """Adds neighbours, then neighbouring sums, and so on; an odd one out is passed on unchanged."""
    while len(items) > 1:
        joined = [
            [e.f("add.rn.f32", x, y) for x, y in zip(a, b, strict=True)]
            for a, b in zip(items[::2], items[1::2], strict=False)
        ]
        items = joined + items[2 * len(joined) :]
    return items[0]


def count(e: Emitter, k: Shape, axis: int, output: str) -> str:
    """How many taps of an output's window are counted along an axis; at least one."""
    low, high = (k.counted or ((0, 0), (0, 0)))[axis]
    start = e.r("mad.lo.s32", output, k.stride[axis], -k.low[axis] - low)
    total = e.r("mov.b32", 0)
    for r in range(k.taps[axis]):
        inside = e.p("setp.lt.u32", e.r("add.s32", start, r * k.dilation[axis]), high - low)
        total = e.r("add.u32", total, e.r("selp.b32", "1", "0", inside))
    return e.r("max.u32", total, 1)


def reciprocal(e: Emitter, down: str, across: str) -> str:
    """1 / (down * across), rounded to nearest."""
    return e.f("div.rn.f32", real(1.0), e.f("cvt.rn.f32.u32", e.r("mul.lo.u32", down, across)))


# ---- forward ---------------------------------------------------------------------------------------------------------


class _Inputs:
    """The inputs of a thread's outputs, each loaded once, and predicates, whether they are in x."""

    def __init__(self, e: Emitter, k: Shape, operand: int, rows: int, fill: str) -> None:
        self.e, self.k, self.fill = e, k, fill
        number, self.works = _thread(e, k.forward_threads(rows))
        rest, self.vector = e.quotient(number, k.vectors)
        rest, self.column = e.quotient(rest, k.out[1])
        self.image, cell = e.quotient(rest, -(-k.out[0] // rows))
        self.row = e.r("mul.lo.u32", cell, rows)
        down, across = self.start = [
            e.r("mad.lo.s32", at, stride, -low)
            for at, stride, low in zip((self.row, self.column), k.stride, k.low, strict=True)
        ]
        self.base = pointer(e, operand, flat_index(e, self.image, down, across, self.vector, k.size, k.vectors), 16)
        self._inside: dict[tuple[int, int], str] = {}
        self._held: dict[tuple[int, int], list[str]] = {}
        self._valid: dict[tuple[int, int], str] = {}
        self._ragged = k.padded(0) or k.out[0] % rows > 0

    def _along(self, axis: int, offset: int) -> str:
        """Whether the element at `offset` from the start is in x."""
        if not (self._ragged if axis == 0 else self.k.padded(1)):
            return ""
        if (axis, offset) not in self._inside:
            at = self.e.r("add.s32", self.start[axis], offset)
            self._inside[axis, offset] = self.e.p("setp.lt.u32", at, self.k.size[axis])
        return self._inside[axis, offset]

    def inside(self, down: int, across: int) -> str:
        if (down, across) not in self._valid:
            found = both(self.e, self._along(0, down), self._along(1, across))
            self._valid[down, across] = found
        return self._valid[down, across]

    def get(self, down: int, across: int) -> list[str]:
        if (down, across) not in self._held:
            place = address(self.base, 16 * self.k.vectors * (down * self.k.size[1] + across))
            when = both(self.e, self.works, self.inside(down, across))
            self._held[down, across] = self.e.load(4, place, when, self.fill)
        return self._held[down, across]

    def result(self, operand: int, size: int) -> str:
        at = flat_index(self.e, self.image, self.row, self.column, self.vector, self.k.out, self.k.vectors)
        return pointer(self.e, operand, at, size)

    def stores(self, j: int) -> str:
        """Whether the thread's j-th output exists."""
        if j == 0:
            return self.works
        row = self.e.p("setp.lt.u32", self.e.r("add.u32", self.row, j), self.k.out[0])
        return both(self.e, self.works, row)


def maximum(k: Shape, *, indices: bool, rows: int) -> str:
    """Operands: x, y and, with indices, taps (uint8)."""
    e = Emitter()
    x = _Inputs(e, k, 0, rows, LOWEST[k.dtype])
    y = x.result(1, 16)
    taps = x.result(2, 4 if k.wide else 8) if indices else ""
    places = list(enumerate(itertools.product(range(k.taps[0]), range(k.taps[1]))))
    for j in range(rows):
        best: list[str] = []
        tap: list[str] = []
        for t, (r, s) in reversed(places):
            at = j * k.stride[0] + r * k.dilation[0], s * k.dilation[1]
            number = str(t if k.wide else t * 0x10001)
            best, tap = compare(e, k, best, tap, x.get(*at), number, x.inside(*at) if indices else "")
        when = x.stores(j)
        e.store(best, address(y, 16 * k.vectors * j * k.out[1]), when)
        if indices:
            width = 4 if k.wide else 8
            e.store(as_bytes(e, k, tap), address(taps, width * k.vectors * j * k.out[1]), when)
    return e.text()


def compare(
    e: Emitter, k: Shape, best: list[str], tap: list[str], values: list[str], number: str, valid: str
) -> tuple[list[str], list[str]]:
    """The larger of best and values (values, if they are equal or NaN), and its tap; `number` is the tap of values."""
    if not best:
        return values, [number] * len(values)
    mask = e.r("selp.b32", "0xffffffff", "0", valid) if valid else ""
    kind = KINDS[k.dtype]
    found: tuple[list[str], list[str]] = ([], [])
    for v, b, i in zip(values, best, tap, strict=True):
        more, nan = e.r(f"set.ge.u32.{kind}", v, b), e.r(f"set.nan.u32.{kind}", v, v)
        takes = e.lop3(more, nan, mask, 0xA8) if mask else e.r("or.b32", more, nan)  # (a | b) & c
        found[0].append(e.chosen(takes, v, b))
        found[1].append(e.chosen(takes, number, i))
    return found


def as_bytes(e: Emitter, k: Shape, lanes: list[str]) -> list[str]:
    """Taps of 16 or 32 bits each, as bytes."""
    if not k.wide:
        return [e.r("prmt.b32", a, b, "0x6420") for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    pairs = [e.r("prmt.b32", a, b, "0x0040") for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    return [e.r("prmt.b32", pairs[0], pairs[1], "0x5410")]


def average(k: Shape, *, factor: float | None, rows: int) -> str:
    """Sums over windows times a factor or, where `k` says what is counted, 1 / count; operands: x and y."""
    e = Emitter()
    x = _Inputs(e, k, 0, rows, "0")
    y = x.result(1, 16)
    lines: dict[int, list[str]] = {}
    values: dict[tuple[int, int], list[str]] = {}

    def line(down: int) -> list[str]:
        if down not in lines:
            for s in range(k.taps[1]):
                at = down, s * k.dilation[1]
                values[at] = e.unpack(k.dtype, x.get(*at))
            lines[down] = pairwise(e, [values[down, s * k.dilation[1]] for s in range(k.taps[1])])
        return lines[down]

    columns = count(e, k, 1, x.column) if k.counted else ""
    for j in range(rows):
        total = pairwise(e, [line(j * k.stride[0] + r * k.dilation[0]) for r in range(k.taps[0])])
        scale = None if factor is None else real(factor)
        if k.counted:
            scale = reciprocal(e, count(e, k, 0, e.r("add.u32", x.row, j)), columns)
        total = total if scale is None else [e.f("mul.rn.f32", v, scale) for v in total]
        e.store(e.pack(k.dtype, total), address(y, 16 * k.vectors * j * k.out[1]), x.stores(j))
    return e.text()


# ---- backward --------------------------------------------------------------------------------------------------------


class _Cell:
    """The outputs with elements of a cell of dx in their windows, each loaded once; dy is zero where there is none."""

    def __init__(self, e: Emitter, k: Shape, taps: bool) -> None:
        self.e, self.k = e, k
        number, self.works = _thread(e, k.backward_threads())
        cells = [-(-h // u) for h, u in zip(k.size, k.stride, strict=True)]
        rest, self.vector = e.quotient(number, k.vectors)
        rest, column = e.quotient(rest, cells[1])
        self.image, row = e.quotient(rest, cells[0])
        self.at = row, column
        index = flat_index(e, self.image, row, column, self.vector, k.out, k.vectors)
        self.dy = pointer(e, 0, index, 16)
        self.taps = pointer(e, 1, index, 4 if k.wide else 8) if taps else ""
        self._held: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
        self._inside: dict[tuple[int, int], str] = {}

    def _along(self, axis: int, shift: int) -> str:
        if (axis, shift) not in self._inside:
            at = self.e.r("add.s32", self.at[axis], shift)
            self._inside[axis, shift] = self.e.p("setp.lt.u32", at, self.k.out[axis])
        return self._inside[axis, shift]

    def get(self, down: int, across: int) -> tuple[list[str], list[str]]:
        """dy, and the taps, widened to the bits of dy's elements."""
        if (down, across) not in self._held:
            e, k = self.e, self.k
            when = both(e, self.works, self._along(0, down), self._along(1, across))
            offset = k.vectors * (down * k.out[1] + across)
            dy = e.load(4, address(self.dy, 16 * offset), when, "0")
            taps: list[str] = []
            if self.taps:
                words = e.load(1 if k.wide else 2, address(self.taps, (4 if k.wide else 8) * offset), when, "0")
                picks = [f"0x444{i}" for i in range(4)] if k.wide else ["0x4140", "0x4342"]
                taps = [e.r("prmt.b32", word, "0", pick) for word in words for pick in picks]
            self._held[down, across] = dy, taps
        return self._held[down, across]

    def write(self, values: dict[tuple[int, int], list[str]]) -> None:
        """Stores the elements (a, b) of the cell."""
        e, k = self.e, self.k
        row, column = (e.r("mul.lo.u32", at, u) for at, u in zip(self.at, k.stride, strict=True))
        operand = 2 if self.taps else 1
        dx = pointer(e, operand, flat_index(e, self.image, row, column, self.vector, k.size, k.vectors), 16)
        ragged = [h % u > 0 for h, u in zip(k.size, k.stride, strict=True)]
        for (a, b), words in values.items():
            inside = [
                e.p("setp.lt.u32", e.r("add.u32", start, shift), size) if cut and shift else ""
                for start, shift, size, cut in zip((row, column), (a, b), k.size, ragged, strict=True)
            ]
            place = address(dx, 16 * k.vectors * (a * k.size[1] + b))
            e.store(words, place, both(e, self.works, *inside))


def maximum_backward(k: Shape) -> str:
    """Operands: dy, taps (uint8), dx."""
    e = Emitter()
    cell = _Cell(e, k, True)
    compare = "set.eq.u32.u32" if k.wide else "set.eq.u32.f16x2"  # small integers are subnormal float16 numbers
    values = {}
    for (a, rows), (b, columns) in itertools.product(*(enumerate(k.phases(axis)) for axis in (0, 1))):
        terms = []
        for (r, down), (s, across) in itertools.product(rows, columns):
            dy, taps = cell.get(down, across)
            t = (r * k.taps[1] + s) * (1 if k.wide else 0x10001)
            number = e.r("mov.b32", t)
            terms.append([e.r("and.b32", v, e.r(compare, i, number)) for v, i in zip(dy, taps, strict=True)])
        if len(terms) < 2:
            kind, zero = KINDS[k.dtype], e.r("mov.b32", 0)
            # -0 becomes +0.
            values[a, b] = (
                [e.r("and.b32", v, e.r(f"set.neu.u32.{kind}", v, zero)) for v in terms[0]] if terms else [zero] * 4
            )
            continue
        total = [e.f("add.rn.f32", v, real(0.0)) for v in e.unpack(k.dtype, terms[0])]
        for term in terms[1:]:
            total = [e.f("add.rn.f32", x, y) for x, y in zip(total, e.unpack(k.dtype, term), strict=True)]
        values[a, b] = e.pack(k.dtype, total)
    cell.write(values)
    return e.text()


def average_backward(k: Shape, *, factor: float | None) -> str:
    """Sums of dy times a factor or, where counts differ, of dy times 1 / count; operands: dy, dx."""
    e = Emitter()
    cell = _Cell(e, k, False)
    floats: dict[tuple[int, int], list[str]] = {}

    def dy(down: int, across: int) -> list[str]:
        if (down, across) not in floats:
            found = e.unpack(k.dtype, cell.get(down, across)[0])
            if k.counted:
                shifted = (e.r("add.s32", at, shift) for at, shift in zip(cell.at, (down, across), strict=True))
                scale = reciprocal(e, *(count(e, k, axis, at) for axis, at in enumerate(shifted)))
                found = [e.f("mul.rn.f32", v, scale) for v in found]
            floats[down, across] = found
        return floats[down, across]

    values = {}
    line: Callable[[int, list[tuple[int, int]]], list[str]]
    line = lambda down, columns: pairwise(e, [dy(down, across) for _, across in columns])
    for (a, rows), (b, columns) in itertools.product(*(enumerate(k.phases(axis)) for axis in (0, 1))):
        if not rows or not columns:
            values[a, b] = [e.r("mov.b32", 0)] * 4
            continue
        total = pairwise(e, [line(down, columns) for _, down in rows])
        total = total if factor is None else [e.f("mul.rn.f32", v, real(factor)) for v in total]
        values[a, b] = e.pack(k.dtype, total)
    cell.write(values)
    return e.text()
