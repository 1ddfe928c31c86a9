"""Random calls take every branch of the kernels' planners, the rarest first, and a report names those never taken."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxdnn._src import families
from jaxdnn._src.cases import case as plain
from jaxdnn._src.conv.hopper import tuning
from jaxdnn._src.conv.hopper.plan import Axis, Problem
from jaxdnn._src.conv.hopper.scheduler import decided
from jaxdnn._src.hopper import branches
from jaxdnn.verify import random, random_call, random_report, show
from jaxdnn.verify.cli import main
from jaxdnn.verify.random_report import Report

# ---- branches --------------------------------------------------------------------------------------------------------


def _passed(*taken: branches.Branch) -> Report:
    return Report(0, status="passed", branches=taken)


def test_calls_are_steered_to_the_branches_taken_least():
    calls, every = random.Calls(0, 1000, None, random.STEERED, branches.every()), branches.every()
    rare = ("pool", "kernel", "strips")
    for _ in range(random.OFTEN):
        calls.tell(_passed(*(b for b in every if b != rare)), None)
    taken = [calls.take() for _ in range(1000)]
    towards = [call[1] for call in taken if call is not None]
    assert towards[: calls.steered_from] == [None] * calls.steered_from
    assert towards[calls.steered_from :][: random.OFTEN + 1] == [rare] * random.OFTEN + [None]
    assert calls.take() is None


def test_a_branch_counts_when_it_was_taken_not_when_it_was_asked_for():
    """Calls that miss it, are refused or fail are asked for again, so often; then it is given up."""
    calls, every = random.Calls(0, 1000, None, 1.0, branches.every()), branches.every()
    rare = ("pool", "kernel", "strips")
    calls.tell(_passed(*(b for b in every if b != rare)), None)
    assert calls.take() == (0, rare)
    assert calls.take() is None  # one is enough, and under way
    calls.tell(_passed(), rare)
    assert calls.take() == (1, rare)
    calls.tell(Report(1, status="failed", branches=(rare,)), rare)
    assert calls.take() is None
    calls = random.Calls(0, 1000, None, 1.0, branches.every())
    calls.tell(_passed(*(b for b in every if b != rare)), None)
    assert calls.take() == (0, rare)
    calls.tell(_passed(rare), rare)
    assert calls.take() is None


def test_under_a_checker_each_branch_is_taken_once():
    calls, every = random.Calls(0, 1000, None, 1.0, branches.every()), branches.every()
    calls.tell(_passed(*every[3:]), None)
    assert [calls.take() for _ in range(4)] == [(i, branch) for i, branch in enumerate(sorted(every[:3]))] + [None]


def test_a_run_ends_at_many_failures():
    calls = random.Calls(0, 10_000, None, 0)
    for i in range(random.ENOUGH):
        calls.take()
        calls.tell(Report(i, status="failed"), None)
    assert calls.take() is None


KERNEL_OPS = {
    "pipeline": ("conv", "conv_dgrad", "conv_transpose"),
    "wgrad": ("conv_wgrad",),
    "grouped": ("grouped_matmul", "grouped_matmul_wgrad"),
    "attention gradient": ("attention_dgrad",),
    "softmax": ("softmax", "softmax_dgrad", "logsumexp"),
    "norm": ("layer_norm", "rms_norm_dgrad", "group_norm", "instance_norm_dgrad", "batch_norm", "batch_norm_dgrad"),
    "pool": ("pool", "pool_dgrad"),
    "attention": ("attention",),
    "dropout": ("dropout", "fused_dropout", "fused_dropout_dgrad"),
    "sampling": ("grid_sample",),
}


@pytest.mark.parametrize("kernel", KERNEL_OPS)
def test_every_branch_taken_is_listed(as_on_h200, kernel):
    """Calls that an H200 would be given, lowered here; whatever their planners say, `EVERY` knows of."""
    among = {(op, "hopper"): 1.0 for op in KERNEL_OPS[kernel]}
    taken: set[branches.Branch] = set()
    for index in range(12):
        found = random_call.draw(1, index, among)
        assert found.facts.refusal is None, found
        here = random_call.branches_of(found)
        assert here
        taken |= here
    assert taken <= set(branches.every())
    assert len(taken) > 10


def test_drawn_arrays_are_small():
    """With guards, workspaces and what is made on the way a call has to fit a process's share of a GPU's memory."""
    rng, largest = np.random.default_rng(0), dict[str, int]()
    for family, number in itertools.product(families.cases(), range(150)):
        for op in (op for op in family.ops if "hopper" in family.engines_of(op)):
            leads = [lead for (of, _), lead in family.leads.items() if of == op]
            drawing = leads[number % len(leads)] if leads and number % 3 == 0 else family.draw
            shape = getattr(drawing(op, "hopper", rng, "small"), "shape", ())
            if isinstance(shape, tuple):  # a convolution has roles, and bounds of its own
                largest[op] = max(largest.get(op, 0), math.prod(shape))
    assert max(largest.values()) <= 2**23, largest
    assert largest["batch_norm_dgrad"] > 2**20


def test_windows_that_are_drawn_fit():
    """Also where taps were taken away because the definition would sum too many products."""
    for index in range(400):
        found = random_call.draw(777, index, {("conv", "xla"): 1.0})
        assert min(found.case.geometry.outputs) > 0, (index, found.case.geometry)


LED = sorted({branch for f in families.cases() for _, branch in f.leads})
# What is named otherwise by configurations than by branches, and is found among them all the same.
NAMED = [("pipeline", "teams", "2 x 1"), ("wgrad", "warpgroups", "1 x 3"), ("pipeline", "tiles in turn", "yes")]


@pytest.mark.parametrize("branch", [*LED, *NAMED], ids="/".join)
def test_a_rare_branch_is_taken_by_a_call_that_is_drawn_for_it(as_on_h200, branch):
    found = random_call.draw(7, 1, random_call.pairs(None, None), branch)
    assert random_call.takes(found, branch), found


def test_a_picked_configuration_is_the_same_each_time():
    @dataclasses.dataclass(frozen=True)
    class Config:
        columns: int
        rows: int

    configs = [Config(c, r) for c in (64, 128, 256) for r in (64, 128)]
    taken = lambda config: branches.named("pipeline", columns=config.columns, tail_of_columns=config.columns > 64)
    found = random_call.Drawn(None, plain.Facts(None, "fast"), "", 5, None)
    assert found._pick("problem", configs, taken) == found._pick("problem", configs, taken)
    picked = {random_call.Drawn(None, found.facts, "", i, None)._pick("problem", configs, taken) for i in range(60)}
    assert picked == set(configs)
    for branch in (("pipeline", "columns", "64"), ("pipeline", "tail of columns", "no")):
        towards = random_call.Drawn(None, found.facts, "", 5, None, branch)
        assert towards._pick("problem", configs, taken).columns == 64


def test_what_a_configuration_decides_is_what_is_listed():
    """Of every configuration that the planners of convolutions may pick for some problems, by the one function."""
    axis = Axis(24, 24, 3, 1, 1, (0,), (3,), (-1,), 1, 1)
    sparse = Axis(8, 16, 1, 1, 2, (0, 1), (1, 0), (0, 0), 1, 0)
    dtype, every, found = jnp.dtype(jnp.bfloat16), set(branches.every()), set()
    for axes in ((), (axis,), (axis, axis), (sparse, sparse)):
        problem = Problem(8, 128, 128, axes, "tjc", dtype, dtype, jnp.float32)
        for base in tuning.candidates(problem):
            for config in (base, *tuning.beside(problem, base)):
                found |= branches.named("pipeline", **decided(problem, config, 132))
    assert found <= every
    for what, value in (("teams", "1 x 2"), ("teams", "2 x 1"), ("blank", "yes"), ("groups", "no"), ("halo", "2")):
        assert ("pipeline", what, value) in found


def test_an_index_is_one_call_in_every_process():
    """With kernels' configurations, whatever a process hashes, where its functions lie, and without a GPU."""
    program = """
    import jax, sys
    from jaxdnn._src.core import engines
    from jaxdnn._src import hopper
    from jaxdnn.verify import random_call
    engines.device_kind = lambda platform: "NVIDIA H200" if platform == "cuda" else "cpu"
    jax.default_backend = lambda: "gpu"
    hopper.unavailable = lambda: None
    waste = [lambda: i for i in range(int(sys.argv[1]))]
    for among in (random_call.pairs(None, None), random_call.pairs(["conv", "conv_wgrad"], ["hopper"])):
        for index in range(25):
            found = random_call.draw(5, index, among)
            print(found.case, found.facts.refusal, found.kind, found.picks, found.multiprocessors)
    """
    draws = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), seed],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2000")
    ]
    assert draws[0] == draws[1]
    assert draws[0].count("hopper") > 30


