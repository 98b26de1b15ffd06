"""Private names of torch: these tests say when torch moves one."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from atorch_ns.testing.workers import run_ranks
from atorch_ns.torch_compat import (
    WRAPPER_PREFIXES,
    CpuMemoryRecord,
    checkpoint_wrapper,
    count_operators,
    fake_tensor_mode,
    fake_tensor_type,
    flatten_mesh,
    found_inf_tensors,
    fsdp1_parts,
    hybrid_shard_zero2,
    outside_fake_mode,
    persistent_buffers,
    unwrap_checkpoint,
)


def test_checkpoint_wrapper_keeps_names_and_calls_through() -> None:
    calls = []

    def through(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(module)
        result: torch.Tensor = module(x)
        return result

    inner = nn.Linear(2, 2)
    model = nn.Sequential(checkpoint_wrapper(inner, through))
    model(torch.ones(1, 2))
    assert calls == [inner]
    assert unwrap_checkpoint(model[0]) is inner
    assert unwrap_checkpoint(inner) is inner
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    inside = {name for name, _ in nn.Module.named_parameters(model)}
    assert {name.replace(WRAPPER_PREFIXES[0], "") for name in inside} == {"0.weight", "0.bias"}


def test_found_inf() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.unscale_(optimizer)
    (flag,) = found_inf_tensors(scaler, optimizer)
    assert float(flag) == 1.0


def _flatten() -> list[int]:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("data", "zero"))
    return dist.get_process_group_ranks(flatten_mesh(mesh, "both").get_group())


def test_flatten_mesh() -> None:
    assert run_ranks(_flatten, 4) == [[0, 1, 2, 3]] * 4


def _parts() -> list[tuple[str, int, int | None, int, int]]:
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(2, 3)), device_id=torch.device("cpu"), use_orig_params=True
    )
    parts = list(fsdp1_parts(model))
    assert all(part.module is model.module[0] and not part.is_flat for part in parts)  # type: ignore[union-attr, index]
    return [(part.name, part.shape.numel(), part.offset, part.start, part.length) for part in parts]


def test_fsdp1_parts() -> None:
    first, second = run_ranks(_parts, 2)
    assert [(name, numel) for name, numel, *_ in first] == [("weight", 6), ("bias", 3)]
    lengths = [0, 0]
    for rank in (first, second):
        for place, (_, _, offset, start, length) in enumerate(rank):
            assert (offset is None) == (length == 0)
            assert start == (lengths[place] if length else 0)
            lengths[place] += length
    assert lengths == [6, 3]


def test_hybrid_shard_zero2() -> None:
    assert hybrid_shard_zero2().name == "_HYBRID_SHARD_ZERO2"


def test_persistent_buffers() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.BatchNorm1d(2), lambda module, x: module(x)), nn.Module())
    model[1].register_buffer("shared", model[0].get_buffer("_checkpoint_wrapped_module.running_mean"))
    model[1].register_buffer("scratch", torch.ones(1), persistent=False)
    model[1].register_buffer("none", None)
    found = persistent_buffers(model)
    assert set(found) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert found["0.running_mean"] is model[1].shared


def test_process_groups() -> None:
    import torch.distributed as dist

    from atorch_ns.torch_compat import process_groups

    assert process_groups() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        new = dist.new_group([0])
        assert process_groups() == [dist.group.WORLD, new]
    finally:
        dist.destroy_process_group()


def test_fake_tensors() -> None:
    with fake_tensor_mode():
        fake = torch.empty(2, 3)
        mixed = fake + torch.ones(3)
        with outside_fake_mode():
            real = torch.ones(2)
    assert isinstance(fake, fake_tensor_type())
    assert isinstance(mixed, fake_tensor_type())
    assert fake.untyped_storage().nbytes() == 24
    assert real.tolist() == [1.0, 1.0]


def test_operators_are_counted_without_views() -> None:
    weight = torch.ones(3, 3, requires_grad=True)

    def step() -> None:
        (weight.t() @ weight).sum().backward()

    # mm, sum; ones_like, expand (a view), two mm with transposed operands, their sum.
    assert count_operators(step) == 6


def test_cpu_memory_is_counted_in_all_threads() -> None:
    record = CpuMemoryRecord()
    record.count(True)
    try:
        record.start()
        kept = torch.empty(100)
        first = record.stop()
        record.start()
        thread = threading.Thread(target=lambda: torch.empty(50))
        thread.start()
        thread.join()
        del kept
        second = record.stop()
    finally:
        record.count(False)
    assert first[-1] - second[-1] == 400  # what the thread took, it gave back
