"""Planning in code: costs of a strategy on a cluster, and its best strategies. Only a trace is run.

The command line's ``estimate`` and ``plan`` use the same functions. All figures are predictions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine.input_format import InputFormat
from atorch_ns.engine.request import SearchRequest
from atorch_ns.errors import InputError
from atorch_ns.estimate import Estimate
from atorch_ns.method import load_registry
from atorch_ns.planning.offline import cluster_of, plan_offline, price_strategy, profile_offline
from atorch_ns.profile import Profile
from atorch_ns.report import TrainingReport
from atorch_ns.report.report import read_text
from atorch_ns.search import SearchSettings
from atorch_ns.strategy import Strategy
from atorch_ns.text import with_article

Loss = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def profile(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    input_format: InputFormat = "auto",
    device: str = "cuda",
) -> Profile:
    """The profile of one training step, for many strategies and clusters. The model is left as it is.

    Args:
        model: a model on any device; on meta it takes no memory.
        sample: one batch: a tensor, or a dictionary, list or tuple of tensors, samples along their first dim.
            Costs grow with their number, which need not be the real one; the number of tokens of each must.
        loss: ``(batch, output) -> loss``; ``None`` for the loss in the output, else the output's mean.
        optimizer: factory of the optimizer; ``None`` for none.
        input_format: ``auto`` by the signature of ``forward``, ``none``, or a ``model_input_format``.
        device: type of the devices that are planned for, ``cuda`` or ``cpu``.

    Returns:
        The profile. ``to_json()`` is its file; its assumptions stand in ``trace.notes``.

    Raises:
        InputError: if the model or the loss cannot run on the sample.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {with_article(model)}; give a torch.nn.Module or a saved profile.")
    if sample is None:
        raise InputError("a model needs a sample, one batch of its data; a saved profile needs none.")
    return profile_offline(
        model, sample, loss=loss, optimizer=optimizer, input_format=input_format, device=device
    )


def estimate(
    model: nn.Module | Profile | str | PathLike[str],
    strategy: Any,
    cluster: Cluster | str | PathLike[str] | None = None,
    *,
    batch: int | None = None,
    sample: Any = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    input_format: InputFormat = "auto",
) -> Estimate:
    """Predicted memory in bytes and step time in seconds of a strategy, in parts, as ``atorch-ns estimate``.

    Args:
        model: a model, profiled with ``sample``; or a profile, or the file of one.
        strategy: a form of ``load_strategy``: names and ``(name, config)`` pairs, ``Strategy``, path, JSON.
        cluster: as ``"8xH100-80GB, 16 nodes, ib400"``, a file, or a ``Cluster``; ``None`` for this machine.
        batch: samples in one step over all ranks; ``None`` for the sample's on every rank.
        sample, loss, optimizer, input_format: of a model, as in :func:`profile`.

    Returns:
        The estimate, of the rank that needs most. It fits if ``peak_bytes`` are within the cluster's
        ``device_memory_bytes``. On GPUs ``allocated_bytes`` are tensors', ``reserved_bytes`` those that torch
        holds for them. ``notes`` name the parts of the strategy added, changed or left out for the cluster.

    Raises:
        StrategyError: if the strategy cannot be read, or cannot be used on the cluster.
        InputError: if another argument cannot be used.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> found = estimate(model, ["ddp"], "2xH100-80GB", sample=torch.zeros(8, 64), batch=16)
        >>> found.allocated_bytes < found.reserved_bytes < found.peak_bytes < 2e9
        True
    """
    steps, target = Strategy.load(strategy), cluster_of(cluster)
    costs = _obtain_profile(model, target, sample, loss, optimizer=optimizer, input_format=input_format)
    priced = price_strategy(steps, costs, target, global_batch=batch)
    return replace(priced.estimate, notes=priced.notes)


def plan(
    model: nn.Module | Profile | str | PathLike[str],
    cluster: Cluster | str | PathLike[str] | None = None,
    *,
    batch: int | None = None,
    search: SearchSettings | Mapping[str, Any] | None = None,
    excluded: Sequence[Any] | None = None,
    included: Sequence[Any] | None = None,
    sample: Any = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    input_format: InputFormat = "auto",
) -> TrainingReport:
    """Every strategy ranked by prediction, as ``atorch-ns plan`` shows them.

    Args:
        model, cluster, batch: as in :func:`estimate`.
        search: settings or their fields, such as ``{"objective": "memory", "memory_limit_gib": 70}``.
        excluded, included: methods that a strategy may not, or must, contain, as in ``auto_accelerate``.
        sample, loss, optimizer, input_format: of a model, as in :func:`profile`.

    Returns:
        A report that prints and saves. ``report.strategy`` is the first strategy, ``report.search.rows`` are
        all, with figures and reasons, and ``report.search.best`` is ``None`` where nothing fits.

    Raises:
        InputError: if an argument cannot be used.
    """
    registry, target = load_registry(), cluster_of(cluster)
    request = SearchRequest(search=search, excluded=excluded, included=included)
    request.check(registry, target)  # before the model is profiled
    began = time.perf_counter()
    costs = _obtain_profile(model, target, sample, loss, optimizer=optimizer, input_format=input_format)
    outcome = plan_offline(
        costs,
        target,
        global_batch=batch,
        settings=request.settings,
        excluded=excluded,
        included=included,
        registry=registry,
        profile_seconds=time.perf_counter() - began,
    )
    return TrainingReport(search=outcome)


def _obtain_profile(
    model: nn.Module | Profile | str | PathLike[str],
    cluster: Cluster,
    sample: Any,
    loss: Loss | None,
    *,
    optimizer: MakeOptimizer | None,
    input_format: InputFormat,
) -> Profile:
    if not isinstance(model, (Profile, str, PathLike)):
        device = cluster.device_type
        return profile(
            model, sample, loss=loss, optimizer=optimizer, input_format=input_format, device=device
        )
    if sample is not None or loss is not None:
        raise InputError(
            "sample and loss belong to a model; a profile already contains its own. Leave them out."
        )
    return model if isinstance(model, Profile) else Profile.from_json(read_text(Path(model)))
