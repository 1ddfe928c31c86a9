"""Everything that jaxdnn takes from JAX beyond what JAX's compatibility policy covers, in one file.

https://docs.jax.dev/en/latest/api_compatibility.html: `jax._src`, `jax.core`, `jax.extend`, `jax.interpreters`,
`jax.experimental` and `jaxlib` may change with any release. Other files import such names from here, and a test looks
at their imports. There are five kinds of them:

* What every primitive needs. It is imported with jaxdnn, for there is no op without it.
* `SHARDING`, which tells the partitioner how a call may be sharded. Where it is missing, kernels refuse programs that
  XLA shards over several devices, and XLA decides how its own programs are sharded.
* `UNTRACED`, whether nothing is being traced. Without it a call outside of jit runs operation by operation.
* `AHEAD`, where JAX keeps what kernels were lowered to. Without it XLA compiles them one after another.
* `KERNELS`, in which kernels are written. Pallas is imported when the first kernel is used, so that `import jaxdnn`
  does not import it. Where one of these names is missing, engines that need it refuse with the name as the reason, and
  XLA's engine serves the call.
"""

import dataclasses
import functools as ft
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

# JAX's tutorial on new primitives teaches these; `lower_fun` and `ad.Zero`'s helpers stand beside them.
from jax.core import ShapedArray, Tracer
from jax.core import eval_jaxpr as eval_jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

if TYPE_CHECKING:
    from jax.experimental import pallas as pl
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import fragmented_array as fa
    from jax.experimental.mosaic.gpu import mma_utils, profiler
    from jax.experimental.mosaic.gpu import utils as mgpu_utils
    from jax.experimental.mosaic.gpu.wgmma import wgmma_m64
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, scf, vector

