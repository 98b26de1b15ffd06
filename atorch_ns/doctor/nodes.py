"""Examination of several nodes: every rank of a launcher such as torchrun runs it, and rank 0 reports.

Ranks exchange plain values over the launcher's store. A broken node is named and does not block the others:
every wait has a limit, and code that may hang or crash runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented; not in __all__

from atorch_ns._version import __version__
from atorch_ns.cluster import OPTIONAL_PACKAGES, installed_packages
from atorch_ns.doctor.base import Finding, Place
from atorch_ns.doctor.checks import NODE_CHECKS, examine
from atorch_ns.doctor.node_findings import (
    Inventory,
    Nodes,
    arrivals,
    clocks,
    combine_checks,
    differences,
    failures,
    reachability,
    speeds,
)
from atorch_ns.doctor.rank_info import Who, open_store
from atorch_ns.doctor.torch_checks import last_error
from atorch_ns.errors import BackendError
from atorch_ns.processes import Ranks, scratch_folder

_POLL_S: Final = 0.05
_SPARE_S: Final = 15.0  # added to a limit when waiting for ranks with the same limit
_LEAVING_S: Final = 5.0  # rank 0 keeps its store for the others this long
_CONNECTING_S: Final = 10.0  # seconds to connect to one node
_AT_ONCE: Final = 32  # connections that are tried at the same time
_SIOCGIFADDR: Final = 0x8915  # Linux's request for the address of a network interface, netdevice(7)


def examine_nodes(machine: Place, who: Who, names: Sequence[str]) -> Iterator[Finding]:
    """See :func:`atorch_ns.doctor.examine_nodes`."""
    values = _Exchange(who, machine.timeout_s)
    machine = replace(machine, num_ranks=who.local_world_size)  # the ranks of this node
    has_failed = False
    try:
        for finding in _iter_findings(values, machine, who, names):
            has_failed = has_failed or finding.verdict == "fail"
            yield finding
        if values.from_first(has_failed) and who.rank:
            yield Finding(check="nodes", verdict="fail", text="", fix="")  # for this rank's exit code
    except dist.DistError as error:
        raise BackendError(
            f"rank {who.rank} on node {who.node} has lost the launcher's store at {who.host}:{who.port}: the node "
            "that hosts it has stopped, or the network to it is down."
        ) from error
    except BaseException:
        values.abort()  # others wait for rank 0
        raise
    finally:
        values.leave()


def _iter_findings(values: _Exchange, machine: Place, who: Who, names: Sequence[str]) -> Iterator[Finding]:
    limit_s, nodes, clean = machine.timeout_s, Nodes(who), True
    with contextlib.ExitStack() as stack:  # listeners stay until all have connected
        values.post("inventory", asdict(_own_inventory(who, stack)))
        if who.rank == 0:
            came = values.gather("inventory", range(who.world_size), timeout_s=limit_s)
            nodes = Nodes(who, {rank: Inventory(**each) for rank, each in came.items()})
            findings = arrivals(nodes, limit_s)
            clean = all(each.verdict == "pass" for each in findings)
            yield from findings
        if not values.from_first(clean):  # without all ranks the next steps would hang
            return
        if "alike" in names and who.rank == 0:  # has the inventories of all ranks
            yield from differences(nodes)
        if "reach" in names:
            listeners = [nodes.inventories[rank].address for rank in who.leaders if not who.rank]
            addresses = values.from_first(listeners)
            if who.leads:
                values.post("reach", connect_all(addresses, timeout_s=limit_s))
            if who.rank == 0:
                rows = values.gather("reach", who.leaders, timeout_s=limit_s + _SPARE_S)
                by_node = {rank // who.local_world_size: dict(enumerate(row)) for rank, row in rows.items()}
                findings = reachability(by_node, nodes)
                clean = all(each.verdict == "pass" for each in findings)
                yield from findings
            clean = values.from_first(clean)
    # Collectives are tried where nodes reach each other, by each rank in a process of its own.
    if clean and "all-reduce" in names:
        values.post("benchmark", benchmark(who, timeout_s=limit_s))
        if who.rank == 0:
            answers = values.gather("benchmark", range(who.world_size), timeout_s=limit_s + _SPARE_S)
            findings = failures(answers, nodes)
            yield from findings or _judge_nodes(
                {rank: each["figures"] for rank, each in answers.items()}, nodes
            )
        values.from_first(True)  # the others wait for rank 0's judgement
    # Checks of one machine run on the first rank of each node.
    for name in (name for name in names if name not in NODE_CHECKS):
        if who.leads:
            values.post(name, [each.as_json() for each in examine(machine, names=(name,))])
        if who.rank == 0:
            by_rank = values.gather(name, who.leaders, timeout_s=limit_s + _SPARE_S)
            yield from combine_checks(name, by_rank, nodes, limit_s + _SPARE_S)
        values.from_first(True)


def _judge_nodes(figures: dict[int, dict[str, Any]], nodes: Nodes) -> list[Finding]:
    skew = [clocks(figures[0]["clocks"], nodes)] if nodes.who.num_nodes > 1 else []
    return [*skew, *speeds(figures, nodes)]


class _Exchange:
    """Plain values exchanged over the launcher's store; raises BackendError if it cannot be reached."""

    def __init__(self, who: Who, timeout_s: float) -> None:
        self._who, self._limit_s = who, 2 * (timeout_s + _SPARE_S)  # from one value of rank 0 to the next
        self._store = PrefixStore("atorch_ns/doctor", open_store(who, timeout_s=timeout_s))
        self._num_values = 0

    def post(self, subject: str, value: Any) -> None:
        self._store.set(f"{subject}/{self._who.rank}", json.dumps(value))

    def gather(self, subject: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, Any]:
        """The values of those ranks that left one in time."""
        values: dict[int, Any] = {}
        missing = list(ranks)
        limit = time.monotonic() + timeout_s
        while True:
            for rank in missing:
                if self._store.check([f"{subject}/{rank}"]):  # wait() would log its time-out to the terminal
                    values[rank] = json.loads(self._store.get(f"{subject}/{rank}"))
            missing = [rank for rank in missing if rank not in values]
            if not missing or time.monotonic() > limit:
                return values
            time.sleep(_POLL_S)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value; all ranks call this equally often.

        Raises:
            BackendError: if rank 0 has failed, or is silent.
        """
        self._num_values += 1
        subject = f"value_{self._num_values}"
        if self._who.rank == 0:
            self.post(subject, [value])
        answer = self.gather(subject, [0], timeout_s=self._limit_s).get(0, [])
        if answer:  # empty after abort()
            return answer[0]
        raise BackendError(
            "rank 0, on node 0, has failed or is silent. Check its output, and whether it is still running."
        )

    def abort(self) -> None:
        """Ends the others if this is rank 0."""
        if self._who.rank == 0:
            with contextlib.suppress(dist.DistError):
                self.post(f"value_{self._num_values + 1}", [])

    def leave(self) -> None:
        """Waits a moment for the others, if this rank keeps the store."""
        with contextlib.suppress(dist.DistError):  # whoever keeps the store may have left before
            self.post("left", True)
            if self._who.rank == 0 and not self._who.store_is_there:
                self.gather("left", range(self._who.world_size), timeout_s=_LEAVING_S)


def _own_inventory(who: Who, stack: contextlib.ExitStack) -> Inventory:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    address, problem, fix = None, "", ""
    if who.leads:  # one listener for each node
        try:
            host = own_address() if who.num_nodes > 1 else "127.0.0.1"
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            # Nobody accepts: the system completes connections up to the backlog.
            listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=4096))
            address = (host, listener.getsockname()[1])
        except OSError as error:
            problem = str(error)
            there = ", ".join(name for _, name in socket.if_nameindex())
            fix = f"export GLOO_SOCKET_IFNAME=eth0   # an interface of that node; there are {there}"
    versions = {
        "torch": torch.__version__,
        "atorch-ns": __version__,
        "Python": platform.python_version(),
        "devices": ", ".join(f"{names.count(name)} × {name}" for name in sorted(set(names))) or "CPUs",
        **({"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if gpus else {}),
        **{OPTIONAL_PACKAGES[name]: version for name, version in installed_packages().items()},
    }
    return Inventory(host=platform.node(), versions=versions, address=address, problem=problem, fix=fix)


def own_address() -> str:
    """The address at which gloo lets other nodes connect to this one.

    Uses the interface ``GLOO_SOCKET_IFNAME`` if set. Otherwise resolves the host's name.

    Raises:
        OSError: if there is no such interface, or the name does not resolve.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    name = socket.gethostname()
    try:
        if not interface:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])  # struct ifreq: 16 bytes of the name, then sockaddr_in
    except OSError as error:
        raise OSError(
            f"GLOO_SOCKET_IFNAME={interface} names no interface with an IPv4 address there ({error.strerror})"
            if interface
            else f"its name {name} does not resolve there ({error}), so that gloo listens on the loopback interface alone"
        ) from error


