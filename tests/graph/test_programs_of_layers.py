"""Programs of whole layers as users of cudnn-frontend write them, by its names, beside NumPy's formulas."""

import math
from typing import Any

import numpy as np
import pytest

from jaxdnn.graph import Graph, Tensor
from tests.graph.test_programs import Array, Program, check, convolved, image, softmax

PROGRAMS: dict[str, Program] = {}
HEADS, KEYS = (2, 4, 6, 8), (2, 2, 6, 8)


def program(build: Program) -> Program:
    """Registers a program, as in `test_programs`."""
    PROGRAMS[build.__name__] = build
    return build


def operands(g: Graph) -> list[Tensor]:
    return [g.tensor(name=name, dim=dim) for name, dim in zip("qkv", (HEADS, KEYS, KEYS), strict=True)]


def attended(q: Array, k: Array, v: Array, of_scores: Any) -> Array:
    """Of heads of keys and values that each serve two of queries."""
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    return softmax(of_scores(np.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(q.shape[3]))) @ v


QUERY, KEY = np.arange(6)[:, None], np.arange(6)[None]


@program
def attention_that_is_causal_by_a_function(g: Graph) -> Any:
    """The flexible attention of the samples: indices of rows and columns, compared and selected."""

    def causal(graph: Graph, scores: Tensor) -> Tensor:
        row = graph.gen_index(input=scores, axis=2).set_data_type("INT32")
        column = graph.gen_index(input=scores, axis=3).set_data_type("INT32")
        seen = graph.cmp_ge(input=row, comparison=column, compute_data_type="INT32").set_data_type("BOOLEAN")
        return graph.binary_select(input0=scores, input1=graph.tensor_scalar(-np.inf), mask=seen)

    q, k, v = operands(g)
    o, stats = g.sdpa(name="sdpa", q=q, k=k, v=v, attn_scale=1 / math.sqrt(8), score_mod=causal, generate_stats=False)
    assert stats is None
    return {"o": o}, lambda q, k, v: {"o": attended(q, k, v, lambda s: np.where(QUERY >= KEY, s, -np.inf))}


@program
def attention_with_a_soft_cap_and_relative_positions(g: Graph) -> Any:
    table = g.tensor(name="table", dim=(1, 4, 1, 1))

    def modified(graph: Graph, scores: Tensor) -> Tensor:
        capped = graph.mul(a=graph.tanh(input=graph.div(a=scores, b=5.0)), b=5.0)
        apart = graph.sub(a=graph.gen_index(scores, 3), b=graph.gen_index(scores, 2))
        return graph.add(a=capped, b=graph.mul(a=apart, b=table))

    q, k, v = operands(g)
    o, _ = g.sdpa(q=q, k=k, v=v, attn_scale=1 / math.sqrt(8), score_mod=modified, is_inference=True)

    def formula(q: Array, k: Array, v: Array, table: Array) -> dict[str, Array]:
        return {"o": attended(q, k, v, lambda s: 5 * np.tanh(s / 5) + table * (KEY - QUERY))}

    return {"o": o}, formula


@program
def rotary_embedding_of_pieces(g: Graph) -> Any:
    """As the sample of rotary embedding has it: slices, products and a concatenation."""
    x = g.tensor(name="x", dim=(2, 3, 5, 8))
    cos, sin = (g.tensor(name=name, dim=(1, 1, 5, 6)) for name in ("cos", "sin"))
    cut = lambda low, high: [slice(0, 2), slice(0, 3), slice(0, 5), slice(low, high)]
    turned, rest = g.slice(input=x, slices=cut(0, 6)), g.slice(input=x, slices=cut(6, 8))
    low, high = g.slice(input=x, slices=cut(0, 3)), g.slice(input=x, slices=cut(3, 6))
    swapped = g.concatenate(inputs=[g.neg(input=high), low], axis=3, in_place_index=None)
    both = g.add(a=g.mul(a=turned, b=cos), b=g.mul(a=swapped, b=sin))
    y = g.concatenate(inputs=[both, rest], axis=3)

    def formula(x: Array, cos: Array, sin: Array) -> dict[str, Array]:
        swapped = np.concatenate([-x[..., 3:6], x[..., :3]], axis=3)
        return {"y": np.concatenate([x[..., :6] * cos + swapped * sin, x[..., 6:]], axis=3)}

    return {"y": y}, formula


@program
def gated_layer(g: Graph) -> Any:
    """swish(x w) times x u, and the product of that."""
    x, w, u, down = (
        g.tensor(name=name, dim=(1, *dim))
        for name, dim in {"x": (6, 8), "w": (8, 10), "u": (8, 10), "down": (10, 8)}.items()
    )
    gate = g.swish(input=g.matmul(A=x, B=w), swish_beta=1.0)
    y = g.matmul(A=g.mul(a=gate, b=g.matmul(A=x, B=u)), B=down)

    def formula(x: Array, w: Array, u: Array, down: Array) -> dict[str, Array]:
        z = x @ w
        return {"y": (z / (1 + np.exp(-z)) * (x @ u)) @ down}

    return {"y": y}, formula


