"""Convolution backward filter on Hopper.

dw[tap, c, k] = sum over pixels (n, p) of x[n, p * s + tap * d - pad, c] dy[n, p, k].

Schedule: the output's pixels are cut into boxes of images x positions, the boxes counted with the last axis fastest,
and the count cut into `splits` runs of one fixed length. Each run is one partial sum: box after box, a box's pixels
in order (last axis fastest), 16 at a time on the tensor core into a float32. The partial sums are then added in
float32, one after the other, and converted once. `schedule` spells it out; there are no atomics: `run_to_run`.

Tiling: a warpgroup holds 64 or 128 filters k against up to 256 columns (tap, c) in its accumulator; two or three
warpgroups share the loaded pixels. Both operands are read with the pixels as the reduction, as they lie in memory,
which wgmma can do in 16-bit types only. With `halo`, the pixels of x that all taps of the last two axes need are
loaded once, each warpgroup takes one row of the filter, and the taps of a row are one operand whose column blocks
overlap in memory, one pixel apart.

Limits: bfloat16 and float16. One group, or groups whose channels fill whole tiles. No stride in three dimensions.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jaxdnn._kernels.hopper import conv_fprop as fprop
from jaxdnn._kernels.hopper import pipeline, tuning, wgmma
from jaxdnn._kernels.hopper.conv_fprop import Geometry, Pads
from jaxdnn._kernels.hopper.conv_plan import ALIGNMENT, SMEM_BYTES, Axis, ceil_div
from jaxdnn._kernels.hopper.wgmma import ACCUMULATOR

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # by consumers: the producer's, a consumer's


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut. The box and the splits decide the order of additions; the rest decides nothing but speed."""

    images: int  # images a box
    block: tuple[int, ...]  # positions a box, by spatial axis
    splits: int
    filters: int = 64  # k a warpgroup
    columns: int = 256  # (tap, c) a warpgroup
    across: int = 2  # warpgroups along k
    along: int = 1  # warpgroups along (tap, c)
    stages: int = 4
    halo: bool = False

    @property
    def pixels(self) -> int:
        return self.images * math.prod(self.block)


@dataclasses.dataclass(frozen=True)
class Problem:
    batch: int
    channels: int
    filters: int
    axes: tuple[Axis, ...]
    dtype: Any

    @property
    def swizzle(self) -> int:
        bytes_ = min(self.channels, self.filters) * 2
        return 128 if bytes_ > 64 else 64  # no less: its 32 columns of float32 are whole cache lines

    @property
    def chunk(self) -> int:
        return self.swizzle // 2

    @property
    def chunks(self) -> int:
        return ceil_div(self.channels, self.chunk)

    @property
    def taps(self) -> int:
        return math.prod(ax.taps for ax in self.axes)

    def counts(self, config: Config) -> list[int]:
        """Boxes by axis, images first."""
        spatial = (ceil_div(ax.out, b) for ax, b in zip(self.axes, config.block, strict=True))
        return [ceil_div(self.batch, config.images), *spatial]


def supports(
    x: Any,
    dy: Any,
    /,
    *,
    w_shape: Sequence[int],
    stride: Sequence[int],
    padding: Pads,
    dilation: Sequence[int],
    groups: int = 1,
    flip: bool = False,
    filter_layout: str = "HWIO",
    out_dtype: Any = None,
) -> str | None:
    """Why `conv_wgrad` cannot serve a call on arrays of these shapes and dtypes, or None."""
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float16") or x.dtype != dy.dtype:
        return "its kernel takes two operands of bfloat16 or of float16, the types whose products read either order"
    if jnp.dtype(out_dtype or x.dtype).name not in ("bfloat16", "float16", "float32"):
        return "its kernel writes bfloat16, float16 and float32"
    if groups > 1:
        return "its kernel takes one group"
    geo = fprop.geometry(x.shape, w_shape, filter_layout, stride, padding, dilation, flip)
    return fprop.shape_reason(geo, x.shape[0], x.shape[-1], dy.shape[-1], 1, 2)


def problem_of(x: Any, dy: Any, geo: Geometry) -> Problem:
    even = lambda n: n + -n % 8
    if geo.pointwise:
        return Problem(math.prod(x.shape[:-1]), even(x.shape[-1]), even(dy.shape[-1]), (), jnp.dtype(x.dtype))
    axes = fprop.axes_of(dataclasses.replace(geo, flip=False))
    return Problem(x.shape[0], even(x.shape[-1]), even(dy.shape[-1]), axes, jnp.dtype(x.dtype))


