"""Measures the engines on the calls of a program, for the choice among them in later runs."""

import dataclasses
import functools as ft
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdnn._src.core import engines, explain, selection, timing, tuned

REPEATS = 9
ROTATED_BYTES, MOST_SETS = 1 << 28, 32  # operands that no cache of a GPU holds all, as in a program


class Tuned(dict[str, tuned.Times]):
    """The milliseconds of each engine by call, the calls in words; prints as a table.

    `failed` has the calls on which an engine raised, and what it raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, Exception] = {}

    def __str__(self) -> str:
        lines = [
            f"{call}\n    " + ", ".join(f"{name} {ms:.4f} ms" for name, ms in sorted(found.items(), key=lambda v: v[1]))
            for call, found in self.items()
        ]
        lines += [f"{call}\n    failed: {type(error).__name__}: {error}" for call, error in self.failed.items()]
        return "\n".join(lines) or "no call that names no engine and that several engines can serve"

    __repr__ = __str__


def tune(function: Callable[..., Any], /, *args: Any, path: str | Path | None = None, **kwargs: Any) -> Tuned:
    """Measures, for every jaxdnn call in a function, the engines that can serve it, and keeps what it found in a file.

    The fastest then serves that call, in this process and in later ones that read the file, where no engine is named
    and it is at least 5 % faster than the engine that would serve otherwise, by rules that were fitted on other shapes.
    An op is measured alone, without the neighbours that XLA may fuse it with. Nothing is measured unless this is
    called.

    Args:
      function: an op such as `jaxdnn.conv`, or any JAX function that calls ops, such as a gradient or a whole step.
      args: its arguments; `jax.ShapeDtypeStruct`s serve as well as arrays, for the calls are measured one by one, on
        random operands.
      path: the file to add to; None is the one that runs read: what the environment variable `JAXDNN_TUNED` names,
        which must be there when a run reads it, or `jaxdnn/tuned.json` in the user's cache folder. It is JSON, by kind
        of device, by versions, by call, and is replaced as a whole, after each call. Processes of one program must read
        the same file.
      kwargs: its keyword arguments.

    Returns:
      The milliseconds of each engine by call; it prints as text. Its attribute `failed` has the calls on which an
        engine raised, which are also named on the standard error stream.

    Differentiation: tune `jax.grad(f)` to measure the backward ops.

    Numerics: a call is measured at the level "fast", whatever it requires, and a measurement decides at that level
      alone; at every other level the choice is as before, so that no bit of a result depends on it.

    Raises:
      Whatever the function itself raises when it is traced. Functions that were compiled before keep their engines.

    Example:
      >>> x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5))
      >>> found = dnn.tune(dnn.conv, x, w)  # on a CPU one engine serves it, so there is nothing to measure
      >>> len(found)
      0

    Sources: cuDNN's `cudnnFindConvolutionForwardAlgorithm`; PyTorch's `torch.backends.cudnn.benchmark`, which keeps no
      file.
    """
    here = engines.platform()
    with tuned.ignored():
        return measured(explain.traced_calls(function, *args, platform=here, **kwargs), path)


def measured(calls: Iterable[engines.Call], path: str | Path | None) -> Tuned:
    """Measures calls that name no engine, each once, and keeps each result; one that raises stops no other."""
    found, file = Tuned(), Path(path) if path else tuned.path()
    for given in calls:
        call, key = dataclasses.replace(given, spec=dataclasses.replace(given.spec, level="fast")), tuned.key(given)
        able = [e for e in engines.registered(call.op) if e.rank is None and selection.refusal(e, call, "fast") is None]
        if call.spec.engine is not None or len(able) < 2 or key in found or key in found.failed:
            continue
        try:
            found[key] = _times(call, able)
        except Exception as error:  # such as too little memory on the device
            found.failed[key] = error
            said = (str(error).splitlines() or [""])[0]
            print(f"{key}: {type(error).__name__}: {said}", file=sys.stderr, flush=True)
            continue
        if call.device_kind is not None:
            tuned.keep(file, call.device_kind, {key: found[key]})
    return found


def _times(call: engines.Call, able: list[engines.Engine]) -> tuned.Times:
    size = sum(v.size * v.dtype.itemsize for v in call.avals)
    count = max(1, min(ROTATED_BYTES // max(size, 1), MOST_SETS))
    sets = [_operands(call, seed) for seed in range(count)]
    ms = timing.measure([ft.partial(e.run, call) for e in able], sets, repeats=REPEATS)
    return {engine.name: t for engine, t in zip(able, ms, strict=True)}


def _operands(call: engines.Call, seed: int) -> list[jax.Array]:
    """Normal numbers; integers are 0, which is a valid index and a valid key."""
    keys = jax.random.split(jax.random.key(seed), len(call.avals))
    return [
        jax.random.normal(key, v.shape).astype(v.dtype)
        if jnp.issubdtype(v.dtype, jnp.floating)
        else jnp.zeros(v.shape, v.dtype)
        for key, v in zip(keys, call.avals, strict=True)
    ]
