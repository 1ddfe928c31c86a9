"""Layers of `jaxdnn.nnx`: Flax's arguments, state, values and gradients."""

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.nn import dtypes
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from jaxdnn import nnx as dnnx
from tests import layers
from tests.layers import Case, assert_near, assert_same, numbers, standard_promotion  # noqa: F401

LAYERS = layers.classes(dnnx)
normal = nnx.initializers.normal(1.0)


def promoted(arrays: Any, *, dtype: Any) -> Any:
    """Flax's function of this kind, as another function."""
    return dtypes.promote_dtype(arrays, dtype=dtype)


def halved(*args: Any, **kwargs: Any) -> Any:
    """A convolution of one's own."""
    return jax.lax.conv_general_dilated(*args, **kwargs) * 0.5


def doubled(*args: Any, **kwargs: Any) -> Any:
    """A product of one's own."""
    return jax.lax.dot_general(*args, **kwargs) * 2


MASK = np.indices((3, 4, 6)).sum(0) % 2
CONV = {
    "padding": ((2, 1),),
    "input_dilation": (2,),
    "kernel_dilation": (2,),
    "use_bias": False,
    "precision": "highest",
    "kernel_init": normal,
    "preferred_element_type": jnp.float32,
    "kernel_metadata": {"tag": 1},
    "mask": MASK,
}
TRANSPOSED = {name: v for name, v in CONV.items() if name != "input_dilation"}
TRANSPOSED |= {"mask": MASK.swapaxes(1, 2), "transpose_kernel": True}
WIDE = {"dtype": jnp.float32, "param_dtype": jnp.bfloat16, "promote_dtype": promoted}
COMMON = {"dtype": jnp.bfloat16, "param_dtype": jnp.float16, "promote_dtype": promoted}
BIAS = {"bias_init": normal, "bias_metadata": {"tag": 2}}
NORM = {"epsilon": 0.5, "scale_init": normal, "use_fast_variance": False, "scale_metadata": {"tag": 1}, **COMMON}
CELL = {"kernel_init": normal, "recurrent_kernel_init": normal, "kernel_metadata": {"tag": 1}, **BIAS}
CELL |= {"recurrent_kernel_metadata": {"tag": 3}, "gate_fn": jax.lax.logistic, "activation_fn": jax.lax.tanh}
SIMPLE = {name: v for name, v in CELL.items() if name != "gate_fn"} | {"activation_fn": jax.nn.relu}

ATTENTION = {f"{name}_promote_dtype": promoted for name in ("qkv", "out", "ln")}
ATTENTION |= {f"{name}_metadata": {"tag": 1} for name in ("kernel", "out_kernel", "bias", "out_bias")}
ATTENTION |= {f"{name}_ln_scale_metadata": {"tag": 2} for name in ("query", "key")}
ATTENTION |= {"out_kernel_init": normal, "bias_init": normal, "out_bias_init": normal, "kernel_init": normal}
ATTENTION |= {"dtype": jnp.float32, "param_dtype": jnp.bfloat16, "normalize_qk": True, "precision": "highest"}
ATTENTION |= {"qkv_dot_general": doubled, "out_dot_general": doubled, "dropout_rate": 0.5, "deterministic": True}
ATTENTION |= {"keep_rngs": False, "broadcast_dropout": False, "decode": False}
# What other tests give: a function by class, no biases, and an attention of one's own.
ATTENTION_ELSEWHERE = {"qkv_dot_general_cls", "out_dot_general_cls", "use_bias", "attention_fn"}

