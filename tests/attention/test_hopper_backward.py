"""The Hopper kernels of attention's gradient, without a GPU.

Every plan is lowered for CUDA and its PTX goes through the assembler; ranges of tiles are compared with the pairs that
see each other; the kernels' values are computed by an interpreter (`backward_values`), and `tests.hopper.protocol`
looks at the order of their accesses to shared memory. On a GPU they are compared with the definition.
"""

import dataclasses
import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.attention.hopper import backward, backward_launch, backward_plan, backward_rows
from jaxdnn._src.attention.hopper.backward_plan import TILE, Extent, Problem, Spread, Window
from jaxdnn._src.hopper import branches
from tests.hopper import assembler
from tests.hopper.device import on_hopper
from tests.hopper.protocol import kernels, place_of
from tests.hopper.shared_memory import Fault

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)
from tests.attention.backward_values import gradients

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A call: sequences, queries, keys, heads, shared heads, features, features of values; options."""

    b: int
    t: int
    s: int
    n: int
    k: int
    d: int
    e: int
    dtype: Any = BF16
    layout: str = "BTNH"
    causal: Any = False
    window: Any = None
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    softcap: float | None = None
    given: tuple[str, ...] = ()  # further operands
    narrow: tuple[str, ...] = ()  # axes of a bias and a mask that have length 1, of "BNTS"

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"causal": self.causal, "window": self.window, "layout": self.layout}
        found |= {} if self.softcap is None else {"softcap": self.softcap}
        for name in ("query_lengths", "key_lengths"):
            if (given := getattr(self, name)) is not None:
                found[name] = np.asarray(given, np.int32)
        return found

    def shape(self, heads: int, rows: int, width: int) -> tuple[int, ...]:
        return (self.b, rows, heads, width) if self.layout == "BTNH" else (self.b, heads, rows, width)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        y = self.shape(self.n, self.t, self.e)
        keys = {"k": self.shape(self.k, self.s, self.d), "v": self.shape(self.k, self.s, self.e)}
        return {"dy": y, "q": self.shape(self.n, self.t, self.d), **keys, "y": y, "lse": y[:-1]}

    def operands(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Those by name that change scores, or what is seen."""
        rng = np.random.default_rng(seed)
        spread = tuple(
            1 if a in self.narrow else n for a, n in zip("BNTS", (self.b, self.n, self.t, self.s), strict=True)
        )
        every = {
            "bias": rng.normal(size=spread).astype(np.float32).astype(self.dtype),
            "alibi_slopes": (2.0 ** -rng.integers(1, 8, self.n)).astype(np.float32),
            "sinks": rng.normal(size=self.n).astype(np.float32),
            "mask": rng.random((*spread[:1], 1, *spread[2:])) < 0.7,
            "query_segments": np.sort(rng.integers(0, 3, (self.b, self.t)), 1).astype(np.int32),
            "key_segments": np.sort(rng.integers(0, 3, (self.b, self.s)), 1).astype(np.int32),
        }
        return {name: x for name, x in every.items() if name in self.given}

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        of = lambda name: np.float32 if name == "lse" else self.dtype
        return [jax.ShapeDtypeStruct(shape, of(name)) for name, shape in self.shapes.items()]

    @property
    def problem(self) -> Problem:
        left, right = self.window or (None, None)
        right = 0 if self.causal and right is None else right
        shift = self.s - self.t if self.causal == "bottom_right" else 0
        lengths = self.query_lengths is not None or self.key_lengths is not None
        sizes = (self.b, self.t, self.s, self.n, self.k, self.d, self.e, self.dtype)
        heads_first, scale = self.layout == "BNTH", self.d**-0.5
        return Problem(*sizes, heads_first, scale, Window(left, right, shift), lengths, self.softcap, self.spreads)

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """How operands lie along sequences, heads, queries and keys."""
        shapes = {
            "query_segments": (self.b, 1, self.t, 1),
            "key_segments": (self.b, 1, 1, self.s),
            "alibi_slopes": (1, self.n, 1, 1),
        }
        dtypes = {"mask": "uint8", "alibi_slopes": "float32", "bias": self.dtype.name}
        return tuple(
            Spread(name, shapes.get(name, self.operands()[name].shape), dtypes.get(name, "int32"))
            for name in ("query_segments", "key_segments", "mask", "alibi_slopes", "bias")
            if name in self.given
        )

    def pairs(self, seed: int = 0) -> list[np.ndarray]:
        """The same as the kernels take them."""
        given = self.operands(seed)
        if "alibi_slopes" in given:
            given["alibi_slopes"] = given["alibi_slopes"] * np.float32(np.log2(np.e))
        return [given[x.name].astype(x.dtype if x.dtype != "bfloat16" else BF16).reshape(x.shape) for x in self.spreads]

    def extents(self) -> np.ndarray | None:
        """Of each sequence queries, keys and shift, if there are lengths."""
        if not self.problem.lengths:
            return None
        queries, keys = self.query_lengths or (self.t,) * self.b, self.key_lengths or (self.s,) * self.b
        shift = [j - i if self.causal == "bottom_right" else 0 for i, j in zip(queries, keys, strict=True)]
        return np.stack([queries, keys, shift], -1).astype(np.int32)


