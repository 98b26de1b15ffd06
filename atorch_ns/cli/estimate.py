"""``atorch-ns estimate`` and ``diff``: predicted memory and time of a strategy, and differences of two."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch_ns.cli import _options as options
from atorch_ns.cli._planning import (
    ModelOptions,
    all_or_problems,
    make_profile,
    make_settings,
    print_json,
    read_inputs,
    read_strategy,
    say,
)

if TYPE_CHECKING:
    from atorch_ns.planning.offline import PricedStrategy
    from atorch_ns.strategy import Strategy, StrategyDiff


def estimate(
    strategy: options.StrategyText,
    model: options.Model = None,
    sample: options.Sample = None,
    cluster: options.ClusterSpec = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "torch.optim.AdamW",
    batch: options.Batch = None,
    memory_limit: options.MemoryLimit = None,
    profile: options.ProfileFile = None,
    input_format: options.InputFormatOption = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Predict the memory and time of one strategy, part by part. The exit code is 3 if it does not fit.

    Example: atorch-ns estimate --strategy fsdp,amp_native --model train.py:build --sample train.py:sample --cluster 2xcpu
    """
    from atorch_ns.planning.offline import price_strategy
    from atorch_ns.report import estimate_text

    settings, steps, inputs = all_or_problems(
        lambda: make_settings(memory_limit=memory_limit),
        lambda: read_strategy(strategy, "--strategy"),
        lambda: read_inputs(ModelOptions(model, sample, loss, optimizer, input_format, profile, cluster)),
    )
    model_profile, _ = make_profile(inputs)
    price = price_strategy(steps, model_profile, inputs.cluster, global_batch=batch, settings=settings)
    for note in (*price.notes, *(model_profile.trace.notes if model_profile.trace else ())):
        say(note)
    if as_json:
        print_json(estimate_as_json(price))
    else:
        typer.echo(f"{price.strategy}\n{estimate_text(price.estimate, price.limit_bytes)}")
    if price.over_bytes > 0:
        raise typer.Exit(3)


def estimate_as_json(price: PricedStrategy) -> dict[str, Any]:
    """The estimate as plain values: bytes and seconds."""
    figures = price.estimate
    return {
        "schema": 1,
        "strategy": json.loads(price.strategy.to_bytes()),
        "memory_bytes": {**figures.memory._asdict(), "peak": figures.peak_bytes},
        "time_seconds": {**figures.time._asdict(), "step": figures.step_seconds},
        "intervals": {
            "peak_bytes": figures.peak_bytes_interval,
            "step_seconds": figures.step_seconds_interval,
        },
        "peak_at": figures.peak_at,
        "collectives": [vars(collective) for collective in figures.collectives],
        "limit_bytes": price.limit_bytes,
        "fits": price.over_bytes <= 0,
        "over_bytes": max(price.over_bytes, 0.0),
        "notes": list(price.notes),
    }


def diff(
    before: Annotated[str, typer.Argument(help="Strategy file or report.json.")],
    after: Annotated[str, typer.Argument(help="Strategy file or report.json to compare with.")],
    model: options.Model = None,
    sample: options.Sample = None,
    cluster: options.ClusterSpec = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "torch.optim.AdamW",
    batch: options.Batch = None,
    profile: options.ProfileFile = None,
    input_format: options.InputFormatOption = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Compare two strategies. With a model, also compare their predicted memory and time.

    The exit code is 1 if something differs.

    Example: atorch-ns diff old.json new.json
    """
    from atorch_ns.strategy import diff as compare

    old, new = read_strategy(before), read_strategy(after)
    result = compare(old, new)
    prices: tuple[PricedStrategy, ...] = ()
    if model is not None or profile is not None:
        model_options = ModelOptions(model, sample, loss, optimizer, input_format, profile, cluster)
        prices = _price_strategies((old, new), model_options, batch)
    if as_json:
        print_json(differences_as_json(result, prices))
    else:
        if not result.same:
            typer.echo(f"before: {old}\nafter:  {new}\n")
        typer.echo(str(result))
        if prices:
            from atorch_ns.report import estimates_text

            typer.echo("\n" + estimates_text(prices[0].estimate, prices[1].estimate))
    if not result.same:
        raise typer.Exit(1)


def _price_strategies(
    strategies: tuple[Strategy, Strategy], model_options: ModelOptions, batch: int | None
) -> tuple[PricedStrategy, ...]:
    from atorch_ns.planning.offline import price_strategy

    inputs = read_inputs(model_options)
    profile, _ = make_profile(inputs)
    prices = tuple(price_strategy(each, profile, inputs.cluster, global_batch=batch) for each in strategies)
    for side, strategy in zip(("before", "after"), prices, strict=True):
        for note in strategy.notes:
            say(f"{side}: {note}")
    return prices


def differences_as_json(result: StrategyDiff, prices: tuple[PricedStrategy, ...] = ()) -> dict[str, Any]:
    """Differences as plain values, with the estimates of both sides if given."""
    return {
        "schema": 1,
        "same": result.same,
        "added": [{"name": step.name, "config": step.config} for step in result.added],
        "removed": [{"name": step.name, "config": step.config} for step in result.removed],
        "changed": [item._asdict() for item in result.changed],
        "reordered": result.reordered,
        "estimates": [estimate_as_json(each) for each in prices],
    }
