"""Every private name of torch that this package uses, each behind one function or imported from here.

``tests/test_torch_compat.py`` says when torch moves one of them.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
)  # a base class: imported as it is

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import ShardingStrategy


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All dimensions of ``mesh`` as one dimension called ``name`` (``DeviceMesh._flatten``)."""
    return mesh._flatten(name)


def replicate(module: nn.Module, *, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Averages the gradients of ``module`` over a one-dimensional mesh (``_composable.replicate_with_fsdp``).

    Buffers are left alone; ``ignored`` parameters too, as those of modules inside that are replicated already.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate as implementation

    implementation(module, mesh=mesh, ignored_params=ignored)


def group_timeout(device: torch.device) -> timedelta | None:
    """How long collectives of the job's process group wait (``_get_backend(device).options._timeout``); ``None`` for a
    backend that does not say, which leaves torch's default."""
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def checkpoint_wrapper(module: nn.Module, checkpoint_fn: Callable[..., Any]) -> nn.Module:
    """``module`` in torch's wrapper that calls it through ``checkpoint_fn`` and keeps parameter names."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as implementation

    return implementation.CheckpointWrapper(module, checkpoint_fn=checkpoint_fn)


def unwrap_checkpoint(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper; any other module as it is."""
    children = module._modules  # of a TorchScript module, it is no dictionary and has no get()
    inner = children["_checkpoint_wrapped_module"] if "_checkpoint_wrapped_module" in children else None  # noqa: SIM401
    return module if inner is None else inner


WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.", "_pipeline_unit.")
"""What torch's wrappers, and the units of a pipeline, insert into the names of the parameters inside them."""


def pipeline_unit(module: nn.Module) -> tuple[str, nn.Module]:
    """The module inside a unit of a pipeline, and its path from there (``"._pipeline_unit"``); any other module as it
    is, with no path."""
    inner = module._modules["_pipeline_unit"] if "_pipeline_unit" in module._modules else None  # noqa: SIM401
    return ("", module) if inner is None else ("._pipeline_unit", inner)


def is_stand_in(module: nn.Module) -> bool:
    """Whether a module stands for one that other ranks of a pipeline hold."""
    return bool(getattr(type(module), "is_stand_in", False))


def stood_for(module: nn.Module) -> nn.Module:
    """The module of another rank that a stand-in stands for, whose memory is gone; any other module as it is."""
    original: nn.Module = module.__dict__["_original"] if is_stand_in(module) else module
    return original


def plain_name(name: str) -> str:
    """A dotted path as the model without inner wrappers has it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "").removesuffix("." + prefix.removesuffix("."))
    return name


def found_inf_tensors(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags, one per device, that ``scaler.unscale_(optimizer)`` has just set; 0-d or 1-element float."""
    state = scaler._per_optimizer_states[id(optimizer)]
    return list(state["found_inf_per_device"].values())


def local_grad_scaler(device_type: str, **options: Any) -> torch.amp.GradScaler:
    """A ``GradScaler`` that looks at this rank's part of every gradient (``_unscale_grads_``).

    torch's own asks DTensors on one mesh together, and refuses gradients of several meshes and plain ones beside
    them. Its flags are then of this rank alone: combine them over all ranks. It skips steps itself, also those of
    optimizers that can do so in their kernels (``_step_supports_amp_scaling``).
    """
    import torch

    class LocalGradScaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
            found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
                cast(Any, _LocalGroups(optimizer)), *args
            )
            return found

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # A fused optimizer would take the flags, plain tensors, into one call with DTensors.
            optimizer._step_supports_amp_scaling = False
            return super().step(optimizer, *args, **kwargs)

    return LocalGradScaler(device_type, **options)


