"""Checks of machines and of what is between them, and a description of a machine for bug reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atorch_ns.doctor.base import Check, Finding, Place, Verdict
from atorch_ns.doctor.checks import CHECKS, NODE_CHECKS, examine
from atorch_ns.doctor.environment import environment
from atorch_ns.doctor.rank_info import Who

__all__ = [
    "CHECKS", "NODE_CHECKS", "Check", "Finding", "Place", "Verdict", "Who", "environment", "examine", "examine_nodes",
]  # fmt: skip


def examine_nodes(machine: Place, who: Who, names: Sequence[str]) -> Iterator[Finding]:
    """Examines the nodes on which a launcher has started ranks; every rank calls it, rank 0 reports.

    Another rank yields one finding without a text if something failed, for its exit code.

    Args:
        machine: the machine to check; the launcher has chosen the ranks.
        who: this rank.
        names: names of checks in :data:`NODE_CHECKS` and :data:`CHECKS`; the latter are run on every node.

    Raises:
        BackendError: on a rank that does not reach the launcher's store, or gets no answer from rank 0.
    """
    from atorch_ns.doctor.nodes import examine_nodes as examined  # imports torch

    return examined(machine, who, names)
