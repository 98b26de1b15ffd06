"""Program of each rank of a subcommand that trains: ``python -m atorch_ns.cli._rank_work COMMAND FOLDER``."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from atorch_ns.capture.user_code import build_model, load_object, load_sample
from atorch_ns.cli._failures import describe, exit_code
from atorch_ns.cli._planning import read_strategy, say
from atorch_ns.errors import BackendError, InputError
from atorch_ns.system import write_whole
from atorch_ns.text import count_noun, error_text, with_article

_SEED = 0  # the same on all ranks, and in each run of verify --script


def named_job(request: Mapping[str, Any]) -> dict[str, Any]:
    """The objects of a request, as arguments of ``auto_accelerate`` or ``Inputs``; seeded alike on all ranks.

    Raises:
        InputError: if something cannot be found, built or used.
    """
    import torch

    from atorch_ns.engine.input_format import check_format, chosen_format
    from atorch_ns.planning.offline import AssumedLoss

    torch.manual_seed(_SEED)
    model, _ = build_model(request["model"], on_meta=False)  # trained here, so with values
    sample = load_sample(request["sample"])
    loss = AssumedLoss() if request["loss"] is None else load_object(request["loss"], option="--loss")
    if not callable(loss):
        raise InputError(
            f"--loss={request['loss']!r} is {with_article(loss)}; it must be a function (batch, output) -> loss."
        )
    input_format, why = chosen_format(check_format(request["input_format"]), model, sample)
    if why and os.environ.get("RANK", "0") == "0":  # rank 0 speaks for all
        say(why)
    optimizer = load_object(request["optimizer"], option="--optimizer")
    if not callable(optimizer):
        raise InputError(
            f"--optimizer={request['optimizer']!r} is {with_article(optimizer)}; it must make an optimizer."
        )
    return {
        "model": model,
        "optim_func": optimizer,
        "loss_func": loss,
        "model_input_format": None if input_format == "none" else input_format,
        "sample_batch": sample,
    }


def search_on_rank(request: Mapping[str, Any]) -> dict[str, Any]:
    """Searches, and writes the requested files on rank 0. Collective.

    Raises:
        KeyboardInterrupt: if Ctrl-C ended the search before anything was measured.
    """
    from atorch_ns.api import auto_accelerate
    from atorch_ns.cluster import Cluster, join_process_group
    from atorch_ns.job.sampling import num_samples

    cluster = Cluster.detect()
    join_process_group(cluster)
    job = cluster.agree(lambda: named_job(request), what="building the model")
    # Ctrl-C ends the search from now on, not the rank.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _, result, strategy = auto_accelerate(
        **job,
        batch_size=request["batch"] or cluster.world_size * num_samples(job["sample_batch"]),
        excluded=_read_constraints(request["exclude"]),
        included=_read_constraints(request["include"]),
        search=request["settings"],
        search_history=request["history"],
        search_logs=request["logs"],
        verbose=request["verbose"],
    )
    assert result is not None
    assert strategy is not None
    if cluster.rank != 0:
        return {}
    report = result.report
    outcome = report.search
    assert outcome is not None
    if "Ctrl-C" in outcome.stop_reason and not (  # ended by Ctrl-C with predictions alone
        outcome.winner is not None and outcome.winner.trial is not None
    ):
        raise KeyboardInterrupt
    if request["save"] is not None:
        strategy.save(request["save"])
    if request["report"] is not None:
        report.save(request["report"])
    return {"strategy": str(strategy), "report": report.to_json(), "stop_reason": outcome.stop_reason}


def _read_constraints(constraints: list[Any]) -> list[Any] | None:
    return [tuple(each) if isinstance(each, list) else each for each in constraints] or None  # JSON has lists


def verify_on_rank(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the strategy with one process. Collective."""
    from atorch_ns.cluster import Cluster, join_process_group
    from atorch_ns.job import Inputs
    from atorch_ns.method import load_registry
    from atorch_ns.verify import verify

    cluster = Cluster.detect()
    join_process_group(cluster)
    inputs, strategy = cluster.agree(
        lambda: (Inputs(**named_job(request)), read_strategy(request["strategy"])), what="building the model"
    )
    return verify(inputs, cluster, strategy, load_registry(), num_steps=request["steps"]).as_json()


