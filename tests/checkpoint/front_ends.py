"""The four front ends on one model of Hugging Face: each trains some steps, saves, and goes on from what any other has saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

from atorch_ns import ComputeConfig, auto_accelerate, build_optimizer, checkpoint, parallelize
from atorch_ns.job import Result
from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.strategy import MODEL_AXES, Strategy
from atorch_ns.trainer import Trainer

VOCABULARY, TOKENS, BATCH, SAMPLES = 64, 8, 4, 12
SAVED_AT, STEPS = 2, 4
"""Of three steps to an epoch: a run is saved inside the first and ends inside the second."""
ADAMW = {"lr": 1e-2, "weight_decay": 0.0}


def model() -> GPT2LMHeadModel:
    """The same weights each time; no dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": TOKENS}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts by their number. The first token is not predicted, and transformers' Trainer would count it if it had a label."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": ids, "labels": torch.cat([torch.tensor([-100]), ids[1:]])}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step."""
    places = [(step * BATCH + place) % SAMPLES for place in range(BATCH)]
    return torch.utils.data.default_collate([Samples()[place] for place in places])


def own_loss(_: Any, output: Any) -> torch.Tensor:
    """The model's own loss."""
    loss: torch.Tensor = output.loss
    return loss


def by_auto_accelerate(folder: Path, steps: int, begin: Path | None, strategy: Any = ("fsdp",)) -> Result:
    """A script: whole steps of ``result.train_step`` over its loader."""
    _, result, _ = auto_accelerate(
        model(),
        torch.optim.AdamW,
        Samples(),
        own_loss,
        model_input_format="unpack_dict",
        optim_args=ADAMW,
        dataloader_args={"batch_size": BATCH, "shuffle": False},
        load_strategy=strategy if isinstance(strategy, Path) else list(strategy),
        save_strategy_to_file=folder / "strategy.json",
        verbose=False,
    )
    assert result is not None
    if begin is not None:
        checkpoint.load(begin, result)
    while result.train_step.num_steps < steps:
        for batch in result.dataloader:
            result.train_step(batch)
            if result.train_step.num_steps == steps:
                break
    checkpoint.save(folder, result)
    return result


def _sizes(strategy: Path) -> tuple[int, bool]:
    """The ranks that a strategy file divides a model over, and whether it makes a pipeline of them."""
    steps = {step.name: step.config for step in Strategy.load(strategy)}
    mesh: Any = steps.get("parallel_mode") or {"axes": []}
    return math.prod(size for name, size in mesh["axes"] if name in MODEL_AXES), "pipeline_parallel" in steps


def by_parallelize(folder: Path, steps: int, begin: Path | None, strategy: Any = "autodist") -> Result:
    """A module in a loop of one's own: forward, backward, step; with a pipeline, a list of micro-batches."""
    degree, staged = (2, False) if strategy == "autodist" else _sizes(strategy)
    module: Any = parallelize(
        model(),
        batch_of(0),
        str(strategy),
        ComputeConfig(degree, 2, use_end2end=staged),
        gen_savedir=str(folder.parent),
        reuse="moo",
    )
    optimizer = build_optimizer(module, torch.optim.AdamW, **ADAMW)
    first = 0 if begin is None else checkpoint.load(begin, module.result)["step"]
    unit, units = torch.distributed.get_rank() // degree, 2 // degree
    for step in range(first, steps):
        batch = batch_of(step)
        if staged:
            rows = range(BATCH)
            module.train_step([{name: all_[row : row + 1] for name, all_ in batch.items()} for row in rows])
        else:
            module(**{name: all_.chunk(units)[unit] for name, all_ in batch.items()}).loss.backward()
        optimizer.sync_shard_grad()
        optimizer.scale_grads(1 / (BATCH if staged else units))
        optimizer.step()
        optimizer.zero_grad()
    epoch, batches = divmod(steps, SAMPLES // BATCH)
    position = {"epoch": epoch, "batches": batches, "global_batch_size": BATCH}
    checkpoint.save(folder, module.result, step=steps, position=position)
    module.result.strategy.save(folder / "strategy.json")
    return module.result


def by_trainer(folder: Path, steps: int, begin: Path | None, strategy: Any = "dp") -> Result:
    """A configuration, as a YAML file has it."""
    trainer = Trainer(
        train_args={
            "pas_policy": str(strategy),
            "model": {"type": model},
            "optimizer": {"type": torch.optim.AdamW, "args": ADAMW},
            "dataset": {"type": Samples},
            "dataset_sampler": {"type": DistributedSampler, "train_args": {"shuffle": False}},
            "global_batch_size": BATCH,
            "max_train_steps": steps,
            "enable_progress_bar": False,
            "gen_savedir": str(folder.parent),
            "checkpoint": {"save_dir": str(folder), "resume_from": None if begin is None else str(begin)},
            "save_strategy_to_file": str(folder / "strategy.json"),
        }
    )
    trainer.run()
    return trainer.result


def by_merak(folder: Path, steps: int, begin: Path | None, strategy: Any = None) -> Result:
    """Hugging Face's Trainer, over two stages."""
    init(**({"pp": 2} if strategy is None else {}))
    args = MerakArguments(
        output_dir=str(folder),
        strategy_file=None if strategy is None else str(strategy),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=BATCH
        if strategy is None
        else BATCH // 2,  # of 1 data rank, or of 2 processes
        max_steps=steps,
        learning_rate=ADAMW["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save=True,
        save_steps=steps,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = MerakTrainer(model(), args, train_dataset=Samples())
    trainer.train(resume_from_checkpoint=None if begin is None else str(begin))
    assert trainer.lr_scheduler.last_epoch == steps  # also where the checkpoint has no scheduler
    trainer.result.strategy.save(folder / "strategy.json")
    return trainer.result


FrontEnd = Callable[..., Result]
FRONT_ENDS: dict[str, FrontEnd] = {
    "auto_accelerate": by_auto_accelerate,
    "parallelize": by_parallelize,
    "Trainer": by_trainer,
    "MerakTrainer": by_merak,
}
