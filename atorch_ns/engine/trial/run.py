"""Run of one trial on one rank: apply a strategy, warm up, watch one step closely, time the others.

The same code runs in a trial process and, for models that cannot be sent to one, in the user's own. All ranks
take the same path: what decides about it (times, losses) is the same on all of them.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from atorch_ns.apply import apply_strategy
from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.failures import Failure, Interrupted, NonFiniteLoss, explain
from atorch_ns.engine.trial.report import CollectiveCount, RankReport
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Result
from atorch_ns.job.memory_use import state_bytes, track_memory
from atorch_ns.method import Registry, resolve
from atorch_ns.profile import Profile
from atorch_ns.search import StopRule, TrialOutcome, TrialStatus, TrialTask
from atorch_ns.strategy import Strategy
from atorch_ns.text import bytes_text

Decision = Literal["go on", "enough", "worse"]


def decide(rule: StopRule, times: Sequence[float]) -> Decision:
    """Whether a trial goes on after the steps timed so far.

    Args:
        rule: how long it runs.
        times: seconds of each timed step, the maximum over ranks; the same on every rank.

    Returns:
        ``"worse"`` once the interval of the median lies wholly above that of the best trial; ``"enough"``
        once the median is known precisely enough, or steps or time are used up.
    """
    if len(times) >= 2 and rule.best_seconds is not None:
        normal = statistics.NormalDist().inv_cdf((1 + rule.confidence) / 2)
        best = rule.best_seconds + normal * rule.best_noise
        # The deviation of a few times is often small by chance; the larger of two measures seldom is.
        spread = max(half_width(times, rule.confidence), _mean_half_width(times, rule.confidence))
        if statistics.median(times) - spread > best:
            return "worse"
    if len(times) >= rule.max_steps or (times and sum(times) >= rule.max_seconds):
        return "enough"
    precise = rule.precision * statistics.median(times) if times else 0.0
    if len(times) >= max(rule.min_steps, 2) and half_width(times, rule.confidence) <= precise:
        return "enough"
    return "go on"


def half_width(times: Sequence[float], confidence: float) -> float:
    """Half the width of the median's interval, in seconds: Student's t times its standard error."""
    error = TrialOutcome(status="ok", step_seconds=tuple(times)).noise_seconds
    return _t_quantile((1 + confidence) / 2, len(times) - 1) * error


def _mean_half_width(times: Sequence[float], confidence: float) -> float:
    """The same from the standard deviation, which outliers widen."""
    error = 1.2533 * statistics.stdev(times) / math.sqrt(len(times))
    return _t_quantile((1 + confidence) / 2, len(times) - 1) * error


def _t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else the expansion in the normal's
    (Abramowitz and Stegun 26.7.5), good to 1% from 3 degrees on at the usual levels."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = statistics.NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


_SETTLING_STEPS: Final = 2
"""The first step makes the optimizer's states, and after it DDP arranges its buckets anew."""
_NUM_BATCHES: Final = 4


@dataclass(frozen=True)
class TrialRun:
    """The report of one rank, and whether another rank is to blame for its failure."""

    report: RankReport
    secondary: bool = False


def run_trial(
    inputs: Inputs,
    cluster: Cluster,
    task: TrialTask,
    registry: Registry,
    *,
    memory_limit_bytes: int | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    interrupt: Callable[[], Interrupted | None] = lambda: None,
    started: float | None = None,
) -> TrialRun:
    """Runs a task; collective. Changes the model; every failure becomes a report.

    Args:
        inputs: the user's objects, for this trial alone. What is on meta is materialised.
        cluster: the cluster, with its process group, if it has one, already joined.
        task: the task to run.
        registry: the methods.
        memory_limit_bytes: a peak above this is "out of memory".
        on_phase: called with a short name when each phase begins.
        interrupt: polled between blocks of steps; what it returns on any rank ends the trial on all.
        started: when the task arrived (``time.monotonic``); ``None`` for now.
    """
    started = time.monotonic() if started is None else started
    trial = _Trial(inputs, cluster, task, registry, on_phase, interrupt, started)
    report = RankReport(task_id=task.id, rank=cluster.rank, status="ok")
    failure = Failure("ok", "")
    try:
        if task.kind == "probe":
            report = trial.probe(report)
        else:
            report = _held_to(memory_limit_bytes, trial.measure(report))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: the report is the only way out of a trial
        traceback.print_exc()
        failure = explain(error, applying=trial.applying)
        report = replace(report, status=failure.status, reason=failure.reason, refused_by=failure.refused_by)
        traceback.clear_frames(error.__traceback__)
    report = replace(
        report, setup_seconds=trial.setup_seconds, total_seconds=time.monotonic() - trial.started
    )
    return TrialRun(report, failure.secondary)


