"""The checks of one machine, on every node, and one finding for all who found the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch_ns.doctor._base import Finding, Place
from atorch_ns.doctor._examine import examine
from atorch_ns.doctor._nodes._board import Board
from atorch_ns.doctor._nodes._card import Card, named_nodes
from atorch_ns.doctor._who import Who

__all__ = ["check_each", "tell_each"]


def tell_each(board: Board, place: Place, name: str) -> None:
    """Runs a check here and posts what it finds."""
    board.post(f"each/{name}", [finding.as_json() for finding in examine(place, names=(name,))])


def check_each(
    name: str, told: Mapping[int, list[dict[str, Any]]], cards: Mapping[int, Card], who: Who, limit_s: float
) -> list[Finding]:
    """What all nodes found: passes in one line, the rest with the nodes that it is about."""
    found: list[Finding] = []
    passes: dict[int, Finding] = {}
    troubles: dict[tuple[str, str, str], list[int]] = {}
    for rank, findings in told.items():
        node = rank // who.local_world_size
        for finding in (Finding(**each) for each in findings):
            if finding.verdict == "pass":
                passes.setdefault(node, finding)
            else:
                key = (finding.verdict, finding.text, finding.fix)
                troubles.setdefault(key, []).append(node)
    if passes:
        node, first = next(iter(passes.items()))
        others = f"{named_nodes([node], cards, who)}: {first.text}"
        rest = f"; in order on {len(passes) - 1} more node(s) too" if len(passes) > 1 else ""
        text = others + rest if who.num_nodes > 1 else first.text
        found.append(Finding(check=name, verdict="pass", text=text, figures=first.figures))
    for (verdict, text, fix), nodes in troubles.items():
        where = "" if who.num_nodes == 1 else f"{_where(nodes, cards, who)}: "
        found.append(Finding(check=name, verdict=verdict, text=f"{where}{text}", fix=fix))  # type: ignore[arg-type]
    silent = [rank // who.local_world_size for rank in who.leaders if rank not in told]
    if silent:
        text = f"{named_nodes(silent, cards, who)} had not finished this check {limit_s:.0f} s after node 0"
        fix = f"atorch-ns doctor --only '{name}'   # on that node"
        found.append(Finding(check=name, verdict="fail", text=text, fix=fix))
    return found


def _where(nodes: list[int], cards: Mapping[int, Card], who: Who) -> str:
    return "all nodes" if len(nodes) == who.num_nodes else named_nodes(nodes, cards, who)
