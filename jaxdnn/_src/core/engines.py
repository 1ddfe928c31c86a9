"""Engines: the implementations of an op, what each can serve and promises, and the rule that chooses one.

The rule, when a call names no engine: of the engines that support the call on the platform it is lowered for and
guarantee the required determinism level, the one of the lowest rank; an engine ranks itself by what was measured.
Nothing falls back in silence: a named engine that cannot serve a call raises with its reason.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import export

from jaxdnn._src.core import checks, compat
from jaxdnn._src.core.determinism import satisfies
from jaxdnn._src.core.limits import limits_of

PLATFORMS = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an op, as an engine sees it: static arguments, operand shapes and dtypes, and where it will run.

    `dealt` says that the program is one for several devices, among which XLA deals the call out.
    """

    op: str
    spec: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    platform: str
    device_kind: str | None = None
    dealt: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """In which order an engine adds the products of an output, enough for the reference to predict its bits.

    Attributes:
      arithmetic: the reference's arithmetic, "ordered" or "tensor_core".
      order: integer array (partial sums, products): for each partial sum the flat indices of the reduction in the
        order they are added, -1 for a zero that pads; the partial sums are added in float32 afterwards. Where the order
        depends on the output's place, a tuple of such arrays.
      combine: how the partial sums are added, "sequential" or "pairwise".
      classes: with several orders, an integer array with an axis for each spatial axis of the result: the output at
        (p, q) has order number classes[p mod its length, q mod its width].
    """

    arithmetic: str
    order: np.ndarray | tuple[np.ndarray, ...]
    combine: str = "sequential"
    classes: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Engine:
    """One implementation of one op.

    `schedule`, `hazards` and `workspace` are asked of calls that it supports alone, the others of every call: they give
    an answer and do not raise, whatever the dtypes.

    Attributes:
      name: what `engine=` calls it.
      op: the op it implements.
      run: the implementation: a call and its operands to the result.
      supports: a call to None, or to the reason (a clause) why the engine cannot serve it.
      needs_sizes: whether its program depends on the batch, which `jax.export` may leave open.
      level: the determinism level that it guarantees for a call which requires it.
      accumulation: how it adds, for the error bound: one of `jaxdnn.tolerance.ACCUMULATIONS`.
      schedule: the order of additions, where it is known.
      modelled: the architectures on which the reference was found to predict the bits from the schedule.
      hazards: what it may do to exceptional values: "flushes_subnormals" (reads or writes them as zero),
        "spreads_nonfinite" (NaN and infinity may show in results that they do not belong to), "leaves_out_padding"
        (products with the zeros of padding may be left out, which are NaN where the other factor is infinite).
      rank: its place among an op's engines for a call, as far as measurements tell; the lowest is tried first.
      workspace: bytes of device memory beside operands and result; None where the compiler decides.
      measured_on: the kinds of device on which its ranks were measured; None where they hold on every device.
      fused: whether XLA sees what it computes, and may join it with what stands around the call.
      partition: whether a call is divided among devices as its primitive declares (else XLA finds out by itself).
      adds_in_order: whether the order of its additions is part of what it promises, so that no sum is split.
      notes: what a user may want to know: tensor cores, down-conversion, limits.
    """

    name: str
    op: str
    run: Callable[..., jax.Array]
    supports: Callable[[Call], str | None] = lambda call: None
    needs_sizes: Callable[[Call], bool] = lambda call: False
    level: Callable[[Call], str] = lambda call: "fast"
    accumulation: Callable[[Call], str] = lambda call: "float32"
    schedule: Callable[[Call], Schedule | None] = lambda call: None
    modelled: tuple[str, ...] = ()
    hazards: Callable[[Call], tuple[str, ...]] = lambda call: ()
    rank: Callable[[Call], int] = lambda call: 1
    workspace: Callable[[Call], int | None] = lambda call: None
    measured_on: tuple[str, ...] | None = None
    fused: bool = True
    partition: Callable[[Call], bool] = lambda call: False
    adds_in_order: bool = False
    notes: tuple[str, ...] = ()


_registry: dict[str, list[Engine]] = {}
_called: contextvars.ContextVar[str | None] = contextvars.ContextVar("called", default=None)
# What errors call primitives that are no public op, where no public op is being called: in a derivative.
_IN_WORDS = {
    "fused_dropout": "`dropout`",
    "fused_dropout_tangent": "A derivative of `dropout`",
    "fused_dropout_dgrad": "The gradient of `dropout` in its bias",
    "norm": "A normalisation",
    "norm_tangent": "The derivative of a normalisation along a tangent",
    "norm_dgrad": "The gradient of a normalisation",
    "pool_max": "`pool` of mode 'max'",
    "pool_max_indices": "`pool` of mode 'max', with the places of its maxima for its gradient,",
    "pool_max_dgrad": "The gradient of `pool` of mode 'max'",
    "pool_pick": "The derivative of `pool` of mode 'max' along a tangent",
    "pool_average": "Average pooling",
    "pool_average_dgrad": "The gradient of average pooling",
}


