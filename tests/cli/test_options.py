"""Checks of options before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from atorch_ns.cli._options import check_named, unwritable
from atorch_ns.errors import InputError


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("kept")
    assert unwritable(save=there, report=tmp_path / "new.html", history=None) == []
    assert there.read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


def test_every_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder, missing = tmp_path, tmp_path / "missing" / "profile.json"
    first, second = unwritable(save=folder, save_profile=missing)
    assert first == f"--save={folder} is a folder; name a file in it."
    assert second == f"--save-profile={missing}: the folder {missing.parent} does not exist."


def test_missing_names_are_said_together() -> None:
    check_named(model="a:b", sample="a:c")
    with pytest.raises(InputError, match=r"^--model and --sample missing"):
        check_named(model=None, sample="")
