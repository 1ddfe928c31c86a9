"""The only place that normalises layouts, strides, padding and dilation.

Letters: N batch, C channels, [D, H,] W the spatial axes of an input or output;
O (cuDNN: K) output channels, I (cuDNN: C) input channels of one group, [D, H,] W (cuDNN: [T, R,] S) a filter's taps.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from jaxdnn._src.core import checks

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
LAYOUTS = ("NWC", "NCW", "CWN", "NHWC", "NCHW", "CHWN", "NDHWC", "NCDHW", "CDHWN")
_CUDNN_FILTER_LETTERS = str.maketrans("KCTRS", "OIDHW")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The axes of an input or output, by letter; `vector` channels are innermost if it is not None (NC/32HW32)."""

    axes: str
    vector: int | None = None

    @property
    def name(self) -> str:
        return self.axes + (f"c{self.vector}" if self.vector else "")

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.axes) - 2

    @property
    def ndim(self) -> int:
        """The number of dimensions of an array, one of channel vectors included."""
        return len(self.axes) + (self.vector is not None)

    @property
    def batch(self) -> int:
        return self.axes.index("N")

    @property
    def channel(self) -> int:
        return self.axes.index("C")

    @property
    def spatial(self) -> tuple[int, ...]:
        return tuple(self.axes.index(letter) for letter in SPATIAL[self.rank])

    @property
    def channels_last(self) -> bool:
        return self.axes.endswith("C") and self.vector is None

    def of_rank(self, rank: int) -> str | None:
        """The layout of so many spatial axes that has its channels where this one has them; None if there is none."""
        return LAYOUTS[3 * (rank - 1) + LAYOUTS.index(self.axes) % 3] if rank in SPATIAL else None

    @property
    def other(self) -> "Layout | None":
        """The layout that is commonly meant in place of this one: channels first for last, or last for others."""
        if self.vector is not None:
            return None
        return Layout(("NC" + SPATIAL[self.rank]) if self.channels_last else f"N{SPATIAL[self.rank]}C")

    def shape(self, n: int, spatial: Sequence[int], c: int) -> tuple[int, ...]:
        """The shape of an array of this layout (of its plain form, if it is vectorised)."""
        sizes = {"N": n, "C": c, **dict(zip(SPATIAL[self.rank], spatial, strict=True))}
        return tuple(sizes[letter] for letter in self.axes)


@dataclasses.dataclass(frozen=True)
class FilterLayout:
    """The axes of a filter in JAX's letters; `vector` input channels are innermost if it is not None.

    `name` is what the user calls it, in cuDNN's letters maybe.
    """

    axes: str
    vector: int | None = None
    name: str = dataclasses.field(default="", compare=False)

    @property
    def ndim(self) -> int:
        """The number of dimensions of an array, one of channel vectors included."""
        return len(self.axes) + (self.vector is not None)

    @property
    def output(self) -> int:
        return self.axes.index("O")

    @property
    def input(self) -> int:
        return self.axes.index("I")

    @property
    def spatial(self) -> tuple[int, ...]:
        return tuple(self.axes.index(letter) for letter in SPATIAL[len(self.axes) - 2])

    def shape(self, spatial: Sequence[int], i: int, o: int) -> tuple[int, ...]:
        """The shape of a filter of this layout (of its plain form, if it is vectorised)."""
        sizes = {"I": i, "O": o, **dict(zip(SPATIAL[len(self.axes) - 2], spatial, strict=True))}
        return tuple(sizes[letter] for letter in self.axes)


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of taps and how it moves over an array; tuples have an element for each spatial axis.

    Attributes:
      sizes: of the array.
      taps: of the window.
      padding: (low, high) of the array.
    """

    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.taps)

    @property
    def extents(self) -> tuple[int, ...]:
        """The span of the window in elements of the array."""
        return tuple((r - 1) * d + 1 for r, d in zip(self.taps, self.dilation, strict=True))

    @property
    def out(self) -> tuple[int, ...]:
        """The number of positions of the window: ⌊(size + low + high - extent) / stride⌋ + 1 along every axis."""
        axes = zip(self.sizes, self.extents, self.stride, self.padding, strict=True)
        return tuple((x + low + high - extent) // s + 1 for x, extent, s, (low, high) in axes)


def _letters_and_lanes(value: Any) -> re.Match[str] | None:
    return re.fullmatch(r"([A-Z]+)(?:c([1-9][0-9]*))?", value) if isinstance(value, str) else None


def layout(value: Any, name: str = "layout") -> Layout:
    """Reads a layout such as "NHWC", "NCW", "CDHWN" or the vectorised "NCHWc32"."""
    match = _letters_and_lanes(value)
    if match and match[1] in LAYOUTS and (match[2] is None or match[1].startswith("NC")):
        return Layout(match[1], int(match[2]) if match[2] else None)
    meant = checks.did_you_mean(value, (*LAYOUTS, "NCWc32", "NCHWc32", "NCDHWc32"))
    raise ValueError(
        f"`{name}` must be one of {', '.join(LAYOUTS)}, or a vectorised NCWc32, NCHWc32, NCDHWc32 "
        f"(any number of channels for 32), got {checks.shown(value)}{meant}."
    )


def require_shape(name: str, shape: Sequence[Any], layout: Layout | FilterLayout, why: str = "layout") -> None:
    """Checks that a shape has as many dimensions as a layout, and its channel vectors innermost."""
    if len(shape) != layout.ndim:
        fitting = layout.of_rank(len(shape) - 2) if isinstance(layout, Layout) and layout.vector is None else None
        hints = [f"as {fitting} has"] if fitting else []
        if isinstance(layout, Layout) and len(shape) == layout.ndim - 1:
            hints.append(_of_one_example(name, layout))
        wanted, hint = f"{layout.ndim} dimensions", f" ({'; '.join(hints)})" if hints else ""
    elif layout.vector is not None and shape[-1] != layout.vector:
        wanted, hint = f"{layout.vector} channels innermost", ""
    else:
        return
    raise ValueError(f"`{name}` must have {wanted} for {why} {layout.name}, got shape {tuple(shape)}{hint}.")


def _of_one_example(name: str, layout: Layout) -> str:
    """How an array, or a shape, of one example becomes that of a batch."""
    last = layout.batch == layout.ndim - 1
    if name.endswith("_shape"):
        return f"one example has the shape `(*{name}, 1)`" if last else f"one example has the shape `(1, *{name})`"
    return f"one example is a batch as `{name}[{'..., ' if last else ''}None]`"


def in_other_layout(layout: Layout, name: str, shape: Sequence[Any], channels: Any) -> str:
    """What an error says where an array has another number of channels, if it has this one in the other layout."""
    other = layout.other
    if other is None or shape[layout.channel] == channels or shape[other.channel] != channels:
        return ""
    return f" (in layout {other.name} {name} has {channels})"


def in_other_filter_layout(layout: FilterLayout, shape: Sequence[Any], channels: Any) -> str:
    """What an error says of a filter that does not fit, if it has so many input channels, and fewer taps, in the layout
    of PyTorch's and cuDNN's filters or in that of JAX's."""
    spatial = "".join(axis for axis in layout.axes if axis not in "OI")
    taps = lambda axes: math.prod(shape[axes.index(axis)] for axis in spatial)
    for axes in (f"OI{spatial}", f"{spatial}IO"):
        if shape[axes.index("I")] == channels and taps(axes) < taps(layout.axes):
            return f" (with filter_layout={axes!r} w has {channels} input channels)"
    return ""


