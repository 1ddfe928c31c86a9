"""Launches the kernels of recurrences."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.rnn.hopper import backward_plan, backward_ptx, forward_ptx
from jaxdnn._src.rnn.hopper.plan import Given, Partition, Plan


def forward(plan: Plan, given: Given, v: Mapping[str, Array], results: Sequence[str]) -> list[Array]:
    """Of the operands of `rnn`, those results of it, or of `rnn_saved`."""
    names = forward_ptx.operands(plan.cell, given)
    shapes = forward_shapes(plan, given, v["h"].dtype)
    values: dict[str, Array] = {**v, "r": v["r"].T}
    if given.resets:
        values["resets"] = v["resets"].astype(jnp.int32)
    arrays = [values[name] for name in names if name not in shapes]
    outs = [shapes[name] for name in names if name in shapes]
    _record("saved" if given.saves else "forward", plan, given)
    code = forward_ptx.forward(plan, given)
    blocks = plan.clusters(given.batch)  # `launch` counts clusters
    shape: dict[str, Any] = {"threads": plan.threads, "cluster": plan.cluster, "floats": plan.shared // 4}
    found = launch(code, arrays, outs, name=f"rnn_{plan.cell}", blocks=blocks, **shape)
    named = dict(zip((name for name in names if name in shapes), found, strict=True))
    return [named[name if name in named else f"last_{name}"] for name in results]


def forward_shapes(plan: Plan, given: Given, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Of every array that the kernel stores."""
    wide, of = jnp.float32, jax.ShapeDtypeStruct
    rows, units = (given.steps, given.batch), plan.units
    shapes = {"y": of((*rows, units), dtype), "last_h": of((given.batch, units), dtype)}
    if plan.cell == "lstm":
        shapes["last_c"] = of((given.batch, units), wide)
    if given.saves:
        shapes["gates"] = of((*rows, forward_ptx.saved_columns(plan)), wide)
        if plan.cell == "lstm":
            shapes["cells"] = of((*rows, units), wide)
    return shapes


def backward(plan: backward_plan.Plan, given: Given, v: Mapping[str, Array]) -> list[Array]:
    """The results of `rnn_backward`, of its operands."""
    names = backward_ptx.operands(plan.cell, given)
    shapes = backward_shapes(plan, given, v["h"].dtype)
    values: dict[str, Array] = dict(v)
    if plan.streamed:
        values["r"] = by_groups(plan, v["r"])
    if given.resets:
        values["resets"] = v["resets"].astype(jnp.int32)
    arrays = [values[name] for name in names if name not in shapes]
    _record("backward", plan, given)
    code = backward_ptx.backward(plan, given)
    blocks = plan.clusters(given.batch)
    shape: dict[str, Any] = {"threads": plan.threads, "cluster": plan.cluster, "floats": plan.shared // 4}
    return list(launch(code, arrays, list(shapes.values()), name=f"rnn_{plan.cell}_backward", blocks=blocks, **shape))


def by_groups(plan: backward_plan.Plan, r: Any) -> Any:
    """The matrix with its columns in groups of eight units, of all gates: what a warp reads at once lies together."""
    return r.reshape(-1, plan.gates, plan.units // 8, 8).swapaxes(1, 2).reshape(r.shape)


def backward_shapes(plan: backward_plan.Plan, given: Given, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Of every array that the kernel stores."""
    wide, of = jnp.float32, jax.ShapeDtypeStruct
    columns = forward_ptx.saved_columns(plan)
    shapes = {
        "e": of((given.steps, given.batch, columns), wide),
        "first_h": of((given.batch, plan.units), dtype),
    }
    return shapes | ({"first_c": of((given.batch, plan.units), wide)} if plan.cell == "lstm" else {})


def _record(which: str, plan: Partition, given: Given) -> None:
    branches.record(
        "recurrence",
        operands=plan.dtype,
        pass_=which,
        cell=plan.cell,
        cluster=plan.cluster,
        sets=plan.tiles,
        matrix_in_registers=plan.kept == plan.operands,
        warps_without_units=32 * plan.warps < plan.threads,
        ragged=given.ragged,
        resets=given.resets,
        reverse=given.reverse,
        streams=plan.streamed > 0,
        tail_of_sequences=given.batch % plan.sequences != 0,
    )
