"""Nodes that add products: convolutions and their gradients, matrix products, and those of experts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.conv.api import conv, conv_dgrad, conv_wgrad
from jaxdnn._src.graph.nodes import Inference, Kind, Run, is_held, numpy_of, register, rounded
from jaxdnn._src.graph.tensors import WIDE
from jaxdnn._src.matmul.api import matmul
from jaxdnn._src.matmul.grouped import grouped_matmul, grouped_matmul_wgrad

MODES = {"CROSS_CORRELATION": "cross_correlation", "CONVOLUTION": "convolution"}
OPERANDS = (*WIDE, "float8_e4m3fn", "float8_e5m2", "int8")
# Layouts of `conv` by the order in which N, C and the spatial axes lie.
LETTERS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}
SERVED = {3: ("NWC", "NCW", "CWN"), 4: ("NHWC", "NCHW", "CHWN"), 5: ("NDHWC", "NCDHW", "CDHWN")}
FILTER = {3: "KCS", 4: "KCRS", 5: "KCTRS"}


def _operands(node: Inference, *ports: str) -> None:
    """Checks that the factors have dtypes that are multiplied, in the accumulator that was asked for."""
    compute, is_conv = node.node.compute, node.node.op.startswith("conv")
    for port in ports:
        dtype = node.dtype(port)
        node.typed(port, *OPERANDS)
        whole = dtype == "int8"
        if compute == "int32":
            node.expect(whole, f"{port}.data_type", "int8, for the compute dtype is int32", dtype)
        elif is_conv and whole:
            node.expect(False, "compute_data_type", "int32, in which products of int8 are added", compute)
        elif compute == "float32":
            node.expect(dtype != "float64", "compute_data_type", "float64, for an operand is", compute)
    first, second = (node.dtype(port) for port in ports)
    both8 = all(name.startswith("float8") for name in (first, second))
    node.expect(first == second or both8, f"{ports[1]}.data_type", f"{first}, as {ports[0]} has it", second)


def _window(node: Inference, count: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...]]:
    both, pre, post = (node.attribute(name) for name in ("padding", "pre_padding", "post_padding"))
    if both is not None:
        node.expect(pre is None and post is None, "padding", "None where pre_padding or post_padding is given", both)
        low = high = node.integers("padding", count, 0, 0)
    else:
        low, high = (node.integers(name, count, 0, 0) for name in ("pre_padding", "post_padding"))
    stride, dilation = node.integers("stride", count, 1, 1), node.integers("dilation", count, 1, 1)
    return tuple(zip(low, high, strict=True)), stride, dilation


def _geometry(node: Inference, x: tuple[int, ...], w: tuple[int, ...], image: str, weight: str) -> tuple[int, ...]:
    """Checks x and w against each other, derives what `conv` is told, and returns the spatial sizes of the result."""
    count = len(x) - 2
    node.choice("convolution_mode", tuple(MODES))
    padding, stride, dilation = _window(node, count)
    node.expect(x[1] % w[1] == 0, f"{weight}.dim", f"C channels of which {image}'s {x[1]} are a multiple", w)
    groups = x[1] // w[1]
    node.expect(w[0] % groups == 0, f"{weight}.dim", f"output channels that {groups} groups divide", w)
    sizes = []
    for axis, n in enumerate(x[2:]):
        reach, room = (w[2 + axis] - 1) * dilation[axis] + 1, n + sum(padding[axis])
        node.expect(reach <= room, f"{weight}.dim", f"taps that reach over at most {room} along axis {2 + axis}", reach)
        sizes.append((room - reach) // stride[axis] + 1)
    node.derive(groups=groups, spatial_dims=count, padding=padding, stride=stride, dilation=dilation)
    return tuple(sizes)


def _infer_fprop(node: Inference) -> None:
    x = node.rank("image", 3, 4, 5)
    w = node.rank("weight", len(x))
    _operands(node, "image", "weight")
    node.output("Y", (x[0], w[0], *_geometry(node, x, w, "image", "weight")), "image")


def _infer_dgrad(node: Inference) -> None:
    dy = node.rank("loss", 3, 4, 5)
    w = node.rank("filter", len(dy))
    _operands(node, "loss", "filter")
    dx = node.output_dim("DX", "set, for strides leave the size of the image open")
    node.expect(len(dx) == len(dy), "DX.dim", f"{len(dy)} sizes", dx)
    sizes = _geometry(node, dx, w, "DX", "filter")
    node.shaped("loss", (dx[0], w[0], *sizes), "the convolution's result")
    node.output("DX", dx, "loss")


def _infer_wgrad(node: Inference) -> None:
    x = node.rank("image", 3, 4, 5)
    node.rank("loss", len(x))
    _operands(node, "image", "loss")
    dw = node.output_dim("DW", "set, for strides leave the size of the filter open")
    node.expect(len(dw) == len(x), "DW.dim", f"{len(x)} sizes", dw)
    sizes = _geometry(node, x, dw, "image", "DW")
    node.shaped("loss", (x[0], dw[0], *sizes), "the convolution's result")
    node.output("DW", dw, "image")


def layout_of(node: Run, port: str) -> str:
    """The layout of `conv` in which an input lies, or channels last."""
    order = node.order(port)
    letters = "".join(LETTERS[len(order)][axis] for axis in order)
    return letters if letters in SERVED[len(order)] else SERVED[len(order)][0]


def into(x: Array, letters: str, layout: str) -> Array:
    """An array whose axes are `letters` with the axes of `layout`."""
    return x.transpose([letters.index(letter) for letter in layout])


def filter_layout(order: tuple[int, ...]) -> str:
    return "".join(FILTER[len(order)][axis] for axis in order)


def options(node: Run, layout: str) -> dict[str, Any]:
    """What `conv` and its gradients are told of the window and the accumulator."""
    named = {name: node.derived(name) for name in ("groups", "padding", "stride", "dilation")}
    mode = MODES[node.attribute("convolution_mode")]
    return {**named, "mode": mode, "layout": layout, "accumulate": node.compute if node.compute == "float64" else None}


def result_dtype(node: Run, port: str) -> np.dtype:
    """The dtype that is asked of an op: the tensor's own where it is written, the compute dtype where it is held."""
    tensor = node.out(port)
    return np.dtype(node.compute) if is_held(tensor) else numpy_of(tensor)


