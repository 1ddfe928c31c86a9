"""Which engine serves a call: why one may not, and the one rule for calls that name none.

The rule: of the engines that support the call on the platform it is lowered for and guarantee the required determinism
level, the first in this order, kernels before what XLA computes where two are alike:

0. the one that `jaxdnn.tune` measured fastest on this very call (`tuned`), if it is 5 % faster than the next of these;
1. those that were measured on this kind of device, but for the kinds of calls that each names as slower;
2. XLA's, and every engine that says nothing of measurements;
3. those that were not measured on this kind of device, or on which the call is of a kind that they name;
4. those of last resort, slow for the sake of the definition's order.

An engine may state a rank of its own instead.

So a kernel serves wherever it can: on shapes that nobody measured the time of the better engine was nearest to that of
"always the kernel", while XLA's program may take hundreds of times longer. What is left to XLA is a predicate, not a
list of shapes, with a reason, and with the measured case that shows it where one is recorded (`Engine.slower`). Nothing
is measured when a program runs, so processes that read the same file of `jaxdnn tune`, or none, choose alike.
`jaxdnn bench FAMILY --family corpus` measures what the choice loses; `--judge benchmarks/results/corpus_FAMILY_...`
says what it loses now, by network, on an H200.

Nothing falls back in silence: a named engine that cannot serve a call raises with its reason.
"""

import dataclasses
from typing import Any

import jax
from jax import export

from jaxdnn._src.core import checks, compat, engines, logs, settings, tuned
from jaxdnn._src.core.determinism import satisfies
from jaxdnn._src.core.engines import Call, Engine
from jaxdnn._src.core.limits import limits_of

FASTER, AS_XLA, NOT_FASTER, LAST = range(4)
MARGIN = 1.05  # of its speed over that of the rule's choice; what is nearer changes from one measurement to the next


# ---- the rule --------------------------------------------------------------------------------------------------------


def ranked(call: Call) -> tuple[Engine, ...]:
    """The engines of a call's op in the order in which they are tried."""
    rest = [engine for engine in engines.registered(call.op) if _lacks_sizes(engine, call)]
    first, _ = _measured(call) or (None, {})
    return (*sorted(_by_rule(call), key=lambda engine: engine.name != first), *rest)


def _by_rule(call: Call) -> list[Engine]:
    able = [engine for engine in engines.registered(call.op) if not _lacks_sizes(engine, call)]
    return sorted(able, key=lambda engine: _place(engine, call))


def _measured(call: Call) -> tuple[str, tuned.Times] | None:
    """The engine that is tried first by what was measured on a call, if anything was, and the times of all."""
    if not (times := tuned.times(call)):
        return None
    found = {engine.name: times[engine.name] for engine in _by_rule(call) if engine.name in times}
    if not found:
        return None
    choice, best = next(iter(found)), min(found, key=found.__getitem__)
    return (best if found[choice] >= MARGIN * found[best] else choice), found


def _place(engine: Engine, call: Call) -> int:
    if engine.rank is not None:
        return engine.rank(call)
    if engine.measured_on is None:
        return AS_XLA
    return FASTER if _named(engine, call) is None else NOT_FASTER


def _named(engine: Engine, call: Call) -> str | None:
    """Why an engine with measurements is not taken for the faster one by rule."""
    if engine.measured_on is not None and call.device_kind not in engine.measured_on:
        here = f"not on {call.device_kind}" if call.device_kind else "and which device will run this is not known here"
        return f"it was measured on {', '.join(engine.measured_on) or 'no device'}, {here}"
    return next((str(kind) for kind in engine.slower if kind.has(call)), None)


def why_later(engine: Engine, call: Call) -> str | None:
    """Why an engine with measurements is tried after another where none is named, as a clause; None where it is not."""
    if engine.rank is not None or _lacks_sizes(engine, call):
        return None
    if measured := _measured(call):
        return None if engine.name == measured[0] else _in_words(*measured)
    return None if engine.measured_on is None else _named(engine, call)


def why_earlier(engine: Engine, call: Call) -> str | None:
    """Why an engine with measurements is tried before others where none is named; None where it is not."""
    if engine.rank is not None or _lacks_sizes(engine, call) or why_later(engine, call) is not None:
        return None
    if measured := _measured(call):
        return _in_words(*measured)
    if engine.measured_on is None:
        return None
    return f"it was measured on {call.device_kind}, and the call is of no kind on which it was slower there"


