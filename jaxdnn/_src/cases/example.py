"""A call of every op in letters, as the families' manifests write it.

Tests over all ops and `jaxdnn verify --mesh` draw their arrays from it, at sizes of their own.

    conv*  |  NHWC, RSCK, padding=1 -> NHWK  |  N -/+ HW h/+h C +/- K -/+  |  filters add over pixels

The op, and after a hyphen what tells this call from the op's first; an asterisk where all that is computed of small
whole numbers is exact, in whatever order it is added up. Its arguments, of which letters are an array with these axes,
and the axes of its results. What it communicates, forward/backward, where all axes of a letter are sharded over all
devices, or of two letters "N,H" each over one axis of a mesh of two; backward is from cotangents that are sharded as
the results are to gradients that are sharded as the operands are. And why: of what is added up, is looked up, or lies
where.

| letters | axes |
|---|---|
| N, H, W, C | images of H x W pixels with C channels; h, w: half as many pixels |
| K, R, S, P, Q | results of R x S or P x Q taps |
| F | R S C features, of which the channels are the outer factor, sharded if C is |
| T, D, V | tokens of D features, and a vocabulary |
| E, G | the columns of three or four gates of D units each |
| _, ? | an axis of length 1; a result that depends on no operand, and is sharded in any way |

`index(T)` is an array of indices, all 0, `counts(P)` one of numbers, all 2, `shape(NHWC)` a shape, `size(C)` a size.

| sign | collective | why |
|---|---|---|
| - | none | results along the axis are independent of each other |
| h | collective-permute | windows reach over the edge of a device's part, which receives rows of its neighbours |
| + | all-reduce | results, statistics or gradients of what is not sharded are added up over the axis |
| g | all-gather | a device needs the whole axis: the line says for what |
| t | all-to-all | elements that lie side by side in the operand do not in the result |

A number behind a sign says how many of them there are at most, on eight CPUs; without one it is one. A "c" before a
sign says that CPUs alone communicate so; the line says why.
"""

import ast
import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdnn._src import families

SMALL: Mapping[str, Any] = dict(N=2, H=6, W=10, C=16, K=5, R=3, S=3, P=2, Q=2, T=6, D=4, V=7)
LARGE: Mapping[str, Any] = dict(N=8, H=16, W=16, C=32, K=64, R=3, S=3, P=2, Q=2, T=64, D=32, V=64)  # for 8 devices


def shape(axes: str, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sizes of axes, in letters."""
    known = {**sizes, **{a.lower(): sizes[a] // 2 for a in "HW"}, "F": sizes["R"] * sizes["S"] * sizes["C"], "_": 1}
    known |= {"E": 3 * sizes["D"], "G": 4 * sizes["D"]}
    return tuple(known[letter] for letter in axes)


def numbers(seed: int, shape: Sequence[int], whole: bool) -> np.ndarray:
    """Whole numbers of few bits, or reals; positive those of one axis, of which some are variances."""
    rng = np.random.default_rng(seed)
    found = rng.integers(1, 4, shape).astype(np.float64) if whole else rng.uniform(0.5, 2, shape)
    return found * rng.choice((-1, 1), shape) if len(shape) > 1 else found


@dataclasses.dataclass(frozen=True)
class Axes:
    """An argument in letters. kind: "array", "index", "counts", "shape" or "size"."""

    letters: str
    kind: str = "array"

    def value(self, sizes: Mapping[str, Any]) -> Any:
        """The argument, if it is not an array of numbers."""
        found = shape(self.letters, sizes)
        match self.kind:
            case "index":
                known = all(isinstance(n, int) for n in found)  # NumPy knows no symbolic sizes
                return (np if known else jnp).zeros(found, np.int32)
            case "counts":
                return np.full(found, 2, np.int32)
            case "size":
                return found[0]
        return found


@dataclasses.dataclass(frozen=True)
class Example:
    """A line of a manifest.

    Attributes:
      name: the op's, and after a hyphen what tells this call of it from others.
      arguments, options: by position and by name; of `Axes`, or as they are.
      results: of each its axes.
      needs: by letter the signs of what is communicated forward and backward; what a line says of HW holds for each.
      exact: whether what is computed of small whole numbers is exact in any order of additions.
    """

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[str, ...]
    needs: dict[str, tuple[str, str]]
    why: str
    exact: bool

    @property
    def op(self) -> str:
        return self.name.partition("-")[0]

    @property
    def operands(self) -> tuple[str, ...]:
        """The axes of each array of numbers."""
        every = (*self.arguments, *self.options.values())
        return tuple(v.letters for v in every if isinstance(v, Axes) and v.kind == "array")

    @property
    def letters(self) -> str:
        """The letters whose sizes the arguments have."""
        every = (*self.arguments, *self.options.values())
        found = "".join(v.letters for v in every if isinstance(v, Axes))
        found = found.replace("F", "RSC").replace("E", "D").replace("G", "D").replace("_", "")
        return "".join(dict.fromkeys(found.upper()))

    def shapes(self, sizes: Mapping[str, Any] = SMALL) -> list[tuple[Any, ...]]:
        """The shapes of the operands."""
        return [shape(axes, sizes) for axes in self.operands]

    def data(self, sizes: Mapping[str, Any] = SMALL, *, whole: bool = False) -> list[np.ndarray]:
        """Operands, in float64."""
        return [numbers(i, of, whole) for i, of in enumerate(self.shapes(sizes))]

    def bind(self, *operands: Any, sizes: Mapping[str, Any] = SMALL) -> tuple[list[Any], dict[str, Any]]:
        """All arguments, by position and by name, with these operands."""
        left = iter(operands)

        def filled(value: Any) -> Any:
            if not isinstance(value, Axes):
                return value
            return next(left) if value.kind == "array" else value.value(sizes)

        return [filled(v) for v in self.arguments], {name: filled(v) for name, v in self.options.items()}

    def call(self, function: Callable[..., Any], *operands: Any, sizes: Mapping[str, Any] = SMALL) -> Any:
        """The call of a function that takes what the op takes, of these operands."""
        arguments, options = self.bind(*operands, sizes=sizes)
        return function(*arguments, **options)


@ft.cache
def examples() -> dict[str, Example]:
    """The examples of all families, by name."""
    lines = (line for manifest in families.manifests().values() for line in manifest.examples.strip().splitlines())
    return {example.name: example for example in map(read, lines)}


def first() -> dict[str, Example]:
    """One of each op."""
    return {name: example for name, example in examples().items() if name == example.op}


def read(line: str) -> Example:
    """A line; without what the call communicates where nobody asks."""
    name, call, needs, why = [*(part.strip() for part in line.split("|")), "", ""][:4]
    given, _, results = call.partition("->")
    tree: Any = ast.parse(f"f({given})", mode="eval").body
    words = needs.split()
    pairs = [(letters, signs.partition("/")) for letters, signs in zip(words[::2], words[1::2], strict=True)]
    return Example(
        name.rstrip("*"),
        tuple(map(_value, tree.args)),
        {word.arg: _value(word.value) for word in tree.keywords},
        tuple(results.split()) or ("",),  # a scalar has no axes
        {letter: (forward, backward) for letters, (forward, _, backward) in pairs for letter in _each(letters)},
        why,
        name.endswith("*"),
    )


def _each(letters: str) -> Sequence[str]:
    """The letters that are sharded by themselves, or those that are together."""
    return [letters] if "," in letters else letters


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=letters):
            return Axes(letters)
        case ast.Call(func=ast.Name(id=kind), args=[ast.Name(id=letters)]):
            return Axes(letters, kind)
    return ast.literal_eval(node)
