"""Every engine answers for every call: no call may end in an exception of an engine that does not serve it, and what
`explain` says of levels is what a call that requires them does.

The calls are those of every op and of its derivatives, on channels first and last, and these again with every dtype in
place of each operand's and result's: also such as no public op makes now, for an engine does not know who asks.
"""

import dataclasses
import functools as ft
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.cases.example import SMALL, Example, examples, first, read, shape
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.determinism import LEVELS, determinism, satisfies
from jaxdnn._src.core.explain import traced_calls
from jaxdnn._src.core.tolerance import ACCUMULATIONS

DTYPES = [np.dtype(name) for name in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")]
DTYPES += [np.dtype(name) for name in ("int8", "uint8", "int32", "bool")]
WIDE = {**SMALL, "N": 4, "H": 16, "W": 8, "C": 64, "K": 32}  # of a shape that kernels serve
LAYOUTS = ("NHWC", "NCHW")
LOOKED_UP = ("gelu", ("relu", -1.0, 2.0, 0.25))
# Beside the examples of the manifests.
DROPOUTS = [
    f"dropout | {layout}, 7, activation={a!r}, layout={layout!r}{given}"
    for a in (None, "relu", *LOOKED_UP)
    for layout in LAYOUTS
    for given in ("", ", bias=C", f", residual={layout}", f", bias=C, residual={layout}")
]
FURTHER = (
    *(f"activation | NHWC, activation={a!r}" for a in LOOKED_UP),
    'batch_norm | NCHW, layout="NCHW"',
    'conv | NHWC, RSCK, activation="relu"',
    "conv | NHWC, RSCK, bias=K",
    'conv | NHWC, RSCK, precision="tf32"',
    'conv | NHWC, KRSC, filter_layout="OHWI"',
    'conv | NCHW, KCRS, layout="NCHW"',
    'group_norm | NCHW, groups=4, layout="NCHW"',
    *(f"pool | {layout}, mode={m!r}, layout={layout!r}" for m in ("max", "average", "lp") for layout in LAYOUTS),
    *(f"softmax | NHWC, algorithm={a!r}, axis={i}" for a in ("accurate", "fast", "log") for i in (-1, 1)),
)


def traced(called: Example, sizes: Mapping[str, int]) -> Iterator[engines.Call]:
    """The calls of an op, its gradient, the gradient's derivative, and its own along a tangent."""

    def function(*arrays: jax.Array) -> list[jax.Array]:
        found = jax.tree.leaves(called.call(getattr(dnn, called.op), *arrays, sizes=sizes))
        return [y for y in found if jnp.issubdtype(y.dtype, jnp.floating)]

    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in called.shapes(sizes)]
    scalar = lambda *a: ft.reduce(jnp.add, [jnp.vdot(y, y) for y in function(*a)], np.float32(0))
    gradient = jax.grad(scalar, tuple(range(len(operands))))
    functions = (function, gradient, lambda *a: jax.jvp(gradient, a, a), lambda *a: jax.jvp(function, a, a))
    for transformed in functions if operands else (function,):
        yield from traced_calls(transformed, *operands, platform="cuda")


@ft.cache
def calls() -> dict[str, list[engines.Call]]:
    """Those of each primitive, each once."""
    found: dict[str, dict[str, engines.Call]] = {op: {} for op in engines.ops()}
    both = itertools.product((*first().values(), *map(read, DROPOUTS)), (SMALL, WIDE))
    for called, sizes in (*both, *itertools.product(map(read, FURTHER), (WIDE,))):
        for call in traced(called, sizes):
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
        for partitioned in (False, True):
            spec = dataclasses.replace(call.spec, **more)
            device = {"device_kind": hopper.MEASURED_ON[0], "partitioned": partitioned}
            yield dataclasses.replace(call, avals=avals, spec=spec, **device)


def _as(aval: Any, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, dtype)


def ask(engine: engines.Engine, call: engines.Call) -> str | None:
    """Why the engine does not serve a call, after it has answered all that may be asked then, or all that there is."""
    reason = engine.supports(call)
    assert reason is None or (isinstance(reason, str) and reason and not reason.endswith("."))
    assert engine.level(call) in LEVELS
    assert engine.accumulation(call) in ACCUMULATIONS
    assert all(isinstance(kind.has(call), bool) for kind in engine.slower)
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


@pytest.mark.parametrize("name", ["ordered", "hopper"])
def test_an_engine_that_is_asked_for_around_a_call_serves_it_or_the_call_is_refused(name: str):
    errors = []
    for op, called in first().items():

        def function(*arrays: jax.Array, op: str = op, called: Example = called) -> Any:
            with engines.asked(name):
                return called.call(getattr(dnn, op), *arrays, sizes=SMALL)

        operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in called.shapes(SMALL)]
        try:
            assert {call.spec.engine for call in traced_calls(function, *operands, platform="cpu")} <= {name}, op
        except NotImplementedError as error:
            errors.append(str(error))
    assert 0 < len(errors) < len(first())
    assert all(repr(name) in error for error in errors)


