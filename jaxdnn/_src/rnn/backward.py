"""The backward passes of recurrent layers as ops: in data, `lstm_dgrad` and its like, and in weights, `lstm_wgrad`.

Whoever differentiates `lstm` needs neither. They are for programs that schedule their backward pass themselves: the
forward pass returns what it saved, that in data adds what that in weights needs, and each may run when it suits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.typing import ArrayLike

from jaxdnn._src.core import checks
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.dropout.api import DropoutState
from jaxdnn._src.rnn import gradients, layers
from jaxdnn._src.rnn.api import Layers, read_key
from jaxdnn._src.rnn.arguments import ACTIVATIONS, RESET_GATES


@public
@data(dropout_key=read_key)
def lstm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    dc: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    projection: Layers | None = None,
    h0: Layers | None = None,
    c0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    clip: Sequence[float] | None = None,
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "NTC",
    return_saved: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """The backward pass of `lstm` in its data: input and initial states.

    Of δ_t = dy_t + dz_{t+1} Rᵀ, which a projection multiplies by its transpose, and
    ε_t = δ_t o (1 - tanh²(c_t)) + f_{t+1} ε_{t+1}
    dz_t = the quarters ε_t g i (1 - i), ε_t c_{t-1} f (1 - f), ε_t i (1 - g²), δ_t tanh(c_t) o (1 - o)
    dx_t = dz_t Wᵀ,  dh0 = dz_1 Rᵀ,  dc0 = f_1 ε_1

    where i, f, g, o are the gates of step t, the sums begin with dh and dc behind the last step, and ε_t is 0 where c_t
    was cut.

    Args:
      dy: the gradient in y, of its shape and x's dtype. Behind a sequence's end it is not read.
      x, w, r: as in `lstm`.
      dh, dc: the gradients in the final states, of their shapes and dtypes: with layers in a sequence one for each, or
        None; None is 0.
      saved: what `lstm` returned for these arguments with `return_saved`; None computes it again.
      bias, recurrent_bias, projection, h0, c0, lengths, resets, direction, clip: as in `lstm`.
      dropout, dropout_key, layout: as in `lstm`.
      return_saved: whether to return too what `lstm_wgrad` needs of both passes.
      engine, determinism: as in `lstm`.

    Returns:
      dx, of x's shape and dtype, and (dh0, dc0), as h0 and c0, of zeros too. With `return_saved` a third result: the
      arrays that were saved, and of each layer and direction dz behind them.

    Differentiation: any order, forward and reverse, in dy, x, weights, biases, states, and what is saved.

    Numerics: those of the gradients of `lstm`, whose bits these are.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 16)), jnp.zeros((4, 16))
      >>> y, (h, c), saved = dnn.lstm(x, w, r, return_saved=True)
      >>> dx, (dh0, dc0), saved = dnn.lstm_dgrad(y, x, w, r, saved=saved, return_saved=True)
      >>> dw, dr = dnn.lstm_wgrad(y, x, w, r, saved=saved)
      >>> dx.shape, dc0.shape, dw.shape, dr.shape
      ((2, 5, 3), (2, 4), (3, 16), (4, 16))

    Sources: Werbos, "Backpropagation through time" (1990); cuDNN's cudnnRNNBackwardData_v8, whose reserve space is
      `saved`, and which writes into it as `return_saved` does.
    """
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias, "projection": projection}
    stack = layers.read(
        "lstm",
        x,
        weights,
        {"h0": h0, "c0": c0},
        lengths=lengths,
        resets=resets,
        layout=layout,
        dropout=dropout,
        dropout_key=dropout_key,
        direction=direction,
        clip=clip,
        engine=engine,
        determinism=determinism,
    )
    dx, states, kept = gradients.of_data(gradients.read(stack, dy, {"dh": dh, "dc": dc}, saved))
    found = dx, tuple(states)
    return (*found, kept) if checks.flag("return_saved", return_saved) else found


@public
@data(dropout_key=read_key)
def lstm_wgrad(
    dy: ArrayLike,
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    dc: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    projection: Layers | None = None,
    h0: Layers | None = None,
    c0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    clip: Sequence[float] | None = None,
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """The backward pass of `lstm` in its weights.

    dW = Σ x_tᵀ dz_t,  dR = Σ h_{t-1}ᵀ dz_t,  dbias = drecurrent_bias = Σ dz_t,  dprojection = Σ (o tanh(c_t))ᵀ δ_t

    over steps and sequences, with dz and δ as `lstm_dgrad` has them.

    Args:
      dy, x, w, r, dh, dc: as in `lstm_dgrad`.
      saved: what `lstm_dgrad` returned for these arguments with `return_saved`: then no step is computed again, and dy,
        dh and dc are not read; or what `lstm` returned so; None computes all again.
      bias, recurrent_bias, projection, h0, c0, lengths, resets, direction, clip: as in `lstm`.
      dropout, dropout_key, layout: as in `lstm`.
      engine, determinism: as in `lstm`.

    Returns:
      The gradients in w, r, bias, recurrent_bias and projection, in this order, as far as these are given, each of the
      shape and dtype of its array; of layers in a sequence a tuple of each kind.

    Differentiation: any order, forward and reverse, in dy, x, weights, biases, states, and what is saved.

    Numerics: those of the gradients of `lstm`, whose bits these are.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 16)), jnp.zeros((4, 16))
      >>> dw, dr, db = dnn.lstm_wgrad(jnp.ones((2, 5, 4)), x, w, r, bias=jnp.zeros(16))
      >>> dw.shape, bool((dw[0] == db).all())
      ((3, 16), True)

    Sources: as `lstm_dgrad`; cuDNN's cudnnRNNBackwardWeights_v8, which adds to what is there: here whoever wants it
      adds.
    """
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias, "projection": projection}
    stack = layers.read(
        "lstm",
        x,
        weights,
        {"h0": h0, "c0": c0},
        lengths=lengths,
        resets=resets,
        layout=layout,
        dropout=dropout,
        dropout_key=dropout_key,
        direction=direction,
        clip=clip,
        engine=engine,
        determinism=determinism,
    )
    return gradients.of_weights(gradients.read(stack, dy, {"dh": dh, "dc": dc}, saved))


@public
@data(dropout_key=read_key)
def gru_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    reset_gate: str = "after",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "NTC",
    return_saved: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """The backward pass of `gru` in its data: input and initial state.

    Of δ_t = dy_t + ζ_{t+1} δ_{t+1} + ds_{t+1} Rᵀ, with s = h_{t-1} R + recurrent_bias as in `gru`
    dn = δ_t (1 - ζ) (1 - n²),  dζ = δ_t (h_{t-1} - n) ζ (1 - ζ),  dρ = dn s_n ρ (1 - ρ)
    da_t = (dρ, dζ, dn),  ds_t = (dρ, dζ, ρ dn),  dx_t = da_t Wᵀ,  dh0 = ζ_1 δ_1 + ds_1 Rᵀ

    where the sums begin with dh behind the last step. With reset_gate "before" dn passes R_n first: of v = dn R_nᵀ,
    dρ = v h_{t-1} ρ (1 - ρ), δ_{t-1} takes ρ v, and da_t = (dρ, dζ, dn) is ds_t too.

    Args:
      dy, x, w, r, saved, return_saved: as in `lstm_dgrad`, of `gru` in place of `lstm`.
      dh: the gradient in the final state, as in `lstm_dgrad`.
      bias, recurrent_bias, h0, lengths, resets, direction, reset_gate: as in `gru`.
      dropout, dropout_key, layout: as in `gru`.
      engine, determinism: as in `gru`.

    Returns:
      dx and dh0, and with `return_saved` what is saved, as `lstm_dgrad`.

    Differentiation: as `lstm_dgrad`.

    Numerics: those of the gradients of `gru`, whose bits these are.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 12)), jnp.zeros((4, 12))
      >>> dx, dh0 = dnn.gru_dgrad(jnp.ones((2, 5, 4)), x, w, r)
      >>> dx.shape, dh0.shape
      ((2, 5, 3), (2, 4))

    Sources: cuDNN's cudnnRNNBackwardData_v8 (CUDNN_GRU).
    """
    checks.choice("reset_gate", reset_gate, RESET_GATES)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    stack = layers.read(
        f"gru_{reset_gate}",
        x,
        weights,
        {"h0": h0},
        lengths=lengths,
        resets=resets,
        layout=layout,
        dropout=dropout,
        dropout_key=dropout_key,
        direction=direction,
        engine=engine,
        determinism=determinism,
    )
    dx, states, kept = gradients.of_data(gradients.read(stack, dy, {"dh": dh}, saved))
    found = dx, states[0]
    return (*found, kept) if checks.flag("return_saved", return_saved) else found


@public
@data(dropout_key=read_key)
def gru_wgrad(
    dy: ArrayLike,
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    reset_gate: str = "after",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """The backward pass of `gru` in its weights.

    dW = Σ x_tᵀ da_t,  dR = Σ h_{t-1}ᵀ ds_t,  dbias = Σ da_t,  drecurrent_bias = Σ ds_t

    over steps and sequences, with da and ds as `gru_dgrad` has them; with reset_gate "before" dR_n = Σ (ρ h_{t-1})ᵀ dn.

    Args:
      dy, x, w, r, dh, saved: as in `lstm_wgrad`, of `gru` in place of `lstm`.
      bias, recurrent_bias, h0, lengths, resets, direction, reset_gate: as in `gru`.
      dropout, dropout_key, layout: as in `gru`.
      engine, determinism: as in `gru`.

    Returns:
      The gradients in w, r, bias and recurrent_bias, in this order, as far as these are given, as `lstm_wgrad`.

    Differentiation: as `lstm_wgrad`.

    Numerics: those of the gradients of `gru`, whose bits these are.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 12)), jnp.zeros((4, 12))
      >>> dw, dr = dnn.gru_wgrad(jnp.ones((2, 5, 4)), x, w, r)
      >>> dw.shape, dr.shape
      ((3, 12), (4, 12))

    Sources: cuDNN's cudnnRNNBackwardWeights_v8 (CUDNN_GRU), which adds to what is there.
    """
    checks.choice("reset_gate", reset_gate, RESET_GATES)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    stack = layers.read(
        f"gru_{reset_gate}",
        x,
        weights,
        {"h0": h0},
        lengths=lengths,
        resets=resets,
        layout=layout,
        dropout=dropout,
        dropout_key=dropout_key,
        direction=direction,
        engine=engine,
        determinism=determinism,
    )
    return gradients.of_weights(gradients.read(stack, dy, {"dh": dh}, saved))


@public
@data(dropout_key=read_key)
def rnn_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    activation: str = "tanh",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "NTC",
    return_saved: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """The backward pass of `rnn` in its data: input and initial state.

    dz_t = act'(h_t) (dy_t + dz_{t+1} Rᵀ),  dx_t = dz_t Wᵀ,  dh0 = dz_1 Rᵀ

    where the sum begins with dh behind the last step, and act' is 1 - h² for tanh, and 1 where h > 0 for relu.

    Args:
      dy, x, w, r, saved, return_saved: as in `lstm_dgrad`, of `rnn` in place of `lstm`.
      dh: the gradient in the final state, as in `lstm_dgrad`.
      bias, recurrent_bias, h0, lengths, resets, direction, activation: as in `rnn`.
      dropout, dropout_key, layout: as in `rnn`.
      engine, determinism: as in `rnn`.

    Returns:
      dx and dh0, and with `return_saved` what is saved, as `lstm_dgrad`.

    Differentiation: as `lstm_dgrad`.

    Numerics: those of the gradients of `rnn`, whose bits these are.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 4)), jnp.zeros((4, 4))
      >>> dx, dh0 = dnn.rnn_dgrad(jnp.ones((2, 5, 4)), x, w, r)
      >>> dx.shape, dh0.shape
      ((2, 5, 3), (2, 4))

    Sources: cuDNN's cudnnRNNBackwardData_v8 (CUDNN_RNN_TANH and CUDNN_RNN_RELU).
    """
    checks.choice("activation", activation, ACTIVATIONS)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    stack = layers.read(
        activation,
        x,
        weights,
        {"h0": h0},
        lengths=lengths,
        resets=resets,
        layout=layout,
        dropout=dropout,
        dropout_key=dropout_key,
        direction=direction,
        engine=engine,
        determinism=determinism,
    )
    dx, states, kept = gradients.of_data(gradients.read(stack, dy, {"dh": dh}, saved))
    found = dx, states[0]
    return (*found, kept) if checks.flag("return_saved", return_saved) else found


@public
@data(dropout_key=read_key)
def rnn_wgrad(
    dy: ArrayLike,
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    activation: str = "tanh",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """The backward pass of `rnn` in its weights.

    dW = Σ x_tᵀ dz_t,  dR = Σ h_{t-1}ᵀ dz_t,  dbias = drecurrent_bias = Σ dz_t

    over steps and sequences, with dz as `rnn_dgrad` has it.

    Args:
      dy, x, w, r, dh, saved: as in `lstm_wgrad`, of `rnn` in place of `lstm`.
      bias, recurrent_bias, h0, lengths, resets, direction, activation: as in `rnn`.
      dropout, dropout_key, layout: as in `rnn`.
      engine, determinism: as in `rnn`.

    Returns:
      The gradients in w, r, bias and recurrent_bias, in this order, as far as these are given, as `lstm_wgrad`.

    Differentiation: as `lstm_wgrad`.

    Numerics: those of the gradients of `rnn`, whose bits these are.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 4)), jnp.zeros((4, 4))
      >>> dw, dr = dnn.rnn_wgrad(jnp.ones((2, 5, 4)), x, w, r)
      >>> dw.shape, dr.shape
      ((3, 4), (4, 4))

    Sources: cuDNN's cudnnRNNBackwardWeights_v8 (CUDNN_RNN_TANH and CUDNN_RNN_RELU), which adds to what is there.
    """
    checks.choice("activation", activation, ACTIVATIONS)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    stack = layers.read(
        activation,
        x,
        weights,
        {"h0": h0},
        lengths=lengths,
        resets=resets,
        layout=layout,
        dropout=dropout,
        dropout_key=dropout_key,
        direction=direction,
        engine=engine,
        determinism=determinism,
    )
    return gradients.of_weights(gradients.read(stack, dy, {"dh": dh}, saved))
