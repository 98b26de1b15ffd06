"""One GPU: step time against the recipe by hand, fp8 over bf16, the search's choice, and peaks as predicted."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.search import Row, SearchOutcome
from benchmarks._gpu_recipes import ADAMW, Setting, Step, bf16_by_hand, bf16_with_liger, fp8_by_hand, ours
from benchmarks._llama import TINY, Llama, next_token_loss, random_batch
from benchmarks._results import Column, Findings, Spread

__all__ = [
    "CHOICE_LIMIT",
    "MEMORY_LIMIT",
    "STEP_LIMIT",
    "choice_row",
    "measured_pair",
    "memory_row",
    "prediction_rows",
    "run",
]

ONE_BILLION = Llama(vocab_size=32000, width=2048, hidden=5632, num_layers=22, num_heads=16)
STEP_LIMIT = 1.02
"""The most that a step may take, over the same recipe by hand."""
CHOICE_LIMIT = 1.03
"""The most that the chosen strategy's step may take, over the best of all that were measured."""
MEMORY_LIMIT = 0.05
"""No prediction of a trial's peak is further off."""

_TEXT = f"""
A Llama with 1.1 billion parameters on one GPU. Each comparison runs its two sides in turns in one process, first one
first, then the other, and holds the median of the ratios of neighbours, with its 95 % confidence interval. Steps are
timed by CUDA events.

- *step*: `["fsdp", amp_native bf16, "module_replace", "compile"]` over the same by hand; at most {STEP_LIMIT}.
- *fp8*: with the method `fp8` over the bf16 strategy, and torchao's own conversion over the recipe by hand.
- *Liger's modules, compiled*: the recipe by hand with liger-kernel's normalisations and MLPs in its compiled blocks, over
  that without: why compiled blocks run torch's operators.
- *choice*: the step of the strategy that a search of 90 seconds chose over the best of all candidates that it tried; at
  most {CHOICE_LIMIT}. Below it each of its trials' predicted step over the measured one.
- *memory*: the largest relative error of the predicted peak against `max_memory_allocated`, over the search's trials;
  at most {MEMORY_LIMIT}.
"""
_COLUMNS = (
    Column(title="comparison", key="name"),
    Column(title="n", key="n"),
    Column(title="one side, ms (p25..p75)", key="ours_ms", digits=1),
    Column(title="other side, ms (p25..p75)", key="theirs_ms", digits=1),
    Column(title="ratio", key="ratio", confidence=True),
    Column(title="worst error", key="error"),
    Column(title="holds", key="holds"),
)
BF16 = ("amp_native", "bf16")


def run(*, quick: bool, report: Callable[[str], object]) -> Findings | None:
    """Measures on the first GPU; ``None`` where there is none.

    Args:
        quick: a tiny model and few repetitions.
        report: told what is being done.
    """
    if not torch.cuda.is_available():
        report("gpu: no GPU, so nothing is measured")
        return None
    setting = Setting(model=TINY if quick else ONE_BILLION, batch_size=4, num_tokens=256 if quick else 2048)
    outcome = _searched(setting, time_limit=60 if quick else 90, report=report)
    with one_rank("cuda"):
        larger = replace(setting, batch_size=2 * setting.batch_size)  # the device is busy, not the process
        rows = compared(larger, rounds=4 if quick else 6, report=report)
    rows += [choice_row(outcome), memory_row(outcome), *prediction_rows(outcome)]
    return Findings(
        name="gpu",
        title="One GPU",
        text=_TEXT,
        columns=_COLUMNS,
        rows=rows,
        settings={
            "model": setting.model.describe(),
            "batch": f"{setting.batch_size} samples of {setting.num_tokens} tokens in the search, else twice as many",
            "device": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
        },
    )


