"""The `hopper` engine of attention: which calls the kernels for compute capability 9.0 serve."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src import hopper
from jaxdnn._src.attention.hopper.plan import TILES
from jaxdnn._src.attention.spec import AttentionSpec, operands_of
from jaxdnn._src.core import engines
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.hopper.sizes import ceil_div

WIDEST = 256  # features of a head
PARTS = TILES[0]  # keys, of whose multiples splits are; and queries, of whose multiples some are computed at once
PARTS_BYTES = 1 << 30  # of the parts of rows that are in memory at once
SCALES, CAPS = (1e-20, 1e20), (2.0**-10, 2.0**10)
MOST = 2**31  # numbers of an array that has one for each pair of query and key, or of logarithms: 32 bits
LENGTHS, SEGMENTS = ("query_lengths", "key_lengths"), ("query_segments", "key_segments")
OF_HEADS, OF_PAIRS = ("alibi_slopes", "sinks"), ("bias", "mask")


def _named(call: engines.Call, values: Iterable[Any]) -> dict[str, Any]:
    return dict(zip(operands_of(call.op, call.spec), values, strict=True))


def _forward(call: engines.Call) -> tuple[Any, Any]:
    """The problem of a call and the kernel's plan, which is None where none fits."""
    from jaxdnn._src.attention.hopper.plan import Mask, Problem, Spread, plan

    spec: AttentionSpec = call.spec
    v = _named(call, call.avals)
    rows, heads = (-2, -3) if spec.heads_first else (-3, -2)
    q, k = v["q"].shape, v["k"].shape
    kinds = NAMES | {jnp.dtype(bool): "bool"}

    def spread(name: str) -> Spread | None:
        if name not in v:
            return None
        shape = v[name].shape
        lead = math.prod(shape[:-3]) > 1
        return Spread((lead, *(n > 1 for n in shape[-3:])), kinds[v[name].dtype])

    split, whole = spec.split, PARTS * ceil_div(k[rows], PARTS)
    if (split is None and spec.wide_y) or (split is not None and split % PARTS == 0 and split > whole):
        split = whole  # a row is one part
    packed = split is not None and _is_packed(tuple(v), q[rows], q[heads], k[heads])
    problem = Problem(
        batch=math.prod(q[:-3]),
        queries=q[heads] // k[heads] if packed else q[rows],
        keys=k[rows],
        heads=k[heads] if packed else q[heads],
        shared=k[heads],
        heads_first=spec.heads_first,
        scale=spec.scale,
        softcap=spec.softcap,
        bottom_right=spec.bottom_right and (spec.left, spec.right) != (None, None),
        shift=spec.shift if spec.bottom_right else 0,
        **{name: name in v for name in (*LENGTHS, "start")},
        bias=spread("bias"),
        mask=spread("mask"),
        slopes="alibi_slopes" in v,
        sinks="sinks" in v and split is None,  # which are merged like a part
        diagonal=spec.diagonal,
        split=split,
        packed=packed,
    )
    lengths = any(name in v for name in LENGTHS)
    mask = Mask(spec.left, spec.right, lengths, pairs="mask" in v, segments="query_segments" in v)
    return problem, plan(NAMES[v["q"].dtype], q[-1], v["v"].shape[-1], problem, mask)


def _is_packed(names: Iterable[str], queries: int, heads: int, shared: int) -> bool:
    """Whether heads that share keys are rows of one block: of one query, where nothing but q differs between them."""
    apart = {"bias", "mask", "alibi_slopes", "query_lengths", "query_segments"} & set(names)
    return queries == 1 and heads > shared and not apart


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.attention.hopper.forward import attention_forward

    problem, plan = _forward(call)
    v = _named(call, operands)
    lead = v["q"].shape[:-3]
    flat = {name: _with_one_lead(name, x, lead) for name, x in v.items()}
    shape = v["q"].shape
    if plan.partial:
        y, lse = _in_parts(problem, plan, flat, jnp.float32 if call.spec.wide_y else v["q"].dtype)
    else:
        q, k, values = (flat.pop(name) for name in ("q", "k", "v"))
        y, lse = attention_forward(q, k, values, flat, problem, plan)
    return y.reshape(*shape[:-1], v["v"].shape[-1]), lse.reshape(shape[:-1])


