"""Random calls: a seed and an index reproduce one, faults of every kind are found, branches are counted."""

import argparse
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn_reference as reference
from jaxdnn import engines
from jaxdnn._kernels.hopper import branches
from jaxdnn.tolerance import ACCUMULATIONS, Epilogue
from jaxdnn.verify import case as plain
from jaxdnn.verify import matrix, random, random_call
from jaxdnn.verify.cli import main
from jaxdnn.verify.families import conv_checks, conv_data
from jaxdnn.verify.families.conv_cases import Case
from jaxdnn.verify.families.conv_geometries import Geometry

PAIRS = [(op, e) for f in matrix.families() for op in f.ops for e in f.engines_of(op) if e != "hopper"]


@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=lambda v: v)
def test_a_drawn_call_passes(op, engine):
    """In this process, as a worker runs it; index 10 is put to a procedure of its level as well."""
    found = random_call.draw(3, 10, {(op, engine): 1.0})
    report = random_call.run(found, 3, 10, flush=plain.flushes_subnormals(), arena=None)
    assert report["status"] == "passed", report


def test_a_seed_and_an_index_are_one_call():
    among = random_call.pairs(None, None)
    first, again = (random_call.draw(5, 17, among) for _ in range(2))
    assert (first.case, first.kind, first.picks, first.multiprocessors) == (
        again.case,
        again.kind,
        again.picks,
        again.multiprocessors,
    )
    assert random_call.draw(5, 18, among).case != first.case
    assert random_call.draw(6, 17, among).case != first.case


def test_ops_are_all_drawn():
    assert {op for op, _ in random_call.pairs(None, None)} == set(matrix.ops())


# ---- faults ----------------------------------------------------------------------------------------------------------


