"""Reads and checks the arguments of the convolutions, once for all of them."""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation import epilogues
from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.activation.formulas import read_activation
from jaxdnn._src.conv import primitive
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.primitive import ConvSpec
from jaxdnn._src.core import blending, checks, primitives, selection, windows
from jaxdnn._src.core.blending import FLOATS, Types
from jaxdnn._src.core.cropping import cropped
from jaxdnn._src.core.determinism import require, required, satisfies
from jaxdnn._src.core.frames import Frame
from jaxdnn._src.core.rounding import at_edges

MODES = ("cross_correlation", "convolution")
_FLOAT8 = {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)}
_INT8, _INT32, _F32, _F64 = (np.dtype(t) for t in (jnp.int8, jnp.int32, jnp.float32, jnp.float64))


@dataclasses.dataclass(frozen=True)
class Options:
    """What the convolutions have in common, as it was given."""

    stride: Any
    padding: Any
    dilation: Any
    groups: Any
    mode: Any
    accumulate: Any
    precision: Any
    out_dtype: Any
    engine: Any
    determinism: Any


# ---- geometry and types ----------------------------------------------------------------------------------------------


def spec(
    frame: Frame, options: Options, x_shape: tuple[int, ...], w_shape: tuple[int, ...], arrays: Mapping
) -> ConvSpec:
    """The spec of a call, without its epilogue, from the shapes of x and w: those of arrays, or given themselves."""
    layout, filt = frame.layout, frame.filter_layout
    sizes = tuple(x_shape[axis] for axis in layout.spatial)
    taps = tuple(w_shape[axis] for axis in filt.spatial)
    x, w = (name if name in arrays else f"{name}_shape" for name in "xw")
    groups = _groups(frame, options.groups, x, x_shape, w, w_shape)
    if min(taps) < 1:
        raise ValueError(f"`{w}` must have at least one tap along every axis, got {taps}.")
    moves = {"stride": options.stride, "padding": options.padding, "dilation": options.dilation}
    cut, window = cropped(windows.window(**moves, sizes=sizes, taps=taps, negative=True), layout)
    flip = checks.choice("mode", options.mode, MODES) == "convolution"
    geo = Geometry(**vars(window), flip=flip, groups=groups)
    padded = tuple(size + sum(pad) for size, pad in zip(geo.sizes, geo.padding, strict=True))
    if max(padded) >= 2**31:
        raise ValueError(f"`padding` must leave padded sizes below 2^31, got {padded}.")
    if min(geo.out) < 1:
        fit = f"`{w}` must fit into the padded input" if x == "x" else f"`{x}` must have room for w when padded"
        hint = windows.in_other_filter_layout(filt, w_shape, w_shape[filt.input]) if x == "x" else ""
        span = f"taps {taps} that span {geo.extents} at dilation {geo.dilation} for padded sizes {padded}"
        raise ValueError(f"{fit}, got {span}{hint}.")
    found = types(arrays, options.accumulate, options.precision, options.out_dtype)
    return ConvSpec(
        geo=geo,
        layout=layout,
        filter=filt,
        cut=cut,
        accumulate=found.accumulate,
        precision=options.precision,
        out_dtype=found.out,
        engine=options.engine,
        level=required(options.determinism),
    )


