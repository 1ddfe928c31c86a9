"""`jaxdnn bench train`: the networks are those that were published, their operations agree, and a step is measured."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn.__main__ import main
from jaxdnn.bench.train import in_jax, measure, networks
from jaxdnn.bench.train.networks import NETWORKS, Network

# Parameters as published; ConvNeXt's and ViT's are less exact in the papers. The U-Nets state none of these blocks.
PUBLISHED = {
    "resnet50": 25_557_032,
    "convnext": 28_589_128,
    "vit": 86_415_592,
    "decoder": 1_235_814_400,
    "efficientnet": 5_288_548,
}


@pytest.fixture(autouse=True)
def _as_users_have_it():
    """The formulas of Flax broadcast along leading axes, and jax.nn's attention promotes dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def _weights_without_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(networks, "_filter", lambda _, *shape: np.broadcast_to(np.float32(0), shape))


@pytest.mark.parametrize("name", PUBLISHED)
def test_networks_have_the_published_number_of_parameters(name: str):
    """Up to the head's bias, which the fused loss here leaves out, and ViT's positions and class token."""
    parameters = NETWORKS[name].make(np.random.default_rng(0))
    found = sum(leaf.size for leaf in jax.tree.leaves(parameters)) + 1000
    assert found == pytest.approx(PUBLISHED[name], rel=2e-3)


@pytest.mark.parametrize("ops", [in_jax.Lax, in_jax.Jaxdnn])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_gives_new_parameters_and_a_loss(name: str, ops: Any):
    network = NETWORKS[name]
    parameters = jax.eval_shape(lambda: network.make(np.random.default_rng(0)))
    text = network.vocabulary is not None
    x = jax.ShapeDtypeStruct(network.shape, jnp.int32 if text else jnp.bfloat16)
    labels = jax.ShapeDtypeStruct(network.shape if text else network.shape[:1], jnp.int32)
    new, loss, _ = jax.eval_shape(measure.jax_step(network, ops), parameters, x, labels)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    of = lambda tree: [(v.shape, v.dtype) for v in jax.tree.leaves(tree)]
    assert of(new) == of(parameters)


