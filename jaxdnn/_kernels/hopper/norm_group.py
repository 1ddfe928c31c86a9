"""Group and instance normalisation on Hopper, channels last: parts of images in shared memory.

Schedule. A cluster of 1 to 8 blocks takes one image, and of its channels a part: whole groups, as a rule 128 bytes of a
pixel. Its threads copy the part into their blocks' shared memory, all at once, so that many bytes are on their way, and
add up as they arrive. From shared memory then come the sums about the mean, and then the result: what is normalised is
read from device memory once, and written once. Two blocks share a multiprocessor, so that one loads while the other
stores. Backward, x and dy are kept likewise. The sums of a group go through shared memory, in the end that of the whole
cluster. `norm_group_walk` states which thread has what, `norm_group_sums` the order of additions, which one image's
shape, the groups and the dtype alone decide.

Limits. The axes are an image's pixels, then its channels; these fill whole vectors of 16 bytes, and the smallest part
of a pixel that holds whole groups has at most 1024 of them. Of a part that does not fit into 8 blocks the first pixels
are kept, and the others read twice. bfloat16, float16 or float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._kernels.hopper import norm_group_ptx
from jaxdnn._kernels.hopper.launch import launch
from jaxdnn._kernels.hopper.norm_group_plan import ImagePlan, plan
from jaxdnn._kernels.hopper.ptx import NAMES


def forward(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    groups: int,
    eps: float,
    out_dtype: Any,
    config: ImagePlan | None = None,
) -> Any:
    """y, and mean, rstd and variance (images, groups), of x (images, pixels, channels)."""
    images = x.shape[0]
    chosen = config or _plan(x, groups, out_dtype, 1)
    given = [v for v in (scale, bias) if v is not None]
    code = norm_group_ptx.forward(chosen, eps=eps, scale=scale is not None, bias=bias is not None)
    statistic = jax.ShapeDtypeStruct((images, groups), jnp.float32)
    outs = (jax.ShapeDtypeStruct(x.shape, out_dtype), statistic, statistic, statistic)
    return launch(code, [x, *given], outs, name="group_norm", **_shape(chosen, images, 1))


def backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    scale: Array | None,
    *,
    groups: int,
    out_dtype: Any,
    config: ImagePlan | None = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale and dbias of dy and x (images, pixels, channels), mean and rstd (images, groups)."""
    images, _, channels = x.shape
    chosen = config or _plan(x, groups, out_dtype, 2)
    code = norm_group_ptx.backward(chosen, scale=scale is not None)
    sums = jax.ShapeDtypeStruct((images * chosen.cluster, 2, channels), jnp.float32)
    outs = (jax.ShapeDtypeStruct(x.shape, out_dtype), sums)
    given = [dy, x, mean, rstd] + ([] if scale is None else [scale])
    dx, each = launch(code, given, outs, name="group_norm_dgrad", **_shape(chosen, images, 2))
    dscale, dbias = jnp.sum(each, 0)
    return dx, dscale, dbias


def _plan(x: Array, groups: int, out_dtype: Any, arrays: int) -> ImagePlan:
    _, pixels, channels = x.shape
    names = NAMES[np.dtype(x.dtype)], NAMES[np.dtype(out_dtype)]
    found = plan(pixels, channels, channels // groups, *names, arrays)
    if found is None:
        raise ValueError(f"`x` must have channels that fill vectors and fit into a block, got {channels} of {x.dtype}.")
    return found


def _shape(chosen: ImagePlan, images: int, arrays: int) -> dict[str, Any]:
    """How the kernel is launched."""
    return {
        "blocks": images * chosen.parts,
        "threads": chosen.threads,
        "cluster": chosen.cluster,
        "floats": chosen.floats(arrays),
    }
