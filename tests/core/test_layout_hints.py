"""Errors about shapes say what is meant: one example without a batch, over all ops, and an array of another layout."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases import example


def batched() -> list[str]:
    """The ops whose first array has a batch axis, in front."""
    return [name for name, e in example.first().items() if e.operands and e.operands[0].startswith(("N", "P", "_"))]


def without_batch(axes: Any, value: Any) -> Any:
    """An argument without its first axis, if that is the batch's, or an axis of 1 in its place."""
    return value[0] if isinstance(axes, example.Axes) and axes.letters[0] in "N_" and axes.kind != "shape" else value


def message(name: str, /, *arguments: Any, **options: Any) -> str:
    """What an op says of a call; nothing if it takes it."""
    try:
        jax.eval_shape(lambda: getattr(dnn, name)(*arguments, **options))
    except ValueError as error:
        return str(error)
    return ""


def of_shapes(name: str, /, *arguments: Any, **options: Any) -> str:
    """What an op says of arrays with the shapes that are given as tuples; shapes that it takes itself are lists."""
    array = lambda v: jnp.zeros(v, jnp.float32) if isinstance(v, tuple) else v
    return message(name, *map(array, arguments), **{k: array(v) for k, v in options.items()})


@pytest.mark.parametrize("name", batched())
def test_one_example_without_a_batch(name: str):
    """An op of an array's last axis, of named axes, or element by element takes it; others say how it is a batch."""
    found = example.first()[name]
    arguments, options = found.bind(*(v.astype(np.float32) for v in found.data()))
    arguments = [without_batch(axes, v) for axes, v in zip(found.arguments, arguments, strict=True)]
    options = {k: without_batch(found.options[k], v) for k, v in options.items()}
    said = message(name, *arguments, **options)
    assert said or name not in ("attention", "conv", "lstm", "pool")
    if said:
        assert re.search(r"^`(\w+)` .*[(; ]one example is a batch as `(x|\1)\[None\]`", said), said


def test_one_example_of_other_layouts():
    assert of_shapes("pool", (6, 7, 3), window=2, layout="CHWN").endswith("one example is a batch as `x[..., None]`).")
    assert of_shapes("pool", (3, 7), window=2, layout="NCW").endswith("(one example is a batch as `x[None]`).")
    assert "one example" not in of_shapes("pool", (3,), window=2)
    said = of_shapes("conv_wgrad", (2, 6, 7, 3), (2, 6, 7, 5), [3, 3, 3, 5])
    assert "one example" not in said
    said = of_shapes("conv_dgrad", (2, 6, 7, 5), (3, 3, 4, 5), [6, 7, 4])
    assert said.endswith("; one example has the shape `(1, *x_shape)`)."), said


IMAGE, LIKE_TORCH = (2, 6, 7, 3), (2, 3, 6, 7)
Q, K = (2, 5, 4, 8), (2, 6, 4, 8)  # 4 heads; Q_ and K_ are the same in layout BNTH
Q_, K_ = (2, 4, 5, 8), (2, 4, 6, 8)
LSTM = ((3, 16), (4, 16))
REORDERED = "; it has these sizes in another order, as in another layout"
ONES = jnp.ones(5, int)


