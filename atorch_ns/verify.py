"""Verification of a strategy against one process, on the user's own model."""

from __future__ import annotations

from atorch_ns.numerics.verdict import ParameterVerdict, Verification
from atorch_ns.numerics.verify import verify

__all__ = ["ParameterVerdict", "Verification", "verify"]
