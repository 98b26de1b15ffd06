"""torchrun in this process, with the exit code that its script or a signal gave."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["run_torchrun"]

_FAILED = 1


def run_torchrun(arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs torchrun to its end; call it on the main thread, once in a process.

    Args:
        arguments: for torchrun.
        variables: for the environment of this process and of all that it starts.

    Returns:
        0, or the exit code of the rank that failed first, with 128 and its number for a signal: one that ended that rank,
        or else one that came to this process.
    """
    os.environ.update(variables)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(list(arguments))
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        return _code_of(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # before torchrun has started anything
        return 130
    return 0


def _code_of(error: Any) -> int:
    """Of the first failure: a process that a signal ended has a negative code."""
    _, failure = error.get_first_failure()
    code = int(failure.exitcode)
    return 128 - code if code < 0 else code or _FAILED
