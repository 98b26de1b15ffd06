"""``atorch-ns verify``: a strategy's training compared with one process."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from atorch_ns.cli import _options as options
from atorch_ns.cli._on_ranks import on_ranks
from atorch_ns.cli._planning import check_strategy_is_there, say
from atorch_ns.text import counted

_TIMEOUT_S = 600.0


def verify(
    strategy: options.StrategyText,
    model: options.Model = None,
    sample: options.Sample = None,
    loss: options.Loss = None,
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks to train on, on this machine.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps that are compared.")] = 5,
    input_format: options.InputFormatOption = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = _TIMEOUT_S,
    top: Annotated[int, typer.Option(min=1, help="Parameters shown, the worst first.")] = 10,
    as_json: options.AsJson = False,
) -> None:
    """Train a model under a strategy and in one process, and compare losses, gradients and parameters.

    The exit code is 1 if something drifts, 2 if the model cannot be trained. The optimizer is SGD with momentum, whose steps show the scale of a gradient.

    Example: atorch-ns verify --strategy fsdp --model train.py:build --sample train.py:sample --loss train.py:loss
    """
    options.check_named(model=model, sample=sample)
    problems = []
    if steps < 1:
        problems.append(f"--steps={steps}: at least one step is needed.")
    if timeout <= 0:
        problems.append(f"--timeout={timeout:g}: the time limit must be positive.")
    options.refuse(problems)
    check_strategy_is_there(strategy, "--strategy")  # before ranks are started for it; they read it
    request = {
        "strategy": strategy,
        "model": model,
        "sample": sample,
        "loss": loss,
        "optimizer": "torch.optim.SGD",
        "input_format": input_format,
        "steps": steps,
    }
    found = on_ranks("verify", request, nproc=nproc, timeout_s=timeout, as_json=as_json)
    for note in found["notes"]:
        say(note)
    typer.echo(json.dumps(found, indent=1) if as_json else "\n".join(_lines(found, top)))
    if not found["passed"]:
        raise typer.Exit(1)


def _drift(found: dict[str, Any]) -> str:
    """The verdict, which names the loss if nothing else drifts."""
    drifting = any(row["state"] == "drifts" for row in found["parameters"])
    if not drifting and all("loss" in reason for reason in found["reasons"]):
        return "✗ the loss alone is not what one process gives; no parameter drifts"
    return "✗ does not train as one process does"


def _lines(found: dict[str, Any], top: int) -> list[str]:
    rows = found["parameters"]
    verdict = "✓ trains as one process does" if found["passed"] else _drift(found)
    precision = ", in reduced precision" if found["reduced_precision"] else ""
    samples = f" of {counted(found['num_samples'], 'sample')}" if found["num_samples"] else ""
    mode = "training" if found["training"] else "evaluation"
    lines = [
        f"{verdict}: {found['strategy']} on {counted(found['world_size'], 'rank')}, "
        f"{counted(found['num_steps'], 'step')}{samples}{precision}",
        *(f"  {reason}" for reason in found["reasons"]),
        f"loss: off by {found['loss_error']:.1e}, {found['loss_tolerance']:.1e} allowed",
        *(f"  step {n}: one process {a:.6f}, ranks {b:.6f}" for n, (a, b) in enumerate(found["losses"], 1)),
        f"parameters: {found['num_judged']} of {len(rows)} judged, in {mode} mode; errors in units of the gradient, "
        "and of the update of all steps",
    ]
    width = max((len(row["name"]) for row in rows[:top]), default=0)
    lines += [
        f"  {row['name']:<{width}}  gradient {row['gradient_error']:.1e} ({row['gradient_tolerance']:.1e})  "
        f"parameter {row['parameter_error']:.1e} ({row['parameter_tolerance']:.1e})  {row['state']}"
        for row in rows[:top]
    ]
    if len(rows) > top:
        lines.append(f"  and {len(rows) - top} more, none worse")
    return lines
