"""``atorch-ns train``: a training run from a YAML file."""

from __future__ import annotations

from typing import Annotated

import typer


def train(
    context: typer.Context,
    file: Annotated[str, typer.Option("--file", "-f", metavar="CONFIG", help="YAML file of TrainerArgs.")],
) -> None:
    """Train a model from a YAML file, with overrides such as --max_train_steps 100 or --optimizer.args.lr 3e-4.

    On several processes: atorch-ns launch --nproc 4 --module atorch_ns.trainer -f config.yaml

    Example: atorch-ns train -f config.yaml
    """
    from atorch_ns.trainer.trainer import train as run

    trainer = run(["-f", file, *context.args])
    status, args = trainer.train_status, trainer.train_args
    if args.run_mode == "compile":
        typer.echo(f"planned; the plan is in {args.gen_savedir}")
    elif args.checkpoint.no_save:
        typer.echo(f"trained {status.finished_train_steps} steps")
    else:
        typer.echo(
            f"trained {status.finished_train_steps} steps; checkpoints are in {args.checkpoint.save_dir}"
        )
