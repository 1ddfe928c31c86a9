"""A case of the matrix: one call of one op by one engine, and how it is run and judged.

The modules that a family's manifest names as `cases` define its cases, the data that they run on and the expected
results. What an engine guarantees for a case is taken from `jaxdnn.explain` and not repeated here.
"""

import abc
import dataclasses
import time
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import ml_dtypes
import numpy as np

import jaxdnn as dnn
from jaxdnn._src.core import engines, tolerance
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn._src.core.tolerance import ACCUMULATIONS, Accumulation

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


MODELLED = 20_000  # the most outputs that are compared with predicted bits


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an engine declares for a case: whether it serves it, what it guarantees, how it accumulates."""

    refusal: str | None
    level: str
    accumulation: str = "float32"
    schedule: Any = None
    modelled: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Check:
    """The outcome of one comparison: on which data, by which rule."""

    data: str
    rule: str  # "computed bound", "exact integers", "modelled bits", "definition's bits"
    passed: bool
    message: str
    ratio: float = 0.0
    elements: int = 0
    misrounded: int = 0
    misrounded_allowed: float = 0.0
    unchecked: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a case. status: "passed", "failed", or "refused" if the engine does not serve it."""

    case: Any
    status: str
    level: str
    accumulation: str
    message: str
    seconds: float
    checks: tuple[Check, ...] = ()

    @property
    def id(self) -> str:
        return self.case.id

    @property
    def ratio(self) -> float:
        """The largest error over its bound, over all comparisons."""
        return max((c.ratio for c in self.checks), default=0.0)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The expected value of one result of a case, and the error that it may have.

    Attributes:
      value: the reference's float64 result, not rounded.
      error: the largest error before the last rounding, from the op, the data and the accumulator; 0 for exact results.
      dtype: the result's dtype.
      name: the name of the result, if an op has several.
      generic: whether the value may be anywhere between two numbers of the dtype, see `jaxdnn.tolerance.compare`.
    """

    value: np.ndarray
    error: Any
    dtype: Any
    name: str = ""
    generic: bool = True


@dataclasses.dataclass(frozen=True)
class Call(abc.ABC):
    """One call of one op by one engine.

    A subclass adds fields (a window, a shape) and defines the op's arguments. `variant` names all of these; with op,
    engine and dtype it is the case's id.
    """

    op: str
    engine: str
    dtype: str
    variant: str

    primitive: ClassVar[dict[str, str]] = {}  # the primitive of each op that has engines to choose from

    @property
    def bound(self) -> str:
        """The primitive whose engine is asked what it guarantees."""
        return self.primitive[self.op]

    @property
    def id(self) -> str:
        return f"{self.op}/{self.engine}/{self.dtype}/{self.variant}"

    @property
    def in_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.dtype])

    @property
    def x64(self) -> bool:
        return self.dtype == "f64"

    @abc.abstractmethod
    def call(self, **choices: Any) -> Callable[..., Any]:
        """The op as a function of its arrays; `choices` are `engine` (not for ops without engines), `determinism`."""

    def kinds(self) -> tuple[str, ...]:
        """The kinds of data that the case runs on."""
        return ("normal",)

    def describe(self) -> dict[str, Any]:
        """The facts of the case that the report has besides its id."""
        return {}

    def function(self, level: str | None = None, *, any_engine: bool = False) -> Callable[..., Any]:
        """The op with everything but its arrays."""
        choices: dict[str, Any] = {"determinism": level}
        if self.op in self.primitive and not any_engine:
            choices["engine"] = self.engine
        return self.call(**choices)


class Case(Call):
    """A call with its data and what is expected of it, of an op that takes arrays and keyword arguments only."""

    @abc.abstractmethod
    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """The arrays, in the dtypes the case stores them in, for a kind of data."""

    @abc.abstractmethod
    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        """What is expected of each result."""

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        """The bits that an engine of level "portable" guarantees, one array for each result."""
        return None


class Blended:
    """A case whose op takes `count` arrays and, where its beta is not 0, a prior after them."""

    op: str
    beta: float

    @property
    def count(self) -> int:
        return 1 + self.op.endswith("_dgrad")

    def arguments(self) -> dict[str, Any]:
        """What is given by keyword."""
        raise NotImplementedError

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        given = {**self.arguments(), **choices}
        return lambda *arrays: op(*arrays[: self.count], **self.prior(arrays), **given)

    def prior(self, arrays: tuple[Any, ...]) -> dict[str, Any]:
        """The prior among a call's arrays, by name."""
        return {"prior": arrays[self.count]} if self.beta else {}


