"""Training by parallelize held against plain PyTorch in one process, on the same samples of all scale units."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import ComputeConfig, build_optimizer, merge_state_dicts, parallelize
from tests.operators.networks import VOCABULARY, network

STEPS = 5
MICROS = 4
CLIP = 0.5


class EndToEndMLP(nn.Module):
    """The example of the specification, with a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(8)])
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.loss_fn = nn.BCELoss()

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.loss_fn(torch.sigmoid(x), data["target"])
        return loss


class EndToEnd(nn.Module):
    """A model of transformers that takes one sample and gives the loss first, and the scores."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, _ = network(name)
        for module in self.model.modules():  # masks of divided tensors are other masks
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in ("attention_dropout", "dropout"):  # of functions
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)

    def forward(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(**data)
        return found.loss, found.logits


def sample_of(name: str, seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    if name == "mlp":
        return {
            "data": torch.randn(rows, 16, generator=chance),
            "target": torch.rand(rows, 16, generator=chance),
        }
    ids = torch.randint(3, VOCABULARY, (2, rows, 8), generator=chance)
    return {"input_ids": ids[0], "labels": ids[1]}


def module_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    return EndToEndMLP() if name == "mlp" else EndToEnd(name)


def loss_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


@functools.cache
def reference(
    name: str, units: int, steps: int = STEPS
) -> tuple[list[float], list[float], dict[str, Any], dict[str, Any]]:
    """Losses of all samples, norms, weights and optimizer states of one process."""
    model = module_of(name)
    optimizer = adam(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        found = [loss_of(model(sample_of(name, seed))) for seed in seeds(step, units)]
        torch.stack(found).sum().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(loss) for loss in found]
    return losses, norms, model.state_dict(), optimizer.state_dict()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)  # of 1e-8, noise of a zero gradient is a step


def seeds(step: int, units: int) -> list[int]:
    return [step * 100 + number for number in range(units * MICROS)]


def made(
    name: str,
    policy: str | Callable[..., Any],
    config: ComputeConfig,
    folder: str | None = None,
    **arguments: Any,
) -> Any:
    return parallelize(
        module_of(name),
        {"data": sample_of(name, 0)},
        policy,
        config,
        gen_savedir=folder or tempfile.mkdtemp(),
        **arguments,
    )


def rank_and_unit(config: ComputeConfig) -> tuple[int, int]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank, rank // config.plan_ngpus


def trained(
    name: str,
    policy: str | Callable[..., Any],
    plan: int,
    pas_config: dict[str, Any] | None = None,
    steps: int = STEPS,
    **fields: Any,
) -> tuple[list[float], list[float], dict[str, Any], dict[str, Any] | None]:
    """As :func:`reference`, of the losses those of this rank's unit; state dicts merged from all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = ComputeConfig(plan, ranks, use_end2end=True, pas_config=pas_config or {}, **fields)
    module = made(name, policy, config)
    optimizer: Any = build_optimizer(module, adam)
    _, unit = rank_and_unit(config)
    losses, norms = [], []
    for step in range(steps):
        own = seeds(step, config.num_units)[unit * MICROS : (unit + 1) * MICROS]
        outputs = module.train_step([sample_of(name, seed) for seed in own])
        norms.append(float(optimizer.clip_gnorm(CLIP)))
        optimizer.step()
        losses += [float(loss_of(output)) for output in outputs]
    weights, states = merged(module, optimizer)
    return losses, norms, weights, states


def merged(module: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The state dicts of all ranks as one."""
    own = (module.state_dict(), optimizer.state_dict())
    every = [own]
    if dist.is_initialized():
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
    return merge_state_dicts([one for one, _ in every], [one for _, one in every])


def check(name: str, runs: list[Any], plan: int, tolerance: float) -> None:
    """Holds what all ranks have trained against one process."""
    units = len(runs) // plan
    losses, norms, weights, states = reference(name, units)
    for rank, (own, own_norms, own_weights, own_states) in enumerate(runs):
        unit = rank // plan
        expected = [
            losses[step * units * MICROS + unit * MICROS + micro]
            for step in range(STEPS)
            for micro in range(MICROS)
        ]
        assert max(abs(a - b) for a, b in zip(own, expected, strict=True)) < tolerance
        assert max(abs(a - b) / b for a, b in zip(own_norms, norms, strict=True)) < tolerance * 10
        assert list(own_weights) == list(weights)
        for key, value in weights.items():
            assert float((own_weights[key] - value).abs().max()) < tolerance, key
        assert own_states["state"].keys() == states["state"].keys()
        for index, values in states["state"].items():
            assert torch.allclose(own_states["state"][index]["exp_avg"], values["exp_avg"], atol=tolerance)