CASES = [
    Case("Conv", (4, 6, (3, 3)), {}, (2, 7, 6, 4)),
    Case("Conv", (4, 6, (3,), (1,)), CONV, (2, 7, 4)),
    Case("Conv", (4, 6, (3,)), {"strides": 2, "feature_group_count": 2, "padding": "CAUSAL", **BIAS}, (2, 7, 4)),
    Case("Conv", (4, 6, (3,)), {"padding": "CIRCULAR", **WIDE}, (3, 2, 5, 4), 16, jnp.bfloat16),
    Case("Conv", (4, 6, 3), {"conv_general_dilated": halved}, (7, 4)),
    Case("ConvTranspose", (4, 6, (3, 3)), {"strides": (2, 1), **BIAS}, (2, 5, 6, 4)),
    Case("ConvTranspose", (4, 6, (3,)), {**TRANSPOSED, "strides": 2}, (5, 4)),
    Case("ConvTranspose", (4, 6, (3,)), {"padding": "CIRCULAR", "strides": 2, **WIDE}, (2, 5, 4), 16, jnp.bfloat16),
    Case("BatchNorm", (5,), {"momentum": 0.7}, (3, 4, 4, 5)),
    Case("BatchNorm", (5,), {"use_running_average": True, "epsilon": 0.1}, (3, 4, 5)),
    Case("BatchNorm", (5,), {"axis": 1, **NORM, **BIAS}, (3, 5, 4), 16, jnp.bfloat16),
    Case("BatchNorm", (5,), {"axis": 2, "use_scale": False, "use_bias": False}, (2, 3, 5, 2, 2, 2)),
    Case("LayerNorm", (5,), {}, (3, 4, 5)),
    Case(
        "LayerNorm", (5,), {"reduction_axes": (1, 2), "feature_axes": -1, **NORM, **BIAS}, (3, 4, 5), 64, jnp.bfloat16
    ),
    Case("LayerNorm", (20,), {"reduction_axes": (-1, 1), "feature_axes": (1, 2)}, (3, 4, 5)),
    Case("LayerNorm", (4,), {"feature_axes": 1, "use_scale": False, "epsilon": 0.1}, (3, 4, 5)),
    Case("LayerNorm", (5,), {"use_bias": False}, (5,)),
    Case("RMSNorm", (5,), {}, (3, 4, 5)),
    Case("RMSNorm", (4,), {"reduction_axes": 2, "feature_axes": 1, **NORM}, (3, 4, 5), 16, jnp.bfloat16),
    Case("RMSNorm", (5,), {"use_scale": False}, (3, 5)),
    Case("GroupNorm", (6, 2), {}, (3, 4, 4, 6)),
    Case("GroupNorm", (6, None, 2), {"reduction_axes": (1, 2), **NORM, **BIAS}, (3, 4, 6), 16, jnp.bfloat16),
    Case("GroupNorm", (6, 2), {"use_scale": False, "use_bias": False, "use_fast_variance": False}, (3, 6)),
    Case("InstanceNorm", (5,), {}, (3, 4, 4, 5)),
    Case("InstanceNorm", (4,), {"feature_axes": 1, **NORM, **BIAS}, (3, 4, 5), 16, jnp.bfloat16),
    Case("InstanceNorm", (5,), {"use_scale": False, "use_bias": False}, (3, 4, 5)),
    Case("MultiHeadAttention", (2, 8), {"decode": False}, (3, 5, 8), cancelled=16),
    Case("MultiHeadAttention", (4, 8, 8, 6, 2, 8), ATTENTION, (3, 5, 8), 16, jnp.bfloat16, 16),
]


def both(case: Case) -> tuple[Any, Any]:
    """Our layer and Flax's, of the same keys."""
    return tuple(getattr(m, case.name)(*case.args, **case.kwargs, rngs=nnx.Rngs(3)) for m in (dnnx, nnx))  # type: ignore[return-value]


def outcome(layer: Any, call: Any, *arrays: jax.Array) -> Any:
    """What a layer returns, its state behind the call, and gradients in its parameters and in arrays."""
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def run(parameters: Any, rest: Any, *arrays: jax.Array) -> Any:
        def value(parameters: Any, rest: Any, *arrays: jax.Array) -> Any:
            module = nnx.merge(graph, parameters, rest)
            y = call(module, *arrays)
            return y, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

        y, pull, state = jax.vjp(value, parameters, rest, *arrays, has_aux=True)
        of_parameters, _, *of_arrays = pull(layers.weighted(y))
        return y, state, of_parameters, of_arrays

    y, state, of_parameters, of_arrays = run(parameters, rest, *arrays)
    return y, state, nnx.to_pure_dict(of_parameters), of_arrays


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_values_and_gradients_are_flaxs(case: Case):
    ours, theirs = both(case)
    assert_same(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))
    kinds = lambda layer: [
        (path, type(v), getattr(v, "get_metadata", dict)()) for path, v in nnx.to_flat_state(nnx.state(layer))
    ]
    assert kinds(ours) == kinds(theirs)
    nnx.update(theirs, layers.other(nnx.state(theirs)))
    nnx.update(ours, nnx.state(theirs))
    call = lambda layer, x: layer(x)
    found, wanted = outcome(ours, call, case.x), outcome(theirs, call, case.x)
    case.assert_near(found, wanted)
    back = both(case)[1]
    nnx.update(back, nnx.state(ours))
    assert_same(nnx.to_pure_dict(nnx.state(back)), nnx.to_pure_dict(nnx.state(theirs)))


