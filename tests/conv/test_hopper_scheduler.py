"""The index arithmetic of the dense Hopper convolutions, by brute force: orders, schedules, tiles and halos."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as definition_of_all
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import copies, dgrad, fprop, plan, wgrad
from jaxdnn._src.conv.hopper.pipeline_block import Cut
from jaxdnn._src.conv.hopper.pipeline_consumer import Consumer
from jaxdnn._src.conv.hopper.scheduler import TileScheduler
from jaxdnn._src.core import engines
from jaxdnn._src.core.explain import traced_calls
from tests.conv.hopper_cases import BF16, CASES, F32, LAYOUTS, Case, lowered

pytestmark = pytest.mark.usefixtures("h200")


def reads(axes):
    """All (output position, tap, input position) that a schedule over some axes visits, one axis at a time."""
    found = []
    for ax in axes:
        triples = set()
        for phase, i in itertools.product(range(ax.out_step), range(ax.positions)):
            for j in range(ax.count[phase]):
                tap = ax.first[phase] + j * ax.tap_step
                triples.add((i * ax.out_step + phase, tap, i * ax.in_step + ax.offset[phase] + j * ax.move))
        found.append(triples)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_walks_visit_what_the_definition_says(seed):
    rng = np.random.default_rng(seed)
    size, taps, stride, dilation = rng.integers(1, 9), rng.integers(1, 6), rng.integers(1, 5), rng.integers(1, 4)
    low, high = rng.integers(0, 5, 2)
    high = int(max(high, dilation * (taps - 1) + 1 - size - low, 0))
    flip = bool(rng.integers(2))
    geo = Geometry((int(size),), (int(taps),), (int(stride),), ((int(low), high),), (int(dilation),), flip)
    place = lambda tap: taps - 1 - tap if flip else tap
    (out,) = geo.out
    want = {(p, t, p * stride - low + place(t) * dilation) for p in range(out) for t in range(taps)}
    (forward,) = reads(fprop.axes_of(geo))
    assert forward == want
    (backward,) = reads(dgrad.axes_of(geo))
    inside = {(i, t, p) for i, t, p in backward if i < size and 0 <= p < out}
    assert inside == {(i, t, p) for p, t, i in want if 0 <= i < size}


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_schedules_hold_every_product_once(name, outer):
    case = CASES[name]
    x, w, dy = (jax.ShapeDtypeStruct(shape, BF16) for shape in (case.x, case.w(outer), case.dy))
    geo = case.geometry(outer)
    c, k, taps, groups = case.c, case.k, math.prod(case.taps), case.groups
    for flip in (False, True):
        forward = fprop.schedule(x, w, geo=dataclasses.replace(geo, flip=flip))
        assert sorted(forward[forward >= 0]) == list(range(taps * c // groups))
    backward = dgrad.schedule(dy, w, geo=geo)
    assert sorted(backward[backward >= 0]) == list(range(taps * k // groups))
    if groups == 1:
        filters = wgrad.schedule(x, dy, geo=geo)
        assert sorted(filters[filters >= 0]) == list(range(math.prod(dy.shape[:-1])))


@pytest.mark.parametrize("name", CASES)
def test_no_configuration_changes_the_forward_schedule(name):
    """The order is a function of the problem alone: nothing of a configuration enters it."""
    case = CASES[name]
    orders = []
    for batch in (1, case.n, 37):
        x, w = case._replace(n=batch).avals("fprop")
        orders.append(fprop.schedule(x, w, geo=case.geometry()))
    assert all(np.array_equal(orders[0], other) for other in orders[1:])


def by_the_model(x: Any, w: Any, geo: Geometry, **options: Any) -> np.ndarray:
    """What the definition makes of the stated schedule, on the model of the tensor core, in float32."""
    layout, inner = LAYOUTS[len(geo.sizes)]
    told = definition_of_all.Schedule(fprop.schedule(x, w, geo=geo))
    return definition_of_all.conv(
        x, w, stride=geo.stride, padding=geo.padding, dilation=geo.dilation, groups=geo.groups, layout=layout,
        filter_layout=inner, mode="convolution" if geo.flip else "cross_correlation", arithmetic="tensor_core",
        schedule=told, out_dtype=np.float32, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["3x3", "dilated, flipped", "one axis, strided, flipped", "three axes", "stem"])
def test_the_schedule_of_a_flipped_filter(name):
    """Its bits are those of the kernel's own order: of the flipped filter, or of the copy that made taps channels."""
    case = CASES[name]
    geo = dataclasses.replace(case.geometry(), flip=True)
    rng = np.random.default_rng(3)
    spread = lambda shape: (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 4, shape))).astype(BF16)
    x, w = map(spread, case._replace(n=2).operands("fprop"))
    found = by_the_model(x, w, geo)
    todo = fprop.plan(x, w, geo, epilogue=None, extras=(), out_dtype=F32)
    assert todo.folded == (name == "stem")
    if todo.folded:  # the remaining taps are still flipped
        rest = w.reshape(*w.shape[:-3], 1, w.shape[-3] * w.shape[-2], w.shape[-1])
        folded = np.asarray(copies.fold_taps(jnp.asarray(x), geo, todo.problem.reduce))[..., : rest.shape[-2]]
        same = by_the_model(folded, rest, geo.without_last_taps)
    else:
        same = by_the_model(x, np.flip(w, tuple(range(len(geo.taps)))), dataclasses.replace(geo, flip=False))
    np.testing.assert_array_equal(found, same)
    plain = definition_of_all.Schedule(fprop.schedule(x, w, geo=dataclasses.replace(geo, flip=False)))
    with pytest.MonkeyPatch.context() as patch:  # a negative control: the order of the filter that is not flipped
        patch.setattr(fprop, "schedule", lambda *_, **__: plain.order)
        assert not np.array_equal(found, by_the_model(x, w, geo))


