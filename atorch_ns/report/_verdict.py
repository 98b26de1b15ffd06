"""What was chosen and why, in sentences."""

from __future__ import annotations

from atorch_ns.report._measures import Figure, is_planned, peak, seconds
from atorch_ns.report._units import (
    bytes_text,
    compared_text,
    count_text,
    counted,
    percent_text,
    seconds_text,
    sentence,
)
from atorch_ns.search import SearchOutcome, Setting

__all__ = ["setting_text", "verdict"]


def setting_text(setting: Setting) -> str:
    """What was searched for, in one line."""
    nodes = f" on {setting.num_nodes} nodes" if setting.num_nodes > 1 else ""
    tokens = f" of {setting.num_tokens} tokens" if setting.num_tokens > 1 else ""
    limit = bytes_text(setting.memory_limit_bytes or None)
    return (
        f"{setting.model}, {count_text(setting.num_parameters)} parameters; {setting.world_size} × "
        f"{setting.device}{nodes}, limit {limit} a rank; global batch {setting.global_batch} samples{tokens}"
    )


def verdict(outcome: SearchOutcome) -> tuple[str, ...]:
    """The choice, its figures, how sure it is, and why the search ended: a sentence each."""
    sentences = [*_choice(outcome), *_certainty(outcome)]
    if is_planned(outcome):
        trials = "No trial was run: every figure is a prediction"
    else:
        resumed = f", {outcome.resumed} of them from an earlier search" if outcome.resumed else ""
        trials = f"{counted(outcome.num_trials + outcome.resumed, 'trial')}{resumed}"
    if outcome.unchecked:
        sentences.append(f"Not checked: {outcome.unchecked}. `atorch-ns verify` compares it with one process")
    sentences.append(f"{trials}, {seconds_text(outcome.seconds)} in all; {_ended(outcome)}")
    return tuple(sentence(text) for text in sentences if text)


def _choice(outcome: SearchOutcome) -> list[str]:
    winner, baseline = outcome.winner, outcome.baseline
    if winner is None:
        nearest = [f"Nearest: {outcome.nearest_miss}"] if outcome.nearest_miss else []
        number = len(outcome.rows)
        none = (
            "The only candidate cannot be used" if number == 1 else f"None of {number} candidates can be used"
        )
        return [none, *nearest]
    time, memory = seconds(winner), peak(winner)
    sentences = [
        f"Chosen: {winner.candidate.label}",
        f"One step takes {time.as_seconds()}; {_against(outcome, time)}",
        f"Peak memory {memory.as_bytes()} of {bytes_text(outcome.setting.memory_limit_bytes or None)} a rank",
    ]
    if winner.reason:
        sentences.append(f"Why: {winner.reason}")
    if baseline is winner and is_planned(outcome):
        sentences.append("The baseline itself is the best: nothing else is predicted to be better")
    elif baseline is winner:
        others = any(row.trial is not None for row in outcome.rows if row is not baseline)
        sentences.append(
            "The baseline itself is the best: nothing else that was tried is faster beyond the noise"
            if others
            else "Nothing but the baseline was tried"
        )
    return sentences


def _against(outcome: SearchOutcome, time: Figure) -> str:
    baseline = outcome.baseline
    if baseline is None or baseline is outcome.winner:
        return "it is the baseline" if baseline is not None else "there is no baseline to hold it against"
    other = seconds(baseline)
    if baseline.fate in ("failed", "pruned") or not other.value or not time.value:
        return f"the baseline {baseline.candidate.label} cannot be used: {baseline.reason}"
    times = compared_text(other.value / time.value, f"the baseline {baseline.candidate.label}")
    return f"{times} with {other.as_seconds()}"


def _certainty(outcome: SearchOutcome) -> list[str]:
    sentences = []
    if outcome.lower_bound_seconds is not None:
        bound = seconds_text(outcome.lower_bound_seconds)
        gap = (
            f": at most {percent_text(outcome.gap)} of the step is left to gain"
            if outcome.gap is not None
            else ""
        )
        sentences.append(f"No candidate is expected below {bound}{gap} (predicted)")
    if outcome.noise:
        sentences.append(f"The noise of a median step was {percent_text(outcome.noise)} (measured)")
    return sentences


def _ended(outcome: SearchOutcome) -> str:
    return outcome.stop_reason or "the search ended"
