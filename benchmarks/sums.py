"""Kernels of threads of their own that add up, on a Hopper GPU, beside those of another checkout.

    PYTHONPATH=.:reference python benchmarks/sums.py PATH --before CHECKOUT [--seconds N] [--drawn N] [--only WORD...]

Batch norm's statistics and sums of gradients, what is made of these with an activation, max-pool's gradient by
scattering, the rows that attention's gradient begins with, and the addition of partial filter gradients. Both packages
run in one process, one kernel after the other. The results of a call come to lie in memory that was filled with NaN;
they are compared with those of the other checkout and with those of two repeated calls bit by bit, some of them with
the formula in float64, and those of pooling with engine `xla` bit by bit. Times are device times by CUPTI over operands
in rotation, the least of three medians.
`--drawn` has not run on a GPU yet.
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

EPS, COLUMNS, SEED = 1e-5, 8, 27
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
# Behind layers of ResNet-50, and of EfficientNet-B0.
APPLIED = {"128x56x56x64": (401408, 64), "128x14x14x256": (25088, 256), "128x112x112x96": (1605632, 96)}
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
    names |= {"rows": "jaxdnn._src.attention.hopper.backward_rows", "depthwise": "jaxdnn._src.conv.hopper.depthwise"}
    found = SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})
    del sys.path[:2]
    assert Path(found.dnn.__file__).is_relative_to(root), f"{found.dnn.__file__} is not of {root}"
    return found


class Columns:
    """Statistics, or the sums of gradients, of an array (rows, columns)."""

    def __init__(self, what: str, size: str, dtype: str) -> None:
        self.what, self.dtype, (self.rows, self.columns) = what, dtype, (IMAGES | APPLIED | SIZES)[size]
        self.name, self.timed = f"{what} {size} {dtype}", size in IMAGES | APPLIED

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
        return dy, x, mean, 0.66 + 0 * line, *((line, bias) if self.what != "sums" else ())

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


class Applied(Columns):
    """The pass that follows: y behind an activation, or dx before one."""

    def operands(self, seed: int) -> tuple:
        dy, x, mean, rstd, *affine = super().operands(seed)
        if self.what.startswith("y"):
            return x, mean, rstd, *affine
        return dy, x, mean, rstd, *affine, jnp.stack([0.1 * affine[0], -0.2 * affine[0]]) * self.rows

    def function(self, of: SimpleNamespace) -> Function:
        activation = (self.name.split()[2], None)
        if self.what.startswith("y"):
            return lambda x, mean, rstd, *affine: (of.batch.activated(x, mean, rstd, activation, affine, x.dtype),)

        def run(dy: Any, x: Any, mean: Any, rstd: Any, scale: Any, bias: Any, totals: Any) -> Any:
            return (of.batch.gradients(dy, x, mean, rstd, totals, activation, (scale, bias), x.dtype),)

        return run

    def checked(self, operands: Sequence[Any], found: Sequence[Any]) -> dict[str, Any]:
        """How many of a few columns' elements are not the formula's, rounded once."""
        wide = lambda v: np.asarray(v[..., :COLUMNS].astype(jnp.float32), np.float64)
        *dy, x, mean, rstd, scale, bias = map(wide, operands[:6])
        h = (x - mean) * rstd
        z = h * scale + bias
        nearest = lambda v: v.astype(np.float32).astype(jnp.dtype(self.dtype)).astype(np.float64)
        step = 1 / (1 + np.exp(-z)) if self.what.endswith("swish") else 1.0 * (nearest(z) > 0)
        wanted = z * step
        if dy:
            of_g, of_gh = wide(operands[6]) / self.rows
            wanted = rstd * scale * (dy[0] * (step + z * step * (1 - step)) - of_g - h * of_gh)
        return {"not_nearest": int((nearest(wanted) != wide(found[0])).sum())}


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


class Rows:
    """What attention's gradient takes of each query: D = Σ dy y - dL, and L in base 2."""

    def __init__(self, heads: int, queries: int, values: int, *, heads_first: bool) -> None:
        self.name = f"attention rows 4x{heads}x{queries}x{values}{' heads first' * heads_first}"
        self.timed, tiles = True, -(-queries // 64)
        self.p = SimpleNamespace(
            batch=4, heads=heads, queries=queries, values=values, query_tiles=tiles, heads_first=heads_first
        )
        self.p.dtype = jnp.dtype("bfloat16")

    def operands(self, seed: int) -> tuple:
        keys, p = jax.random.split(jax.random.key(seed), 4), self.p
        shape = (p.batch * p.heads * p.queries, p.values)
        wide = [jax.random.normal(key, shape).astype("bfloat16") for key in keys[:2]]
        return *wide, *(jax.random.normal(key, shape[:1]) for key in keys[2:])

    def function(self, of: SimpleNamespace) -> Function:
        return lambda *arrays: (of.rows.run(*arrays, self.p)[:, :, : self.p.queries],)

    def checked(self, operands: Sequence[Any], found: Sequence[Any]) -> dict[str, Any]:
        """The largest error of the first sequence's D, in units of float32's last place of Σ |terms|."""
        p = self.p
        dy, y, dlse, _ = (np.asarray(v[: p.heads * p.queries].astype(jnp.float32), np.float64) for v in operands)
        wanted = [(dy * y).sum(1) - dlse, (np.abs(dy * y)).sum(1) + np.abs(dlse)]
        if not p.heads_first:
            wanted = [v.reshape(p.queries, p.heads).T.ravel() for v in wanted]
        error = np.abs(np.asarray(found[0][: p.heads, 1], np.float64).ravel() - wanted[0]) / wanted[1]
        return {"errors": [round(float(error.max()) * 2**24, 2)]}


class Partials:
    """The addition of partial sums of a depthwise filter gradient."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype, self.timed = shape, dtype, True
        self.name = f"partial sums {'x'.join(map(str, shape))} {dtype}"

    def operands(self, seed: int) -> tuple:
        return (jax.random.normal(jax.random.key(seed), self.shape),)

    def function(self, of: SimpleNamespace) -> Function:
        rows, width = self.shape[2], self.shape[3] * self.shape[4]
        return lambda partial: (of.depthwise.add_partials(partial, rows, width, jnp.dtype(self.dtype), None),)

    def checked(self, operands: Sequence[Any], found: Sequence[Any]) -> dict[str, Any]:
        """Whether the results are those of additions in order, in float32."""
        terms = np.asarray(operands[0]).reshape(-1, *found[0].shape)
        wanted = np.zeros(found[0].shape, np.float32)
        for term in terms:
            wanted = wanted + term
        return {"in_order": bool((wanted.astype(self.dtype) == np.asarray(found[0])).all())}


def cases() -> list[Any]:
    """Those that are timed, and then those of values alone."""
    found: list[Any] = [Columns(what, size, "bfloat16") for size in IMAGES for what in ("statistics", "sums")]
    found += [Pool(size, "bfloat16") for size in POOLS] + [Pool("64x20x20x256 5x5", "float32")]
    found += [Rows(16, 2048, 128, heads_first=False), Rows(32, 1024, 64, heads_first=True)]
    found += [Partials((66, 1, 7, 7, 384), "bfloat16"), Partials((33, 1, 3, 3, 384), "float32")]
    found += [Columns(what, "128x14x14x1024", "float32") for what in ("statistics", "sums")]
    found += [Columns(f"sums before {name}", "128x14x14x1024", "bfloat16") for name in ("relu", "swish")]
    found += [Columns(what, "128x14x14x1024", "float16") for what in ("statistics", "sums")]
    found += [Pool("128x28x28x192 3x3", "float16"), Columns("sums before relu", "999x24", "float16")]
    behind = [f"{what} {name}" for name in ("relu", "swish") for what in ("y behind", "dx before")]
    found += [Applied(what, size, "bfloat16") for size in APPLIED for what in behind]
    found += [Columns(f"sums before {name}", size, "bfloat16") for size in APPLIED for name in ("relu", "swish")]
    kinds = ("bfloat16", "float32")
    return found + [Columns(what, size, d) for size in SIZES for d in kinds for what in ("statistics", "sums")]


def drawn(count: int) -> list[Columns]:
    """Statistics and sums of gradients, some before an activation, of arrays of drawn sizes and types."""
    rng, found = np.random.default_rng(SEED), []
    for _ in range(count):
        rows, columns = (int(2 ** rng.uniform(0, top)) for top in (17, 11))
        # Whole vectors a row, or by the 8 rows.
        rows, columns = (rows, 8 * -(-columns // 8)) if rng.random() < 0.7 else (8 * -(-rows // 8), 1 + columns % 40)
        SIZES[size := f"{rows}x{columns}"] = rows, columns
        for what in ("statistics", str(rng.choice(["sums", "sums before relu", "sums before swish"]))):
            kinds = ["bfloat16", "float16"] + ["float32"] * (what != "sums before relu")  # which float32 does not round
            found.append(Columns(what, size, str(rng.choice(kinds))))
    return found


def _same(a: Any, b: Any) -> Any:
    """The share of equal bits of two arrays, by element."""
    kind = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    return jnp.mean(jax.lax.bitcast_convert_type(a, kind) == jax.lax.bitcast_convert_type(b, kind))


_same_each = jax.jit(lambda a, b: jnp.stack([_same(*pair) for pair in zip(a, b, strict=True)]))


def measured(case: Any, make: Function, compiled: dict[str, Any], timing: Any) -> dict[str, Any]:
    """What is known of a case: bits, errors, and times."""
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
    parser.add_argument("--drawn", type=int, default=0, help="so many drawn sizes besides")
    parser.add_argument("--only", nargs="+", default=[""], help="the cases whose names have one of these words")
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
    # All is compiled before anything is measured: XLA runs kernels of its own to choose among them.
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        compiling = []
        for case in [case for case in cases() + drawn(args.drawn) if any(word in case.name for word in args.only)]:
            like = jax.eval_shape(case.operands, 0)
            lowered = {name: jax.jit(case.function(of)).lower(*like) for name, of in packages.items()}
            making = threads.submit(jax.jit(case.operands).lower(0).compile)
            compiling.append((case, making, {name: threads.submit(v.compile) for name, v in lowered.items()}))
    print(f"{len(compiling)} cases are compiled after {time.monotonic() - start:.0f} s", flush=True)
    for case, making, programs in compiling:
        if not late():
            try:
                compiled = {name: program.result() for name, program in programs.items()}
                row = measured(case, making.result(), compiled, packages["now"].timing)
            except Exception as error:  # what fails is named, and the others go on
                row = {"case": case.name, "failed": f"{type(error).__name__}: {error}"[:300]}
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
