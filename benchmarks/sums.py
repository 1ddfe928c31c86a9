"""Batch norm's sums over columns and max-pool's gradient by scattering, on a Hopper GPU, beside another checkout's.

    PYTHONPATH=.:reference python benchmarks/sums.py PATH --before CHECKOUT [--seconds N]

Both packages run in one process, one kernel after the other. The results of a call come to lie in memory that was
filled with NaN; they are compared with those of the other checkout and with those of two repeated calls bit by bit, and
the results of eight columns with the formula in float64, those of pooling with engine `xla` bit by bit. Times are
device times by CUPTI over operands in rotation, the least of three medians.
"""

import argparse
import concurrent.futures
import datetime
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EPS, COLUMNS = 1e-5, 8
Function = Callable[..., Any]
# Images whose layers the figures are of, as rows and columns; and sizes for their values alone.
IMAGES = {
    "128x112x112x64": (1605632, 64),
    "128x56x56x256": (401408, 256),
    "128x28x28x512": (100352, 512),
    "128x14x14x1024": (25088, 1024),
    "128x7x7x2048": (6272, 2048),
    "128x224x224x3": (6422528, 3),
    "32x7x7x512": (1568, 512),
}
SIZES = {"7x64": (7, 64), "1x8": (1, 8), "999x24": (999, 24), "45x5000": (45, 5000), "800x5": (800, 5)}
POOLS = {
    "128x28x28x192 3x3": ((128, 28, 28, 192), 3),
    "64x20x20x256 5x5": ((64, 20, 20, 256), 5),
    "64x20x20x256 7x7": ((64, 20, 20, 256), 7),
}


def package(root: Path) -> SimpleNamespace:
    """The modules of a checkout; those of another that was imported before are kept by whoever has them."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("jaxdnn", "jaxdnn_reference")]:
        del sys.modules[name]
    sys.path[:0] = [str(root), str(root / "reference")]
    importlib.invalidate_caches()
    names = {"dnn": "jaxdnn", "batch": "jaxdnn._src.norm.hopper.batch", "pool": "jaxdnn._src.pool.hopper.calls"}
    names |= {"shape": "jaxdnn._src.pool.hopper.shape", "timing": "jaxdnn._src.core.timing"}
    found = SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})
    del sys.path[:2]
    assert Path(found.dnn.__file__).is_relative_to(root), f"{found.dnn.__file__} is not of {root}"
    return found


class Columns:
    """Statistics, or the sums of gradients, of an array (rows, columns)."""

    def __init__(self, what: str, size: str, dtype: str) -> None:
        self.what, self.dtype, (self.rows, self.columns) = what, dtype, (IMAGES | SIZES)[size]
        self.name, self.timed = f"{what} {size} {dtype}", size in IMAGES

    def operands(self, seed: int) -> tuple:
        """Of every third row what is behind the activation is its column's bias, and of some that is rounded to 0."""
        keys = jax.random.split(jax.random.key(seed), 2)
        shape, line = (self.rows, self.columns), jnp.linspace(-1, 2, self.columns, dtype=jnp.float32)
        x = (1.5 * jax.random.normal(keys[0], shape) + 0.7).astype(self.dtype)
        if self.what == "statistics":
            return x, line
        mean = x[0].astype(jnp.float32)
        x = jnp.where((jnp.arange(self.rows) % 3 == 0)[:, None], x[:1], x)
        dy = jax.random.normal(keys[1], shape).astype(self.dtype)
        least = {"bfloat16": 2.0**-133, "float16": 2.0**-24}.get(self.dtype, 0.0)
        bias = jnp.resize(jnp.array([0.25, least, 0.75 * least, 0.5 * least, 0, -0.5], jnp.float32), (self.columns,))
        return dy, x, mean, 0.66 + 0 * line, *((line, bias) if self.what.startswith("sums before") else ())

    def function(self, of: SimpleNamespace) -> Function:
        if self.what == "statistics":

            def run(x: Any, scale: Any) -> Any:
                found = of.batch.statistics(x, scale, eps=EPS)
                return found.mean, found.rstd, found.variance, found.rest, found.factor

            return run
        name = self.what.removeprefix("sums").removeprefix(" before ")
        activation = (name, 1.0 if name == "swish" else None) if name else None
        return lambda dy, x, mean, rstd, *affine: (of.batch.sums(dy, x, mean, rstd, activation, affine),)

    def checked(self, operands: Sequence[Any], found: Sequence[Any]) -> dict[str, Any]:
        """The largest error of a few columns in units of float32's last place: of Σ |terms|, or of the statistic."""
        wide = lambda v: np.asarray(v[..., :COLUMNS].astype(jnp.float32), np.float64)
        if self.what == "statistics":
            x = wide(operands[0])
            variance = x.var(0)
            rstd = 1 / np.sqrt(variance + EPS)
            wanted = [(x.mean(0), np.abs(x).max(0)), (rstd, rstd), (variance, variance + EPS)]
        else:
            dy, x, mean, rstd, *affine = map(wide, operands)
            h = (x - mean) * rstd
            if affine:
                z = h * affine[0] + affine[1]
                if self.what.endswith("relu"):
                    rounded = np.asarray(jnp.asarray(z, jnp.float32).astype(self.dtype), np.float64)
                    dy = np.where(rounded > 0, dy, 0)
                else:
                    sigmoid = 1 / (1 + np.exp(-z))
                    dy = dy * (sigmoid + z * sigmoid * (1 - sigmoid))
            terms = [dy, dy * h, h][: len(found[0])]
            found, wanted = found[0], [(term.sum(0), np.abs(term).sum(0) + 1e-30) for term in terms]
        errors = (np.abs(wide(f) - w) / size for f, (w, size) in zip(found, wanted, strict=False))
        return {"errors": [round(float(e.max()) * 2**24, 2) for e in errors]}


