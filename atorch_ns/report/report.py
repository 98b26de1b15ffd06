"""TrainingReport: what was applied, what was searched, and how it turned out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atorch_ns._version import __version__
from atorch_ns.cluster import DEVICES
from atorch_ns.errors import InputError
from atorch_ns.job import MethodRow, Report, Result
from atorch_ns.job.memory_use import fragmentation_advice
from atorch_ns.pipeline import PipelineStep, StageCosts, get_schedule
from atorch_ns.report.info.accuracy import Actual, ActualInfo, actual_info
from atorch_ns.report.info.breakdown import TimelineInfo, timeline_info
from atorch_ns.report.info.candidates import peak, seconds
from atorch_ns.report.text.tables import TEXT_WIDTH
from atorch_ns.report.text.text import report_text
from atorch_ns.search import Row, SearchOutcome, outcome_from_json, outcome_to_json
from atorch_ns.strategy import Requires, Strategy
from atorch_ns.system import write_whole
from atorch_ns.text import error_text, with_period

if TYPE_CHECKING:
    from atorch_ns.engine.calibration import Calibration

SCHEMA = 1
KIND = "atorch_ns report"


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(with_period(f"{path} cannot be read: {reason}")) from None


def write_text(path: Path, text: str) -> None:
    """Writes a file, all of it or nothing.

    Raises:
        InputError: if the folder is missing or cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:  # its own text names the temporary file
        raise InputError(with_period(f"{path} cannot be written: {error.strerror or error}")) from None


