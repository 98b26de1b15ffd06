"""Truncation: a deep model as a shallow one whose blocks stand for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from atorch_ns.profile._fingerprint import counters

__all__ = ["Container", "Truncation", "truncate"]


@dataclass(frozen=True)
class Container:
    """A list of blocks of which some are kept.

    Attributes:
        path: of the ``ModuleList`` or ``Sequential``.
        blocks: paths of all its blocks, in order.
        kept: places of those that are kept.
        stands_for: for each block its representative, as a place in ``kept``.
        kinds: fingerprints of those that are kept.
        counters: attributes that say where a block stands, as dotted paths below the block.
    """

    path: str
    blocks: tuple[str, ...]
    kept: tuple[int, ...]
    stands_for: tuple[int, ...]
    kinds: tuple[str, ...]
    counters: tuple[str, ...] = ()

    def copy_path(self, place: int) -> str:
        """The path, in the shallow model, of the kept block at ``place`` in :attr:`kept`."""
        return f"{self.path}.{place}" if self.path else str(place)


@dataclass(frozen=True)
class Truncation:
    """Which containers are shortened, by path; the others stay whole."""

    containers: Mapping[str, Container] = field(default_factory=dict)


def truncate(model: nn.Module, blocks: Mapping[str, nn.Module], prints: Mapping[str, str]) -> Truncation:
    """Keeps the first block, the last, and between them one of each kind.

    The ends are kept for themselves: what they save is not always what those between do, whose neighbours are
    blocks on both sides.

    Only ``ModuleList`` and ``Sequential`` that hold nothing but blocks are shortened: whatever else stands in
    one could change the shapes between blocks.
    """
    groups: dict[str, list[str]] = {}
    for path in blocks:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    found: dict[str, Container] = {}
    for container, paths in groups.items():
        holder = model.get_submodule(container)
        is_list = isinstance(holder, (nn.ModuleList, nn.Sequential))
        if not is_list or len(holder._modules) != len(paths):
            continue
        kinds = [prints[path] for path in paths]
        kept, stands_for = _choose(kinds)
        if len(kept) < len(paths):
            kept_kinds = tuple(kinds[index] for index in kept)
            found[container] = Container(
                path=container,
                blocks=tuple(paths),
                kept=kept,
                stands_for=stands_for,
                kinds=kept_kinds,
                counters=counters([blocks[path] for path in paths]),
            )
    return Truncation(found)


def _choose(kinds: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    last = len(kinds) - 1
    kept = [0]
    place: dict[str, int] = {}
    for index, kind in enumerate(kinds[1:last], 1):
        if kind not in place:
            place[kind] = len(kept)
            kept.append(index)
    kept.append(last)
    return tuple(kept), (0, *(place[kind] for kind in kinds[1:last]), len(kept) - 1)
