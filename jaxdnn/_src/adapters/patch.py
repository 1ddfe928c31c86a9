"""The context in which programs written with lax, jax.nn or Flax use this library's ops.

lax's functions end in a primitive's `bind`, which is what is replaced of them: so it does not matter under which name,
or since when, a program holds `lax.conv_general_dilated`. Flax's NNX layers, for example, keep it since they were made.
jax.nn's functions are replaced under their names, in jax.nn and in every module that has imported them from there.
"""

import collections
import contextlib
import dataclasses
import functools as ft
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxdnn._src.adapters import convolution, neural, pooling
from jaxdnn._src.adapters.calls import refused
from jaxdnn._src.core import checks, engines
from jaxdnn._src.core.unpatched import is_unpatched, unpatched


class Call(NamedTuple):
    """Calls from one place of a program with operands of the same types.

    Attributes:
      function: the name of JAX's function.
      operands: their dtypes and shapes.
      place: the module and the line that call it, the nearest outside of JAX, Flax, Equinox and this library.
      reason: None, or why it was left to JAX.
    """

    function: str
    operands: tuple[str, ...]
    place: str
    reason: str | None = None

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.function}({', '.join(self.operands)}) at {self.place}{why}"


class Patched(contextlib.ContextDecorator):
    """What `patch` returns: a context manager and decorator, which lists the calls that are traced inside."""

    def __init__(self, precision: str | None, *, importers: bool = True) -> None:
        self.precision = precision
        self._importers = importers  # whether jax.nn's functions are replaced in modules that have imported them, too
        self.replaced: collections.Counter[Call] = collections.Counter()
        self.left: collections.Counter[Call] = collections.Counter()
        self._counting = threading.Lock()
        self._entered = threading.local()  # of each thread, what leaving the context has to undo

    def __enter__(self) -> "Patched":
        _install(self._importers)
        outer: _Active | None = _active.value  # type: ignore[assignment]
        lists = (*(p for p in (outer.lists if outer else ()) if p is not self), self)
        context: Any = _active(_Active(self.precision, lists))
        context.__enter__()
        self._stack().append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        if not (stack := self._stack()):
            raise RuntimeError("A context of `patch` must be left by the thread that entered it, once for each entry.")
        try:
            stack.pop().__exit__(*error)
        finally:
            _uninstall()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_one(function) for is_one in later):
            expected = "no generator or coroutine, whose body runs when the context has been left"
            raise TypeError(f"`function` must be {expected}, got {function.__qualname__}.")
        return super().__call__(function)

    def _stack(self) -> list[Any]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack

    def _list(self, call: Call) -> None:
        with self._counting:
            (self.replaced if call.reason is None else self.left)[call] += 1

    def __str__(self) -> str:
        lines = []
        for what, calls in (("replaced by jaxdnn", self.replaced), ("left to JAX", self.left)):
            with self._counting:
                found = sorted(calls.items(), key=lambda item: str(item[0]))
            lines.append(f"{sum(count for _, count in found)} {what}")
            lines += [f"  {count} x {call}" for call, count in found]
        return "\n".join(lines)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class _Active:
    """What the enclosing contexts ask for; equal where programs are traced alike, whoever lists their calls."""

    precision: str | None
    lists: tuple[Patched, ...] = dataclasses.field(compare=False)


# JAX keys its tracing and compilation caches on this value, so a jitted function is traced anew inside and outside.
_active = jax.make_user_context(None)


