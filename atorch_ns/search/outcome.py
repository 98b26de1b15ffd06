"""Outcome of a search, the events on the way to it, and both as JSON.

Numbers that JSON does not have (NaN, infinities) become strings.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from atorch_ns.errors import InputError
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.space.candidate import Candidate, Fate
from atorch_ns.search.trial import BesideTensors, TrialOutcome, TrialTask

T = TypeVar("T")

SCHEMA = 1  # of ``report.json``


@dataclass(frozen=True, kw_only=True)
class SearchSetting:
    """Model, machine and workload of a search, for the report's head.

    Attributes:
        model: class of the model.
        num_parameters: number of parameter elements.
        world_size, num_nodes: numbers of processes and nodes.
        device: name of the device.
        memory_limit_bytes: bytes that one rank may use; 0 if unknown.
        global_batch, num_tokens: samples in a step, tokens in a sample.
        fingerprint: digest of model, cluster, workload and methods; the same for the same job.
        profile_seconds, estimate_seconds: time of the profile and of the pricing.
        notes: assumptions, as sentences.
    """

    model: str
    num_parameters: int
    world_size: int
    num_nodes: int
    device: str
    memory_limit_bytes: int
    global_batch: int
    num_tokens: int
    fingerprint: str
    profile_seconds: float = 0.0
    estimate_seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate with its result.

    Attributes:
        reason: why it won, lost, failed, was pruned or not tried, in one sentence with its numbers.
        trial: the measurements; ``None`` if it was not tried.
        trial_number: 1 for the first trial; 0 if it was not tried.
        corrected_seconds: predicted step, corrected by the trials; ``None`` before the first trial.
        corrected_bytes: predicted peak, corrected by the trials.
    """

    candidate: Candidate
    fate: Fate
    reason: str
    trial: TrialOutcome | None = None
    trial_number: int = 0
    corrected_seconds: float | None = None
    corrected_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class SingleProcess:
    """The trial of one process with the whole batch, and whether it is as fast as the winner within noise."""

    trial: TrialOutcome
    is_as_fast: bool


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """The full result of a search. Plain values only (JSON by pydantic's ``TypeAdapter``).

    Attributes:
        rows: every candidate, the winner first, then by measured and predicted time.
        best: key of the winner; ``None`` if none could be run. If the search ended before a measurement, the
            choice is by prediction, and the winner's ``trial`` is ``None``.
        stop_reason: why the search ended, as a sentence.
        num_trials: trials that were run; each attempt of a candidate and each repetition counts.
        seconds: time of the whole search.
        noise: relative standard error of a step (``noise_seconds / median_seconds``), median over all trials.
        lower_bound_seconds: no candidate is expected below this; corrected predictions less their error.
        gap: largest gain that is expected over the winner, as a share of its step.
        pareto: keys of the candidates that no other beats in both time and memory.
        nearest_miss: if nothing fits or runs, the nearest candidate and the remedy, as a sentence.
        resumed: trials read from an earlier history instead of run.
        beside: memory that trials needed beside tensors; ``None`` if none has measured it.
        checks: self-checks, each ``"<what>: passed"`` or ``"<what>: failed: <numbers>"``.
        numerics_passed: whether the winner was found to train as one process does.
        single_process: a plain strategy in one process, against the winner; ``None`` if not measured.
    """

    setting: SearchSetting
    settings: SearchSettings
    rows: tuple[Row, ...]
    best: str | None
    stop_reason: str
    num_trials: int
    seconds: float
    noise: float = 0.0
    lower_bound_seconds: float | None = None
    gap: float | None = None
    pareto: tuple[str, ...] = ()
    nearest_miss: str = ""
    resumed: int = 0
    beside: BesideTensors | None = None
    checks: tuple[str, ...] = ()
    numerics_passed: bool = False
    single_process: SingleProcess | None = None

    @property
    def unchecked(self) -> str:
        """The self-checks that could not be made, with the reason; empty if all were."""
        return "; ".join(check for check in self.checks if ": could not be run" in check)

    @property
    def winner(self) -> Row | None:
        """The chosen candidate's row."""
        return next((row for row in self.rows if row.candidate.key == self.best), None)

    @property
    def baseline(self) -> Row | None:
        """The plain strategy's row."""
        return next((row for row in self.rows if row.candidate.is_baseline), None)


@dataclass(frozen=True)
class Profiling:
    """The profile of the model begins."""

    model: str


@dataclass(frozen=True)
class Priced:
    """The candidates are known and priced."""

    setting: SearchSetting
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class TrialStarted:
    """A trial begins on all ranks."""

    number: int
    candidate: Candidate
    task: TrialTask


@dataclass(frozen=True)
class TrialEnded:
    """A trial has ended; ``best`` is the key of the best candidate so far."""

    number: int
    candidate: Candidate
    outcome: TrialOutcome
    best: str | None


@dataclass(frozen=True)
class SearchNote:
    """A message for people: a rank that is waited for, a resumed history."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The search is over."""

    outcome: SearchOutcome


Event = Profiling | Priced | TrialStarted | TrialEnded | SearchNote | Ended


class Observer(Protocol):
    """Receives every event on rank 0, in order. Must neither raise nor wait."""

    def __call__(self, event: Event) -> None:
        """Takes an event."""


_WRITER: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))


def to_json(value: Any) -> str:
    """Writes a dataclass or model of this package, or a tuple of them, as compact JSON."""
    plain = _WRITER.dump_python(value, mode="json")
    return json.dumps(_encode_nonfinite(plain), allow_nan=False, separators=(",", ":"))


def from_json(kind: type[T], text: str | bytes) -> T:
    """Reads and validates JSON from :func:`to_json`.

    Raises:
        InputError: if the text is something else. The message names the place and the expected value.
    """
    try:
        value: T = _type_adapter(cast("Hashable", kind)).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the top"
        more = f" ({error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
        name = getattr(kind, "__name__", str(kind))
        raise InputError(f"this is not a {name}: at {where}: {first['msg']}{more}.") from None
    return value


def outcome_to_json(outcome: SearchOutcome) -> str:
    """Returns a search's outcome as the content of ``report.json``."""
    document = {"schema": SCHEMA, "outcome": json.loads(to_json(outcome))}
    return json.dumps(document, indent=1, allow_nan=False)


def outcome_from_json(text: str | bytes) -> SearchOutcome:
    """Reads JSON from :func:`outcome_to_json`.

    Raises:
        InputError: if it is something else, or of a schema that this version does not know.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InputError(f"this is not a search outcome: it is not JSON: {error}.") from None
    if not isinstance(document, dict) or "outcome" not in document:
        raise InputError("this is not a search outcome: it has no key 'outcome' at the top.")
    if document.get("schema") != SCHEMA:
        raise InputError(
            f"this search outcome has schema {document.get('schema')!r}, and this version reads {SCHEMA}. "
            "Read it with the version that wrote it."
        )
    return from_json(SearchOutcome, json.dumps(document["outcome"]))


@functools.cache
def _type_adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("Any", kind))


def _encode_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"  # as pydantic reads
    if isinstance(value, dict):
        return {key: _encode_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode_nonfinite(item) for item in value]
    return value
