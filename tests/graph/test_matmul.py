"""Matrix products with what stands around them: what becomes an argument of `matmul`, and what does not and why."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.core.explain import traced_calls
from jaxdnn.graph import Graph, Tensor
from jaxdnn_reference import graph as definition
from tests.graph.examples import Example, filled
from tests.graph.test_nodes import worst
from tests.graph.test_plans import in_float64

B, M, K, N = 2, 5, 7, 6


class Parts:
    """A graph with tensors by name, of a dtype each."""

    def __init__(self, io: str = "float32", **how: Any) -> None:
        self.g = Graph("product", io_data_type=io, **how)

    def given(self, name: str, *dim: int, dtype: str | None = None) -> Tensor:
        return self.g.tensor(dim, name=name, data_type=dtype)

    def product(self, a: Tensor | None = None, b: Tensor | None = None, **how: Any) -> Tensor:
        a = self.given("a", B, M, K) if a is None else a
        return self.g.matmul(a, self.given("b", 1, K, N) if b is None else b, name="product", **how)


def built(p: Parts, y: Tensor, out: str | None = None, **given: Any) -> Example:
    y.set_output(True)
    if out:
        y.set_data_type(out)
    return filled(p.g, np.random.default_rng(1), **given)


def bias_gelu(p: Parts) -> Tensor:
    return p.g.gelu(p.g.bias(p.product(), p.given("bias", 1, 1, N), name="bias"), name="act")


def everything(p: Parts) -> Tensor:
    y = p.g.mul(p.g.mul(p.product(), p.given("rows", B, M, 1), name="rows"), p.given("columns", 1, 1, N), name="cols")
    y = p.g.add(p.given("residual", B, M, N), p.g.add(y, p.given("bias", 1, 1, N), name="bias"), name="added")
    return p.g.relu(y, name="act")


def number(p: Parts) -> Tensor:
    """A scale that is known, and one that is passed by value."""
    s = p.g.tensor((1,), is_pass_by_value=True, name="s")
    return p.g.add(p.g.scale(p.g.scale(p.product(), 0.5, name="half"), s, name="scaled"), 2.0, name="shifted")


def row(p: Parts) -> Tensor:
    """A summand of each matrix, which is a residual that is broadcast."""
    return p.g.add(p.product(), p.given("r", B, 1, N), name="added")


def turned(p: Parts) -> Tensor:
    """A transpose before b, of which a scale for each column is taken out of the sum."""
    b = p.g.mul(p.given("b", 1, N, K), p.given("s", 1, N, 1), name="scaled")
    return p.product(b=p.g.transpose(b, [0, 2, 1], name="turned").set_data_type(p.g.io_data_type))


def weights_of_8_bits(p: Parts) -> Tensor:
    """Weights are int8 with a scale for each column, activations are not: multiplied in bfloat16."""
    w = p.g.identity(p.given("w", 1, K, N, dtype="int8"), name="wide")
    w = p.g.mul(w, p.given("s", 1, 1, N, dtype="float32"), name="scaled").set_data_type("bfloat16")
    return p.g.tanh(p.product(b=w), name="act")


def dequantised(p: Parts) -> Tensor:
    """Both operands are int8 with scales: multiplied in int8, for the sums are exact in int32."""
    a = p.g.mul(p.given("a", B, M, K, dtype="int8"), p.given("sa", B, M, 1), name="a wide")
    return p.product(a, p.g.mul(p.given("s", 1, 1, 1), p.given("b", 1, K, N, dtype="int8"), name="b wide"))


FUSED: dict[str, tuple[Callable[[Parts], Tensor], tuple[str, ...]]] = {
    "bias and gelu": (bias_gelu, ("product", "bias", "act")),
    "scales, bias, residual, activation": (everything, ("product", "rows", "cols", "bias", "added", "act")),
    "numbers": (number, ("product", "half", "scaled", "shifted")),
    "a summand of each matrix": (row, ("product", "added")),
    "a transpose and a scale before": (turned, ("scaled", "turned", "product")),
    "weights of 8 bits": (weights_of_8_bits, ("wide", "scaled", "product", "act")),
    "int8 with scales before": (dequantised, ("a wide", "b wide", "product")),
}


OF_ONE_DTYPE = {"weights of 8 bits": "bfloat16", "int8 with scales before": "float32"}
KINDS = [(kind, io) for kind in FUSED for io in ("float32", "bfloat16") if OF_ONE_DTYPE.get(kind, io) == io]


@pytest.mark.parametrize(("kind", "io"), KINDS)
def test_what_stands_around_a_product_is_fused(kind: str, io: str):
    build, nodes = FUSED[kind]
    p = Parts(io)
    graph, arrays = built(p, build(p))
    fused, single = graph.plans()
    (part,) = fused.parts
    assert (part.nodes, part.calls, part.rule) == (nodes, ("matmul",), "matmul_epilogue")
    assert fused.explain().fused == (nodes,)
    assert fused.not_fused == []
    assert len(single.parts) == len(nodes)
    for plan in (fused, single):
        assert worst(graph, arrays, plan(arrays)) <= 1


def test_operands_of_8_bits_are_multiplied_as_they_are():
    """The scales before the product are taken out of the sum: what the plan multiplies is int8."""
    p = Parts()
    graph, arrays = built(p, dequantised(p))
    (call,) = traced_calls(lambda v: tuple(graph.plan()(v).values()), arrays, platform="cpu")
    assert [v.dtype.name for v in call.avals[:2]] == ["int8", "int8"]
    assert call.spec.accumulate == np.int32


@pytest.mark.parametrize("io", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("out", ["float8_e4m3fn", "bfloat16"])
def test_float8_with_scales_and_amax(io: str, out: str):
    """As cuDNN writes it: descaled, the largest magnitude taken, scaled, converted."""
    p = Parts(io)
    sa, sb, sc = (p.given(name, 1, 1, 1, dtype="float32") for name in ("descale_a", "descale_b", "scale_c"))
    b = p.given("b", 1, K, N, dtype="float8_e4m3fn")
    y = p.g.mul(p.g.mul(p.product(b=b), sa, name="by a"), sb, name="by b")
    p.g.reduction(y, "AMAX", name="amax").set_dim((1, 1, 1)).set_data_type("float32").set_output(True)
    graph, arrays = built(p, p.g.mul(y, sc, name="scaled"), out)
    for name, value in {"descale_a": 0.25, "descale_b": 0.5, "scale_c": 3.0}.items():
        arrays[graph.find(name).uid] = np.full((1, 1, 1), value, np.float32)
    fused, single = graph.plans()
    assert fused.explain().fused == (("product", "by a", "by b"),)
    assert [d.reason for d in fused.not_fused] == ["'by b::OUT_0' has 2 readers"]
    for plan in (fused, single):
        assert worst(graph, arrays, plan(arrays)) <= 1


@pytest.mark.parametrize("out", ["int8", "int32", "float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("parts", ["none", "scale", "all"])
def test_int8_in_int32(out: str, parts: str):
    """Sums in int32, then what computes in float32, then one conversion, which saturates."""
    p = Parts("int8")
    y = p.product(compute_data_type="int32").set_data_type("int32")
    if parts != "none":
        y = p.g.mul(y, p.given("s", 1, 1, N, dtype="float32"), name="scaled")
    if parts == "all":
        y = p.g.relu(p.g.add(y, p.given("bias", 1, 1, N, dtype="float32"), name="bias"), name="act")
    graph, arrays = built(p, y, out)
    plan = graph.plan()
    assert [len(part.nodes) for part in plan.parts] == [{"none": 1, "scale": 2, "all": 4}[parts]]
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_terms_of_int8_that_int32_may_not_hold_are_added_in_float32():
    p = Parts()
    a, b = (p.given(name, *dim, dtype="int8") for name, dim in (("a", (1, 1, 140_000)), ("b", (1, 140_000, 1))))
    graph, arrays = built(p, p.product(p.g.scale(a, 1.0), p.g.scale(b, 1.0)))
    arrays = {uid: np.full_like(v, -128) for uid, v in arrays.items()}
    fused, _ = graph.plans()
    assert worst(graph, arrays, fused(arrays)) <= 1


def zero_point(p: Parts) -> Tensor:
    return p.product(p.g.sub(p.given("a", B, M, K), 3.0, name="shifted"))


def along_k(p: Parts) -> Tensor:
    return p.product(p.g.mul(p.given("a", B, M, K), p.given("s", 1, 1, K), name="scaled"))


def read_twice(p: Parts) -> Tensor:
    a = p.g.scale(p.given("a", B, M, K), 2.0, name="scaled")
    p.g.exp(a).set_output(True)
    return p.product(a)


def narrowed(p: Parts) -> Tensor:
    a = p.g.scale(p.given("a", B, M, K), 2.0, name="scaled").set_data_type("bfloat16")
    return p.product(a, p.given("b", 1, K, N, dtype="bfloat16"))


def computed(p: Parts) -> Tensor:
    return p.product(p.g.scale(p.g.exp(p.given("a", B, M, K), name="exp"), 2.0, name="scaled"))


def moved(p: Parts) -> Tensor:
    return p.product(p.g.transpose(p.given("a", M, B, K), [1, 0, 2], name="moved"))


def overridden(p: Parts) -> Tensor:
    rows = p.given("rows", B, 1, 1, dtype="int32")
    return p.g.relu(p.product(M_override=rows), name="act")


def summed(p: Parts) -> Tensor:
    return p.g.reduction(p.product(), "ADD", name="total").set_dim((B, M, 1))


def behind_a_sum(p: Parts) -> Tensor:
    return p.g.mul(p.g.add(p.product(), p.given("bias", 1, 1, N), name="bias"), p.given("s", 1, 1, N), name="scaled")


def two_residuals(p: Parts) -> Tensor:
    y = p.g.add(p.product(), p.given("r", B, M, N), name="first")
    return p.g.add(y, p.given("t", B, M, 1), name="second")


def widened(p: Parts) -> Tensor:
    a = p.given("a", 1, M, K)
    return p.g.mul(p.product(a), p.given("s", B, M, N), name="scaled")


REASONS: dict[Callable[[Parts], Tensor], tuple[tuple[str, ...], str]] = {
    zero_point: (("shifted", "product"), "operand A: 'matmul' has no mode SUB before it"),
    along_k: (("scaled", "product"), "operand A: 'scaled' has no factor that is the same for all terms of a sum"),
    read_twice: (("scaled", "product"), "operand A: 'scaled::OUT_0' has 2 readers"),
    narrowed: (
        ("scaled", "product"),
        "operand A: 'a', of which it is a multiple, is float32, and read as bfloat16",
    ),
    computed: (("exp", "product"), "operand A: 'matmul' has no mode EXP before it"),
    moved: (("moved", "product"), "operand A: 'moved' moves more than the last two axes"),
    overridden: (("product", "act"), "'matmul' has no M_override, the size of each matrix"),
    summed: (("product", "total"), "'matmul' has no reduction"),
    behind_a_sum: (("product", "scaled"), "'matmul' has no alpha behind a sum"),
    two_residuals: (("product", "second"), "'matmul' has no second residual"),
    widened: (("product", "scaled"), f"'matmul' has no operand of sizes {(B, M, N)}"),
}


@pytest.mark.parametrize("build", REASONS)
def test_what_is_not_fused_has_a_reason(build: Callable[[Parts], Tensor]):
    p = Parts()
    graph, arrays = built(p, build(p))
    given = {t.name: np.array([3, 5], np.int32).reshape(2, 1, 1) for t in graph.inputs() if t.name == "rows"}
    arrays |= {graph.find(name).uid: v for name, v in given.items()}
    nodes, reason = REASONS[build]
    plan = graph.plan()
    assert [(d.nodes, d.reason) for d in plan.not_fused] == [(nodes, reason)]
    assert reason in str(plan.explain())
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_heads_of_keys_that_serve_several_of_queries():
    p = Parts()
    y = p.product(p.given("a", 2, 6, M, K), p.given("b", 2, 3, K, N))
    graph, arrays = built(p, p.g.relu(p.g.scale(y, 0.5, name="scaled"), name="act"))
    fused, _ = graph.plans()
    assert fused.explain().fused == (("product", "scaled", "act"),)
    assert worst(graph, arrays, fused(arrays)) <= 1


def test_two_layers_are_two_calls():
    p = Parts("bfloat16")
    first = p.g.relu(p.g.bias(p.product(), p.given("bias", 1, 1, N), name="bias"), name="act")
    y = p.g.matmul(first.set_data_type("bfloat16"), p.given("c", 1, N, 3), name="second")
    graph, arrays = built(p, p.g.add(y, p.given("r", B, M, 3), name="added"))
    fused, _ = graph.plans()
    assert fused.explain().fused == (("product", "bias", "act"), ("second", "added"))
    assert fused.not_fused == []
    assert worst(graph, arrays, fused(arrays)) <= 1


def test_a_product_keeps_levels_and_the_definitions_bits():
    p = Parts()
    y = p.g.relu(p.g.bias(p.product(), p.given("bias", 1, 1, N)))
    graph, arrays = built(p, y)
    plan = graph.plan(determinism="portable")
    assert (plan.engine, plan.level, plan.parts[0].engine) == ("fused", "portable", ("ordered",))
    from jaxdnn_reference import matmul

    a, b, bias = arrays.values()
    wanted = matmul(a, b, bias=bias.ravel(), activation="relu", arithmetic="ordered")
    np.testing.assert_array_equal(plan(arrays)[y], wanted)


def test_scales_have_derivatives():
    """In the scales before and behind the product, against central differences of the definition."""
    p = Parts()
    a = p.g.mul(p.given("a", B, M, K), p.given("sa", B, M, 1), name="a wide")
    y = p.g.mul(p.product(a), p.given("s", 1, 1, N), name="scaled")
    graph, arrays = built(p, y)
    plan, described = graph.plan(), in_float64(graph.describe())
    for name in ("sa", "s"):
        uid = graph.find(name).uid
        loss = lambda v, uid=uid: (plan({**arrays, uid: v})[y] ** 2).sum()
        found = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(arrays[uid])))
        for at in np.ndindex(*arrays[uid].shape):
            ends = []
            for sign in (1, -1):
                moved = arrays[uid].astype(np.float64)
                moved[at] += sign * 1e-4
                ends.append((definition.hold(described, {**arrays, uid: moved})[y.uid] ** 2).sum())
            assert abs((ends[0] - ends[1]) / 2e-4 - found[at]) <= 1e-4 * (1 + abs(found[at]))
