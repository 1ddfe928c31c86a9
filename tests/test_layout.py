"""Imports go one way: from what users call to families, from these to the kernels' common parts, and so to the core."""

import ast
import functools as ft
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
    *("activation", "tensor", "dropout", "conv", "a family"),
    *("families", "adapters", "graph", "surface", "cases", "cases of a family", "commands"),
)
COMMANDS = ("verify", "bench", "__main__")


@ft.cache
def modules() -> dict[str, ast.Module]:
    """The package's modules as syntax trees, read by the first test that asks."""
    found = {}
    for path in sorted((ROOT / "jaxdnn").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


@ft.cache
def imported(module: str) -> tuple[str, ...]:
    """The modules of the package that a module imports, wherever in it."""
    return tuple(_imported(module))


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules() else node.module for name in full)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def floor(module: str) -> str:
    _, *parts = module.split(".")
    if parts == ["_version"]:
        return "core"
    if not parts or parts[0] != "_src":
        return "commands" if parts and parts[0] in COMMANDS else "surface"
    if len(parts) == 1:
        return "core"
    if parts[1] in families.NAMES and any(re.match("cases|(timed|plain)$", part) for part in parts[2:]):
        return "cases of a family"
    return parts[1] if parts[1] in FLOORS or parts[1] not in families.NAMES else "a family"


def test_imports_go_down():
    place = {name: FLOORS.index(floor(name)) for name in modules()}
    up = [(name, n) for name in modules() for n in imported(name) if n in modules() and place[n] > place[name]]
    assert up == []


def test_families_use_activation_tensor_dropout_and_conv_alone_of_others():
    pairs = ((name, n) for name in modules() for n in imported(name) if n in modules())
    assert [p for p in pairs if {*map(floor, p)} == {"a family"} and len({n.split(".")[2] for n in p}) > 1] == []


def test_no_module_imports_another_that_imports_it():
    graph = {name: {n for n in imported(name) if n in modules()} for name in modules()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_families_are_the_packages_with_a_manifest():
    packages = (path.parent for path in (ROOT / "jaxdnn/_src").glob("*/__init__.py"))
    assert list(families.NAMES) == sorted(p.name for p in packages if "MANIFEST" in (p / "__init__.py").read_text())


def test_manifests_name_every_public_op():
    """`__all__` is made of what they name: what is imported from a family, each op from its own, is named there."""
    lines = [node for node in modules()["jaxdnn"].body if isinstance(node, ast.ImportFrom) and node.module]
    found = {a.name: str(node.module).split(".") for node in lines for a in node.names}
    ops = {name: parts[2] for name, parts in found.items() if parts[2:3] and parts[2] in families.NAMES}
    del ops["DropoutState"]
    named = {op: family for family, m in families.manifests().items() for ops in m.ops for op in ops.names.split()}
    assert ops == named
    public = {name for name in dir(dnn) if not name.startswith("_")}
    # Python binds the packages of commands to their parent when they are imported.
    assert public - set(dnn.__all__) <= {
        "engines",
        "equinox",
        "graph",
        "lax_like",
        "linen",
        "multi_head",
        "nnx",
        "recurrent",
        "ring",
        "tolerance",
        *COMMANDS,
    }


def test_primitives_are_declared_in_the_core():
    """A family says what its primitives are; how JAX is told stands in one place."""
    wiring = {f"jaxdnn._src.core.compat.{name}" for name in ("Primitive", "batching", "mlir")}
    names = lambda tree: {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert [name for name, tree in modules().items() if floor(name) != "core" and names(tree) & wiring] == []