BACK, KEPT = {"reverse": True}, {"reverse": True, "keep_order": True}
SEQUENCES = [
    ("LSTMCell", {}, (4, 2, 3)),
    ("OptimizedLSTMCell", BACK, (4, 2, 3)),
    ("GRUCell", KEPT, (4, 2, 3)),
    ("SimpleCell", KEPT, None),
]


@pytest.mark.parametrize(("kind", "direction", "lengths"), SEQUENCES)
def test_sequences_are_flaxs(kind: str, direction: dict[str, Any], lengths: Any):
    """Up to the ends where there are lengths; and Flax's loop over our cell."""
    kwargs = SIMPLE if kind == "SimpleCell" else CELL
    ours, theirs = (getattr(m, kind)(4, 6, **kwargs, rngs=nnx.Rngs(3)) for m in (dnnx, nnx))
    assert_same(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))
    x, carry = numbers((3, 4, 4)), jax.tree.map(lambda v: v + 0.25, theirs.initialize_carry((3, 4), nnx.Rngs(0)))
    lengths = None if lengths is None else jnp.array(lengths)
    inside = jnp.ones(()) if lengths is None else (jnp.arange(4) < lengths[:, None])[..., None].astype(float)

    def call(rnn: Any, x: jax.Array) -> Any:
        c, y = rnn(x, return_carry=True, initial_carry=carry, seq_lengths=lengths, **direction)
        return c, y * inside

    wanted = outcome(nnx.RNN(theirs), call, x)
    for rnn in (dnnx.RNN(ours), nnx.RNN(ours)):
        assert_near(outcome(rnn, call, x), wanted)


def near_in_one_program(call: Any, ours: Any, theirs: Any, *arrays: Any) -> None:
    """What a call of both makes of arrays, compiled together, and their state behind it."""

    @nnx.jit
    def run(layers: Any, *arrays: Any) -> Any:
        return [call(layer, *arrays) for layer in layers]

    assert_near(*run((ours, theirs), *arrays))
    found, wanted = (nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngState))) for layer in (ours, theirs))
    assert_near(found, wanted)


def test_sequences_time_first_and_without_batch_axes_or_with_several():
    cell = nnx.GRUCell(4, 6, kernel_init=normal, recurrent_kernel_init=normal, rngs=nnx.Rngs(3))
    ours, theirs = dnnx.RNN(cell, time_major=True, unroll=2), nnx.RNN(cell, time_major=True)
    both_ways = (nnx.Bidirectional(m.RNN(cell), m.RNN(nnx.clone(cell))) for m in (dnnx, nnx))
    near_in_one_program(
        lambda layer, *given: [layer(x) for x in given], ours, theirs, numbers((3, 4)), numbers((3, 2, 3, 4))
    )
    near_in_one_program(lambda layer, x: layer(x), *both_ways, numbers((2, 3, 4)))


