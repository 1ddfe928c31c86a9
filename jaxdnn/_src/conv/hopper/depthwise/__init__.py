"""Depthwise and narrow-group convolution on Hopper: forward, backward data, backward filter (Pallas, Mosaic GPU).

Schedule. A block of threads takes one tile: up to 14 x 28 outputs of 32 channels (or 64). The tensor memory accelerator
fetches the input tile with its halo (outside the image it writes zeros, so padding costs nothing) and the tile's
filter slab; four warps, eight channels each, walk the tile in shared memory (`walk` on the tensor core
for bfloat16 and float16, `fma` in float32) and leave the outputs in shared memory, from where one copy
stores them, clipped to the image. Several blocks share a multiprocessor: while one waits for its tile, another
computes; and a block that takes several tiles in turn fetches the next one while it computes. Backward data is the
same walk over dy with the taps turned round; a stride makes one phase per residue of the output position, all from one
input tile. Backward filter keeps its sums in registers over the tiles of a split (`filter`) and leaves
each split's partial sum in memory; a launch of its own adds the partial sums in order (`add`); no
atomics.

Limits. As many output channels as input channels; 1, 2, 4 or 8 channels per group (float32: 1); one or two spatial
axes; rows of 16 bytes (channels divisible by 8, in float32 by 4); tiles that fit shared memory, which forward and
backward data of 31x31 taps do in 16 bits with one or two channels per group. `supports` says so, or returns None.

Bits. `schedule` gives the order of additions. An output depends on its own inputs, and its order of additions on
nothing but the filter, the stride and (on the tensor core, two spatial axes) whether its row is even or odd: forward
and backward data are the same for every batch size, position in the batch, channel count and tile. The filter
gradient's tiles and splits follow the shape. An input that is not finite may turn sums of the filter gradient of its
own channel group into NaN that are finite by the formula (a zero that pads a tile is multiplied with it); forward and
backward data keep what is not finite to the outputs that own it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.conv.hopper.depthwise.filter_launch import add_partials, filter_partials
from jaxdnn._src.conv.hopper.depthwise.filter_plan import plan_filter
from jaxdnn._src.conv.hopper.depthwise.order import orders
from jaxdnn._src.conv.hopper.depthwise.plan import plan_walk, unsupported
from jaxdnn._src.conv.hopper.depthwise.walk_launch import run_walk
from jaxdnn._src.conv.hopper.depthwise.window import Config, spatial, window
from jaxdnn._src.core import engines


def supports(
    op: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
) -> str | None:
    """None where the kernels serve the call, else the reason; `op` is "fprop", "dgrad" or "wgrad"."""
    return hopper.unavailable() or unsupported(
        op, x_shape, w_shape, dtype, stride=stride, padding=padding, dilation=dilation, config=config
    )


def schedule(
    op: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    flip: bool = False,
) -> engines.Schedule:
    """The order of additions of every output; with `flip` of a convolution whose filter is turned round beforehand."""
    call = window(x_shape, w_shape, dtype, stride=stride, padding=padding, dilation=dilation)
    arithmetic, found, classes = orders(op, call, config)
    if flip and op != "wgrad":  # tap t of the turned filter is tap T - 1 - t of the filter
        tap, channel = np.divmod(np.arange(math.prod(call.taps) * call.group), call.group)
        stored = np.append((math.prod(call.taps) - 1 - tap) * call.group + channel, -1)
        found = tuple(stored[order] for order in found)
    if classes.size == 1:
        return engines.Schedule(arithmetic, found[0])
    return engines.Schedule(arithmetic, found, classes=classes if len(x_shape) == 4 else classes[0])


def workspace(
    op: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
) -> int:
    """Bytes of device memory beside operands and result: the filter gradient's partial sums."""
    if op != "wgrad":
        return 0
    call = window(x_shape, w_shape, dtype, stride=stride, padding=padding, dilation=dilation)
    return 4 * math.prod(plan_filter(call, config).partial_shape(call))


def depthwise_fprop(
    x: Array,
    w: Array,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """y of x (n, [h,] w, c) and w ([r,] s, c/groups, c), on at most `sms` multiprocessors."""
    call = window(x.shape, w.shape, x.dtype, stride=stride, padding=padding, dilation=dilation)
    y = run_walk(x, w, call, plan_walk("fprop", call, config), "depthwise_fprop", sms)
    return y.reshape(x.shape[0], *spatial(call.out, x.ndim), x.shape[-1])


def depthwise_dgrad(
    dy: Array,
    w: Array,
    x_shape: Sequence[int],
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """dx of dy (n, [p,] q, c) and w ([r,] s, c/groups, c), on at most `sms` multiprocessors."""
    call = window(x_shape, w.shape, dy.dtype, stride=stride, padding=padding, dilation=dilation)
    dx = run_walk(dy, w, call, plan_walk("dgrad", call, config), "depthwise_dgrad", sms)
    return dx.reshape(tuple(x_shape))


def depthwise_wgrad(
    x: Array,
    dy: Array,
    w_shape: Sequence[int],
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """dw ([r,] s, c/groups, c) of x (n, [h,] w, c) and dy (n, [p,] q, c), in x's dtype.

    It takes at most `sms` multiprocessors. How many these are decides neither splits nor tiles, hence no bit.
    """
    call = window(x.shape, w_shape, x.dtype, stride=stride, padding=padding, dilation=dilation)
    plan = plan_filter(call, config)
    partial = filter_partials(x, dy, call, plan, sms)
    width = call.taps[1] * call.group * call.channels
    return add_partials(partial, call.taps[0], width, x.dtype, sms).reshape(tuple(w_shape))
