"""Random convolutions: ordinary sizes, all settings combined freely, small enough that thousands run in minutes."""

import dataclasses
import functools as ft
import math
from typing import Any

from jaxdnn._src.cases.drawn import Generator, between, channels, pick
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.conv.cases.geometries import (
    BEFORE_RELU,
    BLENDS,
    CHANNELS_LAST,
    EPILOGUES,
    INT8_BLENDS,
    NO_BLEND,
    OUTS,
    Geometry,
)
from jaxdnn._src.core import windows
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.branches import Branch

# Products of a result, most often and now and then: a call takes a tenth of a second, or a second.
PRODUCTS, MANY = 1 << 26, 1 << 29
ELEMENTS = 1 << 23  # of any array
DTYPES = {
    "hopper": {"bf16": 45, "f16": 20, "int8": 10, "tf32": 8, "e4m3fn": 7, "e5m2": 5, "f32": 5},
    "xla": {"f32": 30, "bf16": 25, "f16": 12, "int8": 10, "f64": 8, "tf32": 5, "e4m3fn": 5, "e5m2": 5},
    "ordered": {"bf16": 50, "f16": 30, "e4m3fn": 10, "e5m2": 10},
}
# What a geometry is drawn as: kernels treat few input channels, narrow groups and single taps in ways of their own.
# "skipped": strides beyond the window; "wide": depthwise, of so many taps that a tile has half of the channels; "small
# images": depthwise, a tile holds a whole image.
SHAPES = {
    "any": 35,
    "layer": 20,
    "pointwise": 10,
    "few channels": 8,
    "few results": 4,
    "narrow groups": 16,
    "groups": 8,
    "taps": 4,
    "narrow layer": 4,
    "skipped": 2,
    "wide": 1,
    "small images": 3,
}


DEPTHWISE = ("narrow groups", "wide", "small images")


def draw(op: str, engine: str, rng: Generator, name: str, *, lead: str = "") -> Case:
    """A convolution for an op and an engine, of a kind of `SHAPES` if it is given; the engine may refuse it."""
    case = uncropped(op, engine, rng, name, lead=lead)
    if lead or rng.random() >= 0.05:
        return case
    ends = [[between(rng, 1, 3) if rng.random() < 0.5 else 0 for _ in range(2)] for _ in case.geometry.sizes]
    return dataclasses.replace(case, geometry=_cropped(case.geometry, ends))


def _cropped(g: Geometry, ends: list[list[int]]) -> Geometry:
    """The same convolution of images that are longer by so many elements at the ends that are not padded."""
    cuts = [
        [0 if pad else end for pad, end in zip(*axis, strict=True)] for axis in zip(g.window.padding, ends, strict=True)
    ]
    sizes = tuple(size + sum(cut) for size, cut in zip(g.sizes, cuts, strict=True))
    padding = tuple((low - a, high - b) for (low, high), (a, b) in zip(g.window.padding, cuts, strict=True))
    return dataclasses.replace(g, sizes=sizes, padding=padding)


def uncropped(op: str, engine: str, rng: Generator, name: str, *, lead: str = "") -> Case:
    """The same without negative padding."""
    dtype = pick(rng, DTYPES[engine])
    if op == "conv_bgrad" and dtype == "tf32":
        dtype = "f32"
    kind = str(lead or pick(rng, SHAPES))
    if dtype == "f32" and engine == "hopper" and not lead:
        kind = "narrow groups"  # what its kernels serve in float32
    rank = 2 if kind in DEPTHWISE[1:] else int(pick(rng, {1: 20, 2: 55, 3: 25 if kind != "narrow groups" else 0}))
    layout, filters = _layouts(engine, rank, rng, kind)
    vector = windows.layout(layout).vector or 1
    geometry = _small(_geometry(kind, rank, rng, name, vector), rng, vector)
    case = Case(op, engine, dtype, layout, None if op == "conv_bgrad" else filters, geometry)
    if kind in DEPTHWISE and engine == "hopper" and case.dtype != "int8":
        has_bias = op in ("conv", "conv_transpose") and rng.random() < 0.5  # the one epilogue of these kernels
        return dataclasses.replace(case, blend=EPILOGUES[0] if has_bias else NO_BLEND)
    return _with_epilogue(case, rng, plain=bool(lead))


