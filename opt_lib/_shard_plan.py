"""What fully sharded training means for a plan, shared by fsdp and zero2."""

from __future__ import annotations

from dataclasses import replace

from atorch_ns.strategy import Plan
from opt_lib._shard_config import ShardConfig

__all__ = ["plan_shards"]

_ALIGNMENT_BYTES = 16
"""``_FLAT_PARAM_ALIGNMENT``: with ``use_orig_params`` FSDP1 lets every parameter begin at such an address."""


def plan_shards(plan: Plan, config: ShardConfig, *, keep_gathered: bool) -> Plan:
    """The plan with parameters, gradients and optimizer states divided over the axes for shards.

    In a pipeline parameters stay gathered until the step is over, unless the user says otherwise. torch keeps what
    a backward pass has gathered for the micro-batch that comes next in any case, so that all of a stage is gathered
    when a backward pass ends. To free it after forward passes lowers the peak by what one micro-batch keeps, at most,
    and gathers every unit again for each micro-batch.

    Args:
        plan: as the methods before left it.
        config: the settings.
        keep_gathered: whether the method keeps parameters gathered from forward to backward.
    """
    axes = plan.shard_axes
    keeps = keep_gathered or config.keeps_gathered
    if config.version == 2 and config.sharding_strategy is None and plan.size("pipeline") > 1:
        keeps = True
    if config.version == 2 and config.reshard_after_forward is not None:
        keeps = config.reshard_after_forward is False
    precision = config.mixed_precision
    explicit = precision if precision is not None and precision != "auto" else None
    flat = config.version == 1
    return replace(
        plan,
        gradient_sync="reduce_scatter",
        parameters_over=axes,
        gradients_over=axes,
        optimizer_over=axes,
        offload=config.cpu_offload,
        units=config.atorch_wrap_cls,
        keeps_gathered=keeps,
        gather_dtype=explicit.param_dtype if explicit else None,
        reduce_dtype=explicit.reduce_dtype if explicit else None,
        follows_compute=precision == "auto",
        prefetched_units=0 if flat and config.backward_prefetch is None else 1,
        shard_layout="flat" if flat else "rows",
        flat_alignment=_ALIGNMENT_BYTES if flat and config.use_orig_params else 0,
    )
