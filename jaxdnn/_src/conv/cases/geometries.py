"""What the cases of the matrix are made of: geometries, layouts, epilogues, pairs of dtypes.

Sizes are pairwise distinct, so that two axes that change places cannot go unseen.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxdnn._src.core import windows


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A convolution y = conv(x, w); every op takes its arrays from among x, w and y."""

    name: str
    batch: int
    sizes: tuple[int, ...]
    channels: int
    filters: int
    taps: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    mode: str = "cross_correlation"

    @property
    def window(self) -> windows.Window:
        settings = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return windows.window(**settings, sizes=self.sizes, taps=self.taps, negative=True)

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.window.out


@dataclasses.dataclass(frozen=True)
class Blend:
    """An epilogue. Parameters that are not multiples of 1/4 make it inexact on integers too."""

    name: str = ""
    alpha: float = 1.0
    beta: float = 0.0
    prior: bool = False  # given; with beta 0 it is all NaN and must not be read
    bias: bool = False
    residual: bool = False
    relu: bool = False  # backward data's x is given: the gradient is that before a relu
    activation: Any = None
    each: bool = False  # alpha is an array with a number for each channel, drawn around it

    @property
    def exact_on_integers(self) -> bool:
        name = self.activation[0] if isinstance(self.activation, tuple) else self.activation
        whole = self.alpha * 4 % 1 == 0 and self.beta * 4 % 1 == 0 and not self.each
        return whole and name in (None, "identity", "relu")


NO_BLEND = Blend()