def asked_dtype(node: Run, port: str) -> np.dtype:
    """The dtype that is asked of an op that returns floats of 16 bits and more; others are converted to."""
    return wide_or(result_dtype(node, port), node.compute)


def wide_or(wanted: np.dtype, compute: str) -> np.dtype:
    return wanted if wanted.name in WIDE else np.dtype(compute)


def served_dtype(wanted: np.dtype, operand: np.dtype, compute: str) -> np.dtype:
    """What `conv` is asked for: what it does not convert to itself is converted from the accumulator."""
    whole = ("int8", "int32") if compute == "int32" else ("int8",)
    names = (*WIDE, *whole) if operand.name == "int8" else (*WIDE, "float8_e4m3fn", "float8_e5m2")
    return wanted if wanted.name in names else np.dtype(compute)


def _fprop(node: Run) -> dict[str, Array]:
    return {"Y": fused_conv(node, result_dtype(node, "Y"), node.compute)}


def fused_conv(node: Run, out_dtype: Any, compute: str, **epilogue: Any) -> Array:
    """`conv` of a node, with an epilogue in the letters of its layout, which computes in `compute`.

    The result is in the order of its dimensions.
    """
    x, w = node.stored("image"), node.stored("weight")
    letters, layout, order = LETTERS[x.ndim], layout_of(node, "image"), node.order("weight")
    moved: dict[str, Any] = {
        k: into(v, letters, layout) if k in ("residual", "prior") else v for k, v in epilogue.items()
    }
    asked = served_dtype(np.dtype(out_dtype), x.dtype, compute)
    y = conv(
        into(x, letters, layout),
        w.transpose(order),
        filter_layout=filter_layout(order),
        out_dtype=asked,
        **options(node, layout),
        **moved,
    )
    return rounded(into(y, layout, letters), np.dtype(out_dtype))


def _dgrad(node: Run) -> dict[str, Array]:
    return {"DX": fused_dgrad(node, result_dtype(node, "DX"), node.compute)}


def fused_dgrad(node: Run, out_dtype: Any, compute: str, **epilogue: Any) -> Array:
    """`conv_dgrad` of a node, with an epilogue which computes in `compute`; in the order of its dimensions."""
    dy, w = node.stored("loss"), node.stored("filter")
    letters, layout, order = LETTERS[dy.ndim], layout_of(node, "loss"), node.order("filter")
    dim, wanted = node.out("DX").dim or (), np.dtype(out_dtype)
    shape = tuple(dim[letters.index(letter)] for letter in layout)
    moved: dict[str, Any] = {k: into(v, letters, layout) if k in ("prior", "x") else v for k, v in epilogue.items()}
    dx = conv_dgrad(
        into(dy, letters, layout),
        w.transpose(order),
        shape,
        filter_layout=filter_layout(order),
        out_dtype=served_dtype(wanted, dy.dtype, compute),
        **options(node, layout),
        **moved,
    )
    return rounded(into(dx, layout, letters), wanted)


