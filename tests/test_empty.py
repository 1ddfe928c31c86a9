"""Arrays without elements: every op with each of its sizes 0 in turn gives what the definition gives, or one sentence.

A sum of nothing is 0, a mean of nothing NaN, a maximum of nothing is refused; so is a size that a window does not fit.
"""

import dataclasses
import functools as ft
import inspect
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
from jaxdnn._src.cases import example
from tests.conv import cases, helpers

EXAMPLES = example.first()
SENTENCE = re.compile(r"`\w+` .*\.")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_size_in_turn(name: str):
    """By the engine that is chosen and by `ordered`."""
    op, definition = getattr(dnn, name), getattr(reference, name)
    engines = [{}, {"engine": "ordered"}] if "engine" in inspect.signature(op).parameters else [{}]
    dtypes = (np.float32, ml_dtypes.bfloat16, np.int8) if name.startswith("conv") else (np.float32,)
    for letter, engine, dtype in itertools.product(EXAMPLES[name].letters, engines, dtypes):
        call = ft.partial(EXAMPLES[name].call, sizes={**example.SMALL, letter: 0})
        arrays = [np.ones(shape, dtype) for shape in EXAMPLES[name].shapes({**example.SMALL, letter: 0})]
        function = ft.partial(call, ft.partial(op, **engine))
        try:
            found = jax.tree.leaves(function(*map(jnp.asarray, arrays)))
        except (ValueError, NotImplementedError) as error:  # any other is a failure
            if SENTENCE.fullmatch(str(error)):
                continue
            raise
        with np.errstate(all="ignore"):
            wanted = jax.tree.leaves(call(definition, *arrays))
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == np.shape(b), (letter, engine, dtype)
            # What is no whole number is the loss of features that are none: the logarithm of how many words there are.
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2.0**-23, atol=0)
        if dtype != np.int8 and arrays:
            differentiate(function, arrays)


def differentiate(function: Callable[..., Any], arrays: list[Any]) -> None:
    """The gradient in every array has its shape; lowered only, which is where sizes are divided by."""

    def scalar(*arrays: jax.Array) -> jax.Array:
        every = jax.tree.leaves(function(*arrays))
        results = [y.astype(jnp.float32).sum() for y in every if jnp.issubdtype(y.dtype, jnp.floating)]
        return ft.reduce(jnp.add, results, jnp.float32(0))

    lowered = jax.jit(jax.grad(scalar, tuple(range(len(arrays))))).lower(*arrays)
    for array, gradient in zip(arrays, lowered.out_info, strict=True):
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("op", cases.OPS)
def test_convolutions_of_every_rank_with_a_prior(op: str, rank: int):
    """Of nothing the sum is 0, and the prior stays."""
    many = []
    for empty, dtype in itertools.product(("batch", "channels", "filters"), (np.float32, ml_dtypes.bfloat16, np.int8)):
        counts = {"batch": 2, "channels": 8, "filters": 7, empty: 0}
        window = {"sizes": (5, 4, 6)[:rank], "taps": (3, 2, 1)[:rank], "stride": 2, "padding": 1}
        geometry = cases.Geometry(**counts, **window, layout=("NWC", "NCHW", "NDHWC")[rank - 1])
        case = cases.case(op, geometry, 1, dtype=dtype).with_epilogue(2, beta=1.0, prior=True)
        many += [case] if op == "conv_bgrad" or dtype == np.int8 else [case, case.with_options(engine="ordered")]
    for case, out in zip(many, helpers.compute_all(many), strict=True):
        options = {k: v for k, v in case.options.items() if k != "engine"}
        helpers.check(dataclasses.replace(case, options=options), out)
