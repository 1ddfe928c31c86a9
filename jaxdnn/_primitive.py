"""The only place that wires a JAX primitive: eager calls, derivatives, vmap, lowering by engine, partitioning.

An op is one primitive with one static parameter, its spec. A spec is hashable and has `engine` and `level`, what the
call asks for. The platform is known when a primitive is lowered, so that is where the engine is chosen.
`custom_vjp` would have no forward mode and `custom_partitioning` no derivative; a primitive has all (see tests).
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax import Array, lax

# custom_partitioning asks for the program's devices when it is lowered. JAX collects them only for programs with a
# primitive in this set, and cannot see a custom_partitioning that appears within the lowering of ours. There is no
# public way to say so; JAX's own cuDNN attention says it in the same way.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, auto_axes, use_abstract_mesh

from jaxdnn import engines

Spec = Any
Aval = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Factors:
    """How operands and result may be sharded: a factor's name for every dimension of every operand and the result.

    A dimension of a factor in `free` may be sharded; one in `summed` too: then each device computes `partial` (a spec
    whose result is an accumulator) of its first two operands, these are added over the mesh axis, and
    `finish(accumulator, *further operands)` makes the result. Every other dimension is gathered.
    """

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    free: tuple[str, ...]
    summed: tuple[str, ...] = ()
    partial: Spec = None
    finish: Callable[..., Array] | None = None


def define(
    op: str,
    *,
    shape: Callable[..., tuple[int, ...]],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
    factors: Callable[..., Factors],
) -> Callable[..., Array]:
    """Makes the primitive of an op and returns the function that binds it: `bind(*operands, spec=spec)`.

    Args:
      op: the op's name, under which its engines are registered.
      shape: (spec, *operand avals) to the result's shape; its dtype is `spec.out_dtype`.
      jvp: (spec, primals, tangents) to (result, tangent), where a tangent may be an `ad.Zero`.
      transpose: (spec, cotangent, *operands, some undefined) to a cotangent or None for each operand.
      batch: (spec, operands, batch dimensions) to (result, its batch dimension).
      factors: (spec, *operand avals) to the ways the call may be sharded.
    """
    primitive = jex.Primitive(f"jaxdnn_{op}")

    def bind(*operands: Any, spec: Spec) -> Array:
        run = _in_types(ft.partial(primitive.bind, spec=spec), ft.partial(factors, spec), operands)
        return run(*_vary_alike(operands))

    prim_requires_devices_during_lowering.add(primitive)
    primitive.def_impl(ft.partial(_eager, primitive))
    primitive.def_abstract_eval(lambda *avals, spec: _result(shape(spec, *avals), spec.out_dtype, avals[0]))
    ad.primitive_jvps[primitive] = lambda primals, tangents, *, spec: jvp(spec, primals, tangents)
    ad.primitive_transposes[primitive] = lambda ct, *operands, spec: (
        [None] * len(operands) if isinstance(ct, ad.Zero) else transpose(spec, ct, *operands)
    )
    batching.primitive_batchers[primitive] = lambda operands, dims, *, spec: batch(spec, operands, dims)
    _register_lowerings(primitive, op, factors)
    return bind


def _in_types(bind: Callable[..., Array], factors: Callable[..., Factors], operands: Sequence[Any]) -> Any:
    """`bind` with its result's sharding in its type, on mesh axes that JAX follows in types (AxisType.Explicit).

    `jax.make_mesh` makes such axes. The primitive itself knows none: to it they are axes that XLA shards along.
    """
    types = [jax.typeof(x) for x in operands]
    meshes = [t.sharding.mesh for t in types]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None or AxisType.Manual in mesh.axis_types:  # inside shard_map arrays are local
        return bind
    result = _specs(factors(*types), types, ())[1]
    explicit = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in explicit if kind == AxisType.Explicit)
    return auto_axes(bind, axes=axes, out_sharding=NamedSharding(mesh, result))


def _vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Inside shard_map: operands that vary over the same mesh axes, as JAX's own ops make theirs.

    What is the same on all devices is marked as varying; the transpose of that mark adds the cotangents over the mesh.
    """
    varying = [jax.typeof(x).mat.varying for x in operands]
    union = frozenset[str]().union(*varying)
    pairs = zip(operands, varying, strict=True)
    return [lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x for x, own in pairs]


def _result(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.core.ShapedArray:
    """The result's type, which inside shard_map varies over the mesh axes that the operands vary over."""
    if not like.mat.varying:
        return jax.core.ShapedArray(shape, dtype)
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=like.mat)


def zero_tangent(y: Array) -> Any:
    """The tangent of a result that depends on nothing that is differentiated."""
    return ad.Zero.from_primal_value(y)  # pyright: ignore[reportAttributeAccessIssue]  (its stub hides the method)


