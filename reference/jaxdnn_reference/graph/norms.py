"""Nodes that normalise, and the gradients of these."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdnn_reference.graph.tensors import Array, Node, layout
from jaxdnn_reference.norm import (
    adaptive_layer_norm,
    adaptive_layer_norm_dgrad,
    layer_norm,
    layer_norm_dgrad,
    rms_norm,
    rms_norm_dgrad,
)
from jaxdnn_reference.norm_batch import batch_norm, batch_norm_dgrad
from jaxdnn_reference.norm_group import instance_norm, instance_norm_dgrad
from jaxdnn_reference.norm_stats import bn_finalize, bn_finalize_inference, dbn_weight, genstats


def _axes(node: Node, first: int = 0) -> tuple[int, ...]:
    """Those along which the scale is not 1; the last if there is none."""
    scale = node.dims["scale"]
    return tuple(axis for axis in range(first, len(scale)) if scale[axis] != 1) or (len(scale) - 1,)


def _parameter(x: Array | None, axes: tuple[int, ...], lead: tuple[int, ...] = ()) -> Array | None:
    return None if x is None else x.reshape([x.shape[axis] for axis in (*lead, *axes)])


def _without(x: Array, axes: tuple[int, ...]) -> Array:
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes])


def _eps(x: Mapping[str, Array]) -> float:
    return float(x["epsilon"].item())


def layernorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    scale, bias = _parameter(x["scale"], axes), _parameter(x["bias"], axes)
    y, mean, rstd = layer_norm(x["input"], axis=axes, scale=scale, bias=bias, eps=_eps(x), return_statistics=True)
    return {"Y": y, "MEAN": mean, "INV_VARIANCE": rstd}


def rmsnorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    scale, bias = _parameter(x["scale"], axes), _parameter(x.get("bias"), axes)
    y, rstd = rms_norm(x["input"], axis=axes, scale=scale, bias=bias, eps=_eps(x), return_statistics=True)
    return {"Y": y, "INV_VARIANCE": rstd}


def adalayernorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node, 1)
    scale: Any = _parameter(x["scale"], axes, (0,))
    bias: Any = _parameter(x.get("bias", np.zeros(x["scale"].shape)), axes, (0,))
    found = adaptive_layer_norm(x["input"], scale, bias, axis=axes, eps=_eps(x), return_statistics=True)
    return dict(zip(("Y", "MEAN", "INV_VARIANCE"), found, strict=True))


GRADIENTS = ("DX", "DSCALE", "DBIAS")


def layernorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    mean, rstd = (_without(x[port], axes) for port in ("mean", "inv_variance"))
    scale = _parameter(x["scale"], axes)
    found = layer_norm_dgrad(x["grad"], x["input"], axis=axes, scale=scale, mean=mean, rstd=rstd)
    return dict(zip(GRADIENTS, found, strict=True))


def rmsnorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node)
    rstd, scale = _without(x["inv_variance"], axes), _parameter(x["scale"], axes)
    return dict(zip(GRADIENTS, rms_norm_dgrad(x["grad"], x["input"], axis=axes, scale=scale, rstd=rstd), strict=True))


def adalayernorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    axes = _axes(node, 1)
    mean, rstd = (_without(x[port], axes) for port in ("mean", "inv_variance"))
    scale: Any = _parameter(x["scale"], axes, (0,))
    found = adaptive_layer_norm_dgrad(x["grad"], x["input"], scale, axis=axes, mean=mean, rstd=rstd)
    return dict(zip(GRADIENTS, found, strict=True))


def _channels(x: Mapping[str, Array], *ports: str) -> list[Any]:
    return [x[port].ravel() if port in x else None for port in ports]


def instancenorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    scale, bias = _channels(x, "scale", "bias")
    how = {"layout": layout(node), "return_statistics": True}
    found = instance_norm(x["input"], scale=scale, bias=bias, eps=_eps(x), **how)
    return dict(zip(("Y", "MEAN", "INV_VARIANCE"), found, strict=True))


def instancenorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    mean, rstd = (x[port].reshape(x[port].shape[:2]) for port in ("mean", "inv_variance"))
    (scale,) = _channels(x, "scale")
    found = instance_norm_dgrad(x["grad"], x["input"], scale=scale, mean=mean, rstd=rstd, layout=layout(node))
    return dict(zip(GRADIENTS, found, strict=True))


BATCH = ("Y", "MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")


def batchnorm(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    scale, bias, mean, variance = _channels(x, "scale", "bias", "in_running_mean", "in_running_var")
    momentum = float(x["momentum"].item()) if "momentum" in x else 1.0
    how = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance, "momentum": momentum}
    return dict(zip(BATCH, batch_norm(x["input"], **how, eps=_eps(x), layout=layout(node)), strict=True))


def batchnorm_inference(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    return {"Y": (x["input"] - x["mean"]) * x["inv_variance"] * x["scale"] + x["bias"]}


def batchnorm_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    scale, mean, rstd = _channels(x, "scale", "mean", "inv_variance")
    found = batch_norm_dgrad(x["grad"], x["input"], scale=scale, mean=mean, rstd=rstd, layout=layout(node))
    return dict(zip(GRADIENTS, found, strict=True))


def statistics(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return dict(zip(("SUM", "SQ_SUM"), genstats(x["input"], layout=layout(node)), strict=True))


FINAL = ("EQ_SCALE", "EQ_BIAS", "MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")


def finalize(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    total, squares, scale, bias = _channels(x, "sum", "sq_sum", "scale", "bias")
    mean, variance = _channels(x, "input_running_mean", "input_running_var")
    momentum = float(x["momentum"].item()) if "momentum" in x else 1.0
    how = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance, "momentum": momentum}
    found = bn_finalize(total, squares, float(x["accum_count"].item()), **how, eps=_eps(x))
    return dict(zip(FINAL, found, strict=True))


def finalize_inference(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    del node
    mean, variance, scale, bias = _channels(x, "mean", "variance", "scale", "bias")
    found = bn_finalize_inference(mean, variance, scale=scale, bias=bias, eps=_eps(x))
    return dict(zip(FINAL, found, strict=False))


def weights(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    mean, rstd, scale = _channels(x, "mean", "inv_variance", "scale")
    found = dbn_weight(x["dy"], x["input"], mean, rstd, scale=scale, layout=layout(node))
    return dict(zip(("DSCALE", "DBIAS", "EQ_SCALE_DY", "EQ_SCALE_X", "EQ_BIAS"), found, strict=True))


OPS = {
    "layernorm": layernorm,
    "layernorm_backward": layernorm_backward,
    "rmsnorm": rmsnorm,
    "rmsnorm_backward": rmsnorm_backward,
    "adalayernorm": adalayernorm,
    "adalayernorm_backward": adalayernorm_backward,
    "instancenorm": instancenorm,
    "instancenorm_backward": instancenorm_backward,
    "batchnorm": batchnorm,
    "batchnorm_inference": batchnorm_inference,
    "batchnorm_backward": batchnorm_backward,
    "genstats": statistics,
    "bn_finalize": finalize,
    "bn_finalize_inference": finalize_inference,
    "dbn_weight": weights,
}
