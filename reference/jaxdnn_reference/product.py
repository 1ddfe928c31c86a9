"""Ops as matrix products: the sums of a product, their blend, their activation, and the one rounding.

    result = act(alpha * sum + beta * prior + residual + bias)                with beta = 0 prior is not read

all in the accumulator's precision, and one rounding at the end.

Numerics. The accumulator is float32 (float64 for float64 inputs or accumulate=float64; "golden": float64, or
np.longdouble for float64 inputs). alpha * sum, beta * prior, and each sum with prior, residual and bias are rounded one
after another, and the activation is rounded from float64. int8: the sum is exact and wraps to int32. If alpha is 1,
beta 0 or 1, the activation none or relu, and what is added integers, it is added in wrapping int32; otherwise
float32(sum) (golden: float64) goes through the formula.

Sources: the cuDNN developer guide, "Scaling Parameters"; cudnnConvolutionBiasActivationForward.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference.activation import Activation, activate, parse
from jaxdnn_reference.arithmetic import Schedule, dot, dot_with_bound, magnitude, wrapped
from jaxdnn_reference.layout import Axes
from jaxdnn_reference.rounding import FLOAT32, FLOAT64, INT32, round_to

Array = np.ndarray[Any, Any]

# Elements of the patch matrix that exist at one time.
PATCH_ELEMENTS = 1 << 20


class Details(NamedTuple):
    """What `details=True` returns: the result, and what a computed tolerance needs, element by element.

    value: the result. blended: the argument of the activation. accumulated: the sum before alpha.
    bound: |accumulated - exact sum| <= bound, from the partial sums of the arithmetic used.
    magnitude: S = sum |a||b|. terms: how many products with a stored number (no padding) the sum has.
    """

    value: Array
    blended: Array
    accumulated: Array
    bound: Array
    magnitude: Array
    terms: Array


class Product(NamedTuple):
    """An op as a matrix product: in each group [rows, terms] times [terms, columns].

    left(row, group) and right(column, group) give [..., terms] for index arrays of any common shape;
    stored(row) gives how many of the terms are stored numbers. The result [rows, groups * columns] is the
    output in its canonical form, whose shape is `shape`.
    """

    groups: int
    rows: int
    columns: int
    left: Callable[[Array, Array], Array]
    right: Callable[[Array, Array], Array]
    stored: Callable[[Array], Array]
    axes: Axes
    shape: tuple[int, ...]


def finish(
    total: Callable[[], Array],
    product: Product,
    in_dtype: np.dtype,
    /,
    *,
    alpha: float | Array = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    relu: Array | None = None,
    activation: Activation = None,
    accumulate: Any = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
    schedule: Schedule | None = None,
    at: Array | None = None,
    details: bool = False,
) -> Any:
    """Add up, blend, activate, round: act(alpha * sum + beta * prior + residual + bias).

    total(): the golden sums [groups, rows, columns]. product: the same sums, for the other arithmetics, `at` and
        `details`.
    alpha: a number, [K], or what broadcasts to the output. bias: [K].
    prior, residual: in the output's shape and layout.
    relu: likewise; a gradient is then that before the relu that gave this: 0 where it is not positive.
    out_dtype: default the input's type; "golden" does not round unless one is given.
    at: flat positions in the output as it lies; only these are computed and returned, as a vector.
    details: return `Details` instead of the result alone.
    """
    axes, shape = product.axes, product.shape
    alpha = np.broadcast_to(alpha, axes.shape(shape)) if np.ndim(alpha) > 1 else alpha
    if at is None:
        if arithmetic == "golden" and not details:
            with np.errstate(invalid="ignore", over="ignore"):
                parts = [np.moveaxis(wrapped(total(), in_dtype), 0, -2)]
        else:
            parts = all_sums(product, arithmetic, schedule, accumulate, details)
        parts = [axes.from_canonical(part.reshape(shape)) for part in parts]
        prior_at, residual_at, relu_at = prior, residual, relu
        along = [-1 if a == "C" else 1 for a in axes.canonical]
        wide = lambda v: axes.from_canonical(np.broadcast_to(v.reshape(along), shape))
        bias_at, alpha_at = (
            None if bias is None else wide(bias),
            wide(np.asarray(alpha)) if np.ndim(alpha) == 1 else alpha,
        )
    else:
        at = np.asarray(at)
        position = axes.canonical_positions(at, shape)
        parts = sums_at(product, position, arithmetic, schedule, accumulate, details)
        prior_at, residual_at, relu_at = (None if v is None else v.reshape(-1)[at] for v in (prior, residual, relu))
        bias_at = None if bias is None else bias[position % shape[-1]]
        alpha_at = np.asarray(alpha)[position % shape[-1]] if np.ndim(alpha) == 1 else alpha
        alpha_at = np.asarray(alpha).reshape(-1)[at] if np.ndim(alpha) > 1 else alpha_at
    added = (residual_at, bias_at)
    blended = blend(parts[0], alpha_at, beta, prior_at, added, activation, exact=arithmetic == "golden")
    value = blended if parse(activation)[0] == "identity" else activated(blended, activation)
    if relu_at is not None:
        value = np.where(relu_at > 0, value, np.zeros_like(value))
    if out_dtype is not None or arithmetic != "golden":
        value = round_to(value, in_dtype if out_dtype is None else out_dtype)
    return Details(value, blended, *parts) if details else value


def all_sums(
    product: Product, arithmetic: str, schedule: Schedule | None, accumulate: Any, details: bool
) -> list[Array]:
    """The sums, and with details their bounds, magnitudes and numbers of terms, each [rows, groups * columns].

    They are computed a block of rows at a time, to bound the memory that the patch matrix takes.
    """
    group = np.arange(product.groups)[:, None]
    b = product.right(np.arange(product.columns)[None], group).swapaxes(-1, -2)
    width = product.groups * product.columns
    height = max(1, PATCH_ELEMENTS // max(1, product.groups * b.shape[-2]))
    blocks = []
    for start in range(0, max(1, product.rows), height):
        row = np.arange(start, min(start + height, product.rows))
        a = product.left(row[None], group)
        add = lambda at, plan, a=a: sums(a[:, at], b, arithmetic, plan, accumulate, details)
        parts = in_classes(product, row, schedule, add, 1)
        if details:
            parts.append(np.broadcast_to(product.stored(row)[:, None], parts[0].shape))
        blocks.append([np.moveaxis(part, 0, 1).reshape(len(row), width) for part in parts])
    return [np.concatenate(part) for part in zip(*blocks, strict=True)]


def sums_at(
    product: Product, position: Array, arithmetic: str, schedule: Schedule | None, accumulate: Any, details: bool
) -> list[Array]:
    """`all_sums` at canonical flat positions, each a vector."""
    row, column = np.divmod(position, product.groups * product.columns)
    group, column = np.divmod(column, product.columns)
    terms = product.left(row[:1], group[:1]).shape[-1]
    count = max(1, PATCH_ELEMENTS // max(1, terms))
    blocks = []
    for start in range(0, max(1, len(position)), count):
        part = slice(start, start + count)
        a = product.left(row[part], group[part])[:, None, :]
        b = product.right(column[part], group[part])[:, :, None]
        add = lambda at, plan, a=a, b=b: sums(a[at], b[at], arithmetic, plan, accumulate, details)
        found = [sum_[:, 0, 0] for sum_ in in_classes(product, row[part], schedule, add, 0)]
        blocks.append([*found, product.stored(row[part])] if details else found)
    return [np.concatenate(part) for part in zip(*blocks, strict=True)]


def in_classes(
    product: Product, row: Array, schedule: Schedule | None, add: Callable[[Any, Any], list[Array]], axis: int
) -> list[Array]:
    """add(indices into `row`, their schedule), once for each order of additions; its arrays joined along `axis`."""
    if schedule is None or schedule.classes is None:
        return add(slice(None), schedule)
    _, *place = np.unravel_index(row, product.shape[:-1])
    split = schedule.by_class(tuple(place))
    back = np.argsort(np.concatenate([at for at, _ in split]))
    found = zip(*(add(at, plan) for at, plan in split), strict=True)
    return [np.take(np.concatenate(part, axis), back, axis) for part in found]


def sums(a: Array, b: Array, arithmetic: str, schedule: Schedule | None, accumulate: Any, details: bool) -> list[Array]:
    """[the sums] or, with details, [the sums, their bounds, their magnitudes]."""
    if not details:
        return [dot(a, b, arithmetic, schedule, accumulate=accumulate)]
    return [*dot_with_bound(a, b, arithmetic, schedule, accumulate=accumulate), magnitude(a, b)]


def blend(
    summed: Array,
    alpha: float | Array,
    beta: float,
    prior: Array | None,
    added: Sequence[Array | None],
    activation: Activation,
    *,
    exact: bool,
) -> Array:
    """alpha * sum + beta * prior + residual + bias in the accumulator's type. With beta = 0 prior is not read."""
    present, unscaled = [v for v in added if v is not None], np.ndim(alpha) == 0 and bool(alpha == 1)
    if summed.dtype == INT32:
        if beta == 1 and prior is not None:
            present, beta = [prior, *present], 0.0
        plain = unscaled and beta == 0 and parse(activation)[0] in ("identity", "relu")
        if plain and all(np.issubdtype(v.dtype, np.integer) for v in present):
            return sum((v.astype(np.int64) for v in present), summed.astype(np.int64)).astype(np.int32)
        summed = summed.astype(FLOAT64 if exact else FLOAT32)
    kind = summed.dtype.type
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        total = summed if unscaled else np.asarray(alpha).astype(kind) * summed
        if beta != 0 and prior is not None:
            total = total + kind(beta) * prior.astype(kind)
        for term in present:
            total = total + term.astype(kind)
    return total


def activated(x: Array, activation: Activation) -> Array:
    """The activation in x's type: float32 by way of float64, wider types in their own precision."""
    wide = activate(x.astype(np.float64) if x.dtype == FLOAT32 else x, activation)
    return wide.astype(x.dtype)
