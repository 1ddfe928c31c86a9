"""The layers of published networks, as cases for `jaxdnn bench`: the data is `networks.json`, with its sources."""

import dataclasses
import functools as ft
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdnn._src.cases.timed import Case


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a network: the op, and its sizes by the names that the op's cases have for them."""

    network: str
    name: str
    op: str
    sizes: Mapping[str, Any]


@ft.cache
def _networks() -> dict[str, Any]:
    return json.loads(Path(__file__).with_suffix(".json").read_text())["networks"]


def held_out() -> frozenset[str]:
    """The networks that judge the choice among engines: no rule is fitted to what was measured on them."""
    return frozenset(name for name, described in _networks().items() if described.get("held_out"))


@ft.cache
def layers() -> tuple[Layer, ...]:
    """The layers of all networks."""
    return tuple(_read())


def _read() -> Iterator[Layer]:
    for network, described in _networks().items():
        for row in described["layers"]:
            sizes = {name: value for name, value in row.items() if name not in ("layer", "op", "count")}
            fixed = {name: tuple(value) if isinstance(value, list) else value for name, value in sizes.items()}
            yield Layer(network, row["layer"], row["op"], fixed)


def cases(of_op: Mapping[str, Callable[..., Case]]) -> tuple[Case, ...]:
    """A case for each layer whose op is among those given, made by what is given for it; of equal layers the first."""
    found: dict[Any, Case] = {}
    for layer in layers():
        if layer.op in of_op:
            same = layer.op, *sorted(layer.sizes.items())
            found.setdefault(same, of_op[layer.op](family=layer.network, name=layer.name, **layer.sizes))
    return tuple(found.values())
