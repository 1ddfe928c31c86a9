"""A small machine that runs the row kernels' PTX on the CPU: all threads of a block in step, one block after another.

It knows the instructions that those kernels emit and no others: an unknown one raises. A cluster's threads run in step
like one block's. Branches must be taken by all of them or none (the kernels' are), so a barrier has nothing to wait
for. ex2 and lg2 are exact here.
"""

import re
from typing import Any

import ml_dtypes
import numpy as np

HALF = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
WIDTHS = {"b16": 2, "b32": 4, "f32": 4}
U32, U64 = np.uint32, np.uint64
SHARED = 4096  # bytes of a block


class Rows:
    """Memory as bytes, and `run`, which runs a block of PTX for every block of threads."""

    def __init__(self, size: int) -> None:
        self.memory = np.full(size, 0xFF, np.uint8)  # NaN in every float format: what is read unwritten shows
        self.written = np.zeros(size, np.uint8)  # how often
        self.shared = np.full(8 * SHARED, 0xFF, np.uint8)

    def run(self, text: str, operands: list[int], block_size: int, clusters: int, cluster: int = 1) -> None:
        threads = block_size * cluster
        code, labels = [], {}
        for line in map(str.strip, text.splitlines()):
            if line.endswith(":"):
                labels[line[:-1]] = len(code)
            elif line not in "{}" and not line.startswith(".reg"):
                code.append(_decode(line))
        self.rank = np.arange(threads, dtype=U64) // U64(block_size)
        for index in range(clusters):
            self.registers: dict[str, Any] = {"%tid.x": np.arange(threads, dtype=U64) % U64(block_size)}
            self.registers |= {"%cluster_ctarank": self.rank, "%clusterid.x": np.full(threads, index, U64)}
            self.registers["%ctaid.x"] = U64(index * cluster) + self.rank
            self.registers |= {f"${i}": np.full(threads, value, U64) for i, value in enumerate(operands)}
            self.threads = threads
            self.shared[:] = 0xFF
            at = 0
            while at < len(code):
                guard, name, arguments = code[at]
                at += 1
                active = self.registers[guard] if guard else np.ones(threads, bool)
                if name[0] == "bra":
                    if active.any() != active.all():
                        raise RuntimeError("threads of one block part ways")
                    at = labels[arguments[0]] if active.all() else at
                elif name[0] not in ("bar", "barrier"):
                    self._step(name, arguments, active)

    def _bits(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        value = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.threads, value & 0xFFFFFFFFFFFFFFFF, U64)

    def _real(self, operand: str) -> np.ndarray:
        return self._bits(operand).astype(U32).view(np.float32)

    def _put(self, target: str, value: np.ndarray, active: np.ndarray) -> None:
        value = value.view(U32).astype(U64) if value.dtype == np.float32 else value
        value = value if value.dtype == bool else value.astype(U64)
        old = self.registers.get(target, np.zeros_like(value))
        self.registers[target] = np.where(active, value, old)

    def _places(self, operand: str, size: int) -> np.ndarray:
        base, _, offset = operand[1:-1].partition("+")
        return self._bits(base).astype(np.int64)[:, None] + int(offset or 0) + np.arange(size)

    def _own(self, space: str) -> Any:
        """Where a block's own shared memory starts among its cluster's."""
        return self.rank.astype(np.int64)[:, None] * SHARED if space == "shared" else 0

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        bits, real = self._bits, self._real
        put = lambda value: self._put(arguments[0], value, active)
        low = lambda x: bits(x) & U64(0xFFFFFFFF)
        with np.errstate(all="ignore"):
            match name:
                case ["mov", "b32"] if isinstance(arguments[0], tuple):
                    for i, half in enumerate(arguments[0]):
                        self._put(half, bits(arguments[1]) >> U64(16 * i) & U64(0xFFFF), active)
                case ["mov", "b64"]:
                    put(bits(arguments[1]))
                case ["mov", _]:
                    put(low(arguments[1]))
                case ["add", "s64"]:
                    put(bits(arguments[1]) + bits(arguments[2]))
                case ["add", "s32"]:
                    put((bits(arguments[1]) + bits(arguments[2])) & U64(0xFFFFFFFF))
                case ["mul", "lo", "s32"]:
                    put((bits(arguments[1]) * bits(arguments[2])) & U64(0xFFFFFFFF))
                case ["mul", "wide", "u32"]:
                    put(low(arguments[1]) * low(arguments[2]))
                case ["mad", "lo", "s32"]:
                    put((bits(arguments[1]) * bits(arguments[2]) + bits(arguments[3])) & U64(0xFFFFFFFF))
                case ["mad", "wide", "u32"]:
                    put(low(arguments[1]) * low(arguments[2]) + bits(arguments[3]))
                case ["and", "b32"]:
                    put(bits(arguments[1]) & bits(arguments[2]))
                case ["and", "pred"]:
                    put(bits(arguments[1]) & bits(arguments[2]))
                case ["shl" | "shr" as way, _]:
                    shift = np.left_shift if way == "shl" else np.right_shift
                    put(shift(low(arguments[1]), bits(arguments[2])) & U64(0xFFFFFFFF))
                case ["setp", relation, "s32" | "u32"]:
                    a, b = (bits(x).astype(U32).view(np.int32) for x in arguments[1:])
                    put({"lt": a < b, "ge": a >= b, "eq": a == b}[relation])
                case ["setp", "eq", "f32"]:
                    put(real(arguments[1]) == real(arguments[2]))
                case ["selp", "f32"]:
                    put(np.where(bits(arguments[3]), real(arguments[1]), real(arguments[2])))
                case ["abs", "f32"]:
                    put(np.abs(real(arguments[1])))
                case ["max" | "min" as which, "f32"]:  # of a number and NaN, the number
                    put((np.fmax if which == "max" else np.fmin)(real(arguments[1]), real(arguments[2])))
                case ["add" | "sub" | "mul" as which, "rn", "f32"]:
                    a, b = real(arguments[1]), real(arguments[2])
                    put({"add": a + b, "sub": a - b, "mul": a * b}[which])
                case ["rcp", "rn", "f32"]:
                    put(np.float32(1) / real(arguments[1]))
                case ["ex2", "approx", "ftz", "f32"]:
                    value = np.exp2(real(arguments[1]).astype(np.float64)).astype(np.float32)
                    put(np.where(value < 2.0**-126, np.float32(0), value))
                case ["lg2", "approx", "f32"]:
                    put(np.log2(real(arguments[1]).astype(np.float64)).astype(np.float32))
                case ["shfl", "sync", "bfly", "b32"]:
                    distance = int(arguments[2])
                    put(bits(arguments[1])[np.arange(self.threads) ^ distance])
                case ["cvt", "f32", "f16"]:
                    put(bits(arguments[1]).astype(np.uint16).view(np.float16).astype(np.float32))
                case ["cvt", "rn", "bf16x2" | "f16x2" as kind, "f32"]:
                    high, lower = (real(x).astype(HALF[kind[:-2]]).view(np.uint16).astype(U64) for x in arguments[1:])
                    put(high << U64(16) | lower)
                case ["cvt", "rn", "bf16" | "f16" as kind, "f32"]:
                    put(real(arguments[1]).astype(HALF[kind]).view(np.uint16).astype(U64))
                case ["mapa", "shared::cluster", "u32"]:
                    put(low(arguments[1]) + bits(arguments[2]) * U64(SHARED))
                case ["ld", space, *_, width]:
                    memory = self.shared if space == "shared" else self.memory
                    targets = arguments[0] if isinstance(arguments[0], tuple) else (arguments[0],)
                    places = (self._places(arguments[1], 4 * len(targets)) + self._own(space))[active]
                    if not width[1:] == "32" or (places[:, 0] % (4 * len(targets))).any():
                        raise RuntimeError("an access is not aligned")
                    words = np.zeros((self.threads, len(targets)), U32)
                    words[active] = memory[places].view(U32)
                    for i, target in enumerate(targets):
                        self._put(target, words[:, i].astype(U64), active)
                case ["st", space, *_, width]:
                    values = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
                    size = WIDTHS[width]
                    places = (self._places(arguments[0], size * len(values)) + self._own(space))[active]
                    if (places[:, 0] % (size * len(values))).any():
                        raise RuntimeError("an access is not aligned")
                    raw = np.stack([bits(v).astype(f"<u{size}") for v in values], 1).view(np.uint8)[active]
                    (self.memory if space == "global" else self.shared)[places] = raw
                    if space == "global":
                        np.add.at(self.written, places, 1)
                case _:
                    raise NotImplementedError(".".join(name))


def _decode(line: str) -> tuple[str | None, list[str], list[Any]]:
    match = re.fullmatch(r"(?:@(p\d+) )?(\S+) (.*);", line)
    if match is None:
        raise NotImplementedError(line)
    guard, name, rest = match.groups()
    arguments = [
        tuple(part.strip() for part in item[1:-1].split(",")) if item[0] == "{" else item
        for item in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
    ]
    return guard, name.split("."), arguments
