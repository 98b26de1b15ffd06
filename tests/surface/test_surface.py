"""What users rely on stays as it is, unless somebody means to change it."""

from __future__ import annotations

import difflib
import io
import zipfile
from pathlib import Path

import pytest

from tests.surface._write import FOLDER, surfaces

_ROOT = Path(__file__).parents[2]
_LARGEST_BYTES = 2 * 10**6


@pytest.mark.parametrize("name", sorted(surfaces()))
def test_the_surface_is_as_it_was(name: str) -> None:
    before, now = (FOLDER / name).read_text().splitlines(), surfaces()[name].splitlines()
    changes = list(difflib.unified_diff(before, now, "frozen", "now", lineterm="", n=1))
    assert not changes, "\n".join(
        [*changes, "", "If this is meant: python -m tests.surface, and a line in CHANGELOG.md."]
    )


def test_every_frozen_file_is_compared() -> None:
    frozen = {path.name for path in FOLDER.iterdir() if path.suffix in (".txt", ".json")}
    assert frozen == set(surfaces())


def test_the_wheel_stays_small() -> None:
    """The same files, compressed in the same way; metadata is some kilobytes."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as wheel:
        for package in ("atorch_ns", "opt_lib"):
            for path in (_ROOT / package).rglob("*"):
                if path.suffix in (".py", ".json", ".typed"):
                    wheel.write(path, path.relative_to(_ROOT))
    assert written.tell() < _LARGEST_BYTES
