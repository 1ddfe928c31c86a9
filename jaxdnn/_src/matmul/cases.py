"""Products of matrices: which calls `jaxdnn verify` makes. Data, bounds and predicted bits are those of convolutions.

A case is a convolution's with other shapes and arguments: its kinds of data, epilogues, bounds and checks know of a
case how many products a result has, which arrays it takes, and what its blend is.
"""

import dataclasses
import functools as ft
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np

from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases.case import Facts, generator
from jaxdnn._src.cases.drawn import Generator, between, channels, pick
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject
from jaxdnn._src.conv.cases import case as conv_cases
from jaxdnn._src.conv.cases import checks, data
from jaxdnn._src.conv.cases.draw import DTYPES as DRAWN
from jaxdnn._src.conv.cases.geometries import BLENDS, EPILOGUES, INT8_BLENDS, NO_BLEND, OUTS, Blend
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn_reference import matmul as definition

OP, BOUND = "matmul", "conv"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Leading axes of a and of b, the matrices' sizes, and what is scaled by an alpha that is an array.

    scaled: "" (nothing), "rows", "columns" or "elements".
    """

    name: str
    m: int
    k: int
    n: int
    left: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    scaled: str = ""

    @property
    def filters(self) -> int:
        """The number of elements of a bias."""
        return self.n

    @property
    def result(self) -> tuple[int, ...]:
        return (*np.broadcast_shapes(self.left, self.right), self.m, self.n)

    @property
    def of_alpha(self) -> tuple[int, ...]:
        """The shape of an alpha that is an array."""
        return {"rows": (self.m, 1), "columns": (self.n,), "elements": self.result}[self.scaled]


@dataclasses.dataclass(frozen=True)
class MatmulCase(conv_cases.Case):
    """One product by one engine. `layout` has N or T for a and for b: as it is, or stored transposed, as in BLAS."""

    primitive: ClassVar[dict[str, str]] = {OP: BOUND}

    geometry: Any

    @property
    def roles(self) -> tuple[str, ...]:
        return ("x", "w")

    @property
    def result_role(self) -> str:
        return "y"

    @property
    def terms(self) -> int:
        return self.geometry.k

    @property
    def integer(self) -> bool:
        return super().integer and not self.geometry.scaled

    def shape(self, role: str) -> tuple[int, ...]:
        g = self.geometry
        if role == "y":
            return g.result
        leading, sizes, stored = {
            "x": (g.left, (g.m, g.k), self.layout[0]),
            "w": (g.right, (g.k, g.n), self.layout[1]),
        }[role]
        return (*leading, *(sizes[::-1] if stored == "T" else sizes))

    def along_channel(self, bias: np.ndarray) -> np.ndarray:
        return bias

    def arguments(self) -> dict[str, Any]:
        b = self.blend
        given: dict[str, Any] = {"transpose_a": self.layout[0] == "T", "transpose_b": self.layout[1] == "T"}
        given |= {"beta": b.beta, "activation": b.activation}
        given |= {} if self.geometry.scaled or b.each else {"alpha": b.alpha}
        given |= {"out_dtype": self.out_dtype} if self.out else {}
        given |= {"accumulate": np.dtype(plain.DTYPES[self.accumulate])} if self.accumulate else {}
        return given | ({"precision": "tf32"} if self.dtype == "tf32" else {})

    def describe(self) -> dict[str, Any]:
        return {
            "stored": self.layout,
            "sizes": dataclasses.asdict(self.geometry),
            "out": self.out or self.dtype,
            "blend": dataclasses.asdict(self.blend),
        }


def arrays(
    case: MatmulCase, kind: str, seed: int, accumulation: Accumulation
) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """Operands, and what is given by name. Scales are powers of two: the bounds take products by them for exact."""
    operands, extras = data.arrays(case, kind, seed, accumulation)
    if case.geometry.scaled:
        rng = generator(case, f"{kind} scales", seed)
        extras = {**extras, "alpha": np.exp2(rng.integers(0, 3, case.geometry.of_alpha)).astype(np.float32)}
    return operands, extras


def facts(case: MatmulCase) -> Facts:
    """Asks `jaxdnn.explain` about a case; nothing is computed."""
    operands, extras = arrays(case, "normal", 0, checks.EXACT)
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]
    declared = plain.explained(
        case, case.bound, shapes, **{n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in extras.items()}
    )
    if declared.accumulation == "transform":  # of convolutions on GPUs XLA may take one; for products it calls cuBLAS
        declared = dataclasses.replace(declared, accumulation="tensor_core")
    return declared


# ---- the matrix ------------------------------------------------------------------------------------------------------

SIZES = {
    s.name: s
    for s in (
        Sizes("plain", 7, 13, 11),
        Sizes("batch", 5, 6, 9, (3,), (3,)),
        Sizes("layer", 9, 20, 8, (3, 2)),
        Sizes("broadcast", 3, 5, 4, (2, 1, 3), (4, 1)),
        Sizes("columns", 6, 5, 7, (), (4,)),
        Sizes("many", 2, 3, 5, (2, 1, 2, 1, 3), ()),
        Sizes("thin", 1, 17, 1, (4,), (4,)),
        Sizes("outer", 6, 1, 5),
        Sizes("long", 3, 2100, 4),
        Sizes("wrap", 2, 140_000, 2),
        Sizes("nothing", 4, 0, 5, (2,)),
        Sizes("rows", 6, 9, 5, (2,), (2,), "rows"),
        Sizes("scaled", 6, 9, 5, (2,), (), "columns"),
        Sizes("elements", 6, 9, 5, (), (2,), "elements"),
        Sizes("wide", 130, 96, 200, (2,), (2,)),
    )
}
MATRIX: dict[str, tuple[tuple[Any, ...], ...]] = {
    "quick": (
        *(("f32", name, stored) for name, stored in (("plain", "NN"), ("batch", "NT"))),
        *(("bf16", "layer", "NT"), ("bf16", "broadcast", "TN", EPILOGUES[2]), ("f16", "columns", "TT")),
        *((dtype, "batch", "NN") for dtype in ("f64", "tf32", "e5m2")),
        ("int8", "plain", "NT", NO_BLEND, "int32"),
        ("e4m3fn", "rows", "NT", NO_BLEND, "f32"),
    ),
    "standard": (
        *(("f32", name, "NN") for name in ("many", "outer", "long", "nothing", "wide")),
        *(("f32", "broadcast", "NN", blend) for blend in BLENDS),
        *((dtype, "thin", "TT") for dtype in ("f32", "bf16", "f16")),
        ("int8", "wrap", "NN", NO_BLEND, "int32"),
        ("int8", "scaled", "NT", Blend("bias-relu", bias=True, activation="relu"), "f32"),
        ("bf16", "elements", "NN", EPILOGUES[3]),
        ("bf16", "plain", "NN", NO_BLEND, "f32", "f64"),
        *((dtype, "layer", "NN", NO_BLEND, out) for dtype, out in OUTS[:2]),
    ),
    "full": (
        *(("f32", "batch", "NN", blend) for blend in EPILOGUES),
        *(("int8", "batch", "NT", blend, out) for blend, out in INT8_BLENDS),
        *(
            (dtype, name, "NN")
            for dtype in ("f32", "bf16", "f16", "f64")
            for name in SIZES
            if name not in ("wrap", "long")
        ),
        *((dtype, "layer", "TN", NO_BLEND, out) for dtype, out in OUTS),
    ),
}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[MatmulCase]:
    """The cases of an extent and of those before it."""
    for dtype, name, stored, *rest in up_to(extent, MATRIX):
        yield MatmulCase(op, engine, dtype, stored, None, SIZES[name], *rest)


def facets(case: MatmulCase) -> set[Any]:
    """A dtype, an alpha that is an array, several matrices b; how matrices are stored is no other code."""
    return {case.dtype, ("scaled", bool(case.geometry.scaled)), ("several", bool(case.geometry.right))}


# ---- determinism -----------------------------------------------------------------------------------------------------

# Large enough that XLA splits it among a CPU's threads: the samples are matrices of a, or pairs of matrices.
LAYER, PAIRS = Sizes("layer", 40, 96, 64, (8,)), Sizes("pairs", 40, 96, 64, (8,), (8,))


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject]:
    """A linear layer and a batch of products, in each dtype that the engine serves."""
    for sizes, dtype in ((LAYER, "bf16"), (PAIRS, "f32"), (LAYER, "int8"), (PAIRS, "bf16"), (LAYER, "f32")):
        if extent == "quick" and dtype == "f32":
            continue
        case = MatmulCase(op, engine, dtype, "NN", None, sizes, out="int32" if dtype == "int8" else None)
        declared = facts(case)
        if declared.refusal is None:
            operands, _ = arrays(case, "normal", seed, checks.EXACT)
            if dtype != "int8":  # float32's 24 bits and a spread of magnitudes, so that a change of order changes bits
                spread = (v.astype(np.float32) * np.exp2(np.sin(np.arange(v.size)).reshape(v.shape)) for v in operands)
                operands = tuple(v.astype(case.in_dtype) for v in spread)
            batched = (0, 0 if sizes.right else None)
            function = case.function()
            given = {**case.arguments(), "out_dtype": case.out_dtype, "arithmetic": "ordered"}
            bits = ft.partial(definition, *operands, **given)
            yield Subject(
                op, engine, dtype, declared.level, lambda _, run=function: run, operands, batched, 0,
                definition=bits, variant=sizes.name,
            )  # fmt: skip


# ---- random calls ----------------------------------------------------------------------------------------------------

PRODUCTS = 1 << 22


def draw(op: str, engine: str, rng: Generator, name: str) -> MatmulCase:
    """Matrices of any sizes with up to four leading axes, of which either operand may lack some or have length 1."""
    m, n = (between(rng, 1, 200) for _ in range(2))
    k = channels(rng) if rng.random() < 0.5 else between(rng, 1, 300)
    batch = [between(rng, 1, 6) for _ in range(int(pick(rng, {0: 3, 1: 4, 2: 3, 3: 1, 4: 1})))]
    while m * n * k * np.prod(batch) > PRODUCTS:
        m, n, k = ((v + 1) // 2 for v in (m, n, k))
    axes = [pick(rng, {(size, size): 4, (size, 1): 3, (1, size): 3}) for size in batch]
    left, right = (
        tuple(axis[i] for axis in axes)[int(rng.integers(0, len(axes) + 1)) if rng.random() < 0.3 else 0 :]
        for i in (0, 1)
    )
    scaled = str(pick(rng, {"": 8, "rows": 1, "columns": 1, "elements": 1}))
    stored = str(rng.choice(["NN", "NT", "TN", "TT"]))
    dtype = pick(rng, DRAWN[engine])
    case = MatmulCase(op, engine, dtype, stored, None, Sizes(name, m, k, n, left, right, scaled))
    if dtype == "int8":
        blend, out = (NO_BLEND, "int32") if not scaled and rng.random() < 0.5 else (NO_BLEND, "f32")
        if rng.random() < 0.3 and not scaled:
            blend, out = INT8_BLENDS[int(rng.integers(len(INT8_BLENDS)))]
        return dataclasses.replace(case, blend=blend, out=out)
    blend = (*EPILOGUES, *BLENDS)[int(rng.integers(len(EPILOGUES) + len(BLENDS)))] if rng.random() < 0.4 else NO_BLEND
    blend = dataclasses.replace(blend, alpha=1.0, each=False) if scaled else blend
    outs = [out for of, out in OUTS if of == dtype]
    return dataclasses.replace(case, blend=blend, out=str(rng.choice(outs)) if outs and rng.random() < 0.2 else None)


def samples(case: MatmulCase) -> tuple[tuple[int | None, ...], int] | None:
    """The leading axis of a, which b has as well or not at all."""
    g, axes = case.geometry, len(case.geometry.left)
    if not axes or g.left[0] < 2 or g.scaled or case.blend != NO_BLEND or len(g.right) > axes:
        return None
    shared = len(g.right) == axes
    if shared and g.right[0] not in (1, g.left[0]):
        return None
    return (0, 0 if shared and g.right[0] > 1 else None), 0


FAMILY = family(
    "matmul",
    MatmulCase,
    (OP,),
    cases,
    subjects,
    "a layer",
    strides=(1, 4),
    typical=lambda op, engine, dtype: MatmulCase(op, engine, dtype, "NN", None, Sizes("a layer", 512, 256, 256, (8,))),
    facts=facts,
    arrays=arrays,
    judge=checks.judge_all,
    draw=draw,
    samples=samples,
    slow=conv_cases.SLOW,
    facets=facets,
    bound_as={OP: BOUND},
)