# The kernel, what is decided, its values, the kind of geometry that leads there, by which ops.
_LEADS = (
    ("pipeline", "blank", ("yes",), "skipped", ("conv_dgrad", "conv_transpose")),
    ("pipeline", "window", ("yes",), "few channels", ("conv",)),
    ("pipeline", "masked window", ("yes",), "few channels", ("conv",)),
    ("pipeline", "unroll", ("yes",), "narrow layer", ("conv", "conv_dgrad", "conv_transpose")),
    ("pipeline", "resident", ("yes",), "narrow layer", ("conv", "conv_dgrad", "conv_transpose")),
    ("pipeline", "swizzle", ("32", "64"), "narrow layer", ("conv", "conv_dgrad", "conv_transpose")),
    ("fprop", "copies", ("cells", "folded taps"), "few channels", ("conv",)),
    ("dgrad", "copies", ("joined phases",), "few channels", ("conv_dgrad",)),
    ("wgrad", "direct", ("2 blocks", "4 blocks"), "layer", ("conv_wgrad",)),
    ("wgrad", "rows", ("taps",), "layer", ("conv_wgrad",)),
    ("wgrad", "halo", ("yes",), "layer", ("conv_wgrad",)),
    ("wgrad", "groups", ("whole", "together"), "groups", ("conv_wgrad",)),
    ("depthwise walk", "channels", ("16",), "wide", ("conv", "conv_dgrad", "conv_transpose")),
    ("depthwise walk", "stages", ("2",), "small images", ("conv", "conv_dgrad", "conv_transpose")),
    ("depthwise walk", "tail of positions", ("no",), "small images", ("conv", "conv_dgrad", "conv_transpose")),
    ("depthwise filter", "tail of positions", ("no",), "small images", ("conv_wgrad",)),
    ("depthwise filter", "channels", ("64",), "small images", ("conv_wgrad",)),
    ("depthwise filter", "stages", ("3",), "small images", ("conv_wgrad",)),
)


def _leads() -> dict[tuple[str, Branch], Any]:
    """Kinds of geometries that lead to branches which others seldom take, see `Family.leads`."""
    ops = {"depthwise walk": ("conv", "conv_dgrad", "conv_transpose"), "depthwise filter": ("conv_wgrad",)}
    narrow = ft.partial(draw, lead="narrow groups")
    found = {(op, branch): narrow for branch in branches.every() for op in ops.get(branch[0], ())}
    for kernel, what, values, kind, taken_by in _LEADS:
        found |= {(op, (kernel, what, v)): ft.partial(draw, lead=kind) for v in values for op in taken_by}
    return found


LEADS = _leads()


def _layouts(engine: str, rank: int, rng: Generator, kind: str) -> tuple[str, str | None]:
    last = CHANNELS_LAST[rank]
    if engine == "hopper":
        outer = rng.random() < 0.35 and kind not in DEPTHWISE
        return last, "O" + "DHW"[3 - rank :] + "I" if outer else None
    first = "NC" + "DHW"[3 - rank :]
    layout = str(rng.choice([*(n for n in windows.LAYOUTS if len(n) == rank + 2), first + "c4", first + "c32"]))
    if windows.layout(layout).vector is None and rng.random() < 0.4:
        letters = list("OI" + "DHW"[3 - rank :])
        rng.shuffle(letters)
        return layout, "".join(letters)
    return layout, None