@pytest.mark.parametrize(
    ("op", "arguments", "options", "hint"),
    [
        ("conv", (LIKE_TORCH, (3, 3, 3, 4)), {}, "(in layout NCHW x has 3)"),
        ("conv", (IMAGE, (4, 3, 3, 3)), {"layout": "NCHW", "padding": 1}, "(in layout NHWC x has 3)"),
        ("conv_transpose", (LIKE_TORCH, (3, 3, 4, 3)), {}, "(in layout NCHW x has 3)"),
        ("conv", (IMAGE, (7, 3, 2, 2)), {}, "(with filter_layout='OIHW' w has 3 input channels)"),
        ("conv", (IMAGE, (9, 3, 3, 3)), {}, "(with filter_layout='OIHW' w has 3 input channels)"),
        ("conv", (LIKE_TORCH, (2, 2, 3, 7)), {"layout": "NCHW"}, "(with filter_layout='HWIO' w has 3 input channels)"),
        ("conv_dgrad", ((2, 5, 6, 7), (3, 3, 3, 5), [*IMAGE]), {"padding": 1}, REORDERED),
        ("conv_wgrad", (IMAGE, (2, 5, 6, 7), [3, 3, 3, 5]), {"padding": 1}, REORDERED),
        ("conv_dgrad", (IMAGE, (3, 3, 3, 3), [*LIKE_TORCH]), {"padding": 1}, "(in layout NCHW x has 3)"),
        ("batch_norm", (LIKE_TORCH,), {"scale": (3,)}, "(in layout NCHW x has 3)"),
        ("batch_norm", (LIKE_TORCH,), {"running_mean": (3,), "running_variance": (3,)}, "(in layout NCHW x has 3)"),
        ("batch_norm_inference", (LIKE_TORCH, (3,), (3,)), {}, "(in layout NCHW x has 3)"),
        ("group_norm", (LIKE_TORCH,), {"groups": 7, "bias": (3,)}, "(in layout NCHW x has 3)"),
        ("instance_norm", (IMAGE,), {"scale": (3,), "layout": "NCHW"}, "(in layout NHWC x has 3)"),
        ("layer_norm", (LIKE_TORCH,), {"scale": (3,)}, "(x has 3 along axis 1)"),
        ("rms_norm", (LIKE_TORCH,), {"scale": (6,)}, "(x has 6 along axis 2)"),
        ("layer_norm_dgrad", (LIKE_TORCH, IMAGE), {}, REORDERED),
        ("pool", ((2, 3, 8, 8),), {"window": 5}, "(in layout NCHW the sizes of x are (8, 8))"),
        ("pool", ((2, 8, 8, 3),), {"window": 5, "layout": "NCHW"}, "(in layout NHWC the sizes of x are (8, 8))"),
        ("attention", (Q_, K_, K_), {}, "(in layout BNTH q has 4 and k 4)"),
        ("attention", (Q, K, K), {"layout": "BNTH"}, "(in layout BTNH q has 4 and k 4)"),
        ("attention", (Q_, Q_, Q_), {"bias": (2, 4, 5, 5)}, "(in layout BNTH of q and k it would fit (2, 4, 5, 5))"),
        ("attention", (Q_, Q_, Q_), {"sinks": (4,)}, "(in layout BNTH `q` has 4 heads)"),
        ("attention", (Q_, Q_, Q_), {"mask": jnp.ones((1, 1, 5, 5), bool)}, "it would fit (2, 4, 5, 5))"),
        ("attention", (Q_, Q_, Q_), {"query_segments": jnp.ones((2, 5), int)}, "of q and k it would fit)"),
        ("attention_decode", (Q_, Q_, Q_, ONES[:2]), {"alibi_slopes": (4,)}, "(in layout BNTH `q` has 4 heads)"),
        ("lstm", ((5, 2, 3), *LSTM), {"lengths": ONES, "layout": "TNC"}, "(in layout NTC x has 5 sequences)"),
        ("lstm", ((5, 2, 3), *LSTM), {"h0": (2, 4)}, "(in layout TNC x has 2 sequences)"),
        ("lstm", ((5, 2, 3), *LSTM), {"resets": jnp.ones((2, 5), bool)}, "; it looks transposed"),
        ("ctc_loss", ((9, 2, 5), jnp.ones((2, 3), int)), {}, "(in layout TNC `logits` has 2 sequences)"),
        ("ctc_loss", ((2, 9, 5), jnp.ones((2, 3), int)), {"layout": "TNC"}, "(in layout NTC `logits` has 2 sequences)"),
        ("conv", (IMAGE, (3, 3, 3, 4)), {"padding": 1, "residual": (2, 4, 6, 7)}, REORDERED),
    ],
)  # fmt: skip
def test_another_layout(op: str, arguments: tuple[Any, ...], options: dict[str, Any], hint: str):
    assert of_shapes(op, *arguments, **options).endswith(f"{hint}.")


@pytest.mark.parametrize(
    ("op", "arguments", "options", "said"),
    [
        ("conv", (IMAGE, (3, 3, 5, 4)), {}, "got 5."),
        ("conv", ((2, 3, 3, 4), (3, 3, 4, 4, 1)), {}, "got shape (3, 3, 4, 4, 1)."),
        ("batch_norm", (IMAGE,), {"scale": (5,)}, "one for each channel of x, got (5,)."),
        ("layer_norm", (IMAGE,), {"scale": (5,)}, "got (5,)."),
        ("pool", (IMAGE,), {"window": 9}, "that span (9, 9)."),
        ("attention", (Q, Q, Q), {"sinks": (7,)}, "one for each head of `q`, got (7,)."),
        ("attention", (Q, Q, Q), {"bias": (2, 4, 7, 7)}, "got (2, 4, 7, 7)."),
        ("lstm", ((2, 5, 3), *LSTM), {"h0": (7, 4)}, "one row for every sequence, got (7, 4)."),
        ("lstm_cell", ((2, 3), *LSTM, (1, 4), (2, 4)), {}, "one row for every sequence, got (1, 4)."),
        ("ctc_loss", ((2, 9, 5), jnp.ones((7, 3), int)), {}, "got (7, 3)."),
    ],
)
def test_where_no_layout_fits_none_is_named(op: str, arguments: tuple[Any, ...], options: dict[str, Any], said: str):
    assert of_shapes(op, *arguments, **options).endswith(said)
