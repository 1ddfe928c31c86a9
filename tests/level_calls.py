"""Calls of every op that promises a level, drawn from a seed, with blends: what `test_levels` puts its levels to."""

import dataclasses
import functools as ft
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxdnn as dnn
from tests.norm import cases as norm_cases
from tests.pool import cases as pool_cases
from tests.tensor import cases as tensor_cases

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
REDUCTIONS = ("add", "mul", "min", "max", "amax", "avg", "norm1", "norm2", "mul_no_zeros")
BATCH = 8  # which eight devices divide


@dataclasses.dataclass(frozen=True)
class LevelCall:
    """`function(*arrays)` is the op; `batch` has the axis of every array's batch, `out` the results', None without."""

    name: str
    function: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    batch: tuple[int | None, ...] = ()
    out: int | None = None


def _normal(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    return np.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-2, 3, shape)).astype(dtype)


def calls(seed: int, kind: Callable[[np.random.Generator], Iterator[LevelCall]]) -> Iterator[LevelCall]:
    """The calls of a kind that a seed draws."""
    return kind(np.random.default_rng([seed, zlib.crc32(kind.__name__.encode())]))


def _blended(
    rng: np.random.Generator,
    name: str,
    run: Callable[..., Any],
    /,
    *arrays: np.ndarray,
    batch: Any = None,
    **options: Any,
) -> Iterator[LevelCall]:
    """A call without and with a blend, of static and of traced factors."""
    batch = (0,) * len(arrays) if batch is None else batch
    out = batch[0] if batch else None
    yield LevelCall(f"{name} plain", lambda *a: run(*a, **options), arrays, batch, out)
    yield LevelCall(f"{name} alpha", lambda *a: run(*a, alpha=0.3, **options), arrays, batch, out)
    shape = jax.tree.leaves(jax.eval_shape(lambda *a: run(*a, **options), *arrays))[0]
    prior = _normal(rng, shape.shape, shape.dtype)
    blend = lambda *a: run(*a[:-1], alpha=0.3, beta=0.7, prior=a[-1], **options)
    both = (*arrays, prior)
    yield LevelCall(f"{name} blend", blend, both, (*batch, out) if batch else (), out)
    scales = tuple(np.asarray(v, np.float32) for v in (0.3, 0.7))
    traced = lambda *a: run(*a[:-3], alpha=a[-2], beta=a[-1], prior=a[-3], **options)
    more = (*batch, out, None, None) if batch else ()
    yield LevelCall(f"{name} traced blend", traced, (*both, *scales), more, out)


def once_broken() -> Iterator[LevelCall]:
    """Calls whose bits once depended on a mesh, on jit or on the batch."""
    rng = np.random.default_rng(1)
    images, rows = _normal(rng, (8, 6, 5, 24), np.float32), _normal(rng, (16, 60), np.float32)
    f32 = {"batch": (0,), "out": 0}
    average = ft.partial(dnn.reduce, op="avg", axis=(1, 2, 3), alpha=0.3)
    yield LevelCall("reduce avg alpha", average, (images,), **f32)
    yield LevelCall("pool average alpha", ft.partial(dnn.pool, mode="average", alpha=0.3), (images,), **f32)
    yield LevelCall("lrn", ft.partial(dnn.lrn, n=3, lrn_alpha=0.5), (images,), **f32)
    yield LevelCall("divisive_norm", dnn.divisive_norm, (images,), **f32)
    yield LevelCall("lp_normalize", dnn.lp_normalize, (rows,), **f32)
    cubes = ft.partial(dnn.lp_normalize, p=3.0, axis=(1, 2, 3))
    yield LevelCall("lp_normalize of whole images", cubes, (images,), **f32)
    scores, labels = rng.normal(size=(8, 12, 7)).astype(np.float32), rng.integers(1, 7, (8, 4)).astype(np.int32)
    yield LevelCall("ctc_posterior", dnn.ctc_posterior, (scores, labels), (0, 0), 0)
    x, w = _normal(rng, (8, 5, 6, 4), np.float32), _normal(rng, (1, 1, 4, 8), np.float32)
    skip = lambda x, w: list(dnn.conv_skip(x, w, groups=2, input_activation="relu", engine="ordered"))
    yield LevelCall("conv_skip of groups", skip, (x, w[:, :, :2]), (0, None), 0)
    x, w, b, r = (v.astype(ml_dtypes.bfloat16) for v in (x, w, _normal(rng, (8,), np.float32), x @ w[0, 0]))
    scaled = lambda x, a: dnn.softmax(x, alpha=a)
    yield LevelCall("softmax by a narrow scale", scaled, (images, np.asarray(0.3, ml_dtypes.bfloat16)), (0, None), 0)
    options: dict[str, Any] = {"activation": "gelu", "engine": "ordered"}
    conv = lambda x, w, b, r, a: dnn.conv(x, w, bias=b, residual=r, alpha=a, **options)
    yield LevelCall(
        "conv by a traced scale", conv, (x, w, b, r, np.asarray(0.3, np.float32)), (0, None, None, 0, None), 0
    )


