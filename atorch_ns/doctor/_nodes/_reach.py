"""From what came of knocking to findings: nodes that others do not reach, and clocks that are apart."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final

from atorch_ns.doctor._base import Finding
from atorch_ns.doctor._nodes._card import Card, named, named_nodes
from atorch_ns.doctor._nodes._door import Knock
from atorch_ns.doctor._who import Who

__all__ = ["check_clocks", "check_reach"]

_APART_S: Final = 0.5
"""Clocks further apart than this make logs and time limits hard to compare."""


def check_reach(
    knocks: Mapping[int, Mapping[int, Knock]], cards: Mapping[int, Card], who: Who
) -> list[Finding]:
    """Every node reaches every other one.

    Args:
        knocks: by the node that asked, then by the node that was asked.
        cards: by rank.
        who: any rank.
    """
    silent = [node for node in range(who.num_nodes) if node not in knocks]
    if silent:
        text = f"{named_nodes(silent, cards, who)} did not say whom it reaches"
        fix = "look at what torchrun printed on that node"
        return [Finding(check="reach", verdict="fail", text=text, fix=fix)]
    found = []
    for node in range(who.num_nodes):
        failed = {other: knocks[other][node].problem for other in knocks if knocks[other][node].problem}
        if failed:
            found.append(_unreached(node, failed, cards, who))
    if found:
        return found
    times = {
        (one, other): knock.round_trip_s
        for one, row in knocks.items()
        for other, knock in row.items()
        if other != one
    }
    if not times:
        return []
    (one, other), worst = max(times.items(), key=lambda item: item[1])
    text = (
        f"every node reaches every other; the longest round trip is {worst * 1e3:.2f} ms, from {named(one, cards, who)} "
        f"to {named(other, cards, who)}"
    )
    return [Finding(check="reach", verdict="pass", text=text, figures={"round_trip_seconds": worst})]


def check_clocks(
    knocks: Mapping[int, Mapping[int, Knock]], cards: Mapping[int, Card], who: Who
) -> list[Finding]:
    """No node's clock is far from that of the most; measured by node 0."""
    rows = knocks.get(0, {})
    ahead = {node: knock.ahead_s for node, knock in rows.items() if not knock.problem and node} | {0: 0.0}
    if who.num_nodes < 2 or len(ahead) < 2:
        return []
    middle = sorted(ahead.values())[(len(ahead) - 1) // 2]
    doubt = max(rows[node].round_trip_s for node in ahead if node) / 2
    apart = max(ahead.values()) - min(ahead.values())
    figures = {"skew_seconds": apart, "uncertainty_seconds": doubt}
    text = f"the nodes' clocks are {apart * 1e3:.1f} ms apart, to {doubt * 1e3:.1f} ms"
    wrong = [node for node in sorted(ahead) if abs(ahead[node] - middle) > _APART_S + doubt]
    if not wrong:
        return [Finding(check="clock", verdict="pass", text=text, figures=figures)]
    # Of two nodes nobody can say which is right.
    least = named(min(ahead, key=lambda node: ahead[node]), cards, who)
    most = named(max(ahead, key=lambda node: ahead[node]), cards, who)
    whose = (
        f"{most} is ahead of {least}"
        if len(ahead) == 2
        else f"away from the others: {named_nodes(wrong, cards, who)}"
    )
    fix = "sudo chronyc makestep   # on that node; then let chronyd or systemd-timesyncd run"
    return [Finding(check="clock", verdict="warn", text=f"{text}: {whose}", fix=fix, figures=figures)]


def _unreached(node: int, failed: Mapping[int, str], cards: Mapping[int, Card], who: Who) -> Finding:
    card = cards[node * who.local_world_size]
    host = card.address[0] if card.address is not None else ""
    reason = next(iter(failed.values()))
    text = f"{named(node, cards, who)} cannot be reached from {named_nodes(list(failed), cards, who, most=3)}: {reason}"
    if _is_loopback(host):
        text += ". Its name resolves to itself alone, and gloo listens there"
        fix = "export GLOO_SOCKET_IFNAME=eth0   # on that node; or mend its line in /etc/hosts"
    else:
        fix = "open the ports between the nodes, or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME=eth0"
    return Finding(check="reach", verdict="fail", text=text, fix=fix)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
