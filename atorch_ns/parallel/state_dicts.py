"""State dicts of parallel modules: merged to whole ones, loaded from these under any plan, and deduped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.parallel.module import parallel_modules
from atorch_ns.parallel.pieces import PIECES, PieceLocation, assemble, broadcast_in_strides
from atorch_ns.text import first_few

StateDict = dict[str, Any]


def merge_state_dicts(
    module_state_dicts: Sequence[Mapping[str, Any]],
    optimizer_state_dicts: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[StateDict, StateDict | None]:
    """Merges state dicts of all ranks to whole ones, for the plain module and an optimizer of its parameters.

    No process group is needed. Names and order are the plain module's.

    Args:
        module_state_dicts: ``module.state_dict()`` of all ranks, at least of the first unit's, in any order.
        optimizer_state_dicts: ``optimizer.state_dict()`` of the same ranks, for any optimizer.

    Raises:
        ValueError: if ranks hold different values of one parameter, or pieces are missing.
        InputError: if the state dicts are not those of parallel modules, or one rank's appears twice.
    """
    if isinstance(module_state_dicts, Mapping) or not module_state_dicts:
        raise InputError(
            "merge_state_dicts needs a list of the state dicts of all ranks, but got "
            f"{'one alone' if module_state_dicts else 'none'}."
        )
    module_state_dicts = list(module_state_dicts)
    ranks = [_pieces_by_prefix(state) for state in module_state_dicts]
    numbers = [next(iter(marks.values()))["rank"] for marks in ranks]
    if len(set(numbers)) < len(numbers):
        raise InputError(f"the state dicts are from ranks {numbers}: give exactly one from each rank.")
    plan = next(iter(ranks[0].values()))["config"]["plan_ngpus"]
    first_unit = min(numbers) // plan  # the unit whose buffers are taken
    parts: dict[str, list[tuple[int, torch.Tensor, PieceLocation | None]]] = {}
    others: StateDict = {}
    for number, marks, state in zip(numbers, ranks, module_state_dicts, strict=True):
        places = {
            f"{prefix}{name}": PieceLocation(tuple(shape), tuple(offset))
            for prefix, mark in marks.items()
            for name, (shape, offset) in mark["places"].items()
        }
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                # Units have buffers of their own.
                if name in places or number // plan == first_unit or name not in parts:
                    parts.setdefault(name, []).append((number, value, places.get(name)))
            elif not name.endswith(PIECES):
                others.setdefault(name, value)
    whole = {name: assemble(name, pieces) for name, pieces in parts.items()}
    whole |= others
    if list(ranks[0]) == [""]:  # the module itself is parallel
        missing = [name for name in ranks[0][""]["names"] if name not in whole]
        if missing:
            raise ValueError(
                f"Pieces are missing: no rank has {first_few(missing, 4)}. Give the state dicts of all ranks of a scale unit."
            )
        whole = {name: whole.pop(name) for name in ranks[0][""]["names"] if name in whole} | whole
    return whole, _merged_optimizer(optimizer_state_dicts, numbers)


def _merged_optimizer(states: Sequence[Mapping[str, Any]] | None, ranks: Sequence[int]) -> StateDict | None:
    if states is None:
        return None
    states = [state for state in states if state is not None]
    if len(states) != len(ranks) or any(PIECES not in state for state in states):
        raise InputError(
            "optimizer_state_dicts must be from the same ranks, by optimizers of build_optimizer."
        )
    parts: dict[str, dict[str, list[tuple[int, torch.Tensor, PieceLocation | None]]]] = {}
    plain: dict[str, StateDict] = {}
    groups: list[set[str]] = [set() for _ in states[0]["param_groups"]]  # names of each group, on any rank
    for state in states:
        mark = state[PIECES]
        flat = [name for group in mark["names"] for name in group]
        for group_names, members in zip(groups, mark["names"], strict=True):
            group_names |= set(members)
        for index, values in state["state"].items():
            for key, value in values.items():
                name = flat[index]
                if not isinstance(value, torch.Tensor):
                    plain.setdefault(name, {})[key] = value
                    continue
                region = mark["places"].get(f"{name}/{key}")
                where = None if region is None else PieceLocation(tuple(region[0]), tuple(region[1]))
                parts.setdefault(name, {}).setdefault(key, []).append((mark["rank"], value, where))
    # Parameters in the order of the plain module, group by group, as one optimizer would number them.
    order = states[0][PIECES]["order"]  # of the plain module
    names = [[name for name in order if name in group] for group in groups]
    index_of = {name: index for index, name in enumerate(name for group in names for name in group)}
    entries = {
        index: {
            **plain.get(name, {}),
            **{key: assemble(f"{name}/{key}", pieces) for key, pieces in parts.get(name, {}).items()},
        }
        for name, index in index_of.items()
        if name in parts or name in plain
    }
    param_groups = [
        {**group, "params": [index_of[n] for n in members]}
        for group, members in zip(states[0]["param_groups"], names, strict=True)
    ]
    return {"state": entries, "param_groups": param_groups, PIECES: {"names": names}}


def load_merged_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Loads whole state dicts, merged or the plain module's. Each rank takes its parts.

    Args:
        module: a parallel module, or a module with some in it.
        optimizer: of :func:`~atorch_ns.build_optimizer`.
        device: device for tensors before they are divided. By default they stay where they are.

    Raises:
        InputError: if only one of optimizer and its state dict is given.
    """
    if (optimizer is None) != (optimizer_state_dict is None):
        raise InputError("give optimizer and optimizer_state_dict together.")
    module.load_state_dict(_to_device(module_state_dict, device))
    if optimizer is not None:
        assert optimizer_state_dict is not None
        optimizer.load_state_dict(_to_device(optimizer_state_dict, device))


