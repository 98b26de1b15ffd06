"""What cannot stand with axes that divide the model is refused, with the reason and what to use instead."""

from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import MODEL_AXES, Strategy
from opt_lib import _fairscale as fairscale
from opt_lib._deepspeed import zero

REGISTRY = load_registry()
FOUR = Cluster(world_size=4, local_world_size=4, distributed=True, torch="2.13.0")
ALONE = Cluster(torch="2.13.0")

# Imports them outside of a test, which would be blamed for the variables that they set.
MISSING = [*zero.check("zero1", FOUR), *fairscale.check("zero1", FOUR)]

REFUSED = [
    (("zero1", {"backend": "fairscale"}), "fairscale's OSS is for ranks that hold the whole model"),
    (("zero1", {"use_ds_zero": True}), "DeepSpeed shards over all processes"),
    (("zero2", {"use_ds_zero": True}), "DeepSpeed shards over all processes"),
    (("zero2", {"not_use_fsdp": True}), "ShardedDataParallel shards over all processes"),
]


@pytest.mark.parametrize("axis", MODEL_AXES)
@pytest.mark.parametrize(("step", "words"), REFUSED, ids=str)
def test_refused(step: Any, words: str, axis: str) -> None:
    mesh = ("parallel_mode", ([(axis, 2), ("data", 2)], None))
    for cluster in (FOUR, ALONE):
        with pytest.raises(StrategyError, match=words) as caught:
            resolve(Strategy([mesh, step]), cluster, REGISTRY)
        assert "Use" in str(caught.value)


@pytest.mark.skipif(bool(MISSING), reason="; ".join(map(str, MISSING)))
@pytest.mark.parametrize(("step", "_words"), REFUSED, ids=str)
def test_an_axis_of_size_1_divides_nothing(step: Any, _words: str) -> None:
    mesh = ("parallel_mode", ([("tensor", 1), ("data", 4)], None))
    resolved = resolve(Strategy([mesh, step]), FOUR, REGISTRY)
    assert resolved.plan.num_data_ranks == 4
