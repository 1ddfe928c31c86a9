"""`jaxdnn verify` and `jaxdnn info`: what they run, what they find, what they write, and how they end."""

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdnn._src.cases.case import DTYPES
from jaxdnn._src.cases.family import EXTENTS
from jaxdnn._src.cases.subject import Subject
from jaxdnn._src.conv.cases import case as cases
from jaxdnn._src.conv.cases import checks, data, geometries
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.conv.xla import engine as xla_conv
from jaxdnn._src.core import engines, tolerance
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn._src.core.explain import explain
from jaxdnn._src.core.tolerance import ACCUMULATIONS
from jaxdnn.verify import cli, controls, levels, matrix, page, report
from jaxdnn.verify.levels import PROCEDURES


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Registers an engine "planted" for `conv` while a test runs."""

    def plant(run: Callable[..., jax.Array], **facts: Any) -> None:
        planted = engines.Engine(name="planted", op="conv", run=run, **facts)
        others = [e for e in engines.registered("conv") if e.name != "planted"]
        monkeypatch.setitem(engines._registry, "conv", [*others, planted])
        jax.clear_caches()

    yield plant
    jax.clear_caches()


def verify(*words: str) -> tuple[int, dict[str, Any]]:
    """Runs the command with `--json` and returns its exit status and what it wrote."""
    status = cli.main(["verify", *words, "--json", "found.json"])
    return status, json.loads(Path("found.json").read_text())


# ---- the matrix ------------------------------------------------------------------------------------------------------


def of_extent(extent: str) -> dict[str, Case]:
    return {c.id: c for c in matrix.cases(extent, 0, ops=cases.OPS, dtypes=DTYPES)}


def test_each_extent_holds_the_one_before():
    quick, standard, full = map(of_extent, EXTENTS)
    assert quick.keys() < standard.keys() < full.keys()
    assert (
        140 <= len([c for c in standard.values() if c.engine == "xla"]) <= 200
    )  # two minutes on two cores, all families


def test_matrix_covers_ops_dtypes_layouts_and_settings():
    standard = of_extent("standard").values()
    dtypes = set(DTYPES) - {"int32"}
    for op in cases.OPS:
        assert {c.dtype for c in standard if c.op == op} == dtypes - ({"tf32"} if op == "conv_bgrad" else set())
    conv = [c for c in standard if c.op == "conv"]
    assert {len(c.geometry.sizes) for c in conv} == {1, 2, 3}
    assert {"NHWC", "NCHW", "CHWN", "NCHWc4", "NCW", "CWN", "NDHWC", "NCDHW", "CDHWN"} <= {c.layout for c in conv}
    assert {c.geometry.mode for c in conv} == {"cross_correlation", "convolution"}
    assert {c.geometry.batch for c in conv} >= {0, 1}
    assert any(c.blend.prior and c.blend.beta == 0 for c in conv)
    assert {"f32", "bf16", "int32"} <= {c.out for c in conv}


def test_an_id_finds_its_case_whatever_the_extent():
    for name, case in list(of_extent("full").items())[::97]:
        assert matrix.find(name, 0) == case
    assert matrix.find("conv/xla/f32/NHWC/no-such-geometry", 0) is None
    assert matrix.find("nothing", 0) is None


def test_random_geometries_are_valid_and_repeat():
    for index in range(200):
        geometry = geometries.random_geometry(7, index)
        assert geometry == geometries.random_geometry(7, index)
        assert min(geometry.outputs) >= 1
    assert geometries.random_geometry(7, 0) != geometries.random_geometry(8, 0)


def test_sizes_of_a_geometry_are_distinct():
    """Axes that change places must change a shape."""
    for name in ("plain", "stride", "asymmetric", "patches", "3d-all"):
        g = geometries.GEOMETRIES[name]
        assert len({g.batch, *g.sizes}) == 1 + len(g.sizes), name
        assert g.channels != g.filters, name


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["integers", "ties"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "e4m3fn", "e5m2"])
def test_integer_data_are_integers_whose_sums_are_exact(kind: str, dtype: str):
    for op in cases.OPS:
        case, accumulation = (
            Case(op, "xla", dtype, "NHWC", None, geometries.GEOMETRIES["all"]),
            ACCUMULATIONS["float32"],
        )
        operands, _ = data.arrays(case, kind, 0, accumulation)
        largest = [np.abs(a.astype(np.float64)).max() for a in operands]
        assert all((a == np.rint(a)).all() for a in (v.astype(np.float64) for v in operands))
        assert max(largest) >= 1
        assert case.terms * math.prod(largest) <= accumulation.largest_integer


def test_ties_are_plenty_among_the_ties():
    case = Case("conv", "xla", "bf16", "NHWC", None, geometries.GEOMETRIES["plain"])
    operands, extras = data.arrays(case, "ties", 0, ACCUMULATIONS["float32"])
    exact = checks.golden(case, operands, extras).value
    halfway = np.abs(exact - exact.astype(case.in_dtype).astype(np.float64)) == np.ldexp(0.5, np.frexp(exact)[1] - 8)
    assert halfway.mean() > 0.02


def test_data_depend_on_the_id_and_the_seed_alone():
    case = Case("conv", "xla", "f32", "NHWC", None, geometries.GEOMETRIES["plain"])
    first, same, other = (data.arrays(case, "normal", seed, ACCUMULATIONS["float32"])[0][0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_sound_library_passes(capsys: pytest.CaptureFixture[str]):
    status, found = verify("--quick", "--op", "conv_bgrad", "--dtype", "f32", "int8", "--seed", "3")
    assert status == 0
    assert found["summary"]["passed"]
    assert found["summary"]["cells"]["failed"] == 0
    assert found["summary"]["cells"]["passed"] >= 5
    assert found["run"]["seed"] == 3
    assert found["run"]["compilations"] > 10
    assert {"jax", "jaxlib", "numpy", "python", "platform", "devices", "revision", "date"} <= found[
        "environment"
    ].keys()
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("report: ")
    assert Path(printed.splitlines()[-1].removeprefix("report: ")).exists()
    levels_tested = {t["level"] for t in found["determinism"]}
    assert levels_tested == set(PROCEDURES)
    assert found["summary"]["controls"] == {"passed": 12, "failed": 0, "not run": 0}
    controls_of = {t["procedure"]: t["message"] for t in found["controls"]}
    assert controls_of.keys() == {p for group in PROCEDURES.values() for p in group}
    assert all(message.startswith("found: ") for message in controls_of.values())


def off_by_one(call: engines.Call, *operands: jax.Array) -> jax.Array:
    y = xla_conv.run(call, *operands)
    return y.at[(0,) * y.ndim].multiply(np.float32(1.001).astype(y.dtype)) if y.size else y


def test_a_failing_case_prints_a_line_that_reproduces_it(
    engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    engine(off_by_one)
    status, found = verify("--quick", "--op", "conv", "--engine", "planted", "--dtype", "f32", "--level", "fast")
    assert status == 1
    failed = [c for c in found["cells"] if c["status"] == "failed"]
    assert len(failed) == len(found["cells"]) > 3
    printed = capsys.readouterr().out
    lines = [line.partition("reproduce: ")[2] for line in printed.splitlines() if "reproduce:" in line]
    line = failed[0]["reproduce"]
    assert sorted(lines) == sorted(c["reproduce"] for c in failed)

    program, *words = shlex.split(line)
    assert program == "jaxdnn"
    assert cli.main([*words, "--json", "again.json"]) == 1
    again = json.loads(Path("again.json").read_text())
    assert [c["message"] for c in again["cells"]] == [failed[0]["message"]]


def test_an_exception_fails_its_cell_and_nothing_else(engine: Callable[..., None]):
    def broken(call: engines.Call, *operands: jax.Array) -> jax.Array:
        raise RuntimeError("no such kernel")

    engine(broken)
    status, found = verify("--quick", "--op", "conv", "--dtype", "f32", "--level", "fast")
    assert status == 1
    by_engine = {c["engine"]: c for c in found["cells"]}
    assert by_engine["xla"]["status"] == "passed"
    assert by_engine["planted"]["message"] == "RuntimeError: no such kernel"


def test_a_refusal_is_no_failure(engine: Callable[..., None]):
    engine(xla_conv.run, supports=lambda call: "it is a test")
    status, found = verify("--quick", "--op", "conv", "--engine", "planted", "--dtype", "bf16", "--level", "fast")
    assert status == 0
    assert {(c["status"], c["message"]) for c in found["cells"]} == {("refused", "it is a test")}


def test_a_promise_that_is_not_kept_fails(engine: Callable[..., None]):
    """The definition's bits, declared portable, and the same with one last bit changed: on any CPU only that fails."""
    ordered = next(e for e in engines.registered("conv") if e.name == "ordered")

    def last_bit(call: engines.Call, *operands: jax.Array) -> jax.Array:
        y = ordered.run(call, *operands)
        bits = jax.lax.bitcast_convert_type(y[(0,) * y.ndim], np.uint16) ^ np.uint16(1)
        return y.at[(0,) * y.ndim].set(jax.lax.bitcast_convert_type(bits, y.dtype))

    words = [f"determinism/conv/planted/bf16/{procedure}" for procedure in ("definition", "repeats")]
    for run, status, definition in ((ordered.run, 0, "passed"), (last_bit, 1, "failed")):
        engine(run, supports=ordered.supports, level=lambda call: "portable")
        found = verify(*(word for name in words for word in ("--case", name)))
        assert found[0] == status
        outcomes = {t["procedure"]: t["status"] for t in found[1]["determinism"]}
        assert outcomes == {"definition": definition, "repeats": "passed"}


