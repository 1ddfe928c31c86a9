"""Imports go one way: from what users call to families, from these to the kernels' common parts, and so to the core."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import jaxdnn as dnn
from jaxdnn._src import families

ROOT = Path(__file__).parents[1]
# A module may import from its own floor and from those that stand before it.
FLOORS = (
    *("core", "hopper"),
    *("activation", "tensor", "a family"),
    *("families", "surface", "cases", "cases of a family", "commands"),
)
COMMANDS = ("verify", "bench", "__main__")


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted((ROOT / "jaxdnn").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


def imported(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, wherever in it."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in full)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def floor(module: str) -> str:
    _, *parts = module.split(".")
    if not parts or parts[0] != "_src":
        return "commands" if parts and parts[0] in COMMANDS else "surface"
    if len(parts) == 1:
        return "core"
    if parts[1] in families.NAMES and any(re.match("cases|timed$", part) for part in parts[2:]):
        return "cases of a family"
    return parts[1] if parts[1] in FLOORS or parts[1] not in families.NAMES else "a family"


def test_imports_go_down():
    place = {name: FLOORS.index(floor(name)) for name in MODULES}
    up = [(name, n) for name in MODULES for n in imported(name) if n in MODULES and place[n] > place[name]]
    assert up == []


def test_families_use_activation_and_tensor_alone_of_others():
    pairs = ((name, n) for name in MODULES for n in imported(name) if n in MODULES)
    assert [p for p in pairs if {*map(floor, p)} == {"a family"} and len({n.split(".")[2] for n in p}) > 1] == []


def test_no_module_imports_another_that_imports_it():
    graph = {name: {n for n in imported(name) if n in MODULES} for name in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_manifests_name_every_public_op():
    beside = {"DropoutState", "determinism", "explain", "limits"}
    assert families.ops() == {name: getattr(dnn, name) for name in dnn.__all__ if name not in beside}
    public = {name for name in dir(dnn) if not name.startswith("_")}
    # Python binds the packages of commands to their parent when they are imported.
    assert public - set(dnn.__all__) <= {"engines", "tolerance", *COMMANDS}
