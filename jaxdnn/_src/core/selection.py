"""Which engine serves a call: why one may not, and the one rule for calls that name none.

The rule: of the engines that support the call on the platform it is lowered for and guarantee the required determinism
level, the first in this order, kernels before what XLA computes where two are alike:

1. those that are taken to be faster than XLA's program on calls like this one, on this kind of device;
2. XLA's, and every engine that says nothing of measurements;
3. those that are not taken to be faster on calls like it;
4. those of last resort, slow for the sake of the definition's order.

An engine may state a rank of its own instead.

Nothing falls back in silence: a named engine that cannot serve a call raises with its reason.

What was measured stands in `measured/`, a table for each kind of device. Under an engine's and an op's name it has, by
the name of a call's `Features`:

* `ranges`: between which sizes the engine gains (null: without end), read from the notes in `benchmarks/`;
* `calls`: single ones, with XLA's time over the engine's, which `jaxdnn bench --record` writes. They speak for a call
  if its work is between `reach` times that of the nearest measured length below its own. It gains if both neighbours
  do.

and `otherwise`: true where the engine gains on calls that have features and that nothing of this speaks for, but for
the kinds of calls that the engine itself names (`Engine.slower`). A call that lost speaks for all batches of its name.
"""

import functools as ft
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax import export

from jaxdnn._src.core import checks, compat, engines
from jaxdnn._src.core.determinism import satisfies
from jaxdnn._src.core.engines import Call, Engine, Features
from jaxdnn._src.core.limits import limits_of

REACH = (0.5, 4)  # where a table has none
FASTER, AS_XLA, NOT_FASTER, LAST = range(4)
_NOT_LIKE = "it was not measured on calls like this one"


# ---- the rule --------------------------------------------------------------------------------------------------------


def ranked(call: Call) -> tuple[Engine, ...]:
    """The engines of a call's op in the order in which they are tried."""
    able = [engine for engine in engines.registered(call.op) if not _lacks_sizes(engine, call)]
    rest = [engine for engine in engines.registered(call.op) if _lacks_sizes(engine, call)]
    return (*sorted(able, key=lambda engine: _place(engine, call)), *rest)


def _place(engine: Engine, call: Call) -> int:
    if engine.rank is not None:
        return engine.rank(call)
    if engine.features is None:
        return AS_XLA
    return FASTER if gains(engine, call) else NOT_FASTER


def gains(engine: Engine, call: Call) -> bool:
    """Whether an engine with measurements is taken to be faster than XLA's program on a call."""
    return engine.features is not None and why_later(engine, call) is None


def why_later(engine: Engine, call: Call) -> str | None:
    """Why an engine with measurements is tried after XLA's where none is named, as a clause; None where it is not."""
    if engine.features is None:
        return None
    table = measured().get(call.device_kind or "", {}).get(engine.name, {}).get(call.op)
    if table is None:
        kinds = [kind for kind, others in measured().items() if call.op in others.get(engine.name, {})]
        if not kinds:
            return "it was not measured on any device"
        return f"it was measured on {', '.join(kinds)}, not on {call.device_kind or 'one that is not here'}"
    if (features := engine.features(call)) is None:
        return _NOT_LIKE
    for limits in table.get("ranges", {}).get(features.name, ()):
        if all(_is_between(features.sizes[name], *limit) for name, limit in limits.items()):
            return None
    points = table.get("calls", {}).get(features.name, ())
    speed_up = _speed_up(features.sizes, points, table.get("reach", REACH))
    if speed_up is None:
        lost = [point["speed_up"] for point in points if point["speed_up"] < 1]
        if not lost:
            return engine.slower(call) if table.get("otherwise") else _NOT_LIKE
        speed_up = min(lost)  # of another batch, which is no reason to take it for faster
    return None if speed_up >= 1 else f"on calls like this one it takes {1 / speed_up:.2f} times XLA's time"


def _speed_up(sizes: Mapping[str, int], points: Any, reach: Any) -> float | None:
    """The lesser speed-up of the nearest measured lengths below and above; None where they do not speak for a call."""
    length = lambda point: point.get("length", 1)
    below = max((p for p in points if length(p) <= length(sizes)), key=length, default=None)
    above = min((p for p in points if length(p) >= length(sizes)), key=length, default=None)
    if below is None or above is None:
        return None
    work = length(sizes) * sizes["batch"] / (length(below) * below["batch"])
    return min(below["speed_up"], above["speed_up"]) if _is_between(work, *reach) else None


def _is_between(value: float, least: float, most: float | None) -> bool:
    return least <= value and (most is None or value <= most)


# ---- what was measured -----------------------------------------------------------------------------------------------


@ft.cache
def measured() -> dict[str, Any]:
    """The tables of all kinds of devices, by the names that these give themselves."""
    tables = (json.loads(path.read_text()) for path in sorted(Path(__file__).with_name("measured").glob("*.json")))
    return {table["device"]: table for table in tables}


def record(path: Path, engine: str, op: str, features: Features, speed_up: float) -> None:
    """Writes into a table of this device what an engine gained on a call, if it is one that single calls speak for."""
    if "batch" not in features.sizes:
        return
    here = jax.devices()[0].device_kind
    table = json.loads(path.read_text()) if path.exists() else {"device": here}
    if table.get("device") != here:
        raise ValueError(f"{path} must be a table of what was measured on {here}, got one of {table.get('device')}.")
    calls = table.setdefault(engine, {}).setdefault(op, {}).setdefault("calls", {})
    others = [p for p in calls.get(features.name, ()) if p.get("length") != features.sizes.get("length")]
    found = [*others, {**features.sizes, "speed_up": round(speed_up, 3)}]
    calls[features.name] = sorted(found, key=lambda point: point.get("length", 1))
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(engine: Engine, call: Call, level: str) -> str | None:
    """Why an engine may not serve a call at a determinism level and within its limits, as a clause; None if it may."""
    if _lacks_sizes(engine, call):
        return "it needs every size when a call is traced, and the batch is symbolic"
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
    """The engine that serves a call; its spec says which engine and level are asked for."""
    reasons = []
    named = [engine for engine in engines.registered(call.op) if engine.name == call.spec.engine]
    for engine in ranked(call) if call.spec.engine is None else named:
        reason = refusal(engine, call, call.spec.level)
        if reason is None:
            return engine
        reasons.append(f"{engine.name}: {reason}")
    asked = f"engine {call.spec.engine!r}" if call.spec.engine else "any engine"
    why = "; ".join(reasons) or "it has no such engine"
    raise NotImplementedError(
        f"{engines.in_words(call.op)} on {call.platform} cannot be served by {asked} at determinism level "
        f"{call.spec.level!r} ({why})."
    )


def check(op: str, spec: Any, avals: tuple[jax.ShapeDtypeStruct, ...]) -> None:
    """Raises, when a call is traced, if no platform it could be lowered for has an engine for it."""
    checks.choice("engine", spec.engine, (None, *engines.names()))
    here = jax.default_backend()
    here = "cuda" if here == "gpu" else here
    errors = []
    for platform in dict.fromkeys((here, *engines.PLATFORMS)):
        try:
            select(Call(op, spec, avals, platform, engines.device_kind(platform)))
            return
        except NotImplementedError as error:
            errors.append(error)
    for other in errors[1:]:  # what `jax.export` lowers is not for the platform that is here
        errors[0].add_note(str(other))
    raise errors[0]