def test_predicted_bits_are_compared(engine: Callable[..., None]):
    """The schedule that engine 'ordered' follows predicts its bits; another one does not."""
    ordered = next(e for e in engines.registered("conv") if e.name == "ordered")

    def backwards(call: engines.Call) -> engines.Schedule | None:
        told = ordered.schedule(call)
        return told and dataclasses.replace(told, order=np.flip(told.order, 1))

    case = Case("conv", "planted", "bf16", "NHWC", None, geometries.GEOMETRIES["plain"], out="f32")
    for schedule, status in ((ordered.schedule, "passed"), (backwards, "failed")):
        engine(ordered.run, supports=ordered.supports, schedule=schedule, modelled=("cpu",))
        result = matrix.run(case, 0, flush=True)
        assert "modelled bits" in {c.rule for c in result.checks}
        assert result.status == status, result.message


def test_every_output_of_the_large_predicted_cases_is_compared(
    engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    """A pattern chooses the cells; the report says how many outputs were predicted, and where they were not."""
    ordered = next(e for e in engines.registered("conv") if e.name == "ordered")
    monkeypatch.setattr(cases, "_PREDICTED", ("planted",))

    def first_added_last(call: engines.Call) -> engines.Schedule | None:
        told = ordered.schedule(call)
        return told and dataclasses.replace(told, order=np.roll(told.order, -1, 1))

    for told, status in ((ordered.schedule, 0), (first_added_last, 1)):
        engine(ordered.run, supports=ordered.supports, schedule=told, modelled=("cpu",))
        assert verify("--case", "conv/planted/bf16/*/bits-dilated/to-?32")[0] == status
        found = json.loads(Path("found.json").read_text())
        (predicted,) = found["summary"]["predicted"]
        kinds = ["normal", "integers", "lognormal", "cancelling"]  # XLA flushes subnormal numbers here
        assert predicted["data"] == kinds
        assert predicted["outputs"] == 4 * 23_040
        assert (predicted["failed"] > 0) == status
        assert f"{predicted['outputs']:,}" in page.render(found)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need JAX 0.11")
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
def test_a_million_outputs_of_every_op_and_dtype_are_predicted(op: str):
    counts: dict[Any, int] = {}
    for case in (c for c in cases.cases(op, "hopper", "full", 0) if c.geometry.name.startswith("bits")):
        arrays = [jax.ShapeDtypeStruct(case.shape(role), case.in_dtype) for role in case.roles]
        extras = data.extras(case, "normal", np.random.default_rng(0))
        explained = explain(case.function(any_engine=True), *arrays, **extras, platform="cuda")[0]
        told = next(c for c in explained.candidates if c.engine == "hopper")
        assert told.refusal or case.dtype == "int8" or told.schedule is not None, case.id
        key = case.dtype, case.geometry.name.startswith(("bits-depthwise", "bits-pairs", "bits-eights", "bits-causal"))
        outputs = math.prod(case.shape(case.result_role)) * len(case.kinds())
        counts[key] = counts.get(key, 0) + (0 if told.refusal else outputs)
    narrow = {(dtype, True): 10**6 for dtype in ("bf16", "f16", "f32")}
    dense = ("bf16", "f16") if op == "conv_wgrad" else ("bf16", "f16", "tf32", "e4m3fn", "e5m2", "int8")
    for key, least in (narrow | {(dtype, False): 10**6 for dtype in dense}).items():
        assert counts[key] >= least, key


def test_every_check_sees_a_wrong_shape_or_dtype():
    case = Case("conv", "xla", "f32", "NHWC", None, geometries.GEOMETRIES["plain"])
    operands, extras = data.arrays(case, "normal", 0, ACCUMULATIONS["float32"])
    right = checks.golden(case, operands, extras).value.astype(np.float32)
    for wrong in (right.astype(np.float16), right[:1], np.swapaxes(right, 1, 2)):
        check = checks.judge(case, "normal", operands, extras, wrong, ACCUMULATIONS["float32"])
        assert not check.passed
        assert "expected float32" in check.message


# ---- determinism -----------------------------------------------------------------------------------------------------


def test_a_control_that_finds_nothing_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controls, "_off_by_one", controls._chain(0))
    found = {t.procedure: t for t in controls.run(["run_to_run", "portable"], 0)}
    assert found["definition"].status == found["recompilation"].status == "failed"
    assert "the planted fault was not found" in found["definition"].message
    assert found["repeats"].status == "passed"


