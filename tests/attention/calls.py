"""Attention by a dense formula in float64, any combination of its options, and calls as an engine sees them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.attention.arguments import Options
from jaxdnn._src.attention.arguments import read as read_arguments
from jaxdnn._src.core import engines

FLOATS = ("bias", "alibi_slopes", "sinks")


def dense(q: Any, k: Any, v: Any, extras: dict[str, Any], **o: Any) -> tuple[Any, Any]:
    """y and its logsumexp by one softmax over all scores, with heads first."""
    group, t, s = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    x = jnp.einsum("bntd,bnsd->bnts", q, k) * o.get("scale", q.shape[-1] ** -0.5)
    if (cap := o.get("softcap")) is not None:
        x = cap * jnp.tanh(x / cap)
    i, j = jnp.arange(t).reshape(1, 1, t, 1), jnp.arange(s).reshape(1, 1, 1, s)
    if "score_fn" in o:
        of_b, of_n = jnp.arange(q.shape[0]).reshape(-1, 1, 1, 1), jnp.arange(q.shape[1]).reshape(1, -1, 1, 1)
        x = o["score_fn"](x, of_b, of_n, i, j, *o["score_arrays"])
    if "bias" in extras:
        x = x + extras["bias"]
    if "alibi_slopes" in extras:
        x = x + extras["alibi_slopes"].reshape(1, -1, 1, 1) * (j - i).astype(x.dtype)
    of = lambda name, size: jnp.asarray(o.get(name, np.full(len(q), size))).reshape(-1, 1, 1, 1)
    rows, keys = of("query_lengths", t), of("key_lengths", s)
    seen = (i < rows) & (j < keys)
    gap = j - i - (keys - rows if o.get("causal") == "bottom_right" else 0)
    left, right = o.get("window", (None, None))
    seen = seen & (gap <= (0 if o.get("causal") else t + s if right is None else right))
    seen = seen & (gap >= -(t + s if left is None else left))
    if "mask" in o:
        seen = seen & o["mask"]
    if "block_mask" in o:
        (u, w), large = o["block_mask_tile"], o["block_mask"]
        seen = seen & jnp.repeat(jnp.repeat(large, u, 2), w, 3)[:, :, :t, :s]
    if "query_segments" in o:
        seen = seen & (o["query_segments"][:, None, :, None] == o["key_segments"][:, None, None, :])
    x = jnp.where(seen, x, -jnp.inf)
    if "sinks" in extras:
        sink = jnp.broadcast_to(extras["sinks"].reshape(1, -1, 1, 1), (*x.shape[:3], 1))
        x, v = jnp.concatenate([x, sink], -1), jnp.concatenate([v, jnp.zeros_like(v[:, :, :1])], 2)
    top = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(x - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(e, -1, keepdims=True)
    none = total == 0
    p = e / jnp.where(none, 1.0, total)
    if "dropout" in o:
        kept = reference.dropout_mask(o["dropout_key"], (*p.shape[:3], s), rate=o["dropout"])
        p = p * np.pad(kept / (1 - o["dropout"]), [(0, 0)] * 3 + [(0, p.shape[3] - s)])
    y = jnp.einsum("bnts,bnsd->bntd", p, v)
    lse = jnp.where(none, -jnp.inf, jnp.log(jnp.where(none, 1.0, total)) + top)
    return y, lse[..., 0]


def arrays(
    rng: np.random.Generator, b: int = 2, t: int = 9, s: int = 9, n: int = 4, h: int = 2, d: int = 5, e: int = 6
) -> Any:
    return tuple(rng.normal(size=(b, *size)) for size in ((n, t, d), (h, s, d), (h, s, e)))


def drawn(seed: int) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray], dict[str, Any]]:
    """Operands and options of any combination."""
    rng = np.random.default_rng(seed)
    b, t, s = int(rng.integers(1, 4)), *(int(n) for n in rng.integers(1, 14, 2))
    h, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    n = h * group
    operands = arrays(rng, b, t, s, n, h, *(int(v) for v in rng.integers(1, 7, 2)))
    own = lambda: tuple(int(size if rng.random() < 0.6 else 1) for size in (b, n, t, s))
    extras = {"bias": rng.normal(size=own()), "alibi_slopes": rng.normal(size=n) / 4, "sinks": rng.normal(size=n)}
    extras = {name: value for name, value in extras.items() if rng.random() < 0.35}
    segments = lambda size: np.sort(rng.integers(0, 3, (b, size)), 1)
    options = {
        "scale": float(rng.uniform(0.1, 1)),
        "causal": rng.choice([True, "top_left", "bottom_right"]),
        "window": tuple(None if rng.random() < 0.3 else int(rng.integers(0, 6)) for _ in range(2)),
        "softcap": float(rng.uniform(0.5, 3)),
        "mask": rng.random(own()) < 0.7,
        "query_lengths": rng.integers(0, t + 1, b),
        "key_lengths": rng.integers(0, s + 1, b),
    }
    options = {name: value for name, value in options.items() if rng.random() < 0.4}
    if "causal" in options:
        options["causal"] = options["causal"] == "True" or str(options["causal"])
    if rng.random() < 0.3:
        options |= {"dropout": float(rng.choice([0.1, 0.5, 0.9])), "dropout_key": int(rng.integers(2**40))}
    if rng.random() < 0.25:
        tile = tuple(int(n) for n in rng.integers(1, 6, 2))
        counts = (*own()[:2], -(-t // tile[0]), -(-s // tile[1]))
        options |= {"block_mask": rng.random(counts) < 0.7, "block_mask_tile": tile}
    if rng.random() < 0.25:
        extras |= {"score_table": rng.normal(size=(n, 2 * (t + s))), "score_sequence": rng.normal(size=b)}
        options["score_fn"] = changed
    if rng.random() < 0.3:
        options |= {"query_segments": segments(t), "key_segments": segments(s)}
    return operands, extras, options


def changed(x: Any, sequence: Any, head: Any, query: Any, key: Any, table: Any, of_sequence: Any) -> Any:
    """A function of scores with a table of distances, and with a curve that depends on the sequence."""
    return x + table[head, key - query + table.shape[1] // 2] + 0.1 * of_sequence[sequence] * x * x


def named(extras: Any) -> dict[str, Any]:
    """The operands beside q, k and v as the op takes them."""
    of_score = tuple(value for name, value in extras.items() if name.startswith("score"))
    others = {name: value for name, value in extras.items() if not name.startswith("score")}
    return others | ({"score_arrays": of_score} if of_score else {})


def ours(extras: Any, options: dict[str, Any], **more: Any) -> Any:
    names = tuple(extras)
    return lambda q, k, v, *e: dnn.attention(
        q, k, v, **named(dict(zip(names, e, strict=True))), **options, layout="BNTH", return_logsumexp=True, **more
    )


def plain(extras: Any, options: dict[str, Any]) -> Any:
    names = tuple(extras)

    def run(q: Any, k: Any, v: Any, *e: Any) -> Any:
        given = named(dict(zip(names, e, strict=True)))
        arrays = given.pop("score_arrays", ())
        return dense(q, k, v, given, **options, score_arrays=arrays)

    return run


def close(found: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def read(q: Any, k: Any, v: Any, **o: Any) -> tuple[engines.Call, Any]:
    """A call as the engine sees it, and its operands."""
    options = Options(**o, engine="hopper", determinism="batch_invariant")
    arrays, spec = read_arguments((("q", q), ("k", k), ("v", v)), options)
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return engines.Call("attention", spec, avals, "cuda"), arrays