def check(problem: Problem, config: Config) -> str | None:
    """Why a configuration cannot run, or None."""
    consumers = config.across * config.along
    if consumers not in REGISTERS:
        return "there are one to three consumer warpgroups"
    if max(config.images, *config.block, 1) > 256 or config.pixels % 16:
        return "a box has at most 256 positions along an axis and a multiple of 16 pixels"
    if config.filters * config.columns > 128 * (REGISTERS[consumers][1] - 40) or config.columns > 256:
        return "the accumulator does not fit the registers"
    if config.filters % 64 or config.columns % problem.chunk:
        return "a warpgroup takes blocks of 64 filters and whole chunks of columns"
    if config.halo and (reason := _check_halo(problem, config)):
        return reason
    if shared_bytes(problem, config) > SMEM_BYTES - 2048:
        return "the ring does not fit shared memory"
    return None


def _check_halo(problem: Problem, config: Config) -> str | None:
    axes = problem.axes
    if len(axes) < 2 or any(ax.in_step > 1 for ax in axes):
        return "a halo needs two axes and steps of one"
    if config.along != axes[-2].taps or config.columns != axes[-1].taps * problem.chunk:
        return "with a halo every warpgroup takes one row of the filter"
    if config.block[-1] != 8 or config.block[-2] % 2:
        return "a halo needs boxes of 2k x 8 positions"
    return None


def _x_box(problem: Problem, config: Config) -> tuple[int, ...]:
    """The box of x that a slot holds: the pixels' own, or with all that the last two axes' taps reach."""
    reach = [0] * len(config.block)
    if config.halo:
        reach[-2:] = [(ax.taps - 1) * ax.move for ax in problem.axes[-2:]]
    return (config.images, *(b + r for b, r in zip(config.block, reach, strict=True)))


def _slot(problem: Problem, config: Config) -> tuple[int, int]:
    """Chunk boxes of dy and of x in a slot."""
    x_boxes = 1 if config.halo else config.columns * config.along // problem.chunk
    return config.filters * config.across // problem.chunk, x_boxes


def shared_bytes(problem: Problem, config: Config) -> int:
    up = lambda n: ceil_div(n, ALIGNMENT) * ALIGNMENT
    dy_boxes, x_boxes = _slot(problem, config)
    size = lambda boxes, box: up(config.stages * boxes * math.prod(box) * problem.swizzle)
    return size(dy_boxes, (config.images, *config.block)) + size(x_boxes, _x_box(problem, config))


class _Walk:
    """Which item is what: a tile of the filter times a run of boxes."""

    def __init__(self, problem: Problem, config: Config):
        self.problem, self.config = problem, config
        self.counts = problem.counts(config)
        self.boxes = math.prod(self.counts)
        self.run = ceil_div(self.boxes, config.splits)
        self.rows = ceil_div(problem.filters, config.filters * config.across)
        if config.halo:
            self.lead = math.prod(ax.taps for ax in problem.axes[:-2])
            self.tiles = self.lead * problem.chunks
        else:
            self.tiles = ceil_div(problem.taps * problem.chunks, _slot(problem, config)[1])
        self.items = self.rows * self.tiles * config.splits

    def place(self, item: Any) -> tuple[Any, Any, Any, Any, Any]:
        """(tile of k, tile of columns, split, first box, boxes)."""
        row, rest = lax.rem(item, self.rows), lax.div(item, self.rows)
        tile, split = lax.rem(rest, self.tiles), lax.div(rest, self.tiles)
        first = split * self.run
        return row, tile, split, first, lax.max(0, lax.min(self.run, self.boxes - first))

    def box(self, number: Any) -> list[Any]:
        at: list[Any] = [None] * len(self.counts)
        for d in reversed(range(len(self.counts))):
            at[d] = lax.rem(number, self.counts[d]) if d else number
            number = lax.div(number, self.counts[d])
        return at


