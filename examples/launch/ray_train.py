"""Trains on the workers of a Ray cluster: ``python examples/launch/ray_train.py``.

Ray Train starts the workers and their process group; ``auto_accelerate`` takes both as they are. When a worker is lost,
Ray starts all of them again, and they go on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """What every worker does."""
    import ray.train
    import torch
    from torch import nn

    from atorch_ns import auto_accelerate, checkpoint
    from atorch_ns.tracking import JsonlTracker

    torch.manual_seed(0)
    inputs = torch.randn(240, 16)
    _, result, _ = auto_accelerate(
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        optim_func=torch.optim.AdamW,
        optim_args={"lr": 1e-2},
        dataset=inputs,
        dataloader_args={"batch_size": 12, "shuffle": True, "drop_last": True},
        loss_func=lambda batch, output: nn.functional.mse_loss(output, batch.abs()),
        load_strategy=["fsdp"],
    )
    assert result is not None
    folder = Path(config["save"])
    checkpoint.resume(folder / "checkpoints", result)  # does nothing where nothing was saved yet
    with result.track(JsonlTracker(folder / "metrics.jsonl"), every=5):
        for batch in result.dataloader or ():
            loss = result.train_step(batch)
            if result.train_step.num_steps % 5 == 0:
                checkpoint.save(folder / "checkpoints", result)
                ray.train.report({"step": result.train_step.num_steps, "loss": float(loss)})


def main() -> None:
    """Starts the workers and waits for them."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, default=Path("runs/ray"), help="folder that all workers see")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument(
        "--max-failures", type=int, default=3, help="how often lost workers are started again"
    )
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"save": str(options.save.absolute())},
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu),
        run_config=RunConfig(
            storage_path=str(options.save.absolute() / "ray"),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
        # Ray's own choice with GPUs is NCCL alone; what ranks tell each other goes over gloo.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.use_gpu else "gloo"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
