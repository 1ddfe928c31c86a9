"""The families of ops, and what their manifests name."""

import functools as ft
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxdnn._src.core.manifest import Manifest

SHARED = ("adapters", "cases", "core", "graph", "hopper")
# Every package beside this file but those that families share or that are made of them, in the alphabet's order.
NAMES = tuple(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.ispkg and m.name not in SHARED)


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


def of_layer(name: str) -> Mapping[str, Any]:
    """What makes a case for `jaxdnn bench` of a network's layer, by the layer's op."""
    return getattr(_module(name, manifests()[name].timed or ""), "OF_LAYER", {})


def plain() -> tuple[ModuleType, ...]:
    """The modules that have the examples of manifests in plain JAX, by name."""
    return tuple(_module(name, "plain") for name in NAMES)


def ops() -> tuple[str, ...]:
    """The name of every public op."""
    return tuple(op for manifest in manifests().values() for ops in manifest.ops for op in ops.names.split())


def _module(name: str, module: str = "") -> ModuleType:
    return importlib.import_module(".".join(filter(None, (__package__, name, module))))
