"""The poolings: their matrix, their bounds, and what the determinism procedures run on.

Maxima are exact. The error bound of an average counts the roundings of its tree of additions and two more, those of
1 / count and of the product. That of a gradient counts its additions and the same two; that of a norm half of its sum's
roundings, and that of the root. Each bound is relative to what the formula gives for absolute values.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import Accumulation

OPS = ("pool", "pool_dgrad", "global_pool", "adaptive_pool")
MODES = ("max", "average", "average_exclude_padding", "lp")
LAYOUTS = {1: ("NWC", "NCW", "CWN"), 2: ("NHWC", "NCHW", "CHWN", "NCHWc4"), 3: ("NDHWC", "NCDHW", "CDHWN")}
DTYPES = {"quick": ("f32", "bf16"), "standard": ("f32", "bf16", "f16", "int8"), "full": ("f64",)}
CHANNELS = 16
# Sizes of the spatial axes, and the window over them.
WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "2x2": ((9, 8), {}),
    "3x3 step 2": ((15, 12), {"window": 3, "stride": 2, "padding": 1}),
    "3x3 dilated": ((11, 13), {"window": 3, "stride": 1, "dilation": (2, 3), "padding": (2, 3)}),
    "ceil": ((7, 10), {"window": (3, 4), "stride": (2, 3), "padding": (1, 2), "ceil_mode": True}),
    "same": ((7, 9), {"window": (4, 3), "stride": (3, 1), "padding": "SAME"}),
    "line": ((21,), {"window": 5, "stride": 2, "padding": ((2, 1),)}),
    "volume": ((5, 4, 6), {"window": (3, 2, 1), "stride": (2, 1, 3), "padding": (1, 1, 0)}),
    "long": ((25, 9), {"window": (11, 5), "stride": (2, 1), "padding": (5, 2)}),
    "steps over elements": ((13, 10), {"window": (2, 1), "stride": (3, 4)}),
    "global": ((13, 11), {"window": (13, 11)}),
    "cropped": ((13, 14), {"window": (3, 4), "stride": (2, 3), "padding": ((-2, 1), (1, -3)), "ceil_mode": True}),
}
# The same for the ops that choose their windows by themselves.
CHOSEN: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "global_pool": ("all", (13, 11), {}),
    "adaptive_pool": ("5 x 4", (13, 11), {"output_sizes": (5, 4)}),
}
QUICK = ("3x3 step 2", "ceil")
DIVISOR = 5  # of sums, in place of their counts


@dataclasses.dataclass(frozen=True)
class PoolCase(Case):
    """A pooling or its backward pass; variant: mode, layout and window."""

    mode: str = "max"
    layout: str = "NHWC"
    window: str = "2x2"
    indices: bool = False
    batch: int = 5
    channels: int = CHANNELS
    given: tuple[tuple[int, ...], tuple[tuple[str, Any], ...]] | None = None  # sizes and options, if not a window's

    @property
    def primitive(self) -> dict[str, str]:  # type: ignore[override]  (which one it is depends on the mode)
        name = "pool_max" if self.mode == "max" else "pool_average"
        return {op: name + ("_dgrad" if op == "pool_dgrad" else "_indices" * self.indices) for op in OPS}

    @property
    def options(self) -> dict[str, Any]:
        return {**self._geometry[1], "mode": self.mode, "layout": self.layout}

    @property
    def _geometry(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The sizes of the spatial axes, and what decides the windows."""
        if self.given is not None:
            return self.given[0], dict(self.given[1])
        return CHOSEN[self.op][1:] if self.op in CHOSEN else WINDOWS[self.window]

    @property
    def forward(self) -> bool:
        return self.op != "pool_dgrad"

    def call(self, **choices: Any) -> Callable[..., Any]:
        function = getattr(dnn, self.op)
        if self.forward:
            return lambda x: function(x, **self.options, return_indices=self.indices, **choices)
        return lambda dy, x: function(dy, x, **self.options, **choices)

    def kinds(self) -> tuple[str, ...]:
        return (
            ("normal", "integers") if self.mode == "lp" or self.dtype == "int8" else ("normal", "integers", "special")
        )

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x = self._drawn(kind, rng, self.shape(self._geometry[0]))
        if self.forward:
            return (x,)
        y = reference.pool(np.zeros(x.shape, np.float32), **self.options)
        return self._drawn(kind, rng, y.shape), self._drawn(
            "integers" if kind == "integers" else "normal", rng, x.shape
        )

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an image of these spatial sizes."""
        return drawn.laid_out(self.layout, self.batch, self.channels, sizes)

    def _drawn(self, kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if self.dtype == "int8":
            return rng.integers(-128, 128, shape).astype(np.int8)
        values = rng.integers(-4, 5, shape).astype(np.float64) if kind == "integers" else rng.normal(size=shape)
        if kind == "special":
            for value, share in ((np.nan, 0.02), (np.inf, 0.01), (-np.inf, 0.1), (-0.0, 0.05)):
                values = np.where(rng.random(shape) < share, value, values)
        return values.astype(self.in_dtype)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        with np.errstate(invalid="ignore"):
            value, magnitude = (self._golden(operands, size) for size in (lambda a: a, np.abs))
            indices = value[1:] if self.indices else ()
            value, magnitude = (v[0] if self.indices else v for v in (value, magnitude))
            error = self._relative(accumulation) * magnitude
        if accumulation.flush and self.mode != "max":
            error = error + self._taps * 2.0 ** (-60 if self.mode == "lp" else -126)
        # A few numbers of eight or eleven bits over small counts: many of these fractions are ties.
        generic = kind == "normal" and (self.mode == "lp" or self.in_dtype.itemsize > 2)
        first = Expected(value, 0.0 if self._exact else error, self.in_dtype, generic=generic)
        return (first, *(Expected(i, 0.0, np.int32, "indices") for i in indices))

    def _golden(self, operands: tuple[np.ndarray, ...], size: Callable[[np.ndarray], np.ndarray]) -> Any:
        """The definition, of the operands or of their absolute values (a maximum stays where it is)."""
        if self.forward:
            x = operands[0] if self._exact else size(operands[0].astype(np.float64))
            return getattr(reference, self.op)(x, **self._all)
        dy, x = operands
        return reference.pool_dgrad(size(dy.astype(np.float64)), size(x) if self.mode == "lp" else x, **self.options)

    @property
    def _all(self) -> dict[str, Any]:
        return {**self.options, "return_indices": self.indices}

    @property
    def _taps(self) -> int:
        sizes, options = self._geometry
        if self.op in CHOSEN:  # at most: an adaptive window may begin and end within an element
            return math.prod(
                min(-(-n // options["output_sizes"][i]) + 1, n) if options else n for i, n in enumerate(sizes)
            )
        return int(np.prod(np.broadcast_to(options.get("window", 2), len(sizes))))

    @property
    def _exact(self) -> bool:
        return self.forward and (self.mode == "max" or self.dtype == "int8")

    def _relative(self, accumulation: Accumulation) -> float:
        """How many roundings of the accumulator a result may be off by, of the formula's for absolute values."""
        sizes, options = self._geometry
        windows = np.broadcast_to(options.get("window", 2), len(sizes))
        # A tree for each of up to three axes; where no level fixes it, XLA's order for a window as long as its axis.
        by_xla = self.op in CHOSEN or bool(np.any(windows >= sizes))
        depth = self._taps if by_xla else math.ceil(math.log2(self._taps)) + 3
        steps = {"max": self._taps, "lp": 2 * depth + 12}.get(self.mode, depth + 2)
        steps *= 2 if self.dtype == "f64" else 1  # the definition's own
        return tolerance.FORMATS["float64" if self.dtype == "f64" else accumulation.format].growth(steps)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        if self.forward:
            return plain.as_tuple(getattr(reference, self.op)(*operands, **self._all, arithmetic="ordered"))
        return (reference.pool_dgrad(*operands, **self.options, arithmetic="ordered"),)

    def describe(self) -> dict[str, Any]:
        return {"mode": self.mode, "layout": self.layout, "sizes": self._geometry[0], **self._geometry[1]}