class Pool:
    """The gradient of the maxima of windows that move by one element, from the taps that the forward pass keeps."""

    def __init__(self, size: str, dtype: str) -> None:
        self.dtype, (self.shape, self.window), self.timed = dtype, POOLS[size], True
        self.name = f"scatter {size} {dtype}"
        self.options: dict[str, Any] = {"window": self.window, "stride": 1, "padding": self.window // 2}

    def operands(self, seed: int) -> tuple:
        """dy, the taps that are random bytes below the number of taps, of which those in the padding add nothing."""
        keys = jax.random.split(jax.random.key(seed), 2)
        taps = jax.random.randint(keys[1], self.shape, 0, self.window**2).astype(jnp.uint8)
        return jax.random.normal(keys[0], self.shape).astype(self.dtype), taps

    def function(self, of: SimpleNamespace) -> Function:
        n, *size, c = self.shape
        name, elements = {"bfloat16": ("bf16", 8), "float16": ("f16", 8), "float32": ("f32", 4)}[self.dtype]
        twice = lambda v: (v, v)
        size, half = tuple(size), self.window // 2
        k = of.shape.Shape(name, n, c // elements, size, size, twice(self.window), (1, 1), twice(half), (1, 1))
        assert of.pool.strip_of(k) is not None
        return lambda dy, taps: (of.pool.maximum_backward(dy, taps, k),)

    def checked(self, operands: Sequence[Any], found: Sequence[Any]) -> dict[str, Any]:
        """Whether the first image has the bits of engine `xla`."""
        import jaxdnn as dnn

        dy, taps = (v[:1] for v in operands)
        of_xla = jax.jit(lambda dy, taps: dnn.pool_dgrad(dy, dy, **self.options, indices=taps, engine="xla"))
        return {"as_xla": float(_same(of_xla(dy, taps), found[0][:1]))}


def cases() -> list[Any]:
    found: list[Any] = [Columns(what, size, "bfloat16") for size in IMAGES for what in ("statistics", "sums")]
    for size in ("128x28x28x512", "128x14x14x1024"):
        found += [Columns(what, size, dtype) for dtype in ("float32", "float16") for what in ("statistics", "sums")]
        found += [Columns(f"sums before {name}", size, "bfloat16") for name in ("relu", "swish")]
    found += [Pool(size, "bfloat16") for size in POOLS]
    found += [Pool("128x28x28x192 3x3", "float16"), Pool("64x20x20x256 5x5", "float32")]
    found += [Columns("sums before relu", "999x24", "float16")]
    kinds = ("bfloat16", "float32")
    return found + [Columns(what, size, d) for size in SIZES for d in kinds for what in ("statistics", "sums")]


def _same(a: Any, b: Any) -> Any:
    """The share of equal bits of two arrays, by element."""
    kind = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    return jnp.mean(jax.lax.bitcast_convert_type(a, kind) == jax.lax.bitcast_convert_type(b, kind))


_same_each = jax.jit(lambda a, b: jnp.stack([_same(*pair) for pair in zip(a, b, strict=True)]))


def measured(case: Any, compiled: dict[str, Any], timing: Any) -> dict[str, Any]:
    """What is known of a case: bits, errors, and times."""
    make = jax.jit(case.operands)
    operands = jax.block_until_ready(make(0))
    row, results = {"case": case.name}, {}
    for name, run in compiled.items():
        for _ in range(3):  # what is freed here is what results are put in
            jax.block_until_ready([jnp.full((1 << 26,), jnp.nan, jnp.float32) for _ in range(2)])
        first = results[name] = run(*operands)
        row[f"{name}_repeats"] = all(bool((_same_each(first, run(*operands)) == 1).all()) for _ in range(2))
    if len(results) == 2:
        row["same_bits"] = [round(v, 4) for v in _same_each(*results.values()).tolist()]
    row |= case.checked(operands, results["now"])
    if case.timed:
        size = sum(v.nbytes for v in operands)
        sets = [operands, *(jax.block_until_ready(make(i)) for i in range(1, max(2, min(16, (1 << 29) // size))))]
        functions = [run for _ in range(3) for run in compiled.values()]
        times = timing.measure(functions, sets, repeats=9)
        row |= {f"{name}_us": round(1e3 * min(times[i :: len(compiled)]), 2) for i, name in enumerate(compiled)}
        if len(compiled) == 2:
            row["ratio"] = round(row["before_us"] / row["now_us"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins later")
    args = parser.parse_args()
    start = time.monotonic()
    packages = {"before": package(args.before.resolve())} if args.before else {}
    packages["now"] = package(Path.cwd())
    rows: list[dict[str, Any]] = []
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/sums.py {' '.join(sys.argv[1:])}",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rows": rows,
    }

    late = lambda: time.monotonic() - start > args.seconds
    # One thread lowers, several compile what is lowered, and this one measures.
    with concurrent.futures.ThreadPoolExecutor(1) as lowers, concurrent.futures.ThreadPoolExecutor(8) as compiles:

        def begun(case: Any) -> dict[str, Any]:
            if late():
                return {}
            like = jax.eval_shape(case.operands, 0)
            lowered = {name: jax.jit(case.function(of)).lower(*like) for name, of in packages.items()}
            return {name: compiles.submit(program.compile) for name, program in lowered.items()}

        for case, begin in [(case, lowers.submit(begun, case)) for case in cases()]:
            if late():
                begin.cancel()
                continue
            try:
                compiled = {name: compiling.result() for name, compiling in begin.result().items()}
                row = measured(case, compiled, packages["now"].timing)
            except Exception as error:  # what fails is named, and the others go on
                row = {"case": case.name, "failed": f"{type(error).__name__}: {error}"[:300]}
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
