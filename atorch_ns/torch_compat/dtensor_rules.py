"""Rules of DTensors: how torch's own sharding propagation would divide an operator over one mesh dimension."""

from __future__ import annotations

from typing import Any


def dtensor_rules(call: Any, degree: int) -> tuple[Any, ...]:
    """Rules of a call by torch's strategies for DTensors; empty where it has none."""
    return ()
