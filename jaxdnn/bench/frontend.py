"""cuDNN's frontend as a peer of graphs: its Python package, on the memory of JAX's arrays.

The same builder makes the graph for it and for this library (`jaxdnn.bench.graph`). Its time is that of the kernels of
a call, by CUPTI, as ours is. It is no peer where its package or a GPU is missing, where it does not support the graph,
or where its results are not ours; what it said is printed.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core import timing

# cuDNN's names of dtypes.
TYPES = {
    "float32": "FLOAT",
    "bfloat16": "BFLOAT16",
    "float16": "HALF",
    "float8_e4m3fn": "FP8_E4M3",
    "float8_e5m2": "FP8_E5M2",
    "float8_e8m0fnu": "FP8_E8M0",
    "float4_e2m1fn": "FP4_E2M1",
}
FAR = 0.1  # of the results' root mean square: a graph that is another one is further off


def channels_last(dim: Sequence[int]) -> tuple[int, ...]:
    """Strides under which the second axis is the fastest."""
    found, step = [0] * len(dim), 1
    for axis in reversed((0, *range(2, len(dim)), 1)):
        found[axis], step = step, step * dim[axis]
    return tuple(found)


def by_columns(dim: Sequence[int]) -> tuple[int, ...]:
    """Strides under which the last axis but one is the fastest."""
    *outer, rows, columns = packed((*dim[:-2], dim[-1], dim[-2]))
    return (*outer, columns, rows)


def packed(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(dim[axis + 1 :]) for axis in range(len(dim)))


class Theirs:
    """The builder of cuDNN's graphs; `inputs`, `outputs` and `numbers` are its tensors in the order of their making."""

    def __init__(self, cudnn: Any, dtype: str, handle: Any = None) -> None:
        self.cudnn, self.dtype, self.handle = cudnn, dtype, handle
        types = {"io_data_type": self.type(dtype), "intermediate_data_type": self.type("float32")}
        self.g = cudnn.pygraph(**types, compute_data_type=self.type("float32"), handle=handle)
        self.phase = cudnn.norm_forward_phase.INFERENCE
        self.inputs: list[Any] = []
        self.outputs: list[tuple[Any, str]] = []
        self.numbers: list[tuple[Any, np.ndarray[Any, Any]]] = []

    def type(self, name: str) -> Any:
        return getattr(self.cudnn.data_type, TYPES[name])

    def _tensor(self, name: str, dim: Sequence[int], stride: Sequence[int], dtype: str | None) -> Any:
        made = self.g.tensor(dim=list(dim), stride=list(stride), data_type=self.type(dtype or self.dtype), name=name)
        self.inputs.append(made)
        return made

    def image(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any:
        return self._tensor(name, dim, channels_last(dim), dtype)

    def tensor(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any:
        return self._tensor(name, dim, packed(dim), dtype)

    def columns(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any:
        return self._tensor(name, dim, by_columns(dim), dtype)

    def number(self, value: float) -> Any:
        """A float32 that is passed by value, from the host's memory."""
        one = [1, 1, 1, 1]
        kind = {"data_type": self.type("float32"), "is_pass_by_value": True}
        made = self.g.tensor(dim=one, stride=one, name=f"number_{len(self.numbers)}", **kind)
        self.numbers.append((made, np.full(1, value, np.float32)))
        return made

    def mode(self, name: str) -> Any:
        return getattr(self.cudnn.reduction_mode, name)

    def output(self, tensor: Any, dtype: str | None = None, dim: Sequence[int] | None = None) -> Any:
        dtype = dtype or self.dtype
        if dim is not None:
            tensor.set_dim(list(dim)).set_stride(list(packed(dim)))
        tensor.set_output(True).set_data_type(self.type(dtype))
        self.outputs.append((tensor, dtype))
        return tensor


def time(case: Any, batch: int, dtype: str, sets: Sequence[Sequence[Array]], repeats: int) -> float:
    """Milliseconds of a call of a case's graph: the median of its kernels' summed times.

    Raises:
      RuntimeError: it is no peer here; the message says why.
    """
    if jax.default_backend() != "gpu":
        raise RuntimeError("cuDNN needs a GPU")
    try:
        import cudnn  # pyright: ignore[reportMissingImports]  (a peer where it is installed)
    except ImportError as error:
        raise RuntimeError(f"cuDNN's frontend is not here: {error}") from error
    made = Theirs(cudnn, dtype, cudnn.create_handle())
    case.build(made, batch)
    try:
        made.g.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(f"cuDNN has no engine for the graph: {error}") from error
    size = made.g.get_workspace_size()
    ours = case.ours("forward", None)
    wanted = [np.asarray(v, np.float32) for v in jax.tree.leaves(jax.jit(ours)(*sets[0]))]
    # Every call writes its own memory where operands rotate; it is no constant that XLA could share.
    shapes = jax.tree.leaves(jax.eval_shape(ours, *sets[0]))
    results = [[jnp.zeros(s.shape, s.dtype) + 0 for s in shapes] for _ in sets]
    workspace = jnp.zeros(max(size, 1), jnp.uint8)
    jax.block_until_ready((results, workspace))
    fixed = {tensor: value.ctypes.data for tensor, value in made.numbers}
    packs = [fixed | _addresses(made, given, found) for given, found in zip(sets, results, strict=True)]

    def run(i: int) -> None:
        made.g.execute(packs[i % len(packs)], workspace.unsafe_buffer_pointer(), handle=made.handle)

    for i in range(len(packs)):
        run(i)
    _finished()
    for index, (found, value) in enumerate(zip(results[0], wanted, strict=True)):
        off = np.asarray(found, np.float32) - value
        if not np.sqrt(np.mean(off**2)) <= FAR * np.sqrt(np.mean(value**2)):
            raise RuntimeError(f"result {index} of cuDNN's graph is not ours")
    calls = max(repeats, len(packs) if len(packs) > 1 else 0)
    return timing.device_time(run, lambda _: _finished(), calls)


def _addresses(made: Theirs, given: Sequence[Array], found: Sequence[Array]) -> dict[Any, int]:
    tensors = [*made.inputs, *(tensor for tensor, _ in made.outputs)]
    return {t: a.unsafe_buffer_pointer() for t, a in zip(tensors, (*given, *found), strict=True)}


def _finished() -> None:
    """Waits for the device, which JAX does not do for what others run."""
    status = ctypes.CDLL("libcuda.so.1").cuCtxSynchronize()
    if status:
        raise RuntimeError(f"cuCtxSynchronize returned {status}")
