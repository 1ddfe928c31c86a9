"""Error bounds of results against their float64 reference, computed from the op, the dtypes and the data.

Letters: G is the reference's value, float64 from the stored inputs. S = Σ|a||b| is the magnitude of a sum of products
and n the number of its products that are not zero. u is a unit roundoff, and E bounds the error before the result is
rounded to its output type. With P and N the sums of the positive and of the negative products, every partial sum, in
whatever order, is at most M = max(P, N) = (S + |G|) / 2 in magnitude. So a bound that holds for every order need not be
much larger than one for a known order.

Three checks are made together, because each finds faults that the others miss:

* The bound. |out - G| <= u_o |G| + η_o / 2 + (1 + u_o) E for every element. Because rounding is monotonic,
  RN(G - E) <= out <= RN(G + E) holds as well, which is sharper by up to a unit in the last place.
* The rate of correct rounding. At most Σ min(1, 2E / ulp_o(G)) elements may differ from RN(G), plus four standard
  deviations. It finds a bias far below one unit in the last place, as of a truncating cast or a scale of 1.001.
* Exact integers. If every partial sum is an integer that the accumulator represents, E = 0 and out = RN(G).

Sources: Higham, Accuracy and Stability of Numerical Algorithms, ch. 3 and 4; Jeannerod and Rump, SIAM J. Matrix Anal.
Appl. 34 (2013), for constants without higher-order terms; arXiv:2511.10909 for what a tensor core does to an addend.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxdnn._src.core.formats import FORMATS, Format, IntegerFormat, Values, format_of


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How an engine adds products, as it declares it.

    Attributes:
      kind: "float" adds in `format`, every operation rounded to nearest, in an unknown order; "tensor_core" adds
        `step` products at a time, each addend truncated to `fraction_bits` below the largest one and the sum
        truncated to `sum_bits` of significand, the steps in an unknown order; "exact" adds integers; "transform" is
        a library's choice among a tensor core, float32 in any order and float32 after a fast Fourier transform.
      flush: whether the device reads and writes subnormal numbers of float32 as zero, as XLA does on CPUs.
      step: the number of products in a tensor core's step.
    """

    kind: Literal["float", "tensor_core", "exact", "transform"] = "float"
    format: str = "float32"
    flush: bool = False
    step: int = 16
    fraction_bits: int = 25
    sum_bits: int = 24

    @property
    def largest_integer(self) -> int:
        """The largest magnitude of sums of integers that are exact in any order; above, int32 wraps, floats round."""
        if self.kind == "exact":
            return 2**31 - 1
        if self.kind == "float":
            return 2 ** FORMATS[self.format].bits
        return 2 ** min(self.sum_bits, self.fraction_bits + 1)

    def error(
        self,
        golden: Values,
        magnitude: Values,
        count: Values,
        /,
        *,
        exact_products: bool = False,
        steps: Values | None = None,
    ) -> Values:
        """E, a bound on the distance of the engine's sum from `golden`, for every order that `kind` allows.

        float:        E = (c u S + (n - 1) u M) / (1 - (n - 1) u) + n η / 2, where c = 0 if the products are exact
        tensor_core:  E = r M / (1 - r) + n η, r = T 2^(1 - sum_bits) + (n + T) 2^-fraction_bits, in T steps

        A node of the summation tree that adds l and r has an error of at most u |l + r| <= u (M + E). There are n - 1
        nodes that round, since adding zero is exact. Solving for E gives the division. A tensor core's step that adds k
        products truncates them and the running sum, each by less than 2^-fraction_bits (M + E), and then the sum by
        2^(1 - sum_bits) (M + E). If M + E exceeds the format's largest number, a partial sum may overflow in some
        order, and E is infinite. E is infinite too if r, or (n - 1) u, is 1 or more: for float8 from about 4,000
        products on.

        Args:
          golden: Σ a b, float64.
          magnitude: Σ |a| |b|.
          count: the number of products that are not zero.
          exact_products: whether the accumulator holds every product exactly, see `products_are_exact`.
          steps: the number of tensor core steps with a product that is not zero; None is the number of products.
        """
        if self.kind == "exact":
            return np.zeros(np.shape(magnitude))
        golden, magnitude, n = (np.asarray(v, np.float64) for v in (golden, magnitude, count))
        accumulator = FORMATS[self.format]
        reach = np.where(np.isfinite(golden), 0.5 * (magnitude + np.abs(golden)), magnitude)
        joins = np.maximum(n - 1, 0)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.kind == "float":
                rate = joins * accumulator.roundoff
                first = 0.0 if exact_products else accumulator.roundoff * magnitude
                error = (first + rate * reach) / (1 - rate) + 0.5 * n * accumulator.smallest_subnormal
            else:
                t = n if steps is None else np.clip(steps, np.minimum(n, 1), n)
                rate = t * 2.0 ** (1 - self.sum_bits) + (n + t) * 2.0**-self.fraction_bits
                rate = np.where(
                    (n <= 1) & exact_products, 0.0, rate
                )  # one product is aligned to itself and not truncated
                error = rate * reach / (1 - rate) + n * accumulator.smallest_subnormal
            if self.flush:
                error = error + 2 * n * accumulator.smallest_normal
            bounded = (rate < 1) & np.isfinite(error) & (reach + error <= accumulator.largest)
            return np.where(bounded, error, np.inf)

    def transform_error(self, norms: Values, channels: int, /) -> Values:
        """E of a convolution by a fast Fourier transform in float32, whose error is bounded by norms.

        E = (3 η log2 L + 2 + n) u Σ_i ‖x_i‖₂ ‖w_i‖₂, over the n channels i that are added, L = 256 x 256 points at most

        By Cauchy-Schwarz channel i adds at most ‖x_i‖ ‖w_i‖ to an output. Each of the three transforms has an error of
        at most η u log2 L in the 2-norm, η = 1 + 4 √2 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
        edition, theorem 24.2, roots of unity right to u), the products add 2 u, the sum over the channels n u.

        Args:
          norms: Σ_i ‖x_i‖₂ ‖w_i‖₂ for every output, the norms over an image and over the taps.
          channels: n.
        """
        eta, logarithm = 1 + 4 * math.sqrt(2), 16
        u = FORMATS[self.format].roundoff
        return (3 * eta * logarithm + 2 + channels) * u * np.asarray(norms, np.float64)

    def running_error(self, partials: Values, largest: Values, /) -> Values:
        """E for a known schedule, from the partial sums of a run of it in float64 or in the model.

        float:        E = Σ_t u |C_t| / (1 - u)
        tensor_core:  E = Σ_t [ 2^(1 - sum_bits) |C_t| + (step + 1) 2^-fraction_bits max(|C_t-1|, largest_t) ]

        Args:
          partials: C_1, C_2, ... along axis 0, the computed sums after each step.
          largest: the largest |product| of each step, shaped like `partials`.
        """
        partials, largest = np.abs(np.asarray(partials, np.float64)), np.asarray(largest, np.float64)
        if self.kind == "float":
            u = FORMATS[self.format].roundoff
            return u / (1 - u) * partials.sum(0)
        previous = np.concatenate([np.zeros_like(partials[:1]), partials[:-1]])
        cut = (self.step + 1) * 2.0**-self.fraction_bits * np.maximum(previous, largest)
        # The computed |C_t| is below the exact one, by less than one part in 2^(sum_bits - 1).
        return (2.0 ** (1 - self.sum_bits) * (1 + 2.0 ** (2 - self.sum_bits)) * partials + cut).sum(0)


