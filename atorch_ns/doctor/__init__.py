"""Is this machine fit for a job, and what is it? Each check stands in a file of its own."""

from __future__ import annotations

from atorch_ns.doctor._base import Check, Finding, Place, Verdict
from atorch_ns.doctor._environment import environment
from atorch_ns.doctor._examine import CHECKS, examine

__all__ = ["CHECKS", "Check", "Finding", "Place", "Verdict", "environment", "examine"]
