"""The Hopper kernels of recurrences on the CPU: their PTX run by a small machine, its order of additions, refusals."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.cases.case import Facts, judge_all
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.tolerance import ACCUMULATIONS
from jaxdnn._src.rnn import cases, primitive
from jaxdnn._src.rnn.primitive import RnnSpec
from tests.rnn import recurrent_calls as r

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.hopper import curves_ptx
from jaxdnn._src.rnn.hopper import backward_plan, backward_ptx, calls, forward_ptx, plan
from jaxdnn._src.rnn.hopper.plan import Given
from jaxdnn_reference.arithmetic import Schedule, dot

BF16, F16 = r.BF16, r.F16
each_cell = pytest.mark.parametrize("cell", r.CELLS)
# Marks that change what a step does, by a name.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "lengths": {"ragged": True},
    "resets": {"ragged": True, "resets": True, "reverse": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def distance(found: np.ndarray, golden: np.ndarray) -> float:
    size = float(np.linalg.norm(golden))
    return float(np.linalg.norm(found.astype(np.float64) - golden)) / max(size, 1e-300)


def assert_near(found: r.Arrays, golden: r.Arrays, narrow: np.dtype) -> None:
    """Float32 results by float32's errors; states of 16 bits by a rounding, which errors may turn."""
    for name, value in found.items():
        near = 2.0**-8 if value.dtype == narrow else 1e-4 if narrow == F16 else 2e-4
        assert distance(value, golden[name]) < near, name
        assert np.isfinite(value.astype(np.float64)).all()


# ---- values ----------------------------------------------------------------------------------------------------------


@each_kind
@each_cell
def test_forward_values(cell: str, kind: str):
    """Of eleven sequences: with one set two clusters share some, with two sets some columns have none."""
    dtype = BF16 if kind in ("plain", "lengths") else F16
    given = Given(3, 11, saves=True, clip=(-0.5, 0.75) if cell == "lstm" else None, **KINDS[kind])
    chosen = r.forward_plan(cell, 64, dtype, tiles=1 if kind == "plain" else 2)
    v = r.forward_data(cell, 64, given, dtype)
    assert_near(r.run_forward(chosen, given, v), r.golden_forward(cell, given, v), dtype)


@each_kind
@each_cell
def test_gradients(cell: str, kind: str):
    dtype = BF16 if kind in ("plain", "lengths") else F16
    given = Given(3, 11, clip=(-0.5, 0.75) if cell == "lstm" else None, **KINDS[kind])
    chosen = r.gradient_plan(cell, 64, dtype, tiles=1 if kind == "plain" else 2)
    v = r.backward_data(cell, 64, given, dtype)
    assert_near(r.run_backward(chosen, given, v), r.golden_backward(cell, given, v), dtype)


def test_sixteen_blocks():
    given = Given(3, 8)
    chosen, v = r.forward_plan("lstm", 768, BF16), r.forward_data("lstm", 768, given, BF16)
    assert chosen.cluster == 16
    assert_near(r.run_forward(chosen, given, v), r.golden_forward("lstm", given, v), BF16)
    gradient, v = r.gradient_plan("lstm", 768, BF16), r.backward_data("lstm", 768, given, BF16)
    assert gradient.cluster == 16
    assert_near(r.run_backward(gradient, given, v), r.golden_backward("lstm", given, v), BF16)


