"""The networks: parameters as nested dicts and lists of NumPy arrays, and the loss over operations like `in_jax.Lax`.

Images are (N, spatial..., C) here; the operations may lay them out as they like. Texts are (N, T), numbers of tokens.
Parameters of one axis are those of norms and biases, of two axes matrices (in, out), of more axes filters
(taps..., in / groups, out).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
Ops = Any  # what `in_jax.Lax` has
Norm = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and the batch that it is measured on.

    Attributes:
      make: the parameters, from a generator.
      loss: of operations, parameters, images and labels; or texts, and of each token the next one.
      shape: of a batch, as published for one GPU.
      small: of a batch for a machine without a GPU.
      source: where the network is from.
      vocabulary: of texts, how many tokens there are; None where a batch is images.
    """

    make: Callable[[np.random.Generator], Any]
    loss: Callable[[Ops, Any, Array, Array], Array]
    shape: tuple[int, ...]
    small: tuple[int, ...]
    source: str
    vocabulary: int | None = None


CLASSES = 1000


def _filter(rng: np.random.Generator, *shape: int) -> np.ndarray:
    drawn = rng.standard_normal(shape, np.float32)
    drawn *= np.float32(math.sqrt(2 / math.prod(shape[:-1])))
    return drawn


def _norm(channels: int) -> dict[str, np.ndarray]:
    return {"scale": np.ones(channels, np.float32), "bias": np.zeros(channels, np.float32)}


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


# ---- ResNet-50 -------------------------------------------------------------------------------------------------------

RESNET_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride


def _resnet(rng: np.random.Generator) -> Any:
    blocks, c = [], 64
    for width, count, _ in RESNET_STAGES:
        for i in range(count):
            block = {
                "in": (_filter(rng, 1, 1, c, width), _norm(width)),
                "middle": (_filter(rng, 3, 3, width, width), _norm(width)),
                "out": (_filter(rng, 1, 1, width, 4 * width), _norm(4 * width)),
            }
            if i == 0:
                block["project"] = (_filter(rng, 1, 1, c, 4 * width), _norm(4 * width))
            blocks.append(block)
            c = 4 * width
    return {"stem": (_filter(rng, 7, 7, 3, 64), _norm(64)), "blocks": blocks, "head": _filter(rng, c, CLASSES)}


def _resnet_loss(ops: Ops, p: Any, x: Array, labels: Array) -> Array:
    def conv_norm(x: Array, layer: Any, *, stride: int = 1, padding: int = 0, **how: Any) -> Array:
        return ops.batch_norm(ops.conv(x, layer[0], stride=stride, padding=padding), layer[1], **how)

    x = ops.max_pool(conv_norm(x, p["stem"], stride=2, padding=3))
    strides = [stride if i == 0 else 1 for _, count, stride in RESNET_STAGES for i in range(count)]
    for i, (block, stride) in enumerate(zip(p["blocks"], strides, strict=True)):
        first, last = i == 0, i == len(strides) - 1  # between blocks the activation is the next one's
        y, x = ops.conv_skip(x, block["in"][0], None if first else "relu")
        residual = conv_norm(x, block["project"], stride=stride, activation=None) if "project" in block else x
        y = conv_norm(ops.batch_norm(y, block["in"][1]), block["middle"], stride=stride, padding=1)
        x = conv_norm(y, block["out"], residual=residual, activation="relu" if last else None)
    return ops.cross_entropy(ops.mean(x), p["head"], labels)


# ---- ConvNeXt-T ------------------------------------------------------------------------------------------------------

CONVNEXT_STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))


def _convnext(rng: np.random.Generator) -> Any:
    stages, c = [], CONVNEXT_STAGES[0][0]
    for width, count in CONVNEXT_STAGES:
        down = {} if width == c else {"down": (_norm(c), _filter(rng, 2, 2, c, width), _zeros(width))}
        blocks = [
            {
                "depthwise": (_filter(rng, 7, 7, 1, width), _zeros(width)),
                "norm": _norm(width),
                "wide": (_filter(rng, width, 4 * width), _zeros(4 * width)),
                "narrow": (_filter(rng, 4 * width, width), _zeros(width)),
                "scale": np.full(width, 0.1, np.float32),
            }
            for _ in range(count)
        ]
        stages.append({**down, "blocks": blocks})
        c = width
    stem = (_filter(rng, 4, 4, 3, 96), _zeros(96), _norm(96))
    return {"stem": stem, "stages": stages, "norm": _norm(c), "head": _filter(rng, c, CLASSES)}


