"""Runs kernels of `hopper.lanes` on the CPU: each thread's numbers and vectors by JAX, memory as NumPy arrays.

Blocks run one after another, the warpgroups of a block in threads of Python. What is Mosaic's own code in `lanes` is
done by JAX here, and an access outside of an array is an error, as is one to shared memory that races with another
thread's: between two barriers one of them stores there. Pallas' own interpreter would compile each kernel anew,
which takes seconds; here all operations have the shape of a warpgroup, and are compiled once.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools as ft
import math
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper import lanes

_here = threading.local()  # which block and warpgroup, where the block's threads meet, how often they have
_turn = threading.Lock()
SHAPE = (lanes.WARPS, lanes.LANES)


@dataclasses.dataclass
class Ref:
    """A kernel's reference: memory, of which `at` is a part."""

    memory: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    @property
    def vectors(self) -> np.ndarray:
        """The memory as vectors, one after another."""
        return self.memory.reshape(-1, self.shape[-1])

    @property
    def at(self) -> "Ref":
        return _At(self.memory)

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(self.memory[_plain(index)])


class Shared(Ref):
    """Shared memory, which knows who stored and who loaded each vector of it last, and between which barriers."""

    def __init__(self, memory: np.ndarray) -> None:
        super().__init__(memory)
        count = math.prod(memory.shape[:-1]) if memory.ndim > 1 else len(memory)
        self.stored, self.loaded = ([np.full(count, -1), np.full(count, -1)] for _ in range(2))  # when, and who

    def touch(self, number: np.ndarray, threads: np.ndarray, *, stores: bool) -> None:
        others = (self.stored, self.loaded) if stores else (self.stored,)
        for when, who in others:
            assert not ((when[number] == _here.epoch) & (who[number] != threads)).any(), "a race"
        when, who = self.stored if stores else self.loaded
        # Of several threads that load the same one is remembered, or -2 for "others too".
        several = (when[number] == _here.epoch) & (who[number] != threads)
        same = np.bincount(number, minlength=len(when))[number] > 1
        assert not (stores and same.any()), "two threads store"
        when[number], who[number] = _here.epoch, np.where(several | same, -2, threads)


class _At(Ref):
    def __getitem__(self, index: Any) -> Any:
        index, size = _plain(index), len(self.memory)
        if isinstance(index, slice):
            assert 0 <= index.start <= index.stop <= size, "outside of the array"
        return Ref(self.memory[index])


