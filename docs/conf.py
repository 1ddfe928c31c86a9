"""What Sphinx reads: `make docs`."""

import inspect
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "reference")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "svg")

import latex2mathml.converter  # noqa: E402
import matplotlib as mpl  # noqa: E402
from docutils.nodes import SkipNode  # noqa: E402

import jaxdnn  # noqa: E402
from docs.site import DOCS, docstrings, pictures, plots, reference, tables  # noqa: E402

project = "jaxdnn"
author = "the authors of jaxdnn"
version = release = jaxdnn.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]  # the former reads Markdown too
exclude_patterns = ["_build", "generated"]
nitpicky = True
smartquotes = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

nb_execution_mode = "off"  # notebooks are committed executed, and the tests execute them

autodoc_typehints = "none"  # the docstrings say what an argument may be; unions are long
add_module_names = False
toc_object_entries_show_parents = "hide"

html_math_renderer = "mathml"  # which browsers show without a script from elsewhere
html_theme = "furo"
html_title = f"jaxdnn {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def process_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    if what == "data" and "\n".join(lines).strip() == (inspect.getdoc(type(value)) or "").strip():
        # A dictionary or a number has no words of its own.
        keys = isinstance(value, dict) and f"One of each: {', '.join(f'``{key}``' for key in value)}."
        lines[:] = [keys or f"``{value}`` in this version: 10000 major + 100 minor + patch."]
        return
    lines[:] = docstrings.restructured(lines, reference.links(), unlinked(name, value))


def unlinked(name: str, value: Any) -> list[str]:
    """What stands in backquotes and is no op: the names of arguments and of a module's parts, and the name itself."""
    if inspect.ismodule(value):
        return dir(value)
    own = [name.rpartition(".")[2]] if name.count(".") == 1 else []
    try:
        return own + (list(inspect.signature(value).parameters) if callable(value) else [])
    except ValueError:  # a class that takes what a built-in one takes, such as an error
        return own


def link_files(app: Any, page: str, source: list[str]) -> None:
    """Links to Markdown beside `docs`, read without Sphinx, are links to pages; here they are to files. Notebooks are
    pages, in a copy."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")
    if page == "notebooks":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nnotebooks/*\n```\n"
    source[0] = re.sub(r"\]\((\.\./[^):#]+\.md)(#[^)]*)?\)", r"](path:\1)", source[0])


def generate(app: Any) -> None:
    folder = DOCS / "generated"
    folder.mkdir(exist_ok=True)
    mpl.rcParams.update({"svg.hashsalt": "jaxdnn", "font.size": 9, "savefig.facecolor": "white"})
    reference.write()
    shutil.rmtree(DOCS / "notebooks", ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", DOCS / "notebooks", ignore=shutil.ignore_patterns(".*"))
    pictures.write(folder)
    plots.write(folder)
    tables.write(folder)


def inline_formula(self: Any, node: Any) -> None:
    self.body.append(latex2mathml.converter.convert(node.astext(), display="inline"))
    raise SkipNode


def displayed_formula(self: Any, node: Any) -> None:
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    self.body.append(f'<div class="math">{formula}</div>')
    raise SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (inline_formula, None), (displayed_formula, None))
    app.connect("builder-inited", generate)
    app.connect("source-read", link_files)
    app.connect("autodoc-process-docstring", process_docstring)
