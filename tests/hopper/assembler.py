"""The PTX that kernels emit, as they are lowered without a GPU, and NVIDIA's assembler for it.

A kernel's own instructions, and those that Mosaic emits for Pallas' calls (TMA, barriers, wgmma), stand in the lowered
program as blocks of inline assembly; LLVM, on the machine with the GPU, only chooses registers for their operands. So
each block is assembled as an entry of its own, with registers of the types that its constraints name.
"""

import contextlib
import dataclasses
import functools as ft
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxdnn._src.core.compat import llvm

TARGET = "sm_90a"
VERSION = "8.6"  # of PTX: CUDA 12.7; the copies that Mosaic emits need it, the kernels' own instructions 8.1
TYPES = {"h": "b16", "r": "b32", "l": "b64", "f": "f32", "d": "f64", "b": "pred"}


@ft.cache
def ptxas() -> Path | None:
    """The assembler of the package `nvidia-cuda-nvcc-cu12`, which the tests depend on, or of CUDA 13, or on PATH."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(map(Path, (spec and spec.submodule_search_locations) or ()))
    places = [root / place / "bin/ptxas" for place in ("cuda_nvcc", "cu13") for root in roots]
    found = next((str(p) for p in places if p.exists()), None) or shutil.which("ptxas")
    return Path(found) if found else None


needs_ptxas = pytest.mark.skipif(ptxas() is None, reason="needs ptxas: the package nvidia-cuda-nvcc-cu12 is for Linux")


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of inline assembly: its text, LLVM's constraints of its operands, and the values of constants."""

    text: str
    constraints: str
    constants: tuple[tuple[int, int], ...] = ()

    def entry(self, name: str) -> str:
        """A kernel that consists of this block."""
        lines, names = [], []
        for i, constraint in enumerate(c for c in self.constraints.split(",") if c and not c.startswith("~")):
            letter = constraint.lstrip("=&")
            if letter == "n":
                names.append(str(dict(self.constants)[i]))
            elif letter.isdigit():
                names.append(names[int(letter)])
            else:
                names.append(f"operand{i}")
                lines.append(f".reg .{TYPES[letter]} operand{i};")
        text = re.sub(r"\$(\d+)", lambda m: names[int(m.group(1))], self.text.replace("$$", "\0"))
        return "\n".join([f".visible .entry {name}()", "{", *lines, "{", text.replace("\0", "$"), "}", "ret;", "}"])


@contextlib.contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Block]]:
    """The blocks of all that is lowered within it."""
    blocks: dict[Block, None] = {}
    found: list[Block] = []
    emit = llvm.inline_asm

    def inline_asm(result: Any, operands: Any, text: str, constraints: str, **options: Any) -> Any:
        results = sum(c.startswith("=") for c in constraints.split(","))
        kinds = [c for c in constraints.split(",") if c and not c.startswith("~")][results:]
        constants = [(results + i, _constant(operands[i])) for i, kind in enumerate(kinds) if kind == "n"]
        blocks[Block(text, constraints, tuple(constants))] = None
        return emit(result, operands, text, constraints, **options)

    with monkeypatch.context() as patch:
        patch.setattr(llvm, "inline_asm", inline_asm)
        yield found
    found.extend(blocks)


def _constant(value: Any) -> int:
    return value.owner.attributes["value"].value


def errors(blocks: Iterable[Block], version: str = VERSION) -> str:
    """What the assembler says against blocks; "" if nothing."""
    program = ptxas()
    assert program is not None
    entries = [block.entry(f"block{i}") for i, block in enumerate(blocks)]
    assert entries
    text = "\n".join([f".version {version}", f".target {TARGET}", ".address_size 64", *entries])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "blocks.ptx"
        source.write_text(text)
        command = [str(program), f"-arch={TARGET}", str(source), "-o", str(Path(folder) / "blocks.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    lines = text.splitlines()
    notes = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"error|fatal", line)]
    numbered = ((note, re.search(r"line (\d+)", note)) for note in notes)
    said = [f"{note}\n  {lines[int(n.group(1)) - 1].strip()}" if n else note for note, n in numbered]
    return "\n".join(said[:20]) if done.returncode else ""
