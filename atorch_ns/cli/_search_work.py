"""``atorch-ns search`` on a rank."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atorch_ns.cli._job import named_job

if TYPE_CHECKING:
    from atorch_ns.search import SearchOutcome

__all__ = ["search_on_rank"]


def search_on_rank(request: Mapping[str, Any]) -> dict[str, Any]:
    """Searches, and lets rank 0 write what was asked for; collective.

    Raises:
        KeyboardInterrupt: if Ctrl-C ended the search before anything was measured.
    """
    from atorch_ns.api import auto_accelerate
    from atorch_ns.cluster import Cluster, agree, join_process_group
    from atorch_ns.engine._sampling import num_samples

    cluster = Cluster.detect()
    join_process_group(cluster)
    job = agree(lambda: named_job(request), what="building the model", distributed=cluster.distributed)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # from here on Ctrl-C ends the search, not the rank
    _, result, strategy = auto_accelerate(
        job.model,
        optim_func=job.optimizer,
        loss_func=job.loss,
        model_input_format=job.input_format,
        sample_batch=job.sample,
        batch_size=request["batch"] or cluster.world_size * num_samples(job.sample),
        excluded=_wishes(request["exclude"]),
        included=_wishes(request["include"]),
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
    found = report.search
    assert found is not None
    if "Ctrl-C" in found.stop_reason and not _is_measured(found):
        raise KeyboardInterrupt
    if request["save"] is not None:
        strategy.save(request["save"])
    if request["report"] is not None:
        report.save(request["report"])
    return {
        "strategy": str(strategy),
        "report": report.to_json(),
        "stop_reason": found.stop_reason,
    }


def _is_measured(found: SearchOutcome) -> bool:
    """Whether what was chosen took steps."""
    return found.winner is not None and found.winner.trial is not None


def _wishes(given: list[Any]) -> list[Any] | None:
    return [tuple(each) if isinstance(each, list) else each for each in given] or None
