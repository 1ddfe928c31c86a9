"""Number formats as the error bounds need them: unit roundoffs, subnormals, and rounding from float64 in NumPy."""

import dataclasses
import functools as ft
import math
from typing import Any, Literal

import ml_dtypes
import numpy as np

Values = np.ndarray


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
      bits: bits of significand, the hidden one included.
      emin, largest: the exponent of its smallest normal number, and its largest finite one.
      overflows_to: what a value beyond `largest` is rounded to.
    """

    name: str
    bits: int
    emin: int
    largest: float
    overflows_to: Literal["inf", "nan"] = "inf"

    @property
    def roundoff(self) -> float:
        """u = 2^-bits: half the distance from 1 to the next number."""
        return 2.0**-self.bits

    def growth(self, count: float) -> float:
        """The relative error of n roundings at most: γ = n u / (1 - n u), infinite where n u reaches 1."""
        rate = count * self.roundoff
        return rate / (1 - rate) if rate < 1 else math.inf

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.emin

    @property
    def smallest_subnormal(self) -> float:
        """η, the distance between neighbours next to zero."""
        return math.ldexp(1.0, self.emin - self.bits + 1)

    def ulp(self, values: Values) -> Values:
        """The distance between neighbours in the binade of each value (η below the smallest normal number)."""
        _, exponent = np.frexp(np.abs(values))  # 2^(exponent - 1) <= |value| < 2^exponent
        exponent = np.where(values == 0, self.emin, np.maximum(exponent - 1, self.emin))
        return np.ldexp(1.0, exponent - self.bits + 1)

    def rounds_to(self, values: Values) -> tuple[Values, Values]:
        """The ends of the interval of numbers that round to each value, which is a number of this format or ±inf."""
        size = np.minimum(np.abs(values), self.largest)
        up = 0.5 * self.ulp(size)
        # Below a power of two the neighbours lie half as far apart, but not among the subnormal numbers.
        halved = (np.frexp(size)[0] == 0.5) & (size > self.smallest_normal)
        down = np.where(halved, 0.5 * up, up)
        overflowed = np.abs(values) > self.largest
        with np.errstate(over="ignore"):  # beyond float64's largest number there is only infinity
            low = np.where(overflowed, size + up, np.where(size == 0, -up, size - down))
            high = np.where(overflowed, np.inf, size + up)
        return np.where(values < 0, -high, low), np.where(values < 0, -low, high)

    def round(self, values: Any) -> Values:
        """RN(value), ties to even, as float64; what overflows becomes ±inf, also in a format without infinities."""
        values = np.asarray(values, np.float64)
        if self.bits == 53:
            return values
        finite = np.where(np.isfinite(values), np.clip(values, -4 * self.largest, 4 * self.largest), 0.0)
        ulp = self.ulp(finite)
        rounded = np.rint(finite / ulp) * ulp
        rounded = np.where(np.abs(rounded) > self.largest, np.copysign(np.inf, rounded), rounded)
        return np.where(np.isfinite(values), rounded, values)


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """An integer type that a float is rounded to, ties to even, and clamped to."""

    name: str
    smallest: int
    largest: int
    overflows_to: Literal["clamp"] = "clamp"
    roundoff: float = 0.0
    smallest_subnormal: float = 1.0  # η / 2 = 1/2 is what rounding to an integer may change

    def ulp(self, values: Values) -> Values:
        return np.ones(np.shape(values))

    def rounds_to(self, values: Values) -> tuple[Values, Values]:
        low = np.where(values <= self.smallest, -np.inf, values - 0.5)
        return low, np.where(values >= self.largest, np.inf, values + 0.5)

    def round(self, values: Any) -> Values:
        return np.clip(np.rint(np.asarray(values, np.float64)), self.smallest, self.largest)


def _of(dtype: Any, overflows_to: Literal["inf", "nan"] = "inf") -> Format:
    info = ml_dtypes.finfo(dtype)
    return Format(np.dtype(dtype).name, info.nmant + 1, int(info.minexp), float(info.max), overflows_to)


FORMATS: dict[str, Format] = {
    "float64": _of(np.float64),
    "float32": _of(np.float32),
    "tf32": Format("tf32", 11, -126, (2 - 2.0**-10) * 2.0**127),
    "bfloat16": _of(ml_dtypes.bfloat16),
    "float16": _of(np.float16),
    "float8_e4m3fn": _of(ml_dtypes.float8_e4m3fn, "nan"),
    "float8_e5m2": _of(ml_dtypes.float8_e5m2),
}
"""The floating-point formats by name: how many bits their significand has, their least exponent, their largest number.

"tf32" is what tensor cores cut float32 to, which is no dtype.
"""


@ft.cache
def format_of(dtype: Any) -> Format | IntegerFormat:
    """The format of a dtype, or of a name such as "tf32" that is no dtype."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name in FORMATS:
        return FORMATS[name]
    if name in ("int8", "int32"):
        return IntegerFormat(name, int(np.iinfo(name).min), int(np.iinfo(name).max))
    raise ValueError(f"`dtype` must be one of {', '.join([*FORMATS, 'int8', 'int32'])}, got {name!r}.")
