"""Random calls: a seed and an index reproduce one, faults of every kind are found, branches are counted."""

import argparse
import dataclasses
import itertools
import json
import queue
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn_reference as reference
from jaxdnn._src import families
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.cases import case as plain
from jaxdnn._src.conv.cases import checks, data
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.conv.cases.geometries import Geometry
from jaxdnn._src.conv.cases.skip import SkipCase
from jaxdnn._src.core.tolerance import ACCUMULATIONS
from jaxdnn._src.matmul import cases as matmul
from jaxdnn._src.norm.cases import NormCase
from jaxdnn.verify import command, levels, matrix, random, random_call, random_worker
from jaxdnn.verify.cli import main
from jaxdnn.verify.random_report import Report

PAIRS = [(op, e) for f in families.cases() for op in f.ops for e in f.engines_of(op) if e != "hopper"]


def test_every_public_op_is_drawn():
    assert {op for op, _ in random_call.pairs(None, None)} >= set(families.ops())


@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=lambda v: v)
def test_a_drawn_call_passes(op, engine):
    """In this process, as a worker runs it; index 10 is put to a procedure of its level as well."""
    found = random_call.draw(3, 10, {(op, engine): 1.0})
    report = random_call.run(found, 3, 10, flush=plain.flushes_subnormals(), guards=None)
    assert report.status == "passed", report


def test_products_are_drawn_with_an_alpha_for_each_column():
    given = [matmul.draw("matmul", "xla", np.random.default_rng(seed), "drawn") for seed in range(120)]
    each = [case for case in given if case.blend.each]
    assert len(each) >= 2
    assert not any(case.geometry.scaled for case in each)
    assert [matmul.facts(case).refusal for case in each] == [None] * len(each)


def test_messages_name_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(random_call, "draw", refused)
    report = random_call.timed(1, 2, None, None, flush=False, guards=None, tell=lambda _: None)
    assert "planted" in report.message
    assert "random_call.py" in report.message
    assert str(Path(random_call.__file__).parents[2]) not in report.message


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
    [
        ("wrong", "outside of the error bound"),
        ("sometimes", "other bits when it is repeated"),
        ("dies", "ILLEGAL_ADDRESS"),
    ],
)
def test_faults_fail(monkeypatch, fault, text):
    repeated = random_call._Run.repeated
    monkeypatch.setattr(
        random_call._Run, "repeated", lambda self, compiled, *rest: repeated(self, _Faulty(compiled, fault), *rest)
    )
    found = random_call.draw(3, 1, {("conv", "xla"): 1.0})
    if fault == "sometimes":  # a level that promises that bits repeat
        found = dataclasses.replace(found, facts=dataclasses.replace(found.facts, level="run_to_run"))
    report = random_call.run(found, 3, 1, flush=plain.flushes_subnormals(), guards=None)
    assert report.status == "failed"
    assert text in report.message
    assert report.fatal == (fault == "dies")


@pytest.mark.parametrize("message", ["INTERNAL: CUDA_ERROR_LAUNCH_FAILED", "other bits"])
def test_a_procedure_that_fails_fails_its_call(monkeypatch, message):
    """What leaves the device of no use in a procedure is told before it, with the call, and as fatal after it."""

    def die(subject, extent):
        raise RuntimeError(message)

    for of_level in levels.PROCEDURES.values():
        for procedure in of_level:
            monkeypatch.setitem(of_level, procedure, die)
    told: list[Report] = []
    found = random_call.draw(3, 10, {("layer_norm", "xla"): 1.0})
    report = random_call.run(found, 3, 10, flush=plain.flushes_subnormals(), guards=None, tell=told.append)
    assert (report.status, report.fatal) == ("failed", "CUDA" in message)
    assert report.procedure in report.message
    assert message in report.message
    assert [r.status for r in told] == ["running"] * 2
    assert all(r.id == found.case.id and r.call == repr(found.case) for r in told)
    assert told[1].message == f"in the procedure {report.procedure}"


# ---- processes -------------------------------------------------------------------------------------------------------


_START = f"""
import json, os, sys, time
def answer(found): print({random.ANSWER!r} + json.dumps(found), flush=True)
def tell(**known): answer(json.loads({json.dumps(dataclasses.asdict(Report(0)))!r}) | known)
def calls():
    for line in sys.stdin:
        yield json.loads(line)["index"]
answer({{"ready": 1}})
"""


