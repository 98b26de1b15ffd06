"""Phases: the order in which methods are applied."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Time of a method's part, from first to last; each line says why it comes before the next."""

    MESH = "arrange the ranks"  # first: everything after it may ask for a group
    REPLACE = "replace modules"  # before anything looks at module classes or wraps them
    FP8 = "replace linear layers by fp8 ones"  # on the final modules, before their weights become shards
    CUT = "cut the model into stages"  # a rank drops the blocks it does not own before work is spent on them
    SHARD_SAMPLES = "divide samples"  # tests use whole layers, whose own divisions then lie inside it
    SHARD_LAYERS = "shard inside layers"  # needs whole weights of the stage's own layers
    SHARD_EXPERTS = "divide experts"  # blocks tried in new layouts exchange nothing while experts are whole
    RECOMPUTE = "recompute activations"  # wraps blocks, so inside what compiles, shards or replicates them
    CAST = "cast the weights"  # before sharding, so that shards and buckets have the final dtype
    COMPILE = "compile blocks"  # a block with its recomputation, before hooks of sharding surround it
    SHARD_DATA = "replicate or shard over the data"  # last change to parameters: the optimizer comes after
    OPTIMIZER = "shard the optimizer"  # on final parameters
    STEP = "autocast and scale around the step"  # around everything


ORDER: tuple[Phase, ...] = tuple(Phase)
"""The phases from first to last."""
