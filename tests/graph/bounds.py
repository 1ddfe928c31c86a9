"""How far what a plan returns may lie from the definition of its graph: an error bound carried from node to node.

E is a bound of the error of what a tensor holds, element by element, and u the unit roundoff of the compute dtype. A
node's outputs are off by what its inputs' errors do to the formula, and by its own roundings. A result that is
converted is off by one more rounding, or, where it is an integer, by one more unit. Where a comparison could go either
way, both ways are allowed. Attention and what follows from statistics are bounded for exact inputs alone, gradients of
norms for exact inputs but the gradient that reaches them. What attention's products are off by is its family's rule, in
`jaxdnn._src.attention.bounds`: on tensor cores weights are rounded to the type of the values.
"""

import functools as ft
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxdnn._src.activation.bounds import slope_error, value_error
from jaxdnn._src.attention import bounds as of_attention
from jaxdnn._src.core.tolerance import ACCUMULATIONS, Accumulation
from jaxdnn_reference import derivative
from jaxdnn_reference import graph as definition

Array = np.ndarray[Any, Any]
TINY = 2.0**-126  # XLA on CPUs takes smaller numbers for zero
ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53, "int32": 0.0}
INTEGERS = ("int8", "uint8", "int32", "int64")


def tolerance(
    description: Mapping[str, Any], arrays: Mapping[int, Any], accumulation: str = "float32"
) -> tuple[dict[int, Array], dict[int, Array]]:
    """What every tensor holds, and how far a plan's may be from it, by uid and in the shape of the dimensions.

    `accumulation` is how attention adds that computes in float32, by the name that its engine declares.
    """
    known = {t["uid"]: t for t in description["tensors"]}
    held = definition.hold(description, arrays)
    made = {uid for node in description["nodes"] for uid in node["outputs"].values()}
    errors = {uid: np.zeros(value.shape) for uid, value in held.items() if uid not in made}
    waiting = list(description["nodes"])
    while waiting:
        node = next(n for n in waiting if all(uid in errors for uid in n["inputs"].values()))
        waiting.remove(node)
        x = {port: held[uid] for port, uid in node["inputs"].items()}
        e = {port: errors[uid] + _narrowed(node, known[uid], held[uid]) for port, uid in node["inputs"].items()}
        y = definition.run(node, known, x)
        with np.errstate(all="ignore"):
            found = own(node, known, x, e, y, ACCUMULATIONS[accumulation])
        for port, uid in node["outputs"].items():
            errors[uid] = _stored(found[port], y[port], known[uid])
    return held, errors


def _narrowed(node: Mapping[str, Any], tensor: Mapping[str, Any], value: Array) -> Array | float:
    """Operands of products are read in their dtype, which a virtual tensor need not have been converted to."""
    products = ("conv_fprop", "conv_dgrad", "conv_wgrad", "matmul", "moe_grouped_matmul")
    products += ("sdpa", "sdpa_fp8", "sdpa_backward")
    if node["op"] in products and tensor["is_virtual"] and tensor["data_type"] in ("bfloat16", "float16"):
        return _roundoff(tensor["data_type"]) * np.abs(value) + _smallest(tensor["data_type"])
    return 0.0


def _roundoff(data_type: str) -> float:
    return float(ml_dtypes.finfo(getattr(ml_dtypes, data_type, data_type)).eps) / 2


def _smallest(data_type: str) -> float:
    return float(ml_dtypes.finfo(getattr(ml_dtypes, data_type, data_type)).smallest_subnormal)


def _stored(error: Array, value: Array, tensor: Mapping[str, Any]) -> Array:
    error = np.broadcast_to(error, value.shape)
    dtype = tensor["data_type"]
    if tensor["is_virtual"] and dtype in definition.HELD:
        return error
    if dtype == "bool":
        return np.minimum(np.ceil(error), 1)
    if dtype in INTEGERS:
        return np.where(error > 0, np.floor(error) + 1, 0)
    return np.where(error > 0, error + 2 * _roundoff(dtype) * (np.abs(value) + error) + _smallest(dtype), 0)


