"""Kernels in which each thread of a warpgroup has a vector at an address of its own.

Pallas addresses blocks of arrays, not single elements. So the loads and stores here are Mosaic's own code, as are the
comparisons of two 16-bit numbers at once, which Mosaic would split. All else is Pallas: an array (warps, lanes) has a
number for each thread, an array (warps, lanes, elements) a vector.

To trace and lower an operation takes longer by Pallas than by Mosaic alone. So what a kernel does often is done by
functions that `together` makes: Mosaic calls them while it lowers, with its own arrays. These have Python's operators
as JAX's arrays have them, and every function here takes both, but for those that say otherwise.
"""

import contextvars
import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.compat import fa, ir, llvm, mgpu, mgpu_utils, plgpu, scf, vector
from jaxdnn._src.hopper.rows import tiled

_inline_asm: Any = llvm.inline_asm  # not typed: what it returns depends on its arguments

WARPS, LANES = 4, 32
THREADS = WARPS * LANES
_KINDS = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}  # of PTX's instructions for a word
_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32}


@ft.cache
def layout(elements: int) -> Any:
    """Of an array (warps, lanes, elements)."""
    tiling = fa.Tiling(((WARPS, LANES, elements),))
    return fa.TiledLayout(tiling, (-3,), (-2,), -1, _check_canonical=False).canonicalize()


ONE = layout(1).reduce((2,))  # of an array (warps, lanes)


_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)  # a function of `together`


@dataclasses.dataclass(frozen=True)
class _Memory:
    """A reference within a function of `together`."""

    value: Any
    shape: tuple[int, ...]
    dtype: Any


def together(run: Callable[..., Any], references: Sequence[Any], arrays: Any, returns: Any) -> Any:
    """What a function of references and arrays makes of these, as one operation of Pallas.

    arrays: any number, in lists or tuples, which the function takes as they are. Numbers of Python are constants.
    returns: arrays of the same shapes and dtypes as the results, or what `like` makes; None if there are none.
    """
    leaves, tree = jax.tree.flatten(arrays)
    own = [_laid_out(v) for v in leaves]
    wanted = jax.tree.map(lambda v: _result(v.shape, v.dtype), returns)
    memory = [(ref.shape, ref.dtype) for ref in references]

    def call(_: Any, *given: Any) -> Any:
        refs = [_Memory(ref, *of) for ref, of in zip(given[: len(memory)], memory, strict=True)]
        token = _inside.set(True)
        try:
            found = run(*refs, *jax.tree.unflatten(tree, given[len(refs) :]))
        finally:
            _inside.reset(token)
        is_array = lambda v: isinstance(v, mgpu.FragmentedArray)
        return jax.tree.unflatten(jax.tree.structure(returns), jax.tree.leaves(found, is_leaf=is_array))

    types = (*(plgpu.RefType(()) for _ in references), *map(_layout_of, own))
    return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(call)(*references, *own)


def like(*elements: int) -> Any:
    """Vectors of float32 that `together` is to return, or without an argument a number for each thread."""
    return jax.ShapeDtypeStruct((WARPS, LANES, *elements), jnp.float32)


@ft.cache
def _tiled(rank: int, elements: int) -> Any:
    return tiled(ONE if rank == 2 else layout(elements))


def _layout_of(v: Array) -> Any:
    return _tiled(len(v.shape), v.shape[-1])


def _result(shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of numbers or vectors."""
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=_tiled(len(shape), shape[-1]))


def _laid_out(v: Array) -> Array:
    """An array in the layout of lanes. All arrays have it, and are left as they are, but for those of a single number.

    Where an array's numbers are known to be the same (the remainders by one; whether these are below a bound), Mosaic
    keeps one of them, in a layout that is taken neither by code of Mosaic's own nor by a broadcast.
    """
    return v if _inside.get() else plgpu.layout_cast(v, _layout_of(v))


def _inline(references: int = 0, returns: Any = None) -> Any:
    """Makes a function of Mosaic's own code, whose arguments are a context, so many references, and arrays."""

    def decorate(run: Callable[..., Any]) -> Any:
        def call(*given: Any) -> Any:
            if _inside.get():
                return run(None, *(v.value if isinstance(v, _Memory) else v for v in given))
            arrays = [_laid_out(v) for v in given[references:]]
            types = (*(plgpu.RefType(()) for _ in given[:references]), *map(_layout_of, arrays))
            return plgpu.inline_mgpu(arg_types=types, return_type=returns)(run)(*given[:references], *arrays)

        return call

    return decorate


def numbers(first: Any) -> Array:
    """The number of each thread, of which the warpgroup's first thread has `first`."""
    iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, (WARPS, LANES), axis, layout=_tiled(2, LANES))
    return iota(0) * LANES + iota(1) + first


