"""Search problem: the profile, the workload and the priced candidates, found on rank 0."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine.checks import check_collectives, check_memory, check_price
from atorch_ns.engine.request import SearchRequest
from atorch_ns.estimate import Workload, estimate, unpredicted
from atorch_ns.job import Inputs, optimizer_arguments
from atorch_ns.job.sampling import Sample, forward_loss
from atorch_ns.method import Registry, ReplacesModules, resolve
from atorch_ns.profile import (
    Profile,
    ProfileDatabase,
    Segment,
    Trace,
    copy_structure,
    measure_blocks,
    profile_model,
)
from atorch_ns.search import (
    Candidate,
    Priced,
    Profiling,
    SearchOutcome,
    SearchSettings,
    Setting,
    explore,
    memory_limit,
)
from atorch_ns.strategy import Plan


def with_replaced_costs(
    profile: Profile,
    model: nn.Module,
    cluster: Cluster,
    registry: Registry,
    trace_of: Callable[[nn.Module], Profile],
) -> Profile:
    """The profile with the costs of plans with ``replaced``, where a method in the search sets it.

    A model that cannot be profiled with its modules replaced, or whose stretches are then others, keeps its own costs
    for such plans, and a note says so.

    Args:
        profile: of the model as it is, traced.
        model: the model; it is not changed.
        cluster: where it is to run.
        registry: the methods.
        trace_of: profiles a model.
    """
    trace = profile.trace
    assert trace is not None
    try:
        rewritten = _rewritten(profile, model, cluster, registry)
        if rewritten is None:
            return profile
        other = trace_of(rewritten).trace
    except Exception as error:  # a replacement is the user's code
        return _noted(profile, f"With modules replaced the model could not be profiled ({_said(error)})")
    if other is None or not _alike(trace, other):
        return _noted(profile, "With modules replaced the model is divided otherwise")
    segments = tuple(
        replace(mine, replaced_costs=theirs.costs)
        for mine, theirs in zip(trace.segments, other.segments, strict=True)
    )
    return replace(profile, trace=replace(trace, segments=segments))


def _rewritten(profile: Profile, model: nn.Module, cluster: Cluster, registry: Registry) -> nn.Module | None:
    for method in registry:
        if isinstance(method, ReplacesModules):
            copy = copy_structure(model, lambda _, tensor: tensor, {})
            made = method.rewritten(copy, profile, cluster)
            if made is not None:
                return made
    return None


def _alike(one: Trace, other: Trace) -> bool:
    def shape(segment: Segment) -> tuple[str, tuple[str, ...]]:
        return segment.name, segment.paths

    return [shape(segment) for segment in one.segments] == [shape(segment) for segment in other.segments]


def _noted(profile: Profile, what: str) -> Profile:
    assert profile.trace is not None
    note = f"{what}: what it saves is not predicted, and such strategies are priced as without."
    return replace(profile, trace=replace(profile.trace, notes=(*profile.trace.notes, note)))


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """What is known before the first trial.

    Attributes:
        profile: of the model, traced.
        cluster: with hardware figures.
        workload: of one step.
        registry: the methods.
        setting: the same in words and figures, for reports.
        candidates: priced, best first.
    """

    profile: Profile
    cluster: Cluster
    workload: Workload
    registry: Registry
    setting: Setting
    candidates: tuple[Candidate, ...]

    def checks(self, outcome: SearchOutcome) -> tuple[str, ...]:
        """What can be checked of the winner without another trial, as sentences."""
        row = outcome.winner
        if row is None:
            return ()
        done = [check_price(row.candidate, self.profile, self.cluster, self.workload, self.registry)]
        if row.trial is not None and row.trial.succeeded and row.candidate.estimate is not None:
            plan = resolve(row.candidate.strategy, self.cluster, self.registry, profile=self.profile).plan
            predicted = estimate(plan, self.profile, self.cluster, self.workload)
            done.append(
                check_collectives(predicted.collectives, row.trial.collectives, unpredicted=unpredicted(plan))
            )
            done.append(check_memory(predicted, row.trial.peak_bytes))
        return tuple(str(check) for check in done)


def pose(sample: Sample, cluster: Cluster, registry: Registry, request: SearchRequest) -> SearchProblem:
    """Profiles the model and prices the candidates.

    Raises:
        InputError: if the model cannot be profiled, or the caller's wishes leave no candidate.
    """
    inputs = sample.inputs
    request.observer(Profiling(type(inputs.model).__name__))
    begun = time.monotonic()
    profile = profile_model(
        inputs.model, sample.batch, forward_loss(inputs), make_optimizer=_optimizer_maker(inputs)
    )
    profile = with_replaced_costs(
        profile,
        inputs.model,
        cluster,
        registry,
        lambda model: profile_model(model, sample.batch, forward_loss(inputs)),
    )
    if request.settings.profile_database is not None:
        profile = _timed(profile, sample, cluster, request.settings)
    assert profile.trace is not None
    profiled = time.monotonic()
    workload = Workload(global_batch=sample.global_batch, num_tokens=profile.trace.num_tokens)
    space = explore(
        profile,
        cluster,
        workload,
        registry,
        request.settings,
        excluded=request.excluded,
        included=[
            *(request.included or ()),
            *_given_micro_batches(registry, inputs.gradient_accumulation_steps),
        ],
        base=request.base,
        finetune=request.base is not None,
    )
    setting = Setting(
        model=profile.model_class.rpartition(".")[2],
        num_parameters=profile.num_parameters,
        world_size=cluster.world_size,
        num_nodes=cluster.num_nodes,
        device=cluster.device_name,
        memory_limit_bytes=memory_limit(cluster, request.settings).num_bytes,
        global_batch=workload.global_batch,
        num_tokens=workload.num_tokens,
        fingerprint=_fingerprint(profile, cluster, workload, space.candidates),
        profile_seconds=profiled - begun,
        estimate_seconds=time.monotonic() - profiled,
        notes=(*profile.trace.notes, *space.notes),
    )
    request.observer(Priced(setting, space.candidates))
    return SearchProblem(
        profile=profile,
        cluster=cluster,
        workload=workload,
        registry=registry,
        setting=setting,
        candidates=space.candidates,
    )


def _given_micro_batches(registry: Registry, count: int) -> list[tuple[str, Any]]:
    """The method that splits batches, fixed to the count that the caller gave; nothing where none was given.

    Which method that is shows in what it does to a plan.
    """
    if count == 1:
        return []
    wanted = Plan(num_micro_batches=count)
    for method in registry:
        with contextlib.suppress(ValidationError):
            config = method.Config.model_validate(count)
            if method.plan(Plan(), config) == wanted:
                return [(method.name, config.as_json())]
    return []


def _timed(profile: Profile, sample: Sample, cluster: Cluster, settings: SearchSettings) -> Profile:
    """The profile with measured times of its blocks, from the database where it has them."""
    assert settings.profile_database is not None
    trace = measure_blocks(
        sample.inputs.model,
        sample.batch,
        forward_loss(sample.inputs),
        profile,
        device=cluster.device,
        database=ProfileDatabase(Path(settings.profile_database)),
        re_profile=settings.re_profile,
    )
    notes = (*trace.notes, f"{len(trace.seconds)} times of blocks are measured, on {trace.timed_on}")
    timed: Profile = replace(profile, trace=replace(trace, notes=notes))
    return timed


def _optimizer_maker(inputs: Inputs) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        assert inputs.optim_func is not None
        parameters = list(parameters)
        groups = [{"params": parameters}]
        arguments, _ = optimizer_arguments(inputs.optim_func, inputs.optim_args, groups, [inputs.model])
        return inputs.optim_func(parameters, **arguments)

    return make


def _fingerprint(
    profile: Profile, cluster: Cluster, workload: Workload, candidates: Sequence[Candidate]
) -> str:
    """The same for the same model, devices, batch and candidates, whatever the weights."""
    parts = [
        profile.fingerprint,
        cluster.device_name,
        f"{cluster.world_size} ranks on {cluster.num_nodes} nodes",
        cluster.torch,
        str(workload),
        *sorted(candidate.key for candidate in candidates),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
