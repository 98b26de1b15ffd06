"""Candidates with made-up estimates, and a world in which they take the time it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from atorch_ns.estimate import Estimate, MemoryParts, TimeParts
from atorch_ns.search import (
    Candidate,
    Search,
    SearchOutcome,
    SearchSetting,
    SearchSettings,
    TrialOutcome,
    TrialTask,
)
from atorch_ns.strategy import Step

GIB = 2**30


def candidate(
    key: str,
    *methods: str | tuple[str, object],
    seconds: float = 0.03,
    peak: float = GIB,
    is_baseline: bool = False,
    **more: object,
) -> Candidate:
    """A candidate of these methods that is predicted to take so long and so much."""
    steps = tuple((method, None) if isinstance(method, str) else method for method in methods)
    estimate = Estimate(
        memory=MemoryParts(peak / 4, peak / 4, peak / 4, peak / 8, peak / 8, 0.0),
        time=TimeParts(seconds * 0.9, 0.0, 0.0, seconds * 0.1, 0.0, 0.0, 0.0, 0.0),
    )
    label = " + ".join(str(Step(*step)) for step in steps) or "plain"
    return Candidate(key=key, steps=steps, label=label, estimate=estimate, is_baseline=is_baseline, **more)  # type: ignore[arg-type]


def setting(**changes: object) -> SearchSetting:
    """A setting of two CPU ranks."""
    given: dict[str, object] = {
        "model": "tests.Model",
        "num_parameters": 1000,
        "world_size": 2,
        "num_nodes": 1,
        "device": "cpu",
        "memory_limit_bytes": 8 * GIB,
        "global_batch": 16,
        "num_tokens": 8,
        "fingerprint": "f1",
        **changes,
    }
    return SearchSetting(**given)  # type: ignore[arg-type]


class Clock:
    """A clock that trials move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """Runs trials: steps take their true time, with noise in every step and drift from trial to trial."""

    def __init__(
        self,
        truth: Mapping[str, float],
        *,
        jitter: float = 0.0,
        drift: float = 0.0,
        seed: int = 0,
        peaks: Mapping[str, int] | None = None,
        ends: Mapping[str, TrialOutcome] | None = None,
    ) -> None:
        self.truth = dict(truth)
        self.jitter, self.drift = jitter, drift
        self.random = np.random.default_rng(seed)
        self.peaks = dict(peaks or {})
        self.ends = dict(ends or {})
        self.clock = Clock()
        self.tasks: list[TrialTask] = []

    def run(self, task: TrialTask) -> TrialOutcome:
        self.tasks.append(task)
        self.clock.now += 1.0
        if task.kind == "probe":
            return TrialOutcome(status="ok", total_seconds=0.5)
        name = "single" if task.kind == "single" else task.key
        if name in self.ends:
            return self.ends[name]
        centre = self.truth[name] * (1 + self.drift * self.random.standard_normal())
        steps = centre * (1 + self.jitter * self.random.standard_normal(8))
        self.clock.now += float(steps.sum())
        peak = self.peaks.get(task.key, GIB)
        return TrialOutcome(
            status="ok",
            step_seconds=tuple(float(step) for step in np.maximum(steps, 1e-6)),
            peak_bytes=(peak, peak),
            total_seconds=1.0 + float(steps.sum()),
        )

    def search(
        self,
        candidates: list[Candidate],
        *,
        on_task: Callable[[Search, TrialTask], None] | None = None,
        search: Search | None = None,
        setting_: SearchSetting | None = None,
        **settings: object,
    ) -> SearchOutcome:
        """The outcome of a whole search."""
        chosen = SearchSettings(**settings)  # type: ignore[arg-type]
        search = search or Search(setting_ or setting(), chosen, candidates, clock=self.clock)
        while (task := search.ask()) is not None:
            if on_task is not None:
                on_task(search, task)
            search.tell(task.id, self.run(task))
        return search.outcome()
