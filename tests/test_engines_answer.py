"""Every engine answers for every call: no call may end in an exception of an engine that does not serve it.

The calls are those of every op and of its derivatives, on channels first and last, and these again with every dtype in
place of each operand's and result's: also such as no public op makes now, for an engine does not know who asks.
"""

import dataclasses
import functools as ft
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn._src.core.explain import traced_calls
from jaxdnn._src.core.tolerance import ACCUMULATIONS
from tests.test_api import ARRAYS, NEEDED

DTYPES = [np.dtype(name) for name in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")]
DTYPES += [np.dtype(name) for name in ("int8", "uint8", "int32", "bool")]
WIDE = np.zeros((4, 16, 8, 64))  # of a shape that kernels serve
LAYOUTS = ("NHWC", "NCHW")
LOOKED_UP = ("gelu", ("relu", -1.0, 2.0, 0.25))
DROPOUTS: list[dict[str, Any]] = [
    {"activation": a, **{name: True for name in given}, "layout": layout}
    for a in (None, "relu", *LOOKED_UP)
    for given in ((), ("bias",), ("residual",), ("bias", "residual"))
    for layout in LAYOUTS
]
# Beside those of ARRAYS with every default: arguments, and options; True stands for an array.
FURTHER: dict[str, list[tuple[tuple[Any, ...], list[dict[str, Any]]]]] = {
    "activation": [((WIDE,), [{"activation": a} for a in LOOKED_UP])],
    "batch_norm": [((WIDE,), [{"layout": layout} for layout in LAYOUTS])],
    "conv": [
        ((WIDE, np.zeros((3, 3, 64, 32))), [{}, {"activation": "relu"}, {"bias": True}, {"precision": "tf32"}]),
        ((WIDE, np.zeros((3, 3, 1, 64))), [{"groups": 64}]),
        ((WIDE, np.zeros((32, 3, 3, 64))), [{"filter_layout": "OHWI"}]),
        ((WIDE, np.zeros((32, 16, 3, 3))), [{"layout": "NCHW"}]),
    ],
    "dropout": [((v, 7), DROPOUTS) for v in (ARRAYS["activation"][0], WIDE)],
    "group_norm": [((WIDE,), [{"groups": 8}, {"groups": 4, "layout": "NCHW"}])],
    "instance_norm": [((WIDE,), [{}])],
    "layer_norm": [((WIDE,), [{}, {"scale": True}])],
    "logsumexp": [((WIDE,), [{}])],
    "pool": [((WIDE,), [{"mode": m, "layout": layout} for m in ("max", "average", "lp") for layout in LAYOUTS])],
    "rms_norm": [((WIDE,), [{}])],
    "softmax": [((WIDE,), [{"algorithm": a, "axis": i} for a in ("accurate", "fast", "log") for i in (-1, 1)])],
}


def traced(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> Iterator[engines.Call]:
    """The calls of an op, its gradient, the gradient's derivative, and its own along a tangent."""
    floats = [i for i, v in enumerate(given) if isinstance(v, np.ndarray) and v.dtype.kind == "f"]
    added = [name for name, v in options.items() if v is True]

    def function(*arrays: jax.Array) -> list[jax.Array]:
        every, more = list(given), dict(options)
        for i, v in zip(floats, arrays, strict=False):
            every[i] = v
        more |= dict(zip(added, arrays[len(floats) :], strict=True))
        found = jax.tree.leaves(getattr(dnn, name)(*every, **NEEDED.get(name, {}), **more))
        return [y for y in found if jnp.issubdtype(y.dtype, jnp.floating)]

    channels = (given[-1 if name == "conv" else 0].shape[options.get("layout") == "NCHW" or -1],) if added else ()
    shapes = [given[i].shape for i in floats] + [given[0].shape if k == "residual" else channels for k in added]
    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    every = tuple(range(len(operands)))
    scalar = lambda *a: ft.reduce(jnp.add, [jnp.vdot(y, y) for y in function(*a)], np.float32(0))
    gradient = jax.grad(scalar, every)
    functions = (function, gradient, lambda *a: jax.jvp(gradient, a, a), lambda *a: jax.jvp(function, a, a))
    for transformed in functions if operands else (function,):
        yield from traced_calls(transformed, *operands, platform="cuda")


@ft.cache
def calls() -> dict[str, list[engines.Call]]:
    """Those of each primitive, each once."""
    found: dict[str, dict[str, engines.Call]] = {op: {} for op in engines.ops()}
    for name, given in ARRAYS.items():
        for arrays, several in [(given, [{}]), *FURTHER.get(name, [])]:
            for call in itertools.chain.from_iterable(traced(name, arrays, options) for options in several):
                found[call.op].setdefault(repr(call), call)
    return {op: list(by_text.values()) for op, by_text in found.items()}


def varied(call: engines.Call) -> Iterator[engines.Call]:
    """The call with every dtype in place of all, of one operand's, of the result's; also of an array without elements,
    and in a program for several devices."""
    results: list[Any] = [{}]
    if hasattr(call.spec, "out_dtype"):
        results += [{"out_dtype": dtype} for dtype in DTYPES]
    same = [tuple(_as(v, dtype) for v in call.avals) for dtype in DTYPES]
    one = [(*call.avals[:i], _as(v, dtype), *call.avals[i + 1 :]) for i, v in enumerate(call.avals) for dtype in DTYPES]
    empty = tuple(jax.ShapeDtypeStruct((0, *v.shape[1:]) if v.shape else (), v.dtype) for v in call.avals)
    for avals, more in itertools.product([call.avals, *same, *one, empty], results):
        for dealt in (False, True):
            spec = dataclasses.replace(call.spec, **more)
            yield dataclasses.replace(call, avals=avals, spec=spec, device_kind=hopper.MEASURED_ON[0], dealt=dealt)


def _as(aval: Any, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, dtype)


def ask(engine: engines.Engine, call: engines.Call) -> str | None:
    """Why the engine does not serve a call, after it has answered all that may be asked then, or all that there is."""
    reason = engine.supports(call)
    assert reason is None or (isinstance(reason, str) and reason and not reason.endswith("."))
    assert engine.level(call) in LEVELS
    assert engine.accumulation(call) in ACCUMULATIONS
    assert engine.features is None or isinstance(engine.features(call), engines.Features | None)
    assert isinstance(engine.partition(call), bool)
    assert isinstance(engine.needs_sizes(call), bool)
    if reason is None:
        assert isinstance(engine.schedule(call), engines.Schedule | None)
        assert all(isinstance(hazard, str) for hazard in engine.hazards(call))
        assert (engine.workspace(call) or 0) >= 0
    return reason


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", engines.ops())
def test_every_engine_answers_for_every_call(op: str, monkeypatch: pytest.MonkeyPatch):
    if hopper.unavailable() is None:
        monkeypatch.setattr(hopper, "no_device", lambda call: None)  # so that the kernels themselves are asked
    served = set()
    for plain in calls()[op]:
        for call in varied(plain):
            for engine in engines.registered(op):
                try:
                    reason = ask(engine, call)
                except Exception as error:
                    error.add_note(f"asked was engine {engine.name} of {call}")
                    raise
                served |= {engine.name} if reason is None else set()
            assert [e.name for e in selection.ranked(call)]
    assert "xla" in served
