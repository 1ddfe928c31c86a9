"""Depthwise and narrow-group convolution: a call with two spatial axes, and the sizes that tiles and copies may have.

Pure Python on shapes. Letters: n images, h w input rows and columns, c channels, r s filter taps, p q output rows and
columns. One-dimensional calls become rows of images: (n, w, c) is the image (1, n, w, c) under a filter of one row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.hopper.ptx import NAMES, SIZES
from jaxdnn._src.hopper.sizes import ceil_div

DTYPES = {dtype.name: name for dtype, name in NAMES.items()}


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is tiled; the fields left None are chosen from the shape.

    Attributes:
      channels: channels of a tile: in 16 bits 16, 32 or 64, filter gradient 32 or 64; in float32 always 32.
      rows, columns: outputs of a tile; rows even, columns a multiple of 4 (times the stride for backward data).
      splits: of the filter gradient, the most parts of the sum over pixels.
      stages: tiles in flight in one block; if more than one, few blocks process several tiles each.
    """

    channels: int | None = None
    rows: int | None = None
    columns: int | None = None
    splits: int | None = None
    stages: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planar(Geometry):
    """A convolution along two axes, with what a geometry leaves out."""

    images: int
    channels: int
    dtype: str

    @property
    def group(self) -> int:
        """Channels of a group."""
        return self.channels // self.groups

    @property
    def low(self) -> tuple[int, ...]:
        """The low padding of each axis."""
        return tuple(low for low, _ in self.padding)

    @property
    def tensor(self) -> bool:
        """Whether the tensor core computes it; float32 is computed by fused multiply-adds."""
        return self.dtype != "f32"

    @property
    def itemsize(self) -> int:
        return SIZES[self.dtype]


def whole_copies(columns: int, pixel_bytes: int) -> int:
    """Columns rounded up so that a tile's bytes divide by 128, as a copy by one warpgroup needs."""
    many = max(1, 128 // pixel_bytes)
    return ceil_div(columns, many) * many


def whole_pattern(tall: int, wide: int) -> int:
    """Rows of a tile, padded until its pixels divide by 8, the period of the swizzle.

    The swizzle depends on the address, so that each tile of a ring must start at a multiple of the period.
    """
    return next(rows for rows in range(tall, tall + 8) if rows * wide % 8 == 0)


def planar(geo: Geometry, images: int, channels: int, dtype: Any) -> Planar:
    """The call as two axes; x (images, *sizes, channels) and w (*taps, channels / groups, channels)."""
    if geo.rank == 1:
        row: dict[str, Any] = {"sizes": images, "taps": 1, "stride": 1, "padding": (0, 0), "dilation": 1}
        geo = dataclasses.replace(geo, **{name: (of_row, *getattr(geo, name)) for name, of_row in row.items()})
        images = 1
    name = DTYPES.get(np.dtype(dtype).name, "")
    return Planar(**vars(geo), images=images, channels=channels, dtype=name)


class NoTile(ValueError):
    pass


def check_tile(config: Config, step: tuple[int, ...]) -> None:
    """Raises NoTile unless tiles start at even rows of a phase, so that all pair rows alike, and columns are fours."""
    if (config.rows and config.rows % (2 * step[0])) or (config.columns and config.columns % (4 * step[1])):
        raise NoTile(
            f"a tile's rows are a multiple of {2 * step[0]} and its columns of {4 * step[1]}, "
            f"got {config.rows} and {config.columns}"
        )


def best(extent: int, choices: Sequence[int]) -> int:
    """The tile size that covers the extent with the least work, with a halo of six rows or columns for each tile."""
    return min(choices, key=lambda size: (ceil_div(extent, size) * (size + 6), -size))
