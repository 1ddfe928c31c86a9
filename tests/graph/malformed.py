"""Malformed graphs, plans and functions, drawn: a call that is right but for one thing, and what that thing is called.

What is drawn for an argument may happen to be right; then the call must do what it says. Anything else must be refused
by an error of graphs, which names node or tensor, attribute, what was expected and what was got.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn._src.graph.tensors import DTYPES
from jaxdnn.graph import Graph, GraphError, NotOffered, Plan, Tensor, plans, trace
from tests.graph.examples import EXAMPLES

Draw = np.random.Generator
IMAGE = (2, 4, 5, 3)

# What is drawn for an argument: numbers, texts, containers, arrays, tensors of this graph and of another.
JUNK: tuple[Callable[[Graph], Any], ...] = (
    *(lambda g, v=v: v for v in (None, -1, 0, 3, 1.5, True, 2**70, -(2.0**80), np.nan, np.inf, 1j)),
    *(lambda g, v=v: v for v in ("x", "float32", "INT32", "ADD", "", b"x", np.float32(2), np.int64(2))),
    *(lambda g, v=v: v for v in ([], [1], [1, 2], (1, 2, 3, 4), [2**65] * 2, [None], ["a", "b"], (0.5, 1), {}, {1, 2})),
    *(lambda g, v=v: v for v in (range(2), slice(0, 1), object(), np.ones((2, 3)), [[1, 2], [3, 4]])),
    *(lambda g: jnp.ones(3), lambda g: lambda *_: None, lambda g: iter([1, 2])),
    *(lambda g, dim=dim: g.tensor(dim) for dim in ((1,), (2, 3, 4), (1, 1, 1, 1), (2, 4, 5, 8))),
    *(lambda g, dtype=dtype: g.tensor((2, 1, 1, 1), data_type=dtype) for dtype in ("int32", "bool", "float8_e5m2")),
    lambda g: Graph("other").tensor((1,)),
)


def calls(g: Graph) -> dict[str, dict[str, Any]]:
    """A call of each method that makes a node of products, blocks, attention or moves, which is right."""
    t: Callable[..., Any] = lambda *dim, dtype=None: g.tensor(dim, data_type=dtype)
    q, k, v, x = t(2, 4, 5, 8), t(2, 2, 7, 8), t(2, 2, 7, 6), t(*IMAGE)
    narrow = [t(*tensor.dim, dtype="float8_e4m3fn") for tensor in (q, k, v)]
    factors = {name: t(1, 1, 1, 1) for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s")}
    return {
        "sdpa": {"q": q, "k": k, "v": v},
        "sdpa_fp8": dict(zip("qkv", narrow, strict=True)) | factors | {"scale_o": 2.0},
        "sdpa_backward": {"q": q, "k": k, "v": v, "o": t(2, 4, 5, 6), "dO": t(2, 4, 5, 6), "stats": t(2, 4, 5, 1)},
        "rope": {"input": q, "freqs": t(5, 1, 1, 6)},
        "matmul": {"A": t(2, 3, 4), "B": t(2, 4, 5)},
        "block_scale_quantize": {"input": t(2, 32), "block_size": 16},
        "block_scale_dequantize": {
            "input": t(2, 32, dtype="float4_e2m1fn"),
            "descale": t(2, 2, dtype="float8_e4m3fn"),
            "block_size": [16],
        },
        "moe_grouped_matmul": {
            "token": t(1, 7, 3),
            "weight": t(4, 3, 5),
            "first_token_offset": t(4, 1, 1, dtype="int32"),
        },
        "conv_fprop": {"image": x, "weight": t(6, 4, 3, 1)},
        "reduction": {"input": x, "mode": "ADD"},
        "concatenate": {"inputs": [x, x], "axis": 1},
        "slice": {"input": x, "slices": [slice(0, 1)] * 4},
        "resample": {"input": x, "mode": "MAXPOOL", "window": [2, 2]},
        "layernorm": {
            "norm_forward_phase": "TRAINING",
            "input": x,
            "scale": t(1, 1, 5, 3),
            "bias": t(1, 1, 5, 3),
            "epsilon": 1e-3,
        },
        "relu": {"input": x},
        "bias": {"input": x, "bias": t(1, 4, 1, 1)},
        "binary_select": {"input0": x, "input1": x, "mask": x},
    }


METHODS = {
    op: tuple(inspect.signature(getattr(Graph, op)).parameters)[1:] for op in calls(Graph(io_data_type="float32"))
}
CASES = [(op, name) for op, names in METHODS.items() for name in names]


def node(rng: Draw) -> tuple[str, Callable[[], Any]]:
    """A node with one argument drawn: what it is, and the call that builds, checks and plans its graph."""
    op, name = CASES[int(rng.integers(len(CASES)))]
    number = int(rng.integers(len(JUNK)))

    def build() -> Any:
        g = Graph("bad", io_data_type="float32")
        made = getattr(g, op)(**{**calls(g)[op], name: JUNK[number](g)})
        found = [t for t in (made if isinstance(made, tuple) else (made,)) if t is not None]
        _ = op == "reduction" and found[0].set_dim((2, 4, 1, 1))
        if op == "block_scale_quantize":
            found[0].set_data_type("float8_e4m3fn")
            found[1].set_data_type("float8_e8m0fnu")
        for tensor in found:
            tensor.set_output(True)
        return g.validate().plans()

    return f"{op}({name}={JUNK[number](Graph(io_data_type='float32'))!r})", build


SPOILT = tuple(
    name for name in EXAMPLES if name.startswith(("sdpa", "block", "matmul", "moe", "rope", "conv", "layernorm"))
)


def tensors(rng: Draw) -> tuple[str, Callable[[], Any]]:
    """An example with one or two of its tensors changed, or an operand that is another tensor of the graph."""
    name = SPOILT[int(rng.integers(len(SPOILT)))]
    changes = [(int(rng.integers(8)), rng.integers(0, 2**31, 9)) for _ in range(int(rng.integers(1, 3)))]

    def build() -> Any:
        g, _ = EXAMPLES[name](np.random.default_rng(1))
        for kind, numbers in changes:
            changed(g, kind, [int(n) for n in numbers])
        g.validate()
        made = g.plans()
        assert Graph.from_json(g.to_json()).describe() == g.describe()
        return str(made[0].explain())

    return f"EXAMPLES[{name!r}] with {[(kind, n.tolist()) for kind, n in changes]}", build


def changed(g: Graph, kind: int, numbers: list[int]) -> None:
    pick = lambda values, i: values[numbers[i] % len(values)]
    tensor: Tensor = pick(list(g.tensors.values()), 0)
    dim = list(tensor.dim or (1,))
    axis = numbers[1] % len(dim)
    if kind == 0:
        tensor.set_data_type(pick(DTYPES, 2))
    elif kind == 1:
        dim[axis] = pick((1, 2, 3, 7, dim[axis] + 1, max(1, dim[axis] - 1)), 2)
    elif kind == 2:
        tensor.set_stride([n % 9 for n in numbers[2 : 2 + len(dim)]])
    elif kind == 3:
        tensor.set_output(numbers[2] % 2 == 0)
    elif kind == 4:
        tensor.is_pass_by_value = True
    elif kind == 5:
        tensor.set_reordering_type("F8_128x4")
    elif kind == 6:
        dim = [*dim, 1] if numbers[2] % 2 else dim[:-1] or [2]
    else:
        made = pick(g.nodes, 2)
        made.inputs[pick(list(made.inputs), 3)] = tensor
    if kind in (1, 6):
        tensor.set_dim(dim).stride = None
    g.changed()


def layer() -> Graph:
    g = Graph("bad", io_data_type="float32")
    y = g.bias(
        g.matmul(g.tensor((2, 5, 8), name="x"), g.tensor((1, 8, 6), name="w"), name="product"), g.tensor((1, 1, 6))
    )
    g.relu(y, name="act").set_output(True)
    return g


KNOBS: tuple[Any, ...] = (
    *({"engine:product": value} for value in ("xla", "ordered", "hopper", "nope", 3, None, ["xla"])),
    *({"determinism": value} for value in ("portable", 3, ["portable"], "none")),
    *({"sm_count": value} for value in (0, "a", 1.5, True, 4)),
    *({"workspace_limit": value} for value in (-1, None, "a", 2**40)),
    *({"engine:nope": "xla"}, {"engine:act": "xla"}, {3: 3}, {None: 1}, {"determinism": "portable", "sm_count": 2}),
)
FILTERS: tuple[Any, ...] = (
    *("A", "B?", "FALLBACK", "portable", "fast", "TENSOR_CORE", "fused", 4, 2**40),
    *(["fused"], ["fused", "single"], ["xla"], ["TENSOR_CORE"], ["NONDETERMINISTIC"], ["RUNTIME_COMPILATION"]),
    *(["STRICT_NAN_PROP"], [np.ones(3)], [[]], [{}], {"xla"}),
)
ARGUMENTS = tuple(inspect.signature(plans).parameters)[1:]
PLANNED = (*ARGUMENTS, "engine_id", "variant_pack", "x", "from_json", "donate")


def plan(rng: Draw) -> tuple[str, Callable[[], Any]]:
    """A plan with one of its arguments drawn: filters, limits, knobs, its engine's number, a variant pack."""
    name = PLANNED[int(rng.integers(len(PLANNED)))]
    pool: list[Any] = [*KNOBS, *FILTERS, *(junk(Graph()) for junk in JUNK[:-8])]
    value = pool[int(rng.integers(len(KNOBS)))] if name == "knobs" and rng.random() < 0.7 else None
    value = pool[int(rng.integers(len(pool)))] if value is None else value
    ones = {
        "x": np.ones((2, 5, 8), np.float32),
        "w": np.ones((1, 8, 6), np.float32),
        "tensor_4": np.ones(6, np.float32),
    }
    build: Mapping[str, Callable[[Graph], Any]] = {
        "engine_id": lambda g: g.create_execution_plan(value, {}),
        "variant_pack": lambda g: g.plan()(value),
        "x": lambda g: g.plan()({**ones, "x": value}),
        "from_json": lambda g: Plan.from_json(value),
    }
    made = build.get(name, lambda g: g.plans(**{name: value}))
    return f"{name}={value!r}", lambda: made(layer())


