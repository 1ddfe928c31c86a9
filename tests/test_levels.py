"""Levels kept by every op that promises one, forward and backward: by calls drawn from a seed, and manifests' examples.

What the procedures of `jaxdnn verify` do to the calls of its matrix is done here to others, to results and gradients
in one: alone and in the batch, operation by operation and compiled among other operations, and sharded.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases.example import LARGE, Example, examples
from jaxdnn._src.cases.subject import Subject, gradient, strongest
from jaxdnn._src.core.determinism import is_fixed
from jaxdnn._src.core.rounding import rounded
from jaxdnn.verify import levels
from tests import level_calls
from tests.level_calls import LevelCall, roundings_omitted

SEED = 11


def subject(call: LevelCall) -> Subject:
    """The call with its gradient; without it where that fixes no bits."""
    batch = call.batch or (None,) * len(call.arrays)
    plain = Subject(call.name, "any", "f32", "portable", lambda _: call.function, call.arrays, batch, call.out)
    plain = dataclasses.replace(plain, declared=strongest(plain))
    return (gradient(plain) if is_fixed(plain.declared) else None) or plain


def found(call: LevelCall) -> Iterator[str]:
    """What is wrong with a call."""
    made = subject(call)
    assert is_fixed(made.declared), call.name
    yield from found_of(made, "alone", "company", "mesh")


def found_of(made: Subject, *procedures: str) -> Iterator[str]:
    for procedure in procedures:
        level = next(level for level, group in levels.PROCEDURES.items() if procedure in group)
        trial = levels.trial(made, level, procedure, "quick")
        if trial.status == "failed":
            yield f"{trial.id} at {made.declared}: {trial.message}"


@pytest.mark.parametrize("call", list(level_calls.once_broken()), ids=lambda call: call.name)
def test_calls_that_broke_their_level(call: LevelCall):
    assert not list(found(call))


@pytest.mark.parametrize("kind", level_calls.KINDS, ids=lambda kind: kind.__name__)
def test_levels_are_kept(kind: Callable[[np.random.Generator], Iterator[Any]]):
    """One call of every kind."""
    calls = list(level_calls.calls(SEED, kind))
    assert not list(found(calls[SEED % len(calls)]))


CALLS = {name: called for name, called in examples().items() if "N" in "".join(called.operands)}
OTHERS = {name: called for name, called in examples().items() if name not in CALLS}


def example_of(called: Example, dtype: str) -> Subject:
    """An example, at the strongest level that it can be traced at; of its results those of each image."""
    operands = tuple(v.astype(dtype if v.ndim > 1 else "float32") for v in called.data(LARGE))
    batched = "N" in "".join(called.operands)

    def function(batch: int) -> Any:
        def run(*arrays: Any) -> list[Any]:
            results = jax.tree.leaves(called.call(getattr(dnn, called.op), *arrays, sizes={**LARGE, "N": batch}))
            return [y for y, axes in zip(results, called.results, strict=True) if "N" in axes or not batched]

        return run

    where = lambda axes: axes.index("N") if "N" in axes else None
    out = next((where(axes) for axes in called.results if "N" in axes), None)
    made = Subject(called.op, "any", dtype, "portable", function, operands, tuple(map(where, called.operands)), out)
    return dataclasses.replace(made, declared=strongest(made)) if out is not None or not batched else made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_examples_keep_their_levels(name: str, dtype: str):
    """Not put among other operations: XLA joins those before and after one that hands its operand on (unpooling)."""
    made = example_of(CALLS[name], dtype)
    if made.out_axis is None or not is_fixed(made.declared):
        pytest.skip("no level promises bits of what this is to an image")
    assert not list(found_of(gradient(made) or made, "alone", "mesh"))


@pytest.mark.parametrize("name", OTHERS)
def test_examples_without_a_batch_keep_their_levels(name: str):
    made = example_of(OTHERS[name], "float32")
    if not is_fixed(made.declared):
        pytest.skip("no level promises its bits")
    assert not list(found_of(made, "eager", "company"))


# What the compilers for GPUs approximate, or do in an order of their own: but for float64's quotients and roots.
NARROW = r"[x<](?:f32|bf16|f16)>"
APPROXIMATE = re.compile(
    rf"stablehlo\.(?:(?:divide|sqrt)\b.*{NARROW}|(?:rsqrt|cbrt|exponential|log|tanh?|sine|cosine|power)\w*\b"
    rf"|(?:dot_general|convolution|reduce\(.* stablehlo\.add).*{NARROW})"
)


def approximated(function: Callable[..., Any], *operands: Any) -> list[str]:
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in text.splitlines() if APPROXIMATE.search(line)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
def test_what_is_portable_is_made_of_what_every_device_computes_alike(name: str, dtype: str):
    made = example_of({**CALLS, **OTHERS}[name], dtype)
    if made.declared != "portable" or (made.out_axis is None and name in CALLS):
        pytest.skip("no level promises its bits on every device")
    found = approximated(made.whole(), *made.operands)
    if name == "reduce-max":  # whether a sum is NaN depends on no order
        found = [line for line in found if "stablehlo.add" not in line]
    assert not found


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
def test_no_rounding_of_bits_that_a_level_fixes_is_omitted(name: str, dtype: str):
    """In values and gradients, and in the tangents of gradients, which are first derivatives too."""
    try:
        made = example_of({**CALLS, **OTHERS}[name], dtype)
    except TypeError:
        if dtype == "bfloat16":
            raise
        pytest.skip("it takes no float8")
    if not is_fixed(made.declared) or (made.out_axis is None and name in CALLS):
        pytest.skip("no level promises its bits")
    for subject in filter(None, (made, gradient(made))):
        assert not roundings_omitted(subject.whole(), *subject.operands)
    if "dgrad" in name:
        # Of recurrent layers along dy alone: their second derivatives are XLA's products at any level.
        count = 1 if name.startswith(("lstm", "gru", "rnn")) else len(made.operands)
        whole = lambda rest: lambda *linear: made.whole()(*linear, *rest)
        along = lambda *given: jax.jvp(
            whole(given[count : len(made.operands)]), given[:count], given[len(made.operands) :][:count]
        )
        assert not roundings_omitted(along, *made.operands, *made.operands)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_rounding_that_gpus_omit_is_seen(dtype: Any):
    x = jnp.ones((3, 5), dtype)
    double = lambda x: x.astype(jnp.float32) * 3
    other = jnp.float16 if x.dtype == jnp.bfloat16 else jnp.bfloat16
    small = jnp.float8_e4m3fn if x.dtype == jnp.float8_e5m2 else jnp.float8_e5m2
    for omitted in (
        lambda x: double(x).astype(x.dtype).T.astype(jnp.float32) + 1,
        lambda x: double(x).astype(x.dtype).astype(other),
        lambda x: x.astype(jnp.float32).astype(small).astype(jnp.float32),
    ):
        assert roundings_omitted(omitted, x)
    for kept in (
        lambda x: rounded(double(x).astype(x.dtype)).T.astype(jnp.float32) + 1,
        lambda x: x.astype(jnp.float32).T.astype(x.dtype).astype(jnp.float32),
        lambda x: double(x).astype(x.dtype) == x,
    ):
        assert not roundings_omitted(kept, x)
    wide = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    assert bool(roundings_omitted(wide, x)) == (x.dtype == jnp.float16)


@pytest.mark.parametrize(
    "function",
    [lambda x: 1 / x, jnp.sqrt, jnp.sum, lambda x: x @ x.T, jnp.exp, lambda x: x**0.3],
    ids=["quotient", "root", "sum", "product", "exp", "power"],
)
def test_what_gpus_approximate_is_seen(function: Callable[..., Any]):
    for dtype in (np.float32, jnp.bfloat16):
        assert approximated(function, jnp.ones((3, 5), dtype))
