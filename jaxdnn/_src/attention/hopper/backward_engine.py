"""The `hopper` engine of attention's gradient: the kernels of `backward` and `backward_dq`.

They are imported at the first call that needs them, so that importing jaxdnn does not import Pallas.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, export

from jaxdnn._src import hopper
from jaxdnn._src.attention.hopper.engine import beyond_range
from jaxdnn._src.attention.spec import AXES, AttentionSpec, operands_of
from jaxdnn._src.core import engines
from jaxdnn._src.core.rounding import nearest

WIDEST = 256
LENGTHS = ("query_lengths", "key_lengths")
# Each changes what a pair of query and key contributes; first those that decide whether it is seen.
PAIRS = ("query_segments", "key_segments", "mask", "alibi_slopes", "bias")
SUMMED = ("bias", "alibi_slopes")  # whose gradients are sums of dS
DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
LARGEST = 2**31 - 1  # of rows of all heads, and of positions of a head
MOST_ADDED = 2**30  # scores of a sequence, of all heads, whose gradients are in memory at once to be added


def _shapes(call: engines.Call) -> dict[str, Any]:
    """The operands' shapes and dtypes by name; of those that have the same name the last."""
    return dict(zip(operands_of(call.op, call.spec), call.avals, strict=True))


def _unsupported(call: engines.Call) -> str | None:
    """Why no kernel serves a call, on any device."""
    spec: AttentionSpec = call.spec
    v = _shapes(call)
    if any(export.is_symbolic_dim(n) for aval in call.avals for n in aval.shape):
        return "its kernels are cut for sizes that are known when traced"
    dtypes = {v[name].dtype for name in ("q", "k", "v", "y")} | {call.avals[0].dtype}
    if len(dtypes) > 1 or next(iter(dtypes)) not in DTYPES:
        return f"its kernels take operands of one dtype, bfloat16 or float16, not {', '.join(sorted(map(str, dtypes)))}"
    if reason := spec.beyond_kernels():
        return reason
    if spec.dropout is not None:
        return "its kernels of gradients have no dropout"
    if reason := beyond_range(spec):
        return reason
    if spec.wide:
        return "its kernels round gradients, which are added over a mesh first here"
    if other := [name for name in spec.given if name not in (*LENGTHS, *PAIRS, "sinks")]:
        return f"its kernels of gradients take no `{other[0]}`"
    if "sinks" in spec.along and {"mask", "query_segments"} & set(spec.given):
        return "its gradient of `sinks` needs to know from a query's place whether it sees a key"
    for name in ("sinks", *SUMMED):
        lead = v[name].shape[: -len(AXES[name])] if name in spec.along else ()
        if math.prod(lead) not in (1, math.prod(v["q"].shape[:-3])):
            return f"its gradient of `{name}` is added over all sequences or over none"
    sizes = _sizes(spec, v)
    if _adds_scores(spec) and sizes["n"] * sizes["t"] * sizes["s"] > MOST_ADDED:
        return f"its gradients of {' and '.join(SUMMED)} take memory for all scores, of a sequence at most {MOST_ADDED}"
    return _of_sizes(spec, v)


def _adds_scores(spec: AttentionSpec) -> bool:
    return any(name in spec.along for name in SUMMED)


def _level(call: engines.Call) -> str:
    """A gradient that sequences share is a sum over them, of which vmap makes another."""
    return "run_to_run" if {"sinks", *SUMMED} & set(call.spec.along) else "batch_invariant"


def _of_sizes(spec: AttentionSpec, v: dict[str, Any]) -> str | None:
    sizes = _sizes(spec, v)
    if not all(sizes.values()):
        return "it has nothing to do for an empty array"
    for name, size in (("features", sizes["d"]), ("features of values", sizes["e"])):
        if size % 8:
            return f"its rows are multiples of 16 bytes, and these have {size} {name}"
        if size > WIDEST:
            return f"its kernels of gradients take at most {WIDEST} features, not {size}"
    for name in (*PAIRS, "sinks"):
        if name in v and v[name].dtype.itemsize > 4:
            return f"its kernels take numbers of at most 32 bits, and `{name}` has {v[name].dtype}"
        if name in v and math.prod(v[name].shape[-3:]) * v[name].dtype.itemsize > LARGEST:
            return f"its kernels count the bytes of a sequence in 32 bits, and `{name}` has more"
    rows = math.prod(v["q"].shape[:-1])
    if rows * max(32, sizes["e"]) > LARGEST or math.prod(v["k"].shape[:-1]) > LARGEST:
        return f"its kernels count rows and lanes in 32 bits, and these are {rows} rows"
    return None


def _sizes(spec: AttentionSpec, v: dict[str, Any]) -> dict[str, int]:
    found = {"b": math.prod(v["q"].shape[:-3])}
    for name in ("q", "k", "v"):
        found |= dict(zip(spec.axes(name), v[name].shape[-3:], strict=True))
    return found


