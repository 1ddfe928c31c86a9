"""The nodes of jax.lax's primitives."""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

from jaxdnn._src.graph.tensors import WIDE
from jaxdnn._src.graph.tracing import PRIMITIVES, Refused, Tracing, Value, primitive

WHOLE = ("bool", "int8", "uint8", "int32")
# Primitives by mode; of integers those alone whose mode wraps, or compares, as JAX does.
MODE = {
    **{"add": "ADD", "add_any": "ADD", "sub": "SUB", "mul": "MUL", "max": "MAX", "min": "MIN", "neg": "NEG"},
    **{"abs": "ABS", "div": "DIV", "rem": "MOD", "pow": "POW", "atan2": "ATAN2", "sqrt": "SQRT", "rsqrt": "RSQRT"},
    **{"exp": "EXP", "log": "LOG", "sin": "SIN", "cos": "COS", "tan": "TAN", "erf": "ERF"},
    **{"floor": "FLOOR", "ceil": "CEIL", "tanh": "TANH_FWD", "logistic": "SIGMOID_FWD", "rounded_product": "MUL"},
    **{"eq": "CMP_EQ", "ne": "CMP_NEQ", "lt": "CMP_LT", "le": "CMP_LE", "gt": "CMP_GT", "ge": "CMP_GE"},
}
LOGICAL = {"and": "LOGICAL_AND", "or": "LOGICAL_OR", "not": "LOGICAL_NOT"}
REDUCTIONS = {"reduce_sum": "ADD", "reduce_max": "MAX", "reduce_min": "MIN", "reduce_prod": "MUL"}
# What changes no number.
KEPT = ("stop_gradient", "copy", "copy_p", "rounded", "optimization_barrier")


def result(eqn: Any) -> tuple[tuple[int, ...], str]:
    aval = eqn.outvars[0].aval
    return tuple(aval.shape), aval.dtype.name


