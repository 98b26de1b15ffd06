"""What a rank says of itself when it arrives, and what the ranks' words add up to."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from atorch_ns._version import __version__
from atorch_ns.cluster import OPTIONAL_PACKAGES, installed_packages
from atorch_ns.doctor._base import Finding, Verdict
from atorch_ns.doctor._who import Who

__all__ = ["Card", "card_of", "check_alike", "check_arrived", "named", "named_nodes"]

_ALIKE: Final[Mapping[str, tuple[str, Verdict, str]]] = {
    "torch": ("torch", "fail", "pip install torch=={}"),
    "package": ("atorch-ns", "fail", "pip install atorch-ns=={}"),
    "nccl": ("NCCL", "fail", "pip install --force-reinstall torch   # the same build as the others have"),
    "python": ("Python", "warn", "use one image or environment for all nodes"),
    "packages": ("optional packages", "warn", "pip install {}"),
    "devices": ("devices", "warn", "give the job nodes of one kind: the slowest sets the pace"),
}
"""Attributes of a card that must be the same on all nodes: the name, how bad a difference is, and what mends it."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A rank and what it runs on.

    Attributes:
        host: the node's name.
        torch: its version.
        package: this package's version.
        python: its version.
        nccl: its version; empty without GPUs.
        devices: names of the GPUs, with their number; ``"CPUs"`` without.
        packages: optional packages with their versions, as pip writes them.
        address: where the node's first rank listens, ``(host, port)``; ``None`` for other ranks.
        problem: why this rank cannot take part; empty if it can.
        fix: what mends that.
    """

    host: str
    torch: str
    package: str
    python: str
    nccl: str = ""
    devices: str = "CPUs"
    packages: str = ""
    address: tuple[str, int] | None = None
    problem: str = ""
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def card_of(address: tuple[str, int] | None, problem: str = "", fix: str = "") -> Card:
    """This process's."""
    import torch

    has_gpus = torch.cuda.is_available()
    names = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if has_gpus else []
    )
    return Card(
        host=platform.node(),
        torch=torch.__version__,
        package=__version__,
        python=platform.python_version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_gpus else "",
        devices=", ".join(f"{names.count(name)} × {name}" for name in sorted(set(names))) or "CPUs",
        packages=" ".join(
            f"{OPTIONAL_PACKAGES[name]}=={version}" for name, version in sorted(installed_packages().items())
        ),
        address=address,
        problem=problem,
        fix=fix,
    )


def named(node: int, cards: Mapping[int, Card], who: Who) -> str:
    """``"node 1 (host-b)"``, as far as its name is known."""
    ranks = range(node * who.local_world_size, (node + 1) * who.local_world_size)
    host = next((cards[rank].host for rank in ranks if rank in cards), "")
    return f"node {node} ({host})" if host else f"node {node}"


def named_nodes(nodes: Sequence[int], cards: Mapping[int, Card], who: Who, *, most: int = 8) -> str:
    """Several nodes by name, in a row."""
    names = [named(node, cards, who) for node in nodes[:most]]
    more = [f"{len(nodes) - most} more"] if len(nodes) > most else []
    return ", ".join([*names, *more])


def check_arrived(cards: Mapping[int, Card], who: Who, timeout_s: float) -> list[Finding]:
    """All ranks are there, and nothing keeps them from taking part."""
    found = []
    for node in range(who.num_nodes):
        ranks = range(node * who.local_world_size, min((node + 1) * who.local_world_size, who.world_size))
        missing = [rank for rank in ranks if rank not in cards]
        if missing:
            found.append(
                Finding(
                    check="nodes",
                    verdict="fail",
                    text=f"{named(node, cards, who)} is silent: rank(s) {', '.join(map(str, missing))} did not come "
                    f"within {timeout_s:.0f} s of rank 0",
                    fix="look at what torchrun printed on that node, and run there: atorch-ns doctor",
                )
            )
        broken = next((cards[rank] for rank in ranks if rank in cards and cards[rank].problem), None)
        if broken is not None:
            text = f"{named(node, cards, who)}: {broken.problem}"
            found.append(Finding(check="nodes", verdict="fail", text=text, fix=broken.fix))
    if found:
        return found
    names = named_nodes(range(who.num_nodes), cards, who)
    text = f"{who.world_size} ranks on {who.num_nodes} node(s) have come: {names}"
    return [Finding(check="nodes", verdict="pass", text=text)]


def check_alike(cards: Mapping[int, Card], who: Who) -> list[Finding]:
    """The nodes have the same versions and devices; who differs from the most is named."""
    leaders = {rank // who.local_world_size: cards[rank] for rank in who.leaders if rank in cards}
    found = []
    for attribute, (title, verdict, fix) in _ALIKE.items():
        values = {node: str(getattr(card, attribute)) for node, card in leaders.items()}
        if len(set(values.values())) < 2:
            continue
        usual = statistics.mode(values.values())
        others: dict[str, list[int]] = {}
        for node, value in values.items():
            if value != usual:
                others.setdefault(value, []).append(node)
        apart = "; ".join(
            f"{_difference(value, usual, attribute)} on {named_nodes(nodes, cards, who)}"
            for value, nodes in others.items()
        )
        like = [node for node, value in values.items() if value == usual]
        rest = _difference(usual, next(iter(others)), attribute)
        found.append(
            Finding(
                check="alike",
                verdict=verdict,
                text=f"{title}: {apart}, but {rest} on {named_nodes(like, cards, who, most=3)}",
                fix=fix.format(usual),
            )
        )
    if found:
        return found
    card = leaders[0]
    text = f"all nodes have Python {card.python}, torch {card.torch}, atorch-ns {card.package} and {card.devices}"
    return [Finding(check="alike", verdict="pass", text=text)]


def _difference(value: str, other: str, attribute: str) -> str:
    """What of a list the other does not have; a plain value as it is."""
    if attribute != "packages":
        return value or "none"
    return " ".join(sorted(set(value.split()) - set(other.split()))) or "none of these"
