"""torch's own trackers of memory, on fake tensors in a fake process group, of the step written by hand.

They are private to torch (``torch.distributed._tools``), so nothing but this benchmark uses them. DDP reads its
parameters when it is made, which fake tensors refuse: its error is the answer where DDP is asked about, ZeRO 1 by hand
included.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from atorch_ns.testing.parity import ADAMW
from benchmarks._by_hand import Recomputed
from benchmarks._estimators._estimator import Estimator, Question, Setup

__all__ = ["TORCH"]

_NUM_STEPS = 2
"""The first makes the optimizer's states, the second has the peak."""


def _start(question: Question) -> Callable[[], int]:
    setup, case = question.setup, question.sized.case
    mesh, fake = _mesh(setup.num_ranks), FakeTensorMode()
    with fake:
        plain, batch = case.build(), question.batch()

    def answer() -> int:
        with fake:
            model = _wrapped(plain, setup, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

            def step() -> None:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16) if setup.bf16 else nullcontext():
                    loss = case.loss_func(batch, case.call(model, batch))
                loss.backward()
                optimizer.step()

            return _tracked(step, model, optimizer, batch)

    return answer


def _mesh(num_ranks: int) -> DeviceMesh | None:
    """Made outside of the fake mode, which cannot read the ranks of a mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if num_ranks == 1:
        return None
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    return init_device_mesh("cpu", (num_ranks,))


def _wrapped(model: nn.Module, setup: Setup, mesh: DeviceMesh | None) -> nn.Module:
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    if setup.recompute:
        for position, block in enumerate(blocks):
            blocks[position] = Recomputed(block)
    if mesh is None:
        return model
    if setup.shards in ("nothing", "optimizer"):
        return DistributedDataParallel(model)
    given: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": setup.shards == "parameters"}
    if setup.bf16:
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, **given)
    fully_shard(model, **given)
    return model


def _tracked(step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> int:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    tracker: MemTracker
    if isinstance(model, FSDPModule):
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(tuple(tensors))
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *tensors)
    with tracker:
        for number in range(_NUM_STEPS):
            step()
            if number + 1 < _NUM_STEPS:
                tracker.reset_mod_stats()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _lacks(setup: Setup) -> str:
    return (
        "torch has no optimizer that keeps fp32 masters, so there is no step to follow"
        if setup.masters
        else ""
    )


TORCH = Estimator(
    name="torch's trackers",
    claims="the peak of the step that is run on fake tensors, by MemTracker, under FSDP2 by FSDPMemTracker",
    start=_start,
    lacks=_lacks,
)
