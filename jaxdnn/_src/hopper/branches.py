"""Records which branches of the kernels' planners a program takes, and overrides the planner's choice in tests.

A planner decides from shapes and dtypes how a kernel partitions the work. Each launch calls `record` with what was
decided; a program that is traced within `recorded` yields the branches that it takes. `branches.json` lists all of them
(`EVERY`), so that those that are never taken can be reported. If a kernel's configuration may be picked, one function
(`decided`, in `scheduler` and `wgrad_plan` of convolutions) returns the branches of a configuration, both for recording
and for picking.

The planner of the convolutions chooses among many configurations that give the same bits (for a filter gradient, other
bits, which its schedule states). The choice depends on measurements and changes with them. Within `picking` a
configuration is drawn from all that can run, so that all of them are tested.
"""

import contextlib
import contextvars
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Branch = tuple[str, str, str]  # a kernel, what is decided, its value
# (a problem, the configurations that can run, a configuration to the branches that it takes) to one of them.
Pick = Callable[[Any, Sequence[Any], Callable[[Any], set[Branch]]], Any]

YES_NO = ("no", "yes")
# kernel -> what is decided -> the values that it may have.
EVERY: dict[str, dict[str, list[Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text())

_taken: contextvars.ContextVar[set[Branch] | None] = contextvars.ContextVar("taken", default=None)
_pick: contextvars.ContextVar[Pick | None] = contextvars.ContextVar("pick", default=None)


def every() -> list[Branch]:
    """All branches of all planners."""
    return [
        (kernel, what, str(value))
        for kernel, found in EVERY.items()
        for what, values in found.items()
        for value in values
    ]


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
