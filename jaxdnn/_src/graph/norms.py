"""Normalisations, forward and backward, and the building blocks of a fused batch normalisation.

Statistics are taken along the axes at which the scale is not 1 (layer, root mean square, adaptive), over the spatial
axes (instance), or over all but the channels (batch). Statistics and gradients of parameters are float32, or float64
where the node computes in it. INV_VARIANCE is 1 / sqrt(variance + epsilon), as cuDNN calls it.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.graph.nodes import Inference, Kind, Run, register
from jaxdnn._src.graph.products import LETTERS, asked_dtype, into, layout_of
from jaxdnn._src.norm.batch import batch_norm, batch_norm_dgrad
from jaxdnn._src.norm.group import instance_norm, instance_norm_dgrad
from jaxdnn._src.norm.rows import (
    adaptive_layer_norm,
    adaptive_layer_norm_dgrad,
    layer_norm,
    layer_norm_dgrad,
    rms_norm,
    rms_norm_dgrad,
)
from jaxdnn._src.norm.stats import bn_finalize, bn_finalize_inference, dbn_weight, genstats

FLOATS = ("float32", "float64")
EPSILON = ("epsilon",)
STATISTICS = ("MEAN", "INV_VARIANCE")
RUNNING = ("NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")
GRADIENTS = ("DX", "DSCALE", "DBIAS")
FORWARD_PORTS = ("Y", "MEAN?", "INV_VARIANCE?")
BACKWARD_PORTS = (("grad", "input", "scale", "mean", "inv_variance"), ("DX", "DSCALE", "DBIAS?"))


def _kind(
    op: str,
    ports: tuple[tuple[str, ...], tuple[str, ...]],
    infer: Callable[[Inference], None],
    run: Callable[[Run], Mapping[str, Array]],
    calls: str | None = None,
    static: tuple[str, ...] = (),
    attributes: Mapping[str, Any] | None = None,
) -> None:
    register(Kind(op, *ports, attributes or {}, infer, run, static, FLOATS, () if calls is None else (calls,)))


PHASE = {"norm_forward_phase": "TRAINING"}


# What nodes have in common


def _phase(node: Inference) -> None:
    phase = node.choice("norm_forward_phase", ("TRAINING", "INFERENCE"))
    asked = {port for port in node.node.outputs if port != "Y"}
    node.expect(phase == "TRAINING" or not asked, "outputs", "Y alone in phase INFERENCE", sorted(asked))


def _statistics(node: Inference) -> str:
    return "float64" if node.node.compute == "float64" else "float32"


def _floats(node: Inference, *ports: str) -> None:
    """Checks that operands are floats; float64 among them obliges to compute in float64."""
    node.floats(*ports)
    for port in ports:
        if node.has(port) and node.dtype(port) == "float64":
            wide = node.node.compute == "float64"
            node.expect(wide, "compute_data_type", f"float64, for {port} is", node.node.compute)


def _one_number(node: Inference, port: str) -> None:
    node.one(port)
    value = node.node.inputs[port].value
    if value is not None and port == "epsilon":
        node.expect(0 <= value < math.inf, port, "a finite number of at least 0", value)


def _gradients_of(node: Inference, parameters: tuple[int, ...]) -> None:
    node.output("DX", node.dim("input"), "input")
    for port in ("DSCALE", "DBIAS"):
        node.output(port, parameters, "scale", _statistics(node))


def _given(node: Run, port: str) -> Array:
    """The normalised input: one in memory as it is stored, a virtual one as it is held."""
    x = node.x(port)
    return x.astype(node.compute) if node.compute == "float64" else x


def _asked(node: Run, found: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs that the node has, in their sizes."""
    return {port: value.reshape(node.out(port).dim or ()) for port, value in found.items() if node.asked(port)}


# Along the axes at which the scale is not 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """A normalisation along axes: its ops, whether it subtracts a mean, and whether each sample has its parameters."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    mean: bool = True
    of_samples: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        return STATISTICS if self.mean else STATISTICS[1:]


