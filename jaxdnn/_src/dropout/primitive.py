"""The primitives of dropout, with bias, activation and residual: types, derivatives, vmap and sharding rules.

With m the mask, s the scale of kept elements and z = x + bias:

| primitive | operands | results | linear in |
|---|---|---|---|
| `dropout` | x, [bias], [residual], key, start | y = residual + m s act(z) | x, if there is nothing else |
| `dropout_tangent` | dx, [dbias], [x, [bias]], key, start | m s act'(z) (dx + dbias) | dx, dbias |
| `dropout_dgrad` | dy, [x, [bias]], key, start | dx = m s act'(z) dy, and dbias, its sum | dy |

Dropout alone is its own tangent and its own transpose. The last is the transpose of the second; without dbias the
second is its own. All of them draw the mask again, and have x and bias as operands only if there is an activation;
without one no residual of the size of x is kept. bias has the rank of x, with length 1 along the axes where it is
constant. x has leading axes, which share one mask or have a key each, and then the axes that are counted; along the
leading ones bias, key and start may have length 1.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation import formulas
from jaxdnn._src.activation.formulas import Parameter
from jaxdnn._src.core import primitives, rounding
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.determinism import satisfies
from jaxdnn._src.core.partitioning import Factors, alike
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.tensor import reductions

OPS = ("dropout", "dropout_tangent", "dropout_dgrad")
X, BIAS, WORDS = "x", "bias", "words"  # the role of an operand: an array like x, one like the bias, or two words
ROLES = {"x": X, "dy": X, "residual": X, "bias": BIAS, "dbias": BIAS, "key": WORDS, "start": WORDS}


BLOCK = 4  # random words that one counter gives
COUNTERS = 2**64 // BLOCK  # elements are numbered modulo 2^64, and begin anew with counter 0


@dataclasses.dataclass(frozen=True)
class DropoutSpec:
    """Everything about a call that is known when it is traced, apart from shapes.

    Attributes:
      threshold: an element is kept if its random word is at least this, from 0 to 2^32 - 1.
      scale: what a kept element is multiplied by, 1 / (1 - rate).
      order: the counted axes in logical order, the slowest first; numbered from the first counted axis.
      shift: the first element is word `shift` of counter `start`; None: `start` counts elements, not counters.
      leading: how many leading axes x, key and start have; those of key and start may be 1.
      start: the counter, if it is known when traced; then that operand is not read, and the key is passed in its place.
      activation, parameter: as `read_activation` gives them; "identity" for none.
      bias, residual: whether there is one among the operands (of the derivatives: whether z has a bias).
      out_dtype: of the first result; None for dropout alone, whose result has the dtype of x.
      dbias: whether `dropout_tangent` has a tangent of the bias.
      summed: of `dropout_dgrad`, the counted axes along which the bias is the same.
    """

    threshold: int
    scale: float
    order: tuple[int, ...]
    shift: int | None
    leading: int = 0
    engine: str | None = None
    level: str = "fast"
    start: int | None = None
    activation: str = "identity"
    parameter: Parameter = None
    bias: bool = False
    residual: bool = False
    out_dtype: np.dtype | None = None
    dbias: bool = False
    summed: tuple[int, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing but dropout, which is linear in x."""
        return self.out_dtype is None

    @property
    def slopes(self) -> bool:
        """Whether the derivative depends on x."""
        return self.activation != "identity"

    @property
    def looked_up(self) -> bool:
        """Whether the activation of a narrow type comes from a table, and x + bias is rounded to that type first."""
        return self.activation not in formulas.PIECEWISE

    def alone(self) -> "DropoutSpec":
        """Dropout alone, by the same mask."""
        fields = ("threshold", "scale", "order", "shift", "leading", "engine", "level", "start")
        return DropoutSpec(*(getattr(self, name) for name in fields))


def operand_names(op: str, spec: DropoutSpec) -> tuple[str, ...]:
    """The operands in their order; dy is what the derivatives are linear in, a tangent of x or a cotangent of y."""
    if op == "dropout":
        return ("x", *["bias"] * spec.bias, *["residual"] * spec.residual, "key", "start")
    at = ("x", *["bias"] * spec.bias) if spec.slopes else ()
    return ("dy", *["dbias"] * (spec.dbias and op == "dropout_tangent"), *at, "key", "start")


def roles(op: str, spec: DropoutSpec) -> tuple[str, ...]:
    """The role of each operand."""
    return tuple(ROLES[name] for name in operand_names(op, spec))


def precision(spec: DropoutSpec, operands: Sequence[Any]) -> np.dtype:
    """The dtype to compute in: float64 if an operand or the result has it, otherwise float32."""
    dtypes = (spec.out_dtype, *(np.dtype(v.dtype) for v in operands))
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


# ---- types -----------------------------------------------------------------------------------------------------------


