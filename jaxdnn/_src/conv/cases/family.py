"""The convolutions: their matrix, and what the determinism procedures run on."""

import dataclasses
import functools as ft
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxdnn_reference as reference
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject
from jaxdnn._src.conv.cases import case as conv_cases
from jaxdnn._src.conv.cases import checks, data, draw
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.conv.cases.geometries import NO_BLEND, Geometry
from jaxdnn._src.core import windows

# Large enough that XLA splits it among a CPU's threads.
GEOMETRY = Geometry("determinism", 8, (24, 20), 16, 32, (3, 3), (1, 2), ((1, 0), (2, 1)))
# The procedures run on a depthwise convolution as well, for engines that have other kernels for it.
DEPTHWISE = Geometry("depthwise", 8, (24, 20), 32, 32, (5, 3), (1, 2), ((1, 0), (2, 1)), groups=32)
NARROW = ("hopper",)
DTYPES = ("f32", "bf16", "int8")
# A layer of an ordinary network, whose sizes suit every engine: what an engine says of it is what it says in general.
TYPICAL = Geometry("a 3 x 3 layer", 8, (56, 56), 64, 64, (3, 3), padding=1)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject]:
    """One for every dtype that the engine serves, of each of its kernels."""
    geometries = (GEOMETRY, DEPTHWISE) if engine in NARROW else (GEOMETRY,)
    for geometry, dtype in itertools.product(geometries, DTYPES[extent == "quick" :]):
        case = Case(op, engine, dtype, "NHWC", None, geometry, out="int32" if dtype == "int8" else None)
        declared = checks.facts(case)
        if declared.refusal is None:
            yield _subject(case, declared.level, seed)


def _subject(case: Case, level: str, seed: int) -> Subject:
    operands, _ = data.arrays(case, "normal", seed, checks.EXACT)
    if case.dtype != "int8":
        # float32's 24 bits and a spread of magnitudes, so that a change of order changes bits.
        operands = tuple((v.astype(np.float32) * np.exp2(np.sin(np.arange(v.size)).reshape(v.shape))) for v in operands)
        operands = tuple(v.astype(case.in_dtype) for v in operands)
    axis = windows.layout(case.layout).batch
    return Subject(
        case.op,
        case.engine,
        case.dtype,
        level,
        lambda batch: dataclasses.replace(case, geometry=dataclasses.replace(case.geometry, batch=batch)).function(),
        operands,
        tuple(axis if role in "xy" else None for role in case.roles),
        axis if case.result_role in "xy" else None,
        definition=ft.partial(_definition, case, operands),
        variant="" if case.geometry is GEOMETRY else case.geometry.name,
    )


def _definition(case: Case, operands: tuple[np.ndarray, ...]) -> np.ndarray:
    op = getattr(reference, case.op)
    arguments = case.arguments() | {"out_dtype": case.out_dtype}
    return op(*operands, *case.sizes_argument(), **arguments, arithmetic="ordered")


def samples(case: Case) -> tuple[tuple[int | None, ...], int] | None:
    """The batch's axis of images; a filter's gradient is of all."""
    axis = windows.layout(case.layout).batch
    if case.result_role not in "xy" or case.geometry.batch < 2 or case.blend != NO_BLEND:
        return None
    return tuple(axis if role in "xy" else None for role in case.roles), axis


def facets(case: Case) -> set[Any]:
    """A dtype, a layout, a result's dtype, no batch and one of one, a mode, a prior that is not read, a relu before; of
    kernels every geometry."""
    g, unread = case.geometry, case.blend.prior and case.blend.beta == 0
    geometry = g.name if case.engine == "hopper" else ""
    return {
        case.dtype,
        case.layout,
        ("out", case.out),
        min(g.batch, 2),
        g.mode,
        ("unread", unread),
        ("relu", case.blend.relu),
        geometry,
    }


FAMILY = family(
    "conv",
    Case,
    conv_cases.OPS,
    conv_cases.cases,
    subjects,
    TYPICAL.name,
    strides=(1, 6),
    typical=lambda op, engine, dtype: Case(op, engine, dtype, "NHWC", None, TYPICAL),
    facts=checks.facts,
    arrays=data.arrays,
    judge=checks.judge_all,
    draw=draw.draw,
    leads=draw.LEADS,
    samples=samples,
    slow=conv_cases.SLOW,
    facets=facets,
    bound_as={"conv_transpose": "conv_dgrad"},
)
