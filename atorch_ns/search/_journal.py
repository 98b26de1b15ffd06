"""The file of a history: Optuna's journal, mended when it is opened, locked while it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from atorch_ns.search._quiet import load_optuna, quiet

__all__ = ["Journal"]

_BEGINNING = b'{"op_code":'
"""How every entry begins."""


class Journal:
    """Optuna studies in one append-only file. Everything raises what the file system or Optuna raises.

    Args:
        path: of the file; made with its folder where there is none.

    Attributes:
        mended: whether the last entry was incomplete and was cut off.
    """

    def __init__(self, path: Path) -> None:
        self._optuna = load_optuna("the history of searches")
        self._studies: dict[str, Any] = {}
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _FileLock(path)
        lock.acquire()
        try:
            self.mended = _cut_off_incomplete(path)
        finally:
            lock.release()
        journal = self._optuna.storages.journal
        with quiet(self._optuna):
            self._storage = journal.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=lock))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all studies."""
        return tuple(sorted(study.study_name for study in self._storage.get_all_studies()))

    def find(self, name: str) -> Any:
        """The study of this name; ``None`` if there is none."""
        if name not in self._studies and name in self.names:
            with quiet(self._optuna):
                self._studies[name] = self._optuna.load_study(study_name=name, storage=self._storage)
        return self._studies.get(name)

    def make(self, name: str) -> Any:
        """The study of this name, made if there is none; smaller values are better."""
        if name not in self._studies:
            with quiet(self._optuna):
                self._studies[name] = self._optuna.create_study(
                    storage=self._storage, study_name=name, direction="minimize", load_if_exists=True
                )
        return self._studies[name]

    def append(
        self, name: str, *, value: float | None, marks: dict[str, str], attributes: dict[str, Any]
    ) -> None:
        """Adds a finished trial; without a value, a failed one.

        Args:
            name: of the study.
            value: what the trial gave.
            marks: parameters, each ``"on"`` or ``"off"``.
            attributes: JSON values.
        """
        optuna = self._optuna
        domain = optuna.distributions.CategoricalDistribution(("off", "on"))
        states = optuna.trial.TrialState
        trial = optuna.trial.create_trial(
            state=states.FAIL if value is None else states.COMPLETE,
            value=value,
            params=marks,
            distributions=dict.fromkeys(marks, domain),
            user_attrs=attributes,
        )
        self.make(name).add_trial(trial)


class _FileLock:
    """Keeps other writers out; let go by the operating system when its holder is killed.

    Optuna's own locks are files that a killed process leaves behind, for others to wait on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Waits for the lock."""
        self._file = self._path.open("a")
        try:
            import fcntl
        except ImportError:  # no such locks here: one writer at a time is then up to the user
            return True
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Gives it back."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _cut_off_incomplete(path: Path) -> bool:
    """Cuts off an entry that was half written when its writer was killed or the disk was full.

    Raises:
        ValueError: if the file is no journal; it is then left as it is.
    """
    if not path.exists():
        return False
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        tail, last = content[end:], content[:end].splitlines()[-1:]
        if last and _operation(last[0]) is None:
            raise ValueError("its last line is no entry of a journal")
        if not tail:
            return False
        if not (tail.startswith(_BEGINNING) or _BEGINNING.startswith(tail)):
            raise ValueError("it ends in something else than an entry of a journal")
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    return True


def _operation(line: bytes) -> object:
    """What an entry does; ``None`` if it is none."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry.get("op_code") if isinstance(entry, dict) else None
