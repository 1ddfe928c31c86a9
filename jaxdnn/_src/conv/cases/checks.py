"""Compares a convolution's result with the reference, by every check that the engine's declarations allow."""

import functools as ft
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxdnn_reference as reference
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases.case import (
    MODELLED,
    Check,
    Expected,
    Facts,
    architectures,
    generator,
    same_bits,
    strongest_level,
)
from jaxdnn._src.conv.cases import bits, data
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.core import engines, tolerance
from jaxdnn._src.core.tolerance import ACCUMULATIONS, Accumulation
from jaxdnn_reference import layout as axes


def facts(case: Case) -> Facts:
    """Asks `jaxdnn.explain` about a case; nothing is computed."""
    operands = [jax.ShapeDtypeStruct(case.shape(role), case.in_dtype) for role in case.roles]
    given = data.extras(case, "normal", generator(case, "normal", 0))
    extras = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in given.items()}
    if case.op == "conv_bgrad":
        return Facts(None, strongest_level(case, operands, **extras), _sum_accumulation(case))
    return plain.explained(case, case.bound, operands, **extras)


EXACT = ACCUMULATIONS["int32"]


def _sum_accumulation(case: Case) -> str:
    if case.dtype == "int8":
        return "int32"
    return "float64" if "f64" in (case.dtype, case.accumulate) else "float32"


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
    """Compares a case's result with the reference, and its bits with those of the schedule where they are predicted.

    At most `modelled` outputs are run through the model of the schedule.
    """
    out = np.asarray(outs)
    if "loses_negative_overflow" in declared.hazards:
        details = golden(case, operands, extras)
        with np.errstate(over="ignore"):
            is_lost = (out == 0) & (np.asarray(details.value, np.float64).astype(out.dtype) == -np.inf)
        out = np.where(is_lost, out.dtype.type(-np.inf), out)
        return [judge(case, kind, operands, extras, out, accumulation, details)]
    if kind == "infinite" and "leaves_out_padding" in declared.hazards:  # where it is NaN it may be anything
        details = golden(case, operands, extras)
        undecided = np.isnan(np.asarray(details.value, np.float64))
        out = np.where(undecided, np.asarray(details.value).astype(out.dtype), out)
        return [judge(case, kind, operands, extras, out, accumulation, details)]
    checks = [judge(case, kind, operands, extras, out, accumulation)]
    # A device that flushes subnormal numbers is outside of what the model describes.
    if _is_modelled(case, declared) and not (accumulation.flush and kind in data.TINY):
        checks.append(_modelled(case, kind, operands, extras, out, declared.schedule, modelled))
    return checks


def golden(case: Case, operands: Any, extras: Any) -> Any:
    """The reference's float64 result with what a bound needs (`jaxdnn_reference.Details`), not rounded."""
    arguments = {k: v for k, v in case.arguments().items() if k != "out_dtype"}
    if case.dtype == "tf32" and engines.platform() == "cuda":
        del arguments["precision"]  # whether the hardware cuts or rounds is covered by the bound
    op = getattr(reference, case.op)
    return op(*operands, *case.sizes_argument(), **arguments, **extras, details=True)


def judge(
    case: Case, kind: str, operands: Any, extras: Any, out: np.ndarray, accumulation: Accumulation, details: Any = None
) -> Check:
    """Judges a result by the computed bound, or on integers by equality."""
    details = golden(case, operands, extras) if details is None else details
    whole = kind in data.INTEGERS and accumulation.kind != "transform"  # a transform's terms are no integers
    exact = case.integer or (whole and case.blend.exact_on_integers)
    error = 0.0 if exact else error_bound(case, whole, operands, details, extras, accumulation)
    generic = kind not in (*data.INTEGERS, *data.TINY)  # next to which a prior is a coarse grid
    return plain.judge(kind, out, Expected(details.value, error, case.out_dtype, generic=generic))


