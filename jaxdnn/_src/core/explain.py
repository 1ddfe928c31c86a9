"""Which engine serves each call of a function, which would not and why."""

import contextlib
import dataclasses
import functools as ft
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from jaxdnn._src.core import checks, compat, eager, engines, logs, selection, signatures
from jaxdnn._src.core.determinism import LEVELS, determinism

P = ParamSpec("P")
R = TypeVar("R")

# The accumulations and hazards that engines declare, in words.
ACCUMULATORS = {
    "tensor_core": "float32 on tensor cores",
    "tensor_core_tf32": "float32 on tensor cores, with operands cut to TF32",
    "tensor_core_fp8": "14 bits on tensor cores",
    "transform": "float32, on tensor cores or after a fast Fourier transform, as the library chooses",
}
# What a primitive computes for the op that was called, by the end of its name.
PARTS = {
    "_dgrad": "gradient in the data",
    "_wgrad": "gradient in the weights",
    "_tangent": "derivative along a tangent",
    "_backward": "gradient",
}
HAZARDS = {
    "flushes_subnormals": "reads or writes subnormal numbers as zero",
    "spreads_nonfinite": "NaN and infinity may show in other results too",
    "leaves_out_padding": "may leave out products with the zeros of padding",
    "loses_negative_overflow": "0 may stand where a result below -65504 should be -infinity",
}

WIDTH = 80  # of the text, beyond which a line is folded
_public_ops: set[str] = set()

# Whether `explain` is tracing. JAX keys its tracing caches on this value, so what was traced before is traced anew.
_explaining = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One engine for one call: why it cannot serve it (None: it can), and what it guarantees if it does.

    `level` is that of the call as it is, `strongest` the strongest that the call may require of the engine; None if it
    serves the call at none. They differ where an engine adds in a fixed order only if that is required.

    Where no engine is named, `later` says why it is tried after another that could serve, `earlier` why before the
    others: the rule or the measurement. None where neither the rule nor a measurement names the engine.
    """

    engine: str
    refusal: str | None
    later: str | None
    earlier: str | None
    level: str
    strongest: str | None
    accumulation: str
    workspace: int | None
    schedule: engines.Schedule | None
    modelled: tuple[str, ...]
    hazards: tuple[str, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One call of an op: its operands, the engine that would serve it (None: it would raise), and all candidates.

    `op` is the primitive, which several public ops share or which is a derivative; `public` is the op that was called.
    `device_kind` is None where no device of the platform is here: then this is what an export would choose. `cropped`
    says that padding is negative: the call is on a copy of what is left of x, or its result is padded with zeros.
    """

    op: str
    operands: tuple[str, ...]
    result: str
    platform: str
    level: str
    engine: str | None
    candidates: tuple[Candidate, ...]
    public: str = ""
    device_kind: str | None = None
    cropped: bool = False

    def __str__(self) -> str:
        operands = ", ".join(self.operands)
        head = f"{self._name()}({operands}) -> {self.result} on {self.platform}, level {self.level!r}"
        served = f"served by {self.engine}" if self.engine else "served by no engine: it raises"
        elsewhere = "" if self.device_kind else f"; no {self.platform} device is here: this is an export's choice"
        lines = [_folded(head, 4), _folded(f"  {served}{elsewhere}{self._copy()}", 4)]
        for c in self.candidates:
            if c.refusal is not None:
                lines.append(_folded(f"    {c.engine}: no: {c.refusal}", 6))
                continue
            verdict = "can serve"
            if c.later:
                verdict += f"; unless it is named, another comes first, because {c.later}"
            elif c.earlier:
                verdict += f"; it comes first, because {c.earlier}"
            stronger = f", {c.strongest} if it is required" if c.strongest not in (None, c.level) else ""
            facts = [f"guarantees {c.level}{stronger}"]
            facts.append(f"accumulates in {ACCUMULATORS.get(c.accumulation, c.accumulation)}")
            facts.append("workspace chosen by XLA" if c.workspace is None else f"workspace {c.workspace} bytes")
            facts.append(_schedule(c.schedule))
            if c.modelled:
                facts.append(f"the reference predicts its bits on {', '.join(c.modelled)}")
            facts += [HAZARDS[hazard] for hazard in c.hazards]
            lines.append(_folded(f"    {c.engine}: {verdict} ({'; '.join([*facts, *c.notes])})", 6))
        return "\n".join(lines)

    def _copy(self) -> str:
        if not self.cropped:
            return ""
        done = "its result is padded with zeros after it" if self.op.endswith("_dgrad") else "x is cropped before it"
        return f"; {done}, a copy, for padding is negative"

    def _name(self) -> str:
        """The op that was called and, of a primitive that is its derivative, of what, and the op that is that pass."""
        public = self.public or self.op
        part = next((words for suffix, words in PARTS.items() if self.op.endswith(suffix)), None)
        if part is None or public.endswith(("_dgrad", "_wgrad")):
            return public
        return f"{public}, {part}: {self.op if self.op in _public_ops else ''}"


