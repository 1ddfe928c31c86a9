"""Bias, activation, dropout and residual in one op: bits, gradients, transformations, shardings, refusals."""

import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation import bounds
from jaxdnn._src.dropout import cases_fused
from jaxdnn._src.dropout import xla as kernel
from jaxdnn._src.dropout.primitive import DropoutSpec
from jaxdnn.verify import matrix
from jaxdnn_reference.dropout import dropout_dgrad

SEED = 1234567890123
SHAPE = (6, 5, 12)
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
PIECEWISE = (None, "relu", ("leaky_relu", 0.3), ("clipped_relu", 0.7), ("relu", 0.0, 1.5, 0.0))
CURVED = ("gelu", "gelu_tanh", "swish", "tanh", "sigmoid", ("elu", 0.7), "softplus", ("relu", -1.0, 2.0, 0.3))
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def arrays(seed: int, dtype: Any = np.float32, shape: tuple[int, ...] = SHAPE) -> tuple[np.ndarray, ...]:
    """x, bias, residual and dy."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=s).astype(dtype) for s in (shape, shape[-1:], shape, shape))


def same(found: Any, wanted: np.ndarray) -> None:
    """Every bit, but those of NaN."""
    found = np.asarray(found)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    unsigned = np.dtype(f"u{wanted.dtype.itemsize}")
    np.testing.assert_array_equal(found.view(unsigned)[~nan], wanted.view(unsigned)[~nan])


def ordered(x: np.ndarray, key: Any = SEED, **options: Any) -> np.ndarray:
    return reference.dropout(x, key, arithmetic="ordered", **options)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("activation", [*PIECEWISE, *CURVED], ids=str)
@each_dtype
def test_every_bit_is_the_definitions(dtype: str, activation: Any, rate: float):
    """Forward and the gradient in x; of float32 where an activation is of one formula everywhere."""
    if dtype == "f32" and activation not in PIECEWISE:
        pytest.skip("the exponentials of float32 are those of the device")
    x, b, r, dy = arrays(1, DTYPES[dtype])
    options: dict[str, Any] = {"rate": rate, "activation": activation}
    f = lambda x, b, r: dnn.dropout(x, SEED, bias=b, residual=r, **options)
    y, pull = jax.vjp(f, x, b, r)
    same(y, ordered(x, bias=b, residual=r, **options))
    same(dnn.dropout(x, SEED, bias=b, **options), ordered(x, bias=b, **options))
    same(dnn.dropout(x, SEED, residual=r, **options), ordered(x, residual=r, **options))
    dx, db, dr = pull(jnp.asarray(dy))
    wanted, total = dropout_dgrad(dy, x, SEED, bias=b, arithmetic="ordered", **options)
    same(dx, wanted)
    same(dr, dy)
    rows, u = x.size // x.shape[-1], 2.0**-24
    size = np.abs(dropout_dgrad(np.abs(dy), x, SEED, bias=b, arithmetic="ordered", **options)[1]).ravel()
    terms = np.abs(wanted.astype(np.float64)).sum((0, 1)) * (1 + 2.0**-7) + size
    bound = rows * u * terms + (
        0.0 if dtype == "f32" else 2.0 ** (-8 if dtype == "bf16" else -11) * np.abs(total.ravel())
    )
    assert (np.abs(np.asarray(db, np.float64) - total.ravel()) <= bound * 1.01 + 1e-30).all()


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
@each_dtype
def test_every_mix_of_dtypes(dtype: str, other: str, out: str):
    x = arrays(2, DTYPES[dtype])[0]
    _, b, r, _ = arrays(2, DTYPES[other])
    for activation in (None, "relu") if dtype == "f32" else (None, "relu", "gelu"):
        options: dict[str, Any] = {"activation": activation, "out_dtype": DTYPES[out], "rate": 0.3}
        same(dnn.dropout(x, SEED, bias=b, residual=r, **options), ordered(x, bias=b, residual=r, **options))
    dx, db, dr = jax.grad(
        lambda *v: jnp.sum(dnn.dropout(v[0], SEED, bias=v[1], residual=v[2], out_dtype=DTYPES[out]), dtype=np.float32),
        (0, 1, 2),
    )(*map(jnp.asarray, (x, b, r)))
    assert (dx.dtype, db.dtype, dr.dtype) == (x.dtype, b.dtype, r.dtype)


@pytest.mark.parametrize("activation", CURVED, ids=str)
def test_float32_within_the_bound_of_its_activation(activation: Any):
    """A slope's error and its argument's, times the scale, and the roundings of the scale and two products."""
    x, b, _, dy = arrays(3)
    got = jax.vjp(lambda x: dnn.dropout(x, SEED, bias=b, rate=0.1, activation=activation), x)[1](jnp.asarray(dy))[0]
    z, u = x.astype(np.float64) + b, 2.0**-24
    wanted, _ = dropout_dgrad(dy, z, SEED, rate=0.1, activation=activation)
    slope = bounds.slope_error(activation, z) + u * np.abs(z)  # of slope at most 1, these
    bound = 1.01 * (np.abs(dy) * slope / 0.9 + 3 * u * np.abs(wanted)) + 2.0**-120
    assert (np.abs(np.asarray(got, np.float64) - wanted) <= bound).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("activation", PIECEWISE, ids=str)
def test_float64(activation: Any):
    """Others are compared by `jaxdnn verify`, with its bounds."""
    x, b, r, dy = arrays(4, np.float64)
    options: dict[str, Any] = {"rate": 0.3, "activation": activation}
    y, pull = jax.vjp(lambda x, b: dnn.dropout(x, SEED, bias=b, residual=r, **options), x, b)
    same(y, ordered(x, bias=b, residual=r, **options))
    dx, db = pull(jnp.asarray(dy))
    wanted, total = dropout_dgrad(dy, x, SEED, bias=b, arithmetic="ordered", **options)
    same(dx, wanted)
    assert db.dtype == np.float64
    rows = x.size // x.shape[-1]
    assert (np.abs(np.asarray(db) - total.ravel()) <= 2 * rows * 2.0**-53 * np.abs(wanted).sum((0, 1))).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gradients_of_float64_through_a_narrower_result(out_dtype: Any):
    x, b, r, _ = arrays(4, np.float64)
    f = lambda x, b, r: dnn.dropout(x, SEED, rate=0.3, bias=b, residual=r, activation="gelu", out_dtype=out_dtype)
    total = lambda x, b, r: jnp.sum(f(x, b, r).astype(jnp.float32))
    dx, db, dr = jax.grad(total, (0, 1, 2))(x, b, r)
    assert {v.dtype for v in (dx, db, dr)} == {np.dtype(np.float64)}
    assert (dr == 1).all()
    along = jax.jvp(total, (x, b, r), (np.zeros_like(x), np.zeros_like(b), np.ones_like(r)))[1]
    assert float(along) == dr.size


def test_gradient_of_a_shared_bias_under_vmap_is_mesh_invariant():
    """The sum over the examples too is added in an order that does not depend on where they are."""
    x = jax.random.normal(jax.random.key(0), (64, 40, 16))
    f = lambda x, b: dnn.dropout(x, SEED, bias=b, activation="gelu", determinism="mesh_invariant")
    gradient = jax.jit(jax.grad(lambda b, x: jnp.sum(jax.vmap(f, (0, None))(x, b) * x)))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    there = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    same(gradient(jnp.zeros(16), there), np.asarray(gradient(jnp.zeros(16), x)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_in_the_residual_is_not_joined_with_the_operations_around_it(dtype: str):
    """It is dy itself, at a fixed level too: XLA would contract the product before it and the sum after it."""
    x, bias, residual, dy = (jnp.asarray(v, dtype) for v in arrays(0))
    factor, term = jnp.asarray(0.7, dtype), jnp.asarray(0.1, jnp.float32)

    def run(dy: Any, factor: Any, term: Any) -> Any:
        call = lambda r: dnn.dropout(x, SEED, bias=bias, residual=r, activation="gelu", determinism="mesh_invariant")
        return jax.vjp(call, residual)[1](dy * factor)[0].astype(jnp.float32) + term

    same(jax.jit(run)(dy, factor, term), np.asarray(run(dy, factor, term)))


@each_dtype
@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_the_second_derivative_in_x_has_fixed_bits(dtype: str, activation: str):
    """Alone, eager, mapped and among other operations: its factors are rounded, and act'' is a program of its own."""
    x, bias, dy, ct = (jnp.asarray(v) for v in arrays(1, DTYPES[dtype], (64, 5, 12)))
    factor, term = jnp.asarray(0.7, x.dtype), jnp.asarray(0.1, jnp.float32)
    call = ft.partial(dnn.dropout, rate=0.1, activation=activation, determinism="mesh_invariant")

    def second(ct: Any, x: Any, dy: Any) -> Any:
        gradient = lambda x: jax.vjp(lambda x: call(x, SEED, bias=bias), x)[1](dy)[0]
        return jax.vjp(gradient, x)[1](ct)[0]

    def within(factor: Any, term: Any, *operands: Any) -> Any:
        return second(*(v * factor for v in operands)).astype(jnp.float32) + term

    whole = jax.jit(second)(ct, x, dy)
    same(second(ct, x, dy), np.asarray(whole))
    same(jax.jit(within)(factor, term, ct, x, dy), np.asarray(within(factor, term, ct, x, dy)))
    mapped = jax.jit(jax.vmap(second, (0, None, None)))(jnp.stack([ct, dy]), x, dy)
    same(mapped, np.stack([whole, jax.jit(second)(dy, x, dy)]))


@pytest.mark.parametrize("dtype", [*DTYPES, "f64"])
@pytest.mark.parametrize("op", cases_fused.OPS)
def test_cells_of_verify(op: str, dtype: str):
    for case in (c for c in cases_fused.cases(op, "xla", "standard", 0) if c.dtype == dtype):
        found = matrix.run(case, 0, flush=True)
        assert found.status == "passed", (case.id, found.message)


@pytest.mark.parametrize("fault", ["scale", "mask", "bias", "conversion"])
def test_cells_of_verify_find_planted_faults(monkeypatch: pytest.MonkeyPatch, fault: str):
    name, wrong = {
        "scale": ("product", lambda a, b: a),
        "mask": ("_kept", lambda call, shape, key, start: ~kept(call, shape, key, start)),
        "bias": ("_sum", lambda x, bias, wide: x.astype(wide)),
        "conversion": ("nearest", lambda x, dtype: (x * np.float32(1 + 2**-20)).astype(dtype)),
    }[fault]
    kept = kernel._kept
    monkeypatch.setattr(kernel, name, wrong)
    jax.clear_caches()
    cases = [c for c in cases_fused.cases("fused_dropout", "xla", "quick", 0) if c.dtype == "f32"]
    found = [matrix.run(c, 0, flush=True) for c in cases]
    jax.clear_caches()
    assert all(cell.status == "failed" and cell.checks for cell in found)  # by what it computes, and not by raising


LAYOUTS = {
    "NHWC": (3, 4, 5, 6),
    "NCHW": (3, 6, 4, 5),
    "CHWN": (6, 4, 5, 3),
    "NCW": (3, 6, 5),
    "NCHWc2": (3, 3, 4, 5, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bias_follows_the_layout(layout: str):
    x = np.random.default_rng(5).normal(size=LAYOUTS[layout]).astype(np.float32)
    b = np.arange(6, dtype=np.float32)
    options: dict[str, Any] = {"layout": layout, "rate": 0.4, "activation": "relu"}
    same(dnn.dropout(x, SEED, bias=b, **options), ordered(x, bias=b, **options))
    channels = dnn.dropout(x, SEED, bias=b, layout=layout, rate=0.0) - x
    axes = [layout.partition("c")[0].index("C"), *([4] if "c" in layout else [])]
    seen = np.moveaxis(np.asarray(channels), axes, range(len(axes))).reshape(6, -1)
    np.testing.assert_allclose(seen, np.broadcast_to(b[:, None], seen.shape), atol=1e-5)
    db = jax.grad(lambda b: jnp.sum(dnn.dropout(x, SEED, bias=b, layout=layout, rate=0.0)))(jnp.asarray(b))
    np.testing.assert_array_equal(db, np.full(6, x.size // 6))


@pytest.mark.parametrize("shape", [(1, 1, 12), (6, 1, 1), (1, 5, 1), (1, 5, 12), (6, 5, 12), (1, 1, 1)])
def test_a_bias_of_as_many_dimensions(shape: tuple[int, ...]):
    x, _, r, dy = arrays(6)
    b = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    options: dict[str, Any] = {"rate": 0.4, "activation": "relu"}
    y, pull = jax.vjp(lambda b: dnn.dropout(x, SEED, bias=b, residual=r, **options), b)
    same(y, ordered(x, bias=b, residual=r, **options))
    _, total = dropout_dgrad(dy, x, SEED, bias=b, **options)
    np.testing.assert_allclose(pull(jnp.asarray(dy))[0], total, rtol=1e-5, atol=1e-5)


def test_of_one_dimension_and_of_none():
    x = np.arange(5, dtype=np.float32)
    same(dnn.dropout(x, 3, bias=x, residual=x), ordered(x, 3, bias=x, residual=x))
    one = np.full((), 2, np.float32)
    same(dnn.dropout(one, 3, bias=one, rate=0.0), ordered(one, 3, bias=one, rate=0.0))
    with pytest.raises(
        ValueError, match=re.escape("`bias` must have shape (), one element for each channel, or 0 dim")
    ):
        dnn.dropout(one, 3, bias=np.ones(1, np.float32))
    assert dnn.dropout(np.ones((0, 4), np.float32), 3, bias=np.ones(4, np.float32)).shape == (0, 4)


def test_what_is_dropped_does_not_show():
    """NaN and infinity of x or bias where an element is dropped; the residual's are not dropped."""
    x, _, r, dy = arrays(8, shape=(40, 12))
    x[::2], x[1, 3], r[0, :3], r[3, 4] = np.nan, -np.inf, -0.0, np.inf
    for rate in (0.5, 1.0):
        y, pull = jax.vjp(lambda x, rate=rate: dnn.dropout(x, SEED, rate=rate, residual=r, activation="relu"), x)
        same(y, ordered(x, rate=rate, residual=r, activation="relu"))
        kept = np.asarray(dnn.dropout_mask(SEED, x.shape, rate=rate))
        same(np.asarray(y)[~kept], (r + np.float32(0))[~kept])
        assert np.isfinite(np.asarray(pull(jnp.asarray(dy))[0])[~kept]).all()


