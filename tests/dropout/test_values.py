"""Dropout: every bit predicted, whatever the layout, split, sharding or transformation; its statistics; its state."""

import functools as ft
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.dropout import primitive
from jaxdnn._src.dropout import xla as kernel
from jaxdnn.verify import matrix
from jaxdnn_reference.dropout import philox, random_words

SEED = 1234567890123
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
LAYOUTS = {
    "NHWC": (3, 4, 5, 6),
    "NCHW": (3, 6, 4, 5),
    "CHWN": (6, 4, 5, 3),
    "NCW": (3, 6, 5),
    "CDHWN": (6, 2, 4, 5, 3),
    "NCHWc2": (3, 3, 4, 5, 2),
}


def inputs(shape: Any, seed: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def same(found: Any, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    unsigned = np.dtype(f"u{wanted.dtype.itemsize}")
    np.testing.assert_array_equal(np.asarray(found).view(unsigned), wanted.view(unsigned))


def ordered(x: np.ndarray, key: Any, **options: Any) -> np.ndarray:
    return reference.dropout(x, key, arithmetic="ordered", **options)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_philox(counter: list[int], key: list[int], words: str):
    """The published test vectors of Philox4x32-10, by the definition and by the engine."""
    found = philox(np.array(counter), (key[0], key[1]))
    assert " ".join(f"{w:08x}" for w in found) == words
    with jax.enable_x64(True):
        c0, c1, c2, c3 = (jnp.uint32(v) for v in counter)
        assert " ".join(f"{int(w):08x}" for w in kernel.philox((c0, c1, c2, c3), (key[0], key[1]))) == words


@each_dtype
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0, 2.0**-33, 1 - 2.0**-40, 1e-300])
def test_every_bit_is_the_definitions(dtype: Any, rate: float):
    x = inputs((5, 7, 9), 1, dtype)
    same(dnn.dropout(x, SEED, rate=rate), ordered(x, SEED, rate=rate))
    mask = dnn.dropout_mask(SEED, x.shape, rate=rate)
    np.testing.assert_array_equal(mask, reference.dropout_mask(SEED, x.shape, rate=rate))


@pytest.mark.usefixtures("x64")
def test_float64():
    x = inputs((5, 7, 9), 2, np.float64)
    same(dnn.dropout(x, SEED, rate=0.3), ordered(x, SEED, rate=0.3))
    np.testing.assert_allclose(dnn.dropout(x, SEED, rate=0.3), reference.dropout(x, SEED, rate=0.3), rtol=2.0**-51)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 2**34 - 9, 2**34 - 8, 2**36 + 6, 2**64 - 4000])
def test_offsets_of_64_bits(offset: int):
    x = inputs((5, 7, 9), 3)
    same(dnn.dropout(x, SEED, rate=0.4, offset=offset), ordered(x, SEED, rate=0.4, offset=offset))
    if offset < 2**32:
        same(dnn.dropout(x, SEED, rate=0.4, offset=jnp.uint32(offset)), ordered(x, SEED, rate=0.4, offset=offset))


def test_indices_beyond_32_bits_in_one_array(monkeypatch: pytest.MonkeyPatch):
    """The 64-bit index, which an array of 2^32 elements takes, on a small one; and that such an array lowers."""
    x, key, start = jnp.ones((6, 7)), primitive.pair(SEED), primitive.pair(2**32 - 3)
    spec = primitive.DropoutSpec(2**31, 2.0, (0, 1), 3)
    narrow = bind("dropout", x, key, start, spec=spec)
    monkeypatch.setattr(kernel, "BLOCK", 2**32)
    wide = bind("dropout", x, key, start, spec=primitive.DropoutSpec(2**31, 2.0, (0, 1), 3, engine="xla"))
    np.testing.assert_array_equal(wide, narrow)
    huge = jax.ShapeDtypeStruct((2**17, 2**17), jnp.bfloat16)
    assert "ui64" in jax.jit(ft.partial(dnn.dropout, rate=0.5)).lower(huge, primitive.pair(1)).as_text()