def error_bound(
    case: Case, whole: bool, operands: Any, details: Any, extras: Any, accumulation: Accumulation
) -> np.ndarray:
    """E of the call: of the accumulation, of the truncation to TF32 and of the reference, propagated by the epilogue.

    `whole`: whether the sum is a sum of integers, which is exact up to its first rounding.
    """
    computed = np.asarray(details.accumulated, np.float64)
    magnitude = np.asarray(details.magnitude, np.float64)
    if accumulation.kind == "exact" or whole:
        # Integers are added exactly; an epilogue in float32 starts by rounding the sum.
        error = np.where(np.abs(computed) > 2**24, 2.0**-24 * np.abs(computed), 0.0)
    else:
        products = case.op == "conv_bgrad" or tolerance.products_are_exact(
            *["tf32" if case.dtype == "tf32" else case.in_dtype] * 2, format=accumulation.format
        )
        reach = magnitude
        if accumulation.kind == "tensor_core":
            # Addends are truncated relative to the largest exponent, and a subnormal number has its type's least one.
            reach = magnitude + 2 * (_of_least_exponents(case, operands, extras, magnitude) - magnitude)
        error = accumulation.error(computed, reach, details.terms, exact_products=products)
        if accumulation.kind == "transform":
            error = np.maximum(error, accumulation.transform_error(*norms_of_outputs(case, operands)))
        error = error + np.asarray(details.bound, np.float64)
    if case.dtype == "tf32" and engines.platform() == "cuda" and not whole:
        error = error + tolerance.truncated_inputs_error(magnitude)
    if "alpha" in extras and not case.blend.each:  # an array of powers of two, by which products are exact
        scale = np.asarray(extras["alpha"], np.float64)
        computed, error = scale * computed, scale * error
    terms = [np.asarray(extras[name], np.float64) for name in ("residual",) if name in extras]
    if "bias" in extras:
        terms.append(np.broadcast_to(case.along_channel(np.asarray(extras["bias"], np.float64)), computed.shape))
    wide = "float64" if accumulation.format == "float64" else "float32"
    alpha = case.along_channel(np.asarray(extras["alpha"], np.float64)) if case.blend.each else case.blend.alpha
    blend = Epilogue(alpha, case.blend.beta, case.blend.activation, wide)
    if case.blend.each or blend != Epilogue(format=wide) or terms:
        error = blend.error(computed, error, *terms, prior=extras.get("prior"))
    return np.where(extras["x"] > 0, error, 0.0) if "x" in extras else error


def _of_least_exponents(case: Case, operands: Any, extras: Any, magnitude: np.ndarray) -> np.ndarray:
    """S with every subnormal number replaced by the smallest normal one; zeros remain zero."""
    least = 2.0 ** float(ml_dtypes.finfo(case.in_dtype).minexp)
    sizes = [np.abs(v.astype(np.float64)) for v in operands]
    if all(((v == 0) | (v >= least) | np.isnan(v)).all() for v in sizes):
        return magnitude
    raised = [np.where(v > 0, np.maximum(v, least), v).astype(case.in_dtype) for v in sizes]
    return np.asarray(golden(case, raised, extras).magnitude, np.float64)


def _is_modelled(case: Case, declared: Facts) -> bool:
    """Whether the reference predicts the result's bits.

    It predicts those of the sum on the engine's `modelled` architectures. The epilogue must have one possible rounding
    however it is fused, and no function whose last bits depend on the device.
    """
    blend, here = case.blend, not architectures().isdisjoint(declared.modelled)
    name = blend.activation[0] if isinstance(blend.activation, tuple) else blend.activation
    joined = blend.bias or blend.residual or blend.beta
    one_way = (blend.alpha == 1 or not joined) and blend.beta in (0, 1)
    parameter = float(blend.activation[1]) if isinstance(blend.activation, tuple) else 0.0
    stored = parameter == float(np.float32(parameter))  # else the device multiplies with another number
    known = name in (None, "relu", "clipped_relu", "leaky_relu") and stored
    return here and declared.schedule is not None and one_way and known


