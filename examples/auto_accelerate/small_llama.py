"""The job of the demo: a Llama that finds its strategy, or learns English text byte by byte with one.

::

    torchrun --standalone --nproc-per-node=2 examples/auto_accelerate/small_llama.py find --then-train
    torchrun --standalone --nproc-per-node=2 examples/auto_accelerate/small_llama.py train --strategy zero1,checkpoint

Both take a memory limit: a search keeps to it, and training fails beyond it. Training writes down what it took, and the
weights that it ended with.

Legend: T bytes of a window, V vocabulary (256 byte values).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import is_first_process, parse_strategy, use_same_seed
from progress import TrainingProgress
from rich.console import Console
from text import VOCABULARY_SIZE, ByteWindows, english_text
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from atorch_ns import Result, auto_accelerate
from atorch_ns.checkpoint import export_state_dict
from atorch_ns.job import limit_memory
from atorch_ns.report.pictures import save_pictures

MIB = 2**20
LEARNING_RATE = 1e-3
# Left out of the search: precisions, since both acts are to give the same losses, and two methods whose trials take
# longer than such a short search has.
EXCLUDED = ["precision", "compile", "pipeline_parallel"]
# Planning operators takes more memory than a limit of this size leaves.
EXCLUDED_UNDER_LIMIT = ["operator_parallel"]


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Find a strategy for a small Llama, or train it with one.")
    parser.add_argument("what", choices=("find", "train"))
    parser.add_argument("--save", type=Path, default=Path("runs/small_llama"), help="folder for what is kept")
    parser.add_argument(
        "--strategy",
        default="ddp",
        help="to train with: a strategy file, or names with commas between them, each with its config behind a colon",
    )
    parser.add_argument("--then-train", action="store_true", help="train with what was found")
    parser.add_argument(
        "--memory-limit", type=int, help="MiB that each rank may take beyond what it begins with"
    )
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds that the search may take")
    parser.add_argument("--max-trials", type=int, default=3, help="trials that the search may run")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--batchsize", type=int, default=2, help="windows in a batch of all processes")
    parser.add_argument("--seq-length", type=int, default=32, help="bytes in a window")
    return parser.parse_args()


def small_llama() -> nn.Module:
    """A Llama with 40 million parameters, in two wide layers.

    With few bytes in a batch, as in fine-tuning, a step spends its time on weights: on their gradients' way between
    processes and on the optimizer, which data parallelism repeats on every process. With few layers, processes that
    divide each of them seldom wait for each other.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=1280,
        intermediate_size=3456,
        num_hidden_layers=2,
        num_attention_heads=20,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def next_byte_loss(batch: dict[str, Tensor], output: object) -> Tensor:
    """Mean cross entropy of each byte given those before it, in nats."""
    logits = output.logits[:, :-1]  # type: ignore[attr-defined]  # [B, T - 1, V]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())


