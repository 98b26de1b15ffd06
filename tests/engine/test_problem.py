"""The search problem: what makes it the same one, and modules that a method replaces priced as they will be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine.problem import SearchProblem, build_problem, with_replaced_costs
from atorch_ns.engine.request import SearchRequest
from atorch_ns.estimate import Workload, estimate
from atorch_ns.job.sampling import sample_inputs
from atorch_ns.method import Method, Phase, Registry, load_registry
from atorch_ns.profile import Profile, profile_model
from atorch_ns.search import History, StopRule, TrialOutcome, TrialTask
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan
from tests.engine.inputs import case_inputs

BATCH = torch.zeros(4, 32)


class Saving(nn.Module):
    """Saves four tensors for the backward pass, and Lean two: what each function is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(torch.sin(self.layer(x))))


class Lean(Saving):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(x))


class Leaner(Method[Any]):
    """Replaces Saving by Lean."""

    name = "leaner"
    phase = Phase.REPLACE

    def rewritten(self, model: nn.Module, profile: Profile, cluster: Cluster) -> nn.Module | None:
        for module in model.modules():
            if type(module) is Saving:
                module.__class__ = Lean
        return model

    def apply(self, job: Any, config: Any) -> None:
        raise AssertionError("only rewritten is asked")


class Breaking(Method[Any]):
    """Cannot rewrite."""

    name = "breaking"
    phase = Phase.REPLACE

    def rewritten(self, model: nn.Module, profile: Profile, cluster: Cluster) -> nn.Module | None:
        raise RuntimeError("no such thing")

    def apply(self, job: Any, config: Any) -> None:
        raise AssertionError("only rewritten is asked")


class Growing(Method[Any]):
    """Adds a block."""

    name = "growing"
    phase = Phase.REPLACE

    def rewritten(self, model: nn.Module, profile: Profile, cluster: Cluster) -> nn.Module | None:
        return nn.Sequential(*model, Saving())

    def apply(self, job: Any, config: Any) -> None:
        raise AssertionError("only rewritten is asked")


def _model() -> nn.Sequential:
    return nn.Sequential(*(Saving() for _ in range(4)))


def _traced(model: nn.Module) -> Profile:
    return profile_model(model, BATCH, lambda model, batch: model(batch).square().mean(), find_dims)


def _peak(profile: Profile, **plan: Any) -> float:
    cluster = Cluster().with_hardware()
    return estimate(Plan().changed(**plan), profile, cluster, Workload(global_batch=1024)).peak_bytes


def _with(kind: type[Method[Any]], model: nn.Module) -> Profile:
    return with_replaced_costs(_traced(model), model, Cluster(), Registry([kind]), trace_of=_traced)


def test_the_plan_with_replaced_modules_costs_what_the_replaced_model_does() -> None:
    model = _model()
    profile = _with(Leaner, model)
    lean = _traced(nn.Sequential(*(Lean() for _ in range(4))))
    assert all(type(block) is Saving for block in model)  # a copy was changed
    assert _peak(profile, replaced=True) == _peak(lean)
    assert _peak(profile) == _peak(_traced(model))
    assert _peak(profile, replaced=True) < _peak(profile)


def test_a_profile_with_replaced_costs_survives_json() -> None:
    profile = _with(Leaner, _model())
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("kind", "note"),
    [(Breaking, "could not be profiled (RuntimeError: no such thing)"), (Growing, "has other segments")],
)
def test_what_cannot_be_profiled_is_a_note(kind: type[Method[Any]], note: str) -> None:
    profile = _with(kind, _model())
    assert profile.trace is not None
    assert note in profile.trace.notes[-1]
    assert _peak(profile, replaced=True) == _peak(profile)


def test_without_such_a_method_nothing_is_traced_again() -> None:
    profile = _traced(_model())
    assert with_replaced_costs(profile, _model(), Cluster(), Registry(), trace_of=_fail) is profile


def _fail(model: nn.Module) -> Profile:
    raise AssertionError("profiled again")


def _problem(*, slower: float = 1.0, request: SearchRequest | None = None, **changes: Any) -> SearchProblem:
    """On two CPU ranks whose speed is calibrated as it may be."""
    cluster = replace(Cluster(), world_size=2, local_world_size=2).with_hardware()
    assert cluster.hardware is not None
    device = cluster.hardware.device
    slow = {dtype: flops / slower for dtype, flops in device.flops_per_s.items()}
    hardware = replace(cluster.hardware, device=replace(device, flops_per_s=slow))
    sample = sample_inputs(
        case_inputs("mlp", **changes), num_data_ranks=2, sample_batch=None, batch_size=None
    )
    measured = replace(cluster, hardware=hardware)
    return build_problem(sample, measured, load_registry(), request or SearchRequest(load_strategy=None))


def test_a_search_is_the_same_whatever_was_measured() -> None:
    first = _problem().setting.fingerprint
    assert _problem(slower=1.7).setting.fingerprint == first
    others = {
        "batch": _problem(dataloader_args={"batch_size": 16}),
        "accumulation": _problem(gradient_accumulation_steps=2),
        "optimizer": _problem(optim_func=torch.optim.SGD),
        "objective": _problem(request=SearchRequest(search={"objective": "memory"})),
        "wishes": _problem(request=SearchRequest(excluded=["fsdp"])),
    }
    for what, other in others.items():
        assert other.setting.fingerprint != first, what


def test_what_was_tried_before_is_a_candidate_again(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    request = SearchRequest(search_history=path)
    problem = _problem(request=request)
    known = {one.key for one in problem.candidates}
    steps = (("gradient_accumulation", {"num_micro_batches": 4}), ("zero1", None), ("half", "bf16"))
    task = TrialTask(id=1, key="elsewhere", steps=steps, rule=StopRule())
    outcome = TrialOutcome(status="ok", step_seconds=(1.0,) * 4)
    History(path).record(problem.setting, replace(problem.candidates[0], key="elsewhere"), task, outcome)
    again = _problem(request=request)
    (new,) = [one for one in again.candidates if one.key not in known]
    assert {name for name, _ in new.steps} >= {"gradient_accumulation", "zero1", "half"}
    assert new.estimate is not None