def _served(body: str, count: int, *, under: bool = False, towards: Any = None, first: str = "") -> list[Any]:
    """What is reported of so many calls that processes of this program run."""
    done: Any = queue.Queue()
    words = [sys.executable, "-c", first + _START + textwrap.dedent(body)]
    random._Serving(words, under, random.Calls(7, count, towards, 0), done).serve(random.Device())
    return list(done.queue)


@pytest.mark.parametrize(
    ("body", "text"),
    [("os._exit(9)", "while it ran, the process that ran it ended: the process ended with status 9"),
     ("time.sleep(60)", "no answer in 2 s")],
)  # fmt: skip
def test_a_process_that_dies_or_hangs_fails_its_call(monkeypatch, body, text):
    monkeypatch.setattr(random, "SECONDS", 30 if "9" in text else 2)
    towards = ("pool", "kernel", "tiles")
    body = f"for i in calls():\n  tell(index=i, id='conv/a', message='while it ran', towards='x')\n  {body}"
    *reports, last = _served(body, 2, towards=towards)
    assert last is None
    assert [(r.index, r.id, r.status, r.towards) for r in reports] == [(i, "conv/a", "failed", "x") for i in (7, 8)]
    assert all(text in r.message for r in reports)


def test_a_process_that_does_not_start_ends_the_run():
    done: Any = queue.Queue()
    words = [sys.executable, "-c", "raise ImportError('no device')"]
    random._Serving(words, False, random.Calls(0, 5, None, 0), done).serve(random.Device())
    assert "no device" in str(done.get())
    assert done.get() is None


def test_a_process_that_ends_late_fails_no_call(monkeypatch):
    """It is ended, and that is all."""
    monkeypatch.setattr(random, "ENDING", 0.3)
    reports = _served("for i in calls(): tell(index=i, status='passed')\ntime.sleep(60)", 2)
    assert [r and r.status for r in reports] == ["passed", "passed", None]


@pytest.mark.parametrize(("seconds", "status"), [(0.2, 0), (60, random_worker.ABANDONED)])
def test_a_process_whose_asker_has_gone_ends(seconds: float, status: int):
    """What it does may still end; of a call that takes minutes nobody would read the report."""
    head = "import sys, time\nfrom jaxdnn.verify import random_worker\nrandom_worker.GRACE = 3\n"
    body = f"for _ in random_worker.asked(sys.stdin): print('begun', flush=True); time.sleep({seconds})"
    words = [sys.executable, "-c", head + body]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        print("a call", file=process.stdin, flush=True)
        assert process.stdout.readline() == "begun\n"
        process.stdin.close()
        assert process.wait(30) == status


def test_what_a_process_runs_under_names_the_call():
    """A tool that says something while a call runs, on either stream; what it says before and after is of no call."""
    body = """
    for i in calls():
        tell(index=i, message="while it ran")
        if i in (8, 9):
            stream = (sys.stdout, sys.stderr)[i - 8]
            print("========= Invalid __global__ write of size 4 bytes", file=stream, flush=True)
        tell(index=i, status="passed")
    print("========= ERROR SUMMARY: 2 errors")
    sys.exit(99)
    """
    *reports, last = _served(body, 4, under=True, first="print('========= COMPUTE-SANITIZER')\n")
    assert last is None
    assert [(r.index, r.status) for r in reports] == [(7, "passed"), (8, "failed"), (9, "failed"), (10, "passed")]
    assert "said: Invalid __global__ write of size 4 bytes" in reports[1].message


def test_a_process_that_ends_badly_under_a_tool_has_its_call_looked_for():
    """Where the tool says nothing but by its status, each call runs alone until it is found."""
    body = """
    bad = False
    for i in calls():
        bad |= i == 8
        tell(index=i, status="passed", towards="a/b/c")
    sys.exit(99 if bad else 0)
    """
    *reports, last = _served(body, 4, under=True)
    assert last is None
    assert [r.status for r in reports] == ["passed"] * 4 + ["failed"]
    assert (reports[-1].index, reports[-1].towards) == (8, "a/b/c")
    assert "status 99" in reports[-1].message
    *reports, last = _served(body, 4)  # without a tool nobody asks
    assert "a process that ran calls 7 to 10 ended with status 99" in reports[-1].message


