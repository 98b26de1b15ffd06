"""Many runs on one set of ranks, each held against one process by a test of its own."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.data.batch import call_model, split_batch
from atorch_ns.errors import AtorchError
from atorch_ns.job import Result
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import (
    BF16_GLOBAL_BATCH,
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
    snapshot,
)
from atorch_ns.testing.workers import run_ranks

T = TypeVar("T")

AUTOCAST = {"autocast_dtype": torch.bfloat16, "global_batch": BF16_GLOBAL_BATCH}
AUTOCAST_FP16 = {"autocast_dtype": torch.float16, "global_batch": BF16_GLOBAL_BATCH}


@dataclass(frozen=True)
class Scenario:
    """A strategy, and what one process does that it must equal.

    Attributes:
        case: name of the model.
        strategy: as ``load_strategy``.
        arguments: of ``accelerated_run``.
        reference: of ``reference_run``.
    """

    case: str
    strategy: list[Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> Trajectory:
        """Trains under the strategy, on all ranks."""
        arguments = dict(self.arguments)
        if "global_batch" in self.reference:
            arguments["global_batch"] = self.reference["global_batch"]
        return accelerated_run(get_case(self.case), self.strategy, **arguments)


Runs = list[dict[str, Trajectory | str]]


def named(names: Iterable[str], *, often: Container[str]) -> list[Any]:
    """Parameters of a test, one a name; all but those that are to run ``often`` are slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(name, id=name, marks=() if name in often else slow) for name in names]


def selected(request: pytest.FixtureRequest, runs: Mapping[str, T]) -> dict[str, T]:
    """The runs that the selected tests of a module ask for, by the parameter ``name``."""
    names = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    }
    return {name: run for name, run in runs.items() if name in names}


def run_scenarios(scenarios: Mapping[str, Scenario], num_ranks: int) -> Runs:
    """What every rank did in every scenario: a trajectory, or the traceback of what it raised."""
    for name in {scenario.case for scenario in scenarios.values()}:
        get_case(name).build()  # imports what ranks would import
    return run_ranks(_run_all, num_ranks, args=(scenarios,), timeout_s=220)


def assert_equals_one_process(scenario: Scenario, name: str, runs: Runs) -> None:
    """Every parameter on every rank, and the losses."""
    found = [run[name] for run in runs]
    for rank, trajectory in enumerate(found):
        assert not isinstance(trajectory, str), f"rank {rank}:\n{trajectory}"
    trajectories = [trajectory for trajectory in found if not isinstance(trajectory, str)]
    assert_ranks_agree(trajectories)
    report = compare(reference_run(get_case(scenario.case), **scenario.reference), trajectories[0])
    if "autocast_dtype" in scenario.reference:  # rounding of activations differs from the first bit on
        assert report.max_loss_error < 1e-3
        assert report.max_param_error < 0.1
    else:
        assert_parity(report)


def _run_all(scenarios: Mapping[str, Scenario]) -> dict[str, Trajectory | str]:
    return {name: _attempt(scenario.run) for name, scenario in scenarios.items()}


def _attempt(run: Callable[[], Trajectory]) -> Trajectory | str:
    try:
        return run()
    except Exception:
        return traceback.format_exc()


def accumulating_step(
    result: Result, batch: Any, *, before: Callable[[Result, bool], object] = lambda *_: None
) -> torch.Tensor:
    """The plain loop over two micro-batches, which knows nothing of synchronisation.

    Args:
        result: what auto_accelerate gave.
        batch: this rank's part of a global batch.
        before: called before each micro-batch with whether it is the last.
    """
    assert result.optim is not None
    assert result.loss_func is not None
    micro_batches = split_batch(result.prepare_input(batch, result.job.device), 2)
    result.optim.zero_grad()
    total = torch.zeros(())
    for position, micro_batch in enumerate(micro_batches):
        before(result, position == 1)
        output = call_model(result.model, micro_batch, result.job.inputs.model_input_format)
        loss = result.loss_func(micro_batch, output) / 2
        if result.args["use_optim_backward"]:
            result.optim.backward(loss)  # type: ignore[attr-defined]
        else:
            loss.backward()
        total += loss.detach()
    result.optim.step()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """No decay for vectors, another learning rate for matrices, found by clean names."""
    named = dict(model.named_parameters())
    assert all(part not in name for name in named for part in ("_wrapped", "_fsdp", "module."))
    small = [
        named[name]
        for name, parameter in get_case("tied_llama").build().named_parameters()
        if parameter.ndim < 2
    ]
    rest = [parameter for parameter in named.values() if all(parameter is not other for other in small)]
    return [{"params": small, "weight_decay": 0.0}, {"params": rest, "lr": 3e-3}]


