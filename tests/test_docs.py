"""The documents: their links, their snippets of Python, their figures, and that the site has a place for everything."""

import ast
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import jaxdnn as dnn
from docs.site import docstrings, pictures, plots, reference, tables
from jaxdnn._src import families
from jaxdnn._src.core import engines
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn.verify.cli import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + PAGES
LINKING = [*DOCUMENTS, *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
README = (ROOT / "README.md").read_text()
GENERATED = reference.pages()
DRAWN = {f"generated/picture-{page}.svg" for page in pictures.PICTURES}
NETWORKS = {title: network for network, title in plots.NETWORKS.items()}

named = lambda path: str(path.relative_to(ROOT))


def text(path: Path) -> str:
    """A document's Markdown; of a notebook that of its cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    """What GitHub and MyST make of headings."""
    heads = re.findall(r"^#+ (.*)$", without_code(markdown), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def markdown_of(path: Path) -> str | None:
    """What a link to a file finds; None where there is no file, and no page that the site makes."""
    inside = path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else ""
    if inside in GENERATED:
        return GENERATED[inside]
    if inside in DRAWN:
        return ""
    if not path.exists():
        return None
    return text(path) if path.suffix in (".md", ".ipynb") else ""


def broken(path: Path, markdown: str) -> Iterator[str]:
    """The links of a document that lead nowhere."""
    for link in re.findall(r"\[[^][]*\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(markdown))):
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme not in ("http", "https") or "." not in parts.netloc:
                yield link
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        found = markdown_of(target) if target != path else markdown
        if found is None or (parts.fragment and parts.fragment not in anchors(found)):
            yield link


@pytest.mark.parametrize("path", LINKING, ids=named)
def test_links_lead_somewhere(path: Path):
    assert not list(broken(path, text(path)))


@pytest.mark.parametrize("page", GENERATED)
def test_links_of_pages_that_are_made_lead_somewhere(page: str):
    included = r"```{include}.*?```"
    assert not list(broken(DOCS / page, re.sub(included, "", GENERATED[page], flags=re.DOTALL)))


@pytest.mark.parametrize("link", ["[a](absent.md)", "[a](concepts.md#absent)", "[a](#absent)", "[a](https:/x.org/a)"])
def test_a_broken_link_is_found(link: str):
    assert list(broken(DOCS / "start.md", f"# Start\n\n{link}\n"))
    assert not list(broken(DOCS / "start.md", "# Start\n\n[a](concepts.md#level), [b](#start), `[c](none.md)`\n"))


# The snippets of a document are one program, as a reader enters them one after another. Those of pages for who comes
# from another library stand alone, and are run by `test_migration`.
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPETS = {path: SNIPPET.findall(path.read_text()) for path in DOCUMENTS if not path.name.startswith("from-")}


@pytest.mark.parametrize("path", [path for path, found in SNIPPETS.items() if found], ids=named)
def test_snippets_run(path: Path, capsys: pytest.CaptureFixture[str]):
    names = {"__name__": "snippet"}
    for snippet in SNIPPETS[path]:
        for package in imported(snippet) - {"jax", "jaxdnn", "jaxdnn_reference", "numpy"}:
            pytest.importorskip(package)
        exec(compile(snippet, path.name, "exec"), names)


def imported(snippet: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(snippet)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in plain | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}}


@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_there_are_snippets(name: str):
    assert SNIPPETS[ROOT / name]


def test_the_table_of_contents_has_every_page():
    """Once each; Sphinx says so too, but the tests run without it."""
    blocks = re.findall(r"^```{toctree}\n(.*?)^```$", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    entries = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    every = [path.stem for path in PAGES if path.stem != "index"] + [page.removesuffix(".md") for page in GENERATED]
    listed = Counter(name for e in entries for name in every if re.fullmatch(e.replace("*", r"[^/]*"), name))
    assert listed == Counter(every)
    assert {entry for entry in entries if "*" not in entry} <= set(every)


def test_every_public_name_is_on_one_page():
    modules = reference.modules()
    public = [f"jaxdnn.{name}" for name in dnn.__all__]
    public += [f"jaxdnn.{module}.{name}" for module in modules for name in reference.public_names(module)]
    assert Counter(name for names in reference.placed().values() for name in names) == Counter(public)
    for page, markdown in GENERATED.items():
        shown = re.findall(r"^\.\. auto(?:function|class|data):: (\S+)$", markdown, flags=re.MULTILINE)
        assert shown == reference.placed()[Path(page).stem], page


def test_docstrings_become_sections_lists_and_formulas():
    lines = (inspect.getdoc(dnn.softmax) or "").splitlines()
    found = docstrings.restructured(lines, reference.links(), inspect.signature(dnn.softmax).parameters)
    assert [line for line in found if "rubric" in line] == [
        f".. rubric:: {title}" for title in docstrings.SECTIONS.values() if title != "Attributes"
    ]
    assert "   log:      s = x - m - log Σ exp(x - m)" in found, "a formula keeps its columns"
    assert "``axis``" in found
    assert any(":py:obj:`softmax_dgrad <jaxdnn.softmax_dgrad>`" in line for line in found)


def test_formulas_beside_each_other_are_put_below_each_other_where_they_are_too_long():
    long = f"y = {'a + ' * 20}b        z = c"
    lines = ["One line.", "", long, "x = 1        w = 2", "", "With y = 1 this is in words."]
    found = docstrings.restructured(lines, {})
    assert [line.strip() for line in found if "=" in line] == [*long.split(" " * 8), lines[3], lines[5]]
    columns = ["One line.", "", f"add  Σ x        avg  {long}", "                max  |x|"]
    assert f"   {columns[3]}" in docstrings.restructured(columns, {})


@pytest.mark.parametrize("family", families.NAMES)
def test_formulas_are_told_from_words(family: str):
    """Of the ops of a family, each has a formula, or says of which op it is the same."""
    for ops in families.manifests()[family].ops:
        for name in ops.names.split():
            lines = (inspect.getdoc(getattr(dnn, name)) or "").splitlines()
            found = docstrings.restructured(lines, {})
            assert ":class: formula" in "\n".join(found) or "As ``group_norm_dgrad``" in "\n".join(found), name


def test_the_table_of_levels_is_complete():
    concepts = (DOCS / "concepts.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", concepts, flags=re.MULTILINE)) == LEVELS


def test_concepts_has_every_engine():
    section = (DOCS / "concepts.md").read_text().partition("### Engine\n")[2].partition("\n#")[0]
    assert all(f"`{name}`" in section for name in engines.names())
    assert {engine for engine, _ in tables.ENGINES} == set(engines.names())


@pytest.mark.parametrize(("name", "forward", "backward"), [
    ("conv", "batch_invariant", "run_to_run"),  # the filter's gradient is a sum over the batch
    ("linear_cross_entropy", "run_to_run", "run_to_run"),  # its logits are XLA's product, whatever rows' sums have
    ("dropout", "portable", "portable"),
])  # fmt: skip
def test_levels_of_the_table(name: str, forward: str, backward: str):
    found = tables.guarantees(name)
    assert [levels["hopper", "cuda"] for levels in found] == [forward, backward]


def test_gains_are_the_fastest_peers_over_ours():
    row = {"ms": {"jaxdnn:hopper": 2.0, "jaxdnn:xla": 4.0, "lax": 6.0, "torch": 5.0}}
    assert plots.gain(row) == 2.5
    assert plots.gain({"ms": {"jaxdnn": 1.0}}) is None
    assert plots.summary([1.0, 4.0]) == "2.00 (1.00 to 4.00)"


def test_every_figure_names_device_date_and_command():
    for plot in plots.PLOTS.values():
        found = plots.load(plot.file)
        assert all(str(found[key])[:10] in plots.source(plot.file) for key in ("device", "date", "command"))


def test_readme_has_the_training_steps_that_were_measured():
    steps = plots.training()
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\|$", README, flags=re.MULTILINE)
    assert {NETWORKS[name] for name, *_ in rows} == set(steps)
    for name, *told in rows:
        measured = [steps[NETWORKS[name]].get(kind) for kind in ("lax", "jaxdnn", "torch.compile")]
        assert told == ["" if ms is None else f"{ms:.1f}" for ms in measured]


@pytest.mark.parametrize("path", [*DOCUMENTS], ids=named)
def test_every_make_target_exists(path: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", path.read_text())) <= targets
    assert set(re.findall(r"^make ([a-z-]+)", path.read_text(), flags=re.MULTILINE)) <= targets


def test_commands_has_every_command_and_every_environment_variable_that_is_there():
    page = (DOCS / "commands.md").read_text()
    assert set(re.findall(r"`jaxdnn ([a-z]+)", page)) == set(COMMANDS)
    sources = [path.read_text() for path in (ROOT / "jaxdnn").rglob("*.py")]
    assert set(re.findall(r"JAXDNN_[A-Z_]+", page)) == set(re.findall(r"JAXDNN_[A-Z_]+", "".join(sources)))


def test_readme_is_one_screen():
    assert len(README.splitlines()) <= 65


def test_readme_without_its_links_says_where_to_read():
    """As PyPI shows it, where links to files of the source lead nowhere: what is linked names the file, or is one."""
    linked = re.findall(r"\[([^]]+)\]\((?!https?:)([^)]+)\)", README)
    assert linked
    assert all(words in (target, Path(target).stem) for words, target in linked)
