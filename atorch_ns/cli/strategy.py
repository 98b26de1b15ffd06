"""``atorch-ns strategy``: strategy files."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from atorch_ns.cluster import Cluster, installed_packages
from atorch_ns.errors import LayoutError, StrategyError
from atorch_ns.strategy import Strategy, convert_pickle
from atorch_ns.strategy import diff as compare

__all__ = ["app"]

app = typer.Typer(help="Show, check, compare and convert strategy files.", no_args_is_help=True)


@app.command()
def show(file: Path, as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Print a strategy.

    Example: atorch-ns strategy show strategy.json
    """
    strategy = Strategy.load(file)
    if as_json:
        typer.echo(strategy.to_bytes().decode(), nl=False)
        return
    typer.echo(str(strategy))
    for title, facts in (("requires", strategy.requires.as_json()), ("provenance", strategy.provenance)):
        for key, value in facts.items():
            typer.echo(f"  {title}.{key}: {json.dumps(value, ensure_ascii=False)}")


@app.command()
def validate(
    file: Path, world_size: int = typer.Option(0, help="Number of processes; 0 for what the file records.")
) -> None:
    """Check a strategy for a number of processes; every problem is printed. The exit code is 1 if it is not valid.

    Example: atorch-ns strategy validate strategy.json --world-size 8
    """
    from atorch_ns.method import load_registry, resolve

    strategy = Strategy.load(file)
    size = world_size or strategy.requires.world_size or 1
    cluster = Cluster(
        world_size=size, local_world_size=size, distributed=size > 1, packages=installed_packages()
    )
    try:
        resolved = resolve(strategy, cluster, load_registry())
    except (StrategyError, LayoutError) as error:  # the answer, not wrong usage
        typer.echo(f"not valid for {size} process(es): {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"valid for {size} process(es): {resolved.strategy}")
    for note in resolved.notes:
        typer.echo(f"  {note.text}")


@app.command()
def diff(before: Path, after: Path) -> None:
    """Print what differs between two strategies; the exit code is 1 if something does.

    Example: atorch-ns strategy diff old.json new.json
    """
    result = compare(Strategy.load(before), Strategy.load(after))
    typer.echo(str(result))
    if not result.same:
        raise typer.Exit(1)


@app.command()
def convert(
    file: Path,
    output: Path,
    classes: list[str] = typer.Option(  # noqa: B008  # how typer declares options
        [], "--class", help="Qualified name of a module class that the file may refer to; repeatable."
    ),
) -> None:
    """Convert a strategy that ATorch pickled. Nothing in the file is run.

    Example: atorch-ns strategy convert atorch_strategy strategy.json
    """
    strategy = convert_pickle(file, classes=classes)
    strategy.save(output)
    typer.echo(f"{output}: {strategy}")
