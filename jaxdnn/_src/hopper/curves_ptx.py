"""Sigmoid and tanh in PTX, by the exponential and the reciprocal of the special function unit.

sigmoid(x) = 1 / (1 + 2^(-x log2 e)). tanh(x) is (1 - e) / (1 + e) with e = 2^(-2 |x| log2 e) and the sign of x; below
0.5625 it is x + x³ P(x²), for the quotient would cancel. ex2.approx.ftz is off by at most 2^-22 of its result and
rcp.approx.ftz by 2^-23, as PTX's specification says.
"""

from jaxdnn._src.hopper.ptx import Emitter, real

LOG2_E = 1.4426950408889634
ONE, ZERO = real(1.0), real(0.0)
SMALL = 0.5625
# P, of the smallest relative error on [0, SMALL].
SERIES = (-0.33333313, 0.13332452, -0.053837445, 0.021007515, -0.00617989)


def sigmoid(e: Emitter, x: str) -> str:
    power = e.f("ex2.approx.ftz.f32", e.f("mul.rn.f32", x, real(-LOG2_E)))
    return e.f("rcp.approx.ftz.f32", e.f("add.rn.f32", power, ONE))


def tanh(e: Emitter, x: str) -> str:
    size = e.f("abs.f32", x)
    power = e.f("ex2.approx.ftz.f32", e.f("mul.rn.f32", size, real(-2 * LOG2_E)))
    over = e.f("rcp.approx.ftz.f32", e.f("add.rn.f32", power, ONE))
    large = e.f("mul.rn.f32", e.f("sub.rn.f32", ONE, power), over)
    large = e.f("copysign.f32", x, large)
    square = e.f("mul.rn.f32", x, x)
    series = e.f("mov.f32", real(SERIES[-1]))
    for coefficient in SERIES[-2::-1]:
        series = e.f("fma.rn.f32", series, square, real(coefficient))
    small = e.f("fma.rn.f32", e.f("mul.rn.f32", series, square), x, x)
    return e.f("selp.f32", small, large, e.p("setp.lt.f32", size, real(SMALL)))
