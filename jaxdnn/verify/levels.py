"""The procedures that put a determinism level to the test, bit for bit.

| level | procedure | what is done |
|---|---|---|
| run_to_run | repeats | the same arrays again and again, then copies of them at other addresses |
| | under load | the same while another thread keeps the device busy |
| | recompilation | traced and compiled anew |
| | poisoned output | a buffer full of NaN of the result's shape is donated, so that XLA writes the result into it |
| batch_invariant | batch sizes | one sample within batches of many sizes, at the first, a middle and the last place |
| | neighbours | the other samples of the batch are NaN, infinite or 1e30 |
| | vmap | vmap over samples against a loop |
| mesh_invariant | mesh | the batch sharded over 2, 4, 8 devices, as far as there are |
| portable | definition | equal to the reference's arithmetic "ordered", for integers to the exact sum |

A level includes those above it. N repeats without a difference bound the chance of one by 3 / N (at 95 %). XLA offers
no way to poison an op's workspace; buffers that are freed before a call, full of NaN, stand in for it.

Every procedure has a negative control, see `controls`.
"""

import dataclasses
import functools as ft
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdnn_reference as reference
from jaxdnn import _window
from jaxdnn.determinism import LEVELS
from jaxdnn.verify import cases, checks, data
from jaxdnn.verify.cases import Case
from jaxdnn.verify.checks import same_bits
from jaxdnn.verify.geometries import Geometry

