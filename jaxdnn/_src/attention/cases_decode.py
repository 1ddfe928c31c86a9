"""Decoding over a cache and its pages, and rotary embedding: matrix, data and bounds."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.attention.cases import DTYPES, HOPPER, AttentionCase, in_tiles
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.formats import FORMATS
from jaxdnn._src.core.tolerance import Accumulation

OPS = ("attention_decode", "rope")
DECODE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4, "softcap": 1.5, "split": 3},
    "alibi": {"alibi": True, "sinks": True, "layout": "BNTH", "split": 4},
    "pages": {"pages": 3, "split": 5, "scale": 0.4},
}
ROPE: dict[str, dict[str, Any]] = {
    "half": {},
    "interleaved": {"pairs": "interleaved", "width": 6, "side": "last", "layout": "BNTH"},
    "far": {
        "positions": np.array([0, -7, 1_000_003, 2**31 - 1, 5, 77_777, 12, 3, 9, 2**24 + 1, -(2**31)]),
        "scale": 1.5,
    },
}
SINE = 4.0  # in units of u: of a sine or cosine of an angle below half a turn


@dataclasses.dataclass(frozen=True)
class DecodeCase(AttentionCase):
    """The last queries of sequences; what is expected is attention's, with ALiBi as a bias."""

    queries: int = 2

    primitive = {"attention_decode": "attention"}  # noqa: RUF012

    @property
    def asked(self) -> dict[str, Any]:
        return in_tiles(self.engine, DECODE[self.variant.rpartition("/")[2]])

    @property
    def options(self) -> dict[str, Any]:
        """As `attention` takes them."""
        o = {name: value for name, value in self.asked.items() if name in ("softcap", "scale", "layout")}
        window = (self.asked.get("window"), None)
        return o | {"causal": "bottom_right", "window": window, "split": self.asked.get("split", 256)}

    @property
    def given(self) -> tuple[str, ...]:
        extra = ("bias",) * ("alibi" in self.asked) + ("sinks",) * ("sinks" in self.asked)
        return (*extra, "key_lengths")

    @property
    def count(self) -> int:
        return 3

    def call(self, **choices: Any) -> Callable[..., Any]:
        names = [name for name in ("alibi_slopes", "sinks", "page_table") if self._has(name)]
        o = {name: value for name, value in self.asked.items() if name not in ("alibi", "sinks", "pages")}

        def run(q: Any, k: Any, v: Any, lengths: Any, *others: Any) -> Any:
            named = dict(zip(names, others, strict=True))
            return dnn.attention_decode(q, k, v, lengths, **named, **o, return_logsumexp=True, **choices)

        return run

    def _has(self, name: str) -> bool:
        return {"alibi_slopes": "alibi", "page_table": "pages"}.get(name, name) in self.asked

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        b, n, s = self.batch, self.heads, self.keys
        pages = -(-s // self.asked.get("pages", s))
        rows = (b * pages, self.asked["pages"]) if "pages" in self.asked else (b, s)
        shapes = (b, self.queries, n, self.features), (*rows, self.shared, self.features)
        q, k, v = (rng.normal(size=shape) for shape in (*shapes, (*rows, self.shared, self.values)))
        q = 8 * q if kind == "wide" else q
        transposed = lambda a: np.swapaxes(a, 1, 2) if self.options.get("layout") == "BNTH" else a
        found = [transposed(a).astype(self.in_dtype) for a in (q, k, v)]
        found.append(rng.integers(0, s + 1, b).astype(np.int32))
        every = {
            "alibi_slopes": (2.0 ** -rng.integers(1, 8, n)).astype(self.in_dtype),
            "sinks": rng.normal(size=n).astype(self.in_dtype),
            "page_table": rng.permutation(b * pages).reshape(b, pages).astype(np.int32),
        }
        return (*found, *(value for name, value in every.items() if self._has(name)))

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        q, k, v, lengths, *others = operands
        if "pages" in self.asked:
            k, v = (a[others[0]].reshape(self.batch, -1, *a.shape[2:]) for a in (k, v))
        dense = dataclasses.replace(self, keys=k.shape[2 if self.options.get("layout") == "BNTH" else 1])
        named = []
        if "alibi" in self.asked:
            own = np.arange(self.queries)[None, :, None] + (lengths - self.queries)[:, None, None]
            slopes = others[0].astype(np.float64)[:, None, None]
            named.append(slopes * (np.arange(dense.keys) - own)[:, None])
        if "sinks" in self.asked:
            named.append(others[-1])
        found = dense._attention((q, k, v, *named, lengths), accumulation)
        return tuple(dataclasses.replace(e, error=(2.0 if self.x64 else 1.0) * e.error) for e in found)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **{name: str(value) for name, value in self.asked.items()}}