def divided(n: Any, by: int) -> tuple[Any, Any]:
    """The quotients and the remainders of numbers that are not negative."""
    if by == 1:
        return n, one(0, jnp.int32) if _inside.get() else jnp.zeros_like(n)
    if _inside.get():
        unsigned = n.astype(n.mlir_dtype, is_signed=False)
        quotient = unsigned.trunc_div(by)
        signed = lambda v: v.astype(n.mlir_dtype, is_signed=True)
        return signed(quotient), signed(unsigned - quotient * by)
    unsigned = n.astype(jnp.uint32)
    quotient = lax.div(unsigned, jnp.uint32(by))
    return quotient.astype(n.dtype), (unsigned - quotient * jnp.uint32(by)).astype(n.dtype)


def wide(value: Any, elements: int) -> Any:
    """A number of each thread for all elements of its vector."""
    if _inside.get():
        return value.broadcast_in_dim((WARPS, LANES, elements), (0, 1), layout(elements))
    return _laid_out(lax.broadcast_in_dim(_laid_out(value), (WARPS, LANES, elements), (0, 1)))


def narrow(value: Any) -> Any:
    """The number of each thread whose vector has only this one."""
    return value.reduce("add", 2) if _inside.get() else jnp.sum(value, 2)


def where(holds: Any, value: Any, other: Any) -> Any:
    """The vectors, or numbers, of the threads for which `holds` does; of the others those of `other`, or one number.

    `holds` may be one of each element too.
    """
    if len(holds.shape) < len(getattr(value, "shape", ())):
        holds = wide(_bit(holds), value.shape[-1]) > 0
    if not _inside.get():
        return jnp.where(holds, value, other)
    is_array = lambda v: isinstance(v, mgpu.FragmentedArray)
    kind = next((v.mlir_dtype for v in (value, other) if is_array(v)), None)
    return holds.select(*(v if is_array(v) else _splat(v, holds.shape, kind) for v in (value, other)))


def _bit(holds: Any) -> Any:
    """1 where it holds, elsewhere 0."""
    if not _inside.get():
        return jnp.where(holds, 1, 0)
    found = where(holds, 1, 0)
    return found.astype(found.mlir_dtype, is_signed=False)  # as Pallas has it, to be compared as such


def _splat(value: float | int, shape: tuple[int, ...], kind: Any = None) -> Any:
    """Within Mosaic's code an array of one number, in a type of MLIR or in that of 32 bits."""
    is_integer = isinstance(value, int) if kind is None else isinstance(kind, ir.IntegerType)
    if kind is None:
        kind = ir.IntegerType.get_signless(32) if is_integer else ir.F32Type.get()
    of = ONE if len(shape) == 2 else layout(shape[-1])
    signed = True if is_integer else None
    return mgpu.FragmentedArray.splat(mgpu_utils.c(value, kind), shape, of, is_signed=signed)


def at_least(value: Any, least: Any) -> Any:
    """The larger one of each number and one number."""
    return value.max(least) if _inside.get() else lax.max(value, jnp.array(least, value.dtype))


def at_most(value: Any, most: Any) -> Any:
    """The smaller one of each number and one number."""
    return value.min(most) if _inside.get() else lax.min(value, jnp.array(most, value.dtype))


def full(value: Any, elements: int, dtype: Any) -> Array:
    """Vectors of one number."""
    if _inside.get():
        return _splat(value, (WARPS, LANES, elements), mgpu_utils.dtype_to_ir_type(jnp.dtype(dtype)))
    return _laid_out(jnp.full((WARPS, LANES, elements), value, dtype))


def one(value: Any, dtype: Any) -> Array:
    """The same number for each thread."""
    if _inside.get():
        return _splat(value, (WARPS, LANES), mgpu_utils.dtype_to_ir_type(jnp.dtype(dtype)))
    return _laid_out(jnp.full((WARPS, LANES), value, dtype))


def positions(elements: int) -> Array:
    """The number of each element within its vector."""
    shape = (WARPS, LANES, elements)
    return plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=_tiled(3, elements))


