"""The pages that document public names: one for each family of ops, and those of what is around the ops."""

import functools as ft
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import jaxdnn as dnn
from docs.site import DOCS
from docs.site.pictures import PICTURES
from docs.site.plots import FAMILY_PLOTS
from jaxdnn._src import families

TITLES = {
    "activation": "Activations",
    "attention": "Attention",
    "conv": "Convolution",
    "ctc": "CTC",
    "dropout": "Dropout",
    "matmul": "Matrix products",
    "norm": "Normalisation",
    "pool": "Pooling",
    "resample": "Resampling",
    "rnn": "Recurrent layers",
    "sampling": "Sampling",
    "softmax": "Softmax",
    "tensor": "Arrays: move, add, reduce",
}
# The public modules that belong to a family, by their names.
OF_FAMILY = {"multi_head": "attention", "recurrent": "rnn", "ring": "attention"}
# Pages of what is no family: the title, what stands below it, and the names, of functions and of modules.
OTHERS = {
    "choices": (
        "Engines, levels, limits",
        "How ops are computed: which [engine](../concepts.md#engine) serves a call, what it must guarantee "
        "([level](../concepts.md#level)), what it may use. None of this changes what an op means.",
        ("explain", "determinism", "limits", "tune", "logged", "VERSION", "check_version", "engines"),
    ),
    "programs": (
        "Unchanged programs",
        "Programs in lax, `jax.nn` or Flax use the library's ops where they serve, without being rewritten.",
        ("patch", "lax_like"),
    ),
    "layers": (
        "Layers",
        "Layers of Flax and Equinox with their own constructor arguments, parameters and initialisers, computed by "
        "the library's ops.",
        ("nnx", "linen", "equinox"),
    ),
    "graphs": (
        "Operation graphs",
        "Graphs of operations by cudnn-frontend's names: [how they are built, planned and called](../graph.md).",
        ("graph",),
    ),
    "tolerances": (
        "Tolerances",
        "How far a result may be from its [definition](../concepts.md#definition). No "
        "[tolerance](../concepts.md#tolerance) here is chosen: each follows from op, dtypes and data.",
        ("tolerance",),
    ),
}
WITH_MEMBERS = ("jaxdnn", "jaxdnn.graph")  # whose classes are shown with their methods
FOLDERS = ("ops", "around")
COMMANDS = {"bench", "verify"}  # what is a program, not a module to import from


@ft.cache
def modules() -> dict[str, ModuleType | None]:
    """The public modules by name; None of one that needs a package that is not installed."""
    names = [m.name for m in pkgutil.iter_modules(dnn.__path__) if not m.name.startswith("_")]
    return {name: _imported(name) for name in names if name not in COMMANDS}


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"jaxdnn.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "jaxdnn":
            raise
        return None


def public_names(module: str) -> list[str]:
    """What of a public module is to be documented: its `__all__`, or what it defines, but for modules in it."""
    found = modules().get(module)
    if found is None:
        return []
    defined = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
    names = getattr(found, "__all__", [name for name in defined if not name.startswith("_")])
    return [name for name in names if not inspect.ismodule(getattr(found, name))]


def placed() -> dict[str, list[str]]:
    """By page, the full names that it documents."""
    found: dict[str, list[str]] = {}
    for family, manifest in families.manifests().items():
        names = [f"jaxdnn.{name}" for ops in manifest.ops for name in ops.names.split()]
        if family == "dropout":
            names.append("jaxdnn.DropoutState")
        for module in (module for module, home in OF_FAMILY.items() if home == family):
            names += [f"jaxdnn.{module}.{name}" for name in public_names(module)]
        found[family] = names
    for page, (_, _, parts) in OTHERS.items():
        names = []
        for part in parts:
            names += [f"jaxdnn.{part}.{name}" for name in public_names(part)]
            names += [f"jaxdnn.{part}"] if part in dnn.__all__ else []
        if names:
            found[page] = names
    return found


@ft.cache
def links() -> dict[str, str]:
    """What is linked where it stands in backquotes: ops by their short names, all others by their full ones."""
    full = [name for names in placed().values() for name in names]
    short = {name.rpartition(".")[2]: name for name in full if name.count(".") == 1}
    return {**{name: name for name in full}, **short}


