"""What `jaxdnn.tune` measured on single calls, in a file that later runs read.

The file is JSON: by kind of device, by versions, by call, the milliseconds of each engine that could serve it. The call
is written in words: the op, its operands, and its static arguments but for the engine and the level.
"""

import dataclasses
import functools as ft
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import jax

from jaxdnn._src.core.engines import Call
from jaxdnn._version import __version__

VARIABLE = "JAXDNN_TUNED"
VERSIONS = f"jaxdnn {__version__}, jax {jax.__version__}, jaxlib {version('jaxlib')}"
Times = dict[str, float]


def path() -> Path:
    """The file that runs read: what the environment variable `JAXDNN_TUNED` names, else one in the cache folder."""
    return _path(os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME"))


@ft.cache
def _path(given: str | None, caches: str | None) -> Path:
    return Path(given) if given else Path(caches or Path.home() / ".cache") / "jaxdnn" / "tuned.json"


def key(call: Call) -> str:
    """A call in words, alike in every process."""
    operands = ", ".join(f"{v.dtype}[{','.join(map(str, v.shape))}]" for v in call.avals)
    return f"{call.op}({operands}) {dataclasses.replace(call.spec, engine=None, level='fast')!r}"


def times(call: Call) -> Times | None:
    """What was measured on a call, if anything was, and its level lets a measurement decide.

    That is the level "fast" alone: at all others the bits of a result must not depend on what a file says.
    """
    if call.spec.level != "fast" or call.partitioned or call.device_kind is None:
        return None
    of_device = _read(path()).get(call.device_kind)
    return of_device.get(VERSIONS, {}).get(key(call)) if of_device else None


def best(call: Call) -> str | None:
    """The engine that was measured fastest on a call."""
    found = times(call)
    return min(found, key=found.__getitem__) if found else None


def keep(file: Path, device_kind: str, found: Mapping[str, Times]) -> None:
    """Adds measurements to a file; who reads it meanwhile sees all of them or none."""
    table = _parsed(file)
    table.setdefault(device_kind, {}).setdefault(VERSIONS, {}).update(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as new:
        new.write(json.dumps(table, indent=1, sort_keys=True) + "\n")
    os.replace(new.name, file)
    _read.cache_clear()


def _parsed(file: Path) -> dict[str, dict[str, dict[str, Times]]]:
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} must be JSON, as `jaxdnn.tune` writes it: {error}.") from error


@ft.cache
def _read(file: Path) -> dict[str, dict[str, dict[str, Times]]]:
    """A file as this process found it first, so that its choices do not change while it runs."""
    return _parsed(file)
