"""Attention's forward kernel on Hopper without a GPU: its PTX on the machine, its plans, its refusals, its assembly."""

import contextlib
import dataclasses
import functools as ft
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.tolerance import ACCUMULATIONS, FORMATS

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.attention.arguments import Options
from jaxdnn._src.attention.arguments import read as read_arguments
from jaxdnn._src.attention.cases import AttentionCase
from jaxdnn._src.attention.hopper import engine, forward, merge, work
from jaxdnn._src.attention.hopper.forward_ptx import code
from jaxdnn._src.attention.hopper.plan import Mask, Plan, Problem, Spread, plan
from jaxdnn._src.attention.hopper.tile_ptx import operands
from jaxdnn_reference.attention import visible
from jaxdnn_reference.attention_scheduled import attention_scheduled
from tests.hopper import assembler, attention_machine, lane_machine
from tests.hopper.assembler import needs_ptxas
from tests.hopper.attention_machine import DTYPES, every_item
from tests.hopper.device import on_hopper

BF16 = jnp.bfloat16


# ---- the kernel's PTX on the machine ---------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine runs on the machine; what is put in here are options of `attention_machine.attention`."""
    options: dict[str, Any] = {}

    def run(q: Any, k: Any, v: Any, given: Any, problem: Problem, plan: Plan) -> Any:
        first = lambda x, there=problem.heads_first: x if there else np.swapaxes(x, 1, 2)
        arrays = {name: first(np.asarray(x)) for name, x in (("k", k), ("v", v))}
        arrays |= {name: np.asarray(x) for name, x in given.items()} | {
            "q": first(np.asarray(q), problem.q_heads_first)
        }
        if "mask" in arrays:
            arrays["mask"] = arrays["mask"].astype(np.uint8)
        found = attention_machine.attention(problem, plan, arrays, every_item(problem, plan), **options)
        if plan.partial:
            return tuple(map(jnp.asarray, found))
        y, lse = found
        return jnp.asarray(first(y)).astype(q.dtype), jnp.asarray(first(lse))

    monkeypatch.setattr(forward, "attention_forward", run)
    monkeypatch.setattr(merge, "merge", on_lanes)
    return options


MERGE = merge.merge


def on_lanes(*arrays: Any, **how: Any) -> Any:
    with lane_machine.on_cpu(merge):
        return MERGE(*arrays, **how)


def merged(m: Any, total: Any, values: Any, sinks: Any, *, packed: bool, heads_first: bool, dtype: Any) -> Any:
    """What `merge.merge` computes, in float64."""
    b, n, _, t, e = values.shape
    m, total = m.astype(np.float64), total.astype(np.float64)
    values = np.where(total[..., None] == 0, 0, values)
    if sinks is not None:
        own = np.asarray(sinks, np.float64).reshape(-1, n, t) if packed else np.asarray(sinks)[..., None]
        own = np.broadcast_to(own, (b, n, t))[:, :, None] * np.log2(np.e)
        m, total = np.concatenate([m, own], 2), np.concatenate([total, np.ones_like(own)], 2)
        values = np.concatenate([values, np.zeros((b, n, 1, t, e))], 2)
    top = m.max(2, keepdims=True)
    share = np.exp2(m - np.where(top == -np.inf, 0, top))
    whole = (share * total).sum(2)
    with np.errstate(divide="ignore"):
        lse = np.where(top == -np.inf, 0, top)[:, :, 0] * np.log(2) + np.log(whole)
    y = (share[..., None] * values).sum(2) / np.where(whole == 0, 1, whole)[..., None]
    if not (packed or heads_first):
        y, lse = np.swapaxes(y, 1, 2), np.swapaxes(lse, 1, 2)
    return jnp.asarray(y, dtype).reshape(-1, e), jnp.asarray(lse, jnp.float32).reshape(-1)


def read(q: Any, k: Any, v: Any, **o: Any) -> tuple[engines.Call, Any]:
    """A call as the engine sees it, and its operands."""
    options = Options(**o, engine="hopper", determinism="batch_invariant")
    arrays, spec = read_arguments((("q", q), ("k", k), ("v", v)), options)
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return engines.Call("attention", spec, avals, "cuda"), arrays