def patch(*, precision: str | None = None) -> Patched:
    """Replaces functions of lax and jax.nn by this library's, in programs that are traced inside.

        with dnn.patch() as patched:
            y = model(x)
        print(patched)

    Replaced are `lax.conv_general_dilated` and what is made of it (`lax.conv`, `lax.conv_transpose`, convolutions of
    Flax and Equinox), `lax.reduce_window` of maxima, minima and sums (pooling), under whatever name a program has them,
    and `jax.nn.dot_product_attention`, `jax.nn.softmax` and `jax.nn.log_softmax` where they are called by these names,
    in jax.nn or in a module that imported them (`from jax.nn import softmax`, `flax.linen.softmax`). They become the
    functions of `jaxdnn.lax_like`. What these refuse is left to JAX, and listed with the reason. Not seen, and so in
    neither list, is a function of jax.nn under another name, or in an object: `nnx.Sequential(layer, nnx.softmax)`.

    Args:
      precision: None multiplies float32 in convolutions exactly. "tf32" lets it be cut to TF32, as lax itself does on
        GPUs, unless the program asks for `jax.lax.Precision.HIGHEST`. (Also on CPUs, where lax does not.)

    Returns:
      A context manager, which may also decorate functions and be entered again, within itself and in several threads.
      It acts on the thread that enters it. Contexts within one another are left in reverse order, as those of JAX, so a
      generator or coroutine should not yield or await inside. `replaced` and `left` count calls
      (`collections.Counter`), each with its function, operands, place in the program, and the reason for which it was
      left; it prints as text. A call is counted when it is traced: a jitted function that was traced inside before is
      neither traced nor counted again. Functions traced outside are traced anew inside, and the other way round.
      Contexts within one another all count.

    Differentiation: of what is replaced, derivatives are this library's, wherever they are taken. Those of what is left
      are JAX's; convolutions in them that are traced inside are replaced or left like others.

    Numerics: those of `jaxdnn.lax_like`. Levels that `determinism` requires hold for what is replaced; what no engine
      guarantees at the level is left to JAX, which guarantees none: see `left`.

    Raises:
      ValueError: an unknown precision. Within, what JAX itself raises.

    Example:
      >>> x, w = jnp.ones((1, 2, 5, 4)), jnp.ones((6, 2, 3, 3))
      >>> with dnn.patch() as patched:
      ...     y = jax.lax.conv(x, w, (1, 1), "SAME")
      >>> patched.replaced.total(), patched.left.total()
      (1, 0)

    Sources: PyTorch's `torch.backends` choose among libraries in the same place; JAX has no such choice.
    """
    return Patched(checks.choice("precision", precision, (None, "tf32")))


# ---- what is replaced ------------------------------------------------------------------------------------------------


class _Target(NamedTuple):
    """An attribute that is replaced: whose, its name, JAX's name of the function, and what serves instead.

    `serve` takes the precision that the context asks for, then what the attribute takes.
    """

    owner: Any
    attribute: str
    function: str
    serve: Callable[..., Any]


def _convolution(wanted: str | None, lhs: Any, rhs: Any, /, **parameters: Any) -> Any:
    if unknown := set(parameters) - set(inspect.signature(convolution.conv_general_dilated).parameters):
        raise refused(min(unknown), "unknown to JAX", parameters[min(unknown)])
    asked = parameters.get("precision")
    exact = asked is not None and lax.Precision.HIGHEST in (asked if isinstance(asked, tuple) else (asked,))
    if wanted == "tf32" and not exact:
        parameters["precision"] = convolution.TF32
    return convolution.conv_general_dilated(lhs, rhs, **parameters)


def _of_windows(computation: Any, first: Callable[[Any], Any]) -> Callable[..., Any]:
    def serve(_: str | None, operand: Any, /, **parameters: Any) -> Any:
        return pooling.reduce_window(operand, first(np.dtype(operand.dtype)), computation, **parameters)

    return serve


def _unknown_windows(_: str | None, /, *operands: Any, **parameters: Any) -> Any:
    expected = "`computation` must be jax.lax.max, jax.lax.min or jax.lax.add, and `init_value` its identity,"
    raise NotImplementedError(f"{expected} known when traced, to be served by jaxdnn, got others.")


