"""Reading and writing report files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from atorch_ns.errors import InputError

__all__ = ["read_text", "write_text"]


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}."
        ) from None


def write_text(path: Path, text: str) -> None:
    """Writes beside ``path`` and renames, so that a reader sees the old file or the new.

    Raises:
        InputError: if the folder is missing or cannot be written.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        # The error itself names the temporary file, which nobody asked for.
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None
