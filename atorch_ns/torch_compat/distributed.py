"""Private names of ``torch.distributed``: meshes, groups, pipeline schedules, fp16 loss scales of shards."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from atorch_ns.errors import StepError
from atorch_ns.torch_compat.modules import PackageHook


def share_memory_along(group: dist.ProcessGroup) -> None:
    """Lets the ranks of a group of CUDA devices read each other's memory. Inductor fuses nothing without it.
    torch warns that the call is not needed (``torch.distributed._symmetric_memory``)."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def functional_all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Joins the pieces of all ranks along ``dim`` in the form inductor looks for (``_c10d_functional``)."""
    if x.dtype.is_floating_point and x.dtype.itemsize == 1 and dist.get_backend(group) == "gloo":
        # which sends no float8
        return functional_all_gather(x.view(torch.uint8), dim, group).view(x.dtype)
    collectives, size = torch.ops._c10d_functional, group.size()
    whole: torch.Tensor = collectives.wait_tensor(
        collectives.all_gather_into_tensor(x.contiguous(), size, group.group_name)
    )
    return whole if dim == 0 else torch.cat(whole.chunk(size), dim)


def functional_reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's piece along ``dim`` of the sum over the group, in the form that inductor looks for."""
    collectives, size = torch.ops._c10d_functional, group.size()
    pieces = x if dim == 0 else torch.cat(x.chunk(size, dim))
    piece: torch.Tensor = collectives.wait_tensor(
        collectives.reduce_scatter_tensor(pieces.contiguous(), "sum", size, group.group_name)
    )
    return piece


def functional_maximum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The element-wise maximum over the group. A compiler can include it in a graph."""
    collectives = torch.ops._c10d_functional
    maximum: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(x, "max", group.group_name))
    return maximum


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with this name (``distributed_c10d._resolve_process_group``)."""
    from torch.distributed import distributed_c10d

    process_group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return process_group


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All dimensions of ``mesh`` as one dimension called ``name`` (``DeviceMesh._flatten``)."""
    return mesh._flatten(name)


def replicate(module: nn.Module, *, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Averages the gradients of ``module`` over a one-dimensional mesh (``_composable.replicate_with_fsdp``).

    Buffers are left alone. So are ``ignored`` parameters, such as those of modules replicated already, and
    empty ones, for which the implementation fails.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate as implementation

    empty = {parameter for parameter in module.parameters() if parameter.numel() == 0}
    implementation(module, mesh=mesh, ignored_params=ignored | empty)


def zero_redundancy_of_parts() -> type[Any]:
    """``ZeroRedundancyOptimizer`` for parameters of several dtypes, for DTensors and for frozen parameters.

    All ranks of the group hold the same part of a DTensor. Nothing sends frozen ones, which may be thawed.
    """
    # Compiles a dozen TorchScript classes when it is imported, so only where it is used.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class OfParts(ZeroRedundancyOptimizer):
        _partition_parameters_cache: list[list[dict[str, Any]]]
        param_groups: list[dict[str, Any]]
        world_size: int

        def _verify_same_dense_param_type(self) -> None: ...

        def _get_is_trainable_mask(self) -> list[bool]:
            return []  # for buckets, of which there are none

        def _partition_parameters(self, params_per_rank: Any = None) -> list[list[dict[str, Any]]]:
            if not self._partition_parameters_cache:
                self._partition_parameters_cache = [[] for _ in range(self.world_size)]
                sizes = [0] * self.world_size
                for group in self.param_groups:
                    shares: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
                    # Trained parameters first, large before small, so that the ranks come out even.
                    by_size = sorted(
                        group["params"], key=lambda p: (p.requires_grad, p.numel()), reverse=True
                    )
                    for parameter in by_size:
                        rank = sizes.index(min(sizes))
                        shares[rank].append(parameter)
                        sizes[rank] += parameter.numel()
                    self._partition_param_group(group, shares)  # type: ignore[attr-defined]
            return self._partition_parameters_cache

        def _broadcast_params_from_rank(self, rank: int) -> list[dist.Work]:
            handles = []
            for group in self._partition_parameters()[rank]:
                for parameter in group["params"]:
                    if not parameter.requires_grad and parameter.grad is None:
                        continue  # its owner has not changed it
                    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    handles.append(
                        dist.broadcast(part.detach(), group=self.process_group, group_src=rank, async_op=True)
                    )
            return handles

    return OfParts


def group_timeout(device: torch.device) -> timedelta | None:
    """Time limit of the default group's collectives; ``None`` (torch's default) if the backend has none."""
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def process_groups() -> list[Any]:
    """Every process group of this process, the default one too (``distributed_c10d._world.pg_map``)."""
    return list(dist.distributed_c10d._world.pg_map)


def default_store() -> Any:
    """The key-value store through which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def send_parts(optimizer: Any) -> None:
    """Sends each rank's updated weights to others (``ZeroRedundancyOptimizer`` or ``OSS``). Collective."""
    (optimizer._sync_params if hasattr(optimizer, "_sync_params") else optimizer._broadcast_params)()


