"""The row machine for the normalisations' kernels: groups of a block may part ways, and sums lie in more shared memory.

Threads whose branch leads further wait there: what is executed is always the lowest instruction that some thread has
reached, by the threads that have.
"""

import re
from typing import Any

import numpy as np

from jaxdnn_reference import rounding
from tests.hopper.races import Races
from tests.hopper.row_machine import U64, Rows

KNOWN = ("fma", "max", "cvt", "neg", "sqrt", "shfl")  # the instructions that `NormRows` adds to, or checks


class NormRows(Rows):
    """Memory as bytes, and `run`, which runs a block of PTX for every block of threads."""

    @np.errstate(all="ignore")
    def run(self, text: str, operands: list[int], block_size: int, clusters: int, cluster: int = 1) -> None:
        assert cluster == 1, "these kernels have no clusters"
        code, labels = [], {}
        for line in map(str.strip, text.splitlines()):
            if line.endswith(":"):
                labels[line[:-1]] = len(code)
            elif line not in "{}" and not line.startswith(".reg"):
                code.append(_decode(line))
        self.threads, self.rank = block_size, np.zeros(block_size, U64)
        self.shared = np.full(self.shared_bytes, 0xFF, np.uint8)
        for block in range(clusters):
            self.registers: dict[str, Any] = {"%tid.x": np.arange(block_size, dtype=U64)}
            self.registers["%ctaid.x"] = np.full(block_size, block, U64)
            self.registers |= {f"${i}": np.full(block_size, value, U64) for i, value in enumerate(operands)}
            self.shared[:] = 0xFF
            self.races, self.barriers = Races(block_size, len(self.shared)), {}
            self._block(code, labels)

    def _block(self, code: list[Any], labels: dict[str, int]) -> None:
        everyone = np.ones(self.threads, bool)
        at, together = (
            np.zeros(self.threads, np.int64),
            True,
        )  # where each thread is; whether all are where the first is
        while (first := int(at[0] if together else at.min())) < len(code):
            guard, name, arguments = code[first]
            active = here = everyone if together else at == first
            if guard:
                holds = self.registers[guard.removeprefix("!")]
                active = here & (~holds if guard[0] == "!" else holds)
            at += here
            if name[0] == "bra":
                at[active] = labels[arguments[0]]
            elif name[0] == "bar":
                self._barrier(active, *arguments)
            else:
                self._step(name, arguments, active)
            if name[0] == "bra" or not together:
                together = bool((at == at[0]).all())

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        if name[0] not in KNOWN:
            super()._step(name, arguments, active)
            return
        real = self._real
        put = lambda value: self._put(arguments[0], value, active)
        match name:
            case ["fma", "rn", "f32"]:
                put(rounding.fma(*(real(v) for v in arguments[1:])))
            case ["max", "s32"]:
                a, b = (self._bits(v).astype(np.uint32).view(np.int32) for v in arguments[1:])
                put(np.maximum(a, b).view(np.uint32).astype(U64))
            case ["cvt", "rn", "f32", "s32"]:
                put(self._bits(arguments[1]).astype(np.uint32).view(np.int32).astype(np.float32))
            case ["neg", "f32"]:
                put(-real(arguments[1]))
            case ["sqrt", "rn", "f32"]:
                put(np.sqrt(real(arguments[1])))
            case ["shfl", *_] if (active.reshape(-1, 32).any(1) != active.reshape(-1, 32).all(1)).any():
                raise RuntimeError("an exchange without all threads of a warp")
            case _:
                super()._step(name, arguments, active)


def _decode(line: str) -> tuple[str | None, list[str], list[Any]]:
    match = re.fullmatch(r"(?:@(!?p\d+) )?(\S+) (.*);", line)
    if match is None:
        raise NotImplementedError(line)
    guard, name, rest = match.groups()
    arguments = [
        tuple(part.strip() for part in item[1:-1].split(",")) if item[0] == "{" else item
        for item in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
    ]
    return guard, name.split("."), arguments
