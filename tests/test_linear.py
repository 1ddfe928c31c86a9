"""Every op under `jax.linear_transpose` in each operand that it is linear in, against the pullback of `jax.vjp`.

Which operands these are is found out: f(2 a - 3 b) = 2 f(a) - 3 f(b) for all results that depend on the operand.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases import example

pytestmark = pytest.mark.usefixtures("x64")
EXAMPLES = example.examples()
# Of some calls the numbers of these operands, lest nothing be found.
KNOWN: dict[str, tuple[int, ...]] = {
    "activation": (),
    "attention": (2,),
    "conv-depthwise": (0, 1),
    "dropout": (0,),
    "lstm_wgrad": (0,),
    "rms_norm": (1,),
    "softmax_dgrad": (0,),
}
# By their values alone: what a label of 0 multiplies is left out, by a comparison, which JAX does not transpose.
COMPARED = {"cross_entropy-rows": (1,)}


def along(name: str, arrays: Sequence[Any], i: int, v: Any) -> list[Any]:
    """The results, with another array for one operand."""
    return jax.tree.leaves(EXAMPLES[name].call(getattr(dnn, EXAMPLES[name].op), *arrays[:i], v, *arrays[i + 1 :]))


def same(a: Any, b: Any) -> bool:
    return bool(np.all(np.abs(np.asarray(a) - b) <= 1e-9 * np.max(np.abs(b), initial=1)))


def linear_results(values: Sequence[Sequence[Any]]) -> list[int] | None:
    """The numbers of the results that depend on an operand, from those of 0, a, b and 2 a - 3 b.

    None if they are not all linear, or there are none.
    """
    depend = [n for n, (z, a, b, _) in enumerate(zip(*values, strict=True)) if not (same(a, b) and same(a, z))]
    for z, a, b, both in zip(*([v[n] for n in depend] for v in values), strict=True):
        if not (jnp.issubdtype(a.dtype, jnp.floating) and same(z, 0 * z) and same(2 * a - 3 * b, both)):
            return None
    return depend or None


@pytest.mark.parametrize("name", EXAMPLES)
def test_linear_transpose(name: str):
    arrays = [jnp.asarray(v) for v in EXAMPLES[name].data()]
    others = [jnp.asarray(v) for v in (3 * np.cos(np.arange(a.size)).reshape(a.shape) for a in arrays)]
    values = jax.jit(
        lambda: [
            [along(name, arrays, i, v) for v in (jnp.zeros_like(a), a, b, 2 * a - 3 * b)]
            for i, (a, b) in enumerate(zip(arrays, others, strict=True))
        ]
    )()
    found = {i: which for i, v in enumerate(values) if (which := linear_results(v)) is not None}
    assert tuple(found) == KNOWN.get(name, tuple(found))
    for i, which in found.items():
        if i in COMPARED.get(name, ()):
            continue
        cotangents = [values[i][1][n] for n in which]
        transposed_as_pulled(
            lambda v, i=i, which=which: [along(name, arrays, i, v)[n] for n in which], cotangents, arrays[i]
        )


def transposed_as_pulled(function: Callable[..., Any], cotangents: Any, *arrays: Any) -> None:
    wanted = jax.jit(lambda: jax.vjp(function, *arrays)[1](cotangents))()
    for found in (
        jax.linear_transpose(function, *arrays)(cotangents),
        jax.jit(lambda: jax.linear_transpose(jax.jit(function), *arrays)(cotangents))(),
    ):
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["layer", "group"])
def test_norms_are_linear_in_scale_and_bias_together(kind: str):
    x, scale, bias = np.arange(48.0).reshape(2, 4, 6) % 7, np.arange(6) - 3.0, np.ones(6)
    options = {"group": {"groups": 2, "layout": "NWC"}}.get(kind, {})
    norm: Any = getattr(dnn, f"{kind}_norm")
    transposed_as_pulled(lambda s, b: norm(x, scale=s, bias=b, **options), np.sin(x), scale, bias)
    for alone, v in (
        (lambda v: norm(v, scale=scale, bias=bias, **options), x),
        (lambda v: norm(x, scale=v, bias=bias, **options), scale),
    ):
        with pytest.raises(NotImplementedError, match="without activation is linear in `scale` and `bias` together"):
            jax.linear_transpose(alone, v)(x)
    with pytest.raises(NotImplementedError, match="is linear in `dy`, and in `scale` if there is no activation"):
        jax.linear_transpose(lambda v: dnn.layer_norm_dgrad(x, v)[0], x)(x)


def test_attention_is_linear_in_v_alone():
    q = np.ones((1, 3, 2, 4))
    with pytest.raises(NotImplementedError, match="`attention` is linear in `v` alone"):
        jax.linear_transpose(lambda k: dnn.attention(q, k, q), q)(q)
