"""The epilogue on a tile of the accumulator, in registers: act(alpha * acc + beta * prior + residual + bias).

Every operation is rounded to float32 on its own, as in the definition: a compiler that fuses the multiplications by
alpha and beta with the additions after them would change bits, so those two are written in PTX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.core.compat import ir, llvm, mgpu, mgpu_utils, plgpu, vector
from jaxdnn._src.hopper.wgmma import inline_mgpu

_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654

ACTIVATIONS: dict[str, Callable[[Array, Any], Array]] = {
    "identity": lambda z, _: z,
    "relu": lambda z, _: jnp.maximum(z, 0.0),
    "sigmoid": lambda z, _: _sigmoid(z),
    "tanh": lambda z, _: jnp.tanh(z),
    "gelu": lambda z, _: 0.5 * z * (1.0 + lax.erf(z * _SQRT_HALF)),
    "gelu_tanh": lambda z, _: 0.5 * z * (1.0 + jnp.tanh(_SQRT_2_OVER_PI * (z + 0.044715 * (z * z * z)))),
    "swish": lambda z, beta: z * _sigmoid(z if beta in (None, 1.0) else z * beta),
    "leaky_relu": lambda z, slope: jnp.where(z > 0.0, z, z * slope),
    "clipped_relu": lambda z, ceiling: jnp.minimum(jnp.maximum(z, 0.0), ceiling),
}


def _sigmoid(z: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-z))


def supports(epilogue: Epilogue | None, accumulator: Any) -> str | None:
    """Why the kernels cannot run an epilogue, or None."""
    if epilogue is None:
        return None
    if not all(isinstance(v, int | float) for v in (epilogue.alpha, epilogue.beta)):
        return "its kernel takes alpha and beta as numbers, not as traced values"
    if epilogue.activation is not None and epilogue.activation[0] not in ACTIVATIONS:
        return f"its kernel has no activation {epilogue.activation[0]!r}"
    if epilogue.integer or (jnp.issubdtype(accumulator, jnp.integer) and not _plain(epilogue)):
        return "its kernel has no integer epilogue"
    return None


def _plain(epilogue: Epilogue) -> bool:
    return epilogue.linear and epilogue.alpha == 1


def finisher(epilogue: Epilogue | None) -> Callable[[Array, Sequence[Array], Array | None], Array] | None:
    """The function of (accumulator, tiles of what is given like the result, bias) that a kernel runs on a tile."""
    if epilogue is None or _plain(epilogue):
        return None

    def finish(acc: Array, tiles: Sequence[Array], bias: Array | None) -> Array:
        rest = list(tiles)
        z = acc if epilogue.alpha == 1 else scaled(acc, float(epilogue.alpha))
        if epilogue.prior:
            prior = rest.pop(0)
            z = z + (prior if epilogue.beta == 1 else scaled(prior, float(epilogue.beta)))
        if epilogue.residual:
            z = z + rest.pop(0)
        if bias is not None:
            z = z + bias
        if epilogue.relu:
            z = jnp.where(rest.pop(0) > 0.0, z, jnp.zeros_like(z))
        if epilogue.activation is None:
            return z
        name, parameter = epilogue.activation
        return ACTIVATIONS[name](z, parameter)

    return finish


def scaled(tile: Array, factor: float) -> Array:
    """factor * tile, rounded; never part of a fused multiply-add."""
    layout = plgpu.Layout.WGMMA

    @inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=layout))
    def multiply(_: Any, tile: Any) -> Any:
        f32 = ir.F32Type.get()
        constant = mgpu_utils.c(factor, f32)

        def registers(register: ir.Value) -> ir.Value:
            size = ir.VectorType(register.type).shape[0]
            out = register
            for i in range(size):
                product: Any = llvm.inline_asm(
                    f32,
                    [vector.extract(register, dynamic_position=[], static_position=[i]), constant],
                    "mul.rn.f32 $0, $1, $2;",
                    "=f,f,f",
                )
                out = vector.insert(product, out, dynamic_position=[], static_position=[i])
            return out

        new = np.empty_like(tile.registers)
        for index, register in np.ndenumerate(tile.registers):
            new[index] = registers(register)
        return mgpu.FragmentedArray(_registers=new, _layout=tile.layout, _is_signed=tile.is_signed)

    return multiply(tile)


def dtypes(epilogue: Epilogue | None, operands: Sequence[jax.ShapeDtypeStruct | Array]) -> tuple[Any, ...]:
    """The dtypes of the output-shaped operands, in their order."""
    if epilogue is None:
        return ()
    named = dict(zip(epilogue.operands, operands, strict=True))
    return tuple(named[name].dtype for name in epilogue.like_result)
