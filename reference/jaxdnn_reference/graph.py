"""Operation graphs, evaluated from their plain description in NumPy.

A description is a dict of numbers, strings, lists and dicts, as `jaxdnn.graph.Graph.describe` returns it: `tensors`
with uid, dim, stride, data_type, is_virtual, value; `nodes` with op, inputs and outputs (ports to uids), attributes and
compute_data_type. The array of a tensor is its memory: axes by descending stride, or a row where there are gaps.

Every node is computed in float64 from what its inputs hold. A tensor in memory holds its dtype's nearest numbers, of
integers saturated. A virtual one of float16 or wider is never written and holds what was computed; other virtual
tensors are converted. int32 wraps where it is the compute dtype.

Sources: the cuDNN developer guide, "Graph API", and the headers of cudnn-frontend for names and defaults.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxdnn_reference.activation import activate, derivative
from jaxdnn_reference.attention import attention, attention_dgrad
from jaxdnn_reference.conv import conv, conv_dgrad, conv_wgrad
from jaxdnn_reference.dropout import dropout_mask
from jaxdnn_reference.norm import (
    adaptive_layer_norm,
    adaptive_layer_norm_dgrad,
    layer_norm,
    layer_norm_dgrad,
    rms_norm,
    rms_norm_dgrad,
)
from jaxdnn_reference.norm_batch import batch_norm, batch_norm_dgrad
from jaxdnn_reference.norm_group import instance_norm, instance_norm_dgrad
from jaxdnn_reference.norm_stats import bn_finalize, bn_finalize_inference, dbn_weight, genstats
from jaxdnn_reference.pool import pool, pool_dgrad
from jaxdnn_reference.reduce import reduce
from jaxdnn_reference.rounding import round_to

Array = np.ndarray[Any, Any]
Description = Mapping[str, Any]
HELD = ("float64", "float32", "bfloat16", "float16")  # what a virtual tensor holds as it was computed
LAYOUT = {3: ("NCW", "KCS"), 4: ("NCHW", "KCRS"), 5: ("NCDHW", "KCTRS")}


def evaluate(description: Description, arrays: Mapping[int, Any]) -> dict[int, Array]:
    """The arrays of a graph's outputs, by uid, of those of its inputs."""
    known = {t["uid"]: t for t in description["tensors"]}
    held = hold(description, arrays)
    made = [uid for node in description["nodes"] for uid in node["outputs"].values()]
    written = (known[uid] for uid in made if not known[uid]["is_virtual"])
    return {t["uid"]: to_memory(converted(held[t["uid"]], t["data_type"]), t) for t in written}


def hold(description: Description, arrays: Mapping[int, Any]) -> dict[int, Array]:
    """What every tensor holds, in float64 and in the shape of its dimensions."""
    known = {t["uid"]: t for t in description["tensors"]}
    held = {uid: np.full(t["dim"], float(t["value"]), np.float64) for uid, t in known.items() if t["value"] is not None}
    held = {uid: converted(v, known[uid]["data_type"]).astype(np.float64) for uid, v in held.items()}
    for uid, array in arrays.items():
        held[uid] = from_memory(np.asarray(array), known[uid]).astype(np.float64)
    waiting = list(description["nodes"])
    while waiting:
        node = next(n for n in waiting if all(uid in held for uid in n["inputs"].values()))
        waiting.remove(node)
        for port, value in run(node, known, {port: held[uid] for port, uid in node["inputs"].items()}).items():
            tensor = known[node["outputs"][port]]
            held[tensor["uid"]] = stored(value, tensor)
    return held


def stored(value: Array, tensor: Mapping[str, Any]) -> Array:
    """What a tensor holds of a computed value."""
    if tensor["is_virtual"] and tensor["data_type"] in HELD:
        return value
    return converted(value, tensor["data_type"]).astype(np.float64)


def converted(value: Array, data_type: str) -> Array:
    """In a dtype, by one rounding to nearest even."""
    dtype = np.dtype(getattr(ml_dtypes, data_type, data_type))
    if dtype == np.bool_:
        return value != 0
    return round_to(np.asarray(value), dtype)