def _convnext_loss(ops: Ops, p: Any, x: Array, labels: Array) -> Array:
    w, bias, norm = p["stem"]
    x = ops.layer_norm(ops.conv(x, w, bias, stride=4), norm)
    for stage in p["stages"]:
        if "down" in stage:
            norm, w, bias = stage["down"]
            x = ops.conv(ops.layer_norm(x, norm), w, bias, stride=2)
        for block in stage["blocks"]:
            channels = block["scale"].shape[0]
            y = ops.layer_norm(ops.conv(x, *block["depthwise"], padding=3, groups=channels), block["norm"])
            y = ops.dense(ops.activation(ops.dense(y, *block["wide"]), "gelu"), *block["narrow"])
            x = x + ops.multiply(y, block["scale"])
    return ops.cross_entropy(ops.layer_norm(ops.mean(x), p["norm"]), p["head"], labels)


# ---- a diffusion U-Net's blocks --------------------------------------------------------------------------------------

UNET_WIDTHS = (128, 256, 512)


def _unet(rng: np.random.Generator) -> Any:
    blocks, c = [], UNET_WIDTHS[0]
    for width in UNET_WIDTHS:
        for _ in range(2):
            block = {
                "in": (_norm(c), _filter(rng, 3, 3, c, width)),
                "out": (_norm(width), 0.1 * _filter(rng, 3, 3, width, width)),
            }
            blocks.append(block if c == width else {**block, "project": _filter(rng, 1, 1, c, width)})
            c = width
        blocks.append({"down": _filter(rng, 3, 3, c, c)})
    return {"stem": _filter(rng, 3, 3, 3, UNET_WIDTHS[0]), "blocks": blocks}


def _unet_loss(ops: Ops, p: Any, x: Array, labels: Array) -> Array:
    def norm_conv(x: Array, layer: Any, residual: Any = None) -> Array:
        return ops.conv(ops.group_norm(x, layer[0], 32, "silu"), layer[1], padding=1, residual=residual)

    x = ops.conv(x, p["stem"], padding=1)
    for block in p["blocks"]:
        if "down" in block:
            x = ops.conv(x, block["down"], stride=2, padding=1)
        else:
            residual = x
            if "project" in block:
                residual, x = ops.conv_skip(x, block["project"], None)
            x = norm_conv(norm_conv(x, block["in"]), block["out"], residual)
    return ops.mean_square(x)


# ---- ViT-B/16 --------------------------------------------------------------------------------------------------------

VIT_WIDTH, VIT_BLOCKS, VIT_HEADS, VIT_PATCH = 768, 12, 12, 16


def _vit(rng: np.random.Generator) -> Any:
    d = VIT_WIDTH
    blocks = [
        {
            "before": _norm(d),
            "qkv": (0.5 * _filter(rng, d, 3 * d), _zeros(3 * d)),
            "project": (0.5 * _filter(rng, d, d), _zeros(d)),
            "between": _norm(d),
            "wide": (_filter(rng, d, 4 * d), _zeros(4 * d)),
            "narrow": (0.5 * _filter(rng, 4 * d, d), _zeros(d)),
        }
        for _ in range(VIT_BLOCKS)
    ]
    patch = (_filter(rng, VIT_PATCH, VIT_PATCH, 3, d), _zeros(d))
    return {"patch": patch, "blocks": blocks, "norm": _norm(d), "head": _filter(rng, d, CLASSES)}


def _vit_loss(ops: Ops, p: Any, x: Array, labels: Array) -> Array:
    """A vision transformer without class token and positions: the head reads the mean of the tokens."""
    x = ops.tokens(ops.conv(x, *p["patch"], stride=VIT_PATCH))
    for block in p["blocks"]:
        qkv = ops.heads(ops.dense(ops.layer_norm(x, block["before"]), *block["qkv"]), 3 * VIT_HEADS)
        y = ops.attention(*(qkv[:, :, i * VIT_HEADS : (i + 1) * VIT_HEADS] for i in range(3)))
        x = x + ops.dense(y, *block["project"])
        y = ops.activation(ops.dense(ops.layer_norm(x, block["between"]), *block["wide"]), "gelu")
        x = x + ops.dense(y, *block["narrow"])
    return ops.cross_entropy(ops.layer_norm(x, p["norm"]).mean(1), p["head"], labels)


