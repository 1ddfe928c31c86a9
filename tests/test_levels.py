"""Levels kept by every op that promises one, forward and backward: alone and in the batch, among others, and on meshes.

The calls are the examples of the manifests, and blends: others than those of the families' cases, which `jaxdnn verify`
puts to the same procedures.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases.example import LARGE, Example, examples, read
from jaxdnn._src.cases.subject import Subject, gradient, strongest
from jaxdnn._src.core.determinism import is_fixed, satisfies
from jaxdnn.verify import levels

ODD = {**LARGE, "H": 6, "W": 10, "C": 24}  # products with the inverse of these are rounded
CALLS = {name: called for name, called in examples().items() if "N" in "".join(called.operands)}
BLEND = "alpha=0.3, beta=0.7, prior"
FURTHER = (
    f"batch_norm_inference | NHWC, C, C, scale=C, bias=C, {BLEND}=NHWC -> NHWC",
    'batch_norm_inference | NHWC, C, C, scale=C, bias=C, activation="gelu" -> NHWC',
    'conv | NHWC, RSCK, bias=K, padding="SAME", activation="swish", alpha=0.3 -> NHWC',
    'dropout | NHWC, 7, rate=0.3, bias=C, activation="gelu" -> NHWC',
    f'activation | NHWC, activation="tanh", {BLEND}=NHWC -> NHWC',
    f"softmax | NHWC, {BLEND}=NHWC -> NHWC",
    f"softmax_dgrad | NHWC, NHWC, {BLEND}=NHWC -> NHWC",
    f'pool | NHWC, mode="lp", p=3.0, {BLEND}=NhwC -> NHWC',
    f"lrn | NHWC, {BLEND}=NHWC -> NHWC",
    f"transform | NHWC, {BLEND}=NHWC -> NHWC",
    'op_tensor | NHWC, NHWC, op="mul", alpha1=0.3, alpha2=-1.7, beta=0.7, prior=NHWC -> NHWC',
)
ONCE_BROKEN = (  # whose bits depended on a mesh, on jit or on the batch
    'reduce | NHWC, op="avg", axis=(1, 2, 3), alpha=0.3 -> N',
    'pool | NHWC, mode="average", alpha=0.3 -> NHWC',
    "lrn | NHWC, n=3, lrn_alpha=0.5 -> NHWC",
    "divisive_norm | NHWC -> NHWC",
    "lp_normalize | NHWC -> NHWC",
)


def subject_of(called: Example, dtype: str, sizes: Mapping[str, int]) -> Subject:
    """The call, at the strongest level that it can be traced at; of its results those of each image."""
    operands = tuple(v.astype(dtype if v.ndim > 1 else "float32") for v in called.data(sizes))

    def function(batch: int) -> Any:
        def run(*arrays: Any) -> list[Any]:
            results = jax.tree.leaves(called.call(getattr(dnn, called.op), *arrays, sizes={**sizes, "N": batch}))
            return [y for y, axes in zip(results, called.results, strict=True) if "N" in axes]

        return run

    where = lambda axes: axes.index("N") if "N" in axes else None
    out = next((where(axes) for axes in called.results if "N" in axes), None)
    made = Subject(called.op, "any", dtype, "portable", function, operands, tuple(map(where, called.operands)), out)
    return dataclasses.replace(made, declared=strongest(made)) if out is not None else made


def faults(subject: Subject, *procedures: str) -> Iterator[str]:
    for procedure in (*procedures, *(("mesh",) if satisfies(subject.declared, "mesh_invariant") else ())):
        trial = levels.trial(subject, subject.declared, procedure, "quick")
        if trial.status == "failed":
            yield f"{trial.id} at {subject.declared}: {trial.message}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("line", [*FURTHER, *ONCE_BROKEN, *CALLS])
def test_levels_are_kept(line: str, dtype: str):
    made = subject_of(CALLS[line], dtype, LARGE) if line in CALLS else subject_of(read(line), dtype, ODD)
    if made.out_axis is None or not is_fixed(made.declared):
        assert line not in ONCE_BROKEN
        pytest.skip("no level promises bits of what this is to an image")
    # XLA joins the operations before and after what an op hands on as it is: no fault of unpooling, say.
    company = () if line in CALLS else ("company",)
    assert not list(faults(gradient(made) or made, "alone", *company))
