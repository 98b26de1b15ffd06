"""Parity of a strategy with one process: a measure of every parameter; the loss hides a lost gradient.

The measure is ``max|p - p_ref| / max|p_ref - p_initial|``, the largest deviation in units of the largest
update after some AdamW steps (:mod:`atorch_ns.numerics.reference`). See docs/design/parity.md for reasons.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atorch_ns.capture.nests import map_tensors
from atorch_ns.checkpoint.export import whole_tensors
from atorch_ns.errors import InputError
from atorch_ns.job import Result
from atorch_ns.numerics.reference import clip, distance, finite, update_errors, updates_of
from atorch_ns.testing.models import Case, SyntheticDataset
from atorch_ns.text import first_few
from atorch_ns.torch_compat import plain_name

ADAMW: Final[Mapping[str, Any]] = MappingProxyType({"lr": 1e-2, "weight_decay": 0.1, "eps": 5e-3})
"""The optimizer settings of the measure; docs/design/parity.md says why eps is so large."""
BF16_GLOBAL_BATCH: Final = 128
"""The global batch for comparing losses in bf16; docs/design/parity.md says why it is so large."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Record of a training run.

    Attributes:
        losses: the mean loss over the global batch at each step, before the step's update.
        initial: every parameter before the first step, whole, by canonical name.
        final: the same after the last step.
    """

    losses: list[float]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Deviation of a run from its reference.

    Attributes:
        max_param_error: the largest entry of ``param_errors``; infinite when anything is not finite.
        worst_param: name of that parameter.
        max_loss_error: the largest absolute difference of two losses of the same step.
        param_errors: deviation of every parameter, in units of its update.
        initial_error: the largest absolute difference of the weights the runs began with.
        missing, unexpected: parameters that only the reference, and that only the run has.
    """

    max_param_error: float
    worst_param: str
    max_loss_error: float
    param_errors: Mapping[str, float] = field(repr=False)
    initial_error: float = 0.0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def describe(self) -> str:
        """A readable summary of some lines, the worst parameters first."""
        worst = sorted(self.param_errors.items(), key=lambda item: -item[1])[:5]
        lines = [f"loss off by {self.max_loss_error:.2e}, weights at the start by {self.initial_error:.2e}"]
        lines += [f"missing: {', '.join(self.missing)}"] if self.missing else []
        lines += [f"unexpected: {', '.join(self.unexpected)}"] if self.unexpected else []
        lines += [f"{error:.2e} of its update: {name}" for name, error in worst]
        return "\n  ".join(lines)