def _asked(**given: Any) -> Any:
    return argparse.Namespace(**{"workers": None, "random": 1000} | given)


def test_processes_share_the_visible_gpus_and_their_memory(monkeypatch):
    monkeypatch.setattr(random.os, "cpu_count", lambda: 100)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    large = random._devices(_asked(), 2, 140 << 30)
    assert len(large) == 48
    assert [d.visible for d in large[:3]] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1f")
    assert [d.visible for d in random._devices(_asked(workers=3), 2, 140 << 30)] == ["5", "GPU-1f", "5"]
    assert random._devices(_asked(workers=2), 1, 140 << 30)[0].visible == ""  # the one that this process sees
    for gpus, workers, size in itertools.product((1, 2), (None, 1, 4), (8 << 30, 24 << 30, 140 << 30)):
        devices = random._devices(_asked(workers=workers), gpus, size)
        sharing = -(-len(devices) // gpus)
        assert sum(d.memory for d in devices[::gpus]) * size + sharing * random.CONTEXT <= size
        assert devices[0].memory * size <= random.MEMORY
    assert random._devices(_asked(random=2), 0, 0) == [random.Device()]
    with pytest.raises(ValueError, match="at most 4, for which the memory suffices, got 9"):
        random._devices(_asked(workers=9), 1, 8 << 30)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_reports_and_reproduces(tmp_path, capsys):
    path = tmp_path / "r"
    given = ["--platform", "cpu", "--random", "2", "--index", "9", "--seed", "4", "--op", "add", "--json", str(path)]
    assert main(["verify", *given]) == 0
    assert "2 passed, 0 failed" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert (document["finished"], document["passed"]) == (True, True)
    assert document["procedures"] == {"run_to_run, recompilation": 1}  # of index 10
    assert document["command"] == "jaxdnn verify --random 2 --op add --seed 4 --platform cpu --index 9"
    given = argparse.Namespace(
        op=["add"], engine=None, dtype=None, level=None, case=None, extent="standard", seed=4, all=False, turn=None
    )
    given.platform, given.devices, given.under = "cpu", None, None
    line = command._reproduce_random(given, 12, "pool/kernel/tiles")
    assert line == "jaxdnn verify --random 1 --index 12 --op add --seed 4 --platform cpu --towards pool/kernel/tiles"


def test_a_run_that_is_cut_off_has_written_what_it_found(tmp_path, monkeypatch):
    """Whoever reads the file finds a whole document, which says that the run had not finished."""
    path = tmp_path / "r.json"

    def cut_off(arguments, here, reachable):
        yield Report(3, status="failed", message="wrong", op="add", engine="xla", dtype="f32", ratio=np.inf)
        raise KeyboardInterrupt

    monkeypatch.setattr(random, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        main(["verify", "--platform", "cpu", "--random", "5", "--json", str(path)])
    document = json.loads(path.read_text())
    assert (document["finished"], document["passed"], document["calls"]) == (False, False, {"failed": 1})
    assert document["failed"][0]["reproduce"] == "jaxdnn verify --random 1 --index 3 --seed 0 --platform cpu"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--random", "1", "--dtype", "f32"], "`--dtype` is for the matrix"),
        (["--random", "1", "--level", "run_to_run"], "`--level` is for the matrix"),
        (["--random", "1", "--full"], "`--full` is for the matrix"),
        (["--random", "1", "--list"], "`--list` is for the matrix"),
        (["--towards", "pool/kernel/tiles"], "`--towards` is for random calls"),
        (["--random", "1", "--under", "tool --log-file x"], "leave `--log-file` out"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_arguments_that_do_not_go_together_are_refused(arguments, text, capsys):
    assert main(["verify", *arguments]) == 2
    assert text in capsys.readouterr().err


# ---- what they found, and no other test had --------------------------------------------------------------------------


def test_bounds_of_subnormal_operands_hold_for_the_tensor_core(monkeypatch):
    """A tensor core aligns a subnormal float16 by its type's least exponent, and so cuts off more of it."""
    geometry = Geometry("subnormal", 64, (9, 8), 2, 16, (1, 1))
    case = Case("conv", "hopper", "f16", "NHWC", None, geometry, out="f32")
    rule = ACCUMULATIONS["tensor_core"]
    operands, extras = data.arrays(case, "subnormal", 0, rule)
    out = np.asarray(
        reference.conv(*operands, **case.arguments(), arithmetic="tensor_core", schedule=reference.Schedule())
    )
    found = checks.judge(case, "subnormal", operands, extras, out, rule)
    assert found.passed, found.message
    monkeypatch.setattr(checks, "_of_least_exponents", lambda *given: given[-1])
    assert not checks.judge(case, "subnormal", operands, extras, out, rule).passed


def test_bounds_of_a_blend_do_not_depend_on_the_priors_dtype():
    """A bound that was computed in the prior's float16 had lost the rounding of its product."""
    rule, prior = Epilogue(alpha=1.3717, beta=-0.6931), np.array([0.267, 1e-5, 3.0], np.float16)
    wide = rule.error(np.zeros(3), np.zeros(3), prior=prior.astype(np.float64))
    np.testing.assert_array_equal(rule.error(np.zeros(3), np.zeros(3), prior=prior), wide)
    assert (wide > 2.0**-25 * np.abs(prior.astype(np.float64))).all()


@pytest.mark.parametrize(
    ("op", "shape", "beyond"),
    [("instance_norm", (10, 1, 288), False), ("instance_norm", (10, 2, 288), True), ("rms_norm", (10, 1), True)],
)
def test_one_element_has_no_deviation_beyond_the_range(op, shape, beyond):
    """Its deviation is 0 and its gradient a rounding error, where an inverse deviation of 0 would give 0 exactly."""
    layout = (("layout", "NWC"),) if op == "instance_norm" else ()
    assert ("beyond" in NormCase(f"{op}_dgrad", "xla", "f32", "drawn", shape, layout).kinds()) is beyond


def test_a_case_that_takes_a_gradient_needs_an_engine_for_it(as_on_h200):
    """Of these groups the convolution's kernel takes both numbers of channels, backward data's does not."""
    geometry = Geometry("groups", 1, (4, 6), 320, 720, (3, 3), padding=((1, 1), (1, 1)), groups=5)
    one = SkipCase("conv_skip", "hopper", "f16", "groups", geometry)
    assert plain.facts(one).refusal is None
    assert "as many output channels" in str(matrix.of("conv_skip").facts(one).refusal)


def test_an_overflow_that_cudnn_writes_as_zero_is_stated_and_expected_of_it_only(as_on_h200):
    """0 in place of -infinity; a 0 in place of +infinity, or of another float16's negative number, fails."""
    case = Case("conv_wgrad", "xla", "f16", "NHWC", None, Geometry("overflow", 2, (3, 3), 2, 2, (1, 1)))
    told = checks.facts(case)
    assert "loses_negative_overflow" in told.hazards
    assert "loses_negative_overflow" not in checks.facts(dataclasses.replace(case, out="f32")).hazards
    assert "loses_negative_overflow" not in checks.facts(dataclasses.replace(case, dtype="bf16")).hazards
    x, dy = np.ones((2, 3, 3, 2), np.float16), np.ones((2, 3, 3, 2), np.float16)
    x[..., 0], dy[..., 0] = 128, -128
    with np.errstate(over="ignore"):
        golden = np.asarray(reference.conv_wgrad(x, dy, *case.sizes_argument(), **case.arguments())).astype(np.float16)
    rule = ACCUMULATIONS["float32"]

    def passes(hazards: tuple[str, ...], out: np.ndarray) -> bool:
        facts = dataclasses.replace(told, hazards=hazards, level="run_to_run")
        return all(c.passed for c in checks.judge_all(case, facts, "integers", (x, dy), {}, out, rule))

    lost = np.where(golden == -np.inf, np.float16(0), golden)
    assert (lost != golden).sum() == 1
    assert passes((), golden)
    assert passes(told.hazards, golden)
    assert passes(told.hazards, lost)
    assert not passes((), lost)
    assert not passes(told.hazards, np.where(golden < 0, np.float16(0), golden))
    positive = [np.where(golden == -np.inf, np.float16(v), -golden) for v in (np.inf, 0)]
    x = -x
    assert passes(told.hazards, positive[0])
    assert not passes(told.hazards, positive[1])
