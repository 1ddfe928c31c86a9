"""Every kernel's PTX goes through NVIDIA's assembler: an instruction that does not exist for the target is found here.

It lowers the kernels as a program for a GPU is lowered, which an older JAX does too, though it does not serve them.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import compat, primitives
from jaxdnn._src.hopper import branches
from jaxdnn._src.rnn.primitive import RnnSpec, operands_of
from jaxdnn._src.rnn.steps import GATES
from tests.hopper import assembler as ptxas
from tests.hopper.assembler import Block, needs_ptxas

pytestmark = needs_ptxas
BF16, F16, F32, S8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8
FLOATS, F8 = (BF16, F16, F32), (jnp.float8_e4m3fn, jnp.float8_e5m2)
Call = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


def call(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = BF16, **options: Any) -> Call:
    """A call by engine hopper of arrays of these shapes and one dtype."""
    run = ft.partial(function, engine="hopper", **options)
    return run, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def backward(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = BF16, **options: Any) -> Call:
    """A call and its gradients in all operands."""

    def run(*arrays: jax.Array) -> Any:
        y, back = jax.vjp(ft.partial(function, engine="hopper", **options), *arrays)
        return y, back(jax.tree.map(jnp.ones_like, y))

    return run, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def dgrad(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], dtype: Any = BF16, **options: Any) -> Call:
    run = lambda dy, w: dnn.conv_dgrad(dy, w, x, engine="hopper", **options)
    return run, (jax.ShapeDtypeStruct(y, dtype), jax.ShapeDtypeStruct(w, dtype))


def wgrad(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], dtype: Any = BF16, **options: Any) -> Call:
    run = lambda x, dy: dnn.conv_wgrad(x, dy, w, engine="hopper", **options)
    return run, (jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(y, dtype))


def scaled(function: Callable[..., Any], x: jax.Array, scale: jax.Array, *bias: jax.Array, **options: Any) -> Any:
    """A normalisation with a scale, and a bias where it has one."""
    return function(x, scale=scale, **dict(zip(["bias"], bias, strict=False)), **options)


def fused(x: jax.Array, *rest: jax.Array, **options: Any) -> Any:
    """Dropout with a bias, or a bias and a residual."""
    return dnn.dropout(x, 7, **dict(zip(("bias", "residual"), rest, strict=False)), **options)


def with_epilogue(x: jax.Array, w: jax.Array, *rest: jax.Array, names: tuple[str, ...], **options: Any) -> Any:
    return dnn.conv(x, w, activation="relu", **dict(zip(names, rest, strict=True)), **options)


def convolutions() -> Iterator[Call]:
    image, taps, out = (8, 16, 16, 64), (3, 3, 64, 64), (8, 14, 14, 64)
    for dtype in (*FLOATS, *F8):
        wide = {"out_dtype": F32} if dtype not in (BF16, F16) else {}
        tf32 = {"precision": "tf32"} if dtype == F32 else {}
        yield call(dnn.conv, image, taps, dtype=dtype, **wide, **tf32)
        yield dgrad(image, taps, out, dtype=dtype, **wide, **tf32)
    yield call(dnn.conv, image, taps, dtype=S8, out_dtype=jnp.int32)
    yield call(dnn.conv, (8, 16, 16, 64), (1, 1, 64, 256))
    yield call(dnn.conv, (4, 16, 64), (3, 64, 64), layout="NWC")
    yield call(dnn.conv, (2, 8, 16, 16, 64), (3, 3, 3, 64, 64), layout="NDHWC")
    yield call(dnn.conv, (8, 16, 16, 128), (3, 3, 32, 128), groups=4)
    yield call(dnn.conv, (8, 16, 16, 64), (64, 3, 3, 64), filter_layout="OHWI")
    yield dgrad((8, 32, 32, 64), (2, 2, 64, 64), (8, 16, 16, 64), stride=2)
    yield dgrad((8, 32, 32, 64), (3, 3, 64, 64), (8, 16, 16, 64), stride=2, padding=1)
    yield dgrad((8, 32, 32, 64), (1, 1, 64, 64), (8, 16, 16, 64), stride=2)


def convolutions_in_newer_pallas() -> Iterator[Call]:
    """Epilogues with arrays, and windows of few channels, of which older releases lower none."""
    image, taps, out = (8, 16, 16, 64), (3, 3, 64, 64), (8, 14, 14, 64)
    for activation in ("relu", "gelu", "gelu_tanh", "tanh", "swish", "sigmoid"):
        yield call(
            lambda x, w, b, r, activation, engine: dnn.conv(
                x, w, bias=b, residual=r, prior=r, alpha=0.5, beta=0.25, activation=activation, engine=engine
            ),
            image, taps, (64,), out, activation=activation,
        )  # fmt: skip
    for names in ((), ("bias",), ("residual",)):
        yield call(with_epilogue, image, taps, *({"bias": (64,), "residual": out}[name] for name in names), names=names)
    for dtype in (BF16, F16):
        yield call(dnn.conv, (8, 224, 224, 3), (7, 7, 3, 64), dtype=dtype, stride=2, padding=3)
    yield call(dnn.conv, (8, 64, 64, 8), (3, 3, 8, 64), padding=1)


def filter_gradients() -> Iterator[Call]:
    for dtype in (BF16, F16):
        yield wgrad((8, 16, 16, 64), (3, 3, 64, 64), (8, 14, 14, 64), dtype=dtype)
        yield wgrad((8, 16, 16, 320), (3, 3, 320, 320), (8, 16, 16, 320), dtype=dtype, padding=1)
    yield wgrad((8, 16, 16, 64), (64, 3, 3, 64), (8, 14, 14, 64), filter_layout="OHWI")
    yield wgrad((8, 128, 64), (3, 64, 64), (8, 126, 64), layout="NWC")
    for splits in (1, 2, 4):
        with branches.picking(ft.partial(_in_a_cluster, splits)):
            yield wgrad((8, 16, 16, 128), (3, 3, 128, 128), (8, 14, 14, 128))
    yield wgrad((2, 8, 16, 16, 64), (3, 3, 3, 64, 64), (2, 6, 14, 14, 64), layout="NDHWC")
    yield wgrad((8, 16, 16, 128), (3, 3, 32, 128), (8, 14, 14, 128), groups=4)
    yield wgrad((64, 8, 8, 256), (1, 1, 256, 512), (64, 8, 8, 512))
    for dtype in (F32, *F8, S8):
        wide = {"out_dtype": jnp.int32 if dtype == S8 else F32} | ({"precision": "tf32"} if dtype == F32 else {})
        yield wgrad((16, 8, 8, 64), (3, 3, 64, 64), (16, 6, 6, 64), dtype=dtype, **wide)


def _in_a_cluster(splits: int, problem: Any, configs: Any, decided: Any) -> Any:
    return next(config for config in configs if config.direct and config.splits == splits)


def depthwise() -> Iterator[Call]:
    for dtype in FLOATS:
        for group, taps in ((1, 3), (1, 7), (2, 3), (4, 3), (8, 3)):
            image, w = (8, 16, 16, 64), (taps, taps, group, 64)
            options: dict[str, Any] = {"padding": taps // 2, "groups": 64 // group}
            if dtype == F32 and group > 1:
                continue
            yield call(dnn.conv, image, w, dtype=dtype, **options)
            yield dgrad(image, w, image, dtype=dtype, **options)
            yield wgrad(image, w, image, dtype=dtype, **options)
        with_bias = lambda x, w, bias: dnn.conv(x, w, bias=bias, padding=1, groups=64, engine="hopper")
        yield with_bias, tuple(jax.ShapeDtypeStruct(s, dtype) for s in ((8, 16, 16, 64), (3, 3, 1, 64), (64,)))
        yield call(dnn.conv, (8, 16, 16, 64), (3, 3, 1, 64), dtype=dtype, stride=2, padding=1, groups=64)
        yield dgrad((8, 16, 16, 64), (3, 3, 1, 64), (8, 8, 8, 64), dtype=dtype, stride=2, padding=1, groups=64)


def softmax() -> Iterator[Call]:
    for dtype in FLOATS:
        for rows, length in ((64, 32768), (64, 50304), (16, 131072), (4, 1 << 20)):
            for function in (dnn.softmax, dnn.logsumexp):
                yield call(function, (rows, length), dtype=dtype)
            for algorithm in ("log", "fast"):
                yield call(dnn.softmax, (rows, length), dtype=dtype, algorithm=algorithm)
            yield call(dnn.softmax_dgrad, (rows, length), (rows, length), dtype=dtype)


def softmax_of_rows() -> Iterator[Call]:
    for dtype in FLOATS:
        for rows, length in ((4096, 64), (64, 4096), (64, (32 << 10) // jnp.dtype(dtype).itemsize)):
            yield call(dnn.softmax, (rows, length), dtype=dtype)
            yield call(dnn.softmax_dgrad, (rows, length), (rows, length), dtype=dtype)
        yield call(dnn.logsumexp, (64, 4096), dtype=dtype)
        for algorithm in ("log", "fast"):
            yield call(dnn.softmax, (64, 512), dtype=dtype, algorithm=algorithm)


def rows() -> Iterator[Call]:
    for dtype in FLOATS:
        for length in (128, 512, 1024, 2048, 4096, 8192, 16384):
            count = (1 << 22) // length
            yield call(dnn.layer_norm, (count, length), dtype=dtype)
            if length <= 4096 * 2 // jnp.dtype(dtype).itemsize * 2:
                yield backward(ft.partial(scaled, dnn.rms_norm), (count, length), (length,), dtype=dtype)


def images() -> Iterator[Call]:
    for dtype in FLOATS:
        for shape, groups in (
            ((128, 56, 56, 256), 32),
            ((2, 256, 256, 128), 32),
            ((2, 64, 64, 320), 32),
            ((1, 251, 257, 128), 32),
            ((8, 8, 8, 32), 16),
        ):
            given = {"groups": groups}
            yield backward(ft.partial(scaled, dnn.group_norm), shape, shape[-1:], shape[-1:], dtype=dtype, **given)


def batches() -> Iterator[Call]:
    for dtype in FLOATS:
        for shape in ((128, 56, 56, 256), (32, 7, 7, 512), (8, 6, 6, 16), (8, 6, 6, 12), (16, 4, 4, 4096)):
            whole = shape in ((32, 7, 7, 512), (8, 6, 6, 12))  # of the others an activation has the same instructions
            for activation in (None, "relu", "swish") if whole else (None,):
                function = ft.partial(scaled, dnn.batch_norm, activation=activation)
                yield backward(function, shape, shape[-1:], shape[-1:], dtype=dtype)


def pooling() -> Iterator[Call]:
    for dtype in FLOATS:
        for options in (
            {"window": 3, "stride": 2, "padding": 1},
            {"window": 2, "stride": 2},
            {"window": 3, "stride": 1},
        ):
            for mode in ("max", "average"):
                yield backward(dnn.pool, (8, 56, 56, 64), dtype=dtype, mode=mode, **options)
            yield call(dnn.pool, (8, 56, 56, 64), dtype=dtype, **options)
        yield backward(dnn.pool, (8, 15, 15, 64), dtype=dtype, mode="average_exclude_padding", window=5, padding=2)


def dropouts() -> Iterator[Call]:
    x, bias = (1024, 4096), (4096,)
    for dtype in FLOATS:
        yield call(fused, x, dtype=dtype)
        for activation in (None, "relu") if dtype == F32 else (None, "relu", "gelu", "swish"):
            yield backward(fused, x, bias, x, dtype=dtype, activation=activation)
            yield backward(fused, x, dtype=dtype, activation=activation)
        yield call(fused, (8, 64, 32, 32), (64,), dtype=dtype, layout="NCHW")
        yield call(fused, (6, 768), (768,), dtype=dtype)
    yield call(fused, (16384, 4096), (4096,), activation="gelu")


def recurrences() -> Iterator[Call]:
    """Of every cell, cluster and number of sets of sequences, with and without what an option needs."""
    for cell in ("lstm", "gru_after", "tanh", "relu"):
        others = {"lstm": ((384, 250), (768, 60), (896, 8)), "tanh": ((96, 8), (1024, 60))}
        for units, batch in ((128, 8), (256, 900), (512, 61), *others.get(cell, ())):
            marks = batch in (900, 61)
            for op in ("rnn_backward",) if units == 1024 else ("rnn", "rnn_saved", "rnn_backward"):
                dtype = F16 if (units, op) == (128, "rnn") else BF16
                spec = RnnSpec(cell, marks, None, False, marks, marks, jnp.dtype(dtype), "hopper", "fast")
                yield ft.partial(primitives.bind, op, spec=spec), recurrent_operands(op, spec, 3, batch, units)


def recurrent_operands(op: str, spec: RnnSpec, steps: int, batch: int, units: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    narrow, wide, rows = spec.narrow, F32, (steps, batch)
    columns = GATES[spec.cell] * units
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "a": ((*rows, columns), wide), "r": ((units, columns), narrow), "q": ((units,), wide),
        "h": ((batch, units), narrow), "c": ((batch, units), wide), "y": ((*rows, units), narrow),
        "gates": ((*rows, columns + units * (spec.cell == "gru_after")), wide), "before": ((*rows, units), narrow),
        "cells_before": ((*rows, units), wide), "lengths": ((batch,), jnp.int32), "resets": (rows, jnp.bool_),
    }  # fmt: skip
    return tuple(jax.ShapeDtypeStruct(*shapes[name]) for name in operands_of(op, spec))


def ctc() -> Iterator[Call]:
    """Lattices of each partition, and rows of each; the gradient's are the others of a row and of its result."""
    losses = lambda x, labels, **options: dnn.ctc_loss(x, labels, engine="hopper", **options)
    gradient = lambda x, labels, **options: jax.vjp(lambda x: losses(x, labels, **options), x)[1](jnp.ones(len(x)))
    for count, classes, dtype, options in (
        (8, 32, F32, {}), (8, 37, F16, {"normalize": "none"}), (100, 1300, BF16, {}), (600, 5200, F32, {}),
        (1100, 10300, BF16, {}), (3, 25000, F32, {}),
    ):  # fmt: skip
        operands = (jax.ShapeDtypeStruct((2, 9, classes), dtype), jax.ShapeDtypeStruct((2, count), jnp.int32))
        yield ft.partial(losses, **options), operands
        yield ft.partial(gradient, **options), operands


