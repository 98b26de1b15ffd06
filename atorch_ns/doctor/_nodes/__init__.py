"""The examination of several nodes at once, each rank of which a launcher such as torchrun has started.

Ranks talk over the launcher's store, every wait has a limit, and what may hang or crash runs in a process of its own:
a node that is broken is named, and keeps nobody waiting.
"""

from __future__ import annotations

from atorch_ns.doctor._nodes._examine import examine_nodes

__all__ = ["examine_nodes"]
