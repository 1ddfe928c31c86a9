"""The signatures of public ops: as `help` shows them, and what is said of a call that does not fit them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdnn._src.core import checks
from jaxdnn._src.core.peers import ARGUMENTS

WITHOUT_BETA = (
    "`beta` must be given with `prior`, which it scales (beta=1 adds it, beta=0 leaves it unread), got a prior alone."
)


class Shown(str):
    """The text of an annotation, which `inspect` and `help` show without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shown(function: Callable[..., Any]) -> inspect.Signature:
    """The signature with the names of annotations as they are written, `ArrayLike` for one, not what they stand for."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=Shown(p.annotation)) for p in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=Shown(found.return_annotation))


def blends(signature: inspect.Signature) -> bool:
    """Whether an op takes a prior that counts only with a beta, which is 0 unless it is given."""
    beta = signature.parameters.get("beta")
    return "prior" in signature.parameters and beta is not None and beta.default == 0


def misfit(op: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call that gives too much by position or names no argument; None of all other calls."""
    options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    surplus = args[len(required) :]
    if surplus and options:
        left = [p for p in options if p.name not in kwargs]
        named: list[str] = []
        for value in surplus:
            arrays = getattr(value, "ndim", 0) > 0
            fitting = [p.name for p in left if p.name not in named and p.annotation.startswith("ArrayLike") == arrays]
            named += fitting[:1]
        call = ", ".join([*required, *(f"{name}=..." for name in named)])
        return f"Options of `{op}` must be given by keyword, as in {op}({call}), got {len(args)} arguments by position."
    for name in kwargs:
        if name not in signature.parameters:
            names = [p.name for p in options]
            known = [n for n in ARGUMENTS.get(name, ()) if n in names]
            meant = f" (did you mean {known[0]!r}?)" if known else checks.did_you_mean(name, names)
            return f"`{op}` has no argument `{name}`{meant}."
    return None
