"""The only validators: each raises one sentence that names the argument, what was expected and what was got."""

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.compat import Tracer
from jaxdnn._src.core.peers import ELSEWHERE

T = TypeVar("T")
LONG = 200  # characters of a value that an error shows
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)  # that most ops take
LARGEST = 2**31 - 1  # of a stride, a padding, a dilation: beyond, sizes overflow in XLA


def array(name: str, value: Any) -> Array:
    """Returns `value` as JAX's array.

    Outside of the 64-bit mode NumPy's float64 and int64 become float32 and int32, as everywhere in JAX. An array of JAX
    that has such a dtype is an error: the operations on it would be of 32 bits, or of types that do not match.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype") and getattr(value.dtype, "kind", "O") in "OSUMm":
        raise TypeError(f"`{name}` must be an array of numbers, got one of {value.dtype}.")
    if isinstance(value, Array):
        if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
            raise TypeError(
                f"`{name}` must have a dtype of JAX's 32-bit mode, got {value.dtype}; "
                "enable jax_enable_x64 for the call, or convert it."
            )
        # What is traced of one of Python's numbers becomes an array, for rules of derivatives get the number as it is.
        # All others are returned as `jnp.asarray` would, a hundred times as fast.
        return lax.convert_element_type(value, value.dtype) if value.weak_type else value
    try:
        return jnp.asarray(value)
    except OverflowError as error:
        raise TypeError(f"`{name}` must be an array, got an integer that JAX's integers do not hold.") from error
    except (TypeError, ValueError) as error:
        if isinstance(value, np.ndarray) and not value.dtype.isnative:
            raise TypeError(
                f"`{name}` must have the byte order of this machine, got {value.dtype}; "
                f"`{name}.astype({name}.dtype.newbyteorder('='))` has it."
            ) from error
        if type(value) is np.ndarray:
            raise TypeError(f"`{name}` must be an array of a dtype that JAX has, got {value.dtype}.") from error
        raise TypeError(f"`{name}` must be an array, got {type(value).__name__}.") from error


def shown(value: Any) -> str:
    """A value as an error shows it: an array's dtype and shape, and of what is long only the beginning."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        kind = "a traced array" if isinstance(value, Tracer) else "an array"
        return f"{kind} of {value.dtype} of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def choice(name: str, value: T, choices: Sequence[T]) -> T:
    """Returns `value` if it is one of `choices`: names, or None."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        meant = did_you_mean(value, choices)
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {shown(value)}{meant}.")
    return value


def did_you_mean(value: Any, choices: Sequence[Any]) -> str:
    """What an error says behind a name: the choice that is spelt nearly so, or that others call so; or nothing.

    A function, `jax.nn.relu` for one, is taken by its name.
    """
    value = getattr(value, "__name__", value) if callable(value) else value
    if not isinstance(value, str):
        return ""
    names = {name.lower(): name for name in choices if isinstance(name, str)}
    given = value.lower()
    near = difflib.get_close_matches(given, names, 1, cutoff=0.7)
    for name in (given, *ELSEWHERE.get(given.replace("-", "_"), ()), *near):
        if name is None and None in choices:
            return " (did you mean None?)"
        if isinstance(name, tuple) and name[0] in names:
            return f" (did you mean {name!r}?)"
        if isinstance(name, str) and name.lower() in names:
            return f" (did you mean {names[name.lower()]!r}?)"
    return ""


def shape(name: str, value: Any, expected: tuple[int, ...], why: str, hint: str = "") -> None:
    """Checks the whole shape; `why` says where the expectation comes from, `hint` what may be meant by another."""
    if tuple(value.shape) != expected:
        found = tuple(value.shape)
        raise ValueError(
            f"`{name}` must have shape {expected}, {why}, got {found}{reordered(found, expected) or hint}."
        )


def reordered(found: tuple[Any, ...], expected: tuple[Any, ...]) -> str:
    """What an error says behind a shape that has the expected sizes along other axes; nothing of other shapes."""
    if found == expected or Counter(found) != Counter(expected):
        return ""
    return "; it looks transposed" if len(found) == 2 else "; it has these sizes in another order, as in another layout"


def unbatched(name: str, axes: int, wanted: int) -> str:
    """What an error says behind a shape with so many axes if it lacks one: how one example becomes a batch."""
    return f" (one example is a batch as `{name}[None]`)" if axes == wanted - 1 else ""


def dtype(name: str, value: Any, choices: Sequence[Any]) -> np.dtype:
    """Returns the dtype of an array (or the dtype itself) if it is one of `choices`."""
    found = np.dtype(value.dtype if hasattr(value, "dtype") else value)
    if found not in [np.dtype(c) for c in choices]:
        names = [np.dtype(c).name for c in choices]
        raise TypeError(f"`{name}` must have {_one_of(names)}, got {found.name}.")
    return found


def _one_of(dtypes: Sequence[str]) -> str:
    return f"the dtype {dtypes[0]}" if len(dtypes) == 1 else f"one of the dtypes {', '.join(dtypes)}"


def as_dtype(name: str, value: Any, choices: Sequence[Any]) -> np.dtype:
    """Reads a dtype argument."""
    if hasattr(value, "shape") and not isinstance(value, np.dtype | type):
        raise TypeError(f"`{name}` must be a dtype, got an array of shape {tuple(value.shape)}.")
    names = [np.dtype(c).name for c in choices]
    try:
        found = np.dtype(value)
    except TypeError as error:
        meant = did_you_mean(value, names)
        raise TypeError(f"`{name}` must be a dtype, got {shown(value)}{meant}.") from error
    if found.name not in names:
        got = shown(value) if isinstance(value, str) and value != found.name else found.name
        raise TypeError(f"`{name}` must have {_one_of(names)}, got {got}{did_you_mean(value, names)}.")
    return found


def out_dtype(value: Any, own: Any, choices: Sequence[Any], accumulate: Any) -> np.dtype:
    """Reads `out_dtype`, which must not be float64 where the accumulator is not; None is `own`."""
    found = np.dtype(own) if value is None else as_dtype("out_dtype", value, choices)
    if found == np.float64 and accumulate != np.float64:
        accumulator = np.dtype(accumulate).name
        raise TypeError(f"`out_dtype` must not be wider than the accumulator {accumulator}, got {found.name}.")
    return found


def flag(name: str, value: Any) -> bool:
    """Returns a Python or NumPy bool as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False, got {shown(value)}.")
    return bool(value)


