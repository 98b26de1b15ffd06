"""Folders of checkpoints: one a step, complete or absent, and a pointer to the latest.

::

    runs/
      latest              the name of the newest complete checkpoint: "step-200"
      step-100/           complete
      step-200/           complete
      .tmp-step-300-4f2a/ being written, or left by a save that was interrupted
      .old-step-200-91bc/ being replaced by a new step-200

Everything is written into a ``.tmp`` folder, which a rename makes a checkpoint when all ranks have written.
Whatever interrupts a save, the last complete checkpoint stays what ``latest`` finds.

The Trainer and MerakTrainer have such a folder in each folder of a checkpoint: ``0000-0100/step-100``,
``checkpoint-100/step-100``. The folder of their run has the highest step as its latest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from os import PathLike
from pathlib import Path
from typing import Final

from atorch_ns.errors import CheckpointError
from atorch_ns.strategy import JSON
from atorch_ns.system import write_whole

MANIFEST: Final = "manifest.json"
"""Written last: a folder that has it is complete."""

_POINTER: Final = "latest"
STEP: Final = re.compile(r"step-(\d+)")
_OF_TRAINERS: Final = re.compile(r"(checkpoint|\d{4,})-\d+")  # folders of the Trainer and of MerakTrainer
_REPLACED: Final = re.compile(r"\.old-(step-\d+)-[0-9a-f]+")  # while commit replaces it


class DamagedError(CheckpointError):
    """A checkpoint whose files differ from what was saved."""


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step}"


def latest(path: str | PathLike[str]) -> Path | None:
    """The newest complete checkpoint below ``path``: the one saved last; ``None`` if there is none."""
    parent = Path(path)
    try:
        name = (parent / _POINTER).read_text().strip()
    except (OSError, UnicodeDecodeError):  # no pointer, or no text: the folders tell
        name = ""
    if STEP.fullmatch(name):
        for folder in (parent / name, *sorted(parent.glob(f".old-{name}-*"))):  # if commit was interrupted
            if (folder / MANIFEST).is_file():
                return folder
    steps = _complete_steps(parent)
    return steps[0] if steps else None


def other_steps(folder: Path) -> list[Path]:
    """The complete checkpoints next to ``folder``, the highest step first."""
    return [path for path in _complete_steps(folder.parent) if path != folder]


def find(path: str | PathLike[str]) -> Path:
    """The checkpoint that ``path`` means: itself, or the latest below it.

    Raises:
        CheckpointError: if there is none.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        return folder
    checkpoint = latest(folder)
    if checkpoint is not None:
        return checkpoint
    if not folder.is_dir():
        raise CheckpointError(
            f"folder {folder} does not exist. Give the folder that was passed to save, or that of one step."
        )
    if STEP.fullmatch(folder.name) or (folder / ".metadata").is_file():
        raise DamagedError(f"{folder} is incomplete: it has no {MANIFEST}, which is written last.")
    raise CheckpointError(
        f"{folder} holds no complete checkpoint, which is a folder named step-N with {MANIFEST}."
    )


def new_folder(parent: Path, step: int) -> Path:
    """Makes an empty folder for writing the checkpoint of ``step``."""
    folder = parent / f".tmp-{step_name(step)}-{secrets.token_hex(4)}"  # no save writes into another's folder
    folder.mkdir(parents=True)
    return folder


def clean(parent: Path) -> None:
    """Removes files of interrupted saves, and restores a checkpoint whose replacement was not completed."""
    for folder in parent.glob(".old-step-*"):
        match = _REPLACED.fullmatch(folder.name)
        if match and not (parent / match[1]).exists():
            folder.rename(parent / match[1])
        else:
            shutil.rmtree(folder)
    for folder in parent.glob(".tmp-step-*"):
        shutil.rmtree(folder)
    for draft in parent.glob(f".{_POINTER}.*"):
        draft.unlink()


def commit(folder: Path, step: int) -> Path:
    """Makes the complete ``folder`` the checkpoint of ``step``, and the latest one.

    Returns:
        Its final place. An older checkpoint of the same step is removed.
    """
    parent = folder.parent
    target = parent / step_name(step)
    old_folder = parent / f".old-{target.name}-{secrets.token_hex(4)}"
    if target.exists():
        target.rename(old_folder)  # a folder with files is not replaced by a rename
    folder.rename(target)
    write_whole(parent / _POINTER, f"{target.name}\n")
    _sync_folder(parent)  # the new one is durable before the old one is removed
    if old_folder.exists():
        shutil.rmtree(old_folder)
    return target


def write_json(path: Path, document: JSON) -> None:
    """Writes ``document`` to ``path`` atomically, and syncs it to the disk."""
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    _sync_folder(path.parent)


def _complete_steps(parent: Path) -> list[Path]:
    inside = [folder for folder in parent.glob("*-*/step-*") if _OF_TRAINERS.fullmatch(folder.parent.name)]
    folders = list(parent.glob("step-*")) or inside
    complete = [folder for folder in folders if (folder / MANIFEST).is_file()]
    numbered = [(int(match[1]), folder) for folder in complete if (match := STEP.fullmatch(folder.name))]
    return [folder for _, folder in sorted(numbered, reverse=True)]  # the highest step first


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # else renames may be lost with the power
    finally:
        os.close(handle)
