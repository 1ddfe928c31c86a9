"""Graphs traced from functions: they compute the function, fuse as built ones do, and say what they cannot take."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn as dnn
from jaxdnn.graph import Graph, GraphError, trace
from jaxdnn_reference import graph as definition
from tests.graph.test_nodes import worst

X, FILTER, CHANNELS = (2, 5, 7, 6), (3, 3, 6, 4), (4,)
pytestmark = pytest.mark.usefixtures("ranks")
NEAR = 2.0**-22  # of the largest result: constants and outputs are float32, and nothing else is rounded


@pytest.fixture
def ranks() -> Any:
    """Functions are written as users write them, x @ w + b."""
    with jax.numpy_rank_promotion("allow"):
        yield


def numbers(*shapes: Any, dtype: Any = np.float32) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def traced(function: Callable[..., Any], *arrays: Any) -> tuple[Graph, dict[int, Any]]:
    """The graph, and its arrays by uid."""
    graph = trace(function, *arrays)
    flat = [leaf for _, leaf in jax.tree_util.tree_leaves_with_path(arrays)]
    names = [label for label in _names(function, arrays)]
    given = dict(zip(names, flat, strict=True))
    return graph, {t.uid: np.asarray(given[t.name]) for t in graph.inputs()}


def _names(function: Callable[..., Any], arrays: Any) -> list[str]:
    parameters = list(inspect.signature(function).parameters)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(arrays)]
    return [f"{parameters[path[0].idx]}{jax.tree_util.keystr(path[1:])}" for path in paths]


def outputs(graph: Graph, found: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(found[t.uid], np.float64) for t in sorted(graph.outputs(), key=lambda t: t.name)]


def close(found: Any, wanted: Any) -> None:
    wanted = np.asarray(wanted, np.float64)
    assert found.size == wanted.size
    finite = np.isfinite(wanted)
    limit = NEAR * max(1e-30, np.abs(wanted[finite]).max(initial=0))
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=NEAR, atol=limit)


def relu_block(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.relu(dnn.conv(x, w, padding="SAME", stride=2) * 0.5 + b)


def conv_epilogue(x: Any, w: Any, b: Any, r: Any) -> Any:
    return dnn.conv(x, w, padding="SAME", bias=b, residual=r, activation="gelu", alpha=0.5)


def layer(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


def exact_gelu(x: Any, w: Any) -> Any:
    return jax.nn.gelu(dnn.matmul(x, w), approximate=False)


def mlp(params: Any, x: Any) -> Any:
    for w, b in params["hidden"]:
        x = jax.nn.silu(x @ w + b)
    return {"logits": x @ params["last"].T}


HEADS = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)


def scored(q: Any, k: Any, v: Any, c: Any) -> Any:
    """A function of scores, of their places, and of a number that it takes or captures; heads before queries."""

    def function(s: Any, b: Any, h: Any, i: Any, j: Any, by: Any) -> Any:
        return jnp.where((i >= j) | (j < 2), jnp.sin(s) * by - 0.25 * abs(i - j).astype(s.dtype) + c[0], -jnp.inf)

    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return dnn.attention(q, k, v, layout="BNTH", score_fn=function, score_arrays=(c[1],))


def of_heads(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (b + 1).astype(s.dtype) / (h + 2).astype(s.dtype)


def near(q: Any) -> Any:
    return q[:1, :, :, :1].swapaxes(1, 2)


def batch(x: Any, s: Any, b: Any, r: Any) -> Any:
    return dnn.batch_norm(x, scale=s, bias=b, residual=r, activation="relu", eps=0.5)[:3]


def heads(x: Any, w: Any) -> Any:
    q, k, v = jnp.split((x @ w).reshape(2, 8, 2, 12), 3, axis=-1)
    return dnn.attention(q, k, v, causal=True).reshape(2, 8, 8)


def masked_softmax(q: Any, k: Any) -> Any:
    s = jnp.einsum("btd,bsd->bts", q, k)
    return dnn.softmax(jnp.where(q[..., :1] > 0, s, -1e9), axis=-1)


def gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: (jax.nn.relu(dnn.conv(x, w, padding=1)) ** 2).sum())(w)


def image_gradient(x: Any, w: Any) -> Any:
    return jax.grad(lambda x: (dnn.conv(jax.nn.relu(x), w, padding=1) ** 2).sum())(x)


BLOCK: Any = {"hidden": [numbers((6, 5), (5,)), numbers((5, 4), (4,))], "last": numbers((3, 4))[0]}
FUNCTIONS: list[tuple[Callable[..., Any], list[Any], tuple[tuple[str, ...], ...]]] = [
    (relu_block, numbers(X, FILTER, CHANNELS), (("conv_fprop_2", "mul_3", "add_5", "relu_fwd_6"),)),
    (conv_epilogue, numbers(X, FILTER, CHANNELS, (2, 5, 7, 4)), (("conv_fprop", "mul", "add", "add", "gelu_fwd"),)),
    (layer, numbers((2, 5, 6), (6, 4), CHANNELS), (("matmul_1", "add_3", "gelu_approx_tanh_fwd_4"),)),
    (exact_gelu, numbers((5, 6), (6, 4)), (("matmul", "gelu_fwd"),)),
    (mlp, [BLOCK, numbers((7, 6))[0]], (("matmul", "add", "swish_fwd"),) * 2 + (("transpose", "matmul"),)),
    (batch, numbers(X, (6,), (6,), X), (("batchnorm", "add", "relu_fwd"),)),
    (lambda x, s, b: dnn.layer_norm(x, scale=s, bias=b, eps=0.5), numbers(X, (6,), (6,)), ()),
    (lambda x: dnn.layer_norm(x, eps=0.5), numbers(X), ()),
    (lambda x, s: dnn.rms_norm(x, scale=s, return_statistics=True, eps=0.5), numbers(X, (6,)), ()),
    (lambda x, s: dnn.batch_norm(x, scale=s, eps=0.5), numbers(X, (6,)), ()),
    (lambda x, s: dnn.group_norm(x, groups=2, scale=s, eps=0.5), numbers(X, (6,)), ()),
    (lambda x: dnn.pool(x, window=2, mode="max"), numbers(X), ()),
    (lambda x, y: jnp.stack([x, y.T, x * 2], 1), numbers((3, 5), (5, 3)), ()),
    (lambda x, y: jnp.stack([x[:, None], y]) + jnp.stack([y, y]), numbers((3, 5), (3, 1, 5)), ()),
    (lambda x: dnn.pool(x, window=3, padding=1, mode="average_exclude_padding"), numbers(X), ()),
    (lambda x: dnn.activation(x, activation=("leaky_relu", 0.1)), numbers(X), ()),
    (lambda x: jax.nn.logsumexp(x, axis=1), numbers(X), ()),
    (heads, numbers((2, 8, 8), (8, 24)), ()),
    (masked_softmax, numbers((2, 5, 3), (2, 4, 3)), ()),
    (lambda q, k: dnn.attention(q, k, k, window=(2, 1), scale=0.5), numbers((2, 5, 2, 8), (2, 5, 2, 8)), ()),
    (scored, numbers(*HEADS, (4,)), ()),
    (lambda q, k, v, s: dnn.attention(q, k, v, alibi_slopes=s, bias=near(q), softcap=2.0), numbers(*HEADS, (4,)), ()),
    (lambda q, k, v: dnn.attention(q, k, v, score_fn=of_heads), numbers(*HEADS), ()),
    (lambda q, k, v, s: dnn.attention(q, k, v, sinks=s, causal=True), numbers(*HEADS, (4,)), ()),
    (lambda a, b: a[:, None] * b[None] + a.sum(), numbers((3,), (4,)), ()),
    (gradient, numbers(FILTER, X), ()),
    (image_gradient, numbers(X, FILTER), ()),
    (lambda a, b: jnp.tensordot(a, b, 2), numbers((5, 3, 2), (3, 2, 4)), ()),
    (lambda x: lax.stop_gradient(x) - x.mean((1, 2), keepdims=True), numbers(X), ()),
    (lambda x, y: (x, x.sum(), jnp.clip(y, -0.5, 0.5) ** 3), numbers((3, 4), (2,)), ()),
]


def _kinds(fused: Any) -> Any:
    """Nodes without their numbers."""
    return tuple(tuple(name.rstrip("0123456789").rstrip("_") for name in names) for names in fused)


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_a_graph_computes_its_function(number: int):
    """The definition of the graph gives what the function gives in float64; the plan is within the bound."""
    function, arrays, fused = FUNCTIONS[number]
    graph, given = traced(function, *arrays)
    plan = graph.plan()
    found = plan(given)
    if fused:
        assert _kinds(plan.explain().fused) == _kinds(fused)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: v.astype(np.float64), arrays)
        wanted = jax.tree_util.tree_leaves_with_path(jax.jit(function)(*wide))
    named = {f"out{jax.tree_util.keystr(path)}": np.asarray(v) for path, v in wanted}
    by_definition = definition.evaluate(graph.describe(), given)
    assert {t.name for t in graph.outputs()} == set(named)
    for tensor in graph.outputs():
        close(np.asarray(by_definition[tensor.uid], np.float64), named[tensor.name])
        assert found[tensor].shape == (named[tensor.name].shape or (1,))
    try:
        assert worst(graph, given, found) <= 1
    except NotImplementedError:  # nodes whose bound is for exact inputs alone
        for tensor in graph.outputs():
            size = np.abs(named[tensor.name]).max()
            assert np.abs(np.asarray(found[tensor], np.float64) - named[tensor.name]).max() <= 1e-5 * size


SCORED: list[tuple[Callable[..., Any], str]] = [
    (lambda s, b, h, i, j: 3 * jnp.tanh(s / 3), "softcap"),
    (lambda s, b, h, i, j: s - 0.25 * abs(i - j).astype(s.dtype), "bias"),
    (lambda s, b, h, i, j: s + jnp.exp2(-h.astype(s.dtype)) * (j - i).astype(s.dtype), "alibi_slopes"),
    (lambda s, b, h, i, j: jnp.where(i >= j, s, -jnp.inf), "causal"),
    (lambda s, b, h, i, j: jnp.where((j < 2) | (i >= j), s, -jnp.inf), "mask"),
]


@pytest.mark.parametrize("number", range(len(SCORED)))
def test_a_traced_function_of_scores_is_given_as_options(number: int):
    """So that kernels serve in the graph what they do not serve in the function; lengths are traced too."""
    function, named = SCORED[number]
    lengths = [np.array(n, np.int32) for n in ((5, 3), (4, 7))]
    how = lambda m, n: {"query_lengths": m, "key_lengths": n}
    attend = lambda q, k, v, m, n: dnn.attention(q, k, v, score_fn=function, **how(m, n))
    arrays = [*numbers(*HEADS), *lengths]
    graph, given = traced(attend, *arrays)
    plan = graph.plan()
    assert plan.parts[-1].notes == (f"score_mod is given as {named}",)
    (found,) = plan(given).values()
    np.testing.assert_allclose(found, attend(*arrays), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_those_of_tensors(dtype: str):
    """What the function rounds between operations is held in float32; operands and outputs are rounded."""
    arrays = [jnp.asarray(v).astype(dtype) for v in numbers((5, 6), (6, 4), CHANNELS)]
    graph, given = traced(lambda x, w, b: jax.nn.relu(x @ w + b).astype(jnp.float32) * 2, *arrays)
    assert {t.data_type for t in graph.inputs()} == {dtype}
    found = graph.plan()(given)
    (tensor,) = graph.outputs()
    assert found[tensor].dtype == np.float32
    assert worst(graph, given, found) <= 1


def test_int8_is_multiplied_in_int32():
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((5, 6), (6, 4)))
    scale = numbers(CHANNELS)[0]
    graph, given = traced(lambda a, b, s: dnn.matmul(a, b, alpha=s, out_dtype="float32"), a, b, scale)
    plan = graph.plan()
    assert _kinds(plan.explain().fused) == (("matmul", "mul"),)
    (found,) = plan(given).values()
    np.testing.assert_allclose(found, (a.astype(np.int64) @ b.astype(np.int64)) * scale, rtol=1e-6)


def test_the_plan_is_a_function_of_the_same_arrays():
    arrays = numbers(X, FILTER, CHANNELS)
    graph = trace(relu_block, *arrays, name="block")
    assert graph.name == "block"
    assert [t.name for t in graph.inputs()] == ["x", "w", "b"]
    np.testing.assert_allclose(graph.function()(*arrays), relu_block(*arrays), rtol=1e-5, atol=1e-5)
    again = Graph.from_json(graph.to_json())
    np.testing.assert_array_equal(again.function()(*arrays), graph.function()(*arrays))


def test_images_keep_their_memory():
    """What a convolution reads in the order of its axes lies channels last, as the array does: nothing is moved."""
    graph = trace(relu_block, *numbers(X, FILTER, CHANNELS))
    (conv,) = (node for node in graph.nodes if node.op == "conv_fprop")
    assert conv.inputs["image"].get_dim() == (2, 6, 5, 7)
    assert conv.inputs["image"].get_shape() == X


def gelu_by_hand(x: Any, both: bool) -> Any:
    """As jax.nn.gelu has it, with what it is made of."""
    cdf = 0.5 * (1.0 + jnp.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * (x**3))))
    return (x * cdf, cdf) if both else x * cdf


def test_an_activation_of_which_a_part_is_read_is_no_node():
    (x,) = numbers((4, 5))
    modes = lambda both: [n.attributes["mode"] for n in trace(lambda x: gelu_by_hand(x, both), x).nodes]
    assert modes(False) == ["GELU_APPROX_TANH_FWD"]
    assert "GELU_APPROX_TANH_FWD" not in modes(True)
    graph, given = traced(lambda x: gelu_by_hand(x, True), x)
    found = definition.evaluate(graph.describe(), given)
    for number, wanted in enumerate(gelu_by_hand(x.astype(np.float64), True)):
        np.testing.assert_allclose(found[graph.find(f"out[{number}]").uid], wanted, rtol=1e-5, atol=1e-6)


def test_shapes_serve_as_well_as_arrays_and_what_is_not_read_is_no_input():
    x = jax.ShapeDtypeStruct((3, 4), "float32")
    graph = trace(lambda x, unread: x + 1, x, x)
    assert [t.name for t in graph.inputs()] == ["x"]


# Hundreds of functions that nobody wrote, of operations that NumPy has too.


class Drawn:
    """A function, as steps over the arrays so far; each step is a function of a module and these arrays."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([20261127, seed])
        self.steps: list[Callable[[Any, list[Any]], Any]] = []
        self.arrays = [self.rng.standard_normal(self.shape()).astype(np.float32) for _ in range(2)]
        self.known = [np.asarray(v, np.float64) for v in self.arrays]
        while len(self.steps) < self.rng.integers(3, 10):
            self.grow()

    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.rng.integers(1, 5, self.rng.integers(1, 5)))

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def grow(self) -> None:
        """A step, kept if NumPy's result is of a size and magnitude to go on with."""
        step = self.pick(self.unary, self.binary, self.reduced, self.turned, self.reshaped, self.product, self.chosen)()
        with np.errstate(all="ignore"):
            found = step(np, self.known)
        if 0 < found.size <= 500 and np.isfinite(found).all() and np.abs(found).max() < 100:
            self.steps.append(step)
            self.known.append(found)

    def at(self) -> int:
        return len(self.known) - 1 - int(self.rng.integers(min(3, len(self.known))))

    def unary(self) -> Callable[[Any, list[Any]], Any]:
        i, kind = self.at(), int(self.rng.integers(9))
        return lambda xp, v: (
            (lambda x: xp.tanh(x)),
            (lambda x: xp.exp(-xp.abs(x))),
            (lambda x: xp.sqrt(xp.abs(x) + 0.5)),
            (lambda x: xp.maximum(x, 0)),
            (lambda x: x * x - 0.5),
            (lambda x: 1 / (x * x + 1)),
            (lambda x: xp.clip(x, -1, 0.75)),
            (lambda x: xp.sin(x) + x**3 * 0.125),
            (lambda x: xp.log(xp.abs(x) + 1.5)),
        )[kind](v[i])

    def binary(self) -> Callable[[Any, list[Any]], Any]:
        """With another that is broadcast: with one of its sums, of which the axes are kept or put elsewhere."""
        i, kind, axis = self.at(), int(self.rng.integers(4)), int(self.rng.integers(self.known[-1].ndim or 1))

        def step(xp: Any, v: list[Any]) -> Any:
            x = v[i]
            other = v[-1] if v[-1].shape == x.shape else x.sum(axis % x.ndim, keepdims=True) if x.ndim else x
            if kind == 3 and x.ndim:
                return x[..., None] * x.mean(-1)[..., None, None]
            return (x + other, x - other, x * other)[kind % 3]

        return step

    def reduced(self) -> Callable[[Any, list[Any]], Any]:
        i, kind, keep = self.at(), self.pick("sum", "max", "min", "mean"), bool(self.rng.integers(2))
        axes = tuple(a for a in range(self.known[i].ndim) if self.rng.random() < 0.4) or None
        axes = axes if self.known[i].ndim else None
        return lambda xp, v: getattr(xp, kind)(v[i], axis=axes, keepdims=keep)

    def turned(self) -> Callable[[Any, list[Any]], Any]:
        i = self.at()
        order = tuple(int(a) for a in self.rng.permutation(self.known[i].ndim))
        return lambda xp, v: xp.transpose(v[i], order)

    def reshaped(self) -> Callable[[Any, list[Any]], Any]:
        i, kind = self.at(), int(self.rng.integers(5))
        x = self.known[i]
        axis = int(self.rng.integers(x.ndim)) if x.ndim else 0
        shape = (*x.shape[:axis], -1) if kind == 0 else (1, *x.shape, 1) if kind == 1 else x.shape[::-1]

        def step(xp: Any, v: list[Any]) -> Any:
            if kind < 3 or not v[i].ndim:
                return v[i].reshape(shape if kind < 3 else v[i].shape)
            if kind == 3:
                return v[i][(slice(None),) * axis + (slice(None, None, 2),)]
            return xp.concatenate([v[i], v[i] * 0.5], axis)

        return step

    def product(self) -> Callable[[Any, list[Any]], Any]:
        i, kind = self.at(), int(self.rng.integers(4))

        def step(xp: Any, v: list[Any]) -> Any:
            x = v[i]
            if x.ndim < 2 or kind == 3:
                return xp.einsum("...,...->...", x, x) if x.ndim else x
            y = xp.swapaxes(x, -1, -2)
            return (x @ y, xp.tensordot(x, x, (0, 0)), xp.einsum("...ij,...kj->...ik", x, x))[kind]

        return step

    def chosen(self) -> Callable[[Any, list[Any]], Any]:
        i, j = self.at(), self.at()
        return lambda xp, v: xp.where(v[i] > 0.25, v[i] if v[j].shape != v[i].shape else v[j], v[i] * 0.5)

    def function(self, xp: Any) -> Callable[..., Any]:
        def run(a: Any, b: Any) -> Any:
            found = [a, b]
            for step in self.steps:
                found.append(step(xp, found))
            return found[-1], found[-2]

        return run


