"""The signatures of public ops: as `help` shows them, and what is said of a call that does not fit them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdnn._src.core import checks
from jaxdnn._src.core.peers import ARGUMENTS, NOTES


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


def priors(signature: inspect.Signature) -> dict[str, str]:
    """The priors that an op takes, each with the name of its beta, which is 0 unless it is given."""
    named = signature.parameters
    betas = {name: "beta" if name == "prior" else "beta_param" for name in named if name.startswith("prior")}
    return {prior: beta for prior, beta in betas.items() if beta in named and named[beta].default == 0}


def unread(betas: Mapping[str, str], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call that gives a prior without its beta, beside which it would not be read."""
    for prior, beta in betas.items():
        if beta not in kwargs and kwargs.get(prior) is not None:
            scales = f"which it scales ({beta}=1 adds it, {beta}=0 leaves it unread)"
            return f"`{beta}` must be given with `{prior}`, {scales}, got {prior} alone."
    return None


def _is_array(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0


def _of_arrays(annotation: str) -> bool:
    return annotation.startswith("ArrayLike")


# Words of annotations whose options take a value of the type.
_WORDS: Mapping[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "PerAxis", "Padding", "float", "Scale"),
    float: ("float", "Scale"),
    str: ("str", "DTypeLike", "Padding", "Activation"),
    tuple: ("Sequence", "tuple", "PerAxis", "Padding", "Activation"),
    list: ("Sequence", "PerAxis", "Padding"),
}


def _admits(annotation: str, value: Any) -> bool:
    """Whether an option so annotated takes values of this type, as far as its words tell."""
    return any(word in annotation for word in _WORDS.get(type(value), ("DTypeLike", "Callable", "Any")))


def misfit(op: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call that gives too much by position or names no argument; None of all other calls."""
    options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    surplus = args[len(required) :]
    if surplus and options:
        left = [p for p in options if p.name not in kwargs]
        named: list[str] = []
        for value in surplus:
            fitting = [p for p in left if p.name not in named and _is_array(value) == _of_arrays(p.annotation)]
            named += [p.name for p in sorted(fitting, key=lambda p: not _admits(p.annotation, value))][:1]
        if not named:
            arrays = ", ".join(f"`{name}`" for name in required)
            return f"`{op}` must be given {arrays} by position and no more, got {len(args)} arguments by position."
        call = ", ".join([*required, *(f"{name}=..." for name in named)])
        return f"Options of `{op}` must be given by keyword, as in {op}({call}), got {len(args)} arguments by position."
    for name in kwargs:
        if name not in signature.parameters:
            names = [p.name for p in options]
            known = [n for n in ARGUMENTS.get(name, ()) if n in names]
            note = NOTES.get((op, name))
            near = f" ({note})" if note else checks.did_you_mean(name, names)
            meant = f" (did you mean {known[0]!r}?)" if known else near
            return f"`{op}` has no argument `{name}`{meant}."
    return None