def attentions() -> Iterator[Call]:
    q, k = (2, 300, 4, 128), (2, 400, 2, 128)
    for dtype in (BF16, F16):
        yield call(dnn.attention, q, k, k, dtype=dtype)
        yield call(dnn.attention, q, k, k, dtype=dtype, causal=True)
    for d, e in ((64, 64), (96, 96), (256, 256), (192, 128), (192, 192), (32, 128)):
        shapes = (2, 4, 300, d), (2, 4, 400, d), (2, 4, 400, e)
        yield call(dnn.attention, *shapes, layout="BNTH", causal="bottom_right", return_logsumexp=True)
    yield call(dnn.attention, q, k, k, window=(9, 3), softcap=2.0)
    masks = jnp.ones((2, 1, 300, 400), bool), jnp.ones((1, 4, 1, 400), bool)
    biases = jnp.ones((1, 4, 300, 400), BF16), jnp.ones((2, 1, 1, 400))
    for mask, bias in zip(masks, biases, strict=True):
        yield call(dnn.attention, q, k, k, mask=mask)
        yield call(dnn.attention, q, k, k, bias=bias, alibi_slopes=jnp.ones(4), sinks=jnp.ones(4))
    lengths = jnp.ones(2, jnp.int32)
    yield call(dnn.attention, q, k, k, query_lengths=lengths, key_lengths=lengths)
    segments = {f"{name}_segments": jnp.ones((2, n), jnp.int32) for name, n in (("query", 300), ("key", 400))}
    yield call(dnn.attention, q, k, k, **segments)
    decode = lambda q, k, v, **options: dnn.attention_decode(q, k, v, lengths, **options)
    q, k, ones = (2, 1, 4, 64), (2, 20000, 2, 64), jnp.ones(4)
    yield call(decode, q, k, k)
    yield call(decode, q, k, k, sinks=ones, alibi_slopes=ones)
    q, k = (2, 4, 3, 64), (2, 2, 400, 64)
    yield call(decode, q, k, k, layout="BNTH")


