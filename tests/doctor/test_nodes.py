"""Several nodes: each is a thread here, and a bad one is named and keeps nobody waiting."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from atorch_ns.doctor import Finding, Place, Who, examine_nodes
from atorch_ns.doctor._nodes import _board, _card, _door, _examine, _reach, _speeds
from atorch_ns.doctor._nodes._card import Card
from atorch_ns.doctor._nodes._door import Knock
from atorch_ns.errors import BackendError

ROOT = Path(__file__).parents[2]
CARD = Card(host="a", torch="2.13.0", package="0.1.0", python="3.11.7", address=("10.0.0.1", 9))
RATES = {"latency_s": 1e-4, "num_bytes": 2**24, "n": 5}


def whos(num_nodes: int, ranks_a_node: int = 1) -> list[Who]:
    """Every rank, with a store on a free port that rank 0 keeps."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    size = num_nodes * ranks_a_node
    return [
        Who(
            rank=rank, world_size=size, local_rank=rank % ranks_a_node, local_world_size=ranks_a_node,
            host="127.0.0.1", port=port, store_is_there=False,
        )
        for rank in range(size)
    ]  # fmt: skip


def cards(*hosts: str, **of_last: Any) -> dict[int, Card]:
    found = {rank: replace(CARD, host=host) for rank, host in enumerate(hosts)}
    return found | {len(hosts) - 1: replace(found[len(hosts) - 1], **of_last)}


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
    found, other = together(whos(2), "nodes", "alike", "reach", "limits", monkeypatch=monkeypatch)
    assert other == []
    assert [each.check for each in found] == ["nodes", "alike", "reach", "clock", "limits"]
    assert {each.verdict for each in found[:4]} == {"pass"}
    assert "2 ranks on 2 node(s) have come: node 0 (host-0), node 1 (host-1)" in found[0].text
    assert found[3].figures["skew_seconds"] < 0.5


@pytest.mark.slow
def test_three_nodes_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    found, *others = together(whos(3), "all-reduce", monkeypatch=monkeypatch)
    assert others == [[], []]
    assert "fail" not in [each.verdict for each in found], found
    by_check = {each.check: each for each in found}
    assert "3 ranks on 3 node(s) by gloo" in by_check["all-reduce"].text
    assert by_check["between nodes"].figures["bytes_per_second"] > 0
    assert "best link of a node by gloo" in by_check["links"].text
    assert "compute" in by_check


def test_a_node_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    found, other, _ = together(whos(3), "reach", timeout_s=1.5, monkeypatch=monkeypatch, absent=(2,))
    assert time.monotonic() - began < 20
    (finding,) = found
    assert finding.verdict == "fail"
    assert "node 2 is silent: rank(s) 2 did not come within 2 s" in finding.text
    assert [each.verdict for each in other] == ["fail"]  # its exit code is rank 0's


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def address() -> str:
        if threading.current_thread().name != "host-1":
            return "127.0.0.1"
        with monkeypatch.context() as patch:
            patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
            return _door.own_address()

    monkeypatch.setattr(_examine, "own_address", address)
    found, _ = together(whos(2), "reach", "all-reduce", monkeypatch=monkeypatch)
    (finding,) = found
    assert "node 1 (host-1): GLOO_SOCKET_IFNAME=nosuch0 names no interface" in finding.text
    assert "there are lo" in finding.fix


def test_a_door_that_does_not_open_ends_the_examination_before_anything_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Shut(_door.Door):
        def __init__(self, node: int, address: str) -> None:
            super().__init__(node, address)
            if node == 1:
                self._socket.shutdown(socket.SHUT_RDWR)
                self.close()

    monkeypatch.setattr(_examine, "Door", Shut)
    found, other = together(whos(2), "reach", "all-reduce", "limits", monkeypatch=monkeypatch)
    by_check: dict[str, Finding] = {each.check: each for each in found}
    assert "node 1 (host-1) cannot be reached from node 0 (host-0)" in by_check["reach"].text
    assert by_check["reach"].verdict == "fail"
    assert "all-reduce" not in by_check
    assert "limits" in by_check
    assert [each.verdict for each in other] == ["fail"]


def test_a_rank_that_dies_while_summing_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = _examine.talk

    def dies(who: Who, *, timeout_s: float, hopeless: Callable[[], bool]) -> dict[str, Any]:
        if who.rank == 1:
            return {"steps": ["start"], "late": False, "seconds": 1.0, "problem": "exit code -11"}
        return talk(who, timeout_s=timeout_s, hopeless=hopeless)

    monkeypatch.setattr(_examine, "talk", dies)
    began = time.monotonic()
    found, other = together(whos(2), "all-reduce", timeout_s=100, monkeypatch=monkeypatch)
    assert time.monotonic() - began < 50
    assert "rank 1 on node 1 (host-1): exit code -11 (done until then: start)" in found[-1].text
    assert found[-1].verdict == other[0].verdict == "fail"


def test_rank_0_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> list[Finding]:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(_examine, "check_arrived", breaks)
    everyone = whos(2)
    with ThreadPoolExecutor(2) as pool:
        first, other = (
            pool.submit(lambda who: list(examine_nodes(Place(), who, ("nodes",))), who) for who in everyone
        )
        assert isinstance(first.exception(30), ZeroDivisionError)
        error = other.exception(30)
    assert isinstance(error, BackendError)
    assert "rank 0, on node 0, has failed" in str(error) or "lost the launcher's store" in str(error)