def join_fake_group(rank: int, world_size: int) -> None:
    """Starts a default process group without communication. Tensors stay as they are, and no rank waits."""
    from torch.testing._internal.distributed import fake_pg

    join = dist.distributed_c10d.init_process_group
    join("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world_size)


def is_strided_shard(placement: object) -> bool:
    """Returns whether a placement divides shards of later mesh dimensions again (``_StridedShard``)."""
    from torch.distributed.tensor import placement_types  # these imports take a while

    return isinstance(placement, placement_types._StridedShard)


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and sizes of this rank's part of a DTensor, even if one dimension is divided twice."""
    (chunk,) = tensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return tuple(chunk.offsets), tuple(chunk.sizes)


OPERATOR_CALLS = str(torch._ops.__file__)
"""The file from which torch calls its operators (``torch._ops``), including collectives that wait."""
BACKWARD_FUNCTION = "_engine_run_backward"
"""The function of ``torch.autograd.graph`` that a thread's stack shows while it runs a backward pass."""


def in_backward() -> bool:
    """Returns whether this thread runs a backward pass, as a recomputation does."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(action: Callable[[], None], *, in_turn: bool = False) -> None:
    """Calls ``action`` after the running backward pass (``Variable._execution_engine.queue_callback``).

    With ``in_turn`` it runs in order among other callbacks. Otherwise it runs after all of them.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(action if in_turn else lambda: engine.queue_callback(action))


def visit_first(tensors: Iterable[torch.Tensor]) -> None:
    """Has a backward pass visit the nodes of ``tensors`` before other nodes that exist and are ready then.
    Autograd visits the highest number first. It numbers nodes in the order of the forward pass."""
    nodes = [node for tensor in tensors if (node := tensor.grad_fn) is not None]
    # In a backward pass, as in a recomputation, numbers are those of its thread, and smaller.
    if not nodes or in_backward() or torch.is_inference_mode_enabled():
        return
    with torch.enable_grad():
        last = torch.zeros((), requires_grad=True).view(()).grad_fn._sequence_nr()  # type: ignore[union-attr]
    for node in nodes:
        node._set_sequence_nr(last)  # type: ignore[attr-defined]


def before_accumulation(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Calls ``hook`` before autograd adds to a gradient; ``fully_shard`` adds to its own otherwise."""
    parameter.register_hook(PackageHook(hook))
    # torch.utils.swap_tensors leaves the caller of earlier hooks with the other tensor.
    parameter._backward_hooks = parameter._backward_hooks


def after_accumulation(parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Calls a method with a parameter after each backward pass that adds to its gradient, even once thawed.

    torch registers such a hook on trained parameters alone, and keeps it while they are frozen. Python's
    collector cannot see references that the hook holds, so others must keep the method's object alive.
    """
    call = WeakMethod(method)
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(
        PackageHook(lambda tensor: None if (run := call()) is None else run(tensor))
    )
    parameter.requires_grad_(is_trained)
    return handle


def reduced_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients DDP averages, in its order (``_build_params_for_reducer``)."""
    return cast(list[nn.Parameter], model._build_params_for_reducer()[0])


def unreached_parameters(model: DistributedDataParallel) -> list[int]:
    """Indices in DDP's order of the parameters that a backward pass missed, at most a hundred."""
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if match is None:
            raise
        return [int(index) for index in match[1].split()]
    return []


def pipeline_orders(
    class_name: str, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """Returns the passes of every rank in the order in which torch's pipeline schedule runs them.

    Calls ``_calculate_single_rank_operations`` of a schedule that was not constructed: the constructor needs
    stages with a process group, and plans every send and receive of all ranks.

    Args:
        class_name: name of a class for several stages per rank in ``torch.distributed.pipelining``.
        num_ranks, num_micro_batches, stages_per_rank: sizes of the pipeline, which the schedule must support.

    Returns:
        For each rank ``(kind, stage, micro-batch)`` with kind F, B, I or W; passes that torch runs as a pair
        follow each other, idle slots are left out.
    """
    from torch.distributed import pipelining

    schedule = object.__new__(getattr(pipelining, class_name))
    rounds = max(1, num_micro_batches // num_ranks)
    schedule.__dict__.update(
        pp_group_size=num_ranks,
        n_local_stages=stages_per_rank,
        num_stages=num_ranks * stages_per_rank,
        number_of_rounds=rounds,
        microbatches_per_round=num_micro_batches // rounds,
        _num_stages=num_ranks * stages_per_rank,
        _n_microbatches=num_micro_batches,
        _stages=[None] * stages_per_rank,
    )
    return [_list_passes(schedule._calculate_single_rank_operations(rank)) for rank in range(num_ranks)]


def accumulate_after_backward(module: nn.Module) -> None:
    """Adds gradients that came after a backward pass to those that ``fully_shard`` or ``replicate`` keeps, in
    the dtype in which it reduces them, as its hooks do (``FSDPParamGroup.post_backward``)."""
    for parameter in parameters_of(unit for unit in module.modules() if isinstance(unit, FSDPModule)):
        if hasattr(parameter, "_unsharded_param"):  # it has been gathered before
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def show_gathered(units: Iterable[FSDPModule]) -> None:
    """Has modules of ``fully_shard`` and ``replicate`` compute with their gathered parameters.

    Raises:
        StepError: if a module has another tensor in the place of a parameter, which would be lost.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    units = tuple(units)
    _keep_reduced_dtypes(units)
    for parameter in parameters_of(units):
        info = parameter._module_info
        entry = info.module._parameters.get(info.param_name)
        shard = parameter.sharded_param
        whole = getattr(parameter, "_unsharded_param", shard)
        if entry is not shard and entry is not whole:
            raise StepError(
                f"the parameter {info.param_name} of a {type(info.module).__name__} is no longer the tensor that was "
                "divided, e.g. after torch.func.functional_call, a parametrization or a new module. Gathering would restore the "
                "divided one. Make the change before the call, or use ddp or zero1."
            )
        if entry is shard and parameter.sharded_state == ShardedState.UNSHARDED:
            if whole.requires_grad != shard.requires_grad:
                whole.requires_grad_(shard.requires_grad)
            parameter._setattr_on_modules(whole)


def show_shards(units: Iterable[FSDPModule]) -> bool:
    """Has modules of ``fully_shard`` and ``replicate`` show their shards, and tells whether any was gathered.
    A backward pass frees gathered memory and the user's values computed in it."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    parameters = [p for p in parameters_of(units) if p.sharded_state == ShardedState.UNSHARDED]
    for parameter in parameters:
        parameter._setattr_on_modules(parameter.sharded_param)
    return bool(parameters)


def parameters_of(units: Iterable[FSDPModule]) -> Iterator[Any]:
    """The ``FSDPParam`` of every parameter that ``fully_shard`` or ``replicate`` manages in these units."""
    for group in (group for unit in units for group in _groups_of(unit)):
        yield from group.fsdp_params


def _groups_of(unit: FSDPModule) -> Iterable[Any]:
    state = unit._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])


def _keep_reduced_dtypes(units: Iterable[FSDPModule]) -> None:
    for group in (group for unit in units for group in _groups_of(unit)):
        # torch records dtypes once, and none for what was frozen then.
        was_frozen = getattr(group, "_orig_dtype", 0) is None
        if was_frozen and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()


def begin_root(root: nn.Module) -> None:
    """Initialises a root, lest a unit inside that is called first becomes one (``FSDPState._lazy_init``)."""
    if isinstance(root, FSDPModule) and root._get_fsdp_state()._is_root is None:
        root._get_fsdp_state()._lazy_init()


def reduce_after_backward(module: nn.Module) -> None:
    """Reduces gradients that ``fully_shard`` or ``replicate`` still holds from passes without their hooks."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    holder: Any = SimpleNamespace(submod=module)
    _PipelineStageBase.perform_reduce_grad(holder, 1)


def _list_passes(operations: list[Any]) -> list[tuple[str, int, int]]:
    passes: list[tuple[str, int, int]] = []
    for operation in operations:
        if operation is None:  # an idle slot
            continue
        for part in operation.sub_actions or (operation,):
            passes.append((part.computation_type.value, part.stage_index, part.microbatch_index))  # noqa: PERF401
    return passes


def found_inf_tensors(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags, one per device, that ``scaler.unscale_(optimizer)`` has just set; 0-d or 1-element float."""
    state = scaler._per_optimizer_states[id(optimizer)]
    return list(state["found_inf_per_device"].values())


def local_grad_scaler(device_type: str, **options: Any) -> torch.amp.GradScaler:
    """A ``GradScaler`` that checks this rank's part of every gradient (``_unscale_grads_``).

    torch's own checks DTensors on one mesh together, and refuses gradients on several meshes or beside plain
    ones. The flags of this one cover this rank alone. Combine them over all ranks.
    """

    class LocalGradScaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
            overflows: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
                cast(Any, _LocalGroups(optimizer)), *args
            )
            return overflows

    return LocalGradScaler(device_type, **options)


class _LocalGroups:
    """An optimizer's ``param_groups`` with this rank's parts in place of DTensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [
            {"params": [_local_with_grad(parameter) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]


def _local_with_grad(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or parameter.grad is None:
        return parameter
    local = parameter.to_local().detach()  # a leaf, so it can hold a gradient
    grad: Any = parameter.grad
    local.grad_dtype = grad.dtype  # may be fp32 beside 16 bits
    local.grad = grad.to_local()
    return local
