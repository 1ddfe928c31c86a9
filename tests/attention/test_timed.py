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


# A family of each kind; others, of heads as wide or shared by as many, are the same to the formulas.
KINDS = {(c.causal, c.window is None, c.heads == c.shared, c.features == c.values): c for c in SMALL.values()}


@pytest.mark.parametrize("case", KINDS.values(), ids=lambda case: case.family)
def test_peers_compute_the_same(case: timed.Attention):
    @jax.jit
    def both() -> tuple[Any, Any]:
        operands = case.operands(2, np.float32, 0)
        ours, theirs = [], []
        for which in case.passes:
            peers = case.others(which, 2, np.float32)
            assert set(peers) == {"lax"}
            ours.append(case.ours(which, None)(*operands))
            peer = peers["lax"]
            made = isinstance(peer, Prepared)
            theirs.append(peer.function(*peer.prepare(*operands)) if made else peer(*operands))
        return ours, theirs

    for a, b in zip(*map(jax.tree.leaves, both()), strict=True):
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
