"""What is released: the source archive makes the wheel, the wheel alone works, and what names the version agrees."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import jaxdnn

ROOT = Path(__file__).parents[1]
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import jaxdnn, jaxdnn_reference
from jaxdnn import bench, verify
x, w = jnp.ones((1, 5, 5, 8)), jnp.ones((3, 3, 8, 2))
assert (np.asarray(jax.jit(jaxdnn.conv)(x, w)) == jaxdnn_reference.conv(np.asarray(x), np.asarray(w))).all()
print(jaxdnn.__version__, jaxdnn.__file__, jaxdnn_reference.__file__, sep="\\n")
"""


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=clean | variables, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _files(folder: str) -> set[str]:
    """The files of a folder, but bytecode."""
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in files}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    _run("-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


def test_the_archives_hold_what_they_should(dist: Path):
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name == f"jaxdnn-{jaxdnn.__version__}-py3-none-any.whl"
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    reference = {name.removeprefix("reference/") for name in _files("reference/jaxdnn_reference")}
    assert held == _files("jaxdnn") | reference
    with tarfile.open(source) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames()}
    tested = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "tests/test_package.py"}
    assert inside >= _files("jaxdnn") | _files("reference") | tested


def test_the_wheel_says_what_users_install(dist: Path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        metadata, entry = archive.read(names["METADATA"]).decode(), archive.read(names["entry_points.txt"]).decode()
        assert any(Path(name).name == "LICENSE" for name in names.values())
    head, _, body = metadata.partition("\n\n")
    assert body.startswith("# jaxdnn")
    required = {m[1] for m in re.finditer(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", head, flags=re.MULTILINE)}
    assert required == {"jax", "ml-dtypes", "numpy", "rich"}
    assert "jaxdnn = jaxdnn.verify.cli:main" in entry


def test_the_wheel_works_without_the_checkout(dist: Path, tmp_path: Path):
    (wheel,) = dist.glob("*.whl")
    site = tmp_path / "site"
    _run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    version, *files = _run("-c", PROGRAM, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert version == jaxdnn.__version__
    assert all(Path(file).is_relative_to(site) for file in files), files
    shown = _run("-m", "jaxdnn", "--version", cwd=tmp_path, PYTHONPATH=str(site))
    assert shown.strip() == f"jaxdnn {version}"


def test_the_citation_has_the_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == jaxdnn.__version__
    assert cited["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_is_one(form: Path):
    """Of GitHub's schema: a name, a description, and fields that have a type and, but for text, a label."""
    read = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(read) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(read)
    for field in read["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]
    named = [field["id"] for field in read["body"] if "id" in field]
    assert len(named) == len(set(named)) > 0
