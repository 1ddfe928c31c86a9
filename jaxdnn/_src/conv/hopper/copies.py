"""The copies that XLA makes around a dense Hopper convolution, and their bytes.

They pad with zeros to rows of 16 bytes and whole strides, which TMA requires, turn the taps of inputs with few channels
into channels, and bring the epilogue's operands into the output's shape. An array that needs no change is not copied.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper.plan import Axis, Config, Problem
from jaxdnn._src.hopper.sizes import ceil_div


def pad(a: Array, pads: Sequence[tuple[int, int]]) -> Array:
    return jnp.pad(a, pads) if any(map(any, pads)) else a


def no_earlier(x: Array, dy: Array) -> Array:
    """x, for a copy that is made when dy is there. XLA may make one of x alone in the forward pass, and keep both."""
    return lax.optimization_barrier((x, dy))[0]


def pad_axes(x: Array, axes: Sequence[Axis], pad_reduce: int) -> Array:
    """Pads x for the pipeline: whole strides, rows of 16 bytes, and no axis of length one that has several taps.

    TMA drops an axis of length one, and then does not fill positions outside of it with zeros.
    """
    pads = [(0, 0)]
    for ax in axes:
        high = -ax.size % ax.in_step
        alone = ax.positions == 1 and ax.count == (1,) and ax.offset == (0,)
        if (ax.size + high) // ax.in_step == 1 and not alone:
            high += ax.in_step
        pads.append((0, high))
    pads.append((0, pad_reduce))
    return jnp.pad(x, pads) if any(map(any, pads)) else x


# ---- few channels: the last axis' taps as channels


def cells_of(geo: Geometry, channels: int, width: int) -> int:
    """How many pixels a 16-byte cell has, such that every output's window starts with a cell; 0: there are no cells.

    A cell has one stride of the last axis; its pixels are padded with zero channels.
    """
    if geo.groups > 1 or width != 2 or not geo.taps or geo.flip or geo.dilation[-1] != 1:
        return 0
    s = geo.stride[-1]
    fits = s in (1, 2, 4) and channels <= min(4, 8 // s) and ceil_div(geo.taps[-1], s) in (2, 4, 8)
    return s if fits else 0


def in_cells(x: Array, geo: Geometry, cells: int) -> Array:
    """(..., X, C) to (..., cells, 8), padded so that the window of output q starts at cell q."""
    (low, _), taps, out = geo.padding[-1], geo.taps[-1], geo.out[-1]
    length = (out + ceil_div(taps, cells) - 1) * cells
    none = [(0, 0, 0)] * (x.ndim - 2)
    pads = [*none, (low, length - low - x.shape[-2], 0), (0, 8 // cells - x.shape[-1], 0)]
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)  # negative padding removes pixels that no window reads
    x = x.reshape(*x.shape[:-2], 1, length // cells, 8)
    if rest := taps % cells:
        # A window's last cell has pixels that no tap reads. Multiplied by zeros, a NaN there would show in the result.
        kept = np.arange(8) < np.array([8, rest * (8 // cells)])[:, None, None]
        x = jnp.where(kept, x, jnp.zeros((), x.dtype))
    return x.reshape(*x.shape[:-3], -1, 8)


def fold_taps(x: Array, geo: Geometry, channels: int) -> Array:
    """(..., X, C) to (..., Q, channels): one copy that turns the last axis' S taps into S * C channels, and zeros.

    Where windows start at whole 32-bit words, words are copied: XLA takes 2.5 times as long for halves of them
    (`benchmarks/notes-train.md`).
    """
    s, d, r, q = geo.stride[-1], geo.dilation[-1], geo.taps[-1], geo.out[-1]
    c, width = x.shape[-1], jnp.dtype(x.dtype).itemsize
    low, high = _folded_padding(geo)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [(low, high, 0), (0, 0, 0)])
    if _in_words(geo, c, width):
        words = x.reshape(*x.shape[:-2], -1, s * c * width // 4, 4 // width)
        words = lax.bitcast_convert_type(words, jnp.int32)
        runs = [words[..., i : i + q, :] for i in range(ceil_div(r, s))]
        # Ones in the bits of the taps' channels, zeros behind: the last stride may have pixels that no tap reads.
        kept = np.where(np.arange(channels) < r * c, -1, 0).astype(f"int{8 * width}").view(np.int32)
        folded = _wide(runs, kept.size) & np.expand_dims(kept, tuple(range(x.ndim - 1)))
        folded = lax.bitcast_convert_type(folded, x.dtype)
        return folded.reshape(*folded.shape[:-2], channels)
    taps = range(r)[::-1] if geo.flip else range(r)
    return _wide([x[..., t * d : t * d + (q - 1) * s + 1 : s, :] for t in taps], channels)


def _in_words(geo: Geometry, channels: int, width: int) -> bool:
    return not geo.flip and geo.dilation[-1] == 1 and width < 4 and geo.stride[-1] * channels * width % 4 == 0


def _wide(parts: Sequence[Array], channels: int) -> Array:
    """Arrays side by side along their last axis, cut to `channels` or with zeros behind them."""
    missing = channels - sum(part.shape[-1] for part in parts)
    zeros = [jnp.zeros((*parts[0].shape[:-1], missing), parts[0].dtype)] if missing > 0 else []
    return jnp.concatenate([*parts, *zeros], axis=-1)[..., :channels]


def _folded_padding(geo: Geometry) -> tuple[int, int]:
    """The padding to as many whole strides as the windows read; a negative number removes pixels that none reads."""
    low, (s, d, r, q) = geo.padding[-1][0], (v[-1] for v in (geo.stride, geo.dilation, geo.taps, geo.out))
    return low, (q - 1 + ceil_div((r - 1) * d + 1, s)) * s - low - geo.sizes[-1]


def folding_bytes(x: Any, geo: Geometry, channels: int) -> int:
    """Bytes of the arrays that `fold_taps` makes: the padded one, and its result."""
    rows, c, width = math.prod(x.shape[:-2]), x.shape[-1], jnp.dtype(x.dtype).itemsize
    low, high = _folded_padding(geo)
    padded = low + x.shape[-2] + high if low or high else 0
    return rows * width * (padded * c + geo.out[-1] * channels)


# ---- the epilogue


def prepare_epilogue(
    epilogue: Epilogue | None,
    operands: Sequence[Array],
    problem: Problem,
    config: Config,
    flat: bool,
    pad_columns: int,
) -> tuple[Array | None, list[Array]]:
    """The epilogue's operands as the pipeline reads them: the bias in whole tiles, the others like the output."""
    if epilogue is None:
        return None, []
    named = dict(zip(epilogue.operands, operands, strict=True))
    bias = None
    if "bias" in named:
        whole = ceil_div(problem.columns, config.columns) * config.columns
        bias = named["bias"].astype(jnp.float32)
        bias = pad(bias, ((0, whole - bias.shape[0]),))
    extras = []
    for name in epilogue.like_result:
        extra = named[name].reshape(-1, named[name].shape[-1]) if flat else named[name]
        extras.append(pad(extra, ((0, 0), *longer(problem), (0, pad_columns))))
    return bias, extras


