"""Reads and checks the arguments of the normalisations, once for all of them."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation import epilogues
from jaxdnn._src.activation.formulas import read_activation
from jaxdnn._src.core import blending, checks
from jaxdnn._src.core.blending import Types
from jaxdnn._src.core.determinism import is_fixed, required
from jaxdnn._src.core.frames import Frame
from jaxdnn._src.core.rounding import rounded
from jaxdnn._src.norm import primitive
from jaxdnn._src.norm.spec import ACTIVATIONS, Activation, NormSpec, reduced


@dataclasses.dataclass(frozen=True)
class View:
    """How an op sees its arrays: x reshaped to `shape`, statistics over `axes` (negative) of it.

    Attributes:
      parameters: the shape of scale and bias as the caller has them; `spread`: the same with x's rank in the view.
      statistics: the shape of saved statistics as the caller has them, and `reduced` in the view, keeping the axes.
      swapped: whether the two axes of the caller's statistics stand in the other order in the view.
      why: what the caller is told of the parameters' shape.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    parameters: tuple[int, ...]
    spread: tuple[int, ...]
    statistics: tuple[int, ...]
    why: str
    swapped: bool = False

    @property
    def reduced(self) -> tuple[int, ...]:
        return reduced(self.shape, self.axes)

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes of the view along which scale and bias are the same."""
        rank = len(self.shape)
        return tuple(a - rank for a, size in enumerate(self.spread) if size == 1)

    def parameter(self, name: str, value: Any, types: Types, level: str = "portable") -> Array:
        """Reads a scale or bias: in the accumulator's dtype, shaped for the view.

        It passes a fence where the level fixes bits or a rounding could be left out; elsewhere that would be a kernel.
        """
        value = checks.array(name, value)
        checks.shape(name, value, self.parameters, self.why)
        checks.dtype(name, value, narrower(types.accumulate))
        value = rounded(value) if is_fixed(level) or value.dtype != types.accumulate else value
        return value.astype(types.accumulate).reshape(self.spread)

    def statistic(self, name: str, value: Any, types: Types) -> Array:
        """Reads a saved statistic."""
        value = checks.array(name, value)
        checks.shape(name, value, self.statistics, "one for every slice")
        checks.dtype(name, value, (types.accumulate,))
        return (value.T if self.swapped else value).reshape(self.reduced)

    def give_statistic(self, value: Array) -> Array:
        """A statistic of the view as the caller has it."""
        return value.reshape(self.statistics[::-1]).T if self.swapped else value.reshape(self.statistics)


def narrower(accumulate: np.dtype) -> tuple[Any, ...]:
    """The float types that the accumulator holds."""
    return tuple(t for t in checks.FLOATS if np.dtype(t).itemsize <= accumulate.itemsize)


def types(x: Any, out_dtype: Any, *, name: str = "x") -> Types:
    """Reads the dtype of x and of the result."""
    found = checks.dtype(name, x, checks.FLOATS)
    acc = blending.accumulator(found)
    return Types(acc, checks.out_dtype(out_dtype, found, checks.FLOATS, acc))


def epsilon(value: Any) -> float:
    """Reads `eps`: a number known when traced, not negative."""
    value = checks.as_float("eps", value)
    if not 0 <= value < math.inf:
        raise ValueError(f"`eps` must be a finite number of at least 0, got {value!r}.")
    return value


# ---- views -----------------------------------------------------------------------------------------------------------


def rows(x: Any, axis: Any) -> View:
    """Statistics over the given axes, for every index of the others."""
    axes = checks.axes("x", axis, len(x.shape))
    parameters = tuple(x.shape[a] for a in axes)
    spread = tuple(size if a in axes else 1 for a, size in enumerate(x.shape))
    statistics = tuple(size for a, size in enumerate(x.shape) if a not in axes)
    negative = tuple(a - len(x.shape) for a in axes)
    return View(x.shape, negative, parameters, spread, statistics, f"the sizes of x along axes {axes}")


def samples(x: Any, axis: Any) -> View:
    """As `rows`, with a scale and a bias for every index of the first axis."""
    view = rows(x, axis)
    if -len(x.shape) in view.axes:
        raise ValueError(f"`axis` must leave the first axis, along which the scale differs, got {checks.shown(axis)}.")
    why = f"the first size of x and {view.why}"
    shape = (x.shape[0], *view.parameters)
    return dataclasses.replace(view, parameters=shape, spread=(x.shape[0], *view.spread[1:]), why=why)


def grouped(frame: Frame, x: Any, groups: int) -> View:
    """Statistics over pixels and the channels of a group, for every image and group."""
    layout = frame.layout
    n, c, channel = x.shape[layout.batch], x.shape[layout.channel], layout.channel
    groups = checks.integer("groups", groups)
    if groups < 1 or c % groups:
        raise ValueError(f"`groups` must divide the {c} channels of x, got {groups}.")
    shape = (*x.shape[:channel], groups, c // groups, *x.shape[channel + 1 :])
    batch = layout.batch + (layout.batch > channel)
    axes = tuple(a - len(shape) for a in range(len(shape)) if a not in (batch, channel))
    spread = tuple(size if a in (channel, channel + 1) else 1 for a, size in enumerate(shape))
    return View(shape, axes, (c,), spread, (n, groups), "one a channel of x", batch > channel)


def instances(frame: Frame, x: Any) -> View:
    """Statistics over pixels, for every image and channel."""
    layout = frame.layout
    axes = tuple(a - len(x.shape) for a in layout.spatial)
    n, c = x.shape[layout.batch], x.shape[layout.channel]
    spread = tuple(c if a == layout.channel else 1 for a in range(len(x.shape)))
    return View(x.shape, axes, (c,), spread, (n, c), "one a channel of x", layout.batch > layout.channel)


def batches(frame: Frame, x: Any, mode: Any) -> View:
    """Statistics over the batch: with pixels for every channel ("spatial"), or for every activation."""
    layout, rank = frame.layout, len(x.shape)
    if checks.choice("mode", mode, ("spatial", "per_activation")) == "spatial":
        kept = (layout.channel,)
        why = "one a channel of x"
    else:
        kept = tuple(a for a in range(rank) if a != layout.batch)
        why = "the sizes of x without the batch's"
    shape = tuple(x.shape[a] for a in kept)
    axes = tuple(a - rank for a in range(rank) if a not in kept)
    spread = tuple(size if a in kept else 1 for a, size in enumerate(x.shape))
    return View(x.shape, axes, shape, spread, shape, why)


# ---- calls -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """What the normalisations have in common, as it was given."""

    eps: Any
    engine: Any
    determinism: Any
    centred: bool = True
    zero_centred: Any = False
    per_example: bool = True
    converted: Any = None
    activation: Any = None


def spec(view: View, found: Types, options: Options, *, scale: bool, bias: bool) -> NormSpec:
    """The spec of a call."""
    return NormSpec(
        axes=view.axes,
        summed=view.summed,
        centred=options.centred,
        eps=epsilon(options.eps),
        scale=scale,
        bias=bias,
        per_example=options.per_example,
        accumulate=found.accumulate,
        out_dtype=found.out,
        converted=options.converted,
        activation=options.activation,
        engine=options.engine,
        level=required(options.determinism),
    )


def own_activation(
    view: View, x: Array, activation: Activation | None, found: Types, level: str = "fast"
) -> Activation | None:
    """The activation, if it can be part of the op; where the level fixes bits it is an op of its own.

    So it is with statistics over the last axes, as channels first have them: no kernel for those has an activation.
    """
    over_rows = sorted(view.axes) == list(range(-len(view.axes), 0))
    fits = activation in ACTIVATIONS and x.dtype != found.accumulate and not is_fixed(level) and not over_rows
    return activation if fits else None


def scale_of(view: View, value: Any, found: Types, options: Options) -> list[Array]:
    """The scale, if it is given, plus one if it is stored as its distance from one."""
    zero_centred = checks.flag("zero_centred", options.zero_centred)
    if value is None:
        return []
    scale = view.parameter("scale", value, found, required(options.determinism))
    return [1 + scale] if zero_centred else [scale]


def forward(
    view: View, x: Array, scale: Any, bias: Any, found: Types, options: Options
) -> tuple[Array, Array, Array, Array]:
    """y in x's shape; mean, inverse deviation and variance in the view's."""
    scales = scale_of(view, scale, found, options)
    biases = [] if bias is None else [view.parameter("bias", bias, found, required(options.determinism))]
    read = spec(view, found, options, scale=bool(scales), bias=bool(biases))
    operands = (x.reshape(view.shape), *scales, *biases)
    y, mean, rstd, variance = primitive.call("norm", *operands, spec=read)
    return y.reshape(x.shape), mean, rstd, variance


def backward(
    view: View, dy: Any, x: Array, scale: Any, mean: Any, rstd: Any, found: Types, options: Options
) -> tuple[Array, Array, Array]:
    """dx in x's shape; dscale and dbias in the parameters'."""
    dy = cotangent(dy, x, found)
    scales = scale_of(view, scale, found, options)
    needed = (rstd,) if not options.centred else (mean, rstd)
    if all(v is None for v in needed):
        _, mean_, rstd_, _ = forward(view, x, None, None, found, options)
    elif any(v is None for v in needed):
        raise ValueError("`mean` and `rstd` must be given both or neither, got one of them.")
    else:
        rstd_ = view.statistic("rstd", rstd, found)
        mean_ = view.statistic("mean", mean, found) if options.centred else jnp.zeros_like(rstd_)
    read = spec(view, found, options, scale=bool(scales), bias=False)
    operands = (dy.reshape(view.shape), x.reshape(view.shape), mean_, rstd_, *scales)
    dx, ds, db = primitive.call("norm_dgrad", *operands, spec=read)
    ds, db = (jnp.squeeze(v, view.summed).reshape(view.parameters) for v in (ds, db))
    return dx.reshape(x.shape), ds, db


def normalised(
    view: View,
    x: Array,
    scale: Any,
    bias: Any,
    options: Options,
    out_dtype: Any,
    statistics: Any,
    restore: Any = None,
    activation: Any = None,
) -> Any:
    """y in the caller's layout; with `statistics` also the mean, where there is one, and the inverse deviation."""
    found, level = types(x, out_dtype), required(options.determinism)
    activation = read_activation(activation)
    own = own_activation(view, x, activation, found, level)
    if behind := activation is not None and own is None:
        options = dataclasses.replace(options, converted=found.out)
    wide = dataclasses.replace(found, out=found.accumulate) if behind else found
    y, mean, rstd, _ = forward(view, x, scale, bias, wide, dataclasses.replace(options, activation=own))
    if behind:
        epilogue = epilogues.Epilogue(activation=activation)
        y = epilogues.apply(epilogue, rounded(y), [], channel=0, out_dtype=found.out, level=level)
    y = y if restore is None else restore(y)
    saved = (mean, rstd) if options.centred else (rstd,)
    return (y, *map(view.give_statistic, saved)) if checks.flag("return_statistics", statistics) else y


