"""A process that runs random calls: `python -m jaxdnn.verify.random_worker`, which `random` starts.

It reads one line of JSON a call, {"index", "towards"}, and answers by lines that start with `ANSWER`: reports of what
it is about to do, and at last of what came of the call. A call may end the process: `random` starts another. Everything
else that is printed goes to the standard error stream.
"""

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

ANSWER = "jaxdnn random call: "


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
    for line in sys.stdin:
        asked = json.loads(line)
        towards = tuple(asked["towards"]) if asked["towards"] else None
        found = random_call.timed(given.seed, asked["index"], among, towards, flush=flush, guards=guards, tell=tell)
        tell(found)
        if found.fatal:
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
