"""What jaxdnn takes from JAX beyond its compatibility policy: it stands in one file, and can go without an op going."""

import ast
import contextlib
import dataclasses
import functools as ft
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import compat, engines, selection
from jaxdnn._src.core.compat import AHEAD, KERNELS, SHARDING, Name
from jaxdnn._src.core.explain import traced_calls

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"(jax\.(_src|core|experimental|extend|interpreters)|jaxlib)(\.|$)")
newer_jax = pytest.mark.skipif(jax.__version_info__ < hopper.MINIMUM_JAX, reason="the Hopper kernels need JAX 0.11")
X = jax.ShapeDtypeStruct((32, 28, 28, 64), jnp.bfloat16)
OPS: dict[str, Callable[..., Any]] = {
    "conv": lambda x: dnn.conv(x, np.ones((3, 3, 64, 64), x.dtype)),
    "softmax": dnn.softmax,
    "layer_norm": dnn.layer_norm,
    "pool": dnn.pool,
    "dropout": lambda x: dnn.dropout(x, np.zeros(2, np.uint32)),
}


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a file imports: the full name, and what the file calls it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; "" for what is no such chain of names."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return head and f"{head}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@ft.cache
def sources() -> dict[Path, ast.Module]:
    """The package's files as syntax trees, read by the first test that asks."""
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "jaxdnn").rglob("*.py"))}


def test_private_names_are_imported_in_one_file():
    elsewhere = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in sources().items()
        if path.name != "compat.py"
        for name in [*(full for full, _ in imports(tree)), *map(dotted, ast.walk(tree))]
        if PRIVATE.match(name)
    }
    assert elsewhere == set()


def test_what_is_imported_late_is_what_a_type_checker_sees():
    (tree,) = (tree for path, tree in sources().items() if path.name == "compat.py")
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {called: full for full, called in imports(ast.Module(block.body, []))}
    assert seen == {name: where.replace(":", ".") for name, where in compat.LAZY.items()}


def test_every_name_that_kernels_use_is_probed():
    """And every probed name is used."""
    used = set()
    for tree in sources().values():
        lazy = {called for full, called in imports(tree) if full.startswith("jaxdnn._src.core.compat.")} & set(
            compat.LAZY
        )
        used |= {compat.LAZY[alias].replace(":", ".") for alias in lazy if ":" in compat.LAZY[alias]}
        for name in map(dotted, ast.walk(tree)):
            alias, _, attribute = name.partition(".")
            if alias in lazy - {"profiler"} and attribute:
                used.add(f"{compat.LAZY[alias]}.{attribute}")
    probed = {str(name) for name in KERNELS}
    assert {name for name in probed if not any(f"{u}.".startswith(f"{name}.") for u in used)} == set()
    assert {u for u in used if not any(f"{u}.".startswith(f"{n}.") or n.startswith(f"{u}.") for n in probed)} == set()


@newer_jax
def test_nothing_lacks_here():
    assert compat.lacking(KERNELS) is None
    assert compat.lacking(SHARDING) is None
    assert compat.lacking(AHEAD) is None
    assert all(name.why for name in (*KERNELS, *SHARDING, *AHEAD))


class Lacking:
    """A class without one of its attributes."""

    def __init__(self, whole: Any, gone: str):
        self.whole, self.gone = whole, gone
        with contextlib.suppress(ValueError, TypeError):  # of some there is none
            self.__signature__ = inspect.signature(whole)

    def __call__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name == self.gone:
            raise AttributeError(name)
        return getattr(self.whole, name)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Name], None]]:
    """Removes a name from the JAX that is here."""

    def remove(name: Name) -> None:
        module = importlib.import_module(name.module)
        owner, _, member = name.attribute.partition(".")
        if member:
            monkeypatch.setattr(module, owner, Lacking(getattr(module, owner), member))
        else:
            monkeypatch.delattr(module, owner)
        compat.lacking.cache_clear()

    yield remove
    monkeypatch.undo()
    compat.lacking.cache_clear()


