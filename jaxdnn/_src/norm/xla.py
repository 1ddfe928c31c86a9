"""The formulas of the normalisations, and the engines that run them: `xla`, and `ordered` with a fixed order of sums.

Letters: A the axes that statistics are taken over, n how many elements they have, s the scale, and for every slice

    μ = Σ_A x / n        σ² = Σ_A (x - μ)² / n        r = 1 / √(σ² + ε)        h = (x - μ) r
    y = s h + b
    dx = r (g - Σ_A g / n - h Σ_A g h / n)   with g = s dy        ds = Σ dy h        db = Σ dy

and with an activation y = act(s h + b), and act'(s h + b) dy in place of dy,

without the terms in μ and Σ_A g if the op is not centred (RMS). x - μ is computed before it is squared. If x is as wide
as the accumulator, the subtraction is done twice: an accumulator of p bits holds μ only to 2^-p |μ|, so the mean of the
differences is subtracted too. A mean of 10⁴ deviations then costs no precision. A narrower x with statistics over other
than the last axes is read once for both statistics, after subtracting the mean of a sample; so is a wide one on CPUs,
where over the last axes the rounded mean stands for the sample's, and the mean of the differences is subtracted always.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, export, lax

from jaxdnn._src.activation.formulas import DERIVATIVE_FROM_OUTPUT, activate, derivative
from jaxdnn._src.core import engines, selection, trees
from jaxdnn._src.core.rounding import nearest, product, rounded
from jaxdnn._src.norm.spec import OPS, RANGE, Activation, NormSpec

Total = Callable[[Array, Sequence[int]], Array]
Separate = Callable[[Array], Array]


class Arithmetic(NamedTuple):
    """How an engine adds along axes (which are kept with length 1), and how it rounds a product before a sum.

    `copies` is the number of devices, each with equally many elements, that a total goes over; `on_cpu` says that a
    program is XLA's for CPUs.
    """

    total: Total
    separate: Separate
    copies: int = 1
    on_cpu: bool = False


def _sum(x: Array, axes: Sequence[int]) -> Array:
    return jnp.sum(x, tuple(axes), keepdims=True)


XLA = Arithmetic(_sum, lambda product: product)


def count(x: Array, axes: Sequence[int]) -> int:
    """n: the elements of a slice."""
    return math.prod(x.shape[axis] for axis in axes)


def _mean(arithmetic: Arithmetic, v: Array, axes: Sequence[int], n: int) -> Array:
    """Σ v / n, as XLA divides by a constant: times the rounded 1 / n. NaN for no elements.

    It is rounded for every engine: if x - μ were fused in one place and not in another, the mean of the differences
    would not be that of the differences that are used.
    """
    total = arithmetic.total(v, axes) if axes else v
    return rounded(total * jnp.asarray(1 / n if n else float("nan"), v.dtype))


def moments(arithmetic: Arithmetic, spec: NormSpec, x: Array) -> tuple[Array, Array, Array]:
    """x - μ, μ and σ² in the accumulator's type; not centred: x, 0 and the mean square."""
    wide, n = x.astype(spec.accumulate), arithmetic.copies * count(x, spec.axes)
    mean_of = lambda v: _mean(arithmetic, v, spec.axes, n)
    if not spec.centred:
        square = mean_of(arithmetic.separate(wide * wide))
        return wide, jnp.zeros_like(square), square
    narrow, sample = x.dtype != spec.accumulate, sample_of(x, spec.axes)
    if sample is not None and narrow:
        some = lax.slice_in_dim(wide, 0, sample[1], axis=sample[0])
        shift = _mean(arithmetic, some, spec.axes, arithmetic.copies * count(some, spec.axes))
        rest, variance = _about(arithmetic, spec, wide - shift)
        return wide - (shift + rest), shift + rest, variance
    if arithmetic.on_cpu and not narrow:
        some = wide if sample is None else lax.slice_in_dim(wide, 0, sample[1], axis=sample[0])
        # All that XLA makes one pass over memory, or a call of its library, is of sums and elementary operations. The
        # maximum stands for `rounded`, which would be a pass of its own: a mean that is not finite leaves y NaN.
        alone = lambda v: jnp.maximum(v, jnp.finfo(wide.dtype).min)
        several = count(some, spec.axes)
        shift = alone(_sum(some, spec.axes) / (several if export.is_symbolic_dim(several) else max(1, several)))
        rest, variance = _about(arithmetic, spec, wide - shift)
        # The saved mean as well: where it is a fused multiply-add in one place and not in another, there are two means.
        return wide - shift - rest, shift + alone(rest), variance
    mean = mean_of(wide)
    if not narrow:
        # The barrier keeps one mean for all uses: XLA on GPUs would add its last terms in each kernel, in other orders.
        mean = lax.optimization_barrier(mean)
    centred = wide - mean
    if not narrow:
        rest = mean_of(centred)
        mean, centred = mean + rest, centred - rest
    return centred, mean, mean_of(arithmetic.separate(centred * centred))