CALLS: dict[str, Sizes] = {
    "plain": Sizes(1, 256, 192, 2, 1, 128, 128),
    "causal": Sizes(1, 200, 300, 2, 2, 128, 128, causal=True),
    "half, heads first": Sizes(2, 130, 100, 2, 1, 64, 64, F16, "BNTH", True),
    "bottom right": Sizes(1, 100, 200, 3, 1, 64, 64, causal="bottom_right"),
    "more queries than keys see": Sizes(1, 300, 100, 1, 1, 64, 64, causal="bottom_right"),
    "window": Sizes(1, 300, 333, 1, 1, 64, 128, layout="BNTH", window=(70, 33)),
    "causal window": Sizes(1, 260, 260, 1, 1, 96, 96, causal=True, window=(100, None)),
    "odd chunks": Sizes(2, 77, 130, 2, 2, 40, 72, F16),
    "tiny": Sizes(1, 3, 5, 2, 1, 8, 16, causal="bottom_right"),
    "one query": Sizes(2, 1, 300, 4, 1, 64, 128),
    "256 features": Sizes(1, 200, 130, 2, 1, 256, 256, causal=True),
    "192 and 128": Sizes(1, 140, 130, 1, 1, 192, 128, layout="BNTH"),
    "64 and 256": Sizes(1, 100, 150, 2, 2, 64, 256, window=(30, 9)),
    "lengths": Sizes(3, 200, 150, 1, 1, 64, 64, query_lengths=(200, 0, 70), key_lengths=(150, 33, 0)),
    "lengths, bottom right": Sizes(2, 200, 260, 2, 1, 64, 64, causal="bottom_right", query_lengths=(200, 130),
                                   key_lengths=(260, 190)),
    "capped": Sizes(1, 200, 128, 2, 1, 128, 128, softcap=1.5),
    "capped, 256 features": Sizes(1, 130, 150, 2, 2, 256, 64, layout="BNTH", causal=True, softcap=2.0),
    "mask": Sizes(2, 130, 150, 2, 1, 64, 64, given=("mask",)),
    "mask of keys": Sizes(2, 130, 150, 2, 1, 64, 64, softcap=2.0, given=("mask",), narrow=("T",)),
    "segments": Sizes(2, 130, 150, 2, 1, 64, 64, causal=True, given=("query_segments", "key_segments")),
    "slopes and sinks": Sizes(2, 130, 150, 2, 2, 64, 64, causal=True, given=("alibi_slopes", "sinks")),
    "sinks, lengths": Sizes(2, 90, 130, 2, 1, 64, 64, causal="bottom_right", query_lengths=(90, 80),
                            key_lengths=(70, 130), given=("sinks",)),
    "bias": Sizes(2, 130, 150, 2, 1, 64, 64, F16, causal=True, given=("bias",), narrow=("B",)),
    "capped bias": Sizes(1, 70, 90, 2, 1, 64, 64, softcap=1.5, given=("bias",), narrow=("N",)),
    "bias of keys": Sizes(2, 70, 150, 2, 1, 192, 64, given=("bias", "mask"), narrow=("N", "T")),
    "lengths, 256 features": Sizes(2, 90, 130, 1, 1, 256, 64, window=(40, 3), key_lengths=(101, 64)),
}  # fmt: skip