def test_a_store_that_is_not_there() -> None:
    (who,) = whos(1)
    with pytest.raises(BackendError, match=rf"rank 1 on node 1 cannot reach .* 127\.0\.0\.1:{who.port}"):
        _board.open_store(replace(who, rank=1, world_size=2), timeout_s=1, serves=True)


def test_what_differs_between_nodes() -> None:
    everyone = whos(3)
    same = cards("a", "b", "c")
    assert [each.verdict for each in _card.check_alike(same, everyone[0])] == ["pass"]
    odd = cards("a", "b", "c", torch="2.12.1", python="3.12.1", packages="torchao==0.17", devices="8 × H100")
    found = _card.check_alike(odd, everyone[0])
    assert [(each.verdict, each.text.partition(":")[0]) for each in found] == [
        ("fail", "torch"), ("warn", "Python"), ("warn", "optional packages"), ("warn", "devices"),
    ]  # fmt: skip
    assert "2.12.1 on node 2 (c), but 2.13.0 on node 0 (a), node 1 (b)" in found[0].text
    assert found[0].fix == "pip install torch==2.13.0"


def test_clocks_that_are_apart() -> None:
    everyone = whos(3)
    fine = Knock(round_trip_s=0.001)
    late = Knock(round_trip_s=0.001, ahead_s=-3.0)
    (found,) = _reach.check_clocks({0: {0: fine, 1: fine, 2: late}}, cards("a", "b", "c"), everyone[0])
    assert found.verdict == "warn"
    assert "away from the others: node 2 (c)" in found.text
    (found,) = _reach.check_clocks({0: {0: fine, 1: late}}, cards("a", "b"), whos(2)[0])
    assert "node 0 (a) is ahead of node 1 (b)" in found.text


def test_a_name_that_means_the_machine_itself() -> None:
    refused = Knock(problem="127.0.1.1:9: refused")
    knocks = {0: {0: Knock(), 1: refused}, 1: {0: Knock(), 1: Knock()}}
    (found,) = _reach.check_reach(knocks, cards("a", "b", address=("127.0.1.1", 9)), whos(2)[0])
    assert "node 1 (b) cannot be reached from node 0 (a)" in found.text
    assert "resolves to itself alone" in found.text


def test_a_door_answers_with_its_number_and_its_time() -> None:
    door = _door.Door(3, "127.0.0.1")
    try:
        right = _door.knock_at_all({3: door.address}, timeout_s=5)[3]
        wrong = _door.knock_at_all({4: door.address}, timeout_s=5)[4]
    finally:
        door.close()
    assert not right.problem
    assert abs(right.ahead_s) < 0.2
    assert "node 3 answers at" in wrong.problem


def _answers(rates: list[float], products: list[float]) -> dict[int, dict[str, Any]]:
    """Of a ring of nodes with one rank each, whose links are as fast as their slower ends."""
    size = len(rates)

    def link(one: int, other: int) -> dict[str, float]:
        rate = min(rates[one], rates[other])
        return {**RATES, "bytes_per_s": rate, "best_bytes_per_s": rate}

    found = {}
    for node in range(size):
        links = {str(other): link(node, other) for other in ((node - 1) % size, (node + 1) % size)}
        every = {**RATES, "bytes_per_s": min(rates), "best_bytes_per_s": min(rates)}
        figures = {"backends": {"gloo": {"all": every, "between": every, "links": links}}}
        found[node] = {"steps": [], "figures": {**figures, "product_s": products[node]}}
    return found


def test_the_slow_node_is_named_and_not_its_neighbours() -> None:
    everyone = whos(4)
    hosts = cards("a", "b", "c", "d")
    answers = _answers([1e9, 1e9, 1e8, 1e9], [0.01, 0.01, 0.01, 0.05])
    found = {each.check: each for each in _speeds.check_speeds(answers, hosts, everyone[0])}
    assert found["links"].verdict == "warn"
    assert found["links"].text.endswith("Slow: node 2 (c)")
    assert found["compute"].verdict == "warn"
    assert "50.00 ms on node 3 (d)" in found["compute"].text
    fine = _speeds.check_speeds(_answers([1e9] * 4, [0.01] * 4), hosts, everyone[0])
    assert {each.verdict for each in fine} == {"pass"}


def test_whose_failure_came_first() -> None:
    late = {"steps": ["start", "join"], "late": True, "seconds": 9.0, "problem": "no end within 9 s"}
    own = {"steps": ["start"], "late": False, "seconds": 2.0, "problem": "OSError: no device"}
    (found,) = _speeds.check_talked({0: late, 1: own}, cards("a", "b"), whos(2)[0], 9)
    assert "rank 1 on node 1 (b): OSError: no device" in found.text
    (found,) = _speeds.check_talked({0: late}, cards("a", "b"), whos(2)[0], 9)
    assert "node 1 (b) fell silent" in found.text


def test_who_is_read_from_the_launcher() -> None:
    assert Who.detect({}) is None
    first = whos(2, 2)[3]
    assert (first.node, first.num_nodes, first.leads, first.leaders) == (1, 2, False, (0, 2))
    assert Who.detect(first.variables()) == first
    with pytest.raises(BackendError, match="lacks MASTER_ADDR"):
        Who.detect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})


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
    endpoint = f"127.0.0.1:{whos(1)[0].port}"
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


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_nodes_of_torchrun() -> None:
    with two_agents("-m", "atorch_ns.cli", "doctor", "--only", "reach") as agents:
        said = [agent.communicate(timeout=200) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    printed = "".join(out for out, _ in said)  # by one of the two
    assert printed.count("2 ranks on 2 node(s) have come") == 1
    assert "every node reaches every other" in printed


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
