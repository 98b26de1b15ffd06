"""Findings about several nodes: which node is absent, different, broken or slow, by the reports of ranks."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from atorch_ns.doctor.base import Finding, Verdict, failed, passed, warned
from atorch_ns.doctor.rank_info import Who
from atorch_ns.text import bytes_text, first_few, seconds_text

_SLOW: Final = 0.5  # share of the others' bandwidth or speed below which a node is named
_SKEW_S: Final = 0.5  # more makes logs and time limits hard to compare
_EXPECTED: Final[Mapping[str, tuple[Verdict, str]]] = {  # differences, with fixes; all others are warnings
    "torch": ("fail", "pip install torch=={}"),
    "atorch-ns": ("fail", "pip install atorch-ns=={}"),
    "NCCL": ("fail", "pip install --force-reinstall torch   # the same build as the others have"),
    "Python": ("warn", "use one image or environment for all nodes"),
    "devices": ("warn", "give the job nodes of one kind: the slowest sets the pace"),
}


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """A rank's node, software and devices.

    Attributes:
        host: the node's name.
        versions: versions by package, and ``devices``; all nodes should have the same.
        address: ``(host, port)`` at which the node's first rank listens; ``None`` for other ranks.
        problem: reason why this rank cannot take part; empty if it can.
        fix: command that solves the problem.
    """

    host: str
    versions: Mapping[str, str]
    address: tuple[str, int] | None = None
    problem: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Nodes:
    """The nodes by name.

    Attributes:
        who: a rank.
        inventories: inventories of the ranks that arrived, by rank.
    """

    who: Who
    inventories: Mapping[int, Inventory] = field(default_factory=dict)

    def named(self, nodes: Iterable[int], *, most: int = 8) -> str:
        """``"node 1 (host-b), node 2"``: with host names as far as they are known."""
        names = []
        for node in nodes:
            ranks = [rank for rank in self.who.ranks_of(node) if rank in self.inventories]
            host = self.inventories[ranks[0]].host if ranks else ""
            names.append(f"node {node} ({host})" if host else f"node {node}")
        return first_few(names, most)

    def of(self, ranks: Iterable[int]) -> list[int]:
        """The nodes of ranks, in order."""
        return sorted({rank // self.who.local_world_size for rank in ranks})


def arrivals(nodes: Nodes, timeout_s: float) -> list[Finding]:
    """All ranks are there, and nothing keeps them from taking part."""
    who, came, findings = nodes.who, nodes.inventories, []
    for node in range(who.num_nodes):
        missing = [rank for rank in who.ranks_of(node) if rank not in came]
        if missing:
            text = (
                f"{nodes.named([node])} is silent: rank(s) {', '.join(map(str, missing))} did not come within "
                f"{timeout_s:.0f} s of rank 0"
            )
            fix = "look at what torchrun printed on that node, and run there: atorch-ns doctor"
            findings.append(failed("nodes", text, fix))
        for rank in who.ranks_of(node):
            if rank in came and came[rank].problem:
                text = f"{nodes.named([node])}: {came[rank].problem}"
                findings.append(failed("nodes", text, came[rank].fix))
                break
    text = f"{who.world_size} ranks on {who.num_nodes} node(s) have come: {nodes.named(range(who.num_nodes))}"
    return findings or [passed("nodes", text)]


def differences(nodes: Nodes) -> list[Finding]:
    """The nodes have the same versions and devices; those that differ from the majority are named."""
    leaders = [nodes.inventories[rank].versions for rank in nodes.who.leaders]
    findings = []
    for name in dict.fromkeys(name for versions in leaders for name in versions):
        by_value: dict[str, list[int]] = {}
        for node, versions in enumerate(leaders):
            by_value.setdefault(versions.get(name, "none"), []).append(node)
        if len(by_value) < 2:
            continue
        usual = max(by_value, key=lambda value: len(by_value[value]))  # the majority's, taken for right
        rest = nodes.named(by_value.pop(usual), most=3)
        odd = "; ".join(f"{value} on {nodes.named(group)}" for value, group in by_value.items())
        package = f"pip uninstall {name}" if usual == "none" else f"pip install {name}=={{}}"
        verdict, fix = _EXPECTED.get(name, ("warn", package))
        text, fix = f"{name}: {odd}, but {usual} on {rest}", fix.format(usual)
        findings.append(Finding(check="alike", verdict=verdict, text=text, fix=fix))
    same = ", ".join(f"{name} {leaders[0][name]}" for name in _EXPECTED if name in leaders[0])
    return findings or [passed("alike", f"all nodes have {same}")]


def reachability(rows: Mapping[int, Mapping[int, tuple[float, str]]], nodes: Nodes) -> list[Finding]:
    """Every node reaches every other one.

    Args:
        rows: seconds and problem (or empty) of each connection, by the node that connects, then by the other.
        nodes: all of them.
    """
    silent = [node for node in range(nodes.who.num_nodes) if node not in rows]
    if silent:
        text = f"{nodes.named(silent)} did not say whom it reaches"
        fix = "look at what torchrun printed on that node"
        return [failed("reach", text, fix)]
    findings = []
    for node, leader in enumerate(nodes.who.leaders):
        errors = {other: row[node][1] for other, row in rows.items() if row[node][1]}
        if not errors:
            continue
        address = nodes.inventories[leader].address
        reason = next(iter(errors.values()))
        text = f"{nodes.named([node])} cannot be reached from {nodes.named(errors, most=3)}: {reason}"
        fix = "open the ports between the nodes, or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME=eth0"
        if address is not None and ipaddress.ip_address(address[0]).is_loopback:
            text += ". Its name resolves to itself alone, and gloo listens there"
            fix = "export GLOO_SOCKET_IFNAME=eth0   # on that node; or correct its line in /etc/hosts"
        findings.append(failed("reach", text, fix))
    times = [(row[to][0], node, to) for node, row in rows.items() for to in row if to != node]
    if findings or not times:
        return findings
    worst, node, to = max(times)
    text = (
        f"every node reaches every other; the slowest connection takes {seconds_text(worst)}, from "
        f"{nodes.named([node])} to {nodes.named([to])}"
    )
    return [passed("reach", text, figures={"round_trip_seconds": worst})]


def clocks(readings: Mapping[str, Any], nodes: Nodes) -> Finding:
    """No node's clock is far from the majority's."""
    ahead = {int(node): seconds for node, seconds in readings["ahead_s"].items()}
    doubt = readings["uncertainty_s"]
    skew = max(ahead.values()) - min(ahead.values())
    figures = {"skew_seconds": skew, "uncertainty_seconds": doubt}
    text = f"the nodes' clocks are {seconds_text(skew)} apart, to {seconds_text(doubt)}"
    middle = statistics.median(ahead.values())
    wrong = [node for node in sorted(ahead) if abs(ahead[node] - middle) > _SKEW_S + doubt]
    if not wrong:
        return passed("clock", text, figures=figures)
    text += f": {nodes.named(wrong)} {'is' if len(wrong) == 1 else 'are'} away from the middle"
    fix = "sudo chronyc makestep   # on that node; then let chronyd or systemd-timesyncd run"
    return warned("clock", text, fix, figures=figures)


def failures(answers: Mapping[int, Mapping[str, Any]], nodes: Nodes) -> list[Finding]:
    """Checks that all ranks have measured. Otherwise names the rank that got least far or failed first.

    Args:
        answers: by rank, ``steps`` begun, the ``problem``, whether it was ``late``, and ``seconds`` taken.
        nodes: all nodes.
    """
    who = nodes.who
    silent = nodes.of(rank for rank in range(who.world_size) if rank not in answers)
    if silent:
        text = f"{nodes.named(silent)} fell silent while the ranks summed tensors"
        fix = "look at what torchrun printed on that node, and run there: atorch-ns doctor"
        return [failed("all-reduce", text, fix)]
    problems = {rank: answer for rank, answer in answers.items() if "problem" in answer}
    if not problems:
        return []
    # Other ranks notice a failure later, as a lost connection or at the time limit.
    fewest = min(len(answer["steps"]) for answer in problems.values())
    behind = {rank: answer for rank, answer in problems.items() if len(answer["steps"]) == fewest}
    rank, first = min(behind.items(), key=lambda item: (item[1]["late"], item[1]["seconds"]))
    where = f"rank {rank} on {nodes.named(nodes.of([rank]))}"
    if len(nodes.of(behind)) == who.num_nodes > 1:
        where = f"all nodes, first {where}"
    last = first["steps"][-1] if first["steps"] else "nothing"
    text = f"{who.world_size} ranks could not sum a tensor: {where}: {first['problem']} (begun until then: {last})"
    fix = (
        "NCCL_DEBUG=INFO GLOO_SOCKET_IFNAME=eth0 torchrun ... -m atorch_ns.cli doctor   # names the interface"
    )
    return [failed("all-reduce", text, fix)]


def speeds(figures: Mapping[int, Mapping[str, Any]], nodes: Nodes) -> list[Finding]:
    """The figures of all nodes, and which of them is slow.

    A node is judged by the better of its two links, so that it is not blamed for a slow neighbour.
    """
    who, findings = nodes.who, []
    for backend, first in figures[0]["backends"].items():
        title = f"{who.world_size} ranks on {who.num_nodes} node(s) by {backend}"
        findings.append(all_reduce_finding("all-reduce", title, first["all"]))
        of_nodes = [figures[rank]["backends"][backend] for rank in who.leaders]
        if "within" in first:
            within, title = [each["within"] for each in of_nodes], f"all-reduce within a node by {backend}"
            fix = "nvidia-smi topo -m; top   # on that node: how its GPUs are connected, and who else uses it"
            findings.append(_judge_bandwidths("within nodes", title, within, fix, nodes=nodes))
        if "between" in first:
            title = f"all-reduce between nodes by {backend}"
            findings.append(all_reduce_finding("between nodes", title, first["between"]))
            links = [each["links"].values() for each in of_nodes]
            best = [max(each, key=lambda link: link["best_bytes_per_s"]) for each in links]
            title, fix = (
                f"best link of a node by {backend}",
                "ethtool eth0 | grep Speed; ibstat   # on that node",
            )
            findings.append(_judge_bandwidths("links", title, best, fix, nodes=nodes))
    if who.num_nodes > 1:
        # A node is as slow as its slowest rank.
        products = [max(figures[rank]["product_s"] for rank in who.ranks_of(n)) for n in range(who.num_nodes)]
        usual, worst = statistics.median_low(products), max(products)
        text = f"a matrix product takes {seconds_text(usual)}"
        text += f", at most {seconds_text(worst)} on {nodes.named([products.index(worst)])}"
        fix = "nvidia-smi -q -d PERFORMANCE; top   # on that node: is it hot, throttled, or in use by others?"
        numbers = {"seconds": usual, "slowest_seconds": worst}
        rates = [1 / each for each in products]
        findings.append(_judge_speeds("compute", text, rates, fix, figures=numbers, nodes=nodes))
    return findings


def all_reduce_finding(check: str, title: str, result: Mapping[str, float]) -> Finding:
    """An all-reduce's latency and bandwidth."""
    figures = {"latency_seconds": result["latency_s"], "bytes_per_second": result["bytes_per_s"]}
    return passed(check, f"{title}: {_figures_text(result)}", figures=figures)


