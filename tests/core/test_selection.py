"""The rule that chooses an engine where none is named."""

import dataclasses
import functools as ft
import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.explain import traced_calls

KIND = hopper.MEASURED_ON[0]
SPEC = types.SimpleNamespace(level="fast")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_an_engine_is_first_where_it_was_measured_but_for_the_kinds_that_it_names():
    """On the device where it was measured an engine is taken unasked; elsewhere, and where it was slower, XLA's."""
    row = engines.Measured("corpus_conv", "a network", "a layer", "forward", 0.5)
    few = engines.Slower("its tiles are few", lambda call: call.avals[0].shape[0] < 4, row)
    wide = engines.Slower("nobody measured it", lambda call: call.avals[0].dtype == jnp.float32)
    kernel = engines.Engine("kernel", "an op", run=jnp.negative, measured_on=("a device",), slower=(few, wide))

    def told(batch: int, dtype: Any = jnp.bfloat16, kind: str | None = "a device") -> tuple[str | None, str | None]:
        call = engines.Call("an op", SPEC, (jax.ShapeDtypeStruct((batch,), dtype),), "cuda", kind)
        return selection.why_later(kernel, call), selection.why_earlier(kernel, call)

    assert told(4) == (None, "it was measured on a device, and the call is of no kind on which it was slower there")
    assert told(3) == ("its tiles are few (a network a layer, forward, bfloat16: 0.50 of its speed)", None)
    assert told(4, jnp.float32) == ("nobody measured it", None)
    assert told(4, kind="another") == ("it was measured on a device, not on another", None)
    assert told(4, kind=None) == ("it was measured on a device, and which device will run this is not known here", None)
    plain = dataclasses.replace(kernel, measured_on=None)
    call = engines.Call("an op", SPEC, (jax.ShapeDtypeStruct((1,), jnp.float32),), "cuda", "a device")
    assert (selection.why_later(plain, call), selection.why_earlier(plain, call)) == (None, None)


def first(op: Any, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> str:
    """The engine that is tried first on the device that was measured."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    call = next(traced_calls(op, *operands, platform="cuda"))
    return selection.ranked(dataclasses.replace(call, device_kind=KIND))[0].name


def test_convolutions_of_no_table_are_served_by_the_kernels():
    """Layers that no entry names; those on which cuDNN was measured faster are kinds that the engine names."""
    conv = ft.partial(dnn.conv, padding=1)
    assert first(conv, (3, 19, 23, 40), (3, 3, 40, 88)) == "hopper"
    assert first(conv, (3, 19, 23, 40), (3, 3, 40, 88), dtype=jnp.float16) == "hopper"
    wide = ft.partial(conv, out_dtype=jnp.float32)  # not measured
    assert first(wide, (3, 19, 23, 40), (3, 3, 40, 88)) == "xla"
    assert first(conv, (3, 19, 23, 40), (3, 3, 40, 88), dtype=jnp.float32) == "xla"
    narrow = lambda k: first(lambda dy, w: dnn.conv_dgrad(dy, w, (8, 28, 28, 64)), (8, 28, 28, k), (1, 1, 64, k))
    assert [narrow(48), narrow(64), narrow(76)] == ["xla", "hopper", "xla"]  # of the last, a copy pads the channels
    product = lambda c, k: first(lambda x, dy: dnn.conv_wgrad(x, dy, (1, 1, c, k)), (8, 28, 28, c), (8, 28, 28, k))
    assert [product(64, 48), product(48, 64), product(64, 64)] == ["xla", "xla", "hopper"]
    rgb = lambda taps: first(
        lambda x, dy: dnn.conv_wgrad(x, dy, (taps, taps, 3, 64), padding=taps // 2),
        (8, 64, 64, 3), (8, 64, 64, 64),
    )  # fmt: skip
    assert [rgb(11), rgb(7)] == ["xla", "hopper"]


KERNELS = {op: kernel for op in engines.ops() for kernel in engines.registered(op) if kernel.measured_on}


@pytest.mark.parametrize("op", KERNELS)
def test_what_is_left_to_xla_has_a_reason(op: str):
    """A clause, and a row of a committed file in which the engine took longer, if there is one."""
    for kind in KERNELS[op].slower:
        assert kind.why
        assert not kind.why.endswith(".")
        if (row := kind.measured) is None:
            continue
        rows = json.loads((RESULTS / f"{row.file}_nvidia_h200.json").read_text())["rows"]
        keys = {"family": row.family, "case": row.case, "pass": row.which, "dtype": row.dtype}
        (ms,) = (found["ms"] for found in rows if keys.items() <= found.items())
        assert row.gain == pytest.approx(ms["jaxdnn:xla"] / ms["jaxdnn:hopper"], abs=0.005)
        assert row.gain < 1