IMAGE, FILTER = (2, 6, 5, 8), (3, 3, 8, 4)
CALLS = {
    "conv": lambda ops, x, w, p: ops.conv(x, w, p["bias"][:4], stride=2, padding=1),
    "depthwise": lambda ops, x, w, p: ops.conv(x, w[:, :, :1].repeat(2, -1), padding=1, groups=8),
    "conv_transpose": lambda ops, x, w, p: ops.conv_transpose(x, w[:2, :2].swapaxes(2, 3), 2),
    "batch_norm": lambda ops, x, w, p: ops.batch_norm(x, p, residual=x[::-1]),
    "batch_norm without relu": lambda ops, x, w, p: ops.batch_norm(x, p, activation=None),
    "layer_norm": lambda ops, x, w, p: ops.layer_norm(x, p),
    "group_norm": lambda ops, x, w, p: ops.group_norm(x, p, 4, "silu"),
    "instance_norm": lambda ops, x, w, p: ops.group_norm(x, p, 8, "relu"),
    "gelu": lambda ops, x, w, p: ops.activation(x, "gelu"),
    "sigmoid": lambda ops, x, w, p: ops.activation(x, "sigmoid"),
    "max_pool": lambda ops, x, w, p: ops.max_pool(x),
    "mean": lambda ops, x, w, p: ops.mean(x, keep=True) * x,
    "rms_norm": lambda ops, x, w, p: ops.rms_norm(x, p["scale"]),
    "rope": lambda ops, x, w, p: ops.rope(x, 500.0),
    "attention": lambda ops, x, w, p: ops.attention(x, x[:, :, :1] * 0.5, jnp.sin(x[:, :, :1]), causal=True),
    "cross_entropy": lambda ops, x, w, p: ops.cross_entropy(x[:, 0, 0], w[0, 0], jnp.array([1, 3])),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_implementations_compute_the_same(name: str):
    """In float32, where they differ by roundings alone; results and gradients."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (IMAGE, FILTER))
    scale, bias = (jnp.asarray(v, jnp.float32) for v in (rng.uniform(0.5, 2, 8), rng.normal(size=8)))
    p = {"scale": scale, "bias": bias}

    def result(ops: Any) -> Any:
        loss = lambda x, w, p: jnp.sum(jnp.sin(CALLS[name](ops(), x, w, p)))
        return jax.jit(lambda *a: (CALLS[name](ops(), *a), jax.grad(loss, (0, 1, 2))(*a)))(x, w, p)

    for ours, theirs in zip(*map(jax.tree.leaves, map(result, (in_jax.Jaxdnn, in_jax.Lax))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * max(1e-3, float(jnp.abs(theirs).max())))


def _tiny() -> Network:
    make = lambda rng: {"w": rng.standard_normal((3, 3, 3, 4), np.float32), "head": np.ones((4, 10), np.float32)}
    loss = lambda ops, p, x, labels: ops.cross_entropy(ops.mean(ops.conv(x, p["w"], padding=1)), p["head"], labels % 10)
    return Network(make, loss, (2, 8, 8, 3), (2, 8, 8, 3), "nowhere")


@pytest.mark.parametrize("name", ["lax", "jaxdnn"])
def test_a_step_is_measured(name: str):
    row = measure._measure_jax(_tiny(), name, (2, 8, 8, 3), 2)
    assert row["wall_ms"] >= row["least_ms"] > 0
    assert row["compile_s"] > 0
    assert 0 < row["last_loss"] < row["first_loss"]
    assert (row["device_ms"], row["kernels"]) == (None, 0)  # of a GPU alone


def test_command_lists_failures_and_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = {"wall_ms": 3.0, "compile_s": 1.0, "device_ms": 2.5, "kernels": 7, "peak_gib": 1.0, "first_loss": 7.0}
    found = {"lax": whole}
    failed = {"error": ["RuntimeError: no memory"]}
    monkeypatch.setattr(measure, "_in_a_process", lambda network, name, shape, repeats: found.get(name, failed))
    path = tmp_path / "found.json"
    assert main(["bench", "train", "--case", "vit", "--batch", "3", "--json", str(path)]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: no memory" in said
    assert "3.00 ms a step" in said
    rows = json.loads(path.read_text())["rows"]
    assert rows[0].items() >= {"network": "vit", "implementation": "lax", "shape": [3, 64, 64, 3], **whole}.items()


@pytest.mark.parametrize("loss", [7.9, float("nan")])
def test_another_loss_is_no_result(loss: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    whole = {"wall_ms": 3.0, "compile_s": 1.0, "device_ms": None, "kernels": 0, "peak_gib": None}
    losses = {"lax": 7.0, "jaxdnn": loss}
    found = lambda network, name, shape, repeats: {**whole, "first_loss": losses.get(name, 7.0)}
    monkeypatch.setattr(measure, "_in_a_process", found)
    assert main(["bench", "train", "--case", "vit"]) == 1
    assert f"its first loss is {loss}, not 7.0" in capsys.readouterr().out


def test_a_process_that_fails_says_why():
    found = measure._in_a_process("vit", "lax", (1, 8, 8, 5), 1)  # an error of JAX: no network has 5 channels
    assert "conv_general_dilated" in found["error"][0]


def test_pytorch_starts_from_the_same_loss():
    pytest.importorskip("torch")
    ours, theirs = (
        made(_tiny(), name, (2, 8, 8, 3), 1)["first_loss"]
        for made, name in ((measure._measure_jax, "lax"), (measure._measure_torch, "torch"))
    )
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_command_refuses_options_of_single_ops(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "train", "--part", "0/2"]) == 2
    assert "`bench train` has no --part" in capsys.readouterr().err


def test_command_refuses_unknown_networks(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "train", "--case", "vgg"]) == 2
    assert "knows no vgg; there are resnet50" in capsys.readouterr().err
