"""Records which branches of the kernels' planners a program takes, and overrides the planner's choice in tests.

A planner decides from shapes and dtypes how a kernel partitions the work. Each launch calls `record` with what was
decided; a program that is traced within `recorded` yields the branches that it takes. `EVERY` lists all branches, so
that those that are never taken can be reported. If a kernel's configuration may be picked, one function (`decided`, in
`walk` and `wgrad_plan` of convolutions) returns the branches of a configuration, both for recording and for picking.

The planner of the convolutions chooses among many configurations that give the same bits (for a filter gradient, other
bits, which its schedule states). The choice depends on measurements and changes with them. Within `picking` a
configuration is drawn from all that can run, so that all of them are tested.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Branch = tuple[str, str, str]  # a kernel, what is decided, its value
# (a problem, the configurations that can run, a configuration to the branches that it takes) to one of them.
Pick = Callable[[Any, Sequence[Any], Callable[[Any], set[Branch]]], Any]

YES_NO = ("no", "yes")
# kernel -> what is decided -> the values that it may have.
EVERY: dict[str, dict[str, tuple[Any, ...]]] = {
    "pipeline": {
        "operands": ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"),
        "result": ("bfloat16", "float16", "float32", "int32"),
        "axes": ("flat", 1, 2, 3),
        "rows": (64, 128, 192, 256),
        "columns": (8, 16, 32, 64, 128, 256),
        "teams": ("1 x 2", "2 x 1"),
        "stages": (2, 3, 4, 5, 6, 7, 8),
        "staged": (1, 2, 3, 4),
        "order": ("k", "kp", "n", "p"),
        "deal": ("round", "snake", "together"),
        "halo": (0, 2, 3),
        "resident": YES_NO,
        "unroll": YES_NO,
        "blank": YES_NO,
        "window": YES_NO,
        "masked window": YES_NO,
        "filter": ("ctj", "jtc", "tcj", "tjc"),
        "swizzle": (32, 64, 128),
        "groups": YES_NO,
        "strided input": YES_NO,
        "phases": ("one", "several", "some without taps"),
        "tail of positions": YES_NO,
        "tail of columns": YES_NO,
        "tail of channels": YES_NO,
        "epilogue": ("none", "function", "function, bias", "function, arrays", "function, bias, arrays"),
        "tiles in turn": YES_NO,
    },
    "fprop": {"copies": ("none", "padded channels", "padded columns", "transposed filter", "folded taps", "cells")},
    "dgrad": {"copies": ("none", "padded channels", "padded columns", "transposed filter", "joined phases")},
    "wgrad": {
        "operands": ("bfloat16", "float16"),
        "axes": ("flat", 1, 2, 3),
        "filters": (64, 128),
        "columns": (32, 64, 96, 128, 192, 256),
        "warpgroups": ("1 x 1", "1 x 2", "1 x 3", "2 x 1"),
        "stages": (2, 3, 4, 5, 6),
        "splits": ("one", "several"),
        "halo": YES_NO,
        "direct": ("no", "1 block", "2 blocks", "4 blocks"),
        "rows": ("filters", "taps"),
        "swizzle": (64, 128),
        "groups": ("one", "whole", "together"),
        "strided input": YES_NO,
        "tail of positions": YES_NO,
        "tail of filters": YES_NO,
        "tail of columns": YES_NO,
        "tiles in turn": YES_NO,
        "folded taps": YES_NO,
    },
    "wgrad, images last": {"operands": ("float32", "float8_e4m3fn", "float8_e5m2", "int8"), "runs": ("one", "several")},
    "depthwise walk": {
        "operands": ("bf16", "f16", "f32"),
        "pass": ("fprop", "dgrad"),
        "group": (1, 2, 4, 8),
        "channels": (16, 32),
        "stages": (1, 2),
        "phases": ("one", "several"),
        "stride": YES_NO,
        "bias": YES_NO,
        "tail of channels": YES_NO,
        "tail of positions": YES_NO,
        "tiles in turn": YES_NO,
    },
    "depthwise filter": {
        "operands": ("bf16", "f16", "f32"),
        "group": (1, 2, 4, 8),
        "channels": (32, 64),
        "stages": (1, 2, 3),
        "warpgroups": (1, 2),
        "tap blocks": ("one", "several"),
        "splits": ("one", "several"),
        "tail of channels": YES_NO,
        "tail of positions": YES_NO,
    },
    "softmax of rows": {
        "operands": ("bf16", "f16", "f32"),
        "pass": ("accurate", "log", "fast", "logsumexp", "dgrad"),
        "threads": (32, 128, 256, 512),
        "rows at once": (1, 2),
        "stays": YES_NO,
        "keeps": YES_NO,
    },
    "softmax of long rows": {
        "operands": ("bf16", "f16", "f32"),
        "pass": ("accurate", "log", "fast", "logsumexp", "dgrad"),
        "row shared by": ("block", "cluster of 2", "cluster of 4", "cluster of 8"),
        "read": ("once", "twice", "streamed"),
        "stages": (0, 3, 4, 5, 6, 7, 8),
    },
    "norm of rows": {
        "operands": ("bf16", "f16", "f32"),
        "pass": ("forward", "dgrad"),
        "threads": (32, 64, 128, 256, 512, 1024),
        "rows at once": (1, 2, 4),
        "stays": YES_NO,
        "keeps": YES_NO,
    },
    "norm images": {
        "operands": ("bf16", "f16", "f32"),
        "pass": ("forward", "backward"),
        "image": ("stays", "stays, in turn", "in slices", "read twice"),
        "cluster": (1, 2, 4, 8),
        "vector": ("of one group", "across groups", "of several groups"),
        "threads": (128, 256, 512, 1024),
    },
    "norm batches": {
        "operands": ("bf16", "f16", "f32"),
        "pass": ("forward", "backward"),
        "fold": ("one row", "several rows"),
        "splits": ("one", "several"),
        "columns": ("one block", "several blocks"),
    },
    "pool": {
        "operands": ("bf16", "f16", "f32"),
        "pass": ("max", "max and indices", "average", "max backward", "average backward"),
        "kernel": ("a thread an output", "a thread two outputs", "tiles", "strips"),
        "counts": ("one", "several"),
    },
    "dropout": {
        "operands": ("bf16", "f16", "f32"),
        "kernel": ("flat", "walk", "planes"),
        "pass": ("forward", "backward"),
        "activation": ("none", "formula", "table"),
        "bias": YES_NO,
        "residual": YES_NO,
    },
}

_taken: contextvars.ContextVar[set[Branch] | None] = contextvars.ContextVar("taken", default=None)
_pick: contextvars.ContextVar[Pick | None] = contextvars.ContextVar("pick", default=None)


def every() -> list[Branch]:
    """All branches of all planners."""
    return [b for kernel, found in EVERY.items() for what, values in found.items() for b in _each(kernel, what, values)]


def _each(kernel: str, what: str, values: Sequence[Any]) -> list[Branch]:
    return [(kernel, what, str(value)) for value in values]


def named(kernel: str, /, **decided: Any) -> set[Branch]:
    """The branches of a launch, from keywords in which underscores stand for spaces."""
    found: set[Branch] = set()
    for name, value in decided.items():
        value = YES_NO[value] if isinstance(value, bool) else str(value)
        found.add((kernel, name.replace("_", " ").removesuffix(" "), value))
    return found


@contextlib.contextmanager
def recorded() -> Iterator[set[Branch]]:
    """Yields a set that collects the branches of everything that is lowered within the context."""
    found: set[Branch] = set()
    token = _taken.set(found)
    try:
        yield found
    finally:
        _taken.reset(token)


def record(kernel: str, /, **decided: Any) -> None:
    """Adds the branches of a launch (see `named`) to the set of `recorded`, if there is one."""
    found = _taken.get()
    if found is not None:
        found |= named(kernel, **decided)


@contextlib.contextmanager
def picking(pick: Pick) -> Iterator[None]:
    """Within the context a function chooses among the configurations that can run."""
    token = _pick.set(pick)
    try:
        yield
    finally:
        _pick.reset(token)


def picker() -> Pick | None:
    """The function that `picking` has set; None for the planner's own choice."""
    return _pick.get()
