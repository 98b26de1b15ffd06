from __future__ import annotations

from pathlib import Path

import pytest

from atorch_ns.checkpoint.folder import MANIFEST, clean, commit, find, latest, new_folder
from atorch_ns.errors import CheckpointError


def write(parent: Path, step: int, text: str = "{}") -> Path:
    folder = new_folder(parent, step)
    (folder / MANIFEST).write_text(text)
    return commit(folder, step)


def names(parent: Path) -> list[str]:
    return sorted(place.name for place in parent.iterdir())


def test_a_commit_makes_the_latest(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    assert write(tmp_path, 5) == tmp_path / "step-5"
    assert latest(tmp_path) == tmp_path / "step-5"
    write(tmp_path, 3)
    assert latest(tmp_path) == tmp_path / "step-3"  # the one saved last, whatever its number
    assert names(tmp_path) == ["latest", "step-3", "step-5"]
    assert find(tmp_path) == tmp_path / "step-3"
    assert find(tmp_path / "step-5") == tmp_path / "step-5"


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    write(tmp_path, 5, "old")
    write(tmp_path, 5, "new")
    assert names(tmp_path) == ["latest", "step-5"]
    assert (find(tmp_path) / MANIFEST).read_text() == "new"


def test_an_unfinished_folder_is_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1)
    new_folder(tmp_path, 2)
    (tmp_path / ".latest.1f2e3d4c").touch()  # a process killed while it wrote the pointer
    assert latest(tmp_path) == tmp_path / "step-1"
    clean(tmp_path)
    assert names(tmp_path) == ["latest", "step-1"]


def test_a_stop_before_the_pointer_moves_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    folder = new_folder(tmp_path, 2)
    (folder / MANIFEST).write_text("{}")

    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        commit(folder, 2)
    monkeypatch.undo()
    assert latest(tmp_path) == tmp_path / "step-1"
    assert find(tmp_path / "step-2") == tmp_path / "step-2"


@pytest.mark.parametrize("renames", [0, 1])
def test_a_stop_while_a_step_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    write(tmp_path, 1, "older")
    write(tmp_path, 2, "old")
    folder = new_folder(tmp_path, 2)
    (folder / MANIFEST).write_text("new")
    done = 0
    rename = Path.rename

    def stop(self: Path, target: Path) -> Path:
        nonlocal done
        if done == renames:
            raise KeyboardInterrupt
        done += 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        commit(folder, 2)
    monkeypatch.undo()
    assert (find(tmp_path) / MANIFEST).read_text() == "old"
    clean(tmp_path)
    assert names(tmp_path) == ["latest", "step-1", "step-2"]
    assert (find(tmp_path) / MANIFEST).read_text() == "old"


def test_a_lost_pointer_means_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 10):
        write(tmp_path, step)
    (tmp_path / "latest").write_text("garbage")
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-x").mkdir()
    assert latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / "latest").write_text("step-11")  # incomplete
    assert latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00")  # no text
    assert latest(tmp_path) == tmp_path / "step-10"


def test_the_pointer_leads_nowhere_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / MANIFEST).write_text("{}")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "latest").write_text("../outside")
    assert latest(inside) is None


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        find(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find(tmp_path)
    (tmp_path / "step-4").mkdir()
    with pytest.raises(CheckpointError, match=r"step-4 is incomplete: it has no manifest.json"):
        find(tmp_path / "step-4")
