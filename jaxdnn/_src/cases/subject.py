"""Subjects of the procedures that test determinism levels: a call on a batch of samples, its blends, its gradients."""

import dataclasses
import functools as ft
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
from jaxdnn._src.cases.case import Case, facts, generator
from jaxdnn._src.core import engines
from jaxdnn._src.core.determinism import LEVELS, is_fixed


class Different(Exception):
    """Raised by a procedure that found a difference."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function that a procedure tests, and the arrays that it is called with.

    Attributes:
      function: a batch size to the function of the arrays of such a batch, which returns one or several arrays.
      operands: arrays of a batch of some samples; batch_axes: the axis of their batch (None: they have none).
      out_axis: the axis of the batch in every result; None if the result is a sum over the batch.
      into_poison: like the function of the operands' batch, but takes the donated buffer first.
      definition: computes the bits that "portable" guarantees.
      variant: the name of the subject, if an op, engine and dtype have several.
      blends: makes the same call with its blends; it traces each, which is not needed to list subjects.
      derived: whether it is a blend or a gradient of another subject, by `variants`.
    """

    op: str
    engine: str
    dtype: str
    declared: str
    function: Callable[[int], Callable[..., Any]]
    operands: tuple[np.ndarray, ...]
    batch_axes: tuple[int | None, ...]
    out_axis: int | None
    into_poison: Callable[..., Any] | None = None
    definition: Callable[[], np.ndarray] | None = None
    variant: str = ""
    blends: Callable[[], tuple["Subject", ...]] = tuple
    derived: bool = False

    @property
    def id(self) -> str:
        return "/".join(filter(None, ("determinism", self.op, self.engine, self.dtype, self.variant)))

    @property
    def batch(self) -> int:
        """The number of samples of the operands."""
        pairs = zip(self.operands, self.batch_axes, strict=True)
        return next((v.shape[axis] for v, axis in pairs if axis is not None), 1)

    def required(self, batch: int) -> Callable[..., list[jax.Array]]:
        """A new function of `batch` samples, within the context that requires the declared level."""
        function = self.function(batch)

        def run(*arrays: Any) -> list[jax.Array]:
            with dnn.determinism(self.declared):
                return jax.tree.leaves(function(*arrays))

        return run

    def whole(self) -> Callable[..., list[jax.Array]]:
        """A new function of all samples: compiling it is a recompilation."""
        return self.required(self.batch)

    @ft.cached_property
    def compiled(self) -> Callable[..., list[jax.Array]]:
        return jax.jit(self.whole())

    @ft.cached_property
    def result(self) -> list[np.ndarray]:
        """The result that every other run must equal."""
        return list(map(np.asarray, self.compiled(*self.operands)))

    def sample(self, results: Iterable[Any], place: int) -> list[np.ndarray]:
        """The results of one sample of a batch."""
        return [np.take(np.asarray(v), place, self.out_axis) for v in results]

    @ft.cached_property
    def first_sample(self) -> list[np.ndarray]:
        """The results of the first sample in a batch of one."""
        return self.sample(self.compiled_for(1)(*batch_of(self, 1, 0)), 0)

    def compiled_for(self, batch: int) -> Callable[..., list[jax.Array]]:
        """The jitted function of `batch` samples, which the procedures on this subject share."""
        return self._of_batches.setdefault(batch, jax.jit(self.required(batch)))

    @ft.cached_property
    def _of_batches(self) -> dict[int, Callable[..., list[jax.Array]]]:
        return {}


def subject(
    case: Case,
    seed: int,
    *,
    batch_axes: tuple[int | None, ...],
    out_axis: int | None,
    sized: Callable[[int], Case] | None = None,
    result: int = 0,
    blended: bool = False,
    variant: str = "",
) -> Subject | None:
    """The subject of a case of a family of `Case`s; None if its engine refuses it.

    Args:
      case: the case, on its "normal" data.
      batch_axes: the axis of each operand's batch; out_axis: that of the result; see `Subject`.
      sized: a batch size to the case of that size, if the op's arguments depend on it.
      result: the result that is compared, if the op has several.
      blended: whether the case is a blend already.
      variant: the subject's name, if the op, engine and dtype have several.
    """
    declared = facts(case)
    if declared.refusal is not None:
        return None
    operands = case.operands("normal", generator(case, "normal", seed))

    def function(batch: int) -> Callable[..., jax.Array]:
        whole = (case if sized is None else sized(batch)).function()
        return lambda *arrays: jax.tree.leaves(whole(*arrays))[result]

    def definition() -> np.ndarray:
        bits = case.definition(operands)
        if bits is None:
            raise Different('it promises "portable", but has no definition')
        return bits[result]

    names = (case.op, case.engine, case.dtype, declared.level)
    found = Subject(*names, function, operands, batch_axes, out_axis, definition=definition, variant=variant)
    op = getattr(dnn, case.op, None)
    named = inspect.signature(op).parameters if op is not None else {}
    if blended or not is_fixed(declared.level) or not {"alpha", "beta", "prior"} <= named.keys():
        return found
    return dataclasses.replace(found, blends=lambda: _blends(found, case if sized is None else sized))


def batch_of(subject: Subject, size: int, place: int, neighbour: float | None = None) -> list[np.ndarray]:
    """Operands of a batch of `size` whose sample at `place` is the first of the subject's; the others are other
    samples, or full of one value."""
    batch = []
    for operand, axis in zip(subject.operands, subject.batch_axes, strict=True):
        if axis is None:
            batch.append(operand)
            continue
        index = (np.arange(size) % (operand.shape[axis] - 1)) + 1
        index[place] = 0
        filled = np.take(operand, index, axis)
        if neighbour is not None:
            others = [np.arange(size) != place if i == axis else slice(None) for i in range(filled.ndim)]
            with np.errstate(over="ignore", invalid="ignore"):
                filled[tuple(others)] = np.float64(neighbour).astype(filled.dtype)
        batch.append(filled)
    return batch


