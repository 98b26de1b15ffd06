"""A rank's part of a whole is what DTensor and fully_shard give it, also where nothing divides evenly."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from atorch_ns.job import divided_like, local_part
from atorch_ns.testing.workers import run_ranks


def _parts(shape: tuple[int, int]) -> list[tuple[str, bool, bool]]:
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    divided: dict[str, DTensor] = {
        "rows": distribute_tensor(whole, mesh["tensor"], [Shard(0)]),
        "columns of replicas": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
    }
    for dim in (0, 1):
        layer = nn.Linear(shape[1], shape[0], bias=False)
        layer.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(dim)]))
        fully_shard(layer, mesh=mesh["data"])
        divided[f"tensor along {dim}, then fully_shard"] = layer.weight
    return [
        (
            name,
            torch.equal(local_part(whole, tensor), tensor.to_local()),
            torch.equal(divided_like(whole, tensor).full_tensor(), whole),
        )
        for name, tensor in divided.items()
    ]


@pytest.mark.parametrize("shape", [(8, 4), (6, 6), (6, 5), (2, 3)], ids=str)
def test_local_part(shape: tuple[int, int]) -> None:
    for rank in run_ranks(_parts, 4, args=(shape,)):
        assert [name for name, part, _ in rank if not part] == []
        assert [name for name, _, whole in rank if not whole] == []
