"""The engines of recurrent layers: `xla`, and `ordered`, which has the definition's order of additions.

Both run over the steps in a loop, beside which stand the products that need no state. In `ordered` a product starts
from 0 and takes its terms one by one, each multiplied and added with a rounding; sigmoid and tanh are polynomials and a
quotient, of stated steps. So an element depends on its own sequence alone, and its bits on no device.
"""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation.stated import sigmoid, tanh
from jaxdnn._src.core import blending, engines, selection
from jaxdnn._src.core.rounding import nearest, product, rounded
from jaxdnn._src.rnn import primitive, steps
from jaxdnn._src.rnn.primitive import PRODUCTS, ProductSpec

UNROLLED = 8  # terms of a sum that a pass over the result adds


def ordered_dot(a: Array, b: Array) -> Array:
    """a (..., K) times b (K, M), from 0 on, term by term."""
    wide = blending.accumulator(b.dtype)
    # The barrier keeps XLA from removing 0 + p, which is +0 for p = -0.
    zero = lax.optimization_barrier(jnp.zeros((*a.shape[:-1], b.shape[1]), wide))
    terms = jnp.moveaxis(a, -1, 0).astype(wide), b.astype(wide)
    row = lambda w: jnp.expand_dims(w, range(a.ndim - 1))
    add = lambda total, term: (total + product(term[0][..., None], row(term[1])), None)
    return lax.scan(add, zero, terms, unroll=UNROLLED if isinstance(b.shape[0], int) else 1)[0]


def _stored(x: Array, dtype: Any) -> Array:
    """x rounded to a dtype, behind a fence: XLA on GPUs omits the rounding of what is converted back at once."""
    return x if x.dtype == dtype else rounded(nearest(x, dtype))


ORDERED = steps.Arithmetic(ordered_dot, product, sigmoid, tanh, _stored)


# ---- products over all steps -----------------------------------------------------------------------------------------


def _multiply(k: steps.Arithmetic, result: str, spec: ProductSpec, wide: Any, a: Array, b: Array) -> Array:
    """A derivative of the trilinear form; of what is wide the rounding is multiplied."""

    def one(a: Array, b: Array) -> Array:
        a, b = (k.narrow(v, spec.narrow).astype(wide) for v in (a, b))
        if result == "w":
            a, b = (v.reshape(math.prod(v.shape[:-1]), v.shape[-1]) for v in (a, b))
            return k.dot(a.T, b)
        return k.dot(a, b if result == "y" else b.T)

    for _ in range(a.ndim - 1 - spec.rows):
        one = jax.vmap(one)
    found = one(a, b)
    return found if spec.wide else k.narrow(found, spec.narrow)


# ---- the engines -----------------------------------------------------------------------------------------------------


def _run(k: steps.Arithmetic, call: engines.Call, *operands: Array) -> Any:
    """Off GPUs narrow operands are multiplied in the accumulator's dtype: in that XLA's products on CPUs are faster."""
    spec: Any = call.spec
    as_they_are = call.platform == "cuda" and k is steps.PLAIN
    dtype = spec.narrow if as_they_are else blending.accumulator(spec.narrow)
    for result, name in PRODUCTS.items():
        if name == call.op:
            return _multiply(k, result, spec, dtype, *operands)
    names = primitive.operands_of(call.op, spec)
    given = [v.astype(dtype) if name in ("w", "r", "p") else v for name, v in zip(names, operands, strict=True)]
    return primitive.formula(call.op, spec, *given, k=k, by_steps=k is steps.PLAIN and _in_steps(call))


def _in_steps(call: engines.Call) -> bool:
    """Whether the inputs' product is faster in each step: on CPUs, but for one sequence, of which each step reads W.

    In a step it runs beside that of the states, and its result stays in the cache.
    """
    return call.platform == "cpu" and call.avals[0].shape[1] != 1


def _accumulation(call: engines.Call) -> str:
    narrow = min(v.dtype.itemsize for v in call.avals) <= 2
    if call.platform == "cuda" and narrow:
        return "tensor_core"
    return "float64" if np.float64 in [v.dtype for v in call.avals] else "float32"


def _level(call: engines.Call) -> str:
    return "portable" if call.op in ("rnn", "rnn_saved", "rnn_product") else "mesh_invariant"


_OPS = ("rnn", "rnn_saved", "rnn_tangent", "rnn_backward", *PRODUCTS.values())
engines.declare(
    "xla",
    *_OPS,
    run=ft.partial(_run, steps.PLAIN),
    level=engines.level_of_products,
    accumulation=_accumulation,
    hazards=engines.flushes_on_cpus,
    partition=lambda call: True,
    notes=("a loop over the steps; on CPUs with the inputs' product in each, elsewhere beside one for all",),
)
engines.declare(
    "ordered",
    *_OPS,
    run=ft.partial(_run, ORDERED),
    level=_level,
    accumulation=lambda call: "float64" if np.float64 in [v.dtype for v in call.avals] else "float32",
    hazards=engines.flushes_on_cpus,
    rank=lambda call: selection.LAST,
    partition=lambda call: True,
    adds_in_order=True,
    modelled=("cpu", "cuda"),
    notes=(
        f"a pass over the result for every {UNROLLED} products of an element, in every step: slow",
        "XLA flushes subnormal numbers to zero on CPUs, so portability is for normal ones",
    ),
)
