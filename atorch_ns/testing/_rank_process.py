"""What happens inside a forked rank: enter the environment, run the function, report, wait, leave.

A rank leaves by ``os._exit``: a process that holds a DeviceMesh may abort while Python finalises. It leaves
only when the parent says that every rank has reported, so that no rank loses its peer inside the last
collective.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["RankFiles", "Report", "Setup", "rank_main"]

# A rank whose parent has vanished ends by itself this long after the time limit.
_ORPHAN_GRACE_S: Final = 30.0
# A rank that raised keeps its connections open this long, so that peers finish the collective they share.
_LINGER_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all ranks of one run share.

    Attributes:
        num_ranks: the world size.
        folder: where the ranks' files lie.
        timeout_s: the time limit that the parent holds, in seconds.
        env: additions to the environment of every rank.
        master_port: the port for ``env://``; None when the rank itself starts the process group here.
    """

    num_ranks: int
    folder: Path
    timeout_s: float
    env: Mapping[str, str]
    master_port: int | None

    def files(self, rank: int) -> RankFiles:
        """The files of one rank."""
        return RankFiles(
            report=self.folder / f"report_{rank}",
            output=self.folder / f"output_{rank}",
            stacks=self.folder / f"stacks_{rank}",
        )


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Where a rank writes its report, what it prints, and its stacks when it is asked for them."""

    report: Path
    output: Path
    stacks: Path


@dataclass(frozen=True, kw_only=True)
class Report:
    """How the function ended on one rank.

    Attributes:
        value: the pickled return value; None when the function raised.
        error: the pickled exception; None when there is none or it does not survive pickling.
        error_type: the name of the exception's class, empty when there is none.
        message: ``str(exception)``.
        traceback: the formatted traceback.
    """

    value: bytes | None = None
    error: bytes | None = field(default=None, repr=False)
    error_type: str = ""
    message: str = ""
    traceback: str = ""


def rank_main(
    fn: Callable[..., Any], args: tuple[Any, ...], setup: Setup, rank: int, release_fd: int
) -> NoReturn:
    """Be rank ``rank`` until the parent closes the other end of ``release_fd``; never returns."""
    exit_code = 1
    try:
        files = setup.files(rank)
        _redirect_output(files.output)
        _arm_stack_dumps(files, setup)
        try:
            _enter(setup, rank)
            report = Report(value=_pickled(fn(*args)))
        except BaseException as error:  # SystemExit too: the report is the only way out of a rank
            report = _error_report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        _write(files.report, report)
        select.select([release_fd], [], [], None if report.value is not None else _LINGER_S)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def rank_environment(setup: Setup, rank: int) -> dict[str, str]:
    """The variables a launcher would set for this rank on one node."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(setup.num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(setup.num_ranks),
    }
    if setup.master_port is not None:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(setup.master_port)}
    return variables | dict(setup.env)


def _enter(setup: Setup, rank: int) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(rank_environment(setup, rank))
    # A rank leaves without cleaning up: its temporary files go when the run's folder goes.
    tempfile.tempdir = str(setup.folder)
    # Ranks that a launcher starts share no random state: a test must not pass because they do here.
    random.seed(rank)
    torch.manual_seed(rank)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(rank)
    if setup.master_port is None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.folder / 'store'}",
            rank=rank,
            world_size=setup.num_ranks,
            timeout=timedelta(seconds=setup.timeout_s + _ORPHAN_GRACE_S),
        )


def _redirect_output(path: Path) -> None:
    """Send what Python and C libraries print to a file; the parent's captured streams stay untouched."""
    with path.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _arm_stack_dumps(files: RankFiles, setup: Setup) -> None:
    """Stacks on SIGUSR1 and on a crash; the end of a rank that nobody waits for any more."""
    stacks = os.open(files.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    faulthandler.dump_traceback_later(setup.timeout_s + _ORPHAN_GRACE_S, exit=True, file=stacks)


class _Pickler(pickle.Pickler):
    """Refuses what would be rebuilt without its ranks."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (DTensor, DeviceMesh)):
            raise pickle.PicklingError(f"a {type(value).__name__} belongs to its ranks")
        return NotImplemented


def _pickled(value: Any) -> bytes:
    data = io.BytesIO()
    try:
        _Pickler(data).dump(value)
    except Exception as error:
        raise TypeError(
            f"the rank's return value of type {type(value).__name__} cannot be sent back: {error}. "
            "Return CPU tensors (full_tensor() of a DTensor) and plain Python values."
        ) from error
    return data.getvalue()


def _error_report(error: BaseException) -> Report:
    return Report(
        error=_surviving_pickle(error),
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _surviving_pickle(error: BaseException) -> bytes | None:
    """The pickled exception if it can be rebuilt from it: many exceptions cannot."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _write(path: Path, report: Report) -> None:
    partial = path.with_name(f"{path.name}.{time.monotonic_ns()}")
    partial.write_bytes(pickle.dumps(report))
    partial.replace(path)
