"""Pictures of what ops do, drawn when the site is built; their numbers are computed by the library's definitions."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jaxdnn_reference as reference

BLUE, ORANGE, GREY, PALE = "#2a6fbb", "#d9822b", "#9aa3ad", "#e8ecf1"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: what it shows, for those who do not see it, what draws it into a figure, and its size in inches."""

    alt: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (7.2, 2.8)


def write(folder: Path) -> None:
    """Draws them all."""
    import matplotlib.pyplot as plt

    for page, picture in PICTURES.items():
        figure = plt.figure(figsize=picture.size, layout="constrained")
        picture.draw(figure)
        figure.savefig(folder / f"picture-{page}.svg", metadata={"Date": None})
        plt.close(figure)


def _cells(axes: Any, values: np.ndarray, title: str, marked: Any = (), faint: Any = ()) -> None:
    """An image of numbers, of which some places are marked and some are faint."""
    rows, columns = values.shape
    for i in range(rows):
        for j in range(columns):
            pale = (i, j) in faint
            face = ORANGE if (i, j) in marked else PALE if pale else "white"
            axes.add_patch(_patch((j, rows - 1 - i), face))
            colour = "white" if (i, j) in marked else GREY if pale else "black"
            axes.text(j + 0.5, rows - 0.5 - i, f"{values[i, j]:g}", ha="center", va="center", color=colour, fontsize=8)
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(-0.1, rows + 0.1), aspect="equal")
    axes.axis("off")
    axes.set_title(title, fontsize=9)


def _patch(corner: tuple[float, float], face: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, facecolor=face, edgecolor=GREY, linewidth=0.8)


def _conv(figure: Any) -> None:
    x = np.arange(1, 17, dtype=np.float64).reshape(4, 4) % 7
    w = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]], np.float64)
    y = reference.conv(x[None, :, :, None], w[:, :, None, None], padding=1, stride=2)[0, :, :, 0]
    padded = np.pad(x, 1)
    edge = {(i, j) for i in range(6) for j in range(6) if i in (0, 5) or j in (0, 5)}
    window = {(i + 2, j) for i in range(3) for j in range(3)}
    a, b, c = figure.subplots(1, 3, width_ratios=(6, 3, 2))
    _cells(a, padded, "x, with padding 1", window, edge)
    _cells(b, w, "w")
    _cells(c, y, "y, with stride 2", {(1, 0)})


def _pool(figure: Any) -> None:
    x = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]], np.float64)
    dy = np.array([[1, 2], [3, 4]], np.float64)
    batched = x[None, :, :, None]
    y = reference.pool(batched)[0, :, :, 0]
    dx = reference.pool_dgrad(dy[None, :, :, None], batched)[0, :, :, 0]
    a, b, c, d = figure.subplots(1, 4, width_ratios=(4, 2, 2, 4))
    kept = {(i, j) for i, j in zip(*np.nonzero(dx), strict=True)}
    _cells(a, x, "x", kept)
    _cells(b, y, "y: the maxima")
    _cells(c, dy, "dy")
    _cells(d, dx, "dx: to the first maximum", kept)


def _norm(figure: Any) -> None:
    """Which elements share their mean and deviation."""
    names = {
        "batch_norm": lambda n, c, s: c == 1,
        "layer_norm": lambda n, c, s: (n == 1) & (s == 1),
        "instance_norm": lambda n, c, s: (n == 1) & (c == 1),
        "group_norm": lambda n, c, s: (n == 1) & (c >= 2),
    }
    for axes, (name, shared) in zip(figure.subplots(1, 4), names.items(), strict=True):
        n, s = 3, 4
        for i in range(n):
            for k in range(s):
                for c in range(4):
                    x, y = i * 5 + c, s - 1 - k
                    axes.add_patch(_patch((x, y), BLUE if shared(i, c, k) else "white"))
            axes.text(i * 5 + 2, -0.9, f"n = {i}", ha="center", fontsize=7)
        axes.set(xlim=(-0.2, 14.2), ylim=(-1.5, 4.2), aspect="equal")
        axes.axis("off")
        axes.set_title(name, fontsize=9, family="monospace")
    figure.supxlabel("columns: the channels of an image; rows: its pixels", fontsize=8)


