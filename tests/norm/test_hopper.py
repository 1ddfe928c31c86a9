"""The Hopper kernels of rows on the CPU: in Pallas' interpreter, where they are PTX by a small machine, and lowered."""

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
from tests.norm.calls import (
    DTYPES,
    arrays_of,
    check_backward,
    check_forward,
    each_dtype,
    each_extreme,
    extreme_of,
    wide_range,
)
from tests.norm.cases import Norm, agree, in_view

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.hopper.ptx import SIZES
from jaxdnn._src.hopper.row_kernel import Plan
from jaxdnn._src.norm.hopper import rows as norm
from tests.hopper.interpreter import interpreted

pytestmark = pytest.mark.usefixtures("h200")

# One vector a row, part of a warp's, ragged ends, several warps, as many vectors a thread as there may be.
LENGTHS = (8, 128, 136, 1000, 2056, 8192)
each_length = pytest.mark.parametrize("length", LENGTHS)
each_op = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Any:
    """y, mean, rstd and variance by the kernel. Rows that are computed twice are a race, of equal values."""

    def run(
        x: Any, s: Any, b: Any, out: str, eps: float, *, centred: bool, plan: Plan, races: bool
    ) -> list[np.ndarray]:
        interpret = interpreted(monkeypatch, races=races)
        given = [None if v is None else jnp.asarray(v) for v in (s, b)]
        options: dict[str, Any] = {"centred": centred, "eps": eps, "out_dtype": np.dtype(DTYPES[out])}
        found = norm.forward(jnp.asarray(x), given[0], given[1], config=plan, interpret=interpret, **options)
        return [np.asarray(v) for v in found]

    return run


# Length, dtype, dtype of y, rows, plan: a warp to a row, two, four and eight; rows of few vectors, ragged ends, several
# rows at once; blocks that stay.
FORWARD: dict[str, tuple[int, str, str, int, Plan]] = {
    "a vector": (8, "bf16", "bf16", 8, Plan(32)),
    "three vectors": (12, "f32", "bf16", 4, Plan(32)),
    "a warp": (256, "f16", "f16", 8, Plan(32, 2)),
    "a warp, ragged": (136, "f32", "f32", 4, Plan(32)),
    "two warps, ragged": (520, "bf16", "f32", 4, Plan(64)),
    "four warps": (2048, "bf16", "bf16", 3, Plan(128, 4)),
    "eight warps": (1024, "f32", "f32", 3, Plan(256)),
    "eight warps that stay": (1032, "f32", "f16", 5, Plan(256, 1, stays=True)),
    "several that stay": (2048, "f16", "f16", 5, Plan(256, 2, stays=True)),
}


