"""Arrays without elements: every op with each of its sizes 0 in turn gives what the definition gives, or one sentence.

A sum of nothing is 0, a mean of nothing NaN, a maximum of nothing is refused; so is a size that a window does not fit.
"""

import dataclasses
import functools as ft
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.conv import cases, helpers
from tests.test_api import ARRAYS, NEEDED, narrow, parameters, several

SENTENCE = re.compile(r"`\w+` .*\.")


def without(size: int, arguments: list[Any], dtype: Any) -> list[Any]:
    """The arguments with 0 in place of a size, in every array and shape that has it."""

    def shrunk(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            kind = dtype if value.dtype == np.float32 else value.dtype
            return np.ones([0 if n == size else n for n in value.shape], kind)
        return tuple(0 if n == size else n for n in value) if isinstance(value, tuple) else value

    return [shrunk(value) for value in arguments]


def calls(name: str) -> list[tuple[list[Any], dict[str, Any]]]:
    """Arguments and options: each size in turn, by the engine that is chosen and by `ordered`, of some dtypes."""
    arguments = narrow(ARRAYS[name])
    sizes = {
        n for v in arguments for n in (v.shape if isinstance(v, np.ndarray) else v if isinstance(v, tuple) else ())
    }
    engines = (None, "ordered") if "engine" in {p.name for p in parameters(getattr(dnn, name))} else (None,)
    dtypes = (np.float32, ml_dtypes.bfloat16, np.int8) if name.startswith("conv") else (np.float32,)
    return [
        (without(size, arguments, dtype), NEEDED.get(name, {}) | ({} if engine is None else {"engine": engine}))
        for size in sorted(sizes)
        for dtype in dtypes
        for engine in engines
    ]


@pytest.mark.parametrize("name", ARRAYS)
def test_every_size_in_turn(name: str):
    definition = getattr(reference, name)
    for arguments, options in calls(name):
        function = ft.partial(getattr(dnn, name), **options)
        given = [jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in arguments]
        try:
            found = several(function(*given))
        except (ValueError, NotImplementedError) as error:  # any other is a failure
            if SENTENCE.fullmatch(str(error)):
                continue
            raise
        with np.errstate(all="ignore"):
            wanted = several(definition(*arguments, **NEEDED.get(name, {})))
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == np.shape(b), (arguments, options)
            np.testing.assert_array_equal(np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64))
        differentiate(function, given)


def differentiate(function: Callable[..., Any], given: list[Any]) -> None:
    """The gradient in every array has its shape; lowered only, which is where sizes are divided by."""
    floats = [i for i, v in enumerate(given) if isinstance(v, jax.Array) and jnp.issubdtype(v.dtype, jnp.floating)]

    def scalar(*arrays: jax.Array) -> jax.Array:
        every = list(given)
        for i, v in zip(floats, arrays, strict=True):
            every[i] = v
        results = [
            y.astype(jnp.float32).sum() for y in several(function(*every)) if jnp.issubdtype(y.dtype, jnp.floating)
        ]
        return ft.reduce(jnp.add, results, jnp.float32(0))

    if floats:
        arrays = [given[i] for i in floats]
        lowered = jax.jit(jax.grad(scalar, tuple(range(len(floats))))).lower(*arrays)
        for array, gradient in zip(arrays, lowered.out_info, strict=True):
            assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("op", cases.OPS)
def test_convolutions_of_every_rank_with_a_prior(op: str, rank: int):
    """Of nothing the sum is 0, and the prior stays."""
    many = []
    for empty, dtype in itertools.product("nck", (np.float32, ml_dtypes.bfloat16, np.int8)):
        counts = {"n": 2, "c": 8, "k": 7, empty: 0}
        window = {"sizes": (5, 4, 6)[:rank], "taps": (3, 2, 1)[:rank], "stride": 2, "padding": 1}
        geometry = cases.Geometry(**counts, **window, layout=("NWC", "NCHW", "NDHWC")[rank - 1])
        case = cases.case(op, geometry, 1, dtype=dtype).with_epilogue(2, beta=1.0, prior=True)
        many += [case] if op == "conv_bgrad" or dtype == np.int8 else [case, case.with_options(engine="ordered")]
    for case, out in zip(many, helpers.compute_all(many), strict=True):
        options = {k: v for k, v in case.options.items() if k != "engine"}
        helpers.check(dataclasses.replace(case, options=options), out)