@newer_jax
@pytest.mark.parametrize("name", KERNELS, ids=str)
def test_without_a_name_of_the_kernels_xla_serves(
    name: Name, without: Callable[[Name], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engines, "device_kind", lambda platform: "NVIDIA H200")
    without(name)
    reason = f"JAX {jax.__version__} lacks {name}, which its kernels need"
    for op, function in OPS.items():
        (found,) = dnn.explain(function, X, platform="cuda")
        assert found.engine == "xla", op
        assert [c.refusal for c in found.candidates if c.engine == "hopper"] == [reason], op
    if not name.module.startswith("jaxlib"):  # else JAX lowers nothing at all
        exported = export.export(jax.jit(dnn.pool), platforms=["cuda"])(X)
        assert "mosaic_gpu" not in exported.mlir_module()
        with pytest.raises(NotImplementedError) as error:
            export.export(jax.jit(lambda x: dnn.pool(x, engine="hopper")), platforms=["cuda"])(X)
        assert reason in " ".join(error.value.__notes__)


@newer_jax
def test_a_parameter_that_went_is_found_too(monkeypatch: pytest.MonkeyPatch):
    plgpu = compat.plgpu
    kernel = next(name for name in KERNELS if name.attribute == "kernel")
    monkeypatch.setattr(plgpu, "kernel", lambda body, *, out_shape, **rest: None)
    assert kernel.lacking() == "`out_type` of jax.experimental.pallas.mosaic_gpu.kernel"
    assert Name("jax.experimental.no_such_module", "x", "").lacking() == "jax.experimental.no_such_module"


@newer_jax
def test_a_method_whose_parameter_went_is_found_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat.mgpu.FragmentedArray, "store_tiled", lambda self, ref, swizzle: None)
    missing = [lack for name in KERNELS if (lack := name.lacking())]
    assert missing == ["`tiling_rank` of jax.experimental.mosaic.gpu.FragmentedArray.store_tiled"]


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_a_module_that_cannot_be_imported_lacks(error: type[Exception], monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise error(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    assert KERNELS[0].lacking() == KERNELS[0].module


PROGRAM = """
import importlib, os, sys, types
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
import jax.experimental.custom_partitioning  # JAX's own modules find what they need of each other
class Without(types.ModuleType):  # JAX itself goes on with what it has
    def __getattr__(self, name):
        if (self.__name__, name) in gone:
            raise AttributeError(name)
        return getattr(modules[self.__name__], name)
gone = {names}
modules = {{name: importlib.import_module(name) for name, _ in gone}}
for name in modules:
    sys.modules[name] = Without(name)
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, sys.modules[name])
import jaxdnn as dnn
x = jnp.arange(2 * 4 * 4 * 8, dtype=jnp.float32).reshape(2, 4, 4, 8) / 99
w = jnp.ones((2, 2, 2, 8))
sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("b",), (jax.sharding.AxisType.Auto,)), jax.P("b"))
for op in (lambda x: dnn.conv(x, w, groups=4), dnn.softmax, dnn.layer_norm, dnn.pool,
           lambda x: dnn.dropout(x, jax.random.key(0))):
    run = jax.jit(op)
    np.testing.assert_allclose(run(x), run(jax.device_put(x, sharding)), rtol=1e-4, atol=1e-4)
    assert jax.tree.map(jnp.shape, jax.grad(lambda x: op(x).sum())(x)) == x.shape
    assert dnn.explain(op, x)[0].engine == "xla"
x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
grouped = jax.jit(lambda x: dnn.conv(x, w, groups=4, out_dtype="float32", determinism="mesh_invariant"))
print(np.array_equal(grouped(x), grouped(jax.device_put(x, sharding))))
"""


# MLIR's stay: without them JAX lowers nothing at all.
GONE = {
    "devices": SHARDING[:1],
    "rule": SHARDING[1:],
    "all": tuple(name for name in (*SHARDING, *KERNELS) if not name.module.startswith("jaxlib")),
}


@pytest.mark.parametrize("names", GONE.values(), ids=GONE)
def test_import_and_ops_without_names(names: tuple[Name, ...]):
    """A process of its own, in which they are gone before jaxdnn is imported."""
    code = PROGRAM.format(names=[(name.module, name.attribute.partition(".")[0]) for name in names])
    path = os.pathsep.join(map(str, (ROOT, ROOT / "reference")))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@newer_jax
def test_without_a_way_to_shard_kernels_refuse(without: Callable[[Name], None], monkeypatch: pytest.MonkeyPatch):
    """In programs that XLA shards over several devices only."""
    monkeypatch.setattr(engines, "device_kind", lambda platform: "NVIDIA H200")
    (call,) = traced_calls(dnn.pool, X, platform="cuda")
    sharded = dataclasses.replace(call, partitioned=True)
    assert selection.select(sharded).name == "hopper"
    without(SHARDING[0])
    assert selection.select(sharded).name == "xla"
    assert selection.select(call).name == "hopper"
    (kernel,) = (e for e in engines.registered(call.op) if e.name == "hopper")
    reason = f"lacks {SHARDING[0]}, which tells XLA how to shard it"
    assert reason in str(selection.refusal(kernel, sharded, "fast"))
