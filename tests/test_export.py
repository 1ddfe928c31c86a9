"""`jax.export` for batches of any size: of every op here, and for the GPU whose kernels are chosen unasked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.cases import example
from jaxdnn._src.cases.example import SMALL

EXAMPLES = {name: e for name, e in example.first().items() if "N" in "".join(e.operands)}
BIG: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (dnn.layer_norm, ((512, 1024),)),
    "layer_norm_dgrad": (dnn.layer_norm_dgrad, ((512, 1024),) * 2),
    "rms_norm": (dnn.rms_norm, ((8192,),)),
    "group_norm": (dnn.group_norm, ((32, 32, 256),)),
    "batch_norm": (dnn.batch_norm, ((32, 32, 64),)),
    "softmax": (dnn.softmax, ((1024,),)),
    "softmax, long": (dnn.softmax, ((50304,),)),
    "softmax_dgrad": (dnn.softmax_dgrad, ((1024,),) * 2),
    "logsumexp": (dnn.logsumexp, ((50304,),)),
    "pool": (dnn.pool, ((56, 56, 64),)),
    "pool_dgrad": (dnn.pool_dgrad, ((28, 28, 64), (56, 56, 64))),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_batch_of_any_size(name: str):
    called, batched = EXAMPLES[name], [i for i, axes in enumerate(EXAMPLES[name].operands) if "N" in axes]

    def run(*arrays: Any) -> Any:
        n = arrays[0].shape[called.operands[batched[0]].index("N")]
        every: list[Any] = called.data()
        for i, array in zip(batched, arrays, strict=True):
            every[i] = array
        return called.call(getattr(dnn, name), *(jnp.asarray(v, jnp.float32) for v in every), sizes={**SMALL, "N": n})

    (b,) = export.symbolic_shape("b")
    shapes = called.shapes({**SMALL, "N": b})
    exported = export.export(jax.jit(run))(*(jax.ShapeDtypeStruct(shapes[i], jnp.float32) for i in batched))
    for batch in (2, 3):
        data = called.data({**SMALL, "N": batch})
        arrays = [data[i].astype(np.float32) for i in batched]
        for found, expected in zip(jax.tree.leaves(exported.call(*arrays)), jax.tree.leaves(run(*arrays)), strict=True):
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def specs(shapes: tuple[tuple[int, ...], ...]) -> list[jax.ShapeDtypeStruct]:
    (b,) = export.symbolic_shape("b")
    return [jax.ShapeDtypeStruct((b, *shape), jnp.bfloat16) for shape in shapes]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("name", BIG)
def test_for_a_gpu(name: str):
    """Where a kernel is the choice for a batch of a known size, XLA serves one that is not known."""
    function, shapes = BIG[name]
    exported = export.export(jax.jit(function), platforms=["cuda"])(*specs(shapes))
    assert "mosaic_gpu" not in exported.mlir_module()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("name", BIG)
def test_a_named_kernel_says_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hopper, "no_device", lambda call: None)
    function, shapes = BIG[name]
    with pytest.raises(NotImplementedError, match=r"hopper: .* the batch is symbolic"):
        jax.eval_shape(lambda *arrays: function(*arrays, engine="hopper"), *specs(shapes))


IMAGE = np.arange(20, dtype=np.float32).reshape(1, 4, 5, 1) ** 2
OPEN: dict[str, Callable[..., Any]] = {
    "softmax with a mask": lambda x: dnn.softmax(x, where=x > 0),
    "logsumexp with a mask": lambda x: dnn.logsumexp(x, axis=(0, 1), where=x > 0),
    "map_coordinates at any number of points": lambda x: dnn.map_coordinates(IMAGE[0, :, :, 0], jnp.abs(x[:, :2, 0]).T),
    "roi_align of any number of boxes": lambda x: dnn.roi_align(
        IMAGE, 2 * x[:, 0, :4], batch_indices=0 * x[:, 0, 0].astype(jnp.int32), output_sizes=2
    ),
    "batch_norm per activation": lambda x: dnn.batch_norm(x, mode="per_activation", layout="NWC")[0],
    "ctc_loss, mean": lambda x: dnn.ctc_loss(
        x, jnp.ones((1, 2), jnp.int32) + 0 * x[:, 0, :2].astype(jnp.int32), reduction="mean"
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_options_over_a_batch_of_any_size(name: str):
    x = np.random.default_rng(3).standard_normal((3, 4, 5)).astype(np.float32)
    (n,) = export.symbolic_shape("n")
    exported = export.export(jax.jit(OPEN[name]))(jax.ShapeDtypeStruct((n, 4, 5), jnp.float32))
    np.testing.assert_allclose(exported.call(x), OPEN[name](x), rtol=1e-5, atol=1e-6)


def test_what_an_open_batch_cannot_have_is_said():
    (n,) = export.symbolic_shape("n")
    x, labels = jax.ShapeDtypeStruct((n, 4, 5), jnp.float32), jax.ShapeDtypeStruct((n, 2), jnp.int32)
    ctc = jax.jit(lambda x, labels: dnn.ctc_loss(x, labels, reduction="mean", determinism="portable"))
    with pytest.raises(NotImplementedError, match=r"`reduction` 'mean' over a batch that `jax\.export` leaves"):
        export.export(ctc)(x, labels)
    linear = jax.jit(lambda x, labels: dnn.linear_cross_entropy(x, jnp.ones((5, 7)), labels))
    with pytest.raises(NotImplementedError, match="`x` must have a number of rows known when traced"):
        export.export(linear)(x, jax.ShapeDtypeStruct((n, 4), jnp.int32))
