"""Sampling at the points of a grid: the definition's bits, other libraries' values, ties, derivatives, errors."""

import functools as ft
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

import jaxdnn as dnn
import jaxdnn_reference as reference

MODES, PADDINGS = ("nearest", "linear", "cubic"), ("zeros", "border", "reflection")
LAYOUTS = {1: "NWC", 2: "NCHW", 3: "NDHWC"}


def data(rank: int, seed: int = 0, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Images, channels last, and points of which many are outside."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, *(5, 4, 3)[:rank], 3))
    grid = rng.uniform(-2.5, 2.5, (2, *(3, 4, 2)[:rank], rank))
    return x.astype(dtype), grid.astype(dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_bits_are_the_definitions(rank: int, mode: str):
    x, grid = data(rank)
    x = np.moveaxis(x, -1, 1) if rank == 2 else x
    meanings = ((False, "normalised", "xy"), (True, "normalised", "ij"), (False, "pixel", "xy"))
    options: list[dict[str, Any]] = [
        {"mode": mode, "padding": p, "align_corners": a, "coordinates": c, "order": o, "layout": LAYOUTS[rank]}
        for p, (a, c, o) in zip(PADDINGS, meanings[rank % 3 :] + meanings[: rank % 3], strict=True)
    ]
    found = jax.jit(lambda x, grid: [dnn.grid_sample(x, grid, **o) for o in options])(x, grid)
    for y, o in zip(found, options, strict=True):
        np.testing.assert_array_equal(y, reference.grid_sample(x, grid, arithmetic="ordered", **o), err_msg=str(o))
        if mode != "nearest":  # which a rounded coordinate may change
            np.testing.assert_allclose(y, reference.grid_sample(x, grid, **o), atol=2e-5, err_msg=str(o))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_values_are_scipys(rank: int):
    x, _ = data(rank)
    points = np.random.default_rng(1).uniform(-4, 8, (2, *(3, 4, 2)[:rank], rank)).astype(np.float32)
    for mode, (padding, align, theirs) in itertools.product(
        (0, 1),
        [
            ("zeros", 0, "grid-constant"),
            ("border", 0, "nearest"),
            ("reflection", 1, "mirror"),
            ("reflection", 0, "reflect"),
        ],
    ):
        y = dnn.grid_sample(x, points, mode=MODES[mode], padding=padding, align_corners=bool(align),
                            coordinates="pixel", order="ij", layout=f"N{'DHW'[3 - rank :]}C")  # fmt: skip
        for n, c in itertools.product(range(2), range(3)):
            at = np.moveaxis(points[n].astype(np.float64), -1, 0)
            wanted = scipy.ndimage.map_coordinates(x[n, ..., c].astype(np.float64), at, order=mode, mode=theirs)
            np.testing.assert_allclose(y[n, ..., c], wanted, atol=1e-5, err_msg=f"{mode} {padding} {align}")


def test_cubic_at_the_places_of_a_resampling():
    x = data(2)[0]
    to = np.stack(np.meshgrid((2 * np.arange(9) + 1) / 9 - 1, (2 * np.arange(7) + 1) / 7 - 1), -1)[None]
    for padding, boundary in (("border", "edge"), ("zeros", "zero")):
        y = dnn.grid_sample(x, to.astype(np.float32), mode="cubic", padding=padding)
        wanted = reference.resample(x, output_sizes=(7, 9), method="cubic", boundary=boundary)
        np.testing.assert_allclose(y, wanted, atol=1e-5)


def test_onnx_example():
    """The first example of ONNX's GridSample, by its documentation."""
    line = np.array([-1, -0.6, -0.2, 0.2, 0.6, 1], np.float32)
    grid = np.stack(np.meshgrid(line, line), -1)[None]
    y = dnn.grid_sample(np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4), grid, layout="NCHW")[0, 0]
    wanted = [
        [0.0, 0.15, 0.55, 0.95, 1.35, 0.75],
        [0.6, 1.5, 2.3, 3.1, 3.9, 2.1],
        [2.2, 4.7, 5.5, 6.3, 7.1, 3.7],
        [3.8, 7.9, 8.7, 9.5, 10.3, 5.3],
        [5.4, 11.1, 11.9, 12.7, 13.5, 6.9],
        [3.0, 6.15, 6.55, 6.95, 7.35, 3.75],
    ]
    np.testing.assert_allclose(y, wanted, atol=1e-5)


LINE = jnp.arange(1.0, 5.0).reshape(1, 4, 1)


def on_line(p: Any, **options: Any) -> jax.Array:
    """1, 2, 3, 4 at places in pixels."""
    p = jnp.asarray(p, jnp.float32).reshape(1, -1, 1)
    return dnn.grid_sample(LINE, p, coordinates="pixel", layout="NWC", **options)[0, :, 0]


def test_places_that_are_far_out_or_none():
    places = [1e30, -1e30, np.inf, -np.inf, np.nan]
    for mode in MODES:
        np.testing.assert_array_equal(on_line(places, mode=mode), [0, 0, 0, 0, np.nan])
        np.testing.assert_array_equal(on_line(places, mode=mode, padding="border"), [4, 1, 4, 1, np.nan])
        far = on_line(places, mode=mode, padding="reflection")
        assert np.isfinite(far[:2]).all(), mode
        assert np.isnan(far[2:]).all(), mode
    np.testing.assert_array_equal(on_line([0.5, 1.5, 2.5, -0.5], mode="nearest"), [1, 3, 3, 1])  # half to even
    whole = jnp.asarray(LINE, jnp.uint8)
    y = dnn.grid_sample(whole, jnp.array([[[0.5], [1.75], [np.nan]]]), coordinates="pixel", layout="NWC")
    assert y.dtype == jnp.uint8
    np.testing.assert_array_equal(y[0, :, 0], [2, 3, 0])  # 1.5 and 2.75, rounded to even
    one = dnn.grid_sample(
        LINE[:, :1], jnp.array([[[7.5], [-3.0]]]), padding="reflection", align_corners=True, layout="NWC"
    )
    np.testing.assert_array_equal(one[0, :, 0], [1, 1])


def test_a_pixel_of_weight_0_is_not_read():
    x = LINE.at[0, 2, 0].set(np.nan)
    at = jnp.array([1.0, 3.0]).reshape(1, 2, 1)
    for mode in ("linear", "cubic"):
        y = dnn.grid_sample(x, at, mode=mode, coordinates="pixel", layout="NWC")
        np.testing.assert_array_equal(y[0, :, 0], [2, 4])
    dx = jax.grad(
        lambda x: jnp.sum(dnn.grid_sample(x, at, coordinates="pixel", layout="NWC") * jnp.array([[[np.inf], [1.0]]]))
    )(x)
    np.testing.assert_array_equal(dx[0, :, 0], [0, np.inf, 0, 1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_grid_is_read_as_the_numbers_it_has(dtype: Any):
    """Also where JAX is told to promote no dtype."""
    x, grid = data(2)
    narrow = grid.astype(dtype)
    for images in (x, x.astype(dtype)):
        found = dnn.grid_sample(images, narrow)
        np.testing.assert_array_equal(found, dnn.grid_sample(images, narrow.astype(np.float32)))


def test_one_grid_for_all_images_and_narrow_types():
    x, grid = data(2)
    both = dnn.grid_sample(x, np.broadcast_to(grid[:1], grid.shape))
    np.testing.assert_array_equal(dnn.grid_sample(x, grid[:1]), both)
    narrow = jnp.asarray(x, jnp.bfloat16)
    y = dnn.grid_sample(narrow, grid)
    np.testing.assert_array_equal(y, dnn.grid_sample(narrow.astype(jnp.float32), grid).astype(jnp.bfloat16))
    summed = jax.grad(lambda g: jnp.sum(dnn.grid_sample(x, g, determinism="mesh_invariant") ** 2))(grid[:1])
    each = jax.grad(lambda g: jnp.sum(dnn.grid_sample(x, g) ** 2))(np.broadcast_to(grid[:1], grid.shape))
    np.testing.assert_allclose(summed, each.sum(0, keepdims=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("mode", MODES)
def test_whole_numbers_are_rounded_and_limited(mode: str, dtype: Any):
    """To even ones at ties; "cubic" leaves the range at edges between the least and the largest number."""
    rng, limits = np.random.default_rng(7), np.iinfo(dtype)
    for rank in (1, 2, 3):
        x = rng.choice([limits.min, limits.min + 3, limits.max], (2, *(6, 5, 4)[:rank], 2)).astype(dtype)
        p = rng.integers(-4, 14, (2, *(4, 3, 5)[:rank], rank)) / 2  # halves of which many are ties
        wide = np.asarray(reference.grid_sample(x.astype(np.float64), p, mode=mode, coordinates="pixel",
                                                padding="border", layout=f"N{'DHW'[3 - rank :]}C"))  # fmt: skip
        y = dnn.grid_sample(x, p.astype(np.float32), mode=mode, coordinates="pixel", padding="border",
                            layout=f"N{'DHW'[3 - rank :]}C")  # fmt: skip
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, np.clip(np.rint(wide), limits.min, limits.max))
        beyond = (wide < limits.min) | (wide > limits.max)
        assert beyond.any() == (mode == "cubic")


def kernel(mode: str, at: Any) -> Any:
    """The weight of a pixel at a distance."""
    at = jnp.abs(at)
    if mode == "linear":
        return jnp.maximum(1 - at, 0)
    near, far = (1.25 * at - 2.25) * at**2 + 1, -0.75 * (((at - 5) * at + 8) * at - 4)
    return jnp.where(at < 1, near, jnp.where(at < 2, far, 0))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("padding", [*PADDINGS, "reflection about centres"])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_values_and_gradients_are_those_of_a_padded_image(mode: str, padding: str):
    """Weights are those of a kernel about the point, over all pixels of an image that NumPy has padded."""
    rng, pad = np.random.default_rng(8), 12
    x, p = rng.normal(size=(2, 5, 6, 3)), rng.uniform(-7, 12, (2, 4, 5, 2))
    p, dy = np.clip(p, -7.9, 11.9), rng.normal(size=(2, 4, 5, 3))
    how: Any = {"zeros": "constant", "border": "edge", "reflection": "symmetric"}.get(padding, "reflect")

    def theirs(x: Any, p: Any) -> Any:
        padded = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode=how)
        by_axis = [
            kernel(mode, p[..., i, None] + pad - np.arange(n + 2.0 * pad).reshape(1, 1, 1, -1))
            for i, n in enumerate((5, 6))
        ]
        return jnp.einsum("nabi,nabj,nijc->nabc", *by_axis, padded)

    def ours(x: Any, p: Any) -> Any:
        return dnn.grid_sample(x, p, mode=mode, padding=padding.split()[0], align_corners="centres" in padding,
                               coordinates="pixel", order="ij")  # fmt: skip

    both = [jax.jit(lambda x, p, f=f: (f(x, p), jax.vjp(f, x, p)[1](jnp.asarray(dy))))(x, p) for f in (ours, theirs)]
    for found, wanted in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-11)


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", MODES)
def test_derivatives_are_the_definitions_differences(mode: str):
    """First in x and in grid, then of the gradient along a direction, in float64."""
    x, grid = data(2, 3, np.float64)
    grid = grid[:, :, :2]
    rng = np.random.default_rng(4)
    dx, dgrid, dy = rng.normal(size=x.shape), rng.normal(size=grid.shape), rng.normal(size=(*grid.shape[:-1], 3))
    h = 2.0**-18
    aligned = (False, True, True) if mode == "linear" else (True, False, False)
    for padding, align in zip(PADDINGS, aligned, strict=True):
        options = {"mode": mode, "padding": padding, "align_corners": align}
        ours = ft.partial(dnn.grid_sample, **options)
        theirs = lambda s, t, o=options: reference.grid_sample(x + s * dx, grid + t * dgrid, **o)
        back = jax.jit(lambda x, grid, f=ours: jax.vjp(f, x, grid)[1](jnp.asarray(dy)))
        both = jax.jit(
            lambda x, grid, f=ours, b=back: (jax.jvp(f, (x, grid), (dx, dgrid)), jax.jvp(b, (x, grid), (dx, dgrid)))
        )
        (_, along), (first, second) = both(x, grid)
        in_x, in_grid = theirs(1, 0) - theirs(0, 0), (theirs(0, h) - theirs(0, -h)) / (2 * h)
        np.testing.assert_allclose(along, in_x + in_grid, atol=1e-7, err_msg=str(options))
        np.testing.assert_allclose(np.vdot(first[0], dx), np.vdot(dy, in_x), atol=1e-8, err_msg=str(options))
        np.testing.assert_allclose(np.vdot(first[1], dgrid), np.vdot(dy, in_grid), atol=1e-6, err_msg=str(options))
        for found, up, down in zip(second, *(back(x + s * dx, grid + s * dgrid) for s in (h, -h)), strict=True):
            np.testing.assert_allclose(found, (up - down) / (2 * h), atol=2e-6, err_msg=str(options))


def test_slopes_at_ties():
    slope = lambda p, **o: jax.vmap(jax.grad(lambda v: on_line(v, **o)[0]))(jnp.asarray(p, jnp.float32)).tolist()
    assert slope([1.0, 3.0, -1.0, 0.0]) == [1, -4, 1, 1]
    assert slope([-1.0, 0.0, 0.5, 3.0, 4.0], padding="border") == [0, 0, 1, 0, 0]
    assert slope([-0.5, 0.0, 0.5, 3.0, 3.5], padding="reflection", align_corners=True) == [-1, 0, 1, 0, -1]
    assert slope([0.5, 1.0, 2.2], mode="nearest") == [0, 0, 0]


def test_mixed_second_derivative_of_bilinear_weights():
    x = jnp.array([[1.0, 2.0], [4.0, 9.0]]).reshape(1, 2, 2, 1)
    at = lambda g: dnn.grid_sample(x, g.reshape(1, 1, 1, 2), coordinates="pixel")[0, 0, 0, 0]
    np.testing.assert_allclose(jax.hessian(at)(jnp.array([0.25, 0.5])), [[0, 4], [4, 0]])


def test_the_gradient_of_points_in_one_place_is_their_sum():
    """Of whole numbers exactly, in repeats with the same bits, whatever other images are in the batch."""
    rng = np.random.default_rng(5)
    x, dy = np.zeros((2, 4, 3, 5), np.float32), rng.integers(-9, 9, (2, 50, 20, 5)).astype(np.float32)
    grid = np.tile(np.array([1.0, 2.0], np.float32), (2, 50, 20, 1))
    grid[1] = rng.integers(-1, 4, (50, 20, 2))
    dx = jax.jit(lambda x, g, dy: jax.vjp(lambda x: dnn.grid_sample(x, g, coordinates="pixel"), x)[1](dy)[0])
    found = np.asarray(dx(x, grid, dy))
    wanted = np.zeros_like(x)
    inside = (grid >= 0).all(-1) & (grid[..., 0] < 3) & (grid[..., 1] < 4)
    for n, i, j in np.argwhere(inside):
        wanted[n, int(grid[n, i, j, 1]), int(grid[n, i, j, 0])] += dy[n, i, j]
    np.testing.assert_array_equal(found, wanted)
    real = rng.normal(size=dy.shape).astype(np.float32)
    many, alone = dx(x, grid, real), dx(x[:1], grid[:1], real[:1])
    np.testing.assert_array_equal(many, dx(x, grid, real))
    np.testing.assert_array_equal(many[:1], alone)


def test_no_gradient_goes_to_x_from_nowhere():
    at = jnp.array([np.nan, 1.25, 9.0]).reshape(1, 3, 1)
    dx = jax.grad(lambda x: jnp.sum(dnn.grid_sample(x, at, coordinates="pixel", layout="NWC")))(LINE)
    np.testing.assert_array_equal(dx[0, :, 0], [0, 0.75, 0.25, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_in_a_cubic_grid_does_not_depend_on_the_batch(dtype: str):
    """A weight of the outer axis has a cotangent from each tap of the inner one, added up in a stated order."""
    rng = np.random.default_rng(0)
    x, grid = jnp.asarray(rng.normal(size=(17, 4, 5, 3)), dtype), jnp.asarray(rng.uniform(-1, 1, (17, 5, 4, 2)), dtype)
    dy = jnp.asarray(rng.normal(size=(17, 5, 4, 3)), dtype)

    @jax.jit
    def slope(x: Any, grid: Any, dy: Any) -> Any:
        sample = ft.partial(dnn.grid_sample, mode="cubic", determinism="batch_invariant")
        return jax.vjp(lambda grid: sample(x, grid), grid)[1](dy)[0]

    whole = slope(x, grid, dy)
    for i in (0, 16):
        np.testing.assert_array_equal(slope(x[i : i + 1], grid[i : i + 1], dy[i : i + 1])[0], whole[i])


def test_vmap():
    x, grid = data(2)
    many, grids = np.stack([x, x + 1, -x]), np.stack([grid, grid / 2, -grid])
    loss = lambda x, g: jnp.sum(dnn.grid_sample(x, g, padding="reflection") ** 2)
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    for axes in ((0, 0), (0, None), (None, 0)):
        given = (many if axes[0] == 0 else x, grids if axes[1] == 0 else grid)
        found = jax.jit(jax.vmap(gradients, axes))(*given)
        each = [gradients(*(v[i] if a == 0 else v for v, a in zip(given, axes, strict=True))) for i in range(3)]
        for one, *others in zip(found, *each, strict=True):
            np.testing.assert_array_equal(one, np.stack(others))


# ---- affine grids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("sizes", [(4,), (5, 3), (2, 1, 4)])
def test_affine_grid(sizes: tuple[int, ...], align_corners: bool):
    d = len(sizes)
    theta = np.random.default_rng(6).normal(size=(2, d, d + 1)).astype(np.float32)
    options: Any = {"align_corners": align_corners}
    grid = dnn.affine_grid(theta, sizes, **options)
    np.testing.assert_array_equal(grid, reference.affine_grid(theta, sizes, **options, arithmetic="ordered"))
    np.testing.assert_allclose(grid, reference.affine_grid(theta, sizes, **options), atol=2e-6)
    x = np.random.default_rng(7).normal(size=(2, *sizes, 3)).astype(np.float32)
    same = dnn.affine_grid(np.tile(np.eye(d, d + 1, dtype=np.float32), (2, 1, 1)), sizes, **options)
    y = dnn.grid_sample(x, same, padding="border", align_corners=align_corners, layout=f"N{'DHW'[3 - d :]}C")
    np.testing.assert_allclose(y, x, atol=1e-5)
    along = np.random.default_rng(8).normal(size=theta.shape).astype(np.float32)
    for level in (None, "mesh_invariant"):
        _, pull = jax.vjp(lambda v, level=level: dnn.affine_grid(v, sizes, **options, determinism=level), theta)
        np.testing.assert_allclose(
            np.vdot(pull(grid)[0], along), np.vdot(grid, dnn.affine_grid(along, sizes, **options)), rtol=1e-4
        )


# ---- errors ----------------------------------------------------------------------------------------------------------

X, GRID = np.ones((2, 4, 5, 3), np.float32), np.zeros((2, 6, 7, 2), np.float32)


@pytest.mark.parametrize(
    ("x", "grid", "options", "error", "text"),
    [
        (X, GRID[..., :1], {}, ValueError, "`grid` must have 4 axes, the first of size 2 or 1 and the last of size 2"),
        (X, GRID[0], {}, ValueError, "for images of 2 spatial axes, got shape .6, 7, 2."),
        (X[:, :0], GRID, {}, ValueError, "`x` must have at least one pixel along every spatial axis, got .0, 5."),
        (X, GRID.astype(np.int32), {}, TypeError, "`grid` must have one of the dtypes float32, .* got int32"),
        (X.astype(np.int32), GRID, {}, TypeError, "`x` must have one of the dtypes float32, .* got int32"),
        (X, GRID, {"mode": "bilinear"}, ValueError, "`mode` must be one of 'nearest', .* got 'bilinear'"),
        (X, GRID, {"padding": "zero"}, ValueError, "`padding` must be one of 'zeros', .* got 'zero'"),
        (X, GRID, {"coordinates": "pixels"}, ValueError, "`coordinates` must be one of 'normalised', 'pixel', got"),
        (X, GRID, {"order": "yx"}, ValueError, "`order` must be one of 'xy', 'ij', got 'yx'"),
        (X, GRID, {"align_corners": "no"}, TypeError, "`align_corners`"),
        (X, GRID, {"cubic_coefficient": np.inf}, ValueError, "`cubic_coefficient` must be finite, got inf"),
        (X, GRID, {"engine": "hopper"}, NotImplementedError, "`grid_sample` on .* cannot be served by engine 'hopper'"),
        (X, GRID, {"beta": 1.0}, ValueError, "`prior` must be given when `beta` is not zero"),
    ],
)  # fmt: skip
def test_errors(x: Any, grid: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.grid_sample(x, grid, **options)


def test_errors_of_sizes_and_of_theta():
    with pytest.raises(ValueError, match=r"`x` and `grid` must have fewer than 2\^31 pixels and taps an image"):
        jax.eval_shape(dnn.grid_sample, jax.ShapeDtypeStruct((1, 2**16, 2**16, 1), np.float32), GRID[:1])
    for theta in (np.ones((2, 3)), np.ones((2, 2, 2)), np.ones((2, 4, 5))):
        with pytest.raises(ValueError, match=r"`theta` must have shape .N, d, d . 1. with d from 1 to 3, got"):
            dnn.affine_grid(theta, (2, 2))
    with pytest.raises(ValueError, match="`sizes` must be an integer or 2 integers, one per spatial axis, got"):
        dnn.affine_grid(np.ones((1, 2, 3)), (2, 2, 2))


def test_programs_have_what_costs_no_more_than_it_must():
    """No remainder, which is a call for every point; one sorted array; no fence in a gradient of XLA's order."""
    x, grid, theta = jnp.ones((2, 5, 6, 3)), jnp.ones((2, 4, 7, 2)), jnp.ones((2, 2, 3))
    sample = lambda x, grid: dnn.grid_sample(x, grid, padding="reflection")
    text = jax.jit(jax.grad(lambda *v: jnp.sum(sample(*v)), (0, 1))).lower(x, grid).as_text()
    (sort,) = (line for line in text.splitlines() if "stablehlo.sort" in line)
    assert sort.count("%") == 2
    assert "stablehlo.remainder" not in jax.jit(sample).lower(x, grid).as_text()
    gradient = jax.jit(jax.grad(lambda theta: jnp.sum(dnn.affine_grid(theta, (9, 8)))))
    assert "stablehlo.select" not in gradient.lower(theta).as_text()
