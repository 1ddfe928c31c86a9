"""The workspace that `explain` states is at least what a call's program allocates beside operands and result.

What XLA gives a Hopper kernel to read, and what a kernel writes, are arrays in memory, whatever it fuses; so are the
zeros that are put around an array. The calls are lowered for CUDA, and these arrays are counted.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.core.explain import traced_calls

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.conv.hopper import copies
from tests.conv import depthwise_cases as narrow
from tests.conv import hopper_cases as dense

KERNEL, PAD, SLICE = "stablehlo.custom_call", "stablehlo.pad", "stablehlo.slice"


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of a program whose calls are inlined: what makes it ("" an argument), of what, and its type."""

    made_by: str
    operands: tuple["Value", ...]
    type: Any

    @property
    def source(self) -> "Value":
        """The value that first held these bytes: a reshape copies nothing, nor does a slice or pad of nothing."""
        idle = self.made_by in (SLICE, PAD) and self.operands[0].type == self.type
        return self.operands[0].source if idle or self.made_by == "stablehlo.reshape" else self

    @property
    def bytes(self) -> int:
        return math.prod(self.type.shape) * -(-self.type.element_type.width // 8)


def inlined(functions: dict[str, Any], name: str, arguments: list[Value], found: list[Value]) -> list[Value]:
    """What a function returns; all the values that it makes are added to `found`."""
    (block,) = functions[name].regions[0].blocks
    known = dict(zip(block.arguments, arguments, strict=True))
    for op in block.operations:
        operands = [known[value] for value in op.operation.operands]
        if op.operation.name == "func.return":
            return operands
        if op.operation.name == "func.call":
            results = inlined(functions, op.callee.value, operands, found)
        else:
            results = [Value(op.operation.name, tuple(operands), value.type) for value in op.operation.results]
            if op.operation.name == "stablehlo.optimization_barrier":
                results = list(operands)  # in their memory
            found += results
        known |= dict(zip(op.operation.results, results, strict=True))
    raise AssertionError(f"{name} returns nothing")


def temporaries(function: Any, *avals: Any) -> list[Value]:
    """The arrays that a program allocates between its arguments and its results."""
    module: Any = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    functions = {f.sym_name.value: f for f in module.body.operations}
    values: list[Value] = []
    arguments = [Value("", (), value.type) for value in functions["main"].arguments]
    results = [value.source for value in inlined(functions, "main", arguments, values)]
    kernels = [value for value in values if value.made_by == KERNEL]
    assert kernels
    read = [operand for kernel in kernels for operand in kernel.operands]
    padded = [value for value in values if value.made_by == PAD]
    held = dict.fromkeys(value.source for value in (*read, *kernels, *padded))
    return [value for value in held if value.made_by not in ("", "stablehlo.constant") and value not in results]


def stated(function: Any, *avals: Any) -> int:
    (call,) = traced_calls(function, *avals, platform="cuda")
    (engine,) = (engine for engine in engines.registered(call.op) if engine.name == "hopper")
    assert engine.supports(call) is None
    found = engine.workspace(call)
    assert found is not None
    return found


def check(function: Any, *avals: Any) -> None:
    found = temporaries(function, *avals)
    needed = sum(value.bytes for value in found)
    assert stated(function, *avals) >= needed, [f"{value.made_by} {value.type}" for value in found]


def dense_call(op: str, case: Any, dtype: Any, outer: bool, **more: Any) -> tuple[Any, ...]:
    spatial = {1: "W", 2: "HW", 3: "DHW"}[len(case.sizes)]
    keywords = dict(
        stride=case.stride, padding=case.padding, dilation=case.dilation, groups=case.groups, layout=f"N{spatial}C",
        engine="hopper", filter_layout=f"O{spatial}I" if outer else f"{spatial}IO", **more,
    )  # fmt: skip
    if case.flip:
        keywords["mode"] = "convolution"
    x, w, dy = case.x, case.w(outer), case.dy
    operands = {"conv": (x, w), "conv_wgrad": (x, dy)}.get(op, (dy, w))
    static = {"conv_dgrad": (x,), "conv_wgrad": (w,)}.get(op, ())
    result = {"conv": dy, "conv_wgrad": w}.get(op, x)
    return keywords, [jax.ShapeDtypeStruct(shape, dtype) for shape in operands], static, result


TYPES = {
    "bf16": dict(dtype=jnp.bfloat16),
    "bf16 to f32": dict(dtype=jnp.bfloat16, out_dtype=jnp.float32),
    "e4m3": dict(dtype=jnp.float8_e4m3fn, out_dtype=jnp.bfloat16),
    "int8": dict(dtype=jnp.int8, out_dtype=jnp.int32),
    "tf32": dict(dtype=jnp.float32, precision="tf32"),
}


OPS = ("conv", "conv_dgrad", "conv_wgrad")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize(
    ("types", "name"),
    [("bf16", name) for name in dense.CASES] + [(t, n) for t in list(TYPES)[1:] for n in list(dense.CASES)[1::2]],
)
def test_dense(types: str, name: str, outer: bool, op: str):
    case = dense.CASES[name]
    keywords, avals, static, _ = dense_call(op, case, outer=outer, **TYPES[types])
    if op == "conv_wgrad" and case.groups > 1 and not types.startswith("bf16"):
        pytest.skip("the filter gradient takes groups in 16 bits")
    if avals[0].dtype.itemsize == 1 and case.groups > 1 and case.c // case.groups < 32:
        pytest.skip("groups are of 32 bytes of channels at least")
    check(lambda a, b: getattr(dnn, op)(a, b, *static, **keywords), *avals)


@pytest.mark.parametrize("like", [jnp.bfloat16, jnp.float32], ids=["prior bf16", "prior f32"])
@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("op", ["conv", "conv_transpose", "conv_wgrad"])
@pytest.mark.parametrize("name", ["3x3", "dilated, flipped", "pointwise", "one row", "few channels, dilated", "groups"])
@pytest.mark.parametrize("odd", [False, True], ids=["whole rows of 16 bytes", "odd rows"])
def test_dense_with_an_epilogue(odd: bool, name: str, op: str, out: Any, like: Any):
    case = dense.CASES[name]
    if odd and case.groups > 1:
        pytest.skip("a group has whole tiles")
    here = case._replace(c=case.c + (odd and op == "conv_transpose"), k=case.k + (odd and op != "conv_transpose"))
    keywords, avals, static, result = dense_call(op, here, jnp.bfloat16, outer=True, out_dtype=out)
    like = jax.ShapeDtypeStruct(result, like)
    if op == "conv_wgrad":
        check(lambda a, b, prior: dnn.conv_wgrad(a, b, *static, prior=prior, beta=1.0, **keywords), *avals, like)
        return
    bias = jax.ShapeDtypeStruct(result[-1:], jnp.bfloat16)
    check(
        lambda a, b, prior, bias, residual: getattr(dnn, op)(
            a, b, prior=prior, beta=0.5, bias=bias, residual=residual, activation="relu", **keywords
        ),
        *avals, like, bias, like,
    )  # fmt: skip


def test_a_filter_gradient_in_one_run_of_images_writes_its_result():
    """Padded to rows of 16 bytes in the result's own type: here one float8 filter to eight bfloat16 columns."""
    case = dense.Case(5, (7, 20), 1, 1, (1, 1), (1, 2), ((5, 0), (5, 1)), (1, 1))
    keywords, avals, static, _ = dense_call("conv_wgrad", case, outer=True, **TYPES["e4m3"])
    check(lambda a, b: dnn.conv_wgrad(a, b, *static, **keywords), *avals)


@pytest.mark.parametrize("mode", ["cross_correlation", "convolution"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", [name for name, case in narrow.CASES.items() if case[-1] is None])
def test_narrow_groups(name: str, op: str, mode: str):
    shape, taps, group, dtype, stride, padding, dilation, _ = narrow.CASES[name]
    *_, call, _, _ = narrow.operands(name)
    w, dy = (*taps, group, shape[-1]), (*shape[:1], *call.out[-len(taps) :], shape[-1])
    operands, static = {"conv": ((shape, w), ()), "conv_dgrad": ((dy, w), (shape,)), "conv_wgrad": ((shape, dy), (w,))}[
        op
    ]
    keywords = dict(stride=stride, padding=padding, dilation=dilation, groups=shape[-1] // group, mode=mode)
    layout = {1: "NWC", 2: "NHWC"}[len(taps)]
    run = lambda a, b: getattr(dnn, op)(a, b, *static, **keywords, layout=layout, engine="hopper")
    check(run, *(jax.ShapeDtypeStruct(s, narrow.DTYPES[dtype]) for s in operands))


@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
@pytest.mark.parametrize("channels", [512, 504, 8])
def test_narrow_groups_with_a_bias(channels: int, op: str):
    """The tiles of a large filter have 16 channels, and the biases of each are stored as 32 floats."""
    operands = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 32, 32, channels), (31, 31, 1, channels), (channels,))
    ]
    keywords: dict[str, Any] = dict(padding=15, groups=channels, engine="hopper")
    check(lambda x, w, bias: getattr(dnn, op)(x, w, bias=bias, **keywords), *operands)


def test_a_filter_gradient_of_few_channels_takes_its_partial_sums_alone():
    x = jax.ShapeDtypeStruct((2, 9, 8), jnp.bfloat16)
    run = lambda x, dy: dnn.conv_wgrad(x, dy, (3, 1, 8), padding=1, groups=8, layout="NWC", engine="hopper")
    check(run, x, x)
    written = [value.type.shape for value in temporaries(run, x, x) if value.made_by == KERNEL]
    assert written == [[1, 1, 1, 3, 8]]  # the partial sums


def test_the_count_sees_what_is_not_stated(monkeypatch: pytest.MonkeyPatch):
    """A negative control: the copies of the case with odd channels."""
    keywords, avals, _, _ = dense_call("conv", dense.CASES["odd channels"], jnp.bfloat16, outer=False)
    run = lambda a, b: dnn.conv(a, b, **keywords)
    found = temporaries(run, *avals)
    assert sorted(value.made_by for value in found) == [KERNEL, PAD, PAD]
    check(run, *avals)
    monkeypatch.setattr(copies, "copied", lambda before, after: 0)
    with pytest.raises(AssertionError, match=r"stablehlo\.pad tensor<4x12x12x32xbf16>"):
        check(run, *avals)
