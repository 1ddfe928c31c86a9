"""The methods of `Graph` that make nodes of attention, with cudnn-frontend's names.

Each returns the node's outputs: virtual tensors until `set_output(True)`. An operand may be a number, which becomes a
constant. What does not fit raises GraphError when the graph is validated, in a sentence that names node and attribute.
"""

from collections.abc import Callable
from typing import Any

from jaxdnn._src.graph.errors import GraphError, flag
from jaxdnn._src.graph.methods_pointwise import Operand, by_place
from jaxdnn._src.graph.tensors import Tensor

ScoreMod = Callable[[Any, Tensor], Tensor]


class Attention:
    """The methods that make nodes of attention."""

    _node: Callable[..., Any]

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_inference: bool | None = None,
        attn_scale: Operand | None = None,
        bias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: str = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[float, Operand] | tuple[float, Operand, Operand] | None = None,
        compute_data_type: Any = None,
        name: str = "",
        generate_stats: bool | None = None,
        sink_token: Tensor | None = None,
        score_mod: ScoreMod | None = None,
    ) -> Any:
        """O = softmax(attn_scale q k^T + bias, masked) v, as `jaxdnn.attention`.

        Args:
          q: (B, H, S, D); floats of 16 bits or more.
          k, v: (B, H', S', D) and (B, H', S', D'), of q's dtype; H' divides H.
          is_inference: False asks for Stats; generate_stats, if given, decides instead.
          attn_scale: a number, or a tensor passed by value and known when the plan is traced; 1 by default.
          bias: of sizes that are 1 or those of (B, H, S, S').
          use_alibi_mask: adds slope_h (column - row), with ALiBi's slopes; needs a right bound of 0.
          use_padding_mask: with seq_len_q and seq_len_kv, int32 (B, 1, 1, 1), beyond which nothing counts.
          use_causal_mask, use_causal_mask_bottom_right: a right bound of 0, from the top left or the bottom right.
          sliding_window_length, diagonal_band_left_bound: how many keys are seen up to and with the diagonal.
          diagonal_band_right_bound: how many keys are seen beyond the diagonal.
          diagonal_alignment: "TOP_LEFT" or "BOTTOM_RIGHT", where the diagonal begins.
          dropout: None, or the probability to drop, the seed, and how many elements of the seed's numbers have been
            used, a multiple of 4; without it 0.
          compute_data_type: "float32", or "float64" of float64; None is the graph's.
          name: the node's; the results are called `name::O` and `name::Stats`.
          sink_token: (1, H, 1, 1), a logit that takes its share of each softmax and has no value.
          score_mod: a function (graph, scores) that builds pointwise nodes on the tensor of scores (B, H, S, S'), which
            are scaled, and returns what takes their place; bias and masks follow. `gen_index` along axes 2 and 3 is the
            query and the key. What it reads besides is of sizes that are 1 or those of the scores, or a number.

        Returns:
          O (B, H, S, D') and Stats (B, H, S, 1), the logarithm of the softmax's denominator, None where it is not
          generated.
        """
        masks = (use_alibi_mask, use_padding_mask, use_causal_mask, use_causal_mask_bottom_right, sliding_window_length)
        how, seeds = _masks(*masks, diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound, dropout)
        inputs = {"q": q, "k": k, "v": v, "attn_scale": attn_scale, "bias": bias, "seq_len_q": seq_len_q}
        inputs = {**inputs, "seq_len_kv": seq_len_kv, "sink_token": sink_token, **seeds}
        ports = ("O", "Stats")
        asked = ports if _with_stats(is_inference, generate_stats) else ports[:1]
        made = self._node("sdpa", inputs, asked, how, compute_data_type, name, score_mod)
        return by_place(ports, asked, made)

    def sdpa_fp8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descale_q: Operand,
        descale_k: Operand,
        descale_v: Operand,
        descale_s: Operand,
        scale_s: Operand,
        scale_o: Operand,
        is_inference: bool | None = None,
        attn_scale: Operand | None = None,
        bias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: str = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        compute_data_type: Any = None,
        name: str = "",
        generate_stats: bool | None = None,
        sink_token: Tensor | None = None,
        score_mod: ScoreMod | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """`sdpa` of floats of 8 bits with their factors: P = softmax(attn_scale descale_q descale_k q k^T), masked.

        o = descale_v (scale_s descale_s) P v    O = scale_o o    Amax_S = max P    Amax_O = max |o|

        Args:
          q, k, v: as in `sdpa`, of FP8_E4M3 or FP8_E5M2.
          descale_q, descale_k, descale_v, descale_s, scale_s, scale_o: a number, or a tensor of one float32. P is not
            rounded to 8 bits, as cuDNN's kernels round it, so of scale_s and descale_s only the product matters.
          is_inference, ..., score_mod: as in `sdpa`.

        Returns:
          O, Stats or None, Amax_S and Amax_O, which are (1, 1, 1, 1): the next call's factors are chosen by them. A
          kernel serves where descale_q and descale_k are numbers and nothing reads Amax_S.
        """
        masks = (use_alibi_mask, use_padding_mask, use_causal_mask, use_causal_mask_bottom_right, sliding_window_length)
        how, _ = _masks(*masks, diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound, None)
        inputs = {"q": q, "k": k, "v": v, "descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v}
        inputs = {**inputs, "descale_s": descale_s, "scale_s": scale_s, "scale_o": scale_o, "attn_scale": attn_scale}
        inputs = {**inputs, "bias": bias, "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv, "sink_token": sink_token}
        stats = _with_stats(is_inference, generate_stats)
        outputs = ("O", *(("Stats",) if stats else ()), "Amax_S", "Amax_O")
        o, *found = self._node("sdpa_fp8", inputs, outputs, how, compute_data_type, name, score_mod)
        return o, found[0] if stats else None, found[-2], found[-1]

    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        attn_scale: Operand | None = None,
        bias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: str = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[float, Operand] | tuple[float, Operand, Operand] | None = None,
        compute_data_type: Any = None,
        name: str = "",
        sink_token: Tensor | None = None,
        generate_dbias: bool = False,
        score_mod: ScoreMod | None = None,
        use_deterministic_algorithm: bool = False,
    ) -> tuple[Tensor, ...]:
        """The gradients of `sdpa`, of its operands, o, stats and the gradient dO that reaches o; arguments as there.

        The derivative of score_mod is taken of its nodes: cuDNN's score_mod_bprop is not needed.

        With use_deterministic_algorithm an engine of `jaxdnn.determinism`'s level "run_to_run" serves.

        Returns:
          dQ, dK, dV, then dBias with generate_dbias, and dSink_token if there is a sink.
        """
        masks = (use_alibi_mask, use_padding_mask, use_causal_mask, use_causal_mask_bottom_right, sliding_window_length)
        how, seeds = _masks(*masks, diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound, dropout)
        inputs = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats, "attn_scale": attn_scale, "bias": bias}
        inputs = {**inputs, "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv, "sink_token": sink_token, **seeds}
        more = ("dBias",) if flag("node of attention", "generate_dbias", generate_dbias) else ()
        more = (*more, "dSink_token") if sink_token is not None else more
        how["use_deterministic_algorithm"] = use_deterministic_algorithm
        return self._node("sdpa_backward", inputs, ("dQ", "dK", "dV", *more), how, compute_data_type, name, score_mod)

    def rope(
        self, input: Tensor, freqs: Tensor, output_scale: float = 1.0, compute_data_type: Any = None, name: str = ""
    ) -> Tensor:
        """Rotary embedding: the last D' of D features are turned in pairs by angles, and all are scaled.

        lo' = output_scale (lo cos a - hi sin a),  hi' = output_scale (hi cos a + lo sin a)

        Args:
          input: (B, H, S, D), floats of 16 bits or more; lo and hi are the halves of its last D' features.
          freqs: the angles, (S, 1, 1, D') with an even D' of at most D, of which the first half is read.
          output_scale: a number.
          compute_data_type, name: the node's; the result, of input's sizes, is called `name::Y`.
        """
        return self._node(
            "rope", {"input": input, "freqs": freqs}, ("Y",), {"output_scale": output_scale}, compute_data_type, name
        )

    def rope_backward(
        self, input: Tensor, freqs: Tensor, output_scale: float = 1.0, compute_data_type: Any = None, name: str = ""
    ) -> Tensor:
        """`rope` by the opposite angles: its gradient in the input."""
        return self._node(
            "rope_backward",
            {"input": input, "freqs": freqs},
            ("Y",),
            {"output_scale": output_scale},
            compute_data_type,
            name,
        )


def _with_stats(is_inference: Any, generate_stats: Any) -> bool:
    given = {"is_inference": is_inference, "generate_stats": generate_stats}
    for name, value in given.items():
        _ = value is None or flag("node of attention", name, value)
    return is_inference is False if generate_stats is None else generate_stats


def _masks(
    alibi: bool,
    padding: bool,
    causal: bool,
    corner: bool,
    window: int | None,
    alignment: str,
    left: int | None,
    right: int | None,
    dropout: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of masks and dropout, and the seed and the offset, by port."""
    if dropout is not None and not (isinstance(dropout, list | tuple) and len(dropout) in (2, 3)):
        expected = "None, or the probability to drop, the seed and perhaps an offset"
        raise GraphError("node of attention", "dropout", expected, dropout)
    rate, *seeds = (0.0,) if dropout is None else dropout
    how = {"use_alibi_mask": alibi, "use_padding_mask": padding, "use_causal_mask": causal}
    how = {**how, "use_causal_mask_bottom_right": corner, "sliding_window_length": window}
    how = {**how, "diagonal_alignment": alignment, "diagonal_band_left_bound": left, "diagonal_band_right_bound": right}
    return {**how, "dropout_probability": rate}, dict(zip(("seed", "offset"), seeds, strict=False))
