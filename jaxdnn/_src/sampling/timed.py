"""The cases of `jaxdnn bench sampling`: bilinear samples at published sizes of text, optical flow and brains."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy import ndimage

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function


@dataclasses.dataclass(frozen=True)
class Samples(timed.Case):
    """Images sampled about the places of a resampling, zeros outside; the gradient is that in images and places."""

    family: str
    name: str
    batch: int
    sizes: tuple[int, ...]
    points: tuple[int, ...]
    channels: int
    passes: tuple[str, ...] = ("forward", "gradient")

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        places = (batch, *self.points, len(self.sizes))
        return (batch, *self.sizes, self.channels), places, (batch, *self.points, self.channels)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """Places in pixels, in the order of the axes, moved by some pixels; in float32."""
        x, moved, dy = super().operands(batch, dtype, seed)
        along = (jnp.linspace(0, n - 1, m) for n, m in zip(self.sizes, self.points, strict=True))
        here = jnp.stack(jnp.meshgrid(*along, indexing="ij"), -1)[None]
        return x, here.astype(jnp.float32) + 3 * moved.astype(jnp.float32), dy

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        image, places, result = map(math.prod, self.shapes(batch))
        return (image + result) * itemsize * (1 if which == "forward" else 2) + places * 4 * (1 + (which != "forward"))

    def ours(self, which: str, engine: str | None) -> Function:
        layout = f"N{'DHW'[3 - len(self.sizes) :]}C"
        options: dict[str, Any] = {"coordinates": "pixel", "order": "ij", "layout": layout, "engine": engine}
        return _passed(which, lambda x, places: dnn.grid_sample(x, places, **options))

    def xla(self, which: str) -> Function:
        one = lambda x, p: ndimage.map_coordinates(x, list(jnp.moveaxis(p, -1, 0)), 1)
        every = jax.vmap(jax.vmap(one, (-1, None), -1))
        return _passed(which, lambda x, places: every(x, places).astype(x.dtype))

    def torch(self, which: str, torch: Any, *tensors: Any) -> Callable[[], Any] | None:
        """Channels first and normalised before; the places have the images' dtype, as PyTorch asks."""
        x, places, dy = tensors
        if len(self.sizes) == 1:
            return None
        first = lambda v: v.movedim(-1, 1).contiguous()
        span = torch.tensor([n - 1 for n in self.sizes], device=x.device)
        grid = (2 * places / span - 1).flip(-1).to(x.dtype).contiguous()
        image, given = first(x).requires_grad_(which == "gradient"), first(dy)
        grid.requires_grad_(which == "gradient")

        def run() -> Any:
            y = torch.nn.functional.grid_sample(image, grid, mode="bilinear", align_corners=True)
            if which == "forward":
                return y.movedim(1, -1)
            of_image, of_grid = torch.autograd.grad(y, (image, grid), given)
            return of_image.movedim(1, -1), (of_grid.float().flip(-1) * 2 / span)

        return run


def _passed(which: str, y: Function) -> Function:
    if which == "forward":
        return lambda x, places, dy: y(x, places)
    return lambda x, places, dy: jax.vjp(y, x, places)[1](dy)


# Words rectified (ASTER, arXiv:1712.01026 and its like); frames of Sintel and features of theirs (RAFT,
# arXiv:2003.12039, PWC-Net); brains registered (VoxelMorph, arXiv:1809.05231); features of images.
CASES: tuple[timed.Case, ...] = (
    Samples("text", "aster", 256, (64, 256), (32, 100), 3),
    Samples("flow", "raft", 4, (440, 1024), (440, 1024), 3),
    Samples("flow", "raft-features", 4, (55, 128), (55, 128), 256),
    Samples("flow", "pwc-features", 8, (112, 256), (112, 256), 32),
    Samples("medical", "voxelmorph", 1, (160, 192, 224), (160, 192, 224), 1),
    Samples("features", "128x128", 32, (128, 128), (128, 128), 64),
)
