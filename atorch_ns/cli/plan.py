"""``atorch-ns plan``: strategies ranked by prediction, for a cluster that need not exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atorch_ns.capture.user_code import constraint, gibibytes
from atorch_ns.cli import _options as options
from atorch_ns.cli._planning import (
    ModelOptions,
    all_or_problems,
    make_cluster,
    make_model,
    make_profile,
    make_settings,
    read_inputs,
    say,
    terminal_columns,
)
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from atorch_ns.cluster import Cluster
    from atorch_ns.profile import Profile
    from atorch_ns.search import SearchOutcome


def plan(
    model: options.Model = None,
    sample: options.Sample = None,
    cluster: options.ClusterSpec = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "torch.optim.AdamW",
    batch: options.Batch = None,
    objective: options.Objective = "time",
    memory_limit: options.MemoryLimit = None,
    exclude: options.Exclude = None,
    include: options.Include = None,
    top: Annotated[int, typer.Option(min=1, help="Candidates to show.")] = 10,
    save: Annotated[
        Path | None, typer.Option(help="File for the best strategy, JSON or YAML by suffix.")
    ] = None,
    report: options.ReportFile = None,
    profile: options.ProfileFile = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="File for the profile, to plan again without the model.")
    ] = None,
    operators: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="RANKS",
            help="Plan operator_parallel for the sample on RANKS ranks of one node instead; --save writes it.",
        ),
    ] = None,
    input_format: options.InputFormatOption = "auto",
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show the operators that take the most work in the best step."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Rank strategies for a model on a cluster, from predictions alone. The exit code is 3 if none fits.

    Example: atorch-ns plan --model train.py:build --sample train.py:sample --cluster "8xH100-80GB, 2 nodes, ib400"
    """
    from atorch_ns.planning.offline import plan_offline
    from atorch_ns.report import TrainingReport, search_text
    from atorch_ns.report.report import write_text
    from atorch_ns.strategy import Strategy

    unwritable = options.unwritable(save=save, report=report, save_profile=save_profile)
    if operators is not None:
        options.refuse(unwritable)
        request = ModelOptions(model=model, sample=sample, input_format=input_format, cluster=cluster)
        _plan_operators(request, operators, memory_limit, top=top, save=save, as_json=as_json)
        return
    inputs, settings, _ = all_or_problems(
        lambda: read_inputs(ModelOptions(model, sample, loss, optimizer, input_format, profile, cluster)),
        lambda: make_settings(objective=objective, memory_limit=memory_limit),
        lambda: options.refuse(unwritable),
    )
    model_profile, seconds = make_profile(inputs)
    machines = inputs.cluster
    outcome = plan_offline(
        model_profile,
        machines,
        global_batch=batch,
        settings=settings,
        excluded=[constraint(text) for text in exclude or ()],
        included=[constraint(text) for text in include or ()],
        profile_seconds=seconds,
    )
    whole = TrainingReport(search=outcome)
    if as_json:
        typer.echo(whole.to_json(), nl=False)
    else:
        typer.echo(search_text(outcome, width=terminal_columns(), top=top))
        if verbose:
            typer.echo(_operators_report(model_profile, outcome, machines))
    if save_profile is not None:
        write_text(save_profile, model_profile.to_json())
        say(f"profile written to {save_profile}")
    if report is not None:
        whole.save(report)
        say(f"report written to {report}")
    if outcome.best is None:
        say(f"atorch-ns: nothing fits. {outcome.nearest_miss}")
        raise typer.Exit(3)
    if save is not None:
        strategy = whole.strategy
        requires = replace(strategy.requires, device=machines.device_type)
        Strategy(strategy, requires=requires, provenance=strategy.provenance).save(save)
        say(f"strategy written to {save}")


def _plan_operators(
    inputs: ModelOptions, degree: int, memory_limit: str | None, *, top: int, save: Path | None, as_json: bool
) -> None:
    import torch

    from atorch_ns.data import call_arguments
    from atorch_ns.operators import OperatorPrices, States, capture_shallow, costs_text, solved_plan
    from atorch_ns.text import count_noun

    cluster = make_cluster(inputs.cluster)
    if inputs.cluster is not None and degree > cluster.world_size:
        raise InputError(
            f"--operators {degree} is more than the cluster's {count_noun(cluster.world_size, 'device')}."
        )
    network, batch, how = make_model(inputs)
    args, kwargs = call_arguments(network, batch, None if how == "none" else how)
    device = torch.device("cpu")  # captured on fake tensors
    shallow = capture_shallow(network.train(), args, kwargs, device=device)
    prices = OperatorPrices.of(network, cluster, degree)
    limit = gibibytes(memory_limit)
    solution = solved_plan(
        shallow.graph,
        degree,
        prices,
        States(),
        device=device,
        memory_limit=float(prices.device.memory_bytes) or None if limit is None else limit * 2**30,
    )
    if as_json:
        typer.echo(solution.plan.text, nl=False)
    else:
        typer.echo(
            f"{type(network).__name__} in {prices.compute_dtype} on {degree} ranks: {solution.text}\n"
            f"Figures of the device: {prices.device.source}.\n\n{solution.plan.describe()}\n\n"
            f"The longest operators (predicted)\n{costs_text(solution.costs, top=top)}"
        )
    if save is not None:
        solution.plan.write(save)
        say(f'operator plan written to {save}; use it with ("operator_parallel", {{"plan": "{save}"}})')


def _operators_report(profile: Profile, outcome: SearchOutcome, cluster: Cluster) -> str:
    from atorch_ns.estimate import Workload
    from atorch_ns.method import load_registry, resolve
    from atorch_ns.report import operators_info, operators_text

    row = outcome.winner or (outcome.rows[0] if outcome.rows else None)  # no winner: nothing fits
    if row is None or profile.trace is None:
        return ""
    resolution = resolve(row.candidate.strategy, cluster, load_registry(), profile=profile)
    workload = Workload(global_batch=outcome.setting.global_batch, num_tokens=outcome.setting.num_tokens)
    info = operators_info(profile.trace, resolution.plan, workload, world_size=cluster.world_size)
    table = operators_text(info, width=terminal_columns())
    return f"\nOperators of one rank's step with {row.candidate.label} ({info.precision})\n{table}"
