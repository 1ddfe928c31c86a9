"""The Hopper kernel of grouped products: its items, its protocol, the values of its schedule, what it refuses.

Without a GPU nothing here runs the kernel itself.
"""

import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.cases import case as plain
from jaxdnn._src.core import engines
from jaxdnn._src.hopper import branches
from jaxdnn._src.matmul import cases_grouped

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.matmul.hopper import items, kernel, plan
from jaxdnn._src.matmul.hopper.plan import Config, Problem
from tests.hopper.protocol import place_of
from tests.hopper.shared_memory import Fault
from tests.matmul import grouped_values

BF16, F16, F32 = (np.dtype(v) for v in (jnp.bfloat16, np.float16, np.float32))
PASSES = {"product": (False, False), "transposed": (False, True), "gradient": (True, False)}


def drawn_sizes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Of each list: groups that are empty, that leave rows, that exceed them, or one that has all."""
    kind, shape = rng.integers(4), (problem.lists, problem.groups)
    if kind == 0:
        return np.where(np.arange(problem.groups) == rng.integers(problem.groups), problem.rows, np.zeros(shape, int))
    sizes = rng.integers(0, 1 + (1, 1, 2, 4)[kind] * problem.rows // problem.groups, shape)
    return np.where(rng.random(shape) < 0.3, 0, sizes)


def drawn(rng: np.random.Generator, gradient: bool, transposed: bool) -> tuple[Problem, Config, np.ndarray]:
    one_of = lambda *values: values[int(rng.integers(len(values)))]
    lists, groups, rows = one_of(1, 1, 2), one_of(1, 2, 5, 9), one_of(1, 30, 200, 333)
    terms, columns = one_of(8, 64, 136, 200), one_of(8, 72, 128, 264)
    dtype = one_of(BF16, F16)
    problem = Problem(gradient, lists, rows, groups, terms, columns, dtype, one_of(dtype, F32), transposed)
    return problem, one_of(*plan.candidates(problem)), drawn_sizes(rng, problem)


def runs(problem: Problem, sizes: np.ndarray) -> list[tuple[int, int, int | None]]:
    """First row, number of rows and matrix of each group, None behind the last one; counted one by one."""
    found = []
    for of_list, counts in enumerate(sizes.tolist()):
        start = of_list * problem.rows
        for group, count in enumerate(counts):
            count = min(max(count, 0), (of_list + 1) * problem.rows - start)
            found.append((start, count, of_list * problem.groups + group))
            start += count
        found.append((start, (of_list + 1) * problem.rows - start, None))
    return found


# ---- items -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_items_have_each_row_once_and_no_item_has_rows_of_two_groups(seed: int):
    rng = np.random.default_rng(seed)
    problem, config, sizes = drawn(rng, False, False)
    (count, *_), *found = grouped_values.table(problem, config, sizes).tolist()
    assert len(found) == items.most(problem, config)
    owner = np.full(problem.lists * problem.rows, -2)
    for start, rows, matrix in runs(problem, sizes):
        owner[start : start + rows] = -1 if matrix is None else matrix
    seen = np.zeros(problem.lists * problem.rows, int)
    for matrix, start, rows, steps in found[:count]:
        assert 0 < rows <= config.rows
        assert set(owner[start : start + rows]) == {matrix if steps else -1}
        assert steps in (0, problem.steps)
        assert 0 <= matrix < problem.matrices
        seen[start : start + rows] += 1
    assert (seen == 1).all()


def test_no_sizes_have_more_items_than_there_is_room_for():
    """And some have as many: groups of one row more than a tile."""
    problem = Problem(False, 1, 129 * 3 + 1, 3, 64, 64, BF16, BF16)
    config = Config(128, 128, 4, 2, 1)
    assert grouped_values.table(problem, config, [[129] * 3])[0, 0] == items.most(problem, config) == 7


@pytest.mark.parametrize("seed", range(4))
def test_items_of_a_gradient_are_the_groups(seed: int):
    problem, config, sizes = drawn(np.random.default_rng(seed), True, False)
    (count, *_), *found = grouped_values.table(problem, config, sizes).tolist()
    wanted = [
        (matrix, start, rows, -(-rows // 64)) for start, rows, matrix in runs(problem, sizes) if matrix is not None
    ]
    assert count == len(wanted)
    assert [tuple(item) for item in found] == wanted


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("count", [1, 5, 6])
def test_every_tile_is_computed_once(gradient: bool, count: int):
    problem = Problem(gradient, 1, 700, 6, 200, 264, BF16, BF16)
    tiles = items.Tiles(problem, Config(128, 128, 4, 2, 1, panel=3))
    places = jax.jit(lambda number: tiles.place(number, jnp.int32(count)))
    found = []
    for sm in range(4):
        mine = int(tiles.share(jnp.int32(count), jnp.int32(sm), jnp.int32(4)))
        found += [tuple(map(int, places(sm + 4 * local))) for local in range(mine)]
    assert sorted(found) == list(np.ndindex(count, tiles.rows, tiles.columns))


# ---- the protocol, and the values of the schedule --------------------------------------------------------------------


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("seed", range(6))
def test_values_are_the_definitions_and_accesses_are_ordered(which: str, seed: int):
    """Integers, whose sums are exact; infinity in what is no group's and must show in none."""
    rng = np.random.default_rng([seed, len(which)])
    problem, config, sizes = drawn(rng, *PASSES[which])
    gradient = problem.gradient
    a = rng.integers(-3, 4, (problem.lists, problem.rows, problem.terms)).astype(problem.dtype)
    of_matrices = (problem.columns, problem.terms) if problem.transposed else (problem.terms, problem.columns)
    second = (problem.rows, problem.columns) if gradient else (problem.groups, *of_matrices)
    b = rng.integers(-3, 4, (problem.lists, *second)).astype(problem.dtype)
    for of_list, counts in enumerate(sizes):
        a[of_list, min(counts.sum(), problem.rows) :] = np.inf
        if gradient:
            b[of_list, min(counts.sum(), problem.rows) :] = np.nan
    define: Any = reference.grouped_matmul_wgrad if gradient else reference.grouped_matmul
    given = {} if gradient else {"transpose_b": problem.transposed}
    wanted = [define(*v, counts, out_dtype=problem.out_dtype, **given) for *v, counts in zip(a, b, sizes, strict=True)]
    operands = [v.reshape(-1, v.shape[-1]) if v is a or gradient else v.reshape(-1, *v.shape[2:]) for v in (a, b)]
    found = grouped_values.values(problem, config, operands, sizes, int(rng.integers(1, 4)))
    np.testing.assert_array_equal(found, np.concatenate(wanted))