@pytest.mark.parametrize("which", ["forward", "gradient"])
def test_what_no_cluster_holds_is_read_in_each_step(which: str):
    """Of the 8 MB of an LSTM of 1,024 units; the first reads begin before what a step waits for."""
    of, emit = {
        "forward": (plan.Plan, forward_ptx.forward),
        "gradient": (backward_plan.Plan, backward_ptx.backward),
    }[which]
    chosen = of.least("lstm", 1024, "bf16")
    assert chosen is not None
    assert chosen.cluster == 16
    assert chosen.matrix + 512 * chosen.warps * (chosen.kept + chosen.streamed) == 2 * 1024 * 4096 / 16
    assert chosen.shared <= plan.SHARED < chosen.shared + 1024 * chosen.warps  # no more than must be
    lines = emit(chosen, Given(4, 16)).splitlines()
    reads = [i for i, line in enumerate(lines) if "ld.global.nc.v4.b32" in line][-chosen.streamed :]
    waits = "mbarrier.try_wait" if which == "forward" else "bar.sync"
    wait = max(i for i, line in enumerate(lines) if waits in line)
    assert sum(i < wait for i in reads) == 2 * plan.FLYING
    assert max(reads) < max(i for i, line in enumerate(lines) if "mma.sync" in line)


@each_cell
def test_columns_that_do_not_fill_chunks(cell: str):
    """Of a gradient: 9 or 18 groups of eight columns in a block, of which four are a chunk; and a table of targets."""
    given = Given(3, 19)
    chosen, v = r.gradient_plan(cell, 96, BF16, tiles=2), r.backward_data(cell, 96, given, BF16)
    assert_near(r.run_backward(chosen, given, v), r.golden_backward(cell, given, v), BF16)


def test_large_clusters():
    """Eight blocks, of which some warps have no units, and a part of the matrix in shared memory."""
    given = Given(2, 8)
    for cell, units in (("lstm", 384), ("gru_after", 512)):
        chosen, v = r.forward_plan(cell, units, BF16), r.forward_data(cell, units, given, BF16)
        assert chosen.cluster == 8
        assert chosen.kept < chosen.operands
        assert_near(r.run_forward(chosen, given, v), r.golden_forward(cell, given, v), BF16)
        gradient, v = r.gradient_plan(cell, 512, BF16), r.backward_data(cell, 512, given, BF16)
        assert_near(r.run_backward(gradient, given, v), r.golden_backward(cell, given, v), BF16)


BOUNDED = ("lstm/plain", "lstm/lengths", "lstm/resets", "gru/after", "gru/both", "rnn/tanh", "rnn/relu")


@pytest.mark.parametrize("variant", BOUNDED)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_errors_are_within_the_computed_bounds(variant: str, dtype: str):
    """Those that `verify` allows, of the op whose products NumPy adds up in float32."""
    op, name = variant.split("/")
    case = cases.RnnCase(op, "hopper", dtype, name, batch=5, steps=4, inputs=8, units=64)
    operands = case.operands("normal", np.random.default_rng(3))
    v = dict(zip(case.names, operands, strict=True))
    reverse = case._kind[1].get("direction") == "reverse"
    halves = [{k: x if k in ("x", "lengths") else x[i] for k, x in v.items()} for i in (0, 1)] if case.both else [v]
    found = [layer_by_kernel(case, half, reverse or i == 1) for i, half in enumerate(halves)]
    y = np.concatenate([half[0] for half in found], -1)
    states = [np.stack(pair) if case.both else pair[0] for pair in zip(*(half[1:] for half in found), strict=True)]
    told = Facts(None, "batch_invariant", "tensor_core")
    checks = judge_all(case, told, "normal", operands, {}, (y, *states), ACCUMULATIONS["tensor_core"])
    assert checks
    assert [check.message for check in checks if not check.passed] == []


