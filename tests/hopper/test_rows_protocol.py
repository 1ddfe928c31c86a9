"""The protocol of the kernels of rows, whose warpgroups exchange sums through shared memory (`hopper/protocol.py`).

Of kernels in Pallas: those that are PTX run on machines that look for races themselves.
"""

import contextlib
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from tests.hopper.protocol import lowered, place_of
from tests.hopper.shared_memory import Fault


def rows(op: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Callable[[], Any]:
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return lambda: lowered(ft.partial(op, engine="hopper", **options), *avals)


def scaled(dy: jax.Array, x: jax.Array, scale: jax.Array, **options: Any) -> Any:
    return dnn.layer_norm_dgrad(dy, x, scale=scale, **options)


# Threads of one warpgroup, of two, four and eight; one row at once and several; blocks that stay.
PROTOCOLS = {
    "layer norm, a warpgroup": rows(dnn.layer_norm, (9, 2048)),
    "layer norm": rows(dnn.layer_norm, (9, 4096)),
    "layer norm, blocks that stay": rows(dnn.layer_norm, (9, 16384)),
    "rms norm": rows(dnn.rms_norm, (9, 4096)),
    "gradient": rows(scaled, (9, 4096), (9, 4096), (4096,)),
    "gradient, sums of several warpgroups": rows(scaled, (40, 1024), (40, 1024), (1024,)),
    "gradient, rows of a warp": rows(scaled, (40, 256), (40, 256), (256,)),
    "gradient, blocks that stay": rows(scaled, (9, 8192), (9, 8192), (8192,)),
    "softmax": rows(dnn.softmax, (9, 16384)),
    "softmax, a warpgroup": rows(dnn.softmax, (9, 4096)),
    "softmax, gradient": rows(dnn.softmax_dgrad, (9, 16384), (9, 16384)),
    "logsumexp": rows(dnn.logsumexp, (9, 16384)),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_whatever_is_taken_away_shows(name: str):
    """Each barrier of a warpgroup, each wait and each arrival; as it stands the kernel has no fault."""
    with dnn.limits(multiprocessors=2):
        launches = PROTOCOLS[name]()
    unseen, ordered = [], 0
    for launch in launches:
        launch.exchanges = True
        launch.run(whole=())
        for equation in launch.ordering():
            ordered += 1
            launch.missing = equation
            with contextlib.suppress(Fault):
                launch.run(whole=())
                unseen.append((launch.name, place_of(equation)))
            launch.missing = None
    assert ordered
    assert unseen == []
