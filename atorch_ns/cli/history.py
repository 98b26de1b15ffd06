"""``atorch-ns history``: the trials of earlier searches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch_ns.cli._options import AsJson
from atorch_ns.cli._planning import print_json
from atorch_ns.errors import InputError
from atorch_ns.text import bytes_text, count_noun, seconds_text

if TYPE_CHECKING:
    from atorch_ns.search import StudyRecord, TrialRecord


def history(
    file: Annotated[Path, typer.Argument(help="File named by --history or search_history.")],
    study: Annotated[
        str | None, typer.Option(help="Name of a search, or its first letters. Its trials are listed too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the searches in a history file, or the trials of one search.

    Example: atorch-ns history history.journal
    """
    from atorch_ns.search import read_history

    studies = read_history(file)
    if not studies and not file.stat().st_size:
        raise InputError(
            f"the history {file} is empty. Give the file from search_history or --history after a search has started."
        )
    matches = studies if study is None else tuple(each for each in studies if each.name.startswith(study))
    if study is not None and not matches:
        raise InputError(
            f"no study name starts with --study={study!r}. Studies: {', '.join(each.name for each in studies) or 'none'}."
        )
    if as_json:
        print_json({"schema": 1, "studies": [_as_json(each) for each in matches]})
        return
    for each in matches:
        typer.echo("\n".join(_study_lines(each, with_trials=study is not None or len(matches) == 1)))
    if not matches:
        typer.echo("no search recorded yet")


def _as_json(study: StudyRecord) -> dict[str, Any]:
    setting, fastest = study.setting, study.fastest
    return {
        "name": study.name,
        "model": setting.model if setting else None,
        "device": setting.device if setting else None,
        "world_size": setting.world_size if setting else None,
        "global_batch": setting.global_batch if setting else None,
        "num_searches": study.num_searches,
        "best": study.best,
        "fastest_trial": fastest.number if fastest else None,
        "trials": [_trial_as_json(trial) for trial in study.trials],
    }


def _trial_as_json(trial: TrialRecord) -> dict[str, Any]:
    return {
        "number": trial.number,
        "run": trial.run,
        "key": trial.key,
        "label": trial.label,
        "state": trial.outcome.status,
        "seconds": trial.seconds,
        "num_steps": len(trial.outcome.step_seconds),
        "peak_bytes": trial.peak_bytes,
        "total_seconds": trial.outcome.total_seconds,
        "parameters": trial.parameters,
        "reason": trial.outcome.reason,
    }


def _study_lines(study: StudyRecord, *, with_trials: bool) -> list[str]:
    setting, where = study.setting, "setting unknown"
    if setting:
        where = (
            f"{setting.model} on {setting.world_size} × {setting.device}, global batch {setting.global_batch}"
        )
    searches = f"{count_noun(study.num_searches, 'search', 'searches')} ended"
    lines = [f"{study.name}  {where}; {searches}, {count_noun(len(study.trials), 'trial')}"]
    if study.best is not None:
        lines.append(
            f"  best: {study.best['label']}, {seconds_text(float(study.best['seconds']))} per step (measured)"
        )
    elif study.fastest is not None:
        lines.append(f"  fastest so far: {study.fastest.label}; no search has finished")
    return lines + (["", *_trial_table(study.trials)] if with_trials and study.trials else [])


def _trial_table(trials: Sequence[TrialRecord]) -> list[str]:
    head = ("trial", "search", "state", "step (measured)", "n", "peak", "strategy")
    rows = [
        (
            str(trial.number),
            str(trial.run + 1),
            trial.outcome.status,
            "" if trial.seconds is None else seconds_text(trial.seconds),
            str(len(trial.outcome.step_seconds)),
            "" if trial.peak_bytes is None else bytes_text(trial.peak_bytes),
            trial.label + (f": {trial.outcome.reason}" if trial.outcome.reason else ""),
        )
        for trial in trials
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    return [
        "  "
        + "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row[:-1], widths, strict=True)), row[-1]])
        for row in (head, *rows)
    ]