ACCUMULATIONS: dict[str, Accumulation] = {
    "float32": Accumulation(),
    "float64": Accumulation(format="float64"),
    "int32": Accumulation(kind="exact"),
    "tensor_core": Accumulation(kind="tensor_core"),
    # For cuDNN through XLA, whose autotuner may choose any algorithm.
    "transform": Accumulation(kind="transform"),
    "tensor_core_tf32": Accumulation(kind="tensor_core", step=8),
    # For Hopper's 8-bit floats without promotion, whose accumulator has 14 bits.
    "tensor_core_fp8": Accumulation(kind="tensor_core", step=32, fraction_bits=13, sum_bits=14),
}
"""How engines accumulate, by the name that each declares, which `jaxdnn.explain` has as `accumulation` of a candidate.

"float32", "float64" and "int32" in that dtype; "tensor_core", "tensor_core_tf32" and "tensor_core_fp8" as tensor cores
add products of 16-bit floats, of TF32 and of 8-bit floats; "transform" as a library that may choose a fast Fourier
transform.
"""


def products_are_exact(a: Any, b: Any, /, *, format: str = "float32") -> bool:
    """Whether the product of any two numbers of these types is exact in the accumulator's format, but for underflow."""
    formats = (format_of(a), format_of(b))
    bits = [8 if isinstance(f, IntegerFormat) else f.bits for f in formats]
    return sum(bits) <= FORMATS[format].bits


