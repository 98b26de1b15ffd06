"""From the YAML that ``accelerate config`` writes to a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from atorch_ns.strategy._conversion import Conversion, Converter, number, switch
from atorch_ns.strategy._convert_accelerate_fsdp import read_fsdp
from atorch_ns.strategy._convert_deepspeed import ORDER, read_accumulation, read_zero
from atorch_ns.strategy._requires import Requires

__all__ = ["convert_accelerate"]

_LAUNCHER: Final = "belongs to the launcher: atorch-ns launch, or torchrun"
_KINDS: Final = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
_AXES: Final = {
    "dp_replicate_size": "data",
    "dp_shard_size": "zero",
    "tp_size": "tensor",
    "cp_size": "sequence",
}
_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "machine_rank",
                "num_machines",
                "main_process_ip",
                "main_process_port",
                "rdzv_backend",
                "same_network",
                "gpu_ids",
                "compute_environment",
                "main_training_function",
                "enable_cpu_affinity",
                "mpirun_config",
                "debug",
            ),
            _LAUNCHER,
        ),
        **dict.fromkeys(
            ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16"), "there are no TPUs here"
        ),
        "ipex_config": "a package of Intel's that is not used here",
        "fsdp_config.fsdp_state_dict_type": "checkpoints of any form load on any number of ranks",
        "fsdp_config.fsdp_cpu_ram_efficient_loading": "build the model on meta instead; it is filled shard by shard",
        "fsdp_config.fsdp_use_orig_params": "always so with FSDP2",
        "deepspeed_config.zero3_init_flag": "build the model on meta instead; it is filled shard by shard",
        "deepspeed_config.zero3_save_16bit_model": "checkpoints are written by atorch_ns.checkpoint",
        "deepspeed_config.deepspeed_config_file": "convert that file with --from deepspeed",
    }
)


def convert_accelerate(document: Mapping[str, Any], *, name: str) -> Conversion:
    """The strategy that an Accelerate config amounts to.

    Args:
        document: the parsed YAML.
        name: of the file, for messages.

    Raises:
        StrategyFileError: if a value means nothing.
    """
    converter = Converter(document, source="accelerate", name=name)
    kind = str(converter.take("distributed_type", "NO")).upper()
    if kind not in _KINDS:
        raise converter.wrong("distributed_type", kind, ", ".join(_KINDS))
    _distribution(converter, kind)
    _precision(converter)
    _compile(converter)
    steps = converter.take("gradient_accumulation_steps")
    if steps is not None:
        read_accumulation(converter, "gradient_accumulation_steps", steps)
    _axes(converter)
    return converter.finish(why=_why, requires=_requires(converter), order=ORDER)


def _distribution(converter: Converter, kind: str) -> None:
    if kind == "FSDP":
        read_fsdp(converter)
        return
    if kind == "DEEPSPEED":
        _deepspeed(converter)
        return
    if kind in ("MULTI_GPU", "MULTI_CPU"):
        converter.use("ddp")
        converter.carry("distributed_type", f"{kind} → ddp")
    elif kind == "MEGATRON_LM":
        _megatron(converter)
    else:
        converter.carry("distributed_type", f"{kind}: no method of its own")


def _deepspeed(converter: Converter) -> None:
    if converter.take("deepspeed_config.zero_stage") is not None:
        key = "deepspeed_config.zero_stage"
        method = read_zero(converter, converter.take(key), key)
        converter.carry("distributed_type", f"DEEPSPEED → {method}")
    elif converter.take("deepspeed_config.deepspeed_config_file") is not None:
        file = converter.take("deepspeed_config.deepspeed_config_file")
        converter.leave(
            "deepspeed_config.deepspeed_config_file",
            f"the strategy stands in {file}: convert that with --from deepspeed",
        )
        method = ""
    else:
        raise converter.wrong("deepspeed_config", {}, "zero_stage, or deepspeed_config_file")
    devices = {
        key: converter.take(f"deepspeed_config.offload_{key}_device", "none")
        for key in ("optimizer", "param")
    }
    both = method == "fsdp" and set(devices.values()) == {"cpu"}
    if both:
        converter.use("fsdp", cpu_offload=True)
    for key, device in devices.items():
        name = f"deepspeed_config.offload_{key}_device"
        if both:
            converter.carry(name, "cpu → fsdp.cpu_offload, parameters and optimizer together")
        elif device != "none":
            converter.leave(
                name,
                f"{device}: only fsdp keeps things in host memory, all together: {{'cpu_offload': true}}",
            )
    steps = converter.take("deepspeed_config.gradient_accumulation_steps")
    if steps is not None:
        read_accumulation(converter, "deepspeed_config.gradient_accumulation_steps", steps)
    clip = converter.take("deepspeed_config.gradient_clipping")
    if clip is not None:
        converter.leave(
            "deepspeed_config.gradient_clipping", f"an argument of auto_accelerate: max_grad_norm={clip}"
        )


def _megatron(converter: Converter) -> None:
    axes = []
    for key, axis, method in (
        ("pp_degree", "pipeline", "pipeline_parallel"),
        ("tp_degree", "tensor", "tensor_parallel"),
    ):
        degree = converter.take(f"megatron_lm_config.megatron_lm_{key}")
        if degree is not None and number(converter, key, degree) > 1:
            axes.append([axis, number(converter, key, degree)])
            converter.use(method)
            converter.carry(f"megatron_lm_config.megatron_lm_{key}", f"{degree} → the axis {axis}")
    sequence = converter.take("megatron_lm_config.megatron_lm_sequence_parallelism")
    if sequence is not None:
        on = switch(converter, "megatron_lm_sequence_parallelism", sequence)
        if on and any(axis == "tensor" for axis, _ in axes):
            converter.use("tensor_parallel", sequence=True)
        converter.carry(
            "megatron_lm_config.megatron_lm_sequence_parallelism", f"{sequence} → tensor_parallel.sequence"
        )
    recompute = converter.take("megatron_lm_config.megatron_lm_recompute_activations")
    if recompute is not None:
        if switch(converter, "megatron_lm_recompute_activations", recompute):
            converter.use("checkpoint")
        converter.carry("megatron_lm_config.megatron_lm_recompute_activations", f"{recompute} → checkpoint")
    clip = converter.take("megatron_lm_config.megatron_lm_gradient_clipping")
    if clip is not None:
        converter.leave(
            "megatron_lm_config.megatron_lm_gradient_clipping",
            f"an argument of auto_accelerate: max_grad_norm={clip}",
        )
    if axes:
        converter.use("parallel_mode", axes=[*axes, ["data", 1]])
    converter.carry(
        "distributed_type", "MEGATRON_LM → parallel_mode; the axis data takes the ranks that are left"
    )


def _precision(converter: Converter) -> None:
    given = converter.take("mixed_precision")
    if given is None:
        return
    text = str(given).lower()
    if text in ("no", "false", "none"):
        converter.carry("mixed_precision", "no: full precision")
    elif text in ("fp16", "bf16"):
        converter.use("amp_native", dtype=text)
        converter.carry("mixed_precision", f"{text} → amp_native {text}")
    elif text == "fp8":
        converter.use("fp8")
        converter.use("amp_native", dtype="bf16")
        converter.carry("mixed_precision", "fp8 → fp8 for the linears, amp_native bf16 for the rest")
    else:
        raise converter.wrong("mixed_precision", given, "no, fp16, bf16, fp8")


def _compile(converter: Converter) -> None:
    backend = converter.take("dynamo_config.dynamo_backend", converter.take("dynamo_backend"))
    if backend is None:
        return
    name = str(backend).lower()
    if name in ("no", "false", "none"):
        converter.carry("dynamo_config.dynamo_backend", "no: nothing is compiled")
        return
    config: dict[str, Any] = {"backend": name}
    for key, ours in (("mode", "mode"), ("use_dynamic", "dynamic"), ("use_fullgraph", "fullgraph")):
        value = converter.take(f"dynamo_config.dynamo_{key}")
        if value is not None:
            config[ours] = str(value) if key == "mode" else switch(converter, f"dynamo_{key}", value)
            converter.carry(f"dynamo_config.dynamo_{key}", f"{value} → compile.{ours}")
    converter.use("compile", **config)
    converter.carry("dynamo_config.dynamo_backend", f"{backend} → compile, block by block")


def _axes(converter: Converter) -> None:
    axes = []
    for key, axis in _AXES.items():
        name = f"parallelism_config.parallelism_config_{key}"
        degree = converter.take(name)
        if degree is None:
            continue
        if number(converter, name, degree) > 1:
            axes.append([axis, number(converter, name, degree)])
        converter.carry(name, f"{degree} → the axis {axis} of parallel_mode")
    if axes:
        converter.use("parallel_mode", axes=axes)


def _requires(converter: Converter) -> Requires:
    processes = converter.take("num_processes")
    on_cpu = converter.take("use_cpu")
    if processes is not None:
        converter.carry("num_processes", f"{processes} → requires.world_size")
    if on_cpu is not None:
        converter.carry(
            "use_cpu", f"{on_cpu} → requires.device" if on_cpu else "false: the devices that are there"
        )
    return Requires(
        world_size=None if processes is None else number(converter, "num_processes", processes),
        device="cpu" if on_cpu is not None and switch(converter, "use_cpu", on_cpu) else None,
    )


def _why(key: str) -> str:
    head, _, tail = key.partition(".")
    if key in _REASONS or head in _REASONS:
        return _REASONS.get(key) or _REASONS[head]
    if head == "deepspeed_config":
        return "a setting of DeepSpeed's own engine"
    if head == "fp8_config":
        return "see the config of the method fp8: atorch-ns methods fp8"
    if head == "dynamo_config" and "regional" in tail:
        return "always so: each repeated block is compiled by itself"
    return "this version knows no counterpart"
