"""The arithmetic of `core.numbers` in PTX, for float32: each product and each sum is an instruction that rounds.

A state is a pair of registers, m from 1/2 to 1 and e. Of a 0 only e is meant, which is `ZERO`, and m is anything from
1/2 to 1: a term that far below the largest has no effect on a rounded sum, and where all terms are 0 the sum's exponent
says so. In the same way a term below `ALIGNED` counts as 2^`ALIGNED`, which has no effect either.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxdnn._src.core.numbers import ALIGNED, FARTHEST, FLOATS, LARGEST, ZERO
from jaxdnn._src.hopper.ptx import Emitter, real

OF = FLOATS[np.dtype(jnp.float32)]
NOTHING, HALF = real(0.0), real(0.5)
MAGIC = 1.5 * 2.0**OF.digits  # a float beside which no digit behind the point is left
State = tuple[str, str]


def power(e: Emitter, exponent: str) -> str:
    """2^exponent, of a normal float."""
    return e.f("mov.b32", e.r("shl.b32", e.r("add.s32", exponent, OF.half + 1), OF.digits))


def total(e: Emitter, terms: Sequence[State]) -> State:
    """Their sum, from the left, as a float beside the largest of them, and its exponent."""
    top = terms[0][1]
    for _, exponent in terms[1:]:
        top = e.r("max.s32", top, exponent)
    parts = []
    for m, exponent in terms:
        below = e.r("max.s32", e.r("sub.s32", exponent, top), ALIGNED)
        parts.append(e.f("mov.b32", e.r("mad.lo.s32", below, 1 << OF.digits, e.r("mov.b32", m))))
    found = parts[0]
    for part in parts[1:]:
        found = e.f("add.rn.f32", found, part)
    return found, top


def normal(e: Emitter, m: str, exponent: str) -> State:
    """m 2^exponent with m brought to its place; of a 0 the exponent says so, also where m is not 0."""
    bits = e.r("mov.b32", m)
    digits = e.r("or.b32", e.r("and.b32", bits, (1 << OF.digits) - 1), OF.half << OF.digits)
    exponent = e.r("add.s32", e.r("add.s32", exponent, -OF.half), e.r("shr.u32", bits, OF.digits))
    nothing = e.p("setp.lt.s32", exponent, -LARGEST)
    return e.f("mov.b32", digits), e.r("selp.b32", ZERO, e.r("min.s32", exponent, LARGEST), nothing)


def plain(e: Emitter, m: str, exponent: str) -> str:
    """m 2^exponent as a float; 0 where the exponent is small."""
    within = e.r("min.s32", e.r("max.s32", exponent, OF.least), -OF.least)
    found = e.f("mul.rn.f32", m, power(e, within))
    return e.f("selp.f32", NOTHING, found, e.p("setp.lt.s32", exponent, OF.least))


def _horner(e: Emitter, x: str) -> str:
    found = e.f("mov.f32", real(OF.exp[0]))
    for coefficient in OF.exp[1:]:
        found = e.f("add.rn.f32", e.f("mul.rn.f32", found, x), real(coefficient))
    return found


def _rest(e: Emitter, d: str, n: str) -> str:
    """d - n log 2."""
    high, low = (e.f("mul.rn.f32", n, real(part)) for part in (OF.high, OF.low))
    return e.f("sub.rn.f32", e.f("sub.rn.f32", d, high), low)


def exponential(e: Emitter, d: str) -> State:
    """e^d = w 2^n, as `core.numbers.exponential`, but for a w of 0, whose n is `ZERO`."""
    near = e.p("setp.le.f32", e.f("abs.f32", d), real(FARTHEST))
    d = e.f("selp.f32", d, NOTHING, near)
    whole = e.r("cvt.rni.s32.f32", e.f("mul.rn.f32", d, real(1 / math.log(2))))
    r = _rest(e, d, e.f("cvt.rn.f32.s32", whole))
    w = _horner(e, e.f("min.f32", e.f("max.f32", r, real(-0.5)), real(0.5)))
    return e.f("selp.f32", w, NOTHING, near), e.r("selp.b32", whole, ZERO, near)


def small_exponential(e: Emitter, d: str) -> str:
    """The float `plain` of e^d, for a d that is not above 0, nor NaN."""
    shifted = e.f("add.rn.f32", e.f("mul.rn.f32", d, real(1 / math.log(2))), real(MAGIC))
    n = e.f("sub.rn.f32", shifted, real(MAGIC))  # where it is small beside `OF.least` it need not be exact
    w = _horner(e, _rest(e, d, n))  # the rest is within a half by itself
    found = e.r("mad.lo.s32", e.r("mov.b32", shifted), 1 << OF.digits, e.r("mov.b32", w))  # the last bits are n
    return e.f("selp.f32", NOTHING, e.f("mov.b32", found), e.p("setp.lt.f32", n, real(OF.least)))
