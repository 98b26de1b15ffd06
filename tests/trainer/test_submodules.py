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
def test_the_whole_trains_as_in_one_process(
    tmp_path: Path, ranks: int, plan: int, recwarn: pytest.WarningsRecorder
) -> None:
    found = on_ranks(ranks, str(tmp_path), plan, 5, None)
    assert not [one for one in recwarn if "num_calls" in str(one.message)], (
        "a counter of ours is not a user's"
    )
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


class Dropping(nn.Module):
    """A dimension of tokens, dropout, and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.norm = nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.drop(self.norm(self.up(x)))
        return found


class Holder(nn.Module):
    """A module that holds another one of a listed class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dropping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


class Head(nn.Module):
    """The logits."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(x)
        return found


class Mixed(nn.Module):
    """Modules of several classes; with ``tied`` the head's weight is the embedding's."""

    def __init__(self, tied: bool = False, held: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.one, self.two = Dropping(), Holder() if held else Dropping()
        self.heavy = Heavy()
        if not norm:
            self.one.norm, self.two.norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.head = Head()
        if tied:
            self.head.out.weight = self.embed.weight

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.heavy(self.two(self.one(self.embed(data["ids"]))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), data["labels"].flatten())


def mixed(
    folder: str, plan: int, steps: int, kinds: list[Any], resume: str | None = None, **model: Any
) -> Trainer:
    parts = [
        one if isinstance(one, ModuleParallelizeConfig) else ModuleParallelizeConfig(type=one)
        for one in kinds
    ]
    args = args_of(
        folder,
        plan,
        pas_policy="tp" if plan > 1 else "dp",
        model=ModelConfig(type=Mixed, args=model, parallel_modules=parts),
        dataset=DatasetConfig(type=Dataset, train_args={"size": 20}),
        checkpoint=CheckpointConfig(save_dir=f"{folder}/checkpoints", resume_from=resume),
        max_train_steps=steps,
    )
    trainer = Trainer(train_args=args)
    trainer.run()
    return trainer


def refusal(folder: str, kinds: list[Any], model: dict[str, Any]) -> str:
    try:
        mixed(folder, 1, 1, kinds, **model)
    except InputError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("kinds", "model", "named"),
    [
        (
            [ModuleParallelizeConfig(type=Head, compute_config=OptionalComputeConfig(use_zero=True))],
            {"tied": True},
            "embed.weight and head.out.weight are the same weight",
        ),
        ([Head, nn.Embedding], {"tied": True}, "the same weight in two parallel modules"),
        ([Holder, Dropping], {"held": True}, "two.inner is inside two"),
    ],
)
def test_what_parallel_modules_may_not_share(
    tmp_path: Path, kinds: list[Any], model: dict[str, Any], named: str
) -> None:
    for found in run_ranks(refusal, 2, args=(str(tmp_path), kinds, model)):
        assert named in found


def dropped(folder: str, steps: int, resume: str | None) -> float | None:
    return mixed(folder, 2, steps, [Dropping, Heavy], resume, norm=False).train_status.train_loss


def test_dropout_inside_of_parts_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    wanted = run_ranks(dropped, 2, args=(whole, 6, None))
    run_ranks(dropped, 2, args=(parts, 4, None))
    assert run_ranks(dropped, 2, args=(parts, 6, "last")) == wanted
    mine, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def masks(folder: str) -> float:
    trainer = mixed(folder, 2, 1, [Dropping], norm=False)
    kept: list[torch.Tensor] = []
    x = torch.ones(2, TOKENS, 16)
    for part in (trainer.model.one, trainer.model.two):
        part.register_forward_hook(lambda _, given, output: kept.append(output == given[0]))  # type: ignore[union-attr]
    trainer.model.train()
    trainer.model(
        {
            "ids": torch.zeros(2, TOKENS, dtype=torch.int64),
            "labels": torch.zeros(2, TOKENS, dtype=torch.int64),
        }
    )
    assert x.shape == kept[0].shape
    return float((kept[0] == kept[1]).float().mean())


def test_parts_of_one_class_draw_masks_of_their_own(tmp_path: Path) -> None:
    for same in run_ranks(masks, 2, args=(str(tmp_path),)):
        assert 0.3 < same < 0.7


def test_buffers_are_not_changed_by_looking_for_a_sample(tmp_path: Path) -> None:
    trainer = mixed(str(tmp_path), 1, 1, [Dropping])
    counts = {int(value) for name, value in trainer.model.named_buffers() if "num_batches" in name}
    assert counts == {4}


def several(folder: str) -> float | None:
    """Two classes with their states sharded, on two units of two ranks."""
    sharded = OptionalComputeConfig(use_zero=True)
    kinds = [ModuleParallelizeConfig(type=kind, compute_config=sharded) for kind in (Dropping, Heavy)]
    trainer = mixed(folder, 2, 2, kinds, norm=False)
    return trainer.train_status.train_loss


def test_several_classes_with_sharded_states(tmp_path: Path) -> None:
    found = run_ranks(several, 4, args=(str(tmp_path),), timeout_s=120)
    assert len(set(found)) == 1
    assert weights(tmp_path)["heavy.up.weight"].shape == (32, 16)


def linears(folder: str) -> float | None:
    return mixed(folder, 2, 1, [nn.Linear], norm=False).train_status.train_loss


def test_modules_of_one_class_may_have_other_shapes(tmp_path: Path) -> None:
    assert len(set(run_ranks(linears, 2, args=(str(tmp_path),), timeout_s=120))) == 1


def test_inputs_of_a_part_are_cast_to_its_precision(tmp_path: Path) -> None:
    low = {"param": "bf16", "buffer": "bf16", "input": "bf16"}
    with pytest.raises(RuntimeError, match="dtype"):  # of the head, which is given what the part computes
        mixed(str(tmp_path), 1, 1, [ModuleParallelizeConfig(type=Heavy, precision=low)])  # type: ignore[arg-type]
    trainer = mixed(str(tmp_path), 1, 1, [ModuleParallelizeConfig(type=Head, precision=low)])  # type: ignore[arg-type]
    assert trainer.model.head.out.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