def _judge_bandwidths(
    check: str, title: str, by_node: list[Mapping[str, float]], fix: str, *, nodes: Nodes
) -> Finding:
    best = [each["best_bytes_per_s"] for each in by_node]  # a machine may have been busy for a moment
    usual, worst = statistics.median_high(each["bytes_per_s"] for each in by_node), best.index(min(best))
    text = f"{title}: {bytes_text(usual)}/s in the middle, least {_figures_text(by_node[worst])} on "
    numbers = {"bytes_per_second": usual, "least_bytes_per_second": by_node[worst]["bytes_per_s"]}
    return _judge_speeds(check, text + nodes.named([worst]), best, fix, figures=numbers, nodes=nodes)


def _judge_speeds(
    check: str, text: str, speeds: list[float], fix: str, *, figures: Mapping[str, float], nodes: Nodes
) -> Finding:
    slow = [node for node, speed in enumerate(speeds) if speed < _SLOW * statistics.median_high(speeds)]
    if slow:
        return warned(check, f"{text}. Slow: {nodes.named(slow)}", fix, figures=figures)
    return passed(check, text, figures=figures)


def _figures_text(result: Mapping[str, float]) -> str:
    return (
        f"{seconds_text(result['latency_s'])} for one number, {bytes_text(result['bytes_per_s'])}/s for "
        f"{bytes_text(result['num_bytes'])} (n={result['n']})"
    )


