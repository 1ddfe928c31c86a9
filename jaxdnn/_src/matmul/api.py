"""The product of matrices: `matmul`.

A row of a times b is a convolution with one tap of a pixel whose channels are the row. So the engines of `conv` serve,
with their epilogues, types, levels and derivatives. The leading axes of a are the batch and the spatial axes of an
image where they are few enough, so that each may be sharded. Along leading axes of b the matrices are groups of
channels where a has several too, and further output channels where it has one.

Letters: M rows of a, K columns of a and rows of b, N columns of b; `...` are leading axes, which count matrices.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.conv import arguments
from jaxdnn._src.conv.geometry import Products
from jaxdnn._src.conv.primitive import ConvSpec
from jaxdnn._src.core import blending, checks, primitives, windows
from jaxdnn._src.core.annotations import Activation, Scale
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Dims, Factors, alike
from jaxdnn._src.core.rounding import rounded

SPATIAL = 3  # axes that a convolution has at most
# A leading axis: along which b has one matrix; both have several; a has one and b several.
SHARED, GROUPED, FURTHER = "shared", "grouped", "further"


@public
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    /,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    accumulate: DTypeLike | None = None,
    precision: str | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Multiplies matrices, then blends, adds a residual and a bias, and applies an activation.

    y[..., m, n] = act(alpha Σ_k a[..., m, k] b[..., k, n] + beta prior[..., m, n] + residual[..., m, n] + bias[n])

    Args:
      a: (..., M, K), at least two axes; float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, int8. M and
        the leading axes may be symbolic dimensions of `jax.export`.
      b: (..., K, N); the dtype of a, or the other float8. Its leading axes broadcast against those of a.
      transpose_a: whether a is stored as (..., K, M).
      transpose_b: whether b is stored as (..., N, K), as the weights of a linear layer in PyTorch are.
      bias: (N,). bias, residual and prior may have the dtype of a, of the result or of the accumulator.
      residual: added to the accumulator, the result's shape.
      activation: None, or one of those that `activation` lists: a name, a pair of a name and its parameter, or
        ("relu", lower, upper, slope).
      alpha: scales the product; a number, a scalar array, or an array that broadcasts to the result: the scales of
        quantised operands, of each row (M, 1), of each column (N,), or the product of both (M, N).
      beta: scales the prior; a number or a scalar array. Where it is zero the prior is not read: NaN in it is harmless.
      prior: the former result that is blended in, the result's shape.
      accumulate: the accumulator's dtype: None is float32 (float64 for float64, int32 for int8); may be a wider float.
      precision: None multiplies the stored values exactly; "tf32" lets float32 operands be cut to TF32's 10 fraction
        bits, for tensor cores. JAX's default matmul precision is not read.
      out_dtype: the result's dtype; None is that of a.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, (..., M, N), with the leading axes of a and b broadcast against each other.

    Differentiation: any order, forward and reverse, in a, b, bias, residual, prior, and alpha and beta if they are
      arrays, as of `conv`. int8 operands have none.

    Numerics: everything up to the last step is done in the accumulator's dtype, then converted once, to nearest even;
      of integers and float8 as `conv` says. An alpha that is an array is applied to the accumulator behind the
      engine's call, and so is what follows it. Determinism: the engines are those of `conv`. Unasked, kernels serve a
      product of two matrices with an activation, a residual or a prior; where there is none, and of a b with leading
      axes, XLA's are as fast or faster. Of such a b kernels guarantee run_to_run alone, for they choose by the number
      of matrices. The gradient in b is a sum over the rows, and over the leading axes that b lacks. Of a b with
      leading axes devices gather K and N, which are groups of channels, if these are sharded; leading axes and rows
      stay sharded.

    Raises:
      ValueError: shapes that do not fit, or an argument out of range.
      TypeError: dtypes that do not go together.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, w = jnp.ones((2, 7, 4)), jnp.ones((6, 4))
      >>> dnn.matmul(x, w, transpose_b=True, bias=jnp.ones(6), activation="gelu").shape
      (2, 7, 6)

    Sources: the leading axes are those of NumPy's matmul, without its vectors; the names of the transposes are
      TensorFlow's (BLAS's and ONNX's Gemm: transA, transB); alpha, beta and prior are BLAS's alpha, beta and C.
      cuDNN's graph operation Matmul takes any strides, and its epilogue is a graph of pointwise operations.
    """
    a, b = _matrices("a", a), _matrices("b", b)
    transposed, outer = checks.flag("transpose_a", transpose_a), checks.flag("transpose_b", transpose_b)
    _check_terms(a, b, transposed, outer)
    rows, n = _stored(a, transposed)[0], _stored(b, outer)[1]
    shape = (*_batch(a, b), rows, n)
    checks.countable("`matmul`", shape)
    types = arguments.types({"a": a, "b": b}, accumulate, precision, out_dtype)
    like = {"prior": (prior, shape), "bias": (bias, (n,)), "residual": (residual, shape)}
    operands = {name: None if value is None else _like(name, value, of) for name, (value, of) in like.items()}
    scales = _scales(alpha, beta, operands["prior"], shape)
    epilogue, further = arguments.epilogue_of(types, operands, scales, activation, a.dtype)
    line = windows.layout("NWC")
    spec = ConvSpec(
        geo=Products((1,), (1,), (1,), ((0, 0),), (1,), batched=b.ndim > 2),
        layout=line,
        filter=windows.filter_layout("WIO", line),
        accumulate=types.accumulate,
        precision=precision,
        out_dtype=types.out,
        engine=engine,
        level=required(determinism),
    )
    run = ft.partial(_run, a, b, (transposed, outer))
    return arguments.with_epilogue(run, spec, epilogue, further, len(shape) - 1)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _matrices(name: str, value: Any) -> Array:
    value = checks.array(name, value)
    if value.ndim < 2:
        raise ValueError(
            f"`{name}` must have at least two axes, of matrices, got shape {tuple(value.shape)}; "
            f"{name}[None, :] is a row, {name}[:, None] a column."
        )
    return value


