"""PyTorch as a peer on a GPU, where it is installed: cuDNN with its own autotuning, channels-last."""

import importlib.util
import statistics
from typing import Any

from jaxdnn.bench.cases import Case

CALLS = 10


def torch_is_here() -> bool:
    """Whether PyTorch is installed and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

    return torch.cuda.is_available()


def torch_times(case: Case, batch: int, dtype: str, passes: tuple[str, ...], *, repeats: int) -> dict[str, float]:
    """Milliseconds of each pass through PyTorch's convolution, by CUDA events around a replayed CUDA graph."""
    import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    x_shape, w_shape = case.shapes(batch)
    kind = getattr(torch, dtype)
    formats = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
    memory = {"memory_format": formats[case.rank]}

    def random(shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
        return torch.randn([shape[i] for i in order], device="cuda").to(kind).contiguous(**memory)

    rank = case.rank
    x = random(x_shape, (0, rank + 1, *range(1, rank + 1)))
    w = random(w_shape, (rank + 1, rank, *range(rank)))
    per_axis = ([case.stride] * rank, [case.padding] * rank, [case.dilation] * rank)
    extra = case.stride - 1 - (case.taps - 1) % 2 if case.transposed else 0
    tail = (*per_axis, case.transposed, [extra] * rank, case.groups)
    y = torch.ops.aten.convolution(x, w, None, *tail)
    dy = torch.randn_like(y).contiguous(**memory)

    def backward(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(dy, x, w, None, *tail, mask)

    runs = {
        "forward": lambda: torch.ops.aten.convolution(x, w, None, *tail),
        "dgrad": lambda: backward([True, False, False]),
        "wgrad": lambda: backward([False, True, False]),
    }
    return {name: _event_time(runs[name], repeats) for name in passes}


def _event_time(function: Any, repeats: int) -> float:
    """The median time of a call among CALLS that a CUDA graph replays back to back, so that no launch gap counts."""
    import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

    for _ in range(3):  # cuDNN chooses its algorithm here, outside of the capture
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / CALLS)
    return statistics.median(times)