def layer_by_kernel(case: cases.RnnCase, v: r.Arrays, reverse: bool) -> list[np.ndarray]:
    """y and the final states of a layer in one direction."""
    x, wide = v["x"], np.float32
    lengths = v.get("lengths", np.full(case.batch, case.steps, np.int32))
    live = np.arange(case.steps) < lengths[:, None]
    a = np.where(live[:, :, None], x.astype(wide), 0) @ v["w"].astype(wide)
    kept = 2 * case.units if case.cell == "gru_after" else a.shape[2]
    biases = [v[name].astype(wide) for name in ("bias", "recurrent_bias") if name in v]
    within = v["recurrent_bias"].astype(wide)[kept:] if "recurrent_bias" in v else np.zeros(case.units, wide)
    for i, bias in enumerate(biases):
        is_within = case.cell == "gru_after" and i == len(biases) - 1 and "recurrent_bias" in v
        a = a + (np.concatenate([bias[:kept], 0 * bias[kept:]]) if is_within else bias)
    resets = v.get("resets", np.zeros(live.shape, bool)) & live
    resets = np.concatenate([resets[:, 1:], np.zeros((case.batch, 1), bool)], 1) if reverse else resets
    states = {name: v.get(f"{name}0", np.zeros((case.batch, case.units), x.dtype)) for name in ("h", "c")}
    given = Given(case.steps, case.batch, reverse, ragged=True, resets=True)
    chosen = r.forward_plan(case.cell, case.units, x.dtype)
    arrays = {"a": a.swapaxes(0, 1).astype(wide), "r": v["r"], "q": within, "h": states["h"]}
    arrays |= {"c": states["c"].astype(wide), "lengths": lengths, "resets": resets.T}
    found = r.run_forward(chosen, given, arrays)
    y = np.where(live[:, :, None], found["y"].swapaxes(0, 1), np.asarray(case._kind[1].get("fill", 0), x.dtype))
    return [y, found["last_h"], *([found["last_c"].astype(x.dtype)] if case.cell == "lstm" else [])]


# ---- bits ------------------------------------------------------------------------------------------------------------