def from_memory(array: Array, tensor: Mapping[str, Any]) -> Array:
    """A tensor's elements in the shape of its dimensions: element i lies at the sum of i times the strides."""
    return np.asarray(array).reshape(-1)[_places(tensor)]


def _places(tensor: Mapping[str, Any]) -> Array:
    """Where each element lies in memory."""
    at = np.zeros(tuple(tensor["dim"]), np.int64)
    for axis, (n, stride) in enumerate(zip(tensor["dim"], tensor["stride"], strict=True)):
        at += stride * np.arange(n).reshape([-1 if a == axis else 1 for a in range(at.ndim)])
    return at


def to_memory(value: Array, tensor: Mapping[str, Any]) -> Array:
    """The memory of a tensor; what lies in gaps is 0."""
    dim, stride = tuple(tensor["dim"]), tuple(tensor["stride"])
    size = 1 + sum((n - 1) * s for n, s in zip(dim, stride, strict=True))
    flat = np.zeros(size, value.dtype)
    flat[_places(tensor)] = value
    order = sorted(range(len(dim)), key=lambda axis: -stride[axis])
    return flat.reshape([dim[axis] for axis in order]) if math.prod(dim) == size else flat


def run(node: Mapping[str, Any], known: Mapping[int, Any], x: Mapping[str, Array]) -> dict[str, Array]:
    """What a node computes of its inputs, by port."""
    dims = {port: tuple(known[uid]["dim"]) for port, uid in (*node["inputs"].items(), *node["outputs"].items())}
    whole = node["compute_data_type"] == "int32"
    if whole and node["op"] in ("pointwise", "reduction"):  # products of 62 bits; int64 wraps at a multiple of 2^32
        x = {port: value.astype(np.int64) for port, value in x.items()}
    with np.errstate(all="ignore"):
        found = OPS[node["op"]](Node(node, dims, known), x)
        if whole:
            found = {port: wrapped(value) for port, value in found.items()}
    return {port: np.asarray(value, np.float64).reshape(dims[port]) for port, value in found.items() if port in dims}


def wrapped(value: Array) -> Array:
    """An integer modulo 2^32, from -2^31 on."""
    return (np.asarray(value).astype(np.int64) + 2**31) % 2**32 - 2**31


class Node:
    """A node's attributes, and the dimensions and dtypes at its ports."""

    def __init__(self, node: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]], known: Mapping[int, Any]) -> None:
        self.dims = dims
        self._node, self._known = node, known

    def __getitem__(self, name: str) -> Any:
        value = self._node["attributes"][name]
        return float(value) if value in ("inf", "-inf", "nan") else value

    def dtype(self, port: str) -> str:
        return self._known[{**self._node["inputs"], **self._node["outputs"]}[port]]["data_type"]


# Element by element


def _activation(node: Node, mode: str) -> Any:
    name = mode[:-4].lower()
    if name == "relu":
        upper = math.inf if node["upper_clip"] is None else node["upper_clip"]
        return ("relu", float(node["lower_clip"]), float(upper), float(node["negative_slope"]))
    if name in ("elu", "softplus", "swish"):
        return (name, float(node[{"elu": "elu_alpha", "softplus": "softplus_beta", "swish": "swish_beta"}[name]]))
    return "gelu_tanh" if name == "gelu_approx_tanh" else name


