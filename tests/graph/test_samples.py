"""The patterns of cudnn-frontend's samples: accepted, fused where an op has them, within the computed bound."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdnn.graph import Graph, Tensor
from tests.graph.examples import Example, filled, last
from tests.graph.test_nodes import worst

X, W = (2, 8, 6, 5), (4, 8, 3, 3)
SAMPLES: dict[str, tuple[Callable[[np.random.Generator], Example], tuple[tuple[str, ...], ...]]] = {}


def sample(*fused: tuple[str, ...]) -> Callable[[Any], Any]:
    """Registers a pattern and the nodes that a plan computes by one call each."""

    def register(build: Callable[[np.random.Generator], Example]) -> Callable[[np.random.Generator], Example]:
        SAMPLES[build.__name__] = build, fused
        return build

    return register


def image(g: Graph, dim: tuple[int, ...], name: str) -> Any:
    return g.tensor(dim, last(dim), name=name)


def channels(g: Graph, count: int, *names: str, **how: Any) -> list[Any]:
    return [g.tensor((1, count, 1, 1), name=name, **how) for name in names]


@sample(("conv", "bias", "relu"))
def conv_bias_relu(rng: np.random.Generator) -> Example:
    g = Graph(io_data_type="HALF")
    y = g.conv_fprop(image(g, X, "x"), image(g, W, "w"), padding=[1, 1], name="conv")
    g.relu(g.bias(y, *channels(g, 4, "b"), name="bias"), name="relu").set_output(True)
    return filled(g, rng)


@sample()
def scale_bias_relu_conv_genstats(rng: np.random.Generator) -> Example:
    """The prologue of a convolution, and statistics of what it writes."""
    g = Graph(io_data_type="BFLOAT16")
    s, b = channels(g, 8, "s", "b")
    x = g.relu(g.bias(g.scale(image(g, X, "x"), s), b)).set_data_type("BFLOAT16")
    y = g.conv_fprop(x, image(g, W, "w"), padding=[1, 1]).set_output(True)
    return exact_statistics(g, y, rng)


def exact_statistics(g: Graph, y: Tensor, rng: np.random.Generator) -> Example:
    """Small integers, of which the sums are exact, so that the statistics' inputs are."""
    for tensor in g.genstats(y):
        tensor.set_output(True).set_data_type("FLOAT")
    graph, arrays = filled(g, rng)
    return graph, {uid: rng.integers(-1, 2, v.shape).astype(v.dtype) for uid, v in arrays.items()}


@sample(("norm", "add", "relu"))
def batch_norm_add_relu(rng: np.random.Generator) -> Example:
    g = Graph(io_data_type="BFLOAT16")
    parameters = channels(g, 8, "scale", "bias", "mean", "var", data_type="FLOAT")
    y, *others = g.batchnorm(image(g, X, "x"), *parameters, epsilon=1e-3, momentum=0.1, name="norm")
    g.relu(g.add(y, image(g, X, "z"), name="add"), name="relu").set_output(True)
    for tensor in others:
        tensor.set_output(True).set_data_type("FLOAT")
    return filled(g, rng, var=np.ones((1, 8, 1, 1), np.float32))


@sample()
def drelu_fork_dbn(rng: np.random.Generator) -> Example:
    """The gradient of relu goes to the norm's backward pass and to the residual."""
    g = Graph(io_data_type="FLOAT")
    dy, mask, x = (image(g, X, name) for name in ("dy", "mask", "x"))
    masked = g.mul(dy, g.cmp_gt(mask, 0.0)).set_output(True)
    stats = channels(g, 8, "scale", "mean", "rstd")
    for tensor in g.batchnorm_backward(masked, x, *stats):
        tensor.set_output(True)
    values = rng.standard_normal((2, 6, 5, 8)).astype(np.float32)
    mean, variance = (f(values, (0, 1, 2)).reshape(1, 8, 1, 1) for f in (np.mean, np.var))
    return filled(g, rng, x=values, mean=mean, rstd=(1 / np.sqrt(variance + 1e-3)).astype(np.float32))


@sample(("conv", "scale", "bias", "add", "relu"))
def int8_conv_scale_bias_add_relu(rng: np.random.Generator) -> Example:
    """Products are added in int32, the rest is in float32, and the result is int8 by one rounding."""
    g = Graph(io_data_type="INT8", compute_data_type="FLOAT")
    y = g.conv_fprop(image(g, X, "x"), image(g, W, "w"), padding=[1, 1], compute_data_type="INT32", name="conv")
    y = g.scale(y.set_data_type("INT32"), 0.0625, name="scale")
    y = g.add(g.bias(y, *channels(g, 4, "b", data_type="FLOAT"), name="bias"), image(g, (2, 4, 6, 5), "z"), name="add")
    g.relu(y, name="relu").set_output(True)
    return filled(g, rng)


@sample(("matmul_0", "add_1", "gelu_fwd_2"))
def matmul_bias_gelu_reduction(rng: np.random.Generator) -> Example:
    g = Graph(io_data_type="BFLOAT16")
    y = g.matmul(g.tensor((2, 5, 8), name="a"), g.tensor((2, 8, 6), name="b"))
    y = g.gelu(g.bias(y, g.tensor((1, 1, 6), name="bias"))).set_output(True)
    g.reduction(y, "ADD").set_dim((1, 1, 6)).set_output(True).set_data_type("FLOAT")
    return filled(g, rng)


