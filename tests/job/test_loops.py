"""Loops around a step: what users write that is not plain step trains as it does in one process, or says what would differ."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.errors import InputError, StepError
from atorch_ns.job import Result
from atorch_ns.job.optimizer.step_optimizer import inner_optimizer
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

    def mix(self, inputs: dict[str, Tensor]) -> Tensor:
        """A method of a batch that is a dict, which calls no other."""
        return inputs["x"] @ inputs["x"].T

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
    masters = [p.dtype for group in inner_optimizer(result.optim).param_groups for p in group["params"]]
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
        assert "was frozen when the optimizer was created" in outcome.message


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


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
@pytest.mark.parametrize("name", ["another_method", "attribute_of_the_model"])
def test_parameters_are_gathered_for_other_methods(strategy: str, name: str) -> None:
    found, _ = run_ranks(_stepped, 2, args=([strategy], name), timeout_s=60)
    assert found is not None
    assert found < NEAR


def _dtype_of_a_dict(strategy: str) -> torch.dtype:
    result = accelerated(Net(), [strategy, ("amp_native", "bf16")])
    dtype: torch.dtype = result.model.mix({"x": X}).dtype
    return dtype


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_method_of_a_dict_runs_under_autocast_as_one_of_tensors(strategy: str) -> None:
    assert run_ranks(_dtype_of_a_dict, 2, args=(strategy,), timeout_s=60) == [torch.bfloat16] * 2


class Saved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))  # of the root: it is gathered while methods run

    def save(self, path: str, weights: dict[str, torch.Tensor]) -> str:
        return path

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() * self.scale.detach().clone()

    def address(self) -> int:
        return self.scale.untyped_storage().data_ptr()

    def write(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.scale.fill_(float(x.mean()))


def _save_and_write() -> str:
    result = accelerated(Saved(), ["fsdp"])
    with pytest.raises(StepError, match="reads the memory of divided weights"):
        result.model.address()
    if dist.get_rank() == 0:
        assert result.model.save("here", {"x": X}) == "here"
    before = result.model.scaled(X)
    with pytest.raises(StepError) as caught:
        result.model.write(X)
    assert torch.equal(result.model.scaled(X), before)
    return str(caught.value)


def test_a_rank_saves_alone_and_a_write_that_would_be_lost_is_refused() -> None:
    for text in run_ranks(_save_and_write, 2, timeout_s=60):
        assert "write() writes to scale" in text


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
        assert "a forward pass without a backward pass" in outcome.message


def _looks_at_inputs_on_one_rank() -> float | None:
    """Gradients of inputs, as for a picture of what the model looks at, are of one rank and exchange nothing."""
    reference = by_hand(Net(), plain_step)
    result = accelerated(Net(), ["ddp"])
    for _, batch in batches(result):
        if dist.get_rank() == 0:
            given = batch.clone().requires_grad_()
            torch.autograd.grad(result.model(given).sum(), given)
        result.train_step(batch)
    return off_by(result, reference)


def test_gradients_of_inputs_are_of_one_rank() -> None:
    found, _ = run_ranks(_looks_at_inputs_on_one_rank, 2, timeout_s=60)
    assert found is not None
    assert found < NEAR


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


LABELS = torch.randint(0, 16, (32,), generator=torch.Generator().manual_seed(2))
LABELS[::2][:9] = -100  # mostly of one rank; and a whole micro-batch of it
LABELS[16:20] = -100


def over_labels(batch: Any, output: Tensor) -> Any:
    return nn.functional.cross_entropy(output, batch[1], ignore_index=-100)


def sum_over_labels(batch: Any, output: Tensor) -> Any:
    return nn.functional.cross_entropy(output, batch[1], ignore_index=-100, reduction="sum")


def count_labels(batch: Any) -> Any:
    return (batch[1] != -100).sum()


def _labelled(loss: Any, strategy: list[Any], **more: Any) -> tuple[float | None, list[float], list[str]]:
    """How far off training is, the losses, and what is warned of."""
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = []
    for x, y in zip(X.split(BATCH), LABELS.split(BATCH), strict=True):
        optimizer.zero_grad()
        value = loss((None, y), reference(x))
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, result, _ = auto_accelerate(
            Net(),
            torch.optim.SGD,
            TensorDataset(X, LABELS),
            loss,
            optim_args={"lr": 0.1},
            model_input_format="first",
            dataloader_args={"batch_size": BATCH, "shuffle": False},
            load_strategy=strategy,
            **more,
        )
        assert result is not None
        assert result.dataloader is not None
        losses = [float(result.train_step(batch)) for batch in result.dataloader]
    off = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
    found = off_by(result, reference)
    notes = [str(warning.message) for warning in caught] + list(result.report.notes)
    return found, [off], [note for note in notes if "not a mean over samples" in note]


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_mean_over_tokens_is_that_of_all_ranks_and_micro_batches(
    strategy: str, num_micro_batches: int
) -> None:
    more: dict[str, Any] = {"weight_func": count_labels}
    if strategy != "pipeline":
        more["gradient_accumulation_steps"] = num_micro_batches
    for found, (off,), notes in run_ranks(
        partial(_labelled, over_labels, EVERY[strategy], **more), 2, timeout_s=100
    ):
        assert off < NEAR
        assert found is None or found < NEAR
        assert not notes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_sum_is_that_of_all_ranks(strategy: str) -> None:
    for found, (off,), _ in run_ranks(
        partial(_labelled, sum_over_labels, EVERY[strategy], loss_reduction="sum"), 2, timeout_s=100
    ):
        assert off < 1e-4  # of about 20
        assert found is None or found < 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@pytest.mark.parametrize("loss", [over_labels, sum_over_labels])
def test_a_loss_that_is_no_mean_over_samples_is_named_in_the_first_step(loss: Any, strategy: str) -> None:
    ranks = run_ranks(partial(_labelled, loss, EVERY[strategy]), 2, timeout_s=100)
    assert any(len(notes) == 2 for *_, notes in ranks)  # a warning, once, and a note in the report
    for *_, notes in ranks:
        assert all("weight_func=lambda batch" in note for note in notes)


class Annealed:
    """A loss that remembers how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Tensor, output: Tensor) -> Tensor:
        self.calls += 1
        return mean_square(batch, output) / self.calls


