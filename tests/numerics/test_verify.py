"""What is right passes, on several ranks; what is wrong drifts, and the parameter is named."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, RankError
from atorch_ns.job import Inputs
from atorch_ns.method import load_registry
from atorch_ns.strategy import Strategy
from atorch_ns.testing import catch_ranks, get_case, run_ranks
from atorch_ns.verify import Verification, verify


class _Network(nn.Module):
    """A convolution, statistics of batches, dropout, and a branch that a fault may be put into."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * 36, 8))

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = self.body(image)
        if self.fault == "detached" and _rank() == 1:
            hidden = hidden.detach() + 0 * hidden  # DDP waits for a gradient, be it zero
        out: torch.Tensor = self.head(hidden.flatten(1))
        return out * 1.01 if self.fault == "scaled" and _rank() == 1 else out


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(6, 1, 8, 8, generator=generator)
    return {"image": image, "label": torch.randint(0, 8, (6,), generator=generator)}


def _loss(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), batch["label"])


def _verify(strategy: Any, fault: str = "", *, seed: int = 0) -> Verification:
    torch.manual_seed(seed + (_rank() if fault == "unequal" else 0))
    inputs = Inputs(
        model=_Network(fault),
        optim_func=torch.optim.SGD,
        loss_func=_loss,
        model_input_format="unpack_dict",
        sample_batch=_sample(),
    )
    return verify(inputs, Cluster.detect(), Strategy.load(strategy), load_registry(), num_steps=3)


def _verify_all(cases: list[tuple[Any, str]]) -> list[Verification]:
    return [_verify(strategy, fault) for strategy, fault in cases]


def test_strategies_that_are_right_and_models_that_differ_between_ranks() -> None:
    cases: list[tuple[Any, str]] = [
        (["fsdp"], ""),
        (["zero1", ("gradient_accumulation", 2)], ""),
        ([("amp_native", "bf16"), "ddp"], ""),
        (["ddp"], "scaled"),
        (["ddp"], "detached"),
    ]
    for found in run_ranks(_verify_all, 2, args=(cases,), timeout_s=100):
        fsdp, zero1, bf16, scaled, detached = found
        for right in (fsdp, zero1, bf16):
            assert right.passed, right.reasons
            assert len(right.losses) == right.num_steps == 3
            assert right.num_judged > 0
        assert not fsdp.reduced_precision
        assert not fsdp.training  # dropout and the statistics of batches play no part
        assert fsdp.loss_error < 1e-6
        assert bf16.reduced_precision
        assert bf16.loss_tolerance > fsdp.loss_tolerance
        assert not scaled.passed
        assert not detached.passed
        drifting = {row.name for row in detached.parameters if row.state == "drifts"}
        assert {"body.0.weight", "body.0.bias"} <= drifting
        worst = detached.parameters[0]
        assert worst.name.startswith("body")
        assert worst.gradient_error > 0.1
        assert "parameters differ from one process" in detached.reasons[0]
        assert json.loads(json.dumps(detached.as_json()))["parameters"][0]["name"] == worst.name


class _TakesOne(nn.Module):
    """Takes the image of a batch that has a label too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(image)
        return out


def _inputs_of_one() -> Inputs:
    return Inputs(
        model=_TakesOne(),
        optim_func=torch.optim.SGD,
        loss_func=_loss,
        model_input_format="unpack_dict",
        sample_batch=_sample(),
    )


@pytest.mark.parametrize("method", ["amp_native", "half"])
def test_what_is_for_the_loss_alone_is_not_passed_in_reduced_precision_either(method: str) -> None:
    strategy = Strategy.load([(method, "bf16")])
    found = verify(_inputs_of_one(), Cluster.detect(), strategy, load_registry(), num_steps=2)
    assert found.passed, found.reasons
    assert found.reduced_precision


def test_a_model_whose_values_differ_between_ranks_is_said() -> None:
    outcomes = catch_ranks(_verify, 2, args=(["ddp"], "unequal"), timeout_s=60)
    assert all(isinstance(outcome.error, RankError) for outcome in outcomes)
    assert "the model's values" in outcomes[0].message


def _tied_llama() -> Inputs:
    case = get_case("tied_llama")
    torch.manual_seed(0)
    return Inputs(
        model=case.build(),
        optim_func=torch.optim.SGD,
        loss_func=case.loss_func,
        model_input_format=case.model_input_format,
        sample_batch=case.make_batch(8, 0),
    )


def _verify_pipeline() -> Verification:
    inputs = _tied_llama()
    strategy = Strategy([("parallel_mode", ([("pipeline", 2)], None)), "pipeline_parallel"])
    return verify(inputs, Cluster.detect(), strategy, load_registry(), num_steps=2)


def test_stages_are_gathered() -> None:
    for found in run_ranks(_verify_pipeline, 2, timeout_s=100):
        assert found.passed, found.reasons
        assert found.num_judged == len(found.parameters)
        assert any("embed" in row.name for row in found.parameters)


def test_one_process_and_what_cannot_be_compared() -> None:
    assert "RANK" not in os.environ
    assert _verify([]).passed
    with torch.device("meta"):
        model = _Network()
    inputs = Inputs(model=model, optim_func=torch.optim.SGD, loss_func=_loss, sample_batch=_sample())
    with pytest.raises(InputError, match="on the meta device"):
        verify(inputs, Cluster.detect(), Strategy(), load_registry())
    with pytest.raises(InputError, match="at least one step"):
        verify(inputs, Cluster.detect(), Strategy(), load_registry(), num_steps=0)


def test_rounding_to_fp8_is_not_judged() -> None:
    """It moves parameters by a tenth of their update; what a strategy does beside it must agree as ever."""
    pytest.importorskip("torchao")
    inputs = _tied_llama()
    strategy = Strategy.load([("fp8", {"backend": "torchao", "emulate": True})])
    found = verify(inputs, Cluster.detect(), strategy, load_registry(), num_steps=2)
    assert found.passed, found.reasons
    assert not found.reduced_precision
    assert any("rounding to fp8 is left out" in note for note in found.notes)
