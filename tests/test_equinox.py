"""Layers of `jaxdnn.equinox`: Equinox's arguments, leaves, values and gradients."""

import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn import equinox as dnneqx
from tests import layers
from tests.layers import Case, assert_near, assert_same, numbers, standard_promotion  # noqa: F401

LAYERS = layers.classes(dnneqx)
KEY: dict[str, Any] = {"key": jax.random.key(3)}
bf16 = jnp.bfloat16
CONV = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2, "use_bias": False}

CASES = [
    Case("Conv", (1, 4, 6, 3), {**CONV, **KEY}, (4, 9)),
    Case("Conv1d", (4, 6, 3), {"padding_mode": "REFLECT", "padding": "SAME", "dtype": bf16, **KEY}, (4, 9), 16, bf16),
    Case("Conv2d", (4, 6, 3), {**KEY}, (4, 5, 6)),
    Case("Conv3d", (4, 6, 2), {**KEY}, (4, 3, 3, 3)),
    Case("ConvTranspose", (1, 4, 6, 3), {"output_padding": 1, **CONV, **KEY}, (4, 5)),
    Case(
        "ConvTranspose1d",
        (4, 6, 3),
        {"padding_mode": "CIRCULAR", "padding": "SAME", "dtype": jnp.float32, **KEY},
        (4, 9),
    ),
    Case("ConvTranspose2d", (4, 6, 3, 2), {**KEY}, (4, 4, 4)),
    Case("ConvTranspose3d", (4, 6, 2), {**KEY}, (4, 3, 3, 3)),
    Case("LayerNorm", ((4, 5),), {"eps": 0.1}, (4, 5)),
    Case("LayerNorm", (5,), {"use_weight": False, "use_bias": False, "dtype": bf16}, (5,)),
    Case("RMSNorm", ((4, 5),), {"eps": 0.1}, (4, 5)),
    Case("RMSNorm", (5,), {"use_weight": False, "use_bias": False, "dtype": bf16}, (5,)),
    Case("GroupNorm", (2, 6), {"eps": 0.1, "dtype": jnp.float32}, (6, 4, 4)),
    Case("GroupNorm", (2,), {"channelwise_affine": False}, (6,)),
    Case("MultiheadAttention", (2, 8), {**KEY}, (5, 8)),
    Case("AvgPool1d", (2, 2, 1), {"use_ceil": True}, (3, 8)),
    Case("AvgPool2d", (2, 1, 1), {"use_ceil": True}, (3, 5, 6)),
    Case("AvgPool3d", (2, 2, 1), {"use_ceil": True}, (3, 4, 4, 4)),
    Case("MaxPool1d", (2, 2, 1), {"use_ceil": True}, (3, 8)),
    Case("MaxPool2d", (3, 2, 1), {"use_ceil": True}, (3, 5, 6)),
    Case("MaxPool3d", (2, 2, 1), {"use_ceil": True}, (3, 4, 4, 4)),
    Case("AdaptiveAvgPool1d", (3,), {}, (2, 8)),
    Case("AdaptiveAvgPool2d", ((3, 2),), {}, (2, 7, 4)),
    Case("AdaptiveAvgPool3d", (2,), {}, (2, 4, 5, 3)),
    Case("AdaptiveMaxPool1d", (3,), {}, (2, 8)),
    Case("AdaptiveMaxPool2d", (2,), {}, (2, 5, 4)),
    Case("AdaptiveMaxPool3d", ((2, 3, 1),), {}, (2, 4, 5, 3)),
    Case("AdaptivePool", ((3, 2), 2, jnp.max), {}, (3, 7, 5)),
    Case("Pool", (-jnp.inf, jax.lax.max, 2, 3, 2, 1, True), {}, (3, 6, 6)),
]


def both(case: Case) -> tuple[Any, Any]:
    return tuple(getattr(m, case.name)(*case.args, **case.kwargs) for m in (dnneqx, eqx.nn))  # type: ignore[return-value]


def call(layer: Any, x: Any) -> Any:
    return layer(x, x, x) if isinstance(layer, eqx.nn.MultiheadAttention) else layer(x)


def outcome(layer: Any, x: Any, call: Any = call) -> Any:
    """What a layer returns, and gradients in its leaves and in x."""
    parameters, rest = eqx.partition(layer, eqx.is_inexact_array)

    @jax.jit
    def run(parameters: Any, x: Any) -> Any:
        y, pull = jax.vjp(lambda p, x: call(eqx.combine(p, rest), x), parameters, x)
        of_parameters, of_x = pull(layers.weighted(y))
        return y, jax.tree.leaves(of_parameters), of_x

    return run(parameters, x)