def _annealed(by_closure: bool) -> int:
    loss = Annealed()
    calls: list[int] = []

    def counted(batch: Tensor, output: Tensor) -> Tensor:
        calls.append(0)
        return mean_square(batch, output)

    result = auto_accelerate(
        Net(), torch.optim.SGD, None, counted if by_closure else loss, load_strategy=["ddp"]
    )[1]
    assert result is not None
    for batch in X.split(BATCH):
        result.train_step(batch)
    return len(calls) or loss.calls


@pytest.mark.parametrize("by_closure", [True, False])
def test_a_loss_that_remembers_its_calls_is_called_once_a_step(by_closure: bool) -> None:
    assert run_ranks(_annealed, 2, args=(by_closure,), timeout_s=60) == [len(X) // BATCH] * 2


def _mean_over_samples(strategy: list[Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = accelerated(Net(), strategy)
        for _, batch in batches(result):
            result.train_step(batch)
    return [str(warning.message) for warning in caught if "not a mean" in str(warning.message)]


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_a_mean_over_samples_is_no_news(strategy: str) -> None:
    assert run_ranks(_mean_over_samples, 2, args=(EVERY[strategy],), timeout_s=60) == [[], []]


def test_what_is_no_weight_is_refused() -> None:
    for weigh, words in (
        (lambda batch: batch[0], "must return one number"),
        (3, "weight_func must be callable"),
    ):
        with pytest.raises(InputError, match=words):
            _labelled(over_labels, [], weight_func=weigh)
    with pytest.raises(InputError, match="loss_reduction is 'mean' or 'sum'"):
        _labelled(over_labels, [], loss_reduction="median")
    with pytest.raises(InputError, match="weight_func is for means"):
        _labelled(over_labels, [], loss_reduction="sum", weight_func=count_labels)


class ClampedBlock(Block):
    """Writes to a weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        out: Tensor = super().forward(x)
        return out


class Clamped(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(ClampedBlock() for _ in range(4)))


class Renormalised(nn.Module):
    """A table whose rows are renormalised where a batch uses them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(32, 16, max_norm=1.0), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](self.blocks[0](x + self.table((x[:, 0] * 8 + 16).long().clamp(0, 31))))
        return out


class Shared(Net):
    """A buffer with the memory of a weight, which the last block reads."""

    def __init__(self) -> None:
        super().__init__()
        weight: Any = self.get_parameter("blocks.0.up.weight")
        self.register_buffer("view", weight.data, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.get_buffer("view").mean()
        return out


class Value:
    """What no function of torch looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxed(Block):
    def forward(self, x: Any) -> Any:
        return Value(super().forward(getattr(x, "value", x)))


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Boxed() for _ in range(4))

    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = x.value
        return out


def _of_kind(kind: Callable[[], nn.Module], strategy: list[Any]) -> float | None:
    reference = by_hand(kind(), plain_step)
    result = accelerated(kind(), strategy)
    for _, batch in batches(result):
        result.train_step(batch)
    return off_by(result, reference)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (Clamped, "ddp"),
        (Clamped, "zero1"),
        (Shared, "ddp"),
        (Shared, "zero1"),
        (Boxes, "ddp"),
        (Boxes, "tensor"),
    ],
)
def test_what_parameters_are_used_for_is_right_where_they_stay(kind: Any, strategy: str) -> None:
    found, _ = run_ranks(_of_kind, 2, args=(kind, EVERY[strategy]), timeout_s=60)
    assert found is not None
    assert found < NEAR


@pytest.mark.parametrize(
    ("kind", "strategy", "words"),
    [
        (Clamped, "fsdp", "writes to its parameter"),
        (Clamped, "zero2", "writes to its parameter"),
        (Clamped, "masters", "writes to its parameter"),
        (Renormalised, "ddp", "table has max_norm"),
        (Renormalised, "fsdp", "table has max_norm"),
        (Shared, "fsdp", "two tensors with the same memory"),
        (Shared, "zero2", "two tensors with the same memory"),
        (Shared, "tensor", "two tensors with the same memory"),
        (Shared, "masters", "two tensors with the same memory"),
        (Boxes, "fsdp", "returns an object of the class Value"),
        (Boxes, "zero2", "returns an object of the class Value"),
    ],
)
def test_what_a_strategy_breaks_is_refused_on_all_ranks(kind: Any, strategy: str, words: str) -> None:
    steps = ["ddp", MASTERS] if strategy == "masters" else EVERY[strategy]
    for outcome in catch_ranks(_of_kind, 2, args=(kind, steps), timeout_s=60):
        assert outcome.error_type in ("InputError", "StepError", "RankError")
        assert words in outcome.message


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "tensor"])
def test_second_derivatives_are_refused_where_parameters_are_divided(strategy: str) -> None:
    for outcome in catch_ranks(_stepped, 2, args=(EVERY[strategy], "penalty"), timeout_s=60):
        assert outcome.error_type in ("StepError", "RankError")
        assert "have no second derivative" in outcome.message


def _hooked(strategy: list[Any], num_micro_batches: int, own_loop: bool) -> tuple[float | None, int]:
    """Hooks that are not linear in the gradient: they must see that of the whole batch, once a step."""
    calls = []

    def hook(model: nn.Module) -> nn.Module:
        model.get_parameter("blocks.1.up.weight").register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        model.get_parameter("blocks.2.up.bias").register_post_accumulate_grad_hook(to_signs)
        return model

    def to_signs(parameter: Any) -> None:
        parameter.grad.sign_().mul_(1e-3)

    reference = by_hand(hook(Net()), plain_step)
    model = hook(Net())
    model.get_parameter("blocks.3.up.weight").register_hook(lambda gradient: calls.append(gradient.shape))
    more: dict[str, Any] = (
        {} if num_micro_batches == 1 else {"gradient_accumulation_steps": num_micro_batches}
    )
    result = accelerated(model, strategy, **more)
    assert result.optim is not None
    for _, batch in batches(result):
        if own_loop:
            result.optim.zero_grad()
            plain_step(result.model, batch)
            result.optim.step()
        else:
            result.train_step(batch)
    return off_by(result, reference), len(calls)


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("how", ["a step", "two micro-batches", "a loop"])
def test_hooks_of_gradients_see_the_gradient_of_all_ranks_once_a_step(strategy: str, how: str) -> None:
    if strategy == "pipeline" and how != "a step":
        pytest.skip("a pipeline has micro-batches of its own, and no other loop")
    args = (EVERY[strategy], 2 if how == "two micro-batches" else 1, how == "a loop")
    ranks = run_ranks(_hooked, 2, args=args, timeout_s=60)
    found, _ = ranks[0]
    assert found is not None
    assert found < NEAR
    assert max(calls for _, calls in ranks) == len(X) // BATCH


class Foreach(torch.optim.SGD):
    """An optimizer of the user's: methods of its own, and operators over lists of all parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.is_training = False

    def train(self) -> None:
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        params = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_mul_(params, 0.99)
        grads = torch._foreach_mul([p.grad for p in params], self.param_groups[0]["lr"])
        torch._foreach_sub_(params, grads)


class Parts(torch.optim.Optimizer):
    """Holds optimizers, each of which updates a part of the parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(list(params), {"lr": lr})
        every = [p for group in self.param_groups for p in group["params"]]
        self.parts = [
            torch.optim.AdamW([p for p in every if p.ndim == 2], lr=lr),
            torch.optim.Adam([p for p in every if p.ndim != 2], lr=lr),
        ]

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


class Normed(Net):
    """With parameters that tensor parallelism leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(super().forward(x))
        return out


def _optimized(strategy: list[Any], folder: str | None) -> tuple[float | None, bool]:
    """Three steps; with a folder by a class of optimizers in one, saved after the second and gone on with anew."""
    kind = Foreach if folder is None else Parts
    reference = Normed()
    optimizer: Any = kind(reference.parameters())
    for batch in X.split(BATCH)[:3]:
        optimizer.zero_grad()
        plain_step(reference, batch)
        optimizer.step()

    def made() -> Result:
        result = auto_accelerate(
            Normed(), kind, None, mean_square, load_strategy=strategy, sample_batch=X[:BATCH]
        )[1]
        assert result is not None
        return result

    result: Any = made()
    num, place = result.job.num_data_ranks, result.job.data_rank
    for number, batch in enumerate(X.split(BATCH)[:3]):
        if folder is not None and number == 2:
            checkpoint.save(folder, result)
            result = made()
            checkpoint.load(folder, result)
        if folder is None:
            result.optim.train()
        result.train_step(batch.chunk(num)[place])
    return off_by(result, reference), folder is not None or result.optim.is_training


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor"])
def test_optimizers_have_methods_of_their_own_and_lists_of_all_parameters(strategy: str) -> None:
    for found, is_training in run_ranks(_optimized, 2, args=(EVERY[strategy], None), timeout_s=60):
        assert found is None or found < NEAR
        assert is_training


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_an_optimizer_of_optimizers_resumes_as_it_was(strategy: str, tmp_path: Path) -> None:
    for found, _ in run_ranks(_optimized, 2, args=(EVERY[strategy], str(tmp_path)), timeout_s=60):
        assert found is None or found < NEAR