def own(node: Any, known: Any, x: Any, e: Any, y: Any, accumulation: Accumulation) -> dict[str, Array]:
    """E of a node's outputs before they are stored."""
    u = ROUNDOFF[node["compute_data_type"]]
    run = lambda given: definition.run(node, known, given)
    how = node["attributes"]
    op = node["op"]
    if op == "pointwise":
        return {"OUT_0": pointwise(how, x, e, y["OUT_0"], u)}
    if op in ("reshape", "transpose", "slice", "concatenate"):
        return run(e)
    if op == "rng":
        return {"Y": np.zeros(y["Y"].shape)}
    if op in PRODUCTS:
        return products(node, known, x, e, run, u)
    if op == "reduction":
        return {"Y": reduction(how, x["input"], e["input"], y["Y"], run, u)}
    if op in ("resample", "resample_backward"):
        return windows(how, x, e, y, run, u)
    if op in ("rope", "rope_backward"):
        most = lambda v: 2 * np.abs(how["output_scale"]) * np.max(v, -1, keepdims=True) + 0 * v
        size = most(np.abs(x["input"]) + e["input"])
        return {"Y": most(e["input"]) + 12 * u * size * (1 + np.abs(x["freqs"]).max())}
    if op == "block_scale_quantize":
        return _quantised(e, y)
    if op == "block_scale_dequantize":
        return {"Y": run({**x, "input": e["input"]})["Y"] + u * np.abs(y["Y"])}
    if op in NORMS:
        return norm(node, x, e, y, u)
    if op == "genstats":
        return statistics(x["input"], e["input"], y, u)
    if any(np.any(v) for port, v in e.items() if (op, port) not in LINEAR):
        raise NotImplementedError(f"{op} of inputs that are not exact has no bound here")
    if op.endswith("norm_backward"):
        return norm_backward(node, x, e["grad"], y, u)
    if op in ATTENTION:
        wide = node["compute_data_type"] == "float64"
        dtype = "bfloat16" if op == "sdpa_fp8" else known[node["inputs"]["v"]]["data_type"]  # which holds 8 bits
        return ATTENTION[op](node, x, y, Adds(ACCUMULATIONS["float64"] if wide else accumulation, dtype, u))
    return EXACT_INPUTS[op](node, x, y, run, u)


def corners(function: Any, x: list[Array], e: list[Array], y: Array) -> Array:
    """The largest change at the corners of the box around x: exact of what is monotone in each argument."""
    change = np.zeros(y.shape)
    for signs in itertools.product((-1, 1), repeat=len(x)):
        at = function(*(v + s * d for v, s, d in zip(x, signs, e, strict=True)))
        change = np.maximum(change, np.where(np.isfinite(at) | ~np.isfinite(y), np.abs(at - y), np.inf))
    return np.where(np.isnan(change), np.where(np.isnan(y), 0, np.inf), change)


