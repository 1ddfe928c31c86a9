"""A process that runs random calls: `python -m jaxdnn.verify.random_worker`, which `random` starts.

It reads one line of JSON a call, {"index", "towards"}, and answers by one line. A call may end the process: `random`
starts another. Everything else that is printed goes to the standard error stream.
"""

import argparse
import json
import os
import sys


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

    from jaxdnn.verify import case, random_call
    from jaxdnn.verify.families import conv_checks
    from jaxdnn.verify.guards import Arena

    conv_checks.MODELLED_SAMPLE = 1_000  # outputs of a call, for there are thousands of calls

    # Finding out takes a product, whose library a checker of memory reads for minutes; GPUs flush nothing.
    flush = False if given.unguarded else case.flushes_subnormals()
    among = random_call.pairs(given.ops, given.engines)
    arena = Arena() if case.platform() == "cuda" and not given.unguarded else None
    print(json.dumps({"ready": jax.local_devices()[0].device_kind}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        towards = tuple(asked["towards"]) if asked["towards"] else None
        found = random_call.timed(given.seed, asked["index"], among, towards, flush=flush, arena=arena)
        print(json.dumps(found), file=answers, flush=True)
        if found.get("fatal"):
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
