"""Intervals: by class of device, around the prediction, in estimates and prices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.estimate.intervals import OTHER, Residual, class_of, intervals_of, residuals
from atorch_ns.planning import estimate, profile

DENSE = profile(nn.Linear(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("8xA100-40GB", "Ampere"),
        ("8xH200", "Hopper"),
        ("8xB200", OTHER),
        ("8xMI250X", OTHER),  # which has a Hopper's capability
        ("2xcpu", "CPU"),
    ],
)
def test_classes(spec: str, kind: str) -> None:
    hardware = cluster_from_spec(spec).hardware
    assert hardware is not None
    assert class_of(hardware.device, DENSE) == kind


def test_mixtures_and_adapters_are_classes_of_their_own() -> None:
    assert DENSE.trace is not None
    mixture = replace(DENSE, trace=replace(DENSE.trace, num_experts=8))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    model[0].requires_grad_(False)
    adapters = profile(model, torch.ones(2, 64))
    for spec, expected in (("8xA100-40GB", ["mixture", "adapters"]), ("2xcpu", ["CPU", "CPU"])):
        hardware = cluster_from_spec(spec).hardware
        assert hardware is not None
        assert [class_of(hardware.device, each) for each in (mixture, adapters)] == expected


def test_the_file_has_every_quantity_for_every_device() -> None:
    known = residuals()
    assert {quantity for quantity, kind in known if kind == OTHER} == {"step time", "memory", "gain"}
    for (quantity, kind), each in known.items():
        assert 0 < each.low < each.high < 3, (quantity, kind)
        assert each.num_runs >= 6, (quantity, kind)
    for quantity in ("step time", "memory"):
        widest = known[quantity, OTHER]
        assert widest.low <= known[quantity, "Ampere"].low
        assert widest.high >= known[quantity, "Hopper"].high


def test_a_prediction_lies_in_its_own_interval() -> None:
    assert Residual(1.1, 1.4, 9, "").range == (1.0, 1.4)
    assert Residual(0.7, 0.9, 9, "").range == (0.7, 1.0)


def test_a_cpu_that_was_not_measured_is_less_sure() -> None:
    assumed = cluster_from_spec("2xcpu").hardware
    assert assumed is not None
    measured = intervals_of(replace(assumed, measured=True), DENSE)
    (low, high), unsure = measured.time, intervals_of(assumed, DENSE).time
    assert unsure[0] <= low
    assert unsure[1] >= high
    assert unsure != measured.time
    assert intervals_of(assumed, DENSE).memory == measured.memory


def test_estimates_carry_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    found = estimate(model, ["ddp"], "2xH100-80GB", sample=torch.zeros(8, 64), batch=16)
    hardware = cluster_from_spec("2xH100-80GB").hardware
    assert hardware is not None
    known = intervals_of(hardware, DENSE)
    assert found.intervals == known
    assert found.step_seconds_interval == tuple(factor * found.step_seconds for factor in known.time)
    assert found.peak_bytes_interval == tuple(factor * found.peak_bytes for factor in known.memory)
    assert known.time[0] <= 1 <= known.time[1]