X = jax.ShapeDtypeStruct((3, 4), "float32")
UNKNOWN = (jnp.sort, jnp.argsort, jnp.linalg.svd, jnp.fft.fft, jnp.expm1, jnp.cbrt, jax.scipy.special.erfinv)


def traced(rng: Draw) -> tuple[str, Callable[[], Any]]:
    """A function with a step that no node computes, or a result, an argument or a decision that a graph has not."""
    kind = int(rng.integers(6))
    step = UNKNOWN[int(rng.integers(len(UNKNOWN)))]
    before = int(rng.integers(4))
    junk = JUNK[int(rng.integers(len(JUNK) - 8))](Graph())

    def grown(x: Any) -> Any:
        for i in range(before):
            x = (jnp.tanh, jnp.exp, jnp.sin, jax.nn.relu)[i](x)
        return x

    functions: tuple[Callable[[Any], Any], ...] = (
        lambda x: step(grown(x)),
        lambda x: (grown(x), junk),
        lambda x: grown(x) if x.sum() > before else -x,
        lambda x: grown(x) * int(x[0, 0]),
        lambda x: (jax.debug.print("{}", x), grown(x))[1],
        lambda x: grown(x) + np.ones((3, 4), np.float32),
    )
    return f"trace {kind}, {step.__name__}, {before}, {junk!r}", lambda: trace(functions[kind], X)


DRAWN = {"node": node, "tensors": tensors, "plan": plan, "trace": traced}


def outcome(call: Callable[[], Any]) -> str:
    """Whether a call was refused by an error of graphs; any other error is raised."""
    try:
        call()
    except GraphError as error:
        said = f"{error.where}: `{error.attribute}` must be {error.expected}, got "
        return "refused" if str(error).startswith(said) else f"refused by {error}"
    except NotOffered:
        return "not offered"
    return "accepted"