def combine_checks(
    name: str, by_rank: Mapping[int, list[dict[str, Any]]], nodes: Nodes, limit_s: float
) -> list[Finding]:
    """Combines a machine check over all nodes: passes in one line, other findings with their nodes."""
    who = nodes.who
    fine: dict[int, Finding] = {}
    others: dict[tuple[Verdict, str, str], list[int]] = {}
    for rank, findings in by_rank.items():
        node = rank // who.local_world_size
        for finding in (Finding(**each) for each in findings):
            if finding.verdict == "pass":
                fine.setdefault(node, finding)
            else:
                others.setdefault((finding.verdict, finding.text, finding.fix), []).append(node)
    results = []
    if fine:
        node, first = next(iter(fine.items()))
        rest = f"; in order on {len(fine) - 1} more node(s) too" if len(fine) > 1 else ""
        text = f"{nodes.named([node])}: {first.text}{rest}" if who.num_nodes > 1 else first.text
        results.append(passed(name, text, figures=first.figures))
    for (verdict, text, fix), where in others.items():
        whose = "all nodes" if len(where) == who.num_nodes else nodes.named(where)
        text = text if who.num_nodes == 1 else f"{whose}: {text}"
        results.append(Finding(check=name, verdict=verdict, text=text, fix=fix))
    silent = nodes.of(rank for rank in who.leaders if rank not in by_rank)
    if silent:
        text = f"{nodes.named(silent)} had not finished this check {limit_s:.0f} s after node 0"
        fix = f"atorch-ns doctor --only '{name}'   # on that node"
        results.append(failed(name, text, fix))
    return results
