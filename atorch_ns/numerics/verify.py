"""Verification of a strategy against one process, on the user's own model.

The model is trained for a few steps under the strategy on all ranks, and by plain torch in one process, on
the same global batches. The step of SGD with momentum is linear in the gradient, where Adam's is nearly the
gradient's sign and would hide a wrong scale. The first step shows the gradients, the last their errors' sum.
:mod:`atorch_ns.numerics.probe` explains measure and tolerances; it looks at a small copy, this at the model.
"""

from __future__ import annotations

import copy
import hashlib
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, InputError, RankError
from atorch_ns.job import Inputs
from atorch_ns.job.sampling import num_samples, sample_inputs
from atorch_ns.method import Registry, Resolved, resolve
from atorch_ns.numerics.reference import (
    NO_DEVIATION,
    Deviation,
    Reference,
    RoundsTo16Bits,
    bare_groups,
    measure,
    part_of_ranks,
    run_reference,
    run_whole,
)
from atorch_ns.numerics.run import StrategyRun, run_strategy
from atorch_ns.numerics.setup import draw_batches, is_reduced, round_to
from atorch_ns.numerics.verdict import Verification, judge, judge_parts
from atorch_ns.profile import Profile
from atorch_ns.sharding.compare import sum_of_bits
from atorch_ns.strategy import Strategy
from atorch_ns.text import error_text, user_frame


@contextmanager
def explained_errors(run: str, *, rank: int, remedy: str) -> Iterator[None]:
    """Turns foreign exceptions of the block into errors of this package that name their origin.

    Args:
        run: name of the run, as ``"training in one process"``.
        rank: this rank.
        remedy: advice at the end of the message.

    Raises:
        RankError: if a collective broke off because another rank has gone.
        InputError: for anything else.
    """
    try:
        yield
    except AtorchError:
        raise
    except Exception as error:
        what = f"{run} failed on rank {rank}: {error_text(error)}".rstrip(".")
        if _is_broken_connection(error):
            raise RankError(f"{what}. Another rank has exited.") from error
        raise InputError(f"{what}. {_error_origin(error)} {remedy}") from error


def _is_broken_connection(error: Exception) -> bool:
    if isinstance(error, torch.distributed.DistNetworkError):
        return True
    text = str(error).lower()  # gloo's messages
    return isinstance(error, RuntimeError) and ("closed by peer" in text or "reset by peer" in text)


def _error_origin(error: Exception) -> str:
    last = user_frame(error)
    if last is not None:
        return f"It is raised by your code or what that calls: {last.filename}, line {last.lineno}, in {last.name}."
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"No line of your own is in it; it comes from {last.filename}, line {last.lineno}, in {last.name}, "
        "called with your model and batch."
    )


@dataclass(frozen=True, kw_only=True)
class _Truth:
    """The runs of one process: one step and all steps, and their deviations in bfloat16 if that matters."""

    first: Reference
    last: Reference
    first_noise: Deviation | None
    last_noise: Deviation | None
    num_samples: int
    parts_reason: str | None
    notes: tuple[str, ...]


def verify(
    inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry, *, num_steps: int = 5
) -> Verification:
    """Trains the model under ``strategy`` and in one process, and compares. Collective.

    The caller's model and random states are as before.

    Args:
        inputs: the user's model, with values that are the same on every rank, data and loss.
        cluster: the cluster, with its process group up if it is distributed.
        strategy, registry: the strategy to check, and the methods.
        num_steps: number of optimizer steps.

    Returns:
        The verdict; the same on every rank.

    Raises:
        InputError: if there is nothing to compare.
        StrategyError: if the strategy cannot be used here.
    """
    began = time.perf_counter()
    with random_states_kept(torch.device(cluster.device)):
        verdict = _run_verification(inputs, cluster, strategy, registry, num_steps=num_steps)
    return replace(verdict, seconds=time.perf_counter() - began)


def _run_verification(
    inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry, *, num_steps: int
) -> Verification:
    setup, resolved = cluster.agree(
        lambda: _plain_inputs(inputs, cluster, strategy, registry, num_steps=num_steps),
        what="preparing the comparison",
    )
    # Ranks that begin with different weights would differ for that reason alone.
    cluster.same_everywhere({"the model's values": _weights_digest(setup)})
    batches, truth = cluster.agree(
        lambda: _explained_truth(setup, cluster, resolved, num_steps) if cluster.rank == 0 else ([], None),
        what="training in one process",
    )
    batches, rate, training = cluster.from_first(
        (batches, truth.last.learning_rate, truth.last.training) if truth else None
    )
    with explained_errors(
        f"training under {resolved.strategy} on {cluster.world_size} rank(s)",
        rank=cluster.rank,
        remedy="The same batches could be trained on in one process: the strategy does not work with this model. "
        "Change the code there, or leave out the method concerned.",
    ):
        run = run_strategy(
            replace(setup, model=copy.deepcopy(setup.model)),
            cluster,
            resolved,
            batches,
            learning_rate=rate,
            training=training,
            everywhere=True,
        )
    verdict = _compare_to_truth(truth, run, cluster, resolved) if truth is not None else None
    return cluster.from_first(verdict)