EACH = 10


@pytest.mark.parametrize("seed", range(30))
def test_drawn_functions(seed: int):
    """The definition of every graph gives NumPy's numbers; the plan of one in ten is run as well."""
    for number in range(EACH * seed, EACH * (seed + 1)):
        drawn = Drawn(number)
        graph, given = traced(drawn.function(jnp), *drawn.arrays)
        wanted = drawn.function(np)(*(v.astype(np.float64) for v in drawn.arrays))
        found = definition.evaluate(graph.describe(), given)
        for tensor in graph.outputs():
            value = wanted[int(tensor.name[4:-1])]
            close(np.asarray(found[tensor.uid], np.float64), value)
        if number % EACH == 0:
            assert worst(graph, given, graph.plan()(given)) <= 1, f"Drawn({number})"


# What is refused


def closed_over(x: Any) -> Any:
    return x + numbers((3, 4))[0]


REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    (lambda x: jnp.sort(x), "sort", "that a graph has a node for"),
    (lambda x: jnp.cumsum(x, 0), "cumsum", "that a graph has a node for"),
    (lambda x: jnp.argmax(x, 0), "argmax", "that a graph has a node for"),
    (lambda x: x[(x[:, 0] > 0).astype(jnp.int32)], "gather", "that a graph has a node for"),
    (lambda x: jnp.flip(x, 0), "rev", "that a graph has a node for"),
    (lambda x: jnp.pad(x, 1), "pad", "that a graph has a node for"),
    (lambda x: lax.fori_loop(0, 3, lambda _, v: v * 2, x), "scan", "that a graph has a node for"),
    (lambda x: lax.cond(x.sum() > 0, jnp.exp, jnp.sin, x), "cond", "that a graph has a node for"),
    (lambda x: jnp.expm1(x), "expm1", "that a graph has a node for"),
    (lambda x: x.astype(jnp.int32), "convert_element_type", "that rounds as a graph does"),
    (lambda x: x.astype(jnp.complex64), "convert_element_type", "of dtypes that a graph has"),
    (lambda x: (x > 0).astype(jnp.int8) + jnp.int8(1), "convert_element_type", "that rounds as a graph does"),
    (lambda x: (x > 0).astype(jnp.int32) // 2, "div", "of floats"),
    (lambda x: jnp.broadcast_to(x.sum(0), (3, 4)) @ x.T, "dot_general", "whose operand is not broadcast"),
    (lambda x: dnn.lrn(x.reshape(1, 3, 4, 1)), "window_sum", "that a graph has a node for"),
    (lambda x: dnn.dropout(x, jax.random.key(0), rate=0.5), "random_seed", "of dtypes that a graph has"),
    (
        lambda x: dnn.conv(x.reshape(1, 3, 4, 1), x[:1, :1, None, None], padding=-1),
        "pad",
        "that a graph has a node for",
    ),
    (
        lambda x: dnn.attention(*[x.reshape(1, 3, 1, 4)] * 3, score_fn=lambda s, b, h, i, j: s * x[0][j]),
        "gather",
        "that a graph has a node for",
    ),
    (
        lambda x: dnn.attention(*[x.reshape(1, 3, 1, 4)] * 3, mask=x[None, None, :, :3] > 0),
        "jaxdnn_attention",
        "of attention with no more than a bias, slopes, sinks and lengths of queries and keys, not mask",
    ),
    (lambda x: (jax.debug.print("{}", x), x + 1)[1], "debug_print", "that a graph has a node for"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_has_no_node_is_named_with_its_line(number: int):
    function, primitive, why = REFUSED[number]
    with pytest.raises(GraphError) as error:
        trace(function, np.ones((3, 4), np.float32))
    assert error.value.attribute == "primitive"
    assert why in error.value.expected
    assert error.value.got == primitive
    first = function.__code__.co_firstlineno
    assert error.value.where in [f"function '<lambda>', {__file__}:{first + more}" for more in range(3)]


def test_arrays_that_a_function_closes_over_and_results_that_are_broadcast_are_refused():
    x = np.ones((3, 4), np.float32)
    said = r"function 'closed_over': `function` must be without arrays that it closes over, .* got 'float32\[3, 4\]'"
    with pytest.raises(GraphError, match=said):
        trace(closed_over, x)
    with pytest.raises(GraphError, match=r"`out` must be computed from an array of its shape, .* got \(3, 4\)"):
        trace(lambda x: jnp.broadcast_to(x.sum(0), (3, 4)), x)
    with pytest.raises(GraphError, match=r"`x` must be an array or a jax\.ShapeDtypeStruct, got 3"):
        trace(lambda x: x, 3)
    for wrong in (np.ones((0, 2), np.float32), np.ones(2, np.complex64), np.ones((1,) * 9, np.float32)):
        with pytest.raises(GraphError, match=r"`x` must be of a dtype among .*, with at most 8 axes and no empty one"):
            trace(lambda x: x, wrong)