def filter_layout(value: Any, of: Layout) -> FilterLayout:
    """Reads a filter layout in cuDNN's (K C [T R] S) or JAX's (O I [D H] W) letters; None follows the layout `of` x."""
    spatial = SPATIAL[of.rank]
    if value is None:
        value = (spatial + "IO" if of.channels_last else "OI" + spatial) + (f"c{of.vector}" if of.vector else "")
    match = _letters_and_lanes(value)
    if match:
        cudnn = set(match[1]) <= set("KCTRS")
        axes = match[1].translate(_CUDNN_FILTER_LETTERS) if cudnn else match[1]
        if sorted(axes) == sorted("OI" + spatial):
            return FilterLayout(axes, int(match[2]) if match[2] else None, value)
    taps = {1: "S", 2: "RS", 3: "TRS"}[of.rank]
    usual = (f"OI{spatial}", f"{spatial}IO", f"O{spatial}I", f"KC{taps}", f"{taps}CK", f"K{taps}C")
    meant = checks.did_you_mean(value, usual)
    raise ValueError(
        f"`filter_layout` must be the letters KC{taps} (cuDNN) or OI{spatial} (JAX) in the order of the filter's axes "
        f"for layout {of.name}, with c32 or so behind if vectorised, got {checks.shown(value)}{meant}."
    )


def window(
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    sizes: Sequence[int],
    taps: Sequence[int],
    negative: bool = False,
) -> Window:
    """Reads `stride`, `padding` and `dilation` for an input of these spatial sizes and a filter of these taps.

    negative: whether padding may be, see `cropping`.
    """
    rank = len(sizes)
    strides = checks.integers("stride", stride, rank, minimum=1)
    dilations = checks.integers("dilation", dilation, rank, minimum=1)
    extents = tuple((r - 1) * d + 1 for r, d in zip(taps, dilations, strict=True))
    if isinstance(padding, str):
        pads = _named_padding(padding, sizes, extents, strides)
    else:
        pads = _explicit_padding(padding, rank, -checks.LARGEST if negative else 0)
    return Window(tuple(sizes), tuple(taps), strides, pads, dilations)


def _named_padding(
    padding: str, sizes: Sequence[int], extents: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    checks.choice("padding", padding, ("SAME", "SAME_LOWER", "VALID"))
    if padding == "VALID":
        return ((0, 0),) * len(sizes)
    # ceil(size / stride) outputs; what is needed is split evenly, the odd element goes to the high or the low side.
    needed = [
        max((-(-size // stride) - 1) * stride + extent - size, 0)
        for size, extent, stride in zip(sizes, extents, strides, strict=True)
    ]
    pads = tuple((total // 2, total - total // 2) for total in needed)
    return pads if padding == "SAME" else tuple((high, low) for low, high in pads)


def _explicit_padding(padding: Any, rank: int, minimum: int) -> tuple[tuple[int, int], ...]:
    if not checks.is_sequence(padding):
        padding = (padding,) * rank
    if len(padding) != rank:
        raise ValueError(
            f"`padding` must be an integer, {rank} integers or {rank} (low, high) pairs, one per spatial axis, "
            f'or "SAME", "SAME_LOWER" or "VALID", got {checks.shown(padding)}.'
        )
    pairs = (checks.integers("padding", axis, 2, minimum=minimum) for axis in padding)
    return tuple((low, high) for low, high in pairs)
