"""The README's Python runs as it stands, its files exist, and it stays short."""

import json
import re
import statistics
from pathlib import Path

import pytest

from jaxdnn._src import families
from jaxdnn._src.core import engines
from jaxdnn._src.core.determinism import LEVELS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ENGINE = "jaxdnn:hopper"
OPS = [ops for manifest in families.manifests().values() for ops in manifest.ops]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_there_is_an_example():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block: str):
    if "flax" in block:
        pytest.importorskip("flax")
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_links_point_at_files():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def with_op_table(text: str) -> str:
    """With the table of ops that the families' manifests make."""
    rows = [f"| {ops.cudnn} | {', '.join(f'`{name}`' for name in ops.names.split())} | {ops.level} |\n" for ops in OPS]
    start, head, rest = text.partition("| cuDNN | here | level at most |\n|---|---|---|\n")
    return start + head + "".join(rows) + rest[rest.index("\n\n") + 1 :]


def test_op_table_is_what_the_manifests_say():
    assert with_op_table(README) == README, "python -m tests.test_readme writes it"


def test_level_table_is_complete():
    named = re.findall(r"^\| `(\w+)` \| [^`]+ \|$", README, flags=re.MULTILINE)
    assert tuple(named) == LEVELS


def test_engine_table_is_complete():
    named = re.findall(r"^\| `(\w+)` \| .* \| .*`.* \|$", README, flags=re.MULTILINE)
    assert set(named) == set(engines.names())


def test_speed_table_is_what_was_measured():
    rows = json.loads((ROOT / "benchmarks/results/conv_nvidia_h200.json").read_text())["rows"]
    for family in {row["family"] for row in rows}:
        cells = []
        for which in ("forward", "dgrad", "wgrad"):
            mine = [r["ms"] for r in rows if (r["family"], r["pass"]) == (family, which)]
            found = [min(t for name, t in ms.items() if name != ENGINE) / ms[ENGINE] for ms in mine]
            told = f"{statistics.geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else ""
            cells.append(told)
        assert f"| {family} | {' | '.join(cells)} |" in README.splitlines()


@pytest.mark.parametrize("family", ["pool", "norm", "softmax", "activation", "dropout", "tensor"])
def test_table_of_what_memory_binds_is_what_was_measured(family: str):
    rows = json.loads((ROOT / f"benchmarks/results/{family}_nvidia_h200.json").read_text())["rows"]
    cells = []
    for which in ("forward", "backward"):
        found, shares = [], []
        for row in (r for r in rows if r["pass"] == which and "of_copy" in r):
            ours = {name: ms for name, ms in row["ms"].items() if name.startswith("jaxdnn")}
            best = min(ours, key=ours.__getitem__)
            found.append(min(ms for name, ms in row["ms"].items() if name not in ours) / ours[best])
            shares.append(row["of_copy"][best])
        mean = f"{statistics.geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else ""
        cells += [mean, f"{min(shares):.2f} to {max(shares):.2f}" if found else ""]
    assert f"| {family} | {' | '.join(cells)} |" in README.splitlines()


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named
    assert named <= targets


def test_is_short():
    """But for the table of ops, which grows with them."""
    assert len(README.splitlines()) < 110 + len(OPS)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_op_table(README))
