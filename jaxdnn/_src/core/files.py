"""Files that others read while they are written, and that hold something if the process is killed."""

import shutil
import uuid
from pathlib import Path


def write(file: Path, text: str) -> None:
    """Writes a file as a whole: who reads it meanwhile sees what was there before, or all of the new text."""
    file = file.resolve()  # what a link points to is replaced, not the link
    if file.exists() and not file.is_file():  # such as a terminal
        file.write_text(text)
        return
    new = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        new.write_text(text)
        if file.exists():
            shutil.copymode(file, new)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