def test_attention_masks_caches_and_functions_of_ones_own():
    ours, theirs = (m.MultiHeadAttention(2, 8, use_bias=False, rngs=nnx.Rngs(3)) for m in (dnnx, nnx))
    for layer in (ours, theirs):
        layer.init_cache((3, 4, 8))

    def call(layer: Any, x: Any, keys: Any) -> Any:
        masked = [
            layer(x, keys, decode=False, **how) for how in ({"mask": keys[:, None, :, :5] > 0}, {"is_causal": True})
        ]
        return masked, [layer(x[:, i : i + 1], decode=True) for i in range(2)]

    near_in_one_program(call, ours, theirs, numbers((3, 5, 8)), numbers((3, 5, 8), seed=1))
    kinds = {"qkv_dot_general_cls": lambda: doubled, "out_dot_general_cls": lambda: doubled, "decode": False}
    kinds["attention_fn"] = lambda q, k, v, **_: q + k * v
    own = (m.MultiHeadAttention(2, 8, **kinds, rngs=nnx.Rngs(3)) for m in (dnnx, nnx))
    near_in_one_program(lambda layer, x: layer(x), *own, numbers((3, 5, 8)))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_attention_that_drops_or_sows_weights_has_flaxs_weights():
    dropping = [m.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.5, rngs=nnx.Rngs(3)) for m in (dnnx, nnx)]

    def call(layer: Any, x: Any) -> Any:
        y = layer(x, deterministic=False, sow_weights=True)
        return y, nnx.to_pure_dict(nnx.pop(layer, nnx.Intermediate))

    near_in_one_program(call, *dropping, numbers((3, 5, 8)))


def test_dropout_is_ours_of_flaxs_key():
    rngs = nnx.Rngs(5, noise=7)
    layer = dnnx.Dropout(0.25, broadcast_dims=(1,), rng_collection="noise", deterministic=None, rngs=rngs)
    plain = dnnx.Dropout(0.25)
    key, x = jax.random.key(2), numbers((4, 5, 6))
    kept = dnn.dropout_mask(key, (4, 1, 6), rate=0.25)
    y, pull = jax.vjp(lambda x: layer(x, deterministic=False, rngs=key), x)
    np.testing.assert_allclose(y, jnp.where(kept, x / 0.75, 0), rtol=1e-6)
    np.testing.assert_allclose(
        pull(jnp.ones_like(y))[0], jnp.where(jnp.broadcast_to(kept, x.shape), 1 / 0.75, 0), rtol=1e-6
    )
    np.testing.assert_array_equal(plain(x, rngs=key), dnn.dropout(x, key, rate=0.25))
    drawn = nnx.Dropout(0.25, rng_collection="noise", rngs=nnx.Rngs(5, noise=7)).rngs()  # type: ignore[misc]
    np.testing.assert_array_equal(
        layer(x, deterministic=False) == 0, jnp.broadcast_to(~dnn.dropout_mask(drawn, (4, 1, 6), rate=0.25), x.shape)
    )
    layer.eval()
    assert layer(x) is x
    with pytest.raises(TypeError, match="`rngs` must be an Rngs, an RngStream or a key, got int"):
        plain(x, rngs=3)  # type: ignore[arg-type]


def test_a_level_that_is_none_is_named_by_its_argument():
    with pytest.raises(ValueError, match="`determinism` must be one of 'fast'"):
        dnnx.Conv(4, 6, (3,), determinism="nope", rngs=nnx.Rngs(0))(jnp.ones((1, 5, 4)))


def test_features_that_do_not_fit():
    for name in ("LayerNorm", "RMSNorm", "InstanceNorm"):
        with pytest.raises(ValueError, match=r"`x` must have 4 features, as the layer.s scale, got \[3\] along \(2,\)"):
            getattr(dnnx, name)(4, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 3)))


def test_dropout_of_everything_draws_no_key():
    for module in (dnnx, nnx):
        assert not module.Dropout(1.0)(jnp.ones(3)).any()
        layer = module.Dropout(1.0, rngs=nnx.Rngs(0))
        layer(jnp.ones(3))
        assert layer.rngs.count[...] == 0  # type: ignore[union-attr]


def test_modes_and_pooling():
    def call(layer: Any, x: Any) -> Any:
        module = dnnx if isinstance(layer, dnnx.BatchNorm) else nnx
        modes = []
        for mode in ("train", "eval"):
            getattr(layer, mode)()
            modes.append(layer(x))
        how = {"strides": (2, 2), "padding": "SAME"}
        averages = [module.avg_pool(x, (3, 3), **how, count_include_pad=count) for count in (True, False)]
        return modes, averages, module.max_pool(x, (2, 2), (2, 1), "SAME")

    near_in_one_program(call, *(m.BatchNorm(4, rngs=nnx.Rngs(0)) for m in (dnnx, nnx)), numbers((2, 5, 5, 4)))


