"""The part of an Accelerate config that is about DeepSpeed, and the file of DeepSpeed that it may name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from atorch_ns.errors import StrategyFileError
from atorch_ns.strategy._conversion import Converter
from atorch_ns.strategy._convert_deepspeed import (
    read_accumulation,
    read_deepspeed,
    read_zero,
    use_half,
)
from atorch_ns.strategy._convert_deepspeed_reasons import why_deepspeed
from atorch_ns.strategy._convert_offload import read_offload
from atorch_ns.strategy._convert_text import parsed, read_bytes

__all__ = ["read_deepspeed_section"]

_SECTION: Final = "deepspeed_config."
_FILE: Final = f"{_SECTION}deepspeed_config_file"
_FILLS: Final = {
    "zero_optimization.stage": (f"{_SECTION}zero_stage",),
    "zero_optimization.offload_optimizer.device": (f"{_SECTION}offload_optimizer_device",),
    "zero_optimization.offload_param.device": (f"{_SECTION}offload_param_device",),
    "gradient_accumulation_steps": (f"{_SECTION}gradient_accumulation_steps", "gradient_accumulation_steps"),
    "gradient_clipping": (f"{_SECTION}gradient_clipping",),
}
"""Which keys of Accelerate fill in an ``"auto"`` of DeepSpeed's file."""


def read_deepspeed_section(converter: Converter, *, processes: int | None) -> None:
    """Adds the methods of a DeepSpeed run, its precision too.

    Args:
        converter: of the Accelerate config.
        processes: how many there are, if the file says so.

    Raises:
        StrategyFileError: if neither a stage nor a file is given, or the file cannot be read.
    """
    if str(converter.take(_FILE, "none")).lower() != "none":
        _with_file(converter, str(converter.take(_FILE)), processes)
        return
    key = f"{_SECTION}zero_stage"
    if converter.take(key) is None:
        raise converter.wrong(
            "deepspeed_config", converter.raw("deepspeed_config"), "zero_stage, or deepspeed_config_file"
        )
    method = read_zero(converter, converter.take(key), key)
    converter.carry("distributed_type", f"DEEPSPEED → the method of the stage, {method}")
    _precision(converter)
    devices = {
        part: (f"{_SECTION}offload_{part}_device", converter.take(f"{_SECTION}offload_{part}_device"))
        for part in ("optimizer", "param")
    }
    read_offload(converter, method, devices, one_process=processes == 1)
    steps = converter.take(f"{_SECTION}gradient_accumulation_steps")
    if steps is not None:
        read_accumulation(converter, f"{_SECTION}gradient_accumulation_steps", steps)
    clip = converter.take(f"{_SECTION}gradient_clipping")
    if clip is not None:
        converter.leave(
            f"{_SECTION}gradient_clipping", f"an argument of auto_accelerate: max_grad_norm={clip}"
        )


def _precision(converter: Converter) -> None:
    """16-bit weights with fp32 masters: Accelerate writes fp16.enabled or bf16.enabled for DeepSpeed."""
    text = str(converter.take("mixed_precision", "no")).lower()
    if text in ("fp16", "bf16"):
        use_half(converter, "mixed_precision", text, text)
    elif text == "fp8":
        converter.use("fp8")
        use_half(converter, "mixed_precision", "fp8 → fp8 for the linears; bf16 for the rest", "bf16")
    elif text in ("no", "false", "none"):
        if converter.raw("mixed_precision") is not None:
            converter.carry("mixed_precision", "no: full precision")
    else:
        raise converter.wrong("mixed_precision", text, "no, fp16, bf16, fp8")


def _with_file(converter: Converter, file: str, processes: int | None) -> None:
    """Converts the file of DeepSpeed, with what Accelerate fills in."""
    place = converter.folder / file
    try:
        document = parsed(read_bytes(place), str(place))
    except StrategyFileError as error:
        raise StrategyFileError(
            f"{_FILE}={file!r}: {error}. The strategy stands in that file; it is looked for beside this one",
            source=converter.name,
        ) from None
    if not isinstance(document, Mapping):
        raise StrategyFileError(
            f"{_FILE}={file!r} holds a {type(document).__name__}; a config of DeepSpeed is a mapping",
            source=converter.name,
        )
    inner = Converter(_filled(converter, document, file), source="deepspeed", name=str(place))
    method = read_deepspeed(inner, processes=processes)
    converter.absorb(inner, why=why_deepspeed, before=f"{place.name}: ")
    if str(converter.take("mixed_precision", "no")).lower() == "fp8":
        converter.use("fp8")
    converter.carry(_FILE, f"{file}: read, see its keys")
    converter.carry("distributed_type", f"DEEPSPEED → the method of the file's stage, {method}")


def _filled(converter: Converter, document: Mapping[str, Any], file: str) -> dict[str, Any]:
    """DeepSpeed's document, with Accelerate's values for ``"auto"``."""
    filled = copy.deepcopy(dict(document))
    for key, keys in _FILLS.items():
        for name in keys:
            given = converter.take(name)
            if given is not None:
                told = _fill(filled, key, given)
                (converter.carry if told else converter.leave)(
                    name, f"fills 'auto' in {file}" if told else f"{file} decides: {key} is not 'auto' there"
                )
    precision = converter.take("mixed_precision")
    if precision is None:
        return filled
    text = str(precision).lower()
    enabled = {"fp16": text == "fp16", "bf16": text in ("bf16", "fp8")}
    told = False
    for dtype, on in enabled.items():
        if dtype not in filled and on:
            filled[dtype] = {"enabled": True}
            told = True
        told |= _fill(filled, f"{dtype}.enabled", on)
    if told:
        converter.carry("mixed_precision", f"{precision}: fills the precision in {file}")
    else:
        converter.leave("mixed_precision", f"{file} decides: its precision is not 'auto'")
    return filled


def _fill(document: dict[str, Any], key: str, value: Any) -> bool:
    """Puts a value in the place of an ``"auto"``; whether there was one."""
    *parents, last = key.split(".")
    inner: Any = document
    for part in parents:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or inner.get(last) != "auto":
        return False
    inner[last] = value
    return True
