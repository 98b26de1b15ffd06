"""Probes of winners: their numbers against those of one process."""

from __future__ import annotations

from atorch_ns.search._trial import TrialOutcome

__all__ = ["Probing"]


class Probing:
    """What the probes of a search gave, by candidate."""

    def __init__(self) -> None:
        self._outcomes: dict[str, TrialOutcome] = {}

    def add(self, key: str, outcome: TrialOutcome) -> None:
        """Notes the probe of a candidate."""
        self._outcomes[key] = outcome

    def knows(self, key: str) -> bool:
        """Whether a candidate was probed."""
        return key in self._outcomes

    @property
    def rejected(self) -> dict[str, str]:
        """Candidates whose numbers are wrong, each with what was found."""
        return {
            key: f"wrong: {outcome.reason or 'its numbers differ from those of one process'}"
            for key, outcome in self._outcomes.items()
            if outcome.status == "wrong"
        }

    def check(self, key: str | None, *, ended: str = "") -> str | None:
        """The sentence about the winner's probe; ``None`` if it was not probed, and the search goes on or wants none.

        A probe that could not run proves nothing, so it does not rule the candidate out.

        Args:
            key: of the winner.
            ended: why the search is over, where it was to probe its winner.
        """
        outcome = self._outcomes.get(key or "")
        what = "numerics against one process, with SGD"
        if outcome is None:
            return f"{what}: could not be run: {ended}" if key and ended else None
        if outcome.status == "ok":
            detail = f" ({outcome.reason})" if outcome.reason else ""
            return f"{what}: passed{detail}"
        if outcome.status == "wrong":
            return f"{what}: failed: {outcome.reason}"
        status = "not done in time" if outcome.status == "hung" else outcome.status
        return f"{what}: could not be run: {status}: {outcome.reason}"
