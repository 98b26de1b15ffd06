"""The loss as the user reads it, and what surrounds it: autocast, casts and the scale of gradients."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch_ns import auto_accelerate
from atorch_ns.errors import InputError
from atorch_ns.job import Autocast, LossScaling, first_loss
from atorch_ns.job.loss import ForwardScope, LossScale, LossScaler, cast_inputs, wrap_loss
from atorch_ns.testing.workers import run_ranks

BF16 = Autocast("cpu", torch.bfloat16)


class Parts(NamedTuple):
    loss: torch.Tensor
    accuracy: float


def _identity(batch: Any, output: Any) -> Any:
    return output


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "returned float"), ([], "returned list"), (torch.ones(2), r"shape \(2,\).*\.mean\(\)")],
    ids=str,
)
def test_what_is_no_loss_is_refused(value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        first_loss(value)


def test_a_loss_of_one_element_is_one() -> None:
    assert first_loss((torch.ones(1, 1), "more")).shape == (1, 1)


def test_nothing_around_it_leaves_the_users_function() -> None:
    assert wrap_loss(_identity, autocast=None, scaler=None, upcast=False) is _identity


def test_outputs_are_upcast_and_autocast_is_on() -> None:
    def loss(batch: Any, output: Any) -> Any:
        return output["logits"].dtype, (output["logits"] @ output["logits"]).dtype, output["ids"].dtype

    wrapped = wrap_loss(loss, autocast=BF16, scaler=None, upcast=True)
    output = {"logits": torch.ones(2, 2, dtype=torch.bfloat16), "ids": torch.ones(2, dtype=torch.int64)}
    assert wrapped(None, output) == (torch.float32, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: [t, 1], lambda t: (t, 1), lambda t: Parts(t, 0.5)])
def test_the_scale_enters_in_the_backward_pass_alone(make: Any) -> None:
    scaler = LossScaler("cpu", LossScaling(init_scale=8.0))
    scaler.at_backward = lambda: None  # as an optimizer that takes the scale out
    weight = nn.Parameter(torch.tensor(3.0))
    value = wrap_loss(_identity, autocast=None, scaler=scaler, upcast=False)(None, make(weight * 1.0))
    assert isinstance(value, type(make(weight * 1.0)))
    assert first_loss(value).item() == 3.0
    assert (first_loss(value) + 1.0).grad_fn is not None
    root = torch.autograd.graph.get_gradient_edge(first_loss(value)).node  # where pipelines begin
    assert "Alias" in root.name()
    first_loss(value).backward()
    assert weight.grad == 8.0
    assert scaler.num_backwards == 1
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert scaler.unscale(optimizer) is False
    assert weight.grad == 1.0
    scaler.adapt(overflow=False)
    assert scaler.num_backwards == 0


def test_a_scaled_loss_as_a_plain_tensor_keeps_its_scale() -> None:
    # For engines that look at its class and run the backward pass themselves, such as DeepSpeed's.
    weight = nn.Parameter(torch.tensor(3.0))
    plain = (LossScaler("cpu", LossScaling(init_scale=8.0)).scaled(weight * 1.0) * 2).as_subclass(Tensor)
    assert type(plain) is Tensor
    plain.backward()
    assert weight.grad == 16.0


@pytest.mark.parametrize(("scaling", "after"), [({}, 4.0), ({"static_scale": 2.0}, 2.0)], ids=str)
def test_an_overflow_is_found_and_the_scale_is_halved(scaling: dict[str, float], after: float) -> None:
    scaler = LossScaler("cpu", LossScaling(init_scale=8.0, **scaling))
    weight = nn.Parameter(torch.tensor(3.0))
    scaler.scaled(weight * float("inf")).backward()
    assert scaler.unscale(torch.optim.SGD([weight], lr=1.0)) is True
    scaler.adapt(overflow=True)
    assert scaler.scaler.get_scale() == after


def _scales_of_deepspeed(
    overflows: Sequence[bool], scale: float, window: int, hysteresis: int, least: float
) -> list[float]:
    """``DynamicLossScaler.update_scale`` of DeepSpeed, without ``consecutive_hysteresis``."""
    scales, left, last_overflow = [], hysteresis, -1
    for step, overflow in enumerate(overflows):
        if overflow:
            if left == 1:
                scale = max(scale / 2, least)
            else:
                left -= 1
            last_overflow = step
        elif (step - last_overflow) % window == 0:
            left = hysteresis
            scale *= 2
        scales.append(scale)
    return scales


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
@pytest.mark.parametrize("often", [0.1, 0.4, 0.8])
def test_the_scales_are_those_of_deepspeed(hysteresis: int, often: float) -> None:
    draw = random.Random(5).random
    overflows = [draw() < often for _ in range(60)]
    scale = LossScale(LossScaling(64.0, growth_interval=3, hysteresis=hysteresis, min_scale=4.0))
    found = [scale.advance(overflow) for overflow in overflows]
    assert found == _scales_of_deepspeed(overflows, 64.0, 3, hysteresis, 4.0)
    assert len(set(found)) > 3


def test_without_hysteresis_the_scales_are_those_of_torch() -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=2)
    torchs.scale(torch.zeros(()))
    scale = LossScale(LossScaling(2.0**125, growth_interval=2))
    weight = nn.Parameter(torch.tensor(0.0))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in [False] * 7 + [True, False, True, False, False]:
        weight.grad = torch.tensor(float("inf") if overflow else 1.0)
        torchs.step(optimizer)
        torchs.update()
        assert scale.advance(overflow) == torchs.get_scale()
    assert scale.state_dict().items() >= {"scale": 2.0**126, "_growth_tracker": 0}.items()


def test_a_scale_goes_on_where_it_was_saved_and_takes_torchs_state_too() -> None:
    draw = random.Random(9).random
    overflows = [draw() < 0.4 for _ in range(40)]
    scaling = LossScaling(64.0, growth_interval=3, hysteresis=3)
    for place in range(40):
        whole, resumed = LossScaler("cpu", scaling), LossScaler("cpu", scaling)
        for overflow in overflows[:place]:
            whole.scale.advance(overflow)
        resumed.load_state_dict(whole.state_dict())
        assert resumed.scaler.get_scale() == whole.scale.value
        for overflow in overflows[place:]:
            assert resumed.scale.advance(overflow) == whole.scale.advance(overflow)
    old = LossScaler("cpu", scaling)
    old.load_state_dict({"scale": 32.0, "_growth_tracker": 2, "growth_factor": 2.0})
    assert old.scale.advance(overflow=False) == 64.0
    static = LossScaler("cpu", LossScaling(static_scale=7.0))
    static.load_state_dict(old.state_dict())
    assert static.scaler.get_scale() == 7.0


def test_inputs_are_cast_wherever_they_are() -> None:
    class Model(nn.Module):
        def forward(self, x: Any, *, more: Any) -> list[torch.dtype]:
            return [x.dtype, more["y"][0].dtype, more["ids"].dtype]

    model = Model()
    cast_inputs(model, torch.bfloat16)
    dtypes = model(torch.ones(1), more={"y": [torch.ones(1)], "ids": torch.ones(1, dtype=torch.int32)})
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.int32]


def test_autocast_ends_with_the_forward_pass_also_where_it_fails() -> None:
    model = nn.Linear(2, 2)
    ForwardScope(partial(torch.autocast, "cpu", torch.bfloat16)).attach(model)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert not torch.is_autocast_enabled("cpu")
    copied = pickle.loads(pickle.dumps(model))
    assert copied(torch.ones(1, 2)).dtype == torch.bfloat16


REDUCED: list[list[Any]] = [
    [*data, precision]
    for data in (["ddp"], [("ddp", {"reducer": "torch"})], ["zero1"], ["fsdp"])
    for precision in (("half", "bf16"), ("amp_native", "bf16"))
]


def _dtypes_of_own_calls() -> list[torch.dtype]:
    dtypes = []
    for strategy in REDUCED:
        model = nn.Linear(4, 4)
        auto_accelerate(
            model, torch.optim.SGD, loss_func=_identity, optim_args={"lr": 0.1}, load_strategy=strategy
        )
        dtypes.append(model(torch.ones(2, 4)).dtype)
    return dtypes


@pytest.mark.processes
def test_a_call_of_the_users_own_model_is_cast_as_one_of_the_wrapper() -> None:
    assert run_ranks(_dtypes_of_own_calls, 2, timeout_s=60) == [[torch.bfloat16] * len(REDUCED)] * 2


class Weighed(nn.Module):
    """A model with methods that give penalties, one of which remembers its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def size(self) -> Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()

    def annealed_size(self) -> Tensor:
        self.num_calls += 1
        return self.size() / self.num_calls


