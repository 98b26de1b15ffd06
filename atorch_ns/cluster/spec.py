"""Cluster specifications: a line as ``"8xH100-80GB, 16 nodes, ib400"``, or a file with its keys.

=====================  ================================  ===================================================
on the line            key in a file                     meaning
=====================  ================================  ===================================================
``8xH100-80GB``        ``devices: 8xH100-80GB``          devices of each node, and their kind
..                     ``device``, ``devices_per_node``  the same as two keys; ``device`` may be a mapping
``16 nodes``           ``nodes: 16``                     1 unless given
``nvlink4``            ``within_node: nvlink4``          between devices of a node
``ib400``              ``between_nodes: ib400``          between nodes; ``ib400 rails`` is the same
``ib400 spine 2:1``    ``between_nodes: ib400 spine …``  with an oversubscribed spine: half of the rate
``60GiB``              ``memory: 60GiB``                 of one device, in place of the table's
``500W``               ``power: 500``                    limit of one device below its board's, watts
``FlashAttention-2``   ``attention: FlashAttention-2``   library of fused attention; else torch's choice
``$2.5/h``             ``price_per_hour: 2.5``           of one device, US dollars
..                     ``to_host: pcie5``                between a device and its host's memory
..                     ``measured``                      when and on what ``atorch-ns calibrate`` measured
=====================  ================================  ===================================================
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from atorch_ns.cluster.cluster import Cluster, cpu_device, cpu_hardware, installed_packages
from atorch_ns.cluster.devices import DEVICES
from atorch_ns.cluster.hardware import LINKS, Device, Hardware, Link, Rate
from atorch_ns.cluster.kernels import ATTENTION_LIBRARIES, usual_attention
from atorch_ns.errors import InputError
from atorch_ns.text import clip_text, did_you_mean, with_article

_SIZES: Final = {
    "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def refuse_unknown(mapping: Mapping[str, Any], keys: tuple[str, ...], what: str, problems: list[str]) -> None:
    """Adds a problem for every unknown key of ``mapping``, with near names."""
    for key in mapping:
        if key not in keys:
            name = f"{what}.{key}" if what else repr(key)
            problems.append(f"{name} is not a key.{did_you_mean(str(key), keys)} Keys: {', '.join(keys)}.")


def read_count(value: Any, what: str, problems: list[str]) -> int:
    """A whole number of at least 1; 1 where there is a problem."""
    count = _convert_number(value, int)
    if count is None or count < 1:
        problems.append(f"{value!r} {what}: give a whole number of at least 1.")
        return 1
    return int(count)


def read_number(value: Any, what: str, problems: list[str]) -> float:
    """A number, not negative, and not 0 where 0 would stop the estimate; 1 where there is a problem."""
    number = _convert_number(value, float)
    least_is_positive = what.endswith("bytes_per_s") or "flops_per_s" in what or "efficienc" in what
    if number is None or not math.isfinite(number) or number < 0 or (least_is_positive and number == 0):
        problems.append(f"{what}={value!r}: give a positive number.")
        return 1.0
    return float(number)


def read_memory(value: Any, problems: list[str]) -> int:
    """Bytes of ``"60GiB"``; a bare number is bytes. 1 where there is a problem."""
    text = str(value).strip().lower()
    digits = text.rstrip("bgikmt ")  # the rest is the unit
    number, unit = _convert_number(digits, float), text[len(digits) :].strip() or "b"
    if number is None or number <= 0 or not math.isfinite(number) or unit not in _SIZES:
        problems.append(f"memory={value!r}: write a positive size such as 60GiB or 512MiB.")
        return 1
    return int(number * _SIZES[unit])


def _convert_number(value: Any, kind: Callable[[Any], Any]) -> Any:
    if isinstance(value, bool):  # int(True) is 1
        return None
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        return None


SPEC_KEYS: Final = (
    "devices", "device", "devices_per_node", "nodes", "within_node", "between_nodes", "to_host", "memory",
    "power", "attention", "price_per_hour", "measured",
)  # fmt: skip
"""The keys of a cluster file."""

_NUMBER = r"(?P<count>[+-]?\d[\d_]*(\.\d+)?)"
_COUNTED = re.compile(rf"^{_NUMBER}\s*[xX*×]\s*(?P<device>\S.*)$")
_PARTS: Final = {
    "nodes": re.compile(rf"(?i)^{_NUMBER}\s*nodes?$"),
    "memory": re.compile(r"(?i)^(?P<count>\d+(\.\d+)?\s*[kmgt]i?b)$"),
    "power": re.compile(r"(?i)^(?P<count>\d+(\.\d+)?)\s*W$"),
    "price_per_hour": re.compile(r"(?i)^\$\s*(?P<count>\d+(\.\d+)?)\s*(/\s*h(our)?)?$"),
}
_LINK = re.compile(r"(?i)^(?P<link>[\w-]+)(\s+rails)?(\s+(spine\s+)?(?P<spine>[1-9]\d*(\.\d+)?):1)?$")
_LIBRARIES: Final = {name.lower(): name for name in ATTENTION_LIBRARIES}
_SUFFIXES: Final = (".json", ".yaml", ".yml")


def read_spec(text_or_path: str | Path, problems: list[str]) -> dict[str, Any]:
    """Reads a line or file into values by cluster-file key. Unreadable parts are added to ``problems``."""
    if isinstance(text_or_path, Path) or text_or_path.strip().endswith(_SUFFIXES):
        return _read_file(Path(text_or_path), problems)
    return _read_line(text_or_path, problems)


def split_devices(text: str) -> tuple[str | None, str]:
    """``"8xH100"`` as ``("8", "H100")``; no count gives ``None``."""
    match = _COUNTED.match(text.strip())
    return (match["count"], match["device"].strip()) if match else (None, text.strip())


def _read_line(text: str, problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        read = _read_part(part)
        if read is None:
            problems.append(_unknown_part(part))
            continue
        key, value = read
        if key in values:
            problems.append(f"{key} is given twice: {values[key]!r} and {value!r}.")
        values[key] = value
    return values


def _read_part(part: str) -> tuple[str, Any] | None:
    for key, form in _PARTS.items():
        if match := form.match(part):
            return key, match["count"]
    if _COUNTED.match(part):
        return "devices", part
    if part.lower() in _LIBRARIES:
        return "attention", part
    if entry := _find_link(part):
        return ("within_node" if LINKS[entry[0]].level == "within" else "between_nodes"), part
    if part.lower() == "cpu" or any(part.lower() in _device_names(name) for name in DEVICES):
        return "devices", part
    return None


def _find_link(text: str) -> tuple[str, float] | None:
    """Name of a link in the table, and the oversubscription of its spine that the text gives."""
    if match := _LINK.match(text.strip()):
        for name, sheet in LINKS.items():
            has_spine = match["link"] != text.strip()  # or rails, between nodes alone
            if match["link"].lower() in (name, *sheet.aliases) and not (
                has_spine and sheet.level == "within"
            ):
                return name, float(match["spine"] or 1)
    return None


def _device_names(device: str) -> tuple[str, ...]:
    return tuple(name.lower() for name in (device, *DEVICES[device].aliases))


def _unknown_part(part: str) -> str:
    names = [*DEVICES, "cpu", *LINKS, *ATTENTION_LIBRARIES]
    return (
        f"{part!r} is not a device, link, number of nodes, memory, power, library of attention or price.{did_you_mean(part, names)} "
        "Write for example '8xH100-80GB, 16 nodes, ib400, 60GiB'; the spine stands behind its link: 'ib400 spine 2:1'."
    )


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"the cluster file {path} cannot be read: {why}") from error
    try:
        values = json.loads(text) if path.suffix == ".json" else _load_yaml(text)
    except ValueError as error:
        raise InputError(f"the cluster file {path} is not {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, Mapping):
        raise InputError(
            f"the cluster file {path} holds {with_article(values)}; it should map {', '.join(SPEC_KEYS)}."
        )
    if isinstance(values.get("devices"), Mapping) and "schema" in values:
        raise InputError(
            f"{path} holds factors written by report.refit, not a cluster; pass it as search_calibration."
        )
    refuse_unknown(values, SPEC_KEYS, "", problems)
    return {key: value for key, value in values.items() if key in SPEC_KEYS and value is not None}


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_DEVICE_KEYS: Final = ("like", "memory", *(key.name for key in fields(Device) if key.name != "memory_bytes"))
_LINK_KEYS: Final = (
    "like",
    "latency_s",
    "bytes_per_s",
    *(key.name for key in fields(Link) if key.name != "rate"),
)
_MOST_RANKS: Final = 10_000_000  # a larger count is a mistake


def cluster_from_spec(text_or_path: str | Path) -> Cluster:
    """A cluster from its specification, for planning without it; packages and torch are this machine's.

    Args:
        text_or_path: ``"8xH100-80GB, 16 nodes, ib400"``, ``"4xA100"``, ``"2xcpu"``, or a YAML or JSON file
            with the keys ``devices``, ``nodes``, ``within_node``, ``between_nodes``, ``memory``, ….

    Raises:
        InputError: naming every problem, and near names.
    """
    problems: list[str] = []
    values = read_spec(text_or_path, problems)
    per_node, kind = _read_devices(values, problems)
    nodes = read_count(values.get("nodes", 1), "nodes", problems)
    memory = read_memory(values["memory"], problems) if "memory" in values else None
    device = _read_device(kind, per_node, problems)
    if device is not None:
        price = read_number(values.get("price_per_hour", device.price_per_hour), "price_per_hour", problems)
        device = replace(device, memory_bytes=memory or device.memory_bytes, price_per_hour=price)
        if "power" in values:
            device = _limit_power(device, read_number(values["power"], "power", problems), problems)
        if "attention" in values:
            device = replace(device, attention=_attention_library(device, str(values["attention"]), problems))
    hardware = None if device is None else _read_hardware(device, values, per_node, nodes, problems=problems)
    if not problems and per_node * nodes > _MOST_RANKS:
        problems.append(f"{per_node} x {nodes} devices are more than any cluster has; check the counts.")
    if problems or hardware is None or device is None:
        raise InputError(_problems_message(problems, text_or_path))
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


def _problems_message(problems: list[str], source: str | Path) -> str:
    text = clip_text(str(source), 120)
    if len(problems) == 1:
        return f"{problems[0]} (cluster {text!r})"
    lines = [f"{len(problems)} problems in the cluster {text!r}:"]
    return "\n".join(lines + [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)])


def _read_devices(values: Mapping[str, Any], problems: list[str]) -> tuple[int, Any]:
    """Number of devices of each node, and the specification of their kind."""
    if "devices" not in values and "device" not in values:
        if not problems:
            problems.append("no device is named; write for example '8xH100-80GB'.")
        return 1, None
    if "devices" in values and "device" in values:
        problems.append("devices and device are both given; write one of them.")
    kind, count = values.get("devices", values.get("device")), None
    if isinstance(kind, str):
        if "+" in kind[1:]:
            problems.append(
                f"{kind!r} names several kinds of nodes, and a plan is for nodes that are alike: name the slowest kind "
                "for all, such as '8xA100-80GB, 2 nodes, ib400', or plan for each kind alone."
            )
            return 1, None
        count, kind = split_devices(kind)
    if count is not None and "devices_per_node" in values:
        problems.append(f"devices_per_node={values['devices_per_node']} and {count}x: write one of them.")
    return read_count(count or values.get("devices_per_node", 1), "devices of a node", problems), kind


def _read_device(kind: Any, per_node: int, problems: list[str]) -> Device | None:
    if kind is None:
        return None
    if isinstance(kind, str):
        return _known_device(kind, per_node, problems)
    if not isinstance(kind, Mapping):
        problems.append(f"device={kind!r} is neither a name nor a mapping of {', '.join(_DEVICE_KEYS)}.")
        return None
    return _own_device(kind, per_node, problems)


def _known_device(name: str, per_node: int, problems: list[str]) -> Device | None:
    if name.lower() == "cpu":
        return cpu_device(per_node)
    for device_name, sheet in DEVICES.items():
        if name.lower() in (device_name.lower(), *(alias.lower() for alias in sheet.aliases)):
            return sheet.device(device_name)
    aliases = {alias for sheet in DEVICES.values() for alias in sheet.aliases}
    problems.append(
        f"{name!r} is not a device of the table.{did_you_mean(name, [*DEVICES, *aliases, 'cpu'])} "
        f"Known: {', '.join(DEVICES)}, cpu; others can be described in a file."
    )
    return None


def _limit_power(device: Device, watts: float, problems: list[str]) -> Device:
    sheet = DEVICES.get(device.name)
    most = sheet.power_w if sheet else None
    if most is None or not 0 < watts <= most.value:
        limits = (
            f"of up to {most.value:g} W" if most else "for devices of the table that have their power there"
        )
        problems.append(f"power={watts:g}: limits are {limits}; for others give flops_per_s and efficiency.")
        return device
    # The clock goes with the cube root of the power, since the voltage goes with the clock. By data sheets a
    # board of 350 W has 0.76 of the FLOP/s of one of 700 W with the same chip; this gives 0.79.
    share = (watts / most.value) ** (1 / 3)
    return replace(device, flops_per_s={dtype: rate * share for dtype, rate in device.flops_per_s.items()})


def _attention_library(device: Device, name: str, problems: list[str]) -> str:
    if not device.kernels:
        problems.append(f"attention={name!r}: the table has no rates of fused attention for {device.name}.")
    elif name.lower() == "cudnn" and usual_attention(device.kernels) != _LIBRARIES["cudnn"]:
        problems.append(f"attention={name!r}: the table has no rates of cuDNN's attention for {device.name}.")
    if name.lower() not in _LIBRARIES:
        near = did_you_mean(name, ATTENTION_LIBRARIES)
        problems.append(
            f"attention={name!r} is not a library of the table.{near} Known: {', '.join(ATTENTION_LIBRARIES)}."
        )
    return _LIBRARIES.get(name.lower(), "")


def _own_device(figures: Mapping[str, Any], per_node: int, problems: list[str]) -> Device | None:
    refuse_unknown(figures, _DEVICE_KEYS, "device", problems)
    # A known name without rates refers to that device of the table.
    like = figures.get("like", figures.get("name") if "flops_per_s" not in figures else None)
    base = _known_device(str(like), per_node, problems) if like is not None else None
    if like is not None and base is None:
        return None
    keys = () if base else ("name", "memory", "memory_bytes_per_s", "flops_per_s")
    missing = [key for key in keys if key not in figures]
    if missing:
        problems.append(f"device: {', '.join(missing)} must be given, or like=<a known device>.")
        return None
    start = base or Device(
        name="", type="cuda", memory_bytes=0, memory_bytes_per_s=0.0, flops_per_s={}, launch_s=6e-6
    )
    others = ("name", "flops_per_s", "attention", "source")
    read = _read_fields(Device, figures, others, "device", problems=problems)
    if "efficiency" in read:
        read = {"efficiencies": {}, **read}  # the given figure holds for all dtypes
    device = replace(
        start,
        **read,
        name=str(figures.get("name", start.name)),
        memory_bytes=read_memory(figures["memory"], problems) if "memory" in figures else start.memory_bytes,
        flops_per_s={**start.flops_per_s, **_read_flops(figures.get("flops_per_s", {}), start, problems)},
        source=str(figures.get("source", f"given{f'; else {start.source}' if start.source else ''}")),
    )
    if "attention" in figures:
        return replace(device, attention=_attention_library(device, str(figures["attention"]), problems))
    return device


def _read_fields(
    kind: type, values: Mapping[str, Any], others: tuple[str, ...], what: str, *, problems: list[str]
) -> dict[str, Any]:
    """Reads the given fields of a dataclass by their types, except ``others``."""
    from pydantic import TypeAdapter, ValidationError

    hints, read = get_type_hints(kind), {}
    for name in (field.name for field in fields(kind) if field.name in values and field.name not in others):
        before = len(problems)
        _check_numbers(values[name], f"{what}.{name}", problems)
        try:
            read[name] = TypeAdapter(hints[name]).validate_python(values[name])
        except ValidationError as error:
            if len(problems) == before:
                first = error.errors()[0]
                where = ".".join(map(str, (what, name, *first["loc"])))
                problems.append(f"{where}={first['input']!r}: {first['msg']}.")
    return read


def _check_numbers(value: Any, what: str, problems: list[str]) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            _check_numbers(each, f"{what}.{key}", problems)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_numbers(each, what, problems)
    elif _convert_number(value, float) is not None:
        read_number(value, what, problems)


def _read_flops(rates: Any, start: Device, problems: list[str]) -> dict[str, float]:
    if not isinstance(rates, Mapping):
        problems.append(f"device.flops_per_s={rates!r} should map dtypes such as bfloat16 to FLOP/s.")
        return {}
    read = {
        str(key): read_number(value, f"device.flops_per_s.{key}", problems) for key, value in rates.items()
    }
    if "float32" not in {**start.flops_per_s, **read}:
        problems.append("device.flops_per_s lacks float32, which stands for dtypes that are not given.")
    return read


def _read_hardware(
    device: Device, values: Mapping[str, Any], per_node: int, nodes: int, *, problems: list[str]
) -> Hardware:
    if device.type == "cpu":
        start = cpu_hardware(per_node, device.memory_bytes)
        usual = {key: getattr(start, key) for key in ("within_node", "between_nodes", "to_host")}
    else:
        sheet = DEVICES.get(device.name)
        within, host = (sheet.within_node, sheet.to_host) if sheet else ("pcie4", "pcie4")
        names = {"within_node": within, "between_nodes": "ib400", "to_host": host}
        usual = {key: LINKS[name].link(name, per_node) for key, name in names.items()}
        if sheet and 0 < sheet.most_per_node < per_node:
            problems.append(
                f"{per_node} {device.name} are more than the {sheet.most_per_node} that NVLink joins in a rack: name racks "
                f"as nodes, for example '64x{device.name}, {math.ceil(per_node * nodes / 64)} nodes, ib400'."
            )
    if nodes > 1 and "between_nodes" not in values and device.type != "cpu":
        problems.append(f"{nodes} nodes need the link between them: name one, such as ib400 or eth100.")
    links = {
        key: _read_link(values[key], key, link, per_node, problems=problems) if key in values else link
        for key, link in usual.items()
    }
    if "measured" in values and nodes == 1 and "between_nodes" not in values:
        links["between_nodes"] = links["within_node"]  # there is no other node
    return Hardware(**links, device=device, measured="measured" in values)


def _read_link(value: Any, key: str, usual: Link, per_node: int, *, problems: list[str]) -> Link:
    if isinstance(value, str):
        return _known_link(value, key, per_node, problems) or usual
    if not isinstance(value, Mapping):
        problems.append(f"{key}={value!r} is neither a name nor a mapping of {', '.join(_LINK_KEYS)}.")
        return usual
    refuse_unknown(value, _LINK_KEYS, key, problems)
    base = (_known_link(str(value["like"]), key, per_node, problems) if "like" in value else None) or usual
    rate = Rate(
        read_number(value.get("latency_s", base.rate.latency_s), f"{key}.latency_s", problems),
        read_number(value.get("bytes_per_s", base.rate.bytes_per_s), f"{key}.bytes_per_s", problems),
    )
    # Rates by collective and ramps were measured at the link's own rate; with another one they are void.
    start = base if rate == base.rate else replace(base, rate=rate, collectives={}, ramp=())
    return replace(
        start,
        **_read_fields(Link, value, ("name", "source"), key, problems=problems),
        name=str(value.get("name", base.name)),
        source=str(value.get("source", f"given; else {base.source}")),
    )


def _known_link(name: str, key: str, per_node: int, problems: list[str]) -> Link | None:
    if entry := _find_link(name):
        link = LINKS[entry[0]].link(entry[0], per_node)
        rate = Rate(link.rate.latency_s, link.rate.bytes_per_s / entry[1])  # all traffic may cross the spine
        return replace(link, name=name, rate=rate) if entry[1] > 1 else link
    problems.append(
        f"{key}={name!r} is not a link of the table.{did_you_mean(name, LINKS)} Known: {', '.join(LINKS)}."
    )
    return None
