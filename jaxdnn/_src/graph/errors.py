"""The errors of graphs: each names the node or the tensor, the attribute, what was expected and what was got."""

from typing import Any

from jaxdnn._src.core import checks


class GraphError(ValueError):
    """A graph that is not well formed, or a variant pack that does not fit it; one sentence.

    Attributes:
      where: the node or the tensor, by name.
      attribute: the operand, attribute or property that is wrong.
      expected, got: in words, and as it is.
    """

    def __init__(self, where: str, attribute: str, expected: str, got: Any) -> None:
        super().__init__(f"{where}: `{attribute}` must be {expected}, got {checks.shown(got)}.")
        self.where, self.attribute, self.expected, self.got = where, attribute, expected, got

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphError, (self.where, self.attribute, self.expected, self.got)


def flag(where: str, attribute: str, value: Any) -> bool:
    """A truth, checked."""
    if not isinstance(value, bool):
        raise GraphError(where, attribute, "True or False", value)
    return value


class NotOffered(NotImplementedError):
    """No plan implements the whole graph as it was asked for; one line for each plan that declined, and why."""
