"""A process that runs random calls: `python -m jaxdnn.verify.random_worker`, which `random` starts.

It reads one line of JSON a call, {"index", "towards"}, and answers by lines that start with `ANSWER`: reports of what
it is about to do, and at last of what came of the call. A call may end the process: `random` starts another. Where its
input ends while a call runs, whoever asked has gone, and the process ends soon, not after minutes. Everything else that
is printed goes to the standard error stream.
"""

import argparse
import dataclasses
import json
import os
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

ANSWER = "jaxdnn random call: "


ABANDONED = 4  # the exit status of a process that nobody waits for any more
GRACE = 10.0  # seconds within which what is being done may still end


def asked(lines: Iterable[str]) -> Iterator[str]:
    """The lines, until they end. If what is done with the last one is not done soon after, the process ends."""
    found: queue.Queue[str | None] = queue.Queue()
    idle = threading.Event()

    def listen() -> None:
        for line in lines:
            found.put(line)
        found.put(None)
        if not idle.wait(GRACE):
            os._exit(ABANDONED)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        idle.set()
        line = found.get()
        if line is None:
            return
        idle.clear()
        yield line


def main() -> int:
    """Serves calls until its input ends. Returns 0, or 3 after an error that leaves the device unusable."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ops", nargs="*")
    parser.add_argument("--engines", nargs="*")
    parser.add_argument("--unguarded", action="store_true")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import jax

    from jaxdnn._src.cases import case
    from jaxdnn._src.core import engines
    from jaxdnn.verify import random_call
    from jaxdnn.verify.guards import DeviceMemory, Guards

    def answer(found: dict[str, Any]) -> None:
        print(ANSWER + json.dumps(found), file=answers, flush=True)

    # Finding out takes a product, whose library a checker of memory reads for minutes; GPUs flush nothing.
    flush = False if given.unguarded else case.flushes_subnormals()
    among = random_call.pairs(given.ops, given.engines)
    guards = Guards(DeviceMemory()) if engines.platform() == "cuda" and not given.unguarded else None
    answer({"ready": jax.local_devices()[0].device_kind})
    tell = lambda report: answer(dataclasses.asdict(report))
    for call in map(json.loads, asked(sys.stdin)):
        towards = tuple(call["towards"]) if call["towards"] else None
        found = random_call.timed(given.seed, call["index"], among, towards, flush=flush, guards=guards, tell=tell)
        tell(found)
        if found.fatal:
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
