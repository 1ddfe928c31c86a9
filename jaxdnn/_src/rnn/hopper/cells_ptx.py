"""What a step computes of one unit and one sequence, in PTX: as `steps` has it, with fused multiply-adds."""

import functools as ft

import numpy as np

from jaxdnn._src.hopper.curves_ptx import ONE, ZERO, sigmoid, tanh
from jaxdnn._src.hopper.ptx import Emitter, real

Limits = tuple[float, float] | None  # of an LSTM's cell


def lstm(e: Emitter, a: list[str], s: list[str], before: str, clip: Limits) -> tuple[list[str], str, str]:
    """The gates, c and h, of what enters and h times the matrix by gate, and of c before."""
    z = [e.f("add.rn.f32", *pair) for pair in zip(a, s, strict=True)]
    gates = [sigmoid(e, z[0]), sigmoid(e, z[1]), tanh(e, z[2]), sigmoid(e, z[3])]
    c, _ = _cell(e, gates, before, clip)
    return gates, c, _times(e, gates[3], tanh(e, c))


def gru(e: Emitter, a: list[str], s: list[str], q: str, before: str) -> tuple[list[str], str]:
    """The gates, with the n gate's recurrent part, and h; q is that part's bias, `before` the state before."""
    of_n = e.f("add.rn.f32", s[2], q)
    r, z = (sigmoid(e, e.f("add.rn.f32", a[j], s[j])) for j in range(2))
    n = tanh(e, e.f("fma.rn.f32", r, of_n, a[2]))
    h = e.f("fma.rn.f32", z, before, _times(e, _less(e, ONE, z), n))
    return [r, z, n, of_n], h


def plain(e: Emitter, cell: str, a: str, s: str) -> str:
    """h of a layer of tanh or relu."""
    z = e.f("add.rn.f32", a, s)
    return tanh(e, z) if cell == "tanh" else e.f("max.NaN.f32", z, ZERO)


def lstm_gradient(e: Emitter, gates: list[str], before: str, dh: str, dc: str, clip: Limits) -> tuple[list[str], str]:
    """The derivatives of the gates before their curves, and that of c before the step."""
    i, f, g, o = gates
    c, outside = _cell(e, gates, before, clip)
    t = tanh(e, c)
    dc = e.f("fma.rn.f32", dh, _times(e, o, _of_tanh(e, t)), dc)
    for beyond in outside:
        dc = e.f("selp.f32", ZERO, dc, beyond)
    found = [
        _times(e, dc, g, _of_sigmoid(e, i)),
        _times(e, dc, before, _of_sigmoid(e, f)),
        _times(e, dc, i, _of_tanh(e, g)),
        _times(e, dh, t, _of_sigmoid(e, o)),
    ]
    return found, _times(e, dc, f)


def gru_gradient(e: Emitter, gates: list[str], before: str, dh: str) -> tuple[list[str], str]:
    """The derivatives of r, z, n and the n gate's recurrent part, and of dh what the state keeps."""
    r, z, n, of_n = gates
    dn = _times(e, dh, _less(e, ONE, z), _of_tanh(e, n))
    dz = _times(e, dh, _less(e, before, n), _of_sigmoid(e, z))
    dr = _times(e, dn, of_n, _of_sigmoid(e, r))
    return [dr, dz, dn, _times(e, dn, r)], _times(e, dh, z)


def plain_gradient(e: Emitter, cell: str, h: str, dh: str) -> str:
    """The derivative before tanh or relu, whose value is h."""
    slope = _of_tanh(e, h) if cell == "tanh" else e.f("selp.f32", ONE, ZERO, e.p("setp.gt.f32", h, ZERO))
    return _times(e, slope, dh)


def _cell(e: Emitter, gates: list[str], before: str, clip: Limits) -> tuple[str, list[str]]:
    """c, and whether it was below and above its limits, if it has any."""
    i, f, g, _ = gates
    c = e.f("fma.rn.f32", f, before, _times(e, i, g))
    if clip is None:
        return c, []
    with np.errstate(over="ignore"):
        low, high = (real(float(np.float32(limit))) for limit in clip)
    below, above = e.p("setp.lt.f32", c, low), e.p("setp.gt.f32", c, high)
    return e.f("selp.f32", low, e.f("selp.f32", high, c, above), below), [below, above]


def _times(e: Emitter, *factors: str) -> str:
    return ft.reduce(ft.partial(e.f, "mul.rn.f32"), factors)


def _less(e: Emitter, a: str, b: str) -> str:
    return e.f("sub.rn.f32", a, b)


def _of_sigmoid(e: Emitter, s: str) -> str:
    """The slope of a sigmoid at its value."""
    return _times(e, s, _less(e, ONE, s))


def _of_tanh(e: Emitter, t: str) -> str:
    """The slope of tanh at its value."""
    return e.f("fma.rn.f32", e.f("neg.f32", t), t, ONE)