def problem(call: engines.Call) -> Any:
    """The kernels' view of a call that the engine supports."""
    from jaxdnn._src.attention.hopper.backward_plan import Problem, Window

    spec, v = call.spec, _shapes(call)
    n = _sizes(spec, v)
    window = Window(spec.left, spec.right, spec.shift if spec.bottom_right else 0)
    dtype = np.dtype(v["q"].dtype)
    return Problem(
        n["b"], n["t"], n["s"], n["n"], n["h"], n["d"], n["e"], dtype, spec.heads_first, spec.scale, window,
        lengths=any(name in spec.given for name in LENGTHS), softcap=spec.softcap,
        pairs=tuple(_spread(name, v[name], n) for name in PAIRS if name in v),
    )  # fmt: skip


def _spread(name: str, x: Any, sizes: dict[str, int]) -> Any:
    """How an operand lies along (sequences, heads, queries, keys)."""
    from jaxdnn._src.attention.hopper.backward_plan import Spread

    axes = AXES[name]
    own = dict(zip(axes, x.shape[x.ndim - len(axes) :], strict=True))
    lead = x.shape[: x.ndim - len(axes)]
    shape = (1 if math.prod(lead) == 1 else sizes["b"], *(own.get(axis, 1) for axis in "nts"))
    dtype = {"mask": "uint8", "alibi_slopes": "float32", "query_segments": "int32", "key_segments": "int32"}
    return Spread(name, shape, dtype.get(name, np.dtype(x.dtype).name))


def _pairs(p: Any, v: dict[str, Array], lead: tuple[int, ...]) -> list[Array]:
    """The arrays of `Problem.pairs` as the kernels take them; slopes in units of log2(e)."""
    found = []
    for spread in p.pairs:
        x = v[spread.name]
        if spread.name == "alibi_slopes":
            x = x.astype(jnp.float32) * jnp.float32(math.log2(math.e))
        if 1 < math.prod(x.shape[: len(lead)]) < p.batch:
            x = jnp.broadcast_to(x, (*lead, *x.shape[len(lead) :]))
        found.append(x.astype(spread.dtype).reshape(spread.shape))
    return found


def _extents(p: Any, spec: AttentionSpec, v: dict[str, Array]) -> Array | None:
    """Of each sequence the queries and keys that count, and the shift of its window."""
    if not p.lengths:
        return None
    of_all = lambda name, size: jnp.broadcast_to(v[name].reshape(-1) if name in v else jnp.int32(size), (p.batch,))
    queries, keys = of_all("query_lengths", p.queries), of_all("key_lengths", p.keys)
    shift = keys - queries if spec.bottom_right else jnp.zeros_like(keys)
    within = lambda n, size: jnp.clip(n, 0, size)
    return jnp.stack([within(queries, p.queries), within(keys, p.keys), shift], -1).astype(jnp.int32)


def _run(call: engines.Call, *operands: Array) -> tuple[Array, ...]:
    from jaxdnn._src.attention.hopper import backward_launch

    names = operands_of(call.op, call.spec)
    dy, dlse, p = *operands[:2], problem(call)
    v = dict(zip(names[2:], operands[2:], strict=True))
    one_axis = lambda x, kept: x.reshape(-1, *x.shape[x.ndim - kept :])
    arrays = {name: one_axis(v[name], 3) for name in ("q", "k", "v", "y")}
    found = backward_launch.gradients(
        one_axis(dy, 3), one_axis(dlse, 2), arrays["q"], arrays["k"], arrays["v"], arrays["y"], one_axis(v["lse"], 2),
        problem=p, extents=_extents(p, call.spec, v), pairs=_pairs(p, v, v["q"].shape[:-3]),
        sinks=one_axis(v["sinks"], 1) if "sinks" in call.spec.along else None,
        summed=[spread for spread in p.pairs if spread.name in SUMMED and spread.name in call.spec.along],
    )  # fmt: skip
    others = ("sinks", *(spread.name for spread in p.pairs if spread.name in SUMMED))
    given = dict(zip(("q", "k", "v", *(name for name in others if name in call.spec.along)), found, strict=True))
    return tuple(_as_given(given[name], v[name]) for name in call.spec.along)


def _as_given(x: Array, operand: Array) -> Array:
    """A gradient in the shape and dtype of its operand."""
    return nearest(x.reshape(operand.shape), operand.dtype)


def _workspace(call: engines.Call) -> int:
    from jaxdnn._src.attention.hopper import backward_launch

    return backward_launch.workspace(problem(call), summed=_adds_scores(call.spec))


hopper.declare(
    "attention_dgrad",
    run=_run,
    unsupported=_unsupported,
    level=_level,
    accumulation=lambda call: "tensor_core",
    hazards=lambda call: ("flushes_subnormals", "spreads_nonfinite"),
    workspace=_workspace,
    notes=(
        "tensor cores",
        "exponentials by the special function unit",
        "weights and gradients of scores are rounded to the operands' dtype",
        "with a gradient of `bias` or `alibi_slopes` the workspace has the gradients of all scores",
        "a row of `dy` with a number that is not finite gives NaN in dv of all keys that it sees",
    ),
)
