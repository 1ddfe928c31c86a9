"""The Hopper kernels of the normalisations on the CPU: their PTX run by a small machine, and lowered for CUDA."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection
from jaxdnn._src.norm import bounds
from jaxdnn._src.norm.spec import NormSpec
from tests.hopper.norm_machine import NormRows
from tests.hopper.row_machine import on_arrays
from tests.norm.calls import DTYPES, arrays_of, check_backward, check_forward
from tests.norm.cases import Norm, agree, in_view

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.hopper.ptx import SIZES
from jaxdnn._src.norm.hopper import rows as norm
from jaxdnn._src.norm.hopper import rows_dgrad_ptx, rows_ptx
from jaxdnn._src.norm.hopper.rows_ptx import RowPlan

pytestmark = pytest.mark.usefixtures("h200")

# One vector a row, part of a warp's, ragged ends, several warps, as many vectors a thread as there may be.
LENGTHS = (8, 128, 136, 1000, 2056, 8192)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_length = pytest.mark.parametrize("length", LENGTHS)
each_op = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])


def run(
    code: str, plan: RowPlan, blocks: int, arrays: list[np.ndarray], outs: list[tuple[Any, Any]]
) -> list[np.ndarray]:
    """Forward of x and parameters, or backward of dy, x and what follows."""
    backward = len(arrays) > 3
    floats = norm.backward_floats(plan) if backward else norm.forward_floats(plan, len(arrays) - 1)
    return on_arrays(NormRows, code, arrays, outs, plan.block, blocks, floats=floats)


def forward(
    x: np.ndarray,
    s: Any,
    b: Any,
    names: tuple[str, str],
    eps: float,
    *,
    centred: bool,
    many: int = 1,
    plan: RowPlan | None = None,
    blocks: int = 2,
) -> list[np.ndarray]:
    """y, mean, rstd and variance by the kernel; `many` stands for a call of that many rows when it is planned."""
    rows, length = x.shape
    plan = plan or norm.forward_plan(length, *names, many)
    assert plan is not None
    blocks = min(blocks if plan.stays else rows, -(-rows // plan.rows_a_block))
    code = rows_ptx.forward(plan, rows, blocks, centred=centred, eps=eps, scale=s is not None, bias=b is not None)
    given = [x, *(v for v in (s, b) if v is not None)]
    outs = [(x.shape, DTYPES[names[1]]), *[((rows,), np.float32)] * 3]
    return run(code, plan, blocks, given, outs)


def backward(
    dy: np.ndarray,
    x: np.ndarray,
    mean: Any,
    rstd: Any,
    s: Any,
    names: tuple[str, str],
    *,
    centred: bool,
    blocks: int,
    plan: RowPlan | None = None,
) -> list[np.ndarray]:
    """dx, dscale and dbias by the kernel, the blocks' sums added up here."""
    rows, length = x.shape
    plan = plan or norm.backward_plan(length, *names)
    assert plan is not None
    code = rows_dgrad_ptx.backward(plan, rows, blocks, centred=centred, scale=s is not None)
    given = [dy, x, mean, rstd, *([] if s is None else [s])]
    outs = [(x.shape, DTYPES[names[1]]), ((blocks, 2, length), np.float32)]
    dx, sums = run(code, plan, blocks, given, outs)
    return [dx, *sums.sum(0, dtype=np.float32)]


def check(op: str, rows: int, length: int, names: tuple[str, str], mean: float = 0.5, **plans: Any) -> None:
    """Both kernels within the computed bounds, forward and, from the statistics that it saved, backward."""
    n = Norm(op, (rows, length), (length,))
    x, s, b, dy = arrays_of(n, names[0], mean)
    out = DTYPES[names[1]]
    many, plan = plans.get("many", 1), plans.get("forward")
    y, *saved = forward(x, s, b, names, n.eps, centred=n.centred, many=many, plan=plan)
    check_forward(n, x, s, b, out, y, saved)
    options: dict[str, Any] = {"blocks": plans.get("blocks", 1), "plan": plans.get("backward")}
    grads = backward(dy, x, saved[0], saved[1], s, names, centred=n.centred, **options)
    check_backward(n, x, s, b, dy, out, grads)


@each_op
@each_dtype
@each_length
def test_rows(length: int, dtype: str, op: str):
    """Fewer rows than a block takes, and a ragged last block."""
    check(op, 3, length, (dtype, dtype))
    if length <= 1000:
        check(op, 13, length, (dtype, dtype), blocks=3)


@pytest.mark.parametrize("out_dtype", DTYPES)
@each_dtype
def test_result_of_another_dtype(dtype: str, out_dtype: str):
    check("layer_norm", 5, 136, (dtype, out_dtype), blocks=2)


