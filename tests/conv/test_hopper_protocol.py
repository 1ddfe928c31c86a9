"""The protocol of the convolution kernels: who writes a slot, who reads it, what orders the two (`hopper/protocol.py`).

For calls and configurations drawn from all that the planners can make. A kernel from which a wait or an arrival is
taken away must be found out.
"""

import contextlib
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src import hopper
from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.hopper import branches
from tests.conv.depthwise_cases import GEOMETRY, geometry
from tests.conv.hopper_cases import BF16, Case

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.conv.hopper import depthwise as conv_depthwise
from jaxdnn._src.conv.hopper import dgrad, fprop, wgrad
from jaxdnn._src.conv.hopper.depthwise.planar import Config as Cut
from jaxdnn._src.conv.hopper.plan import Config as Cuts
from jaxdnn._src.core import primitives
from jaxdnn.verify import random_call
from tests.hopper.protocol import kernels, place_of
from tests.hopper.shared_memory import Fault

DTYPES = ["bfloat16"] * 6 + ["float16", "float8_e4m3fn", "float8_e5m2", "int8", "float32"]
Launch = tuple[Callable[..., Any], tuple[Any, ...]]


def drawn_call(op: str, rng: np.random.Generator) -> Launch | None:
    """A function and what it takes, of few tiles; None where the kernels do not serve what was drawn."""
    one_of = lambda *values: values[int(rng.integers(len(values)))]
    rank = one_of(1, 2, 2, 2, 3)
    most = {1: 150, 2: 15, 3: 7}[rank]
    ints = lambda low, high: tuple(map(int, rng.integers(low, high, rank)))
    taps, stride, dilation = ints(1, one_of(2, 4, 4)), one_of(ints(1, 2), ints(1, 4)), one_of(ints(1, 2), ints(1, 3))
    padding = tuple((int(rng.integers((t - 1) * d + 1)), int(rng.integers((t - 1) * d + 1)))
                    for t, d in zip(taps, dilation, strict=True))  # fmt: skip
    groups = one_of(1, 1, 1, 1, 2)
    c, k = (groups * one_of(8, 16, 24, 64, 64, 96, 128, 192, 320) for _ in range(2))
    case = Case(one_of(1, 2, 3, 8), ints(1, most), c, k, taps, stride, padding, dilation, groups, one_of(False, True))
    if op != "wgrad" and one_of(False, False, False, True):  # an image's
        case = case._replace(c=one_of(1, 3, 4), groups=1, sizes=(*case.sizes[:-1], one_of(16, 70, 140)))
    if min(case.geometry().out) < 1:
        return None
    outer, dtype = one_of(False, True), jnp.dtype(one_of(*DTYPES))
    if op == "wgrad" and dtype.itemsize != 2:  # its kernel is the forward one with the output's pixels for taps
        case = case._replace(sizes=tuple(min(n, 5) for n in case.sizes), c=16, k=groups * one_of(16, 48))
        if min(case.geometry().out) < 1:
            return None
    out_dtype = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "float32"}.get(
        dtype.name, one_of(dtype.name, "float32")
    )
    module: Any = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}[op]
    options: dict[str, Any] = dict(geo=case.geometry(outer), out_dtype=jnp.dtype(out_dtype))
    avals = case.avals(op, dtype, outer)
    if op != "wgrad" and one_of(False, False, True) and dtype != jnp.int8:
        options["epilogue"] = Epilogue(0.5, 2.0, prior=one_of(False, True), bias=one_of(False, True),
                                       residual=one_of(False, True), activation=("relu", None))  # fmt: skip
        shape = case.dy if op == "fprop" else case.x
        shapes = {"prior": shape, "bias": shape[-1:], "residual": shape}
        other = jnp.dtype(one_of("float32", dtype.name))
        avals += tuple(jax.ShapeDtypeStruct(shapes[name], other) for name in options["epilogue"].operands)
    if module.supports(*avals, **options, precision="tf32" if dtype == jnp.float32 else None):
        return None
    return ft.partial(getattr(module, f"conv_{op}"), **options, sms=one_of(1, 2, 3)), avals


