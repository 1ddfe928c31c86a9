"""A model changed by one line: `jaxdnn.linen`, `jaxdnn.nnx`, `jaxdnn.equinox` in place of the frameworks' modules."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import layers

MODULES = {"jaxdnn.linen": "flax.linen", "jaxdnn.nnx": "flax.nnx", "jaxdnn.equinox": "equinox.nn"}
LINEN = """
from flax import linen as nn

class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3), strides=2, use_bias=False)(x)))
        x = nn.max_pool(x, (2, 2))
        layers = [nn.GroupNorm(2), nn.Conv(4, (1, 1), kernel_init=nn.initializers.lecun_normal()), nn.Dense(5)]
        return nn.Sequential(layers)(x).mean((1, 2))
"""
NNX = """
from flax import nnx

class Network(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dense = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        return self.dense(nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2)).mean((1, 2)))
"""


@pytest.mark.parametrize("ours", MODULES)
def test_what_is_no_layer_of_ours_is_the_frameworks(ours: str):
    theirs = pytest.importorskip(MODULES[ours])
    module = importlib.import_module(ours)
    public = [name for name in vars(theirs) if name[0] != "_"]
    assert {"Conv" in public, len(public) > 20} == {True}
    for name in public:
        assert (getattr(module, name) is getattr(theirs, name)) == (name not in module.__all__), name
    with pytest.raises(
        AttributeError, match=rf"^module '{ours}' has no attribute 'Cnov', nor has '{theirs.__name__}'$"
    ):
        _ = module.Cnov


def network(source: str, ours: bool) -> Any:
    names: dict[str, Any] = {"__name__": __name__}
    exec(source.replace("from flax import", "from jaxdnn import") if ours else source, names)
    return names["Network"]


def assert_near(found: Any, wanted: Any) -> None:
    """Some hundred units in the last place of an array's largest number, after five layers in float32."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=300 * float(np.finfo(np.float32).eps) * float(abs(b).max()))


X = layers.numbers((2, 8, 6, 3))


def test_a_linen_model():
    pytest.importorskip("flax.linen")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        ours, theirs = (network(LINEN, choice)() for choice in (True, False))
        variables = layers.filled(jax.eval_shape(lambda key: theirs.init(key, X, False), jax.random.key(1)))
        step = lambda model: jax.jit(lambda v: model.apply(v, X, True, mutable="batch_stats"))(variables)
        assert_near(step(ours), step(theirs))
        assert "jaxdnn" in str(jax.make_jaxpr(lambda v: ours.apply(v, X, False))(variables))


def test_an_nnx_model():
    nnx = pytest.importorskip("flax.nnx")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        ours, theirs = (network(NNX, choice)(nnx.Rngs(0)) for choice in (True, False))
        assert_near(ours(X), theirs(X))
        assert_near(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))
        assert type(ours.conv).__module__ == "jaxdnn.nnx"
        assert jnp.isfinite(ours(X)).all()
