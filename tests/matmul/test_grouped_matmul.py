"""Rows times the matrices of their groups: the definition's bits, groups of all sizes, derivatives, errors."""

import functools as ft
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.matmul import cases_grouped, grouped_xla
from jaxdnn._src.matmul.grouped_primitive import group_ends

# Rows left over, a negative size, several tiles a group, sizes that exceed the rows, no rows in any group, no group.
SIZES = {"left": (7, 0, 3), "negative": (2, -4, 5, 1), "tiles": (40, 0, 51, 2), "exceeded": (9, 9), "empty": (0, 0)}
SIZES |= {"none": (), "one": (4,)}
ROWS = {"tiles": 100, "exceeded": 12, "one": 4}


def normal(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def groups_of(sizes: tuple[int, ...], rows: int) -> list[slice]:
    """The rows of each group, counted one by one."""
    left = list(range(rows))
    taken = [[left.pop(0) for _ in range(max(size, 0)) if left] for size in sizes]
    return [slice(rows_of[0], rows_of[-1] + 1) if rows_of else slice(0, 0) for rows_of in taken]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_values_are_products_of_groups_and_bits_the_definitions(name: str, turned: bool):
    sizes, rows = np.asarray(SIZES[name], np.int32), ROWS.get(name, 13)
    a, b, dy = normal((rows, 6), (len(sizes), *((5, 6) if turned else (6, 5))), (rows, 5))
    given: dict[str, Any] = {"transpose_b": turned}
    run = lambda a, b, dy, sizes, level: (
        dnn.grouped_matmul(a, b, sizes, **given, determinism=level),
        dnn.grouped_matmul_wgrad(a, dy, sizes, determinism=level),
    )
    both = jax.jit(lambda a, b, dy, sizes: (run(a, b, dy, sizes, None), run(a, b, dy, sizes, "portable")))
    (y, w), exact = both(a, b, dy, sizes)
    wanted, of_matrices = np.zeros((rows, 5)), np.zeros((len(sizes), 6, 5))
    for g, part in enumerate(groups_of(SIZES[name], rows)):
        wanted[part] = a[part].astype(np.float64) @ (b[g].T if turned else b[g])
        of_matrices[g] = a[part].astype(np.float64).T @ dy[part]
    golden = reference.grouped_matmul(a, b, sizes, **given), reference.grouped_matmul_wgrad(a, dy, sizes)
    for found, defined, right in zip((y, w), golden, (wanted, of_matrices), strict=True):
        assert found.shape == right.shape
        np.testing.assert_allclose(found, right, atol=1e-5)
        np.testing.assert_allclose(defined, right, atol=1e-13)
    np.testing.assert_array_equal(exact[0], reference.grouped_matmul(a, b, sizes, **given, arithmetic="ordered"))
    np.testing.assert_array_equal(exact[1], reference.grouped_matmul_wgrad(a, dy, sizes, arithmetic="ordered"))


@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_nothing_of_other_groups_or_of_rows_without_one_shows(engine: str):
    sizes = np.asarray((3, 0, 4), np.int32)
    a, b, dy = normal((9, 6), (3, 6, 5), (9, 5))
    finite = jax.jit(
        lambda *v: (
            dnn.grouped_matmul(v[0], v[1], v[3], engine=engine),
            dnn.grouped_matmul_wgrad(v[0], v[2], v[3], engine=engine),
        )
    )
    before = finite(a, b, dy, sizes)
    a[7:], dy[8:], b[:2], a[1] = np.nan, np.inf, np.inf, np.nan
    y, w = finite(a, b, dy, sizes)
    assert np.isnan(y[:3]).any()
    np.testing.assert_array_equal(y[3:], before[0][3:])
    np.testing.assert_array_equal(y[7:], np.zeros((2, 5)))
    assert np.isnan(w[0]).all()
    np.testing.assert_array_equal(w[1:], before[1][1:])


@pytest.mark.parametrize(("rows", "groups"), [(2**31 - 1, 5), (2**29, 4), (2**17, 2**14), (2**29, 3)])
def test_sizes_whose_sum_exceeds_32_bits_end_with_the_last_row(rows: int, groups: int):
    """Of two lists; one has all its rows in the last groups."""
    sizes = np.full((2, groups), np.iinfo(np.int32).max, np.int32)
    sizes[1, :-2] = (-1, *[0] * (groups - 3))
    starts, ends = jax.jit(lambda sizes: group_ends(sizes, rows))(sizes)
    np.testing.assert_array_equal(starts, [[0, *[rows] * (groups - 1)], [0] * (groups - 1) + [rows]])
    np.testing.assert_array_equal(ends, [[rows] * groups, [0] * (groups - 2) + [rows] * 2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_sums_are_rounded_once(dtype: str):
    """Sums of 900 ones and 901 in a row are no number of a narrow type: one that is rounded on its way stays below."""
    a, b = np.ones((4, 901), dtype), np.ones((2, 901, 3), dtype)
    dy, sizes = np.ones((901, 3), dtype), np.asarray((0, 901), np.int32)
    wide = np.int32 if dtype == "int8" else np.float32
    y, w = jax.jit(
        lambda *v: (
            dnn.grouped_matmul(v[0], v[1], v[3], out_dtype=wide),
            dnn.grouped_matmul_wgrad(v[0].T, v[2], v[3], out_dtype=wide),
        )
    )(a, b, dy, sizes)
    np.testing.assert_array_equal(y, np.full((4, 3), 901))
    np.testing.assert_array_equal(w, np.broadcast_to(np.asarray((0, 901))[:, None, None], (2, 4, 3)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("turned", [False, True])
def test_derivatives_are_the_definitions_differences(turned: bool):
    """The first ones and, of the gradients, the second ones, of either op."""
    sizes = np.asarray((3, 0, 2), np.int32)
    shapes = (6, 4), (3, *((5, 4) if turned else (4, 5)))
    arrays, along = (normal(*shapes, dtype=np.float64, seed=seed) for seed in (0, 1))
    dy, d_dy = (normal((6, 5), dtype=np.float64, seed=seed)[0] for seed in (2, 3))
    op = lambda a, b: jnp.sin(dnn.grouped_matmul(a, b, sizes, transpose_b=turned))
    define = lambda a, b: np.sin(reference.grouped_matmul(a, b, sizes, transpose_b=turned).astype(np.float64))
    back = lambda a, b, dy: jax.vjp(op, a, b)[1](dy)
    v, t = (*arrays, dy), (*along, d_dy)
    gradients, tangent, second = jax.jit(
        lambda v, t: (back(*v), jax.jvp(op, v[:2], t[:2])[1], jax.jvp(back, v, t)[1])
    )(v, t)  # fmt: skip
    h, total = 2.0**-20, 0.0
    for i, (gradient, direction) in enumerate(zip(gradients, along, strict=True)):
        up, down = ([v + s * direction if i == j else v for j, v in enumerate(arrays)] for s in (h, -h))
        slope = (define(*up) - define(*down)) / (2 * h)
        total = total + slope
        np.testing.assert_allclose(np.vdot(gradient, direction), np.vdot(dy, slope), atol=1e-6)
    np.testing.assert_allclose(tangent, total, atol=1e-6)
    ends = [jax.jit(back)(*(x + s * d for x, d in zip(v, t, strict=True))) for s in (h, -h)]
    for found, up, down in zip(second, *ends, strict=True):
        np.testing.assert_allclose(found, (up - down) / (2 * h), atol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, 1, None, 1), (None, None, 0, 0)])
def test_vmap_over_each_operand(axes: tuple[int | None, ...]):
    shapes = (9, 6), (3, 6, 5), (9, 5), (3,)
    arrays = normal(*((*shape[:x], 2, *shape[x:]) if x is not None else shape for shape, x in zip(shapes, axes)))  # noqa: B905
    arrays[3] = np.abs(4 * arrays[3]).astype(np.int32)
    run = lambda a, b, dy, sizes: (
        dnn.grouped_matmul(a, b, sizes, engine="ordered"),
        dnn.grouped_matmul_wgrad(a, dy, sizes, engine="ordered"),
        jax.grad(lambda b: jnp.sum(dnn.grouped_matmul(a, b, sizes) ** 2))(b),
    )
    found = jax.jit(jax.vmap(run, axes))(*arrays)
    for i in range(2):
        one = [v if x is None else np.take(v, i, x) for v, x in zip(arrays, axes, strict=True)]
        *bits, gradient = jax.jit(run)(*one)
        np.testing.assert_array_equal(found[0][i], bits[0])
        np.testing.assert_array_equal(found[1][i], bits[1])
        np.testing.assert_allclose(found[2][i], gradient, atol=1e-4)


X, WHOLE = P("x"), P()
SENDS = re.compile(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")
SHARDED: dict[str, tuple[P, P, P, set[str], set[str]]] = {  # a, b, dy, what devices send for the product, the gradients
    "rows": (X, WHOLE, X, set(), {"all-reduce"}),
    "K": (P(None, "x"), P(None, "x"), WHOLE, {"all-reduce"}, set()),
    "N": (WHOLE, P(None, None, "x"), P(None, "x"), set(), {"all-reduce"}),
    "groups": (WHOLE, X, WHOLE, {"all-gather"}, {"all-gather"}),
}


@pytest.mark.parametrize("name", SHARDED)
def test_what_devices_of_a_mesh_send_each_other(name: str):
    """As the docstring says."""
    *specs, of_product, of_gradients = SHARDED[name]
    mesh, (a, b, dy) = jax.make_mesh((2,), ("x",), (AxisType.Auto,)), normal((20, 6), (4, 6, 8), (20, 8))
    placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip((a, b, dy), specs, strict=True)]
    sizes = np.asarray((7, 0, 9, 1), np.int32)
    product = lambda a, b, dy: dnn.grouped_matmul(a, b, sizes)
    gradients = lambda a, b, dy: jax.vjp(lambda a, b: dnn.grouped_matmul(a, b, sizes), a, b)[1](dy)
    wanted = reference.grouped_matmul(a, b, sizes)
    for function, sent in ((product, of_product), (gradients, of_gradients)):
        compiled = jax.jit(function).lower(*placed).compile()
        assert set(SENDS.findall(str(compiled.as_text()))) == sent
        if function is product:
            np.testing.assert_allclose(compiled(*placed), wanted, atol=1e-5)


def test_experts_of_several_devices_within_shard_map_send_nothing():
    """Each device has two groups and ten rows, of which its sizes leave some."""
    a, b, dy = normal((20, 6), (4, 6, 8), (20, 8))
    mesh, sizes = jax.make_mesh((2,), ("x",), (AxisType.Auto,)), np.asarray((7, 1, 0, 9), np.int32)

    @ft.partial(jax.shard_map, mesh=mesh, in_specs=X, out_specs=X)
    def both(a: Any, b: Any, dy: Any, sizes: Any) -> Any:
        y, back = jax.vjp(lambda a, b: dnn.grouped_matmul(a, b, sizes), a, b)
        return y, *back(dy)

    compiled = jax.jit(both).lower(a, b, dy, sizes).compile()
    y, da, db = compiled(*(jax.device_put(v, NamedSharding(mesh, X)) for v in (a, b, dy, sizes)))
    assert SENDS.findall(str(compiled.as_text())) == []
    for i in range(2):
        rows, groups = slice(10 * i, 10 * i + 10), slice(2 * i, 2 * i + 2)
        n = sizes[groups]
        np.testing.assert_allclose(y[rows], reference.grouped_matmul(a[rows], b[groups], n), atol=1e-5)
        of_a = reference.grouped_matmul(dy[rows], b[groups], n, transpose_b=True)
        np.testing.assert_allclose(da[rows], of_a, atol=1e-5)
        np.testing.assert_allclose(db[groups], reference.grouped_matmul_wgrad(a[rows], dy[rows], n), atol=1e-5)


def test_a_row_belongs_to_the_group_that_ragged_dot_says():
    a, b = normal((40, 6), (5, 6, 3))
    run = jax.jit(lambda a, b, sizes: (dnn.grouped_matmul(a, b, sizes), lax.ragged_dot(a, b, sizes)))
    for seed in range(4):
        sizes = np.random.default_rng(seed).integers(0, 10, 5).astype(np.int32)
        np.testing.assert_allclose(*run(a, b, sizes), atol=1e-5)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (15, 4), (16, 1), (1000, 1), (1000, 40), (70_000, 3)])
def test_tiles_are_few(rows: int, groups: int):
    """Of a group at most one is not full; together they have as many rows as the docstring says at most."""
    height = grouped_xla.height_of_tiles(rows, groups)
    assert 1 <= height <= min(rows, 256)
    tiles = (rows + groups * (height - 1)) // height
    assert tiles >= -(-rows // height)
    assert tiles * height <= rows + groups * 256


@pytest.mark.parametrize("dtype", [jnp.float32, ml_dtypes.bfloat16, jnp.int8])
def test_lowers_for_gpus_to_products_without_a_scatter(dtype: Any):
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((300, 64), (4, 64, 96))]
    sizes, out = jax.ShapeDtypeStruct((4,), jnp.int32), jnp.int32 if dtype == jnp.int8 else None
    run = ft.partial(dnn.grouped_matmul, out_dtype=out)
    back = lambda a, b, sizes: jax.grad(lambda a, b: jnp.sum(run(a, b, sizes).astype(jnp.float32)), (0, 1))(a, b)
    for function in (run,) if out else (run, back):
        text = jax.jit(function).trace(*avals, sizes).lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.dot_general" in text
        assert "stablehlo.scatter" not in text


@pytest.mark.parametrize("op", cases_grouped.OPS)
@pytest.mark.parametrize("engine", ["xla", "hopper"])
def test_a_report_can_be_written_of_every_case(op: str, engine: str):
    described = [case.describe() for case in cases_grouped.cases(op, engine, "full", 0)]
    assert json.loads(json.dumps(described)) == described
    assert {found.get("out_dtype") for found in described} >= {None, "int32", "float32", "bfloat16"}


A, B, SIZE = np.ones((7, 4), np.float32), np.ones((3, 4, 5), np.float32), np.asarray((2, 0, 4), np.int32)
BAD: list[tuple[Any, ...]] = [
    ((A[0], B, SIZE), {}, ValueError, r"`a` must have 2 axes, \(M, K\), got shape \(4,\)"),
    ((A, B[0], SIZE), {}, ValueError, r"`b` must have 3 axes, \(G, K, N\), got shape \(4, 5\)"),
    ((A, B.swapaxes(1, 2), SIZE), {}, ValueError, r"`b` must have shape \(G, 4, N\) .* \(transpose_b=True would fit"),
    ((A, B, SIZE), {"transpose_b": True}, ValueError, r"\(G, N, 4\) for 4 columns of a, .* \(transpose_b=False"),
    ((A, B[:, :3], SIZE), {}, ValueError, r"got \(3, 3, 5\)\.$"),
    ((A, B, SIZE), {"transpose_b": 1}, TypeError, "`transpose_b` must be True or False"),
    ((A, B, SIZE[:2]), {}, ValueError, r"`group_sizes` must have shape \(3,\), one for every matrix of b"),
    ((A, B, SIZE.astype(np.float32)), {}, TypeError, "`group_sizes` must be integers, got float32"),
    ((A, B, None), {}, TypeError, "`group_sizes` must be an array"),
    ((A, B.astype(np.float16), SIZE), {}, TypeError, "`b` must have the dtype of `a`"),
    ((A > 0, B > 0, SIZE), {}, TypeError, "`a` must have one of the dtypes"),
    ((A, B, SIZE), {"out_dtype": jnp.int8}, TypeError, "`out_dtype`"),
    ((A, B, SIZE), {"accumulate": jnp.bfloat16}, TypeError, "`accumulate`"),
    ((A, B, SIZE), {"precision": "high"}, ValueError, "`precision` must be one of None, 'tf32'"),
    ((A, B, SIZE), {"engine": "hopper"}, NotImplementedError, "on cpu cannot be served by engine 'hopper'"),
    ((A, B, SIZE), {"determinism": "all"}, ValueError, "`determinism`"),
    ((A, B, SIZE), {"engine": "xla", "determinism": "portable"}, NotImplementedError, "it guarantees 'run_to_run'"),
]
WRONG: list[tuple[Any, ...]] = [
    ((A, A[:3], SIZE), {}, ValueError, r"`dy` must have shape \(7, 4\), a row for each row of a"),
    ((A, B, SIZE), {}, ValueError, r"`dy` must have 2 axes, \(M, N\)"),
    ((A, A, SIZE[None]), {}, ValueError, r"`group_sizes` must have shape \(G,\), got \(1, 3\)"),
    ((A, A.astype(np.float16), SIZE), {}, TypeError, "`dy` must have the dtype of `a`"),
]


@pytest.mark.parametrize(("arrays", "options", "error", "text"), BAD)
def test_errors(arrays: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.grouped_matmul(*arrays, **options)


@pytest.mark.parametrize("op", cases_grouped.OPS)
def test_rows_that_no_size_can_count_are_refused(op: str):
    rows = 2**31
    second = (3, 1, 2) if op == cases_grouped.PRODUCT else (rows, 2)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 1), second)]
    with pytest.raises(ValueError, match=r"`a` must have fewer than 2\^31 rows, .*, got 2147483648\."):
        jax.eval_shape(getattr(dnn, op), *avals, jax.ShapeDtypeStruct((3,), jnp.int32))


@pytest.mark.parametrize(("arrays", "options", "error", "text"), WRONG)
def test_errors_of_the_gradient(arrays: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.grouped_matmul_wgrad(*arrays, **options)
