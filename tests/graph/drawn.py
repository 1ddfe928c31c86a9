"""Random graphs: nodes that read what is there already, of every kind whose inputs may be inexact."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdnn.graph import Graph, Tensor
from tests.graph.examples import Example, array, last

Draw = np.random.Generator
IMAGE = (2, 4, 5, 3)  # what every node keeps, but for those that end in another shape
SMOOTH = ("tanh", "sigmoid", "gelu", "gelu_approx_tanh", "swish", "elu", "softplus", "sin", "cos", "erf", "neg", "abs")
BINARY = ("add", "sub", "mul", "max", "min", "add_square")
COMPARE = ("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le")


class Drawn:
    """A graph while it grows: `images` are the tensors of the common shape, by kind of number."""

    def __init__(self, rng: Draw, io: str, virtual: str) -> None:
        self.rng, self.io, self.arrays = rng, io, {}
        self.g = Graph("drawn", io_data_type=io, intermediate_data_type=virtual)
        self.images: list[Tensor] = [self.given(IMAGE) for _ in range(2)]

    def given(
        self, dim: tuple[int, ...], low: float | None = None, high: float = 2.0, dtype: str | None = None, **how: Any
    ) -> Tensor:
        stride = last(dim) if len(dim) > 2 and self.rng.random() < 0.7 and not how else None
        tensor = self.g.tensor(dim, stride, dtype, **how)
        self.arrays[tensor] = (low, high)
        return tensor

    def image(self) -> Tensor:
        """One of the last few, so that chains are long."""
        return self.images[-int(self.rng.integers(1, min(4, len(self.images)) + 1))]

    def operand(self) -> Tensor:
        """One of the dtype of what is given, as factors of products have to be."""
        x = self.image()
        return x if x in self.arrays else self.g.identity(x).set_data_type(self.io)

    def pick(self, names: tuple[str, ...]) -> str:
        return names[int(self.rng.integers(len(names)))]


def unary(d: Drawn) -> Tensor:
    return getattr(d.g, d.pick(SMOOTH))(d.image())


def relu(d: Drawn) -> Tensor:
    slope, clip = (float(d.rng.choice([0.0, 0.25])), [None, 1.5][int(d.rng.integers(2))])
    return d.g.relu(d.image(), slope, 0.0, clip)


def binary(d: Drawn) -> Tensor:
    other = d.image() if d.rng.random() < 0.5 else d.given([(1, 4, 1, 1), (1, 1, 1, 1), IMAGE][int(d.rng.integers(3))])
    return getattr(d.g, d.pick(BINARY))(d.image(), other)


def root(d: Drawn) -> Tensor:
    """Of numbers that are positive for sure."""
    square = d.g.add_square(float(d.rng.uniform(0.5, 1)), d.image())
    return getattr(d.g, d.pick(("sqrt", "rsqrt", "log", "reciprocal")))(square)


def select(d: Drawn) -> Tensor:
    """Both ways are within the bound where the comparison could go either way."""
    mask = getattr(d.g, d.pick(COMPARE))(d.image(), d.given((1, 1, 1, 1)))
    return d.g.binary_select(d.image(), d.image(), mask)


def convolution(d: Drawn) -> Tensor:
    groups = int(d.rng.choice([1, 2, 4]))
    w = d.given((4, 4 // groups, 3, 1), -0.4, 0.4)
    return d.g.conv_fprop(d.operand(), w, pre_padding=[1, 0], post_padding=[1, 0])


def block(d: Drawn) -> Tensor:
    """A convolution with an epilogue, of which each part may be missing."""
    y = convolution(d)
    if d.rng.random() < 0.5:
        y = d.g.scale(y, 0.5)
    if d.rng.random() < 0.3:
        y = d.g.mul(y, d.given((1, 4, 1, 1)))
    if d.rng.random() < 0.7:
        y = d.g.bias(y, d.given((1, 4, 1, 1)))
    if d.rng.random() < 0.7:
        y = d.g.add(y, d.image())
    if d.rng.random() < 0.3:
        d.images.append(d.g.cmp_gt(y, 0.0).set_data_type("float32"))
    return d.g.relu(y) if d.rng.random() < 0.7 else y


def gradient(d: Drawn) -> Tensor:
    """Of a convolution, with what else reaches its image and the gradient of a relu, if any."""
    w = d.given((4, 4, 3, 1), -0.4, 0.4)
    y = d.g.conv_dgrad(d.operand(), w, padding=[1, 0]).set_dim(IMAGE)
    y = d.g.add(d.image(), y) if d.rng.random() < 0.4 else y
    return d.g.relu_backward(y, d.given(IMAGE)) if d.rng.random() < 0.4 else y


def product(d: Drawn) -> Tensor:
    return d.g.matmul(d.operand(), d.given((2, 1, 3, 3), -0.5, 0.5))


def layer(d: Drawn) -> Tensor:
    """A product with scales before it and an epilogue, of which each part may be missing."""
    a = d.operand()
    a = d.g.mul(a, d.given((2, 1, 5, 1))).set_data_type(d.io) if d.rng.random() < 0.3 else a
    b = d.given((2, 1, 3, 3), -0.5, 0.5)
    b = d.g.transpose(b, [0, 1, 3, 2]).set_data_type(d.io) if d.rng.random() < 0.3 else b
    y = d.g.matmul(a, b)
    for dim in ((1, 1, 1, 1), (1, 4, 1, 1)):
        y = d.g.mul(y, d.given(dim)) if d.rng.random() < 0.4 else y
    for dim in ((1, 1, 1, 3), (2, 1, 5, 1)):
        y = d.g.add(y, d.given(dim)) if d.rng.random() < 0.4 else y
    y = d.g.add(d.image(), y) if d.rng.random() < 0.4 else y
    return d.g.relu(y) if d.rng.random() < 0.7 else y


BLOCKS = (("float8_e4m3fn", "float8_e8m0fnu"), ("float8_e5m2", "float8_e8m0fnu"), ("float4_e2m1fn", "float8_e4m3fn"))


def few_bits(d: Drawn, dim: tuple[int, ...]) -> Tensor:
    """Numbers with scales of blocks along the last axis, dequantised: given so, or quantised from what is given."""
    data, scale = BLOCKS[int(d.rng.integers(3))]
    block = int(d.rng.choice([4, 16, 32]))
    if d.rng.random() < 0.4:
        x, s = d.g.block_scale_quantize(d.given(dim, -3.0, 3.0, "float32"), block)
        return d.g.block_scale_dequantize(x.set_data_type(data), s.set_data_type(scale), block)
    sizes, order = (*dim[:-1], dim[-1] // block), "NONE"
    if d.rng.random() < 0.5:
        sizes, order = (*dim[:-2], -(-dim[-2] // 128) * 128, -(-sizes[-1] // 4) * 4), "F8_128x4"
    s = d.given(sizes, 0.25, 2.0, scale, reordering_type=order)
    return d.g.block_scale_dequantize(d.given(dim, -1.0, 1.0, data), s, block)


def scaled_blocks(d: Drawn) -> Tensor:
    """A product of numbers of few bits, or of such and wide ones, with an epilogue."""
    a = few_bits(d, (2, 4, 5, 32))
    b = d.g.transpose(few_bits(d, (2, 1, 3, 32)), [0, 1, 3, 2]).set_data_type("float32")
    b = b if d.rng.random() < 0.7 else d.given((2, 1, 32, 3), -0.2, 0.2, "float32")
    dtype = "bfloat16" if d.rng.random() < 0.3 and b not in d.arrays else "float32"
    y = d.g.matmul(a.set_data_type(dtype), b if dtype == "float32" else b.set_data_type(dtype))
    y = d.g.mul(y, d.given((1, 1, 1, 1), 0.05, 0.1)) if d.rng.random() < 0.6 else y
    y = d.g.add(y, d.given((1, 1, 1, 3))) if d.rng.random() < 0.4 else y
    y = d.g.add(d.image(), y) if d.rng.random() < 0.4 else y
    return d.g.gelu(y) if d.rng.random() < 0.5 else y


def of_scores(d: Drawn, keys: int) -> Any:
    """A function of scores, or none: it reads tables that are given, of sizes that are 1 or those of the scores."""
    kind = int(d.rng.integers(4))
    if kind == 0:
        return None
    table = d.given([(1, 4, 1, keys), (2, 1, 5, 1), (1, 1, 1, 1)][int(d.rng.integers(3))], -1.0, 1.0, "float32")
    axis = int(d.rng.integers(1, 4))

    def function(g: Graph, s: Tensor) -> Tensor:
        if kind == 1:
            return g.mul(g.tanh(g.mul(s, 0.5)), 2.0)
        s = g.add(g.tanh(s), table)
        if kind == 2:
            return s
        index = g.gen_index(s, axis).set_data_type("int32")
        return g.binary_select(s, g.mul(s, 0.5), g.cmp_lt(index, 2.0))

    return function


def attended(d: Drawn) -> Tensor:
    """Attention of what is given, by masks and functions of scores, in 8 bits too."""
    keys, shared, narrow = int(d.rng.integers(3, 7)), int(d.rng.choice([1, 2, 4])), d.rng.random() < 0.4
    dtype = d.pick(("float8_e4m3fn", "float8_e5m2")) if narrow else None
    q, k, v = (d.given(dim, -1.0, 1.0, dtype) for dim in ((2, 4, 5, 8), (2, shared, keys, 8), (2, shared, keys, 3)))
    how: dict[str, Any] = {"attn_scale": float(d.rng.uniform(0.2, 1)), "score_mod": of_scores(d, keys)}
    if d.rng.random() < 0.4:
        how |= {"use_causal_mask": True, "sliding_window_length": [None, 3][int(d.rng.integers(2))]}
    if d.rng.random() < 0.3:
        how["sink_token"] = d.given((1, 4, 1, 1), -1.0, 1.0, "float32")
    if not narrow:
        return d.g.sdpa(q, k, v, **how)[0]
    factor: Callable[[], Any] = lambda: 0.5 if d.rng.random() < 0.3 else d.given((1, 1, 1, 1), 0.5, 1.5, "float32")
    o, _, largest, most = d.g.sdpa_fp8(q, k, v, *(factor() for _ in range(6)), **how)
    for tensor in (largest, most):
        _ = d.rng.random() < 0.3 and tensor.set_output(True).set_data_type("float32")
    return o


def norm(d: Drawn) -> Tensor:
    op = d.pick(("layernorm", "instancenorm", "batchnorm", "rmsnorm"))
    dim = (1, 1, 5, 3) if op in ("layernorm", "rmsnorm") else (1, 4, 1, 1)
    scale, bias = d.given(dim), d.given(dim)
    if op == "batchnorm":
        return d.g.batchnorm(d.image(), scale, bias, epsilon=0.5)[0]
    return getattr(d.g, op)("INFERENCE", d.image(), scale, bias, epsilon=0.5)[0]


def normed(d: Drawn) -> Tensor:
    """With what the norm may take up."""
    y = norm(d)
    y = d.g.add(y, d.image()) if d.rng.random() < 0.5 else y
    return d.g.relu(y)


def pool(d: Drawn) -> Tensor:
    mode = d.pick(("MAXPOOL", "AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING"))
    return d.g.resample(d.image(), mode, [3, 3], [1, 1], [1, 1], [1, 1])


def spread(d: Drawn) -> Tensor:
    """A reduction, and what is left of an image when it is subtracted."""
    dim = [(2, 4, 1, 1), (1, 4, 1, 1), (2, 1, 5, 3)][int(d.rng.integers(3))]
    mode = d.pick(("ADD", "AVG", "MAX", "MIN", "AMAX", "NORM1", "NORM2"))
    return d.g.sub(d.image(), d.g.reduction(d.image(), mode).set_dim(dim))


def moved(d: Drawn) -> Tensor:
    """Turned over and back, in another shape between."""
    x = d.g.transpose(d.image(), [0, 2, 3, 1])
    y = d.g.reshape(x, reshape_mode="LOGICAL").set_dim((2, 15, 4))
    y = d.g.tanh(y)
    return d.g.transpose(d.g.reshape(y, reshape_mode="LOGICAL").set_dim((2, 5, 3, 4)), [0, 3, 1, 2])


def joined(d: Drawn) -> Tensor:
    parts = [d.g.slice(d.operand(), [slice(0, 2), slice(a, b), slice(0, 5), slice(0, 3)]) for a, b in ((0, 1), (1, 4))]
    return d.g.concatenate(parts, 1)


GROW: tuple[Callable[[Drawn], Tensor], ...] = (
    *(unary, relu, binary, binary, root, select, convolution, block, block, gradient),
    *(layer, layer, product, norm, normed, pool, spread, moved, joined),
)
NEWER = (scaled_blocks, scaled_blocks, attended, attended, layer, binary, unary)


def graph(seed: int, grow: tuple[Callable[[Drawn], Tensor], ...] = GROW) -> Example:
    """A graph of three to eight parts."""
    rng = np.random.default_rng([20261126, seed])
    io = str(rng.choice(["float32", "bfloat16", "float16"], p=[0.5, 0.3, 0.2]))
    d = Drawn(rng, io, str(rng.choice(["float32", "bfloat16"], p=[0.8, 0.2])))
    for _ in range(int(rng.integers(3, 9))):
        made = grow[int(rng.integers(len(grow)))](d)
        # Squares and products must not grow beyond what float16 holds.
        made = d.g.tanh(made) if rng.random() < 0.3 else made
        if rng.random() < 0.25:
            made.set_output(True)
        d.images.append(made)
    d.images[-1].set_output(True)
    inputs = set(d.g.inputs())
    arrays = {t.uid: array(t, rng, *ends) for t, ends in d.arrays.items() if t in inputs}
    return d.g, arrays


def integers(seed: int) -> Example:
    """A graph of sums, products, maxima and moves of small integers, in which nothing is rounded."""
    rng = np.random.default_rng([20261127, seed])
    d = Drawn(rng, "float32", "float32")
    grow: Any = (
        *(relu_exact, binary, convolution, block, gradient, product, layer),
        *(moved_exact, joined, spread_exact),
    )
    for _ in range(int(rng.integers(2, 5))):
        made = d.g.min(d.g.max(grow[int(rng.integers(len(grow)))](d), -3.0), 3.0)
        d.images.append(made)
    d.images[-1].set_output(True)
    inputs = set(d.g.inputs())
    whole = lambda t: rng.integers(-2, 3, t.get_shape()).astype(np.float32)
    return d.g, {t.uid: whole(t) for t in d.arrays if t in inputs}


def relu_exact(d: Drawn) -> Tensor:
    return d.g.relu(d.image(), upper_clip=2.0)


def moved_exact(d: Drawn) -> Tensor:
    return d.g.transpose(d.g.neg(d.g.transpose(d.image(), [3, 2, 0, 1])), [2, 3, 1, 0])


def spread_exact(d: Drawn) -> Tensor:
    mode = d.pick(("ADD", "MAX", "MIN", "AMAX", "NORM1"))
    return d.g.sub(d.image(), d.g.reduction(d.image(), mode).set_dim((2, 4, 1, 1)))
