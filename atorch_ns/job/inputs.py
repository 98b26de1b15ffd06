"""Inputs: the user's model, optimizer, data and loss, checked once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.data import Reduction, check_model_input_format
from atorch_ns.errors import InputError
from atorch_ns.text import with_article


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The user's model, optimizer, data and loss, as handed to ``auto_accelerate``. Never changed.

    Attributes:
        model: the model; may be on the meta device.
        optim_func: makes an optimizer from ``(parameters, **optim_args)``.
        optim_args: its keyword arguments.
        optim_param_func: makes parameter groups from the model.
        dataset: a torch dataset, map-style or iterable.
        loss_func: ``(batch, output) -> loss``, or a tuple that begins with the loss.
        weight_func: ``batch -> number``, a micro-batch loss's weight in a mean; ``None`` for all alike.
        loss_reduction: whether the loss of a step is the mean or the sum of the losses of all micro-batches.
        prepare_input: ``(batch, device) -> batch``.
        model_input_format: how a batch is passed to the model.
        dataloader_args: arguments of ``torch.utils.data.DataLoader``; the batch size is global.
        distributed_sampler_cls: a class with the interface of ``DistributedSampler``.
        lr_scheduler_cls: makes a scheduler from ``(optimizer, **lr_scheduler_args)``.
        lr_scheduler_args: its keyword arguments.
        find_unused_parameters: passed to DDP where it is used.
        sampler_seed: seed of the default sampler.
        gradient_accumulation_steps: micro-batches that ``train_step`` splits a batch into.
        max_grad_norm: norm that ``train_step`` clips gradients to; ``None`` for no clipping.
        sample_batch: one collated batch, for methods that need shapes early; ``None`` to read the dataset.
        optimizer_is_trusted: whether an optimizer for some of the parameters is used without a test.
        sample_is_micro_batch: whether ``sample_batch`` is one data rank's micro-batch, not a global batch.
    """

    model: nn.Module
    optim_func: Callable[..., torch.optim.Optimizer] | None = None
    optim_args: Mapping[str, Any] | None = None
    optim_param_func: Callable[[nn.Module], Iterable[Any]] | None = None
    dataset: Any = None
    loss_func: Callable[[Any, Any], Any] | None = None
    weight_func: Callable[[Any], Any] | None = None
    loss_reduction: Reduction = "mean"
    prepare_input: Callable[[Any, torch.device], Any] | None = None
    model_input_format: str | None = None
    dataloader_args: Mapping[str, Any] | None = None
    distributed_sampler_cls: type | None = None
    lr_scheduler_cls: Callable[..., Any] | None = None
    lr_scheduler_args: Mapping[str, Any] | None = None
    find_unused_parameters: bool = False
    sampler_seed: int = 0
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    sample_batch: Any = None
    sample_is_micro_batch: bool = False
    optimizer_is_trusted: bool = False

    def check(self) -> None:
        """Checks every argument and reports all that is wrong at once.

        Raises:
            InputError: naming the arguments.
        """
        problems = [*self._type_problems(), *self._combination_problems()]
        try:
            check_model_input_format(self.model_input_format)
        except InputError as error:
            problems.append(str(error))
        if problems:
            raise InputError("\n".join(problems))

    def digest(self) -> dict[str, str]:
        """Values that must be equal on all ranks, which would otherwise train apart or wait forever."""
        args = self.dataloader_args or {}
        parameters = list(self.model.named_parameters())
        shapes = [f"{name}{list(p.shape)}{p.dtype}{p.requires_grad}" for name, p in parameters]
        has_size = hasattr(self.dataset, "__len__")
        return {
            "model": f"{type(self.model).__qualname__}, {len(parameters)} parameters, "
            f"{hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}",
            "optim_func": getattr(self.optim_func, "__qualname__", type(self.optim_func).__qualname__),
            "optim_args": _plain_text(self.optim_args),
            "loss_func": "given" if self.loss_func is not None else "None",
            "weight_func": "given" if self.weight_func is not None else "None",
            "loss_reduction": self.loss_reduction,
            "dataset": f"{len(self.dataset)} samples" if has_size else type(self.dataset).__qualname__,
            "dataloader_args": _plain_text(
                {k: args[k] for k in ("batch_size", "drop_last", "shuffle") if k in args}
            ),
            "gradient_accumulation_steps": str(self.gradient_accumulation_steps),
            "max_grad_norm": str(self.max_grad_norm),
            "sampler_seed": str(self.sampler_seed),
        }

    def _type_problems(self) -> list[str]:
        problems = []
        if not isinstance(self.model, nn.Module):
            problems.append(f"model must be a torch.nn.Module; it is {_describe_kind(self.model)}.")
        elif _is_distributed(self.model):
            problems.append(
                f"model is already distributed ({type(self.model).__qualname__}). Pass the plain model; the "
                "strategy's methods wrap and shard it."
            )
        functions = (
            "optim_func", "optim_param_func", "loss_func", "weight_func", "prepare_input",
            "lr_scheduler_cls",
        )  # fmt: skip
        for name in functions:
            value = getattr(self, name)
            if value is not None and not callable(value):
                problems.append(f"{name} must be callable; it is {_describe_kind(value)}.")
        for name in ("optim_args", "dataloader_args", "lr_scheduler_args"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                problems.append(f"{name} must be a dictionary; it is {_describe_kind(value)}.")
        cls = self.distributed_sampler_cls
        if cls is not None and not isinstance(cls, type):
            problems.append(f"distributed_sampler_cls must be a class; it is {_describe_kind(cls)}.")
        steps = self.gradient_accumulation_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:  # True is an int
            problems.append(f"gradient_accumulation_steps must be a positive integer; it is {steps!r}.")
        norm = self.max_grad_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or norm <= 0):
            problems.append(f"max_grad_norm must be a positive number or None; it is {norm!r}.")
        return problems

    def _combination_problems(self) -> list[str]:
        problems = []
        if self.loss_reduction not in ("mean", "sum"):
            problems.append(f"loss_reduction is 'mean' or 'sum'; it is {self.loss_reduction!r}.")
        elif self.weight_func is not None and self.loss_reduction == "sum":
            problems.append(
                "weight_func is for means, and loss_reduction='sum' adds losses as they are. Leave out one."
            )
        if self.optim_func is None:
            names = ("optim_args", "optim_param_func", "lr_scheduler_cls")
            problems += [
                f"{name} is given without optim_func, so nothing would use it."
                for name in names
                if getattr(self, name) is not None
            ]
        if self.lr_scheduler_cls is None and self.lr_scheduler_args is not None:
            problems.append("lr_scheduler_args is given without lr_scheduler_cls.")
        if self.dataset is None and (self.dataloader_args or self.distributed_sampler_cls):
            problems.append("dataloader_args and distributed_sampler_cls need dataset; it is None.")
        if self.dataset is not None and not _is_dataset(self.dataset):
            problems.append(
                f"dataset must have __getitem__ and __len__, or __iter__; it is {_describe_kind(self.dataset)}. "
                "To bring a DataLoader of your own, pass dataset=None and iterate over yours."
            )
        return problems


def _plain_text(mapping: Mapping[str, Any] | None) -> str:
    plain = (bool, int, float, str, tuple, list, type(None))  # reprs of others may contain addresses
    items = sorted((mapping or {}).items())
    return ", ".join(
        f"{k}={v!r}" if isinstance(v, plain) else f"{k}: {type(v).__qualname__}" for k, v in items
    )


def _is_dataset(value: Any) -> bool:
    if isinstance(value, torch.utils.data.DataLoader):
        return False
    return hasattr(value, "__getitem__") or hasattr(value, "__iter__")


def _is_distributed(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
    is_wrapped = any(isinstance(module, wrappers) for module in model.modules())
    return is_wrapped or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _describe_kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}; make an instance"
    return with_article(value)
