"""``atorch-ns diff``: what differs between two strategies, and what that is predicted to change."""

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
    Model,
    Optimizer,
    ProfileFile,
    Sample,
)
from atorch_ns.cli._planning import Asked, make_cluster, make_profile, say, say_where
from atorch_ns.cli._strategies import read_strategy

if TYPE_CHECKING:
    from atorch_ns.engine._plan_offline import PricedStrategy
    from atorch_ns.strategy import Strategy, StrategyDiff

__all__ = ["diff", "differences_as_json"]


def diff(
    before: Annotated[str, typer.Argument(help="A strategy file or a report.json.")],
    after: Annotated[str, typer.Argument(help="Another one.")],
    model: Model = None,
    sample: Sample = None,
    cluster: ClusterSpec = None,
    loss: Loss = None,
    optimizer: Optimizer = "torch.optim.AdamW",
    batch: Batch = None,
    profile: ProfileFile = None,
    input_format: InputFormat = "auto",
    as_json: AsJson = False,
) -> None:
    """Print what differs between two strategies; with a model, also the predicted difference.

    The exit code is 1 if something differs.

    Example: atorch-ns diff old.json new.json
    """
    from atorch_ns.strategy import diff as compare

    old, new = read_strategy(before), read_strategy(after)
    result = compare(old, new)
    priced: tuple[PricedStrategy, ...] = ()
    if model is not None or profile is not None:
        asked = Asked(model, sample, loss, optimizer, input_format, profile)
        priced = _priced((old, new), asked, cluster, batch)
    if as_json:
        typer.echo(json.dumps(differences_as_json(result, priced), indent=1, ensure_ascii=False))
    else:
        if not result.same:
            typer.echo(f"before: {old}\nafter:  {new}\n")
        typer.echo(str(result))
        if priced:
            from atorch_ns.report import estimates_text

            typer.echo("\n" + estimates_text(priced[0].estimate, priced[1].estimate))
    if not result.same:
        raise typer.Exit(1)


def _priced(
    strategies: tuple[Strategy, Strategy], asked: Asked, cluster: str | None, batch: int | None
) -> tuple[PricedStrategy, ...]:
    from atorch_ns.engine._plan_offline import price_strategy

    place = make_cluster(cluster)
    profile, _ = make_profile(asked, device=place.device_type)
    say_where(cluster, place)
    priced = tuple(price_strategy(each, profile, place, global_batch=batch) for each in strategies)
    for side, one in zip(("before", "after"), priced, strict=True):
        for note in one.notes:
            say(f"{side}: {note}")
    return priced


def differences_as_json(result: StrategyDiff, priced: tuple[PricedStrategy, ...] = ()) -> dict[str, Any]:
    """What differs, as plain values, with the estimates of both sides where there are any."""
    from atorch_ns.cli.estimate import estimate_as_json

    return {
        "schema": 1,
        "same": result.same,
        "added": [{"name": step.name, "config": step.config} for step in result.added],
        "removed": [{"name": step.name, "config": step.config} for step in result.removed],
        "changed": [item._asdict() for item in result.changed],
        "reordered": result.reordered,
        "estimates": [estimate_as_json(each) for each in priced],
    }
