"""``atorch-ns estimate``: memory and time of one strategy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch_ns.cli._options import (
    AsJson,
    Batch,
    ClusterSpec,
    InputFormat,
    Loss,
    MemoryLimit,
    Model,
    Optimizer,
    ProfileFile,
    Sample,
)
from atorch_ns.cli._planning import Asked, make_cluster, make_profile, make_settings, say, say_where

if TYPE_CHECKING:
    from atorch_ns.engine._plan_offline import PricedStrategy

__all__ = ["estimate", "estimate_as_json"]


def estimate(
    strategy: Annotated[
        str, typer.Option(help="A strategy file, or a strategy as JSON text or names: fsdp,amp_native.")
    ],
    model: Model = None,
    sample: Sample = None,
    cluster: ClusterSpec = None,
    loss: Loss = None,
    optimizer: Optimizer = "torch.optim.AdamW",
    batch: Batch = None,
    memory_limit: MemoryLimit = None,
    profile: ProfileFile = None,
    input_format: InputFormat = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict memory and time of one strategy, in parts. The exit code is 3 if it does not fit.

    Example: atorch-ns estimate --strategy fsdp,amp_native --model train.py:build --sample train.py:sample --cluster 2xcpu
    """
    from atorch_ns.cli._strategies import read_strategy
    from atorch_ns.engine._plan_offline import price_strategy
    from atorch_ns.report import estimate_text

    settings = make_settings(memory_limit=memory_limit)
    chosen = read_strategy(strategy, "--strategy")
    place = make_cluster(cluster)
    known, _ = make_profile(
        Asked(model, sample, loss, optimizer, input_format, profile), device=place.device_type
    )
    say_where(cluster, place)
    priced = price_strategy(chosen, known, place, global_batch=batch, settings=settings)
    for note in (*priced.notes, *(known.trace.notes if known.trace else ())):
        say(note)
    if as_json:
        typer.echo(json.dumps(estimate_as_json(priced), indent=1))
    else:
        typer.echo(f"{priced.strategy}\n{estimate_text(priced.estimate, priced.limit_bytes)}")
    if priced.over_bytes > 0:
        raise typer.Exit(3)


def estimate_as_json(priced: PricedStrategy) -> dict[str, Any]:
    """The estimate as plain values: bytes and seconds."""
    figures = priced.estimate
    return {
        "schema": 1,
        "strategy": json.loads(priced.strategy.to_bytes()),
        "memory_bytes": {**figures.memory._asdict(), "peak": figures.peak_bytes},
        "time_seconds": {**figures.time._asdict(), "step": figures.step_seconds},
        "peak_at": figures.peak_at,
        "collectives": [vars(collective) for collective in figures.collectives],
        "limit_bytes": priced.limit_bytes,
        "fits": priced.over_bytes <= 0,
        "over_bytes": max(priced.over_bytes, 0.0),
        "notes": list(priced.notes),
    }
