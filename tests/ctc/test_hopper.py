"""The kernels of CTC, run by a small machine: the bits of engine `xla`, refusals, faults that the machine must find."""

import contextlib
import functools as ft
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import compat, engines, selection
from jaxdnn._src.ctc.primitive import CtcSpec

if compat.lacking(compat.KERNELS):
    pytest.skip("the kernels need newer private parts of Pallas", allow_module_level=True)

from jaxdnn._src.ctc.hopper import calls, lattice_ptx, rows_ptx
from tests.hopper import ctc_machine

OPS = ("ctc_loss", "ctc_posterior", "ctc_dgrad")


@pytest.fixture(autouse=True)
def _by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "launch", ctc_machine.launched)
    monkeypatch.setattr(hopper, "no_device", lambda call: None)


def data(sizes: tuple[int, ...], seed: int = 0, scale: float = 1.0, blank: int = 0) -> tuple[np.ndarray, ...]:
    """Scores, labels, and lengths: of no steps, of all, of too few for the labels, of no labels; one label is wrong."""
    n, steps, classes, count = sizes
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n, steps, classes)) * scale).astype(np.float32)
    labels = rng.integers(0, classes - 1, (n, count)).astype(np.int32)
    labels += labels >= blank
    labels[:, 1 : 1 + count // 8] = labels[:, :1]  # equal ones, side by side
    of_steps = rng.integers(steps // 2, steps + 1, n).astype(np.int32)
    of_labels = np.minimum(rng.integers(0, count + 1, n), of_steps // 2).astype(np.int32)
    of_steps[0], of_labels[0] = steps, min(count, steps * 2 // 3)
    if n > 4:
        of_steps[1], of_steps[2], of_labels[2], of_labels[3] = 0, 1, count, 0
        labels[4, 0], of_labels[4] = -1, max(1, of_labels[4])
        x[5 % n, 0] = np.nan
    return x, labels, of_steps, of_labels


@ft.cache
def _program(name: str, spec: CtcSpec) -> Callable[..., Any]:
    """An engine's loss, its loss and posterior, and its gradient: one program for all data of equal shapes."""

    def run(ct: jax.Array, *operands: jax.Array) -> tuple[Any, ...]:
        x, labels, steps, _ = operands
        alone = _run(name, "ctc_loss", spec, *operands)
        loss, shares = _run(name, "ctc_posterior", spec, *operands)
        return alone, loss, shares, _run(name, "ctc_dgrad", spec, ct, x, shares, loss, labels, steps)

    return jax.jit(run)


def both(operands: tuple[np.ndarray, ...], dtype: Any = np.float32, normalize: str = "softmax", blank: int = 0) -> Any:
    """What the engines find."""
    x, *others = map(jnp.asarray, operands)
    spec = CtcSpec(blank, normalize, None, "portable")
    ct = jnp.asarray(np.random.default_rng(1).normal(size=len(x)), jnp.float32)
    return [[np.asarray(v) for v in _program(name, spec)(ct, x.astype(dtype), *others)] for name in ("xla", "hopper")]


def _engine(name: str, op: str) -> engines.Engine:
    return next(e for e in engines.registered(op) if e.name == name)


def _run(name: str, op: str, spec: CtcSpec, *operands: jax.Array) -> Any:
    avals = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands)
    return _engine(name, op).run(engines.Call(op, spec, avals, "cpu"), *operands)


def alone(name: str, op: str, operands: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The results of one op of labels that are no blank 0."""
    run = ft.partial(_run, name, op, CtcSpec(0, "softmax", None, "portable"))
    return [np.asarray(v) for v in jax.tree.leaves(jax.jit(run)(*operands))]


def same_bits(wanted: list[np.ndarray], found: list[np.ndarray]) -> None:
    for which, (a, b) in enumerate(zip(wanted, found, strict=True)):
        assert a.dtype == b.dtype
        kind = np.uint16 if a.dtype.itemsize == 2 else np.uint32
        a, b = (np.where(np.isnan(v.astype(np.float32)), 1, v.view(kind)) for v in (a, b))
        np.testing.assert_array_equal(a, b, err_msg=str(which))


# ---- bits ------------------------------------------------------------------------------------------------------------

SIZES = (7, 19, 6, 5)


@pytest.mark.parametrize("normalize", ["softmax", "none"])
def test_bits_are_those_of_xla(normalize: str):
    for scale in (1.0, 60.0):
        same_bits(*both(data(SIZES, scale=scale, blank=2), normalize=normalize, blank=2))
    x, *others = data(SIZES, 3, blank=2)  # classes that no path may take
    x = np.where(np.random.default_rng(2).random(x.shape) < 0.2, -np.inf, x)
    x[..., 2] = 0
    same_bits(*both((x.astype(np.float32), *others), normalize=normalize, blank=2))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_bits_of_narrow_scores(dtype: Any):
    same_bits(*both(data((3, 9, 6, 5)), dtype))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 0), (2, 3, 5, 0)])
def test_bits_of_small_lattices(sizes: tuple[int, ...]):
    same_bits(*both(data(sizes)))


@pytest.mark.parametrize(("warps", "each", "count"), [(16, 1, 70), (1, 2, 40), (2, 2, 70), (2, 4, 130)])
def test_bits_of_several_warps_and_of_several_pairs_of_a_lane(
    warps: int, each: int, count: int, monkeypatch: pytest.MonkeyPatch
):
    """Of labels that are all but a few too many for the steps, so that paths go through all warps."""
    monkeypatch.setattr(lattice_ptx, "WARPS", warps)
    steps = count + count // 8 + 5
    plan = lattice_ptx.plan(steps, count, both=True)
    assert (plan.each, plan.warps) == (each, min(warps, -(-(count + 1) // (32 * each))))
    operands = data((1, steps, 300, count))
    operands[3][:] = count
    wanted = alone("xla", "ctc_posterior", operands)
    assert np.isfinite(wanted[0]).all()
    same_bits(wanted, alone("hopper", "ctc_posterior", operands))


@pytest.mark.parametrize(
    ("sizes", "kept"), [((3, 5, 1300, 3), True), ((1, 3, 21000, 3), False), ((4, 5, 6, 140), True)]
)
def test_bits_of_many_rows_of_a_block(sizes: tuple[int, ...], kept: bool, monkeypatch: pytest.MonkeyPatch):
    """Of blocks that have several rows, one after the other, and threads that have several labels."""
    monkeypatch.setattr(rows_ptx, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(rows_ptx.Plan, "blocks", 2)
    batch, steps, classes, count = sizes
    assert rows_ptx.plan(batch, steps, classes, count, "f32").kept == kept
    same_bits(*both(data(sizes)))


# ---- the exchange between warps --------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[str], str]] = {
    "no barrier": lambda code: re.sub(r"bar\.sync[^\n]*\n", "", code),
    "one place": lambda code: re.sub(r"sub\.s32 (r\d+), (r\d+), \1;\n", "", code),
    "no labels left": lambda code: re.sub(r"@p\d+ st\.shared[^\n]*\n", "", code),
    "nothing emitted": lambda code: re.sub(r"(@p\d+ ld\.global\.nc\.f32 f\d+, \[d\d+\+0\];\n)", "", code, count=1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    """By the machine, which knows which accesses to shared memory are ordered, or by the bits."""
    operands = data((1, 60, 5, 40))
    [wanted] = alone("hopper", "ctc_loss", operands)
    assert np.isfinite(wanted).all()
    plan = lattice_ptx.plan(60, 40, both=False)
    code = lattice_ptx.lattice(plan)
    faulty = FAULTS[fault](code)
    assert faulty != code
    monkeypatch.setattr(lattice_ptx, "lattice", lambda plan: faulty)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the machine's own
        assert alone("hopper", "ctc_loss", operands)[0] != wanted


# ---- the engine ------------------------------------------------------------------------------------------------------


def call(op: str, sizes: tuple[int, ...] = SIZES, dtype: Any = np.float32, **changes: Any) -> engines.Call:
    n, steps, classes, count = sizes
    of = jax.ShapeDtypeStruct
    x, labels, lengths = of((n, steps, classes), dtype), of((n, count), np.int32), of((n,), np.int32)
    losses, shares = of((n,), np.float32), of((n, steps, count + 1), np.float32)
    avals = (losses, x, shares, losses, labels, lengths) if op == "ctc_dgrad" else (x, labels, lengths, lengths)
    spec = CtcSpec(**({"blank": 0, "normalize": "softmax", "engine": None, "level": "fast"} | changes))
    return engines.Call(op, spec, avals, "cuda", "NVIDIA H200")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("sizes", "dtype", "says"),
    [
        (SIZES, np.float64, "take bfloat16, float16, float32, not float64"),
        ((0, 5, 4, 3), np.float32, "at least one sequence and one step"),
        ((2, 0, 4, 3), np.float32, "at least one sequence and one step"),
        ((2, 5, 4, 2048), np.float32, "at most 2047 labels, not 2048"),
        ((2, 5, 300_000, 3), np.float32, "at most 262144 classes, not 300000"),
        ((2**20, 2**10, 4, 3), np.float32, "fewer than 1073741824 steps of all sequences"),
    ],
)
def test_refusals(op: str, sizes: tuple[int, ...], dtype: Any, says: str):
    assert says in (_engine("hopper", op).supports(call(op, sizes, dtype)) or "")


@pytest.mark.parametrize("op", OPS)
def test_serves(op: str):
    engine = _engine("hopper", op)
    for sizes in ((1, 1, 1, 0), (32, 1000, 10000, 2047), (2, 5, 1 << 18, 3)):
        assert engine.supports(call(op, sizes)) is None
    assert engine.level(call(op)) == "portable"
    assert engine.workspace(call("ctc_posterior", (2, 3, 4, 4))) == 40 * 2 * 3 * 5
    assert lattice_ptx.plan(3, lattice_ptx.MOST_LABELS, both=True).warps == 16
    with pytest.raises(ValueError, match="empty"):
        lattice_ptx.plan(3, lattice_ptx.MOST_LABELS + 1, both=True)
    assert selection.select(call(op, level="portable")).name == "hopper"
    untimed = (2, 9, 30_000, 3)
    assert selection.select(call(op, untimed)).name == "xla"
    assert selection.select(call(op, untimed, engine="hopper")).name == "hopper"


def test_a_loss_and_its_gradient_are_lowered(monkeypatch: pytest.MonkeyPatch):
    """Emissions and the lattice; with the gradient the shares and the gradient's rows, too."""
    monkeypatch.undo()
    monkeypatch.setattr(hopper, "no_device", lambda call: None)
    x, labels = jax.ShapeDtypeStruct((3, 6, 4), jnp.bfloat16), jax.ShapeDtypeStruct((3, 2), jnp.int32)
    loss = lambda x, labels: dnn.ctc_loss(x, labels, reduction="sum", engine="hopper")
    for function, count in ((loss, 2), (jax.grad(loss), 4)):
        lowered = jax.jit(function).trace(x, labels).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("custom_call @mosaic_gpu") == count
