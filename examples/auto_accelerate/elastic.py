"""Trains through the loss of a machine: the group starts again with those that are left.

    torchrun --nnodes=2:3 --nproc-per-node=1 --max-restarts=3 \
        --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job examples/auto_accelerate/elastic.py

on each of two or three machines that see the same folder. When one is lost, torchrun ends the processes of the
others and starts them anew, and this script runs from its beginning: the strategy is fitted to the number of
processes that there are now, the checkpoint is loaded under it, and training goes on with the next global batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import is_first_process, parse_strategy, say, use_same_seed
from torch import nn
from torch.utils.data import TensorDataset

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.tracking import JsonlTracker


class Product(nn.Module):
    """Learns the product of two numbers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, factors: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """``[B, 2]`` to ``[B, 1]``; what is to be learnt is not looked at."""
        output: torch.Tensor = self.layers(factors)
        return output


def read_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--save", type=Path, default=Path("runs/elastic"), help="folder that all machines see"
    )
    parser.add_argument("--strategy", default="fsdp", help="methods with commas between them, or a file")
    parser.add_argument("--steps", type=int, default=100, help="global batches, over all restarts")
    parser.add_argument("--batchsize", type=int, default=12, help="a multiple of every possible world size")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after a step, to watch")
    return parser.parse_args()


def train(result: Any, options: argparse.Namespace) -> None:
    """Trains until ``--steps`` global batches have been trained on, by all runs together."""
    while True:
        for batch in result.dataloader:
            if result.train_step.num_steps >= options.steps:
                return
            result.train_step(batch)
            if result.train_step.num_steps % options.save_every == 0:
                checkpoint.save(options.save, result)
            time.sleep(options.pause)


def main() -> None:
    """Begins, or goes on where the last checkpoint was saved."""
    options = read_options()
    use_same_seed(0)
    factors = torch.randn(240, 2)
    _, result, _ = auto_accelerate(
        Product(),
        optim_func=torch.optim.AdamW,
        optim_args={"lr": 1e-2},
        dataset=TensorDataset(factors, factors.prod(-1, keepdim=True)),
        # A short last batch is dropped: so the global batches are the same on any number of ranks.
        dataloader_args={"batch_size": options.batchsize, "shuffle": True, "drop_last": True},
        loss_func=lambda batch, output: nn.functional.mse_loss(output, batch[1]),
        model_input_format="unpack_sequence",
        load_strategy=parse_strategy(options.strategy),
    )
    assert result is not None
    loaded = checkpoint.resume(options.save, result)
    mesh = result.job.mesh
    say(f"{result.job.cluster.world_size} process(es), {dict(mesh.axes) if mesh else 'no mesh'}")
    if loaded is not None:
        say(f"goes on after step {loaded['step']}, saved by {loaded['world_size']} process(es)")
    with result.track(JsonlTracker(options.save / "metrics.jsonl"), every=1) as tracking:
        if is_first_process():
            tracking.log({"run/world_size": result.job.cluster.world_size}, result.train_step.num_steps + 1)
        train(result, options)
    say(f"trained on {result.train_step.num_steps} global batches")


if __name__ == "__main__":
    main()
