"""Nodes that move data, and reductions."""

import math

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.graph.nodes import Inference, Kind, Run, is_integer, register
from jaxdnn._src.graph.pointwise import OPERANDS, WHOLE
from jaxdnn._src.graph.tensors import is_packed, order_of
from jaxdnn._src.tensor.reduce import reduce

REDUCTIONS = ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS")


def _infer_reduction(node: Inference) -> None:
    mode, x = node.choice("mode", REDUCTIONS), node.dim("input")
    node.flag("is_deterministic")
    whole = node.node.compute == "int32"
    node.typed("input", *(WHOLE if whole else OPERANDS))
    node.expect(not whole or mode not in ("AVG", "NORM2"), "compute_data_type", f"a float for mode {mode}", "int32")
    y = node.output_dim("Y", "set, with 1 for each axis that is reduced")
    fits = len(y) == len(x) and all(n in (1, m) for n, m in zip(y, x, strict=True))
    node.expect(fits, "Y.dim", f"sizes that are 1 or those of the input, {x}", y)
    node.derive(axes=tuple(axis for axis, (n, m) in enumerate(zip(y, x, strict=True)) if n == 1 != m))
    node.output("Y", y, "input")


def _reduction(node: Run) -> dict[str, Array]:
    """One of `reduce`'s nine ways; of an axis of size 1 that is left, of norms too, nothing is to be added."""
    x, axes = node.wide("input"), node.derived("axes")
    level = "batch_invariant" if node.attribute("is_deterministic") else None
    return {
        "Y": reduce(
            x, op=node.attribute("mode").lower(), axis=axes, keepdims=True, out_dtype=node.compute, determinism=level
        )
    }


register(
    Kind(
        "reduction",
        ("input",),
        ("Y",),
        {"mode": None, "is_deterministic": False},
        _infer_reduction,
        _reduction,
        calls=("reduce",),
    )
)


def _infer_reshape(node: Inference) -> None:
    mode, x = node.choice("reshape_mode", ("VIEW_ONLY", "LOGICAL")), node.dim("input")
    y = node.output_dim("Y", "set, for it is what the input is brought to")
    node.expect(math.prod(y) == math.prod(x), "Y.dim", f"{math.prod(x)} elements, as the input has", y)
    if mode == "VIEW_ONLY":
        tensor = node.node.inputs["input"]
        node.expect(
            is_packed(x, tensor.stride or ()),
            "input.stride",
            "packed, for a view keeps the memory as it is",
            tensor.stride,
        )
    node.output("Y", y, None, node.dtype("input"))
    out = node.node.outputs["Y"]
    if mode == "VIEW_ONLY":
        node.expect(
            is_packed(y, out.stride or ()), "Y.stride", "packed, for a view keeps the memory as it is", out.stride
        )


def _reshape(node: Run) -> dict[str, Array]:
    x, out = node.x("input"), node.out("Y")
    dim = out.dim or ()
    if node.attribute("reshape_mode") == "LOGICAL":
        return {"Y": x.reshape(dim)}
    order = order_of(out.stride or ())
    memory = x.transpose(node.order("input")).reshape([dim[axis] for axis in order])
    return {"Y": memory.transpose(sorted(range(len(order)), key=order.__getitem__))}


register(Kind("reshape", ("input",), ("Y",), {"reshape_mode": "VIEW_ONLY"}, _infer_reshape, _reshape))


def _infer_transpose(node: Inference) -> None:
    x, permutation = node.dim("input"), node.attribute("permutation")
    fits = isinstance(permutation, tuple) and all(map(is_integer, permutation))
    fits = fits and sorted(permutation) == list(range(len(x)))
    node.expect(fits, "permutation", f"an order of the axes 0 to {len(x) - 1}", permutation)
    node.output("Y", [x[p] for p in permutation], None, node.dtype("input"))


register(
    Kind(
        "transpose",
        ("input",),
        ("Y",),
        {"permutation": None},
        _infer_transpose,
        lambda node: {"Y": node.x("input").transpose(node.attribute("permutation"))},
    )
)


def _infer_slice(node: Inference) -> None:
    x, slices = node.dim("input"), node.attribute("slices")
    fits = isinstance(slices, tuple) and len(slices) == len(x)
    node.expect(fits, "slices", f"{len(x)} of (start, limit, stride), one for each axis", slices)
    dim = []
    for axis, (n, part) in enumerate(zip(x, slices, strict=True)):
        words = f"(start, limit, stride) with 0 <= start < limit <= {n}, or a limit of None, and a stride above 0"
        node.expect(isinstance(part, tuple) and len(part) == 3, f"slices[{axis}]", words, part)
        start, limit, stride = part[0], n if part[1] is None else part[1], part[2]
        fits = all(map(is_integer, (start, limit, stride))) and 0 <= start < limit <= n and stride > 0
        node.expect(fits, f"slices[{axis}]", words, part)
        dim.append(-((start - limit) // stride))
    node.output("Y", dim, "input", node.dtype("input"))


def _slice(node: Run) -> dict[str, Array]:
    return {"Y": node.x("input")[tuple(slice(*part) for part in node.attribute("slices"))]}


register(Kind("slice", ("input",), ("Y",), {"slices": None}, _infer_slice, _slice))


def _infer_concatenate(node: Inference) -> None:
    ports = list(node.node.inputs)
    first = node.dim(ports[0])
    axis = node.place("axis", len(first), "an axis of the inputs")
    node.place("in_place_index", len(ports), "the number of an input", optional=True)
    for port in ports[1:]:
        dim = node.dim(port)
        same = len(dim) == len(first) and all(
            a == b for i, (a, b) in enumerate(zip(dim, first, strict=True)) if i != axis
        )
        node.expect(same, port, f"of the sizes {first} but at axis {axis}", dim)
        node.typed(port, node.dtype(ports[0]))
    dim = list(first)
    dim[axis] = sum(node.dim(port)[axis] for port in ports)
    node.output("Y", dim, ports[0], node.dtype(ports[0]))


def _concatenate(node: Run) -> dict[str, Array]:
    """Copies; `in_place_index` only says which input XLA may let share the memory, which changes no value."""
    parts = [node.x(port) for port in node.node.inputs]
    wide = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    return {"Y": jnp.concatenate([part.astype(wide) for part in parts], axis=node.attribute("axis"))}


register(
    Kind("concatenate", ("inputs*",), ("Y",), {"axis": None, "in_place_index": None}, _infer_concatenate, _concatenate)
)