def longer(problem: Problem) -> list[tuple[int, int]]:
    """The padding at the end of the output's axes that completes the last stride."""
    return [(0, -ax.out % ax.out_step) for ax in problem.axes]


# ---- bytes


def filter_bytes(problem: Problem, width: int) -> int:
    """Bytes of the filter as the pipeline reads it."""
    return math.prod(ax.taps for ax in problem.axes) * problem.reduce * problem.columns * width


def copied(before: Any, after: Any) -> int:
    """Bytes of a padded copy; 0 if nothing was padded, and so nothing is copied."""
    if math.prod(before.shape) == math.prod(after.shape):
        return 0
    return math.prod(after.shape) * jnp.dtype(after.dtype).itemsize


def epilogue_bytes(epilogue: Epilogue | None, operands: Sequence[Any], problem: Problem, pad_columns: int) -> int:
    """Bytes of the arrays that `prepare_epilogue` makes, for any configuration: a tile has at most 256 columns."""
    pixels = problem.batch * math.prod(ax.positions * ax.out_step for ax in problem.axes)
    if epilogue is None:
        return 0
    named = dict(zip(epilogue.operands, operands, strict=True))
    total = (problem.columns + 255) * 4 if "bias" in named else 0
    for name in epilogue.like_result:
        if pad_columns or any(map(any, longer(problem))):
            total += pixels * problem.columns * jnp.dtype(named[name].dtype).itemsize
    return total