def loaded(source: Any, target: Any) -> Any:
    """A layer like the target, from the file of the source."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, source)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, target)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_leaves_values_and_gradients_are_equinoxs(case: Case):
    ours, theirs = both(case)
    is_array = lambda layer: jax.tree.leaves(eqx.filter(layer, eqx.is_array))
    assert_same(is_array(ours), is_array(theirs))
    theirs = layers.other(theirs) if is_array(theirs) else theirs
    ours = loaded(theirs, ours)
    assert_same(is_array(loaded(ours, both(case)[1])), is_array(theirs))
    case.assert_near(outcome(ours, case.x), outcome(theirs, case.x))
    if case.name in ("Conv2d", "LayerNorm", "MaxPool2d"):
        x = numbers((3, *case.shape))
        case.assert_near(*jax.jit(lambda x: [jax.vmap(layer)(x) for layer in (ours, theirs)])(x))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_normalisation_in_both_modes(mode: Any):
    how = {"eps": 0.1, "momentum": 0.7, "mode": mode}
    made = [eqx.nn.make_with_state(m.BatchNorm)(4, "b", **how) for m in (dnneqx, eqx.nn)]
    found = []
    for layer, state in made:
        run = lambda x, s, layer=layer: jax.vmap(layer, axis_name="b", in_axes=(0, None), out_axes=(0, None))(x, s)

        @jax.jit
        def steps(x: Any, state: Any, run: Any = run) -> Any:
            first, state = run(x, state)
            y, pull, state = jax.vjp(lambda x: run(x + 1, state), x, has_aux=True)
            return first, y, pull(layers.weighted(y)), state

        *values, state = steps(numbers((5, 4, 3)), state)
        fixed = eqx.nn.inference_mode(layer)
        mapped = jax.jit(jax.vmap(fixed, axis_name="b", in_axes=(0, None), out_axes=(0, None)))
        after = mapped(numbers((5, 4, 3)), state)[0]
        found.append((values, after, [v for v in jax.tree.leaves(state) if v.dtype.kind == "f"]))
    assert_near(*found)
    plain = dnneqx.BatchNorm(4, "b", channelwise_affine=False, inference=True, dtype=jnp.float32, mode=mode)
    assert plain.weight is None
    assert plain.inference


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_cells_alone_and_in_a_loop(kind: str, use_bias: bool):
    ours, theirs = (getattr(m, kind)(4, 7, use_bias, jnp.float32, **KEY) for m in (dnneqx, eqx.nn))
    start = (numbers((7,)), numbers((7,), seed=1)) if kind == "LSTMCell" else numbers((7,))
    loop = lambda cell, x: jax.lax.scan(lambda h, x: (cell(x, h),) * 2, start, x)
    assert_near(outcome(ours, numbers((5, 4)), loop), outcome(theirs, numbers((5, 4)), loop))


def test_attention_of_masks_sizes_and_dropout():
    x, mask = numbers((5, 8)), np.tri(5, dtype=bool)
    turned = lambda q, k, v: (q[..., ::-1], k, v)
    sizes = {"key_size": 8, "value_size": 8, "output_size": 6, "qk_size": 3, "dtype": jnp.float32}
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    for how, given in (
        ({"vo_size": 5, **sizes, **biases}, {"mask": mask}),
        ({"vo_size": 3, **sizes, **biases}, {"mask": np.stack([mask, ~mask]), "process_heads": turned}),
        ({"dropout_p": 0.5}, {"key": jax.random.key(4)}),
        ({"dropout_p": 0.5, "inference": True}, {}),
    ):
        ours, theirs = (m.MultiheadAttention(2, 8, **how, **KEY) for m in (dnneqx, eqx.nn))
        run = lambda x, given=given, both=(ours, theirs): [layer(x, x, x, **given) for layer in both]
        assert_near(*jax.jit(run)(x))


@pytest.mark.parametrize(("name", "args"), [("LayerNorm", (4,)), ("RMSNorm", (4,)), ("GroupNorm", (2, 4))])
def test_a_state_that_is_given_is_returned(name: str, args: tuple[int, ...]):
    """Also None, as a block hands on that may have a batch normalisation in this place."""
    for module in (dnneqx, eqx.nn):
        y, state = getattr(module, name)(*args)(jnp.ones(4), None)
        assert (y.shape, state) == ((4,), None)


def test_dropout_is_ours():
    x, key = numbers((4, 5)), jax.random.key(2)
    layer = dnneqx.Dropout(0.25)
    np.testing.assert_array_equal(layer(x, key=key), dnn.dropout(x, key, rate=0.25))
    assert eqx.nn.inference_mode(layer)(x) is x
    with pytest.raises(RuntimeError, match="requires a key"):
        layer(x)
    with pytest.warns(UserWarning, match="deprecated"):
        old = layer(x, key=key, deterministic=False)
    np.testing.assert_array_equal(old, dnn.dropout(x, key, rate=0.25))
    with pytest.raises(NotImplementedError, match="`p` must be a number known when traced"):
        dnneqx.Dropout(jnp.float32(0.5))(x, key=key)


@pytest.mark.filterwarnings("ignore:.*(deterministic|elementwise_affine)")
def test_equinoxs_old_names_of_arguments():
    """`deterministic` is `inference`, and `elementwise_affine` is `use_weight` and `use_bias`."""
    x = numbers((4,))
    assert dnneqx.Dropout(0.5, deterministic=True)(x) is x
    assert dnneqx.Dropout(0.5)(x, deterministic=True) is x
    ours, theirs = (m.LayerNorm(4, elementwise_affine=False) for m in (dnneqx, eqx.nn))
    assert ours.weight is None
    assert ours.bias is None
    assert_near(ours(x), theirs(x))


ELSEWHERE = {
    "BatchNorm": {"input_size", "axis_name", "eps", "channelwise_affine", "momentum", "inference", "dtype", "mode"},
    "Dropout": {"p", "inference", "deterministic"},
    "LayerNorm": {"elementwise_affine"},
    "LSTMCell": {"input_size", "hidden_size", "use_bias", "dtype", "key"},
    "GRUCell": {"input_size", "hidden_size", "use_bias", "dtype", "key"},
    "MultiheadAttention": {
        *("key_size", "value_size", "output_size", "qk_size", "vo_size", "dropout_p", "inference", "dtype"),
        *(f"use_{name}_bias" for name in ("query", "key", "value", "output")),
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_argument_is_exercised_or_refused(name: str):
    """The classes of one to three axes hand theirs to the class of any number."""
    general = next(
        (
            stem
            for stem in ("ConvTranspose", "Conv", "AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
            if name.startswith(stem)
        ),
        name,
    )
    cases = [case for case in CASES if case.name.rstrip("123d") == general.rstrip("123d")]
    found = set().union(*(layers.given(getattr(eqx.nn, c.name), c) for c in cases), ELSEWHERE.get(name, set()))
    assert layers.unserved(getattr(eqx.nn, name), [], found) == set()


def test_adaptive_pooling_refuses_by_name():
    x = jnp.ones((2, 5, 4))
    with pytest.raises(NotImplementedError, match=r"`operation` must be jax.numpy.mean or jax.numpy.max"):
        dnneqx.AdaptivePool(2, 2, jnp.sum)(x)
    with pytest.raises(
        ValueError, match=r"`target_shape` must be made of sizes from 1 to those of x, \(5, 4\), got \(6, 2\)\."
    ):
        dnneqx.AdaptiveAvgPool2d((6, 2))(x)
    with pytest.raises(ValueError, match=r"`x` must have channels and 3 axes, at most three, got shape \(2, 5, 4\)\."):
        dnneqx.AdaptiveMaxPool3d(2)(x)
    whole = jnp.arange(10).reshape(2, 5)
    np.testing.assert_array_equal(dnneqx.AdaptiveAvgPool1d(2)(whole), eqx.nn.AdaptiveAvgPool1d(2)(whole))


def test_engine_and_determinism_reach_the_op_and_are_no_leaves():
    layer = dnneqx.Conv1d(4, 6, 3, engine="ordered", determinism="portable", **KEY)
    x = numbers((4, 9))
    how: Any = {"layout": "NCW", "filter_layout": "OIW", "engine": "ordered", "determinism": "portable"}
    np.testing.assert_array_equal(layer(x), dnn.conv(x[None], layer.weight, **how)[0] + layer.bias)  # pyright: ignore
    assert len(jax.tree.leaves(layer)) == 2
    with pytest.raises(NotImplementedError, match="cannot be served by engine 'hopper'"):
        dnneqx.Conv1d(4, 6, 3, engine="hopper", **KEY)(x)
    with pytest.raises(ValueError, match="`x` must have shape"):
        dnneqx.LayerNorm(4)(x)
    with pytest.raises(NotImplementedError, match=r"must be jax.lax.max, jax.lax.min or jax.lax.add"):
        dnneqx.Pool(1.0, jax.lax.mul, 1, 2)(x)


def test_a_convnext_block_class_by_class():
    def block(module: Any, x: Any) -> Any:
        depthwise = module.Conv2d(4, 4, 3, padding=1, groups=4, key=jax.random.key(0))
        norm, wide = module.LayerNorm(4), module.Conv2d(4, 8, 1, key=jax.random.key(1))
        narrow = module.Conv2d(8, 4, 1, key=jax.random.key(2))
        y = jax.vmap(jax.vmap(norm, 1, 1), 1, 1)(depthwise(x))
        return x + narrow(jax.nn.gelu(wide(y)))

    def run(module: Any) -> Any:
        def both(x: Any) -> Any:
            y, pull = jax.vjp(jax.vmap(lambda x: block(module, x)), x)
            return y, pull(layers.weighted(y))

        return jax.jit(both)(numbers((2, 4, 5, 5)))

    assert_near(run(dnneqx), run(eqx.nn), 64)


@pytest.mark.parametrize("name", LAYERS)
def test_docstring_example_runs(name: str):
    layers.run_example(LAYERS[name])
