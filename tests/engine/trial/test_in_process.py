"""Trials in the user's own process leave it as it was."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.in_process import InProcessWorker, structure_with_values
from atorch_ns.engine.trial.pickling import describe_unpicklable
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.search import StopRule
from atorch_ns.testing.conformance import nothing_changes
from atorch_ns.testing.models import get_case
from atorch_ns.testing.workers import run_ranks
from atorch_ns.torch_compat import process_groups
from tests.engine.faults import fault, inject
from tests.engine.inputs import case_inputs
from tests.engine.trials import DONE, task

TASKS = [
    task(1, "ddp"),
    task(2, "fsdp", "checkpoint"),
    task(3, "ddp", "zero1"),
    task(4, ("fsdp", {"nosuch": 1})),
    task(5, ("parallel_mode", [("zero", 2)]), "zero2"),
]


class Locked(nn.Module):
    """Cannot be pickled, nor deep-copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = get_case("mlp").build()
        self.lock = threading.Lock()
        self.head = self.inner.head  # under two names
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.lock, torch.no_grad():
            self.offset += 1e-3
        return self.inner(features) + self.offset


def never() -> bool:
    return False


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_the_structure_with_values_what_cannot_be_copied() -> None:
    model = Locked()
    duplicate = structure_with_values(model)
    assert duplicate.head is duplicate.inner.head
    assert duplicate.inner is not model.inner
    assert duplicate.lock is model.lock
    assert duplicate.offset is not model.offset
    assert all(parameter.is_meta for parameter in duplicate.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert [name for name, _ in duplicate.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]


def test_one_process() -> None:
    inputs = case_inputs("mlp", model=Locked())
    assert "model cannot be pickled" in str(describe_unpicklable(inputs))
    before = _state(inputs.model)
    worker = InProcessWorker(inputs, Cluster())
    with nothing_changes():
        report = worker.run(task(1), never)
        refused = worker.run(task(2, ("checkpoint", {"nosuch": 1})), never)
    worker.close()
    assert report.status == "ok", report.reason
    assert report.peak_bytes is not None
    assert refused.status == "refused"
    assert _unchanged(inputs.model, before)
    assert all(parameter.grad is None for parameter in inputs.model.parameters())


@pytest.mark.parametrize(
    ("kind", "status"), [("raise", "raised"), ("oom", "out of memory"), ("nonfinite", "non-finite")]
)
def test_failures_are_reports(kind: Any, status: str) -> None:
    inputs = inject(case_inputs("mlp"), fault(kind, at="loss:2"))
    assert InProcessWorker(inputs, Cluster()).run(task(1), never).status == status


def test_a_process_in_a_group_is_not_a_single_one() -> None:
    report = InProcessWorker(case_inputs(), Cluster()).run(replace(task(1), kind="single"), lambda: False)
    assert report.status == "refused"
    assert "process group" in report.reason


def test_it_ends_between_blocks() -> None:
    endless = StopRule(min_steps=10**6, max_steps=10**6, max_seconds=1e6)
    worker = InProcessWorker(case_inputs("mlp"), Cluster())
    asked = iter(range(10**6))
    assert worker.run(task(1, rule=endless), lambda: next(asked) > 3).status == "cancelled"
    assert worker.run(task(2, rule=endless, deadline_s=1.0), never).status == "hung"


def _on_ranks() -> tuple[list[RankReport], bool, int]:
    inputs = case_inputs("tied_llama")
    before, groups = _state(inputs.model), len(process_groups())
    worker = InProcessWorker(inputs, Cluster.detect())
    with nothing_changes():
        reports = [worker.run(item, never) for item in TASKS]
    unpicklable = replace(inputs, model=Locked())
    assert describe_unpicklable(unpicklable) is not None
    return reports, _unchanged(inputs.model, before), len(process_groups()) - groups


@pytest.mark.slow
def test_two_ranks() -> None:
    for reports, unchanged, num_groups in run_ranks(_on_ranks, 2):
        assert [report.status in DONE for report in reports] == [True, True, True, False, True], reports
        assert reports[3].status == "refused"
        assert unchanged
        assert num_groups == 0
