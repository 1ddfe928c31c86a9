"""Attention with each option and with several: matrix, data and bounds.

Letters: u the unit roundoff, x the scores, P = exp(x - L), e_x what a score is off by, η that of an exponential. What
rounding of weights adds is in `bounds`.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.attention import bounds
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.tolerance import FORMATS, Accumulation
from jaxdnn_reference.attention import kept, scores, tiles, visible

OPS = ("attention", "attention_dgrad", "merge_attention")
FLOATS = ("bias", "alibi_slopes", "sinks")
ARRAYS = (*FLOATS, "mask", "block_mask", "query_lengths", "key_lengths", "query_segments", "key_segments")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bottom-right": {"causal": "bottom_right", "given": ("key_lengths", "query_lengths")},
    "window": {"window": (5, 2), "layout": "BNTH"},
    "capped": {"softcap": 1.5, "given": ("bias",), "scale": 0.5},
    "sinks": {"given": ("sinks", "alibi_slopes"), "causal": True},
    "dropped": {"dropout": 0.3, "dropout_key": 2**33 + 5, "causal": True, "given": ("bias",)},
    "tiles": {"block_mask_tile": (4, 3), "split": 4, "given": ("block_mask", "sinks"), "causal": True},
    "several": {
        "window": (7, None),
        "causal": "bottom_right",
        "softcap": 2.0,
        "dropout": 0.2,
        "dropout_key": 7,
        "split": 5,
        "given": ("bias", "alibi_slopes", "sinks", "mask", "key_lengths", "query_segments", "key_segments"),
    },
    "masked": {"given": ("mask", "query_segments", "key_segments"), "layout": "BNTH"},
    "by-key": {"given": ("bias", "mask"), "causal": True},
    "parts": {"split": 1, "given": ("bias", "sinks"), "causal": True, "layout": "BNTH"},
    "wide": {"out_dtype": True, "given": ("mask",), "causal": True},
}
BY_KEY = "by-key"  # bias and mask are the same for all queries
HOPPER = {"queries": 150, "keys": 200, "features": 64, "values": 32}  # sizes that its kernels serve, with tails
DTYPES = {"quick": ("f32", "bf16"), "standard": ("f16",), "full": ("f64",)}
# In units of u: of an exponential, twice what was measured of softmax's; of a logarithm relative to itself; of tanh.
EXP, LOG, TANH = 10.0, 6.0, 16.0


def in_tiles(engine: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with splits that an engine serves. Kernels take those of whole tiles: 1 to 3 of them for 1 to 5 keys."""
    more = {"split": 128 * max(1, options["split"] - 2)} if engine == "hopper" and "split" in options else {}
    return options | more