ROWS = {
    "layernorm": Rows(layer_norm, layer_norm_dgrad),
    "adalayernorm": Rows(adaptive_layer_norm, adaptive_layer_norm_dgrad, of_samples=True),
    "rmsnorm": Rows(rms_norm, rms_norm_dgrad, mean=False),
}


def _infer_axes(node: Inference, of_samples: bool) -> tuple[int, ...]:
    """Derives the normalised axes, and returns the sizes of the statistics."""
    dim, scale = node.dim("input"), node.dim("scale")
    node.expect(len(scale) == len(dim), "scale.dim", f"{len(dim)} sizes, as input", scale)
    axes = tuple(axis for axis in range(1 if of_samples else 0, len(dim)) if scale[axis] != 1)
    axes = axes or (len(dim) - 1,)  # one element along every axis: the last stands for them
    own = lambda axis: axis in axes or (of_samples and axis == 0)
    wanted = tuple(n if own(axis) else 1 for axis, n in enumerate(dim))
    first = ", the first that of input" if of_samples else ""
    words = f"sizes that are 1 or those of input, {dim}, but not all 1{first}"
    node.expect(scale == wanted, "scale.dim", words, scale)
    node.derive(axes=axes)
    return tuple(1 if axis in axes else n for axis, n in enumerate(dim))


def _infer_rows(rows: Rows, node: Inference) -> None:
    _phase(node)
    _floats(node, "input", "scale", "bias")
    statistics = _infer_axes(node, rows.of_samples)
    if node.has("bias"):
        node.shaped("bias", node.dim("scale"), "those of scale")
    _one_number(node, "epsilon")
    node.output("Y", node.dim("input"), "input")
    for port in rows.statistics:
        node.output(port, statistics, "input", _statistics(node))


def _infer_rows_backward(rows: Rows, node: Inference) -> None:
    given = ("mean", "inv_variance") if rows.mean else ("inv_variance",)
    _floats(node, "grad", "input", "scale", *given)
    node.shaped("grad", node.dim("input"), "those of input")
    statistics = _infer_axes(node, rows.of_samples)
    for port in given:
        node.shaped(port, statistics, "those of the statistics")
    _gradients_of(node, node.dim("scale"))


def _parameter(node: Run, port: str, rows: Rows) -> Array:
    """A parameter without the axes along which it is 1."""
    x, axes = node.wide(port), node.derived("axes")
    return x.reshape([x.shape[axis] for axis in ((0, *axes) if rows.of_samples else axes)])


def _rows(rows: Rows, node: Run) -> dict[str, Array]:
    parameters = {"scale": _parameter(node, "scale", rows)}
    if node.has("bias"):
        parameters["bias"] = _parameter(node, "bias", rows)
    elif rows.of_samples:
        parameters["bias"] = jnp.zeros_like(parameters["scale"])
    how = {"axis": node.derived("axes"), "eps": node.static("epsilon"), "out_dtype": asked_dtype(node, "Y")}
    x, how = _given(node, "input"), {**how, "return_statistics": True}
    found = rows.forward(x, *parameters.values(), **how) if rows.of_samples else rows.forward(x, **parameters, **how)
    return _asked(node, dict(zip(("Y", *rows.statistics), found, strict=True)))


def _rows_backward(rows: Rows, node: Run) -> dict[str, Array]:
    axes = node.derived("axes")
    plain = lambda x: x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes])
    names = {"mean": "mean", "rstd": "inv_variance"} if rows.mean else {"rstd": "inv_variance"}
    how = {name: plain(node.wide(port)) for name, port in names.items()}
    how = {**how, "axis": axes, "out_dtype": asked_dtype(node, "DX")}
    dy, x, scale = _given(node, "grad"), _given(node, "input"), _parameter(node, "scale", rows)
    found = rows.backward(dy, x, scale, **how) if rows.of_samples else rows.backward(dy, x, scale=scale, **how)
    return _asked(node, dict(zip(GRADIENTS, found, strict=True)))


