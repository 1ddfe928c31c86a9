"""Runs kernels of `hopper.lanes` on the CPU: each thread's numbers and vectors by JAX, memory as NumPy arrays.

Blocks run one after another, the warpgroups of a block in threads of Python. What is Mosaic's own code in `lanes` is
done by JAX here, and an access outside of an array is an error. Pallas' own interpreter would compile each kernel anew,
which takes seconds; here all operations have the shape of a warpgroup, and are compiled once.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.hopper import lanes

_here = threading.local()  # the numbers of the block and of the warpgroup
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
    def at(self) -> "Ref":
        return _At(self.memory)

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(self.memory[_plain(index)])


class _At(Ref):
    def __getitem__(self, index: Any) -> Any:
        return Ref(self.memory[_plain(index)])


def _plain(index: Any) -> Any:
    return tuple(int(i) for i in index) if isinstance(index, tuple) else int(index)


def _asked(ref: Ref, number: Any, when: Any) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, and which of them are asked for; those are in the array."""
    number, holds = np.asarray(number), np.broadcast_to(True if when is None else np.asarray(when), SHAPE)
    assert ((number[holds] >= 0) & (number[holds] < ref.shape[0])).all(), "outside of the array"
    return number, holds


def _load(ref: Ref, number: Any, when: Any = None) -> Any:
    number, holds = _asked(ref, number, when)
    found = np.zeros((*SHAPE, ref.shape[-1]), ref.dtype)
    found[holds] = ref.memory[number[holds]]
    return jnp.asarray(found)


def _store(ref: Ref, number: Any, value: Any, when: Any = None) -> None:
    number, holds = _asked(ref, number, when)
    assert (value.dtype, value.shape) == (ref.dtype, (*SHAPE, ref.shape[-1]))
    ref.memory[number[holds]] = np.asarray(value)[holds]


def _copy(to: Ref, place: Any, ref: Ref, number: Any, when: Any = None) -> None:
    """At once; what is not asked for leaves what was there."""
    _, holds = _asked(ref, number, when)
    _store(to, place, _load(ref, number, when), holds)


def _entries(ref: Ref, index: Any) -> Any:
    return jnp.asarray(ref.memory[np.asarray(index)])


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
    "float32": lambda v: v.astype(jnp.float32),
    "exp2": jnp.exp2,
    "log2": jnp.log2,
    "product": lambda a, b: a * b,
    "words": _words,
    "of_words": _of_words,
    "larger": _larger,
    "to_bytes": lambda v, bits: _of_words(v, jnp.dtype(f"u{bits // 8}")).astype(jnp.uint8),
    "equal": _equal,
    "any_nan": lambda v, flag: jnp.any(v != v),
}


def _kernel(body: Any, *, out_type: Any, grid: Any, scratch_types: Any = None, num_threads: int = 1, **_: Any) -> Any:
    def run(*arrays: Any) -> list[Any]:
        given = [Ref(np.asarray(v)) for v in arrays]
        outs = [Ref(np.full(v.shape, 0x5A, np.uint8).repeat(v.dtype.itemsize, -1).view(v.dtype)) for v in out_type]
        for block in range(*grid):
            scratch = {name: _scratch(of, num_threads) for name, of in (scratch_types or {}).items()}

            def warpgroup(number: int, block: int = block, scratch: Any = scratch) -> None:
                _here.index = {"block": block, "warpgroup": number}
                with jax.numpy_dtype_promotion("strict"):
                    body(*given, *outs, **scratch)

            with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(warpgroup, range(num_threads)))
        return [jnp.asarray(v.memory) for v in outs]

    return run


def _scratch(of: Any, warpgroups: int) -> Any:
    if isinstance(of, plgpu.Barrier):
        return threading.Barrier(warpgroups)
    return Ref(np.full(of.shape, 0x5A, np.uint8).repeat(np.dtype(of.dtype).itemsize, -1).view(of.dtype))


def _when(condition: Any) -> Callable[[Callable[[], None]], None]:
    return lambda body: body() if bool(condition) else None


def _loop(start: Any, stop: Any, body: Any, carry: Any) -> Any:
    for i in range(int(start), int(stop)):
        carry = body(jnp.int32(i), carry)
    return carry


@contextlib.contextmanager
def on_cpu(*modules: ModuleType) -> Iterator[None]:
    """Within it the kernels of these modules run here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in IN_JAX.items():
            patch.setattr(lanes, name, function)
        for module in modules:
            patch.setattr(module, "kernel", _kernel)
            patch.setattr(module, "when", _when, raising=False)  # which not all have
        patch.setattr(jax.lax, "axis_index", lambda name: jnp.int32(_here.index[name]))
        patch.setattr(jax.lax, "fori_loop", _loop)
        patch.setattr(plgpu, "barrier_arrive", lambda barrier: None)
        patch.setattr(plgpu, "barrier_wait", lambda barrier: barrier.wait(60))
        yield