# ---- levels ----------------------------------------------------------------------------------------------------------

# Calls whose blend, mode or shapes decide which level they may require.
OF_LEVELS = (
    "activation | NHWC, beta=0.5, prior=NHWC",
    "conv | NHWC, RSCK, padding=1, bias=K, alpha=0.5",
    "conv | NHWC, RSCK, padding=1, activation='gelu'",
    "conv_bgrad | NHWC, beta=0.5, prior=C",
    "matmul | NTD, _DV",
    "matmul | TD, NDV",
    "pool | NHWC, alpha=0.5, beta=0.5, prior=NhwC",
    "pool | NHWC, window=(16, 8), mode='average'",
    "softmax | NTD, beta=0.5, prior=NTD",
)
SCALED = {  # by a number that is known when the program runs
    "conv by a traced scale": (lambda x, w, a, **o: dnn.conv(x, w, alpha=a, activation="gelu", **o), "NHWC RSCK "),
    "matmul by a traced scale": (lambda x, w, a, **o: dnn.matmul(x, w, alpha=a, activation="gelu", **o), "TD DV "),
    "pool by a traced scale": (lambda x, a, **o: dnn.pool(x, alpha=a, **o), "NHWC "),
}


def of_levels() -> dict[str, tuple[Any, list[tuple[int, ...]], bool]]:
    """Functions of one call of an op, the shapes of their operands, and whether an engine may be named."""
    lines = (*examples().values(), *map(read, (*FURTHER, *DROPOUTS, *OF_LEVELS)))
    found = {}
    for called in (c for c in lines if "precision" not in c.options):  # which takes no bfloat16
        run = lambda *arrays, c=called, **named: c.call(ft.partial(getattr(dnn, c.op), **named), *arrays, sizes=WIDE)
        takes_engines = "engine" in inspect.signature(getattr(dnn, called.op)).parameters
        found[f"{called.name} {len(found)}"] = run, called.shapes(WIDE), takes_engines
    for name, (run, axes) in SCALED.items():
        found[name] = run, [shape(letters, WIDE) for letters in axes.split(" ")], True
    return found


def gradient_of(function: Any, count: int) -> Any:
    def total(*arrays: jax.Array) -> Any:
        floats = (y for y in jax.tree.leaves(function(*arrays)) if jnp.issubdtype(y.dtype, jnp.floating))
        return ft.reduce(jnp.add, (jnp.sum(y.astype(np.float32)) for y in floats), np.float32(0))

    return jax.grad(total, tuple(range(count)))


def is_served(function: Any, operands: Any, platform: str, level: str) -> bool:
    """Whether a call and its gradient are traced at a level and have an engine each."""
    try:
        with determinism(level):
            return all(call.engine for call in dnn.explain(function, *operands, platform=platform))
    except NotImplementedError:
        return False


def of_engine(function: Any, operands: Any, platform: str, engine: str) -> str | None:
    """The strongest level that `explain` says a call may require of an engine; None where that serves not all of it."""
    said = dnn.explain(function, *operands, platform=platform)
    found = [c for call in said for c in call.candidates if c.engine == engine and c.refusal is None]
    strongest = [c.strongest for c in found if c.strongest and satisfies(c.strongest, c.level)]
    assert len(strongest) == len(found)
    return min(strongest, key=LEVELS.index) if said and len(found) == len(said) else None


@pytest.mark.parametrize("platform", engines.PLATFORMS)
@pytest.mark.parametrize("name", of_levels())
def test_a_call_may_require_the_levels_that_explain_says_and_no_other(
    name: str, platform: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engines, "PLATFORMS", (platform,))  # so that a call is refused when it is traced
    monkeypatch.setattr(engines, "platform", lambda: platform)
    monkeypatch.setattr(engines, "device_kind", lambda platform: hopper.MEASURED_ON[0])
    if hopper.unavailable() is None and platform == "cuda":
        monkeypatch.setattr(hopper, "no_device", lambda call: None)
    function, shapes, names_engines = of_levels()[name]
    for dtype in (np.float32, jnp.bfloat16):
        operands = [jax.ShapeDtypeStruct(of, dtype if len(of) > 1 else np.float32) for of in shapes]
        for whole in (lambda f: f, ft.partial(gradient_of, count=len(shapes))) if shapes else (lambda f: f,):
            for engine in engines.names() if names_engines else ():
                strongest = of_engine(whole(function), operands, platform, engine)
                by_name = whole(ft.partial(function, engine=engine))
                if strongest is None:
                    continue
                for level in LEVELS:
                    served = is_served(by_name, operands, platform, level)
                    assert served == satisfies(strongest, level), (engine, strongest, level, operands)
