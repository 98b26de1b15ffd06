"""A cluster made from what is written of it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from atorch_ns.cluster._cluster import Cluster, installed_packages
from atorch_ns.cluster._devices import DEVICES
from atorch_ns.cluster._hardware import Device, Hardware, Link, Rate
from atorch_ns.cluster._host import cpu_device, cpu_hardware
from atorch_ns.cluster._links import LINKS
from atorch_ns.cluster._near import nearest
from atorch_ns.cluster._spec import read_spec, split_devices
from atorch_ns.cluster._spec_values import read_count, read_memory, read_number, refuse_unknown
from atorch_ns.errors import InputError

__all__ = ["cluster_from_spec"]

_DEVICE_KEYS: Final = (
    "name", "like", "type", "memory", "memory_bytes_per_s", "flops_per_s", "launch_s", "efficiency",
    "capability", "price_per_hour", "source",
)  # fmt: skip
_LINK_KEYS: Final = ("name", "like", "latency_s", "bytes_per_s", "overlap", "source")
_MOST_RANKS: Final = 10_000_000


def cluster_from_spec(text_or_path: str | Path) -> Cluster:
    """The cluster that a line or a file describes; see :mod:`atorch_ns.cluster._spec` for their form.

    Packages and torch are those of this machine.

    Raises:
        InputError: naming everything that is wrong.
    """
    problems: list[str] = []
    values = read_spec(text_or_path, problems)
    per_node, wanted = _devices(values, problems)
    nodes = read_count(values.get("nodes", 1), "nodes", problems)
    memory = read_memory(values["memory"], problems) if "memory" in values else None
    device = _device(wanted, per_node, problems)
    if device is not None:
        price = read_number(values.get("price_per_hour", device.price_per_hour), "price_per_hour", problems)
        device = replace(device, memory_bytes=memory or device.memory_bytes, price_per_hour=price)
    hardware = None if device is None else _hardware(device, values, per_node, nodes, problems)
    if not problems and per_node * nodes > _MOST_RANKS:
        problems.append(f"{per_node} x {nodes} devices are more than any cluster has; check the counts.")
    if problems or hardware is None or device is None:
        raise InputError(_all(problems, text_or_path))
    return Cluster(
        world_size=per_node * nodes,
        local_world_size=per_node,
        distributed=per_node * nodes > 1,
        device_type=device.type,
        device_name=device.name,
        device_memory_bytes=device.memory_bytes,
        capability=device.capability,
        packages=installed_packages(),
        torch=importlib.metadata.version("torch"),
        hardware=hardware,
    )


def _all(problems: list[str], source: str | Path) -> str:
    shown = str(source) if len(str(source)) <= 120 else f"{str(source)[:117]}..."
    if len(problems) == 1:
        return f"{problems[0]} (cluster {shown!r})"
    lines = [f"{len(problems)} problems in the cluster {shown!r}:"]
    return "\n".join(lines + [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)])


def _devices(values: Mapping[str, Any], problems: list[str]) -> tuple[int, Any]:
    """Devices of each node, and what is said of their kind."""
    if "devices" not in values and "device" not in values:
        if not problems:
            problems.append("no device is named; write for example '8xH100-80GB'.")
        return 1, None
    if "devices" in values and "device" in values:
        problems.append("devices and device are both given; write one of them.")
    wanted, count = values.get("devices", values.get("device")), None
    if isinstance(wanted, str):
        count, wanted = split_devices(wanted)
    if count is not None and "devices_per_node" in values:
        problems.append(
            f"devices_per_node={values['devices_per_node']} and {count}x are both given; write one."
        )
    return read_count(count or values.get("devices_per_node", 1), "devices of a node", problems), wanted


def _device(wanted: Any, per_node: int, problems: list[str]) -> Device | None:
    if wanted is None:
        return None
    if isinstance(wanted, str):
        return _known_device(wanted, per_node, problems)
    if not isinstance(wanted, Mapping):
        problems.append(f"device={wanted!r} is neither a name nor a mapping of {', '.join(_DEVICE_KEYS)}.")
        return None
    return _own_device(wanted, per_node, problems)


def _known_device(name: str, per_node: int, problems: list[str]) -> Device | None:
    if name.lower() == "cpu":
        return cpu_device(per_node)
    for known, sheet in DEVICES.items():
        if name.lower() in (known.lower(), *(alias.lower() for alias in sheet.aliases)):
            return sheet.device(known)
    aliases = {alias for sheet in DEVICES.values() for alias in sheet.aliases}
    problems.append(
        f"{name!r} is no device of the table.{nearest(name, [*DEVICES, *aliases, 'cpu'])} "
        f"Known: {', '.join(DEVICES)}, cpu; others can be described in a file."
    )
    return None


def _own_device(given: Mapping[str, Any], per_node: int, problems: list[str]) -> Device | None:
    """A device described by its figures, on top of a known one where ``like`` names it."""
    refuse_unknown(given, _DEVICE_KEYS, "device", problems)
    like = given.get("like", given.get("name") if "flops_per_s" not in given else None)
    base = _known_device(str(like), per_node, problems) if like is not None else None
    if like is not None and base is None:
        return None
    needed = () if base else ("name", "memory", "memory_bytes_per_s", "flops_per_s")
    missing = [key for key in needed if key not in given]
    if missing:
        problems.append(f"device: {', '.join(missing)} must be given, or like=<a known device>.")
        return None
    start = base or Device(
        name="", type="cuda", memory_bytes=0, memory_bytes_per_s=0.0, flops_per_s={}, launch_s=6e-6
    )
    numbers = {
        key: read_number(given[key], f"device.{key}", problems)
        for key in ("memory_bytes_per_s", "launch_s", "efficiency", "price_per_hour")
        if key in given
    }
    return replace(
        start,
        **numbers,
        name=str(given.get("name", start.name)),
        type=_type(given.get("type", start.type), problems),
        memory_bytes=read_memory(given["memory"], problems) if "memory" in given else start.memory_bytes,
        flops_per_s={**start.flops_per_s, **_flops(given.get("flops_per_s", {}), start, problems)},
        capability=_capability(given.get("capability", start.capability), problems),
        source=str(given.get("source", f"given{f'; else {start.source}' if start.source else ''}")),
    )


def _flops(given: Any, start: Device, problems: list[str]) -> dict[str, float]:
    if not isinstance(given, Mapping):
        problems.append(f"device.flops_per_s={given!r} should map dtypes such as bfloat16 to FLOP/s.")
        return {}
    read = {
        str(key): read_number(value, f"device.flops_per_s.{key}", problems) for key, value in given.items()
    }
    if "float32" not in {**start.flops_per_s, **read}:
        problems.append("device.flops_per_s lacks float32, which stands for dtypes that are not given.")
    return read


def _type(value: Any, problems: list[str]) -> str:
    if value not in ("cuda", "cpu"):
        problems.append(f"device.type={value!r}; accepted: cuda, cpu.")
    return str(value)


def _capability(value: Any, problems: list[str]) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return (value[0], value[1])
    problems.append(f"device.capability={value!r} should be two integers such as [9, 0].")
    return None


def _hardware(
    device: Device, values: Mapping[str, Any], per_node: int, nodes: int, problems: list[str]
) -> Hardware:
    if device.type == "cpu":
        start = replace(cpu_hardware(per_node, device.memory_bytes), device=device)
        usual = {
            "within_node": start.within_node,
            "between_nodes": start.between_nodes,
            "to_host": start.to_host,
        }
    else:
        sheet = DEVICES.get(device.name)
        names = {
            "within_node": sheet.within_node if sheet else "pcie4",
            "between_nodes": "ib400",
            "to_host": sheet.to_host if sheet else "pcie4",
        }
        usual = {key: LINKS[name].link(name, per_node) for key, name in names.items()}
    if nodes > 1 and "between_nodes" not in values and device.type != "cpu":
        problems.append(f"{nodes} nodes need the link between them: name one, such as ib400 or eth100.")
    links = {
        key: _link(values[key], key, usual[key], per_node, problems) if key in values else usual[key]
        for key in usual
    }
    return Hardware(
        device=device,
        within_node=links["within_node"],
        between_nodes=links["between_nodes"],
        to_host=links["to_host"],
    )


def _link(wanted: Any, key: str, usual: Link, per_node: int, problems: list[str]) -> Link:
    if isinstance(wanted, str):
        return _known_link(wanted, key, per_node, problems) or usual
    if not isinstance(wanted, Mapping):
        problems.append(f"{key}={wanted!r} is neither a name nor a mapping of {', '.join(_LINK_KEYS)}.")
        return usual
    refuse_unknown(wanted, _LINK_KEYS, key, problems)
    base = (_known_link(str(wanted["like"]), key, per_node, problems) if "like" in wanted else None) or usual
    rate = Rate(
        read_number(wanted.get("latency_s", base.rate.latency_s), f"{key}.latency_s", problems),
        read_number(wanted.get("bytes_per_s", base.rate.bytes_per_s), f"{key}.bytes_per_s", problems),
    )
    overlap = read_number(wanted.get("overlap", base.overlap), f"{key}.overlap", problems)
    source = str(wanted.get("source", f"given; else {base.source}"))
    return Link(name=str(wanted.get("name", base.name)), rate=rate, overlap=overlap, source=source)


def _known_link(name: str, key: str, per_node: int, problems: list[str]) -> Link | None:
    for known, sheet in LINKS.items():
        if name.lower() in (known, *sheet.aliases):
            return sheet.link(known, per_node)
    problems.append(
        f"{key}={name!r} is no link of the table.{nearest(name, LINKS)} Known: {', '.join(LINKS)}."
    )
    return None