def load(ref: Any, number: Array, when: Array | None = None, plus: int = 0) -> Array:
    """The vectors of these numbers of an array (count, elements); zeros where `when` does not hold.

    plus: a constant that is added to the numbers, as a part of the instruction.
    """
    elements, dtype = ref.shape[-1], ref.dtype
    given = (number,) if when is None else (number, when)

    @_inline(1, _vectors(elements, dtype))
    def run(_: Any, ref: Any, number: Any, when: Any = None) -> Any:
        element = mgpu_utils.dtype_to_ir_type(dtype)
        size = elements * mgpu_utils.bytewidth(element)
        words, place = _words_of(size), _place(ref, number, size, plus if when is None else 0)
        if when is None:
            found = llvm.load(words, place, alignment=size, invariant=not _is_shared(ref))
        else:
            found = _load_if(_own(when), place, words, plus * size)
        return _array(vector.bitcast(ir.VectorType.get((elements,), element), found), dtype)

    return run(ref, *given)


def _load_if(holds: Any, place: Any, words: Any, offset: int) -> Any:
    """Words of global memory, so many bytes from a place, zeros where a predicate does not hold.

    PTX has a load with a predicate, LLVM has none.
    """
    kind, count = words.element_type, words.shape[0]
    names, many = [f"${i}" for i in range(count)], f".v{count}" if count > 1 else ""
    zeros = "".join(f"mov.b{kind.width} {name}, 0; " for name in names)
    at = f"[${count + 1}{f'+{offset}' if offset else ''}]"
    code = f"{zeros}@${count} ld.global.nc{many}.b{kind.width} {{{', '.join(names)}}}, {at};"
    result = llvm.StructType.get_literal([kind] * count) if count > 1 else kind
    outs = {16: "=&h", 32: "=&r"}[kind.width]
    found = _inline_asm(result, [holds, place], code, ",".join([outs] * count) + ",b,l", has_side_effects=False)
    own = [llvm.extractvalue(kind, found, [i]) for i in range(count)] if count > 1 else [found]
    return vector.from_elements(words, own)


def store(ref: Any, number: Array, value: Array, when: Array | None = None, plus: int = 0) -> None:
    """Stores vectors at these numbers of an array (count, elements), those for which `when` holds; see `load`."""
    elements = ref.shape[-1]
    given = (number,) if when is None else (number, when)

    @_inline(1)
    def run(_: Any, ref: Any, value: Any, number: Any, when: Any = None) -> None:
        size = elements * mgpu_utils.bytewidth(value.mlir_dtype)
        [own] = value.registers.flat
        put = lambda: llvm.store(vector.bitcast(_words_of(size), own), _place(ref, number, size, plus), alignment=size)
        if when is None:
            put()
            return
        with ir.InsertionPoint(scf.IfOp(_own(when)).then_block):
            put()
            scf.yield_([])

    run(ref, value, *given)


def copy(
    to: Any, place: Array, ref: Any, number: Array, when: Array | None = None, plus: tuple[int, int] = (0, 0)
) -> None:
    """Starts to copy vectors to places in shared memory, those for which `when` holds; see `wait`.

    plus: constants that are added to the places and to the numbers.

    The assembler moves a load into registers down to its first use; a copy begins where it is written.
    """
    size = ref.shape[-1] * ref.dtype.itemsize
    given = (place, number) if when is None else (place, number, when)

    @_inline(2)
    def run(_: Any, to: Any, ref: Any, place: Any, number: Any, when: Any = None) -> None:
        near = llvm.ptrtoint(ir.IntegerType.get_signless(32), _place(to, place, size))
        operands = [near, _place(ref, number, size), *([] if when is None else [_own(when)])]
        guard, last = ("", "") if when is None else ("@$2 ", ",b")
        at = lambda i: f"[$0+{plus[0] * size + i}], [$1+{plus[1] * size + i}]"
        code = "".join(f"{guard}cp.async.cg.shared.global {at(i)}, 16;" for i in range(0, size, 16))
        _effect(code, operands, "r,l" + last)

    run(to, ref, *given)


def commit() -> None:
    """Makes a group of the copies that the threads have started since the last one."""
    _inline()(lambda _: _effect("cp.async.commit_group;", [], ""))()


def wait(groups: int) -> None:
    """Waits until no more than so many groups of each thread's own copies are under way."""
    _inline()(lambda _: _effect(f"cp.async.wait_group {groups};", [], ""))()


def meet() -> None:
    """All threads of the block wait for each other, and load what others have stored in shared memory before."""
    _inline()(lambda _: _effect("bar.sync 0;", [], ""))()