@pytest.mark.parametrize("op", matrix.ops())
def test_every_level_that_is_promised_is_put_to_its_procedures(op: str):
    """In the full extent, on eight devices: nothing about a subject keeps a procedure of its level from running."""
    of_op = matrix.of(op)
    for engine in of_op.engines_of(op):
        found = list(filter(None, of_op.subjects(op, engine, "full", 0)))
        serves = any(of_op.facts(c).refusal is None for c in of_op.cases(op, engine, "quick", 0))
        assert bool(found) == serves, engine
        for s in found:
            promised = LEVELS[: LEVELS.index(s.declared) + 1]
            # What is a sum over the batch has no samples, nor has what takes no batch; others' are compared one by one.
            whole = op.endswith(("_wgrad", "_bgrad")) or op == "bn_finalize_inference"
            assert s.out_axis is not None or whole or "batch_invariant" not in promised, s.id
            assert s.batch % 8 == 0 or set(s.batch_axes) == {None} or "mesh_invariant" not in promised, s.id
            assert s.definition is not None or "portable" not in promised, s.id


def test_named_ops_have_all_of_their_subjects_tested():
    def ids(ops: Any, *, every: bool) -> set[str]:
        given = (ops, matrix.engines(), DTYPES)
        return {s.id for s in matrix.subjects(*given, "standard", 0, every=every)}

    named = ["pool", "activation", "conv_transpose"]
    sample, every = ids(named, every=False), ids(named, every=True)
    assert sample < every
    assert {i.split("/")[1] for i in every} == set(named)
    status, found = verify("--quick", "--op", "activation", "--dtype", "bf16", "--level", "mesh_invariant", "portable")
    assert status == 0
    kinds = {(t["variant"], t["procedure"], t["status"]) for t in found["determinism"]}
    forms = [first + last for first in ("", "alpha/", "blend/", "traced-blend/") for last in ("", "gradient")]
    meshes = {(form.removesuffix("/"), "mesh", "passed") for form in forms}
    assert kinds == meshes | {("", "definition", "passed")}


