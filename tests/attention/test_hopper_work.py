"""Attention's forward kernel on Hopper: who computes which tiles, what is planned, refused, lowered, assembled."""

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
from jaxdnn._src import hopper
from jaxdnn._src.core import selection

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.attention.hopper import engine, forward, work
from jaxdnn._src.attention.hopper.forward_ptx import code
from jaxdnn._src.attention.hopper.plan import Mask, Plan, Problem, Spread, plan
from jaxdnn._src.attention.hopper.tile_ptx import operands
from tests.attention.calls import read
from tests.hopper import assembler
from tests.hopper.assembler import needs_ptxas
from tests.hopper.attention_machine import every_item

BF16 = jnp.bfloat16


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
    """Forward, rows, and the gradient: they count in 32 bits."""
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    loss = lambda q, k, v: dnn.attention(q, k, v, causal=True).astype(jnp.float32).sum()
    kernels = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        kernels.append(text.count("custom_call @mosaic_gpu"))
    assert kernels == [3, 3]


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