# A function whose waits order nothing that is not ordered without them: `hopper.launch.drain` says why.
REDUNDANT = {"drain.<locals>._"}
TEAMS = {"a team of two": Config(128, 256, 3, 1, 2, 2, 2), "two teams": Config(128, 128, 3, 2, 1, 1, 2)}


@pytest.mark.parametrize("teams", TEAMS)
@pytest.mark.parametrize("which", ["product", "gradient"])
def test_whatever_is_taken_away_shows(which: str, teams: str):
    problem = Problem(PASSES[which][0], 1, 300, 3, 200, 328, BF16, BF16)
    launch = grouped_values.launched(problem, TEAMS[teams], 2)
    known = {0: grouped_values.table(problem, TEAMS[teams], [[100, 0, 157]])}
    launch.run(known)
    unseen = []
    for equation in launch.ordering():
        counted = not isinstance(equation, str) and "n" in equation.params
        for way in ("missing", "early") if counted else ("missing",):
            setattr(launch, way, equation)
            try:
                launch.run(known)
                unseen.append((way, place_of(equation)))
            except Fault:
                pass
            setattr(launch, way, None)
    assert [(way, place) for way, place in unseen if place not in REDUNDANT] == []


def test_buffers_that_a_warpgroup_leaves_out_are_whole_rotations(monkeypatch: pytest.MonkeyPatch):
    """Or, as `check` says, a buffer is stored to while the copy engine reads it: after 40 rows, all the first one's."""
    problem, sizes = Problem(False, 1, 300, 3, 200, 192, BF16, BF16), [[128, 40, 132]]
    for staged in (1, 2):
        config = Config(128, 192, 3, 1, 2, staged)
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "check", lambda *given: None)
            launch = grouped_values.launched(problem, config, 1)
        known = {0: grouped_values.table(problem, config, sizes)}
        if plan.check(problem, config) is None:
            launch.run(known)
        else:
            with pytest.raises(Fault, match="a store is not ordered after a load"):
                launch.run(known)
    assert plan.check(problem, config) is not None


