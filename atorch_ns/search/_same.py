"""Which plans amount to the same: what does nothing on this cluster is taken out."""

from __future__ import annotations

from dataclasses import replace

from atorch_ns.strategy import Plan

__all__ = ["effective"]


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
    plan = replace(
        plan,
        axes=_axes(plan, {*parameters, *gradients, *optimizer}),
        rank_order=None if plan.rank_order == tuple(sorted(plan.rank_order or ())) else plan.rank_order,
        gradient_sync=plan.gradient_sync if plan.num_data_ranks > 1 else "none",
        parameters_over=parameters,
        gradients_over=gradients,
        optimizer_over=optimizer,
        extras=tuple(sorted(plan.extras, key=lambda extra: extra.method)),
    )
    default = Plan()
    if not (parameters or gradients):
        plan = replace(
            plan,
            units=default.units,
            keeps_gathered=default.keeps_gathered,
            gather_dtype=default.gather_dtype,
            reduce_dtype=default.reduce_dtype,
            prefetched_units=default.prefetched_units,
        )
    if plan.size("data") == 1 and plan.size("zero") > 1:
        plan = _renamed(plan)
    if not (parameters or gradients or optimizer):
        plan = replace(plan, shard_layout=default.shard_layout)
    if plan.gradient_sync == "none":
        plan = replace(plan, bucket_bytes=default.bucket_bytes)
    if plan.recompute == "none":
        plan = replace(
            plan,
            recompute_every=default.recompute_every,
            recomputed=default.recomputed,
            saved_operators=default.saved_operators,
        )
    return plan


def _dividing(plan: Plan, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in axes if plan.size(name) > 1)


def _axes(plan: Plan, used: set[str]) -> tuple[tuple[str, int], ...]:
    axes = tuple((name, size) for name, size in plan.axes if size > 1)
    if "zero" in used or plan.size("zero") == 1:
        return axes
    others = tuple((name, size) for name, size in axes if name not in ("data", "zero"))
    return (*others, ("data", plan.num_data_ranks))


def _renamed(plan: Plan) -> Plan:
    """All ranks along ``data`` instead of all along ``zero``."""

    def rename(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("data" if name == "zero" else name for name in axes)

    return replace(
        plan,
        axes=tuple(("data" if name == "zero" else name, size) for name, size in plan.axes),
        parameters_over=rename(plan.parameters_over),
        gradients_over=rename(plan.gradients_over),
        optimizer_over=rename(plan.optimizer_over),
    )
