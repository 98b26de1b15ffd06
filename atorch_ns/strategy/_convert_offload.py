"""What DeepSpeed's offloading becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from atorch_ns.strategy._conversion import Converter

__all__ = ["read_offload"]

_TOGETHER: Final = "parameters, gradients and optimizer states together, each rank its shard"
_LOST: Final = {
    "optimizer": "host memory must hold the optimizer states as well, 12 bytes of each parameter with Adam and fp32 "
    "masters, divided over the ranks",
    "param": "host memory must hold the parameters as well, divided over the ranks",
}


def read_offload(
    converter: Converter, method: str, devices: Mapping[str, tuple[str, Any]], *, one_process: bool = False
) -> None:
    """Adds what keeps things in host memory. Read the precision first: it decides what composes.

    Args:
        converter: has the precision and the method of the ZeRO stage.
        method: of the stage: ``ddp``, ``zero1``, ``zero2`` or ``fsdp``.
        devices: for ``"optimizer"`` and ``"param"``, the key that was read and its device, or ``None``.
        one_process: whether the file says that there is only one.

    Raises:
        StrategyFileError: for a device other than none, cpu and nvme.
    """
    wanted = {}
    for part, (key, given) in devices.items():
        device = "none" if given is None else str(given).lower()
        if device not in ("none", "cpu", "nvme"):
            raise converter.wrong(key, given, "none, cpu, nvme")
        if device != "none":
            wanted[part] = (key, device)
        elif given is not None:
            converter.carry(key, "none: nothing is offloaded")
    if method == "ddp":
        _nothing_is_sharded(converter, wanted)
        return
    if method != "fsdp" and "param" in wanted:
        converter.leave(wanted.pop("param")[0], "DeepSpeed offloads parameters in stage 3 only")
    if not wanted:
        return
    target = _into_host_memory(converter, method, one_process=one_process)
    for part, (key, device) in wanted.items():
        if device == "cpu":
            converter.carry(key, f"cpu → {target}")
        else:
            converter.leave(key, f"nvme: nothing is kept on NVMe, so {_LOST[part]}. Now: {target}")


def _nothing_is_sharded(converter: Converter, wanted: Mapping[str, tuple[str, str]]) -> None:
    """Stage 0."""
    for part, (key, device) in wanted.items():
        least = "1" if part == "optimizer" else "3"
        converter.leave(
            key,
            f"{device}: DeepSpeed offloads this from stage {least} on. optimizer_offload beside ddp keeps optimizer "
            "states on the host, in fp32 or bf16",
        )


def _into_host_memory(converter: Converter, method: str, *, one_process: bool) -> str:
    """Adds the method that offloads, and returns what it does in words."""
    if method == "fsdp":
        converter.use("fsdp", cpu_offload=True)
        return f"fsdp.cpu_offload: {_TOGETHER}"
    fp16 = any((converter.config(name) or {}).get("dtype") == "fp16" for name in ("half", "amp_native"))
    if one_process and not fp16:
        converter.drop(method)
        converter.use("optimizer_offload")
        return f"optimizer_offload, without {method}, which has nothing to shard over in one process"
    converter.drop(method)
    converter.use("zero2", cpu_offload=True)
    other = (
        "optimizer_offload would leave parameters on the device, but refuses fp16"
        if fp16
        else f"to leave parameters on the device, name ddp and optimizer_offload instead of {method}: then the host "
        "holds the states of the whole model for every rank"
    )
    return f"zero2.cpu_offload: {_TOGETHER}; {other}"