def test_meshes_shard_the_batch_and_every_axis_that_devices_divide():
    (found, *_) = matrix.subjects(["pool"], ["xla"], ["bf16"], "standard", 0, every=True)
    assert found.operands[0].shape == (8, 15, 12, 16)
    said = [(what, devices) for what, devices, _ in levels._shardings(found, 8, "standard")]
    assert said == [("the batch", 2), ("the batch", 4), ("the batch", 8), ("axis 2", 4), ("axis 3", 8)]
    assert len(list(levels._shardings(found, 8, "quick"))) == 3


def test_determinism_is_sampled_over_dtypes(monkeypatch: pytest.MonkeyPatch):
    """Of the memory-bound families every extent samples a narrow float and an integer, and "full" has every dtype.

    The ordered convolutions, which take long to compile, have one dtype each in the standard extent, by turns.
    """
    monkeypatch.setattr(matrix, "variants", lambda subject: (subject,))  # whose forms have its dtype
    wanted = {"f32", "bf16", "f16", "int8"}
    for extent in EXTENTS:
        found = list(matrix.subjects(matrix.ops(), matrix.engines(), DTYPES, extent, 0, every=False))
        of_family = [(matrix.of(s.op).name, s.dtype) for s in found]
        sampled = {dtype for name, dtype in of_family if name not in ("conv", "norm_local", "norm_stats")}
        assert sampled == wanted, extent
        of_conv = [(s, matrix.of(s.op)) for s in found if matrix.of(s.op).name == "conv"]
        slow = {(s.op, s.dtype) for s, family in of_conv if s.engine in family.slow and s.op not in family.bound_as}
        both = [(op, dtype) for op in ("conv", "conv_dgrad", "conv_wgrad") for dtype in ("f32", "bf16")]
        assert slow == set({"quick": both[1::2], "standard": [both[0], both[3], both[4]], "full": both}[extent])
        if extent == "full":
            for name in ("pool", "tensor"):
                assert {dtype for of, dtype in of_family if of == name} == wanted


