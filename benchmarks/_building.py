"""From a plain model to everything that trains, by hand and by ``auto_accelerate``.

Nothing of either side is imported before it is needed, so that a cold start can be timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["PLANS", "Plan", "build_by_hand", "build_ours", "plan_named"]

_GLOBAL_BATCH = 4
_OPTIM_ARGS: dict[str, Any] = {"lr": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is built.

    Attributes:
        name: in tables, and of the scenario whose wrapping by hand it uses.
        strategy: as ``load_strategy``.
        num_ranks: processes.
    """

    name: str
    strategy: Sequence[Any]
    num_ranks: int = 2


PLANS: tuple[Plan, ...] = (
    Plan(name="bf16 autocast, 1 process", strategy=[("amp_native", "bf16")], num_ranks=1),
    Plan(name="DDP", strategy=["ddp"]),
    Plan(name="FSDP2", strategy=["fsdp"]),
    Plan(name="FSDP2, checkpoint, bf16 autocast", strategy=["fsdp", "checkpoint", ("amp_native", "bf16")]),
)


def plan_named(name: str) -> Plan:
    """The plan of that name."""
    return next(plan for plan in PLANS if plan.name == name)


def build_by_hand(plan: Plan, model: nn.Module) -> object:
    """Wrapped model, optimizer, data loader; collective."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    from benchmarks._by_hand import SCENARIOS

    scenario = next(scenario for scenario in SCENARIOS if scenario.name == plan.name)
    wrapped = scenario.by_hand(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), **_OPTIM_ARGS)
    data = _Tokens()
    sampler: Any = DistributedSampler(data) if dist.is_initialized() else None
    per_rank = _GLOBAL_BATCH // plan.num_ranks
    loader: DataLoader[Any] = DataLoader(data, batch_size=per_rank, sampler=sampler, shuffle=sampler is None)
    return wrapped, optimizer, loader


def build_ours(plan: Plan, model: nn.Module) -> object:
    """What ``auto_accelerate`` returns; collective."""
    from atorch_ns import auto_accelerate

    return auto_accelerate(
        model,
        torch.optim.AdamW,
        _Tokens(),
        loss_func=_loss,
        model_input_format="unpack_dict",
        optim_args=_OPTIM_ARGS,
        dataloader_args={"batch_size": _GLOBAL_BATCH, "shuffle": True},
        load_strategy=list(plan.strategy),
    )


class _Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((128,), index % 100)}


def _loss(batch: Any, output: Any) -> Tensor:
    from benchmarks._llama import next_token_loss

    return next_token_loss(batch, output)
