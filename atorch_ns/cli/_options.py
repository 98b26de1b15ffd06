"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "Batch",
    "ClusterSpec",
    "InputFormat",
    "Loss",
    "MemoryLimit",
    "Model",
    "Optimizer",
    "ProfileFile",
    "Sample",
]

# typer reads these when a verb's help is asked for, so they hold no type that needs torch.
Model = Annotated[
    str | None,
    typer.Option(help="The model: pkg.mod:name or file.py:name of a class or a function that builds it."),
]
Sample = Annotated[
    str | None,
    typer.Option(help="One batch: pkg.mod:name of a batch, or of a function that returns one."),
]
Loss = Annotated[
    str | None,
    typer.Option(
        help="The loss: pkg.mod:name of (batch, output) -> loss. Without it, the output's own loss, else its mean."
    ),
]
Optimizer = Annotated[str, typer.Option(help="The optimizer's class; 'none' for none.")]
InputFormat = Annotated[
    str,
    typer.Option(
        help="How the batch is passed: auto, none (model(batch)), unpack_sequence, unpack_dict, "
        "first (model(batch[0])). auto unpacks dictionaries and sequences, and passes the first item of a "
        "sequence that forward cannot take whole."
    ),
]
ClusterSpec = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help='What it is to run on, as "8xH100-80GB, 2 nodes, ib400", "2xcpu", or a file. '
        "Without it, this machine as one process.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(help="Samples in one step over all ranks. Without it, the sample's on every rank."),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(help="What one rank may use, as 70GiB. Without it, the device's memory less a tenth."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(help="A profile saved with --save-profile, in place of --model and --sample."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