def _check_terms(a: Array, b: Array, transposed: bool, outer: bool) -> None:
    """Checks that a has as many columns as b has rows, and that these and b's columns are known."""
    (rows, k), (terms, n) = _stored(a, transposed), _stored(b, outer)
    for name, size in (("a", k), ("b", terms), ("b", n)):
        if export.is_symbolic_dim(size):
            raise ValueError(f"`{name}` must have known sizes but for the rows of a and leading axes, got {size}.")
    if k == terms:
        return
    hint = ""
    for name, flag, fits in (("transpose_b", outer, n == k), ("transpose_a", transposed, rows == terms)):
        if fits and not hint:
            hint = f" ({name}={not flag} would fit)"
    order = f"(..., N, {k})" if outer else f"(..., {k}, N)"
    raise ValueError(f"`b` must have shape {order} for {k} columns of a, got {tuple(b.shape)}{hint}.")


def _stored(v: Array, transposed: bool) -> tuple[Any, Any]:
    """The numbers of rows and columns of matrices that may be stored transposed."""
    rows, columns = v.shape[-2:]
    return (columns, rows) if transposed else (rows, columns)


def _batch(a: Array, b: Array) -> tuple[Any, ...]:
    try:
        return tuple(jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`b` must have leading axes that broadcast against those of a, {tuple(a.shape[:-2])}, got "
            f"{tuple(b.shape[:-2])}."
        ) from error


def _like(name: str, value: Any, shape: tuple[Any, ...]) -> Array:
    value = checks.array(name, value)
    checks.shape(name, value, shape, "one a column of the result" if name == "bias" else "the result's")
    return value


def _scales(alpha: Any, beta: Any, prior: Array | None, shape: tuple[Any, ...]) -> tuple[Any, Any]:
    """Reads alpha, which may be an array that broadcasts to the result, and beta."""
    if checks.is_number(alpha) or not np.ndim(alpha):
        return blending.read_scales(alpha, beta, prior)
    alpha = checks.array("alpha", alpha)
    checks.dtype("alpha", alpha, blending.SCALES)
    own = (1,) * (len(shape) - alpha.ndim) + alpha.shape
    if len(own) != len(shape) or any(n not in (1, size) for n, size in zip(own, shape, strict=True)):
        raise ValueError(f"`alpha` must broadcast to the result's shape {shape}, got {tuple(alpha.shape)}.")
    alpha = rounded(alpha) if alpha.dtype.itemsize <= 2 else alpha
    return lax.expand_dims(alpha, range(len(shape) - alpha.ndim)), blending.read_scales(1.0, beta, prior)[1]


# ---- the product as a convolution ------------------------------------------------------------------------------------


def _run(a: Array, b: Array, stored: tuple[bool, bool], spec: ConvSpec, *operands: Array) -> Array:
    """The product by a spec of rows of pixels, with the operands of its epilogue; `stored` says what is transposed."""
    rank = max(a.ndim, b.ndim) - 2
    a, b = (lax.expand_dims(v, range(rank + 2 - v.ndim)) for v in (a, b))
    pairs = zip(a.shape[:rank], b.shape[:rank], strict=True)
    kinds = [SHARED if of_b == 1 else FURTHER if of_a == 1 else GROUPED for of_a, of_b in pairs]
    sizes = [m if kind is SHARED else n for kind, m, n in zip(kinds, a.shape, b.shape, strict=False)]
    rows, n = _stored(a, stored[0])[0], _stored(b, stored[1])[1]
    if any(kind is GROUPED and size == 0 for kind, size in zip(kinds, sizes, strict=True)):
        return jnp.zeros((*sizes, rows, n), spec.out_dtype)  # a convolution has no number of groups that is 0
    is_image = set(kinds) == {SHARED} and _is_image((*sizes, rows))
    if is_image or rank == 0:  # the convolution says how it is sharded
        return _folded(stored, spec, is_image, kinds, a, b, *operands)
    runs = [(kind, len([*run])) for kind, run in itertools.groupby(kinds)]

    def product(a: Array, b: Array, *operands: Array) -> Array:
        """With neighbouring axes of a kind as one, so that XLA sees that transposes undo each other."""
        arrays = (v if v.ndim == 1 else v.reshape(_joined(v.shape, runs)) for v in (a, b, *operands))
        return _folded(stored, spec, False, [kind for kind, _ in runs], *arrays).reshape(*sizes, rows, n)

    return primitives.composed(product, ft.partial(_factors, stored, spec), a, b, *operands)