def samplings() -> Iterator[Call]:
    places = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
    run = lambda **options: backward(ft.partial(dnn.grid_sample, layout=options.pop("layout")), (1,), **options)[0]
    images = {"NWC": (3, 16), "NHWC": (3, 8, 6), "NDHWC": (3, 4, 2, 6)}
    rules = (("linear", "zeros"), ("nearest", "border"), ("linear", "reflection"))
    for (layout, sizes), (mode, padding) in zip(images.items(), rules, strict=True):
        for dtype, channels in ((BF16, 3), (F16, 64), (F32, 1)):
            x = jax.ShapeDtypeStruct((*sizes, channels), dtype)
            grid = places(*sizes, len(sizes) - 1)
            yield run(layout=layout, mode=mode, padding=padding), (x, grid)
    for pixels in (300, 2900):  # whose cells are sorted in two steps
        yield run(layout="NHWC"), (jax.ShapeDtypeStruct((1, pixels, pixels, 1), F32), places(1, 9, 9, 2))


# What calls are of -> those that between them take all ways in which these kernels write instructions, and the
# decisions of their planners (`branches`) that choose the way.
FAMILIES: dict[str, tuple[Callable[[], Iterator[Call]], dict[str, tuple[str, ...]]]] = {
    "convolution": (
        convolutions,
        {"pipeline": ("operands", "result", "axes", "phases", "groups"), "fprop": (), "dgrad": ()},
    ),
    "convolution in newer Pallas": (convolutions_in_newer_pallas, {"pipeline": ("window", "epilogue")}),
    "filter gradient": (
        filter_gradients,
        {"wgrad": ("operands", "direct", "rows", "axes"), "wgrad, images last": ("operands",)},
    ),
    "depthwise": (
        depthwise,
        {"depthwise walk": ("operands", "pass", "group", "stride", "bias"), "depthwise filter": ("operands", "group")},
    ),
    "softmax of long rows": (softmax, {"softmax of long rows": ("operands", "pass", "row shared by", "read")}),
    "softmax of rows": (softmax_of_rows, {"softmax of rows": ("operands", "pass", "threads", "rows at once")}),
    "norm of rows": (rows, {"norm of rows": ("operands", "pass", "threads", "stays", "keeps")}),
    "norm of images": (images, {"norm images": ("operands", "pass", "image", "vector")}),
    "norm of batches": (batches, {"norm batches": ("operands", "pass", "fold", "splits", "columns")}),
    "recurrence": (
        recurrences,
        {
            "recurrence": (
                "operands",
                "pass",
                "cell",
                "cluster",
                "sets",
                "matrix in registers",
                "streams",
                "warps without units",
                "ragged",
                "resets",
                "reverse",
                "tail of sequences",
            )
        },
    ),
    "ctc": (
        ctc,
        {
            "ctc rows": ("operands", "pass", "normalized", "threads of a row", "read", "tail"),
            "ctc lattice": ("pass", "pairs of a lane", "warps", "idle warps"),
            "ctc shares": ("elements of a lane",),
        },
    ),
    "pool": (pooling, {"pool": ("operands", "pass", "kernel", "counts")}),
    "attention": (
        attentions,
        {
            "attention forward": (
                "operands",
                "keys",
                "stages",
                "consumers",
                "swizzle",
                "results staged",
                "window",
                "lengths",
                "segments",
                "shared heads",
                "heads first",
                "softcap",
                "bias",
                "mask",
                "slopes",
                "sinks",
                "split",
                "packed",
            ),
            "attention merge": ("groups", "sinks", "heads first"),
        },
    ),
    "sampling": (samplings, {"sampling": ("operands", "axes", "mode", "padding", "threads", "taps together")}),
    "dropout": (dropouts, {"dropout": ("operands", "kernel", "pass", "activation", "bias", "residual")}),
}


