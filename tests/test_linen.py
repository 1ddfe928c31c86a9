"""Layers of `jaxdnn.linen`: Linen's arguments, variables, values and gradients."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen import dtypes
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from jaxdnn import linen
from tests import layers
from tests.layers import Case, assert_near, assert_same, numbers, standard_promotion  # noqa: F401

LAYERS = layers.classes(linen)
normal = nn.initializers.normal(1.0)


def promoted(*arrays: Any, **kwargs: Any) -> Any:
    """Linen's function of this kind, as another function."""
    return dtypes.promote_dtype(*arrays, **kwargs)


def halved(*args: Any, **kwargs: Any) -> Any:
    """A convolution of one's own."""
    return jax.lax.conv_general_dilated(*args, **kwargs) * 0.5


def doubled(*args: Any, **kwargs: Any) -> Any:
    """A product of one's own."""
    return jax.lax.dot_general(*args, **kwargs) * 2


MASK = np.indices((3, 4, 6)).sum(0) % 2
WIDE = {"dtype": jnp.float32, "param_dtype": jnp.bfloat16, "promote_dtype": promoted}
CONV = {"padding": ((2, 1),), "kernel_dilation": (2,), "mask": MASK, "precision": "highest", **WIDE}
CONV |= {"kernel_init": normal, "bias_init": normal, "strides": (1,)}
NORM = {"epsilon": 0.5, "scale_init": normal, "use_fast_variance": False, "force_float32_reductions": False}
NORM |= {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
CELL = {"kernel_init": normal, "recurrent_kernel_init": normal, "bias_init": normal}
CELL |= {"carry_init": normal, "activation_fn": jax.lax.tanh}
GATED = {"gate_fn": jax.lax.logistic, **CELL}
bf16 = jnp.bfloat16

ATTENTION = {"kernel_init": normal, "out_kernel_init": normal, "bias_init": normal, "out_bias_init": normal}
ATTENTION |= {"param_dtype": bf16, "dtype": jnp.float32, "qkv_features": 12, "out_features": 6, "precision": "highest"}
ATTENTION |= {"normalize_qk": True, "qkv_dot_general": doubled, "out_dot_general": doubled, "dropout_rate": 0.5}
ATTENTION |= {"deterministic": True, "broadcast_dropout": False, "force_fp32_for_softmax": True}
EINSUMS = {f"{name}_einsum_cls": lambda: jnp.einsum for name in ("qk_attn_weights", "attn_weights_value")}
EINSUMS |= {f"{name}_dot_general_cls": lambda: doubled for name in ("qkv", "out")}

CASES = [
    Case("MultiHeadDotProductAttention", (2,), {}, (3, 5, 8), cancelled=16),
    Case("MultiHeadDotProductAttention", (2,), ATTENTION, (3, 5, 8), 16, bf16, 16),
    Case("MultiHeadAttention", (2,), {"use_bias": False, **EINSUMS}, (3, 5, 8)),
    Case("SelfAttention", (2,), {"use_bias": False, "normalize_qk": True}, (3, 5, 8), cancelled=16),
    Case("Conv", (6, (3,)), {"input_dilation": (2,), **CONV}, (2, 7, 4), 16, bf16),
    Case("Conv", (6, (3, 3)), {}, (2, 5, 6, 4)),
    Case("Conv", (6, 3), {"conv_general_dilated": halved}, (2, 7, 4)),
    Case("Conv", (6, 3), {"conv_general_dilated_cls": lambda: halved}, (2, 7, 4)),
    Case("Conv", (6, 3), {"strides": 2, "feature_group_count": 2, "use_bias": False, "padding": "CAUSAL"}, (7, 4)),
    Case("ConvTranspose", (6, (3,)), CONV, (2, 5, 4), 16, bf16),
    Case(
        "ConvTranspose",
        (6, (3,)),
        {
            "strides": (2,),
            "transpose_kernel": True,
            "use_bias": False,
            "preferred_element_type": jnp.float32,
            "padding": "CIRCULAR",
        },
        (2, 5, 4),
    ),
    Case("BatchNorm", (False,), {"momentum": 0.7}, (3, 4, 4, 5)),
    Case("BatchNorm", (True,), {"epsilon": 0.1}, (3, 5)),
    Case("BatchNorm", (False, 1), {"bias_init": normal, **NORM}, (3, 5, 4), 16, bf16),
    Case("BatchNorm", (False,), {"use_scale": False, "use_bias": False}, (5, 4)),
    Case("LayerNorm", (), {}, (3, 4, 5)),
    Case(
        "LayerNorm",
        (),
        {"reduction_axes": (1, 2), "feature_axes": (1, -1), "bias_init": normal, **NORM},
        (3, 4, 5),
        16,
        bf16,
    ),
    Case("LayerNorm", (), {"feature_axes": 1, "use_scale": False}, (3, 4, 5)),
    Case("LayerNorm", (), {"use_bias": False}, (3, 5)),
    Case("RMSNorm", (), {}, (3, 4, 5)),
    Case("RMSNorm", (), {"reduction_axes": 2, "feature_axes": 1, **NORM}, (3, 4, 5), 16, bf16),
    Case("RMSNorm", (), {"use_scale": False}, (3, 5)),
    Case("GroupNorm", (2,), {}, (3, 4, 4, 6)),
    Case("GroupNorm", (None, 3), {"reduction_axes": (1, 2), "bias_init": normal, **NORM}, (3, 4, 6), 16, bf16),
    Case("GroupNorm", (2,), {"use_scale": False, "use_bias": False}, (3, 6)),
    Case("InstanceNorm", (), {}, (3, 4, 4, 5)),
    Case("InstanceNorm", (), {"feature_axes": 1, "bias_init": normal, **NORM}, (3, 4, 5), 16, bf16),
    Case("InstanceNorm", (), {"use_scale": False, "use_bias": False}, (3, 4, 5)),
]


# Flax says of it that it will go.
deprecated = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")


@deprecated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_variables_values_and_gradients_are_linens(case: Case):
    ours, theirs = (getattr(m, case.name)(*case.args, **case.kwargs) for m in (linen, nn))
    variables = theirs.init(jax.random.key(1), case.x)
    assert_same(ours.init(jax.random.key(1), case.x), variables)
    variables = layers.other(variables)
    found, wanted = (outcome(layer, variables, case.x) for layer in (ours, theirs))
    case.assert_near(found, wanted)


def outcome(layer: Any, variables: Any, *arrays: Any, **kwargs: Any) -> Any:
    """What a layer returns, its new statistics, and gradients in its variables and in arrays."""

    @jax.jit
    def run(variables: Any, *arrays: Any) -> Any:
        call = lambda v, *a: layer.apply(v, *a, **kwargs, mutable="batch_stats")
        y, pull, state = jax.vjp(call, variables, *arrays, has_aux=True)
        return y, state, pull(layers.weighted(y))

    return run(variables, *arrays)


SEQUENCES = [
    ("LSTMCell", {"reverse": True, "keep_order": True}, None),
    ("OptimizedLSTMCell", {"reverse": True}, (4, 2, 3)),
    ("GRUCell", {}, None),
    ("SimpleCell", {"reverse": True}, None),
]


@pytest.mark.parametrize(("kind", "direction", "lengths"), SEQUENCES)
def test_sequences_are_linens(kind: str, direction: dict[str, Any], lengths: Any):
    """Up to the ends where there are lengths; and Linen's loop over our cell."""
    kwargs = {**CELL, "activation_fn": jax.nn.relu} if kind == "SimpleCell" else GATED
    x = numbers((3, 4, 4))
    lengths = None if lengths is None else jnp.array(lengths)
    inside = jnp.ones(()) if lengths is None else (jnp.arange(4) < lengths[:, None])[..., None].astype(float)

    class Whole(nn.Module):
        rnn: Any

        def __call__(self, x: Any) -> Any:
            carry, y = self.rnn(x, return_carry=True, seq_lengths=lengths, **direction)
            return carry, y * inside

    ours, theirs = (getattr(m, kind)(6, **kwargs) for m in (linen, nn))
    variables = Whole(nn.RNN(theirs)).init(jax.random.key(1), x)
    assert_same(Whole(linen.RNN(ours)).init(jax.random.key(1), x), variables)
    wanted = outcome(Whole(nn.RNN(theirs)), variables, x)
    for rnn in (linen.RNN(ours), nn.RNN(ours)):
        assert_near(outcome(Whole(rnn), variables, x), wanted)


def test_sequences_time_first():
    x, cell = numbers((3, 2, 4)), nn.GRUCell(6, recurrent_kernel_init=normal)
    ours, theirs = linen.RNN(cell, time_major=True, unroll=2), nn.RNN(cell, time_major=True)
    variables = theirs.init(jax.random.key(1), x)
    assert_near(*(jax.jit(layer.apply)(variables, x) for layer in (ours, theirs)))


def test_a_sharded_batch_shares_statistics():
    """Statistics of all devices of an axis, within shard_map, are those of the whole batch; gradients too."""
    x, mesh = numbers((8, 3, 5)), Mesh(np.array(jax.devices()[:4]), ("batch",))
    variables = nn.BatchNorm(False).init(jax.random.key(0), x)

    def found(layer: nn.Module, where: Any) -> Any:
        call = where(lambda v, x: layer.apply(v, x, mutable="batch_stats"))

        @jax.jit
        def run(variables: Any, x: Any) -> Any:
            y, pull, state = jax.vjp(call, variables, x, has_aux=True)
            return y, state, pull(layers.weighted(y))

        return run(variables, x)

    sharded = ft.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("batch")), out_specs=(P("batch"), P()))
    ours = found(linen.BatchNorm(False, axis_name="batch"), sharded)
    assert_near(ours, found(nn.BatchNorm(False), lambda call: call))


