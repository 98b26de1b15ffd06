"""From what ranks reported to the node at fault."""

from __future__ import annotations

from typing import Any

from atorch_ns.doctor.node_findings import clocks, combine_checks, differences, failures, reachability, speeds
from tests.doctor.nodes import nodes_of

_RATES = {"latency_s": 1e-4, "num_bytes": 2**24, "n": 5}


def test_what_differs_between_nodes() -> None:
    assert [each.verdict for each in differences(nodes_of("a", "b", "c"))] == ["pass"]
    last = {"torch": "2.12.1", "Python": "3.12.1", "torchao": "0.17", "devices": "8 × H100"}
    found = differences(nodes_of("a", "b", "c", last=last))
    assert [(each.verdict, each.text.partition(":")[0]) for each in found] == [
        ("fail", "torch"), ("warn", "Python"), ("warn", "devices"), ("warn", "torchao"),
    ]  # fmt: skip
    assert "2.12.1 on node 2 (c), but 2.13.0 on node 0 (a), node 1 (b)" in found[0].text
    assert "torchao: 0.17 on node 2 (c), but none on node 0 (a)" in found[3].text
    assert found[0].fix == "pip install torch==2.13.0"


def test_clocks_that_are_apart() -> None:
    found = clocks(
        {"ahead_s": {"0": 0.0, "1": 0.0, "2": -3.0}, "uncertainty_s": 0.001}, nodes_of("a", "b", "c")
    )
    assert found.verdict == "warn"
    assert "node 2 (c) is away from the middle" in found.text
    found = clocks({"ahead_s": {"0": 0.0, "1": -3.0}, "uncertainty_s": 0.001}, nodes_of("a", "b"))
    assert "node 0 (a), node 1 (b) are away from the middle" in found.text
    assert (
        clocks({"ahead_s": {"0": 0.0, "1": 0.4}, "uncertainty_s": 0.1}, nodes_of("a", "b")).verdict == "pass"
    )


def test_a_node_that_others_do_not_reach() -> None:
    fine, refused = (0.001, ""), (0.0, "10.0.0.1:9: refused")
    (found,) = reachability({0: {0: fine, 1: refused}, 1: {0: fine, 1: fine}}, nodes_of("a", "b"))
    assert found.verdict == "fail"
    assert "node 1 (b) cannot be reached from node 0 (a): 10.0.0.1:9: refused" in found.text
    assert "open the ports" in found.fix
    (found,) = reachability({0: {0: fine, 1: (0.002, "")}, 1: {0: fine, 1: fine}}, nodes_of("a", "b"))
    assert found.verdict == "pass"
    assert "2.00 ms, from node 0 (a) to node 1 (b)" in found.text
    (found,) = reachability({0: {0: fine, 1: fine}}, nodes_of("a", "b"))
    assert "node 1 (b) did not say" in found.text


def test_a_name_that_means_the_machine_itself() -> None:
    fine, refused = (0.001, ""), (0.0, "127.0.1.1:9: refused")
    nodes = nodes_of("a", "b", address=("127.0.1.1", 9))
    (found,) = reachability({0: {0: fine, 1: refused}, 1: {0: fine, 1: fine}}, nodes)
    assert "resolves to itself alone" in found.text


def _figures(rates: list[float], products: list[float]) -> dict[int, dict[str, Any]]:
    """Of a ring of nodes with one rank each, whose links are as fast as their slower ends."""
    size = len(rates)

    def link(one: int, other: int) -> dict[str, float]:
        rate = min(rates[one], rates[other])
        return {**_RATES, "bytes_per_s": rate, "best_bytes_per_s": rate}

    found = {}
    for node in range(size):
        links = {str(other): link(node, other) for other in ((node - 1) % size, (node + 1) % size)}
        every = {**_RATES, "bytes_per_s": min(rates), "best_bytes_per_s": min(rates)}
        backends = {"gloo": {"all": every, "between": every, "links": links}}
        found[node] = {"backends": backends, "product_s": products[node]}
    return found


def test_the_slow_node_is_named_and_not_its_neighbours() -> None:
    nodes = nodes_of("a", "b", "c", "d")
    figures = _figures([1e9, 1e9, 1e8, 1e9], [0.01, 0.01, 0.01, 0.05])
    found = {each.check: each for each in speeds(figures, nodes)}
    assert found["links"].verdict == "warn"
    assert found["links"].text.endswith("Slow: node 2 (c)")
    assert found["compute"].verdict == "warn"
    assert found["compute"].text.endswith("50.0 ms on node 3 (d). Slow: node 3 (d)")
    fine = speeds(_figures([1e9] * 4, [0.01] * 4), nodes)
    assert {each.verdict for each in fine} == {"pass"}


def test_whose_failure_came_first() -> None:
    nodes = nodes_of("a", "b")
    hung = {"steps": ["start", "all by gloo"], "late": True, "seconds": 9.0, "problem": "no end within 9 s"}
    died = {"steps": ["start", "all by gloo"], "late": False, "seconds": 2.0, "problem": "OSError: no device"}
    (found,) = failures({0: hung, 1: died}, nodes)
    assert "rank 1 on node 1 (b): OSError: no device (begun until then: all by gloo)" in found.text
    waited = {
        **died,
        "steps": ["start", "all by gloo", "links by gloo"],
        "problem": "monitoredBarrier failed",
    }
    (found,) = failures({0: waited, 1: hung}, nodes)
    assert "rank 1 on node 1 (b): no end within 9 s" in found.text
    (found,) = failures({0: hung}, nodes)
    assert "node 1 (b) fell silent" in found.text


def test_a_check_of_one_machine_on_all_nodes() -> None:
    fine = {"check": "disk", "verdict": "pass", "text": "fast", "fix": "", "figures": {}}
    full = {**fine, "verdict": "warn", "text": "full", "fix": "df -h"}
    found = combine_checks("disk", {0: [fine], 1: [full]}, nodes_of("a", "b", "c"), 10)
    assert [(each.verdict, each.text) for each in found] == [
        ("pass", "node 0 (a): fast"),
        ("warn", "node 1 (b): full"),
        ("fail", "node 2 (c) had not finished this check 10 s after node 0"),
    ]
