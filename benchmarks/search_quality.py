"""Search quality: what a search chooses, and after how many trials, where the truth about all candidates is known."""

from __future__ import annotations

import gc
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atorch_ns.cluster import Cluster, Hardware
from atorch_ns.estimate import Workload
from atorch_ns.method import load_registry
from atorch_ns.search import Candidate, SearchSettings, explore
from atorch_ns.testing import Case
from benchmarks._pairs import Block, Pair, combine, neighbours
from benchmarks._pairs import measure as in_turns
from benchmarks._ranks import barrier, on_ranks
from benchmarks._results import Column, Findings
from benchmarks._search_worlds import Replay, Truth, made_up, recorded, replay
from benchmarks._time_cases import GLOBAL_BATCH, make_cases
from benchmarks.estimate_time import _calibration, profile_case, ready_step

__all__ = ["KEPT", "measure", "run"]

KEPT = Path(__file__).parent.parent / "build" / "benchmarks" / "spaces"
"""What a run that was stopped has measured: the next one goes on from there."""

_PAIR: Pair = ("own", "plain")
_NUM_CANDIDATES = 36
_WARM_UP, _TOGETHER = 2, 6
"""Steps that do not count; strategies that the same processes run one after the other."""

_LEAST_RIGHT, _WORST_REGRET, _MOST_TRIALS = 0.95, 0.1, 0.2
"""The bars of a measured space: searches that are right, regret of the worst, trials of all candidates."""

