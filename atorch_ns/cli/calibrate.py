"""``atorch-ns calibrate``: speeds of a cluster's devices and links, measured, shown and kept in a file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atorch_ns.cli import _options as options
from atorch_ns.cli._on_ranks import on_ranks
from atorch_ns.cli._planning import print_json, say
from atorch_ns.errors import BackendError, InputError

_SUFFIXES: Final = (".yaml", ".yml", ".json")
_SPARE_S: Final = 300.0  # for ranks to start, and for the least number of rounds on a slow network


def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, YAML or JSON by suffix.")
    ] = Path("calibration.yaml"),
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "-n", help="Ranks on this machine. Default: one for each GPU, or 2 on CPUs."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds for the measurement.")] = 60.0,
    device: Annotated[
        str | None,
        typer.Option(help="Device to measure, cuda or cpu. It is an error if this machine has none."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure devices and links, compare them with the table, and write a cluster file.

    It measures matrix products by dtype and size, attention, element-wise operators, the launch of an operator,
    collectives by size, and how well collectives overlap with computation. Pass the file to a search as
    search_calibration, and to plan or estimate as --cluster. Under torchrun or srun on several nodes, it
    measures the links between nodes too.

    Example: atorch-ns calibrate --nproc 2 --seconds 30 --output calibration.yaml
    """
    has_ranks = _join_launcher()
    options.refuse(_option_problems(nproc, seconds, device, has_ranks=has_ranks))
    request = {"seconds": seconds, "device": device}
    if has_ranks:
        from atorch_ns.cli._rank_work import calibrate_on_rank

        results = calibrate_on_rank(request, lambda: _check_file(output))
    else:
        _check_file(output)
        ranks = nproc or _num_gpus() or 2  # links need two
        results = on_ranks(
            "calibrate", request, nproc=ranks, timeout_s=3 * seconds + _SPARE_S, as_json=as_json
        )
    if results:  # on rank 0
        _show_results(results, output, as_json)


def _show_results(results: Mapping[str, Any], output: Path, as_json: bool) -> None:
    from atorch_ns.cluster.measured import Comparison, write_measured
    from atorch_ns.report.text.text import comparisons_text

    rows = [Comparison(*each) for each in results["comparisons"]]
    if as_json:
        comparisons = [{**row._asdict(), "share": row.share} for row in rows]
        print_json({"schema": 1, "cluster": results["document"], "comparisons": comparisons})
    else:
        typer.echo(comparisons_text(rows))
    write_measured(output, results["document"])
    say(f"figures written to {output}; use: search_calibration={str(output)!r}, --cluster {output}")


def _option_problems(nproc: int | None, seconds: float, device: str | None, *, has_ranks: bool) -> list[str]:
    problems = []
    if not (seconds > 0 and math.isfinite(seconds)):
        problems.append(f"--seconds={seconds:g}: the time must be positive.")
    if device not in (None, "cuda", "cpu"):
        problems.append(f"--device={device!r} is not a type of device; write cuda or cpu.")
    if nproc is not None and has_ranks:
        problems.append(
            f"--nproc={nproc}: the launcher has started the ranks to measure on. Leave it out here."
        )
    elif nproc is not None and nproc < 1:
        problems.append(f"--nproc={nproc}: at least one process is needed.")
    elif nproc is not None and (gpus := _num_gpus()) and nproc > gpus:
        problems.append(f"--nproc={nproc}: torch sees {gpus} GPU(s) here, and each rank needs its own.")
    return problems


def _check_file(output: Path) -> None:
    from atorch_ns.cluster.measured import holds_something_else

    if output.suffix not in _SUFFIXES:
        raise InputError(f"--output={output}: the suffix selects the format; use {', '.join(_SUFFIXES)}.")
    options.refuse(options.unwritable(output=output))
    if holds_something_else(output):
        raise InputError(
            f"--output={output} exists and holds something other than measured speeds. Name another file."
        )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _join_launcher() -> bool:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        os.environ.update(slurm_variables(os.environ))  # torch reads torchrun's variables
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if len(missing) == 1:
        raise BackendError(
            f"the environment names ranks but lacks {missing[0]}. Start this with torchrun or srun, or unset the other "
            "one to measure this machine alone."
        )
    return not missing  # whether a launcher has started the ranks


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun, from those that ``srun`` gives to each of several tasks; else none.

    Raises:
        BackendError: if some are missing, or nodes have different numbers of tasks.
    """
    world_size = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_PROCID" not in environ or world_size == "1":
        return {}  # not under srun, or a single task
    try:
        nodes, job = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_JOB_ID"])
        rank, local_rank = environ["SLURM_PROCID"], environ["SLURM_LOCALID"]
        # The list is as a1,b[02-05,07]; the first node is that of task 0.
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", environ["SLURM_STEP_NODELIST"])
    except (KeyError, ValueError) as error:
        raise BackendError(
            f"srun has started {world_size} tasks, but {error} is not as expected. Start torchrun with srun instead, as in "
            "examples/launch/slurm.sbatch."
        ) from error
    if int(world_size) % nodes:
        raise BackendError(
            f"srun has started {world_size} tasks on {nodes} nodes; give each node the same number: --ntasks-per-node."
        )
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(int(world_size) // nodes),
        "MASTER_ADDR": environ.get("MASTER_ADDR")
        or re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else ""),  # b[02-05] to b02
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + job % 20000),  # two jobs may share a node
    }