def _activation(figure: Any) -> None:
    x = np.linspace(-4, 4, 321)
    curves = ("relu", "gelu", "swish", "elu", "softplus", "tanh", "sigmoid", "hard_swish")
    value, slope = figure.subplots(1, 2, sharex=True)
    for name in curves:
        value.plot(x, reference.activation(x, activation=name), label=name, linewidth=1.4)
        slope.plot(x, reference.activation_dgrad(np.ones_like(x), x, activation=name), linewidth=1.4)
    value.set(title="value", ylim=(-1.3, 4))
    slope.set(title="derivative", ylim=(-0.25, 1.25))
    value.legend(fontsize=7, loc="upper left", ncols=2, frameon=False)
    _plain(value, slope)


def _attention(figure: Any) -> None:
    n = 8
    i, j = np.mgrid[:n, :n]
    kinds = {
        "causal=True": j <= i,
        "causal=True, window=2": (j <= i) & (i - j <= 2),
        "query_segments": (i < 5) == (j < 5),
        "key_lengths = 5": j < 5,
    }
    for axes, (name, seen) in zip(figure.subplots(1, 4), kinds.items(), strict=True):
        axes.pcolormesh(seen, cmap=_two(), edgecolors=GREY, linewidth=0.4, vmin=0, vmax=1)
        axes.set(aspect="equal", xticks=[], yticks=[], xlabel="keys", ylabel="queries")
        axes.invert_yaxis()
        axes.set_title(name, fontsize=7.5, family="monospace")


def _two() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap(["white", BLUE])


def _resample(figure: Any) -> None:
    x = np.array([1.0, 3.0, 2.0, 4.0, 0.5])
    axes = figure.subplots()
    places = (np.arange(5) + 0.5) / 5
    axes.plot(places, x, "o", color="black", label="x")
    for method, colour in (("nearest", GREY), ("linear", BLUE), ("cubic", ORANGE)):
        y = reference.resample(x[None, :, None], scale=8, method=method, layout="NWC")[0, :, 0]
        axes.plot((np.arange(40) + 0.5) / 40, y, "-", color=colour, label=f'method="{method}"', linewidth=1.4)
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower left")
    axes.set(xticks=[], ylim=(-0.8, 4.6), title="5 pixels resampled to 40")
    _plain(axes)


def _ctc(figure: Any) -> None:
    """The lattice of the labels "a b" in five steps."""
    labels = ["blank", "a", "blank", "b", "blank"]
    axes = figure.subplots()
    for t in range(5):
        for s in range(5):
            reached = s <= 2 * t + 1 and 4 - s <= 2 * (4 - t) + 1
            axes.plot(t, -s, "o", color=BLUE if reached else PALE, markersize=9)
            for to in (s, s + 1, s + 2) if s % 2 else (s, s + 1):
                fits = to <= 2 * (t + 1) + 1 and 4 - to <= 2 * (3 - t) + 1
                if t < 4 and to < 5 and reached and fits:
                    axes.plot((t, t + 1), (-s, -to), "-", color=GREY, linewidth=0.9, zorder=0)
    axes.set(yticks=[-s for s in range(5)], yticklabels=labels, xticks=range(5), xlabel="step")
    axes.set_title("Paths of the labels a b in five steps: the loss adds up their probabilities", fontsize=9)
    axes.spines[:].set_visible(False)


def _plain(*every: Any) -> None:
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(9)


PICTURES = {
    "activation": Picture("values and derivatives of eight activations", _activation),
    "attention": Picture("which keys a query sees: four masks", _attention, (7.2, 2.2)),
    "conv": Picture("an image with padding, a filter of 3 by 3, and the result with stride 2", _conv),
    "ctc": Picture("the lattice of two labels in five steps", _ctc),
    "norm": Picture("which elements of a batch share a mean, in four normalisations", _norm, (7.2, 1.4)),
    "pool": Picture("max-pooling of 4 by 4 pixels, and its gradient", _pool, (7.2, 2.0)),
    "resample": Picture("five pixels resampled to forty, by three methods", _resample),
}
