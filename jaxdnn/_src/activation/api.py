"""Activations, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.activation import formulas
from jaxdnn._src.activation.primitive import ActivationSpec
from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.annotations import Activation, Scale
from jaxdnn._src.core.determinism import require, required
from jaxdnn._src.core.explain import public


@public
def activation(
    x: ArrayLike,
    /,
    *,
    activation: Activation = "relu",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """An activation of every element.

    y = alpha act(x) + beta prior

    Args:
      x: of any shape; float32, bfloat16, float16 or float64.
      activation: "identity" (or None), "relu", "sigmoid", "tanh", "gelu" (by erf), "gelu_tanh", "elu", "swish",
        "softplus", "selu", "celu", "mish", "softsign", "hard_sigmoid", "hard_swish", "leaky_relu", "clipped_relu";
        a pair with its parameter, ("elu", alpha), ("celu", alpha), ("swish", beta), ("softplus", beta),
        ("leaky_relu", slope), ("clipped_relu", ceiling); or ("relu", lower, upper, slope): lower + slope (x - lower)
        below `lower`, `upper` above `upper`, x between.
      alpha, beta, prior: the blend, see `conv`; prior has x's shape, and the dtype of x, of the result, or float32.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, of x's shape.

    Differentiation: in x, prior, and alpha and beta if they are arrays, any order. At a kink the derivative is that of
      the side below, hence 0 for relu at 0; at an upper bound (clipped_relu's ceiling, 3 for hard_sigmoid and
      hard_swish) that of the side above. The first derivative is `activation_dgrad`, those of higher order are the
      formula's in float32 (float64 for float64).

    Numerics: NaN gives NaN, ±inf the limit. For bfloat16 and float16, alpha act(x) is correctly rounded, whatever the
      activation, and portable: it is looked up in a table of all 65,536 results, which also is faster than computing
      it. float32 and float64 are computed in their own precision, within the bound of `jaxdnn.tolerance`;
      identity, relu, leaky_relu and clipped_relu are portable there too, the others mesh_invariant. With a beta other
      than 0 (or a traced alpha) the blend is computed in float32, each product rounded before it is added to, which is
      mesh_invariant.

    Raises:
      ValueError, TypeError: an unknown name, a parameter out of range, a dtype or shape that does not fit.
      NotImplementedError: a determinism level that cannot be guaranteed.

    Example:
      >>> dnn.activation(jnp.array([-1.0, 0.5, 9.0]), activation=("relu", 0.0, 6.0, 0.25)).tolist()
      [-0.25, 0.5, 6.0]

    Sources: cuDNN's cudnnActivationForward (its seven modes) and the graph API's pointwise modes RELU to
      GELU_APPROX_TANH; the definition, `jaxdnn_reference.activation`, has a source for each. hard_sigmoid is PyTorch's
      and Keras 3's; ONNX's HardSigmoid is `activation(a * x + b, activation=("relu", 0, 1, 0))`. PReLU, whose slope is
      learned and so is an operand with a gradient, is `jnp.where(x > 0, x, slope * x)`. cuDNN's legacy option
      CUDNN_NOT_PROPAGATE_NAN, relu(NaN) = 0, is `activation(jnp.where(jnp.isnan(x), 0, x))`.
    """
    x = _operand("x", x)
    out = checks.out_dtype(out_dtype, x.dtype, checks.FLOATS, blending.accumulator(x.dtype))
    return _call("activation", (x,), activation, alpha, beta, prior, out, engine, determinism)


@public
def activation_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    activation: Activation = "relu",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The gradient of an activation in its input.

    dx = alpha dy act'(x) + beta prior

    Args:
      dy: the gradient in the activation's result, of x's shape; dtypes as x.
      x: the activation's input.
      activation: see `activation`.
      alpha, beta, prior: the blend, see `activation`; prior may also have dy's dtype.
      out_dtype, engine, determinism: see `activation`.

    Returns:
      dx, of x's shape and dtype.

    Differentiation: any order, in dy, x, prior, and alpha and beta if they are arrays.

    Numerics: at kinks as `activation` says; NaN in x gives NaN. For a bfloat16 or float16 x the slope alpha act'(x)
      comes from a table in float32 and is multiplied by dy in float32, before the one conversion; where dy is 1 the
      result is correctly rounded. On CPUs that holds of bfloat16 down to 2^-126, its least normal number: XLA's code
      there takes smaller numbers of float32 for zero, so a dy, slope or result below may count, or come out, as zero.
      The levels are those of `activation`, for numbers that are not below.

    Raises:
      ValueError, TypeError, NotImplementedError: as `activation`.

    Example:
      >>> x = jnp.array([-1.0, 0.0, 2.0])
      >>> dnn.activation_dgrad(jnp.ones(3), x, activation="relu").tolist()
      [0.0, 0.0, 1.0]

    Sources: cuDNN's cudnnActivationBackward, which takes y as well, and the graph API's pointwise modes RELU_BWD to
      GELU_APPROX_TANH_BWD, which take dy and x as this does.
    """
    dy, x = _operand("dy", dy), _operand("x", x)
    checks.shape("dy", dy, x.shape, "that of x")
    out = checks.out_dtype(out_dtype, x.dtype, checks.FLOATS, blending.accumulator(x.dtype))
    return _call("activation_dgrad", (dy, x), activation, alpha, beta, prior, out, engine, determinism)


def _operand(name: str, value: Any) -> Array:
    value = checks.array(name, value)
    checks.dtype(name, value, checks.FLOATS)
    return value


def _call(
    op: str,
    operands: tuple[Array, ...],
    activation: Any,
    alpha: Any,
    beta: Any,
    prior: Any,
    out: np.dtype,
    engine: Any,
    determinism: Any,
) -> Array:
    alpha, beta = blending.read_scale("alpha", alpha), blending.read_scale("beta", beta)
    act, parameter = formulas.read_activation(activation) or ("identity", None)
    alone = isinstance(alpha, float) and isinstance(beta, float) and beta == 0
    level = required(determinism)
    x = operands[-1]
    precision = blending.accumulator(x.dtype)
    if not alone:
        what = f"{op} with a prior or a traced scale"
        require(what, level, "mesh_invariant", "the blend's product and sum may be fused")
    # A table holds alpha act(x) rounded once. A product that is to be added to is left to the blend, which rounds it.
    inside = isinstance(alpha, float) and (alone or np.dtype(x.dtype) in formulas.NARROW)
    factor = alpha + 0.0 if inside else 1.0  # -0 and 0 are equal, so they must not differ
    spec = ActivationSpec(act, parameter, factor, out if alone else precision, engine, level)
    computed = primitives.call(op, *operands, spec=spec)
    if alone and prior is None:
        return computed
    rest = 1.0 if inside else alpha
    dtypes = tuple(np.dtype(v.dtype) for v in operands)
    return blending.blend(computed, alpha=rest, beta=beta, prior=prior, out=out, dtypes=(*dtypes, precision))
