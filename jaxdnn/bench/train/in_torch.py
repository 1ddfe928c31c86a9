"""The operations of networks by PyTorch's functional ops, channels last, and a step of a network."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

from jaxdnn.bench.train.networks import Network, Norm

Tensor = Any
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Torch:
    """Images are channels first to PyTorch, over memory that is channels last, which cuDNN serves best."""

    def __init__(self) -> None:
        self.statistics: list[Any] = []

    def conv(
        self,
        x: Tensor,
        w: Tensor,
        bias: Any = None,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        residual: Any = None,
    ) -> Tensor:
        convolution = F.conv2d if x.ndim == 4 else F.conv3d
        bias = None if bias is None else bias.to(x.dtype)
        y = convolution(x, w.to(x.dtype), bias, stride, padding, groups=groups)
        return y if residual is None else residual + y

    def conv_skip(self, x: Tensor, w: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
        x = x if activation is None else self.activation(x, activation)
        return self.conv(x, w), x

    def conv_transpose(self, x: Tensor, w: Tensor, stride: int) -> Tensor:
        return (F.conv_transpose2d if x.ndim == 4 else F.conv_transpose3d)(x, w.to(x.dtype), stride=stride)

    def batch_norm(self, x: Tensor, p: Norm, *, activation: str | None = "relu", residual: Any = None) -> Tensor:
        y = F.batch_norm(x, None, None, p["scale"], p["bias"], training=True)
        y = y if residual is None else y + residual
        return y if activation is None else self.activation(y, activation)

    def layer_norm(self, x: Tensor, p: Norm) -> Tensor:
        channels = p["scale"].shape[0]
        moved = x.movedim(1, -1) if x.ndim > 3 else x
        parameters = p["scale"].to(x.dtype), p["bias"].to(x.dtype)
        y = F.layer_norm(moved, (channels,), *parameters, eps=1e-6)
        return y.movedim(-1, 1) if x.ndim > 3 else y

    def group_norm(self, x: Tensor, p: Norm, groups: int, activation: str) -> Tensor:
        return self.activation(F.group_norm(x, groups, p["scale"].to(x.dtype), p["bias"].to(x.dtype)), activation)

    def activation(self, x: Tensor, name: str) -> Tensor:
        return torch.sigmoid(x) if name == "sigmoid" else getattr(F, name)(x)

    def dense(self, x: Tensor, w: Tensor, bias: Any = None) -> Tensor:
        moved = x.movedim(1, -1) if x.ndim > 3 else x
        y = moved @ w.to(x.dtype)
        y = y if bias is None else y + bias.to(x.dtype)
        return y.movedim(-1, 1) if x.ndim > 3 else y

    def embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, table).to(torch.bfloat16)

    def rms_norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, scale.shape, scale.to(x.dtype), 1e-5)

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.reshape(*x.shape[:2], count, -1)

    def rope(self, x: Tensor, base: float) -> Tensor:
        half = x.shape[-1] // 2
        places = torch.arange(x.shape[1], device=x.device)[:, None]
        angle = places * base ** (-torch.arange(half, device=x.device) / half)
        cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
        a, b = x.float().split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        first = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*first, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
        return y.transpose(1, 2).reshape(*q.shape[:2], -1)

    def max_pool(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    def mean(self, x: Tensor, keep: bool = False) -> Tensor:
        return x.float().mean(tuple(range(2, x.ndim)), keepdim=keep).to(x.dtype)

    def concatenate(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1)

    def tokens(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def multiply(self, x: Tensor, p: Tensor) -> Tensor:
        return x * (p.to(x.dtype).reshape(-1, *(1,) * (x.ndim - 2)) if x.ndim > 3 else p.to(x.dtype))

    def cross_entropy(self, x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((x @ w.to(x.dtype)).float(), labels)

    def mean_square(self, x: Tensor) -> Tensor:
        return x.float().square().mean()


def parameter(value: np.ndarray, device: str) -> Tensor:
    """A network's parameter as PyTorch has it: filters as (out, in / groups, taps...), channels last."""
    tensor = torch.from_numpy(value).to(device)
    if tensor.ndim > 3:
        tensor = tensor.permute(-1, -2, *range(tensor.ndim - 2)).contiguous(memory_format=_LAST[tensor.ndim])
    return tensor.requires_grad_()


def batch(value: np.ndarray, device: str) -> Tensor:
    """Images, channels first over memory that is channels last; or texts."""
    if value.ndim == 2:
        return torch.from_numpy(value).to(device)
    tensor = torch.from_numpy(value).to(device).to(torch.bfloat16).movedim(-1, 1)
    return tensor.contiguous(memory_format=_LAST[tensor.ndim])


def step_of(network: Network, parameters: Any, rate: float, *, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of SGD, in place; it returns the loss."""
    leaves = jax.tree.leaves(parameters)
    loss_of = lambda x, labels: network.loss(Torch(), parameters, x, labels)
    loss_of = torch.compile(loss_of) if compiled else loss_of

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(x, labels)
        gradients = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, gradients, alpha=-rate)
        return loss.detach()

    return step
