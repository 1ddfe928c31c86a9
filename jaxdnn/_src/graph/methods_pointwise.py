"""The methods of `Graph` that make pointwise nodes, each of one line in a table: operands, parameters, formula."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxdnn._src.graph.errors import GraphError
from jaxdnn._src.graph.tensors import Tensor

Operand = Tensor | float | int


def by_place(ports: tuple[str, ...], asked: tuple[str, ...], made: Any) -> tuple[Any, ...]:
    """What a node made of the ports that were asked for, with None at the places of the others."""
    found = dict(zip(asked, made if isinstance(made, tuple) else (made,), strict=True))
    return tuple(found.get(port) for port in ports)


def method(mode: str, operands: str, formula: str, **parameters: Any) -> Callable[..., Tensor]:
    """A method that makes a node of a mode, with operands and then parameters by cudnn-frontend's names."""
    names, kind = operands.split(), inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, kind) for name in ("self", *names)]
    optional = {**parameters, "compute_data_type": None, "name": ""}
    needed = inspect.Parameter.empty
    given += [
        inspect.Parameter(name, kind, default=needed if value is ... else value) for name, value in optional.items()
    ]
    signature = inspect.Signature(given)

    def call(*args: Any, **named: Any) -> Tensor:
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            got = f"{len(args) - 1} by position, and {', '.join(named) or 'none by name'}"
            expected = f"{', '.join(list(signature.parameters)[1:])} ({error})"
            raise GraphError(f"node of mode {mode}", "arguments", expected, got) from error
        bound.apply_defaults()
        graph, *values = (bound.arguments.pop(name) for name in ("self", *names))
        return graph.pointwise(mode, *values, **bound.arguments)

    call.__name__ = call.__qualname__ = mode.lower()
    call.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    call.__doc__ = f"{formula}\n\n        Operands, dtypes, result and errors as of `pointwise`."
    return call


def _backward(mode: str, **parameters: Any) -> Callable[..., Tensor]:
    formula = f"dx = loss f'(input), where f is mode {mode}_FWD; at kinks as `jaxdnn.activation` says."
    return method(f"{mode}_BWD", "loss input", formula, **parameters)


RELU: dict[str, Any] = {"negative_slope": None, "lower_clip": None, "upper_clip": None}
SLOPE: dict[str, Any] = {"negative_slope": ...}


