"""The rule that chooses an engine where none is named, and the tables of what was measured."""

import dataclasses
import functools as ft
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import families, hopper
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.engines import Features
from jaxdnn._src.core.explain import traced_calls

KIND = hopper.MEASURED_ON[0]


def test_measurements_decide_among_engines_that_may_serve(monkeypatch: pytest.MonkeyPatch):
    """On the device where it was measured faster the hopper engine is taken unasked; elsewhere XLA's."""
    x, w = jnp.ones((8, 5, 4, 16), jnp.bfloat16), jnp.ones((3, 3, 16, 32), jnp.bfloat16)
    call = next(traced_calls(ft.partial(dnn.conv, padding=1), x, w, platform="cuda"))
    call = dataclasses.replace(call, device_kind=None)  # no device in sight
    told = dataclasses.replace(call, device_kind="a device")
    name = "bfloat16 (5,4) 16 32 (3,3) (1,1) ((1,1),(1,1)) (1,1) 1"
    point = {"batch": 8, "speed_up": 1.2}
    tables: Any = {"a device": {"hopper": {"conv": {"calls": {name: [point]}}}}}
    monkeypatch.setattr(selection, "measured", lambda: tables)
    assert [e.name for e in selection.ranked(told)] == ["hopper", "xla", "ordered"]
    assert [e.name for e in selection.ranked(call)] == ["xla", "hopper", "ordered"]
    for batch, first in ((1, "xla"), (2, "hopper"), (16, "hopper"), (17, "xla")):
        point["batch"] = batch  # half to four times the measured one is like it
        assert selection.ranked(told)[0].name == first
    point |= {"batch": 8, "speed_up": 0.9}
    assert [e.name for e in selection.ranked(told)] == ["xla", "hopper", "ordered"]
    kernel = selection.ranked(told)[1]
    assert selection.why_later(kernel, told) == "on calls like this one it takes 1.11 times XLA's time"
    assert selection.why_later(kernel, call) == "it was measured on a device, not on one that is not here"
    tables["a device"]["hopper"]["conv"]["otherwise"] = True
    for point["batch"] in (8, 64):  # what was measured to lose goes before, of another batch too
        assert [e.name for e in selection.ranked(told)] == ["xla", "hopper", "ordered"]
    point["speed_up"] = 1.2
    assert [e.name for e in selection.ranked(told)] == ["hopper", "xla", "ordered"]
    del tables["a device"]["hopper"]["conv"]["otherwise"]
    assert selection.why_later(kernel, told) == "it was not measured on calls like this one"
    del tables["a device"]["hopper"]["conv"]
    assert selection.why_later(kernel, told) == "it was not measured on any device"


