"""Convolution with lax's signatures.

lax names axes by numbers and dilates the input; `conv` and `conv_transpose` do not. So axes get letters, and a dilated
input is that of a transposed convolution.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.adapters.calls import checked_by_jax, per_axis, refused, serving
from jaxdnn._src.conv.api import conv as _conv
from jaxdnn._src.conv.api import conv_transpose as _conv_transpose
from jaxdnn._src.core import checks
from jaxdnn._src.core.windows import LAYOUTS, SPATIAL

_INT8, _F32, _F64 = (np.dtype(t) for t in (jnp.int8, jnp.float32, jnp.float64))
TF32 = lax.DotAlgorithmPreset.TF32_TF32_F32


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A convolution in letters, spatial axes in the order in which lhs has them.

    Attributes:
      lhs, rhs, out: the axes of the arrays, such as NHWC, HWIO and NCHW.
      layout: that of `conv`, into which lhs is brought and from which the result is.
      strides, padding, lhs_dilation, rhs_dilation: a number, or a (low, high) pair, for each spatial axis.
    """

    lhs: str
    rhs: str
    out: str
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]

    @property
    def spatial(self) -> str:
        return SPATIAL[len(self.strides)]

    @property
    def layout(self) -> str:
        return next((axes for axes in (self.lhs, self.out) if axes in LAYOUTS), f"N{self.spatial}C")


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """`jax.lax.conv_general_dilated`, computed by `conv`, or by `conv_transpose` where lhs is dilated.

    y[n,p,q,k] = Σ_{r,s,i} x[n, p u + r d - a, q v + s e - b, Cg ⌊k / Kg⌋ + i] w[r, s, i, k]

    where x is lhs with zeros between its elements as `lhs_dilation` says, and zero outside; letters as in `conv`.

    Args:
      lhs: the input, with one to three spatial axes; float32, bfloat16, float16, float64, or int8 for results of int32.
      rhs: the filter, of the same dtype.
      window_strides: a sequence of integers; all 1 where lhs is dilated.
      padding: "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial axis; negative numbers cut off.
      lhs_dilation: None, or a sequence of integers.
      rhs_dilation: None, or a sequence of integers: steps between taps.
      dimension_numbers: None, three strings, or `jax.lax.ConvDimensionNumbers`: any order of axes. Those that `conv`
        has no layout for are transposed first.
      feature_group_count: groups of channels.
      batch_group_count: groups of the batch, computed as groups of channels.
      precision: as in lax. float32 is multiplied exactly whatever it asks for, unless it is
        `jax.lax.DotAlgorithmPreset.TF32_TF32_F32`, which lax has for products of matrices: see Numerics.
      preferred_element_type: the result's dtype; it may be wider than that of lhs.
      out_sharding: must be None.

    Returns:
      What lax returns: an array of the same shape and dtype.

    Differentiation: any order, forward and reverse, in lhs and rhs.

    Numerics: as `conv`: added in float32 (float64 for float64, and for a result of float64) and rounded once. lax's
      DEFAULT, which is also what None means, and HIGH allow an accelerator less than float32, and GPUs then cut
      operands to TF32; here they are not cut, so results are at least as exact as lax promises, and on a GPU take
      longer than TF32 would. The preset asks for TF32; within `jaxdnn.patch(precision="tf32")` DEFAULT and HIGH do too.

    Raises:
      NotImplementedError: what is not served: the argument, and what it was. Whatever lax raises for arguments that are
        wrong.

    Example:
      >>> x, w = jnp.ones((1, 2, 5, 4)), jnp.ones((6, 2, 3, 3))
      >>> dnn.lax_like.conv_general_dilated(x, w, (2, 2), "SAME").shape
      (1, 6, 3, 2)

    Sources: `jax.lax.conv_general_dilated`; XLA's Conv.
    """
    if out_sharding is not None:
        raise refused("out_sharding", "None", out_sharding)
    lhs, rhs = checks.array("lhs", lhs), checks.array("rhs", rhs)
    how, tf32 = _precision(precision)
    wanted = checked_by_jax(
        lax.conv_general_dilated,
        lhs,
        rhs,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=how,
        preferred_element_type=preferred_element_type,
    )
    if lhs.ndim - 2 not in SPATIAL:
        raise refused("lhs", "of one to three spatial axes", lhs)
    types = _types(lhs.dtype, wanted.dtype) | ({"precision": "tf32"} if tf32 and lhs.dtype == _F32 else {})
    groups = feature_group_count * batch_group_count  # one of them is 1
    with serving("conv_general_dilated"):
        numbers = _numbers(lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
        x = transposed(lhs, numbers.lhs, numbers.layout)
        if batch_group_count > 1:
            x = _batch_groups_as_channels(x, numbers.layout, batch_group_count)
        compute = _computed if set(numbers.lhs_dilation) == {1} else _computed_transposed
        y = compute(numbers, x, rhs, groups, **types)
    return transposed(y, numbers.layout, numbers.out)


def conv(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """`jax.lax.conv`: `conv_general_dilated` of arrays NCHW and OIHW, or of one or three spatial axes alike.

    Args:
      lhs, rhs, window_strides, padding, precision, preferred_element_type: see `conv_general_dilated`.

    Returns:
      What lax returns.

    Example:
      >>> dnn.lax_like.conv(jnp.ones((1, 2, 5, 4)), jnp.ones((6, 2, 3, 3)), (1, 1), "VALID").shape
      (1, 6, 3, 2)
    """
    return conv_general_dilated(
        lhs, rhs, window_strides, padding, precision=precision, preferred_element_type=preferred_element_type
    )


def conv_with_general_padding(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """`jax.lax.conv_with_general_padding`: `conv_general_dilated` of arrays NCHW and OIHW, or alike.

    Args:
      lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation: see `conv_general_dilated`.
      precision, preferred_element_type: see `conv_general_dilated`.

    Returns:
      What lax returns.

    Example:
      >>> x, w = jnp.ones((1, 2, 5, 4)), jnp.ones((6, 2, 3, 3))
      >>> dnn.lax_like.conv_with_general_padding(x, w, (1, 1), ((1, 0), (1, 1)), None, (1, 1)).shape
      (1, 6, 4, 4)
    """
    return conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def conv_transpose(
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
) -> Array:
    """`jax.lax.conv_transpose`, computed by this library's `conv_transpose`.

    Args:
      lhs, rhs, rhs_dilation, dimension_numbers, precision, preferred_element_type: see `conv_general_dilated`; None as
        dimension_numbers is NHWC and HWIO, or alike.
      strides: the stride of the convolution that is transposed: steps in the result.
      padding: "SAME", "VALID", or (low, high) for each spatial axis, around the dilated lhs.
      transpose_kernel: whether the filter is that of the convolution that is transposed: its taps are reversed and its
        axes of channels exchanged.
      use_consistent_padding: whether padding that is given as numbers is that of the convolution that is transposed.

    Returns:
      What lax returns.

    Example:
      >>> dnn.lax_like.conv_transpose(jnp.ones((1, 3, 2, 6)), jnp.ones((4, 4, 6, 2)), (2, 2), "SAME").shape
      (1, 6, 4, 2)
    """
    lhs, rhs = checks.array("lhs", lhs), checks.array("rhs", rhs)
    checked_by_jax(
        lax.conv_transpose,
        lhs,
        rhs,
        strides=strides,
        padding=padding,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        transpose_kernel=transpose_kernel,
        preferred_element_type=preferred_element_type,
        use_consistent_padding=use_consistent_padding,
    )
    rank = lhs.ndim - 2
    if rank not in SPATIAL:
        raise refused("lhs", "of one to three spatial axes", lhs)
    if dimension_numbers is None:
        letters = ("H", "HW", "HWD")[rank - 1]
        dimension_numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    found = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if use_consistent_padding or padding in ("SAME", "VALID"):
        taps = (rhs.shape[axis] for axis in found.rhs_spec[2:])
        extents = ((r - 1) * d + 1 for r, d in zip(taps, per_axis(rhs_dilation, rank), strict=True))
        pads: Any = [padding] * rank if isinstance(padding, str) else padding
        padding = [_of_transposed(*axis) for axis in zip(extents, strides, pads, strict=True)]
    if transpose_kernel:
        out, into, *spatial = found.rhs_spec
        rhs = jnp.swapaxes(jnp.flip(rhs, spatial), out, into)
    return conv_general_dilated(
        lhs,
        rhs,
        (1,) * rank,
        padding,
        strides,
        rhs_dilation,
        found,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _of_transposed(extent: int, stride: int, padding: Any) -> tuple[int, int]:
    """What lax pads a dilated axis by, for the padding of the convolution that is transposed."""
    if padding == "SAME":
        low = extent - 1 if stride > extent - 1 else -(-(extent + stride - 2) // 2)
        return low, extent + stride - 2 - low
    if padding == "VALID":
        return extent - 1, max(extent, stride) - 1
    low, high = padding
    return extent - 1 - low, extent - 1 - high


# ---- what lax says, in this library's words --------------------------------------------------------------------------


def _precision(precision: Any) -> tuple[Any, bool]:
    """lax's argument for its own checks, and whether it asks for TF32."""
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        precision = lax.DotAlgorithmPreset[precision]
    if precision == TF32:
        return None, True
    if isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        raise refused("precision", f"None, one of jax.lax.Precision, or {TF32}", precision)
    return precision, False


def _types(given: np.dtype, wanted: np.dtype) -> dict[str, Any]:
    """The arguments of `conv` for the dtype of lhs and that of the result."""
    if given == _INT8:
        if wanted != jnp.int32:
            raise refused("preferred_element_type", "int32 for int8, whose sums lax lets wrap in 8 bits", wanted.name)
    elif given not in [np.dtype(t) for t in checks.FLOATS]:
        raise refused("lhs", "float32, bfloat16, float16, float64 or int8", given.name)
    wide = {"accumulate": _F64} if wanted == _F64 != given else {}
    return {"out_dtype": wanted, **wide}


def _numbers(
    lhs: Array, rhs: Array, strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any, dimension_numbers: Any
) -> Numbers:
    """The letters and numbers of a call that lax has checked."""
    given = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    rank = lhs.ndim - 2
    sizes, taps = ([x.shape[a] for a in spec[2:]] for x, spec in ((lhs, given.lhs_spec), (rhs, given.rhs_spec)))
    dilations = per_axis(rhs_dilation, rank)
    if isinstance(padding, str):
        extents = [(r - 1) * d + 1 for r, d in zip(taps, dilations, strict=True)]
        padding = lax.padtype_to_pads(sizes, extents, strides, padding)
    # Zeros between the elements of an axis that has one are none.
    spread = tuple(1 if n == 1 else s for n, s in zip(sizes, per_axis(lhs_dilation, rank), strict=True))
    order = sorted(range(rank), key=lambda i: given.lhs_spec[2 + i])
    of = lambda values: tuple(values[i] for i in order)
    letters = lambda spec, first: _letters(first, [spec[0], spec[1], *of(spec[2:])], rank)
    return Numbers(
        lhs=letters(given.lhs_spec, "NC"),
        rhs=letters(given.rhs_spec, "OI"),
        out=letters(given.out_spec, "NC"),
        strides=of(per_axis(strides, rank)),
        padding=of([(int(low), int(high)) for low, high in padding]),
        lhs_dilation=of(spread),
        rhs_dilation=of(dilations),
    )


def _letters(first: str, places: Sequence[int], rank: int) -> str:
    """The letters of an array's axes, of which `places` has the axis of each."""
    found = dict(zip(places, first + SPATIAL[rank], strict=True))
    return "".join(found[axis] for axis in range(rank + 2))


def transposed(x: Array, axes: str, wanted: str) -> Array:
    """x, whose axes have these letters, with its axes in another order."""
    return x if axes == wanted else lax.transpose(x, [axes.index(letter) for letter in wanted])


def _batch_groups_as_channels(x: Array, layout: str, groups: int) -> Array:
    """x with groups of its batch as groups of its channels."""
    batch, channel = layout.index("N"), layout.index("C")
    split = x.reshape(*x.shape[:batch], groups, x.shape[batch] // groups, *x.shape[batch + 1 :])
    moved = jnp.moveaxis(split, batch, channel)  # before the channels, wherever the batch was
    return moved.reshape(*moved.shape[:channel], groups * moved.shape[channel + 1], *moved.shape[channel + 2 :])


# ---- the two computations --------------------------------------------------------------------------------------------


def _computed(numbers: Numbers, x: Array, w: Array, groups: int, **types: Any) -> Array:
    return _conv(
        x,
        w,
        stride=numbers.strides,
        padding=numbers.padding,
        dilation=numbers.rhs_dilation,
        groups=groups,
        layout=numbers.layout,
        filter_layout=numbers.rhs,
        **types,
    )


def _computed_transposed(numbers: Numbers, x: Array, w: Array, groups: int, **types: Any) -> Array:
    """With zeros between x's elements, as the transposed convolution whose stride they are.

    Its filter has reversed taps, and the channels of x as those that come out. It is padded by what remains of a window
    that lies at the edge; where lax pads by more than that, the result begins or ends with zeros.
    """
    if set(numbers.strides) != {1}:
        raise refused("window_strides", f"1 where `lhs_dilation` is {numbers.lhs_dilation}", numbers.strides)
    taps = [w.shape[numbers.rhs.index(letter)] for letter in numbers.spatial]
    spans = [(r - 1) * d for r, d in zip(taps, numbers.rhs_dilation, strict=True)]
    pads = [(span - low, span - high) for span, (low, high) in zip(spans, numbers.padding, strict=True)]
    w, axes = _exchanged(w, numbers, groups)
    return _conv_transpose(
        x,
        w,
        stride=numbers.lhs_dilation,
        padding=pads,
        dilation=numbers.rhs_dilation,
        groups=groups,
        mode="convolution",
        layout=numbers.layout,
        filter_layout=axes,
        **types,
    )


def _exchanged(w: Array, numbers: Numbers, groups: int) -> tuple[Array, str]:
    """The filter whose output channels are the input channels of w, within each group, and its axes' letters."""
    if groups == 1:
        return w, numbers.rhs.translate(str.maketrans("OI", "IO"))
    w = transposed(w, numbers.rhs, f"{numbers.spatial}IO")
    *taps, inputs, outputs = w.shape
    w = jnp.swapaxes(w.reshape(*taps, inputs, groups, outputs // groups), -1, -3)
    return w.reshape(*taps, outputs // groups, groups * inputs), f"{numbers.spatial}IO"