_ASYMMETRIC = ((2, 1), (0, 3))
GEOMETRIES: dict[str, Geometry] = {
    g.name: g
    for g in (
        Geometry("plain", 2, (9, 8), 5, 7, (3, 4)),
        Geometry("same", 2, (10, 7), 5, 6, (3, 3), padding="SAME"),
        Geometry("same-stride", 2, (9, 8), 5, 6, (4, 3), padding="SAME", stride=(2, 3)),
        Geometry("stride", 3, (11, 10), 4, 5, (3, 2), stride=(2, 3), padding=1),
        Geometry("stride-past-taps", 2, (13, 12), 5, 4, (2, 3), stride=(3, 5)),
        Geometry("dilation", 2, (13, 11), 5, 3, (3, 4), dilation=(3, 2), padding=(2, 4)),
        Geometry("asymmetric", 3, (7, 8), 6, 4, (5, 2), padding=_ASYMMETRIC),
        Geometry("pointwise", 3, (7, 5), 13, 11, (1, 1)),
        Geometry("pointwise-stride", 2, (9, 8), 11, 7, (1, 1), stride=2),
        Geometry("patches", 2, (13, 10), 5, 6, (4, 3), stride=(4, 3)),
        Geometry("groups", 2, (8, 7), 6, 9, (3, 4), groups=3, padding=1),
        Geometry("depthwise", 3, (9, 11), 6, 6, (3, 5), groups=6, padding=(1, 2)),
        Geometry("depthwise-twice", 2, (9, 7), 5, 10, (4, 3), groups=5, stride=(1, 2)),
        Geometry("flipped", 2, (8, 9), 5, 7, (4, 3), padding=2, mode="convolution"),
        Geometry("all", 2, (15, 13), 6, 4, (3, 4), (2, 3), _ASYMMETRIC, (2, 1), 2, "convolution"),
        Geometry("all-same", 3, (11, 14), 8, 12, (3, 2), (3, 2), "SAME", (1, 3), 4),
        Geometry("one", 1, (1, 1), 1, 1, (1, 1)),
        Geometry("pixel", 1, (1, 1), 5, 7, (1, 1)),  # a filter gradient of single products: the sign of zero shows
        Geometry("outer", 3, (5, 4), 1, 6, (1, 1)),  # likewise forward
        Geometry("thin", 1, (1, 9), 1, 3, (1, 4), padding=((0, 0), (2, 1))),
        Geometry("only-padding", 2, (3, 2), 4, 5, (2, 3), padding=4, stride=3),
        Geometry("cropped", 2, (9, 11), 5, 6, (3, 2), padding=((-2, 1), (3, -4)), stride=(1, 2)),
        Geometry("global", 4, (6, 5), 7, 3, (6, 5)),
        Geometry("empty", 0, (6, 7), 3, 4, (3, 2), padding=1),
        Geometry("long-channels", 2, (4, 3), 512, 6, (3, 2), padding=1),
        Geometry("long-filters", 2, (3, 4), 6, 512, (2, 3), padding=1),
        Geometry("long-pixels", 5, (23, 29), 3, 4, (3, 2), padding=1),
        Geometry("1d", 3, (17,), 4, 5, (3,), padding=((2, 1),)),
        Geometry("1d-all", 2, (29,), 6, 9, (5,), (2,), ((3, 4),), (3,), 3, "convolution"),
        Geometry("1d-long-taps", 2, (64,), 3, 4, (31,), padding=15),
        Geometry("3d", 2, (5, 6, 7), 3, 4, (2, 3, 1), padding=1),
        Geometry("3d-all", 2, (7, 6, 9), 4, 6, (3, 2, 3), (2, 1, 3), ((1, 0), (0, 2), 1), (1, 2, 2), 2, "convolution"),
        Geometry("3d-patches", 2, (4, 6, 5), 3, 7, (2, 3, 1), stride=(2, 3, 1)),
        Geometry("wrap", 1, (3,), 140_000, 2, (1,)),
        # Sizes that GPU kernels have tiles for, which do not divide them; a stem has kernels of its own backwards.
        Geometry("wide", 2, (19, 17), 72, 136, (3, 3), padding=1),
        Geometry("wide-stride", 2, (22, 18), 64, 48, (3, 3), stride=2, padding=1),
        Geometry("wide-groups", 2, (11, 9), 64, 96, (3, 3), groups=2, padding=1),
        Geometry("wide-depthwise", 2, (19, 15), 64, 64, (3, 5), padding=(1, 2), groups=64),
        Geometry("wide-depthwise-stride", 3, (18, 14), 64, 64, (3, 3), stride=2, padding=1, groups=64),
        Geometry("wide-stem", 2, (12, 13), 3, 8, (3, 5), stride=2, padding=1),
        Geometry("vector", 2, (7, 6), 8, 12, (3, 2), stride=(2, 1), padding=1),
        Geometry("vector-1d", 3, (11,), 4, 8, (3,), dilation=2),
        Geometry("vector-3d", 2, (5, 4, 3), 8, 4, (2, 3, 2), padding=1),
    )
}
# Pairs in a geometry may be written as one number each; the ops take pairs or numbers, not both.
for _name, _g in GEOMETRIES.items():
    if isinstance(_g.padding, tuple):
        _pairs = tuple(p if isinstance(p, tuple) else (p, p) for p in _g.padding)
        GEOMETRIES[_name] = dataclasses.replace(_g, padding=_pairs)

