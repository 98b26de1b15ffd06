"""How a rank's trials are run: in a process of their own, or, where that cannot be, in the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atorch_ns.cluster import Cluster
from atorch_ns.engine._in_process import InProcessWorker
from atorch_ns.engine._rank_report import Worker
from atorch_ns.engine._rendezvous import Rendezvous
from atorch_ns.engine._request import SearchRequest
from atorch_ns.engine._worker import TrialWorker
from atorch_ns.job import Inputs
from atorch_ns.search import Note, memory_limit

__all__ = ["make_worker"]


def make_worker(
    stack: contextlib.ExitStack,
    inputs: Inputs,
    cluster: Cluster,
    request: SearchRequest,
    *,
    rendezvous: Rendezvous | None,
    log_dir: Path,
    obstacle: str | None,
    carried: Mapping[str, Any] | None = None,
) -> Worker:
    """The worker of this rank; it ends with ``stack``.

    Args:
        stack: closes the worker.
        inputs: with a small dataset.
        cluster: with hardware figures.
        request: what the caller asked for.
        rendezvous: where the ranks of a trial meet.
        log_dir: folder for the logs of trials that fail.
        obstacle: why the arguments of some rank cannot be sent to another process; ``None`` if they can.
        carried: what methods carry to another process, by their names.
    """
    limit = memory_limit(cluster, request.settings).num_bytes or None
    if obstacle is None:
        worker: Worker = TrialWorker(
            inputs,
            cluster,
            rendezvous=rendezvous,
            log_dir=log_dir,
            memory_limit_bytes=limit,
            keep_logs=False,
            carried=carried,
        )
    else:
        worker = InProcessWorker(inputs, cluster, memory_limit_bytes=limit)
        if cluster.rank == 0:
            request.observer(
                Note(
                    f"trials run in this process, since {obstacle}: a trial that crashes or hangs ends the "
                    "search, and its memory is measured together with what this process holds."
                )
            )
    stack.callback(worker.close)
    return worker
