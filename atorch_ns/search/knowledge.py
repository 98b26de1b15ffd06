"""Knowledge: everything that follows at one moment of a search from its estimates and trials."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atorch_ns.estimate import MemoryParts
from atorch_ns.search.objective import Objective
from atorch_ns.search.ranking import CONFIDENCE_Z, RankedCandidate, choose, drift, rank_candidates
from atorch_ns.search.residual_model import DRIFT, Features, Posterior, fit_posterior
from atorch_ns.search.space.candidate import Candidate
from atorch_ns.search.trial import BesideTensors, CandidateTrials, Ledger, TrialOutcome
from atorch_ns.text import bytes_text

OVER = 1.05  # least memory of a candidate that ran out, as a share of the limit or of its prediction
UNEXPLAINED_BELOW = 0.5  # below this share of the limit, a candidate ran out of memory for another reason
ABOUT = 0.98  # a candidate that needs this share of the bytes of one that ran out of memory runs out as well
FAILURES_PUNISH = 0.5  # factor on a candidate's chance to work, for each failure that it would share
CLOSE_WITHIN = 0.1  # one process is not as fast if it is slower by more than this share, whatever the noise


class Knowledge:
    """The conclusions from all trials so far. Read-only; made anew after every trial.

    ``limit_bytes`` are the bytes that one rank may use; 0 for no limit.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        features: Features,
        ledger: Ledger,
        objective: Objective,
        *,
        limit_bytes: int,
    ) -> None:
        self.candidates = list(candidates)
        self.ledger = ledger
        self.objective = objective
        self.limit_bytes = limit_bytes
        self._features = features
        self._by_key = {candidate.key: candidate for candidate in candidates}

    @functools.cached_property
    def ranked(self) -> list[RankedCandidate]:
        """Candidates that were measured, fit and have correct numerics, best first."""
        ranking = rank_candidates(self._by_key, self.ledger, self.objective, self.limit_bytes)
        wrong_numerics = self.ledger.rejected
        return [result for result in ranking if result.candidate.key not in wrong_numerics]

    @functools.cached_property
    def winner(self) -> RankedCandidate | None:
        """The candidate that would be chosen now."""
        return choose(self.ranked, self.objective)

    def is_as_fast(self, trial: TrialOutcome) -> bool:
        """Returns whether a simpler strategy's trial takes no longer than the winner, within noise."""
        assert self.winner is not None
        # The noise within the trial, and the drift between trials.
        error = math.hypot(self.objective.noise(trial), drift(self.ledger, self.objective))
        best = self.winner.value
        noise_s = CONFIDENCE_Z * math.hypot(error * trial.median_seconds, self.winner.error * best)
        return trial.succeeded and trial.median_seconds - best <= min(noise_s, CLOSE_WITHIN * best)

    @functools.cached_property
    def open(self) -> list[int]:
        """Indices of candidates that may still be tried."""
        return [index for index, candidate in self._open_trials if candidate.key not in self.learned]

    @property
    def _open_trials(self) -> list[tuple[int, Candidate]]:
        entries = enumerate(self.candidates)
        return [(at, each) for at, each in entries if not (each.pruned or self.ledger.judged(each.key))]

    @functools.cached_property
    def posterior(self) -> Posterior:
        """Posterior of the logarithm of the objective."""
        predictions = [self.objective.predicted(candidate) for candidate in self.candidates]
        rows = [
            (index, self.objective.measured(candidate, entry.merged), self.objective.noise(entry.merged))
            for index, candidate, entry in self._ok_entries()
        ]
        return self._fit_posterior(self._features, predictions, rows)

    @functools.cached_property
    def seconds(self) -> Posterior:
        """Posterior of the logarithm of the step's seconds."""
        if self.objective.counts_time:
            return self.posterior
        predictions = [candidate.predicted_seconds for candidate in self.candidates]
        rows = [(index, entry.merged.median_seconds, 0.0) for index, _, entry in self._ok_entries()]
        return self._fit_posterior(self._features, predictions, rows)

    @functools.cached_property
    def bytes(self) -> Posterior | None:
        """Posterior of the logarithm of a rank's bytes, tensors and others; ``None`` without predictions."""
        tensors = [candidate.predicted_bytes for candidate in self.candidates]
        # One candidate without an estimate is enough; those that amount to others are never tried.
        if not all(each.predicted_bytes for each in self.candidates if each.pruned is None):
            return None
        predictions = [value + self.unpredicted_bytes if value else None for value in tensors]
        rows = []
        for index, entry in self._indexed_entries:
            estimate = self.candidates[index].estimate
            beyond = estimate.peak_bytes - estimate.allocated_bytes if estimate is not None else 0.0
            if entry.merged.while_applying:
                continue  # memory of planning says nothing about steps
            peak = float(entry.merged.max_needed_bytes)
            if peak and not entry.merged.process_bytes:
                peak += beyond  # only tensors were measured, so the rest is as predicted
            if self.candidates[index].key in self.short_of_memory and self.limit_bytes:  # it needs more
                peak = OVER * max(peak, predictions[index] or 0.0, float(self.limit_bytes))
            if peak > 0:
                rows.append((index, peak, 0.0))
        return self._fit_posterior(replace(self._features, shares=self._memory_shares), predictions, rows)

    @functools.cached_property
    def beside(self) -> BesideTensors | None:
        """Memory that the trials so far needed beside tensors; ``None`` if none has measured it."""
        sizes = [entry.merged.beside_bytes for _, _, entry in self._ok_entries()]
        amounts = sorted(size for size in sizes if size is not None)
        if not amounts:
            return None
        return BesideTensors(amounts[0], round(statistics.median(amounts)), amounts[-1], len(amounts))

    @functools.cached_property
    def _predicted_beside(self) -> float:  # nothing on CPUs
        estimates = [entry.estimate for entry in self.candidates if entry.estimate is not None]
        sizes = [estimate.peak_bytes - estimate.allocated_bytes for estimate in estimates]
        return statistics.median(sizes) if sizes else 0.0

    @property
    def unpredicted_bytes(self) -> float:
        """Least bytes beside tensors that all trials needed and no estimate has, as strategies differ."""
        return max(0.0, self.beside.low - self._predicted_beside) if self.beside is not None else 0.0

    @property
    def limit_for_tensors(self) -> int:
        """Limit less the bytes that trials needed beside tensors and estimates lack; 0 for no limit."""
        if not self.limit_bytes or self.beside is None:
            return self.limit_bytes
        return max(1, round(self.limit_bytes - max(0.0, self.beside.middle - self._predicted_beside)))

    @functools.cached_property
    def learned(self) -> dict[str, str]:
        """Candidates that need no trial because of other candidates' trials, each with the reason."""
        return {**self.refused_alike, **self.too_large}

    @functools.cached_property
    def refused_alike(self) -> dict[str, str]:
        """Candidates that a method would refuse like another with the same refusal key, with reasons.

        A refusal is disregarded if another candidate with the same key has run.
        """
        refusals: dict[tuple[str, str], str] = {}
        ran: set[tuple[str, str]] = set()
        for index, entry in self._indexed_entries:
            candidate, end = self.candidates[index], entry.merged
            if not entry.judged:
                continue
            if end.succeeded:
                ran.update(candidate.refusal_keys)  # refusals by the same keys are disregarded
            elif end.status == "refused":
                reason = f"{end.refused_by} refuses it, as it refused {candidate.label}: {end.reason}"
                for key in candidate.refusal_keys:
                    if key[0] == end.refused_by:  # other methods have not refused
                        refusals.setdefault(key, reason)
        matches: dict[str, str] = {}
        for _, candidate in self._open_trials:
            reasons = [refusals[key] for key in candidate.refusal_keys if key in refusals and key not in ran]
            if reasons:
                matches[candidate.key] = reasons[0]
        return matches

    @functools.cached_property
    def too_large(self) -> dict[str, str]:
        """Candidates, with reasons, that would run out of memory as another one did."""
        # If tensors of this size fitted elsewhere, a candidate ran out for another reason, such as planning.
        ran = max((candidate.predicted_bytes or 0.0 for _, candidate, _ in self._ok_entries()), default=0.0)
        failures = [candidate for candidate in self.candidates if candidate.key in self.short_of_memory]
        failures = [candidate for candidate in failures if ABOUT * (candidate.predicted_bytes or 0.0) > ran]
        least = min(failures, key=lambda candidate: candidate.predicted_bytes or math.inf, default=None)
        least_bytes = math.inf if least is None else least.predicted_bytes or math.inf
        reasons: dict[str, str] = {}
        for index, candidate in self._open_trials:
            if candidate.estimate is None:
                continue
            if least is not None and candidate.estimate.peak_bytes >= ABOUT * least_bytes:
                reasons[candidate.key] = (
                    f"predicted to need {bytes_text(candidate.estimate.peak_bytes)}, and {least.label} ran out of "
                    f"memory at {bytes_text(least_bytes)}"
                )
            elif self.bytes is not None and self.limit_bytes:
                mean, deviation = self.bytes.mean[index], self.bytes.deviation[index]
                if mean - deviation > math.log(self.limit_bytes):  # it is too large with a chance of 84 %
                    reasons[candidate.key] = (
                        f"needs {bytes_text(math.exp(mean))}, over the limit of {bytes_text(self.limit_bytes)} (predicted, "
                        f"corrected by trials{self._beside_text()})"
                    )
        return reasons

    def _beside_text(self) -> str:
        if (beside := self.beside) is None or not self.unpredicted_bytes:
            return ""
        low, middle, high = (bytes_text(value) for value in (beside.low, beside.middle, beside.high))
        return f", which took {middle} beyond their tensors ({low} to {high})"

    @functools.cached_property
    def short_of_memory(self) -> frozenset[str]:
        """Keys of the candidates that ran out of memory, where the limit explains it.

        Those far below the limit, by prediction and measurement, had another cause, as had those that failed
        before the first step. Other candidates are not judged by them.
        """
        keys = set()
        for index, entry in self._indexed_entries:
            candidate = self.candidates[index]
            peak = candidate.predicted_bytes
            num_bytes = max(math.inf if peak is None else peak, float(entry.merged.max_needed_bytes))
            of_steps = entry.merged.status == "out of memory" and not entry.merged.while_applying
            if of_steps and num_bytes >= UNEXPLAINED_BELOW * self.limit_bytes:
                keys.add(candidate.key)
        return frozenset(keys)

    @property
    def num_out_of_memory(self) -> int:
        """Candidates that ran out of memory, explained or not."""
        return sum(entry.merged.status == "out of memory" for _, entry in self.ledger)

    @functools.cached_property
    def chances_to_run(self) -> np.ndarray:
        """[N] chance that a trial does not fail because of methods that failed and never worked.

        A failure is blamed in equal parts on the methods of the candidate that never worked anywhere.
        """
        methods = self._features.methods
        ends = [(index, entry.merged) for index, entry in self._indexed_entries if entry.judged]
        works = frozenset[str]().union(*(methods[index] for index, end in ends if end.succeeded))
        blame: dict[str, float] = {}
        for index, end in ends:
            suspects = methods[index] - works  # a method that has worked anywhere is not blamed
            if not end.succeeded and self.candidates[index].key not in self.short_of_memory:
                for method in suspects:
                    blame[method] = blame.get(method, 0.0) + 1 / len(suspects)
        total = [sum(blame.get(method, 0.0) for method in names - works) for names in methods]
        return np.asarray([FAILURES_PUNISH**number for number in total])

    def chance_of_better(self, margin: float, seed: int) -> float:
        """Returns the chance that an open candidate beats the best by more than ``margin``, a share of it."""
        if not self.open or not self.ranked:
            return 1.0 if self.open else 0.0
        draws, best = self._draw_samples(seed)
        return float(np.mean(draws.min(axis=1) < best + math.log1p(-margin)))  # all in logarithms

    def lower_bound(self, probability: float, seed: int) -> float | None:
        """Lower bound on the value of every candidate: a quantile of the least value of all."""
        if not self.ranked:
            return None
        best_value = self.ranked[0].value
        if not self.open:
            return best_value
        draws, _ = self._draw_samples(seed)
        return min(best_value, float(np.exp(np.quantile(draws.min(axis=1), probability))))

    def _draw_samples(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        best = self.candidates.index(self.ranked[0].candidate)
        samples = self.posterior.samples(seed)
        # Failures are drawn by another seed than values, of which they are independent.
        fails = np.random.default_rng(seed + 1).random((len(samples), len(self.open)))
        draws = np.where(fails < self.chances_to_run[self.open], samples[:, self.open], np.inf)
        return draws, samples[:, best]  # [S, M] of open candidates, [S] of the best one

    @functools.cached_property
    def _indexed_entries(self) -> list[tuple[int, CandidateTrials]]:
        pairs = ((index, self.ledger.get(candidate.key)) for index, candidate in enumerate(self.candidates))
        return [(index, entry) for index, entry in pairs if entry is not None]

    def _ok_entries(self) -> list[tuple[int, Candidate, CandidateTrials]]:
        return [
            (index, self.candidates[index], entry)
            for index, entry in self._indexed_entries
            if entry.judged and entry.merged.succeeded
        ]

    def _fit_posterior(
        self, features: Features, estimates: Sequence[float | None], rows: Sequence[tuple[int, float, float]]
    ) -> Posterior:
        usable = [row for row in rows if row[1] > 0 and math.isfinite(row[1])]
        between = drift(self.ledger, self.objective) or DRIFT  # none is measured where time does not count
        logs = np.asarray([math.log(value) if value else math.nan for value in estimates])  # [N]
        if not np.isnan(logs).all():  # what is never tried does not say that nothing is known of the others
            is_pruned = np.asarray([candidate.pruned is not None for candidate in self.candidates])
            logs[np.isnan(logs) & is_pruned] = np.nanmedian(logs)
        return fit_posterior(
            features,
            logs,
            np.asarray([row[0] for row in usable], dtype=np.int64),
            np.asarray([math.log(row[1]) for row in usable]),
            noise=np.hypot(np.asarray([row[2] for row in usable]), between),
        )

    @functools.cached_property
    def _memory_shares(self) -> np.ndarray:
        nothing = [0.0] * len(MemoryParts._fields)
        parts = np.asarray([each.estimate.memory if each.estimate else nothing for each in self.candidates])
        total = np.maximum(parts.sum(axis=1, keepdims=True), 1.0)
        shares: np.ndarray = parts / total
        shares -= shares.mean(axis=0)  # the mean is in the common factor
        return shares
