"""Preparation of a Trainer's model by parallelize, a strategy file or a search, each with the same Result."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atorch_ns.api import auto_accelerate
from atorch_ns.apply import attach_optimizer
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Result
from atorch_ns.job.model import OriginalModel
from atorch_ns.parallel import ComputeConfig, ParallelModule
from atorch_ns.parallel.parallelize import own_loss
from atorch_ns.trainer.args import TrainerArgs
from atorch_ns.trainer.batches import sample_of
from atorch_ns.trainer.components import make
from atorch_ns.trainer.model import make_model, takes_by_name
from atorch_ns.trainer.policy import Policy, divide_module
from atorch_ns.trainer.submodules import job_of, parallelize_modules


def compute_config(args: TrainerArgs, cluster: Cluster) -> ComputeConfig:
    """The configuration's ranks, by default all of them, each a scale unit."""
    return args.compute_config or ComputeConfig(1, cluster.world_size, use_end2end=True)


def compile_plan(args: TrainerArgs, dataset: Any) -> None:
    """Only creates plans, without other ranks.

    Raises:
        InputError: if a strategy is used instead of a plan.
    """
    model, cluster = make_model(args), Cluster.detect()
    if args.model.parallel_modules:
        parallelize_modules(
            args, model, compute_config(args, cluster), cluster, sample=_read_sample(args, dataset, cluster)
        )
    else:
        _divide_model(args, model, dataset, cluster)


def prepare(args: TrainerArgs, dataset: Any, cluster: Cluster) -> tuple[Result, nn.Module]:
    """The job that trains the model, with optimizer and scheduler, and the trained module. Collective.

    Raises:
        InputError: on all ranks, for a configuration that cannot be trained.
    """
    policy = cluster.agree(lambda: Policy.of(args.pas_policy), what="reading the policy")
    model = cluster.agree(lambda: make_model(args), what="making the model")
    optimizer = functools.partial(make, args.optimizer.type, options=args.optimizer.args, what="optimizer")
    module: nn.Module = model
    if args.model.parallel_modules:
        result = _with_parallel_modules(args, model, dataset, cluster, optimizer=optimizer)
    elif policy.rule is not None:
        parallel_module = _divide_model(args, model, dataset, cluster)
        assert isinstance(parallel_module, ParallelModule)
        module, result = parallel_module, attach_optimizer(parallel_module.result, optimizer)
    else:
        sample = _read_sample(args, dataset, cluster)
        _, outcome, _ = auto_accelerate(
            model,
            optimizer,
            loss_func=functools.partial(own_loss, type(model).__qualname__),
            model_input_format="unpack_dict" if takes_by_name(model, sample) else None,
            load_strategy=policy.strategy,
            sample_batch=sample,
            batch_size=args.global_batch_size
            or args.micro_batch_size * cluster.world_size * (args.grad_accumulation_steps or 1),
        )
        assert outcome is not None
        result, module = outcome, outcome.model
    if args.save_strategy_to_file is not None:
        path, strategy = args.save_strategy_to_file, result.strategy
        cluster.on_first(lambda: strategy.save(path), what="saving the strategy")
    # An infinite limit clips nothing, but the norm of gradients is computed, which hooks and logs need.
    result.job.inputs = replace(result.job.inputs, max_grad_norm=args.optimizer.clip_gnorm or math.inf)
    if args.lr_scheduler is None:
        return result, module
    config = args.lr_scheduler
    scheduler = cluster.agree(
        lambda: make(config.type, result.optim, options=config.args, what="lr_scheduler"),
        what="making the scheduler",
    )
    return result.having(lr_scheduler=scheduler), module


def _with_parallel_modules(
    args: TrainerArgs,
    model: nn.Module,
    dataset: Any,
    cluster: Cluster,
    *,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> Result:
    sample = _read_sample(args, dataset, cluster)
    inputs = Inputs(model=model, model_input_format="unpack_dict" if takes_by_name(model, sample) else None)
    original = OriginalModel.of(inputs)
    parts = parallelize_modules(args, model, compute_config(args, cluster), cluster, sample=sample)
    return job_of(inputs, original, parts, optimizer)


def _read_sample(args: TrainerArgs, dataset: Any, cluster: Cluster) -> Any:
    def read() -> Any:
        with random_states_kept():  # training draws the same numbers as without a plan
            return sample_of(args, dataset)

    return cluster.agree(read, what="reading a sample")


def _divide_model(
    args: TrainerArgs, model: nn.Module, dataset: Any, cluster: Cluster
) -> ParallelModule | None:
    first = next(iter(inspect.signature(model.forward).parameters), None)
    if first is None:
        raise InputError("model.type: forward must take a sample as its first argument; it takes nothing.")
    sample = _read_sample(args, dataset, cluster)
    dummies = dict(sample) if takes_by_name(model, sample) else {first: sample}
    return divide_module(args, args, model, dummies, config=compute_config(args, cluster), cluster=cluster)