def first(op: Any, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> str:
    """The engine that is tried first on the device that was measured."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    call = next(traced_calls(op, *operands, platform="cuda"))
    return selection.ranked(dataclasses.replace(call, device_kind=KIND))[0].name


def test_convolutions_of_no_table_are_served_by_the_kernels():
    """Layers that no entry names; those on which cuDNN was measured faster are kinds that the engine names."""
    conv = ft.partial(dnn.conv, padding=1)
    assert first(conv, (3, 19, 23, 40), (3, 3, 40, 88)) == "hopper"
    assert first(conv, (3, 19, 23, 40), (3, 3, 40, 88), dtype=jnp.float16) == "xla"
    wide = ft.partial(conv, out_dtype=jnp.float32)  # not measured
    assert first(wide, (3, 19, 23, 40), (3, 3, 40, 88)) == "xla"
    assert first(conv, (3, 19, 23, 40), (3, 3, 40, 88), dtype=jnp.float32) == "xla"
    narrow = lambda k: first(lambda dy, w: dnn.conv_dgrad(dy, w, (8, 28, 28, 64)), (8, 28, 28, k), (1, 1, 64, k))
    assert [narrow(24), narrow(48)] == ["xla", "hopper"]
    rgb = lambda taps: first(
        lambda x, dy: dnn.conv_wgrad(x, dy, (taps, taps, 3, 64), padding=taps // 2),
        (8, 64, 64, 3), (8, 64, 64, 64),
    )  # fmt: skip
    assert [rgb(11), rgb(7)] == ["xla", "hopper"]


def timed() -> Iterator[engines.Call]:
    """The calls that `jaxdnn bench` times, in the dtypes it was run in, and derivatives that it leaves out."""

    def calls() -> Iterator[engines.Call]:
        for family, dtype in itertools.product(families.with_timed(), ("bfloat16", "float16", "float32")):
            for case in families.timed(family):
                operands = jax.eval_shape(lambda case=case, dtype=dtype: case.operands(case.batch, dtype, 0))
                for which in case.passes:
                    yield from traced_calls(case.ours(which, None), *operands, platform="cuda")
        x = jax.ShapeDtypeStruct((2, 8, 8, 16), jnp.bfloat16)
        for op in (dnn.pool, lambda x: dnn.dropout(x, 7, activation="relu")):
            total = lambda x, op=op: jnp.sum(op(x).astype(jnp.float32))
            yield from traced_calls(jax.grad(total), x, platform="cuda")
            yield from traced_calls(lambda x, total=total: jax.jvp(total, (x,), (x,)), x, platform="cuda")

    for call in {repr(call): call for call in calls()}.values():
        yield dataclasses.replace(call, device_kind=KIND)


def kernel_of(call: engines.Call) -> Any:
    return next((engine for engine in engines.registered(call.op) if engine.name == "hopper"), None)


@pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
def test_every_entry_speaks_for_a_call_that_is_timed():
    """No entry has a name that no call has any more; and a call that was measured itself has the faster engine."""
    tables, found = selection.measured()[KIND]["hopper"], set()
    for call in timed():
        kernel = kernel_of(call)
        if kernel is None or (features := kernel.features(call)) is None:
            continue
        found |= {(call.op, features.name)}
        for point in tables.get(call.op, {}).get("calls", {}).get(features.name, ()):
            if features.sizes.items() <= point.items():
                assert selection.gains(kernel, call) == (point["speed_up"] >= 1)
                assert selection.ranked(call)[0].name == ("hopper" if point["speed_up"] >= 1 else "xla")
    of_op = lambda table: {**table.get("ranges", {}), **table.get("calls", {})}
    assert {(op, name) for op, table in tables.items() for name in of_op(table)} - found == set()


def test_tables_are_of_the_described_form():
    assert set(selection.measured()) == set(hopper.MEASURED_ON)
    for op, table in selection.measured()[KIND]["hopper"].items():
        assert engines.registered(op)
        assert table.keys() <= {"ranges", "calls", "reach", "otherwise"}
        for point in itertools.chain.from_iterable(table.get("calls", {}).values()):
            assert point.keys() - {"length"} == {"batch", "speed_up"}
            assert min(point.values()) > 0
        for limits in itertools.chain.from_iterable(table.get("ranges", {}).values()):
            assert all(len(limit) == 2 and (limit[1] is None or limit[0] <= limit[1]) for limit in limits.values())


def test_gains_are_recorded(tmp_path: Path):
    path = tmp_path / "table.json"
    record = ft.partial(selection.record, path, "hopper")
    record("softmax", Features("accurate bfloat16", {"length": 512, "batch": 8}), 1.25)
    record("softmax", Features("accurate bfloat16", {"length": 128, "batch": 4}), 0.9)
    record("softmax", Features("accurate bfloat16", {"length": 512, "batch": 16}), 1.5)
    record("conv", Features("a name", {"batch": 4}), 2.00049)
    record("norm", Features("batches", {"rows": 4}), 2.0)  # a table of ranges is not written by the command
    lengths = [{"length": 128, "batch": 4, "speed_up": 0.9}, {"length": 512, "batch": 16, "speed_up": 1.5}]
    conv = {"calls": {"a name": [{"batch": 4, "speed_up": 2.0}]}}
    kernels = {"softmax": {"calls": {"accurate bfloat16": lengths}}, "conv": conv}
    assert json.loads(path.read_text()) == {"device": jax.devices()[0].device_kind, "hopper": kernels}
    path.write_text('{"device": "another"}')
    with pytest.raises(ValueError, match=r"must be a table of what was measured on .*, got one of another\."):
        record("conv", Features("a name", {"batch": 4}), 2.0)
