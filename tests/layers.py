"""What the tests of layers share: cases, and comparisons with the framework's own layer."""

import doctest
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Frameworks' own layers promote dtypes and ranks as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def weighted(tree: Any) -> Any:
    """A cotangent of arrays, whose elements differ."""
    return jax.tree.map(lambda v: jnp.asarray(np.arange(v.size).reshape(v.shape) % 5 - 1.5, v.dtype), tree)


class Case(NamedTuple):
    """A layer's constructor arguments, the shape of its input, and how many terms its longest sum has."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    terms: int = 64
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={getattr(v, '__name__', v)}" for k, v in self.kwargs.items())])[:80]

    @property
    def x(self) -> jax.Array:
        return numbers(self.shape, self.dtype)


def numbers(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def other(tree: Any) -> Any:
    """The same arrays with other numbers, positive, so that they may be variances too."""
    leaves, structure = jax.tree.flatten(tree)
    floats = [hasattr(v, "dtype") and v.dtype.kind in "fV" for v in leaves]
    new = [abs(numbers(v.shape, v.dtype, i)) + 0.25 if floats[i] else v for i, v in enumerate(leaves)]
    return jax.tree.unflatten(structure, new)


def assert_same(found: Any, wanted: Any) -> None:
    """Trees are equal bit for bit, with names, shapes and dtypes."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def assert_near(found: Any, wanted: Any, terms: int, dtype: Any = jnp.float32) -> None:
    """Equal but for the rounding of sums of so many terms, in each of the two, in the narrowest dtype of the layer.

    A sum of n terms is off by n eps Σ|term| at most. Terms may cancel, so the largest element of all stands for them.
    """
    largest = max(float(np.abs(np.asarray(v, np.float64)).max(initial=0)) for v in jax.tree.leaves(wanted))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = 2 * terms * float(jnp.finfo(dtype).eps) * largest
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def classes(module: types.ModuleType) -> dict[str, type]:
    """A module's layers."""
    return {
        name: v
        for name, v in vars(module).items()
        if inspect.isclass(v) and v.__module__ == module.__name__ and not name.startswith("_")
    }


def _signature(owner: Any) -> inspect.Signature:
    return inspect.Signature(list(inspect.signature(owner.__init__).parameters.values())[1:])


def given(owner: Any, case: Case) -> set[str]:
    """The arguments of a class's constructor that a case gives another value than the default."""
    signature = _signature(owner)
    bound = signature.bind_partial(*case.args, **case.kwargs).arguments
    return {name for name, v in bound.items() if v is not signature.parameters[name].default}


def unserved(owner: Any, cases: list[Case], elsewhere: set[str]) -> set[str]:
    """Arguments of a class's constructor that neither a case nor anything elsewhere gives."""
    return set(_signature(owner).parameters).difference(elsewhere, *(given(owner, case) for case in cases))


def run_example(owner: Any) -> None:
    """The example in a docstring, which has one, prints what it says."""
    names = {"jax": jax, "jnp": jnp, "dnn": dnn}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(owner) or "", names, owner.__name__, None, None)
    results = doctest.DocTestRunner().run(example)
    assert not results.failed
