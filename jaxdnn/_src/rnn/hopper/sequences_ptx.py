"""A thread's sequences in device memory: addresses that walk over the steps, loads, and marks of steps, in PTX.

A thread has two sequences of each set of eight. `Key` is the number of a set and of one of the two.

The last cluster's sequences are the last ones of all, some of which another cluster has too if the number of sequences
is no multiple: both compute and store the same. Only where there are fewer than one cluster takes, some do not exist:
conditions on loads and stores need registers, for which others are spilled.
"""

from collections.abc import Callable, Sequence

from jaxdnn._src.hopper.curves_ptx import ZERO
from jaxdnn._src.rnn.hopper.block_ptx import Block
from jaxdnn._src.rnn.hopper.plan import AHEAD, COLUMNS, Given

Key = tuple[int, int]


class Sequences:
    """Those of a cluster; `backwards` says whether the last step comes first."""

    def __init__(self, k: Block, given: Given, sets: int, *, backwards: bool) -> None:
        e = k.e
        self.k, self.e, self.given, self.backwards = k, e, given, backwards
        size = sets * COLUMNS
        self.whole = given.batch >= size
        self.first = e.scaled(e.r("mov.u32", "%clusterid.x"), size)
        if self.whole and given.batch % size:
            self.first = e.r("min.s32", self.first, given.batch - size)
        self.own = e.scaled(k.quad, 2, self.first)
        self.keys: list[Key] = [(n, i) for n in range(sets) for i in range(2)]
        self.exists = {(n, i): self.less(self.own, COLUMNS * n + i) for n, i in self.keys}
        self.at: dict[str, str] = {}
        self.strides: dict[str, int] = {}
        self.lengths = self._lengths() if given.ragged else {}
        if given.resets:
            self.walk("resets", 1, 4)

    def less(self, sequence: str, plus: int) -> str:
        """Whether a sequence exists; "" if all do."""
        return "" if self.whole else self.e.p("setp.lt.s32", sequence, self.given.batch - plus)

    def _lengths(self) -> dict[Key, str]:
        e, at = self.e, self.row("lengths", 1, 4)
        found = {}
        for key in self.keys:
            found[key] = e.r("mov.b32", 0)
            e.op("ld.global.nc.b32", found[key], self.place(at, key, 1, 4), when=self.exists[key])
        return found

    # ---- addresses ---------------------------------------------------------------------------------------------------

    def row(self, name: str, columns: int, size: int, column: str = "", sequence: str = "") -> str:
        """The address of an element of the thread's first sequence, or of another, in an array (sequences, columns)."""
        e = self.e
        row = e.d("mad.wide.u32", sequence or self.own, columns * size, self.k.base[name])
        return e.d("mad.wide.u32", column, size, row) if column else row

    def walk(self, name: str, columns: int, size: int, column: str = "", sequence: str = "") -> None:
        """Keeps such an address in an array (steps, sequences, columns), of the step that is computed."""
        given, at = self.given, self.row(name, columns, size, column, sequence)
        stride = given.batch * columns * size
        if self.backwards:
            at = self.e.d("add.s64", at, (given.steps - 1) * stride)
        self.at[name], self.strides[name] = at, -stride if self.backwards else stride

    def advance(self) -> None:
        for name, at in self.at.items():
            self.e.op("add.s64", at, at, self.strides[name])

    @staticmethod
    def place(at: str, key: Key, columns: int, size: int, column: int = 0) -> str:
        """Of one of the thread's sequences, the element so many columns behind that at an address."""
        n, i = key
        return f"[{at}+{size * ((COLUMNS * n + i) * columns + column)}]"

    # ---- loads -------------------------------------------------------------------------------------------------------

    def floats(self, at: str, columns: int, column: int = 0) -> dict[Key, str]:
        """Of each sequence a float; 0 where there is no such sequence."""
        e, found = self.e, {}
        for key in self.keys:
            exists = self.exists[key]
            found[key] = e.f("mov.f32", ZERO) if exists else e.new("f")
            e.op("ld.global.nc.f32", found[key], self.place(at, key, columns, 4, column), when=exists)
        return found

    def halves(self, at: str, columns: int, column: int = 0) -> dict[Key, str]:
        """The same of an array of 16 bits."""
        e, found = self.e, {}
        for key in self.keys:
            found[key] = e.new("h")
            e.op("mov.b16", found[key], 0)
            e.op("ld.global.nc.b16", found[key], self.place(at, key, columns, 2, column), when=self.exists[key])
        return found

    def widened(self, dtype: str, values: dict[Key, str]) -> dict[Key, str]:
        """Numbers of 16 bits as floats."""
        e, zero = self.e, self.e.new("h")
        e.op("mov.b16", zero, 0)
        return {key: e.unpack(dtype, [e.r("mov.b32", [value, zero])])[0] for key, value in values.items()}

    def fetch(self, name: str, step: str, columns: int, size: int, which: Sequence[int] = (0,)) -> None:
        """Fetches what a later step reads of an array into the second-level cache."""
        e, later = self.e, AHEAD * self.strides[name]
        fetches = e.p("setp.lt.s32", step, self.given.steps - AHEAD)
        for (n, i), column in ((key, column) for key in self.keys for column in which):
            place = size * ((COLUMNS * n + i) * columns + column) + later
            if abs(place) < 1 << 31:
                e.op("prefetch.global.L2", f"[{self.at[name]}+{place}]", when=e.both(fetches, self.exists[n, i]))

    # ---- marks -------------------------------------------------------------------------------------------------------

    def live(self, step: str) -> dict[Key, str]:
        """Whether a sequence has the step; "" for always."""
        e, given = self.e, self.given
        if not given.ragged:
            return dict.fromkeys(self.keys, "")
        time = e.r("sub.s32", given.steps - 1, step) if self.backwards else step
        return {key: e.p("setp.lt.s32", time, self.lengths[key]) for key in self.keys}

    def resets(self, holds: Callable[[str], str]) -> dict[Key, str]:
        """What `holds` makes of the mark of a step, which is not 0 where a sequence begins anew; "" without marks."""
        e, found = self.e, dict.fromkeys(self.keys, "")
        for key in self.keys if self.given.resets else ():
            mark = e.r("mov.b32", 0)
            e.op("ld.global.nc.b32", mark, self.place(self.at["resets"], key, 1, 4), when=self.exists[key])
            found[key] = holds(mark)
        return found
