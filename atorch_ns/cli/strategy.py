"""``atorch-ns strategy``: strategy files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.cli._options import AsJson
from atorch_ns.cli._planning import one_node, print_json, say
from atorch_ns.text import count_noun

app = typer.Typer(help="Show, check, compare and convert strategy files.", no_args_is_help=True)

_SUFFIXES = (".json", ".yaml", ".yml")

File = Annotated[Path, typer.Argument(help="Strategy file, JSON or YAML.")]


@app.command()
def show(file: File, as_json: AsJson = False) -> None:
    """Print a strategy.

    Example: atorch-ns strategy show strategy.json
    """
    from atorch_ns.strategy import Strategy

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
    file: File,
    world_size: Annotated[
        int | None, typer.Option(help="Number of processes. Default: the number in the file, else 1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a strategy for a number of processes, and print all problems. The exit code is 1 if there are any.

    Example: atorch-ns strategy validate strategy.json --world-size 8
    """
    from atorch_ns.errors import InputError, LayoutError, StrategyError
    from atorch_ns.method import load_registry, resolve
    from atorch_ns.strategy import Strategy

    if world_size is not None and world_size < 1:
        raise InputError(
            f"--world-size={world_size}: at least one process is needed. Use --world-size 1 or more."
        )
    strategy = Strategy.load(file)
    cluster = one_node(world_size or strategy.requires.world_size or 1)
    processes = count_noun(cluster.world_size, "process", "processes")
    answer = {"schema": 1, "valid": False, "world_size": cluster.world_size, "strategy": str(strategy)}
    try:
        resolution = resolve(strategy, cluster, load_registry())
    except (StrategyError, LayoutError) as error:  # the answer, not wrong usage
        if as_json:
            problems = [str(each) for each in getattr(error, "problems", ())] or [str(error)]
            print_json({**answer, "notes": [], "problems": problems})
        say(f"not valid for {processes}: {error}")
        raise typer.Exit(1) from None
    notes = [note.text for note in resolution.notes]
    if as_json:
        verdict = {"valid": True, "strategy": str(resolution.strategy), "notes": notes, "problems": []}
        print_json({**answer, **verdict})
    else:
        typer.echo("\n  ".join([f"valid for {processes}: {resolution.strategy}", *notes]))


@app.command()
def diff(before: File, after: File, as_json: AsJson = False) -> None:
    """Compare two strategy files. The exit code is 1 if they differ.

    Example: atorch-ns strategy diff old.json new.json
    """
    from atorch_ns.cli.estimate import differences_as_json
    from atorch_ns.strategy import Strategy
    from atorch_ns.strategy import diff as compare

    result = compare(Strategy.load(before), Strategy.load(after))
    if as_json:
        print_json(differences_as_json(result))
    else:
        typer.echo(str(result))
    if not result.same:
        raise typer.Exit(1)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="File to convert.")],
    output: Annotated[Path, typer.Argument(help="Strategy file to write, JSON or YAML by suffix.")],
    source: Annotated[
        str,
        typer.Option(
            "--from", help="System that wrote the file: atorch, accelerate, deepspeed, or auto to detect it."
        ),
    ] = "auto",
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class", help="Qualified name of a module class that a pickle may refer to. Repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a strategy of ATorch, or a config of Accelerate or DeepSpeed. List settings without a counterpart.

    No code in the file is run. Each setting without a counterpart is listed with its reason.

    Example: atorch-ns strategy convert accelerate.yaml strategy.json
    """
    from atorch_ns.errors import InputError
    from atorch_ns.strategy import convert_file

    if output.suffix.lower() not in _SUFFIXES:
        raise InputError(
            f"{output}: the suffix of a strategy file selects JSON or YAML. Name it {output.stem}.json, .yaml or .yml."
        )
    conversion = convert_file(file, source=source, classes=classes or ())
    conversion.strategy.save(output)
    for warning in conversion.warnings:
        say(f"warning: {warning}")
    if as_json:
        print_json(conversion.as_json())
    else:
        typer.echo(f"{output}: {conversion.strategy}")
        for title, notes in (("carried over", conversion.carried), ("not carried over", conversion.left_out)):
            if notes:
                typer.echo(f"\n{title}:")
                for note in notes:
                    typer.echo(f"  {note.key}: {note.text}")
