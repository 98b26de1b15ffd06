"""``atorch-ns verify`` on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch_ns.cli._job import named_job
from atorch_ns.cli._strategies import read_strategy

__all__ = ["verify_on_rank"]


def verify_on_rank(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the strategy with one process; collective."""
    from atorch_ns.cluster import Cluster, agree, join_process_group
    from atorch_ns.job import Inputs
    from atorch_ns.method import load_registry
    from atorch_ns.verify import verify

    cluster = Cluster.detect()
    join_process_group(cluster)
    inputs, strategy = agree(
        lambda: (_inputs(request, Inputs), read_strategy(request["strategy"])),
        what="building the model",
        distributed=cluster.distributed,
    )
    found = verify(inputs, cluster, strategy, load_registry(), num_steps=request["steps"])
    return found.as_json()


def _inputs(request: Mapping[str, Any], make: Any) -> Any:
    job = named_job(request)
    return make(
        model=job.model,
        optim_func=job.optimizer,
        loss_func=job.loss,
        model_input_format=job.input_format,
        sample_batch=job.sample,
    )
