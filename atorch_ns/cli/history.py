"""``atorch-ns history``: the trials of earlier searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch_ns.cli._options import AsJson
from atorch_ns.cli._planning import say
from atorch_ns.cli._words import counted
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from atorch_ns.search import StudyRecord, TrialRecord

__all__ = ["history"]


def history(
    file: Annotated[Path, typer.Argument(help="The file that --history or search_history named.")],
    study: Annotated[
        str | None, typer.Option(help="A study, by its name or how that begins: its trials too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the searches that a history holds, and the trials of one of them. The file is Optuna's journal.

    Example: atorch-ns history history.journal
    """
    from atorch_ns.search import read_history

    studies = read_history(file)
    if not studies and not file.stat().st_size:
        raise InputError(
            f"the history {file} is empty. Give the file that search_history or --history named, once a search has begun."
        )
    chosen = studies if study is None else tuple(each for each in studies if each.name.startswith(study))
    if study is not None and not chosen:
        raise InputError(
            f"--study={study!r} begins no name. There are {', '.join(each.name for each in studies) or 'none'}."
        )
    if as_json:
        document = {"schema": 1, "studies": [_as_json(each) for each in chosen]}
        typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
        return
    for each in chosen:
        typer.echo("\n".join(_lines(each, with_trials=study is not None or len(chosen) == 1)))
    if not chosen:
        typer.echo("no search has been noted yet")
    say(f"pictures of it: pip install optuna-dashboard, then optuna-dashboard {file}")


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
        "trials": [vars(trial) for trial in study.trials],
    }


def _lines(study: StudyRecord, *, with_trials: bool) -> list[str]:
    setting = study.setting
    where = (
        f"{setting.model} on {setting.world_size} × {setting.device}, global batch {setting.global_batch}"
        if setting
        else "setting unknown"
    )
    ended = f"{counted(study.num_searches, 'search', 'searches')} ended"
    lines = [f"{study.name}  {where}; {ended}, {counted(len(study.trials), 'trial')}"]
    if study.best is not None:
        lines.append(
            f"  best: {study.best['label']}, {float(study.best['seconds']) * 1e3:.2f} ms a step (measured)"
        )
    elif study.fastest is not None:
        lines.append(f"  fastest so far: {study.fastest.label}; no search has come to its end")
    return lines + (["", *_table(study.trials)] if with_trials and study.trials else [])


def _table(trials: tuple[TrialRecord, ...]) -> list[str]:
    from atorch_ns.report._units import bytes_text

    head = ("trial", "search", "state", "step (measured)", "n", "peak", "strategy")
    rows = [
        (
            str(trial.number),
            str(trial.run + 1),
            trial.state,
            "" if trial.seconds is None else f"{trial.seconds * 1e3:.2f} ms",
            str(trial.num_steps),
            "" if trial.peak_bytes is None else bytes_text(trial.peak_bytes),
            trial.label + (f": {trial.reason}" if trial.reason else ""),
        )
        for trial in trials
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    return [
        "  "
        + "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row[:-1], widths, strict=True)), row[-1]])
        for row in (head, *rows)
    ]
