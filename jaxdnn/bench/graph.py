"""The cases of `jaxdnn bench graph`: graphs that cuDNN fuses, by one builder for this library and cuDNN's frontend.

Ours is the plan that heuristic A puts first. Its peers: "single", the plan in which each node is a call of its own;
"lax", the graph as jax.numpy writes it, left to XLA; "cudnn", cuDNN's frontend, where its Python package is.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function
from jaxdnn.bench import frontend
from jaxdnn.bench.frontend import by_columns, channels_last
from jaxdnn.graph import Graph, Plan

HELD = jnp.float32  # what virtual tensors hold
EPSILON = 1e-5


class Builder(Protocol):
    """What a graph is built with: the graph itself, whose methods both libraries have, and what they call differently.

    `image` lies channels last, `tensor` as its axes stand, `columns` one column of a matrix behind the other; `output`
    marks what is returned. No dtype is the graph's.
    """

    g: Any
    phase: Any

    def image(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any: ...
    def tensor(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any: ...
    def columns(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any: ...
    def number(self, value: float) -> Any: ...
    def mode(self, name: str) -> Any: ...
    def output(self, tensor: Any, dtype: str | None = None, dim: Sequence[int] | None = None) -> Any: ...


class Ours:
    """The builder of this library's graphs."""

    def __init__(self, name: str, dtype: str) -> None:
        types = {"io_data_type": dtype, "intermediate_data_type": "float32", "compute_data_type": "float32"}
        self.g, self.phase = Graph(name, **types), "INFERENCE"

    def image(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any:
        return self.g.tensor(dim, channels_last(dim), dtype, name=name)

    def tensor(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any:
        return self.g.tensor(dim, None, dtype, name=name)

    def columns(self, name: str, dim: Sequence[int], dtype: str | None = None) -> Any:
        return self.g.tensor(dim, by_columns(dim), dtype, name=name)

    def number(self, value: float) -> Any:
        return value

    def mode(self, name: str) -> Any:
        return name

    def output(self, tensor: Any, dtype: str | None = None, dim: Sequence[int] | None = None) -> Any:
        tensor = tensor if dim is None else tensor.set_dim(dim)
        tensor = tensor if dtype is None else tensor.set_data_type(dtype)
        return tensor.set_output(True)


@dataclasses.dataclass(frozen=True)
class Fused(timed.Case):
    """A graph.

    Attributes:
      build: makes the graph with a builder, for so many images or rows.
      plain: the same in jax.numpy, of the arrays in the order of the graph's inputs, with the same results.
      work: floating-point operations of an image or row; 0 where memory binds.
      axis: that of the first input along which the images or rows are.
    """

    family: str
    name: str
    build: Callable[[Builder, int], Any]
    plain: Function
    batch: int
    work: int = 0
    axis: int = 0
    passes: tuple[str, ...] = ("forward",)
    tuned = True

    def graph(self, batch: int, dtype: Any) -> Graph:
        """The graph; what it writes is of the dtype."""
        made = Ours(self.name, jnp.dtype(dtype).name)
        self.build(made, batch)
        return made.g

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        return tuple(t.get_shape() for t in self.graph(batch, "float32").inputs())

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """Normal numbers in the tensors' dtypes; powers of two have no sign."""
        drawn = super().operands(batch, jnp.float32, seed)
        types = [t.get_data_type() for t in self.graph(batch, dtype).inputs()]
        given = (jnp.abs(a) if t == "float8_e8m0fnu" else a for a, t in zip(drawn, types, strict=True))
        return tuple(a.astype(t) for a, t in zip(given, types, strict=True))

    def plan(self, mode: str, arrays: Sequence[Array]) -> Plan:
        """The first plan of a heuristic mode for operands of these shapes and dtypes."""
        dtypes = [a.dtype.name for a in arrays if a.dtype.itemsize > 1]
        dtype = next((name for name in dtypes if name != "float32"), "float32")
        return self.graph(arrays[0].shape[self.axis], dtype).plan(mode)

    def ours(self, which: str, engine: str | None) -> Function:
        def run(*arrays: Array) -> Any:
            if engine is not None:
                raise NotImplementedError("`engine` must be None: the engines of a graph's steps are chosen one by one")
            return self.plan("A", arrays).function(*arrays)

        return run

    def xla(self, which: str) -> Function:
        return self.plain

    def others(self, which: str, batch: int, dtype: Any) -> dict[str, Function | timed.Prepared]:
        return {"lax": self.plain, "single": lambda *arrays: self.plan("FALLBACK", arrays).function(*arrays)}

    def clocks(self, which: str, batch: int, dtype: Any) -> dict[str, timed.Clock]:
        return {"cudnn": ft.partial(frontend.time, self, batch, jnp.dtype(dtype).name)}

    def flops(self, which: str, batch: int) -> int | None:
        return self.work * batch or None

    def bytes(self, which: str, batch: int, itemsize: int) -> int | None:
        if self.work:
            return None
        graph = self.graph(batch, {2: "bfloat16", 4: "float32"}[itemsize])
        size = lambda t: math.prod(t.get_shape()) * jnp.dtype(t.get_data_type()).itemsize
        return sum(map(size, (*graph.inputs(), *graph.outputs())))


def _precision(x: Array) -> Any:
    """float32 is multiplied as it is, as this library does."""
    return lax.Precision.HIGHEST if x.dtype == HELD else None


# Convolutions, 3 x 3 of so many channels and pixels


def _conv(b: Builder, x: Any, w: Any) -> Any:
    return b.g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])