def _plain_inputs(
    inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry, *, num_steps: int
) -> tuple[Inputs, Resolved]:
    if num_steps < 1:
        raise InputError(f"num_steps={num_steps}: at least one step is needed.")
    if any(parameter.is_meta for parameter in inputs.model.parameters()):
        raise InputError(
            "the model is on the meta device, but two runs must start with equal values. Build it on the CPU."
        )
    base = sample_inputs(inputs, num_data_ranks=cluster.world_size, sample_batch=inputs.sample_batch).inputs
    resolved = resolve(strategy, cluster, registry, profile=Profile.of(inputs.model))
    model = copy.deepcopy(inputs.model).to(torch.device(cluster.device))
    round_to(model, getattr(torch, resolved.plan.precision.parameter_dtype))  # as the strategy does
    setup = replace(base, model=model, optim_func=torch.optim.SGD, optim_param_func=bare_groups(inputs))
    return setup, resolved


def _explained_truth(
    inputs: Inputs, cluster: Cluster, resolved: Resolved, num_steps: int
) -> tuple[list[list[Any]], _Truth]:
    input_format = inputs.model_input_format or "none"
    with explained_errors(
        "training in one process, without any strategy,",
        rank=cluster.rank,
        remedy=f"Correct the model, the loss or the batch; the batch is passed as {input_format!r} (--input-format, "
        "model_input_format).",
    ):
        return _compute_truth(inputs, cluster, resolved, num_steps)


def _compute_truth(
    inputs: Inputs, cluster: Cluster, resolved: Resolved, num_steps: int
) -> tuple[list[list[Any]], _Truth]:
    num_micro_batches = max(resolved.plan.num_micro_batches, inputs.gradient_accumulation_steps)
    parts = part_of_ranks(resolved.plan.num_data_ranks)
    batches = draw_batches(inputs, 1 + max(parts), 2 * num_micro_batches, num_steps=num_steps)

    def run(steps: int, **options: Any) -> Reference:
        model = copy.deepcopy(inputs.model)
        device = torch.device(cluster.device)
        return run_reference(model, inputs, batches[:steps], parts, num_micro_batches, device, **options)

    with RoundsTo16Bits() as rounds:
        reference = run(1)
    # Momentum adds up: the rate of one step is lowered so that all of them move no parameter further.
    gentle = replace(reference, learning_rate=reference.learning_rate * 2 / (num_steps * (num_steps + 1)))
    first, last = run(1, like=gentle), run(num_steps, like=gentle)
    model, device = copy.deepcopy(inputs.model), torch.device(cluster.device)
    whole, notes = run_whole(
        model, inputs, batches[0], parts, num_micro_batches=num_micro_batches, device=device, like=gentle
    )
    noises: list[Deviation | None] = [NO_DEVIATION if rounds.has_rounded else None] * 2
    if is_reduced(resolved):
        for index, exact in enumerate((first, last)):
            bf16_run = run(len(exact.losses), like=gentle, compute_dtype=torch.bfloat16)
            noises[index] = measure(exact, bf16_run.final, bf16_run.losses)
    return batches, _Truth(
        first=first,
        last=last,
        first_noise=noises[0],
        last_noise=noises[1],
        num_samples=_count_samples(batches[0], parts),
        parts_reason=None if whole is None else judge_parts(first, whole, noises[0], inputs.loss_reduction),
        notes=notes,
    )


def _count_samples(batch: list[Any], parts: tuple[int, ...]) -> int:
    try:
        return sum(num_samples(batch[part]) for part in parts)
    except InputError:
        return 0  # a part does not reveal its size


def _compare_to_truth(truth: _Truth, run: StrategyRun, cluster: Cluster, resolved: Resolved) -> Verification:
    last = measure(truth.last, run.last, run.losses)
    rows, loss_tolerance, reasons = judge(
        measure(truth.first, run.first, run.losses[:1]),
        last,
        first_noise=truth.first_noise,
        last_noise=truth.last_noise,
        differing=run.differing,
    )
    if truth.parts_reason is not None:
        reasons.append(truth.parts_reason)
    return Verification(
        strategy=str(resolved.strategy),
        world_size=cluster.world_size,
        num_steps=len(run.losses),
        num_samples=truth.num_samples,
        passed=not reasons,
        reasons=tuple(reasons),
        losses=tuple(zip(truth.last.losses, run.losses, strict=True)),
        loss_error=last.loss_error,
        loss_tolerance=loss_tolerance,
        parameters=rows,
        reduced_precision=truth.last_noise is not None,
        training=truth.last.training,
        notes=(*(note.text for note in resolved.notes), *truth.notes, *run.notes),
    )


def _weights_digest(inputs: Inputs) -> str:
    sums = [(name, int(sum_of_bits(weight))) for name, weight in inputs.model.named_parameters()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