def test_channels_that_fill_up_a_vector_are_not_read_and_are_zero():
    """Group normalisation of NC/xHWx: the standard matrix has it, its operands hold NaN there, and a fault is found."""
    standard = {c.id for c in matrix.cases("standard", 0, ops=["group_norm", "group_norm_dgrad"], dtypes=DTYPES)}
    for op in ("group_norm", "group_norm_dgrad"):
        name = f"{op}/xla/f32/NCHWc8-filled"
        assert name in standard
        case = matrix.find(name, 0)
        assert case is not None
        operands = case.operands("normal", np.random.default_rng(0))
        filler = np.isnan(operands[0])
        assert filler.mean() == 1 / 4
        assert filler[:, 1, :, :, 4:].all()
        golden = case.expected("normal", operands, ACCUMULATIONS["float32"])[0]
        assert not golden.value[filler].any()
        assert not golden.error[filler].any()
        assert matrix.run(case, 0, flush=False).status == "passed"
        spoilt = np.where(filler, np.float64(1e-30), golden.value)
        assert not tolerance.compare(spoilt, golden.value, golden.error).passed


def test_a_pattern_names_procedures_too(monkeypatch: pytest.MonkeyPatch):
    two = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: two)
    status, found = verify("--case", "determinism/acti*n/xla/f32/*/mesh", "--case", "determinism/conv/xla/int8/def*")
    assert status == 0
    names = {"activation/xla/f32/alpha/mesh", "activation/xla/f32/blend/gradient/mesh", "conv/xla/int8/definition"}
    found_names = {t["id"] for t in found["determinism"]}
    assert {f"determinism/{name}" for name in names} <= found_names
    assert {name.rpartition("/")[2] for name in found_names} == {"mesh", "definition"}


def test_a_control_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    one = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: one)
    assert verify("--quick", "--op", "dropout", "--dtype", "bf16", "--level", "mesh_invariant")[0] == 0
    printed = capsys.readouterr().out
    assert "negative control of mesh: not run here, needs more than one device" in printed
    assert "negative controls (1 x 1 convolutions, whatever ops were selected): 0 of 0" in printed
    assert "The functions are 1 x 1 convolutions" in Path("jaxdnn-report.html").read_text()


# ---- the command line ------------------------------------------------------------------------------------------------


