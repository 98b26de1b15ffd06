"""History: every trial of every search in a file, so that a killed search resumes where it stopped.

The file is a :class:`~atorch_ns.search.history.journal.Journal` of JSON objects: the setting of searches,
once; each trial; the end of a search with its best strategy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.errors import InputError
from atorch_ns.search.history.journal import Journal, OptunaJournalError
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.outcome import SearchOutcome, SearchSetting, from_json, to_json
from atorch_ns.search.search import Known, Search
from atorch_ns.search.space.candidate import Candidate, named_features
from atorch_ns.search.trial import TrialOutcome, TrialTask
from atorch_ns.text import error_text


@dataclass(kw_only=True)
class TrialRecord:
    """One trial.

    Attributes:
        key, label: of the candidate.
        parameters: settings of the candidate's methods, each ``"on"``.
        number: number of the trial in its study, from 0 on.
        run: number of its search in the study, from 0 on.
    """

    key: str
    label: str
    parameters: dict[str, str]
    task: TrialTask
    outcome: TrialOutcome
    number: int = 0
    run: int = 0

    @property
    def seconds(self) -> float | None:
        """Median step; ``None`` without one."""
        return self.outcome.median_seconds if self.outcome.succeeded else None

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak of all ranks; ``None`` where it was not measured."""
        return max(self.outcome.peak_bytes, default=None)


@dataclass(kw_only=True)
class StudyRecord:
    """All searches of one setting.

    Attributes:
        name: the setting's fingerprint.
        setting: model, device, ranks; ``None`` where it was not noted.
        num_searches: searches that came to their end.
        best: key, label, steps and seconds of the strategy that the last of them found; ``None`` if none.
        trials: all trials, in the order in which they were run.
    """

    name: str
    setting: SearchSetting | None = None
    num_searches: int = 0
    best: dict[str, Any] | None = None
    trials: list[TrialRecord] = field(default_factory=list)

    @property
    def fastest(self) -> TrialRecord | None:
        """The trial with the shortest step."""
        successes = [trial for trial in self.trials if trial.seconds is not None]
        return min(successes, key=lambda trial: trial.seconds or 0.0, default=None)


@dataclass(frozen=True, kw_only=True)
class HistoryLine:
    """One line of the file: a setting, a trial, or the end of a search.

    Attributes:
        study: the setting's fingerprint.
        ended: whether a search has ended.
        best: strategy that it found.
    """

    study: str
    setting: SearchSetting | None = None
    trial: TrialRecord | None = None
    ended: bool = False
    best: dict[str, Any] | None = None