def call(sizes: Sizes, engine: str = "hopper") -> Any:
    return ft.partial(dnn.attention_dgrad, engine=engine, **sizes.options)


def lowered(sizes: Sizes) -> str:
    run = lambda named, *operands: call(sizes)(*operands, **named)
    return jax.jit(run).trace(sizes.operands(), *sizes.avals()).lower(lowering_platforms=("cuda",)).as_text()


# ---- lowering


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_two_launches_that_assemble(name, monkeypatch: pytest.MonkeyPatch):
    with assembler.recorded(monkeypatch) as blocks:
        assert lowered(CALLS[name]).count("mosaic_gpu_v2") == (3 if name == "capped bias" else 2)
    if assembler.ptxas() is not None:
        assert assembler.errors(blocks) == ""


@pytest.mark.parametrize(("name", "launches"), [("causal", 1), ("lengths", 1), ("capped bias", 2)])
def test_counters_are_zero_when_a_launch_begins(name, launches):
    """They are an operand of zeros that aliases a result, so that XLA gives each execution of a call its own."""
    text, p = lowered(CALLS[name]), CALLS[name].problem
    calls = re.findall(r"mosaic_gpu_v2\(([^)]*)\).*output_operand_aliases = \[.*?operand_index = (\d+)", text)
    assert len(calls) == launches
    for operands, number in calls:
        counted, kind = operands.split(", ")[int(number)], f"tensor<{1 + 2 * p.batch * p.shared}xi32>"
        (constant,) = re.findall(rf"{counted} = stablehlo.broadcast_in_dim (%\w+), .* -> {kind}", text)
        assert f"{constant} = stablehlo.constant dense<0>" in text


def test_heads_share_the_workspace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backward_plan, "heads_at_a_time", lambda p: 3)
    sizes = Sizes(2, 100, 100, 8, 4, 64, 64, causal=True)
    with assembler.recorded(monkeypatch) as blocks:
        text = lowered(sizes)
    if assembler.ptxas() is not None:
        assert assembler.errors(blocks) == ""
    assert text.count("mosaic_gpu_v2") == 2
    assert f"tensor<{3 * 2}x2x2x64x64xbf16>" in text
    assert f"tensor<{8 * 2}x2x2x64x64xbf16>" not in text


def test_the_workspace_is_bounded():
    p = Sizes(4, 4096, 4096, 64, 8, 128, 128).problem
    assert backward_plan.heads_at_a_time(p) == 4
    assert backward_plan.heads_at_a_time(p, 1 << 28) == 1
    small = Sizes(4, 256, 256, 64, 8, 128, 128).problem
    assert backward_plan.heads_at_a_time(small) == 32
    counted = 4 * (1 + 2 * 4 * 8)
    assert backward_launch.workspace(small) == 4 * 64 * (256 * 256 * 2 + 256 * 8) + counted
    capped, unused = dataclasses.replace(small, softcap=5.0), 2 * 4 * 256 * 128 * (64 + 2 * 8)
    assert backward_launch.workspace(capped, summed=True) - backward_launch.workspace(small, summed=True) == unused


def test_other_orders_may_be_picked():
    """All heads or some in the workspace, turns of one head or of several; all heads where dS is asked for."""
    p = Sizes(2, 200, 300, 4, 4, 64, 64).problem
    seen = {}

    def last(problem: Problem, orders: Any, taken: Any) -> Any:
        seen["branches"] = set().union(*(taken(order) for order in orders))
        seen["held"] = {order.held for order in orders}
        return orders[-1]

    for whole in (False, True):
        with branches.picking(last):
            found = backward_plan.choose(p, whole=whole)
        assert found.held in seen["held"] == ({8} if whole else {1, 2, 3, 4, 8})
        of = {(what, value) for _, what, value in seen["branches"]}
        assert {("turns ahead", "1"), ("turns ahead", "2"), ("workspace", "of all heads")} <= of
        assert (("workspace", "of some heads") in of) is not whole
        assert seen["branches"] <= set(branches.every())
    assert backward_plan.choose(p, whole=False) == backward_plan.turns(p, 8)


