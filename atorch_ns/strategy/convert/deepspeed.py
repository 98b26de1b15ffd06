"""DeepSpeed converter: a JSON config, or the DeepSpeed part of an Accelerate config, as a strategy.

The keys are those of DeepSpeed's configuration reference. Weights in 16 bits have fp32 masters there, so
``fp16`` and ``bf16`` become the method of that kind, and not autocast.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from atorch_ns.errors import StrategyFileError
from atorch_ns.strategy.convert.base import (
    Conversion,
    Converter,
    parse_document,
    read_accumulation,
    read_bytes,
    read_clipping,
    read_degrees,
    read_offload,
    read_reasons,
    use_axes,
)
from atorch_ns.strategy.file import Requires
from atorch_ns.text import with_article

_ZERO: Final = "zero_optimization"
_PRECISIONS: Final = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}  # bfloat16: an older name
_METHOD_OF_STAGE: Final = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}


def convert_deepspeed(document: Mapping[str, Any], *, name: str) -> Conversion:
    """Converts the DeepSpeed config ``document`` of the file ``name`` to a strategy.

    Raises:
        StrategyFileError: if a value means nothing.
    """
    converter = _make_converter(document, name)
    _read_config(converter)
    return converter.finish(Requires())


def _make_converter(document: Mapping[str, Any], name: str) -> Converter:
    return Converter(document=document, source="deepspeed", name=name, reasons=read_reasons("deepspeed"))


def _read_config(converter: Converter, *, processes: int | None = None) -> str:
    """Reads a whole DeepSpeed config, and returns the method of its ZeRO stage."""
    stage = f"{_ZERO}.stage"
    if converter.raw(stage) == "auto":
        converter.warn(
            f"{stage} is 'auto', so nothing is sharded. Write the stage, 1, 2 or 3, and convert again."
        )
    value = converter.take(stage)
    method = "ddp" if value is None else _read_stage(converter, value, stage)
    converter.use(method)
    _read_precision(converter)
    _read_offload_devices(converter, method, one_process=processes == 1)
    whole = converter.take("train_batch_size")
    if whole is not None:
        reason = f'an argument of auto_accelerate: dataloader_args={{"batch_size": {whole}}}'
        converter.leave("train_batch_size", reason)
    read_accumulation(converter, "gradient_accumulation_steps")
    _read_axes(converter, processes)
    _read_compile(converter)
    read_clipping(converter, "gradient_clipping")
    return method


def _read_stage(converter: Converter, stage: Any, key: str) -> str:
    if str(stage) not in _METHOD_OF_STAGE:
        raise converter.wrong(key, stage, ", ".join(_METHOD_OF_STAGE))
    method = _METHOD_OF_STAGE[str(stage)]
    converter.use(method)
    converter.carry(key, f"{stage} → {method}")
    return method


def _read_offload_devices(converter: Converter, method: str, *, one_process: bool) -> None:
    devices: dict[str, tuple[str, Any]] = {}
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        key = f"{_ZERO}.offload_{part}.device"
        devices[part] = (key, converter.take(key))
        for name in (f"{_ZERO}.{old}", f"{_ZERO}.{old}s"):  # such as cpu_offload_params
            value = converter.take(name)
            if value is None:
                continue
            if devices[part][1] is not None:
                converter.leave(name, f"the old name of offload_{part}, which is there")
            elif converter.switch(name, value):
                devices[part] = (name, "cpu")
            else:
                converter.carry(name, "false: nothing is offloaded")
    read_offload(converter, method, devices, one_process=one_process)


def _use_half(converter: Converter, key: str, text: Any, dtype: str) -> None:
    converter.use("half", dtype=dtype, master_weights=True)  # as DeepSpeed trains
    converter.carry(key, f"{text} → half {dtype}, with fp32 master weights as DeepSpeed has")


def _read_precision(converter: Converter) -> None:
    for section, dtype in _PRECISIONS.items():
        key = f"{section}.enabled"
        setting = converter.take(key)
        if setting is None:
            continue
        if not converter.switch(key, setting):
            converter.carry(key, f"false: not in {dtype}")
            continue
        before = converter.config("half")
        if before is not None and before["dtype"] != dtype:
            raise converter.wrong(key, setting, f"false, since {before['dtype']} is enabled too")
        _use_half(converter, key, "true", dtype)
    casts = converter.take("fp16.auto_cast")
    if casts is not None:
        converter.carry("fp16.auto_cast", f"{casts}: half casts floating inputs of the model")
    open_keys = [f"{key}.enabled" for key in ("bf16", "fp16") if converter.raw(f"{key}.enabled") == "auto"]
    if open_keys and converter.config("half") is None:
        is_auto = "are both 'auto'" if open_keys[1:] else "is 'auto'"
        converter.warn(
            f"{' and '.join(open_keys)} {is_auto}: bf16 or fp16 in the Trainer's arguments, or mixed_precision of "
            "Accelerate, decides the precision, not this file, so the strategy trains in fp32. If you passed bf16, "
            "replace that 'auto' with true and convert again, or add "
            '("half", {"dtype": "bf16", "master_weights": True}) to the strategy.'
        )


_AXES: Final = {  # axes of the mesh, by key
    "pipeline.stages": "pipeline",
    "tensor_parallel.autotp_size": "tensor",
    "tensor_parallel.tp_size": "tensor",
    "autotp_size": "tensor",
}


def _read_axes(converter: Converter, processes: int | None) -> None:
    sizes = read_degrees(converter, _AXES, methods=True)
    name = "pipeline.partition" if converter.raw("pipeline.partition") else "pipeline.partition_method"
    partition = converter.take(name)
    if partition is not None:
        if partition in ("parameters", "uniform") and "pipeline" in sizes:
            converter.use("pipeline_parallel", split_method=partition)
            converter.carry(name, f"{partition} → pipeline_parallel.split_method")
        else:
            converter.leave(name, "name the cut with pipeline_parallel.split_points")
    use_axes(converter, sizes, processes=processes)


def _read_compile(converter: Converter) -> None:
    setting = converter.take("compile.enabled", converter.take("compile.deepcompile"))
    if setting is None:
        return
    is_on = converter.switch("compile", setting)
    if is_on:
        backend = converter.take("compile.backend")
        converter.use("compile", **({} if backend is None else {"backend": str(backend)}))
    converter.carry("compile", "compile, block by block" if is_on else "off")


_SECTION: Final = "deepspeed_config."
_FILE: Final = f"{_SECTION}deepspeed_config_file"
_FILLS: Final = {  # Accelerate's keys that fill in an "auto" of DeepSpeed's file
    "zero_optimization.stage": (f"{_SECTION}zero_stage",),
    "zero_optimization.offload_optimizer.device": (f"{_SECTION}offload_optimizer_device",),
    "zero_optimization.offload_param.device": (f"{_SECTION}offload_param_device",),
    "gradient_accumulation_steps": (f"{_SECTION}gradient_accumulation_steps", "gradient_accumulation_steps"),
    "gradient_clipping": (f"{_SECTION}gradient_clipping",),
}


def read_deepspeed_section(converter: Converter, *, processes: int | None) -> None:
    """Adds the methods of a DeepSpeed run to the conversion of an Accelerate config, its precision too.

    Raises:
        StrategyFileError: if neither a stage nor a file is given, or the file cannot be read.
    """
    if str(converter.take(_FILE, "none")).lower() != "none":
        _with_file(converter, str(converter.take(_FILE)), processes)
        return
    key = f"{_SECTION}zero_stage"
    stage = converter.take(key)
    if stage is None:
        section = converter.raw("deepspeed_config")
        raise converter.wrong("deepspeed_config", section, "zero_stage, or deepspeed_config_file")
    method = _read_stage(converter, stage, key)
    converter.carry("distributed_type", f"DEEPSPEED → the method of the stage, {method}")
    _accelerate_precision(converter)
    keys = {part: f"{_SECTION}offload_{part}_device" for part in ("optimizer", "param")}
    devices = {part: (key, converter.take(key)) for part, key in keys.items()}
    read_offload(converter, method, devices, one_process=processes == 1)
    read_accumulation(converter, f"{_SECTION}gradient_accumulation_steps")
    read_clipping(converter, f"{_SECTION}gradient_clipping")


def _accelerate_precision(converter: Converter) -> None:
    # Accelerate writes fp16.enabled or bf16.enabled for DeepSpeed: 16-bit weights with fp32 masters.
    text = str(converter.take("mixed_precision", "no")).lower()
    if text in ("fp16", "bf16"):
        _use_half(converter, "mixed_precision", text, text)
    elif text == "fp8":
        converter.use("fp8")
        _use_half(converter, "mixed_precision", "fp8 → fp8 for the linears; bf16 for the rest", "bf16")
    elif text in ("no", "false", "none"):
        if converter.raw("mixed_precision") is not None:
            converter.carry("mixed_precision", "no: full precision")
    else:
        raise converter.wrong("mixed_precision", text, "no, fp16, bf16, fp8")


def _with_file(converter: Converter, file: str, processes: int | None) -> None:
    path = Path(converter.name).parent / file  # beside Accelerate's file
    try:
        document = parse_document(read_bytes(path), str(path))
    except StrategyFileError as error:
        raise StrategyFileError(
            f"{_FILE}={file!r}: {error}. That file holds the strategy; its path is relative to the folder of this one",
            source=converter.name,
        ) from None
    if not isinstance(document, Mapping):
        raise StrategyFileError(
            f"{_FILE}={file!r} holds {with_article(document)}; a DeepSpeed config must be a mapping",
            source=converter.name,
        )
    inner = _make_converter(_fill_document(converter, document, file), str(path))
    method = _read_config(inner, processes=processes)
    converter.absorb(inner, prefix=f"{path.name}: ")
    if str(converter.take("mixed_precision", "no")).lower() == "fp8":  # bf16 was filled in for the rest
        converter.use("fp8")
    converter.carry(_FILE, f"{file}: read, see its keys")
    converter.carry("distributed_type", f"DEEPSPEED → the method of the file's stage, {method}")


def _fill_document(converter: Converter, document: Mapping[str, Any], file: str) -> dict[str, Any]:
    new_document = copy.deepcopy(dict(document))
    for key, names in _FILLS.items():
        for name in names:
            value = converter.take(name)
            if value is None:
                continue
            if _fill_key(new_document, key, value):
                converter.carry(name, f"fills 'auto' in {file}")
            else:
                converter.leave(name, f"{file} decides: {key} is not 'auto' there")
    # Accelerate's mixed_precision decides where the file leaves fp16 or bf16 out, or 'auto'.
    precision = converter.take("mixed_precision")
    if precision is None:
        return new_document
    text = str(precision).lower()
    fills = False
    for dtype, on in (("fp16", text == "fp16"), ("bf16", text in ("bf16", "fp8"))):
        if dtype not in new_document and on:
            new_document[dtype] = {"enabled": True}
            fills = True
        fills |= _fill_key(new_document, f"{dtype}.enabled", on)
    if fills:
        converter.carry("mixed_precision", f"{precision}: fills the precision in {file}")
    else:
        converter.leave("mixed_precision", f"{file} decides: its precision is not 'auto'")
    return new_document


def _fill_key(document: dict[str, Any], key: str, value: Any) -> bool:
    """Replaces an ``"auto"`` by a value. Returns whether there was one."""
    *parents, last = key.split(".")
    inner: Any = document
    for part in parents:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or inner.get(last) != "auto":
        return False
    inner[last] = value
    return True
