"""The row kernels of norms and softmax on a Hopper GPU, beside those of another checkout: values, bits, and times.

    PYTHONPATH=.:reference python benchmarks/rows.py PATH [--before CHECKOUT] [--op OP ...]

Each shape runs in a process of its own for each checkout, one after the other; one that fails is named and the others
go on. Results are compared with the formula in float64, after the memory that they come to lie in was filled with NaN;
with those of three repeated calls; and with a call of their first three rows alone. Times are device times, the least
of three medians over operands of 2^25 elements in rotation.
"""

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn

EPS = 1e-5
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
LENGTHS = {
    "norm": (64, 512, 768, 1000, 1024, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384),
    "norm_dgrad": (512, 1024, 2048, 4096, 8192),
    "softmax": (128, 1000, 1024, 2048, 4096, 8192, 16384, 32768),
}
OPS = {
    **{op: "norm" for op in ("layer_norm", "rms_norm")},
    **{op: "norm_dgrad" for op in ("layer_norm_dgrad", "rms_norm_dgrad")},
    **{op: "softmax" for op in ("softmax", "log_softmax", "logsumexp", "softmax_dgrad", "log_softmax_dgrad")},
}
Function = Callable[..., Any]


def kernel(op: str, dtype: str) -> Function:
    """An op by its kernel: a function of the operands that `drawn` gives, to a tuple."""
    from jaxdnn._src.norm.hopper import rows as norm

    options: dict[str, Any]
    if OPS[op] != "softmax":
        options = {"centred": op.startswith("layer"), "out_dtype": jnp.dtype(dtype)}
        if OPS[op] == "norm":
            return lambda x, s, b: tuple(norm.forward(x, s, b, eps=EPS, **options))
        of = _first("jaxdnn._src.norm.hopper.rows_dgrad", norm.__name__)
        return lambda dy, x, mean, rstd, s: tuple(of.backward(dy, x, mean, rstd, s, **options))
    options = {} if op == "logsumexp" else {"algorithm": "log" if op.startswith("log") else "accurate"}
    of = getattr(dnn, op.removeprefix("log_"))
    return lambda *arrays: (of(*arrays, engine="hopper", **options),)


def _first(*names: str) -> Any:
    """The first module of those that a checkout has: earlier ones have other files."""
    return importlib.import_module(next(name for name in names if importlib.util.find_spec(name)))


def drawn(op: str, dtype: str, shape: tuple[int, int], key: Any) -> tuple:
    """Operands: normal numbers, and of a backward pass what the forward one saves."""
    keys = jax.random.split(key, 4)
    x, dy = (2 * jax.random.normal(k, shape) for k in keys[:2])
    scale, bias = (jax.random.normal(k, shape[1:]) for k in keys[2:])
    narrow = lambda *values: tuple(v.astype(dtype) for v in values)
    if OPS[op] == "softmax":
        y = jax.nn.log_softmax(x) if op.startswith("log") else jax.nn.softmax(x)
        return narrow(dy, y) if op.endswith("dgrad") else narrow(x)
    (x,) = narrow(x + 0.3)
    if OPS[op] == "norm":
        return x, scale, bias
    wide = x.astype(jnp.float32)
    mean = wide.mean(1) * op.startswith("layer")
    rstd = jax.lax.rsqrt(((wide - mean[:, None]) ** 2).mean(1) + EPS)
    return *narrow(dy), x, mean, rstd, scale


def formula(op: str, *arrays: np.ndarray) -> list[tuple[np.ndarray, Any]]:
    """Each result in float64, and the size that its error is measured by."""
    over = lambda v: v.sum(1, keepdims=True)
    if OPS[op] == "norm":
        x, scale, bias = arrays
        mean = x.mean(1) * op.startswith("layer")
        d = x - mean[:, None]
        variance = (d * d).mean(1)
        rstd = 1 / np.sqrt(variance + EPS)
        y = d * rstd[:, None] * scale + bias
        return [(y, np.abs(y) + 1), (mean, 1), (rstd, rstd), (variance, variance)]
    if OPS[op] == "norm_dgrad":
        dy, x, mean, rstd, scale = arrays
        h, g = (x - mean[:, None]) * rstd[:, None], dy * scale
        dx = g - h * (g * h).mean(1, keepdims=True) - g.mean(1, keepdims=True) * op.startswith("layer")
        sizes = np.abs(dy * h).sum(0), np.abs(dy).sum(0)
        return [
            (dx * rstd[:, None], (np.abs(g) + np.abs(h) + 1) * rstd[:, None]),
            *zip(((dy * h).sum(0), dy.sum(0)), sizes, strict=True),
        ]
    if op.endswith("dgrad"):
        dy, y = arrays
        factor, terms = (np.exp(y), dy) if op.startswith("log") else (y, y * dy)
        result = dy - factor * over(terms) if op.startswith("log") else factor * (dy - over(terms))
        return [
            (result, (np.abs(dy) if op.startswith("log") else 0) + factor * (np.abs(dy) + over(np.abs(terms))) + 1e-30)
        ]
    (x,) = arrays
    d = x - x.max(1, keepdims=True)
    if op == "logsumexp":
        result = x.max(1) + np.log(np.exp(d).sum(1))
        return [(result, np.abs(result) + 1)]
    if op == "log_softmax":
        return [(d - np.log(over(np.exp(d))), np.abs(x) + np.abs(d) + 1)]
    result = np.exp(d) / over(np.exp(d))
    return [(result, result * (2 + np.abs(d)) + 1e-30)]


