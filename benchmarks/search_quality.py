"""Search quality: what a search chooses, and after how many trials, where the truth about all candidates is known."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atorch_ns.cluster import Cluster, Hardware
from atorch_ns.estimate import Workload
from atorch_ns.method import load_registry
from atorch_ns.search import Candidate, SearchSettings, explore
from atorch_ns.testing import Case
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings
from benchmarks._search_worlds import Replay, Truth, made_up, recorded, replay
from benchmarks._time_cases import GLOBAL_BATCH, make_cases
from benchmarks.estimate_time import _calibration, _step_seconds, profile_case

__all__ = ["KEPT", "measure", "run"]

KEPT = Path(__file__).parent.parent / "build" / "benchmarks" / "spaces"
"""What a run that was stopped has measured: the next one goes on from there."""

_NUM_CANDIDATES = 36
_TEXT = """
*Measured* spaces: {candidates} strategies (the plain one and others drawn from the whole space, compilation left out),
each run twice for {steps} steps on real processes; the second pass goes through them in reverse, so that the two show
how the machine drifts. *Made-up* spaces: {made_up} strategies whose predictions are wrong by random factors for each
method and each candidate.

Then {seeds} searches are replayed in each, whose trials draw their steps from what was measured. *right*: searches
whose choice is slower than the best of all by at most 3 %, or by the noise (the middle difference of two runs of one
strategy). *share*: the most trials of a search, of all candidates. *rho*: rank correlation of predicted and true times.
"""
_COLUMNS = (
    Column(title="space", key="space"),
    Column(title="candidates", key="num_candidates"),
    Column(title="rho", key="rank_correlation", digits=2),
    Column(title="noise", key="noise", digits=3),
    Column(title="trials, median", key="trials", digits=1),
    Column(title="share", key="share", digits=2),
    Column(title="regret, median", key="regret", digits=3),
    Column(title="regret, worst", key="worst", digits=3),
    Column(title="right", key="right", digits=2),
    Column(title="right with random trials", key="right_random", digits=2),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures the truth of a few spaces and replays searches in them.

    Args:
        quick: one tiny model, few candidates, few replays.
        report: told what is being done.
    """
    number, steps, seeds = (8, 3, 5) if quick else (_NUM_CANDIDATES, 8, 40)
    rows = []
    for label, errors in _made_up_kinds().items():
        truths = [made_up(seed=seed, **errors) for seed in range(seeds)]
        rows.append(_row(f"made up, {label}", truths, list(range(seeds))))
        report(f"search_quality: {rows[-1]['space']}: right in {rows[-1]['right']:.0%}")
    for num_ranks in (2,) if quick else (2, 4):
        for name, case in list(make_cases(quick=quick).items())[: 1 if quick else None]:
            file = KEPT / f"{name}_{num_ranks}.json"
            if quick or not file.exists():
                truth = measure(case, num_ranks, number, steps, report=report)
            else:
                truth = recorded(file.read_text(encoding="utf-8"))
            if not quick:
                KEPT.mkdir(parents=True, exist_ok=True)
                file.write_text(truth.as_json(), encoding="utf-8")
            row = _row(f"{name}, {num_ranks} processes", [truth] * seeds, list(range(seeds)))
            rows.append({**row, "recorded": truth.as_json()})
            report(f"search_quality: {rows[-1]['space']}: right in {rows[-1]['right']:.0%}")
    if not quick:
        shutil.rmtree(KEPT)
    return Findings(
        name="search_quality",
        title="What a search chooses, and after how many trials",
        text=_TEXT.format(candidates=number, steps=steps, made_up=rows[0]["num_candidates"], seeds=seeds),
        columns=_COLUMNS,
        rows=rows,
        settings={"global batch": GLOBAL_BATCH},
    )


def _made_up_kinds() -> dict[str, dict[str, float]]:
    usual = {"own_error": 0.05, "jitter": 0.05, "drift": 0.02}
    return {
        "good estimate (methods ±8%)": {"method_error": 0.08, **usual},
        "fair estimate (methods ±15%)": {"method_error": 0.15, **usual},
        "poor estimate (methods ±30%)": {"method_error": 0.30, **usual},
        "noisy machine (±10% a step, ±5% a run)": {
            "method_error": 0.15, "own_error": 0.05, "jitter": 0.10, "drift": 0.05,
        },
    }  # fmt: skip


def _row(space: str, truths: Sequence[Truth], seeds: Sequence[int]) -> dict[str, Any]:
    guided = [replay(truth, seed=seed) for truth, seed in zip(truths, seeds, strict=True)]
    random = [replay(truth, seed=seed, sampler="random") for truth, seed in zip(truths, seeds, strict=True)]
    count = len(truths[0].candidates)
    return {
        "space": space,
        "num_candidates": count,
        "rank_correlation": statistics.median(truth.rank_correlation for truth in truths),
        "noise": statistics.median(truth.noise for truth in truths),
        "trials": float(statistics.median(one.num_trials for one in guided)),
        "share": max(one.num_trials for one in guided) / count,
        "regret": statistics.median(one.regret for one in guided),
        "worst": max(one.regret for one in guided),
        "right": _share_right(guided),
        "right_random": _share_right(random),
    }


def _share_right(found: Sequence[Replay]) -> float:
    return sum(one.right for one in found) / len(found)


def measure(
    case: Case, num_ranks: int, num_candidates: int, num_steps: int, *, report: Callable[[str], object]
) -> Truth:
    """Runs candidates of a model exhaustively, twice.

    Args:
        case: the model.
        num_ranks: processes.
        num_candidates: how many of the space.
        num_steps: timed steps of each run.
        report: told what is being done.
    """
    hardware: Hardware = on_ranks(_calibration, num_ranks)[0]
    candidates = _some_candidates(case, num_ranks, num_candidates, hardware)
    runs: dict[str, list[list[float]]] = {one.key: [] for one in candidates}
    for order in (candidates, list(reversed(candidates))):
        for one in order:
            runs[one.key].append(on_ranks(_step_seconds, num_ranks, case, list(one.steps), num_steps)[0])
            report(
                f"search_quality: {case.name}, {num_ranks} processes: {one.label}: {_ms(runs[one.key][-1])}"
            )
    return Truth(tuple(candidates), runs)


def _some_candidates(case: Case, num_ranks: int, number: int, hardware: Hardware) -> list[Candidate]:
    """The plain strategy and others drawn from the space, in the order of their predictions."""
    cluster = Cluster(world_size=num_ranks, local_world_size=num_ranks, distributed=True, hardware=hardware)
    profile = profile_case(case)
    assert profile.trace is not None
    work = Workload(global_batch=GLOBAL_BATCH, num_tokens=profile.trace.num_tokens)
    settings = SearchSettings(max_micro_batches=2, memory_limit_gib=1e6)
    space = explore(profile, cluster, work, load_registry(), settings, excluded=["compile"])
    free = [one for one in space.candidates if one.pruned is None]
    drawn = set(np.random.default_rng(0).permutation(len(free))[: number - 1].tolist())
    return [replace(one) for index, one in enumerate(free) if index in drawn or one.is_baseline]


def _ms(steps: Sequence[float]) -> str:
    return f"{statistics.median(steps) * 1e3:.1f} ms"
