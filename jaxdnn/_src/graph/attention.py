"""Attention, forward and backward, and rotary embedding; dimensions are (B, H, S, D)."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.attention.api import attention, attention_dgrad
from jaxdnn._src.dropout.api import DropoutState
from jaxdnn._src.graph import score, score_options
from jaxdnn._src.graph.nodes import Inference, Kind, Run, register
from jaxdnn._src.graph.products import result_dtype
from jaxdnn._src.graph.random import words
from jaxdnn._src.graph.tensors import WIDE

FLOATS = ("float32", "float64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
ALIGNMENTS = ("TOP_LEFT", "BOTTOM_RIGHT")


def _infer_masks(node: Inference) -> None:
    """What is said of masks, brought to one form: alignment, left and right bounds."""
    for name in ("use_alibi_mask", "use_padding_mask", "use_causal_mask", "use_causal_mask_bottom_right"):
        node.flag(name)
    causal, corner = node.attribute("use_causal_mask"), node.attribute("use_causal_mask_bottom_right")
    node.expect(not (causal and corner), "use_causal_mask", "False with use_causal_mask_bottom_right", causal)
    alignment = node.choice("diagonal_alignment", ALIGNMENTS)
    left, right = node.attribute("diagonal_band_left_bound"), node.attribute("diagonal_band_right_bound")
    length = node.attribute("sliding_window_length")
    node.expect(left is None or length is None, "sliding_window_length", "None with diagonal_band_left_bound", length)
    left = length if left is None else left
    if causal or corner:
        node.expect(right in (None, 0), "diagonal_band_right_bound", "None or 0 with a causal mask", right)
        alignment, right = "BOTTOM_RIGHT" if corner else alignment, 0
    node.integer("sliding_window_length", 1, optional=True)
    node.integer("diagonal_band_left_bound", 1, optional=True)
    node.integer("diagonal_band_right_bound", 0, optional=True)
    free = alignment == "TOP_LEFT" or right == 0 or (left, right) == (None, None)
    node.expect(free, "diagonal_band_right_bound", "0 with alignment BOTTOM_RIGHT and a bound", right)
    node.expect(
        not node.attribute("use_alibi_mask") or right == 0, "use_alibi_mask", "False but with a right bound of 0", True
    )
    node.derive(alignment=alignment, left=left, right=right)


def _infer_operands(node: Inference, *narrow: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Checks the operands, of floats of 16 bits or more or of the narrow dtypes that are named."""
    q, k, v = (node.rank(port, 4) for port in ("q", "k", "v"))
    node.expect(k[0] == q[0] and k[3] == q[3], "k.dim", f"(B, H, S, D) with B = {q[0]} and D = {q[3]}", k)
    node.expect(q[1] % k[1] == 0, "k.dim", f"heads that divide q's {q[1]}", k)
    node.shaped("v", (*k[:3], v[3]), "k's batch, heads and length")
    node.typed("q", *(narrow or WIDE))
    for port in ("k", "v"):
        node.typed(port, *(narrow or (node.dtype("q"),)))
    compute = node.node.compute
    fits = (node.dtype("q") == "float64") == (compute == "float64")
    node.expect(fits, "compute_data_type", "float64 where q is, else float32", compute)
    padded = node.attribute("use_padding_mask")
    for port in ("seq_len_q", "seq_len_kv"):
        node.expect(node.has(port) == padded, port, "given with use_padding_mask, and else not", node.has(port))
        if node.has(port):
            node.shaped(port, (q[0], 1, 1, 1), "one length for each of the batch")
            node.typed(port, "int32")
    if node.has("bias"):
        dim, full = node.dim("bias"), (*q[:3], k[2])
        fits = len(dim) == 4 and all(n in (1, m) for n, m in zip(dim, full, strict=True))
        node.expect(fits, "bias.dim", f"sizes that are 1 or those of {full}", dim)
    if node.has("sink_token"):
        node.shaped("sink_token", (1, q[1], 1, 1), "one for each head")
    rate = node.number("dropout_probability", 0.0, 1.0)
    node.expect(rate < 1, "dropout_probability", "a number from 0 to below 1", rate)
    seeded, dropped = node.has("seed"), node.attribute("dropout_probability") > 0
    node.expect(seeded == dropped, "seed", "given with a dropout_probability above 0, and else not", seeded)
    node.expect(seeded or not node.has("offset"), "offset", "left out without a seed", node.has("offset"))
    for port in ("seed", "offset"):
        if node.has(port):
            node.one(port)
            node.typed(port, "int32", "int64")
    if node.has("attn_scale"):
        node.one("attn_scale")
        value = node.node.inputs["attn_scale"].value
        node.expect(value is None or math.isfinite(value), "attn_scale", "a finite number", value)
    score.infer(node, (*q[:3], k[2]), node.graph.check_node)
    return q, v


