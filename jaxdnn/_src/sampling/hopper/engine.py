"""The `hopper` engine of sampling: which calls its kernels serve, and what it guarantees."""

import math

import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.hopper.ptx import NAMES as DTYPES
from jaxdnn._src.sampling.hopper.gather_ptx import MOST_UNITS, MOST_WHOLE, adds_up
from jaxdnn._src.sampling.hopper.points_ptx import Problem
from jaxdnn._src.sampling.primitive import AT, AT_PIXELS, AT_SLOPES, AT_TANGENT, SampleSpec, results

MOST = 2**31 - 64  # elements of an array, and cells: numbers of 32 bits with a sign, and loops go on by up to 32
WIDEST = 2**24  # pixels along an axis, of which every number is a float32
MODES = ("nearest", "linear")


def _problem(call: engines.Call) -> Problem:
    spec: SampleSpec = call.spec
    *floats, grid = call.avals
    d = len(spec.sizes)
    return Problem(
        rule=spec.of_grid,
        images=math.prod(grid.shape[: -d - 1]),
        sizes=spec.sizes,
        points=math.prod(grid.shape[-d - 1 : -1]),
        channels=floats[0].shape[-1],
        x=DTYPES[spec.x],
        y=DTYPES[spec.y],
    )


def _unsupported(call: engines.Call) -> str | None:
    """Why the kernels do not serve a call, whatever the device."""
    spec: SampleSpec = call.spec
    if call.op == AT_TANGENT:
        return "it has no kernel for the derivative along a tangent of the grid"
    if spec.of_grid.mode not in MODES:
        return f"its kernels have the modes {', '.join(MODES)}, not {spec.of_grid.mode}"
    dtypes = (spec.x, spec.y, call.avals[-1].dtype)
    if not {*dtypes[:2]} <= set(DTYPES) or dtypes[2] != np.float32:
        names = ", ".join(dtype.name for dtype in dtypes[:2])
        return f"its kernels take {', '.join(map(str, DTYPES))} at points in float32, not {names} at {dtypes[2]}"
    if any(0 in v.shape for v in (*call.avals, results(call.op, spec, *call.avals))):
        return "it has nothing to do for an empty array"
    k = _problem(call)
    if max(spec.sizes) >= WIDEST:
        return f"its kernels take fewer than 2^24 pixels along an axis, not {max(spec.sizes)}"
    most = max(k.images * k.pixels * k.channels, k.images * k.points * max(k.channels, k.axes, k.taps), k.keys + 1)
    if most >= MOST:
        return (
            "its kernels take fewer than 2^31 - 64 elements of an array, and pairs of pixels with points between them"
        )
    if call.op == AT_SLOPES and not adds_up(k):
        return (
            f"the gradient in a grid adds up to {MOST_WHOLE} channels, or a power of two of up to {MOST_UNITS} vectors "
            f"of 16 bytes, not {k.channels}"
        )
    return None


def _workspace(call: engines.Call) -> int:
    """Of the gradient in images: keys and numbers of points, sorted ones, records, and where each cell's begin."""
    if call.op != AT_PIXELS:
        return 0
    from jaxdnn._src.sampling.hopper import lists_ptx

    k = _problem(call)
    words = 4 * (8 + 4 * lists_ptx.made_first(k)) - 2 * 2 * lists_ptx.narrow(k)  # bytes of a point
    return words * k.images * k.points + 4 * (k.keys + 1 + (lists_ptx.left(k) > 0) * (lists_ptx.groups(k) + 1))


def _run(call: engines.Call, *operands: Array) -> Array:
    from jaxdnn._src.sampling.hopper import calls as kernels

    k, out = _problem(call), results(call.op, call.spec, *operands)
    d = k.axes
    flat = [v.reshape(k.images, math.prod(v.shape[-d - 1 : -1]), v.shape[-1]) for v in operands]
    if call.op == AT_SLOPES:
        found = kernels.slopes(flat[0], flat[1], flat[2], k)
    else:
        found = (kernels.samples if call.op == AT else kernels.pixels)(flat[0], flat[1], k, out.dtype)
    return found.reshape(out.shape)


hopper.declare(
    AT,
    AT_PIXELS,
    AT_SLOPES,
    AT_TANGENT,
    run=_run,
    unsupported=_unsupported,
    level=lambda call: "portable" if call.op == AT else "mesh_invariant",
    workspace=_workspace,
    notes=("neither indices nor weights lie in memory", "the gradient in images sorts points by XLA's sort"),
)