_PALLAS, _MOSAIC, _MLIR = "jax.experimental.pallas", "jax.experimental.mosaic.gpu", "jaxlib.mlir"
# What is imported when it is first used; a test holds these against the imports above.
LAZY = {
    "custom_partitioning": "jax.experimental.custom_partitioning:custom_partitioning",
    "pl": _PALLAS,
    "plgpu": f"{_PALLAS}.mosaic_gpu",
    "mgpu": _MOSAIC,
    "mgpu_utils": f"{_MOSAIC}.utils",
    "wgmma_m64": f"{_MOSAIC}.wgmma:wgmma_m64",
    "mma_utils": f"{_MOSAIC}.mma_utils",
    "fa": f"{_MOSAIC}.fragmented_array",
    "profiler": f"{_MOSAIC}.profiler",  # what `jaxdnn bench` times kernels with
    "ir": f"{_MLIR}.ir",
    "arith": f"{_MLIR}.dialects.arith",
    "llvm": f"{_MLIR}.dialects.llvm",
    "scf": f"{_MLIR}.dialects.scf",
    "vector": f"{_MLIR}.dialects.vector",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = LAZY[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


@dataclasses.dataclass(frozen=True)
class Name:
    """A name within a module, what it is used for, and the parameters that it is called with by name."""

    module: str
    attribute: str
    why: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"

    def lacking(self) -> str | None:
        """What the installed JAX lacks of it."""
        found: Any
        try:
            found = importlib.import_module(self.module)
        except (ImportError, AttributeError):  # JAX's own modules may lack each other's names
            return self.module
        for part in self.attribute.split("."):
            if not hasattr(found, part):
                return str(self)
            found = getattr(found, part)
        known = inspect.signature(found).parameters if self.parameters else {}
        unknown = [name for name in self.parameters if name not in known]
        return f"`{unknown[0]}` of {self}" if unknown else None


def _names(module: str, why: str, *attributes: str) -> tuple[Name, ...]:
    """Names of one module and one use; "name(a, b)" is called with parameters a and b."""
    found = []
    for attribute in attributes:
        name, _, parameters = attribute.rstrip(")").partition("(")
        found.append(Name(module, name, why, tuple(parameters.split(", ")) if parameters else ()))
    return tuple(found)


SHARDING = (
    # JAX collects a program's devices, which custom_partitioning asks for when it is lowered, only for programs with a
    # primitive in this set, and cannot see a custom_partitioning that appears within the lowering of ours. There is no
    # public way to say so; JAX's own cuDNN attention says it in the same way.
    *_names(
        "jax._src.dispatch",
        "lets a primitive's lowering use custom_partitioning",
        "prim_requires_devices_during_lowering",
    ),
    *_names("jax.experimental.custom_partitioning", "a rule for the partitioner", "custom_partitioning"),
)

# What kernels use of Pallas, Mosaic and MLIR.
KERNELS = tuple(
    name
    for used in json.loads(Path(__file__).with_name("kernel_names.json").read_text())
    for name in _names(used["module"], used["why"], *used["names"])
)

UNTRACED = _names("jax._src.core", "whether a call is made outside of all transformations", "trace_state_clean")

AHEAD = _names(f"{_MOSAIC}.core", "the code of kernels, to compile it in another thread", "KNOWN_KERNELS")


@ft.cache
def lacking(names: tuple[Name, ...]) -> str | None:
    """The first of the names that the installed JAX lacks, as a clause; None if it has all."""
    missing = next(filter(None, (name.lacking() for name in names)), None)
    return None if missing is None else f"JAX {jax.__version__} lacks {missing}"


@ft.cache
def _untraced() -> Callable[[], bool]:
    if lacking(UNTRACED) is not None:
        return lambda: False
    return importlib.import_module("jax._src.core").trace_state_clean


def untraced() -> bool:
    """Whether a call is made outside of all of JAX's transformations; False too if JAX does not tell."""
    return _untraced()()


class Partitioned:
    """A pair of equal primitives whose lowering may use custom_partitioning, which needs the program's mesh.

    JAX finds the mesh of a program in its operands' shardings where a primitive asks for it, and refuses operands on
    two. But a pullback of a jitted function that is called outside of jit has two if the axes are explicit: cotangents
    are on the caller's mesh, residuals on the one inside `in_types`, of automatic axes. So the first of `both` asks;
    the second, bound where types name the mesh, does not, and has it from them (`on_mesh`).
    """

    def __init__(self, name: str) -> None:
        self.both = Primitive(name), Primitive(name)
        if lacking(SHARDING[:1]) is None:
            needing = importlib.import_module("jax._src.dispatch").prim_requires_devices_during_lowering
            needing.add(self.both[0])

    def bind(self, *operands: Any, **parameters: Any) -> Any:
        typed = _mesh_of(map(jax.typeof, operands)) is not None
        return self.both[typed].bind(*operands, **parameters)


def operation(primitive: Any) -> Callable[..., Any]:
    """What binds a primitive, as one operation: `jax.debug_nans` would run a function of a program once more, operation
    by operation, to say which one gave NaN, and the operation is this program again."""

    def run(*operands: Any, **parameters: Any) -> Any:
        return primitive.bind(*operands, **parameters)

    run.__name__ = run.__qualname__ = primitive.name
    run._apply_primitive = True  # type: ignore[attr-defined]
    return run


def _mesh_of(types: Iterable[Any]) -> Any:
    """The mesh that one of the types names and XLA shards along, if any does."""
    meshes = (t.sharding.mesh for t in types)
    return next((m for m in meshes if not m.empty and AxisType.Manual not in m.axis_types), None)


def name_module(name: str) -> None:
    """Names the Mosaic module that a kernel is being lowered to. JAX leaves a name that is there."""
    from jaxlib.mlir import ir

    here: Any = ir.InsertionPoint.current
    operation = here.block.owner.operation
    while operation.parent is not None:
        operation = operation.parent.operation
    operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(name)


def kernels_lowered() -> Mapping[bytes, bytes]:
    """The code of each kernel that this process has lowered, by its hash, the oldest first."""
    module = sys.modules.get(f"{_MOSAIC}.core")  # None before Pallas is imported
    return getattr(module, "KNOWN_KERNELS", {})


def program(ctx: Any) -> int:
    """A number for the program that a primitive is lowered in, which others may have when it is forgotten."""
    return id(ctx.module_context.module)


def is_exported(ctx: Any) -> bool:
    """Whether the program that a primitive is lowered in is for `jax.export`, which keeps no partitioning rule."""
    return getattr(ctx.module_context.lowering_parameters, "for_export", False)


def automatic_mesh(ctx: Any) -> Any:
    """The mesh of such a program; None if JAX does not know it."""
    return getattr(ctx.module_context.axis_context, "abstract_mesh", None)


def on_mesh(ctx: Any) -> Any:
    """The context of a primitive's lowering, with the mesh that its operands' types name if JAX has not found one.

    Of the devices custom_partitioning takes but the number: it places nothing.
    """
    context, mesh = ctx.module_context.axis_context, _mesh_of(ctx.avals_in)
    if mesh is None or has_devices(ctx) or mesh.size != context.num_devices or mesh.size > jax.device_count():
        return ctx
    devices = tuple(jax.devices()[: mesh.size])
    context = dataclasses.replace(context, device_assignment=devices, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=context))


def has_devices(ctx: Any) -> bool:
    """Whether JAX knows the devices of the program that a primitive is lowered in."""
    return getattr(ctx.module_context.axis_context, "device_assignment", ()) is not None


def automatic_devices(ctx: Any) -> int:
    """The number of devices among which XLA itself shards the program that is being lowered; 1 inside shard_map."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) or 1


def varying(type_: Any) -> frozenset[str]:
    """The mesh axes that an array of a type varies over inside shard_map."""
    return type_.mat.varying


def typed(shape: tuple[int, ...], dtype: Any, sharding: Any, like: Any) -> ShapedArray:
    """A type of this shape, dtype and sharding that varies as another does."""
    return ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=like.mat)


def scope(equation: Any) -> str:
    """The names of the scopes that an equation was traced in."""
    return str(equation.source_info.name_stack)


def place(equation: Any) -> str | None:
    """The file and the line in which an equation was made, outside of JAX and this library; None if it is not known."""
    outside = [str(Path(module.__file__ or "").parent) for module in (jax, sys.modules["jaxdnn"])]
    frames = getattr(equation.source_info.traceback, "frames", ())
    own = [frame for frame in frames if not frame.file_name.startswith((*outside, "<"))]
    return f"{own[0].file_name}:{own[0].line_num}" if own else None
