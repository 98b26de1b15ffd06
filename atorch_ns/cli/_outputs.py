"""Files that a verb is to write, checked before the work whose results they take."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["unwritable"]


def unwritable(**options: Path | None) -> list[str]:
    """What is wrong with the files that options name, one sentence each; nothing is left behind.

    Args:
        options: by the option's name, with ``_`` for ``-``; ``None`` where it was not given.
    """
    problems = []
    for name, path in options.items():
        why = _why_not(path) if path is not None else ""
        if why:
            problems.append(f"--{name.replace('_', '-')}={path}{why}")
    return problems


def _why_not(path: Path) -> str:
    folder = path.absolute().parent
    if not folder.is_dir():
        return f": the folder {path.parent} does not exist."
    if path.is_dir():
        return " is a folder; name a file in it."
    try:
        if path.exists():
            path.open("ab").close()
        else:  # to ask for permissions is not enough: the file system may be read-only, or full
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b" ")
    except OSError as error:
        return f" cannot be written: {error.strerror or error}."
    return ""