def _joined(shape: tuple[Any, ...], runs: list[tuple[str, int]]) -> tuple[Any, ...]:
    """A shape with the leading axes of each run as one."""
    sizes = iter(shape[:-2])
    return (*(math.prod(itertools.islice(sizes, count)) for _, count in runs), *shape[-2:])


def _is_image(sizes: tuple[Any, ...]) -> bool:
    """Whether rows of these sizes are images: spatial axes of a convolution are known and not empty."""
    return 1 < len(sizes) <= 1 + SPATIAL and all(isinstance(n, int) and n > 0 for n in sizes[1:])


def _folded(
    stored: tuple[bool, bool], spec: ConvSpec, is_image: bool, kinds: list[str], a: Array, b: Array, *operands: Array
) -> Array:
    """The product whose leading axes, as many of a as of b, are folded into pixels, groups and output channels.

    Rows are the pixels of images, or each is an image of one pixel.
    """
    shared, grouped, further = ([i for i, k in enumerate(kinds) if k is kind] for kind in (SHARED, GROUPED, FURTHER))
    first, last = len(kinds), len(kinds) + 1
    (m, k), (terms, n) = ((last, first) if transposed else (first, last) for transposed in stored)
    rows, counts = [a.shape[i] for i in (*shared, m)], [b.shape[i] for i in (*grouped, *further)]
    groups, columns = math.prod(b.shape[i] for i in grouped), math.prod(counts) * b.shape[n]
    image = tuple(rows) if is_image else (math.prod(rows), 1)
    space, one = "DHW"[SPATIAL + 1 - len(image) :], (1,) * (len(image) - 1)
    layout = windows.layout(f"N{space}C")
    spec = dataclasses.replace(
        spec,
        geo=dataclasses.replace(
            spec.geo,
            sizes=image[1:],
            taps=one,
            stride=one,
            padding=((0, 0),) * len(one),
            dilation=one,
            groups=groups,
        ),
        layout=layout,
        filter=windows.filter_layout(f"{space}IO", layout),
    )
    x = _turned(a, further, (*shared, m, *grouped, k))
    w = _turned(b, shared, (terms, *grouped, *further, n))
    x = primitives.reshaped(x, (*image, groups * a.shape[k]))
    w = primitives.reshaped(w, (*one, b.shape[terms], columns))
    order = (*shared, first, *grouped, *further, last)  # of the result's axes

    def fold(name: str, v: Array) -> Array:
        if name != "bias":
            return primitives.reshaped(jnp.transpose(v, order), (*image, columns))
        if not counts:
            return v
        v = v.astype(spec.wide) if jnp.issubdtype(v.dtype, jnp.floating) else v  # its gradient is one sum, rounded once
        return jnp.broadcast_to(v[None], (math.prod(counts), b.shape[n])).reshape(columns)

    more = (fold(name, v) for name, v in zip(spec.epilogue.operands, operands, strict=True))
    y = primitives.call("conv", x, w, *more, spec=spec)
    y = primitives.reshaped(y, (*rows, *counts, b.shape[n]))
    return jnp.transpose(y, [order.index(i) for i in range(len(order))])


def _turned(v: Array, dropped: Sequence[int], order: Sequence[int]) -> Array:
    """v with its axes in an order, but for those of length 1 that are dropped: XLA joins no transpose of these."""
    kept = [i for i in range(v.ndim) if i not in dropped]
    return jnp.transpose(lax.squeeze(v, dropped), [kept.index(i) for i in order])


def _factors(stored: tuple[bool, bool], spec: ConvSpec, a: Any, b: Any, *operands: Any) -> Factors:
    """Every axis of the result may be sharded. a and b have all leading axes, of length 1 those they lack."""
    names: Dims = tuple(f"l{i}" for i in range(len(a.shape) - 2))
    sizes = [of_a if of_b == 1 else of_b for of_a, of_b in zip(a.shape[:-2], b.shape[:-2], strict=True)]
    left, right = (alike(names, sizes, v.shape[:-2], own) for v, own in ((a, "a"), (b, "b")))
    left = (*left, *(("k", "m") if stored[0] else ("m", "k")))
    right = (*right, *(("n", "k") if stored[1] else ("k", "n")))
    result = (*names, "m", "n")
    further = (("n",) if name == "bias" else result for name in spec.epilogue.operands)
    return Factors((left, right, *further), (result,), free=(*names, "m", "n"))
