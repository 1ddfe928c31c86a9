"""What convolutions lower to for another platform than the one that the tests run on."""

import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.conv.xla import ordered
from tests.conv import cases, helpers

E4M3, E5M2, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")


def module(function: Any, *avals: Any, platform: str) -> Any:
    return jax.jit(function).trace(*avals).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")


def operations(block: Any) -> Iterator[Any]:
    for op in block.operations:
        yield op
        for region in op.regions:
            for inner in region.blocks:
                yield from operations(inner)


def computed_from(op: Any) -> Iterator[Any]:
    """The operations whose results reach an operation; a barrier ends the search."""
    seen, rest = set(), [op]
    while rest:
        for value in rest.pop().operands:
            owner = value.owner
            if hasattr(owner, "name") and owner not in seen:  # a block owns its arguments
                seen.add(owner)
                yield owner
                if owner.name != "stablehlo.optimization_barrier":
                    rest.append(owner.opview if hasattr(owner, "opview") else owner)


def sources_of_float8(found: Any) -> list[set[str]]:
    """For every conversion to float8: what the values come from, up to a barrier."""
    converts = [op for op in operations(found.body) if op.operation.name == "stablehlo.convert"]
    narrow = [op for op in converts if "f8" in str(op.operation.results[0].type)]
    return [{source.name for source in computed_from(op.operation)} for op in narrow]


SHAPES = {  # x, w: XLA's convolution; a matrix product; depthwise; wide groups, dilated
    "direct": ((2, 6, 5, 4), (3, 3, 4, 8), {}),
    "matrix": ((2, 6, 5, 16), (1, 1, 16, 8), {}),
    "patches": ((2, 6, 4, 16), (3, 2, 16, 8), {"stride": (3, 2)}),
    "depthwise": ((2, 6, 5, 8), (3, 3, 1, 8), {"groups": 8, "dilation": 2, "padding": 2}),
    "groups": ((2, 6, 5, 64), (3, 3, 16, 64), {"groups": 4, "dilation": 2, "padding": 2}),
}


def call(op: str, name: str, dtype: Any, **more: Any) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    x, w, options = SHAPES[name]
    aval = lambda shape: jax.ShapeDtypeStruct(shape, dtype)
    y = jax.eval_shape(lambda x, w: dnn.conv(x, w, **options), aval(x), aval(w)).shape
    operands, sizes = {
        "conv": ((x, w), ()),
        "conv_dgrad": ((y, w), (x,)),
        "conv_wgrad": ((x, y), (w,)),
        "conv_transpose": ((y, w), ()),
    }[op]
    return lambda a, b: getattr(dnn, op)(a, b, *sizes, **options, **more), [aval(shape) for shape in operands]


OPS = ("conv", "conv_dgrad", "conv_wgrad", "conv_transpose")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "out"), [(E4M3, None), (E5M2, BF16), (BF16, E4M3), (F32, E5M2)])
def test_no_product_is_converted_to_float8_without_a_barrier(op: str, name: str, dtype: Any, out: Any):
    """XLA fuses the conversion into cuBLASLt's product otherwise, which gives 448 where NaN is due (H200)."""
    function, avals = call(op, name, dtype, out_dtype=out)
    narrow = jnp.dtype(out or dtype).itemsize == 1
    sources = sources_of_float8(module(function, *avals, platform="cuda"))
    assert bool(sources) == narrow
    for found in sources:
        assert "stablehlo.optimization_barrier" in found
        assert not found & set(PRODUCTS)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_nothing_is_multiplied_or_added_in_a_narrow_type_on_gpus(op: str, name: str, dtype: Any):
    """Only a library, which adds in float32, is given operands of a narrow type."""
    function, avals = call(op, name, dtype, engine="xla")
    found = list(operations(module(function, *avals, platform="cuda").body))
    steps = [op.operation for op in found if op.operation.name in ("stablehlo.multiply", "stablehlo.add")]
    assert not [step for step in steps if "f16" in str(step.results[0].type)]  # bf16 too
    assert steps or {op.operation.name for op in found} & {*PRODUCTS}


@pytest.mark.parametrize("op", OPS)
def test_barriers_are_for_float8_on_gpus_alone(op: str):
    for dtype, out, platform in ((E4M3, None, "cpu"), (BF16, E4M3, "cpu"), (BF16, None, "cuda"), (F32, BF16, "cuda")):
        function, avals = call(op, "direct", dtype, out_dtype=out)
        names = {op.operation.name for op in operations(module(function, *avals, platform=platform).body)}
        assert "stablehlo.optimization_barrier" not in names


@pytest.mark.parametrize("name", ["direct", "matrix"])
def test_what_is_converted_outside_of_the_call_has_a_barrier_too(name: str):
    """With a scale that is traced, and where a derivative needs the value before the activation."""
    function, (x, w) = call("conv", name, BF16, out_dtype=E4M3)
    scaled = lambda x, w, alpha: call("conv", name, BF16, out_dtype=E4M3, alpha=alpha)[0](x, w)
    curved = call("conv", name, BF16, out_dtype=E4M3, activation="gelu")[0]
    sources = sources_of_float8(module(scaled, x, w, jax.ShapeDtypeStruct((), F32), platform="cuda"))
    sources += sources_of_float8(module(lambda x, w: jax.jvp(curved, (x, w), (x, w)), x, w, platform="cuda"))
    sources += sources_of_float8(module(lambda x, w: jax.jvp(function, (x, w), (x, w)), x, w, platform="cuda"))
    assert len(sources) > 4
    assert not any(found & set(PRODUCTS) for found in sources)


LAYOUTS = [(layout, names) for layout in ("NHWC", "NCHW", "CHWN", "NCHWc32") for names in ("HWIO", "OIHW", "OHWI")]


