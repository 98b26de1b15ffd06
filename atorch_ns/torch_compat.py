"""Every private name of torch that this package uses, each behind one function.

``tests/test_torch_compat.py`` says when torch moves one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import ShardingStrategy


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All dimensions of ``mesh`` as one dimension called ``name`` (``DeviceMesh._flatten``)."""
    return mesh._flatten(name)


def checkpoint_wrapper(module: nn.Module, checkpoint_fn: Callable[..., Any]) -> nn.Module:
    """``module`` in torch's wrapper that calls it through ``checkpoint_fn`` and keeps parameter names."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as implementation

    return implementation.CheckpointWrapper(module, checkpoint_fn=checkpoint_fn)


def unwrap_checkpoint(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper; any other module as it is."""
    children = module._modules  # of a TorchScript module, it is no dictionary and has no get()
    inner = children["_checkpoint_wrapped_module"] if "_checkpoint_wrapped_module" in children else None  # noqa: SIM401
    return module if inner is None else inner


WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
"""What torch's wrappers insert into the names of the parameters inside them."""


def plain_name(name: str) -> str:
    """A dotted path as the model without inner wrappers has it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "").removesuffix("." + prefix.removesuffix("."))
    return name


def found_inf_tensors(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags, one per device, that ``scaler.unscale_(optimizer)`` has just set; 0-d or 1-element float."""
    state = scaler._per_optimizer_states[id(optimizer)]
    return list(state["found_inf_per_device"].values())


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
