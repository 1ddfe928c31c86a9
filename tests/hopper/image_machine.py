"""The row machine for the kernels of images: clusters whose threads may part ways, and copies that arrive late.

A copy into shared memory is carried out when it is waited for, not before: what is read earlier is NaN. Accesses to
shared memory that the step alone puts in order are an error (`races`).
"""

from typing import Any

import numpy as np

from tests.hopper.norm_machine import NormRows, _decode
from tests.hopper.races import Races
from tests.hopper.row_machine import U64

KNOWN = ("barrier", "st", "cp", "selp", "div", "max", "min", "mapa")  # the instructions that `Images` adds to


class Images(NormRows):
    """Memory as bytes, and `run`, which runs a block of PTX for every cluster of blocks."""

    @np.errstate(all="ignore")
    def run(self, text: str, operands: list[int], block_size: int, clusters: int, cluster: int = 1) -> None:
        code, labels = [], {}
        for line in map(str.strip, text.splitlines()):
            if line.endswith(":"):
                labels[line[:-1]] = len(code)
            elif line not in "{}" and not line.startswith(".reg"):
                code.append(_decode(line))
        self.threads, self.cluster, self.block_size = block_size * cluster, cluster, block_size
        self.rank = np.arange(self.threads, dtype=U64) // U64(block_size)
        for index in range(clusters):
            self.shared = np.full(cluster * self.shared_bytes, 0xFF, np.uint8)
            self.races = Races(self.threads, len(self.shared))
            self.copies: list[list[Any]] = [[]]
            self.waiting = False  # for the cluster
            self.barriers = {}
            self.registers: dict[str, Any] = {"%tid.x": np.arange(self.threads, dtype=U64) % U64(block_size)}
            self.registers |= {"%cluster_ctarank": self.rank, "%clusterid.x": np.full(self.threads, index, U64)}
            self.registers["%ctaid.x"] = U64(index * cluster) + self.rank
            self.registers |= {f"${i}": np.full(self.threads, value, U64) for i, value in enumerate(operands)}
            self._block(code, labels)
            assert not any(self.copies), "copies that nothing waits for"

    def _barrier(self, active: np.ndarray, name: str, count: str = "") -> None:
        """Of a block, with the number of its threads, or of a warp, with its lanes alone."""
        if not active.all() or (name, count) not in (("1", str(self.block_size)), ("0xffffffff", "")):
            raise RuntimeError(f"a barrier {name} of {count or 'a warp'} without all threads")
        assert self.races is not None
        for threads in np.split(np.arange(self.threads), self.cluster) if count else ():
            self.races.meet(threads)

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        if name[0] not in KNOWN:
            super()._step(name, arguments, active)
            return
        bits, real = self._bits, self._real
        put = lambda value: self._put(arguments[0], value, active)
        low = lambda x: bits(x) & U64(0xFFFFFFFF)
        assert self.races is not None
        match name:
            case ["barrier", "cluster", *_] if not active.any():
                pass
            case ["barrier", "cluster", which, *how]:
                if not active.all() or self.waiting != (which == "wait"):
                    raise RuntimeError("a barrier of the cluster out of turn")
                self.waiting = which == "arrive"
                if how[0] == "acquire":
                    self.races.meet(np.arange(self.threads))
            case ["st", "async", *_]:
                self._store_to_cluster([arguments[0], (arguments[1],), arguments[2]], active)
            case ["cp", "async", "cg", "shared", "global"]:
                to = self._shared(arguments[0], 16, active)
                here = self._global(arguments[1], 16, active)
                if (to[active, 0] % 16).any() or (here[active, 0] % 16).any():
                    raise RuntimeError("a copy is not aligned")
                if active.any():
                    self.copies[-1].append((np.flatnonzero(active), to[active], here[active]))
                self.shared[to[active]] = 0xFF
            case ["cp", "async", "commit_group"]:
                self.copies.append([])
            case ["cp", "async", "wait_group"]:
                ready = len(self.copies) - 1 - int(arguments[0])
                for group in self.copies[: max(ready, 0)]:
                    for threads, to, here in group:
                        self.races.store(threads, to)
                        self.shared[to] = self.memory[here]
                self.copies = self.copies[max(ready, 0) :]
            case ["selp", "b32"]:
                put(np.where(bits(arguments[3]), low(arguments[1]), low(arguments[2])))
            case ["div", "u32"]:
                put(low(arguments[1]) // low(arguments[2]))
            case ["max" | "min" as which, "NaN", "f32"]:
                put({"max": np.maximum, "min": np.minimum}[which](real(arguments[1]), real(arguments[2])))
            case ["mapa", "shared::cluster", "u32"]:
                if (low(arguments[2])[active] >= self.cluster).any():
                    raise RuntimeError("there is no such block")
                put(low(arguments[1]) + low(arguments[2]) * U64(self.shared_bytes))
            case _:
                super()._step(name, arguments, active)