@sample(("matmul_0", "mul_1", "mul_2"))
def matmul_fp8(rng: np.random.Generator) -> Example:
    """Factors of eight bits with their scales; the largest magnitude is taken before the result is scaled."""
    g = Graph(io_data_type="FP8_E4M3")
    number = lambda name: g.tensor((1, 1, 1), data_type="FLOAT", is_pass_by_value=True, name=name)
    c = g.matmul(g.tensor((1, 5, 8), name="a"), g.tensor((1, 8, 6), name="b"))
    c = g.scale(g.scale(c, number("descale_a")), number("descale_b"))
    g.reduction(c, "AMAX").set_dim((1, 1, 1)).set_output(True).set_data_type("FLOAT")
    g.scale(c, number("scale_c")).set_output(True).set_data_type("FP8_E5M2")
    numbers = {
        name: np.full(1, v, np.float32) for name, v in {"descale_a": 0.5, "descale_b": 0.25, "scale_c": 8}.items()
    }
    return filled(g, rng, **numbers)


@sample(("identity_0", "matmul_1"))
def mixed_precision_matmul(rng: np.random.Generator) -> Example:
    """Weights of int8 are cast on the way into a product of bfloat16."""
    g = Graph(io_data_type="BFLOAT16")
    b = g.identity(g.tensor((1, 8, 6), data_type="INT8", name="b")).set_data_type("BFLOAT16")
    g.matmul(g.tensor((1, 5, 8), name="a"), b).set_output(True)
    return filled(g, rng)


@sample(("block_scale_dequantize_0", "block_scale_dequantize_1", "matmul_2"))
def dequantised_matmul(rng: np.random.Generator) -> Example:
    """MXFP8: both operands with a scale for each block of 32 along K."""
    g = Graph(io_data_type="FP8_E4M3")
    a, b = g.tensor((1, 5, 64), name="a"), g.tensor((1, 64, 6), name="b")
    s, t = (g.tensor(dim, data_type="FP8_E8M0", name=name) for dim, name in (((1, 5, 2), "s"), ((1, 2, 6), "t")))
    a, b = g.block_scale_dequantize(a, s, [32]), g.block_scale_dequantize(b, t, [32])
    g.matmul(a, b).set_output(True).set_data_type("FLOAT")
    powers = lambda *dim: np.full(dim, 2.0, np.float32).astype(jnp.float8_e8m0fnu)
    return filled(g, rng, s=powers(1, 5, 2), t=powers(1, 2, 6))


@sample()
def layernorm_and_quantised_rows(rng: np.random.Generator) -> Example:
    """x is (B S, D, 1, 1), as rows have to be for the scale to name the normalised axis."""
    g = Graph(io_data_type="BFLOAT16")
    x, scale, bias = g.tensor((6, 16, 1, 1), name="x"), *channels(g, 16, "scale", "bias", data_type="FLOAT")
    y, mean, rstd = g.layernorm("TRAINING", x, scale, bias, 1e-5)
    for tensor in (y, mean, rstd):
        tensor.set_output(True)
    mean.set_data_type("FLOAT")
    rstd.set_data_type("FLOAT")
    return filled(g, rng)


@sample(("transpose_0", "matmul_1", "mul_2"))
def softmax_of_pieces(rng: np.random.Generator) -> Example:
    """What attention is made of, with a causal mask of indices."""
    g = Graph(io_data_type="FLOAT")
    q, k, v = (g.tensor((2, 2, 5, 4), name=name) for name in "qkv")
    s = g.scale(g.matmul(q, g.transpose(k, [0, 1, 3, 2])), 0.5)
    seen = g.cmp_ge(g.gen_index(s, 2), g.gen_index(s, 3))
    s = g.binary_select(s, g.mul(s, 0.0), seen)
    top = g.reduction(s, "MAX").set_dim((2, 2, 5, 1))
    e = g.mul(g.exp(g.sub(s, top)), seen)
    total = g.reduction(e, "ADD").set_dim((2, 2, 5, 1))
    g.matmul(g.div(e, total), v).set_output(True)
    return filled(g, rng)


@sample()
def masked_filter_gradient(rng: np.random.Generator) -> Example:
    g = Graph(io_data_type="BFLOAT16")
    x, dy = image(g, X, "x"), image(g, (2, 4, 6, 5), "dy")
    masked = g.mul(dy, g.cmp_gt(image(g, (2, 4, 6, 5), "y"), 0.0)).set_data_type("BFLOAT16")
    g.conv_wgrad(x, masked, padding=[1, 1]).set_dim(W).set_output(True).set_data_type("FLOAT")
    return filled(g, rng)


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name: str):
    build, fused = SAMPLES[name]
    graph, arrays = build(np.random.default_rng(17))
    plan = graph.plan()
    assert plan.explain().fused == fused
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_numbers_that_are_not_finite_are_kept_in_json():
    g = Graph(io_data_type="float32")
    x = g.tensor((2, 3), name="x")
    y = g.binary_select(x, g.tensor_scalar(-np.inf), g.cmp_gt(x, 0.0)).set_output(True)
    read = Graph.from_json(g.to_json())
    x = np.array([[1, -1, 2], [0, 3, -4]], np.float32)
    np.testing.assert_array_equal(read.plan()({"x": x})[y.uid], np.where(x > 0, x, -np.inf))


def test_a_plan_runs_under_a_sharded_jit():
    """The batch is split among devices; the bits may differ, the values do not."""
    graph, arrays = conv_bias_relu(np.random.default_rng(18))
    plan = graph.plan()
    names = {graph.tensors[uid].name: jnp.asarray(v) for uid, v in arrays.items()}
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("batch",), ()))
    placed = {name: jax.device_put(v, split if name == "x" else whole) for name, v in names.items()}
    found = jax.jit(lambda given: next(iter(plan(given).values())))(placed)
    assert found.sharding.is_equivalent_to(split, found.ndim)
    np.testing.assert_allclose(np.float32(found), np.float32(*plan(names).values()), rtol=2e-3, atol=2e-3)
