"""The choice of an engine: the rule, its reasons, and what `explain` says."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper as kernels
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn._src.core.explain import explain
from tests.conv import cases, helpers
from tests.texts import unfolded

X, W = jnp.ones((2, 5, 3)), jnp.ones((2, 3, 4))
needs_kernels = pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))


def conv(x: jax.Array = X, w: jax.Array = W, **options: object) -> jax.Array:
    return dnn.conv(x, w, layout="NWC", **options)  # type: ignore[arg-type]


@pytest.fixture
def extra_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In front of XLA's: one that refuses batches of 2, one that promises much and gives sevens."""

    def sevens(call: engines.Call, *operands: jax.Array) -> jax.Array:
        n, k = operands[0].shape[0], operands[1].shape[-1]
        return jnp.full((n, *call.spec.output_sizes, k), 7, call.spec.out_dtype)

    picky = engines.Engine(
        name="picky",
        op="conv",
        run=sevens,
        supports=lambda call: "it serves no batch of 2" if call.avals[0].shape[0] == 2 else None,
        workspace=lambda call: 64,
        notes=("a note",),
    )
    strict = dataclasses.replace(picky, name="strict", supports=lambda call: None, level=lambda call: "batch_invariant")
    registry = {op: list(engines.registered(op)) for op in engines.ops()}
    registry["conv"] = [picky, *registry["conv"], strict]
    monkeypatch.setattr(engines, "_registry", registry)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_registered():
    assert {"conv", "conv_dgrad", "conv_wgrad", "pool_max", "norm", "softmax", "activation"} <= set(engines.ops())
    assert all("xla" in [engine.name for engine in engines.registered(op)] for op in engines.ops())
    assert "xla" in engines.names()
    assert engines.registered("no op") == ()


def test_first_that_can_serve(extra_engines: None):
    assert conv(X[:1]).ravel()[0] == 7
    assert conv().ravel()[0] == 6
    assert conv(X[:1], engine="xla").ravel()[0] == 6


def test_level_decides_too(extra_engines: None):
    assert conv(determinism="batch_invariant").ravel()[0] == 7
    assert conv(determinism="run_to_run").ravel()[0] == 6
    with dnn.determinism("batch_invariant"):
        assert conv().ravel()[0] == 7
        assert jax.jit(conv)(X, W).ravel()[0] == 7
    assert jax.jit(conv)(X, W).ravel()[0] == 6


def test_a_named_engine_fails_loudly(extra_engines: None):
    with pytest.raises(NotImplementedError, match=r"engine 'picky' .*\(picky: it serves no batch of 2\)"):
        conv(engine="picky")
    with pytest.raises(NotImplementedError, match="picky: it guarantees 'fast' here, not 'run_to_run'"):
        conv(X[:1], engine="picky", determinism="run_to_run")
    with pytest.raises(ValueError, match=r"`engine` must be one of None, .*'picky', .*'strict', got 'Picky'"):
        conv(engine="Picky")


def test_all_reasons_are_given(extra_engines: None):
    with pytest.raises(NotImplementedError) as error:
        conv(activation="tanh", determinism="portable")
    for reason in ("picky: it serves no batch of 2", "xla: it guarantees 'run_to_run'", "strict: it guarantees"):
        assert reason in str(error.value)


def test_an_engine_of_another_op(extra_engines: None):
    """A gradient asks for the same engine by name; where the backward op has none of it, that is an error too."""
    with pytest.raises(NotImplementedError, match=r"`conv_dgrad` on cpu .* engine 'strict' .*it has no such engine"):
        jax.jit(jax.grad(lambda x: conv(x, engine="strict").sum()))(X)


# ---- the engine that follows the definition's order ------------------------------------------------------------------


