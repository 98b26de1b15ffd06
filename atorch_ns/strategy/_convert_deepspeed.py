"""From a DeepSpeed JSON config to a strategy.

The keys are those of DeepSpeed's configuration reference. Weights in 16 bits have fp32 masters there, so ``fp16`` and
``bf16`` become the method of that kind, and not autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from atorch_ns.strategy._conversion import Conversion, Converter, number, switch
from atorch_ns.strategy._requires import Requires

__all__ = ["ORDER", "convert_deepspeed", "read_accumulation", "read_zero"]

ORDER: Final = (
    "parallel_mode",
    "pipeline_parallel",
    "tensor_parallel",
    "half",
    "amp_native",
    "fp8",
    "checkpoint",
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    "compile",
    "gradient_accumulation",
)
"""How converted methods stand in the strategy."""

_METHOD_OF_STAGE: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
_ZERO: Final = "zero_optimization"
_TUNING: Final = (
    "buckets, prefetching and memory of DeepSpeed's own ZeRO; torch's sharding gathers block by block"
)
_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "optimizer": "an argument of auto_accelerate: optim_func and optim_args",
        "scheduler": "an argument of auto_accelerate: lr_scheduler_cls and lr_scheduler_args",
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


def convert_deepspeed(document: Mapping[str, Any], *, name: str) -> Conversion:
    """The strategy that a DeepSpeed config amounts to.

    Args:
        document: the parsed JSON.
        name: of the file, for messages.

    Raises:
        StrategyFileError: if a value means nothing.
    """
    converter = Converter(document, source="deepspeed", name=name)
    read_zero(converter, converter.take(f"{_ZERO}.stage", 0), f"{_ZERO}.stage")
    _offload(converter)
    _precision(converter)
    _batch(converter)
    _axes(converter)
    _compile(converter)
    clip = converter.take("gradient_clipping")
    if clip is not None:
        converter.leave("gradient_clipping", f"an argument of auto_accelerate: max_grad_norm={clip}")
    return converter.finish(why=_why, requires=Requires(), order=ORDER)


def read_zero(converter: Converter, stage: Any, key: str) -> str:
    """Adds the method of a ZeRO stage, and returns its name."""
    text = str(stage)
    if text not in ("0", "1", "2", "3"):
        raise converter.wrong(key, stage, "0, 1, 2, 3")
    method = _METHOD_OF_STAGE[int(text)]
    converter.use(method)
    converter.carry(key, f"{text} → {method}")
    return method


def _offload(converter: Converter) -> None:
    devices = {part: converter.take(f"{_ZERO}.offload_{part}.device") for part in ("optimizer", "param")}
    on_host = {part for part, device in devices.items() if device == "cpu"}
    sharded = str(converter.take(f"{_ZERO}.stage", 0)) == "3"
    for part, device in devices.items():
        key = f"{_ZERO}.offload_{part}.device"
        if device in (None, "none"):
            if device:
                converter.carry(key, "none: nothing is offloaded")
        elif part not in on_host:
            converter.leave(key, f"{device}: nothing is kept on NVMe; cpu would be host memory")
        elif sharded and on_host == {"optimizer", "param"}:
            converter.use("fsdp", cpu_offload=True)
            converter.carry(key, "cpu → fsdp.cpu_offload, parameters and optimizer together")
        else:
            converter.leave(
                key,
                "cpu: only parameters, gradients and optimizer states together go to host memory, by fsdp with "
                '{"cpu_offload": true}',
            )


def _precision(converter: Converter) -> None:
    for key, dtype in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        enabled = converter.take(f"{key}.enabled")
        if enabled is None:
            continue
        if not switch(converter, f"{key}.enabled", enabled):
            converter.carry(f"{key}.enabled", "false: full precision")
            continue
        if dtype == "fp16" and switch(converter, "fp16.auto_cast", converter.take("fp16.auto_cast", False)):
            converter.use("amp_native", dtype=dtype)
            converter.carry("fp16.auto_cast", "true → amp_native fp16, by autocast")
            converter.carry("fp16.enabled", "true → amp_native fp16")
        else:
            converter.use("half", dtype=dtype, master_weights=True)
            converter.carry(
                f"{key}.enabled", f"true → half {dtype}, with fp32 master weights as DeepSpeed has"
            )


def _batch(converter: Converter) -> None:
    whole = converter.take("train_batch_size")
    if whole is not None:
        converter.leave(
            "train_batch_size", f'an argument of auto_accelerate: dataloader_args={{"batch_size": {whole}}}'
        )
    given = converter.take("gradient_accumulation_steps")
    if given is not None:
        read_accumulation(converter, "gradient_accumulation_steps", given)


def read_accumulation(converter: Converter, key: str, given: Any) -> None:
    """Adds gradient accumulation where it is more than one."""
    steps = number(converter, key, given)
    if steps == 1:
        converter.carry(key, "1: every batch is computed in one pass")
        return
    converter.use("gradient_accumulation", num_micro_batches=steps)
    converter.carry(
        key,
        f"{steps} → gradient_accumulation: train_step splits each batch into {steps}, so the loader gives the "
        "batch of a whole optimizer step",
    )


def _axes(converter: Converter) -> None:
    """Pipeline stages and tensor parallelism."""
    axes = []
    stages = converter.take("pipeline.stages")
    if stages is not None:
        axes.append(["pipeline", number(converter, "pipeline.stages", stages)])
        converter.use("pipeline_parallel")
        converter.carry("pipeline.stages", f"{stages} → the axis pipeline of parallel_mode")
    partition = converter.take("pipeline.partition", converter.take("pipeline.partition_method"))
    if partition is not None:
        if partition in ("parameters", "uniform") and stages is not None:
            converter.use("pipeline_parallel", split_method=partition)
            converter.carry("pipeline.partition", f"{partition} → pipeline_parallel.split_method")
        else:
            converter.leave("pipeline.partition", "name the cut with pipeline_parallel.split_points")
    for key in ("tensor_parallel.autotp_size", "tensor_parallel.tp_size", "autotp_size"):
        degree = converter.take(key)
        if degree is not None and number(converter, key, degree) > 1:
            axes.append(["tensor", number(converter, key, degree)])
            converter.use("tensor_parallel")
            converter.carry(key, f"{degree} → the axis tensor of parallel_mode")
    if axes:
        converter.use("parallel_mode", axes=[*axes, ["data", 1]])
        converter.carry("the axis data", "takes the ranks that are left; it is fitted when the job starts")


def _compile(converter: Converter) -> None:
    enabled = converter.take("compile.enabled", converter.take("compile.deepcompile"))
    if enabled is None:
        return
    if switch(converter, "compile", enabled):
        converter.use("compile")
        backend = converter.take("compile.backend")
        if backend is not None:
            converter.use("compile", backend=str(backend))
    converter.carry("compile", "compile, block by block" if switch(converter, "compile", enabled) else "off")


def _why(key: str) -> str:
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
    if key.startswith("zero_quantized"):
        return "collectives are not quantised"
    if key.startswith("offload_"):
        return "how DeepSpeed offloads; torch's offload has no such setting"
    return _TUNING
