"""From a DeepSpeed JSON config to a strategy.

The keys are those of DeepSpeed's configuration reference. Weights in 16 bits have fp32 masters there, so ``fp16`` and
``bf16`` become the method of that kind, and not autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from atorch_ns.strategy._conversion import Conversion, Converter, number, switch
from atorch_ns.strategy._convert_deepspeed_reasons import why_deepspeed
from atorch_ns.strategy._convert_mesh import use_axes
from atorch_ns.strategy._convert_offload import read_offload
from atorch_ns.strategy._requires import Requires

__all__ = [
    "ORDER",
    "convert_deepspeed",
    "read_accumulation",
    "read_deepspeed",
    "read_zero",
    "use_half",
]

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
    "optimizer_offload",
    "compile",
    "gradient_accumulation",
)
"""How converted methods stand in the strategy."""

_METHOD_OF_STAGE: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
_ZERO: Final = "zero_optimization"


def convert_deepspeed(document: Mapping[str, Any], *, name: str) -> Conversion:
    """The strategy that a DeepSpeed config amounts to.

    Args:
        document: the parsed JSON.
        name: of the file, for messages.

    Raises:
        StrategyFileError: if a value means nothing.
    """
    converter = Converter(document, source="deepspeed", name=name)
    read_deepspeed(converter)
    return converter.finish(why=why_deepspeed, requires=Requires(), order=ORDER)


def read_deepspeed(converter: Converter, *, processes: int | None = None) -> str:
    """Reads a whole DeepSpeed config, and returns the method of its ZeRO stage.

    Args:
        converter: of the config.
        processes: how many there are, if another file says so.
    """
    stage = f"{_ZERO}.stage"
    if converter.raw(stage) == "auto":
        converter.warn(
            f"{stage} is 'auto', so nothing is sharded. Write the stage, 1, 2 or 3, and convert again."
        )
    given = converter.take(stage)
    if given is None:
        converter.use("ddp")
        method = "ddp"
    else:
        method = read_zero(converter, given, stage)
    _precision(converter)
    _offload(converter, method, one_process=processes == 1)
    _batch(converter)
    _axes(converter, processes)
    _compile(converter)
    clip = converter.take("gradient_clipping")
    if clip is not None:
        converter.leave("gradient_clipping", f"an argument of auto_accelerate: max_grad_norm={clip}")
    return method


def read_zero(converter: Converter, stage: Any, key: str) -> str:
    """Adds the method of a ZeRO stage, and returns its name."""
    text = str(stage)
    if text not in ("0", "1", "2", "3"):
        raise converter.wrong(key, stage, "0, 1, 2, 3")
    method = _METHOD_OF_STAGE[int(text)]
    converter.use(method)
    converter.carry(key, f"{text} → {method}")
    return method


def _offload(converter: Converter, method: str, *, one_process: bool) -> None:
    devices: dict[str, tuple[str, Any]] = {}
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        key = f"{_ZERO}.offload_{part}.device"
        devices[part] = (key, converter.take(key))
        for name in (f"{_ZERO}.{old}", f"{_ZERO}.{old}s"):
            given = converter.take(name)
            if given is None:
                continue
            if devices[part][1] is not None:
                converter.leave(name, f"the old name of offload_{part}, which is there")
            elif switch(converter, name, given):
                devices[part] = (name, "cpu")
            else:
                converter.carry(name, "false: nothing is offloaded")
    read_offload(converter, method, devices, one_process=one_process)


def use_half(converter: Converter, key: str, given: Any, dtype: str) -> None:
    """Adds 16-bit weights with fp32 masters, as DeepSpeed has them."""
    converter.use("half", dtype=dtype, master_weights=True)
    converter.carry(key, f"{given} → half {dtype}, with fp32 master weights as DeepSpeed has")


def _precision(converter: Converter) -> None:
    for key, dtype in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        enabled = converter.take(f"{key}.enabled")
        if enabled is None:
            continue
        if switch(converter, f"{key}.enabled", enabled):
            before = converter.config("half")
            if before is not None and before["dtype"] != dtype:
                raise converter.wrong(
                    f"{key}.enabled", enabled, f"false, since {before['dtype']} is enabled too"
                )
            use_half(converter, f"{key}.enabled", "true", dtype)
        else:
            converter.carry(f"{key}.enabled", f"false: not in {dtype}")
    casts = converter.take("fp16.auto_cast")
    if casts is not None:
        converter.carry("fp16.auto_cast", f"{casts}: half casts floating inputs of the model")
    open_keys = [f"{key}.enabled" for key in ("bf16", "fp16") if converter.raw(f"{key}.enabled") == "auto"]
    if open_keys and converter.config("half") is None:
        is_auto = "are both 'auto'" if open_keys[1:] else "is 'auto'"
        converter.warn(
            f"{' and '.join(open_keys)} {is_auto}: bf16 or fp16 of the Trainer's arguments, or mixed_precision of "
            "Accelerate, decides the precision, not this file, and the strategy trains in fp32. If you passed bf16, "
            "write true for that 'auto' and convert again, or add "
            '("half", {"dtype": "bf16", "master_weights": True}) to the strategy.'
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


def _axes(converter: Converter, processes: int | None) -> None:
    """Pipeline stages and tensor parallelism."""
    sizes = {}
    for key, axis in (
        ("pipeline.stages", "pipeline"),
        ("tensor_parallel.autotp_size", "tensor"),
        ("tensor_parallel.tp_size", "tensor"),
        ("autotp_size", "tensor"),
    ):
        given = converter.take(key)
        if given is None:
            continue
        if number(converter, key, given) == 1:
            converter.carry(key, "1: nothing to divide")
            continue
        sizes[axis] = number(converter, key, given)
        converter.use(f"{axis}_parallel")
        converter.carry(key, f"{given} → the axis {axis} of parallel_mode")
    name = "pipeline.partition" if converter.raw("pipeline.partition") else "pipeline.partition_method"
    partition = converter.take(name)
    if partition is not None:
        if partition in ("parameters", "uniform") and "pipeline" in sizes:
            converter.use("pipeline_parallel", split_method=partition)
            converter.carry(name, f"{partition} → pipeline_parallel.split_method")
        else:
            converter.leave(name, "name the cut with pipeline_parallel.split_points")
    use_axes(converter, sizes, processes=processes)


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