def pointwise(how: Any, x: Any, e: Any, y: Array, u: float) -> Array:
    mode, rank = how["mode"], y.ndim
    wide = lambda v: np.broadcast_to(v.reshape((1,) * rank) if v.size == 1 else v, y.shape)
    xs, es = ([wide(named[p]) for p in ("IN_0", "IN_1", "IN_2") if p in named] for named in (x, e))
    # What is an input of 32 bits that float32 does not hold is rounded first.
    es = [d + np.where(np.abs(v) > 2.0**24, u * np.abs(v), 0) for v, d in zip(xs, es, strict=True)]
    if mode in ("GEN_INDEX",):
        return np.zeros(y.shape)
    if mode.startswith("CMP"):
        return (np.abs(xs[0] - xs[1]) <= es[0] + es[1]) & (es[0] + es[1] > 0)
    if mode.startswith("LOGICAL"):
        return np.any([(np.abs(v) <= d) & (d > 0) for v, d in zip(xs, es, strict=True)], axis=0)
    if mode == "BINARY_SELECT":
        unsure = (np.abs(xs[2]) <= es[2]) & (es[2] > 0)
        return np.maximum(es[0], es[1]) + np.where(unsure, np.abs(xs[0] - xs[1]), 0)
    if mode in ("FLOOR", "CEIL"):
        return np.where(np.floor(xs[0] - es[0]) != np.floor(xs[0] + es[0]), es[0] + 1, 0)
    if mode in ("MOD", "FLOOR_MOD"):
        jump = (es[0] > 0) | (es[1] > 0)
        return np.where(jump, 2 * (np.abs(xs[1]) + es[1]) + es[0], u * np.abs(xs[1]))
    if mode.endswith(("_FWD", "_BWD")):
        return _activation(how, mode, xs, es, u)
    change = corners(definition.pointwise.MATH[mode], xs, es, y)
    size = np.abs(y) + change
    flushed = TINY * (1 + sum(np.abs(v) for v in xs)) if mode in ("MUL", "ADD_SQUARE", "DIV", "POW") else 0.0
    if mode in ("MIN", "MAX", "ABS", "NEG", "IDENTITY"):
        return change
    if mode == "ADD_SQUARE":
        return change + 3 * u * (np.abs(xs[0]) + xs[1] ** 2 + size) + flushed
    if mode in ("SIN", "COS"):
        return np.minimum(es[0], 2) + 8 * u
    if mode == "TAN":
        return np.where(es[0] < 0.01, change, np.inf) + 16 * u * (1 + y**2 + size)
    if mode == "POW":
        return change + 8 * u * size * (1 + np.abs(xs[1] * np.log(np.maximum(np.abs(xs[0]), 1e-30)))) + flushed
    factor = {
        "ADD": 1,
        "SUB": 1,
        "MUL": 1,
        "DIV": 3,
        "SQRT": 3,
        "RSQRT": 4,
        "RECIPROCAL": 3,
        "EXP": 8,
        "ERF": 8,
        "ATAN2": 12,
    }
    return change + (8 * u * (1 + size) if mode == "LOG" else factor[mode] * u * size) + flushed


def _activation(how: Any, mode: str, xs: list[Array], es: list[Array], u: float) -> Array:
    activation = definition.pointwise._activation(definition.Node({"attributes": how}, {}, {}), mode)  # type: ignore[arg-type]
    dtype = "float32" if u == ROUNDOFF["float32"] else "float64"
    steep = 1.2 * max(
        [1.0, *(abs(v) for v in (activation[1:] if isinstance(activation, tuple) else ()) if np.isfinite(v))]
    )
    if mode.endswith("_FWD"):
        return steep * es[0] + value_error(activation, xs[0], format=dtype) + TINY
    dy, at = xs
    slopes = [derivative(at + s * es[1], activation) for s in (-1, 0, 1)]
    change = np.maximum(np.abs(slopes[0] - slopes[1]), np.abs(slopes[2] - slopes[1])) + 2 * steep * es[1]
    off = change + slope_error(activation, at, format=dtype)
    return (
        es[0] * (np.abs(slopes[1]) + off) + np.abs(dy) * off + 2 * u * np.abs(dy * slopes[1]) + TINY * (1 + np.abs(dy))
    )


PRODUCTS = {
    "conv_fprop": ("image", "weight"),
    "conv_dgrad": ("loss", "filter"),
    "conv_wgrad": ("image", "loss"),
    "matmul": ("A", "B"),
    "moe_grouped_matmul": ("token", "weight"),
    "moe_grouped_matmul_bwd": ("doutput", "token"),
}


