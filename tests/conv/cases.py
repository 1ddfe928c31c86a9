"""The one registry of cases: what an op is called with, drawn from a seed or written down.

A `Geometry` is one of the package's cases in its layouts; a `Case` adds the op, the data and the other arguments.
Sizes are pairwise distinct within an array, sizes 0 and 1 and the equal channels of a depthwise convolution aside, so
that no exchange of two axes can pass unseen; the builder checks it. Data has both signs, ties and zeros.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdnn._src.conv.cases import case as conv
from jaxdnn._src.conv.cases import geometries
from jaxdnn._src.core import windows

OPS = ("conv", "conv_dgrad", "conv_wgrad", "conv_bgrad", "conv_transpose")
RANDOM_OPS = ("conv", "conv_dgrad", "conv_wgrad", "conv_transpose")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry(geometries.Geometry):
    """A convolution without its data: a geometry of the package's cases, and the layouts of its arrays."""

    name: str = ""
    layout: str = "NHWC"
    filter_layout: str | None = None

    def __post_init__(self) -> None:
        depthwise = self.groups == self.channels == self.filters
        for channel in (self.channels,) if depthwise else (self.channels, self.filters):
            _assert_distinct(self.batch, channel, *self.sizes)
        _assert_distinct(*self.taps, self.channels // self.groups, self.filters)

    @property
    def spatial(self) -> str:
        """The letters of the spatial axes."""
        return windows.SPATIAL[len(self.sizes)]

    @property
    def image(self) -> windows.Layout:
        return windows.layout(self.layout)

    @property
    def filter(self) -> windows.FilterLayout:
        """The filter's layout, also where it is left to the default."""
        return windows.filter_layout(self.filter_layout, self.image)

    def shape(self, role: str) -> tuple[int, ...]:
        """The shape of x, w or y as it is stored."""
        return conv.Case("conv", "xla", "f32", self.layout, self.filter_layout, self).shape(role)

    def options(self) -> dict[str, Any]:
        """The keyword arguments that differ from the defaults."""
        given = ("stride", "padding", "dilation", "groups", "mode", "layout", "filter_layout")
        fields = (f for f in dataclasses.fields(self) if f.name in given)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: `op(*arrays, *static, **arguments)`, where `named` are arguments that are arrays."""

    op: str
    geometry: Geometry
    arrays: tuple[Any, ...]
    static: tuple[Any, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    origin: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.options, **self.named}

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.geometry.shape(conv.ROLES[self.op][-1])

    @property
    def result_channels(self) -> int:
        g = self.geometry
        return g.filters if self.op in ("conv", "conv_wgrad", "conv_bgrad") else g.channels

    def with_options(self, **options: Any) -> "Case":
        return dataclasses.replace(self, options={**self.options, **options})

    def with_epilogue(self, seed: int, *, dtype: Any = None, integers: int = 0, **options: Any) -> "Case":
        """Adds the arrays that `options` names as True, of the given dtype, and the other options as they are."""
        rng = np.random.default_rng([77, seed])
        dtype = self.arrays[0].dtype if dtype is None else dtype
        shapes = {"bias": (self.result_channels,), "residual": self.result_shape, "prior": self.result_shape}
        named = {k: values(rng, shapes[k], dtype, integers=integers) for k, v in options.items() if v is True}
        rest = {k: v for k, v in options.items() if v is not True}
        origin = f"{self.origin}.with_epilogue({seed}, dtype={np.dtype(dtype).name!r}, "
        origin += f"integers={integers}, " + _keywords(options)
        return dataclasses.replace(self, options={**self.options, **rest}, named=named, origin=origin)

    def __str__(self) -> str:
        shown = [f"{a.dtype}{list(a.shape)}" for a in self.arrays] + [repr(s) for s in self.static]
        shown += [f"{k}={v!r}" for k, v in self.options.items()]
        shown += [f"{k}={v.dtype}{list(v.shape)}" for k, v in self.named.items()]
        return f"{self.op}({', '.join(shown)})"


def case(op: str, geometry: Geometry, seed: int = 0, *, dtype: Any = np.float32, integers: int = 0) -> Case:
    """A call of an op with data from a seed; `integers` is the largest absolute value of whole numbers, 0 for reals."""
    rng = np.random.default_rng([OPS.index(op), seed])
    g, options = geometry, geometry.options()
    static = {"conv_dgrad": (g.shape("x"),), "conv_wgrad": (g.shape("w"),)}.get(op, ())
    if op == "conv_bgrad":
        options = {k: v for k, v in options.items() if k == "layout"}
    if op == "conv_transpose":
        options |= _transposed_options(g)
    arrays = tuple(values(rng, g.shape(role), dtype, integers=integers) for role in conv.ROLES[op][:-1])
    origin = f"cases.case({op!r}, cases.{g!r}, {seed}, dtype={np.dtype(dtype).name!r}, integers={integers})"
    return Case(op, g, arrays, static, options, origin=origin)


def _transposed_options(g: Geometry) -> dict[str, Any]:
    axes = zip(g.sizes, g.window.stride, strict=True)
    if g.padding == "SAME" and all(size % u == 0 for size, u in axes):
        return {}
    extra = conv.Case("conv_transpose", "xla", "f32", g.layout, g.filter_layout, g).output_padding()
    padding = g.window.padding if g.padding == "SAME" else g.padding
    return {"output_padding": extra} | ({} if padding == 0 else {"padding": padding})


def values(rng: np.random.Generator, shape: Sequence[int], dtype: Any, *, integers: int = 0) -> np.ndarray:
    """Signed data with ties and zeros: half of it from a few numbers, half from a continuum (or all whole numbers)."""
    dtype = np.dtype(dtype)
    if integers or dtype.kind in "iu":
        limit = integers or (int(np.iinfo(dtype).max) if dtype == np.int8 else 1000)
        return rng.integers(-limit, limit + 1, shape).astype(dtype)
    few = rng.choice([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0], shape)
    many = rng.standard_normal(shape) * 2.0 ** rng.integers(-2, 3, shape)
    return np.where(rng.random(shape) < 0.5, few, many).astype(np.float64).astype(dtype)


# ---- random geometries -----------------------------------------------------------------------------------------------


def random_geometry(seed: int, *, rank: int | None = None) -> Geometry:
    """Any combination of what a convolution can be asked for, small."""
    rng = np.random.default_rng([99, seed])
    rank = rank or int(rng.choice([1, 2, 2, 2, 3]))
    for _ in range(10_000):
        try:
            geometry = _draw(rng, rank)
        except AssertionError:  # sizes that are not distinct: draw again
            continue
        if min(geometry.outputs) >= 1:
            return geometry
    raise RuntimeError(f"no geometry for seed {seed}")


def _draw(rng: np.random.Generator, rank: int) -> Geometry:
    def pick(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(low, high + 1, rank))

    lanes = pick(None, None, None, 2, 3, 4)
    unit = lanes or 1
    kind = pick("dense", "dense", "grouped", "depthwise", "multiplier")
    if kind == "depthwise":
        groups = c = k = unit * pick(2, 3, 5)
    elif kind == "multiplier":
        groups = c = unit * pick(2, 3)
        k = groups * pick(2, 3)
    else:
        groups = pick(2, 3) if kind == "grouped" else 1
        c, k = groups * unit * pick(1, 2, 3, 5), groups * unit * pick(1, 2, 4)
    order = {1: ("NWC", "NCW", "CWN"), 2: ("NHWC", "NCHW", "CHWN"), 3: ("NDHWC", "NCDHW", "CDHWN")}[rank]
    layout = f"{order[1]}c{lanes}" if lanes else pick(*order)
    filter_layout = _draw_filter_layout(rng, rank, c // groups, lanes)
    if lanes and (c // groups) % lanes and filter_layout is None:
        filter_layout = "OI" + windows.SPATIAL[rank]
    taps = each(1, 4 if rank < 3 else 3)
    sizes = each(1, 11 if rank < 3 else 7)
    stride = pick(1, 1, 2, 3, each(1, 3))
    dilation = pick(1, 1, 2, each(1, 3))
    pairs = tuple(zip(each(0, 3), each(0, 3), strict=True))
    padding = pick(0, 1, 2, each(0, 3), pairs, pairs, "SAME", "VALID")
    return Geometry(
        batch=pick(1, 2, 3, 4, 0) if rng.random() < 0.3 else pick(1, 2, 3),
        sizes=sizes,
        channels=c,
        filters=k,
        taps=taps,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        mode=pick("cross_correlation", "cross_correlation", "convolution"),
        layout=layout,
        filter_layout=filter_layout,
    )


def _draw_filter_layout(rng: np.random.Generator, rank: int, i: int, lanes: int | None) -> str | None:
    if rng.random() < 0.4:
        return None
    letters = list(("KC" + "TRS"[3 - rank :]) if rng.random() < 0.5 else ("OI" + windows.SPATIAL[rank]))
    rng.shuffle(letters)
    vector = f"c{lanes}" if lanes and i % lanes == 0 and rng.random() < 0.5 else ""
    return "".join(letters) + vector


def random_case(op: str, seed: int, *, dtype: Any = np.float32, integers: int = 0, rank: int | None = None) -> Case:
    """`case` of a `random_geometry`."""
    found = case(op, random_geometry(seed, rank=rank), seed, dtype=dtype, integers=integers)
    origin = f"cases.random_case({op!r}, {seed}, dtype={np.dtype(dtype).name!r}, integers={integers}, rank={rank})"
    return dataclasses.replace(found, origin=origin)


# ---- small things ----------------------------------------------------------------------------------------------------


def _assert_distinct(*sizes: int) -> None:
    large = [size for size in sizes if size > 1]
    assert len(set(large)) == len(large), f"sizes must be pairwise distinct, got {sizes}"


def _keywords(options: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in options.items()) + ")"


def as_jax(case: Case) -> tuple[Any, ...]:
    """The arrays of a call, positional ones first; `jnp.asarray` would compile a program for each shape."""
    return tuple(jax.device_put(a) for a in itertools.chain(case.arrays, case.named.values()))


# ---- the cases for the transformations -------------------------------------------------------------------------------

PLAIN = Geometry(2, (6, 5), 3, 4, (2, 1), stride=(2, 1), padding=((1, 0), (2, 1)), dilation=(1, 2))
GROUPED = Geometry(3, (5, 7), 4, 6, (3, 1), stride=(1, 2), padding=1, groups=2, layout="NCHW")
DEPTHWISE = Geometry(2, (5, 4), 3, 6, (2, 3), groups=3, mode="convolution", padding="SAME")
VECTORISED = Geometry(1, (5, 3), 4, 6, (3, 1), stride=2, padding=1, layout="NCHWc2")
LINE = Geometry(2, (7,), 3, 4, (2,), stride=3, dilation=2, padding=2, layout="CWN")
VOLUME = Geometry(1, (4, 2, 5), 3, 6, (1, 4, 2), stride=(2, 1, 2), padding="SAME", layout="NDHWC")
POINTWISE = Geometry(2, (4, 6), 3, 5, (1, 1))
PATCHIFY = Geometry(2, (7, 4), 6, 5, (3, 2), stride=(3, 2))

GEOMETRIES = {
    "plain": PLAIN,
    "grouped": GROUPED,
    "depthwise": DEPTHWISE,
    "vectorised": VECTORISED,
    "line": LINE,
    "volume": VOLUME,
    "pointwise": POINTWISE,
    "patchify": PATCHIFY,
}


def registry() -> dict[str, Case]:
    """Every op on every geometry, and with an epilogue; on small whole numbers, so that float32 is exact."""
    found = {f"{op}-{name}": case(op, g, 1, integers=2) for op in OPS for name, g in GEOMETRIES.items()}
    blended = {"alpha": 0.5, "beta": -2.0, "prior": True}
    for op in OPS:
        found[f"{op}-blend"] = found[f"{op}-plain"].with_epilogue(2, integers=3, **blended)
    for op in ("conv", "conv_transpose"):
        full = {**blended, "bias": True, "residual": True}
        found[f"{op}-relu"] = found[f"{op}-grouped"].with_epilogue(3, integers=3, activation="relu", **full)
    return found