@contextlib.contextmanager
def called(op: str) -> Iterator[None]:
    """Within it errors name this public op: several share a primitive, as all normalisations do."""
    token = _called.set(op)
    try:
        yield
    finally:
        _called.reset(token)


def is_called() -> bool:
    """Whether a public op is being called."""
    return _called.get() is not None


def register(engine: Engine) -> None:
    """Adds an engine behind those its op already has; kernels stand before what XLA computes."""
    found = _registry.setdefault(engine.op, [])
    found.append(engine)
    found.sort(key=lambda engine: engine.fused)


def registered(op: str) -> tuple[Engine, ...]:
    """The engines of an op, in the order of registration."""
    return tuple(_registry.get(op, ()))


def ranked(call: Call) -> tuple[Engine, ...]:
    """The engines of a call's op in the order they are tried for it."""
    able = [engine for engine in registered(call.op) if not _lacks_sizes(engine, call)]
    rest = [engine for engine in registered(call.op) if _lacks_sizes(engine, call)]
    return (*sorted(able, key=lambda engine: _place(engine, call)), *rest)


def _place(engine: Engine, call: Call) -> int:
    """An engine's rank; on a device where it was not measured it is tried behind XLA's."""
    return 2 if unmeasured(engine, call) else engine.rank(call)


def unmeasured(engine: Engine, call: Call) -> str | None:
    """Why nothing is known of an engine's time on the device of a call, as a clause; None where it was measured."""
    if engine.measured_on is None or call.device_kind in engine.measured_on:
        return None
    return f"it was measured on {', '.join(engine.measured_on)}, not on {call.device_kind or 'one that is not here'}"


def ops() -> tuple[str, ...]:
    """The ops that have engines."""
    return tuple(_registry)


def in_words(op: str) -> str:
    """What errors call an op: the public one that is being called, or a derivative's primitive."""
    public = _called.get()
    return f"`{public}`" if public else _IN_WORDS.get(op, f"`{op}`")


def names() -> tuple[str, ...]:
    """Every engine's name, kernels first."""
    found = (engine for of_op in _registry.values() for engine in of_op)
    return tuple(dict.fromkeys(engine.name for engine in sorted(found, key=lambda engine: engine.fused)))


def device_kind(platform: str) -> str | None:
    """What the platform's first device calls itself; None if this process has no such device."""
    try:
        return jax.local_devices(backend=platform)[0].device_kind
    except RuntimeError:
        return None


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
    if not call.dealt or not engine.partition(call) or engine.name in ("xla", "ordered"):
        return None
    lack = compat.lacking(compat.SHARDING)
    return lack and f"{lack}, which tells XLA how to shard it"


def _lacks_sizes(engine: Engine, call: Call) -> bool:
    symbolic = any(export.is_symbolic_dim(n) for aval in call.avals for n in aval.shape)
    return symbolic and engine.needs_sizes(call)


def select(call: Call) -> Engine:
    """The engine that serves a call; its spec says which engine and level are asked for."""
    reasons = []
    named = [engine for engine in registered(call.op) if engine.name == call.spec.engine]
    for engine in ranked(call) if call.spec.engine is None else named:
        reason = refusal(engine, call, call.spec.level)
        if reason is None:
            return engine
        reasons.append(f"{engine.name}: {reason}")
    asked = f"engine {call.spec.engine!r}" if call.spec.engine else "any engine"
    why = "; ".join(reasons) or "it has no such engine"
    raise NotImplementedError(
        f"{in_words(call.op)} on {call.platform} cannot be served by {asked} at determinism level "
        f"{call.spec.level!r} ({why})."
    )


def check(op: str, spec: Any, avals: tuple[jax.ShapeDtypeStruct, ...]) -> None:
    """Raises, when a call is traced, if no platform it could be lowered for has an engine for it."""
    checks.choice("engine", spec.engine, (None, *names()))
    here = jax.default_backend()
    here = "cuda" if here == "gpu" else here
    errors = []
    for platform in dict.fromkeys((here, *PLATFORMS)):
        try:
            select(Call(op, spec, avals, platform, device_kind(platform)))
            return
        except NotImplementedError as error:
            errors.append(error)
    for other in errors[1:]:  # what `jax.export` lowers is not for the platform that is here
        errors[0].add_note(str(other))
    raise errors[0]
