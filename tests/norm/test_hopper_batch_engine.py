"""The `hopper` engine of batch normalisation: what it makes of what its kernels find, what it serves, and lowering."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection
from jaxdnn._src.norm import bounds
from tests.norm.calls import each_dtype, each_extreme, extreme_of, wide_range
from tests.norm.cases import Norm, agree

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.norm.hopper import batch as norm_batch
from jaxdnn._src.norm.hopper import batch_engine
from jaxdnn._src.norm.spec import ACTIVATIONS
from tests.hopper.device import on_hopper
from tests.norm import columns
from tests.norm.columns import DTYPES, plan_of, statistics, sums

pytestmark = pytest.mark.usefixtures("h200")


def call_of(function: Any, *operands: Any) -> engines.Call:
    """The call that the only normalisation of a function makes on a GPU."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name.startswith("jaxdnn_norm")]
    avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    op = eqn.primitive.name.removeprefix("jaxdnn_")
    return engines.Call(op, eqn.params["spec"], avals, "cuda", hopper.MEASURED_ON[0])


@each_dtype
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize(("op", "mean"), [("plain", 0.5), ("parameters", 0.5), ("parameters", 100.0)])
def test_results_from_the_kernels(
    op: str, mean: float, out_dtype: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """y as the engine makes it of what the kernels find, run by the machine."""
    n = Norm("batch_norm", (5, 6, 7, 8), (8,), (("layout", "NHWC"),))
    x, s, b, _ = n.arrays(7, DTYPES[dtype], mean=mean)
    s, b = (None, None) if op == "plain" else (s.astype(np.float32), b.astype(np.float32))
    call = call_of(lambda x: dnn.batch_norm(x, scale=s, bias=b, out_dtype=out_dtype)[0], x)

    monkeypatch.setattr(norm_batch, "statistics", emulated_statistics)
    assert batch_engine.BATCHES.unsupported(call) is None
    parameters = [jnp.asarray(v).reshape(1, 1, 1, 8) for v in (s, b) if v is not None]
    found = batch_engine.BATCHES.run(call, jnp.asarray(x), *parameters)
    p = n.problem(x, s, b)
    out = np.dtype(out_dtype or DTYPES[dtype])
    agree(found[0], *bounds.forward(p), out, "y")
    wanted = bounds.normalised(dataclasses.replace(p, wide=True, sample=None))
    for value, name in zip(found[1:], ("mean", "rstd", "variance"), strict=True):
        agree(value, getattr(wanted, name), getattr(wanted, f"{name}_error"), np.float32, name)


def emulated_statistics(x: Any, scale: Any, *, eps: float) -> norm_batch.Statistics:
    x = np.asarray(x)
    rows, columns = x.shape
    plan = plan_of(rows, columns, NAMES[x.dtype])
    found = statistics(x, plan, eps, None if scale is None else np.asarray(scale))
    return norm_batch.Statistics(*map(jnp.asarray, dataclasses.astuple(found)))


@each_dtype
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize(("op", "mean"), [("plain", 0.5), ("parameters", 0.5), ("parameters", 100.0)])
def test_gradients_from_the_kernels(
    op: str, mean: float, out_dtype: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """dx, dscale and dbias as the engine makes them of what the kernels find, run by the machine."""
    n = Norm("batch_norm", (5, 6, 7, 8), (8,), (("layout", "NHWC"),))
    x, s, _, dy = n.arrays(9, DTYPES[dtype], mean=mean)
    monkeypatch.setattr(norm_batch, "sums", sums)
    check_gradients(n, x, None if op == "plain" else s.astype(np.float32), dy, out_dtype)


@each_extreme
@wide_range
def test_gradients_whose_products_with_x_leave_the_range(extreme: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    n = Norm("batch_norm", (5, 6, 7, 8), (8,), (("layout", "NHWC"),))
    n, (x, s, _, dy) = extreme_of(n, dtype, extreme)
    monkeypatch.setattr(norm_batch, "sums", sums)
    check_gradients(n, x, s, dy, None)


def check_gradients(n: Norm, x: np.ndarray, s: Any, dy: np.ndarray, out_dtype: str | None) -> None:
    """dx, dscale and dbias of the engine, from the statistics that the definition saves."""
    mean, rstd = (np.asarray(v, np.float32) for v in reference.batch_norm(x, eps=n.eps)[1:3])
    options: dict[str, Any] = {"mean": mean, "rstd": rstd, "out_dtype": out_dtype}
    call = call_of(lambda dy, x: dnn.batch_norm_dgrad(dy, x, scale=s, **options), dy, x)
    assert batch_engine.BATCHES.unsupported(call) is None
    operands = [jnp.asarray(v) for v in (dy, x)]
    operands += [jnp.asarray(v).reshape(1, 1, 1, 8) for v in (mean, rstd, *([] if s is None else [s]))]
    found = batch_engine.BATCHES.run(call, *operands)
    wanted = bounds.backward(n.problem(x, s, None), dy.astype(np.float64))
    dtypes = (np.dtype(out_dtype or x.dtype), np.float32, np.float32)
    for value, (golden, error), out, name in zip(found, wanted, dtypes, ("dx", "dscale", "dbias"), strict=True):
        agree(value, golden, error, out, name)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are run by the machine."""
    found = {"statistics": emulated_statistics, "sums": sums}
    for name, function in (found | {"activated": columns.activated, "gradients": columns.gradients}).items():
        monkeypatch.setattr(norm_batch, name, function)


each_narrow = pytest.mark.parametrize("dtype", ["bf16", "f16"])
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)


def both_ways(x: Any, dy: Any, parameters: dict[str, Any], activation: Any) -> tuple[Any, Any, Any]:
    """The results of both calls of `batch_norm` and its gradient, and a function that makes such gradients."""
    spread = [jnp.asarray(v).reshape(1, 1, 1, -1) for v in parameters.values()]
    forward = call_of(lambda x: dnn.batch_norm(x, activation=activation, **parameters)[0], x)
    found = batch_engine.BATCHES.run(forward, jnp.asarray(x), *spread)

    def gradients(dy: Any, **other: Any) -> Any:
        spec = dataclasses.replace(forward.spec, **other)
        operands = [jnp.asarray(dy), jnp.asarray(x), *found[1:3], *spread[: spec.scale + spec.bias]]
        call = dataclasses.replace(forward, op="norm_dgrad", spec=spec, avals=tuple(map(jax.typeof, operands)))
        return batch_engine.BATCHES.run(call, *operands)

    return found, gradients(dy), gradients


@pytest.mark.parametrize("given", [(), ("scale",), ("bias",), ("scale", "bias")], ids=str)
@each_activation
@each_narrow
@pytest.mark.usefixtures("emulated")
def test_gradients_before_an_activation(dtype: str, activation: Any, given: tuple[str, ...]):
    """Of relu those of the plain op, of a dy that is 0 where y is, dx in another order; of swish within bounds."""
    n = Norm("batch_norm", (5, 6, 7, 8), (8,), (("layout", "NHWC"),))
    x, s, b, dy = n.arrays(9, DTYPES[dtype], mean=0.5)
    parameters: dict[str, Any] = {k: v.astype(np.float32) for k, v in (("scale", s), ("bias", b)) if k in given}
    (y, *_), found, gradients = both_ways(x, dy, parameters, activation)
    if activation == ("relu", None):
        dx, *wanted = gradients(jnp.where(y > 0, dy, 0), activation=None, bias=False)
        jax.tree.map(np.testing.assert_array_equal, list(found[1:]), wanted)
        ours, others = (np.asarray(v, np.float32) for v in (found[0], dx))
        np.testing.assert_allclose(ours, others, rtol=float(jnp.finfo(dx.dtype).eps), atol=2.0**-20)
        return
    p = n.problem(x, parameters.get("scale"), parameters.get("bias"))
    (z, z_error), wide = bounds.forward(p), dy.astype(np.float64)
    golden = bounds.backward(p, reference.activation_dgrad(wide, z, activation=activation))
    # The slope's own slope is at most 1/2; its formula has a few roundings, of z in the exponent too.
    more = bounds.moved(p, np.abs(wide) * (z_error / 2 + 16 * p.roundoff * (1 + np.abs(z))))
    for value, (wanted, error), extra in zip(found, golden, more, strict=True):
        agree(value, wanted, error + extra, value.dtype, "gradient")


def planted(n: Norm, dtype: str) -> list[Any]:
    """x, dy, scale and bias, with NaN and both infinities in channels of their own of each, dy's twice."""
    x, s, b, dy = n.arrays(11, DTYPES[dtype], mean=0.5)
    s, b = s.astype(np.float32), b.astype(np.float32)
    for i, v in enumerate((np.nan, np.inf, -np.inf)):
        x[1, 2, 3, i] = dy[4, 5, 6, 3 + i] = dy[4, 5, 5, 6 + i] = s[9 + i] = b[12 + i] = v
    return [x, dy, s, b]


def check_planted(found: Any, clean: Any, activation: Any, x: Any, dy: Any, s: Any, b: Any) -> None:
    """Of y, statistics and gradients: NaN and infinities are the definition's, the last channel is a clean call's."""
    with np.errstate(invalid="ignore"):
        y, mean, rstd, *_ = reference.batch_norm(x, scale=s, bias=b, activation=activation)
        z = reference.batch_norm(x, scale=s, bias=b)[0]
        g = reference.activation_dgrad(dy.astype(np.float64), z, activation=activation)
        wanted = [y, mean, rstd, *reference.batch_norm_dgrad(g, x, scale=s)]
    for value, golden, before in zip(found, wanted, clean, strict=True):
        value, before = (np.asarray(v, np.float32).reshape(golden.shape) for v in (value, before))
        np.testing.assert_array_equal(value[..., 15], before[..., 15])
        assert np.isfinite(value).sum() == np.isfinite(golden).sum()
        np.testing.assert_array_equal(value, np.where(np.isfinite(golden), value, golden))


@each_activation
@each_narrow
@pytest.mark.usefixtures("emulated")
def test_nan_and_infinity_behind_an_activation(dtype: str, activation: Any):
    n = Norm("batch_norm", (5, 6, 7, 16), (16,), (("layout", "NHWC"),))
    x, s, b, dy = n.arrays(11, DTYPES[dtype], mean=0.5)

    def results(x: Any, dy: Any, s: Any, b: Any) -> list[Any]:
        parameters = {"scale": s.astype(np.float32), "bias": b.astype(np.float32)}
        found, gradients, _ = both_ways(x, dy, parameters, activation)
        return [*found[:3], *gradients]

    arrays = planted(n, dtype)
    check_planted(results(*arrays), results(x, dy, s, b), activation[0], *arrays)


@on_hopper
@each_activation
@each_narrow
@pytest.mark.parametrize("shape", [(5, 6, 7, 16), (40, 30, 30, 16)])
def test_nan_and_infinity_behind_an_activation_on_the_device(shape: tuple[int, ...], dtype: str, activation: Any):
    n = Norm("batch_norm", shape, (16,), (("layout", "NHWC"),))
    x, s, b, dy = n.arrays(11, DTYPES[dtype], mean=0.5)

    @jax.jit
    def results(x: Any, dy: Any, s: Any, b: Any) -> list[Any]:
        def forward(x: Any, s: Any, b: Any) -> tuple[Any, Any]:
            y, mean, rstd, *_ = dnn.batch_norm(x, scale=s, bias=b, activation=activation[0], engine="hopper")
            return y, (mean, rstd)

        y, back, statistics = jax.vjp(forward, x, s, b, has_aux=True)
        return [y, *statistics, *back(dy)]

    arrays = planted(n, dtype)
    clean = results(x, dy, s.astype(np.float32), b.astype(np.float32))
    check_planted(results(*arrays), clean, activation[0], *arrays)


def shape_of(*shape: Any, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def refusal(function: Any, *operands: Any) -> str | None:
    """Why the engine does not serve the last call that a function makes."""
    told = dnn.explain(function, *operands, platform="cuda")
    return [c for call in told for c in call.candidates if c.engine == "hopper"][-1].refusal


IMAGES = shape_of(4, 6, 6, 16)
SERVED: dict[str, tuple[Any, tuple[Any, ...], str | None]] = {
    "images": (dnn.batch_norm, (IMAGES,), None),
    "three channels": (dnn.batch_norm, (shape_of(4, 6, 6, 3),), None),
    "activations": (lambda x: dnn.batch_norm(x, mode="per_activation"), (IMAGES,), None),
    "channels first": (lambda x: dnn.batch_norm(x, layout="NCHW"), (IMAGES,), "not axes (-4, -2, -1)"),
    "odd sizes": (
        dnn.batch_norm,
        (shape_of(3, 5, 5, 3),),
        "of fewer than 2^28 columns and at most 2^30 rows, not 75 rows of 3 bfloat16",
    ),
    "another op": (
        lambda x: dnn.layer_norm(x, axis=(0, 1, 2)),
        (IMAGES,),
        "its kernels over the first axes are those of batch normalisation",
    ),
    "many columns": (
        lambda x: dnn.batch_norm(x, mode="per_activation"),
        (shape_of(2, 1 << 12, 1 << 13, 8),),
        "of fewer than 2^28 columns and at most 2^30 rows, not 2 rows of 268435456 bfloat16",
    ),
    "many rows": (
        dnn.batch_norm,
        (shape_of(1 << 24, 1 << 7, 1, 8),),
        "and at most 2^30 rows, not 2147483648 rows of 8 bfloat16",
    ),
    "backward": (dnn.batch_norm_dgrad, (IMAGES, IMAGES), None),
    "backward, odd sizes": (
        dnn.batch_norm_dgrad,
        (shape_of(3, 5, 5, 3), shape_of(3, 5, 5, 3)),
        "of fewer than 2^28 columns and at most 2^30 rows, not 75 rows of 3 bfloat16",
    ),
    "gradients of two dtypes": (
        dnn.batch_norm_dgrad,
        (shape_of(4, 6, 6, 16, dtype=jnp.float32), IMAGES),
        "its kernels take a gradient of x's dtype bfloat16, not float32",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_engine_says_what_it_serves(name: str):
    function, operands, reason = SERVED[name]
    found = refusal(function, *operands)
    assert (found is None) if reason is None else (reason in (found or ""))


def test_engine_does_not_serve_sizes_that_are_not_known():
    """The dimension's name is what a call is traced with where a program is exported for any batch."""
    call = call_of(dnn.batch_norm, IMAGES)
    (batch,) = export.symbolic_shape("b")
    call = dataclasses.replace(call, avals=(shape_of(batch, 6, 6, 16),))
    (engine,) = [e for e in engines.registered("norm") if e.name == "hopper"]
    assert "sizes that are known when they are traced" in (engine.supports(call) or "")


def test_engine_adds_over_the_batch():
    told = dnn.explain(dnn.batch_norm, IMAGES, platform="cuda")
    (found,) = [c for call in told for c in call.candidates if c.engine == "hopper"]
    assert found.level == "run_to_run"
    with pytest.raises(NotImplementedError, match="cannot be served by engine 'hopper'"):
        jax.eval_shape(lambda x: dnn.batch_norm(x, engine="hopper", determinism="batch_invariant"), IMAGES)


@each_dtype
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 6, 6, 16), (8, 5, 5, 3), (2, 3, 3, 4096)])
def test_lowers_for_cuda(shape: tuple[int, ...], out_dtype: str, dtype: str):
    channel = shape_of(shape[-1], dtype=jnp.float32)
    x = shape_of(*shape, dtype=DTYPES[dtype])

    def f(x: Any, s: Any, b: Any, mean: Any, variance: Any) -> Any:
        options: dict[str, Any] = {"running_mean": mean, "running_variance": variance, "engine": "hopper"}
        return dnn.batch_norm(x, scale=s, bias=b, residual=x, activation="relu", out_dtype=DTYPES[out_dtype], **options)

    lowered = jax.jit(f).trace(x, *[channel] * 4).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2


@each_dtype
@pytest.mark.parametrize("activation", [None, "relu", ("leaky_relu", 0.1), "swish"], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_lowers_for_cuda_with_its_gradient(dtype: str, residual: bool, activation: Any):
    """The backward kernel takes a gradient of x's dtype, which an activation or a residual must not widen."""
    x, s = shape_of(4, 6, 6, 16, dtype=DTYPES[dtype]), shape_of(16, dtype=jnp.float32)

    def f(x: Any, s: Any) -> Any:
        fused: dict[str, Any] = {"residual": x if residual else None, "activation": activation}
        return jnp.sum(dnn.batch_norm(x, scale=s, engine="hopper", **fused)[0].astype(jnp.float32) ** 2)

    lowered = jax.jit(jax.grad(f, (0, 1))).trace(x, s).lower(lowering_platforms=("cuda",))
    applied = activation in ("relu", "swish") and not residual and dtype != "f32"  # by kernels too
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 4 + 2 * applied


def test_rows_that_make_no_vectors_are_refused():
    with pytest.raises(ValueError, match="`x` must have rows that make whole vectors of 16 bytes, got \\(75, 3\\)"):
        norm_batch.statistics(jnp.zeros((75, 3), jnp.bfloat16), None, eps=1e-5)


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((128, 56, 56, 256), "hopper"),
        ((32, 7, 7, 512), "hopper"),
        ((4, 6, 6, 16), "xla"),
        ((128, 7, 7, 4096), "hopper"),
        ((2, 16, 16, 4096), "xla"),
        ((1568, 1, 1, 512), "hopper"),
    ],
)
def test_chosen_unasked_but_for_few_rows(shape: tuple[int, ...], first: str):
    call = dataclasses.replace(call_of(dnn.batch_norm, shape_of(*shape)), device_kind=hopper.MEASURED_ON[0])
    assert selection.ranked(call)[0].name == first
    assert selection.ranked(dataclasses.replace(call, device_kind="another"))[0].name == "xla"


def test_workspace_is_what_the_kernels_take():
    """The pairs, the base, the second part of the mean and the factor; backward the sums."""
    plan = plan_of(144, 16, "bf16")
    assert batch_engine.BATCHES.workspace(call_of(dnn.batch_norm, IMAGES)) == 4 * 16 * (2 * plan.splits + 3)
    mean = shape_of(16, dtype=jnp.float32)
    call = call_of(lambda dy, x, m: dnn.batch_norm_dgrad(dy, x, mean=m, rstd=m), IMAGES, IMAGES, mean)
    backward = norm_batch.backward_plan(144, 16, "bf16")
    assert backward is not None
    assert batch_engine.BATCHES.workspace(call) == 4 * 16 * (2 * backward.splits + 6)
