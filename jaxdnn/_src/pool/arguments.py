"""Reads and checks the arguments of the pooling ops, once for all of them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export

from jaxdnn._src.core import blending, checks, windows
from jaxdnn._src.core.cropping import cropped
from jaxdnn._src.core.determinism import require, required
from jaxdnn._src.core.rounding import rounded
from jaxdnn._src.core.windows import Layout, Window
from jaxdnn._src.pool.spec import PoolSpec, y_shape

MODES = ("max", "average", "average_exclude_padding", "lp")
INTEGERS = {  # that a mode takes
    "max": (jnp.int8, jnp.uint8, jnp.int32),
    "average": (jnp.int8,),
    "average_exclude_padding": (jnp.int8,),
    "lp": (),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the pooling ops have in common, as it was given."""

    window: Any
    mode: Any = "max"
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: Any = False
    layout: Any = "NHWC"
    p: Any = 2.0
    nan: Any = "propagate"
    out_dtype: Any = None
    engine: Any = None
    determinism: Any = None
    divisor: Any = None


def array(name: str, value: Any, layout: Layout) -> Array:
    """Reads an array of a layout; channel vectors stay, for a window treats all channels alike."""
    value = checks.array(name, value)
    _shape(name, value.shape, layout)
    return value


def shape_of(name: str, value: Any, layout: Layout) -> tuple[int, ...]:
    """Reads an array or a shape, and returns the shape. No image is a line of integers, so that is a shape too."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        value = tuple(value)
    if hasattr(value, "shape") and not isinstance(value, type):
        value = value.shape
    elif not checks.is_sequence(value):
        raise TypeError(f"`{name}` must be an array or a shape, got {checks.shown(value)}.")
    # `jax.export` may trace a call for batches of any size.
    sizes: Any = value
    free = lambda i, v: i == layout.batch and export.is_symbolic_dim(v)
    return _shape(name, tuple(v if free(i, v) else checks.integer(name, v) for i, v in enumerate(sizes)), layout)


def _shape(name: str, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    windows.require_shape(name, shape, layout)
    checks.countable(f"`{name}`", shape)
    return tuple(shape)


def spatial_axes(layout: Layout) -> tuple[int, ...]:
    """The spatial axes, counted from the end."""
    return tuple(axis - layout.ndim for axis in layout.spatial)


def result_dtype(mode: str, name: str, dtype: Any, out_dtype: Any) -> np.dtype:
    """Checks the mode and the dtype of an operand, and reads that of the result."""
    integers = INTEGERS[checks.choice("mode", mode, MODES)]
    found = checks.dtype(name, dtype, (*checks.FLOATS, *integers))
    choices = (*checks.FLOATS, *(t for t in integers if found == t))
    return checks.out_dtype(out_dtype, found, choices, accumulator(found))


def accumulator(dtype: Any) -> np.dtype:
    """What is computed in."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def spec(options: Options, layout: Layout, x_shape: tuple[int, ...], out_dtype: np.dtype) -> PoolSpec:
    """The spec of a call on an x of this shape."""
    spatial = spatial_axes(layout)
    sizes = tuple(x_shape[axis] for axis in spatial)
    taps = checks.integers("window", options.window, len(sizes), minimum=1)
    stride = taps if options.stride is None else options.stride
    moves = {"stride": stride, "padding": options.padding, "dilation": options.dilation}
    cut, window = cropped(windows.window(**moves, sizes=sizes, taps=taps, negative=True), layout)
    mode = checks.choice("mode", options.mode, MODES)
    exponent(options.p)
    found = PoolSpec(
        **vars(window),
        outputs=_output_sizes(window, checks.flag("ceil_mode", options.ceil_mode), layout, x_shape),
        spatial=spatial,
        out_dtype=out_dtype,
        divisor=_divisor(options.divisor, mode),
        nan=checks.choice("nan", options.nan, ("propagate", "ignore")),
        engine=options.engine,
        level=required(options.determinism),
        cut=cut,
    )
    _require_windows_in_x(found)
    return found


def _divisor(value: Any, mode: str) -> str | int | None:
    """Reads `divisor`, which mode "average" alone uses."""
    if value is None:
        return {"average": "padded", "average_exclude_padding": "valid"}.get(mode)
    if mode != "average":
        raise ValueError(f"`divisor` must be None for mode {mode!r}, expected mode 'average', got {mode!r}.")
    number = checks.integer("divisor", value)
    if not 1 <= number < 2**30:
        raise ValueError(f"`divisor` must be None or an integer from 1 to 2^30 - 1, got {number}.")
    return number


