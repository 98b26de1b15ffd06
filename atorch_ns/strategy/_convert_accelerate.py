"""From the YAML that ``accelerate config`` writes to a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from atorch_ns.strategy._conversion import Conversion, Converter, number, switch
from atorch_ns.strategy._convert_accelerate_deepspeed import read_deepspeed_section
from atorch_ns.strategy._convert_accelerate_fsdp import read_fsdp
from atorch_ns.strategy._convert_accelerate_megatron import read_megatron
from atorch_ns.strategy._convert_deepspeed import ORDER, read_accumulation
from atorch_ns.strategy._convert_mesh import use_axes
from atorch_ns.strategy._requires import Requires

__all__ = ["convert_accelerate"]

_LAUNCHER: Final = "belongs to the launcher: atorch-ns launch, or torchrun"
_KINDS: Final = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
_AXES: Final = {
    "dp_replicate_size": "data",
    "dp_shard_size": "zero",
    "tp_size": "tensor",
    "cp_size": "sequence",
    "sp_size": "sequence",
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
        "deepspeed_config.deepspeed_config_file": "none: the stage is given here",
        "deepspeed_config.offload_optimizer_nvme_path": "nothing is kept on NVMe",
        "deepspeed_config.offload_param_nvme_path": "nothing is kept on NVMe",
        **{
            f"deepspeed_config.deepspeed_{key}": _LAUNCHER
            for key in ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter")
        },
        "deepspeed_config.deepspeed_moe_layer_cls_names": "expert_parallel finds the layers of experts",
        "dynamo_config": "nothing is compiled",
        "parallelism_config.parallelism_config_cp_backend": "sequence_parallel chooses by its kind: ulysses or ring",
        "parallelism_config.parallelism_config_cp_comm_strategy": "sequence_parallel chooses by its kind",
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
    requires = _requires(converter)
    _distribution(converter, kind, requires.world_size)
    if kind != "DEEPSPEED":  # there, weights are in 16 bits, and a file of DeepSpeed's may decide
        _precision(converter)
    _compile(converter)
    steps = converter.take("gradient_accumulation_steps")
    if steps is not None and not converter.told("gradient_accumulation_steps"):
        read_accumulation(converter, "gradient_accumulation_steps", steps)
    _axes(converter, requires.world_size)
    return converter.finish(why=_why, requires=requires, order=ORDER)


def _distribution(converter: Converter, kind: str, processes: int | None) -> None:
    if kind == "FSDP":
        read_fsdp(converter)
        return
    if kind == "DEEPSPEED":
        read_deepspeed_section(converter, processes=processes)
        return
    if kind in ("MULTI_GPU", "MULTI_CPU"):
        converter.use("ddp")
        converter.carry("distributed_type", f"{kind} → ddp")
    elif kind == "MEGATRON_LM":
        read_megatron(converter, processes=processes)
    else:
        converter.carry("distributed_type", f"{kind}: no method of its own")


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
    inner = converter.take("dynamo_config.dynamo_backend")
    place = "dynamo_backend" if inner is None else "dynamo_config.dynamo_backend"
    backend = converter.take(place)
    if backend is None:
        return
    name = str(backend).lower()
    if name in ("no", "false", "none"):
        converter.carry(place, "no: nothing is compiled")
        return
    config: dict[str, Any] = {"backend": name}
    for key, ours in (("mode", "mode"), ("use_dynamic", "dynamic"), ("use_fullgraph", "fullgraph")):
        value = converter.take(f"dynamo_config.dynamo_{key}")
        if value is not None:
            config[ours] = str(value) if key == "mode" else switch(converter, f"dynamo_{key}", value)
            converter.carry(f"dynamo_config.dynamo_{key}", f"{value} → compile.{ours}")
    converter.use("compile", **config)
    converter.carry(place, f"{backend} → compile, block by block")


def _axes(converter: Converter, processes: int | None) -> None:
    sizes: dict[str, int] = {}
    for key, axis in _AXES.items():
        name = f"parallelism_config.parallelism_config_{key}"
        degree = converter.take(name)
        if degree is None:
            continue
        if number(converter, name, degree) == 1:
            converter.carry(name, "1: nothing to divide")
            continue
        if axis in sizes:
            raise converter.wrong(name, degree, "1, since the axis sequence is taken by cp_size")
        sizes[axis] = number(converter, name, degree)
        converter.carry(name, f"{degree} → the axis {axis} of parallel_mode")
    use_axes(converter, sizes, processes=processes)


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
    if head == "dynamo_config" and "regional" in tail:
        return "always so: each repeated block is compiled by itself"
    if key in _REASONS or head in _REASONS:
        return _REASONS.get(key) or _REASONS[head]
    if head == "deepspeed_config":
        return "a setting of DeepSpeed's own engine"
    if head == "fp8_config":
        return "see the config of the method fp8: atorch-ns methods fp8"
    return "this version knows no counterpart"