@program
def products_of_sizes_of_their_own(g: Graph) -> Any:
    """M and K of each product of the batch are read from tensors; what lies beyond them is the padding."""
    sizes = {name: g.tensor(name=name, dim=(2, 1, 1), data_type="INT32") for name in ("rows", "terms")}
    a, b = g.tensor(name="a", dim=(2, 5, 7)), g.tensor(name="b", dim=(2, 7, 4))
    y = g.matmul(name="GEMM", A=a, B=b, M_override=sizes["rows"], K_override=sizes["terms"], padding=0.0)

    def formula(a: Array, b: Array, rows: Array, terms: Array) -> dict[str, Array]:
        inner, row = np.arange(7) < terms, np.arange(5)[None, :, None] < rows
        return {"y": np.where(row, (a * inner) @ b, 0)}

    return {"y": y}, formula


@program
def adaptive_norm_and_its_gradient(g: Graph) -> Any:
    x, dy = (g.tensor(name=name, dim=(3, 5, 8)) for name in ("x", "dy"))
    scale, bias = (g.tensor(name=name, dim=(3, 1, 8)) for name in ("scale", "bias"))
    y, mean, rstd = g.adalayernorm(norm_forward_phase="TRAINING", input=x, scale=scale, bias=bias, epsilon=1e-2)
    dx, dscale, dbias = g.adalayernorm_backward(grad=dy, input=x, scale=scale, mean=mean, inv_variance=rstd)

    def formula(x: Array, dy: Array, scale: Array, bias: Array) -> dict[str, Array]:
        center = x - x.mean(2, keepdims=True)
        r = 1 / np.sqrt((center**2).mean(2, keepdims=True) + 1e-2)
        h, d = center * r, dy * scale
        dx = r * (d - d.mean(2, keepdims=True) - h * (d * h).mean(2, keepdims=True))
        parts = {"dscale": (dy * h).sum(1, keepdims=True), "dbias": dy.sum(1, keepdims=True)}
        return {"y": h * scale + bias, "dx": dx, **parts}

    return {"y": y, "dx": dx, "dscale": dscale, "dbias": dbias}, formula