def backward(result: Result, scale: float = 1.0) -> None:
    """One backward pass of this rank's part of a batch of the case mlp."""
    case = get_case("mlp")
    mine = tuple(
        tensor[result.job.data_rank :: result.job.num_data_ranks] for tensor in case.make_batch(8, 0)
    )
    assert result.loss_func is not None
    loss = result.loss_func(mine, call_model(result.model, mine, case.model_input_format)) * scale
    if result.args["use_optim_backward"]:
        result.optim.backward(loss)  # type: ignore[union-attr]
    else:
        loss.backward()


NORM_TYPES = (2.0, 1.0, math.inf)


def norms(strategy: list[Any]) -> list[list[float]]:
    """For every norm: that of the gradients, and what is left of it after clipping to 0.01."""
    result, found = accelerate_case(get_case("mlp"), strategy), []
    for norm_type in NORM_TYPES:
        result.optim.zero_grad()  # type: ignore[union-attr]
        backward(result)
        before = result.clip_grad_norm_(0.01, norm_type)
        found.append([float(before), float(result.clip_grad_norm_(1e9, norm_type))])
    return found


def assert_norms(found: list[list[float]]) -> None:
    """What :func:`norms` gave on a rank is what one process has."""
    case = get_case("mlp")
    model, batch = case.build(), case.make_batch(8, 0)
    case.loss_func(batch, case.call(model, batch)).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    expected = [float(nn.utils.get_total_norm(gradients, norm_type)) for norm_type in NORM_TYPES]
    assert [before for before, _ in found] == pytest.approx(expected, rel=1e-5)
    assert [after for _, after in found] == pytest.approx([0.01] * len(NORM_TYPES), rel=1e-3)


def bad_step(strategy: list[Any]) -> tuple[bool, bool, bool, bool]:
    """A step with an infinite gradient on rank 1, then one without.

    Returns:
        Whether the first was skipped; left the weights alone; whether the second was skipped; whether all
        weights are finite in the end.
    """
    result = accelerate_case(get_case("mlp"), strategy)
    assert result.optim is not None
    before = snapshot(result.model)
    backward(result, scale=math.inf if result.job.data_rank == 1 else 1.0)
    result.optim.step()
    after, skipped = snapshot(result.model), result.train_step.skipped
    result.optim.zero_grad()
    backward(result)
    result.optim.step()
    unchanged = all(torch.equal(after[name], before[name]) for name in before)
    finite = all(bool(value.isfinite().all()) for value in snapshot(result.model).values())
    return skipped, unchanged, result.train_step.skipped, finite


def scheduled(strategy: list[Any]) -> Trajectory:
    """Two groups of parameters, a scheduler and a dry run before the first step."""

    def step(result: Result, batch: Any) -> torch.Tensor:
        loss = result.train_step(batch)
        result.lr_scheduler.step()
        return loss

    return accelerated_run(
        get_case("tied_llama"),
        strategy,
        step=step,
        optim_param_func=two_groups,
        lr_scheduler_cls=torch.optim.lr_scheduler.LambdaLR,
        lr_scheduler_args={"lr_lambda": lambda epoch: 1.0 / (1 + epoch)},
        ignore_dryrun_on_load_strategy=False,
    )


def error_of(action: Callable[[], object], kind: type[Exception] = AtorchError) -> str:
    """Class and message of what ``action`` raises."""
    with pytest.raises(kind) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def plain_loop_step(result: Result, batch: Any) -> torch.Tensor:
    """One step written out as the specification shows it, with the model called by the case's format."""
    assert result.optim is not None
    assert result.loss_func is not None
    device = result.job.device
    data = result.prepare_input(batch, device)
    result.optim.zero_grad()
    loss = result.loss_func(data, call_model(result.model, data, result.job.inputs.model_input_format))
    if result.args["use_optim_backward"]:
        result.optim.backward(loss)  # type: ignore[attr-defined]
    else:
        loss.backward()
    result.optim.step()
    mean: torch.Tensor = loss.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean
