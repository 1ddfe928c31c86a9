"""What every op communicates on a mesh: a table of what its mathematics needs, and a call of each op.

A line names an op, the axes of its operands and of its results by letters, and what is communicated, forward/backward,
where all axes of a letter are sharded over all devices. Backward is from cotangents that are sharded as the results are
to gradients that are sharded as the operands are.

| sign | collective | why |
|---|---|---|
| - | none | results along the axis are independent of each other |
| h | collective-permute | windows reach over the edge of a device's part, which asks its neighbours for those rows |
| + | all-reduce | results, statistics or gradients of what is not sharded are added up over the axis |
| g | all-gather | a device needs the whole axis: the line says for what |
| c | all-reduce, on CPUs alone | the line says of what |
| t | all-to-all | elements that lie side by side in the operand do not in the result |
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxdnn as dnn

SIGNS = {"h": "collective-permute", "+": "all-reduce", "g": "all-gather", "t": "all-to-all"}
# N images of H x W pixels, C channels, K results of R x S or P x Q taps; T tokens of D features, V words; of F = R S C
# features the channels are the outer factor, and sharded if C is. "?" is sharded in any way: it depends on no operand.
SIZES = dict(N=8, H=16, W=16, C=32, K=64, R=3, S=3, P=2, Q=2, T=64, D=32, V=64, F=288)
X, LARGE, SMALL, W = (8, 16, 16, 32), (8, 32, 32, 32), (8, 8, 8, 32), (3, 3, 32, 64)

# An asterisk: all that is computed of small whole numbers is exact, in whatever order it is added up.
TABLE = """
conv*                     | NHWC RSCK -> NHWK          | N -/+ HW h/+h C +/- K -/+ | filters' gradients add over pixels
conv-strided*             | NHWC RSCK -> NHWK          | N -/+ HW h/+h C +/- K -/+ | the same
conv-depthwise*           | NHWC RS1C -> NHWC          | N -/+ HW h/+h C -/-       | a device has whole groups
conv_dgrad*               | NHWK RSCK -> NHWC          | N -/+ HW h/+h C -/+ K +/- | as conv
conv_wgrad*               | NHWC NHWK -> RSCK          | N +/- HW +h/h C -/+ K -/+ | as conv
conv_transpose*           | NHWC PQKC -> NHWK          | N -/+ HW -/+ C +/- K -/+  | as conv_dgrad; windows lie apart
conv_bgrad*               | NHWC -> C                  | NHW +/- C -/-             | adds over all but channels
pool*                     | NHWC -> NHWC               | NHWC -/-                  | windows do not overlap
pool-overlapping*         | NHWC -> NHWC               | NC -/- HW h/h             | windows reach over edges
pool-average              | NHWC -> NHWC               | NC -/- HW h/h             | windows reach over edges
pool_dgrad                | NHWC -> NHWC               | NHWC -/-                  | windows do not overlap
unpool*                   | NHWC -> NHWC               | NHWC -/-                  | windows do not overlap
adaptive_pool*            | NHWC -> NHWC               | NHWC -/-                  | windows do not overlap
global_pool               | NHWC -> N11C               | NC -/- HW g/-             | one order of additions, on any mesh
batch_norm                | NHWC C C -> NHWC C C C C   | NHW +/+ C -/-             | statistics and their gradients
batch_norm_dgrad          | NHWC NHWC -> NHWC C C      | NHW +/+ C -/-             | statistics and their gradients
batch_norm_inference      | NHWC C C -> NHWC           | NHW -/+ C -/-             | parameters' gradients
bn_finalize               | C C -> C C C C C C         | C -/-                     | element by element
bn_finalize_inference     | C C -> C C                 | C -/-                     | element by element
dbn_weight                | NHWC NHWC C C -> C C C C C | NHW +/+ C -/-             | statistics and their gradients
genstats*                 | NHWC -> C C                | NHW +/- C -/-             | sums over all but channels
group_norm                | NHWC C C -> NHWC           | N -/+ HW +/+ C -/-        | statistics; parameters' gradients
group_norm_dgrad          | NHWC NHWC -> NHWC C C      | N +/- HW +/+ C -/-        | statistics; parameters' gradients
instance_norm             | NHWC C -> NHWC             | N -/+ HW +/+ C -/-        | statistics; parameters' gradients
instance_norm_dgrad       | NHWC NHWC -> NHWC C C      | N +/- HW +/+ C -/-        | statistics; parameters' gradients
layer_norm                | NHWC C C -> NHWC           | NHW -/+ C +/+             | statistics; parameters' gradients
layer_norm_dgrad          | NHWC NHWC -> NHWC C C      | NHW +/- C +/+             | statistics; parameters' gradients
rms_norm                  | NHWC C -> NHWC             | NHW -/+ C +/+             | statistics; parameters' gradients
rms_norm_dgrad            | NHWC NHWC -> NHWC C C      | NHW +/- C +/+             | statistics; parameters' gradients
adaptive_layer_norm       | NHWC NC NC -> NHWC         | N -/- HW -/+ C +/+        | statistics; parameters' gradients
adaptive_layer_norm_dgrad | NHWC NHWC NC -> NHWC NC NC | N -/- HW +/+ C +/+        | statistics; parameters' gradients
lp_normalize              | NHWC -> NHWC               | NHW -/- C +/+             | norms over channels
lrn                       | NHWC -> NHWC               | NHW -/- C h/h             | windows of channels
lrn_dgrad                 | NHWC NHWC -> NHWC          | NHW -/- C h/h             | windows of channels
divisive_norm             | NHWC -> NHWC               | NC -/- HW h/h             | windows reach over edges
divisive_norm_dgrad       | NHWC NHWC -> NHWC NHWC     | NC -/- HW h/h             | windows reach over edges
softmax                   | NHWC -> NHWC               | NHW -/- C +/+             | a row's maximum and sum
softmax_dgrad             | NHWC NHWC -> NHWC          | NHW -/- C +/+             | a row's sum
logsumexp                 | NHWC -> NHW                | NHW -/- C +/+             | a row's maximum and sum
linear_cross_entropy      | TD DV ->                   | TDV +/+                   | logits, rows' sums; the mean
linear_cross_entropy-rows | TD DV -> T                 | T -/+ DV +/+              | logits, rows' sums; w's gradient
activation                | NHWC -> NHWC               | NHWC -/-                  | element by element
activation_dgrad          | NHWC NHWC -> NHWC          | NHWC -/-                  | element by element
dropout*                  | NHWC -> NHWC               | NHWC -/-                  | element by element
scale*                    | NHWC -> NHWC               | NHWC -/-                  | element by element
fill*                     | NHWC -> ?                  | NHWC -/-                  | element by element
add*                      | 1HWC NHWC -> NHWC          | N -/+ HWC -/-             | the gradient of what is broadcast
op_tensor*                | NHWC 1HWC -> NHWC          | N -/+ HWC -/-             | the gradient of what is broadcast
transform*                | NHWC -> NCHW               | NHWC -/-                  | a transposition
reduce*                   | NHWC -> NC                 | NC -/- HW +/-             | sums
reduce-max*               | NHWC -> NC                 | NC -/- HW +/+             | maxima, and where they are first
reduce-norm2              | NHWC -> NC                 | NC c/c HW +/+             | sums; on CPUs whether to scale one
im2col*                   | NHWC -> NHWF               | N -/- HW h/h C t/h        | a pixel's features lie tap by tap
col2im*                   | NHWF -> NHWC               | N -/- HW h/h C h/t        | a pixel's features lie tap by tap
resample                  | NHWC -> NHWC               | NC -/- HW h/h             | a result is made of neighbours
resample_dgrad            | NHWC -> NHWC               | NC -/- HW h/h             | a result is made of neighbours
pixel_shuffle*            | NHWC -> NHWC               | NHWC -/-                  | channels become pixels
pixel_unshuffle*          | NHWC -> NHWC               | NHWC -/-                  | pixels become channels
"""


CALLS: dict[str, Callable[..., Any]] = {
    "conv": lambda x, w: dnn.conv(x, w, padding=1),
    "conv-strided": lambda x, w: dnn.conv(x, w, padding=1, stride=2),
    "conv-depthwise": lambda x, w: dnn.conv(x, w, padding=1, groups=32),
    "conv_dgrad": lambda dy, w: dnn.conv_dgrad(dy, w, X, padding=1),
    "conv_wgrad": lambda x, dy: dnn.conv_wgrad(x, dy, W, padding=1),
    "conv_transpose": lambda x, w: dnn.conv_transpose(x, w, stride=2),
    "pool-overlapping": lambda x: dnn.pool(x, window=3, stride=1, padding=1),
    "pool-average": lambda x: dnn.pool(x, mode="average", window=3, stride=2, padding=1),
    "pool_dgrad": lambda dy: dnn.pool_dgrad(dy, LARGE, mode="average"),
    "unpool": lambda y: dnn.unpool(y, jnp.zeros(X, jnp.int32), LARGE),
    "adaptive_pool": lambda x: dnn.adaptive_pool(x, output_sizes=8, mode="max"),
    "batch_norm": lambda x, scale, bias: dnn.batch_norm(x, scale=scale, bias=bias),
    "bn_finalize": lambda total, squares: dnn.bn_finalize(total, squares, 2048),
    "group_norm": lambda x, scale, bias: dnn.group_norm(x, groups=8, scale=scale, bias=bias),
    "group_norm_dgrad": lambda dy, x: dnn.group_norm_dgrad(dy, x, groups=8),
    "instance_norm": lambda x, scale: dnn.instance_norm(x, scale=scale),
    "layer_norm": lambda x, scale, bias: dnn.layer_norm(x, scale=scale, bias=bias),
    "rms_norm": lambda x, scale: dnn.rms_norm(x, scale=scale),
    "linear_cross_entropy": lambda x, w: dnn.linear_cross_entropy(x, w, jnp.zeros(64, jnp.int32)),
    "linear_cross_entropy-rows": lambda x, w: dnn.linear_cross_entropy(
        x, w, jnp.zeros(64, jnp.int32), reduction="none"
    ),
    "activation": lambda x: dnn.activation(x, activation="gelu"),
    "activation_dgrad": lambda dy, x: dnn.activation_dgrad(dy, x, activation="gelu"),
    "dropout": lambda x: dnn.dropout(x, jax.random.key(3)),
    "scale": lambda x: dnn.scale(x, alpha=2.0),
    "fill": lambda x: dnn.fill(x, value=2.0),
    "op_tensor": lambda a, b: dnn.op_tensor(a, b, op="max"),
    "transform": lambda x: dnn.transform(x, out_layout="NCHW"),
    "reduce": lambda x: dnn.reduce(x, axis=(1, 2)),
    "reduce-max": lambda x: dnn.reduce(x, op="max", axis=(1, 2)),
    "reduce-norm2": lambda x: dnn.reduce(x, op="norm2", axis=(1, 2)),
    "im2col": lambda x: dnn.im2col(x, padding=1),
    "col2im": lambda y: dnn.col2im(y, X, padding=1),
    "resample": lambda x: dnn.resample(x, scale=2),
    "resample_dgrad": lambda dy: dnn.resample_dgrad(dy, SMALL),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      name: the op's, and after a hyphen what tells this call of it from others.
      operands, results: of each array its axes' letters; "1" is an axis of length 1.
      needs: by letter the signs of what is communicated forward and backward; what a line says of HW holds for each.
      exact: whether what is computed of small whole numbers is exact in any order of additions.
    """

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    needs: dict[str, tuple[str, str]]
    why: str
    exact: bool

    @property
    def op(self) -> str:
        return self.name.partition("-")[0]

    @property
    def call(self) -> Callable[..., Any]:
        return CALLS.get(self.name) or getattr(dnn, self.op)

    def sharded(self, axes: str, letter: str) -> list[bool]:
        """Which axes of an array are sharded where those of a letter are."""
        return [a == letter or (a, letter) == ("F", "C") for a in axes]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the operands."""
        return [tuple(SIZES.get(letter, 1) for letter in axes) for axes in self.operands]


def _row(line: str) -> Row:
    name, axes, needs, why = (part.strip() for part in line.split("|"))
    operands, _, results = axes.partition("->")
    words = needs.split()
    pairs = [(letters, signs.partition("/")) for letters, signs in zip(words[::2], words[1::2], strict=True)]
    found = {letter: (forward, backward) for letters, (forward, _, backward) in pairs for letter in letters}
    arrays = tuple(results.split()) or ("",)  # a scalar has no axes
    return Row(name.rstrip("*"), tuple(operands.split()), arrays, found, why, name.endswith("*"))


ROWS = {row.name: row for row in map(_row, TABLE.strip().splitlines())}
