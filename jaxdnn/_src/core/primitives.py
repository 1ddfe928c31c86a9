"""The only place that wires a JAX primitive: eager calls, derivatives, vmap, lowering by engine, partitioning.

An op is one primitive with one static parameter, its spec. A spec is hashable and has the `engine` and the `level` that
the call requires. The engine is chosen when the primitive is lowered, because only then the platform is known.
`custom_vjp` has no forward mode and `custom_partitioning` no derivative; a primitive has all transformations.

The derivative of an op that is not linear is a second primitive, linear in the tangent: the op's `jvp` binds it, and
its `transpose` binds the backward op. `jvp_of_linear` gives such primitives derivatives of their own by differentiating
a formula; `batch_leading` serves ops that work along trailing axes.
"""

import contextlib
import dataclasses
import functools as ft
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    auto_axes,
    get_abstract_mesh,
    reshard,
    use_abstract_mesh,
)

from jaxdnn._src.core import ahead, checks, compat, engines, selection
from jaxdnn._src.core.compat import Partitioned, ShapedArray, ad, batching, mlir, varying
from jaxdnn._src.core.determinism import satisfies
from jaxdnn._src.core.partitioning import Factors, names_of, vary_alike
from jaxdnn._src.core.rounding import at_edges, together

Spec = Any
Aval = jax.ShapeDtypeStruct
_defined: dict[str, tuple[Partitioned, Callable[..., Factors]]] = {}  # an op's, and the ways it may be sharded


def define(
    op: str,
    *,
    results: Callable[..., Any],
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
    factors: Callable[..., Factors],
    transpose: Callable[..., Any] | None = None,
    many: bool = False,
    words: str | None = None,
) -> None:
    """Makes the primitive of an op, which `bind` finds by the op's name.

    Args:
      op: the op's name, under which its engines are registered.
      results: (spec, *operand avals) to the result's `jax.ShapeDtypeStruct`.
      jvp: (spec, primals, tangents) to (result, tangent), where a tangent may be an `ad.Zero`.
      batch: (spec, operands, batch dimensions) to (result, its batch dimension).
      factors: (spec, *operand avals) to the ways the call may be sharded.
      transpose: (spec, cotangent, *operands, some undefined) to a cotangent or None for each operand; none for an op
        that is not linear in any operand.
      many: whether the op has several results; then results, tangents, cotangents and batch dimensions are tuples
        (of the cotangents some may be an `ad.Zero`), and an engine's function returns a tuple.
      words: what error messages call it, where no public op is being called; None for one that is a public op.
    """
    if words is not None:
        engines.say(op, words)

    def abstract(*avals: Any, spec: Spec) -> Any:
        found = [_result(r, avals[0]) for r in _as_tuple(results(spec, *avals))]
        for aval in found:
            checks.countable(engines.in_words(op), aval.shape)
        return found if many else found[0]

    @in_mode_of_operands
    def differentiated(primals: Any, tangents: Any, *, spec: Spec) -> Any:
        return jvp(spec, primals, tangents)

    @in_mode_of_operands
    def transposed(ct: Any, *operands: Any, spec: Spec) -> Any:
        if transpose is None:
            raise NotImplementedError(f"`{op}` is linear in none of its operands, so it has no transpose.")
        if all(isinstance(c, ad.Zero) for c in _as_tuple(ct)):
            return [None] * len(operands)
        return transpose(spec, tuple(ct) if many else ct, *operands)

    of_op = Partitioned(f"jaxdnn_{op}")
    for primitive in of_op.both:
        primitive.multiple_results = many
        primitive.def_impl(together(compat.operation(primitive), static_argnames="spec"))
        primitive.def_abstract_eval(abstract)
        ad.primitive_jvps[primitive] = differentiated
        ad.primitive_transposes[primitive] = transposed
        batching.primitive_batchers[primitive] = lambda operands, dims, *, spec: batch(spec, operands, dims)
        _register_lowerings(primitive, op, factors)
    _defined[op] = of_op, factors


def bind(op: str, *operands: Any, spec: Spec) -> Any:
    """Binds the primitive of an op: its result, or a tuple of its results."""
    of_op, factors = _defined[op]
    run = in_types(ft.partial(_bind, of_op, spec), ft.partial(factors, spec), operands)
    return run(*vary_alike(operands))


