"""A user's arguments, for tests that start no process."""

from __future__ import annotations

from typing import Any

import torch

from atorch_ns.job import Inputs
from atorch_ns.testing.models import SyntheticDataset, get_case


def case_inputs(name: str = "tied_llama", **changes: Any) -> Inputs:
    case = get_case(name)
    given: dict[str, Any] = {
        "model": case.build(),
        "optim_func": torch.optim.AdamW,
        "optim_args": {"lr": 1e-3},
        "dataset": SyntheticDataset(case, 32),
        "loss_func": case.loss_func,
        "model_input_format": case.model_input_format,
        "dataloader_args": {"batch_size": 8},
    }
    return Inputs(**{**given, **changes})
