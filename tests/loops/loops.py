"""Pieces of loops: optimizers, steps, and what happens between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from atorch_ns import Result
from tests.loops.models import WIDTH

BATCH: Final = 8
NUM_STEPS: Final = 4
X: Final = torch.randn(
    BATCH * NUM_STEPS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)

Loss = Callable[[Any, Any], Tensor]


def mean_square(batch: Tensor, output: Tensor) -> Tensor:
    return (output - batch).square().mean()


def huber(batch: Tensor, output: Tensor) -> Tensor:
    return nn.functional.huber_loss(output, batch)


def counted(batch: Tensor, output: Tensor) -> Tensor:
    """A mean over the elements that count, other numbers of which are in every batch."""
    counts = batch > 0
    return (output - batch)[counts].square().mean()


def num_counted(batch: Tensor) -> Tensor:
    return (batch > 0).sum()


LOSSES: Final[Mapping[str, Loss]] = {loss.__name__: loss for loss in (mean_square, huber, counted)}


class Decaying(torch.optim.SGD):
    """With methods of its own, and operators on lists of all parameters."""

    def train(self) -> None:
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        torch._foreach_mul_(parameters, 0.99)  # type: ignore[attr-defined]
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)  # type: ignore[attr-defined]


class Nested(torch.optim.Optimizer):
    """An optimizer of optimizers."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(list(params), {"lr": lr})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.parts = [
            torch.optim.SGD([p for p in parameters if p.ndim == 2], lr=lr, momentum=0.9),
            torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=lr),
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


