"""Private names of torch: these tests say when torch moves one."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from atorch_ns.testing.workers import run_ranks
from atorch_ns.torch_compat import (
    BACKWARD_FUNCTION,
    CpuMemoryRecord,
    FlashAttention,
    TorchDispatchMode,
    accumulate_after_backward,
    after_backward,
    checkpoint_wrapper,
    compile_forward,
    compile_records,
    count_operators,
    default_store,
    extend_dtensor_operators,
    fake_tensor_mode,
    fake_tensor_type,
    flatten_mesh,
    found_inf_tensors,
    functional_all_gather,
    functional_maximum,
    functional_reduce_scatter,
    gpu_described,
    graph_breaks,
    group_named,
    group_timeout,
    has_gradient_hooks,
    in_backward,
    inner_hooks,
    is_strided_shard,
    is_view,
    join_fake_group,
    leave_uncompiled,
    local_grad_scaler,
    micro_pipelined,
    num_compile_failures,
    num_graphs,
    outside_fake_mode,
    persistent_buffers,
    pipeline_orders,
    quiet_fake_kernels,
    reads_divided_memory,
    reduce_after_backward,
    reduced_parameters,
    registered_children,
    share_memory_along,
    tensor_without_storage,
    unreached_parameters,
    unwrap_checkpoint,
    visit_first,
    without_transforms,
)
from atorch_ns.torch_compat.modules import WRAPPER_PREFIXES


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


def test_a_described_gpu_answers_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.device_interface import CudaInterface

    def start() -> None:
        pytest.fail("CUDA was started")

    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with gpu_described(0, "NVIDIA H200", 2**37, (9, 0)):
        assert CudaInterface.Worker.get_device_properties().major == 9  # as has_triton asks
        assert torch.cuda.get_device_capability(0) == (9, 0)
        assert torch.cuda.get_device_name() == "NVIDIA H200"
    with pytest.raises(pytest.fail.Exception, match="CUDA was started"):
        CudaInterface.Worker.get_device_properties()


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


def test_fake_tensors_refuse_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        with fake_tensor_mode(), pytest.raises(IndexError):
            torch.ones(3).cumsum(7)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's loggers may hand nothing on
    try:
        with quiet_fake_kernels():
            refuse()
        assert not caplog.records
        refuse()
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.name for record in caplog.records} == {logger.name}


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


def test_pipeline_orders_are_those_of_a_constructed_schedule() -> None:
    stages = [SimpleNamespace(num_stages=4, group_size=2, group_rank=0, submod=None) for _ in range(2)]
    for name in ("ScheduleInterleaved1F1B", "ScheduleDualPipeV"):
        schedule = getattr(pipelining, name)(stages, 6)
        orders = pipeline_orders(name, num_ranks=2, num_micro_batches=6, stages_per_rank=2)
        for rank, order in enumerate(orders):
            planned = [one for one in schedule.pipeline_order[rank] if one is not None]
            parts = [part for one in planned for part in (one.sub_actions or (one,))]
            assert order == [
                (one.computation_type.value, one.stage_index, one.microbatch_index) for one in parts
            ]


def _scaled_on_several_meshes() -> tuple[float, list[float]]:
    mesh = DeviceMesh("cpu", [0, 1])
    parameters = [
        nn.Parameter(torch.ones(2)),
        nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 8.0)
    if dist.get_rank() == 1:
        parameters[1].grad.to_local().fill_(float("inf"))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = local_grad_scaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    (flag,) = found_inf_tensors(scaler, optimizer)
    return float(flag), parameters[0].grad.tolist()


def test_a_scaler_looks_at_its_own_part_of_gradients_on_several_meshes() -> None:
    assert run_ranks(_scaled_on_several_meshes, 2) == [(0.0, [2.0, 2.0]), (1.0, [2.0, 2.0])]


def _divided_twice() -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = nn.Linear(2, 8, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["tensor"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["data"])
    return [is_strided_shard(placement) for placement in layer.weight.placements]


def test_a_dimension_that_is_divided_twice_has_a_strided_shard() -> None:
    assert run_ranks(_divided_twice, 4) == [[True, False]] * 4


def test_a_backward_pass_is_noticed() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(in_backward()))
    seen.append(in_backward())
    y.sum().backward()
    seen.append(in_backward())
    assert seen == [False, True, False]


def _check_kernel(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Against the formula, where the keys are a part of those that the result is of."""
    kernel = FlashAttention(device)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 3, 8, 16, generator=generator).to(device, dtype) for _ in range(4)]
    query, key, value = (tensor.float().requires_grad_() for tensor in drawn[:3])
    scores = query @ key.transpose(-1, -2) * 0.3
    expected, lse = scores.softmax(-1) @ value, scores.logsumexp(-1)
    gradients = torch.autograd.grad(expected, (query, key, value), drawn[3].float())
    tensors = (drawn[0], drawn[1], drawn[2])
    found, found_lse = kernel.forward(*tensors, False, 0.3)
    assert torch.allclose(found.float(), expected, atol=tolerance)
    assert torch.allclose(found_lse, lse, atol=tolerance)
    result = (expected.detach().to(dtype), lse.detach())
    whole = kernel.backward(drawn[3], tensors, result, False, 0.3)
    half = (drawn[0], drawn[1][:, :, :4].contiguous(), drawn[2][:, :, :4].contiguous())
    part = kernel.backward(drawn[3], half, result, False, 0.3)
    for mine, theirs in zip(
        (*whole, *part[1:]), (*gradients, *(g[:, :, :4] for g in gradients[1:])), strict=True
    ):
        assert torch.allclose(mine.float(), theirs, atol=tolerance)


