"""Is this machine fit for a job, and what is it? Each check stands in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atorch_ns.doctor._base import Check, Finding, Place, Verdict
from atorch_ns.doctor._environment import environment
from atorch_ns.doctor._examine import CHECKS, NODE_CHECKS, examine
from atorch_ns.doctor._who import Who

__all__ = [
    "CHECKS",
    "NODE_CHECKS",
    "Check",
    "Finding",
    "Place",
    "Verdict",
    "Who",
    "environment",
    "examine",
    "examine_nodes",
]


def examine_nodes(place: Place, who: Who, names: Sequence[str]) -> Iterator[Finding]:
    """Examines the nodes on which a launcher has started ranks; every rank calls it, rank 0 finds.

    Another rank yields one finding without a text if something failed, for its exit code.

    Args:
        place: what is to be checked; the launcher has chosen the ranks.
        who: this rank.
        names: of the checks of :data:`NODE_CHECKS` and :data:`CHECKS`; the latter are run on every node.

    Raises:
        BackendError: on a rank that does not reach the launcher's store, or hears nothing from rank 0.
    """
    from atorch_ns.doctor._nodes import examine_nodes as examined  # imports torch

    return examined(place, who, names)