@dataclasses.dataclass(frozen=True)
class AttentionCase(Case):
    """Sequences of T queries and S keys, some heads of which share keys."""

    batch: int = 8
    queries: int = 11
    keys: int = 13
    heads: int = 4
    shared: int = 2
    features: int = 8
    values: int = 6

    primitive = {op: op for op in OPS[:2]}  # noqa: RUF012

    @property
    def options(self) -> dict[str, Any]:
        beside = ("given", "out_dtype", *(("split",) if self.op != "attention" else ()))
        found = {n: v for n, v in VARIANTS[self.variant.rpartition("/")[2]].items() if n not in beside}
        return in_tiles(self.engine, found)

    @property
    def given(self) -> tuple[str, ...]:
        """The operands by name, in the order of `ARRAYS`."""
        names = VARIANTS[self.variant.rpartition("/")[2]].get("given", ())
        return tuple(name for name in ARRAYS if name in names)

    @property
    def count(self) -> int:
        """The number of operands by position."""
        return {"attention": 3, "attention_dgrad": 6}.get(self.op, 2)

    def call(self, **choices: Any) -> Callable[..., Any]:
        if self.op == "merge_attention":
            return lambda *a: dnn.merge_attention(*a, **choices)
        op: Any = getattr(dnn, self.op)
        more: dict[str, Any] = {"return_logsumexp": True} if self.op == "attention" else {}
        more |= {"out_dtype": self._wide} if self._is_wide else {}
        return lambda *a: op(*a[: self.count], **self._named(a), **self.options, **more, **choices)

    def _named(self, operands: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.given, operands[self.count :], strict=True))

    def _laid_out(self, x: np.ndarray) -> np.ndarray:
        return x if self.options.get("layout") == "BNTH" else np.swapaxes(x, 1, 2)

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        b, n, t, s = self.batch, self.heads, self.queries, self.keys
        normal = lambda *shape: rng.normal(size=shape)
        if self.op == "merge_attention":
            lse = normal(3, b, t, n).astype(self._wide)
            lse[0, :, :2] = -np.inf
            return normal(3, b, t, n, self.values).astype(self.in_dtype), lse
        qkv = normal(b, n, t, self.features), *(normal(b, self.shared, s, d) for d in (self.features, self.values))
        if kind == "wide":
            qkv = qkv[0] * 8, *qkv[1:]
        arrays = [self._laid_out(x).astype(self.in_dtype) for x in qkv]
        rows = 1 if self.variant.endswith(BY_KEY) else t
        every = {
            "bias": normal(1, n, rows, s),
            "alibi_slopes": 2.0 ** -rng.integers(1, 8, n),
            "sinks": normal(n),
            "mask": rng.random((b, 1, rows, s)) < 0.7,
            "block_mask": rng.random((b, 1, -(-t // 4), -(-s // 3))) < 0.7,
            "query_lengths": rng.integers(0, t + 1, b).astype(np.int32),
            "key_lengths": rng.integers(0, s + 1, b).astype(np.int32),
            "query_segments": np.sort(rng.integers(0, 3, (b, t)), 1).astype(np.int32),
            "key_segments": np.sort(rng.integers(0, 3, (b, s)), 1).astype(np.int32),
        }
        named = {n: every[n].astype(self.in_dtype) if n in FLOATS else every[n] for n in self.given}
        if self.op == "attention_dgrad":
            y, lse = reference.attention(*arrays, **named, **self.options, return_logsumexp=True)
            arrays = [normal(*y.shape).astype(self.in_dtype), *arrays, y, lse]
        return *arrays, *named.values()

    @property
    def _is_wide(self) -> bool:
        """Whether y is asked for in the accumulator's dtype."""
        return bool(VARIANTS.get(self.variant.rpartition("/")[2], {}).get("out_dtype"))

    @property
    def _wide(self) -> Any:
        return np.float64 if self.x64 else np.float32

    def kinds(self) -> tuple[str, ...]:
        return ("normal",) if self.op == "merge_attention" else ("normal", "wide")

    # -- what is expected --

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        # The definition computes in float64 too: of that, twice the error.
        found = getattr(self, f"_{self.op}")(operands, accumulation)
        factor = 2.0 if self.x64 else 1.0
        return tuple(dataclasses.replace(e, error=factor * e.error) for e in found)

    def _merge_attention(self, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        y, lse = (x.astype(np.float64) for x in operands)
        u = FORMATS[accumulation.format].roundoff
        merged, total = reference.merge_attention(y, lse)
        with np.errstate(invalid="ignore"):
            share = np.where(lse == -np.inf, 0.0, np.exp(lse - total))
            far = np.where(share > 0, np.abs(lse - total), 0.0)
        eta = np.expm1(3 * u * (far + 1)) + EXP * u
        sigma = (share * eta).sum(0) + 3 * u
        error = (share[..., None] * np.abs(y) * (eta + sigma + 8 * u)[..., None]).sum(0) + 8 * u * np.abs(merged)
        of_lse = LOG * u + 2 * sigma + 3 * u * np.abs(total)
        return (
            Expected(merged, error, self.in_dtype, "y", generic=False),
            Expected(total, of_lse, self._wide, "logsumexp", generic=False),
        )

    def _scores(self, q: Any, k: Any, named: dict[str, Any], accumulation: Accumulation) -> Any:
        """x, what it is off by, its slope, what that is off by, and what is seen; with heads first."""
        u = FORMATS[accumulation.format].roundoff
        q, k = (self._laid_out(a).astype(np.float64) for a in (q, k))
        o = self.options
        scale = o.get("scale", self.features**-0.5)
        raw = dict(scale=scale, cap=None, bias=None, slopes=None)
        product, _ = scores(q, k, **raw)
        size, _ = scores(np.abs(q), np.abs(k), **raw)
        of_product = accumulation.error(
            product / scale, size / scale, np.asarray(self.features)
        ) * scale + 2 * u * np.abs(product)
        cap, bias, slopes = o.get("softcap"), named.get("bias"), named.get("alibi_slopes")
        x, slope = scores(q, k, scale, cap, bias, slopes)
        e, of_slope = of_product, np.zeros_like(x)
        if cap is not None:
            e = of_product + (TANH + 4) * u * cap
            of_slope = 2 * of_product / cap + (2 * TANH + 4) * u
        terms = np.abs(x) + np.abs(product)
        terms = terms + (0 if bias is None else np.abs(bias.astype(np.float64)))
        if slopes is not None:
            terms = terms + slopes.astype(np.float64)[:, None, None] * (self.keys + self.queries)
        others: list[Any] = [named.get(name) for name in ARRAYS[3:] if name != "block_mask"]
        large = tiles(named.get("block_mask"), o.get("block_mask_tile", 1), q, k)
        others = [len(q), self.queries, self.keys, o.get("causal", False), o.get("window"), *others, large]
        seen = visible(*others)
        return x, e + 4 * u * terms, slope, of_slope, np.broadcast_to(seen, x.shape)

    def _attention(self, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        (q, k, v), named = operands[:3], self._named(operands)
        rule = FORMATS[accumulation.format]
        u, tiny = rule.roundoff, rule.smallest_normal
        x, e_x, _, _, seen = self._scores(q, k, named, accumulation)
        y, lse, p, _ = reference.attention(q, k, v, **named, **self.options, details=True)
        y, lse = (self._laid_out(a) for a in (y, lse))
        with np.errstate(all="ignore"):
            far = np.where(seen, np.abs(np.where(seen, x, 0) - np.where(np.isfinite(lse), lse, 0)[..., None]), 0.0)
        span = far + far.max(-1, keepdims=True, initial=0)  # x - max x, whose size is at most that
        eta = np.where(seen, np.expm1(e_x + 3 * u * span) + EXP * u, 0.0)
        if (split := self.options.get("split")) is not None:  # each part is scaled once for each that follows
            eta = eta + np.where(seen, -(-self.keys // split) * (EXP + 6) * u + 3 * u * span, 0.0)
        others = 0.0
        if "sinks" in named:
            share = np.exp(named["sinks"].astype(np.float64)[:, None] - lse)
            others = share * (EXP * u + 3 * u * np.abs(lse - named["sinks"].astype(np.float64)[:, None]))
        sigma = (p * eta).sum(-1) + others + (self.keys + 1) * (u + tiny)
        values = np.repeat(self._laid_out(v).astype(np.float64), self.heads // self.shared, 1)
        times = kept(p.shape, self.options.get("dropout", 0.0), self.options.get("dropout_key"))
        most = times.max(initial=1.0)
        error = bounds.result_error(y, p * times, eta, sigma, values, accumulation, self.in_dtype, most)
        of_lse = -np.log1p(-np.minimum(sigma, 0.5)) + LOG * u * (1 + np.log(self.keys + 2.0)) + 4 * u * np.abs(lse)
        of_lse = np.where(sigma < 0.5, of_lse, np.inf)
        of_lse = np.where(np.isfinite(lse), of_lse + 4 * u * far.max(-1, initial=0), 0.0)
        given = {
            "y": (y, error, self._wide if self._is_wide else self.in_dtype),
            "logsumexp": (lse, of_lse, self._wide),
        }
        return tuple(
            Expected(self._laid_out(a), self._laid_out(e), d, n, generic=False) for n, (a, e, d) in given.items()
        )

    def _attention_dgrad(self, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        (dy, q, k, v, y, lse), named = operands[:6], self._named(operands)
        rule, (weights, _) = FORMATS[accumulation.format], bounds.narrow(accumulation, self.in_dtype)
        u, tiny, scale = rule.roundoff, rule.smallest_normal, self.options.get("scale", self.features**-0.5)
        x, e_x, slope, of_slope, seen = self._scores(q, k, named, accumulation)
        *found, p, dp, of_y, ds = reference.attention_dgrad(dy, q, k, v, y, lse, **named, **self.options, details=True)
        dy, q, k, v, y, lse = (self._laid_out(a).astype(np.float64) for a in (dy, q, k, v, y, lse))
        group = self.heads // self.shared
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        far = np.where(seen, np.abs(x - np.where(np.isfinite(lse), lse, 0)[..., None]), 0.0)
        e_p = np.where(seen, p * (np.expm1(e_x + 3 * u * far) + EXP * u), 0.0) + tiny
        times = kept(p.shape, self.options.get("dropout", 0.0), self.options.get("dropout_key"))
        size = times * (np.abs(dy) @ np.swapaxes(np.abs(v), 2, 3))
        e_dp = times * accumulation.error(dp, size, np.asarray(self.values)) + (weights + 2 * u) * size
        e_d = ((self.values + 1) * u * np.abs(dy * y).sum(-1) + 2 * u * np.abs(of_y) + tiny)[..., None]
        gap = np.abs(dp - of_y[..., None])
        e_ds = np.where(seen, e_p * (gap + e_dp + e_d) + p * (e_dp + e_d) + 3 * u * p * (gap + e_dp + e_d), 0.0) + tiny
        dx, e_dx = scale * ds * slope, scale * (e_ds * (np.abs(slope) + of_slope) + np.abs(ds) * of_slope)
        e_dx = e_dx + 4 * u * np.abs(dx) + tiny
        transposed = lambda a: np.swapaxes(a, 2, 3)
        added = lambda a: a.reshape(len(a), self.shared, group, *a.shape[2:]).sum(2)
        product = ft.partial(bounds.product_error, accumulation=accumulation, dtype=self.in_dtype, scale=scale)

        rows = group * self.queries
        errors = [
            self._laid_out(product(dx, e_dx, k, self.keys)),
            self._laid_out(product(transposed(dx), transposed(e_dx), q, rows, own=added)),
            self._laid_out(product(transposed(p * times), transposed((e_p + 2 * u * p) * times), dy, rows, own=added)),
        ]
        total = self.batch * self.queries * self.keys
        e_ds = e_ds + bounds.rounding(np.abs(ds) + e_ds, accumulation, self.in_dtype, scale)  # dS is added as rounded
        if "bias" in named:
            shared = tuple(axis for axis, n in enumerate(named["bias"].shape) if n == 1)
            errors.append((e_ds + total * u * (np.abs(ds) + e_ds)).sum(shared, keepdims=True))
        if "alibi_slopes" in named:
            distance = np.abs(np.arange(self.keys)[None] - np.arange(self.queries)[:, None])
            errors.append(((e_ds + (total + 2) * u * (np.abs(ds) + e_ds)) * distance).sum((0, 2, 3)))
        if "sinks" in named:
            sink = named["sinks"].astype(np.float64)[:, None]
            share = np.exp(sink - lse)
            of_share = np.expm1(3 * u * np.abs(sink - lse)) + (EXP + total) * u
            errors.append((share * (of_share * np.abs(of_y) + (1 + of_share) * e_d[..., 0])).sum((0, 2)) + tiny)
        names = ("dq", "dk", "dv", *(f"d{name}" for name in self.given if name in FLOATS))
        return tuple(
            Expected(value, error, self.in_dtype, name, generic=False)
            for name, value, error in zip(names, found, errors, strict=True)
        )

    def describe(self) -> dict[str, Any]:
        sizes = {"queries": self.queries, "keys": self.keys, "heads": self.heads, "shared": self.shared}
        return {**sizes, **{name: str(value) for name, value in self.options.items()}, "given": ", ".join(self.given)}


def variants(op: str) -> tuple[str, ...]:
    if op == "merge_attention":
        return ("plain",)
    return tuple(name for name in VARIANTS if op == "attention" or name not in (BY_KEY, "parts", "wide"))


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[AttentionCase]:
    """Every variant in every dtype of the extent."""
    for dtype in up_to(extent, DTYPES):
        for variant in variants(op):
            yield AttentionCase(op, engine, dtype, variant, **(HOPPER if engine == "hopper" else {}))


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject]:
    """Two variants."""
    hopper = engine == "hopper"
    for dtype, variant in zip(("f16" if hopper else "f32", "bf16"), ("causal", "bottom-right"), strict=True):
        sizes = HOPPER if hopper else {}
        case = AttentionCase(op, engine, dtype, variant if op != "merge_attention" else "plain", **sizes)
        axes = (1, 1) if op == "merge_attention" else (0,) * (case.count + len(case.given))
        found = subject(case, seed, batch_axes=axes, out_axis=0)
        if found is not None:
            yield dataclasses.replace(found, variant=variant)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> AttentionCase:
    """Every variant on sequences of any lengths."""
    if engine == "hopper":
        return _draw_tiles(op, engine, rng, name)
    shared = drawn.between(rng, 1, 6)
    sizes = {
        "batch": drawn.between(rng, 1, 6),
        "queries": drawn.between(rng, 1, 90),
        "keys": drawn.between(rng, 1, 90),
        "shared": shared,
        "heads": shared * drawn.between(rng, 1, 4),
        "features": drawn.between(rng, 1, 130),
        "values": drawn.between(rng, 1, 130),
    }
    return AttentionCase(op, engine, drawn.pick(rng, drawn.WIDER), f"{name}/{rng.choice(variants(op))}", **sizes)


def _draw_tiles(op: str, engine: str, rng: drawn.Generator, name: str) -> AttentionCase:
    """Sequences of several tiles of the kernels, and features that they serve."""
    shared = drawn.between(rng, 1, 3)
    heads = shared * drawn.between(rng, 1, 3)
    batch = drawn.between(rng, 1, 3)
    longest = min(700, int((2**21 / (batch * heads)) ** 0.5))
    # Every fourth length is one of whole tiles, as most of a user's are.
    length = lambda: (
        64 * drawn.between(rng, 1, longest // 64) if rng.random() < 0.25 else drawn.between(rng, 1, longest)
    )
    sizes = {
        "batch": batch,
        "queries": length(),
        "keys": length(),
        "shared": shared,
        "heads": heads,
        "features": 8 * drawn.between(rng, 1, 32),
        "values": 8 * drawn.between(rng, 1, 32),
    }
    dtype = drawn.pick(rng, {"bf16": 1, "f16": 1})
    return AttentionCase(op, engine, dtype, f"{name}/{rng.choice(variants(op))}", **sizes)


FAMILY = family("attention", AttentionCase, OPS, cases, subjects, "a small call", (1, 1), draw=draw)