@pytest.mark.parametrize("op", cases.RANDOM_OPS)
def test_ordered_gives_the_bits_of_the_definition(op: str):
    """At level "portable", of bfloat16, float16 and float8: no tolerance, every bit."""
    dtypes = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    many = [cases.random_case(op, 600 + i, dtype=dtypes[i % 4]) for i in range(8)]
    many = [c.with_options(out_dtype="float32", determinism="portable") for c in many]
    for case, out in zip(many, helpers.compute_all(many), strict=True):
        options = {k: v for k, v in case.options.items() if k != "determinism"}
        golden = getattr(reference, op)(*case.arrays, *case.static, **options, arithmetic="ordered")
        np.testing.assert_array_equal(out, golden, err_msg=str(case))


def test_ordered_rounds_a_fused_multiply_add_once():
    """1 + 2^-23 and a product a little below 2^-24: float64 rounds their sum to the middle of two numbers of float32,
    which lies next to an even one."""
    x = np.array([1, 2.0**-23, 2.0**-24 + 2.0**-47], np.float32)
    w = np.array([1, 1, 1 - 2.0**-23], np.float32)
    for sign in (1, -1):
        y = dnn.conv(sign * x[None, None], w[None, :, None], layout="NWC", engine="ordered")
        assert y.item() == sign * (1 + 2.0**-23)
        assert y.item() == reference.conv(sign * x[None, None], w[None, :, None], layout="NWC", arithmetic="ordered")


def spread(arrays: Iterable[np.ndarray], seed: int) -> tuple[np.ndarray, ...]:
    """Of wide exponents in float32, so that sums of products cancel, and take digits beyond those of float64."""
    rng = np.random.default_rng(seed)
    return tuple(np.ldexp(rng.normal(size=a.shape), rng.integers(-30, 31, a.shape)).astype(np.float32) for a in arrays)


