"""Layouts and windows of the definition, by hand and by round trip."""

import itertools

import numpy as np
import pytest

from jaxdnn_reference import layout as lay

IMAGE = ["NCW", "NWC", "CWN", "NCHW", "NHWC", "CHWN", "NCDHW", "NDHWC", "CDHWN", "NCWc2", "NCHWc3", "NCDHWc6", "NCHWc1"]
FILTER = ["OIW", "WIO", "KCS", "KSC", "OIHW", "HWIO", "OHWI", "KRSC", "KCTRS", "DHWIO", "KCRSc3", "KTRSCc2"]
SIZE = {"N": 2, "C": 6, "K": 5, "D": 3, "H": 4, "W": 7, "T": 3, "R": 4, "S": 7}


@pytest.mark.parametrize(("layout", "kind"), [(x, "image") for x in IMAGE] + [(x, "filter") for x in FILTER])
def test_round_trip_and_positions(layout: str, kind: str):
    axes = lay.image_axes(layout) if kind == "image" else lay.filter_axes(layout)
    shape = tuple(SIZE[letter] for letter in axes.canonical)
    canonical = np.arange(np.prod(shape)).reshape(shape)
    array = axes.from_canonical(canonical)
    assert array.shape == axes.shape(shape)
    assert axes.canonical_shape(array.shape) == shape
    np.testing.assert_array_equal(axes.to_canonical(array), canonical)
    at = np.arange(array.size)
    np.testing.assert_array_equal(axes.canonical_positions(at, shape), array.ravel())


@pytest.mark.parametrize("layout", IMAGE[:9])
def test_letters_name_the_axes(layout: str):
    axes = lay.image_axes(layout)
    array = np.arange(np.prod([SIZE[x] for x in layout])).reshape([SIZE[x] for x in layout])
    canonical = axes.to_canonical(array)
    order = ["N", *"DHW"[5 - len(layout) :], "C"]
    for index in itertools.islice(np.ndindex(array.shape), 0, None, 37):
        where = dict(zip(layout, index, strict=True))
        assert canonical[tuple(where[x] for x in order)] == array[index]


def test_vectorised_channels():
    array = np.random.default_rng(0).integers(0, 99, (2, 3, 4, 5, 8))  # (N, C/8, H, W, 8)
    canonical = lay.image_axes("NCHWc8").to_canonical(array)
    assert canonical.shape == (2, 4, 5, 24)
    assert canonical[1, 2, 3, 8 * 2 + 5] == array[1, 2, 2, 3, 5]
    filters = np.random.default_rng(1).integers(0, 99, (7, 3, 4, 5, 8))  # (K, C/8, R, S, 8)
    assert lay.filter_axes("KCRSc8").to_canonical(filters)[2, 3, 8 * 1 + 6, 5] == filters[5, 1, 2, 3, 6]


@pytest.mark.parametrize(
    ("cudnn", "jax"), [("KCRS", "OIHW"), ("KRSC", "OHWI"), ("RSCK", "HWIO"), ("KCS", "OIW"), ("TRSCK", "DHWIO")]
)
def test_cudnn_and_jax_letters(cudnn: str, jax: str):
    assert lay.filter_axes(cudnn) == lay.filter_axes(jax)


def test_default_filter_layouts():
    names = {"NWC": "WIO", "NHWC": "HWIO", "NDHWC": "DHWIO", "NCHW": "OIHW", "CHWN": "OIHW", "NCW": "OIW"}
    names |= {"NCDHW": "OIDHW", "NCWc4": "KCSc4", "NCHWc32": "KCRSc32", "NCDHWc8": "KCTRSc8"}
    assert {layout: lay.default_filter_layout(layout) for layout in names} == names


def test_padding_forms():
    size, kernel, ones = (7, 8), (3, 2), (1, 1)
    forms = {2: ((2, 2), (2, 2)), (1, 2): ((1, 1), (2, 2)), ((0, 1), (2, 3)): ((0, 1), (2, 3)), "VALID": ((0, 0),) * 2}
    forms["SAME"] = ((1, 1), (0, 1))
    forms["SAME_LOWER"] = ((1, 1), (1, 0))
    for padding, expected in forms.items():
        assert lay.pad_amounts(padding, size, kernel, ones, ones) == expected
    assert lay.pad_amounts("SAME", (7, 8), (3, 3), (2, 2), (1, 1)) == ((1, 1), (0, 1))
    assert lay.pad_amounts("SAME", (5,), (1,), (3,), (1,)) == ((0, 0),)


def test_output_sizes():
    assert lay.output_size((224,), (7,), (2,), ((3, 3),), (1,)) == (112,)
    assert lay.output_size((10,), (3,), (1,), ((0, 0),), (4,)) == (2,)
    assert lay.output_size((2,), (3,), (1,), ((0, 0),), (1,)) == (0,)
    assert lay.output_size((1,), (9,), (1,), ((0, 0),), (1,)) == (0,)
    assert lay.transposed_output_size((4,), (3,), (2,), 1, (1,), (1,)) == (8,)
    assert lay.transposed_output_size((4,), (2,), (3,), "SAME", (1,), (0,)) == (12,)
    assert lay.transposed_output_size((4,), (2,), (3,), "SAME_LOWER", (1,), (0,)) == (12,)


@pytest.mark.parametrize("mode", ["cross_correlation", "convolution"])
def test_the_two_pixel_maps_are_inverse(mode: str):
    """Output pixel p meets input pixel h at tap r exactly if h meets p at r."""
    window = lay.Window(2, (5, 7), (3, 4), (3, 2), (2, 2), (1, 0), (1, 3), mode)
    forward = {
        (p, r, h)
        for p, line in enumerate(window.input_pixel(np.arange(window.out_pixels)))
        for r, h in enumerate(line)
        if h != window.in_pixels
    }
    backward = {
        (p, r, h)
        for h, line in enumerate(window.output_pixel(np.arange(window.in_pixels)))
        for r, p in enumerate(line)
        if p != window.out_pixels
    }
    assert forward == backward
    assert len(forward) > 50
