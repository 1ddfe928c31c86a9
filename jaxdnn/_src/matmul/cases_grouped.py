"""Products of rows by the matrices of their groups, and the gradient in these: matrix, data and bounds."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import DTYPES, MODELLED, Case, Check, Expected, Facts, architectures, same_bits
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.conv.cases.draw import DTYPES as DRAWN
from jaxdnn._src.core import engines, tolerance
from jaxdnn._src.core.tolerance import Accumulation

PRODUCT, WGRAD = OPS = ("grouped_matmul", "grouped_matmul_wgrad")
PRODUCTS = {"xla": 1 << 22, "hopper": 1 << 24}  # the most of a drawn call, which the definition has to add; else 2^19


@dataclasses.dataclass(frozen=True)
class GroupedCase(Case):
    """Groups of some numbers of rows, which may leave rows without a group, or exceed them."""

    rows: int = 20
    sizes: tuple[int, ...] = (7, 0, 9, 1)
    k: int = 13
    n: int = 11
    transpose_b: bool = False
    out: str | None = None

    primitive = dict(zip(OPS, OPS, strict=True))  # noqa: RUF012

    @property
    def out_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.out]) if self.out else self.in_dtype

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {"transpose_b": self.transpose_b} if self.op == PRODUCT else {}
        given |= {"out_dtype": self.out_dtype} if self.out else {}
        return given | ({"precision": "tf32"} if self.dtype == "tf32" else {})

    @property
    def terms(self) -> np.ndarray:
        """The number of products of each element."""
        if self.op == PRODUCT:
            return np.full((self.rows, self.n), self.k)
        ends = np.minimum(np.cumsum(self.sizes), self.rows)
        return np.broadcast_to(np.diff(ends, prepend=0)[:, None, None], (len(self.sizes), self.k, self.n))

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        return lambda *arrays: op(*arrays, **{**self.options, **choices})

    def kinds(self) -> tuple[str, ...]:
        return ("normal",) if self.dtype == "int8" else ("normal", "integers", "special")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        of_group = (self.n, self.k) if self.transpose_b else (self.k, self.n)
        second = (len(self.sizes), *of_group) if self.op == PRODUCT else (self.rows, self.n)
        if self.dtype == "int8":
            a, b = (rng.integers(-128, 128, shape) for shape in ((self.rows, self.k), second))
        elif kind == "integers":  # whose sums are exact in every accumulator here
            a, b = (rng.integers(-2, 3, shape) for shape in ((self.rows, self.k), second))
        else:
            a, b = (rng.normal(size=shape) for shape in ((self.rows, self.k), second))
        if kind == "special":  # none of these may show in another group
            a[sum(self.sizes) :] = np.nan
            b[-1] = np.inf if self.dtype != "e4m3fn" else np.nan
        return a.astype(self.in_dtype), b.astype(self.in_dtype), np.asarray(self.sizes, np.int32)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        op, options = getattr(reference, self.op), {k: v for k, v in self.options.items() if k != "out_dtype"}
        on_gpu = engines.platform() == "cuda"
        if on_gpu:
            options.pop("precision", None)  # whether the hardware cuts or rounds is covered by the bound
        a, b, sizes = operands
        with np.errstate(invalid="ignore"):
            value = np.asarray(op(a, b, sizes, **options), np.float64)
            given = {k: v for k, v in options.items() if k != "precision"}
            magnitude = op(*(np.abs(v.astype(np.float64)) for v in (a, b)), sizes, **given).astype(np.float64)
        if kind == "integers" or self.dtype == "int8":
            return (Expected(value, 0.0, self.out_dtype, generic=False),)
        dtype = "tf32" if self.dtype == "tf32" else self.in_dtype
        exact = tolerance.products_are_exact(dtype, dtype, format=accumulation.format)
        error = accumulation.error(value, magnitude, self.terms, exact_products=exact)
        if self.dtype == "tf32" and on_gpu:
            error = error + tolerance.truncated_inputs_error(magnitude)
        return (Expected(value, error, self.out_dtype),)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        given = {**self.options, "out_dtype": self.out_dtype, "arithmetic": "ordered"}
        return (getattr(reference, self.op)(*operands, **given),)

    def describe(self) -> dict[str, Any]:
        options = self.options | ({"out_dtype": self.out_dtype.name} if self.out else {})
        return {"rows": self.rows, "sizes": list(self.sizes), "k": self.k, "n": self.n, **options}


def judge(
    case: GroupedCase,
    declared: Facts,
    kind: str,
    operands: Any,
    extras: Any,
    outs: Any,
    accumulation: Accumulation,
    *,
    modelled: int = MODELLED,
) -> list[Check]:
    """Compares a result with the definition, and its bits with those of the schedule where they are predicted.

    At most `modelled` results are predicted, of all rows (or matrices) and some columns.
    """
    checks = plain.judge_all(case, declared, kind, operands, extras, outs, accumulation)
    if declared.schedule is None or architectures().isdisjoint(declared.modelled):
        return checks
    some, out = max(1, modelled // max(math.prod(np.shape(outs)[:-1]), 1)), np.asarray(outs)
    columns = np.sort(plain.generator(case, kind, 1).permutation(case.n)[:some])
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = _predicted(case, declared.schedule.order, operands, columns)
    different = int((~same_bits(out[..., columns], wanted)).sum())
    message = f"{different} of {wanted.size} differ from the model's bits"
    return [*checks, Check(kind, "modelled bits", not different, message, elements=wanted.size)]


def _predicted(
    case: GroupedCase, order: np.ndarray, operands: tuple[np.ndarray, ...], columns: np.ndarray
) -> np.ndarray:
    """Some columns of the result, by the order of additions; that of a group is as much of it as it has rows."""
    a, b, sizes = operands
    given: dict[str, Any] = {"arithmetic": "tensor_core", "out_dtype": case.out_dtype}
    if case.op == PRODUCT:
        b = b[:, columns] if case.transpose_b else b[..., columns]
        schedule = reference.Schedule(order)
        return reference.grouped_matmul(a, b, sizes, transpose_b=case.transpose_b, schedule=schedule, **given)
    ends, found = [0, *np.minimum(np.cumsum(case.sizes), case.rows)], []
    for start, end in itertools.pairwise(ends):
        schedule = reference.Schedule(np.where(order < end - start, order, -1))
        found.append(
            reference.matmul(a[start:end], b[start:end, columns], transpose_a=True, schedule=schedule, **given)
        )
    return np.stack(found)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"transpose_b": True, "sizes": (3, 9, 8)},
    "tall": {"rows": 150, "sizes": (70, 0, 45, 2), "k": 6, "n": 5},
    "exceeded": {"sizes": (9, 9, 9)},
    "empty": {"sizes": (0, 0), "rows": 5},
    "thin": {"sizes": (6,), "rows": 6, "k": 1, "n": 1},
    "long": {"k": 2100, "n": 3, "rows": 12, "sizes": (5, 6)},
}
# For kernels: groups of several tiles and of one row, and columns that are copied to fill rows of 16 bytes, or are not.
TILES: dict[str, dict[str, Any]] = {
    "tiles": {"rows": 700, "sizes": (300, 0, 129, 1, 200), "k": 136, "n": 264},
    "tiles, copied": {"rows": 300, "sizes": (1, 257, 30), "k": 130, "n": 70, "transpose_b": True},
}
OF_KERNELS: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "quick": (("bf16", "tiles", None), ("f16", "tiles, copied", "f32")),
    "standard": (("f16", "tiles", "bf16"), ("bf16", "tiles, copied", None)),
    "full": (("bf16", "tiles", "f32"),),
}
MATRIX: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "quick": (
        *(("f32", "plain", None), ("bf16", "transposed", None), ("f16", "tall", None), ("f64", "plain", None)),
        *(("tf32", "plain", None), ("int8", "plain", "int32"), ("e4m3fn", "transposed", "f32")),
    ),
    "standard": (
        *(("f32", name, None) for name in ("tall", "exceeded", "empty", "thin", "long")),
        *(("bf16", "tall", "f32"), ("int8", "tall", None), ("f16", "exceeded", "bf16")),
    ),
    "full": tuple((dtype, name, None) for dtype in ("f32", "bf16", "f16", "f64", "int8", "e5m2") for name in VARIANTS),
}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[GroupedCase]:
    """The cases of an extent and of those before it."""
    of_kernels = up_to(extent, OF_KERNELS) if engine == "hopper" else []
    for dtype, name, out in (*up_to(extent, MATRIX), *of_kernels):
        given = {k: v for k, v in (VARIANTS | TILES)[name].items() if op == PRODUCT or k != "transpose_b"}
        yield GroupedCase(op, engine, dtype, f"{name}-to-{out}" if out else name, **given, out=out)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Rows of one group among three, so that a row's group does not depend on its place."""
    for dtype in ("bf16", "f32", "int8"):
        if extent == "quick" and dtype == "f32":
            continue
        out = "int32" if dtype == "int8" else None
        case = GroupedCase(op, engine, dtype, "rows", 16, (0, 1000, 0), 96, 40, out=out)
        axes, out_axis = ((0, None, None), 0) if op == PRODUCT else ((0, 0, None), None)
        yield subject(case, seed, batch_axes=axes, out_axis=out_axis)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> GroupedCase:
    """Up to a thousand rows of up to forty groups, some of them empty, which may leave rows or exceed them."""
    groups, rows = drawn.between(rng, 1, 40), drawn.between(rng, 1, 1000)
    k, n = (drawn.between(rng, 1, 300) for _ in range(2))
    if engine == "hopper" and rng.random() < 0.8:  # others are copied to fill rows of 16 bytes
        k, n = (v + -v % 8 for v in (k, n))
    while rows * k * n > PRODUCTS.get(engine, 1 << 19):
        rows, k, n = ((v + 1) // 2 for v in (rows, k, n))
    shares = rng.dirichlet(np.full(groups, 0.5)) * rows * rng.choice([0.7, 1.0, 1.1])
    sizes = tuple(int(size) for size in np.floor(shares))
    if engine == "hopper":
        dtype = str(rng.choice(["bf16", "f16"]))
        out = str(rng.choice([dtype, "f32", "bf16", "f16"]))
    else:
        dtype = drawn.pick(rng, DRAWN[engine])
        out = str(rng.choice(["int32", "int8", "f32"])) if dtype == "int8" else None
    transposed = op == PRODUCT and bool(rng.random() < 0.5)
    return GroupedCase(op, engine, dtype, name, rows, sizes, k, n, transposed, out)


FAMILY = family(
    "grouped matmul",
    GroupedCase,
    OPS,
    cases,
    subjects,
    "20 rows of 4 groups",
    strides=(1, 4),
    draw=draw,
    judge=judge,
    slow=("ordered",),
)
