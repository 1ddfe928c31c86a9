"""What layers of several frameworks have in common: computations on this library's ops, and refusals by name."""

import contextlib
import functools as ft
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.adapters.calls import refused
from jaxdnn._src.adapters.patch import Patched
from jaxdnn._src.core import checks, engines
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn._src.core.determinism import determinism as required_level
from jaxdnn._src.dropout.api import dropout, dropout_mask
from jaxdnn._src.norm import devices as several
from jaxdnn._src.norm.batch import batch_norm, batch_norm_inference
from jaxdnn._src.norm.group import group_norm
from jaxdnn._src.norm.rows import layer_norm, rms_norm


@contextlib.contextmanager
def served(engine: str | None, determinism: str | None) -> Iterator[None]:
    """Within the context JAX's functions that `patch` knows are this library's; what one does not serve raises."""
    with contextlib.ExitStack() as stack:
        if determinism is not None:
            stack.enter_context(required_level(checks.choice("determinism", determinism, LEVELS)))
        if engine is not None:
            stack.enter_context(engines.asked(checks.choice("engine", engine, engines.names())))
        patched = stack.enter_context(Patched(None, importers=False))  # the frameworks call jax.nn's by these names
        yield
    for call in patched.left:
        raise NotImplementedError(call.reason)


@contextlib.contextmanager
def required(module: str, framework: str, extra: str) -> Iterator[None]:
    """Around imports of a framework, which is the distribution `extra`: without it, one sentence says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != extra:
            raise
        message = f"`{module}` needs {framework}, which `pip install jaxdnn[{extra}]` installs."
        raise ModuleNotFoundError(message, name=extra) from error


def others_of(module: str, framework: ModuleType) -> Callable[[str], Any]:
    """The `__getattr__` of a module: the names that it has not are the framework's own, for programs that import one
    in place of the other."""

    def found(name: str) -> Any:
        if name.startswith("_") or not hasattr(framework, name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}, nor has {framework.__name__!r}")
        return getattr(framework, name)

    return found


class Asked:
    """What every layer has besides its framework's: the engine and the level that are asked for."""

    engine: str | None
    determinism: str | None

    @property
    def _how(self) -> dict[str, Any]:
        return {"engine": self.engine, "determinism": self.determinism}


