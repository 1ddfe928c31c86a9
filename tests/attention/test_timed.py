"""`jaxdnn bench attention`: what is timed of peers is the same operation, and operations are counted as they are."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.attention import timed
from jaxdnn._src.cases.timed import Prepared

SMALL = {
    case.family: dataclasses.replace(
        case,
        queries=min(case.queries, 40),
        keys=min(case.keys, 37),
        heads=2 * (case.heads // case.shared),
        shared=2,
        features=case.features // 8,
        values=case.values // 8,
        window=None if case.window is None else 7,
        passes=timed.PASSES,
    )
    for case in timed.CASES
    if isinstance(case, timed.Attention)
}


@pytest.mark.parametrize("family", SMALL)
def test_peers_compute_the_same(family: str):
    case = SMALL[family]
    operands = case.operands(2, np.float32, 0)
    for which in case.passes:
        ours = jax.tree.leaves(jax.jit(case.ours(which, None))(*operands))
        assert set(case.others(which, 2, np.float32)) == {"lax"}
        for peer in case.others(which, 2, np.float32).values():
            given, run = (operands, peer) if not isinstance(peer, Prepared) else (None, peer.function)
            given = given or jax.jit(peer.prepare)(*operands)  # type: ignore[union-attr]
            for a, b in zip(ours, jax.tree.leaves(jax.jit(run)(*given)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)


def test_peers_decode_the_same():
    (case,) = (c for c in timed.CASES if c.name == "8k x 16")
    assert isinstance(case, timed.Decode)
    small = dataclasses.replace(case, keys=37, heads=4, shared=2, features=8)
    operands = small.operands(3, np.float32, 0)
    found, wanted = jax.jit(small.ours("forward", None))(*operands), jax.jit(small.xla("forward"))(*operands)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert small.bytes("forward", 3, 4) == 4 * (2 * 3 * 4 * 8 + 2 * 3 * 37 * 2 * 8)
    assert set(small.torches("forward")) == {"torch:cudnn", "torch:flash"}


def test_operations_are_those_of_pairs_that_are_seen():
    for case in SMALL.values():
        i, j = np.arange(case.queries)[:, None], np.arange(case.keys)[None]
        left = case.keys if case.window is None else case.window
        seen = (j <= i) & (j >= i - left) if case.causal else np.ones((case.queries, case.keys), bool)
        assert case.seen == seen.sum()
        products = case.batch * case.heads * case.seen * 2 * (case.features + case.values)
        assert case.flops("forward", case.batch) == products


def test_calls_of_pytorch_are_as_its_schema_has_them():
    """As many results and arguments as native_functions.yaml lists."""
    called: dict[str, int] = {}

    def of(name: str, results: int) -> Any:
        def run(*given: Any, scale: float) -> tuple[str, ...]:
            called[name] = len(given)
            return tuple(f"{name}{i}" for i in range(results))

        return run

    names = [f"_scaled_dot_product_{n}_attention" for n in ("cudnn", "flash")]
    ops = {n: of(n, 9) for n in names} | {f"{n}_backward": of(f"{n}_backward", 3) for n in names}
    torch = types.SimpleNamespace(ops=types.SimpleNamespace(aten=types.SimpleNamespace(**ops)))
    tensor = types.SimpleNamespace(transpose=lambda *_: "tensor")
    for which in ("forward", "backward"):
        for make in SMALL["causal"].torches(which).values():
            make(torch, *[tensor] * 6)()
    assert called == dict(zip([*names, *(f"{n}_backward" for n in names)], (8, 6, 15, 14), strict=True))


def test_the_largest_scores_are_left_out_of_plain_jax():
    (long,) = (case for case in timed.CASES if case.name == "causal-64k")
    assert not long.others("forward", 1, jnp.bfloat16)
