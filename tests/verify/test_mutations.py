"""The checks of `jaxdnn verify` bite: planted faults are found, and correct results raise no alarm.

An engine is simulated from the definition's triples (output, first operand, second operand): products in float32, added
in some order, blended, rounded once. A fault is planted in one of these steps. Nothing here shares code with the
reference, whose golden results judge what comes out.
"""

import collections
import dataclasses
import functools as ft
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdnn._src.conv.cases import checks, data
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.conv.cases.geometries import Blend, Geometry
from jaxdnn._src.core.tolerance import ACCUMULATIONS, Accumulation

F32 = np.float32
OPS = ("conv", "conv_dgrad", "conv_wgrad")
DTYPES = ("bf16", "f16", "f32")
GEOMETRIES = (
    Geometry("short", 2, (7, 6), 6, 8, (3, 3), 1, ((1, 1), (1, 1)), 1, 2),
    Geometry("dilated", 2, (9, 8), 8, 6, (3, 2), (1, 2), ((2, 1), (1, 2)), (2, 1), 2),
    Geometry("deep", 3, (6, 5), 32, 24, (2, 3), 1, ((0, 1), (1, 1)), 1, 1),
)
BLENDS = (Blend(), Blend("bias-relu", bias=True, activation="relu"), Blend("blended", 0.75, -1.5, True))


# ---- a simulated engine ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a fault may change about a convolution's geometry."""

    low: tuple[int, int]
    dilation: tuple[int, int]
    flip: bool = False
    rotate_groups: bool = False
    drop_tap: bool = False
    drop_channel: bool = False
    swap_images: bool = False