# ---- what an engine declares -----------------------------------------------------------------------------------------


def architectures() -> set[str]:
    """The names of this device in an engine's `modelled`, such as "cuda", "NVIDIA H200" and "sm_90"."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    names = {engines.platform(), device.device_kind}
    return names | {f"sm_{str(capability).replace('.', '')}"} if capability else names


def flushes_subnormals() -> bool:
    """Whether this device reads or writes subnormal float32 numbers as zero, as a product and a matrix product show."""
    tiny, half = np.float32(2.0**-126), np.float32(0.5)
    product = jax.jit(lambda a, b: a * b)(tiny, half)
    total = jax.jit(lambda a, b: jax.lax.dot(a, b))(np.full((1, 2), tiny * half), np.full((2, 1), np.float32(2)))
    return float(product) == 0 or float(total[0, 0]) == 0


def engines_of(case: type[Call], op: str) -> tuple[str, ...]:
    """The names of an op's engines; ("xla",) for an op without engines, which is XLA's formula."""
    return tuple(e.name for e in engines.registered(case.primitive[op])) if op in case.primitive else ("xla",)


def facts(case: Case) -> Facts:
    """Asks `jaxdnn.explain` about a case; nothing is computed."""
    operands = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in case.operands("normal", generator(case, "normal", 0))]
    if case.op not in case.primitive:
        return Facts(None, strongest_level(case, operands), "float64" if case.x64 else "float32")
    return explained(case, case.bound, operands)


def explained(case: Call, primitive: str, operands: Any, **extras: Any) -> Facts:
    """What `jaxdnn.explain` says of a case's engine and primitive."""
    with jax.enable_x64(case.x64):
        # No engine is named, because a call that names one that cannot serve it raises.
        calls = dnn.explain(case.function(any_engine=True), *operands, **extras)
    candidates = (c for e in calls if e.op == primitive for c in e.candidates)
    found = next((c for c in candidates if c.engine == case.engine), None)
    if found is None:
        return Facts(f"there is no such engine for {case.op}", "fast")
    return Facts(**{field.name: getattr(found, field.name) for field in dataclasses.fields(Facts)})


def strongest_level(case: Call, operands: Any, **extras: Any) -> str:
    """The strongest level at which a call can be traced without an error."""
    for level in reversed(LEVELS):
        try:
            with jax.enable_x64(case.x64):
                jax.eval_shape(case.function(level), *operands, **extras)
        except NotImplementedError:
            continue
        return level
    return "fast"


# ---- running ---------------------------------------------------------------------------------------------------------


def generator(case: Call, kind: str, seed: int) -> np.random.Generator:
    """A generator of random numbers that depends on the case's id and not on its position in the matrix."""
    return np.random.default_rng([seed, zlib.crc32(f"{case.id}|{kind}".encode())])