@program
def convolution_with_a_leaky_relu_and_its_largest(g: Graph) -> Any:
    """The epilogue of quantised networks: a scale, a leaky relu, the largest magnitude, and another scale."""
    x, w = image(g, "x", (2, 8, 6, 5)), image(g, "w", (4, 8, 3, 3))
    s, t = (g.tensor(name=name, dim=(1, 1, 1, 1)) for name in ("s", "t"))
    y = g.conv_fprop(image=x, weight=w, pre_padding=[1, 1], post_padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    y = g.leaky_relu(input=g.scale(input=y, scale=s), negative_slope=0.2)
    amax = g.reduction(input=y, mode="AMAX").set_dim((1, 1, 1, 1))
    z = g.scale(input=y, scale=t)

    def formula(x: Array, w: Array, s: Array, t: Array) -> dict[str, Array]:
        y = convolved(x, w) * s
        y = np.where(y > 0, y, 0.2 * y)
        return {"amax": np.abs(y).max(keepdims=True), "z": y * t}

    return {"amax": amax, "z": z}, formula


@program
def gradient_of_a_block(g: Graph) -> Any:
    """The gradient of a convolution through a relu, and what batch normalisation before it needs of that."""
    dy, w, x, seen = (
        image(g, name, dim)
        for name, dim in {"dy": (2, 4, 6, 5), "w": (4, 8, 3, 3), "x": (2, 8, 6, 5), "seen": (2, 8, 6, 5)}.items()
    )
    mean, rstd, scale = (image(g, name, (1, 8, 1, 1)) for name in ("mean", "rstd", "scale"))
    d = g.conv_dgrad(loss=dy, filter=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_dim((2, 8, 6, 5))
    d = g.relu_backward(loss=d, input=seen)
    dscale, dbias, of_dy, of_x, of_one = g.dbn_weight(dy=d, input=x, mean=mean, inv_variance=rstd, scale=scale)
    dx = g.add(a=g.add(a=g.mul(a=d, b=of_dy), b=g.mul(a=x, b=of_x)), b=of_one)

    def formula(**a: Array) -> dict[str, Array]:
        d = convolved(a["dy"], a["w"][:, :, ::-1, ::-1].transpose(1, 0, 2, 3)) * (a["seen"] > 0)
        h = (a["x"] - a["mean"]) * a["rstd"]
        each = lambda v: v.sum((0, 2, 3), keepdims=True)
        dscale, dbias, n = each(d * h), each(d), 2 * 6 * 5
        return {"dscale": dscale, "dbias": dbias, "dx": a["scale"] * a["rstd"] * (d - dbias / n - h * dscale / n)}

    return {"dscale": dscale, "dbias": dbias, "dx": dx}, formula


@program
def softmax_and_its_gradient_of_pieces(g: Graph) -> Any:
    x, dp = (g.tensor(name=name, dim=(2, 5, 7)) for name in ("x", "dp"))
    most = g.reduction(input=x, mode="MAX").set_dim((2, 5, 1))
    e = g.exp(input=g.sub(a=x, b=most))
    total = g.reduction(input=e, mode="ADD").set_dim((2, 5, 1))
    p = g.div(a=e, b=total)
    lse = g.add(a=g.log(input=total), b=most)
    inner = g.reduction(input=g.mul(a=p, b=dp), mode="ADD").set_dim((2, 5, 1))
    dx = g.mul(a=p, b=g.sub(a=dp, b=inner))

    def formula(x: Array, dp: Array) -> dict[str, Array]:
        p = softmax(x)
        dx = p * (dp - (p * dp).sum(-1, keepdims=True))
        return {"p": p, "lse": np.log(np.exp(x).sum(-1, keepdims=True)), "dx": dx}

    return {"p": p, "lse": lse, "dx": dx}, formula


@program
def experts_with_a_gate(g: Graph) -> Any:
    """Rows by experts into twice the features, halves that gate each other, and rows by experts again."""
    token, up, down = (
        g.tensor(name=name, dim=dim) for name, dim in {"token": (1, 9, 8), "up": (3, 8, 12), "down": (3, 6, 8)}.items()
    )
    first = g.tensor(name="first", dim=(3, 1, 1), data_type="INT32")
    z = g.moe_grouped_matmul(token=token, weight=up, first_token_offset=first)
    half = lambda low: [slice(0, 1), slice(0, 9), slice(low, low + 6)]
    gate, value = g.slice(input=z, slices=half(0)), g.slice(input=z, slices=half(6))
    y = g.moe_grouped_matmul(token=g.mul(a=g.sigmoid(gate), b=value), weight=down, first_token_offset=first)

    def formula(token: Array, up: Array, down: Array, first: Array) -> dict[str, Array]:
        ends = [*first.ravel().astype(int), 9]
        rows = [(slice(ends[e], ends[e + 1]), e) for e in range(3)]
        y = np.zeros((1, 9, 8))
        for part, e in rows:
            z = token[:, part] @ up[e]
            y[:, part] = (z[..., 6:] / (1 + np.exp(-z[..., :6]))) @ down[e]
        return {"y": y}

    return {"y": y}, formula


@program
def volume_with_bias(g: Graph) -> Any:
    """Three dimensions of space, with strides."""
    x = g.tensor(name="x", dim=(1, 3, 4, 5, 6))
    w, b = g.tensor(name="w", dim=(2, 3, 2, 2, 2)), g.tensor(name="b", dim=(1, 2, 1, 1, 1))
    y = g.conv_fprop(image=x, weight=w, padding=[0, 0, 0], stride=[2, 1, 2], dilation=[1, 1, 1])
    y = g.bias(name="bias", input=y, bias=b)

    def formula(x: Array, w: Array, b: Array) -> dict[str, Array]:
        windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2, 2), (2, 3, 4))[:, :, ::2, :, ::2]
        return {"y": np.einsum("ncdhwrst,kcrst->nkdhw", windows, w) + b}

    return {"y": y}, formula


@program
def rows_without_statistics(g: Graph) -> Any:
    """In inference the statistics are None, as in the frontend."""
    x, scale, bias = (g.tensor(name=name, dim=dim) for name, dim in zip("xsb", ((4, 8), (1, 8), (1, 8)), strict=True))
    y, mean, rstd = g.layernorm(norm_forward_phase="INFERENCE", input=x, scale=scale, bias=bias, epsilon=1e-2)
    z, other = g.rmsnorm(norm_forward_phase="INFERENCE", input=x, scale=scale, epsilon=1e-2)
    assert (mean, rstd, other) == (None, None, None)

    def formula(x: Array, s: Array, b: Array) -> dict[str, Array]:
        center = x - x.mean(1, keepdims=True)
        y = center / np.sqrt((center**2).mean(1, keepdims=True) + 1e-2) * s + b
        return {"y": y, "z": x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-2) * s}

    return {"y": y, "z": z}, formula


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str):
    check(name, PROGRAMS[name])