def _modelled(case: Case, kind: str, operands: Any, extras: Any, out: np.ndarray, schedule: Any, most: int) -> Check:
    """Compares the result with the reference's run of the engine's schedule: bit for bit, the sign of zero too."""
    flat, at = out.reshape(-1), None
    million = case.geometry.name.startswith(bits.PREFIX)
    if flat.size > most and not million:
        at = np.sort(generator(case, "sample", 0).choice(flat.size, most, replace=False))
        flat = flat[at]
    plan = reference.Schedule(schedule.order, schedule.combine, classes=schedule.classes)
    settings = {"arithmetic": schedule.arithmetic, "schedule": plan, "at": at}
    arguments = case.arguments() | {"out_dtype": case.out_dtype} | extras | settings
    model = ft.partial(getattr(reference, case.op), *operands, *case.sizes_argument(), **arguments)
    wanted = (bits.processes().submit(model).result() if million else model()).reshape(-1)
    different = ~same_bits(flat, wanted)
    message = f"{int(different.sum())} of {flat.size} differ from the model's bits"
    if different.any():
        i = int(different.argmax())
        place = i if at is None else at[i]
        message += f"; first at {place}: got {float(flat[i]):.9g}, the model {float(wanted[i]):.9g}"
    return Check(kind, "modelled bits", not different.any(), message, elements=flat.size)


# ---- how much each output can be, for engines that may convolve by a transform ---------------------------------------

# Operands and result as (image, group, channel in the group) or (input channel, group, output channel).
_SUMS = {"y": "ngc,cgk->ngk", "x": "ngk,cgk->ngc", "w": "ngc,ngk->cgk"}


def norms_of_outputs(case: Case, operands: Any) -> tuple[np.ndarray, int]:
    """Σ_i ‖x_i‖₂ ‖w_i‖₂ in the shape of the result, and the number of channels (or images) i."""
    groups = case.geometry.groups
    parts = [_norms(case, role, v, groups) for role, v in zip(case.roles, operands, strict=True)]
    if case.result_role == "w":
        return _spread(case, np.einsum(_SUMS["w"], *parts), case.geometry.taps), parts[0].shape[0]
    sizes = case.geometry.outputs if case.result_role == "y" else _sizes(case)
    return _spread(case, np.einsum(_SUMS[case.result_role], *parts), sizes), parts[0].shape[2]


def _sizes(case: Case) -> tuple[int, ...]:
    shape = axes.image_axes(case.layout).canonical_shape(case.shape("x"))
    return shape[1:-1]


def _axes(case: Case, role: str) -> axes.Axes:
    if role == "w":
        return axes.filter_axes(case.filter_layout or axes.default_filter_layout(case.layout))
    return axes.image_axes(case.layout)


def _norms(case: Case, role: str, array: np.ndarray, groups: int) -> np.ndarray:
    """The 2-norms over the spatial axes, the channels split into groups."""
    canonical = _axes(case, role).to_canonical(np.asarray(array)).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        spatial = range(canonical.ndim - 2) if role == "w" else range(1, canonical.ndim - 1)
        found = np.sqrt(np.sum(canonical**2, tuple(spatial)))
    return found.reshape(found.shape[0], groups, found.shape[1] // groups)


def _spread(case: Case, values: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """One value for every pair of image and channel (or of channels), at every position of the result."""
    values = values.reshape(values.shape[0], values.shape[1] * values.shape[2])
    if case.result_role == "w":
        whole = np.broadcast_to(values, (*sizes, *values.shape))
    else:
        shape = (values.shape[0], *(1 for _ in sizes), values.shape[1])
        whole = np.broadcast_to(values.reshape(shape), (values.shape[0], *sizes, values.shape[1]))
    return _axes(case, case.result_role).from_canonical(whole)
