"""TrainingReport: what was applied, what was searched, and how it turned out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from atorch_ns._version import __version__
from atorch_ns.cluster import DEVICES
from atorch_ns.errors import InputError
from atorch_ns.job import MethodRow, Report
from atorch_ns.pipeline import PipelineStep
from atorch_ns.report._actual import Actual, ActualInfo, actual_info
from atorch_ns.report._files import read_text, write_text
from atorch_ns.report._json import Document, read_document, write_document
from atorch_ns.report._measures import peak, seconds
from atorch_ns.report._text import report_text
from atorch_ns.report._timeline import TimelineInfo, timeline_info
from atorch_ns.search import Row, SearchOutcome
from atorch_ns.strategy import Requires, Strategy

if TYPE_CHECKING:
    from atorch_ns.engine._calibration import Calibration

__all__ = ["TrainingReport"]

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Why a job is trained as it is. Prints as text (the first candidates); saves as JSON, HTML or text.

    Attributes:
        applied: what was applied; ``None`` for a plan that was made offline.
        search: every candidate with its figures; ``None`` if the strategy was given.
        actual: what training took; ``None`` until :meth:`with_actual`.
        pipeline: a step of the pipeline as it is predicted; ``None`` where there is none.
    """

    applied: Report | None = None
    search: SearchOutcome | None = None
    actual: Actual | None = None
    pipeline: PipelineStep | None = None

    @property
    def strategy(self) -> Strategy:
        """As it is saved: what was applied, or what the search chose."""
        if self.applied is None and self.search is not None and self.search.winner is not None:
            return _chosen(self.search, self.search.winner)
        return self._applied.strategy

    @property
    def rows(self) -> tuple[MethodRow, ...]:
        """One for every method, in order of application."""
        return self._applied.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """Methods added, left out and fitted, each a sentence."""
        return self._applied.notes

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._applied.world_size

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh, innermost first."""
        return self._applied.axes

    @property
    def device(self) -> str:
        """This rank's device."""
        return self._applied.device

    @property
    def num_parameters(self) -> int:
        """Parameter elements of the whole model."""
        return self._applied.num_parameters

    @property
    def parameter_bytes_per_rank(self) -> int:
        """Bytes of parameters that this rank keeps between steps (measured)."""
        return self._applied.parameter_bytes_per_rank

    @property
    def _applied(self) -> Report:
        if self.applied is None:
            raise InputError("nothing was applied: this is the report of a plan that was made offline.")
        return self.applied

    def __str__(self) -> str:
        return self._text(_SHOWN)

    def to_json(self) -> str:
        """The text of report.json."""
        return write_document(Document(self.applied, self.search, self.actual, self.pipeline))

    def to_html(self) -> str:
        """The text of report.html: one page that needs no network and no script."""
        from atorch_ns.report._html import report_html

        return report_html(self.applied, self.search, self.actual_info, self.timeline_info)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes ``.json``, ``.html`` or ``.txt`` by the suffix, all of it or nothing.

        Raises:
            InputError: if the suffix is another, or the place cannot be written.
        """
        path = Path(path)
        writers: dict[str, Callable[[], str]] = {
            ".json": self.to_json,
            ".html": self.to_html,
            ".txt": lambda: self._text(None) + "\n",
        }
        writer = writers.get(path.suffix.lower())
        if writer is None:
            raise InputError(
                f"a report cannot be saved as {path.name!r}: its suffix must be one of {', '.join(writers)}."
            )
        write_text(path, writer())

    @classmethod
    def from_json(cls, text: str, *, source: str = "the given text") -> TrainingReport:
        """Reads report.json.

        Raises:
            InputError: if it is no report, or one of another schema.
        """
        return cls(**read_document(text, source=source)._asdict())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> TrainingReport:
        """Reads a report.json from a file; raises as :meth:`from_json`."""
        return cls.from_json(read_text(Path(path)), source=str(path))

    def with_actual(self, step_seconds: Sequence[float], peak_bytes: int | None = None) -> TrainingReport:
        """The report with what training took beside what was predicted.

        Args:
            step_seconds: measured steps, warm-up left out.
            peak_bytes: the most that was held at once on this rank.

        Raises:
            InputError: without steps, or with one that is no positive time.
        """
        return replace(
            self, actual=Actual(step_seconds=tuple(map(float, step_seconds)), peak_bytes=peak_bytes)
        )

    @property
    def actual_info(self) -> ActualInfo | None:
        """Predicted against actual; ``None`` before :meth:`with_actual`."""
        return None if self.actual is None else actual_info(self.actual, self.search)

    def with_pipeline(self, step: PipelineStep) -> TrainingReport:
        """The report with the timeline of a pipeline's step among its pictures."""
        return replace(self, pipeline=step)

    @property
    def timeline_info(self) -> TimelineInfo | None:
        """What each rank of the pipeline does when; ``None`` where there is none."""
        return None if self.pipeline is None else timeline_info(self.pipeline)

    def _text(self, top: int | None) -> str:
        return report_text(self.applied, self.search, self.actual_info, self.timeline_info, top=top)

    def refit(self, path: str | PathLike[str] | None = None) -> Calibration:
        """What the trials, and training where :meth:`with_actual` said it, teach about the estimate.

        Args:
            path: file that the factors are added to, for searches to come; ``None`` only returns them.

        Raises:
            InputError: without a search, or if nothing of it was measured.
        """
        if self.search is None:
            raise InputError("there was no search, so there is no prediction to correct.")
        from atorch_ns.engine._refit import refit

        learned = refit(self.search, None if self.actual is None else self.actual.as_outcome())
        if path is not None:
            learned.save(path)
        return learned


def _device_type(name: str) -> str | None:
    """Of a device by its name; ``None`` if the name alone does not tell."""
    return "cpu" if name == "cpu" else "cuda" if name == "cuda" or name in DEVICES else None


def _chosen(search: SearchOutcome, winner: Row) -> Strategy:
    """The winner with what it was chosen for."""
    time, memory = seconds(winner), peak(winner)
    return Strategy(
        winner.candidate.steps,
        requires=Requires(world_size=search.setting.world_size, device=_device_type(search.setting.device)),
        provenance={
            "made_by": f"atorch_ns {__version__}",
            "model": search.setting.model,
            "num_parameters": search.setting.num_parameters,
            "objective": search.settings.objective,
            "device": search.setting.device,
            "global_batch": search.setting.global_batch,
            f"step_seconds_{time.source}": time.value,
            f"peak_bytes_{memory.source}": memory.value,
        },
    )