@each_op
@pytest.mark.parametrize("case", FORWARD)
def test_forward(case: str, op: str, forward: Any):
    length, dtype, out, rows, plan = FORWARD[case]
    n = Norm(op, (rows, length), (length,))
    x, s, b, _ = arrays_of(n, dtype, 0.5)
    ragged = length % (plan.threads * 16 // SIZES[dtype]) != 0
    races = plan.threads <= 128 or not ragged  # a ragged end is stored by two warpgroups, with the same bits
    y, *saved = forward(x, s, b, out, n.eps, centred=n.centred, plan=plan, races=races)
    check_forward(n, x, s, b, DTYPES[out], y, saved)


@pytest.mark.parametrize("rows", [1, 5])
def test_forward_of_rows_that_fill_no_warpgroup(rows: int, forward: Any):
    n = Norm("layer_norm", (rows, 64), (64,))
    x, s, b, _ = arrays_of(n, "f32", 0.5)
    y, *saved = forward(x, s, b, "f32", n.eps, centred=True, plan=Plan(32), races=False)
    check_forward(n, x, s, b, np.float32, y, saved)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("given", [(), ("scale",), ("bias",)])
def test_forward_without_all_parameters(given: tuple[str, ...], stays: bool, forward: Any):
    n = Norm("layer_norm", (4, 64), (64,))
    x, s, b, _ = arrays_of(n, "bf16", 0.5)
    s, b = s if "scale" in given else None, b if "bias" in given else None
    y, *_ = forward(x, s, b, "f32", n.eps, centred=True, plan=Plan(32, stays=stays), races=True)
    agree(y, *bounds.forward(n.problem(x, s, b)), np.float32, "y")


@pytest.mark.parametrize(("dtype", "mean"), [("f32", 1e4), ("bf16", 100.0), ("f16", 100.0)])
def test_forward_of_a_mean_far_from_zero(dtype: str, mean: float, forward: Any):
    n = Norm("layer_norm", (4, 136), (136,))
    x, s, b, _ = arrays_of(n, dtype, mean)
    y, *saved = forward(x, s, b, dtype, n.eps, centred=True, plan=Plan(32), races=True)
    check_forward(n, x, s, b, DTYPES[dtype], y, saved)


@pytest.mark.parametrize("threads", [32, 64, 256])
def test_forward_adds_in_the_stated_order(threads: int, forward: Any):
    """The mean's bits: of two slots, the second half full, and a thread's vectors of one number each.

    Which of a vector's elements are added first the interpreter does not say.
    """
    n = Norm("layer_norm", (4, 12 * threads), (12 * threads,))
    x = arrays_of(n, "bf16", 0.5)[0].reshape(4, -1, 8)
    x[..., 1:] = 0
    first, half = x[:, :threads, 0].astype(np.float32), threads // 2
    last = np.where(np.arange(threads) < half, 0, x[:, half:, 0].astype(np.float32))
    total = (first + last).reshape(4, -1, *(2,) * 5)
    for _ in range(5):
        total = total[:, :, 0] + total[:, :, 1]
    while total.shape[1] > 1:
        total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
    races = threads <= 128
    mean = forward(x.reshape(4, -1), None, None, "f32", n.eps, centred=True, plan=Plan(threads), races=races)[1]
    np.testing.assert_array_equal(mean, total[:, 0] * np.float32(1 / (12 * threads)))


def test_bits_do_not_depend_on_how_rows_are_partitioned(forward: Any):
    n = Norm("layer_norm", (8, 520), (520,))
    x, s, b, _ = arrays_of(n, "bf16", 0.5)
    lone = forward(x, s, b, "bf16", n.eps, centred=True, plan=Plan(64), races=True)
    many = forward(x, s, b, "bf16", n.eps, centred=True, plan=Plan(64, 4), races=True)
    stay = forward(x, s, b, "bf16", n.eps, centred=True, plan=Plan(64, 2, stays=True), races=True)
    few = forward(x[2:4], s, b, "bf16", n.eps, centred=True, plan=Plan(64), races=True)
    for one, *others, part in zip(lone, many, stay, few, strict=True):
        for other in others:
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
        np.testing.assert_array_equal(one[2:4].view(np.uint8), part.view(np.uint8))


def test_threads_depend_on_the_length_alone():
    for dtype in (jnp.bfloat16, jnp.float32):
        for length in range(8, 20000, 8):
            plans = [norm.plan(length, dtype, rows) for rows in (1, 600, 1 << 20)]
            assert len({plan and plan.threads for plan in plans}) == 1
            vectors = length * np.dtype(dtype).itemsize // 16
            assert all(plan is None or vectors >= plan.threads or plan.threads == 32 for plan in plans)


def test_what_is_not_finite_stays_in_its_row_forward(forward: Any):
    n = Norm("layer_norm", (4, 136), (136,))
    x, s, b, _ = arrays_of(n, "f32", 0.5)
    clean = forward(x, s, b, "f32", n.eps, centred=True, plan=Plan(32), races=True)[0]
    x[1, 3], x[2, 135] = np.nan, np.inf
    y = forward(x, s, b, "f32", n.eps, centred=True, plan=Plan(32), races=True)[0]
    assert np.isnan(y[1:3]).all()
    np.testing.assert_array_equal(y[[0, 3]], clean[[0, 3]])


# ---- backward --------------------------------------------------------------------------------------------------------


def saved_of(n: Norm, x: np.ndarray, s: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean and 1 / deviation, as they are saved."""
    stats = bounds.normalised(n.problem(x, s, b))
    narrow = lambda v: np.asarray(v, np.float32).reshape(len(x))
    return narrow(stats.mean), narrow(stats.rstd)


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Any:
    """dx, dscale and dbias by the kernel."""

    def run(n: Norm, arrays: Any, out: str, saved: Any, *, plan: Plan, races: bool = False) -> list[np.ndarray]:
        x, s, _, dy = arrays
        options: dict[str, Any] = {"centred": n.centred, "out_dtype": np.dtype(DTYPES[out]), "config": plan}
        options["interpret"] = interpreted(monkeypatch, races=races)
        given = [None if v is None else jnp.asarray(v) for v in (dy, x, *saved, s)]
        return [np.asarray(v) for v in norm.backward(*given, **options)]  # pyright: ignore[reportArgumentType]

    return run


def stays(threads: int, groups: int = 1, *, keeps: bool = True) -> Plan:
    return Plan(threads, stays=True, groups=groups, keeps=keeps)


# Length, dtype, dtype of dx, rows, plan: rows of part of a warp, a warp, two, four, eight; ragged ends, several groups
# of rows to a block, several rounds, the last of which not all groups have, and fewer rows than a group has. Rows, and
# vectors of a ragged end, that are stored twice are a race, of equal values.
BACKWARD: dict[str, tuple[int, str, str, int, Plan]] = {
    "a vector": (8, "bf16", "bf16", 5, stays(32)),
    "part of a warp": (64, "f32", "f32", 32, stays(32)),
    "a warp, ragged": (136, "f32", "bf16", 5, stays(32, keeps=False)),
    "warps of several groups": (512, "f32", "f32", 32, stays(32, 2)),
    "two warps, ragged": (520, "bf16", "f16", 13, stays(64, 2)),
    "four warps": (2048, "f16", "f16", 14, stays(128, 2)),
    "four warps, a part of the last round": (1024, "bf16", "f32", 7, stays(128, 2, keeps=False)),
    "eight warps": (2048, "bf16", "bf16", 5, stays(256)),
}


@each_op
@pytest.mark.parametrize("case", BACKWARD)
def test_backward(case: str, op: str, backward: Any):
    length, dtype, out, rows, plan = BACKWARD[case]
    n = Norm(op, (rows, length), (length,))
    x, s, b, dy = arrays = arrays_of(n, dtype, 0.5)
    races = case in ("part of a warp", "warps of several groups", "four warps", "eight warps")
    grads = backward(n, arrays, out, saved_of(n, x, s, b), plan=plan, races=races)
    check_backward(n, x, s, b, dy, DTYPES[out], grads)


@pytest.mark.parametrize(("dtype", "mean"), [("f32", 1e4), ("bf16", 100.0), ("f16", 100.0)])
def test_backward_of_a_mean_far_from_zero(dtype: str, mean: float, backward: Any):
    n = Norm("layer_norm", (5, 136), (136,))
    x, s, b, dy = arrays = arrays_of(n, dtype, mean)
    grads = backward(n, arrays, dtype, saved_of(n, x, s, b), plan=stays(32))
    check_backward(n, x, s, b, dy, DTYPES[dtype], grads)


@each_op
@each_extreme
@wide_range
def test_gradients_whose_products_with_x_leave_the_range(op: str, extreme: str, dtype: str, backward: Any):
    n, (x, s, b, dy) = extreme_of(Norm(op, (5, 136), (136,)), dtype, extreme)
    grads = backward(n, (x, s, b, dy), dtype, saved_of(n, x, s, b), plan=stays(32))
    check_backward(n, x, s, b, dy, DTYPES[dtype], grads)


@each_op
def test_backward_without_scale(op: str, backward: Any):
    n = Norm(op, (3, 136), (136,))
    x, _, _, dy = arrays_of(n, "f32", 0.5)
    p = n.problem(x, None, None)
    grads = backward(n, (x, None, None, dy), "f32", saved_of(n, x, None, None), plan=stays(32))
    for found, (golden, error) in zip(grads, bounds.backward(p, in_view(n, dy, p.x.shape)), strict=True):
        agree(found, golden.reshape(found.shape), error.reshape(found.shape), np.float32, "a gradient")


def test_what_is_not_finite_stays_in_its_row_backward(backward: Any):
    n = Norm("layer_norm", (4, 136), (136,))
    x, s, b, dy = arrays_of(n, "f32", 0.5)
    mean, rstd = saved_of(n, x, s, b)
    x[1, 3], x[2, 135] = np.nan, np.inf
    mean[1:3], rstd[1:3] = np.nan, np.nan
    dx, dscale, dbias = backward(n, (x, s, b, dy), "f32", (mean, rstd), plan=stays(32))
    assert np.isnan(dx[1:3]).all()
    assert np.isfinite(dx[[0, 3]]).all()
    assert np.isnan(dscale).all()
    assert np.isfinite(dbias).all()


def test_threads_depend_on_the_length_alone_backward():
    for dtype in (jnp.bfloat16, jnp.float32):
        for length in range(8, 20000, 8):
            plan, vectors = norm.backward_plan(length, dtype), length * np.dtype(dtype).itemsize // 16
            assert plan is None or vectors >= plan.threads or plan.threads == 32


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


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("length", [1000, 4104])
def test_lowers_where_64_bits_are_on(length: int):
    x, row = jax.ShapeDtypeStruct((2001, length), jnp.bfloat16), jax.ShapeDtypeStruct((length,), jnp.float32)
    run = lambda x, s: norm.forward(x, s, None, centred=False, eps=1e-5, out_dtype=np.dtype(np.float32))
    jax.jit(run).trace(x, row).lower(lowering_platforms=("cuda",))


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
def test_engine_is_first_but_for_gradients_of_few_rows(op: str):
    """Of every length; with a mean fewer rows suffice."""
    (engine,) = (e for e in engines.registered(op) if e.name == "hopper")

    def first(rows: int, length: int, dtype: Any, centred: bool = True) -> bool:
        kinds = (np.dtype(np.float32), np.dtype(dtype))
        spec = NormSpec((-1,), (-2,), centred, 1e-5, False, False, True, *kinds)
        x, statistic = shape_of(rows, length, dtype=dtype), shape_of(rows, 1, dtype=jnp.float32)
        operands = (x,) if op == "norm" else (x, x, statistic, statistic)
        return selection.why_later(engine, engines.Call(op, spec, operands, "cuda", hopper.MEASURED_ON[0])) is None

    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert all(first(1 << 25 - i, 1 << i, dtype) for i in (9, 10, 12, 13))
        assert first(4096, 96, dtype)
        assert first(132, 4096, dtype, centred=False)
        assert first(64, 4096, dtype, centred=False) == (op == "norm")
        assert first(64, 4096, dtype)
        assert first(32, 4096, dtype) == (op == "norm")


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
