"""`jaxdnn verify --random N`: random calls in processes of their own, and which branches of planners they took.

Processes compile at the same time, so that a GPU always has something to do. One that dies, or does not answer in
time, fails its call and is started again. After most of the calls, the rest are steered to the branches taken least.

On CUDA the memory around a call's arrays is guarded (`guards`). In place of that a process may run under a tool that
checks memory; what the tool says while a call runs fails that call.
"""

import argparse
import collections
import contextlib
import dataclasses
import difflib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from jaxdnn._src.core import engines
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.branches import Branch
from jaxdnn.verify.random_report import Report
from jaxdnn.verify.random_worker import ANSWER

SECONDS, SECONDS_UNDER = 180, 1200  # that a call may take, compilation included; under a tool
ENDING = 20  # seconds that a process may take to end, without a tool
LATE = 0.2  # seconds after a call's answer within which a tool's output about it may arrive
STEERED, OFTEN = 0.15, 6  # the share of calls that are steered, and how often a branch is then to be taken
RECYCLED, RECYCLED_UNDER = 400, 20  # calls after which a process is started anew: compiled programs stay in memory
# Bytes of a GPU's memory for each process, and the least; what CUDA takes beside them; the share of it that is used.
MEMORY, LEAST_MEMORY, CONTEXT, USED = 5 << 29, 5 << 28, 1 << 29, 0.95
GPU_WORKERS = 24  # processes at most
TOLD = 12  # lines of a tool's output that a report quotes
ENOUGH = 100  # failures after which no further call is run
# How a line of a tool starts: compute-sanitizer's "=========", valgrind's "==123==".
TOOL = re.compile(r"={2,}(\d+={2,})? +\S")


@dataclasses.dataclass(frozen=True)
class Device:
    """The device of a process.

    Attributes:
      visible: its GPUs, as the value of CUDA_VISIBLE_DEVICES; "" for all; None for the CPU.
      memory: the share of the GPU's memory that it takes.
    """

    visible: str | None = None
    memory: float = 0.1


