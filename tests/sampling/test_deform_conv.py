"""Deformable convolution: the definition's bits, a loop over windows, derivatives, masks of 0, NaN, errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

import jaxdnn as dnn
import jaxdnn_reference as reference

CALLS: dict[str, dict[str, Any]] = {
    "plain": {"many": 1},
    "second": {"many": 2, "masked": True, "stride": 2, "padding": 1},
    "groups": {"many": 4, "masked": True, "groups": 2, "dilation": 2, "padding": ((2, 1), (2, 2)), "layout": "NCHW"},
    "depthwise": {"many": 1, "masked": True, "groups": 4, "padding": "SAME", "activation": "relu"},
}


def data(name: str, dtype: Any = np.float32) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """x, offsets, w and what else there is, (bias and) a mask last; and the options."""
    rng, given = np.random.default_rng(0), dict(CALLS[name])
    many, masked, layout = given.pop("many"), given.pop("masked", False), given.get("layout", "NHWC")
    x, w = rng.normal(size=(2, 6, 5, 4)), rng.normal(size=(3, 2, 4 // given.get("groups", 1), 8))
    plain = {k: v for k, v in given.items() if k not in ("layout", "activation")}
    p, q = jax.eval_shape(lambda: dnn.conv(jnp.asarray(x), jnp.asarray(w), **plain)).shape[1:3]
    offsets, mask = 1.5 * rng.normal(size=(2, p, q, many * 12)), rng.uniform(size=(2, p, q, many * 6))
    arrays = [x, offsets, w, *([mask] if masked else [])]
    if layout == "NCHW":
        arrays = [np.transpose(v, (3, 2, 0, 1)) if i == 2 else np.moveaxis(v, -1, 1) for i, v in enumerate(arrays)]
    return tuple(np.ascontiguousarray(v).astype(dtype) for v in arrays), given


def call(op: Any, given: dict[str, Any], **more: Any) -> Any:
    return lambda x, offsets, w, mask=None: op(x, offsets, w, mask=mask, **given, **more)


@pytest.mark.parametrize("name", list(CALLS))
def test_bits_are_the_definitions(name: str):
    arrays, given = data(name)
    y = jax.jit(call(dnn.deform_conv, given, determinism="portable"))(*arrays)
    np.testing.assert_array_equal(y, call(reference.deform_conv, given, arithmetic="ordered")(*arrays))
    golden = np.asarray(call(reference.deform_conv, given)(*arrays), np.float64)
    np.testing.assert_allclose(y, golden, atol=2e-5)
    np.testing.assert_allclose(jax.jit(call(dnn.deform_conv, given))(*arrays), golden, atol=2e-5)


@pytest.mark.parametrize("name", ["second", "groups"])
def test_values_are_a_loops_over_windows(name: str):
    """With SciPy's interpolation, of which "grid-constant" has zeros outside."""
    (x, offsets, w, mask), given = data(name, np.float64)
    y = np.asarray(
        dnn.deform_conv(*(v.astype(np.float32) for v in (x, offsets, w)), mask=mask.astype(np.float32), **given)
    )
    if given.get("layout") == "NCHW":
        x, offsets, mask, y = (np.moveaxis(v, 1, -1) for v in (x, offsets, mask, y))
        w = np.transpose(w, (2, 3, 1, 0))
    many, groups = CALLS[name]["many"], given.get("groups", 1)
    u, e, low = given.get("stride", 1), given.get("dilation", 1), 2 if name == "groups" else 1
    for n, p, q in np.ndindex(*y.shape[:3]):
        wanted = np.zeros(8)
        for r, s, c in np.ndindex(3, 2, 4):
            tap = (c * many // 4) * 6 + r * 2 + s
            place = np.array([p * u + r * e - low, q * u + s * e - low]) + offsets[n, p, q, 2 * tap : 2 * tap + 2]
            value = scipy.ndimage.map_coordinates(x[n, ..., c], place[:, None], order=1, mode="grid-constant")[0]
            group = c // (4 // groups)
            out = slice(group * 8 // groups, (group + 1) * 8 // groups)
            wanted[out] += mask[n, p, q, tap] * value * w[r, s, c % (4 // groups), out]
        np.testing.assert_allclose(y[n, p, q], wanted, atol=2e-5)


@pytest.mark.parametrize("name", list(CALLS))
def test_without_offsets_it_is_the_convolution(name: str):
    (x, offsets, w, *_), given = data(name)
    y = dnn.deform_conv(x, 0 * offsets, w, determinism="portable", **given)
    np.testing.assert_array_equal(y, dnn.conv(x, w, determinism="portable", **given))


@pytest.mark.usefixtures("x64")
def test_derivatives_are_the_definitions_differences():
    arrays, given = data("second", np.float64)
    rng, h = np.random.default_rng(1), 2.0**-20
    ours, theirs = call(dnn.deform_conv, given), call(reference.deform_conv, given)
    along = tuple(rng.normal(size=v.shape) for v in arrays)
    dy = rng.normal(size=theirs(*arrays).shape)
    back = jax.jit(lambda *v: jax.vjp(ours, *v)[1](jnp.asarray(dy)))
    gradients, total = back(*arrays), 0.0
    for i, (gradient, direction) in enumerate(zip(gradients, along, strict=True)):
        up, down = ([v + s * direction if i == j else v for j, v in enumerate(arrays)] for s in (h, -h))
        slope = (theirs(*up) - theirs(*down)) / (2 * h)
        total = total + slope
        np.testing.assert_allclose(np.vdot(gradient, direction), np.vdot(dy, slope).astype(float), atol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda *v: jax.jvp(ours, v, along)[1])(*arrays), np.float64(total), atol=1e-5)
    second = jax.jit(lambda *v: jax.jvp(back, v, along)[1])(*arrays)
    ends = (back(*(v + s * direction for v, direction in zip(arrays, along, strict=True))) for s in (h, -h))
    for found, up, down in zip(second, *ends, strict=True):
        np.testing.assert_allclose(found, (up - down) / (2 * h), atol=1e-4)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["second", "groups"])
def test_values_and_gradients_are_those_of_hat_functions(name: str):
    """Of each tap a sum over all pixels, weighted by max(0, 1 - distance) along both axes, which JAX differentiates."""
    arrays, given = data(name, np.float64)
    last = "layout" not in given
    many, groups = CALLS[name]["many"], given.get("groups", 1)
    u, e, low = given.get("stride", 1), given.get("dilation", 1), 2 if name == "groups" else 1

    def theirs(x: Any, offsets: Any, w: Any, mask: Any) -> Any:
        if not last:
            x, offsets, mask = (jnp.moveaxis(v, 1, -1) for v in (x, offsets, mask))
            w = jnp.transpose(w, (2, 3, 1, 0))
        n, rows, columns, _ = offsets.shape
        places, shares = offsets.reshape(n, rows, columns, many, 3, 2, 2), mask.reshape(n, rows, columns, many, 3, 2)
        hats = []
        for axis, size in enumerate(x.shape[1:3]):
            p, q, r, t = np.indices((rows, columns, 3, 2))
            regular = (p * u + r * e if axis == 0 else q * u + t * e) - float(low)
            at = places[..., axis] + regular[None, :, :, None]
            distance = at[..., None] - np.arange(float(size)).reshape(*[1] * 6, -1)
            hats.append(jnp.maximum(1 - jnp.abs(distance), 0))
        images = x.reshape(*x.shape[:3], many, 4 // many)
        taps = jnp.einsum("npqmrs,npqmrsi,npqmrsj,nijmc->npqrsmc", shares, *hats, images)
        taps = taps.reshape(n, rows, columns, 3, 2, groups, 4 // groups)
        y = jnp.einsum("npqrsgc,rscgk->npqgk", taps, w.reshape(3, 2, 4 // groups, groups, 8 // groups))
        y = y.reshape(n, rows, columns, 8)
        return y if last else jnp.moveaxis(y, -1, 1)

    def both(f: Any) -> Any:
        def run(*arrays: Any) -> Any:
            y, pull = jax.vjp(f, *arrays)
            return y, pull(jnp.cos(jnp.arange(float(y.size))).reshape(y.shape))

        return jax.jit(run)(*arrays)

    for found, wanted in zip(*map(jax.tree.leaves, map(both, (call(dnn.deform_conv, given), theirs))), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-11)


def test_gradients_do_not_scatter_and_do_not_depend_on_the_batch():
    arrays, given = data("second")
    with dnn.determinism("batch_invariant"):
        loss = lambda x, offsets, w, mask: jnp.sum(dnn.deform_conv(x, offsets, w, mask=mask, **given) ** 2)
        back = jax.jit(jax.grad(loss, (0, 1, 3)))
        assert "stablehlo.scatter" not in back.lower(*arrays).as_text()
        x, offsets, w, mask = arrays
        for whole, one in zip(back(*arrays), back(x[1:], offsets[1:], w, mask[1:]), strict=True):
            np.testing.assert_array_equal(whole[1:], one)


def test_one_and_three_axes():
    rng = np.random.default_rng(2)
    for d in (1, 3):
        x = rng.normal(size=(1, *(4, 3, 5)[:d], 2)).astype(np.float32)
        w = rng.normal(size=(*(2, 1, 2)[:d], 2, 3)).astype(np.float32)
        out = tuple(n - r + 1 for n, r in zip((4, 3, 5), (2, 1, 2), strict=True))[:d]
        offsets = rng.normal(size=(1, *out, d * 2 ** (1 + d // 3))).astype(np.float32)
        given: Any = {"layout": "N" + "DHW"[3 - d :] + "C"}
        y = dnn.deform_conv(x, offsets, w, **given, determinism="portable")
        np.testing.assert_array_equal(y, reference.deform_conv(x, offsets, w, **given, arithmetic="ordered"))


def test_what_is_behind_a_mask_of_0_is_not_read_and_nan_offsets():
    x = jnp.arange(1.0, 6.0).reshape(1, 5, 1).at[0, 2].set(jnp.nan)
    offsets, w, mask = jnp.zeros((1, 5, 1)), jnp.full((1, 1, 1), 2.0), jnp.ones((1, 5, 1)).at[0, 2].set(0)
    run = lambda x, offsets: dnn.deform_conv(x, offsets, w, mask=mask, layout="NWC")[0, :, 0]
    np.testing.assert_array_equal(run(x, offsets), [2, 4, 0, 8, 10])
    nowhere = offsets.at[0, 3].set(jnp.nan).at[0, 4].set(jnp.inf)
    np.testing.assert_array_equal(run(x, nowhere), [2, 4, 0, np.nan, 0])
    dx = jax.grad(lambda x: jnp.sum(run(x, nowhere)))(x)
    np.testing.assert_array_equal(dx[0, :, 0], [2, 2, 0, 0, 0])


def test_vmap_and_narrow_types():
    arrays, given = data("second")
    run = call(dnn.deform_conv, given)
    x, offsets, w, mask = arrays
    y = run(*arrays)
    found = jax.vmap(run, (0, 0, None, 0))(x[:, None], offsets[:, None], w, mask[:, None])
    np.testing.assert_allclose(found[:, 0], y, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(run, (None, None, 0, None))(x, offsets, w[None], mask)[0], y, atol=1e-5)
    narrow = (jnp.asarray(x, jnp.bfloat16), offsets, jnp.asarray(w, jnp.bfloat16), mask)
    assert run(*narrow).dtype == jnp.bfloat16
    np.testing.assert_allclose(run(*narrow).astype(jnp.float32), y, atol=0.3)


X, W = np.ones((2, 6, 5, 4), np.float32), np.ones((3, 2, 4, 8), np.float32)
OFFSETS, MASK = np.zeros((2, 4, 4, 12), np.float32), np.ones((2, 4, 4, 6), np.float32)


@pytest.mark.parametrize(
    ("offsets", "options", "error", "text"),
    [
        (OFFSETS[..., :11], {}, ValueError, r"`offsets` must have the sizes of the result, .4, 4., and D times 12"),
        (OFFSETS[:, :3], {}, ValueError, "2 for each of 6 taps in layout NHWC, got shape .2, 3, 4, 12."),
        (OFFSETS[0], {}, ValueError, "`offsets` must have 4 dimensions"),
        (OFFSETS.astype(int), {}, TypeError, "`offsets` must have one of the dtypes float32"),
        (np.zeros((2, 4, 4, 36), np.float32), {}, ValueError, "`offsets` must be those of groups that divide the 4"),
        (OFFSETS, {"mask": MASK[..., :5]}, ValueError, "`mask` must have the sizes of the result, .* 1 times 6 ch"),
        (OFFSETS, {"layout": "NCHWc4"}, ValueError, "`layout` must be one without vectors of channels, got 'NCHWc4'"),
        (OFFSETS, {"groups": 3}, ValueError, "`groups`"),
        (OFFSETS, {"dilation": 9}, ValueError, "`w` must fit into the padded `x`"),
        (OFFSETS, {"engine": "none"}, ValueError, "`engine`"),
    ],
)  # fmt: skip
def test_errors(offsets: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.deform_conv(X, offsets, W, **options)