@pytest.mark.parametrize(("dtype", "mean"), [("f32", 1e4), ("bf16", 100.0), ("f16", 100.0)])
@pytest.mark.parametrize("length", [136, 1000])
def test_mean_far_from_zero(length: int, dtype: str, mean: float):
    check("layer_norm", 5, length, (dtype, dtype), mean)


@each_op
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("length", [128, 1000])
def test_several_rows_at_once(length: int, dtype: str, op: str):
    """How a call of many rows is dealt out, on rows that do not fill the last block."""
    plan = norm.forward_plan(length, dtype, dtype, 1 << 20)
    assert plan is not None
    assert plan.rows == 4
    check(op, plan.rows_a_block + 3, length, (dtype, dtype), many=1 << 20)


@each_op
@each_dtype
@pytest.mark.parametrize(("length", "threads", "groups"), [(512, 32, 4), (504, 64, 2), (2048, 512, 1)])
def test_blocks_that_stay(length: int, threads: int, groups: int, dtype: str, op: str):
    """Two blocks, several rounds of rows, the last of which not all groups have; and fewer rows than blocks."""
    vectors = -(-length * SIZES[dtype] // 16 // threads)
    for rows in (1, 2):
        for shared in (False, True):
            plan = RowPlan(length, dtype, dtype, threads, vectors, groups, rows, stays=True, shared=shared)
            for count in (4 * plan.rows_a_block + 3, 1):
                check(op, count, length, (dtype, dtype), forward=plan)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("length", [6152, 8192, 16384])
def test_long_rows_of_16_bits(length: int, dtype: str):
    """Forward with as many rows at a time as many calls have; the bits are those of a call of one row."""
    plan, lone = (norm.forward_plan(length, dtype, dtype, many) for many in (1 << 20, 1))
    assert plan is not None
    assert lone is not None
    assert plan.stays
    n = Norm("layer_norm", (7, length), (length,))
    x, s, b, _ = arrays_of(n, dtype, 0.5)
    y, *saved = forward(x, s, b, (dtype, dtype), n.eps, centred=True, plan=plan)
    agree(y, np.asarray(n.definition(x, s, b)[0]), bounds.from_definition(n.problem(x, s, b))[0], x.dtype, "y")
    alone = forward(x[4:5], s, b, (dtype, dtype), n.eps, centred=True, plan=lone)
    for one, whole in zip(alone, [y, *saved], strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), whole[4:5].view(np.uint8))


@each_op
@each_dtype
@pytest.mark.parametrize(("length", "threads", "groups"), [(512, 32, 4), (504, 64, 2), (2048, 512, 1)])
def test_scale_in_registers_backward(length: int, threads: int, groups: int, dtype: str, op: str):
    """Two blocks, several rows each, the last of which not all groups have."""
    vectors = -(-length * SIZES[dtype] // 16 // threads)
    plan = RowPlan(length, dtype, dtype, threads, vectors, groups, keeps=True)
    check(op, 4 * groups + 3, length, (dtype, dtype), backward=plan, blocks=2)


@pytest.mark.parametrize("which", range(3))
def test_one_barrier_less_is_a_race(which: int):
    """Of those behind scale and bias, mean and variance."""
    plan = RowPlan(504, "bf16", "bf16", 64, 1, 2, 2, stays=True, shared=True)
    x, s, b, _ = arrays_of(Norm("layer_norm", (9, 504), (504,)), "bf16", 0.5)
    whole = rows_ptx.forward(plan, 9, 2, centred=True, eps=1e-5, scale=True, bias=True)
    barriers = list(re.finditer(r"(?m)^bar\.sync .*\n", whole))
    assert len(barriers) == 3
    code = whole[: barriers[which].start()] + whole[barriers[which].end() :]
    outs = [(x.shape, x.dtype), *[((9,), np.float32)] * 3]
    with pytest.raises(RuntimeError, match="race for shared byte"):
        run(code, plan, 2, [x, s, b], outs)


@pytest.mark.parametrize("kept", ["not", "registers", "shared"])
@pytest.mark.parametrize("given", [(), ("scale",), ("bias",)])
def test_without_all_parameters(given: tuple[str, ...], kept: str):
    n = Norm("layer_norm", (5, 136), (136,))
    x, s, b, _ = arrays_of(n, "bf16", 0.5)
    s, b = s if "scale" in given else None, b if "bias" in given else None
    plan = RowPlan(136, "bf16", "f32", 32, 1, 4, 1, stays=kept != "not", shared=kept == "shared")
    y, *_ = forward(x, s, b, ("bf16", "f32"), n.eps, centred=True, plan=plan)
    agree(y, *bounds.forward(n.problem(x, s, b)), np.float32, "y")


@each_op
def test_without_parameters(op: str):
    n = Norm(op, (3, 136), (136,))
    x, _, _, dy = arrays_of(n, "f32", 0.5)
    y, *saved = forward(x, None, None, ("f32", "f32"), n.eps, centred=n.centred)
    p = n.problem(x, None, None)
    agree(y, bounds.forward(p)[0], bounds.forward(p)[1], np.float32, "y")
    grads = backward(dy, x, saved[0], saved[1], None, ("f32", "f32"), centred=n.centred, blocks=1)
    for found, (golden, error) in zip(grads, bounds.backward(p, in_view(n, dy, p.x.shape)), strict=True):
        agree(found, golden.reshape(found.shape), error.reshape(found.shape), np.float32, "a gradient")


@each_dtype
@pytest.mark.parametrize("length", [8, 136, 2056])
def test_bits_depend_on_the_row_alone(length: int, dtype: str):
    """The promise of batch_invariant: of y, of the statistics, and of dx, however rows are dealt out."""
    n = Norm("layer_norm", (9, length), (length,))
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    names = (dtype, dtype)
    whole = forward(x, s, b, names, n.eps, centred=True, many=1 << 20)
    alone = forward(x[4:5], s, b, names, n.eps, centred=True)
    for one, all_rows in zip(alone, whole, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), all_rows[4:5].view(np.uint8))
    dx = backward(dy, x, whole[1], whole[2], s, names, centred=True, blocks=2)[0]
    one = backward(dy[4:5], x[4:5], alone[1], alone[2], s, names, centred=True, blocks=1)[0]
    np.testing.assert_array_equal(one.view(np.uint8), dx[4:5].view(np.uint8))


