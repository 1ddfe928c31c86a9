"""The arithmetic of the dropout kernels on a group of elements: bias, activation, dropout, residual, and gradients.

A group is 16 bytes of the narrowest operand: four or eight neighbours, which share one or two counters of Philox. Every
product is rounded on its own (`lanes.product`), so that the bits are those of the definition. In bfloat16 and float16
an activation is read from a table in float32 whose entries are already multiplied by the scale of kept elements.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.dropout import xla
from jaxdnn._src.dropout.hopper.plan import Plan
from jaxdnn._src.dropout.primitive import BLOCK, COUNTERS
from jaxdnn._src.hopper import lanes

F32, U32 = jnp.float32, jnp.uint32


class Group:
    """The arithmetic on a group of each thread. `words` are the groups of the operands by name.

    lead: the number of the example, which tells keys and starts that are mapped.
    """

    def __init__(self, plan: Plan, refs: dict[str, Any], lead: Any) -> None:
        self.plan, self.refs = plan, refs
        own = lambda name: refs[name].at[lead if name in plan.mapped else 0]
        # Loaded once, also for a loop.
        self._words = {name: [own(name)[i] for i in range(2)] for name in ("key", "start") if name in refs}

    def value(self, words: dict[str, Array], group: Array) -> Array:
        """y or dx, in float32, of the groups of these numbers."""
        v = self.before_dropout(words)
        if self.plan.limit:
            v = self.dropped(v, self._kept(group.astype(U32)))
        return self.after_dropout(v, words)

    def before_dropout(self, words: dict[str, Array]) -> Array:
        return self._backward(words) if self.plan.backward else self._forward(words)

    def dropped(self, v: Array, kept: Array) -> Array:
        """v where it is kept, else zero."""
        # Behind a barrier, or LLVM would round first and then select each half of a word.
        return lax.optimization_barrier(jnp.where(kept, v, 0.0))

    def after_dropout(self, v: Array, words: dict[str, Array]) -> Array:
        return lanes.float32(words["residual"]) + v if "residual" in words else v

    def draw(self, index: Array) -> tuple[Array, ...]:
        """The four random words of the counters that are `index` after the start."""
        k0, k1 = self._words["key"]
        with jax.enable_x64(True):
            return xla.philox((*self._counter(index), k0, k1))

    def _kept(self, group: Array) -> Array:
        """Whether each element of the groups is kept."""
        elements = self.plan.elements
        counters = elements // BLOCK
        words = [w for i in range(counters) for w in self.draw(group * U32(counters) + U32(i))]
        number, word = lanes.positions(elements), lanes.wide(words[0], elements)
        for i in range(1, elements):  # known when compiled: no instruction is left of this selection
            word = jnp.where(number == i, lanes.wide(words[i], elements), word)
        return word >= U32(self.plan.limit)

    def _counter(self, index: Array) -> tuple[Array, Any]:
        """The two words of start + index, modulo the number of counters of 2^64 elements; the index is below 2^32."""
        plan = self.plan
        if plan.start is None:
            low, high = self._words["start"]
        else:
            low, high = U32(plan.start & 0xFFFFFFFF), U32(plan.start >> 32)
            if (plan.start & 0xFFFFFFFF) + plan.size // BLOCK < 2**32:
                return low + index, high
        total = low + index
        high = high + jnp.where(total < low, U32(1), U32(0))
        known = plan.start is not None and plan.start + plan.size // BLOCK <= COUNTERS
        return total, high if known else high & U32((COUNTERS - 1) >> 32)

    def _forward(self, words: dict[str, Array]) -> Array:
        """The activation of x + bias, times the scale."""
        plan = self.plan
        if plan.activation == "table":
            return self._look_up(words)
        z = self._sum(words)
        match plan.activation:
            case "relu":
                z = jnp.maximum(z, 0.0)
            case "leaky_relu":
                z = jnp.where(z > 0, z, lanes.product(z, lanes.full(plan.parameter, plan.elements, F32)))
            case "clipped_relu":
                z = jnp.minimum(jnp.maximum(z, 0.0), plan.parameter)
        return self._scaled(z)

    def _backward(self, words: dict[str, Array]) -> Array:
        """dy times the scale times the activation's slope at x + bias."""
        dy = lanes.float32(words["dy"])
        if self.plan.activation == "identity":
            return self._scaled(dy)
        slope = self._look_up(words) if self.plan.activation == "table" else self._slope(self._sum(words))
        return lanes.product(dy, slope)

    def _slope(self, z: Array) -> Array:
        """The slope of a piecewise linear activation times the scale; NaN for NaN."""
        plan = self.plan
        below = _product(plan.scale, plan.parameter) if plan.activation == "leaky_relu" else 0.0
        slope = jnp.where(z > 0, plan.scale, below)
        if plan.activation == "clipped_relu":
            slope = jnp.where(z < plan.parameter, slope, 0.0)
        return jnp.where(z != z, z, slope)

    def _sum(self, words: dict[str, Array]) -> Array:
        """x + bias in float32."""
        x = lanes.float32(words["x"])
        return x + lanes.float32(words["bias"]) if "bias" in words else x

    def _look_up(self, words: dict[str, Array]) -> Array:
        """The table's entries of x + bias, rounded to the type of x."""
        z = words["x"]
        if "bias" in words:  # two sums an instruction if both have 16 bits, rounded once as well
            same = words["bias"].dtype == z.dtype
            z = z + words["bias"] if same else self._sum(words).astype(z.dtype)
        return lanes.entries(self.refs["table"], lax.bitcast_convert_type(z, jnp.uint16))

    def _scaled(self, v: Array) -> Array:
        return v if self.plan.scale == 1 else lanes.product(v, lanes.full(self.plan.scale, self.plan.elements, F32))


def _product(a: float, b: float) -> float:
    """The product of two float32 numbers, rounded to float32 once; it is exact in float64."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(a * b))