# ---- a language model of 1.2 billion parameters ----------------------------------------------------------------------

DECODER_WIDTH, DECODER_BLOCKS, DECODER_HEADS, DECODER_SHARED, DECODER_WIDE = 2048, 16, 32, 8, 8192
DECODER_VOCABULARY, DECODER_BASE = 128_256, 500_000.0


def _decoder(rng: np.random.Generator) -> Any:
    d, wide, shared = DECODER_WIDTH, DECODER_WIDE, DECODER_WIDTH * DECODER_SHARED // DECODER_HEADS
    ones = lambda: np.ones(d, np.float32)
    shapes = {"q": (d, d), "k": (d, shared), "v": (d, shared), "o": (d, d)}
    shapes |= {"gate": (d, wide), "up": (d, wide), "down": (wide, d)}
    blocks = [
        {"before": ones(), "between": ones(), **{name: _filter(rng, *shape) for name, shape in shapes.items()}}
        for _ in range(DECODER_BLOCKS)
    ]
    return {"embed": _filter(rng, DECODER_VOCABULARY, d), "blocks": blocks, "norm": ones()}


def _decoder_loss(ops: Ops, p: Any, tokens: Array, following: Array) -> Array:
    """Llama's decoder, whose head is its embedding."""
    x = ops.embed(p["embed"], tokens)
    for block in p["blocks"]:
        h = ops.rms_norm(x, block["before"])
        q = ops.rope(ops.heads(ops.dense(h, block["q"]), DECODER_HEADS), DECODER_BASE)
        k = ops.rope(ops.heads(ops.dense(h, block["k"]), DECODER_SHARED), DECODER_BASE)
        v = ops.heads(ops.dense(h, block["v"]), DECODER_SHARED)
        x = x + ops.dense(ops.attention(q, k, v, causal=True), block["o"])
        h = ops.rms_norm(x, block["between"])
        gate = ops.activation(ops.dense(h, block["gate"]), "silu")
        x = x + ops.dense(gate * ops.dense(h, block["up"]), block["down"])
    x = ops.rms_norm(x, p["norm"])
    return ops.cross_entropy(x.reshape(-1, DECODER_WIDTH), p["embed"].T, following.reshape(-1))


# ---- EfficientNet-B0 -------------------------------------------------------------------------------------------------

# expansion, width, blocks, stride, taps
EFFICIENTNET_STAGES = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip


def _efficientnet_blocks() -> list[tuple[int, int, int, int, int]]:
    """Each block's input width, inner width, output width, stride and taps."""
    found, c = [], 32
    for expansion, width, count, stride, taps in EFFICIENTNET_STAGES:
        for i in range(count):
            found.append((c, c * expansion, width, stride if i == 0 else 1, taps))
            c = width
    return found


