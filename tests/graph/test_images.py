"""What convolutions, their gradients and norms take up, and what is left to XLA and why."""

from typing import Any

import numpy as np
import pytest

from jaxdnn.graph import Graph, Tensor
from tests.graph.examples import Arrays, Example, filled, last
from tests.graph.test_nodes import worst

X, W, Y = (2, 6, 9, 7), (4, 6, 3, 3), (2, 4, 9, 7)


class Images:
    """A graph with images, channels last, and numbers for each channel."""

    def __init__(self, io: str = "float32") -> None:
        self.g = Graph("images", io_data_type=io)

    def image(self, name: str, dim: tuple[int, ...], dtype: str | None = None) -> Tensor:
        return self.g.tensor(dim, last(dim), dtype, name=name)

    def each(self, name: str, channels: int = 4) -> Tensor:
        return self.g.tensor((1, channels, 1, 1), name=name)

    def conv(self) -> Tensor:
        return self.g.conv_fprop(self.image("x", X), self.image("w", W), padding=[1, 1], name="conv")

    def dgrad(self) -> Tensor:
        dy, w = self.image("dy", Y), self.image("w", W)
        return self.g.conv_dgrad(dy, w, padding=[1, 1], name="dgrad").set_dim(X)

    def built(self, *outputs: Tensor) -> Example:
        for tensor in outputs:
            tensor.set_output(True)
        return filled(self.g, np.random.default_rng(4))


def check(graph: Graph, arrays: Arrays, fused: tuple[tuple[str, ...], ...]) -> Any:
    """Both plans are within the bound; returns the fused one's report."""
    plan, single = graph.plans()
    assert plan.explain().fused == fused
    for each in (plan, single):
        assert worst(graph, arrays, each(arrays)) <= 1
    return plan.explain()


@pytest.mark.parametrize("io", ["float32", "bfloat16", "float16"])
def test_a_convolution_takes_scales_of_each_channel(io: str):
    """cuDNN's convolution + scale + bias + add + activation."""
    p = Images(io)
    y = p.g.mul(p.g.scale(p.conv(), 0.5, name="half"), p.each("s"), name="scaled")
    y = p.g.add(p.g.bias(y, p.each("b"), name="biased"), p.image("r", Y), name="added")
    graph, arrays = p.built(p.g.swish(y, name="act"))
    report = check(graph, arrays, (("conv", "half", "scaled", "biased", "added", "act"),))
    assert report.not_fused == ()


