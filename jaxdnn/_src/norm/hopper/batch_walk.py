"""Reductions over the columns of arrays (rows, columns), in PTX: what the kernels of batch normalisation share.

A vector is 16 bytes of a row. A thread processes one vector of every row, a chunk of rows at a time;
the threads of a block cover `width` vectors of `lines` rows. A tile is lines x chunk rows, and split i of `splits`
processes every `splits`-th tile, from the last row to the first: the rows that are read last are those that the next
kernel reads first, and still in the L2 cache. Then the threads' values are joined over the lines of a block, the upper
half of the lines with the lower half, until one line is left. The plan alone determines the order.
"""

import abc
import dataclasses
from collections.abc import Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, real

ZERO = real(0.0)
Words = Sequence[Sequence[str]]  # for every row of a chunk the registers of its vector


@dataclasses.dataclass(frozen=True)
class ColumnPlan:
    """How rows and columns are partitioned.

    Attributes:
      rows, columns: of x as the kernel reads it; the bytes of a row are a multiple of 16.
      fold: how many rows of the caller's x are one row here: its column c is columns c + i columns / fold, for all i.
      dtype: "bf16", "f16" or "f32".
      threads: of a block.
      width: vectors of a row that a block covers.
      chunk: rows that a thread loads before it uses the first.
      stages: chunks whose loads a thread has in flight.
      splits: blocks that share the rows of a column; at least one, and at most as many as there are whole tiles.
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
        """Elements of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.columns * SIZES[self.dtype]

    @property
    def row_vectors(self) -> int:
        return self.row_bytes // VECTOR_BYTES

    @property
    def lines(self) -> int:
        """Rows that the threads of a block cover at a time; threads beyond them read the last line too."""
        return self.threads // self.width

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.lines * self.chunk

    @property
    def full(self) -> int:
        """Whole tiles."""
        return self.rows // self.tile

    @property
    def rest(self) -> int:
        """Rows after the last whole tile; they belong to split `full` mod `splits`."""
        return self.rows % self.tile

    @property
    def across(self) -> int:
        """Blocks that cover a row together."""
        return -(-self.row_vectors // self.width)

    @property
    def blocks(self) -> int:
        return self.across * self.splits

    @property
    def half(self) -> int:
        """The lower lines in the first join: the largest power of two below their number; 0 if there is one line."""
        return 1 << (self.lines - 1).bit_length() - 1 if self.lines > 1 else 0

    def floats(self, values: int) -> int:
        """Floats of shared memory: so many values of each thread of the upper half of the lines."""
        return self.half * self.width * values


class Walk(abc.ABC):
    """A kernel that reduces columns of one or several arrays.

    `operands` names $0, $1, ..., the arrays first; the operand after them is the address of shared memory. A subclass
    says what a thread keeps for its columns (`values`), and how it adds rows and joins another thread's values.
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
        # Threads beyond the columns or lines read what the last ones do, and their values are not used.
        self.vector = e.r("min.s32", vector, plan.row_vectors - 1)
        self.row = e.r("min.s32", self.line, plan.lines - 1)
        starts = [self.columns_of(name, VECTOR_BYTES) for name in operands[:arrays]]
        self.starts = [e.d("mad.wide.u32", self.row, plan.row_bytes, start) for start in starts]

    # ---- what a kernel is made of ------------------------------------------------------------------------------------

    def begin(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:  # noqa: B027  (most need none)
        """Prepares for the thread's first chunk of each array, which `add` then adds."""

    @abc.abstractmethod
    def add(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:
        """Adds a chunk of each array; `exist` has a predicate for each of its rows, or none if all rows exist."""

    @property
    @abc.abstractmethod
    def values(self) -> list[str]:
        """The registers with the thread's values."""

    @abc.abstractmethod
    def join(self, others: Sequence[str]) -> None:
        """Joins another thread's values with this thread's."""

    @abc.abstractmethod
    def store(self) -> None:
        """Stores a block's values, in the threads of its first line."""

    # ---- rows --------------------------------------------------------------------------------------------------------

    def code(self) -> str:
        """The PTX of the kernel."""
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
        """Loads the thread's chunks of a tile, if it exists; tile 0 is the last of x."""
        e, plan = self.e, self.plan
        exists = e.p("setp.lt.s32", number, plan.full)
        tile = e.r("sub.s32", plan.full - 1, number)
        for words, start in zip(chunks, self.starts, strict=True):
            self._load(words, e.d("mad.wide.u32", tile, plan.tile * plan.row_bytes, start), [exists] * plan.chunk)

    def _load(self, words: Words, address: str, exist: Sequence[str]) -> None:
        step = self.plan.lines * self.plan.row_bytes
        for i, (vector, exists) in enumerate(zip(words, exist, strict=True)):
            # Nothing is read twice, so nothing should be kept in L1.
            instruction = "ld.global.nc.L1::no_allocate.v4.b32"
            self.e.op(instruction, list(vector), f"[{address}+{i * step}]", when=exists)

    def _add_rest(self, chunks: Sequence[Words]) -> None:
        """Adds the rows after the last whole tile, of which a thread has some, all or none."""
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
        """The address of the thread's columns in the first row of an array whose vectors have `size` bytes."""
        return self.e.d("mad.wide.u32", self.vector, size, self.at[name])

    def per_column(self, name: str, dtype: str) -> list[str]:
        """An array (one element for each of the caller's columns) at the thread's columns, in float32."""
        e, plan, size = self.e, self.plan, SIZES[dtype]
        if plan.fold == 1:
            address, words = self.columns_of(name, plan.elements * size), []
            for start in range(0, plan.elements * size, VECTOR_BYTES):
                words.append(e.load_vector("global.nc", f"[{address}+{start}]"))
            return [value for vector in words for value in e.unpack(dtype, vector)]
        found = []
        for i in range(plan.elements):
            _, column = divided(e, e.scaled(self.vector, plan.elements, i), plan.columns // plan.fold)
            found.append(_number_at(e, dtype, e.d("mad.wide.u32", column, size, self.at[name])))
        return found

    def store_floats(self, address: str, start: int, values: Sequence[str], when: str) -> None:
        for i in range(0, len(values), 4):
            self.e.op("st.global.v4.f32", f"[{address}+{start + 4 * i}]", list(values[i : i + 4]), when=when)

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _join_lines(self) -> None:
        e, plan, half = self.e, self.plan, self.plan.half
        apart = 4 * plan.half * plan.width  # bytes
        while half:
            above = min(plan.lines, 2 * half) - half
            upper = e.r("sub.s32", self.line, half)
            writes = e.p("and.pred", e.p("setp.ge.s32", upper, 0), e.p("setp.lt.s32", upper, above))
            if half < plan.half:
                e.op("bar.sync", 0, plan.threads)  # after the reads of the last join
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