@ft.lru_cache(maxsize=64)
def triples(op: str, g: Geometry, s: Shape) -> tuple[np.ndarray, np.ndarray]:
    """For each output the flat indices of its products' operands, (terms, outputs) each, -1 where there are fewer.

    By enumeration of y[n, p, q, k] += x[n, p u + r d - a, q v + s e - b, c] w[r, s, c, k].
    """
    w = g.window
    ranges = [range(v) for v in (g.batch, *g.outputs, g.filters, *g.taps, g.channels // g.groups)]
    n, p, q, k, r, t, c = (v.reshape(-1) for v in np.meshgrid(*ranges, indexing="ij"))
    group = k // (g.filters // g.groups)
    if s.rotate_groups:
        group = (group + 1) % g.groups
    h = p * w.stride[0] + r * s.dilation[0] - s.low[0]
    v = q * w.stride[1] + t * s.dilation[1] - s.low[1]
    keep = (h >= 0) & (h < g.sizes[0]) & (v >= 0) & (v < g.sizes[1])
    if s.drop_tap:
        keep &= (r != g.taps[0] - 1) | (t != 0)
    if s.drop_channel:
        keep &= c != c.max()
    image = (n + 1) % g.batch if s.swap_images else n
    if s.flip:
        r, t = g.taps[0] - 1 - r, g.taps[1] - 1 - t
    flat = {
        "x": np.ravel_multi_index(
            (image, h, v, group * (g.channels // g.groups) + c), (g.batch, *g.sizes, g.channels), mode="clip"
        ),
        "w": np.ravel_multi_index((r, t, c, k), (*g.taps, g.channels // g.groups, g.filters)),
        "y": np.ravel_multi_index((n, p, q, k), (g.batch, *g.outputs, g.filters)),
    }
    first, second, out = {"conv": "xwy", "conv_dgrad": "ywx", "conv_wgrad": "xyw"}[op]
    size = {"x": (g.batch, *g.sizes, g.channels), "y": (g.batch, *g.outputs, g.filters)}
    size["w"] = (*g.taps, g.channels // g.groups, g.filters)
    outputs = int(np.prod(size[out]))
    order = np.flatnonzero(keep)[np.argsort(flat[out][keep], kind="stable")]
    where = flat[out][order]
    counts = np.bincount(where, minlength=outputs)
    place = np.arange(len(order)) - (np.cumsum(counts) - counts)[where]
    result = []
    for name in (first, second):
        table = np.full((max(int(counts.max(initial=0)), 1), outputs), -1)
        table[place, where] = flat[name][order]
        result.append(table)
    return result[0], result[1]


def plain(g: Geometry) -> Shape:
    low = tuple(pair[0] for pair in g.window.padding)
    return Shape((low[0], low[1]), (g.window.dilation[0], g.window.dilation[1]))


def sequential(products: np.ndarray) -> np.ndarray:
    return np.add.accumulate(products, axis=0, dtype=F32)[-1]


def pairwise(products: np.ndarray) -> np.ndarray:
    while len(products) > 1:
        half = len(products) // 2
        products = np.concatenate([products[:half] + products[half : 2 * half], products[2 * half :]])
    return products[0]


def permuted(products: np.ndarray) -> np.ndarray:
    return sequential(products[np.random.default_rng(len(products)).permutation(len(products))])


def split(products: np.ndarray) -> np.ndarray:
    return pairwise(np.stack([sequential(part) for part in np.array_split(products, min(4, len(products)))]))


def tensor_core(products: np.ndarray) -> np.ndarray:
    """Sixteen products at a time, aligned to the largest addend and cut there, the sum cut to 24 bits."""
    total = np.zeros(products.shape[1])
    for start in range(0, len(products), 16):
        addends = np.concatenate([total[None], products[start : start + 16].astype(np.float64)])
        unit = np.ldexp(1.0, np.frexp(np.abs(addends).max(0))[1] - 1 - 25)
        total = np.trunc(addends / unit).sum(0) * unit
        last = np.ldexp(1.0, np.frexp(total)[1] - 24)
        total = np.trunc(total / last) * last
    return total.astype(F32)


ORDERS = {"sequential": sequential, "pairwise": pairwise, "permuted": permuted, "split": split, "cores": tensor_core}


@dataclasses.dataclass(frozen=True)
class Engine:
    """The steps of the simulated engine; a fault replaces one of them."""

    geometry: Callable[[Shape], Shape] = lambda shape: shape
    operand: Callable[[np.ndarray], np.ndarray] = lambda a: a
    add: Callable[[np.ndarray], np.ndarray] | None = None
    accumulator: Callable[[np.ndarray], np.ndarray] = lambda c: c
    blend: Callable[..., np.ndarray] | None = None
    cast: Callable[[np.ndarray, Any], np.ndarray] = lambda z, dtype: z.astype(dtype)
    result: Callable[[np.ndarray], np.ndarray] = lambda y: y

    def run(self, case: Case, operands: Any, extras: Any, add: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        first, second = triples(case.op, case.geometry, self.geometry(plain(case.geometry)))
        a, b = (np.append(self.operand(v.astype(F32)).reshape(-1), F32(0)) for v in operands)
        with np.errstate(all="ignore"):
            c = (self.add or add)(a[first] * b[second])
            c = self.accumulator(c).reshape(case.shape(case.result_role))
            z = (self.blend or blended)(case, c, extras)
            return self.result(self.cast(z, case.out_dtype))


def blended(case: Case, c: np.ndarray, extras: Any, *, read_prior: bool = False) -> np.ndarray:
    z = F32(case.blend.alpha) * c
    if "prior" in extras and (case.blend.beta or read_prior):
        z = z + F32(case.blend.beta) * extras["prior"].astype(F32)
    if "bias" in extras:
        z = z + extras["bias"].astype(F32)
    return np.maximum(z, F32(0)) if case.blend.activation == "relu" else z


# ---- faults ----------------------------------------------------------------------------------------------------------


def change(**fields: Any) -> Callable[[Shape], Shape]:
    return lambda shape: dataclasses.replace(shape, **fields)


def cut(z: np.ndarray, bits: int) -> np.ndarray:
    """Towards zero, to `bits` of float32's 24."""
    mask = np.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)
    return (np.ascontiguousarray(z, F32).view(np.uint32) & mask).view(F32)


def truncating_cast(z: np.ndarray, dtype: Any) -> np.ndarray:
    return cut(z, {"bfloat16": 8, "float16": 11}.get(np.dtype(dtype).name, 24)).astype(dtype)


def half_up_cast(z: np.ndarray, dtype: Any) -> np.ndarray:
    bits = {"bfloat16": 8, "float16": 11}.get(np.dtype(dtype).name)
    if bits is None:
        return z.astype(dtype)
    half = np.uint32(1 << (23 - bits))
    return cut((np.ascontiguousarray(z, F32).view(np.uint32) + half).view(F32), bits).astype(dtype)


def doubly_rounding_cast(z: np.ndarray, dtype: Any) -> np.ndarray:
    """By way of a type with two bits more than the output's."""
    bits = {"bfloat16": 10, "float16": 13}.get(np.dtype(dtype).name)
    if bits is None:
        return z.astype(dtype)
    scale = np.ldexp(1.0, bits - np.frexp(z)[1])
    return (np.rint(z * scale) / scale).astype(F32).astype(dtype)


def rounded_before_blend(case: Case, c: np.ndarray, extras: Any) -> np.ndarray:
    return blended(case, c.astype(case.out_dtype).astype(F32), extras)


def bias_after_rounding(case: Case, c: np.ndarray, extras: Any) -> np.ndarray:
    without = {k: v for k, v in extras.items() if k != "bias"}
    z = blended(dataclasses.replace(case, blend=dataclasses.replace(case.blend, activation=None)), c, without)
    z = z.astype(case.out_dtype).astype(F32)
    return blended(dataclasses.replace(case, blend=dataclasses.replace(case.blend, alpha=1.0, beta=0.0)), z, extras)


def partials_in(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    def add(products: np.ndarray) -> np.ndarray:
        parts = [sequential(part).astype(dtype).astype(F32) for part in np.array_split(products, 4)]
        return sequential(np.stack(parts))

    return add


def accumulator_of(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    def add(products: np.ndarray) -> np.ndarray:
        total = np.zeros_like(products[0])
        for p in products:
            total = cut(total + p, bits)
        return total

    return add


def without_last_step(products: np.ndarray) -> np.ndarray:
    return sequential(products[: max(len(products) - 8, 1)])


def stale_tile(c: np.ndarray) -> np.ndarray:
    """The second tile of sixteen outputs starts from what the first has left."""
    c = c.copy()
    c[16:32] += c[0:16]
    return c


def duplicated_tile(c: np.ndarray) -> np.ndarray:
    c = c.copy()
    c[16:32] = c[0:16]
    return c


def next_number(y: np.ndarray) -> np.ndarray:
    """One element, in the middle, is off by one unit in the last place."""
    y = y.copy()
    flat = y.reshape(-1).view(np.dtype(f"u{y.dtype.itemsize}"))
    middle = flat.size // 2 + int(np.argmax(y.reshape(-1)[flat.size // 2 :] != 0))
    flat[middle] += 1
    return y


def one_element(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def result(y: np.ndarray) -> np.ndarray:
        y = y.copy()
        y.reshape(-1)[y.size // 3] = value
        return y

    return result


FAULTS: dict[str, Engine] = {
    "dropped tap": Engine(geometry=change(drop_tap=True)),
    "dropped last channel": Engine(geometry=change(drop_channel=True)),
    "padding off by one": Engine(geometry=lambda s: dataclasses.replace(s, low=(s.low[0] + 1, s.low[1]))),
    "dilation ignored": Engine(geometry=lambda s: dataclasses.replace(s, dilation=(1, 1))),
    "taps flipped": Engine(geometry=change(flip=True)),
    "groups exchanged": Engine(geometry=change(rotate_groups=True)),
    "images exchanged": Engine(geometry=change(swap_images=True)),
    "operands cut to TF32": Engine(operand=lambda a: cut(a, 11)),
    "operands rounded to bfloat16": Engine(operand=lambda a: a.astype(ml_dtypes.bfloat16).astype(F32)),
    "bfloat16 partial sums": Engine(add=partials_in(ml_dtypes.bfloat16)),
    "float16 partial sums": Engine(add=partials_in(np.float16)),
    "accumulator of 16 bits": Engine(add=accumulator_of(16)),
    "accumulator of 13 bits": Engine(add=accumulator_of(13)),
    "last step missing": Engine(add=without_last_step),
    "stale tile": Engine(accumulator=stale_tile),
    "duplicated tile": Engine(accumulator=duplicated_tile),
    "scale of 1.001": Engine(accumulator=lambda c: c * F32(1.001)),
    "rounded before the blend": Engine(blend=rounded_before_blend),
    "bias after rounding": Engine(blend=bias_after_rounding),
    "beta 0 reads the prior": Engine(blend=ft.partial(blended, read_prior=True)),
    "truncating cast": Engine(cast=truncating_cast),
    "rounding half up": Engine(cast=half_up_cast),
    "double rounding": Engine(cast=doubly_rounding_cast),
    "one last place off": Engine(result=next_number),
    "one element not written": Engine(result=one_element(0.0)),
    "one element NaN": Engine(result=one_element(np.nan)),
}


# ---- the tests -------------------------------------------------------------------------------------------------------


def case_of(op: str, dtype: str, geometry: Geometry, blend: Blend, out: str | None = None) -> Case:
    if op != "conv":
        blend = dataclasses.replace(blend, bias=False, activation=None)
    return Case(op, "simulated", dtype, "NHWC", None, geometry, blend, out)


def accumulation_of(order: str) -> Accumulation:
    return ACCUMULATIONS["tensor_core" if order == "cores" else "float32"]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(checks.same_bits(a, b).all())


@pytest.mark.parametrize("op", OPS)
def test_faults_are_found(op: str):
    """At least 95 % of the faults that change any bit, by the data and checks that a cell of the matrix gets."""
    found, missed, equivalent = 0, collections.Counter[str](), collections.Counter[str]()
    settings = list(itertools.product(DTYPES, GEOMETRIES, (*BLENDS, Blend("prior-not-read", 0.5, 0.0, True))))
    for seed, (dtype, geometry, blend) in enumerate(settings):
        case, order = case_of(op, dtype, geometry, blend), list(ORDERS)[seed % 4]
        accumulation, runs = accumulation_of(order), []
        for kind in case.kinds():
            operands, extras = data.arrays(case, kind, seed, accumulation)
            details = checks.golden(case, operands, extras)
            runs.append((kind, operands, extras, details, Engine().run(case, operands, extras, ORDERS[order])))
        for name, engine in FAULTS.items():
            changed, caught = False, False
            for kind, operands, extras, details, right in runs:
                out = engine.run(case, operands, extras, ORDERS[order])
                if same(out, right):
                    continue
                changed = True
                caught = caught or not checks.judge(case, kind, operands, extras, out, accumulation, details).passed
            found += caught
            if changed and not caught:
                missed[f"{name}, {dtype}"] += 1
            if not changed:
                equivalent[name] += 1
    total = found + missed.total()
    assert total > 500
    assert found >= 0.95 * total, f"{missed.total()} of {total} missed: {missed}"
    assert len([name for name in FAULTS if equivalent[name] < len(settings)]) >= 15


@pytest.mark.parametrize("op", OPS)
def test_no_false_alarm(op: str, record_property: Callable[[str, object], None]):
    """A thousand correct results in five orders of addition; and the bounds are near what happens."""
    worst: dict[str, float] = collections.defaultdict(float)
    combinations = itertools.cycle(itertools.product(ORDERS, DTYPES, BLENDS, GEOMETRIES, (None, "f32")))
    for seed, (order, dtype, blend, geometry, out_dtype) in zip(range(1080), combinations, strict=False):
        case, accumulation = case_of(op, dtype, geometry, blend, out_dtype), accumulation_of(order)
        if order == "cores" and dtype == "f32":
            continue  # they add products of narrow operands
        kinds = ("normal", "integers", "ties", "lognormal", "cancelling", "normal", "subnormal")
        kind = kinds[seed % len(kinds)]
        operands, extras = data.arrays(case, kind, seed, accumulation)
        out = Engine().run(case, operands, extras, ORDERS[order])
        check = checks.judge(case, kind, operands, extras, out, accumulation)
        assert check.passed, f"seed {seed}, {case.id}, {order}, {kind}: {check.message}"
        worst[dtype] = max(worst[dtype], check.ratio)
    for dtype, ratio in worst.items():
        record_property(f"error over bound, {op}, {dtype}", ratio)
        assert 0.01 < ratio < 0.9, (dtype, ratio)


def test_simulated_engine_is_the_definition():
    """Else the faults would be planted in something else: in float64-exact integers it equals the golden result."""
    for op, geometry, blend in itertools.product(OPS, GEOMETRIES, BLENDS):
        case = case_of(op, "f32", geometry, blend)
        operands, extras = data.arrays(case, "integers", 3, ACCUMULATIONS["float32"])
        out = Engine().run(case, operands, extras, sequential)
        np.testing.assert_array_equal(out, checks.golden(case, operands, extras).value)
