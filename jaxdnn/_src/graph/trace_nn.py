"""Activations of jax.nn in a program, found by what each of them is traced to."""

import functools as ft
from collections.abc import Mapping
from typing import Any

import jax

from jaxdnn._src.core.compat import Literal
from jaxdnn._src.graph.tensors import WIDE

FUNCTIONS = {
    "GELU_FWD": ft.partial(jax.nn.gelu, approximate=False),
    "GELU_APPROX_TANH_FWD": ft.partial(jax.nn.gelu, approximate=True),
    "SWISH_FWD": jax.nn.silu,
    "SOFTPLUS_FWD": jax.nn.softplus,
    "ELU_FWD": jax.nn.elu,
}


@ft.cache
def _programs(shape: tuple[int, ...], dtype: str) -> Mapping[str, Any]:
    """The program of each mode, for an array."""
    aval = jax.ShapeDtypeStruct(shape, dtype)
    return {mode: jax.make_jaxpr(function)(aval).jaxpr for mode, function in FUNCTIONS.items()}


def found(jaxpr: Any) -> dict[int, tuple[int, str, Any]]:
    """By the position of its last equation: how many a mode has, the mode, and the variable of its argument."""
    result: dict[int, tuple[int, str, Any]] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        aval: Any = eqn.outvars[0].aval if eqn.outvars else None
        if getattr(aval, "dtype", None) is None or aval.dtype.name not in WIDE:
            continue
        for mode, program in _programs(tuple(aval.shape), aval.dtype.name).items():
            count = len(program.eqns)
            x = _matched(program, jaxpr, position)
            if x is not None:
                result[position + count - 1] = count, mode, x
                break
    return result


def _matched(program: Any, jaxpr: Any, position: int) -> Any:
    """The variable of which the equations from a position on are a program's; None if they are not."""
    ours = jaxpr.eqns[position : position + len(program.eqns)]
    names: dict[Any, Any] = {}
    if len(ours) < len(program.eqns):
        return None
    for a, b in zip(program.eqns, ours, strict=True):
        if a.primitive is not b.primitive or _params(a) != _params(b) or len(a.invars) != len(b.invars):
            return None
        for left, right in zip(a.invars, b.invars, strict=True):
            if isinstance(left, Literal) or isinstance(right, Literal):
                if not (isinstance(left, Literal) and isinstance(right, Literal) and left.val == right.val):
                    return None
            elif left in names:
                if names[left] is not right:
                    return None
            elif left is program.invars[0]:
                names[left] = right
            else:
                return None
        names |= zip(a.outvars, b.outvars, strict=True)
    x, inner = names.get(program.invars[0]), {v for eqn in ours[:-1] for v in eqn.outvars}
    if x is None or x.aval.shape != program.invars[0].aval.shape or x.aval.dtype != program.invars[0].aval.dtype:
        return None
    read = {v for eqn in jaxpr.eqns if eqn not in ours for v in eqn.invars if not isinstance(v, Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    return None if inner & read else x


def _params(eqn: Any) -> str:
    """An equation's parameters in words; those of functions that are kept by name, such as jvp, are left out."""
    return str({k: v for k, v in eqn.params.items() if not callable(v) or hasattr(v, "jaxpr")})