class Worker:
    """A process that runs calls.

    Attributes:
      last: the latest report of the call that it runs or has run.
      ran: these calls.
      reported: whether the tool that it runs under has reported an error in one.
    """

    def __init__(self, words: list[str], device: Device, *, under: bool = False):
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{device.memory:.4f}",
        }
        if under:  # each array is then an allocation of its own, which a checker of memory sees
            environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        if device.visible:
            environment["CUDA_VISIBLE_DEVICES"] = device.visible
        if device.visible is None:
            environment["JAX_PLATFORMS"] = "cpu"
        self.under, self.last, self.reported = under, Report(-1), False
        self.ran: list[tuple[int, Branch | None]] = []
        self.errors, self.output = collections.deque[str](maxlen=5), list[str]()
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        if stdin is None or stdout is None or stderr is None:  # for the type checker: all three are pipes
            raise RuntimeError("a process for random calls has no pipes")
        self.stdin = stdin
        self.listeners = [
            threading.Thread(target=self._listen, args=(stream, stream is stdout), daemon=True)
            for stream in (stdout, stderr)
        ]
        for listener in self.listeners:
            listener.start()
        try:
            self._read()
        except EOFError as error:
            self.end()
            raise RuntimeError(f"a process for random calls does not start: {error}") from None

    def _listen(self, stream: IO[str], answers: bool) -> None:
        """Passes answers on, and keeps what else is printed: the last lines, and those of the tool."""
        with contextlib.suppress(ValueError), stream:  # it may be closed while it is read
            for line in stream:
                if answers and line.startswith(ANSWER):
                    self.answers.put(json.loads(line.removeprefix(ANSWER)))
                    continue
                self.errors.append(line.strip()[:300])
                if TOOL.match(line):
                    self.output.append(line.strip("= \n")[:300])
        if answers:
            self.answers.put(None)

    def _read(self) -> dict[str, Any]:
        """The process's next answer; raises EOFError where it ends or gives none in time."""
        seconds = SECONDS_UNDER if self.under else SECONDS
        try:
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            self._kill()
            raise EOFError(f"no answer in {seconds} s") from None
        if answer is None:
            status = self.end()
            raise EOFError(f"the process ended with status {status}: {' | '.join(self.errors)}")
        return answer

    def run(self, index: int, towards: Branch | None) -> Report:
        """What came of a call. Raises EOFError where the process ends; `last` then says what it was doing."""
        self.ran.append((index, towards))
        self.output.clear()
        self.last = Report(index, towards="/".join(towards) if towards else None, message="before it was drawn")
        try:
            print(json.dumps({"index": index, "towards": towards}), file=self.stdin, flush=True)
        except OSError as error:
            raise EOFError(f"the process has ended with status {self.end()}: {error}") from None
        while self.last.status == "running":
            self.last = Report.read(self._read())
        if self.under:
            time.sleep(LATE)
            if self.output:
                self.reported = True
                return self.last.failed(f"while it ran, what it ran under said: {self.first_report()}")
        return self.last

    def first_report(self) -> str:
        """What the tool printed of the first error that it found."""
        return " | ".join(self.output[:TOLD])

    def _kill(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Ends the process, which has nothing more to read; its exit status, None if it had to be killed."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        status = None
        try:
            status = self.process.wait(SECONDS_UNDER if self.under else ENDING)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()
        for listener in self.listeners:
            listener.join(5)
        return status


class Calls:
    """The calls that are still to be run: first as they come, then steered to branches that were taken least.

    `share` of them are steered; if all are, there are no more than it takes to take each branch once, as far as can be.
    Steered to the `reachable` branches. A branch counts as taken by calls that passed; after twice as many that missed
    it as were wanted it is given up.
    """

    def __init__(self, first: int, count: int, towards: Branch | None, share: float, reachable: Sequence[Branch] = ()):
        self.next, self.end, self.towards, self.reachable = first, first + count, towards, reachable
        self.steered_from = self.end - int(count * share)
        self.once = share == 1
        self.taken, self.under_way, self.missed = (collections.Counter[Branch]() for _ in range(3))
        self.lock, self.failed = threading.Lock(), 0

    def take(self) -> tuple[int, Branch | None] | None:
        """The next call; None if there is none."""
        with self.lock:
            if self.next >= self.end:
                return None
            wanted = self._wanted() if self.next >= self.steered_from else None
            if self.once and wanted is None:
                return None
            if wanted:
                self.under_way[wanted] += 1
            index, self.next = self.next, self.next + 1
            return index, wanted or self.towards

    def _wanted(self) -> Branch | None:
        """The branch that was taken least, if not often enough, with the calls that are under way to it."""
        enough = 1 if self.once else OFTEN
        tried = lambda b: self.taken[b] + self.under_way[b]
        left = [b for b in self.reachable if tried(b) < enough and self.missed[b] < 2 * enough]
        return min(left, key=lambda b: (tried(b) + self.missed[b], b), default=None)

    def tell(self, report: Report, towards: Branch | None) -> None:
        """Counts the branches that a call took; ends the run when there are failures enough."""
        with self.lock:
            self.failed += report.status == "failed"
            if self.failed >= ENOUGH:
                self.next = self.end
            passed = report.status == "passed"
            if passed:
                self.taken.update(report.branches)
            if towards and self.under_way[towards]:
                self.under_way[towards] -= 1
                self.missed[towards] += not (passed and towards in report.branches)


def run(arguments: argparse.Namespace, here: dict[str, Any], reachable: Sequence[Branch]) -> Iterator[Report]:
    """Runs the calls that the arguments ask for, some steered to reachable branches: a report for each as it ends.

    Raises:
      ValueError: there is no such branch, or so many processes do not fit a GPU's memory.
    """
    on_gpu = engines.platform() == "cuda"
    gpus = len(here["devices"]) if on_gpu else 0
    devices = _devices(arguments, gpus, _gpu_bytes() if on_gpu else 0)
    few = arguments.random < 400
    share = 0.0 if arguments.towards or few or not on_gpu else 1.0 if arguments.under else STEERED
    calls = Calls(arguments.index, arguments.random, _branch(arguments.towards), share, reachable)
    return _reports(arguments, calls, devices)


def _reports(arguments: argparse.Namespace, calls: Calls, devices: list[Device]) -> Iterator[Report]:
    done: queue.Queue[Report | RuntimeError | None] = queue.Queue()
    serving = _Serving(_words(arguments), bool(arguments.under), calls, done)
    for number, device in enumerate(devices):
        threading.Thread(target=serving.serve, args=(device,), daemon=True, name=f"worker {number}").start()
    ended = 0
    while ended < len(devices):
        report = done.get()
        if isinstance(report, RuntimeError):
            raise report
        if report is None:
            ended += 1
        else:
            yield report


def _devices(arguments: argparse.Namespace, gpus: int, gpu_bytes: int) -> list[Device]:
    """The device of each process: the visible GPUs in turn, whose memory the processes share."""
    if not gpus:
        return [Device()] * min(arguments.workers or 1, arguments.random)
    used = int(USED * gpu_bytes)
    fit, most = max(used // (MEMORY + CONTEXT), 1), used // (LEAST_MEMORY + CONTEXT)
    workers = arguments.workers or min(GPU_WORKERS * gpus, fit * gpus, max((os.cpu_count() or 2) - 1, 1))
    workers = min(workers, arguments.random)
    sharing = -(-workers // gpus)
    if sharing > most:
        raise ValueError(f"`--workers` must be at most {most * gpus}, for which the memory suffices, got {workers}.")
    memory = min(MEMORY, used // sharing - CONTEXT) / gpu_bytes
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(gpus)]
    return [Device(names[i % gpus] if gpus > 1 else "", memory) for i in range(workers)]


def _gpu_bytes() -> int:
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats["bytes_limit"] / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")))


def _branch(text: str | None) -> Branch | None:
    if text is None:
        return None
    known = {"/".join(branch): branch for branch in branches.every()}
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


class _Serving:
    """What threads do that keep a process busy each."""

    def __init__(self, words: list[str], under: bool, calls: Calls, done: "queue.Queue[Any]"):
        self.words, self.under, self.calls, self.done = words, under, calls, done

    def serve(self, device: Device) -> None:
        """Runs calls while there are any, and starts another process when one has ended."""
        worker, recycled = None, RECYCLED_UNDER if self.under else RECYCLED
        try:
            while (call := self.calls.take()) is not None:
                worker = worker or self._start(device)
                try:
                    report = worker.run(*call)
                except EOFError as error:
                    last = worker.last
                    said = f"; what it ran under said: {worker.first_report()}" if worker.output else ""
                    report = last.failed(f"{last.message}, the process that ran it ended: {error}{said}")
                    worker.end()
                    worker = None
                self.calls.tell(report, call[1])
                self.done.put(report)
                if worker is not None and (report.fatal or len(worker.ran) >= recycled):
                    self._finish(worker, device)
                    worker = None
            if worker is not None:
                self._finish(worker, device)
        except Exception as error:  # of this harness, not of a call: it ends the run
            if worker is not None:
                worker.end()
            self.done.put(RuntimeError(str(error)))
        finally:
            self.done.put(None)

    def _start(self, device: Device) -> Worker:
        return Worker(self.words, device, under=self.under)

    def _finish(self, worker: Worker, device: Device) -> None:
        """Ends a process. Of one that ends badly, for no reason that a call's report gives, the call is looked for.

        One that had to be killed has ended late, which is no failure of a call.
        """
        status = worker.end()
        if not status or worker.reported or worker.last.fatal:
            return
        report, ended = worker.last, f"status {status}: {' | '.join(worker.errors)}"
        first, last = worker.ran[0][0], worker.ran[-1][0]
        message = f"a process that ran calls {first} to {last} ended with {ended}"
        if self.under:
            named = next(filter(None, (self._alone(call, device) for call in worker.ran)), None)
            report, message = named or (report, f"{message}; none of them does when it runs alone")
        report = report.failed(message)
        self.calls.tell(report, None)
        self.done.put(report)

    def _alone(self, call: tuple[int, Branch | None], device: Device) -> tuple[Report, str] | None:
        """A call in a process of its own: its report and what is wrong, None if the process ends well."""
        worker = self._start(device)
        try:
            worker.run(*call)
        except EOFError as error:
            return worker.last, f"the process that ran it alone ended: {error}"
        status = worker.end()
        return (worker.last, f"its process ended with status {status}: {' | '.join(worker.errors)}") if status else None