def test_the_mask_is_that_of_dropout():
    x, b, r, _ = arrays(9)
    kept = dnn.dropout_mask(SEED, SHAPE, rate=0.3, offset=7)
    y = dnn.dropout(x, SEED, rate=0.3, offset=7, bias=b, residual=r, activation="gelu")
    np.testing.assert_array_equal(np.asarray(y)[~np.asarray(kept)], r[~np.asarray(kept)])
    same(dnn.dropout(x, SEED, rate=0.3, activation="identity"), np.asarray(dnn.dropout(x, SEED, rate=0.3)))
    state = dnn.DropoutState.of_seed(SEED, 8)
    same(dnn.dropout(x, state, bias=b), ordered(x, bias=b, offset=8))


# ---- transformations -------------------------------------------------------------------------------------------------


def composed(x: Any, b: Any, r: Any, rate: float, activation: Any) -> Any:
    """The op of ops that JAX differentiates."""
    act = {"gelu": ft.partial(jax.nn.gelu, approximate=False), "swish": jax.nn.silu, None: lambda z: z}[activation]
    kept = jnp.asarray(reference.dropout_mask(SEED, x.shape, rate=rate))
    return r + jnp.where(kept, act(x + b) / (1 - rate), 0)


@pytest.mark.parametrize("activation", [None, "gelu", "swish"])
def test_derivatives_of_any_order(activation: Any):
    (x, b, r, t), rate = (jnp.asarray(v) for v in arrays(10, shape=(4, 6))), 0.3
    ours = lambda *v: dnn.dropout(v[0], SEED, rate=rate, bias=v[1], residual=v[2], activation=activation)
    theirs = lambda x, b, r: composed(x, b[None], r, rate, activation)
    loss = lambda f: lambda *v: jnp.sum(jnp.sin(f(*v)) ** 2)
    twice = lambda f, x, b, r: jnp.sum(jax.lax.scan(lambda carry, _: (f(carry, b, r), None), x, None, 2)[0])
    along = (t, b * 2, r + t)
    every = (0, 1, 2)
    for transform in (
        lambda f: jax.grad(loss(f), every),
        lambda f: lambda *v: jax.jvp(f, v, along),
        lambda f: lambda *v: jax.jvp(jax.grad(loss(f), every), v, along),
        lambda f: jax.grad(
            lambda *v: sum(jnp.vdot(g, a) for g, a in zip(jax.grad(loss(f), every)(*v), along, strict=True)), every
        ),
        lambda f: jax.hessian(loss(f), every),
        lambda f: jax.grad(jax.checkpoint(loss(f)), every),
        lambda f: jax.grad(lambda *v: jnp.vdot(jax.grad(loss(f), 1)(*v), b), 0),
        lambda f: lambda *v: jax.linear_transpose(lambda *w: jax.jvp(f, v, w)[1], *v)(t),
        lambda f: jax.grad(lambda *v: twice(f, *v), every),
    ):
        found = jax.jit(lambda *v, transform=transform: [transform(f)(*v) for f in (ours, theirs)])(x, b, r)
        for a, c in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(a, c, rtol=2e-5, atol=2e-5)