FLAT = tuple(g for g in GEOMETRIES if not g.startswith(("vector", "wide")) and g != "wrap")
WIDE = tuple(g for g in GEOMETRIES if g.startswith("wide"))
# The geometry whose sums are long, for a result in each role.
LONG = {"x": "long-filters", "y": "long-channels", "w": "long-pixels", "b": "long-pixels"}
CHANNELS_LAST = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
LAYOUTS = (
    ("NCHW", None, "all"),
    ("NCHW", "KCRS", "stride"),
    ("NCHW", "HWIO", "groups"),
    ("NHWC", "KRSC", "all"),
    ("NHWC", "OIHW", "dilation"),
    ("CHWN", None, "all"),
    ("CHWN", "CRSK", "asymmetric"),
    ("NCHWc4", None, "vector"),
    ("NCHWc2", None, "vector"),
    ("NCW", None, "1d-all"),
    ("CWN", "SCK", "1d-all"),
    ("NCWc4", None, "vector-1d"),
    ("NCDHW", None, "3d-all"),
    ("CDHWN", "KTRSC", "3d-all"),
    ("NCDHWc4", None, "vector-3d"),
)
BLENDS = (
    Blend("scaled", alpha=-0.75),
    Blend("blended", alpha=1.3717, beta=-0.6931, prior=True),
    Blend("accumulating", beta=1.0, prior=True),
    Blend("prior-not-read", alpha=0.5, prior=True),
)
BEFORE_RELU = (  # of backward data
    Blend("joined-before-relu", beta=1.0, prior=True, relu=True),
    Blend("scaled-before-relu", alpha=-0.75, relu=True),
)
EPILOGUES = (
    Blend("bias", bias=True),
    Blend("bias-relu", bias=True, activation="relu"),
    Blend("bias-residual-relu", bias=True, residual=True, activation="relu"),
    Blend("everything-gelu", 1.3717, 0.5, True, True, True, activation="gelu"),
    Blend("gelu_tanh", activation="gelu_tanh"),
    Blend("sigmoid", bias=True, activation="sigmoid"),
    Blend("tanh", alpha=0.3, activation="tanh"),
    Blend("swish", bias=True, activation="swish"),
    Blend("softplus", activation="softplus"),
    Blend("elu", activation=("elu", 0.5)),
    Blend("leaky_relu", activation=("leaky_relu", 0.1)),
    Blend("each-bias-relu", alpha=1.3, bias=True, activation="relu", each=True),
    Blend("clipped_relu", activation=("clipped_relu", 1.5)),
)
INT8_BLENDS = (
    (Blend("bias-relu", bias=True, activation="relu"), None),
    (Blend("bias-residual", bias=True, residual=True), "int32"),
    (Blend("accumulating", beta=1.0, prior=True, bias=True), "int32"),
    (Blend("scaled", alpha=0.013), None),
    (Blend("scaled-each", alpha=0.013, each=True), None),
    (Blend("requantised-each", alpha=0.007, bias=True, residual=True, activation="relu", each=True), None),
    (Blend("requantised-relu", alpha=0.007, bias=True, residual=True, activation="relu"), None),
    (Blend("blended", alpha=0.02, beta=0.5, prior=True, bias=True), "f32"),
)


# Dtypes of operands and result.
OUTS = (
    ("bf16", "f32"),
    ("f32", "bf16"),
    ("int8", "int32"),
    ("f16", "f32"),
    ("e4m3fn", "f32"),
    ("f32", "f16"),
    ("int8", "f32"),
    ("e5m2", "bf16"),
)


def random_geometry(seed: int, index: int) -> Geometry:
    """A geometry drawn at random, the same for the same seed and index: all settings combined freely."""
    rng = np.random.default_rng([seed, index])
    rank = int(rng.choice([1, 2, 2, 2, 3]))
    groups = int(rng.choice([1, 1, 2, 3]))
    cg, kg = (int(v) for v in rng.integers(1, 6, 2))
    low, high = (0, (24, 11, 7)[rank - 1])
    taps, stride, dilation, sizes, padding = [], [], [], [], []
    for _ in range(rank):
        r, u, d = (int(rng.integers(1, top)) for top in (5, 4, 4))
        pads = tuple(int(v) for v in rng.integers(low, 4, 2))
        size = int(rng.integers(1, high))
        size = max(size, (r - 1) * d + 1 - sum(pads))  # a window has to fit
        for values, value in zip((taps, stride, dilation, sizes, padding), (r, u, d, size, pads), strict=True):
            values.append(value)
    named = str(rng.choice(["", "", "", "SAME"]))
    mode = str(rng.choice(["cross_correlation", "convolution"]))
    batch = int(rng.integers(1, 4))
    settings = (tuple(stride), named or tuple(padding), tuple(dilation), groups, mode)
    return Geometry(f"random-{index}", batch, tuple(sizes), cg * groups, kg * groups, tuple(taps), *settings)
