"""Which part of a matrix a run takes: a part that rotates, and whatever of its facets that part lacks.

Compilation takes nearly all of a run's time on a CPU. A run there takes the part of its turn, and as many consecutive
turns as there are parts take everything; besides, every turn has each facet (each op with each engine, each dtype). The
subjects of the determinism procedures, with all their variants, take more turns than the cells.
Turns are consecutive if each commit has one run or, where git does not tell the commits, each day.
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

TURNS = 12  # that take every cell
FAMILY_TURNS = 3  # that take a subject of every family with each of its engines
SUBJECT_TURNS = 84  # that take every subject of the determinism procedures, each of which costs as much as 25 cells


def current(file: Path) -> tuple[int, str]:
    """The turn of a file's checkout, and what was counted: the commits that led to it, or in their absence the days.

    They are absent in a shallow clone, without git, and where the file is installed within another checkout.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", file.name)
        if git("rev-parse", "--is-shallow-repository") == "false":
            return int(git("rev-list", "--count", "HEAD")), "commits"
    # One run a day has turns in a row, at whichever hour; four runs a day have four of them.
    days, quarter = divmod(int(time.time() // (6 * 3600)), 4)
    return days + 21 * quarter, "days"


def number(name: str) -> int:
    """A number that is the same in every process, and has nothing to do with the parts of the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def shuffled(names: Iterable[str]) -> list[str]:
    """The names in the order of their numbers."""
    return sorted(names, key=number)


def said(turn: int, left: int, counted: str | None = None, **_: Any) -> str:
    """What a report says of the part that was run, and of what was `counted` if nobody named the turn."""
    in_a_row = f"; the turn counts {counted}: of {counted} in a row, with one run each, {TURNS} run every cell and "
    in_a_row += f"{SUBJECT_TURNS} every determinism procedure"
    return (
        f"turn {turn} of a matrix in {TURNS} parts: {left} cells, and more determinism procedures, are left for other "
        f"turns{in_a_row if counted else ''}; `--all` runs every cell and a sample of the procedures, `--turn N` "
        "another part"
    )


def part(names: Iterable[str], parts: int, turn: int) -> list[str]:
    """The names of a turn. Whose turn a name has depends on nothing else: no other name that is new defers it."""
    return [name for name in names if number(name) % parts == turn % parts]


def following(items: Sequence[T], size: int, turn: int) -> Iterator[T]:
    """The turn's `size` items at most, after those of the turn before."""
    return (items[(turn * size + i) % len(items)] for i in range(min(size, len(items))))


def covering(
    facets: Mapping[str, set[Any]], kept: Iterable[str], turn: int, among: Iterable[str] | None = None
) -> dict[str, None]:
    """The names that are kept, and others so that each facet of `facets` is one of some name: of most facets first.

    Of equals the turn decides. `among`: the names that may be added, which have every facet between them; None: all.
    """
    found = dict.fromkeys(kept)
    order = shuffled(facets if among is None else among)
    order = order[turn % max(len(order), 1) :] + order[: turn % max(len(order), 1)]
    lacking = set(itertools.chain.from_iterable(facets.values())).difference(*(facets[name] for name in found))
    while lacking:
        most = max(order, key=lambda name: len(facets[name] & lacking))
        found[most] = None
        lacking -= facets[most]
    return found
