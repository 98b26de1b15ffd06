"""report.json: the report as a file that other programs read. No pickle, no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from atorch_ns.errors import InputError
from atorch_ns.job import MethodRow, Report
from atorch_ns.pipeline import PipelineStep, StageCosts, get_schedule
from atorch_ns.report._actual import Actual
from atorch_ns.search import SearchOutcome, outcome_from_json, outcome_to_json
from atorch_ns.strategy import Strategy

__all__ = ["SCHEMA", "Document", "read_document", "write_document"]

SCHEMA = 1


class Document(NamedTuple):
    """What a report is made of; see ``TrainingReport``."""

    applied: Report | None
    search: SearchOutcome | None
    actual: Actual | None
    pipeline: PipelineStep | None = None


def write_document(parts: Document) -> str:
    """The text of report.json."""
    applied, search, actual, pipeline = parts
    document = {
        "schema": SCHEMA,
        "kind": "atorch_ns report",
        "applied": None if applied is None else _applied_as_json(applied),
        "search": None if search is None else json.loads(outcome_to_json(search)),
        "actual": None if actual is None else asdict(actual),
    }
    if pipeline is not None:
        document["pipeline"] = asdict(pipeline)
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_document(text: str, *, source: str) -> Document:
    """The parts of a report.

    Args:
        text: of report.json.
        source: where it comes from, for messages.

    Raises:
        InputError: if it is no report, or one of another schema.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InputError(f"{source} is no report: it is not JSON ({error}). Give a report.json.") from None
    if isinstance(document, Mapping) and "outcome" in document:  # a search's outcome alone
        return Document(None, outcome_from_json(text), None)
    if not isinstance(document, Mapping) or document.get("kind") != "atorch_ns report":
        raise InputError(f'{source} is JSON, but no report: it has no "kind": "atorch_ns report".')
    if document.get("schema") != SCHEMA:
        raise InputError(
            f"{source} has schema {document.get('schema')!r}, but this version reads schema {SCHEMA}. "
            "Read it with the version of atorch_ns that wrote it."
        )
    try:
        return _parts(document)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source} is a damaged report: {type(error).__name__}: {error}.") from error


def _parts(document: Mapping[str, Any]) -> Document:
    applied, search, actual = (document[name] for name in ("applied", "search", "actual"))
    pipeline = document.get("pipeline")  # reports of training without a pipeline have none
    return Document(
        None if applied is None else _applied_from_json(applied),
        None if search is None else outcome_from_json(json.dumps(search)),
        None if actual is None else Actual(**{**actual, "step_seconds": tuple(actual["step_seconds"])}),
        None if pipeline is None else _pipeline_from_json(pipeline),
    )


def _pipeline_from_json(values: Mapping[str, Any]) -> PipelineStep:
    costs = {name: tuple(seconds) for name, seconds in values["costs"].items()}
    step = PipelineStep(**{**values, "costs": StageCosts(**costs)})
    get_schedule(step.schedule).check(step.num_ranks, step.num_micro_batches, step.stages_per_rank)
    return step


def _applied_as_json(report: Report) -> dict[str, Any]:
    return {
        "strategy": json.loads(report.strategy.to_bytes()),
        "rows": [asdict(row) for row in report.rows],
        "notes": list(report.notes),
        "world_size": report.world_size,
        "axes": [list(axis) for axis in report.axes],
        "device": report.device,
        "num_parameters": report.num_parameters,
        "parameter_bytes_per_rank": report.parameter_bytes_per_rank,
    }


def _applied_from_json(values: Mapping[str, Any]) -> Report:
    return Report(
        strategy=Strategy.load(values["strategy"]),
        rows=tuple(MethodRow(**row) for row in values["rows"]),
        notes=tuple(values["notes"]),
        world_size=values["world_size"],
        axes=tuple((name, size) for name, size in values["axes"]),
        device=values["device"],
        num_parameters=values["num_parameters"],
        parameter_bytes_per_rank=values["parameter_bytes_per_rank"],
    )