def _in_parts(problem: Any, plan: Any, v: dict[str, Array], dtype: Any) -> tuple[Array, Array]:
    """y and lse of rows in parts, some queries after the other: the parts of all would need much memory."""
    from jaxdnn._src.attention.hopper.forward import attention_forward
    from jaxdnn._src.attention.hopper.merge import merge
    from jaxdnn._src.attention.hopper.plan import plan as planned

    rows, sinks = _queries_at_once(problem, plan), v.pop("sinks", None)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if problem.packed:
        v["q"] = v["q"].reshape(problem.batch, problem.heads, problem.queries, -1)
    axis = 2 if problem.heads_first or problem.packed else 1

    def of(first: Any, count: int) -> tuple[Array, Array]:
        some, these = problem, dict(v)
        own: Any = plan
        if count < problem.queries:
            some = dataclasses.replace(problem, queries=count, start=True)
            own = planned(plan.dtype, plan.features, plan.values, some, plan.mask)
            these = _of_queries(v, axis, first, count, problem)
        q, k, values = (these.pop(name) for name in ("q", "k", "v"))
        largest, total, summed = attention_forward(q, k, values, these, some, own)
        how = {"packed": some.packed, "heads_first": some.heads_first, "dtype": dtype}
        y, lse = merge(largest, total, summed, sinks, **how)
        inner = (some.heads, count) if axis == 2 else (count, some.heads)
        return y.reshape(some.batch, *inner, -1), lse.reshape(some.batch, *inner)

    if rows == problem.queries:
        return of(0, rows)
    turns, rest = divmod(problem.queries, rows)
    every = lax.map(lambda turn: of(turn * rows, rows), jnp.arange(turns, dtype=jnp.int32))
    joined = [jnp.moveaxis(x, 0, axis) for x in every]  # (B, [N], turns, rows, ...)
    joined = [x.reshape(*x.shape[:axis], turns * rows, *x.shape[axis + 2 :]) for x in joined]
    if rest:
        joined = [jnp.concatenate(both, axis) for both in zip(joined, of(turns * rows, rest), strict=True)]
    return joined[0], joined[1]


def _of_queries(v: dict[str, Array], axis: int, first: Any, count: int, problem: Any) -> dict[str, Array]:
    """What belongs to some of the queries, which stand behind others."""
    some = lambda x, axis: lax.dynamic_slice_in_dim(x, first, count, axis)
    found = dict(v) | {"q": some(v["q"], axis)}
    found |= {name: some(v[name], 2) for name in OF_PAIRS if name in v and v[name].shape[2] > 1}
    found |= {name: some(v[name], 1) for name in SEGMENTS[:1] if name in v}
    place = v.get("start", jnp.zeros((problem.batch, 3), jnp.int32))
    return found | {"start": place + jnp.array([[0, 0, 1]], jnp.int32) * first}