def test_nothing_is_kept_that_the_backward_pass_does_not_need():
    x, b, r, _ = (jnp.asarray(v) for v in arrays(11, shape=(64, 64)))
    _, pull = jax.vjp(lambda *v: dnn.dropout(v[0], SEED, bias=v[1], residual=v[2]), x, b, r)
    assert max((getattr(v, "size", 0) for v in jax.tree.leaves(pull)), default=0) <= 4
    _, pull = jax.vjp(lambda *v: dnn.dropout(v[0], SEED, bias=v[1], residual=v[2], activation="gelu"), x, b, r)
    assert sum(getattr(v, "size", 0) for v in jax.tree.leaves(pull)) <= x.size + b.size + 4


@pytest.mark.parametrize(
    "axes", [(0, None, 0, None), (0, 0, 0, 0), (1, None, 2, 0), (None, 0, None, None), (None, None, 0, 0)]
)
def test_vmap(axes: tuple[int | None, ...]):
    rng = np.random.default_rng(12)
    sizes = ((4, 6), (6,), (4, 6))
    given = [
        jnp.asarray(rng.normal(size=s if a is None else np.insert(s, a, 3)), jnp.float32)
        for s, a in zip(sizes, axes, strict=False)
    ]
    keys = jax.random.split(jax.random.key(1), 3)
    given.append(keys if axes[3] == 0 else keys[0])
    f: Any = jax.jit(lambda x, b, r, k: dnn.dropout(x, k, rate=0.4, bias=b, residual=r, activation="relu"))
    g = jax.jit(lambda *v: jax.grad(lambda *w: jnp.sum(f(*w, v[3]) ** 2), (0, 1, 2))(*v[:3]))
    one = lambda i: [v if a is None else jnp.take(v, i, a) for v, a in zip(given, axes, strict=True)]
    np.testing.assert_array_equal(jax.vmap(f, axes)(*given), jnp.stack([f(*one(i)) for i in range(3)]))
    for found, wanted in zip(jax.vmap(g, axes)(*given), zip(*(g(*one(i)) for i in range(3)), strict=True), strict=True):
        np.testing.assert_allclose(found, jnp.stack(wanted), rtol=1e-6, atol=1e-6)
    shared = (
        jax.grad(lambda b: jnp.sum(jax.vmap(f, (axes[0], None, *axes[2:]))(given[0], b, *given[2:]) ** 2))
        if axes[1] is None
        else None
    )
    if shared is not None:  # the gradient of what all share is their gradients' sum
        wanted = sum(g(*one(i))[1] for i in range(3))
        np.testing.assert_allclose(shared(given[1]), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("a"), P("a", None, "b"), P(None, "b", "a")], ids=str)