NEWER = (
    "convolution in newer Pallas",
    "softmax of rows",
    "norm of rows",
    "norm of batches",
    "pool",
    "dropout",
    "attention",
)  # of which older releases lower nothing, or not all


def lowered(calls: Iterator[Call], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Block], set[tuple[str, str, Any]]]:
    """The blocks that calls emit, and the branches that they take."""
    monkeypatch.setattr(hopper, "unavailable", lambda: None)
    with ptxas.recorded(monkeypatch) as blocks, branches.recorded() as taken:
        for run, operands in calls:
            jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
    return blocks, taken


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_assemble(family: str, monkeypatch: pytest.MonkeyPatch):
    calls, decisions = FAMILIES[family]
    if family in NEWER and (lack := compat.lacking(compat.KERNELS)):
        pytest.skip(f"{lack}, which they need")
    blocks, taken = lowered(calls(), monkeypatch)
    assert ptxas.errors(blocks) == ""
    every = {branch for branch in branches.every() if branch[1] in decisions.get(branch[0], ())}
    assert {(kernel, what) for kernel, what, _ in every} == {
        (k, what) for k, whats in decisions.items() for what in whats
    }
    assert every - taken == set()
    assert {kernel for kernel, *_ in taken} >= set(decisions)


WHOLE = "mul.rn.f32 $0, $1, $2;"