_SHOWN = 12  # candidates in printed text
_ACTUAL_STEPS = 5  # steps of training after which the report shows measured times


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Reasons for a job's training setup. Prints as text (the first candidates); saves as JSON, HTML or text.

    Attributes:
        applied: report of the applied strategy; ``None`` for a plan that was made offline.
        search: every candidate with its figures; ``None`` if the strategy was given.
        actual: measurements of training; ``None`` until :meth:`with_actual`.
        pipeline: predicted step of the pipeline; ``None`` without one.
    """

    applied: Report | None = None
    search: SearchOutcome | None = None
    actual: Actual | None = None
    pipeline: PipelineStep | None = None

    @classmethod
    def of_job(cls, result: Result, search: SearchOutcome | None = None) -> TrainingReport:
        """The report of a job so far, with measured steps once there are a few."""
        job_report = result.applied
        advice = fragmentation_advice(torch.cuda.memory_stats()) if torch.cuda.is_initialized() else None
        notes = tuple(text for text in (advice, result.train_step.memory.finding) if text)
        if notes:
            job_report = replace(job_report, notes=(*job_report.notes, *notes))
        report = cls(applied=job_report, search=search, pipeline=result.job.parts.pipeline)
        seconds = result.train_step.times.seconds
        return report.with_actual(seconds) if len(seconds) >= _ACTUAL_STEPS else report

    @property
    def strategy(self) -> Strategy:
        """The strategy as it is saved: the one applied, or the one that the search chose."""
        if self.applied is None and self.search is not None and self.search.winner is not None:
            return _chosen_strategy(self.search, self.search.winner)
        return self._applied_report.strategy

    @property
    def rows(self) -> tuple[MethodRow, ...]:
        """One row for every method, in order of application."""
        return self._applied_report.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """Methods added, left out and fitted, each a sentence."""
        return self._applied_report.notes

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._applied_report.world_size

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh, innermost first."""
        return self._applied_report.axes

    @property
    def device(self) -> str:
        """This rank's device."""
        return self._applied_report.device

    @property
    def num_parameters(self) -> int:
        """Parameter elements of the whole model."""
        return self._applied_report.num_parameters

    @property
    def parameter_bytes_per_rank(self) -> int:
        """Bytes of parameters that this rank keeps between steps (measured)."""
        return self._applied_report.parameter_bytes_per_rank

    @property
    def _applied_report(self) -> Report:
        if self.applied is None:
            raise InputError("nothing was applied: this is the report of a plan that was made offline.")
        return self.applied

    def __str__(self) -> str:
        return self.to_text()

    def to_json(self) -> str:
        """The text of report.json."""
        document = {
            "schema": SCHEMA,
            "kind": KIND,
            "applied": None if self.applied is None else _applied_as_json(self.applied),
            "search": None if self.search is None else json.loads(outcome_to_json(self.search)),
            "actual": None if self.actual is None else asdict(self.actual),
        }
        if self.pipeline is not None:
            document["pipeline"] = asdict(self.pipeline)
        return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """The text of report.html: one page that needs no network and no script."""
        from atorch_ns.report.html.page import report_html

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
            ".txt": lambda: self.to_text(top=None) + "\n",
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
            InputError: if it is not a report, or one of another schema.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InputError(
                f"{source} is not a report: it is not JSON ({error}). Give a report.json."
            ) from None
        if isinstance(document, Mapping) and "outcome" in document:  # a search's outcome alone
            return cls(search=outcome_from_json(text))
        if not isinstance(document, Mapping) or document.get("kind") != KIND:
            raise InputError(f'{source} is JSON, but not a report: it has no "kind": "{KIND}".')
        if document.get("schema") != SCHEMA:
            raise InputError(
                f"{source} has schema {document.get('schema')!r}, but this version reads schema {SCHEMA}. "
                "Read it with the version of atorch_ns that wrote it."
            )
        try:
            job_report, search, actual = (document[name] for name in ("applied", "search", "actual"))
            pipeline = document.get("pipeline")  # reports of training without a pipeline have none
            return cls(
                applied=None if job_report is None else _applied_from_json(job_report),
                search=None if search is None else outcome_from_json(json.dumps(search)),
                actual=None
                if actual is None
                else Actual(**{**actual, "step_seconds": tuple(actual["step_seconds"])}),
                pipeline=None if pipeline is None else _pipeline_from_json(pipeline),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source} is a damaged report: {error_text(error)}.") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> TrainingReport:
        """Reads a report.json from a file; raises as :meth:`from_json`."""
        return cls.from_json(read_text(Path(path)), source=str(path))

    def with_actual(self, step_seconds: Sequence[float], peak_bytes: int | None = None) -> TrainingReport:
        """The report with measurements of training, to be compared with the predictions.

        Args:
            step_seconds: seconds of each measured step, without warm-up.
            peak_bytes: peak memory of this rank.

        Raises:
            InputError: without steps, or with one that is not a positive time.
        """
        actual = Actual(step_seconds=tuple(map(float, step_seconds)), peak_bytes=peak_bytes)
        return replace(self, actual=actual)

    @property
    def actual_info(self) -> ActualInfo | None:
        """Predicted against actual; ``None`` before :meth:`with_actual`."""
        return None if self.actual is None else actual_info(self.actual, self.search)

    def with_pipeline(self, step: PipelineStep) -> TrainingReport:
        """The report with the timeline of a pipeline's step among its pictures."""
        return replace(self, pipeline=step)

    @property
    def timeline_info(self) -> TimelineInfo | None:
        """Timeline of the pipeline's step; ``None`` without a pipeline."""
        return None if self.pipeline is None else timeline_info(self.pipeline)

    def to_text(self, *, top: int | None = _SHOWN, width: int = TEXT_WIDTH) -> str:
        """The report as text with ``top`` candidates at most (``None`` for all) and tables of ``width``."""
        actual, timeline = self.actual_info, self.timeline_info
        return report_text(self.applied, self.search, actual, timeline, top=top, width=width)

    def refit(self, path: str | PathLike[str] | None = None) -> Calibration:
        """Corrections of the estimate from trials, and from training if :meth:`with_actual` gave its figures.

        Args:
            path: file that the factors are added to, for later searches; ``None`` only returns them.

        Raises:
            InputError: without a search, or if nothing of it was measured.
        """
        if self.search is None:
            raise InputError("there was no search, so there is no prediction to correct.")
        from atorch_ns.engine.calibration import refit

        calibration = refit(self.search, None if self.actual is None else self.actual.as_outcome())
        if path is not None:
            calibration.save(path)
        return calibration


def _applied_as_json(report: Report) -> dict[str, Any]:
    strategy = json.loads(report.strategy.to_bytes())
    return {**vars(report), "strategy": strategy, "rows": [asdict(row) for row in report.rows]}


def _applied_from_json(values: Mapping[str, Any]) -> Report:
    objects = {
        "strategy": Strategy.load(values["strategy"]),
        "rows": tuple(MethodRow(**row) for row in values["rows"]),
        "notes": tuple(values["notes"]),
        "axes": tuple((name, size) for name, size in values["axes"]),
    }
    return Report(**{**values, **objects})


def _pipeline_from_json(values: Mapping[str, Any]) -> PipelineStep:
    costs = {name: tuple(seconds) for name, seconds in values["costs"].items()}
    step = PipelineStep(**{**values, "costs": StageCosts(**costs)})
    get_schedule(step.schedule).check(step.num_ranks, step.num_micro_batches, step.stages_per_rank)
    return step


def _device_type(name: str) -> str | None:
    # The table of devices knows GPUs by name; another name does not say its type.
    return "cpu" if name == "cpu" else "cuda" if name == "cuda" or name in DEVICES else None


def _chosen_strategy(search: SearchOutcome, winner: Row) -> Strategy:
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
