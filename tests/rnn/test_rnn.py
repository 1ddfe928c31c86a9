"""Recurrent layers: the definition's bits, and values of other libraries."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.rnn import xla
from jaxdnn_reference.rnn import sigmoid, tanh
from tests.level_calls import roundings_omitted
from tests.rnn.layer_calls import GATES, LENGTHS, H, T, called, compiled, data, each_kind, wave


@each_kind
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_bits_are_the_definitions(kind: str, direction: str):
    """Of more terms than a pass adds; in 16 bits products are exact, and the states rounded."""
    for dtype in (np.float32, jnp.bfloat16, np.float16) if direction == "forward" else (np.float32,):
        v = data(kind, 1, dtype, (3, 4, 11, 9, 5)) | {"lengths": np.array([4, 0, 3], np.int32)}
        found = compiled(kind, v, direction=direction, engine="ordered", fill=0.75)
        wanted = called(reference, kind, v, direction=direction, fill=0.75, arithmetic="ordered")
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype == dtype
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=np.dtype(dtype).name)


@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_no_device_omits_a_rounding_of_what_is_multiplied(kind: str, steps: int):
    """Seen on an H200: the operands of a projection and of the product behind a reset gate were not rounded."""
    v = data(kind, 1, jnp.bfloat16, (3, steps, 5, 4, 2))
    function = lambda v: called(dnn, kind, v, engine="ordered")

    def pulled(v: dict[str, Any]) -> Any:
        found, back = jax.vjp(function, v)
        return back([jnp.ones_like(y) for y in found])

    for run in (function, pulled):
        assert not roundings_omitted(run, v)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["lstm-projected-clipped", "gru-after"])
def test_bits_in_float64(kind: str):
    v = data(kind, 1, np.float64) | {"lengths": LENGTHS}
    wanted, golden = (called(reference, kind, v, arithmetic=a) for a in ("ordered", "golden"))
    for engine in ("ordered", "xla"):
        for a, b, c in zip(compiled(kind, v, engine=engine), wanted, golden, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, c, rtol=0, atol=1e-14)
            if engine == "ordered":
                np.testing.assert_array_equal(a, b)


# Of PyTorch 2.15 on a CPU in float64: y, final states, and the gradients of the sum of y and the final h, in x and in
# the first three recurrent biases. The second sequence has two steps.
PYTORCH = {
    "lstm": """
        0.07730810623336841 0.10081222266956577 0.010509935143319243 0.0014778594227287181 0.09293199530182804
            0.003095152458721495 0.055341517441818755 0.07560042992145094 0.027957247340579028
            0.026499215554891223 0.0 0.0
        0.09293199530182804 0.003095152458721495 0.027957247340579028 0.026499215554891223
        0.5288093208169882 0.5215657436360808 0.23744956427102484 0.8286910514616105 0.8841611209833844
            0.43294234189135017
        -0.07249858986317691 -0.016246341737877083 -0.04393175798349934 -0.09575209467978928
            -0.04527663324596718 -0.17983536759361693 -0.0058751009253418425 -0.01698222057366934
            -0.0364627084126672 0.09481115702961403 0.0 0.0
        0.29266399100866575 -0.08645245735922176 -0.2877704438233678
    """,
    "gru": """
        0.7894617157227115 0.7890197898003662 0.09502429147120539 0.8899225940767145 0.9668965783487072
            0.5623067963376338 0.5988721486288208 0.8003893847203472 0.47513243188094 0.47868237182795464
            0.45769210538600164 -0.03361754453797598 0.8531944975252388 0.9370742202649034 0.49848063484746424
            0.0 0.0 0.0
        0.5988721486288208 0.8003893847203472 0.47513243188094 0.8531944975252388 0.9370742202649034
            0.49848063484746424
        0.9886764862428695 -1.236133575857502 0.7571148372682702 -0.9619711349557362 1.7720719719862403
            -1.7419942305141742 1.5116394782293145 -1.632060569824859 0.7523988227715965 -0.9286794283026318 0.0
            0.0
        0.2175211810495869 0.1287251810412595 0.21917375930888144
    """,
    "rnn": """
        0.8712960186382249 0.8547583246069707 0.03775603601537234 0.9683307317600282 0.9770469989354986
            0.3299229168017576 0.7437891200640624 0.7738825039629753 0.15283868063468403 0.7694390089081649
            0.757400831112879 0.05090092945267147 0.9720611265282305 0.9794589840439877 0.3272783203822211 0.0
            0.0 0.0
        0.7437891200640624 0.7738825039629753 0.15283868063468403 0.9720611265282305 0.9794589840439877
            0.3272783203822211
        0.6496570531176968 -0.9297003458138398 0.504343602890564 -0.8801741309142634 1.7569970736559164
            -1.9912822283989555 0.8845484031277904 -1.1032674197910355 0.41867855739279874 -0.660349251160664
            0.0 0.0
        2.116689099598112 1.0156361089554715 10.697114812443456
    """,
}


def pytorchs(name: str) -> list[list[float]]:
    """Its rows; a line that is indented further goes on with the one before."""
    rows = PYTORCH[name].strip().replace("\n            ", " ").splitlines()
    return [[float(number) for number in row.split()] for row in rows]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PYTORCH)
def test_values_and_gradients_are_pytorchs(name: str):
    i, h = 2, 3
    columns, wide = (2 if name == "lstm" else h), GATES[name] * h
    x, w, r, d, h0 = wave(2, 3, i), wave(i, wide), wave(columns, wide), wave(wide) / 2, wave(2, columns) / 2
    given: dict[str, Any] = {"bias": wave(wide), "lengths": np.array([3, 2])}
    given |= {"projection": wave(h, columns), "c0": wave(2, h)} if name == "lstm" else {}

    def total(x: Any, d: Any) -> Any:
        found = jax.tree.leaves(getattr(dnn, name)(x, w, r, recurrent_bias=d, h0=h0, **given))
        return jnp.sum(found[0]) + jnp.sum(found[1]), found

    gradients, found = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, d)
    for ours, wanted in zip([*found, gradients[0], gradients[1][:3]], pytorchs(name), strict=True):
        np.testing.assert_allclose(np.ravel(ours), wanted, rtol=1e-13, atol=1e-15)


def test_kernels_of_flax_fit():
    """Its OptimizedLSTMCell: kernels of i, f, g, o for inputs, without a bias, and for the state, with one."""
    v, sigmoid = data("lstm"), jax.nn.sigmoid
    of_x, of_h = (dict(zip("ifgo", np.split(v[name], 4, 1), strict=True)) for name in ("w", "r"))
    bias = dict(zip("ifgo", np.split(v["bias"], 4), strict=True))
    c, h = v["c0"], v["h0"]
    for t in range(T):
        i, f, g, o = (v["x"][:, t] @ of_x[k] + h @ of_h[k] + bias[k][None] for k in "ifgo")
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
    del v["recurrent_bias"]
    for ours, wanted in zip(compiled("lstm", v)[1:], (h, c), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-6)


@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_exact_layers(engine: str):
    """A shift register, a counter, and a state that is kept: whatever order sums have."""
    x = np.random.default_rng(0).integers(0, 9, (2, 6, 1)).astype(np.float32)
    w, r = np.eye(1, 3, dtype=np.float32), np.eye(3, k=1, dtype=np.float32)
    y, h = jax.jit(ft.partial(dnn.rnn, activation="relu", engine=engine))(x, w, r)
    np.testing.assert_array_equal(y[..., 0], x[..., 0])
    np.testing.assert_array_equal(y[:, 2:, 2], x[:, :-2, 0])
    np.testing.assert_array_equal(h, y[:, -1])
    gates = np.array([200, 200, 200, -200], np.float32)  # i = f = g = 1, o = 0
    nothing = np.zeros((1, 4), np.float32)
    run = jax.jit(ft.partial(dnn.lstm, engine=engine))
    y, (h, c) = run(x, nothing, nothing, bias=gates, c0=np.full((2, 1), 3, np.float32))
    np.testing.assert_array_equal(c, 9)
    np.testing.assert_array_equal(y, 0)
    v = data("gru-after")
    v["bias"][H : 2 * H] = 300  # keeps the old state
    y, h = compiled("gru-after", v, engine=engine)
    np.testing.assert_array_equal(h, v["h0"])
    np.testing.assert_array_equal(y, np.broadcast_to(v["h0"][:, None], y.shape))


@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_stated_functions(function: str, dtype: Any):
    """The definition's bits; from float64, or its logarithms, a few units away; limits, signs of zero and NaN."""
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 20, 40, 68.9, 69.1, -69.1, -690.5, 1e30]
    x = np.array([*np.linspace(-30, 30, 20001), *np.linspace(-0.5, 0.5, 5001), *edges], dtype)
    with jax.enable_x64(dtype == np.float64):
        found = np.asarray(jax.jit(getattr(xla, function))(x))
    np.testing.assert_array_equal(found, {"sigmoid": sigmoid, "tanh": tanh}[function](x))
    wide = np.nan_to_num(x.astype(np.longdouble))
    exact = np.tanh(wide) if function == "tanh" else np.exp(-np.logaddexp(np.longdouble(0), -wide))
    error = np.abs(found - exact) / (np.finfo(dtype).eps / 2)
    rate, least = (10, 0) if function == "tanh" else (5, {np.float32: 1e-30, np.float64: 1e-299}[dtype])
    known = ~np.isnan(x)
    assert (error <= rate * np.abs(exact) + 2 * least / np.finfo(dtype).eps)[known].all()
    assert np.isnan(found[~known]).all()
    if function == "tanh":
        np.testing.assert_array_equal(np.signbit(found), np.signbit(x))
