"""``state_dict`` of optimizers of which each rank has a part."""

from __future__ import annotations

from typing import Any

import torch

from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import error_of

STRATEGIES: list[list[Any]] = [
    ["zero1"],
    ["zero1", ("half", "bf16")],
    [("zero1", {"backend": "fairscale"})],
    [("zero2", {"not_use_fsdp": True})],
]


def _ask_for_states() -> list[tuple[list[str], str, bool]]:
    found = []
    for strategy in STRATEGIES:
        result = accelerate_case(get_case("mlp"), strategy, steps=1)
        assert result.optim is not None
        assert result.dataloader is not None
        for batch in result.dataloader:
            result.train_step(batch)
        said = error_of(result.optim.state_dict)
        optimizer: Any = getattr(result.optim, "inner", result.optim)
        optimizer.consolidate_state_dict(0)
        whole = not torch.distributed.get_rank() and bool(result.optim.state_dict()["state"])
        found.append(([kind.__name__ for kind in type(optimizer).__mro__], said, whole))
    return found


def test_it_names_what_saves_them_until_it_is_put_together() -> None:
    names = ["ZeroRedundancyOptimizer"] * 2 + ["OSS"] * 2
    for rank, asked in enumerate(run_ranks(_ask_for_states, 2)):
        assert all(name in kinds for name, (kinds, _, _) in zip(names, asked, strict=True))
        assert all(said.startswith("CheckpointError:") for _, said, _ in asked)
        assert all("atorch_ns.checkpoint.save" in said for _, said, _ in asked)
        assert all(whole == (rank == 0) for _, _, whole in asked)
