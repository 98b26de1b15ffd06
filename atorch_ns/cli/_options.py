"""Options that several subcommands share, and checks of their values."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.errors import InputError

# typer reads these for a subcommand's help, so they hold no type that needs torch.
Model = Annotated[
    str | None,
    typer.Option(help="Class of the model, or function that builds it, as pkg.mod:name or file.py:name."),
]
Sample = Annotated[
    str | None,
    typer.Option(help="One batch, or a function that returns one, as pkg.mod:name or file.py:name."),
]
Loss = Annotated[
    str | None,
    typer.Option(
        help="Function (batch, output) -> loss, as pkg.mod:name. Default: output.loss, else the mean of the output."
    ),
]
Optimizer = Annotated[str, typer.Option(help="Class of the optimizer, or none.")]
InputFormatOption = Annotated[
    str,
    typer.Option(
        help="How the batch is passed: auto, none (model(batch)), unpack_sequence, unpack_dict, "
        "first (model(batch[0])), unpack_first (model(**batch[0])). auto unpacks dictionaries and sequences, and passes the first item of a "
        "sequence that forward cannot take whole."
    ),
]
ClusterSpec = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help='Cluster to train on: "8xH100-80GB, 2 nodes, ib400", "2xcpu", or a file. '
        "Default: this machine as one process.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(help="Samples in one step over all ranks. Default: those of the sample on every rank."),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="Memory of one rank, such as 70GiB. Default: all of a GPU, or 0.9 of a rank's share of the host."
    ),
]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Profile from --save-profile, in place of --model and --sample.")
]
Objective = Annotated[str, typer.Option(help="What to optimize: time, memory, batch or cost.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Method or group to leave out. Repeatable.")]
Include = Annotated[
    list[str] | None, typer.Option(help="Method or group to use, or NAME=CONFIG in JSON. Repeatable.")
]
ReportFile = Annotated[Path | None, typer.Option(help="File for the whole report: .html, .json or .txt.")]
STRATEGY_HELP = "Strategy: a file, JSON text, or names such as fsdp,amp_native."
StrategyText = Annotated[str, typer.Option(help=STRATEGY_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def refuse(problems: Iterable[str]) -> None:
    """Raises an :class:`InputError` with all problems, if there are any."""
    if message := "\n".join(problems):
        raise InputError(message)


def unwritable(**options: Path | None) -> list[str]:
    """Problems, a sentence each, of writing to files of options (``_`` for ``-``); leaves nothing behind."""
    problems = []
    for name, path in options.items():
        if path is not None and (why := _why_not(path)):
            problems.append(f"--{name.replace('_', '-')}={path}{why}")
    return problems


def _why_not(path: Path) -> str:
    folder = path.absolute().parent
    if not folder.is_dir():
        return f": the folder {path.parent} does not exist."
    if path.is_dir():
        return " is a folder; name a file in it."
    try:
        if path.exists():
            path.open("ab").close()  # keeps its content
        else:  # a look at permissions is not enough: the file system may be read-only, or full
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b" ")
    except OSError as error:
        return f" cannot be written: {error.strerror or error}."
    return ""


def check_named(**options: str | None) -> None:
    """Raises an :class:`InputError` that names all options without a value, if there are any."""
    missing = [f"--{name}" for name, value in options.items() if not value]
    if missing:
        raise InputError(f"{' and '.join(missing)} missing. Write pkg.mod:name or file.py:name.")
