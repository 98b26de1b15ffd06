"""Registry of the checks of one machine, and their run in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from atorch_ns.doctor.base import Check, Finding, Place, failed
from atorch_ns.doctor.machine import (
    check_disk,
    check_limits,
    check_packages,
    check_ports,
    check_shared_memory,
    check_versions,
)
from atorch_ns.doctor.torch_checks import check_backends, check_collectives, check_compiler, check_dtypes
from atorch_ns.text import error_text

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
"""Checks by name, in the order in which they run."""
NODE_CHECKS: Final = ("nodes", "alike", "reach", "all-reduce")
"""Checks of several nodes, in their order; the first is always run, since the others need all ranks."""


def examine(machine: Place, *, names: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Runs the checks, and gives each finding as it comes; a check that breaks is a finding that fails.

    Args:
        machine: the machine to check.
        names: names of checks; all if empty.
    """
    for name, check in CHECKS.items():
        if names and name not in names:
            continue
        began = time.perf_counter()
        try:
            findings = check(machine)
        except Exception as error:
            seconds = time.perf_counter() - began
            text = f"the check itself failed after {seconds:.1f} s: {error_text(error)}"
            findings = [failed(name, text, "atorch-ns env --json   # and report it with this")]
        yield from findings