def _queries_at_once(problem: Any, plan: Any) -> int:
    """So many that their parts take a GiB, in blocks of the kernel; or those of one block."""
    if problem.packed:
        return problem.queries
    bytes_ = 4 * problem.batch * problem.heads * problem.parts * (plan.values + 2)
    return min(problem.queries, PARTS * max(1, PARTS_BYTES // bytes_ // PARTS))


def _with_one_lead(name: str, x: Array, lead: tuple[int, ...]) -> Array:
    """An operand with one axis in the place of those in front, of length 1 where all of these have it."""
    own = x.shape[len(lead) :]
    if name in SEGMENTS:
        x = x.astype(jnp.int32)
    if name == "start":
        x = jnp.broadcast_to(x, (*lead, *own))
    whole = x.shape[: len(lead)]
    if whole != lead and math.prod(whole) > 1:  # the same along some of several axes
        x = jnp.broadcast_to(x, (*lead, *own))
    return x.reshape(-1, *own)


def beyond_range(spec: AttentionSpec) -> str | None:
    """Why kernels do not take a call's scale or cap, which stand in their code as float32 numbers.

    A cap c is c (1 - 2 / (1 + e^(2 x / c))), which is off by 2^-23 c, whatever the score x is.
    """
    if not SCALES[0] <= spec.scale <= SCALES[1]:
        return f"its kernels take scales from {SCALES[0]} to {SCALES[1]}, not {spec.scale}"
    if spec.softcap is not None and not CAPS[0] <= spec.softcap <= CAPS[1]:
        return f"its kernels take caps from {CAPS[0]} to {CAPS[1]}, not {spec.softcap}"
    return None


def _unsupported(call: engines.Call) -> str | None:
    """Why no kernel serves a call, on any device."""
    spec: AttentionSpec = call.spec
    v = _named(call, call.avals)
    q, k, values = v["q"], v["k"], v["v"]
    sizes = (q.shape[-1], values.shape[-1])
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its kernel takes bfloat16 and float16, not {q.dtype.name}"
    if not math.prod(q.shape) * math.prod(k.shape) * math.prod(values.shape):
        return "it has nothing to do for an empty array"
    if reason := spec.beyond_kernels(has_parts=True):
        return reason
    if spec.dropout is not None:
        return "its kernel has no dropout"
    if any(n % 8 or n > WIDEST for n in sizes):
        return f"its kernel takes multiples of 8 features, to {WIDEST}, not {sizes[0]} and {sizes[1]}"
    if reason := beyond_range(spec):
        return reason
    if any(name in v and v[name].dtype.itemsize > 4 for name in ("bias", *OF_HEADS, *SEGMENTS)):
        return "its kernel takes biases, slopes, sinks and segments of at most 32 bits"
    problem, plan = _forward(call)
    most = [math.prod(q.shape[:-1]), *(math.prod(v[name].shape) for name in OF_PAIRS if name in v)]
    if max(most) >= MOST or max(problem.queries, problem.keys) >= MOST // 4:
        return "it numbers rows, and pairs of a bias or a mask, in 31 bits"
    if spec.split is not None and spec.split % PARTS:
        return f"its kernel takes splits in multiples of {PARTS} keys, not {spec.split}"
    if plan and plan.partial:
        rows = problem.batch * problem.heads * problem.parts * _queries_at_once(problem, plan)
        if rows * plan.values >= MOST:
            return "it numbers the features of the parts of a block of queries in 31 bits"
    return None if plan else f"its tiles of {sizes[0]} and {sizes[1]} features do not fit"


def _workspace(call: engines.Call) -> int:
    """The mask as bytes, the tiles that are seen of it and of segments, and the parts of rows."""
    from jaxdnn._src.attention.hopper.merge import groups
    from jaxdnn._src.attention.hopper.work import ranges_bytes

    v = _named(call, call.avals)
    problem, plan = _forward(call)
    found = (math.prod(v["mask"].shape) if "mask" in v else 0) + ranges_bytes(problem, plan)
    if plan.partial:
        rows = problem.batch * problem.heads * _queries_at_once(problem, plan)
        found += 4 * rows * (problem.parts + groups(problem.parts)) * (plan.values + 2)
    return found


hopper.declare(
    "attention",
    run=_run,
    unsupported=_unsupported,
    level=lambda call: "batch_invariant",
    accumulation=lambda call: "tensor_core",
    workspace=_workspace,
    notes=("tensor cores", "weights are rounded to the operands' dtype", "exponentials by the special function unit"),
)
