"""A convolution that also returns what it reads, y = conv(h, w) and h = act(x): one rule has both gradients of h.

JAX adds the gradients of an array that two ops read between the ops, where no kernel can take the sum in. The
tangent of this pair is a primitive, linear in the tangent of x, whose transpose is one call of backward data:

    dx = (conv_dgrad(dy, w) + dh) [h > 0]

with the sum in the accumulator, and one conversion. The pair and its tangent are made of the ops of their parts.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jaxdnn._src.activation import epilogues
from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv import primitive
from jaxdnn._src.conv.primitive import ConvSpec
from jaxdnn._src.core import engines, primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.core.rounding import at_edges

OP = "conv_skip_tangent"


@dataclasses.dataclass(frozen=True)
class SkipSpec:
    """The convolution, and whether a relu is before it. The engine and level that a call requires are its parts'.

    together: whether the gradients of h are added in the accumulator. The call decides it, not how many groups `vmap`
      makes of it, or it would change bits.
    """

    conv: ConvSpec
    relu: bool
    together: bool
    engine: str | None = None
    level: str = "fast"


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def conv_skip(spec: SkipSpec, x: Array, w: Array) -> tuple[Array, Array]:
    """y and h."""
    h = x
    if spec.relu:  # stored: it is read by the convolution, and computing it again would read all that x was made of
        h = epilogues.activated(x, "relu", None, spec.conv.level, np.dtype(x.dtype), True)
    return bind("conv", h, w, spec=spec.conv), h


def _conv_skip_jvp(spec: SkipSpec, primals: Any, tangents: Any) -> Any:
    (_, w), (dx, dw) = primals, tangents
    y, h = conv_skip(spec, *primals)
    dh, terms = jnp.zeros_like(h), []
    if not isinstance(dx, SymbolicZero):
        dy, dh = map(primitives.placed_like, bind(OP, dx, h, w, spec=spec), (y, h))
        terms.append(dy)
    if not isinstance(dw, SymbolicZero):
        terms.append(bind("conv", h, dw, spec=spec.conv))
    return (y, h), (at_edges(spec.conv.level, ft.reduce(jnp.add, terms)) if terms else jnp.zeros_like(y), dh)


conv_skip.defjvp(_conv_skip_jvp, symbolic_zeros=True)


# ---- its tangent: (dx, h, w) to (dy, dh) -----------------------------------------------------------------------------


def _before(spec: SkipSpec, d: Array, h: Array) -> Array:
    """d times the slope of the activation whose result h is; element by element, so this is its transpose too."""
    return epilogues.before_relu(d, h) if spec.relu else d


def _tangent(spec: SkipSpec, dx: Array, h: Array, w: Array) -> tuple[Array, Array]:
    dh = _before(spec, dx, h)
    return bind("conv", dh, w, spec=spec.conv), dh


def _results(spec: SkipSpec, dx: Any, h: Any, w: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = primitive.result_shape("conv", spec.conv, dx, w)
    return jax.ShapeDtypeStruct(shape, spec.conv.out_dtype), jax.ShapeDtypeStruct(dx.shape, dx.dtype)


def _jvp(spec: SkipSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Linear in dx and in w; in h it has steps alone."""
    found = bind(OP, *primals, spec=spec)
    (_, h, w), (ddx, _, dw) = primals, tangents
    terms = [] if isinstance(ddx, ad.Zero) else [bind(OP, ddx, h, w, spec=spec)]
    if not isinstance(dw, ad.Zero):
        terms.append((bind("conv", found[1], dw, spec=spec.conv), jnp.zeros_like(found[1])))
    return found, primitives.added(found, terms, spec.conv.level)


def _transpose(spec: SkipSpec, cts: Sequence[Any], dx: Any, h: Any, w: Any) -> list[Array | None]:
    of_y, of_h = cts
    if isinstance(of_y, ad.Zero):
        return [_before(spec, of_h, h), None, None]
    dtype = np.dtype(dx.aval.dtype)
    back = dataclasses.replace(
        spec.conv, out_dtype=dtype, accumulate=primitive.wider(spec.conv.accumulate, dtype), converted=None
    )
    if not spec.together:
        d = bind("conv_dgrad", of_y, w, spec=back)
        edge = ft.partial(at_edges, spec.conv.level)
        d = d if isinstance(of_h, ad.Zero) else edge(d + edge(of_h))
        return [_before(spec, d, h), None, None]
    further = ([] if isinstance(of_h, ad.Zero) else [of_h]) + ([h] if spec.relu else [])
    prior = not isinstance(of_h, ad.Zero)
    epilogue = Epilogue(beta=float(prior), prior=prior, relu=spec.relu)
    return [bind("conv_dgrad", of_y, w, *further, spec=dataclasses.replace(back, epilogue=epilogue)), None, None]


def _batch(spec: SkipSpec, operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, Any]:
    """Folds the new axis into the batch, or into the groups if there is a filter for each of its elements."""
    size = next(v.shape[d] for v, d in zip(operands, dims, strict=True) if d is not None)
    if size == 0:  # the axis cannot be told from a folded axis of no elements
        return jax.vmap(ft.partial(_tangent, spec), in_axes=tuple(dims))(*operands), (0, 0)
    letter, conv = ("N", spec.conv) if dims[2] is None else ("G", primitive.of_groups(spec.conv, size))
    folded = [primitive.fold(spec.conv, r, v, d, letter, size) for r, v, d in zip("xxw", operands, dims, strict=True)]
    found = bind(OP, *folded, spec=dataclasses.replace(spec, conv=conv))
    return tuple(primitive.unfold(spec.conv, r, v, letter, size)[0] for r, v in zip("yx", found, strict=True)), (0, 0)


def _factors(spec: SkipSpec, dx: Any, h: Any, w: Any) -> Factors:
    """The parts are partitioned apart; this says only how the results are sharded where shardings are in types."""
    of_conv = primitive.factors("conv", spec.conv, dx, w)
    images, filters = of_conv.operands
    return Factors((images, images, filters), (*of_conv.results, images), of_conv.divisible, sizes=of_conv.sizes)


primitives.define(
    OP,
    results=_results,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    factors=_factors,
    many=True,
    words="The derivative of `conv_skip` along a tangent",
)
engines.declare(
    "xla",
    OP,
    run=lambda call, *operands: _tangent(call.spec, *operands),
    notes=("a convolution and a product, each with its engine",),
)
