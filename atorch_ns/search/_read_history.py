"""What stands in the file of a history, as plain values. The file is left as it is."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.errors import InputError
from atorch_ns.search._journal import Journal
from atorch_ns.search._json import from_json
from atorch_ns.search._outcome import Setting
from atorch_ns.search._trial import TrialOutcome

__all__ = ["StudyRecord", "TrialRecord", "read_history"]


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial.

    Attributes:
        number: of the study, from 0 on.
        run: which of the study's searches it belongs to, from 0 on.
        key: the candidate's key.
        label: the candidate in a few words.
        state: how it ended, as in :data:`~atorch_ns.search.TrialStatus`.
        seconds: median step; ``None`` without one.
        num_steps: steps that were timed.
        peak_bytes: the largest of all ranks; ``None`` where it was not measured.
        total_seconds: what the trial took.
        parameters: settings of the candidate's methods, each ``"on"`` or ``"off"``.
        reason: why it failed; empty if it did not.
    """

    number: int
    run: int
    key: str
    label: str
    state: str
    seconds: float | None
    num_steps: int
    peak_bytes: int | None
    total_seconds: float
    parameters: dict[str, str]
    reason: str


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """All searches of one setting.

    Attributes:
        name: the setting's fingerprint, which is the study's name in Optuna too.
        setting: model, device, ranks; ``None`` where it was not noted.
        num_searches: searches that came to their end.
        best: what the last of them found: its key, label, steps and seconds; ``None`` without one.
        trials: in the order in which they were run.
    """

    name: str
    setting: Setting | None
    num_searches: int
    best: dict[str, Any] | None
    trials: tuple[TrialRecord, ...]

    @property
    def fastest(self) -> TrialRecord | None:
        """The trial with the shortest step."""
        timed = [trial for trial in self.trials if trial.seconds is not None]
        return min(timed, key=lambda trial: trial.seconds or 0.0, default=None)


def read_history(path: str | PathLike[str]) -> tuple[StudyRecord, ...]:
    """Every study of a history.

    A copy is read, so that nothing is mended, locked or made beside the file while a search may write to it.

    Raises:
        InputError: if there is no such file, or it is no history.
        MissingPackageError: if Optuna is not installed.
    """
    place = Path(path)
    if not place.is_file():
        why = "is a folder" if place.is_dir() else "is not there"
        raise InputError(f"the history {place} {why}. Give the file that search_history or --history named.")
    with tempfile.TemporaryDirectory(prefix="atorch_ns_history_") as folder:
        copy = Path(folder) / "history.journal"
        try:
            shutil.copyfile(place, copy)
            journal = Journal(copy)
            return tuple(_study(journal.find(name)) for name in journal.names)
        except InputError:
            raise
        except ImportError:
            raise
        except Exception as error:  # Optuna asserts that entries make sense, and looks things up in them
            raise InputError(
                f"{place} is no history of searches: {type(error).__name__}: {error}. Give the file that "
                "search_history or --history named."
            ) from error


def _study(study: Any) -> StudyRecord:
    attributes = study.user_attrs
    setting = attributes.get("setting")
    best = attributes.get("best")
    return StudyRecord(
        name=study.study_name,
        setting=None if setting is None else from_json(Setting, setting),
        num_searches=int(attributes.get("run", 0)),
        best=None if best is None else from_json(dict[str, Any], best),
        trials=tuple(_trial(trial) for trial in study.get_trials(deepcopy=False)),
    )


def _trial(trial: Any) -> TrialRecord:
    attributes = trial.user_attrs
    text = attributes.get("outcome")
    outcome = TrialOutcome(status="ok") if text is None else from_json(TrialOutcome, text)
    return TrialRecord(
        number=trial.number,
        run=int(attributes.get("run", 0)),
        key=str(attributes.get("key", "")),
        label=str(attributes.get("label", "")),
        state=outcome.status if text is not None else str(trial.state.name).lower(),
        seconds=outcome.median_seconds if outcome.succeeded else None,
        num_steps=len(outcome.step_seconds),
        peak_bytes=max(outcome.peak_bytes, default=None),
        total_seconds=outcome.total_seconds,
        parameters={name: str(value) for name, value in trial.params.items()},
        reason=outcome.reason,
    )
