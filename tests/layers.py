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
    """Frameworks' own layers promote dtypes and ranks as JAX does by default.

    Nearly all time of these tests is XLA's for code that runs once, so it is told not to optimise it much.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def weighted(tree: Any) -> Any:
    """A cotangent of arrays, which no normalisation takes for a constant."""
    return jax.tree.map(lambda v: numbers(v.shape, v.dtype, seed=9), tree)


class Case(NamedTuple):
    """A layer's constructor arguments, the shape of its input, and what `assert_near` is told of its rounding."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    terms: int = 16
    dtype: Any = jnp.float32
    cancelled: float = 0

    def __str__(self) -> str:
        return "-".join([self.name, *(k for k in self.kwargs if k != "key")])[:80]

    def assert_near(self, found: Any, wanted: Any) -> None:
        assert_near(found, wanted, self.terms, self.dtype, self.cancelled)

    @property
    def x(self) -> jax.Array:
        return numbers(self.shape, self.dtype)


def numbers(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def filled(shapes: Any) -> Any:
    """Arrays like those that `jax.eval_shape` tells of: a model's initializers compile a generator for each shape."""
    return jax.tree.map(lambda v: numbers(v.shape, v.dtype) / 4, shapes)


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


def assert_near(found: Any, wanted: Any, terms: int = 16, dtype: Any = jnp.float32, cancelled: float = 0) -> None:
    """Equal but for rounding, each array by its own scale, so that a small gradient beside large ones is checked too.

    The scale is the largest element that the array should have, or `cancelled` if that is larger: the size of terms of
    which nothing is left in some gradient. Each of the two has sums of so many terms in float32, and where the layer
    has a narrow dtype, two roundings to it.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    unit = 2 * terms * float(jnp.finfo(jnp.float32).eps) + 4 * float(jnp.finfo(dtype).eps) * (dtype != jnp.float32)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = unit * max(float(np.abs(b).max(initial=0)), cancelled)
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))


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