@each_dtype
def test_what_is_not_finite_stays_in_its_row(dtype: str):
    n = Norm("layer_norm", (4, 136), (136,))
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    clean = forward(x, s, b, (dtype, dtype), n.eps, centred=True)[0]
    x[1, 3], x[2, 135] = np.nan, np.inf
    y, mean, rstd, _ = forward(x, s, b, (dtype, dtype), n.eps, centred=True)
    assert np.isnan(y[1:3].astype(np.float32)).all()
    np.testing.assert_array_equal(y[[0, 3]].astype(np.float32), clean[[0, 3]].astype(np.float32))
    dx, dscale, dbias = backward(dy, x, mean, rstd, s, (dtype, dtype), centred=True, blocks=1)
    assert np.isnan(dx[1:3].astype(np.float32)).all()
    assert np.isfinite(dx[[0, 3]].astype(np.float32)).all()
    assert np.isnan(dscale).all()
    assert np.isfinite(dbias).all()


# ---- lowered for CUDA ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", DTYPES)
@each_dtype
@pytest.mark.parametrize("length", [8, 1000, 4096, 8192])
def test_lowers_for_cuda(length: int, dtype: str, out_dtype: str):
    x = jax.ShapeDtypeStruct((64, length), DTYPES[dtype])
    row = jax.ShapeDtypeStruct((length,), jnp.float32)

    def both(x: Any, s: Any, b: Any) -> Any:
        options: dict[str, Any] = {"out_dtype": np.dtype(DTYPES[out_dtype])}
        y, mean, rstd, _ = norm.forward(x, s, b, centred=True, eps=1e-5, **options)
        plain = norm.forward(x, None, None, centred=False, eps=1e-6, **options)
        gradients = norm.backward(x, x, mean, rstd, s, centred=True, **options)
        return y, plain, gradients, norm.backward(x, x, mean, rstd, None, centred=False, **options)

    lowered = jax.jit(both).trace(x, row, row).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 4


def test_rows_that_do_not_fit_are_refused():
    x, row = jnp.zeros((2, 1 << 17), jnp.bfloat16), jnp.zeros(2)
    with pytest.raises(ValueError, match="`x` must have rows that fit into registers, got 131072 elements"):
        norm.forward(x, None, None, centred=True, eps=1e-5, out_dtype=x.dtype)
    with pytest.raises(ValueError, match="`x` must have rows that fit into registers, got 131072 elements"):
        norm.backward(x, x, row, row, None, centred=True, out_dtype=x.dtype)


# ---- the engine ------------------------------------------------------------------------------------------------------


def shape_of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def candidates(function: Any, *operands: Any) -> list[Any]:
    """What the engine says, of every call that is made."""
    told = dnn.explain(function, *operands, platform="cuda")
    return [c for call in told for c in call.candidates if c.engine == "hopper"]