def script_on_rank(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a script as it is, and records the state after each update of its jobs.

    Raises:
        InputError: if it has no job, or is not there.
    """
    import numpy as np
    import torch

    from atorch_ns.apply import WATCH
    from atorch_ns.numerics.script import REDUCED_ROUNDING, ROUNDING, ScriptWatch

    script, is_shown = Path(request["script"]), request["run"] == "ranks"
    strategy: Any = (  # []: one process; None: the strategy that the script names
        [] if not is_shown else None if request["strategy"] is None else read_strategy(request["strategy"])
    )
    rounding = 0.0 if request["run"] != "rounding" else REDUCED_ROUNDING if request["reduced"] else ROUNDING
    watch = ScriptWatch(Path(request["folder"]) / request["run"], strategy, request["steps"], rounding)
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    sys.argv = [str(script), *request["arguments"]]
    sys.path.insert(0, str(script.parent))  # as python SCRIPT does
    WATCH.set(watch)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(sys.stdout if is_shown else nowhere):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:  # the watch ends it so after the asked steps
            if ended.code not in (None, 0):
                raise InputError(f"{script.name} exited with {ended.code!r}.") from ended
    if not watch.strategies:
        raise InputError(
            f"{script.name} created no job with an optimizer: only jobs from auto_accelerate, parallelize, the Trainer "
            "and MerakTrainer can be compared."
        )
    return {"strategies": watch.strategies, "reduced": watch.is_reduced, "dropouts": watch.num_dropouts}


def calibrate_on_rank(request: Mapping[str, Any], check: Callable[[], None] | None = None) -> dict[str, Any]:
    """Measures devices and links. Rank 0 gets the file's content and comparisons with the table. Collective.

    ``check`` refuses, on rank 0, problems that would show too late after the measurement; then all ranks end.
    """
    import torch

    from atorch_ns.cluster import Cluster, join_process_group
    from atorch_ns.cluster.calibrate import measure
    from atorch_ns.cluster.measured import comparisons, machine_name, measured_document

    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if torch.cuda.is_available() and local_rank >= gpus:
        raise BackendError(
            f"local rank {local_rank} has no GPU: torch sees {gpus} here. Start one rank per GPU, and let every rank see "
            "all GPUs (CUDA_VISIBLE_DEVICES; under Slurm --gpu-bind=none)."
        )
    cluster = Cluster.detect()
    if request["device"] not in (None, cluster.device_type):
        raise BackendError(
            f"--device={request['device']}: torch has {cluster.device_type} here. atorch-ns doctor says why a GPU is not seen."
        )
    join_process_group(cluster)
    if check is not None:
        cluster.agree(check if cluster.rank == 0 else lambda: None, what="checking the options")
    with cluster.sharing_failures("calibrating"):
        found_on = cluster.gathered(machine_name(cluster))
        if len(set(found_on)) > 1:
            raise InputError(
                f"the ranks have different devices, but a file describes only one kind: {', '.join(sorted(set(found_on)))}. "
                "Measure each kind separately."
            )
        tell = say if cluster.rank == 0 else None
        if tell is not None:
            where = f" on {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
            tell(
                f"measuring {count_noun(cluster.world_size, 'rank')}{where}, each {found_on[0]} ({cluster.device_type}) …"
            )
        figures = measure(cluster, seconds=request["seconds"], thorough=True, say=tell)
    if cluster.rank:
        return {}
    return {"document": measured_document(cluster, figures), "comparisons": list(comparisons(figures))}


def main() -> NoReturn:
    """Handles the folder's ``request.json``, and leaves an answer there.

    A process that holds a mesh may abort while Python finalises, so this one leaves without.
    """
    work, folder = sys.argv[1], Path(sys.argv[2])
    request = json.loads((folder / "request.json").read_text())
    if request.get("debug"):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C shows a traceback
    code, answer = _attempt_work(WORKS[work], request)
    write_whole(folder / f"answer_{os.environ['RANK']}.json", json.dumps(answer), durable=False)  # temporary
    _leave_process_group()  # only once the answer is there: leaving may fail
    sys.stdout.flush()  # os._exit does not flush
    sys.stderr.flush()
    os._exit(code)


def _attempt_work(
    work: Callable[[Mapping[str, Any]], dict[str, Any]], request: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    try:
        return 0, {"value": work(request)}
    except KeyboardInterrupt:
        if request.get("debug"):
            traceback.print_exc()
        return 130, {"error": "interrupted.", "code": 130}
    except SystemExit as error:
        return 2, {"error": f"the model or the loss ended the process: {error_text(error)}.", "code": 2}
    except Exception as error:
        if request.get("debug"):
            traceback.print_exc()
        code = exit_code(error)
        return code, {"error": describe(error), "code": code, "kind": type(error).__name__}


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with suppress(Exception):  # another rank is gone already; this one is about to be
            dist.destroy_process_group()


WORKS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "search": search_on_rank,
    "verify": verify_on_rank,
    "script": script_on_rank,
    "calibrate": calibrate_on_rank,
}

if __name__ == "__main__":
    main()