for _op, _way in ROWS.items():
    _call, _back = _way.forward.__name__, _way.backward.__name__
    _inputs = ("input", "scale", "bias" if _op == "layernorm" else "bias?", "epsilon")
    _outputs = ("Y", *(f"{port}?" for port in _way.statistics))
    _infer, _run = ft.partial(_infer_rows, _way), ft.partial(_rows, _way)
    _kind(_op, (_inputs, _outputs), _infer, _run, _call, EPSILON, PHASE)
    _inputs = tuple(port for port in BACKWARD_PORTS[0] if _way.mean or port != "mean")
    _infer, _run = ft.partial(_infer_rows_backward, _way), ft.partial(_rows_backward, _way)
    _kind(f"{_op}_backward", (_inputs, BACKWARD_PORTS[1]), _infer, _run, _back)


# Over the channels of images


def _channels(node: Inference, *ports: str) -> tuple[int, ...]:
    """Checks that parameters are (1, C, 1, ...), and returns those sizes."""
    dim = node.rank("input", 3, 4, 5)
    wanted = (1, dim[1], *(1 for _ in dim[2:]))
    for port in ports:
        if node.has(port):
            node.shaped(port, wanted, "one for each channel of input")
    return wanted


def _image(node: Run, port: str) -> tuple[Array, str, str]:
    """An image in the layout in which it lies, and the letters of its axes before and after."""
    x, letters, layout = _given(node, port), LETTERS[node.x(port).ndim], layout_of(node, port)
    return into(x, letters, layout), letters, layout


def _flat(node: Run, *ports: str) -> list[Any]:
    """Parameters as vectors; None of one that is left out."""
    return [node.wide(port).reshape(-1) if node.has(port) else None for port in ports]


def _momentum(node: Run) -> Any:
    return node.wide("momentum").reshape(()) if node.has("momentum") else 1.0


def _infer_instance(node: Inference) -> None:
    _phase(node)
    _floats(node, "input", "scale", "bias")
    _channels(node, "scale", "bias")
    _one_number(node, "epsilon")
    dim = node.dim("input")
    node.output("Y", dim, "input")
    for port in STATISTICS:
        node.output(port, (*dim[:2], *(1 for _ in dim[2:])), "input", _statistics(node))


def instance(node: Run, dtype: Any, activation: Any = None) -> dict[str, Array]:
    """Instance normalisation, with an activation where one is fused."""
    x, letters, layout = _image(node, "input")
    scale, bias = _flat(node, "scale", "bias")
    how: dict[str, Any] = {"eps": node.static("epsilon"), "activation": activation, "layout": layout}
    y, *found = instance_norm(x, scale=scale, bias=bias, **how, return_statistics=True, out_dtype=dtype)
    return _asked(node, {"Y": into(y, layout, letters), **dict(zip(STATISTICS, found, strict=True))})


def _infer_instance_backward(node: Inference) -> None:
    _floats(node, *BACKWARD_PORTS[0])
    dim = node.dim("input")
    node.shaped("grad", dim, "those of input")
    _channels(node, "scale")
    for port in ("mean", "inv_variance"):
        node.shaped(port, (*dim[:2], *(1 for _ in dim[2:])), "those of the statistics")
    _gradients_of(node, node.dim("scale"))


def _instance_backward(node: Run) -> dict[str, Array]:
    size = (node.tensor("input").dim or ())[:2]
    return _image_backward(node, instance_norm_dgrad, size)


def _image_backward(node: Run, op: Callable[..., Any], size: tuple[int, ...]) -> dict[str, Array]:
    x, letters, layout = _image(node, "input")
    scale, mean, rstd = _flat(node, "scale", "mean", "inv_variance")
    how = {"mean": mean.reshape(size), "rstd": rstd.reshape(size), "layout": layout}
    dy, dtype = into(_given(node, "grad"), letters, layout), asked_dtype(node, "DX")
    dx, *found = op(dy, x, scale=scale, **how, out_dtype=dtype)
    return _asked(node, {"DX": into(dx, layout, letters), **dict(zip(GRADIENTS[1:], found, strict=True))})


