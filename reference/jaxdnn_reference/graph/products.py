"""Nodes that add products: convolutions and their gradients, matrix products, and those of experts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdnn_reference.conv import conv, conv_dgrad, conv_wgrad
from jaxdnn_reference.graph.tensors import LAYOUT, Array, Node


def _window(node: Node, spatial: int) -> dict[str, Any]:
    each = lambda name, default: node[name] or [default] * spatial
    low = node["padding"] or each("pre_padding", 0)
    high = node["padding"] or each("post_padding", 0)
    named = {"stride": tuple(each("stride", 1)), "dilation": tuple(each("dilation", 1))}
    return {**named, "padding": tuple(zip(low, high, strict=True)), "mode": node["convolution_mode"].lower()}


def _conv(node: Node, x: str, w: str) -> dict[str, Any]:
    layout, filter_layout = LAYOUT[len(node.dims[x])]
    groups = node.dims[x][1] // node.dims[w][1]
    return {**_window(node, len(layout) - 2), "layout": layout, "filter_layout": filter_layout, "groups": groups}


def conv_fprop(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": conv(x["image"], x["weight"], **_conv(node, "image", "weight"))}


def conv_data(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"DX": conv_dgrad(x["loss"], x["filter"], node.dims["DX"], **_conv(node, "DX", "filter"))}


def conv_filter(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"DW": conv_wgrad(x["image"], x["loss"], node.dims["DW"], **_conv(node, "image", "DW"))}


def matmul(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    """Matrix by matrix; of batches of different sizes the smaller one's matrices serve as many neighbours each."""
    batch, a, b = node.dims["C"][:-2], x["A"], x["B"]
    c = np.zeros(node.dims["C"])
    for at in np.ndindex(*batch):
        of = lambda v, at=at: v[tuple(i // (n // m) for i, n, m in zip(at, batch, v.shape, strict=False))]
        left, right = of(a), of(b)
        size = {port: int(of(x[port]).item()) if port in x else None for port in OVERRIDES}
        inner = size["K_override"]
        c[at] = left[:, :inner] @ right[:inner]
        for axis, port in enumerate(OVERRIDES[:2]):
            if size[port] is not None:
                np.moveaxis(c[at], axis, 0)[size[port] :] = node["padding"]
    return {"C": c}


OVERRIDES = ("M_override", "N_override", "K_override")


def _experts(x: Mapping[str, Array], rows: int) -> list[tuple[int, int]]:
    first = [int(v) for v in x["first_token_offset"].ravel()]
    return list(zip(first, [*first[1:], rows], strict=True))


def grouped(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    token, weight = x["token"][0], x["weight"]
    index = x["token_index"].astype(int).ravel() if "token_index" in x else None
    rows = token if index is None or node["mode"] != "GATHER" else token[index]
    out = np.zeros((len(rows), weight.shape[2]))
    for expert, (start, stop) in enumerate(_experts(x, len(rows))):
        out[start:stop] = rows[start:stop] @ weight[expert]
    if node["mode"] == "SCATTER":
        scattered = np.zeros_like(out)
        scattered[index] = out
        out = scattered
    return {"OUT": out[None]}


def grouped_bwd(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    token, dout = x["token"][0], x["doutput"][0]
    return {"DWEIGHT": np.stack([token[a:b].T @ dout[a:b] for a, b in _experts(x, len(token))])}


OPS = {
    "conv_fprop": conv_fprop,
    "conv_dgrad": conv_data,
    "conv_wgrad": conv_filter,
    "matmul": matmul,
    "moe_grouped_matmul": grouped,
    "moe_grouped_matmul_bwd": grouped_bwd,
}