def entries(ref: Any, index: Array, plus: int = 0) -> Array:
    """The elements of an array (count,) at an array of numbers, one for each thread or one for each element.

    plus: a constant that is added to the numbers.
    """
    result = _result(index.shape, ref.dtype)

    @_inline(1, result)
    def run(_: Any, ref: Any, index: Any) -> Any:
        kind, base, shared = mgpu_utils.dtype_to_ir_type(result.dtype), _pointer(ref), _is_shared(ref)
        load = lambda number: llvm.load(kind, _entry(base, number, kind, plus), invariant=not shared)
        return index.foreach(lambda number, _: load(number), create_array=True, is_signed=_is_signed(result.dtype))

    return run(ref, index)


def put(ref: Any, index: Array, value: Array, plus: int = 0) -> None:
    """Stores the elements of vectors in an array (count,) in shared memory; see `entries`."""

    @_inline(1)
    def run(_: Any, ref: Any, value: Any, index: Any) -> None:
        [own], [numbers], base, count = value.registers.flat, index.registers.flat, _pointer(ref), value.shape[-1]
        for i in range(count):
            of = lambda v, i=i: vector.extract(v, dynamic_position=[], static_position=[i])
            llvm.store(of(own), _entry(base, of(numbers), value.mlir_dtype, plus))

    run(ref, value, index)


