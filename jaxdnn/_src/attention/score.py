"""The user's function of the scores: read once, and evaluated over all pairs of a block with its derivatives.

It is a function of one score, so nothing that it does can mix two of them. What it captures, and the arrays that are
passed along with it, are operands of the primitives like all others: they are differentiated, mapped and sharded.
"""

import dataclasses
import inspect
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn._src.core import checks
from jaxdnn._src.core.compat import eval_jaxpr


@dataclasses.dataclass(frozen=True)
class Score:
    """A function of a score, its sequence, head, query and key, and arrays.

    Attributes:
      jaxpr: the function of these, as it was traced.
      passed: how many of the arrays are its arguments; it has captured the others.
      order: the names of the arrays, those that are passed first.
      ranks: the number of axes of each.
    """

    jaxpr: Any
    passed: int
    order: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def floats(self) -> tuple[str, ...]:
        return tuple(sorted(n for n in self.order if n.startswith("score_float")))

    @property
    def constants(self) -> tuple[str, ...]:
        return tuple(sorted(n for n in self.order if not n.startswith("score_float")))

    @property
    def captured(self) -> tuple[str, ...]:
        return self.order[self.passed :]

    @property
    def axes(self) -> dict[str, str]:
        """Letters of each array's axes, which no other operand has."""
        letters = iter(string.ascii_uppercase)
        return {n: "".join(next(letters) for _ in range(rank)) for n, rank in zip(self.order, self.ranks, strict=True)}

    def over(self, x: Array, places: Sequence[Array], arrays: dict[str, Array]) -> Array:
        """The function of scores (..., n, t, s); places are those of sequences, heads, queries and keys."""
        lead = x.ndim - 3
        given = [arrays[name] for name in self.order]
        none = (None,) * len(given)
        run: Callable[..., Any] = self.of_one
        for mapped in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
            run = jax.vmap(run, (0, *mapped, *none))
        for axis in reversed(range(lead)):
            own = tuple(0 if a.shape[axis] == x.shape[axis] else None for a in given)
            given = [a if at == 0 else jnp.squeeze(a, axis) for a, at in zip(given, own, strict=True)]
            run = jax.vmap(run, (0, 0 if axis == lead - 1 else None, None, None, None, *own))
        return run(x, *places, *given)

    def of_one(self, score: Array, *others: Array) -> Array:
        count = 4 + self.passed
        (found,) = eval_jaxpr(self.jaxpr, others[count:], score, *others[:count])
        return found.astype(score.dtype)

    def with_slope(self, x: Array, places: Sequence[Array], arrays: dict[str, Array]) -> tuple[Array, Array]:
        """The function of the scores, and its derivative there."""
        return jax.jvp(lambda x: self.over(x, places, arrays), (x,), (jnp.ones_like(x),))

    def along(self, x: Array, places: Sequence[Array], arrays: dict[str, Array], d: dict[str, Array]) -> Array:
        """The derivative along tangents of some of the arrays; a common axis that is not mapped is 1 in either."""
        names = tuple(name for name in self.floats if name in d)
        run = lambda *given: self.over(x, places, arrays | dict(zip(names, given, strict=True)))
        pairs = [jnp.broadcast_arrays(arrays[n], d[n]) for n in names]
        given, tangents = (tuple(each) for each in zip(*pairs, strict=True))
        return jax.jvp(run, given, tangents)[1]

    def back(self, ds: Array, x: Array, places: Sequence[Array], arrays: dict[str, Array], names: Any) -> Any:
        """The gradients of some of the arrays, by name."""
        run = lambda *given: self.over(x, places, arrays | dict(zip(names, given, strict=True)))
        found = jax.vjp(run, *(arrays[n] for n in names))[1](ds)
        return dict(zip(names, found, strict=True))


def read_score(function: Any, arrays: Any, dtype: Any) -> tuple[Score | None, dict[str, Array]]:
    """The function, and its operands by name, with an axis of length 1 in front; (None, {}) without one.

    dtype: of the scores.
    """
    if not checks.is_sequence(arrays):
        raise TypeError(f"`score_arrays` must be a sequence of arrays, got {checks.shown(arrays)}.")
    given = tuple(checks.array("score_arrays", a) for a in arrays)
    if function is None:
        if given:
            raise ValueError("`score_arrays` must be given with `score_fn`, whose further arguments they are.")
        return None, {}
    if not callable(function):
        raise TypeError(f"`score_fn` must be a function of a score and its places, got {checks.shown(function)}.")
    score, place = jax.ShapeDtypeStruct((), dtype), jax.ShapeDtypeStruct((), jnp.int32)
    _require_arguments(function, 5 + len(given))
    traced = jax.make_jaxpr(function)(score, *[place] * 4, *given)
    (found,) = traced.out_avals if len(traced.out_avals) == 1 else (None,)
    if found is None or found.shape or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(
            f"`score_fn` must return one score, a float without axes, got {', '.join(map(str, traced.out_avals))}."
        )
    every = [*given, *(jnp.asarray(c) for c in traced.consts)]
    kinds = ("float" if jnp.issubdtype(a.dtype, jnp.floating) else "other" for a in every)
    names = tuple(f"score_{kind}{i:03d}" for i, kind in enumerate(kinds))
    named = {name: a[None] for name, a in zip(names, every, strict=True)}
    return Score(traced.jaxpr, len(given), names, tuple(a.ndim for a in every)), named


def _require_arguments(function: Callable[..., Any], count: int) -> None:
    """That a function, if it says what it takes, takes so many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some of the built-in ones do not
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(
            f"`score_fn` must take {count} arguments, (score, sequence, head, query, key) and those of `score_arrays`, "
            f"got a function of {signature}."
        ) from error