@pytest.mark.parametrize("op", cases.RANDOM_OPS)
def test_ordered_gives_the_bits_of_the_definition_in_float32(op: str):
    """Every fused multiply-add is rounded once; TF32 is cut first."""
    many = [cases.random_case(op, 700 + i) for i in range(4)]
    many = [dataclasses.replace(c, arrays=spread(c.arrays, i)) for i, c in enumerate(many)]
    many = [c.with_options(engine="ordered", precision=(None, "tf32")[i % 2]) for i, c in enumerate(many)]
    for case, out in zip(many, helpers.compute_all(many), strict=True):
        options = {k: v for k, v in case.options.items() if k != "engine"}
        golden = getattr(reference, op)(*case.arrays, *case.static, **options, arithmetic="ordered")
        np.testing.assert_array_equal(out, golden, err_msg=str(case))


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn], ids=lambda d: np.dtype(d).name
)
def test_gradients_of_a_result_wider_than_the_operands_are_the_definitions(dtype: Any):
    """Bit by bit: the cotangent is float32 there, and the other operand is not."""
    for i in range(2):
        case = cases.random_case("conv", 720 + i, dtype=dtype)
        x, w = case.arrays
        ours = lambda x, w, o=case.options: dnn.conv(x, w, **o, out_dtype="float32", determinism="portable")
        y, pullback = jax.vjp(ours, jnp.asarray(x), jnp.asarray(w))
        (dy,) = spread([np.asarray(y)], i)
        dx, dw = pullback(jnp.asarray(dy))
        options = {**case.options, "arithmetic": "ordered", "out_dtype": dtype}
        golden = (
            reference.conv_dgrad(dy, w.astype(np.float32), x.shape, **options),
            reference.conv_wgrad(x.astype(np.float32), dy, w.shape, **options),
        )
        for found, wanted in zip((dx, dw), golden, strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(np.asarray(found).astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("op", cases.RANDOM_OPS)
@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", "float32"), ("float8_e5m2", "float16")])
def test_gradients_keep_every_level_that_the_call_has(op: str, dtype: str, out: str):
    """In the operands and the prior, whatever the result's dtype; refusals come when a program is lowered."""
    case = cases.case(op, cases.GROUPED, 2, dtype=np.dtype(dtype)).with_epilogue(1, beta=1.0, prior=True)
    case = case.with_options(out_dtype=out)
    for level in ("batch_invariant", "portable"):
        given = cases.as_jax(case)
        call = lambda *a, at=level: helpers.call(case.with_options(determinism=at), *a)
        y, pullback = jax.vjp(call, *given)
        for array, gradient in zip(given, jax.jit(pullback).lower(y).out_info, strict=True):
            assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)


@pytest.mark.usefixtures("x64")
def test_ordered_in_64_bit_mode():
    """There JAX's loops count in int64."""
    for op in cases.RANDOM_OPS:
        case = cases.case(op, cases.GROUPED, 2, dtype=ml_dtypes.bfloat16, integers=3)
        for mode in ("cross_correlation", "convolution"):
            plain = case.with_options(mode=mode)
            helpers.check(plain, helpers.call(plain.with_options(engine="ordered")))


@pytest.mark.parametrize("op", ["conv", "conv_dgrad"])
def test_ordered_does_not_see_the_batch(op: str):
    case = cases.case(op, cases.Geometry(5, (9, 6), 16, 8, (3, 2)), 1, dtype=ml_dtypes.bfloat16)
    x, w = cases.as_jax(case)
    alone = dataclasses.replace(case, static=tuple((1, *s[1:]) for s in case.static))
    with dnn.determinism("batch_invariant"):
        whole = helpers.call(case, x, w)
        np.testing.assert_array_equal(whole[3:4], helpers.call(alone, x[3:4], w))
        mapped = jax.vmap(lambda v: helpers.call(alone, v[None], w))(x)
        np.testing.assert_array_equal(whole, mapped[:, 0])


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_one_call():
    (found,) = dnn.explain(dnn.conv, X, W, layout="NWC", stride=2)
    assert (found.op, found.operands) == ("conv", ("float32[2,5,3]", "float32[2,3,4]"))
    assert found.result == "float32[2,2,4]"
    assert (found.platform, found.engine, found.level) == ("cpu", "xla", "fast")
    assert [c.level for c in found.candidates if c.engine == "xla"] == ["run_to_run"]


def test_explain_computes_nothing():
    x = jax.ShapeDtypeStruct((10**4, 10**4, 3), jnp.bfloat16)
    (found,) = dnn.explain(dnn.conv, x, jax.ShapeDtypeStruct((2, 3, 4), jnp.bfloat16), layout="NWC")
    assert found.result == "bfloat16[10000,9999,4]"


def test_explain_derivatives():
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(conv(x, w, activation="relu"))

    both = sorted(c.op for c in dnn.explain(jax.grad(loss, (0, 1)), X, W))
    assert both == ["activation_dgrad", "conv", "conv_dgrad", "conv_wgrad"]
    assert [c.op for c in dnn.explain(jax.grad(loss, 1), X, W)] == ["conv", "activation_dgrad", "conv_wgrad"]


def test_explain_passes_numbers_on_as_they_are():
    y = jnp.ones((2, 4, 4))
    for shape in ((2, 5, 3), [np.int64(n) for n in (2, 5, 3)]):
        assert [c.op for c in dnn.explain(dnn.conv_dgrad, y, W, shape, layout="NWC")] == ["conv_dgrad"]
    assert [c.op for c in dnn.explain(dnn.conv_wgrad, X, y, W.shape, layout="NWC")] == ["conv_wgrad"]
    found = dnn.explain(lambda p: dnn.conv(X, p["w"], layout="NWC", stride=p["stride"]), {"w": W, "stride": 2})
    assert [c.result for c in found] == ["float32[2,2,4]"]


def test_explain_nested_functions():
    def body(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return carry + jnp.sum(jax.checkpoint(conv)(X, w)), None

    def step(ws: jax.Array) -> jax.Array:
        total, _ = jax.lax.scan(body, jnp.zeros(()), ws)
        branch = jax.lax.cond(total > 0, lambda: jax.jit(conv)().sum(), lambda: conv(determinism="run_to_run").sum())
        return total + branch + jax.lax.while_loop(lambda v: v < 0, lambda v: v + conv().sum(), total)

    found = dnn.explain(jax.jit(step), jnp.stack([W, W]))
    assert len(found) == 4
    assert sorted(call.level for call in found) == ["fast", "fast", "fast", "run_to_run"]


def test_explain_refusals(extra_engines: None):
    (found,) = dnn.explain(conv, X, W)
    refusals = {c.engine: c.refusal for c in found.candidates}
    assert set(refusals) == {e.name for e in engines.registered("conv")}
    assert (refusals["picky"], refusals["xla"], refusals["strict"]) == ("it serves no batch of 2", None, None)
    (named,) = dnn.explain(lambda x: conv(x, engine="xla"), X[:1])
    assert named.engine == "xla"
    assert {c.engine: c.refusal for c in named.candidates}["picky"] == "the call names engine 'xla'"
    text = unfolded(dnn.explain(conv, X[:1], W))
    for part in (
        "conv(float32[1,5,3], float32[2,3,4]) -> float32[1,4,4] on cpu",
        "served by picky",
        "64 bytes",
        "a note",
    ):
        assert part in text


def test_explain_names_the_public_op_that_several_share():
    x = jnp.ones((2, 3, 4))
    normalise = lambda x: dnn.batch_norm(x, layout="NWC")[0]
    assert str(dnn.explain(normalise, x)).startswith("batch_norm(float32[2,3,4])")
    gradient = dnn.explain(jax.grad(lambda x: dnn.dropout(x, 1, activation="relu").sum()), x)
    assert [call.public for call in gradient] == ["dropout", "dropout"]
    assert [str(call).partition("(")[0] for call in gradient] == ["dropout", "dropout, derivative along a tangent: "]
    backward = dnn.explain(jax.grad(lambda x: dnn.batch_norm(x, layout="NWC")[0].sum()), x)
    assert str(backward[-1]).startswith("batch_norm, gradient in the data: (float32[2,3,4], ")
    assert max(map(len, str(backward).splitlines())) <= 80
    convolved = dnn.explain(jax.grad(lambda x: dnn.conv(x, W, layout="NWC").sum()), X)
    assert str(convolved[-1]).startswith("conv, gradient in the data: conv_dgrad(float32[")
    # The convolution is in a program of its own (`jax.custom_jvp`), which JAX does not name by what is around it.
    assert [call.public for call in dnn.explain(dnn.conv_skip, X, W, layout="NWC")] == ["conv_skip"]


def test_explain_another_platform():
    (found,) = dnn.explain(dnn.conv, X, W, layout="NWC", platform="cuda")
    assert found.platform == "cuda"
    assert [c.engine for c in found.candidates if c.refusal is None]


def test_explain_refuses_unknown_platforms():
    with pytest.raises(ValueError, match=r"`platform` must be one of 'cpu', 'cuda', got 'tpuu'\."):
        dnn.explain(dnn.conv, X, W, layout="NWC", platform="tpuu")


def test_explain_without_a_call():
    assert repr(dnn.explain(jnp.sum, X)) == "no op of jaxdnn is called, or none whose result is used"
    assert dnn.explain(jnp.sum, X).formulas == ()
    assert len(dnn.explain(jnp.sum, X)) == 0


def test_explain_names_ops_that_xlas_formulas_serve():
    """Under jit too, whose trace JAX keeps; each level is the strongest that a call may require."""

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jnp.sum(dnn.reduce(conv(x), axis=1)) + jnp.sum(dnn.lp_normalize(x)) + jnp.sum(dnn.reduce(x, axis=2))

    step(X)
    for function, x in ((step, X), (jax.grad(step), X), (jax.vmap(step), X[None]), (step, X)):
        found = dnn.explain(function, x)
        assert {f.op for f in found.formulas} == {"reduce", "lp_normalize"}
        assert "conv" in [call.op for call in found]
    for formula, op in zip(dnn.explain(step, X).formulas, (dnn.reduce, dnn.lp_normalize), strict=True):
        level: Any = formula.level
        op(X, determinism=level)
        stronger = LEVELS[LEVELS.index(level) + 1 :]
        for refused in stronger:
            with pytest.raises(NotImplementedError, match="cannot be guaranteed"):
                op(X, determinism=refused)
    text = "reduce\n  served by XLA's formula, without a choice of engines (guarantees portable)"
    assert repr(dnn.explain(dnn.reduce, X)) == text
    with pytest.raises(NotImplementedError, match="`determinism` 'portable' cannot be guaranteed for lp_normalize"):
        dnn.explain(lambda x: dnn.lp_normalize(x, determinism="portable"), X)


def test_errors_name_the_op_that_was_called():
    image = jnp.ones((2, 5, 4, 3))
    ops = (dnn.batch_norm, dnn.layer_norm, dnn.pool, dnn.global_pool, dnn.conv_transpose)
    for op in ops:
        arrays = (image, jnp.ones((2, 2, 4, 3))) if op is dnn.conv_transpose else (image,)
        with pytest.raises(NotImplementedError, match=f"^`{op.__name__}` on cpu cannot be served by engine 'hopper'"):
            op(*arrays, engine="hopper")


def test_errors_of_a_gradient_speak_of_what_was_called():
    """Not of a primitive that no user has heard of."""
    x, bias = jnp.ones((2, 4)), jnp.ones(4)
    loss = lambda b: jnp.sum(dnn.dropout(x, 7, bias=b, determinism="portable"))
    dnn.explain(loss, bias)
    with pytest.raises(
        NotImplementedError, match=r"^The gradient of `dropout` in its bias on cpu cannot be served by any"
    ):
        jax.grad(loss)(bias)


@pytest.mark.parametrize("op", sorted(set(engines.ops()) - set(dnn.__all__)))
def test_every_primitive_is_a_public_op_or_has_words(op: str):
    call = engines.Call(op, dataclasses.make_dataclass("Spec", ["engine", "level"])("none", "fast"), (), "cpu")
    with pytest.raises(NotImplementedError, match=r"on cpu cannot be served") as error:
        selection.select(call)
    assert f"`{op}`" not in str(error.value)


def test_explain_raises_what_the_call_raises():
    with pytest.raises(ValueError, match="`stride` must be at least 1"):
        dnn.explain(dnn.conv, X, W, layout="NWC", stride=0)


X_LARGE = jax.ShapeDtypeStruct((32, 56, 56, 64), jnp.bfloat16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, str | None], None]:
    """Simulates a GPU of this kind and compute capability, or none."""

    def simulate(kind: str | None, capability: str | None) -> None:
        monkeypatch.setattr(engines, "device_kind", lambda platform: kind)
        monkeypatch.setattr(kernels, "capability", lambda: capability)

    return simulate


def served(function: Any, *arrays: Any, **options: Any) -> tuple[str | None, Any, str]:
    """The engine, the candidate `hopper` and the text of an explanation for CUDA."""
    found = explain(ft.partial(function, **options), *arrays, platform="cuda")
    return found[0].engine, next(c for c in found[0].candidates if c.engine == "hopper"), unfolded(found)


@needs_kernels
def test_a_kernel_is_chosen_unasked_only_where_it_was_measured(device: Callable[..., None]):
    device("NVIDIA H200", "9.0")
    assert served(dnn.pool, X_LARGE)[0] == "hopper"
    device("NVIDIA H100 80GB HBM3", "9.0")  # can run it, but nobody knows how fast
    for function in (dnn.pool, dnn.softmax, dnn.layer_norm):
        engine, kernel, text = served(function, X_LARGE)
        assert (engine, kernel.refusal) == ("xla", None)
        why = "it was measured on NVIDIA H200, not on NVIDIA H100 80GB HBM3"
        assert f"unless it is named, another comes first, because {why}" in text
        assert served(function, X_LARGE, engine="hopper")[0] == "hopper"
    assert served(dnn.softmax, X_LARGE, determinism="batch_invariant")[0] == "hopper"  # XLA does not promise that
    for kind, capability in (("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA B200", "10.0"), ("a new one", None)):
        device(kind, capability)
        engine, kernel, _ = served(dnn.pool, X_LARGE)
        assert engine == "xla"
        assert kernel.refusal == f"it needs compute capability 9.0, and {kind} has {capability or 'an unknown one'}"
        with pytest.raises(NotImplementedError, match=r"it needs compute capability 9\.0"):
            lowered(dnn.pool, engine="hopper")


@needs_kernels
def test_what_is_exported_without_a_gpu_has_a_kernel_only_if_it_is_named(device: Callable[..., None]):
    device(None, None)
    for function in (dnn.pool, dnn.softmax, dnn.layer_norm):
        engine, kernel, text = served(function, X_LARGE)
        assert engine == "xla"
        assert kernel.refusal.startswith("no GPU is here, and no kernel is chosen unasked for one that is not known")
        assert "served by xla; no cuda device is here: this is an export's choice" in text
        assert "mosaic_gpu" not in lowered(function)
        engine, _, text = served(function, X_LARGE, engine="hopper")
        assert engine == "hopper"
        assert "comes first" not in text  # what is named is not chosen
    assert "mosaic_gpu" in lowered(dnn.pool, engine="hopper")
    assert served(dnn.softmax, X_LARGE, determinism="batch_invariant")[0] == "ordered"
    assert "mosaic_gpu" not in lowered(dnn.softmax, determinism="batch_invariant")


def lowered(function: Any, **options: Any) -> str:
    """The program for CUDA."""
    return export.export(jax.jit(ft.partial(function, **options)), platforms=["cuda"])(X_LARGE).mlir_module()


@needs_kernels
@pytest.mark.usefixtures("h200")
def test_hopper_serves_integers_and_states_orders_by_place():
    def hopper_of(function: Any, *arrays: Any) -> Any:
        found = explain(function, *arrays, platform="cuda")[0]
        return next(c for c in found.candidates if c.engine == "hopper"), unfolded(found)

    x, w = jnp.ones((2, 5, 4, 16), jnp.int8), jnp.ones((3, 3, 16, 32), jnp.int8)
    whole, _ = hopper_of(ft.partial(dnn.conv, out_dtype=jnp.int32), x, w)
    assert (whole.refusal, whole.level, whole.schedule) == (None, "portable", None)
    narrow, _ = hopper_of(ft.partial(dnn.conv, out_dtype=jnp.int32, bias=jnp.ones(32, jnp.int32)), x, w)
    assert "no integer epilogue" in narrow.refusal

    x, w = jnp.ones((2, 8, 8, 16), jnp.bfloat16), jnp.ones((3, 3, 1, 16), jnp.bfloat16)
    strided = lambda dy, w: dnn.conv_dgrad(dy, w, (2, 16, 16, 16), stride=2, padding=1, groups=16)
    told, printed = hopper_of(strided, x, w)
    assert told.schedule.classes.shape == (4, 2)  # two residues of the row, each of either parity, by two of the column
    assert len(told.schedule.order) == 8
    assert "order of additions stated, one of 8 by position" in printed
    alone, _ = hopper_of(ft.partial(dnn.conv, precision="tf32", groups=16), *(v.astype(jnp.float32) for v in (x, w)))
    assert alone.refusal is None
    assert alone.schedule is None  # the definition cuts to TF32 there, the kernel does not
