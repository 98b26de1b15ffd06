"""Run of one trial on one rank: apply a strategy, warm up, watch one step closely, time the others.

The same code runs in a trial process and, for models that cannot be sent to one, in the user's own. All ranks
take the same path: what decides about it (times, losses) is the same on all of them.
"""

from __future__ import annotations

import contextlib
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

from atorch_ns.apply import apply_strategy
from atorch_ns.cluster import Cluster
from atorch_ns.cluster.memory_limit import lowered_limit
from atorch_ns.cluster.process_memory import LONG_RUN, MemoryGrowth, ProcessMemory, track_memory
from atorch_ns.engine.trial.failures import Failure, Interrupted, NonFiniteLoss, explain
from atorch_ns.engine.trial.report import CollectiveCount, RankReport, record_entries
from atorch_ns.errors import BackendError, InputError, RankError, StrategyError
from atorch_ns.estimate.memory.reserved import CONTEXT_BYTES
from atorch_ns.job import Inputs, Materialiser, Result, is_out_of_memory, limit_memory
from atorch_ns.job.memory_use import state_bytes
from atorch_ns.method import Registry, resolve
from atorch_ns.numerics.division import check_division
from atorch_ns.profile import Profile
from atorch_ns.search import StopRule, TrialOutcome, TrialStatus, TrialTask
from atorch_ns.strategy import MODEL_AXES, Strategy
from atorch_ns.text import bytes_text

Decision = Literal["go on", "enough", "worse"]