WINDOWS = {  # pixels, channels, taps, stride, dilation, padding, whether the taps are flipped
    "stem": (14, 3, 7, 2, 1, (3, 3), False),
    "pixels that no window reads": (17, 3, 3, 4, 1, (0, 0), False),
    "a stride of half words": (13, 3, 5, 1, 1, (2, 1), False),
    "wider than the stride": (13, 4, 2, 4, 1, (1, 2), False),
    "dilated": (15, 2, 3, 2, 3, (2, 4), False),
    "flipped": (14, 3, 7, 2, 1, (3, 2), True),
}


@pytest.mark.parametrize("dtype", [BF16, jnp.int8], ids=["bf16", "int8"])
@pytest.mark.parametrize("name", WINDOWS)
def test_the_copies_of_few_channels(name, dtype):
    """Every tap of every window lies where the kernels read it, and zeros do wherever no tap is, NaN or not."""
    size, c, r, s, d, pads, flip = WINDOWS[name]
    out = (size + sum(pads) - (r - 1) * d - 1) // s + 1
    geo = Geometry((2, size), (1, r), (1, s), ((0, 0), pads), (1, d), flip=flip)
    x = np.random.default_rng(3).integers(-99, 99, (2, 2, size, c)).astype(dtype)
    if dtype == BF16:
        x[:, :, 5::4] = np.nan
    at = np.arange(out)[:, None] * s + np.arange(r)[:: -1 if flip else 1] * d
    taken = np.pad(x.astype(F32), ((0, 0), (0, 0), pads, (0, 0)))[:, :, at]  # N, X, Q, S, C
    wide = -(-r * c // 16) * 16
    folded = np.asarray(jax.jit(lambda x: copies.fold_taps(x, geo, wide))(x)).astype(F32)
    assert folded.shape == (2, 2, out, wide)
    np.testing.assert_array_equal(folded[..., : r * c].reshape(taken.shape), taken)
    assert not folded[..., r * c :].any()
    if dtype == BF16 and (cells := copies.cells_of(geo, c, 2)):
        found = np.asarray(jax.jit(lambda x: copies.in_cells(x, geo, cells))(x)).astype(F32)
        window = -(-r // cells)
        found = found.reshape(2, 2, 1 + (r % cells > 0), -1, cells, 8 // cells)
        last = found[:, :, -1, np.arange(out) + window - 1]  # N, X, Q, pixels of a cell, channels
        rows = np.concatenate([found[:, :, 0, i : i + out] for i in range(window - 1)] + [last], 3)
        np.testing.assert_array_equal(rows[:, :, :, :r, :c], taken)
        assert not rows[..., c:].any()
        assert not rows[:, :, :, r:].any()


@pytest.mark.parametrize("order", ["k", "kp", "n", "p"])
def test_tiles_cover_the_output_once(order):
    axes = dgrad.axes_of(Geometry((9, 7), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)))
    problem = plan.Problem(5, 64, 200, axes, "tjc", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    scheduler = TileScheduler(problem, plan.Config(2, (2, 2), 64, order=order))
    seen = set()
    for tile in range(scheduler.tiles):
        n, at, phase, k = scheduler.place(jnp.int32(tile))
        seen.add((int(n), *map(int, at), *map(int, phase), int(k)))
        steps = math.prod(ax.count[int(p)] for ax, p in zip(axes, phase, strict=True))
        assert int(scheduler.steps(jnp.int32(tile))) == steps
    assert len(seen) == scheduler.tiles == 3 * 3 * 2 * 4 * 4


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("taps", [(3,), (2, 5), (1, 3), (4, 2, 3)])
def test_a_resident_filter_lies_as_its_taps_are_met(taps, backward, flip):
    """The producer loads slot after slot what the input's boxes come in the order of, which the schedule states."""
    one = (1,) * len(taps)
    geo = Geometry((8,) * len(taps), taps, one, ((1, 1),) * len(taps), one, flip=flip)
    x = jax.ShapeDtypeStruct((2, *geo.sizes, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((*taps, 64, 64), jnp.bfloat16)
    dy = jax.ShapeDtypeStruct((2, *geo.out, 64), jnp.bfloat16)
    if backward:
        problem = dgrad.plan(dy, w, geo, epilogue=None, extras=(), out_dtype=jnp.bfloat16).problem
    else:
        problem = fprop.plan(x, w, geo, epilogue=None, extras=(), out_dtype=jnp.bfloat16).problem
    scheduler = TileScheduler(problem, plan.Config(1, (8,) * len(taps), 64, resident=True))
    order = plan.schedule_order(problem).reshape(-1, problem.reduce)
    assert [int(scheduler.tap(number)) for number in range(len(order))] == list(order[:, 0] // problem.reduce)


@pytest.mark.parametrize("sms", [1, 2, 7, 132, 1000])
@pytest.mark.parametrize("sharing", ["round", "snake", "together"])
def test_every_tile_is_computed_once(sharing, sms):
    """Each block of threads has its own tiles; where phases are unequal, "snake" leaves none much more than another."""
    axes = dgrad.axes_of(Geometry((14, 14), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)))
    problem = plan.Problem(33, 64, 256, axes, "tjc", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    scheduler = TileScheduler(problem, plan.Config(2, (1, 4), 64, sharing=sharing))
    blocks = scheduler.blocks(sms)
    assert 1 <= blocks <= sms
    count = jnp.int32(blocks)
    share = jax.jit(jax.vmap(lambda sm: scheduler.share(sm, count)))(jnp.arange(blocks, dtype=jnp.int32))
    places = [(sm, local) for sm in range(blocks) for local in range(int(share[sm]))]
    sm, local = jnp.asarray(places, jnp.int32).T
    tiles = np.asarray(jax.jit(jax.vmap(lambda sm, local: scheduler.tile(local, sm, count)))(sm, local))
    assert sorted(tiles) == list(range(scheduler.tiles))
    if sharing == "snake" and scheduler.tiles > 8 * blocks:
        steps = np.bincount(np.asarray(sm), weights=np.array(scheduler.taps)[tiles // scheduler.per_phase])
        assert steps.max() - steps.min() <= 2 * max(scheduler.taps)


@pytest.mark.parametrize(
    ("geo", "block", "blank", "columns"),
    [
        (Geometry((8, 11), (1, 1), (2, 2), ((1, 0), (0, 2)), (1, 1)), (4, 4), 3, 256),
        (Geometry((9, 16), (2, 1), (3, 1), ((0, 0), (0, 0)), (1, 1)), (2, 8), 8, 64),
        (Geometry((9, 16), (3, 1), (1, 2), ((1, 1), (0, 0)), (1, 1)), (4, 4), 8, 320),
        (Geometry((8, 9, 10), (1, 1, 1), (2, 1, 3), ((0, 0),) * 3, (1, 1, 1)), (4, 4, 4), 4, 128),
    ],
)
def test_rows_without_taps_are_written_once(geo, block, blank, columns):
    """Tiles and stores of zeros write every output once, and zeros only what meets no tap."""
    axes = dgrad.axes_of(geo)
    problem = plan.Problem(3, 64, columns, axes, "tjc", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    images = 1 if len(axes) == 3 else 4
    config = plan.Config(images, block, 64, staged=4, blank=blank)
    assert plan.check(problem, config) is None
    scheduler = TileScheduler(problem, config)
    shape = [problem.batch, *itertools.chain(*((ax.positions, ax.out_step) for ax in axes))]
    written = np.zeros(shape, int)
    for tile in range(0, scheduler.tiles, scheduler.columns):  # in the order "k" those of a place are neighbours
        n, at, phase, _ = scheduler.place(jnp.int32(tile))
        index: list[Any] = [slice(int(n) * images, (int(n) + 1) * images)]
        for i, b, p in zip(at, block, phase, strict=True):
            index += [slice(int(i) * b, (int(i) + 1) * b), int(p)]
        written[tuple(index)] += 1
    zeros = np.zeros((*shape, columns), int)
    per, width = blank, problem.blank_columns

    def leading(index: list[int]) -> list[int]:
        rest = iter(index)
        return [next(rest), *itertools.chain(*((next(rest), next(rest) if a.out_step > 1 else 0) for a in axes[:-1]))]

    for number in range(scheduler.blank_rows() if problem.blank_rows else 0):
        *index, first = map(int, scheduler.blank_row(jnp.int32(number)))
        zeros[(*leading(index), slice(first * per, (first + 1) * per))] += 1
    for number in range(scheduler.blank_pieces() if problem.blank_phases else 0):
        *index, first, phase, part = map(int, scheduler.blank_piece(jnp.int32(number)))
        where = (slice(first * per, (first + 1) * per), phase, slice(part * width, (part + 1) * width))
        zeros[(*leading(index), *where)] += 1
    assert np.array_equal(written[..., None] + zeros, np.ones_like(zeros))
    met = np.ones(shape, bool)
    for d, ax in enumerate(axes):
        met &= np.reshape(ax.count, [-1 if i == 2 * d + 2 else 1 for i in range(len(shape))]) > 0
    assert np.array_equal(zeros.any(-1), ~met)
    assert np.array_equal(zeros.all(-1), ~met)
    lowered(
        lambda dy, w: dgrad.conv_dgrad(dy, w, geo=geo, config=config),
        jax.ShapeDtypeStruct((3, *geo.out, 64), BF16), jax.ShapeDtypeStruct((*geo.taps, columns, 64), BF16),
    )  # fmt: skip


class Indexed:
    """What a reference was indexed with."""

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("block", [(2, 8, 8), (1, 16, 8)])
def test_a_halo_holds_what_every_tap_reads(block, op, unroll):
    """A tap's rows in the box that is loaded once are those that a load of its own would bring."""
    geo = Geometry((7, 40, 23), (2, 3, 4), (1, 1, 1), ((1, 0), (2, 1), (3, 3)), (2, 1, 2))
    axes = (fprop if op == "fprop" else dgrad).axes_of(geo)
    dims = "tcj" if op == "fprop" else "tjc"
    problem = plan.Problem(4, 32, 32, axes, dims, jnp.dtype(BF16), jnp.dtype(BF16), F32)
    config = plan.Config(1, block, 32, 2, 1, 2, halo=2, resident=True, unroll=unroll)
    walker: Any = object.__new__(Consumer)
    walker.problem, walker.config, walker.cut, walker.a_ring = problem, config, Cut(problem, config), Indexed()
    lowest = [min(ax.offset[0], ax.offset[0] + (ax.taps - 1) * ax.move) for ax in axes]
    box = plan.a_box(problem, config)[1:]
    for number, taps in enumerate(itertools.product(*(range(ax.taps) for ax in axes))):
        for member in range(config.groups):
            walker.member = member
            told = (number // geo.taps[-1], taps[-1]) if unroll else (number,)
            slot, images, *found = walker.halo_view(jnp.int32(1), *map(jnp.int32, told[:1]), *told[1:])
            assert (int(slot), int(images.start), images.size) == (1, 0, 1)
            for d, (ax, tap, cut) in enumerate(zip(axes, taps, found, strict=True), 1):
                whole, piece = walker.cut.box[d], walker.cut.part[d]
                first = member * piece if whole != piece else 0
                assert int(cut.start) + lowest[d - 1] == first + ax.offset[0] + tap * ax.move
                assert cut.size == piece
                assert 0 <= int(cut.start) <= box[d - 1] - piece


# ---- backward data whose phases are columns of one product

JOINED: dict[str, tuple[Case, bool]] = {  # and whether zeros fill up the filter
    "3x3": (Case(2, (9, 8), 3, 5, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)), True),
    "one axis": (Case(2, (17,), 3, 5, (7,), (2,), ((3, 3),), (1,)), True),
    "one stride": (Case(2, (9, 8), 2, 5, (4, 3), (2, 1), ((1, 1), (0, 2)), (1, 1)), True),
    "dilated": (Case(2, (9, 11), 3, 5, (3, 2), (2, 2), ((1, 2), (1, 1)), (1, 2)), True),
    "patches": (Case(2, (8, 12), 3, 5, (4, 4), (4, 4), ((0, 0), (0, 0)), (1, 1)), False),
    "patches of pairs": (Case(2, (8, 12), 3, 5, (4, 8), (2, 4), ((0, 0), (0, 0)), (1, 1)), False),
}


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("name", JOINED)
def test_joined_phases_say_where_they_spread_what_is_not_finite(name, outer, monkeypatch):
    """With XLA's convolution in the kernel's place, every place of dy infinite in turn."""
    case, filled = JOINED[name]
    geo, run = case.geometry(outer), dgrad.conv_dgrad

    def kernel(dy, w, *, geo, **_):
        joint = Case(dy.shape[0], geo.sizes, w.shape[-2], w.shape[-1], geo.taps, geo.stride, geo.padding, geo.dilation)
        return jnp.asarray(joint.definition("dgrad", dy, w))

    monkeypatch.setattr(dgrad, "conv_dgrad", kernel)
    dy, w = case.whole_numbers("dgrad", outer)
    w = np.where(w == 0, np.float32(1), w)
    clean = case.definition("dgrad", dy, w, outer)
    np.testing.assert_array_equal(run(jnp.asarray(dy), jnp.asarray(w), geo=geo), clean)
    mark = np.zeros_like(dy)
    places = list(np.ndindex(*dy.shape[1:-1]))
    spread = []
    for place in places[:: max(1, len(places) // 8)]:
        mark[...] = 0
        mark[(0, *place, 1)] = 1
        owned = case.definition("dgrad", mark, np.ones_like(w), outer) != 0
        got = np.asarray(run(jnp.asarray(np.where(mark, np.float32(np.inf), dy)), jnp.asarray(w), geo=geo))
        assert not np.isfinite(got[owned]).any()
        spread.append(not np.isfinite(got[~owned]).all())
    assert any(spread) == filled
    assert dgrad.spreads_nonfinite(geo, case.c) == filled
    assert not dgrad.spreads_nonfinite(geo, dgrad.NARROW)
    assert not dgrad.spreads_nonfinite(geo, case.c, operands=["prior"])


def test_the_engine_states_what_joined_phases_do():
    case, _ = JOINED["3x3"]
    for channels, hazards in ((3, ("spreads_nonfinite",)), (64, ())):
        dy, w = case._replace(c=channels).avals("dgrad")
        run = lambda dy, w, c=channels: dnn.conv_dgrad(dy, w, (2, 9, 8, c), stride=2, padding=1)
        (call,) = traced_calls(run, dy, w, platform="cuda")
        (engine,) = (engine for engine in engines.registered(call.op) if engine.name == "hopper")
        assert engine.supports(call) is None
        assert engine.hazards(call) == (*hazards, "leaves_out_padding")
