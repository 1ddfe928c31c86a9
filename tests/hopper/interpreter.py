"""Runs kernels of `hopper.rows` in Pallas' interpreter."""

from typing import Any

import pytest

from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.hopper import row_kernel, rows


def _load(ref: Any, shape: tuple[int, ...], of: Any) -> Any:
    del of
    return ref[...].reshape(shape)


def _store(ref: Any, value: Any) -> None:
    ref[...] = value.reshape(ref.shape)


def interpreted(monkeypatch: pytest.MonkeyPatch, *, races: bool = True) -> Any:
    """What a kernel takes as `interpret`. The interpreter has no layouts and reshapes values only, not references.

    It runs a thread of its own for each warpgroup, and stops for good where the machine has fewer cores than these.
    """
    monkeypatch.setattr(rows, "load", _load)
    for module in (rows, row_kernel):
        monkeypatch.setattr(module, "store", _store)
    monkeypatch.setattr(row_kernel, "MULTIPROCESSORS", 2)
    parameters: Any = getattr(plgpu, "InterpretGPUParams")  # noqa: B009  (older releases have none)
    return parameters(detect_races=races, inline_mgpu="ignore")  # which gives a kernel its name