def engines_of(op: str) -> tuple[str, ...]:
    """The engines of the poolings, which are the same for all of them; of those that bind several calls, XLA's."""
    if op in CHOSEN:
        return ("xla",)
    return plain.engines_of(PoolCase("pool", "xla", "f32", ""), op)  # type: ignore[arg-type]  (its primitive is asked)


def _case(op: str, engine: str, dtype: str, mode: str, layout: str, window: str, indices: bool = False) -> PoolCase:
    variant = "/".join((mode + "-indices" * indices, layout, window.replace(" ", "-")))
    return PoolCase(op, engine, dtype, variant, mode, layout, window, indices)


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[PoolCase]:
    """Every mode over a few windows; from "standard" on all windows in bf16, in "full" in every type and layout.

    Below "full" the layouts of a window's rank take turns, but for an engine that serves channels last only.
    """
    if op in CHOSEN:
        if engine == "xla":
            yield from _chosen(op, engine, extent)
        return
    for dtype in up_to(extent, DTYPES):
        windows = WINDOWS if extent == "full" or (extent == "standard" and dtype == "bf16") else QUICK
        for window in windows:
            layouts = LAYOUTS[len(WINDOWS[window][0])]
            for number, mode in enumerate(MODES):
                if dtype == "int8" and (op == "pool_dgrad" or mode == "lp"):
                    continue
                turn = (number + tuple(WINDOWS).index(window)) % len(layouts) if engine == "xla" else 0
                for layout in layouts if extent == "full" else layouts[turn : turn + 1]:
                    yield _case(op, engine, dtype, mode, layout, window)
                if op == "pool" and mode == "max":
                    yield _case(op, engine, dtype, mode, layouts[0], window, indices=True)
                if mode == "average" and window == "ceil" and dtype == "bf16":
                    yield _divided(_case(op, engine, dtype, mode, layouts[0], window))


