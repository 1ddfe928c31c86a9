"""What tests read: the message of a call that is refused, and texts without the folding of their lines."""

from collections.abc import Callable
from typing import Any

import pytest

Refused = tuple[Callable[[], Any], type[Exception], str]  # a call, the error that it raises, and words of its message


def assert_refused(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value)


def unfolded(text: object) -> str:
    """The text, of an explanation for one, as a single line: how it is folded depends on what stands before."""
    return " ".join(str(text).split())