def _plain_conv(x: Array, w: Array) -> Array:
    """Of an image NHWC and a filter KRSC."""
    numbers = ("NHWC", "OHWI", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=numbers, preferred_element_type=HELD, precision=_precision(x)
    )


def prologue(channels: int, size: int, b: Builder, batch: int) -> Any:
    """relu(scale x + bias) into the convolution, and the statistics of what it writes."""
    each = (1, channels, 1, 1)
    x, scale, bias = b.image("x", (batch, channels, size, size)), b.image("scale", each), b.image("bias", each)
    w = b.image("w", (channels, channels, 3, 3))
    y = b.output(_conv(b, b.g.relu(b.g.add(b.g.mul(x, scale), bias)).set_data_type(x.get_data_type()), w))
    return y, *(b.output(v, "float32") for v in b.g.genstats(y))


def plain_prologue(x: Array, scale: Array, bias: Array, w: Array) -> Any:
    given = jax.nn.relu(x.astype(HELD) * scale.astype(HELD) + bias.astype(HELD)).astype(x.dtype)
    y = _plain_conv(given, w).astype(x.dtype)
    seen = y.astype(HELD)
    each = (1, y.shape[-1], 1, 1)
    return y, *(v.sum((0, 1, 2)).reshape(each) for v in (seen, seen * seen))


def epilogue(channels: int, size: int, scaled: bool, b: Builder, batch: int) -> Any:
    """relu(scale conv + bias + residual), with a scale for each channel or without."""
    image, each = (batch, channels, size, size), (1, channels, 1, 1)
    x, w = b.image("x", image), b.image("w", (channels, channels, 3, 3))
    bias, residual = b.image("bias", each), b.image("residual", image)
    y = _conv(b, x, w)
    y = b.g.mul(y, b.image("scale", each)) if scaled else y
    return b.output(b.g.relu(b.g.add(b.g.add(y, bias), residual)))


def plain_epilogue(x: Array, w: Array, bias: Array, residual: Array, scale: Array | None = None) -> Any:
    y = _plain_conv(x, w)
    y = y if scale is None else y * scale.astype(HELD)
    return jax.nn.relu(y + bias.astype(HELD) + residual.astype(HELD)).astype(x.dtype)


