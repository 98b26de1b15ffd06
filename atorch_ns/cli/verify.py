"""``atorch-ns verify``: a strategy's training compared with one process."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch_ns.cli import _options as options
from atorch_ns.cli._on_ranks import on_ranks
from atorch_ns.cli._planning import check_strategy_is_there, say
from atorch_ns.errors import AtorchError
from atorch_ns.text import count_noun

if TYPE_CHECKING:
    from atorch_ns.numerics.script import ScriptDifference

_TIMEOUT_S = 600.0


def verify(
    strategy: Annotated[str | None, typer.Option(help=options.STRATEGY_HELP)] = None,
    model: options.Model = None,
    sample: options.Sample = None,
    loss: options.Loss = None,
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks on this machine.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 5,
    input_format: options.InputFormatOption = "auto",
    timeout: Annotated[float, typer.Option(help="Time limit of the ranks, in seconds.")] = _TIMEOUT_S,
    script: Annotated[
        Path | None, typer.Option(help="Training script to compare, unchanged. Its arguments come after --.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Parameters to show, the worst first.")] = 10,
    as_json: options.AsJson = False,
) -> None:
    """Train a model under a strategy and in one process, and compare losses, gradients and parameters.

    The exit code is 1 if they differ, 2 if the model cannot be trained. The optimizer is SGD with momentum,
    whose steps show the scale of a gradient.

    With --script, the script runs as it is: in one process, on the ranks, and once more in one process with
    gradients that are off by rounding. After each update of each optimizer, weights, buffers and states are
    compared. Without --strategy, the strategy in the script counts.

    Example: atorch-ns verify --strategy fsdp --model train.py:build --sample train.py:sample --loss train.py:loss
    """
    problems = []
    if script is not None:
        values = {"--model": model, "--sample": sample, "--loss": loss}
        flags = [name for name, value in values.items() if value]
        if flags:
            problems.append(f"--script has its own model, data and loss: leave {', '.join(flags)} out.")
        if not script.is_file():
            problems.append(f"--script={script}: no such file.")
    elif arguments:
        problems.append(f"{' '.join(arguments)}: arguments are those of a script, which --script names.")
    elif strategy is None:
        problems.append("--strategy is missing: a file, JSON text, or names such as fsdp,checkpoint.")
    if steps < 1:
        problems.append(f"--steps={steps}: at least one step is needed.")
    if timeout <= 0:
        problems.append(f"--timeout={timeout:g}: the time limit must be positive.")
    options.refuse(problems)
    if strategy is not None:
        check_strategy_is_there(strategy, "--strategy")  # before ranks are started for it; they read it
    if script is not None:
        path = str(script.absolute())
        request = {"script": path, "strategy": strategy, "steps": steps, "arguments": arguments or []}
        _verify_script(request, nproc, timeout, as_json)
        return
    options.check_named(model=model, sample=sample)
    request = {
        "strategy": strategy,
        "model": model,
        "sample": sample,
        "loss": loss,
        "optimizer": "torch.optim.SGD",  # Adam's steps would hide the scale of a gradient
        "input_format": input_format,
        "steps": steps,
    }
    result = on_ranks("verify", request, nproc=nproc, timeout_s=timeout, as_json=as_json)
    for note in result["notes"]:
        say(note)
    typer.echo(json.dumps(result, indent=1) if as_json else "\n".join(_report_lines(result, top)))
    if not result["passed"]:
        raise typer.Exit(1)


def _verify_script(request: dict[str, Any], nproc: int, timeout: float, as_json: bool) -> None:
    from atorch_ns.numerics.script import compare_runs
    from atorch_ns.processes import scratch_folder

    def run(name: str, where: str, count: int, **more: Any) -> dict[str, Any]:
        say(f"running the script {where} …")
        whole = {**request, "run": name, "folder": str(folder), **more}
        return on_ranks("script", whole, nproc=count, timeout_s=timeout, as_json=as_json)

    with scratch_folder() as folder:
        run("one", "in one process", 1)
        try:
            result = run("ranks", f"on {count_noun(nproc, 'rank')}", nproc)
        except (typer.Exit, AtorchError):  # the runs may have differed before they failed
            first, _ = compare_runs(folder, nproc, reduced=False)
            if first is not None:
                lines = _difference_lines(_as_json(first), first.job + 1)
                say("\n".join(["before that, the runs differed:", *lines]))
            raise
        where = "in one process, with gradients that are off by rounding"
        run("rounding", where, 1, reduced=result["reduced"])  # how far rounding alone moves results
        difference, updates = compare_runs(folder, nproc, reduced=result["reduced"])
    document = {
        "passed": difference is None,
        "strategies": result["strategies"],
        "world_size": nproc,
        "reduced_precision": result["reduced"],
        "num_dropouts": result["dropouts"],
        "difference": None if difference is None else _as_json(difference),
        "updates": [_as_json(update) for update in updates],
    }
    typer.echo(json.dumps(document, indent=1) if as_json else "\n".join(_script_lines(document)))
    if difference is not None:
        raise typer.Exit(1)


def _as_json(difference: ScriptDifference) -> dict[str, Any]:
    # JSON has no NaN and no infinity.
    document = asdict(difference)
    return document | {"error": difference.error if math.isfinite(difference.error) else None}


def _difference_lines(difference: dict[str, Any], num_jobs: int) -> list[str]:
    of_job = f" of job {difference['job'] + 1}" if num_jobs > 1 else ""
    at = f"after update {difference['step']}" if difference["step"] else "before the first update"
    if difference["kind"] == "steps":
        what = f"{difference['name']} did not take this step"
    elif difference["error"] is None:
        what = f"{difference['kind']} {difference['name']} has another shape, is not a number, or exists on one side only"
    else:
        others = f"; {count_noun(difference['others'], 'other tensor')} too" if difference["others"] else ""
        what = (
            f"{difference['kind']} {difference['name']} on rank {difference['rank']} is off by {difference['error']:.1e} "
            f"(rounding: {difference['tolerance']:.1e}){others}"
        )
    lines = [f"  {at}{of_job}: {what}", f"  by {difference['where']}"]
    if not difference["step"]:
        lines.append(
            "  The script starts with other weights than in one process. Does it draw them per rank?"
        )
    return lines


def _script_lines(report: dict[str, Any]) -> list[str]:
    jobs, difference = report["strategies"], report["difference"]
    num_updates = sum(update["step"] > 0 for update in report["updates"])
    verdict = "✓ trains as one process does" if report["passed"] else "✗ does not train as one process does"
    precision = ", in reduced precision" if report["reduced_precision"] else ""
    lines = [
        f"{verdict}: {'; '.join(jobs)} on {count_noun(report['world_size'], 'rank')}, {count_noun(num_updates, 'update')} compared"
        + precision
    ]
    if difference is not None:
        lines += _difference_lines(difference, len(jobs))
    if report["num_dropouts"]:
        lines.append(
            f"  {count_noun(report['num_dropouts'], 'Dropout module')} left out, because ranks draw other masks than one process"
        )
    lines += [
        f"  job {update['job'] + 1}, update {update['step']}: largest error {update['error']:.1e} of {update['tolerance']:.1e} "
        f"({update['kind']} {update['name']})"
        for update in report["updates"]
        if update["error"] is not None
    ]
    return lines


def _drift_verdict(report: dict[str, Any]) -> str:
    drifting = any(row["state"] == "drifts" for row in report["parameters"])
    if not drifting and all("loss" in reason for reason in report["reasons"]):
        return "✗ only the loss differs from one process; no parameter drifts"
    return "✗ does not train as one process does"


def _report_lines(report: dict[str, Any], top: int) -> list[str]:
    rows = report["parameters"]
    verdict = "✓ trains as one process does" if report["passed"] else _drift_verdict(report)
    precision = ", in reduced precision" if report["reduced_precision"] else ""
    samples = f" of {count_noun(report['num_samples'], 'sample')}" if report["num_samples"] else ""
    mode = "training" if report["training"] else "evaluation"
    lines = [
        f"{verdict}: {report['strategy']} on {count_noun(report['world_size'], 'rank')}, "
        f"{count_noun(report['num_steps'], 'step')}{samples}{precision}",
        *(f"  {reason}" for reason in report["reasons"]),
        f"loss: off by {report['loss_error']:.1e} ({report['loss_tolerance']:.1e} allowed)",
        *(f"  step {n}: one process {a:.6f}, ranks {b:.6f}" for n, (a, b) in enumerate(report["losses"], 1)),
        f"parameters: {report['num_judged']} of {len(rows)} judged, in {mode} mode; errors are relative to the gradient "
        "and to the update of all steps",
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
