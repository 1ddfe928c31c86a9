"""A small machine that runs the kernels' PTX on the CPU: one warp of 32 lanes at a time over a shared memory.

It knows the instructions that the depthwise kernels emit and no others: an unknown one raises. Branches must be taken
by all lanes or none (the kernels' are). `mma` adds as the reference's model of the matrix unit does.
"""

import re

import ml_dtypes
import numpy as np

from jaxdnn_reference import arithmetic, rounding

LANES = np.arange(32)
HALF = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
SHIFTS = {"shl": np.left_shift, "shr": np.right_shift}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
SUMS = {"add": np.add, "sub": np.subtract}


def tile_bytes(values, swizzle=0):
    """Bytes of a (rows, columns, channels) tile as TMA lays it out, 16-byte chunks exchanged by address bits 7.. ."""
    flat = np.ascontiguousarray(values).view(np.uint8).ravel()
    return flat[_swizzled(flat.size, swizzle)] if swizzle else flat


def from_tile_bytes(data, dtype, shape, swizzle=0):
    flat = data[_swizzled(data.size, swizzle)] if swizzle else data
    return np.ascontiguousarray(flat).view(dtype).reshape(shape)


def _swizzled(size, swizzle):
    address = np.arange(size)
    mask = swizzle // 16 - 1
    return address ^ (((address >> 7) & mask) << 4)


