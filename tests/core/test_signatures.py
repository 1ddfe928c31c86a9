"""A call that gives an option by position, or an argument that the op has not, is told how to give it: over all ops."""

import functools as ft
import importlib.util
import inspect
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases import example
from jaxdnn._src.core import peers, signatures

EXAMPLES = example.first()


def options(name: str) -> list[str]:
    return [p.name for p in inspect.signature(getattr(dnn, name)).parameters.values() if p.kind is p.KEYWORD_ONLY]


each_op = pytest.mark.parametrize("name", [name for name in EXAMPLES if options(name)])  # of which one has no options


@each_op
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_an_option_by_position(name: str, jitted: bool):
    arguments, _ = EXAMPLES[name].bind(*map(jnp.asarray, EXAMPLES[name].data()))
    required = [p for p in inspect.signature(getattr(dnn, name)).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    arguments = [*arguments[: len(required)], "surplus"]
    call = (lambda: jax.eval_shape(lambda: getattr(dnn, name)(*arguments))) if jitted else None
    wanted = rf"Options of `{name}` must be given by keyword, as in {name}\(.+=\.\.\.\), got {len(arguments)} arg"
    with pytest.raises(TypeError, match=wanted):
        call() if call else getattr(dnn, name)(*arguments)


@each_op
def test_an_argument_that_is_none(name: str):
    arguments, given = EXAMPLES[name].bind(*map(jnp.asarray, EXAMPLES[name].data()))
    misspelt = max(options(name), key=len) + "s"
    with pytest.raises(TypeError, match=rf"`{name}` has no argument `{misspelt}` \(did you mean '"):
        getattr(dnn, name)(*arguments, **given, **{misspelt: 1})


@pytest.mark.parametrize("other", peers.ARGUMENTS)
def test_arguments_of_peers(other: str):
    """Every row of the table is a name that some op has not, and hints at one that it has."""
    known = [
        name for name in EXAMPLES if set(peers.ARGUMENTS[other]) & set(options(name)) and other not in options(name)
    ]
    assert known
    arguments, given = EXAMPLES[known[0]].bind(*map(jnp.asarray, EXAMPLES[known[0]].data()))
    with pytest.raises(TypeError, match=rf"`{known[0]}` has no argument `{other}` \(did you mean '"):
        getattr(dnn, known[0])(*arguments, **given, **{other: 1})


@pytest.mark.parametrize(("op", "other"), peers.NOTES)
def test_arguments_of_peers_that_none_stands_for(op: str, other: str):
    """A note says what to do, and no argument of a near name is guessed: `determinism` for `deterministic`, say."""
    assert other not in options(op)
    arguments, given = EXAMPLES[op].bind(*map(jnp.asarray, EXAMPLES[op].data()))
    with pytest.raises(TypeError) as caught:
        getattr(dnn, op)(*arguments, **given, **{other: True})
    assert str(caught.value) == f"`{op}` has no argument `{other}` ({peers.NOTES[op, other]})."


@pytest.mark.parametrize("other", peers.FUNCTIONS)
def test_functions_of_peers(other: str, monkeypatch: pytest.MonkeyPatch):
    """Every name of the table is none of ours, and what is hinted at exists, with that choice of its argument."""
    if f"jaxdnn.{other}" in sys.modules:  # a module that was imported is an attribute
        monkeypatch.delattr(dnn, other)
    with pytest.raises(AttributeError) as caught:
        getattr(dnn, other)
    meant = peers.FUNCTIONS[other]
    assert str(caught.value) == f"module 'jaxdnn' has no attribute {other!r} (did you mean {meant}?)"
    if meant.startswith("`import"):
        assert importlib.util.find_spec(meant.strip("`").removeprefix("import "))
        return
    path, _, call = meant.removeprefix("jaxdnn.").partition("(")
    function = ft.reduce(getattr, path.split("."), dnn)
    if call:
        x = jnp.ones((1, 4, 4, 2))
        written = meant.replace("...", "2").replace("jaxdnn.", "dnn.")
        jax.eval_shape(lambda: eval(written, {"dnn": dnn, "x": x}))
    assert callable(function)


@pytest.mark.parametrize(
    ("other", "meant"),
    [
        *(("BatchNorm", "batch_norm"), ("Conv2d", "conv"), ("ConvTranspose2d", "conv_transpose"), ("max_pool", "pool")),
        *(("MaxPool2d", "pool"), ("GroupNorm", "group_norm"), ("CTCLoss", "ctc_loss"), ("layernorm", "layer_norm")),
        *(("grid_sampler", "grid_sample"), ("atention", "attention")),
    ],
)
def test_names_in_other_spellings(other: str, meant: str):
    with pytest.raises(AttributeError, match=rf"no attribute '{other}' \(did you mean jaxdnn\.{meant}\?\)$"):
        getattr(dnn, other)


def test_what_resembles_no_function_gets_no_hint():
    with pytest.raises(AttributeError, match=r"^module 'jaxdnn' has no attribute 'qzxw'$"):
        _ = dnn.qzxw  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(dnn, "__path_of_nothing__")


def test_options_are_chosen_by_what_is_given():
    x, c = jnp.ones((2, 4, 4, 3)), jnp.ones(3)
    with pytest.raises(TypeError, match=r"as in batch_norm\(x, scale=\.\.\., bias=\.\.\.\), got 3 arguments"):
        dnn.batch_norm(x, c, c)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"as in pool\(x, window=\.\.\.\), got 2 arguments"):
        dnn.pool(x, 2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"as in activation\(x, activation=\.\.\.\), got 2 arguments"):
        dnn.activation(x, "relu")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"as in softmax\(x, axis=\.\.\.\), got 2 arguments"):
        dnn.softmax(x, 1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"as in layer_norm\(x, scale=\.\.\., eps=\.\.\.\), got 3 arguments"):
        dnn.layer_norm(x, c, 1e-3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"as in conv\(x, w, padding=\.\.\.\), got 3 arguments"):
        dnn.conv(x, jnp.ones((1, 1, 3, 2)), "SAME")  # type: ignore[call-arg]