def _divided(case: PoolCase) -> PoolCase:
    """The same cases with a divisor that is given."""
    sizes, options = WINDOWS[case.window]
    given = (sizes, tuple({**options, "divisor": DIVISOR}.items()))
    return dataclasses.replace(case, variant=f"{case.variant}/divisor", given=given)


def _chosen(op: str, engine: str, extent: str) -> Iterator[PoolCase]:
    """An op that derives its windows from the sizes: its average, and in "full" every mode and type."""
    if extent != "full":
        yield _case(op, engine, "bf16", "average", "NHWC", CHOSEN[op][0])
        return
    for dtype in up_to("full", DTYPES):
        for mode in ("average", "max", "lp")[: 2 if dtype == "int8" else 3]:
            yield _case(op, engine, dtype, mode, "NHWC", CHOSEN[op][0])
            if mode == "max":
                yield _case(op, engine, dtype, mode, "NCHW", CHOSEN[op][0], indices=True)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """The maximum and the average, of a batch that eight devices divide; below "full" f16 and int8 take one in turn."""
    modes = ("max", "average")
    wanted = [("bf16", mode) for mode in modes]
    if extent != "quick":
        wanted = [("f32", modes[0]), ("int8", modes[1]), ("f16", modes[0]), *wanted, ("f32", modes[1])]
    if extent == "full":
        wanted += [("int8", modes[0]), ("f16", modes[1])]
    for dtype, mode in wanted:
        if dtype == "int8" and op == "pool_dgrad":
            continue
        window = CHOSEN[op][0] if op in CHOSEN else "3x3 step 2"
        case = dataclasses.replace(_case(op, engine, dtype, mode, "NHWC", window), variant=mode, batch=8)
        yield subject(case, seed, batch_axes=(0,) * (1 + (op == "pool_dgrad")), out_axis=0, variant=mode)


