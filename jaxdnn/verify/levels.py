"""The procedures that test a determinism level, bit for bit.

| level | procedure | what is done |
|---|---|---|
| run_to_run | repeats | the same arrays again and again, then copies of them at other addresses |
| | under load | the same while another thread keeps the device busy |
| | recompilation | traced and compiled anew |
| | poisoned output | a buffer full of NaN of the result's shape is donated, so that XLA writes the result into it |
| batch_invariant | alone | the first sample of the batch in one of its own |
| | batch sizes | one sample within batches of many sizes, at places from the first to the last |
| | neighbours | the other samples of the batch are NaN, infinite or 1e30 |
| | vmap | vmap over samples against a loop |
| | eager | operation by operation against one compiled program |
| | company | the same, with operations before and after it that XLA could fuse |
| mesh_invariant | mesh | the batch sharded over 2, 4, 8 devices, as far as there are, and every other axis |
| portable | definition | equal to the reference's arithmetic "ordered", for integers to the exact sum |

A level includes those above it. N repeats without a difference bound the probability of one by 3 / N (at 95 %). XLA
has no way to poison an op's workspace; instead, buffers full of NaN are freed before a call.

The procedures run on an op within the context that requires the level; on its blend, by static and by traced factors,
with a prior, if it has one; and on the gradients of both in the arrays that have a batch (see `variants`).

Every procedure has a negative control, see `controls`.
"""

import dataclasses
import fnmatch
import functools as ft
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdnn._src.cases.case import same_bits
from jaxdnn._src.cases.subject import Different, Subject, batch_of
from jaxdnn._src.core import engines
from jaxdnn._src.core.determinism import LEVELS