class History:
    """The trials of searches, kept in a file.

    Thread-safe. A fault of the file never ends a search: it is reported once, then the file is left alone. ::

        search, num_resumed = history.begin(setting, settings, candidates)
        ...
        history.conclude(search.outcome())

    Args:
        path: the file; made where there is none.
        on_note: called once with the reason why nothing is kept, and with each repair.

    Attributes:
        problem: reason why nothing is kept; empty while all is well.

    Raises:
        OptunaJournalError: if an earlier version wrote the file.
    """

    def __init__(self, path: str | PathLike[str], *, on_note: Callable[[str], None] | None = None) -> None:
        self.path = Path(path)
        self.problem = ""
        self._on_note = on_note
        self._journal = Journal(self.path)
        self._studies: dict[str, StudyRecord] = {}
        self._lock = threading.RLock()
        try:
            if self._journal.open():
                self._send_note(f"the last entry of the history {self.path} was incomplete and was cut off.")
        except OptunaJournalError:
            raise
        except (OSError, ValueError) as error:
            self._give_up("opened", error)

    def begin(
        self, setting: SearchSetting, settings: SearchSettings, candidates: Iterable[Candidate]
    ) -> tuple[Search, int]:
        """Returns a search that continues earlier ones of its setting and is recorded here.

        Returns:
            The search, and the number of trials taken over; 1 for the strategy that an ended search found.
        """
        strategy = self.known(setting.fingerprint)
        search = Search(setting, settings, candidates, known=strategy, recorder=self)
        return search, self.replay(search) or int(strategy is not None)

    def record(
        self, setting: SearchSetting, candidate: Candidate, task: TrialTask, outcome: TrialOutcome
    ) -> None:
        """Appends one trial."""
        parameters = named_features(candidate)
        trial = TrialRecord(
            key=candidate.key, label=candidate.label, parameters=parameters, task=task, outcome=outcome
        )
        self._add_line(setting, HistoryLine(study=setting.fingerprint, trial=trial))

    def replay(self, search: Search) -> int:
        """Gives a search the trials of the unfinished search of its setting. Returns their number."""
        with self._lock:
            study = self._read_study(search.setting.fingerprint)
            trials = [trial for trial in study.trials if trial.run == study.num_searches]  # an open search's
        return sum(search.resume(trial.key, trial.outcome) for trial in trials)

    def conclude(self, outcome: SearchOutcome) -> None:
        """Records the end of a search and its strategy, with which later searches of its setting begin."""
        winner, best = outcome.winner, None
        if winner is not None and winner.trial is not None:  # a choice by prediction is not kept
            best = {
                "key": winner.candidate.key,
                "label": winner.candidate.label,
                "steps": winner.candidate.steps,
                "seconds": winner.trial.median_seconds,
            }
        self._add_line(outcome.setting, HistoryLine(study=outcome.setting.fingerprint, ended=True, best=best))

    def known(self, fingerprint: str) -> Known | None:
        """Strategy that an earlier search of this setting found; ``None`` if no search ended with one."""
        best = self._read_study(fingerprint).best
        return None if best is None else Known(best["key"], float(best["seconds"]))

    def _read_study(self, fingerprint: str) -> StudyRecord:
        with self._lock:
            self._try_action("read", lambda: _add_lines(self._studies, self._journal.new_lines()))
            empty = StudyRecord(name=fingerprint)  # of a new setting, or where the file has failed
            return empty if self.problem else self._studies.get(fingerprint, empty)

    def _add_line(self, setting: SearchSetting, line: HistoryLine) -> None:
        with self._lock:
            if self._read_study(setting.fingerprint).setting is None:
                first = HistoryLine(study=setting.fingerprint, setting=setting)  # once for each setting
                self._try_action("written", lambda: self._journal.append(to_json(first)))
            self._try_action("written", lambda: self._journal.append(to_json(line)))

    def _try_action(self, what: str, do: Callable[[], None]) -> None:
        if not self.problem:  # after one failure nothing is read or written
            try:
                do()
            except (OSError, ValueError) as error:
                self._give_up(what, error)

    def _give_up(self, what: str, error: Exception) -> None:
        reason = error_text(error)
        self.problem = f"the history {self.path} cannot be {what} ({reason}); the search goes on without it."
        self._send_note(self.problem)

    def _send_note(self, text: str) -> None:
        if self._on_note is not None:
            self._on_note(text)


def read_history(path: str | PathLike[str]) -> tuple[StudyRecord, ...]:
    """Every study of a history, by name. The file is only read, so a search may write to it meanwhile.

    Raises:
        InputError: if there is no such file, or it is not a history.
    """
    file = Path(path)
    if not file.is_file():
        why = "is a folder" if file.is_dir() else "is not there"
        raise InputError(f"the history {file} {why}. Give the file that search_history or --history named.")
    studies: dict[str, StudyRecord] = {}
    try:
        _add_lines(studies, Journal(file).new_lines())
    except OptunaJournalError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} is not a history of searches: {error}. Give the file that search_history or --history named."
        ) from error
    return tuple(studies[name] for name in sorted(studies))


def tried_strategies(path: str | PathLike[str], study: str) -> list[tuple[tuple[str, Any], ...]]:
    """Steps of each strategy that earlier searches of a setting tried; empty if nothing can be read."""
    try:
        records = [record for record in read_history(path) if record.name == study]
    except InputError:  # reported where the history is opened
        return []
    return list({trial.key: trial.task.steps for record in records for trial in record.trials}.values())


def _add_lines(studies: dict[str, StudyRecord], lines: Iterable[str]) -> None:
    for text in lines:
        line = from_json(HistoryLine, text)  # raises an InputError
        study = studies.setdefault(line.study, StudyRecord(name=line.study))
        study.setting = line.setting or study.setting
        if line.trial is not None:
            line.trial.number, line.trial.run = len(study.trials), study.num_searches
            study.trials.append(line.trial)
        study.num_searches += line.ended  # later trials are of the next search
        study.best = line.best or study.best  # the last that was found
