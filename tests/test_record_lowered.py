"""The hashes of benchmarks/record_lowered.py: a move leaves them, a change of a program or of a kernel does not."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import record_lowered  # pyright: ignore[reportMissingImports]  (no package)

pytestmark = pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
SOURCE = "def {name}(x):\n    return dnn.softmax(x, algorithm={algorithm!r}, engine='hopper') * {factor}\n"


def lowered(lines: int = 0, name: str = "f", factor: float = 2.0, algorithm: str = "accurate") -> Any:
    """The program of a function that stands so many lines into its file."""
    scope: dict[str, Any] = {"dnn": dnn}
    source = "\n" * lines + SOURCE.format(name=name, factor=factor, algorithm=algorithm)
    exec(compile(source, f"{name}.py", "exec"), scope)
    shape = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    return jax.jit(scope[name]).trace(shape).lower(lowering_platforms=("cuda",))


def hashes(**options: Any) -> dict[str, Any]:
    return record_lowered.hashes_of(lowered(**options).compiler_ir("stablehlo"))


def test_a_move_changes_no_hash():
    assert lowered().as_text() != lowered(lines=7, name="moved").as_text()
    assert hashes() == hashes(lines=7, name="moved")
    assert len(hashes()["kernels"]) == 1


def test_another_program_has_another_hash():
    assert hashes(factor=3.0)["program"] != hashes()["program"]
    assert hashes(factor=3.0)["kernels"] == hashes()["kernels"]


def test_another_kernel_has_another_hash():
    assert hashes(algorithm="log")["kernels"] != hashes()["kernels"]
