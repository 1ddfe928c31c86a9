"""Convolution, its backward passes, and transposed convolution, in one to three dimensions.

Letters: N batch, C channels of x, K channels of y, G groups, Cg = C / G and Kg = K / G, [D,] H, W spatial sizes of x,
[O,] P, Q of y, [T,] R, S taps of w. Formulas are written for two spatial axes; the others drop an axis or add one.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.conv import arguments, skip
from jaxdnn._src.conv.arguments import Options
from jaxdnn._src.conv.skip import SkipSpec
from jaxdnn._src.core import checks, frames, selection
from jaxdnn._src.core.annotations import Activation, Padding, PerAxis, Scale
from jaxdnn._src.core.determinism import require
from jaxdnn._src.core.explain import public


@public
def conv(
    x: ArrayLike,
    w: ArrayLike,
    /,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
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
    """Convolves, then blends, adds a residual and a bias, and applies an activation.

    c[n,p,q,k] = Σ_{r,s,i} x[n, p u + r d - a, q v + s e - b, Cg ⌊k / Kg⌋ + i] w[r, s, i, k]
    y = act(alpha c + beta prior + residual + bias)

    with stride (u, v), dilation (d, e), low padding (a, b), i < Cg, and x zero outside.

    Args:
      x: the input, (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, int8.
        N, and it alone, may be a symbolic dimension of `jax.export`.
      w: the filter, (R, S, C/G, K) for filter layout HWIO; the dtype of x, or the other float8. Vectors of channels in
        `layout` do not oblige it to have any: OIHW or KCRS, say, serve every layout.
      stride: steps between windows, one integer or one per spatial axis.
      padding: zeros around x: one integer, one per spatial axis, a (low, high) pair per spatial axis, "VALID" (none) or
        "SAME" (⌈size / stride⌉ outputs, an odd zero goes to the high side; of "SAME_LOWER" to the low side). A negative
        number cuts off that many elements of x.
      dilation: steps between the taps of a window, one integer or one per spatial axis.
      groups: G; output channel k reads the input channels of group ⌊k / Kg⌋ only. G = C is depthwise convolution.
      mode: "cross_correlation", or "convolution", which reverses the filter's spatial taps and nothing else.
      layout: the axes of x, prior, residual and the result: NWC, NCW, CWN, NHWC, NCHW, CHWN, NDHWC, NCDHW, CDHWN, or
        with channels in vectors of 32 (any number), NC/32HW32: NCWc32, NCHWc32, NCDHWc32, of shape (N, C/32, H, W, 32).
        Their C and K must be multiples of 32. With groups=1 fill them up with zeros: channels of x, input channels of w
        (so that both say the same C), and output channels of w; the surplus channels of y are to be dropped.
      filter_layout: the axes of w in cuDNN's letters (K C T R S, as in KCRS) or JAX's (O I D H W, as in HWIO), in any
        order; KCRSc32 is (K, C/32, R, S, 32). None: HWIO (WIO, DHWIO) for channels last, KCRSc32 for vectors, else
        OIHW.
      bias: (K,). bias, residual and prior may have the dtype of x, of the result or of the accumulator.
      residual: added to the accumulator, the result's shape.
      activation: None, or one of those that `activation` lists: a name, a pair of a name and its parameter, or
        ("relu", lower, upper, slope).
      alpha: scales the convolution; a number, a scalar array, or (K,), a scale for each output channel, as int8 filters
        have. What alpha and beta are as arrays is applied by XLA behind the engine, to its accumulator.
      beta: scales the prior; a number or a scalar array. Where it is zero the prior is not read: NaN in it is harmless.
      prior: the former result that is blended in, the result's shape.
      accumulate: the accumulator's dtype: None is float32 (float64 for float64, int32 for int8); may be a wider float.
      precision: None multiplies the stored values exactly; "tf32" lets float32 operands be cut to TF32's 10 fraction
        bits, for tensor cores. JAX's default matmul precision is not read.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, (N, P, Q, K) for layout NHWC, with P = ⌊(H + low + high - (R - 1) d - 1) / u⌋ + 1.

    Differentiation: any order, forward and reverse, in x, w, bias, residual, prior, and alpha and beta if they are
      arrays. At an activation's kink the derivative is as `activation` says. int8 operands have none. The derivative
      in beta reads the prior, also where beta is zero.

    Numerics: everything up to the last step is done in the accumulator's dtype, then converted once, to nearest even.
      int8 products are added in int32, which wraps; if alpha is 1, beta 0 or 1, bias, residual and prior are integers
      and the activation is None or relu, so is the rest, else the rest is done in float32. Results of int8 saturate;
      float8 results overflow to NaN (e4m3fn) or infinity (e5m2). Padding is zeros that are multiplied too, so that an
      infinite w makes NaN of them, except by engines of which `jaxdnn.explain` says that they leave out padding.
      Determinism: see `jaxdnn.explain`.

    Raises:
      ValueError: shapes that do not fit, or an argument out of range.
      TypeError: dtypes that do not go together.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, w = jnp.ones((1, 5, 4, 2)), jnp.ones((3, 3, 2, 6))
      >>> dnn.conv(x, w, padding=1, stride=2, bias=jnp.ones(6), activation="relu").shape
      (1, 3, 2, 6)

    Sources: cuDNN's cudnnConvolutionForward and cudnnConvolutionBiasActivationForward, whose formula for alpha and
      beta this follows (alpha1, alpha2). PyTorch's conv2d and ONNX's Conv are mode "cross_correlation"; SciPy's
      convolve is "convolution". PyTorch's weight is KCRS, Flax's is HWIO.
    """
    options = Options(stride, padding, dilation, groups, mode, accumulate, precision, out_dtype, engine, determinism)
    frame = frames.frame(layout, filter_layout)
    x, w = frame.array("x", x), frame.filter("w", w)
    spec = arguments.spec(frame, options, x.shape, w.shape, {"x": x, "w": w})
    extras = dict(alpha=alpha, beta=beta, prior=prior, bias=bias, residual=residual, activation=activation)
    return frame.restore(arguments.call("conv", frame, spec, x, w, **extras, scale_each=True))


@public
def conv_dgrad(
    dy: ArrayLike,
    w: ArrayLike,
    x_shape: Sequence[int],
    /,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    x: ArrayLike | None = None,
    accumulate: DTypeLike | None = None,
    precision: str | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Backward data: the gradient of a convolution in its input.

    dx[n,h,w,c] = alpha Σ_{p,q,r,s,k} dy[n,p,q,k] w[r,s,i,k] + beta prior[n,h,w,c]

    over all p u + r d - a = h, q v + s e - b = w, and the k of c's group, where i is c's place in its group.

    Args:
      dy: the gradient in the result of the convolution, (N, P, Q, K) for layout NHWC.
      w: the convolution's filter, as for `conv`.
      x_shape: the shape of x in `layout`; several sizes of x give the same size of y, so it must be given.
      stride, padding, dilation, groups, mode, layout, filter_layout: those of the convolution, see `conv`.
      alpha, beta, prior: the blend, see `conv`; prior has x's shape. With beta = 1 it is the gradient that x has from
        what else read it, such as a skip connection.
      x: the convolution's input where that is the result of a relu; the gradient is then that before the relu: where x
        is not positive it is 0, the prior with it. dtypes as for prior.
      accumulate, precision, out_dtype, engine, determinism: see `conv`.

    Returns:
      dx, of shape `x_shape`.

    Differentiation: any order, in dy, w, prior, and alpha and beta if they are arrays; in x it is 0.

    Numerics: as `conv`; elements of x that no window covers, or that negative padding cuts off, get beta prior.

    Raises:
      ValueError, TypeError, NotImplementedError: as `conv`.

    Example:
      >>> dy, w = jnp.ones((1, 3, 2, 6)), jnp.ones((3, 3, 2, 6))
      >>> dnn.conv_dgrad(dy, w, (1, 5, 4, 2), padding=1, stride=2).shape
      (1, 5, 4, 2)

    Sources: cuDNN's cudnnConvolutionBackwardData.
    """
    options = Options(stride, padding, dilation, groups, mode, accumulate, precision, out_dtype, engine, determinism)
    frame = frames.frame(layout, filter_layout)
    dy, w = frame.array("dy", dy), frame.filter("w", w)
    shape = frame.array_shape("x_shape", x_shape)
    spec = arguments.spec(frame, options, shape, w.shape, {"dy": dy, "w": w})
    arguments.check_dy(spec, dy, shape, w.shape)
    extras = dict(alpha=alpha, beta=beta, prior=prior, relu=x)
    return frame.restore(arguments.call("conv_dgrad", frame, spec, dy, w, **extras))


@public
def conv_skip(
    x: ArrayLike,
    w: ArrayLike,
    /,
    *,
    input_activation: str | None = None,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
    accumulate: DTypeLike | None = None,
    precision: str | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array]:
    """The first convolution of a residual block, which also returns what it reads, for the skip connection.

    h = act(x)        y = conv(h, w)

    The values are those of the two ops. The gradient is one call: x's from the convolution and from the skip connection
    are added, and taken before the activation, in the convolution's backward kernel.

    Args:
      x: the sum that the block before ends with, (N, H, W, C) for layout NHWC; dtypes as for `conv`.
      w, stride, padding, dilation, groups, mode, layout, filter_layout: see `conv`; padding of at least 0.
      input_activation: None, or "relu".
      accumulate, precision, out_dtype, engine, determinism: of the convolution, see `conv`; out_dtype is y's.

    Returns:
      y, as of `conv`, and h, in x's shape and dtype.

    Differentiation: any order, forward and reverse, in x and w. With a relu x's gradient is 0 where h is 0 or NaN.

    Numerics: as `conv`. With one group dx = (Σ dy w + dh) [h > 0] is computed in the accumulator's dtype and converted
      once, where two ops convert Σ dy w before they add dh; with more groups it is as of two ops.

    Raises:
      ValueError, TypeError, NotImplementedError: as `conv`.

    Example:
      >>> def block(z, w1, w2):  # z: not yet activated
      ...     y, skip = dnn.conv_skip(z, w1, input_activation="relu")
      ...     y, *_ = dnn.batch_norm(y, activation="relu")
      ...     return dnn.batch_norm(dnn.conv(y, w2), residual=skip)[0]
      >>> block(jnp.ones((2, 4, 4, 8)), jnp.ones((1, 1, 8, 2)), jnp.ones((1, 1, 2, 8))).shape
      (2, 4, 4, 8)

    Sources: cuDNN's graph pattern of backward data with a ReLU's backward pass behind it (DgradDreluBNBwdWeight).
    """
    relu = checks.choice("input_activation", input_activation, (None, "relu")) == "relu"
    options = Options(stride, padding, dilation, groups, mode, accumulate, precision, out_dtype, engine, determinism)
    frame = frames.frame(layout, filter_layout)
    x, w = frame.array("x", x), frame.filter("w", w)
    spec = arguments.spec(frame, options, x.shape, w.shape, {"x": x, "w": w})
    if spec.cut is not None:
        raise ValueError(f"`padding` must be at least 0, for h is all of what the convolution reads, got {padding!r}.")
    spec = selection.checked("conv", spec, x, w)
    # Kernels of narrow groups have no epilogue, and would have to leave the gradient to XLA.
    y, h = skip.conv_skip(SkipSpec(spec, relu, together=spec.geo.groups == 1), x, w)
    return frame.restore(y), frame.restore(h)


@public
def conv_wgrad(
    x: ArrayLike,
    dy: ArrayLike,
    w_shape: Sequence[int],
    /,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    accumulate: DTypeLike | None = None,
    precision: str | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Backward filter: the gradient of a convolution in its filter.

    dw[r,s,i,k] = alpha Σ_{n,p,q} x[n, p u + r d - a, q v + s e - b, Cg ⌊k / Kg⌋ + i] dy[n,p,q,k] + beta prior[r,s,i,k]

    Args:
      x: the convolution's input, (N, H, W, C) for layout NHWC.
      dy: the gradient in its result, (N, P, Q, K) for layout NHWC.
      w_shape: the shape of w in `filter_layout`; several numbers of taps give the same size of y.
      stride, padding, dilation, groups, mode, layout, filter_layout: those of the convolution, see `conv`.
      alpha, beta, prior: the blend, see `conv`; prior has w's shape. beta = 1 adds up gradients.
      accumulate, precision, out_dtype, engine, determinism: see `conv`.

    Returns:
      dw, of shape `w_shape`.

    Differentiation: any order, in x, dy, prior, and alpha and beta if they are arrays.

    Numerics: as `conv`; the sum runs over the batch, so of floats only engine `ordered` has a level above run_to_run.

    Raises:
      ValueError, TypeError, NotImplementedError: as `conv`.

    Example:
      >>> x, dy = jnp.ones((1, 5, 4, 2)), jnp.ones((1, 3, 2, 6))
      >>> dnn.conv_wgrad(x, dy, (3, 3, 2, 6), padding=1, stride=2).shape
      (3, 3, 2, 6)

    Sources: cuDNN's cudnnConvolutionBackwardFilter.
    """
    options = Options(stride, padding, dilation, groups, mode, accumulate, precision, out_dtype, engine, determinism)
    frame = frames.frame(layout, filter_layout)
    x, dy = frame.array("x", x), frame.array("dy", dy)
    shape = frame.filter_shape("w_shape", w_shape)
    spec = arguments.spec(frame, options, x.shape, shape, {"x": x, "dy": dy})
    arguments.check_dy(spec, dy, x.shape, shape)
    dw = arguments.call("conv_wgrad", frame, spec, x, dy, alpha=alpha, beta=beta, prior=prior)
    return frame.restore_filter(dw)


@public
def conv_bgrad(
    dy: ArrayLike,
    /,
    *,
    layout: str = "NHWC",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    accumulate: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """Backward bias: the gradient of a convolution in its bias.

    db[k] = alpha Σ_{n,p,q} dy[n,p,q,k] + beta prior[k]

    Args:
      dy: the gradient in the convolution's result, (N, P, Q, K) for layout NHWC; dtypes as for `conv`.
      layout: the axes of dy, see `conv`.
      alpha, beta, prior: the blend, see `conv`; prior is (K,).
      accumulate, out_dtype, determinism: see `conv`; a sum over the batch guarantees run_to_run, of integers portable,
        or mesh_invariant where beta is not 0 or 1.

    Returns:
      db, (K,).

    Differentiation: any order, in dy, prior, and alpha and beta if they are arrays.

    Numerics: XLA's reduction in the accumulator's dtype, then the blend, then one conversion, as `conv`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `conv`.

    Example:
      >>> dnn.conv_bgrad(jnp.ones((2, 3, 2, 6))).shape
      (6,)

    Sources: cuDNN's cudnnConvolutionBackwardBias.
    """
    frame = frames.frame(layout)
    dy = frame.array("dy", dy)
    types = arguments.types({"dy": dy}, accumulate, None, out_dtype)
    guaranteed = "portable" if types.accumulate == jnp.int32 else "run_to_run"  # a sum of integers is exact
    level = require(f"conv_bgrad of {dy.dtype}", determinism, guaranteed, "it adds over the batch")
    axes = tuple(axis for axis in range(dy.ndim) if axis != frame.layout.channel)
    total = jnp.sum(dy, axes, dtype=types.accumulate)
    return arguments.blend(total, types, alpha=alpha, beta=beta, prior=prior, like=dy, level=level)


@public
def conv_transpose(
    x: ArrayLike,
    w: ArrayLike,
    /,
    *,
    output_padding: PerAxis = 0,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
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
    """Transposed convolution ("deconvolution"): the adjoint of `conv` as an op of its own.

    c[n,h,w,j] = Σ_{p,q,r,s,k} x[n,p,q,k] w[r,s,i,k] over all p u + r d - a = h, q v + s e - b = w, k of j's group
    y = act(alpha c + beta prior + residual + bias)

    Args:
      x: the input, (N, P, Q, K) for layout NHWC: it stands where the transposed convolution's result stood.
      w: the filter of the convolution that this transposes, (R, S, C/G, K) for filter layout HWIO: its output channels
        K are this op's input channels, its input channels C this op's output channels.
      output_padding: how many elements longer the result is than the shortest possible, from 0 and smaller than stride
        or dilation; from stride on as if zeros followed x.
      stride, padding, dilation, groups, mode: those of the convolution that this transposes, see `conv`. Padding
        shortens the result, and lengthens it where it is negative; "SAME" and "SAME_LOWER" make it size times stride,
        "VALID" is no padding.
      layout, filter_layout: see `conv`.
      bias: (C,). residual, prior: the result's shape. activation, alpha, beta: see `conv`; alpha may be (C,).
      accumulate, precision, out_dtype, engine, determinism: see `conv`.

    Returns:
      y, (N, H, W, C) for layout NHWC, with H = (P - 1) u - low - high + (R - 1) d + 1 + output_padding.

    Differentiation: as `conv`; the gradient in w is an ordinary backward-filter convolution, the one in x a forward
      convolution.

    Numerics: as `conv`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `conv`.

    Example:
      >>> x, w = jnp.ones((1, 3, 2, 6)), jnp.ones((4, 4, 2, 6))
      >>> dnn.conv_transpose(x, w, stride=2, padding=1).shape
      (1, 6, 4, 2)

    Sources: cuDNN's cudnnConvolutionBackwardData, PyTorch's conv_transpose2d (its weight (in, out/G, R, S) is
      KCRS here), ONNX's ConvTranspose. `jax.lax.conv_transpose` by default does not flip the filter: it is
      this op with mode "convolution" and the filter's two channel axes exchanged.
    """
    options = Options(stride, padding, dilation, groups, mode, accumulate, precision, out_dtype, engine, determinism)
    frame = frames.frame(layout, filter_layout)
    x, w = frame.array("x", x), frame.filter("w", w)
    x, shape, options = arguments.transposed(frame, options, x, w, output_padding)
    spec = arguments.spec(frame, options, shape, w.shape, {"x": x, "w": w})
    extras = dict(alpha=alpha, beta=beta, prior=prior, bias=bias, residual=residual, activation=activation)
    return frame.restore(arguments.call("conv_dgrad", frame, spec, x, w, **extras, scale_each=True))