OPTIMIZERS: Final[Mapping[str, tuple[Any, dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adam, one by one": (torch.optim.Adam, {"lr": 1e-2, "foreach": False, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
    "decaying": (Decaying, {"lr": 0.1}),
    "nested": (Nested, {"lr": 1e-2}),
}


class Signed(torch.optim.SGD):
    """What a loop makes by itself."""


@dataclass
class Training:
    """What a loop works with, in one process or under a strategy.

    Attributes:
        result: ``None`` in one process.
        num_calls: of a step that counts its own.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    loss: Loss
    result: Result | None = None
    num_calls: int = 0


Step = Callable[[Training, Tensor], None]


def plain(t: Training, batch: Tensor) -> None:
    """What a front end's own step stands for."""
    if t.result is not None:
        t.result.train_step(batch)
    else:
        by_hand(t, batch)


def by_hand(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    t.optimizer.step()


def keeping_zeros(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad(set_to_none=False)
    t.loss(batch, t.model(batch)).backward()
    t.optimizer.step()


def zeroed_by_the_model(t: Training, batch: Tensor) -> None:
    t.model.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    t.optimizer.step()


def zeroed_between(t: Training, batch: Tensor) -> None:
    """Between the forward and the backward pass."""
    loss = t.loss(batch, t.model(batch))
    t.model.zero_grad()
    loss.backward()
    t.optimizer.step()


def zeroed_after(t: Training, batch: Tensor) -> None:
    t.loss(batch, t.model(batch)).backward()
    t.optimizer.step()
    for parameter in t.model.parameters():
        parameter.grad = None


def by_closure(t: Training, batch: Tensor) -> None:
    def closure() -> Tensor:
        t.optimizer.zero_grad()
        loss = t.loss(batch, t.model(batch))
        loss.backward()
        return loss

    t.optimizer.step(closure)  # type: ignore[arg-type]


def twice(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    output = t.model(batch)
    t.loss(batch, output).backward(retain_graph=True)
    output.abs().mean().backward()
    t.optimizer.step()


def two_outputs(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    first, second = t.model(batch), t.model(2 * batch)
    t.loss(batch, first).backward()
    second.abs().mean().backward()
    t.optimizer.step()


def sum_of_outputs(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    (t.loss(batch, t.model(batch)) + t.model(-batch).abs().mean()).backward()
    t.optimizer.step()


def penalty(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    given = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(t.model(given).square().sum(), given, create_graph=True)
    (t.loss(batch, t.model(batch)) + gradient.square().mean()).backward()
    t.optimizer.step()


def another_method(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    t.loss(batch, t.model.encode(batch)).backward()
    t.optimizer.step()


def teacher(t: Training, batch: Tensor) -> None:
    """A forward pass without gradients gives the aim of one with gradients."""
    t.optimizer.zero_grad()
    with torch.no_grad():
        aim = t.model(batch)
    t.loss(0.5 * aim, t.model(batch)).backward()
    t.optimizer.step()


def in_parts(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    for part in batch.chunk(2):
        (t.loss(part, t.model(part)) / 2).backward()
    t.optimizer.step()


def in_parts_without_sync(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    first, second = batch.chunk(2)
    if t.result is None:
        (t.loss(first, t.model(first)) / 2).backward()
    else:
        with t.result.no_sync():
            (t.loss(first, t.model(first)) / 2).backward()
    (t.loss(second, t.model(second)) / 2).backward()
    t.optimizer.step()


def clipped(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    if t.result is None:
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
    else:
        t.result.clip_grad_norm_(0.1)
    t.optimizer.step()


def clipped_by_torch(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
    t.optimizer.step()


def clipped_by_numbers(t: Training, batch: Tensor) -> None:
    """By a norm that is a number of Python's."""
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    gradients = [p.grad for p in t.model.parameters() if p.grad is not None]
    norm = sum(gradient.norm().item() ** 2 for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / (norm + 1e-6)))
    t.optimizer.step()


def hooked_between(t: Training, batch: Tensor) -> None:
    """Functions of gradients for one backward pass."""
    t.optimizer.zero_grad()
    loss = t.loss(batch, t.model(batch))
    handles = [
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        for p in t.model.parameters()
        if p.requires_grad
    ]
    loss.backward()
    for handle in handles:
        handle.remove()
    t.optimizer.step()


def scaled_by_hand(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    (8 * t.loss(batch, t.model(batch))).backward()
    for parameter in t.model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(8)
    t.optimizer.step()


def gradients_by_function(t: Training, batch: Tensor) -> None:
    """Gradients that no backward pass has given to parameters."""
    trained = [parameter for parameter in t.model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(t.loss(batch, t.model(batch)), trained, allow_unused=True)
    for parameter, gradient in zip(trained, found, strict=True):
        parameter.grad = gradient
    t.optimizer.step()


def regularised(t: Training, batch: Tensor) -> None:
    """The loss reads the weights."""
    t.optimizer.zero_grad()
    weights = sum(parameter.square().sum() for parameter in t.model.parameters() if parameter.requires_grad)
    (t.loss(batch, t.model(batch)) + 1e-2 * weights).backward()
    t.optimizer.step()


def regularised_in_place(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    loss, total = t.loss(batch, t.model(batch)), torch.zeros((), dtype=batch.dtype)
    loss += 1e-2 * sum(p.square().sum() for p in t.model.parameters() if p.requires_grad)
    for parameter in t.model.parameters():
        if parameter.requires_grad:
            total += 1e-3 * parameter.abs().sum()
    (loss + total).backward()
    t.optimizer.step()


def regularised_after(t: Training, batch: Tensor) -> None:
    """A penalty of the weights as they are between the loss's passes, with a backward pass of its own after the loss's."""
    t.optimizer.zero_grad()
    loss = t.loss(batch, t.model(batch))
    weights = sum(parameter.square().sum() for parameter in t.model.parameters() if parameter.requires_grad)
    loss.backward()
    (1e-2 * weights).backward()
    t.optimizer.step()


def anchored(t: Training, batch: Tensor) -> None:
    """The loss reads the weights beside other tensors, and as matrices."""
    t.optimizer.zero_grad()
    loss = t.loss(batch, t.model(batch))
    for name, parameter in t.model.named_parameters():
        if parameter.requires_grad and "in_proj" not in name:
            loss = (
                loss
                + 1e-2 * (parameter - torch.full(parameter.shape, 0.1, dtype=torch.float64)).square().sum()
            )
        if parameter.requires_grad and parameter.ndim == 2:
            product = parameter.T @ parameter
            loss = loss + 1e-3 * (product - torch.eye(len(product), dtype=torch.float64)).square().sum()
    loss.backward()
    t.optimizer.step()


def masked_gradients(t: Training, batch: Tensor) -> None:
    """Gradients are written to by other tensors, by index and by mask."""
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    for name, parameter in t.model.named_parameters():
        if parameter.grad is not None and parameter.ndim == 2 and "in_proj" not in name:
            parameter.grad.mul_(torch.ones(parameter.shape, dtype=torch.float64).tril(3))
            parameter.grad[0].mul_(0.5)
            parameter.grad[parameter.grad.abs() > 0.05] = 0.05
    t.optimizer.step()


def regularised_whole(t: Training, batch: Tensor) -> None:
    """The loss reads the weights as whole numbers, whatever they are divided over."""
    t.optimizer.zero_grad()
    numbers: list[Any] = [p.square().sum() for p in t.model.parameters() if p.requires_grad]
    weights = sum(number.full_tensor() if hasattr(number, "full_tensor") else number for number in numbers)
    (t.loss(batch, t.model(batch)) + 1e-2 * weights).backward()
    t.optimizer.step()


def backward_of_some(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    head = [p for name, p in t.model.named_parameters() if "head" in name and p.requires_grad]
    t.loss(batch, t.model(batch)).backward(inputs=head)
    t.optimizer.step()


def signs(t: Training, batch: Tensor) -> None:
    """Other gradients are put in place of those of the backward pass."""
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    for parameter in t.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.sign()
    t.optimizer.step()


def never_zeroed(t: Training, batch: Tensor) -> None:
    t.loss(batch, t.model(batch)).backward()
    t.optimizer.step()


def stepped_twice(t: Training, batch: Tensor) -> None:
    by_hand(t, batch)
    t.optimizer.step()


def hooked_output(t: Training, batch: Tensor) -> None:
    t.optimizer.zero_grad()
    output = t.model(batch)
    output.register_hook(lambda gradient: gradient * 0.5)
    t.loss(batch, output).backward()
    t.optimizer.step()


def gradients_of_inputs(t: Training, batch: Tensor) -> None:
    """As an adversary: one backward pass changes the samples of the next."""
    given = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(t.loss(batch, t.model(given)), given)
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch + 0.1 * gradient.sign())).backward()
    t.optimizer.step()


def ascended(t: Training, batch: Tensor) -> None:
    """Sharpness-aware: weights are moved, gradients taken there, and weights moved back."""
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    with torch.no_grad():
        moves = [(p, 0.05 * p.grad) for p in t.model.parameters() if p.grad is not None]
        for parameter, move in moves:
            parameter.add_(move)
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    with torch.no_grad():
        for parameter, move in moves:
            parameter.sub_(move)
    t.optimizer.step()


def own_optimizer(t: Training, batch: Tensor) -> None:
    """An optimizer that the loop makes of the model it was given."""
    if not isinstance(t.optimizer, Signed):
        t.optimizer = Signed(t.model.parameters(), lr=0.1, momentum=0.9)
    by_hand(t, batch)


def looked_at(t: Training, batch: Tensor) -> None:
    """The model is looked at between the backward pass and the update, and written after a look."""
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    with torch.no_grad():
        t.model(batch)
    t.optimizer.step()
    with torch.no_grad():
        t.model(batch)
        for parameter in t.model.parameters():
            parameter.mul_(0.99)


def probed(t: Training, batch: Tensor) -> None:
    """Forward passes that no backward pass follows, of the model and of a method, between the backward pass and the update."""
    t.optimizer.zero_grad()
    t.loss(batch, t.model(batch)).backward()
    t.model(batch)
    t.model.encode(batch)
    t.optimizer.step()


def skipped(t: Training, batch: Tensor) -> None:
    """All ranks leave a step out, after the forward pass."""
    t.optimizer.zero_grad()
    loss = t.loss(batch, t.model(batch))
    t.num_calls += 1
    if t.num_calls == 2:
        return
    loss.backward()
    t.optimizer.step()


def evaluated(t: Training, batch: Tensor) -> None:
    t.model.eval()
    with torch.no_grad():
        t.model(batch[:2])
    t.model.train()
    plain(t, batch)


STEPS: Final[Mapping[str, Step]] = {
    step.__name__: step
    for step in (
        plain,
        by_hand,
        keeping_zeros,
        zeroed_by_the_model,
        zeroed_between,
        zeroed_after,
        by_closure,
        twice,
        two_outputs,
        sum_of_outputs,
        penalty,
        another_method,
        teacher,
        in_parts,
        in_parts_without_sync,
        clipped,
        clipped_by_torch,
        clipped_by_numbers,
        hooked_between,
        scaled_by_hand,
        gradients_by_function,
        evaluated,
        regularised,
        regularised_in_place,
        regularised_after,
        anchored,
        masked_gradients,
        regularised_whole,
        backward_of_some,
        signs,
        never_zeroed,
        stepped_twice,
        hooked_output,
        gradients_of_inputs,
        ascended,
        own_optimizer,
        looked_at,
        probed,
        skipped,
    )
}
TAKES_SPARSE: Final = ("sgd", "momentum", "adagrad")
WEIGHTED: Final = ("plain", "evaluated")
"""Steps that can be told the weights of a mean."""


def thaw(t: Training) -> None:
    for parameter in t.model.parameters():
        parameter.requires_grad_(True)


def freeze(t: Training) -> None:
    for name, parameter in t.model.named_parameters():
        if "blocks.0." in name:
            parameter.requires_grad_(False)


def lower_rate(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] *= 0.5


@torch.no_grad()
def shrink_weights(t: Training) -> None:
    for parameter in t.model.parameters():
        parameter.mul_(0.9)


@torch.no_grad()
def change_data(t: Training) -> None:
    for parameter in t.model.parameters():
        parameter.data.mul_(0.9)


def hook_gradients_late(t: Training) -> None:
    for parameter in t.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@torch.no_grad()
def shake_weights(t: Training) -> None:
    for name, parameter in t.model.named_parameters():
        if "in_proj" in name:  # under ``tensor`` it lies in another order, as its page says
            continue
        torch.manual_seed(parameter.numel())  # a stage has some of them
        parameter.add_(torch.randn_like(parameter), alpha=0.01)


@torch.no_grad()
def write_rows(t: Training) -> None:
    """By index, slice and view."""
    for name, parameter in t.model.named_parameters():
        if parameter.ndim and "in_proj" not in name:  # as above
            parameter[0].zero_()
            parameter[1:2] *= 0.5
            parameter.data.flatten()[-2:].mul_(2)


@torch.no_grad()
def prune(t: Training) -> None:
    for parameter in t.model.parameters():
        parameter[parameter.abs() < 0.02] = 0


@torch.no_grad()
def replace_data(t: Training) -> None:
    for parameter in t.model.parameters():
        parameter.data = 0.9 * parameter.data


@torch.no_grad()
def rebuild_from_vector(t: Training) -> None:
    parameters = list(t.model.parameters())
    vector = torch.nn.utils.parameters_to_vector(parameters)
    torch.nn.utils.vector_to_parameters(0.9 * vector, parameters)


def look_at_states(t: Training) -> None:
    t.model.state_dict()
    t.optimizer.state_dict()


def reload_states(t: Training) -> None:
    t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))


def forget_states(t: Training) -> None:
    t.optimizer.state.clear()


def weaken_blocks(t: Training) -> None:
    for block in t.model.blocks:
        block.strength = 0.7


EVENTS: Final[Mapping[str, Callable[[Training], None]]] = {
    event.__name__: event
    for event in (
        thaw,
        freeze,
        lower_rate,
        shrink_weights,
        change_data,
        hook_gradients_late,
        shake_weights,
        write_rows,
        prune,
        replace_data,
        rebuild_from_vector,
        look_at_states,
        reload_states,
        forget_states,
        weaken_blocks,
    )
}
