"""Which methods may stand together, read off their declarations."""

from __future__ import annotations

from typing import NamedTuple

from atorch_ns.method._chosen import Chosen
from atorch_ns.method._registry import Registry
from atorch_ns.method._resolve import clash

__all__ = ["Composition", "Pairing", "composition"]


class Pairing(NamedTuple):
    """Two methods, and why they cannot stand together; ``None`` if they can."""

    first: str
    second: str
    reason: str | None


class Composition(NamedTuple):
    """All methods, variants that compose differently included, and every pair of two different methods."""

    names: tuple[str, ...]
    pairings: tuple[Pairing, ...]


def composition(registry: Registry) -> Composition:
    """Every pair of methods of a registry, with default configs and with each declared variant."""
    entries: list[tuple[str, Chosen]] = []
    for method in registry:
        entries.append((method.name, Chosen(method, method.Config())))
        for label, config in method.variants.items():
            entries.append((f"{method.name} ({label})", Chosen(method, method.Config.model_validate(config))))
    pairings = [
        Pairing(first, second, clash(one, other))
        for position, (first, one) in enumerate(entries)
        for second, other in entries[position + 1 :]
        if one.method is not other.method
    ]
    return Composition(tuple(name for name, _ in entries), tuple(pairings))
