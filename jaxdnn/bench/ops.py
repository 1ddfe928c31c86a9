"""The command `jaxdnn bench ops`: every op against plain JAX, by the clock on the host.

Of each call in the manifests: its time under jit at two sizes, forward and as a gradient in all its arrays, the time to
compile it, and what a call costs outside of jit on arrays so small that nothing else counts. The other side is the
family's module `plain`: each example as a good programmer writes it in JAX who does not have this library. `lax` has
most of it, and a backward pass is the derivative that JAX finds of the forward pass. Both sides take turns, and of each
the least time counts, so that other programs on the machine count little.
"""

import argparse
import functools as ft
import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
from jaxdnn._src import families
from jaxdnn._src.cases.example import Axes, Example, examples
from jaxdnn._src.core import files
from jaxdnn.bench.lines import joined

Function = Callable[..., Any]
TINY = dict(N=2, H=4, W=4, C=8, K=8, R=3, S=3, P=2, Q=2, T=4, D=4, V=8)
SIZES = {
    "small": dict(N=2, H=16, W=16, C=32, K=32, R=3, S=3, P=2, Q=2, T=32, D=32, V=512),
    "large": dict(N=4, H=56, W=56, C=64, K=64, R=3, S=3, P=2, Q=2, T=128, D=128, V=4096),
}
PASSES = ("forward", "gradient")
SAMPLE = 2e-3  # seconds of a sample, which are as many calls as take so long
LEAST = 20  # samples of each side


