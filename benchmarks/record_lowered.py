"""Hashes what the calls of `jaxdnn bench` are lowered to for a GPU, so that a change of files can show that it changed
no program. Needs no GPU, and the newest JAX:

    python benchmarks/record_lowered.py PATH [--family FAMILY ...] [--against OTHER]

Every call names engine hopper and is lowered for CUDA, in the dtypes that the benchmark is run in. A row has a hash of
the whole program and one of each Mosaic kernel in it. What a pure move changes is left out of both: source locations,
and the names that JAX takes from Python functions. Rows that PATH has are kept, so that a run goes on where it stopped.
`--against` says which rows are other ones in another file, and notes them in PATH.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jaxdnn._src import families
from jaxdnn._src.cases.timed import Case

DTYPES = ("bfloat16", "float32")


def rows(family: str) -> Iterator[tuple[str, Case, str, str]]:
    """The name of every call that is timed of a family, and its case, pass and dtype."""
    for case in families.timed(family):
        for which in case.passes:
            for dtype in DTYPES:
                yield f"{family}/{case.family}/{case.name}/{which}/{dtype}", case, which, dtype


def hashes(case: Case, which: str, dtype: str) -> dict[str, Any]:
    """The hashes of a call's program and of the kernels in it, or why engine hopper refuses the call."""
    operands = jax.eval_shape(lambda: case.operands(case.batch, dtype, 0))
    try:
        lowered = jax.jit(case.ours(which, "hopper")).trace(*operands).lower(lowering_platforms=("cuda",))
    except NotImplementedError as error:
        return {"refused": str(error)}
    return hashes_of(lowered.compiler_ir("stablehlo"))


def hashes_of(module: Any) -> dict[str, Any]:
    """The hashes of a lowered program and of its kernels."""
    program, kernels = program_text(module)
    return {"program": _hash(program), "kernels": [_hash(kernel) for kernel in kernels]}


def program_text(module: Any) -> tuple[str, list[str]]:
    """A lowered program as text with its kernels left out, and the text of each kernel."""
    kernels: list[str] = []

    def take(operation: Any) -> Any:
        attributes = operation.attributes
        if "mhlo.backend_config" in attributes and "module" in (config := attributes["mhlo.backend_config"]):
            kernels.append(_kernel_text(config["module"].value_bytes))
            rest = {config[i].name: config[i].attr for i in range(len(config))}
            rest = {name: value for name, value in rest.items() if name not in ("module", "kernel_hash")}
            attributes["mhlo.backend_config"] = ir.DictAttr.get(rest)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(take)
    return _without_names(module.operation.get_asm(enable_debug_info=False)), kernels


def _kernel_text(bytecode: bytes) -> str:
    with mlir.make_ir_context() as context:  # with the dialects of memory spaces, which JAX 0.11 needs to read its own
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False))


def _without_names(text: str) -> str:
    """A program with its functions numbered in their order: JAX names them, and the module, after Python's."""
    for number, name in enumerate(re.findall(r"^ *(?:module|func\.func \w+) @([\w.-]+)", text, re.MULTILINE)):
        text = re.sub(rf"@{re.escape(name)}(?![\w.-])", f"@{number}", text)
    return text


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--family", action="append", choices=families.with_timed(), help="only these (default: all)")
    parser.add_argument("--against", type=Path, help="another such file, to compare with")
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(args.path.read_text()) if args.path.exists() else {**_provenance(), "rows": {}}
    for family in args.family or families.with_timed():
        for name, case, which, dtype in rows(family):
            if name not in record["rows"]:
                record["rows"][name] = hashes(case, which, dtype)
                print(name, record["rows"][name], flush=True)
                _write(args.path, record)
    if args.against is None:
        return 0
    record["against"] = _compared(record["rows"], json.loads(args.against.read_text()))
    _write(args.path, record)
    print(json.dumps(record["against"], indent=1))
    return 1 if record["against"]["different"] else 0


def _compared(found: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Which commit the other file is of, how many rows are in both, and which of these differ."""
    both = sorted(found.keys() & other["rows"].keys())
    different = [name for name in both if found[name] != other["rows"][name]]
    return {"commit": other["commit"], "jax": other["jax"], "compared": len(both), "different": different}


def _provenance() -> dict[str, str]:
    git = lambda *command: subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/record_lowered.py PATH",
        "commit": git("rev-parse", "--short", "HEAD").strip() + ("+" if git("diff", "HEAD") else ""),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
    }


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
