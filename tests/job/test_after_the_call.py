"""What a script does with parameters and optimizers before and after ``auto_accelerate`` that no strategy has seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.errors import InputError, StepError
from atorch_ns.numerics.script import ScriptWatch, compare_runs
from atorch_ns.testing.workers import run_ranks

pytestmark = pytest.mark.processes
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def trained(strategy: str, *, made_before: bool, parameter_after: bool) -> str:
    """What a step of a loop of one's own says."""
    model = nn.Linear(4, 4)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    _, result, _ = auto_accelerate(model, torch.optim.SGD, optim_args={"lr": 0.1}, load_strategy=[strategy])
    assert result is not None
    scale = nn.Parameter(torch.ones(4))
    if parameter_after:
        result.optim.add_param_group({"params": [scale]})
    (result.model(X) * scale).square().mean().backward()
    try:
        (before if made_before else result.optim).step()
    except StepError as error:
        return str(error)
    return "trained"


def test_an_optimizer_of_parameters_that_were_replaced_does_not_step() -> None:
    (fsdp, _), (ddp, _) = (
        run_ranks(lambda name=name: trained(name, made_before=True, parameter_after=False), 2)
        for name in ("fsdp", "ddp")
    )
    assert "SGD was created with the model's parameters before the strategy" in fsdp
    assert ddp == "trained"  # which replaces none


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_parameter_that_is_not_the_models_is_not_trained(strategy: str) -> None:
    for said in run_ranks(lambda: trained(strategy, made_before=False, parameter_after=True), 2):
        assert "a parameter of shape [4] that is not the model's" in said


def hooked(strategy: str) -> tuple[torch.Tensor, int]:
    """Weights after steps that each have hooks of their own, and for how many parameters hooks are kept."""
    torch.manual_seed(0)
    _, result, _ = auto_accelerate(
        nn.Linear(4, 4), torch.optim.SGD, optim_args={"lr": 0.001}, load_strategy=[strategy]
    )
    assert result is not None
    for _ in range(4):
        result.optim.zero_grad()
        (10 * result.model(X[result.rank :: result.world_size])).square().mean().backward()
        result.optim.step()
        handles = [
            p.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)) for p in result.model.parameters()
        ]
        (10 * result.model(X[result.rank :: result.world_size])).square().mean().backward()
        result.optim.step()
        for handle in handles:
            handle.remove()
    (weight, _) = result.model.parameters()
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole.detach(), len(result.job.gradients.sums._hooks)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_hooks_that_come_and_go_are_called_and_not_kept(strategy: str) -> None:
    ((expected, _),) = run_ranks(lambda: hooked("ddp"), 1)
    for found, kept in run_ranks(lambda: hooked(strategy), 2):
        torch.testing.assert_close(found, expected)
        assert kept == 2


def loaded(num_samples: int, drop_last: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        auto_accelerate(
            nn.Linear(4, 4),
            dataset=list(torch.randn(num_samples, 4)),
            dataloader_args={"batch_size": 4, "drop_last": drop_last},
            load_strategy=["ddp"],
        )
    return [text for one in told if "do not divide" in (text := str(one.message))]


def test_samples_that_are_repeated_are_told_of() -> None:
    cases = [(13, False), (13, True), (14, False)]
    (first, second), *others = (run_ranks(lambda case=case: loaded(*case), 2) for case in cases)
    assert "padded with the epoch's first 1 samples" in first[0]
    assert [second, *others] == [[], [[], []], [[], []]]  # rank 0 warns, and where there is something to say


def recorded(folder: Path) -> None:
    """As ``verify --script`` records it: rank 1 has nothing of either parameter, and so no state of them."""
    torch.manual_seed(0)
    _, result, _ = auto_accelerate(nn.Linear(4, 1), torch.optim.Adam, load_strategy=["zero2"])
    assert result is not None
    watch = ScriptWatch(folder / ("one" if result.world_size == 1 else "ranks"), None, 3)
    watch.follow(result)
    for _ in range(2):
        result.optim.zero_grad()
        result.model(X[result.rank :: result.world_size]).square().mean().backward()
        result.optim.step()


def test_a_script_is_compared_whose_ranks_hold_nothing_of_a_parameter(tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        run_ranks(lambda: recorded(tmp_path), num_ranks)
    first, largest = compare_runs(tmp_path, 2, reduced=False)
    assert first is None
    assert len(largest) == 3


def stepped(rows: tuple[tuple[int, int], tuple[int, int]]) -> list[str]:
    """What steps say whose batches have so many rows, by rank and step."""
    _, result, _ = auto_accelerate(
        nn.Linear(4, 4),
        torch.optim.SGD,
        loss_func=lambda _, output: output.square().mean(),
        optim_args={"lr": 0.1},
        load_strategy=["ddp"],
    )
    assert result is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for num in rows[result.rank]:
            result.train_step(X[:num])
    return [text for one in told if "weight_func" in (text := str(one.message))]


def test_other_numbers_of_samples_are_told_of() -> None:
    first = run_ranks(lambda: stepped(((4, 4), (3, 4))), 2)
    assert ["the batches of the ranks have 3 to 4 samples" in text for (text,) in first] == [True, True]
    quiet, (later,) = run_ranks(lambda: stepped(((4, 4), (4, 3))), 2)
    assert quiet == []
    assert "from one step to the next, this rank's batch has 3 to 4 samples" in later
    assert run_ranks(lambda: stepped(((4, 4), (4, 4))), 2) == [[], []]
    assert run_ranks(lambda: stepped(((4, 3), (0, 0))), 1) == [[]]


def _gradients_of_samples(*strategy: str) -> list[torch.Tensor]:
    """Of each by itself, by torch.func; beside it a frozen model as a job of its own."""
    torch.manual_seed(0)
    auto_accelerate(nn.Linear(4, 4).requires_grad_(False), load_strategy=list(strategy))
    model = nn.Linear(4, 4)
    _, result, _ = auto_accelerate(
        model, torch.optim.SGD, optim_args={"lr": 0.1}, load_strategy=list(strategy)
    )
    assert result is not None
    weights = {name: p.detach() for name, p in result.model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(result.model, weights, (x[None],)).square().mean()

    return [*torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X).values()]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_of_samples_and_frozen_models(strategy: str) -> None:
    expected = _gradients_of_samples()
    for found in run_ranks(_gradients_of_samples, 2, args=(strategy,), timeout_s=60):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda result: result.mean("a"), "mean takes one number; it got 'a'"),
        (lambda result: result.clip_grad_norm_(-1.0), "a non-negative number; it is -1.0"),
        (lambda result: result.clip_grad_norm_(None), "a non-negative number; it is None"),
        (lambda result: result.train_step(torch.ones(0, 4)), "this rank's batch has no rows"),
    ],
)
def test_what_no_loop_can_mean_is_refused(call: Callable[[Any], Any], words: str) -> None:
    _, result, _ = auto_accelerate(
        nn.Linear(4, 4),
        torch.optim.SGD,
        loss_func=lambda batch, output: (output - batch).square().mean(),
        load_strategy=[],
    )
    with pytest.raises(InputError, match=words):
        call(result)
