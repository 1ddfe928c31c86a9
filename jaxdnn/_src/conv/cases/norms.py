"""For engines that may convolve by a transform: how much each output can be, by the norms of what it is made of."""

from typing import Any

import numpy as np

from jaxdnn._src.conv.cases.case import Case
from jaxdnn_reference import layout as axes

# Operands and result as (image, group, channel in the group) or (input channel, group, output channel).
_SUMS = {"y": "ngc,cgk->ngk", "x": "ngk,cgk->ngc", "w": "ngc,ngk->cgk"}


def of_outputs(case: Case, operands: Any) -> tuple[np.ndarray, int]:
    """Σ_i ‖x_i‖₂ ‖w_i‖₂ in the shape of the result, and the number of channels (or images) i."""
    groups = case.geometry.groups
    parts = [_norms(case, role, v, groups) for role, v in zip(case.roles, operands, strict=True)]
    if case.result_role == "w":
        return _spread(case, np.einsum(_SUMS["w"], *parts), case.geometry.taps), parts[0].shape[0]
    sizes = case.geometry.outputs if case.result_role == "y" else _sizes(case)
    return _spread(case, np.einsum(_SUMS[case.result_role], *parts), sizes), parts[0].shape[2]


def _sizes(case: Case) -> tuple[int, ...]:
    shape = axes.image_axes(case.layout).canonical_shape(case.shape("x"))
    return shape[1:-1]


def _axes(case: Case, role: str) -> axes.Axes:
    if role == "w":
        return axes.filter_axes(case.filter_layout or axes.default_filter_layout(case.layout))
    return axes.image_axes(case.layout)


def _norms(case: Case, role: str, array: np.ndarray, groups: int) -> np.ndarray:
    """The 2-norms over the spatial axes, the channels split into groups."""
    canonical = _axes(case, role).to_canonical(np.asarray(array)).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        spatial = range(canonical.ndim - 2) if role == "w" else range(1, canonical.ndim - 1)
        found = np.sqrt(np.sum(canonical**2, tuple(spatial)))
    return found.reshape(found.shape[0], groups, found.shape[1] // groups)


def _spread(case: Case, values: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """One value for every pair of image and channel (or of channels), at every position of the result."""
    values = values.reshape(values.shape[0], values.shape[1] * values.shape[2])
    if case.result_role == "w":
        whole = np.broadcast_to(values, (*sizes, *values.shape))
    else:
        shape = (values.shape[0], *(1 for _ in sizes), values.shape[1])
        whole = np.broadcast_to(values.reshape(shape), (values.shape[0], *sizes, values.shape[1]))
    return _axes(case, case.result_role).from_canonical(whole)