def _plain(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    if not isinstance(index, pl.Slice):
        return int(index)
    start = int(index.start)
    return slice(start, start + index.size)


def _asked(ref: Ref, number: Any, when: Any) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, and which of them are asked for; those are in the array."""
    count = math.prod(ref.shape[:-1])
    number, holds = np.asarray(number), np.broadcast_to(True if when is None else np.asarray(when), SHAPE)
    assert ((number[holds] >= 0) & (number[holds] < count)).all(), "outside of the array"
    return number, holds


def _thread() -> np.ndarray:
    first = _here.index.get("warpgroup", 0) * lanes.THREADS
    return np.arange(first, first + lanes.THREADS).reshape(SHAPE)


def _touch(ref: Ref, number: np.ndarray, holds: np.ndarray, *, stores: bool) -> None:
    if isinstance(ref, Shared):
        with _turn:
            ref.touch(number[holds], _thread()[holds], stores=stores)


def _load(ref: Ref, number: Any, when: Any = None, plus: int = 0) -> Any:
    number, holds = _asked(ref, number + plus, when)
    _touch(ref, number, holds, stores=False)
    found = np.zeros((*SHAPE, ref.shape[-1]), ref.dtype)
    found[holds] = ref.vectors[number[holds]]
    return jnp.asarray(found)


def _store(ref: Ref, number: Any, value: Any, when: Any = None, plus: int = 0) -> None:
    number, holds = _asked(ref, number + plus, when)
    assert (value.dtype, value.shape) == (ref.dtype, (*SHAPE, ref.shape[-1]))
    _touch(ref, number, holds, stores=True)
    ref.vectors[number[holds]] = np.asarray(value)[holds]


def _copy(to: Ref, place: Any, ref: Ref, number: Any, when: Any = None, plus: tuple[int, int] = (0, 0)) -> None:
    """At once; what is not asked for leaves what was there."""
    _, holds = _asked(ref, number + plus[1], when)
    _store(to, place, _load(ref, number, when, plus[1]), holds, plus[0])


def _entries(ref: Ref, index: Any, plus: int = 0) -> Any:
    index = np.asarray(index + plus)
    if isinstance(ref, Shared):
        assert ((index >= 0) & (index < len(ref.memory))).all(), "outside of the array"
        for i in np.ndindex(index.shape[2:]):
            _touch(ref, index[:, :, *i], np.ones(SHAPE, bool), stores=False)
    return jnp.asarray(ref.memory[index])


def _put(ref: Ref, index: Any, value: Any, plus: int = 0) -> None:
    index = np.asarray(index + plus)
    assert ((index >= 0) & (index < len(ref.memory))).all(), "outside of the array"
    for i in range(index.shape[-1]):
        _touch(ref, index[..., i], np.ones(SHAPE, bool), stores=True)
    ref.memory[index] = np.asarray(value)


def _meet(wait: Callable[[], Any]) -> None:
    _here.met += 1
    if _here.met - 1 != _here.skips:
        wait()
        _here.epoch += 1


def _words(v: Any) -> Any:
    return jax.lax.bitcast_convert_type(v if v.dtype.itemsize == 4 else v.reshape(*SHAPE, -1, 2), jnp.uint32)


def _of_words(v: Any, dtype: Any) -> Any:
    return jax.lax.bitcast_convert_type(v, dtype).reshape(*SHAPE, -1)


def _larger(a: Any, b: Any, dtype: Any, *, nan: bool) -> Any:
    x, y = _of_words(a[0], dtype), _of_words(b[0], dtype)
    keeps, unsigned = (x >= y) | (nan & (x != x)), jnp.dtype(f"u{x.dtype.itemsize}")
    pick = lambda v, w: _words(jnp.where(keeps, _of_words(v, unsigned), _of_words(w, unsigned)))
    return tuple(pick(v, w) for v, w in zip(a, b, strict=True))


def _equal(a: Any, b: Any) -> Any:
    return jnp.where(a == b, jnp.array(jnp.iinfo(a.dtype).max, a.dtype), jnp.zeros((), a.dtype))


def _fma(a: Any, b: Any, c: Any) -> Any:
    """Products of float32 are exact in float64; the sum is rounded there first, which changes few results."""
    with np.errstate(all="ignore"):
        wide = (np.asarray(v, np.float64) for v in (a, b))
        return jnp.asarray((math.prod(wide) + np.asarray(c, np.float64)).astype(np.float32))


def _exp2(v: Any) -> Any:
    """Rounded once: XLA's own on a CPU is off by more the larger the exponent is."""
    with np.errstate(over="ignore", under="ignore"):
        return jnp.asarray(np.exp2(np.asarray(v, np.float64)).astype(np.float32))


IN_JAX: dict[str, Any] = {
    "numbers": lambda first: jnp.arange(lanes.THREADS, dtype=jnp.int32).reshape(SHAPE) + first,
    "positions": lambda elements: jnp.broadcast_to(jnp.arange(elements, dtype=jnp.int32), (*SHAPE, elements)),
    "wide": lambda value, elements: jnp.broadcast_to(value[..., None], (*SHAPE, elements)),
    "full": lambda value, elements, dtype: jnp.full((*SHAPE, elements), value, dtype),
    "one": lambda value, dtype: jnp.full(SHAPE, value, dtype),
    "load": _load,
    "store": _store,
    "copy": _copy,
    "commit": lambda: None,
    "wait": lambda groups: None,
    "entries": _entries,
    "put": _put,
    "float32": lambda v: v.astype(jnp.float32),
    "exp2": _exp2,
    "log2": jnp.log2,
    "product": lambda a, b: a * b,
    "fma": _fma,
    "reciprocal": lambda v, approximate=False: 1 / v,
    "square_root": jnp.sqrt,
    "narrow": lambda value: value[..., 0],
    "where": lambda holds, value, other: jnp.where(
        holds[..., None] if holds.ndim < jnp.ndim(value) else holds, value, other
    ),
    "together": lambda run, references, arrays, returns: run(*references, *arrays),
    "meet": lambda: _meet(lambda: _here.meeting.wait(60)),
    "words": _words,
    "of_words": _of_words,
    "larger": _larger,
    "to_bytes": lambda v, bits: _of_words(v, jnp.dtype(f"u{bits // 8}")).astype(jnp.uint8),
    "equal": _equal,
    "any_nan": lambda v, flag: jnp.any(v != v),
}


def _kernel(
    body: Any,
    *,
    out_type: Any,
    grid: Any,
    scratch_types: Any = None,
    num_threads: int = 1,
    skips: int | None = None,
    **_: Any,
) -> Any:
    def run(*arrays: Any) -> list[Any]:
        given = [Ref(np.asarray(v)) for v in arrays]
        outs = [Ref(np.full(v.shape, 0x5A, np.uint8).repeat(v.dtype.itemsize, -1).view(v.dtype)) for v in out_type]
        for block in range(*grid):
            meeting = threading.Barrier(num_threads)
            scratch = {name: _scratch(of, num_threads) for name, of in (scratch_types or {}).items()}

            def warpgroup(number: int, block: int = block, scratch: Any = scratch, meeting: Any = meeting) -> None:
                _here.index, _here.meeting = {"block": block, "warpgroup": number}, meeting
                _here.met, _here.epoch, _here.skips = 0, 0, skips
                try:
                    with jax.numpy_dtype_promotion("strict"):
                        body(*given, *outs, **scratch)
                except BaseException:
                    for barrier in (meeting, *(v for v in scratch.values() if isinstance(v, threading.Barrier))):
                        barrier.abort()  # lest the others wait
                    raise

            with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
                found = [threads.submit(warpgroup, number) for number in range(num_threads)]
            errors = [error for of in found if (error := of.exception()) is not None]
            for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                raise error
        return [jnp.asarray(v.memory) for v in outs]

    return run


def _scratch(of: Any, warpgroups: int) -> Any:
    if isinstance(of, plgpu.Barrier):
        return threading.Barrier(warpgroups)
    return Shared(np.full(of.shape, 0x5A, np.uint8).repeat(np.dtype(of.dtype).itemsize, -1).view(of.dtype))


def _when(condition: Any) -> Callable[[Callable[[], None]], None]:
    return lambda body: body() if bool(condition) else None


def _loop(start: Any, stop: Any, body: Any, carry: Any) -> Any:
    for i in range(int(start), int(stop)):
        carry = body(jnp.int32(i), carry)
    return carry


@contextlib.contextmanager
def on_cpu(*modules: ModuleType, skips: int | None = None) -> Iterator[None]:
    """Within it the kernels of these modules run here; their threads skip the barrier of this number."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in IN_JAX.items():
            patch.setattr(lanes, name, function)
        for module in modules:
            patch.setattr(module, "kernel", ft.partial(_kernel, skips=skips), raising=False)
            patch.setattr(module, "when", _when, raising=False)  # which not all have
        patch.setattr(jax.lax, "axis_index", lambda name: jnp.int32(_here.index[name]))
        patch.setattr(jax.lax, "fori_loop", _loop)
        patch.setattr(plgpu, "barrier_arrive", lambda barrier: None)
        patch.setattr(plgpu, "barrier_wait", lambda barrier: _meet(lambda: barrier.wait(60)))
        yield