def _folded(line: str, indent: int) -> str:
    """A line in as many as it needs, of which all but the first are indented."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _schedule(schedule: engines.Schedule | None) -> str:
    if schedule is None:
        return "order of additions not stated"
    orders = "" if schedule.classes is None else f", one of {len(schedule.order)} by position"
    return f"order of additions stated{orders}"


@dataclasses.dataclass(frozen=True)
class Formula:
    """An op without engines, which XLA's formula serves, and the strongest level that its calls may require.

    That is the level of the call itself; the op's docstring says what its derivatives have.
    """

    op: str
    level: str

    def __str__(self) -> str:
        return f"{self.op}\n  served by XLA's formula, without a choice of engines (guarantees {self.level})"


class Explanations(tuple[Explanation, ...]):
    """The calls of ops with engines in the order they are traced; prints as a table.

    Attributes:
      formulas: a `Formula` for every op without engines that the function calls, at each level it has.
    """

    formulas: tuple[Formula, ...]

    def __new__(cls, calls: Iterable[Explanation], formulas: Iterable[Formula] = ()) -> "Explanations":
        found = super().__new__(cls, calls)
        found.formulas = tuple(formulas)
        return found

    def __repr__(self) -> str:
        return "\n".join(map(str, (*self, *self.formulas))) or "no op of jaxdnn is called, or none whose result is used"

    __str__ = __repr__


def explain(function: Callable[..., Any], /, *args: Any, platform: str | None = None, **kwargs: Any) -> Explanations:
    """Says, for every jaxdnn call in a function, which engine would serve it, which would not and why.

    Args:
      function: an op such as `jaxdnn.conv`, or any JAX function that calls ops, such as a gradient or a whole step.
      args: its arguments; `jax.ShapeDtypeStruct`s serve as well as arrays, for nothing is computed. Numbers, such
        as the shape that `jaxdnn.conv_dgrad` takes, are passed on as they are.
      platform: "cpu" or "cuda"; None means JAX's default backend. Where no device of a platform is here, the answer is
        what `jax.export` chooses: no kernel, unless `engine=` names it, for which device will run it is not known.
      kwargs: its keyword arguments.

    Returns:
      A tuple with one `Explanation` a call of an op with engines, in the order of tracing; it prints as text. Its
      attribute `formulas` has the ops without engines, which XLA's formula serves, and the level each guarantees.

    Differentiation: explain `jax.grad(f)` to see the engines of the backward ops.

    Numerics: nothing is computed; each candidate's determinism level and accumulator are given.

    Raises:
      ValueError: an unknown platform. Besides, whatever the function itself raises when it is traced.

    Example:
      >>> x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5))
      >>> dnn.explain(dnn.conv, x, w)[0].engine
      'xla'

    Sources: answers what cuDNN's engine heuristics and `cudnnGetConvolutionForwardAlgorithm_v7` answer.
    """
    if not callable(function):
        expected = "an op or another function, with its arguments behind it, as in explain(conv, x, w)"
        raise TypeError(f"`function` must be {expected}, got {checks.shown(function)}.")
    here = engines.platform() if platform is None else checks.choice("platform", platform, engines.PLATFORMS)
    with _explaining(True):
        jaxpr = _traced(function, args, kwargs)
    return Explanations((_explain_call(*found, here) for found in _calls(jaxpr)), _formulas(jaxpr))


def traced_calls(function: Callable[..., Any], /, *args: Any, platform: str, **kwargs: Any) -> Iterator[engines.Call]:
    """Every jaxdnn call of a function of such arguments, as an engine on a platform sees it."""
    return (_call(eqn, platform) for eqn, _ in _calls(_traced(function, args, kwargs)))


def _traced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The program of a function, whose arguments that are no arrays are passed on as they are."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [_is_array(leaf) for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        given = [next(remaining) if traced else leaf for leaf, traced in zip(leaves, is_array, strict=True)]
        positional, named = jax.tree.unflatten(tree, given)
        return function(*positional, **named)

    arrays = [leaf for leaf, traced in zip(leaves, is_array, strict=True) if traced]
    return jax.make_jaxpr(call)(arrays).jaxpr


def public(function: Callable[P, R]) -> Callable[P, R]:
    """A public op that errors, traces and profiles name; `explain` finds by that name an op that has no primitive.

    An op that a public op calls is part of that one. Outside of jit an op runs as one program, see `eager`.
    """
    op, signature = function.__name__, signatures.shown(function)
    betas = signatures.priors(signature)
    _public_ops.add(op)

    @ft.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        with engines.called(op):
            said = _said_of_level(lambda: function(*args, **kwargs)) if _explaining.value else ""
            with jax.named_scope(f"jaxdnn.{op}{said}"):
                found = function(*args, **kwargs)
        for result in jax.tree.leaves(found):
            checks.countable(f"`{op}`", result.shape)
        return found

    program = eager.program(named)

    @ft.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if engines.is_called():
            return function(*args, **kwargs)
        if (wrong := signatures.unread(betas, kwargs)) is not None:
            raise ValueError(wrong)
        if compat.untraced():
            # What is wrong with arguments is raised again below, about what the user passed; what fails when it runs,
            # such as for want of memory, is not run twice.
            token = logs.raised_again.set(True)
            try:
                return program(args, kwargs)
            except (TypeError, ValueError, OverflowError, NotImplementedError):
                pass
            finally:
                logs.raised_again.reset(token)
        try:
            return named(*args, **kwargs)
        except TypeError:
            if (wrong := signatures.misfit(op, signature, args, kwargs)) is not None:
                raise TypeError(wrong) from None
            raise

    call.__module__ = "jaxdnn"  # where pickle finds it
    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _said_of_level(call: Callable[[], Any]) -> str:
    """The strongest level at which an op may be called, as the end of a scope's name: behind a colon of an op without
    engines, behind an @ of one with engines; "" if the call raises at every level, as it will when it is traced."""
    for level in reversed(LEVELS):
        with contextlib.suppress(NotImplementedError), determinism(level):
            has_engines = any(_calls(jax.make_jaxpr(call)().jaxpr))
            return f"{'@' if has_engines else ':'}{level}"
    return ""


def _formulas(jaxpr: Any) -> tuple[Formula, ...]:
    scopes = dict.fromkeys(names for _, names in _equations(jaxpr))
    found = [pair for names in scopes for pair in re.findall(r"jaxdnn\.(\w+):(\w+)", names)]
    return tuple(Formula(op, level) for op, level in dict.fromkeys(found))


def _is_array(leaf: Any) -> bool:
    """Numbers, NumPy's too, are not: a stride or a size has to be known when traced."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, np.generic)