def order(units: int) -> np.ndarray:
    """The units whose products the forward kernel adds, by sum of a half of them."""
    found = [
        8 * (4 * (s // 2) + group) + 4 * (s % 2) + unit
        for s in range(units // 16)
        for group in range(4)
        for unit in range(4)
    ]
    return np.array(found).reshape(2, -1)


@pytest.mark.parametrize("units", [64, 96, 128])
def test_bits_of_the_stated_order(units: int):
    """relu shows the sums: of bfloat16 of many sizes, so that another order has other bits."""
    given, dtype = Given(1, 8, saves=True), BF16
    v = r.forward_data("relu", units, given, dtype)
    rng = np.random.default_rng(1)
    v["h"] = (v["h"].astype(np.float32) * np.exp2(rng.integers(-6, 6, v["h"].shape))).astype(dtype)
    chosen = r.forward_plan("relu", units, dtype) if units != 96 else r.forward_plan("lstm", units, dtype)
    if units == 96:  # of a cell whose groups of units divide among warps
        v = r.forward_data("gru_after", units, given, dtype)
        chosen = r.forward_plan("gru_after", units, dtype)
        q = dot(v["h"], v["r"], "tensor_core", Schedule(order(units)))[:, 2 * units :] + v["q"]
        found = r.run_forward(chosen, given, v)["gates"][0, :, 3 * units :]
        assert np.array_equal(found, q.astype(np.float32))
        return
    sums = dot(v["h"], v["r"], "tensor_core", Schedule(order(units)))
    z = v["a"][0] + sums
    found = r.run_forward(chosen, given, v)["gates"][0]
    assert np.array_equal(found, np.maximum(z, np.float32(0)))
    other = v["a"][0] + dot(v["h"], v["r"], "tensor_core", Schedule(np.arange(units).reshape(2, -1)))
    assert not np.array_equal(found, np.maximum(other, np.float32(0)))  # the data tell orders apart


@each_cell
def test_bits_are_those_of_any_partition(cell: str):
    """An element depends on its own sequence alone: not on the others, their number, nor on where the matrix is."""
    given = Given(3, 19, ragged=True, saves=True)
    v = r.forward_data(cell, 64, given, BF16)
    all_ = r.run_forward(r.forward_plan(cell, 64, BF16), given, v)
    some = dict(v) | {name: v[name][:, 3:12] for name in ("a", "resets")}
    some |= {name: v[name][3:12] for name in ("h", "c", "lengths")}
    with np.errstate(invalid="ignore"):
        some["a"] = np.concatenate([some["a"], np.full_like(some["a"][:, :1], np.nan)], 1)
    for name in ("h", "c", "lengths"):
        some[name] = np.concatenate([some[name], some[name][:1]])
    some["resets"] = np.concatenate([some["resets"], some["resets"][:, :1]], 1)
    few = dataclasses.replace(given, batch=10)
    for tiles, kept, streamed in ((2, None, 0), (1, 2, 0), (1, 0, 2)):
        found = r.run_forward(r.forward_plan(cell, 64, BF16, tiles, kept, streamed), few, some)
        for name, value in found.items():
            of_all = all_[name][:, 3:12] if value.ndim == 3 else all_[name][3:12]
            part = value[:, :9] if value.ndim == 3 else value[:9]
            assert np.array_equal(part.view(np.uint8), np.ascontiguousarray(of_all).view(np.uint8)), name


@each_cell
def test_bits_of_gradients_are_those_of_any_partition(cell: str):
    given = Given(3, 19, ragged=True)
    v = r.backward_data(cell, 64, given, BF16)
    all_ = r.run_backward(r.gradient_plan(cell, 64, BF16), given, v)
    for tiles, kept, streamed in ((3, None, 0), (2, 1, 0), (1, 0, 2), (2, 0, 2)):
        found = r.run_backward(r.gradient_plan(cell, 64, BF16, tiles, kept, streamed), given, v)
        assert all(np.array_equal(value, all_[name]) for name, value in found.items())


@np.errstate(all="ignore")
def test_curves():
    """The sigmoid and tanh of the kernels, rounded as PTX rounds, with exact exponentials and reciprocals."""
    x = np.concatenate([np.linspace(-12, 12, 200001), np.geomspace(1e-30, 1, 20001), [88.0, -88.0, 1e4, -1e4, 0.0]])
    x = x.astype(np.float32)
    exact = x.astype(np.float64)
    near = lambda value, golden, rate: np.abs(value - golden) <= rate * 2.0**-24 * np.abs(golden) + 2.0**-99
    power = np.exp2((x * np.float32(-curves_ptx.LOG2_E)).astype(np.float64)).astype(np.float32)
    s = np.float32(1) / (power + np.float32(1))
    golden = r.logistic(exact)
    # The exponent's rounding is one of x.
    slope = golden * (1 - golden) * np.abs(exact) * 2.0**-24 * 2
    assert (np.abs(s - golden) <= 5 * 2.0**-24 * golden + slope + 2.0**-99).all()
    series = np.float32(curves_ptx.SERIES[-1])
    square = x * x
    for coefficient in curves_ptx.SERIES[-2::-1]:
        series = (series.astype(np.float64) * square + np.float64(np.float32(coefficient))).astype(np.float32)
    small = (np.float64(series * square) * x + exact).astype(np.float32)
    power = np.exp2((np.abs(x) * np.float32(-2 * curves_ptx.LOG2_E)).astype(np.float64)).astype(np.float32)
    large = np.copysign((np.float32(1) - power) * (np.float32(1) / (power + np.float32(1))), x)
    t = np.where(np.abs(x) < np.float32(curves_ptx.SMALL), small, large)
    assert near(t, np.tanh(exact), 4).all()


# ---- the exchange ----------------------------------------------------------------------------------------------------

WAIT = re.compile(r"(L\d+):\n(mbarrier\.try_wait[^\n]*)\n@!p\d+ bra \1;\n")
FAULTS: dict[str, Callable[[str], str]] = {
    "no wait": lambda code: WAIT.sub("", code),
    "the wrong phase": lambda code: re.sub(r"(try_wait[^\n]*\], )(r\d+);", r"\g<1>0;", code),
    "no expected bytes": lambda code: re.sub(r"@?!?p?\d* ?mbarrier\.arrive\.expect_tx[^\n]*\n", "", code),
    "one buffer": lambda code: re.sub(r"xor\.b32 (r\d+), (r\d+), 1;", r"mov.b32 \1, \2;", code),
    "no barrier of the cluster": lambda code: re.sub(r"barrier\.cluster[^\n]*\n", "", code),
    "no barrier of the block": lambda code: re.sub(r"bar\.sync[^\n]*\n", "", code),
    "a store is missing": lambda code: re.sub(r"@?p?\d* ?st\.async[^\n]*\n", "", code, count=1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_faults_of_the_exchange_are_found(which: str, fault: str):
    """The machine knows which accesses are ordered, and whether what is waited for comes."""
    if (which, fault) == ("forward", "no barrier of the block"):
        pytest.skip("the forward kernel has none: its warps wait for each other by what they receive alone")
    given = Given(5, 8)
    if which == "forward":
        chosen, v = r.forward_plan("lstm", 64, BF16), r.forward_data("lstm", 64, given, BF16)
        code, run = forward_ptx.forward(chosen, given), r.run_forward
    else:
        chosen, v = r.gradient_plan("lstm", 64, BF16), r.backward_data("lstm", 64, given, BF16)
        code, run = backward_ptx.backward(chosen, given), r.run_backward
    faulty = FAULTS[fault](code)
    assert faulty != code
    run(chosen, given, v, code)  # type: ignore[arg-type]
    with pytest.raises((RuntimeError, AssertionError, KeyError)):
        run(chosen, given, v, faulty)  # type: ignore[arg-type]


# ---- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8, 9, 64, 250])
def test_launches_count_clusters(batch: int, monkeypatch: pytest.MonkeyPatch):
    launched = []

    def launch(code: str, arrays: Any, outs: Any, **options: Any) -> Any:
        launched.append(options)
        return [jnp.zeros(out.shape, out.dtype) for out in outs]

    monkeypatch.setattr(calls, "launch", launch)
    given = Given(2, batch)
    for cell in r.CELLS:
        chosen = plan.Plan.choose(cell, 128, "bf16", batch)
        gradient = backward_plan.Plan.choose(cell, 128, "bf16", batch)
        assert chosen is not None
        assert gradient is not None
        v = {name: jnp.asarray(x) for name, x in r.forward_data(cell, 128, given, BF16).items()}
        calls.forward(chosen, given, v, ("y", "h"))
        v = {name: jnp.asarray(x) for name, x in r.backward_data(cell, 128, given, BF16).items()}
        calls.backward(gradient, given, v)
        for options, of in zip(launched[-2:], (chosen, gradient), strict=True):
            assert 0 <= options["blocks"] * of.sequences - batch < of.sequences
            assert options["cluster"] == of.cluster
            assert options["floats"] * 4 >= of.shared


# ---- the engine ------------------------------------------------------------------------------------------------------


def engine(op: str = "rnn") -> engines.Engine:
    return next(e for e in engines.registered(op) if e.name == "hopper")


def call(
    op: str = "rnn", *, units: int = 128, shape: tuple[int, ...] = (4, 8), lead: tuple[int, ...] = (), **changes: Any
) -> engines.Call:
    given: dict[str, Any] = {
        "cell": "lstm", "reverse": False, "clip": None, "projected": False, "ragged": False, "resets": False,
        "narrow": BF16, "engine": "hopper", "level": "fast",
    }  # fmt: skip
    spec = RnnSpec(**(given | changes))
    gates = primitive.steps.GATES[spec.cell]
    wide = np.float32 if np.dtype(spec.narrow).itemsize <= 4 else np.float64
    shapes: dict[str, tuple[Any, Any]] = {
        "a": ((*shape, gates * units), wide), "y": ((*shape, units), spec.narrow), "q": ((units,), wide),
        "r": ((units, gates * units), spec.narrow), "p": ((units, units), spec.narrow),
        "h": ((shape[1], units), spec.narrow), "c": ((shape[1], units), wide), "lengths": ((shape[1],), np.int32),
        "resets": (shape, np.bool_), "gates": ((*shape, gates * units), wide),
        "cells_before": ((*shape, units), wide), "before": ((*shape, units), spec.narrow),
    }  # fmt: skip
    names = primitive.operands_of(op, spec)
    avals = tuple(jax.ShapeDtypeStruct((*lead, *shapes[name][0]), shapes[name][1]) for name in names)
    return engines.Call(op, spec, avals, "cuda", "NVIDIA H200")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"narrow": np.dtype(np.float32)}, "multiply bfloat16 and float16, not float32"),
        ({"narrow": np.dtype(np.float64)}, "multiply bfloat16 and float16, not float64"),
        ({"projected": True}, "no projection"),
        ({"cell": "gru_before"}, "no second product in a step"),
        ({"lead": (3,)}, "one recurrent matrix"),
        ({"shape": (0, 8)}, "at least one step"),
        ({"shape": (4, 0)}, "at least one step"),
        ({"units": 100}, "multiples of 32 units"),
        ({"units": 4096}, "not of 4096"),
    ],
)
def test_refusals(changes: dict[str, Any], says: str):
    for op in ("rnn", "rnn_saved", "rnn_backward"):
        reason = engine(op).supports(call(op, **changes))
        assert reason is not None
        assert says in reason


def test_sixteen_blocks_are_asked_of_known_devices_alone():
    large = dataclasses.replace(call(units=768), device_kind="NVIDIA H100 80GB HBM3")
    assert "clusters of 16 blocks were started on NVIDIA H200 alone" in (unsupported(large) or "")
    assert unsupported(call(units=768)) is None
    assert unsupported(dataclasses.replace(large, avals=call(units=512).avals)) is None


def unsupported(asked: engines.Call) -> str | None:
    """Of a device that has the kernels' compute capability."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "no_device", lambda call: None)
        return engine(asked.op).supports(asked)


@each_cell
def test_serves(cell: str):
    for units in (64, 128, 256, 512):
        for op in ("rnn", "rnn_saved", "rnn_backward"):
            assert engine(op).supports(call(op, units=units, cell=cell, ragged=True, resets=True, reverse=True)) is None
            assert engine(op).level(call(op, units=units, cell=cell)) == "batch_invariant"


@pytest.mark.parametrize("layer", [dnn.lstm, dnn.gru, dnn.rnn])
def test_a_layer_and_its_gradient_are_lowered(layer: Any, monkeypatch: pytest.MonkeyPatch):
    """Both kernels; the products stay XLA's."""
    monkeypatch.setattr(hopper, "no_device", lambda call: None)
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[layer.__name__]

    def loss(x: jax.Array, w: jax.Array, matrix: jax.Array, lengths: jax.Array) -> jax.Array:
        y, last = layer(x, w, matrix, direction="reverse", lengths=lengths, engine="hopper")
        return jnp.stack([v.astype(jnp.float32).sum() for v in jax.tree.leaves((y, last))]).sum()

    shapes = (3, 5, 64), (64, 128 * gates), (128, 128 * gates)
    arrays = [*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), jax.ShapeDtypeStruct((3,), jnp.int32)]
    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert (
        lowered.count("custom_call @mosaic_gpu") == 6
    )  # x W, and the gradients of x and of both matrices, are convolutions