def run(args: argparse.Namespace, provenance: Callable[[], dict[str, Any]]) -> int:
    """Measures, prints a line a row while it goes, and writes the JSON after every row."""
    wanted = [e for e in examples().values() if not args.case or e.name in args.case or e.op in args.case]
    passes, rows = args.passes or ("eager", *PASSES), []
    for example in wanted:
        for row in _rows(example, passes, args.seconds or 0.5):
            rows.append(row)
            print(_line(row), flush=True)
            if args.json:
                files.write(args.json, json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    slow = [row for row in rows if row["speed_up"] < (1 / 3 if row["pass"] == "eager" else 0.95)]
    late = [row for row in rows if row.get("compile_over_plain", 0) > 2]
    print(joined([f"{len(rows)} rows; {len(slow)} too slow", *map(_name, slow)]))
    print(joined([f"{len(late)} that take over twice as long to compile", *map(_name, late)]))
    return 0


def _rows(example: Example, passes: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    if "eager" in passes:
        _, plain, operands = sides(example, TINY)
        given, options = example.bind(*map(jnp.asarray, example.data(TINY)), sizes=TINY)
        ours = ft.partial(getattr(dnn, example.op), *map(_placed, given), **options)
        times = _timed(ours, ft.partial(plain, *operands), (), seconds)
        yield {"op": example.name, "pass": "eager", "size": "tiny", **times}
    for size, sizes in SIZES.items():
        ours, plain, operands = sides(example, sizes)
        for which in passes:
            if which == "eager" or (which == "gradient" and not _differentiable(example, operands)):
                continue
            functions, given = (ours, plain), operands
            if which == "gradient":
                given = (_cotangent(ours, operands), *operands)
                functions = tuple(map(_gradient, functions))
            (first, first_s), (second, second_s) = (_compiled(f, given) for f in functions)
            row = {"op": example.name, "pass": which, "size": size, **_timed(first, second, given, seconds)}
            yield {**row, "compile_s": first_s, "compile_over_plain": first_s / second_s}


def plain_form(name: str) -> Function:
    """An example in plain JAX, a function of its arrays, and of a shape that does not follow from them."""
    attribute = name.replace("-", "_")
    return next(getattr(module, attribute) for module in families.plain() if hasattr(module, attribute))


def sides(example: Example, sizes: dict[str, Any]) -> tuple[Function, Function, tuple[jax.Array, ...]]:
    """Ours and the plain one as functions of the same arrays, and these."""
    arguments = [*example.arguments, *example.options.values()]
    integers = [v for v in arguments if isinstance(v, Axes) and v.kind in ("index", "counts")]
    indices = [v.value(sizes) for v in integers]
    shapes = [v.value(sizes) for v in arguments if isinstance(v, Axes) and v.kind == "shape"]
    floats = [jnp.asarray(v, jnp.float32) for v in example.data(sizes)]
    op, plain = getattr(dnn, example.op), plain_form(example.name)
    named = {id(v): i for i, v in enumerate(integers)}
    takes = [p for p in inspect.signature(plain).parameters.values() if p.default is p.empty] if shapes else []
    rest = shapes if len(takes) > len(floats) + len(indices) else []

    def ours(*operands: jax.Array) -> Any:
        given, options = example.bind(*operands[: len(floats)], sizes=sizes)
        given = [
            operands[len(floats) + named[id(v)]] if id(v) in named else g
            for v, g in zip(example.arguments, given, strict=True)
        ]
        return op(*given, **options)

    return ours, lambda *operands: plain(*operands, *rest), (*floats, *map(jnp.asarray, indices))


def _placed(value: Any) -> Any:
    return jnp.asarray(value, None if value.dtype.kind == "i" else jnp.float32) if hasattr(value, "dtype") else value


def _differentiable(example: Example, operands: Sequence[jax.Array]) -> bool:
    floats = any(jnp.issubdtype(v.dtype, jnp.floating) for v in operands)
    return floats and not example.op.endswith(("dgrad", "wgrad", "bgrad", "dbn_weight"))


def _first(function: Function, *operands: Any) -> Any:
    return jax.tree.leaves(function(*operands))[0]


def _cotangent(function: Function, operands: Sequence[jax.Array]) -> jax.Array:
    y = jax.eval_shape(lambda *v: _first(function, *v), *operands)
    return jnp.asarray(np.random.default_rng(0).standard_normal(y.shape), y.dtype)


def _gradient(function: Function) -> Function:
    """The gradients of the first result in every array of floats, from a cotangent and the operands."""

    def run(cotangent: jax.Array, *operands: jax.Array) -> Any:
        floats = [v for v in operands if jnp.issubdtype(v.dtype, jnp.floating)]
        rest = operands[len(floats) :]
        return jax.vjp(lambda *v: _first(function, *v, *rest), *floats)[1](cotangent)

    return run


def _compiled(function: Function, operands: Sequence[jax.Array]) -> tuple[Function, float]:
    """A function compiled for its operands, and the seconds that took: the less of two."""
    found, took = function, []
    for _ in range(2):
        jax.clear_caches()
        start = time.perf_counter()
        found = jax.jit(function).lower(*operands).compile()
        took.append(time.perf_counter() - start)
    return found, min(took)


def _timed(ours: Function, plain: Function, operands: Sequence[jax.Array], seconds: float) -> dict[str, float]:
    """The least milliseconds of each."""
    counts = []
    for function in (ours, plain):
        jax.block_until_ready(function(*operands))
        once = min(_sample(function, operands, 1) for _ in range(5))
        counts.append(max(1, int(SAMPLE / once)))
    best, end, taken = [float("inf")] * 2, time.perf_counter() + seconds, 0
    while time.perf_counter() < end or taken < LEAST:
        taken += 1
        for i, (function, count) in enumerate(zip((ours, plain), counts, strict=True)):
            best[i] = min(best[i], _sample(function, operands, count))
    return {"ms": 1e3 * best[0], "plain_ms": 1e3 * best[1], "speed_up": best[1] / best[0]}


def _sample(function: Function, operands: Sequence[jax.Array], count: int) -> float:
    """The seconds of a call among `count` in a row."""
    found, start = None, time.perf_counter()
    for _ in range(count):
        found = function(*operands)
    jax.block_until_ready(found)
    return (time.perf_counter() - start) / count


def _name(row: dict[str, Any]) -> str:
    return f"{row['op']} {row['pass']} {row['size']} {row['speed_up']:.2f}"


def _line(row: dict[str, Any]) -> str:
    times = f"{row['op']:18s} {row['pass']:8s} {row['size']:5s} {row['ms']:8.4f} ms", f"plain {row['plain_ms']:8.4f} ms"
    compiled = ""
    if "compile_s" in row:
        compiled = f"compiles {row['compile_s']:.2f} s, {row['compile_over_plain']:.2f} of plain"
    return joined([*times, f"speed-up {row['speed_up']:5.2f}", compiled])
