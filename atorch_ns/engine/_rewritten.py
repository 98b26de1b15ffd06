"""The costs of a model whose modules a method replaces: it is profiled a second time, as it will be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.method import Method, Registry
from atorch_ns.profile import Profile, Segment, Trace, copy_structure

__all__ = ["with_replaced_costs"]


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
        if type(method).rewritten is not Method.rewritten:
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
