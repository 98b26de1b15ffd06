"""Applying a resolved strategy: every method does its part to a job, and the job is built."""

from __future__ import annotations

import uuid

import torch

from atorch_ns.apply.build import build
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, InputError
from atorch_ns.job.census import Census
from atorch_ns.job.inputs import Inputs
from atorch_ns.job.job import Job
from atorch_ns.job.result import Result
from atorch_ns.method import Phase, Resolved


def dry_run(result: Result) -> torch.Tensor:
    """Runs the first batch forward and backward without stepping; collective.

    Weights, buffers, data position, optimizer and the caller's random states are as before.

    Returns:
        The loss, 0-d.

    Raises:
        InputError: if there is nothing to run, or the loss is not finite.
    """
    if result.dataloader is None or result.loss_func is None or result.optim is None:
        raise InputError("a dry run needs dataset, loss_func and optim_func.")
    position = result.dataloader.state_dict()
    buffers = {name: buffer.clone() for name, buffer in result.model.named_buffers()}
    with random_states_kept(result.job.device):
        batch = next(iter(result.dataloader))
        loss = result.train_step.forward_backward(batch)
        result.train_step.reduce()
    result.optim.zero_grad()
    result.dataloader.load_state_dict(position)
    with torch.no_grad():
        for name, buffer in result.model.named_buffers():
            buffer.copy_(buffers[name])
    if not torch.isfinite(loss):
        raise InputError(f"the dry run's loss is {float(loss)}; check the model, the data and the precision.")
    return loss


def apply_strategy(inputs: Inputs, cluster: Cluster, resolved: Resolved) -> Result:
    """Applies a strategy to the user's objects; collective where there is a process group.

    The caller's random states are restored. The model is changed in place where methods do so.

    Raises:
        AtorchError: what a method or a user's function found wrong; on all ranks, where the failure of one
            can be seen before ranks communicate.
    """
    with random_states_kept(torch.device(cluster.device)):
        return _apply(inputs, cluster, resolved)


def _apply(inputs: Inputs, cluster: Cluster, resolved: Resolved) -> Result:
    # For values that all ranks draw alike; torch's own of a script that sets none is any number of 64 bits.
    seed, name = cluster.from_first((torch.initial_seed() % 2**63, uuid.uuid4().hex))
    job = cluster.agree(
        lambda: Job.start(inputs, cluster, resolved.plan, seed=seed, name=name),
        what="grouping the parameters",
    )
    census = Census(inputs.model)
    for chosen in resolved.chosen:
        if chosen.method.phase is Phase.CUT:
            job.keep_structure()
        try:
            chosen.method.apply(job, chosen.config)
        except AtorchError as error:  # a search asks who would refuse again
            error.refused_by = chosen.method.name
            raise
    cluster.agree(lambda: census.check(job), what="looking for what the strategy would break")
    if job.optimizer.take_over is not None:  # such a backend communicates while it builds
        return build(job, resolved)
    return cluster.agree(lambda: build(job, resolved), what="building optimizer and data")
