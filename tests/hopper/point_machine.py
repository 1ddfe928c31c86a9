"""The row machine for the kernels of sampling: threads that part ways and end early, and local memory of a thread."""

import re
from typing import Any

import numpy as np

from tests.hopper.norm_machine import NormRows
from tests.hopper.row_machine import U64

# The instructions that `Points` adds to, or checks.
KNOWN = (
    "mad",
    "and",
    "or",
    "setp",
    "selp",
    "cvt",
    "shf",
    "div",
    "min",
    "mul",
    "ld",
    "st",
    "vote",
    "bfind",
    "shfl",
    "popc",
)
RELATIONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
TOWARDS = {"rmi": np.floor, "rni": np.rint, "rzi": np.trunc}


class Points(NormRows):
    """Memory as bytes, and `run`, which runs a block of PTX for every block of threads."""

    def run(self, text: str, operands: list[int], block_size: int, clusters: int, cluster: int = 1) -> None:
        declared = re.search(r"^\.local \.align 16 \.b8 more\[(\d+)\];$", text, re.MULTILINE)
        self.local = np.full((block_size, int(declared[1]) if declared else 0), 0xFF, np.uint8)
        text = "\n".join(line for line in text.splitlines() if not line.startswith(".local"))
        super().run(text.replace(", more;", ", 0;"), operands, block_size, clusters)

    @staticmethod
    def _whole_warps(active: np.ndarray) -> None:
        if (active.reshape(-1, 32).any(1) != active.reshape(-1, 32).all(1)).any():
            raise RuntimeError("an exchange without all threads of a warp")

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        if name[0] not in KNOWN:
            super()._step(name, arguments, active)
            return
        bits, real = self._bits, self._real
        put = lambda value: self._put(arguments[0], value, active)
        low = lambda x: bits(x) & U64(0xFFFFFFFF)
        signed = lambda x: bits(x).astype(np.uint32).view(np.int32)
        match name:
            case ["mad", "wide", "s32"]:
                product = signed(arguments[1]).astype(np.int64) * signed(arguments[2]).astype(np.int64)
                put(product.view(U64) + bits(arguments[3]))
            case ["mul", "lo", "s32"]:
                put((low(arguments[1]) * low(arguments[2])) & U64(0xFFFFFFFF))
            case ["and", "b64"]:
                put(bits(arguments[1]) & bits(arguments[2]))
            case ["and" | "or" as which, "pred"]:
                put((np.logical_and if which == "and" else np.logical_or)(bits(arguments[1]), bits(arguments[2])))
            case ["setp", "neu", "f32"]:
                put(real(arguments[1]) != real(arguments[2]))
            case ["setp", "ne", "s32"]:
                put(low(arguments[1]) != low(arguments[2]))
            case ["setp", "gt", "s32"]:
                put(signed(arguments[1]) > signed(arguments[2]))
            case ["setp", relation, "f32"] if relation in RELATIONS:
                put(RELATIONS[relation](real(arguments[1]), real(arguments[2])))
            case ["selp", "b32"]:
                put(np.where(bits(arguments[3]), low(arguments[1]), low(arguments[2])))
            case ["popc", "b32"]:
                put(np.bitwise_count(low(arguments[1])).astype(U64))
            case ["cvt", "u32", "u16"] | ["cvt", "u16", "u32"]:
                put(bits(arguments[1]) & U64(0xFFFF))
            case ["cvt", way, "f32", "f32"]:
                put(TOWARDS[way](real(arguments[1])))
            case ["cvt", way, "s32", "f32"]:
                number = np.nan_to_num(TOWARDS[way](real(arguments[1])).astype(np.float64), nan=0.0)
                put(np.clip(number, -(2.0**31), 2.0**31 - 1).astype(np.int32).view(np.uint32).astype(U64))
            case ["shf", "r", "wrap", "b32"]:
                both = low(arguments[1]) | low(arguments[2]) << U64(32)
                put((both >> (low(arguments[3]) & U64(31))) & U64(0xFFFFFFFF))
            case ["div", "u32"]:
                put(low(arguments[1]) // low(arguments[2]))
            case ["div", "rn", "f32"]:
                put(real(arguments[1]) / real(arguments[2]))
            case ["vote", "sync", "ballot", "b32"]:
                self._whole_warps(active)
                votes = bits(arguments[1]).reshape(-1, 32).astype(U64) << np.arange(32, dtype=U64)
                put(np.repeat(votes.sum(1, dtype=U64), 32))
            case ["bfind", "u32"]:
                put(np.maximum(np.floor(np.log2(np.maximum(low(arguments[1]), 1).astype(np.float64))), 0).astype(U64))
            case ["shfl", "sync", "idx", "b32"]:
                self._whole_warps(active)
                lane = np.arange(self.threads) // 32 * 32 + low(arguments[2]).astype(int) % 32
                put(low(arguments[1])[lane])
            case ["min", "u32"]:
                put(np.minimum(low(arguments[1]), low(arguments[2])))
            case ["ld", "local", "b32"]:
                places = self._places(arguments[1], 4)[active]
                found = np.zeros(self.threads, U64)
                found[active] = np.take_along_axis(self.local[active], places, 1).view(np.uint32)[:, 0]
                put(found)
            case ["st", "local", "b32"]:
                places = self._places(arguments[0], 4)[active]
                raw = low(arguments[1]).astype("<u4")[:, None].view(np.uint8)[active]
                self.local[np.flatnonzero(active)[:, None], places] = raw
            case ["ld", "global", "nc", "b16"]:
                places = self._global(arguments[1], 2, active)[active]
                found = np.zeros(self.threads, U64)
                found[active] = self.memory[places].view(np.uint16)[:, 0]
                put(found)
            case _:
                super()._step(name, arguments, active)
