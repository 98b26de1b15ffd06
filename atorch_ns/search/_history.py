"""History: every trial of every search in a file, so that a killed search goes on where it stopped.

The file is Optuna's journal: append-only, one line an entry. ``optuna.load_study`` and ``optuna-dashboard``
read it. Each setting has a study named by its fingerprint; each trial holds the settings of the candidate's
methods as parameters, and task and outcome as user attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from atorch_ns.search._candidate import Candidate
from atorch_ns.search._features import named_features
from atorch_ns.search._journal import Journal
from atorch_ns.search._json import from_json, to_json
from atorch_ns.search._outcome import SearchOutcome, Setting
from atorch_ns.search._search import Known, Search
from atorch_ns.search._trial import TrialOutcome, TrialTask

__all__ = ["History"]

T = TypeVar("T")


class History:
    """The trials of searches, kept in a file.

    Whatever is wrong with the file never ends a search: it is told once, and from then on nothing is read or
    written. ::

        known = history.known(setting.fingerprint)
        search = Search(setting, settings, candidates, known=known, recorder=history)
        if known is None:
            history.replay(search)
        ...
        history.conclude(search.outcome())

    Args:
        path: of the file; it is made where there is none.
        on_note: is told, once, why nothing is kept, or what was mended.

    Attributes:
        problem: why nothing is kept; empty while all is well.

    Raises:
        MissingPackageError: if Optuna is not installed.
    """

    def __init__(self, path: str | PathLike[str], *, on_note: Callable[[str], None] | None = None) -> None:
        self.path = Path(path)
        self.problem = ""
        self._on_note = on_note
        self._journal = self._attempt("opened", lambda: Journal(self.path))
        if self._journal is not None and self._journal.mended:
            self._note(f"the last entry of the history {self.path} was incomplete and was cut off.")

    # ---- what a search calls

    def record(self, setting: Setting, candidate: Candidate, task: TrialTask, outcome: TrialOutcome) -> None:
        """Appends one trial."""

        def append() -> None:
            study = self._make(setting)
            attributes = {
                "run": _run(study),
                "key": candidate.key,
                "label": candidate.label,
                "task": to_json(task),
                "outcome": to_json(outcome),
            }
            self._open().append(
                setting.fingerprint,
                value=outcome.median_seconds if outcome.succeeded else None,
                marks=named_features(candidate),
                attributes=attributes,
            )

        self._attempt("written", append)

    def replay(self, search: Search) -> int:
        """Gives a search the trials of the one of its setting that was never ended; their number."""

        def read() -> list[tuple[str, TrialOutcome]]:
            study = self._open().find(search.setting.fingerprint)
            if study is None:
                return []
            run = _run(study)
            trials = [trial.user_attrs for trial in study.get_trials(deepcopy=False)]
            return [
                (trial["key"], from_json(TrialOutcome, trial["outcome"]))
                for trial in trials
                if trial.get("run") == run
            ]

        return sum(search.resume(key, outcome) for key, outcome in self._attempt("read", read) or ())

    def conclude(self, outcome: SearchOutcome) -> None:
        """Notes that a search has ended, and what it found; later searches of its setting begin with that."""

        def write() -> None:
            study, winner = self._make(outcome.setting), outcome.winner
            if winner is not None and winner.trial is not None:
                found = {
                    "key": winner.candidate.key,
                    "label": winner.candidate.label,
                    "steps": winner.candidate.steps,
                    "seconds": winner.trial.median_seconds,
                }
                study.set_user_attr("best", to_json(found))
            study.set_user_attr("run", _run(study) + 1)

        self._attempt("written", write)

    # ---- what is known

    def known(self, fingerprint: str) -> Known | None:
        """What an earlier search of this setting found; ``None`` if none was ended or found any."""
        found = self._best(fingerprint)
        return None if found is None else Known(found["key"], float(found["seconds"]))

    def best(self, fingerprint: str) -> tuple[tuple[str, Any], ...] | None:
        """The steps of the strategy that an earlier search of this setting found."""
        found = self._best(fingerprint)
        return None if found is None else tuple((name, config) for name, config in found["steps"])

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The settings that the file knows."""
        return self._attempt("read", lambda: self._open().names) or ()

    def _best(self, fingerprint: str) -> dict[str, Any] | None:
        def read() -> dict[str, Any] | None:
            study = self._open().find(fingerprint)
            text = None if study is None else study.user_attrs.get("best")
            return None if text is None else from_json(dict[str, Any], text)

        return self._attempt("read", read)

    # ---- the file

    def _open(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def _make(self, setting: Setting) -> Any:
        study = self._open().make(setting.fingerprint)
        if "setting" not in study.user_attrs:
            study.set_user_attr("setting", to_json(setting))
        return study

    def _attempt(self, what: str, do: Callable[[], T]) -> T | None:
        """What ``do`` gives; ``None`` if the file fails, now or earlier."""
        if self.problem:
            return None
        try:
            return do()
        except Exception as error:  # Optuna asserts that entries make sense, and looks things up in them
            reason = f"{type(error).__name__}: {error}"
            self.problem = (
                f"the history {self.path} cannot be {what} ({reason}); the search goes on without it."
            )
            self._note(self.problem)
            return None

    def _note(self, text: str) -> None:
        if self._on_note is not None:
            self._on_note(text)


def _run(study: Any) -> int:
    """How many searches of the study's setting have ended; trials are marked with it."""
    return int(study.user_attrs.get("run", 0))
