"""What a process with several threads, or one that only imports the library, may rely on."""

import concurrent.futures
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.limits import current_limits

ROOT = Path(__file__).parents[1]
THREADS = 16
LEVELS = ("fast", "run_to_run", "mesh_invariant")

IMPORTED = """
import os, sys, threading
seen = []
def audit(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.fork", "socket.connect", "urllib.Request"):
        seen.append(event)
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen.append(f"writes {arguments[0]}")
import jax, jax.numpy, numpy
from jax.experimental import pallas, shard_map
before = threading.active_count(), dict(os.environ)
sys.dont_write_bytecode = True
sys.addaudithook(audit)
import jaxdnn
assert (threading.active_count(), dict(os.environ)) == before
assert not seen, seen
jax.config.update("jax_platforms", "no_such_platform")  # a backend that were there already would not mind
try:
    jax.devices()
except RuntimeError:
    print("nothing ran")
"""


def test_nothing_runs_when_it_is_imported():
    """No backend is started, no thread, no process; nothing is written."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "reference")])
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "nothing ran\n", done.stderr


def work(number: int, together: threading.Barrier) -> list[np.ndarray]:
    """Calls, eager ones and within jit, gradients, explanations and contexts, all started at once by all threads."""
    rng = np.random.default_rng(number % 4)  # four threads do the same: they ask for the same programs at once
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 5, 5, 3), (3, 3, 3, 4)))
    together.wait()
    found = []
    for step in range(2):
        level = LEVELS[(number + step) % 2 + 1]
        with dnn.determinism(level), dnn.limits(workspace=1 << (20 + number % 2)):
            y = dnn.conv(x, w, padding=1, stride=1 + number % 2)
            loss = lambda w, y=y: jnp.sum(dnn.softmax(dnn.conv(y, w, layout="NHWC"), axis=-1) ** 2)
            gradient = jax.jit(jax.grad(loss))(jnp.asarray(np.ones((1, 1, 4, 2), np.float32)))
            (call,) = dnn.explain(dnn.softmax, y)
            assert (call.level, call.engine) == (level, "ordered" if level == "mesh_invariant" else "xla")
            assert required() == level
            assert current_limits().workspace == 1 << (20 + number % 2)
        assert required() == "fast"
        with dnn.patch() as patched:
            lhs, rhs = jnp.asarray(x), jnp.asarray(w)
            letters = ("NHWC", "HWIO", "NHWC")
            z = jax.nn.relu(jax.lax.conv_general_dilated(lhs, rhs, (1, 1), "SAME", dimension_numbers=letters))
        assert patched.replaced.total() >= 1
        found += [np.asarray(a) for a in (y, gradient, dnn.pool(x, window=(2, 2)), z)]
    return found


def test_sixteen_threads_at_once_get_what_one_gets():
    together = threading.Barrier(THREADS)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda number: work(number, together), range(THREADS)))
    for number in range(THREADS):
        alone = work(number, threading.Barrier(1))
        for ours, one in zip(found[number], alone, strict=True):
            np.testing.assert_array_equal(ours, one)