_TEXT = """
*Measured* spaces: {candidates} strategies (the plain one and others drawn from the whole space, compilation left out),
each run twice for {steps} steps on real processes; the second pass goes through them in reverse. A shared machine's speed drifts by
more than strategies differ: every step has one of the plain strategy beside it in the same processes, and a run's steps are
divided by how much slower than usual those were. *drift* is that factor's middle deviation from 1.
*Made-up* spaces: {made_up} strategies whose predictions are wrong by random factors for each method and each candidate.

Then {seeds} searches are replayed in each, whose trials draw their steps from what was measured until a trial's own rule ends it. *right*: searches
whose choice is slower than the best of all by at most 3 %, or by the noise (the middle difference of two runs of one
strategy). *right, drifting*: the same where the drift is put back into the trials, not into the truth. *share*: the most trials of
a search, of all candidates. *rho*: rank correlation of predicted and true times. The bars of a measured space: {right:.0%} right, a
regret of {regret:.0%} at worst, and {share:.0%} of the trials. Where random
trials are always right, the plain strategy, which every search tries, is right itself.
"""
_COLUMNS = (
    Column(title="space", key="space"),
    Column(title="candidates", key="num_candidates"),
    Column(title="rho", key="rank_correlation", digits=2),
    Column(title="noise", key="noise", digits=3),
    Column(title="drift", key="drift", digits=3),
    Column(title="trials, median", key="trials", digits=1),
    Column(title="share", key="share", digits=2),
    Column(title="regret, median", key="regret", digits=3),
    Column(title="regret, worst", key="worst", digits=3),
    Column(title="right", key="right", digits=2),
    Column(title="right, drifting", key="right_drifting", digits=2),
    Column(title="right with random trials", key="right_random", digits=2),
    Column(title="within the bars", key="holds"),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures the truth of a few spaces and replays searches in them.

    Args:
        quick: one tiny model, few candidates, few replays.
        report: told what is being done.
    """
    number, steps, seeds = (8, 3, 5) if quick else (_NUM_CANDIDATES, 8, 40)
    rows, num_kept = [], 0
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
                truth, num_kept = recorded(file.read_text(encoding="utf-8")), num_kept + 1
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
        text=_TEXT.format(
            candidates=number,
            steps=steps,
            made_up=rows[0]["num_candidates"],
            seeds=seeds,
            right=_LEAST_RIGHT,
            regret=_WORST_REGRET,
            share=_MOST_TRIALS,
        ),
        columns=_COLUMNS,
        rows=rows,
        settings={"global batch": GLOBAL_BATCH, "spaces of earlier runs, which were stopped": num_kept},
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
    def replayed(**how: Any) -> list[Replay]:
        return [replay(truth, seed=seed, **how) for truth, seed in zip(truths, seeds, strict=True)]

    guided, random = replayed(), replayed(sampler="random")
    factors = [abs(math.log(factor)) for truth in truths for runs in truth.drift.values() for factor in runs]
    share = max(one.num_trials for one in guided) / len(truths[0].candidates)
    right, worst = _share_right(guided), max(one.regret for one in guided)
    within = right >= _LEAST_RIGHT and worst <= _WORST_REGRET and share <= _MOST_TRIALS
    return {
        "space": space,
        "num_candidates": len(truths[0].candidates),
        "rank_correlation": statistics.median(truth.rank_correlation for truth in truths),
        "noise": statistics.median(truth.noise for truth in truths),
        "drift": statistics.median(factors) if factors else None,
        "trials": float(statistics.median(one.num_trials for one in guided)),
        "share": share,
        "regret": statistics.median(one.regret for one in guided),
        "worst": worst,
        "right": right,
        "right_drifting": _share_right(replayed(drifting=True)) if factors else None,
        "right_random": _share_right(random),
        "holds": within if factors else None,
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
    plain = next(list(one.steps) for one in candidates if one.is_baseline)
    pairs: dict[str, list[list[tuple[float, float]]]] = {one.key: [] for one in candidates}
    for order in (candidates, list(reversed(candidates))):
        for start in range(0, len(order), _TOGETHER):
            part = order[start : start + _TOGETHER]
            strategies = [list(one.steps) for one in part]
            ranks = on_ranks(_beside_plain, num_ranks, case, plain, strategies, num_steps)
            for one, blocks in zip(part, map(combine, zip(*ranks, strict=True)), strict=True):
                run = [(own.wall_s, other.wall_s) for own, other in neighbours(blocks, _PAIR)]
                pairs[one.key].append(run)
                shown = [f"{statistics.median(side) * 1e3:.1f}" for side in zip(*run, strict=True)]
                report(
                    f"search_quality: {case.name}, {num_ranks} processes: {one.label}: {shown[0]} ms, "
                    f"the plain one beside it {shown[1]}"
                )
    return _without_drift(candidates, pairs)


def _without_drift(
    candidates: Sequence[Candidate], pairs: Mapping[str, Sequence[Sequence[tuple[float, float]]]]
) -> Truth:
    """Runs at the machine's usual speed: that of the plain strategy's middle run."""
    beside = {
        key: [statistics.median(plain for _, plain in run) for run in runs] for key, runs in pairs.items()
    }
    usual = statistics.median(seconds for runs in beside.values() for seconds in runs)
    drift = {key: [seconds / usual for seconds in runs] for key, runs in beside.items()}
    steady = {
        key: [[own / factor for own, _ in run] for run, factor in zip(runs, drift[key], strict=True)]
        for key, runs in pairs.items()
    }
    return Truth(tuple(candidates), steady, drift)


def _beside_plain(
    case: Case, plain: Sequence[Any], strategies: Sequence[Sequence[Any]], num_steps: int
) -> list[list[Block]]:
    """On one rank: the steps of each strategy, in turns with those of the plain one."""
    known = ready_step(case, plain)
    found = []
    for strategy in strategies:
        sides = dict(zip(_PAIR, (ready_step(case, strategy), known), strict=True))
        blocks = in_turns(sides, [_PAIR], rounds=num_steps + _WARM_UP, calls=1, barrier=barrier)
        found.append(blocks[len(_PAIR) * _WARM_UP :])
        del sides
        gc.collect()
    return found


def _some_candidates(case: Case, num_ranks: int, number: int, hardware: Hardware) -> list[Candidate]:
    """The plain strategy and others drawn from the space, in the order of their predictions."""
    cluster = Cluster(world_size=num_ranks, local_world_size=num_ranks, distributed=True, hardware=hardware)
    profile = profile_case(case)
    assert profile.trace is not None
    work = Workload(global_batch=GLOBAL_BATCH, num_tokens=profile.trace.num_tokens)
    settings = SearchSettings(max_micro_batches=2, memory_limit_gib=1e6)
    space = explore(profile, cluster, work, load_registry(), settings=settings, excluded=["compile"])
    free = [one for one in space.candidates if one.pruned is None]
    drawn = set(np.random.default_rng(0).permutation(len(free))[: number - 1].tolist())
    return [replace(one) for index, one in enumerate(free) if index in drawn or one.is_baseline]