def call(op: str, *operands: Array, spec: Spec) -> Any:
    """Binds the primitive of an op for a user's call; raises where no engine serves it."""
    return bind(op, *operands, spec=selection.checked(op, spec, *operands))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _bind(of_op: Partitioned, spec: Spec, *operands: Any) -> Any:
    found = of_op.bind(*operands, spec=spec)
    return tuple(found) if isinstance(found, list) else found


def in_mode_of_operands(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule, traced in JAX's 64-bit mode if an operand has a dtype of it.

    A derivative that was made in that mode may be asked for outside of it.
    """

    def run(*args: Any, **static: Any) -> Any:
        with of_64_bits(jax.tree.leaves(args)):
            return rule(*args, **static)

    return run


def of_64_bits(values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """JAX's 64-bit mode if one of arrays or types is of 64 bits, otherwise the mode as it is."""
    wide = any(np.dtype(getattr(v, "dtype", np.int32)).itemsize == 8 for v in values)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


# ---- rules that many ops share ---------------------------------------------------------------------------------------


def jvp_of_linear(
    op: str, formula: Callable[..., Any] | None, spec: Spec, primals: Any, tangents: Any, constant: int = 0
) -> tuple[Any, Any]:
    """The `jvp` of an op that is linear in its first operand: the op itself on that operand's tangent, plus the
    derivative of `formula(spec, *operands)` in the others but the last `constant` ones, which have none.

    Give it its first two arguments with `functools.partial`; the formula is None where there are no such others.
    """
    found = bind(op, *primals, spec=spec)
    terms = [] if isinstance(tangents[0], ad.Zero) else [bind(op, tangents[0], *primals[1:], spec=spec)]
    terms += along_others(formula and ft.partial(formula, spec), primals, tangents, 1, constant)
    return found, added(found, terms)


def along_others(
    formula: Callable[..., Any] | None, primals: Any, tangents: Any, linear: int, constant: int = 0
) -> list[Any]:
    """The formula's derivative along the operands behind the first `linear` and before the last `constant` ones: one
    value of its results, or nothing where these operands have no tangent."""
    stop = len(primals) - constant
    if formula is None or all(isinstance(t, ad.Zero) for t in tangents[linear:stop]):
        return []
    along = tuple(map(ad.instantiate_zeros, tangents[linear:stop]))
    of_others = lambda *others: formula(*primals[:linear], *others, *primals[stop:])
    return [jax.jvp(of_others, tuple(primals[linear:stop]), along)[1]]


def added(found: Any, terms: Sequence[Any], level: str = "fast") -> Any:
    """The tangent of a result, or of each of several: the sum of terms, which may be none, rounded if the level fixes
    bits."""
    if not terms:
        return tuple(map(zero_tangent, found)) if isinstance(found, tuple) else zero_tangent(found)
    total = jax.tree.map(lambda *parts: ft.reduce(jnp.add, parts), *terms)
    return at_edges(level, total) if len(terms) > 1 else total


def batch_leading(
    op: str, spec: Spec, operands: Sequence[Any], dims: Sequence[int | None], shared: Sequence[int] = ()
) -> Any:
    """The `batch` of an op whose operands and results have any number of common leading axes: adds one of them.

    Of the operands numbered in `shared` those that are not mapped have length 1 along it. Give it its first argument
    with `functools.partial`.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    moved = []
    for i, (x, d) in enumerate(zip(operands, dims, strict=True)):
        if d is not None:
            moved.append(jnp.moveaxis(x, d, 0))
        else:
            moved.append(x[None] if i in shared else jnp.broadcast_to(x, (size, *x.shape)))
    found = bind(op, *moved, spec=spec)
    return (found, (0,) * len(found)) if isinstance(found, tuple) else (found, 0)


def linear_map(
    name: str,
    run: Callable[..., Array],
    transposed: Callable[..., dict[str, Any]],
    factors: Callable[..., Factors] | None = None,
) -> Callable[..., Array]:
    """A linear function of one array, with a transpose that is stated.

    For maps of which JAX's own transpose is slow, or that XLA partitions badly. The function is bound as a primitive,
    without engines.

    Args:
      name: the primitive's name.
      run: (array, static arguments by name) to the result; any axes may lead, so it counts axes from the last.
      transposed: the static arguments by name to those with which the same map is its transpose.
      factors: (array, static arguments by name) to the ways the map may be sharded; None leaves them to XLA.
    """
    of_map = Partitioned(name)
    static = [p.name for p in inspect.signature(run).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @in_mode_of_operands
    def abstract(x: Any, **given: Any) -> Any:
        return _result(jax.eval_shape(ft.partial(run, **given), Aval(x.shape, x.dtype)), x)

    def lowering(ctx: Any, x: Any, **given: Any) -> Any:
        program = ft.partial(run, **given)
        if factors is not None and compat.automatic_devices(ctx) > 1:
            ctx = compat.on_mesh(ctx)
            if _may_partition(ctx):
                rule = factors(ctx.avals_in[0], **given)
                of_device = lambda axes, x: rule.local(run, axes, x) if axes and rule.local else run(x, **given)
                program = ft.partial(_on_devices, ctx, rule, of_device)
        ctx = ctx.replace(avals_in=[_unvarying(a) for a in ctx.avals_in])
        with of_64_bits(ctx.avals_in):
            return mlir.lower_fun(program, multiple_results=False)(ctx, x)

    for primitive in of_map.both:
        primitive.def_impl(together(compat.operation(primitive), static_argnames=static))
        primitive.def_abstract_eval(abstract)
        ad.deflinear2(primitive, lambda ct, _, **given: [of_map.bind(ct, **transposed(**given))])
        lead = lambda operands, dims, **given: (of_map.bind(jnp.moveaxis(operands[0], dims[0], 0), **given), 0)
        batching.primitive_batchers[primitive] = lead
        mlir.register_lowering(primitive, lowering)
    return of_map.bind


# ---- types -----------------------------------------------------------------------------------------------------------


def in_types(function: Callable[..., Any], factors: Callable[..., Factors], operands: Sequence[Any]) -> Any:
    """`function` with its result's sharding in its type, on mesh axes that JAX tracks in types (AxisType.Explicit).

    `jax.make_mesh` makes such axes. Inside the function XLA shards along them. Operands without a mesh are taken to be
    on the one that the caller has set, as by JAX's own ops.
    """
    types = [jax.typeof(x) for x in operands]
    meshes = [*(t.sharding.mesh for t in types), get_abstract_mesh()]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None or AxisType.Manual in mesh.axis_types:  # inside shard_map arrays are local
        return function
    rule = factors(*types)
    shardings = tuple(NamedSharding(mesh, spec) for spec in rule.specs(mesh, types)[1])
    explicit = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in explicit if kind == AxisType.Explicit)
    run = auto_axes(function, axes=axes, out_sharding=_like_results(rule, shardings))
    if get_abstract_mesh().empty:
        return run
    # An operand's tangent may name no mesh even so (that of a NumPy array); a transpose needs one to come back to.
    return lambda *given: run(*(reshard(x, _on(mesh, x)) for x in given))


def composed(function: Callable[..., Any], factors: Callable[..., Factors], *operands: Array) -> Any:
    """`function(*operands)` of an op that is no primitive, with its result's sharding in its type.

    If `in_types` changes the mesh, the function is computed again in the backward pass: outside of jit, residuals would
    be on the mesh inside, and everything else on the caller's.
    """
    run = in_types(function, factors, operands)
    return function(*operands) if run is function else jax.checkpoint(run)(*operands)


def _on(mesh: AbstractMesh, x: Any) -> NamedSharding:
    """An operand's sharding on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*jax.typeof(x).sharding.spec))


def placed_like(x: Array, like: Array) -> Array:
    """x with the sharding of an array of its shape, if shardings are in types; for ops that require equal shardings."""
    sharding = jax.typeof(like).sharding
    return reshard(x, sharding) if AxisType.Explicit in sharding.mesh.axis_types else x


def gathered(x: Array, axis: int) -> Array:
    """x with an axis that is not sharded, if shardings are in types; for indexing, which JAX refuses along others."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or sharding.spec[axis] is None:
        return x
    spec = PartitionSpec(*sharding.spec[:axis], None, *sharding.spec[axis + 1 :])
    return reshard(x, NamedSharding(sharding.mesh, spec))


def evenly(x: Array, shape: Sequence[int]) -> Array:
    """x to be sliced or padded to a shape, gathered along axes that devices would then not divide.

    JAX refuses these where shardings are in types.
    """
    sharding = jax.typeof(x).sharding
    for axis, (size, names) in enumerate(zip(shape, sharding.spec, strict=True)):
        if size != x.shape[axis] and size % _parts(sharding.mesh, names):
            x = gathered(x, axis)
    return x


def reshaped(x: Array, shape: Sequence[int]) -> Array:
    """x of another shape, if shardings are in types sharded as far as `_reshaped_spec` says: JAX refuses to choose."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or x.shape == tuple(shape):
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, _reshaped_spec(x, shape)))


