"""Log lines: which engine serves a call, by `logging`, to a function, to a stream or a file."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn

ROOT = Path(__file__).parents[2]
PROGRAM = """
import jax.numpy as jnp, jaxdnn as dnn
dnn.softmax(jnp.ones((2, 3)))
try:
    dnn.softmax(jnp.ones((2, 3)), engine="hopper")
except NotImplementedError:
    pass
"""
SERVED = "softmax(float32[2,3]) on cpu, level 'fast': "


def run(program: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, on a CPU and with these environment variables."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "reference")])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **variables}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


def softmax(size: int, **options: Any) -> jax.Array:
    return jax.jit(lambda x: dnn.softmax(x, axis=0, **options))(jnp.ones(size))


def test_a_choice_is_logged_when_it_is_made():
    records: list[logging.LogRecord] = []
    with dnn.logged(records.append):
        softmax(41)
    softmax(42)
    (record,) = records
    assert record.getMessage().startswith("softmax(float32[41]) on cpu, level 'fast': served by xla")
    told = vars(record)
    assert (told["op"], told["engine"], told["platform"]) == ("softmax", "xla", "cpu")
    assert record.levelname == "DEBUG"


def test_a_call_that_no_engine_serves_is_logged_with_its_reason():
    records: list[logging.LogRecord] = []
    with dnn.logged(records.append), pytest.raises(NotImplementedError):
        softmax(44, engine="hopper")
    (record,) = records
    assert vars(record)["engine"] is None
    assert "it runs on NVIDIA GPUs" in vars(record)["refusals"]["hopper"]
    assert record.getMessage().endswith(f"served by no engine; hopper: {vars(record)['refusals']['hopper']}")


def test_contexts_nest_and_leave_nothing_behind():
    outer: list[str] = []
    inner: list[str] = []
    before = logging.getLogger("jaxdnn").level, list(logging.getLogger("jaxdnn").handlers)
    with dnn.logged(lambda r: outer.append(r.levelname), level="warning"):
        with dnn.logged(lambda r: inner.append(r.levelname)):
            softmax(45)
        softmax(46)
    assert (outer, inner) == ([], ["DEBUG"])
    assert (logging.getLogger("jaxdnn").level, list(logging.getLogger("jaxdnn").handlers)) == before


def test_other_threads_are_heard_too():
    heard: list[int] = []
    with dnn.logged(lambda record: heard.append(record.thread or 0)):
        threads = [threading.Thread(target=softmax, args=(50 + i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(heard)) == 4


def test_an_unknown_level_is_refused():
    said = "`level` must be one of 'error', 'warning', 'debug', got 'loud'"
    with pytest.raises(ValueError, match=said), dnn.logged(print, level="loud"):
        pass


def test_nothing_is_written_unasked():
    assert run().stderr == ""


def test_a_file_has_the_lines(tmp_path: Path):
    done = run(JAXDNN_LOGLEVEL="3", JAXDNN_LOGDEST=str(tmp_path / "log"))
    served, refused = (tmp_path / "log").read_text().splitlines()
    assert served.startswith("jaxdnn DEBUG ")
    assert f"{SERVED}served by xla" in served
    assert refused.startswith("jaxdnn DEBUG ")
    assert f"{SERVED}served by no engine; hopper: it runs on" in refused
    assert done.stderr == ""


def test_a_stream_has_the_lines_of_its_level():
    assert run(JAXDNN_LOGLEVEL="2", JAXDNN_LOGDEST="stdout").stdout == ""
    assert len(run(JAXDNN_LOGLEVEL="debug", JAXDNN_LOGDEST="stdout").stdout.splitlines()) == 2


def test_a_file_of_measurements_that_cannot_be_read_is_a_warning(tmp_path: Path):
    (tmp_path / "jaxdnn").mkdir()
    (tmp_path / "jaxdnn" / "tuned.json").write_text("{")
    variables = dict(JAXDNN_LOGLEVEL="2", XDG_CACHE_HOME=str(tmp_path), JAXDNN_TUNED="")
    (line,) = run(**variables).stderr.splitlines()
    assert line.startswith("jaxdnn WARNING ")
    assert "the measurements of `jaxdnn.tune` are not read: " in line
    assert run(**{**variables, "JAXDNN_LOGLEVEL": "1"}).stderr == ""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JAXDNN_LOGLEVEL": "4"}, "`JAXDNN_LOGLEVEL` must be 0 to 3, or one of error, warning, debug, got '4'"),
        (
            {"JAXDNN_LOGLEVEL": "1", "JAXDNN_LOGDEST": "/no/such/folder/log"},
            "`JAXDNN_LOGDEST` must be stdout, stderr or",
        ),
        ({"JAXDNN_LIB_CONFIG": "JIT"}, "`JAXDNN_LIB_CONFIG` must be one of FULL, XLA_ONLY, got 'JIT'"),
        (
            {"JAXDNN_WORKSPACE_LIMIT": "1 MiB"},
            "`JAXDNN_WORKSPACE_LIMIT` must be a number of bytes, got '1 MiB'",
        ),
        ({"JAXDNN_COMPILE_THREADS": "x"}, "`JAXDNN_COMPILE_THREADS` must be a number of threads, got 'x'"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_variables_are_checked(variables: dict[str, str], said: str):
    program = "import jax.numpy as jnp, jaxdnn as dnn\ndnn.conv(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5)))"
    assert f"ValueError: {said}" in run(program, **variables).stderr