def product(
    op: str, *, rows: int = 2, shape: tuple[int, ...] = (3, 5), inputs: int = 64, **changes: Any
) -> engines.Call:
    spec = primitive.ProductSpec(
        **({"rows": rows, "narrow": BF16, "wide": True, "engine": "hopper", "level": "fast"} | changes)
    )
    shapes = {"x": (*shape, inputs), "w": (inputs, 128), "y": (*shape, 128)}
    result = {name: result for result, name in primitive.PRODUCTS.items()}[op]
    dtypes = {"x": spec.narrow, "w": spec.narrow, "y": np.float32}
    avals = (jax.ShapeDtypeStruct(shapes[name], dtypes[name]) for name in primitive.OPERANDS[result])
    return engines.Call(op, spec, tuple(avals), "cuda", "NVIDIA H200")


@pytest.mark.parametrize("op", primitive.PRODUCTS.values())
def test_products_by_kernels(op: str):
    """They have an order of additions."""
    kernel, called = engine(op), product(op)
    assert kernel.supports(called) is None
    assert kernel.level(called) == ("run_to_run" if op == "rnn_product_w" else "batch_invariant")
    found = jax.eval_shape(lambda *v: kernel.run(called, *v), *called.avals)
    wanted = primitive.product_result(kernel_result(op), called.spec, *called.avals)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"narrow": np.dtype(np.float32)}, "multiply bfloat16 and float16, not float32"),
        ({"shape": (4, 3, 5)}, "one matrix"),
        ({"shape": (0, 5)}, "at least one row"),
        ({"inputs": 0}, "at least one row"),
    )
    for changes, says in refused:
        assert says in (kernel.supports(product(op, **changes)) or "")