def keeps_sharding(x: Array, shape: Sequence[int]) -> bool:
    """Whether x may be sharded in another shape as it is, as far as shardings are in types."""
    count = lambda spec: sum(len(names_of(names)) for names in spec)
    return count(_reshaped_spec(x, shape)) == count(jax.typeof(x).sharding.spec)


def _reshaped_spec(x: Array, shape: Sequence[int]) -> PartitionSpec:
    """How x is sharded in another shape: along axes that begin at the element at which x's do, in as many parts."""
    several = lambda size: size not in (0, 1)  # a symbolic size too
    first = lambda sizes, axis: math.prod(filter(several, sizes[:axis]))
    sharding = jax.typeof(x).sharding
    given = {first(x.shape, axis): names for axis, names in enumerate(sharding.spec) if several(x.shape[axis])}
    found = [given.get(first(shape, axis)) if several(size) else None for axis, size in enumerate(shape)]
    even = [names if n % _parts(sharding.mesh, names) == 0 else None for n, names in zip(shape, found, strict=True)]
    return PartitionSpec(*even)


def _parts(mesh: Any, names: Any) -> int:
    """Into how many parts an array is divided along an axis that is sharded along mesh axes of these names."""
    return math.prod(mesh.shape[name] for name in names_of(names))


def _like_results(rule: Factors, values: tuple[Any, ...]) -> Any:
    """One value for every result, or the value of the only one. An op of many results never has just one."""
    return values if len(rule.results) > 1 else values[0]


