"""The rules of style that a machine can check: over the public functions, and over the source as syntax trees."""

import ast
import doctest
import inspect
import pickle
import re
import sys
import types
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

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "jaxdnn").rglob("*.py"))
DEFINITION = sorted((ROOT / "reference").rglob("*.py"))
OTHER = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

FUNCTIONS = [name for name in dnn.__all__ if inspect.isfunction(getattr(dnn, name))]
NO_OPS = {"determinism", "explain", "limits"}  # what says how ops are computed
OPS = [name for name in FUNCTIONS if name not in NO_OPS]
PIECES = {"activate", "derivative", "dot", "dot_with_bound", "fma", "magnitude", "round_to"}  # of definitions

# What only one side has: how a result is computed is the library's matter, in which order the definition's.
ONLY_LIBRARY = {"engine", "determinism"}
ONLY_DEFINITION = {"arithmetic", "schedule", "at", "details"}

RANDOM = np.random.default_rng(0)
X, W, DY = (RANDOM.normal(size=shape) for shape in ((2, 5, 4, 3), (3, 2, 3, 7), (2, 3, 3, 7)))
MANY = RANDOM.normal(size=(2, 1, 2, 32))  # channels
COMPILATION = "/jax/core/compile/backend_compile_duration"
ARRAYS = {
    "activation": (X,),
    "activation_dgrad": (X, X),
    "conv": (X, W),
    "conv_dgrad": (DY, W, X.shape),
    "conv_wgrad": (X, DY, W.shape),
    "conv_bgrad": (DY,),
    "conv_transpose": (DY, W),
    "layer_norm": (X,),
    "layer_norm_dgrad": (X, X),
    "rms_norm": (X,),
    "rms_norm_dgrad": (X, X),
    "adaptive_layer_norm": (X, X[:, 0, 0], X[:, 1, 0]),
    "adaptive_layer_norm_dgrad": (X, X, X[:, 0, 0]),
    "group_norm": (MANY,),
    "group_norm_dgrad": (MANY, MANY),
    "instance_norm": (X,),
    "instance_norm_dgrad": (X, X),
    "batch_norm": (X,),
    "batch_norm_dgrad": (X, X),
    "batch_norm_inference": (X, X[0, 0, 0], X[0, 0, 1] ** 2),
    "genstats": (X,),
    "bn_finalize": (X[0, 0, 0], 9 * X[0, 0, 0] ** 2, 8),
    "bn_finalize_inference": (X[0, 0, 0], X[0, 0, 1] ** 2),
    "dbn_weight": (X, X, X[0, 0, 0], X[0, 0, 1] ** 2),
    "lrn": (X,),
    "lrn_dgrad": (X, X),
    "divisive_norm": (X,),
    "divisive_norm_dgrad": (X, X),
    "lp_normalize": (X,),
    "softmax": (X,),
    "softmax_dgrad": (X, X),
    "logsumexp": (X,),
    "linear_cross_entropy": (X, W[0, 0], np.ones((2, 5, 4), np.int32)),
    "dropout": (X, 7),
    "dropout_mask": (7, X.shape),
    "pool": (X,),
    "pool_dgrad": (X[:, :2, :2], X),
    "unpool": (X[:, :2, :2], np.zeros((2, 2, 2, 3), np.int32), X.shape),
    "global_pool": (X,),
    "adaptive_pool": (X,),
    "transform": (X,),
    "add": (X[:1], X),
    "op_tensor": (X, X[:1]),
    "scale": (X,),
    "fill": (X,),
    "reduce": (X,),
    "im2col": (X,),
    "col2im": (np.ones((2, 3, 2, 27)), X.shape),
    "resample": (X,),
    "resample_dgrad": (DY, (2, 5, 4, 7)),
    "pixel_shuffle": (X[..., :1].repeat(4, axis=-1),),
    "pixel_unshuffle": (X[:, :4],),
}

# What an op's defaults leave open.
NEEDED: dict[str, dict[str, Any]] = {"resample": {"scale": 2}}

_compilations: list[float] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: _compilations.append(duration_secs) if event == COMPILATION else None
)

each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_op = pytest.mark.parametrize("name", OPS)


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
    assert set(ARRAYS) == set(OPS)
    assert set(FUNCTIONS) >= NO_OPS
    assert definitions >= PIECES


@each_function
def test_arguments_are_positional_only_or_keyword_only(name: str):
    assert not [p.name for p in parameters(getattr(dnn, name)) if p.kind is p.POSITIONAL_OR_KEYWORD]


@each_op
def test_arrays_come_first_and_the_rest_has_defaults(name: str):
    for p in parameters(getattr(dnn, name)):
        assert (p.kind is p.POSITIONAL_ONLY) == (p.default is p.empty), p


@each_op
def test_definition_takes_the_same_arguments_and_defaults(name: str):
    op, definition, arrays = getattr(dnn, name), getattr(reference, name), ARRAYS[name]
    ours = {p.name: p.default for p in parameters(op) if p.kind is p.KEYWORD_ONLY and p.name not in ONLY_LIBRARY}
    theirs = [p for p in parameters(definition) if p.kind is p.KEYWORD_ONLY]
    assert [p.name for p in parameters(op)][: len(arrays)] == [p.name for p in parameters(definition)][: len(arrays)]
    assert {p.name for p in theirs} - ONLY_DEFINITION <= set(ours)
    # The definition hands some options on, so its signature does not show them all; a call does.
    for given, without in zip(several(definition(*arrays, **ours)), several(definition(*arrays)), strict=True):
        np.testing.assert_array_equal(given, without)


def several(results: Any) -> tuple[Any, ...]:
    """The results of an op that has one or several."""
    return results if isinstance(results, tuple) else (results,)


def narrow(arrays: tuple[Any, ...]) -> list[Any]:
    """The arrays of float64 as float32."""
    return [v.astype(np.float32) if isinstance(v, np.ndarray) and v.dtype == np.float64 else v for v in arrays]


@each_op
def test_an_equal_call_compiles_nothing_anew(name: str):
    arrays = [jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in narrow(ARRAYS[name])]
    call = lambda: getattr(dnn, name)(*arrays, **NEEDED.get(name, {}))
    jax.clear_caches()
    before = len(_compilations)
    jax.block_until_ready(call())
    first = len(_compilations)
    jax.block_until_ready(call())
    assert len(_compilations) == first
    assert first > before or name == "scale", "compilations are not counted"  # `scale` by 1 is x itself


@each_op
def test_numpy_arrays_of_64_bits_are_read_as_jax_reads_them(name: str):
    """Without a word: a warning is an error here."""
    options = NEEDED.get(name, {})
    found, wanted = (getattr(dnn, name)(*arrays, **options) for arrays in (ARRAYS[name], narrow(ARRAYS[name])))
    for a, b in zip(several(found), several(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@each_op
def test_explain_knows_every_op(name: str):
    found = dnn.explain(getattr(dnn, name), *ARRAYS[name], **NEEDED.get(name, {}))
    assert bool(found) != bool(found.formulas) or name == "scale"
    assert all(formula.op == name for formula in found.formulas)


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
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(dnn, name)) or "", {}, name, None, None)
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