@pytest.mark.parametrize(("layout", "filter_layout"), LAYOUTS)
def test_integers_of_every_layout_reach_the_cpu_library_of_channels_last(layout: str, filter_layout: str):
    """XLA folds a transpose into an integer convolution, and then has a loop for it, 30 times as slow."""
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((2, 9, 8, 64), (3, 3, 64, 32)))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    wanted = np.einsum("nhwcrs,rsck->nhwk", windows, w, dtype=np.int64)
    function = jax.jit(
        lambda x, w: dnn.conv(x, w, padding=1, layout=layout, filter_layout=filter_layout, out_dtype=jnp.int32)
    )
    operands = _as_layout(x, layout), np.transpose(w, ["HWIO".index(axis) for axis in filter_layout])
    np.testing.assert_array_equal(function(*operands), _as_layout(wanted, layout))

    lowered = function.lower(*operands)
    (convolution,) = [line for line in lowered.as_text().splitlines() if "stablehlo.convolution" in line]
    assert "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in convolution
    plain = jax.jit(lambda x, w: dnn.conv(x, w, padding=1, out_dtype=jnp.int32)).lower(x, w)
    ours, best = (_types_multiplied(str(v.compile().as_text())) for v in (lowered, plain))
    assert ours == best


INTEGER_LOOPS = {
    "line": ("conv", {"sizes": (19,), "taps": (3,), "padding": 1}),
    "line-strided": ("conv_dgrad", {"sizes": (19,), "taps": (5,), "stride": 2, "padding": 2}),
    "line-grouped": ("conv", {"sizes": (19,), "taps": (3,), "groups": 4}),
    "line-many-taps": ("conv", {"sizes": (60,), "taps": (40,), "padding": 20}),
    "line-filter": ("conv_wgrad", {"sizes": (90,), "taps": (3,), "dilation": 2}),
    "image-filter": ("conv_wgrad", {"sizes": (19, 18), "taps": (3, 2), "stride": (2, 1), "padding": 1}),
    "image-many-taps-filter": ("conv_wgrad", {"sizes": (17, 15), "taps": (7, 6), "padding": 3}),
    "volume": ("conv", {"sizes": (5, 4, 6), "taps": (2, 4, 3), "padding": 1}),
    "volume-strided": ("conv_dgrad", {"sizes": (5, 4, 6), "taps": (2, 4, 3), "stride": 2, "padding": 1}),
    "volume-filter": ("conv_wgrad", {"sizes": (5, 4, 6), "taps": (2, 4, 3), "padding": 1}),
}


@pytest.mark.parametrize("name", INTEGER_LOOPS)
def test_integers_that_have_no_cpu_library_are_products_tap_by_tap(name: str):
    """XLA's library has forward convolutions of two spatial axes; for the others it has a loop, 10 times as slow."""
    op, options = INTEGER_LOOPS[name]
    geometry = cases.Geometry(
        batch=3, channels=24, filters=16, layout={1: "NWC", 2: "NHWC", 3: "NDHWC"}[len(options["sizes"])], **options
    )
    case = cases.case(op, geometry, 5, dtype=np.int8)
    rng = np.random.default_rng(5)
    operands = [rng.integers(-128, 128, a.shape).astype(np.int8) for a in case.arrays]
    function = jax.jit(lambda *a: helpers.call(case.with_options(out_dtype="int32"), *a))
    wanted = getattr(reference, op)(*(a.astype(np.float64) for a in operands), *case.static, **case.options)
    np.testing.assert_array_equal(function(*operands), wanted)
    assert "stablehlo.convolution" not in function.lower(*operands).as_text()


def _as_layout(x: np.ndarray, layout: str) -> np.ndarray:
    axes, _, lanes = layout.partition("c")
    y = np.transpose(x, ["NHWC".index(axis) for axis in axes])
    return np.moveaxis(y.reshape(len(y), -1, int(lanes), *y.shape[2:]), 2, -1) if lanes else y


def _types_multiplied(compiled: str) -> set[tuple[str, ...]]:
    """The operands' types of the convolutions in a compiled program: int8, or int32 where XLA has converted them."""
    types = dict(re.findall(r"%(\S+) = (\w+)\[", compiled))
    return {tuple(types[name] for name in found) for found in re.findall(r" convolution\(%(\S+), %(\S+)\)", compiled)}


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32")])
def test_ordered_products_below_the_normal_numbers_keep_their_bits(dtype, precision):
    """A product of bfloat16 numbers may lie below 2^-126, where float32 lacks bits for it: only sums are rounded."""
    rng = np.random.default_rng(7)
    draw = lambda low, high: rng.uniform(1, 2, 4096) * 2.0 ** rng.integers(low, high, 4096)
    a, b = (np.asarray(draw(-70, -62).astype(jnp.bfloat16), np.float32) for _ in range(2))
    c = draw(-126, -122).astype(np.float32)
    x = jax.ShapeDtypeStruct((1, 4, 4, 8), dtype)
    call: Any = types.SimpleNamespace(avals=(x, x), spec=types.SimpleNamespace(precision=precision))
    add: Any = ordered.addition(call)
    # One operation at a time, so that no compiler fuses them.
    assert (np.asarray(add(a, b, c)) == (a.astype(np.float64) * b + c).astype(np.float32)).all()


def test_a_depthwise_gradient_is_a_small_program():
    """XLA compiles an instruction for each tap in milliseconds, and one for each pair of taps in seconds."""
    x, w = jnp.zeros((2, 8, 8, 8)), jnp.zeros((7, 7, 1, 8))
    conv = lambda x, w: dnn.conv(x, w, padding=3, groups=8, engine="xla")
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1)))
    text = gradient.lower(x, w).compile().as_text()
    assert text is not None
    assert text.count(" = ") < 2000
