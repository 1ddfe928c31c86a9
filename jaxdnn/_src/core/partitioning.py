"""How a call is partitioned among devices: one declaration for each primitive, from which everything follows.

`Factors` names a factor for every dimension of every operand and result, and the kind of each factor:

* free: results along it are independent. A device computes the same op on its part.
* placed: results are independent, but a device's part is a different call: some of the groups, or windows over other
  positions. `local` computes it, and may receive the rows that windows share from neighbouring devices (`exchange`).
  Without a `local` only XLA can partition the call.
* summed: results are sums along it. `local` also adds over the mesh; if the order of additions is fixed, the whole
  dimension is gathered instead.
* any other: a device needs the whole dimension, which is gathered.

The declaration determines the shardings of results in types, on meshes with `AxisType.Explicit`; the sharding rule for
XLA's partitioner; and the program of each device.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from jaxdnn._src.core.compat import varying

Dims = tuple[str, ...]
Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices along mesh axes, the first axis slowest. `ordered` has the axes as the mesh orders them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ordered: tuple[str, ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def index(self) -> Array:
        return lax.axis_index(self.names)

    def shifted(self, x: Array, hop: int) -> Array:
        """The array of the device `hop` places before; zero if there is none."""
        places = np.arange(self.count).reshape(self.sizes)
        # JAX 0.10 numbers devices in the mesh's order, whatever the order in which ppermute is given the axes.
        at = np.argsort(places.transpose([self.names.index(name) for name in self.ordered]).ravel())
        pairs = [(int(at[i]), int(at[i + hop])) for i in range(self.count) if 0 <= i + hop < self.count]
        return lax.ppermute(x, self.ordered, pairs) if pairs else jnp.zeros_like(x)


Axes = Mapping[str, Devices]


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of a call.

    A factor may be placed and summed.

    Attributes:
      operands, results: for every dimension the name of its factor, or of two, "outer inner", of which the outer one
        may be sharded: a device then has whole runs of inner elements.
      sizes: the number of elements of factors that share a dimension with another.
      free, placed, summed: the factors of each kind.
      local: (run, axes, *operands) to the results, if placed or summed factors are sharded: `axes` has the mesh axes
        of each, the operands are a device's parts, and `run(spec, *operands)` calls the engine on them.
      exact: whether sums are exact, so that their order does not matter.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    free: tuple[str, ...]
    placed: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    local: Callable[..., Any] | None = None
    exact: bool = False

    @property
    def divisible(self) -> tuple[str, ...]:
        """The factors that may be sharded."""
        return tuple(dict.fromkeys(self.free + self.placed + self.summed))

    @property
    def in_order(self) -> "Factors":
        """The same factors for a fixed order of additions: summed factors are not sharded."""
        return dataclasses.replace(self, summed=(), placed=tuple(f for f in self.placed if f not in self.summed))

    def loose_specs(self) -> list[PartitionSpec]:
        """Specs for a program without a rule: XLA may shard operands along factors that are free or only summed."""
        loose = set(self.free + self.summed) - set(self.placed)
        own = lambda dim: PartitionSpec.UNCONSTRAINED if dim in loose else None
        return [PartitionSpec(*map(own, dims)) for dims in self.operands]

    def specs(
        self, mesh: Any, args: Sequence[Any], results: Sequence[Any] = ()
    ) -> tuple[list[PartitionSpec], list[PartitionSpec], dict[str, Devices]]:
        """Partition specs of operands and results, and along which devices each factor is sharded.

        The requested sharding of results has precedence, then the first sharding found of a factor. A factor is sharded
        evenly or not at all.
        """
        axes: dict[str, tuple[str, ...]] = {}
        for dims, arg in [*zip(self.results, results, strict=False), *zip(self.operands, args, strict=True)]:
            for dim, size, axis in zip(dims, arg.shape, getattr(arg.sharding, "spec", ()), strict=False):
                factor, names = dim.split()[0], names_of(axis)
                taken = factor in axes or any(name in used for used in axes.values() for name in names)
                if not names or taken or factor not in self.divisible:
                    continue
                if self.sizes.get(factor, size) % math.prod(mesh.shape[name] for name in names) == 0:
                    axes[factor] = names
        spec = lambda dims: PartitionSpec(*(_as_axis(axes.get(dim.split()[0], ())) for dim in dims))
        along = lambda names: Devices(
            names, tuple(mesh.shape[n] for n in names), tuple(n for n in mesh.axis_names if n in names)
        )
        found = {factor: along(names) for factor, names in axes.items()}
        return list(map(spec, self.operands)), list(map(spec, self.results)), found

    def shardy_rule(self, mesh: Any) -> tuple[str, dict[str, Any]]:
        """The rule for XLA's partitioner, and its keyword arguments.

        Two factors of a dimension become one if the outer one is not sharded.
        """
        whole = {f for f, size in self.sizes.items() if size == 1 or not never_in_part(size, mesh)}

        def dim_of(dim: str) -> str:
            outer, *inner = dim.split()
            inner = [f for f in inner if self.sizes[f] != 1]  # Shardy takes no factor of 1 beside another
            return (
                f"({outer} {inner[0]})"
                if inner and outer in self.divisible and outer not in whole
                else "".join([outer, *inner])
            )

        arrays = [[dim_of(dim) for dim in dims] for dims in (*self.operands, *self.results)]
        count = len(self.operands)
        every = dict.fromkeys(f for dims in arrays for dim in dims for f in dim.strip("()").split())
        lone = {dim for dims in arrays for dim in dims}
        divided = [f for f in self.divisible if f in every and f not in whole]
        kept = {f for dims in arrays[count:] for dim in dims for f in dim.strip("()").split()}
        text = lambda arrays: ", ".join(map(" ".join, arrays))
        return f"{text(arrays[:count])} -> {text(arrays[count:])}", {
            "reduction_factors": tuple(f for f in self.summed if f in divided and f not in kept),
            "need_replication_factors": tuple(f for f in every if f not in divided),
            **{f: size for f, size in self.sizes.items() if f in every and f not in lone},
        }


def never_in_part(size: int, mesh: Any) -> bool:
    """Whether the partitioner cannot shard a factor by a part of a mesh axis, for which JAX has no name.

    With 4 groups of 4 channels on 8 devices, it would shard the groups by one half of the axis.
    """
    sizes = [n for n in mesh.shape.values() if n > 1]
    for count in range(len(sizes)):
        for others in itertools.permutations(sizes, count + 1):
            *whole, n = others
            rest = size // math.prod(whole) if size % math.prod(whole) == 0 else 1
            if math.gcd(rest, n) not in (1, n):
                return False
    return True


def names_of(axis: Any) -> tuple[str, ...]:
    """The mesh axes that a part of a partition spec names: it is a name, some of them, or None."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