class Machine:
    """Shared memory as bytes, and `run`, which runs a block of PTX for every warp."""

    def __init__(self, size):
        self.shared = np.full(size, 0xFF, np.uint8)  # NaN in every float format: what is read unwritten shows
        self.allocated = np.zeros(size, bool)  # bytes that the kernel may use: any other one raises

    def _allowed(self, places):
        if (places < 0).any() or (places >= len(self.allocated)).any() or not self.allocated[places].all():
            wrong = next(int(p) for p in places.ravel() if not 0 <= p < len(self.allocated) or not self.allocated[p])
            raise RuntimeError(f"shared byte {wrong} lies in no buffer")
        return places

    def run(self, text, operands, warps):
        """operands: ints (the same for all threads) or arrays (warps, 32) of float32; returns those arrays updated."""
        code, labels = [], {}
        for line in text.splitlines():
            line = line.strip()
            if line.endswith(":"):
                labels[line[:-1]] = len(code)
            elif line not in "{}" and not line.startswith(".reg"):
                code.append(self._decode(line))
        for warp in range(warps):
            registers = {"%tid.x": (LANES + 32 * warp).astype(np.uint32)}
            for i, value in enumerate(operands):
                if isinstance(value, np.ndarray):
                    registers[f"${i}"] = value[warp].view(np.uint32).copy()
                else:
                    registers[f"${i}"] = np.full(32, value, np.uint32)
            self._warp(code, labels, registers)
            for i, value in enumerate(operands):
                if isinstance(value, np.ndarray):
                    value[warp] = registers[f"${i}"].view(np.float32)

    @staticmethod
    def _decode(line):
        match = re.fullmatch(r"(?:@(!?p\d+) )?(\S+) (.*);", line)
        assert match, line
        guard, name, rest = match.groups()
        operands = [
            tuple(part.strip() for part in item[1:-1].split(",")) if item[0] == "{" else item
            for item in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        ]
        return guard, name.split("."), operands

    def _warp(self, code, labels, registers):
        at = 0
        while at < len(code):
            guard, name, operands = code[at]
            at += 1
            active = np.ones(32, bool)
            if guard:
                active = ~registers[guard[1:]] if guard[0] == "!" else registers[guard]
            if name[0] == "bra":
                if active.any() != active.all():
                    raise RuntimeError("lanes of one warp part ways")
                if active.all():
                    at = labels[operands[0]]
                continue
            self._step(name, operands, registers, active)

    def _step(self, name, operands, registers, active):
        get = lambda x: self._value(registers, x)
        real = lambda x: get(x).view(np.float32)

        def put(target, value):
            old = registers.get(target, np.zeros_like(value))
            registers[target] = np.where(active, value, old)

        match name:
            case ["mov", *_] if isinstance(operands[0], tuple):
                word = get(operands[1])
                for i, half in enumerate(operands[0]):
                    put(half, (word >> np.uint32(16 * i)) & np.uint32(0xFFFF))
            case ["mov", *_]:
                put(operands[0], get(operands[1]))
            case ["add" | "sub", "s32" | "u32"]:
                put(operands[0], SUMS[name[0]](get(operands[1]), get(operands[2])))
            case ["shl" | "shr", "b32" | "u32"]:
                put(operands[0], SHIFTS[name[0]](get(operands[1]), get(operands[2])))
            case ["and" | "or" | "xor", "b32"]:
                put(operands[0], BITS[name[0]](get(operands[1]), get(operands[2])))
            case ["mad", "lo", "s32"]:
                put(operands[0], get(operands[1]) * get(operands[2]) + get(operands[3]))
            case ["div", "u32"]:
                put(operands[0], get(operands[1]) // get(operands[2]))
            case ["prmt", "b32"]:
                source = get(operands[1]).astype(np.uint64) | get(operands[2]).astype(np.uint64) << np.uint64(32)
                picks = get(operands[3]).astype(np.uint64)
                out = sum(
                    (source >> (picks >> np.uint64(4 * i) & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF))
                    << np.uint64(8 * i)
                    for i in range(4)
                )
                put(operands[0], np.asarray(out, np.uint64).astype(np.uint32))
            case ["setp", "ge", "s32"]:
                put(operands[0], get(operands[1]).view(np.int32) >= get(operands[2]).view(np.int32))
            case ["setp", "eq", "u32"]:
                put(operands[0], get(operands[1]) == get(operands[2]))
            case ["setp", "nan", "f32"]:
                put(operands[0], np.isnan(real(operands[1])) | np.isnan(real(operands[2])))
            case ["selp", "b32" | "f32"]:
                put(operands[0], np.where(registers[operands[3]], get(operands[1]), get(operands[2])))
            case ["vote", "sync", "any", "pred"]:
                put(operands[0], np.full(32, registers[operands[1]].any()))
            case ["add", "rn", "f32"]:
                with np.errstate(all="ignore"):
                    put(operands[0], (real(operands[1]) + real(operands[2])).view(np.uint32))
            case ["fma", "rn", "f32"]:
                with np.errstate(all="ignore"):
                    put(operands[0], rounding.fma(*(real(x) for x in operands[1:])).view(np.uint32))
            case ["cvt", "rn", "bf16x2" | "f16x2", "f32"]:
                high, low = (real(x).astype(HALF[name[2][:-2]]).view(np.uint16).astype(np.uint32) for x in operands[1:])
                put(operands[0], high << np.uint32(16) | low)
            case ["cvt", "f32", "f16"]:
                half = get(operands[1]).astype(np.uint16).view(np.float16)
                put(operands[0], half.astype(np.float32).view(np.uint32))
            case ["ld", "shared", width]:
                size = int(width[1:]) // 8
                where = self._address(registers, operands[1])[:, None] + np.arange(size)
                raw = np.zeros(where.shape, np.uint8)
                raw[active] = self.shared[self._allowed(where[active])]
                put(operands[0], raw.copy().view(f"<u{size}")[:, 0].astype(np.uint32))
            case ["st", "shared", width]:
                size = int(width[1:]) // 8
                where = self._address(registers, operands[0])[:, None] + np.arange(size)
                raw = np.ascontiguousarray(get(operands[1])).view(np.uint8).reshape(32, 4)[:, :size]
                self.shared[self._allowed(where[active])] = raw[active]
            case ["ldmatrix", "sync", "aligned", "m8n8", count, *rest]:
                self._load_matrices(registers, operands, int(count[1]), "trans" in rest)
            case ["stmatrix", "sync", "aligned", "m8n8", count, "trans", *_]:
                self._store_matrices(registers, operands, int(count[1]))
            case ["and", "pred"]:
                put(operands[0], registers[operands[1]] & registers[operands[2]])
            case ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", kind, _, "f32"]:
                self._multiply(registers, operands, HALF[kind])
            case _:
                raise NotImplementedError(".".join(name))

    @staticmethod
    def _value(registers, operand):
        if operand in registers:
            return registers[operand]
        if operand.startswith("0f"):
            return np.full(32, int(operand[2:], 16), np.uint32)
        return np.full(32, int(operand, 0) & 0xFFFFFFFF, np.uint32)

    @staticmethod
    def _address(registers, operand):
        base, _, offset = operand[1:-1].partition("+")
        return registers[base].astype(np.int64) + int(offset or 0)

    def _load_matrices(self, registers, operands, count, transposed):
        address = self._address(registers, operands[1])
        for i in range(count):
            rows = address[8 * i : 8 * i + 8, None] + np.arange(16)
            matrix = np.ascontiguousarray(self.shared[self._allowed(rows)]).view(np.uint16).reshape(8, 8)
            if transposed:
                matrix = np.ascontiguousarray(matrix.T)
            registers[operands[0][i]] = np.ascontiguousarray(matrix).view(np.uint32).reshape(32)

    def _store_matrices(self, registers, operands, count):
        """Transposed: column j of a matrix goes to the 16 bytes that lane j of its eight addresses."""
        address = self._address(registers, operands[0])
        for i in range(count):
            matrix = registers[operands[1][i]].view(np.uint16).reshape(8, 8)
            rows = address[8 * i : 8 * i + 8, None] + np.arange(16)
            self.shared[self._allowed(rows)] = np.ascontiguousarray(matrix.T).view(np.uint8).reshape(8, 16)

    @staticmethod
    def _multiply(registers, operands, dtype):
        def block(name):  # 8 rows, 8 values: lane l has row l//4, values 2*(l%4) and the next
            return registers[name].view(dtype).reshape(8, 8).astype(np.float64)

        a0, a1, a2, a3 = (block(n) for n in operands[1])
        b0, b1 = (block(n) for n in operands[2])
        a = np.block([[a0, a2], [a1, a3]]).astype(dtype)
        b = np.concatenate([b0.T, b1.T]).astype(dtype)
        c = np.empty((16, 8))
        for i in range(4):
            c[8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] = registers[operands[3][i]].view(np.float32).reshape(8, 4)
        with np.errstate(all="ignore"):
            total, _ = arithmetic._tensor_core_step(c.T, a.T, b, arithmetic.UNITS[a.dtype])
        for i in range(4):
            part = total.T[8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2].reshape(32)
            registers[operands[0][i]] = part.astype(np.float32).view(np.uint32)