def products(node: Any, known: Any, x: Any, e: Any, run: Any, u: float) -> dict[str, Array]:
    """Σ|a||b| with and without the errors of a and b, and a roundoff for each term that is added."""
    ports = PRODUCTS[node["op"]]
    if any(np.any(v) for port, v in e.items() if port not in ports):
        raise NotImplementedError("lengths and offsets have to be exact")
    sizes = {port: np.abs(x[port]) for port in ports}
    most = {port: sizes[port] + e[port] for port in ports}
    how = {**node, "attributes": {**node["attributes"], **({"padding": 0.0} if node["op"] == "matmul" else {})}}
    how["compute_data_type"] = "float64"
    plain, all_ = (definition.run(how, known, {**x, **given}) for given in (sizes, most))
    ones = definition.run(how, known, {**x, **{port: np.ones(x[port].shape) for port in ports}})
    port = next(iter(all_))
    terms = ones[port]
    gamma = (terms + 1) * u / (1 - (terms + 1) * u)
    return {port: all_[port] - plain[port] + gamma * all_[port] + (terms * TINY if u else 0)}


def reduction(how: Any, x: Array, e: Array, y: Array, run: Any, u: float) -> Array:
    mode = how["mode"]
    as_mode = lambda name, v: definition.shapes.reduction(_As(how, name, y.shape), {"input": v})["Y"]
    n = x.size / y.size
    gamma = (n + 4) * u
    if mode in ("MIN", "MAX", "AMAX"):
        return as_mode("MAX", e)
    if mode in ("ADD", "AVG", "NORM1"):
        name = "AVG" if mode == "AVG" else "ADD"
        return as_mode(name, e) + gamma * as_mode(name, np.abs(x) + e) + TINY
    if mode == "NORM2":
        return as_mode("NORM2", e) + gamma * as_mode("NORM2", np.abs(x) + e) + 2.0**-62 * np.sqrt(n)
    sizes = np.where(x == 0, np.where(e > 0, np.maximum(e, 1), 1 if mode == "MUL_NO_ZEROS" else 0), np.abs(x))
    if mode == "MUL_NO_ZEROS":
        most = np.where(e > 0, np.maximum(sizes + e, 1), sizes)
        return (
            np.where(as_mode("MAX", e) > 0, as_mode("MUL", most) * (1 + gamma) - as_mode("MUL", sizes), 0)
            + gamma * as_mode("MUL", most)
            + TINY * as_mode("MUL", np.maximum(most, 1))
        )
    return (
        as_mode("MUL", sizes + e)
        - as_mode("MUL", sizes)
        + gamma * as_mode("MUL", sizes + e)
        + TINY * as_mode("MUL", np.maximum(sizes + e, 1))
    )


class _As(definition.Node):
    """A reduction's node with another mode."""

    def __init__(self, how: Any, mode: str, dim: tuple[int, ...]) -> None:
        super().__init__({"attributes": {**how, "mode": mode}}, {"Y": dim}, {})


def windows(how: Any, x: Any, e: Any, y: Any, run: Any, u: float) -> dict[str, Array]:
    taps = float(np.prod(how["window"]))
    if "loss" in x:
        if np.any(e["input"]) and how["mode"] == "MAXPOOL":
            raise NotImplementedError("the place of a maximum has to be certain")
        size = run({**x, "loss": np.abs(x["loss"]) + e["loss"]})["DX"]
        return {"DX": run({**x, "loss": e["loss"]})["DX"] + (taps + 2) * u * size + TINY}
    found = {"Y": run({"input": e["input"]})["Y"]}
    if how["mode"] != "MAXPOOL":
        found["Y"] = found["Y"] + (taps + 2) * u * run({"input": np.abs(x["input"]) + e["input"]})["Y"] + TINY
    if "INDEX" in y:
        found["INDEX"] = np.where(found["Y"] > 0, taps, 0)
    return found


def _quantised(e: Any, y: Any) -> dict[str, Array]:
    if np.any(e["input"]):
        raise NotImplementedError("what is quantised has to be exact")
    return {"Y": np.zeros(y["Y"].shape), "scale": np.zeros(y["scale"].shape)}


NORMS = ("layernorm", "adalayernorm", "rmsnorm", "instancenorm", "batchnorm", "batchnorm_inference")