def gradients(
    view: View,
    dy: Any,
    x: Array,
    scale: Any,
    statistics: tuple[Any, Any],
    options: Options,
    out_dtype: Any,
    restore: Any = None,
) -> tuple[Array, Array, Array]:
    """dx in the caller's layout; dscale and dbias in the parameters' shape."""
    dx, ds, db = backward(view, dy, x, scale, *statistics, types(x, out_dtype), options)
    return dx if restore is None else restore(dx), ds, db


def cotangent(dy: Any, x: Array, found: Types) -> Array:
    """Reads dy: like x, of x's, the result's or the accumulator's dtype or narrower."""
    dy = checks.array("dy", dy)
    checks.shape("dy", dy, x.shape, "that of x")
    checks.dtype("dy", dy, narrower(found.accumulate))
    return dy


# ---- blends and epilogues of batch normalisation ---------------------------------------------------------------------


def blended(
    computed: Array, alpha: Any, beta: Any, prior: Any, names: tuple[str, str, str], out: Any, found: Types
) -> Array:
    """alpha * computed + beta * prior, converted once; `computed` itself where there is nothing to blend."""
    if prior is None and blending.is_plain(alpha, beta):
        return computed
    blend = {"alpha": alpha, "beta": beta, "prior": prior, "names": names}
    return blending.blend(computed, **blend, out=out, dtypes=narrower(found.accumulate))


def epilogue(
    frame: Frame, x: Array, found: Types, *, alpha: Any, beta: Any, activation: Any, **given: Any
) -> tuple[epilogues.Epilogue, list[Array]] | None:
    """The epilogue y = act(alpha c + beta prior + residual), and its operands; None if there is nothing to do.

    given: prior and residual, each an array or None.
    """
    alpha, beta = blending.read_scales(alpha, beta, given["prior"])
    activation = read_activation(activation)
    operands = {}
    for name, value in given.items():
        if value is None:
            continue
        value = frame.array(name, value)
        checks.shape(name, value, x.shape, "that of x")
        checks.dtype(name, value, narrower(found.accumulate))
        if name == "residual" or not (isinstance(beta, float) and beta == 0):  # a prior that counts nothing is not read
            operands[name] = value
    if epilogues.is_one(alpha) and not operands and activation is None:
        return None
    read = epilogues.Epilogue(alpha=alpha, beta=beta, activation=activation, **dict.fromkeys(operands, True))
    return read, [operands[name] for name in read.operands]