def _under_its_name(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, /, *args, **kwargs: function(*args, **kwargs)


_TARGETS = (
    _Target(lax.conv_general_dilated_p, "bind", "conv_general_dilated", _convolution),
    _Target(
        lax.reduce_window_max_p,
        "bind",
        "reduce_window",
        _of_windows(lax.max, lambda t: np.array(np.iinfo(t).min, t) if t.kind in "iu" else -np.inf),
    ),
    _Target(
        lax.reduce_window_min_p,
        "bind",
        "reduce_window",
        _of_windows(lax.min, lambda t: np.array(np.iinfo(t).max, t) if t.kind in "iu" else np.inf),
    ),
    _Target(lax.reduce_window_sum_p, "bind", "reduce_window", _of_windows(lax.add, lambda t: 0)),
    _Target(lax.reduce_window_p, "bind", "reduce_window", _unknown_windows),
    *(
        _Target(jax.nn, name, name, _under_its_name(getattr(neural, name)))
        for name in ("dot_product_attention", "softmax", "log_softmax")
    ),
)


def _replacement(target: _Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """Calls this library's function where a context is active, and the original for what is refused or elsewhere."""

    @ft.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        active: _Active | None = _active.value  # type: ignore[assignment]
        if active is None or is_unpatched() or engines.is_called():
            return original(*args, **kwargs)
        reason = None
        try:
            found = target.serve(active.precision, *args, **kwargs)
        except NotImplementedError as error:
            reason = str(error)
            with unpatched():  # outside of jit JAX binds it once more, in a program of its own
                found = original(*args, **kwargs)
        listed = Call(target.function, _operands([*args, *kwargs.values()]), _place(), reason)
        for each in active.lists:
            each._list(listed)
        return found

    return call


_changing = threading.Lock()
_contexts = 0  # that are entered, in all threads
_importers_too = False  # whether any of these replaces what modules have imported
_replaced: list[tuple[_Target, bool, Any, Any]] = []  # with whether the owner itself had it, the original, and ours


def _install(importers: bool) -> None:
    global _contexts, _importers_too
    with _changing:
        _contexts += 1
        if _contexts == 1:
            for target in _TARGETS:
                original = getattr(target.owner, target.attribute)
                _replace(target, original, _replacement(target, original))
        if importers and not _importers_too:
            _importers_too = True
            for target, _, original, ours in [each for each in _replaced if each[0].owner is jax.nn]:
                for module in _modules_with(target.attribute, original):
                    _replace(target._replace(owner=module), original, ours)


def _replace(target: _Target, original: Any, ours: Any) -> None:
    _replaced.append((target, target.attribute in vars(target.owner), original, ours))
    setattr(target.owner, target.attribute, ours)


def _modules_with(name: str, function: Any) -> list[ModuleType]:
    """The modules, but for JAX's and this library's, in which the name stands for the function."""
    theirs = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    names = [ModuleType.__getattribute__(m, "__dict__") for m in theirs]  # without importing what is imported lazily
    return [
        module
        for module, held in zip(theirs, names, strict=True)
        if held.get(name) is function and str(held.get("__name__")).partition(".")[0] not in ("jax", "jaxdnn")
    ]


def _uninstall() -> None:
    """What others have replaced meanwhile stays; ours, which theirs may call, does nothing outside of a context."""
    global _contexts, _importers_too
    with _changing:
        _contexts -= 1
        if _contexts:
            return
        _importers_too = False
        for target, had, original, ours in _replaced:
            if vars(target.owner).get(target.attribute) is not ours:
                continue
            if had:
                setattr(target.owner, target.attribute, original)
            else:
                delattr(target.owner, target.attribute)
        _replaced.clear()


# ---- what is listed --------------------------------------------------------------------------------------------------

# Their layers call lax from a few lines each, which do not tell one layer of a program from another.
_NOT_THE_PROGRAM = ("jax", "jaxdnn", "flax", "equinox")


def _operands(args: Iterable[Any]) -> tuple[str, ...]:
    arrays = (x for x in args if hasattr(x, "dtype") and hasattr(x, "shape"))
    return tuple(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in arrays)


def _place() -> str:
    """The module and the line of the nearest frame of the program."""
    frame = sys._getframe(1)
    while frame is not None and _module(frame).partition(".")[0] in _NOT_THE_PROGRAM:
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{_module(frame)}:{frame.f_lineno}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))