def _add_over_labels(batch: Any, output: Tensor) -> Tensor:
    return F.cross_entropy(output, batch[1], reduction="sum")


LOSSES: dict[str, Any] = {
    "sum": lambda model: _add_over_labels,
    "mean": lambda model: lambda batch, output: _add_over_labels(batch, output) / len(output),
    "penalty": lambda model: lambda batch, output: _add_over_labels(batch, output) + 1e-2 * model.size(),
    "share": lambda model: (
        lambda batch, output: _add_over_labels(batch, output) + 1e-2 * model.size() * len(output) / 24
    ),
    "annealed": lambda model: (
        lambda batch, output: _add_over_labels(batch, output) + 1e-2 * model.annealed_size()
    ),
    "pass": lambda model: lambda batch, output: _add_over_labels(batch, output + model(batch[0])),
}


def _told_of_sum(strategy: list[Any], kind: str, *, own_loop: bool = False) -> list[str]:
    model = Weighed()
    _, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        loss_func=LOSSES[kind](model),
        optim_args={"lr": 0.1},
        model_input_format="first",
        loss_reduction="sum",
        load_strategy=strategy,
    )
    assert result is not None
    assert result.loss_func is not None
    size = 12 - 3 * result.rank * (kind == "penalty")  # whose ranks differ in the number of parts
    batch = torch.randn(size, 4), torch.arange(size) % 3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(10):  # the first and the tenth are tested
            if own_loop:
                result.loss_func(batch, result.model(batch[0])).backward()
            else:
                result.train_step(batch)
    assert kind != "annealed" or model.num_calls == 10 * result.job.step.num_micro_batches
    return [text for one in told if "over samples" in (text := str(one.message))]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [["ddp"], ["fsdp"], ["fsdp", ("amp_native", "bf16")]], ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_penalty_in_a_sum_is_told_of_on_all_ranks(strategy: list[Any], kind: str) -> None:
    words = "the loss is not a sum over samples: that of a batch is"
    for told in run_ranks(_told_of_sum, 2, args=(strategy, kind), timeout_s=60):
        assert [text.startswith(words) for text in told] == [True] * (kind in ("penalty", "mean"))
        assert all("counts once for each. Multiply it by the batch's share" in text for text in told)


@pytest.mark.parametrize(("num", "kinds"), [(1, ()), (2, ("penalty", "mean"))])
def test_a_penalty_in_a_sum_is_told_of_where_micro_batches_add_up(num: int, kinds: Sequence[str]) -> None:
    for kind in LOSSES:
        told = _told_of_sum([("gradient_accumulation", num)] if num > 1 else [], kind)
        assert len(told) == (kind in kinds), kind


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_a_sum_in_a_custom_loop_is_told_of_whatever_the_step_does(kind: str) -> None:
    for told in run_ranks(partial(_told_of_sum, ["ddp"], kind, own_loop=True), 2, timeout_s=60):
        assert [text.startswith("the loss is not a mean over samples") for text in told] == [True] * (
            kind == "sum"
        )
