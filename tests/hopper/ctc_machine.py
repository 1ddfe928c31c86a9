"""The machine for the kernels of CTC: warps of a block that part ways, and what else those kernels emit."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tests.hopper.recurrent_machine import Recurrent
from tests.hopper.row_machine import U32, U64

KNOWN = ("shfl", "cvt", "setp", "mad", "selp", "or", "mov", "not")  # the instructions that `Ctc` adds to


class Ctc(Recurrent):
    """Memory as bytes, and `run`, which runs a block of PTX for every block of threads."""

    replaces = True  # a block writes a row of the gradient, and after a barrier its labels' elements again

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        if name[0] not in KNOWN:
            super()._step(name, arguments, active)
            return
        bits, real = self._bits, self._real
        put = lambda value: self._put(arguments[0], value, active)
        signed = lambda x: (bits(x) & U64(0xFFFFFFFF)).astype(U32).view(np.int32)
        match name:
            case ["shfl", "sync", "up", "b32"]:
                if (active.reshape(-1, 32).any(1) != active.reshape(-1, 32).all(1)).any():
                    raise RuntimeError("an exchange without all threads of a warp")
                lanes = np.arange(self.threads)
                put(bits(arguments[1])[np.where(lanes % 32 < int(arguments[2]), lanes, lanes - int(arguments[2]))])
            case ["cvt", "rni", "s32", "f32"]:
                put(np.rint(np.nan_to_num(real(arguments[1]))).astype(np.int32).view(U32).astype(U64))
            case ["cvt", "s64", "s32"]:
                put(signed(arguments[1]).astype(np.int64).view(U64))
            case ["setp", "le", "f32"]:
                put(real(arguments[1]) <= real(arguments[2]))
            case ["setp", "ne", "s32"]:
                put(signed(arguments[1]) != signed(arguments[2]))
            case ["mad", "wide", "s32"]:
                a, b = (signed(x).astype(np.int64) for x in arguments[1:3])
                put((a * b).view(U64) + bits(arguments[3]))
            case ["selp", "b64"]:
                put(np.where(bits(arguments[3]), bits(arguments[1]), bits(arguments[2])))
            case ["or", "b32"]:
                put((bits(arguments[1]) | bits(arguments[2])) & U64(0xFFFFFFFF))
            case ["not", "pred"]:
                put(~bits(arguments[1]))
            case ["mov", "b16"]:
                put(bits(arguments[1]) & U64(0xFFFF))
            case _:
                super()._step(name, arguments, active)


def launched(code: str, arrays: Sequence[Any], outs: Sequence[Any], **options: Any) -> Any:
    """In place of `launch`: results of the machine, whose bytes are 0xFF where nothing is stored."""
    run = lambda *given: tuple(_run(code, given, outs, **options))
    return jax.pure_callback(run, tuple(outs), *arrays)


def _run(
    code: str, arrays: Any, outs: Any, *, name: str, blocks: int, threads: int = 128, floats: int = 0
) -> list[np.ndarray]:
    arrays = [np.asarray(v) for v in arrays]
    starts, size = [], 0
    for v in (*arrays, *outs):
        starts.append(size)
        size += -(-int(np.prod(v.shape)) * v.dtype.itemsize // 256) * 256 + 256  # between, nothing may be used
    machine = Ctc(size, 4 * floats)
    machine.arrays[:] = False
    for v, start in zip((*arrays, *outs), starts, strict=True):
        machine.arrays[start : start + int(np.prod(v.shape)) * v.dtype.itemsize] = True
    for v, start in zip(arrays, starts, strict=False):
        machine.memory[start : start + v.nbytes] = np.ascontiguousarray(v).view(np.uint8).ravel()
    machine.run(code, [*starts, 0], threads, blocks)
    found = []
    for out, start in zip(outs, starts[len(arrays) :], strict=True):
        data = machine.memory[start : start + int(np.prod(out.shape)) * out.dtype.itemsize]
        found.append(data.view(out.dtype).reshape(out.shape))
        machine.written[start : start + len(data)] = 0
    assert not machine.written.any(), f"{name} stores into its operands"
    return found