@dataclasses.dataclass(frozen=True)
class RopeCase(Case):
    """Features of tokens, rotated by their places."""

    batch: int = 8
    queries: int = 11
    heads: int = 3
    features: int = 10

    @property
    def options(self) -> dict[str, Any]:
        return ROPE[self.variant.rpartition("/")[2]]

    def call(self, **choices: Any) -> Callable[..., Any]:
        return lambda x: dnn.rope(x, **self.options, **choices)

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x = rng.normal(size=(self.batch, self.queries, self.heads, self.features))
        x = np.swapaxes(x, 1, 2) if self.options.get("layout") == "BNTH" else x
        return (x.astype(self.in_dtype),)

    def kinds(self) -> tuple[str, ...]:
        return ("normal",)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        (x,) = operands
        wide = x.astype(np.float64)
        u, scale = FORMATS[accumulation.format].roundoff, self.options.get("scale", 1.0)
        largest = np.abs(self.options.get("positions", np.arange(self.queries))).max()
        # An angle is below half a turn, and rounded twice; that of the definition is off by the roundoff of float64.
        of_angle = 2 * np.pi * u + 2.0**-30 * (not self.x64) + 4 * largest * 2.0**-53
        size = reference.rope(np.ones_like(wide), **{**self.options, "scale": 1.0})
        both = np.abs(wide).max(-1, keepdims=True) * 2 * np.ones_like(size)
        value = reference.rope(wide, **self.options)
        return (Expected(value, scale * both * (of_angle + (SINE + 4) * u), self.in_dtype, "y", generic=False),)

    def describe(self) -> dict[str, Any]:
        return {name: str(value) for name, value in self.options.items()}


def _cases_of(op: str) -> tuple[type[Case], dict[str, dict[str, Any]]]:
    return (DecodeCase, DECODE) if op == "attention_decode" else (RopeCase, ROPE)


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[Case]:
    """Every variant in every dtype of the extent."""
    kind, variants = _cases_of(op)
    sizes = {**HOPPER, "queries": 2, "keys": 1100} if engine == "hopper" else {}
    for dtype in up_to(extent, DTYPES):
        for variant in variants:
            yield kind(op, engine, dtype, variant, **sizes)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject]:
    """A variant of each op."""
    case: Case = RopeCase(op, engine, "bf16", "half")
    if op == "attention_decode":
        case = DecodeCase(op, engine, "f32", "alibi")
        if engine == "hopper":
            case = DecodeCase(op, engine, "bf16", "alibi", **HOPPER | {"queries": 1, "keys": 1100})
    axes = (0, 0, 0, 0, None, None) if op == "attention_decode" else (0,)
    found = subject(case, seed, batch_axes=axes, out_axis=0)
    if found is not None:
        yield found


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> Case:
    """Every variant on sequences of any lengths."""
    variants = _cases_of(op)[1]
    if engine == "hopper":
        return _draw_tiles(op, engine, rng, f"{name}/{rng.choice(list(variants))}")
    dtype = drawn.pick(rng, drawn.WIDER)
    batch, heads = drawn.between(rng, 1, 6), drawn.between(rng, 1, 4)
    if op == "rope":
        return RopeCase(
            op, engine, dtype, f"{name}/half", batch, drawn.between(rng, 1, 300), heads, 2 * drawn.between(rng, 1, 70)
        )
    shared = drawn.between(rng, 1, 4)
    sizes = {
        "batch": batch,
        "queries": drawn.between(rng, 1, 4),
        "keys": drawn.between(rng, 1, 200),
        "shared": shared,
        "heads": shared * heads,
        "features": drawn.between(rng, 1, 130),
        "values": drawn.between(rng, 1, 130),
    }
    return DecodeCase(op, engine, dtype, f"{name}/{rng.choice(list(variants))}", **sizes)


def _draw_tiles(op: str, engine: str, rng: drawn.Generator, name: str) -> Case:
    """One query, mostly, or some, over several parts of the keys, and features that kernels serve."""
    long = rng.random() < 0.2  # more parts than one kernel merges, of the smaller splits
    shared = 1 if long else drawn.between(rng, 1, 4)
    sizes = {
        "batch": 1 if long else drawn.between(rng, 1, 4),
        "queries": 1 if rng.random() < 0.6 else drawn.between(rng, 2, 10 if long else 100),
        "keys": drawn.between(rng, 8000, 9500) if long else drawn.between(rng, 1, 3000),
        "shared": shared,
        "heads": shared * (drawn.between(rng, 1, 6) if rng.random() < 0.9 else drawn.between(rng, 60, 140)),
        "features": 8 * drawn.between(rng, 1, 32),
        "values": 8 * drawn.between(rng, 1, 32),
    }
    return DecodeCase(op, engine, drawn.pick(rng, {"bf16": 1, "f16": 1}), name, **sizes)


FAMILY = family("attention", DecodeCase, OPS, cases, subjects, "a small call", (1, 1), draw=draw)
