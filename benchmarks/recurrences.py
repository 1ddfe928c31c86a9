"""The kernels of recurrent layers on a Hopper GPU, by plan: values, bits, and microseconds a step.

    PYTHONPATH=.:reference python benchmarks/recurrences.py PATH [--layer CELL:UNITS:DTYPE ...]

Each layer is put to each pass and to each number of sets of sequences that plans have. Values are compared with loops
in float64 over 12 steps of sequences with lengths and resets, which fill no set, after the memory of the results was
filled with NaN; the error is a distance of norms, over what the kernels' tests allow. Times are device times of 256
steps, each the least of three medians: of as many clusters as run at once, and of one sequence more.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn._src.core import timing
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.rnn.hopper import backward_plan, calls, plan
from jaxdnn._src.rnn.hopper.plan import Given
from tests.rnn import recurrent_calls

LAYERS = ("lstm:640:bfloat16", "lstm:768:bfloat16", "lstm:768:float16", "gru_after:768:bfloat16", "tanh:1024:bfloat16")
STEPS, CHECKED = 256, Given(12, 19, ragged=True, resets=True, saves=True)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A pass, "forward", "saved" or "gradient", by a plan."""

    layer: str
    which: str
    plan: Any
    dtype: Any

    def drawn(self, given: Given) -> dict[str, np.ndarray]:
        make = recurrent_calls.backward_data if self.which == "gradient" else recurrent_calls.forward_data
        return make(self.plan.cell, self.plan.units, given, self.dtype, seed=given.batch)

    def run(self, given: Given, v: dict[str, Any]) -> list[Any]:
        if self.which == "gradient":
            return calls.backward(self.plan, given, v)
        return calls.forward(self.plan, given, v, self.results(given))

    def results(self, given: Given) -> list[str]:
        of_lstm = self.plan.cell == "lstm"
        if self.which == "gradient":
            return ["e", "first_h", *(["first_c"] if of_lstm else [])]
        saved = ["gates", *(["cells"] if of_lstm else [])] if given.saves else []
        return ["y", "last_h", *(["last_c"] if of_lstm else []), *saved]

    def compiled(self, given: Given) -> Any:
        one = jax.eval_shape(lambda: self.drawn(dataclasses.replace(given, steps=1)))
        shapes = {n: jax.ShapeDtypeStruct(_of_steps(n, v.shape, given.steps), v.dtype) for n, v in one.items()}
        return jax.jit(lambda v: self.run(given, v)).lower(shapes).compile()

    def timed(self) -> list[Given]:
        most = plan.AT_ONCE[self.plan.cluster] * self.plan.sequences
        return [Given(STEPS, n, saves=self.which == "saved") for n in (most, most + 1)]

    def every(self) -> list[Given]:
        return [CHECKED, *self.timed()]


def _of_steps(name: str, shape: tuple[int, ...], steps: int) -> tuple[int, ...]:
    whole = name in ("a", "y", "gates", "before", "cells_before", "resets")
    return (steps, *shape[1:]) if whole else shape


def checked(launch: Launch, program: Any) -> dict[str, Any]:
    """The largest error, of which result it is, and whether three calls have the same bits."""
    v, dtype = launch.drawn(CHECKED), launch.dtype
    operands = jax.device_put(v)
    jax.block_until_ready([jnp.full((1 << 26,), jnp.nan, jnp.float32) for _ in range(2)])
    found, *again = ([np.asarray(x) for x in program(operands)] for _ in range(3))
    loop = recurrent_calls.golden_backward if launch.which == "gradient" else recurrent_calls.golden_forward
    golden, live = loop(launch.plan.cell, CHECKED, v), np.arange(CHECKED.steps)[:, None] < v["lengths"]
    errors = {}
    for name, x in zip(launch.results(CHECKED), found, strict=True):
        want, got = golden[name], x.astype(np.float64)
        if name in ("gates", "cells"):  # nothing reads these behind a sequence's end
            want, got = want[live], got[live]
        allowed = 2.0**-8 if x.dtype == dtype else 1e-4 if dtype == np.float16 else 2e-4
        errors[name] = float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300) / allowed)
    worst = max(errors, key=errors.__getitem__)
    same = all(a.tobytes() == b.tobytes() for other in again for a, b in zip(found, other, strict=True))
    return {"error": round(errors[worst], 3), "of": worst, "finite": bool(np.isfinite(errors[worst])), "repeats": same}


def microseconds(launch: Launch, given: Given, program: Any) -> float:
    """What a step takes."""
    one = launch.drawn(dataclasses.replace(given, steps=1))
    operands = {n: jnp.broadcast_to(v, _of_steps(n, v.shape, given.steps)) for n, v in one.items()}
    return round(1e3 / STEPS * min(timing.measure([program] * 3, [[operands]], repeats=5)), 3)


def launches(layers: list[str]) -> list[Launch]:
    found = []
    for layer in layers:
        cell, units, name = layer.split(":")
        dtype = np.dtype(jnp.dtype(name))
        for which, of in (("forward", plan.Plan), ("saved", plan.Plan), ("gradient", backward_plan.Plan)):
            least = of.least(cell, int(units), NAMES[dtype])
            sets = of.sets[:1] if which == "saved" else of.sets
            plans = [least and least.with_tiles(tiles) for tiles in sets]
            found += [Launch(layer, which, chosen, dtype) for chosen in plans if chosen is not None]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--layer", action="append", help=f"a cell, its units and a dtype (default: {' '.join(LAYERS)})")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/recurrences.py {' '.join(sys.argv[1:])}",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rows": rows,
    }
    every = [(launch, given) for launch in launches(args.layer or [*LAYERS]) for given in launch.every()]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        compiling = {call: pool.submit(call[0].compiled, call[1]) for call in every}
        for launch in dict.fromkeys(launch for launch, _ in every):
            of, of_launch = launch.plan, {given: compiling[launch, given].result() for given in launch.every()}
            row = {"layer": launch.layer, "pass": launch.which, "cluster": of.cluster, "sets": of.tiles}
            row |= {"kept": of.kept, "streamed": of.streamed, "cycles_of_model": round(of.step_cycles())} | checked(
                launch, of_launch[CHECKED]
            )
            try:
                row["us"] = {given.batch: microseconds(launch, given, of_launch[given]) for given in launch.timed()}
            except RuntimeError as error:  # of CUPTI, which may lose a launch
                row["failed"] = str(error).splitlines()[0]
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