def _output_sizes(window: Window, ceil_mode: bool, layout: Layout, x_shape: tuple[int, ...]) -> tuple[int, ...]:
    padded = tuple(size + sum(pad) for size, pad in zip(window.sizes, window.padding, strict=True))
    extents = window.extents
    if max(padded) >= 2**31 or any(extent > have for extent, have in zip(extents, padded, strict=True)):
        raise ValueError(
            f"`window` must fit into the padded input of sizes {padded}, got taps {window.taps} that span {extents}"
            f"{_fits_in_other(window, layout, x_shape)}."
        )
    if not ceil_mode:
        return window.out
    result = []
    axes = zip(window.sizes, padded, extents, window.stride, window.padding, strict=True)
    for size, have, extent, stride, (low, _) in axes:
        outputs = -(-(have - extent) // stride) + 1
        result.append(outputs - ((outputs - 1) * stride >= size + low))  # the last window starts in x or before
    return tuple(result)


def _fits_in_other(window: Window, layout: Layout, x_shape: tuple[int, ...]) -> str:
    """What an error says of a window that does not fit, if it fits into x in the other layout."""
    if layout.other is None:
        return ""
    sizes = tuple(x_shape[axis] for axis in layout.other.spatial)
    axes = zip(window.extents, sizes, window.padding, strict=True)
    fits = all(extent <= size + low + high for extent, size, (low, high) in axes)
    return f" (in layout {layout.other.name} the sizes of x are {sizes})" if fits else ""


def _require_windows_in_x(spec: PoolSpec) -> None:
    for axis, size in enumerate(spec.sizes):
        steps, low = (spec.stride[axis], spec.dilation[axis]), spec.padding[axis][0]
        empty = first_empty_window(size, spec.outputs[axis], spec.taps[axis], *steps, low)
        if empty is not None:
            raise ValueError(
                f"`padding` must leave every window at least one element of the input, got {spec.padding} for "
                f"sizes {spec.sizes} and taps {spec.taps}: window {empty} of spatial axis {axis} has none."
            )


def first_empty_window(size: int, outputs: int, taps: int, stride: int, dilation: int, low: int) -> int | None:
    """The first window along an axis without an element of x; None if each has one. Sizes may be near 2^31."""
    if low > (taps - 1) * dilation:  # the first window ends before x
        return 0
    if size < dilation:  # of a window that starts before x, the first tap that is not before x may be behind it
        before = min(-(-low // stride), outputs, dilation // math.gcd(stride, dilation))  # then places repeat
        for first in range(0, before, 1 << 20):
            windows = np.arange(first, min(first + (1 << 20), before))
            empty = np.flatnonzero((windows * stride - low) % dilation >= size)
            if empty.size:
                return first + int(empty[0])
    behind = -(-(size + low) // stride)  # the first window that starts behind x
    return behind if behind < outputs else None


def exponent(value: Any) -> float:
    """Reads `p`, which mode "lp" alone uses; a wrong one is refused in every mode."""
    p = checks.as_float("p", value)
    if not 1 <= p < math.inf:
        raise ValueError(f"`p` must be at least 1 and finite, got {p!r}.")
    return p


def wants_indices(value: Any, mode: str, choices: Sequence[Any]) -> bool:
    """Reads `return_indices`: False, or one of the choices."""
    if isinstance(value, bool | np.bool_):
        value = bool(value)
    if value is not False and not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        names = ", ".join(map(repr, (False, *choices[:-1])))
        raise ValueError(f"`return_indices` must be {names} or {choices[-1]!r}, got {checks.shown(value)}.")
    if value is not False and mode != "max":
        raise ValueError(f"`return_indices` must be False for mode {mode!r}, expected mode 'max', got {mode!r}.")
    return value is not False


def require_level(spec: PoolSpec, mode: str, alpha: Any, beta: Any) -> None:
    """What is computed outside of the engines is a power, or a product and a sum that a compiler may fuse."""
    static = checks.is_number(alpha) and checks.is_number(beta)
    fused = not static or (beta != 0 and (alpha != 1 or beta != 1))
    for holds, what in ((mode == "lp", "mode 'lp'"), (fused, "a blend of two scaled terms")):
        if holds:
            require(what, spec.level, "mesh_invariant")


def finish(y: Array, alpha: Any, beta: Any, prior: Any, out: np.dtype, dtype: Any) -> Array:
    """alpha * y + beta * prior in the accumulator's precision, where that is more than y, and the one conversion."""
    if blending.is_plain(alpha, beta) and prior is None:
        return rounded(blending.convert(y, out))
    wide = y.astype(accumulator(y.dtype))
    dtypes = (dtype,) if dtype is not None else ()
    return blending.blend(wide, alpha=alpha, beta=beta, prior=prior, out=out, dtypes=dtypes)


def taps_of(spec: PoolSpec, indices: Any, y_shape: tuple[int, ...]) -> Array:
    """Reads `indices`, flat positions in x (int32) or taps (unsigned), as taps."""
    indices = checks.array("indices", indices)
    checks.shape("indices", indices, y_shape, "the result's of the pooling")
    if indices.dtype == spec.tap_dtype:
        return indices
    checks.dtype("indices", indices, (jnp.int32, spec.tap_dtype))
    return taps_at(spec, indices)


def taps_at(spec: PoolSpec, positions: Array) -> Array:
    """The tap of every window that lies at a flat position of x; the largest number of its dtype where none does."""
    rest, tap, factor = positions, jnp.zeros(positions.shape, jnp.int32), 1
    inside = positions >= 0
    spec = spec.uncut
    for i, axis in list(enumerate(spec.spatial))[::-1]:
        stride, dilation, (low, _) = spec.stride[i], spec.dilation[i], spec.padding[i]
        start = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim + axis) * stride - low
        at, rest = (rest % spec.sizes[i], rest // spec.sizes[i]) if i else (rest, rest)
        r = (at - start) // dilation
        inside = inside & (at >= start) & ((at - start) % dilation == 0) & (r < spec.taps[i])
        tap, factor = tap + r * factor, factor * spec.taps[i]
    return jnp.where(inside, tap, -1).astype(jnp.uint8 if math.prod(spec.taps) < 256 else jnp.uint32)


def like_y(name: str, spec: PoolSpec, y: Array, x_shape: tuple[int, ...]) -> None:
    """Checks that an array is shaped like the result of the pooling."""
    checks.shape(name, y, y_shape(spec, x_shape), f"as the pooling of {x_shape} has")
