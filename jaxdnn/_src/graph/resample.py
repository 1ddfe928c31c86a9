"""Resampling by windows: maxima and averages, and their gradients."""

import numpy as np
from jax import Array

from jaxdnn._src.graph.nodes import Inference, Kind, Run, register
from jaxdnn._src.graph.products import LETTERS, asked_dtype, into, layout_of
from jaxdnn._src.pool.api import pool, pool_dgrad

MODES = {"MAXPOOL": "max", "AVGPOOL_INCLUDE_PADDING": "average", "AVGPOOL_EXCLUDE_PADDING": "average_exclude_padding"}
PADDINGS = {"MAXPOOL": "NEG_INF_PAD", "AVGPOOL_INCLUDE_PADDING": "ZERO_PAD", "AVGPOOL_EXCLUDE_PADDING": "ZERO_PAD"}


def _geometry(node: Inference, x: tuple[int, ...]) -> tuple[int, ...]:
    mode, count = node.choice("mode", tuple(MODES)), len(x) - 2
    wanted = PADDINGS[mode]
    asked = node.attribute("padding_mode")
    node.expect(asked in (None, wanted), "padding_mode", f"{wanted} for mode {mode}", asked)
    window, stride = node.integers("window", count, 1, 1), node.integers("stride", count, 1, 1)
    pre, post = node.integers("pre_padding", count, 0, 0), node.integers("post_padding", count, 0, 0)
    sizes = []
    for axis, n in enumerate(x[2:]):
        room = n + pre[axis] + post[axis]
        node.expect(window[axis] <= room, "window", f"at most {room} along axis {2 + axis}, the padded input", window)
        narrow = max(pre[axis], post[axis]) < window[axis]
        node.expect(narrow, "pre_padding", "less than the window, as post_padding", (pre[axis], post[axis]))
        sizes.append((room - window[axis]) // stride[axis] + 1)
    node.derive(window=window, stride=stride, padding=tuple(zip(pre, post, strict=True)))
    return tuple(sizes)


def _infer(node: Inference) -> None:
    x = node.rank("input", 3, 4, 5)
    node.floats("input")
    dim = (*x[:2], *_geometry(node, x))
    node.output("Y", dim, "input")
    if node.asked("INDEX"):
        node.expect(node.attribute("mode") == "MAXPOOL", "generate_index", "False but for MAXPOOL", True)
        taps = int(np.prod(node.node.derived["window"]))
        node.expect(taps <= 127, "window", "at most 127 taps, for the index is int8", node.attribute("window"))
        node.output("INDEX", dim, "input", "int8")


def _options(node: Run, port: str) -> dict[str, object]:
    named = {name: node.derived(name) for name in ("window", "stride", "padding")}
    dtype = asked_dtype(node, next(iter(node.node.outputs)))
    return {**named, "mode": MODES[node.attribute("mode")], "layout": layout_of(node, port), "out_dtype": dtype}


def _resample(node: Run) -> dict[str, Array]:
    x, letters, layout = node.x("input"), LETTERS[node.x("input").ndim], layout_of(node, "input")
    given = into(x.astype(node.compute) if node.compute == "float64" else x, letters, layout)
    if not node.asked("INDEX"):
        return {"Y": into(pool(given, **_options(node, "input")), layout, letters)}  # pyright: ignore[reportArgumentType]
    y, index = pool(given, return_indices="tap", **_options(node, "input"))  # pyright: ignore[reportArgumentType]
    return {"Y": into(y, layout, letters), "INDEX": into(index, layout, letters).astype(np.int8)}


def _infer_backward(node: Inference) -> None:
    dy, x = node.rank("loss", 3, 4, 5), node.dim("input")
    node.expect(len(x) == len(dy), "input.dim", f"{len(dy)} sizes, as loss", x)
    node.floats("loss", "input")
    node.shaped("loss", (*x[:2], *_geometry(node, x)), "the windows of the input")
    node.output("DX", x, "input")


def _backward(node: Run) -> dict[str, Array]:
    dy, x = node.wide("loss"), node.wide("input")
    letters, layout = LETTERS[x.ndim], layout_of(node, "input")
    dx = pool_dgrad(into(dy, letters, layout), into(x, letters, layout), **_options(node, "input"))  # pyright: ignore[reportArgumentType]
    return {"DX": into(dx, layout, letters)}


ATTRIBUTES = {
    "mode": None,
    "padding_mode": None,
    "window": None,
    "stride": None,
    "pre_padding": None,
    "post_padding": None,
}
register(
    Kind(
        "resample",
        ("input",),
        ("Y", "INDEX?"),
        ATTRIBUTES,
        _infer,
        _resample,
        compute=("float32", "float64"),
        calls=("pool",),
    )
)
register(
    Kind(
        "resample_backward",
        ("loss", "input"),
        ("DX",),
        ATTRIBUTES,
        _infer_backward,
        _backward,
        compute=("float32", "float64"),
        calls=("pool_dgrad",),
    )
)