MATH: dict[str, Callable[..., Array]] = {
    "ADD": lambda a, b: a + b,
    "MUL": lambda a, b: a * b,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "SQRT": np.sqrt,
    "ADD_SQUARE": lambda a, b: a + b**2,
    "DIV": lambda a, b: a / b,
    "MOD": np.fmod,
    "POW": lambda a, b: a**b,
    "SUB": lambda a, b: a - b,
    "ABS": np.abs,
    "CEIL": np.ceil,
    "COS": np.cos,
    "EXP": np.exp,
    "FLOOR": np.floor,
    "LOG": np.log,
    "NEG": lambda a: -a,
    "RSQRT": lambda a: 1 / np.sqrt(a),
    "SIN": np.sin,
    "TAN": np.tan,
    "ERF": np.vectorize(math.erf, otypes=[np.float64]),
    "IDENTITY": lambda a: a,
    "RECIPROCAL": lambda a: 1 / a,
    "ATAN2": np.arctan2,
    "FLOOR_MOD": np.mod,
    "CMP_EQ": lambda a, b: a == b,
    "CMP_NEQ": lambda a, b: a != b,
    "CMP_GT": lambda a, b: a > b,
    "CMP_GE": lambda a, b: a >= b,
    "CMP_LT": lambda a, b: a < b,
    "CMP_LE": lambda a, b: a <= b,
    "LOGICAL_AND": lambda a, b: np.logical_and(a != 0, b != 0),
    "LOGICAL_OR": lambda a, b: np.logical_or(a != 0, b != 0),
    "LOGICAL_NOT": lambda a: a == 0,
    "BINARY_SELECT": lambda a, b, mask: np.where(mask != 0, a, b),
}


