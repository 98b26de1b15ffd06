"""Parallel modules inside of a Trainer's model: each keeps its weights, and the whole trains as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from atorch_ns.errors import InputError
from atorch_ns.testing.workers import run_ranks
from atorch_ns.trainer import (
    CheckpointConfig,
    ComputeConfig,
    DatasetConfig,
    ModelConfig,
    ModuleParallelizeConfig,
    OptimizerConfig,
    OptionalComputeConfig,
    Trainer,
    TrainerArgs,
)
from tests.trainer.parts import TOKENS, VOCABULARY, Dataset
from tests.trainer.test_runs import args_of, micro_batches, weights


class Heavy(nn.Module):
    """Two layers, with a dimension of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(x))) * scale
        return found


class Whole(nn.Module):
    """Two heavy modules between layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Heavy(), Heavy()])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(data["ids"])
        for block in self.blocks:
            x = block(x, scale=0.5)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), data["labels"].flatten())


def dummies(args: TrainerArgs) -> dict[str, Any]:
    return {"x": torch.zeros(args.micro_batch_size, TOKENS, 16)}


def plain() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = Whole()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [*micro_batches(0), *micro_batches(1)]
    for window in (batches[:4], batches[4:8], batches[8:10], batches[10:14], batches[14:18]):
        optimizer.zero_grad()
        torch.stack([model(batch) for batch in window]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


def trained(folder: str, plan: int, steps: int, resume: str | None, **fields: Any) -> dict[str, Any]:
    given = {"type": Heavy, "pas_policy": "tp" if plan > 1 else "dp", **fields}
    args = args_of(
        folder,
        plan,
        model=ModelConfig(type=Whole, parallel_modules=[ModuleParallelizeConfig(**given)]),
        optimizer=OptimizerConfig(type=torch.optim.Adam, args={"lr": 1e-2}, clip_gnorm=0.5),
        dataset=DatasetConfig(type=Dataset, train_args={"size": 20}),
        checkpoint=CheckpointConfig(save_dir=f"{folder}/checkpoints", resume_from=resume),
        max_train_steps=steps,
    )
    trainer = Trainer(train_args=args)
    trainer.run()
    return {"loss": trainer.train_status.train_loss, "model": type(trainer.model.blocks[0]).__name__}  # type: ignore[index, union-attr]


def on_ranks(ranks: int, *given: Any) -> list[dict[str, Any]]:
    return [trained(*given)] if ranks == 1 else run_ranks(trained, ranks, args=given)


@pytest.mark.parametrize(("ranks", "plan"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_the_whole_trains_as_in_one_process(tmp_path: Path, ranks: int, plan: int) -> None:
    found = on_ranks(ranks, str(tmp_path), plan, 5, None)
    assert {one["model"] for one in found} == {"ParallelHeavy"}
    state = weights(tmp_path)
    for name, value in plain().items():
        assert torch.allclose(state[name], value, atol=2e-5), name


def test_it_resumes_under_another_plan(tmp_path: Path) -> None:
    on_ranks(2, str(tmp_path), 2, 2, None)
    on_ranks(1, str(tmp_path), 1, 5, "last")
    state = weights(tmp_path)
    for name, value in plain().items():
        assert torch.allclose(state[name], value, atol=2e-5), name


def sharded(folder: str) -> None:
    trained(
        folder,
        1,
        5,
        None,
        compute_config=OptionalComputeConfig(use_zero=True, use_async_reducer=True),
        forward_args_gen_fn=dummies,
        instance_name="mine",
    )


def test_settings_of_a_module_stand_in_the_place_of_the_trainers(tmp_path: Path) -> None:
    run_ranks(sharded, 2, args=(str(tmp_path),))
    assert any("mine" in str(path) for path in tmp_path.rglob("plan.json"))
    state = weights(tmp_path)
    for name, value in plain().items():
        assert torch.allclose(state[name], value, atol=2e-5), name


class Other(nn.Module):
    """No part of the model."""


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"type": Other}, "the model has no module of Other"),
        ({"tracing_from_weights_prefix": "blocks.0"}, "which is not set"),
        ({"pas_policy": "auto"}, "a strategy is for the whole model"),
    ],
)
def test_what_cannot_be_parallelized(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        trained(str(tmp_path), 1, 1, None, **fields)


def test_weights_of_a_module_come_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(7)
    torch.save(Heavy().state_dict(), tmp_path / "heavy.pt")
    one = trained(str(tmp_path / "a"), 1, 1, None, tracing_from_weights=str(tmp_path / "heavy.pt"))
    two = trained(str(tmp_path / "b"), 1, 1, None)
    assert one["loss"] != two["loss"]


def test_plans_of_parallel_modules_are_made_alone(tmp_path: Path) -> None:
    args = args_of(
        str(tmp_path),
        run_mode="compile",
        model=ModelConfig(
            type=Whole, parallel_modules=[ModuleParallelizeConfig(type=Heavy, pas_policy="dp")]
        ),
    )
    Trainer(train_args=args).run()
    assert list(tmp_path.rglob("plan.json"))
    args.model.parallel_modules[0].pas_policy = "pp"
    args.compute_config = ComputeConfig(2, 2, use_end2end=True)
    with pytest.raises(InputError, match="set use_end2end=True"):
        Trainer(train_args=args).run()


class Llama(nn.Module):
    """A Llama as users have it, with its cache on by default."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        self.llama = LlamaForCausalLM(config)

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.llama(input_ids=data["ids"], labels=data["labels"]).loss
        return found


def llama(folder: str, plan: int, kind: type | None) -> float:
    parts = [] if kind is None else [ModuleParallelizeConfig(type=kind)]
    args = args_of(
        folder,
        plan,
        pas_policy="autodist" if plan > 1 else "dp",
        model=ModelConfig(type=Llama, parallel_modules=parts),
        dataset=DatasetConfig(type=Dataset, train_args={"size": 20}),
    )
    trainer = Trainer(train_args=args)
    trainer.run()
    assert trainer.train_status.train_loss is not None
    return trainer.train_status.train_loss


@pytest.mark.parametrize("kind", [LlamaDecoderLayer, LlamaMLP])
def test_layers_of_transformers_take_what_their_model_gives_them(tmp_path: Path, kind: type) -> None:
    wanted = llama(str(tmp_path / "whole"), 1, None)
    for found in run_ranks(llama, 2, args=(str(tmp_path / "parts"), 2, kind), timeout_s=120):
        assert found == pytest.approx(wanted, abs=2e-5)
