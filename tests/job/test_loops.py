"""Loops around a step: what users write that is no plain step trains as it does in one process, or says what would differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.job import Result
from atorch_ns.testing.workers import catch_ranks, run_ranks

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
BATCH = 8
DATA_PARALLEL: dict[str, list[Any]] = {
    "ddp": ["ddp"],
    "zero1": ["zero1"],
    "fsdp": ["fsdp"],
    "zero2": ["zero2"],
}
MASTERS = ("half", {"dtype": "bf16", "master_weights": True})
PIPELINE: list[Any] = [
    ("parallel_mode", ([("pipeline", 2)], None)),
    ("pipeline_parallel", {"num_micro_batches": 2}),
]
TENSOR: list[Any] = [("parallel_mode", ([("tensor", 2)], None))]
EVERY = {**DATA_PARALLEL, "tensor": TENSOR, "pipeline": PIPELINE}
NEAR = 1e-6
"""Rounding of a few steps in fp32."""

pytestmark = pytest.mark.processes

Change = Callable[[int, nn.Module], object]
"""Called before each step with its number and the model."""


class Block(nn.Module):
    """What is small and can be divided over ranks of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden


class Net(nn.Module):
    """Four blocks, the first two of them the backbone."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.detached = detached

    def encode(self, x: Tensor) -> Tensor:
        """What the backbone makes."""
        hidden: Tensor = self.blocks[1](self.blocks[0](x))
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        if self.detached:
            hidden = hidden.detach()
        out: Tensor = self.blocks[3](self.blocks[2](hidden))
        return out


def mean_square(batch: Tensor, output: Tensor) -> Tensor:
    return (output - batch).square().mean()


def accelerated(model: nn.Module, strategy: list[Any], **more: Any) -> Result:
    _, result, _ = auto_accelerate(
        model,
        torch.optim.AdamW,
        X,
        mean_square,
        optim_args={"lr": 1e-2},
        dataloader_args={"batch_size": BATCH, "shuffle": False},
        load_strategy=strategy,
        **more,
    )
    assert result is not None
    return result


def batches(result: Result) -> Iterator[tuple[int, Any]]:
    assert result.dataloader is not None
    return enumerate(result.dataloader)


def by_hand(
    model: nn.Module, step: Callable[[nn.Module, Tensor], None], change: Change | None = None
) -> nn.Module:
    """The loop of one process with the global batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, batch in enumerate(X.split(BATCH)):
        if change is not None:
            change(number, model)
        optimizer.zero_grad()
        step(model, batch)
        optimizer.step()
    return model


def plain_step(model: nn.Module, batch: Tensor) -> None:
    mean_square(batch, model(batch)).backward()


def off_by(result: Result, reference: nn.Module) -> float | None:
    """The largest difference of a parameter, on rank 0."""
    found = checkpoint.export_state_dict(result)
    if not found:
        return None
    return max(float((found[name] - value).abs().max()) for name, value in reference.state_dict().items())


def freeze(model: nn.Module, *, backbone: bool, trained: bool) -> None:
    """The blocks of the backbone, or the last ones, by the names that any wrapper leaves."""
    numbers = ("0.", "1.") if backbone else ("2.", "3.")
    for name, parameter in model.named_parameters():
        if name.removeprefix("module.").removeprefix("blocks.").startswith(numbers):
            parameter.requires_grad_(trained)


def thaw(number: int, model: nn.Module) -> None:
    if number == 2:
        freeze(model, backbone=True, trained=True)


def freeze_later(number: int, model: nn.Module) -> None:
    if number == 1:
        freeze(model, backbone=False, trained=False)
    if number == 3:
        freeze(model, backbone=False, trained=True)


