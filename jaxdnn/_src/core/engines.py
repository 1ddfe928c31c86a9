"""Engines: the implementations of an op, what each can serve and guarantees; `selection` chooses among them."""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

PLATFORMS = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an op, as an engine sees it: static arguments, operand shapes and dtypes, and where it will run.

    `partitioned` says that the program is for several devices, and that XLA partitions the call among them.
    """

    op: str
    spec: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    platform: str
    device_kind: str | None = None
    partitioned: bool = False


def in_short(aval: Any) -> str:
    """An array's dtype and shape, such as float32[2,3]."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The order in which an engine adds the products of an output; enough for the reference to predict its bits.

    Attributes:
      arithmetic: the reference's arithmetic, "ordered" or "tensor_core".
      order: integer array (partial sums, products): for each partial sum the flat indices of the reduction in the
        order of addition, -1 for a padding zero; the partial sums are added in float32 afterwards. If the order
        depends on the output's position, a tuple of such arrays.
      combine: how the partial sums are added, "sequential" or "pairwise".
      classes: with several orders, an integer array with an axis for each spatial axis of the result: the output at
        (p, q) has order number classes[p mod its length, q mod its width].
    """

    arithmetic: str
    order: np.ndarray | tuple[np.ndarray, ...]
    combine: str = "sequential"
    classes: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row of a file in `benchmarks/results`, made by `jaxdnn bench`, and an engine's gain over XLA's program there.

    The file is named without its device; `which` is the row's pass, `gain` XLA's time over the engine's.
    """

    file: str
    family: str
    case: str
    which: str
    gain: float
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.family} {self.case}, {self.which}, {self.dtype}: {self.gain:.2f} of its speed"


@dataclasses.dataclass(frozen=True)
class Slower:
    """A kind of calls on which an engine is taken to be slower than XLA's program, or was never measured.

    Attributes:
      why: the reason, as a clause.
      has: whether a call is of the kind; asked for every call, so it must not raise for any dtype or sizes.
      measured: the case that shows it; None where nothing like it was measured.
    """

    why: str
    has: Callable[[Call], bool]
    measured: Measured | None = None

    def __str__(self) -> str:
        return f"{self.why} ({self.measured})" if self.measured else self.why


@dataclasses.dataclass(frozen=True)
class Engine:
    """One implementation of one op.

    `schedule`, `hazards` and `workspace` are called only for calls that the engine supports. The other functions are
    called for every call, and must not raise for any dtypes.

    Attributes:
      name: what `engine=` calls it.
      op: the op it implements.
      run: the implementation: a call and its operands to the result.
      supports: a call to None, or to the reason (a clause) why the engine cannot serve it.
      needs_sizes: whether its program depends on the batch, which `jax.export` may leave open.
      level: the determinism level that it guarantees for a call, which may depend on the one that the call requires.
      accumulation: how it accumulates, for the error bound: one of `jaxdnn.tolerance.ACCUMULATIONS`.
      schedule: the order of additions, if it is known.
      modelled: the architectures on which tests showed that the reference predicts the bits from the schedule.
      hazards: what it may do to exceptional values: "flushes_subnormals" (reads or writes them as zero),
        "spreads_nonfinite" (NaN and infinity may show in results that do not depend on them), "leaves_out_padding"
        (products with padding zeros, which are NaN if the other factor is infinite, may be skipped),
        "loses_negative_overflow" (a result below the dtype's least number may be 0 instead of -infinity).
      measured_on: the kinds of devices on which it was measured beside XLA's program: there it is tried before that,
        elsewhere after it. None of an engine that nobody need measure, which stands beside XLA's.
      slower: the kinds of calls on which it is tried after XLA's all the same.
      rank: its place in `selection`'s order whatever was measured; the lowest is tried first.
      workspace: bytes of device memory beside operands and result; None where the compiler decides.
      fused: whether it is an XLA program, which XLA may fuse with the operations around the call.
      partition: whether a call is partitioned among devices as its primitive declares (otherwise XLA decides).
      adds_in_order: whether it guarantees the order of its additions, so that no sum may be split among devices.
      notes: facts for the user: tensor cores, down-conversion, limits.
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
    measured_on: tuple[str, ...] | None = None
    slower: tuple[Slower, ...] = ()
    rank: Callable[[Call], int] | None = None
    workspace: Callable[[Call], int | None] = lambda call: None
    fused: bool = True
    partition: Callable[[Call], bool] = lambda call: False
    adds_in_order: bool = False
    notes: tuple[str, ...] = ()


def flushes_on_cpus(call: Call) -> tuple[str, ...]:
    """The hazard of a formula in XLA's CPU code, which reads and writes float32's subnormal numbers as zero.

    Products of bfloat16 are float32's.
    """
    return ("flushes_subnormals",) if call.platform == "cpu" else ()


def level_of_products(call: Call) -> str:
    """The level of XLA's own products of floats: on GPUs its autotuner chooses an algorithm, if no flag forbids it."""
    flags = os.environ.get("XLA_FLAGS", "")
    names = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
    asked = any(f"--{name}" in flags and f"--{name}=false" not in flags for name in names)
    return "run_to_run" if asked or call.platform == "cpu" else "fast"


_registry: dict[str, list[Engine]] = {}
_called: contextvars.ContextVar[str | None] = contextvars.ContextVar("called", default=None)
# The engine that must serve the calls within that name none; JAX keys its tracing and compilation caches on it.
asked = jax.make_user_context(None)
_words: dict[str, str] = {}  # the names of primitives in error messages if no public op is being called


@contextlib.contextmanager
def called(op: str) -> Iterator[None]:
    """Within the context error messages name this public op; several ops share a primitive, as normalisations do."""
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


def declare(name: str, *ops: str, **declared: Any) -> None:
    """Registers one engine for each of these ops; `declared` are the attributes of `Engine`, the same for all."""
    for op in ops:
        register(Engine(name, op, **declared))


def registered(op: str) -> tuple[Engine, ...]:
    """The engines of an op, in the order of registration."""
    return tuple(_registry.get(op, ()))


def ops() -> tuple[str, ...]:
    """The ops that have engines."""
    return tuple(_registry)


def say(op: str, words: str) -> None:
    """Names a primitive that is no public op, such as a derivative, for error messages."""
    _words[op] = words


def in_words(op: str) -> str:
    """The name of an op in error messages: the public op that is being called, or a derivative's primitive."""
    public = _called.get()
    return f"`{public}`" if public else _words.get(op, f"`{op}`")


def names() -> tuple[str, ...]:
    """Every engine's name, kernels first."""
    found = (engine for of_op in _registry.values() for engine in of_op)
    return tuple(dict.fromkeys(engine.name for engine in sorted(found, key=lambda engine: engine.fused)))


def platform() -> str:
    """The default backend, as engines name it."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def device_kind(platform: str) -> str | None:
    """The kind of the platform's first device; None if this process has no such device."""
    try:
        return jax.local_devices(backend=platform)[0].device_kind
    except RuntimeError:
        return None