# ---- ranges and order


def pairs(p: Problem, x: Extent) -> np.ndarray:
    """Which queries see which keys, of whole tiles."""
    i, j = np.arange(p.query_tiles * TILE)[:, None], np.arange(p.key_tiles * TILE)
    seen = (i < x.queries) & (j < x.keys)
    if p.window.left is not None:
        seen &= j - i - x.shift >= -p.window.left
    if p.window.right is not None:
        seen &= j - i - x.shift <= p.window.right
    return seen


@pytest.mark.parametrize("seed", range(12))
def test_ranges_are_those_of_the_pairs(seed):
    rng = np.random.default_rng(seed)
    t, s = map(int, rng.integers(1, 700, 2))
    side = lambda: None if rng.random() < 0.3 else int(rng.integers(0, 400))
    window = (side(), side())
    p = Sizes(1, t, s, 1, 1, int(rng.choice([64, 256])), 64, window=window).problem
    x = Extent(*(np.int32(n) for n in (rng.integers(0, t + 1), rng.integers(0, s + 1), rng.integers(-300, 300))))
    seen = pairs(p, x)
    for block in range(p.key_blocks):
        keys = seen[:, block * p.keys_of_block : (block + 1) * p.keys_of_block]
        expect_range(keys, backward_plan.query_range(p, x, np.int32(block * p.keys_of_block)))
    for first in range(0, t, p.queries_of_block):
        queries = seen[first : first + p.queries_of_block]
        expect_range(queries.T, backward_plan.key_range(p, x, np.int32(first)))
        for tile in range(p.key_tiles):
            part = seen[first : first + TILE, tile * TILE : (tile + 1) * TILE]
            sees = bool(backward_plan.tile_sees(p, x, np.int32(first), np.int32(tile)))
            assert sees or not part.any()


