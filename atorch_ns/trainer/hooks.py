"""TrainHook: what a Trainer calls on every rank between its steps, and the chain of all hooks of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atorch_ns.errors import InputError


@dataclass
class TrainStepMetrics:
    """Metrics of a training step; ``None`` where there are none.

    Attributes:
        train_loss, loss: the loss, as ``loss_reduction`` says.
        lr: the learning rate of the first group.
        gnorm: the norm of all gradients before they were clipped.
        train_wall: seconds.
        cuda_gb_allocated, cuda_gb_reserved: the largest memory in use, and reserved by torch, GB.
        cuda_gb_free: memory of this device that nobody has.
    """

    train_loss: float
    loss: float
    lr: float
    gnorm: float
    train_wall: float
    cuda_gb_allocated: float | None = None
    cuda_gb_reserved: float | None = None
    cuda_gb_free: float | None = None


@dataclass
class ValMetrics:
    """Metrics of a validation.

    Attributes:
        val_loss: the mean over all micro-batches of all ranks.
        val_wall: seconds.
    """

    val_loss: float
    val_wall: float


@dataclass
class AggregatedOutputs:
    """Outputs of the micro-batches of a step, over all ranks.

    Attributes:
        loss_sum: the sum of their losses.
        num_batches: number of micro-batches.
        num_tokens: number of tokens, if gradients are means over tokens.
        aggregated_outputs: anything else.
    """

    loss_sum: float = None  # type: ignore[assignment]  # so that one who forgets it is told
    num_batches: int = None  # type: ignore[assignment]
    num_tokens: int | None = None
    aggregated_outputs: Any = None

    @property
    def mean_loss(self) -> float:
        """The mean of the losses."""
        return self.loss_sum / self.num_batches

    def require_tokens(self) -> int:
        """The number of tokens.

        Raises:
            InputError: if there is none.
        """
        if not self.num_tokens:
            raise InputError(
                "grad_reduction=per-token-mean: aggregate_outputs_fn must return num_tokens, a positive number; it returned "
                f"{self.num_tokens!r}."
            )
        return self.num_tokens


class TrainHook:
    """Hooks to override, called on all ranks in the order model, optimizer, scheduler, ``hook``.

    Arguments are keywords, so a function must take all of these names, or ``**kwargs``.
    """

    def after_setup(self, trainer: Any) -> None:
        """Called after everything has been created, except when ``run_mode`` is ``compile``."""

    def on_finalize(self, trainer: Any) -> None:
        """Called when training is over."""

    def on_train_start(self, trainer: Any) -> None:
        """Before the first step."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last step."""

    def on_val_start(self, trainer: Any) -> None:
        """Before a validation."""

    def on_val_end(self, trainer: Any, val_loss: float) -> None:
        """After a validation."""

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """After the last step of an epoch."""

    def on_train_step_start(self, trainer: Any, batches: list[Any]) -> None:
        """Before the forward passes of a step."""

    def on_train_step_end(self, trainer: Any, outputs: list[Any]) -> None:
        """After the backward passes of a step."""

    def on_val_step_start(self, trainer: Any, batches: list[Any]) -> None:
        """Before some micro-batches are validated."""

    def on_val_step_end(self, trainer: Any, outputs: list[Any]) -> None:
        """After some micro-batches are validated."""

    def on_step_start(self, trainer: Any, epoch: int, idx: int) -> None:
        """Before a step: the ``idx``-th of its epoch, from 0."""

    def on_step_end(
        self,
        trainer: Any,
        epoch: int,
        idx: int,
        step_metrics: TrainStepMetrics,
        aggregated_outputs: AggregatedOutputs,
    ) -> None:
        """After a step."""

    def after_aggregate_train_step_outputs(
        self, trainer: Any, aggregated_outputs: AggregatedOutputs, train_loss: float
    ) -> None:
        """Called after the outputs of a step are summed over all ranks."""

    def after_aggregate_val_step_outputs(
        self, trainer: Any, aggregated_outputs: AggregatedOutputs, val_loss: float
    ) -> None:
        """Called after the outputs of some validated micro-batches are summed over all ranks."""

    def before_zero_grad(self, trainer: Any) -> None:
        """Before gradients are cleared."""

    def after_zero_grad(self, trainer: Any) -> None:
        """After gradients are cleared."""

    def before_sync_grad(self, trainer: Any) -> None:
        """Before the first byte of gradients is sent."""

    def after_sync_grad(self, trainer: Any) -> None:
        """Called once gradients are those of all ranks."""

    def before_gnorm_clip(self, trainer: Any) -> None:
        """Before the norm of gradients is taken, and they are clipped."""

    def after_gnorm_clip(self, trainer: Any, gnorm: torch.Tensor) -> None:
        """After gradients are clipped; ``gnorm`` is the norm before, 0-d."""

    def before_optimizer_step(self, trainer: Any) -> None:
        """Before the update."""

    def after_optimizer_step(self, trainer: Any) -> None:
        """After the update."""

    def before_log_train_metrics(
        self, trainer: Any, step_metrics: TrainStepMetrics, aggregated_outputs: AggregatedOutputs
    ) -> None:
        """Before metrics of a step are logged; they may be changed."""

    def before_log_val_metrics(self, trainer: Any, metrics: ValMetrics) -> None:
        """Before metrics of a validation are logged; they may be changed."""

    def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint is loaded. Data from a merge or other rank count are lists by rank."""

    def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is saved. It includes data added to the dictionary, for each rank."""


HOOKS = tuple(name for name in vars(TrainHook) if not name.startswith("_"))
"""The names of all hooks."""


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    _, trainer, *others = inspect.signature(getattr(TrainHook, name)).parameters  # self comes first
    if inspect.iscoroutinefunction(function):
        raise InputError(f"hook {name}: it is asynchronous, but hooks are not awaited.")
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(others))  # refused before training
    except TypeError as error:
        what = getattr(function, "__qualname__", function)
        parameters = ", ".join([trainer, *others])
        raise InputError(
            f"hook {name}: {what} is called with ({parameters}), but does not accept these: {error}."
        ) from None
    except ValueError:  # a callable without a signature that Python can read
        return


class HookChain:
    """All hooks of a run, called one after another.

    Args:
        trainer: the first argument of hooks.
        hooks: objects, of which only instances of :class:`TrainHook` are used.
        functions: functions by hook, called last.

    Raises:
        InputError: for a hook that does not accept its arguments.
    """

    def __init__(
        self, trainer: Any, hooks: Iterable[Any], functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._trainer = trainer
        self._called: dict[str, list[Callable[..., Any]]] = {name: [] for name in HOOKS}
        for hook in hooks:
            if isinstance(hook, TrainHook):
                for name in HOOKS:
                    method = getattr(hook, name)
                    if getattr(method, "__func__", method) is not getattr(TrainHook, name):  # overridden
                        self._called[name].append(method)
        for name, function in functions.items():
            self._called[name].append(function)
        for name, methods in self._called.items():
            for function in methods:
                _check_signature(name, function)

    def has(self, name: str) -> bool:
        """Returns whether a hook has any functions."""
        return bool(self._called[name])

    def call(self, name: str, **arguments: Any) -> None:
        """Calls all hooks of a name."""
        for function in self._called[name]:
            function(self._trainer, **arguments)
