"""What a trial worker gets of the user's objects: structure, values that look alike, and code."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial import pickling as pickling_module
from atorch_ns.engine.trial import run as trial_run
from atorch_ns.engine.trial.pickling import describe_unpicklable, pack, unpack
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.engine.trial.run import run_trial
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Materialiser
from atorch_ns.method import load_registry
from atorch_ns.testing.conformance import nothing_changes
from atorch_ns.testing.models import get_case
from atorch_ns.testing.workers import run_ranks
from tests.engine.inputs import case_inputs
from tests.engine.trials import task


class Scaled(nn.Module):
    """Has a parameter that no ``reset_parameters`` sets, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = get_case("mlp").build()
        self.scale = nn.Parameter(torch.full((8,), 3.0))
        self.scale.no_decay = True  # type: ignore[attr-defined]
        self.register_buffer("offset", torch.arange(8.0))
        self.plain = torch.tensor([2.0])

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.inner(features) * self.scale + self.offset * self.plain


def _scaled() -> Inputs:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return case_inputs("mlp", model=Scaled())


def _materialised(model: nn.Module) -> nn.Module:
    Materialiser(model, torch.device("cpu"), seed=1).materialise([model])
    return model


def _run(inputs: Inputs, **options: Any) -> RankReport:
    """A trial of what a worker would have, in this process."""
    received = unpack(pack(inputs)).inputs
    return run_trial(received, Cluster(), task(1), load_registry(), **options).report


def test_weights_stay_behind() -> None:
    inputs = _scaled()
    before = {name: value.clone() for name, value in inputs.model.state_dict().items()}
    with nothing_changes():
        received = unpack(pack(inputs)).inputs.model
    assert all(parameter.is_meta for parameter in received.parameters())
    assert torch.equal(received.get_buffer("offset"), torch.arange(8.0))
    assert torch.equal(received.plain, torch.tensor([2.0]))
    assert received.scale.no_decay
    assert all(torch.equal(value, before[name]) for name, value in inputs.model.state_dict().items())
    assert not any(parameter.is_meta for parameter in inputs.model.parameters())


def test_the_size_does_not_grow_with_the_weights() -> None:
    small, large = (case_inputs(model=nn.Linear(8, width)) for width in (8, 100_000))
    assert len(pack(large)) < len(pack(small)) + 100


def test_values_look_like_the_original() -> None:
    model = _scaled().model
    received = _materialised(unpack(pack(_scaled())).inputs.model)
    assert torch.equal(received.scale, model.scale)
    assert torch.equal(received.inner.norm.weight, torch.ones(32))
    for name, weight in model.inner.named_parameters():
        mine = received.inner.get_parameter(name)
        assert mine.mean().item() == pytest.approx(weight.mean().item(), abs=0.1 * (1 + weight.std().item()))
        if weight.numel() > 100:
            assert mine.std().item() == pytest.approx(weight.std().item(), rel=0.3)
            assert not torch.equal(mine, weight)


def test_ties_are_kept() -> None:
    received = _materialised(unpack(pack(case_inputs("tied_llama"))).inputs.model)
    assert received.lm_head.weight is received.embed_tokens.weight


def test_a_large_buffer_is_sent_as_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling_module, "LARGE_BYTES", 1000)
    inputs = _scaled()
    inputs.model.register_buffer("table", torch.randint(5, 9, (50, 50)))
    received = unpack(pack(inputs)).inputs.model
    assert received.get_buffer("table").is_meta
    assert not received.get_buffer("offset").is_meta
    table = _materialised(received).get_buffer("table")
    assert table.unique().tolist() == [5, 6, 7, 8]


def test_a_model_without_initialisation_trains() -> None:
    report = _run(_scaled())
    assert report.status == "ok", report.reason


def test_a_limit_of_memory_is_held() -> None:
    report = _run(case_inputs(), memory_limit_bytes=2**20)
    assert report.status == "out of memory"
    assert "more than the limit of 1.00 MiB" in report.reason


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is enforced on Linux")
def test_a_limit_that_is_enforced_ends_a_trial_as_it_would_end_training() -> None:
    """128 MiB of weights in a limit that weights and gradients exceed, and in one that leaves room for all."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
    inputs = case_inputs(
        "mlp", model=model, dataset=torch.randn(32, 1024), loss_func=lambda _, out: out.square().mean()
    )
    inputs = replace(inputs, model_input_format=None)

    def trial(limit_mib: int) -> RankReport:
        return _run(inputs, memory_limit_bytes=limit_mib * 2**20, enforce_limit=True)

    (report,) = run_ranks(trial, 1, args=(200,), init_process_group=False)
    assert report.status == "out of memory", report
    assert "of the limit of 200 MiB were in use when" in report.reason
    assert report.process_bytes is not None
    assert 150 * 2**20 < report.process_bytes < 210 * 2**20
    (report,) = run_ranks(trial, 1, args=(900,), init_process_group=False)
    assert report.status == "ok", report.reason
    assert report.peak_bytes is not None
    assert report.process_bytes is not None
    assert report.peak_bytes < report.process_bytes + report.further_bytes < 900 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is enforced on Linux")
def test_a_trial_ends_with_steps_under_the_limit_less_what_a_long_run_adds() -> None:
    inputs = case_inputs(
        "mlp", model=nn.Linear(2048, 2048), dataset=torch.randn(32, 2048), loss_func=lambda _, out: out.mean()
    )
    inputs = replace(inputs, model_input_format=None)

    def trial(added_mib: int) -> RankReport:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trial_run._GrowthOverSteps, "further", lambda *_: added_mib * 2**20)
            return _run(inputs, memory_limit_bytes=400 * 2**20, enforce_limit=True)

    (report,) = run_ranks(trial, 1, args=(10,), init_process_group=False)
    assert report.status == "ok", report.reason
    (report,) = run_ranks(trial, 1, args=(380,), init_process_group=False)
    assert report.status == "out of memory"
    # Steps do not fit into what is left, or what the process holds by itself is beyond it.
    assert re.search(
        r"expected to (add 380 MiB, but with that much less|grow by 380 MiB more)", report.reason
    )


def _closing_over(model: nn.Module) -> Callable[[Any, Any], torch.Tensor]:
    weight = torch.full((1,), 2.0)

    def loss(batch: Any, output: Any) -> torch.Tensor:
        assert all(not parameter.is_meta for parameter in model.parameters())
        return nn.functional.mse_loss(output, batch[1]) * weight

    return loss


def test_closures_see_the_model_that_is_trained() -> None:
    inputs = case_inputs("mlp")
    inputs = replace(inputs, loss_func=_closing_over(inputs.model))
    inputs = replace(inputs, optim_func=lambda params, lr: torch.optim.SGD(params, lr=lr))
    report = _run(inputs)
    assert report.status == "ok", report.reason


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def loss(batch: Any, output: Any) -> torch.Tensor:
        with lock:
            return output.sum()

    inputs = case_inputs("mlp", loss_func=loss)
    assert describe_unpicklable(case_inputs("mlp")) is None
    assert "loss_func cannot be pickled" in str(describe_unpicklable(inputs))
    with pytest.raises(InputError, match=r"loss_func cannot be pickled: TypeError.*lock"):
        pack(inputs)
