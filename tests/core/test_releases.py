"""The version as a number, its check, and names that are retired."""

import warnings

import pytest

import jaxdnn as dnn
from jaxdnn._src.core import releases


@pytest.mark.parametrize(("version", "number"), [("0.1.0", 100), ("1", 10_000), ("9.25.1", 92_501), ("0.2", 200)])
def test_a_version_is_a_number(version: str, number: int):
    assert releases.number(version) == number


@pytest.mark.parametrize("version", ["", "1.2.3.4", "1.x", "0.100", "-1"])
def test_what_is_no_version(version: str):
    with pytest.raises(ValueError, match="a version must be one to three numbers"):
        releases.number(version)


def test_this_version_is_checked(monkeypatch: pytest.MonkeyPatch):
    assert releases.number(dnn.__version__) == dnn.VERSION
    dnn.check_version(dnn.__version__)
    monkeypatch.setattr(releases, "VERSION", 205)
    dnn.check_version("0.2.5", below="0.3")
    with pytest.raises(ImportError, match=r"jaxdnn must be at least 0\.3, and .* is installed"):
        dnn.check_version("0.3")
    with pytest.raises(ImportError, match=r"at least 0\.1 and below 0\.2\.5"):
        dnn.check_version("0.1", below="0.2.5")


@pytest.fixture
def retired(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr(releases, "_retired", found)
    return found


def test_a_retired_function_warns_where_it_is_called_and_still_works(retired: dict[str, str]):
    @releases.deprecated(since="0.2", gone="0.3", instead="use `new`")
    def old(x: int) -> int:
        """Adds one."""
        return x + 1

    with pytest.warns(
        DeprecationWarning, match=r"`old` is deprecated since 0\.2 and will be gone in 0\.3: use `new`\."
    ) as seen:
        assert old(2) == 3
    assert seen[0].filename == __file__
    assert old.__doc__ == "Deprecated: use `new`.\n\nAdds one."
    assert retired == {"`old`": "0.3"}


def test_a_retired_argument_warns_where_it_is_given(retired: dict[str, str]):
    @releases.deprecated(since="0.2", gone="1.0", instead="give `stride`", argument="strides")
    def conv(x: int, *, stride: int = 1, strides: int | None = None) -> int:
        return x * (strides or stride)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert conv(3, stride=2) == 6
    with pytest.warns(DeprecationWarning, match="`strides` of `conv` is deprecated since 0.2"):
        assert conv(3, strides=2) == 6


def test_what_is_retired_is_removed_in_time(retired: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    releases.deprecated(since="0.1", gone="0.3", instead="none")(lambda: None)
    monkeypatch.setattr(releases, "VERSION", 203)
    assert releases.overdue() == []
    monkeypatch.setattr(releases, "VERSION", 300)
    assert releases.overdue() == ["`<lambda>`"]


def test_nothing_is_overdue():
    assert releases.overdue() == []