def _result(aval: Aval, like: Any) -> ShapedArray:
    """A result's type, which inside shard_map varies over the mesh axes that the operands vary over.

    It names the mesh, as the results of JAX's own ops do: after `in_types` has changed to a mesh that XLA shards along,
    an eager transpose returns the cotangent to the mesh that is named here.
    """
    mesh = like.sharding.mesh
    if not varying(like) and not all(kind == AxisType.Auto for kind in mesh.axis_types):
        return ShapedArray(aval.shape, aval.dtype)
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(aval.shape)))
    return compat.typed(aval.shape, aval.dtype, sharding, like)


def zero_tangent(y: Array) -> Any:
    """The tangent of a result that does not depend on any differentiated operand."""
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def is_linear_operand(operand: Any) -> bool:
    """Whether a transpose rule must produce a cotangent for this operand."""
    return ad.is_undefined_primal(operand)


listeners: list[Callable[[engines.Call], None]] = []  # told of each call that is lowered, of a device's part of it


def _register_lowerings(primitive: Any, op: str, factors: Callable[..., Factors]) -> None:
    for platform in (None, *engines.PLATFORMS):

        def rule(ctx: Any, *operands: Any, spec: Spec, platform: str | None = platform) -> Any:
            # Only in a program for several devices that XLA shards by itself; inside shard_map shapes are local.
            lowered = ft.partial(_local, op, platform or "other", spec)
            if compat.automatic_devices(ctx) > 1:
                ctx = compat.on_mesh(ctx)
                lowered = ft.partial(_partitioned, ctx, op, platform or "other", spec, factors)
            ctx = ctx.replace(avals_in=[_unvarying(a) for a in ctx.avals_in])
            with of_64_bits(ctx.avals_in), ahead.compiling(ctx, platform):
                return mlir.lower_fun(lowered, multiple_results=primitive.multiple_results)(ctx, *operands)

        mlir.register_lowering(primitive, rule, platform=platform)


def _unvarying(aval: Any) -> Any:
    """The type of an operand for an engine, which computes on one device: without the mesh axes it varies over."""
    return ShapedArray(aval.shape, aval.dtype) if varying(aval) else aval