def pointwise(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    mode, dim = node["mode"], node.dims["OUT_0"]
    given = [x[port] for port in ("IN_0", "IN_1", "IN_2") if port in x]
    given = [np.broadcast_to(v.reshape((1,) * len(dim)) if v.size == 1 else v, dim) for v in given]
    if mode == "GEN_INDEX":
        return {"OUT_0": np.indices(dim)[node["axis"]]}
    if mode.endswith("_FWD"):
        return {"OUT_0": activate(given[0], _activation(node, mode))}
    if mode.endswith("_BWD"):
        return {"OUT_0": given[0] * derivative(given[1], _activation(node, mode))}
    return {"OUT_0": MATH[mode](*given)}


# Sums of products


def _window(node: Node, spatial: int) -> dict[str, Any]:
    each = lambda name, default: node[name] or [default] * spatial
    low = node["padding"] or each("pre_padding", 0)
    high = node["padding"] or each("post_padding", 0)
    named = {"stride": tuple(each("stride", 1)), "dilation": tuple(each("dilation", 1))}
    return {**named, "padding": tuple(zip(low, high, strict=True)), "mode": node["convolution_mode"].lower()}


def _conv(node: Node, x: str, w: str) -> dict[str, Any]:
    layout, filter_layout = LAYOUT[len(node.dims[x])]
    groups = node.dims[x][1] // node.dims[w][1]
    return {**_window(node, len(layout) - 2), "layout": layout, "filter_layout": filter_layout, "groups": groups}


def conv_fprop(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": conv(x["image"], x["weight"], **_conv(node, "image", "weight"))}


def conv_data(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"DX": conv_dgrad(x["loss"], x["filter"], node.dims["DX"], **_conv(node, "DX", "filter"))}


def conv_filter(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"DW": conv_wgrad(x["image"], x["loss"], node.dims["DW"], **_conv(node, "image", "DW"))}


def matmul(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    """Matrix by matrix; of batches of different sizes the smaller one's matrices serve as many neighbours each."""
    batch, a, b = node.dims["C"][:-2], x["A"], x["B"]
    c = np.zeros(node.dims["C"])
    for at in np.ndindex(*batch):
        of = lambda v, at=at: v[tuple(i // (n // m) for i, n, m in zip(at, batch, v.shape, strict=False))]
        left, right = of(a), of(b)
        size = {port: int(of(x[port]).item()) if port in x else None for port in OVERRIDES}
        inner = size["K_override"]
        c[at] = left[:, :inner] @ right[:inner]
        for axis, port in enumerate(OVERRIDES[:2]):
            if size[port] is not None:
                np.moveaxis(c[at], axis, 0)[size[port] :] = node["padding"]
    return {"C": c}


OVERRIDES = ("M_override", "N_override", "K_override")


def _experts(x: Mapping[str, Array], rows: int) -> list[tuple[int, int]]:
    first = [int(v) for v in x["first_token_offset"].ravel()]
    return list(zip(first, [*first[1:], rows], strict=True))


def grouped(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    token, weight = x["token"][0], x["weight"]
    index = x["token_index"].astype(int).ravel() if "token_index" in x else None
    rows = token if index is None or node["mode"] != "GATHER" else token[index]
    out = np.zeros((len(rows), weight.shape[2]))
    for expert, (start, stop) in enumerate(_experts(x, len(rows))):
        out[start:stop] = rows[start:stop] @ weight[expert]
    if node["mode"] == "SCATTER":
        scattered = np.zeros_like(out)
        scattered[index] = out
        out = scattered
    return {"OUT": out[None]}


def grouped_bwd(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    token, dout = x["token"][0], x["doutput"][0]
    return {"DWEIGHT": np.stack([token[a:b].T @ dout[a:b] for a, b in _experts(x, len(token))])}


# Shapes and reductions


WHOLE: dict[str, Callable[..., Array]] = {
    "ADD": np.sum,
    "MUL": np.prod,
    "MIN": np.min,
    "MAX": np.max,
    "AMAX": lambda v, **along: np.max(wrapped(np.abs(v)), **along),
    "NORM1": lambda v, **along: np.sum(np.abs(v), **along),
    "MUL_NO_ZEROS": lambda v, **along: np.prod(np.where(v == 0, 1, v), **along),
}


def reduction(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    y = node.dims["Y"]
    axes = tuple(axis for axis, n in enumerate(y) if n == 1)
    if x["input"].dtype == np.int64:
        return {"Y": WHOLE[node["mode"]](x["input"], axis=axes, keepdims=True)}
    return {"Y": reduce(x["input"], op=node["mode"].lower(), axis=axes, keepdims=True)}


def reshape(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    if node["reshape_mode"] == "LOGICAL":
        return {"Y": x["input"].reshape(node.dims["Y"])}
    tensors = node._known, node._node
    source, target = tensors[0][tensors[1]["inputs"]["input"]], tensors[0][tensors[1]["outputs"]["Y"]]
    return {"Y": from_memory(to_memory(x["input"], source), target)}


def transpose(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": x["input"].transpose(node["permutation"])}


def sliced(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": x["input"][tuple(slice(*part) for part in node["slices"])]}


def concatenate(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": np.concatenate([x[f"inputs_{i}"] for i in range(len(x))], axis=node["axis"])}


# Normalisations


def _axes(node: Node, first: int = 0) -> tuple[int, ...]:
    """Those along which the scale is not 1; the last if there is none."""
    scale = node.dims["scale"]
    return tuple(axis for axis in range(first, len(scale)) if scale[axis] != 1) or (len(scale) - 1,)


def _parameter(x: Array | None, axes: tuple[int, ...], lead: tuple[int, ...] = ()) -> Array | None:
    return None if x is None else x.reshape([x.shape[axis] for axis in (*lead, *axes)])


def _without(x: Array, axes: tuple[int, ...]) -> Array:
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes])


def _eps(x: Mapping[str, Array]) -> float:
    return float(x["epsilon"].item())


def layernorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    scale, bias = _parameter(x["scale"], axes), _parameter(x["bias"], axes)
    y, mean, rstd = layer_norm(x["input"], axis=axes, scale=scale, bias=bias, eps=_eps(x), return_statistics=True)
    return {"Y": y, "MEAN": mean, "INV_VARIANCE": rstd}


def rmsnorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    scale, bias = _parameter(x["scale"], axes), _parameter(x.get("bias"), axes)
    y, rstd = rms_norm(x["input"], axis=axes, scale=scale, bias=bias, eps=_eps(x), return_statistics=True)
    return {"Y": y, "INV_VARIANCE": rstd}


def adalayernorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node, 1)
    scale: Any = _parameter(x["scale"], axes, (0,))
    bias: Any = _parameter(x.get("bias", np.zeros(x["scale"].shape)), axes, (0,))
    found = adaptive_layer_norm(x["input"], scale, bias, axis=axes, eps=_eps(x), return_statistics=True)
    return dict(zip(("Y", "MEAN", "INV_VARIANCE"), found, strict=True))


GRADIENTS = ("DX", "DSCALE", "DBIAS")


def layernorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    mean, rstd = (_without(x[port], axes) for port in ("mean", "inv_variance"))
    scale = _parameter(x["scale"], axes)
    found = layer_norm_dgrad(x["grad"], x["input"], axis=axes, scale=scale, mean=mean, rstd=rstd)
    return dict(zip(GRADIENTS, found, strict=True))


def rmsnorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    rstd, scale = _without(x["inv_variance"], axes), _parameter(x["scale"], axes)
    return dict(zip(GRADIENTS, rms_norm_dgrad(x["grad"], x["input"], axis=axes, scale=scale, rstd=rstd), strict=True))


def adalayernorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node, 1)
    mean, rstd = (_without(x[port], axes) for port in ("mean", "inv_variance"))
    scale: Any = _parameter(x["scale"], axes, (0,))
    found = adaptive_layer_norm_dgrad(x["grad"], x["input"], scale, axis=axes, mean=mean, rstd=rstd)
    return dict(zip(GRADIENTS, found, strict=True))


def _channels(x: Mapping[str, Array], *ports: str) -> list[Any]:
    return [x[port].ravel() if port in x else None for port in ports]


def _layout(node: Node) -> str:
    return LAYOUT[len(node.dims["input"])][0]


def instancenorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    scale, bias = _channels(x, "scale", "bias")
    how = {"layout": _layout(node), "return_statistics": True}
    found = instance_norm(x["input"], scale=scale, bias=bias, eps=_eps(x), **how)
    return dict(zip(("Y", "MEAN", "INV_VARIANCE"), found, strict=True))


def instancenorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    mean, rstd = (x[port].reshape(x[port].shape[:2]) for port in ("mean", "inv_variance"))
    (scale,) = _channels(x, "scale")
    found = instance_norm_dgrad(x["grad"], x["input"], scale=scale, mean=mean, rstd=rstd, layout=_layout(node))
    return dict(zip(GRADIENTS, found, strict=True))


BATCH = ("Y", "MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")


def batchnorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    scale, bias, mean, variance = _channels(x, "scale", "bias", "in_running_mean", "in_running_var")
    momentum = float(x["momentum"].item()) if "momentum" in x else 1.0
    how = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance, "momentum": momentum}
    return dict(zip(BATCH, batch_norm(x["input"], **how, eps=_eps(x), layout=_layout(node)), strict=True))


def batchnorm_inference(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    return {"Y": (x["input"] - x["mean"]) * x["inv_variance"] * x["scale"] + x["bias"]}


def batchnorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    scale, mean, rstd = _channels(x, "scale", "mean", "inv_variance")
    found = batch_norm_dgrad(x["grad"], x["input"], scale=scale, mean=mean, rstd=rstd, layout=_layout(node))
    return dict(zip(GRADIENTS, found, strict=True))


def statistics(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return dict(zip(("SUM", "SQ_SUM"), genstats(x["input"], layout=_layout(node)), strict=True))


FINAL = ("EQ_SCALE", "EQ_BIAS", "MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")


def finalize(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    total, squares, scale, bias = _channels(x, "sum", "sq_sum", "scale", "bias")
    mean, variance = _channels(x, "input_running_mean", "input_running_var")
    momentum = float(x["momentum"].item()) if "momentum" in x else 1.0
    how = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance, "momentum": momentum}
    found = bn_finalize(total, squares, float(x["accum_count"].item()), **how, eps=_eps(x))
    return dict(zip(FINAL, found, strict=True))


def finalize_inference(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    mean, variance, scale, bias = _channels(x, "mean", "variance", "scale", "bias")
    found = bn_finalize_inference(mean, variance, scale=scale, bias=bias, eps=_eps(x))
    return dict(zip(FINAL, found, strict=False))


def weights(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    mean, rstd, scale = _channels(x, "mean", "inv_variance", "scale")
    found = dbn_weight(x["dy"], x["input"], mean, rstd, scale=scale, layout=_layout(node))
    return dict(zip(("DSCALE", "DBIAS", "EQ_SCALE_DY", "EQ_SCALE_X", "EQ_BIAS"), found, strict=True))


# Windows, random numbers


POOLS = {"MAXPOOL": "max", "AVGPOOL_INCLUDE_PADDING": "average", "AVGPOOL_EXCLUDE_PADDING": "average_exclude_padding"}


def _pool(node: Node) -> dict[str, Any]:
    layout = _layout(node)
    each = lambda name, default: tuple(node[name] or [default] * (len(layout) - 2))
    padding = tuple(zip(each("pre_padding", 0), each("post_padding", 0), strict=True))
    window = {"window": tuple(node["window"]), "stride": each("stride", 1), "padding": padding}
    return {**window, "mode": POOLS[node["mode"]], "layout": layout}


def resample(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    if "INDEX" not in node.dims:
        return {"Y": pool(x["input"], **_pool(node))}
    y, index = pool(x["input"], return_indices="tap", **_pool(node))
    return {"Y": y, "INDEX": index}


def resample_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"DX": pool_dgrad(x["loss"], x["input"], **_pool(node))}


def rng(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    key, rate = int(x["seed"].item()) % 2**64, 1 - node["bernoulli_probability"]
    return {"Y": dropout_mask(key, node.dims["Y"], rate=rate, offset=int(x["offset"].item()) % 2**64)}


# Attention


def _masks(node: Node, x: Mapping[str, Array]) -> dict[str, Any]:
    corner = node["use_causal_mask_bottom_right"]
    causal = node["use_causal_mask"] or corner
    alignment = "bottom_right" if corner else node["diagonal_alignment"].lower()
    left = node["sliding_window_length"] or node["diagonal_band_left_bound"]
    right = 0 if causal else node["diagonal_band_right_bound"]
    how: dict[str, Any] = {"layout": "BNTH", "scale": float(x["attn_scale"].item()) if "attn_scale" in x else 1.0}
    how["causal"] = alignment if right == 0 else False
    # cuDNN's left bound counts the diagonal, the definition's window does not.
    how["window"] = (None if left is None else left - 1, right)
    if "bias" in x:
        how["bias"] = x["bias"]
    if "seq_len_q" in x:
        how["query_lengths"], how["key_lengths"] = (x[p].astype(int).ravel() for p in ("seq_len_q", "seq_len_kv"))
    if node["use_alibi_mask"]:
        how["alibi_slopes"] = _slopes(node.dims["q"][1])
    if "sink_token" in x:
        how["sinks"] = x["sink_token"].ravel()
    if "seed" in x:
        how["dropout"], how["dropout_key"] = node["dropout_probability"], int(x["seed"].item()) % 2**64
    return how


def _slopes(heads: int) -> Array:
    """2^(-8 i / n) of the n heads, a power of two; the heads beyond have the odd terms of the series of 2 n."""
    n = 1 << (heads.bit_length() - 1)
    series = lambda count: [2.0 ** (-8.0 * i / count) for i in range(1, count + 1)]
    return np.array([*series(n), *series(2 * n)[::2]][:heads])


def sdpa(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    o, stats = attention(x["q"], x["k"], x["v"], return_logsumexp=True, **_masks(node, x))
    return {"O": o, "Stats": stats}


def sdpa_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    how, stats = _masks(node, x), x["stats"][..., 0]
    dq, dk, dv, *others = attention_dgrad(x["dO"], x["q"], x["k"], x["v"], x["o"], stats, **how)
    named = dict(zip((name for name in ("bias", "alibi_slopes", "sinks") if name in how), others, strict=True))
    return {"dQ": dq, "dK": dk, "dV": dv, "dBias": named.get("bias"), "dSink_token": named.get("sinks")}  # type: ignore[dict-item]


def rope(node: Node, x: Mapping[str, Array], sign: int = 1) -> dict[str, Array]:
    """Pairs (a, b) as complex numbers a + i b, turned by the angle."""
    y, width = x["input"].copy(), node.dims["freqs"][3]
    angle = sign * x["freqs"][:, 0, 0, : width // 2]
    low, high = y[..., y.shape[3] - width : y.shape[3] - width // 2], y[..., y.shape[3] - width // 2 :]
    turned = (low + 1j * high) * np.exp(1j * angle)
    low[...], high[...] = turned.real, turned.imag
    return {"Y": y * node["output_scale"]}


def rope_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return rope(node, x, -1)


# Block scales


LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}


def quantize(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    """Each block by itself: the least scale that its dtype has, so that nothing exceeds the largest number."""
    given, block = x["input"], node["block_size"]
    axis = given.ndim - 1 if node["axis"] is None else node["axis"]
    largest, kind = LARGEST[node.dtype("Y")], node.dtype("scale")
    parts = np.split(given, given.shape[axis] // block, axis=axis)
    scales = [scale_at_least(np.abs(part).max(axis=axis, keepdims=True) / largest, kind) for part in parts]
    divided = [np.where(s == 0, 0.0, part / np.where(s == 0, 1.0, s)) for part, s in zip(parts, scales, strict=True)]
    y = np.clip(np.concatenate(divided, axis=axis), -largest, largest)
    return {"Y": y, "scale": np.concatenate(scales, axis=axis)}


def scale_at_least(v: Array, kind: str) -> Array:
    """The least number of a dtype of scales that is at least v, or its largest; float32: the nearest."""
    if kind == "float32":
        return v.astype(np.float32).astype(np.float64)
    v = v.astype(np.float32).astype(np.float64)  # the ratio is a float32
    numbers = 2.0 ** np.arange(-127, 128) if kind == "float8_e8m0fnu" else _numbers_of_e4m3()
    return numbers[np.minimum(np.searchsorted(numbers, v), len(numbers) - 1)]


def _numbers_of_e4m3() -> Array:
    return np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def dequantize(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    given, scale, blocks = x["input"], x["descale"], node["block_size"]
    if len(blocks) == 1:
        (axis,) = [a for a, (n, m) in enumerate(zip(given.shape, scale.shape, strict=True)) if n != m] or [
            given.ndim - 1
        ]
        blocks = [blocks[0] if a == axis else 1 for a in range(given.ndim)]
    at = np.ix_(*(np.arange(n) // b for n, b in zip(given.shape, blocks, strict=True)))
    return {"Y": given / scale[at] if node["is_negative_scale"] else given * scale[at]}


OPS: dict[str, Callable[[Node, Mapping[str, Array]], dict[str, Array]]] = {
    "pointwise": pointwise,
    "conv_fprop": conv_fprop,
    "conv_dgrad": conv_data,
    "conv_wgrad": conv_filter,
    "matmul": matmul,
    "moe_grouped_matmul": grouped,
    "moe_grouped_matmul_bwd": grouped_bwd,
    "reduction": reduction,
    "reshape": reshape,
    "transpose": transpose,
    "slice": sliced,
    "concatenate": concatenate,
    "layernorm": layernorm,
    "layernorm_backward": layernorm_backward,
    "rmsnorm": rmsnorm,
    "rmsnorm_backward": rmsnorm_backward,
    "adalayernorm": adalayernorm,
    "adalayernorm_backward": adalayernorm_backward,
    "instancenorm": instancenorm,
    "instancenorm_backward": instancenorm_backward,
    "batchnorm": batchnorm,
    "batchnorm_inference": batchnorm_inference,
    "batchnorm_backward": batchnorm_backward,
    "genstats": statistics,
    "bn_finalize": finalize,
    "bn_finalize_inference": finalize_inference,
    "dbn_weight": weights,
    "resample": resample,
    "resample_backward": resample_backward,
    "rng": rng,
    "sdpa": sdpa,
    "sdpa_backward": sdpa_backward,
    "rope": rope,
    "rope_backward": rope_backward,
    "block_scale_quantize": quantize,
    "block_scale_dequantize": dequantize,
}