def test_attention_caches_and_functions_of_ones_own():
    x, own = numbers((3, 4, 8)), {"attention_fn": lambda q, k, v, **_: q + k * v}

    def run(module: Any) -> Any:
        plain, layer = module.MultiHeadAttention(2, **own), module.MultiHeadDotProductAttention(2, decode=True)
        variables = nn.MultiHeadDotProductAttention(2, decode=True).init(jax.random.key(0), x)

        @jax.jit
        def steps(variables: Any) -> Any:
            parameters, found = {"params": variables["params"]}, []
            for i in range(2):
                y, cache = layer.apply(variables, x[:, i : i + 1], mutable="cache")
                variables = parameters | cache
                found.append(y)
            return found, variables, plain.apply(parameters, x)

        return steps(variables)

    assert_near(run(linen), run(nn))


@pytest.mark.parametrize("kind", ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell"])
def test_cells_of_narrow_computations(kind: str):
    """dtype and param_dtype; a state is rounded to the dtype of the computation."""
    how = {"dtype": bf16, "param_dtype": jnp.float16, "recurrent_kernel_init": normal}
    ours, theirs = (getattr(m, kind)(6, **how) for m in (linen, nn))
    carry = jax.tree.map(lambda v: v + 0.25, theirs.initialize_carry(jax.random.key(0), (3, 4)))
    variables = theirs.init(jax.random.key(1), carry, numbers((3, 4)))
    assert_same(ours.init(jax.random.key(1), carry, numbers((3, 4))), variables)
    run = jax.jit(lambda *given: [layer.apply(*given) for layer in (ours, theirs)])
    found, wanted = run(variables, carry, numbers((3, 4)))
    assert_near(found, wanted, 16, bf16)


@pytest.mark.parametrize(
    ("name", "args", "shape"), [("Conv", (2, (3,)), (1, 4, 3)), ("MultiHeadDotProductAttention", (1,), (1, 4, 3))]
)
def test_a_call_is_one_to_interceptors_and_intermediates(name: str, args: tuple[Any, ...], shape: tuple[int, ...]):
    seen: dict[Any, Any] = {}
    for module in (linen, nn):
        called: list[str] = []

        def note(following: Any, args: Any, kwargs: Any, context: Any, called: list[str] = called) -> Any:
            called.append(f"{type(context.module).__name__}.{context.method_name}")
            return following(*args, **kwargs)

        layer = getattr(module, name)(*args)
        variables = layer.init(jax.random.key(0), jnp.ones(shape))
        with nn.intercept_methods(note):
            _, kept = layer.apply(variables, jnp.ones(shape), capture_intermediates=True, mutable="intermediates")
        seen[module] = called, jax.tree.map(jnp.shape, kept)
    assert seen[linen] == seen[nn]


def test_a_sequence_of_partitioned_parameters():
    split = nn.with_partitioning(nn.initializers.normal(1.0), (None, "model"))
    x = numbers((2, 3, 4))
    found = [m.RNN(m.GRUCell(6, kernel_init=split)).init_with_output(jax.random.key(0), x) for m in (linen, nn)]
    assert_near(*found)


def test_dropout_of_everything_draws_no_key():
    for module in (linen, nn):
        assert not module.Dropout(1.0, deterministic=False).apply({}, jnp.ones(3)).any()


def test_dropout_is_ours_of_linens_key():
    x, key = numbers((4, 5, 6)), jax.random.key(2)
    layer = linen.Dropout(0.25, broadcast_dims=(1,), rng_collection="noise")
    y: Any = layer.apply({}, x, deterministic=False, rng=key)
    kept = dnn.dropout_mask(key, (4, 1, 6), rate=0.25)
    np.testing.assert_allclose(y, jnp.where(kept, x / 0.75, 0), rtol=1e-6)
    drawn = linen.Dropout(0.25, deterministic=False).apply({}, x, rngs={"dropout": key})
    own = nn.Dropout(0.25, deterministic=False).bind({}, rngs={"dropout": key}).make_rng("dropout")
    np.testing.assert_array_equal(drawn, dnn.dropout(x, own, rate=0.25))
    assert layer.apply({}, x, deterministic=True) is x
    named: Any = layer.apply({}, x, deterministic=False, rngs={"noise": key})
    assert ((named == 0).all(1) | (named != 0).all(1)).all()


ELSEWHERE = {
    "BatchNorm": {"axis_name"},
    "Dropout": {"rate", "broadcast_dims", "deterministic", "rng_collection"},
    "RNN": {"cell", "time_major", "return_carry", "reverse", "keep_order", "unroll"},
    "MultiHeadDotProductAttention": {"attention_fn", "decode"},
}
ELSEWHERE |= {name: {"dtype", "param_dtype"} for name in ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")}
ELSEWHERE["SelfAttention"] = ELSEWHERE["MultiHeadAttention"] = ELSEWHERE["MultiHeadDotProductAttention"]
REFUSED = {
    **{name: {"axis_name", "axis_index_groups"} for name in ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")},
    "BatchNorm": {"axis_index_groups"},
    "RNN": {"variable_axes", "variable_broadcast", "variable_carry", "split_rngs"},
    "SimpleCell": {"residual"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_argument_is_exercised_or_refused(name: str):
    kwargs = {name: GATED for name in ("LSTMCell", "OptimizedLSTMCell", "GRUCell")} | {"SimpleCell": CELL}
    alike = lambda name: name.replace("DotProduct", "").replace("Self", "MultiHead")
    cases = [case for case in CASES if alike(case.name) == alike(name)]
    cases += [Case(name, (6,), kwargs[name], ())] if name in kwargs else []
    given = ELSEWHERE.get(name, set()) | REFUSED.get(name, set())
    assert layers.unserved(getattr(nn, name), cases, given) <= {"parent", "name"}


def test_refusals_name_the_argument():
    x, key = jnp.ones((3, 4)), jax.random.key(0)
    for name, argument in ((n, a) for n in REFUSED if "Norm" in n for a in REFUSED[n]):
        layer = getattr(linen, name)(**{argument: "x"}, **({"num_groups": 2} if name == "GroupNorm" else {}))
        with pytest.raises(NotImplementedError, match=f"`{argument}` must be None"):
            layer.init(key, x, **({"use_running_average": False} if name == "BatchNorm" else {}))
    with pytest.raises(NotImplementedError, match="`mask` must be None"):
        linen.LayerNorm().init(key, x, mask=x > 0)
    others = {"variable_axes": {"x": 0}, "variable_broadcast": "x", "variable_carry": "x", "split_rngs": {"x": True}}
    for argument, value in others.items():
        with pytest.raises(NotImplementedError, match=f"`{argument}` must be"):
            linen.RNN(nn.GRUCell(4), **{argument: value}).init(key, x[None])
    with pytest.raises(NotImplementedError, match="`residual` must be False"):
        linen.RNN(nn.SimpleCell(4, residual=True)).init(key, x[None])
    with pytest.raises(NotImplementedError, match="`cell` must be one of"):
        linen.RNN(nn.MGUCell(4)).init(key, x[None])


def test_a_unet_block_class_by_class():
    """A U-Net's block: one set of variables, with either module, whose names of submodules are the same."""

    def block(module: Any) -> nn.Module:
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                y = module.Conv(4, (3, 3))(nn.silu(module.GroupNorm(2)(x)))
                low = module.max_pool(y, (2, 2), (2, 2))
                batch, height, width, channels = low.shape
                flat = low.reshape(batch, height * width, channels)
                seen = module.MultiHeadDotProductAttention(2)(flat, mask=jnp.ones((1, 1, 1, height * width), bool))
                up = module.ConvTranspose(4, (2, 2), strides=(2, 2))(seen.reshape(low.shape))
                return module.avg_pool(jnp.concatenate([y, up], -1), (2, 2), (2, 2), count_include_pad=False)

        return Block()

    x = numbers((2, 4, 4, 4))
    ours, theirs = block(linen), block(nn)
    variables = theirs.init(jax.random.key(0), x)
    assert_same(ours.init(jax.random.key(0), x), variables)
    assert_near(outcome(ours, variables, x), outcome(theirs, variables, x), 64, cancelled=1)


@deprecated
@pytest.mark.parametrize("name", LAYERS)
def test_docstring_example_runs(name: str):
    layers.run_example(LAYERS[name])
