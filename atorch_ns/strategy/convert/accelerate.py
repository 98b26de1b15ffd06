"""Accelerate converter: the YAML that ``accelerate config`` writes, as a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from atorch_ns.strategy.convert.base import (
    Conversion,
    Converter,
    read_accumulation,
    read_clipping,
    read_degrees,
    read_reasons,
    read_recomputation,
    use_axes,
)
from atorch_ns.strategy.convert.deepspeed import read_deepspeed_section
from atorch_ns.strategy.file import Requires

_FSDP: Final = "fsdp_config.fsdp_"
_SHARDINGS: Final = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
_PREFETCHES: Final = {  # names, and numbers of FSDP1's enumeration
    "BACKWARD_PRE": "BACKWARD_PRE",
    "1": "BACKWARD_PRE",
    "BACKWARD_POST": "BACKWARD_POST",
    "2": "BACKWARD_POST",
    "NO_PREFETCH": None,
    "NONE": None,
}
_SWITCHES: Final = {  # Accelerate's names, and fsdp's here
    "offload_params": "cpu_offload",
    "forward_prefetch": "forward_prefetch",
    "sync_module_states": "sync_module_states",
}
_UNSHARDED: Final = read_reasons("accelerate without shards")  # keys without effect under NO_SHARD
_POLICIES: Final = {
    "TRANSFORMER_BASED_WRAP": "TRANSFORMER_BASED_WRAP: a unit for each of the named classes, or for each repeated block",
    "SIZE_BASED_WRAP": "SIZE_BASED_WRAP: a unit for each module of that many parameters",
    "NO_WRAP": "NO_WRAP: the whole model is one unit",
}


def _read_fsdp(converter: Converter) -> None:
    setting = converter.take(f"{_FSDP}version")
    version = str(setting or 1)
    if setting is not None:
        converter.carry(f"{_FSDP}version", f"{setting}: see distributed_type")
    if version not in ("1", "2"):
        raise converter.wrong(f"{_FSDP}version", version, "1, 2")
    if _read_sharding(converter) == "NO_SHARD":
        converter.use("ddp")
        converter.carry("distributed_type", "FSDP without sharding → ddp")
        for key, reason in _UNSHARDED.items():
            if converter.take(f"{_FSDP}{key}") is not None:
                converter.leave(f"{_FSDP}{key}", reason)
    else:
        old = "; FSDP2 trains the same, and torch has deprecated FSDP1" if version == "1" else ""
        converter.use("fsdp")
        converter.carry("distributed_type", f"FSDP, version {version} → fsdp{old}")
        _units_and_switches(converter)
    read_recomputation(converter, f"{_FSDP}activation_checkpointing")


def _read_sharding(converter: Converter) -> str:
    sharding = "FULL_SHARD"
    for key in (f"{_FSDP}sharding_strategy", f"{_FSDP}reshard_after_forward"):  # of FSDP1, of FSDP2
        value = converter.take(key)
        if value is None:
            continue
        text = str(value).upper()
        text = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(text, _SHARDINGS.get(text, text))
        if text == "HYBRID_SHARD_ZERO2":
            converter.leave(key, "HYBRID_SHARD_ZERO2: gathered parameters are freed, as by HYBRID_SHARD")
            text = "HYBRID_SHARD"
        elif text not in _SHARDINGS.values():
            raise converter.wrong(key, value, ", ".join([*_SHARDINGS.values(), "true, false"]))
        else:
            result = ": nothing is sharded" if text == "NO_SHARD" else f" → {text}"
            converter.carry(key, f"{value}{result}")
        sharding = text
    if sharding not in ("FULL_SHARD", "NO_SHARD"):  # fsdp's default, and ddp
        converter.use("fsdp", sharding_strategy=sharding)
    return sharding


def _units_and_switches(converter: Converter) -> None:
    policy = str(converter.take(f"{_FSDP}auto_wrap_policy", "")).upper()
    classes = converter.take(f"{_FSDP}transformer_layer_cls_to_wrap")
    least = converter.take(f"{_FSDP}min_num_params")
    if policy:
        converter.carry(f"{_FSDP}auto_wrap_policy", _POLICIES.get(policy, policy))
    if policy == "NO_WRAP":
        converter.use("fsdp", atorch_wrap_cls=[])
    if classes is not None:
        names = classes if isinstance(classes, list) else str(classes).split(",")  # a list, or with commas
        converter.use("fsdp", atorch_wrap_cls=[str(each).strip() for each in names])
        converter.carry(f"{_FSDP}transformer_layer_cls_to_wrap", "→ fsdp.atorch_wrap_cls")
    if least is not None:
        key = f"{_FSDP}min_num_params"
        if policy == "SIZE_BASED_WRAP":
            converter.use("fsdp", atorch_size_based_min_num_params=converter.number(key, least))
            converter.carry(key, "→ fsdp.atorch_size_based_min_num_params")
        else:
            converter.leave(key, "read only with SIZE_BASED_WRAP")
    for name, ours in _SWITCHES.items():
        key = f"{_FSDP}{name}"
        value = converter.take(key)
        if value is not None:
            converter.use("fsdp", **{ours: converter.switch(key, value)})
            converter.carry(key, f"{value} → fsdp.{ours}")
    key = f"{_FSDP}backward_prefetch"
    prefetch = converter.take(key)
    if prefetch is not None:
        if str(prefetch).upper() not in _PREFETCHES:
            raise converter.wrong(key, prefetch, ", ".join(_PREFETCHES))
        converter.use("fsdp", backward_prefetch=_PREFETCHES[str(prefetch).upper()])
        converter.carry(key, f"{prefetch} → fsdp.backward_prefetch")


_MEGATRON: Final = "megatron_lm_config.megatron_lm_"


def _read_megatron(converter: Converter, *, processes: int | None) -> None:
    degrees = {f"{_MEGATRON}tp_degree": "tensor", f"{_MEGATRON}pp_degree": "pipeline"}
    sizes = read_degrees(converter, degrees, methods=True)
    if converter.flag(
        f"{_MEGATRON}use_distributed_optimizer",
        on="{} → optimizer states are sharded over the data ranks, as by ZeRO 1",
        off="false: every data rank holds the optimizer states",
    ):
        converter.use("zero1")
    divides = "tensor" in sizes
    sequence = converter.flag(
        f"{_MEGATRON}sequence_parallelism",
        on="{} → tensor_parallel.sequence" if divides else "true, but tp_degree is 1: nothing to divide",
        off="false: not used",
    )
    if sequence and divides:
        converter.use("tensor_parallel", sequence=True)
    _micro_batches(converter, has_stages="pipeline" in sizes)
    read_recomputation(converter, f"{_MEGATRON}recompute_activations")
    read_clipping(converter, f"{_MEGATRON}gradient_clipping")
    use_axes(converter, sizes, processes=processes)
    converter.carry("distributed_type", f"MEGATRON_LM → {'parallel_mode' if sizes else 'data parallelism'}")


def _micro_batches(converter: Converter, *, has_stages: bool) -> None:
    key, other = f"{_MEGATRON}num_micro_batches", "gradient_accumulation_steps"
    value = converter.take(key)
    if value is None:
        return
    count = converter.number(key, value)
    if has_stages:
        converter.use("pipeline_parallel", num_micro_batches=count)
        converter.carry(key, f"{value} → pipeline_parallel.num_micro_batches")
    elif count > 1:
        converter.use("gradient_accumulation", num_micro_batches=count)
        converter.carry(key, f"{value} → gradient_accumulation, since nothing is cut into stages")
    else:
        converter.carry(key, "1: every batch is computed in one pass")
    if converter.raw(other) is not None:  # Accelerate ignores it with Megatron-LM
        converter.leave(other, f"Megatron-LM accumulates by {key}")


_KINDS: Final = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
_SIZES: Final = {  # axes of Accelerate's mesh, and those here
    "dp_replicate": "data",
    "dp_shard": "zero",
    "tp": "tensor",
    "cp": "sequence",
    "sp": "sequence",
}
_AXES: Final = {f"parallelism_config.parallelism_config_{key}_size": axis for key, axis in _SIZES.items()}


def convert_accelerate(document: Mapping[str, Any], *, name: str) -> Conversion:
    """Converts the Accelerate config ``document`` of the file ``name`` to a strategy.

    Raises:
        StrategyFileError: if a value means nothing.
    """
    converter = Converter(
        document=document, source="accelerate", name=name, reasons=read_reasons("accelerate")
    )
    kind = str(converter.take("distributed_type", "NO")).upper()
    if kind not in _KINDS:
        raise converter.wrong("distributed_type", kind, ", ".join(_KINDS))
    requires = _read_requires(converter)
    if kind == "FSDP":
        _read_fsdp(converter)
    elif kind == "DEEPSPEED":  # weights are in 16 bits there, and a file of DeepSpeed's may decide
        read_deepspeed_section(converter, processes=requires.world_size)
    elif kind == "MEGATRON_LM":
        _read_megatron(converter, processes=requires.world_size)
    elif kind in ("MULTI_GPU", "MULTI_CPU"):
        converter.use("ddp")
        converter.carry("distributed_type", f"{kind} → ddp")
    else:
        converter.carry("distributed_type", f"{kind}: no method of its own")
    if kind != "DEEPSPEED":  # read_deepspeed_section reads it
        _read_precision(converter)
    _read_compile(converter)
    if not converter.has_remark("gradient_accumulation_steps"):  # DeepSpeed or Megatron-LM may have decided
        read_accumulation(converter, "gradient_accumulation_steps")
    use_axes(converter, read_degrees(converter, _AXES, methods=False), processes=requires.world_size)
    return converter.finish(requires)


def _read_precision(converter: Converter) -> None:
    value = converter.take("mixed_precision")
    if value is None:
        return
    text = str(value).lower()
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
        raise converter.wrong("mixed_precision", value, "no, fp16, bf16, fp8")


def _read_compile(converter: Converter) -> None:
    inner = converter.take("dynamo_config.dynamo_backend")
    backend_key = "dynamo_backend" if inner is None else "dynamo_config.dynamo_backend"
    backend = converter.take(backend_key)
    if backend is None:
        return
    name = str(backend).lower()
    if name in ("no", "false", "none"):
        converter.carry(backend_key, "no: nothing is compiled")
        return
    config: dict[str, Any] = {"backend": name}
    for key, ours in (("mode", "mode"), ("use_dynamic", "dynamic"), ("use_fullgraph", "fullgraph")):
        value = converter.take(f"dynamo_config.dynamo_{key}")
        if value is not None:
            config[ours] = str(value) if key == "mode" else converter.switch(f"dynamo_{key}", value)
            converter.carry(f"dynamo_config.dynamo_{key}", f"{value} → compile.{ours}")
    converter.use("compile", **config)
    converter.carry(backend_key, f"{backend} → compile, block by block")


def _read_requires(converter: Converter) -> Requires:
    world_size, device = None, None
    processes = converter.take("num_processes")
    if processes is not None:
        converter.carry("num_processes", f"{processes} → requires.world_size")
        world_size = converter.number("num_processes", processes)
    if converter.flag("use_cpu", on="{} → requires.device", off="false: the devices that are there"):
        device = "cpu"
    return Requires(world_size=world_size, device=device)
