"""Graphs traced from Python functions of jaxdnn's and JAX's operations: `trace`."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdnn._src.graph import trace_lax, trace_ops  # noqa: F401  # register primitives
from jaxdnn._src.graph.api import Graph
from jaxdnn._src.graph.errors import GraphError
from jaxdnn._src.graph.tensors import DTYPES, WIDE, packed
from jaxdnn._src.graph.tracing import Tracing, Value


def trace(function: Callable[..., Any], /, *args: Any, name: str | None = None) -> Graph:
    """The graph of a Python function of jaxdnn's, jax.numpy's and jax.nn's operations.

    Args:
      function: a function of arrays that returns arrays, in pytrees or alone. What is known when it is traced, such as
        loops over layers and numbers, it computes itself. Arrays that it closes over have to be arguments instead.
      args: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them.
      name: the graph's; None is the function's.

    Returns:
      A graph. Its inputs are the leaves of `args` that the function reads, named by the parameters and by the path to
      them ("x", "params['w']"), in the order of the function; its outputs are the leaves of what it returns, named
      "out" and the path to them ("out[0]"), in the order of their nodes. Tensors lie as the arrays do, so that
      `plan({"x": x, ...})` takes and returns these.

    Differentiation: of its plans and of `Graph.function`; a function that differentiates, by jax.grad, is traced too.

    Numerics: the graph's. A result that has no name in memory is held in the compute dtype, so what the function rounds
      between two operations the graph does not; operands of products, and outputs, are rounded to their dtypes.

    Raises:
      GraphError: the function applies a primitive that no node computes; the sentence names it and the line of the
        function's file. Nodes there are for the convolutions, products, activations, normalisations, poolings, softmax
        and attention of jaxdnn, and of jax.lax for elementwise operations, sums, maxima and minima, reshape, transpose,
        slice, concatenate, dot_general.

    Example:
      >>> x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
      >>> graph = dnn.graph.trace(lambda x, w: jax.nn.relu(x @ w + 1), x, w)
      >>> graph.plan().explain().fused
      (('matmul_0', 'add_1', 'relu_fwd_2'),)

    Sources: cuDNN's frontend has graphs that are built alone; the program is that of `jax.make_jaxpr`.
    """
    called = getattr(function, "__name__", "function") if name is None else name
    where = f"function {called!r}"
    if not callable(function):
        raise GraphError("function", "function", "a function of arrays", function)
    tracing = Tracing(called)
    leaves = jax.tree_util.tree_leaves_with_path(args)
    names = [_named(path, function) for path, _ in leaves]
    for label, (_, leaf) in zip(names, leaves, strict=True):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise GraphError(where, label, "an array or a jax.ShapeDtypeStruct", leaf)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    closed, results = _traced(function, where, shapes)
    inputs = []
    for label, (_, leaf) in zip(names, leaves, strict=True):
        dtype, dim = np.dtype(leaf.dtype).name, tuple(leaf.shape)
        if dtype not in DTYPES or 0 in dim or len(dim) > 8:
            words = f"of a dtype among {', '.join(DTYPES)}, with at most 8 axes and no empty one"
            raise GraphError(where, label, words, f"{dtype}{list(dim)}")
        tensor = tracing.g.tensor(dim or (1,), data_type=dtype, name=label)
        tracing.dims[tensor.uid] = dim or (1,)
        inputs.append(Value(tensor, tuple(range(len(dim))), dim, dtype))
    found = tracing.run(closed.jaxpr, closed.consts, inputs)
    paths = [f"out{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(results)]
    for label, value in zip(paths, found, strict=True):
        _output(tracing, label, value)
    read = {t.uid for node in tracing.g.nodes for t in node.inputs.values()}
    made = {t.uid for node in tracing.g.nodes for t in node.outputs.values()}
    tracing.g.tensors = {u: t for u, t in tracing.g.tensors.items() if u in read or u in made}
    return tracing.g.validate()


def _traced(function: Callable[..., Any], where: str, shapes: Any) -> tuple[Any, Any]:
    """The program of a function, and the shapes of what it returns; what it raises itself is raised."""

    def checked(*args: Any) -> Any:
        found = function(*args)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found, lambda v: isinstance(v, Iterator)):
            number = isinstance(leaf, float) or (isinstance(leaf, int) and -(2**31) <= leaf < 2**31)
            if not (number or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
                raise GraphError(where, f"out{jax.tree_util.keystr(path)}", "an array", leaf)
        return found

    try:
        return jax.make_jaxpr(checked, return_shape=True)(*shapes)
    except jax.errors.ConcretizationTypeError as error:
        said = str(error).partition("\n")[0]
        expected = "one in which nothing that Python decides depends on the values of arrays"
        raise GraphError(where, "function", expected, said) from error


def _named(path: Any, function: Callable[..., Any]) -> str:
    """What a leaf of the arguments is called: the parameter and the path within it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    position, kinds = path[0].idx, (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    has = position < len(parameters) and parameters[position].kind in kinds
    return f"{parameters[position].name if has else f'arg{position}'}{jax.tree_util.keystr(path[1:])}"


def _output(tracing: Tracing, label: str, value: Value) -> None:
    """Marks what the function returns, in the order of its axes."""
    where = f"function {tracing.g.name!r}"
    if any(tracing.broadcast(value, axis) for axis in range(len(value.shape))):
        raise GraphError(where, label, "computed from an array of its shape, for no node broadcasts alone", value.shape)
    tensor, dim = value.tensor, tracing.dim(value)
    maker = tracing.g.maker(tensor)
    own = [axis for axis in tracing.own(value) if axis is not None]
    free = maker is not None and tensor.is_virtual and not tracing.g.readers(tensor)
    same = tensor.data_type == value.dtype or (tensor.data_type in WIDE and value.dtype in WIDE)
    if free and same and len(own) == len(dim) and len(dim) == len(value.shape):
        tensor.set_stride(packed(dim, value.axes))  # pyright: ignore[reportArgumentType]  (none is None)
    else:
        order = [*range(len(value.shape))] or [None]
        tensor = tracing.arranged(value, order)
        if tensor is value.tensor:
            compute = "float64" if value.dtype == "float64" else "float32"
            tensor = tracing.made(
                tracing.g.identity(tensor, compute_data_type=compute), value.shape or (1,), value.dtype
            )
        tensor.set_stride(packed(value.shape or (1,)))
    tensor.set_data_type(value.dtype).set_output(True).set_name(label)