def test_help_says_every_choice_once(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["verify", "--help"]) == 0
    words = [word.strip(",") for word in capsys.readouterr().out.split()]
    assert "conv_wgrad" not in words
    assert words.count("e4m3fn") == words.count("batch_invariant") == words.count("ordered") == 1
    assert "`jaxdnn info` lists them" in " ".join(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "show devices, versions, and what each engine serves"),
        (["verify", "--op", "convolve"], "invalid choice: 'convolve'"),
        (["verify", "--quick", "--full"], "not allowed with"),
        (
            ["verify", "--case", "conv/xla/f32/NHWC/plan"],
            "got 'conv/xla/f32/NHWC/plan'; close ones: conv/xla/f32/NHWC/plain",
        ),
        (["verify", "--case", "determinism/conv/xla/f32/definition"], "no engine here guarantees"),
    ],
)
def test_errors_of_usage(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


def test_list_prints_ids_and_runs_nothing(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["verify", "--list", "--quick", "--op", "conv_dgrad", "--dtype", "f64"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed
    assert all(name.startswith("conv_dgrad/") and matrix.find(name, 0) for name in printed)
    assert not list(Path().iterdir())


def test_a_single_case_writes_no_report_unless_asked(capsys: pytest.CaptureFixture[str]):
    words = ["verify", "--case", "conv/xla/f32/NHWC/one"]
    assert cli.main(words) == 0
    assert not list(Path().iterdir())
    assert cli.main([*words, "--html", "there/report.html"]) == 0
    assert Path("there/report.html").exists()


def test_info_shows_versions_and_engines(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert jax.__version__ in printed
    assert "conv_wgrad" in printed
    assert "fused_dropout" not in printed  # primitives that nobody calls go by what users call
    assert "norm_activated" not in printed
    assert "ordered" in printed
    lines = [line for line in printed.splitlines() if line.startswith("hopper") and "f32" in line]
    assert any(len(line) > 80 for line in lines)  # whole where it is not a terminal that reads
    assert not any(line.endswith(" ") for line in lines)


# ---- the report ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """What a run could have found, with a failure, a refusal and a text that HTML would misread."""
    check = {"data": "normal", "rule": "computed bound", "misrounded": 2, "elements": 30}
    cell = {"op": "conv", "engine": "xla", "dtype": "f32", "level": "run_to_run", "accumulation": "float32"}
    cell |= {"checks": [check], "message": "", "reproduce": "jaxdnn verify --case a --seed 0"}
    cells = [
        cell | {"id": "conv/exact", "status": "passed", "ratio": 0.0},
        cell | {"id": "conv/near", "status": "passed", "ratio": 0.25},
        cell | {"id": "conv/wrong", "status": "failed", "ratio": None, "message": "got <nan> & more"},
        cell | {"id": "conv/none", "status": "refused", "ratio": 0.0, "message": "it is a test"},
    ]
    trial = {"op": "conv", "engine": "xla", "dtype": "f32", "declared": "portable", "reproduce": None}
    trial |= {"id": "determinism/conv/xla/f32/mesh", "variant": "", "level": "mesh_invariant", "procedure": "mesh"}
    statuses = {"passed": 1, "failed": 0, "not run": 0}
    return {
        "schema": 1,
        "environment": {
            "jaxdnn": "0",
            "jax": "0",
            "date": "2026-01-01T00:00:00",
            "device_kind": "cpu",
            "devices": ["a"],
        },
        "run": {"seconds": 1.0, "compilations": 3, "command": "jaxdnn verify", "seed": 0, "turn": 3, "left": 5},
        "summary": {
            "passed": False,
            "cells": {"passed": 2, "failed": 1, "refused": 1},
            "comparisons": 4,
            "elements": 120,
            "worst_ratio": 0.25,
            "worst_cell": "conv/near",
            "determinism": statuses,
            "controls": statuses,
        },
        "cells": cells,
        "determinism": [trial | {"status": "passed", "runs": 4, "message": "", "control": False}],
        "controls": [trial | {"status": "not run", "runs": 0, "message": "one device", "control": True}],
    }


def test_page_stands_alone_and_shows_everything(document: dict[str, Any]):
    html = page.render(document)
    assert "http" not in html
    assert "prefers-color-scheme:dark" in html
    assert html.count("<circle") == 3
    assert html.count('class="dot bad"') == 1
    for text in (
        "conv/exact",
        "conv/near",
        "got &lt;nan&gt; &amp; more",
        "it is a test",
        "jaxdnn verify --case a --seed 0",
        "turn 3 of a matrix",
    ):
        assert text in html
    assert "<nan>" not in html


def test_largest_error_is_that_of_a_failed_cell_too(document: dict[str, Any]):
    found = report.summary(document["cells"], [])
    assert (found["worst_cell"], found["worst_ratio"]) == ("conv/wrong", None)
    assert '<div title="conv/wrong"><b>∞</b><span>largest error' in page.render(document | {"summary": found})
    assert '<div title="conv/near"><b>0.25</b><span>largest error' in page.render(document)
    nothing = report.summary([], [])
    assert (nothing["worst_cell"], nothing["worst_ratio"]) == (None, None)
    assert "<div><b>–</b><span>largest error" in page.render(document | {"summary": nothing})


def test_page_puts_a_ratio_where_the_axis_says(document: dict[str, Any]):
    assert page._at(1e-9) == page._at(1e-4) < page._at(0.01) < page._at(1) < page._at(10) == page._at(1e9)
    steps = np.diff([page._at(10.0**p) for p in range(page.LOWEST, page.HIGHEST + 1)])
    np.testing.assert_allclose(steps, steps[0])


def test_an_engine_for_programs_of_one_device_is_not_run_on_a_mesh(monkeypatch):
    """A refusal of a program for several devices is no failure: the report has its reason."""

    def refuse(*arrays):
        raise NotImplementedError("hopper: it counts from the first element")

    x = np.ones((4, 3), np.float32)
    subject = Subject("dropout", "hopper", "f32", "portable", lambda batch: jax.numpy.abs, (x,), (0,), 0)
    assert levels.trial(subject, "mesh_invariant", "mesh", "quick").status == "passed"
    monkeypatch.setitem(subject.__dict__, "compiled", refuse)
    trial = levels.trial(subject, "mesh_invariant", "mesh", "quick")
    assert (trial.status, trial.message) == ("not run", "hopper: it counts from the first element")