def kernel_result(op: str) -> str:
    return {name: result for result, name in primitive.PRODUCTS.items()}[op]


def test_what_serves_unasked(monkeypatch: pytest.MonkeyPatch):
    """The kernels on the device that they were timed on, but for kinds that were not; of products XLA's, if it may."""
    monkeypatch.setattr(hopper, "no_device", lambda call: None)
    for level, name in (("fast", "hopper"), ("batch_invariant", "hopper"), ("portable", "ordered")):
        assert selection.select(call(engine=None, level=level)).name == name
    for units in (640, 768, 1024):
        assert selection.select(call(engine=None, level="fast", units=units)).name == "hopper"
    for units, sequences in ((512, 3 * 15 * 32 + 1), (640, 129), (768, 129), (1024, 65)):
        many: dict[str, Any] = {"shape": (4, sequences), "units": units}
        assert selection.select(call(engine=None, level="fast", **many)).name == "xla"
        assert selection.select(call(engine=None, level="batch_invariant", **many)).name == "hopper"
    for op in primitive.PRODUCTS.values():
        assert selection.select(product(op, engine=None, level="fast")).name == "xla"
    level, first = "batch_invariant", primitive.PRODUCTS["y"]
    assert selection.select(product(first, engine=None, level=level)).name == "hopper"


