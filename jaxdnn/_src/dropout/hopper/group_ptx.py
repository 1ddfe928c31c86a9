"""The arithmetic of the dropout kernels on a group of elements: bias, activation, dropout, residual, and gradients.

A group is 16 bytes of the narrowest operand: four or eight neighbours, which share one or two counters of Philox. Every
sum and product is rounded to nearest on its own (`.rn`, which ptxas does not contract), so that the bits are those of
the definition. In bfloat16 and float16 an activation is read from a table in float32 whose entries are already
multiplied by the scale of kept elements.
"""

import dataclasses

import numpy as np

from jaxdnn._src.dropout.primitive import BLOCK, COUNTERS
from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, real

ZERO = real(0.0)
ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_STREAM = ".L1::no_allocate"  # for data that is read once; the table stays in L1


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call of the kernels.

    Attributes:
      backward: whether dx is computed, from dy and x, or y, from x and the residual.
      arrays: the operands that the call has, of (x, bias, residual) or (dy, x, bias), and their dtypes.
      result: the dtype of y or dx.
      activation: "identity", "relu", "leaky_relu", "clipped_relu", or "table".
      parameter: of "leaky_relu" the slope, of "clipped_relu" the ceiling.
      limit: an element is kept if its random word is at least this; 0 keeps all and draws nothing.
      scale: the factor of kept elements.
      start: the counter of the first group, if it is known when traced; otherwise it is an operand.
      size: elements that one key counts.
      width: the period of the bias, in elements.
      plane, channels: channels first, the elements of a plane and the number of planes; channels last, 0.
      leads: examples under vmap, each of `size` elements; each has its own mask if the key is mapped.
      mapped: those of "bias", "key" and "start" that differ between the examples.
      threads: of a block.
      stages: groups that a thread of a persistent block is processing or copying at a time.
    """

    backward: bool
    arrays: tuple[tuple[str, str], ...]
    result: str
    activation: str
    parameter: float
    limit: int
    scale: float
    size: int
    width: int = 0
    start: int | None = None
    plane: int = 0
    channels: int = 0
    leads: int = 1
    mapped: tuple[str, ...] = ()
    threads: int = 256
    stages: int = 2

    @property
    def dtypes(self) -> dict[str, str]:
        return dict(self.arrays)

    @property
    def elements(self) -> int:
        """Elements of a group."""
        streams = [dtype for name, dtype in self.arrays if name != "bias"]
        return VECTOR_BYTES // min(SIZES[dtype] for dtype in (*streams, self.result))

    @property
    def narrow(self) -> bool:
        """Whether all arrays but the bias have 16 bits."""
        return all(SIZES[dtype] == 2 for dtype in (*(d for name, d in self.arrays if name != "bias"), self.result))

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory for one group of each thread."""
        return self.threads * self.elements * sum(SIZES[dtype] for name, dtype in self.arrays if name != "bias")

    @property
    def groups(self) -> int:
        return self.size // self.elements

    @property
    def blocks_a_lead(self) -> int:
        return -(-self.groups // self.threads)

    @property
    def operands(self) -> tuple[str, ...]:
        """The kernel's operands in order, without the results."""
        drawn = ("key", *(("start",) if self.start is None else ())) if self.limit else ()
        return (*self.dtypes, *drawn, *(("table",) if self.activation == "table" else ()))


class Kernel:
    """The addresses of a kernel's operands, the key, and the arithmetic on a group."""

    def __init__(self, plan: Plan, results: tuple[str, ...], *, shared: bool = False) -> None:
        self.plan, self.e = plan, Emitter()
        names = (*plan.operands, *results)
        self.base = {name: self.e.d("mov.b64", f"${i}") for i, name in enumerate(names)}
        self.shared = self.e.r("mov.b32", f"${len(names)}") if shared else ""
        self.words: dict[str, list[str]] = {}

    def move_to(self, lead: str) -> None:
        """Advances the addresses to the elements of an example under vmap."""
        e, plan = self.e, self.plan
        sizes = {name: plan.size * SIZES[dtype] for name, dtype in plan.arrays if name != "bias"}
        sizes["result"] = plan.size * SIZES[plan.result]
        sizes |= {"bias": plan.width * SIZES[plan.dtypes.get("bias", "f32")]} if "bias" in plan.mapped else {}
        sizes |= {name: 8 for name in ("key", "start") if name in plan.mapped}
        for name, size in sizes.items():
            if name in self.base:
                offset = e.d("mul.lo.s64", e.d("cvt.u64.u32", lead), size)
                self.base[name] = e.d("add.s64", self.base[name], offset)

    def load_key(self) -> None:
        for name in ("key", "start"):
            if name not in self.base:
                continue
            self.words[name] = [self.e.r("ld.global.nc.b32", f"[{self.base[name]}+{4 * i}]") for i in range(2)]

    def load(self, name: str, group: str) -> list[str]:
        """The words of a group of an array."""
        words = self.room(name)
        self.load_into(words, name, group)
        return words

    def room(self, name: str) -> list[str]:
        """New registers for the words of a group."""
        return [self.e.new() for _ in range(self.plan.elements * SIZES[self.plan.dtypes[name]] // 4)]

    def load_into(self, words: list[str], name: str, group: str) -> None:
        e, size = self.e, 4 * len(words)
        where = e.d("mad.wide.u32", group, size, self.base[name])
        count = min(4, len(words))
        how = _STREAM if name != "bias" and size == VECTOR_BYTES else ""
        for i in range(0, len(words), count):
            e.op(f"ld.global.nc{how}.v{count}.b32", words[i : i + count], f"[{where}+{4 * i}]")

    def column(self, group: str) -> str:
        """The group of the bias that belongs to a group."""
        wide = self.plan.width // self.plan.elements
        if wide & (wide - 1) == 0:
            return self.e.r("and.b32", group, wide - 1)
        return self.e.r("rem.u32", group, wide)

    def store(self, group: str, values: list[str], exists: str) -> None:
        e, dtype = self.e, self.plan.result
        words = e.pack(dtype, values)
        where = e.d("mad.wide.u32", group, self.plan.elements * SIZES[dtype], self.base["result"])
        for i in range(0, len(words), 4):
            part = words[i : i + 4]
            e.op(f"st.global.v{len(part)}.b32", f"[{where}+{4 * i}]", part, when=exists)

    def kept(self, group: str) -> list[str]:
        """Predicates, whether each element of a group is kept; none if all are."""
        e, plan = self.e, self.plan
        if not plan.limit:
            return []
        found, counters = [], plan.elements // 4
        first = e.r("shl.b32", group, counters - 1) if counters > 1 else group
        for i in range(counters):
            words = self.draw(e.r("add.s32", first, i) if i else first)
            found += [e.p("setp.ge.u32", word, plan.limit) for word in words]
        return found

    def draw(self, index: str) -> tuple[str, ...]:
        """The four random words of the counter that is `index` after the start."""
        k0, k1 = self.words["key"]
        return _philox(self.e, (*self._counter(index), k0, k1))

    def _counter(self, index: str) -> tuple[str, str]:
        """The two words of start + index, modulo the number of counters of 2^64 elements; the index is below 2^32."""
        e, plan = self.e, self.plan
        if plan.start is None:
            low, high = self.words["start"]
        else:
            low, high = (e.r("mov.b32", word) for word in (plan.start & 0xFFFFFFFF, plan.start >> 32))
            if (plan.start & 0xFFFFFFFF) + plan.size // 4 < 2**32:
                return e.r("add.s32", low, index), high
        total = e.r("add.s32", low, index)
        high = e.r("add.s32", high, e.r("selp.b32", 1, 0, e.p("setp.lt.u32", total, low)))
        known = plan.start is not None and plan.start + plan.size // BLOCK <= COUNTERS
        return total, high if known else e.r("and.b32", high, (COUNTERS - 1) >> 32)

    def value(self, words: dict[str, list[str]], kept: list[str]) -> list[str]:
        """y or dx, in float32."""
        values = self.before_dropout(words)
        if kept:
            values = [self.e.f("selp.f32", v, ZERO, p) for v, p in zip(values, kept, strict=True)]
        return self.after_dropout(values, words)

    def before_dropout(self, words: dict[str, list[str]]) -> list[str]:
        return self._backward(words) if self.plan.backward else self._forward(words)

    def after_dropout(self, values: list[str], words: dict[str, list[str]]) -> list[str]:
        return self._add(values, self._unpack("residual", words)) if "residual" in words else values

    def channel_biases(self, quad: str) -> list[list[str]]:
        """For each of four channels, the words of a group in which all elements are the channel's bias."""
        e, dtype = self.e, self.plan.dtypes["bias"]
        where = e.d("mad.wide.u32", quad, 4 * SIZES[dtype], self.base["bias"])
        words = [e.new() for _ in range(SIZES[dtype])]
        e.op(f"ld.global.nc.v{len(words)}.b32", words, f"[{where}+0]")
        if dtype == "f32":
            return [[word] * self.plan.elements for word in words]
        both = [e.r("prmt.b32", word, word, picks) for word in words for picks in ("0x1010", "0x3232")]
        return [[word] * (self.plan.elements // 2) for word in both]

    def _forward(self, words: dict[str, list[str]]) -> list[str]:
        """The activation of x + bias, times the scale."""
        e, plan = self.e, self.plan
        if plan.activation == "table":
            return self._look_up(words)
        z = self._sum(words)
        match plan.activation:
            case "relu":
                z = [e.f("max.NaN.f32", v, ZERO) for v in z]
            case "leaky_relu":
                low = [e.f("mul.rn.f32", v, real(plan.parameter)) for v in z]
                z = [e.f("selp.f32", v, w, e.p("setp.gt.f32", v, ZERO)) for v, w in zip(z, low, strict=True)]
            case "clipped_relu":
                z = [e.f("min.NaN.f32", e.f("max.NaN.f32", v, ZERO), real(plan.parameter)) for v in z]
        return self._scaled(z)

    def _backward(self, words: dict[str, list[str]]) -> list[str]:
        """dy times the scale times the activation's slope at x + bias."""
        e, plan = self.e, self.plan
        dy = self._unpack("dy", words)
        if plan.activation == "identity":
            return self._scaled(dy)
        slopes = self._look_up(words) if plan.activation == "table" else [self._slope(z) for z in self._sum(words)]
        return [e.f("mul.rn.f32", v, s) for v, s in zip(dy, slopes, strict=True)]

    def _slope(self, z: str) -> str:
        """The slope of a piecewise linear activation times the scale; NaN for NaN."""
        e, plan = self.e, self.plan
        above = real(plan.scale)
        below = real(_product(plan.scale, plan.parameter)) if plan.activation == "leaky_relu" else ZERO
        slope = e.f("selp.f32", above, below, e.p("setp.gt.f32", z, ZERO))
        if plan.activation == "clipped_relu":
            slope = e.f("selp.f32", slope, ZERO, e.p("setp.lt.f32", z, real(plan.parameter)))
        return e.f("selp.f32", z, slope, e.p("setp.nan.f32", z, z))

    def _sum(self, words: dict[str, list[str]]) -> list[str]:
        """x + bias in float32."""
        x = self._unpack("x", words)
        return self._add(x, self._unpack("bias", words)) if "bias" in words else x

    def _look_up(self, words: dict[str, list[str]]) -> list[str]:
        """The table's entries of x + bias, rounded to the type of x."""
        e, dtypes = self.e, self.plan.dtypes
        z = words["x"]
        if "bias" in words and dtypes["bias"] == dtypes["x"]:  # two sums an instruction, rounded once as well
            z = [e.r(f"add.rn.{dtypes['x']}x2", a, b) for a, b in zip(z, words["bias"], strict=True)]
        elif "bias" in words:
            z = e.pack(dtypes["x"], self._sum(words))
        found = []
        for word in z:
            for index in (e.r("and.b32", word, "0xFFFF"), e.r("shr.u32", word, 16)):
                where = e.d("mad.wide.u32", index, 4, self.base["table"])
                found.append(e.f("ld.global.nc.f32", f"[{where}+0]"))
        return found

    def _scaled(self, values: list[str]) -> list[str]:
        scale = self.plan.scale
        return values if scale == 1 else [self.e.f("mul.rn.f32", v, real(scale)) for v in values]

    def _unpack(self, name: str, words: dict[str, list[str]]) -> list[str]:
        return self.e.unpack(self.plan.dtypes[name], words[name])

    def _add(self, a: list[str], b: list[str]) -> list[str]:
        return [self.e.f("add.rn.f32", p, q) for p, q in zip(a, b, strict=True)]


def _philox(e: Emitter, counter: tuple[str, ...]) -> tuple[str, ...]:
    """Four random words. The user's key is part of the counter; Philox's own key is 0, so round keys are constants."""
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        (low0, high0), (low1, high1) = (_halves(e, c, m) for c, m in zip((c0, c2), _MULTIPLIERS, strict=True))
        k0, k1 = ((i * w) % 2**32 for w in _WEYL)
        c0, c1 = e.r("lop3.b32", high1, c1, k0, "0x96"), low1
        c2, c3 = e.r("lop3.b32", high0, c3, k1, "0x96"), low0
    return c0, c1, c2, c3


def _halves(e: Emitter, x: str, multiplier: int) -> tuple[str, str]:
    """The low and the high word of a product."""
    product = e.d("mul.wide.u32", x, multiplier)
    low, high = e.new(), e.new()
    e.op("mov.b64", [low, high], product)
    return low, high


def _product(a: float, b: float) -> float:
    """The product of two float32 numbers, rounded to float32 once; it is exact in float64."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(a * b))