_kind(
    "instancenorm",
    (("input", "scale", "bias", "epsilon"), FORWARD_PORTS),
    _infer_instance,
    lambda node: instance(node, asked_dtype(node, "Y")),
    "instance_norm",
    EPSILON,
    PHASE,
)
_kind("instancenorm_backward", BACKWARD_PORTS, _infer_instance_backward, _instance_backward, "instance_norm_dgrad")


def _infer_running(node: Inference, mean: str, variance: str) -> None:
    """Running statistics and the momentum are given together."""
    given = tuple(node.has(port) for port in (mean, variance, "momentum"))
    node.expect(len(set(given)) == 1, mean, f"given with {variance} and momentum, or none of the three", given)
    for port in ("epsilon", "momentum"):
        if node.has(port):
            _one_number(node, port)


def _infer_batch(node: Inference) -> None:
    parameters = ("scale", "bias", "in_running_mean", "in_running_var")
    _floats(node, "input", *parameters)
    each = _channels(node, *parameters)
    _infer_running(node, *parameters[2:])
    node.output("Y", node.dim("input"), "input")
    for port in (*STATISTICS, *RUNNING):
        node.output(port, each, "scale", _statistics(node))


def batch(node: Run, dtype: Any, activation: Any = None, residual: Array | None = None) -> dict[str, Array]:
    """Batch normalisation in training, with a residual and an activation where they are fused."""
    x, letters, layout = _image(node, "input")
    scale, bias, mean, variance = _flat(node, "scale", "bias", "in_running_mean", "in_running_var")
    how: dict[str, Any] = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance}
    how = {**how, "momentum": _momentum(node), "eps": node.static("epsilon"), "activation": activation}
    added = None if residual is None else into(residual, letters, layout)
    y, *found = batch_norm(x, **how, residual=added, layout=layout, out_dtype=dtype)
    named = dict(zip((*STATISTICS, *RUNNING), found, strict=True))
    return _asked(node, {"Y": into(y, layout, letters), **named})


def _infer_batch_inference(node: Inference) -> None:
    parameters = ("mean", "inv_variance", "scale", "bias")
    _floats(node, "input", *parameters)
    _channels(node, *parameters)
    node.output("Y", node.dim("input"), "input")


def _batch_inference(node: Run) -> dict[str, Array]:
    """The formula: `batch_norm_inference` takes the variance, this node the inverse deviation."""
    x, mean, rstd, scale, bias = (node.wide(port) for port in ("input", "mean", "inv_variance", "scale", "bias"))
    return {"Y": (x - mean) * (rstd * scale) + bias}


def _infer_batch_backward(node: Inference) -> None:
    _floats(node, *BACKWARD_PORTS[0])
    node.shaped("grad", node.dim("input"), "those of input")
    _gradients_of(node, _channels(node, "scale", "mean", "inv_variance"))


_kind(
    "batchnorm",
    (
        ("input", "scale", "bias", "in_running_mean?", "in_running_var?", "epsilon", "momentum?"),
        (*FORWARD_PORTS, *(f"{port}?" for port in RUNNING)),
    ),
    _infer_batch,
    lambda node: batch(node, asked_dtype(node, "Y")),
    "batch_norm",
    EPSILON,
)
_kind(
    "batchnorm_inference",
    (("input", "mean", "inv_variance", "scale", "bias"), ("Y",)),
    _infer_batch_inference,
    _batch_inference,
)
_kind(
    "batchnorm_backward",
    BACKWARD_PORTS,
    _infer_batch_backward,
    lambda node: _image_backward(node, batch_norm_dgrad, (-1,)),
    "batch_norm_dgrad",
)


# The building blocks of a fused batch normalisation


def _infer_genstats(node: Inference) -> None:
    _floats(node, "input")
    each = _channels(node)
    for port in ("SUM", "SQ_SUM"):
        node.output(port, each, None, _statistics(node))


