"""Planning without the cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.errors import InputError, StrategyError
from atorch_ns.estimate import Workload, estimate
from atorch_ns.planning.offline import (
    AssumedLoss,
    offline_rows,
    plan_offline,
    price_strategy,
    profile_offline,
    workload_of,
)
from atorch_ns.profile import Profile
from atorch_ns.search import SearchSettings
from atorch_ns.search.conclude import pareto
from atorch_ns.search.space.candidate import Pruned
from atorch_ns.strategy import Plan, Strategy
from tests.report.outcomes import estimated, row


@pytest.fixture(scope="module")
def profile() -> Profile:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    return profile_offline(model, torch.zeros(4, 32))


def test_every_candidate_is_ranked_and_nothing_is_measured(profile: Profile) -> None:
    outcome = plan_offline(profile, cluster_from_spec("2xcpu"), global_batch=8)
    usable = [each for each in outcome.rows if each.fate != "pruned"]
    assert outcome.winner is usable[0]
    assert all(each.trial is None for each in outcome.rows)
    assert all(each.reason for each in outcome.rows)
    times = [each.candidate.estimate.step_seconds for each in usable if each.candidate.estimate]
    assert times == sorted(times)
    assert outcome.baseline is not None
    assert outcome.num_trials == 0
    assert "none was tried" not in outcome.stop_reason
    assert str(len(outcome.rows)) in outcome.stop_reason
    assert outcome.best in outcome.pareto


def test_the_same_job_has_the_same_fingerprint_and_another_batch_another(profile: Profile) -> None:
    cluster = cluster_from_spec("2xcpu")
    prints = [plan_offline(profile, cluster, global_batch=batch).setting.fingerprint for batch in (8, 8, 16)]
    assert prints[0] == prints[1] != prints[2]


def test_when_nothing_fits_there_is_no_best_but_a_nearest(profile: Profile) -> None:
    settings = SearchSettings(memory_limit_gib=1e-5)
    outcome = plan_offline(profile, cluster_from_spec("2xcpu"), global_batch=8, settings=settings)
    assert outcome.best is None
    assert outcome.winner is None
    assert "needs" in outcome.nearest_miss


def test_without_a_batch_it_is_the_sample_s_on_every_rank(profile: Profile) -> None:
    outcome = plan_offline(profile, cluster_from_spec("2xcpu"))
    assert outcome.setting.global_batch == 8
    assert any("No batch size was given" in note for note in outcome.setting.notes)


def test_a_profile_without_costs_cannot_be_planned_with(profile: Profile) -> None:
    with pytest.raises(InputError, match="has no costs"):
        workload_of(replace(profile, trace=None), Cluster(), None)


def test_one_strategy_with_what_it_communicates(profile: Profile) -> None:
    priced = price_strategy(Strategy(["fsdp"]), profile, cluster_from_spec("2xcpu"), global_batch=8)
    assert "parallel_mode" in priced.strategy
    assert {call.kind for call in priced.estimate.collectives} >= {"all_gather", "reduce_scatter"}
    assert priced.over_bytes < 0
    with pytest.raises(StrategyError):
        price_strategy(Strategy(["fsdp", "zero1"]), profile, cluster_from_spec("2xcpu"))


def test_what_was_assumed_is_noted(profile: Profile) -> None:
    assert profile.trace is not None
    assert profile.trace.notes[-1].startswith("No loss function was given; the loss used is the mean")


def test_a_device_that_torch_was_built_without_is_traced_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA, so nothing is replaced")
    profile = profile_offline(nn.Linear(4, 4), torch.zeros(2, 4), device="cuda")
    assert profile.trace is not None
    assert any("The CPU's kernels stand for those of cuda" in note for note in profile.trace.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the device's own kernels are traced")
def test_attention_with_dropout_is_that_of_the_device() -> None:
    """The CPU's kernel with dropout keeps scores of all pairs, and no GPU's does."""

    def attention(dropout: float) -> float:
        layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=dropout, batch_first=True)
        profile = profile_offline(nn.Sequential(layer, layer), torch.zeros(2, 512, 64), device="cuda")
        found = estimate(Plan(), profile, cluster_from_spec("1xH100-80GB"), Workload(global_batch=2))
        return found.memory.activations

    assert attention(0.1) < 1.5 * attention(0.0)


class _Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    ("output", "value", "words"),
    [
        (_Output(torch.tensor(2.0)), 2.0, "the output's own loss"),
        ({"loss": torch.tensor(2.0)}, 2.0, "the output's own loss"),
        ((torch.tensor(2.0), torch.ones(3)), 2.0, "first item"),
        (torch.tensor(2.0), 2.0, "the output itself"),
        (torch.full((2, 2), 3.0), 3.0, "the mean of the output."),
        ({"logits": torch.full((2,), 3.0)}, 3.0, "mean of the output"),
        ((torch.full((2,), 3.0), None), 3.0, "mean of the output"),
    ],
)
def test_the_assumed_loss(output: Any, value: float, words: str) -> None:
    loss = AssumedLoss()
    assert float(loss(None, output)) == value
    assert words in loss.assumed


def test_an_output_without_floats_needs_a_loss() -> None:
    with pytest.raises(InputError, match="Give a loss function"):
        AssumedLoss()(None, {"ids": torch.zeros(2, dtype=torch.long)})


def test_reasons_have_numbers() -> None:
    candidates = [
        row("a", (("fsdp", None),), "untried", "", estimate=estimated(20, 400)).candidate,
        row("b", (("ddp", None),), "untried", "", estimate=estimated(30, 800)).candidate,
        row(
            "c",
            (("x", None),),
            "pruned",
            "",
            estimate=estimated(9, 9),
            pruned=Pruned(kind="memory", reason="big"),
        ).candidate,
    ]
    rows = offline_rows(candidates, SearchSettings())
    assert [(each.candidate.key, each.fate) for each in rows] == [
        ("a", "won"),
        ("b", "untried"),
        ("c", "pruned"),
    ]
    assert rows[1].reason == "predicted 1.50× the chosen step, 100% more memory"
    assert rows[2].reason == "big"
    assert pareto(rows) == ("a",)
