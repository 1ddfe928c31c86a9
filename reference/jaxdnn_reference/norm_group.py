"""Group and instance normalisation: `norm`'s formulas over the pixels of an image and the channels of a group.

    y[n, p, c] = act((x[n, p, c] - mean[n, g]) r[n, g] scale[c] + bias[c])        g = floor(c G / C)

Instance normalisation has as many groups as channels. Statistics have the shape (N, G). Channels that only fill the
last vector of a layout up belong to no group: they are not read, and are 0 in the result.

Sources: Wu and He, arXiv:1803.08494; Ulyanov, Vedaldi and Lempitsky, arXiv:1607.08022.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference import norm
from jaxdnn_reference.activation import Activation

Array = np.ndarray[Any, Any]


class Groups(NamedTuple):
    """x as (..., G, C / G, ...), where the statistics' axes are, and how parameters and statistics broadcast to it.

    `filled` channels of the array are not among the C.
    """

    layout: lay.Axes
    x: Array
    axes: list[int]
    same: list[int]
    parameters: tuple[int, ...]
    batch: int
    channel: int
    filled: int

    def array(self, v: Array) -> Array:
        plain = self.layout.to_canonical(v)
        return plain.take(range(plain.shape[self.channel] - self.filled), self.channel).reshape(self.x.shape)

    def restore(self, v: Array) -> Array:
        c = self.channel
        plain = v.reshape(*v.shape[:c], v.shape[c] * v.shape[c + 1], *v.shape[c + 2 :])
        return self.layout.from_canonical(np.pad(plain, [(0, self.filled * (a == c)) for a in range(plain.ndim)]))

    def statistic(self, v: Array | None) -> Array | None:
        """(N, G) as it broadcasts to x."""
        if v is None:
            return None
        shape = [1] * self.x.ndim
        shape[self.batch], shape[self.channel] = v.shape
        return (v if self.batch < self.channel else v.T).reshape(shape)

    def give_statistic(self, v: Array) -> Array:
        n, g = v.shape[self.batch], v.shape[self.channel]
        return v.reshape(n, g) if self.batch < self.channel else v.reshape(g, n).T


def as_it_lies(layout: str) -> lay.Axes:
    """The axes in the order they are stored in, with channel vectors merged into the channels."""
    axes = lay.image_axes(layout)
    return lay.Axes(axes.letters, axes.letters, axes.lanes)


def in_groups(x: Array, groups: int | None, channels: int | None, layout: str) -> Groups:
    axes = as_it_lies(layout)
    plain = axes.to_canonical(x)
    c, n = axes.letters.index("C"), axes.letters.index("N")
    filled = 0 if channels is None else plain.shape[c] - channels
    plain = plain.take(range(plain.shape[c] - filled), c)
    g, each = (plain.shape[c], 1) if groups is None else (groups, plain.shape[c] // groups)
    split = plain.reshape(*plain.shape[:c], g, each, *plain.shape[c + 1 :])
    batch = n + (n > c)
    return Groups(
        axes,
        split,
        [a for a in range(split.ndim) if a not in (batch, c)],
        [a for a in range(split.ndim) if a not in (c, c + 1)],
        tuple(size if a in (c, c + 1) else 1 for a, size in enumerate(split.shape)),
        batch,
        c,
        filled,
    )


def _forward(
    x: Array,
    groups: int | None,
    channels: int | None,
    scale: Any,
    bias: Any,
    eps: float,
    activation: Activation,
    layout: str,
    out_dtype: Any,
) -> tuple[Array, Array, Array]:
    way, v = norm.way_of(x), in_groups(x, groups, channels, layout)
    s = norm.statistics(way, v.x, v.axes, eps)
    scale, bias = (None if p is None else p.reshape(v.parameters) for p in (scale, bias))
    y = norm.result(norm.activated(norm.normalise(way, s, scale, bias), activation), out_dtype)
    return v.restore(y), v.give_statistic(s.mean), v.give_statistic(s.rstd)


def _backward(
    dy: Array,
    x: Array,
    groups: int | None,
    channels: int | None,
    scale: Any,
    mean: Any,
    rstd: Any,
    eps: float,
    layout: str,
    out_dtype: Any,
) -> tuple[Array, Array, Array]:
    way, v = norm.way_of(x), in_groups(x, groups, channels, layout)
    s = norm.saved(way, v.x, v.axes, eps, v.statistic(mean), v.statistic(rstd))
    factor = None if scale is None else scale.reshape(v.parameters)
    dx, dscale, dbias = norm.gradients(way, v.array(dy), s, factor, v.axes, v.same)
    return v.restore(norm.result(dx, out_dtype)), dscale.reshape(-1), dbias.reshape(-1)


def group_norm(
    x: Array,
    /,
    *,
    groups: int = 32,
    channels: int | None = None,
    scale: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    activation: Activation = None,
    layout: str = "NHWC",
    return_statistics: bool = False,
    out_dtype: Any = None,
) -> Any:
    """y = act((x - mean[n, g]) r[n, g] scale[c] + bias[c]); with `return_statistics` (y, mean, r)."""
    found = _forward(x, groups, channels, scale, bias, eps, activation, layout, out_dtype)
    return found if return_statistics else found[0]


def group_norm_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    groups: int = 32,
    channels: int | None = None,
    scale: Array | None = None,
    mean: Array | None = None,
    rstd: Array | None = None,
    eps: float = 1e-5,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale, dbias of `group_norm`."""
    return _backward(dy, x, groups, channels, scale, mean, rstd, eps, layout, out_dtype)


def instance_norm(
    x: Array,
    /,
    *,
    scale: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    activation: Activation = None,
    layout: str = "NHWC",
    return_statistics: bool = False,
    out_dtype: Any = None,
) -> Any:
    """y = (x - mean[n, c]) r[n, c] scale[c] + bias[c]; with `return_statistics` (y, mean, r)."""
    found = _forward(x, None, None, scale, bias, eps, activation, layout, out_dtype)
    return found if return_statistics else found[0]


def instance_norm_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    scale: Array | None = None,
    mean: Array | None = None,
    rstd: Array | None = None,
    eps: float = 1e-5,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale, dbias of `instance_norm`."""
    return _backward(dy, x, None, None, scale, mean, rstd, eps, layout, out_dtype)