def float32(v: Any) -> Any:
    """Floats in float32. Of bfloat16 Mosaic takes three instructions for two numbers, and this two."""
    elements = v.shape[-1]
    if _inside.get():
        f32 = ir.F32Type.get()
        if v.mlir_dtype != mgpu_utils.dtype_to_ir_type(jnp.bfloat16):
            return v if v.mlir_dtype == f32 else v.astype(f32)
    elif v.dtype != jnp.bfloat16:
        return v.astype(jnp.float32)

    @_inline(returns=_vectors(elements, jnp.float32))
    def run(_: Any, v: Any) -> Any:
        i32, [own] = ir.IntegerType.get_signless(32), v.registers.flat
        own = vector.bitcast(ir.VectorType.get((elements // 2,), i32), own)
        constant = lambda value: llvm.mlir_constant(ir.IntegerAttr.get(i32, value))
        found = []
        for i in range(elements // 2):
            word = vector.extract(own, dynamic_position=[], static_position=[i])
            low = llvm.shl(word, constant(16), overflow_flags=llvm.IntegerOverflowFlags.none)
            found += [low, llvm.and_(word, constant(-(1 << 16)))]
        floats = vector.from_elements(ir.VectorType.get((elements,), i32), found)
        return _array(vector.bitcast(ir.VectorType.get((elements,), ir.F32Type.get()), floats), jnp.float32)

    return run(v)


def words(v: Array) -> Array:
    """The 32-bit words of vectors: two numbers each if these have 16 bits."""
    return _as(v, v.shape[-1] * v.dtype.itemsize // 4, jnp.uint32)


def of_words(v: Array, dtype: Any) -> Array:
    """The numbers of which these are the words."""
    return _as(v, v.shape[-1] * 4 // jnp.dtype(dtype).itemsize, dtype)


def _as(v: Array, elements: int, dtype: Any) -> Array:
    @_inline(returns=_vectors(elements, dtype))
    def run(_: Any, v: Any) -> Any:
        [own] = v.registers.flat
        return _array(vector.bitcast(ir.VectorType.get((elements,), mgpu_utils.dtype_to_ir_type(dtype)), own), dtype)

    return run(v)


def larger(a: tuple[Array, ...], b: tuple[Array, ...], dtype: Any, *, nan: bool) -> tuple[Array, ...]:
    """The words of a where the first of them, floats of a dtype, are greater or equal; elsewhere those of b.

    nan: whether a is taken where it is NaN as well, and b where it alone is; otherwise there is none.
    """
    if jnp.dtype(dtype).itemsize == 4:
        x, y = (of_words(v[0], dtype) for v in (a, b))
        keeps = (x >= y) | (x != x) if nan else x >= y
        return tuple(jnp.where(keeps, v, w) for v, w in zip(a, b, strict=True))
    kind = _KINDS[jnp.dtype(dtype).name]
    code, out = f"set.ge.u32.{kind} $0, $1, $2;", "=r"
    if nan:
        code = f"{{.reg .b32 m; set.ge.u32.{kind} m, $1, $2; set.nan.u32.{kind} $0, $1, $1; or.b32 $0, $0, m;}}"
        out = "=&r"
    mask = _words(code, out, (a[0], b[0]), jnp.uint32)
    pick = lambda v, w: _words("lop3.b32 $0, $1, $2, $3, 0xCA;", "=r", (mask, v, w), jnp.uint32)
    return tuple(pick(v, w) for v, w in zip(a, b, strict=True))


def to_bytes(v: Array, bits: int) -> Array:
    """The bytes of numbers of 16 or 32 bits, in words, that are below 256."""
    pick = {16: (0x6420,), 32: (0x0040, 0x5410)}[bits]
    count = v.shape[-1] * 32 // bits

    @_inline(returns=_vectors(count, jnp.uint8))
    def run(_: Any, v: Any) -> Any:
        i32, [own] = ir.IntegerType.get_signless(32), v.registers.flat
        found = [vector.extract(own, dynamic_position=[], static_position=[i]) for i in range(own.type.shape[0])]
        for control in pick:  # neighbours are joined, and then those that this makes
            join = f"prmt.b32 $0, $1, $2, {control};"
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [_inline_asm(i32, list(pair), join, "=r,r,r") for pair in pairs]
        joined = vector.from_elements(ir.VectorType.get((len(found),), i32), found)
        return _array(vector.bitcast(ir.VectorType.get((count,), ir.IntegerType.get_signless(8)), joined), jnp.uint8)

    return run(v)


def equal(a: Array, b: Array) -> Array:
    """All ones where unsigned numbers below 1024 are equal, elsewhere zero: as float16 they are subnormal."""
    kind = {2: "f16x2", 4: "u32"}[a.dtype.itemsize]
    return _words(f"set.eq.u32.{kind} $0, $1, $2;", "=r", (a, b), _UNSIGNED[a.dtype.itemsize])


def product(a: Array, b: Array) -> Array:
    """a b of float32, rounded before anything is added to it.

    Mosaic's products are such as the assembler contracts with sums, also behind `lax.optimization_barrier`.
    """
    return _floats("mul.rn.f32 $0, $1, $2;", a, b)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a b + c of float32, rounded once. Which of its own products are contracted with sums is the compiler's choice."""
    return _floats("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def reciprocal(v: Array, *, approximate: bool = False) -> Array:
    """1 / v, rounded to nearest, or by the special function unit. Mosaic's division is approximate, as is its root."""
    return _floats("rcp.approx.ftz.f32 $0, $1;" if approximate else "rcp.rn.f32 $0, $1;", v)


def square_root(v: Array) -> Array:
    """The square root, rounded to nearest."""
    return _floats("sqrt.rn.f32 $0, $1;", v)


def exp2(v: Array) -> Array:
    """2^v, by the special function unit.

    What Mosaic makes of exponentials and logarithms has products that the assembler contracts in one place and not in
    another: a logarithm had other bits within a loop.
    """
    return _floats("ex2.approx.ftz.f32 $0, $1;", v)


def log2(v: Array) -> Array:
    """The logarithm to base 2, by the special function unit."""
    return _floats("lg2.approx.f32 $0, $1;", v)


def _floats(code: str, *operands: Array) -> Array:
    """What PTX makes of float32 numbers: of each thread's, or of each element of its vector."""
    return _words(code, "=r", operands, jnp.float32) if len(operands[0].shape) == 3 else _of_threads(code, *operands)


def _of_threads(code: str, *operands: Array) -> Array:
    """What PTX makes of a float32 number of each thread."""

    @_inline(returns=_result((WARPS, LANES), jnp.float32))
    def run(_: Any, *values: Any) -> Any:
        constraints = ",".join(["=f", *["f"] * len(values)])
        found = _inline_asm(ir.F32Type.get(), [_own(v) for v in values], code, constraints)
        [of_thread] = values[0].registers.flat
        own = np.empty_like(values[0].registers)
        several = isinstance(of_thread.type, ir.VectorType)
        own.flat[0] = vector.from_elements(of_thread.type, [found]) if several else found
        return mgpu.FragmentedArray(_registers=own, _layout=values[0].layout, _is_signed=None)

    return run(*operands)


def _words(code: str, out: str, operands: tuple[Array, ...], dtype: Any) -> Array:
    """What PTX makes of each word of vectors: of two numbers if they have 16 bits."""
    elements, kind = operands[0].shape[-1], jnp.dtype(dtype)

    @_inline(returns=_vectors(elements, kind))
    def run(_: Any, *values: Any) -> Any:
        i32, count = ir.IntegerType.get_signless(32), elements * kind.itemsize // 4
        words = ir.VectorType.get((count,), i32)
        given = [vector.bitcast(words, v.registers.flat[0]) for v in values]
        take = lambda v, i: vector.extract(v, dynamic_position=[], static_position=[i])
        constraints = ",".join([out, *["r"] * len(given)])
        found = [_inline_asm(i32, [take(v, i) for v in given], code, constraints) for i in range(count)]
        element = mgpu_utils.dtype_to_ir_type(kind)
        return _array(vector.bitcast(ir.VectorType.get((elements,), element), vector.from_elements(words, found)), kind)

    return run(*operands)


def any_nan(v: Array, flag: Any) -> Any:
    """Whether a thread of the block, which is one warpgroup, has NaN among its floats; `flag` is shared memory (1,)."""
    kind, dtype = _KINDS[v.dtype.name], v.dtype

    @_inline(1)
    def run(_: Any, flag: Any, v: Any) -> None:
        i32, [own] = ir.IntegerType.get_signless(32), v.registers.flat
        count = own.type.shape[0] * dtype.itemsize // 4
        own = vector.bitcast(ir.VectorType.get((count,), i32), own)
        words = [vector.extract(own, dynamic_position=[], static_position=[i]) for i in range(count)]
        tests = "".join(f"set.nan.u32.{kind} w, ${i + 1}, ${i + 1}; or.b32 m, m, w; " for i in range(count))
        code = "{.reg .pred p; .reg .b32 m, w; mov.b32 m, 0; " + tests + "setp.ne.u32 p, m, 0; "
        code += f"bar.red.or.pred p, 1, {THREADS}, p; selp.b32 $0, 1, 0, p;}}"
        found = _inline_asm(i32, words, code, ",".join(["=r", *["r"] * count]), has_side_effects=True)
        llvm.store(found, _pointer(flag))  # each thread what it will load

    run(flag, v)
    return flag[0] != 0


# ---- within Mosaic's code --------------------------------------------------------------------------------------------


def _effect(code: str, operands: list[Any], constraints: str) -> None:
    constraints = ",".join(filter(None, [constraints, "~{memory}"]))
    _inline_asm(ir.Type.parse("!llvm.void"), operands, code, constraints, has_side_effects=True)


def _vectors(elements: int, dtype: Any) -> Any:
    """The type of vectors."""
    return _result((WARPS, LANES, elements), dtype)


def _array(register: Any, dtype: Any) -> Any:
    """The vectors of which a thread has this one."""
    elements = ir.VectorType(register.type).shape[0]
    of = layout(elements)
    own = np.empty(of.registers_shape((WARPS, LANES, elements)), dtype=object)
    own.flat[0] = register
    return mgpu.FragmentedArray(_registers=own, _layout=of, _is_signed=_is_signed(dtype))


def _is_signed(dtype: Any) -> bool | None:
    """Of an integer type whether it has a sign."""
    return jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None


def _own(value: Any) -> Any:
    """The number of a thread."""
    [own] = value.registers.flat
    return vector.extract(own, dynamic_position=[], static_position=[0]) if isinstance(own.type, ir.VectorType) else own


def _words_of(size: int) -> Any:
    """The type of so many bytes: words of 32 bits, or one of 16."""
    bits = min(32, 8 * size)
    return ir.VectorType.get((8 * size // bits,), ir.IntegerType.get_signless(bits))


def _is_shared(ref: Any) -> bool:
    return ir.MemRefType(ref.type).memory_space is not None


def _pointer(ref: Any) -> Any:
    """The address of an array, in global memory where it is not in shared memory."""
    pointer = mgpu_utils.memref_ptr(ref)
    return pointer if _is_shared(ref) else llvm.addrspacecast(llvm.PointerType.get(1), pointer)


def _element(base: Any, number: Any, kind: Any, plus: int) -> Any:
    found = llvm.getelementptr(base.type, base, [number], [-(2**31)], kind, llvm.GEPNoWrapFlags.none)
    return llvm.getelementptr(base.type, found, [], [plus], kind, llvm.GEPNoWrapFlags.none) if plus else found


def _entry(base: Any, number: Any, kind: Any, plus: int) -> Any:
    """The address of an element of the array at an address."""
    return _element(base, llvm.zext(ir.IntegerType.get_signless(64), number), kind, plus)


def _place(ref: Any, number: Any, size: int, plus: int = 0) -> Any:
    """The address of a thread's vector of `size` bytes."""
    number = llvm.sext(ir.IntegerType.get_signless(64), _own(number))
    return _element(_pointer(ref), number, ir.Type.parse(f"!llvm.array<{size} x i8>"), plus)