def drawn_depthwise(op: str, rng: np.random.Generator) -> Launch | None:
    one_of = lambda *values: values[int(rng.integers(len(values)))]
    rank = one_of(1, 2, 2)
    ints = lambda low, high: tuple(map(int, rng.integers(low, high, rank)))
    taps, stride, dilation = one_of(ints(1, 2), ints(1, 6)), ints(1, 3), ints(1, 3)
    padding = [(int(rng.integers(t * d)), int(rng.integers(t * d))) for t, d in zip(taps, dilation, strict=True)]
    dtype = jnp.dtype(one_of("bfloat16", "float16", "float32"))
    group, channels = 1 if dtype.itemsize == 4 else one_of(1, 1, 2, 8), one_of(8, 32, 40, 64, 96)
    x, w = (one_of(1, 3, 9), *ints(1, 30), channels), (*taps, group, channels)
    window: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation)
    bias = op != "wgrad" and one_of(True, False)
    if conv_depthwise.unsupported(op, geometry(x, w, **window), x[0], channels, channels, dtype, bias=bias):
        return None
    options: dict[str, Any] = dict(sms=one_of(None, 1, 3), config=Cut(stages=one_of(None, 2)), bias=bias)
    return depthwise(op, x, w, dtype, **window, **options)


def depthwise(op: str, x: Any, w: Any, dtype: Any, *, bias: bool = False, **options: Any) -> Launch:
    geo = geometry(x, w, **{name: options.pop(name) for name in ("stride", "padding", "dilation")})
    options |= {"geo": geo}
    dy = (x[0], *geo.out, x[-1])
    functions: dict[str, Callable[..., Any]] = {
        "fprop": ft.partial(conv_depthwise.depthwise_data, "fprop", **options),
        "dgrad": ft.partial(conv_depthwise.depthwise_data, "dgrad", **options),
        "wgrad": ft.partial(conv_depthwise.depthwise_wgrad, **options),
    }
    shapes = [*{"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}[op], *[x[-1:]] * bias]
    return functions[op], tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


@contextlib.contextmanager
def any_configuration(rng: np.random.Generator) -> Iterator[None]:
    """One kind of configuration is as likely as another, however many there are of it."""
    fields = ("halo", "resident", "unroll", "blank", "direct", "staged", "sharing", "splits", "stages")

    def pick(_: Any, configs: Sequence[Any], decided: Any) -> Any:
        for name in rng.permutation(fields):
            values = sorted({getattr(config, name, None) for config in configs}, key=str)
            value = values[int(rng.integers(len(values)))]
            configs = [config for config in configs if getattr(config, name, None) == value]
        return configs[int(rng.integers(len(configs)))]

    with branches.picking(pick):
        yield


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("draw", [drawn_call, drawn_depthwise], ids=["dense", "depthwise"])
@pytest.mark.parametrize("seed", range(8))
def test_accesses_are_ordered(op, draw, seed):
    """And no store of one piece of memory runs over an edge into what another block writes."""
    rng, checked = np.random.default_rng(seed), 0
    while checked < 3:
        call = draw(op, rng)
        if call is None:
            continue
        with any_configuration(rng):
            launches = kernels(call[0], *call[1])
        for launch in launches:
            launch.run()
            checked += 1


OPS = ("conv", "conv_dgrad", "conv_wgrad", "conv_transpose")
KERNELS = {kernel for op in OPS for kernel in random_call.KERNELS[op]}
BRANCHES = [branch for branch in branches.every() if branch[0] in KERNELS]


@pytest.mark.parametrize("branch", BRANCHES, ids=" ".join)
def test_accesses_are_ordered_on_every_branch(as_on_h200: None, branch: Any, monkeypatch: pytest.MonkeyPatch):
    """Of a call as `verify --random` draws one towards the branch, of whichever op."""
    run, calls = primitives._run, []

    def seen(engine: Any, call: Any, operands: Sequence[Any]) -> Any:
        calls.append((engine, call, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]))
        return run(engine, call, operands)

    monkeypatch.setattr(primitives, "_run", seen)
    found = random_call.draw(0, 0, {(op, "hopper"): 1.0 for op in OPS}, branch)
    calls.clear()
    assert random_call.takes(found, branch), f"{found.case} does not take the branch"
    checked = 0
    with found.settings():
        for engine, call, avals in calls:
            for launch in kernels(lambda *operands: run(engine, call, operands), *avals):  # noqa: B023 (called at once)
                launch.run()
                checked += 1
    assert checked


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize(
    ("columns", "filters", "across", "splits"),
    [
        (64, 64, 1, 1),
        (128, 64, 2, 1),
        (128, 64, 2, 2),
        (192, 64, 1, 1),
        (128, 128, 1, 1),
        (128, 128, 1, 2),
        (256, 64, 1, 4),
    ],
)
@pytest.mark.parametrize("images", [1, 2])
def test_results_stored_by_a_cluster_leave_no_buffer_before_it_was_read(
    images, columns, filters, across, splits, outer
):
    """Tiles of one, two, three and four turns of two buffers, the last of which lie beyond the filter's five blocks."""
    case = Case(images, (8, 8), 320, 320, (3, 1), (1, 1), ((1, 1), (0, 0)), (1, 1))
    config = wgrad.Config(1, (8, 8), splits, filters, columns, across, 1, 2, direct=True)
    options: dict[str, Any] = dict(geo=case.geometry(outer), config=config, sms=3 * splits)
    (launch,) = kernels(ft.partial(wgrad.conv_wgrad, **options), *case.avals("wgrad"))
    launch.run()


# ---- a wait or an arrival that is taken away


def with_config(op: str, case: Case, config: Any, **options: Any) -> Launch:
    module: Any = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}[op]
    options = dict(geo=case.geometry(), config=config, sms=1) | options
    avals = case.avals(op)
    if "epilogue" in options:
        shapes = {"prior": case.dy, "bias": case.dy[-1:], "residual": case.dy}
        avals += tuple(jax.ShapeDtypeStruct(shapes[name], BF16) for name in options["epilogue"].operands)
    return ft.partial(getattr(module, f"conv_{op}"), **options), avals