def norm_axes(node: Any, x: Any) -> tuple[int, ...]:
    rank, scale = x["input"].ndim, x["scale"].shape
    if node["op"].startswith("instance"):
        return tuple(range(2, rank))
    if node["op"].startswith("batch"):
        return (0, *range(2, rank))
    first = 1 if node["op"].startswith("ada") else 0
    return tuple(axis for axis in range(first, rank) if scale[axis] != 1) or (rank - 1,)


def norm(node: Any, x: Any, e: Any, y: Any, u: float) -> dict[str, Array]:
    """The mean, the deviation, the inverse root and the product, each off by what it is made of."""
    given, off = x["input"], e["input"]
    scale, e_scale, bias, e_bias = x["scale"], e["scale"], x.get("bias", np.zeros(1)), e.get("bias", np.zeros(1))
    if node["op"] == "batchnorm_inference":
        d, e_d = given - x["mean"], off + e["mean"]
        e_d = e_d + u * (np.abs(d) + e_d)
        r, e_r = x["inv_variance"], e["inv_variance"]
        return {"Y": _scaled(d, e_d, r, e_r, scale, e_scale, bias, e_bias, u)}
    axes = norm_axes(node, x)
    n = np.prod([given.shape[axis] for axis in axes])
    mean_of = lambda v: v.mean(axes, keepdims=True)
    gamma = (n + 10) * u
    if node["op"] == "rmsnorm":
        mu, e_mu = 0.0, 0.0
    else:
        mu = mean_of(given)
        e_mu = mean_of(off) + gamma * mean_of(np.abs(given) + off)
    d = given - mu
    e_d = off + e_mu + 2 * u * (np.abs(d) + off + e_mu)
    variance = mean_of(d**2)
    e_v = mean_of(2 * np.abs(d) * e_d + e_d**2)
    e_v = e_v + gamma * (variance + e_v)
    eps = x["epsilon"].item()
    root = lambda v: 1 / np.sqrt(np.maximum(v, 0) + eps)
    r = root(variance)
    e_r = np.maximum(np.abs(root(variance - e_v) - r), np.abs(root(variance + e_v) - r)) + 8 * u * r
    found = {"Y": _scaled(d, e_d, r, e_r, scale, e_scale, bias, e_bias, u)}
    statistics = {"MEAN": e_mu + 2 * u * np.abs(mu), "INV_VARIANCE": e_r}
    if "NEXT_RUNNING_MEAN" in y:
        m = float(x["momentum"].item())
        old = np.abs(x["in_running_mean"]), np.abs(x["in_running_var"])
        statistics["NEXT_RUNNING_MEAN"] = m * e_mu + 4 * u * (old[0] + np.abs(mu)) + e["in_running_mean"]
        unbiased = n / max(n - 1, 1)
        statistics["NEXT_RUNNING_VAR"] = (
            m * unbiased * e_v + 6 * u * (old[1] + unbiased * variance) + e["in_running_var"]
        )
    return {**found, **{port: np.broadcast_to(v, y[port].shape) for port, v in statistics.items() if port in y}}


def _scaled(d: Any, e_d: Any, r: Any, e_r: Any, s: Any, e_s: Any, b: Any, e_b: Any, u: float) -> Array:
    h = d * r
    e_h = np.abs(d) * e_r + (r + e_r) * e_d
    e_h = e_h + u * (np.abs(h) + e_h)
    off = np.abs(h) * e_s + (np.abs(s) + e_s) * e_h + e_b
    return off + 5 * u * (np.abs(h * s) + np.abs(b) + off) + TINY


