"""How the kernels of batch normalisation go down the columns of arrays (rows, columns): PTX that they share.

A vector is 16 bytes of a row. A thread has one place among the vectors of a row and goes down the rows, a chunk of them
at a time; the threads of a block cover `width` vectors of so many `lines`. A tile is lines x chunk rows, and a split
takes every `splits`-th of them, from the last row to the first: what is read last is what the next kernel reads first,
and still in the second-level cache. Then what the threads have is joined over the lines of a block, the upper half of
the lines onto the lower until one is left. The order is of the plan alone.
"""

import abc
import dataclasses
from collections.abc import Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, real

ZERO = real(0.0)
Words = Sequence[Sequence[str]]  # of a chunk: for every row the registers of its vector


@dataclasses.dataclass(frozen=True)
class ColumnPlan:
    """How columns are dealt out.

    Attributes:
      rows, columns: of x as the kernel sees it; the bytes of a row are a multiple of 16.
      fold: how many rows of the caller's x make one: column c of x is column c + i columns / fold here, for all i.
      dtype: "bf16", "f16" or "f32".
      threads: of a block.
      width: vectors of a row that a block covers.
      chunk: rows that a thread loads before it uses the first.
      stages: chunks that a thread has under way.
      splits: blocks that share the rows of a column; at most as many as there are whole tiles, and at least one.
    """

    rows: int
    columns: int
    fold: int
    dtype: str
    threads: int
    width: int
    chunk: int
    stages: int
    splits: int

    @property
    def elements(self) -> int:
        """Of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.columns * SIZES[self.dtype]

    @property
    def row_vectors(self) -> int:
        return self.row_bytes // VECTOR_BYTES

    @property
    def lines(self) -> int:
        """Rows that the threads of a block cover at a time; some threads may be left over, and copy the last line."""
        return self.threads // self.width

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.lines * self.chunk

    @property
    def full(self) -> int:
        """Tiles that are whole."""
        return self.rows // self.tile

    @property
    def rest(self) -> int:
        """Rows behind the last whole tile; they belong to split `full` mod `splits`."""
        return self.rows % self.tile

    @property
    def across(self) -> int:
        """Blocks beside each other that cover a row."""
        return -(-self.row_vectors // self.width)

    @property
    def blocks(self) -> int:
        return self.across * self.splits

    @property
    def half(self) -> int:
        """Lines that are joined first: the largest power of two below their number; 0 if there is one line."""
        return 1 << (self.lines - 1).bit_length() - 1 if self.lines > 1 else 0

    def floats(self, values: int) -> int:
        """Of shared memory: so many values of each thread of the upper half of the lines."""
        return self.half * self.width * values


class Walk(abc.ABC):
    """A kernel that adds up columns of one or several arrays; `operands` names $0, $1, ..., the arrays first.

    The operand behind them is the address of shared memory.
    """

    def __init__(self, plan: ColumnPlan, arrays: int, operands: Sequence[str]) -> None:
        self.plan, self.e = plan, Emitter()
        e = self.e
        self.at = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(operands)}
        self.shared = e.r("mov.b32", f"${len(operands)}")
        self.split, across = divided(e, e.r("mov.u32", "%ctaid.x"), plan.across)
        self.line, self.place = divided(e, e.r("mov.u32", "%tid.x"), plan.width)
        vector = e.scaled(across, plan.width, self.place)
        self.inside = e.p("setp.lt.s32", vector, plan.row_vectors)
        # Threads that are left over read what the last do, and their sums go nowhere.
        self.vector = e.r("min.s32", vector, plan.row_vectors - 1)
        self.row = e.r("min.s32", self.line, plan.lines - 1)
        starts = [self.columns_of(name, VECTOR_BYTES) for name in operands[:arrays]]
        self.starts = [e.d("mad.wide.u32", self.row, plan.row_bytes, start) for start in starts]

    # ---- what a kernel is made of ------------------------------------------------------------------------------------

    def begin(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:  # noqa: B027  (most need none)
        """Sees the thread's first chunk of each array before it is added."""

    @abc.abstractmethod
    def add(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:
        """Adds a chunk of each array; `exist` are predicates of its rows, none if all exist."""

    @property
    @abc.abstractmethod
    def values(self) -> list[str]:
        """The registers with what the thread has."""

    @abc.abstractmethod
    def join(self, others: Sequence[str]) -> None:
        """Joins another thread's values to the own."""

    @abc.abstractmethod
    def store(self) -> None:
        """Writes a block's values, in the threads of its first line."""

    # ---- rows --------------------------------------------------------------------------------------------------------

    def code(self) -> str:
        e, plan = self.e, self.plan
        new = lambda: [[[e.new() for _ in range(4)] for _ in range(plan.chunk)] for _ in self.starts]
        stages = [new() for _ in range(plan.stages)]
        if plan.full:
            step = plan.stages * plan.splits
            for i, chunks in enumerate(stages):
                self._load_tile(chunks, e.r("add.s32", self.split, i * plan.splits))
            self.begin(stages[0])
            with e.loop(self.split, plan.full, step) as index:
                for i, chunks in enumerate(stages):
                    tile = e.r("add.s32", index, i * plan.splits)
                    with e.only_if("setp.lt.s32", tile, plan.full):
                        self.add(chunks)
                        self._load_tile(chunks, e.r("add.s32", tile, step))
        if plan.rest:
            with e.only_if("setp.eq.s32", self.split, plan.full % plan.splits):
                self._add_rest(stages[0])
        self._join_lines()
        with e.only_if("setp.eq.s32", self.line, 0):
            self.store()
        return e.text()

    def _load_tile(self, chunks: Sequence[Words], number: str) -> None:
        """The thread's chunks of a tile, if there is that tile; tile 0 is the last of x."""
        e, plan = self.e, self.plan
        exists = e.p("setp.lt.s32", number, plan.full)
        tile = e.r("sub.s32", plan.full - 1, number)
        for words, start in zip(chunks, self.starts, strict=True):
            self._load(words, e.d("mad.wide.u32", tile, plan.tile * plan.row_bytes, start), [exists] * plan.chunk)

    def _load(self, words: Words, address: str, exist: Sequence[str]) -> None:
        step = self.plan.lines * self.plan.row_bytes
        for i, (vector, exists) in enumerate(zip(words, exist, strict=True)):
            # Nothing is read twice, so the first-level cache keeps none of it.
            instruction = "ld.global.nc.L1::no_allocate.v4.b32"
            self.e.op(instruction, group(vector), f"[{address}+{i * step}]", when=exists)

    def _add_rest(self, chunks: Sequence[Words]) -> None:
        """The rows behind the last whole tile: a thread has some of them, all or none."""
        e, plan = self.e, self.plan
        done = plan.full * plan.tile
        row = [e.r("add.s32", self.row, done + i * plan.lines) for i in range(plan.chunk)]
        exist = [e.p("setp.lt.s32", r, plan.rows) for r in row]
        for words, start in zip(chunks, self.starts, strict=True):
            for vector in words:
                for word in vector:
                    e.op("mov.b32", word, 0)
            self._load(words, e.d("add.s64", start, done * plan.row_bytes), exist)
        if not plan.full:
            self.begin(chunks, exist)
        self.add(chunks, exist)

    # ---- columns -----------------------------------------------------------------------------------------------------

    def columns_of(self, name: str, size: int) -> str:
        """Where the thread's columns lie in a row of an array, in which a vector has so many bytes."""
        return self.e.d("mad.wide.u32", self.vector, size, self.at[name])

    def per_column(self, name: str, dtype: str) -> list[str]:
        """An array's first row at the thread's columns, in float32; of the caller's columns, that is."""
        e, plan, size = self.e, self.plan, SIZES[dtype]
        if plan.fold == 1:
            address, words = self.columns_of(name, plan.elements * size), []
            for start in range(0, plan.elements * size, VECTOR_BYTES):
                words += [vector := [e.new() for _ in range(4)]]
                e.op("ld.global.nc.v4.b32", group(vector), f"[{address}+{start}]")
            return [value for vector in words for value in e.unpack(dtype, vector)]
        found = []
        for i in range(plan.elements):
            _, column = divided(e, e.scaled(self.vector, plan.elements, i), plan.columns // plan.fold)
            found.append(_number_at(e, dtype, e.d("mad.wide.u32", column, size, self.at[name])))
        return found

    def store_floats(self, address: str, start: int, values: Sequence[str], when: str) -> None:
        for i in range(0, len(values), 4):
            self.e.op("st.global.v4.f32", f"[{address}+{start + 4 * i}]", group(values[i : i + 4]), when=when)

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _join_lines(self) -> None:
        e, plan, half = self.e, self.plan, self.plan.half
        apart = 4 * plan.half * plan.width  # bytes
        while half:
            above = min(plan.lines, 2 * half) - half
            upper = e.r("sub.s32", self.line, half)
            writes = e.p("and.pred", e.p("setp.ge.s32", upper, 0), e.p("setp.lt.s32", upper, above))
            if half < plan.half:
                e.op("bar.sync", 0, plan.threads)  # what was written before has been read
            to = e.scaled(e.scaled(upper, plan.width, self.place), 4, self.shared)
            for i, value in enumerate(self.values):
                e.op("st.shared.f32", f"[{to}+{i * apart}]", value, when=writes)
            e.op("bar.sync", 0, plan.threads)
            with e.only_if("setp.lt.s32", self.line, above):
                start = e.scaled(e.scaled(self.line, plan.width, self.place), 4, self.shared)
                self.join([e.f("ld.shared.f32", f"[{start}+{i * apart}]") for i in range(len(self.values))])
            half //= 2


def divided(e: Emitter, value: str, by: int) -> tuple[str, str]:
    """Quotient and remainder."""
    quotient = e.r("div.u32", value, by)
    return quotient, e.r("sub.s32", value, e.r("mul.lo.s32", quotient, by))


def _number_at(e: Emitter, dtype: str, address: str) -> str:
    """One element in float32."""
    if dtype == "f32":
        return e.f("ld.global.nc.f32", f"[{address}]")
    half = e.new("h")
    e.op("ld.global.nc.b16", half, f"[{address}]")
    if dtype == "f16":
        return e.f("cvt.f32.f16", half)
    word = e.r("cvt.u32.u16", half)
    return e.f("mov.b32", e.r("shl.b32", word, 16))


def group(names: Sequence[str]) -> str:
    return "{" + ", ".join(names) + "}"
