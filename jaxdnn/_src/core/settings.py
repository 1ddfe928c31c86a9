"""What environment variables set for a whole process: they are read once, when the first call needs them."""

import functools as ft
import os

CONFIG, WORKSPACE, THREADS = "JAXDNN_LIB_CONFIG", "JAXDNN_WORKSPACE_LIMIT", "JAXDNN_COMPILE_THREADS"
CONFIGS = ("FULL", "XLA_ONLY")  # every engine; no kernels, so that nothing but XLA's programs is compiled at run time


@ft.cache
def kernels() -> bool:
    """Whether engines may serve that are kernels of this library's own."""
    given = os.environ.get(CONFIG) or CONFIGS[0]
    if given not in CONFIGS:
        raise ValueError(f"`{CONFIG}` must be one of {', '.join(CONFIGS)}, got {given!r}.")
    return given == "FULL"


@ft.cache
def workspace() -> int | None:
    """Bytes of workspace that a call may take where `jaxdnn.limits` says nothing; None for no limit."""
    return _number(WORKSPACE, "bytes")


@ft.cache
def threads() -> int:
    """How many threads compile kernels at once; eight, if there are as many cores, where nothing is said."""
    given = _number(THREADS, "threads")
    return min(8, len(os.sched_getaffinity(0))) if given is None else given


def _number(variable: str, of: str) -> int | None:
    """The value of a variable, None where it is not set or empty."""
    given = os.environ.get(variable)
    if given and not given.strip().isdecimal():
        raise ValueError(f"`{variable}` must be a number of {of}, got {given!r}.")
    return int(given) if given else None