def norm_backward(node: Any, x: Any, e: Array, y: Any, u: float) -> dict[str, Array]:
    """dx = r s (dy - mean(dy) - h mean(dy h)), with each term's magnitude, for h may have cancelled."""
    axes = norm_axes(node, x)
    n = np.prod([x["input"].shape[axis] for axis in axes])
    mu, r = x.get("mean", np.zeros(1)), x["inv_variance"]
    size = (np.abs(x["input"]) + np.abs(mu)) * r
    dy = np.abs(x["grad"])
    mean_of = lambda v: v.mean(axes, keepdims=True)
    s = np.abs(x["scale"])
    each = node["op"].startswith(("batch", "instance"))
    over = tuple(axis for axis in range(x["input"].ndim) if x["scale"].shape[axis] == 1)
    total = lambda v: v.sum(over, keepdims=True) if over else v
    m = x["input"].size / x["scale"].size

    def sizes(dy: Array) -> dict[str, Array]:
        weighed = dy if each else dy * s
        dx = (r * s if each else r) * (weighed + mean_of(weighed) + size * mean_of(weighed * size))
        return {"DX": dx, "DSCALE": total(dy * size), "DBIAS": total(dy)}

    own, given = sizes(dy + e), sizes(e)
    terms = {"DX": 3 * n, "DSCALE": m, "DBIAS": m}
    return {port: (given[port] + (terms[port] + 24) * u * own[port]).reshape(y[port].shape) for port in y}


def statistics(x: Array, e: Array, y: Any, u: float) -> dict[str, Array]:
    n = x.size / y["SUM"].size
    total = lambda v: v.sum((0, *range(2, x.ndim)), keepdims=True)
    most = np.abs(x) + e
    squares = total(2 * np.abs(x) * e + e**2) + (n + 4) * u * total(most**2) + n * TINY
    return {"SUM": total(e) + (n + 2) * u * total(most) + TINY, "SQ_SUM": squares}


def finalize(node: Any, x: Any, y: Any, run: Any, u: float) -> dict[str, Array]:
    del node, run
    m = float(x["accum_count"].item())
    mean, square = x["sum"] / m, x["sq_sum"] / m
    e_mean = 2 * u * np.abs(mean)
    variance = np.maximum(square - mean**2, 0)
    e_v = 6 * u * (square + mean**2)
    eps = x["epsilon"].item()
    root = lambda v: 1 / np.sqrt(np.maximum(v, 0) + eps)
    r = root(variance)
    e_r = np.maximum(np.abs(root(variance - e_v) - r), np.abs(root(variance + e_v) - r)) + 8 * u * r
    s, b = np.abs(x["scale"]), np.abs(x["bias"])
    factor, e_factor = r * s, s * e_r + u * r * s
    found = {"EQ_SCALE": e_factor, "MEAN": e_mean, "INV_VARIANCE": e_r}
    found["EQ_BIAS"] = np.abs(mean) * e_factor + e_mean * factor + 6 * u * (b + np.abs(mean) * factor)
    if "momentum" in x:
        f = float(x["momentum"].item())
        found["NEXT_RUNNING_MEAN"] = f * e_mean + 6 * u * (np.abs(x["input_running_mean"]) + np.abs(mean))
        unbiased = m / (m - 1)
        found["NEXT_RUNNING_VAR"] = f * unbiased * e_v + 8 * u * (np.abs(x["input_running_var"]) + unbiased * variance)
    return {port: found[port] for port in y}


def finalize_inference(node: Any, x: Any, y: Any, run: Any, u: float) -> dict[str, Array]:
    del node, run
    factor = np.abs(y["EQ_SCALE"])
    return {"EQ_SCALE": 12 * u * factor, "EQ_BIAS": 20 * u * (np.abs(x["bias"]) + np.abs(x["mean"]) * factor)}


def weights(node: Any, x: Any, y: Any, run: Any, u: float) -> dict[str, Array]:
    """Sums over the channel, and products of these; cancellation in x - mean is bounded by the magnitudes."""
    del node, run
    axes = (0, *range(2, x["input"].ndim))
    n = x["input"].size / x["mean"].size
    k, r, s = (n + 24) * u, x["inv_variance"], np.abs(x["scale"])
    total = lambda v: v.sum(axes, keepdims=True)
    size = (np.abs(x["input"]) + np.abs(x["mean"])) * r
    dscale, dbias = total(np.abs(x["dy"]) * size), total(np.abs(x["dy"]))
    f_x = s * r * r * dscale / n
    bias = s * r * dbias / n + np.abs(x["mean"]) * f_x
    found = {
        "DSCALE": k * dscale,
        "DBIAS": k * dbias,
        "EQ_SCALE_DY": 4 * u * s * r,
        "EQ_SCALE_X": 2 * k * f_x,
        "EQ_BIAS": 3 * k * bias,
    }
    return {port: found[port] + TINY for port in y}


