"""Which part of a matrix a run takes: a part that rotates, and whatever of its facets that part lacks.

Compilation takes nearly all of a run's time on a CPU. A run there takes the part of its turn, and as many consecutive
turns as there are parts take everything; besides, every turn has each facet (each op with each engine, each dtype).
The tests take their parameters by the same rule (`tests/sample.py`).
"""

import contextlib
import hashlib
import itertools
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

TURNS = 12


def current(folder: Path) -> int:
    """The turn of a checkout: how many commits led to it; in a shallow clone, and without git, the quarter days."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if git("rev-parse", "--is-shallow-repository") == "false":
            return int(git("rev-list", "--count", "HEAD"))
    return int(time.time() // (6 * 3600))


def number(name: str) -> int:
    """A number that is the same in every process, and has nothing to do with the parts of the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def shuffled(names: Iterable[str]) -> list[str]:
    """The names in the order of their numbers."""
    return sorted(names, key=number)


def said(turn: int, left: int, **_: Any) -> str:
    """What a report says of the part that was run."""
    return (
        f"turn {turn} of a matrix in {TURNS} parts: {left} cells, and more determinism procedures, are left for other "
        "turns, one a commit; `--all` runs the whole matrix, `--turn N` another part"
    )


def size(items: Sequence[Any]) -> int:
    """How many of the items a turn takes."""
    return -(-len(items) // TURNS)


def part(items: Sequence[T], size: int, turn: int) -> Iterator[T]:
    """The part of a turn, of at most `size` items. Those of consecutive turns follow each other."""
    return (items[(turn * size + i) % len(items)] for i in range(min(size, len(items))))


def covering(facets: Mapping[str, set[Any]], kept: Iterable[str], turn: int) -> dict[str, None]:
    """The names that are kept, and others so that each facet of `facets` is one of some name: of most facets first.

    Of equals the turn decides.
    """
    found = dict.fromkeys(kept)
    order = shuffled(facets)
    order = order[turn % max(len(order), 1) :] + order[: turn % max(len(order), 1)]
    lacking = set(itertools.chain.from_iterable(facets.values())).difference(*(facets[name] for name in found))
    while lacking:
        most = max(order, key=lambda name: len(facets[name] & lacking))
        found[most] = None
        lacking -= facets[most]
    return found
