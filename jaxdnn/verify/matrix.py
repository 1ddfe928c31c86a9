"""The matrix of `jaxdnn verify`: the cases of all families, by extent and by id, and the subjects of the procedures."""

import collections
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdnn._src import families
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases.case import Result
from jaxdnn._src.cases.family import Family
from jaxdnn._src.cases.subject import variants
from jaxdnn.verify import turns


def ops() -> tuple[str, ...]:
    """Every op of every family."""
    return tuple(op for f in families.cases() for op in f.ops)


def of(op: str) -> Family:
    """The family of an op."""
    return next(f for f in families.cases() if op in f.ops)


def engines() -> tuple[str, ...]:
    """Every engine's name."""
    return tuple(dict.fromkeys(e for op in ops() for e in of(op).engines_of(op)))


def cases(extent: str, seed: int, *, ops: Iterable[str], dtypes: Iterable[str]) -> Iterator[Any]:
    """The cases of an extent, each of which holds those of the extents before it."""
    chosen = frozenset(dtypes)
    for op in ops:
        for engine in of(op).engines_of(op):
            yield from (case for case in of(op).of_extent(op, engine, extent, seed) if case.dtype in chosen)


def of_turn(cases: Iterable[Any], turn: int) -> list[Any]:
    """The part of a turn; of every family it has each op with each engine, each facet, each kind of data."""

    def facets(f: Family, case: Any) -> set[Any]:
        return {*f.facets(case), *(("data", kind) for kind in case.kinds()), case.op}

    return _part(cases, turn, facets, lambda names: turns.part(names, turns.TURNS, turn))


def subjects_of_turn(subjects: Iterable[Any], turn: int) -> list[Any]:
    """The part of a turn; FAMILY_TURNS in a row have each family with each of its engines.

    They are distributed evenly, over more turns than cells are, because each takes long: chosen by a hash of their
    names, four would be in one turn. What is added for a family and an engine is a plain call: blends and gradients
    take twice as long.
    """
    every = list(subjects)
    names = turns.shuffled({of(one.op).name for one in every})
    added = {name for place, name in enumerate(names) if (place + turn) % turns.FAMILY_TURNS == 0}

    def evenly(names: Iterable[str]) -> list[str]:
        order = turns.shuffled(names)
        first = turn + turns.number(order[0])  # a family has fewer subjects than there are turns: each begins elsewhere
        return order[first % turns.SUBJECT_TURNS :: turns.SUBJECT_TURNS]

    facets = lambda f, subject: {f.name} if f.name in added else set[Any]()
    return _part(every, turn, facets, evenly, lambda subject: not subject.derived)


def _part(
    every: Iterable[Any],
    turn: int,
    facets: Callable[[Family, Any], set[Any]],
    of_turn: Callable[[Iterable[str]], list[str]],
    added: Callable[[Any], bool] = lambda one: True,
) -> list[Any]:
    """The part `of_turn` of each family, and of what may be `added` enough to have every facet of every engine."""
    by_family = collections.defaultdict[str, dict[str, Any]](dict)
    for one in every:
        named = by_family[of(one.op).name]
        if one.id in named:
            raise ValueError(f"{one.id!r} is the id of two: one would be left out unseen")
        named[one.id] = one
    found = []
    for named in by_family.values():
        has = {name: {(one.engine, facet) for facet in facets(of(one.op), one)} for name, one in named.items()}
        kept = turns.covering(has, of_turn(named), turn, [name for name, one in named.items() if added(one)])
        found += [one for name, one in named.items() if name in kept]
    return found


def find(case_id: str, seed: int) -> Any | None:
    """The case of this id, whatever the extent."""
    op = case_id.partition("/")[0]
    if op not in ops():
        return None
    return next((c for c in cases("full", seed, ops=[op], dtypes=plain.DTYPES) if c.id == case_id), None)


def matching(pattern: str, seed: int) -> list[Any]:
    """The cases of any extent whose ids match a shell pattern; for an id without wildcards, that case."""
    if not set(pattern) & set("*?"):
        return [case for case in (find(pattern, seed),) if case is not None]
    every = cases("full", seed, ops=ops(), dtypes=plain.DTYPES)
    return [case for case in every if fnmatch.fnmatchcase(case.id, pattern)]


def run(case: Any, seed: int, *, flush: bool) -> Result:
    """Runs a case on all of its kinds of data."""
    f = of(case.op)
    return plain.run(case, seed, flush=flush, facts=f.facts, check=f.check)


def subjects(
    ops: Iterable[str], engine_names: Iterable[str], dtypes: Iterable[str], extent: str, seed: int, *, every: bool
) -> Iterator[Any]:
    """The subjects of the determinism procedures for the wanted ops, engines and dtypes: `every` one, or a sample.

    Of the memory-bound families the sample has every fifth pair of op and engine, and the first with each dtype; its
    variants (the call, its blends, its gradients) alternate. Of a family's slow engines the dtypes do.
    """
    names, kinds = frozenset(engine_names), frozenset(dtypes)
    pairs = [(op, engine) for op in ops for engine in of(op).engines_of(op) if engine in names]
    every, sampled, seen = every or extent == "full", 0, collections.Counter[str]()
    turns = collections.defaultdict[str, int](lambda: seed)
    for op, engine in pairs:
        if op in of(op).bound_as and not every:
            continue
        found = [s for s in of(op).subjects(op, engine, extent, seed) if s is not None and s.dtype in kinds]
        if not every and of(op).strides[0] != 1 and found:
            sampled += 1
            least = min(found, key=lambda s: seen[s.dtype])  # the first of those whose dtype was seen least
            found = [least] if sampled % 5 == 1 or not seen[least.dtype] else []
            seen.update(s.dtype for s in found)
            for one in found:
                forms = list(variants(one))
                yield forms[sampled % len(forms)]
            continue
        if not every and engine in of(op).slow:
            found = found[turns[engine] % len(found) :][:1] if found else []
            turns[engine] += 1
        for one in found:
            yield from variants(one) if every else (one,)
