"""Attention's forward kernel on Hopper without a GPU: its PTX on the machine, its plans, its refusals, its assembly."""

import contextlib
import inspect
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.core.tolerance import ACCUMULATIONS, FORMATS

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.attention.cases import AttentionCase
from jaxdnn._src.attention.hopper import engine, forward, merge
from jaxdnn._src.attention.hopper.forward_ptx import code
from jaxdnn._src.attention.hopper.plan import Plan, Problem
from jaxdnn._src.hopper.ptx import Emitter
from jaxdnn_reference.attention import visible
from jaxdnn_reference.attention_scheduled import attention_scheduled
from tests.attention.calls import read
from tests.hopper import attention_machine, lane_machine, warpgroup_machine
from tests.hopper.attention_machine import every_item
from tests.hopper.device import on_hopper
from tests.hopper.protocol import equations, lowered
from tests.hopper.warpgroup_machine import DTYPES

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
    machine["add"] = warpgroup_machine.modelled
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
        assert not np.array_equal(found, right, equal_nan=True)  # rows that see a NaN are NaN in both


def test_a_wait_that_is_taken_away_shows(machine, monkeypatch):
    """Each wait of a consumer for a load, of queries, keys or values, where all keys are seen."""
    q, k, v = data(64, 400)
    wait, waits = Emitter.wait, list[Any]()
    monkeypatch.setattr(Emitter, "wait", lambda *a: waits.append(a) or wait(*a))
    attention(q, k, v)
    for missing in range(count := len(waits)):
        waits.clear()
        others = lambda *a, missing=missing: waits.append(a) if len(waits) == missing else waits.append(wait(*a))
        monkeypatch.setattr(Emitter, "wait", others)
        with pytest.raises(RuntimeError, match="before a wait for the load"):
            attention(q, k, v)
    assert count == 7


@pytest.mark.parametrize(("heads", "features"), [(8, 64), (1, 256)])
def test_each_load_follows_a_wait_for_its_slot(heads, features):
    """The machine has a producer of its own. The kernel's waits for the barrier that says that a slot has been read."""
    q, k = (jax.ShapeDtypeStruct((2, 512, n, features), BF16) for n in (8, heads))
    (launch,) = lowered(lambda q, k: dnn.attention(q, k, k, causal=True, engine="hopper"), q, k)
    emitted = lambda e: e.params["mgpu_fn"].__qualname__ if e.primitive.name.startswith("inline_mgpu") else ""
    steps = [e for e in equations(launch.jaxpr) if emitted(e).startswith(("_Block.wait_empty", "_Block.fetch"))]
    known = lambda e: inspect.getclosurevars(e.params["mgpu_fn"]).nonlocals
    plan: Plan = next(known(e)["plan"] for e in steps if "plan" in known(e))
    barriers = {plan.barrier(f"{name}_full"): plan.barrier(f"{name}_empty") for name in ("q", "k", "v")}
    found = []
    for wait, load in itertools.pairwise(steps):
        if "plan" in known(load):
            assert emitted(wait).startswith("_Block.wait_empty")
            assert known(wait)["first"] == barriers[known(load)["first"]]
            assert wait.invars[-2] is load.invars[-4], "another slot than the one that was waited for"
            found.append(known(load)["first"])
    assert set(found) == set(barriers)