def _wgrad(node: Run) -> dict[str, Array]:
    x, dy = node.stored("image"), node.stored("loss")
    letters, layout = LETTERS[x.ndim], layout_of(node, "image")
    wanted = result_dtype(node, "DW")
    dw = conv_wgrad(
        into(x, letters, layout),
        into(dy, letters, layout),
        node.out("DW").dim or (),
        filter_layout=FILTER[x.ndim],
        out_dtype=served_dtype(wanted, x.dtype, node.compute),
        **options(node, layout),
    )
    return {"DW": rounded(dw, wanted)}


WINDOW = {
    "padding": None,
    "pre_padding": None,
    "post_padding": None,
    "stride": None,
    "dilation": None,
    "convolution_mode": "CROSS_CORRELATION",
}
register(Kind("conv_fprop", ("image", "weight"), ("Y",), WINDOW, _infer_fprop, _fprop, calls=("conv",)))
register(Kind("conv_dgrad", ("loss", "filter"), ("DX",), WINDOW, _infer_dgrad, _dgrad, calls=("conv_dgrad",)))
register(Kind("conv_wgrad", ("image", "loss"), ("DW",), WINDOW, _infer_wgrad, _wgrad, calls=("conv_wgrad",)))


def _infer_matmul(node: Inference) -> None:
    a, b = node.dim("A"), node.dim("B")
    node.expect(2 <= len(a) <= 6, "A", "a tensor of 2 to 6 dimensions", a)
    node.expect(len(b) == len(a), "B", f"a tensor of {len(a)} dimensions, as A", b)
    node.expect(a[-1] == b[-2], "B.dim", f"K = {a[-1]} rows, as A has columns", b)
    _operands(node, "A", "B")
    padding = node.number("padding")
    fits = node.node.compute != "int32" or (abs(padding) < 2**31 and padding == int(padding))
    node.expect(fits, "padding", "an integer of 32 bits, for the compute dtype is int32", padding)
    batch = []
    for axis, (m, n) in enumerate(zip(a[:-2], b[:-2], strict=True)):
        fits = min(m, n) > 0 and max(m, n) % min(m, n) == 0
        node.expect(fits, "B.dim", f"a size at axis {axis} that divides A's {m} or is a multiple of it", b)
        batch.append(max(m, n))
    for port in ("M_override", "N_override", "K_override"):
        if node.has(port):
            dim = node.dim(port)
            node.typed(port, "int32", "int64")
            fits = len(dim) == len(a) and dim[-2:] == (1, 1)
            fits = fits and all(n in (1, m) for n, m in zip(dim[:-2], batch, strict=True))
            node.expect(fits, f"{port}.dim", f"batch sizes {tuple(batch)} or 1, then 1, 1", dim)
    node.output("C", (*batch, a[-2], b[-1]), "A")


def multiplied(node: Run, a: Array, b: Array, out_dtype: Any, compute: str, **epilogue: Any) -> Array:
    """`matmul` of a node's operands, with an epilogue, which computes in `compute`."""
    for axis in range(a.ndim - 2):  # heads of queries share heads of keys: an integer factor between batch sizes
        if 1 not in (a.shape[axis], b.shape[axis]) and a.shape[axis] != b.shape[axis]:
            a, b = (_repeated(v, axis, max(a.shape[axis], b.shape[axis])) for v in (a, b))
    asked = served_dtype(np.dtype(out_dtype), a.dtype, compute)
    wide = "float64" if node.compute == "float64" else None
    return rounded(matmul(a, b, accumulate=wide, out_dtype=asked, **epilogue), np.dtype(out_dtype))


def _matmul(node: Run) -> dict[str, Array]:
    a, b = node.stored("A"), node.stored("B")
    if a.dtype == np.int8 and node.compute != "int32":
        a, b = a.astype(node.compute), b.astype(node.compute)
    if node.has("K_override"):
        a = _up_to(a, -1, node.x("K_override"), 0)
        b = _up_to(b, -2, node.x("K_override"), 0)
    sized = [(port, axis) for port, axis in (("M_override", -2), ("N_override", -1)) if node.has(port)]
    c = multiplied(node, a, b, node.compute if sized else result_dtype(node, "C"), node.compute)
    for port, axis in sized:
        c = _up_to(c, axis, node.x(port), node.attribute("padding"))
    return {"C": c}


def _up_to(x: Array, axis: int, size: Array, fill: float) -> Array:
    """x along an axis up to a size, which may differ from matrix to matrix, and `fill` behind it."""
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    within = lax.broadcasted_iota(jnp.int32, shape, x.ndim + axis) < size.astype(np.int32)
    return jnp.where(within, x, jnp.asarray(fill, x.dtype))


