"""Knowledge: all that a search may conclude at one moment from estimates and trials."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atorch_ns.search._candidate import Candidate
from atorch_ns.search._features import Features
from atorch_ns.search._grounds import refused_alike
from atorch_ns.search._ledger import Entry, Ledger
from atorch_ns.search._objective import Objective
from atorch_ns.search._residual import Belief, believe
from atorch_ns.search._standing import Standing, choose, drift, standings
from atorch_ns.search._words import bytes_text

__all__ = ["Knowledge"]

OVER = 1.05
"""A candidate that ran out of memory is taken to need this much of the limit, or of its prediction, at least."""

UNEXPLAINED_BELOW = 0.5
"""A candidate that ran out of memory with less than this share of the limit did so for another reason."""

ABOUT = 0.98
"""What is predicted to need this share of what ran out of memory is taken to run out as well."""

FAILURES_PUNISH = 0.5
"""Chance that a candidate works after a failure that it would share, halved by each further one."""


class Knowledge:
    """What follows from the trials so far. Read-only; made anew after every trial.

    Args:
        candidates: all of them.
        features: theirs.
        ledger: the trials.
        objective: what is best.
        limit_bytes: what one rank may use; 0 for any amount.
        rejected: keys of candidates that a check has ruled out after they were measured.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        features: Features,
        ledger: Ledger,
        objective: Objective,
        limit_bytes: int,
        rejected: frozenset[str] = frozenset(),
    ) -> None:
        self.candidates = list(candidates)
        self._features = features
        self._ledger = ledger
        self._objective = objective
        self._limit = limit_bytes
        self._rejected = rejected
        self._by_key = {one.key: one for one in candidates}

    @functools.cached_property
    def ranked(self) -> list[Standing]:
        """What was measured and fits, best first."""
        found = standings(self._by_key, self._ledger, self._objective, self._limit)
        return [one for one in found if one.candidate.key not in self._rejected]

    @functools.cached_property
    def winner(self) -> Standing | None:
        """What would be chosen now."""
        return choose(self.ranked, self._objective)

    @functools.cached_property
    def open(self) -> list[int]:
        """Indices of candidates that may still be tried."""
        return [
            index
            for index, one in enumerate(self.candidates)
            if one.pruned is None and one.key not in self.learned and not self._ledger.judged(one.key)
        ]

    @functools.cached_property
    def belief(self) -> Belief:
        """About the logarithm of the objective."""
        predicted = [self._objective.predicted(one) for one in self.candidates]
        rows = [
            (index, self._objective.measured(one, entry.merged), self._objective.noise(entry.merged))
            for index, one, entry in self._tried()
        ]
        return self._believe(self._features, predicted, rows)

    @functools.cached_property
    def seconds(self) -> Belief:
        """About the logarithm of the step's seconds."""
        if self._objective.counts_time:
            return self.belief
        predicted = [one.estimate.step_seconds if one.estimate else None for one in self.candidates]
        rows = [(index, entry.merged.median_seconds, 0.0) for index, _, entry in self._tried()]
        return self._believe(self._features, predicted, rows)

    @functools.cached_property
    def bytes(self) -> Belief | None:
        """About the logarithm of the peak; ``None`` where memory was not predicted."""
        predicted = [one.estimate.peak_bytes if one.estimate else None for one in self.candidates]
        if not all(value for value in predicted):
            return None
        rows = []
        for index, one in enumerate(self.candidates):
            entry = self._ledger.get(one.key)
            if entry is None:
                continue
            peak = float(max(entry.merged.peak_bytes, default=0))
            if one.key in self.short_of_memory and self._limit:
                peak = OVER * max(peak, predicted[index] or 0.0, float(self._limit))
            if peak > 0:
                rows.append((index, peak, 0.0))
        return self._believe(replace(self._features, shares=self._memory_shares), predicted, rows)

    @functools.cached_property
    def learned(self) -> dict[str, str]:
        """Candidates that need not be tried after what trials of others gave, each with the reason."""
        return {**refused_alike(self.candidates, self._ledger), **self.too_large}

    @functools.cached_property
    def too_large(self) -> dict[str, str]:
        """Those of them that would run out of memory as another one did."""
        failed = [one for one in self.candidates if one.key in self.short_of_memory]
        peaks = {one.key: one.estimate.peak_bytes for one in failed if one.estimate is not None}
        if not any(peaks.values()):
            return {}
        least = min(failed, key=lambda one: peaks.get(one.key) or math.inf)
        found: dict[str, str] = {}
        for index, one in enumerate(self.candidates):
            if one.pruned is not None or self._ledger.judged(one.key) or one.estimate is None:
                continue
            if one.estimate.peak_bytes >= ABOUT * peaks[least.key]:
                found[one.key] = (
                    f"predicted to need {bytes_text(one.estimate.peak_bytes)}, and {least.label} ran out of "
                    f"memory with {bytes_text(peaks[least.key])}"
                )
            elif self.bytes is not None and self._limit:
                mean, deviation = self.bytes.mean[index], self.bytes.deviation[index]
                if mean - deviation > math.log(self._limit):
                    found[one.key] = (
                        f"needs {bytes_text(math.exp(mean))} of {bytes_text(self._limit)} (predicted, corrected "
                        "by trials that ran out of memory)"
                    )
        return found

    @functools.cached_property
    def short_of_memory(self) -> frozenset[str]:
        """Keys of the candidates that ran out of memory, where the limit explains it.

        Far below the limit, by prediction and measurement, the cause is another, and says nothing of others.
        """
        found = set()
        for index, entry in self._entries():
            one = self.candidates[index]
            predicted = one.estimate.peak_bytes if one.estimate is not None else math.inf
            needed = max(predicted, float(max(entry.merged.peak_bytes, default=0)))
            if entry.merged.status == "out of memory" and needed >= UNEXPLAINED_BELOW * self._limit:
                found.add(one.key)
        return frozenset(found)

    @property
    def num_out_of_memory(self) -> int:
        """Candidates that ran out of memory, explained or not."""
        return sum(entry.merged.status == "out of memory" for _, entry in self._ledger)

    @functools.cached_property
    def chances_to_run(self) -> np.ndarray:
        """[N] the chance that a trial does not fail for methods that have failed and never worked.

        A failure is blamed in equal parts on the methods of the candidate that never worked anywhere.
        """
        methods = self._features.methods
        ends = [(index, entry.merged) for index, entry in self._entries() if entry.judged]
        works = frozenset[str]().union(*(methods[index] for index, end in ends if end.succeeded))
        blame: dict[str, float] = {}
        for index, end in ends:
            suspects = methods[index] - works
            if not end.succeeded and self.candidates[index].key not in self.short_of_memory:
                for method in suspects:
                    blame[method] = blame.get(method, 0.0) + 1 / len(suspects)
        total = [sum(blame.get(method, 0.0) for method in one - works) for one in methods]
        return np.asarray([FAILURES_PUNISH**number for number in total])

    def chance_of_better(self, margin: float, seed: int) -> float:
        """The chance that any open candidate beats the best by more than ``margin`` of it."""
        if not self.open or not self.ranked:
            return 1.0 if self.open else 0.0
        drawn, best = self._drawn(seed)
        return float(np.mean(drawn.min(axis=1) < best + math.log1p(-margin)))

    def lower_bound(self, probability: float, seed: int) -> float | None:
        """What no candidate is expected to be below: the quantile of the least of all."""
        if not self.ranked:
            return None
        reached = self.ranked[0].value
        if not self.open:
            return reached
        drawn, _ = self._drawn(seed)
        return min(reached, float(np.exp(np.quantile(drawn.min(axis=1), probability))))

    def _drawn(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """[S, M] draws of the open candidates, infinite where they fail, and [S] of the best one."""
        best = self.candidates.index(self.ranked[0].candidate)
        samples = self.belief.samples(seed)
        fails = np.random.default_rng(seed + 1).random((len(samples), len(self.open)))
        drawn = np.where(fails < self.chances_to_run[self.open], samples[:, self.open], np.inf)
        return drawn, samples[:, best]

    def _entries(self) -> list[tuple[int, Entry]]:
        found = ((index, self._ledger.get(one.key)) for index, one in enumerate(self.candidates))
        return [(index, entry) for index, entry in found if entry is not None]

    def _tried(self) -> list[tuple[int, Candidate, Entry]]:
        return [
            (index, self.candidates[index], entry)
            for index, entry in self._entries()
            if entry.judged and entry.merged.succeeded
        ]

    def _believe(
        self,
        features: Features,
        predicted: Sequence[float | None],
        rows: Sequence[tuple[int, float, float]],
    ) -> Belief:
        usable = [row for row in rows if row[1] > 0 and math.isfinite(row[1])]
        logs = np.asarray([math.log(value) if value else math.nan for value in predicted])
        return believe(
            features,
            logs,
            np.asarray([row[0] for row in usable], dtype=np.int64),
            np.asarray([math.log(row[1]) for row in usable]),
            np.hypot(np.asarray([row[2] for row in usable]), drift(self._ledger, self._objective)),
        )

    @functools.cached_property
    def _memory_shares(self) -> np.ndarray:
        parts = np.asarray([one.estimate.memory if one.estimate else [0.0] * 6 for one in self.candidates])
        total = np.maximum(parts.sum(axis=1, keepdims=True), 1.0)
        shares: np.ndarray = parts / total
        shares -= shares.mean(axis=0)
        return shares
