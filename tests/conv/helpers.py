"""The one comparison: value, gradient, dtype and shape, with a bound that is computed; and what it compares with.

Two independent goldens: `jaxdnn_reference` (NumPy, float64), and `lax_call`, the same op built of `jax.lax` alone.
"""

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation import formulas
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.activation.cases import PARAMETERS
from jaxdnn._src.core import tolerance
from tests.conv import cases
from tests.conv.cases import Case, Geometry

ACTIVATIONS = (None, *formulas.ACTIVATIONS, *PARAMETERS)


def call(case: Case, *arrays: Any) -> jax.Array:
    """The op on the case's arguments, or on other arrays in their place (positional ones first, then the named)."""
    given = arrays or cases.as_jax(case)
    count = len(case.arrays)
    named = dict(zip(case.named, given[count:], strict=True))
    return getattr(dnn, case.op)(*given[:count], *case.static, **case.options, **named)


def reproduction(origin: str) -> str:
    """A command that runs one comparison again."""
    return f'PYTHONPATH=.:reference python -c "from tests.conv import cases, helpers; helpers.check({origin})"'


def check(case: Case, out: Any = None) -> None:
    """Compares a call with the definition."""
    if out is None:
        out = call(case)
    agree(out, case, dtype=result_dtype(case), shape=case.result_shape, origin=case.origin)


def check_all(many: Iterable[Case]) -> None:
    """Compares many calls with the definition; they are compiled as one program, which is what takes the time."""
    many = list(many)
    for case, out in zip(many, compute_all(many), strict=True):
        check(case, out)


def compute_all(many: Sequence[Case], function: Callable[..., Any] = call) -> list[Any]:
    """`function(case, *arrays)` of every case, in one program."""

    def run(arrays: list[Any]) -> list[Any]:
        results = []
        for case, given in zip(many, arrays, strict=True):
            try:
                results.append(function(case, *given))
            except Exception as error:
                error.add_note(f"{case}\n  {reproduction(case.origin)}")
                raise
        return results

    return jax.jit(run)([cases.as_jax(case) for case in many])


def agree(out: Any, case: Case, *, dtype: Any, shape: tuple[int, ...], origin: str) -> None:
    """Asserts that `out` has this dtype and shape, and the values that the definition gives for a case."""
    where = f"\n  {case}\n  {reproduction(origin)}"
    assert isinstance(out, jax.Array), f"a {type(out).__name__} instead of an array{where}"
    assert out.dtype == np.dtype(dtype), f"dtype {out.dtype} instead of {np.dtype(dtype)}{where}"
    assert out.shape == shape, f"shape {out.shape} instead of {shape}{where}"
    golden, error, golden_error = expected(case)
    found = tolerance.compare(np.asarray(out), golden, error, golden_error=golden_error)
    assert found.passed, found.message + where
    if case_is_exact(case):
        np.testing.assert_array_equal(np.asarray(out).astype(np.float64), golden.astype(np.float64), err_msg=where)


def result_dtype(case: Case) -> np.dtype:
    return np.dtype(case.options.get("out_dtype") or case.arrays[0].dtype)


def accumulator(case: Case) -> np.dtype:
    """The accumulator's dtype by the documented rule."""
    dtype = case.arrays[0].dtype
    natural = np.int32 if dtype == np.int8 else np.float64 if dtype == np.float64 else np.float32
    return np.dtype(case.options.get("accumulate") or natural)