def _genstats(node: Run) -> dict[str, Array]:
    x, _, layout = _image(node, "input")
    return _asked(node, dict(zip(("SUM", "SQ_SUM"), genstats(x, layout=layout), strict=True)))


_kind("genstats", (("input",), ("SUM", "SQ_SUM")), _infer_genstats, _genstats, "genstats")


def _infer_per_channel(node: Inference, first: str, *others: str) -> tuple[int, ...]:
    """Checks that parameters without an image are (1, C, 1, ...), all the same, and returns those sizes."""
    _floats(node, first, *others)
    dim = node.dim(first)
    node.expect(len(dim) in (3, 4, 5) and {*dim[:1], *dim[2:]} == {1}, f"{first}.dim", "(1, C, 1, ...)", dim)
    for port in others:
        if node.has(port):
            node.shaped(port, dim, f"those of {first}")
    return dim


FINAL = ("EQ_SCALE", "EQ_BIAS", *STATISTICS, *RUNNING)


def _infer_finalize(node: Inference) -> None:
    running = ("input_running_mean", "input_running_var")
    dim = _infer_per_channel(node, "sum", "sq_sum", "scale", "bias", *running)
    _infer_running(node, *running)
    _one_number(node, "accum_count")
    for port in FINAL:
        node.output(port, dim, "sum", _statistics(node))


def _finalize(node: Run) -> dict[str, Array]:
    total, squares, scale, bias = _flat(node, "sum", "sq_sum", "scale", "bias")
    mean, variance = _flat(node, "input_running_mean", "input_running_var")
    how: dict[str, Any] = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance}
    how = {**how, "momentum": _momentum(node), "eps": node.static("epsilon")}
    found = bn_finalize(total, squares, node.wide("accum_count").reshape(()), **how)
    return _asked(node, dict(zip(FINAL, found, strict=True)))


def _infer_finalize_inference(node: Inference) -> None:
    dim = _infer_per_channel(node, "mean", "variance", "scale", "bias")
    _one_number(node, "epsilon")
    for port in FINAL[:2]:
        node.output(port, dim, "mean", _statistics(node))


def _finalize_inference(node: Run) -> dict[str, Array]:
    mean, variance, scale, bias = _flat(node, "mean", "variance", "scale", "bias")
    found = bn_finalize_inference(mean, variance, scale=scale, bias=bias, eps=node.static("epsilon"))
    return _asked(node, dict(zip(FINAL[:2], found, strict=True)))


_running = ("input_running_mean?", "input_running_var?")
_kind(
    "bn_finalize",
    (
        ("sum", "sq_sum", "scale", "bias", *_running, "epsilon", "momentum?", "accum_count"),
        (*FINAL[:2], *(f"{port}?" for port in FINAL[2:])),
    ),
    _infer_finalize,
    _finalize,
    "bn_finalize",
    EPSILON,
)
_kind(
    "bn_finalize_inference",
    (("mean", "variance", "scale", "bias", "epsilon"), FINAL[:2]),
    _infer_finalize_inference,
    _finalize_inference,
    "bn_finalize_inference",
    EPSILON,
)

DBN = ("DSCALE", "DBIAS", "EQ_SCALE_DY", "EQ_SCALE_X", "EQ_BIAS")


def _infer_dbn(node: Inference) -> None:
    _floats(node, "dy", "input", "mean", "inv_variance", "scale")
    node.shaped("dy", node.dim("input"), "those of input")
    each = _channels(node, "mean", "inv_variance", "scale")
    for port in DBN:
        node.output(port, each, "scale", _statistics(node))


def _dbn_weight(node: Run) -> dict[str, Array]:
    x, letters, layout = _image(node, "input")
    mean, rstd, scale = _flat(node, "mean", "inv_variance", "scale")
    found = dbn_weight(into(_given(node, "dy"), letters, layout), x, mean, rstd, scale=scale, layout=layout)
    return _asked(node, dict(zip(DBN, found, strict=True)))


_kind("dbn_weight", (("dy", "input", "mean", "inv_variance", "scale"), DBN), _infer_dbn, _dbn_weight, "dbn_weight")
