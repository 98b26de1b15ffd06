"""All checks, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from atorch_ns.doctor._base import Check, Finding, Place
from atorch_ns.doctor._collectives import check_backends, check_collectives
from atorch_ns.doctor._compiler import check_compiler
from atorch_ns.doctor._disk import check_disk
from atorch_ns.doctor._dtypes import check_dtypes
from atorch_ns.doctor._limits import check_limits, check_shared_memory
from atorch_ns.doctor._packages import check_packages
from atorch_ns.doctor._ports import check_ports
from atorch_ns.doctor._versions import check_versions

__all__ = ["CHECKS", "NODE_CHECKS", "examine"]

CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "versions": check_versions,  # first: nothing works with an old torch
        "backends": check_backends,
        "ports": check_ports,
        "shared memory": check_shared_memory,
        "limits": check_limits,
        "disk": check_disk,
        "compiler": check_compiler,
        "dtypes": check_dtypes,
        "all-reduce": check_collectives,  # needs ports and backends, whose findings explain its own
        "packages": check_packages,  # last: takes longest
    }
)
"""By name, in the order in which they are run."""
NODE_CHECKS: Final = ("nodes", "alike", "reach", "all-reduce")
"""Of several nodes, in their order; the first is always run, since who is not there cannot be asked."""


def examine(place: Place, *, names: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Runs the checks, and gives each finding as it comes; a check that breaks is a finding that fails.

    Args:
        place: what is to be checked.
        names: of the checks; all if empty.
    """
    for name, check in CHECKS.items():
        if names and name not in names:
            continue
        began = time.perf_counter()
        try:
            found = check(place)
        except Exception as error:
            seconds = time.perf_counter() - began
            found = [
                Finding(
                    check=name,
                    verdict="fail",
                    text=f"the check itself failed after {seconds:.1f} s: {type(error).__name__}: {error}",
                    fix="atorch-ns env --json   # and report it with this",
                )
            ]
        yield from found