def _efficientnet(rng: np.random.Generator) -> Any:
    blocks = []
    for c, inside, width, _, taps in _efficientnet_blocks():
        block = {
            "depthwise": (_filter(rng, taps, taps, 1, inside), _norm(inside)),
            "squeeze": (_filter(rng, inside, c // 4), _zeros(c // 4)),
            "excite": (_filter(rng, c // 4, inside), _zeros(inside)),
            "out": (_filter(rng, 1, 1, inside, width), _norm(width)),
        }
        blocks.append(block if c == inside else {**block, "in": (_filter(rng, 1, 1, c, inside), _norm(inside))})
    return {
        "stem": (_filter(rng, 3, 3, 3, 32), _norm(32)),
        "blocks": blocks,
        "last": (_filter(rng, 1, 1, 320, 1280), _norm(1280)),
        "head": _filter(rng, 1280, CLASSES),
    }


def _efficientnet_loss(ops: Ops, p: Any, x: Array, labels: Array) -> Array:
    """EfficientNet without stochastic depth and dropout, which cost next to nothing."""

    def conv_norm(x: Array, layer: Any, **how: Any) -> Array:
        return ops.batch_norm(ops.conv(x, layer[0], **how), layer[1], activation="silu")

    x = conv_norm(x, p["stem"], stride=2, padding=1)
    for block, (c, inside, width, stride, taps) in zip(p["blocks"], _efficientnet_blocks(), strict=True):
        y = x
        if "in" in block:
            y, x = ops.conv_skip(x, block["in"][0], None)
            y = ops.batch_norm(y, block["in"][1], activation="silu")
        y = conv_norm(y, block["depthwise"], stride=stride, padding=taps // 2, groups=inside)
        gate = ops.activation(ops.dense(ops.mean(y, keep=True), *block["squeeze"]), "silu")
        y = y * ops.activation(ops.dense(gate, *block["excite"]), "sigmoid")
        residual = x if stride == 1 and c == width else None
        x = ops.batch_norm(ops.conv(y, block["out"][0]), block["out"][1], activation=None, residual=residual)
    return ops.cross_entropy(ops.mean(conv_norm(x, p["last"])), p["head"], labels)


# ---- 3-D U-Net -------------------------------------------------------------------------------------------------------

UNET3D_WIDTHS = (32, 64, 128, 256, 320)


def _unet3d(rng: np.random.Generator) -> Any:
    def pair(c: int, k: int) -> list[Any]:
        return [(_filter(rng, 3, 3, 3, c, k), _norm(k)), (_filter(rng, 3, 3, 3, k, k), _norm(k))]

    widths = UNET3D_WIDTHS
    steps = list(itertools.pairwise(widths))
    return {
        "down": [pair(c, k) for c, k in ((1, widths[0]), *steps)],
        "up": [{"wider": _filter(rng, 2, 2, 2, c, k), "pair": pair(2 * c, c)} for c, k in reversed(steps)],
        "last": (_filter(rng, 1, 1, 1, widths[0], 3), _zeros(3)),
    }


def _unet3d_loss(ops: Ops, p: Any, x: Array, labels: Array) -> Array:
    """As MLPerf's: instance normalisation, stride 2 downwards, transposed convolutions upwards; a plain loss."""

    def pair(x: Array, layers: Any, stride: int = 1) -> Array:
        for w, norm in layers:
            x = ops.conv(x, w, stride=stride, padding=1)
            x, stride = ops.group_norm(x, norm, norm["scale"].shape[0], "relu"), 1
        return x

    kept = []
    for i, layers in enumerate(p["down"]):
        x = pair(x, layers, 1 if i == 0 else 2)
        kept.append(x)
    for level, below in zip(p["up"], reversed(kept[:-1]), strict=True):
        x = pair(ops.concatenate(ops.conv_transpose(x, level["wider"], 2), below), level["pair"])
    return ops.mean_square(ops.conv(x, *p["last"]))


NETWORKS = {
    "resnet50": Network(
        _resnet, _resnet_loss, (128, 224, 224, 3), (2, 64, 64, 3), "He et al. 2015, stride on the 3 x 3 (v1.5)"
    ),
    "convnext": Network(_convnext, _convnext_loss, (128, 224, 224, 3), (2, 64, 64, 3), "ConvNeXt-T, Liu et al. 2022"),
    "unet": Network(
        _unet, _unet_loss, (32, 128, 128, 3), (1, 16, 16, 3), "the downward blocks of a diffusion U-Net, Ho et al. 2020"
    ),
    "vit": Network(_vit, _vit_loss, (128, 224, 224, 3), (1, 64, 64, 3), "ViT-B/16, Dosovitskiy et al. 2020"),
    "decoder": Network(
        _decoder, _decoder_loss, (4, 2048), (1, 32), "Llama 3.2 1B, Meta 2024", vocabulary=DECODER_VOCABULARY
    ),
    "efficientnet": Network(
        _efficientnet, _efficientnet_loss, (128, 224, 224, 3), (2, 64, 64, 3), "EfficientNet-B0, Tan and Le 2019"
    ),
    "unet3d": Network(
        _unet3d,
        _unet3d_loss,
        (2, 128, 128, 128, 1),
        (1, 16, 16, 16, 1),
        "MLPerf's 3-D U-Net (KiTS19), Isensee et al.",
    ),
}
