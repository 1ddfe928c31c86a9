"""The PTX of a tile's scores: caps, biases, slopes, what is seen, and the softmax of rows as it goes on.

In registers S holds products of queries and keys; with a cap, a bias or slopes it holds scores times log2 e.
"""

from jaxdnn._src.attention.hopper.plan import Spread
from jaxdnn._src.attention.hopper.tile_ptx import LN_2, LOG2_E, LOWEST, ONE, ZERO, Rows, Tile, of_row
from jaxdnn._src.hopper.ptx import real

WIDTHS = {"f32": 4, "bf16": 2, "f16": 2, "bool": 1}


class Scores(Tile):
    """Emits a tile's scores and their softmax."""

    def start_rows(self) -> None:
        """Maxima, sums, and bounds of the keys that a row sees."""
        e, problem = self.e, self.problem
        self.factor = problem.scale * LOG2_E if problem.plain else 1.0  # of S, to scores times log2 e
        self.m = Rows(e.f("mov.f32", LOWEST), e.f("mov.f32", LOWEST))
        self.sums = Rows(e.f("mov.f32", ZERO), e.f("mov.f32", ZERO))
        self.alpha, self.minus = (Rows(e.new("f"), e.new("f")) for _ in range(2))
        self._find_bounds()
        if problem.bias or problem.mask or self.plan.mask.segments:
            self.inside = Rows(*(e.r("min.s32", row, problem.queries - 1) for row in self.row))
        if problem.bias:
            self.bias_rows = self._row_places("bias", problem.bias)
        if problem.mask:
            self.mask_rows = self._row_places("mask", problem.mask)
        if self.plan.mask.segments:
            self._find_segments()

    def _find_bounds(self) -> None:
        """low, high: of each row the first key that it sees and the one behind the last, less this thread's column."""
        e, g, mask, problem = self.e, self.given, self.plan.mask, self.problem
        lows, highs = [], []
        for row in self.row:
            place = g["shift"] if problem.packed else e.r("add.s32", row, g["shift"])
            high = g["key_end"]
            if mask.right is not None:
                high = e.r("min.s32", e.r("add.s32", place, mask.right + 1), high)
            if mask.left is not None:
                lows.append(e.r("sub.s32", e.r("sub.s32", place, mask.left), self.column))
            high = e.r("selp.b32", high, 0, e.p("setp.lt.s32", row, g["row_end"]))
            highs.append(e.r("sub.s32", high, self.column))
        self.low, self.high = Rows(*lows) if lows else None, Rows(*highs)

    def _row_places(self, name: str, array: Spread) -> Rows:
        """The addresses of each row's number for this thread's first column of key 0."""
        e, problem = self.e, self.problem
        width, columns = WIDTHS[array.dtype], problem.keys if array.axes[3] else 1
        found = []
        for row in self.inside:
            number = self.given[f"{name}_first"]
            if array.axes[2]:
                number = e.scaled(row, columns, number)
            if array.axes[3]:
                number = e.r("add.s32", number, self.column)
            found.append(e.d("mad.wide.u32", number, width, self.given[name]))
        return Rows(*found)

    def _find_segments(self) -> None:
        e, g = self.e, self.given
        found = []
        for row in self.inside:
            place = e.d("mad.wide.u32", e.scaled(g["image"], self.problem.queries, row), 4, g["query_segments"])
            found.append(e.r("ld.global.nc.b32", f"[{place}]"))
        self.segment = Rows(*found)
        first = e.r("mad.lo.s32", g["image"], self.problem.keys, self.column)
        self.key_segments = e.d("mad.wide.u32", first, 4, g["key_segments"])

    # ---- scores

    def shape_scores(self, *, tail: bool) -> None:
        """Cap, bias and slopes. `tail`: keys of the tile may lie beyond the last one."""
        problem, e = self.problem, self.e
        if problem.plain:
            return
        for row in range(2):
            s = of_row(self.s, row)
            terms = self._terms(row, tail)
            for i, x in enumerate(s):
                if problem.softcap is not None:
                    self._cap(x)
                for n, (value, factor) in enumerate(terms[i]):
                    if n == 0 and problem.softcap is None:
                        scaled = e.f("mul.rn.f32", value, factor)
                        e.op("fma.rn.f32", x, x, real(problem.scale * LOG2_E), scaled)
                    else:
                        e.op("fma.rn.f32", x, value, factor, x)

    def _cap(self, x: str) -> None:
        """x becomes c log2 e tanh(scale x / c), with tanh z = 1 - 2 / (1 + exp 2z)."""
        e, problem = self.e, self.problem
        cap = problem.softcap or 0.0
        e.op("mul.rn.f32", x, x, real(2 * problem.scale / cap * LOG2_E))
        e.op("ex2.approx.ftz.f32", x, x)
        e.op("add.rn.f32", x, x, ONE)
        e.op("rcp.approx.ftz.f32", x, x)
        e.op("fma.rn.f32", x, x, real(-2 * cap * LOG2_E), real(cap * LOG2_E))

    def _terms(self, row: int, tail: bool) -> list[list[tuple[str, str]]]:
        """Of each of a row's scores the products that are added to it: numbers and factors."""
        e, problem, count = self.e, self.problem, self.plan.keys // 4
        found: list[list[tuple[str, str]]] = [[] for _ in range(count)]
        if problem.bias:
            for i, value in enumerate(self._numbers(self.bias_rows[row], problem.bias, tail)):
                found[i].append((value, real(LOG2_E)))
        if problem.slopes:
            place = e.r("sub.s32", e.r("add.s32", self._first_key(), self.column), self.row[row])
            place = e.r("sub.s32", place, self.given["shift" if problem.diagonal else "start"])
            first = e.f("cvt.rn.f32.s32", place)
            slope = e.f("mul.rn.f32", self.given["slope"], real(LOG2_E))
            for i in range(count):
                found[i].append((e.f("add.rn.f32", first, real(float(_column(i)))), slope))
        return found

    def _first_key(self) -> str:
        return self.e.r("mul.lo.s32", self.j, self.plan.keys)

    def _numbers(self, place: str, array: Spread, tail: bool) -> list[str]:
        """A row's numbers of the current tile in float32, or for booleans in words of a byte."""
        e, width, count = self.e, WIDTHS[array.dtype], self.plan.keys // 4
        if not array.axes[3]:
            return [self._number(f"[{place}]", array.dtype)] * count
        first = self._first_key()
        place = e.d("add.s64", place, e.d("mul.wide.u32", first, width))
        left = e.r("sub.s32", e.r("sub.s32", self.problem.keys, first), self.column) if tail else ""
        found = []
        for i in range(count):
            guard = e.p("setp.gt.s32", left, _column(i)) if tail else ""
            found.append(self._number(f"[{place}+{_column(i) * width}]", array.dtype, guard))
        return found

    def _number(self, place: str, dtype: str, when: str = "") -> str:
        e = self.e
        if dtype == "f32":
            value = e.f("mov.f32", ZERO)
            e.op("ld.global.nc.f32", value, place, when=when)
            return value
        if dtype == "bool":
            value = e.r("mov.b32", 0)
            e.op("ld.global.nc.u8", value, place, when=when)
            return value
        half = e.new("h")
        e.op("mov.b16", half, 0)
        e.op("ld.global.nc.b16", half, place, when=when)
        if dtype == "f16":
            return e.f("cvt.f32.f16", half)
        return e.f("mov.b32", e.r("shl.b32", e.r("cvt.u32.u16", half), 16))

    # ---- what is seen

    def mask_scores(self) -> None:
        """Makes the scores of keys that a row does not see -inf."""
        e, start = self.e, self._first_key()
        for row in range(2):
            high = e.r("sub.s32", self.high[row], start)
            low = e.r("sub.s32", self.low[row], start) if self.low else ""
            listed = self._listed(row)
            for i, s in enumerate(of_row(self.s, row)):
                seen = e.p("setp.gt.s32", high, _column(i))
                if low:
                    seen = e.p("setp.le.and.s32", low, _column(i), seen)
                for instruction, a, b in listed:
                    seen = e.p(f"setp.{instruction}", a[i], b if isinstance(b, str) else b[i], seen)
                e.op("selp.f32", s, s, LOWEST, seen)

    def _listed(self, row: int) -> list[tuple[str, list[str], str]]:
        """The comparisons by which arrays say which keys of the tile a row sees: instruction, numbers, a number."""
        found = []
        if self.problem.mask:
            tail = True  # the tile may be the last one
            found.append(("ne.and.u32", self._numbers(self.mask_rows[row], self.problem.mask, tail), "0"))
        if self.plan.mask.segments:
            if row == 0:
                self.keys_of = self._key_segments()
            found.append(("eq.and.s32", self.keys_of, self.segment[row]))
        return found

    def _key_segments(self) -> list[str]:
        """The segments of this thread's keys of the current tile."""
        e, first = self.e, self._first_key()
        place = e.d("add.s64", self.key_segments, e.d("mul.wide.u32", first, 4))
        left = e.r("sub.s32", e.r("sub.s32", self.problem.keys, first), self.column)
        found = []
        for i in range(self.plan.keys // 4):
            value = e.r("mov.b32", 0)
            guard = e.p("setp.gt.s32", left, _column(i))
            e.op("ld.global.nc.b32", value, f"[{place}+{4 * _column(i)}]", when=guard)
            found.append(value)
        return found

    def seen(self, row: int, key: str) -> str:
        """Whether a row sees a key of the current tile that all threads name."""
        e, problem = self.e, self.problem
        place = e.r("add.s32", self._first_key(), key)
        own = e.r("sub.s32", place, self.column)
        found = e.p("setp.lt.s32", own, self.high[row])
        if self.low:
            found = e.p("setp.ge.and.s32", own, self.low[row], found)
        exists = e.p("setp.lt.s32", place, problem.keys)
        if problem.mask:
            at = self.mask_rows[row]
            if problem.mask.axes[3]:
                at = e.d("add.s64", at, e.d("cvt.s64.s32", own))
            value = self._number(f"[{at}]", "bool", exists)
            found = e.p("setp.ne.and.u32", value, 0, found)
        if self.plan.mask.segments:
            at = e.d("add.s64", self.key_segments, e.d("mul.wide.s32", own, 4))
            value = e.r("mov.b32", 0)
            e.op("ld.global.nc.b32", value, f"[{at}]", when=exists)
            found = e.p("setp.eq.and.s32", value, self.segment[row], found)
        return found

    # ---- softmax

    def softmax(self) -> None:
        """New maxima m, the factor alpha of what came before, exp(S - m) in place of S, and their sums l."""
        e, c = self.e, real(self.factor)
        tops = [self._top(of_row(self.s, row)) for row in range(2)]
        for top, m, minus, alpha in zip(tops, self.m, self.minus, self.alpha, strict=True):
            new = e.f("max.f32", m, e.over_lanes(top, 2, instruction="max.f32"))
            # Of a row that has seen nothing: exp(-inf - 0) is 0. Where m stays the factor is 1, whatever m c is.
            known = e.f("selp.f32", ZERO, new, e.p("setp.eq.f32", new, LOWEST))
            e.op("neg.f32", minus, e.f("mul.rn.f32", known, c))
            e.op("ex2.approx.ftz.f32", alpha, e.f("mul.rn.f32", e.f("sub.rn.f32", m, known), c))
            e.op("mov.f32", m, new)
        for row, (minus, alpha, total) in enumerate(zip(self.minus, self.alpha, self.sums, strict=True)):
            sums: list[str] = []
            for i, x in enumerate(of_row(self.s, row)):
                e.op("fma.rn.f32", x, x, c, minus)
                e.op("ex2.approx.ftz.f32", x, x)
                if i < 2:
                    sums.append(x)
                else:
                    sums[i % 2] = e.f("add.rn.f32", sums[i % 2], x)
            e.op("fma.rn.f32", total, total, alpha, e.f("add.rn.f32", *sums))

    def _top(self, s: list[str]) -> str:
        chains = s[:2]
        for i in range(2, len(s), 2):
            chains = [self.e.f("max.f32", chains[k], s[i + k]) for k in range(2)]
        return self.e.f("max.f32", *chains)

    def round_weights(self) -> None:
        """P, in the operands' dtype."""
        for i, p in enumerate(self.p):
            self.e.op(f"cvt.rn.{self.plan.dtype}x2.f32", p, self.s[2 * i + 1], self.s[2 * i])

    def rescale(self) -> None:
        for row, alpha in enumerate(self.alpha):
            for o in of_row(self.o, row):
                self.e.op("mul.rn.f32", o, o, alpha)

    def totals(self) -> list[tuple[str, str]]:
        """Of each row the factor that makes its results weighted means, and the logarithm of its sum."""
        e, found = self.e, []
        for m, own in zip(self.m, self.sums, strict=True):
            total, share, unit = e.over_lanes(own, 2), ONE, self.problem.scale if self.problem.plain else LN_2
            if self.problem.sinks:
                scaled = e.f("mul.rn.f32", m, real(self.factor))
                sink = e.f("mul.rn.f32", self.given["sink"], real(LOG2_E))
                top = e.f("max.f32", scaled, sink)
                low = e.f("selp.f32", ZERO, top, e.p("setp.eq.f32", top, LOWEST))
                share = e.f("ex2.approx.ftz.f32", e.f("sub.rn.f32", scaled, low))
                added = e.f("ex2.approx.ftz.f32", e.f("sub.rn.f32", sink, low))
                total, m, unit = e.f("fma.rn.f32", total, share, added), top, LN_2
            log = e.f("mul.rn.f32", e.f("lg2.approx.f32", total), real(LN_2))
            whole = e.f("selp.f32", ONE, total, e.p("setp.eq.f32", total, ZERO))
            inverse = e.f("rcp.rn.f32", whole)
            if self.problem.sinks:
                inverse = e.f("mul.rn.f32", inverse, share)
            found.append((inverse, e.f("fma.rn.f32", m, real(unit), log)))
        return found


def _column(i: int) -> int:
    """The column of a row's register number i, less the thread's first column."""
    return 8 * (i // 2) + i % 2