def attention(*arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    call, given = read(*arrays, **options)
    assert engine._unsupported(call) is None
    y, lse = engine._run(call, *given)
    return np.asarray(y), np.asarray(lse)


def data(t: int, s: int, d: int = 64, e: int = 64, *, heads: int = 1, seed: int = 0, scale: float = 1.0) -> list[Any]:
    """q, k, v of one sequence, (B, T, N, D)."""
    rng = np.random.default_rng(seed)
    shapes = (1, t, heads, d), (1, s, 1, d), (1, s, 1, e)
    return [(scale * rng.normal(size=shape)).astype(BF16) for shape in shapes]


CASES = [
    ("plain", "bf16", 128, 128), ("causal", "bf16", 256, 256), ("bottom-right", "f16", 96, 40),
    ("window", "bf16", 192, 128), ("capped", "bf16", 64, 64), ("sinks", "f16", 64, 32), ("masked", "bf16", 64, 64),
    ("by-key", "bf16", 40, 104), ("parts", "f16", 64, 40), ("wide", "bf16", 64, 64),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "dtype", "features", "values"), CASES)
def test_results_are_within_the_bound(machine, variant, dtype, features, values):
    sizes = {"batch": 2, "queries": 150, "keys": 200, "heads": 2, "shared": 1, "features": features, "values": values}
    case = AttentionCase("attention", "hopper", dtype, variant, **sizes)
    given = case.operands("wide", np.random.default_rng(1))
    more = {"out_dtype": "float32"} if variant == "wide" else {}
    found = attention(*given[:3], **case._named(given), **case.options, **more)
    for x, expected in zip(found, case.expected("wide", given, ACCUMULATIONS["tensor_core"]), strict=True):
        rule, value = FORMATS[np.dtype(expected.dtype).name], expected.value
        seen = np.isfinite(value)
        assert (np.isfinite(x.astype(np.float64)) == seen).all()
        off = np.abs(np.where(seen, x.astype(np.float64) - np.where(seen, value, 0), 0))
        rounded = rule.roundoff * np.abs(np.where(seen, value, 0)) + rule.smallest_subnormal
        assert (off <= rounded + (1 + rule.roundoff) * np.where(seen, expected.error, 0)).all(), expected.name


def test_a_row_that_sees_nothing_is_zero(machine):
    q, k, v = data(70, 40)
    y, lse = attention(q, k, v, causal="bottom_right", query_lengths=np.array([60]), key_lengths=np.array([20]))
    nothing = np.r_[0:40, 60:70]
    assert (y[0, nothing] == 0).all()
    assert (lse[0, nothing] == -np.inf).all()
    assert np.isfinite(lse[0, 40:60]).all()


PARTS = [
    ({}, {}), ({"window": 150}, {}), ({"alibi": True}, {}), ({"sinks": True}, {"heads_first": True}),
    ({"softcap": 2.0}, {"queries": 3}), ({"window": 150}, {"queries": 70, "shared": 4}),
    ({"window": 20}, {"heads": 140, "shared": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "how"), PARTS)
def test_splits_are_merged_to_the_whole(machine, options, how):
    """The last queries over a cache, of which rows, heads that share keys and parts behind the last key have shares."""
    b, t, s, d, e = 2, how.get("queries", 1), 300, 64, 40
    n, h = how.get("heads", 4), how.get("shared", 2)
    rng, options = np.random.default_rng(5), dict(options)
    q, k, v = (rng.normal(size=shape).astype(BF16) for shape in ((b, t, n, d), (b, s, h, d), (b, s, h, e)))
    lengths = np.array([129, 300], np.int32)
    named = {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32)} if options.pop("alibi", False) else {}
    named |= {"sinks": np.array([0.5, -1, 2, 0], np.float32)} if options.pop("sinks", False) else {}
    wide = [x.astype(np.float64) for x in (q, k, v)]
    how_long: dict[str, Any] = {"split": 128, "return_logsumexp": True}
    wanted, log = reference.attention_decode(wide[0], wide[1], wide[2], lengths, **options, **named, **how_long)
    options |= named | {"causal": "bottom_right", "key_lengths": lengths}
    if how.get("heads_first"):
        q, k, v, wanted = (np.swapaxes(x, 1, 2) for x in (q, k, v, wanted))
        log, options = np.swapaxes(log, 1, 2), options | {"layout": "BNTH"}
    window = (options.pop("window", None), 0)
    y, lse = attention(q, k, v, **options, window=window, split=128, diagonal=True)
    np.testing.assert_allclose(y.astype(np.float64), wanted, atol=0.02, rtol=0.02)
    np.testing.assert_allclose(lse, log, atol=1e-4)