def batch_norm(channels: int, size: int, b: Builder, batch: int) -> Any:
    """relu(batch_norm(x) + residual) in training."""
    image, each = (batch, channels, size, size), (1, channels, 1, 1)
    x, residual = b.image("x", image), b.image("residual", image)
    named = {name: b.image(name, each, "float32") for name in ("scale", "bias", "in_running_mean", "in_running_var")}
    y, *found = b.g.batchnorm(input=x, **named, epsilon=b.number(EPSILON), momentum=b.number(0.1))
    found = [b.output(v, "float32") for v in found]
    return *found, b.output(b.g.relu(b.g.add(y, residual)))


def plain_batch_norm(x: Array, residual: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Any:
    axes, seen, count = (0, 1, 2), x.astype(HELD), x.size // x.shape[-1]
    mu = seen.mean(axes, keepdims=True)
    var = jnp.square(seen - mu).mean(axes, keepdims=True)
    rstd = lax.rsqrt(var + EPSILON)
    y = jax.nn.relu((seen - mu) * (rstd * scale) + bias + residual.astype(HELD)).astype(x.dtype)
    unbiased = var * (count / max(count - 1, 1))
    return mu, rstd, 0.9 * mean + 0.1 * mu, 0.9 * variance + 0.1 * unbiased, y


# Matrix products of so many columns in and out


def layer(k: int, n: int, reduced: bool, b: Builder, batch: int) -> Any:
    """gelu(a w + bias), and the sums of its columns."""
    a, w, bias = b.tensor("a", (1, batch, k)), b.tensor("w", (1, k, n)), b.tensor("bias", (1, 1, n))
    y = b.output(b.g.gelu(b.g.bias(b.g.matmul(a, w), bias)))
    return (y, b.output(b.g.reduction(y, mode=b.mode("ADD")), "float32", (1, 1, n))) if reduced else (y,)


def plain_layer(reduced: bool, a: Array, w: Array, bias: Array) -> Any:
    y = jnp.matmul(a[0], w[0], preferred_element_type=HELD, precision=_precision(a)) + bias[0].astype(HELD)
    y = jax.nn.gelu(y, approximate=False).astype(a.dtype)[None]
    return (y, y.astype(HELD).sum(1, keepdims=True)) if reduced else (y,)


def quantised(k: int, n: int, b: Builder, batch: int) -> Any:
    """The product of float8 with its scales, its largest magnitude, and the result scaled for float8."""
    one = (1, 1, 1)
    a, w = b.tensor("a", (1, batch, k), "float8_e4m3fn"), b.tensor("w", (1, k, n), "float8_e4m3fn")
    scales = [b.tensor(name, one, "float32") for name in ("descale_a", "descale_w", "scale_y")]
    y = b.g.mul(b.g.mul(b.g.matmul(a, w), scales[0]), scales[1])
    amax = b.output(b.g.reduction(y, mode=b.mode("AMAX")), "float32", one)
    return amax, b.output(b.g.mul(y, scales[2]), "float8_e4m3fn")


def plain_quantised(a: Array, w: Array, descale_a: Array, descale_w: Array, scale: Array) -> Any:
    y = jnp.matmul(a[0], w[0], preferred_element_type=HELD)[None] * descale_a * descale_w
    return jnp.abs(y).max(keepdims=True), (y * scale).astype(a.dtype)


def scaled_blocks(k: int, n: int, data: str, scale: str, block: int, b: Builder, batch: int) -> Any:
    """gelu(a w + bias), of numbers with a scale for each block of neighbours along the sum."""
    a, of_a = b.tensor("a", (1, batch, k), data), b.tensor("scale_a", (1, batch, k // block), scale)
    w, of_w = b.columns("w", (1, k, n), data), b.columns("scale_w", (1, k // block, n), scale)
    bias = b.tensor("bias", (1, 1, n))
    wide_a = b.g.block_scale_dequantize(a, of_a, block_size=[1, 1, block])
    wide_w = b.g.block_scale_dequantize(w, of_w, block_size=[1, block, 1])
    return (b.output(b.g.gelu(b.g.bias(b.g.matmul(wide_a, wide_w), bias))),)


def plain_scaled_blocks(block: int, a: Array, of_a: Array, w: Array, of_w: Array, bias: Array) -> Any:
    """Of w and its scales as they lie, one column behind the other."""

    def wide(x: Array, scale: Array) -> Array:
        return (x[0].astype(HELD) * jnp.repeat(scale[0].astype(HELD), block, axis=1)).astype(bias.dtype)

    y = jnp.matmul(wide(a, of_a), wide(w, of_w).T, preferred_element_type=HELD, precision=_precision(bias))
    return (jax.nn.gelu(y + bias[0].astype(HELD), approximate=False).astype(bias.dtype)[None],)


# Normalisations of so many features


def rms_norm(features: int, out: str | None, b: Builder, batch: int) -> Any:
    """swish(rms_norm(x)), or rms_norm(x) scaled for float8."""
    x, scale = b.tensor("x", (batch, features, 1, 1)), b.tensor("scale", (1, features, 1, 1))
    by = b.tensor("by", (1, 1, 1, 1), "float32") if out else None
    y = b.g.rmsnorm(norm_forward_phase=b.phase, input=x, scale=scale, epsilon=b.number(EPSILON))[0]
    return (b.output(b.g.swish(y) if by is None else b.g.mul(y, by), out),)


def plain_rms_norm(x: Array, scale: Array, by: Array | None = None) -> Any:
    seen = x.astype(HELD)
    y = seen * lax.rsqrt(jnp.square(seen).mean(1, keepdims=True) + EPSILON) * scale.astype(HELD)
    return (jax.nn.silu(y).astype(x.dtype) if by is None else (y * by).astype(jnp.float8_e4m3fn),)


# Attention of so many heads, tokens and features


def attention(heads: int, tokens: int, features: int, b: Builder, batch: int) -> Any:
    """Causal, with a bias that is added to each head's scores."""
    q, k, v = (b.tensor(name, (batch, heads, tokens, features)) for name in "qkv")
    bias = b.tensor("bias", (1, heads, tokens, tokens))
    how = {"is_inference": True, "attn_scale": features**-0.5, "use_causal_mask": True}
    return (b.output(b.g.sdpa(q=q, k=k, v=v, bias=bias, **how)[0]),)


def plain_attention(q: Array, k: Array, v: Array, bias: Array) -> Any:
    return _plain_attention(q, k, v, lambda scores: scores + bias.astype(HELD))


def _plain_attention(q: Array, k: Array, v: Array, of_scores: Function) -> Any:
    """Causal."""
    scores = (
        jnp.einsum("bntd,bnsd->bnts", q, k, preferred_element_type=HELD, precision=_precision(q)) * q.shape[3] ** -0.5
    )
    causal = jnp.tri(q.shape[2], dtype=bool)[None, None]
    p = jax.nn.softmax(jnp.where(causal, of_scores(scores), -jnp.inf)).astype(q.dtype)
    y = jnp.einsum("bnts,bnsd->bntd", p, v, preferred_element_type=HELD, precision=_precision(q))
    return (y.astype(q.dtype),)


CAP, FALL = 30.0, 0.0625


def scored_attention(heads: int, tokens: int, features: int, b: Builder, batch: int) -> Any:
    """Causal; scores are capped, and fall with the distance, by a function of the scores."""
    q, k, v = (b.tensor(name, (batch, heads, tokens, features)) for name in "qkv")

    def near(g: Any, scores: Any) -> Any:
        capped = g.mul(g.tanh(g.mul(scores, b.number(1 / CAP))), b.number(CAP))
        far = g.sqrt(g.abs(g.sub(g.gen_index(scores, 2), g.gen_index(scores, 3))))
        return g.sub(capped, g.mul(far, b.number(FALL)))

    how = {"is_inference": True, "attn_scale": features**-0.5, "use_causal_mask": True, "score_mod": near}
    return (b.output(b.g.sdpa(q=q, k=k, v=v, **how)[0]),)


def plain_scored_attention(q: Array, k: Array, v: Array) -> Any:
    places = jnp.arange(q.shape[2], dtype=HELD)
    far = jnp.sqrt(jnp.abs(places[:, None] - places[None]))[None, None]
    return _plain_attention(q, k, v, lambda scores: CAP * jnp.tanh(scores / CAP) - FALL * far)


def narrow_attention(heads: int, tokens: int, features: int, b: Builder, batch: int) -> Any:
    """Causal, of floats of 8 bits whose factors are numbers; the result is scaled for 8 bits again."""
    q, k, v = (b.tensor(name, (batch, heads, tokens, features), "float8_e4m3fn") for name in "qkv")
    factors = [b.number(value) for value in (0.5, 0.25, 0.5, 1.0, 1.0, 2.0)]
    how = {"is_inference": True, "attn_scale": features**-0.5, "use_causal_mask": True}
    y, _, _, largest = b.g.sdpa_fp8(q, k, v, *factors, **how)
    return b.output(y, "float8_e4m3fn"), b.output(largest, "float32", (1, 1, 1, 1))


def plain_narrow_attention(q: Array, k: Array, v: Array) -> Any:
    """As jax.numpy multiplies them: in bfloat16, which holds them."""
    wide = (x.astype(jnp.bfloat16) for x in (q, k, v))
    y = _plain_attention(*wide, of_scores=lambda scores: scores * (0.5 * 0.25))[0].astype(HELD) * 0.5
    return (2 * y).astype(q.dtype), jnp.abs(y).max(keepdims=True)


# Numbers, their scales, and how many have one.
SCALED = {"mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32), "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16)}


def _cases() -> tuple[Fused, ...]:
    partial = ft.partial
    found = []
    for channels, size in ((64, 56), (256, 14)):
        name, work = f"{channels} at {size}", 18 * channels**2 * size**2
        build = partial(prologue, channels, size)
        found.append(Fused("conv", f"scale, bias, relu, conv, sums {name}", build, plain_prologue, 128, work))
        for scaled in (True, False):
            build, with_scale = partial(epilogue, channels, size, scaled), "scale, " if scaled else ""
            title = f"conv, {with_scale}bias, residual, relu {name}"
            found.append(Fused("conv", title, build, plain_epilogue, 128, work))
        build = partial(batch_norm, channels, size)
        found.append(Fused("batch norm", f"residual, relu {name}", build, plain_batch_norm, 128))
    for k, n in ((768, 3072), (4096, 11008)):
        for reduced in (False, True):
            name = f"bias, gelu{', sums' if reduced else ''} {k} to {n}"
            build, plain = partial(layer, k, n, reduced), partial(plain_layer, reduced)
            found.append(Fused("matmul", name, build, plain, 8192, 2 * k * n, 1))
        build = partial(quantised, k, n)
        found.append(Fused("matmul", f"float8, amax {k} to {n}", build, plain_quantised, 8192, 2 * k * n, 1))
        for title, kinds in SCALED.items():
            build, plain = partial(scaled_blocks, k, n, *kinds), partial(plain_scaled_blocks, kinds[2])
            found.append(Fused("matmul", f"{title}, bias, gelu {k} to {n}", build, plain, 8192, 2 * k * n, 1))
    for features in (768, 4096):
        for out in (None, "float8_e4m3fn"):
            build = partial(rms_norm, features, out)
            found.append(Fused("rms norm", f"{'float8' if out else 'swish'} {features}", build, plain_rms_norm, 8192))
    work = 4 * 16 * 2048 * 2048 * 128 // 2
    build = partial(attention, 16, 2048, 128)
    found.append(Fused("attention", "causal, bias, 16 heads of 2048", build, plain_attention, 8, work))
    build, plain = partial(scored_attention, 16, 2048, 128), plain_scored_attention
    found.append(Fused("attention", "causal, capped and falling scores, 16 heads of 2048", build, plain, 8, work))
    build, plain = partial(narrow_attention, 16, 2048, 128), plain_narrow_attention
    found.append(Fused("attention", "causal, float8, 16 heads of 2048", build, plain, 8, work))
    return tuple(found)


CASES = _cases()
