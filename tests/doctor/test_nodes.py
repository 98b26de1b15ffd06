"""Several nodes: each is a thread here, and a bad one is named and keeps nobody waiting."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from atorch_ns.doctor import Finding, Place, Who, examine_nodes, nodes
from atorch_ns.errors import BackendError
from tests.doctor.nodes import all_ranks

ROOT = Path(__file__).parents[2]


def together(
    everyone: list[Who],
    *names: str,
    timeout_s: float = 60.0,
    monkeypatch: pytest.MonkeyPatch | None = None,
    absent: tuple[int, ...] = (),
) -> list[Any]:
    """What each rank finds or raises; ``None`` for those that stay away. Ranks of node n are on host-n."""
    if monkeypatch is not None:
        monkeypatch.setattr(platform, "node", lambda: threading.current_thread().name)

    def examined(who: Who) -> Any:
        threading.current_thread().name = f"host-{who.node}"
        try:
            return list(examine_nodes(Place(timeout_s=timeout_s), who, names))
        except BackendError as error:
            return error

    with ThreadPoolExecutor(len(everyone)) as pool:
        futures = {who.rank: pool.submit(examined, who) for who in everyone if who.rank not in absent}
        return [futures[who.rank].result() if who.rank in futures else None for who in everyone]


def test_nodes_that_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found, other = together(all_ranks(2), "nodes", "alike", "reach", "limits", monkeypatch=monkeypatch)
    assert other == []
    assert [each.check for each in found] == ["nodes", "alike", "reach", "limits"]
    assert {each.verdict for each in found[:3]} == {"pass"}
    assert "2 ranks on 2 node(s) have come: node 0 (host-0), node 1 (host-1)" in found[0].text


@pytest.mark.usefixtures("cold_python")
@pytest.mark.slow
def test_three_nodes_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    found, *others = together(all_ranks(3), "all-reduce", monkeypatch=monkeypatch)
    assert others == [[], []]
    assert "fail" not in [each.verdict for each in found], found
    by_check = {each.check: each for each in found}
    assert "3 ranks on 3 node(s) by gloo" in by_check["all-reduce"].text
    assert by_check["between nodes"].figures["bytes_per_second"] > 0
    assert "best link of a node by gloo" in by_check["links"].text
    assert "compute" in by_check
    assert by_check["clock"].figures["skew_seconds"] < 0.5


def test_a_node_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    found, other, _ = together(all_ranks(3), "reach", timeout_s=1.5, monkeypatch=monkeypatch, absent=(2,))
    assert time.monotonic() - began < 20
    (finding,) = found
    assert finding.verdict == "fail"
    assert "node 2 is silent: rank(s) 2 did not come within 2 s" in finding.text
    assert [each.verdict for each in other] == ["fail"]  # its exit code is rank 0's


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    own_address = nodes.own_address

    def address() -> str:
        if threading.current_thread().name != "host-1":
            return "127.0.0.1"
        with monkeypatch.context() as patch:
            patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
            return own_address()

    monkeypatch.setattr(nodes, "own_address", address)
    found, _ = together(all_ranks(2), "reach", "all-reduce", monkeypatch=monkeypatch)
    (finding,) = found
    assert "node 1 (host-1): GLOO_SOCKET_IFNAME=nosuch0 names no interface" in finding.text
    assert "there are lo" in finding.fix


def test_a_node_that_cannot_be_reached_ends_the_examination_before_anything_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect_all = nodes.connect_all

    def closed(addresses: list[Any], *, timeout_s: float) -> list[tuple[float, str]]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        return connect_all([addresses[0], ("127.0.0.1", port)], timeout_s=timeout_s)

    monkeypatch.setattr(nodes, "connect_all", closed)
    found, other = together(all_ranks(2), "reach", "all-reduce", "limits", monkeypatch=monkeypatch)
    by_check: dict[str, Finding] = {each.check: each for each in found}
    assert "node 1 (host-1) cannot be reached from node 0 (host-0)" in by_check["reach"].text
    assert by_check["reach"].verdict == "fail"
    assert "all-reduce" not in by_check
    assert "limits" in by_check
    assert [each.verdict for each in other] == ["fail"]


def test_a_rank_that_dies_while_summing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = nodes.benchmark

    def dies(who: Who, *, timeout_s: float) -> dict[str, Any]:
        if who.rank == 1:
            return {"steps": [], "late": False, "seconds": 1.0, "problem": "exit code -11"}
        return benchmark(who, timeout_s=timeout_s)

    monkeypatch.setattr(nodes, "benchmark", dies)
    began = time.monotonic()
    found, other = together(all_ranks(2), "all-reduce", timeout_s=12, monkeypatch=monkeypatch)
    assert time.monotonic() - began < 62
    assert "rank 1 on node 1 (host-1): exit code -11 (begun until then: nothing)" in found[-1].text
    assert found[-1].verdict == other[0].verdict == "fail"


def test_rank_0_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> list[Finding]:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(nodes, "arrivals", breaks)
    everyone = all_ranks(2)
    with ThreadPoolExecutor(2) as pool:
        first, other = (
            pool.submit(lambda who: list(examine_nodes(Place(), who, ("nodes",))), who) for who in everyone
        )
        assert isinstance(first.exception(30), ZeroDivisionError)
        error = other.exception(30)
    assert isinstance(error, BackendError)
    assert "rank 0, on node 0, has failed" in str(error) or "lost the launcher's store" in str(error)


STOPPED = """
import os, signal
from atorch_ns.cli import main
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
main()
"""


@contextmanager
def two_agents(*program: str) -> Iterator[list[subprocess.Popen[str]]]:
    """torchrun twice, each for a node with one rank; ended with all that they have started."""
    endpoint = f"127.0.0.1:{all_ranks(1)[0].port}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}", "--rdzv-id=t", *program,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        agents = []
        for _ in range(2):
            agent = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            agents.append(stack.enter_context(agent))
            stack.callback(_end, agent)
        yield agents


def _end(agent: subprocess.Popen[str]) -> None:
    if agent.poll() is not None:
        return
    for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
        process.kill()


@pytest.mark.usefixtures("cold_python")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_nodes_of_torchrun() -> None:
    with two_agents("-m", "atorch_ns.cli", "doctor", "--only", "reach") as agents:
        said = [agent.communicate(timeout=200) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    printed = "".join(out for out, _ in said)  # by one of the two
    assert printed.count("2 ranks on 2 node(s) have come") == 1
    assert "every node reaches every other" in printed


@pytest.mark.usefixtures("cold_python")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_of_torchrun_that_is_frozen_keeps_nobody_waiting() -> None:
    program = ("--no-python", sys.executable, "-c", STOPPED, "doctor", "--only", "reach", "--timeout", "10")
    with two_agents(*program) as agents:
        limit = time.monotonic() + 200
        while all(agent.poll() is None for agent in agents) and time.monotonic() < limit:
            time.sleep(0.1)
        ended = [agent for agent in agents if agent.poll() is not None]
        assert len(ended) == 1, "both nodes hang" if not ended else "the frozen node has ended"
        out, _ = ended[0].communicate(timeout=30)
    assert ended[0].returncode != 0
    assert "node 1 is silent: rank(s) 1 did not come" in out