def canonical_name(name: str) -> str:
    """A parameter's name as the bare model has it, whatever wraps the model now."""
    name = plain_name(name)
    while name.startswith("module."):  # of DDP and FSDP1
        name = name.removeprefix("module.")
    return name


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Whole copies on the CPU of all parameters, under canonical names; tied ones under each of their names.

    Collective where the model is sharded: every rank must call it.
    """
    with _whole_parameters(model):
        parameters = model.named_parameters(remove_duplicate=False)
        return {canonical_name(name): _gather_to_cpu(parameter) for name, parameter in parameters}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    case: Case,
    *,
    autocast_dtype: torch.dtype | None = None,
    max_norm: float | None = None,
    device: str = "cpu",
) -> Trajectory:
    """Runs the plain loop, one optimizer step per batch. A process group averages losses over its ranks.

    Args:
        model: possibly wrapped; called as the case says.
        optimizer: over the model's parameters.
        batches: this rank's part of each global batch.
        case: gives the loss.
        autocast_dtype: dtype for ``torch.autocast`` in the forward pass; None for no autocast.
        max_norm: norm to clip gradients to; None for no clipping.
        device: device of model and batches, "cpu" or "cuda".
    """
    initial, losses = snapshot(model), []
    for on_cpu in batches:
        batch = map_tensors(lambda tensor: tensor.to(device), on_cpu)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            loss = case.loss_func(batch, case.call(model, batch))
        loss.backward()
        if max_norm is not None:
            clip(model.parameters(), max_norm)
        optimizer.step()
        losses.append(_mean_over_ranks(loss.detach()))
    return Trajectory(losses=losses, initial=initial, final=snapshot(model))


def reference_run(
    case: Case,
    *,
    steps: int = 5,
    global_batch: int = 8,
    seed: int = 0,
    optim_func: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    optim_args: Mapping[str, Any] = ADAMW,
    optim_param_func: Callable[[nn.Module], Any] | None = None,
    autocast_dtype: torch.dtype | None = None,
    max_norm: float | None = None,
    device: str = "cpu",
    prepare: Callable[[nn.Module], object] | None = None,
) -> Trajectory:
    """Trains the case in one process with plain torch, as the reference for strategies.

    The batches are those of ``SyntheticDataset(case, steps * global_batch, seed=seed)`` in order.

    Args:
        case: model, data and loss.
        steps, global_batch: optimizer steps, and samples of each.
        seed: seed of the data.
        optim_func: makes the optimizer from parameters (or groups) and ``optim_args``.
        optim_args: keyword arguments of ``optim_func``.
        optim_param_func: makes parameter groups of the model; None: all parameters in one group.
        autocast_dtype, max_norm, device: see :func:`train`.
        prepare: changes the new model in place before training (a cast, a hook).
    """
    model = case.build().to(device)
    if prepare is not None:
        prepare(model)
    parameters = model.parameters() if optim_param_func is None else optim_param_func(model)
    optimizer = optim_func(parameters, **optim_args)
    data = SyntheticDataset(case, steps * global_batch, seed=seed)
    batches = (data.batch(step, global_batch) for step in range(steps))
    return train(
        model, optimizer, batches, case, autocast_dtype=autocast_dtype, max_norm=max_norm, device=device
    )


def compare(reference: Trajectory, actual: Trajectory) -> ParityReport:
    """Measure ``actual`` against ``reference``, every parameter both have and every loss.

    Raises:
        InputError: the runs have different numbers of steps, or nothing moved in the reference.
    """
    if len(reference.losses) != len(actual.losses):
        raise InputError(
            f"the reference has {len(reference.losses)} steps, but the run has {len(actual.losses)}: "
            "train both on the same batches."
        )
    updates = updates_of(reference.initial, reference.final)
    update = max(updates.values(), default=0.0)
    if not 0.0 < update < math.inf:
        raise InputError(f"the reference's largest update is {update}: it did not train.")
    errors = update_errors(updates, reference.final, actual.final)
    worst = max(errors, key=errors.__getitem__, default="")
    losses = zip(reference.losses, actual.losses, strict=True)
    starts = [
        distance(value, reference.initial[name])
        for name, value in actual.initial.items()
        if name in reference.initial
    ]
    return ParityReport(
        max_param_error=errors.get(worst, math.inf),
        worst_param=worst,
        max_loss_error=max((finite(abs(ours - theirs)) for theirs, ours in losses), default=0.0),
        param_errors=errors,
        initial_error=max(starts, default=0.0),
        missing=tuple(name for name in reference.final if name not in actual.final),
        unexpected=tuple(name for name in actual.final if name not in reference.final),
    )


def assert_parity(report: ParityReport, *, param_tol: float = 2e-4, loss_tol: float = 1e-5) -> None:
    """Raise AssertionError unless every parameter is there and within tolerance, and every loss too."""
    complete = not report.missing and not report.unexpected
    if complete and report.max_param_error <= param_tol and report.max_loss_error <= loss_tol:
        return
    raise AssertionError(
        f"no parity (tolerances: {param_tol:.0e} of a parameter's update, {loss_tol:.0e} in the loss):\n"
        f"  {report.describe()}"
    )


def assert_ranks_agree(trajectories: list[Trajectory]) -> None:
    """Raise AssertionError unless all ranks ended with the same bits in every parameter."""
    first = trajectories[0].final
    for rank, trajectory in enumerate(trajectories[1:], 1):
        differing = [
            name
            for name in first.keys() | trajectory.final.keys()
            if name not in first
            or name not in trajectory.final
            or not torch.equal(first[name], trajectory.final[name])
        ]
        if differing:
            raise AssertionError(
                f"ranks 0 and {rank} ended with different values in {len(differing)} parameters: "
                f"{first_few(sorted(differing))}"
            )


def _gather_to_cpu(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to("cpu", copy=True)


@contextlib.contextmanager
def _whole_parameters(model: nn.Module) -> Iterator[None]:
    # FSDP1 keeps flat parameters; inside of summon_full_params the original ones are there.
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield
    else:
        yield


def _mean_over_ranks(loss: Tensor) -> float:
    if dist.is_initialized():
        loss = loss.clone()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return float(loss.item())


def accelerate_case(
    case: Case,
    strategy: Any,
    *,
    steps: int = 5,
    global_batch: int = 8,
    seed: int = 0,
    model: nn.Module | None = None,
    optim_args: Mapping[str, Any] = ADAMW,
    **arguments: Any,
) -> Result:
    """The case's model, data and loss under ``strategy``; on all ranks of the process group, if there is one.

    Args:
        case: model, data and loss.
        strategy: strategy, in any form of ``load_strategy``.
        steps: number of global batches in the data.
        global_batch: samples a step, over all ranks.
        seed: seed of the data.
        model: replacement for the case's own model.
        optim_args, arguments: arguments of AdamW, and more of ``auto_accelerate``.
    """
    from atorch_ns.api import auto_accelerate

    options: dict[str, Any] = {
        "optim_func": torch.optim.AdamW,
        "optim_args": dict(optim_args),
        "dataset": SyntheticDataset(case, steps * global_batch, seed=seed),
        "dataloader_args": {"batch_size": global_batch},
        "loss_func": case.loss_func,
        "model_input_format": case.model_input_format,
        "load_strategy": strategy,
        **arguments,
    }
    _, result, _ = auto_accelerate(case.build() if model is None else model, **options)
    assert result is not None
    return result


def accelerated_run(
    case: Case, strategy: Any, *, step: Callable[[Result, Any], torch.Tensor] | None = None, **arguments: Any
) -> Trajectory:
    """Trains the case as :func:`reference_run` does, but through ``auto_accelerate``.

    Args:
        case: model, data and loss.
        strategy: strategy, in any form of ``load_strategy``.
        step: trains on one batch and returns the mean loss; ``None`` for ``result.train_step``.
    """
    result = accelerate_case(case, strategy, **arguments)
    initial, losses = whole_parameters(result), []
    assert result.dataloader is not None
    for batch in result.dataloader:
        loss = result.train_step(batch) if step is None else step(result, batch)
        losses.append(float(loss))
    return Trajectory(losses=losses, initial=initial, final=whole_parameters(result))


def whole_parameters(result: Result) -> dict[str, torch.Tensor]:
    """Whole CPU copies of all parameters of the user's model, by the user's names. Collective.

    As :func:`snapshot` of the plain model, on every rank. Where the job keeps fp32 masters, those.
    """
    weights, aliases = whole_tensors(result, everywhere=True, buffers=False), result.job.original.tied
    return {alias: weight for name, weight in weights.items() for alias in (name, *aliases.get(name, ()))}
