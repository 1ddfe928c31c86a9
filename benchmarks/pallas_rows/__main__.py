"""Layer norm and softmax of rows, in plain Pallas and as the engine's PTX, on an H200: values, then device times.

    PYTHONPATH=.:reference python -m benchmarks.pallas_rows PATH [op ...]

Each kernel is compared with the formula in float64. Times are medians over operands in rotation, of 2^25 elements each.
"""

import datetime
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxdnn as dnn
from jaxdnn._src.core import timing
from jaxdnn._src.norm.hopper import rows as norm_ptx
from jaxdnn._src.softmax.hopper import rows as softmax_ptx

from . import formulas, layer_norm, softmax
from .formulas import EPS, PLANS
from .rows import Plan

ELEMENTS, SETS, CALLS, ROUNDS = 1 << 25, 5, 15, 2
PASSES = {"layer_norm": 2, "layer_norm_dgrad": 3, "softmax": 2, "softmax_dgrad": 3}  # over arrays as large as x
# Of the relative error by the norm: of the first result by its dtype, and of statistics and sums over rows.
LIMIT, LIMIT_FLOAT32 = {"bfloat16": 5e-3, "float32": 5e-6}, 5e-5


def kernels(op: str, dtype: str, plan: Plan) -> dict[str, Callable[..., tuple]]:
    """An op as functions to tuples."""
    of_rows: dict[str, Any] = {"centred": True, "out_dtype": jnp.dtype(dtype)}
    of_softmax: dict[str, Any] = {"algorithm": "accurate", "out_dtype": jnp.dtype(dtype)}
    return {
        "layer_norm": {
            "pallas": lambda x, s, b: layer_norm.forward(x, s, b, eps=EPS, plan=plan),
            "ptx": lambda x, s, b: norm_ptx.forward(x, s, b, eps=EPS, **of_rows),
        },
        "layer_norm_dgrad": {
            "pallas": lambda dy, x, m, r, s: layer_norm.backward(dy, x, m, r, s, plan=plan),
            "ptx": lambda dy, x, m, r, s: norm_ptx.backward(dy, x, m, r, s, **of_rows),
        },
        "softmax": {
            "pallas": lambda x: (softmax.forward(x, plan=plan),),
            "ptx": lambda x: (softmax_ptx.softmax(x, **of_softmax),),
        },
        "softmax_dgrad": {
            "pallas": lambda dy, y: (softmax.backward(dy, y, plan=plan),),
            "ptx": lambda dy, y: (softmax_ptx.softmax_dgrad(dy, y, tangent=False, **of_softmax),),
        },
    }[op]


def drawn(op: str, dtype: str, length: int, key: Any) -> tuple:
    """Operands: normal numbers, float32 where they are statistics or parameters."""
    keys = jax.random.split(key, 4)
    x, dy = (0.3 + 2 * jax.random.normal(k, (ELEMENTS // length, length)) for k in keys[:2])
    scale, bias = (jax.random.normal(k, (length,)) for k in keys[2:])
    x, dy = (v.astype(dtype).astype(jnp.float32) for v in (x, dy))
    return tuple(v.astype(dtype) if v.ndim == 2 else v for v in formulas.operands(op, jnp, x, dy, scale, bias))


def errors(op: str, found: tuple, arrays: tuple) -> list[float]:
    """The relative error of each result by the norm, in float64."""

    def of(found: tuple, arrays: tuple) -> list:
        wide = lambda values: [v.astype(jnp.float64) for v in values]
        wanted = formulas.results(op, jnp, *wide(arrays))
        norm = lambda v: jnp.sqrt((v * v).sum())
        return [norm(f - w) / norm(w) for f, w in zip(wide(found), wanted, strict=True)]

    with jax.enable_x64(True):
        return [float(e) for e in jax.jit(of)(tuple(found), arrays)]


def compare(op: str, dtype: str, plan: Plan) -> dict[str, Any]:
    """Errors and times of both kernels. Pallas runs first, so that no right values lie where it may not write."""
    draw = jax.jit(lambda key: drawn(op, dtype, plan.length, key))
    sets = [draw(key) for key in jax.random.split(jax.random.key(plan.length), SETS)]
    functions = kernels(op, dtype, plan)
    row: dict[str, Any] = {}
    for name, function in functions.items():
        first, *others = found = errors(op, jax.jit(function)(*sets[0]), sets[0])
        row[name] = {"errors": found, "right": first < LIMIT[dtype] and all(e < LIMIT_FLOAT32 for e in others)}
    times = timing.measure([*functions.values()] * ROUNDS, sets, repeats=CALLS)
    size = PASSES[op] * jnp.dtype(dtype).itemsize * ELEMENTS
    for i, name in enumerate(functions):
        row[name]["ms"] = min(times[i :: len(functions)])
        row[name]["gbs"] = size / row[name]["ms"] / 1e6
    return row | {"ratio": row["ptx"]["ms"] / row["pallas"]["ms"]}


def main(path: Path, ops: list[str]) -> None:
    """Measures and writes the file. A kernel that fails ends the run: the process cannot go on using the device."""
    rows: list[dict[str, Any]] = []
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.pallas_rows {' '.join([path.name, *ops])}",
        "device": jax.devices()[0].device_kind,
        "jaxdnn": dnn.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    for (op, dtype), plans in PLANS.items():
        for plan in plans if not ops or op in ops else []:
            print(op, dtype, plan, flush=True)
            row = compare(op, dtype, plan)
            rows.append({"op": op, "dtype": dtype, "length": plan.length, "plan": repr(plan)} | row)
            print(json.dumps(row), flush=True)
            path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
