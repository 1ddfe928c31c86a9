"""The convolutions' matrix: which calls `jaxdnn verify` makes.

A case is one call of one op by one engine: dtypes, layouts, geometry, epilogue. Its id names it, so that a failing
case can be run alone: the id and the seed are all it takes. `data` draws its arrays, `checks` judges them.
"""

import dataclasses
import functools as ft
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

import jaxdnn as dnn
from jaxdnn._src.cases.case import DTYPES, Call
from jaxdnn._src.conv.cases import bits
from jaxdnn._src.conv.cases.geometries import (
    BEFORE_RELU,
    BLENDS,
    CHANNELS_LAST,
    EPILOGUES,
    FLAT,
    GEOMETRIES,
    INT8_BLENDS,
    LAYOUTS,
    LONG,
    NO_BLEND,
    OUTS,
    WIDE,
    Blend,
    Geometry,
    random_geometry,
)
from jaxdnn._src.core import windows

OPS = ("conv", "conv_dgrad", "conv_wgrad", "conv_bgrad", "conv_transpose")
ROLES = {"conv": "xwy", "conv_dgrad": "ywx", "conv_wgrad": "xyw", "conv_bgrad": "yb", "conv_transpose": "ywx"}
SPECIALS = ("lognormal", "cancelling", "subnormal", "special")  # kinds of data of which a case has one


