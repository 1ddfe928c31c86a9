"""Programs as users of cudnn-frontend write them, by its names, beside NumPy's formulas that are written apart."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from jaxdnn.graph import Graph, Tensor
from tests.graph.examples import array, last

Array = np.ndarray[Any, Any]
Program = Callable[[Graph], tuple[dict[str, Tensor], Callable[..., dict[str, Any]]]]
PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    """Registers a function of a graph: it returns the outputs by name, and the same by NumPy of the inputs by name."""
    PROGRAMS[build.__name__] = build
    return build


def image(g: Graph, name: str, dim: tuple[int, ...], **how: Any) -> Tensor:
    return g.tensor(name=name, dim=dim, stride=last(dim), **how)


def convolved(x: Array, w: Array) -> Array:
    """A 3 x 3 convolution with a padding of 1, of NCHW and KCRS."""
    windows = sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
    return np.einsum("nchwrs,kcrs->nkhw", windows, w)


def softmax(x: Array) -> Array:
    e = np.exp(x - np.maximum(x.max(-1, keepdims=True), -1e30))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-30)


X, W = (2, 8, 6, 5), (4, 8, 3, 3)


@program
def conv_bias_relu(g: Graph) -> Any:
    x, w, b = image(g, "x", X), image(g, "w", W), image(g, "b", (1, 4, 1, 1))
    y = g.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], compute_data_type="FLOAT")
    y = g.relu(name="relu", input=g.bias(name="bias", input=y, bias=b))
    return {"y": y}, lambda x, w, b: {"y": np.maximum(convolved(x, w) + b, 0)}


@program
def conv_gradients(g: Graph) -> Any:
    """By the identity <dy, conv(x, w)> = <dx, x> = <dw, w>, column by column."""
    x, w, dy = image(g, "x", X), image(g, "w", W), image(g, "dy", (2, 4, 6, 5))
    dx = g.conv_dgrad(loss=dy, filter=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_dim(X)
    dw = g.conv_wgrad(image=x, loss=dy, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_dim(W)

    def formula(x: Array, w: Array, dy: Array) -> dict[str, Array]:
        turned = w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
        windows = sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
        return {"dx": convolved(dy, turned), "dw": np.einsum("nchwrs,nkhw->kcrs", windows, dy)}

    return {"dx": dx, "dw": dw}, formula


@program
def conv_genstats_finalize(g: Graph) -> Any:
    """A convolution, its statistics, the scale and bias that follow, and what the next layer reads."""
    x, w = image(g, "x", X), image(g, "w", W)
    scale, bias, mean, var = (image(g, name, (1, 4, 1, 1)) for name in ("scale", "bias", "mean", "var"))
    y = g.conv_fprop(image=x, weight=w, padding=[1, 1])
    total, squares = g.genstats(y)
    found = g.bn_finalize(total, squares, scale, bias, mean, var, epsilon=1e-3, momentum=0.1, accum_count=60)
    eq_scale, eq_bias, saved_mean, saved_rstd, next_mean, next_var = found
    out = g.relu(g.bias(g.scale(y, eq_scale), eq_bias))
    named = {"y": y, "out": out, "saved_mean": saved_mean, "saved_rstd": saved_rstd}

    def formula(x: Array, w: Array, scale: Array, bias: Array, mean: Array, var: Array) -> dict[str, Array]:
        y = convolved(x, w)
        mu, v = y.mean((0, 2, 3), keepdims=True), y.var((0, 2, 3), keepdims=True)
        rstd = 1 / np.sqrt(v + 1e-3)
        out = np.maximum((y - mu) * rstd * scale + bias, 0)
        running = {"next_mean": 0.9 * mean + 0.1 * mu, "next_var": 0.9 * var + 0.1 * v * 60 / 59}
        return {"y": y, "out": out, "saved_mean": mu, "saved_rstd": rstd, **running}

    return {**named, "next_mean": next_mean, "next_var": next_var}, formula


@program
def batch_norm_training_and_backward(g: Graph) -> Any:
    x, dy = image(g, "x", X), image(g, "dy", X)
    scale, bias = (image(g, name, (1, 8, 1, 1)) for name in ("scale", "bias"))
    epsilon = g.tensor(name="epsilon", dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True)
    y, mean, rstd, *_ = g.batchnorm(name="BN", input=x, scale=scale, bias=bias, epsilon=epsilon)
    dx, dscale, dbias = g.batchnorm_backward(grad=dy, input=x, scale=scale, mean=mean, inv_variance=rstd)

    def formula(x: Array, dy: Array, scale: Array, bias: Array, epsilon: Array) -> dict[str, Array]:
        axes = (0, 2, 3)
        mu, rstd = x.mean(axes, keepdims=True), 1 / np.sqrt(x.var(axes, keepdims=True) + epsilon.item())
        h, total = (x - mu) * rstd, lambda v: v.sum(axes, keepdims=True)
        dx = scale * rstd * (dy - (total(dy) + h * total(dy * h)) / 60)
        return {"y": h * scale + bias, "dx": dx, "dscale": total(dy * h), "dbias": total(dy)}

    return {"y": y, "dx": dx, "dscale": dscale, "dbias": dbias}, formula


B, H, HK, S, T, D = 2, 4, 2, 6, 7, 8


def attention_inputs(g: Graph) -> list[Tensor]:
    sizes = {"q": (B, H, S, D), "k": (B, HK, T, D), "v": (B, HK, T, D)}
    return [g.tensor(name=n, dim=d, stride=(d[1] * d[2] * d[3], d[3], d[1] * d[3], 1)) for n, d in sizes.items()]


@program
def sdpa_forward_and_backward(g: Graph) -> Any:
    """Causal, with lengths, dropout by seed and offset, and stats; the mask of dropout is the generator's."""
    q, k, v = attention_inputs(g)
    do = g.tensor(name="do", dim=(B, H, S, D))
    lengths = {name: g.tensor(name=name, dim=(B, 1, 1, 1), data_type="INT32") for name in ("seq_len_q", "seq_len_kv")}
    seed, offset = (g.tensor(name=name, dim=(1, 1, 1, 1), data_type="INT32") for name in ("seed", "offset"))
    how: dict[str, Any] = {"attn_scale": 0.25, "use_causal_mask": True, "use_padding_mask": True, **lengths}
    how["dropout"] = (0.25, seed, offset)
    o, stats = g.sdpa(name="sdpa", q=q, k=k, v=v, is_inference=False, **how)
    o.set_output(True)
    stats.set_output(True)
    dq, dk, dv = g.sdpa_backward(
        name="back", q=q, k=k, v=v, o=o, dO=do, stats=stats, use_deterministic_algorithm=True, **how
    )
    keep = g.rng((B, H, S, T), seed, offset, bernoulli_probability=0.75).set_data_type("BOOLEAN")

    def formula(q: Array, k: Array, v: Array, do: Array, **given: Array) -> dict[str, Any]:
        row, column = np.arange(S)[:, None], np.arange(T)[None, :]
        lq, lk = (np.clip(given[name], 0, None) for name in ("seq_len_q", "seq_len_kv"))
        seen = (row >= column) & (row < lq) & (column < lk)
        k, v = (np.repeat(a, H // HK, axis=1) for a in (k, v))
        x = np.where(seen, 0.25 * np.einsum("bhsd,bhtd->bhst", q, k), -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = np.where(seen, softmax(x), 0.0)
            stats = np.log(np.exp(x).sum(-1, keepdims=True))
        times = given["keep"] / 0.75
        o = (p * times) @ v
        dp = np.einsum("bhsd,bhtd->bhst", do, v) * times
        dx = p * (dp - (do * o).sum(-1, keepdims=True)) * 0.25
        shared = lambda a: a.reshape(B, HK, H // HK, T, D).sum(2)
        gradients = {"dq": dx @ k, "dk": shared(dx.swapaxes(2, 3) @ q), "dv": shared((p * times).swapaxes(2, 3) @ do)}
        return {"o": o, "stats": stats, **gradients}

    return {"o": o, "stats": stats, "dq": dq, "dk": dk, "dv": dv, "keep": keep}, formula


@program
def sdpa_fp8_forward(g: Graph) -> Any:
    q, k, v = (t.set_data_type("FP8_E4M3") for t in attention_inputs(g))
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    how: dict[str, Any] = {name: g.tensor(name=name, dim=(1, 1, 1, 1), data_type="FLOAT") for name in names}
    how |= {"is_inference": True, "attn_scale": 0.3, "use_causal_mask": True}
    o, _, amax_s, amax_o = g.sdpa_fp8(q=q, k=k, v=v, **how)

    def formula(q: Array, k: Array, v: Array, **f: Array) -> dict[str, Any]:
        k, v = (np.repeat(a, H // HK, axis=1) for a in (k, v))
        x = 0.3 * f["descale_q"] * f["descale_k"] * np.einsum("bhsd,bhtd->bhst", q, k)
        p = softmax(np.where(np.tri(S, T, dtype=bool), x, -np.inf))
        o = f["descale_v"] * f["descale_s"] * f["scale_s"] * (p @ v)
        return {"o": o * f["scale_o"], "amax_s": p.max(), "amax_o": np.abs(o).max()}

    return {"o": o.set_data_type("FLOAT"), "amax_s": amax_s, "amax_o": amax_o}, formula


@program
def layernorm_training_and_backward(g: Graph) -> Any:
    x, dy = (g.tensor(name=name, dim=(10, 12, 1, 1)) for name in ("x", "dy"))
    scale, bias = (g.tensor(name=name, dim=(1, 12, 1, 1)) for name in ("scale", "bias"))
    y, mean, rstd = g.layernorm(name="LN", norm_forward_phase="TRAINING", input=x, scale=scale, bias=bias, epsilon=1e-5)
    dx, dscale, dbias = g.layernorm_backward(grad=dy, input=x, scale=scale, mean=mean, inv_variance=rstd)

    def formula(x: Array, dy: Array, scale: Array, bias: Array) -> dict[str, Array]:
        mu, rstd = x.mean(1, keepdims=True), 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        h, w = (x - mu) * rstd, dy * scale
        dx = rstd * (w - w.mean(1, keepdims=True) - h * (w * h).mean(1, keepdims=True))
        sums = {"dscale": (dy * h).sum(0, keepdims=True), "dbias": dy.sum(0, keepdims=True)}
        return {"y": h * scale + bias, "mean": mu, "rstd": rstd, "dx": dx, **sums}

    return {"y": y, "mean": mean, "rstd": rstd, "dx": dx, "dscale": dscale, "dbias": dbias}, formula


@program
def rmsnorm_with_bias_and_swish(g: Graph) -> Any:
    x = g.tensor(name="x", dim=(10, 12, 1, 1))
    scale, bias = (g.tensor(name=name, dim=(1, 12, 1, 1)) for name in ("scale", "bias"))
    y, rstd = g.rmsnorm(name="RMS", norm_forward_phase="TRAINING", input=x, scale=scale, bias=bias, epsilon=1e-5)

    def formula(x: Array, scale: Array, bias: Array) -> dict[str, Array]:
        rstd = 1 / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
        y = x * rstd * scale + bias
        return {"rstd": rstd, "out": y / (1 + np.exp(-y))}

    return {"rstd": rstd, "out": g.swish(y)}, formula


@program
def instancenorm_training(g: Graph) -> Any:
    x, scale, bias = image(g, "x", X), image(g, "scale", (1, 8, 1, 1)), image(g, "bias", (1, 8, 1, 1))
    y, mean, rstd = g.instancenorm(
        name="IN", norm_forward_phase="TRAINING", input=x, scale=scale, bias=bias, epsilon=1e-5
    )

    def formula(x: Array, scale: Array, bias: Array) -> dict[str, Array]:
        mu, rstd = x.mean((2, 3), keepdims=True), 1 / np.sqrt(x.var((2, 3), keepdims=True) + 1e-5)
        return {"y": (x - mu) * rstd * scale + bias, "mean": mu, "rstd": rstd}

    return {"y": y, "mean": mean, "rstd": rstd}, formula


@program
def resample_max_and_average(g: Graph) -> Any:
    x = image(g, "x", X)
    how: dict[str, Any] = {"window": [2, 3], "stride": [2, 1], "pre_padding": [0, 1], "post_padding": [0, 1]}
    most, index = g.resample(input=x, mode="MAXPOOL", padding_mode="NEG_INF_PAD", generate_index=True, **how)
    mean = g.resample(input=x, mode="AVGPOOL_INCLUDE_PADDING", padding_mode="ZERO_PAD", **how)

    def formula(x: Array) -> dict[str, Array]:
        def windows(fill: float) -> Array:
            padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 1)), constant_values=fill)
            return sliding_window_view(padded, (2, 3), (2, 3))[:, :, ::2].reshape(2, 8, 3, 5, 6)

        return {"most": windows(-np.inf).max(-1), "index": windows(-np.inf).argmax(-1), "mean": windows(0).mean(-1)}

    return {"most": most, "index": index, "mean": mean}, formula


@program
def reductions(g: Graph) -> Any:
    x = g.tensor(name="x", dim=(4, 6, 5))
    total = g.reduction(input=x, mode="ADD").set_dim((4, 1, 5))
    most = g.reduction(input=x, mode="AMAX").set_dim((1, 1, 1))
    return {"total": total, "most": most}, lambda x: {"total": x.sum(1, keepdims=True), "most": np.abs(x).max()}


@program
def int8_matmul_with_scale(g: Graph) -> Any:
    a = g.tensor(name="a", dim=(2, 5, 16), data_type="INT8")
    b = g.tensor(name="b", dim=(2, 16, 6), stride=(96, 1, 16), data_type="INT8")
    s = g.tensor(name="s", dim=(1, 1, 1), data_type="FLOAT", is_pass_by_value=True)
    c = g.matmul(name="matmul", A=a, B=b, compute_data_type="INT32").set_data_type("INT32")
    y = g.mul(name="scaled", a=c, b=s)
    return {"y": y}, lambda a, b, s: {"y": a @ b * s}


@program
def matmul_bias_relu_of_heads(g: Graph) -> Any:
    """Heads of B that serve two of A each, and a bias for each column."""
    a, b = g.tensor(name="a", dim=(2, 4, 5, 8)), g.tensor(name="b", dim=(1, 2, 8, 6))
    y = g.relu(input=g.bias(input=g.matmul(A=a, B=b), bias=g.tensor(name="c", dim=(1, 1, 1, 6))), negative_slope=0.1)

    def formula(a: Array, b: Array, c: Array) -> dict[str, Array]:
        y = a @ np.repeat(b, 2, axis=1) + c
        return {"y": np.where(y > 0, y, 0.1 * y)}

    return {"y": y}, formula


@program
def mxfp8_matmul(g: Graph) -> Any:
    """Both operands are quantised by blocks of 32 along K, then multiplied; quantised again along N."""
    a, b = g.tensor(name="a", dim=(1, 5, 64)), g.tensor(name="b", dim=(1, 64, 32), stride=(2048, 1, 64))
    narrow = []
    for x, axis in ((a, 2), (b, 1)):
        y, scale = g.block_scale_quantize(input=x, block_size=32, axis=axis)
        y.set_data_type("FP8_E4M3")
        scale.set_data_type("FP8_E8M0")
        narrow.append(g.block_scale_dequantize(input=y, descale=scale, block_size=[32]))
    y = g.matmul(A=narrow[0], B=narrow[1])

    def rounded(x: Array, axis: int) -> Array:
        """To three bits behind the point of e4m3, with a power of two for each block."""
        parts = np.stack(np.split(x, x.shape[axis] // 32, axis=axis))
        most = np.abs(parts).max(axis + 1, keepdims=True)
        scale = 2.0 ** np.ceil(np.log2(most / 448))
        v = parts / scale
        unit = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(v), 1e-30))) - 3, -9)
        return np.concatenate(list(np.rint(v / unit) * unit * scale), axis=axis)

    return {"y": y}, lambda a, b: {"y": rounded(a, 2) @ rounded(b, 1)}


@program
def moves(g: Graph) -> Any:
    """A slice, a concatenation of two, a transpose, and rows of all that."""
    x, z = g.tensor(name="x", dim=(4, 6, 5)), g.tensor(name="z", dim=(4, 2, 5))
    part = g.slice(input=x, slices=[slice(0, 4), slice(1, 6, 2), slice(0, 5)])
    both = g.concatenate(inputs=[part, z], axis=1)
    turned = g.transpose(input=both, permutation=[2, 0, 1])
    rows = g.reshape(input=turned, reshape_mode="LOGICAL").set_dim((10, 10))

    def formula(x: Array, z: Array) -> dict[str, Array]:
        both = np.concatenate([x[:, 1:6:2], z], axis=1)
        return {"both": both, "rows": both.transpose(2, 0, 1).reshape(10, 10)}

    return {"both": both, "rows": rows}, formula


GIVEN: dict[str, Any] = {
    "seq_len_q": np.array([6, 4], np.int32).reshape(2, 1, 1, 1),
    "seq_len_kv": np.array([5, 0], np.int32).reshape(2, 1, 1, 1),
    "seed": np.full((1, 1, 1, 1), 7, np.int32),
    "offset": np.full((1, 1, 1, 1), 20, np.int32),
    "rows": np.array([5, 2], np.int32).reshape(2, 1, 1),
    "terms": np.array([4, 7], np.int32).reshape(2, 1, 1),
    "first": np.array([0, 2, 6], np.int32).reshape(3, 1, 1),
    "epsilon": np.full((1, 1, 1, 1), 1e-3, np.float32),
    "var": np.linspace(0.5, 2, 4, dtype=np.float32).reshape(1, 4, 1, 1),
}


def in_order(value: Any, tensor: Tensor) -> Array:
    """An array that stands for a tensor, in the order of the tensor's axes."""
    order = sorted(range(len(tensor.get_dim())), key=lambda axis: -tensor.get_stride()[axis])
    sizes = [tensor.get_dim()[axis] for axis in order]
    return np.asarray(value).astype(np.float64).reshape(sizes).transpose(np.argsort(order))


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str):
    check(name, PROGRAMS[name])


def check(name: str, build: Program) -> None:
    """Every plan's results are the formula's."""
    g = Graph(name, io_data_type="FLOAT", intermediate_data_type="FLOAT", compute_data_type="FLOAT")
    outputs, formula = build(g)
    for label, tensor in outputs.items():
        tensor.set_output(True).set_name(label)
    rng = np.random.default_rng(61)
    arrays = {t.name: GIVEN[t.name] if t.name in GIVEN else array(t, rng) for t in g.inputs()}
    for plan in g.plans():
        found = {label: in_order(v, g.find(label)) for label, v in plan(arrays).items()}
        given = {t.name: in_order(arrays[t.name], t) for t in g.inputs()}
        wanted = formula(**given, **({"keep": found.pop("keep")} if "keep" in found else {}))
        assert set(found) == set(wanted)
        for label, value in wanted.items():
            value = np.broadcast_to(value, found[label].shape)
            finite = np.isfinite(value)
            np.testing.assert_array_equal(np.isfinite(found[label]), finite, err_msg=label)
            atol = 2e-5 * np.abs(value[finite]).max()
            np.testing.assert_allclose(found[label][finite], value[finite], atol=atol, rtol=2e-5, err_msg=label)