def _calls(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    return ((eqn, scopes) for eqn, scopes in _equations(jaxpr) if eqn.primitive.name.startswith("jaxdnn_"))


def _equations(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
    """The equations of a program and of those within it, each with the names of the scopes that it was traced in."""
    for eqn in jaxpr.eqns:
        scopes = f"{outer}/{compat.scope(eqn)}"  # within a program JAX does not name what is around it
        yield eqn, scopes
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _equations(inner, scopes)


def _call(eqn: Any, platform: str) -> engines.Call:
    op, spec = eqn.primitive.name.removeprefix("jaxdnn_"), eqn.params["spec"]
    avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    return engines.Call(op, spec, avals, platform, engines.device_kind(platform))


def _explain_call(eqn: Any, scopes: str, platform: str) -> Explanation:
    call = _call(eqn, platform)
    op, spec, avals = call.op, call.spec, call.avals
    found = selection.ranked(call)
    refusals = {e.name: _refusal(e, call) for e in found}
    served = next((name for name, reason in refusals.items() if reason is None), None)
    out = eqn.outvars[0].aval
    public_ops = re.findall(r"jaxdnn\.(\w+)(?:@(\w+))?", scopes)
    named, at_most = public_ops[-1] if public_ops else ("", "")
    return Explanation(
        device_kind=call.device_kind,
        op=op,
        operands=tuple(map(engines.in_short, avals)),
        result=engines.in_short(out),
        platform=platform,
        level=spec.level,
        engine=served,
        candidates=tuple(_candidate(e, call, refusals[e.name], at_most or LEVELS[-1]) for e in found),
        public=named,
        cropped=getattr(spec, "cut", None) is not None,
    )


def _refusal(engine: engines.Engine, call: engines.Call) -> str | None:
    if call.spec.engine not in (None, engine.name):
        return f"the call names engine {call.spec.engine!r}"
    return selection.refusal(engine, call, call.spec.level)


def _candidate(engine: engines.Engine, call: engines.Call, refusal: str | None, at_most: str) -> Candidate:
    """`at_most` is the strongest level of the op that makes the call."""
    able, unasked = engine.supports(call) is None, call.spec.engine is None
    return Candidate(
        engine=engine.name,
        refusal=refusal,
        later=selection.why_later(engine, call) if unasked else None,
        earlier=selection.why_earlier(engine, call) if unasked else None,
        level=min(engine.level(call), at_most, key=LEVELS.index),
        strongest=_strongest(engine, call, at_most),
        accumulation=engine.accumulation(call),
        workspace=engine.workspace(call) if able else None,
        schedule=engine.schedule(call) if able else None,
        modelled=engine.modelled,
        hazards=engine.hazards(call) if able else (),
        notes=engine.notes,
    )


def _strongest(engine: engines.Engine, call: engines.Call, at_most: str) -> str | None:
    """The strongest level, up to one, at which an engine would serve a call."""
    for level in reversed(LEVELS[: LEVELS.index(at_most) + 1]):
        if _refusal(engine, dataclasses.replace(call, spec=dataclasses.replace(call.spec, level=level))) is None:
            return level
    return None
