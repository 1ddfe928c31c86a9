"""Nodes of attention, and of its rotary positions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdnn_reference.attention import attention, attention_dgrad
from jaxdnn_reference.graph.pointwise import pointwise
from jaxdnn_reference.graph.tensors import Array, Node, stored

FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


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
    if "offset" in x:
        how["dropout_key"] = how["dropout_key"], int(x["offset"].item()) // 4 * 4 % 2**64
    if node.score_mod:
        how["score_fn"] = _function(node.score_mod, x)
    return how


def _function(body: Mapping[str, Any], x: Mapping[str, Array]) -> Any:
    """The function of the scores that pointwise nodes are; places are indices of the tensor of scores."""
    known = {t["uid"]: t for t in body["tensors"]}
    others = {uid: x[port] for port, uid in body["reads"].items()}

    def function(scores: Array, *places: Array) -> Array:
        del places
        held, waiting = {body["score"]: scores, **others}, list(body["nodes"])
        while waiting:
            node = next(n for n in waiting if all(uid in held for uid in n["inputs"].values()))
            waiting.remove(node)
            (uid,) = node["outputs"].values()
            given = {port: held[inner] for port, inner in node["inputs"].items()}
            value = pointwise(Node(node, {"OUT_0": scores.shape}, known), given)["OUT_0"]
            held[uid] = stored(value, known[uid])
        return held[body["result"]]

    return function


def _slopes(heads: int) -> Array:
    """2^(-8 i / n) of the n heads, a power of two; the heads beyond have the odd terms of the series of 2 n."""
    n = 1 << (heads.bit_length() - 1)
    series = lambda count: [2.0 ** (-8.0 * i / count) for i in range(1, count + 1)]
    return np.array([*series(n), *series(2 * n)[::2]][:heads])


def sdpa(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    o, stats = attention(x["q"], x["k"], x["v"], return_logsumexp=True, **_masks(node, x))
    return {"O": o, "Stats": stats}


def sdpa_fp8(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    """Scores are scaled by descale_q descale_k before anything else is done to them; weights are not rounded."""
    how, factor = _masks(node, x), {name: x[name].item() for name in FACTORS}
    how["scale"] *= factor["descale_q"] * factor["descale_k"]
    y, stats, p, _ = attention(x["q"], x["k"], x["v"], details=True, **how)
    o = y * factor["descale_v"] * factor["descale_s"] * factor["scale_s"]
    return {"O": o * factor["scale_o"], "Stats": stats, "Amax_S": p.max(), "Amax_O": np.abs(o).max()}


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


OPS = {
    "sdpa": sdpa,
    "sdpa_fp8": sdpa_fp8,
    "sdpa_backward": sdpa_backward,
    "rope": rope,
    "rope_backward": rope_backward,
}
