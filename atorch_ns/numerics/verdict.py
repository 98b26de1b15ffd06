"""Verdict on a run held against the reference: tolerances, and a state for every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from atorch_ns.data import Reduction
from atorch_ns.job.loss import WAYS_OUT
from atorch_ns.numerics.reference import NO_DEVIATION, Deviation, Reference, measure

TOLERANCE: Final = 2e-4
"""Relative to a parameter's update, in full precision; rounding alone reaches 2e-5."""
REDUCED_TOLERANCE: Final = 0.05
NOISE_FACTOR: Final = 4.0
"""Multiple of the error of plain bfloat16 in one process that is allowed on top in reduced precision."""
UNJUDGED: Final = 0.25
"""Parameters whose update plain reduced precision changes by more than this share are not judged."""
LOSS_TOLERANCE: Final = 1e-4
REDUCED_LOSS_TOLERANCE: Final = 0.02

State = Literal["ok", "drifts", "not judged"]


@dataclass(frozen=True, kw_only=True)
class ParameterVerdict:
    """Verdict on one parameter.

    Attributes:
        name: name in the user's model.
        gradient_error: the largest error of its first gradient, in units of the gradient's largest element.
        parameter_error: the largest error after the last step, in units of its largest update.
        gradient_tolerance, parameter_tolerance: the largest errors that are allowed.
        state: ``"drifts"`` if one is exceeded; ``"not judged"`` where rounding noise exceeds the update.
    """

    name: str
    gradient_error: float
    parameter_error: float
    gradient_tolerance: float
    parameter_tolerance: float
    state: State

    @property
    def excess(self) -> float:
        """The larger error in units of its tolerance."""
        return max(
            self.gradient_error / self.gradient_tolerance, self.parameter_error / self.parameter_tolerance
        )


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of a comparison; plain values.

    Attributes:
        strategy: the strategy as applied.
        world_size, num_steps: number of ranks, and of optimizer steps.
        num_samples: samples of one step over all ranks.
        passed: whether nothing drifts.
        reasons: reasons why it did not pass, one sentence each.
        losses: losses of every step, in one process and on the ranks.
        loss_error, loss_tolerance: largest difference, relative to the loss, absolute below 1; its limit.
        parameters: verdicts by parameter, the worst first.
        reduced_precision: whether the strategy computes in less than float32; tolerances are then wider.
        training: whether the model was in training mode, which is so only where its loss needs it.
        notes: methods that were added or left out, as sentences.
        seconds: wall time of both runs.
    """

    strategy: str
    world_size: int
    num_steps: int
    num_samples: int
    passed: bool
    reasons: tuple[str, ...]
    losses: tuple[tuple[float, float], ...]
    loss_error: float
    loss_tolerance: float
    parameters: tuple[ParameterVerdict, ...]
    reduced_precision: bool
    training: bool
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def num_judged(self) -> int:
        """Parameters that could be compared."""
        return sum(each.state != "not judged" for each in self.parameters)

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        document = {"schema": 1, **vars(self), "num_judged": self.num_judged}
        return document | {"parameters": [vars(each) for each in self.parameters]}


def judge(
    first: Deviation,
    last: Deviation,
    *,
    first_noise: Deviation | None,
    last_noise: Deviation | None,
    differing: tuple[str, ...],
) -> tuple[tuple[ParameterVerdict, ...], float, list[str]]:
    """The verdict on every parameter, the loss's tolerance, and the reasons why it does not pass.

    Args:
        first, last: deviations of the ranks from one process, after the first step and after all.
        first_noise, last_noise: deviations of one process in bfloat16; ``None`` in full precision.
        differing: names of parameters that ranks should hold alike and do not.
    """
    rounded_first, rounded_last = first_noise or NO_DEVIATION, last_noise or NO_DEVIATION
    base = TOLERANCE if last_noise is None else REDUCED_TOLERANCE
    rows = []
    for name, error in last.errors.items():
        noise = (rounded_first.errors.get(name, 0.0), rounded_last.errors.get(name, 0.0))
        allowed = tuple(base + NOISE_FACTOR * each for each in noise)  # (gradient, parameter)
        gradient = first.errors.get(name, 0.0)
        over = gradient > allowed[0] or error > allowed[1]
        state: State = "not judged" if max(noise) > UNJUDGED else ("drifts" if over else "ok")
        row = ParameterVerdict(
            name=name,
            gradient_error=gradient,
            parameter_error=error,
            gradient_tolerance=allowed[0],
            parameter_tolerance=allowed[1],
            state=state,
        )
        rows.append(row)
    order: Mapping[State, int] = {"drifts": 0, "ok": 1, "not judged": 2}  # sorting order: worst first
    rows.sort(key=lambda row: (order[row.state], -row.excess))
    loss_base = LOSS_TOLERANCE if last_noise is None else REDUCED_LOSS_TOLERANCE
    loss_tolerance = loss_base + NOISE_FACTOR * rounded_last.loss_error
    return tuple(rows), loss_tolerance, _failure_reasons(rows, last, loss_tolerance, differing)


def judge_parts(
    parts: Reference, whole: Reference, noise: Deviation | None, reduction: Reduction = "mean"
) -> str | None:
    """The reason why the mean or sum of the parts' losses is not the whole batch's; ``None`` if they are equal.

    Args:
        parts: run of one step on the parts, one after the other, as ranks compute them.
        whole: run of the same step on the whole batch in one pass.
        noise: deviation of one process in bfloat16 from ``parts``; ``None`` in full precision.
        reduction: how a step makes one loss of theirs.
    """
    difference = measure(parts, whole.final, whole.losses)
    rows, _, reasons = judge(difference, difference, first_noise=noise, last_noise=noise, differing=())
    if not any(row.state == "drifts" for row in rows) and not any("loss is off" in text for text in reasons):
        return None
    worst = max(difference.errors.values(), default=0.0)
    return (
        f"the loss is not a {reduction} over samples: one pass over the whole batch gives {whole.losses[0]:.6f}, the {reduction} "
        f"over the parts that ranks and micro-batches compute {parts.losses[0]:.6f}, and gradients differ by "
        f"{worst:.1e}. {WAYS_OUT[reduction]}"
    )


def _failure_reasons(
    rows: list[ParameterVerdict], last: Deviation, loss_tolerance: float, differing: tuple[str, ...]
) -> list[str]:
    reasons = []
    drifting = [row for row in rows if row.state == "drifts"]
    if last.missing:
        reasons.append(f"{len(last.missing)} parameter(s) are missing, such as {last.missing[0]}")
    if differing:
        reasons.append(
            f"ranks hold different values of {len(differing)} parameter(s), such as {differing[0]}"
        )
    if drifting:
        reasons.append(f"{len(drifting)} of {len(rows)} parameters differ from one process")
    if not last.loss_error <= loss_tolerance:  # also true for NaN
        reasons.append(f"the loss is off by {last.loss_error:.1e} ({loss_tolerance:.1e} allowed)")
    if rows and all(row.state == "not judged" for row in rows):
        reasons.append("rounding alone changes every parameter by more than its update does")
    return reasons
