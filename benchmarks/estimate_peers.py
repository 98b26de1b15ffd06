"""Estimate of memory beside others: what each tool answers, over what a rank really holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atorch_ns.job import PeakMemory
from atorch_ns.testing.workers import WorkerFailure
from benchmarks._estimators import ESTIMATORS, OURS
from benchmarks._estimators._estimator import SETUPS, Estimator, Question, Setup
from benchmarks._memory_cases import SizedCase
from benchmarks._peer_cases import peer_cases
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings
from benchmarks.estimate_memory import MEDIAN_LIMIT, WORST_LIMIT, describe, held

__all__ = ["run"]

_MIB = 2**20
_QUICK_SETUPS = SETUPS[2::3]
_TEXT = """
"How much memory will a training step need?", asked of four tools before anything of the model has run, each answer over
what was measured: 1 is right, 0.5 says half of what is needed. Measured as under `estimate_memory`, by following
torch's allocator through whole steps of `auto_accelerate`, on the rank that holds most; *states* are the parameters,
gradients and optimizer states in it.

{claims}

- *of the peak*: the answer over the measured peak. *of the states*: over the measured states, for tools that claim no
  more ({states}): where that is 1 they are right by their own claim, and the peak is not theirs to know.
- *CPU s*: processor time of one answer, with imports and the plain model there already.
- *median*, *worst*, *rows*: of how far the ratios to the peak are from 1, over the rows that the tool answers.

No answer, since:

{reasons}
"""


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Asks every tool about every setup of every model, and measures.

    Args:
        quick: one tiny model and a few setups.
        report: told what is being done.
    """
    cases = peer_cases(quick=quick)[: 1 if quick else None]
    setups = _QUICK_SETUPS if quick else SETUPS
    missing = {estimator.name: _prepared(estimator) for estimator in ESTIMATORS}
    rows = []
    for sized in cases:
        report(f"estimate_peers: {len(setups)} setups of {sized.name}")
        for setup, truth in zip(setups, _truths(sized, setups), strict=True):
            question = Question(sized=sized, setup=setup)
            answers = {
                estimator.name: _asked(estimator, question, missing[estimator.name])
                for estimator in ESTIMATORS
            }
            rows.append(_row(question, truth, answers))
    return Findings(
        name="estimate_peers",
        title="Predicted memory beside others",
        text=_TEXT.format(
            claims="\n".join(f"- *{estimator.name}*: {estimator.claims}." for estimator in ESTIMATORS),
            states=" and ".join(estimator.name for estimator in ESTIMATORS if estimator.states_only),
            reasons=_reasons(rows),
        ),
        columns=_columns(),
        rows=[*_summary(rows), *rows],
        settings={
            "models": {sized.name: describe(sized) for sized in cases},
            "bars of ours": f"median {MEDIAN_LIMIT:.0%}, worst {WORST_LIMIT:.0%}",
        },
    )


def _truths(sized: SizedCase, setups: Sequence[Setup]) -> list[PeakMemory]:
    """What the rank that holds most holds."""
    found: dict[str, PeakMemory] = {}
    for num_ranks in sorted({setup.num_ranks for setup in setups}):
        some = [setup for setup in setups if setup.num_ranks == num_ranks]
        ranks = on_ranks(held, num_ranks, sized, [setup.strategy for setup in some], timeout_s=1800.0)
        for place, setup in enumerate(some):
            found[setup.name] = max((rank[place] for rank in ranks), key=lambda one: one.peak_bytes)
    return [found[setup.name] for setup in setups]


def _prepared(estimator: Estimator) -> str:
    """Lets this process import what every answer would, by a toy question; the reason for which it cannot."""
    toy = Question(sized=peer_cases(quick=True)[0], setup=SETUPS[0])
    reason = estimator.prepare()
    if not reason and not estimator.lacks(toy.setup):
        estimator.start(toy)()
    return reason


def _asked(estimator: Estimator, question: Question, missing: str) -> Mapping[str, Any]:
    """An answer in bytes and the seconds it took, or the reason for which there is none."""
    reason = missing or estimator.lacks(question.setup)
    if reason:
        return {"reason": reason}
    try:
        ((num_bytes, cpu_s),) = on_ranks(_answered, 1, estimator, question)
    except WorkerFailure as failure:
        (outcome,) = failure.outcomes
        first = (outcome.message or outcome.status).strip().splitlines()[0]
        return {"reason": f"{outcome.error_type or outcome.status}: {first}".replace("|", "/")}
    return {"predicted_bytes": num_bytes, "cpu_s": cpu_s}


def _answered(estimator: Estimator, question: Question) -> tuple[int, float]:
    """In a process of its own."""
    answer = estimator.start(question)
    begin = time.process_time()
    return answer(), time.process_time() - begin


def _row(question: Question, truth: PeakMemory, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    states = truth.states.total - truth.states.buffers
    row: dict[str, Any] = {
        "model": question.sized.name,
        "setup": question.setup.name,
        "measured_bytes": truth.peak_bytes,
        "measured_state_bytes": states,
        "peak_mib": truth.peak_bytes / _MIB,
        "states_mib": states / _MIB,
        "answers": answers,
    }
    for name, answer in answers.items():
        if "reason" in answer:
            row[f"{name}: peak"] = "-"
            continue
        row[f"{name}: peak"] = answer["predicted_bytes"] / truth.peak_bytes
        row[f"{name}: states"] = answer["predicted_bytes"] / states
        row[f"{name}: cpu_s"] = answer["cpu_s"]
    return row


def _columns() -> tuple[Column, ...]:
    columns = [
        Column(title="model", key="model"),
        Column(title="trained with", key="setup"),
        Column(title="peak MiB", key="peak_mib", digits=1),
        Column(title="states MiB", key="states_mib", digits=1),
    ]
    for one in ESTIMATORS:
        columns.append(Column(title=f"{one.name}, of the peak", key=f"{one.name}: peak", digits=3))
        if one.states_only:
            columns.append(Column(title="of the states", key=f"{one.name}: states", digits=3))
    columns += [Column(title=f"{one.name}, CPU s", key=f"{one.name}: cpu_s", digits=4) for one in ESTIMATORS]
    return tuple(columns)


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    median: dict[str, Any] = {"model": "median", "setup": "how far from 1"}
    worst: dict[str, Any] = {"model": "worst", "setup": "how far from 1"}
    answered: dict[str, Any] = {"model": "rows", "setup": f"answered, of {len(rows)}"}
    for estimator in ESTIMATORS:
        name = estimator.name
        found = [row for row in rows if isinstance(row[f"{name}: peak"], float)]
        answered[f"{name}: peak"] = len(found)
        if not found:
            continue
        for key in (f"{name}: peak", *([f"{name}: states"] if estimator.states_only else [])):
            errors = [abs(row[key] - 1) for row in found]
            median[key], worst[key] = statistics.median(errors), max(errors)
        seconds = [row[f"{name}: cpu_s"] for row in found]
        median[f"{name}: cpu_s"], worst[f"{name}: cpu_s"] = statistics.median(seconds), max(seconds)
    return [median, worst, answered]


def _reasons(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each tool and reason, with the setups it stands for."""
    setups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, answer in row["answers"].items():
            if "reason" in answer:
                of_reason = setups.setdefault((name, answer["reason"]), [])
                if row["setup"] not in of_reason:
                    of_reason.append(row["setup"])
    lines = [f"- *{name}* ({'; '.join(which)}): {reason}" for (name, reason), which in setups.items()]
    return "\n".join(lines) or f"- every tool answered everything, {OURS.name} and others."