def _typical(op: str, engine: str, dtype: str) -> PoolCase | None:
    if op in CHOSEN and engine != "xla":
        return None
    known = [d for d in up_to("full", DTYPES) if not (d == "int8" and op == "pool_dgrad")]
    return (
        _case(op, engine, dtype, "max", "NHWC", CHOSEN[op][0] if op in CHOSEN else "3x3 step 2")
        if dtype in known
        else None
    )


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> PoolCase:
    """Windows of up to 64 taps with every stride, padding and dilation; whole images; bins."""
    dtype = drawn.pick(rng, drawn.FLOATS if engine == "hopper" else drawn.WIDER | {"int8": 1})
    modes = (
        {"max": 4, "average": 3}
        | ({} if op in CHOSEN else {"average_exclude_padding": 2})
        | ({} if engine == "hopper" else {"lp": 1})
    )
    mode = drawn.pick(rng, modes)
    if dtype == "int8" and (op == "pool_dgrad" or mode == "lp"):
        dtype = "f32"
    rank = int(drawn.pick(rng, {1: 2, 2: 6} | ({} if engine == "hopper" else {3: 1})))
    layout = drawn.layout(rng, rank, last=engine == "hopper")
    c = drawn.channels(rng, 640)
    c = -(-c // 32) * 32 if "c" in layout else -(-c // 8) * 8 if engine == "hopper" and rng.random() < 0.95 else c
    sizes = drawn.axes(rng, rank, 2**17 / c)
    n = drawn.batch(rng, 2**19 / (c * math.prod(sizes)))
    options: dict[str, Any] = {}
    if engine == "hopper" and rng.random() < 0.3:  # windows that share much
        sizes = tuple(max(size, 7) for size in sizes)
    if op == "adaptive_pool":
        options["output_sizes"] = tuple(int(rng.integers(1, size + 1)) for size in sizes)
    elif op != "global_pool":
        options = windows_of(rng, sizes)
    indices = op != "pool_dgrad" and mode == "max" and rng.random() < 0.4
    if op in ("pool", "pool_dgrad") and mode == "average" and rng.random() < 0.15:
        options["divisor"] = int(rng.integers(1, 100))
    given = (sizes, tuple(options.items()))
    return PoolCase(op, engine, dtype, name, mode, layout, name, indices, n, c, given)


def samples(case: PoolCase) -> tuple[tuple[int | None, ...], int] | None:
    """The batch's axis."""
    axis = case.layout.index("N")
    return ((axis,) * (1 if case.forward else 2), axis) if case.batch > 1 else None


def windows_of(rng: drawn.Generator, sizes: tuple[int, ...]) -> dict[str, Any]:
    """A drawn window that fits into every axis at least once, with padding that is less than its extent."""
    if rng.random() < 0.4:  # stride 1, square, from three taps on: windows share much
        edge = int(rng.integers(3, 8))
        if min(sizes) >= edge:
            return {"window": edge, "stride": 1, "padding": edge // 2}
    window, stride, padding, dilation = [], [], [], []
    for size in sizes:
        r = int(rng.integers(1, min(size, 8) + 1))
        d = int(rng.integers(1, 4)) if (r - 1) * 3 < size and rng.random() < 0.3 else 1
        reach = d * (r - 1)
        pads = rng.integers(0, min(reach, r) // 2 + 1, 2) if rng.random() < 0.6 else (0, 0)
        window.append(r)
        dilation.append(d)
        stride.append(int(rng.integers(1, 5)))
        padding.append(tuple(int(v) for v in pads))
    if rng.random() < 0.05:  # instead of padding; the window still fits
        spare = [size - d * (r - 1) - 1 for size, r, d in zip(sizes, window, dilation, strict=True)]
        padding = [(-(n // 2), -int(rng.integers(0, n - n // 2 + 1))) for n in spare]
    options = {"window": tuple(window), "stride": tuple(stride), "dilation": tuple(dilation)}
    if rng.random() < 0.15:
        return options | {"padding": "SAME"}
    return options | {"padding": tuple(padding), "ceil_mode": bool(rng.random() < 0.2)}


FAMILY = family(
    "pool",
    PoolCase,
    OPS,
    cases,
    subjects,
    "3 x 3 windows of every second pixel",
    (3, 8),
    engines_of=engines_of,
    typical=_typical,
    draw=draw,
    samples=samples,
)
