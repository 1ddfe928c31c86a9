"""The ops as formulas, in NumPy or `jax.numpy`, and which plans serve them."""

from typing import Any

from .rows import Plan

EPS = 1e-5

# The fastest plan of those measured for an op, dtype and length of rows. `softmax` of float32 and length 1024, and of
# length 65536, have not run.
PLANS: dict[tuple[str, str], list[Plan]] = {
    ("layer_norm", "bfloat16"): [
        Plan(512, rows=2),
        Plan(1024, warps=4, rows=4),
        Plan(2048, warps=4, rows=4),
        Plan(4096, warps=8, rows=2, blocks=2),
        Plan(8192, warps=16, rows=2, blocks=1),
    ],
    ("layer_norm", "float32"): [Plan(1024, warps=4, rows=4), Plan(4096, warps=4), Plan(8192, warps=8)],
    ("layer_norm_dgrad", "bfloat16"): [
        Plan(512, blocks=4, stages=2),
        Plan(1024, warps=4, blocks=8, stages=2),
        Plan(2048, warps=4, blocks=4, stages=2),
        Plan(4096, warps=8, blocks=2, stages=2),
        Plan(8192, warps=16, blocks=1),
    ],
    ("layer_norm_dgrad", "float32"): [
        Plan(1024, warps=4, blocks=5),
        Plan(4096, warps=8, blocks=2, stages=2),
        Plan(8192, warps=16, blocks=1),
    ],
    ("softmax", "bfloat16"): [
        Plan(128, rows=4),
        Plan(1024, warps=4, rows=2),
        Plan(2048, warps=4),
        Plan(4096, warps=8),
        Plan(8192, warps=4),
        Plan(16384, warps=8),
        Plan(32768, warps=32, blocks=1),
        Plan(65536, warps=32),
    ],
    ("softmax", "float32"): [Plan(1024, warps=4), Plan(8192, warps=4), Plan(16384, warps=16)],
    ("softmax_dgrad", "bfloat16"): [
        Plan(128, rows=2),
        Plan(1024, warps=4, rows=2),
        Plan(2048, warps=4),
        Plan(4096, warps=8),
        Plan(8192, warps=8),
        Plan(16384, warps=16, blocks=1, stages=2),
        Plan(32768, warps=32),
    ],
    ("softmax_dgrad", "float32"): [Plan(1024, warps=4), Plan(8192, warps=16)],
}


def operands(op: str, xp: Any, x: Any, dy: Any, scale: Any, bias: Any) -> tuple:
    """An op's operands; statistics and softmax of x are computed here, in the dtype of x."""
    if op == "layer_norm":
        return x, scale, bias
    if op == "rms_norm":
        return x, scale
    if op == "layer_norm_dgrad":
        return dy, x, x.mean(1), 1 / xp.sqrt(x.var(1) + EPS), scale
    return (x,) if op == "softmax" else (dy, softmax(xp, x))


def results(op: str, xp: Any, *arrays: Any) -> tuple:
    """An op's results; the first is as large as x."""
    if op == "softmax":
        return (softmax(xp, *arrays),)
    if op == "softmax_dgrad":
        dy, y = arrays
        return (y * (dy - (y * dy).sum(1)[:, None]),)
    if op == "rms_norm":
        x, scale = arrays
        square = (x * x).mean(1)
        rstd = 1 / xp.sqrt(square + EPS)
        return x * rstd[:, None] * scale[None], 0 * square, rstd, square
    if op == "layer_norm":
        x, scale, bias = arrays
        mean, variance = x.mean(1), x.var(1)
        rstd = 1 / xp.sqrt(variance + EPS)
        return (x - mean[:, None]) * rstd[:, None] * scale[None] + bias[None], mean, rstd, variance
    dy, x, _, _, scale = arrays
    h = (x - x.mean(1)[:, None]) / xp.sqrt(x.var(1) + EPS)[:, None]
    g = dy * scale[None]
    dx = (g - g.mean(1)[:, None] - h * (g * h).mean(1)[:, None]) / xp.sqrt(x.var(1) + EPS)[:, None]
    return dx, (dy * h).sum(0), dy.sum(0)


def softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - x.max(1)[:, None])
    return e / e.sum(1)[:, None]