def test_a_sharded_batch_shares_statistics():
    """Statistics of all devices of an axis, within shard_map, are those of the whole batch; gradients too."""
    x, mesh = numbers((8, 3, 5)), Mesh(np.array(jax.devices()[:4]), ("batch",))
    ours, theirs = (dnnx.BatchNorm(5, axis_name="batch", rngs=nnx.Rngs(0)), nnx.BatchNorm(5, rngs=nnx.Rngs(0)))

    def sharded(layer: Any, x: Any) -> Any:
        graph, state = nnx.split(layer)

        @jax.shard_map(mesh=mesh, in_specs=(P(), P("batch")), out_specs=(P("batch"), P()))
        def run(state: Any, x: Any) -> Any:
            module = nnx.merge(graph, state)
            return module(x), nnx.state(module, nnx.BatchStat)

        y, new = run(state, x)
        nnx.update(layer, new)
        return y

    assert_near(outcome(ours, sharded, x), outcome(theirs, lambda layer, x: layer(x), x))


# What each class's test of values gives by other means than its cases.
ELSEWHERE = {
    "BatchNorm": {"axis_name"},
    "Dropout": {"rate", "broadcast_dims", "deterministic", "rng_collection", "rngs"},
    "MultiHeadAttention": ATTENTION_ELSEWHERE,
    "RNN": {"cell", "time_major", "return_carry", "reverse", "keep_order", "unroll", "rngs"},
    **{
        name: {"dtype", "param_dtype", "promote_dtype", "carry_init", "keep_rngs"}
        for name in ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")
    },
}
NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
REFUSED = {
    **{name: {"axis_name", "axis_index_groups"} for name in NORMS},
    "BatchNorm": {"axis_index_groups"},
    "RNN": {"state_axes", "broadcast_rngs"},
    "SimpleCell": {"residual"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_argument_is_exercised_or_refused(name: str):
    cells = {"LSTMCell": CELL, "OptimizedLSTMCell": CELL, "GRUCell": CELL, "SimpleCell": SIMPLE}
    cases = [case for case in CASES if case.name == name]
    cases += [Case(name, (4, 6), cells[name], ())] if name in cells else []
    given = ELSEWHERE.get(name, set()) | REFUSED.get(name, set())
    assert layers.unserved(getattr(nnx, name), cases, given) <= {"rngs"}


@pytest.mark.filterwarnings("ignore:.*(carry_init|keep_rngs)")
@pytest.mark.parametrize("kind", ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell"])
def test_cells_of_narrow_computations(kind: str):
    """A state is rounded to the dtype of the computation, and returned in that of the carry, which the cell draws."""
    dtype = jnp.float16 if kind == "OptimizedLSTMCell" else jnp.bfloat16
    how = {"dtype": dtype, "param_dtype": jnp.float32, "promote_dtype": promoted, "recurrent_kernel_init": normal}
    how |= {"carry_init": normal, "keep_rngs": True}
    ours, theirs = (getattr(m, kind)(4, 6, **how, rngs=nnx.Rngs(3)) for m in (dnnx, nnx))
    assert_same(*(nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in (ours, theirs)))
    assert isinstance(ours.rngs, nnx.RngStream)
    carry, own = (layer.initialize_carry((3, 4), nnx.Rngs(0)) for layer in (theirs, ours))
    assert_same(own, carry)
    found, wanted = jax.jit(lambda x: [layer(carry, x) for layer in (ours, theirs)])(numbers((3, 4)))
    assert_near(found, wanted, 16, dtype)


CALLED = {"axis_name": "x", "axis_index_groups": [[0]], "mask": np.ones((3, 4), bool)}


@pytest.mark.parametrize(
    ("name", "argument"),
    [(n, a) for n in ("BatchNorm", *NORMS) for a in CALLED if (n, a) != ("BatchNorm", "axis_name")],
)
def test_refusals_of_normalisations_name_the_argument(name: str, argument: str):
    args, x = ((4, 2) if name == "GroupNorm" else (4,)), jnp.ones((3, 4))
    built = {argument: CALLED[argument]} if argument != "mask" else {}
    layer = getattr(dnnx, name)(*args, **built, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match=f"`{argument}` must be None"):
        layer(x, **({"mask": CALLED["mask"]} if argument == "mask" else {}))


def test_other_refusals():
    cell, x, rngs = nnx.SimpleCell(4, 6, residual=True, rngs=nnx.Rngs(0)), jnp.ones((2, 3, 4)), nnx.Rngs(0)
    refusals = {
        "`residual` must be False": lambda: dnnx.RNN(cell)(x),
        "`state_axes` must be None": lambda: dnnx.RNN(cell, state_axes={}),
        "`broadcast_rngs` must be None": lambda: dnnx.RNN(cell, broadcast_rngs="x"),
        "`cell` must be one of LSTMCell": lambda: dnnx.RNN(nnx.Linear(1, 1, rngs=rngs)),
        "`gate_fn` must be": lambda: dnnx.RNN(nnx.GRUCell(4, 6, gate_fn=jnp.tanh, rngs=rngs))(x),
        "`activation_fn` must be": lambda: dnnx.RNN(nnx.GRUCell(4, 6, activation_fn=jax.nn.relu, rngs=rngs))(x),
        "`reduction_axes` must be None or all": lambda: dnnx.GroupNorm(4, 2, reduction_axes=(-1,), rngs=rngs)(x),
        "`axis` must be one axis": lambda: dnnx.BatchNorm(4, axis=(1, 2), rngs=rngs)(x),  # pyright: ignore
        "cannot be served by engine 'hopper'": lambda: dnnx.Conv(4, 6, 3, engine="hopper", rngs=rngs)(x),
        "cannot be guaranteed|at determinism level": lambda: dnnx.BatchNorm(4, determinism="portable", rngs=rngs)(x),
        "`operand` must be one of float32": lambda: dnnx.max_pool(jnp.ones((1, 4, 4, 1), jnp.int16), (2, 2)),
    }
    for message, call in refusals.items():
        with pytest.raises(NotImplementedError, match=message):
            call()
    with pytest.raises(ValueError, match="`engine` must be one of"):
        dnnx.Conv(4, 6, 3, engine="none", rngs=rngs)(x)


def test_engine_and_determinism_reach_the_op():
    layer = dnnx.Conv(4, 6, (3,), engine="ordered", determinism="portable", rngs=nnx.Rngs(0))
    x = numbers((2, 7, 4))
    wanted = dnn.conv(x, layer.kernel[...], padding="SAME", layout="NWC", engine="ordered", determinism="portable")
    np.testing.assert_array_equal(layer(x), wanted + nnx.to_pure_dict(nnx.state(layer))["bias"])


def test_a_residual_block_class_by_class():
    """A ResNet block: with each class ours, from one state, and trained for one step."""

    class Block(nnx.Module):
        def __init__(self, module: Any):
            rngs = nnx.Rngs(0)
            self.first, self.second = (module.Conv(4, 4, (3, 3), rngs=rngs) for _ in range(2))
            self.norms = nnx.List([module.BatchNorm(4, rngs=rngs) for _ in range(2)])

        def __call__(self, x: jax.Array) -> jax.Array:
            y = nnx.relu(self.norms[0](self.first(x)))
            return nnx.relu(x + self.norms[1](self.second(y)))

    ours, theirs = Block(dnnx), Block(nnx)
    found, wanted = (outcome(block, lambda b, x: b(x), numbers((2, 5, 5, 4))) for block in (ours, theirs))
    assert_near(found, wanted, 64, cancelled=8)  # a bias in front of a normalisation has no gradient


@pytest.mark.parametrize("name", LAYERS)
def test_docstring_example_runs(name: str):
    layers.run_example(LAYERS[name])


def test_without_the_framework_one_sentence_says_what_to_install():
    code = "import sys, jaxdnn; assert not {'flax', 'equinox'} & set(sys.modules)\n"
    code += "sys.modules['flax'] = sys.modules['equinox'] = None\n"
    for module in ("nnx", "linen", "equinox"):
        code += f"try: import jaxdnn.{module}\nexcept ModuleNotFoundError as error: print(error)\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    extras = re.findall(r"`jaxdnn\.(\w+)` needs .* `pip install jaxdnn\[(\w+)\]`", found.stdout)
    assert extras == [("nnx", "flax"), ("linen", "flax"), ("equinox", "equinox")]
