"""Check: ports and names of this machine."""

from __future__ import annotations

import os
import socket
from typing import Final

from atorch_ns.doctor._base import Finding, Place

__all__ = ["check_ports"]

_NAME: Final = "ports"
_DEFAULT_PORT: Final = 29500
"""Where torchrun's store listens when nobody says otherwise."""


def check_ports(place: Place) -> list[Finding]:
    """A port can be had on the loopback interface, torchrun's default is free, and the host's name resolves."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=5):
                pass
    except OSError as error:
        return [
            Finding(
                check=_NAME,
                verdict="fail",
                text=f"no connection over 127.0.0.1 can be made: {error}",
                fix="ip link set lo up",
            )
        ]
    # A launcher that has started this process listens there itself.
    found = [*([] if "RANK" in os.environ else _default_port()), *_host_name()]
    return found or [
        Finding(check=_NAME, verdict="pass", text="loopback connections work, the host's name resolves")
    ]


def _default_port() -> list[Finding]:
    port = int(os.environ.get("MASTER_PORT", _DEFAULT_PORT)) if _is_port() else _DEFAULT_PORT
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError as error:
            return [
                Finding(
                    check=_NAME,
                    verdict="warn",
                    text=f"port {port} is taken ({error.strerror}): a torchrun without --standalone fails on it",
                    fix="torchrun --standalone --nproc-per-node=2 script.py",
                )
            ]
    return []


def _is_port() -> bool:
    return os.environ.get("MASTER_PORT", str(_DEFAULT_PORT)).isdecimal()


def _host_name() -> list[Finding]:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return [
            Finding(
                check=_NAME,
                verdict="warn",
                text=f"this machine's name does not resolve ({error}): jobs of several nodes fail to meet",
                fix='echo "127.0.1.1 $(hostname)" | sudo tee -a /etc/hosts',
            )
        ]
    return []
