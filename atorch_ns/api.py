"""auto_accelerate: from a model, an optimizer, data, a loss and a strategy to what trains."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atorch_ns._version import __version__
from atorch_ns.cluster import Cluster, agree, join_process_group, same_everywhere
from atorch_ns.errors import InputError, StrategyFileError
from atorch_ns.job import Inputs, Result, apply_strategy, dry_run
from atorch_ns.method import Registry, Resolved, load_registry, resolve
from atorch_ns.profile import Profile
from atorch_ns.strategy import Strategy, canonical_text

__all__ = ["auto_accelerate"]

log = logging.getLogger("atorch_ns")


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., torch.optim.Optimizer] | None = None,
    dataset: Any = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    prepare_input: Callable[[Any, torch.device], Any] | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], Iterable[Any]] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: type | None = None,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    load_strategy: Any = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: str | PathLike[str] | None = None,
    *,
    ignore_dryrun_on_load_strategy: bool = True,
    verbose: bool = False,
    time_limit: float | None = None,
    find_unused_parameters: bool = False,
    sampler_seed: int = 0,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    raise_errors: bool = True,
) -> tuple[bool, Result | None, Strategy | None]:
    """Applies a strategy to a model, its optimizer, data and loss.

    Works in one process and, started by torchrun, on all its processes; every rank must call it with the
    same arguments. The model is changed in place where methods do so; no other argument is.

    Args:
        model: a plain model, on any device, or on meta to be materialised shard by shard.
        optim_func: ``(parameters, **optim_args) -> torch.optim.Optimizer``.
        dataset: map-style or iterable; ``None`` to bring a data loader of your own.
        loss_func: ``(batch, output) -> loss``, or a tuple that begins with the loss. A mean over the batch.
        prepare_input: ``(batch, device) -> batch``; ``None`` moves the batch's tensors to the device.
        model_input_format: ``None`` calls ``model(batch)``, ``"unpack_sequence"`` ``model(*batch)``,
            ``"unpack_dict"`` ``model(**batch)``.
        optim_args: keyword arguments of ``optim_func``.
        optim_param_func: ``model -> parameters or groups`` for options per parameter.
        dataloader_args: arguments of ``torch.utils.data.DataLoader``; ``batch_size`` is global.
        distributed_sampler_cls: a class with the interface of ``DistributedSampler``.
        excluded: methods that the fully automatic mode may not use.
        included: methods that the fully automatic mode must use.
        load_strategy: the strategy: a list of names and ``(name, config)`` pairs, a ``Strategy``, a path or
            the bytes of a strategy file.
        lr_scheduler_cls: ``(optimizer, **lr_scheduler_args) -> scheduler``; stepping it is the caller's.
        lr_scheduler_args: its keyword arguments.
        finetune_strategy: search around a given strategy; needs the fully automatic mode.
        save_strategy_to_file: where rank 0 writes the strategy as applied, JSON or YAML by suffix.
        ignore_dryrun_on_load_strategy: ``False`` runs one forward and backward pass before returning.
        verbose: log what was applied and why, on rank 0.
        time_limit: seconds for the fully automatic mode.
        find_unused_parameters: for DDP.
        sampler_seed: seed of the default sampler.
        gradient_accumulation_steps: micro-batches that ``train_step`` splits each batch into.
        max_grad_norm: norm to which ``train_step`` clips; ``None`` for no clipping.
        raise_errors: ``False`` logs the reason of a failure and returns ``(False, None, None)``.

    Returns:
        ``(True, result, best_strategy)``: what to train with, and the strategy as applied.

    Raises:
        AtorchError: the tree in :mod:`atorch_ns.errors`; on all ranks, if the failure of one can be seen
            before ranks communicate.
    """
    inputs = Inputs(
        model=model,
        optim_func=optim_func,
        dataset=dataset,
        loss_func=loss_func,
        prepare_input=prepare_input,
        model_input_format=model_input_format,
        optim_args=optim_args,
        optim_param_func=optim_param_func,
        dataloader_args=dataloader_args,
        distributed_sampler_cls=distributed_sampler_cls,
        lr_scheduler_cls=lr_scheduler_cls,
        lr_scheduler_args=lr_scheduler_args,
        find_unused_parameters=find_unused_parameters,
        sampler_seed=sampler_seed,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=max_grad_norm,
    )
    try:
        cluster = Cluster.detect()
        join_process_group(cluster)
        resolved = _resolved(
            inputs, cluster, load_strategy, save_strategy_to_file, excluded, included, finetune_strategy
        )
        result = apply_strategy(inputs, cluster, resolved)
        if not ignore_dryrun_on_load_strategy:
            dry_run(result)
        strategy = _save(result, cluster, save_strategy_to_file)
    except Exception as error:
        if raise_errors:
            raise
        log.error("auto_accelerate failed: %s: %s", type(error).__name__, error)
        return False, None, None
    _tell(result, cluster, resolved, verbose)
    return True, result, strategy


def _resolved(
    inputs: Inputs,
    cluster: Cluster,
    load_strategy: Any,
    save_to: str | PathLike[str] | None,
    excluded: Sequence[str] | None,
    included: Sequence[str] | None,
    finetune: bool,
) -> Resolved:
    """Reads and checks everything that can be checked without the other ranks, then compares with them."""

    def read() -> Resolved:
        inputs.check()
        registry = load_registry()
        _check_names(registry, excluded=excluded, included=included)
        if load_strategy is None or finetune:
            raise InputError(
                "the fully automatic mode (load_strategy=None, finetune_strategy=True) is not part of this "
                "version. Name the methods: load_strategy=['fsdp', ('amp_native', 'bf16'), 'checkpoint']."
            )
        if save_to is not None and not Path(save_to).parent.is_dir():
            raise StrategyFileError(f"the folder of save_strategy_to_file={str(save_to)!r} does not exist")
        strategy = Strategy.load(load_strategy)
        return resolve(strategy, cluster, registry, profile=Profile.of(inputs.model))

    resolved = agree(read, what="checking the arguments", distributed=cluster.distributed)
    text = canonical_text([[step.name, step.config] for step in resolved.strategy])
    same_everywhere({"strategy": text, **inputs.digest()}, distributed=cluster.distributed)
    return resolved


def _check_names(registry: Registry, **lists: Sequence[str] | None) -> None:
    for argument, names in lists.items():
        if isinstance(names, str):
            raise InputError(f"{argument} is a list of method names; write [{names!r}].")
        unknown = [str(registry.unknown(name)) for name in names or () if name not in registry]
        if unknown:
            raise InputError(f"{argument}: " + " ".join(unknown))


def _save(result: Result, cluster: Cluster, path: str | PathLike[str] | None) -> Strategy:
    applied = result.report.strategy
    strategy = Strategy(
        applied.steps,
        requires=applied.requires,
        provenance={
            "made_by": f"atorch_ns {__version__}",
            "model": result.job.model_class,
            "num_parameters": result.report.num_parameters,
        },
    )

    def write() -> None:
        if path is not None and cluster.rank == 0:
            strategy.save(path)

    agree(write, what="saving the strategy", distributed=cluster.distributed)
    return strategy


def _tell(result: Result, cluster: Cluster, resolved: Resolved, verbose: bool) -> None:
    if cluster.rank != 0:
        return
    left_out = [note.text for note in resolved.notes if note.kind == "left out"]
    if left_out:
        warnings.warn("\n".join(left_out), stacklevel=3)
    log.log(logging.INFO if not verbose else logging.WARNING, "strategy as applied:\n%s", result.report)
