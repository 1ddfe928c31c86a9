"""Recurrent layers over whole sequences, `lstm`, `gru` and `rnn`, and their cells, which are one step.

Letters: N sequences, T steps, I inputs, H units, P columns of a projection. Weights have a row for each of what they
multiply and a column for each unit of each gate, gate by gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax import Array
from jax.typing import ArrayLike

from jaxdnn._src.core import checks
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.dropout.api import DropoutState, operand
from jaxdnn._src.rnn import layers
from jaxdnn._src.rnn.arguments import ACTIVATIONS, RESET_GATES

Layers: TypeAlias = ArrayLike | Sequence[ArrayLike | None]  # of one layer, or one for each


def read_key(key: Any) -> Any:
    """A dropout key that is no array as an operand of a call's program."""
    return None if key is None else operand(key)


@public
@data(dropout_key=read_key)
def lstm(
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
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
    fill: float = 0.0,
    layout: str = "NTC",
    return_saved: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """Long short-term memory: one or more layers of it over sequences.

    z = x_t W + bias + h_{t-1} R + recurrent_bias, of which z_i, z_f, z_g, z_o are the quarters
    c_t = clip(sigmoid(z_f) c_{t-1} + sigmoid(z_i) tanh(z_g))
    h_t = sigmoid(z_o) tanh(c_t), times the projection if there is one
    y_t = h_t

    Args:
      x: (N, T, I) for layout "NTC"; float32, bfloat16, float16 or float64.
      w: (I, 4 H), of x's dtype as all weights; the columns in the order i, f, g, o. None is cuDNN's skip input: x, of
        H columns, is what W would give for each gate.
      r: (H, 4 H); with a projection (P, 4 H). With three axes, (K, H/K, 4 H/K), a block-diagonal matrix: the units are
        cut in K heads, of which each has H/K columns of every gate, and its own matrix for its own states. A sequence
        of arrays is a layer for each; the input of the next is y of the one before. Then w, biases, projection, h0 and
        c0 are None or sequences too, of arrays and None.
      bias, recurrent_bias: (4 H,), of x's dtype or the accumulator's; only their sum counts: other libraries have both.
      projection: (H, P), for heads (K, H/K, P/K); y, h0 and the final h then have P columns in place of H.
      h0: (N, H), of x's dtype; None is zeros.
      c0: (N, H), of x's dtype or the accumulator's; None is zeros.
      lengths: (N,), integers from 0 to T in any order: the steps of each sequence; None is T. Inputs of later steps are
        not read. A length above T counts as T, one below 0 as 0.
      resets: (N, T), for "TNC" (T, N), booleans: True where a sequence begins anew. No state passes between such a step
        and the one before it: in the forward direction the states are 0, not h0 and c0, before the step; in reverse
        they are 0 before the step that stands before it in x. So a row may hold several sequences, one behind another.
      direction: "forward"; "reverse", from each sequence's last step to its first; or "bidirectional", a layer of each.
        Then all weights, biases and initial states have an axis of 2 in front, forward and reverse, and so have final
        states: w is (2, I, 4 H), h0 (2, N, H). y, (N, T, 2 H), has the columns of the forward layer first.
      clip: (low, high), which c_t is cut to; None is no limit.
      dropout: the rate of `dropout` on what each layer but the first reads of the one before it. Of layer l it is
        dropout(y, dropout_key, rate=dropout, offset=(l - 1) 2^48) with y as (N, T, columns): an element's bits depend
        on layer, sequence, step and unit, not on how x is sharded, nor, with a `DropoutState` that counts the elements
        before, on how a batch is cut.
      dropout_key: as `key` in `dropout`; None where nothing is dropped.
      fill: what y has behind a sequence's end, in the last layer.
      layout: "NTC", or "TNC" for x (T, N, I) and y (T, N, H).
      return_saved: whether to return too what `lstm_dgrad` and `lstm_wgrad` need of this pass.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (N, T, H) for "NTC", and the final states (h, c), (N, H) each: those after the step that comes last in the
      direction, and h0 and c0 for a sequence of length 0. Of x's dtype; c of c0's if that is given. So a long sequence
      may be cut in pieces, and with c0 in the accumulator's dtype nothing is rounded between them. Of several layers y
      is the last one's, and h and c are tuples with one array for each.

    Differentiation: any order, forward and reverse, in x, weights, biases, h0 and c0. Where c_t was cut it has the
      derivative 0 in what it is computed from; at the limits themselves 1.

    Numerics: x W, gates and c in float32 (float64 for float64); h_t is rounded to x's dtype, in which it is multiplied
      by R, and so is what multiplies weights in derivatives. Determinism level "run_to_run" as XLA multiplies (on GPUs
      "fast", unless its flags ask for more); engine `ordered`, slow, adds in the definition's order: results
      "portable", gradients "mesh_invariant"; engine `hopper`, for 16 bits, is "batch_invariant", and of gradients of
      weights "run_to_run". Second derivatives are run_to_run. For the gradient 5 H numbers a step and sequence are kept
      in the accumulator's dtype.

    Raises:
      ValueError: shapes that do not fit, an unknown option. TypeError: a dtype that is not served. NotImplementedError:
      no engine serves the call at the required level.

    Example:
      >>> x, w, r = jnp.ones((2, 5, 3)), jnp.ones((3, 16)), jnp.zeros((4, 16))
      >>> y, (h, c) = dnn.lstm(x, w, r, lengths=jnp.array([5, 2]))
      >>> y.shape, y[1, 2:].any().item(), (y[0, 4] == h[0]).all().item()
      ((2, 5, 4), False, True)

    Sources: Hochreiter and Schmidhuber (1997); Gers et al. (2000); Sak et al., arXiv:1402.1128, for the projection.
      cuDNN's cudnnRNNForward (CUDNN_LSTM) and PyTorch's LSTM have the same gates in the same order, their matrices
      transposed, and a bias of each kind; cuDNN's bias modes are no bias, `bias` alone, `recurrent_bias` alone, both.
      ONNX orders i, o, f, c and clips preactivations; Keras i, f, c, o with one bias. Of Flax's OptimizedLSTMCell the
      kernels of i, f, g, o, side by side, fit as they are; its carry is (c, h). `jaxdnn.recurrent` converts the weights
      of all of them.
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
    y, h, c, saved = layers.forward(stack, fill, checks.flag("return_saved", return_saved))
    return (y, (h, c), saved) if return_saved else (y, (h, c))


@public
@data(dropout_key=read_key)
def gru(
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    reset_gate: str = "after",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    fill: float = 0.0,
    layout: str = "NTC",
    return_saved: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """Gated recurrent units: one or more layers of them over sequences.

    a = x_t W + bias,  s = h_{t-1} R + recurrent_bias, of which a_r, a_z, a_n and s_r, s_z, s_n are the thirds
    ρ = sigmoid(a_r + s_r),  ζ = sigmoid(a_z + s_z),  n = tanh(a_n + ρ s_n)
    h_t = (1 - ζ) n + ζ h_{t-1}
    y_t = h_t

    With reset_gate "before" ρ multiplies the state: n = tanh(a_n + (ρ h_{t-1}) R_n + recurrent_bias_n).

    Args:
      x: as in `lstm`.
      w: (I, 3 H), of x's dtype as r; the columns in the order r, z, n; or None, as in `lstm`.
      r: (H, 3 H), (K, H/K, 3 H/K) for K heads, or a sequence with one for each layer, as in `lstm`.
      bias, recurrent_bias: (3 H,), of x's dtype or the accumulator's. With reset_gate "after" ρ multiplies the last
        third of recurrent_bias, so that the two are not one.
      h0: (N, H), of x's dtype; None is zeros.
      reset_gate: "after" or "before" the product with R_n.
      lengths, resets, direction, dropout, dropout_key, fill, layout, return_saved: as in `lstm`.
      engine, determinism: as in `lstm`.

    Returns:
      y, (N, T, H) for "NTC", and the final state h, (N, H), or a tuple of them, as in `lstm`; and with `return_saved`
      what is saved.

    Differentiation: any order, forward and reverse, in x, weights, biases and h0.

    Numerics: as `lstm`; "before" rounds ρ h_{t-1} to x's dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> y, h = dnn.gru(jnp.ones((1, 4, 3)), jnp.zeros((3, 6)), jnp.zeros((2, 6)), h0=jnp.ones((1, 2)))
      >>> y[0, :, 0].tolist()
      [0.5, 0.25, 0.125, 0.0625]

    Sources: Cho et al., arXiv:1406.1078 ("before"). cuDNN (CUDNN_GRU), PyTorch and Flax have "after" and this order of
      gates, as ONNX has it with linear_before_reset, and Keras with reset_after; these two order z, r, n. There, as
      here, ζ keeps the old state.
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
    y, h, saved = layers.forward(stack, fill, checks.flag("return_saved", return_saved))
    return (y, h, saved) if return_saved else (y, h)


@public
@data(dropout_key=read_key)
def rnn(
    x: ArrayLike,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    direction: str = "forward",
    activation: str = "tanh",
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    fill: float = 0.0,
    layout: str = "NTC",
    return_saved: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Any, ...]:
    """Plain recurrent layers, one or more, over sequences.

    h_t = act(x_t W + bias + h_{t-1} R + recurrent_bias)
    y_t = h_t

    Args:
      x: as in `lstm`.
      w: (I, H), of x's dtype as r; or None, as in `lstm`.
      r: (H, H), (K, H/K, H/K) for K heads, or a sequence with one for each layer, as in `lstm`.
      bias, recurrent_bias: (H,), of x's dtype or the accumulator's; it is their sum that counts.
      h0: (N, H), of x's dtype; None is zeros.
      activation: "tanh" or "relu".
      lengths, resets, direction, dropout, dropout_key, fill, layout, return_saved: as in `lstm`.
      engine, determinism: as in `lstm`.

    Returns:
      y, (N, T, H) for "NTC", and the final state h, (N, H), or a tuple of them, as in `lstm`; and with `return_saved`
      what is saved.

    Differentiation: any order, forward and reverse, in x, weights, biases and h0; the derivative of relu at 0 is 0.

    Numerics: as `lstm`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> eye = jnp.eye(1)
      >>> dnn.rnn(jnp.ones((1, 3, 1)), eye, eye, activation="relu")[0][0, :, 0].tolist()
      [1.0, 2.0, 3.0]

    Sources: Elman (1990); cuDNN's CUDNN_RNN_TANH and CUDNN_RNN_RELU; PyTorch's and ONNX's RNN; Keras' SimpleRNN.
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
    y, h, saved = layers.forward(stack, fill, checks.flag("return_saved", return_saved))
    return (y, h, saved) if return_saved else (y, h)


@public
def lstm_cell(
    x: ArrayLike,
    w: ArrayLike | None,
    r: ArrayLike,
    h: ArrayLike,
    c: ArrayLike,
    /,
    *,
    bias: ArrayLike | None = None,
    recurrent_bias: ArrayLike | None = None,
    projection: ArrayLike | None = None,
    clip: Sequence[float] | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array]:
    """One step of `lstm`, for loops of one's own.

    (h', c') = those of `lstm` after the step x from h and c

    Args:
      x: (N, I); the dtypes as in `lstm`.
      w, r, bias, recurrent_bias, projection, clip: as in `lstm`.
      h: (N, H), or (N, P) with a projection.
      c: (N, H).
      engine, determinism: as in `lstm`.

    Returns:
      (h', c'), of the dtypes of h and c.

    Differentiation: as `lstm`, in h and c too.

    Numerics: as `lstm`; at a level that fixes bits, steps by cells have those of a layer if c has the accumulator's
      dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> x, w, r, h = jnp.ones((2, 3)), jnp.zeros((3, 16)), jnp.zeros((4, 16)), jnp.zeros((2, 4))
      >>> h, c = dnn.lstm_cell(x, w, r, h, jnp.ones((2, 4)))
      >>> c[0].tolist()
      [0.5, 0.5, 0.5, 0.5]

    Sources: PyTorch's LSTMCell; Flax's OptimizedLSTMCell, whose carry is (c, h).
    """
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias, "projection": projection}
    own = {"clip": clip, "engine": engine, "determinism": determinism}
    h, c = layers.cell("lstm", x, weights, {"h": h, "c": c}, **own)
    return h, c


@public
def gru_cell(
    x: ArrayLike,
    w: ArrayLike | None,
    r: ArrayLike,
    h: ArrayLike,
    /,
    *,
    bias: ArrayLike | None = None,
    recurrent_bias: ArrayLike | None = None,
    reset_gate: str = "after",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """One step of `gru`, for loops of one's own.

    h' = that of `gru` after the step x from h

    Args:
      x: (N, I); the dtypes as in `lstm`.
      w, r, bias, recurrent_bias, reset_gate: as in `gru`.
      h: (N, H).
      engine, determinism: as in `lstm`.

    Returns:
      h', of the dtype of h.

    Differentiation: as `gru`, in h too.

    Numerics: as `gru`; at a level that fixes bits, steps by cells have those of a layer.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> dnn.gru_cell(jnp.ones((2, 3)), jnp.zeros((3, 6)), jnp.zeros((2, 6)), jnp.ones((2, 2))).tolist()
      [[0.5, 0.5], [0.5, 0.5]]

    Sources: PyTorch's GRUCell; Flax's GRUCell, which has no bias within the reset.
    """
    checks.choice("reset_gate", reset_gate, RESET_GATES)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    return layers.cell(f"gru_{reset_gate}", x, weights, {"h": h}, engine=engine, determinism=determinism)[0]


@public
def rnn_cell(
    x: ArrayLike,
    w: ArrayLike | None,
    r: ArrayLike,
    h: ArrayLike,
    /,
    *,
    bias: ArrayLike | None = None,
    recurrent_bias: ArrayLike | None = None,
    activation: str = "tanh",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """One step of `rnn`, for loops of one's own.

    h' = act(x W + bias + h R + recurrent_bias)

    Args:
      x: (N, I); the dtypes as in `lstm`.
      w, r, bias, recurrent_bias, activation: as in `rnn`.
      h: (N, H).
      engine, determinism: as in `lstm`.

    Returns:
      h', of the dtype of h.

    Differentiation: as `rnn`, in h too.

    Numerics: as `rnn`; at a level that fixes bits, steps by cells have those of a layer.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lstm`.

    Example:
      >>> eye = jnp.eye(2)
      >>> dnn.rnn_cell(jnp.ones((1, 2)), eye, eye, jnp.ones((1, 2)), activation="relu").tolist()
      [[2.0, 2.0]]

    Sources: PyTorch's RNNCell; Flax's SimpleCell.
    """
    checks.choice("activation", activation, ACTIVATIONS)
    weights = {"w": w, "r": r, "bias": bias, "recurrent_bias": recurrent_bias}
    return layers.cell(activation, x, weights, {"h": h}, engine=engine, determinism=determinism)[0]
