"""Which plans amount to the same: what does nothing on this cluster is taken out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from atorch_ns.strategy import Plan

__all__ = ["effective"]

_DEFAULT = Plan()
_OF_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tensor": ("tensor_sequence", "parallel_loss"),
        "sequence": ("sequence_exchange", "sequence_blocks"),
        "expert": ("experts",),
        "pipeline": ("schedule", "stages_per_rank", "split_method", "split_points"),
    }
)
"""Settings that mean nothing without an axis."""


def effective(plan: Plan) -> Plan:
    """The plan with everything taken out that changes nothing; equal for plans that run alike.

    Axes of size 1 shard nothing. An axis ``zero`` that nothing is sharded over is more of ``data``, and one
    without a ``data`` beside it is what ``data`` would be. Without
    ranks that see different data there is nothing to synchronise, and settings of sharding, recomputation and
    buckets mean nothing where nothing is sharded, recomputed or reduced.
    """
    parameters = _dividing(plan, plan.parameters_over)
    gradients = _dividing(plan, plan.gradients_over)
    optimizer = _dividing(plan, plan.optimizer_over)
    changes: dict[str, Any] = {
        "axes": _axes(plan, {*parameters, *gradients, *optimizer}),
        "parameters_over": parameters,
        "gradients_over": gradients,
        "optimizer_over": optimizer,
        "extras": tuple(sorted(plan.extras, key=lambda extra: extra.method)),
    }
    if plan.rank_order == tuple(sorted(plan.rank_order or ())):
        changes["rank_order"] = None
    if plan.num_data_ranks == 1:
        changes["gradient_sync"] = "none"
    for name in _meaningless(plan, bool(parameters or gradients), bool(parameters or gradients or optimizer)):
        changes[name] = getattr(_DEFAULT, name)
    sizes = dict(changes["axes"])
    if sizes.get("data", 1) == 1 and sizes.get("zero", 1) > 1:
        changes |= _renamed(changes)
    return replace(plan, **changes)


def _meaningless(plan: Plan, shards: bool, shards_states: bool) -> Iterator[str]:
    """The settings that mean nothing in this plan.

    Args:
        plan: of a strategy.
        shards: whether parameters or gradients are sharded.
        shards_states: whether anything is.
    """
    if not shards:
        yield from ("units", "keeps_gathered", "gather_dtype", "reduce_dtype", "prefetched_units")
    if not shards_states:
        yield "shard_layout"
    if plan.num_data_ranks == 1 or plan.gradient_sync == "none":
        yield "bucket_bytes"
    if plan.recompute == "none":
        yield from ("recompute_every", "recomputed", "saved_operators")
    for axis, names in _OF_AXES.items():
        if plan.size(axis) == 1:
            yield from names


def _dividing(plan: Plan, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in axes if plan.size(name) > 1)


def _axes(plan: Plan, used: set[str]) -> tuple[tuple[str, int], ...]:
    axes = tuple((name, size) for name, size in plan.axes if size > 1)
    if "zero" in used or plan.size("zero") == 1:
        return axes
    others = tuple((name, size) for name, size in axes if name not in ("data", "zero"))
    return (*others, ("data", plan.num_data_ranks))


def _renamed(changes: dict[str, Any]) -> dict[str, Any]:
    """All ranks along ``data`` instead of all along ``zero``."""
    over = ("parameters_over", "gradients_over", "optimizer_over")
    renamed: dict[str, Any] = {
        name: tuple("data" if axis == "zero" else axis for axis in changes[name]) for name in over
    }
    renamed["axes"] = tuple(("data" if name == "zero" else name, size) for name, size in changes["axes"])
    return renamed
