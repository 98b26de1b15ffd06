"""Who refused: from a method's ``apply`` to the outcome of a trial."""

from __future__ import annotations

import pytest

from atorch_ns.apply import apply_strategy
from atorch_ns.cluster import Cluster
from atorch_ns.engine.coordinator.trial import merge_reports
from atorch_ns.engine.trial.failures import explain
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.errors import InputError, RankError
from atorch_ns.job import Job
from atorch_ns.method import Chosen, Method, MethodConfig, Phase, Resolved
from atorch_ns.search import TrialOutcome, from_json, to_json
from atorch_ns.strategy import Plan, Strategy
from tests.engine.trials import case_inputs


class Picky(Method[MethodConfig]):
    """Refuses every model."""

    name = "picky"
    phase = Phase.SHARD_LAYERS

    def apply(self, job: Job, config: MethodConfig) -> None:
        raise InputError("this model will not do.")


def test_the_method_that_raises_is_named() -> None:
    resolved = Resolved((Chosen(Picky(), MethodConfig()),), Plan(), Strategy(["picky"]), ())
    with pytest.raises(InputError, match="will not do") as caught:
        apply_strategy(case_inputs("mlp"), Cluster(), resolved)
    assert caught.value.refused_by == "picky"
    failure = explain(caught.value, applying=True)
    assert (failure.status, failure.refused_by) == ("refused", "picky")


def test_what_is_no_refusal_is_nobodys() -> None:
    error = InputError("the batch is empty")
    assert explain(error, applying=True).refused_by is None
    error.refused_by = "picky"
    assert explain(error, applying=False).refused_by is None
    other = RankError("rank 0 failed")
    other.refused_by = "picky"  # it was applied while another rank refused
    assert explain(other, applying=True).refused_by is None


def test_the_rank_that_refused_says_who_it_was() -> None:
    refused = RankReport(task_id=1, rank=1, status="refused", reason="no", refused_by="picky")
    lost = RankReport(task_id=1, rank=0, status="raised", reason="Connection closed by peer")
    merged = merge_reports([lost, refused])
    assert (merged.status, merged.refused_by) == ("refused", "picky")
    assert from_json(TrialOutcome, to_json(merged)) == merged


def test_outcomes_of_earlier_versions_are_read() -> None:
    assert from_json(TrialOutcome, '{"status": "refused", "reason": "no"}').refused_by is None
