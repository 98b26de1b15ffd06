"""Time of a search: from the call to the strategy on a small Llama, and what a trial costs beyond its steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from atorch_ns.search import Row, SearchOutcome
from benchmarks._llama import TINY, Llama, next_token_loss, random_batch
from benchmarks._ranks import barrier, on_ranks
from benchmarks._results import Column, Findings, Spread

__all__ = ["CALL_LIMIT_S", "TRIAL_LIMIT_S", "beyond_steps", "run", "warm_rows"]

CALL_LIMIT_S = 90.0
"""From the call of ``auto_accelerate`` to its return, on two cores."""
TRIAL_LIMIT_S = 1.0
"""What a warm trial takes beyond its steps; the middle one of a search's trials."""

_NUM_RANKS = 2
_BATCH_SIZE = 8
_UNTIMED_STEPS = 3
"""Steps of a trial that are not timed: two that settle it, one that is watched."""
_SMALL = Llama(vocab_size=256, width=320, hidden=864, num_layers=4, num_heads=5)
_TEXT = """
`auto_accelerate` without a strategy, for a small Llama, on {ranks} processes.

- *call*: elapsed seconds from the call to its return on the slowest rank, with everything: profile, calibration,
  trials, the winner's own set-up and checks. At most {call:.0f} s are asked.
- *trial*: elapsed seconds of each trial that succeeded, but of the first, which warms its process up, less those of its
  steps at the median step's pace: building and wrapping the model, and the report. At most {trial:.0f} s are asked of
  the middle one.

Both are elapsed times: on a machine that is busy otherwise they say as much about the others.
"""
_COLUMNS = (
    Column(title="what", key="name"),
    Column(title="n", key="n"),
    Column(title="seconds", key="seconds", digits=2),
    Column(title="within", key="holds"),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Searches as a user would.

    Args:
        quick: for a tiny model, with a few trials, once.
        report: told what is being done.
    """
    model, tokens, times = (TINY, 16, 1) if quick else (_SMALL, 128, 3)
    calls: list[float] = []
    beyond: list[float] = []
    outcomes: list[SearchOutcome] = []
    for number in range(times):
        report(f"search_time: search {number + 1} of {times}")
        ranks = on_ranks(_searched, _NUM_RANKS, model, tokens, 3 if quick else None)
        calls.append(max(seconds for seconds, _ in ranks))
        outcomes.append(ranks[0][1])
        beyond += [beyond_steps(row) for row in warm_rows(outcomes[-1])]
    rows: list[dict[str, Any]] = [_row("call", calls, CALL_LIMIT_S)]
    if beyond:
        rows.append(_row("trial", beyond, TRIAL_LIMIT_S))
    return Findings(
        name="search_time",
        title="Time of a search",
        text=_TEXT.format(ranks=_NUM_RANKS, call=CALL_LIMIT_S, trial=TRIAL_LIMIT_S),
        columns=_COLUMNS,
        rows=rows,
        settings={
            "model": model.describe(),
            "batch": f"{_BATCH_SIZE} samples of {tokens} tokens over all ranks",
            "trials": ", ".join(str(outcome.num_trials) for outcome in outcomes),
            "ended since": "; ".join(sorted({outcome.stop_reason for outcome in outcomes})),
        },
    )


def warm_rows(outcome: SearchOutcome) -> list[Row]:
    """Candidates whose trial succeeded, without the one that was slowest to set up: the first of its process."""
    tried = [row for row in outcome.rows if row.trial is not None and row.trial.succeeded]
    return sorted(tried, key=_setup_seconds)[:-1]


def beyond_steps(row: Row) -> float:
    """Elapsed seconds of a trial without its steps, those that are not timed included."""
    trial = row.trial
    assert trial is not None
    steps = math.fsum(trial.step_seconds) + _UNTIMED_STEPS * trial.median_seconds
    return max(0.0, trial.total_seconds - steps)


def _setup_seconds(row: Row) -> float:
    assert row.trial is not None
    return row.trial.setup_seconds


def _row(name: str, seconds: list[float], limit: float) -> dict[str, Any]:
    spread = Spread.of(seconds)
    holds = statistics.median(seconds) <= limit
    return {"name": name, "n": len(seconds), "seconds": spread, "limit": limit, "holds": holds}


def _searched(model: Llama, num_tokens: int, max_trials: int | None) -> tuple[float, SearchOutcome]:
    """On one rank."""
    from atorch_ns import auto_accelerate

    plain = model.build()
    data = random_batch(model, 64 * _BATCH_SIZE, num_tokens, seed=1)["input_ids"]
    dataset = [{"input_ids": row} for row in data]
    barrier()
    started = time.perf_counter()
    _, result, _ = auto_accelerate(
        plain,
        torch.optim.AdamW,
        dataset,
        next_token_loss,
        model_input_format="unpack_dict",
        optim_args={"lr": 1e-3},
        dataloader_args={"batch_size": _BATCH_SIZE},
        search={"time_limit_s": CALL_LIMIT_S, **({} if max_trials is None else {"max_trials": max_trials})},
    )
    seconds = time.perf_counter() - started
    assert result is not None
    outcome = result.report.search
    assert outcome is not None
    return seconds, outcome
