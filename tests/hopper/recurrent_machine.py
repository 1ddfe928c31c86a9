"""The machine of clusters for the recurrent kernels: products of matrices, and what else those kernels emit.

A product adds as the reference's model of the matrix unit does. The exponential and the reciprocal are exact here.
"""

from typing import Any

import numpy as np

from jaxdnn_reference import arithmetic
from tests.hopper.image_machine import Images
from tests.hopper.row_machine import HALF, U32, U64, Rows

KNOWN = ("mma", "prmt", "copysign", "prefetch", "ld", "mov", "setp", "selp", "st")


class Recurrent(Images):
    """Memory as bytes, and `run`, which runs a block of PTX for every cluster of blocks."""

    def run(self, *arguments: Any, **options: Any) -> None:
        self.made: dict[int, tuple[int, int]] = {}  # of each mbarrier the warp that made it, and when
        super().run(*arguments, **options)

    def _mbarrier(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        super()._mbarrier(name, arguments, active)
        if name[1] == "init":
            assert self.races is not None
            where = self._shared(arguments[0], 8, active)[active, 0]
            for barrier, warp in zip(where, np.flatnonzero(active) // 32, strict=True):
                self.made[int(barrier)] = int(warp), int(self.races.clocks[warp, warp])

    def _store_to_cluster(self, arguments: list[Any], active: np.ndarray) -> None:
        """A store must come after the receiver has made the mbarrier."""
        assert self.races is not None
        for thread, barrier in zip(np.flatnonzero(active), self._places(arguments[2], 1)[active, 0], strict=True):
            warp, moment = self.made[int(barrier)]
            if warp != thread // 32 and moment > self.races.clocks[thread // 32, warp]:
                raise RuntimeError(f"warp {thread // 32} stores before warp {warp} is known to have made its barrier")
        super()._store_to_cluster(arguments, active)

    def _barrier(self, active: np.ndarray, name: str, count: str = "") -> None:
        if not count:
            if name != "0xffffffff" or (active.reshape(-1, 32).any(1) != active.reshape(-1, 32).all(1)).any():
                raise RuntimeError("a barrier of a warp without all lanes")
        elif active.any():
            Rows._barrier(self, active, name, count)

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        if name[0] not in KNOWN or not active.any():
            if active.any():
                super()._step(name, arguments, active)
            return
        bits, real = self._bits, self._real
        put = lambda value: self._put(arguments[0], value, active)
        low = lambda x: bits(x) & U64(0xFFFFFFFF)
        match name:
            case ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", kind, _, "f32"]:
                if not active.reshape(-1, 32).any(1).tolist() == active.reshape(-1, 32).all(1).tolist():
                    raise RuntimeError("a product without all threads of a warp")
                self._multiply(arguments, HALF[kind], active)
            case ["prmt", "b32"]:
                source = low(arguments[1]) | low(arguments[2]) << U64(32)
                picks = low(arguments[3])
                out = np.zeros(self.threads, U64)
                for i in range(4):
                    place = (picks >> U64(4 * i) & U64(7)) * U64(8)
                    out |= (source >> place & U64(0xFF)) << U64(8 * i)
                put(out)
            case ["copysign", "f32"]:
                put(np.copysign(real(arguments[2]), real(arguments[1])))
            case ["prefetch", *_]:
                self._global(arguments[0], 1, active)
            case ["ld", "global", "nc", "b16"]:
                places = self._global(arguments[1], 2, active)[active]
                words = np.zeros(self.threads, U64)
                words[active] = self.memory[places].view(np.uint16)[:, 0]
                put(words)
            case ["mov", "b32"] if isinstance(arguments[1], tuple):
                put(bits(arguments[1][0]) & U64(0xFFFF) | (bits(arguments[1][1]) & U64(0xFFFF)) << U64(16))
            case ["setp", "lt" | "gt" as relation, "f32"]:
                way = np.less if relation == "lt" else np.greater
                put(way(real(arguments[1]), real(arguments[2])))
            case ["setp", "gt", "s32"]:
                a, b = (low(x).astype(U32).view(np.int32) for x in arguments[1:])
                put(a > b)
            case ["st", "async", *_, "v2", "f32"]:
                self._store_to_cluster(arguments, active)
            case ["st", "async", *_, "v4", "b32"]:
                self._store_to_cluster(arguments, active)
            case _:
                super()._step(name, arguments, active)

    def _multiply(self, arguments: list[Any], dtype: np.dtype, active: np.ndarray) -> None:
        """All warps that are active at once."""
        warps = np.flatnonzero(active.reshape(-1, 32).all(1))
        lanes = (warps[:, None] * 32 + np.arange(32)).ravel()

        def block(name: str) -> np.ndarray:  # (warps, 8 rows, 8 values)
            words = self._bits(name).astype(U32)[lanes]
            return words.view(dtype).reshape(len(warps), 8, 8)

        a0, a1, a2, a3 = (block(name) for name in arguments[1])
        b0, b1 = (block(name) for name in arguments[2])
        a = np.concatenate([np.concatenate([a0, a2], 2), np.concatenate([a1, a3], 2)], 1)  # (warps, 16, 16)
        b = np.concatenate([b0, b1], 2)  # (warps, columns, 16)
        c = np.empty((len(warps), 8, 16))
        for i, name in enumerate(arguments[3]):
            part = self._real(name)[lanes].reshape(len(warps), 8, 4)  # rows, pairs of columns
            c[:, i % 2 :: 2, 8 * (i // 2) : 8 * (i // 2) + 8] = part.transpose(0, 2, 1)
        ks = lambda v: np.moveaxis(v, 2, 0)
        total, _ = arithmetic._tensor_core_step(c, ks(a), ks(b), arithmetic.UNITS[dtype])
        for i, name in enumerate(arguments[0]):
            part = total[:, i % 2 :: 2, 8 * (i // 2) : 8 * (i // 2) + 8].transpose(0, 2, 1).astype(np.float32)
            value = np.zeros(self.threads, np.float32)
            value[lanes] = part.ravel()
            here = np.zeros(self.threads, bool)
            here[lanes] = True
            self._put(name, value, here)
