"""Log lines: which engine serves a call and why no other does, by Python's `logging` under the name "jaxdnn".

A call is chosen for when it is lowered. What JAX has compiled before is not lowered again, and says nothing again.
Nothing is logged as an error: errors are raised.
"""

import contextlib
import contextvars
import functools as ft
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

from jaxdnn._src.core import checks, engines
from jaxdnn._src.core.engines import Call

LEVEL, DESTINATION = "JAXDNN_LOGLEVEL", "JAXDNN_LOGDEST"
# 1, 2 and 3, as in cuDNN, whose third is "info"; 0 is off. Programs that show Python's info lines get none of ours.
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "debug": logging.DEBUG}
STREAMS = ("stdout", "stderr")

logger = logging.getLogger("jaxdnn")
logger.addHandler(logging.NullHandler())  # without it Python would print warnings unasked
_changing = threading.Lock()
_wanted: list[int] = []  # the levels that handlers of this module want
# Whether an error will be raised once more, and is logged then.
raised_again: contextvars.ContextVar[bool] = contextvars.ContextVar("raised_again", default=False)


@contextlib.contextmanager
def logged(callback: Callable[[logging.LogRecord], object], /, *, level: str = "debug") -> Iterator[None]:
    """Calls a function with every line that the library logs meanwhile, whichever thread logs it.

    Args:
      callback: takes a `logging.LogRecord`: its `getMessage()` is the line. Of a choice of an engine it has the
        attributes `op`; `engine`, None where none serves; `platform`; and `refusals`, the reasons of those that come
        first and do not serve, by name.
      level: the least severe lines that are passed on: "debug" for choices, "warning" for a file of measurements that
        cannot be read, "error" for nothing.

    Returns:
      A context manager.

    Differentiation: calls of derivatives are logged as those of ops are.

    Numerics: no bit of a result depends on it.

    Raises:
      ValueError: an unknown level. What the callback raises reaches the call that is being logged.

    Example:
      >>> served = []
      >>> with dnn.logged(lambda record: served.append((record.op, record.engine))):
      ...     y = jax.jit(lambda x: dnn.softmax(x, axis=0))(jnp.ones(7))
      >>> served
      [('softmax', 'xla')]

    Sources: cuDNN's `cudnnSetCallback`. `JAXDNN_LOGLEVEL` and `JAXDNN_LOGDEST` write the same lines to a stream or a
      file, and `logging.getLogger("jaxdnn")` is their logger, for programs that have a configuration of their own.
    """
    handler = _Callback(LEVELS[checks.choice("level", level, tuple(LEVELS))])
    handler.callback = callback
    _add(handler)
    try:
        yield
    finally:
        _remove(handler)


def choice(call: Call, engine: str | None, refusals: Mapping[str, str]) -> None:
    """Logs which engine serves a call, or that none does."""
    _configure()
    if not logger.isEnabledFor(logging.DEBUG) or (engine is None and raised_again.get()):
        return
    name = engines.in_words(call.op).strip("`")
    line = f"{name}({', '.join(map(engines.in_short, call.avals))}) on {call.platform}, level {call.spec.level!r}: "
    line += f"served by {engine}" if engine else "served by no engine"
    line += "".join(f"; {name}: {reason}" for name, reason in refusals.items())
    told = {"op": call.op, "engine": engine, "platform": call.platform, "refusals": dict(refusals)}
    logger.debug("%s", line, extra=told)


def warn(text: str) -> None:
    """Logs what is wrong and stops no program."""
    _configure()
    logger.warning("%s", text)


class _Callback(logging.Handler):
    callback: Callable[[logging.LogRecord], object]

    def emit(self, record: logging.LogRecord) -> None:
        self.callback(record)


def _add(handler: logging.Handler) -> None:
    with _changing:
        logger.addHandler(handler)
        _wanted.append(handler.level)
        logger.setLevel(min(_wanted))


def _remove(handler: logging.Handler) -> None:
    with _changing:
        logger.removeHandler(handler)
        _wanted.remove(handler.level)
        logger.setLevel(min(_wanted, default=logging.NOTSET))


@ft.cache
def _configure() -> None:
    """Does what the environment variables say, once."""
    given = os.environ.get(LEVEL) or "0"
    if given == "0":
        return
    numbers = {str(i): name for i, name in enumerate(LEVELS, 1)}
    name = numbers.get(given, given)
    if name not in LEVELS:
        raise ValueError(f"`{LEVEL}` must be 0 to 3, or one of {', '.join(LEVELS)}, got {given!r}.")
    to = os.environ.get(DESTINATION) or "stderr"
    stream = getattr(sys, to) if to in STREAMS else None
    try:
        handler: logging.Handler = logging.StreamHandler(stream) if stream else logging.FileHandler(to)
    except OSError as error:
        raise ValueError(f"`{DESTINATION}` must be stdout, stderr or a file that can be written: {error}.") from error
    handler.setLevel(LEVELS[name])
    handler.setFormatter(logging.Formatter("jaxdnn %(levelname)s %(asctime)s %(message)s"))
    _add(handler)
