"""Faults are named, counted and placed as they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atorch_ns.errors import InputError
from tests.engine.faults import Fault, InjectedFault, as_environment, fault, faults_from_environment, inject
from tests.engine.inputs import case_inputs


def test_written_in_short() -> None:
    assert fault("kill", rank=1, at="dryrun:3") == Fault(kind="kill", rank=1, place="loss", step=3)
    assert fault("raise", at="forward") == Fault(kind="raise", place="forward", step=1)


@pytest.mark.parametrize(
    ("kind", "at"), [("fire", "loss:1"), ("kill", "lunch:1"), ("kill", "loss:x"), ("nonfinite", "dataset")]
)
def test_what_there_is_not(kind: Any, at: str) -> None:
    with pytest.raises(InputError, match=r"there is no fault|is one of the loss"):
        fault(kind, at=at)


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = (fault("slow", rank=1, at="forward:2", seconds=0.5), fault("oom", trial=3))
    for name, value in as_environment(*faults).items():
        monkeypatch.setenv(name, value)
    assert faults_from_environment() == faults


@pytest.mark.parametrize("place", ["loss", "forward", "dataset", "optimizer"])
def test_it_strikes_once_at_its_call(place: str) -> None:
    inputs = inject(case_inputs("mlp"), fault("raise", at=f"{place}:2"))
    batch = case_inputs("mlp").dataset.batch(0, 4)
    assert inputs.loss_func is not None
    assert inputs.optim_func is not None
    optimizer = inputs.optim_func(inputs.model.parameters(), lr=0.1)
    struck = []
    for step in range(3):
        try:
            inputs.dataset[step]
            inputs.loss_func(batch, inputs.model(*batch)).backward()
            optimizer.step()
        except InjectedFault as error:
            struck.append((step, place in str(error)))
    assert struck == [(1, True)]


def test_only_on_its_rank_and_in_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ATORCH_NS_TRIAL", "7")
    assert fault("raise", rank=1, trial=7).strikes(1)
    assert not fault("raise", rank=0).strikes(1)
    assert not fault("raise", trial=8).strikes(1)
    monkeypatch.delenv("ATORCH_NS_TRIAL")
    assert not fault("raise", trial=7).strikes(1)


def test_a_loss_that_is_not_finite() -> None:
    inputs = inject(case_inputs("mlp"), fault("nonfinite"))
    batch = case_inputs("mlp").dataset.batch(0, 4)
    assert inputs.loss_func is not None
    assert torch.isnan(inputs.loss_func(batch, inputs.model(*batch)))
    assert torch.isfinite(inputs.loss_func(batch, inputs.model(*batch)))