@pytest.mark.parametrize(
    "given",
    [
        {"query_lengths": np.array([0, 1], np.int32)},
        {"query_segments": np.array([[1], [0]], np.int32), "key_segments": np.arange(300)[None].repeat(2, 0) // 150},
    ],
)
def test_one_query_of_heads_that_share_keys_has_bounds_of_its_own(machine, given):
    """Rows of one block are its heads only where nothing is known of the query alone."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.normal(size=(2, *shape)).astype(BF16) for shape in ((1, 4, 64), (300, 2, 64), (300, 2, 40)))
    wide = (x.astype(np.float64) for x in (q, k, v))
    wanted, log = reference.attention(*wide, **given, split=128, return_logsumexp=True)
    y, lse = attention(q, k, v, **given, split=128)
    np.testing.assert_allclose(y.astype(np.float64), wanted, atol=0.02, rtol=0.02)
    np.testing.assert_allclose(lse, log, atol=1e-4)


def test_blocks_of_queries_one_after_the_other_have_the_bits_of_all(machine, monkeypatch):
    """Where the parts of all rows need much memory; with what is known of each query."""
    rng, t, s = np.random.default_rng(8), 300, 280
    q, k, v = (rng.normal(size=(2, *shape)).astype(BF16) for shape in ((t, 2, 64), (s, 1, 64), (s, 1, 40)))
    how = {"bias": rng.normal(size=(1, 2, t, s)).astype(np.float32), "window": (200, 50), "split": 128}
    how |= {"query_segments": (np.arange(t) // 140)[None].repeat(2, 0), "key_segments": np.zeros((2, s), int)}
    y, lse = attention(q, k, v, **how)
    monkeypatch.setattr(engine, "PARTS_BYTES", 1)
    with jax.disable_jit():  # the machine has no traced numbers
        found, log = attention(q, k, v, **how)
    assert found.tobytes() == y.tobytes()
    assert log.tobytes() == lse.tobytes()


@pytest.mark.parametrize("queries", [1, 3])
def test_parts_have_the_bits_of_the_same_rows_of_all(machine, queries):
    """One of four heads that share keys, packed or not; with room behind the last key or without."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=shape).astype(BF16) for shape in ((1, 150, 4, 64), (1, 150, 2, 64), (1, 150, 2, 64)))
    y, lse = attention(q, k, v, causal=True, split=128)
    room = ((0, 0), (0, 170), (0, 0), (0, 0))
    lengths = {"key_lengths": np.array([150], np.int32), "causal": "bottom_right", "split": 128}
    found, log = attention(q[:, -queries:], np.pad(k, room), np.pad(v, room), **lengths)
    assert found.tobytes() == y[:, -queries:].tobytes()
    assert log.tobytes() == lse[:, -queries:].tobytes()


@pytest.mark.parametrize("place", [3, 100, 130, 199])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_seen_changes_no_bit(machine, place, value):
    """Nor what is seen another column. Rows before a key do not see it."""
    q, k, v = data(200, 200, 64, 32)
    y, lse = attention(q, k, v, causal=True)
    k[:, place], v[:, place, :, 5] = value, value
    found, log = attention(q, k, v, causal=True)
    assert found[:, :place].tobytes() == y[:, :place].tobytes()
    assert log[:, :place].tobytes() == lse[:, :place].tobytes()
    k[:, place] = data(200, 200)[1][:, place]
    found, log = attention(q, k, v, causal=True)
    assert not np.isfinite(found[:, place:, :, 5].astype(np.float32)).any()
    others = np.delete(np.arange(32), 5)
    assert found[..., others].tobytes() == y[..., others].tobytes()
    assert log.tobytes() == lse.tobytes()


def test_bits_do_not_depend_on_the_other_rows(machine):
    """Ten of 300 rows alone, with as many keys as the last of them sees, have the bits of the whole."""
    q, k, v = data(300, 300)
    y, lse = attention(q, k, v, causal=True)
    part, log = attention(q[:, 150:160], k[:, :160], v[:, :160], causal="bottom_right")
    assert part.tobytes() == y[:, 150:160].tobytes()
    assert log.tobytes() == lse[:, 150:160].tobytes()


def test_tiles_that_are_left_out_change_no_bit(machine):
    """A window, and the same as a mask of all pairs, of which no tile is known before."""
    q, k, v = data(300, 400)
    i, j = np.arange(300)[:, None], np.arange(400)[None]
    seen = (j >= i - 40) & (j <= i + 9)
    y, lse = attention(q, k, v, window=(40, 9))
    found, log = attention(q, k, v, mask=seen[None, None])
    assert found.tobytes() == y.tobytes()
    assert log.tobytes() == lse.tobytes()


BITS = [
    ("bf16", 64, 64, {"causal": True}), ("f16", 128, 40, {"window": (60, 9), "scale": 1.5}),
    ("bf16", 256, 256, {"key_lengths": [90]}), ("bf16", 64, 64, {"sinks": [0.5, -np.inf], "causal": "bottom_right"}),
]  # fmt: skip


def _as_arrays(how: dict[str, Any], heads: int) -> dict[str, Any]:
    arrays = {"sinks": np.resize(how.get("sinks", [0]), heads).astype(np.float32)}
    arrays["key_lengths"] = np.asarray(how.get("key_lengths", [0]))
    return how | {name: x for name, x in arrays.items() if name in how}


def predicted(q: Any, k: Any, v: Any, **how: Any) -> np.ndarray:
    """y as the definition of the kernel's schedule has it, (B, T, N, E)."""
    call, _ = read(q, k, v, **how)
    sizes: Any = (len(q), q.shape[1], k.shape[1])
    bounds: Any = (how.get("causal", False), how.get("window"), None, None, how.get("key_lengths"), None, None)
    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    options: Any = {"scale": call.spec.scale, "tile": engine._forward(call)[1].keys, "sinks": how.get("sinks")}
    return np.ascontiguousarray(np.swapaxes(attention_scheduled(q, k, v, visible(*sizes, *bounds), **options), 1, 2))


@pytest.mark.parametrize(("dtype", "features", "values", "how"), BITS)
def test_bits_are_those_of_the_stated_schedule(machine, dtype, features, values, how):
    """On the machine with the model of the matrix unit: whether the definition states what the kernel does."""
    machine["add"] = attention_machine.modelled
    q, k, v = (x.astype(DTYPES[dtype]) for x in data(70, 140, features, values, heads=2, scale=3.0))
    how = _as_arrays(how, 2)
    y, _ = attention(q, k, v, **how)
    assert y.tobytes() == predicted(q, k, v, **how).tobytes()


@on_hopper
@pytest.mark.parametrize(("dtype", "features", "values", "how"), BITS)
def test_bits_are_predicted(dtype, features, values, how):
    q, k, v = (x.astype(DTYPES[dtype]) for x in data(300, 500, features, values, heads=3, scale=3.0))
    how = _as_arrays(how, 3)
    y = jax.jit(lambda *a: dnn.attention(*a, **how, engine="hopper"))(q, k, v)
    assert np.asarray(y).tobytes() == predicted(q, k, v, **how).tobytes()


MERGED = [  # b, n, parts, t, e; whether rows are heads; whether heads come first; sinks for how many sequences
    ((2, 3, 5, 4, 40), False, False, 0), ((2, 3, 17, 1, 8), False, True, 1), ((2, 2, 40, 3, 24), True, False, 2),
    ((2, 2, 70, 3, 16), True, True, 1), ((1, 1, 1, 7, 136), False, False, 0),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "packed", "heads_first", "of_sinks"), MERGED)