def _as_axis(names: tuple[str, ...]) -> Any:
    return names if len(names) > 1 else names[0] if names else None


def alike(names: Dims, sizes: Sequence[int], shape: Sequence[int], own: str) -> Dims:
    """The factors of an array that has the `sizes`, of these names, or has length 1; then the axis has its own name."""
    return tuple(a if n == size else f"{own}{a}" for a, size, n in zip(names, sizes, shape, strict=True))


def leading(operands: Sequence[Any], results: Sequence[Any], count: int) -> Factors:
    """The `Factors` of an op whose operands and results share their first `count` axes, which may be sharded."""
    shared = tuple(f"l{i}" for i in range(count))

    def names(kind: str, arrays: Sequence[Any]) -> tuple[Dims, ...]:
        return tuple((*shared, *(f"{kind}{i}d{j}" for j in range(len(x.shape) - count))) for i, x in enumerate(arrays))

    return Factors(operands=names("o", operands), results=names("r", results), free=shared)


def elementwise(*operands: Any) -> Factors:
    """The `Factors` of an op whose operands and result have one shape, all of which may be sharded."""
    return leading(operands, operands[:1], len(operands[0].shape))


# ---- communication between devices -----------------------------------------------------------------------------------


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Inside shard_map, the operands marked as varying over the same mesh axes, as JAX's own ops do.

    The transpose of the mark adds the cotangents over the mesh.
    """
    axes = [varying(jax.typeof(x)) for x in operands]
    union = frozenset[str]().union(*axes)
    pairs = zip(operands, axes, strict=True)
    return [lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x for x, own in pairs]


def broadcast_alike(*operands: Array) -> list[Any]:
    """Operands of one shape, marked as varying alike, and if shardings are in types sharded alike.

    Along each axis they are sharded as the first operand that is sharded there, as the result of JAX's own ops is.
    """
    types = [jax.typeof(x) for x in operands]
    mesh = next((t.sharding.mesh for t in types if AxisType.Explicit in t.sharding.mesh.axis_types), None)
    if mesh is None or all(t.sharding == types[0].sharding for t in types):
        return vary_alike(jnp.broadcast_arrays(*operands))
    shape = np.broadcast_shapes(*(t.shape for t in types))
    axes: list[Any] = [None] * len(shape)
    for t in types:
        for axis, names in enumerate(t.sharding.spec, len(shape) - len(t.shape)):
            taken = {name for other in axes for name in names_of(other)}
            axes[axis] = axes[axis] or (None if taken & {*names_of(names)} else names)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return vary_alike([broadcast_to(x, shape, sharding) for x in operands])


def broadcast_to(x: Array, shape: Sequence[int], sharding: NamedSharding) -> Array:
    """x broadcast to a shape that is sharded so; first it is placed, for JAX takes none that is sharded otherwise."""
    own = tuple(sharding.spec)[len(shape) - x.ndim :]
    kept = (names if n == size else None for names, n, size in zip(own, x.shape, shape[-x.ndim :], strict=True))
    x = reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*kept))) if x.ndim else x
    return jnp.broadcast_to(x, shape, out_sharding=sharding)


def exchange(x: Array, axis: int, devices: Devices, before: int, after: int, fill: Any = 0) -> Array:
    """A device's rows along an axis, with so many rows of the devices before and after it; `fill` beyond the ends.

    A negative number removes rows.
    """
    rows = x.shape[axis]
    parts = [lax.slice_in_dim(x, max(-before, 0), rows - max(-after, 0), axis=axis)]
    for sign, width in ((-1, before), (1, after)):
        for hop in range(1, -(-width // rows) + 1):
            size = min(rows, width - (hop - 1) * rows)
            piece = (
                lax.slice_in_dim(x, rows - size, rows, axis=axis)
                if sign < 0
                else lax.slice_in_dim(x, 0, size, axis=axis)
            )
            moved = devices.shifted(piece, -sign * hop)
            if fill != 0:  # what nobody sends is zero
                at = devices.index()
                beyond = at < hop if sign < 0 else at >= devices.count - hop
                moved = jnp.where(beyond, jnp.asarray(fill, x.dtype), moved)
            parts.insert(0 if sign < 0 else len(parts), moved)
    return lax.concatenate(parts, axis) if len(parts) > 1 else parts[0]


# ---- windows ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows along one axis: output p covers the inputs p stride - low + r dilation of taps r, over `extent` inputs.

    They may be partitioned among devices if the number of outputs is that of the inputs over the stride: then each
    device has the outputs of its own inputs, and all devices need equally many rows of their neighbours.
    """

    inputs: int
    outputs: int
    stride: int
    extent: int
    low: int

    @property
    def even(self) -> bool:
        return self.inputs == self.outputs * self.stride and self.outputs > 0

    def dims(self, name: str) -> tuple[str, str, dict[str, int]]:
        """The names of the inputs' and the outputs' dimension, and the sizes of factors that share one."""
        if not self.even:
            return f"{name}in", f"{name}out", {}
        if self.stride == 1:
            return name, name, {}
        return f"{name} {name}stride", name, {name: self.outputs, f"{name}stride": self.stride}

    def around_inputs(self, x: Array, axis: int, devices: Devices, fill: Any = 0) -> Array:
        """A device's inputs with all others that its outputs' windows cover, so that these need no padding."""
        return exchange(x, axis, devices, self.low, self.extent - self.low - self.stride, fill)

    def around_outputs(self, y: Array, axis: int, devices: Devices) -> tuple[Array, tuple[int, int]]:
        """A device's outputs with all others whose windows cover its inputs, zero where there are none.

        Also the padding, low and high, for which windows over the device's inputs have exactly these outputs.
        """
        before = max((self.extent - 1 - self.low) // self.stride, 0)
        y = exchange(y, axis, devices, before, -(-self.low // self.stride))
        low = self.low + self.stride * before
        rows = self.inputs // devices.count
        return y, (low, max((y.shape[axis] - 1) * self.stride + self.extent - rows - low, 0))