class Adds(NamedTuple):
    """How a node of attention adds: its accumulation, the type of its values, u."""

    accumulation: Accumulation
    dtype: str
    u: float

    def of(self, terms: int) -> float:
        """E of a product of so many terms, relative to its magnitude."""
        return float(self.accumulation.error(np.asarray(1.0), np.asarray(1.0), np.asarray(terms)))


def _probabilities(node: Any, x: Any, adds: Adds) -> tuple[Array, Array, Array]:
    """P with dropout in it, the magnitude of the scores, and the relative error of P."""
    heads = x["q"].shape[1] // x["k"].shape[1]
    wide = lambda v: np.repeat(v, heads, axis=1)
    scale = abs(float(x["attn_scale"].item())) if "attn_scale" in x else 1.0
    scale *= float(np.prod([np.abs(x[name].item()) for name in ("descale_q", "descale_k") if name in x]))
    sizes = scale * np.abs(x["q"]) @ np.abs(wide(x["k"])).swapaxes(2, 3)
    n = sizes.shape[-1]
    if "bias" in x:
        sizes = sizes + np.abs(x["bias"])
    if node["attributes"]["use_alibi_mask"]:
        sizes = sizes + max(sizes.shape[2:])
    steep, added = of_function(node.get("score_mod"), x)
    sizes = steep * sizes + added
    off = (adds.of(x["q"].shape[3]) + 12 * adds.u) * sizes.max(-1, keepdims=True)
    eye = np.broadcast_to(np.eye(n), (*x["k"].shape[:2], n, n))
    how = {**node, "op": "sdpa"}
    nodes = definition.Node(how, {"q": x["q"].shape}, {})  # type: ignore[arg-type]
    given = {**{k: v for k, v in x.items() if k not in ("o", "dO", "stats")}, "v": eye}
    given["q"] = x["q"] * np.prod([x[name].item() for name in ("descale_q", "descale_k") if name in x])
    p = definition.attention.sdpa(nodes, given)["O"]
    return p, sizes, np.expm1(2 * off + (n + 24) * adds.u)


def of_function(body: Any, x: Any) -> tuple[float, float]:
    """How much errors of scores grow in a function of them, and what it adds to their size, at most.

    Of sums, products with numbers, selections and activations: slopes are at most 1.2 but for a product's factor. An
    infinity is selected, where a key is not seen.
    """
    if not body:
        return 1.0, 0.0
    largest = {port: float(np.abs(x[port][np.isfinite(x[port])]).max(initial=0)) for port in body["reads"]}
    steep = 1.0
    for node in body["nodes"]:
        names = {uid: port for port, uid in body["reads"].items()}
        factors = [largest[names[uid]] for uid in node["inputs"].values() if uid in names]
        steep *= max([1.0, *factors]) if node["attributes"]["mode"] == "MUL" else 1.2
    return steep, 4.0 * steep * (1 + sum(largest.values()))