def _groups(frame: Frame, value: Any, x: str, x_shape: tuple[int, ...], w: str, w_shape: tuple[int, ...]) -> int:
    """Reads `groups` for arrays, or shapes, of these names."""
    layout, filt = frame.layout, frame.filter_layout
    c, i, k = x_shape[layout.channel], w_shape[filt.input], w_shape[filt.output]
    groups = _positive_groups(value)
    if c % groups or k % groups:
        raise ValueError(f"`groups` must divide the {c} input and {k} output channels, got {groups}.")
    if c == i * groups:
        return groups
    # Arrays as PyTorch has them, with the layouts of JAX, or the other way round, are the commonest cause.
    hint = windows.in_other_layout(frame.given, "x", x_shape, i * groups)
    if x != "x":
        raise ValueError(f"`{x}` must have {i * groups} channels, {i} in w for each of {groups} groups, got {c}{hint}.")
    hint = hint or windows.in_other_filter_layout(filt, w_shape, c // groups)
    raise ValueError(
        f"`{w}` must have {c // groups} input channels for {c} channels of x in {groups} groups, got {i}{hint}."
    )


def _positive_groups(value: Any) -> int:
    groups = checks.integer("groups", value)
    if groups < 1:
        raise ValueError(f"`groups` must be at least 1, got {groups}.")
    return groups


def types(arrays: Mapping[str, Any], accumulate: Any, precision: Any, out_dtype: Any) -> Types:
    """Checks the dtypes of the operands, and reads those of the accumulator and the result."""
    names, dtypes = list(arrays), [checks.dtype(n, v, (*FLOATS, jnp.int8)) for n, v in arrays.items()]
    if len(set(dtypes)) > 1 and not set(dtypes) <= _FLOAT8:
        raise TypeError(
            f"`{names[1]}` must have the dtype of `{names[0]}` or both must be float8, got {dtypes[1]} and {dtypes[0]}."
        )
    integer = dtypes[0] == _INT8
    natural = _INT32 if integer else np.promote_types(dtypes[0], _F32) if dtypes[0] in (_F32, _F64) else _F32
    acc = natural if accumulate is None else _accumulator(accumulate, natural)
    choices = (*FLOATS, jnp.int8, jnp.int32) if integer else FLOATS
    out = checks.out_dtype(out_dtype, dtypes[0], choices, acc)
    checks.choice("precision", precision, (None, "tf32"))
    if precision == "tf32" and (dtypes[0] != _F32 or acc != _F32):
        raise TypeError(
            f"`precision` 'tf32' needs float32 operands and accumulator, got {dtypes[0].name} and {acc.name}."
        )
    return Types(acc, out)


def _accumulator(value: Any, natural: np.dtype) -> np.dtype:
    acc = checks.as_dtype("accumulate", value, (_INT32,) if natural == _INT32 else (_F32, _F64))
    if acc.itemsize < natural.itemsize:
        raise TypeError(f"`accumulate` must be at least {natural.name} for these operands, got {acc.name}.")
    if acc == _F64 and jax.dtypes.canonicalize_dtype(_F64) != _F64:
        raise TypeError("`accumulate` float64 needs JAX's 64-bit mode, expected jax_enable_x64 to be on, got off.")
    return acc


def check_dy(spec: ConvSpec, dy: Array, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> None:
    """Checks that dy is shaped like the result of the convolution of these shapes."""
    layout = spec.layout
    expected = layout.shape(x_shape[layout.batch], spec.output_sizes, w_shape[spec.filter.output])
    checks.shape("dy", dy, expected, f"as a convolution of {x_shape} and {w_shape} has (axes {layout.name})")


def transposed(
    frame: Frame, options: Options, x: Array, w: Array, output_padding: Any
) -> tuple[Array, tuple[int, ...], Options]:
    """A transposed convolution's x, the shape of its result, and its options with the padding as numbers.

    Zeros follow x where the result is longer than x alone would make it.
    """
    layout, filt = frame.layout, frame.filter_layout
    sizes, taps = [x.shape[a] for a in layout.spatial], [w.shape[a] for a in filt.spatial]
    rank = len(sizes)
    extra = checks.integers("output_padding", output_padding, rank, minimum=0)
    strides = checks.integers("stride", options.stride, rank, minimum=1)
    targets = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    moves = {"stride": strides, "padding": options.padding, "dilation": options.dilation}
    window = windows.window(**moves, sizes=targets, taps=taps, negative=True)
    if any(e >= max(u, d) for e, u, d in zip(extra, strides, window.dilation, strict=True)):
        raise ValueError(
            f"`output_padding` must be smaller than the stride {strides} or the dilation {window.dilation}, "
            f"got {extra}."
        )
    spans = zip(sizes, strides, window.padding, window.extents, extra, strict=True)
    result = [(p - 1) * u - low - high + extent + e for p, u, (low, high), extent, e in spans]
    if isinstance(options.padding, str) and options.padding != "VALID":
        if any(extra):
            raise ValueError(f'`output_padding` must be 0 for padding "{options.padding}", got {extra}.')
        result = targets
    if min(result) < 1:
        raise ValueError(f"`padding` must leave a result, got sizes {tuple(result)} for padding {window.padding}.")
    if max(size + sum(pad) for size, pad in zip(result, window.padding, strict=True)) >= 2**31:
        raise ValueError(f"`stride` must leave sizes below 2^31 before the padding is cut off, got {strides}.")
    groups, k = _positive_groups(options.groups), x.shape[layout.channel]
    if k % groups:
        raise ValueError(f"`groups` must divide the {k} channels of x, got {groups}.")
    if w.shape[filt.output] != k:
        raise ValueError(
            f"`w` must have {k} output channels, which are the channels of a transposed convolution's x, got "
            f"{w.shape[filt.output]} (filter layout {filt.name})"
            f"{windows.in_other_layout(frame.given, 'x', x.shape, w.shape[filt.output])}."
        )
    shape = layout.shape(x.shape[layout.batch], result, w.shape[filt.input] * groups)
    longer = dict(zip(layout.spatial, (e // u for e, u in zip(extra, strides, strict=True)), strict=True))
    if any(longer.values()):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, longer.get(axis, 0), 0) for axis in range(x.ndim)])
    return x, shape, dataclasses.replace(options, padding=window.padding)


# ---- the epilogue ----------------------------------------------------------------------------------------------------


def call(
    op: str,
    frame: Frame,
    spec: ConvSpec,
    a: Array,
    b: Array,
    *,
    alpha: Any,
    beta: Any,
    prior: Any,
    bias: Any = None,
    residual: Any = None,
    relu: Any = None,
    activation: Any = None,
    scale_each: Any = False,
) -> Array:
    """Binds the primitive of an op with its epilogue.

    scale_each: whether alpha may have a number for each channel of the result.
    """
    role = primitive.ROLES[op][2]
    cut = spec.cut if role == "x" else None  # of the result
    if spec.cut and role != "x":
        a = spec.cut.off(a)  # x
    shape = primitive.result_shape(op, spec, a, b)
    shape = cut.before(shape) if cut else shape
    read = frame.filter if role == "w" else frame.array
    operands = {
        "prior": None if prior is None else _like("prior", read("prior", prior), shape, "the result's"),
        "bias": None
        if bias is None
        else _like("bias", bias, (shape[spec.channel(role)],), "one for each channel of the result"),
        "residual": None if residual is None else _like("residual", read("residual", residual), shape, "the result's"),
        "relu": None if relu is None else _like("x", read("x", relu), shape, "the result's"),
    }
    types = Types(spec.accumulate, spec.out_dtype)
    each = shape[spec.channel(role)] if scale_each else None
    scales = blending.read_scales(alpha, beta, prior, channels=each)
    epilogue, further = epilogue_of(types, operands, scales, activation, a.dtype)
    finished = lambda acc: _finished(epilogue, acc, further, spec.channel(role), spec.out_dtype, spec.level)
    kept = [cut.off(v) if cut and name != "bias" else v for name, v in zip(epilogue.operands, further, strict=True)]
    if _is_static(alpha) and _is_static(beta):
        y = primitives.call(op, a, b, *kept, spec=dataclasses.replace(spec, epilogue=epilogue))
        if cut is None:
            return y
        # What no window covers is a sum of nothing, which goes through the epilogue too.
        return jnp.where(cut.within(shape), cut.undone(y), finished(jnp.zeros(shape, spec.accumulate)))
    if satisfies(spec.level, "portable"):  # where not every epilogue is; a traced scale may be neither 0 nor 1
        scales = {name: 0.5 for name in ("alpha", "beta") if not _is_static(getattr(epilogue, name))}
        like = dataclasses.replace(spec, epilogue=dataclasses.replace(epilogue, **scales))
        selection.checked(op, like, a, b, *kept)
    plain = dataclasses.replace(spec, out_dtype=spec.accumulate, converted=spec.out_dtype)
    acc = primitives.call(op, a, b, spec=plain)
    return finished(cut.undone(acc) if cut else acc)


def with_epilogue(
    run: Callable[..., Array], spec: ConvSpec, epilogue: Epilogue, operands: Sequence[Array], channel: int
) -> Array:
    """`run(spec, *operands)` of a product, with the epilogue in the call if its scales are known when traced, else
    behind it."""
    if _is_static(epilogue.alpha) and _is_static(epilogue.beta):
        return run(dataclasses.replace(spec, epilogue=epilogue), *operands)
    if satisfies(spec.level, "portable"):  # where not every epilogue is; a traced scale may be neither 0 nor 1
        scales = {name: 0.5 for name in ("alpha", "beta") if not _is_static(getattr(epilogue, name))}
        like = dataclasses.replace(spec, epilogue=dataclasses.replace(epilogue, **scales))
        jax.eval_shape(ft.partial(run, like), *operands)
    acc = run(dataclasses.replace(spec, out_dtype=spec.accumulate, converted=spec.out_dtype))
    return _finished(epilogue, acc, operands, channel, spec.out_dtype, spec.level)


def _finished(
    epilogue: Epilogue, acc: Array, operands: Sequence[Array], channel: int, out_dtype: Any, level: str
) -> Array:
    """The epilogue as XLA's formula. If the level fixes bits, XLA must not fuse it with the operations around it."""
    edge = ft.partial(at_edges, level)
    return edge(epilogues.apply(epilogue, acc, edge(operands), channel=channel, out_dtype=out_dtype, level=level))


def blend(acc: Array, types: Types, *, alpha: Any, beta: Any, prior: Any, like: Array, level: str) -> Array:
    """alpha * acc + beta * prior for a vector, converted once."""
    prior = None if prior is None else _like("prior", prior, acc.shape, "the result's")
    operands = {"prior": prior, "bias": None, "residual": None}
    scales = blending.read_scales(alpha, beta, prior)
    epilogue, further = epilogue_of(types, operands, scales, None, like.dtype)
    if further and not (_is_static(epilogue.beta) and epilogue.beta == 1):
        scaled = "conv_bgrad with a `beta` that is not 0 or 1"
        require(scaled, level, "mesh_invariant", "the definition does not round beta * prior")
    return _finished(epilogue, acc, further, 0, types.out, level)


def _like(name: str, value: Any, shape: tuple[int, ...], why: str) -> Array:
    value = checks.array(name, value)
    checks.shape(name, value, shape, why)
    return value


def epilogue_of(
    types: Types, operands: dict[str, Any], scales: tuple[Any, Any], activation: Any, operand_dtype: Any
) -> tuple[Epilogue, list[Array]]:
    """The epilogue of alpha and beta, which were read, and its operands, whose dtypes are checked here."""
    alpha, beta = scales
    allowed = {np.dtype(operand_dtype), types.accumulate, types.out}
    allowed |= {_F32} if types.accumulate == _INT32 else set()
    for name, value in operands.items():
        if value is not None:
            checks.dtype("x" if name == "relu" else name, value, sorted(allowed, key=str))
    if _is_static(beta) and beta == 0:
        operands = {**operands, "prior": None}  # not read
    given = {name: value for name, value in operands.items() if value is not None}
    act = read_activation(activation)
    integer = types.accumulate == _INT32 and _is_integer_epilogue(alpha, beta, act, given)
    if types.out == _INT32 and not integer:
        raise TypeError(
            "`out_dtype` int32 needs an integer epilogue, expected alpha 1, beta 0 or 1, integer bias, residual and "
            f"prior and activation None or 'relu', got alpha {checks.shown(alpha)}, beta {checks.shown(beta)}, "
            f"activation {activation!r}."
        )
    fields = {name: True for name in given}
    epilogue = Epilogue(alpha=alpha, beta=beta, activation=act, integer=integer, **fields)
    return epilogue, [given[name] for name in epilogue.operands]


def _is_integer_epilogue(alpha: Any, beta: Any, act: Any, given: Mapping[str, Array]) -> bool:
    scales = _is_static(alpha) and _is_static(beta) and alpha == 1 and beta in (0, 1)
    integers = all(jnp.issubdtype(v.dtype, jnp.integer) for v in given.values())
    return scales and integers and act in (None, ("relu", None))


def _is_static(scale: Any) -> bool:
    return isinstance(scale, float)
