"""The pages for those who come from other libraries name what exists here, and their Python runs as it stands."""

import ast
import collections
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxdnn as dnn

ROOT = Path(__file__).parents[1]
FUNCTIONS = ROOT / "tests/cudnn_functions.txt"
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("from-*.md"))}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
BLOCKS = [(name, kind, block) for name, text in PAGES.items() for kind, block in FENCE.findall(text)]


def spans(text: str) -> list[str]:
    """Code within the text, line breaks as spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def trees() -> Iterator[tuple[str, ast.AST]]:
    """Every piece of code that names something of this library, with its page."""
    for name, _, block in BLOCKS:
        yield name, ast.parse(block)
    for name, text in PAGES.items():
        for span in spans(text):
            if "dnn." in span and "..." not in span and not span.startswith("jaxdnn."):
                yield f"{name}: {span}", ast.parse(span)


def found(node: ast.expr) -> Any:
    """What `dnn.a.b` is; None if the expression is no such name. AttributeError if there is none."""
    if isinstance(node, ast.Name):
        return dnn if node.id == "dnn" else None
    if isinstance(node, ast.Attribute):
        owner = found(node.value)
        return None if owner is None else getattr(owner, node.attr)
    return None


def faults(tree: ast.AST) -> Iterator[str]:
    """What a piece of code names that this library has not, or calls as it cannot be called."""
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute):
                found(node)
            if isinstance(node, ast.Call) and (function := found(node.func)) is not None:
                keywords = {word.arg: None for word in node.keywords if word.arg is not None}
                unpacked = len(keywords) < len(node.keywords)
                signature = inspect.signature(function)
                (signature.bind_partial if unpacked else signature.bind)(*node.args, **keywords)
        except (AttributeError, TypeError) as error:
            yield f"{ast.unparse(node)}: {error}"


def test_there_are_pages():
    assert set(PAGES) == {"from-cudnn.md", "from-flax.md", "from-onnx.md", "from-pytorch.md"}


def test_calls_are_of_functions_that_exist_with_arguments_that_they_have():
    checked = [(where, list(faults(tree))) for where, tree in trees()]
    assert len(checked) > 100
    assert not [each for each in checked if each[1]]


@pytest.mark.parametrize("code", ["dnn.convolve(x)", "dnn.conv(x, w, strides=2)", "dnn.conv(x)", "dnn.ring.of_jax"])
def test_faults_are_found(code: str):
    assert list(faults(ast.parse(code)))


def test_keyword_arguments_named_alone_exist():
    """`layout="NCHW"` in a cell of its own is an argument of some function, of this library or of the page's."""
    callables = [getattr(dnn, name) for name in dnn.__all__]
    known = {p for each in callables if callable(each) for p in inspect.signature(each).parameters}
    ours = collections.defaultdict(set)
    for name, text in PAGES.items():
        for row in re.findall(r"^\| (.*) \|$", text, flags=re.MULTILINE):
            second = re.split(r" ?\| ?", row)[1]
            for span in spans(second):
                if match := re.fullmatch(r"([a-z_0-9]+)=.*", span):
                    ours[name].add(match[1])
    assert all(ours[name] for name in PAGES)
    assert not {name: words - known for name, words in ours.items() if words - known}


def test_every_block_is_python_that_parses():
    assert BLOCKS
    assert {kind for _, kind, _ in BLOCKS} <= {"python", "py"}, "`python` runs, `py` needs another library"
    assert all(ast.parse(block).body for _, _, block in BLOCKS)


RUN = [pytest.param(block, id=f"{name}-{i}") for i, (name, kind, block) in enumerate(BLOCKS) if kind == "python"]


@pytest.mark.parametrize("block", RUN)
def test_blocks_run(block: str):
    for library in ("flax", "equinox"):
        if re.search(rf"^(from|import) {library}\b", block, flags=re.MULTILINE):
            pytest.importorskip(library)
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})


def test_every_function_of_cudnn_stands_on_its_page_once():
    lines = [line.split() for line in FUNCTIONS.read_text().splitlines() if not line.startswith("#")]
    declared = collections.defaultdict(set)
    for header, function in lines:
        declared[header].add(function)
    assert {header: len(names) for header, names in declared.items()} == {"graph": 24, "ops": 100, "cnn": 50, "adv": 47}
    everywhere = collections.Counter(spans(PAGES["from-cudnn.md"]))
    assert not {name for names in declared.values() for name in names if everywhere[name] != 1}
    sections = re.split(r"^## Functions of cudnn_(\w+)\.h$", PAGES["from-cudnn.md"], flags=re.MULTILINE)
    for header, text in zip(sections[1::2], sections[2::2], strict=True):
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
        first = [row.split("|")[1] for row in re.findall(r"^\|.*$", text, flags=re.MULTILINE)]
        named = collections.Counter(n for cell in first for n in re.findall(r"`(cudnn\w+)`", cell))
        assert named == collections.Counter(declared.pop(header))
    assert not declared


def test_tables_have_three_columns_at_most():
    for name, text in PAGES.items():
        rows = [row for row in FENCE.sub("", text).splitlines() if row.startswith("|")]
        assert rows
        assert not [(name, row) for row in rows if row.count("|") > 4]


def test_links_resolve():
    for name, text in PAGES.items():
        links = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
        assert set(PAGES) - {name} <= set(links)
        assert not [link for link in links if not (ROOT / "docs" / link).exists()]
