"""Why keys of a DeepSpeed config become nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["why_deepspeed"]

_ZERO: Final = "zero_optimization"
_TUNING: Final = (
    "buckets, prefetching and memory of DeepSpeed's own ZeRO; torch's sharding gathers block by block"
)
_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "optimizer": "an argument of auto_accelerate: optim_func and optim_args",
        "scheduler": "an argument of auto_accelerate: lr_scheduler_cls and lr_scheduler_args, with a scheduler of "
        "torch.optim.lr_scheduler",
        "train_micro_batch_size_per_gpu": "follows from the global batch, the ranks and the accumulation",
        "activation_checkpointing": "configures deepspeed.checkpointing, which a script calls itself; the method "
        "checkpoint recomputes blocks without it",
        "zero_allow_untested_optimizer": "no optimizer is refused here",
        "zero_force_ds_cpu_optimizer": "there is no optimizer of DeepSpeed's here",
        "steps_per_print": "logging is the script's; trackers and result.report tell the rest",
        "wall_clock_breakdown": "result.report shows where the time goes",
        "dump_state": "a debugging aid of DeepSpeed's",
        "tensorboard": "monitoring is the script's",
        "wandb": "monitoring is the script's",
        "csv_monitor": "monitoring is the script's",
        "comms_logger": "the report lists collectives",
        "flops_profiler": "the report tells FLOPs and times",
        "prescale_gradients": "gradients are averaged in fp32, where scaling first gains nothing",
        "gradient_predivide_factor": "gradients are averaged in fp32, where scaling first gains nothing",
        "communication_data_type": "reduction follows the precision's method; fsdp takes mixed_precision.reduce_dtype",
        "data_types": "reduction follows the precision's method",
        "sparse_attention": "no counterpart",
        "compression_training": "no counterpart",
        "data_efficiency": "data is the script's",
        "curriculum_learning": "data is the script's",
        "autotuning": "auto_accelerate without load_strategy searches",
        "elasticity": "a checkpoint of any number of ranks loads on any other",
        "checkpoint": "checkpoints are written by atorch_ns.checkpoint",
        "aio": "nothing is kept on NVMe",
        "amp": "apex is not used; amp_native is torch's own",
    }
)


def why_deepspeed(key: str) -> str:
    """Why a key of a DeepSpeed config became nothing."""
    head, _, tail = key.partition(".")
    if head == _ZERO:
        return _why_zero(tail)
    if head in ("fp16", "bf16", "bfloat16"):
        if tail.startswith(("loss_scale", "initial_scale", "hysteresis", "min_loss_scale", "consecutive")):
            return "the loss scale begins at 2^16 and is found while training; amp_native takes init_scale"
        return "no counterpart in the precision's method"
    if head == "pipeline":
        return "pipeline_parallel decides it: see its schedule and split_method"
    return _REASONS.get(head, "this version knows no counterpart")


def _why_zero(key: str) -> str:
    if key.startswith(("zero_hpz", "mics")):
        return "sharding within a node: fsdp with sharding_strategy HYBRID_SHARD, or parallel_mode with data and zero"
    if key in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
        return "checkpoint.export_safetensors writes whole weights"
    if key.startswith("zero_quantized"):
        return "collectives are not quantised"
    if key.startswith(("offload_", "cpu_offload_use_pin_memory")):
        return "how DeepSpeed offloads; torch's offload has no such setting"
    return _TUNING
