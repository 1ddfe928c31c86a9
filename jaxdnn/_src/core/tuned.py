"""What `jaxdnn.tune` measured on single calls, and a graph's heuristic B on its plans, in a file that later runs read.

The file is JSON: by kind of device, by versions, by call, the milliseconds of each engine that could serve it. The call
is written in words: the op, its operands, and its static arguments but for the engine and the level.

A file that the environment variable names must be there and be such a table. Nobody asked for the one in the cache
folder, so if it cannot be found, read or understood, it is as if nothing had been measured.
"""

import contextlib
import dataclasses
import functools as ft
import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxdnn._src.core import files, logs
from jaxdnn._src.core.engines import Call, in_short
from jaxdnn._version import __version__

VARIABLE = "JAXDNN_TUNED"
VERSIONS = f"jaxdnn {__version__}, jax {jax.__version__}, jaxlib {version('jaxlib')}"
Times = dict[str, float]
Table = dict[str, dict[str, dict[str, Times]]]

# Whether measurements decide nothing. JAX keys its compilation caches on this value.
_ignored = jax.make_user_context(False)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Within the context no file is read, and engines are chosen by the rule alone."""
    with _ignored(True):
        yield


def path() -> Path:
    """The file that runs read: what the environment variable `JAXDNN_TUNED` names, else one in the cache folder."""
    return _path(os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME"))


@ft.cache
def _path(given: str | None, caches: str | None) -> Path:
    return Path(given) if given else Path(caches or Path.home() / ".cache") / "jaxdnn" / "tuned.json"


def key(call: Call) -> str:
    """A call in words, alike in every process."""
    operands = ", ".join(map(in_short, call.avals))
    return f"{call.op}({operands}) {dataclasses.replace(call.spec, engine=None, level='fast')!r}"


def times(call: Call) -> Times | None:
    """What was measured on a call, if anything was, and its level lets a measurement decide.

    That is the level "fast" alone: at all others the bits of a result must not depend on what a file says.
    """
    if call.spec.level != "fast" or call.partitioned or call.device_kind is None or _ignored.value:
        return None
    of_device = _table().get(call.device_kind)
    return of_device.get(VERSIONS, {}).get(key(call)) if of_device else None


def kept(name: str, device_kind: str | None) -> Times | None:
    """What was measured under a name that is no call's, such as a graph's plans."""
    if device_kind is None or _ignored.value:
        return None
    return _table().get(device_kind, {}).get(VERSIONS, {}).get(name)


def _table() -> Table:
    return _read(os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME"))


def keep(file: Path, device_kind: str, found: Mapping[str, Times]) -> None:
    """Adds measurements to a file; who reads it meanwhile sees all of them or none."""
    file = file.resolve()
    table = _parsed(file) if file.exists() else {}
    table.setdefault(device_kind, {}).setdefault(VERSIONS, {}).update(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write(file, json.dumps(table, indent=1, sort_keys=True) + "\n")
    _read.cache_clear()


def _parsed(file: Path) -> Table:
    try:
        table = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, as `jaxdnn.tune` writes it: {error}.") from error
    if not _is_table(table, depth=4):
        raise ValueError(
            f"{file} must be a table, as `jaxdnn.tune` writes it: milliseconds by device, versions, call and engine."
        )
    return table


def _is_table(value: Any, depth: int) -> bool:
    """Whether a value is numbers in nested dicts of this depth."""
    if not depth:
        return isinstance(value, int | float)
    return isinstance(value, dict) and all(_is_table(v, depth - 1) for v in value.values())


@ft.cache
def _read(given: str | None, caches: str | None) -> Table:
    """The file as this process found it first, so that its choices do not change while it runs."""
    if given:
        try:
            return _parsed(Path(given))
        except (OSError, ValueError) as error:
            raise ValueError(f"`{VARIABLE}` must name a file that `jaxdnn.tune` wrote, got {given}: {error}") from error
    try:
        return _parsed(_path(None, caches))
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError) as error:  # a RuntimeError: no home folder
        logs.warn(f"the measurements of `jaxdnn.tune` are not read: {error}")
        return {}