def _trained(strategy: list[Any], change: Change, frozen: bool) -> float | None:
    models = Net(), Net()
    if frozen:
        for model in models:
            freeze(model, backbone=True, trained=False)
    reference = by_hand(models[0], plain_step, change)
    result = accelerated(models[1], strategy)
    for number, batch in batches(result):
        change(number, result.model)
        result.train_step(batch)
    return off_by(result, reference)


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("change", [thaw, freeze_later])
def test_what_is_frozen_and_thawed_on_the_way_trains_as_in_one_process(strategy: str, change: Change) -> None:
    found, _ = run_ranks(_trained, 2, args=(EVERY[strategy], change, change is thaw), timeout_s=100)
    assert found is not None
    assert found < NEAR


def _thawed_masters() -> tuple[float | None, int]:
    model = Net()
    freeze(model, backbone=True, trained=False)
    before = copy.deepcopy(model).bfloat16().state_dict()
    result = accelerated(model, ["ddp", MASTERS])
    for number, batch in batches(result):
        thaw(number, result.model)
        result.train_step(batch)
    assert result.optim is not None
    masters = [p.dtype for group in result.optim.param_groups for p in group["params"]]
    moved = checkpoint.export_state_dict(result)
    change = [float((moved[n].float() - before[n].float()).abs().max()) for n in moved if "blocks.0" in n]
    return min(change, default=None), masters.count(torch.bfloat16)


def test_what_is_thawed_gets_an_fp32_master_too() -> None:
    (change, num_bf16), _ = run_ranks(_thawed_masters, 2, timeout_s=60)
    assert change is not None
    assert change > 1e-3  # two updates of 1e-2
    assert num_bf16 == 0


def _thawed_under(strategy: list[Any]) -> None:
    model = Net()
    freeze(model, backbone=True, trained=False)
    result = accelerated(model, strategy)
    for number, batch in batches(result):
        thaw(number, result.model)
        result.train_step(batch)


def test_where_nothing_can_join_the_optimizer_thawing_is_refused_on_all_ranks() -> None:
    for outcome in catch_ranks(_thawed_under, 2, args=(["zero1", MASTERS],), timeout_s=60):
        assert outcome.error_type == "StepError"
        assert "was frozen when the optimizer was made" in outcome.message


def _thaws_on_one_rank() -> None:
    model = Net()
    freeze(model, backbone=True, trained=False)
    result = accelerated(model, ["ddp"])
    for number, batch in batches(result):
        if dist.get_rank() == 1:
            thaw(number, result.model)
        result.train_step(batch)


def test_thawing_on_one_rank_alone_ends_all() -> None:
    for outcome in catch_ranks(_thaws_on_one_rank, 2, timeout_s=60):
        assert outcome.error_type in ("StepError", "RankError")
        assert "trained on some ranks and frozen on others" in outcome.message


def twice(model: nn.Module, batch: Tensor) -> None:
    out = model(batch)
    mean_square(batch, out).backward(retain_graph=True)
    out.abs().mean().backward()


def two_outputs(model: nn.Module, batch: Tensor) -> None:
    first, second = model(batch), model(batch * 2)
    mean_square(batch, first).backward()
    second.abs().mean().backward()


def penalty(model: nn.Module, batch: Tensor) -> None:
    batch = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(batch).square().sum(), batch, create_graph=True)
    gradient.square().mean().backward()


def another_method(model: Any, batch: Tensor) -> None:
    """What DistributedDataParallel's users write as ``model.module``, and others on the model itself."""
    getattr(model, "module", model).encode(batch).square().mean().backward()


def attribute_of_the_model(model: Any, batch: Tensor) -> None:
    model.encode(batch).square().mean().backward()


def accumulated_by_hand(model: Any, batch: Tensor) -> None:
    """Half of a batch under ``no_sync``, as DistributedDataParallel has it."""
    halves = batch.chunk(2)
    if hasattr(model, "no_sync"):
        with model.no_sync():
            (mean_square(halves[0], model(halves[0])) / 2).backward()
    else:
        (mean_square(halves[0], model(halves[0])) / 2).backward()
    (mean_square(halves[1], model(halves[1])) / 2).backward()


STEPS = {
    step.__name__: step
    for step in (twice, two_outputs, penalty, another_method, attribute_of_the_model, accumulated_by_hand)
}


