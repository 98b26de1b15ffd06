"""Clusters that are written down: a line as ``"8xH100-80GB, 16 nodes, ib400"``, or a file with its keys.

=====================  ======================================  =======================================
on the line            key in a file                           meaning
=====================  ======================================  =======================================
``8xH100-80GB``        ``devices: 8xH100-80GB``                devices of each node, and their kind
..                     ``device`` and ``devices_per_node``     the same apart; ``device`` may be a mapping
``16 nodes``           ``nodes: 16``                           1 unless given
``nvlink4``            ``within_node: nvlink4``                between devices of a node
``ib400``              ``between_nodes: ib400``                between nodes
``60GiB``              ``memory: 60GiB``                       of one device, in place of the table's
``$2.5/h``             ``price_per_hour: 2.5``                 of one device, US dollars
..                     ``to_host: pcie5``                      between a device and its host's memory
=====================  ======================================  =======================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from atorch_ns.cluster._devices import DEVICES
from atorch_ns.cluster._links import LINKS
from atorch_ns.cluster._near import nearest
from atorch_ns.errors import InputError

__all__ = ["SPEC_KEYS", "read_spec"]

SPEC_KEYS: Final = (
    "devices",
    "device",
    "devices_per_node",
    "nodes",
    "within_node",
    "between_nodes",
    "to_host",
    "memory",
    "price_per_hour",
)
"""The keys of a cluster file."""

_NUMBER = r"(?P<count>[+-]?\d[\d_]*(\.\d+)?)"
_COUNTED = re.compile(rf"^{_NUMBER}\s*[xX*×]\s*(?P<device>\S.*)$")
_NODES = re.compile(rf"^{_NUMBER}\s*nodes?$", re.IGNORECASE)
_MEMORY = re.compile(r"^\d+(\.\d+)?\s*[kmgt]i?b$", re.IGNORECASE)
_PRICE = re.compile(r"^\$\s*(?P<price>\d+(\.\d+)?)\s*(/\s*h(our)?)?$", re.IGNORECASE)
_SUFFIXES: Final = (".json", ".yaml", ".yml")


def read_spec(text_or_path: str | Path, problems: list[str]) -> dict[str, Any]:
    """The keys of a cluster file that a line or a file amounts to; what cannot be read goes to ``problems``."""
    if isinstance(text_or_path, Path) or text_or_path.strip().endswith(_SUFFIXES):
        return _read_file(Path(text_or_path), problems)
    return _read_line(text_or_path, problems)


def split_devices(text: str) -> tuple[str | None, str]:
    """``"8xH100"`` as ``("8", "H100")``; no count gives ``None``."""
    found = _COUNTED.match(text.strip())
    return (found["count"], found["device"].strip()) if found else (None, text.strip())


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
    if found := _NODES.match(part):
        return "nodes", found["count"]
    if _COUNTED.match(part):
        return "devices", part
    if _MEMORY.match(part):
        return "memory", part
    if found := _PRICE.match(part):
        return "price_per_hour", found["price"]
    sheet = next((s for name, s in LINKS.items() if part.lower() in (name, *s.aliases)), None)
    if sheet is not None:
        return ("within_node" if sheet.level == "within" else "between_nodes"), part
    if part.lower() == "cpu" or any(part.lower() in _names(name) for name in DEVICES):
        return "devices", part
    return None


def _names(device: str) -> tuple[str, ...]:
    return tuple(name.lower() for name in (device, *DEVICES[device].aliases))


def _unknown_part(part: str) -> str:
    known = [*DEVICES, "cpu", *LINKS]
    return (
        f"{part!r} is no device, link, number of nodes, memory or price.{nearest(part, known)} "
        "Write for example '8xH100-80GB, 16 nodes, ib400, 60GiB'."
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
            f"the cluster file {path} holds a {type(values).__name__}; it should map {', '.join(SPEC_KEYS)}."
        )
    keys = ", ".join(SPEC_KEYS)
    problems += [
        f"{key!r} is no key.{nearest(str(key), SPEC_KEYS)} Keys: {keys}."
        for key in values
        if key not in SPEC_KEYS
    ]
    return {key: value for key, value in values.items() if key in SPEC_KEYS and value is not None}


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
