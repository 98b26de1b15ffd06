"""Application of a strategy for every front end: agreed on by all ranks, done by methods, built as a job."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from atorch_ns.apply.build import build, report_applied
from atorch_ns.capture.random_states import gradients_kept, random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, InputError
from atorch_ns.job.census import Census, carry_late_hooks
from atorch_ns.job.inputs import Inputs
from atorch_ns.job.job import MODEL, Job
from atorch_ns.job.result import Result
from atorch_ns.method import Phase, Resolved, load_registry, resolve
from atorch_ns.profile import Profile
from atorch_ns.strategy import Strategy, canonical_text


def dry_run(result: Result) -> torch.Tensor:
    """Runs the first batch forward and backward without stepping. Collective.

    Weights, buffers, data position, optimizer and the caller's random states are restored.

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


def apply_strategy(inputs: Inputs, cluster: Cluster, resolution: Resolved) -> Result:
    """Applies a strategy to the user's objects. Collective if there is a process group.

    The caller's random states are restored. The model is changed in place where methods do so.

    Raises:
        AtorchError: an error found by a method or a user's function. Raised on all ranks if the failure of
            one can be detected before ranks communicate.
    """
    with random_states_kept(torch.device(cluster.device)), gradients_kept(inputs.model):
        return _apply_methods(inputs, cluster, resolution)


def _apply_methods(inputs: Inputs, cluster: Cluster, resolution: Resolved) -> Result:
    # For values drawn equally by all ranks. torch's own seed, if a script sets none, is any 64-bit number.
    seed, name = cluster.from_first((torch.initial_seed() % 2**63, uuid.uuid4().hex))
    job = cluster.agree(
        lambda: Job.start(inputs, cluster, resolution.plan, seed=seed, name=name),
        what="grouping the parameters",
    )
    census = Census(inputs.model)
    for item in resolution.chosen:
        if item.method.phase is Phase.CUT:
            job.keep_structure()
        try:
            item.method.apply(job, item.config)
        except AtorchError as error:  # a search records the refusing method
            error.refused_by = item.method.name
            raise
    cluster.agree(lambda: census.check(job), what="looking for what the strategy would break")
    make_report = partial(report_applied, resolution)
    if job.optimizer.take_over is not None:  # such a backend communicates while it builds
        return build(job, make_report)
    return cluster.agree(lambda: build(job, make_report), what="building optimizer and data")


def resolve_alike(
    inputs: Inputs,
    cluster: Cluster,
    strategy: Strategy,
    *,
    check: Callable[[Resolved], None] | None = None,
    trains: bool = True,
) -> Resolved:
    """Resolves the strategy for this cluster, checks it on each rank, then compares it over all ranks.

    Args:
        inputs: the user's objects, which are also checked.
        check: raises for inputs that the front end cannot use.
        trains: whether methods may require something to train.

    Raises:
        AtorchError: on all ranks, if one refuses, or they received different inputs.
    """

    def read() -> Resolved:
        inputs.check()
        profile = Profile.of(inputs.model) if trains else None
        resolution = resolve(strategy, cluster, load_registry(), profile=profile)
        if check is not None:
            check(resolution)
        return resolution

    resolution = cluster.agree(read, what="checking the strategy")
    text = canonical_text([[step.name, step.config] for step in resolution.strategy])
    cluster.same_everywhere({"strategy": text, **inputs.digest()})
    return resolution


def make_job(
    inputs: Inputs,
    cluster: Cluster,
    resolution: Resolved,
    *,
    notes: Iterable[str] = (),
    report: Callable[[Result], Any] | None = None,
    takes_late_hooks: bool = True,
) -> Result:
    """Applies a strategy from :func:`resolve_alike`. Collective.

    Args:
        notes: sentences for the report.
        report: creates ``result.report``; ``None`` for the report of applied methods.
        takes_late_hooks: whether gradient hooks may be registered after the call. Nothing would call them
            if gradients are only summed on request.
    """
    result = apply_strategy(inputs, cluster, resolution)
    if takes_late_hooks:
        carry_late_hooks(result.job, result.train_step.observe)
    for note in filter(None, notes):
        result.job.explain(MODEL, note)
    if report is not None:
        result.make_report = lambda: report(result)
    return result
