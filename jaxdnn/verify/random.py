"""`jaxdnn verify --random N`: random calls in processes of their own, and which branches of planners they took.

Processes compile at the same time, so that a GPU always has something to do. One that dies, or does not answer in
time, fails its call and is started again. After most of the calls, the rest are steered to the branches taken least.
"""

import argparse
import collections
import contextlib
import difflib
import json
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jaxdnn._kernels.hopper import branches
from jaxdnn.verify import case

SECONDS = 180  # that a call may take, compilation included
STEERED, OFTEN = 0.15, 6  # the share of calls that are steered, and how often a branch is then to be taken
RECYCLED = 400  # calls after which a process is started anew: compiled programs stay in memory
MEMORY = 5 << 29  # bytes of a GPU for each process
GPU_WORKERS = 24  # processes at most
ENOUGH = 100  # failures after which no further call is run
Branch = tuple[str, str, str]


class Worker:
    """A process that runs calls."""

    def __init__(self, words: list[str], number: int, gpus: int, memory: float):
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{memory:.4f}",
        }
        if "--unguarded" in words:  # each array is then an allocation of its own, which a checker of memory sees
            environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        if gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        if gpus == 0:
            environment["JAX_PLATFORMS"] = "cpu"
        self.calls, self.errors = 0, collections.deque[str](maxlen=5)
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        if stdin is None or stdout is None or stderr is None:  # for the type checker: all three are pipes
            raise RuntimeError("a process for random calls has no pipes")
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.drained = threading.Thread(target=self._drain, daemon=True)
        self.drained.start()
        try:
            self._read()
        except EOFError as error:
            self.end()
            raise RuntimeError(f"a process for random calls does not start: {error}") from None

    def _drain(self) -> None:
        for line in self.stderr:
            self.errors.append(line.strip()[:300])

    def _read(self) -> dict[str, Any]:
        """The process's next answer; raises EOFError where it ends or gives none in time."""
        if not select.select([self.stdout], [], [], SECONDS)[0]:
            self._kill()
            raise EOFError(f"no answer in {SECONDS} s")
        line = self.stdout.readline()
        if not line:
            status = self.process.wait()
            self.drained.join(5)
            raise EOFError(f"the process ended with status {status}: {' | '.join(self.errors)}")
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            raise EOFError(f"an answer that is none: {line[:200]!r}") from None

    def run(self, index: int, towards: Branch | None) -> dict[str, Any]:
        """What came of a call."""
        self.calls += 1
        print(json.dumps({"index": index, "towards": towards}), file=self.stdin, flush=True)
        return self._read()

    def _kill(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Ends the process, which has nothing more to read; its exit status."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()
        self.drained.join(5)
        self.stdout.close()
        self.stderr.close()
        return self.process.returncode


class Calls:
    """The calls that are still to be run: first as they come, then steered to branches that were taken least.

    `share` of them are steered; if all are, there are no more than it takes to take each branch once, as far as can be.
    """

    def __init__(self, first: int, count: int, towards: Branch | None, share: float):
        self.next, self.end, self.towards = first, first + count, towards
        self.steered_from = self.end - int(count * share)
        self.once = share == 1
        self.taken, self.asked = collections.Counter[Branch](), collections.Counter[Branch]()
        self.lock, self.failed = threading.Lock(), 0

    def take(self) -> tuple[int, Branch | None] | None:
        """The next call; None if there is none."""
        with self.lock:
            if self.next >= self.end:
                return None
            wanted = self._wanted() if self.next >= self.steered_from else None
            if self.once and wanted is None:
                return None
            index, self.next = self.next, self.next + 1
            return index, wanted or self.towards

    def _wanted(self) -> Branch | None:
        """The branch that was taken least, if not often enough."""
        enough = 1 if self.once else OFTEN
        left = [b for b in every() if self.taken[b] < enough and self.asked[b] < enough]
        if not left:
            return None
        wanted = min(left, key=lambda b: (self.asked[b] + self.taken[b], b))
        self.asked[wanted] += 1
        return wanted

    def tell(self, report: dict[str, Any]) -> None:
        """Counts the branches that a call took; ends the run when there are failures enough."""
        with self.lock:
            self.failed += report["status"] == "failed"
            if self.failed >= ENOUGH:
                self.next = self.end
            if report["status"] == "passed":
                self.taken.update(tuple(branch) for branch in report.get("branches", ()))


def every() -> list[Branch]:
    """All branches of all planners."""
    decided = [(kernel, what, values) for kernel, found in branches.EVERY.items() for what, values in found.items()]
    return [(kernel, what, str(value)) for kernel, what, values in decided for value in values]


def run(arguments: argparse.Namespace, here: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs the calls that the arguments ask for, and yields a report for each as it ends."""
    on_gpu = case.platform() == "cuda"
    gpus = len(here["devices"]) if on_gpu else 0
    workers = arguments.workers or (min(GPU_WORKERS * gpus, max((os.cpu_count() or 2) - 1, 1)) if on_gpu else 1)
    workers = min(workers, arguments.random)
    chosen = arguments.towards or arguments.op or arguments.engine
    share = 0.0 if chosen or not on_gpu or arguments.random < 400 else 1.0 if arguments.under else STEERED
    calls = Calls(arguments.index, arguments.random, _branch(arguments.towards), share)
    done: queue.Queue[dict[str, Any] | RuntimeError | None] = queue.Queue()
    memory = MEMORY / _gpu_bytes() if on_gpu else 0.1
    for number in range(workers):
        threading.Thread(
            target=_serve,
            args=(_words(arguments), calls, done, number, gpus, memory),
            daemon=True,
            name=f"worker {number}",
        ).start()
    ended = 0
    while ended < workers:
        report = done.get()
        if isinstance(report, RuntimeError):
            raise report
        if report is None:
            ended += 1
        else:
            yield report


def _gpu_bytes() -> int:
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats["bytes_limit"] / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")))


def _branch(text: str | None) -> Branch | None:
    if text is None:
        return None
    known = {"/".join(branch): branch for branch in every()}
    if text not in known:
        close = ", ".join(difflib.get_close_matches(text, known, n=3, cutoff=0.3))
        raise ValueError(f"`--towards` must be a branch of a planner, got {text!r}; close ones: {close}.")
    return known[text]


def _words(arguments: argparse.Namespace) -> list[str]:
    """The command of a process."""
    under = shlex.split(arguments.under or "")
    words = [*under, sys.executable, "-m", "jaxdnn.verify.random_worker", "--seed", str(arguments.seed)]
    words += ["--unguarded"] if under else []
    for name, values in (("--ops", arguments.op), ("--engines", arguments.engine)):
        words += [name, *values] if values else []
    return words


def _serve(words: list[str], calls: Calls, done: "queue.Queue[Any]", number: int, gpus: int, memory: float) -> None:
    """One thread: keeps a process busy, and starts another when it has ended."""
    worker, index = None, 0
    try:
        while (call := calls.take()) is not None:
            index, towards = call
            try:
                worker = worker or Worker(words, number, gpus, memory)
                report = worker.run(index, towards)
            except (EOFError, OSError) as error:
                report = _lost(index, f"the process that ran it ended: {error}")
                if worker is not None:
                    worker.end()
                    worker = None
            except Exception as error:  # of this harness, not of a call: it ends the run
                if worker is not None:
                    worker.end()
                done.put(RuntimeError(str(error)))
                return
            report["towards"] = "/".join(towards) if towards else None
            calls.tell(report)
            done.put(report)
            if worker is not None and report.get("fatal"):
                worker.end()
                worker = None
            elif worker is not None and worker.calls >= RECYCLED:
                _finish(worker, index, done)
                worker = None
        if worker is not None:
            _finish(worker, index, done)
    finally:
        done.put(None)


def _lost(index: int, message: str) -> dict[str, Any]:
    """The report of a call that gave none."""
    report = {"index": index, "id": "", "op": "", "engine": "", "dtype": "", "towards": None}
    return report | {"status": "failed", "message": message}


def _finish(worker: Worker, index: int, done: "queue.Queue[Any]") -> None:
    """Ends a process. What it runs under may have found something, and says so by its exit status."""
    if status := worker.end():
        done.put(
            _lost(index, f"a process, this its last call, ended with status {status}: {' | '.join(worker.errors)}")
        )


# ---- what was found --------------------------------------------------------------------------------------------------


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by op and engine, and of branches; the calls that failed."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    dtypes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    taken = collections.Counter[Branch]()
    for r in reports:
        name = f"{r['op']} {r['engine']}"
        counts[name][r["status"]] += 1
        if r["status"] != "refused":
            dtypes[name][r["dtype"]] += 1
        if r["status"] == "passed":
            taken.update(tuple(branch) for branch in r.get("branches", ()))
    failed = [r for r in reports if r["status"] == "failed"]
    return {
        "calls": dict(collections.Counter(r["status"] for r in reports)),
        "by_op": {name: dict(c) | {"dtypes": dict(dtypes[name])} for name, c in sorted(counts.items())},
        "branches": {"/".join(branch): taken[branch] for branch in every()},
        "unknown_branches": sorted("/".join(branch) for branch in set(taken) - set(every())),
        "never_taken": sorted("/".join(branch) for branch in every() if not taken[branch]),
        "guarded": sum(bool(r.get("guarded")) for r in reports),
        "largest_ratio": max((r.get("ratio") or 0 for r in reports), default=0),
        "seconds_in_processes": {
            what: round(sum(r.get("seconds", {}).get(what, 0) for r in reports), 1) for what in ("drawing", "running")
        },
        "failed": [{k: v for k, v in r.items() if k != "branches"} for r in failed],
    }
