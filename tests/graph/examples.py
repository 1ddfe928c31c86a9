"""A small graph of each kind of node and of each pointwise mode, with its data.

An example is a function of a generator of random numbers; it returns the graph and its arrays by uid. Sizes differ
from axis to axis, and layouts are channels last where a node has channels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdnn._src.graph.pointwise import MODES
from jaxdnn._src.graph.tensors import memory_shape, numpy_dtype
from jaxdnn.graph import Graph, Tensor
from jaxdnn_reference import graph as definition

Arrays = dict[int, np.ndarray[Any, Any]]
Example = tuple[Graph, Arrays]
EXAMPLES: dict[str, Callable[[np.random.Generator], Example]] = {}


def example(function: Callable[[np.random.Generator], Example]) -> Callable[[np.random.Generator], Example]:
    EXAMPLES[function.__name__] = function
    return function


def last(dim: Sequence[int]) -> tuple[int, ...]:
    """Strides of channels last."""
    order = (0, *range(2, len(dim)), 1)
    strides, step = [0] * len(dim), 1
    for axis in reversed(order):
        strides[axis], step = step, step * dim[axis]
    return tuple(strides)


def array(
    tensor: Tensor, rng: np.random.Generator, low: float | None = None, high: float = 2.0
) -> np.ndarray[Any, Any]:
    """Numbers for a tensor: normal, or uniform from `low` to `high`."""
    shape = memory_shape(tensor.get_dim(), tensor.get_stride())
    dtype = numpy_dtype(tensor.get_data_type())
    if dtype.kind in "iu":
        return rng.integers(-5, 6, shape).astype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    values = rng.standard_normal(shape) if low is None else rng.uniform(low, high, shape)
    return values.astype(np.float32).astype(dtype)


def filled(graph: Graph, rng: np.random.Generator, **given: Any) -> Example:
    """The graph with normal numbers for its inputs, but for those given by name."""
    arrays = {t.uid: given[t.name] if t.name in given else array(t, rng) for t in graph.inputs()}
    return graph, {uid: np.asarray(v) for uid, v in arrays.items()}


def new(io: str = "float32", **types: Any) -> Graph:
    return Graph("example", io_data_type=io, **types)


# The domains of functions that are not defined, or not continuous, everywhere.
DOMAINS = {
    "SQRT": ((0.1, 4.0),),
    "RSQRT": ((0.1, 4.0),),
    "LOG": ((0.1, 4.0),),
    "RECIPROCAL": ((0.3, 4.0),),
    "DIV": ((-3.0, 3.0), (0.3, 4.0)),
    "MOD": ((-9.0, 9.0), (0.5, 3.0)),
    "FLOOR_MOD": ((-9.0, 9.0), (0.5, 3.0)),
    "POW": ((0.3, 3.0), (-2.0, 2.0)),
    "TAN": ((-1.4, 1.4),),
    "ATAN2": ((0.2, 2.0), (-2.0, 2.0)),
}


def pointwise(mode: str, rng: np.random.Generator) -> Example:
    g = new()
    how: dict[str, Any] = {"axis": 1} if mode == "GEN_INDEX" else {}
    if mode.startswith("RELU"):
        how = {"lower_clip": -0.5, "upper_clip": 1.5, "negative_slope": 0.25}
    if mode.startswith(("ELU", "SOFTPLUS", "SWISH")):
        how = {f"{mode.partition('_')[0].lower()}_{'alpha' if mode.startswith('ELU') else 'beta'}": 1.5}
    count, dim = MODES[mode].inputs, (3, 4, 5)
    small = mode.endswith("BWD") or count == 3
    inputs: list[Any] = [g.tensor(dim if i == 0 or small else (1, 4, 1), name=f"x{i}") for i in range(count)]
    if count == 3:
        inputs[2].set_data_type("bool")
    g.pointwise(mode, *inputs, **how).set_output(True)
    domains = DOMAINS.get(mode, ())
    named = {f"x{i}": array(inputs[i], rng, *ends) for i, ends in enumerate(domains)}
    if mode.startswith(("CMP", "LOGICAL")):
        named = {t.name: rng.integers(-1, 2, t.get_dim()).astype(np.float32) for t in inputs}
    return filled(g, rng, **named)


for _mode in MODES:
    EXAMPLES[f"pointwise_{_mode}"] = lambda rng, mode=_mode: pointwise(mode, rng)


@example
def conv_fprop(rng: np.random.Generator) -> Example:
    """Groups, a stride, a dilation, padding that differs before and behind."""
    g, x, w = new(), (2, 6, 9, 7), (8, 3, 3, 2)
    x, w = g.tensor(x, last(x), name="x"), g.tensor(w, last(w), name="w")
    how: dict[str, Any] = {"stride": [2, 1], "dilation": [1, 2], "convolution_mode": "CONVOLUTION"}
    g.conv_fprop(x, w, pre_padding=[1, 0], post_padding=[2, 1], **how).set_output(True)
    return filled(g, rng)


@example
def conv_dgrad(rng: np.random.Generator) -> Example:
    g, dy, w = new(), (2, 8, 5, 4), (8, 3, 3, 2)
    dy, w = g.tensor(dy, last(dy), name="dy"), g.tensor(w, name="w")
    g.conv_dgrad(dy, w, padding=[1, 0], stride=[2, 2]).set_dim((2, 3, 10, 8)).set_output(True)
    return filled(g, rng)


@example
def conv_wgrad(rng: np.random.Generator) -> Example:
    g, x, dy = new(), (2, 6, 9), (2, 4, 5)
    x, dy = g.tensor(x, name="x"), g.tensor(dy, name="dy")
    g.conv_wgrad(x, dy, padding=[1], stride=[2]).set_dim((4, 3, 3)).set_output(True)
    return filled(g, rng)


@example
def conv_int8(rng: np.random.Generator) -> Example:
    g, x, w = new("int8", compute_data_type="int32", intermediate_data_type="int32"), (2, 6, 4, 5), (4, 6, 1, 1)
    y = g.conv_fprop(g.tensor(x, last(x), name="x"), g.tensor(w, last(w), name="w"))
    y.set_output(True).set_data_type("int32")
    return filled(g, rng)


@example
def matmul(rng: np.random.Generator) -> Example:
    """Six heads of queries share two of keys, and one matrix serves the batch."""
    g = new()
    g.matmul(g.tensor((2, 6, 4, 5), name="a"), g.tensor((1, 2, 5, 3), name="b")).set_output(True)
    return filled(g, rng)


@example
def matmul_overrides(rng: np.random.Generator) -> Example:
    g = new()
    m, n, k = (g.tensor((3, 1, 1), data_type="int32", name=name) for name in "mnk")
    a, b = g.tensor((3, 4, 5), name="a"), g.tensor((3, 5, 6), name="b")
    g.matmul(a, b, padding=-1.0, M_override=m, N_override=n, K_override=k).set_output(True)
    sizes = {"m": [4, 2, 0], "n": [6, 1, 3], "k": [5, 3, 0]}
    return filled(g, rng, **{name: np.array(v, np.int32).reshape(3, 1, 1) for name, v in sizes.items()})


def experts(mode: str, rng: np.random.Generator) -> Example:
    g = new()
    token, weight = g.tensor((1, 7, 3), name="token"), g.tensor((4, 3, 5), name="weight")
    first = g.tensor((4, 1, 1), data_type="int32", name="first")
    rows = {"NONE": 0, "GATHER": 9, "SCATTER": 7}[mode]
    index = g.tensor((1, rows, 1), data_type="int32", name="index") if rows else None
    g.moe_grouped_matmul(token, weight, first, index, mode).set_output(True)
    at = rng.permutation(7) if mode == "SCATTER" else rng.integers(0, 7, rows)
    named = {
        "first": np.array([1, 3, 3, 6], np.int32).reshape(4, 1, 1),
        "index": at.astype(np.int32).reshape(1, rows, 1),
    }
    return filled(g, rng, **named)


for _mode in ("NONE", "GATHER", "SCATTER"):
    EXAMPLES[f"moe_grouped_matmul_{_mode}"] = lambda rng, mode=_mode: experts(mode, rng)


@example
def moe_grouped_matmul_bwd(rng: np.random.Generator) -> Example:
    g = new()
    first = g.tensor((3, 1, 1), data_type="int32", name="first")
    g.moe_grouped_matmul_bwd(g.tensor((1, 7, 5), name="dout"), g.tensor((1, 7, 3), name="token"), first).set_output(
        True
    )
    return filled(g, rng, first=np.array([0, 2, 2], np.int32).reshape(3, 1, 1))


def reduction(mode: str, rng: np.random.Generator) -> Example:
    g = new()
    x = g.tensor((3, 4, 5), name="x")
    g.reduction(x, mode, is_deterministic=mode == "ADD").set_dim((3, 1, 1)).set_output(True)
    values = rng.standard_normal((3, 4, 5)).astype(np.float32)
    values[:, 0, 0] = 0 if mode == "MUL_NO_ZEROS" else values[:, 0, 0]
    return filled(g, rng, x=values)


for _mode in ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS"):
    EXAMPLES[f"reduction_{_mode}"] = lambda rng, mode=_mode: reduction(mode, rng)


@example
def reshape_view(rng: np.random.Generator) -> Example:
    """The memory of channels last, seen as rows."""
    g, x = new(), (2, 3, 4, 5)
    g.reshape(g.tensor(x, last(x), name="x")).set_dim((40, 3)).set_output(True)
    return filled(g, rng)


@example
def reshape_logical(rng: np.random.Generator) -> Example:
    g, x = new(), (2, 3, 4, 5)
    g.reshape(g.tensor(x, last(x), name="x"), reshape_mode="LOGICAL").set_dim((6, 20)).set_output(True)
    return filled(g, rng)


@example
def transpose(rng: np.random.Generator) -> Example:
    g = new("bfloat16")
    g.transpose(g.tensor((2, 3, 4), name="x"), [2, 0, 1]).set_output(True)
    return filled(g, rng)


@example
def slices(rng: np.random.Generator) -> Example:
    g = new()
    g.slice(g.tensor((5, 6, 7), name="x"), [slice(1, 4), slice(0, 6, 4), slice(None)]).set_output(True)
    return filled(g, rng)


@example
def concatenate(rng: np.random.Generator) -> Example:
    g = new()
    parts = [g.tensor((2, n, 3), name=f"x{n}") for n in (1, 4, 2)]
    g.concatenate(parts, 1, in_place_index=0).set_output(True)
    return filled(g, rng)


def outputs(made: Any) -> None:
    for tensor in made if isinstance(made, tuple) else (made,):
        _ = tensor and tensor.set_output(True)


def rows(op: str, rng: np.random.Generator) -> Example:
    """Normalised over the last two axes of four."""
    g, x, lead = new(), (3, 2, 4, 5), 3 if op == "adalayernorm" else 1
    names = ("scale", "bias") if op != "rmsnorm" else ("scale",)
    parameters = [g.tensor((lead, 1, 4, 5), name=name) for name in names]
    outputs(getattr(g, op)("TRAINING", g.tensor(x, name="x"), *parameters, epsilon=1e-3))
    return filled(g, rng)


def halves(rng: np.random.Generator, lead: tuple[int, ...], count: int) -> np.ndarray[Any, Any]:
    """Numbers whose mean along the last axis is exactly 0.5."""
    v = rng.integers(-1024, 1024, (*lead, count // 2)) / 512
    return rng.permuted(np.concatenate([v, 1 - v], axis=-1), axis=-1).astype(np.float32)


def rows_backward(op: str, rng: np.random.Generator) -> Example:
    g, dim, lead = new(), (3, 2, 4, 5), 3 if op == "adalayernorm" else 1
    dy, x = g.tensor(dim, name="dy"), g.tensor(dim, name="x")
    scale = g.tensor((lead, 1, 4, 5), name="scale")
    stats = [g.tensor((3, 2, 1, 1), name=name) for name in ("mean", "rstd")]
    values = halves(rng, (3, 2), 20).reshape(dim)
    mean = np.full((3, 2, 1, 1), 0.5, np.float32)
    rstd = 1 / np.sqrt(((values - (0 if op == "rmsnorm" else mean)) ** 2).mean((2, 3), keepdims=True) + 1e-3)
    if op == "rmsnorm":
        outputs(g.rmsnorm_backward(dy, x, scale, stats[1], has_dbias=True))
    else:
        outputs(getattr(g, f"{op}_backward")(dy, x, scale, *stats))
    return filled(g, rng, x=values, mean=mean, rstd=rstd)


for _op in ("layernorm", "rmsnorm", "adalayernorm"):
    EXAMPLES[_op] = lambda rng, op=_op: rows(op, rng)
    EXAMPLES[f"{_op}_backward"] = lambda rng, op=_op: rows_backward(op, rng)


def channels(g: Graph, count: int, *names: str) -> list[Any]:
    return [g.tensor((1, count, 1, 1), name=name) for name in names]


@example
def instancenorm(rng: np.random.Generator) -> Example:
    g, x = new(), (3, 4, 5, 2)
    outputs(g.instancenorm("TRAINING", g.tensor(x, last(x), name="x"), *channels(g, 4, "scale", "bias"), epsilon=1e-3))
    return filled(g, rng)


@example
def instancenorm_backward(rng: np.random.Generator) -> Example:
    g, dim = new(), (3, 4, 5, 2)
    dy, x = g.tensor(dim, last(dim), name="dy"), g.tensor(dim, last(dim), name="x")
    (scale,) = channels(g, 4, "scale")
    stats: list[Any] = [g.tensor((3, 4, 1, 1), name=name) for name in ("mean", "rstd")]
    outputs(g.instancenorm_backward(dy, x, scale, *stats))
    values = halves(rng, (3, 4), 10).reshape(3, 4, 5, 2).transpose(0, 2, 3, 1)
    mean, variance = (f(values, (1, 2)).reshape(3, 4, 1, 1) for f in (np.mean, np.var))
    return filled(g, rng, x=values, mean=mean, rstd=(1 / np.sqrt(variance + 1e-3)).astype(np.float32))


@example
def batchnorm(rng: np.random.Generator) -> Example:
    g, x = new(), (3, 4, 5, 2)
    parameters = channels(g, 4, "scale", "bias", "mean", "variance")
    momentum = g.tensor((1,), is_pass_by_value=True, name="momentum")
    outputs(g.batchnorm(g.tensor(x, last(x), name="x"), *parameters, epsilon=1e-3, momentum=momentum))
    positive = rng.uniform(0.5, 2, (1, 4, 1, 1)).astype(np.float32)
    return filled(g, rng, variance=positive, momentum=np.full(1, 0.25, np.float32))


@example
def batchnorm_inference(rng: np.random.Generator) -> Example:
    g, x = new(), (3, 4, 5, 2)
    g.batchnorm_inference(g.tensor(x, name="x"), *channels(g, 4, "mean", "rstd", "scale", "bias")).set_output(True)
    return filled(g, rng, rstd=rng.uniform(0.5, 2, (1, 4, 1, 1)).astype(np.float32))


@example
def batchnorm_backward(rng: np.random.Generator) -> Example:
    g, dim = new(), (3, 4, 5, 2)
    dy, x = g.tensor(dim, last(dim), name="dy"), g.tensor(dim, last(dim), name="x")
    outputs(g.batchnorm_backward(dy, x, *channels(g, 4, "scale", "mean", "rstd")))
    values = halves(rng, (4,), 30).reshape(4, 3, 5, 2).transpose(1, 2, 3, 0)
    mean, variance = (f(values, (0, 1, 2)).reshape(1, 4, 1, 1) for f in (np.mean, np.var))
    return filled(g, rng, x=values, mean=mean, rstd=(1 / np.sqrt(variance + 1e-3)).astype(np.float32))


@example
def genstats(rng: np.random.Generator) -> Example:
    g, x = new("bfloat16"), (3, 4, 5, 2)
    outputs(g.genstats(g.tensor(x, last(x), name="x")))
    for tensor in g.outputs():
        tensor.set_data_type("float32")
    return filled(g, rng)


@example
def bn_finalize(rng: np.random.Generator) -> Example:
    g = new()
    parameters = channels(g, 4, "sum", "sq_sum", "scale", "bias", "mean", "variance")
    outputs(g.bn_finalize(*parameters, epsilon=1e-3, momentum=0.25, accum_count=30))
    positive = lambda low: rng.uniform(low, 2 * low, (1, 4, 1, 1)).astype(np.float32)
    return filled(g, rng, sq_sum=positive(40), variance=positive(1))


@example
def bn_finalize_inference(rng: np.random.Generator) -> Example:
    g = new()
    outputs(g.bn_finalize_inference(*channels(g, 4, "mean", "variance", "scale", "bias"), epsilon=1e-3))
    return filled(g, rng, variance=rng.uniform(0.5, 2, (1, 4, 1, 1)).astype(np.float32))


@example
def dbn_weight(rng: np.random.Generator) -> Example:
    g, dim = new(), (3, 4, 5, 2)
    dy, x = g.tensor(dim, last(dim), name="dy"), g.tensor(dim, last(dim), name="x")
    outputs(g.dbn_weight(dy, x, *channels(g, 4, "mean", "rstd", "scale")))
    return filled(g, rng, rstd=rng.uniform(0.5, 2, (1, 4, 1, 1)).astype(np.float32))


def resample(mode: str, rng: np.random.Generator) -> Example:
    g, x = new(), (2, 3, 7, 5)
    how: dict[str, Any] = {"window": [3, 2], "stride": [2, 1], "pre_padding": [1, 0], "post_padding": [0, 1]}
    outputs(g.resample(g.tensor(x, last(x), name="x"), mode, generate_index=mode == "MAXPOOL", **how))
    return filled(g, rng)


def resample_backward(mode: str, rng: np.random.Generator) -> Example:
    g, x, dy = new(), (2, 3, 7, 5), (2, 3, 3, 5)
    how: dict[str, Any] = {"window": [3, 2], "stride": [2, 1], "pre_padding": [1, 0], "post_padding": [0, 1]}
    loss, image = g.tensor(dy, last(dy), name="dy"), g.tensor(x, last(x), name="x")
    g.resample_backward(loss, image, mode, **how).set_output(True)
    return filled(g, rng)


for _mode in ("MAXPOOL", "AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING"):
    EXAMPLES[f"resample_{_mode}"] = lambda rng, mode=_mode: resample(mode, rng)
    EXAMPLES[f"resample_backward_{_mode}"] = lambda rng, mode=_mode: resample_backward(mode, rng)


@example
def dropout(rng: np.random.Generator) -> Example:
    """A mask of random numbers, and what it keeps, scaled."""
    g = new()
    seed = g.tensor((1,), data_type="int32", is_pass_by_value=True, name="seed")
    mask = g.rng((4, 6), seed, 5, bernoulli_probability=0.75)
    g.scale(g.mul(g.tensor((4, 6), name="x"), mask), 1 / 0.75).set_output(True)
    mask.set_output(True).set_data_type("bool")
    return filled(g, rng, seed=np.array([-7], np.int32))


def heads(g: Graph, *names: str) -> list[Any]:
    """Queries of four heads, keys and values of two, of lengths 5 and 7."""
    sizes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 6), "o": (2, 4, 5, 6), "dO": (2, 4, 5, 6)}
    # Memory is (B, S, H, D).
    strides = lambda d: (d[1] * d[2] * d[3], d[3], d[1] * d[3], 1)
    return [g.tensor(sizes[name], strides(sizes[name]), name=name) for name in names]


SDPA: dict[str, dict[str, Any]] = {
    "plain": {"attn_scale": 0.3},
    "causal": {"use_causal_mask": True},
    "corner": {"use_causal_mask_bottom_right": True, "sliding_window_length": 3},
    "band": {"diagonal_band_left_bound": 2, "diagonal_band_right_bound": 1, "attn_scale": 0.5},
    "padding": {"use_padding_mask": True, "attn_scale": 0.5},
    "bias": {"bias": True, "attn_scale": 0.5},
    "alibi": {"use_alibi_mask": True, "use_causal_mask": True},
    "sink": {"sink": True},
    "dropout": {"dropout": (0.25, 11), "attn_scale": 0.5},
    "dropout_offset": {"dropout": (0.25, 11, 36), "attn_scale": 0.5},
    "score_mod": {"score_mod": True, "attn_scale": 0.5, "use_padding_mask": True},
}


def soft_causal(g: Graph, s: Tensor, table: Tensor, low: Tensor) -> Tensor:
    """Capped scores, with a number for each key of a head; keys behind the query have another."""
    s = g.add(g.mul(g.tanh(g.mul(s, 0.25)), 4.0), table)
    query, key = (g.gen_index(s, axis).set_data_type("int32") for axis in (2, 3))
    return g.binary_select(s, low, g.cmp_ge(query, key))


def options(g: Graph, kind: str) -> dict[str, Any]:
    how = dict(SDPA[kind])
    if how.pop("bias", False) is True:
        how["bias"] = g.tensor((1, 4, 5, 7), name="bias")
    if how.pop("sink", False):
        how["sink_token"] = g.tensor((1, 4, 1, 1), name="sink")
    if how.pop("score_mod", False):
        table, low = g.tensor((1, 4, 1, 7), name="table"), g.tensor((1, 1, 1, 1), is_pass_by_value=True, name="low")
        how["score_mod"] = lambda g, s: soft_causal(g, s, table, low)
    if how.get("use_padding_mask"):
        how["seq_len_q"], how["seq_len_kv"] = (g.tensor((2, 1, 1, 1), data_type="int32", name=n) for n in ("lq", "lk"))
    return how


LENGTHS = {"lq": np.array([5, 3], np.int32).reshape(2, 1, 1, 1), "lk": np.array([4, 7], np.int32).reshape(2, 1, 1, 1)}


def sdpa(kind: str, rng: np.random.Generator) -> Example:
    g = new()
    q, k, v = heads(g, "q", "k", "v")
    outputs(g.sdpa(q, k, v, **options(g, kind), generate_stats=True))
    return filled(g, rng, low=LOW, **LENGTHS)


LOW = np.full((1, 1, 1, 1), -2.5, np.float32)


def sdpa_fp8(kind: str, rng: np.random.Generator) -> Example:
    """Factors of scores are tensors, or numbers that are known."""
    g = new("float8_e4m3fn")
    q, k, v = heads(g, "q", "k", "v")
    number = lambda name: g.tensor((1, 1, 1, 1), data_type="float32", name=name)
    of_scores = (0.5, 0.25) if kind == "plain" else (number("dq"), number("dk"))
    others: list[Any] = [number(name) for name in ("dv", "ds", "ss", "so")]
    how = {
        name: v.set_data_type("float32") if name in ("bias", "sink_token") else v
        for name, v in options(g, kind).items()
    }
    made = g.sdpa_fp8(q, k, v, *of_scores, *others, **how, generate_stats=True)
    outputs(tuple(t for t in made if t is not None))
    made[0].set_data_type("float16")
    values = {"dq": 0.75, "dk": 0.5, "dv": 1.25, "ds": 2.0**-8, "ss": 2.0**8, "so": 3.0}
    given = {name: np.full((1, 1, 1, 1), value, np.float32) for name, value in values.items()}
    return filled(g, rng, **given, **LENGTHS)


def sdpa_backward(kind: str, rng: np.random.Generator) -> Example:
    """With the results of the forward pass."""
    forward, arrays = sdpa(kind, np.random.default_rng(3))
    o, stats = definition.evaluate(forward.describe(), arrays).values()
    g = new()
    q, k, v, o_, do = heads(g, "q", "k", "v", "o", "dO")
    saved = g.tensor((2, 4, 5, 1), name="stats")
    made = g.sdpa_backward(q, k, v, o_, do, saved, **options(g, kind), generate_dbias=kind == "bias")
    outputs(made)
    given = {forward.tensors[uid].name: v for uid, v in arrays.items()}
    return filled(g, rng, **given, o=o, stats=stats)


for _kind in SDPA:
    EXAMPLES[f"sdpa_{_kind}"] = lambda rng, kind=_kind: sdpa(kind, rng)
    if _kind in ("plain", "causal", "padding", "bias", "sink"):
        EXAMPLES[f"sdpa_fp8_{_kind}"] = lambda rng, kind=_kind: sdpa_fp8(kind, rng)
    if _kind != "alibi":  # the op gives the gradient of slopes too, which the node does not return
        EXAMPLES[f"sdpa_backward_{_kind}"] = lambda rng, kind=_kind: sdpa_backward(kind, rng)


@example
def rope(rng: np.random.Generator) -> Example:
    g = new()
    angles = rng.uniform(-9, 9, (5, 1, 1, 6)).astype(np.float32)
    g.rope(g.tensor((2, 3, 5, 8), name="x"), g.tensor((5, 1, 1, 6), name="angles"), output_scale=1.5).set_output(True)
    return filled(g, rng, angles=angles)


@example
def rope_backward(rng: np.random.Generator) -> Example:
    g = new()
    angles = rng.uniform(-9, 9, (5, 1, 1, 8)).astype(np.float32)
    g.rope_backward(g.tensor((2, 3, 5, 8), name="x"), g.tensor((5, 1, 1, 8), name="angles")).set_output(True)
    return filled(g, rng, angles=angles)


BLOCKS = {
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32),
    "mxfp8_e5m2": ("float8_e5m2", "float8_e8m0fnu", 32),
    "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16),
}


def quantize(kind: str, rng: np.random.Generator) -> Example:
    g, (data, scale, block) = new(), BLOCKS[kind]
    made = g.block_scale_quantize(g.tensor((3, 64), name="x"), block)
    for tensor, dtype in zip(made, (data, scale), strict=True):
        tensor.set_data_type(dtype).set_output(True)
    # Powers of two and few bits, of which quotients by scales are exact: rounded once on either side.
    values = rng.integers(-31, 32, (3, 64)) * 2.0 ** rng.integers(-3, 4, (3, 1))
    return filled(g, rng, x=values.astype(np.float32))


def dequantize(kind: str, rng: np.random.Generator) -> Example:
    g, (data, scale, block) = new(), BLOCKS[kind]
    x, s = g.tensor((3, 64), data_type=data, name="x"), g.tensor((3, 64 // block), data_type=scale, name="s")
    y = g.block_scale_dequantize(x, s, [block], is_negative_scale=kind == "mxfp8_e5m2")
    g.matmul(y, g.tensor((64, 5), name="b")).set_output(True)
    powers = (2.0 ** rng.integers(-5, 5, (3, 64 // block))).astype(np.float32).astype(numpy_dtype(scale))
    return filled(g, rng, s=powers)


for _kind in BLOCKS:
    EXAMPLES[f"block_scale_quantize_{_kind}"] = lambda rng, kind=_kind: quantize(kind, rng)
    EXAMPLES[f"block_scale_dequantize_{_kind}"] = lambda rng, kind=_kind: dequantize(kind, rng)
