"""The `hopper` engine of attention: which calls the kernels for compute capability 9.0 serve."""

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.attention.spec import AttentionSpec, operands_of
from jaxdnn._src.core import engines
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.hopper.sizes import ceil_div

WIDEST = 256  # features of a head
PARTS = 128  # a tile of keys, of whose multiples splits are
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

    # A row in float32 may be one part.
    split = PARTS * ceil_div(k[rows], PARTS) if spec.wide_y and spec.split is None else spec.split
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
    apart = {"bias", "mask", "alibi_slopes", "query_lengths"} & set(names)
    return queries == 1 and heads > shared and not apart


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.attention.hopper.forward import attention_forward
    from jaxdnn._src.attention.hopper.merge import merge

    problem, plan = _forward(call)
    v = _named(call, operands)
    lead = v["q"].shape[:-3]
    flat = {name: _with_one_lead(name, x, lead) for name, x in v.items()}
    q, k, values = (flat.pop(name) for name in ("q", "k", "v"))
    shape = v["q"].shape
    if plan.partial:
        sinks = flat.pop("sinks").astype(jnp.float32) if "sinks" in flat else None
        if problem.packed:
            q = q.reshape(problem.batch, problem.heads, problem.queries, -1)
        largest, total, summed = attention_forward(q, k, values, flat, problem, plan)
        dtype = jnp.float32 if call.spec.wide_y else q.dtype
        how = {"packed": problem.packed, "heads_first": problem.heads_first, "dtype": dtype}
        y, lse = merge(largest, total, summed, sinks, **how)
    else:
        y, lse = attention_forward(q, k, values, flat, problem, plan)
    return y.reshape(*shape[:-1], v["v"].shape[-1]), lse.reshape(shape[:-1])


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
    if reason := spec.beyond_kernels(split=True, diagonal=True, wide_y=True):
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
    if plan is None and spec.split is not None and spec.split % PARTS:
        return f"its kernel takes splits in multiples of {PARTS} keys, not {spec.split}"
    return None if plan else f"its tiles of {sizes[0]} and {sizes[1]} features do not fit"


def _workspace(call: engines.Call) -> int:
    """The mask as bytes, the tiles that are seen of it and of segments, and the parts of rows."""
    from jaxdnn._src.attention.hopper.merge import GROUP
    from jaxdnn._src.attention.hopper.work import ranges_bytes

    v = _named(call, call.avals)
    problem, plan = _forward(call)
    rows = problem.batch * problem.heads * problem.queries if plan.partial else 0
    parts = 4 * rows * (problem.parts + ceil_div(problem.parts, GROUP)) * (plan.values + 2)
    return (math.prod(v["mask"].shape) if "mask" in v else 0) + ranges_bytes(problem, plan) + parts


hopper.declare(
    "attention",
    run=_run,
    unsupported=_unsupported,
    level=lambda call: "batch_invariant",
    accumulation=lambda call: "tensor_core",
    workspace=_workspace,
    notes=("tensor cores", "weights are rounded to the operands' dtype", "exponentials by the special function unit"),
)
