"""The machine of the normalisations' kernels, and what those of dropout need: words without sign, pairs."""

from typing import Any

import numpy as np

from tests.hopper.norm_machine import NormRows
from tests.hopper.row_machine import HALF, U32, U64

UNSIGNED = {"div": np.floor_divide, "rem": np.remainder, "min": np.minimum}


class DropoutRows(NormRows):
    """Memory as bytes, and `run`, which runs a block of PTX for every block of threads.

    A copy to shared memory arrives at the last moment, when it is waited for; all threads take as many turns here.
    """

    def _block(self, code: list[Any], labels: dict[str, int]) -> None:
        self.asked: list[tuple[np.ndarray, np.ndarray]] = []
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []
        super()._block(code, labels)

    def _copy(self, arguments: list[Any], active: np.ndarray) -> None:
        size = int(arguments[2])
        to, source = self._shared(arguments[0], size, active)[active], self._global(arguments[1], size, active)[active]
        if (to[:, 0] % size).any() or (source[:, 0] % size).any():
            raise RuntimeError("a copy is not aligned")
        self.shared[to] = 0xFF  # what was there is lost at once
        self.asked.append((to, source))

    def _arrive(self, copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for to, source in copies:
            self.shared[to] = self.memory[source]

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        bits, real = self._bits, self._real
        put = lambda value: self._put(arguments[0], value, active)
        low = lambda x: bits(x) & U64(0xFFFFFFFF)
        with np.errstate(all="ignore"):
            match name:
                case ["mov", "b64"] if isinstance(arguments[0], tuple):
                    for i, word in enumerate(arguments[0]):
                        self._put(word, bits(arguments[1]) >> U64(32 * i) & U64(0xFFFFFFFF), active)
                case ["cp", "async", "cg", "shared", "global"]:
                    self._copy(arguments, active)
                case ["cp", "async", "commit_group"]:
                    self.groups.append(self.asked)
                    self.asked = []
                case ["cp", "async", "wait_group"]:
                    while len(self.groups) > int(arguments[0]):
                        self._arrive(self.groups.pop(0))
                case ["cvt", "u64", "u32"]:
                    put(low(arguments[1]))
                case ["mul", "lo", "s64"]:
                    put(bits(arguments[1]) * bits(arguments[2]))
                case ["div" | "rem" | "min" as which, "u32"]:
                    put(UNSIGNED[which](low(arguments[1]), low(arguments[2])))
                case ["lop3", "b32"] if arguments[4] == "0x96":
                    put(low(arguments[1]) ^ low(arguments[2]) ^ low(arguments[3]))
                case ["setp", "lt" | "ge" as relation, "u32"]:
                    a, b = low(arguments[1]), low(arguments[2])
                    put(a < b if relation == "lt" else a >= b)
                case ["setp", "lt" | "gt" as relation, "f32"]:
                    a, b = real(arguments[1]), real(arguments[2])
                    put(a < b if relation == "lt" else a > b)
                case ["setp", "nan", "f32"]:
                    put(np.isnan(real(arguments[1])) | np.isnan(real(arguments[2])))
                case ["prmt", "b32"] if arguments[1] == arguments[2]:
                    bytes_ = [low(arguments[1]) >> U64(8 * int(n)) & U64(0xFF) for n in reversed(arguments[3][2:])]
                    put(sum((v << U64(8 * i) for i, v in enumerate(bytes_)), U64(0)))
                case ["selp", "b32"]:
                    put(np.where(bits(arguments[3]), low(arguments[1]), low(arguments[2])))
                case ["max" | "min" as which, "NaN", "f32"]:
                    a, b = real(arguments[1]), real(arguments[2])
                    first = (
                        (a < b) | ((a == b) & np.signbit(a))
                        if which == "min"
                        else (a > b) | ((a == b) & ~np.signbit(a))
                    )
                    put(np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), np.where(first, a, b)))
                case ["add", "rn", "bf16x2" | "f16x2" as kind]:
                    halves = (low(x).astype(U32).view(HALF[kind[:-2]]) for x in arguments[1:])
                    a, b = (half.astype(np.float64) for half in halves)
                    put((a + b).astype(np.float32).astype(HALF[kind[:-2]]).view(U32).astype(U64))
                case _:
                    super()._step(name, arguments, active)
