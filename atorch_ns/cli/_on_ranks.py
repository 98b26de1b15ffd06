"""Work that needs ranks: they are started, asked, and their answer is read."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from atorch_ns.cli._debug import split_debug
from atorch_ns.cli._planning import say
from atorch_ns.errors import BackendError, InputError

if TYPE_CHECKING:
    from atorch_ns.launch import RankEnd

__all__ = ["check_named", "failure_in_json", "on_ranks"]


@contextmanager
def failure_in_json(wanted: bool) -> Iterator[None]:
    """What the block raises is also a record on standard output, for programs, if that is wanted."""
    from atorch_ns.cli import described, exit_code

    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if wanted:
            _tell(described(error), exit_code(error), None)
        raise


def on_ranks(
    work: str,
    request: Mapping[str, Any],
    *,
    nproc: int,
    timeout_s: float | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Starts ``nproc`` ranks for the work and returns what rank 0 found.

    What goes wrong on a rank ends the command with the rank's message and exit code; with ``as_json`` also as a record on
    standard output.

    Raises:
        InputError: if there are no ranks.
        BackendError: if a rank ended without a word, or did not end in time.
    """
    from atorch_ns.launch import run_local_ranks

    if nproc < 1:
        raise InputError(f"--nproc={nproc}: at least one process is needed. Use --nproc 1 or more.")
    with tempfile.TemporaryDirectory(prefix="atorch_ns_") as name:
        folder = Path(name)
        asked = {**request, "debug": split_debug(sys.argv[1:])[1]}
        (folder / "request.json").write_text(json.dumps(asked))
        ends = run_local_ranks("atorch_ns.cli._rank", [work, name], nproc, timeout_s=timeout_s)
        answers = {
            rank: json.loads(path.read_text())
            for rank in range(nproc)
            if (path := folder / f"answer_{rank}.json").exists()
        }
    errors = {rank: answer for rank, answer in answers.items() if "error" in answer}
    if errors:
        _end(errors, [end for end in ends if end.rank not in answers and not end.ended_by_us], as_json)
    if 0 not in answers:
        late = [str(end.rank) for end in ends if end.ended_by_us]
        broken = [end for end in ends if end.code and not end.ended_by_us]
        if broken:
            told = f": {broken[0].output}" if broken[0].output else ""
            raise BackendError(
                f"rank {broken[0].rank} ended with code {broken[0].code} and without a word{told}"
            )
        raise BackendError(f"rank(s) {', '.join(late)} did not end within {timeout_s or 0:.0f} s.")
    found: dict[str, Any] = answers[0]["value"]
    return found


def check_named(**options: str | None) -> None:
    """All options that must name something do.

    Raises:
        InputError: naming all that are missing.
    """
    missing = [f"--{name}" for name, value in options.items() if not value]
    if missing:
        raise InputError(f"{' and '.join(missing)} missing. Write pkg.mod:name or file.py:name.")


def _end(errors: Mapping[int, Mapping[str, Any]], silent: Sequence[RankEnd], as_json: bool) -> NoReturn:
    """Says the first error that is a rank's own and not about another, and what ranks printed that died."""
    own = [rank for rank, answer in errors.items() if answer.get("kind") != "RankError"]
    rank = (own or list(errors))[0]
    where = f" (rank {rank})" if len(errors) > 1 and rank else ""
    say(f"atorch-ns: {errors[rank]['error']}{where}")
    for end in silent:
        told = f": {end.output}" if end.output else ""
        say(f"  rank {end.rank} ended with code {end.code} and without a word{told}")
    code = int(errors[rank]["code"])
    if as_json:
        _tell(errors[rank]["error"], code, rank)
    raise typer.Exit(code)


def _tell(error: str, code: int, rank: int | None) -> None:
    record = {"schema": 1, "error": error, "code": code, "rank": rank}
    typer.echo(json.dumps(record, indent=1, ensure_ascii=False))
