"""What a family of ops says of itself, by names alone: reading it imports nothing of the family."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a family, the `MANIFEST` of its package. Modules are named from the package on.

    Attributes:
      ops: the public ops, and the module that holds each.
      engines: the modules that register engines, in the order in which engines of equal rank are tried.
      cases: the modules whose `FAMILY` has the cases of ops, for `jaxdnn verify` and the tests.
      timed: the module whose `CASES` `jaxdnn bench` times, under the family's name.
    """

    ops: dict[str, str]
    engines: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    timed: str | None = None
