"""From what ranks measured to findings: who failed, and which node is slow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Final

from atorch_ns.doctor._base import Finding
from atorch_ns.doctor._nodes._card import Card, named, named_nodes
from atorch_ns.doctor._who import Who

__all__ = ["check_speeds", "check_talked"]

_SLOW: Final = 0.5
"""A node with less than this share of the others' bandwidth or speed is named."""
_FIX: Final = (
    "NCCL_DEBUG=INFO GLOO_SOCKET_IFNAME=eth0 torchrun ... -m atorch_ns.cli doctor   # names the interface"
)


def check_talked(
    answers: Mapping[int, Mapping[str, Any]], cards: Mapping[int, Card], who: Who, timeout_s: float
) -> list[Finding]:
    """All ranks have measured; else the one that failed by itself, or that came least far, is named."""
    silent = sorted({rank // who.local_world_size for rank in range(who.world_size) if rank not in answers})
    if silent:
        text = f"{named_nodes(silent, cards, who)} fell silent while the ranks summed tensors"
        fix = "look at what torchrun printed on that node, and run there: atorch-ns doctor"
        return [Finding(check="all-reduce", verdict="fail", text=text, fix=fix)]
    failed = {rank: answer for rank, answer in answers.items() if "problem" in answer}
    if not failed:
        return []
    # What one rank breaks, the others notice later, as a lost connection or a time limit.
    own = {rank: answer for rank, answer in failed.items() if not answer["late"]} or failed
    fewest = min(len(answer["steps"]) for answer in own.values())
    behind = {rank: answer for rank, answer in own.items() if len(answer["steps"]) == fewest}
    rank, first = min(behind.items(), key=lambda item: item[1]["seconds"])
    node = rank // who.local_world_size
    nodes = sorted({each // who.local_world_size for each in behind})
    where = f"rank {rank} on {named(node, cards, who)}"
    if len(nodes) == who.num_nodes > 1:
        where = f"all nodes, first rank {rank} on {named(node, cards, who)}"
    after = first["steps"][-1] if first["steps"] else "nothing"
    text = f"{who.world_size} ranks could not sum a tensor: {where}: {first['problem']} (done until then: {after})"
    return [Finding(check="all-reduce", verdict="fail", text=text, fix=_FIX)]


def check_speeds(
    answers: Mapping[int, Mapping[str, Any]], cards: Mapping[int, Card], who: Who
) -> list[Finding]:
    """The figures of all nodes, and which of them is slow."""
    found = []
    for backend, of_all in answers[0]["figures"]["backends"].items():
        leaders = {
            rank // who.local_world_size: answers[rank]["figures"]["backends"][backend]
            for rank in who.leaders
        }
        title = f"{who.world_size} ranks on {who.num_nodes} node(s) by {backend}"
        found.append(_plain("all-reduce", f"{title}: {_figures(of_all['all'])}", of_all["all"]))
        if "within" in of_all:
            within = {node: one["within"] for node, one in leaders.items() if "within" in one}
            rates = {node: one["best_bytes_per_s"] for node, one in within.items()}
            found.append(_compared("within nodes", backend, rates, within, cards, who))
        if "between" in of_all:
            best = {
                node: max(one["links"].values(), key=lambda link: link["best_bytes_per_s"])
                for node, one in leaders.items()
            }
            rates = {node: one["best_bytes_per_s"] for node, one in best.items()}
            text = f"all-reduce between nodes by {backend}: {_figures(of_all['between'])}"
            found.append(_plain("between nodes", text, of_all["between"]))
            found.append(_compared("links", backend, rates, best, cards, who))
    return [*found, *_products(answers, cards, who)]


def _products(answers: Mapping[int, Mapping[str, Any]], cards: Mapping[int, Card], who: Who) -> list[Finding]:
    """Matrix products take as long on every node; a node is as slow as its slowest rank."""
    slowest: dict[int, float] = {}
    for rank, answer in answers.items():
        node = rank // who.local_world_size
        slowest[node] = max(slowest.get(node, 0.0), answer["figures"]["product_s"])
    if len(slowest) < 2:
        return []
    usual = statistics.median_low(slowest.values())
    slow = [node for node, seconds in slowest.items() if seconds > usual / _SLOW]
    text = f"a matrix product takes {usual * 1e3:.2f} ms"
    figures = {"seconds": usual}
    if not slow:
        return [
            Finding(check="compute", verdict="pass", text=f"{text}, on no node twice that", figures=figures)
        ]
    worst = max(slow, key=lambda node: slowest[node])
    return [
        Finding(
            check="compute",
            verdict="warn",
            text=f"{text}, but {slowest[worst] * 1e3:.2f} ms on {named(worst, cards, who)}"
            + (
                f"; slow as well: {named_nodes([n for n in slow if n != worst], cards, who)}"
                if len(slow) > 1
                else ""
            ),
            fix="nvidia-smi -q -d PERFORMANCE; top   # on that node: is it hot, throttled, or in use by others?",
            figures={**figures, "slowest_seconds": slowest[worst]},
        )
    ]


def _compared(
    check: str,
    backend: str,
    rates: Mapping[int, float],
    measured: Mapping[int, Mapping[str, float]],
    cards: Mapping[int, Card],
    who: Who,
) -> Finding:
    """The slowest of the nodes; one that is slower than half the others is named.

    Judged by the fastest of the repeats, which a machine that was busy for a moment does not spoil. A link has two ends: a node is judged by the better of its two, so that its neighbours are not blamed for it.
    """
    usual = statistics.median_high(rates.values())
    worst = min(rates, key=lambda node: rates[node])
    usual_rate = statistics.median_high(one["bytes_per_s"] for one in measured.values())
    what = "all-reduce within a node" if check == "within nodes" else "best link of a node"
    text = f"{what} by {backend}: {_rate(usual_rate)}"
    if len(rates) > 1:
        text += f" in the middle, least {_figures(measured[worst])} on {named(worst, cards, who)}"
    figures = {"bytes_per_second": usual_rate, "least_bytes_per_second": measured[worst]["bytes_per_s"]}
    if rates[worst] >= _SLOW * usual:
        return Finding(check=check, verdict="pass", text=text, figures=figures)
    slow = [node for node, rate in rates.items() if rate < _SLOW * usual]
    return Finding(
        check=check,
        verdict="warn",
        text=f"{text}. Slow: {named_nodes(slow, cards, who)}",
        fix="ethtool eth0 | grep Speed; ibstat   # on that node"
        if check == "links"
        else "nvidia-smi topo -m; top   # on that node: how its GPUs are connected, and who else uses it",
        figures=figures,
    )


def _plain(check: str, text: str, one: Mapping[str, float]) -> Finding:
    figures = {"latency_seconds": one["latency_s"], "bytes_per_second": one["bytes_per_s"]}
    return Finding(check=check, verdict="pass", text=text, figures=figures)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**30:.2f} GiB/s"


def _figures(one: Mapping[str, float]) -> str:
    return (
        f"{one['latency_s'] * 1e3:.2f} ms for one number, {_rate(one['bytes_per_s'])} for "
        f"{one['num_bytes'] / 2**20:.0f} MiB (n={one['n']})"
    )
