"""What the normalisations of float64 lower to: nothing narrower, and the same for a GPU as for a CPU."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from tests.norm.cases import CASES, FEW

pytestmark = pytest.mark.usefixtures("x64")
NARROW = r"tensor<(?:\d+x)*(?:f32|bf16|f16|tf32|f8\w+)>"


def narrow_constants(text: str) -> list[float]:
    """Those that float32 holds exactly although they have many digits, which 1/n and eps of float64 have not."""
    values = map(float, re.findall(r"constant dense<([-+.\dEe]+)> : tensor<(?:\d+x)*f64>", text))
    with np.errstate(over="ignore"):
        return [v for v in values if float(np.float32(v)) == v and (np.frexp(v)[0] * 2**11) % 1 != 0]


def lowered(f: Callable[..., Any], *arrays: Any, platform: str) -> str:
    given = [jax.ShapeDtypeStruct(np.shape(a), jnp.float64) for a in arrays]
    return jax.jit(f).trace(*given).lower(lowering_platforms=(platform,)).as_text()


def both(f: Callable[..., Any], *arrays: Any) -> str:
    """The programs for CUDA and for CPUs, which add in forms of their own."""
    return "".join(lowered(f, *arrays, platform=platform) for platform in ("cuda", "cpu"))


@pytest.mark.parametrize("engine", ["xla", "ordered"])
@pytest.mark.parametrize("name", FEW)
def test_float64_stays_float64(name: str, engine: str):
    norm = CASES[name]
    x, s, b, dy = norm.arrays(31, np.float64)
    saved = norm.call()(x, s, b)[1:3] if norm.centred else norm.call()(x, s, b)[1:2]
    names = ("mean", "rstd") if norm.centred else ("rstd",)
    back = lambda dy, x, s, *saved: norm.gradients(
        dnn, dy, x, s, engine=engine, **dict(zip(names, saved, strict=True) if saved else ())
    )
    second = lambda dy, x, s: jax.jvp(lambda x, s: back(dy, x, s), (x, s), (x, s))
    forth = lambda x, s, b: jax.jvp(norm.call(engine=engine), (x, s, b), (x, s, b))
    programs = [both(forth, x, s, b), both(back, dy, x, s), both(back, dy, x, s, *saved), both(second, dy, x, s)]
    for text in programs:
        assert "f64" in text
        assert not re.findall(NARROW, text)
        assert not narrow_constants(text)


def test_synchronised_statistics_stay_float64():
    x = np.zeros((8, 3, 2, 5))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def run(x: Any) -> Any:
        y, mean, rstd, *_ = dnn.batch_norm(x, axis_name="d")
        return y, dnn.batch_norm_dgrad(y, x, mean=mean, rstd=rstd, axis_name="d")[0]

    text = lowered(jax.shard_map(run, mesh=mesh, in_specs=spec("d"), out_specs=spec("d")), x, platform="cuda")
    assert "f64" in text
    assert not re.findall(NARROW, text)


@pytest.mark.parametrize("narrow", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
def test_a_narrow_step_would_be_seen(narrow: Any):
    through = lambda x: dnn.layer_norm(x + (x - 1).astype(narrow).astype(x.dtype))
    assert re.findall(NARROW, both(through, np.zeros((2, 3))))


def test_a_narrow_constant_would_be_seen():
    for eps, found in ((1e-5, []), (float(np.float32(1e-5)), [float(np.float32(1e-5))])):
        programs = both(lambda x, eps=eps: dnn.layer_norm(x, eps=eps), np.zeros((2, 3)))
        assert narrow_constants(programs) == 2 * found


@pytest.mark.parametrize("name", FEW)
def test_what_is_subtracted_twice_is_one_mean(name: str):
    """Behind a barrier: XLA on GPUs took the mean's last sum again in every kernel, and not in the same order."""
    norm = CASES[name]
    if not norm.centred:
        pytest.skip("subtracts no mean")
    x, s, b, _ = norm.arrays(31, np.float64)
    text = lowered(norm.call(engine="xla"), x, s, b, platform="cuda")
    (function,) = [part for part in text.split("func.func") if "optimization_barrier" in part]
    ((held, made),) = re.findall(r"(%\w+) = stablehlo.optimization_barrier (%\w+)", function)
    uses = {name: len(re.findall(rf"{name}\b", function)) - 1 for name in (held, made)}
    assert uses[made] == 1
    assert uses[held] >= 2