def _stepped(strategy: list[Any], name: str) -> float | None:
    step = STEPS[name]
    reference = by_hand(Net(), step)
    result = accelerated(Net(), strategy)
    assert result.optim is not None
    for _, batch in batches(result):
        result.optim.zero_grad()
        step(result.model, batch)
        result.optim.step()
    return off_by(result, reference)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_belong_to_parameters(strategy: str, name: str) -> None:
    found, _ = run_ranks(_stepped, 2, args=([strategy], name), timeout_s=60)
    assert found is not None
    assert found < NEAR


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "tensor"])
@pytest.mark.parametrize("name", ["twice", "two_outputs"])
def test_several_backward_passes_are_right_where_parameters_are_divided(strategy: str, name: str) -> None:
    found, _ = run_ranks(_stepped, 2, args=(EVERY[strategy], name), timeout_s=60)
    assert found is not None
    assert found < NEAR


def test_a_second_backward_pass_is_refused_by_torchs_reducer() -> None:
    for outcome in catch_ranks(_stepped, 2, args=([("ddp", {"reducer": "torch"})], "twice"), timeout_s=60):
        assert outcome.error_type == "StepError"
        assert "leave out ddp's reducer: torch" in outcome.message


def _detached() -> float | None:
    reference = by_hand(Net(detached=True), plain_step)
    result = accelerated(Net(detached=True), PIPELINE)
    for _, batch in batches(result):
        result.train_step(batch)
    return off_by(result, reference)


def test_what_no_gradient_reaches_in_a_pipeline_is_not_decayed() -> None:
    found, _ = run_ranks(_detached, 2, timeout_s=60)
    assert found is not None
    assert found < NEAR


def _skips(strategy: list[Any], rank: int) -> None:
    result = accelerated(Net(), strategy)
    assert result.optim is not None
    for number, batch in batches(result):
        result.optim.zero_grad()
        loss = mean_square(batch, result.model(batch))
        if number == 1 and dist.get_rank() == rank:
            continue  # as for a loss that is not finite
        loss.backward()
        result.optim.step()


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_rank_that_leaves_out_a_backward_pass_ends_all(strategy: str) -> None:
    for outcome in catch_ranks(_skips, 2, args=([strategy], 1), timeout_s=60):
        assert outcome.error_type in ("StepError", "RankError")
        assert "no backward pass has followed" in outcome.message


def _all_skip() -> float | None:
    result = accelerated(Net(), ["ddp"])
    assert result.optim is not None
    reference = Net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for number, batch in enumerate(X.split(BATCH)):
        if number != 1:
            optimizer.zero_grad()
            plain_step(reference, batch)
            optimizer.step()
    for number, batch in batches(result):
        result.optim.zero_grad()
        loss = mean_square(batch, result.model(batch))
        if number != 1:
            loss.backward()
            result.optim.step()
    return off_by(result, reference)


def test_a_backward_pass_that_all_ranks_leave_out_is_right() -> None:
    found, _ = run_ranks(_all_skip, 2, timeout_s=60)
    assert found is not None
    assert found < NEAR


def _averaged() -> float:
    """The largest difference between an average on two ranks and that of one process, copied on rank 0 alone."""
    decay = get_ema_multi_avg_fn(0.5)
    reference = Net()
    expected = AveragedModel(reference, multi_avg_fn=decay)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    result = accelerated(Net(), ["ddp"])
    average = AveragedModel(result.model, multi_avg_fn=decay) if dist.get_rank() == 0 else None
    for batch, (_, own) in zip(X.split(BATCH), batches(result), strict=True):
        optimizer.zero_grad()
        plain_step(reference, batch)
        optimizer.step()
        expected.update_parameters(reference)
        result.train_step(own)
        if average is not None:
            average.update_parameters(result.model)
            average.module(own)  # communicates with nobody
    if average is None:
        return 0.0
    pairs = zip(average.parameters(), expected.parameters(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def test_a_copy_of_a_replicated_model_is_of_its_rank_alone() -> None:
    assert max(run_ranks(_averaged, 2, timeout_s=60)) < NEAR
