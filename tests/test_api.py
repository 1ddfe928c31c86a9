"""The rules of style that a machine can check: over the public functions, and over the source as syntax trees."""

import ast
import doctest
import functools as ft
import inspect
import pickle
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import example

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "jaxdnn").rglob("*.py"))
DEFINITION = sorted((ROOT / "reference").rglob("*.py"))
OTHER = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

FUNCTIONS = [name for name in dnn.__all__ if inspect.isfunction(getattr(dnn, name))]
NO_OPS = {"check_version", "determinism", "explain", "limits", "logged", "patch", "tune"}  # they are about ops
OPS = [name for name in FUNCTIONS if name not in NO_OPS]
PIECES = {"activate", "derivative", "dot", "dot_with_bound", "fma", "magnitude", "round_to"}  # of definitions

# What only one side has: how a result is computed is the library's matter, in which order the definition's.
ONLY_LIBRARY = {"engine", "determinism"}
ONLY_DEFINITION = {"arithmetic", "schedule", "at", "details"}

COMPILATION = "/jax/core/compile/backend_compile_duration"
EXAMPLES = example.first()

_compilations: list[float] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: _compilations.append(duration_secs) if event == COMPILATION else None
)

NAMES = {"jax": jax, "jnp": jnp, "dnn": dnn}  # what examples take for imported, as the package's docstring says

each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_op = pytest.mark.parametrize("name", EXAMPLES)


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def test_all_is_what_is_public():
    public = {name for name, value in vars(dnn).items() if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(dnn, name), types.ModuleType)}
    assert public - modules == set(dnn.__all__) - modules
    assert list(dnn.__all__) == sorted(dnn.__all__)


def test_every_op_has_a_definition():
    """And every definition is an op's; what is no op is listed, so that a new function cannot escape."""
    definitions = {name for name in reference.__all__ if inspect.isfunction(getattr(reference, name))}
    assert set(OPS) == definitions - PIECES
    assert set(EXAMPLES) == set(OPS)
    assert all(e.needs or not e.operands for e in EXAMPLES.values())
    assert set(FUNCTIONS) >= NO_OPS
    assert definitions >= PIECES


@each_function
def test_arguments_are_positional_only_or_keyword_only(name: str):
    assert not [p.name for p in parameters(getattr(dnn, name)) if p.kind is p.POSITIONAL_OR_KEYWORD]


@each_op
def test_signature_shows_the_names_of_annotations(name: str):
    """As they are written, not what they stand for, which tools find all the same."""
    shown = str(inspect.signature(getattr(dnn, name)))
    assert not re.search(r"Union\[|numpy|jaxlib|collections|'\w+ \|", shown)
    assert all(len(str(p.annotation)) < 60 for p in parameters(getattr(dnn, name)))
    assert typing.get_type_hints(getattr(dnn, name)).keys() >= {p.name for p in parameters(getattr(dnn, name))}


@each_op
def test_arrays_come_first_and_the_rest_has_defaults(name: str):
    for p in parameters(getattr(dnn, name)):
        assert (p.kind is p.POSITIONAL_ONLY) == (p.default is p.empty), p


@each_op
def test_definition_takes_the_same_arguments_and_defaults(name: str):
    op, definition, data = getattr(dnn, name), getattr(reference, name), EXAMPLES[name].data()
    arguments, options = EXAMPLES[name].bind(*data)
    ours = {p.name: p.default for p in parameters(op) if p.kind is p.KEYWORD_ONLY and p.name not in ONLY_LIBRARY}
    theirs = [p for p in parameters(definition) if p.kind is p.KEYWORD_ONLY]
    count = len(arguments)
    assert [p.name for p in parameters(op)][:count] == [p.name for p in parameters(definition)][:count]
    assert {p.name for p in theirs} - ONLY_DEFINITION <= set(ours)
    # The definition hands some options on, so its signature does not show them all; a call does.
    given, without = definition(*arguments, **{**ours, **options}), definition(*arguments, **options)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(a, b)


@each_op
def test_an_equal_call_compiles_nothing_anew(name: str):
    arrays = [jnp.asarray(v, np.float32) for v in EXAMPLES[name].data()]
    call = lambda: EXAMPLES[name].call(getattr(dnn, name), *arrays)
    jax.clear_caches()
    before = len(_compilations)
    jax.block_until_ready(call())
    first = len(_compilations)
    jax.block_until_ready(call())
    assert len(_compilations) == first
    assert first > before, "compilations are not counted"