# Large enough that XLA splits it among a CPU's threads.
GEOMETRY = Geometry("determinism", 8, (24, 20), 16, 32, (3, 3), (1, 2), ((1, 0), (2, 1)))
DTYPES = ("f32", "bf16", "int8")
SIZES = {
    "quick": (2, 5),
    "standard": (2, 3, 8, 17),
    "full": (2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257),
}
# A transposed convolution is bound as the primitive of backward data, so what holds for that holds for it.
OPS = tuple(op for op in cases.OPS if op != "conv_transpose")
PROCEDURES = {
    "run_to_run": ("repeats", "under load", "recompilation", "poisoned output"),
    "batch_invariant": ("batch sizes", "neighbours", "vmap"),
    "mesh_invariant": ("mesh",),
    "portable": ("definition",),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One procedure on one subject. status: "passed", "failed", "not run" (the message says why)."""

    op: str
    engine: str
    dtype: str
    declared: str
    level: str
    procedure: str
    status: str
    runs: int
    message: str = ""
    control: bool = False

    @property
    def id(self) -> str:
        return f"determinism/{self.op}/{self.engine}/{self.dtype}/{self.procedure.replace(' ', '-')}"


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a procedure needs to know of what it tests.

    Attributes:
      function: from a batch size to the function of the arrays of such a batch.
      operands: arrays of a batch of `GEOMETRY.batch`; batch_axes: where their batch lies; out_axis: the result's.
      into_poison: like function(GEOMETRY.batch), but takes the donated buffer first.
      definition: computes what "portable" promises.
    """

    op: str
    engine: str
    dtype: str
    declared: str
    function: Callable[[int], Callable[..., jax.Array]]
    operands: tuple[np.ndarray, ...]
    batch_axes: tuple[int | None, ...]
    out_axis: int | None
    into_poison: Callable[..., jax.Array] | None = None
    definition: Callable[[], np.ndarray] | None = None

    @property
    def id(self) -> str:
        return f"determinism/{self.op}/{self.engine}/{self.dtype}"

    def whole(self) -> Callable[..., jax.Array]:
        """The function of all samples, made anew: compiling it is a recompilation."""
        return self.function(GEOMETRY.batch)

    @ft.cached_property
    def compiled(self) -> Callable[..., jax.Array]:
        return jax.jit(self.whole())

    @ft.cached_property
    def result(self) -> np.ndarray:
        """What every other run has to equal."""
        return np.asarray(self.compiled(*self.operands))

    @ft.cached_property
    def first_sample(self) -> np.ndarray:
        """The result of the first sample in a batch of its own."""
        return np.take(np.asarray(jax.jit(self.function(1))(*_batch_of(self, 1, 0))), 0, self.out_axis)


class Different(Exception):
    """Raised by a procedure that found a difference."""


def subjects(ops: Any, engine_names: Any, dtypes: Any, extent: str, seed: int) -> Iterator[Subject]:
    """One for every op, engine and dtype that the engine serves."""
    for op in (op for op in OPS if op in ops):
        for engine in (e for e in cases.engines_of(op) if e in engine_names):
            for dtype in (d for d in DTYPES[extent == "quick" :] if d in dtypes):
                case = Case(op, engine, dtype, "NHWC", None, GEOMETRY, out="int32" if dtype == "int8" else None)
                told = checks.facts(case)
                if told.refusal is None:
                    yield _subject(case, told.level, seed)


def _subject(case: Case, level: str, seed: int) -> Subject:
    operands, _ = data.arrays(case, "normal", seed, checks.EXACT)
    if case.dtype != "int8":
        # float32's 24 bits and a spread of magnitudes, so that a change of order changes bits.
        operands = tuple((v.astype(np.float32) * np.exp2(np.sin(np.arange(v.size)).reshape(v.shape))) for v in operands)
        operands = tuple(v.astype(case.in_dtype) for v in operands)
    axis = _window.layout(case.layout).batch
    return Subject(
        case.op,
        case.engine,
        case.dtype,
        level,
        lambda batch: dataclasses.replace(case, geometry=dataclasses.replace(GEOMETRY, batch=batch)).function(),
        operands,
        tuple(axis if role in "xy" else None for role in case.roles),
        axis if case.result_role in "xy" else None,
        definition=ft.partial(_definition, case, operands),
    )


def _definition(case: Case, operands: tuple[np.ndarray, ...]) -> np.ndarray:
    op = getattr(reference, case.op)
    arguments = case.arguments() | {"out_dtype": case.out_dtype}
    return op(*operands, *case.sizes_argument(), **arguments, arithmetic="ordered")


def trials(subject: Subject, extent: str, levels: Any, only: Any = ()) -> Iterator[Trial]:
    """Runs the procedures of every level that the subject declares, or of them those of the ids in `only`."""
    for level in LEVELS[1 : LEVELS.index(subject.declared) + 1]:
        for procedure in PROCEDURES[level] if level in levels else ():
            if not only or f"{subject.id}/{procedure.replace(' ', '-')}" in only:
                yield trial(subject, level, procedure, extent)


def trial(subject: Subject, level: str, procedure: str, extent: str, *, control: bool = False) -> Trial:
    """Runs one procedure; a control passes if the procedure finds its fault."""
    made = ft.partial(Trial, subject.op, subject.engine, subject.dtype, subject.declared, level, procedure)
    try:
        runs, why_not = _RUN[procedure](subject, extent)
    except Different as found:
        message = f"found: {found}" if control else str(found)
        return made("passed" if control else "failed", 0, message, control)
    except Exception as error:  # whatever an op raises is a finding about it
        return made("failed", 0, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", control)
    if why_not:
        return made("not run", 0, why_not, control)
    if control:
        return made("failed", runs, "the planted fault was not found: this procedure proves nothing", control)
    return made("passed", runs, "", control)


def _expect(got: Any, wanted: np.ndarray, what: str) -> None:
    different = ~same_bits(np.asarray(got), wanted)
    if different.any():
        raise Different(f"{int(different.sum())} of {different.size} elements have other bits {what}")


def _repeats(extent: str) -> int:
    on_cpu = checks.platform() == "cpu"
    return {"quick": 10, "standard": 20 if on_cpu else 100, "full": 100 if on_cpu else 1000}[extent]


# ---- run_to_run ------------------------------------------------------------------------------------------------------


def _repeat(subject: Subject, extent: str) -> tuple[int, str]:
    count = _repeats(extent)
    there = [jnp.asarray(v) for v in subject.operands]
    for i in range(count):
        if i >= count // 2:
            there = _elsewhere(subject.operands, i)
        _expect(subject.compiled(*there), subject.result, f"at repeat {i + 1}")
    return count, ""


def _elsewhere(operands: tuple[np.ndarray, ...], i: int) -> list[jax.Array]:
    """Copies at other addresses, among memory that was full of NaN before it was freed."""
    spacers = [jnp.full(1000 * (i + j) + 1, jnp.nan) for j in range(3)]
    copies = [jnp.array(v, copy=True) for v in operands]
    jax.block_until_ready(spacers)
    return copies


def _under_load(subject: Subject, extent: str) -> tuple[int, str]:
    wanted, done, count = subject.result, threading.Event(), _repeats(extent) // 2
    busy, work = jnp.ones((384, 384)), jax.jit(lambda m: (m @ m) * 1e-3)

    def load() -> None:
        m = busy
        while not done.is_set():
            m = jax.block_until_ready(work(m))

    worker = threading.Thread(target=load, daemon=True)
    worker.start()
    try:
        for i in range(count):
            _expect(subject.compiled(*subject.operands), wanted, f"at repeat {i + 1} under load")
    finally:
        done.set()
        worker.join()
    return count, ""


def _recompiled(subject: Subject, extent: str) -> tuple[int, str]:
    wanted, count = subject.result, 3 if extent == "full" else 1
    for i in range(count):
        anew = jax.jit(subject.whole()).lower(*subject.operands).compile()
        _expect(anew(*subject.operands), wanted, f"after recompilation {i + 1}")
    return count, ""


def _poisoned(subject: Subject, extent: str) -> tuple[int, str]:
    wanted, count = subject.result, max(2, _repeats(extent) // 10)
    whole = subject.whole()
    into = subject.into_poison or (lambda poison, *operands: whole(*operands))
    function = jax.jit(into, donate_argnums=0, keep_unused=True)
    reused = 0
    for _ in range(count):
        poison = jnp.asarray(np.full(wanted.shape, 0x7F if subject.dtype == "int8" else np.nan, wanted.dtype))
        address = poison.unsafe_buffer_pointer()
        out = function(poison, *subject.operands)
        _expect(out, wanted, "in a poisoned buffer")
        reused += out.unsafe_buffer_pointer() == address
    return reused, "" if reused else "XLA did not write into the donated buffer"


# ---- batch_invariant -------------------------------------------------------------------------------------------------


def _batch_of(subject: Subject, size: int, place: int, neighbour: float | None = None) -> list[np.ndarray]:
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


def _batch_sizes(subject: Subject, extent: str) -> tuple[int, str]:
    if subject.out_axis is None:
        return 0, "the result is a sum over the batch"
    runs = 0
    for size in SIZES[extent]:
        function = jax.jit(subject.function(size))
        for place in sorted({0, size // 2, size - 1}):
            got = np.take(np.asarray(function(*_batch_of(subject, size, place))), place, subject.out_axis)
            _expect(got, subject.first_sample, f"at place {place} of a batch of {size}")
            runs += 1
    return runs, ""


def _neighbours(subject: Subject, extent: str) -> tuple[int, str]:
    if subject.out_axis is None:
        return 0, "the result is a sum over the batch"
    size = 5
    function = jax.jit(subject.function(size))
    values = (127.0, -128.0) if subject.dtype == "int8" else (np.nan, np.inf, 1e30)
    for value in values:
        got = np.take(np.asarray(function(*_batch_of(subject, size, 2, value))), 2, subject.out_axis)
        _expect(got, subject.first_sample, f"beside samples of {value}")
    return len(values), ""


def _vmap(subject: Subject, extent: str) -> tuple[int, str]:
    """Over samples of a batch of one each: all arrays mapped, and only the first."""
    function, runs = subject.function(1), 0
    samples = [_batch_of(subject, 1, 0)]
    for shift in (1, 2):
        samples.append([np.roll(v, shift, -1) for v in samples[0]])
    one = jax.jit(function)
    first_only = (0, *(None for _ in samples[0][1:]))
    for mapped in dict.fromkeys([(0,) * len(samples[0]), first_only]):
        loops = [
            np.asarray(one(*(s if m == 0 else first for s, first, m in zip(sample, samples[0], mapped, strict=True))))
            for sample in samples
        ]
        stacked = [
            np.stack(column) if m == 0 else column[0]
            for column, m in zip(zip(*samples, strict=True), mapped, strict=True)
        ]
        _expect(jax.jit(jax.vmap(function, mapped))(*stacked), np.stack(loops), f"under vmap over {mapped}")
        runs += 1
    return runs, ""


# ---- mesh_invariant and portable -------------------------------------------------------------------------------------


def _mesh(subject: Subject, extent: str) -> tuple[int, str]:
    devices, runs = jax.local_devices(), 0
    if len(devices) < 2:
        return 0, "needs more than one device"
    for size in (2, 4, 8):
        if size > len(devices):
            break
        mesh = Mesh(np.array(devices[:size]), ("batch",))
        placed = []
        for operand, axis in zip(subject.operands, subject.batch_axes, strict=True):
            spec = PartitionSpec(*("batch" if i == axis else None for i in range(operand.ndim)))
            placed.append(jax.device_put(operand, NamedSharding(mesh, spec)))
        _expect(subject.compiled(*placed), subject.result, f"with the batch over {size} devices")
        runs += 1
    return runs, ""


def _portable(subject: Subject, extent: str) -> tuple[int, str]:
    if subject.definition is None:
        return 0, "it has no definition"
    _expect(subject.result, subject.definition(), "than the definition")
    return 1, ""


_RUN: dict[str, Callable[[Subject, str], tuple[int, str]]] = {
    "repeats": _repeat,
    "under load": _under_load,
    "recompilation": _recompiled,
    "poisoned output": _poisoned,
    "batch sizes": _batch_sizes,
    "neighbours": _neighbours,
    "vmap": _vmap,
    "mesh": _mesh,
    "definition": _portable,
}