def decide(rule: StopRule, times: Sequence[float]) -> Decision:
    """Decides whether a trial goes on after the steps timed so far.

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
    # √(π/2) standard errors of the mean; outliers widen it, which the median absolute deviation ignores.
    error = 1.2533 * statistics.stdev(times) / math.sqrt(len(times))
    return _t_quantile((1 + confidence) / 2, len(times) - 1) * error


def _t_quantile(probability: float, freedom: int) -> float:
    if freedom == 1:  # exact, as for 2
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    # The expansion in the normal's quantile (Abramowitz and Stegun 26.7.5): good to 1% at the usual levels.
    z = statistics.NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


_SETTLING_STEPS: Final = 2  # the first makes the optimizer's states, after it DDP arranges its buckets anew
_NUM_BATCHES: Final = 4
_MOST_LEVEL_STEPS: Final = 64  # until memory is level; growth over further steps is predicted


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
    enforce_limit: bool = False,
    held_bytes: int = 0,
    begins_whole: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
    interrupt: Callable[[], Interrupted | None] = lambda: None,
    start: float | None = None,
) -> TrialRun:
    """Runs a task and changes the model. Every failure becomes a report. Collective.

    Args:
        inputs: the user's objects, for this trial alone. What is on meta is materialised.
        cluster: the cluster, with its process group, if it has one, already joined.
        task: the task to run.
        registry: the methods.
        memory_limit_bytes: a trial that needs more than this is "out of memory".
        enforce_limit: whether the system enforces the limit, so that the trial ends as training would.
        held_bytes: bytes that count towards the limit and that this process has taken before.
        begins_whole: whether weights are made before the strategy is applied, as in a user's whole model.
        on_phase: called with a short name when each phase begins.
        interrupt: polled between blocks of steps; an interruption on any rank ends the trial on all.
        start: when the task arrived (``time.monotonic``); ``None`` for now.
    """
    start = time.monotonic() if start is None else start
    enforced_bytes = memory_limit_bytes if enforce_limit else None
    # No allocator counts CUDA's context, which is there before the limit is.
    held_bytes += CONTEXT_BYTES if cluster.device_type == "cuda" else 0
    trial = _Trial(
        inputs, cluster, task, registry, on_phase, interrupt, start, enforced_bytes, held_bytes, begins_whole
    )
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
        report = replace(report, process_bytes=trial.process_bytes, while_applying=trial.applying)
        traceback.clear_frames(error.__traceback__)  # their locals hold the tensors of the failed step
    report = replace(
        report, setup_seconds=trial.setup_seconds, total_seconds=time.monotonic() - trial.started
    )
    return TrialRun(report, failure.secondary)


@dataclass
class _Trial:
    """A task under way on one rank; the fields are those of :func:`run_trial`."""

    inputs: Inputs
    cluster: Cluster
    task: TrialTask
    registry: Registry
    enter: Callable[[str], None]
    interrupt: Callable[[], Interrupted | None]
    started: float
    enforced_bytes: int | None  # the limit that the system is to enforce
    held_bytes: int  # counts towards the limit and is there before the trial begins
    begins_whole: bool  # whether a process that trains begins with the whole model
    applying: bool = True  # until the strategy is applied
    enforced: bool = False  # whether the system does enforce the limit
    process_bytes: int | None = None  # once the steps have ended or failed
    setup_seconds: float = 0.0  # from the start to the first timed step

    def probe(self, report: RankReport) -> RankReport:
        """The report with the comparison of numerics."""
        from atorch_ns.numerics.probe import probe

        self.enter("comparing with one process")
        comparison = probe(self.inputs, self.cluster, Strategy(self.task.steps), self.registry)
        status: TrialStatus = "ok" if comparison.passed else "wrong" if comparison.ran else "refused"
        return replace(report, status=status, reason=comparison.text)

    def measure(self, report: RankReport) -> RankReport:
        """The report with the measurements."""
        device = torch.device(self.cluster.device)
        collectives = CollectiveCount()
        with track_memory(device) as memory:
            # A record takes memory itself: the process is measured, and held to the limit, without one.
            memory.pause()
            with self._memory_limit(device):
                ran = self._run_steps(device)
                # The steps that are watched come last, so that no other one pays for it.
                self.enter("the step whose collectives are counted")
                with collectives:
                    _finite_loss(ran.result.train_step(next(ran.batches)), ran.growth.num_steps + 1)
                further_bytes = ran.growth.further(collectives if device.type == "cpu" else None)
                if self.enforced and ran.verdict == "enough":
                    self._run_with_less(ran, further_bytes, device)
            self.enter("the step whose tensors are counted")
            memory.resume()
            _finite_loss(ran.result.train_step(next(ran.batches)), ran.growth.num_steps + 1)
            peak, states = memory.peak_bytes, state_bytes(ran.result).total
        return replace(
            report,
            status="stopped early" if ran.verdict == "worse" else "ok",
            step_seconds=tuple(ran.seconds),
            peak_bytes=peak,
            process_bytes=ran.process_bytes,
            further_bytes=further_bytes,
            state_bytes=states,
            collectives=collectives.totals,
            enforced=self.enforced,
            loss=ran.loss,
        )

    @contextlib.contextmanager
    def _memory_limit(self, device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.enforced_bytes is not None:
                try:
                    stack.enter_context(limit_memory(self.enforced_bytes, device, held_bytes=self.held_bytes))
                    self.enforced = True
                except BackendError:
                    traceback.print_exc()  # the measurement is held to the limit in any case
            yield

    def _run_with_less(self, ran: _Steps, further_bytes: int, device: torch.device) -> None:
        # A measurement misses memory that is not touched, which a limit counts.
        (further,) = _max_over_ranks([float(further_bytes)], self.cluster)
        self.enter(f"steps with {bytes_text(further)} less, which a long run adds")
        try:
            with lowered_limit(int(further), device):
                for _ in range(_SETTLING_STEPS):
                    ran.result.train_step(next(ran.batches))
        except Exception as error:
            if isinstance(error, RankError) or not is_out_of_memory(error, is_limited=True):
                raise
            raise MemoryError(  # begins as those of limit_memory, which lets it pass
                f"out of memory: a run of {LONG_RUN:,} steps is expected to add {bytes_text(further)}, but with that much less "
                "memory a step does not fit"
            ) from error

    def _run_steps(self, device: torch.device) -> _Steps:
        process = ProcessMemory(device)
        try:
            result = self._apply_strategy()
            process.peak_bytes()  # that of applying, before steps start threads
            batches = _cycle_batches(result)
            num_warmup = max(_SETTLING_STEPS, self.task.rule.warmup_steps)
            growth = _GrowthOverSteps(process)
            for step in range(1, num_warmup + 1):
                self.enter(f"warm-up step {step}")
                _finite_loss(result.train_step(next(batches)), step)
                growth.step()
            gc.collect()  # garbage so far would be collected in a timed step
            self.setup_seconds = time.monotonic() - self.started
            seconds, verdict, loss = self._time_steps(result, batches, growth)
            if verdict == "enough" and self.enforced_bytes is not None:
                self._until_level(result, batches, growth, statistics.median(seconds))
        finally:
            self.process_bytes = process.peak_bytes()
            if self.process_bytes is not None:
                self.process_bytes += self.held_bytes
        return _Steps(result, batches, growth, seconds, verdict, loss, self.process_bytes)

    def _until_level(
        self, result: Result, batches: Iterator[Any], growth: _GrowthOverSteps, step_seconds: float
    ) -> None:
        # A strategy that may win must hold the limit for long, so steps go on until memory is level. They may
        # take half of the trial's time, so that no trial is late because of them.
        while growth.num_steps < _MOST_LEVEL_STEPS:
            self.enter(f"step {growth.num_steps + 1}, until memory is level")
            number = growth.num_steps  # a doubling
            ready_s = time.monotonic() - self.started + number * step_seconds
            interruption = self.interrupt()
            rising, late, is_interrupted = _max_over_ranks(
                [
                    float(not growth.is_level),
                    float(ready_s > self.task.deadline_s / 2),
                    float(interruption is not None),
                ],
                self.cluster,
            )
            if is_interrupted:
                raise interruption or Interrupted("cancelled", "another rank ended the trial")
            if not rising or late:
                return
            for _ in range(number):
                _finite_loss(result.train_step(next(batches)), growth.num_steps + 1)
                growth.step()

    def _apply_strategy(self) -> Result:
        if self.begins_whole:
            self.enter("building the model")
            device = torch.device(self.cluster.device)
            Materialiser(self.inputs.model, device, seed=0).materialise([self.inputs.model])
        self.enter("applying the strategy")
        profile = Profile.of(self.inputs.model)
        resolution = resolve(Strategy(self.task.steps), self.cluster, self.registry, profile=profile)
        if self.begins_whole and any(resolution.plan.size(axis) > 1 for axis in MODEL_AXES):
            # A job that is given this strategy makes this comparison, within the same limit.
            check_division(self.inputs, self.cluster, resolution, self.registry)
        result = apply_strategy(self.inputs, self.cluster, resolution)
        for axis, (method, reason) in result.job.idle_axes.items():
            refusal = StrategyError(f"the axis {axis} divides nothing of this model: {reason}")
            refusal.refused_by = method
            raise refusal
        if result.dataloader is None:
            raise InputError("a trial needs a dataset to train on.")
        self.applying = False
        return result

    def _time_steps(
        self, result: Result, batches: Iterator[Any], growth: _GrowthOverSteps
    ) -> tuple[list[float], Decision, float]:
        rule = self.task.rule
        times: list[float] = []
        verdict: Decision = "go on"
        while verdict == "go on":
            self.enter(f"timed step {len(times) + 1}")
            _max_over_ranks([0.0], self.cluster)  # a barrier: all ranks begin the block together
            block = []
            for _ in range(max(1, min(rule.block_steps, rule.max_steps - len(times)))):
                batch = next(batches)
                start = time.perf_counter()
                loss = result.train_step(batch)
                if self.cluster.device_type == "cuda":
                    torch.cuda.synchronize()  # train_step returns while its kernels run
                block.append(time.perf_counter() - start)
            interruption = self.interrupt()
            *block, is_interrupted = _max_over_ranks([*block, float(interruption is not None)], self.cluster)
            if is_interrupted:
                raise interruption or Interrupted("cancelled", "another rank ended the trial")
            times += block
            growth.step(len(block))
            value = _finite_loss(loss, growth.num_steps)  # once a block, outside of the timed steps
            verdict = decide(rule, times)
        return times, verdict, value


@dataclass(frozen=True)
class _Steps:
    """Results of a trial's steps, and the state for further steps."""

    result: Result
    batches: Iterator[Any]
    growth: _GrowthOverSteps
    seconds: list[float]
    verdict: Decision
    loss: float
    process_bytes: int | None


