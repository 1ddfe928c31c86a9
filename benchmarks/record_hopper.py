"""Runs the kernels that notebook 2 explains on a GPU, and keeps their bits and the device's two rates.

    python benchmarks/record_hopper.py benchmarks/results/bits_hopper_nvidia_h200.json

The photograph, of Grace Hopper, comes with Matplotlib; its pixels are kept too, for the notebook works on them.
"""

import base64
import datetime
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxdnn as dnn
from jaxdnn._src.core import timing

PADDING: dict[str, Any] = {"padding": 1, "engine": "hopper"}


def pixels() -> np.ndarray:
    """96 x 96 whole numbers from 0 to 255: head and shoulders in grey, blocks of 4 x 4 pixels averaged."""
    import matplotlib.pyplot as plt
    from matplotlib.cbook import get_sample_data

    sample: Any = get_sample_data("grace_hopper.jpg")
    photo = plt.imread(sample)[20:404, 60:444].mean(axis=2)
    return photo.reshape(96, 4, 96, 4).mean(axis=(1, 3)).round().astype(np.uint8)


def operands(image: np.ndarray) -> tuple[np.ndarray, ...]:
    """The image's light as 12 x 12 pixels of 64 channels, and the filter: cosines over a block, smoothed."""
    light = (image / 255) ** 2.2  # a screen's brightness by the number that is stored for it
    x = light.reshape(12, 8, 12, 8).transpose(0, 2, 1, 3).reshape(1, 12, 12, 64)
    u, i = np.indices((8, 8))
    cosine = np.cos(np.pi * (2 * i + 1) * u / 16) * np.where(u == 0, 0.125**0.5, 0.5)
    basis = np.einsum("ui,vj->ijuv", cosine, cosine).reshape(64, 64)
    smooth = np.outer([1, 2, 1], [1, 2, 1]) / 16
    w = smooth[:, :, None, None] * basis
    return tuple(v.astype(ml_dtypes.bfloat16).astype(np.float32) for v in (x, w))


def outputs(x: np.ndarray, w: np.ndarray) -> dict[str, np.ndarray]:
    """What the kernels make of them, by the notebook's names."""
    wide: dict[str, Any] = PADDING | {"out_dtype": np.float32}
    integer: dict[str, Any] = PADDING | {"out_dtype": np.int32}
    found: dict[str, Any] = {}
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        found[dtype] = dnn.conv(jnp.asarray(x, dtype), jnp.asarray(w, dtype), **wide)
    found["tf32"] = dnn.conv(x, w, precision="tf32", **PADDING)
    whole = [np.round(v * (127 / np.abs(v).max())).astype(np.int8) for v in (x, w)]
    found["int8"] = dnn.conv(*whole, **integer)
    narrow, filters = (jnp.asarray(v, jnp.bfloat16) for v in (x, w))
    dy = found["bfloat16"].astype(jnp.bfloat16)
    found["backward data"] = dnn.conv_dgrad(dy, filters, x.shape, **wide)
    found["backward filter"] = dnn.conv_wgrad(narrow, dy, w.shape, **wide)
    found["depthwise"] = dnn.conv(narrow, filters[:, :, :1], groups=64, **PADDING)
    found["depthwise float32"] = dnn.conv(x, w[:, :, :1], groups=64, **PADDING)
    return {name: np.asarray(value) for name, value in found.items()}


def rates() -> dict[str, float]:
    """Copy bandwidth, and the rate of a product of two bfloat16 matrices of 8192 x 8192, as XLA computes it."""
    n = 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    (ms,) = timing.measure([jnp.matmul], [(a, b)], repeats=15)
    return {"copy_tb_per_s": timing.copy_bandwidth(), "matmul_tflops": 2 * n**3 / ms / 1e9}


def main(path: Path) -> None:
    """Measures and writes the file."""
    image = pixels()
    x, w = operands(image)
    found = outputs(x, w)
    again = outputs(x, w)
    if not all(np.array_equal(found[name], again[name]) for name in found):
        raise SystemExit("two runs differ")
    dy = jax.ShapeDtypeStruct(found["bfloat16"].shape, jnp.bfloat16)
    narrow = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    explained = dnn.explain(lambda x, dy: dnn.conv_wgrad(x, dy, w.shape, padding=1, out_dtype=np.float32), narrow, dy)
    schedule = next(c for c in explained[0].candidates if c.engine == "hopper").schedule
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/record_hopper.py {path.name}",
        "device": jax.devices()[0].device_kind,
        "jaxdnn": dnn.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rates": rates(),
        "image": base64.b64encode(image.tobytes()).decode(),
        "operands": {name: digest(v) for name, v in (("x", x), ("w", w))},
        "y": base64.b64encode(found["bfloat16"].tobytes()).decode(),
        "sha256": {name: digest(value) for name, value in found.items()},
        "wgrad_order": None if schedule is None else np.asarray(schedule.order).tolist(),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({k: v for k, v in document.items() if k not in ("image", "y", "wgrad_order")}, indent=1))


def digest(values: np.ndarray) -> str:
    """The SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
