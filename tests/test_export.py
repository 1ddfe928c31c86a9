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
from tests.test_api import ARRAYS, NEEDED, OPS, narrow, several

WITHOUT_BATCH = {"batch_norm_inference", "bn_finalize", "bn_finalize_inference", "dropout_mask"}
KNOWN_ROWS = {"linear_cross_entropy"}  # how many there are decides how many chunks
DATA = 2  # the batch of test_api's arrays
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


def of_batch(value: Any, batch: Any) -> Any:
    """An array's repeated rows, or a shape, for another batch; what has no batch as it is."""
    if isinstance(value, tuple) and value[0] == DATA:
        return (batch, *value[1:])
    if isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[0] == DATA:
        return np.resize(value, (batch, *value.shape[1:]))
    return value


@pytest.mark.parametrize("name", sorted(set(OPS) - WITHOUT_BATCH - KNOWN_ROWS))
def test_batch_of_any_size(name: str):
    given = narrow(ARRAYS[name])
    batched = [i for i, v in enumerate(given) if isinstance(of_batch(v, 3), np.ndarray) and v is not of_batch(v, 3)]

    def run(*arrays: jax.Array) -> Any:
        values = [of_batch(v, arrays[0].shape[0]) if isinstance(v, tuple) else v for v in given]
        for i, array in zip(batched, arrays, strict=True):
            values[i] = array
        return getattr(dnn, name)(*values, **NEEDED.get(name, {}))

    (b,) = export.symbolic_shape("b")
    wanted = [jax.ShapeDtypeStruct((b, *given[i].shape[1:]), jnp.asarray(given[i]).dtype) for i in batched]
    exported = export.export(jax.jit(run))(*wanted)
    for batch in (DATA, 3):
        arrays = [of_batch(given[i], batch) for i in batched]
        for found, expected in zip(several(exported.call(*arrays)), several(run(*arrays)), strict=True):
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