def _call(op: str, platform: str, spec: Spec, operands: Sequence[Any]) -> engines.Call:
    avals = tuple(Aval(x.shape, x.dtype) for x in operands)
    return engines.Call(op, spec, avals, platform, engines.device_kind(platform) if platform != "other" else None)


def _local(op: str, platform: str, spec: Spec, *operands: Array) -> Any:
    call = _call(op, platform, spec, operands)
    for told in listeners:
        told(call)
    return _run(selection.select(call), call, operands)


def _run(engine: engines.Engine, call: engines.Call, operands: Sequence[Array]) -> Any:
    """Runs the engine. If the level fixes bits, XLA must not fuse its program with the operations around it."""
    if not engine.fused:
        return engine.run(call, *operands)
    return at_edges(call.spec.level, engine.run(call, *at_edges(call.spec.level, operands)))


def _partitioned(
    ctx: Any, op: str, platform: str, spec: Spec, factors: Callable[..., Factors], *operands: Array
) -> Any:
    call = dataclasses.replace(_call(op, platform, spec, operands), partitioned=True)
    engine = selection.select(call)
    if not engine.partition(call):
        return _run(engine, call, operands)
    rule = factors(spec, *call.avals)
    if rule.local is None:
        rule = dataclasses.replace(rule, placed=(), summed=())
    if engine.adds_in_order or (satisfies(engine.level(call), "mesh_invariant") and not rule.exact):
        rule = rule.in_order
    if not _may_partition(ctx):
        loose = zip(operands, rule.loose_specs(), strict=True)
        return _run(engine, call, [_loosened(ctx, x, spec) for x, spec in loose])

    def of_device(axes: Any, *operands: Array) -> Any:
        run = ft.partial(_local, op, platform)
        if rule.local is None or not axes:
            return run(spec, *operands)
        return at_edges(spec.level, rule.local(run, axes, *operands))

    return _on_devices(ctx, rule, of_device, *operands)


def _may_partition(ctx: Any) -> bool:
    """Whether a program that is being lowered may hold a rule for XLA's partitioner."""
    return not compat.is_exported(ctx) and not compat.lacking(compat.SHARDING) and compat.has_devices(ctx)


def _on_devices(ctx: Any, rule: Factors, of_device: Callable[..., Any], *operands: Array) -> Any:
    """The results of a program that XLA partitions by a rule: `of_device(axes, *operands)` computes a device's part."""
    # JAX uses only the types of this function's results; `_partition` lowers what is computed.
    sharded = compat.custom_partitioning(
        lambda *_: _like_results(rule, tuple(jnp.zeros(r.shape, r.dtype) for r in ctx.avals_out))
    )
    wide = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    sharded.def_partition(
        partition=ft.partial(_partition, rule, of_device, wide),
        infer_sharding_from_operands=lambda mesh, args, _: _like_results(
            rule, tuple(NamedSharding(mesh, spec) for spec in rule.specs(mesh, args)[1])
        ),
        sharding_rule=lambda mesh, *_: rule.shardy_rule(mesh),
    )
    return sharded(*operands)


def _loosened(ctx: Any, x: Array, spec: PartitionSpec) -> Array:
    """x where XLA alone shards, as in exported programs: whole along axes of windows, which XLA may get wrong."""
    mesh = compat.automatic_mesh(ctx)
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _partition(rule: Factors, of_device: Callable[..., Any], wide: bool, mesh: Any, args: Any, results: Any) -> Any:
    operand_specs, result_specs, axes = rule.specs(mesh, args, _as_tuple(results))
    special = {factor: names for factor, names in axes.items() if factor not in rule.free}

    def lower(*operands: Array) -> Any:
        # The program of one device has no mesh, although this is traced inside the mesh that the caller has set.
        # And the caller's own choice of 64 bits may be over when XLA asks for it.
        with use_abstract_mesh(AbstractMesh((), ())), jax.enable_x64(wide):
            return of_device(special, *operands)

    shardings = tuple(NamedSharding(mesh, spec) for spec in operand_specs)
    outs = tuple(NamedSharding(mesh, spec) for spec in result_specs)
    return mesh, lower, _like_results(rule, outs), shardings