PLAIN = Case(4, (8, 16), 128, 256, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
NARROW = PLAIN._replace(n=8, k=64)
STRIDED = Case(20, (8, 8), 128, 128, (1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1))
TILES = (3, 9, 20, 64), (3, 3, 1, 64), BF16
FUNCTION = Epilogue(0.5, 2.0, prior=True, bias=True, residual=True)
PROTOCOLS: dict[str, Callable[[], Launch]] = {
    "two teams": lambda: with_config("fprop", PLAIN, Cuts(1, (8, 8), 128, 3, 2, 1, staged=2)),
    "a team of two": lambda: with_config("fprop", PLAIN, Cuts(1, (8, 16), 64, 2, 1, 2)),
    "epilogue": lambda: with_config("fprop", PLAIN, Cuts(1, (8, 8), 128, 3, 2, 1), epilogue=FUNCTION),
    "halo": lambda: with_config("fprop", PLAIN, Cuts(1, (8, 8), 64, 3, 2, 1, halo=2)),
    "halo, resident": lambda: with_config("fprop", NARROW, Cuts(1, (8, 8), 64, 3, 1, 1, halo=2, resident=True)),
    "unrolled": lambda: with_config("fprop", NARROW, Cuts(1, (8, 8), 64, 3, 1, 1, halo=2, resident=True, unroll=True)),
    "backward": lambda: with_config("dgrad", PLAIN, Cuts(1, (8, 8), 128, 3, 2, 1)),
    "zeros": lambda: with_config("dgrad", STRIDED, Cuts(4, (4, 4), 64, 3, 2, 1, staged=2, blank=2)),
    "partial sums": lambda: with_config("wgrad", PLAIN, wgrad.Config(1, (8, 8), 2, 64, 128, 2, 1, 3)),
    "rows of the filter": lambda: with_config("wgrad", PLAIN, wgrad.Config(1, (8, 8), 1, 64, 192, 1, 3, 2, halo=True)),
    "direct": lambda: with_config("wgrad", PLAIN, wgrad.Config(1, (8, 8), 1, 64, 192, 2, 1, 2, direct=True)),
    "cluster": lambda: with_config("wgrad", PLAIN, wgrad.Config(1, (8, 8), 2, 64, 128, 2, 1, 2, direct=True)),
    "depthwise": lambda: depthwise("fprop", *TILES, **GEOMETRY, config=Cut(stages=1), sms=1),
    "depthwise, in flight": lambda: depthwise("fprop", *TILES, **GEOMETRY, config=Cut(stages=2), sms=1),
    "depthwise, backward": lambda: depthwise("dgrad", *TILES, **GEOMETRY, config=Cut(stages=3), sms=1),
    "depthwise, bias": lambda: depthwise("fprop", *TILES, **GEOMETRY, config=Cut(stages=2), sms=1, bias=True),
    "depthwise filter": lambda: depthwise("wgrad", *TILES, **GEOMETRY, config=Cut(stages=2, splits=1), sms=1),
}
# Functions whose waits order nothing that is not ordered without them, and why.
REDUNDANT = {
    "drain.<locals>._": "consumers wait for their products themselves, and a block's memory stays until all have ended"
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_whatever_is_taken_away_shows(name):
    """Each wait, arrival and fence; and each wait for groups which lets one more of them be under way."""
    function, avals = PROTOCOLS[name]()
    (launch,) = kernels(function, *avals)
    launch.run()
    unseen = []
    for equation in launch.ordering():
        counted = not isinstance(equation, str) and "n" in equation.params
        for way in ("missing", "early") if counted else ("missing",):
            setattr(launch, way, equation)
            try:
                launch.run()
                unseen.append((way, place_of(equation)))
            except Fault:
                pass
            setattr(launch, way, None)
    assert [(way, place) for way, place in unseen if place not in REDUNDANT] == []
