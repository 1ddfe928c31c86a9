"""What an op may take of the device beside its operands and results: memory, and multiprocessors."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxdnn._src.core import settings


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits a call is under; None is no limit."""

    workspace: int | None = None
    multiprocessors: int | None = None


# JAX keys its tracing and compilation caches on this value, so a jitted function is traced anew under other limits.
_current = jax.make_user_context(Limits())


@contextlib.contextmanager
def limits(*, workspace: int | None = None, multiprocessors: int | None = None) -> Iterator[None]:
    """Limits what the ops that are traced inside, and their derivatives, take of the device.

    Args:
      workspace: bytes of device memory beside operands and results. An engine that states its workspace does not serve
        a call that needs more; `jaxdnn.explain` shows what each states, and the refusal. What the compiler decides
        (engine `xla`) states none and is not held to the limit.
      multiprocessors: how many multiprocessors a kernel is to use, so that another kernel finds room beside it. The
        kernels of engine `hopper` for convolutions use no more: they have so many blocks of threads at most, each with
        many tiles in turn (filter gradients whose blocks work in pairs two at least). Other kernels use all.

    Returns:
      A context manager. A limit that is not given stays what it is outside; of workspace, outside of all contexts, the
      bytes that the environment variable `JAXDNN_WORKSPACE_LIMIT` gives.

    Differentiation: derivatives of a call that was made inside are under its limits, wherever they are taken.

    Numerics: `multiprocessors` changes no bit of a result. `workspace` may change the engine, hence the order of
      additions.

    Raises:
      ValueError: a negative workspace; fewer than one multiprocessor.
      NotImplementedError: a call inside names an engine that needs more workspace.

    Example:
      >>> x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5))
      >>> with dnn.limits(workspace=1 << 20, multiprocessors=100):
      ...     y = dnn.conv(x, w)

    Sources: cuDNN's `workSpaceSizeInBytes` and `CUDNN_ATTR_ENGINE_SM_COUNT_TARGET`; PyTorch has neither by the call.
    """
    _at_least("workspace", workspace, 0)
    _at_least("multiprocessors", multiprocessors, 1)
    given = {"workspace": workspace, "multiprocessors": multiprocessors}
    with _current(dataclasses.replace(current_limits(), **{name: n for name, n in given.items() if n is not None})):
        yield


def current_limits() -> Limits:
    """The limits of the enclosing context."""
    context: Any = _current.value
    if context.workspace is None and settings.workspace() is not None:
        return dataclasses.replace(context, workspace=settings.workspace())
    return context


def limits_of(spec: Any) -> Limits:
    """The limits a call is under; the specs of some ops have none."""
    return getattr(spec, "limits", Limits())


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"`{name}` must be None or an integer of at least {least}, got {value!r}.")