def accelerate(options: argparse.Namespace, dataset: ByteWindows, **strategy: Any) -> Result:
    """Model, optimizer, data and loss under a strategy, or under one that is searched for."""
    use_same_seed(0)
    _, result, _ = auto_accelerate(
        small_llama(),
        optim_func=torch.optim.AdamW,
        optim_args={"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1},
        dataset=dataset,
        dataloader_args={"batch_size": options.batchsize, "shuffle": True, "drop_last": True},
        loss_func=next_byte_loss,
        model_input_format="unpack_dict",
        lr_scheduler_cls=torch.optim.lr_scheduler.OneCycleLR,
        lr_scheduler_args={
            "max_lr": LEARNING_RATE,
            "total_steps": options.steps + 1,
            "pct_start": 0.1,
            "cycle_momentum": False,
        },
        max_grad_norm=1.0,
        **strategy,
    )
    assert result is not None
    return result


def find(options: argparse.Namespace) -> None:
    """Searches, and saves the strategy, the plain one that it was compared with, the report and its pictures."""
    settings: dict[str, float] = {"max_trials": options.max_trials}
    if options.memory_limit is not None:
        settings["memory_limit_gib"] = options.memory_limit / 1024
    result = accelerate(
        options,
        ByteWindows(english_text(), options.seq_length),
        excluded=EXCLUDED if options.memory_limit is None else EXCLUDED + EXCLUDED_UNDER_LIMIT,
        search=settings,
        time_limit=options.time_limit,
        save_strategy_to_file=options.save / "strategy.json",
    )
    if is_first_process():
        save_search(result, options.save)
    if options.then_train:
        run_training(options, result)
        save_weights(options, result)


def save_search(result: Result, folder: Path) -> None:
    """The report of a search, its pictures, the plain strategy, and figures of both."""
    report = result.report
    search = report.search
    assert search is not None
    assert search.winner is not None
    assert search.baseline is not None
    search.baseline.candidate.strategy.save(folder / "plain.json")
    report.save(folder / "report.html")
    save_pictures(report, folder / "pictures")
    rows = {"found": search.winner, "plain": search.baseline}
    (folder / "figures.json").write_text(json.dumps({name: figures(row) for name, row in rows.items()}))


def figures(row: Any) -> dict[str, Any]:
    """What was predicted of a candidate and measured in its trial, in seconds and bytes."""
    measured = row.trial is not None and row.trial.succeeded
    return {
        "label": row.candidate.label,
        "predicted_seconds": row.candidate.estimate.step_seconds,
        "predicted_bytes": row.candidate.estimate.peak_bytes,
        "measured_seconds": row.trial.median_seconds if measured else None,
        "measured_bytes": row.trial.max_peak_bytes if measured else None,
        "process_bytes": max(row.trial.process_bytes, default=None) if measured else None,
    }


def train(options: argparse.Namespace) -> None:
    """Trains with a strategy, or says on every rank why it cannot."""
    device = start_process_group()
    # A limit is for what training takes: data, and what is imported, are there before.
    dataset = ByteWindows(english_text(), options.seq_length)
    if options.memory_limit is None:
        result = accelerate(options, dataset, load_strategy=parse_strategy(options.strategy))
        run_training(options, result)
        save_weights(options, result)
        return
    try:
        with limit_memory(options.memory_limit * MIB, device):
            result = accelerate(options, dataset, load_strategy=parse_strategy(options.strategy))
            run_training(options, result)
        save_weights(options, result)  # whole on the first rank, which is not a part of training
    except (MemoryError, RuntimeError) as error:
        # A rank that another has left alone has lost its connection.
        ended = (
            str(error) if isinstance(error, MemoryError) else f"another rank has failed ({str(error)[:60]} …)"
        )
        print(f"rank {rank()}: {ended}", flush=True)
        save_training(options, ended=ended)


def run_training(options: argparse.Namespace, result: Result) -> None:
    """All steps, epoch after epoch; each rank writes down its losses."""
    console = Console(quiet=not is_first_process(), highlight=False, markup=False)
    progress = TrainingProgress(console, options.steps, line_every=max(1, options.steps // 5))
    train_steps(result, progress, options)
    times = result.train_step.times.summary()
    seconds = times.median_seconds if times is not None else None
    save_training(options, losses=progress.losses, step_seconds=seconds)


def save_weights(options: argparse.Namespace, result: Result) -> None:
    """The whole weights, written by the first rank."""
    weights = export_state_dict(result)
    if weights:
        torch.save(weights, options.save / "weights.pt")


def save_training(options: argparse.Namespace, **outcome: Any) -> None:
    """How training ended on this rank, as JSON."""
    options.save.mkdir(parents=True, exist_ok=True)
    outcome = {"losses": [], "step_seconds": None, "ended": "", **outcome}
    (options.save / f"training-{rank()}.json").write_text(json.dumps(outcome))


def train_steps(result: Result, progress: TrainingProgress, options: argparse.Namespace) -> None:
    """Optimizer steps, epoch after epoch."""
    assert result.dataloader is not None
    with progress:
        while True:
            for batch in result.dataloader:
                loss = result.train_step(batch)
                result.lr_scheduler.step()
                progress.advance(float(loss), options.batchsize * options.seq_length)
                if len(progress.losses) == options.steps:
                    return


def start_process_group() -> torch.device:
    """Connects the ranks, before the limit: the stacks of gloo's threads are no part of what training needs."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if "RANK" in os.environ:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
    return device


def bind_to_cores() -> None:
    """Gives this process its share of the cores for itself, as a device has compute of its own.

    Two processes on two cores are two devices of one core then. A search compares them with one process on one device.
    """
    if not hasattr(os, "sched_setaffinity"):  # Linux alone has it
        return
    cores, ranks = sorted(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if len(cores) >= ranks:
        os.sched_setaffinity(0, cores[int(os.environ.get("LOCAL_RANK", "0")) :: ranks])


def rank() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", "0"))


def main() -> None:
    """Finds or trains."""
    options = read_options()
    bind_to_cores()
    (find if options.what == "find" else train)(options)


if __name__ == "__main__":
    main()
