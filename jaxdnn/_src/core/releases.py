"""The version as a number and a check of it; how a name is retired."""

import functools as ft
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jaxdnn._version import __version__

P = ParamSpec("P")
R = TypeVar("R")


def number(version: str) -> int:
    """10000 major + 100 minor + patch; what is left out is 0."""
    parts = version.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isdecimal() and int(part) < 100 for part in parts):
        raise ValueError(f"a version must be one to three numbers below 100 with points between, got {version!r}.")
    major, minor, patch = (*map(int, parts), 0, 0, 0)[:3]
    return 10_000 * major + 100 * minor + patch


VERSION = number(__version__)
"""This version as one number, 10000 major + 100 minor + patch."""


def check_version(least: str, /, *, below: str | None = None) -> None:
    """Raises if this version of the library is not one that a program was written for.

    Args:
      least: the first version that will do, such as "0.1" or "0.1.2".
      below: the first that will not; None if every later one will.

    Returns:
      None.

    Differentiation: it is no function of arrays.

    Numerics: nothing is computed.

    Raises:
      ImportError: the version is another. ValueError: an argument is no version.

    Example:
      >>> dnn.check_version("0.1", below="1")
      >>> dnn.VERSION >= 100
      True

    Sources: cuDNN's `cudnnGetVersion` and `cudnnGraphVersionCheck`; `jaxdnn.VERSION` counts as `CUDNN_VERSION` of
      cuDNN 9 does, 10000 major + 100 minor + patch.
    """
    first, last = number(least), None if below is None else number(below)
    if first > VERSION or (last is not None and last <= VERSION):
        wanted = f"at least {least}" + (f" and below {below}" if below else "")
        raise ImportError(f"jaxdnn must be {wanted}, and {__version__} is installed.")


# ---- retiring a name -------------------------------------------------------------------------------------------------

_retired: dict[str, str] = {}  # what `deprecated` has marked, with the version that no longer has it


def deprecated(
    *, since: str, gone: str, instead: str, argument: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a function, or one argument of it, that a later version will not have; until then it does what it did.

    The first step of two: calls warn with a `DeprecationWarning`, and the docstring's first line says so. The second is
    to remove it in version `gone`, which a test asks for, and never to use the name for anything else.

    Args:
      since: the version that warns first.
      gone: the version that has it no more: the next major one, before 1.0 the next minor one.
      instead: what to use, as a clause: "use `conv(stride=...)`".
      argument: the argument's name; None marks the whole function.
    """
    if number(since) >= number(gone):
        raise ValueError(f"`gone` must be a later version than `since`, got {gone} and {since}.")

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        name = f"`{function.__name__}`" if argument is None else f"`{argument}` of `{function.__name__}`"
        said = f"{name} is deprecated since {since} and will be gone in {gone}: {instead}."
        _retired[name] = gone

        @ft.wraps(function)
        def warning(*args: P.args, **kwargs: P.kwargs) -> R:
            if argument is None or argument in kwargs:
                warnings.warn(said, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        if argument is None:
            warning.__doc__ = f"Deprecated: {instead}.\n\n{function.__doc__ or ''}"
            warning.__deprecated__ = said  # pyright: ignore[reportAttributeAccessIssue]
        return warning

    return mark


def overdue() -> list[str]:
    """What should be gone in this version, and is still here."""
    return [name for name, gone in _retired.items() if number(gone) <= VERSION]