@dataclass
class _Trial:
    """A task under way on one rank; the fields are those of :func:`run_trial`.

    Attributes:
        applying: whether the strategy is still being applied.
        setup_seconds: time to the first timed step; 0 before it.
    """

    inputs: Inputs
    cluster: Cluster
    task: TrialTask
    registry: Registry
    enter: Callable[[str], None]
    interrupt: Callable[[], Interrupted | None]
    started: float
    applying: bool = True
    setup_seconds: float = 0.0

    def probe(self, report: RankReport) -> RankReport:
        """The report with the comparison of numerics."""
        from atorch_ns.numerics.probe import probe

        self.enter("comparing with one process")
        found = probe(self.inputs, self.cluster, Strategy(self.task.steps), self.registry)
        status: TrialStatus = "ok" if found.passed else "wrong" if found.ran else "refused"
        return replace(report, status=status, reason=found.text)

    def measure(self, report: RankReport) -> RankReport:
        """The report with the measurements."""
        device = torch.device(self.cluster.device)
        executed = CollectiveCount()
        num_warmup = max(_SETTLING_STEPS, self.task.rule.warmup_steps)
        with track_memory(device) as memory:
            result = self._apply()
            batches = _cycle(result)
            for step in range(1, num_warmup + 1):
                self.enter(f"warm-up step {step}")
                _checked(result.train_step(next(batches)), step)
            self.enter("the step that is watched")
            memory.reset_peak()
            with executed:
                _checked(result.train_step(next(batches)), num_warmup + 1)
            peak, states = memory.peak_bytes, state_bytes(result).total
        gc.collect()
        self.setup_seconds = time.monotonic() - self.started
        times, verdict, loss = self._timed(result, batches, num_warmup + 1)
        return replace(
            report,
            status="stopped early" if verdict == "worse" else "ok",
            step_seconds=tuple(times),
            peak_bytes=max(peak, memory.peak_bytes) if device.type == "cuda" else peak,
            state_bytes=states,
            collectives=executed.found,
            loss=loss,
        )

    def _apply(self) -> Result:
        self.enter("applying the strategy")
        profile = Profile.of(self.inputs.model)
        resolved = resolve(Strategy(self.task.steps), self.cluster, self.registry, profile=profile)
        result = apply_strategy(self.inputs, self.cluster, resolved)
        if result.dataloader is None:
            raise InputError("a trial needs a dataset to train on.")
        self.applying = False
        return result

    def _timed(
        self, result: Result, batches: Iterator[Any], num_done: int
    ) -> tuple[list[float], Decision, float]:
        """Seconds of each step, in blocks that all ranks begin together, until the rule is satisfied."""
        rule = self.task.rule
        times: list[float] = []
        verdict: Decision = "go on"
        while verdict == "go on":
            self.enter(f"timed step {len(times) + 1}")
            _largest([0.0], self.cluster)
            block = []
            for _ in range(max(1, min(rule.block_steps, rule.max_steps - len(times)))):
                batch = next(batches)
                begun = time.perf_counter()
                loss = result.train_step(batch)
                if self.cluster.device_type == "cuda":
                    torch.cuda.synchronize()
                block.append(time.perf_counter() - begun)
            interruption = self.interrupt()
            *block, interrupted = _largest([*block, float(interruption is not None)], self.cluster)
            if interrupted:
                raise interruption or Interrupted("cancelled", "another rank ended the trial")
            times += block
            value = _checked(loss, num_done + len(times))
            verdict = decide(rule, times)
        return times, verdict, value


def _cycle(result: Result) -> Iterator[Any]:
    """The loader's first few batches, over and over; at most one that is not in use is held at first."""
    assert result.dataloader is not None
    held: list[Any] = []
    loader = iter(result.dataloader)
    for batch in itertools.islice(loader, _NUM_BATCHES):
        held.append(batch)
        yield batch
    del loader
    if not held:
        raise InputError("the data loader gives no batch: the dataset is smaller than one global batch.")
    yield from itertools.cycle(held)


def _checked(loss: torch.Tensor, step: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteLoss(f"the loss is {value} in step {step}")
    return value


def _largest(values: Sequence[float], cluster: Cluster) -> list[float]:
    """The maximum over ranks of each value; a barrier, too."""
    if not cluster.distributed:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    found: list[float] = tensor.tolist()
    return found


def _held_to(limit: int | None, report: RankReport) -> RankReport:
    if limit is None or report.peak_bytes is None or report.peak_bytes <= limit:
        return report
    over = report.peak_bytes - limit
    return replace(
        report,
        status="out of memory",
        reason=f"a step holds {bytes_text(report.peak_bytes)} at its peak, {bytes_text(over)} more than the limit of "
        f"{bytes_text(limit)}",
    )