@pytest.mark.parametrize("batch", [8, 57, 113])
def test_no_condition_on_sequences_that_exist(batch: int):
    """Those of loads cost registers: with two sets and more a step took up to twice the time on an H200."""
    for tiles in (1, 2):
        given = Given(4, batch)
        forward, gradient = r.forward_plan("lstm", 512, BF16, tiles), r.gradient_plan("lstm", 512, BF16, tiles)
        texts = forward_ptx.forward(forward, given), backward_ptx.backward(gradient, given)
        loads = [line for text in texts for line in text.splitlines() if re.search(r"ld\.global\.nc\.(f32|b16)", line)]
        assert loads
        assert any(line.startswith("@") for line in loads) == (batch < 8 * tiles)


def test_plans_follow_what_was_timed():
    """Microseconds of a step of LSTM kernels on an H200, by the sets of eight sequences of a cluster."""
    timed: dict[tuple[Any, int, int], dict[int, float]] = {
        (plan.Plan, 512, 64): {1: 1.655, 2: 2.964},
        (plan.Plan, 512, 128): {1: 3.246, 2: 2.970},
        (plan.Plan, 512, 256): {1: 4.768, 2: 5.937, 4: 5.015},
        (plan.Plan, 640, 57): {1: 3.283, 2: 2.789},
        (plan.Plan, 768, 57): {1: 4.379, 2: 3.351},
        (backward_plan.Plan, 640, 57): {1: 3.650, 2: 3.972},
    }
    for (of, units, batch), times in timed.items():
        chosen = of.choose("lstm", units, "bf16", batch)
        assert chosen is not None
        assert times[chosen.tiles] < 1.06 * min(times.values())