# ---- blends and gradients --------------------------------------------------------------------------------------------

# Factors whose products are inexact. They are arrays: a NumPy number is known when a call is traced, which may give
# other bits.
ALPHA, BETA = np.asarray(0.3, np.float32), np.asarray(-0.7, np.float32)


def _blends(plain: Subject, case: Any) -> tuple[Subject, ...]:
    """The call's first result scaled, and scaled and added to a scaled prior, by factors that are static or traced."""
    sized: Callable[[int], Any] = case if callable(case) else lambda batch: case
    first = jax.eval_shape(plain.function(plain.batch), *plain.operands)
    drawn = np.random.default_rng(zlib.crc32(plain.id.encode())).normal(size=first.shape).astype(first.dtype)
    names = {"engine"} & inspect.signature(getattr(dnn, plain.op)).parameters.keys()
    engine: dict[str, Any] = dict.fromkeys(names, plain.engine)
    axis = plain.out_axis

    def scaled(batch: int) -> Callable[..., Any]:
        call = sized(batch).call(alpha=float(ALPHA), **engine)
        return lambda *arrays: jax.tree.leaves(call(*arrays))[0]

    def static(batch: int) -> Callable[..., Any]:
        factors = {"alpha": float(ALPHA), "beta": float(BETA), **engine}
        return lambda *arrays: jax.tree.leaves(sized(batch).call(prior=arrays[-1], **factors)(*arrays[:-1]))[0]

    def traced(batch: int) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            *rest, prior, alpha, beta = arrays
            call = sized(batch).call(alpha=alpha, beta=beta, prior=prior, **engine)
            return jax.tree.leaves(call(*rest))[0]

        return run

    blended = (*plain.operands, drawn), (*plain.batch_axes, axis)
    forms = {
        "alpha": (scaled, plain.operands, plain.batch_axes),
        "blend": (static, *blended),
        "traced blend": (traced, (*blended[0], ALPHA, BETA), (*blended[1], None, None)),
    }
    found = []
    for name, (function, operands, axes) in forms.items():
        made = Subject(plain.op, plain.engine, plain.dtype, plain.declared, function, operands, axes, axis)
        declared = min(strongest(made), "mesh_invariant", key=LEVELS.index)
        if is_fixed(declared):
            found.append(dataclasses.replace(made, declared=declared, variant=name.replace(" ", "-")))
    return tuple(found)


def strongest(subject: Subject) -> str:
    """The strongest level up to the declared one at which the subject can be traced."""
    for level in reversed(LEVELS[: LEVELS.index(subject.declared) + 1]):
        try:
            jax.eval_shape(dataclasses.replace(subject, declared=level).whole(), *subject.operands)
        except NotImplementedError:
            continue
        return level
    return "fast"


def gradient(subject: Subject) -> Subject | None:
    """The results, and the gradients of the floating ones in the arrays that have a batch.

    None if there are none, or if their bits are not fixed.
    """
    axis = subject.out_axis
    is_float = lambda v: jnp.issubdtype(v.dtype, jnp.floating)
    which = [i for i, v in enumerate(subject.operands) if subject.batch_axes[i] == axis and is_float(v)]
    which = which[:1] if "_dgrad" in subject.op else which  # in the others it is a second derivative
    results = [v for v in jax.eval_shape(subject.whole(), *subject.operands) if is_float(v)]
    if axis is None or not which or not results:
        return None
    rng = np.random.default_rng(zlib.crc32(subject.id.encode()))
    along = tuple(rng.normal(size=v.shape).astype(v.dtype) for v in results)

    def function(batch: int) -> Callable[..., Any]:
        forward = subject.function(batch)

        def run(*operands: Any) -> Any:
            arrays = list(operands[len(along) :])

            def of(*some: Any) -> Any:
                for i, value in zip(which, some, strict=True):
                    arrays[i] = value
                return [v for v in jax.tree.leaves(forward(*arrays)) if is_float(v)]

            found, pull = jax.vjp(of, *(arrays[i] for i in which))
            return found, pull(list(operands[: len(along)]))

        return run

    made = dataclasses.replace(
        subject,
        function=function,
        operands=(*along, *subject.operands),
        batch_axes=(*(axis,) * len(along), *subject.batch_axes),
        variant="/".join(filter(None, (subject.variant, "gradient"))),
        definition=None,
        blends=tuple,
    )
    made = dataclasses.replace(made, declared=min(strongest(made), "mesh_invariant", key=LEVELS.index))
    return made if is_fixed(made.declared) and _is_served(made) else None


def _is_served(subject: Subject) -> bool:
    """Whether the subject's engine serves its derivatives too: only when they are lowered is each one's engine chosen.

    Engines without kernels serve every derivative of what they serve.
    """
    if subject.engine != "hopper":
        return True
    traced = jax.jit(subject.whole()).trace(*subject.operands)
    try:
        traced.lower(lowering_platforms=(engines.platform(),))
    except NotImplementedError:
        return False
    return True


def variants(subject: Subject) -> Iterator[Subject]:
    """The subject and, if its level fixes bits, its blends and the gradients of all."""
    prefix = f"{subject.variant}/" if subject.variant else ""
    blends = [dataclasses.replace(b, variant=prefix + b.variant, derived=True) for b in subject.blends()]
    for one in (subject, *blends):
        yield one
        found = gradient(one) if is_fixed(one.declared) else None
        if found is not None:
            yield dataclasses.replace(found, derived=True)
