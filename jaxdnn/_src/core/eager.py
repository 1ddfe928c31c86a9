"""Calls outside of jit: an op with its static arguments is one compiled program.

Otherwise every call would read its arguments anew, choose an engine, and run a formula operation by operation. The
programs are `jax.jit`'s, which keys them on the types, shardings and devices of operands, on contexts (levels, limits,
meshes), and on JAX's configuration. Here they are keyed on the static arguments, more strictly than by equality: 1, 1.0
and True are three arguments, 0.0 and -0.0 are two.

A program per value suits a stride, not a number that changes from call to call: `data` says of which parameters the
numbers are operands.
"""

import fractions
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core.compat import Tracer

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]
KEPT = 2048  # programs of all ops together, each for any number of shapes; the oldest make room for others
_OPERAND = object()  # in a key, in the place of an operand
_BY_VALUE = {int, bool, fractions.Fraction, type, type(jnp.float32)}

_programs: dict[Any, Function] = {}
_adding = threading.Lock()
_arrays: dict[type, bool] = {}  # whether values of a type are JAX's arrays
_data: dict[str, dict[str, Function]] = {}


def data(**readers: Function) -> Callable[[F], F]:
    """Says what an op's program takes as operands beside arrays.

    By parameter a function of its value, which returns an operand that the op takes in the value's place, or None of a
    value that decides what is computed.
    """

    def declare(function: F) -> F:
        _data[function.__name__] = readers
        return function

    return declare


def program(function: Function) -> Function:
    """The function of (positional arguments, named arguments) that runs an op as a program.

    It raises what the op raises when it is traced, and TypeError for values that are not understood here.
    """
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    takes_arrays = {p.name for p in parameters if np.ndarray in get_args(p.annotation)}
    readers = _data.get(function.__name__, {})

    def read(name: str, value: Any, operands: list[Any]) -> Any:
        """What the key has for an argument."""
        kind = type(value)
        if kind is np.ndarray and not value.dtype.isnative:
            raise TypeError("an array whose bytes a program that was compiled for others would misread")
        known = _arrays.get(kind)
        if known is None:
            known = _is_array(value)
        if known or (kind is np.ndarray and name in takes_arrays and not _is_integer(value)):
            operands.append(value)
            return _OPERAND
        if kind in (list, tuple) and name in takes_arrays and all(v is None or _is_operand(v) for v in value):
            operands.append(value)  # a layer's weights beside another's
            return _OPERAND
        if name in readers and (operand := readers[name](value)) is not None:
            operands.append(operand)
            return _OPERAND
        return _static(value)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands: list[Any] = []
        positional = [read(name, value, operands) for name, value in zip(names, args, strict=len(args) > len(names))]
        named = [(name, read(name, value, operands)) for name, value in kwargs.items()]
        key = function, *positional, *named
        found = _programs.get(key)
        if found is not None:
            return found(*operands)
        args = tuple(e if e is _OPERAND else value for e, value in zip(positional, args, strict=True))
        kwargs = {name: e if e is _OPERAND else kwargs[name] for name, e in named}
        made = _made(function, args, kwargs)
        result = made(*operands)
        _keep(key, made)
        return result

    return run


def _made(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Function:
    """The program of an op with these arguments, among which operands have their places."""

    def run(*operands: Any) -> Any:
        left = iter(operands)
        given = [next(left) if value is _OPERAND else value for value in args]
        return function(*given, **{n: next(left) if value is _OPERAND else value for n, value in kwargs.items()})

    run.__name__ = run.__qualname__ = function.__name__
    return jax.jit(run)


def _keep(key: Any, program: Function) -> None:
    with _adding:
        while len(_programs) >= KEPT:
            del _programs[next(iter(_programs))]
        _programs.setdefault(key, program)


def _is_array(value: Any) -> bool:
    if isinstance(value, Tracer):
        raise TypeError("a traced value outside of its transformation")
    return _arrays.setdefault(type(value), isinstance(value, Array))


def _is_operand(value: Any) -> bool:
    numbers = type(value) is np.ndarray and value.dtype.isnative
    return isinstance(value, Array) or (numbers and not _is_integer(value))


def _is_integer(value: np.ndarray) -> bool:
    """Whether ops may read a NumPy array as a number, of 64 bits whatever JAX's arrays have."""
    return value.ndim == 0 and value.dtype.kind in "iu"


def _static(value: Any) -> Any:
    """What tells a static argument from all others; raises for a value of a type whose equality is not known."""
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind in _BY_VALUE or isinstance(value, np.dtype):
        return kind, value
    if kind is float:
        return kind, value.hex()  # of which zeros have a sign, and NaN is equal to itself
    if kind is tuple or kind is list:
        return kind, *[_static(v) for v in value]
    if isinstance(value, np.generic) or (kind is np.ndarray and _is_integer(value)):
        return kind, value.dtype, value.tobytes()
    raise TypeError("a value that may change, or whose equality is not known")
