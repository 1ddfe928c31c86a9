"""Reads and checks the arguments of the normalisations, once for all of them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation import epilogues
from jaxdnn._src.activation.formulas import read_activation
from jaxdnn._src.core import blending, checks, primitives, windows
from jaxdnn._src.core.blending import Types
from jaxdnn._src.core.determinism import is_fixed, required
from jaxdnn._src.core.frames import Frame
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import rounded
from jaxdnn._src.norm import primitive
from jaxdnn._src.norm.spec import ACTIVATIONS, Activation, NormSpec, reduced

EACH_CHANNEL = "one for each channel of x"


@dataclasses.dataclass(frozen=True)
class View:
    """How an op sees its arrays: x reshaped to `shape`, statistics over `axes` (negative) of it.

    Attributes:
      parameters: the shape of scale and bias as the caller has them; `spread`: the same with x's rank in the view.
      statistics: the shape of saved statistics as the caller has them, and `reduced` in the view, keeping the axes.
      swapped: whether the two axes of the caller's statistics stand in the other order in the view.
      why: what the caller is told of the parameters' shape; `instead`: and of other shapes that say what is wrong.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    parameters: tuple[int, ...]
    spread: tuple[int, ...]
    statistics: tuple[int, ...]
    why: str
    swapped: bool = False
    instead: tuple[tuple[tuple[int, ...], str], ...] = ()

    @property
    def reduced(self) -> tuple[int, ...]:
        return reduced(self.shape, self.axes)

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes of the view along which scale and bias are the same."""
        rank = len(self.shape)
        return tuple(a - rank for a, size in enumerate(self.spread) if size == 1)

    def parameter(self, name: str, value: Any, types: Types | NormSpec, level: str = "portable") -> Array:
        """Reads a scale or bias: in the accumulator's dtype, shaped for the view.

        It passes a fence where the level fixes bits or a rounding could be left out; elsewhere that would be a kernel.
        """
        value = checks.array(name, value)
        self.check_parameter(name, value)
        checks.dtype(name, value, narrower(types.accumulate))
        value = rounded(value) if is_fixed(level) or value.dtype != types.accumulate else value
        return primitives.reshaped(value.astype(types.accumulate), self.spread)

    def check_parameter(self, name: str, value: Any) -> None:
        """Checks the shape of what is shaped as a scale is."""
        hint = dict(self.instead).get(tuple(value.shape), "").format(name=name)
        checks.shape(name, value, self.parameters, self.why, hint)

    def statistic(self, name: str, value: Any, types: Types | NormSpec) -> Array:
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
    others = [(size, a) for a, size in enumerate(x.shape) if a not in axes] if len(axes) == 1 else []
    instead = tuple(
        ((size,), f" (x has {size} along axis {a})") for size, a in others[::-1]
    )  # of two, the first counts
    why = f"the sizes of x along axes {axes}"
    return View(x.shape, negative, parameters, spread, statistics, why, instead=instead)


def samples(x: Any, axis: Any) -> View:
    """As `rows`, with a scale and a bias for every index of the first axis."""
    view = rows(x, axis)
    if -len(x.shape) in view.axes:
        raise ValueError(f"`axis` must leave the first axis, along which the scale differs, got {checks.shown(axis)}.")
    why = f"the first size of x and {view.why}"
    shape = (x.shape[0], *view.parameters)
    one = (view.parameters, " (one example is a batch as `x[None]`, with `{name}[None]`)")
    return dataclasses.replace(view, parameters=shape, spread=(x.shape[0], *view.spread[1:]), why=why, instead=(one,))


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
    return View(shape, axes, (c,), spread, (n, groups), EACH_CHANNEL, batch > channel, _of_other(frame, x))


def instances(frame: Frame, x: Any) -> View:
    """Statistics over pixels, for every image and channel."""
    layout = frame.layout
    axes = tuple(a - len(x.shape) for a in layout.spatial)
    n, c = x.shape[layout.batch], x.shape[layout.channel]
    spread = tuple(c if a == layout.channel else 1 for a in range(len(x.shape)))
    swapped = layout.batch > layout.channel
    return View(x.shape, axes, (c,), spread, (n, c), EACH_CHANNEL, swapped, _of_other(frame, x))


def batches(frame: Frame, x: Any, mode: Any) -> View:
    """Statistics over the batch: with pixels for every channel ("spatial"), or for every activation."""
    layout, rank = frame.layout, len(x.shape)
    if checks.choice("mode", mode, ("spatial", "per_activation")) == "spatial":
        kept = (layout.channel,)
        why, instead = EACH_CHANNEL, _of_other(frame, x)
    else:
        kept = tuple(a for a in range(rank) if a != layout.batch)
        why, instead = "the sizes of x without the batch's", ()
    shape = tuple(x.shape[a] for a in kept)
    axes = tuple(a - rank for a in range(rank) if a not in kept)
    spread = tuple(size if a in kept else 1 for a, size in enumerate(x.shape))
    return View(x.shape, axes, shape, spread, shape, why, instead=instead)


def _of_other(frame: Frame, x: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """What is said of parameters that have an element for each channel that x has in the other layout."""
    other = frame.given.other
    if other is None:
        return ()
    c = x.shape[other.channel]
    return (((c,), windows.in_other_layout(frame.given, "x", x.shape, c)),)


# ---- calls -----------------------------------------------------------------------------------------------------------


def spec(
    view: View,
    x: Any,
    out_dtype: Any,
    eps: Any,
    engine: Any,
    determinism: Any,
    *,
    centred: bool = True,
    per_example: bool = True,
    **behind: Any,
) -> NormSpec:
    """Reads what the normalisations have in common; scale and bias are not known yet. `behind`: see `NormSpec`."""
    found = types(x, out_dtype)
    return NormSpec(
        axes=view.axes,
        summed=view.summed,
        centred=centred,
        eps=epsilon(eps),
        scale=False,
        bias=False,
        per_example=per_example,
        accumulate=found.accumulate,
        out_dtype=found.out,
        engine=engine,
        level=required(determinism),
        **behind,
    )


def own_activation(
    view: View, x: Array, activation: Activation | None, found: Types | NormSpec, level: str = "fast"
) -> Activation | None:
    """The activation, if it can be part of the op; where the level fixes bits it is an op of its own.

    So it is with statistics over the last axes, as channels first have them: no kernel for those has an activation.
    """
    over_rows = sorted(view.axes) == list(range(-len(view.axes), 0))
    fits = activation in ACTIVATIONS and x.dtype != found.accumulate and not is_fixed(level) and not over_rows
    return activation if fits else None


def _scale(view: View, value: Any, spec: NormSpec, zero_centred: Any) -> list[Array]:
    """The scale, if it is given, plus one if it is stored as its distance from one."""
    zero_centred = checks.flag("zero_centred", zero_centred)
    if value is None:
        return []
    scale = view.parameter("scale", value, spec, spec.level)
    return [1 + scale] if zero_centred else [scale]


def forward(
    view: View, x: Array, scale: Any, bias: Any, spec: NormSpec, zero_centred: Any = False
) -> tuple[Array, Array, Array, Array]:
    """y in x's shape; mean, inverse deviation and variance in the view's."""
    scales = _scale(view, scale, spec, zero_centred)
    biases = [] if bias is None else [view.parameter("bias", bias, spec, spec.level)]
    spec = dataclasses.replace(spec, scale=bool(scales), bias=bool(biases))
    return _called("norm", view, spec, (x,), (*scales, *biases))


def backward(
    view: View, dy: Any, x: Array, scale: Any, mean: Any, rstd: Any, spec: NormSpec, zero_centred: Any = False
) -> tuple[Array, Array, Array]:
    """dx in x's shape; dscale and dbias in the parameters'."""
    dy = cotangent(dy, x, spec)
    scales = _scale(view, scale, spec, zero_centred)
    needed = (mean, rstd) if spec.centred else (rstd,)
    if all(v is None for v in needed):
        _, mean_, rstd_, _ = forward(view, x, None, None, spec)
    elif any(v is None for v in needed):
        raise ValueError("`mean` and `rstd` must be given both or neither, got one of them.")
    else:
        rstd_ = view.statistic("rstd", rstd, spec)
        mean_ = view.statistic("mean", mean, spec) if spec.centred else jnp.zeros_like(rstd_)
    spec = dataclasses.replace(spec, scale=bool(scales))
    dx, ds, db = _called("norm_dgrad", view, spec, (dy, x), (mean_, rstd_, *scales))
    ds, db = (primitives.reshaped(jnp.squeeze(v, view.summed), view.parameters) for v in (ds, db))
    return dx, ds, db


def _called(op: str, view: View, spec: NormSpec, arrays: Sequence[Array], others: Sequence[Array]) -> Any:
    """The results of a primitive of arrays in x's shape, which the first result has too, and of others in the view's.

    Types that hold shardings cannot say how groups are sharded that several devices share. There XLA alone knows it.
    """

    def run(*operands: Array) -> tuple[Array, ...]:
        seen = [v.reshape(view.shape) if v.shape == x.shape else v for v in operands]
        y, *further = primitive.call(op, *seen, spec=spec)
        return y.reshape(x.shape), *further

    def factors(*operands: Any) -> Factors:
        own, whole = tuple(f"x{i}" for i in range(x.ndim)), tuple(f"view{i}" for i in range(len(view.shape)))
        results = (own, *[whole] * (3 if op == "norm" else 2))
        return Factors(tuple(own if v.shape == x.shape else whole for v in operands), results, free=own)

    x = arrays[0]
    operands = (*arrays, *others)
    if all(primitives.keeps_sharding(v, view.shape) for v in arrays):
        return run(*operands)
    return primitives.composed(run, factors, *operands)


def normalised(
    view: View,
    x: Array,
    scale: Any,
    bias: Any,
    spec: NormSpec,
    statistics: Any,
    *,
    zero_centred: Any = False,
    restore: Callable[[Array], Array] = lambda y: y,
    activation: Any = None,
) -> Any:
    """y in the caller's layout; with `statistics` also the mean, where there is one, and the inverse deviation."""
    activation = read_activation(activation)
    own = own_activation(view, x, activation, spec, spec.level)
    read = dataclasses.replace(spec, activation=own)
    if behind := activation is not None and own is None:
        read = dataclasses.replace(read, converted=spec.out_dtype, out_dtype=spec.accumulate)
    y, mean, rstd, _ = forward(view, x, scale, bias, read, zero_centred)
    if behind:
        epilogue = epilogues.Epilogue(activation=activation)
        y = epilogues.apply(epilogue, rounded(y), [], channel=0, out_dtype=spec.out_dtype, level=spec.level)
    saved = (mean, rstd) if spec.centred else (rstd,)
    found = (restore(y), *map(view.give_statistic, saved))
    return found if checks.flag("return_statistics", statistics) else found[0]


def cotangent(dy: Any, x: Array, found: Types | NormSpec) -> Array:
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