@pytest.mark.parametrize("arguments", [["--random", "0"], ["--random", "1", "--workers", "-1"]])
def test_no_run_without_calls_or_processes(arguments, capsys):
    assert main(["verify", *arguments]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_run_of_refused_calls_has_not_passed(capsys):
    assert main(["verify", "--platform", "cpu", "--random", "1", "--op", "softmax", "--engine", "hopper"]) == 1
    assert "FAILED: 0 passed, 0 failed, 1 refused; 0 in guarded memory" in capsys.readouterr().out


def test_a_branch_that_is_none_is_told(capsys):
    assert main(["verify", "--platform", "cpu", "--random", "1", "--towards", "pool/kernel/strip"]) == 2
    assert "close ones: pool/kernel/strips" in capsys.readouterr().err


def test_a_pick_does_not_depend_on_where_an_epilogue_lies():
    """An address in a function's name had made another choice in every process."""

    @dataclasses.dataclass(frozen=True)
    class Problem:
        finish: Any = None

    assert random_call._name(Problem(lambda: 1), [1, 2]) == random_call._name(Problem(lambda: 2), [1, 2])
    assert b"0x" not in random_call._name(Problem(lambda: 1), [1, 2])


def test_summary_counts_and_names_what_was_never_taken():
    tiles = ("pool", "kernel", "tiles")
    told = {"op": "conv", "engine": "hopper", "branches": (tiles,)}
    tried = {"procedure": "batch_invariant, eager", "tried": True}
    reports = [
        Report(0, status="passed", dtype="bf16", **told, **tried),
        Report(1, status="failed", dtype="f16", **told),
        Report(2, status="passed", dtype="f16", **told, procedure="run_to_run, poisoned output"),
    ]
    found = random_report.summary(reports, branches.every())
    assert found["calls"] == {"passed": 2, "failed": 1}
    assert found["by_op"]["conv hopper"]["dtypes"] == {"bf16": 1, "f16": 2}
    assert found["branches"]["pool/kernel/tiles"] == 2
    assert "pool/kernel/tiles" not in found["never_taken"]
    assert "pool/kernel/strips" in found["never_taken"]
    assert [r["index"] for r in found["failed"]] == [1]
    assert (found["procedures"], found["procedures_not_run"]) == ({"batch_invariant, eager": 1}, 1)
    assert not found["passed"]


def test_a_branch_that_is_not_listed_fails_the_run(capsys):
    passed = Report(0, status="passed", op="pool", engine="hopper", branches=(("pool", "kernel", "carpets"),))
    found = random_report.summary([passed], branches.every())
    assert (found["unknown_branches"], found["passed"]) == (["pool/kernel/carpets"], False)
    show.random(Console(width=200), found | {"seconds": 1})
    shown = capsys.readouterr().out
    assert "branches that are not listed: pool/kernel/carpets" in shown
    assert "FAILED" in shown


def test_a_report_is_read_as_it_was_written():
    report = Report(3, status="passed", branches=(("pool", "kernel", "tiles"),), seconds={"running": 1.5})
    assert Report.read(json.loads(json.dumps(dataclasses.asdict(report)))) == report


def test_the_branches_of_chosen_ops_and_engines():
    assert {kernel for kernel, *_ in random_call.reachable(["pool"], ["hopper"])} == {"pool"}
    assert {kernel for kernel, *_ in random_call.reachable(["lstm", "cross_entropy"], ["hopper", "xla"])} == {
        "recurrence",
        "softmax of rows",
        "softmax of long rows",
    }
    assert random_call.reachable(["pool"], ["xla"]) == []
    assert set(random_call.reachable(None, ["hopper"])) == set(branches.every())