class Pointwise:
    """The methods that make pointwise nodes."""

    _node: Callable[..., Any]
    name_of: Callable[..., str]
    nodes: list[Any]

    def pointwise(
        self,
        mode: str,
        in_0: Operand,
        in_1: Operand | None = None,
        in_2: Operand | None = None,
        compute_data_type: Any = None,
        name: str = "",
        **attributes: Any,
    ) -> Tensor:
        """A pointwise node of any mode, by cuDNN's name of the mode, such as ADD, RELU_FWD or CMP_EQ.

        Args:
          mode: the name; each other method of this kind says which it has.
          in_0, in_1, in_2: as many operands as the mode has, tensors or numbers: of equal sizes, or of sizes that are
            1, which are broadcast (not of three operands), and of any dtypes of 8 bits or more.
          compute_data_type: "float32", "float64" or, of modes that integers have, "int32"; None is the graph's.
          name: the node's; its result is called `name::OUT_0`.
          attributes: axis, negative_slope, lower_clip, upper_clip, elu_alpha, softplus_beta, swish_beta; None is the
            default.

        Returns:
          A virtual tensor of the operands' sizes, broadcast; of comparisons and logic its dtype is bool unless set.

        Numerics: computed in the compute dtype, and rounded where the result is stored. NaN propagates; int32 wraps.

        Raises:
          GraphError: when the graph is validated, for a mode, operands, sizes, dtypes or parameters that do not fit.
        """
        inputs = {"IN_0": in_0, "IN_1": in_1, "IN_2": in_2}
        given = {key: value for key, value in attributes.items() if value is not None}
        name = self.name_of(name, str(mode).lower())
        return self._node("pointwise", inputs, ("OUT_0",), {"mode": mode, **given}, compute_data_type, name)

    add = method("ADD", "a b", "y = a + b.")
    bias = method("ADD", "input bias", "y = input + bias.")
    sub = method("SUB", "a b", "y = a - b.")
    mul = method("MUL", "a b", "y = a b.")
    scale = method("MUL", "input scale", "y = input scale.")
    div = method("DIV", "a b", "y = a / b.")
    add_square = method("ADD_SQUARE", "a b", "y = a + b^2.")
    max = method("MAX", "input0 input1", "y = max(input0, input1); NaN where one of them is.")
    min = method("MIN", "input0 input1", "y = min(input0, input1); NaN where one of them is.")
    mod = method("MOD", "input0 input1", "y = fmod(input0, input1): the remainder with the sign of input0.")
    floor_mod = method("FLOOR_MOD", "input0 input1", "y = input0 - floor(input0 / input1) input1: Python's %.")
    pow = method("POW", "input0 input1", "y = input0^input1.")
    atan2 = method("ATAN2", "input0 input1", "y = atan2(input0, input1): the angle of (input1, input0).")
    cmp_eq = method("CMP_EQ", "input comparison", "y = 1 where input = comparison, else 0.")
    cmp_neq = method("CMP_NEQ", "input comparison", "y = 1 where input ≠ comparison, else 0.")
    cmp_gt = method("CMP_GT", "input comparison", "y = 1 where input > comparison, else 0.")
    cmp_ge = method("CMP_GE", "input comparison", "y = 1 where input ≥ comparison, else 0.")
    cmp_lt = method("CMP_LT", "input comparison", "y = 1 where input < comparison, else 0.")
    cmp_le = method("CMP_LE", "input comparison", "y = 1 where input ≤ comparison, else 0.")
    logical_and = method("LOGICAL_AND", "a b", "y = 1 where neither a nor b is 0, else 0.")
    logical_or = method("LOGICAL_OR", "a b", "y = 1 where a or b is not 0, else 0.")
    logical_not = method("LOGICAL_NOT", "input", "y = 1 where input is 0, else 0.")
    identity = method("IDENTITY", "input", "y = input: a conversion to the dtype that is set of the result.")
    abs = method("ABS", "input", "y = |input|.")
    neg = method("NEG", "input", "y = -input.")
    ceil = method("CEIL", "input", "y = the least integer of at least input.")
    floor = method("FLOOR", "input", "y = the largest integer of at most input.")
    sqrt = method("SQRT", "input", "y = √input.")
    rsqrt = method("RSQRT", "input", "y = 1 / √input.")
    reciprocal = method("RECIPROCAL", "input", "y = 1 / input.")
    exp = method("EXP", "input", "y = exp(input).")
    log = method("LOG", "input", "y = ln(input).")
    sin = method("SIN", "input", "y = sin(input).")
    cos = method("COS", "input", "y = cos(input).")
    tan = method("TAN", "input", "y = tan(input).")
    erf = method("ERF", "input", "y = erf(input).")
    gen_index = method("GEN_INDEX", "input", "y = the index of each element along `axis`.", axis=...)
    binary_select = method(
        "BINARY_SELECT", "input0 input1 mask", "y = input0 where mask is not 0, else input1; sizes are equal."
    )
    relu = method(
        "RELU_FWD",
        "input",
        "y = lower + slope (x - lower) below the lower clip, the upper clip above it, else x.",
        **RELU,
    )
    leaky_relu = method("RELU_FWD", "input", "y = x above 0, negative_slope x below.", **SLOPE)
    elu = method("ELU_FWD", "input", "y = x above 0, elu_alpha (exp(x) - 1) below.", elu_alpha=1.0)
    softplus = method("SOFTPLUS_FWD", "input", "y = ln(1 + exp(beta x)) / beta.", softplus_beta=1.0)
    swish = method("SWISH_FWD", "input", "y = x / (1 + exp(-beta x)).", swish_beta=1.0)
    tanh = method("TANH_FWD", "input", "y = tanh(x).")
    sigmoid = method("SIGMOID_FWD", "input", "y = 1 / (1 + exp(-x)).")
    gelu = method("GELU_FWD", "input", "y = x (1 + erf(x / √2)) / 2.")
    gelu_approx_tanh = method("GELU_APPROX_TANH_FWD", "input", "y = x (1 + tanh(√(2 / π) (x + 0.044715 x^3))) / 2.")
    relu_backward = _backward("RELU", **RELU)
    leaky_relu_backward = _backward("RELU", **SLOPE)
    elu_backward = _backward("ELU", elu_alpha=1.0)
    softplus_backward = _backward("SOFTPLUS", softplus_beta=1.0)
    swish_backward = _backward("SWISH", swish_beta=1.0)
    tanh_backward = _backward("TANH")
    sigmoid_backward = _backward("SIGMOID")
    gelu_backward = _backward("GELU")
    gelu_approx_tanh_backward = _backward("GELU_APPROX_TANH")
