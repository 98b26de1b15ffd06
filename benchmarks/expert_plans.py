"""Plans on the clusters of experts: what is chosen for eight of their setups, beside what they ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.errors import AtorchError
from atorch_ns.estimate import Estimate
from atorch_ns.planning import estimate, plan, profile
from atorch_ns.search import Candidate
from atorch_ns.search.ranking import unsure_gain
from atorch_ns.strategy import Step, Strategy
from atorch_ns.text import bytes_text, interval_text, seconds_text
from benchmarks._published.runs import Run, read
from benchmarks._results import Column, Findings

__all__ = ["COLUMNS", "TEXT", "run"]

TEXT = """
Eight setups whose plans experts published, or would not dispute: what `atorch_ns.planning.plan` chooses for the same model,
cluster and batch, with the predictions of both and their intervals. Nothing was run. *published* is what the experts
measured with their plan. *gain*: the experts' predicted step over the chosen one's. *believed*: whether that is more than
predicted gains are unsure by, and the chosen plan fits for sure. *why*: the planner's reason. What the experts chose
beside the plan is given: fp8, and how many micro-batches there may be.
"""
COLUMNS = (
    Column(title="setup", key="setup"),
    Column(title="cluster", key="cluster"),
    Column(title="batch", key="batch"),
    Column(title="experts' plan", key="experts"),
    Column(title="published", key="published"),
    Column(title="predicted", key="experts_step"),
    Column(title="memory", key="experts_peak"),
    Column(title="chosen plan", key="chosen"),
    Column(title="predicted", key="chosen_step"),
    Column(title="memory", key="chosen_peak"),
    Column(title="gain", key="gain", digits=2),
    Column(title="believed", key="believed"),
    Column(title="why", key="why"),
)
_RUNS: Final = (
    "titan-8b-8-compile",
    "mpt-70b-s2048-64xh100",
    "mpt-30b-s2048-8xa100_80",
    "titan-405b-4d-cp2",
    "korthikanti-22b-seqsel",
    "sc21-145.6b",
    "nemo2407-gpt3-175b-128",
)


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """A job and the experts' plan for it.

    Attributes:
        name: of the published run, or what it is.
        build, sample: the model and a sample, on meta.
        strategy: the experts'.
        published_s: what they measured; ``None`` if nobody did.
        micro_batches: the most there may be.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[], Mapping[str, torch.Tensor]]
    cluster: str
    batch: int
    strategy: list[Any]
    published_s: float | None = None
    micro_batches: int = 8

    @classmethod
    def of(cls, each: Run) -> _Setup:
        """A published run."""
        return cls(
            name=f"{each['id']}: {each.model}",
            build=each.build,
            sample=each.sample,
            cluster=each.cluster,
            batch=each.number("global_batch"),
            strategy=each.strategy,
            published_s=each.step_seconds,
            micro_batches=max(8, each.number("micro_batches")),
        )


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Plans for every setup.

    Args:
        quick: the encoder alone.
        report: told what is being done.
    """
    known = {each["id"]: each for each in read()}
    setups = [_encoder(), *(_Setup.of(known[name]) for name in _RUNS)]
    rows = []
    for setup in setups[: 1 if quick else None]:
        report(f"expert_plans: {setup.name}")
        rows.append(_row(setup))
    return Findings(
        name="expert_plans",
        title="Plans on the clusters of experts",
        text=TEXT,
        columns=COLUMNS,
        rows=rows,
        settings={"setups": len(rows)},
    )


def _encoder() -> _Setup:
    """BERT of 6 blocks, 23 million parameters; anybody would replicate it."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1536
        )
        with torch.device("meta"):
            return BertForMaskedLM(config)

    def sample() -> dict[str, torch.Tensor]:
        tokens = torch.zeros(1, 128, dtype=torch.long, device="meta")
        return {"input_ids": tokens, "labels": tokens}

    return _Setup(
        name="BERT, 6 blocks, width 384, 128 tokens",
        build=build,
        sample=sample,
        cluster="8xH100-80GB",
        batch=128,
        strategy=["ddp", ("amp_native", "bf16"), "compile"],
    )


def _row(setup: _Setup) -> Mapping[str, Any]:
    known, steps = profile(setup.build(), setup.sample()), Strategy.load(setup.strategy).steps
    outcome = plan(
        known,
        setup.cluster,
        batch=setup.batch,
        search={"max_micro_batches": setup.micro_batches},
        included=["fp8"] if any(step.name == "fp8" for step in steps) else None,
    ).search
    winner = None if outcome is None else outcome.winner
    row: dict[str, Any] = {
        "setup": setup.name,
        "cluster": setup.cluster,
        "batch": setup.batch,
        "experts": str(Strategy.load(setup.strategy)),
        "published": seconds_text(setup.published_s) if setup.published_s else None,
    }
    try:
        theirs = estimate(known, setup.strategy, setup.cluster, batch=setup.batch)
    except AtorchError as error:
        return {**row, "why": " ".join(str(error).split())}
    row |= _figures("experts", theirs)
    if outcome is None or winner is None or winner.candidate.estimate is None:
        return {**row, "chosen": "nothing fits", "why": outcome.nearest_miss if outcome else None}
    ours = winner.candidate.estimate
    gain = theirs.step_seconds / ours.step_seconds
    return {
        **row,
        "chosen": winner.candidate.label,
        **_figures("chosen", ours),
        "gain": gain,
        "believed": _believed(theirs, steps, winner.candidate, outcome.setting.memory_limit_bytes),
        "why": winner.reason,
    }


def _believed(theirs: Estimate, steps: Sequence[Step], chosen: Candidate, limit_bytes: int) -> str:
    """Whether the difference from the experts' plan is believed, in words."""
    ours = chosen.estimate
    assert ours is not None
    gain = theirs.step_seconds / ours.step_seconds
    least = unsure_gain([(step.name, step.config) for step in steps], chosen.steps, ours.intervals)
    if gain < 1 / least:
        unsure = theirs.peak_bytes_interval[1] > limit_bytes
        return "theirs is faster, and may not fit" if unsure else "theirs is faster, and was not searched"
    if gain <= least:
        return f"no: up to {least:.2f} it may be none"
    return "yes" if ours.peak_bytes_interval[1] <= limit_bytes else "yes, but it may not fit"


def _figures(whose: str, found: Estimate) -> dict[str, str]:
    return {
        f"{whose}_step": interval_text(found.step_seconds, found.step_seconds_interval, seconds_text),
        f"{whose}_peak": interval_text(found.peak_bytes, found.peak_bytes_interval, bytes_text),
    }
