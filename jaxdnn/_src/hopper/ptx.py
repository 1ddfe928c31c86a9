"""PTX text: instructions, the registers they need, and vectors of 16 bytes.

A kernel is one block of PTX, a scope of its own: it declares its registers, and reads its operands ($0, $1, ...) at the
top.
"""

import contextlib
import functools as ft
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

VECTOR_BYTES = 16
NAMES = {np.dtype(jnp.bfloat16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}
SIZES = {"bf16": 2, "f16": 2, "f32": 4}
# After these a thread's loads from shared memory are complete, for the copy engine too: the first makes the assembler
# wait for what was loaded, the second orders them before accesses of the asynchronous proxy.
LOADS_DONE = "fence.acq_rel.cta;", "fence.proxy.async.shared::cta;"
_WIDTHS = {"r": "b32", "f": "f32", "p": "pred", "h": "b16", "d": "b64"}  # of the kinds of registers


def real(value: float) -> str:
    """A float32 constant."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def pairwise(join: Callable[[Any, Any], Any], items: Sequence[Any]) -> Any:
    """Joins neighbours, then neighbouring results, and so on; an odd one out is passed on unchanged."""
    items = list(items)
    while len(items) > 1:
        pairs = zip(items[::2], items[1::2], strict=False)
        items = [join(a, b) for a, b in pairs] + items[2 * (len(items) // 2) :]
    return items[0]


class Emitter:
    """Collects instructions and counts the registers they need."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._counts = dict.fromkeys(_WIDTHS, 0)
        self._labels = 0

    def new(self, kind: str = "r") -> str:
        self._counts[kind] += 1
        return f"{kind}{self._counts[kind] - 1}"

    def loads_done(self) -> None:
        """Completes this thread's loads from shared memory, where the copy engine is to write next."""
        self._lines += LOADS_DONE

    def op(self, instruction: str, *operands: object, when: str = "") -> None:
        """An instruction, for the threads for which the predicate `when` holds. A list of registers is a vector."""
        guard = f"@{when} " if when else ""
        if any(isinstance(n, int) and not -(2**31) <= n < 2**32 for n in operands) and "64" not in instruction:
            raise OverflowError(f"a constant of more than 32 bits: {instruction} {operands}")
        names = ("{" + ", ".join(n) + "}" if isinstance(n, list) else str(n) for n in operands)
        self._lines.append(f"{guard}{instruction} {', '.join(names)};")

    def _made(self, kind: str, instruction: str, *operands: object) -> str:
        """The register of a kind that an instruction's result is in."""
        out = self.new(kind)
        self.op(instruction, out, *operands)
        return out

    r, f = ft.partialmethod(_made, "r"), ft.partialmethod(_made, "f")
    p, d = ft.partialmethod(_made, "p"), ft.partialmethod(_made, "d")

    def label(self) -> str:
        self._labels += 1
        return f"L{self._labels - 1}"

    def place(self, label: str) -> None:
        self._lines.append(f"{label}:")

    @contextlib.contextmanager
    def loop(self, start: object, stop: object, step: object) -> Iterator[str]:
        """for (i = start; i < stop; i += step), none at all where start >= stop."""
        head, end = self.label(), self.label()
        index = self.r("mov.b32", start)
        self.place(head)
        self.op("bra", end, when=self.p("setp.ge.s32", index, stop))
        yield index
        self.op("add.s32", index, index, step)
        self.op("bra", head)
        self.place(end)

    @contextlib.contextmanager
    def only_if(self, instruction: str, *operands: object) -> Iterator[None]:
        """What is emitted inside runs where the comparison holds."""
        end = self.label()
        holds = self.p(instruction, *operands)
        self.op("bra", end, when="!" + holds)
        yield
        self.place(end)

    def unpack(self, dtype: str, words: Sequence[str]) -> list[str]:
        """The values in words of 32 bits, in registers of float32."""
        if dtype == "f32":
            return [self.f("mov.b32", word) for word in words]
        found = []
        for word in words:
            if dtype == "bf16":
                found.append(self.f("mov.b32", self.r("shl.b32", word, 16)))
                found.append(self.f("mov.b32", self.r("and.b32", word, "0xFFFF0000")))
            else:
                halves = [self.new("h"), self.new("h")]
                self.op("mov.b32", halves, word)
                found += [self.f("cvt.f32.f16", half) for half in halves]
        return found

    def pack(self, dtype: str, values: Sequence[str]) -> list[str]:
        """Words of 32 bits of float32 values, each rounded to nearest even."""
        if dtype == "f32":
            return [self.r("mov.b32", value) for value in values]
        pairs = zip(values[::2], values[1::2], strict=True)
        return [self.r(f"cvt.rn.{dtype}x2.f32", high, low) for low, high in pairs]

    def load_floats(self, space: str, place: str, count: int) -> list[str]:
        """1, 2 or 4 neighbouring floats."""
        found = [self.new("f") for _ in range(count)]
        self.op(f"ld.{space}.{_vector(count)}f32", found if count > 1 else found[0], place)
        return found

    def load_vector(self, space: str, place: str) -> list[str]:
        """Four neighbouring words of 32 bits."""
        found = [self.new() for _ in range(4)]
        self.op(f"ld.{space}.v4.b32", found, place)
        return found

    def store_floats(self, space: str, place: str, values: Sequence[str], when: str = "") -> None:
        """Stores 1, 2 or 4 neighbouring floats."""
        operand = list(values) if len(values) > 1 else values[0]
        self.op(f"st.{space}.{_vector(len(values))}f32", place, operand, when=when)

    def store_words(self, target: str, start: int, words: Sequence[str], when: str = "") -> None:
        """Stores 2, 4 or 8 neighbouring words of 32 bits in device memory."""
        for i in range(0, len(words), 4):
            part = list(words[i : i + 4])
            self.op(f"st.global.v{len(part)}.b32", f"[{target}+{start + 4 * i}]", part, when=when)

    def store_rounded(self, dtype: str, place: str, value: str, when: str = "") -> None:
        """Stores a float32 number in device memory, rounded to the dtype."""
        if dtype == "f32":
            self.op("st.global.f32", place, value, when=when)
            return
        half = self.new("h")
        self.op(f"cvt.rn.{dtype}.f32", half, value)
        self.op("st.global.b16", place, half, when=when)

    # ---- mbarriers, and the blocks of a cluster ----------------------------------------------------------------------

    def make_barriers(self, start: str, counts: Sequence[int], first: str) -> None:
        """Initialises mbarriers, 8 bytes each from `start` on, in the one thread for which the predicate holds."""
        for i, count in enumerate(counts):
            self.op("mbarrier.init.shared::cta.b64", f"[{start}+{8 * i}]", count, when=first)

    def barriers_made(self) -> None:
        """Makes the mbarriers known to the copy engine, and to the cluster when its blocks meet next."""
        self.op("fence.mbarrier_init.release.cluster")

    def expect(self, barrier: str, size: object, when: str) -> None:
        """Arrives at an mbarrier, and tells it of the bytes of a transfer."""
        self.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{barrier}]", size, when=when)

    def in_block(self, address: str, block: str) -> str:
        """The address of the same place in the shared memory of another block of the cluster."""
        return self.r("mapa.shared::cluster.u32", address, block)

    def send(self, kind: str, place: str, values: object, barrier: str, when: str = "") -> None:
        """Stores values of a kind at a place in another block, whose mbarrier counts their bytes."""
        instruction = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind}"
        self.op(instruction, f"[{place}]", values, f"[{barrier}]", when=when)

    def arrive_in_cluster(self) -> None:
        """Tells the cluster's blocks that this one has come here, and what it has stored before."""
        self.op("barrier.cluster.arrive.release.aligned")

    def wait_for_cluster(self) -> None:
        """Waits until all blocks of the cluster have arrived."""
        self.op("barrier.cluster.wait.acquire.aligned")

    def wait(self, barrier: str, phase: str, scope: str = "") -> None:
        """Waits for an mbarrier's phase of this parity; in scope ".acquire.cluster" also for other blocks' stores."""
        again = self.label()
        self.place(again)
        complete = self.p(f"mbarrier.try_wait.parity{scope}.shared::cta.b64", f"[{barrier}]", phase)
        self.op("bra", again, when="!" + complete)

    def over_lanes(self, value: str, distance: int, least: int = 1, instruction: str = "add.rn.f32") -> str:
        """A value added, or joined otherwise, over lanes by exchanges at `distance`, half of it, ..., `least`."""
        while distance >= least:
            word = self.r("shfl.sync.bfly.b32", self.r("mov.b32", value), distance, 31, "0xffffffff")
            value = self.f(instruction, value, self.f("mov.b32", word))
            distance //= 2
        return value

    def both(self, a: str, b: str) -> str:
        """A predicate that holds where both do; "" is one that always holds."""
        return self.p("and.pred", a, b) if a and b else a or b

    def scaled(self, index: str, factor: int, plus: object = 0) -> str:
        return self.r("mad.lo.s32", index, factor, plus)

    def text(self) -> str:
        declared = [f".reg .{_WIDTHS[kind]} {kind}<{count}>;" for kind, count in self._counts.items() if count]
        return "\n".join(["{", *declared, *self._lines, "}"])


def _vector(count: int) -> str:
    return f"v{count}." if count > 1 else ""
