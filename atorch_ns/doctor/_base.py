"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Check", "Finding", "Place", "Verdict"]

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found.

    Attributes:
        check: the check's name.
        verdict: ``"fail"``: training will not work; ``"warn"``: it may be slow or break later.
        text: what is the case, with its numbers.
        fix: the line that mends it; empty for what passes.
        figures: what was measured, plain values with a unit in each name.
    """

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "text": self.text,
            "fix": self.fix,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, kw_only=True)
class Place:
    """What is to be checked.

    Attributes:
        num_ranks: processes that a job here has.
        folder: where checkpoints are to be written.
        timeout_s: seconds that one check may take.
    """

    num_ranks: int = 2
    folder: Path = Path()
    timeout_s: float = 60.0


Check = Callable[[Place], list[Finding]]
"""Looks at one thing. What it raises becomes a finding that fails."""