def pages() -> dict[str, str]:
    """The pages' Markdown, by their paths from `docs`."""
    folder = lambda page: "around" if page in OTHERS else "ops"
    return {f"{folder(page)}/{page}.md": "\n".join(_page(page, names)) + "\n" for page, names in placed().items()}


def write() -> None:
    """Writes the pages, and removes those of families that are gone."""
    for folder in FOLDERS:
        (DOCS / folder).mkdir(exist_ok=True)
        for stale in (DOCS / folder).glob("*.md"):
            stale.unlink()
    for path, text in pages().items():
        (DOCS / path).write_text(text)


def _page(page: str, names: list[str]) -> Iterator[str]:
    if page in OTHERS:
        title, text, parts = OTHERS[page]
        yield from (f"# {title}", "", text, "")
        yield from _documented([name for name in names if name.count(".") == 1])
        for part in parts:
            yield from _module(part)
        return
    yield from (f"# {TITLES.get(page, page.capitalize())}", "")
    yield from (inspect.getdoc(importlib.import_module(f"jaxdnn._src.{page}")) or "", "")
    manifest = families.manifests()[page]
    yield from ("| in cuDNN | here | level at most |", "|---|---|---|")
    for ops in manifest.ops:
        yield f"| {ops.cudnn} | {', '.join(link(f'jaxdnn.{name}') for name in ops.names.split())} | {ops.level} |"
    levels = "[What a level guarantees](../concepts.md#level), and [which engine has which](../reproducibility.md)."
    measured = " [What was measured](#measured)." if page in FAMILY_PLOTS else ""
    yield from ("", levels + measured, "")
    if page in PICTURES:
        yield from (f"![{PICTURES[page].alt}](../generated/picture-{page}.svg)", "")
    own = [name for name in names if name.count(".") == 1]
    ops = [name for name in own if name.removeprefix("jaxdnn.") in families.ops()]
    for letters, group in itertools.groupby(ops, lambda name: _letters(name.removeprefix("jaxdnn."))):
        yield from (letters, "")
        yield from _documented(list(group))
    yield from _documented([name for name in own if name not in ops])
    for module in (module for module, home in OF_FAMILY.items() if home == page):
        yield from _module(module)
    if page in FAMILY_PLOTS:
        yield from ("## Measured", "")
    for plot in FAMILY_PLOTS.get(page, ()):
        yield from (f"```{{include}} ../generated/{plot}.md", ":relative-images:", ":relative-docs: ..", "```", "")


def link(name: str) -> str:
    """A link in Markdown to what a name stands for."""
    return f"{{py:obj}}`{name.removeprefix('jaxdnn.')} <{name}>`"


def _letters(name: str) -> str:
    """The legend of letters that the module of an op has; "" if it has none."""
    text = inspect.unwrap(getattr(dnn, name)).__globals__["__doc__"] or ""
    return next((" ".join(one.split()) for one in text.split("\n\n") if one.startswith("Letters")), "")


def _module(name: str) -> Iterator[str]:
    found = modules().get(name)
    if found is None:
        return
    yield from (f"## jaxdnn.{name}", "", "```{eval-rst}", f".. automodule:: jaxdnn.{name}", "   :no-members:")
    yield from ("   :no-index:", "```", "")
    yield from _documented([f"jaxdnn.{name}.{one}" for one in public_names(name)])


def _documented(names: list[str]) -> Iterator[str]:
    if not names:
        return
    yield "```{eval-rst}"
    for name in names:
        module, _, one = name.rpartition(".")
        value = getattr(importlib.import_module(module), one)
        if inspect.isclass(value):
            shown = "   :members:" if module in WITH_MEMBERS else "   :no-members:"
            derived = module in WITH_MEMBERS and any(base.__module__.startswith("jaxdnn._") for base in value.__bases__)
            yield from (f".. autoclass:: {name}", shown, *["   :inherited-members:"] * derived, "")
        elif callable(value):
            yield from (f".. autofunction:: {name}", "")
        else:
            yield from (f".. autodata:: {name}", "   :no-value:", "")
    yield "```"
    yield ""