def test_an_array_too_many():
    x = jnp.ones(3)
    with pytest.raises(TypeError, match="`add` must be given `a`, `c` by position and no more, got 3 arguments"):
        dnn.add(x, x, x)  # type: ignore[call-arg]


def test_other_errors_of_types_are_the_ops_own():
    with pytest.raises(TypeError, match=r"conv\(\) missing 1 required positional argument: 'w'"):
        dnn.conv(jnp.ones((2, 4, 4, 3)))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="`x` must have one of the dtypes"):
        dnn.activation(jnp.ones(3, jnp.int32))


BLENDS = [
    (name, prior, beta)
    for name in EXAMPLES
    for prior, beta in signatures.priors(inspect.signature(getattr(dnn, name))).items()
]


@pytest.mark.parametrize(("name", "prior", "beta"), BLENDS)
def test_a_prior_without_beta_is_refused(name: str, prior: str, beta: str):
    """It would not be read. With beta=0.0, which says so, it is not refused for that."""
    arguments, given = EXAMPLES[name].bind(*map(jnp.asarray, EXAMPLES[name].data()))
    given[prior] = jnp.ones((1, 1, 1, 1, 1, 1))  # of no result's shape
    with pytest.raises(ValueError, match=rf"`{beta}` must be given with `{prior}`, .*, got {prior} alone\."):
        getattr(dnn, name)(*arguments, **given)
    with pytest.raises(ValueError, match=f"`{prior}` must have"):
        getattr(dnn, name)(*arguments, **given, **{beta: 0.0})


def test_ops_that_blend_are_found():
    found = {name for name, *_ in BLENDS}
    assert found >= {"conv", "conv_dgrad", "activation", "pool", "softmax", "batch_norm", "resample", "reduce"}
    of_parameters = {("batch_norm_dgrad", f"prior_{name}", "beta_param") for name in ("dscale", "dbias")}
    assert {blend for blend in BLENDS if blend[1] != "prior"} == of_parameters