@dataclasses.dataclass(frozen=True)
class Case(Call):
    """One call of one op by one engine; its fields name it."""

    # A backward bias is a sum that XLA does, without a choice.
    primitive: ClassVar[dict[str, str]] = {op: op for op in OPS[:3]} | {"conv_transpose": "conv_dgrad"}

    variant: str = dataclasses.field(init=False)
    layout: str
    filter_layout: str | None
    geometry: Geometry
    blend: Blend = NO_BLEND
    out: str | None = None
    accumulate: str | None = None

    def __post_init__(self) -> None:
        layout = self.layout if self.filter_layout is None else f"{self.layout}-{self.filter_layout}"
        parts = [layout, self.geometry.name, self.blend.name]
        parts += [f"to-{self.out}" if self.out else "", f"in-{self.accumulate}" if self.accumulate else ""]
        object.__setattr__(self, "variant", "/".join(filter(None, parts)))

    @property
    def x64(self) -> bool:
        return "f64" in (self.dtype, self.out, self.accumulate)

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
        scaled = b.each or b.alpha != 1 or b.beta not in (0, 1)
        return self.dtype == "int8" and not scaled and b.activation in (None, "relu")

    def shape(self, role: str) -> tuple[int, ...]:
        """The shape of the array in this role, as it is stored."""
        g = self.geometry
        if role == "b":
            return (g.filters if self.op != "conv_transpose" else g.channels,)
        if role == "w":
            layout = windows.filter_layout(self.filter_layout, windows.layout(self.layout))
            return _vectorised(layout, layout.shape(g.taps, g.channels // g.groups, g.filters), layout.input)
        layout = windows.layout(self.layout)
        if role == "x" and self.op == "conv_transpose" and g.padding == "SAME":
            sizes = tuple(p * s for p, s in zip(g.outputs, g.window.stride, strict=True))
            plain = layout.shape(g.batch, sizes, g.channels)
        elif role == "x":
            plain = layout.shape(g.batch, g.sizes, g.channels)
        else:
            plain = layout.shape(g.batch, g.outputs, g.filters)
        return _vectorised(layout, plain, layout.channel)

    def along_channel(self, bias: np.ndarray) -> np.ndarray:
        """A bias so shaped that it broadcasts to the result as it is stored."""
        layout = windows.layout(self.layout)
        shape = [1] * layout.ndim
        shape[layout.channel] = bias.size // (layout.vector or 1)
        if layout.vector:
            shape[-1] = layout.vector
        return bias.reshape(shape)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that op and reference share, arrays left out."""
        g, b = self.geometry, self.blend
        given: dict[str, Any] = {"layout": self.layout, "beta": b.beta}
        if not b.each:
            given["alpha"] = b.alpha
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
        spans = zip(w.sizes, w.padding, w.extents, w.stride, strict=True)
        return tuple((size + low + high - extent) % stride for size, (low, high), extent, stride in spans)

    def sizes_argument(self) -> tuple[tuple[int, ...], ...]:
        """The x_shape or w_shape that a backward op takes after its arrays."""
        return (self.shape(self.result_role),) if self.op in ("conv_dgrad", "conv_wgrad") else ()

    def call(self, **choices: Any) -> Callable[..., Any]:
        """The op of its operands, and of the epilogue's arrays by name."""
        op, sizes, given = getattr(dnn, self.op), self.sizes_argument(), self.arguments() | choices
        return lambda *operands, **extras: op(*operands, *sizes, **extras, **given)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of data: "normal" and "integers", "ties" if the output is narrow, and one of the others.

        The case's id selects the last one. Cases with a million predicted outputs have six kinds.
        """
        if self.geometry.name.startswith(bits.PREFIX) and self.dtype != "int8":
            return bits.KINDS
        if self.dtype == "int8":
            return ("normal",) if self.geometry.name == "wrap" else ("normal", "integers")
        special = SPECIALS[zlib.crc32(self.id.encode()) % len(SPECIALS)]
        infinite = ("infinite",) if special == "special" and self.dtype != "e4m3fn" and len(self.roles) > 1 else ()
        return ("normal", "integers", *(("ties",) if self.out_dtype.itemsize <= 2 else ()), special, *infinite)

    def describe(self) -> dict[str, Any]:
        return {
            "out": self.out or self.dtype,
            "layout": self.layout,
            "filter_layout": self.filter_layout,
            "geometry": dataclasses.asdict(self.geometry),
            "blend": dataclasses.asdict(self.blend),
        }


def _vectorised(layout: Any, plain: tuple[int, ...], channel: int) -> tuple[int, ...]:
    if layout.vector is None:
        return plain
    return (*plain[:channel], plain[channel] // layout.vector, *plain[channel + 1 :], layout.vector)


# ---- the matrix ------------------------------------------------------------------------------------------------------


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[Case]:
    """The cases of an extent."""
    return (c for c in _cases(op, engine, extent, seed) if not (op == "conv_bgrad" and c.dtype == "tf32"))


def _cases(op: str, engine: str, extent: str, seed: int) -> Iterator[Case]:
    make = ft.partial(_case, op, engine)
    yield from _quick(op, make)
    more = [_standard(op, make)] if extent != "quick" else []
    more += [_tiled(make)] if extent == "full" or (more and engine in _TILED) else []
    more += [_full(op, make, seed)] if extent == "full" else []
    for part in more:
        if engine in SLOW:
            quick_to_run = (c for c in part if extent == "full" or c.geometry.name != "wide")
            part = itertools.islice(quick_to_run, 0, None, 8)
        yield from part
    if extent == "full" and engine in _PREDICTED:
        yield from bits.cases(op, make)


def _quick(op: str, make: Callable[..., Case]) -> Iterator[Case]:
    yield from (make("f32", g) for g in ("plain", "all", "pointwise", LONG[ROLES[op][-1]]))
    yield from (make("bf16", g) for g in ("all", "depthwise", "pixel", "outer"))
    yield from (make(d, "all") for d in ("f16", "f64", "tf32", "int8", "e4m3fn", "e5m2"))
    yield make("bf16", "plain", blend=BLENDS[1])


# Engines that add one product at a time get every eighth of the cases that are not quick, and the wide one, which takes
# them seconds, in the full extent alone.
SLOW = ("ordered",)
# Engines that cut the work into tiles also get the sizes which these do not divide, in every dtype.
_TILED = ("hopper",)
# Engines whose bits are predicted on a million outputs of every op and dtype.
_PREDICTED = ("hopper",)
# Transposed convolution is served by the engines of backward data, and a backward bias has no window at all: of the
# lists of cases they get every third and every fourth.
_STRIDE = {"conv": 1, "conv_dgrad": 1, "conv_wgrad": 1, "conv_transpose": 3, "conv_bgrad": 4}


def _standard(op: str, make: Callable[..., Case]) -> Iterator[Case]:
    step, long = _STRIDE[op], LONG[ROLES[op][-1]]
    yield from (make("f32", g) for g in FLAT[::step])
    yield from (make("bf16", g) for g in (*FLAT[1 :: 5 * step], long))
    yield make("bf16", "wide")
    yield from (make("f16", g) for g in ("depthwise", "pointwise", long)[::step])
    yield from (make("int8", g) for g in ("depthwise", "pointwise", "empty", long)[::step])
    yield from (make(d, g) for d in ("f64", "tf32", "e4m3fn", "e5m2") for g in ("plain", long)[::step])
    for i, (layout, filters, geometry) in enumerate(LAYOUTS[::step]):
        yield make(("f32", "bf16", "int8", "f16")[i % 4], geometry, layout=layout, filters=filters)
    for i, blend in enumerate(blends(op)):
        yield make(("f32", "bf16", "f32", "e5m2", "f16")[i % 5], ("groups", "flipped")[i % 2], blend=blend)
    yield from (make(d, "all", out=o) for d, o in OUTS[:: 1 if op == "conv" else 2])
    yield make("bf16", "plain", out="f32", accumulate="f64")
    if op in ("conv", "conv_transpose"):
        yield from (make("int8", "groups", blend=b, out=o) for b, o in INT8_BLENDS[::step])
        yield make("bf16", "vector", layout="NCHWc4", blend=EPILOGUES[2])
    if op == "conv":
        yield make("int8", "wrap", out="int32")


def _tiled(make: Callable[..., Case]) -> Iterator[Case]:
    return (make(d, g) for d in DTYPES if d not in ("f64", "int32") for g in WIDE)


def blends(op: str) -> tuple[Blend, ...]:
    further = {"conv": EPILOGUES, "conv_transpose": EPILOGUES, "conv_dgrad": BEFORE_RELU}
    return (*BLENDS, *further.get(op, ()))


def _full(op: str, make: Callable[..., Case], seed: int) -> Iterator[Case]:
    yield from (make(d, g) for d in ("bf16", "f16", "int8") for g in FLAT[::2])
    yield from (make(d, g) for d in ("f64", "tf32", "e4m3fn", "e5m2") for g in FLAT[::3])
    for (layout, filters, geometry), dtype in itertools.product(LAYOUTS, ("f32", "bf16", "f16", "int8")):
        yield make(dtype, geometry, layout=layout, filters=filters)
    for i, (dtype, blend) in enumerate(itertools.product(("f32", "bf16", "f16", "e4m3fn"), blends(op))):
        yield make(dtype, ("all", "1d", "3d-all")[i % 3], blend=blend)
    yield from (make(d, g, out=o) for g in ("depthwise", "1d-all") for d, o in OUTS)
    dtypes = ("f32", "bf16", "f32", "f16", "int8", "f64", "tf32", "e5m2")
    for index in range(64):
        geometry = random_geometry(seed, index)
        layouts = [name for name in windows.LAYOUTS if len(name) == len(geometry.sizes) + 2]
        yield make(dtypes[index % len(dtypes)], geometry, layout=layouts[index % 3])


def _case(
    op: str,
    engine: str,
    dtype: str,
    geometry: str | Geometry,
    *,
    layout: str | None = None,
    filters: str | None = None,
    blend: Blend = NO_BLEND,
    out: str | None = None,
    accumulate: str | None = None,
) -> Case:
    g = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
    layout = layout or CHANNELS_LAST[len(g.sizes)]
    if op == "conv_bgrad":
        filters = None
    return Case(op, engine, dtype, layout, filters, g, blend, out, accumulate)