def child(op: str, dtype: str, length: int, bits: Path) -> dict[str, Any]:
    """What is known of a shape; saves the results' bits."""
    timing = _first("jaxdnn.bench.timing", "jaxdnn._src.core.timing")
    run, key = jax.jit(kernel(op, dtype)), jax.random.key(length)
    wide = lambda v: np.asarray(v.astype(jnp.float32), np.float64)
    arrays = drawn(op, dtype, ((1 << 21) // length + 3, length), key)
    jax.block_until_ready(arrays)
    for _ in range(3):  # what is freed here is what results are put in
        jax.block_until_ready([jnp.full((1 << 26,), jnp.nan, jnp.float32) for _ in range(2)])
    found = run(*arrays)
    raw = lambda values: [np.asarray(jax.lax.bitcast_convert_type(v, f"uint{8 * v.dtype.itemsize}")) for v in values]
    first = raw(found)
    np.savez(bits, *first)
    known: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    sizes = formula(op, *map(wide, arrays))
    tiny = 2.0**-25 if dtype == "float16" else 2.0**-126  # smaller results may be 0
    errors = (np.maximum(np.abs(wide(f) - w) - tiny, 0) / size for f, (w, size) in zip(found, sizes, strict=True))
    known["errors"] = [round(float(e.max() / UNIT[dtype if i == 0 else "float32"]), 2) for i, e in enumerate(errors)]
    known["repeats"] = all((a == b).all() for _ in range(3) for a, b in zip(raw(run(*arrays)), first, strict=True))
    alone = raw(run(*(v[:3] if v.ndim > 1 or len(v) == len(arrays[0]) else v for v in arrays)))
    of_rows = 1 if OPS[op] == "norm_dgrad" else len(alone)  # the other results are sums over rows
    known["alone"] = all((a == b[:3]).all() for a, b in zip(alone[:of_rows], first, strict=False))
    sets = [drawn(op, dtype, ((1 << 25) // length, length), k) for k in jax.random.split(key, 5)]
    known["us"] = round(1e3 * min(timing.measure([run] * 3, sets, repeats=15)), 2)
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--shape", nargs=3, help=argparse.SUPPRESS)  # op, dtype, length: in a process of its own
    args = parser.parse_args()
    if args.shape:
        print(json.dumps(child(args.shape[0], args.shape[1], int(args.shape[2]), args.path)))
        return
    rows: list[dict[str, Any]] = []
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/rows.py {' '.join(sys.argv[1:])}",
        "jax": jax.__version__,
        "rows": rows,
    }
    shapes = [(op, dtype, n) for op in args.op or OPS for dtype in ("bfloat16", "float32") for n in LENGTHS[OPS[op]]]
    for op, dtype, length in shapes:
        row: dict[str, Any] = {"op": op, "dtype": dtype, "length": length}
        with tempfile.TemporaryDirectory() as folder:
            for name, checkout in (("now", Path.cwd()), ("before", args.before)):
                if checkout is not None:
                    row[name] = _in_process(checkout, op, dtype, length, Path(folder) / f"{name}.npz")
            files = [Path(folder) / f"{name}.npz" for name in ("now", "before")]
            if all(file.exists() for file in files):
                with np.load(files[0]) as a, np.load(files[1]) as b:
                    row["same_bits"] = [round(float((a[k] == b[k]).mean()), 4) for k in a.files]
        if "us" in row["now"] and "us" in row.get("before", {}):
            row["ratio"] = round(row["before"]["us"] / row["now"]["us"], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.path.write_text(json.dumps(document, indent=1) + "\n")


def _in_process(checkout: Path, op: str, dtype: str, length: int, bits: Path) -> dict[str, Any]:
    """What `child` knows, by the package of a checkout."""
    paths = f"{checkout}:{checkout / 'reference'}"
    command = [sys.executable, __file__, str(bits), "--shape", op, dtype, str(length)]
    options = {"PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **options})
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
        return {"failed": str(error)}


if __name__ == "__main__":
    main()
