"""Search problem: the profile, the workload and the priced candidates, found on rank 0."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from atorch_ns.capture.nests import unique_tensors_of
from atorch_ns.capture.structure import copy_structure
from atorch_ns.cluster import Cluster
from atorch_ns.engine.checks import check_collectives, check_memory, check_price
from atorch_ns.engine.request import SearchRequest
from atorch_ns.estimate import Workload, estimate, unpredicted_reason
from atorch_ns.job import optimizer_arguments
from atorch_ns.job.sampling import Sample, forward_loss
from atorch_ns.method import Registry, ReplacesModules, resolve
from atorch_ns.profile import Profile, ProfileDatabase, Segment, Trace, measure_blocks, profile_model
from atorch_ns.search import (
    Candidate,
    Priced,
    Profiling,
    SearchOutcome,
    SearchSetting,
    SearchSettings,
    explore,
    memory_limit,
    tried_strategies,
)
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan
from atorch_ns.text import error_text


def with_replaced_costs(
    profile: Profile,
    model: nn.Module,
    cluster: Cluster,
    registry: Registry,
    *,
    trace_of: Callable[[nn.Module], Profile],
) -> Profile:
    """The profile with the costs of plans with ``replaced``, where a method in the search sets it.

    Where the model cannot be profiled with its modules replaced, or has other segments then, such plans have
    the costs of ``model``, and a note says so. ``trace_of`` profiles a model. ``model`` is not changed.
    """
    trace = profile.trace
    assert trace is not None
    try:
        rewritten = _edit_copy(profile, model, cluster, registry)
        if rewritten is None:
            return profile
        other = trace_of(rewritten).trace
    except Exception as error:  # a replacement is the user's code
        reason = " ".join(error_text(error, 160).split())
        return _add_note(profile, f"With modules replaced, the model could not be profiled ({reason})")
    if other is None or not _has_same_segments(trace, other):
        return _add_note(profile, "With modules replaced, the model has other segments")
    segments = tuple(
        replace(mine, replaced_costs=theirs.costs)
        for mine, theirs in zip(trace.segments, other.segments, strict=True)
    )
    return replace(profile, trace=replace(trace, segments=segments))


def _edit_copy(profile: Profile, model: nn.Module, cluster: Cluster, registry: Registry) -> nn.Module | None:
    for method in registry:
        if isinstance(method, ReplacesModules):
            # Another copy for each method, which may change it; tensors are shared.
            copy = copy_structure(model, lambda _, tensor: tensor, {})
            new_model = method.rewritten(copy, profile, cluster)
            if new_model is not None:
                return new_model
    return None


def _has_same_segments(trace: Trace, other: Trace) -> bool:
    # Costs are matched by position, so that names and blocks must agree in order.
    def shape(segment: Segment) -> tuple[str, tuple[str, ...]]:
        return segment.name, segment.paths

    return [shape(segment) for segment in trace.segments] == [shape(segment) for segment in other.segments]


def _add_note(profile: Profile, what: str) -> Profile:
    assert profile.trace is not None
    note = f"{what}. The savings are not predicted: such strategies are priced without them."
    return replace(profile, trace=replace(profile.trace, notes=(*profile.trace.notes, note)))


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """The search as it stands before the first trial.

    Attributes:
        profile: profile of the model, with a trace.
        cluster: cluster with hardware figures.
        workload: samples and tokens of one step.
        registry: the methods.
        setting: summary of these for reports.
        candidates: the priced candidates, best first.
    """

    profile: Profile
    cluster: Cluster
    workload: Workload
    registry: Registry
    setting: SearchSetting
    candidates: tuple[Candidate, ...]

    def checks(self, outcome: SearchOutcome) -> tuple[str, ...]:
        """The self-checks of the winner that need no further trial, as sentences."""
        row = outcome.winner
        if row is None:
            return ()
        results = [
            check_price(row.candidate, self.profile, self.cluster, self.workload, registry=self.registry)
        ]
        if row.trial is not None and row.trial.succeeded and row.candidate.estimate is not None:
            plan = resolve(row.candidate.strategy, self.cluster, self.registry, profile=self.profile).plan
            price = estimate(plan, self.profile, self.cluster, self.workload)
            results.append(
                check_collectives(price.collectives, row.trial.collectives, reason=unpredicted_reason(plan))
            )
            results.append(check_memory(price, row.trial.peak_bytes))
        return tuple(str(check) for check in results)


def build_problem(
    sample: Sample, cluster: Cluster, registry: Registry, request: SearchRequest
) -> SearchProblem:
    """Profiles the model and prices the candidates.

    Raises:
        InputError: if the model cannot be profiled, or the caller's constraints leave no candidate.
    """
    inputs = sample.inputs
    request.observer(Profiling(type(inputs.model).__name__))
    start = time.monotonic()
    profile = _build_profile(sample, cluster, registry, request.settings)
    assert profile.trace is not None
    profile_end = time.monotonic()
    workload = Workload(global_batch=sample.global_batch, num_tokens=profile.trace.num_tokens)
    fingerprint = _search_fingerprint(profile, sample, cluster, registry, request=request)
    space = explore(
        profile,
        cluster,
        workload,
        registry,
        settings=request.settings,
        excluded=request.excluded,
        included=[
            *(request.included or ()),
            *_given_micro_batches(registry, inputs.gradient_accumulation_steps),
        ],
        base=request.base,
        # Earlier trials count only for strategies that are candidates again.
        tried=() if request.search_history is None else tried_strategies(request.search_history, fingerprint),
    )
    setting = SearchSetting(
        model=profile.model_class.rpartition(".")[2],
        num_parameters=profile.num_parameters,
        world_size=cluster.world_size,
        num_nodes=cluster.num_nodes,
        device=cluster.device_name,
        memory_limit_bytes=memory_limit(cluster, request.settings).num_bytes,
        global_batch=workload.global_batch,
        num_tokens=workload.num_tokens,
        fingerprint=fingerprint,
        profile_seconds=profile_end - start,
        estimate_seconds=time.monotonic() - profile_end,
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


def _build_profile(sample: Sample, cluster: Cluster, registry: Registry, settings: SearchSettings) -> Profile:
    inputs = sample.inputs
    assert inputs.optim_func is not None
    make_optimizer = optimizer_maker(inputs.optim_func, inputs.optim_args, [inputs.model])
    profile = profile_model(
        inputs.model, sample.batch, forward_loss(inputs), find_dims, make_optimizer=make_optimizer
    )
    profile = with_replaced_costs(
        profile,
        inputs.model,
        cluster,
        registry,
        trace_of=lambda model: profile_model(model, sample.batch, forward_loss(inputs), find_dims),
    )
    return profile if settings.profile_database is None else _time_blocks(profile, sample, cluster, settings)


def _given_micro_batches(registry: Registry, count: int) -> list[tuple[str, Any]]:
    if count == 1:  # the caller gave none
        return []
    # The engine names no method: the one that splits batches makes this plan, and no other, of an empty one.
    target = Plan(num_micro_batches=count)
    for method in registry:
        with contextlib.suppress(ValidationError):  # methods that take no number
            config = method.Config.model_validate(count)
            if method.plan(Plan(), config) == target:
                return [(method.name, config.as_json())]
    return []


def _time_blocks(profile: Profile, sample: Sample, cluster: Cluster, settings: SearchSettings) -> Profile:
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
    notes = (*trace.notes, f"{len(trace.seconds)} block times were measured on {trace.timed_on}")
    new_profile: Profile = replace(profile, trace=replace(trace, notes=notes))
    return new_profile


def optimizer_maker(
    optim_func: Callable[..., torch.optim.Optimizer],
    optim_args: Mapping[str, Any] | None = None,
    models: Sequence[nn.Module] = (),
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A function that makes the optimizer of parameters as a training job does, fused where it can be."""

    @functools.wraps(optim_func)
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        arguments, _ = optimizer_arguments(optim_func, optim_args, [{"params": parameters}], models)
        return optim_func(parameters, **arguments)

    return make


# The settings that decide which strategies are looked for; others decide how and for how long.
_ASKED_FOR = {"objective", "memory_limit_gib", "memory_reserve", "max_micro_batches"}


def _search_fingerprint(
    profile: Profile, sample: Sample, cluster: Cluster, registry: Registry, *, request: SearchRequest
) -> str:
    # Neither weights nor measured figures are part of it: the next job of this kind finds the history.
    assert profile.trace is not None
    # Without dim 0: the sampled batch has another number of rows than a step.
    shapes = [(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in unique_tensors_of(sample.batch)]
    parts = [
        profile.fingerprint,  # structure, shapes and settings of the model
        repr(profile.trace.optimizer),
        f"{sample.global_batch} samples of {shapes}",
        f"{cluster.world_size} of {cluster.device_name} on {cluster.num_nodes} nodes, torch {cluster.torch}",
        repr(sorted(method.name for method in registry)),
        repr((request.included, request.excluded, request.base and request.base.steps)),
        f"accumulates {sample.inputs.gradient_accumulation_steps}",
        request.settings.model_dump_json(include=_ASKED_FOR),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]  # 64 bits
