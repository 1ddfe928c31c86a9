"""What each tile of the Hopper kernel of grouped products takes: what the planner's cost model is fitted to.

    PYTHONPATH=.:reference python benchmarks/grouped_tiles.py PATH

Groups whose sizes are drawn, normal numbers in bfloat16, device times, medians of nine calls. `forward` multiplies by
matrices (terms, columns), `dgrad` by transposed ones, `wgrad` is the gradient in them.
"""

import argparse
import concurrent.futures
import functools as ft
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core import timing
from jaxdnn._src.hopper import MULTIPROCESSORS
from jaxdnn._src.matmul.hopper import kernel, plan

BF16 = np.dtype(jnp.bfloat16)
SHAPES = ((8192, 4096, 14336, 8), (8192, 2048, 1408, 64), (256, 2048, 1408, 64), (8192, 768, 3072, 8))


def problem_of(which: str, rows: int, terms: int, columns: int, groups: int) -> plan.Problem:
    if which == "dgrad":
        terms, columns = columns, terms
    return plan.Problem(which == "wgrad", 1, rows, groups, terms, columns, BF16, BF16, which == "dgrad")


def compiled(problem: plan.Problem, operands: tuple[Array, ...], config: plan.Config) -> Any:
    run = ft.partial(kernel.run, problem=problem, config=config, sms=MULTIPROCESSORS)
    return jax.jit(run).lower(*operands).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    path, rows_of_file = parser.parse_args().path, []
    largest = max(groups * terms * columns for _, terms, columns, groups in SHAPES)
    numbers = jax.jit(lambda: jax.random.normal(jax.random.key(0), (largest,), jnp.bfloat16))()
    for rows, terms, columns, groups in SHAPES:
        drawn = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups))
        for which in ("forward", "dgrad", "wgrad"):
            problem = problem_of(which, rows, terms, columns, groups)
            stored = (columns, terms) if which == "dgrad" else (terms, columns)
            second = (rows, columns) if which == "wgrad" else (groups, terms, columns)
            shapes = ((rows, stored[0]), second)
            a, b = (numbers[: math.prod(shape)].reshape(shape) for shape in shapes)
            operands = a, b, jnp.asarray(drawn[None], jnp.int32)
            configs = list(plan.candidates(problem))
            with concurrent.futures.ThreadPoolExecutor() as threads:
                functions = list(threads.map(ft.partial(compiled, problem, operands), configs))
            for config, ms in zip(configs, timing.measure(functions, [operands], repeats=9), strict=True):
                tile = f"{config.rows} x {config.columns}, {config.stages} stages, {config.staged} staged"
                found = {"rows": rows, "terms": terms, "columns": columns, "groups": groups, "pass": which}
                rows_of_file.append({**found, "tile": tile, "ms": ms, "tflops": 2 * rows * terms * columns / ms / 1e9})
                print(*rows_of_file[-1].values(), flush=True)
    device = jax.devices()[0].device_kind
    path.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows_of_file}, indent=1) + "\n")


if __name__ == "__main__":
    main()
