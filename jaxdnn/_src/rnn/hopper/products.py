"""A layer's products over all steps by the convolutions' kernels, which fix the order of additions; XLA's does not.

x W is a convolution of one tap over the rows, and its derivatives are that convolution's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.core import blending, engines
from jaxdnn._src.core.engines import Slower
from jaxdnn._src.rnn import primitive
from jaxdnn._src.rnn.primitive import ProductSpec

OF = {name: result for result, name in primitive.PRODUCTS.items()}


def _geometry(rows: int) -> Geometry:
    return Geometry((rows,), (1,), (1,), ((0, 0),), (1,))


def _shapes(call: engines.Call) -> dict[str, tuple[int, ...]]:
    """Those of x, w and y, with all axes of rows as one."""
    given = dict(zip(primitive.OPERANDS[OF[call.op]], (aval.shape for aval in call.avals), strict=True))
    rows = next(math.prod(shape[:-1]) for name, shape in given.items() if name != "w")
    if "w" in given:
        inputs, columns = given["w"]
    else:
        inputs, columns = given["x"][-1], given["y"][-1]
    return {"x": (1, rows, inputs), "w": (1, inputs, columns), "y": (1, rows, columns)}


def _out_dtype(spec: ProductSpec) -> Any:
    return np.dtype(np.float32) if spec.wide else spec.narrow


def _unsupported(call: engines.Call) -> str | None:
    from jaxdnn._src.conv.hopper import dgrad, fprop, wgrad

    spec: ProductSpec = call.spec
    if blending.accumulator(spec.narrow) != np.float32 or np.dtype(spec.narrow).itemsize != 2:
        return f"its kernels multiply bfloat16 and float16, not {np.dtype(spec.narrow).name}"
    if len(call.avals[0].shape) != spec.rows + 1:
        return "its kernels have one matrix, not one for each head or mapped layer"
    shapes, result = _shapes(call), OF[call.op]
    if 0 in (size for shape in shapes.values() for size in shape):
        return "its kernels take at least one row and column"
    module = {"y": fprop, "x": dgrad, "w": wgrad}[result]
    avals = (jax.ShapeDtypeStruct(shapes[name], spec.narrow) for name in primitive.OPERANDS[result])
    return module.supports(*avals, geo=_geometry(shapes["x"][1]), out_dtype=_out_dtype(spec))


def _run(call: engines.Call, *operands: Array) -> Array:
    from jaxdnn._src.conv.hopper import dgrad, fprop, wgrad

    spec: ProductSpec = call.spec
    shapes, result = _shapes(call), OF[call.op]
    kernel: Any = {"y": fprop.conv_fprop, "x": dgrad.conv_dgrad, "w": wgrad.conv_wgrad}[result]
    names = primitive.OPERANDS[result]
    given = (v.astype(spec.narrow).reshape(shapes[name]) for name, v in zip(names, operands, strict=True))
    found = kernel(*given, geo=_geometry(shapes["x"][1]), out_dtype=_out_dtype(spec))
    shape = primitive.product_result(result, spec, *call.avals).shape
    return jnp.reshape(found, shape)


def _level(call: engines.Call) -> str:
    return "run_to_run" if call.op == primitive.PRODUCTS["w"] else "batch_invariant"


hopper.declare(
    *primitive.PRODUCTS.values(),
    unsupported=_unsupported,
    run=_run,
    level=_level,
    accumulation=lambda call: "tensor_core",
    slower=(Slower("beside XLA's products of matrices it was not timed", lambda call: True),),
    notes=("tensor cores", "a convolution of one tap"),
)
