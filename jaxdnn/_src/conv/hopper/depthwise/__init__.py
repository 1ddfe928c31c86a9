"""Depthwise and narrow-group convolution on Hopper: forward, backward data, backward filter.

Pallas (Mosaic GPU) moves the tiles; the arithmetic on a tile in shared memory is PTX text, because Pallas has no
`mma.sync` (`ptx`). Forward in plain Pallas, the best of several tiles, had 0.68 of the speed on 64x28x28x384 7x7, 0.54
on 64x56x56x128 7x7 and 0.73 on 128x14x14x384 3x3, on an H200 in one process: it multiplies in float32, one by one,
which for the first takes 50 us at least where the tensor core takes 27 (benchmarks/notes-hopper-depthwise.md).

Schedule. A block of threads computes one tile: up to 14 x 28 outputs of 32 channels (or 64). TMA loads the input tile
with its halo (and zeros outside of the image, so that padding costs nothing) and the filter for the tile's channels.
Four warps, eight channels each, compute the outputs (`walk` on the tensor core for bfloat16 and float16, `fma` in
float32), add the bias in float32, if there is one, and store them into shared memory; one TMA copy stores the tile,
clipped to the image. Several blocks share a multiprocessor: while one waits for its tile, another computes. A block
that computes several tiles, one after another, loads the next one meanwhile. Backward data is the same kernel on dy
with the taps reversed; a stride makes one phase for each residue of the output position, and all phases read the same
input tile. Backward filter accumulates in registers over the tiles of a split (`filter`) and stores one partial sum for
each split; a second launch adds these in order. There are no atomics.

Limits. As many output channels as input channels; 1, 2, 4 or 8 channels per group (float32: 1); one or two spatial
axes; rows of 16 bytes (channels divisible by 8, in float32 by 4); tiles that fit into shared memory, as those of
forward and backward data with 31x31 taps do in 16 bits with one or two channels per group. `unsupported` returns the
reason if a call is outside of these limits.

Bits. `schedule` returns the order of additions. For forward and backward data it depends on the filter, the stride
and, on the tensor core with two spatial axes, whether the output's row is even or odd; not on the batch size, the
position in the batch, the number of channels or the tile. An infinity or NaN reaches only outputs that depend on it.
For the filter gradient, tiles and splits depend on the shape. An infinity or NaN may make NaN of filter gradients in
its channel group that are finite by the formula, because it is multiplied by the zeros that pad a tile.
"""

import math
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper.depthwise.filter_launch import filter_partials
from jaxdnn._src.conv.hopper.depthwise.filter_plan import plan_filter
from jaxdnn._src.conv.hopper.depthwise.order import orders
from jaxdnn._src.conv.hopper.depthwise.partials import add_partials
from jaxdnn._src.conv.hopper.depthwise.plan import plan_walk
from jaxdnn._src.conv.hopper.depthwise.plan import unsupported as unsupported
from jaxdnn._src.conv.hopper.depthwise.planar import Config, planar
from jaxdnn._src.conv.hopper.depthwise.walk_launch import run_walk
from jaxdnn._src.core import engines


def schedule(
    op: str, geo: Geometry, images: int, channels: int, dtype: Any, config: Config | None = None
) -> engines.Schedule:
    """The order of additions of every output; of a flipped convolution the filter is reversed before the call."""
    call = planar(geo, images, channels, dtype)
    arithmetic, found, classes = orders(op, call, config)
    if geo.flip and op != "wgrad":  # tap t of the reversed filter is tap T - 1 - t of the filter
        tap, channel = np.divmod(np.arange(math.prod(call.taps) * call.group), call.group)
        stored = np.append((math.prod(call.taps) - 1 - tap) * call.group + channel, -1)
        found = tuple(stored[order] for order in found)
    if classes.size == 1:
        return engines.Schedule(arithmetic, found[0])
    return engines.Schedule(arithmetic, found, classes=classes if geo.rank == 2 else classes[0])


def workspace(op: str, geo: Geometry, images: int, channels: int, dtype: Any, config: Config | None = None) -> int:
    """Bytes of device memory beside operands and result: the filter gradient's partial sums."""
    if op != "wgrad":
        return 0
    call = planar(geo, images, channels, dtype)
    return 4 * math.prod(plan_filter(call, config).partial_shape(call))


def depthwise_data(
    op: str,
    a: Array,
    w: Array,
    bias: Array | None = None,
    /,
    *,
    geo: Geometry,
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """y of x, or with op "dgrad" dx of dy, all (n, [h,] w, c), by w ([r,] s, c/groups, c) and a bias (c,).

    It runs on at most `sms` multiprocessors.
    """
    call = planar(geo, a.shape[0], a.shape[-1], a.dtype)
    plan = plan_walk(op, call, config, bias=bias is not None)
    found = run_walk(a, w, bias, call, plan, f"depthwise_{op}", sms)
    return found.reshape(a.shape[0], *(geo.out if op == "fprop" else geo.sizes), a.shape[-1])


def depthwise_wgrad(
    x: Array, dy: Array, /, *, geo: Geometry, config: Config | None = None, sms: int | None = None
) -> Array:
    """dw ([r,] s, c/groups, c) of x (n, [h,] w, c) and dy (n, [p,] q, c), in x's dtype.

    It runs on at most `sms` multiprocessors. Tiles and splits, and so the bits, do not depend on this number.
    """
    call = planar(geo, x.shape[0], x.shape[-1], x.dtype)
    plan = plan_filter(call, config)
    partial = filter_partials(x, dy, call, plan, sms)
    width = call.taps[1] * call.group * call.channels
    return add_partials(partial, call.taps[0], width, x.dtype, sms).reshape(*geo.taps, call.group, call.channels)