def compared(setting: Setting, *, rounds: int, report: Callable[[str], object]) -> list[dict[str, Any]]:
    """The comparisons of step times."""
    bf16 = ["fsdp", BF16, "module_replace", setting.compile]
    fp8 = ["fsdp", BF16, "module_replace", ("fp8", {"backend": "torchao"}), setting.compile]
    pairs: list[tuple[str, Callable[[], Step], Callable[[], Step], float | None]] = [
        ("step", lambda: ours(setting, bf16), lambda: bf16_by_hand(setting), STEP_LIMIT),
        ("fp8 over bf16, by this package", lambda: ours(setting, fp8), lambda: ours(setting, bf16), None),
        ("fp8 over bf16, by hand", lambda: fp8_by_hand(setting), lambda: bf16_by_hand(setting), None),
        ("fp8, over torchao by hand", lambda: ours(setting, fp8), lambda: fp8_by_hand(setting), None),
        ("Liger's modules, compiled", lambda: bf16_with_liger(setting), lambda: bf16_by_hand(setting), None),
    ]
    rows = []
    for name, one, other, limit in pairs:
        report(f"gpu: {name}")
        try:
            rows.append(measured_pair(name, one(), other(), setting.device, rounds=rounds, limit=limit))
        except (
            RuntimeError,
            ImportError,
            ValueError,
        ) as error:  # a GPU without fp8, a package that is not there
            rows.append({"name": f"{name}: not measured, {str(error).splitlines()[0][:120]}"})
        gc.collect()
        torch.compiler.reset()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def measured_pair(
    name: str, one: Step, other: Step, device: str, *, rounds: int, limit: float | None
) -> dict[str, Any]:
    """Both sides in turns, three steps a turn, after three steps of each that do not count."""
    for step in (one, other):
        _milliseconds(step, 3, device)
    times: dict[Step, list[float]] = {one: [], other: []}
    for number in range(rounds):
        for step in (one, other) if number % 2 == 0 else (other, one):
            times[step].append(_milliseconds(step, 3, device))
    ratio = Spread.of(mine / theirs for mine, theirs in zip(times[one], times[other], strict=True))
    return {
        "name": name,
        "n": rounds,
        "ours_ms": Spread.of(times[one]),
        "theirs_ms": Spread.of(times[other]),
        "ratio": ratio,
        **({} if limit is None else {"holds": ratio.median <= limit, "asked": f"≤ {limit}"}),
    }


def _milliseconds(step: Step, count: int, device: str) -> float:
    """Of one step, over ``count`` of them."""
    if device != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            step()
        return 1e3 * (time.perf_counter() - began) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def choice_row(outcome: SearchOutcome) -> dict[str, Any]:
    """The chosen strategy's step over the best that any trial measured."""
    seconds = {
        row.candidate.key: row.trial.median_seconds for row in _tried(outcome) if row.trial is not None
    }
    assert outcome.winner is not None
    chosen, best = seconds[outcome.winner.candidate.key], min(seconds.values())
    return {
        "name": f"choice: {outcome.winner.candidate.strategy}",
        "n": len(seconds),
        "ratio": chosen / best,
        "holds": chosen / best <= CHOICE_LIMIT,
        "asked": f"≤ {CHOICE_LIMIT}",
    }


def memory_row(outcome: SearchOutcome) -> dict[str, Any]:
    """The worst of all predictions of trials' peaks; their median stands in the name."""
    errors = [
        _error(row)
        for row in _tried(outcome)
        if row.trial is not None and row.trial.peak_bytes and row.candidate.estimate is not None
    ]
    worst = max(errors, key=abs, default=0.0)
    return {
        "name": f"memory (median of the sizes of errors {statistics.median(map(abs, errors or [0.0])):.2%})",
        "n": len(errors),
        "error": worst,
        "holds": abs(worst) <= MEMORY_LIMIT,
        "asked": f"within {MEMORY_LIMIT}",
    }


def _error(row: Row) -> float:
    """Of the predicted peak of tensors."""
    assert row.trial is not None
    assert row.candidate.estimate is not None
    return row.candidate.estimate.allocated_bytes / max(row.trial.peak_bytes) - 1


def prediction_rows(outcome: SearchOutcome) -> list[dict[str, Any]]:
    """Each trial's predicted step, made before any trial, over the measured one, and the error of its predicted peak."""
    return [
        {
            "name": f"predicted over measured step: {row.candidate.strategy}",
            "n": len(row.trial.step_seconds),
            "ratio": row.candidate.estimate.step_seconds / row.trial.median_seconds,
            **({"error": _error(row)} if row.trial.peak_bytes else {}),
        }
        for row in _tried(outcome)
        if row.trial is not None and row.candidate.estimate is not None
    ]


def _tried(outcome: SearchOutcome) -> Sequence[Row]:
    return [row for row in outcome.rows if row.trial is not None and row.trial.succeeded]


def _searched(setting: Setting, *, time_limit: float, report: Callable[[str], object]) -> SearchOutcome:
    """A search that has the time to try every candidate, before this process has used CUDA."""
    from atorch_ns import auto_accelerate

    report("gpu: a search with all candidates tried")
    model, tokens = setting.model, setting.num_tokens
    data = random_batch(model, 64 * setting.batch_size, tokens, seed=1)["input_ids"]
    _, result, _ = auto_accelerate(
        model.build(),
        torch.optim.AdamW,
        [{"input_ids": row} for row in data],
        next_token_loss,
        model_input_format="unpack_dict",
        optim_args=ADAMW,
        dataloader_args={"batch_size": setting.batch_size},
        time_limit=time_limit,
    )
    assert result is not None
    outcome = result.report.search
    assert outcome is not None
    return outcome


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