def _elementwise(mode: str, tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    dtype = result(eqn)[1]
    if dtype in ("int8", "uint8") or (dtype == "bool" and not mode.startswith("CMP")):
        raise Refused("of floats or int32")
    if mode == "MAX" and _is_number(values[1], 0) and dtype in WIDE:
        return [tracing.pointwise("RELU_FWD", values[:1], dtype)]
    return [tracing.pointwise(mode, values, dtype)]


def _is_number(value: Value, number: float) -> bool:
    return value.tensor.value is not None and value.tensor.value == number


PRIMITIVES.update({name: ft.partial(_elementwise, mode) for name, mode in MODE.items()})


@primitive(*LOGICAL)
def _logical(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    if result(eqn)[1] != "bool":
        raise Refused("of truths")
    return [tracing.pointwise(LOGICAL[eqn.primitive.name], values, "bool")]


@primitive("square", "integer_pow", "exp2")
def _power(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    (x,), dtype = values, result(eqn)[1]
    if dtype not in WIDE:
        raise Refused("of floats")
    number = lambda v: tracing.constant(float(v), "float64" if dtype == "float64" else "float32")
    if eqn.primitive.name == "exp2":
        return [tracing.pointwise("POW", [number(2), x], dtype)]
    power = 2 if eqn.primitive.name == "square" else eqn.params["y"]
    if power == -1:
        return [tracing.pointwise("RECIPROCAL", [x], dtype)]
    if power not in (2, 3):
        return [tracing.pointwise("POW", [x, number(power)], dtype)]
    y = tracing.pointwise("MUL", [x, x], dtype)
    return [y if power == 2 else tracing.pointwise("MUL", [y, x], dtype)]


@primitive("one_minus_square")
def _one_minus_square(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """As tanh's derivative has it."""
    (x,), dtype = values, result(eqn)[1]
    one = tracing.constant(1.0, "float64" if dtype == "float64" else "float32")
    return [tracing.pointwise("SUB", [one, tracing.pointwise("MUL", [x, x], dtype)], dtype)]


@primitive("is_finite")
def _is_finite(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """What is subtracted from itself is 0 then alone."""
    (x,) = values
    zero = tracing.constant(0.0, "float32")
    return [tracing.pointwise("CMP_EQ", [tracing.pointwise("SUB", [x, x], x.dtype), zero], "bool")]


@primitive("clamp")
def _clamp(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    low, x, high = values
    dtype = result(eqn)[1]
    if dtype not in (*WIDE, "int32"):
        raise Refused("of floats or int32")
    return [tracing.pointwise("MIN", [tracing.pointwise("MAX", [x, low], dtype), high], dtype)]


@primitive("select_n")
def _select(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    mask, *cases = values
    if mask.dtype != "bool" or len(cases) != 2:
        raise Refused("between two arrays, by truths")
    dtype = result(eqn)[1]
    if dtype not in (*WIDE, "int32"):
        raise Refused("of floats or int32")
    return [tracing.pointwise("BINARY_SELECT", [cases[1], cases[0], mask], dtype)]


@primitive("convert_element_type")
def _convert(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Between floats of 16 bits and more, and from narrower ones and integers, nothing is done until it is read."""
    (x,), dtype = values, result(eqn)[1]
    if dtype == x.dtype or (dtype in WIDE and x.dtype != "int64"):
        return [Value(x.tensor, x.axes, x.shape, dtype)]
    if dtype == "bool":
        return [tracing.pointwise("CMP_NEQ", [x, tracing.constant(0, "int32")], "bool")]
    if dtype == "int32" and x.dtype in WHOLE:
        return [Value(x.tensor, x.axes, x.shape, dtype)]
    if dtype.startswith("float") and x.dtype in WIDE:
        tensor = tracing.converted(x.tensor, dtype)
        return [Value(tensor, x.axes, x.shape, dtype)]
    raise Refused(f"that rounds as a graph does, which is not from {x.dtype} to {dtype}")


@primitive(*KEPT)
def _kept(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> Sequence[Value]:
    return values


# Moves


@primitive("broadcast_in_dim")
def _broadcast(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    return [tracing.lifted(values[0], eqn.params["broadcast_dimensions"], result(eqn)[0])]


@primitive("reshape", "squeeze", "expand_dims")
def _reshape(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Where axes of 1 alone come or go, a matter of names."""
    (x,), (shape, dtype) = values, result(eqn)
    long = [axis for axis, n in enumerate(x.shape) if n > 1]
    if [x.shape[axis] for axis in long] == [n for n in shape if n > 1]:
        rest = iter(long)
        return [Value(x.tensor, tuple(x.axes[next(rest)] if n > 1 else None for n in shape), shape, dtype)]
    tensor = tracing.operand(x, range(len(x.shape)))
    made = tracing.made(tracing.g.reshape(tensor, reshape_mode="LOGICAL"), shape, dtype)
    return [tracing.value(made, range(len(shape)), shape, dtype)]


@primitive("transpose")
def _transpose(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    (x,), (shape, dtype) = values, result(eqn)
    return [Value(x.tensor, tuple(x.axes[axis] for axis in eqn.params["permutation"]), shape, dtype)]


@primitive("slice")
def _slice(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    (x,), (shape, dtype), how = values, result(eqn), eqn.params
    parts = zip(how["start_indices"], how["limit_indices"], how["strides"] or (1,) * len(shape), strict=True)
    return [_sliced(tracing, x, [slice(*part) for part in parts], shape, dtype)]


@primitive("split")
def _split(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    (x,), found, start = values, [], 0
    for var, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):
        parts = [slice(0, n, 1) for n in x.shape]
        parts[eqn.params["axis"]] = slice(start, start + size, 1)
        found.append(_sliced(tracing, x, parts, tuple(var.aval.shape), x.dtype))
        start += size
    return found


def _sliced(tracing: Tracing, x: Value, parts: list[slice], shape: tuple[int, ...], dtype: str) -> Value:
    if 0 in shape:
        raise Refused("that leaves something")
    tensor = tracing.operand(x, range(len(x.shape)))
    return tracing.value(tracing.made(tracing.g.slice(tensor, parts), shape, dtype), range(len(shape)), shape, dtype)


@primitive("concatenate")
def _concatenate(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    return _concatenated(tracing, eqn, values, eqn.params["dimension"])


@primitive("stack")
def _stack(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    at = eqn.params["axis"]
    longer = lambda sizes, new: (*sizes[:at], new, *sizes[at:])
    parts = [Value(v.tensor, longer(v.axes, None), longer(v.shape, 1), v.dtype) for v in values]
    return _concatenated(tracing, eqn, parts, at)


def _concatenated(tracing: Tracing, eqn: Any, values: Sequence[Value], axis: int) -> list[Value]:
    shape, dtype = result(eqn)
    parts = [tracing.operand(v, range(len(shape))) for v in values]
    made = tracing.made(tracing.g.concatenate(parts, axis), shape, dtype)
    return [tracing.value(made, range(len(shape)), shape, dtype)]


# Sums


@primitive(*REDUCTIONS)
def _reduce(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    (x,), (shape, dtype), axes = values, result(eqn), eqn.params["axes"]
    if dtype not in (*WIDE, "int32"):
        raise Refused("of floats or int32")
    reduced = reduction(tracing, x, REDUCTIONS[eqn.primitive.name], axes, dtype)
    kept = tuple(axis for axis in range(len(x.shape)) if axis not in axes)
    return [Value(reduced.tensor, tuple(reduced.axes[axis] for axis in kept), shape, dtype)]


def reduction(tracing: Tracing, x: Value, mode: str, axes: Sequence[int], dtype: str) -> Value:
    """An array reduced along axes, which are kept as 1."""
    if any(tracing.broadcast(x, axis) for axis in axes):
        raise Refused("along axes that are not broadcast")
    gone = {x.axes[axis] for axis in axes}
    dim = [1 if place in gone else n for place, n in enumerate(tracing.dim(x))]
    compute = "float64" if dtype == "float64" else "int32" if dtype == "int32" else "float32"
    made = tracing.made(tracing.g.reduction(x.tensor, mode, compute_data_type=compute), dim, dtype)
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    return Value(made, x.axes, shape, dtype)


@primitive("dot_general")
def _dot(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Batch axes first, then the rows of the one and the columns of the other; several of a kind are joined."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    (a, b), (shape, dtype) = values, result(eqn)
    types = (a.dtype, b.dtype)
    if "int32" in types or "bool" in types or ("int8" in types and dtype != "int32"):
        raise Refused("of floats, or of int8 with a result of int32")
    free = lambda v, *taken: [axis for axis in range(len(v.shape)) if not any(axis in t for t in taken)]
    lf, rf = free(a, lc, lb), free(b, rc, rb)
    sizes = lambda v, axes: [v.shape[axis] for axis in axes]
    batch, k = sizes(a, lb), math.prod(sizes(a, lc))
    if not lb and len(lf) > 1 and len(lf) < 6:  # rows stay as they are, and b serves all of them
        lead, rows = sizes(a, lf[:-1]), [a.shape[lf[-1]]]
    else:
        lead, rows = batch, [math.prod(sizes(a, lf))]
    columns = math.prod(sizes(b, rf))
    if len(batch) > 4:  # a node has no more
        batch = lead = [math.prod(batch)]
    wide = next((t for t in ("float64", "float32") if t in types), types[0]) if types[0] != types[1] else None
    left, right = tracing.operand(a, [*lb, *lf, *lc]), tracing.operand(b, [*rb, *rc, *rf])
    if wide and not all(t.startswith("float8") for t in types):
        left, right = (tracing.converted(t, wide) for t in (left, right))
    left = tracing.reshaped(left, [*lead, *rows, k])
    right = tracing.reshaped(right, [*(batch if lb else [1] * len(lead)), k, columns])
    compute = "int32" if "int8" in types else "float64" if "float64" in (*types, dtype) else "float32"
    made = tracing.made(tracing.g.matmul(left, right, compute_data_type=compute), [*lead, *rows, columns], dtype)
    order = [*range(len(shape))]
    if tracing.dims[made.uid] == shape:
        return [tracing.value(made, order, shape, dtype)]
    if len(rf) == 1 and len(shape) == len(tracing.dims[made.uid]) - 1 and rows == [1]:  # a vector and a matrix
        return [tracing.value(made, [*order[:-1], None, order[-1]], shape, dtype)]
    return [tracing.value(tracing.reshaped(made, shape or (1,)), order or [None], shape, dtype)]


# Programs within


@primitive(
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint", "remat2"
)
def _inner(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    how = eqn.params
    closed = next(how[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in how)
    return tracing.inner(closed, values)
