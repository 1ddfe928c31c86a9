"""PyTorch as a peer on a GPU, where it is installed: cuDNN with its own autotuning, on the operands that JAX made."""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jaxdnn._src.core import timing

CALLS = 10  # of one function in a graph, at least


def torch_is_here() -> bool:
    """Whether PyTorch is installed and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

    return torch.cuda.is_available()


def torch_time(make: Callable[..., Callable[[], Any] | None], sets: Sequence[Sequence[Array]], repeats: int) -> Any:
    """Milliseconds of a call, by CUDA events around a replayed CUDA graph; None if `make` has no such op.

    Where a call cannot be captured, as PyTorch's CTC loss, which reads lengths on the host, its kernels' summed time.
    `make` turns the module and tensors into the function that is timed; the tensors are the arrays' own memory.
    """
    import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    functions = [make(torch, *map(torch.from_dlpack, arrays)) for arrays in sets]
    known = [f for f in functions if f is not None]
    if not known:
        return None
    for _ in range(3):  # cuDNN chooses its algorithm here, outside of a capture
        known[0]()
    torch.cuda.synchronize()
    try:
        return _graph_time(torch, known, repeats)
    except RuntimeError:
        torch.cuda.synchronize()
        return timing.device_time(
            lambda i: known[i % len(known)](), lambda _: torch.cuda.synchronize(), max(repeats, len(known))
        )


def _graph_time(torch: Any, functions: Sequence[Callable[[], Any]], repeats: int) -> float:
    """The median time of a call among several that a CUDA graph replays back to back, so that no launch gap counts."""
    calls = max(1, -(-CALLS // len(functions))) * len(functions)
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(calls):
            # With rotating operands every call writes its own memory too.
            kept = [*kept, functions[i % len(functions)]()] if len(functions) > 1 else [functions[0]()]
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    del kept, graph
    torch.cuda.empty_cache()
    return statistics.median(times)
