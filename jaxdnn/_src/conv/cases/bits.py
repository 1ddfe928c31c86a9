"""The cases that compare a million outputs of an engine with the bits that its schedule predicts.

Per op and dtype there are more than 10^6 outputs over all kinds of data, and every bit of each is compared with what
the reference makes of the stated schedule. Sizes are such that NumPy does that in seconds: the model takes some 10 ns
a product, in processes of its own. Depthwise and narrow groups have kernels of their own, so a million of their own;
epilogues come on top, those whose arithmetic leaves no choice.
"""

import concurrent.futures
import functools as ft
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

from jaxdnn._src.conv.cases.geometries import BEFORE_RELU, Blend, Geometry

PREFIX = "bits"
DENSE = (
    Geometry("bits-3x3", 3, (18, 22), 40, 56, (3, 3), padding=1),
    Geometry("bits-wide", 2, (9, 11), 136, 120, (3, 3), padding=1),
    Geometry("bits-stride", 2, (30, 26), 64, 80, (3, 3), stride=2, padding=1),
    Geometry("bits-pointwise", 4, (20, 18), 72, 88, (1, 1)),
    Geometry("bits-groups", 2, (14, 12), 128, 256, (3, 3), padding=1, groups=2),
    Geometry("bits-stem", 2, (34, 38), 3, 64, (7, 7), stride=2, padding=3),
    Geometry("bits-dilated", 2, (17, 21), 24, 32, (3, 2), padding=((4, 3), (1, 0)), dilation=(3, 2)),
    Geometry("bits-thin", 6, (16, 24), 88, 24, (2, 3)),
    Geometry("bits-1d", 5, (64,), 48, 72, (5,), padding=4, dilation=2),
    Geometry("bits-3d", 2, (6, 8, 10), 32, 48, (3, 3, 3), padding=1),
    Geometry("bits-3d-stride", 2, (7, 8, 11), 24, 40, (2, 3, 3), stride=(2, 1, 2), padding=1),
    Geometry("bits-flipped", 2, (15, 19), 72, 56, (2, 3), padding=1, mode="convolution"),
    Geometry("bits-flipped-stem", 2, (34, 38), 3, 64, (7, 7), stride=2, padding=3, mode="convolution"),
)
NARROW = (
    Geometry("bits-depthwise", 3, (30, 22), 64, 64, (7, 7), padding=3, groups=64),
    Geometry("bits-depthwise-stride", 3, (33, 27), 96, 96, (3, 3), stride=2, padding=1, groups=96),
    Geometry("bits-depthwise-wide", 2, (8, 10), 2048, 2048, (7, 7), padding=3, groups=2048),
    Geometry("bits-depthwise-long", 2, (9, 5), 2048, 2048, (13, 5), padding=(6, 2), groups=2048, mode="convolution"),
    Geometry("bits-pairs", 2, (20, 24), 64, 64, (5, 4), padding=((2, 2), (1, 2)), groups=32),
    Geometry("bits-eights", 2, (9, 13), 2048, 2048, (3, 3), padding=1, groups=256),
    Geometry("bits-causal", 8, (130,), 64, 64, (4,), padding=((3, 0),), groups=64),
)
POINTWISE = next(g for g in DENSE if g.name == "bits-pointwise")
EPILOGUES = (
    Blend("scaled", alpha=-0.75),
    Blend("accumulating", beta=1.0, prior=True),
    Blend("bias-relu", bias=True, activation="relu"),
    Blend("bias-residual-relu", bias=True, residual=True, activation="relu"),
    Blend("leaky_relu", activation=("leaky_relu", 0.125)),
    Blend("clipped_relu", bias=True, activation=("clipped_relu", 1.5)),
)
# Results in float32 show every bit of the accumulator, narrower ones the rounding: in turn, where there are both.
OUTS = {
    "bf16": ("f32", None),
    "f16": ("f32", None),
    "tf32": (None,),
    "e4m3fn": ("f32", "bf16"),
    "e5m2": ("f16", "f32"),
    "int8": ("int32",),
}
KINDS = ("normal", "integers", "lognormal", "cancelling", "subnormal", "sparse")


def cases(op: str, make: Callable[..., Any]) -> Iterator[Any]:
    """All cases of an op; an engine refuses what it does not serve."""
    if op not in ("conv", "conv_dgrad", "conv_wgrad"):  # a transposed convolution is bound as backward data
        return
    for dtype, outs in OUTS.items():
        yield from (make(dtype, g, out=outs[i % len(outs)]) for i, g in enumerate(DENSE))
    yield from (make(dtype, g) for dtype in ("bf16", "f16", "f32") for g in NARROW)
    blends = {"conv": EPILOGUES, "conv_dgrad": (*EPILOGUES[:2], BEFORE_RELU[0])}.get(op, EPILOGUES[:2])
    for i, blend in enumerate(blends):
        for dtype, outs in list(OUTS.items())[:5]:
            yield make(dtype, POINTWISE, blend=blend, out=outs[i % len(outs)])


@ft.cache
def processes() -> concurrent.futures.ProcessPoolExecutor:
    """The processes that run the model, whose small NumPy calls block threads; not forked, for JAX has threads."""
    return concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