def truncated_inputs_error(magnitude: Values, /, *, format: str = "tf32") -> Values:
    """A bound on the change of Σ a b if a and b are truncated to `format`: (2r + r²) Σ|a||b|, r = 2^(1 - bits)."""
    r = 2 * FORMATS[format].roundoff
    return (2 * r + r * r) * np.asarray(magnitude, np.float64)


def integer_amplitude(count: int, accumulation: Accumulation, /, *dtypes: Any) -> int:
    """The largest a for which sums of `count` products of integers of [-a, a] are exact; 0 if there is none."""
    a = math.isqrt(accumulation.largest_integer // max(count, 1))
    for dtype in dtypes:
        limits = format_of(dtype)
        a = min(a, limits.largest if isinstance(limits, IntegerFormat) else 2**limits.bits)
    return a


# ---- the comparison --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    `ratio` is the error over its bound: the largest distance of G from the numbers that round to the result, divided by
    E. It leaves out the rounding at the end. It is 0 if every element is rounded correctly, and above 1 if and only if
    a result is the rounding of no number within E of G. `where` is the worst element's index.
    """

    passed: bool
    message: str
    ratio: float
    where: tuple[int, ...]
    elements: int
    unreachable: int  # elements that are the rounding of no number within E of G
    outside: int  # those of them that exceed the bound too
    misrounded: int  # elements that differ from RN(G)
    misrounded_allowed: float  # above `elements` where the rate cannot fail
    wrong_specials: int  # elements with NaN or infinity on one side only, or of the wrong sign
    unchecked: int  # elements of which a partial sum may overflow, so that any result is possible


def output_bound(golden: Values, error: Values, dtype: Any, /) -> Values:
    """u_o |G| + η_o / 2 + (1 + u_o) E."""
    o = format_of(dtype)
    return o.roundoff * np.abs(golden) + 0.5 * o.smallest_subnormal + (1 + o.roundoff) * error


def compare(
    out: Any, golden: Values, error: Values, /, *, golden_error: Values | float = 0.0, generic: bool = True
) -> Comparison:
    """Compares a result with the float64 reference: by the bound, and by the rate of correct rounding.

    Args:
      out: the result, of its own dtype.
      golden: G, shaped like it.
      error: E, from `Accumulation` and `Epilogue`.
      golden_error: a bound on the error of G itself, which matters for float64 results.
      generic: whether G may be anywhere between two numbers of the output's format. This is not so if the data are
        integers, or if a sum is much smaller than a prior of the output's format: then ties are common, while the rate
        assumes that they are rare, so the rate is reported and not judged. The bound is judged in any case.

    If G overflows the output's format, or an input was NaN or infinite, the result must be the rounding of G: the
    infinity of that sign, NaN in a format without infinities, the nearest end of an integer type, and NaN for NaN.
    """
    o = format_of(np.asarray(out).dtype)
    with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaNs, which a result may hold; here all are quiet
        out, golden = np.asarray(out).astype(np.float64), np.asarray(golden, np.float64)
        out = np.where(np.isnan(out), np.nan, out)
    if out.shape != golden.shape:
        return _refused(f"shape {out.shape} instead of {golden.shape}", out.size)
    e = np.broadcast_to(error, golden.shape) + np.broadcast_to(golden_error, golden.shape)
    special = ~np.isfinite(golden)
    unchecked = ~np.isfinite(e) & ~special
    # The float64 operations here may have an error of one part in 2^52, by which E is widened.
    e = np.where(special | unchecked, 0.0, e * (1 + 2.0**-50) + np.where(e > 0, np.abs(golden) * 2.0**-52, 0.0))
    g = np.where(special, 0.0, golden)
    with np.errstate(over="ignore"):
        low, high, nearest = o.round(g - e), o.round(g + e), o.round(g)
    ours = np.where(np.isnan(out), nearest, out)

    reachable = (low <= ours) & (ours <= high) & ~np.isnan(out)
    if o.overflows_to == "nan":
        reachable |= np.isnan(out) & (np.isinf(low) | np.isinf(high))
    expected = _special(golden, o)
    right_special = np.where(np.isnan(expected), np.isnan(out), out == expected)
    judged = ~special & ~unchecked

    # The distance of G from the numbers that round to the result: the least error that the engine made before rounding.
    below, above = o.rounds_to(np.where(np.isnan(ours), 0.0, ours))
    used = np.maximum(np.maximum(below - g, g - above), 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.where(judged & (used > 0) & ~np.isnan(out), used / e, 0.0)
    unreachable = judged & ~reachable
    bound = output_bound(g, e, o.name)
    wrong = special & ~right_special

    with np.errstate(over="ignore"):  # near zero float64's ulp is so small that the quotient may overflow
        probability = np.minimum(1.0, 2 * e / o.ulp(np.maximum(np.abs(g) - e, 0.0)))[judged]
    # A tie, as far as float64 tells, is no rare event: bfloat16 over 6 has many. Both of its ends are right.
    other = (out != nearest) & (used > np.abs(g) * 2.0**-48)
    misrounded = int((judged & other & ~(np.isnan(out) & np.isinf(nearest))).sum())
    allowed = _allowed(probability) if generic or not e.any() else math.inf
    counts = {
        "elements": out.size,
        "unreachable": int(unreachable.sum()),
        "outside": int((unreachable & ~(np.abs(out - g) <= bound)).sum()),
        "misrounded": misrounded,
        "misrounded_allowed": allowed,
        "wrong_specials": int(wrong.sum()),
        "unchecked": int(unchecked.sum()),
    }
    passed = not (unreachable.any() or wrong.any()) and misrounded <= allowed
    # The worst element: a wrong special before an unreachable value before the largest ratio.
    rank = np.where(wrong, np.inf, np.where(unreachable, 1e300, 0.0) + ratio)
    where = tuple(int(i) for i in np.unravel_index(int(rank.argmax()), out.shape)) if out.size else ()
    worst = float(ratio.max()) if out.size else 0.0
    message = _message(passed, counts, worst, where, out, golden, bound)
    return Comparison(passed=passed, message=message, ratio=worst, where=where, **counts)


def _special(golden: Values, o: Format | IntegerFormat) -> Values:
    """What a NaN or infinity of the reference becomes in the output's format; of integers XLA converts NaN to zero."""
    if o.overflows_to == "clamp":
        return np.nan_to_num(o.round(np.where(np.isnan(golden), 0.0, golden)))
    return np.where(np.isinf(golden) & (o.overflows_to == "nan"), np.nan, golden)


def _allowed(probability: Values) -> float:
    """How many of these independent events may occur: the mean and four standard deviations.

    If they are few, it is the number that a Poisson distribution exceeds with the same probability.
    """
    mean = float(probability.sum())
    allowed = mean + 4 * math.sqrt(float((probability * (1 - probability)).sum()))
    if 0 < mean < 50:
        # A normal variable exceeds four standard deviations with probability 3.2e-5. For few events its tail is too
        # short, and the Poisson distribution's is an upper bound (Hoeffding, 1956).
        term = tail = math.exp(-mean)
        m = 0
        while 1 - tail > 3.2e-5:
            m += 1
            term *= mean / m
            tail += term
        allowed = max(allowed, float(m))
    return allowed


def _refused(message: str, elements: int) -> Comparison:
    return Comparison(False, message, math.inf, (), elements, elements, elements, elements, 0.0, 0, 0)


def _message(
    passed: bool,
    counts: dict[str, Any],
    worst: float,
    where: Sequence[int],
    out: Values,
    golden: Values,
    bound: Values,
) -> str:
    if passed:
        return f"error/bound {worst:.2g}, {counts['misrounded']} of {counts['elements']} not rounded correctly"
    found = [
        f"{counts[key]} of {counts['elements']} {says}"
        for key, says in (
            ("wrong_specials", "elements are NaN or infinite where the definition's are not, or the other way round"),
            ("unreachable", "elements are outside of the error bound, rounding included"),
        )
        if counts[key]
    ]
    if not found:
        found = [f"{counts['misrounded']} of {counts['elements']} elements are not rounded correctly"]
        return f"{found[0]}, at most {counts['misrounded_allowed']:.1f} allowed"
    at = f"worst at {tuple(where)}: got {out[tuple(where)]:.9g}, by definition {golden[tuple(where)]:.9g}"
    return f"{'; '.join(found)}; {at}, bound {bound[tuple(where)]:.3g}"
