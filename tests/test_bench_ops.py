"""`jaxdnn bench ops`: what it compares an op with computes the same, and its command runs."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.cases.example import examples
from jaxdnn.bench import ops

RANDOM = ("dropout", "dropout_mask")  # whose bits are another generator's
SIZES = dict(N=2, H=8, W=8, C=16, K=16, R=3, S=3, P=2, Q=2, T=8, D=8, V=7)


def test_every_example_has_a_plain_form():
    assert all(map(callable, map(ops.plain_form, examples())))


@pytest.mark.parametrize("name", examples())
def test_the_plain_form_computes_the_same(name: str):
    ours, plain, operands = ops.sides(examples()[name], SIZES)
    if name == "unpool":  # plain JAX sets one of several elements at a place, ours adds them up
        corners = 16 * jnp.arange(4)[:, None, None] + 2 * jnp.arange(4)[None, :, None]
        operands = (operands[0], jnp.broadcast_to(corners, operands[1].shape))
    found, expected = (jax.tree.leaves(jax.jit(side)(*operands)) for side in (ours, plain))
    assert [(v.shape, v.dtype) for v in found] == [(v.shape, v.dtype) for v in expected]
    if name in RANDOM:
        return
    for a, b in zip(found, expected, strict=True):
        scale = float(np.max(np.abs(b), initial=1))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


def test_the_command_measures_what_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    path = tmp_path / "ops.json"
    args = argparse.Namespace(case=["scale"], passes=["eager", "forward"], seconds=0.01, json=path)
    assert ops.run(args, dict) == 0
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 80
    lines = [line for line in said if not line.startswith(" ")]
    assert [line.split()[:3] for line in lines[:3]] == [
        ["scale", "eager", "tiny"],
        ["scale", "forward", "small"],
        ["scale", "forward", "large"],
    ]
    assert path.exists()