def _infer_sdpa(node: Inference) -> None:
    _infer_masks(node)
    q, v = _infer_operands(node)
    node.output("O", (*q[:3], v[3]), "q")
    node.output("Stats", (*q[:3], 1), None, "float64" if node.node.compute == "float64" else "float32")


def slopes(heads: int) -> np.ndarray:
    """ALiBi's slopes: of the largest power of two within a geometric series, of the others the odd ones of the next."""
    near = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (i + 1) / near) for i in range(near)]
    return np.array(first + [2.0 ** (-4.0 * (2 * j + 1) / near) for j in range(heads - near)])


def _options(node: Run) -> dict[str, Any]:
    left, right, alignment = (node.derived(name) for name in ("left", "right", "alignment"))
    scale = float(node.static("attn_scale")) if node.has("attn_scale") else 1.0
    options: dict[str, Any] = {"layout": "BNTH", "scale": scale}
    if right == 0:
        options["causal"] = "bottom_right" if alignment == "BOTTOM_RIGHT" else "top_left"
    if left is not None or right not in (None, 0):
        options["window"] = (None if left is None else left - 1, right)
    if node.has("bias"):
        narrow = node.compute == "float32" and "dBias" not in node.node.outputs
        bias = node.x("bias")  # kernels read what lies in memory: a conversion would write it once more
        options["bias"] = bias if narrow and bias.dtype.name in WIDE[1:] else bias.astype(node.compute)
    if node.has("seq_len_q"):
        options["query_lengths"] = node.x("seq_len_q").reshape(-1)
        options["key_lengths"] = node.x("seq_len_kv").reshape(-1)
    if node.attribute("use_alibi_mask"):
        options["alibi_slopes"] = jnp.asarray(slopes((node.tensor("q").dim or (0, 0))[1]), node.compute)
    if node.has("sink_token"):
        options["sinks"] = node.wide("sink_token").reshape(-1)
    if node.has("seed"):
        options["dropout"], options["dropout_key"] = float(node.attribute("dropout_probability")), words(node.x("seed"))
    if node.has("offset"):
        options["dropout_key"] = DropoutState(options["dropout_key"], words(node.x("offset") // 4))
    if node.node.attributes.get("use_deterministic_algorithm"):
        options["determinism"] = "run_to_run"
    if not node.node.body:
        return options
    found = score_options.options_of(node.node)
    if isinstance(found, str):
        options["score_fn"], options["score_arrays"] = score.function_of(node)
        return options
    return score_options.given(node, found, options)


def _sdpa(node: Run) -> dict[str, Array]:
    q, k, v = (node.stored(port) for port in ("q", "k", "v"))
    o, stats = attention(q, k, v, return_logsumexp=True, out_dtype=_served(node, "O"), **_options(node))
    return {"O": o, "Stats": stats[..., None]} if node.asked("Stats") else {"O": o}


def _infer_fp8(node: Inference) -> None:
    _infer_masks(node)
    q, v = _infer_operands(node, *FLOAT8)
    node.expect(node.attribute("dropout_probability") == 0, "dropout", "None for floats of 8 bits", "a probability")
    for port in FACTORS:
        node.one(port)
        node.typed(port, "float32")
    node.output("O", (*q[:3], v[3]), "q")
    node.output("Stats", (*q[:3], 1), None, "float32")
    for port in ("Amax_S", "Amax_O"):
        node.output(port, (1, 1, 1, 1), None, "float32")
    largest = node.node.outputs["Amax_S"]
    node.derive(largest=not largest.is_virtual or bool(node.graph.readers(largest)))


def _fp8(node: Run) -> dict[str, Array]:
    """Attention of what 8 bits hold, as bfloat16 holds it; scores are multiplied by the first two factors."""
    q, k, v = (node.x(port).astype(jnp.bfloat16) for port in ("q", "k", "v"))
    factors = {port: node.wide(port).reshape(()) for port in FACTORS}
    scaled = [node.tensor(port) for port in FACTORS[:2]]
    options = _options(node)
    if all(tensor.value is not None for tensor in scaled):
        for tensor in scaled:
            options["scale"] *= float(np.float32(tensor.value))
    else:
        inner, arrays = options.get("score_fn"), options.get("score_arrays", ())
        times = lambda s, places, by, given: inner(s * by, *places, *given) if inner else s * by
        options["score_fn"] = lambda s, b, h, i, j, by, *given: times(s, (b, h, i, j), by, given)
        options["score_arrays"] = (factors["descale_q"] * factors["descale_k"], *arrays)
    o, stats, *most = attention(
        q, k, v, return_logsumexp=True, return_maximum=node.derived("largest"), out_dtype="float32", **options
    )
    o = o * (factors["descale_v"] * (factors["scale_s"] * factors["descale_s"]))
    one = (1, 1, 1, 1)
    found = {"O": o * factors["scale_o"], "Stats": stats[..., None], "Amax_O": jnp.max(jnp.abs(o)).reshape(one)}
    for x in most:
        weight = jnp.where(x == -jnp.inf, 0, jnp.exp(x - jnp.where(x == -jnp.inf, 0, stats)))
        found["Amax_S"] = jnp.max(weight).reshape(one)
    return {port: array for port, array in found.items() if node.asked(port)}


def _served(node: Run, port: str) -> Any:
    """The dtype asked of `attention`: float32 or its operands'; another is converted to from float32."""
    wanted, own = np.dtype(result_dtype(node, port)).name, node.tensor("q").data_type
    return own if wanted == own else "float32" if node.compute == "float32" else "float64"


MASKS = {
    "use_alibi_mask": False,
    "use_padding_mask": False,
    "use_causal_mask": False,
    "use_causal_mask_bottom_right": False,
    "sliding_window_length": None,
    "diagonal_alignment": "TOP_LEFT",
    "diagonal_band_left_bound": None,
    "diagonal_band_right_bound": None,
    "dropout_probability": 0.0,
}
_OPTIONAL = ("attn_scale?", "bias?", "seq_len_q?", "seq_len_kv?", "sink_token?", "seed?", "offset?")
register(
    Kind(
        "sdpa",
        ("q", "k", "v", *_OPTIONAL),
        ("O", "Stats?"),
        MASKS,
        _infer_sdpa,
        _sdpa,
        ("attn_scale",),
        FLOATS,
        ("attention",),
        scored=True,
    )
)
register(
    Kind(
        "sdpa_fp8",
        ("q", "k", "v", *FACTORS, *_OPTIONAL),
        ("O", "Stats?", "Amax_S", "Amax_O"),
        MASKS,
        _infer_fp8,
        _fp8,
        ("attn_scale",),
        ("float32",),
        ("attention",),
        scored=True,
        notes=(
            "q, k and v are multiplied in bfloat16, which holds their numbers, and weights are not rounded to 8 bits: "
            "no kernel of this library attends in 8 bits",
        ),
    )
)


def _infer_backward(node: Inference) -> None:
    _infer_masks(node)
    node.flag("use_deterministic_algorithm")
    q, v = _infer_operands(node)
    for port in ("o", "dO"):
        node.shaped(port, (*q[:3], v[3]), "the result's")
    node.shaped("stats", (*q[:3], 1), "one for each query")
    for port in ("q", "k", "v"):
        node.output(f"d{port.upper()}", node.dim(port), port)
    if node.asked("dBias"):
        node.expect(node.has("bias"), "bias", "given, for its gradient is asked for", None)
        node.output("dBias", node.dim("bias"), "bias")
    if node.asked("dSink_token"):
        node.expect(node.has("sink_token"), "sink_token", "given, for its gradient is asked for", None)
        node.output("dSink_token", node.dim("sink_token"), "sink_token")


def _backward(node: Run) -> dict[str, Array]:
    q, k, v, o, do = (node.stored(port) for port in ("q", "k", "v", "o", "dO"))
    options = _options(node)
    stats = node.wide("stats")[..., 0]
    dq, dk, dv, *others = attention_dgrad(do.astype(q.dtype), q, k, v, o.astype(q.dtype), stats, **options)
    found = {"dQ": dq, "dK": dk, "dV": dv}
    given = [name for name in ("bias", "alibi_slopes", "sinks") if name in options]
    named = dict(zip(given, others, strict=False))  # behind them those of what a function of the scores reads
    if node.asked("dBias"):
        found["dBias"] = named["bias"]
    if node.asked("dSink_token"):
        found["dSink_token"] = named["sinks"].reshape(node.tensor("sink_token").dim or ())
    return found


register(
    Kind(
        "sdpa_backward",
        ("q", "k", "v", "o", "dO", "stats", *_OPTIONAL),
        ("dQ", "dK", "dV", "dBias?", "dSink_token?"),
        {**MASKS, "use_deterministic_algorithm": False},
        _infer_backward,
        _backward,
        ("attn_scale",),
        FLOATS,
        ("attention_dgrad",),
        scored=True,
    )
)


def _infer_rope(node: Inference) -> None:
    x, freqs = node.rank("input", 4), node.rank("freqs", 4)
    node.floats("input", "freqs")
    fits = "float64" not in (node.dtype("input"), node.dtype("freqs")) or node.node.compute == "float64"
    node.expect(fits, "compute_data_type", "float64, for an input is", node.node.compute)
    width = freqs[3]
    node.expect(freqs[:3] == (x[2], 1, 1), "freqs.dim", f"(S, 1, 1, rope_dim) with S = {x[2]}", freqs)
    node.expect(width % 2 == 0 and width <= x[3], "freqs.dim", f"an even rope_dim of at most D = {x[3]}", freqs)
    node.number("output_scale")
    node.output("Y", x, "input")


def rotated(node: Run, sign: float) -> Array:
    """The last rope_dim features, whose first half is paired with the second, turned by angles; all scaled."""
    x, angles = node.wide("input"), node.wide("freqs")
    width = angles.shape[3]
    theta = angles[:, 0, 0, : width // 2][None, None]
    cos, sin = jnp.cos(theta), sign * jnp.sin(theta)
    plain, low, high = jnp.split(x, (x.shape[3] - width, x.shape[3] - width // 2), axis=3)
    cos, sin = (jnp.broadcast_to(v, low.shape) for v in (cos, sin))
    turned = jnp.concatenate([plain, low * cos - high * sin, high * cos + low * sin], axis=3)
    return turned * jnp.asarray(node.attribute("output_scale"), x.dtype)


for _op, _sign in (("rope", 1.0), ("rope_backward", -1.0)):
    register(
        Kind(
            _op,
            ("input", "freqs"),
            ("Y",),
            {"output_scale": 1.0},
            _infer_rope,
            lambda node, sign=_sign: {"Y": rotated(node, sign)},
            compute=FLOATS,
        )
    )