SIZES = {
    "quick": (2, 5),
    "standard": (2, 5, 17),  # besides a batch of one and the whole batch
    "full": (*range(2, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024),
}
PLACES = {"quick": 3, "standard": 3, "full": 8}  # positions of the sample in the batch, from the first to the last


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
    variant: str = ""

    @property
    def id(self) -> str:
        parts = ("determinism", self.op, self.engine, self.dtype, self.variant, self.procedure.replace(" ", "-"))
        return "/".join(filter(None, parts))


def trials(subject: Subject, extent: str, levels: Any, only: Any = ()) -> Iterator[Trial]:
    """Runs the procedures of every level that the subject declares, or those among them that `only` names."""
    for level in LEVELS[1 : LEVELS.index(subject.declared) + 1]:
        for procedure in PROCEDURES[level] if level in levels else ():
            if not only or is_named(subject, procedure, only):
                yield trial(subject, level, procedure, extent)


def is_named(subject: Subject, procedure: str, names: Iterable[str]) -> bool:
    """Whether the id of a procedure on a subject is among these ids, or matches one of them as a shell pattern."""
    return any(fnmatch.fnmatchcase(f"{subject.id}/{procedure.replace(' ', '-')}", name) for name in names)


def trial(subject: Subject, level: str, procedure: str, extent: str, *, control: bool = False) -> Trial:
    """Runs one procedure; a control passes if the procedure finds its fault."""
    who = (subject.op, subject.engine, subject.dtype, subject.declared)
    made = ft.partial(Trial, *who, level, procedure, variant=subject.variant)
    try:
        runs, why_not = PROCEDURES[level][procedure](subject, extent)
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


def _expect(got: Iterable[Any], wanted: Iterable[np.ndarray], what: str) -> None:
    for one, other in zip(map(np.asarray, got), wanted, strict=True):
        different = ~same_bits(one, other)
        if different.any():
            raise Different(f"{int(different.sum())} of {different.size} elements have other bits {what}")


def _repeats(extent: str) -> int:
    on_cpu = engines.platform() == "cpu"
    return {"quick": 10, "standard": 20 if on_cpu else 100, "full": 100 if on_cpu else 1000}[extent]


# ---- run_to_run ------------------------------------------------------------------------------------------------------


def _repeat(subject: Subject, extent: str) -> tuple[int, str]:
    count = _repeats(extent)
    there = list(map(jax.device_put, subject.operands))
    for i in range(count):
        if i >= count // 2:
            there = _elsewhere(subject.operands, i)
        _expect(subject.compiled(*there), subject.result, f"at repeat {i + 1}")
    return count, ""


def _elsewhere(operands: tuple[np.ndarray, ...], i: int) -> list[jax.Array]:
    """Copies at other addresses, next to memory that was full of NaN before it was freed."""
    spacers = [jnp.full(1000 * (i + j) + 1, jnp.nan) for j in range(3)]
    copies = [jnp.array(v, copy=True) for v in operands]
    jax.block_until_ready(spacers)
    return copies


@jax.jit
def _work(m: jax.Array) -> jax.Array:
    return (m @ m) * 1e-3


def _under_load(subject: Subject, extent: str) -> tuple[int, str]:
    wanted, done, count = subject.result, threading.Event(), _repeats(extent) // 2
    busy = jax.device_put(np.ones((384, 384), np.float32))

    def load() -> None:
        m = busy
        while not done.is_set():
            m = jax.block_until_ready(_work(m))

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
    wanted, count = subject.result[0], max(2, _repeats(extent) // 10)
    whole = subject.whole()
    into = subject.into_poison or (lambda poison, *operands: whole(*operands)[0])
    function = jax.jit(into, donate_argnums=0, keep_unused=True)
    reused = 0
    for _ in range(count):
        filling = 0x7F if jnp.issubdtype(wanted.dtype, jnp.integer) else np.nan
        poison = jnp.asarray(np.full(wanted.shape, filling, wanted.dtype))
        address = poison.unsafe_buffer_pointer()
        out = function(poison, *subject.operands)
        _expect([out], [wanted], "in a poisoned buffer")
        reused += out.unsafe_buffer_pointer() == address
    return reused, "" if reused else "XLA did not write into the donated buffer"


# ---- batch_invariant -------------------------------------------------------------------------------------------------


def _alone(subject: Subject, extent: str) -> tuple[int, str]:
    if subject.out_axis is None:
        return 0, "the result is a sum over the batch"
    _expect(subject.first_sample, subject.sample(subject.result, 0), "in a batch of its own")
    return 1, ""


def _batch_sizes(subject: Subject, extent: str) -> tuple[int, str]:
    if subject.out_axis is None:
        return 0, "the result is a sum over the batch"
    runs = 0
    for size in SIZES[extent]:
        function = subject.compiled_for(size)
        for place in sorted({i * (size - 1) // (PLACES[extent] - 1) for i in range(PLACES[extent])}):
            got = subject.sample(function(*batch_of(subject, size, place)), place)
            _expect(got, subject.first_sample, f"at place {place} of a batch of {size}")
            runs += 1
    return runs, ""


def _neighbours(subject: Subject, extent: str) -> tuple[int, str]:
    if subject.out_axis is None:
        return 0, "the result is a sum over the batch"
    size = 5
    function = subject.compiled_for(size)
    values = (127.0, -128.0) if subject.dtype == "int8" else (np.nan, np.inf, 1e30)
    for value in values:
        got = subject.sample(function(*batch_of(subject, size, 2, value)), 2)
        _expect(got, subject.first_sample, f"beside samples of {value}")
    return len(values), ""


def _vmap(subject: Subject, extent: str) -> tuple[int, str]:
    """vmap over samples, each a batch of one: with all arrays mapped, and with only the first."""
    function, runs, why_not = subject.required(1), 0, ""
    samples = [batch_of(subject, 1, 0)]
    for shift in (1, 2):
        samples.append([np.roll(v, shift, -1) if v.ndim else v for v in samples[0]])
    one = subject.compiled_for(1)
    first_only = (0, *(None for _ in samples[0][1:]))
    for mapped in dict.fromkeys([(0,) * len(samples[0]), first_only]):
        loops = [
            one(*(s if m == 0 else first for s, first, m in zip(sample, samples[0], mapped, strict=True)))
            for sample in samples
        ]
        stacked = [
            np.stack(column) if m == 0 else column[0]
            for column, m in zip(zip(*samples, strict=True), mapped, strict=True)
        ]
        try:
            got = jax.jit(jax.vmap(function, mapped))(*stacked)
        except NotImplementedError as refusal:  # the mapped call is another one: more groups, say
            why_not = str(refusal)
            continue
        _expect(got, [np.stack(parts) for parts in zip(*loops, strict=True)], f"under vmap over {mapped}")
        runs += 1
    return runs, "" if runs else why_not


def _eager(subject: Subject, extent: str) -> tuple[int, str]:
    compiled = subject.result
    with jax.disable_jit():  # an op called alone is a program too
        found = subject.whole()(*subject.operands)
    _expect(found, compiled, "operation by operation")
    return 1, ""


def _in_company(subject: Subject, extent: str) -> tuple[int, str]:
    """Operands that are products, results that are widened and added to: what XLA could fuse with the op.

    Each factor is given in its operand's dtype: XLA may omit the rounding of one that the program converts, and then
    the products differ before they reach the op.
    """
    whole = subject.whole()

    def run(factors: list[jax.Array], term: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        made = [v * f if jnp.issubdtype(v.dtype, jnp.floating) else v for v, f in zip(operands, factors, strict=True)]
        found = [v.astype(np.float32) if v.dtype.itemsize < 4 else v for v in whole(*made)]
        return [v + term.astype(v.dtype) for v in found]

    operands = [jnp.asarray(v) for v in subject.operands]
    given = ([jnp.asarray(0.7, v.dtype) for v in operands], jnp.float32(0.1), *operands)
    _expect(jax.jit(run)(*given), list(map(np.asarray, run(*given))), "among other operations")
    return 1, ""


# ---- mesh_invariant and portable -------------------------------------------------------------------------------------


def _mesh(subject: Subject, extent: str) -> tuple[int, str]:
    devices, runs, why_not = jax.local_devices(), 0, "no number of devices here divides its batch"
    if len(devices) < 2:
        return 0, "needs more than one device"
    for what, size, axes in _shardings(subject, len(devices), extent):
        mesh = Mesh(np.array(devices[:size]), ("d",))
        placed = []
        for operand, axis in zip(subject.operands, axes, strict=True):
            spec = PartitionSpec(*("d" if i == axis else None for i in range(operand.ndim)))
            placed.append(jax.device_put(operand, NamedSharding(mesh, spec)))
        try:
            got = subject.compiled(*placed)
        except NotImplementedError as refusal:  # the engine serves programs for one device
            why_not = str(refusal)
            continue
        _expect(got, subject.result, f"with {what} over {size} devices")
        runs += 1
    return runs, "" if runs else why_not


def _shardings(subject: Subject, devices: int, extent: str) -> Iterator[tuple[str, int, list[int | None]]]:
    """What is sharded, over how many devices, and along which axis of each operand.

    The batch is sharded over 2, 4 and 8 devices (in the quick extent over the most of these). Any other axis of the
    largest operand, and of all operands of its shape, is sharded over the most devices that divide it.
    """
    counts = [n for n in (2, 4, 8) if n <= devices]
    fitting = [n for n in counts if subject.batch % n == 0]
    for count in fitting[-1:] if extent == "quick" else fitting:
        yield "the batch", count, list(subject.batch_axes)
    largest = max(subject.operands, key=lambda v: v.size)
    where = next(i for i, v in enumerate(subject.operands) if v is largest)
    for axis, length in enumerate(largest.shape):
        divisors = [n for n in counts if length % n == 0]
        if axis != subject.batch_axes[where] and divisors:
            yield f"axis {axis}", divisors[-1], [axis if v.shape == largest.shape else None for v in subject.operands]


def _portable(subject: Subject, extent: str) -> tuple[int, str]:
    if subject.definition is None:
        return 0, "it has no definition"
    _expect(subject.result, [subject.definition()], "than the definition")
    return 1, ""


# level -> the names of its procedures -> what runs them
PROCEDURES: dict[str, dict[str, Callable[[Subject, str], tuple[int, str]]]] = {
    "run_to_run": {
        "repeats": _repeat, "under load": _under_load, "recompilation": _recompiled, "poisoned output": _poisoned,
    },
    "batch_invariant": {
        "alone": _alone, "batch sizes": _batch_sizes, "neighbours": _neighbours,
        "vmap": _vmap, "eager": _eager, "company": _in_company,
    },
    "mesh_invariant": {"mesh": _mesh},
    "portable": {"definition": _portable},
}  # fmt: skip
EVERY = tuple(procedure for group in PROCEDURES.values() for procedure in group)