def _geometry(kind: str, rank: int, rng: Generator, name: str, vector: int) -> Geometry:
    if kind == "skipped":
        return _skipped(rank, rng, name, vector)
    if kind == "wide" and vector == 1:
        return _wide(rng, name)
    if kind == "small images" and vector == 1:
        return _small_images(rng, name)
    c, k, groups = channels(rng), channels(rng), 1
    if kind == "few channels":
        c = int(rng.integers(1, 5 if rng.random() < 0.6 else 17))
    elif kind == "few results":
        k = int(rng.integers(1, 17))
    elif kind == "narrow layer":
        c, k = (8 * between(rng, 1, 8) for _ in range(2))
    elif kind == "narrow groups":
        width = int(pick(rng, {1: 6, 2: 2, 4: 2, 8: 2}))
        groups = max(1, channels(rng, 2560 if rng.random() < 0.2 else 1024) // width)
        c = k = groups * width
    elif kind == "groups":
        groups = int(rng.integers(2, 9))
        c, k = groups * _group_width(rng), groups * _group_width(rng)
    c, k = (-(-n // (vector * groups)) * vector * groups for n in (c, k))
    longest = {"pointwise": 1, "taps": 31 if rank == 1 else 11}.get(kind, 7 if rank < 3 else 5)
    longest = 31 if kind == "narrow groups" and rng.random() < 0.15 else longest
    axes = [_of_layer(rng) if kind in ("layer", "narrow layer") else _axis(longest, rng) for _ in range(rank)]
    sizes, taps, strides, pads, dilations = map(tuple, zip(*axes, strict=True))
    padding: Any = pads
    if kind == "pointwise" and rng.random() < 0.6:
        strides, padding = (1,) * rank, 0
    elif rng.random() < 0.15:
        padding = "SAME"
    mode = "convolution" if rng.random() < 0.15 else "cross_correlation"
    batch = between(rng, 1, 64)
    return Geometry(name, batch, sizes, c, k, taps, strides, padding, dilations, groups, mode)


def _skipped(rank: int, rng: Generator, name: str, vector: int) -> Geometry:
    """Strides longer than the window's reach, so that pixels of the input meet no tap: their gradient is zero."""
    strides = tuple(int(v) for v in rng.integers(2, 5, rank))
    taps = tuple(int(rng.integers(1, s)) for s in strides)
    sizes = tuple(s * int(2 ** rng.integers(0, 5)) for s in strides)
    c, k = (vector * (-(-64 // vector)) * between(rng, 1, 8) for _ in range(2))
    return Geometry(name, between(rng, 1, 16), sizes, c, k, taps, strides, 0)


def _wide(rng: Generator, name: str) -> Geometry:
    """Depthwise windows of 25 to 31 taps a side."""
    sizes, taps = (tuple(int(v) for v in rng.integers(low, high, 2)) for low, high in ((28, 33), (25, 32)))
    padding = tuple((r // 2, r - 1 - r // 2) for r in taps)
    c = int(rng.choice([32, 40]))
    return Geometry(name, 1, sizes, c, c, taps, (1, 1), padding, groups=c)


def _small_images(rng: Generator, name: str) -> Geometry:
    """Depthwise, many images of one tile each, of multiples of 64 channels."""
    sizes = int(rng.choice([4, 6, 7, 8])), int(rng.choice([4, 7, 8, 12]))
    c = 64 * between(rng, 1, min(1800 // math.prod(sizes), 40))
    return Geometry(name, 64, sizes, c, c, (3, 3), (1, 1), 1, groups=c)


def _group_width(rng: Generator) -> int:
    """Channels of a group: what fills a swizzle, or any number."""
    return int(pick(rng, {16: 3, 32: 3, 64: 4, 128: 3, 192: 1, 16 * between(rng, 1, 12): 2, between(rng, 1, 60): 2}))


def _of_layer(rng: Generator) -> tuple[int, int, int, tuple[int, int], int]:
    """An axis as most layers of networks have it: three taps, stride 1, padding 1."""
    return between(rng, 6, 40), int(pick(rng, {1: 1, 2: 1, 3: 8, 4: 1})), 1, (1, 1), 1


def _axis(longest: int, rng: Generator) -> tuple[int, int, int, tuple[int, int], int]:
    """Size, taps, stride, padding and dilation of an axis on which a window fits."""
    r = min(int(pick(rng, {1: 3, 2: 2, 3: 8, 4: 1, 5: 2, 7: 1})), longest)
    if longest > 7 and rng.random() < 0.7:
        r = longest if rng.random() < 0.3 else int(rng.integers(1, longest + 1))
    u = int(pick(rng, {1: 60, 2: 28, 3: 8, 4: 4}))
    d = int(pick(rng, {1: 80, 2: 12, 3: 5, 5: 3}))
    reach = d * (r - 1)
    same = (reach // 2, reach - reach // 2)
    free = tuple(int(v) for v in rng.integers(0, min(reach + 2, 9), 2))
    low, high = pick(rng, {same: 5, (0, 0): 2, free: 4})
    size = between(rng, 1, 40)
    return max(size, reach + 1 - low - high, 1), r, u, (low, high), d


def _small(g: Geometry, rng: Generator, vector: int) -> Geometry:
    """The geometry with fewer images, shorter axes, fewer channels, then taps, until its products are few enough."""
    most = MANY if rng.random() < 0.03 else PRODUCTS

    def work(g: Geometry) -> float:
        pixels = g.batch * max(math.prod(g.outputs), 1)
        arrays = g.batch * math.prod(g.sizes) * g.channels, pixels * g.filters, _filter_size(g)
        return max(pixels * _filter_size(g) / most, *(n / ELEMENTS for n in arrays))

    while work(g) > 1:
        sizes = tuple(max((n + 1) // 2, _least(g, axis)) for axis, n in enumerate(g.sizes))
        fewer = [_fewer(n, g.groups, vector) for n in (g.channels, g.filters)]
        if g.batch > 1 and (rng.random() < 0.6 or sizes == g.sizes):
            g = dataclasses.replace(g, batch=g.batch // 2)
        elif sizes != g.sizes and (rng.random() < 0.5 or fewer == [g.channels, g.filters]):
            g = dataclasses.replace(g, sizes=sizes)
        elif fewer != [g.channels, g.filters]:
            g = dataclasses.replace(g, channels=fewer[0], filters=fewer[1])
        elif max(g.taps) > 1 and sizes == g.sizes and g.batch == 1:  # without padding, where the window has to fit
            g = dataclasses.replace(g, taps=tuple((r + 1) // 2 for r in g.taps), padding=0)
            g = dataclasses.replace(g, sizes=tuple(max(n, _least(g, axis)) for axis, n in enumerate(g.sizes)))
        elif sizes == g.sizes and g.batch == 1:
            return g
    return g


def _filter_size(g: Geometry) -> int:
    return math.prod(g.taps) * g.channels // g.groups * g.filters


def _least(g: Geometry, axis: int) -> int:
    """The shortest axis on which the window fits."""
    w = g.window
    low, high = w.padding[axis] if not isinstance(g.padding, str) else (0, 0)
    return max(1, (g.taps[axis] - 1) * w.dilation[axis] + 1 - low - high)


def _fewer(n: int, groups: int, vector: int) -> int:
    """About half of the channels, in whole vectors and groups of eights if they were."""
    unit = vector * groups
    unit *= 8 if n % (8 * unit) == 0 else 1
    return max(unit, n // 2 // unit * unit) if n > unit else n


def _with_epilogue(case: Case, rng: Generator, *, plain: bool) -> Case:
    """The case with another result type, a blend, an epilogue, or none."""
    if case.dtype == "int8" and (case.engine == "hopper" or rng.random() < 0.5):
        return dataclasses.replace(case, out="int32")
    choice = 1.0 if plain else rng.random()
    if case.op in ("conv", "conv_transpose") and choice < 0.25:
        if case.dtype == "int8":
            blend, out = INT8_BLENDS[int(rng.integers(len(INT8_BLENDS)))]
            return dataclasses.replace(case, blend=blend, out=out)
        return dataclasses.replace(case, blend=EPILOGUES[int(rng.integers(len(EPILOGUES)))])
    if choice < 0.4:
        blends = (*BLENDS, *BEFORE_RELU) if case.op == "conv_dgrad" else BLENDS
        return dataclasses.replace(case, blend=blends[int(rng.integers(len(blends)))])
    outs = [out for dtype, out in OUTS if dtype == case.dtype]
    if outs and choice < 0.55:
        return dataclasses.replace(case, out=str(rng.choice(outs)))
    return dataclasses.replace(case, blend=NO_BLEND)
