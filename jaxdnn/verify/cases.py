"""The matrix: which calls `jaxdnn verify` makes.

A case is one call of one op by one engine: dtypes, layouts, geometry, epilogue. Its id names it, so that a failing
case can be run alone: the id and the seed are all it takes. Sizes are pairwise distinct, so that two axes that change
places cannot go unseen.
"""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxdnn as dnn
from jaxdnn import _window, engines

OPS: dict[str, Callable[..., Any]] = {
    "conv": dnn.conv,
    "conv_dgrad": dnn.conv_dgrad,
    "conv_wgrad": dnn.conv_wgrad,
    "conv_bgrad": dnn.conv_bgrad,
    "conv_transpose": dnn.conv_transpose,
}
# Under which op an op's engines are registered; a backward bias is a sum that XLA does, without a choice.
ENGINES_OF = {"conv": "conv", "conv_dgrad": "conv_dgrad", "conv_wgrad": "conv_wgrad", "conv_transpose": "conv_dgrad"}
ROLES = {"conv": "xwy", "conv_dgrad": "ywx", "conv_wgrad": "xyw", "conv_bgrad": "yb", "conv_transpose": "ywx"}
NAMES = {"conv": ("x", "w"), "conv_dgrad": ("dy", "w"), "conv_wgrad": ("x", "dy"), "conv_bgrad": ("dy",)}

DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f64": np.float64,
    "tf32": np.float32,
    "int8": np.int8,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "int32": np.int32,
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The convolution y = conv(x, w), from whose sides every op takes its arrays."""

    name: str
    batch: int
    sizes: tuple[int, ...]
    channels: int
    filters: int
    taps: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    mode: str = "cross_correlation"

    @property
    def window(self) -> _window.Window:
        settings = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return _window.window(**settings, sizes=self.sizes, taps=self.taps)

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.window.output_sizes(self.sizes, self.taps)


@dataclasses.dataclass(frozen=True)
class Blend:
    """An epilogue; parameters that are not multiples of 1/4 make it inexact on integers too."""

    name: str = ""
    alpha: float = 1.0
    beta: float = 0.0
    prior: bool = False  # given; with beta 0 it is all NaN and must not be read
    bias: bool = False
    residual: bool = False
    activation: Any = None

    @property
    def exact_on_integers(self) -> bool:
        name = self.activation[0] if isinstance(self.activation, tuple) else self.activation
        return self.alpha * 4 % 1 == 0 and self.beta * 4 % 1 == 0 and name in (None, "identity", "relu")


_NO_BLEND = Blend()


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one op by one engine."""

    op: str
    engine: str
    dtype: str
    layout: str
    filter_layout: str | None
    geometry: Geometry
    blend: Blend = _NO_BLEND
    out: str | None = None
    accumulate: str | None = None

    @property
    def id(self) -> str:
        layout = self.layout if self.filter_layout is None else f"{self.layout}-{self.filter_layout}"
        parts = [self.op, self.engine, self.dtype, layout, self.geometry.name, self.blend.name]
        parts += [f"to-{self.out}" if self.out else "", f"in-{self.accumulate}" if self.accumulate else ""]
        return "/".join(filter(None, parts))

    @property
    def x64(self) -> bool:
        return "f64" in (self.dtype, self.out, self.accumulate)

    @property
    def in_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.dtype])

    @property
    def out_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.out]) if self.out else self.in_dtype

    @property
    def roles(self) -> tuple[str, ...]:
        """What the operands are: x, w or y of the geometry."""
        return tuple(ROLES[self.op][:-1])

    @property
    def result_role(self) -> str:
        return ROLES[self.op][-1]

    @property
    def terms(self) -> int:
        """The number of products of an element that no padding touches."""
        g = self.geometry
        of_taps = math.prod(g.taps)
        return {
            "x": of_taps * g.filters // g.groups,
            "y": of_taps * g.channels // g.groups,
            "w": g.batch * math.prod(g.outputs),
            "b": g.batch * math.prod(g.outputs),
        }[self.result_role]

    @property
    def integer(self) -> bool:
        """Whether everything is done in integers, by the ops' rule."""
        b = self.blend
        return self.dtype == "int8" and b.alpha == 1 and b.beta in (0, 1) and b.activation in (None, "relu")

    def shape(self, role: str) -> tuple[int, ...]:
        """The shape of the array in this role, as it is stored."""
        g = self.geometry
        if role == "b":
            return (g.filters if self.op != "conv_transpose" else g.channels,)
        if role == "w":
            layout = _window.filter_layout(self.filter_layout, _window.layout(self.layout))
            return _vectorised(layout, layout.shape(g.taps, g.channels // g.groups, g.filters), layout.input)
        layout = _window.layout(self.layout)
        if role == "x" and self.op == "conv_transpose" and g.padding == "SAME":
            sizes = tuple(p * s for p, s in zip(g.outputs, g.window.strides, strict=True))
            plain = layout.shape(g.batch, sizes, g.channels)
        elif role == "x":
            plain = layout.shape(g.batch, g.sizes, g.channels)
        else:
            plain = layout.shape(g.batch, g.outputs, g.filters)
        return _vectorised(layout, plain, layout.channel)

    def along_channel(self, bias: np.ndarray) -> np.ndarray:
        """A bias so shaped that it broadcasts to the result as it is stored."""
        layout = _window.layout(self.layout)
        shape = [1] * (len(layout.axes) + (layout.vector is not None))
        shape[layout.channel] = bias.size // (layout.vector or 1)
        if layout.vector:
            shape[-1] = layout.vector
        return bias.reshape(shape)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that op and reference share, arrays left out."""
        g, b = self.geometry, self.blend
        given: dict[str, Any] = {"layout": self.layout, "alpha": b.alpha, "beta": b.beta}
        if self.out:
            given["out_dtype"] = self.out_dtype
        if self.accumulate:
            given["accumulate"] = np.dtype(DTYPES[self.accumulate])
        if self.op == "conv_bgrad":
            return given
        given |= {"stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups}
        given |= {"mode": g.mode, "filter_layout": self.filter_layout}
        if self.dtype == "tf32":
            given["precision"] = "tf32"
        if self.op in ("conv", "conv_transpose"):
            given["activation"] = b.activation
        if self.op == "conv_transpose" and g.padding != "SAME":
            given["output_padding"] = self.output_padding()
        return given

    def output_padding(self) -> tuple[int, ...]:
        """By how much the geometry's input is longer than the shortest that gives its output."""
        w = self.geometry.window
        spans = zip(self.geometry.sizes, w.padding, w.extents(self.geometry.taps), w.strides, strict=True)
        return tuple((size + low + high - extent) % stride for size, (low, high), extent, stride in spans)

    def sizes_argument(self) -> tuple[tuple[int, ...], ...]:
        """The x_shape or w_shape that a backward op takes after its arrays."""
        return (self.shape(self.result_role),) if self.op in ("conv_dgrad", "conv_wgrad") else ()

    def function(self, level: str | None = None, *, any_engine: bool = False) -> Callable[..., jax.Array]:
        """The op with everything but its arrays: operands, then the epilogue's arrays by name."""
        arguments = self.arguments()
        if self.op != "conv_bgrad" and not any_engine:
            arguments["engine"] = self.engine
        op, sizes = OPS[self.op], self.sizes_argument()

        def call(*operands: jax.Array, **extras: jax.Array) -> jax.Array:
            return op(*operands, *sizes, **extras, **arguments, determinism=level)

        return call


def _vectorised(layout: Any, plain: tuple[int, ...], channel: int) -> tuple[int, ...]:
    if layout.vector is None:
        return plain
    return (*plain[:channel], plain[channel] // layout.vector, *plain[channel + 1 :], layout.vector)


def engines_of(op: str) -> tuple[str, ...]:
    """The names of the engines that an op may be given."""
    return tuple(e.name for e in engines.registered(ENGINES_OF[op])) if op in ENGINES_OF else ("xla",)


# ---- geometries ------------------------------------------------------------------------------------------------------

_ASYMMETRIC = ((2, 1), (0, 3))
GEOMETRIES: dict[str, Geometry] = {
    g.name: g
    for g in (
        Geometry("plain", 2, (9, 8), 5, 7, (3, 4)),
        Geometry("same", 2, (10, 7), 5, 6, (3, 3), padding="SAME"),
        Geometry("same-stride", 2, (9, 8), 5, 6, (4, 3), padding="SAME", stride=(2, 3)),
        Geometry("stride", 3, (11, 10), 4, 5, (3, 2), stride=(2, 3), padding=1),
        Geometry("stride-past-taps", 2, (13, 12), 5, 4, (2, 3), stride=(3, 5)),
        Geometry("dilation", 2, (13, 11), 5, 3, (3, 4), dilation=(3, 2), padding=(2, 4)),
        Geometry("asymmetric", 3, (7, 8), 6, 4, (5, 2), padding=_ASYMMETRIC),
        Geometry("pointwise", 3, (7, 5), 13, 11, (1, 1)),
        Geometry("pointwise-stride", 2, (9, 8), 11, 7, (1, 1), stride=2),
        Geometry("patches", 2, (13, 10), 5, 6, (4, 3), stride=(4, 3)),
        Geometry("groups", 2, (8, 7), 6, 9, (3, 4), groups=3, padding=1),
        Geometry("depthwise", 3, (9, 11), 6, 6, (3, 5), groups=6, padding=(1, 2)),
        Geometry("depthwise-twice", 2, (9, 7), 5, 10, (4, 3), groups=5, stride=(1, 2)),
        Geometry("flipped", 2, (8, 9), 5, 7, (4, 3), padding=2, mode="convolution"),
        Geometry("all", 2, (15, 13), 6, 4, (3, 4), (2, 3), _ASYMMETRIC, (2, 1), 2, "convolution"),
        Geometry("all-same", 3, (11, 14), 8, 12, (3, 2), (3, 2), "SAME", (1, 3), 4),
        Geometry("one", 1, (1, 1), 1, 1, (1, 1)),
        Geometry("thin", 1, (1, 9), 1, 3, (1, 4), padding=((0, 0), (2, 1))),
        Geometry("only-padding", 2, (3, 2), 4, 5, (2, 3), padding=4, stride=3),
        Geometry("global", 4, (6, 5), 7, 3, (6, 5)),
        Geometry("empty", 0, (6, 7), 3, 4, (3, 2), padding=1),
        Geometry("long-channels", 2, (4, 3), 512, 6, (3, 2), padding=1),
        Geometry("long-filters", 2, (3, 4), 6, 512, (2, 3), padding=1),
        Geometry("long-pixels", 5, (23, 29), 3, 4, (3, 2), padding=1),
        Geometry("1d", 3, (17,), 4, 5, (3,), padding=((2, 1),)),
        Geometry("1d-all", 2, (29,), 6, 9, (5,), (2,), ((3, 4),), (3,), 3, "convolution"),
        Geometry("1d-long-taps", 2, (64,), 3, 4, (31,), padding=15),
        Geometry("3d", 2, (5, 6, 7), 3, 4, (2, 3, 1), padding=1),
        Geometry("3d-all", 2, (7, 6, 9), 4, 6, (3, 2, 3), (2, 1, 3), ((1, 0), (0, 2), 1), (1, 2, 2), 2, "convolution"),
        Geometry("3d-patches", 2, (4, 6, 5), 3, 7, (2, 3, 1), stride=(2, 3, 1)),
        Geometry("wrap", 1, (3,), 140_000, 2, (1,)),
        Geometry("vector", 2, (7, 6), 8, 12, (3, 2), stride=(2, 1), padding=1),
        Geometry("vector-1d", 3, (11,), 4, 8, (3,), dilation=2),
        Geometry("vector-3d", 2, (5, 4, 3), 8, 4, (2, 3, 2), padding=1),
    )
}
# Pairs in a geometry may be written as one number each; the ops take pairs or numbers, not both.
for _name, _g in GEOMETRIES.items():
    if isinstance(_g.padding, tuple):
        _pairs = tuple(p if isinstance(p, tuple) else (p, p) for p in _g.padding)
        GEOMETRIES[_name] = dataclasses.replace(_g, padding=_pairs)

_FLAT = tuple(g for g in GEOMETRIES if not g.startswith("vector") and g != "wrap")
_LONG = {"x": "long-filters", "y": "long-channels", "w": "long-pixels", "b": "long-pixels"}
_CHANNELS_LAST = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
_LAYOUTS = (
    ("NCHW", None, "all"),
    ("NCHW", "KCRS", "stride"),
    ("NCHW", "HWIO", "groups"),
    ("NHWC", "KRSC", "all"),
    ("NHWC", "OIHW", "dilation"),
    ("CHWN", None, "all"),
    ("CHWN", "CRSK", "asymmetric"),
    ("NCHWc4", None, "vector"),
    ("NCHWc2", None, "vector"),
    ("NCW", None, "1d-all"),
    ("CWN", "SCK", "1d-all"),
    ("NCWc4", None, "vector-1d"),
    ("NCDHW", None, "3d-all"),
    ("CDHWN", "KTRSC", "3d-all"),
    ("NCDHWc4", None, "vector-3d"),
)
_BLENDS = (
    Blend("scaled", alpha=-0.75),
    Blend("blended", alpha=1.3717, beta=-0.6931, prior=True),
    Blend("accumulating", beta=1.0, prior=True),
    Blend("prior-not-read", alpha=0.5, prior=True),
)
_EPILOGUES = (
    Blend("bias", bias=True),
    Blend("bias-relu", bias=True, activation="relu"),
    Blend("bias-residual-relu", bias=True, residual=True, activation="relu"),
    Blend("everything-gelu", 1.3717, 0.5, True, True, True, "gelu"),
    Blend("gelu_tanh", activation="gelu_tanh"),
    Blend("sigmoid", bias=True, activation="sigmoid"),
    Blend("tanh", alpha=0.3, activation="tanh"),
    Blend("swish", bias=True, activation="swish"),
    Blend("softplus", activation="softplus"),
    Blend("elu", activation=("elu", 0.5)),
    Blend("leaky_relu", activation=("leaky_relu", 0.1)),
    Blend("clipped_relu", activation=("clipped_relu", 1.5)),
)
_INT8_BLENDS = (
    (Blend("bias-relu", bias=True, activation="relu"), None),
    (Blend("bias-residual", bias=True, residual=True), "int32"),
    (Blend("accumulating", beta=1.0, prior=True, bias=True), "int32"),
    (Blend("scaled", alpha=0.013), None),
    (Blend("requantised-relu", alpha=0.007, bias=True, residual=True, activation="relu"), None),
    (Blend("blended", alpha=0.02, beta=0.5, prior=True, bias=True), "f32"),
)


def random_geometry(seed: int, index: int) -> Geometry:
    """A geometry drawn at random, the same for the same seed and index: all settings combined freely."""
    rng = np.random.default_rng([seed, index])
    rank = int(rng.choice([1, 2, 2, 2, 3]))
    groups = int(rng.choice([1, 1, 2, 3]))
    cg, kg = (int(v) for v in rng.integers(1, 6, 2))
    low, high = (0, (24, 11, 7)[rank - 1])
    taps, stride, dilation, sizes, padding = [], [], [], [], []
    for _ in range(rank):
        r, u, d = (int(rng.integers(1, top)) for top in (5, 4, 4))
        pads = tuple(int(v) for v in rng.integers(low, 4, 2))
        size = int(rng.integers(1, high))
        size = max(size, (r - 1) * d + 1 - sum(pads))  # a window has to fit
        for values, value in zip((taps, stride, dilation, sizes, padding), (r, u, d, size, pads), strict=True):
            values.append(value)
    named = str(rng.choice(["", "", "", "SAME"]))
    mode = str(rng.choice(["cross_correlation", "convolution"]))
    batch = int(rng.integers(1, 4))
    settings = (tuple(stride), named or tuple(padding), tuple(dilation), groups, mode)
    return Geometry(f"random-{index}", batch, tuple(sizes), cg * groups, kg * groups, tuple(taps), *settings)


_OUTS = (
    ("bf16", "f32"),
    ("f32", "bf16"),
    ("int8", "int32"),
    ("f16", "f32"),
    ("e4m3fn", "f32"),
    ("f32", "f16"),
    ("int8", "f32"),
    ("e5m2", "bf16"),
)

# ---- the matrix ------------------------------------------------------------------------------------------------------

EXTENTS = ("quick", "standard", "full")


def matrix(extent: str, seed: int, *, ops: Iterable[str], dtypes: Iterable[str]) -> Iterator[Case]:
    """The cases of an extent, each of which holds those of the extents before it."""
    chosen = frozenset(dtypes)
    for op in ops:
        for engine in engines_of(op):
            seen: set[str] = set()
            for case in _cases(op, engine, extent, seed):
                if case.dtype in chosen and case.id not in seen and not (op == "conv_bgrad" and case.dtype == "tf32"):
                    seen.add(case.id)
                    yield case


def find(case_id: str, seed: int) -> Case | None:
    """The case of this id, whatever the extent."""
    op = case_id.partition("/")[0]
    if op not in OPS:
        return None
    return next((c for c in matrix("full", seed, ops=[op], dtypes=DTYPES) if c.id == case_id), None)


def _cases(op: str, engine: str, extent: str, seed: int) -> Iterator[Case]:
    make = ft.partial(_case, op, engine)
    yield from _quick(op, make)
    more = [_standard(op, make)] if extent != "quick" else []
    more += [_full(op, make, seed)] if extent == "full" else []
    for part in more:
        yield from itertools.islice(part, 0, None, 8 if engine in _SLOW else 1)


def _quick(op: str, make: Callable[..., Case]) -> Iterator[Case]:
    yield from (make("f32", g) for g in ("plain", "all", "pointwise", _LONG[ROLES[op][-1]]))
    yield from (make("bf16", g) for g in ("all", "depthwise"))
    yield from (make(d, "all") for d in ("f16", "f64", "tf32", "int8", "e4m3fn", "e5m2"))
    yield make("bf16", "plain", blend=_BLENDS[1])


# Engines that add one product at a time get every eighth of the cases that are not quick.
_SLOW = ("ordered",)
# Transposed convolution is served by the engines of backward data, and a backward bias has no window at all: of the
# lists of cases they get every third and every fourth.
_STRIDE = {"conv": 1, "conv_dgrad": 1, "conv_wgrad": 1, "conv_transpose": 3, "conv_bgrad": 4}


def _standard(op: str, make: Callable[..., Case]) -> Iterator[Case]:
    step, long = _STRIDE[op], _LONG[ROLES[op][-1]]
    yield from (make("f32", g) for g in _FLAT[::step])
    yield from (make("bf16", g) for g in (*_FLAT[1 :: 4 * step], long))
    yield from (make("f16", g) for g in ("depthwise", "pointwise", long)[::step])
    yield from (make("int8", g) for g in ("depthwise", "pointwise", "empty", long)[::step])
    yield from (make(d, g) for d in ("f64", "tf32", "e4m3fn", "e5m2") for g in ("plain", long)[::step])
    for i, (layout, filters, geometry) in enumerate(_LAYOUTS[::step]):
        yield make(("f32", "bf16", "int8", "f16")[i % 4], geometry, layout=layout, filters=filters)
    for i, blend in enumerate(_blends(op)):
        yield make(("f32", "bf16", "f32", "e5m2", "f16")[i % 5], ("groups", "flipped")[i % 2], blend=blend)
    yield from (make(d, "all", out=o) for d, o in _OUTS[:: (step + 1) // 2])
    yield make("bf16", "plain", out="f32", accumulate="f64")
    if op in ("conv", "conv_transpose"):
        yield from (make("int8", "groups", blend=b, out=o) for b, o in _INT8_BLENDS[::step])
        yield make("bf16", "vector", layout="NCHWc4", blend=_EPILOGUES[2])
    if op == "conv":
        yield make("int8", "wrap", out="int32")


def _blends(op: str) -> tuple[Blend, ...]:
    return (*_BLENDS, *_EPILOGUES) if op in ("conv", "conv_transpose") else _BLENDS


def _full(op: str, make: Callable[..., Case], seed: int) -> Iterator[Case]:
    yield from (make(d, g) for d in ("bf16", "f16", "int8") for g in _FLAT[::2])
    yield from (make(d, g) for d in ("f64", "tf32", "e4m3fn", "e5m2") for g in _FLAT[::3])
    for (layout, filters, geometry), dtype in itertools.product(_LAYOUTS, ("f32", "bf16", "f16", "int8")):
        yield make(dtype, geometry, layout=layout, filters=filters)
    for i, (dtype, blend) in enumerate(itertools.product(("f32", "bf16", "f16", "e4m3fn"), _blends(op))):
        yield make(dtype, ("all", "1d", "3d-all")[i % 3], blend=blend)
    yield from (make(d, g, out=o) for g in ("depthwise", "1d-all") for d, o in _OUTS)
    dtypes = ("f32", "bf16", "f32", "f16", "int8", "f64", "tf32", "e5m2")
    for index in range(64):
        geometry = random_geometry(seed, index)
        layouts = [name for name in _window.LAYOUTS if len(name) == len(geometry.sizes) + 2]
        yield make(dtypes[index % len(dtypes)], geometry, layout=layouts[index % 3])


def _case(
    op: str,
    engine: str,
    dtype: str,
    geometry: str | Geometry,
    *,
    layout: str | None = None,
    filters: str | None = None,
    blend: Blend = _NO_BLEND,
    out: str | None = None,
    accumulate: str | None = None,
) -> Case:
    g = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
    layout = layout or _CHANNELS_LAST[len(g.sizes)]
    if op == "conv_bgrad":
        filters = None
    return Case(op, engine, dtype, layout, filters, g, blend, out, accumulate)
