"""The first rank of each node opens a door, and knocks at the others': who reaches whom, how fast, and what time it is there."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["Door", "Knock", "NoAddressError", "knock_at_all", "own_address"]

_QUESTIONS: Final = 8
_KNOCK_S: Final = 10.0
_AT_ONCE: Final = 32
_ANSWER: Final = struct.Struct("!id")  # the node's number, and the time there
_SIOCGIFADDR: Final = 0x8915
"""Linux's request for the address of a network interface (netdevice(7))."""


class NoAddressError(OSError):
    """This node has no address that gloo could use; the second argument is what mends it."""


def own_address() -> str:
    """The address at which gloo lets other nodes connect to this one.

    That of the interface ``GLOO_SOCKET_IFNAME``, if set; else what the host's name resolves to.

    Raises:
        NoAddressError: if there is no such interface, or the name does not resolve.
    """
    given = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if given:
        return _address_of(given)
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NoAddressError(
            f"its name {name} does not resolve there ({error}), so that gloo listens on the loopback interface alone",
            f"export GLOO_SOCKET_IFNAME=eth0   # an interface of that node; there are {_interfaces()}",
        ) from error
    return str(found[0][4][0])


class Door:
    """Answers whoever connects with this node's number and the time, until closed.

    Args:
        node: the number.
        address: where to listen; all interfaces if the address is none of this machine's.
    """

    def __init__(self, node: int, address: str) -> None:
        self._node = node
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(256)
        self.address: tuple[str, int] = (address, self._socket.getsockname()[1])
        threading.Thread(target=self._open, daemon=True).start()

    def close(self) -> None:
        """Lets nobody in any more."""
        self._socket.close()

    def _open(self) -> None:
        while True:
            try:
                guest, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(guest,), daemon=True).start()

    def _answer(self, guest: socket.socket) -> None:
        with guest:
            guest.settimeout(_KNOCK_S)
            try:
                guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while guest.recv(1):
                    guest.sendall(_ANSWER.pack(self._node, time.time()))
            except OSError:  # the guest has gone
                return


@dataclass(frozen=True, kw_only=True)
class Knock:
    """What came of knocking at a node's door.

    Attributes:
        round_trip_s: of the fastest question.
        ahead_s: how far that node's clock is ahead of this one's, to half a round trip.
        problem: why there was no answer; empty if there was.
    """

    round_trip_s: float = 0.0
    ahead_s: float = 0.0
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def knock_at_all(doors: dict[int, tuple[str, int]], *, timeout_s: float) -> dict[int, Knock]:
    """Asks every node, several at once; by node.

    Args:
        doors: where each node listens.
        timeout_s: seconds for one of them.
    """
    limit_s = min(timeout_s, _KNOCK_S)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda node: _knock(node, doors[node], limit_s), doors)
        return dict(zip(doors, answers, strict=True))


def _knock(node: int, address: tuple[str, int], limit_s: float) -> Knock:
    best: Knock | None = None
    try:
        with socket.create_connection(address, timeout=limit_s) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_QUESTIONS):
                began = time.time()
                watch = time.perf_counter()
                link.sendall(b"?")
                number, there = _ANSWER.unpack(_received(link, _ANSWER.size))
                seconds = time.perf_counter() - watch
                if number != node:
                    return Knock(problem=f"node {number} answers at {address[0]}:{address[1]}")
                if best is None or seconds < best.round_trip_s:
                    best = Knock(round_trip_s=seconds, ahead_s=there - (began + seconds / 2))
    except (OSError, struct.error) as error:
        return Knock(problem=f"{address[0]}:{address[1]}: {str(error) or type(error).__name__}")
    assert best is not None
    return best


def _received(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed from there")
        data += part
    return data


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise NoAddressError(
                f"GLOO_SOCKET_IFNAME={interface} names no interface with an IPv4 address there ({error.strerror})",
                f"export GLOO_SOCKET_IFNAME=...   # of that node; there are {_interfaces()}",
            ) from error
    return socket.inet_ntoa(answer[20:24])