def test_attention_on_the_cpu_tells_the_sum_of_exponentials() -> None:
    _check_kernel("cpu", torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_on_a_gpu_tells_the_sum_of_exponentials() -> None:
    _check_kernel("cuda", torch.bfloat16, 6e-2)


def _timeouts() -> float:
    group = dist.new_group([0], timeout=group_timeout(torch.device("cpu")))
    dist.barrier(group=group)
    found = group_timeout(torch.device("cpu"))
    assert found is not None
    return found.total_seconds()


def test_the_timeout_of_the_process_group() -> None:
    first, second = (run_ranks(_timeouts, 1, timeout_s=seconds)[0] for seconds in (30.0, 50.0))
    assert second - first == 20.0


def test_registered_containers_give_their_children() -> None:
    children, rebuilt = registered_children(deque([1, 2]))
    assert children == [1, 2]
    assert rebuilt([3, 4]) == deque([3, 4])
    assert registered_children(object()) is None


def test_a_dispatch_mode_sees_operators() -> None:
    class Seen(TorchDispatchMode):
        names: tuple[str, ...] = ()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names += (str(func),)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.ones(2).add(1)
    assert seen.names[-1] == "aten.add.Tensor"


def test_a_tensor_without_storage_has_a_shape_and_no_memory() -> None:
    class Looks(torch.Tensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise NotImplementedError

    made = tensor_without_storage(Looks, torch.empty(1, dtype=torch.bfloat16), (3, 5))
    assert isinstance(made, Looks)
    assert (made.shape, made.dtype, made.requires_grad) == ((3, 5), torch.bfloat16, False)
    with pytest.raises(NotImplementedError):
        made.sum()


def test_a_view_is_told_from_its_base_and_from_a_copy() -> None:
    base = torch.zeros(4, requires_grad=True) * 2
    assert is_view(base[1:])
    assert not is_view(base)
    assert not is_view(base[1:].clone())


def test_autograd_visits_first_what_it_is_asked_to() -> None:
    visited = []
    leaf = torch.ones(1, requires_grad=True)
    first, second = leaf * 2, leaf * 3  # of which it would visit the second, the younger, first
    for number, tensor in enumerate((first, second)):
        tensor.grad_fn.register_prehook(lambda _, number=number: visited.append(number))
    visit_first([first, leaf])
    (first + second).backward()
    assert visited == [0, 1]


def _reduced_at_the_end() -> bool:
    module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False)
    module.set_is_last_backward(False)
    x = torch.full((2, 4), float(dist.get_rank() + 1))
    module(x).sum().backward()
    reduce_after_backward(module)
    return torch.equal(module.weight.grad.full_tensor(), torch.full((4, 4), 3.0))  # 2 × the mean of 1 and 2


def _added_late() -> bool:
    """A bias's gradient is computed by the backward pass, twice, and a weight's after each."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False)
    module.set_is_last_backward(False)
    for late in (1.0, 2.0**-9):  # whose sum bfloat16 does not hold
        module(torch.ones(2, 4)).sum().backward(inputs=[module.bias])
        module.weight.grad = torch.full_like(module.weight, late)
        accumulate_after_backward(module)
    reduce_after_backward(module)
    found = module.weight.grad.full_tensor()
    return module.bias.grad is not None and torch.equal(found, torch.full((4, 4), 1 + 2.0**-9))


def test_gradients_that_come_late_are_added_in_the_dtype_of_reduction() -> None:
    accumulate_after_backward(nn.Linear(4, 4))  # keeps none to itself
    assert run_ranks(_added_late, 2) == [True] * 2


def test_gradients_kept_by_each_rank_are_reduced_at_the_end() -> None:
    assert run_ranks(_reduced_at_the_end, 2) == [True] * 2


def _store() -> list[bytes]:
    default_store().set("place", "rank " + str(dist.get_rank()))
    return [default_store().get("place")[:4]]


def test_the_store_of_the_default_group() -> None:
    assert run_ranks(_store, 2) == [[b"rank"]] * 2


def test_a_tensor_under_transforms_has_a_plain_one_inside() -> None:
    seen = []

    def noted(row: torch.Tensor) -> torch.Tensor:
        seen.append(without_transforms(row * 2))
        return row

    torch.vmap(torch.vmap(noted))(torch.ones(2, 3, 4))
    assert seen[0].shape == (2, 3, 4)
    assert seen[0].untyped_storage().nbytes() == 96
    assert without_transforms(seen[0]) is seen[0]


def test_inner_hooks_are_those_below_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    module.register_forward_hook(lambda *_: None)
    assert inner_hooks(module) == ()
    module[1].register_forward_pre_hook(lambda *_: None)
    module[1].register_forward_hook(lambda *_: None, with_kwargs=True)
    assert inner_hooks(module) == (
        ("1", "_forward_pre_hooks", 1),
        ("1", "_forward_hooks", 1),
        ("1", "_forward_hooks_with_kwargs", 1),
    )


def test_hooks_on_a_gradient_are_seen() -> None:
    one, other, plain = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    handle = one.register_hook(lambda gradient: gradient)
    other.register_post_accumulate_grad_hook(lambda _: None)
    assert [has_gradient_hooks(each) for each in (one, other, plain)] == [True, True, False]
    handle.remove()
    assert not has_gradient_hooks(one)


def test_branches_that_depend_on_data_count_as_breaks() -> None:
    torch.compiler.reset()
    before = sum(graph_breaks().values())
    torch.compile(lambda x: x + 1 if x.sum() > 0 else x - 1, backend="eager")(torch.ones(2))
    assert sum(graph_breaks().values()) == before + 1


def test_what_is_compiled_is_counted() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print(end="")  # noqa: T201  # what torch cannot trace
        return y * 2

    torch.compiler.reset()
    graphs, failures, breaks = num_graphs(), num_compile_failures(), sum(graph_breaks().values())
    compiled = torch.compile(function, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    begun = time.time_ns() // 1000
    compiled(torch.ones(3))
    assert num_graphs() == graphs + 4
    assert num_compile_failures() > failures
    assert sum(graph_breaks().values()) == breaks + 2
    records = compile_records(begun)
    assert any("size mismatch" in record.recompiled_for for record in records)
    assert not any(record.failed_with for record in records)


def test_the_forward_pass_of_a_module_is_compiled_and_its_hooks_are_not() -> None:
    seen: list[Any] = []

    def watch(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(args))
        return compiled(*args, **kwargs)

    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    compile_forward(module, watch, backend="eager", fullgraph=True)
    expected = copy.deepcopy(module)(torch.ones(1, 2))
    assert seen == [False]
    assert torch.equal(module(torch.ones(1, 2)), expected)
    assert seen == [False, 1, False]
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert module(torch.ones(1, 2)).tolist() == [[1, 1]]


def test_a_frame_with_an_open_handler_runs_uncompiled() -> None:
    seen = []

    def frame(x: torch.Tensor) -> torch.Tensor:
        try:
            leave_uncompiled()
            seen.append(torch.compiler.is_compiling())
        except ZeroDivisionError:
            raise
        return x + 1

    torch.compiler.reset()
    torch.compile(frame, backend="eager")(torch.ones(2))
    leave_uncompiled()
    assert seen == [False]


class _Half(nn.Module):
    """Leaves its first layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, 2]."""
        out: torch.Tensor = self.used(x)
        return out


def _waits() -> tuple[list[str], list[str], list[str]]:
    model = DistributedDataParallel(_Half())
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    seen: list[str] = []
    out = model(torch.ones(1, 2))
    out.register_hook(lambda _: after_backward(lambda: seen.append("after")))
    out.register_hook(lambda _: seen.append("in the pass"))
    out.sum().backward()
    unreached = [names[id(reduced_parameters(model)[place])] for place in unreached_parameters(model)]
    missing = [parameter for name, parameter in model.module.named_parameters() if name in unreached]
    torch.autograd.backward(missing, [torch.zeros_like(parameter) for parameter in missing])
    return unreached, [names[id(reduced_parameters(model)[p])] for p in unreached_parameters(model)], seen


def test_ddp_says_what_a_pass_has_not_reached() -> None:
    ((unreached, then, seen),) = run_ranks(_waits, 1)
    assert unreached == ["unused.weight", "unused.bias"]
    assert then == []
    assert seen == ["in the pass", "after"]


def _functional() -> list[bool]:
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    group = dist.group.WORLD
    assert group is not None
    pieces = torch.arange(16.0).view(2, 4, 2) * (1 + dist.get_rank())
    received = [torch.empty_like(pieces) for _ in range(2)]
    dist.all_gather(received, pieces)
    summed = torch.stack(received).sum(0)
    before = is_symm_mem_enabled_for_group(group.group_name)
    share_memory_along(group)
    return [
        torch.equal(functional_all_gather(pieces, 1, group), torch.cat(received, 1)),
        torch.equal(functional_reduce_scatter(pieces, 1, group), summed.chunk(2, 1)[dist.get_rank()]),
        torch.equal(functional_maximum(pieces, group), received[1]),
        group_named(group.group_name) is group,
        torch.equal(
            functional_all_gather(pieces.to(torch.float8_e4m3fn), 1, group).float(), torch.cat(received, 1)
        ),
        is_symm_mem_enabled_for_group(group.group_name) is not before,
    ]


def test_functional_collectives_are_those_of_the_group() -> None:
    assert run_ranks(_functional, 2) == [[True] * 6] * 2


def test_inductor_pipelines_exchanges_by_an_option_of_one_compilation() -> None:
    from torch._inductor import config

    assert micro_pipelined(None) == {"_micro_pipeline_tp": True}
    assert micro_pipelined("max-autotune")["max_autotune"]
    assert config._micro_pipeline_tp is False
    nn.Linear(4, 4).compile(options=micro_pipelined("max-autotune"))  # which knows the names of all options
    with pytest.raises(RuntimeError, match="_micro_pipelines"):
        nn.Linear(4, 4).compile(options={"_micro_pipelines": True})


def _fakes() -> tuple[int, int, list[float]]:
    join_fake_group(3, 8)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.barrier()
    return dist.get_rank(), dist.get_world_size(), tensor.tolist()


def test_a_fake_group_communicates_nothing() -> None:
    assert run_ranks(_fakes, 1, init_process_group=False) == [(3, 8, [1.0, 1.0])]


def _reads_memory() -> bool:
    tensor = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(RuntimeError) as caught:
        tensor.untyped_storage().data_ptr()
    return reads_divided_memory(caught.value) and not reads_divided_memory(RuntimeError("another"))


def test_the_memory_of_a_divided_tensor_is_refused_in_words_that_are_known() -> None:
    assert run_ranks(_reads_memory, 2) == [True, True]


def _lists_of_both_kinds() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    averages = [distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]), torch.zeros(3)]
    weights = [distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)]), torch.ones(3)]
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        torch._foreach_sub_(averages, weights)
    extend_dtensor_operators(())
    torch._foreach_lerp_(averages, weights, 0.25)
    torch._foreach_mul_(averages, 2.0)
    torch._foreach_add_(averages, weights, alpha=0.5)
    return [*averages[0].full_tensor().flatten().tolist(), *averages[1].tolist()]


def test_foreach_takes_divided_and_whole_tensors_together() -> None:
    for found in run_ranks(_lists_of_both_kinds, 2, timeout_s=60):
        assert found == [1.0] * 11


def _draws_beside_a_gpu() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        extend_dtensor_operators(())
    part = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    torch.manual_seed(3)
    draws = [torch.rand_like(part).full_tensor(), torch.bernoulli(part + 0.5)]
    torch.manual_seed(3)
    whole = torch.zeros(4, 2)
    wanted = [torch.rand_like(whole), torch.bernoulli(whole + 0.5)]
    return [torch.equal(draw, value) for draw, value in zip(draws, wanted, strict=True)]


def test_tensors_on_the_cpu_draw_as_one_process_where_a_gpu_is_there_too() -> None:
    assert run_ranks(_draws_beside_a_gpu, 2, timeout_s=60) == [[True, True]] * 2


_FIRST_IS_FAKE = """
import os
import torch
from atorch_ns.torch_compat import fake_tensor_mode

with fake_tensor_mode():
    torch.ones(2, requires_grad=True).sum().backward()
child = os.fork()
if child == 0:
    torch.ones(2, requires_grad=True).sum().backward()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_process_whose_first_backward_pass_is_of_fake_tensors_may_fork() -> None:
    done = subprocess.run([sys.executable, "-c", _FIRST_IS_FAKE], timeout=60, check=False)
    assert done.returncode == 0


def test_the_stack_of_a_backward_pass_names_its_function() -> None:
    seen: set[str] = set()
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.update(frame.name for frame in traceback.extract_stack()))
    y.sum().backward()
    assert BACKWARD_FUNCTION in seen