def integer(name: str, value: Any) -> int:
    """Returns a Python or NumPy integer as an int; a bool, a float or a traced value is an error."""
    value = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be made of integers known when traced, got {shown(value)}.")
    return int(value)


def countable(what: str, sizes: Sequence[int]) -> None:
    """Checks that arrays of these sizes have fewer than 2^63 elements: XLA ends the process where they have more."""
    known = [size for size in sizes if isinstance(size, int)]  # the batch may be symbolic
    if math.prod(known) >= 2**63:
        raise ValueError(f"{what} must give fewer than 2^63 elements, got shape {shown(tuple(sizes))}.")


def is_sequence(value: Any) -> bool:
    """Whether a value is several values; a string is one, and so is a NumPy array without axes."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_number(value: Any) -> bool:
    """Whether a value is a Python or NumPy number; a bool and an array are none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def as_float(name: str, value: Any) -> float:
    """Returns a Python or NumPy number as a float; a bool, an array or a traced value is an error."""
    if not is_number(value):
        raise TypeError(f"`{name}` must be a number known when traced, got {shown(value)}.")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(
            f"`{name}` must be a number that a float holds, got one of {len(str(value))} digits."
        ) from error


def finite(name: str, value: Any) -> float:
    """As `as_float`; NaN and infinities are errors too."""
    number = as_float(name, value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be a finite number, got {number}.")
    return number


def integers(name: str, value: Any, count: int, *, minimum: int) -> tuple[int, ...]:
    """Reads an integer, or one integer per spatial axis, none below `minimum`."""
    values = tuple(value) if is_sequence(value) else (value,) * count
    if len(values) != count:
        raise ValueError(f"`{name}` must be an integer or {count} integers, one per spatial axis, got {shown(value)}.")
    result = tuple(integer(name, v) for v in values)
    if min(result) < minimum:
        raise ValueError(f"`{name}` must be at least {minimum} along every axis, got {shown(value)}.")
    if max(result) > LARGEST:
        raise ValueError(f"`{name}` must be at most {LARGEST} along every axis, got {shown(value)}.")
    return result


def axes(of: str, value: Any, rank: int, *, minimum: int = 1) -> tuple[int, ...]:
    """Reads `axis`, at least `minimum` different axes of the array `of`, and returns them counted from 0, ascending."""
    found = [integer("axis", a) for a in (value if is_sequence(value) else (value,))]
    if found and not rank:
        raise ValueError(f"`{of}` must have at least one axis, got a scalar.")
    if len(found) < minimum or any(not -rank <= a < rank for a in found):
        raise ValueError(f"`axis` must be made of axes from {-rank} to {rank - 1} of `{of}`, got {shown(value)}.")
    result = tuple(sorted(a % rank for a in found))
    if len(set(result)) < len(result):
        raise ValueError(f"`axis` must name every axis once, got {shown(value)}.")
    return result
