"""A numerics probe: does a strategy train the same model as one process does?

A small model of the same structure is trained for two steps on a few samples, under the strategy on all
ranks, and by plain torch in one process. Every parameter is compared, not the loss: a lost gradient hides in
the loss. The measure is, for every parameter,

    error = (max|p - p_ref| - rounding) / max|p_ref - p_initial|

the largest difference in units of the largest update. A gradient that is lost gives 1, one that is summed
instead of averaged over two ranks 1, one that is not reduced at all about 1. The optimizer is SGD with
momentum: its step is linear in the gradient, where Adam's is nearly the gradient's sign and would hide a
wrong scale.

**Tolerance.** In full precision :data:`TOLERANCE`, 2e-4. In reduced precision the reference stays in full
precision, and plain torch in one process runs once more with weights and inputs in bfloat16: four times its
error, parameter by parameter, and 0.05 is allowed. What rounding alone moves by a quarter of its update (the
bias of a key, whose gradient is zero but for rounding) can show nothing, and is not judged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from atorch_ns.cluster import Cluster, agree
from atorch_ns.engine._probe_reference import Deviation, Reference, measure
from atorch_ns.engine._probe_run import StrategyRun, run_strategy
from atorch_ns.engine._probe_setup import prepare
from atorch_ns.engine._sampling import kept_random_state
from atorch_ns.errors import StepError
from atorch_ns.job import Inputs
from atorch_ns.method import Registry
from atorch_ns.strategy import Strategy

__all__ = ["TOLERANCE", "ProbeResult", "probe"]

TOLERANCE: Final = 2e-4
"""Of a parameter's update, in full precision. Rounding alone gives up to 2e-5."""
REDUCED_TOLERANCE: Final = 0.05
NOISE_FACTOR: Final = 4.0
UNJUDGED: Final = 0.25
"""Parameters whose update plain reduced precision changes by more than this show nothing."""
LOSS_TOLERANCE: Final = 1e-4
REDUCED_LOSS_TOLERANCE: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe found; the same on every rank, but for the time.

    Attributes:
        passed: whether the strategy trains as one process does. False also where the probe could not run.
        ran: whether there was anything to compare; a strategy that raises has not been compared.
        loss_error: the largest difference of a step's loss.
        worst_parameter: the parameter that is furthest from what it should be, in units of its tolerance.
        worst_error: its error, in units of its update.
        tolerance: its tolerance.
        num_judged, num_parameters: parameters that were compared, and all.
        seconds: of wall time.
        reason: why it failed or did not run; empty if it passed.
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

    @property
    def text(self) -> str:
        """What was found, in a few words with its numbers."""
        if not self.ran:
            return self.reason
        worst = (
            f"{self.worst_parameter} is off by {self.worst_error:.1e} of its update"
            if self.worst_parameter
            else ""
        )
        allowed = f"{worst}, {self.tolerance:.1e} allowed; {self.num_judged} of {self.num_parameters} parameters judged"
        return "; ".join(part for part in (self.reason, allowed if worst else "") if part)


def probe(
    inputs: Inputs,
    cluster: Cluster,
    strategy: Strategy,
    registry: Registry,
    *,
    max_blocks: int | None = 2,
    num_samples: int | None = None,
) -> ProbeResult:
    """Trains a small model under ``strategy`` and in one process, and compares; collective.

    The caller's model is read and not changed, and random states are as before. Nothing is raised for what
    the strategy does.

    Args:
        inputs: the user's model, data and loss; the model may be on meta.
        cluster: what the job runs on. The process group must be up if it is distributed.
        strategy: what to check.
        registry: the methods.
        max_blocks: ``None`` keeps all blocks; else two of the first kind and one of each other kind are
            kept, or all of them where the model does not run with fewer.
        num_samples: of each step, over all ranks (eight at most have samples of their own); two for each
            micro-batch if ``None``.
    """
    begin = time.perf_counter()
    devices = [cluster.local_rank] if cluster.device_type == "cuda" else []
    with kept_random_state(), torch.random.fork_rng(devices=devices):
        found = _probe(inputs, cluster, strategy, registry, max_blocks, num_samples)
    return replace(found, seconds=time.perf_counter() - begin)


def _probe(
    inputs: Inputs,
    cluster: Cluster,
    strategy: Strategy,
    registry: Registry,
    max_blocks: int | None,
    num_samples: int | None,
) -> ProbeResult:
    refused: list[str] = []
    for shallow in (True, False) if max_blocks is not None else (False,):
        try:
            prepared = prepare(inputs, cluster, strategy, registry, shallow=shallow, num_samples=num_samples)
            break
        except Exception as error:  # a model that does not run without all its blocks is tried with them
            refused.append(f"{type(error).__name__}: {error}")
    else:
        reason = "; with all blocks: ".join(dict.fromkeys(refused))
        return _from_first(ProbeResult(passed=False, ran=False, reason=reason), cluster)

    def act() -> StrategyRun:
        return run_strategy(
            prepared.inputs,
            cluster,
            prepared.resolved,
            prepared.batches,
            learning_rate=prepared.learning_rate,
            training=prepared.training,
        )

    try:
        run = agree(act, what="the numerics probe", distributed=cluster.distributed)
    except StepError as error:  # no step with finite gradients
        return _from_first(ProbeResult(passed=False, reason=str(error)), cluster)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return _from_first(ProbeResult(passed=False, ran=False, reason=reason), cluster)
    found = None
    if prepared.reference is not None:
        found = _judge(prepared.reference, prepared.noise, run)
    return _from_first(found, cluster)


def _from_first(found: ProbeResult | None, cluster: Cluster) -> ProbeResult:
    values = [found]
    if cluster.distributed:
        dist.broadcast_object_list(values, src=0)
    assert values[0] is not None
    return values[0]


def _judge(reference: Reference, noise: Deviation | None, run: StrategyRun) -> ProbeResult:
    """Holds every parameter to its tolerance."""
    found = measure(reference, run.final, run.losses)
    rounding = {} if noise is None else noise.errors
    base = TOLERANCE if noise is None else REDUCED_TOLERANCE
    judged = [name for name in found.errors if rounding.get(name, 0.0) <= UNJUDGED]
    tolerances = {name: base + NOISE_FACTOR * rounding.get(name, 0.0) for name in judged}
    worst = max(judged, key=lambda name: found.errors[name] / tolerances[name], default="")
    loss_tolerance = (
        LOSS_TOLERANCE if noise is None else REDUCED_LOSS_TOLERANCE + NOISE_FACTOR * noise.loss_error
    )
    reasons = []
    if found.missing:
        reasons.append(f"{len(found.missing)} parameter(s) are gone, as {found.missing[0]}")
    if run.differing:
        reasons.append(
            f"ranks hold different values of {len(run.differing)} parameter(s), as {run.differing[0]}"
        )
    if worst and found.errors[worst] > tolerances[worst]:
        over = sum(found.errors[name] > tolerances[name] for name in judged)
        reasons.append(f"{over} parameter(s) are not what one process gives")
    if found.loss_error > loss_tolerance:
        reasons.append(f"the loss is off by {found.loss_error:.1e}, {loss_tolerance:.1e} allowed")
    if not judged:
        reasons.append("rounding alone changes every parameter by more than its update shows")
    return ProbeResult(
        passed=not reasons,
        loss_error=found.loss_error,
        worst_parameter=worst,
        worst_error=found.errors.get(worst, 0.0),
        tolerance=tolerances.get(worst, base),
        num_judged=len(judged),
        num_parameters=len(reference.final),
        reason="; ".join(reasons),
    )