class _GrowthOverSteps:
    """Growth of this process over the steps of a trial."""

    def __init__(self, process: ProcessMemory) -> None:
        self.num_steps = 0
        self._process = process
        self._growth = MemoryGrowth()

    def step(self, number: int = 1) -> None:
        """Notes that ``number`` further steps were run."""
        self.num_steps += number
        peak = self._process.peak_bytes()
        if peak is not None:
            self._growth.add(self.num_steps, peak)

    @property
    def is_level(self) -> bool:
        """True if growth has ended or cannot be measured."""
        return not self._growth.num_steps or self._growth.is_level

    def further(self, collectives: CollectiveCount | None) -> int:
        """Bytes that a long run is expected to add.

        ``collectives`` are those of a step, if torch's recorder keeps them in the measured memory. It fills
        by a few entries a step, more slowly than a trial can see.
        """
        growth = self._growth.until(LONG_RUN)
        if collectives is None or not collectives.totals:
            return growth
        calls, entries = sum(number for number, _ in collectives.totals.values()), record_entries()
        remaining_entries = min(entries, LONG_RUN * calls) - min(entries, self.num_steps * calls)
        return growth + remaining_entries * collectives.record_bytes // calls


def _cycle_batches(result: Result) -> Iterator[Any]:
    assert result.dataloader is not None
    batches: list[Any] = []
    loader = iter(result.dataloader)
    for batch in itertools.islice(loader, _NUM_BATCHES):
        batches.append(batch)
        yield batch  # before the next is loaded: the first steps hold no batches of later ones
    del loader
    if not batches:
        raise InputError("the data loader yields no batch: the dataset is smaller than one global batch.")
    yield from itertools.cycle(batches)


def _finite_loss(loss: torch.Tensor, step: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteLoss(f"the loss is {value} in step {step}")
    return value


def _max_over_ranks(values: Sequence[float], cluster: Cluster) -> list[float]:
    # As values, which go by gloo where the group has it: NCCL takes no tensor of the CPU, and takes memory.
    return [max(column) for column in zip(*cluster.gathered(values), strict=True)]


def _held_to(limit: int | None, report: RankReport) -> RankReport:
    process, further, tensors = report.process_bytes, report.further_bytes, report.peak_bytes
    # A process that had kept memory free grows by less than its tensors take.
    needed_bytes = max(0 if process is None else process + further, tensors or 0)
    if limit is None or needed_bytes <= limit:
        return report
    what = f"a step holds {bytes_text(needed_bytes)} at its peak"
    if process is not None and process + further > limit:
        part = "" if tensors is None else f" ({bytes_text(tensors)} of it tensors)"
        what = f"its process grew by {bytes_text(process)}{part}"
        if process <= limit:
            what += f" and is expected to grow by {bytes_text(further)} more in {LONG_RUN:,} steps"
    return replace(
        report,
        status="out of memory",
        reason=f"{what}, {bytes_text(needed_bytes - limit)} more than the limit of {bytes_text(limit)}",
    )
