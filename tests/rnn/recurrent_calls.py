"""Data of recurrences, their kernels run by the small machine, and the same recurrences in float64."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.rnn.hopper import backward_plan, backward_ptx, calls, forward_ptx, plan
from jaxdnn._src.rnn.hopper.plan import Given
from jaxdnn._src.rnn.steps import GATES
from tests.hopper.recurrent_machine import Recurrent
from tests.hopper.row_machine import on_arrays

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
CELLS = ("lstm", "gru_after", "tanh", "relu")
Arrays = dict[str, np.ndarray]


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def forward_data(cell: str, units: int, given: Given, dtype: np.dtype, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    rows, batch, wide = (given.steps, given.batch), given.batch, GATES[cell] * units
    return {
        "a": rng.normal(size=(*rows, wide)).astype(np.float32),
        "r": (rng.normal(size=(units, wide)) * 1.5 / np.sqrt(units)).astype(dtype),
        "q": rng.normal(size=units).astype(np.float32),
        "h": rng.normal(size=(batch, units)).astype(dtype),
        "c": rng.normal(size=(batch, units)).astype(np.float32),
        "lengths": rng.integers(0, given.steps + 1, batch).astype(np.int32),
        "resets": rng.uniform(size=rows) < 0.3,
    }


def backward_data(cell: str, units: int, given: Given, dtype: np.dtype, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    rows, batch, normal = (given.steps, given.batch), given.batch, rng.normal
    gates = {
        "lstm": lambda: [logistic(normal(size=(4, *rows, units)))],
        "gru_after": lambda: [logistic(normal(size=(2, *rows, units))), normal(size=(2, *rows, units))],
    }.get(cell, lambda: [np.tanh(normal(size=(1, *rows, units)))])()
    gates = np.concatenate(gates)
    gates[2:3] = np.tanh(gates[2:3])
    return {
        "y": normal(size=(*rows, units)).astype(dtype),
        "h": normal(size=(batch, units)).astype(dtype),
        "c": normal(size=(batch, units)).astype(np.float32),
        "r": (normal(size=(units, GATES[cell] * units)) * 1.5 / np.sqrt(units)).astype(dtype),
        "gates": np.moveaxis(gates, 0, 2).reshape(*rows, -1).astype(np.float32),
        "before": np.tanh(normal(size=(*rows, units))).astype(dtype),
        "cells_before": normal(size=(*rows, units)).astype(np.float32),
        "lengths": rng.integers(0, given.steps + 1, batch).astype(np.int32),
        "resets": rng.uniform(size=rows) < 0.3,
    }


# ---- the kernels -----------------------------------------------------------------------------------------------------


def forward_plan(cell: str, units: int, dtype: np.dtype, tiles: int = 1, *own: Any) -> plan.Plan:
    return _changed(plan.Plan.least(cell, units, NAMES[dtype]), tiles, *own)


def gradient_plan(cell: str, units: int, dtype: np.dtype, tiles: int = 1, *own: Any) -> backward_plan.Plan:
    return _changed(backward_plan.Plan.least(cell, units, NAMES[dtype]), tiles, *own)


def _changed(least: Any, tiles: int, kept: int | None = None, streamed: int = 0) -> Any:
    """With so many sets of sequences, and so many operands in registers and read in each step."""
    found = least.with_tiles(tiles)
    return found if kept is None else dataclasses.replace(found, kept=kept, streamed=streamed)


def run_forward(chosen: plan.Plan, given: Given, v: Arrays, code: str = "") -> Arrays:
    values = {**v, "r": np.ascontiguousarray(v["r"].T), "resets": v["resets"].astype(np.int32)}
    names, shapes = forward_ptx.operands(chosen.cell, given), calls.forward_shapes(chosen, given, v["h"].dtype)
    return _run(chosen, given, values, names, shapes, code or forward_ptx.forward(chosen, given))


def run_backward(chosen: backward_plan.Plan, given: Given, v: Arrays, code: str = "") -> Arrays:
    values = {**v, "resets": v["resets"].astype(np.int32)}
    if chosen.streamed:
        values["r"] = calls.by_groups(chosen, v["r"])
    names, shapes = backward_ptx.operands(chosen.cell, given), calls.backward_shapes(chosen, given, v["h"].dtype)
    return _run(chosen, given, values, names, shapes, code or backward_ptx.backward(chosen, given))


def _run(
    chosen: plan.Partition, given: Given, values: Arrays, names: tuple[str, ...], shapes: Any, code: str
) -> Arrays:
    results = [name for name in names if name in shapes]
    arrays = [values[name] for name in names if name not in shapes]
    outs = [(shapes[name].shape, np.dtype(shapes[name].dtype)) for name in results]
    count = chosen.clusters(given.batch)
    again = given.batch > chosen.sequences and given.batch % chosen.sequences != 0
    shape: dict[str, Any] = {"floats": chosen.shared // 4, "again": again}
    found = on_arrays(Recurrent, code, arrays, outs, chosen.threads, count, chosen.cluster, **shape)
    return dict(zip(results, found, strict=True))


# ---- the same in float64 ---------------------------------------------------------------------------------------------


def _marks(given: Given, v: Arrays, t: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether a sequence has the step, and whether it begins anew with it."""
    live = t < v["lengths"] if given.ragged else np.ones(given.batch, bool)
    resets = v["resets"][t] if given.resets else np.zeros(given.batch, bool)
    return live[:, None], resets[:, None]