def _about(arithmetic: Arithmetic, spec: NormSpec, shifted: Array) -> tuple[Array, Array]:
    """The mean of x - shift, and the variance, each of one sum."""
    n = arithmetic.copies * count(shifted, spec.axes)
    mean_of = (
        (lambda v: _sum(v, spec.axes) / n) if arithmetic.on_cpu else ft.partial(_mean, arithmetic, axes=spec.axes, n=n)
    )
    rest, square = mean_of(shifted), mean_of(arithmetic.separate(shifted * shifted))
    return rest, jnp.maximum(square - arithmetic.separate(rest * rest), 0)


def sample_of(x: Any, axes: Sequence[int]) -> tuple[int, int] | None:
    """The axis and how many of its first indices are a sample, from whose mean one pass finds mean and variance.

    None where the axes are the last ones, which XLA reads once whatever the formula. As (shift - μ)² <= σ² n / (the
    sample's size), the subtraction of the squared mean costs a factor of 64 at worst (an axis of length 63), and nearly
    nothing as a rule.
    """
    rank = len(x.shape)
    if sorted(axes) == list(range(-len(axes), 0)):
        return None
    known = [axis for axis in axes if not export.is_symbolic_dim(x.shape[axis])]
    if not known:
        return None
    axis = min(known) + rank
    return (axis, max(1, x.shape[axis] // 32)) if x.shape[axis] > 1 else None


def inverse_deviation(arithmetic: Arithmetic, variance: Array, eps: float) -> Array:
    """1 / √(σ² + ε), of which XLA makes a reciprocal root; with JAX 0.12 that of a CPU's vectors has other bits."""
    return 1 / arithmetic.separate(jnp.sqrt(variance + jnp.asarray(eps, variance.dtype)))


def norm(arithmetic: Arithmetic, spec: NormSpec, x: Array, *parameters: Array) -> tuple[Array, Array, Array, Array]:
    """y, μ, r and σ²; the parameters are the scale and the bias, where the spec has them."""
    centred, mean, variance = moments(arithmetic, spec, x)
    rstd = inverse_deviation(arithmetic, variance, spec.eps)
    if spec.activation is not None:
        # The barrier keeps one mean and deviation for y and for the slope in its gradient.
        mean, rstd = lax.optimization_barrier((mean, rstd))
        return activated(spec, spec.activation, x, mean, rstd, *parameters), mean, rstd, variance
    scale, bias = spec.split(parameters)
    y = centred * rstd
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = arithmetic.separate(y) + bias
    return nearest(y, spec.out_dtype), mean, rstd, variance


def affine(h: Array, scale: Array | None, bias: Array | None) -> Array:
    """s h + b, with the same bits wherever it is computed, for a gradient asks for its sign: the product is rounded."""
    y = h if scale is None else h * scale
    return y if bias is None else rounded(y) + bias


def activated(spec: NormSpec, activation: Activation, x: Array, mean: Array, rstd: Array, *parameters: Array) -> Array:
    """y behind the op's activation."""
    h = (x.astype(spec.accumulate) - mean) * rstd
    return nearest(activate(affine(h, *spec.split(parameters)), *activation), spec.out_dtype)


def before_activation(spec: NormSpec, g: Array, dtype: Any, h: Array, parameters: Sequence[Array]) -> Array:
    """g, of a y of this dtype, times the slope of the op's activation; g itself if it has none."""
    if spec.activation is None:
        return g
    name, parameter = spec.activation
    z = affine(h, *spec.split(parameters))
    if name in DERIVATIVE_FROM_OUTPUT:  # where y rounds to 0 the slope is that of 0
        z = nearest(z, dtype).astype(z.dtype)
    return product(g, derivative(z, name, parameter))


def _normalised(arithmetic: Arithmetic, spec: NormSpec, x: Array, mean: Array, rstd: Array) -> Array:
    """h, from the saved statistics."""
    wide = x.astype(spec.accumulate)
    if not spec.centred:
        return wide * rstd
    centred = wide - mean
    if x.dtype == spec.accumulate:  # corrects for the rounding of the saved mean
        centred = centred - _mean(arithmetic, centred, spec.axes, arithmetic.copies * count(x, spec.axes))
    return centred * rstd


def norm_dgrad(
    arithmetic: Arithmetic, spec: NormSpec, dy: Array, x: Array, mean: Array, rstd: Array, *parameters: Array
) -> tuple[Array, Array, Array]:
    """dx, ds and db; the parameter is the scale, where the spec has it.

    Along the axes that statistics go over and that the scale is constant along, the sums for dx, ds and db are shared.
    """
    scale, _ = spec.split(parameters)
    h = _normalised(arithmetic, spec, x, mean, rstd)
    g, separate = dy.astype(spec.accumulate), arithmetic.separate
    g = before_activation(spec, g, dy.dtype, h, parameters)
    n = arithmetic.copies * count(x, spec.axes)
    shared = [a for a in spec.axes if a in spec.summed]
    along = separate(g * h)
    sums = [arithmetic.total(v, shared) if shared else v for v in (g, along)]
    db, ds = (_total_unless_none(arithmetic, v, [a for a in spec.summed if a not in shared]) for v in sums)
    scaled = sums if scale is None else [v * scale for v in sums]
    rest = [a for a in spec.axes if a not in shared]
    of_g, of_gh = (_mean(arithmetic, separate(v), rest, n) for v in scaled)
    inner = g if scale is None else separate(g * scale)
    inner = inner - of_g if spec.centred else inner
    dx = rstd * (inner - separate(h * of_gh))
    return nearest(dx, spec.out_dtype), ds, db


def _total_unless_none(arithmetic: Arithmetic, v: Array, axes: Sequence[int]) -> Array:
    return arithmetic.total(v, axes) if axes else v


def norm_tangent(arithmetic: Arithmetic, spec: NormSpec, *operands: Array) -> Array:
    """The tangent of y: s r (dx - Σ_A dx / n - h Σ_A dx h / n) + h ds + db, of dx, ds and db those that there are."""
    tangents, (x, mean, rstd, *parameters) = spec.split_tangents(operands)
    scale, _ = spec.split(parameters)
    h = _normalised(arithmetic, spec, x, mean, rstd)
    separate, terms = arithmetic.separate, []
    if "x" in tangents:
        v, n = tangents["x"].astype(spec.accumulate), arithmetic.copies * count(x, spec.axes)
        inner = v - _mean(arithmetic, v, spec.axes, n) if spec.centred else v
        inner = inner - separate(h * _mean(arithmetic, separate(v * h), spec.axes, n))
        terms.append(rstd * inner if scale is None else rstd * inner * scale)
    if "scale" in tangents:
        terms.append(h * tangents["scale"])
    if "bias" in tangents:
        terms.append(jnp.broadcast_to(tangents["bias"], x.shape))
    result = terms[0]
    for term in terms[1:]:
        result = separate(result) + separate(term)
    return nearest(before_activation(spec, result, spec.out_dtype, h, parameters), spec.out_dtype)


FORMULAS: dict[str, Callable[..., Any]] = {"norm": norm, "norm_tangent": norm_tangent, "norm_dgrad": norm_dgrad}


def _run(arithmetic: Arithmetic, call: engines.Call, *operands: Array) -> Any:
    return FORMULAS[call.op](arithmetic, call.spec, *operands)


def _run_by_xla(call: engines.Call, *operands: Array) -> Any:
    return _run(XLA._replace(on_cpu=call.platform == "cpu"), call, *operands)


# A product must not be fused with an addition in one program and not in another, as XLA does on CPUs even across an
# optimization barrier: `rounded` prevents it.
ORDERED = Arithmetic(lambda x, axes: trees.halves(lax.optimization_barrier(x), axes), rounded)


def _level(call: engines.Call) -> str:
    """Sums over the batch (batch statistics, gradients in scale and bias) depend on it; the rest does not."""
    return "batch_invariant" if call.spec.per_example else "run_to_run"


engines.declare(
    "xla",
    *OPS,
    run=_run_by_xla,
    level=lambda call: "run_to_run",
    accumulation=lambda call: call.spec.accumulate.name,
    hazards=engines.flushes_on_cpus,
    notes=(RANGE,),
)
engines.declare(
    "ordered",
    *OPS,
    run=ft.partial(_run, ORDERED),
    needs_sizes=lambda call: call.op != "norm" or not call.spec.per_example,
    level=_level,
    accumulation=lambda call: call.spec.accumulate.name,
    hazards=engines.flushes_on_cpus,
    rank=lambda call: selection.LAST,
    notes=("sums over a binary tree, with a pass over memory for every third level of it: slow", RANGE),
)