def is_linear_operand(operand: Any) -> bool:
    """Whether a transpose rule must produce a cotangent for this operand."""
    return ad.is_undefined_primal(operand)


@ft.partial(jax.jit, static_argnums=0, static_argnames="spec")
def _jitted(primitive: Any, *operands: Any, spec: Spec) -> Array:
    return primitive.bind(*operands, spec=spec)


def _eager(primitive: Any, *operands: Any, spec: Spec) -> Array:
    return _jitted(primitive, *operands, spec=spec)


def _register_lowerings(primitive: Any, op: str, factors: Callable[..., Factors]) -> None:
    for platform in (None, *engines.PLATFORMS):

        def rule(ctx: Any, *operands: Any, spec: Spec, platform: str | None = platform) -> Any:
            # Only in a program for several devices that XLA shards by itself; inside shard_map shapes are local.
            automatic = getattr(ctx.module_context.axis_context, "num_devices", None) or 1
            run = _partitioned if automatic > 1 else _local
            lowered = ft.partial(run, op, platform or "other", spec, factors)
            return mlir.lower_fun(lowered, multiple_results=False)(ctx, *operands)

        mlir.register_lowering(primitive, rule, platform=platform)


def _call(op: str, platform: str, spec: Spec, operands: Sequence[Any]) -> engines.Call:
    avals = tuple(Aval(x.shape, x.dtype) for x in operands)
    return engines.Call(op, spec, avals, platform, engines.device_kind(platform) if platform != "other" else None)


def _local(op: str, platform: str, spec: Spec, _: Any, *operands: Array) -> Array:
    call = _call(op, platform, spec, operands)
    return engines.select(call).run(call, *operands)


def _partitioned(op: str, platform: str, spec: Spec, factors: Callable[..., Factors], *operands: Array) -> Array:
    call = _call(op, platform, spec, operands)
    if not engines.select(call).partition(call):
        return _local(op, platform, spec, None, *operands)
    rule = factors(spec, *call.avals)
    sharded = custom_partitioning(ft.partial(_local, op, platform, spec, None))
    sharded.def_partition(
        partition=ft.partial(_partition, rule, op, platform, spec),
        infer_sharding_from_operands=lambda mesh, args, _: NamedSharding(mesh, _specs(rule, args, ())[1]),
        sharding_rule=_shardy_rule(rule),
        reduction_factors=rule.summed,
        need_replication_factors=tuple(
            dict.fromkeys(f for dims in (*rule.operands, rule.result) for f in dims if f not in rule.free + rule.summed)
        ),
    )
    return sharded(*operands)


def _shardy_rule(rule: Factors) -> str:
    return ", ".join(" ".join(dims) for dims in rule.operands) + " -> " + " ".join(rule.result)


def _specs(
    rule: Factors, args: Sequence[Any], result: Sequence[Any]
) -> tuple[list[PartitionSpec], PartitionSpec, tuple]:
    """Partition specs of operands and result, and the mesh axes to sum over: the first sharding seen of a factor."""
    axes: dict[str, Any] = {}
    used: set[str] = set()
    seen = [*zip(rule.operands, args, strict=True), *((rule.result, r) for r in result)]
    for dims, arg in seen:
        spec = getattr(arg.sharding, "spec", ())
        for factor, axis in zip(dims, spec, strict=False):
            names = (axis,) if isinstance(axis, str) else tuple(axis or ())
            if names and factor in rule.free + rule.summed and factor not in axes and not used & set(names):
                axes[factor] = axis
                used |= set(names)
    operand_specs = [PartitionSpec(*(axes.get(f) for f in dims)) for dims in rule.operands]
    summed = tuple(axes[f] for f in rule.summed if f in axes)
    return operand_specs, PartitionSpec(*(axes.get(f) for f in rule.result)), summed


def _partition(rule: Factors, op: str, platform: str, spec: Spec, mesh: Any, args: Any, result: Any) -> Any:
    operand_specs, result_spec, summed = _specs(rule, args, (result,))

    def lower(a: Array, b: Array, *further: Array) -> Array:
        # What a device computes has no mesh any more, though this is traced inside whichever mesh the caller has set.
        with use_abstract_mesh(AbstractMesh((), ())):
            if not summed or rule.finish is None:
                return _local(op, platform, spec, None, a, b, *further)
            return rule.finish(lax.psum(_local(op, platform, rule.partial, None, a, b), summed), *further)

    shardings = tuple(NamedSharding(mesh, spec) for spec in operand_specs)
    return mesh, lower, NamedSharding(mesh, result_spec), shardings
