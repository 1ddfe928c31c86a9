"""What environment variables set for a whole process: they are read once, when the first call needs them."""

import functools as ft
import os

CONFIG, WORKSPACE = "JAXDNN_LIB_CONFIG", "JAXDNN_WORKSPACE_LIMIT"
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
    given = os.environ.get(WORKSPACE)
    if given and not given.strip().isdecimal():
        raise ValueError(f"`{WORKSPACE}` must be a number of bytes, got {given!r}.")
    return int(given) if given else None
