"""Products of matrices whose rows belong to groups, as the tokens of experts: `grouped_matmul` and its gradient.

Letters: M rows of a, K columns of a, N columns of the result; G groups.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.conv import arguments
from jaxdnn._src.core import checks, primitives
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.matmul.grouped_primitive import PRODUCT, WGRAD, GroupedSpec


@public
def grouped_matmul(
    a: ArrayLike,
    b: ArrayLike,
    group_sizes: ArrayLike,
    /,
    *,
    transpose_b: bool = False,
    accumulate: DTypeLike | None = None,
    precision: str | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Multiplies each row by the matrix of the group that it belongs to.

    y[m, n] = Σ_k a[m, k] b[g(m), k, n]

    Group g has group_sizes[g] rows, which follow those of group g - 1. Rows behind the last group's give 0.

    Args:
      a: (M, K); float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, int8.
      b: (G, K, N); the dtype of a, or the other float8.
      group_sizes: (G,), integers; a group may be empty. They need not be known when the call is traced, so no error
        says that they are wrong: a negative size counts as 0, and groups end with the last row.
      transpose_b: whether b is stored as (G, N, K), as the weights of linear layers in PyTorch are.
      accumulate: the accumulator's dtype: None is float32 (float64 for float64, int32 for int8); may be a wider float.
      precision: None multiplies the stored values exactly; "tf32" lets float32 operands be cut to TF32's 10 fraction
        bits, for tensor cores. JAX's default matmul precision is not read.
      out_dtype: the result's dtype; None is that of a.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, (M, N).

    Differentiation: any order, forward and reverse, in a and b. The gradient in a is `grouped_matmul` by b transposed,
      the one in b is `grouped_matmul_wgrad`; what rows of no group hold is in none of them. If `out_dtype` is not the
      dtype of a, both have operands of two dtypes, which no kernel takes: engine xla then serves the gradients, and
      with engine="hopper" they are refused.

    Numerics: sums are in the accumulator's dtype, converted once, to nearest even; of integers and float8 as `conv`
      says. A row depends on its own group's matrix alone: infinities in other groups, or in rows of no group, do not
      show in it. M x N x K products are made, and at most G x 256 x N x K more, whatever the sizes are.
      Determinism: see `jaxdnn.explain`. The Hopper kernel serves bfloat16 and float16; a row of its result depends on
      the row and the matrix alone, to the bit.

    Epilogue: none, unlike `matmul`. A bias of each group, (G, N), and an activation follow the call, as in the example;
      XLA computes them in a pass over y.

    Meshes: rows, K and N stay sharded; where K is, sums are added over the mesh, and for the gradient in b where rows
      are. Matrices that are sharded by groups are gathered on every device. With experts on several devices, call it
      within `jax.shard_map` on the experts that a device has and the rows that were sent to them. `jax.vmap` over a or
      group_sizes alone copies b for each element of the batch.

    Raises:
      ValueError: shapes that do not fit, or an argument out of range.
      TypeError: dtypes that do not go together.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> tokens, experts = jnp.ones((7, 4)), jnp.ones((3, 4, 5))
      >>> dnn.grouped_matmul(tokens, experts, jnp.array([2, 0, 4])).shape  # the last row is 0
      (7, 5)
      >>> bias = jnp.ones((3, 5))  # that of its group for each row; rows of no group have another group's
      >>> of_rows = jnp.repeat(bias, jnp.array([2, 0, 4]), axis=0, total_repeat_length=7)
      >>> jax.nn.gelu(dnn.grouped_matmul(tokens, experts, jnp.array([2, 0, 4])) + of_rows).shape
      (7, 5)

    Sources: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer" (2017).
      cuDNN's graph operation is moe_grouped_matmul, which has the first row of each group and may gather or scatter
      rows by an index: here that is indexing before or after the call. JAX has lax.ragged_dot with these arguments,
      where infinities of one group show in the others; PyTorch's grouped_mm has the rows where groups end.
    """
    a, b = _matrices("a", a, 2), _matrices("b", b, 3)
    transposed = checks.flag("transpose_b", transpose_b)
    k, terms = a.shape[1], b.shape[2 if transposed else 1]
    if k != terms:
        order = f"(G, N, {k})" if transposed else f"(G, {k}, N)"
        hint = f" (transpose_b={not transposed} would fit)" if k == b.shape[1 if transposed else 2] else ""
        raise ValueError(f"`b` must have shape {order} for {k} columns of a, got {tuple(b.shape)}{hint}.")
    checks.countable("`grouped_matmul`", (a.shape[0], b.shape[1 if transposed else 2]))
    sizes = _sizes(group_sizes, a.shape[0])
    checks.shape("group_sizes", sizes, b.shape[:1], "one for every matrix of b")
    types = arguments.types({"a": a, "b": b}, accumulate, precision, out_dtype)
    spec = GroupedSpec(types.accumulate, types.out, precision, engine, required(determinism), transposed)
    return primitives.call(PRODUCT, a, b, sizes, spec=spec)


