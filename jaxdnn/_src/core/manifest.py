"""What a family of ops says of itself, by names alone: reading it imports nothing of the family."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Ops:
    """Public ops that share a line of the table of ops.

    Attributes:
      cudnn: what cuDNN has for them.
      level: the strongest determinism level that they can be asked for, in words.
      names: the ops, apart by spaces.
    """

    cudnn: str
    level: str
    names: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a family, the `MANIFEST` of its package. Modules are named from the package on.

    Attributes:
      ops: the public ops.
      examples: a call of each op, and what it communicates on a mesh, in the letters of `cases.example`.
      engines: the modules that register engines, in the order in which engines of equal rank are tried.
      cases: the modules whose `FAMILY` has the cases of ops, for `jaxdnn verify` and the tests.
      timed: the module whose `CASES` `jaxdnn bench` times, under the family's name.
    """

    ops: tuple[Ops, ...]
    examples: str
    engines: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    timed: str | None = None