def expect_range(seen: np.ndarray, found: Any) -> None:
    """seen: (positions of the other side, own). No tile that is seen is left out, and none is taken for whole."""
    low, high, full_low, full_high = map(int, found)
    assert 0 <= low <= full_low <= full_high <= high
    for tile in range(len(seen) // TILE):
        part = seen[tile * TILE : (tile + 1) * TILE]
        assert low <= tile < high or not part.any()
        assert not full_low <= tile < full_high or part.all()
    order = [*range(full_low, full_high)]
    others = (high - low) - len(order)
    order += [int(backward_plan.nth_partial(np.int32(n), found[0], *found[2:]))
              for n in range(others)]  # fmt: skip
    assert sorted(order) == list(range(low, high))


def test_causal_tiles_are_whole_but_for_the_diagonal():
    p = Sizes(1, 1024, 1024, 1, 1, 64, 64, causal=True).problem
    assert [int(n) for n in backward_plan.query_range(p, backward_plan.whole(p), np.int32(256))] == [4, 16, 6, 16]
    assert [int(n) for n in backward_plan.key_range(p, backward_plan.whole(p), np.int32(256))] == [0, 8, 0, 4]


def orders() -> list[backward_plan.Turns]:
    """Orders of blocks: of calls with all heads in the workspace, with fewer, with one; and drawn ones."""
    calls = [
        Sizes(4, 4096, 4096, 16, 16, 128, 128), Sizes(1, 8192, 8192, 6, 3, 128, 128), Sizes(3, 300, 200, 8, 2, 64, 64),
        Sizes(2, 1024, 1024, 40, 40, 64, 64), Sizes(1, 30000, 17000, 5, 5, 256, 64),
    ]  # fmt: skip
    found = [
        backward_plan.turns(sizes.problem, held, most)
        for sizes in calls for held in (1, 2, 3, 5, 9, 1000) for most in (None, 1)
    ]  # fmt: skip
    assert {(order.reuses, order.ahead) for order in found} == {(False, 1), (False, 2), (True, 1), (True, 2)}
    rng = np.random.default_rng(0)
    for _ in range(20):
        heads, together, group, keys, queries = map(int, rng.integers(1, 9, 5))
        ahead = int(rng.integers(1, 3)) if heads > together else 1
        held = min(heads, ahead * together + int(rng.integers(0, 3)))
        found.append(backward_plan.Turns(heads, held, group, keys, queries, together, ahead))
    return found


@pytest.mark.parametrize("order", orders(), ids=str)
def test_each_block_has_a_number_behind_those_it_waits_for(order):
    number = {}
    for n in range(order.blocks):
        of_keys, head, block = order.at(np.int32(n))
        number[bool(of_keys), int(head), int(block)] = n
    heads = order.heads * order.group
    assert number.keys() == {(True, h, b) for h in range(order.heads) for b in range(order.keys)} | {
        (False, h, b) for h in range(heads) for b in range(order.queries)
    }
    last_of_keys = [max(number[True, h, b] for b in range(order.keys)) for h in range(order.heads)]
    for h in range(heads):
        assert number[False, h, 0] > last_of_keys[h // order.group]
    for h in range(order.held, order.heads):
        before = range((h - order.held) * order.group, (h - order.held + 1) * order.group)
        assert min(number[True, h, b] for b in range(order.keys)) > max(
            number[False, g, b] for g in before for b in range(order.queries)
        )


@pytest.mark.parametrize("name", CALLS)
def test_shared_memory_suffices(name):
    p = CALLS[name].problem
    assert backward_plan.stages(p) >= 2
    assert backward_plan.stages_dq(p) >= 2


# ---- values


def data(sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    draw = lambda name: rng.normal(size=sizes.shapes[name]).astype(np.float32).astype(sizes.dtype)
    given = {name: draw(name) for name in ("dy", "q", "k", "v")}
    qkv = (given[name] for name in ("q", "k", "v"))
    named = sizes.operands()
    y, lse = reference.attention(*qkv, **sizes.options, **named, return_logsumexp=True)
    return given | {"y": y, "lse": lse, "dlse": rng.normal(size=lse.shape).astype(np.float32)}


def expected(sizes: Sizes, given: dict[str, np.ndarray]) -> Any:
    operands = (given[name] for name in sizes.shapes)
    named = sizes.operands()
    return reference.attention_dgrad(*operands, dlogsumexp=given["dlse"], **sizes.options, **named)


def rows_of(sizes: Sizes, given: dict[str, np.ndarray]) -> np.ndarray:
    """What `backward_rows` computes; NaN behind the last query."""
    p = sizes.problem
    dy, y, dlse, lse = (given[name].astype(np.float64) for name in ("dy", "y", "dlse", "lse"))
    both = [np.where(lse == -np.inf, 0.0, -lse * backward_rows.LOG2_E), (dy * y).sum(-1) - dlse]
    both = [x if p.heads_first else np.swapaxes(x, 1, 2) for x in both]
    found = np.full((p.batch * p.heads, 2, p.query_tiles * TILE), np.nan, np.float32)
    found[:, :, : p.queries] = np.stack([x.reshape(-1, p.queries) for x in both], 1)
    return found


def expect_close(found: Any, wanted: Any, dtype: Any) -> None:
    """P, dS and results are rounded to 16 bits: about as far off as three roundings of every product are."""
    for name, a, b in zip(("q", "k", "v", "bias or slopes", "sinks"), found, wanted, strict=False):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert a.shape == b.shape
        limit = 3 * float(ml_dtypes.finfo(dtype).eps)
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b), name


@pytest.mark.parametrize("name", CALLS)
def test_schedule_computes_the_gradients(name):
    sizes = CALLS[name]
    given, p = data(sizes), sizes.problem
    q, k, v, dy = (given[name] for name in ("q", "k", "v", "dy"))
    rows = rows_of(sizes, given)
    *found, ds = gradients(p, sizes.extents(), q, k, v, dy, rows, sizes.pairs())
    if p.softcap is not None and "bias" in sizes.given:
        flat = dataclasses.replace(p, slope=False)
        ds = gradients(flat, sizes.extents(), q, k, v, dy, rows, sizes.pairs())[-1]
    extents = jnp.asarray(sizes.extents()) if p.lengths else None
    for spread in reversed(sizes.spreads):
        if spread.name in ("bias", "alibi_slopes"):
            of = backward_launch._summed(jnp.asarray(ds), spread, extents, p)
            found.append(np.asarray(of).reshape(sizes.operands()[spread.name].shape))
    if "sinks" in sizes.given:
        sinks = jnp.asarray(sizes.operands()["sinks"])[None]
        lse, dlse = jnp.asarray(given["lse"]), jnp.asarray(given["dlse"])
        found.append(np.asarray(backward_launch._of_sinks(sinks, jnp.asarray(rows), lse, dlse, extents, p))[0])
    assert len(found) == len(expected(sizes, given))
    expect_close(found, expected(sizes, given), sizes.dtype)


@pytest.mark.parametrize("held", [1, 2, 3])
def test_the_workspace_changes_no_bits(held):
    sizes = Sizes(2, 140, 150, 6, 3, 64, 64, causal=True)
    given = data(sizes)
    q, k, v, dy = (given[name] for name in ("q", "k", "v", "dy"))
    of = lambda held: gradients(sizes.problem, None, q, k, v, dy, rows_of(sizes, given), held=held)[:3]
    whole, parts = of(None), of(held)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.parametrize("name", CALLS)
def test_the_engine_describes_the_call(name, monkeypatch: pytest.MonkeyPatch):
    seen, original = [], backward_launch.gradients

    def recorded(*operands: Any, problem: Problem, **options: Any) -> Any:
        seen.append((problem, [x.shape for x in options["pairs"]], [x.dtype.name for x in options["pairs"]]))
        return original(*operands, problem=problem, **options)

    monkeypatch.setattr(backward_launch, "gradients", recorded)
    lowered(CALLS[name])
    pairs = CALLS[name].pairs()
    assert seen == [(CALLS[name].problem, [x.shape for x in pairs], [x.dtype.name for x in pairs])]


def test_a_planted_fault_shows(monkeypatch: pytest.MonkeyPatch):
    """A tile that is left out is found by the comparison of values."""
    original = backward_plan.query_range
    shorter = lambda p, x, first: (original(p, x, first)[0] + 1, *original(p, x, first)[1:])
    monkeypatch.setattr(backward, "query_range", shorter)
    with pytest.raises(AssertionError):
        test_schedule_computes_the_gradients("causal")


# ---- shared memory

# Each with dS of fewer heads in the workspace than it has: that is all waits.
PROTOCOLS: dict[str, list[Sizes]] = {
    "by keys": [
        Sizes(1, 640, 512, 4, 2, 128, 128),
        Sizes(1, 500, 700, 2, 2, 128, 128, causal=True, window=(200, None)),
    ],
    "by role": [
        Sizes(1, 640, 448, 4, 2, 256, 128),
        Sizes(1, 300, 700, 2, 2, 256, 128, causal=True, window=(200, None)),
    ],
}
REDUNDANT = {
    "drain.<locals>._": "consumers wait for their products themselves, and a block's memory stays until all have ended",
    "ByRole.follow.<locals>._": "that P has come tells the second warpgroup that the first one has read K",
    "loads_done": "where not all keys see a tile the search for what is not finite has a fence",
    "Block.step": "how many products a tile has that not all see is not known, so that the step waits for all",
}


def launched(sizes: Sizes, held: int | None = None) -> tuple[Any, dict[int, np.ndarray], tuple[int, ...]]:
    """The launch of a call; operands that are known, by their number; and the results, of which each element is written
    once.
    """
    p, shapes = sizes.problem, sizes.shapes
    aval = lambda shape, dtype=sizes.dtype: jax.ShapeDtypeStruct(shape, dtype)
    of = {name: aval(shapes[name]) for name in ("q", "k", "v", "dy")}
    rows = aval((p.batch * p.heads, 2, p.query_tiles * TILE), np.float32)
    pairs = [aval(x.shape, x.dtype) for x in sizes.pairs()]
    extents, order = sizes.extents(), backward_plan.turns(p, held or p.batch * p.shared)
    run = lambda q, k, v, dy, rows, pairs, extents: backward_launch.run(
        q, k, v, dy, rows, p, order, pairs=pairs, extents=extents
    )
    (launch,) = kernels(run, *of.values(), rows, pairs, extents)
    known = {} if extents is None else {5 + len(pairs): extents.reshape(-1)}
    first = 5 + len(pairs) + len(known)
    return launch, known, (first, first + 1, first + 2)


def unseen(features: int) -> tuple[Any, dict[int, np.ndarray], tuple[int, ...]]:
    """The launch of two sequences with one place in the workspace, the first of which has no query that sees a key.

    A tile of its dS is stored, for ranges of tiles are rounded outwards, and no block loads any.
    """
    options: dict[str, Any] = dict(window=(None, 113), query_lengths=(18, 40), key_lengths=(98, 100))
    launch, known, whole = launched(Sizes(2, 46, 124, 1, 1, features, 128, **options), 1)
    return launch, {number: np.array([18, 98, -147, 40, 100, 0], np.int32) for number in known}, whole


@pytest.mark.parametrize("held", [None, 1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_accesses_are_ordered(name, held):
    launch, known, whole = launched(CALLS[name], held)
    launch.run(known, whole)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_whatever_is_taken_away_shows(name):
    """Each wait, arrival, count and fence; each wait for groups which lets one more of them be under way; each wait for
    stores which waits for what they read alone.
    """
    shown: dict[Any, bool] = {}
    launches = [launched(sizes, 1) for sizes in PROTOCOLS[name]]
    for launch, known, whole in [*launches, unseen(PROTOCOLS[name][0].d)]:
        launch.run(known, whole)
        for number, equation in enumerate(launch.ordering()):
            params = {} if isinstance(equation, str) else equation.params
            ways = ["missing", *["early"] * ("n" in params), *["reading"] * (not params.get("wait_read_only", True))]
            for way in ways:
                setattr(launch, way, equation)
                key = (way, number, place_of(equation))
                shown[key] = faulty(launch, known, whole) or shown.get(key, False)
                setattr(launch, way, None)
    assert [key for key, found in shown.items() if not found and key[-1] not in REDUNDANT] == []


def test_counters_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    """The model sees that a wait asks for less than all, and blocks in an order in which they wait for later ones."""
    sizes = Sizes(1, 200, 140, 3, 3, 64, 64)
    original = backward_plan.Turns.at
    assert not faulty(*launched(sizes, 1))
    with monkeypatch.context() as fewer:
        fewer.setattr(Problem, "storing", 1)
        assert faulty(*launched(sizes, 1))
    order = backward_plan.turns(sizes.problem, 1)
    monkeypatch.setattr(backward_plan.Turns, "at", lambda self, n: original(self, np.int32(order.blocks - 1) - n))
    assert faulty(*launched(sizes, 1))


def test_a_place_is_free_once_its_stores_are_over():
    for features in (128, 256):
        launch, known, whole = unseen(features)
        launch.run(known, whole)


def faulty(launch: Any, known: Any, whole: Any) -> bool:
    try:
        launch.run(known, whole)
    except Fault:
        return True
    return False


# ---- what is refused


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        (Sizes(1, 64, 64, 1, 1, 64, 64, np.dtype(np.float32)), {}, "bfloat16 or float16, not float32"),
        (Sizes(1, 64, 64, 1, 1, 60, 64), {}, "multiples of 16 bytes, and these have 60 features"),
        (Sizes(1, 64, 64, 1, 1, 64, 44), {}, "multiples of 16 bytes, and these have 44 features of values"),
        (Sizes(1, 64, 64, 1, 1, 264, 64), {}, "at most 256 features, not 264"),
        (
            Sizes(1, 64, 64, 1, 1, 64, 64),
            {"sinks": np.zeros(1, np.float32), "mask": np.ones((1, 1, 64, 64), bool)},
            "its gradient of `sinks` needs to know",
        ),
        (Sizes(1, 64, 64, 1, 1, 64, 64), {"dropout": 0.5, "dropout_key": 1}, "no dropout"),
        (Sizes(1, 0, 64, 1, 1, 64, 64), {}, "nothing to do for an empty array"),
        (Sizes(1, 64, 64, 1, 1, 64, 64), {"softcap": 1e6}, "take caps"),
        (Sizes(1, 64, 64, 1, 1, 64, 64), {"scale": 1e300}, "take scales"),
    ],
)
def test_refusals(sizes, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.jit(ft.partial(call(sizes), **options)).trace(*sizes.avals()).lower(lowering_platforms=("cuda",))


def test_chosen_where_it_was_measured(as_on_h200: None):
    sizes = CALLS["plain"]
    for level in ("fast", "batch_invariant"):
        asked = ft.partial(dnn.attention_dgrad, determinism=level, **sizes.options)
        (told,) = dnn.explain(asked, *sizes.avals(), platform="cuda")
        assert told.engine == "hopper"


# ---- on the device


@on_hopper
@pytest.mark.parametrize("name", CALLS)
def test_values_on_the_device(name):
    sizes = CALLS[name]
    given = data(sizes, 1)
    named = sizes.operands()
    run = jax.jit(lambda dlse, *operands: call(sizes)(*operands, dlogsumexp=dlse, **named))
    operands = [given[name] for name in sizes.shapes]
    found = run(given["dlse"], *operands)
    expect_close(found, expected(sizes, given), sizes.dtype)
    for again, once in zip(run(given["dlse"], *operands), found, strict=True):
        np.testing.assert_array_equal(np.asarray(again, np.float32), np.asarray(once, np.float32))


@on_hopper
@pytest.mark.parametrize("name", ["causal", "256 features", "window"])
@pytest.mark.parametrize("which", ["dy", "q", "k", "v"])
def test_nan_in_what_is_masked_does_not_show(name, which):
    sizes = CALLS[name]
    given = data(sizes)
    axis, place = (1 if sizes.layout == "BTNH" else 2), 90
    given[which] = given[which].copy()
    np.moveaxis(given[which], axis, 0)[place] = np.nan
    qkv = (given[name] for name in ("q", "k", "v"))
    given["y"], given["lse"] = reference.attention(*qkv, **sizes.options, return_logsumexp=True)
    found = jax.jit(call(sizes))(*(given[name] for name in sizes.shapes), dlogsumexp=given["dlse"])
    for a, b in zip(found, expected(sizes, given), strict=True):
        np.testing.assert_array_equal(np.isfinite(np.asarray(a, np.float32)), np.isfinite(b))


@on_hopper
def test_bits_depend_neither_on_other_sequences_nor_on_the_workspace(monkeypatch: pytest.MonkeyPatch):
    sizes = Sizes(3, 300, 300, 4, 2, 64, 64, causal=True)
    given = data(sizes)
    operands = [jnp.asarray(given[name]) for name in sizes.shapes]
    whole = jax.jit(call(sizes))(*operands)
    alone = jax.jit(call(sizes))(*(x[1:2] for x in operands))
    monkeypatch.setattr(backward_plan, "heads_at_a_time", lambda p: 4)
    parts = jax.jit(lambda *a: call(sizes)(*a))(*operands)
    for a, b, c in zip(whole, alone, parts, strict=True):
        np.testing.assert_array_equal(np.asarray(a[1:2], np.float32), np.asarray(b, np.float32))
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(c, np.float32))


@on_hopper
@pytest.mark.parametrize("held", [None, 1])
def test_each_execution_counts_anew(held, monkeypatch: pytest.MonkeyPatch):
    """Of one compiled program: iterations of a loop, calls of one size one after the other, and a batch of them."""
    if held:
        monkeypatch.setattr(backward_plan, "heads_at_a_time", lambda p: held)
    sizes = Sizes(2, 300, 300, 4, 2, 64, 64, causal=True)
    each = [data(sizes, seed) for seed in range(4)]
    stacked = [jnp.stack([jnp.asarray(given[name]) for given in each]) for name in sizes.shapes]
    one = jax.jit(lambda *operands: call(sizes)(*operands))
    wanted = [one(*(x[i] for x in stacked)) for i in range(4)]
    looped = jax.jit(lambda *stacked: jax.lax.map(lambda operands: call(sizes)(*operands), stacked))
    several = jax.jit(lambda *stacked: [call(sizes)(*(x[i] for x in stacked)) for i in range(4)])
    batched = jax.jit(jax.vmap(lambda *operands: call(sizes)(*operands)))
    together = lambda results: [jnp.stack(of_each) for of_each in zip(*results, strict=True)]
    for found in (looped(*stacked), looped(*stacked), together(several(*stacked)), batched(*stacked)):
        for a, b in zip(found, together(wanted), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
