"""Cases of normalisation by mean and deviation and of its backward ops: axes, layouts, means far from zero.

Batch normalisation has cases with blends too; if a beta is 0, the prior, which must not be read, is filled with NaN.
"Large" data are as large as the accumulator's range allows. "Beyond" data are larger; for them a result must be NaN, or
that of an inverse deviation of 0 (the bias alone, a gradient of 0), so that the overflow is visible. "Tiny" data, for
an eps of 0, are as small as squares of full precision allow. The gradients of large and tiny data are such that
dy (x - μ) would leave the range, but dy h does not.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.cases import case as common
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Check, Expected, Facts
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core import frames
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.norm import arguments
from jaxdnn._src.norm import bounds as norm_bounds

FORWARD = ("layer_norm", "rms_norm", "adaptive_layer_norm", "group_norm", "instance_norm", "batch_norm")
OPS = tuple(op + suffix for op in FORWARD for suffix in ("", "_dgrad"))
ROWS, IMAGES = FORWARD[:3], FORWARD[3:5]
LARGE = "NHWC-large"  # an image, or a batch, that a kernel may share among several blocks
NO_EPS = "no-eps"
VECTORS = "NCHWc8-filled"  # channel vectors, the last of which further channels fill up
# The mean of "far" data, whose deviation is 1: what the input's own format still resolves.
FAR = {"f32": 1e4, "bf16": 100.0, "f16": 100.0, "f64": 1e8}
# The factors of blends, by the backward op's names; the forward op has two. None makes ties of narrow types.
BLENDS = {
    "blend": {"alpha": 1.3717, "beta": -0.6931, "alpha_param": -0.5772, "beta_param": 2.6131},
    "unread": {"alpha": -1.3717, "beta": 0.0, "alpha_param": 0.6931, "beta_param": 0.0},
}


def _blend_of(variant: str) -> str:
    """The blend that a variant names, if it does."""
    last = variant.rpartition("-")[2]
    return last if last in BLENDS else ""


class Arrays:
    """The arrays of a call of a normalisation, as they are given and in the op's view."""

    op: str
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def plain(self) -> str:
        """The forward op."""
        return self.op.removesuffix("_dgrad")

    @property
    def view(self) -> arguments.View:
        o, x = dict(self.options), np.empty(self.without_filling(np.empty(self.shape, bool)).shape, np.float32)
        if self.plain in ROWS:
            return (arguments.samples if self.plain == ROWS[2] else arguments.rows)(x, o.get("axis", -1))
        frame = frames.frame(o.get("layout", "NHWC"))
        if self.plain == "group_norm":
            return arguments.grouped(frame, x, o["groups"])
        if self.plain == "instance_norm":
            return arguments.instances(frame, x)
        return arguments.batches(frame, x, o.get("mode", "spatial"))

    def without_filling(self, v: np.ndarray) -> np.ndarray:
        """An array like x without channel vectors and the channels that fill up the last one."""
        layout = frames.frame(dict(self.options).get("layout", "NHWC")).given
        if layout.vector is None:
            return v
        c = layout.channel
        moved = np.moveaxis(v, -1, c + 1)
        stored = moved.reshape(*moved.shape[:c], -1, *moved.shape[c + 2 :])
        return stored.take(range(dict(self.options).get("channels", stored.shape[c])), c)

    def as_given(self, v: np.ndarray) -> np.ndarray:
        """An array without channel vectors in x's layout; 0 in the channels that fill up."""
        layout = frames.frame(dict(self.options).get("layout", "NHWC")).given
        if layout.vector is None:
            return v
        c, lanes = layout.channel, layout.vector
        full = np.pad(v, [(0, -v.shape[c] % lanes * (axis == c)) for axis in range(v.ndim)])
        return np.moveaxis(full.reshape(*v.shape[:c], -1, lanes, *v.shape[c + 1 :]), c + 1, -1)


