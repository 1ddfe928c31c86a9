"""The families of ops: the one list of them, and what their manifests name."""

import functools as ft
import importlib
from types import ModuleType
from typing import Any

from jaxdnn._src.core.manifest import Manifest

# In the order in which `jaxdnn verify` runs and shows them.
NAMES = ("conv", "norm", "activation", "dropout", "pool", "resample", "softmax", "tensor")


@ft.cache
def manifests() -> dict[str, Manifest]:
    """The manifests of all families, by the families' names."""
    return {name: _module(name).MANIFEST for name in NAMES}


def load_engines() -> None:
    """Imports the modules that register engines."""
    for name, manifest in manifests().items():
        for module in manifest.engines:
            _module(name, module)


@ft.cache
def cases() -> tuple[Any, ...]:
    """What has the cases of all families. Loaded when asked for: some of what they import depends on the devices."""
    found = [(name, module) for name, manifest in manifests().items() for module in manifest.cases]
    return tuple(_module(*pair).FAMILY for pair in found)


def with_timed() -> tuple[str, ...]:
    """The families that `jaxdnn bench` knows."""
    return tuple(name for name, manifest in manifests().items() if manifest.timed)


def timed(name: str) -> tuple[Any, ...]:
    """What `jaxdnn bench` times of a family."""
    return _module(name, manifests()[name].timed or "").CASES


def ops() -> dict[str, Any]:
    """Every public op."""
    found = [(name, op, module) for name, manifest in manifests().items() for op, module in manifest.modules.items()]
    return {op: getattr(_module(name, module), op) for name, op, module in found}


def _module(name: str, module: str = "") -> ModuleType:
    return importlib.import_module(".".join(filter(None, (__package__, name, module))))
