"""The arrays that a convolution's case is run on: several kinds of data, each of which reveals other faults.

| kind | values | faults that it reveals |
|---|---|---|
| normal | N(0, 1); int8: all of its values | most faults |
| integers | integers whose sums are exact in the accumulator, of either sign or none negative | any, since E = 0 |
| ties | integers whose sums often lie halfway between two numbers of a narrow output type | rounding up or twice |
| lognormal | magnitudes over five decades | low-precision accumulators, misplaced scales |
| cancelling | products of nearly equal size and alternating sign: |G| is far below S | lost low bits, double rounding |
| subnormal | results, or for the narrow types operands, among the subnormal numbers | flushes to zero |
| sparse | half of the elements are zero, the others the smallest normal numbers and large ones | sums aligned to 0 |
| special | some NaN, infinite and huge elements in the first operand | masks that multiply by zero, wrong maxima |
| infinite | infinite elements in the second operand, which padding multiplies by zero | products that are left out |
"""

import math
from typing import Any

import ml_dtypes
import numpy as np

from jaxdnn._src.cases.case import generator
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import Accumulation, Format

INTEGERS = ("integers", "ties")  # kinds of data whose sums are exact
TINY = ("subnormal", "sparse")  # kinds of data whose results may be subnormal


def arrays(
    case: Case, kind: str, seed: int, accumulation: Accumulation
) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """Operands, and the epilogue's arrays by name, in the dtypes that the case stores them in."""
    rng = generator(case, kind, seed)
    shapes = [case.shape(role) for role in case.roles]
    operands = tuple(a.astype(case.in_dtype) for a in _DRAW[kind](case, rng, shapes, accumulation))
    return operands, extras(case, kind, rng)


def _normal(case: Case, rng: np.random.Generator, shapes: Any, _: Accumulation) -> list[np.ndarray]:
    if case.geometry.name == "wrap":  # 140,000 products of 127 * 127 exceed 2^31
        return [rng.integers(120, 128, s) for s in shapes]
    if case.dtype == "int8":
        return [rng.integers(-128, 128, s) for s in shapes]
    return [rng.standard_normal(s) for s in shapes]


def amplitude(case: Case, accumulation: Accumulation) -> int:
    """The largest integer in the data kind "integers": sums stay exact, and inside the narrow output types."""
    stored = "tf32" if case.dtype == "tf32" else case.in_dtype
    a = tolerance.integer_amplitude(4 * case.terms, accumulation, stored)  # 4: room for the epilogue's terms
    out = tolerance.format_of(case.out_dtype)
    if out.largest < 1e6:
        a = min(a, int(math.sqrt(out.largest / math.sqrt(max(case.terms, 1)))))
    return max(a, 1)


def _integers(case: Case, rng: np.random.Generator, shapes: Any, accumulation: Accumulation) -> list[np.ndarray]:
    a = amplitude(case, accumulation)
    low = 0 if rng.random() < 0.5 and tolerance.format_of(case.out_dtype).largest > 1e6 else -a
    return [rng.integers(low, a, s, endpoint=True) for s in shapes]


def _ties(case: Case, rng: np.random.Generator, shapes: Any, accumulation: Accumulation) -> list[np.ndarray]:
    """A sum of n products of integers of [-a, a] has the standard deviation √n a (a + 1) / 3, which shall be 2^bits."""
    out = tolerance.format_of(case.out_dtype)
    bits = out.bits if isinstance(out, Format) else 8
    a = int(math.sqrt(3 * 2**bits / math.sqrt(max(case.terms, 1)) + 0.25) + 0.5)
    a = max(1, min(a, amplitude(case, accumulation)))
    return [rng.integers(-a, a, s, endpoint=True) for s in shapes]


def _lognormal(case: Case, rng: np.random.Generator, shapes: Any, _: Accumulation) -> list[np.ndarray]:
    largest = 300.0 if case.dtype in ("f16", "e4m3fn") else 1e5
    drawn = [rng.standard_normal(s) * np.exp(2 * rng.standard_normal(s)) for s in shapes]
    return [np.clip(a, -largest, largest) for a in drawn]


def _cancelling(case: Case, rng: np.random.Generator, shapes: Any, _: Accumulation) -> list[np.ndarray]:
    near_one = [1 + rng.standard_normal(s) / 64 for s in shapes]
    near_one[-1] = near_one[-1] * (-1.0) ** np.indices(shapes[-1]).sum(0)
    return near_one