def _repeated(v: Array, axis: int, size: int) -> Array:
    return v if v.shape[axis] == size else jnp.repeat(v, size // v.shape[axis], axis=axis)


register(
    Kind(
        "matmul",
        ("A", "B", "M_override?", "N_override?", "K_override?"),
        ("C",),
        {"padding": 0.0},
        _infer_matmul,
        _matmul,
        calls=("matmul",),
    )
)


def _infer_grouped(node: Inference) -> None:
    token, weight = node.rank("token", 3), node.rank("weight", 3)
    mode = node.choice("mode", ("NONE", "GATHER", "SCATTER"))
    node.expect(token[0] == 1, "token.dim", "(1, T, H)", token)
    node.expect(weight[1] == token[2], "weight.dim", f"(E, {token[2]}, N), as token has features", weight)
    node.shaped("first_token_offset", (weight[0], 1, 1), "one offset for each expert")
    node.typed("first_token_offset", "int32")
    _operands(node, "token", "weight")
    indexed = node.has("token_index")
    node.expect(indexed == (mode != "NONE"), "token_index", "given in modes GATHER and SCATTER alone", indexed)
    top = node.attribute("top_k")
    node.expect(top == 1 and not isinstance(top, bool), "top_k", "1, for token_index names each row itself", top)
    rows = token[1]
    if mode != "NONE":
        index = node.rank("token_index", 3)
        node.typed("token_index", "int32")
        node.expect(index[0] == 1 and index[2] == 1, "token_index.dim", "(1, T', 1)", index)
        if mode == "GATHER":
            rows = index[1]
        else:
            node.shaped("token_index", (1, token[1], 1), "a place for each row of token")
    node.output("OUT", (1, rows, weight[2]), "token")


def _experts(first: Array, rows: int) -> Array:
    """How many rows belong to none, those before the first offset, and to each expert: up to the next one's offset."""
    first = first.reshape(-1)
    ends = (jnp.zeros((1,), first.dtype), first, jnp.full((1,), rows, first.dtype))
    return jnp.diff(jnp.concatenate(ends))


def _grouped(node: Run) -> dict[str, Array]:
    token, weight = node.stored("token")[0], node.stored("weight")
    mode = node.attribute("mode")
    index = None if mode == "NONE" else node.x("token_index").reshape(-1)
    rows = token if mode != "GATHER" else token[index]
    sizes = _experts(node.x("first_token_offset"), rows.shape[0])
    if node.compute != "float32" or rows.dtype != weight.dtype or rows.dtype.name.startswith(("float8", "int")):
        rows, weight = rows.astype(node.compute), weight.astype(node.compute)
    # Rows of no expert are those of one of zeros.
    weight = jnp.concatenate([jnp.zeros_like(weight[:1]), weight])
    out = grouped_matmul(rows, weight, sizes, out_dtype=node.compute)
    if mode == "SCATTER":
        out = jnp.zeros_like(out).at[index].set(out)
    return {"OUT": out[None]}


register(
    Kind(
        "moe_grouped_matmul",
        ("token", "weight", "first_token_offset", "token_index?"),
        ("OUT",),
        {"mode": "NONE", "top_k": 1},
        _infer_grouped,
        _grouped,
        compute=("float32", "float64"),
    )
)


def _infer_grouped_bwd(node: Inference) -> None:
    dout, token, first = node.rank("doutput", 3), node.rank("token", 3), node.rank("first_token_offset", 3)
    node.expect(token[:2] == dout[:2] and token[0] == 1, "token.dim", f"(1, {dout[1]}, H), as doutput has rows", token)
    node.expect(first[1:] == (1, 1), "first_token_offset.dim", "(E, 1, 1)", first)
    node.typed("first_token_offset", "int32")
    _operands(node, "doutput", "token")
    node.output("DWEIGHT", (first[0], token[2], dout[2]), "token")


def _grouped_bwd(node: Run) -> dict[str, Array]:
    dout, token = node.wide("doutput")[0], node.wide("token")[0]
    sizes = _experts(node.x("first_token_offset"), token.shape[0])
    return {"DWEIGHT": grouped_matmul_wgrad(token, dout, sizes)[1:]}


register(
    Kind(
        "moe_grouped_matmul_bwd",
        ("doutput", "token", "first_token_offset"),
        ("DWEIGHT",),
        {},
        _infer_grouped_bwd,
        _grouped_bwd,
        compute=("float32", "float64"),
    )
)