class _Faulty:
    """What stands in for a compiled program: results that differ from the program's by a fault."""

    def __init__(self, compiled: Any, fault: str):
        self.compiled, self.fault, self.runs = compiled, fault, 0

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def __call__(self, *operands: Any, **named: Any) -> Any:
        self.runs += 1
        out = self.compiled(*operands, **named)
        wrong = out.reshape(-1).at[out.size // 2].set(jnp.asarray(7.5, out.dtype)).reshape(out.shape)
        if self.fault == "wrong" or (self.fault == "sometimes" and self.runs == 3):
            return wrong
        if self.fault == "dies":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an address")
        return out


@pytest.mark.parametrize(
    ("fault", "text"),
    [("wrong", "no rounding of a value"), ("sometimes", "other bits when it is repeated"), ("dies", "ILLEGAL_ADDRESS")],
)
def test_faults_fail(monkeypatch, fault, text):
    repeated = random_call._repeated
    monkeypatch.setattr(
        random_call,
        "_repeated",
        lambda compiled, *rest, **options: repeated(_Faulty(compiled, fault), *rest, **options),
    )
    found = random_call.draw(3, 1, {("conv", "xla"): 1.0})
    if fault == "sometimes":  # a level that promises that bits repeat
        found = dataclasses.replace(found, facts=dataclasses.replace(found.facts, level="run_to_run"))
    report = random_call.run(found, 3, 1, flush=plain.flushes_subnormals(), arena=None)
    assert report["status"] == "failed"
    assert text in report["message"]
    assert report.get("fatal", False) == (fault == "dies")


_READY = 'import json, sys; print(json.dumps({"ready": 1}), flush=True); '


@pytest.mark.parametrize(
    ("body", "text"),
    [("sys.stdin.readline(); import os; os._exit(9)", "status 9"), ("import time; time.sleep(60)", "no answer in 1 s")],
)
def test_a_process_that_dies_or_hangs_fails_its_call(monkeypatch, body, text):
    calls = random.Calls(7, 2, None, 0)
    done: Any = random.queue.Queue()
    seconds = random.SECONDS
    monkeypatch.setattr(random, "SECONDS", 30 if "9" in text else 1)
    random._serve([sys.executable, "-c", _READY + body], calls, done, 0, 0, 0.1)
    reports = [done.get() for _ in range(3)]
    assert [r and r["index"] for r in reports] == [7, 8, None]
    assert all(text in r["message"] and r["status"] == "failed" for r in reports[:2])
    assert seconds > 1


def test_a_process_that_does_not_start_ends_the_run():
    done: Any = random.queue.Queue()
    random._serve(
        [sys.executable, "-c", "raise ImportError('no device')"], random.Calls(0, 5, None, 0), done, 0, 0, 0.1
    )
    assert "no device" in str(done.get())


def test_the_command_reports_and_reproduces(tmp_path, capsys):
    arguments = [
        "verify",
        "--platform",
        "cpu",
        "--random",
        "2",
        "--seed",
        "4",
        "--op",
        "add",
        "--json",
        str(tmp_path / "r"),
    ]
    assert main(arguments) == 0
    assert "2 passed, 0 failed" in capsys.readouterr().out
    given = argparse.Namespace(op=None, engine=None, dtype=None, level=None, case=None, extent="standard", seed=4)
    given.platform, given.devices, given.under = "cpu", None, None
    from jaxdnn.verify import command

    line = command._reproduce_random(given, {"index": 12, "towards": "pool/kernel/tiles"})
    assert line == "jaxdnn verify --random 1 --index 12 --seed 4 --platform cpu --towards pool/kernel/tiles"


# ---- branches --------------------------------------------------------------------------------------------------------


def test_calls_are_steered_to_the_branches_taken_least():
    calls = random.Calls(0, 1000, None, random.STEERED)
    every = random.every()
    rare = ("pool", "kernel", "strips")
    assert rare in every
    calls.tell({"status": "passed", "branches": [list(b) for b in every if b != rare] * random.OFTEN})
    taken = [calls.take() for _ in range(1000)]
    towards = [call[1] for call in taken if call is not None]
    assert towards[: calls.steered_from] == [None] * calls.steered_from
    assert towards[calls.steered_from :][: random.OFTEN + 1] == [rare] * random.OFTEN + [None]
    assert calls.take() is None


def test_under_a_checker_each_branch_is_taken_once():
    calls, every = random.Calls(0, 1000, None, 1.0), random.every()
    calls.tell({"status": "passed", "branches": [list(b) for b in every[3:]]})
    assert [calls.take() for _ in range(4)] == [(i, branch) for i, branch in enumerate(sorted(every[:3]))] + [None]


def test_what_a_process_runs_under_may_fail_it():
    done: Any = random.queue.Queue()
    body = "[print(json.dumps({'status': 'passed'}), flush=True) for _ in sys.stdin]; sys.exit(99)"
    random._serve([sys.executable, "-c", _READY + body], random.Calls(0, 2, None, 0), done, 0, 0, 0.1)
    reports = [done.get() for _ in range(4)]
    assert [r and r["status"] for r in reports] == ["passed", "passed", "failed", None]
    assert "status 99" in reports[2]["message"]


def test_a_run_ends_at_many_failures():
    calls = random.Calls(0, 10_000, None, 0)
    for _ in range(random.ENOUGH):
        calls.take()
        calls.tell({"status": "failed"})
    assert calls.take() is None


KERNEL_OPS = {
    "pipeline": ("conv", "conv_dgrad", "conv_transpose"),
    "wgrad": ("conv_wgrad",),
    "softmax": ("softmax", "softmax_dgrad", "logsumexp"),
    "norm": ("layer_norm", "rms_norm_dgrad", "group_norm", "instance_norm_dgrad", "batch_norm", "batch_norm_dgrad"),
    "pool": ("pool", "pool_dgrad"),
    "dropout": ("dropout", "fused_dropout", "fused_dropout_dgrad"),
}


@pytest.mark.parametrize("kernel", KERNEL_OPS)
def test_every_branch_taken_is_listed(monkeypatch, kernel):
    """Calls that an H200 would be given, lowered here; whatever their planners say, `EVERY` knows of."""
    from jaxdnn._kernels import hopper

    if reason := hopper.unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(engines, "device_kind", lambda platform: "NVIDIA H200" if platform == "cuda" else "cpu")
    monkeypatch.setattr(plain, "platform", lambda: "cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    among = {(op, "hopper"): 1.0 for op in KERNEL_OPS[kernel]}
    taken: set[tuple[str, str, str]] = set()
    for index in range(12):
        found = random_call.draw(1, index, among)
        assert found.facts.refusal is None, found
        operands, extras = random_call._arrays(found, 1)
        with jax.enable_x64(found.case.x64), found.settings(), branches.recorded() as here:
            jax.jit(found.case.function()).trace(*operands, **extras).lower(lowering_platforms=("cuda",))
        assert here
        taken |= {(k, what, str(value)) for k, what, value in here}
    assert taken <= set(random.every())
    assert len(taken) > 10


def test_a_picked_configuration_is_the_same_each_time():
    @dataclasses.dataclass(frozen=True)
    class Config:
        columns: int
        rows: int

    configs = [Config(c, r) for c in (64, 128, 256) for r in (64, 128)]
    found = random_call.Drawn(None, plain.Facts(None, "fast"), "", 5, None)
    assert found._pick("problem", configs) == found._pick("problem", configs)
    picked = {random_call.Drawn(None, found.facts, "", i, None)._pick("problem", configs) for i in range(60)}
    assert picked == set(configs)
    towards = random_call.Drawn(None, found.facts, "", 5, None, ("pipeline", "columns", "256"))
    assert towards._pick("problem", configs).columns == 256


@pytest.mark.parametrize("arguments", [["--random", "0"], ["--random", "1", "--workers", "-1"]])
def test_no_run_without_calls_or_processes(arguments, capsys):
    assert main(["verify", *arguments]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_run_of_refused_calls_has_not_passed(capsys):
    assert main(["verify", "--platform", "cpu", "--random", "1", "--op", "softmax", "--engine", "hopper"]) == 1
    assert "FAILED: 0 passed, 0 failed, 1 refused; 0 in guarded memory" in capsys.readouterr().out


def test_a_branch_that_is_none_is_told():
    with pytest.raises(ValueError, match="close ones: pool/kernel/strips"):
        random._branch("pool/kernel/strip")


def test_a_pick_does_not_depend_on_where_an_epilogue_lies():
    """An address in a function's name had made another choice in every process."""

    @dataclasses.dataclass(frozen=True)
    class Problem:
        finish: Any = None

    assert random_call._name(Problem(lambda: 1), [1, 2]) == random_call._name(Problem(lambda: 2), [1, 2])
    assert b"0x" not in random_call._name(Problem(lambda: 1), [1, 2])


def test_summary_counts_and_names_what_was_never_taken():
    reports = [
        {
            "op": "conv",
            "engine": "hopper",
            "status": "passed",
            "dtype": "bf16",
            "branches": [["pool", "kernel", "tiles"]],
        },
        {"op": "conv", "engine": "hopper", "status": "failed", "dtype": "f16", "message": "", "index": 1},
    ]
    found = random.summary(reports)
    assert found["calls"] == {"passed": 1, "failed": 1}
    assert found["by_op"]["conv hopper"]["dtypes"] == {"bf16": 1, "f16": 1}
    assert found["branches"]["pool/kernel/tiles"] == 1
    assert "pool/kernel/tiles" not in found["never_taken"]
    assert "pool/kernel/strips" in found["never_taken"]
    assert [r["index"] for r in found["failed"]] == [1]
    assert np.all([isinstance(v, int) for v in found["branches"].values()])


# ---- what they found, and no other test had --------------------------------------------------------------------------


def test_bounds_of_subnormal_operands_hold_for_the_tensor_core(monkeypatch):
    """A tensor core aligns a subnormal float16 by its type's least exponent, and so cuts off more of it."""
    geometry = Geometry("subnormal", 64, (9, 8), 2, 16, (1, 1))
    case = Case("conv", "hopper", "f16", "NHWC", None, geometry, out="f32")
    rule = ACCUMULATIONS["tensor_core"]
    operands, extras = conv_data.arrays(case, "subnormal", 0, rule)
    out = np.asarray(
        reference.conv(*operands, **case.arguments(), arithmetic="tensor_core", schedule=reference.Schedule())
    )
    found = conv_checks.judge(case, "subnormal", operands, extras, out, rule)
    assert found.passed, found.message
    monkeypatch.setattr(conv_checks, "_of_least_exponents", lambda *given: given[-1])
    assert not conv_checks.judge(case, "subnormal", operands, extras, out, rule).passed


def test_bounds_of_a_blend_do_not_depend_on_the_priors_dtype():
    """A bound that was computed in the prior's float16 had lost the rounding of its product."""
    rule, prior = Epilogue(alpha=1.3717, beta=-0.6931), np.array([0.267, 1e-5, 3.0], np.float16)
    wide = rule.error(np.zeros(3), np.zeros(3), prior=prior.astype(np.float64))
    np.testing.assert_array_equal(rule.error(np.zeros(3), np.zeros(3), prior=prior), wide)
    assert (wide > 2.0**-25 * np.abs(prior.astype(np.float64))).all()