def _subnormal(case: Case, rng: np.random.Generator, shapes: Any, accumulation: Accumulation) -> list[np.ndarray]:
    form = tolerance.format_of(case.in_dtype)
    if form.name in ("float32", "bfloat16", "float64") and isinstance(form, Format):
        # Normal operands whose products lie about the accumulator's smallest normal number.
        power = tolerance.FORMATS[accumulation.format].emin
        scales = [2.0 ** (power // 2)] * len(shapes) if len(shapes) > 1 else [2.0**power]
        return [rng.standard_normal(s) * scale for s, scale in zip(shapes, scales, strict=True)]
    tiny = rng.integers(-6, 7, shapes[0]) * form.smallest_subnormal
    return [tiny, *(rng.standard_normal(s) for s in shapes[1:])]


def _sparse(case: Case, rng: np.random.Generator, shapes: Any, _: Accumulation) -> list[np.ndarray]:
    """The smallest normal numbers in the first operand, up to 2^60 in the others; half of each is zero."""
    finfo = ml_dtypes.finfo(case.in_dtype)
    least, most = (np.frexp(float(v))[1] for v in (finfo.smallest_normal, finfo.max))
    first = rng.choice([-1, 1], shapes[0]) * rng.uniform(1, 2, shapes[0]) * 2.0**least
    others = [rng.standard_normal(s) * np.exp2(rng.integers(-3, min(60, int(most) - 3), s)) for s in shapes[1:]]
    return [a * (rng.random(a.shape) < 0.5) for a in (first, *others)]


def _infinite(case: Case, rng: np.random.Generator, shapes: Any, _: Accumulation) -> list[np.ndarray]:
    """Two infinities at least, of either sign, so that most results are finite, or NaN because of padding alone."""
    first, second = (rng.standard_normal(s) for s in shapes)
    places = rng.choice(second.size, min(second.size, 2), replace=False)
    second.reshape(-1)[places] = rng.choice([np.inf, -np.inf], places.size)
    return [first, second]


def _special(case: Case, rng: np.random.Generator, shapes: Any, _: Accumulation) -> list[np.ndarray]:
    first, *others = (rng.standard_normal(s) for s in shapes)
    values = [np.nan, np.inf, -np.inf] if case.dtype != "e4m3fn" else [np.nan]
    flat = first.reshape(-1)
    if flat.size:
        # One element in fifty, so that most results stay finite and show whether anything leaked into them.
        places = rng.choice(flat.size, max(1, flat.size // 50), replace=False)
        flat[places] = rng.choice(values, places.size)
    return [first, *others]


_DRAW = {
    "normal": _normal,
    "integers": _integers,
    "ties": _ties,
    "lognormal": _lognormal,
    "cancelling": _cancelling,
    "subnormal": _subnormal,
    "sparse": _sparse,
    "special": _special,
    "infinite": _infinite,
}


def extras(case: Case, kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The epilogue's arrays by name. A prior that must not be read is full of NaN."""
    blend, shape = case.blend, case.shape(case.result_role)
    channels = case.geometry.channels if case.op == "conv_transpose" else case.geometry.filters
    wide: Any = np.float64 if "f64" in (case.dtype, case.accumulate) else np.float32
    plain: Any = case.out_dtype
    if case.dtype == "int8":
        wide = plain = np.int32 if case.integer else np.float32
    wanted = {
        "prior": (blend.prior, shape, plain),
        "residual": (blend.residual, shape, plain),
        "x": (blend.relu, shape, plain),
        "bias": (blend.bias, (channels,), wide),
    }
    drawn = {}
    for name, (given, size, dtype) in wanted.items():
        if not given:
            continue
        whole = kind in INTEGERS or np.dtype(dtype).kind == "i"
        values = rng.integers(-9, 10, size) if whole else rng.standard_normal(size)
        drawn[name] = values.astype(dtype)
    if blend.each:
        drawn["alpha"] = (blend.alpha * np.exp2(rng.uniform(-1, 1, channels))).astype(np.float32)
    if "x" in drawn:  # a relu's result: half of it 0, some of it the least number above
        drawn["x"] = np.maximum(drawn["x"], np.zeros((), drawn["x"].dtype))
        drawn["x"].reshape(-1)[::7] = (
            1 if case.dtype == "int8" else ml_dtypes.finfo(drawn["x"].dtype).smallest_subnormal
        )
    if "prior" in drawn and blend.beta == 0:
        drawn["prior"] = np.full(shape, 77 if case.dtype == "int8" else np.nan, drawn["prior"].dtype)
    return drawn
