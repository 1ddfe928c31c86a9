"""Plots of `benchmarks/results`, drawn when the site is built, each with its device, date and command below it."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docs.site import RESULTS
from docs.site.pictures import BLUE, GREY, ORANGE

NETWORKS = {
    "resnet50": "ResNet-50",
    "convnext": "ConvNeXt-T",
    "vit": "ViT-B/16",
    "unet": "U-Net blocks",
    "efficientnet": "EfficientNet-B0",
    "unet3d": "3-D U-Net",
}
CONVOLUTIONS = ("resnet50", "fused", "depthwise", "grouped", "dilated", "conv3d", "transposed")
MEMORY_BOUND = ("pool", "norm", "softmax", "activation", "dropout", "tensor")


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of one results file: its title, what draws it, and what has to be known to read it."""

    file: str
    alt: str
    draw: Callable[[Any, dict[str, Any]], None]
    text: str
    height: float = 3.0


def load(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def ours(row: dict[str, Any]) -> float:
    """The time of this library's fastest engine in a row."""
    return min(ms for name, ms in row["ms"].items() if name.startswith("jaxdnn"))


def gain(row: dict[str, Any]) -> float | None:
    """The time of the fastest peer over ours; None in a row without a peer."""
    peers = [ms for name, ms in row["ms"].items() if not name.startswith("jaxdnn")]
    return min(peers) / ours(row) if peers else None


def summary(gains: list[float]) -> str:
    """Geometric mean, lowest and highest."""
    return f"{statistics.geometric_mean(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})" if gains else ""


def source(file: str) -> str:
    """Device, date and command of a file, in words, with a link to it from a page of `docs/generated`."""
    found = load(file)
    device, date = found["device"], found["date"][:10]
    return f"{device}, {date}, `{found['command']}` ([the file](../../benchmarks/results/{file}.json))"


def write(folder: Path) -> None:
    """Draws them all, and beside each the Markdown that shows it."""
    import matplotlib.pyplot as plt

    for name, plot in PLOTS.items():
        figure = plt.figure(figsize=(7.2, plot.height), layout="constrained")
        plot.draw(figure.subplots(), load(plot.file))
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        caption = f"{plot.text} {source(plot.file)}."
        lines = [f"![{plot.alt}]({name}.svg)", "", ":::{container} caption", caption, ":::", ""]
        (folder / f"{name}.md").write_text("\n".join(lines))


def training() -> dict[str, dict[str, float]]:
    """Milliseconds of a training step, by network and implementation."""
    found: dict[str, dict[str, float]] = {}
    for row in load("train_nvidia_h200")["rows"]:
        found.setdefault(row["network"], {})[row["implementation"]] = row["wall_ms"]
    return found


def _train(axes: Any, results: dict[str, Any]) -> None:
    steps = training()
    kinds = {"jaxdnn": BLUE, "lax": GREY, "torch.compile": ORANGE}
    end = 2 * max(times["jaxdnn"] for times in steps.values())  # a longer bar is cut here, and has its number
    for place, times in enumerate(steps.values()):
        for k, (kind, colour) in enumerate(kinds.items()):
            if kind in times:
                bar = axes.barh(place + (k - 1) * 0.27, min(times[kind], end), 0.25, color=colour)
                axes.bar_label(bar, [f"{times[kind]:.1f}"], fontsize=7, padding=2)
    for kind, colour in kinds.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.set(yticks=range(len(steps)), yticklabels=[NETWORKS.get(n, n) for n in steps], xlabel="ms a step")
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)


def _gains(axes: Any, named: dict[str, list[float]]) -> None:
    """A row of points a name, of each the peer's time over ours."""
    for place, values in enumerate(named.values()):
        below = [v for v in values if v < 1]
        axes.plot(values, [place] * len(values), "o", color=BLUE, markersize=4, alpha=0.55)
        axes.plot(below, [place] * len(below), "o", color=ORANGE, markersize=4)
        if len(values) > 1:
            axes.plot(statistics.geometric_mean(values), place, "|", color="black", markersize=14, markeredgewidth=2)
    axes.axvline(1, color=GREY, linewidth=0.9, zorder=0)
    axes.set(yticks=range(len(named)), yticklabels=list(named), xscale="log")
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if t <= 1.1 * max(max(v) for v in named.values())]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="the fastest peer's time over ours (right of 1: ours is faster)", ylim=(len(named) - 0.5, -0.5))
    _plain(axes)


def by_pass(rows: list[dict[str, Any]], label: Callable[[dict[str, Any]], str]) -> dict[str, list[float]]:
    """The gains of rows that have a peer, by their labels."""
    found: dict[str, list[float]] = {}
    for row in rows:
        value = gain(row)
        if value is not None:
            found.setdefault(label(row), []).append(value)
    return found


def _by_family_and_pass(axes: Any, results: dict[str, Any]) -> None:
    _gains(axes, by_pass(results["rows"], lambda row: f"{row['family']}, {row['pass']}"))


def _by_case(axes: Any, results: dict[str, Any]) -> None:
    _gains(axes, by_pass(results["rows"], lambda row: f"{row['case']}, {row['pass']}"))


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8)


def _each() -> Iterator[tuple[str, Plot]]:
    text = "Training steps (bfloat16: forward, backward, SGD) of the same model, no engine named; shorter is better."
    text += " Of lax's 3-D U-Net, whose bar is cut, four of cuDNN's convolutions take 536 ms."
    yield "train", Plot("train_nvidia_h200", "milliseconds of training steps of six networks", _train, text)
    text = "bfloat16; engine `hopper`, named; a point a layer and pass, the bar their geometric mean; peers are XLA "
    text += "(cuDNN, autotuned) and PyTorch, in one process."
    yield "conv", Plot("conv_nvidia_h200", "gains of convolutions over peers", _by_family_and_pass, text, 5.0)
    text = "bfloat16; a point a case, the bar their geometric mean; peers are XLA and PyTorch, in one process."
    for family in MEMORY_BOUND:
        alt = f"gains of {family} over peers"
        height = 1.2 + 0.25 * len(by_pass(load(f"{family}_nvidia_h200")["rows"], lambda r: r["family"] + r["pass"]))
        yield family, Plot(f"{family}_nvidia_h200", alt, _by_family_and_pass, text, height)
    text = (
        "bfloat16; as many passes of the benchmark as its 75 seconds took; peers are XLA, cuDNN and PyTorch. Decoding "
    )
    text += "(32k x 64) has changed since: the plot of decoding has it."
    yield "attention", Plot("attention_nvidia_h200", "gains of attention over peers", _by_case, text, 2.8)
    text = "Decoding over caches of 8k to 128k keys, named by keys and sequences; peers are XLA, cuDNN and PyTorch."
    yield "decode", Plot("attention_decode_nvidia_h200", "gains of decoding over peers", _by_case, text, 2.8)
    text = "bfloat16; engine `hopper`, named; as many passes as 35 seconds took; peers are a scan on XLA and PyTorch "
    text += "(cuDNN)."
    yield "rnn", Plot("rnn_nvidia_h200", "gains of recurrent layers over peers", _by_case, text, 3.2)


PLOTS = dict(_each())
FAMILY_PLOTS = {
    "activation": ("activation",),
    "attention": ("attention", "decode"),
    "conv": ("conv",),
    "dropout": ("dropout",),
    "norm": ("norm",),
    "pool": ("pool",),
    "rnn": ("rnn",),
    "softmax": ("softmax",),
    "tensor": ("tensor",),
}