def run(
    case: Call, seed: int, *, flush: bool, facts: Callable[[Any], Facts], check: Callable[..., list[Check]]
) -> Result:
    """The result of a case on all of its kinds of data. An exception fails the case and does not end the run."""
    start = time.perf_counter()
    level, accumulation = "fast", ""
    try:
        declared = facts(case)
        level, accumulation = declared.level, declared.accumulation
        if declared.refusal is not None:
            return Result(case, "refused", level, accumulation, declared.refusal, time.perf_counter() - start)
        checks = tuple(check(case, declared, seed, flush))
    except Exception as error:  # whatever an op raises is a finding about this case
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Result(case, "failed", level, accumulation, message, time.perf_counter() - start)
    failed = [c for c in checks if not c.passed]
    message = f"on data {failed[0].data!r}, by {failed[0].rule}: {failed[0].message}" if failed else ""
    status = "failed" if failed else "passed"
    return Result(case, status, level, accumulation, message, time.perf_counter() - start, checks)


def arrays(
    case: Case, kind: str, seed: int, accumulation: Accumulation
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The operands of a case for a kind of data, and its operands by keyword, of which these cases have none."""
    return case.operands(kind, generator(case, kind, seed)), {}


def accumulation_of(declared: Facts, flush: bool) -> Accumulation:
    """How the engine accumulates on this device; `flush` says whether the device flushes subnormal numbers to zero."""
    return dataclasses.replace(
        ACCUMULATIONS[declared.accumulation], flush=flush or "flushes_subnormals" in declared.hazards
    )


def judge_all(
    case: Case,
    declared: Facts,
    kind: str,
    operands: Any,
    extras: Any,
    outs: Any,
    accumulation: Accumulation,
    *,
    modelled: int = MODELLED,
) -> list[Check]:
    """Compares the results of a case with the expected values, and with the definition's bits if they are guaranteed.

    `modelled` is the most outputs whose bits are predicted, which takes long: of convolutions and grouped
    products alone.
    """
    found = as_tuple(outs)
    wanted = case.expected(kind, operands, accumulation)
    checks = [judge(kind, out, e) for out, e in zip(found, wanted, strict=True)]
    if declared.level == "portable" and not (accumulation.flush and kind == "subnormal"):
        checks += _bits(kind, found, case.definition(operands))
    return checks


def as_tuple(outs: Any) -> tuple[np.ndarray, ...]:
    """The results as NumPy arrays, of an op with one or several."""
    return tuple(np.asarray(out) for out in jax.tree.leaves(outs))


def judge(kind: str, out: np.ndarray, expected: Expected) -> Check:
    """Judges a result by the computed bound; where the error is zero, by equality with the rounded value."""
    where = f"{kind}, {expected.name}" if expected.name else kind
    value, dtype = np.asarray(expected.value, np.float64), np.dtype(expected.dtype)
    if out.shape != value.shape or out.dtype != dtype:
        got = f"got {out.dtype}{list(out.shape)}, expected {dtype}{list(value.shape)}"
        return Check(where, "computed bound", False, got, elements=out.size)
    error = np.broadcast_to(np.asarray(expected.error, np.float64), value.shape)
    found = tolerance.compare(out, value, error, generic=expected.generic)
    counts = (found.elements, found.misrounded, found.misrounded_allowed, found.unchecked)
    rule = "computed bound" if error.any() else "exact integers"
    return Check(where, rule, found.passed, found.message, found.ratio, *counts)


def _bits(kind: str, outs: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...] | None) -> list[Check]:
    if wanted is None:
        return [Check(kind, "definition's bits", False, 'level "portable" is promised, but the case has no definition')]
    checks = []
    for out, right in zip(outs, wanted, strict=True):
        different = int((~same_bits(out, right)).sum()) if out.shape == right.shape else out.size
        message = f"{different} of {out.size} differ from the definition's bits"
        checks.append(Check(kind, "definition's bits", not different, message, elements=out.size))
    return checks


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether each pair of elements has the same bits, or both are NaN, whose payload no level guarantees."""
    if a.dtype == np.bool_:
        return a == b
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    equal = np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)
    with np.errstate(invalid="ignore"):  # NumPy warns where it compares NaNs of the narrow types
        return equal | ((a != a) & (b != b))