@pytest.mark.parametrize(
    ("text", "constraints", "complaint"),
    [
        ("mul.rn.f33 $0, $1, $2;", "=f,f,f", "mul.rn.f33"),
        ("mul.rn.f32 $0, $1;", "=f,f,f", "Arguments mismatch"),
        (WHOLE, "=l,f,f", "Arguments mismatch"),
        ("add.rn.bf16x2 $0, $1, $2;", "=f,r,r", "Arguments mismatch"),
        ("tcgen05.fence::before_thread_sync;", "", "not supported on .target 'sm_90a'"),
        ("{ bra MISSING; }", "", "MISSING"),
        ("ld.global.v3.f32 {$0, $0, $0}, [$1];", "=f,l", "v3"),
    ],
)
def test_an_instruction_that_does_not_exist_is_found(text: str, constraints: str, complaint: str):
    block = Block(WHOLE, "=f,f,f")
    assert ptxas.errors([block]) == ""
    said = ptxas.errors([block, Block(text, constraints), block])
    assert complaint in said


def test_an_instruction_planted_in_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch):
    """The text is what `launch` is given, and the fault shows although the program lowers."""
    from jaxdnn._src.softmax.hopper import long as kernels

    launch, fault = kernels.launch, ("st.global", "st.globe")
    monkeypatch.setattr(kernels, "launch", lambda code, *rest, **k: launch(code.replace(*fault), *rest, **k))
    blocks, _ = lowered(iter([call(dnn.softmax, (4, 1 << 20))]), monkeypatch)
    assert "st.globe" in ptxas.errors(blocks)