def partial_sums(x: Array, dy: Array, problem: Problem, config: Config, sms: int) -> Array:
    """The partial sums: float32 of shape (splits, k, taps, c), k and c in whole tiles."""
    reason = check(problem, config)
    if reason is not None:
        raise ValueError(f"`config` {config} cannot run: {reason}")
    walk = _Walk(problem, config)
    consumers = config.across * config.along
    dy_boxes, x_boxes = _slot(problem, config)
    transforms = (wgmma.swizzle_transform(problem.swizzle),)
    ring = lambda boxes, box: plgpu.SMEM(
        (config.stages, boxes, *box, problem.chunk), problem.dtype, transforms=transforms
    )

    def body(x: Any, dy: Any, out: Any, **scratch: Any) -> None:
        block = _Block(walk, x, dy, out, **scratch)
        pl.when(block.wg == consumers)(block.produce)
        pl.when(block.wg < consumers)(block.consume)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (config.splits, walk.rows * config.filters * config.across, problem.taps, problem.chunks * problem.chunk),
            jnp.float32,
        ),
        grid=(min(sms, walk.items),),
        grid_names=("sm",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=dict(
            dy_ring=ring(dy_boxes, (config.images, *config.block)),
            x_ring=ring(x_boxes, _x_box(problem, config)),
            full=plgpu.Barrier(num_arrivals=dy_boxes + x_boxes, num_barriers=config.stages),
            empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=config.stages),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="jaxdnn_conv_wgrad",
    )
    return kernel(pipeline.split_steps(x, problem.axes), dy)