def sdpa(node: Any, x: Any, y: Any, adds: Adds) -> dict[str, Array]:
    p, sizes, rate = _probabilities(node, x, adds)
    v = np.repeat(x["v"], x["q"].shape[1] // x["v"].shape[1], axis=1)
    most = 1 / (1 - node["attributes"]["dropout_probability"])
    found = {"O": of_attention.result_error(p @ v, p, rate, np.zeros(p.shape[:-1]), v, *adds[:2], most)}
    if "Stats" in y:
        stats = np.where(np.isfinite(y["Stats"]), np.abs(y["Stats"]), 0)
        found["Stats"] = rate + 8 * adds.u * (stats + sizes.max(-1, keepdims=True) + 1)
    return found


def sdpa_fp8(node: Any, x: Any, y: Any, adds: Adds) -> dict[str, Array]:
    p, sizes, rate = _probabilities(node, x, adds)
    u = adds.u
    factor = np.prod([np.abs(x[name].item()) for name in ("descale_v", "descale_s", "scale_s")])
    found = sdpa(node, x, y, adds)
    size = factor * (p @ np.repeat(np.abs(x["v"]), x["q"].shape[1] // x["v"].shape[1], axis=1))
    off = factor * found["O"] + 4 * u * size
    found["Amax_S"] = np.full((1, 1, 1, 1), rate.max() + 8 * u * (1 + sizes.max()))
    found["Amax_O"] = np.full((1, 1, 1, 1), off.max())
    scale = np.abs(x["scale_o"].item())
    return {**found, "O": scale * (off + u * size)}


def sdpa_backward(node: Any, x: Any, y: Any, adds: Adds) -> dict[str, Array]:
    p, sizes, rate = _probabilities(node, x, adds)
    u, (w, _) = adds.u, of_attention.narrow(*adds[:2])
    stats = np.where(np.isfinite(x["stats"]), np.abs(x["stats"]), 0)  # a query that sees nothing has no gradient
    rate = rate + np.expm1(8 * u * (stats + sizes.max(-1, keepdims=True)))
    groups = x["q"].shape[1] // x["k"].shape[1]
    wide = lambda v: np.repeat(np.abs(v), groups, axis=1)
    narrow = lambda v: v.reshape(v.shape[0], -1, groups, *v.shape[2:]).sum(2)
    do, k, v, q = np.abs(x["dO"]), wide(x["k"]), wide(x["v"]), np.abs(x["q"])
    dp, d = do @ v.swapaxes(2, 3), (do * np.abs(x["o"])).sum(-1, keepdims=True)
    ds = p * (dp + d)
    (rows, keys), values = p.shape[2:], x["v"].shape[3]
    off = (rate + w + 2 * adds.of(values) + (2 * values + 48) * u) * ds
    scale = abs(float(x["attn_scale"].item())) if "attn_scale" in x else 1.0
    scale *= of_function(node.get("score_mod"), x)[0]
    product = ft.partial(of_attention.product_error, accumulation=adds.accumulation, dtype=adds.dtype, scale=scale)
    dx, e_dx = scale * ds, scale * off
    found = {
        "dQ": product(dx, e_dx, k, keys),
        "dK": product(dx.swapaxes(2, 3), e_dx.swapaxes(2, 3), q, groups * rows, own=narrow),
        "dV": product(p.swapaxes(2, 3), (rate * p).swapaxes(2, 3), do, groups * rows, own=narrow),
    }
    if "dBias" in y:
        axes = tuple(axis for axis, size in enumerate(x["bias"].shape) if size == 1)
        terms = np.prod([ds.shape[axis] for axis in axes])
        held = off + of_attention.rounding(ds + off, *adds[:2], scale)
        found["dBias"] = (held + terms * u * (ds + held)).sum(axes, keepdims=True)
    if "dSink_token" in y:
        share = np.exp(x["sink_token"] - x["stats"])
        found["dSink_token"] = ((rate + 3 * (rows + keys + values + 24) * u) * share * d).sum((0, 2), keepdims=True)
    return {port: found[port] + TINY for port in y}


ATTENTION = {"sdpa": sdpa, "sdpa_fp8": sdpa_fp8, "sdpa_backward": sdpa_backward}
BACKWARD = tuple(f"{name}_backward" for name in ("layernorm", "rmsnorm", "adalayernorm", "instancenorm", "batchnorm"))
LINEAR = [(op, "grad") for op in BACKWARD]
EXACT_INPUTS = {
    "bn_finalize": finalize,
    "bn_finalize_inference": finalize_inference,
    "dbn_weight": weights,
}
