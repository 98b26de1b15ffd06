"""Planning without the cluster: from a model and a sample to ranked strategies. Only the profile is run.

A profile is plain values, so one that was saved is planned with again, without the model.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from atorch_ns.capture.nests import tensors_of
from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.data import call_model
from atorch_ns.engine.input_format import InputFormat, check_format, chosen_format
from atorch_ns.engine.problem import optimizer_maker
from atorch_ns.errors import InputError
from atorch_ns.estimate import Estimate, Workload, estimate
from atorch_ns.job import first_loss
from atorch_ns.method import Registry, ReplacesModules, load_registry, resolve
from atorch_ns.profile import Profile, Segment, profile_model
from atorch_ns.search import (
    Candidate,
    Row,
    SearchOutcome,
    SearchSetting,
    SearchSettings,
    explore,
    memory_limit,
    read_constraints,
)
from atorch_ns.search.conclude import pareto
from atorch_ns.search.objective import Objective
from atorch_ns.search.ranking import fits_surely, prefer
from atorch_ns.search.space.constraints import Constraints
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.text import count_noun, error_text, with_article, with_period


class AssumedLoss:
    """``(batch, output) -> loss``: the loss in the output, else the output's mean.

    Attributes:
        assumed: the loss that was assumed, as a sentence; empty before the first call.
    """

    def __init__(self) -> None:
        self.assumed = ""

    def __call__(self, batch: Any, output: Any) -> torch.Tensor:
        """The loss; raises InputError if the output holds no tensor of floats."""
        loss, what = _find_loss(output)
        self.assumed = f"No loss function was given; the loss used is {what}."
        return loss


def _find_loss(output: Any) -> tuple[torch.Tensor, str]:
    own_loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own_loss, torch.Tensor):
        return own_loss, "the output's own loss"
    first = output[0] if isinstance(output, Sequence) and len(output) else output
    if isinstance(first, torch.Tensor) and first.numel() == 1:
        return first, "the output's first item" if first is not output else "the output itself"
    for tensor in tensors_of(output):
        if tensor.is_floating_point():
            # Not its shape: the trace runs batches of other sizes than the user's.
            part = "" if tensor is output else "'s first tensor of floats"
            return tensor.mean(), f"the mean of the output{part}"
    raise InputError(
        f"the model returned {type(output).__name__} without a tensor of floats, so there is nothing to "
        "differentiate. Give a loss function."
    )


def offline_rows(
    candidates: Sequence[Candidate], settings: SearchSettings, limit_bytes: int = 0
) -> tuple[Row, ...]:
    """The chosen candidate, the others that can be used in their order, and those that cannot."""
    usable = [candidate for candidate in candidates if candidate.pruned is None]
    rows = []
    if usable:
        plain = [name for option in candidates if option.is_baseline for name, _ in option.steps]
        best, reason = prefer(usable, Objective(settings), limit_bytes, plain)
        rows = [Row(candidate=best, fate="won", reason=reason or _GOALS[settings.objective])]
        rows += [
            Row(candidate=option, fate="untried", reason=_untried_reason(option, best, limit_bytes))
            for option in usable
            if option is not best
        ]
    rows += [
        Row(candidate=option, fate="pruned", reason=option.pruned.reason)
        for option in candidates
        if option.pruned is not None
    ]
    return tuple(rows)


_GOALS = {  # reasons of the choice, by objective
    "time": "the shortest predicted step",
    "memory": "the least predicted memory",
    "batch": "the largest batch that is predicted to fit",
    "cost": "the lowest predicted cost per token",
}


def _untried_reason(candidate: Candidate, best: Candidate, limit_bytes: int) -> str:
    mine, other = candidate.estimate, best.estimate
    if mine is None or other is None or not other.step_seconds:
        return "not priced"
    ratio = mine.step_seconds / other.step_seconds
    time_part = f"{ratio:.2f}× the chosen step" if abs(ratio - 1) >= 0.005 else "as fast as the chosen one"
    share = mine.peak_bytes / other.peak_bytes - 1 if other.peak_bytes else 0.0
    memory_part = f", {abs(share):.0%} {'more' if share > 0 else 'less'} memory" if abs(share) >= 0.01 else ""
    unsure = "" if fits_surely(candidate, limit_bytes) else "; may not fit"
    return f"predicted {time_part}{memory_part}{unsure}"


def nearest_miss(rows: Iterable[Row]) -> str:
    """The candidate that is over the memory limit by least, with its reason."""
    over = [
        (row.candidate.predicted_bytes or 0.0, f"Nearest: {row.candidate.label} {row.reason}")
        for row in rows
        if row.candidate.pruned is not None and row.candidate.pruned.kind == "memory"
    ]
    return min(over, default=(0.0, ""))[1]  # the least of those over the limit


def cluster_of(cluster: Cluster | str | PathLike[str] | None) -> Cluster:
    """The cluster to plan for, with figures for its hardware.

    Args:
        cluster: a cluster; its specification or file, as :func:`cluster_from_spec` reads them; ``None`` for
            this machine as one process, or for this process's job.

    Raises:
        InputError: if it is none of these, or cannot be read.
    """
    if cluster is None:
        return Cluster.detect().with_hardware()
    if isinstance(cluster, Cluster):
        return cluster.with_hardware()
    if not isinstance(cluster, (str, PathLike)):
        raise InputError(
            f"the cluster is {with_article(cluster)}; give a specification such as '8xH100-80GB, 2 nodes, ib400', "
            "a file of one, or a Cluster."
        )
    return cluster_from_spec(cluster if isinstance(cluster, str) else Path(cluster))


class PricedStrategy(NamedTuple):
    """One strategy on one cluster.

    Attributes:
        strategy: the strategy as resolved, with the methods that were added.
        estimate: its predicted cost, with its collectives.
        limit_bytes: bytes that one rank may use; 0 where unknown.
        notes: changes that resolving made, as sentences.
    """

    strategy: Strategy
    estimate: Estimate
    limit_bytes: int
    notes: tuple[str, ...]

    @property
    def over_bytes(self) -> float:
        """Bytes over the limit; negative if it fits, and 0 where the limit is unknown."""
        return self.estimate.peak_bytes - self.limit_bytes if self.limit_bytes else 0.0


def profile_offline(
    model: nn.Module,
    sample: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = torch.optim.AdamW,
    input_format: InputFormat = "auto",
    device: str = "cpu",
) -> Profile:
    """The profile of one training step, with assumptions as notes of its trace.

    Args:
        model, sample, loss, optimizer, input_format, device: as in :func:`atorch_ns.planning.profile`.

    Raises:
        InputError: if the model or the loss cannot run on the sample, or ends the process.
    """
    form, why = chosen_format(check_format(input_format), model, sample)
    call_format = None if form == "none" else form  # None passes the batch as it is
    default_loss = AssumedLoss()
    loss_func = default_loss if loss is None else loss

    def forward_loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return first_loss(loss_func(batch, call_model(module, batch, call_format)))

    make_optimizer = None if optimizer is None else optimizer_maker(optimizer)
    try:
        profile = profile_model(
            model, sample, forward_loss, find_dims, make_optimizer=make_optimizer, device=device
        )
    except SystemExit as error:  # user code may call sys.exit
        raise InputError(f"the model or the loss ended the process: {error_text(error)}.") from error
    notes = [with_period(each[:1].upper() + each[1:]) for each in (why, default_loss.assumed) if each]
    if profile.trace is None or not notes:
        return profile
    return replace(profile, trace=replace(profile.trace, notes=(*profile.trace.notes, *notes)))


def workload_of(profile: Profile, cluster: Cluster, global_batch: int | None) -> Workload:
    """The work of one step: the given batch, or the sample's on every rank.

    Raises:
        InputError: if the batch is not positive, or the profile has no trace.
    """
    if profile.trace is None:
        raise InputError(
            "the profile has no costs, only the model's structure. Make a new one with a sample."
        )
    whole = isinstance(global_batch, int) and not isinstance(global_batch, bool)  # True is an int
    if global_batch is not None and not (whole and global_batch >= 1):
        raise InputError(f"the global batch must be at least 1, a whole number; it is {global_batch!r}.")
    batch = global_batch or profile.trace.num_samples * cluster.world_size
    return Workload(global_batch=batch, num_tokens=profile.trace.num_tokens)


def plan_offline(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch: int | None = None,
    settings: SearchSettings | None = None,
    excluded: Sequence[Any] | None = None,
    included: Sequence[Any] | None = None,
    registry: Registry | None = None,
    profile_seconds: float = 0.0,
) -> SearchOutcome:
    """Every candidate priced and ranked, in the form of a search without trials. All figures are predictions.

    Args:
        profile: a profile with a trace.
        cluster: cluster, detected or from a description; its hardware is looked up if it has none.
        global_batch: samples in a step; ``None`` for the sample's on every rank.
        settings: objective and limits.
        excluded, included: methods that a strategy may not, or must, contain.
        registry: the methods; ``None`` for all that are installed.
        profile_seconds: time of the profile, for the report.

    Raises:
        InputError: if an argument cannot be used.
    """
    began = time.perf_counter()
    settings = settings or SearchSettings()
    cluster = cluster.with_hardware()
    workload = workload_of(profile, cluster, global_batch)
    methods = registry or load_registry()
    rules = read_constraints(methods, included=included, excluded=excluded, cluster=cluster, profile=profile)
    omissions = _unpriced_methods(profile, methods, rules)  # they would be priced as if they saved nothing
    space = explore(
        profile,
        cluster,
        workload,
        methods,
        settings=settings,
        excluded=[*(excluded or ()), *omissions] or None,
        included=list(included) if included else None,
    )
    limit = memory_limit(cluster, settings).num_bytes
    rows = offline_rows(space.candidates, settings, limit)
    best = rows[0].candidate.key if rows and rows[0].fate == "won" else None  # None where nothing fits
    took = time.perf_counter() - began
    notes = (*(profile.trace.notes if profile.trace else ()), *space.notes)
    if omissions:
        notes += (
            f"No candidate has {', '.join(omissions)}: only a search on the devices predicts the savings of replaced "
            "modules.",
        )
    if global_batch is None:
        batch = workload.global_batch
        notes += (f"No batch size was given. Every rank takes the sample's, {batch} samples in total.",)
    facts = [profile.model_class, profile.num_parameters, cluster.world_size, cluster.device_name]
    digest = json.dumps([*facts, workload.global_batch, workload.num_tokens])  # facts that distinguish plans
    setting = SearchSetting(
        model=profile.model_class.rsplit(".", 1)[-1],
        num_parameters=profile.num_parameters,
        world_size=cluster.world_size,
        num_nodes=cluster.num_nodes,
        device=cluster.hardware.device.name if cluster.hardware else cluster.device_name,
        memory_limit_bytes=limit,
        global_batch=workload.global_batch,
        num_tokens=workload.num_tokens,
        fingerprint=hashlib.sha256(digest.encode()).hexdigest()[:16],
        profile_seconds=profile_seconds,
        estimate_seconds=took,
        notes=notes,
    )
    return SearchOutcome(
        setting=setting,
        settings=settings,
        rows=rows,
        best=best,
        stop_reason=f"planned offline: {_describe_listing(space.num_priced, len(rows))}",
        num_trials=0,
        seconds=profile_seconds + took,
        pareto=pareto(rows),
        nearest_miss="" if best else nearest_miss(rows),
    )


def price_strategy(
    strategy: Strategy,
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch: int | None = None,
    settings: SearchSettings | None = None,
    registry: Registry | None = None,
) -> PricedStrategy:
    """Resolves one strategy on the cluster and prices it, with its collectives.

    Raises:
        StrategyError: if it cannot be used there.
        InputError: if another argument cannot be used.
    """
    cluster = cluster.with_hardware()
    workload = workload_of(profile, cluster, global_batch)
    resolution = resolve(strategy, cluster, registry or load_registry(), profile=profile)
    _check_batch(resolution.plan, workload.global_batch)
    price = estimate(resolution.plan, profile, cluster, workload)
    limit = memory_limit(cluster, settings or SearchSettings()).num_bytes
    notes = tuple(note.text for note in resolution.notes)
    if resolution.plan.replaced and not any(each.replaced_costs for each in _profile_segments(profile)):
        notes += (
            "Only a search on the devices predicts the savings of replaced modules. Here they are priced as without.",
        )
    return PricedStrategy(resolution.strategy, price, limit, notes)


def _unpriced_methods(profile: Profile, registry: Registry, constraints: Constraints) -> list[str]:
    # Methods whose gain the profile does not tell, unless the user speaks of them.
    if any(each.replaced_costs for each in _profile_segments(profile)):
        return []
    names = {name for each in (*constraints.included, *constraints.excluded) for name in each.methods}
    return [each.name for each in registry if isinstance(each, ReplacesModules) and each.name not in names]


def _profile_segments(profile: Profile) -> Sequence[Segment]:
    return () if profile.trace is None else profile.trace.segments


def _check_batch(plan: Plan, global_batch: int) -> None:
    ranks, micro_batches = plan.size("data") * plan.size("zero") * plan.size("expert"), plan.num_micro_batches
    parts = ranks * micro_batches  # parts of a global batch
    if global_batch % parts == 0:
        return
    below, above = global_batch // parts * parts, (global_batch // parts + 1) * parts
    raise InputError(
        f"a global batch of {global_batch} samples does not divide evenly over {count_noun(ranks, 'data-parallel rank')} and "
        f"{count_noun(micro_batches, 'micro-batch', 'micro-batches')}: give {f'{below} or {above}' if below else above}, or change the strategy."
    )


def _describe_listing(num_priced: int, num_rows: int) -> str:
    # The baseline is a row, be it among the best or not.
    if num_priced <= num_rows:
        return f"{num_rows} strategies were priced"
    listing = f"the best are listed with the baseline, {num_rows} in all"
    return f"{num_priced} strategies were priced, and {listing}"
