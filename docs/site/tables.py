"""The tables of the site, made of manifests, engines and results."""

import contextlib
import functools as ft
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxdnn as dnn
from docs.site.plots import CONVOLUTIONS, MEMORY_BOUND, gain, load, ours, source, summary
from docs.site.reference import link
from jaxdnn._src import families
from jaxdnn._src.cases import example
from jaxdnn._src.core import determinism

ENGINE = "jaxdnn:hopper"
ENGINES = {("xla", "cpu"): "`xla`, CPU", ("xla", "cuda"): "`xla`, GPU", ("hopper", "cuda"): "`hopper`"}
ENGINES |= {("ordered", "cuda"): "`ordered`"}


def write(folder: Path) -> None:
    """Writes them all, as Markdown that pages include."""
    made: dict[str, Callable[[], Iterator[str]]] = {
        "ops": ops,
        "reproducibility": reproducibility,
        "convolutions": convolutions,
        "memory-bound": memory_bound,
    }
    for name, lines in made.items():
        (folder / f"table-{name}.md").write_text("\n".join(lines()) + "\n")


def ops() -> Iterator[str]:
    """Every op, beside cuDNN's name for it."""
    yield from ("| cuDNN | here | level at most |", "|---|---|---|")
    for manifest in families.manifests().values():
        for line in manifest.ops:
            names = ", ".join(link(f"jaxdnn.{name}") for name in line.names.split())
            yield f"| {line.cudnn} | {names} | {line.level} |"


def reproducibility() -> Iterator[str]:
    """What each engine guarantees of each op, forward and, behind a slash, backward."""
    yield f"| op | at most | {' | '.join(ENGINES.values())} |"
    yield "|---" * (len(ENGINES) + 2) + "|"
    for name in example.first():
        forward, backward = guarantees(name)
        cells = [_pair(forward.get(key), backward.get(key)) for key in (None, *ENGINES)]
        yield f"| {link(f'jaxdnn.{name}')} | {' | '.join(cells)} |"


def _pair(forward: str | None, backward: str | None) -> str:
    return " / ".join(dict.fromkeys(filter(None, (forward, backward)))) or "-"


@ft.cache
def guarantees(name: str) -> tuple[dict[Any, str], dict[Any, str]]:
    """The levels of an op's example in bfloat16, forward and backward, by engine and platform.

    Under None is the strongest level that the call may require. An engine guarantees no more than that, whatever it
    declares of the primitives that it computes, since an op may have sums of its own beside them.
    """
    called = example.first()[name]
    op = getattr(dnn, name)
    arrays = [jnp.asarray(v, jnp.bfloat16 if v.ndim > 1 else jnp.float32) for v in called.data()]
    run = lambda *given: called.call(op, *given)
    forward = _levels(run, arrays)
    is_backward = name.endswith(("dgrad", "wgrad", "bgrad"))
    results = jax.tree.leaves(jax.eval_shape(run, *arrays))
    if is_backward or not arrays or not any(jnp.issubdtype(y.dtype, jnp.floating) for y in results):
        return forward, {}

    def loss(*given: Any) -> Any:
        floats = (y for y in jax.tree.leaves(run(*given)) if jnp.issubdtype(y.dtype, jnp.floating))
        return sum(jnp.sum(y.astype(jnp.float32)) for y in floats)

    return forward, _levels(jax.grad(loss, argnums=tuple(range(len(arrays)))), arrays)


def _levels(function: Callable[..., Any], arrays: list[Any]) -> dict[Any, str]:
    most = next(level for level in reversed(determinism.LEVELS) if _may_require(level, function, arrays))
    found: dict[Any, str] = {None: most}
    for platform in ("cpu", "cuda"):
        explained = dnn.explain(function, *arrays, platform=platform)
        each = [{c.engine: c.level for c in call.candidates} for call in explained]
        names = set(each[0]) if each else {"xla"}  # of a formula, XLA's program
        for engine in names:
            declared = [call[engine] for call in each if engine in call] + [most]
            found[engine, platform] = min(declared, key=determinism.LEVELS.index)
    return found


def _may_require(level: str, function: Callable[..., Any], arrays: list[Any]) -> bool:
    with contextlib.suppress(NotImplementedError), dnn.determinism(level):
        jax.make_jaxpr(lambda *given: function(*given))(*arrays)
        return True
    return False


def convolutions() -> Iterator[str]:
    """The gains of convolutions, by family and pass."""
    rows = load("conv_nvidia_h200")["rows"]
    yield from ("| convolutions | `conv` | `conv_dgrad` | `conv_wgrad` |", "|---|---|---|---|")
    for family in CONVOLUTIONS:
        cells = []
        for which in ("forward", "dgrad", "wgrad"):
            mine = [row["ms"] for row in rows if (row["family"], row["pass"]) == (family, which)]
            cells.append(summary([min(t for k, t in ms.items() if k != ENGINE) / ms[ENGINE] for ms in mine]))
        yield f"| {family} | {' | '.join(cells)} |"
    yield from ("", ":::{container} caption", f"{source('conv_nvidia_h200')}.", ":::")


def memory_bound() -> Iterator[str]:
    """The gains of what memory binds, and its share of a copy's bandwidth."""
    yield from ("| | forward | of copy | backward | of copy |", "|---|---|---|---|---|")
    for family in MEMORY_BOUND:
        cells = []
        for which in ("forward", "backward"):
            rows = [r for r in load(f"{family}_nvidia_h200")["rows"] if r["pass"] == which and "of_copy" in r]
            shares = [r["of_copy"][min(r["ms"], key=lambda k, r=r: (r["ms"][k] != ours(r), k))] for r in rows]
            cells += [summary([g for g in map(gain, rows) if g]), f"{min(shares):.2f} to {max(shares):.2f}"]
        yield f"| {family} | {' | '.join(cells)} |"
    yield from ("", ":::{container} caption")
    yield from (f"* {family}: {source(f'{family}_nvidia_h200')}." for family in MEMORY_BOUND)
    yield ":::"
