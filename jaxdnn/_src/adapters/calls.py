"""What functions with lax's signatures have in common: lax's own checks, and refusals."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxdnn._src.core import checks
from jaxdnn._src.core.unpatched import unpatched


def refused(name: str, expected: str, value: Any) -> NotImplementedError:
    """The error that says what is not served: the argument, what would be, and what was given."""
    return NotImplementedError(f"`{name}` must be {expected} to be served by jaxdnn, got {checks.shown(value)}.")


def checked_by_jax(function: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
    """The types of what JAX's own function returns; what it refuses is refused as JAX does, in its words."""
    with unpatched():
        return jax.eval_shape(lambda *given: function(*given, **static), *arrays)


@contextlib.contextmanager
def serving(function: str) -> Iterator[None]:
    """Within the context, of arguments that JAX takes, what an op of this library refuses is a refusal to serve.

    So is what needs a size of which `jax.export` knows a symbol alone.
    """
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        why = str(error).partition("\n")[0]
        raise NotImplementedError(f"`{function}` is not served by jaxdnn for these symbolic sizes: {why}.") from error
    except (TypeError, ValueError) as error:
        raise NotImplementedError(f"`{function}` is not served by jaxdnn for these arguments: {error}") from error


def per_axis(values: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """One integer for each axis; None is 1 along all."""
    return (1,) * count if values is None else tuple(checks.integer("values", v) for v in values)