SERVED: dict[str, tuple[Any, tuple[Any, ...], str | None]] = {
    "rows": (dnn.layer_norm, (shape_of(6, 64),), None),
    "several axes": (lambda x: dnn.rms_norm(x, axis=(1, 2)), (shape_of(6, 4, 8),), None),
    "another dtype out": (lambda x: dnn.layer_norm(x, out_dtype=jnp.float32), (shape_of(6, 64),), None),
    "first axis": (
        lambda x: dnn.layer_norm(x, axis=0),
        (shape_of(64, 8),),
        "its kernels over the first axes are those of batch normalisation",
    ),
    "a scale for every sample": (
        dnn.adaptive_layer_norm,
        (shape_of(4, 6, 64), shape_of(4, 64), shape_of(4, 64)),
        "its kernels take parameters that vary along the last axes alone, not of shape (4, 1, 64)",
    ),
    "odd rows": (
        dnn.layer_norm,
        (shape_of(6, 12),),
        "its kernels take rows of whole vectors of 16 bytes, not 12 of bfloat16",
    ),
    "no rows": (dnn.layer_norm, (shape_of(0, 64),), "its kernels take arrays with elements"),
    "too many rows": (
        dnn.layer_norm,
        (shape_of((1 << 30) + 1, 8),),
        "its kernels take at most 1073741824 rows, which they number in 32 bits, not 1073741825",
    ),
    "too long": (
        dnn.layer_norm,
        (shape_of(2, 1 << 17),),
        "its kernels take rows that fit into registers, not 131072 elements",
    ),
    "backward too long": (
        dnn.layer_norm_dgrad,
        (shape_of(2, 1 << 15), shape_of(2, 1 << 15)),
        "its kernels take rows that fit into registers, not 32768 elements",
    ),
    "gradients of two dtypes": (
        dnn.layer_norm_dgrad,
        (shape_of(6, 64, dtype=jnp.float32), shape_of(6, 64)),
        "its kernels take a gradient of x's dtype bfloat16, not float32",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_engine_says_what_it_serves(name: str):
    function, operands, reason = SERVED[name]
    found = candidates(function, *operands)[-1]
    assert found.level == "batch_invariant"
    assert (found.refusal is None) if reason is None else (reason in found.refusal)


@pytest.mark.usefixtures("x64")
def test_engine_does_not_serve_float64():
    (found,) = candidates(dnn.layer_norm, shape_of(6, 64, dtype=jnp.float64))
    assert "its kernels take and write bfloat16, float16, float32, not float64" in found.refusal


def test_engine_has_no_kernel_for_tangents():
    x = shape_of(6, 64)
    found = candidates(lambda x, t: jax.jvp(dnn.layer_norm, (x,), (t,))[1], x, x)
    assert any("it has no kernel for the derivative along a tangent" in (c.refusal or "") for c in found)


@pytest.mark.parametrize("op", ["norm", "norm_dgrad"])
def test_engine_is_first_but_for_few_bytes(op: str):
    """Of every length; what so few bytes gain, the operations around them lose."""
    (engine,) = (e for e in engines.registered(op) if e.name == "hopper")

    def first(rows: int, length: int, dtype: Any) -> bool:
        kinds = (np.dtype(np.float32), np.dtype(dtype))
        spec = NormSpec((-1,), (-2,), True, 1e-5, False, False, True, *kinds)
        x, statistic = shape_of(rows, length, dtype=dtype), shape_of(rows, 1, dtype=jnp.float32)
        operands = (x,) if op == "norm" else (x, x, statistic, statistic)
        return selection.why_later(engine, engines.Call(op, spec, operands, "cuda", hopper.MEASURED_ON[0])) is None

    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert all(first(1 << 25 - i, 1 << i, dtype) for i in (9, 10, 12, 13))
        assert first(4096, 96, dtype)
        assert first(64, 4096, dtype)
        assert not first(8, 4096, dtype)


def test_engine_does_not_serve_cpus():
    with pytest.raises(NotImplementedError, match="and this is cpu"):
        jax.jit(lambda x: dnn.layer_norm(x, engine="hopper")).lower(shape_of(8, 16))


def test_call_by_name_lowers_with_its_derivatives():
    def both(x: Any, s: Any) -> Any:
        def f(x: Any, s: Any) -> Any:
            y: Any = dnn.layer_norm(x, scale=s, engine="hopper")
            return jnp.sum(y.astype(jnp.float32) ** 2)

        many: Any = jax.vmap(lambda x: dnn.rms_norm(x, scale=s, engine="hopper"))
        return jax.grad(f, (0, 1))(x, s), many(x)

    x, row = shape_of(6, 4, 64), shape_of(64, dtype=jnp.float32)
    lowered = jax.jit(both).trace(x, row).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3
