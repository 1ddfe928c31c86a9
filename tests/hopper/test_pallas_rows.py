"""The kernels of benchmarks/pallas_rows in Pallas' interpreter, beside the formulas in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src import hopper
from jaxdnn._src.core.compat import plgpu

pytestmark = pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))

# Op, dtype, plan's fields, rows: a warp to a row and several, with and without a ring and persistent blocks, and
# numbers of rows that leave the last step with arrays beyond the end.
CASES: list[tuple[str, str, dict[str, int], int]] = [
    ("layer_norm", "float32", {"length": 2048, "warps": 8, "rows": 2, "blocks": 1}, 10),
    ("layer_norm_dgrad", "bfloat16", {"length": 512, "blocks": 1, "stages": 2}, 28),
    ("softmax", "bfloat16", {"length": 128, "rows": 2}, 24),
    ("softmax_dgrad", "float32", {"length": 2048, "warps": 4, "blocks": 1, "stages": 2}, 7),
    ("layer_norm", "bfloat16", {"length": 512, "rows": 2, "blocks": 1, "stages": 2}, 44),
    ("rms_norm", "float16", {"length": 512, "rows": 1}, 8),
    ("rms_norm", "float16", {"length": 1024, "warps": 4, "rows": 2, "blocks": 1}, 9),
    ("softmax", "float16", {"length": 256, "warps": 4, "rows": 4}, 7),
]

LIMITS = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 2e-6}  # of the relative error by the norm


@pytest.mark.parametrize(("op", "dtype", "fields", "count"), CASES)
def test_values(op, dtype, fields, count, monkeypatch):
    from benchmarks.pallas_rows import formulas, layer_norm, rows, softmax

    monkeypatch.setattr(rows, "MULTIPROCESSORS", 2)
    plan = rows.Plan(**fields)
    generator = np.random.default_rng(0)
    shape = (count, plan.length)
    rounded = lambda v: jnp.asarray(v, dtype if v.ndim == 2 else "float32")
    drawn = [generator.normal(0.5, 2, shape) for _ in range(2)] + [generator.normal(size=shape[1]) for _ in range(2)]
    narrow = [rounded(v) for v in formulas.operands(op, np, *(np.asarray(rounded(v), np.float64) for v in drawn))]
    interpreter: Any = getattr(plgpu, "InterpretGPUParams")  # noqa: B009  (older releases have none)
    options: dict[str, Any] = {"plan": plan, "interpret": interpreter(detect_races=True)}
    if op in ("layer_norm", "rms_norm"):
        options |= {"eps": formulas.EPS, "centred": op == "layer_norm"}
    family = softmax if op.startswith("softmax") else layer_norm
    arrays = [*narrow, None] if op == "rms_norm" else narrow
    found = (family.backward if op.endswith("dgrad") else family.forward)(*arrays, **options)
    wanted = formulas.results(op, np, *(np.asarray(v, np.float64) for v in narrow))
    for i, (f, w) in enumerate(zip(found if isinstance(found, tuple) else (found,), wanted, strict=True)):
        error, size = np.linalg.norm(np.asarray(f, np.float64) - w), np.linalg.norm(w)
        assert error <= (LIMITS[dtype] if i == 0 else LIMITS["float32"]) * size