class _Block:
    """What one block of threads does; a method is a role or a stage of one."""

    def __init__(self, walk: _Walk, x: Any, dy: Any, out: Any, dy_ring: Any, x_ring: Any, full: Any, empty: Any):
        self.walk, self.problem, self.config = walk, walk.problem, walk.config
        self.x, self.dy, self.out, self.full, self.empty = x, dy, out, full, empty
        self.dy_ring, self.x_ring = dy_ring, x_ring
        self.wg, self.sm, self.sms = lax.axis_index("wg"), lax.axis_index("sm"), lax.axis_size("sm")
        self.mine = lax.div(walk.items - self.sm + self.sms - 1, self.sms)
        self.registers = REGISTERS[walk.config.across * walk.config.along]

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(self.registers[0], action="decrease")
        count = lax.fori_loop(0, self.mine, self.load_item, jnp.int32(0))
        pipeline.drain(self.empty, count, self.config.stages)

    def load_item(self, local: Any, count: Any) -> Any:
        row, tile, _, first, boxes = self.walk.place(self.sm + local * self.sms)
        return lax.fori_loop(0, boxes, lambda i, count: self.load_box(row, tile, first + i, count), count)

    def load_box(self, row: Any, tile: Any, number: Any, count: Any) -> Any:
        config, chunk = self.config, self.problem.chunk
        slot = lax.rem(count, config.stages)
        pl.when(count >= config.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
        at = self.walk.box(number)
        images = pl.ds(at[0] * config.images, config.images)
        positions = [pl.ds(i * b, b) for i, b in zip(at[1:], config.block, strict=True)]
        dy_boxes, x_boxes = _slot(self.problem, config)
        for j in range(dy_boxes):
            k = pl.ds((row * dy_boxes + j) * chunk, chunk)
            plgpu.copy_gmem_to_smem(self.dy.at[(images, *positions, k)], self.dy_ring.at[slot, j], self.full.at[slot])
        for j in range(x_boxes):
            tap, c = self.column(tile, j)
            index = (images, *self.x_positions(at[1:], tap), pl.ds(c * chunk, chunk))
            plgpu.copy_gmem_to_smem(self.x.at[index], self.x_ring.at[slot, j], self.full.at[slot])
        return count + 1

    def column(self, tile: Any, j: int) -> tuple[Any, Any]:
        """(tap, chunk of c) of a tile's column block; with a halo the first tap that the box serves."""
        if self.config.halo:
            last = math.prod(ax.taps for ax in self.problem.axes[-2:])
            return lax.div(tile, self.problem.chunks) * last, lax.rem(tile, self.problem.chunks)
        block = tile * _slot(self.problem, self.config)[1] + j
        return lax.div(block, self.problem.chunks), lax.rem(block, self.problem.chunks)

    def x_positions(self, at: Sequence[Any], tap: Any) -> list[Any]:
        taps: list[Any] = []
        for d in reversed(range(len(at))):
            taps.insert(0, lax.rem(tap, self.problem.axes[d].taps) if d else tap)
            tap = lax.div(tap, self.problem.axes[d].taps)
        index: list[Any] = []
        sizes = _x_box(self.problem, self.config)[1:]
        for ax, block, size, i, t in zip(self.problem.axes, self.config.block, sizes, at, taps, strict=True):
            offset = ax.offset[0] + t * ax.move
            if ax.in_step == 1:
                index.append(pl.ds(i * block + offset, size))
            else:
                shift = ax.in_step * ceil_div(max(0, -ax.offset[0]), ax.in_step)  # division of what is not negative
                high = lax.div(offset + shift, ax.in_step) - shift // ax.in_step
                index += [pl.ds(i * block + high, size), lax.rem(offset + shift, ax.in_step)]
        return index

    # ---- the consumers

    def consume(self) -> None:
        plgpu.set_max_registers(self.registers[1], action="increase")
        self.across, self.along = lax.div(self.wg, self.config.along), lax.rem(self.wg, self.config.along)
        lax.fori_loop(0, self.mine, self.compute_item, jnp.int32(0))

    def compute_item(self, local: Any, count: Any) -> Any:
        config = self.config
        row, tile, split, _, boxes = self.walk.place(self.sm + local * self.sms)

        def step(i: Any, acc: Array) -> Array:
            slot = lax.rem(count + i, config.stages)
            plgpu.barrier_wait(self.full.at[slot])
            acc = self.multiply(acc, slot)
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(self.empty.at[lax.rem(count + i - 1, config.stages)]))
            return acc

        acc = wgmma.start_accumulator(config.filters, config.columns, jnp.float32)
        acc = wgmma.finish_accumulator(lax.fori_loop(0, boxes, step, acc))
        pl.when(boxes > 0)(lambda: plgpu.barrier_arrive(self.empty.at[lax.rem(count + boxes - 1, config.stages)]))
        self.store(acc, row, tile, split)
        return count + boxes

    def multiply(self, acc: Array, slot: Any) -> Array:
        config, problem = self.config, self.problem
        k_boxes = config.filters // problem.chunk
        a = self.dy_ring.at[slot, pl.ds(self.across * k_boxes, k_boxes)]
        if not config.halo:
            c_boxes = config.columns // problem.chunk
            b = self.x_ring.at[slot, pl.ds(self.along * c_boxes, c_boxes)]
            return wgmma.multiply(acc, a, b, swizzle=problem.swizzle, a_major="mn", b_major="mn")
        lead = [slice(None)] * (len(config.block) - 1)
        rows = pl.ds(self.along * problem.axes[-2].move, config.block[-2])
        return multiply_halo(acc, a, self.x_ring.at[(slot, 0, *lead, rows)], problem, config)

    def store(self, acc: Array, row: Any, tile: Any, split: Any) -> None:
        config, problem = self.config, self.problem
        chunk = problem.chunk
        rows = pl.ds((row * config.across + self.across) * config.filters, config.filters)
        for j in range(config.columns // chunk):
            value = acc[:, j * chunk : (j + 1) * chunk]
            if config.halo:
                first, c = self.column(tile, 0)
                tap = first + self.along * problem.axes[-1].taps + j
                self.out[split, rows, tap, pl.ds(c * chunk, chunk)] = value
                continue
            block = (tile * config.along + self.along) * (config.columns // chunk) + j
            tap, c = lax.div(block, problem.chunks), lax.rem(block, problem.chunks)

            @pl.when(tap < problem.taps)
            def _(value: Array = value, tap: Any = tap, c: Any = c) -> None:
                self.out[split, rows, tap, pl.ds(c * chunk, chunk)] = value


def multiply_halo(acc: Array, a: Any, b: Any, problem: Problem, config: Config) -> Array:
    """acc += dy^T x for all taps of one filter row: their column blocks lie one (dilated) pixel apart in one box.

    `a` is (chunks of k, box, chunk); `b` a halo box from the row's first pixel on, (images, ..., rows, width, chunk).
    """
    swizzle, chunk = problem.swizzle, problem.chunk
    ref_type = lambda: plgpu.RefType((wgmma.swizzle_transform(swizzle),))
    deep = config.block[-2] * 8  # pixels between two of which the distance is one

    @wgmma.inline_mgpu(
        arg_types=(ACCUMULATOR, ref_type(), ref_type()),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=ACCUMULATOR),
    )
    def product(_: Any, acc: Any, a: Any, b: Any) -> Any:
        state = mgpu.WGMMAAccumulator(_value=acc, _original_layout=fa.WGMMA_LAYOUT, _sync=False)
        strides, _ = ir.MemRefType(b.type).get_strides_and_offset()
        pitch, shift = strides[-3], problem.axes[-1].move * chunk
        lead = ir.MemRefType(b.type).shape[:-3]
        for index in np.ndindex(*lead):
            number = tuple(int(i) for i in index)
            left = mgpu_utils.memref_slice(a, (slice(None), *number))
            right = mgpu_utils.memref_slice(b, number)
            blocks = config.filters // chunk
            left = wgmma.tiled_view(left, (blocks, deep // 8, chunk, 8), (config.pixels * chunk, 8 * chunk, 1, chunk))
            right = wgmma.tiled_view(right, (deep // 8, config.columns // chunk, 8, chunk), (pitch, shift, chunk, 1))
            state = _by_depth(state, left, right, deep, chunk, swizzle)
        wgmma.ptx("wgmma.commit_group.sync.aligned;")
        return state._value

    return product(acc, a, b)


def _by_depth(state: Any, left: Any, right: Any, deep: int, chunk: int, swizzle: int) -> Any:
    """wgmma over `deep` pixels; its wrapper wants whole multiples of the swizzle's elements."""
    if deep % chunk:
        raise ValueError(f"a halo box has {deep} pixels in a row block, no multiple of {chunk}")
    return mgpu.wgmma(state, left, right, swizzle=swizzle)


def conv_wgrad(
    x: Array,
    dy: Array,
    /,
    *,
    w_shape: Sequence[int],
    stride: Sequence[int],
    padding: Pads,
    dilation: Sequence[int],
    groups: int = 1,
    flip: bool = False,
    filter_layout: str = "HWIO",
    out_dtype: Any = None,
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """The gradient in w of shape `w_shape`, from x (N, spatial..., C) and dy (N, spatial..., K)."""
    geo = fprop.geometry(x.shape, w_shape, filter_layout, stride, padding, dilation, flip)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if folded(geo, x.shape[-1]):
        return _folded(x, dy, w_shape, geo, filter_layout, out_dtype, config, sms)
    problem = problem_of(x, dy, geo)
    sms = sms or tuning.multiprocessors()
    config = config or choose(problem, sms)
    if geo.pointwise:
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    c, k = x.shape[-1], dy.shape[-1]
    x = fprop.pad_axes(x, problem.axes, problem.channels - c)
    dy = fprop._pad(dy, ((0, 0),) * (dy.ndim - 1) + ((0, problem.filters - k),))
    parts = partial_sums(x, dy, problem, config, sms)[:, :k, :, :c]
    total = parts[0]
    for i in range(1, config.splits):
        total = total + parts[i]
    total = total.astype(out_dtype).reshape(k, *geo.taps, c)
    if flip:
        total = jnp.flip(total, range(1, 1 + len(geo.taps)))
    return total if filter_layout[0] == "O" else jnp.moveaxis(total, 0, -1)


def folded(geo: Geometry, channels: int) -> bool:
    return channels * 2 < 32 and geo.taps[-1] > 1


def _folded(
    x: Array,
    dy: Array,
    w_shape: Sequence[int],
    geo: Geometry,
    filter_layout: str,
    out_dtype: Any,
    config: Config | None,
    sms: int | None,
) -> Array:
    """Few input channels: the last axis' taps become channels by one copy, as in the forward kernel."""
    x = fprop.fold_taps(x, geo)
    outer = filter_layout[0] == "O"
    taps, c, k = geo.taps, w_shape[-1] if outer else w_shape[-2], dy.shape[-1]
    shape = (k, *taps[:-1], 1, taps[-1] * c) if outer else (*taps[:-1], 1, taps[-1] * c, k)
    flip = geo.flip
    dw = conv_wgrad(
        x,
        dy,
        w_shape=shape,
        stride=(*geo.stride[:-1], 1),
        padding=(*geo.padding[:-1], (0, 0)),
        dilation=(*geo.dilation[:-1], 1),
        flip=flip,
        filter_layout=filter_layout,
        out_dtype=out_dtype,
        config=config,
        sms=sms,
    )
    return dw.reshape(tuple(w_shape))


def choose(problem: Problem, sms: int) -> Config:
    """The measured configuration, else the cheapest by the model."""
    entry = tuning.table(tuning.device_kind()).get(key(problem))
    if entry is not None:
        config = Config(**{**entry, "block": tuple(entry["block"])})
        if check(problem, config) is None:
            return config
    best = ranked(problem, sms)
    if not best:
        raise NotImplementedError(f"no tile of the filter-gradient kernel fits {problem}")
    return best[0]


def key(problem: Problem) -> str:
    """A problem's name in the table."""
    axes = ",".join(f"{ax.size}>{ax.out}k{ax.taps}i{ax.in_step}m{ax.move}" for ax in problem.axes)
    return f"wgrad n{problem.batch} c{problem.channels} k{problem.filters} {axes or 'flat'} {problem.dtype.name}"


def ranked(problem: Problem, sms: int, top: int = 1) -> list[Config]:
    """The cheapest configurations by the model, best first."""
    scored = sorted(
        ((cost(problem, c, sms), i, c) for i, c in enumerate(_candidates(problem, sms))), key=lambda z: z[:2]
    )
    return [c for _, _, c in scored[:top]]


def _candidates(problem: Problem, sms: int) -> Iterator[Config]:
    chunk = problem.chunk
    shapes = [
        (2, 1, 64, 4),
        (2, 1, 64, 3),
        (2, 1, 64, 2),
        (2, 1, 64, 1),
        (1, 2, 64, 4),
        (1, 2, 64, 3),
        (1, 2, 64, 2),
        (1, 2, 64, 1),
        (1, 3, 64, 3),
        (2, 1, 128, 2),
        (1, 2, 128, 2),
        (2, 1, 128, 1),
        (1, 2, 128, 1),
    ]
    for images, block in _boxes(problem, 64):
        for across, along, filters, blocks in shapes:
            for stages in (6, 5, 4, 3, 2):
                base = Config(images, block, 1, filters, blocks * chunk, across, along, stages)
                if check(problem, base) is None:
                    yield from _splits(problem, base, sms)
                    break
    if len(problem.axes) >= 2 and problem.axes[-2].taps in (1, 2, 3) and problem.chunk == 64:
        block = (*(1 for _ in problem.axes[:-2]), 8, 8)
        for images in (2, 1):
            for stages in (6, 5, 4, 3, 2):
                base = Config(
                    images, block, 1, 64, problem.axes[-1].taps * chunk, 1, problem.axes[-2].taps, stages, True
                )
                if check(problem, base) is None:
                    yield from _splits(problem, base, sms)
                    break


def _splits(problem: Problem, base: Config, sms: int) -> Iterator[Config]:
    """The numbers of splits that fill whole waves of multiprocessors."""
    walk = _Walk(problem, base)
    tiles = walk.rows * walk.tiles
    for waves in (1, 2, 3, 4):
        splits = waves * sms // tiles
        if splits >= 1 and ceil_div(walk.boxes, splits) >= 4:
            yield dataclasses.replace(base, splits=splits)
    yield base


def _boxes(problem: Problem, pixels: int) -> list[tuple[int, tuple[int, ...]]]:
    """The boxes of so many pixels that waste least."""
    found = []

    def divide(left: int, depth: int) -> Iterator[tuple[int, ...]]:
        if depth == 0:
            yield (left,)
            return
        part = 1
        while part <= left:
            for rest in divide(left // part, depth - 1):
                yield (*rest, part)
            part *= 2

    for images, *block in divide(pixels, len(problem.axes)):
        config = Config(images, tuple(block), 1)
        waste = math.prod(problem.counts(config)) * pixels
        found.append((waste, -(block[-1] if block else 0), images, tuple(block)))
    found.sort()
    return [(images, block) for _, _, images, block in found[:2]]


def cost(problem: Problem, config: Config, sms: int) -> float:
    """Cycles, by a model of the tensor cores, shared memory, the L2 and the partial sums' way through memory."""
    walk = _Walk(problem, config)
    dy_boxes, x_boxes = _slot(problem, config)
    loaded = (dy_boxes * config.pixels + x_boxes * math.prod(_x_box(problem, config))) * problem.swizzle
    consumers = config.across * config.along
    products = consumers * config.filters * config.columns * config.pixels / 2048 / 0.85
    read = consumers * config.filters // 64 * config.pixels * 2 * (64 + config.columns)
    step = max(products, (read + loaded) / 128, loaded / 46, 200)
    waves = ceil_div(walk.items, sms)
    outputs = problem.filters * problem.taps * problem.channels
    return waves * (walk.run * step + 2500) + 3400 + config.splits * outputs * 8 / 2000


def schedule(
    x: Any,
    dy: Any,
    /,
    *,
    w_shape: Sequence[int],
    stride: Sequence[int],
    padding: Pads,
    dilation: Sequence[int],
    groups: int = 1,
    flip: bool = False,
    filter_layout: str = "HWIO",
    config: Config | None = None,
    sms: int | None = None,
) -> np.ndarray:
    """Flat pixel numbers of dy, a row for each partial sum, in the order of addition; -1 where a box runs over."""
    geo = fprop.geometry(x.shape, w_shape, filter_layout, stride, padding, dilation, flip)
    if folded(geo, x.shape[-1]):
        shape = (*x.shape[:-2], geo.out[-1], x.shape[-1] * geo.taps[-1])
        x = jax.ShapeDtypeStruct(shape, x.dtype)
        geo = dataclasses.replace(
            geo,
            sizes=(*geo.sizes[:-1], geo.out[-1]),
            taps=(*geo.taps[:-1], 1),
            stride=(*geo.stride[:-1], 1),
            padding=(*geo.padding[:-1], (0, 0)),
            dilation=(*geo.dilation[:-1], 1),
        )
    problem = problem_of(x, dy, geo)
    config = config or choose(problem, sms or tuning.multiprocessors())
    counts, out = problem.counts(config), (problem.batch, *(ax.out for ax in problem.axes))
    box = (config.images, *config.block)
    boxes = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), -1)
    inner = np.stack(np.unravel_index(np.arange(config.pixels), box), -1)
    pixel = boxes[:, None] * np.array(box) + inner[None]
    inside = (pixel < np.array(out)).all(-1)
    flat = np.ravel_multi_index(tuple(np.where(inside, pixel[..., d], 0) for d in range(len(out))), out)
    flat = np.where(inside, flat, -1)
    run = ceil_div(len(flat), config.splits)
    padded = np.full((run * config.splits, config.pixels), -1)
    padded[: len(flat)] = flat
    return padded.reshape(config.splits, -1)


def workspace(
    x: Any,
    dy: Any,
    /,
    *,
    w_shape: Sequence[int],
    stride: Sequence[int],
    padding: Pads,
    dilation: Sequence[int],
    groups: int = 1,
    flip: bool = False,
    filter_layout: str = "HWIO",
    out_dtype: Any = None,
    config: Config | None = None,
    sms: int | None = None,
) -> int:
    """Bytes of device memory beside operands and result: partial sums and padded copies."""
    geo = fprop.geometry(x.shape, w_shape, filter_layout, stride, padding, dilation, flip)
    total = 0
    if folded(geo, x.shape[-1]):
        x = jax.ShapeDtypeStruct((*x.shape[:-2], geo.out[-1], x.shape[-1] * geo.taps[-1]), x.dtype)
        geo = dataclasses.replace(
            geo,
            taps=(*geo.taps[:-1], 1),
            sizes=(*geo.sizes[:-1], geo.out[-1]),
            stride=(*geo.stride[:-1], 1),
            padding=(*geo.padding[:-1], (0, 0)),
            dilation=(*geo.dilation[:-1], 1),
        )
        total += math.prod(x.shape) * 2
    problem = problem_of(x, dy, geo)
    config = config or choose(problem, sms or tuning.multiprocessors())
    walk = _Walk(problem, config)
    rows = walk.rows * config.filters * config.across
    total += config.splits * rows * problem.taps * problem.chunks * problem.chunk * 4
    padded = jax.eval_shape(
        lambda a: fprop.pad_axes(a, problem.axes, problem.channels - x.shape[-1]),
        jax.ShapeDtypeStruct((problem.batch, *x.shape[1:]) if problem.axes else (problem.batch, x.shape[-1]), x.dtype),
    )
    if math.prod(padded.shape) != math.prod(x.shape):
        total += math.prod(padded.shape) * 2
    if problem.filters != dy.shape[-1]:
        total += math.prod(dy.shape[:-1]) * problem.filters * 2
    return total