class Layer(Asked):
    """The constructor of the framework's class that stands behind this one, with `engine` and `determinism` besides."""

    def __init__(self, *args: Any, engine: str | None = None, determinism: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = engine
        self.determinism = determinism


def require_unset(**arguments: Any) -> None:
    """Refuses, by name, arguments that are served with None alone."""
    for name, value in arguments.items():
        if value is not None:
            raise refused(name, "None", value)


# ---- normalisations --------------------------------------------------------------------------------------------------


def axes_of(rank: int, axes: int | Sequence[int]) -> tuple[int, ...]:
    """Axes that may be one number or negative, as distinct numbers in ascending order."""
    given = (axes,) if isinstance(axes, int | np.integer) else tuple(axes)
    return tuple(sorted({axis + rank if axis < 0 else axis for axis in given}))


_LAYOUTS = {3: "NWC", 4: "NHWC", 5: "NDHWC"}


def _with_pixels(x: Array, axis: int) -> tuple[Array, str]:
    """The array in a layout of channels, which are along `axis`: batch first, and pixels, at least one."""
    if x.ndim in _LAYOUTS and axis == x.ndim - 1:
        return x, _LAYOUTS[x.ndim]
    if x.ndim in _LAYOUTS and axis == 1:
        letters = _LAYOUTS[x.ndim]
        return x, f"NC{letters[1:-1]}"
    x = jnp.moveaxis(x, axis, -1)
    return x.reshape(x.shape[0] if x.ndim > 1 else 1, math.prod(x.shape[1:-1]), x.shape[-1]), "NWC"


def _restored(y: Array, shape: tuple[int, ...], axis: int) -> Array:
    """The result of what `_with_pixels` has brought in a layout, in the shape that the array had."""
    if y.shape == shape:
        return y
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    return jnp.moveaxis(y.reshape(moved), -1, axis)


def batch_statistics(
    x: Array, scale: Any, bias: Any, *, axis: int, eps: float, out_dtype: Any, axis_name: Any, **how: Any
) -> tuple[Array, Array, Array]:
    """x normalised by its own statistics over all axes but one, the mean, and the variance, which is the biased one."""
    given, layout = _with_pixels(x, axis)
    y, mean, _, _, unbiased = batch_norm(
        given, scale=scale, bias=bias, eps=eps, axis_name=axis_name, layout=layout, out_dtype=out_dtype, **how
    )
    count = x.size // x.shape[axis] * (1 if axis_name is None else several.devices(axis_name))
    # Of one element the unbiased variance is NaN, and the biased one is 0.
    variance = jnp.zeros_like(unbiased) if count == 1 else unbiased * jnp.asarray((count - 1) / count, unbiased.dtype)
    return _restored(y, x.shape, axis), mean, variance


def by_statistics(
    x: Array, mean: Array, variance: Array, scale: Any, bias: Any, *, axis: int, engine: str | None, **how: Any
) -> Array:
    """x normalised by given statistics: a formula of XLA's, whatever engine is asked for."""
    given, layout = _with_pixels(x, axis)
    y = batch_norm_inference(given, mean, variance, scale=scale, bias=bias, layout=layout, **how)
    return _restored(y, x.shape, axis)


def over_axes(
    x: Array,
    scale: Any,
    bias: Any,
    *,
    reduced: Sequence[int],
    features: Sequence[int],
    eps: float,
    centred: bool,
    out_dtype: Any,
    **how: Any,
) -> Array:
    """x normalised over the axes `reduced`, with a scale and a bias that extend along the axes `features`."""
    norm: Callable[..., Any] = layer_norm if centred else rms_norm
    sizes = [x.shape[axis] for axis in features]
    for name, v in (("scale", scale), ("bias", bias)):
        if v is not None and v.size != math.prod(sizes):
            raise ValueError(f"`x` must have {v.size} features, as the layer's {name}, got {sizes} along {features}.")
    scale, bias = (None if v is None else v.reshape(sizes) for v in (scale, bias))
    if tuple(reduced) == tuple(features):
        return norm(x, axis=reduced, scale=scale, bias=bias, eps=eps, out_dtype=out_dtype, **how)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = norm(x, axis=reduced, eps=eps, out_dtype=wide, **how)
    spread = [x.shape[axis] if axis in features else 1 for axis in range(x.ndim)]
    y = y if scale is None else y * scale.astype(wide).reshape(spread)
    y = y if bias is None else y + bias.astype(wide).reshape(spread)
    return y.astype(out_dtype)


def over_groups(x: Array, scale: Any, bias: Any, *, groups: int, eps: float, axis: int, **how: Any) -> Array:
    """x normalised, for each element of the first axis, over groups of its channels and everything but these."""
    given, layout = _with_pixels(x, axis)
    y: Any = group_norm(given, groups=groups, scale=scale, bias=bias, eps=eps, layout=layout, **how)
    return _restored(y, x.shape, axis)


def one_axis(name: str, rank: int, axes: Any) -> int:
    """An axis of features; several are refused."""
    found = axes_of(rank, axes)
    if len(found) != 1:
        raise refused(name, "one axis", axes)
    return found[0]


def along(rank: int, reduced: Any, features: Any, centred: bool = True) -> Callable[..., Array]:
    """`over_axes` for these axes."""
    return ft.partial(over_axes, reduced=axes_of(rank, reduced), features=axes_of(rank, features), centred=centred)


def grouped(rank: int, reduced: Any, groups: int) -> Callable[..., Array]:
    """`over_groups` of channels last; axes that are not all but the first are refused."""
    if reduced is not None and axes_of(rank, reduced) != (*range(1, rank - 1), rank - 1):
        raise refused("reduction_axes", "None or all axes but the first", reduced)
    return ft.partial(over_groups, groups=groups, axis=rank - 1)


def instances(rank: int, features: Any) -> Callable[..., Array]:
    """`over_axes` of all axes but the first and those of features."""
    features = axes_of(rank, features)
    if 0 in features:
        raise ValueError(f"`feature_axes` must not have the first axis, which is the batch, got {features}.")
    return along(rank, [axis for axis in range(1, rank) if axis not in features], features)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropped(x: Array, key: Any, rate: float, shared: Sequence[int] = (), **how: Any) -> Array:
    """x with elements dropped, along the axes `shared` all alike."""
    if not shared:
        return dropout(x, key, rate=rate, **how)
    axes = axes_of(x.ndim, shared)
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    kept = jnp.broadcast_to(dropout_mask(key, shape, rate=rate, **how), x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x)) if rate < 1 else jnp.zeros_like(x)


# ---- functions -------------------------------------------------------------------------------------------------------


def served_function(function: Callable[..., Any], doc: str) -> Callable[..., Any]:
    """A framework's function within `served`, with `engine` and `determinism` besides."""

    @ft.wraps(function)
    def call(*args: Any, engine: str | None = None, determinism: str | None = None, **kwargs: Any) -> Any:
        with served(engine, determinism):
            return function(*args, **kwargs)

    call.__doc__ = doc
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = (inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("engine", "determinism"))
    call.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
    return call