# ---- public calls ----------------------------------------------------------------------------------------------------


def avals(dtype: Any, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(300, 64, 136), (7, 13, 11)])
def test_calls_and_their_derivatives_lower(dtype: Any, transposed: bool, m: int, k: int, n: int):
    """Over a batch too. Whole rows of 16 bytes are not copied."""

    def both(a: Any, b: Any, sizes: Any, dy: Any) -> Any:
        run = ft.partial(dnn.grouped_matmul, transpose_b=transposed, engine="hopper")
        y, back = jax.vjp(lambda a, b: run(a, b, sizes), a, b)
        return y, back(dy)

    of_b = (4, n, k) if transposed else (4, k, n)
    a, b, dy = avals(dtype, (2, m, k), (2, *of_b), (2, m, n))
    sizes = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    text = jax.jit(jax.vmap(both)).trace(a, b, sizes, dy).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 3
    assert ("stablehlo.pad" in text) == (k % 8 > 0)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "float32": (avals(F32, (7, 4), (3, 4, 5)), {}, "its kernel takes bfloat16 and float16, not float32 and float32"),
    "accumulate": (avals(BF16, (7, 4), (3, 4, 5)), {"accumulate": np.float64}, "it accumulates in float32"),
    "out": (avals(BF16, (7, 4), (3, 4, 5)), {"out_dtype": jnp.float8_e5m2}, "its kernel writes bfloat16, float16 and"),
    "empty": (avals(BF16, (0, 4), (3, 4, 5)), {}, "it has no kernel for empty arrays"),
    "rows": (avals(BF16, (2**30, 1), (3, 1, 5)), {}, "its kernel numbers the rows in 32 bits"),
}


@pytest.mark.usefixtures("h200", "x64")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str):
    (a, b), options, text = REFUSED[name]
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(NotImplementedError, match=text):
        jax.eval_shape(lambda *v: dnn.grouped_matmul(*v, engine="hopper", **options), a, b, sizes)


@pytest.mark.usefixtures("h200")
def test_gradients_of_a_wider_result_are_xlas():
    """Their operands have two dtypes, as the docstring says."""
    a, b = avals(BF16, (70, 104), (3, 104, 80))
    given = a, b, jax.ShapeDtypeStruct((3,), jnp.int32)

    def gradients(*arrays: Any, engine: str | None = None) -> Any:
        a, b, sizes = arrays
        run = lambda a, b: jnp.sum(dnn.grouped_matmul(a, b, sizes, out_dtype=F32, engine=engine))
        return jax.grad(run, (0, 1))(a, b)

    calls = dnn.explain(gradients, *given, platform="cuda")
    assert [call.engine for call in calls] == ["hopper", "xla", "xla"]
    with pytest.raises(NotImplementedError, match="not bfloat16 and float32"):
        jax.jit(ft.partial(gradients, engine="hopper")).trace(*given).lower(lowering_platforms=("cuda",))


