"""Canonical form of a plan, for comparison: settings without effect on this cluster are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from atorch_ns.strategy import MODEL_AXES, Plan


def canonical(plan: Plan) -> Plan:
    """Returns the plan without settings that change nothing. It is equal for plans that run alike.

    Axes of size 1 shard nothing. An axis ``zero`` over which nothing is sharded is merged into ``data``, or
    becomes ``data`` if there is none. Without ranks that see different data there is nothing to
    synchronise. Settings of sharding, recomputation, buckets and axes mean nothing where nothing is sharded,
    recomputed, reduced or divided: the fields of a plan name the condition they stand under.
    """
    sharding = plan.sharding
    # The axes that really divide something, for each of parameters, gradients and optimizer states.
    over = {name: tuple(axis for axis in getattr(sharding, name) if plan.size(axis) > 1) for name in _SHARDED}
    *model, optimizer = over.values()
    conditions = {
        "shards_model": any(model),
        "shards": any(model) or bool(optimizer),
        "reduces": plan.num_data_ranks > 1 and plan.gradient_sync != "none",
        "recomputes": plan.recomputation.kind != "none",
    }
    changes: dict[str, Any] = {
        "axes": _canonical_axes(plan, {axis for axes in over.values() for axis in axes}),
        "extras": tuple(sorted(plan.extras, key=lambda extra: extra.method)),  # in any order
        **{axis: getattr(_DEFAULT, axis) for axis in MODEL_AXES if plan.size(axis) == 1},
        "sharding": {**over, **_idle_defaults(sharding, conditions)},
        "recomputation": _idle_defaults(plan.recomputation, conditions),
    }
    if plan.size("pipeline") == 1 and plan.recomputation.share == "auto":  # of one stage, all blocks
        changes["recomputation"] |= {"share": None, "every": 1}
    if plan.rank_order == tuple(sorted(plan.rank_order or ())):  # 0, 1, 2, … as by default
        changes["rank_order"] = None
    if plan.num_data_ranks == 1 and not any(over.values()):
        changes["gradient_sync"] = "none"
    sizes = dict(changes["axes"])  # after ``zero`` was merged into ``data`` where it shards nothing
    if sizes.get("data", 1) == 1 and sizes.get("zero", 1) > 1:
        changes["axes"] = tuple((_rename_zero_axis(name), size) for name, size in changes["axes"])
        changes["sharding"] |= {name: tuple(map(_rename_zero_axis, axes)) for name, axes in over.items()}
    return plan.changed(**changes)


_DEFAULT = Plan()
_SHARDED = ("parameters_over", "gradients_over", "optimizer_over")


def _idle_defaults(group: Any, conditions: Mapping[str, bool]) -> dict[str, Any]:
    # Fields whose condition does not hold change nothing.
    return {
        field.name: field.default
        for field in fields(group)
        if "only_where" in field.metadata and not conditions[field.metadata["only_where"]]
    }


def _canonical_axes(plan: Plan, shard_axes: set[str]) -> tuple[tuple[str, int], ...]:
    axes = tuple((name, size) for name, size in plan.axes if size > 1)
    if "zero" in shard_axes or plan.size("zero") == 1:
        return axes
    # Nothing is sharded over ``zero``, so all data ranks are alike.
    others = tuple((name, size) for name, size in axes if name not in ("data", "zero"))
    return (*others, ("data", plan.num_data_ranks))


def _rename_zero_axis(axis: str) -> str:
    return "data" if axis == "zero" else axis