@pytest.mark.parametrize("key", [0, 7, 2**64 - 1])
def test_keys(key: int):
    x = inputs((40,), 4)
    words = np.array([key & 0xFFFFFFFF, key >> 32], np.uint32)
    same(dnn.dropout(x, key), ordered(x, words))
    same(dnn.dropout(x, words), ordered(x, key))
    same(jax.jit(dnn.dropout)(x, words), ordered(x, key))
    typed = jax.random.key(key % 2**32)
    same(jax.jit(dnn.dropout)(x, typed), ordered(x, np.asarray(jax.random.key_data(typed))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_does_not_depend_on_the_layout(layout: str):
    x = inputs(LAYOUTS[layout], 5)
    same(dnn.dropout(x, SEED, layout=layout), ordered(x, SEED, layout=layout))
    axes = layout.partition("c")[0]
    plain = x if layout == axes else np.moveaxis(x, -1, 2).reshape(3, 6, 4, 5)
    order = [axes.index(a) for a in "NDHWC" if a in axes]
    logical = plain.transpose(order)
    kept = dnn.dropout_mask(SEED, x.shape, layout=layout)
    kept = kept if layout == axes else np.moveaxis(np.asarray(kept), -1, 2).reshape(3, 6, 4, 5)
    np.testing.assert_array_equal(np.asarray(kept).transpose(order), dnn.dropout_mask(SEED, logical.shape))


# ---- what GPUs do where the four elements of a counter are no neighbours, here on a CPU ------------------------------


@pytest.fixture
def mask_first(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has CPUs do as GPUs; the sizes of what is drawn."""
    drawn: list[int] = []
    philox_ = kernel.philox
    monkeypatch.setattr(kernel, "MASK_FIRST", ("cpu",))
    monkeypatch.setattr(kernel, "philox", lambda c, *key: drawn.append(c[0].size) or philox_(c, *key))
    jax.clear_caches()
    return drawn


@each_dtype
@pytest.mark.parametrize("offset", [0, 8, 2**34 - 8])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [("NCHW", (3, 8, 4, 5)), ("CHWN", (8, 4, 5, 3)), ("NCW", (2, 4, 7)), ("CDHWN", (12, 2, 4, 1, 3))],
)
def test_a_counter_for_four_elements_that_are_apart(
    mask_first: list[int], layout: str, shape: tuple[int, ...], offset: int, dtype: Any
):
    x = inputs(shape, 5, dtype)
    same(
        dnn.dropout(x, SEED, rate=0.4, offset=offset, layout=layout),
        ordered(x, SEED, rate=0.4, offset=offset, layout=layout),
    )
    assert mask_first == [x.size // 4]


@pytest.mark.parametrize(
    ("layout", "shape", "offset"),
    [("NCHW", (2, 6, 3, 5), 0), ("NCHW", (2, 8, 3, 5), 2), ("NCW", (2, 8, 1), 0), ("NHWC", (2, 3, 5, 8), 0)],
)
def test_others_are_drawn_one_by_one(mask_first: list[int], layout: str, shape: tuple[int, ...], offset: int):
    x = inputs(shape, 5)
    same(dnn.dropout(x, SEED, offset=offset, layout=layout), ordered(x, SEED, offset=offset, layout=layout))
    assert mask_first == [x.size]


def test_vmap_of_elements_that_are_apart(mask_first: list[int]):
    x = jnp.asarray(inputs((2, 3, 8, 5), 6))
    keys = jax.random.split(jax.random.key(2), 2)
    op = ft.partial(dnn.dropout, rate=0.4, layout="NCW")
    want = jnp.stack([op(v, k) for v, k in zip(x, keys, strict=True)])
    np.testing.assert_array_equal(jax.vmap(op)(x, keys), want)
    np.testing.assert_array_equal(jax.vmap(op, (0, None))(x, keys[0]), jnp.stack([op(v, keys[0]) for v in x]))
    assert set(mask_first) == {x[0].size // 4}


@pytest.mark.usefixtures("mask_first")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, None, ("a", "b")), P(None, "b", "a")], ids=str)
def test_the_sharding_of_elements_that_are_apart(kind: Any, spec: P):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x = inputs((8, 16, 24), 10)
    there = NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, there)
        compiled: Any = jax.jit(lambda v: dnn.dropout(v, SEED, rate=0.3, layout="NCW")).lower(placed).compile()
        out = compiled(placed)
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    assert out.sharding.is_equivalent_to(there, out.ndim)
    same(out, ordered(x, SEED, rate=0.3, layout="NCW"))


# ---- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8, 8), (1, 15), (3, 2, 11)])
def test_the_mask_does_not_depend_on_the_split_of_a_batch(sizes: tuple[int, ...]):
    x = inputs((16, 3, 5), 6)
    whole, done, parts = dnn.dropout(x, SEED, rate=0.3), 0, []
    for size in sizes:
        parts.append(dnn.dropout(x[done : done + size], SEED, rate=0.3, offset=done * 15))
        done += size
    np.testing.assert_array_equal(jnp.concatenate(parts), whole)


def test_dropped_elements_are_zero_whatever_they_were():
    x = np.full((1000,), np.nan, np.float32)
    x[::2] = -np.inf
    y, mask = dnn.dropout(x, SEED, rate=0.5), dnn.dropout_mask(SEED, x.shape, rate=0.5)
    np.testing.assert_array_equal(y, np.where(mask, x, np.float32(0)))
    assert not np.signbit(np.asarray(y)[~np.asarray(mask)]).any()
    np.testing.assert_array_equal(dnn.dropout(x, SEED, rate=1.0), np.zeros_like(x))


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.97])
def test_rate_and_independence(rate: float):
    """Within five standard deviations: how many are dropped, of all and of every residue class, and of neighbours."""
    n = 1 << 20
    dropped = ~np.asarray(dnn.dropout_mask(SEED, (n,), rate=rate))
    for part in [dropped, *(dropped[i::4] for i in range(4))]:
        assert abs(part.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / part.size)
    for step in (1, 2, 3, 4, 8, 4096):
        both = (dropped[:-step] & dropped[step:]).mean()
        assert abs(both - rate**2) < 5 * np.sqrt(2 * rate**2 * (1 - rate) / n) + 5 * rate**2 / np.sqrt(n)
    other = ~np.asarray(dnn.dropout_mask(SEED + 1, (n,), rate=rate))
    assert abs((dropped & other).mean() - rate**2) < 5 * np.sqrt(rate**2 * (1 - rate**2) / n)


def test_keys_give_other_masks():
    """Keys that differ in one bit, of either word, and a key beside an offset: as far apart as chance has them."""
    n = 1 << 16
    masks = [np.asarray(dnn.dropout_mask(key, (n,))) for key in (0, 1, 2, 2**31, 2**32, 2**63)]
    masks += [np.asarray(dnn.dropout_mask(0, (n,), offset=o)) for o in (4, 8, 2**34)]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs((one == other).mean() - 0.5) < 5 * np.sqrt(0.25 / n)


def test_the_threshold_is_an_exact_comparison():
    """A word equal to rate 2^32 is kept, and one below it is dropped."""
    word = int(random_words(SEED, 100)[37])
    assert dnn.dropout_mask(SEED, (100,), rate=word * 2.0**-32)[37]
    assert not dnn.dropout_mask(SEED, (100,), rate=(word + 1) * 2.0**-32)[37]


# ---- transformations -------------------------------------------------------------------------------------------------


def test_derivatives_are_dropout_again():
    x, t = (jnp.asarray(inputs((6, 10), seed)) for seed in (7, 8))
    op = ft.partial(dnn.dropout, rate=0.3)
    kept = jnp.asarray(reference.dropout_mask(SEED, x.shape, rate=0.3))
    plain = lambda x: jnp.where(kept, x / 0.7, 0)
    for dtype in (jnp.float32, jnp.bfloat16):
        dy = t.astype(dtype)
        f = lambda v: op(v, SEED)
        np.testing.assert_array_equal(jax.vjp(f, x.astype(dtype))[1](dy)[0], f(dy))
        np.testing.assert_array_equal(jax.jvp(f, (x.astype(dtype),), (dy,))[1], f(dy))
        np.testing.assert_array_equal(jax.linear_transpose(f, dy)(dy)[0], f(dy))
    loss = lambda f: lambda x: jnp.sum(jnp.sin(f(x)) ** 2)
    ours, theirs = loss(lambda x: op(x, SEED)), loss(plain)
    for transform in (
        jax.grad,
        jax.hessian,
        lambda f: jax.grad(lambda v: jnp.vdot(jax.grad(f)(v), t)),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda v: jax.jvp(jax.grad(f), (v,), (t,)),
    ):
        found = jax.jit(lambda x, transform=transform: (transform(ours)(x), transform(theirs)(x)))(x)
        for mine, other in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_nothing_of_the_size_of_x_is_kept_for_the_backward_pass():
    x = jnp.ones((64, 64))
    _, pull = jax.vjp(lambda v: dnn.dropout(v, SEED), x)
    assert max((getattr(v, "size", 0) for v in jax.tree.leaves(pull)), default=0) <= 4


def test_vmap():
    x = jnp.asarray(inputs((3, 4, 5), 9))
    keys = jax.random.split(jax.random.key(1), 3)
    op = jax.jit(ft.partial(dnn.dropout, rate=0.4))
    seeded = jax.jit(lambda v, offset: dnn.dropout(v, SEED, rate=0.4, offset=offset))
    for axis in (0, 1, 2):  # over x alone: the same mask for each, as in a loop
        found = jax.vmap(lambda v: seeded(v, 0), axis, axis)(x)
        loop = [seeded(v, 0) for v in jnp.moveaxis(x, axis, 0)]
        np.testing.assert_array_equal(jnp.moveaxis(found, axis, 0), jnp.stack(loop))
    both = jax.vmap(op)(x, keys)
    np.testing.assert_array_equal(both, jnp.stack([op(v, k) for v, k in zip(x, keys, strict=True)]))
    one = jax.vmap(op, (None, 0))(x[0], keys)
    np.testing.assert_array_equal(one, jnp.stack([op(x[0], k) for k in keys]))
    offsets = jax.vmap(ft.partial(seeded, x[0]))(jnp.arange(5))
    np.testing.assert_array_equal(offsets, jnp.stack([seeded(x[0], o) for o in range(5)]))
    nested = jax.vmap(lambda k: jax.vmap(lambda v: op(v, k))(x))(keys)
    np.testing.assert_array_equal(nested, jnp.stack([jnp.stack([op(v, k) for v in x]) for k in keys]))
    gradient = jax.vmap(jax.grad(lambda v, k: jnp.sum(op(v, k) ** 2)))(x, keys)
    np.testing.assert_allclose(gradient, 2 * both / 0.6, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("a"), P("a", None, "b"), P(None, None, ("a", "b")), P(None, "b", "a")], ids=str)
def test_the_mask_does_not_depend_on_the_sharding(kind: Any, spec: P):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x = inputs((8, 4, 16), 10)
    there = NamedSharding(mesh, spec)
    function = lambda v: jax.vjp(lambda v: dnn.dropout(v, SEED, rate=0.3), v)[1](v)[0]
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, there)
        compiled: Any = jax.jit(function).lower(placed).compile()
        out = compiled(placed)
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    assert out.sharding.is_equivalent_to(there, out.ndim)
    same(out, ordered(x, SEED, rate=0.3))


def test_shard_map_with_the_place_of_the_shard_as_offset():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(inputs((16, 5), 11))

    @ft.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def local(shard: jax.Array) -> jax.Array:
        return dnn.dropout(shard, SEED, rate=0.3, offset=jax.lax.axis_index("d") * shard.size)

    same(jax.jit(local)(x), ordered(np.asarray(x), SEED, rate=0.3))
    gradient = jax.grad(lambda v: jnp.sum(local(v)))(x)
    same(gradient, ordered(np.ones_like(x), SEED, rate=0.3))


# ---- the state -------------------------------------------------------------------------------------------------------


def test_state_is_carried_saved_and_restored():
    x = jnp.ones((3, 7))

    def step(state: dnn.DropoutState, _: Any) -> Any:
        return state.advance(x.size), dnn.dropout(x, state, rate=0.3)

    state = dnn.DropoutState.of_seed(SEED)
    final, ys = jax.lax.scan(step, state, None, length=5)
    for i, y in enumerate(ys):
        same(y, ordered(np.ones((3, 7), np.float32), SEED, rate=0.3, offset=24 * i))
    saved = json.loads(json.dumps(final.save()))
    assert saved == {"seed": SEED, "offset": 24 * 5}
    restored = dnn.DropoutState.of_seed(**saved)
    np.testing.assert_array_equal(dnn.dropout(x, restored), dnn.dropout(x, final))
    np.testing.assert_array_equal(dnn.dropout(x, final, offset=5), dnn.dropout(x, SEED, offset=125))


def test_state_counts_in_64_bits():
    state = dnn.DropoutState.of_seed(2**64 - 1, 2**34 - 8)
    for count, total in ((1, 2**34 - 4), (7, 2**34 + 4), (2**40, 2**34 + 4 + 2**40)):
        state = state.advance(count)
        assert state.save() == {"seed": 2**64 - 1, "offset": total}


@pytest.mark.parametrize("fault", ["rounds", "scale", "index"])
def test_verify_finds_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch):
    if fault == "rounds":
        monkeypatch.setattr(kernel, "ROUNDS", 9)
    elif fault == "scale":  # by one part in 2^23
        make = primitive.DropoutSpec
        scaled = lambda **given: make(**{**given, "scale": given["scale"] * (1 + 2.0**-23)})
        monkeypatch.setattr(sys.modules["jaxdnn._src.dropout.api"], "DropoutSpec", scaled)
    else:  # the axes in their own order whatever the layout
        monkeypatch.setattr(sys.modules["jaxdnn._src.dropout.api"], "_order", lambda layout, x: tuple(range(x.ndim)))
    jax.clear_caches()
    found = [matrix.run(c, 0, flush=True) for c in matrix.cases("quick", 0, ops=["dropout"], dtypes=["f32"])]
    failed = [cell for cell in found if cell.status == "failed"]
    assert len(failed) == {"rounds": 3, "scale": 3, "index": 1}[fault]
    assert all(cell.checks for cell in failed)  # by what it computes, and not by raising
    jax.clear_caches()


# ---- levels and errors -----------------------------------------------------------------------------------------------


def test_level():
    found = dnn.explain(ft.partial(dnn.dropout, rate=0.5), np.ones(3, np.float32), primitive.pair(3))
    assert found[0].candidates[0].level == "portable"
    with dnn.determinism("portable"):
        dnn.dropout(np.ones(3, np.float32), 3)


X = np.ones((2, 3, 4, 5), np.float32)
KEY = "`key` must be one jax.random.key of two words .* an integer known when traced or a DropoutState, got an array of"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rate": 1.5}, ValueError, "`rate` must be from 0 to 1, got 1.5"),
        ({"rate": np.nan}, ValueError, "`rate` must be from 0 to 1, got nan"),
        ({"rate": jnp.float32(0.5)}, TypeError, "`rate` must be a number known when traced, got"),
        ({"offset": -1}, ValueError, "`offset` must be from 0 to 2.64 - 1, got -1"),
        ({"offset": 1.0}, TypeError, "`offset` must have one of the dtypes int32, uint32, int64, uint64, got float"),
        ({"offset": jnp.zeros(2, jnp.int32)}, ValueError, "`offset` must have shape .., a number or a scalar array"),
        ({"layout": "NHW"}, ValueError, "`layout`"),
        ({"layout": "NCW"}, ValueError, "`x` must have 3 dimensions for layout NCW, got shape .2, 3, 4, 5."),
        ({"layout": "NCWc4"}, ValueError, "`x` must have 4 channels innermost for layout NCWc4, got shape"),
        ({"engine": "hopper"}, NotImplementedError, "`dropout` on .* cannot be served by engine 'hopper'"),
        ({"determinism": "exact"}, ValueError, "`determinism` must be one of"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.dropout(X, 0, **options)


def test_errors_of_operands():
    with pytest.raises(
        TypeError, match="`x` must have one of the dtypes float32, bfloat16, float16, float64, got int8"
    ):
        dnn.dropout(np.ones(3, np.int8), 0)
    for key, got in ((jnp.zeros(3, jnp.uint32), "uint32 of shape .3,."), (jnp.zeros(2), "float32 of shape .2,.")):
        with pytest.raises(ValueError, match=f"{KEY} {got}"):
            dnn.dropout(X, key)
    with pytest.raises(ValueError, match=f"{KEY} uint32 of shape .4,."):
        dnn.dropout(X, jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"`key` must be from 0 to 2.64 - 1, got -1"):
        dnn.dropout(X, -1)
    with pytest.raises(TypeError, match="`shape` must be a shape, got 3"):
        dnn.dropout_mask(0, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`shape` must have no negative size, got \(-3,\)"):
        dnn.dropout_mask(0, (-3,))
    with pytest.raises(ValueError, match="`offset` must be a multiple of 4, got 3"):
        dnn.DropoutState.of_seed(0, 3)
    with pytest.raises(ValueError, match=r"`seed` must be from 0 to 2.64 - 1, got 18446744073709551616"):
        dnn.DropoutState.of_seed(2**64)


def test_errors_of_states():
    state: Any = dnn.DropoutState(1, 2)  # type: ignore[arg-type]
    message = "of a DropoutState must be two uint32 words, as DropoutState.of_seed makes them, got an array of int32"
    for call in (lambda: dnn.dropout(X, state), state.save, lambda: state.advance(4)):
        with pytest.raises(ValueError, match=f"^`(key|used)` {message} of shape"):
            call()
    # JAX itself makes states of what is no array.
    states = jax.tree.map(lambda *v: jnp.stack(v), *(dnn.DropoutState.of_seed(s) for s in (1, 2)))
    mapped = jax.vmap(lambda s: dnn.dropout(X, s), in_axes=(dnn.DropoutState(0, 0),))(states)  # type: ignore[arg-type]
    same(mapped[1], ordered(X, 2))
    with pytest.raises(ValueError, match=f"{KEY.removesuffix('an array of')}a traced array of int32 of shape"):
        jax.jit(lambda key: dnn.dropout(X, key))(3)


def test_an_offset_of_numpy_keeps_its_64_bits():
    x = np.ones(32, np.float32)
    same(dnn.dropout(x, SEED, offset=np.array(2**40 + 5)), ordered(x, SEED, offset=2**40 + 5))


def test_a_state_at_the_end_of_its_count_round_trips() -> None:
    state = dnn.DropoutState.of_seed(5, 2**64 - 8).advance(16)
    assert state.save() == {"seed": 5, "offset": 8}
    restored = dnn.DropoutState.of_seed(**state.save())
    np.testing.assert_array_equal(restored.used, state.used)


@pytest.mark.parametrize("offset", [2**64 - 8, 2**64 - 7, 2**64 - 1])
@pytest.mark.parametrize("layout", ["NWC", "NCW"])
def test_a_count_begins_anew_behind_its_last_element(mask_first: list[int], layout: str, offset: int):
    """Whether the offset is a number, an array or a state's."""
    x = inputs((2, 8, 12), 4)
    whole = ordered(x, SEED, offset=offset, layout=layout)
    after = np.asarray(reference.dropout_mask(SEED, (x.size,)))
    order = {"NWC": (0, 1, 2), "NCW": (0, 2, 1)}[layout]
    mask = reference.dropout_mask(SEED, x.shape, offset=offset, layout=layout).transpose(order).reshape(-1)
    np.testing.assert_array_equal(mask[2**64 - offset :], after[: x.size - (2**64 - offset)])
    same(dnn.dropout(x, SEED, offset=offset, layout=layout), whole)
    same(dnn.dropout(x, SEED, offset=jnp.int32(offset - 2**64), layout=layout), whole)
    state = dnn.DropoutState.of_seed(SEED, 2**64 - 8)
    same(dnn.dropout(x, state, offset=offset - (2**64 - 8), layout=layout), whole)


def test_offsets_that_are_arrays_of_64_bits_or_negative() -> None:
    x = np.ones(32, np.float32)
    with jax.enable_x64(True):
        for offset in (3, 2**32 - 7, 2**40 + 5):
            same(dnn.dropout(x, SEED, offset=jnp.asarray(offset, jnp.int64)), ordered(x, SEED, offset=offset))
            same(dnn.dropout(x, SEED, offset=jnp.asarray(offset, jnp.uint64)), ordered(x, SEED, offset=offset))
    whole = ordered(x, SEED, offset=2**64 - 8)
    same(dnn.dropout(x, SEED, offset=jnp.asarray(-8, jnp.int32)), whole)