def golden_forward(cell: str, given: Given, v: Arrays) -> Arrays:
    dtype, units, r = v["h"].dtype, v["h"].shape[1], v["r"].astype(np.float64)
    h, c = v["h"].astype(np.float64), v["c"].astype(np.float64)
    every: dict[str, list[Any]] = {name: [None] * given.steps for name in ("y", "gates", "cells")}
    for s in range(given.steps):
        t = given.steps - 1 - s if given.reverse else s
        live, resets = _marks(given, v, t)
        known = live & ~resets
        before, cells = np.where(known, h, 0), np.where(known, c, 0)
        a, products = v["a"][t].astype(np.float64), before @ r
        part = lambda x, j: x[:, j * units : (j + 1) * units]
        if cell == "lstm":
            i, f, g, o = (part(a + products, j) for j in range(4))
            gates = [logistic(i), logistic(f), np.tanh(g), logistic(o)]
            new_c = gates[1] * cells + gates[0] * gates[2]
            new_c = new_c if given.clip is None else np.clip(new_c, *given.clip)
            new, c = gates[3] * np.tanh(new_c), np.where(live, new_c, c)
        elif cell == "gru_after":
            q = part(products, 2) + v["q"]
            reset, z = (logistic(part(a, j) + part(products, j)) for j in range(2))
            n = np.tanh(part(a, 2) + reset * q)
            new, gates = (1 - z) * n + z * before, [reset, z, n, q]
        else:
            new = np.tanh(a + products) if cell == "tanh" else np.maximum(a + products, 0)
            gates = [new]
        h = np.where(live, new.astype(np.float32).astype(dtype).astype(np.float64), h)
        for name, value in (("y", h), ("gates", np.concatenate(gates, 1)), ("cells", c)):
            every[name][t] = value
    return {name: np.stack(values) for name, values in every.items()} | {"last_h": h, "last_c": c}


def golden_backward(cell: str, given: Given, v: Arrays) -> Arrays:
    dtype, units, r = v["h"].dtype, v["h"].shape[1], v["r"].astype(np.float64)
    w = {name: x.astype(np.float64) for name, x in v.items() if name not in ("lengths", "resets")}
    dh, dc = w["h"], w["c"]
    e: list[Any] = [None] * given.steps
    for s in range(given.steps):
        t = s if given.reverse else given.steps - 1 - s
        live, resets = _marks(given, v, t)
        gates = np.split(w["gates"][t], w["gates"].shape[2] // units, 1)
        d, kept, new_c = dh + w["y"][t], 0.0, dc
        if cell == "lstm":
            i, f, g, o = gates
            raw = f * w["cells_before"][t] + i * g
            low, high = given.clip or (-np.inf, np.inf)
            inside, tanh = (raw >= low) & (raw <= high), np.tanh(np.clip(raw, low, high))
            of_c = inside * (dc + d * o * (1 - tanh**2))
            found = [of_c * g * i * (1 - i), of_c * w["cells_before"][t] * f * (1 - f), of_c * i * (1 - g**2)]
            found += [d * tanh * o * (1 - o)]
            multiplied, new_c = found, of_c * f
        elif cell == "gru_after":
            reset, z, n, q = gates
            dn = d * (1 - z) * (1 - n**2)
            found = [dn * q * reset * (1 - reset), d * (w["before"][t] - n) * z * (1 - z), dn, dn * reset]
            multiplied, kept = [*found[:2], found[3]], d * z
        else:
            (h,) = gates
            found = multiplied = [d * (1 - h**2 if cell == "tanh" else h > 0)]
        narrow = np.concatenate(multiplied, 1).astype(np.float32).astype(dtype).astype(np.float64)
        dh = np.where(live, np.where(resets, 0, kept + narrow @ r.T), d)
        dc = np.where(live, np.where(resets, 0, new_c), dc)
        e[t] = np.where(live, np.concatenate(found, 1), 0)
    return {"e": np.stack(e), "first_h": dh, "first_c": dc}
