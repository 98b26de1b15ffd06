"""Work on local ranks: starts them, hands them a request, and returns rank 0's answer or ends the command."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer

from atorch_ns.cli._failures import failure_record, split_debug
from atorch_ns.cli._planning import say
from atorch_ns.errors import BackendError, InputError

if TYPE_CHECKING:
    from atorch_ns.processes import RankEnd


_NOTHING_KEPT: Final = {  # ends of a message after a signal
    "search": ": no strategy was saved",
    "verify": " before it had a verdict",
    "calibrate": ": no file was written",
}


def on_ranks(
    work: str,
    request: Mapping[str, Any],
    *,
    nproc: int,
    timeout_s: float | None = None,
    as_json: bool = False,
    patient: bool = False,
) -> dict[str, Any]:
    """Starts ``nproc`` ranks for the work and returns rank 0's answer.

    A rank's failure ends the command with its message and exit code. A signal ends it with 128 + its number.

    Args:
        work: verb, a key of ``WORKS`` in ``_rank_work``.
        request, nproc: plain values for the ranks, and their number.
        timeout_s: seconds until they are ended.
        as_json: a failure is also a record on standard output.
        patient: Ctrl-C lets rank 0 end in its own time.

    Raises:
        InputError: if there are no ranks.
        BackendError: if a rank ended without an answer, or did not end in time.
    """
    from atorch_ns.processes import run_local_ranks, scratch_folder

    if nproc < 1:
        raise InputError(f"--nproc={nproc}: at least one process is needed. Use --nproc 1 or more.")
    with scratch_folder() as folder:
        whole_request = {**request, "debug": split_debug(sys.argv[1:])[1]}  # main() has removed --debug
        (folder / "request.json").write_text(json.dumps(whole_request))
        try:
            ends = run_local_ranks(
                "atorch_ns.cli._rank_work", [work, str(folder)], nproc, timeout_s=timeout_s, patient=patient
            )
        except SystemExit as stopped:
            _exit_on_signal(work, int(stopped.code or 0), as_json)
        answers = {  # a rank that died has none
            rank: json.loads(path.read_text())
            for rank in range(nproc)
            if (path := folder / f"answer_{rank}.json").exists()
        }
    errors = {rank: answer for rank, answer in answers.items() if "error" in answer}
    if errors:
        _fail_with(errors, [end for end in ends if end.rank not in answers and not end.ended_by_us], as_json)
    if 0 not in answers:
        late = [str(end.rank) for end in ends if end.ended_by_us]  # at the time limit
        failures = [end for end in ends if end.code and not end.ended_by_us]  # died
        if failures:
            raise BackendError(_silent_end(failures[0]))
        who = f"rank {late[0]}" if len(late) == 1 else f"the ranks {', '.join(late)}"
        raise BackendError(f"{who} did not end within {timeout_s or 0:.0f} s.")
    result: dict[str, Any] = answers[0]["value"]
    return result


def _exit_on_signal(work: str, code: int, as_json: bool) -> NoReturn:
    number = signal.Signals(code - 128)  # 128 + number, as in a shell
    how = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    text = f"{work} was {how}{_NOTHING_KEPT.get(work, '')}."
    say(f"atorch-ns: {text}")
    if as_json:
        typer.echo(failure_record(text, code))
    raise typer.Exit(code)


def _fail_with(errors: Mapping[int, Mapping[str, Any]], silent: Sequence[RankEnd], as_json: bool) -> NoReturn:
    # A RankError only reports another rank's failure: the rank where it began is named if it answered.
    sources = [rank for rank, answer in errors.items() if answer.get("kind") != "RankError"]
    rank = (sources or list(errors))[0]
    where = f" (rank {rank})" if len(errors) > 1 and rank else ""
    say(f"atorch-ns: {errors[rank]['error']}{where}")
    for end in silent:  # ended by themselves, without an answer
        say(f"  {_silent_end(end)}")
    code = int(errors[rank]["code"])
    if as_json:
        typer.echo(failure_record(errors[rank]["error"], code, rank))
    raise typer.Exit(code)


def _silent_end(end: RankEnd) -> str:
    how = f"ended with code {end.code}"
    if end.code < 0:  # negative as subprocess has it
        how = f"was ended by {signal.Signals(-end.code).name}"
    if end.code == -signal.SIGKILL:
        how += ", as the system ends processes when memory runs out"
    lines = indent(end.output, "    ")
    output = f". The end of its output:\n{lines}" if end.output else "; it printed nothing"
    return f"rank {end.rank} {how}, without a message{output}"