def test_the_bits_do_not_depend_on_the_sharding(kind: Any, spec: P):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x, b, r, _ = arrays(13, ml_dtypes.bfloat16, (8, 4, 16))
    there = NamedSharding(mesh, spec)
    f = lambda x, b, r: dnn.dropout(x, SEED, rate=0.3, bias=b, residual=r, activation="gelu")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(v, there) for v in (x, r)]
        compiled: Any = jax.jit(f).lower(placed[0], b, placed[1]).compile()
        out = compiled(placed[0], b, placed[1])
        gradients = jax.jit(lambda *v: jax.vjp(f, *v)[1](v[2]))(placed[0], b, placed[1])
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    assert out.sharding.is_equivalent_to(there, out.ndim)
    same(out, ordered(x, rate=0.3, bias=b, residual=r, activation="gelu"))
    wanted, total = dropout_dgrad(r, x, SEED, rate=0.3, bias=b, activation="gelu", arithmetic="ordered")
    same(gradients[0], wanted)
    np.testing.assert_allclose(np.asarray(gradients[1], np.float32), total.ravel(), rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("layout", [None, "NCW"])
def test_export_with_a_symbolic_batch(layout: str | None):
    (n,) = export.symbolic_shape("n")
    struct = jax.ShapeDtypeStruct((n, 4, 8), jnp.float32)
    x, _, r, _ = arrays(15, shape=(3, 4, 8))
    b = np.arange(8 if layout is None else 4, dtype=np.float32)

    def f(x: Any, r: Any) -> Any:
        y = dnn.dropout(x, SEED, rate=0.3, layout=layout, bias=b, residual=r, activation="relu")
        return y, dnn.dropout(x, SEED, rate=0.3, layout=layout)

    exported = export.export(jax.jit(f), platforms=("cpu", "cuda"))(struct, struct)
    for found, wanted in zip(exported.call(x, r), f(x, r), strict=True):
        same(found, np.asarray(wanted))
    gradient = lambda x, r: jax.grad(lambda x, r: jnp.sum(f(x, r)[0] ** 2), (0, 1))(x, r)
    exported = export.export(jax.jit(gradient))(struct, struct)
    for found, wanted in zip(exported.call(x, r), gradient(x, r), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


# ---- levels and errors -----------------------------------------------------------------------------------------------


def test_the_tangent_of_x_and_residual_is_rounded_whatever_follows():
    """Of a narrow type XLA would leave the rounding of the sum of both shares out."""
    x, r = (jnp.asarray(np.random.default_rng(i).normal(size=(16, 8)), jnp.bfloat16) for i in range(2))

    def tangent(x: Any, r: Any) -> Any:
        run = lambda x, r: dnn.dropout(x, SEED, activation="gelu", residual=r, determinism="batch_invariant")
        return jax.jvp(run, (x, r), (r, x))[1]

    scaled = lambda v: v.astype(np.float32) * 1.3
    np.testing.assert_array_equal(jax.jit(lambda *v: scaled(tangent(*v)))(x, r), scaled(jax.jit(tangent)(x, r)))


def test_levels():
    x, b, r, _ = arrays(14, ml_dtypes.bfloat16)
    op = lambda x, **options: dnn.dropout(x, SEED, bias=b, residual=r, **options)
    (found,) = dnn.explain(lambda x: op(x, activation="gelu"), x)
    assert (found.op, found.candidates[0].level, found.candidates[0].accumulation) == (
        "dropout",
        "portable",
        "float32",
    )
    wide = x.astype(np.float32)
    assert dnn.explain(lambda x: op(x, activation="gelu"), wide)[0].candidates[0].level == "mesh_invariant"
    assert dnn.explain(lambda x: op(x, activation="relu"), wide)[0].candidates[0].level == "portable"
    with pytest.raises(NotImplementedError, match="xla: it guarantees 'mesh_invariant' here, not 'portable'"):
        op(wide, activation="gelu", determinism="portable")
    grad = lambda level: jax.grad(lambda b: jnp.sum(dnn.dropout(wide, SEED, bias=b, determinism=level)))
    bias = jnp.asarray(b.astype(np.float32))
    assert dnn.explain(grad("run_to_run"), bias)[-1].candidates[0].level == "run_to_run"
    np.testing.assert_allclose(grad("mesh_invariant")(bias), grad(None)(bias), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="it guarantees 'mesh_invariant' here, not 'portable'"):
        grad("portable")(bias)


X = np.ones((2, 3, 4), np.float32)
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "bias too short": (
        {"bias": np.ones(3, np.float32)},
        ValueError,
        "`bias` must have shape (4,), one element for each channel, or 3 dimensions that are 1 or those of x "
        "(2, 3, 4), got (3,).",
    ),
    "bias of fewer dimensions": ({"bias": np.ones((3, 4), np.float32)}, ValueError, "`bias` must have shape (4,)"),
    "bias larger than x": ({"bias": np.ones((2, 3, 8), np.float32)}, ValueError, "`bias` must have shape (4,)"),
    "scalar bias": ({"bias": 1.0}, ValueError, "or 3 dimensions that are 1 or those of x (2, 3, 4), got ()."),
    "bias of integers": ({"bias": np.ones(4, np.int32)}, TypeError, "`bias` must have one of the dtypes float32"),
    "bias no array": ({"bias": "yes"}, TypeError, "`bias` must be an array"),
    "bias along another channel": (
        {"bias": np.ones(4, np.float32), "layout": "NCW"},
        ValueError,
        "`bias` must have shape (3,), one element for each channel",
    ),
    "residual of another shape": (
        {"residual": np.ones((2, 3, 1), np.float32)},
        ValueError,
        "`residual` must have shape (2, 3, 4), that of x, got (2, 3, 1).",
    ),
    "residual of integers": (
        {"residual": np.ones(X.shape, np.int8)},
        TypeError,
        "`residual` must have one of the dtypes",
    ),
    "unknown activation": ({"activation": "gelu2"}, ValueError, "`activation` must be None, one of 'identity', 'relu'"),
    "activation out of range": ({"activation": ("leaky_relu", 2.0)}, ValueError, "needs a slope from 0 to 1, got 2.0"),
    "result of integers": ({"out_dtype": np.int32}, TypeError, "`out_dtype` must have one of the dtypes float32"),
    "result too wide": (
        {"out_dtype": np.float64},
        TypeError,
        "`out_dtype` must not be wider than the accumulator float32",
    ),
    "rate out of range": (
        {"bias": np.ones(4, np.float32), "rate": 1.5},
        ValueError,
        "`rate` must be from 0 to 1, got 1.5",
    ),
    "unknown engine": ({"activation": "relu", "engine": "fast"}, ValueError, "`engine` must be one of"),
    "engine of another device": (
        {"activation": "relu", "engine": "ordered"},
        NotImplementedError,
        "`dropout` on cpu cannot be served by engine 'ordered'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str):
    options, kind, message = ERRORS[name]
    with pytest.raises(kind, match=re.escape(message)):
        dnn.dropout(X, SEED, **options)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["bias", "residual"])
def test_float64_beside_a_narrower_x(name: str):
    options: dict[str, Any] = {name: np.ones(4 if name == "bias" else X.shape)}
    with pytest.raises(TypeError, match=f"`{name}` must not be float64 unless x is, got x of float32"):
        dnn.dropout(X, SEED, **options)


def test_a_traced_rate_is_refused():
    with pytest.raises(TypeError, match="`rate` must be a number known when traced, got a traced array"):
        jax.jit(lambda p: dnn.dropout(X, SEED, rate=p, residual=X))(0.1)


def test_a_spec_names_its_own_dropout():
    """What differentiates twice draws by the op that the first derivative draws by."""
    common: dict[str, Any] = dict(
        threshold=7, scale=2.0, order=(0, 1), shift=None, leading=1, level="portable", start=3
    )
    spec = DropoutSpec(**common, bias=True, activation="gelu", out_dtype=np.dtype(np.float32))
    assert not spec.is_alone
    assert spec.alone() == DropoutSpec(**common)
    assert spec.alone().is_alone
