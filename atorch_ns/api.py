"""auto_accelerate: from a model, an optimizer, data, a loss and a strategy to what trains."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from atorch_ns.apply import WATCH, dry_run, make_job, resolve_alike
from atorch_ns.capture.random_states import gradients_kept
from atorch_ns.cluster import Cluster, join_process_group
from atorch_ns.engine import SearchRequest
from atorch_ns.job import Inputs, Result
from atorch_ns.method import Resolved, load_registry
from atorch_ns.report import TrainingReport, observer_for
from atorch_ns.search import SearchOutcome, SearchSettings
from atorch_ns.strategy import MODEL_AXES, Strategy
from atorch_ns.text import error_text

if TYPE_CHECKING:
    from atorch_ns.engine import EngineAddress


log = logging.getLogger("atorch_ns")


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., torch.optim.Optimizer] | None = None,
    dataset: Any = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    prepare_input: Callable[[Any, torch.device], Any] | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], Iterable[Any]] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: type | None = None,
    excluded: Sequence[Any] | None = None,
    included: Sequence[Any] | None = None,
    load_strategy: Any = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: str | PathLike[str] | None = None,
    *,
    ignore_dryrun_on_load_strategy: bool = True,
    verbose: bool = False,
    time_limit: float | None = None,
    find_unused_parameters: bool = False,
    sampler_seed: int = 0,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    weight_func: Callable[[Any], Any] | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean",
    sample_batch: Any = None,
    batch_size: int | None = None,
    search: SearchSettings | Mapping[str, Any] | None = None,
    search_history: str | PathLike[str] | None = None,
    search_calibration: str | PathLike[str] | None = None,
    search_logs: str | PathLike[str] | None = None,
    search_engine: EngineAddress | str | None = None,
    raise_errors: bool = True,
) -> tuple[bool, Result | None, Strategy | None]:
    """Finds or takes a strategy and applies it to a model, its optimizer, data and loss.

    Without ``load_strategy`` the strategy is searched for on the ranks that will train with it: the model is
    profiled without its weights, every candidate is priced, a few are tried in processes of their own, and
    the best is checked against one process and applied.

    Works in one process and, started by torchrun, on all its processes; every rank must call it with the
    same arguments. The model is changed in place where methods do so; no other argument is.

    Args:
        model: a plain model, on any device, or on meta to be materialised shard by shard.
        optim_func: ``(parameters, **optim_args) -> torch.optim.Optimizer``.
        dataset: map-style or iterable; ``None`` to bring a data loader of your own.
        loss_func: ``(batch, output) -> loss``, or a tuple that begins with the loss. A mean over samples,
            unless ``weight_func`` or ``loss_reduction`` says otherwise; the first ``train_step`` tests it.
        prepare_input: ``(batch, device) -> batch``; ``None`` moves the batch's tensors to the device.
        model_input_format: ``None`` calls ``model(batch)``, ``"unpack_sequence"`` ``model(*batch)``,
            ``"unpack_dict"`` ``model(**batch)`` with the keys that ``forward`` names, or all of them where it
            has ``**kwargs``, ``"first"`` ``model(batch[0])``, ``"unpack_first"`` ``model(**batch[0])``. The
            loss is given the whole batch.
        optim_args: keyword arguments of ``optim_func``.
        optim_param_func: ``model -> parameters or groups`` for options per parameter.
        dataloader_args: arguments of ``torch.utils.data.DataLoader``; ``batch_size`` is global.
        distributed_sampler_cls: a class with the interface of ``DistributedSampler``.
        excluded: methods that the fully automatic mode may not use: names, ``(name, config)`` pairs, or
            groups such as ``"precision"``.
        included: methods that it must use, in the same forms.
        load_strategy: the strategy: a list of names and ``(name, config)`` pairs, a ``Strategy``, a path
            or the bytes of a strategy file. ``None`` to search for one.
        lr_scheduler_cls: ``(optimizer, **lr_scheduler_args) -> scheduler``; stepping it is the caller's.
        lr_scheduler_args: its keyword arguments.
        finetune_strategy: keep the methods of ``load_strategy`` and search for their configs.
        save_strategy_to_file: file that rank 0 writes the strategy as applied to, JSON or YAML by suffix.
        ignore_dryrun_on_load_strategy: ``False`` runs one forward and backward pass before returning.
        verbose: log what was applied and why, on rank 0.
        time_limit: seconds for the search; as ``search={"time_limit_s": ...}``.
        find_unused_parameters: that of DDP. Parameters that a step does not use are found without it,
            after the backward pass.
        sampler_seed: seed of the default sampler.
        gradient_accumulation_steps: micro-batches that ``train_step`` splits each batch into.
        max_grad_norm: norm to which ``train_step`` clips; ``None`` for no clipping.
        weight_func: ``batch -> number`` of what the loss is a mean over, such as tokens whose label counts.
            ``train_step`` then trains on the mean over all of them, in all ranks and micro-batches.
        loss_reduction: ``"mean"``, or ``"sum"`` for a loss that is a sum: trained on as the sum over ranks.
        sample_batch: one collated batch for profile and trials, in place of samples of the dataset.
        batch_size: samples in a step, over all ranks, where ``dataloader_args`` does not say.
        search: a :class:`SearchSettings` or its fields: objective, sampler, limits, seed.
        search_history: file that every trial is appended to; an interrupted search resumes from it.
        search_calibration: file of factors of an earlier job's ``result.report.refit(path)``, or of speeds
            that ``atorch-ns calibrate`` has measured here, which then need not be measured anew.
        search_logs: folder for the logs of trials that fail, made if needed, with a number behind its name
            where it exists. Else ``<name>.logs`` beside ``save_strategy_to_file`` or ``search_history``,
            or without these for a temporary folder. The report names each file.
        search_engine: ``"host:port"`` of a standalone engine (``atorch-ns engine serve``), with its token in
            ``ATORCH_NS_ENGINE_TOKEN``; or an ``EngineAddress``.
        raise_errors: ``False`` logs the reason of a failure and returns ``(False, None, None)``.

    Returns:
        ``(True, result, best_strategy)``: what to train with, and the strategy as applied.

    Raises:
        AtorchError: the tree in :mod:`atorch_ns.errors`; on all ranks, if a failure can be seen before ranks
            communicate. Else the others raise a ``RankError`` with its reason when the failed process ends.
    """
    inputs = Inputs(
        model=model,
        optim_func=optim_func,
        dataset=dataset,
        loss_func=loss_func,
        prepare_input=prepare_input,
        model_input_format=model_input_format,
        optim_args=optim_args,
        optim_param_func=optim_param_func,
        dataloader_args=dataloader_args,
        distributed_sampler_cls=distributed_sampler_cls,
        lr_scheduler_cls=lr_scheduler_cls,
        lr_scheduler_args=lr_scheduler_args,
        find_unused_parameters=find_unused_parameters,
        sampler_seed=sampler_seed,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=max_grad_norm,
        weight_func=weight_func,
        loss_reduction=loss_reduction,
        sample_batch=sample_batch,
    )
    watch = WATCH.get()
    if watch is not None and watch.strategy is not None:
        load_strategy, save_strategy_to_file = watch.strategy, None
    try:
        cluster = Cluster.detect()
        join_process_group(cluster)
        with cluster.sharing_failures("auto_accelerate"), gradients_kept(inputs.model):
            request = SearchRequest(
                load_strategy=load_strategy,
                finetune_strategy=finetune_strategy,
                save_strategy_to_file=save_strategy_to_file,
                excluded=excluded,
                included=included,
                search=search,
                time_limit=time_limit,
                search_history=search_history,
                search_calibration=search_calibration,
                search_logs=search_logs,
                search_engine=search_engine,
                sample_batch=sample_batch,
                batch_size=batch_size,
                ignore_dryrun_on_load_strategy=ignore_dryrun_on_load_strategy,
                verbose=verbose,
            )
            resolved, outcome = _choose_strategy(inputs, cluster, request)
            result = make_job(
                inputs,
                cluster,
                resolved,
                notes=[_numeric_note(inputs, cluster, resolved, outcome)],
                report=partial(TrainingReport.of_job, search=outcome),
            )
            if not ignore_dryrun_on_load_strategy:
                dry_run(result)
            strategy = _save_strategy(result, cluster, save_strategy_to_file, outcome)
            if watch is not None and result.optim is not None:
                watch.follow(result)
    except Exception as error:
        if raise_errors:
            raise
        log.error("auto_accelerate failed: %s", error_text(error))
        return False, None, None
    _log_applied(result, cluster, resolved, verbose)
    return True, result, strategy


def _choose_strategy(
    inputs: Inputs, cluster: Cluster, request: SearchRequest
) -> tuple[Resolved, SearchOutcome | None]:
    """Returns the given strategy, or the one found by a search."""
    registry = load_registry()

    def read() -> tuple[Strategy | None, SearchSettings]:
        inputs.check()
        request.check(registry, cluster)
        return request.base, request.settings

    strategy, settings = cluster.agree(read, what="checking the arguments")
    if not request.searches:
        assert strategy is not None
        return resolve_alike(inputs, cluster, strategy), None
    cluster.same_everywhere(
        {"excluded": repr(request.excluded), "included": repr(request.included), **inputs.digest()}
    )
    cluster.agree(lambda: request.engine, what="reading the engine's address")
    # It loads gRPC, which a job with a given strategy does without.
    from atorch_ns.engine import find_strategy

    view = observer_for(verbose=request.verbose, time_limit_s=settings.time_limit_s)
    with view if cluster.rank == 0 else nullcontext():
        outcome = find_strategy(inputs, cluster, registry, replace(request, observer=view))
    assert outcome.winner is not None
    return resolve_alike(inputs, cluster, outcome.winner.candidate.strategy), outcome


def _numeric_note(inputs: Inputs, cluster: Cluster, resolved: Resolved, outcome: SearchOutcome | None) -> str:
    """Result of comparing the divided model with one process, or an empty text if no comparison is needed."""
    if all(resolved.plan.size(axis) == 1 for axis in MODEL_AXES) or (outcome and outcome.numerics_passed):
        return ""
    from atorch_ns.numerics.division import check_division  # which most jobs do without

    return check_division(inputs, cluster, resolved, load_registry())


def _save_strategy(
    result: Result, cluster: Cluster, path: str | PathLike[str] | None, outcome: SearchOutcome | None
) -> Strategy:
    strategy = result.strategy
    if outcome is not None:
        provenance = {**strategy.provenance, **_search_provenance(outcome)}
        strategy = Strategy(strategy.steps, requires=strategy.requires, provenance=provenance)

    def write() -> None:
        if path is not None and cluster.rank == 0:
            strategy.save(path)

    cluster.agree(write, what="saving the strategy")
    return strategy


def _search_provenance(outcome: SearchOutcome) -> dict[str, Any]:
    """Origin of a searched strategy for its file."""
    row = outcome.winner
    assert row is not None
    record: dict[str, Any] = {
        "fingerprint": outcome.setting.fingerprint,
        "objective": outcome.settings.objective,
        "num_trials": outcome.num_trials,
    }
    if row.trial is not None and row.trial.succeeded:
        record["measured"] = {
            "step_seconds": row.trial.median_seconds,
            "num_steps": len(row.trial.step_seconds),
            "peak_bytes": row.trial.max_peak_bytes,
        }
    if row.candidate.estimate is not None:
        record["predicted"] = {
            "step_seconds": row.candidate.estimate.step_seconds,
            "peak_bytes": int(row.candidate.estimate.peak_bytes),
        }
    return record


def _log_applied(result: Result, cluster: Cluster, resolved: Resolved, verbose: bool) -> None:
    if cluster.rank != 0:
        return
    left_out = [note.text for note in resolved.notes if note.kind == "left out"]
    if left_out:
        warnings.warn("\n".join(left_out), stacklevel=3)
    log.log(logging.INFO if not verbose else logging.WARNING, "strategy as applied:\n%s", result.applied)