@each_op
def test_numpy_arrays_of_64_bits_are_read_as_jax_reads_them(name: str):
    """Without a word: a warning is an error here."""
    data = EXAMPLES[name].data()
    found = EXAMPLES[name].call(getattr(dnn, name), *data)
    wanted = EXAMPLES[name].call(getattr(dnn, name), *(v.astype(np.float32) for v in data))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@each_op
def test_explain_knows_every_op(name: str):
    found = EXAMPLES[name].call(ft.partial(dnn.explain, getattr(dnn, name)), *EXAMPLES[name].data())
    assert bool(found) != bool(found.formulas)
    assert all(formula.op == name for formula in found.formulas)


def test_explain_takes_a_function_not_its_result():
    with pytest.raises(TypeError, match=r"^`function` must be an op .* as in explain\(conv, x, w\), got an array of"):
        dnn.explain(jnp.ones(3))  # type: ignore[call-arg]


@each_op
def test_pickle_finds_every_op(name: str):
    assert pickle.loads(pickle.dumps(getattr(dnn, name))) is getattr(dnn, name)


@each_function
def test_docstring_opens_with_one_line(name: str):
    lines = (inspect.getdoc(getattr(dnn, name)) or "").splitlines()
    assert lines[0].endswith(".")
    assert lines[1:2] in ([], [""])


@each_function
def test_docstring_has_its_sections_in_order(name: str):
    text = inspect.getdoc(getattr(dnn, name)) or ""
    sections = ["Args", "Returns", "Differentiation", "Numerics", "Raises", "Example", "Sources"]
    assert re.findall(rf"^({'|'.join(sections)}):", text, flags=re.MULTILINE) == sections


@each_function
def test_docstring_explains_every_argument(name: str):
    text = inspect.getdoc(getattr(dnn, name)) or ""
    args = text[text.index("\nArgs:") : text.index("\nReturns:")]
    assert not [p.name for p in parameters(getattr(dnn, name)) if not re.search(rf"\b{p.name}\b[\w, ]*:", args)]


@each_function
def test_docstring_example_runs(name: str):
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(dnn, name)) or "", NAMES, name, None, None)
    results = doctest.DocTestRunner().run(examples)
    assert results.attempted
    assert not results.failed


# Over the source. Each rule is a function from a tree to the nodes that break it, so that the last test can plant one.


def raises_with_other_than_one_message(tree: ast.AST) -> Iterable[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func)
            if name in {"ValueError", "TypeError", "NotImplementedError"} and len(node.exc.args) != 1:
                yield node


def asserts(tree: ast.AST) -> Iterable[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Assert))


def discarded_updates(tree: ast.AST) -> Iterable[ast.AST]:
    """`x.at[i].set(y)` returns the new array; as a statement of its own it does nothing."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
        ):
            target = node.value.func.value
            if (
                isinstance(target, ast.Subscript)
                and isinstance(target.value, ast.Attribute)
                and target.value.attr == "at"
            ):
                yield node


def imports_of(tree: ast.AST) -> Iterable[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node, (node.module or "").partition(".")[0]


def imports_beyond_numpy(tree: ast.AST) -> Iterable[ast.AST]:
    allowed = {"numpy", "ml_dtypes", "jaxdnn_reference", *sys.stdlib_module_names}
    return (node for node, package in imports_of(tree) if package not in allowed)


def imports_of_the_definition(tree: ast.AST) -> Iterable[ast.AST]:
    return (node for node, package in imports_of(tree) if package == "jaxdnn_reference")


# What compares ops with their definition: `verify`, and the cases of families.
COMPARES = ("verify", "cases")
NOT_VERIFY = [path for path in LIBRARY if not any(part.startswith(COMPARES) for part in path.parts)]
RULES = [
    pytest.param(raises_with_other_than_one_message, LIBRARY, "raise ValueError('a', 1)", id="one message an error"),
    pytest.param(asserts, LIBRARY, "assert x", id="no assert in the library"),
    pytest.param(discarded_updates, LIBRARY + DEFINITION + OTHER, "x.at[0].set(1)", id="no update is thrown away"),
    pytest.param(imports_beyond_numpy, DEFINITION, "import jax.numpy as jnp", id="the definition needs NumPy alone"),
    pytest.param(
        imports_of_the_definition, NOT_VERIFY, "from jaxdnn_reference import conv", id="ops do not use their definition"
    ),
]


@pytest.mark.parametrize(("rule", "paths", "planted"), RULES)
def test_source(rule: Callable[[ast.AST], Iterable[ast.AST]], paths: list[Path], planted: str):
    assert list(rule(ast.parse(planted))), "the rule does not find what it is there to find"
    broken = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in paths for node in rule(ast.parse(path.read_text()))]  # type: ignore[attr-defined]
    assert paths
    assert not broken