@dataclasses.dataclass(frozen=True)
class NormCase(Arrays, Case):
    """One call; forward with scale and bias, backward with a scale; behind them the priors of a blend."""

    primitive: ClassVar[dict[str, str]] = {op: "norm_dgrad" if op.endswith("_dgrad") else "norm" for op in OPS}

    shape: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def backward(self) -> bool:
        return self.op.endswith("_dgrad")

    @property
    def factors(self) -> dict[str, float]:
        """The factors of the blend that the variant names, if it names one."""
        found = BLENDS.get(_blend_of(self.variant), {})
        return found if self.backward else {k: v for k, v in found.items() if not k.endswith("_param")}

    @property
    def priors(self) -> dict[str, tuple[int, ...]]:
        """The blend's priors and their shapes, in the order of the results."""
        if not self.factors:
            return {}
        parameters = {"prior_dscale": self.view.parameters, "prior_dbias": self.view.parameters}
        return {"prior": self.shape, **(parameters if self.backward else {})}

    def call(self, **choices: Any) -> Callable[..., Any]:
        return self._function(dnn, {**dict(self.options), **choices})

    def _function(self, module: Any, o: dict[str, Any]) -> Callable[..., Any]:
        op, o, names = getattr(module, self.op), {**o, **self.factors}, tuple(self.priors)
        given = lambda priors: dict(zip(names, priors, strict=True))
        if self.backward:
            if self.plain == ROWS[2]:
                return lambda dy, x, s: op(dy, x, s, **o)
            return lambda dy, x, s, *priors: op(dy, x, scale=s, **given(priors), **o)
        if self.plain == ROWS[2]:
            return lambda x, s, b: op(x, s, b, **o)
        first = (lambda found: found[0]) if self.plain == "batch_norm" else (lambda found: found)
        return lambda x, s, b, *priors: first(op(x, scale=s, bias=b, **given(priors), **o))

    def kinds(self) -> tuple[str, ...]:
        far = ("far",) if self.plain != "rms_norm" else ()
        terms = math.prod(self.view.shape[axis] for axis in self.view.axes)
        inside = self.factors or (terms == 1 and self.plain != "rms_norm")  # one element has no deviation at all
        large = () if self.dtype == "f16" else ("large",) if inside else ("large", "beyond")
        if self.eps == 0:
            large = large and ("large", "tiny")
        return ("normal", *far, "integers", *large)

    @property
    def eps(self) -> float:
        return dict(self.options).get("eps", 1e-6 if self.plain == "rms_norm" else 1e-5)

    def _sizes(self, kind: str) -> tuple[float, float]:
        """Powers of two: what x and dy are multiplied by, so that the squares of x fit into the accumulator's sums, or,
        beyond, do not."""
        top = 1024 if self.x64 else 128
        n = math.prod(self.view.shape[axis] for axis in self.view.axes)
        sizes = {
            "beyond": (top * 3 // 4, 0),
            "large": ((top - 10 - math.ceil(math.log2(n))) // 2, top * 5 // 8),
            "tiny": (-top * 3 // 8, -top * 3 // 4),
        }
        of_x, of_dy = sizes.get(kind, (0, 0))
        return 2.0**of_x, 2.0**of_dy

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        shapes = [self.shape, self.view.parameters, self.shape if self.backward else self.view.parameters]
        if kind == "integers":
            arrays = [rng.integers(-4, 5, shape).astype(np.float64) for shape in shapes]
        else:
            arrays = [rng.normal(size=shape) for shape in shapes]
            arrays[0] = arrays[0] + (FAR[self.dtype] if kind == "far" else 0.5)
        if kind in ("large", "beyond", "tiny"):
            of_x, of_dy = self._sizes(kind)
            arrays[0] = arrays[0] / 8 * of_x
            arrays[2] = arrays[2] * of_dy if self.backward else arrays[2]
        if kind == "beyond":
            arrays[0] = self._apart(arrays[0])
        kept = self.as_given(np.ones(self.without_filling(arrays[0]).shape, bool))  # the other channels are not read
        arrays = [np.where(kept, v, np.nan) if v.shape == self.shape else v for v in arrays]
        x, scale, last = (v.astype(self.in_dtype) for v in arrays)
        priors = [rng.integers(-9, 10, s) if kind == "integers" else rng.normal(size=s) for s in self.priors.values()]
        if self.factors.get("beta") == 0:
            priors = [np.full_like(prior, np.nan, np.float64) for prior in priors]
        return (*((last, x, scale) if self.backward else (x, scale, last)), *(p.astype(self.in_dtype) for p in priors))

    def _apart(self, x: np.ndarray) -> np.ndarray:
        """x with signs by turns along what is normalised, for of equal elements every deviation is within the range."""
        plain = self.without_filling(x)
        turns = sum(np.indices(self.view.shape, sparse=True)[axis] for axis in self.view.axes) % 2
        return self.as_given((np.abs(plain.reshape(self.view.shape)) * (1 - 2 * turns)).reshape(plain.shape))

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        values = self._function(reference, dict(self.options))(*operands)
        view, wide = self.view, np.float64 if self.x64 else np.float32
        x, scale = operands[1:3] if self.backward else operands[:2]
        x = self.without_filling(x)
        about = (view.shape, view.axes, view.summed, view.spread)
        bias = None if self.backward else operands[2]
        p = norm_bounds.problem(*about, x, scale, bias, eps=self.eps, centred=self.plain != "rms_norm")
        generic = kind != "integers"
        dy = self.without_filling(operands[0]).astype(np.float64).reshape(view.shape) if self.backward else None
        names, values = (("dx", "dscale", "dbias"), values) if self.backward else (("y",), (values,))
        found, bounds = [], self._blended(p, dy, dict(zip(self.priors, operands[3:], strict=True)))
        for name, value, error in zip(names, values, bounds, strict=True):
            dtype = wide if name in ("dscale", "dbias") else self.in_dtype
            about_x = name in ("y", "dx")
            error = self.as_given(error.reshape(x.shape)) if about_x else error.reshape(value.shape)
            found.append(Expected(np.asarray(value, np.float64), error, dtype, name, generic))
        return tuple(found)

    def _blended(
        self, p: norm_bounds.Problem, dy: np.ndarray | None, priors: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """The bounds of the results, behind the blend if there is one."""
        bounds = norm_bounds.from_definition(p, dy)
        if not priors:
            return bounds
        o, found = self.factors, []
        values = [value for value, _ in (norm_bounds.backward(p, dy) if dy is not None else [norm_bounds.forward(p)])]
        for value, error, (name, prior) in zip(values, bounds, priors.items(), strict=True):
            suffix = "" if name == "prior" else "_param"
            rule = Epilogue(o["alpha" + suffix], o["beta" + suffix], format=p.format)
            after = rule.error(value, error, prior=prior.astype(np.float64).reshape(value.shape))
            found.append(after * (1 + norm_bounds.definition_share(p.format)))
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        return {"shape": self.shape, **dict(self.options)}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[NormCase]:
    """One shape an op in the quick extent; other axes, layouts and lengths, and float64, beyond."""
    plain = op.removesuffix("_dgrad")
    geometries = list(_geometries(plain))
    for dtype in ("f32", "bf16", "f16"):
        for variant, shape, options in geometries[: 2 if extent == "quick" else None]:
            yield NormCase(op, engine, dtype, variant, shape, options)
    if extent == "quick":
        return
    for variant, shape, options in (geometries[0], *(g for g in geometries if _blend_of(g[0]))):
        yield NormCase(op, engine, "f64", variant, shape, options)


_BLENDED = (("NCHW", (5, 8, 6, 7)), ("NHWC", (5, 6, 7, 8)))


def _geometries(plain: str) -> Iterator[tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]]:
    if plain in ROWS:
        yield "rows", (6, 5, 64), ()
        yield "uneven", (3, 4, 77), ()
        yield "axes", (5, 3, 7, 8), (("axis", (1, -1)),)
        yield "long", (3, 2, 1000), ()
        yield NO_EPS, (3, 4, 136), (("eps", 0.0),)
        return
    groups = (("groups", 4),) if plain == "group_norm" else ()
    modes = ("spatial", "per_activation") if plain == "batch_norm" else (None,)
    for mode in modes:
        extra = groups if mode is None else (("mode", mode),)
        for layout, shape in (
            ("NHWC", (5, 6, 7, 8)),
            ("NCHW", (5, 8, 6, 7)),
            ("CHWN", (8, 3, 5, 6)),
            ("NWC", (4, 9, 8)),
        ):
            yield "-".join(filter(None, (layout, mode))), shape, (*extra, ("layout", layout))
    if plain in IMAGES:
        yield LARGE, (2, 45, 46, 64), (*groups, ("layout", "NHWC"))
    yield NO_EPS, (5, 6, 7, 16), (*groups, ("layout", "NHWC"), ("eps", 0.0))
    if plain == "group_norm":
        yield VECTORS, (5, 2, 6, 7, 8), (("groups", 4), ("channels", 12), ("layout", "NCHWc8"))
    if plain == "batch_norm":
        yield LARGE, (13, 16, 15, 24), (("mode", modes[0]), ("layout", "NHWC"))
        for (layout, shape), mode, blend in zip(_BLENDED, modes[::-1], BLENDS, strict=True):
            yield f"{layout}-{mode}-{blend}", shape, (("mode", mode), ("layout", layout))


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Rows and images, by y or dx; batch statistics, like gradients in scale and bias, are of the whole batch."""
    plain = op.removesuffix("_dgrad")
    shared = engine == "hopper" and plain == "batch_norm"  # a small batch would be one block's
    variant, shape, options = next(g for g in _geometries(plain) if not shared or g[0] == LARGE)
    parameter = 0 if plain == ROWS[2] else None
    axes = (0, 0, parameter) if op.endswith("_dgrad") else (0, parameter, parameter)
    whole = plain == "batch_norm"
    for dtype in ("f32", "bf16"):
        case = NormCase(op, engine, dtype, variant, shape, options)
        yield subject(case, seed, batch_axes=(None,) * 3 if whole else axes, out_axis=None if whole else 0)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> NormCase:
    """Rows of up to 20,000 elements; images and batches in every layout, groups that divide the channels."""
    plain, dtype = op.removesuffix("_dgrad"), drawn.pick(rng, drawn.FLOATS if engine == "hopper" else drawn.WIDER)
    if plain in ROWS:
        length = drawn.between(rng, 1, 320) * int(drawn.pick(rng, {1: 1, 4: 1, 8: 4, 64: 4}))
        if rng.random() < 0.1:
            length = 8 * int(rng.integers(256, 2049))
        elements = 2**22 if rng.random() < 0.15 else 2**19  # rows enough that a group takes several at a time
        rows = drawn.axes(rng, int(rng.integers(1, 3)), elements / length, 300 if elements < 2**20 else 4000)
        shape: tuple[int, ...] = (*rows, length)
        options: dict[str, Any] = {}
        if engine != "hopper" and len(shape) > 2 and rng.random() < 0.3:
            options["axis"] = (1, -1) if plain == ROWS[2] or rng.random() < 0.5 else (0,)
        return _with_eps(NormCase(op, engine, dtype, name, shape, tuple(options.items())), rng)
    rank = int(drawn.pick(rng, {1: 2, 2: 5, 3: 1}))
    layout = drawn.layout(rng, rank, last=engine == "hopper")
    large = rng.random() < 0.25  # more than a block, a cluster, a round of what stays can hold
    wide = rng.random() < 0.1  # parts of a pixel that need many threads
    c = drawn.channels(rng, 10240 if wide else 320 if large else 1280)
    c = 8 * int(rng.integers(256, 1280)) if wide and rng.random() < 0.5 else c
    c = -(-c // 32) * 32 if "c" in layout else c
    options = {"layout": layout}
    if "c" in layout and plain == "group_norm":
        options["channels"] = c
    if plain == "group_norm":
        options["groups"] = 1 if wide else int(rng.choice([1, *(g for g in range(1, min(c, 64) + 1) if c % g == 0)]))
    if plain == "batch_norm":
        options["mode"] = "spatial" if rng.random() < 0.8 else "per_activation"
    sizes = drawn.axes(rng, rank, 2**17 / c)
    if large:
        pixels = min(drawn.between(rng, 1500, 60000), ELEMENTS // c)
        across = drawn.between(rng, 1, 200) if rank > 1 else pixels
        sizes = (*(1,) * (rank - 2), *(pixels // across,) * (rank > 1), across)
    n = drawn.batch(rng, (2**22 if large else 2**19) / (c * math.prod(sizes)))
    shape = drawn.laid_out(layout, n, c, sizes)
    return _with_eps(NormCase(op, engine, dtype, name, shape, tuple(options.items())), rng)


def _with_eps(case: NormCase, rng: drawn.Generator) -> NormCase:
    """The case, or sometimes with an eps of 0, where what is normalised is too long for all integers to be equal."""
    long = math.prod(case.view.shape[axis] for axis in case.view.axes) >= 16
    return dataclasses.replace(case, options=(*case.options, ("eps", 0.0))) if long and rng.random() < 0.15 else case


ELEMENTS = 1 << 23  # of any array, so that a call with all of its arrays and guards fits a share of a GPU's memory


def _long_rows(op: str, engine: str, rng: drawn.Generator, name: str) -> NormCase:
    """Rows of 16-bit elements, of such number and length that a group of threads processes two of them at once."""
    rows, length = int(rng.integers(528, 700)), 8 * int(rng.integers(513, 1025))
    return NormCase(op, engine, str(rng.choice(["bf16", "f16"])), name, (rows, length), ())


def _wide_pixels(op: str, engine: str, rng: drawn.Generator, name: str, *, threads: int) -> NormCase:
    """One group of all channels, of whose vectors a pixel has more than half as many as there are threads."""
    dtype, rank = drawn.pick(rng, drawn.FLOATS), int(rng.integers(1, 3))
    c = (4 if dtype == "f32" else 8) * int(rng.integers(threads // 2 + 1, threads + 1))
    sizes = drawn.axes(rng, rank, 64)
    layout = f"N{'DHW'[3 - rank :]}C"
    shape = drawn.laid_out(layout, drawn.between(rng, 1, 4), c, sizes)
    return NormCase(op, engine, dtype, name, shape, (("layout", layout), ("groups", 1)))


LEADS = {(op, ("norm of rows", "rows at once", "2")): _long_rows for op in ROWS[:2]} | {
    (op, ("norm images", "threads", str(threads))): ft.partial(_wide_pixels, threads=threads)
    for op in ("group_norm", "group_norm_dgrad")
    for threads in (512, 1024)
}


def samples(case: NormCase) -> tuple[tuple[int | None, ...], int] | None:
    """The first axis of rows, and the batch of images; statistics of a batch have no samples."""
    o = dict(case.options)
    axis = 0 if case.plain in ROWS else o["layout"].index("N")
    if case.plain == "batch_norm" or "axis" in o or case.shape[axis] < 2 or case.priors:
        return None
    parameter = 0 if case.plain == ROWS[2] else None
    return ((axis, axis, parameter) if case.backward else (axis, parameter, parameter)), axis


def facets(case: NormCase) -> set[str]:
    """A dtype, a blend, channel vectors; an eps of 0 and a large image, of every dtype for the engine with kernels, and
    one for XLA. Engine "ordered" takes seconds to compile: of it neither, and dtypes beside float32 in turn.
    """
    of_dtypes = {"hopper": f"{case.dtype} {case.variant}", "xla": case.variant}
    own = of_dtypes.get(case.engine, "") if case.variant in (LARGE, NO_EPS) else ""
    turn = ("bf16", "f16", "f64")[OPS.index(case.op) % 3]
    dtype = case.dtype if case.engine != "ordered" or case.dtype in ("f32", turn) else ""
    return {dtype, _blend_of(case.variant), own, case.variant if case.variant == VECTORS else ""}


def judge(
    case: NormCase,
    declared: Facts,
    kind: str,
    operands: Any,
    extras: Any,
    outs: Any,
    accumulation: Accumulation,
    **_: Any,
) -> list[Check]:
    """As every family; beyond the range, each result is NaN or what an inverse deviation of 0 gives."""
    if kind != "beyond":
        return common.judge_all(case, declared, kind, operands, extras, outs, accumulation)
    without = list(operands)
    x = operands[case.backward]
    without[case.backward] = np.where(np.isnan(x), x, np.zeros_like(x))
    checks = []
    for out, expected in zip(common.as_tuple(outs), case.expected("normal", tuple(without), accumulation), strict=True):
        zero = case.backward and expected.name != "dbias"
        wanted = dataclasses.replace(expected, value=np.zeros_like(expected.value), error=0.0) if zero else expected
        known = np.where(np.isnan(out), np.asarray(wanted.value).astype(out.dtype), out)
        checks.append(common.judge(kind, known, wanted))
    return checks


FAMILY = dataclasses.replace(
    family("norm", NormCase, OPS, cases, subjects, "one normalisation", (8, 24)),
    judge=judge,
    facets=facets,
    draw=draw,
    leads=LEADS,
    samples=samples,
)
