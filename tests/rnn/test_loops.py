"""Recurrent layers beside loops over sequences, steps and gates in float64, written from the formulas alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from tests.rnn.layer_calls import KINDS, LENGTHS, RESETS, called, data, each_kind

LIMITS = (-0.3, 0.2)  # of the cell, in the kind that is clipped


def step(kind: str, v: dict[str, Any], x: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """The next h and c of one sequence."""
    units = v["r"].shape[1] // {"lstm": 4, "gru": 3, "rnn": 1}[KINDS[kind][0]]
    own = lambda name, gate: v[name][..., gate * units : (gate + 1) * units]
    from_x = lambda gate: x @ own("w", gate) + own("bias", gate)
    from_h = lambda gate, h: h @ own("r", gate) + own("recurrent_bias", gate)
    both = lambda gate: from_x(gate) + from_h(gate, h)
    logistic = lambda z: 1 / (1 + jnp.exp(-z))
    if kind.startswith("lstm"):
        c = logistic(both(1)) * c + logistic(both(0)) * jnp.tanh(both(2))
        if "clipped" in kind:
            c = jnp.where(c < LIMITS[0], LIMITS[0], jnp.where(c > LIMITS[1], LIMITS[1], c))
        h = logistic(both(3)) * jnp.tanh(c)
        return (h @ v["projection"] if "projected" in kind else h), c
    if kind.startswith("gru"):
        reset, keep = logistic(both(0)), logistic(both(1))
        inner = from_h(2, reset * h) if kind == "gru-before" else reset * from_h(2, h)
        return keep * h + (1 - keep) * jnp.tanh(from_x(2) + inner), c
    return (jnp.tanh(both(0)) if kind == "rnn-tanh" else jnp.where(both(0) > 0, both(0), 0)), c


def loop(kind: str, v: dict[str, Any], lengths: Any, resets: Any, back: bool) -> list[Any]:
    """y, and the final states."""
    ys, hs, cs = [], [], []
    for n, x in enumerate(v["x"]):
        h, c = v["h0"][n], v["c0"][n] if "c0" in v else jnp.zeros(())
        rows: list[Any] = [jnp.zeros_like(h)] * len(x)
        order = range(int(lengths[n]))
        for t in order[::-1] if back else order:
            begins = resets[n, t] if not back else t + 1 < lengths[n] and resets[n, t + 1]
            if begins:
                h, c = jnp.zeros_like(h), jnp.zeros_like(c)
            h, c = step(kind, v, x[t], h, c)
            rows[t] = h
        ys.append(jnp.stack(rows))
        hs.append(h)
        cs.append(c)
    return [jnp.stack(of) for of in ((ys, hs, cs) if "c0" in v else (ys, hs))]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("back", [False, True])
@each_kind
def test_values_and_gradients_are_those_of_a_loop(kind: str, back: bool):
    """With resets, a sequence without steps, and states that are clipped in some steps and not in others."""
    v = data(kind, 7, np.float64)
    sick = v["x"].copy()
    sick[1], sick[2, 3:] = np.nan, np.nan  # what no step reads
    theirs = lambda v: loop(kind, v, LENGTHS, RESETS, back)
    direction = "reverse" if back else "forward"
    ours = lambda v: called(dnn, kind, {**v, "lengths": LENGTHS, "resets": RESETS}, direction=direction)
    wanted, pull = jax.vjp(theirs, v)
    cotangents = [np.cos(3.0 * np.arange(y.size)).reshape(y.shape) for y in wanted]
    (slopes,) = pull(cotangents)

    @jax.jit
    def run(v: Any) -> Any:
        found, pull = jax.vjp(ours, v)
        return found, pull(cotangents)[0]

    found, gradients = run({**v, "x": sick})
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    for name in v:
        np.testing.assert_allclose(gradients[name], slopes[name], rtol=0, atol=1e-12, err_msg=name)
    if "clipped" in kind:
        cut = np.isin(np.asarray(wanted[2]), LIMITS)
        assert cut.any()
        assert not cut.all()
