"""Numerics probe: a small model trained under a strategy and in one process, compared parameter by parameter.

It is trained for two steps on a few samples, under the strategy on all ranks, and by plain torch in one
process. Parameters are compared, since a lost gradient hides in the loss. The measure is, for each of them,

    error = (max|p - p_ref| - rounding) / max|p_ref - p_initial|

A gradient that is lost, summed instead of averaged over two ranks, or not reduced at all, gives about 1.
The step of SGD with momentum is linear in the gradient. Adam's is nearly its sign, which hides a wrong scale.

**Tolerance.** In full precision 2e-4 (:mod:`atorch_ns.numerics.verdict`). In reduced precision the reference
stays in full precision, and plain torch in one process runs once more with weights and inputs in bfloat16.
Four times its error, by parameter, and 0.05 is allowed. A parameter that rounding alone moves by a quarter of
its update (the bias of a key, whose gradient is zero but for rounding) is not judged.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace

import torch

from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.errors import StepError
from atorch_ns.job import Inputs
from atorch_ns.method import Registry
from atorch_ns.numerics.reference import measure
from atorch_ns.numerics.run import StrategyRun, run_strategy
from atorch_ns.numerics.setup import Prepared, parts_reason, prepare, reference_in
from atorch_ns.numerics.verdict import TOLERANCE, judge
from atorch_ns.strategy import Strategy
from atorch_ns.text import error_text


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Result of a probe; the same on every rank, but for the time.

    Attributes:
        passed: whether the strategy trains as one process does. False also where the probe could not run.
        ran: whether there was anything to compare; a strategy that raises has not been compared.
        loss_error: the largest difference of a step's loss.
        worst_parameter: parameter with the largest error, in units of its tolerance.
        worst_error, tolerance: error and tolerance of that parameter, in units of its update.
        num_judged, num_parameters: parameters that were compared, and all.
        seconds: wall time.
        reason: why it failed or did not run; empty if it passed.
        caution: reason why a pass may still differ from one process with whole batches; empty without one.
        notes: parts that could not be compared, as sentences.
    """

    passed: bool
    ran: bool = True
    loss_error: float = 0.0
    worst_parameter: str = ""
    worst_error: float = 0.0
    tolerance: float = TOLERANCE
    num_judged: int = 0
    num_parameters: int = 0
    seconds: float = 0.0
    reason: str = ""
    caution: str = ""
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The result in a few words with its numbers."""
        if not self.ran:
            return self.reason
        worst = f"{self.worst_parameter} is off by {self.worst_error:.1e} of its update"
        summary = f"{worst} ({self.tolerance:.1e} allowed); {self.num_judged} of {self.num_parameters} parameters judged"
        parts = (self.reason, summary if self.worst_parameter else "", self.caution, *self.notes)
        return "; ".join(part for part in parts if part)


def probe(
    inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry, *, shallow: bool = True
) -> ProbeResult:
    """Trains a small model under ``strategy`` and in one process, and compares. Collective.

    The caller's model and random states are not changed. Failures of the strategy are not raised.

    Args:
        inputs: the user's model, data and loss; the model may be on meta.
        cluster: the cluster, with its process group up if it is distributed.
        strategy, registry: the strategy to check, and the methods.
        shallow: keeps two blocks of the first kind and one of each other, or all if it fails with fewer.
    """
    begin = time.perf_counter()
    with random_states_kept(torch.device(cluster.device)):
        result = cluster.from_first(_run_probe(inputs, cluster, strategy, registry, shallow=shallow))
    if result.caution and cluster.rank == 0:
        warnings.warn(result.caution, stacklevel=2)
    return replace(result, seconds=time.perf_counter() - begin)


def _run_probe(
    inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry, *, shallow: bool
) -> ProbeResult:
    setup = prepare_small(inputs, cluster, strategy, registry, shallow=shallow)
    if isinstance(setup, str):
        return ProbeResult(passed=False, ran=False, reason=setup)
    try:
        run = cluster.agree(lambda: run_small(setup, cluster), what="the numerics probe")
    except StepError as error:  # no step with finite gradients
        return ProbeResult(passed=False, reason=str(error))
    except Exception as error:
        return ProbeResult(passed=False, ran=False, reason=error_text(error))
    result = judge_run(setup, inputs, cluster, run)
    if not result.passed:
        return result
    caution, notes = cluster.on_first(lambda: parts_reason(setup, inputs, cluster), what="judging the loss")
    return replace(result, caution=f"but {caution}" if caution else "", notes=notes)


def prepare_small(
    inputs: Inputs,
    cluster: Cluster,
    strategy: Strategy,
    registry: Registry,
    *,
    shallow: bool = True,
    rows: int = 2,
) -> Prepared | str:
    """The small job with its reference, or why there is none; with all blocks if few fail. Collective."""
    refusals: list[str] = []
    for few in (True, False) if shallow else (False,):
        try:
            return prepare(inputs, cluster, strategy, registry, shallow=few, rows=rows)
        except Exception as error:
            refusals.append(error_text(error))
    return "; with all blocks: ".join(dict.fromkeys(refusals))


def run_small(setup: Prepared, cluster: Cluster) -> StrategyRun:
    """Trains the small job under its strategy. Collective."""
    rate, training = setup.learning_rate, setup.training
    return run_strategy(
        setup.inputs, cluster, setup.resolved, setup.batches, learning_rate=rate, training=training
    )


def judge_run(setup: Prepared, inputs: Inputs, cluster: Cluster, run: StrategyRun) -> ProbeResult:
    """Compares every parameter with its tolerance. Collective."""
    return cluster.on_first(
        lambda: _judge_parameters(setup, inputs, cluster, run), what="judging a run in small"
    )


def _judge_parameters(setup: Prepared, inputs: Inputs, cluster: Cluster, run: StrategyRun) -> ProbeResult:
    reference, noise = setup.reference, setup.noise
    if run.num_micro_batches != setup.num_micro_batches:  # a method chose another number
        reference = reference_in(run.num_micro_batches, setup, inputs, cluster)
    assert reference is not None
    deviation = measure(reference, run.last, run.losses)
    rows, _, reasons = judge(
        deviation, deviation, first_noise=noise, last_noise=noise, differing=run.differing
    )
    judged_rows = [row for row in rows if row.state != "not judged"]
    worst = max(judged_rows, key=lambda row: row.excess, default=None)
    return ProbeResult(
        passed=not reasons,
        loss_error=deviation.loss_error,
        worst_parameter="" if worst is None else worst.name,
        worst_error=0.0 if worst is None else worst.parameter_error,
        tolerance=TOLERANCE if worst is None else worst.parameter_tolerance,
        num_judged=len(judged_rows),
        num_parameters=len(reference.final),
        reason="; ".join(reasons),
    )
