"""AutoParallel, or our planner: ``python -m benchmarks._peers._autoparallel_rank JOB`` plans for devices that are not here.

JOB is JSON. The model, a Llama on the meta device, and its batch are the same on both sides. AutoParallel divides every tensor over
a mesh of one axis; ours prices and ranks everything that the methods span on as many H100s.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._llama import Llama, next_token_loss, random_batch
from benchmarks._peers._beside import FOLDER, serve


def main() -> None:
    """Plans as often as it is asked to."""
    job = json.loads(sys.argv[1])
    serve(lambda tell: _run(job, tell))


def _run(job: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], str]) -> None:
    size = Llama(**job["size"])
    model, batch = size.build("meta"), random_batch(size, job["samples"], job["num_tokens"], seed=0)
    plan = (_ours if job["side"] == "ours" else _theirs)(model, batch, job["ranks"])
    tell({})
    while True:
        begun = time.process_time()
        plan()
        tell({"all_s": time.process_time() - begun})


def _ours(model: nn.Module, batch: Mapping[str, Tensor], devices: int) -> Callable[[], object]:
    from atorch_ns.cluster import cluster_from_spec
    from atorch_ns.planning import plan

    cluster = cluster_from_spec(f"{devices}xH100-80GB")
    return lambda: plan(model, cluster, sample=batch, loss=next_token_loss)


def _theirs(model: nn.Module, batch: Mapping[str, Tensor], devices: int) -> Callable[[], object]:
    """As its example for models of Hugging Face has it, up to the placement of every tensor.

    Its prices of operators go by the device's name, which it asks of torch, and it has none for fused attention on CPUs.
    """
    model.set_attn_implementation("eager")  # type: ignore[operator]
    torch_cpu: Any = torch.cpu
    torch_cpu.get_device_name = lambda *_: "H100"
    sys.path.insert(0, str(FOLDER / "autoparallel-source"))
    from autoparallel.api import AutoParallel  # type: ignore[import-not-found]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shape = tuple(batch["input_ids"].shape)

    def plan() -> None:
        def inputs() -> Tensor:
            return torch.zeros(shape, dtype=torch.long)

        with AutoParallel(model, inputs, mesh, policy) as planner:
            planner.add_input_constraints([(Shard(0),)])
            planner.add_parameter_memory_constraint(low=None, high=None)
            planner.optimize_placement()

    return plan


if __name__ == "__main__":
    main()
