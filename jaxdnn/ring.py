"""Attention of sequences whose keys lie on several devices: inside `jax.shard_map`, keys pass from device to device.

    mesh, rows = jax.sharding.Mesh(jax.devices(), ("x",)), jax.sharding.PartitionSpec(None, "x")
    run = jax.shard_map(
        lambda q, k, v: dnn.ring.attention(q, k, v, axis_name="x", causal=True),
        mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows,
    )

A device has a part of the queries, and of the keys and values one part after the other. Arrays that are sharded outside
of `shard_map` need none of this: there `attention` gathers the keys, which is faster where they fit.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxdnn._src.attention.api import merge_attention
from jaxdnn._src.attention.arguments import Options, read
from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.partitioning import vary_alike

__all__ = ["attention"]


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    /,
    *,
    axis_name: str,
    scale: float | None = None,
    causal: bool = False,
    window: Any = None,
    softcap: float | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    layout: str = "BTNH",
    return_logsumexp: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> Any:
    """`attention` of the queries that a device has to the keys of all devices along a mesh axis.

    The parts of the keys that devices have are in the order of the devices, as are those of the queries; of P devices
    each has T / P queries and S / P keys. Number i attends to its own part, then to that of the device before it, and
    so on around the ring: the results of the parts are merged in this order by `merge_attention`, in the accumulator's
    dtype.

    Args:
      q, k, v: a device's parts, as in `attention`.
      axis_name: the axis of the mesh, or a tuple of axes.
      scale, window, softcap, alibi_slopes, sinks, layout, return_logsumexp: as in `attention`, of whole sequences.
      causal: whether a query sees no key after it, counted in whole sequences.
      query_segments, key_segments: a device's parts, as in `attention`.
      engine: None, or the name of the engine that must serve the parts.
      determinism: a level that must be guaranteed, run_to_run at most.

    Returns:
      What `attention` returns for whole sequences, of it the part of the device's queries.

    Differentiation: any order, forward and reverse. The backward pass keeps the keys of all parts, as `attention` does
      of keys that it gathers.

    Raises:
      As `attention`, and ValueError for heads that no part may have.

    Sources: Liu et al., "Ring Attention with Blockwise Transformers" (2023).
    """
    if determinism not in (None, "fast", "run_to_run"):
        raise NotImplementedError(
            "`ring.attention` guarantees run_to_run: in which order parts are added depends on the device, "
            f"and `determinism` asks for {determinism}."
        )
    options = Options(
        scale=scale,
        causal=checks.flag("causal", causal),
        window=window,
        softcap=softcap,
        bias=None,
        mask=None,
        block_mask=None,
        block_mask_tile=1,
        query_lengths=None,
        key_lengths=None,
        query_segments=query_segments,
        key_segments=key_segments,
        alibi_slopes=alibi_slopes,
        sinks=None,
        score_fn=None,
        score_arrays=(),
        dropout=0.0,
        dropout_key=None,
        layout=layout,
        engine=engine,
        determinism=determinism,
    )
    operands, spec = read((("q", q), ("k", k), ("v", v)), options)
    narrow = operands[0].dtype
    spec = dataclasses.replace(spec, given=(*spec.given, "start"), wide_y=blending.accumulator(narrow) != narrow)
    named = dict(zip((*spec.floats, *spec.constants[:-1]), operands, strict=True))
    parts = _parts(named, spec, axis_name)
    y, lse = parts[0]
    for part in parts[1:]:
        y, lse = merge_attention(*(jnp.stack(pair) for pair in zip((y, lse), part, strict=True)))
    if sinks is not None:
        y, lse = _with_sinks(y, lse, sinks, layout)
    y = y.astype(narrow)
    return (y, lse) if checks.flag("return_logsumexp", return_logsumexp) else y


def _parts(named: dict[str, Array], spec: Any, axis_name: Any) -> list[Any]:
    """y and lse of a device's queries with each device's keys, its own first."""
    count, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    rows = {name: named[name].shape[spec.axes(name).index(axis) - 3] for name, axis in (("q", "t"), ("k", "s"))}
    travels = tuple(name for name in ("k", "v", "key_segments") if name in named)
    around = [(i, (i + 1) % count) for i in range(count)]
    found = []
    for hop in range(count):
        of_keys = (own - hop) % count
        places = (own * rows["q"] - of_keys * rows["k"]).astype(jnp.int32)
        zero = jnp.zeros_like(places)
        named = named | {"start": jnp.stack([zero, zero, places])[None]}
        operands = vary_alike([named[name] for name in (*spec.floats, *spec.constants)])
        found.append(primitives.call("attention", *operands, spec=spec))
        if hop + 1 < count:
            moved = lax.ppermute(tuple(named[name] for name in travels), axis_name, around)
            named = named | dict(zip(travels, moved, strict=True))
    return found


def _with_sinks(y: Array, lse: Array, sinks: ArrayLike, layout: str) -> tuple[Array, Array]:
    """With a part that has the sinks' weight and no value."""
    sinks = checks.array("sinks", sinks)
    heads = y.shape[2 if layout == "BTNH" else 1]
    checks.shape("sinks", sinks, (heads,), "one for each head of `q`")
    of_head = sinks.astype(lse.dtype)[None, None] if layout == "BTNH" else sinks.astype(lse.dtype)[None, :, None]
    of_head = jnp.broadcast_to(of_head, lse.shape)
    return merge_attention(jnp.stack([y, jnp.zeros_like(y)]), jnp.stack([lse, *vary_alike([of_head])]))