def _dtype(rng: np.random.Generator) -> tuple[str, Any]:
    return list(DTYPES.items())[int(rng.choice([0, 0, 1, 2]))]


def _sizes(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    """Of few lengths, so that operations one by one are compiled once."""
    return tuple(int(n) for n in rng.choice([(5, 24, 16), (16, 3, 8), (1, 13, 24)])[-count:])


def reductions(rng: np.random.Generator) -> Iterator[LevelCall]:
    for op in REDUCTIONS:
        name, dtype = _dtype(rng)
        shape = (BATCH, *_sizes(rng, 3))
        axes = tuple(sorted(int(a) for a in rng.choice([1, 2, 3], int(rng.integers(1, 4)), replace=False)))
        x = _normal(rng, shape, dtype)
        if "mul" in op:
            x = (1 + x / 64).astype(dtype)
        yield from _blended(rng, f"reduce {op} {axes} {name} {shape}", dnn.reduce, x, op=op, axis=axes)


def poolings(rng: np.random.Generator) -> Iterator[LevelCall]:
    for mode in pool_cases.MODES:
        name, dtype = _dtype(rng)
        window = str(rng.choice(list(pool_cases.WINDOWS)))
        sizes, options = pool_cases.WINDOWS[window]
        layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[len(sizes)]
        p = float(rng.choice([1.0, 2.0, 3.0, 2.5]))
        options = {**options, "layout": layout, "mode": mode, "p": p}
        x = pool_cases.data((BATCH, *sizes, int(rng.choice([3, 8]))), dtype, int(rng.integers(99)))
        title = f"{mode} p={p} {name} {window} {x.shape[-1]}"
        yield from _blended(rng, f"pool {title}", dnn.pool, x, **options)
        y = jax.eval_shape(ft.partial(dnn.pool, **options), x)
        dy = pool_cases.data(y.shape, dtype, 5)
        yield from _blended(rng, f"pool_dgrad {title}", dnn.pool_dgrad, dy, x, **options)
        if mode == "average_exclude_padding":
            continue
        count = tuple(int(rng.integers(1, n + 1)) for n in sizes)
        own = {"output_sizes": count, "layout": layout, "mode": mode, "p": p}
        yield from _blended(rng, f"adaptive_pool {title} {count}", dnn.adaptive_pool, x, **own)


def local_norms(rng: np.random.Generator) -> Iterator[LevelCall]:
    for op in ("lrn", "divisive_norm", "lrn_dgrad", "divisive_norm_dgrad"):
        name, dtype = _dtype(rng)
        x = _normal(rng, (BATCH, *_sizes(rng, 3)), dtype)
        n, alpha = int(rng.integers(1, 6)), float(rng.choice([1e-4, 0.5]))
        beta, k = float(rng.choice([0.75, 0.5, 1.0])), float(rng.choice([2.0, 1.0]))
        options = {"n": n, "lrn_alpha": alpha, "lrn_beta": beta, "k": k, "even": str(rng.choice(["high", "low"]))}
        arrays = (x,) if op in ("lrn", "divisive_norm") else (_normal(rng, x.shape, dtype), x)
        yield from _blended(rng, f"{op} {name} {x.shape} {options}", getattr(dnn, op), *arrays, **options)
    for p in (1.0, 2.0, 3.0, 2.5, float("inf")):
        name, dtype = _dtype(rng)
        x = _normal(rng, (BATCH, *_sizes(rng, 2)), dtype)
        axis = [(-1,), (1,), (1, 2)][int(rng.integers(3))]
        f = ft.partial(dnn.lp_normalize, p=p, axis=axis)
        yield LevelCall(f"lp_normalize {p} {axis} {name} {x.shape}", f, (x,), (0,), 0)


def norms(rng: np.random.Generator) -> Iterator[LevelCall]:
    for case in rng.choice(sorted(norm_cases.CASES), 8, replace=False):
        norm = norm_cases.CASES[str(case)]
        if norm.op == "batch_norm" or "N" not in norm.keywords.get("layout", "N"):
            continue
        axis = norm.keywords["layout"].index("N") if "layout" in norm.keywords else 0
        if norm.keywords.get("axis") == (0, -1):
            continue
        name, dtype = _dtype(rng)
        shape = tuple(BATCH if a == axis else n for a, n in enumerate(norm.shape))
        x = _normal(rng, shape, dtype)
        parameter = (BATCH, *norm.parameter[1:]) if norm.op == "adaptive_layer_norm" else norm.parameter
        s, b = (_normal(rng, parameter, np.float32) for _ in range(2))
        own = 0 if norm.op == "adaptive_layer_norm" else None
        call = norm.call()
        yield LevelCall(f"{case} {name}", lambda x, s, b, f=call: f(x, s, b)[0], (x, s, b), (axis, own, own), axis)
    name, dtype = _dtype(rng)
    x, c = _normal(rng, (BATCH, *_sizes(rng, 2), 6), dtype), [_normal(rng, (6,), np.float32) for _ in range(4)]

    def inference(x: Any, m: Any, v: Any, s: Any, b: Any, *p: Any, **more: Any) -> Any:
        return dnn.batch_norm_inference(x, m, v, scale=s, bias=b, **more)

    arrays = (x, c[0], np.abs(c[1]), c[2], c[3])
    batch = (0, None, None, None, None)
    yield from _blended(rng, f"batch_norm_inference {name} {x.shape}", inference, *arrays, batch=batch)
    gelu = {"activation": str(rng.choice(["gelu", "swish", "relu", "tanh"]))}
    yield from _blended(rng, f"batch_norm_inference {gelu} {name} {x.shape}", inference, *arrays, batch=batch, **gelu)


def activations(rng: np.random.Generator) -> Iterator[LevelCall]:
    for act in (
        *("identity", "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", ("elu", 1.3), ("swish", 1.7), ("softplus", 0.7)),
        *("leaky_relu", "clipped_relu", ("relu", -1.0, 2.0, 0.3)),
    ):
        name, dtype = _dtype(rng)
        x = _normal(rng, (BATCH, *_sizes(rng, 2)), dtype)
        yield from _blended(rng, f"activation {act} {name} {x.shape}", dnn.activation, x, activation=act)
        dy = _normal(rng, x.shape, dtype)
        yield from _blended(
            rng, f"activation_dgrad {act} {name} {x.shape}", dnn.activation_dgrad, dy, x, activation=act
        )


def softmaxes(rng: np.random.Generator) -> Iterator[LevelCall]:
    for algorithm in ("accurate", "fast", "log"):
        name, dtype = _dtype(rng)
        x = _normal(rng, (BATCH, *_sizes(rng, 2)), dtype)
        axis = [(-1,), (1,), (1, 2)][int(rng.integers(3))]
        options = {"algorithm": algorithm, "axis": axis}
        yield from _blended(rng, f"softmax {options} {name} {x.shape}", dnn.softmax, x, **options)
        dy = _normal(rng, x.shape, dtype)
        yield from _blended(rng, f"softmax_dgrad {options} {name} {x.shape}", dnn.softmax_dgrad, dy, x, **options)
        f = ft.partial(dnn.logsumexp, axis=axis)
        yield LevelCall(f"logsumexp {axis} {name} {x.shape}", f, (x,), (0,), 0)


def tensors(rng: np.random.Generator) -> Iterator[LevelCall]:
    for i in rng.choice(len(tensor_cases.CASES), 12, replace=False):
        case = tensor_cases.CASES[int(i)]
        name, dtype = _dtype(rng)
        arrays = tuple(_normal(rng, shape, dtype) for shape in case.shapes)
        arrays = tuple(np.abs(a) if case.positive else a for a in arrays)
        if "level" in case.options:
            continue
        yield LevelCall(f"{case.name} {name}", case.ours, arrays)
    for op in ("add", "mul", "min", "max", "sqrt", "not"):
        name, dtype = _dtype(rng)
        a = _normal(rng, (BATCH, *_sizes(rng, 2)), dtype)
        a = np.abs(a) if op == "sqrt" else a
        b = _normal(rng, a.shape, dtype) if op not in ("sqrt", "not") else None
        prior = _normal(rng, a.shape, dtype)
        options = {"op": op, "alpha1": 0.3, "alpha2": -1.7, "beta": 0.7}
        if b is None:
            f = lambda a, p, o=options: dnn.op_tensor(a, None, prior=p, **o)
            yield LevelCall(f"op_tensor {op} {name} {a.shape}", f, (a, prior), (0, 0), 0)
        else:
            f = lambda a, b, p, o=options: dnn.op_tensor(a, b, prior=p, **o)
            yield LevelCall(f"op_tensor {op} {name} {a.shape}", f, (a, b, prior), (0, 0, 0), 0)
    name, dtype = _dtype(rng)
    x = _normal(rng, (BATCH, 5, 8, 3), dtype)
    yield from _blended(rng, f"transform {name}", dnn.transform, x, padding=1, fold=(7, 2))
    method = str(rng.choice(["linear", "cubic", "lanczos3", "nearest"]))
    resample = ft.partial(dnn.resample, output_sizes=(7, 3), method=method)
    yield LevelCall(f"resample {method} {name}", resample, (x,), (0,), 0)
    im2col = ft.partial(dnn.im2col, window=(2, 3), stride=(1, 2))
    yield LevelCall(f"im2col {name}", im2col, (x,), (0,), 0)


def dropouts(rng: np.random.Generator) -> Iterator[LevelCall]:
    for act in (None, "relu", "gelu", "swish"):
        name, dtype = _dtype(rng)
        x = _normal(rng, (BATCH, *_sizes(rng, 2)), dtype)
        b, r = _normal(rng, x.shape[-1:], dtype), _normal(rng, x.shape, dtype)
        f = lambda x, b, r, act=act: dnn.dropout(x, 7, rate=0.3, bias=b, activation=act, residual=r)
        yield LevelCall(f"dropout {act} {name} {x.shape}", f, (x, b, r))


def convolutions(rng: np.random.Generator) -> Iterator[LevelCall]:
    for act in (None, "relu", "gelu", "swish"):
        dtype = [ml_dtypes.bfloat16, np.float16][int(rng.integers(2))]
        c, k = 4, 8
        groups = int(rng.choice([1, 2, 4]))
        x = _normal(rng, (BATCH, *_sizes(rng, 2), c), dtype)
        w = _normal(rng, (2, 3, c // groups, k), dtype)
        b = _normal(rng, (k,), dtype)
        options = {"groups": groups, "padding": "SAME", "activation": act, "engine": "ordered"}

        def conv(x: Any, w: Any, b: Any, **more: Any) -> Any:
            return dnn.conv(x, w, bias=b, **more)

        title = f"conv {act} {np.dtype(dtype).name} {x.shape} {groups}"
        yield from _blended(rng, title, conv, x, w, b, batch=(0, None, None), **options)
    x8 = rng.integers(-128, 128, (BATCH, 6, 5, 4)).astype(np.int8)
    w8 = rng.integers(-128, 128, (2, 3, 4, 8)).astype(np.int8)
    yield LevelCall("conv int8", lambda x, w: dnn.conv(x, w), (x8, w8), (0, None), 0)


KINDS = (
    reductions,
    poolings,
    local_norms,
    norms,
    activations,
    softmaxes,
    tensors,
    dropouts,
    convolutions,
)


# ---- what a compiler for GPUs may change -----------------------------------------------------------------------------

_ASSIGNED = re.compile(r"^\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)$")
_DTYPES = re.compile(r"tensor<(?:[\d?]+x)*(\w+)>")  # of a line's operands, if it says them, and results
_SMALL = ("f8E4M3FN", "f8E5M2")
_NARROW = ("bf16", "f16", *_SMALL)
_MOVE = ("reshape", "transpose", "broadcast_in_dim", "slice", "reverse")  # elements about, and are of one operand
_END = ("stablehlo.bitcast_convert", "stablehlo.while", "call", "func.call")


def roundings_omitted(function: Callable[..., Any], *operands: Any) -> list[str]:
    """Conversions, in the program for GPUs, of what was rounded to 16 or 8 bits before, with no fence between.

    XLA omits the rounding (`xla_allow_excess_precision`), also across a select, and across what moves elements about. A
    fence takes the bits as integers, which ends what is followed here, and so do loops and functions. What was of 16
    bits before it was converted is not rounded, and 8 bits are exact in all wider types.
    """
    found, rounded, exact = list[str](), set[str](), dict[str, str]()
    for line in jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text().splitlines():
        if "func.func" in line:
            rounded, exact = set(), {}
        if not (assigned := _ASSIGNED.match(line)):
            continue
        name, operation, rest = assigned.groups()
        used, dtypes = re.findall(r"%\w+", rest), _DTYPES.findall(rest)
        to, narrow = dtypes[-1] if dtypes else "", bool(dtypes) and dtypes[-1] in _NARROW
        if operation == "stablehlo.convert":
            source = exact.get(used[0], dtypes[0])
            if used[0] in rounded and to != dtypes[0] and "f" in to:
                found.append(line.strip())
            fits = to not in _NARROW or to == source or (source in _SMALL and to not in _SMALL)
            if source in _NARROW and used[0] not in rounded and fits:
                exact[name] = source
            elif narrow:
                rounded.add(name)
        elif operation.removeprefix("stablehlo.") in _MOVE and used[0] in exact:
            exact[name] = exact[used[0]]
        elif narrow and operation not in _END and not rounded.isdisjoint(used):
            rounded.add(name)
    return found