@pytest.mark.parametrize("io", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", ["relu", "prior", "all"])
def test_a_gradient_takes_what_else_reaches_the_image_and_its_relu(io: str, parts: str):
    """cuDNN's backward data with the relu's gradient behind it."""
    p, names = Images(io), ["dgrad"]
    dx = p.dgrad()
    if parts == "all":
        dx, names = p.g.scale(dx, 0.5, name="half"), [*names, "half"]
    if parts != "relu":
        dx, names = p.g.add(p.image("skip", X), dx, name="added"), [*names, "added"]
    if parts != "prior":
        dx, names = p.g.relu_backward(dx, p.image("h", X), name="relu"), [*names, "relu"]
    graph, arrays = p.built(dx)
    check(graph, arrays, (tuple(names),))


@pytest.mark.parametrize("op", ["conv", "batchnorm", "matmul"])
@pytest.mark.parametrize("io", ["float32", "bfloat16"])
def test_a_relu_is_fused_with_its_mask(op: str, io: str):
    """The mask is where the result is positive; it is of the sum that is not stored."""
    p = Images(io)
    if op == "conv":
        y = p.g.bias(p.conv(), p.each("b"), name="biased")
    elif op == "batchnorm":
        y = p.g.batchnorm(p.image("x", X), p.each("s", 6), p.each("b", 6), epsilon=1e-3, name="norm")[0]
        y = p.g.add(y, p.image("r", X), name="added")
    else:
        y = p.g.matmul(p.g.tensor((2, 5, 7), name="a"), p.g.tensor((2, 7, 6), name="b"), name="product")
    mask = p.g.cmp_gt(y, 0.0, name="mask")
    graph, arrays = p.built(p.g.relu(y, name="act"), mask)
    first = {"conv": ("conv", "biased"), "batchnorm": ("norm", "added"), "matmul": ("product",)}[op]
    check(graph, arrays, ((*first, "mask", "act"),))
    found = graph.plan()(arrays)
    assert found["mask::OUT_0"].dtype == bool
    np.testing.assert_array_equal(np.asarray(found["act::OUT_0"], np.float32) > 0, found["mask::OUT_0"])
    assert 0 < np.asarray(found["mask::OUT_0"]).mean() < 1


@pytest.mark.parametrize("kind", ["float16", "another number", "leaky", "less"])
def test_a_mask_that_the_result_does_not_tell_is_not_fused(kind: str):
    p = Images("float16" if kind == "float16" else "float32")
    y = p.conv()
    mask = p.g.cmp_lt(y, 0.0) if kind == "less" else p.g.cmp_gt(y, 0.5 if kind == "another number" else 0.0)
    graph, arrays = p.built(p.g.relu(y, 0.1 if kind == "leaky" else None), mask)
    plan = graph.plan()
    assert [d.reason for d in plan.not_fused] == ["'conv::Y' has 2 readers"]
    assert worst(graph, arrays, plan(arrays)) <= 1


def statistics(p: Images) -> Tensor:
    return p.g.genstats(p.conv().set_output(True), name="sums")[0]


def held_statistics(p: Images) -> Tensor:
    return p.g.genstats(p.conv(), name="sums")[1]


def normalised(p: Images) -> Tensor:
    y = p.g.layernorm("INFERENCE", p.image("x", X), p.each("s", 6), p.each("b", 6), 1e-3, name="norm")[0]
    return p.g.relu(y, name="relu")


def quantised(p: Images) -> Tensor:
    y = p.g.rmsnorm("INFERENCE", p.image("x", X), p.each("s", 6), epsilon=1e-3, name="norm")[0]
    return p.g.scale(y, 8.0, name="by").set_data_type("float8_e4m3fn")


def filter_gradient(p: Images) -> Tensor:
    dw = p.g.conv_wgrad(p.image("x", X), p.image("dy", Y), padding=[1, 1], name="wgrad").set_dim(W)
    return p.g.scale(dw, 0.5, name="half")


def elu_gradient(p: Images) -> Tensor:
    return p.g.elu_backward(p.dgrad(), p.image("h", X), name="elu")


def two_priors(p: Images) -> Tensor:
    return p.g.add(p.g.add(p.dgrad(), p.image("a", X)), p.image("b", X), name="second")


def behind_the_end(p: Images) -> Tensor:
    return p.g.scale(p.g.relu_backward(p.dgrad(), p.image("h", X)), 2.0, name="twice")


REASONS = {
    statistics: "'conv::Y' is an output, so it is written before it is read",
    held_statistics: "'conv' has no genstats",
    normalised: "'layer_norm' has no activation",
    quantised: "'rms_norm' has no alpha",
    filter_gradient: "'conv_wgrad' has no alpha",
    elu_gradient: "'conv_dgrad' has no mode ELU_BWD",
    two_priors: f"'conv_dgrad' has no summand of sizes {X}",
    behind_the_end: "'conv_dgrad' ends with its gradient of a relu",
}


@pytest.mark.parametrize("build", REASONS)
def test_what_is_not_fused_has_a_reason(build: Any):
    p = Images()
    graph, arrays = p.built(build(p))
    plan = graph.plan()
    assert [d.reason for d in plan.not_fused] == [REASONS[build]]
    assert worst(graph, arrays, plan(arrays)) <= 1
