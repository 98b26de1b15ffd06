"""Self-checks of a search: the chosen strategy is priced again, and held against what its trial did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError
from atorch_ns.estimate import Collective, Estimate, Workload, estimate
from atorch_ns.method import Registry, resolve
from atorch_ns.profile import Profile
from atorch_ns.search import Candidate
from atorch_ns.text import bytes_text, error_text

PRICE_TOLERANCE: Final = 1e-9
"""Relative. The same plan, priced alone or in a table of many, differs only by the order of sums."""
BYTES_TOLERANCE: Final = 1e-3
"""Relative. Padding of communication buffers is not modelled to the byte."""
MAX_BUFFER_DTYPES: Final = 3
"""Distinct buffer dtypes of one model: floating, integer and boolean."""
MEMORY_TOLERANCE: Final = 0.08
"""Relative: the largest error that the memory estimate promises."""
MEMORY_SLACK_BYTES: Final = 256 * 2**10
"""Absolute, so that batches and counters do not fail a model of a few kilobytes."""


@dataclass(frozen=True)
class Check:
    """Result of a self-check.

    Attributes:
        name: name of the check.
        passed: whether it holds.
        text: the numbers.
    """

    name: str
    passed: bool
    text: str = ""

    def __str__(self) -> str:
        if not self.passed:
            return f"{self.name}: failed: {self.text}"
        return f"{self.name}: passed ({self.text})" if self.text else f"{self.name}: passed"


def check_collectives(
    estimates: Sequence[Collective], counts: Mapping[str, tuple[int, int]] | None, *, reason: str = ""
) -> Check:
    """Checks one step's collectives against the prediction: kinds and calls exactly, bytes within 0.1%.

    The step is the first rank's, of a pipeline's first stage. Calls of broadcasts may be off by a few, since
    buffers are sent together by dtype, which a trace does not tell.

    Args:
        estimates: :attr:`~atorch_ns.estimate.Estimate.collectives`.
        counts: calls and bytes in one step by kind, as a trial counts them; ``None`` if it did not.
        reason: why they cannot be predicted, as a clause; then nothing is compared.
    """
    name = "collectives as predicted"
    if reason:
        return Check(name, True, f"not compared: {reason}")
    if counts is None and any(collective.count for collective in estimates):
        return Check(name, False, "the trial counted none")
    totals: dict[str, tuple[int, int]] = {}  # by kind: calls and bytes of one step, summed
    for collective in estimates:
        count, num_bytes = totals.get(collective.kind, (0, 0))
        totals[collective.kind] = (count + collective.count, num_bytes + collective.num_bytes)
    targets = {kind: value for kind, value in totals.items() if value[0]}
    calls = {kind: value for kind, value in (counts or {}).items() if value[0]}
    wrong = [
        f"{kind} {_calls_text(calls.get(kind, (0, 0)))} executed, {_calls_text(targets.get(kind, (0, 0)))} predicted"
        for kind in sorted({*targets, *calls})
        if not _same_calls(kind, targets.get(kind, (0, 0)), calls.get(kind, (0, 0)))
    ]
    if wrong:
        return Check(name, False, "; ".join(wrong))
    return Check(
        name, True, "; ".join(f"{kind} {_calls_text(calls[kind])}" for kind in sorted(calls)) or "none"
    )


def check_price(
    candidate: Candidate, profile: Profile, cluster: Cluster, workload: Workload, *, registry: Registry
) -> Check:
    """Checks that the candidate, resolved and priced from scratch, costs the same as in the search."""
    name = "price from scratch"
    if candidate.estimate is None:
        return Check(name, False, "the candidate was never priced")
    try:
        plan = resolve(candidate.strategy, cluster, registry, profile=profile).plan
        again = estimate(plan, profile, cluster, workload)  # of one plan; the search priced a table of rows
    except AtorchError as error:
        return Check(name, False, error_text(error))
    pairs = {
        "step": (candidate.estimate.step_seconds * 1e3, again.step_seconds * 1e3, "ms"),
        "memory": (candidate.estimate.peak_bytes / 2**20, again.peak_bytes / 2**20, "MiB"),
    }
    wrong = [
        f"{what} {now:.6g} {unit} now, {then:.6g} {unit} in the search"
        for what, (then, now, unit) in pairs.items()
        if not math.isclose(then, now, rel_tol=PRICE_TOLERANCE, abs_tol=1e-15)
    ]
    if wrong:
        return Check(name, False, "; ".join(wrong))
    return Check(name, True, ", ".join(f"{what} {now:.4g} {unit}" for what, (_, now, unit) in pairs.items()))


def check_memory(prediction: Estimate, peaks: Sequence[int]) -> Check:
    """Checks that the peak of tensors over ranks is within 8% of the prediction, or within 256 KiB."""
    name = "memory as predicted"
    if not peaks:
        return Check(name, False, "the trial measured none")
    peak = max(peaks)  # of all ranks: the estimate is of the rank that needs the most
    tensor_bytes = prediction.allocated_bytes  # tensors alone, as trials count them: no context, no reserve
    text = f"{bytes_text(peak)} measured, {bytes_text(tensor_bytes)} predicted"
    text = f"{text}: {_deviation_text(tensor_bytes, peak)}"
    off = abs(peak - tensor_bytes)
    if off <= MEMORY_TOLERANCE * peak:
        return Check(name, True, text)
    if off <= MEMORY_SLACK_BYTES:
        return Check(name, True, f"{text}, but within {bytes_text(MEMORY_SLACK_BYTES)}")
    return Check(name, False, f"{text}, {MEMORY_TOLERANCE:.0%} allowed")


def _same_calls(kind: str, target: tuple[int, int], actual: tuple[int, int]) -> bool:
    slack = MAX_BUFFER_DTYPES if kind == "broadcast" else 0
    return abs(target[0] - actual[0]) <= slack and abs(target[1] - actual[1]) <= BYTES_TOLERANCE * actual[1]


def _calls_text(value: tuple[int, int]) -> str:
    count, num_bytes = value
    # Exact below 1 MiB, as figures that differ by a few bytes must not read alike.
    size = f"{num_bytes} B" if num_bytes < 2**20 else bytes_text(num_bytes)
    return f"{count} × ({size} in all)"


def _deviation_text(prediction: float, peak: float) -> str:
    if not peak:
        return "none was held"
    percent = (prediction / peak - 1) * 100
    if abs(percent) < 0.05:  # would be shown as 0.0%
        return "the same"
    return f"predicted {abs(percent):.1f}% {'above' if percent > 0 else 'below'} measured"
