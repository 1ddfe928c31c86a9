"""The nodes of jaxdnn's primitives."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxdnn._src.attention.spec import operands_of
from jaxdnn._src.conv.geometry import Products
from jaxdnn._src.graph.trace_lax import reduction, result
from jaxdnn._src.graph.tracing import Refused, Tracing, Value, primitive

POOLS = {"valid": "AVGPOOL_EXCLUDE_PADDING", None: "AVGPOOL_INCLUDE_PADDING"}


def activated(tracing: Tracing, x: Value, how: Any, dtype: str) -> Value:
    """An activation, as `jaxdnn.activation` has read it: its name and its parameter."""
    name, parameter = how
    named = {
        "relu": {},
        "leaky_relu": {"negative_slope": parameter},
        "clipped_relu": {"upper_clip": parameter},
        "elu": {"elu_alpha": parameter},
        "softplus": {"softplus_beta": parameter},
        "swish": {"swish_beta": parameter},
        **{plain: {} for plain in ("tanh", "sigmoid", "gelu", "gelu_tanh")},
    }
    if name == "identity":
        return Value(x.tensor, x.axes, x.shape, dtype)
    if name == "bounded_relu":
        low, high, slope = parameter
        named[name] = {"lower_clip": low, "upper_clip": None if high == math.inf else high, "negative_slope": slope}
    if name not in named:
        raise Refused(f"with an activation that a graph has, not {name}")
    mode = {"gelu_tanh": "GELU_APPROX_TANH"}.get(name, "RELU" if name.endswith("relu") else name.upper())
    given = {key: float(v) for key, v in named[name].items() if v is not None}
    return tracing.pointwise(f"{mode}_FWD", [x], dtype, **given)


@primitive("jaxdnn_activation")
def _activation(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    spec, (_, dtype) = eqn.params["spec"], result(eqn)
    y = activated(tracing, values[0], (spec.name, spec.parameter), dtype)
    return [y if spec.alpha == 1 else tracing.pointwise("MUL", [y, tracing.constant(spec.alpha, "float32")], dtype)]


# Convolutions and products


def _window(geo: Any) -> dict[str, Any]:
    low, high = zip(*geo.padding, strict=True)
    named = {"pre_padding": low, "post_padding": high, "stride": geo.stride, "dilation": geo.dilation}
    return {**named, "convolution_mode": "CONVOLUTION" if geo.flip else "CROSS_CORRELATION"}


def _axes(spec: Any) -> tuple[list[int], list[int]]:
    """The axes of an image in the order N, C, spatial, and of a filter in the order K, C, taps."""
    if spec.layout.vector or spec.filter.vector:
        raise Refused("of a layout without vectors of channels")
    if spec.cut is not None:
        raise Refused("without negative padding")
    layout, taps = spec.layout, spec.filter
    return [layout.batch, layout.channel, *layout.spatial], [taps.output, taps.input, *taps.spatial]


def _compute(spec: Any) -> str:
    return spec.accumulate.name


@primitive("jaxdnn_conv")
def _conv(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """The convolution, or of one tap and one group the product, and the epilogue as nodes behind it."""
    spec, (shape, dtype) = eqn.params["spec"], result(eqn)
    (x, w, *others), (image, taps) = values, _axes(spec)
    extras = dict(zip(spec.epilogue.operands, others, strict=True))
    compute, is_product = _compute(spec), isinstance(spec.geo, Products) and spec.geo.groups == 1
    held = dtype if compute != "int32" else "int32"
    if is_product:
        image = [*(axis for axis in range(len(shape)) if axis != spec.layout.channel), spec.layout.channel]
        a, b = tracing.operand(x, image), tracing.operand(w, [*spec.filter.spatial, taps[1], taps[0]])
        y = tracing.g.matmul(a, b, compute_data_type=compute)
    else:
        a, b = tracing.operand(x, image), tracing.operand(w, taps)
        y = tracing.g.conv_fprop(a, b, compute_data_type=compute, **_window(spec.geo))
    made = tracing.made(y, [shape[axis] for axis in image], held)
    return [_finished(tracing, spec.epilogue, tracing.value(made, image, shape, held), extras, dtype, spec)]


def _finished(tracing: Tracing, epilogue: Any, y: Value, extras: dict[str, Value], dtype: str, spec: Any) -> Value:
    if epilogue.integer and (extras or epilogue.activation):
        raise Refused("of int8 without an epilogue of integers")
    number = lambda v: tracing.constant(v, "float32")
    if epilogue.alpha != 1:
        y = tracing.pointwise("MUL", [_floating(y), number(epilogue.alpha)], dtype)
    if "prior" in extras:
        prior = extras["prior"]
        prior = prior if epilogue.beta == 1 else tracing.pointwise("MUL", [prior, number(epilogue.beta)], "float32")
        y = tracing.pointwise("ADD", [_floating(y), prior], dtype)
    if "residual" in extras:
        y = tracing.pointwise("ADD", [_floating(y), extras["residual"]], dtype)
    if "bias" in extras:
        bias = tracing.lifted(extras["bias"], [spec.layout.channel], y.shape)
        y = tracing.pointwise("ADD", [_floating(y), bias], dtype)
    if "relu" in extras:
        y = tracing.pointwise("RELU_BWD", [y, extras["relu"]], dtype)
    if epilogue.activation:
        y = activated(tracing, _floating(y), epilogue.activation, dtype)
    return Value(y.tensor, y.axes, y.shape, dtype)


def _floating(y: Value) -> Value:
    """Sums in int32, which what follows takes as float32."""
    return Value(y.tensor, y.axes, y.shape, "float32") if y.dtype == "int32" else y


@primitive("jaxdnn_conv_dgrad")
def _dgrad(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    spec, (shape, dtype) = eqn.params["spec"], result(eqn)
    (dy, w, *others), (image, taps) = values, _axes(spec)
    extras = dict(zip(spec.epilogue.operands, others, strict=True))
    y = tracing.g.conv_dgrad(
        tracing.operand(dy, image), tracing.operand(w, taps), compute_data_type=_compute(spec), **_window(spec.geo)
    )
    made = tracing.made(y, [shape[axis] for axis in image], dtype)
    return [_finished(tracing, spec.epilogue, tracing.value(made, image, shape, dtype), extras, dtype, spec)]


@primitive("jaxdnn_conv_wgrad")
def _wgrad(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    spec, (shape, dtype) = eqn.params["spec"], result(eqn)
    (x, dy, *others), (image, taps) = values, _axes(spec)
    extras = dict(zip(spec.epilogue.operands, others, strict=True))
    y = tracing.g.conv_wgrad(
        tracing.operand(x, image), tracing.operand(dy, image), compute_data_type=_compute(spec), **_window(spec.geo)
    )
    made = tracing.made(y, [shape[axis] for axis in taps], dtype)
    return [_finished(tracing, spec.epilogue, tracing.value(made, taps, shape, dtype), extras, dtype, spec)]


# Normalisations, softmax


@primitive("jaxdnn_norm")
def _norm(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """A node where its statistics are those of one, else the formula. Results: y, mean, 1 / deviation, variance."""
    spec, (shape, dtype) = eqn.params["spec"], result(eqn)
    if spec.tangents:
        raise Refused("without tangents")
    x, *others = values
    given = dict(zip([name for name in ("scale", "bias") if getattr(spec, name)], others, strict=True))
    axes = tuple(sorted(axis % len(shape) for axis in spec.axes))
    asked = [position for position, var in enumerate(eqn.outvars) if tracing.is_read(var)]
    found = None
    if 3 not in asked:
        found = _batch(tracing, spec, x, given, axes, eqn) or _rows(tracing, spec, x, given, axes, asked, eqn)
    found = found or _formula(tracing, spec, x, given, axes, eqn)
    if spec.activation:
        how = spec.activation if isinstance(spec.activation, tuple) else (spec.activation, None)
        found[0] = activated(tracing, found[0], how, dtype)
    return found


def _results(tracing: Tracing, eqn: Any, tensors: Sequence[Any], order: Sequence[int]) -> list[Value]:
    """The values of a norm's results, whose axes lie in their tensors in an order; of what is absent the first's."""
    found = []
    for var, tensor in zip(eqn.outvars, tensors, strict=True):
        shape, dtype = tuple(var.aval.shape), var.aval.dtype.name
        if tensor is None:
            found.append(found[0])
            continue
        made = tracing.made(tensor, [shape[axis] for axis in order], dtype)
        found.append(tracing.value(made, order, shape, dtype))
    return found


def _batch(
    tracing: Tracing, spec: Any, x: Value, given: dict[str, Value], axes: tuple[int, ...], eqn: Any
) -> list[Value] | None:
    rank = len(x.shape)
    kept = [axis for axis in range(rank) if axis not in axes]
    if len(kept) != 1 or 0 in kept or not 3 <= rank <= 5 or set(given) != {"scale", "bias"} or not spec.centred:
        return None
    order = [0, *kept, *(axis for axis in axes if axis)]
    y, mean, rstd, *_ = tracing.g.batchnorm(
        tracing.operand(x, order),
        *(tracing.operand(given[name], order) for name in ("scale", "bias")),
        epsilon=float(spec.eps),
        compute_data_type=spec.accumulate.name,
    )
    return _results(tracing, eqn, [y, mean, rstd, None], order)


def _rows(
    tracing: Tracing,
    spec: Any,
    x: Value,
    given: dict[str, Value],
    axes: tuple[int, ...],
    asked: list[int],
    eqn: Any,
) -> list[Value] | None:
    wanted = tuple(n if axis in axes else 1 for axis, n in enumerate(x.shape))
    one = all(n == 1 for n in wanted)
    if "scale" not in given or one or any(v.shape != wanted for v in given.values()):
        return None
    if any(x.shape[axis] == 1 for axis in axes) or (spec.centred and "bias" not in given):
        return None
    order, phase = [*range(len(x.shape))], "INFERENCE" if asked == [0] else "TRAINING"
    how: dict[str, Any] = {name: tracing.operand(given[name], order) for name in ("scale", "bias") if name in given}
    how |= {"epsilon": float(spec.eps), "compute_data_type": spec.accumulate.name}
    make = tracing.g.layernorm if spec.centred else tracing.g.rmsnorm
    found = make(phase, tracing.operand(x, order), **how)
    y, mean, rstd = found if spec.centred else (found[0], None, found[1])
    return _results(tracing, eqn, [y, mean, rstd, None], order)


def _formula(
    tracing: Tracing, spec: Any, x: Value, given: dict[str, Value], axes: tuple[int, ...], eqn: Any
) -> list[Value]:
    wide, dtype = spec.accumulate.name, result(eqn)[1]
    number = lambda v: tracing.constant(v, wide)
    mean = reduction(tracing, x, "AVG", axes, wide) if spec.centred else None
    d = tracing.pointwise("SUB", [x, mean], wide) if mean else x
    variance = reduction(tracing, tracing.pointwise("MUL", [d, d], wide), "AVG", axes, wide)
    rstd = tracing.pointwise("RSQRT", [tracing.pointwise("ADD", [variance, number(float(spec.eps))], wide)], wide)
    y = tracing.pointwise("MUL", [d, rstd], wide)
    for name, mode in (("scale", "MUL"), ("bias", "ADD")):
        y = tracing.pointwise(mode, [y, given[name]], wide) if name in given else y
    return [Value(y.tensor, y.axes, y.shape, dtype), mean or y, rstd, variance]


@primitive("jaxdnn_softmax")
def _softmax(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """The formula: graphs have no node of it."""
    spec, (x,), (shape, dtype) = eqn.params["spec"], values, result(eqn)
    if spec.tangent or spec.algorithm not in ("accurate", "log"):
        raise Refused(f"of the algorithms 'accurate' and 'log', not {spec.algorithm!r}")
    axes, wide = [axis % len(shape) for axis in spec.axes], spec.accumulate.name
    z = tracing.pointwise("SUB", [x, reduction(tracing, x, "MAX", axes, wide)], wide)
    e = tracing.pointwise("EXP", [z], wide)
    total = reduction(tracing, e, "ADD", axes, wide)
    if spec.algorithm == "log":
        return [tracing.pointwise("SUB", [z, tracing.pointwise("LOG", [total], wide)], dtype)]
    return [tracing.pointwise("DIV", [e, total], dtype)]


# Windows, attention


@primitive("jaxdnn_pool_max", "jaxdnn_pool_average")
def _pool(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    spec, (x,), (shape, dtype) = eqn.params["spec"], values, result(eqn)
    largest = eqn.primitive.name.endswith("max")
    if spec.cut is not None or set(spec.dilation) != {1} or spec.nan != "propagate":
        raise Refused("without negative padding or dilation, that propagates NaN")
    if not largest and spec.divisor not in POOLS:
        raise Refused("whose averages are of the window or of what is within")
    rank = len(shape)
    spatial = [axis % rank for axis in spec.spatial]
    channel = next(axis for axis in range(1, rank) if axis not in spatial) if len(spatial) == rank - 2 else None
    if channel is None or 0 in spatial:
        raise Refused("of images with a batch and channels")
    order = [0, channel, *spatial]
    low, high = zip(*spec.padding, strict=True)
    mode = "MAXPOOL" if largest else POOLS[spec.divisor]
    window = {"window": spec.taps, "pre_padding": low, "post_padding": high, "stride": spec.stride}
    y = tracing.g.resample(tracing.operand(x, order), mode, **window)
    return [tracing.value(tracing.made(y, [shape[axis] for axis in order], dtype), order, shape, dtype)]


@primitive("jaxdnn_attention")
def _attention(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    spec, (shape, dtype) = eqn.params["spec"], result(eqn)
    given = dict(zip(operands_of("attention", spec), values, strict=True))
    q, k, v = (given.pop(name) for name in "qkv")
    of_score = {name: given.pop(name) for name in (spec.score.order if spec.score else ())}
    known = {"bias", "alibi_slopes", "sinks", "query_lengths", "key_lengths"}
    if not set(given) <= known or ("query_lengths" in given) != ("key_lengths" in given):
        words = "a bias, slopes, sinks and lengths of queries and keys"
        raise Refused(f"of attention with no more than {words}, not {', '.join(given)}")
    for name, plain in {"dropout": None, "diagonal": False, "maximum": False}.items():
        if getattr(spec, name) != plain:
            raise Refused(f"of attention without {name}")
    order = [0, 1, 2, 3] if spec.heads_first else [0, 2, 1, 3]
    how: dict[str, Any] = {"attn_scale": float(spec.scale), "diagonal_band_right_bound": spec.right}
    how["diagonal_band_left_bound"] = None if spec.left is None else spec.left + 1  # cuDNN counts the diagonal
    how["diagonal_alignment"] = "BOTTOM_RIGHT" if spec.bottom_right else "TOP_LEFT"
    if "sinks" in given:
        how["sink_token"] = tracing.operand(given["sinks"], [0, 1, None, None])
    if "query_lengths" in given:
        lengths = {"seq_len_q": given["query_lengths"], "seq_len_kv": given["key_lengths"]}
        how |= {"use_padding_mask": True} | {n: tracing.operand(v, [0, None, None, None]) for n, v in lengths.items()}
    wide, slopes = "float64" if q.dtype == "float64" else "float32", given.get("alibi_slopes")
    how["compute_data_type"] = wide
    if spec.softcap is not None or spec.score or "alibi_slopes" in given:
        sizes = (q.shape[order[0]], q.shape[order[1]], q.shape[order[2]], k.shape[order[2]])
        how["score_mod"] = lambda g, s: _of_scores(tracing, spec, s, sizes, wide, of_score, slopes)
    bias = tracing.operand(given["bias"], [0, 1, 2, 3]) if "bias" in given else None
    stats = len(eqn.outvars) > 1 and tracing.is_read(eqn.outvars[1])
    q, k, v = (tracing.operand(t, order) for t in (q, k, v))
    y, lse = tracing.g.sdpa(q, k, v, bias=bias, generate_stats=stats, **how)
    results = [tracing.value(tracing.made(y, [shape[axis] for axis in order], dtype), order, shape, dtype)]
    if len(eqn.outvars) == 1:
        return results
    if lse is None:
        return [*results, results[0]]
    sizes, of = tuple(eqn.outvars[1].aval.shape), eqn.outvars[1].aval.dtype.name
    heads = [0, 1, 2] if spec.heads_first else [0, 2, 1]
    made = tracing.made(lse, [*(sizes[axis] for axis in heads), 1], of)
    return [*results, tracing.value(made, [*heads, None], sizes, of)]


def _of_scores(
    tracing: Tracing,
    spec: Any,
    scores: Any,
    sizes: tuple[int, ...],
    wide: str,
    arrays: Mapping[str, Value],
    slopes: Value | None,
) -> Any:
    """What is done to the scores before the bias: the cap, the function, mapped over all of them, and ALiBi."""
    tracing.dims[scores.uid] = sizes
    x = Value(scores, (0, 1, 2, 3), sizes, wide)

    def place(axis: int) -> Value:
        made = tracing.made(tracing.g.gen_index(scores, axis, compute_data_type="int32"), sizes, "int32")
        return Value(made, (0, 1, 2, 3), sizes, "int32")

    if spec.softcap is not None:
        cap = tracing.constant(spec.softcap, wide)
        x = tracing.pointwise("TANH_FWD", [tracing.pointwise("DIV", [x, cap], wide)], wide)
        x = tracing.pointwise("MUL", [x, cap], wide)
    if spec.score:
        given = [Value(v.tensor, v.axes[1:], v.shape[1:], v.dtype) for v in (arrays[name] for name in spec.score.order)]
        run: Any = spec.score.of_one
        for _ in sizes:
            run = jax.vmap(run, (0,) * 5 + (None,) * len(given))
        read = [x, *map(place, range(4)), *given]
        closed = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in read))
        (x,) = tracing.run(closed.jaxpr, closed.consts, read)
    if slopes is not None:
        apart = tracing.pointwise("SUB", [place(3), place(2)], "int32")
        of_heads = tracing.lifted(slopes, (0, 1), (*slopes.shape[:1], sizes[1], 1, 1))
        x = tracing.pointwise("ADD", [x, tracing.pointwise("MUL", [of_heads, apart], wide)], wide)
    return tracing.arranged(x, [0, 1, 2, 3])


@primitive("joined")
def _joined(tracing: Tracing, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """The sum before which batch normalisation stores its two terms."""
    return [tracing.pointwise("ADD", values, result(eqn)[1])]
