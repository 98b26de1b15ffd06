"""Replication of a model of which each rank holds a part."""

from __future__ import annotations

from atorch_ns.job import Job
from atorch_ns.torch_compat import replicate
from opt_lib._expert_shards import replicate_experts
from opt_lib._fully_shard import skip_sync
from opt_lib._shard_parts import Switch, broadcast_from_first, kept_whole

__all__ = ["replicate_parts"]


def replicate_parts(job: Job, method: str) -> None:
    """Averages gradients over the data ranks that hold the same part; collective.

    DistributedDataParallel is wrong inside a pipeline that also shards layers, and fails in most schedules;
    torch's replication on the engine of ``fully_shard`` composes with both.
    """
    assert job.mesh is not None
    experts = replicate_experts(job)
    apart = experts | kept_whole(job)
    if job.num_data_ranks > 1:
        for root in job.roots:
            shared = [parameter for parameter in root.parameters() if parameter not in experts]
            broadcast_from_first(job, [*shared, *root.buffers()])
            replicate(root, mesh=job.mesh.data, ignored=apart)
    job.skip_sync = skip_sync(job.roots, Switch())
    job.explain(method, "torch's replicate, since ranks hold parts of the model")