def test_parts_are_merged(sizes, packed, heads_first, of_sinks):
    """Of some nothing is seen, and their values are what was in memory. Further ones behind them change no bit."""
    rng, (b, n, _, t, _) = np.random.default_rng(3), sizes
    m, total = rng.normal(0, 3, sizes[:-1]).astype(np.float32), rng.uniform(1, 50, sizes[:-1]).astype(np.float32)
    values = rng.normal(size=sizes).astype(np.float32) * total[..., None]
    unseen = rng.random(sizes[:-1]) < 0.3
    unseen[0, 0, :, 0] = True
    m[unseen], total[unseen], values[unseen] = -np.inf, 0, np.nan
    sinks = rng.normal(size=(of_sinks, n * t if packed else n)).astype(np.float32) if of_sinks else None
    how = {"packed": packed, "heads_first": heads_first, "dtype": jnp.float32}
    wanted, log = merged(m, total, values, sinks, **how)
    y, lse = on_lanes(*map(jnp.asarray, (m, total, values)), sinks, **how)
    np.testing.assert_allclose(y, wanted, atol=2e-6)
    np.testing.assert_allclose(lse, log, atol=4e-6)
    behind = lambda x, value: np.concatenate([x, np.full((b, n, 45, *x.shape[3:]), value, np.float32)], 2)
    more = on_lanes(*map(jnp.asarray, (behind(m, -np.inf), behind(total, 0), behind(values, np.nan))), sinks, **how)
    for found, before in zip(more, (y, lse), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(before).tobytes()


@on_hopper
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("room", [700, 2048, 4097, 20_000, 70_000])
def test_rows_have_the_same_bits_in_any_room(queries, room):
    """Of a cache: parts behind the last key, which one kernel merges or several, change nothing."""
    rng = np.random.default_rng(9)
    q, k, v = (rng.normal(size=(2, 700, n, 128)).astype(BF16) for n in (8, 2, 2))
    how = {"split": 128, "engine": "hopper", "return_logsumexp": True}
    cache = [np.pad(x, ((0, 0), (0, room - 700), (0, 0), (0, 0))) for x in (k, v)]
    wanted = jax.jit(lambda *a: dnn.attention(*a, causal=True, **how))(q, k, v)
    found = jax.jit(lambda *a: dnn.attention_decode(*a, **how))(q[:, -queries:], *cache, np.array([700, 700]))
    for x, y in zip(found, wanted, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y)[:, -queries:].tobytes()


# What is changed in the text, and what then shows; `None`: wrong results.
FAULTS = [
    (r"@!?p\d+ mbarrier\.arrive\S* _, \[r\d+\];", "", "a wait without an end"),
    (r"bar\.arrive r\d+, 256;", "", "a wait without an end"),
    (r"wgmma\.wait_group\.sync\.aligned 1;", "", "in flight"),
    (r"wgmma\.wait_group\.sync\.aligned 0;", "", "in flight"),
    (r"setp\.gt\.s32", "setp.ge.s32", None),
    (r"fma\.rn\.f32 (f\d+), \1, (f\d+), (f\d+);", r"mov.f32 \1, \3;", None),
    (r"bar\.red\.or\.pred (p\d+), (r\d+), 128, p\d+;", r"setp.ne.u32 \1, 0, 0;", None),
]


@pytest.mark.parametrize(("pattern", "instead", "shows"), FAULTS)
def test_faults_are_found(machine, monkeypatch, pattern, instead, shows):
    q, k, v = data(300, 300)
    v[:, 280:] = np.nan
    right, _ = attention(q, k, v, causal=True)

    def changed(problem: Problem, plan: Plan) -> str:
        text, count = re.subn(pattern, instead, code(problem, plan))
        assert count
        return text

    monkeypatch.setattr(attention_machine, "code", changed)
    with pytest.raises(RuntimeError, match=shows) if shows else contextlib.nullcontext():
        found, _ = attention(q, k, v, causal=True)
        assert (found != right).any()


# ---- which tiles, and who computes them ------------------------------------------------------------------------------


def _drawn_problem(rng: np.random.Generator) -> tuple[Problem, Plan, dict[str, Any]]:
    one_of = lambda *values: values[int(rng.integers(len(values)))]
    t, s = int(rng.integers(1, 700)), int(rng.integers(1, 700))
    lengths = {"query_lengths": one_of(True, False), "key_lengths": one_of(True, False)}
    bottom_right, start = one_of(True, False), one_of(True, False)
    problem = Problem(
        2, t, s, 2, 1, True, 0.1, bottom_right=bottom_right, shift=s - t if bottom_right else 0, start=start, **lengths
    )
    mask = Mask(one_of(None, int(rng.integers(300))), one_of(None, 0, int(rng.integers(300))), any(lengths.values()))
    given = {
        "query_lengths": jnp.asarray(rng.integers(0, t + 1, 2), jnp.int32),
        "key_lengths": jnp.asarray(rng.integers(0, s + 1, 2), jnp.int32),
        "start": jnp.asarray([[0, 0, int(rng.integers(0, 90))]] * 2, jnp.int32),
    }
    found = plan("bf16", one_of(64, 128, 256), 64, problem, mask)
    assert found is not None
    return problem, found, given


def _seen(problem: Problem, mask: Mask, given: dict[str, Any], image: int) -> np.ndarray:
    i = np.arange(problem.queries)[:, None] + (int(given["start"][image, 2]) if problem.start else 0)
    j = np.arange(problem.keys)[None]
    rows = int(given["query_lengths"][image]) if problem.query_lengths else problem.keys - problem.shift
    keys = int(given["key_lengths"][image]) if problem.key_lengths else problem.keys
    seen = (j < keys) & ((i < rows) | (not problem.query_lengths))
    gap = j - i - ((keys - rows) if problem.bottom_right else 0)
    seen = seen & (gap <= mask.right if mask.right is not None else True)
    return seen & (gap >= -mask.left if mask.left is not None else True)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_are_those_that_are_seen(seed):
    problem, plan, given = _drawn_problem(np.random.default_rng(seed))
    for b, n, row, part in every_item(problem, plan):
        item = work.bounded(problem, plan, given, *map(jnp.int32, (b, n, row, part)))
        item = {name: int(value) for name, value in vars(item).items()}
        seen = _seen(problem, plan.mask, given, b)[row : row + plan.block_rows]
        for j in range(-(-problem.keys // plan.keys)):
            tile = seen[:, j * plan.keys : (j + 1) * plan.keys]
            assert item["first"] <= j < item["last"] or not tile.any()
            if item["first"] <= j < item["last"] and item["whole_from"] <= j < item["whole_to"]:
                assert tile.all()
                assert tile.shape[1] == plan.keys


@pytest.mark.parametrize("seed", range(5))
def test_tiles_of_arrays_are_those_that_are_seen(seed):
    rng = np.random.default_rng(seed)
    t, s = int(rng.integers(1, 600)), int(rng.integers(1, 600))
    axes = [bool(rng.integers(2)) for _ in range(4)]
    shape = [n if there else 1 for n, there in zip((2, 3, t, s), axes, strict=True)]
    full, segments = rng.random() < 0.5, rng.random() < 0.5
    mask = np.repeat(np.repeat(rng.random([*shape[:2], -(-shape[2] // 90), -(-shape[3] // 150)]) < 0.5, 90, 2), 150, 3)
    mask = mask[:, :, : shape[2], : shape[3]] | full
    problem = Problem(2, t, s, 3, 1, True, 0.1, mask=Spread((axes[0], axes[1], axes[2], axes[3]), "bool"))
    found = plan("bf16", 64, 64, problem, Mask(pairs=True, segments=segments))
    assert found is not None
    queries, keys = (np.sort(rng.integers(0, 4, (2, n)), 1).astype(np.int32) for n in (t, s))
    given = {"mask": jnp.asarray(mask), "query_segments": jnp.asarray(queries), "key_segments": jnp.asarray(keys)}
    ranges = np.asarray(work.ranges(problem, found, given))
    seen = np.broadcast_to(mask, (2, 3, t, s))
    if segments:
        seen = seen & (queries[:, None, :, None] == keys[:, None, None])
    for b, n, i in itertools.product(range(2), range(3), range(-(-t // found.block_rows))):
        first, whole_from, whole_to, last = ranges[b, n if ranges.shape[1] > 1 else 0, i]
        rows = seen[b, n, i * found.block_rows : (i + 1) * found.block_rows]
        for j in range(-(-s // found.keys)):
            tile = rows[:, j * found.keys : (j + 1) * found.keys]
            assert first <= j < last or not tile.any()
            assert tile.all() or not whole_from <= j < whole_to


@pytest.mark.parametrize("right", [None, 0])
def test_every_item_is_computed_once(right):
    problem = Problem(2, 900, 900, 6, 3, True, 0.1)
    found = plan("bf16", 128, 128, problem, Mask(50 if right is None else None, right))
    assert found is not None
    table = work.work_table(problem, found, 7)
    assert table is not None
    numbers = [int(n) for row in table for n in row[1 : row[0] + 1]]
    assert sorted(numbers) == list(range(work.count(problem, found)))
    places = {tuple(map(int, work.placed(jnp.int32(n), problem, found))) for n in numbers}
    assert len(places) == len(numbers)
    assert {head for _, _, head in places} == set(range(12))


def test_every_part_is_computed_once():
    problem = Problem(2, 300, 900, 6, 3, True, 0.1, split=256)
    found = plan("bf16", 128, 128, problem, Mask(None, 0))
    assert found is not None
    assert work.work_table(problem, found, 7) is None
    places = [tuple(map(int, work.placed(jnp.int32(n), problem, found))) for n in range(work.count(problem, found))]
    tiles = -(-300 // found.block_rows)
    assert sorted(places) == [(t, p, h) for t in range(tiles) for p in range(4) for h in range(12)]


def test_the_longest_come_first_and_no_block_waits_long():
    costs = [int(c) for c in sorted(np.random.default_rng(0).integers(1, 33, 500), reverse=True)]
    table = work.shared_out(costs, 11)
    loads = [sum(costs[n] for n in row[1 : row[0] + 1]) for row in table]
    assert max(loads) - min(loads) <= 2


# ---- what the planner and the engine say -----------------------------------------------------------------------------


@pytest.mark.parametrize("features", range(8, 257, 8))
def test_plans_fit(features):
    """Shared memory, registers; and sizes that have no plan are refused, of which there are few."""
    for values in range(8, 257, 8):
        problem = Problem(1, 1000, 1000, 1, 1, True, 0.1)
        found = plan("bf16", features, values, problem, Mask(None, 0))
        if found is None:
            assert features >= 200
            assert values >= 232
            continue
        assert found.fits(apart=not found.out_in_q)
        assert found.barriers <= 32
        assert 128 * (found.registers + 40) * found.consumers <= 65536 - 128 * 32


REFUSED = [
    (dict(dtype=jnp.float32), "takes bfloat16 and float16, not float32"),
    (dict(t=0), "nothing to do for an empty array"),
    (dict(d=68), "multiples of 8 features, to 256, not 68 and 64"),
    (dict(e=264), "multiples of 8 features, to 256, not 64 and 264"),
    (dict(d=208, e=248), "its tiles of 208 and 248 features do not fit"),
    (dict(scale=-1.0), "take scales from 1e-20 to 1e+20, not -1.0"),
    (dict(scale=1e300), "take scales"),
    (dict(softcap=1e6), "take caps from 0.0009765625 to 1024.0, not 1000000.0"),
    (dict(softcap=1e-40), "take caps"),
    (dict(dropout=0.5, dropout_key=np.zeros(2, np.uint32)), "no dropout"),
    (dict(split=100), "takes splits in multiples of 128 keys, not 100"),
]


@pytest.mark.parametrize(("how", "why"), REFUSED)
def test_refusals(how, why):
    sizes = {"t": 10, "d": 64, "e": 64, "dtype": BF16} | {n: how[n] for n in how if n in ("t", "d", "e", "dtype")}
    q, k, v = (jnp.zeros((1, n, 1, f), sizes["dtype"]) for n, f in zip((sizes["t"], 20, 20), "dde", strict=True)
               for f in [sizes[f]])  # fmt: skip
    call, _ = read(q, k, v, **{n: x for n, x in how.items() if n not in ("t", "d", "e", "dtype")})
    assert why in (engine._unsupported(call) or "")


OF_ALL_KINDS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"causal": "bottom_right"}, {"window": (9, 9)}, {"sinks": np.zeros(4, np.float32)},
    {"dtype": jnp.float16}, {"t": 5}, {"heads": 2}, {"d": 56}, {"layout": "BNTH"},
]  # fmt: skip


@pytest.mark.parametrize("how", OF_ALL_KINDS)
def test_unasked_it_serves_wherever_it_can(how):
    """On an H200, where each kind that was timed took a half to a fifteenth of XLA's time."""
    sizes: dict[str, Any] = {"t": 2048, "d": 64, "heads": 4, "dtype": BF16} | how
    o = {n: x for n, x in how.items() if n not in ("t", "d", "heads", "dtype")}
    swap = (lambda x: np.swapaxes(x, 1, 2)) if o.get("layout") == "BNTH" else (lambda x: x)
    rows = (sizes["t"], 4), (2048, sizes["heads"]), (2048, sizes["heads"])
    call, _ = read(*(swap(np.zeros((8, n, h, sizes["d"]), sizes["dtype"])) for n, h in rows), **o)
    for level in ("fast", "batch_invariant"):
        spec = dataclasses.replace(call.spec, engine=None, level=level)
        here = dataclasses.replace(call, spec=spec, device_kind="NVIDIA H200")
        assert selection.select(here).name == "hopper"
        assert selection.select(dataclasses.replace(here, device_kind="NVIDIA A100")).name != "hopper"


def test_in_64_bit_mode_kernels_are_lowered_alike(h200: None):
    """Forward and backward: they count in 32 bits."""
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    loss = lambda q, k, v: dnn.attention(q, k, v, causal=True).astype(jnp.float32).sum()
    kernels = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        kernels.append(text.count("custom_call @mosaic_gpu"))
    assert kernels == [4, 4]


def lowered(f: Any, *avals: Any) -> int:
    """The number of kernels in a program that is lowered for a GPU that is not here."""
    return jax.jit(f).trace(*avals).lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu")


def test_decoding_is_lowered_to_kernels_and_differentiated(h200: None):
    """Unasked; also more rows than have room for their parts at once, and a split of more keys than there are."""
    q, k = (jax.ShapeDtypeStruct((2, *shape), BF16) for shape in ((1, 8, 64), (4000, 2, 64)))
    n = jax.ShapeDtypeStruct((2,), jnp.int32)
    loss = lambda q, k, v, n: dnn.attention_decode(q, k, v, n).astype(jnp.float32).sum()
    assert lowered(dnn.attention_decode, q, k, k, n) == 2
    assert lowered(jax.grad(loss, (0, 1, 2)), q, k, k, n) == 2
    long = jax.ShapeDtypeStruct((1, 30_000, 32, 128), BF16)
    assert lowered(lambda q, k, v: dnn.attention(q, k, v, causal=True, split=256), long, long, long) == 6
    assert lowered(lambda q, k, v: dnn.attention(q, k, v, split=2**45), q, k, k) == 2


def test_rings_are_lowered_to_kernels(h200: None):
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), BF16)
    rows = PartitionSpec(None, "x")
    ring = ft.partial(dnn.ring.attention, axis_name="x", causal=True)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    assert lowered(jax.shard_map(ring, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows), x, x, x) >= 2


def test_a_scale_of_a_call_is_kept_apart_from_others():
    """The text is made for one scale: two calls have two."""
    problem = Problem(1, 10, 20, 1, 1, True, 0.5)
    found = plan("bf16", 64, 64, problem, Mask())
    other = Problem(1, 10, 20, 1, 1, True, 0.25)
    assert found is not None
    assert code(problem, found) != code(other, found)


# ---- the assembler ---------------------------------------------------------------------------------------------------


def _kernel(problem: Problem, plan: Plan) -> str:
    """The consumers' text as a kernel of as many threads and registers as the frame gives it."""
    kinds, types = operands(problem, plan), {"r": "b32", "f": "f32", "l": "b64"}
    producer, consumer = forward.REGISTERS[plan.consumers]
    threads = 128 * (plan.consumers + 1)
    names = {i: f"given{i}" for i in range(len(kinds))}
    lines = [".version 8.6", f".target {assembler.TARGET}", ".address_size 64"]
    parameters = ", ".join(f".param .{types[kind]} p{i}" for i, kind in enumerate(kinds.values()))
    lines += [f".visible .entry attention({parameters}) .maxntid {threads}, 1, 1 .minnctapersm 1", "{"]
    for i, kind in enumerate(kinds.values()):
        lines += [f".reg .{types[kind]} {names[i]};", f"ld.param.{types[kind]} {names[i]}, [p{i}];"]
    lines += [".reg .pred other; .reg .b32 number; mov.u32 number, %tid.x;"]
    lines += [f"setp.ge.u32 other, number, {threads - 128};", "@other bra OTHER;"]
    lines += [f"setmaxnreg.inc.sync.aligned.u32 {consumer};"]
    lines += [re.sub(r"\$(\d+)", lambda m: names[int(m.group(1))], code(problem, plan)), "bra END;"]
    lines += ["OTHER:", f"setmaxnreg.dec.sync.aligned.u32 {producer};", "END:", "ret;", "}"]
    return "\n".join(lines)


PAIRS = Spread((False, True, True, True), "f32")
# Features, values, bounds and options, and the bytes that may be spilled.
BUDGETS = [
    (64, 64, Mask(), {}, 0), (64, 64, Mask(None, 0), {}, 16), (128, 128, Mask(), {}, 0),
    (128, 128, Mask(None, 0), {}, 0), (128, 128, Mask(9, 9, True), {"query_lengths": True}, 0),
    (256, 256, Mask(None, 0), {}, 0), (192, 128, Mask(None, 0), {}, 0),
    (128, 128, Mask(None, 0), {"softcap": 5.0, "sinks": True}, 0),
    (128, 128, Mask(None, 0), {"slopes": True, "bias": PAIRS}, 0),
    (128, 128, Mask(pairs=True, segments=True), {"mask": Spread((True, True, True, True), "bool")}, 256),
    (128, 128, Mask(None, 0, True), {"split": 256}, 0),
    (128, 128, Mask(None, 0, True), {"split": 256, "packed": True, "queries": 4}, 0),
    (256, 256, Mask(None, 0, True), {"split": 256, "packed": True, "queries": 4}, 0),
    (128, 128, Mask(None, 0, True), {"split": 256, "slopes": True, "diagonal": True, "queries": 4}, 32),
]  # fmt: skip


@needs_ptxas
@pytest.mark.parametrize(("features", "values", "mask", "more", "most"), BUDGETS)
def test_registers_suffice_and_products_overlap(tmp_path: Path, features, values, mask, more, most):
    """And no product is one that the assembler would wait for at once."""
    more = dict(more)
    problem = Problem(2, more.pop("queries", 4096), 4096, 8, 8, True, 0.1, **more)
    found = plan("bf16", features, values, problem, mask)
    assert found is not None
    source = tmp_path / "attention.ptx"
    source.write_text(_kernel(problem, found))
    command = [str(assembler.ptxas()), f"-arch={assembler.TARGET}", "-v", str(source), "-o", str(tmp_path / "cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "serialized" not in said, said
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled
    assert int(spilled[1]) <= most, said


# ---- the frame -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_lowers_under_transformations(monkeypatch, layout):
    """For a GPU that is not here: vmap over queries and values alone, and what is mapped with them or not."""
    q, k, v = (jnp.zeros((1, *((n, h) if layout == "BTNH" else (h, n)), 64), BF16) for n, h in ((9, 4), (8, 2), (8, 2)))
    mask, sinks = jnp.ones((1, 1, 9, 8), bool), jnp.zeros((3, 4))
    run = lambda q, v, s: dnn.attention(q, k, v, causal=True, mask=mask, sinks=s, layout=layout, engine="hopper")
    mapped = jax.vmap(run, (0, None, 0))
    text = jax.jit(mapped).trace(jnp.stack([q] * 3), v, sinks).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 1
