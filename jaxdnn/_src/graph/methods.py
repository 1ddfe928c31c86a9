"""The methods of `Graph` that make nodes of products, windows and moves, with cudnn-frontend's names.

Each returns the node's outputs: virtual tensors until `set_output(True)`. An operand may be a number, which becomes a
constant. What does not fit raises GraphError when the graph is validated, in a sentence that names node and attribute.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxdnn._src.graph.errors import GraphError, flag
from jaxdnn._src.graph.methods_attention import Attention
from jaxdnn._src.graph.methods_norms import Norms
from jaxdnn._src.graph.methods_pointwise import Operand, Pointwise
from jaxdnn._src.graph.tensors import Tensor


class Methods(Pointwise, Norms, Attention):
    """The methods that make nodes."""

    _node: Callable[..., Any]

    def conv_fprop(
        self,
        image: Tensor,
        weight: Tensor,
        padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        convolution_mode: str = "CROSS_CORRELATION",
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor:
        """y[n, g K + k, o] = Σ over c, t of image[n, g C + c, o stride + t dilation - padding] weight[g K + k, c, t].

        Args:
          image: (N, G C, spatial...), of 1 to 3 spatial axes; floats of 8 bits or more, or int8.
          weight: (G K, C, taps...), of the image's dtype; float8 may be mixed. The groups G follow from the channels.
          padding: an integer for each spatial axis, for both its ends; or pre_padding and post_padding, for each end.
          stride, dilation: an integer for each spatial axis, 1 by default.
          convolution_mode: "CROSS_CORRELATION", or "CONVOLUTION", whose taps are flipped.
          compute_data_type: that of the sum: "float32", "float64" for float64, "int32" for int8; None is the graph's.
          name: the node's; the result is called `name::Y`.

        Returns:
          (N, G K, 1 + (size + padding - dilation (taps - 1) - 1) // stride, ...), in the image's order of axes.
        """
        window = _window(padding, pre_padding, post_padding, stride, dilation, convolution_mode)
        return self._node("conv_fprop", {"image": image, "weight": weight}, ("Y",), window, compute_data_type, name)

    def conv_dgrad(
        self,
        loss: Tensor,
        filter: Tensor,
        padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        convolution_mode: str = "CROSS_CORRELATION",
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor:
        """The gradient of `conv_fprop` in its image, of the gradient that reaches its result.

        Arguments as of `conv_fprop`, with loss (N, G K, ...) and filter (G K, C, taps...). Returns a tensor whose sizes
        `set_dim` has to tell, for a stride leaves those of the image open.
        """
        window = _window(padding, pre_padding, post_padding, stride, dilation, convolution_mode)
        return self._node("conv_dgrad", {"loss": loss, "filter": filter}, ("DX",), window, compute_data_type, name)

    def conv_wgrad(
        self,
        image: Tensor,
        loss: Tensor,
        padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        convolution_mode: str = "CROSS_CORRELATION",
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor:
        """The gradient of `conv_fprop` in its weight, of the gradient that reaches its result.

        Arguments as of `conv_fprop`, with loss (N, G K, ...). Returns a tensor whose sizes `set_dim` has to tell, for
        a stride leaves those of the weight open.
        """
        window = _window(padding, pre_padding, post_padding, stride, dilation, convolution_mode)
        return self._node("conv_wgrad", {"image": image, "loss": loss}, ("DW",), window, compute_data_type, name)

    def matmul(
        self,
        A: Tensor,
        B: Tensor,
        compute_data_type: Any = None,
        padding: float = 0.0,
        name: str = "",
        *,
        M_override: Tensor | None = None,
        N_override: Tensor | None = None,
        K_override: Tensor | None = None,
    ) -> Tensor:
        """C = A B, for each of a batch of matrices.

        Args:
          A, B: (..., M, K) and (..., K, N), of 2 to 6 dimensions; floats of 8 bits or more, or int8, of one dtype but
            for float8, which may be mixed. Of a batch axis one size may be 1 or divide the other: each matrix then
            serves so many neighbours, as a head of keys serves several of queries.
          compute_data_type: that of the sum: "float32", "float64", or "int32" for int8; None is the graph's.
          padding: the number that stands beyond the overrides.
          name: the node's; the result is called `name::C`.
          M_override, N_override, K_override: int32 or int64, (..., 1, 1): how many rows, columns and terms each matrix
            has.

        Returns:
          (..., M, N).
        """
        inputs = {"A": A, "B": B, "M_override": M_override, "N_override": N_override, "K_override": K_override}
        return self._node("matmul", inputs, ("C",), {"padding": padding}, compute_data_type, name)

    def moe_grouped_matmul(
        self,
        token: Tensor,
        weight: Tensor,
        first_token_offset: Tensor,
        token_index: Tensor | None = None,
        mode: str = "NONE",
        compute_data_type: Any = None,
        top_k: int = 1,
        name: str = "",
    ) -> Tensor:
        """Each row of token times the weight of its expert: rows from first_token_offset[e] up to the next belong to e.

        Args:
          token: (1, T, H); floats of 8 bits or more, or int8.
          weight: (E, H, N), of the same dtype.
          first_token_offset: int32 (E, 1, 1), ascending; rows before the first belong to none, and give 0.
          token_index: int32 (1, T', 1), in modes GATHER, whose row i is row token_index[i] of token, and SCATTER, whose
            row i is written to row token_index[i], which must differ (T' = T; rows that none names are 0).
          mode: "NONE", "GATHER" or "SCATTER".
          compute_data_type: "float32" or "float64", that of the sum; None is the graph's.
          top_k: 1; cuDNN's other values are not served.
          name: the node's; the result is called `name::OUT`.

        Returns:
          (1, T or T', N).
        """
        inputs = {
            "token": token,
            "weight": weight,
            "first_token_offset": first_token_offset,
            "token_index": token_index,
        }
        return self._node(
            "moe_grouped_matmul", inputs, ("OUT",), {"mode": mode, "top_k": top_k}, compute_data_type, name
        )

    def moe_grouped_matmul_bwd(
        self, doutput: Tensor, token: Tensor, first_token_offset: Tensor, compute_data_type: Any = None, name: str = ""
    ) -> Tensor:
        """DWEIGHT[e] = token_e^T doutput_e: the gradient of `moe_grouped_matmul` in mode NONE in its weight, (E, H, N).

        doutput is (1, T, N), token (1, T, H), first_token_offset int32 (E, 1, 1).
        """
        inputs = {"doutput": doutput, "token": token, "first_token_offset": first_token_offset}
        return self._node("moe_grouped_matmul_bwd", inputs, ("DWEIGHT",), {}, compute_data_type, name)

    def reduction(
        self, input: Tensor, mode: str, compute_data_type: Any = None, name: str = "", is_deterministic: bool = False
    ) -> Tensor:
        """Reduces along the axes at which the result, whose sizes `set_dim` has to tell, has 1 and the input has not.

        Args:
          input: any sizes and dtype of 8 bits or more.
          mode: "ADD", "MUL", "MIN", "MAX", "AMAX" (max |x|), "AVG", "NORM1" (Σ |x|), "NORM2" (√Σ x^2) or
            "MUL_NO_ZEROS", as `jaxdnn.reduce` computes them.
          compute_data_type: "float32", "float64" or, but for AVG and NORM2 of integers, "int32", which wraps.
          name: the node's; the result is called `name::Y`.
          is_deterministic: whether sums are added in a fixed order, `jaxdnn.determinism`'s "batch_invariant".

        Returns:
          A tensor of the input's rank.
        """
        how = {"mode": mode, "is_deterministic": is_deterministic}
        return self._node("reduction", {"input": input}, ("Y",), how, compute_data_type, name)

    def reshape(self, input: Tensor, name: str = "", reshape_mode: str = "VIEW_ONLY") -> Tensor:
        """The input in the sizes that `set_dim` of the result has to tell.

        VIEW_ONLY keeps the order of elements in memory, so both have to lie there without gaps; LOGICAL keeps the
        order of the last axis first, wherever elements lie. The result has the input's dtype unless another is set.
        """
        return self._node("reshape", {"input": input}, ("Y",), {"reshape_mode": reshape_mode}, None, name)

    def transpose(
        self, input: Tensor, permutation: Sequence[int], compute_data_type: Any = None, name: str = ""
    ) -> Tensor:
        """Axis i of the result is the input's axis permutation[i]; the dtype is the input's unless another is set."""
        return self._node("transpose", {"input": input}, ("Y",), {"permutation": permutation}, compute_data_type, name)

    def slice(self, input: Tensor, slices: Sequence[Any], compute_data_type: Any = None, name: str = "") -> Tensor:
        """A part of the input, of its dtype: for each axis a slice, (start, limit) or (start, limit, stride).

        0 <= start < limit <= the size, and a stride above 0; a limit of None is the size. Along each axis the result
        has ceil((limit - start) / stride) elements.
        """
        parts = [_part(part) for part in slices] if isinstance(slices, list | tuple) else slices
        return self._node("slice", {"input": input}, ("Y",), {"slices": parts}, compute_data_type, name)

    def concatenate(
        self, inputs: Sequence[Tensor], axis: int, in_place_index: int | None = None, name: str = ""
    ) -> Tensor:
        """The inputs, of one dtype and of equal sizes but along an axis, one behind the other along it.

        in_place_index is taken for cudnn-frontend's sake: XLA decides whose memory the result shares.
        """
        if not isinstance(inputs, list | tuple):
            raise GraphError("node of concatenate", "inputs", "a list or tuple of tensors", inputs)
        named = {f"inputs_{i}": tensor for i, tensor in enumerate(inputs)}
        return self._node("concatenate", named, ("Y",), {"axis": axis, "in_place_index": in_place_index}, None, name)

    def resample(
        self,
        input: Tensor,
        mode: str,
        window: Sequence[int],
        stride: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        padding_mode: str | None = None,
        generate_index: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Any:
        """Maxima or averages of windows of (N, C, spatial...), as `jaxdnn.pool`.

        Args:
          input: floats of 16 bits or more, of 1 to 3 spatial axes.
          mode: "MAXPOOL", "AVGPOOL_INCLUDE_PADDING" or "AVGPOOL_EXCLUDE_PADDING".
          window, stride, pre_padding, post_padding: an integer for each spatial axis; stride is 1, padding 0 by
            default, and less than the window.
          padding_mode: None, or what the mode has: "NEG_INF_PAD" of maxima, "ZERO_PAD" of averages.
          generate_index: of maxima: whether each one's place in its window is returned, int8, so that a window has at
            most 127.
          compute_data_type: "float32" or "float64"; None is the graph's.
          name: the node's; the results are called `name::Y` and `name::INDEX`.

        Returns:
          Y, or Y and INDEX: (N, C, 1 + (size + padding - window) // stride, ...). NaN propagates; of equal maxima the
          first counts.
        """
        how = {"mode": mode, "window": window, "stride": stride, "padding_mode": padding_mode}
        how = {**how, "pre_padding": pre_padding, "post_padding": post_padding}
        outputs = ("Y", "INDEX") if flag("node of resample", "generate_index", generate_index) else ("Y",)
        return self._node("resample", {"input": input}, outputs, how, compute_data_type, name)

    def resample_backward(
        self,
        loss: Tensor,
        input: Tensor,
        mode: str,
        window: Sequence[int],
        stride: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        padding_mode: str | None = None,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor:
        """The gradient of `resample` in its input; arguments as there. Of equal maxima the first has all of it."""
        how = {"mode": mode, "window": window, "stride": stride, "padding_mode": padding_mode}
        how = {**how, "pre_padding": pre_padding, "post_padding": post_padding}
        return self._node("resample_backward", {"loss": loss, "input": input}, ("DX",), how, compute_data_type, name)

    def rng(
        self,
        dim: Sequence[int],
        seed: Operand,
        offset: Operand = 0,
        distribution: str = "BERNOULLI",
        bernoulli_probability: float = 0.5,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor:
        """1 with bernoulli_probability, else 0: the bits of Philox4x32-10 that `jaxdnn.dropout_mask` has of this key.

        Args:
          dim: the result's sizes.
          seed: the key, an integer or a tensor of one int32 or int64.
          offset: the place of the first element in the key's numbers, likewise.
          distribution: "BERNOULLI"; cuDNN's UNIFORM and NORMAL are not served.
          bernoulli_probability: from 0 to 1, that of keeping an element.
          compute_data_type, name: the node's; the result is called `name::Y`.
        """
        how = {"distribution": distribution, "bernoulli_probability": bernoulli_probability}
        return self._node("rng", {"seed": seed, "offset": offset}, ("Y",), how, compute_data_type, name).set_dim(dim)

    def block_scale_quantize(
        self, input: Tensor, block_size: int, axis: int | None = None, compute_data_type: Any = None, name: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Numbers of few bits with a scale for each block of neighbours along an axis.

        scale = the least number of its dtype that is at least max |x| / the largest number of Y's dtype
        Y = x / scale, to nearest even, saturated

        Args:
          input: float32, bfloat16 or float16, of any sizes.
          block_size: an integer that divides the axis.
          axis: None is the last.
          compute_data_type, name: the node's; the results are called `name::Y` and `name::scale`.

        Returns:
          Y, whose dtype `set_data_type` has to tell (FP8_E4M3, FP8_E5M2, FP4_E2M1), and scale (FP8_E8M0, FP8_E4M3,
          FLOAT), one for each block. With `set_reordering_type("F8_128x4")` the scale lies in tiles of 128 rows and 4
          blocks, and has as many sizes as whole tiles have: those that fill up are bits of 0.
        """
        how = {"block_size": block_size, "axis": axis}
        return self._node("block_scale_quantize", {"input": input}, ("Y", "scale"), how, compute_data_type, name)

    def block_scale_dequantize(
        self,
        input: Tensor,
        descale: Tensor,
        block_size: Sequence[int] | int,
        is_negative_scale: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor:
        """y = input times the scale of its block. MXFP8 has blocks of 32 and FP8_E8M0, NVFP4 of 16 and FP8_E4M3.

        A `matmul` of the results takes them up: they are dequantised to bfloat16, which holds them, before they are
        multiplied, for no kernel of this library multiplies numbers with scales of blocks.

        Args:
          input: FP8_E4M3, FP8_E5M2 or FP4_E2M1, of any sizes.
          descale: FP8_E8M0, FP8_E4M3 or FLOAT, a number for each block; of reordering_type "F8_128x4" for each of whole
            tiles, whose columns, the axis of the smallest stride, are the blocks.
          block_size: an integer for each axis, or one, for the axis of the blocks: that along which descale is smaller.
          is_negative_scale: of FP8_E8M0: whether y is input divided by the scale.
          compute_data_type, name: the node's; the result is called `name::Y`.
        """
        block = (block_size,) if isinstance(block_size, int) else block_size
        how = {"block_size": block, "is_negative_scale": is_negative_scale}
        return self._node(
            "block_scale_dequantize", {"input": input, "descale": descale}, ("Y",), how, compute_data_type, name
        )


def _part(part: Any) -> Any:
    if isinstance(part, slice):
        return (part.start or 0, part.stop, 1 if part.step is None else part.step)
    return (*part, 1) if isinstance(part, list | tuple) and len(part) == 2 else part


def _window(padding: Any, pre: Any, post: Any, stride: Any, dilation: Any, mode: str) -> dict[str, Any]:
    given = {"padding": padding, "pre_padding": pre, "post_padding": post, "stride": stride, "dilation": dilation}
    return {**given, "convolution_mode": mode}
