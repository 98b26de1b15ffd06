"""Synthetic searches: five candidates whose figures are easy to check by hand."""

from __future__ import annotations

from typing import Any

from atorch_ns.estimate import Estimate, MemoryParts, TimeParts
from atorch_ns.search import Candidate, Fate, Row, SearchOutcome, SearchSetting, SearchSettings, TrialOutcome
from atorch_ns.search.space.candidate import Pruned

MIB = 2**20


def estimated(milliseconds: float, mebibytes: float, *, recompute_ms: float = 0.0) -> Estimate:
    """All parts are used: 8 of compute to 1 of reduce and 1 of overhead; half the memory is activations."""
    ms, mib = milliseconds / 1e3, mebibytes * MIB
    left = ms - recompute_ms / 1e3
    return Estimate(
        memory=MemoryParts(0.1 * mib, 0.1 * mib, 0.2 * mib, 0.5 * mib, 0.1 * mib, 0.0),
        time=TimeParts(0.8 * left, recompute_ms / 1e3, 0.0, 0.1 * left, 0.0, 0.0, 0.0, 0.1 * left),
        peak_at="backward of layers.0",
    )


def measured(milliseconds: float, mebibytes: float, *, num_steps: int = 5) -> TrialOutcome:
    """Steps of -1, 0 and +1 % around the median; rank 1 holds 1 MiB less than rank 0."""
    steps = tuple(milliseconds / 1e3 * (1 + 0.01 * (index % 3 - 1)) for index in range(num_steps))
    return TrialOutcome(
        status="ok",
        step_seconds=steps,
        peak_bytes=(int(mebibytes * MIB), int((mebibytes - 1) * MIB)),
        loss=1.25,
        setup_seconds=0.5,
        total_seconds=1.5,
    )


def row(key: str, steps: tuple[tuple[str, Any], ...], fate: Fate, reason: str, **values: Any) -> Row:
    label = " → ".join(name if not config else f"{name} {config}" for name, config in steps)
    of_candidate = {
        name: values.pop(name) for name in ("estimate", "is_baseline", "pruned") if name in values
    }
    candidate = Candidate(key=key, steps=steps, label=label, **of_candidate)
    return Row(candidate=candidate, fate=fate, reason=reason, **values)


DDP: tuple[str, Any] = ("ddp", None)
FSDP: tuple[str, Any] = ("fsdp", None)
AMP: tuple[str, Any] = ("amp_native", {"dtype": "bf16"})
CHECKPOINT: tuple[str, Any] = ("checkpoint", None)

SETTING = SearchSetting(
    model="TinyLlama",
    num_parameters=5_000_000,
    world_size=2,
    num_nodes=1,
    device="cpu",
    memory_limit_bytes=1000 * MIB,
    global_batch=16,
    num_tokens=128,
    fingerprint="abc123",
    profile_seconds=0.8,
    estimate_seconds=0.02,
    notes=("the loss is the output's own",),
)


def searched() -> SearchOutcome:
    """The winner is two changes away from the baseline, by way of a third candidate."""
    rows = (
        row(
            "win",
            (FSDP, AMP),
            "won",
            "the shortest measured step",
            estimate=estimated(20, 400),
            trial=measured(25, 410),
            trial_number=3,
            corrected_seconds=0.025,
            corrected_bytes=410.0 * MIB,
        ),
        row(
            "amp",
            (DDP, AMP),
            "lost",
            "20% slower (measured 30.0 ms against 25.0 ms)",
            estimate=estimated(25, 700),
            trial=measured(30, 720),
            trial_number=2,
        ),
        row(
            "base",
            (DDP,),
            "lost",
            "60% slower (measured 40.0 ms against 25.0 ms)",
            estimate=estimated(30, 800),
            trial=measured(40, 800),
            trial_number=1,
            is_baseline=True,
        ),
        row(
            "slow",
            (FSDP, AMP, CHECKPOINT),
            "untried",
            "predicted 1.4x slower",
            estimate=estimated(28, 300, recompute_ms=4),
            corrected_seconds=0.035,
            corrected_bytes=310.0 * MIB,
        ),
        row(
            "boom",
            (("half", "bf16"), DDP),
            "failed",
            "raised on rank 1: ValueError: no <bf16> & friends",
            estimate=estimated(22, 500),
            trial=TrialOutcome(
                status="raised", reason="ValueError: no <bf16> & friends", rank=1, log="/logs/4.txt"
            ),
            trial_number=4,
        ),
        row(
            "huge",
            (("zero1", None),),
            "pruned",
            "needs 1.17 GiB of 1000 MiB (activations 600 MiB)",
            estimate=estimated(31, 1200),
            pruned=Pruned(kind="memory", reason="needs 1.17 GiB of 1000 MiB (activations 600 MiB)"),
        ),
    )
    return SearchOutcome(
        setting=SETTING,
        settings=SearchSettings(),
        rows=rows,
        best="win",
        stop_reason="no untried candidate is likely to win by more than the noise",
        num_trials=4,
        seconds=12.5,
        noise=0.004,
        lower_bound_seconds=0.024,
        gap=0.04,
        pareto=("win", "slow"),
        checks=("re-priced plan equals the objective: passed",),
    )


def nothing_fits() -> SearchOutcome:
    """No candidate could be run."""
    rows = (
        row(
            "huge",
            (DDP,),
            "pruned",
            "needs 4.10 GiB of 1000 MiB",
            estimate=estimated(31, 4198.4),
            pruned=Pruned(kind="memory", reason="needs 4.10 GiB of 1000 MiB"),
            is_baseline=True,
        ),
    )
    return SearchOutcome(
        setting=SETTING,
        settings=SearchSettings(),
        rows=rows,
        best=None,
        stop_reason="nothing fits",
        num_trials=0,
        seconds=0.9,
        nearest_miss="needs 3.1 GiB more on rank 1; try checkpoint",
    )