class _LocalGroups:
    """An optimizer's ``param_groups`` with this rank's parts in place of DTensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [
            {"params": [_local_with_grad(parameter) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]


def _local_with_grad(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor) or parameter.grad is None:
        return parameter
    local = parameter.to_local().detach()
    grad: Any = parameter.grad
    local.grad = grad.to_local()
    return local


def hybrid_shard_zero2() -> ShardingStrategy:
    """FSDP1's strategy that replicates over one group, shards over another and keeps parameters gathered."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy._HYBRID_SHARD_ZERO2


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state, each by its first name (``nn.Module`` keeps the others' names
    in ``_non_persistent_buffers_set``)."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found.setdefault(id(buffer), (plain_name(f"{path}.{name}" if path else name), buffer))
    return dict(found.values())


class FlatPart(NamedTuple):
    """One parameter inside a flat parameter of FSDP1.

    Attributes:
        module: the module that holds it.
        name: its name there.
        shape: of the whole.
        parameter: what the optimizer updates: the original parameter, or with ``use_orig_params=False`` the
            flat one.
        is_flat: whether that is the flat one.
        shard: this rank's part of the flat parameter, one-dimensional, live.
        offset: where this rank's part of the parameter begins in the shard; ``None`` if it has none.
        start: where it begins in the flattened parameter.
        length: its elements.
    """

    module: nn.Module
    name: str
    shape: torch.Size
    parameter: nn.Parameter
    is_flat: bool
    shard: torch.Tensor
    offset: int | None
    start: int
    length: int


def fsdp1_parts(root: nn.Module) -> Iterator[FlatPart]:
    """What is in the flat parameters of all ``FullyShardedDataParallel`` modules of ``root``."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for wrapper in FullyShardedDataParallel.fsdp_modules(root):
        if wrapper._handle is None:
            continue
        flat: Any = wrapper._handle.flat_param
        local = getattr(
            flat, "_local_shard", None
        )  # set when training begins; until then it is `flat` itself
        shard = flat.detach() if local is None else local.detach()
        originals = flat._params
        for place, info in enumerate(flat._shard_param_infos):
            yield FlatPart(
                module=flat._param_infos[place].module,
                name=flat._param_infos[place].param_name,
                shape=flat._shapes[place],
                parameter=flat if originals is None else originals[place],
                is_flat=originals is None,
                shard=shard,
                offset=info.offset_in_shard if info.in_shard else None,
                start=info.intra_param_start_idx or 0,
                length=info.numel_in_shard or 0,
            )


class CpuMemoryRecord:
    """Bytes of CPU tensor memory that are alive, at every allocation and release between start and stop.

    torch's CPU allocator tells the profiler about everything it gives and takes back, in Python or C++
    (gradients, DDP's buckets, buffers of collectives), with the bytes asked for. The profiler sees the thread
    that started it and what it hands to others; the allocator's own count, which each event carries, is of
    all threads once the flag ``caffe2_report_cpu_memory_usage`` is set. A gloo thread may give back what the
    main thread took, so without the flag the count drifts.
    """

    def __init__(self) -> None:
        self._flag = _cpu_memory_flag()
        self._profiler: Any = None

    def count(self, on: bool) -> None:
        """Switches the allocator's count of all threads on or off; what was allocated before is not in it."""
        if self._flag is not None:
            self._flag.value = on

    def start(self) -> None:
        """Begins a record."""
        import torch

        with _silent_kineto():
            self._profiler = torch.autograd.profiler.profile(profile_memory=True)
            self._profiler.__enter__()

    def stop(self) -> list[int]:
        """Ends the record; the counts in the order of time."""
        import torch

        torch.empty(1)  # its release tells the count as it stands now
        with _silent_kineto():
            self._profiler.__exit__(None, None, None)
        roots = self._profiler.kineto_results.experimental_event_tree()
        counts = [fields.total_allocated for fields in _allocations(roots)]
        del counts[-2]
        return counts


def _allocations(roots: Any) -> Iterator[Any]:
    from torch._C._profiler import _ExtraFields_Allocation

    found, waiting = [], list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            found.append(event)
    found.sort(key=lambda event: event.start_time_ns)
    return (event.extra_fields for event in found)


def _cpu_memory_flag() -> Any:
    """The allocator's flag as a ctypes bool; ``None`` where this build of torch does not show it."""
    import ctypes
    from pathlib import Path

    import torch

    libraries = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("libc10.*")]
    try:
        library = ctypes.CDLL(libraries[0])
        return ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except (IndexError, OSError, ValueError):
        return None


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """The profiler prints a line whenever it starts and stops, unless its log level says otherwise."""
    import os

    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """A mode in which tensors have shapes, dtypes and storages but no memory (``torch._subclasses``).

    Real tensors that meet fake ones are taken as fake too.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def count_operators(action: Callable[[], object]) -> int:
    """The operators that ``action`` starts, forward and backward, views left out, as a dispatch mode sees them."""

    class Counter(TorchDispatchMode):
        count: int = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            returned = [value.alias_info for value in func._schema.returns]
            is_view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
            self.count += not is_view
            return func(*args, **(kwargs or {}))

    with Counter() as counter:  # type: ignore[no-untyped-call]
        action()
    return int(counter.count)


def process_groups() -> list[Any]:
    """Every process group of this process, the default one too (``distributed_c10d._world.pg_map``)."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def fake_tensor_type() -> type[torch.Tensor]:
    """The class of fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Suspends the fake mode that is active: what runs inside is real."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def pipeline_orders(
    class_name: str, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """The passes of every rank in the order in which a pipeline schedule of torch runs them.

    Asks ``_calculate_single_rank_operations`` of a schedule that was not constructed: the constructor wants
    stages with a process group, and plans every send and receive of all ranks besides.

    Args:
        class_name: of a class for several stages per rank in ``torch.distributed.pipelining``.
        num_ranks, num_micro_batches, stages_per_rank: of the pipeline, which the schedule must be able to run.

    Returns:
        For each rank ``(kind, stage, micro-batch)`` with kind F, B, I or W; passes that torch runs as a pair
        stand one after the other, idle slots are left out.
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
    return [_passes(schedule._calculate_single_rank_operations(rank)) for rank in range(num_ranks)]