def connect_all(addresses: Sequence[Sequence[Any]], *, timeout_s: float) -> list[tuple[float, str]]:
    """Connects to every node, several at once. Returns seconds and the problem, or an empty string, for each.

    Args:
        addresses: ``(host, port)`` of each node.
        timeout_s: seconds for one of them, 10 at most.
    """

    def connect(address: Sequence[Any]) -> tuple[float, str]:
        host, port = address
        began = time.perf_counter()
        try:
            socket.create_connection((host, port), timeout=min(timeout_s, _CONNECTING_S)).close()
        except OSError as error:
            return 0.0, f"{host}:{port}: {error}"
        return time.perf_counter() - began, ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(connect, addresses))


def benchmark(who: Who, *, timeout_s: float) -> dict[str, Any]:
    """Runs this rank's :mod:`~atorch_ns.doctor.benchmark` in a process of its own for ``timeout_s`` at most.

    Returns:
        ``figures`` or a ``problem``; ``steps`` begun; whether it was ended as ``late``; ``seconds`` taken.
    """
    began = time.monotonic()
    variables = replace(who, store_is_there=True).variables()  # the store is there by now
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # torchrun sets 1
    with scratch_folder() as folder:
        with Ranks(
            "atorch_ns.doctor.benchmark", [str(folder), str(timeout_s)], 1, shown=False, variables=variables
        ) as ranks:
            (end,) = ranks.wait(timeout_s=timeout_s)
        seconds = time.monotonic() - began
        steps, figures = folder / f"steps_{who.rank}", folder / f"figures_{who.rank}"
        answer: dict[str, Any] = {
            "steps": steps.read_text().splitlines() if steps.exists() else [],
            "late": end.ended_by_us,
            "seconds": seconds,
        }
        if figures.exists() and end.code == 0:
            return {**answer, "figures": json.loads(figures.read_text())}
    if end.ended_by_us:
        return {**answer, "problem": f"no end within {seconds:.0f} s"}
    return {**answer, "problem": last_error(end.output) or f"exit code {end.code}"}