def _result(spec: DropoutSpec, *operands: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(operands[0].shape, spec.out_dtype or operands[0].dtype)


def _dgrad_results(spec: DropoutSpec, dy: Any, *operands: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    summed = [spec.leading + axis for axis in spec.summed]
    shape = tuple(1 if axis in summed else size for axis, size in enumerate(dy.shape))
    return _result(spec, dy), jax.ShapeDtypeStruct(shape, precision(spec, (dy, *operands)))


def is_fixed(spec: DropoutSpec) -> bool:
    """Whether the gradient of the bias is added in a fixed tree: if the level is stronger than run_to_run."""
    return not satisfies("run_to_run", spec.level)


# ---- derivatives -----------------------------------------------------------------------------------------------------


def _jvp(spec: DropoutSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    if spec.is_alone:
        return primitives.jvp_of_linear("dropout", None, spec, primals, tangents, constant=2)
    y = bind("dropout", *primals, spec=spec)
    x, *others = primals
    dx, *d_others = tangents
    bias, d_bias = (others.pop(0), d_others.pop(0)) if spec.bias else (None, None)
    d_residual = d_others[0] if spec.residual else None
    terms = []
    has_bias = d_bias is not None and not isinstance(d_bias, ad.Zero)
    if has_bias or not isinstance(dx, ad.Zero):
        along = (ad.instantiate_zeros(dx), *([d_bias] if has_bias else []))
        at = (x, *([] if bias is None else [bias])) if spec.slopes else ()
        linear = dataclasses.replace(spec, residual=False, bias=spec.bias and spec.slopes, dbias=has_bias)
        terms.append(bind("dropout_tangent", *along, *at, *primals[-2:], spec=linear))
    if d_residual is not None and not isinstance(d_residual, ad.Zero):
        # At its edges: its transpose is a result, which XLA would join with what comes before and after.
        edge = ft.partial(rounding.at_edges, spec.level)
        terms.append(edge(edge(d_residual).astype(spec.out_dtype)))
    return y, primitives.added(y, terms, spec.level)


def _transpose(spec: DropoutSpec, ct: Array, *operands: Any) -> list[Array | None]:
    if not spec.is_alone:
        raise NotImplementedError(
            "`dropout` with an epilogue is linear in none of its operands, so it has no transpose."
        )
    _, key, start = operands
    return [bind("dropout", ct, key, start, spec=spec), None, None]


def _formula(op: str, spec: DropoutSpec, *operands: Array) -> Any:
    """The formula that gives the second derivatives in x and bias; the mask comes from dropout itself."""
    edge = ft.partial(rounding.at_edges, spec.level)
    *linear, k, s = edge(operands)
    at: list[Array] = []
    if spec.slopes:
        count = 1 + spec.bias
        linear, at = linear[:-count], linear[-count:]
    wide = precision(spec, operands)
    t = ft.reduce(jnp.add, [v.astype(wide) for v in linear])
    if at:
        z = ft.reduce(jnp.add, [v.astype(wide) for v in at])
        t = rounding.product(t, formulas.slope(z, spec.activation, spec.parameter))
    v = bind("dropout", t, k, s, spec=spec.alone())
    first = edge(rounding.nearest(v, spec.out_dtype))
    if op == "dropout_tangent":
        return first
    axes = tuple(spec.leading + axis for axis in spec.summed)
    return first, reductions.add(v, axes, is_fixed(spec))


def _tangent_jvp(spec: DropoutSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    y = bind("dropout_tangent", *primals, spec=spec)
    count = 1 + spec.dbias
    terms = []
    if not all(isinstance(t, ad.Zero) for t in tangents[:count]):
        has_bias = spec.dbias and not isinstance(tangents[1], ad.Zero)
        along = (ad.instantiate_zeros(tangents[0]), *tangents[1 : 1 + has_bias])
        again = dataclasses.replace(spec, dbias=has_bias)
        terms.append(bind("dropout_tangent", *along, *primals[count:], spec=again))
    terms += primitives.along_others(ft.partial(_formula, "dropout_tangent", spec), primals, tangents, count, 2)
    return y, primitives.added(y, terms)


def _tangent_transpose(spec: DropoutSpec, ct: Array, *operands: Any) -> list[Array | None]:
    count = 1 + spec.dbias
    wanted, rest = operands[:count], operands[count:]
    dx = wanted[0]
    to = np.dtype(dx.aval.dtype if ad.is_undefined_primal(dx) else dx.dtype)
    back = dataclasses.replace(spec, dbias=False, out_dtype=to)
    nothing: list[Array | None] = [None] * len(rest)
    if not spec.dbias or not ad.is_undefined_primal(wanted[1]):
        return [bind("dropout_tangent", ct, *rest, spec=back), *[None] * (count - 1), *nothing]
    aval = wanted[1].aval
    counted = range(spec.leading, len(aval.shape))
    summed = tuple(a - spec.leading for a in counted if aval.shape[a] != ct.shape[a])
    first, second = bind("dropout_dgrad", ct, *rest, spec=dataclasses.replace(back, summed=summed))
    axes = tuple(a for a, (size, into) in enumerate(zip(second.shape, aval.shape, strict=True)) if size != into)
    second = reductions.add(second, axes, is_fixed(spec)) if axes else second
    return [first if ad.is_undefined_primal(dx) else None, second.astype(aval.dtype), *nothing]


def _dgrad_transpose(spec: DropoutSpec, cts: Sequence[Any], *operands: Any) -> list[Array | None]:
    dy, *rest = operands
    has_bias = not isinstance(cts[1], ad.Zero)
    forth = dataclasses.replace(spec, dbias=has_bias, summed=(), out_dtype=np.dtype(dy.aval.dtype))
    along = (ad.instantiate_zeros(cts[0]), *([cts[1]] if has_bias else []))
    return [bind("dropout_tangent", *along, *rest, spec=forth), *[None] * len(rest)]


# ---- vmap and sharding -----------------------------------------------------------------------------------------------


def _batch(op: str, spec: DropoutSpec, operands: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Adds a leading axis; operands that are not mapped have length 1 along it, unless they must have x's shape."""
    shared = [i for i, role in enumerate(roles(op, spec)) if role != X]
    return primitives.batch_leading(op, dataclasses.replace(spec, leading=spec.leading + 1), operands, dims, shared)


def _factors(op: str, spec: DropoutSpec, *avals: Any) -> Factors:
    """All axes may be sharded but those that are summed; an axis of length 1 where x's is longer has its own name."""
    shape = avals[0].shape
    axes = tuple(f"x{i}" for i in range(len(shape)))
    summed = [spec.leading + axis for axis in spec.summed] if op == "dropout_dgrad" else []

    def dims(kind: str, own: tuple[int, ...], words: bool) -> tuple[str, ...]:
        rank = spec.leading if words else len(shape)
        return (*alike(axes[:rank], shape[:rank], own[:rank], kind), *((f"{kind}words",) if words else ()))

    results = _dgrad_results(spec, *avals) if op == "dropout_dgrad" else (_result(spec, *avals),)
    kinds = roles(op, spec)
    return Factors(
        operands=tuple(
            dims(f"o{i}", v.shape, role == WORDS) for i, (v, role) in enumerate(zip(avals, kinds, strict=True))
        ),
        results=tuple(dims(f"r{i}", v.shape, False) for i, v in enumerate(results)),
        free=(),
        placed=tuple(a for i, a in enumerate(axes) if i not in summed),
    )


_RULES: dict[str, dict[str, Any]] = {
    "dropout": {"results": _result, "jvp": _jvp, "transpose": _transpose},
    "dropout_tangent": {
        "results": _result,
        "jvp": _tangent_jvp,
        "transpose": _tangent_transpose,
        "words": "A derivative of `dropout`",
    },
    "dropout_dgrad": {
        "results": _dgrad_results,
        "jvp": ft.partial(primitives.jvp_of_linear, "dropout_dgrad", ft.partial(_formula, "dropout_dgrad"), constant=2),
        "transpose": _dgrad_transpose,
        "many": True,
        "words": "The gradient of `dropout` in its bias",
    },
}
for _op, _rules in _RULES.items():
    primitives.define(_op, **_rules, batch=ft.partial(_batch, _op), factors=ft.partial(_factors, _op))


# ---- 64-bit counts in two 32-bit words, the low one first ------------------------------------------------------------


def words(value: int) -> np.ndarray:
    """A number below 2^64 as two words."""
    return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)


def pair(value: int) -> Array:
    """The same as an array of JAX's."""
    return jnp.asarray(words(value))


def pair_of(value: Array) -> Array:
    """A scalar integer array modulo 2^64 as two words."""
    if value.dtype.itemsize == 8:
        return jnp.stack([value.astype(jnp.uint32), (value >> jnp.asarray(32, value.dtype)).astype(jnp.uint32)])
    high = jnp.where(value < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return jnp.stack([value.astype(jnp.uint32), high])


def plus(a: Array, b: Array) -> Array:
    """a + b of two pairs, modulo 2^64."""
    low = a[..., 0] + b[..., 0]
    carry = (low < b[..., 0]).astype(jnp.uint32)
    return jnp.stack([low, a[..., 1] + b[..., 1] + carry], -1)


def times(a: Array, n: Any) -> Array:
    """a n of two numbers below 2^32, as pairs."""
    low = lambda v: v & jnp.uint32(0xFFFF)
    high = lambda v: v >> jnp.uint32(16)
    b = jnp.full_like(a, n)
    middle = high(low(a) * low(b)) + low(high(a) * low(b)) + low(low(a) * high(b))
    above = high(a) * high(b) + high(high(a) * low(b)) + high(low(a) * high(b)) + high(middle)
    return jnp.stack([a * b, above], -1)


def times_block(a: Array) -> Array:
    """BLOCK a of a pair, modulo 2^64."""
    low, high = a[..., 0], a[..., 1]
    return jnp.stack([low << jnp.uint32(2), (high << jnp.uint32(2)) | (low >> jnp.uint32(30))], -1)


@ft.lru_cache
def threshold(rate: float) -> int:
    """rate 2^32, rounded to the nearest integer, ties to even; the product is exact."""
    return int(np.rint(rate * 2.0**32))