def expected(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
    """The definition's result in float64, the bound on the accumulator's error after the epilogue, the former's own."""
    definition = getattr(reference, case.op)
    options = {k: v for k, v in case.arguments.items() if k != "out_dtype"}
    # Integers are judged before saturation: the comparison saturates. int32 results are exact by themselves.
    found = definition(*case.arrays, *case.static, **options, details=True)
    acc = accumulator(case)
    if acc == np.int32:
        inexact = np.abs(found.accumulated.astype(np.float64)) * 2.0**-24
        start = np.where(np.abs(found.accumulated.astype(np.float64)) < 2**24, 0.0, inexact)
        step = "exact" if _is_integer_epilogue(case) else "float32"
    else:
        # XLA on CPU reads and writes float32's subnormal numbers as zero.
        rule = tolerance.Accumulation(format=acc.name, flush=acc == np.float32)
        exact = tolerance.products_are_exact(*_product_types(case), format=acc.name)
        start = rule.error(found.accumulated, found.magnitude, found.terms, exact_products=exact)
        step = acc.name
        if case_is_exact(case):
            start = np.zeros_like(start)
    o = case.arguments
    epilogue = Epilogue(
        alpha=float(o.get("alpha", 1.0)), beta=float(o.get("beta", 0.0)), activation=o.get("activation"), format=step
    )
    bias = _along_channel(case, case.named["bias"]) if "bias" in case.named else None
    terms = [np.asarray(v).astype(np.float64) for v in (o.get("residual"), bias) if v is not None]
    prior = None if o.get("prior") is None else np.asarray(o["prior"]).astype(np.float64)
    error = epilogue.error(found.accumulated.astype(np.float64), start, *terms, prior=prior)
    own = found.bound if case.arrays[0].dtype == np.float64 else 0.0
    return np.asarray(found.value, np.float64), error, np.asarray(own, np.float64)


def _product_types(case: Case) -> tuple[Any, Any]:
    if case.options.get("precision") == "tf32":
        return "tf32", "tf32"
    first, *others = (a.dtype for a in case.arrays)
    return first, others[0] if others else np.int8


def _is_integer_epilogue(case: Case) -> bool:
    o = case.arguments
    arrays = [v for k, v in case.named.items() if not (k == "prior" and o.get("beta", 0) == 0)]
    plain = o.get("alpha", 1) == 1 and o.get("beta", 0) in (0, 1) and o.get("activation") in (None, "identity", "relu")
    return plain and all(np.issubdtype(v.dtype, np.integer) for v in arrays)


def case_is_exact(case: Case) -> bool:
    """Whether the case was built of small whole numbers and only adds and multiplies them."""
    acc = accumulator(case)
    whole = all(np.all(np.asarray(a, np.float64) == np.rint(np.asarray(a, np.float64))) for a in case.arrays)
    if acc == np.int32 or not whole or case.named or set(case.options) & {"alpha", "beta", "activation"}:
        return False
    if not all(a.size for a in case.arrays):
        return False
    largest: list[float] = [float(np.abs(np.asarray(a, np.float64)).max()) for a in case.arrays] + [1.0]
    count = max(int(np.prod(a.shape)) for a in case.arrays)
    fits = tolerance.format_of(result_dtype(case))
    bits = getattr(fits, "bits", 0)
    return largest[0] * largest[1] * count <= 2.0 ** min(24, bits)


def _along_channel(case: Case, bias: Any) -> Any:
    """The bias as it broadcasts against the result."""
    layout = case.geometry.image
    lanes = layout.vector or 1
    return bias.reshape([len(bias) // lanes if a == "C" else 1 for a in layout.axes] + [lanes] * (lanes > 1))


# ---- the same ops of jax.lax -----------------------------------------------------------------------------------------


def _image_to_lax(g: Geometry, x: jax.Array) -> jax.Array:
    """To (N, C, spatial...)."""
    axes, channel = g.image.axes, g.image.channel
    if g.image.vector:
        x = jnp.moveaxis(x, -1, channel + 1)
        x = x.reshape(*x.shape[:channel], x.shape[channel] * x.shape[channel + 1], *x.shape[channel + 2 :])
    return jnp.transpose(x, [axes.index(a) for a in "NC" + g.spatial])


def _image_from_lax(g: Geometry, x: jax.Array) -> jax.Array:
    channel, lanes, stored = g.image.channel, g.image.vector, "NC" + g.spatial
    x = jnp.transpose(x, [stored.index(a) for a in g.image.axes])
    if lanes is None:
        return x
    x = x.reshape(*x.shape[:channel], x.shape[channel] // lanes, lanes, *x.shape[channel + 1 :])
    return jnp.moveaxis(x, channel + 1, -1)


def _filter_to_lax(g: Geometry, w: jax.Array) -> jax.Array:
    """To (O, I, taps...), flipped if the mode says so."""
    axes, i = g.filter.axes, g.filter.input
    if g.filter.vector:
        w = jnp.moveaxis(w, -1, i + 1)
        w = w.reshape(*w.shape[:i], w.shape[i] * w.shape[i + 1], *w.shape[i + 2 :])
    w = jnp.transpose(w, [axes.index(a) for a in "OI" + g.spatial])
    return jnp.flip(w, range(2, w.ndim)) if g.mode == "convolution" else w


def lax_conv(g: Geometry, x: jax.Array, w: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(
        _image_to_lax(g, x),
        _filter_to_lax(g, w),
        g.window.stride,
        g.padding if isinstance(g.padding, str) else g.window.padding,
        rhs_dilation=g.window.dilation,
        feature_group_count=g.groups,
        precision=lax.Precision.HIGHEST,
    )
    return _image_from_lax(g, y)


def _lax_sum(case: Case, *arrays: jax.Array) -> jax.Array:
    g = case.geometry
    if case.op == "conv":
        return lax_conv(g, *arrays)
    if case.op == "conv_bgrad":
        dy = _image_to_lax(g, arrays[0])
        return jnp.sum(dy, (0, *range(2, dy.ndim)))
    a, b = arrays
    zeros = ft.partial(jnp.zeros, dtype=a.dtype)
    if case.op == "conv_wgrad":
        return jax.vjp(lambda w: lax_conv(g, a, w), zeros(g.shape("w")))[1](b)[0]
    return jax.vjp(lambda x: lax_conv(g, x, b), zeros(g.shape("x")))[1](a)[0]


def lax_call(case: Case, *arrays: Any) -> jax.Array:
    """What `call` computes, built of `jax.lax` (activations: None and "relu")."""
    given = arrays or cases.as_jax(case)
    count = len(case.arrays)
    named, o = dict(zip(case.named, given[count:], strict=True)), case.options
    y = o.get("alpha", 1.0) * _lax_sum(case, *given[:count])
    if "prior" in named:
        y = y + o["beta"] * named["prior"]
    if "residual" in named:
        y = y + named["residual"]
    if "bias" in named:
        y = y + jnp.broadcast_to(_along_channel(case, named["bias"]), y.shape)
    return jnp.where(y > 0, y, jnp.zeros_like(y)) if o.get("activation") == "relu" else y
