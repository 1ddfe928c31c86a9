"""A family of ops for `jaxdnn verify`: its cases, their data, the expected results."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases.case import Call, Check, Facts
from jaxdnn._src.hopper.branches import Branch

T = TypeVar("T")

EXTENTS = ("quick", "standard", "full")


def up_to(extent: str, by_extent: Mapping[str, tuple[T, ...]]) -> list[T]:
    """What is listed for an extent and for those before it."""
    return [one for e in EXTENTS[: EXTENTS.index(extent) + 1] for one in by_extent[e]]


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of ops.

    Attributes:
      name: the family's name in reports.
      ops: the public ops.
      engines_of: an op to the names of the engines it may be given.
      cases: (op, engine, extent, seed) to the cases, each extent's among the next one's.
      subjects: (op, engine, extent, seed) to the subjects of the determinism procedures, None for refused ones.
      typical: (op, engine, dtype) to a case whose facts hold for the engine in general; None if there is none.
      typical_name: such a case in words.
      facts: a case to what its engine declares for it.
      arrays: (case, kind, seed, accumulation) to its operands, and those that it takes by name.
      judge: (case, facts, kind, operands, operands by name, results, accumulation) to its checks; by the name
        `modelled`, how many outputs are compared with predicted bits at most.
      strides: (a, b): short of the full extent, which has everything, the matrix takes every a-th of the quick cases
        and every b-th of the further standard ones, and the first of each of its facets; if a is not 1, the determinism
        procedures run on one subject for every fifth pair of an op and an engine.
      slow: engines whose programs take long: short of the full extent, and if the op is not named, the determinism
        procedures run on one of their subjects of each op, in turn.
      facets: a case to those of its properties that the matrix must have.
      bound_as: an op to another op with the same primitive, whose guarantees hold for it too: the determinism
        procedures run on it only in the full extent, and if it is named.
      draw: (op, engine, generator, name) to a case drawn at random, which the name makes unique.
      leads: an op and a branch of a planner that freely drawn calls rarely take, to a function like `draw` whose calls
        are likely to take it.
      samples: a drawn case to the axes of the samples in its operands and in its first result; None if a result depends
        on all samples, or if there is one sample.
    """

    name: str
    ops: tuple[str, ...]
    engines_of: Callable[[str], tuple[str, ...]]
    cases: Callable[[str, str, str, int], Iterable[Any]]
    subjects: Callable[[str, str, str, int], Iterable[Any]]
    typical: Callable[[str, str, str], Any | None]
    typical_name: str
    facts: Callable[[Any], Facts] = plain.facts
    arrays: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] = plain.arrays
    judge: Callable[..., list[Check]] = plain.judge_all
    strides: tuple[int, int] = (1, 1)
    slow: tuple[str, ...] = ()
    facets: Callable[[Any], set[Any]] = lambda case: {case.dtype}
    bound_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    draw: Callable[[str, str, np.random.Generator, str], Any] = lambda *_: None
    leads: Mapping[tuple[str, Branch], Callable[..., Any]] = dataclasses.field(default_factory=dict)
    samples: Callable[[Any], tuple[tuple[int | None, ...], int] | None] = lambda case: None

    def check(self, case: Any, declared: Facts, seed: int, flush: bool) -> list[Check]:
        """Compares a case's results with what is expected, on every kind of data."""
        accumulation = plain.accumulation_of(declared, flush)
        checks = []
        with jax.enable_x64(case.x64):
            function = jax.jit(case.function())
            for kind in self.kinds_of(case, declared):
                operands, extras = self.arrays(case, kind, seed, accumulation)
                outs = function(*operands, **extras)
                checks += self.judge(case, declared, kind, operands, extras, outs, accumulation)
        return checks

    def kinds_of(self, case: Any, declared: Facts) -> tuple[str, ...]:
        """The kinds of data of a case; none with NaN and infinity if an engine does not guarantee where they show."""
        spreads = "spreads_nonfinite" in declared.hazards
        return tuple(kind for kind in case.kinds() if not (spreads and kind in ("special", "infinite")))

    def of_extent(self, op: str, engine: str, extent: str, seed: int) -> list[Any]:
        """The cases of an extent, each once."""
        quick, standard = self.strides
        every = list(self.cases(op, engine, "quick", seed))
        found = _sample(every, quick, self.facets)
        if extent != "quick":
            ids = {case.id for case in every}
            further = [c for c in self.cases(op, engine, "standard", seed) if c.id not in ids]
            found += _sample(further, standard, self.facets, known=every)
        if extent == "full":
            found += self.cases(op, engine, "full", seed)
        return list({case.id: case for case in found}.values())


def _sample(cases: list[Any], stride: int, facets: Callable[[Any], set[Any]], known: Iterable[Any] = ()) -> list[Any]:
    """Every `stride`-th case, and the first of each facet that no `known` case has."""
    seen: set[Any] = set().union(*map(facets, known))
    found = []
    for i, case in enumerate(cases):
        if i % stride == 0 or facets(case) - seen:
            found.append(case)
        seen |= facets(case)
    return found


def family(
    name: str,
    kind: type[Call],
    ops: Iterable[str],
    cases: Callable[[str, str, str, int], Iterable[Call]],
    subjects: Callable[[str, str, str, int], Iterable[Any]],
    typical_name: str,
    strides: tuple[int, int] = (1, 1),
    facts: Callable[[Any], Facts] = plain.facts,
    **given: Any,
) -> Family:
    """A family whose cases are of a class that says which primitive an op has, and of which any may be typical."""

    def typical(op: str, engine: str, dtype: str) -> Call | None:
        return next((c for c in cases(op, engine, "full", 0) if c.dtype == dtype), None)

    chosen = {"engines_of": ft.partial(plain.engines_of, kind), "typical": typical} | given
    return Family(
        name,
        tuple(ops),
        cases=cases,
        subjects=subjects,
        typical_name=typical_name,
        facts=facts,
        strides=strides,
        **chosen,
    )
