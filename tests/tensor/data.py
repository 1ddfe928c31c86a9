"""Data for the tensor ops, and the comparison with their definition."""

from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32"]
X = (2, 6, 4, 3)


def data(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Numbers with ties, zeros of both signs, and of floats fractions."""
    rng = np.random.default_rng([seed, len(shape), *dtype.encode()])
    if dtype in ("int8", "uint8", "int32"):
        return rng.integers(0 if dtype == "uint8" else -100, 100, shape).astype(dtype)
    values = rng.normal(size=shape) * 3
    values[rng.random(shape) < 0.1] = 0.0
    values[rng.random(shape) < 0.1] = -0.0
    return values.astype(np.float32).astype(getattr(ml_dtypes, dtype, dtype))


def agree(name: str, *arrays: Any, choices: dict[str, Any] | None = None, eager: bool = False, **options: Any) -> Any:
    """Asserts the definition's bits, signs of zeros included; of a compiled call, which is one program, not dozens."""
    given = {i: v for i, v in enumerate(arrays) if isinstance(v, np.ndarray)}
    named = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in options.items() if k not in named} | (choices or {})

    def call(given: dict[int, Any], named: dict[str, Any]) -> Any:
        return getattr(dnn, name)(*(given.get(i, v) for i, v in enumerate(arrays)), **named, **static)

    found = (call if eager else jax.jit(call))(given, named)
    wanted = getattr(reference, name)(*arrays, **options, arithmetic="ordered")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a, np.float64), b.astype(np.float64))
        if a.dtype.kind != "i":
            zeros = (b == 0) & ~np.isnan(b.astype(np.float32))
            np.testing.assert_array_equal(np.signbit(np.asarray(a))[zeros], np.signbit(b)[zeros])
    return found
