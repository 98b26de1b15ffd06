"""FullyShardedDataParallel (FSDP1), for those whose setup needs it; shared by fsdp and zero2."""

from __future__ import annotations

from atorch_ns.job import Job
from opt_lib._shard_config import ShardConfig

__all__ = ["WHY_NOT_COMPILE", "WHY_NOT_HALF", "shard"]

WHY_NOT_HALF = "version 1 keeps flat fp32 parameters; use mixed_precision in its config, or version 2."
WHY_NOT_COMPILE = "version 1 flattens parameters, which the compiler cannot follow; use version 2."


def shard(job: Job, method: str, config: ShardConfig, *, keep_gathered: bool) -> None:
    """Shards the model; collective."""
    raise NotImplementedError