@pytest.mark.usefixtures("h200")
def test_what_it_guarantees_is_told():
    a, b = avals(BF16, (70, 100), (3, 100, 80))
    (call,) = dnn.explain(dnn.grouped_matmul, a, b, jax.ShapeDtypeStruct((3,), jnp.int32), platform="cuda")
    (found,) = [c for c in call.candidates if c.engine == "hopper"]
    assert (found.refusal, found.level, found.accumulation) == (None, "batch_invariant", "tensor_core")
    assert found.schedule is not None
    np.testing.assert_array_equal(found.schedule.order, [[*range(100), *[-1] * 28]])
    problem = Problem(False, 1, 70, 3, 104, 80, BF16, BF16)
    of_table = 16 * (1 + items.most(problem, plan.choose(problem, 132)))
    assert found.workspace == of_table + 2 * 104 * (70 + 3 * 80)  # columns are padded to 104


@pytest.mark.parametrize("which", PASSES)
def test_every_branch_of_a_configuration_is_listed(which: str):
    every, found = set(branches.every()), set[Any]()
    for seed in range(20):
        problem, _, _ = drawn(np.random.default_rng(seed), *PASSES[which])
        for config in plan.candidates(problem):
            found |= branches.named("grouped", **plan.decided(problem, config))
    assert found <= every
    assert {value for _, what, value in found if what == "columns"} == {"64", "128", "256"}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Config(96, 128, 4, 2, 1), "a warpgroup has a multiple of 64 rows"),
        (Config(128, 96, 4, 2, 1), "whole chunks of columns"),
        (Config(128, 512, 2, 1, 2), "at most 256 of each"),
        (Config(128, 256, 4, 2, 1), "the accumulator does not fit the registers"),
        (Config(64, 128, 4, 1, 1), "two warpgroups multiply"),
        (Config(128, 192, 3, 1, 2, 2), "must leave out whole rotations of its buffers"),
        (Config(128, 256, 5, 1, 2), "the ring does not fit shared memory"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(config: Config, text: str):
    problem = Problem(False, 1, 300, 3, 200, 328, BF16, BF16)
    with pytest.raises(ValueError, match=rf"`config` Config\(.*\) cannot run: .*{text}"):
        grouped_values.launched(problem, config, 1)


@pytest.mark.parametrize(
    ("rows", "terms", "columns", "groups", "tile"),
    [
        (8192, 4096, 14336, 8, (128, 256)),
        (8192, 2048, 1408, 64, (128, 128)),
        (256, 2048, 1408, 64, (64, 256)),
    ],
)
def test_tiles_are_as_high_as_groups_are(rows: int, terms: int, columns: int, groups: int, tile: tuple[int, int]):
    """Those that were the fastest of what `benchmarks/grouped_tiles.py` measured, of 1024, 128 and 4 rows a group."""
    config = plan.choose(Problem(False, 1, rows, groups, terms, columns, BF16, BF16), 132)
    assert (config.rows, config.columns) == tile


# ---- predicted bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", cases_grouped.OPS)
def test_predicted_bits_are_those_of_the_schedule_and_another_bit_shows(op: str, monkeypatch: pytest.MonkeyPatch):
    """By the case that `verify` runs on the device. A group's rows are added in order, whatever other groups have."""
    sizes = {"sizes": (70, 0, 130, 3), "rows": 210}
    case = cases_grouped.GroupedCase(op, "hopper", "bf16", "few", **sizes, k=72, n=40)
    terms = case.k if op == cases_grouped.PRODUCT else case.rows
    order = np.arange(-(-terms // 64) * 64)
    schedule = engines.Schedule("tensor_core", np.where(order < terms, order, -1)[None])
    facts = plain.Facts(None, "batch_invariant", "tensor_core", schedule=schedule, modelled=("here",))
    monkeypatch.setattr(cases_grouped, "architectures", lambda: {"here"})
    operands = case.operands("normal", plain.generator(case, "normal", 0))
    out = getattr(reference, op)(*operands, arithmetic="tensor_core")
    judged = lambda out: cases_grouped.judge(
        case, facts, "normal", operands, {}, out, plain.accumulation_of(facts, False), modelled=10**6
    )
    assert [(c.rule, c.passed) for c in judged(out)] == [("computed bound", True), ("modelled bits", True)]
    out.view(np.uint16)[-1, -1] ^= 1
    assert [c.passed for c in judged(out) if c.rule == "modelled bits"] == [False]