def _passes(operations: list[Any]) -> list[tuple[str, int, int]]:
    """A rank's operations without idle slots, pairs as their parts."""
    passes: list[tuple[str, int, int]] = []
    for operation in operations:
        if operation is None:
            continue
        for part in operation.sub_actions or (operation,):
            passes.append((part.computation_type.value, part.stage_index, part.microbatch_index))  # noqa: PERF401
    return passes


def is_strided_shard(placement: object) -> bool:
    """Whether a DTensor's placement divides what later dimensions of its mesh have divided (``_StridedShard``)."""
    from torch.distributed.tensor import placement_types

    return isinstance(placement, placement_types._StridedShard)


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as a recomputation does (``torch._C._current_graph_task_id``)."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


class CpuFlashAttention:
    """``aten._scaled_dot_product_flash_attention_for_cpu``, which gives the sum of exponentials too.

    Tensors are [B, H, T, E] and [B, H, S, E]; the logarithm of the sum is float32 [B, H, T].
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and the logarithm of its sum of exponentials."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operator(query, key, value, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        result: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of queries, keys and values."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        out, lse = result
        in_memory = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the order in which forward returns it
        found = operator(gradient, *tensors, out, in_memory, 0.0, causal, scale=scale)
        return found[0], found[1], found[2]


class CudaFlashAttention:
    """``aten._scaled_dot_product_flash_attention``: as :class:`CpuFlashAttention`, in fp16 and bf16."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and the logarithm of its sum of exponentials."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = operator(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        result: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of queries, keys and values."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
        query, key, _ = tensors
        unused = torch.zeros(
            2, dtype=torch.uint64, device=query.device
        )  # the state of a dropout there is not
        lengths = (None, None, query.size(-2), key.size(-2))
        out, lse = result
        found = operator(
            gradient,
            *tensors,
            out.contiguous(),
            lse.contiguous(),
            *lengths,
            0.0,
            causal,
            unused,
            unused[:1],
            scale=scale,
        )
        return found[0], found[1], found[2]


def num_graphs() -> int:
    """Graphs compiled so far (``torch._dynamo.utils.counters``); cheap enough to be asked around every call."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def num_compile_failures() -> int:
    """How often tracing met what it does not support so far, graph breaks and limits included."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())


def graph_breaks() -> dict[str, int]:
    """How often tracing stopped inside a function so far, by the first line of the reason
    (``torch._dynamo.utils.counters``, which files branches that depend on data under what is not supported)."""
    from torch._dynamo.utils import counters

    breaks: dict[str, int] = {}
    for kind in ("graph_break", "unimplemented"):
        for text, count in counters[kind].items():
            reason = str(text).strip().partition("\n")[0]
            if kind == "graph_break" or reason.startswith("Data-dependent"):
                breaks[reason] = breaks.get(reason, 0) + int(count)
    return breaks


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def inner_hooks(module: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """Hooks on the modules inside of a module: the path of each, the kind, and how many there are.

    Where torch reuses what it compiled of an equal module, it does not look at them.
    """
    return tuple(
        (path, kind, len(found))
        for path, inner in module.named_modules()
        if path
        for kind in _HOOKS
        if (found := getattr(inner, kind, None))
    )


class CompileRecord(NamedTuple):
    """One attempt of ``torch._dynamo`` to compile a function.

    Attributes:
        recompiled_for: the guard that failed of what was compiled before; empty for a first compilation.
        failed_with: why nothing came of it; empty where it was compiled.
    """

    recompiled_for: str
    failed_with: str


def compile_records(since_us: int) -> list[CompileRecord]:
    """Attempts begun after ``since_us`` (microseconds since the epoch), of the last few dozen that torch keeps
    (``torch._dynamo.utils.get_compilation_metrics``)."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        CompileRecord(str(each.recompile_reason or ""), str(each.fail_reason or ""))
        for each in get_compilation_metrics()
        if (each.start_time_us or 0) >= since_us
        and (each.recompile_reason or each.fail_reason or each.co_name)
    ]


def watch_compiled(module: nn.Module, watch: Callable[..., Any]) -> None:
    """Has calls of a module that ``module.compile()`` prepared run as ``watch(compiled, *args, **kwargs)``
    (``_compiled_call_impl``)."""
    from functools import partial

    module._compiled_call_impl = partial(watch, module._compiled_call_impl)


def tensor_without_storage(cls: Any, like: torch.Tensor, shape: Sequence[int]) -> Any:
    """An instance of ``cls``, a subclass of ``torch.Tensor``, with the dtype and device of ``like`` and no memory."""
    import torch

    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)


def tree_leaves(data: Any) -> list[Any]:
    """The leaves of nested data (``torch.utils._pytree``), those of dataclasses that nobody has registered too."""
    from torch.utils import _pytree

    found: list[Any] = []
    for leaf in _pytree.tree_leaves(data):
        if _is_open(leaf):
            for entry in dataclasses.fields(leaf):
                found += tree_leaves(getattr(leaf, entry.name, None))
        else:
            found.append(leaf)
    return found


def tree_map_only(kind: type[Any], function: Callable[[Any], Any], data: Any) -> Any:
    """Nested data with ``function(leaf)`` for leaves of a kind, in the places of :func:`tree_leaves`."""
    from torch.utils import _pytree

    def change(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return function(leaf)
        return (
            _changed_fields(leaf, lambda value: tree_map_only(kind, function, value))
            if _is_open(leaf)
            else leaf
        )

    return _pytree.tree_map(change, data)


def _is_open(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _changed_fields(instance: Any, change: Callable[[Any], Any]) -> Any:
    """A copy with every field changed; not by ``replace``, which would run ``__post_init__`` again."""
    made = copy.copy(instance)
    for entry in dataclasses.fields(instance):
        if hasattr(instance, entry.name):
            object.__setattr__(made, entry.name, change(getattr(instance, entry.name)))
    return made
