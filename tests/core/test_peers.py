"""Errors about names say what is meant: for every choice of every op, by the names of other libraries."""

import dataclasses
import functools as ft
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases import example
from jaxdnn._src.core import checks, peers

NONSENSE = "no-such-name"
TABLES = (
    *(peers.ACTIVATIONS, peers.WINDOWS, peers.IMAGES, peers.LAYOUTS),
    *(peers.SUMS, peers.DTYPES, peers.ENGINES),
)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of an op that takes names, and the error that other names raise."""

    op: str
    name: str
    error: str

    def message(self, value: Any) -> str:
        """What the op says of a value of this argument; nothing if it takes it."""
        found = example.first()[self.op]
        arrays = [v.astype(np.float32) for v in found.data()]
        arguments, options = found.bind(*arrays)
        try:
            jax.eval_shape(lambda: getattr(dnn, self.op)(*arguments, **{**options, self.name: value}))
        except (TypeError, ValueError) as error:
            unknown = rf"`{self.name}` must (be|have (the dtype|one of the dtypes) )"
            return str(error) if re.match(unknown, str(error)) else ""
        except NotImplementedError:
            return ""  # a name that is known, of what cannot be had here
        return ""


@ft.cache
def arguments() -> dict[tuple[str, str], list[Argument]]:
    """All arguments that take names, by their name and the error: ops that share both read them in one place."""
    found: dict[tuple[str, str], list[Argument]] = {}
    for op in example.first():
        for p in inspect.signature(getattr(dnn, op)).parameters.values():
            if p.kind is p.KEYWORD_ONLY and re.search(r"\bstr\b|Padding|Activation|DType|Any", str(p.annotation)):
                error = Argument(op, p.name, "").message(NONSENSE)
                if re.search(r"must be (one of|a dtype|None, one of|the letters)", error):
                    found.setdefault((p.name, error), []).append(Argument(op, p.name, error))
    return found


@ft.cache
def hints() -> list[tuple[Argument, str, Any, str]]:
    """Of each kind of argument and each peer's name that it does not take: what is hinted at, and the message."""
    found = []
    for of_a_kind in arguments().values():
        argument = of_a_kind[0]
        for name, meanings in peers.ELSEWHERE.items():
            words = [str(m[0] if isinstance(m, tuple) else m) for m in meanings]
            if not any(word in argument.error for word in words) and argument.name != "filter_layout":
                continue  # none of its choices is meant, and calls take time
            message = argument.message(name)
            meant = re.search(r"\(did you mean (.*)\?\)\.$", message)
            if meant:
                found.append((argument, name, eval(meant[1], {}), message))
    return found


def test_no_argument_escapes():
    """The arguments are found by their annotation; what is known to take names is among them."""
    names = {name for name, _ in arguments()}
    assert names >= {"activation", "padding", "layout", "filter_layout", "mode", "method", "coordinates", "rounding"}
    assert names >= {"engine", "determinism", "out_dtype", "accumulate", "precision", "op", "nan", "reduction"}
    assert names >= {"boundary", "direction", "reset_gate", "algorithm", "order", "causal", "pairs", "box_format"}


def test_every_hint_is_taken():
    refused = [(a.op, a.name, name, meant, a.message(meant)) for a, name, meant, _ in hints() if a.message(meant)]
    assert hints()
    assert refused == []


def test_every_name_of_a_peer_is_some_arguments():
    """A row of the tables that hints nowhere would be dead; each name stands in one table."""
    hinted = {name for _, name, _, _ in hints()}
    dtypes = [jnp.dtype(d).name for d in (*checks.FLOATS, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.int32)]
    of_dtypes = {name for name in peers.DTYPES if checks.did_you_mean(name, dtypes)}
    assert set(peers.ELSEWHERE) - hinted - of_dtypes == set()
    assert len(peers.ELSEWHERE) == sum(map(len, TABLES))


@pytest.mark.parametrize(
    ("op", "argument", "given", "meant"),
    [
        ("activation", "activation", "silu", "swish"),
        ("conv", "activation", "hardswish", "hard_swish"),
        ("conv", "activation", "gelu-tanh", "gelu_tanh"),
        ("activation", "activation", "tanh_gelu", "gelu_tanh"),
        ("activation", "activation", "relu6", ("clipped_relu", 6.0)),
        ("conv", "padding", "valid", "VALID"),
        ("pool", "padding", "SAME_UPPER", "SAME"),
        ("conv", "layout", "channels_last", "NHWC"),
        ("layer_norm", "out_dtype", "fp16", "float16"),
        ("conv", "out_dtype", "bf16", "bfloat16"),
        ("conv", "precision", "highest", None),
        ("conv_dgrad", "filter_layout", "hwio", "HWIO"),
        ("conv", "engine", "cudnn", "xla"),
        ("conv", "engine", "pallas", "hopper"),
        ("softmax", "determinism", "deterministic", "run_to_run"),
        ("pool", "mode", "avg", "average"),
        ("reduce", "op", "mean", "avg"),
        ("reduce", "op", "sum", "add"),
        ("resample", "method", "bicubic", "cubic"),
        ("grid_sample", "mode", "trilinear", "linear"),
        ("grid_sample", "padding", "reflect", "reflection"),
        ("map_coordinates", "mode", "zeros", "constant"),
        ("attention", "layout", "BHSD", "BNTH"),
        ("lstm", "layout", "batch_first", "NTC"),
        ("lstm", "direction", "backward", "reverse"),
    ],
)
def test_hint(op: str, argument: str, given: str, meant: Any):
    assert Argument(op, argument, "").message(given).endswith(f"got {given!r} (did you mean {meant!r}?).")


def test_what_resembles_nothing_gets_no_hint():
    assert checks.did_you_mean(NONSENSE, ("relu", "swish")) == ""
    assert checks.did_you_mean("silu", ("relu", "tanh")) == ""
    assert checks.did_you_mean(5, ("relu",)) == ""
    assert checks.did_you_mean(lambda x: x, ("relu",)) == ""


@pytest.mark.parametrize(("function", "meant"), [(jax.nn.relu, "relu"), (jax.nn.silu, "swish"), (np.tanh, "tanh")])
def test_a_function_is_taken_by_its_name(function: Any, meant: str):
    """As Flax and Keras have activations."""
    with pytest.raises(ValueError, match=rf"^`activation` must be .* \(did you mean '{meant}'\?\)\.$"):
        dnn.activation(np.ones(3, np.float32), activation=function)