def _in_words(first: str, found: tuned.Times) -> str:
    """What `jaxdnn.tune` measured on a call, as a clause."""
    told = ", ".join(f"{name} took {ms:.4f} ms" for name, ms in sorted(found.items()))
    near = ", and a gain of less than 5 % decides nothing" if found[first] > min(found.values()) else ""
    return f"on this call {told}, says {tuned.path()}{near}"


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(engine: Engine, call: Call, level: str) -> str | None:
    """Why an engine may not serve a call at a determinism level and within its limits, as a clause; None if it may."""
    if _lacks_sizes(engine, call):
        return "it needs every size when a call is traced, and the batch is symbolic"
    if not settings.kernels() and not engine.fused:
        return f"it is a kernel, and `{settings.CONFIG}` is XLA_ONLY"
    reason = engine.supports(call) or _unshardable(engine, call)
    if reason is None and not satisfies(engine.level(call), level):
        reason = f"it guarantees {engine.level(call)!r} here, not {level!r}"
    allowed = limits_of(call.spec).workspace
    if reason is None and allowed is not None and (needed := engine.workspace(call) or 0) > allowed:
        reason = f"it needs {needed} bytes of workspace, and the limit is {allowed}"
    return reason


def _unshardable(engine: Engine, call: Call) -> str | None:
    """Why an engine that has to say how its calls are sharded cannot; XLA finds a way of its own for its operations."""
    if not call.partitioned or not engine.partition(call) or engine.name in ("xla", "ordered"):
        return None
    lack = compat.lacking(compat.SHARDING)
    return lack and f"{lack}, which tells XLA how to shard it"


def _lacks_sizes(engine: Engine, call: Call) -> bool:
    symbolic = any(export.is_symbolic_dim(n) for aval in call.avals for n in aval.shape)
    return symbolic and engine.needs_sizes(call)


def select(call: Call) -> Engine:
    """The engine that serves a call; its spec says which engine and level are asked for. It is logged."""
    engine, refusals = _tried(call)
    logs.choice(call, engine and engine.name, refusals)
    if engine is None:
        raise _unserved(call, refusals)
    return engine


def checked(op: str, spec: Any, *operands: Any) -> Any:
    """The spec of a user's call; if it names no engine, with the one that is asked for around it, if one is.

    Raises, when a call is traced, if no platform it could be lowered for has an engine for it.
    """
    if spec.engine is None and engines.asked.value is not None:
        spec = dataclasses.replace(spec, engine=engines.asked.value)
    checks.choice("engine", spec.engine, (None, *engines.names()))
    avals = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands)
    found = []
    for platform in dict.fromkeys((engines.platform(), *engines.PLATFORMS)):
        call = Call(op, spec, avals, platform, engines.device_kind(platform))
        engine, refusals = _tried(call)
        if engine is not None:
            return spec
        found.append((call, refusals))
    logs.choice(found[0][0], None, found[0][1])
    error, *others = (_unserved(*one) for one in found)
    for other in others:  # what `jax.export` lowers is not for the platform that is here
        error.add_note(str(other))
    raise error


def _tried(call: Call) -> tuple[Engine | None, dict[str, str]]:
    """The engine that serves a call, None if none does, and why those that come before it do not, by name."""
    refusals: dict[str, str] = {}
    named = [engine for engine in engines.registered(call.op) if engine.name == call.spec.engine]
    for engine in ranked(call) if call.spec.engine is None else named:
        reason = refusal(engine, call, call.spec.level)
        if reason is None:
            return engine, refusals
        refusals[engine.name] = reason
    return None, refusals


def _unserved(call: Call, refusals: dict[str, str]) -> NotImplementedError:
    asked = f"engine {call.spec.engine!r}" if call.spec.engine else "any engine"
    why = "; ".join(f"{name}: {reason}" for name, reason in refusals.items()) or "it has no such engine"
    return NotImplementedError(
        f"{engines.in_words(call.op)} on {call.platform} cannot be served by {asked} at determinism level "
        f"{call.spec.level!r} ({why})."
    )