load_merged_state_dicts = load_merged_state_dict
"""The specification spells it both ways."""


def deduped_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[StateDict | None, StateDict | None]:
    """This rank's state dicts without tensors held by an earlier rank. Together they are one full copy.

    Returns:
        The module's and the optimizer's state dict, or ``None`` for none.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    keeps = rank < _rank_stride(module)  # later ranks hold the same
    inside = {path for path, _ in _find_parallel_modules(module)}
    state = module.state_dict()
    own_state = {
        name: value
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or (keeps and (rank == 0 or _is_inside(name, inside)))
    }
    if optimizer is None:
        return own_state, None
    opt_state = optimizer.state_dict()
    return own_state, opt_state if keeps else {**opt_state, "state": {}}


def load_deduped_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Loads :func:`deduped_state_dict` under the same plan. Ranks send omitted tensors. Collective.

    Raises:
        InputError: on all ranks, if the state dicts of one lack tensors that it must send.
    """
    state = module.state_dict()
    entries = _to_device(module_state_dict or {}, device)
    inside = {path for path, _ in _find_parallel_modules(module)}
    stride = _rank_stride(module)

    def check_entries() -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        lacking = [
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
            and rank < (stride if _is_inside(name, inside) else 1)
            and name not in entries
        ]
        if lacking:
            raise InputError(
                f"the state dict of rank {rank} lacks {first_few(lacking, 4)}: give this rank's deduped_state_dict result."
            )
        if optimizer is not None and PIECES not in (optimizer_state_dict or {}):
            raise InputError("optimizer_state_dict must be what deduped_state_dict made for this optimizer.")

    Cluster.detect().agree(check_entries, what="loading a deduped state dict")
    # Parts come from the first rank that holds the same ones, everything else from rank 0.
    for mine, interval in ((True, stride), (False, 1)):
        names = [
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and _is_inside(name, inside) is mine
        ]
        buffers = [
            entries[name].to(state[name].device) if name in entries else torch.empty_like(state[name])
            for name in names
        ]
        if dist.is_initialized():
            broadcast_in_strides(buffers, interval)
        state.update(zip(names, buffers, strict=True))
    module.load_state_dict(state)
    if optimizer is None:
        return
    assert optimizer_state_dict is not None
    optimizer.load_state_dict(_optimizer_states(optimizer, _to_device(optimizer_state_dict, device), stride))


def _optimizer_states(optimizer: torch.optim.Optimizer, state_dict: StateDict, stride: int) -> StateDict:
    if not dist.is_initialized() or stride >= dist.get_world_size():
        return state_dict
    rank = dist.get_rank()
    descriptions = {  # shapes and dtypes, of which ranks without states make buffers
        index: {
            key: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
        for index, values in state_dict["state"].items()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, descriptions)
    specs: dict[int, dict[str, Any]] = every[rank % stride]  # of the rank that holds the same pieces
    like = next(p for group in optimizer.param_groups for p in group["params"])
    states = {
        index: {
            key: state_dict["state"][index][key].to(like.device)
            if rank < stride and isinstance(state_dict["state"][index][key], torch.Tensor)
            else torch.empty(spec[0], dtype=spec[1], device=like.device)
            if isinstance(spec, tuple)
            else spec
            for key, spec in values.items()
        }
        for index, values in specs.items()
    }
    tensors = [
        value for values in states.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    broadcast_in_strides(tensors, stride)
    return {**state_dict, "state": states}


def broadcast_weights(module: nn.Module, stride_size: int | None = None) -> None:
    """Copies weights and buffers from rank ``rank % stride_size`` (default ``plan_ngpus``). Collective."""
    if not dist.is_initialized():
        return
    stride = stride_size or next(part.compute_config.plan_ngpus for _, part in _find_parallel_modules(module))
    if not isinstance(stride, int) or stride < 1 or dist.get_world_size() % stride:
        raise InputError(f"stride_size={stride} does not divide the {dist.get_world_size()} ranks.")
    has_parts = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if has_parts and any(part.compute_config.use_zero for _, part in _find_parallel_modules(module)):
        raise InputError("with use_zero every unit holds its own shards: load the weights on all ranks.")
    broadcast_in_strides([*module.parameters(), *module.buffers()], stride)


def _pieces_by_prefix(state: Mapping[str, Any]) -> dict[str, Any]:
    marks = {name.removesuffix(PIECES): value for name, value in state.items() if name.endswith(PIECES)}
    if not marks:
        raise InputError(
            "merge_state_dicts needs state dicts of parallel modules, but this one contains none."
        )
    return marks


def _find_parallel_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    modules = parallel_modules(module)
    if not modules:
        raise InputError("this module contains no parallel module.")
    yield from modules.items()


def _is_inside(name: str, paths: set[str]) -> bool:
    return any(not path or name.startswith(f"{path}.") for path in paths)  # "" is the root


def _rank_stride(module: nn.Module) -> int:
    # Ranks that hold different pieces: those of a unit, or with use_zero those of a group of units.
    _, part = next(_find_parallel_modules(module))
    config: ComputeConfig = part.compute_config
    return config.runtime_ngpus // config.zero_ngroups if config.use_zero else config.plan_ngpus


def _to_device(state: Any, device: str | torch.device | None) -> Any:
    if isinstance(state, torch.Tensor):
        return state if device is None else state.to(device)
    if isinstance(state, Mapping):
        return {key: _to_device(value, device) for key, value in state.items()}
    return [_to_device(value, device) for value in state] if isinstance(state, list) else state