@public
def grouped_matmul_wgrad(
    a: ArrayLike,
    dy: ArrayLike,
    group_sizes: ArrayLike,
    /,
    *,
    accumulate: DTypeLike | None = None,
    precision: str | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The gradient of `grouped_matmul` in its matrices: for each group the product of its rows.

    db[g, k, n] = Σ_(m in g) a[m, k] dy[m, n]

    Args:
      a: (M, K), as in `grouped_matmul`. Of a b that is stored transposed, exchange a and dy.
      dy: (M, N), the gradient of the result; the dtype of a, or the other float8.
      group_sizes: (G,), integers, as in `grouped_matmul`.
      accumulate, precision, out_dtype, engine, determinism: as in `grouped_matmul`.

    Returns:
      db, (G, K, N); 0 for a group without rows.

    Differentiation: any order, forward and reverse, in a and dy; `out_dtype` is as in `grouped_matmul`.

    Numerics: sums over the rows of a group are in the accumulator's dtype, converted once. Rows of no group are not
      added, nor multiplied by 0. Determinism: see `jaxdnn.explain`.

    Raises:
      ValueError: shapes that do not fit, or an argument out of range.
      TypeError: dtypes that do not go together.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> dnn.grouped_matmul_wgrad(jnp.ones((7, 4)), jnp.ones((7, 5)), jnp.array([2, 0, 4]))[:, 0, 0]
      Array([2., 0., 4.], dtype=float32)

    Sources: cuDNN's graph operation moe_grouped_matmul_bwd.
    """
    a, dy = _matrices("a", a, 2), _matrices("dy", dy, 2)
    checks.shape("dy", dy, (a.shape[0], dy.shape[1]), "a row for each row of a")
    sizes = _sizes(group_sizes, a.shape[0])
    if sizes.ndim != 1:
        raise ValueError(f"`group_sizes` must have shape (G,), got {tuple(sizes.shape)}.")
    checks.countable("`grouped_matmul_wgrad`", (sizes.shape[0], a.shape[1], dy.shape[1]))
    types = arguments.types({"a": a, "dy": dy}, accumulate, precision, out_dtype)
    spec = GroupedSpec(types.accumulate, types.out, precision, engine, required(determinism))
    return primitives.call(WGRAD, a, dy, sizes, spec=spec)


def _matrices(name: str, value: Any, axes: int) -> Array:
    value = checks.array(name, value)
    if value.ndim != axes:
        expected = {"a": "(M, K)", "b": "(G, K, N)", "dy": "(M, N)"}[name]
        raise ValueError(f"`{name}` must have {axes} axes, {expected}, got shape {tuple(value.shape)}.")
    return value


def _sizes(value: Any, rows: int) -> Array:
    """Integers of any dtype as int32, from 0 to the number of rows."""
    if isinstance(rows, int) and rows >= 2**31:  # the batch may be symbolic
        raise ValueError(f"`a` must have fewer than 2^31 rows, which sizes of groups are counted up to, got {rows}.")
    value = checks.array("group_sizes", value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"`group_sizes` must be integers, got {value.dtype.name}.")
    value = value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)  # which holds the number of rows
    return jnp.clip(value, 0, rows).astype(jnp.int32)
