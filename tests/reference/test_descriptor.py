"""Tensor descriptors: the guide's worked example, packing, and overlap against counting addresses."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxdnn_reference import TensorDescriptor
from jaxdnn_reference import layout as lay

# The guide's example: N=1 C=64 H=5 W=4, elements numbered in the order of (n, c, h, w).
DIMS = (1, 64, 5, 4)
EXAMPLE = np.arange(1 * 64 * 5 * 4, dtype=np.int32).reshape(DIMS)


def memory(layout: str) -> np.ndarray[Any, Any]:
    return TensorDescriptor.from_layout(layout, DIMS, np.int32).memory(EXAMPLE)


def test_example_in_nchw():
    assert memory("NCHW").tolist() == list(range(1280))


def test_example_in_nhwc():
    m = memory("NHWC")
    assert m[:4].tolist() == [0, 20, 40, 60]  # all channels of pixel (0, 0) first
    assert m[63:67].tolist() == [1260, 1, 21, 41]  # then those of pixel (0, 1)
    assert m[4 * 64] == 4  # row 1 follows row 0
    assert m.tolist() == [20 * c + 4 * h + w for h in range(5) for w in range(4) for c in range(64)]


def test_example_in_nc32hw32():
    m = memory("NC/32HW32")
    assert m[:3].tolist() == [0, 20, 40]
    assert m[31:34].tolist() == [620, 1, 21]  # channels 0 to 31 of pixel (0, 0), then of pixel (0, 1)
    assert m[640:643].tolist() == [640, 660, 680]  # channels 32 to 63 after all pixels of the first 32
    expected = [20 * (32 * b + c) + 4 * h + w for b in (0, 1) for h in range(5) for w in range(4) for c in range(32)]
    assert m.tolist() == expected
    assert memory("NCHWc32").tolist() == expected


def test_one_lane_is_nchw_and_all_channels_are_nhwc():
    assert memory("NC/1HW1").tolist() == memory("NCHW").tolist()
    assert memory("NC/64HW64").tolist() == memory("NHWC").tolist()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN", "NCHWc2"])
def test_memory_is_the_array_in_its_layout(layout: str):
    logical = np.random.default_rng(0).permutation(2 * 6 * 5 * 3).reshape(2, 6, 5, 3)
    descriptor = TensorDescriptor.from_layout(layout, logical.shape, logical.dtype)
    canonical = logical.transpose(0, 2, 3, 1)
    expected = lay.image_axes(layout).from_canonical(canonical).ravel()
    np.testing.assert_array_equal(descriptor.memory(logical), expected)
    assert descriptor.is_fully_packed()
    assert descriptor.span == descriptor.size == logical.size
    if "c" not in layout:
        assert descriptor.layout == layout


@pytest.mark.parametrize("layout", ["NCW", "NWC", "CWN", "NCDHW", "NDHWC", "CDHWN"])
def test_other_ranks(layout: str):
    dims = (2, 3, 7, 6, 5)[: len(layout)]
    assert TensorDescriptor.from_layout(layout, dims, np.float32).layout == layout


def test_partially_packed():
    nhwc_with_padded_rows = TensorDescriptor((2, 3, 5, 4), (200, 1, 40, 3), np.float32)
    assert nhwc_with_padded_rows.layout == "NHWC"
    assert nhwc_with_padded_rows.is_packed("WC")
    assert nhwc_with_padded_rows.is_packed("NWC")
    assert not nhwc_with_padded_rows.is_packed("HWC")
    assert not nhwc_with_padded_rows.is_fully_packed()
    assert not nhwc_with_padded_rows.is_spatially_packed()


def test_packed_in_the_major_dimension_only():
    rows_of_eight = TensorDescriptor((2, 3, 5, 4), (120, 40, 8, 2), np.float32)
    assert rows_of_eight.is_packed("NCH")
    assert rows_of_eight.is_packed("N")
    assert not rows_of_eight.is_packed("W")  # the last dimension's stride is not 1
    assert not TensorDescriptor((2, 3, 5, 4), (121, 40, 8, 2), np.float32).is_packed("N")
    assert TensorDescriptor((2, 3, 5, 4), (121, 40, 8, 2), np.float32).is_packed("CH")
    # Not packed in anything: H's stride is less than one row.
    assert not TensorDescriptor((2, 3, 5, 4), (120, 40, 3, 1), np.float32).is_packed("N", layout="NCHW")


def test_spatially_packed():
    assert TensorDescriptor((2, 3, 5, 4), (70, 20, 4, 1), np.float32).is_spatially_packed()
    assert TensorDescriptor((2, 3, 5, 4), (20, 50, 4, 1), np.float32).is_spatially_packed()  # CNHW
    assert not TensorDescriptor((2, 3, 5, 4), (60, 1, 12, 3), np.float32).is_spatially_packed()
    assert TensorDescriptor((2, 3, 6, 5, 4), (400, 130, 20, 4, 1), np.float32).is_spatially_packed()
    assert not TensorDescriptor((2, 3, 6), (18, 6, 1), np.float32, "BMN").is_spatially_packed()


def test_matmul_descriptors():
    row_major = TensorDescriptor((2, 3, 5), (15, 5, 1), np.float16, "BMN")
    column_major = TensorDescriptor((2, 3, 5), (15, 1, 3), np.float16, "BMN")
    assert (row_major.layout, column_major.layout) == ("BMN", "BNM")
    assert row_major.is_fully_packed()
    assert column_major.is_fully_packed()


def test_negative_strides_mirror():
    array = np.arange(24).reshape(2, 3, 4)
    mirrored = TensorDescriptor((2, 3, 4), (12, 4, -1), np.int64)
    np.testing.assert_array_equal(mirrored.memory(array), array[..., ::-1].ravel())
    assert not mirrored.is_overlapping()
    assert not mirrored.is_packed("N", layout="NCW")
    with pytest.raises(ValueError, match=r"`strides` must be positive .*got \(12, 4, -1\)"):
        _ = mirrored.layout


def test_gaps_are_filled():
    array = np.ones((1, 2, 3), np.int8)
    assert TensorDescriptor((1, 2, 3), (8, 4, 1), np.int8).memory(array, fill=9).tolist() == [1, 1, 1, 9, 1, 1, 1]


def counted(dims: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    addresses = [
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, dims))
    ]
    return len(set(addresses)) < len(addresses)


AXES = st.lists(st.tuples(st.integers(1, 5), st.integers(-40, 40)), min_size=3, max_size=5)


@given(AXES)
@example([(2, 2), (2, 3), (2, 7)])  # interleaved, though 3 < 2 * 2
@example([(3, 2), (3, 3), (1, 0)])
@example([(4, 2), (3, 3), (1, 5)])
@example([(1, 0), (1, 0), (1, 0)])
@example([(2, 6), (2, 10), (2, 15)])
@example([(2, 5), (2, 7), (2, 12)])  # no pair overlaps, 5 + 7 = 12 does
@example([(2, 9), (2, 6), (4, 5)])  # 9 + 6 = 3 * 5
@example([(3, 9), (2, 14), (2, 23), (2, 40)])
def test_overlap_equals_counting_addresses(axes: list[tuple[int, int]]):
    dims, strides = zip(*axes, strict=True)
    assert TensorDescriptor(dims, strides, np.float32).is_overlapping() == counted(dims, strides)


def test_interleaved_tensor_does_not_overlap():
    # stride[i-1] < stride[i] * dim[i], the rule of thumb, holds; yet the addresses 0 2 3 5 all differ.
    interleaved = TensorDescriptor((1, 2, 2), (4, 3, 2), np.float32)
    assert not interleaved.is_overlapping()
    assert interleaved.memory(np.array([[[1, 2], [3, 4]]])).tolist() == [1, 0, 2, 3, 0, 4]


@pytest.mark.parametrize(
    ("dims", "strides", "overlapping"),
    [
        ((64, 3, 2048, 2048), (3 * 2**22, 2**22, 2**11, 1), False),
        ((64, 3, 2048, 2048), (3 * 2**22, 2**22, 2**11 - 1, 1), True),
        ((1000, 1000, 1000), (1, 1009, 1009 * 1013), False),
        ((10**6, 10**6, 10**6), (10**6 + 3, 10**6 + 33, 1), True),
        ((4, 4, 4, 4, 4, 4, 4, 4), (4**7, 4**6, 4**5, 4**4, 64, 16, 4, 1), False),
        ((1000, 1000, 100), (3 * 10**6, 3001, 3), False),
    ],
)
def test_overlap_of_large_tensors(dims: tuple[int, ...], strides: tuple[int, ...], overlapping: bool):
    assert TensorDescriptor(dims, strides, np.float32).is_overlapping() == overlapping


def test_overlapping_memory_is_refused():
    descriptor = TensorDescriptor((1, 4, 3), (0, 1, 1), np.float32)  # a sliding window
    assert descriptor.is_overlapping()
    np.testing.assert_array_equal(descriptor.offsets()[0], [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]])
    with pytest.raises(ValueError, match="`array` needs an address for each element"):
        descriptor.memory(np.zeros((1, 4, 3)))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (((2, 3), (3, 1)), ValueError, r"`dims` must have 3 to 8 entries, got 2"),
        (((1,) * 9, (1,) * 9), ValueError, r"`dims` must have 3 to 8 entries, got 9"),
        (((2, 3, 4), (12, 4)), ValueError, r"`strides` must have one entry for each of the 3 dims, got 2"),
        (((2, 0, 4), (12, 4, 1)), ValueError, r"`dims` must be at least 1 each, got \(2, 0, 4\)"),
        (((2, 3.0, 4), (12, 4, 1)), TypeError, r"`dims` must be integers, got \(2, 3\.0, 4\)"),
        (((2, 3, 4), (12, 4, True)), TypeError, r"`strides` must be integers"),
    ],
)
def test_errors(arguments: Any, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        TensorDescriptor(*arguments, dtype=np.float32)


def test_errors_of_names():
    with pytest.raises(ValueError, match=r"`letters` must be 3 different letters, got 'NCN'"):
        TensorDescriptor((2, 3, 4), (12, 4, 1), np.float32, "NCN")
    descriptor = TensorDescriptor((2, 3, 4), (12, 4, 1), np.float32)
    with pytest.raises(ValueError, match=r"`letters` must be among 'NCW', got 'HW'"):
        descriptor.is_packed("HW")
    with pytest.raises(ValueError, match=r"`layout` must be an order of 'NCW', got 'NHWC'"):
        descriptor.is_packed("W", layout="NHWC")
    with pytest.raises(ValueError, match=r"`layout` must order N, C and W, HW or DHW, .*got 'NCHX'"):
        TensorDescriptor.from_layout("NCHX", (1, 2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"`dims` must have 4 entries \(NCHW\) for 'NHWC', got 3"):
        TensorDescriptor.from_layout("NHWC", (1, 2, 3), np.float32)
    with pytest.raises(ValueError, match=r"`dims` must have a C that 32 divides for 'NC/32HW32', got 48"):
        TensorDescriptor.from_layout("NC/32HW32", (1, 48, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"`array` must have the shape \(2, 3, 4\), got \(2, 3, 5\)"):
        descriptor.memory(np.zeros((2, 3, 5)))
