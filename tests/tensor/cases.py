"""Cases of the tensor ops: each with the same formula written in jax.numpy alone, and with its definition.

The arrays are small whole numbers, all different where an extreme is taken, so that most results are exact.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.tensor.cases import PATCHES

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class TensorCase:
    """`ours`, `theirs` (jax.numpy) and `definition` take the same arrays."""

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any]
    theirs: Function
    static: tuple[Any, ...] = ()
    named: tuple[str, ...] = ()  # of the shapes, the last ones are these keyword arguments
    positive: bool = False
    distinct: bool = False

    def _call(self, function: Function, *arrays: Any) -> Any:
        count = len(self.shapes) - len(self.named)
        named = dict(zip(self.named, arrays[count:], strict=True))
        return function(*arrays[:count], *self.static, **self.options, **named)

    def ours(self, *arrays: Any) -> Any:
        return self._call(getattr(dnn, self.op), *arrays)

    def definition(self, *arrays: Any, **more: Any) -> Any:
        return self._call(ft.partial(getattr(reference, self.op), **more), *arrays)

    def arrays(self, dtype: Any, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng([seed, len(self.name)])
        return [self._values(rng, shape).astype(dtype) for shape in self.shapes]

    def _values(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        if self.distinct:
            values = rng.permutation(size) - size // 2
            values = values + (values >= 0)  # no zero, at which |x| has a kink
        else:
            values = rng.integers(-3, 4, size)
        return (np.abs(values) + 1 if self.positive else values).reshape(shape).astype(np.float64)


def _matrix(rows: int, columns: int, **options: Any) -> np.ndarray:
    """The matrix of a resampling along one axis, column by column, from the definition."""
    eye = np.eye(columns)[:, :, None]  # N = columns images, each with one pixel set
    sizes = {} if "scale" in options else {"output_sizes": rows}
    return reference.resample(eye, layout="NWC", **sizes, **options)[:, :, 0].T.astype(np.float64)


def _resampled(x: jax.Array, rows: int, columns: int, **options: Any) -> jax.Array:
    h, w = (jnp.asarray(_matrix(m, n, **options), x.dtype) for m, n in zip((rows, columns), x.shape[1:3], strict=True))
    return jnp.einsum("ph,qw,nhwc->npqc", h, w, x, precision="highest")


def _patches(x: jax.Array) -> jax.Array:
    """3 x 2 taps, stride (2, 1), padding ((1, 2), (0, 1)), dilation (1, 2), tap by tap."""
    padded = jnp.pad(x, [(0, 0), (1, 2), (0, 1), (0, 0)])
    p, q = (x.shape[1] + 3 - 3) // 2 + 1, x.shape[2] + 1 - 2
    rows = [padded[:, r : r + 2 * p - 1 : 2, 2 * s : 2 * s + q] for r in range(3) for s in range(2)]
    return jnp.concatenate(rows, axis=-1)


X = (2, 6, 4, 3)


def _transpose_of(function: Function, shape: tuple[int, ...]) -> Function:
    return lambda y: jax.linear_transpose(function, jax.ShapeDtypeStruct(shape, y.dtype))(y)[0]


def _folded(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)])
    n, h, w, c = padded.shape
    return jnp.einsum("nhiwjc->ncijhw", padded.reshape(n, h // 2, 2, w // 3, 3, c)).reshape(n, c * 6, h // 2, w // 3)


def _reductions() -> list[TensorCase]:
    formulas: dict[str, Function] = {
        "add": lambda x: jnp.einsum("nhwc->nc", x),
        "mul": lambda x: ft.reduce(jnp.multiply, [x[:, i, j] for i in range(3) for j in range(2)]),
        "min": lambda x: -jnp.max(-x, (1, 2)),
        "max": lambda x: jnp.max(x, (1, 2)),
        "amax": lambda x: jnp.maximum(jnp.max(x, (1, 2)), jnp.max(-x, (1, 2))),
        "avg": lambda x: jnp.einsum("nhwc->nc", x) / 6,
        "norm1": lambda x: jnp.sum(jnp.where(x < 0, -x, x), (1, 2)),
        "norm2": lambda x: jnp.linalg.norm(x.reshape(2, 6, 3), axis=1),
        "mul_no_zeros": lambda x: jnp.prod(jnp.where(x == 0, jnp.ones_like(x), x), (1, 2)),
    }
    distinct = ("min", "max", "amax", "norm1", "norm2", "mul_no_zeros")  # these have kinks or jumps
    return [
        TensorCase(
            f"reduce-{op}-{level}",
            "reduce",
            ((2, 3, 2, 3),),
            {"op": op, "axis": (1, 2), "determinism": level},
            formula,
            distinct=op in distinct,
        )
        for op, formula in formulas.items()
        for level in ("fast", "portable")
        if level != "fast" or op not in ("min", "max", "amax")
    ]


CASES = [
    TensorCase(
        "transform-blend",
        "transform",
        (X, (2, 18, 3, 2)),
        {"out_layout": "NCHW", "padding": ((0, 0), (1, 1)), "fold": (2, 3), "alpha": 2.0, "beta": -1.0},
        lambda x, prior: 2 * _folded(x) - prior,
        named=("prior",),
    ),
    TensorCase(
        "transform-vectors",
        "transform",
        (X,),
        {"out_layout": "NCHWc4"},
        lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, 1)])[:, None],
    ),
    TensorCase(
        "add",
        "add",
        ((1, 6, 1, 3), X),
        {"alpha": 2.0, "beta": -1.0},
        lambda a, c: 2 * jnp.broadcast_to(a, c.shape) - c,
    ),
    TensorCase(
        "add-portable",
        "add",
        ((1, 6, 1, 3), X),
        {"alpha": 2.0, "determinism": "portable"},
        lambda a, c: 2 * jnp.broadcast_to(a, c.shape) + c,
    ),
    *(
        TensorCase(
            f"op_tensor-{op}",
            "op_tensor",
            (X, (2, 1, 4, 1), X),
            {"op": op, "alpha1": 2.0, "alpha2": -3.0, "beta": 0.5, "determinism": level},
            lambda a, b, p, f=f: f(2 * a, jnp.broadcast_to(-3 * b, a.shape)) + p / 2,
            named=("prior",),
            distinct=True,
        )
        for op, f, level in (
            ("add", jnp.add, "fast"),
            ("mul", jnp.multiply, "portable"),
            ("min", lambda a, b: jnp.where(a > b, b, a), "fast"),
            ("max", lambda a, b: jnp.where(a < b, b, a), "portable"),
        )
    ),
    TensorCase("op_tensor-sqrt", "op_tensor", (X,), {"op": "sqrt"}, lambda a: a**0.5, static=(None,), positive=True),
    TensorCase("op_tensor-not", "op_tensor", (X,), {"op": "not"}, lambda a: 1 - a, static=(None,)),
    TensorCase("scale", "scale", (X, ()), {}, lambda x, a: jnp.einsum("nhwc,->nhwc", x, a), named=("alpha",)),
    TensorCase("fill", "fill", (X, ()), {}, lambda x, v: jnp.full(x.shape, 1.0, x.dtype) * v, named=("value",)),
    TensorCase("im2col", "im2col", (X,), PATCHES, _patches),
    TensorCase("col2im", "col2im", ((2, 4, 3, 18),), PATCHES, _transpose_of(_patches, X), static=(X,)),
    *(
        TensorCase(
            f"resample-{name}",
            "resample",
            (X,),
            {"output_sizes": (9, 3), **options},
            ft.partial(_resampled, rows=9, columns=3, **{k: v for k, v in options.items() if k != "determinism"}),
        )
        for name, options in {
            "nearest": {"method": "nearest"},
            "linear": {},
            "corners": {"coordinates": "align_corners"},
            "cubic": {"method": "cubic", "boundary": "zero"},
            "antialias": {"method": "cubic", "antialias": True},
            "portable": {"method": "lanczos3", "determinism": "portable"},
        }.items()
    ),
    TensorCase(
        "resample_dgrad",
        "resample_dgrad",
        ((2, 9, 3, 3),),
        {"method": "cubic"},
        _transpose_of(ft.partial(_resampled, rows=9, columns=3, method="cubic"), X),
        static=(X,),
    ),
    TensorCase(
        "pixel_shuffle",
        "pixel_shuffle",
        ((2, 3, 4, 12),),
        {"factor": (3, 2)},
        lambda x: jnp.einsum("nhwcij->nhiwjc", x.reshape(2, 3, 4, 2, 3, 2)).reshape(2, 9, 8, 2),
    ),
    TensorCase(
        "pixel_unshuffle",
        "pixel_unshuffle",
        (X,),
        {"factor": (3, 2), "order": "DCR"},
        lambda x: jnp.einsum("nhiwjc->nhwijc", x.reshape(2, 2, 3, 2, 2, 3)).reshape(2, 2, 2, 18),
    ),
    *_reductions(),
]
