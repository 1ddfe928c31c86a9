"""`jax.export` of convolutions whose batch is not known when they are traced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn
from jaxdnn._src import hopper

BF16, F32, I8 = jnp.bfloat16, jnp.float32, jnp.int8
#    x without its batch, w, options
CASES: dict[str, Any] = {
    "direct": ((6, 5, 3), (3, 2, 3, 7), {"padding": 1, "dilation": (1, 2)}),
    "many channels": ((6, 5, 64), (3, 3, 64, 8), {"padding": 1}),
    "strided": ((9, 8, 4), (3, 3, 4, 6), {"padding": 1, "stride": 2, "mode": "convolution"}),
    "pixels": ((6, 5, 4), (1, 1, 4, 7), {}),
    "patches": ((6, 4, 3), (3, 2, 3, 5), {"stride": (3, 2)}),
    "depthwise": ((6, 5, 4), (3, 3, 1, 8), {"padding": 1, "groups": 4}),
    "groups": ((6, 5, 32), (3, 3, 16, 6), {"padding": 1, "groups": 2}),
}
OPS = ("conv", "conv_dgrad", "conv_wgrad")


def call(op: str, name: str, **more: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """The op as a function of two arrays, and the arrays' shapes for a batch of one."""
    x, w, options = CASES[name]
    y = jax.eval_shape(lambda x, w: dnn.conv(x, w, **options), jnp.zeros((1, *x)), jnp.zeros(w)).shape

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        static = {"conv": (), "conv_dgrad": ((a.shape[0], *x),), "conv_wgrad": (w,)}[op]
        return getattr(dnn, op)(a, b, *static, **options, **more)

    return run, {"conv": [(1, *x), w], "conv_dgrad": [y, w], "conv_wgrad": [(1, *x), y]}[op]


def of_any_batch(op: str, shapes: list[tuple[int, ...]], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    (n,) = export.symbolic_shape("n")
    batched: Any = [True, op == "conv_wgrad"]
    return [jax.ShapeDtypeStruct((n, *s[1:]) if b else s, dtype) for s, b in zip(shapes, batched, strict=True)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [F32, BF16, I8], ids=["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_every_batch(name: str, dtype: Any, op: str):
    """On whole numbers, so that every result is exact."""
    function, shapes = call(op, name)
    avals = of_any_batch(op, shapes, dtype)
    program = export.export(jax.jit(function))(*avals)
    rng = np.random.default_rng(0)
    for batch in (1, 5):
        sizes = [[batch if export.is_symbolic_dim(n) else n for n in aval.shape] for aval in avals]
        operands = [jnp.asarray(rng.integers(-1, 2, size)).astype(dtype) for size in sizes]
        np.testing.assert_array_equal(program.call(*operands), function(*operands))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [F32, BF16, I8], ids=["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_it_lowers_for_gpus_too(name: str, dtype: Any, op: str):
    function, shapes = call(op, name)
    found = export.export(jax.jit(function), platforms=("cpu", "cuda"))(*of_any_batch(op, shapes, dtype))
    assert found.platforms == ("cpu", "cuda")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [F32, np.float64], ids=["f32", "f64"])
def test_a_scale_of_float64_stays_out_of_cudnns_call(dtype: Any):
    """On a GPU a result with alpha = 0.3 was off by as much as float32's 0.3 is."""
    x, w = jax.ShapeDtypeStruct((2, 4, 9, 9), dtype), jax.ShapeDtypeStruct((5, 4, 3, 3), dtype)
    scaled = jax.jit(lambda x, w: dnn.conv(x, w, layout="NCHW", alpha=0.3, engine="xla"))
    text = export.export(scaled, platforms=("cuda",))(x, w).mlir_module()
    assert ("optimization_barrier" in text) == (dtype == np.float64)


def test_the_ordered_engine_and_derivatives():
    for op in OPS:
        function, shapes = call(op, "strided", engine="ordered")
        export.export(jax.jit(function))(*of_any_batch(op, shapes, BF16))
    function, shapes = call("conv", "direct", activation="gelu")
    avals = of_any_batch("conv", shapes, F32)
    program = export.export(jax.jit(jax.grad(lambda x, w: function(x, w).sum(), (0, 1))))(*avals)
    assert [str(aval.shape) for aval in program.out_avals] == ["(n, 6, 5, 3)", "(3, 2, 3, 7)"]


@pytest.mark.parametrize("shape", ["n, h, 5, 3", "n, 6, 5, c"])
def test_other_sizes_must_be_known(shape: str):
    x = jax.ShapeDtypeStruct(export.symbolic_shape(shape), F32)
    with pytest.raises(TypeError, match=r"`x` must be made of integers known when traced, got [hc]\."):
        export.export(jax.jit(lambda x: dnn.conv(x, jnp.ones((3, 3, 3, 4)))))(x)


@pytest.mark.skipif(hopper.unavailable() is not None, reason="the Hopper kernels need a newer JAX")
@pytest.mark.usefixtures("h200")
def test_hopper_needs_to_know_the_batch():
    function, shapes = call("conv", "many channels")
    (found,) = dnn.explain(function, *of_any_batch("conv", shapes, BF16), platform="cuda")
    refusals = {candidate.engine: candidate.refusal for candidate in found.candidates}
    assert found.engine == "xla"
    assert refusals["hopper"] == "its kernels are cut for a batch that is known when traced"
