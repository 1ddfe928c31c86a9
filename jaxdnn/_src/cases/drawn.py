"""Random sizes for the families' random calls: numbers of channels, lengths of axes, batches, layouts, blends."""

import math
from typing import Any

import numpy as np

Generator = np.random.Generator
UNITS = (8, 16, 48, 64, 320)  # most numbers of channels in networks are multiples of one of these
FLOATS = {"f32": 3, "bf16": 4, "f16": 3}
WIDER = FLOATS | {"f64": 1}


def pick(rng: Generator, weights: dict[Any, Any]) -> Any:
    """One of the keys, by its weight."""
    names, shares = list(weights), np.array(list(weights.values()), float)
    return names[int(rng.choice(len(names), p=shares / shares.sum()))]


def between(rng: Generator, low: int, high: int) -> int:
    """A number from low to high whose logarithm is distributed uniformly."""
    return min(high, int(low * np.exp2(rng.uniform(0, math.log2((high + 1) / low)))))


def channels(rng: Generator, most: int = 2560, layout: str = "") -> int:
    """A number of channels, most often a multiple of a unit, else any number; its logarithm is about uniform.

    Of a layout with channel vectors it fills these.
    """
    unit = int(pick(rng, dict.fromkeys(UNITS, 5) | {1: 3}))
    unit = unit if unit <= most else 1
    found = unit * between(rng, 1, max(1, (most if unit > 1 else min(most, 70)) // unit))
    return -(-found // 32) * 32 if "c" in layout else found


def axes(rng: Generator, rank: int, elements: float, most: int = 40) -> tuple[int, ...]:
    """The sizes of axes, each from 1 to `most`, whose product is at most `elements`."""
    sizes = [between(rng, 1, most) for _ in range(rank)]
    while math.prod(sizes) > max(elements, 1):
        longest = int(np.argmax(sizes))
        sizes[longest] = (sizes[longest] + 1) // 2
    return tuple(sizes)


def batch(rng: Generator, elements: float) -> int:
    """A batch of 1 to 64 samples, at most `elements`."""
    return max(1, min(between(rng, 1, 64), int(elements)))


def laid_out(layout: str, n: int, c: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a layout; of vectorised ones, c is a multiple of the vector."""
    letters, _, lanes = layout.partition("c")
    vector = int(lanes or 1)
    known = {"N": n, "C": c // vector, **dict(zip("DHW"[3 - len(sizes) :], sizes, strict=True))}
    return (*(known[letter] for letter in letters), *([vector] if lanes else []))


def images(
    rng: Generator, layout: str, rank: int, c: int, elements: float, of_one: float, most: int = 40
) -> tuple[int, ...]:
    """The shape of images with c channels in a layout: of at most so many elements, and of one image so many."""
    sizes = axes(rng, rank, of_one / c, most)
    return laid_out(layout, batch(rng, elements / (c * math.prod(sizes))), c, sizes)


def layout(rng: Generator, rank: int, *, last: bool) -> str:
    """A layout of `rank` spatial axes; most often with channels last if `last`."""
    space = "DHW"[3 - rank :]
    if last and rng.random() < 0.9:
        return f"N{space}C"
    return str(rng.choice([f"N{space}C", f"NC{space}", f"C{space}N", f"NC{space}c4", f"NC{space}c32"]))


def blend(rng: Generator) -> tuple[float, float]:
    """The factors of a blend: mostly none."""
    return pick(rng, {(1.0, 0.0): 6, (0.5, -2.0): 1, (-0.75, 0.0): 1, (1.3717, -0.6931): 1})
