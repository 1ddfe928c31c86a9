"""The sums of a convolution and its gradients as matrix products: for a stated order, for some elements, for bounds.

    y  = patches of x [N P Q, R S C_g]  @ filter [R S C_g, K_g]      in each group
    dx = patches of dy [N H W, R S K_g] @ filter [R S K_g, C_g]
    dw = patches of x [R S C_g, N P Q]  @ dy [N P Q, K_g]
    db = dy [K, N P Q]                  @ ones [N P Q, 1]

`Schedule.order` counts along the reduction axis. In natural order its indices are

    y r * C_g + c        dx r * K_g + k        dw, db (n * P + p) * Q + q

where r counts the filter's taps as they lie in the filter (row-major), in both modes. The rows of the left matrix are
formed when they are asked for (`product.Product`), because all of them may need a large memory.

x and dy are [G, pixels, C_g], for y and dx with a last pixel of zeros; w is [G, R S, C_g, K_g]. `axes` and `shape` are
those of the result.
"""

import math
from typing import Any

import numpy as np

from jaxdnn_reference.layout import Axes, Window
from jaxdnn_reference.product import Product

Array = np.ndarray[Any, Any]


def conv(window: Window, x: Array, w: Array, axes: Axes, shape: tuple[int, ...]) -> Product:
    groups, taps, cg, kg = w.shape
    filters = np.ascontiguousarray(np.moveaxis(w, -1, 1)).reshape(groups, kg, taps * cg)

    def left(row: Array, group: Array) -> Array:
        return joined(x[group[..., None], window.input_pixel(row)])

    def stored(row: Array) -> Array:
        return cg * np.sum(window.input_pixel(row) != window.in_pixels, axis=-1)

    right = lambda column, group: filters[group, column]
    return Product(groups, window.out_pixels, kg, left, right, stored, axes, shape)


def conv_dgrad(window: Window, dy: Array, w: Array, axes: Axes, shape: tuple[int, ...]) -> Product:
    groups, taps, cg, kg = w.shape
    filters = np.ascontiguousarray(w.swapaxes(1, 2)).reshape(groups, cg, taps * kg)

    def left(row: Array, group: Array) -> Array:
        return joined(dy[group[..., None], window.output_pixel(row)])

    def stored(row: Array) -> Array:
        return kg * np.sum(window.output_pixel(row) != window.out_pixels, axis=-1)

    right = lambda column, group: filters[group, column]
    return Product(groups, window.in_pixels, cg, left, right, stored, axes, shape)


def conv_wgrad(window: Window, x: Array, dy: Array, axes: Axes, shape: tuple[int, ...]) -> Product:
    groups, _, cg = x.shape
    pixels, gradient = (np.ascontiguousarray(v.swapaxes(1, 2)) for v in (x, dy))
    input_pixel = np.ascontiguousarray(window.input_pixel(np.arange(window.out_pixels)).T)  # [R S, N P Q]

    def left(row: Array, group: Array) -> Array:
        tap, c = np.divmod(row, cg)
        return pixels[group[..., None], c[..., None], input_pixel[tap]]

    def stored(row: Array) -> Array:
        return np.sum(input_pixel != window.in_pixels, axis=-1)[row // cg]

    right = lambda column, group: gradient[group, column]
    return Product(groups, window.taps * cg, gradient.shape[1], left, right, stored, axes, shape)


def conv_bgrad(dy: Array, axes: Axes, shape: tuple[int, ...]) -> Product:
    terms, k = dy.shape
    ones = np.ones((1, 1, terms), dy.dtype)
    left = lambda row, group: dy.T[row + 0 * group]
    right = lambda column, group: ones[group, column]
    return Product(1, k, 1, left, right, lambda row: np.full(row.shape, terms), axes, shape)


def joined(patch: Array) -> Array:
    """[..., taps, channels] to [..., taps * channels]."""
    return patch.reshape(*patch.shape[:-2], math.prod(patch.shape[-2:]))
