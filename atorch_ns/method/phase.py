"""Phases: the order in which methods are applied."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """When a method does its part; each member says what happens then."""

    MESH = "arrange the ranks"
    REPLACE = "replace modules"
    FP8 = "replace linear layers by fp8 ones"
    CUT = "cut the model into stages"
    SHARD_SAMPLES = "divide samples"
    SHARD_LAYERS = "shard inside layers"
    SHARD_EXPERTS = "divide experts"
    RECOMPUTE = "recompute activations"
    CAST = "cast the weights"
    COMPILE = "compile blocks"
    SHARD_DATA = "replicate or shard over the data"
    OPTIMIZER = "shard the optimizer"
    STEP = "autocast and scale around the step"


ORDER: tuple[Phase, ...] = (
    Phase.MESH,  # first: everything after it may ask for a group
    Phase.REPLACE,  # before anything looks at module classes or wraps them
    Phase.FP8,  # on the final modules, before their weights become shards
    Phase.CUT,  # a rank drops the blocks it does not own before work is spent on them
    Phase.SHARD_SAMPLES,  # blocks are tested with whole layers, whose own divisions then lie inside that of samples
    Phase.SHARD_LAYERS,  # needs whole weights of the stage's own layers
    Phase.SHARD_EXPERTS,  # blocks that are tried in a new layout communicate nothing while experts are whole
    Phase.RECOMPUTE,  # wraps blocks, so inside what compiles, shards or replicates them
    Phase.CAST,  # before sharding, so that shards and buckets have the final dtype
    Phase.COMPILE,  # a block with its recomputation, before hooks of sharding surround it
    Phase.SHARD_DATA,  # the last change to parameters: the optimizer is built on what it leaves
    Phase.OPTIMIZER,  # on final parameters
    Phase.STEP,  # around everything
)
"""The phases from first to last. Each line says why it stands before the next."""
