"""The methods of `Graph` that make nodes of normalisation, with cudnn-frontend's names.

Each returns the node's outputs: virtual tensors until `set_output(True)`. An operand may be a number, which becomes a
constant. What does not fit raises GraphError when the graph is validated, in a sentence that names node and attribute.
"""

from collections.abc import Callable
from typing import Any

from jaxdnn._src.graph.errors import flag
from jaxdnn._src.graph.methods_pointwise import Operand, by_place
from jaxdnn._src.graph.tensors import Tensor

STATISTICS = ("Y", "MEAN", "INV_VARIANCE")
RUNNING = ("NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")
GRADIENTS = ("DX", "DSCALE", "DBIAS")


class Norms:
    """The methods that make nodes of normalisation."""

    _node: Callable[..., Any]

    def batchnorm(
        self,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        in_running_mean: Tensor | None = None,
        in_running_var: Tensor | None = None,
        epsilon: Operand = 1e-5,
        momentum: Operand | None = None,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """Y = (x - mean) INV_VARIANCE scale + bias, with the statistics of each channel, over the batch and space.

        Args:
          input: (N, C, spatial...), floats of 16 bits or more.
          scale, bias, in_running_mean, in_running_var: (1, C, 1, ...).
          epsilon: a number, or a tensor that is passed by value and known when the plan is traced.
          momentum: a number or a tensor of one: next = (1 - momentum) running + momentum statistic, the variance
            unbiased. Given with the running statistics, or none of the three.
          compute_data_type, name: the node's; the results are called `name::Y` and so on.

        Returns:
          Y, MEAN, INV_VARIANCE = 1 / √(variance + epsilon), NEXT_RUNNING_MEAN and NEXT_RUNNING_VAR, which are None
          without running statistics; all but Y (1, C, 1, ...) in float32.
        """
        inputs = {"input": input, "scale": scale, "bias": bias, "in_running_mean": in_running_mean}
        inputs = {**inputs, "in_running_var": in_running_var, "epsilon": epsilon, "momentum": momentum}
        asked = (*STATISTICS, *(RUNNING if momentum is not None else ()))
        made = self._node("batchnorm", inputs, asked, {}, compute_data_type, name)
        return by_place((*STATISTICS, *RUNNING), asked, made)

    def batchnorm_inference(
        self,
        input: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        scale: Tensor,
        bias: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor:
        """Y = (input - mean) inv_variance scale + bias, of given statistics (1, C, 1, ...).

        As in cuDNN, inv_variance is 1 / √(variance + epsilon), not the variance.
        """
        inputs = {"input": input, "mean": mean, "inv_variance": inv_variance, "scale": scale, "bias": bias}
        return self._node("batchnorm_inference", inputs, ("Y",), {}, compute_data_type, name)

    def batchnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """DX, DSCALE and DBIAS of `batchnorm`, of its input and statistics; `grad` reaches Y."""
        return self._backward("batchnorm_backward", grad, input, scale, mean, inv_variance, compute_data_type, name)

    def layernorm(
        self,
        norm_forward_phase: str,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        epsilon: Operand,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Any:
        """Y = (x - mean) INV_VARIANCE scale + bias, with statistics over the axes at which the scale is not 1.

        Args:
          norm_forward_phase: "TRAINING" or "INFERENCE".
          input: any sizes; floats of 16 bits or more.
          scale, bias: of the input's rank, each size 1 or the input's; where all are 1, the last axis is normalised.
          epsilon: a number, or a tensor that is passed by value and known when the plan is traced.
          compute_data_type, name: the node's; the results are called `name::Y` and so on.

        Returns:
          Y, MEAN and INV_VARIANCE = 1 / √(variance + epsilon). The last two have 1 along the normalised axes, are in
          float32, and are None in phase INFERENCE.
        """
        return self._forward(
            "layernorm", norm_forward_phase, True, input, scale, bias, epsilon, compute_data_type, name
        )

    def adalayernorm(
        self,
        norm_forward_phase: str,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        epsilon: Operand = 1e-5,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Any:
        """As `layernorm`, with a scale and a bias for each sample: their first size is the input's. No bias is 0."""
        return self._forward(
            "adalayernorm", norm_forward_phase, True, input, scale, bias, epsilon, compute_data_type, name
        )

    def instancenorm(
        self,
        norm_forward_phase: str,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        epsilon: Operand,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Any:
        """As `layernorm` of (N, C, spatial...), with statistics over space, scale and bias (1, C, 1, ...)."""
        return self._forward(
            "instancenorm", norm_forward_phase, True, input, scale, bias, epsilon, compute_data_type, name
        )

    def rmsnorm(
        self,
        norm_forward_phase: str,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        epsilon: Operand = 1e-5,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Any:
        """Y = x INV_VARIANCE scale + bias, with INV_VARIANCE = 1 / √(mean x^2 + epsilon) over the axes of `layernorm`.

        Arguments as of `layernorm`; no bias is 0. Returns Y and INV_VARIANCE, which is None in phase INFERENCE.
        """
        return self._forward("rmsnorm", norm_forward_phase, False, input, scale, bias, epsilon, compute_data_type, name)

    def layernorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """DX, DSCALE and DBIAS of `layernorm`, of its input and statistics; `grad` reaches Y."""
        return self._backward("layernorm_backward", grad, input, scale, mean, inv_variance, compute_data_type, name)

    def adalayernorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """DX, DSCALE and DBIAS of `adalayernorm`, the last two for each sample."""
        return self._backward("adalayernorm_backward", grad, input, scale, mean, inv_variance, compute_data_type, name)

    def instancenorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """DX, DSCALE and DBIAS of `instancenorm`."""
        return self._backward("instancenorm_backward", grad, input, scale, mean, inv_variance, compute_data_type, name)

    def rmsnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        inv_variance: Tensor,
        has_dbias: bool,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """DX, DSCALE and DBIAS of `rmsnorm`; without has_dbias the last is None."""
        inputs = {"grad": grad, "input": input, "scale": scale, "inv_variance": inv_variance}
        with_bias = flag("node of rmsnorm_backward", "has_dbias", has_dbias)
        asked = GRADIENTS if with_bias else GRADIENTS[:2]
        made = self._node("rmsnorm_backward", inputs, asked, {}, compute_data_type, name)
        return by_place(GRADIENTS, asked, made)

    def _forward(
        self,
        op: str,
        phase: str,
        mean: bool,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        epsilon: Operand,
        compute: Any,
        name: str,
    ) -> Any:
        inputs = {"input": input, "scale": scale, "bias": bias, "epsilon": epsilon}
        trained = isinstance(phase, str) and phase == "TRAINING"
        ports = STATISTICS if mean else (STATISTICS[0], STATISTICS[2])
        asked = ports if trained else ports[:1]
        made = self._node(op, inputs, asked, {"norm_forward_phase": phase}, compute, name)
        return by_place(ports, asked, made)

    def _backward(
        self,
        op: str,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute: Any,
        name: str,
    ) -> Any:
        inputs = {"grad": grad, "input": input, "scale": scale, "mean": mean, "inv_variance": inv_variance}
        return self._node(op, inputs, GRADIENTS, {}, compute, name)

    def genstats(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> tuple[Tensor, Tensor]:
        """SUM = Σ x and SQ_SUM = Σ x^2 of every channel of (N, C, spatial...): (1, C, 1, ...) in float32."""
        return self._node("genstats", {"input": input}, ("SUM", "SQ_SUM"), {}, compute_data_type, name)

    def bn_finalize(
        self,
        sum: Tensor,
        sq_sum: Tensor,
        scale: Tensor,
        bias: Tensor,
        input_running_mean: Tensor | None = None,
        input_running_var: Tensor | None = None,
        epsilon: Operand = 1e-5,
        momentum: Operand | None = None,
        accum_count: Operand = 1,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """What `genstats` added, made into the statistics of a batch and the line that normalises by them.

        EQ_SCALE = scale INV_VARIANCE and EQ_BIAS = bias - mean EQ_SCALE, with mean = sum / accum_count and the variance
        sq_sum / accum_count - mean^2; running statistics and epsilon as in `batchnorm`.

        Returns:
          EQ_SCALE, EQ_BIAS, MEAN, INV_VARIANCE, NEXT_RUNNING_MEAN and NEXT_RUNNING_VAR, which are None without running
          statistics; all of the sizes of sum, (1, C, 1, ...), in float32.
        """
        inputs = {"sum": sum, "sq_sum": sq_sum, "scale": scale, "bias": bias, "input_running_mean": input_running_mean}
        inputs = {**inputs, "input_running_var": input_running_var, "epsilon": epsilon, "momentum": momentum}
        ports = ("EQ_SCALE", "EQ_BIAS", *STATISTICS[1:], *RUNNING)
        asked = ports if momentum is not None else ports[:4]
        made = self._node("bn_finalize", {**inputs, "accum_count": accum_count}, asked, {}, compute_data_type, name)
        return by_place(ports, asked, made)

    def bn_finalize_inference(
        self,
        mean: Tensor,
        variance: Tensor,
        scale: Tensor,
        bias: Tensor,
        epsilon: Operand,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor]:
        """EQ_SCALE = scale / √(variance + epsilon) and EQ_BIAS = bias - mean EQ_SCALE, all (1, C, 1, ...)."""
        inputs = {"mean": mean, "variance": variance, "scale": scale, "bias": bias, "epsilon": epsilon}
        return self._node("bn_finalize_inference", inputs, ("EQ_SCALE", "EQ_BIAS"), {}, compute_data_type, name)

    def dbn_weight(
        self,
        dy: Tensor,
        input: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        scale: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, ...]:
        """DSCALE, DBIAS, and EQ_SCALE_DY, EQ_SCALE_X, EQ_BIAS, of which `batchnorm`'s gradient is made.

        dx = EQ_SCALE_DY dy + EQ_SCALE_X x + EQ_BIAS. All are (1, C, 1, ...) in float32.
        """
        inputs = {"dy": dy, "input": input, "mean": mean, "inv_variance": inv_variance, "scale": scale}
        outputs = ("DSCALE", "DBIAS", "EQ_SCALE_DY", "EQ_SCALE_X", "EQ_BIAS")
        return self._node("dbn_weight", inputs, outputs, {}, compute_data_type, name)
