"""Recurrent cells and layers of frameworks, computed by `lstm`, `gru` and `rnn`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.adapters.calls import refused
from jaxdnn._src.rnn.api import gru, gru_cell, lstm, lstm_cell, rnn, rnn_cell

Promote = Callable[[Any, Any, Any], Sequence[Any]]  # an array, its matrix and its bias or None, in one dtype

SIGMOIDS = (jax.nn.sigmoid, lax.logistic)
TANHS = (jnp.tanh, jax.nn.tanh, lax.tanh)
RELUS = (jax.nn.relu,)


def op_of(cell: Any, kinds: Mapping[str, tuple[type, ...]]) -> str:
    """The op that computes a cell, of those whose classes are listed; refuses other cells."""
    for op, classes in kinds.items():
        if isinstance(cell, classes):
            return op
    names = ", ".join(each.__name__ for classes in kinds.values() for each in classes)
    raise refused("cell", f"one of {names}", type(cell).__name__)


def options(op: str, cell: Any) -> dict[str, Any]:
    """The arguments of an op that a Flax cell's functions stand for; refuses those that no op has."""
    gate, activation = getattr(cell, "gate_fn", SIGMOIDS[0]), cell.activation_fn
    if gate not in SIGMOIDS:
        raise refused("gate_fn", "jax.nn.sigmoid", gate)
    if getattr(cell, "residual", False):
        raise refused("residual", "False", True)
    if op == "rnn" and activation in RELUS:
        return {"activation": "relu"}
    if activation not in TANHS:
        raise refused("activation_fn", "jax.numpy.tanh" + " or jax.nn.relu" * (op == "rnn"), activation)
    return {}


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a cell multiplies, in one dtype, and the states as its framework would return them.

    Attributes:
      x, h: the input, with any axes in front of the features, and the state.
      c: of an LSTM the cell's state, in its own dtype if that is wider.
      rest: the biases, by the op's names.
      wide: the dtype in which Flax returns states.
    """

    x: Array
    w: Array
    r: Array
    h: Array
    c: Array | None
    rest: dict[str, Array]
    wide: Any


def _as(v: Any, dtype: Any) -> Any:
    return None if v is None else v.astype(dtype)


def operands(op: str, weights: Any, promote: Promote, carry: Any, x: Any) -> Operands:
    """The operands of a cell whose carry is Flax's, (c, h) of an LSTM."""
    c, h = carry if op == "lstm" else (None, carry)
    bias, recurrent_bias = (None if v is None else v[0] for v in (weights.bias, weights.recurrent_bias))
    given = [*promote(x, weights.w[0], bias), *promote(h, weights.r[0], recurrent_bias)]
    common = jnp.result_type(*(v.dtype for v in given if v is not None))
    x, w, bias, h, r, recurrent_bias = (_as(v, common) for v in given)
    state = carry if op == "gru" else c
    wide = common if state is None else jnp.promote_types(common, state.dtype)
    biases = {"bias": bias, "recurrent_bias": recurrent_bias}
    rest = {name: v for name, v in biases.items() if v is not None}
    return Operands(x, w, r, h, _as(c, wide), rest, wide)


def step(op: str, given: Operands, **how: Any) -> Any:
    """One step: the new carry, which is Flax's."""
    lead = given.x.shape[:-1]
    flat = lambda v: v.reshape(math.prod(lead), v.shape[-1])
    back = lambda v: v.reshape(*lead, v.shape[-1]).astype(given.wide)
    if given.c is not None:
        h, c = lstm_cell(flat(given.x), given.w, given.r, flat(given.h), flat(given.c), **given.rest, **how)
        return back(c), back(h)
    cell = gru_cell if op == "gru" else rnn_cell
    return back(cell(flat(given.x), given.w, given.r, flat(given.h), **given.rest, **how))


def sequence(
    op: str, given: Operands, lengths: Any, *, time_major: bool, reverse: bool, **how: Any
) -> tuple[Any, Array]:
    """All steps: the final carry, which is Flax's, and the outputs at the places of the inputs that they belong to."""
    x = given.x
    batch = x.shape[1:-1] if time_major else x.shape[:-2]
    n, steps = math.prod(batch), x.shape[0] if time_major else x.shape[-2]
    x = x.reshape((steps, n, -1) if time_major else (n, steps, x.shape[-1]))
    flat = lambda v: v.reshape(n, v.shape[-1])
    back = lambda v: v.reshape(*batch, v.shape[-1]).astype(given.wide)
    how |= {"layout": "TNC" if time_major else "NTC", "direction": "reverse" if reverse else "forward"}
    how |= {"lengths": None if lengths is None else lengths.reshape(n), **given.rest}
    if given.c is not None:
        y, (h, c) = lstm(x, given.w, given.r, h0=flat(given.h), c0=flat(given.c), **how)
        carry = (back(c), back(h))
    else:
        y, h = (gru if op == "gru" else rnn)(x, given.w, given.r, h0=flat(given.h), **how)
        carry = back(h)
    units = y.shape[-1]
    return carry, y.reshape((steps, *batch, units) if time_major else (*batch, steps, units)).astype(given.wide)


def step_shape(x: Any, time_major: bool) -> tuple[int, ...]:
    """The shape of the input of one step."""
    return x.shape[1:] if time_major else (*x.shape[:-2], x.shape[-1])


def scanned(
    op: str,
    given: Operands,
    lengths: Any,
    flip: Callable[..., Array],
    *,
    return_carry: bool,
    time_major: bool,
    reverse: bool,
    keep_order: bool,
    **how: Any,
) -> Any:
    """What Flax's RNN returns; `flip` is its function that turns sequences around."""
    lengths = None if lengths is None else jnp.asarray(lengths)
    carry, y = sequence(op, given, lengths, time_major=time_major, reverse=reverse, **how)
    if reverse and not keep_order:
        y = flip(y, lengths, num_batch_dims=y.ndim - 2, time_major=time_major)
    return (carry, y) if return_carry else y
