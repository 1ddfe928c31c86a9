"""The calls of lax that are this library's own, which `jaxdnn.patch` leaves to lax: an engine's, for example."""

import contextlib
import contextvars
from collections.abc import Iterator

_own: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxdnn_own_calls_of_lax", default=False)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Within the context lax's functions are lax's own."""
    token = _own.set(True)
    try:
        yield
    finally:
        _own.reset(token)


def is_unpatched() -> bool:
    """Whether a call is this library's own."""
    return _own.get()
